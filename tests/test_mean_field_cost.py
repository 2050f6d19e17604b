"""What independent weights cost: divergences by closed form and by search, draws of known Gaussians."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from drawn import names_in_legends, texts
from oracles import linear
from scipy.optimize import minimize
from torch import nn
from torch.distributions import MultivariateNormal, kl_divergence

from bench import figures
from bench.comparison import FinishedRun
from bench.errors import UsageError
from bench.methods.hmc import HMC
from bench.predictions import Bernoulli
from bench.studies import mean_field, mean_field_comparison
from bench.tasks.mean_field_cost import PARTS, RESOLVED, MeanFieldCost, Settings, kl_error, width
from bench.weights import unravel


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def covariance_of(dimension, seed=0):
    """A covariance with strong correlations."""
    root = np.random.default_rng(seed).standard_normal((dimension, dimension))
    return root @ root.T + 0.3 * np.eye(dimension)


def diagonal(covariance):
    """The variances of the definition, by inversion."""
    return 1 / np.diag(np.linalg.inv(covariance))


def kl(first, second):
    """KL(N(0, first) || N(0, second)) by torch."""
    normals = (
        MultivariateNormal(torch.zeros(len(c), dtype=torch.float64), torch.as_tensor(c))
        for c in (first, second)
    )
    return kl_divergence(*normals).item()


# ---- E_KL


@pytest.mark.parametrize("rho", [0.0, 0.3, -0.9, 0.999])
def test_kl_error_of_two_weights_by_hand(rho):
    """D = 1 - rho^2 twice, so that it is rho^2 / (1 - rho^2) + log(1 - rho^2) / 2, in any units."""
    expected = rho**2 / (1 - rho**2) + math.log1p(-(rho**2)) / 2
    for scale in (1.0, 1e-3):
        units = np.diag([scale, 5.0])
        found = kl_error(units @ np.array([[1, rho], [rho, 1]]) @ units)
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("dimension", [1, 2, 7, 40])
def test_kl_error_is_that_of_torch(dimension):
    covariance = covariance_of(dimension)
    variances = diagonal(covariance)
    np.testing.assert_allclose(mean_field.diagonal_variances(covariance), variances, rtol=1e-9)
    assert kl_error(covariance) == pytest.approx(kl(covariance, np.diag(variances)), rel=1e-9, abs=1e-12)


def test_independent_weights_lose_nothing():
    assert kl_error(np.diag([1e-8, 1.0, 7.0, 1e6])) == pytest.approx(0, abs=1e-12)


def test_diagonal_fit_is_the_nearest_one_that_variational_inference_finds():
    """Search over all variances for the least KL(diagonal || full); the other direction's optimum is another.

    Negative control: the marginal variances minimise KL(full || diagonal), and would make E_KL smaller.
    """
    covariance = covariance_of(4)

    def search(divergence):
        found = minimize(
            lambda logs: divergence(np.diag(np.exp(logs))), np.zeros(4), method="BFGS", tol=1e-10
        )
        return np.exp(found.x)

    of_inference = search(lambda d: kl(d, covariance))
    np.testing.assert_allclose(of_inference, mean_field.diagonal_variances(covariance), rtol=1e-4)
    of_moments = search(lambda d: kl(covariance, d))
    np.testing.assert_allclose(of_moments, np.diag(covariance), rtol=1e-4)
    assert kl(covariance, np.diag(of_moments)) < 0.9 * kl_error(covariance)


@pytest.mark.parametrize(
    "wrong",
    [np.ones(3), np.ones((2, 3)), np.array([[1, 0.5], [0.1, 1]]), np.ones((2, 2)), np.diag([1.0, -1.0])],
    ids=["vector", "not square", "not symmetric", "singular", "indefinite"],
)
def test_what_is_no_covariance_is_refused(wrong):
    with pytest.raises(ValueError, match="covariance is"):
        kl_error(wrong)


# ---- E_W


def test_wasserstein_distance_is_the_least_over_all_pairings():
    numbers = np.random.default_rng(0)
    first, second = numbers.standard_normal((2, 6, 3))
    costs = [
        np.square(first - second[list(order)]).sum(1).mean() for order in itertools.permutations(range(6))
    ]
    assert mean_field.wasserstein(first, second) == pytest.approx(math.sqrt(min(costs)))
    shifted = first[::-1] + np.array([3.0, 0.0, 4.0])
    assert mean_field.wasserstein(first, shifted) == pytest.approx(5)


# ---- draws of known Gaussians


def draws_of(covariance, count, seed=0):
    root = np.linalg.cholesky(covariance)
    return np.random.default_rng(seed).standard_normal((count, len(covariance))) @ root.T


@pytest.fixture(scope="module")
def correlated():
    """Covariance, 2000 draws, their errors and their floor."""
    covariance = np.array([[1, 0.9, 0], [0.9, 1, 0.5], [0, 0.5, 2]])
    draws = draws_of(covariance, 2000)
    found = mean_field.errors(draws, draws.mean(0), mean_field.estimate(draws, 1e-6), generator())
    return covariance, found, mean_field.floor(2000, np.zeros(3), found.variances, 1e-6, generator(1))


def test_errors_of_a_correlated_gaussian_are_near_the_truth(correlated):
    """E_KL within 15%: twice its standard error at 2000 draws, with the seed fixed. E_W is well above 0."""
    covariance, found, least = correlated
    assert found.kl == pytest.approx(kl_error(covariance), rel=0.15)
    assert found.to_diagonal - found.to_full > 0.1
    assert least.kl < 0.01 * found.kl
    assert abs(least.to_diagonal - least.to_full) < 0.05


def test_independent_weights_stand_at_their_floor():
    """The cheat: draws without correlations give the floor, d (d - 1) / 4 N, within 4 standard errors of 40.

    Each of d (d - 1) / 2 pairs adds half a squared partial correlation, of mean 1 / N to first order. Where
    draws are fewer than weights the floor is that of the ridge, and orders of magnitude above any geometry.
    """
    d, count = 6, 600
    values = [
        kl_error(mean_field.estimate(draws_of(np.diag(np.linspace(0.1, 3, d)), count, seed), 1e-6))
        for seed in range(40)
    ]
    expected = d * (d - 1) / (4 * count)
    assert abs(np.mean(values) - expected) < 4 * np.std(values) / math.sqrt(40) + expected * d / count
    few = [mean_field.floor(20, np.zeros(40), np.ones(40), ridge, generator()).kl for ridge in (1e-4, 1e-6)]
    assert few[0] > 1000
    assert few[1] > 20 * few[0]


def test_heaviest_component_is_that_of_most_draws():
    """Two Gaussians apart, 400 draws and 200; one alone has one component. Members are told by their rows."""
    one, other = draws_of(covariance_of(2), 400), draws_of(covariance_of(2, 1), 200, 1) + 40
    mode = mean_field.heaviest(np.concatenate([other, one]), 1e-6, generator())
    assert mode.components == 2
    assert (mode.members == (np.arange(600) >= 200)).all()
    np.testing.assert_allclose(mode.mean, one.mean(0), rtol=1e-6)
    np.testing.assert_allclose(mode.covariance, mean_field.estimate(one, 1e-6), rtol=1e-6)
    assert mean_field.heaviest(one, 1e-6, generator()).components == 1


# ---- where chains start


def test_chains_start_at_the_optimum_of_independent_normals():
    """Of a linear model: its means are the posterior's, here within 0.3 posterior standard deviations."""
    truth = linear.Truth(None)
    problem = replace(truth.problem, network=lambda dropout=0.0: nn.Sequential(nn.Linear(3, 1)))
    before = torch.random.get_rng_state()
    found = mean_field.optimum(problem, 800, generator())
    assert torch.equal(torch.random.get_rng_state(), before)
    away = torch.cat([w.flatten() for w in found.values()]).double() - truth.mean
    assert (away / torch.linalg.inv(truth.precision).diagonal().sqrt()).abs().max() < 0.3


# ---- the task


@pytest.mark.parametrize("weights", [100, 1000])
def test_networks_of_all_depths_have_about_as_many_weights(weights):
    """Of the published size within 7%; of the reduced one within 28%, for a unit more or less is so much."""
    for depth in range(1, 11):
        problem = MeanFieldCost(Settings(depth=depth, weights=weights)).problem()
        found = sum(p.numel() for p in problem.network().parameters() if p.ndim == 2)
        units = width(depth, weights)
        assert found == 3 * units + (depth - 1) * units**2
        assert abs(found - weights) <= (0.07 if weights == 1000 else 0.28) * weights, depth


class Drawn:
    """A fitted method whose draws are handed in, `[C, N, d]`."""

    def __init__(self, draws, network):
        self.draws, self.like = draws, dict(network.named_parameters())
        self.num_chains, self.num_draws = draws.shape[0], draws.shape[0] * draws.shape[1]

    def sample_weights(self, num_samples, generator):
        """All of them."""
        assert num_samples == self.num_draws
        return unravel(self.draws.flatten(0, 1), self.like)


def chains_of(covariance, keep, seed):
    """Four chains of 1000 draws of a Gaussian, each `keep` times the one before it plus noise."""
    noise = draws_of(covariance, 4000, seed).reshape(4, 1000, -1)
    chains = noise.copy()
    for t in range(1, 1000):
        chains[:, t] = keep * chains[:, t - 1] + np.sqrt(1 - keep**2) * noise[:, t]
    return chains


def limit_of(chains):
    parts = mean_field.of_parts(chains, np.ones(chains.shape[:2], bool), 1e-6)
    return parts, *mean_field.limits(parts)


@pytest.mark.parametrize("covariance", [np.eye(12), covariance_of(12)], ids=["independent", "correlated"])
def test_limit_has_no_bias_of_slow_chains(covariance):
    """A chain that keeps 0.9 of itself has a nineteenth of its draws: 12 weights then seem to lose 0.18 nats.

    The mean over 40 seeds is within 4 standard errors of the truth (false alarms: 1 in 10,000); that of the
    errors themselves is not, nor that of errors less the floor of independent draws.
    """
    found = [limit_of(chains_of(covariance, 0.9, seed)) for seed in range(40)]
    plain, limits = np.array([(parts[0], high) for parts, _, high in found]).T
    truth, floor = kl_error(covariance), 12 * 11 / (4 * 4000)
    for values, is_biased in ((limits, False), (plain, True), (plain - floor, True)):
        away = abs(values.mean() - truth) / (values.std() / math.sqrt(40))
        assert (away > 4) == is_biased


@pytest.mark.parametrize(("keep", "plain"), [(0.0, 1.61), (0.5, 2.74), (0.7, 5.01)])
def test_limits_hold_the_truth_between_them_at_the_size_of_the_study(keep, plain):
    """4000 draws of 157 independent weights, which lose nothing: the upper limit is above 0, the lower below.

    One run scatters by 0.1 nats at most, so that a mean of eight may be 0.1 on the wrong side (false alarms:
    1 in 400). The limits are the farther from each other the slower the chains are.
    """
    found = [limit_of(chains_of(np.eye(157), keep, seed)) for seed in range(8)]
    of_all, low, high = np.array([(parts[0], low, high) for parts, low, high in found]).mean(0)
    assert of_all == pytest.approx(plain, abs=0.1)
    assert low - 0.1 < 0 < high + 0.1
    assert (high - low <= RESOLVED) == (keep < 0.7)
    assert high < 0.25


def test_chains_that_never_moved_have_no_lower_limit():
    parts, low, high = limit_of(np.ones((4, 100, 3)))
    assert parts.tolist() == [0, 0, 0]
    assert np.isnan(low)
    assert high == 0


def test_limit_of_too_few_draws_is_undefined():
    """A quarter of 4 x 30 draws has 30, and 17 weights need 34."""
    draws = draws_of(np.eye(17), 120).reshape(4, 30, 17)
    parts, *limits = limit_of(draws)
    assert len(parts) == 2
    assert np.isnan(limits).all()


class Sampler:
    """An engine whose fit has these draws; of the points half are told right, by every draw."""

    def __init__(self, draws):
        self.draws = draws

    def fit(self, problem, budget):
        """The draws."""
        self.problem = problem
        return Drawn(self.draws, problem.network())

    def predict(self, method, inputs, num_samples):
        """Moon 1 for all; draws of probability 0.9 with a little spread, the same in all chains."""
        spread = torch.randn(num_samples, 1, generator=generator(5)) / 10
        return Bernoulli((2.0 + spread).expand(num_samples, len(inputs)))

    def generator(self, *purpose):
        """Of the purpose."""
        return generator(len(purpose[0]))

    def stage(self, *arguments):
        """Nothing."""


SMALL = {"weights": 12, "depth": 1, "start_steps": 3}  # 4 units: 17 weights and biases


def scores_of(draws, **values):
    task = MeanFieldCost(Settings(**{**SMALL, **values}))
    engine = Sampler(torch.as_tensor(draws))
    arrays = task.run(engine) | task.targets()
    return task.score(arrays), engine


def test_run_tells_the_geometry_of_its_draws():
    """Two chains of independent draws of one known Gaussian, a tenth of them said twice."""
    covariance = covariance_of(17)
    draws = draws_of(covariance, 3000).reshape(2, 1500, 17)
    moving = draws.copy()
    moving[:, 10::10] = moving[:, 9:-1:10]
    scores, engine = scores_of(moving)
    assert scores["kl_error"] == pytest.approx(kl_error(covariance), rel=0.15)
    assert scores["kl_floor"] < 1
    assert scores["kl_limit"] == pytest.approx(kl_error(covariance), rel=0.1)
    assert scores["wasserstein_error"] > 1 > scores["wasserstein_floor"]
    assert scores["acceptance"] == pytest.approx(1 - 149 / 1499)
    assert (scores["components"], scores["heaviest_share"]) == (1, 1)
    assert scores["draws_per_weight"] == pytest.approx(3000 / 17)
    assert scores["accuracy"] == scores["draw_accuracy"] == 0.5
    assert scores["kl_limit_low"] == pytest.approx(kl_error(covariance), rel=0.1)
    assert scores["mixed"] == scores["resolved"] == 1
    start = engine.problem.starts_from()
    assert {name: w.shape for name, w in start.items()} == {
        name: w.shape for name, w in engine.problem.network().named_parameters()
    }


def test_chain_that_drifts_has_not_mixed_and_chains_apart_may_have():
    """Weights need not agree between chains: those of the heavier mode alone are looked at."""
    draws = draws_of(covariance_of(17), 2000).reshape(2, 1000, 17)
    apart = draws.copy()
    apart[1] += 50
    scores, _ = scores_of(apart)
    assert (scores["components"], scores["heaviest_share"], scores["mixed"]) == (2, 0.5, 1)
    drift = apart.copy()
    drift[:, :, 3] += np.linspace(0, 5, 1000)
    scores, _ = scores_of(drift)
    assert scores["weight_rhat"] > 1.05
    assert scores["mixed"] == 0


def test_chains_within_one_component_must_agree():
    """Each moves well about a place of its own, too near to the other's for two Gaussians."""
    draws = draws_of(np.eye(17), 2000).reshape(2, 1000, 17)
    draws[1, :, 0] += 1
    scores, _ = scores_of(draws)
    assert scores["components"] == 1
    assert scores["weight_rhat"] > 1.05


def test_too_few_draws_are_refused():
    with pytest.raises(UsageError, match="at least 4 draws of each of 2 chains, and there are 6 in all"):
        scores_of(np.zeros((2, 3, 17)))


def test_points_are_those_of_the_source():
    task = MeanFieldCost(Settings())
    inputs, labels = task.own_data("train")
    assert inputs.shape == (500, 2)
    assert labels.bincount().tolist() == [250, 250]
    assert PARTS["train"] == (500, 0)
    seen = {tuple(x) for x in inputs.tolist()}
    held_out = {tuple(x) for x in task.own_data("test")[0].tolist()}
    assert len(held_out) == 1000
    assert len(seen & held_out) <= 4  # ends of the two half circles


# ---- several depths


def finished(depth, seed, value, mixed=1.0, activation="relu"):
    """A run with these errors; floors of 1."""
    task = MeanFieldCost(Settings(depth=depth, activation=activation))
    metrics = dict.fromkeys(task.spec.metrics, 0.5) | {
        **{
            "kl_limit": value,
            "kl_limit_low": value - 0.1,
            "kl_error": value + 1,
            "wasserstein_error": value / 10,
            "mixed": mixed,
        },
        **{"kl_floor": 1.0, "wasserstein_floor": 0.1},
    }
    identity = f"mean_field_cost+depth={depth},activation={activation}"
    more = {"metrics": metrics, "provides": HMC.provides}
    return FinishedRun(task, "mean_field_cost", identity, "hmc", "hmc", "standard", seed, **more)


def test_a_fall_with_depth_is_said_with_its_interval():
    """Differences of -8, -7 and -9 nats between depths 8 and 1: their mean, and Student's half width."""
    levels = {1: (10, 10, 10), 8: (2, 3, 1)}
    runs = [finished(d, seed, v) for d, of in levels.items() for seed, v in enumerate(of)]
    found = MeanFieldCost.compare(runs)
    half = 4.302652729911275 / math.sqrt(3)
    expected = f"minus that with 1 is -8 ({-8 - half:.4g} to {-8 + half:.4g}, 95%, n = 3) nats: it falls"
    (said,) = [sentence for sentence in found.sentences if "E_KL" in sentence]
    assert expected in said
    assert [row[:4] for row in found.rows] == [["relu", "1", "3", "3"], ["relu", "8", "3", "3"]]
    assert found.charts.keys() == {"kl", "wasserstein"}


def test_depths_that_did_not_mix_are_shown_and_enter_no_trend():
    """One restart of depth 8 did not; the fall to it is not claimed, and its points are drawn as such.

    Negative control: with that restart mixed the same numbers are a fall.
    """
    levels = {1: (10, 10, 10), 4: (9, 11, 10), 8: (2, 3, 1)}
    honest, cheat = (
        [
            finished(d, seed, v, 0.0 if (d, seed, is_told) == (8, 1, True) else 1.0)
            for d, of in levels.items()
            for seed, v in enumerate(of)
        ]
        for is_told in (True, False)
    )
    found = MeanFieldCost.compare(honest)
    assert not any("falls" in sentence for sentence in found.sentences)
    assert "relu: E_KL at 8 hidden layers enters no trend: not all restarts mixed" in found.sentences
    assert found.rows[-1][:4] == ["relu", "8", "3", "2"]
    spec = found.charts["kl"].to_dict()
    *_, curves, points = [layer["data"]["values"] for layer in spec["layer"]]
    assert {row["depth"] for row in points if row["state"] == mean_field_comparison.STATES[1]} == {8}
    assert {row["depth"] for row in curves if row["kind"] == mean_field_comparison.KINDS["limit"]} == {1, 4}
    assert any("with 8 hidden layers minus that with 1" in s for s in MeanFieldCost.compare(cheat).sentences)


def test_depths_whose_draws_are_too_few_enter_no_trend():
    """The number that all have rises with how slowly chains move, and says nothing of depth."""
    levels = {1: (10, 10, 10), 4: (9, 11, 10), 8: (2, 3, 1)}
    runs = [finished(d, seed, v) for d, of in levels.items() for seed, v in enumerate(of)]
    runs[4] = replace(runs[4], metrics={**runs[4].metrics, "kl_limit": None})
    found = MeanFieldCost.compare(runs)
    assert "relu: E_KL at 4 hidden layers enters no trend: `kl_limit` is not defined" in found.sentences
    assert any("E_KL with 8 hidden layers minus that with 1 is -8" in s for s in found.sentences)


def test_lines_are_activations():
    runs = [finished(2, 0, 1.0, activation=a) for a in ("relu", "linear")]
    found = MeanFieldCost.compare(runs)
    assert [row[0] for row in found.rows] == ["linear", "relu"]
    names = {"linear", "relu", *mean_field_comparison.KINDS.values(), mean_field_comparison.STATES[0]}
    assert names_in_legends(found.charts["kl"]) == names
    assert names <= set(texts(figures.svg(found.charts["kl"], "none")))
    other = replace(runs[0], method_name="mfvi", method_identity="mfvi")
    assert {row[0] for row in MeanFieldCost.compare([*runs, other]).rows} == {
        *("linear, hmc", "relu, hmc", "relu, mfvi")
    }
    with pytest.raises(UsageError, match="seed 0 is given twice"):
        MeanFieldCost.compare([runs[0], runs[0]])


def test_chains_of_one_depth_may_be_longer_than_those_of_another():
    """Draws of chains that mixed are the posterior's own, however long the chains are.

    Negative controls: fits of mfvi under other settings are another line, and so are two lengths of one cell.
    """
    short, long = finished(1, 0, 10.0), replace(finished(4, 0, 9.0), method_identity="hmc+leapfrog_steps=300")
    assert [row[:2] for row in MeanFieldCost.compare([short, long]).rows] == [["relu", "1"], ["relu", "4"]]
    mfvi = {"method_name": "mfvi", "provides": frozenset({"moments"})}
    fits = [replace(r, method_identity=f"mfvi+{k}", **mfvi) for k, r in enumerate((short, long))]
    assert {row[0] for row in MeanFieldCost.compare(fits).rows} == {"relu, mfvi+0", "relu, mfvi+1"}
    both = [short, replace(short, method_identity="hmc+leapfrog_steps=300")]
    assert {row[0] for row in MeanFieldCost.compare(both).rows} == {
        "relu, hmc",
        "relu, hmc+leapfrog_steps=300",
    }
