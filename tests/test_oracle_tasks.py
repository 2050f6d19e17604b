"""Both oracle tasks: the ideal posterior has no error, cheats are told, three fits of every world are posed.

False alarms: seeds are fixed, and the ideal predictor's 800 draws miss the truth by what their number says;
the bounds are five times that.
"""

import numpy as np
import pytest
import torch
from ideal import CASES, DRAWS, each, of_run
from toys import Recorder

from bench import predictions
from bench.studies import joint, oracle, oracle_classes


@each
def test_the_ideal_posterior_has_no_error(kind):
    make, ideal = CASES[kind]
    task = make()
    scores = task.score(of_run(task, ideal()))
    assert scores["epistemic_error"] < 0.02
    assert scores["aleatoric_error"] < 0.02
    assert scores["epistemic_correlation"] > 0.98
    assert scores["aleatoric_correlation"] > 0.85  # of few labels the noise is told to be alike everywhere
    assert scores["disentanglement_error"] < 0.05
    if kind == "numbers":
        variance = task.truth.variance[0].mean()
        assert scores["excess_risk"] == pytest.approx(variance, rel=0.6)  # one world, 100 dependent inputs
    assert 0 < scores["excess_log_loss"] < 0.6


@each
def test_swapped_parts_fail(kind):
    """A method whose draws are noise, and whose noise is its ignorance."""
    make, ideal = CASES[kind]
    task = make()
    arrays = dict(ideal())
    if kind == "numbers":
        mean, variance = (arrays[n].astype(np.float64) for n in ("mean", "variance"))
        centre, spread = mean.mean(1, keepdims=True), mean.var(1, keepdims=True)
        g = np.random.default_rng(1)
        arrays["mean"] = centre + np.sqrt(variance) * g.standard_normal(mean.shape)
        arrays["variance"] = spread
        arrays["moved_parts"] = arrays["moved_parts"][:, ::-1]
    else:
        log_probs = arrays["log_probs"].astype(np.float64)
        averaged = np.exp(log_probs).mean(1, keepdims=True)
        g = np.random.default_rng(1)
        labels = oracle_classes.labels_of(averaged[0, 0], g.random((DRAWS, averaged.shape[2])))
        sure = np.where(np.eye(oracle_classes.CLASSES)[labels] > 0, np.log(0.97), np.log(0.01))
        arrays["log_probs"] = sure[None]
        arrays["moved_parts"] = arrays["moved_parts"][:, ::-1]
    right, wrong = (task.score(of_run(task, a)) for a in (ideal(), arrays))
    assert wrong["epistemic_error"] > 0.2 > 10 * right["epistemic_error"]
    assert wrong["aleatoric_error"] > 0.2
    assert wrong["disentanglement_error"] > 0.5
    assert wrong["joint_log_loss"] > right["joint_log_loss"] + 1
    assert wrong["log_likelihood"] == pytest.approx(right["log_likelihood"], abs=0.15)


@each
def test_draws_shuffled_over_inputs_keep_the_marginals_and_lose_the_joint(kind):
    make, ideal = CASES[kind]
    task = make()
    arrays = dict(ideal())
    name = "mean" if kind == "numbers" else "log_probs"
    order = np.random.default_rng(0).permuted(np.tile(np.arange(DRAWS), (100, 1)), axis=1).T
    index = order[None] if kind == "numbers" else order[None, :, :, None]
    arrays[name] = np.take_along_axis(arrays[name], index, 1)
    right, cheat = (task.score(of_run(task, a)) for a in (ideal(), arrays))
    assert cheat["log_likelihood"] == pytest.approx(right["log_likelihood"], abs=1e-6)
    assert cheat["joint_log_loss"] > right["joint_log_loss"]
    assert cheat["epistemic_error"] == pytest.approx(right["epistemic_error"], abs=1e-6)


@each
def test_the_mean_of_the_losses_is_the_joint_log_loss_and_targets_have_their_law(kind):
    """Under the truth the joint log loss is ten entropies, to five standard errors of its pairs."""
    make, _ = CASES[kind]
    task = make()
    targets = task.targets()
    if kind == "numbers":
        arrays = {
            "mean": targets["function"][:, None],
            "variance": targets["noise"][None, None] ** 2,
            "moved_parts": np.zeros((2, 2, 1, 100)),
        }
        entropies = 0.5 * np.log(2 * np.pi * np.e * targets["noise"].astype(np.float64) ** 2)
    else:
        true = targets["true_log_probs"].astype(np.float64)
        arrays = {"log_probs": true[:, None], "moved_parts": np.zeros((2, 2, 1, 100))}
        entropies = -(np.exp(true) * true).sum(-1)[0]
    arrays = of_run(task, arrays)
    losses = task.losses(arrays)
    assert losses.mean() == pytest.approx(task.score(arrays)["joint_log_loss"])
    expected = joint.BATCH * entropies[joint.rows(arrays["anchors"])].mean()
    assert losses.mean() == pytest.approx(expected, abs=5 * losses.std() / np.sqrt(len(losses)))


class Known(Recorder):
    """Predicts two draws of numbers, or of four classes; of an ensemble three times as many."""

    def __init__(self, is_of_numbers, times=1):
        super().__init__()
        self.is_of_numbers, self.times = is_of_numbers, times

    def predict(self, method, inputs, num_samples):
        """Numbers or classes of no meaning, others for every fit."""
        self.inputs.append(inputs)
        g = torch.Generator().manual_seed(method.number)
        size = self.times * num_samples
        if self.is_of_numbers:
            mean = torch.randn(size, len(inputs), 1, generator=g)
            return predictions.Gaussian(mean, torch.ones_like(mean))
        return predictions.Categorical(torch.randn(size, len(inputs), 4, generator=g).log_softmax(-1))


@each
@pytest.mark.parametrize("times", [1, 3])
def test_three_fits_of_every_world_are_posed(kind, times):
    make, _ = CASES[kind]
    task = make(test_samples=4, epochs=7, worlds=2)
    recorder = Known(kind == "numbers", times)
    arrays = task.run(recorder)
    assert [stage[0] for stage in recorder.stages] == [
        f"{name}, world {w}" for name in oracle.CONDITIONS for w in (1, 2)
    ]
    assert [budget.epochs for budget in recorder.budgets] == 6 * [7]
    train = 24 if kind == "classes" else oracle.TRAIN
    assert [p.num_train for p in recorder.problems] == 4 * [train] + 2 * [oracle.fewer(train)]
    bases, noisier, fewer = (recorder.problems[i : i + 2] for i in (0, 2, 4))
    for world in (0, 1):
        given = [p[world].train.tensors for p in (bases, noisier, fewer)]
        assert torch.equal(given[0][0], given[1][0])  # the same inputs
        assert not torch.equal(given[0][1], given[1][1])  # other noise
        size = len(given[2][0])
        assert all(torch.equal(a[:size], b) for a, b in zip(given[0], given[2], strict=True))
    assert not torch.equal(bases[0].train.tensors[1], bases[1].train.tensors[1])
    assert [len(inputs) for inputs in recorder.inputs[:3:2]] == [100 + len(bases[0].val), 100]
    assert [name for name, *_ in recorder.logged] == 2 * ["log_likelihood"]
    name = "mean" if kind == "numbers" else "log_probs"
    assert arrays[name].shape[:3] == (2, 4, 100)
    assert arrays[name].dtype == np.float16
    everything = of_run(task, arrays)
    assert sum(array.nbytes for array in everything.values()) < 2**18
    assert task.score(everything).keys() == task.spec.metrics.keys()
