"""Depth on iris: metrics by hand, the split, the protocol."""

import math

import numpy as np
import pytest
import torch

from bench import metrics
from bench.contract import Undefined
from bench.predictions import Categorical
from bench.studies import references
from bench.studies.small import flowers
from bench.tasks.iris_depth import IrisDepth, Settings

LABELS = np.array([0, 1, 2, 1], np.uint8)


@pytest.fixture(autouse=True)
def no_reference(monkeypatch, tmp_path):
    """Whatever references there are by now: these tests bring their own."""
    monkeypatch.setattr(references, "FOLDER", tmp_path)


def make(**values):
    """The task with its standard settings, but for `values`."""
    return IrisDepth(Settings(**values))


def fit(*probabilities, classes=LABELS):
    """Log-probabilities `[4, 3]` that give the example's class this probability, the rest evenly."""
    p = np.repeat((1 - np.array(probabilities))[:, None] / 2, 3, axis=1)
    p[np.arange(4), classes] = probabilities
    return np.log(p)


def arrays_of(*fits, **more):
    """Arrays of a run with these fits."""
    return {"log_probs": np.stack(fits), "labels": LABELS, **more}


# ---- metrics by hand


def test_cross_entropy_over_fits_by_hand():
    """Three fits of cross-entropy log 2, log 4 and log 8: mean, standard error sd/sqrt(3), best tenth."""
    arrays = arrays_of(fit(*[1 / 8] * 4), fit(*[1 / 2] * 4), fit(1 / 4, 1 / 4, 1 / 8, 1 / 2))
    scores = make().score(arrays)
    assert scores["cross_entropy"] == pytest.approx(2 * math.log(2))
    assert scores["cross_entropy_error"] == pytest.approx(math.log(2) / math.sqrt(3))
    assert scores["best_tenth_cross_entropy"] == pytest.approx(math.log(2))
    assert scores["accuracy"] == pytest.approx((0 + 1 + 1 / 4) / 3)
    assert [row.value for row in make().curves(arrays)] == pytest.approx(np.log([2, 4, 8]))


def test_best_tenth_of_twenty_are_the_two_best():
    fits = [fit(*[p] * 4) for p in np.linspace(0.05, 0.95, 20)]
    scores = make().score(arrays_of(*fits))
    assert scores["best_tenth_cross_entropy"] == pytest.approx(
        -(math.log(0.95) + math.log(0.95 - 0.9 / 19)) / 2
    )


def test_one_fit_has_no_standard_error():
    scores = make(repetitions=1).score(arrays_of(fit(*[0.9] * 4)))
    assert scores["cross_entropy_error"] == Undefined("one fit has no standard error")
    assert make(repetitions=1).spec.metrics["cross_entropy_error"].may_be_undefined
    assert not make().spec.metrics["cross_entropy_error"].may_be_undefined


def test_constant_and_uniform_predictions():
    """No ties are gained from, and a sure constant is right as often as its class occurs."""
    uniform = make().score(arrays_of(np.full((4, 3), -math.log(3))))
    assert uniform["cross_entropy"] == pytest.approx(math.log(3))
    assert uniform["accuracy"] == 0.25
    sure = make().score(arrays_of(fit(*[0.999] * 4, classes=np.ones(4, int))))
    assert sure["accuracy"] == 0.5


def test_reference_averages_probabilities_over_fits():
    arrays = arrays_of(fit(*[0.9] * 4), fit(*[0.5] * 4))
    reference = make().reference(arrays)["reference"]
    np.testing.assert_allclose(np.exp(metrics.restore(reference)), np.exp(fit(*[0.7] * 4)), atol=1e-3)


def test_distances_to_the_reference_by_hand():
    """One fit names another class at one of four inputs; probabilities move by hand."""
    near = fit(0.8, 0.8, 0.8, 0.8)
    far = fit(0.8, 0.8, 0.8, 0.8, classes=np.array([0, 1, 2, 0]))
    reference = metrics.store(torch.from_numpy(fit(0.6, 0.6, 0.6, 0.6)))
    scores = make().score(arrays_of(near, far, reference=reference))
    assert scores["agreement"] == pytest.approx((1 + 3 / 4) / 2)
    # Same class: 0.8 - 0.6 = 0.2 is moved. Another class: 0.8 - 0.2 comes there.
    assert scores["total_variation"] == pytest.approx((0.2 + (3 * 0.2 + 0.6) / 4) / 2, abs=1e-3)


def test_without_reference_the_distances_say_why():
    scores = make(depth=3).score(arrays_of(fit(*[0.9] * 4)))
    for name in ("agreement", "total_variation"):
        assert "no reference for iris_depth-depth=3" in scores[name].reason


# ---- the protocol


def test_split_is_of_all_flowers_and_fixed():
    from sklearn import datasets

    inputs, labels = datasets.load_iris(return_X_y=True)
    parts = [flowers(part) for part in ("train", "test")]
    assert [len(x) for x, _ in parts] == [100, 50]
    rows = sorted((*x.tolist(), y.item()) for part in parts for x, y in zip(*part, strict=True))
    expected = torch.from_numpy(inputs).float()  # raw
    assert rows == sorted((*x, y) for x, y in zip(expected.tolist(), labels.tolist(), strict=True))
    assert make().data_digest() == make(depth=4, repetitions=1).data_digest() == DIGEST


DIGEST = "ec0bd9e10595a3aebe97a47547bad3732e8259a156b740f379f8fe593ffc9ae7"


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_problem_is_that_of_the_source(depth):
    problem = make(depth=depth).problem()
    network = problem.network()
    shapes = [w.shape for w in network.parameters() if w.ndim == 2]
    assert shapes == [(4, 4)] * depth + [(3, 4)]
    assert sum(isinstance(layer, torch.nn.LeakyReLU) for layer in network) == depth
    assert problem.val is None
    assert problem.num_train == 100
    prior = problem.prior(dict(network.named_parameters()))
    assert all((p.mean == 0).all() and (p.variance == 1).all() for p in prior.values())


class Recorder:
    """An engine that fits nothing and keeps what it was asked."""

    def fit_many(self, problems, budget, starts=None):
        """The numbers of the fits."""
        self.problems, self.budget = problems, budget
        return list(range(len(problems)))

    def predict(self, method, inputs, num_samples):
        """Fit r prefers class r mod 3."""
        self.inputs, self.num_samples = inputs, num_samples
        logits = torch.zeros(num_samples, len(inputs), 3)
        logits[..., method % 3] = 1
        return Categorical(logits.log_softmax(-1))

    def stage(self, *arguments):
        """Nothing."""


def test_run_keeps_every_fit():
    engine = Recorder()
    arrays = make(repetitions=4).run(engine)
    assert (engine.budget.epochs, engine.budget.batch_size, engine.budget.patience) == (1000, 16, 30)
    assert torch.equal(engine.inputs, flowers("test")[0])
    assert arrays["log_probs"].shape == (4, 50, 3)
    assert (arrays["log_probs"].argmax(-1) == np.array([0, 1, 2, 0])[:, None]).all()


def test_target_is_the_depth_alone():
    assert make(depth=3).target == make(depth=3, repetitions=1, epochs=5, test_samples=7).target
    assert len({make(depth=d).target for d in range(1, 5)}) == 4
