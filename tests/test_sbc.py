"""sbc: ranks by hand, exact posteriors inside the band, and cheats outside."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from toys import Recorder

from bench.contract import Undefined
from bench.predictions import Gaussian
from bench.studies import ranks
from bench.tasks.sbc import NOISE, NUM_TEST, NUM_TRAIN, SBC, Settings

W, S = 200, 79


def make(model="linear", **values):
    """The task."""
    return SBC(Settings(model=model, **values))


def conjugate(task, factor=1.0, number=S, seed=0):
    """Draws `[W, S, 5]` of sbc_linear's posterior by the normal equations, its sd times a factor."""
    inputs, targets = (t.double().numpy() for t in task.own_data("train"))
    tests = task.own_data("test")[0].double().numpy()[:NUM_TEST]
    design = np.column_stack([inputs[:NUM_TRAIN], np.ones(NUM_TRAIN)])
    precision = design.T @ design / NOISE**2 + np.eye(3)
    mean = np.linalg.solve(precision, design.T @ targets.reshape(-1, NUM_TRAIN).T / NOISE**2).T  # [W, 3]
    half = np.linalg.cholesky(np.linalg.inv(precision))
    noise = np.random.default_rng(seed).standard_normal((len(mean), number, 3))
    weights = mean[:, None] + factor * noise @ half.T
    return weights @ np.column_stack([tests, np.ones(NUM_TEST)]).T


# ---- ranks


def test_ranks_by_hand():
    draws = np.array([[[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]])  # W = 1, S = 3, T = 2
    assert ranks.placed(draws, np.array([[3.0, 0.5]])).tolist() == [[2, 0]]
    found = ranks.deviations(np.array([[2, 0], [2, 3]]), 3)
    # at the first place both ranks are 2: below it 0 in place of 1/2; at the second 1/2 and 1/2 at the ends
    assert found.tolist() == [0.5, 0.25]


def test_intervals_count_ranks_exactly():
    every = np.arange(80)[:, None]
    for level in (0.5, 0.8, 0.9):
        assert ranks.covered(every, 79, level) == (pytest.approx(level), pytest.approx(level))


def test_scale_of_a_normal():
    """A posterior of half the width has z twice as large; 79 draws estimate mean and variance."""
    g = np.random.default_rng(0)
    truth = g.standard_normal((4000, 1))
    for factor in (1.0, 0.5):
        found = ranks.scale(factor * g.standard_normal((4000, S, 1)), truth)
        # z = (t - mean) / s: E z^2 = (1 / factor^2 + 1 / S) (S - 1) / (S - 3)
        exact = math.sqrt((1 / factor**2 + 1 / S) * (S - 1) / (S - 3))
        assert found == pytest.approx(exact, rel=5 / math.sqrt(2 * 4000))  # five standard errors
    assert ranks.scale(np.zeros((3, 4, 2)), np.ones((3, 2))) is None


def test_band_holds_exact_posteriors_at_least_so_often():
    """Of 2000 sets of uniform ranks at 5 places at most 5% leave it; more than 7% by chance below 1e-4."""
    g = np.random.default_rng(1)
    limit = ranks.band(W, 5)
    assert limit == pytest.approx(0.1151, abs=1e-4)
    left = [ranks.deviations(g.integers(0, S + 1, (W, 5)), S).max() > limit for _ in range(2000)]
    assert np.mean(left) <= 0.07


# ---- exact posteriors and cheats


def test_exact_posterior_is_inside_the_band_and_half_its_width_is_not():
    """False alarms: at most 5%, by the band; the seed is fixed."""
    task = make()
    truth = task.targets()
    scores = {f: task.score(truth | {"draws": conjugate(task, f)}) for f in (1.0, 0.5, 2.0)}
    limit = ranks.band(W, NUM_TEST)
    assert scores[1.0]["deviation"] < limit
    assert scores[1.0]["coverage_error"] < 0.05
    assert scores[1.0]["scale_error"] < 0.1
    for factor in (0.5, 2.0):
        assert scores[factor]["deviation"] > limit
        assert scores[factor]["scale_error"] == pytest.approx(math.log(2), abs=0.1)
        assert scores[factor]["nll"] > scores[1.0]["nll"]


def test_cheats_that_ranks_alone_do_not_tell():
    """The prior is calibrated and has learned nothing, which the NLL tells; a point has no interval."""
    task = make()
    truth = task.targets()
    g = np.random.default_rng(2)
    tests = np.column_stack([task.own_data("test")[0].numpy()[:NUM_TEST], np.ones(NUM_TEST)])
    prior = g.standard_normal((W, S, 3)) @ tests.T
    of_prior = task.score(truth | {"draws": prior})
    exact = task.score(truth | {"draws": conjugate(task)})
    assert of_prior["deviation"] < ranks.band(W, NUM_TEST)
    assert of_prior["nll"] > exact["nll"] + 0.5
    middle = truth | {"draws": conjugate(task).mean(1, keepdims=True)}
    draws, _ = task.kept(middle)
    assert draws.shape[1] == task.settings.test_samples > 1
    assert np.ptp(draws, 1).max() == 0
    point = task.score(middle)
    assert point["coverage_error"] == pytest.approx((0.5 + 0.8 + 0.9) / 3)
    assert point["deviation"] > 0.3
    assert isinstance(point["scale_error"], Undefined)


def test_nll_is_that_of_a_normal():
    """Two draws in one place: the expected loss of N(f, noise^2) at a truth d away, in closed form."""
    for away in (0.0, 0.4):
        expected = 0.5 * (1 + away**2 / NOISE**2) + math.log(NOISE * math.sqrt(2 * math.pi))
        found = SBC.nll(np.full((1, 2, 1), away), np.zeros((1, 1)))
        assert found == pytest.approx(expected, rel=1e-9)


# ---- worlds


@pytest.mark.parametrize("model", ["linear", "network"])
def test_worlds_are_draws_of_the_prior_and_of_the_noise(model):
    """Functions have mean 0 and the variance of the prior; false alarms below 1e-4 (four standard errors)."""
    task = make(model)
    inputs, observed = task.own_data("train")
    _, function = task.worlds["train"]
    noise = (observed - function).double().numpy().ravel()
    assert noise.std() == pytest.approx(NOISE, rel=4 / math.sqrt(2 * len(noise)))
    assert stats.kstest(noise / NOISE, "norm").pvalue > 1e-4
    x = inputs.double().numpy()[0]
    values = function.double().numpy().reshape(W, NUM_TRAIN)[:, 0]
    if model == "linear":
        variance = x @ x + 1
    else:  # bias, and 8 units of E tanh(a)^2 for a ~ N(0, |x|^2 + 1), by quadrature
        nodes, weights = np.polynomial.hermite_e.hermegauss(60)
        square = (weights * np.tanh(nodes * math.sqrt(x @ x + 1)) ** 2).sum() / math.sqrt(2 * math.pi)
        variance = 1 + 8 * square
    assert abs(values.mean()) < 4 * math.sqrt(variance / W)
    assert values.var() == pytest.approx(variance, rel=4 * math.sqrt(2 / W) * 1.2)


def test_every_world_is_fitted_to_its_own_observations():
    task = make(worlds=3)
    recorder = Recorder()
    recorder.fit_many = lambda problems, budget: [recorder.fit(p, budget) for p in problems]
    recorder.predict = lambda method, inputs, number: Gaussian(
        torch.full((number, len(inputs), 1), float(method.number)),
        torch.full((number, len(inputs), 1), NOISE**2),
    )
    draws = task.run(recorder)["draws"]
    assert draws.shape == (3, S, NUM_TEST)
    assert [float(d.min()) for d in draws] == [float(d.max()) for d in draws] == [1.0, 2.0, 3.0]
    targets = task.own_data("train")[1]
    for world, problem in enumerate(recorder.problems):
        rows = slice(world * NUM_TRAIN, (world + 1) * NUM_TRAIN)
        assert torch.equal(problem.train.tensors[1], targets[rows])


def test_page_names_the_direction():
    """A row says too narrow of half the width, and nothing of the exact posterior."""
    from bench.comparison import FinishedRun

    task = make()
    runs = []
    for factor, name in ((1.0, "exact"), (0.5, "half"), (2.0, "twice")):
        arrays = task.targets() | {"draws": conjugate(task, factor)}
        metrics = task.score(arrays)
        names = "sbc_linear", "sbc_linear", name, name
        runs.append(FinishedRun(task, *names, "standard", 0, metrics=metrics, read_arrays=arrays.copy))
    rows = SBC.compare(runs).rows
    assert [row[5] for row in rows] == ["as an exact posterior", "too narrow", "too wide"]
