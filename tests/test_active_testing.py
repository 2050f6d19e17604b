"""Active testing: paired draws against exact probabilities, estimates against their truth, the task."""

import itertools
import math

import numpy as np
import pytest
import scipy.stats
import torch
import toys

from bench import metrics
from bench.engine.engine import Engine, TrainerOptions
from bench.errors import UsageError
from bench.methods.map import MAP
from bench.methods.mfvi import MFVI
from bench.predictions import Categorical
from bench.runs import registry
from bench.studies import active, risk, testing
from bench.tasks.active_testing import ActiveTesting

FEW = {"epochs": 1, "test_samples": 3, "trajectories": 50, "acquired": 12}


def make(**values):
    """The task on digits with its standard settings, but for `values`."""
    entry = registry.task("active_testing_digits")
    return ActiveTesting(registry.build(entry.cls.settings_class, {**entry.fixed, **values}, "task"))


def run(task, cls=MFVI, seed=0):
    """Arrays of a run, without targets."""
    return task.run(Engine(cls, cls.settings_class(), seed, None, TrainerOptions(accelerator="cpu")))


def test_more_labels_than_there_are_are_refused_before_training():
    """Digits have 355 test images; negative control: all of them can be bought."""
    with pytest.raises(UsageError, match=r"--task.acquired 356: only 355 test labels are there; give 355 or"):
        make(acquired=356).data_digest()
    make(acquired=355).data_digest()


# ---- draws

PROPOSALS = {
    "steep": np.array([0.6, 0.25, 0.1, 0.05]),
    "flat": np.array([0.28, 0.26, 0.24, 0.22]),
    "uniform": np.full(4, 0.25),
}


def logs(proposals):
    """Their logarithms, each up to a constant of its own."""
    return {name: np.log(p) + 3 * i for i, (name, p) in enumerate(proposals.items())}


@pytest.mark.parametrize("draws", [1, 2, 3])
def test_sequences_of_draws_have_their_exact_probabilities(draws):
    """Chi-squared over all ordered sequences; 9 tests at 10^-4 each raise a false alarm once in 1100."""
    number = 40_000
    found = testing.races(logs(PROPOSALS), number, draws)
    for name, p in PROPOSALS.items():
        index, q = found[name]
        assert index.shape == q.shape == (number, draws)
        exact = {}
        for sequence in itertools.permutations(range(4), draws):
            conditional = [p[i] / (1 - p[list(sequence[:m])].sum()) for m, i in enumerate(sequence)]
            exact[sequence] = np.prod(conditional)
            rows = (index == sequence).all(1)
            assert rows.any()
            np.testing.assert_allclose(q[rows], np.tile(conditional, (rows.sum(), 1)), rtol=1e-12)
        counts = [(index == sequence).all(1).sum() for sequence in exact]
        test = scipy.stats.chisquare(counts, number * np.array(list(exact.values())))
        assert test.pvalue > 1e-4, name


def test_equal_proposals_draw_equal_points_and_others_share_their_luck():
    p = PROPOSALS["steep"]
    found = testing.races({"a": np.log(p), "b": np.log(p), "c": np.zeros(4)}, 2000, 2)
    np.testing.assert_array_equal(found["a"][0], found["b"][0])
    same = (found["a"][0][:, 0] == found["c"][0][:, 0]).mean()
    independent = (p / 4).sum()
    assert same > independent + 0.2


def test_draws_do_not_depend_on_how_many_are_made_at_once(monkeypatch):
    at_once = testing.races(logs(PROPOSALS), 30, 2)
    testing._fair_race.cache_clear()
    monkeypatch.setattr(testing, "_CHUNK", 4 * 7)
    for name, (index, q) in testing.races(logs(PROPOSALS), 30, 2).items():
        np.testing.assert_array_equal(index, at_once[name][0])
        np.testing.assert_array_equal(q, at_once[name][1])


def test_equal_weights_race_once_and_as_beside_others():
    """Kept between calls, and the draws that a race of its own beside the steep one would have made."""
    weights = {"fair": np.full(4, -1.4), "steep": np.log(PROPOSALS["steep"])}
    testing._fair_race.cache_clear()
    found, alone = testing.races(weights, 500, 3), testing._races(4, weights, 500, 3)
    for name in weights:
        np.testing.assert_array_equal(found[name][0], alone[name][0])
        np.testing.assert_allclose(found[name][1], alone[name][1], rtol=1e-12)
    assert testing.races({"other": np.zeros(4)}, 500, 3)["other"][0] is found["fair"][0]
    assert testing.races({"other": np.zeros(4)}, 501, 3)["other"][0].shape == (501, 3)


@pytest.mark.parametrize("steep", [0.0, 3.0, 500.0])
def test_winners_of_a_large_pool_are_those_of_sorting_all_of_it(steep):
    """Only early points are sorted, or all where the time would leave too few."""
    log_w = steep * np.random.default_rng(0).standard_normal(400)
    times = np.random.default_rng(1).standard_exponential((200, 400))
    log_times = np.log(times)
    whole = (log_times - log_w).argsort(1)[:, :20]
    early = testing._early(log_w, 40)
    assert early < np.inf
    sorted_at_most = ((log_times - log_w) < early).sum(1)
    assert 20 <= sorted_at_most.min() <= sorted_at_most.max() < 80
    assert sorted_at_most.mean() == pytest.approx(40, abs=2)  # 4 standard errors or more
    for time in (early, testing._early(log_w, 10), np.inf):
        np.testing.assert_array_equal(testing._first(times, log_w, 20, time), whole)
    assert testing._early(log_w, 201) == np.inf


def test_probabilities_among_those_left_survive_draws_that_hold_nearly_all():
    """After the first draw of weights e^0, e^-2000, 2 e^-2000 and e^-5000 float64 would have nothing left."""
    weights = np.array([0.0, -2000.0, -2000.0 + np.log(2), -5000.0])
    index, q = testing.races({"p": weights}, 2000, 3)["p"]
    assert (index[:, 0] == 0).all()
    np.testing.assert_allclose(q[:, 0], 1)
    np.testing.assert_allclose(q[:, 1], np.where(index[:, 1] == 1, 1 / 3, 2 / 3), rtol=1e-12)
    np.testing.assert_allclose(q[:, 2], 1)
    # A share of 1/3 in 2000 draws has sd 0.0105: 5 sd are exceeded once in 10^6.
    assert abs((index[:, 1] == 1).mean() - 1 / 3) < 0.053


@pytest.mark.parametrize("proposal", ["softmax", "proportional", "uniform"])
def test_weights_are_those_of_the_proposals(proposal):
    scores = np.array([0.2, 0.0, 1.0, 0.4])
    p = active.propose(proposal, torch.from_numpy(scores), 20.0).numpy()
    w = np.exp(testing.log_weights(proposal, scores, 20.0))
    np.testing.assert_allclose(w / w.sum(), p)
    assert np.isfinite(testing.log_weights(proposal, scores, 1e6)).all()
    assert np.ptp(testing.log_weights(proposal, np.zeros(4), 1e6)) == pytest.approx(0)


# ---- estimates

LOSSES = np.array([0.1, 2.0, 0.4, 0.9, 3.0, 0.2, 0.7, 0.05])
SCORES = np.array([0.2, 1.0, 0.0, 0.5, 1.2, 0.1, 0.6, 0.3])


def simulate(temperature=12.0, trajectories=4000, acquired=6):
    """A pool of eight points, of moderate weights."""
    return testing.simulate(LOSSES, SCORES, temperature, trajectories, acquired)


def test_estimates_are_those_of_the_estimators_on_the_drawn_points():
    found = simulate(trajectories=20)
    assert found.points.tolist() == [1, 5, 6]
    assert found.risk == LOSSES.mean()
    proposals = {
        "softmax": np.exp(12 * SCORES / SCORES.sum()),
        "proportional": np.maximum(SCORES, 0.1 * SCORES.mean()),
        "uniform": np.ones(8),
    }
    proposals = {name: np.log(w) for name, w in proposals.items()}
    for name, (index, q) in testing.races(proposals, 20, 6).items():
        for k, m in enumerate(found.points):
            losses, own = LOSSES[index[:, :m]], q[:, :m]
            np.testing.assert_allclose(found.estimates[name]["plain"][:, k], losses.mean(1))
            np.testing.assert_allclose(found.estimates[name]["pure"][:, k], risk.pure(losses, own, 8))
            np.testing.assert_allclose(found.estimates[name]["lure"][:, k], risk.lure(losses, own, 8))
        # What overestimates the risk has a bias below 0, as in the source's Fig. 5.8.
        for e, estimates in found.estimates[name].items():
            np.testing.assert_allclose(estimates + found.bias(name, e), LOSSES.mean())


def test_pure_and_lure_are_unbiased_and_the_plain_mean_is_not():
    """Means within 5 standard errors: 36 comparisons raise a false alarm once in 40,000."""
    found = simulate()
    for proposal, estimators in found.estimates.items():
        for e in estimators:
            bias = found.bias(proposal, e)
            error = bias.std(0, ddof=1) / np.sqrt(len(bias)) + 1e-12
            is_biased = np.abs(bias.mean(0)) > 5 * error
            if e == "plain" and proposal != "uniform":
                assert is_biased.all()
                assert (bias.mean(0) < 0).all()  # hard points are drawn first: the risk is overestimated
            else:
                assert not is_biased.any(), (proposal, e)


def test_uniform_draws_make_lure_the_plain_mean():
    found = simulate(trajectories=50)
    np.testing.assert_allclose(found.estimates["uniform"]["lure"], found.estimates["uniform"]["plain"])


def test_ratio_after_one_draw_is_exact():
    found = simulate(trajectories=2)
    for guide, weights in (
        ("softmax", np.exp(12 * SCORES / SCORES.sum())),
        ("proportional", np.maximum(SCORES, 0.1 * SCORES.mean())),
    ):
        q = weights / weights.sum()
        estimates = LOSSES / (8 * q)  # of each possible first draw, with v_1 = 1/(N q)
        guided = (q * (estimates - LOSSES.mean()) ** 2).sum()
        uniform = ((LOSSES - LOSSES.mean()) ** 2).mean()
        assert found.first_draw[guide] == pytest.approx(guided / uniform)
    many = simulate(trajectories=40_000)
    sampled = many.squared_error("proportional", "lure")[:, 0].mean()
    sampled /= many.squared_error("uniform", "plain")[:, 0].mean()
    assert sampled == pytest.approx(many.first_draw["proportional"], rel=0.1)


@pytest.mark.parametrize("guide", testing.GUIDES)
def test_exact_lower_bound_of_the_ratio_holds_over_all_sequences(guide):
    """Mean squared error by enumeration; equal at M = 1, where the first draw is all there is."""
    losses, scores = LOSSES[:5], SCORES[:5]
    found = testing.simulate(losses, scores, 12.0, 2, 4)
    weights = np.exp(testing.log_weights(guide, scores, 12.0))
    for k, m in enumerate(found.points):
        errors = {"guided": 0.0, "uniform": 0.0}
        for sequence in itertools.permutations(range(5), int(m)):
            left = np.array([weights.sum() - weights[list(sequence[:t])].sum() for t in range(m)])
            q = weights[list(sequence)] / left
            drawn = losses[list(sequence)]
            errors["guided"] += q.prod() * (risk.lure(drawn, q, 5) - losses.mean()) ** 2
            errors["uniform"] += (drawn.mean() - losses.mean()) ** 2 / math.perm(5, int(m))
        least, exact = found.ratio_at_least(guide)[k], errors["guided"] / errors["uniform"]
        assert least <= exact * (1 + 1e-12)
        if m == 1:
            assert least == pytest.approx(exact)


def test_overflow_of_the_first_draw_is_said():
    found = testing.simulate(np.arange(4.0), np.array([1.0, 0, 0, 0]), 1e4, 2, 2)
    assert found.first_draw["softmax"] == np.inf


def test_equal_losses_leave_nothing_to_guide():
    found = testing.simulate(np.full(8, np.log(10)), SCORES, 12.0, 20, 6)
    for guide in testing.GUIDES:
        assert all((limit == 1).all() for limit in found.ratios[guide])
        assert found.first_draw[guide] == 1


def test_no_spread_is_uniform_sampling():
    found = testing.simulate(LOSSES, np.zeros(8), 1e4, 200, 6)
    for guide in testing.GUIDES:
        band = found.ratios[guide]
        for limit in band:
            np.testing.assert_allclose(limit, 1)


def test_scores_that_follow_the_losses_guide_better():
    """Draws in proportion to the loss have no variance at M = 1, and less than uniform ones after."""
    found = testing.simulate(LOSSES, LOSSES, 12.0, 2000, 6)
    assert found.first_draw["proportional"] < 1e-3 + (0.1 * LOSSES.mean() > LOSSES).sum()
    assert (found.ratios["proportional"].high[:2] < 1).all()


def test_of_a_small_pool_one_point_at_least_stays():
    assert testing.simulate(LOSSES, SCORES, 12.0, 5, 70).points[-1] == 7


# ---- the task


class TwoSamples(toys.Recorder):
    """An engine that fits nothing and predicts uniformly."""

    def cached(self, compute):
        """Keeps nothing."""
        return compute()


def test_models_and_their_pools_are_those_of_the_protocol():
    task, engine = make(), TwoSamples()
    arrays = task.run(engine)
    full, small = engine.problems
    images, own = task.images, active.load("digits")
    assert (len(full.train), len(full.val)) == (1298, 144)
    standard = active.standardise("digits", images.train_inputs)
    assert torch.equal(torch.cat([full.train.tensors[0], full.val.tensors[0]]), standard)
    assert torch.equal(torch.cat([full.train.tensors[1], full.val.tensors[1]]), images.train_labels)
    assert torch.equal(small.train.tensors[0], own.pool[:1000])
    assert torch.equal(small.val.tensors[0], own.val.tensors[0])
    assert torch.equal(engine.inputs[0], active.standardise("digits", images.test_inputs))
    assert torch.equal(engine.inputs[1], own.test)
    assert {(b.epochs, b.batch_size, b.patience, b.draws) for b in engine.budgets} == {(10, 64, 5, None)}
    assert engine.predictors == [1, 2, 1]
    assert torch.equal(engine.inputs[2], standard[-144:])
    assert arrays["full_log_probs"].shape == (355, 10)
    assert arrays["small_scores"].shape == (99,)
    assert arrays["full_scores"].dtype == np.float32
    labels = task.targets()
    assert labels["full_labels"].tolist() == images.test_labels.tolist()
    assert labels["small_labels"].tolist() == own.test_labels.tolist()


def the_risk_is_of_the_full_model_on_its_validation_images(cls):
    """What a search chooses by."""
    task = cls(make().settings)
    engine = Surer(task.images.train_labels[-144:])
    task.run(engine)
    assert dict(engine.logged) == {"risk": pytest.approx(-math.log(0.5), rel=1e-3)}


class Surer(TwoSamples):
    """The full model gives the validation labels a probability of a half, and all else one of a tenth."""

    def __init__(self, labels):
        super().__init__()
        self.labels = labels

    def predict(self, method, inputs, num_samples):
        """The same in every sample."""
        probs = torch.full((num_samples, len(inputs), 10), 0.1)
        if method.number == 1 and len(inputs) == len(self.labels):
            probs[...] = 0.5 / 9
            probs[:, range(len(inputs)), self.labels] = 0.5
        return Categorical(probs.log())


class OfTheSmallModel(ActiveTesting):
    """Logs what the model of fewer images says of the same ones."""

    def run(self, engine):
        """The run, and another risk."""
        arrays = super().run(engine)
        inputs, labels = self.examples("full")[1].tensors
        seen = engine.predict(toys.Fitted(2), inputs, 2).average()
        engine.log("risk", metrics.negative_log_likelihood(seen.numpy(), labels.numpy()))
        return arrays


def test_a_search_sees_the_risk_of_the_full_model_on_its_validation_images():
    """Control: the other model; that of the other images is caught in `conformance/test_truth.py`."""
    the_risk_is_of_the_full_model_on_its_validation_images(ActiveTesting)
    with pytest.raises(AssertionError, match="risk"):
        the_risk_is_of_the_full_model_on_its_validation_images(OfTheSmallModel)


class Opinions:
    """An engine whose k-th fit says at every input what `rows` say: two samples of ten classes each."""

    def __init__(self, rows):
        self.rows, self.problems = rows, []

    def fit_stages(self, stages, pose, budget):
        """The rows themselves, and which problem each was asked to fit."""
        for k, _ in enumerate(stages):
            self.problems.append(pose(k))
            yield self.rows[k]

    def stage(self, *arguments):
        """Nothing."""

    def log(self, *arguments):
        """Nothing."""

    def predict(self, row, inputs, samples):
        """The same samples `[2, N, 10]` at every input."""
        probs = torch.full((2, len(inputs), 10), 1e-4)
        probs[..., :2] = torch.tensor(row)[:, None]
        return Categorical((probs / probs.sum(-1, keepdim=True)).log())


def test_expected_loss_is_that_of_the_first_fit_in_the_belief_of_the_second():
    """By hand: the first says 0.9 and 0.1 of two classes, the second on average 0.3 and 0.7.

    The cheat would be the first fit's own belief, its predictive entropy of 0.33 nats.
    """
    sure, doubt = [[0.9, 0.1], [0.9, 0.1]], [[0.1, 0.9], [0.5, 0.5]]
    engine = Opinions([sure, doubt, doubt, sure])
    arrays = make(score="expected_loss").run(engine)
    assert [len(problem.train) for problem in engine.problems] == [1298, 301, 1298, 301]
    full = -(0.3 * np.log(0.9) + 0.7 * np.log(0.1))
    small = -(0.9 * np.log(0.3) + 0.1 * np.log(0.7))
    for model, loss in (("full", full), ("small", small)):
        np.testing.assert_allclose(arrays[f"{model}_scores"], loss, atol=0.02)
    by_first = metrics.restore(arrays["full_log_probs"])
    np.testing.assert_allclose(np.exp(by_first[:, :2]), [[0.9, 0.1]] * 355, atol=1e-3)


def test_second_fits_start_elsewhere_and_leave_the_first_as_they_are():
    plain = run(make(**FEW))
    own = run(make(**FEW, score="expected_loss"))
    for model in ("full", "small"):
        np.testing.assert_array_equal(own[f"{model}_log_probs"], plain[f"{model}_log_probs"])
        log_probs = metrics.restore(own[f"{model}_log_probs"])
        entropy = -(np.exp(log_probs) * log_probs).sum(1)
        assert own[f"{model}_scores"].shape == entropy.shape
        assert (own[f"{model}_scores"] >= 0).all()
        assert np.abs(own[f"{model}_scores"] - entropy).max() > 0.05


def test_score_plays_the_trajectories_of_the_stored_losses_and_scores():
    rng = np.random.default_rng(0)
    task = make(trajectories=300, acquired=10)
    arrays, losses = {}, {}
    for model, size in (("full", 40), ("small", 30)):
        labels = rng.integers(10, size=size).astype(np.uint8)
        log_probs = torch.from_numpy(rng.standard_normal((size, 10))).log_softmax(1)
        arrays |= {
            f"{model}_log_probs": metrics.store(log_probs),
            f"{model}_scores": rng.random(size).astype(np.float32),
            f"{model}_labels": labels,
        }
        losses[model] = -metrics.restore(arrays[f"{model}_log_probs"])[np.arange(size), labels]
    scores = task.score(arrays)
    full, small = (
        testing.simulate(losses[m], arrays[f"{m}_scores"].astype(float), 1e4, 300, 10)
        for m in ("full", "small")
    )
    assert scores["risk"] == pytest.approx(losses["full"].mean())
    for guide in testing.GUIDES:
        error = full.squared_error(guide, "lure")[:, -1].mean()
        assert scores[f"error_{guide}_lure"] == pytest.approx(error)
        assert scores[f"ratio_{guide}"] == pytest.approx(error / scores["error_uniform"])
        assert scores[f"ratio_{guide}_low"] < scores[f"ratio_{guide}"] < scores[f"ratio_{guide}_high"]
    for e in active.OBJECTIVES:
        bias = small.risk - small.estimates["softmax"][e][:, -1]
        assert scores[f"bias_{e}"] == pytest.approx(bias.mean())
        assert scores[f"bias_{e}_error"] == pytest.approx(bias.std(ddof=1) / np.sqrt(300))
    assert scores.keys() == task.spec.metrics.keys()
    # Other arrays on the same task are played anew.
    moved = arrays | {"full_labels": np.roll(arrays["full_labels"], 1)}
    assert task.score(moved)["risk"] != scores["risk"]


def test_point_mass_has_the_ratio_one():
    arrays = run(make(**FEW), MAP)
    assert (arrays["full_scores"] == 0).all()
    task = make(**FEW)
    scores = task.score(arrays | task.targets())
    assert scores["ratio_proportional"] == pytest.approx(1)
    assert scores["first_draw_ratio_softmax"] == pytest.approx(1)


def test_races_do_not_depend_on_how_many_are_drawn_at_once(monkeypatch):
    weights = {"a": np.log(np.arange(1.0, 31.0)), "b": np.zeros(30)}
    whole = testing.races(weights, 50, 10)
    testing._fair_race.cache_clear()
    monkeypatch.setattr(testing, "_CHUNK", 100)
    for name, found in testing.races(weights, 50, 10).items():
        for piece, all_at_once in zip(found, whole[name], strict=True):
            np.testing.assert_array_equal(piece, all_at_once)
