"""Active learning: the data, the protocol, who can see which label, and every number by hand."""

import math

import numpy as np
import pytest
import torch
import toys
from published import need

import bench
from bench import data, metrics, networks, priors, randomness
from bench.contract import Problem
from bench.engine.engine import Engine, TrainerOptions
from bench.errors import UsageError
from bench.likelihoods import Categorical as CategoricalLikelihood
from bench.methods.mc_dropout import MCDropout
from bench.methods.mfvi import MFVI
from bench.predictions import Categorical
from bench.runs import records, registry
from bench.studies import acquisition, active, risk
from bench.tasks.active_learning import ActiveLearning

FEW = {"acquired": 4, "epochs": 1, "acquisition_samples": 3, "test_samples": 2}
POOL = 301


def make(**values):
    """The task on digits with its standard settings, but for `values`."""
    entry = registry.task("active_digits")
    return ActiveLearning(registry.build(entry.cls.settings_class, {**entry.fixed, **values}, "task"))


def run(task, seed=0):
    """Arrays of a run of MFVI, without targets."""
    return task.run(Engine(MFVI, MFVI.settings_class(), seed, None, TrainerOptions(accelerator="cpu")))


# ---- data


def test_unbalanced_set_keeps_the_stated_shares_of_the_classes_as_labelled():
    whole, kept = data.load("digits"), data.unbalanced("digits")
    test = [max(1, int(s * n)) for s, n in zip(data.UNBALANCED, whole.test_labels.bincount(), strict=True)]
    assert kept.test_labels.bincount().tolist() == test == [35, 18, 17, 7, 7, 7, 3, 3, 1, 1]
    noisy = kept.train_labels.bincount(minlength=10)
    assert noisy[0] > 120
    assert (noisy[1:] / noisy[0] - torch.tensor(data.UNBALANCED[1:])).abs().max() < 0.06
    quarter = data.unbalanced("digits", train_share=0.25)
    expected = torch.tensor(
        [max(1, int(s * 0.25 * n)) for s, n in zip(data.UNBALANCED, whole_noisy(), strict=True)]
    )
    assert torch.equal(quarter.train_labels.bincount(minlength=10), expected)
    assert torch.equal(quarter.test_labels, kept.test_labels)


def whole_noisy():
    """Examples per class of digits after its labels were made noisy: what a share of 1 for all would keep."""
    counts = torch.zeros(10, dtype=torch.long)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "UNBALANCED", (1.0,) * 10)
        counts += data.unbalanced("digits").train_labels.bincount(minlength=10)
    return counts


def rows_of(inputs, among):
    """Where images lie in a data set, by their content; digits holds no image twice."""
    places = {row.tobytes(): i for i, row in enumerate(among.numpy())}
    assert len(places) == len(among)
    return [places[row.tobytes()] for row in inputs.numpy()]


def test_a_tenth_of_the_training_labels_is_drawn_anew_and_no_test_label(monkeypatch):
    monkeypatch.setattr(data, "UNBALANCED", (1.0,) * 10)
    whole, kept = data.load("digits"), data.unbalanced("digits")
    assert len(kept.train_labels) == len(whole.train_labels)
    changed = (whole.train_labels[rows_of(kept.train_inputs, whole.train_inputs)] != kept.train_labels).sum()
    # 144 are drawn anew and change with probability 0.9: sd 3.6, so that 5 sd are exceeded once in 10^6.
    assert abs(int(changed) - 0.9 * 144) < 18
    assert torch.equal(whole.test_labels[rows_of(kept.test_inputs, whole.test_inputs)], kept.test_labels)


def test_data_are_the_same_whatever_the_global_state_and_have_a_digest_of_their_own():
    torch.manual_seed(1)
    np.random.seed(1)
    first = active.load("digits")
    torch.manual_seed(2)
    np.random.seed(2)
    again = active.load("digits")
    assert torch.equal(first.pool, again.pool)
    assert first.digest == again.digest == make().data_digest()
    assert len({first.digest, data.load("digits").digest, make(balanced=True).data_digest()}) == 3


def test_balanced_variant_has_about_as_many_examples_of_every_class():
    plain, balanced = active.load("digits"), active.load("digits", balanced=True)
    assert abs(len(plain.pool) - len(balanced.pool)) < 10
    assert abs(len(plain.test) - len(balanced.test)) < 10
    counts = balanced.pool_labels.bincount()
    assert counts.min() > 0.5 * counts.max()


def test_parts_share_no_image_and_are_standardised():
    found = active.load("digits")
    assert (len(found.pool), len(found.val), len(found.test)) == (POOL, 100, 99)
    images = data.load("digits")
    standard = active.standardise("digits", images.train_inputs)
    assert abs(standard.mean()) < 1e-3
    assert abs(standard.std() - 1) < 1e-3
    rows = rows_of(torch.cat([found.pool, found.val.tensors[0]]), standard)
    assert len(set(rows)) == POOL + 100
    rows_of(found.test, active.standardise("digits", images.test_inputs))


def test_more_acquisitions_than_points_are_refused_before_training():
    """Ten are labelled at first; negative control: all that are left can be acquired."""
    with pytest.raises(
        UsageError, match=r"--task.acquired 292: only 291 points of the pool are left; give 291"
    ):
        make(acquired=POOL - 9).data_digest()
    make(acquired=POOL - 10).data_digest()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
def test_sizes_and_constants_of_the_large_sets(name):
    need(name)
    pixels = data.load(name).train_inputs.double()
    assert pixels.mean().item() == pytest.approx(active.SIZES[name].mean, abs=5e-5)
    assert pixels.std().item() == pytest.approx(active.SIZES[name].sd, abs=5e-5)
    found = active.load(name)
    assert len(found.val) == 1000
    assert 3200 < len(found.pool) < 3300
    assert 2800 < len(found.test) < 2900
    tests = 60 // 3 + 1
    assert tests * 3 * (len(found.test) + 70) * 10 * 2 < 3.6 * 2**20  # float16, of a committed record of 4 MB


def test_oracle_hands_out_one_label_at_a_time_and_knows_which():
    oracle = active.Oracle(torch.tensor([3, 1, 4]))
    assert [oracle.label(2), oracle.label(0)] == [4, 3]
    assert oracle.asked == [2, 0]


# ---- the protocol


class Scorer(toys.Recorder):
    """An engine that fits nothing; its two samples differ by an input's own spread, which gives it a BALD."""

    def __init__(self):
        super().__init__()
        self.samples = []

    def fit_many(self, problems, budget):
        """One after another."""
        return [self.fit(problem, budget) for problem in problems]

    def cached(self, compute):
        """Keeps nothing."""
        return compute()

    def generator(self, *purpose):
        """Of seed 0."""
        return randomness.generator(0, *purpose)

    def predict(self, method, inputs, num_samples):
        """Two samples, whoever predicts."""
        self.inputs.append(inputs)
        self.predictors.append(method.number)
        self.samples.append(num_samples)
        spread = inputs.flatten(1).mean(1, keepdim=True).double() * torch.arange(10) / 10
        return Categorical(torch.stack([spread, -spread]).log_softmax(-1).float())


def test_fits_are_those_of_the_protocol():
    """A fit per acquisition, and every three points three more on the same points; all from scratch."""
    task, engine = make(acquired=6), Scorer()
    arrays = task.run(engine)
    assert [len(p.train) for p in engine.problems] == [10] * 4 + [11, 12] + [13] * 4 + [14, 15] + [16] * 3
    assert [p.num_train for p in engine.problems] == [len(p.train) for p in engine.problems]
    assert engine.starts == [None] * 15
    assert {(b.epochs, b.batch_size, b.patience, b.draws) for b in engine.budgets} == {(20, 64, 5, 1000)}
    assert all(p.val is task.data.val for p in engine.problems)
    assert arrays["points"].tolist() == [10, 13, 16]
    assert [n for n, s in zip(engine.predictors, engine.samples, strict=True) if s == 100] == [
        4,
        5,
        6,
        10,
        11,
        12,
    ]
    assert {s for s in engine.samples} == {8, 100}
    assert [place for _, *place in engine.stages] == [[number, 9] for number in range(1, 10)]


def test_last_points_are_tested_even_between_two_tests():
    assert make(acquired=4).run(Scorer())["points"].tolist() == [10, 13, 14]


def test_proposals_are_the_softmax_of_normalised_scores_over_the_points_left():
    task = make(acquired=5)
    arrays = task.run(Scorer())
    index, pool = arrays["index"], task.data.pool
    assert len(set(index.tolist())) == 15
    assert arrays["proposal"][:10].tolist() == [1 / (POOL - m) for m in range(10)]
    for m in range(10, 15):
        left = [i for i in range(POOL) if i not in index[:m]]
        bald = metrics.mutual_information(Scorer().predict(toys.Fitted(1), pool[left], 100).log_probs)
        logits = 10_000 * bald / bald.sum()
        expected = torch.exp(logits - logits.logsumexp(0))[left.index(index[m])]
        assert arrays["proposal"][m] == pytest.approx(float(expected), rel=1e-12)
    assert arrays["acquired_labels"].tolist() == task.data.pool_labels[index].tolist()


@pytest.mark.parametrize(("proposal", "expected"), [("proportional", None), ("uniform", 1 / (POOL - 10))])
def test_other_proposals(proposal, expected):
    task = make(acquired=1, proposal=proposal)
    arrays = task.run(Scorer())
    if expected is None:
        left = [i for i in range(POOL) if i not in arrays["index"][:10]]
        bald = metrics.mutual_information(Scorer().predict(toys.Fitted(1), task.data.pool[left], 2).log_probs)
        floored = bald.clamp(min=0.1 * bald.mean())
        expected = float(floored[left.index(arrays["index"][10])] / floored.sum())
    assert arrays["proposal"][10] == pytest.approx(expected, rel=1e-9)


def test_argmax_is_refused():
    with pytest.raises(UsageError, match=r"--task.proposal argmax: .*softmax"):
        make(proposal="argmax")
    with pytest.raises(UsageError, match="never draws some points"):
        active.propose("argmax", torch.ones(3), 1.0)


def test_weights_of_the_three_objectives_reach_the_examples():
    task, engine = make(acquired=3), Scorer()
    arrays = task.run(engine)
    q = arrays["proposal"]
    plain, pure, lure = (p.train.tensors[2] for p in engine.problems[-3:])
    m, n = np.arange(1, 14), 13
    assert (plain == 1).all()
    np.testing.assert_allclose(pure, 1 / (POOL * q) + (n - m) / POOL, rtol=1e-6)
    np.testing.assert_allclose(lure, 1 + (POOL - n) / (POOL - m) * (1 / ((POOL - m + 1) * q) - 1), rtol=1e-6)
    assert (lure[:10] == 1).all()
    assert (lure[10:] != 1).all()
    for problem in engine.problems:
        assert torch.equal(problem.train.tensors[0], task.data.pool[arrays["index"][: len(problem.train)]])


def test_choosing_fits_have_the_plain_objective_unless_lure_is_asked_for():
    for objective, is_plain in (("plain", True), ("lure", False)):
        engine = Scorer()
        make(acquired=3, acquisition_objective=objective).run(engine)
        chooses = engine.problems[5]
        assert len(chooses.train) == 12
        assert bool((chooses.train.tensors[2] == 1).all()) == is_plain


def test_published_kl_weight_is_160_over_m():
    """In a loss per example, (1/M) (sum_m w_m NLL_m + KL), w = 160/M makes the KL count 1/160 of the NLL."""
    engines = {}
    for kl_weight in ("bayes", "published"):
        engines[kl_weight] = Scorer()
        make(acquired=1, kl_weight=kl_weight).run(engines[kl_weight])
    for a, b in zip(*(e.problems for e in engines.values()), strict=True):
        torch.testing.assert_close(b.train.tensors[2], a.train.tensors[2] * 160 / len(a.train))


def test_prior_and_networks_are_those_of_the_thesis():
    problem = make().problem()
    prior = problem.prior({"weight": torch.zeros(3)})["weight"]
    assert prior.log_prob(torch.zeros(3)).item() == pytest.approx(
        -3 * math.log(0.25 * math.sqrt(2 * math.pi))
    )
    sizes = [tuple(p.shape) for p in problem.network().parameters()]
    assert sizes == [(50, 64), (50,), (10, 50), (10,)]
    shapes = [
        [tuple(p.shape) for p in make().parameters()]
        for make in (active.network("conv", 784), networks.lenet)
    ]
    assert shapes[0] == shapes[1]


def test_start_depends_on_the_seed_and_on_no_method():
    class Seeded(Scorer):
        def __init__(self, seed):
            super().__init__()
            self.seed = seed

        def generator(self, *purpose):
            return randomness.generator(self.seed, *purpose)

    starts = [make(acquired=1).run(Seeded(seed))["index"][:10].tolist() for seed in (0, 0, 1)]
    assert starts[0] == starts[1] != starts[2]


def test_masks_of_dropout_are_shared_over_the_pool():
    """Copies of an image in different pieces have equal samples: BALD is that of one function."""
    problem = Problem(
        networks.lenet,
        CategoricalLikelihood(),
        priors.normal(0, 1),
        torch.utils.data.TensorDataset(),
        None,
        1,
    )
    engine = Engine(MCDropout, MCDropout.settings_class(), 0, None, TrainerOptions(accelerator="cpu"))
    method = MCDropout(problem, MCDropout.settings_class())
    image = torch.randn(1, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    others = torch.randn(5, 1, 28, 28, generator=torch.Generator().manual_seed(1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bench.batches._LARGEST_PIECE", 2 * 784)
        samples = engine.predict(method, torch.cat([image, others, image]), 4).log_probs
    torch.testing.assert_close(samples[:, 0], samples[:, -1])
    assert acquisition.bald(Categorical(samples)).min() > 0


# ---- who can see which label


def test_oracle_is_asked_for_every_acquired_point_once_and_for_no_other(monkeypatch):
    asked = []
    monkeypatch.setattr(active.Oracle, "label", lambda self, i: asked.append(i) or int(self._labels[i]))
    arrays = make(acquired=5).run(Scorer())
    assert asked == arrays["index"].tolist()


# ---- numbers by hand


def arrays_by_hand():
    """Two tests, at 2 and 3 points of a pool of 4, with chosen probabilities of the right class."""

    def log_probs(right, labels):
        """`[..., K, 10]` from the probability of the right class `[..., K]`; the others share the rest."""
        right = np.asarray(right, float)
        p = np.repeat(((1 - right) / 9)[..., None], 10, -1)
        np.put_along_axis(
            p, np.broadcast_to(np.asarray(labels)[:, None], (*right.shape, 1)), right[..., None], -1
        )
        return np.log(p).astype(np.float16)

    labels, own = np.array([1, 2], np.uint8), np.array([5, 6, 7], np.uint8)
    test = [[[0.5, 0.25], [0.5, 0.5], [0.25, 0.05]], [[0.9, 0.8], [0.7, 0.6], [0.5, 0.05]]]
    acquired = [[[0.5, 0.4, 0.1], [0.6, 0.3, 0.1], [0.7, 0.2, 0.1]], [[0.9, 0.8, 0.7]] * 3]
    return {
        "pool_size": np.array([4], np.int32),
        "index": np.array([0, 3, 1], np.int32),
        "acquired_labels": own,
        "proposal": np.array([0.25, 1 / 3, 0.8]),
        "loss": np.array([1.5], np.float32),
        "points": np.array([2, 3], np.int32),
        "log_probs": log_probs(test, labels),
        "acquired_log_probs": log_probs(acquired, own),
        "labels": labels,
    }


def test_scores_by_hand():
    arrays, task = arrays_by_hand(), make()
    found, scores = task.measured(arrays), task.score(arrays)
    close = {"rel": 2e-3, "abs": 2e-3}  # what float16 leaves
    assert found.nll[0] == pytest.approx(
        [-math.log(0.5 * 0.25) / 2, math.log(2), -math.log(0.25 * 0.05) / 2], **close
    )
    assert found.accuracy.tolist() == [[1, 1, 0.5], [1, 1, 0.5]]
    losses = -np.log([0.9, 0.8, 0.7])
    # N = 4, M = 3, q = 1/4, 1/3, 0.8: both first draws uniform, the third not.
    pure = [1 / (4 * 0.25) + 2 / 4, 1 / (4 / 3) + 1 / 4, 1 / (4 * 0.8)]
    lure = [1, 1, 1 + (4 - 3) / (4 - 3) * (1 / (2 * 0.8) - 1)]
    for objective in range(3):
        expected = [losses.mean(), np.mean(pure * losses), np.mean(lure * losses)]
        assert found.risks[1, objective] == pytest.approx(expected, **close)
    of_two = -np.log([[0.5, 0.4], [0.6, 0.3], [0.7, 0.2]])
    assert found.risks[0, :, 0] == pytest.approx(of_two.mean(1), **close)
    assert found.risks[0, :, 2] == pytest.approx(of_two.mean(1), **close)  # uniform so far
    assert found.overfitting_bias == pytest.approx(found.nll - found.risks[..., 2])
    assert scores["last_nll_plain"] == pytest.approx(-math.log(0.9 * 0.8) / 2, **close)
    assert scores["mean_nll_lure"] == pytest.approx(-math.log(0.25 * 0.05 * 0.5 * 0.05) / 4, **close)
    assert scores["mean_accuracy_lure"] == 0.5
    assert scores["cost_of_pure"] == pytest.approx(scores["mean_nll_pure"] - scores["mean_nll_plain"])
    assert scores["surprise"] == 1.5
    assert scores.keys() == task.spec.metrics.keys()


def test_estimates_agree_with_the_estimators():
    rng = np.random.default_rng(0)
    losses, q = rng.random((3, 5)), rng.uniform(0.2, 1, 5)
    assert active.estimate("plain", losses, q, 9) == pytest.approx(losses.mean(1))
    assert active.estimate("pure", losses, q, 9) == pytest.approx(risk.pure(losses, q, 9))
    assert active.estimate("lure", losses, q, 9) == pytest.approx(risk.lure(losses, q, 9))


def test_not_ranked_and_needs_weights():
    spec = make().spec
    assert not spec.ranked
    assert spec.requires == {"weighted"}


# ---- whole runs


@pytest.mark.parametrize(
    "name",
    [
        "map",
        "mfvi",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("radial", "mc_dropout", "swag", "mixture_vi")),
        pytest.param("deep_ensemble", marks=pytest.mark.slow),
    ],
)
def test_run_completes(name, tmp_path):
    values = FEW | {"acquired": 3}
    done = bench.run(name, "active_digits", task_settings=values, out=tmp_path)
    arrays = records.read_arrays(done.directory)
    members = done.record.method.members
    assert len(done.record.fits) == members * (3 + 2 * 3)
    assert arrays["log_probs"].shape == (2, 3, 99, 10)
    assert len(list(done.directory.glob("checkpoints/*.ckpt"))) == members
    if name in ("map",):  # no spread: BALD is 0, and the draw uniform
        assert arrays["proposal"] == pytest.approx([1 / (POOL - m) for m in range(13)])
