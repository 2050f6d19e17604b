"""Scores of predicted numbers: CRPS, intervals, coverage, sharpness, PIT values."""

import numpy as np
import pytest
from scipy import stats
from scipy.special import ndtr

from bench.studies import forecasts, normals


def mixtures(size, samples, seed=0):
    """Means and standard deviations `[S, N]` of random mixtures, and targets `[N]`."""
    rng = np.random.default_rng(seed)
    shape = samples, size
    return rng.normal(size=shape), np.exp(0.7 * rng.normal(size=shape)), 2 * rng.normal(size=size)


# ---- CRPS


def integral(mean, sigma, target):
    """Of (F(x) - [y <= x])^2, by Gauss's rule on pieces of a quarter of the narrowest normal, split at y."""
    nodes, weights = np.polynomial.legendre.leggauss(12)
    ends = (mean - 12 * sigma).min(), (mean + 12 * sigma).max()
    low, high = min(ends[0], target), max(ends[1], target)
    found = 0.0
    for a, b, step in ((low, target, 0), (target, high, 1)):
        edges = np.linspace(a, b, 2 + int((b - a) / (0.25 * sigma.min())))
        half = np.diff(edges)[:, None] / 2
        x = edges[:-1, None] + half * (1 + nodes)
        below = ndtr((x[..., None] - mean) / sigma).mean(-1)
        found += float(((below - step) ** 2 * half * weights).sum())
    return found


@pytest.mark.parametrize("samples", [1, 2, 9])
def test_crps_is_the_integral_that_defines_it(samples):
    mean, sigma, targets = mixtures(6, samples)
    expected = [integral(mean[:, n], sigma[:, n], targets[n]) for n in range(6)]
    np.testing.assert_allclose(forecasts.crps(mean, sigma, targets), expected, rtol=0, atol=1e-10)


def test_crps_is_that_of_scoringrules():
    """Its mixtures of normals, 300 at random of 13 normals: more than one block of ours."""
    library = pytest.importorskip(
        "scoringrules", reason="pip install scoringrules: the library compared with"
    )
    mean, sigma, targets = mixtures(300, 13)
    expected = library.crps_mixnorm(targets, mean.T, sigma.T, backend="numpy")
    np.testing.assert_allclose(forecasts.crps(mean, sigma, targets), expected, rtol=0, atol=1e-10)


def test_crps_of_points_is_their_energy_score():
    """Narrow normals are points: mean |x - y| less half the mean |x - x'| over all pairs."""
    mean, _, targets = mixtures(5, 4)
    found = forecasts.crps(mean, np.full_like(mean, 1e-9), targets)
    pairs = np.abs(mean[:, None] - mean[None]).mean((0, 1))
    np.testing.assert_allclose(found, np.abs(mean - targets).mean(0) - pairs / 2, atol=1e-8)


def test_crps_falls_on_the_truth_and_nowhere_else():
    """Its expectation over the truth is least there; the cheats are half and twice the width, and a shift.

    Targets are the quantiles of N(0, 1) at 20,000 even probabilities: nothing is drawn.
    """
    targets = stats.norm.ppf((np.arange(20_000) + 0.5) / 20_000)
    expected = {}
    for name, (mean, sigma) in {"truth": (0, 1), "half": (0, 0.5), "twice": (0, 2), "off": (0.5, 1)}.items():
        table = np.full((1, len(targets)), float(mean)), np.full((1, len(targets)), float(sigma))
        expected[name] = forecasts.crps(*table, targets).mean()
    assert expected["truth"] == pytest.approx(1 / np.sqrt(np.pi), abs=1e-4)
    assert min(expected.values()) == expected["truth"]
    assert sorted(expected.values())[1] > expected["truth"] + 0.03


# ---- intervals


def test_interval_score_by_hand():
    """Inside it is the width; outside 2 / (1 - level) times the distance is added, on either side."""
    low, high = np.array([0.0, 0.0, 0.0]), np.array([2.0, 2.0, 2.0])
    found = forecasts.interval_score(low, high, np.array([1.0, -0.5, 3.0]), 0.9)
    np.testing.assert_allclose(found, [2, 2 + 20 * 0.5, 2 + 20 * 1])


def test_interval_score_is_least_at_the_quantiles():
    """Of N(0, 1) its expectation, over 20,000 even quantiles, at ends that are moved by 0.1 in or out."""
    targets = stats.norm.ppf((np.arange(20_000) + 0.5) / 20_000)
    end = stats.norm.ppf(0.95)
    found = {
        (a, b): forecasts.interval_score(np.array(-end + a), np.array(end + b), targets, 0.9).mean()
        for a in (-0.1, 0, 0.1)
        for b in (-0.1, 0, 0.1)
    }
    assert min(found, key=found.get) == (0, 0)


def test_scores_of_a_standard_normal_are_those_of_its_quantiles():
    """Even quantiles of the truth: all coverages are right, widths and scores those of the closed forms.

    The expected interval score of N(0, 1) at its own quantiles is 4 phi(q) / (1 - level).
    """
    targets = stats.norm.ppf((np.arange(20_000) + 0.5) / 20_000)
    found = forecasts.measured(np.zeros((1, 20_000)), np.ones((1, 1)), targets)
    assert found.keys() == forecasts.measures("mm").keys()
    assert found["pit_distance"] == pytest.approx(0.5 / 20_000, abs=1e-9)
    for level in (50, 80, 90, 95):
        end = stats.norm.ppf(0.5 + level / 200)
        error = found["coverage_error" if level == 90 else f"coverage_error_{level}"]
        assert error == pytest.approx(0, abs=1e-9)
        assert found[f"width_{level}"] == pytest.approx(2 * end, rel=1e-10)
        expected = 4 * stats.norm.pdf(end) / (1 - level / 100)
        assert found[f"interval_score_{level}"] == pytest.approx(expected, rel=2e-3)


def test_splits_of_other_widths_are_one_table():
    """Three splits `[K, S, N]` with a standard deviation each, as runs keep them, and the same in one row."""
    rng = np.random.default_rng(3)
    mean, sigma, targets = (
        rng.normal(size=(3, 4, 5)),
        np.array([1.0, 2, 3])[:, None, None],
        rng.normal(size=(3, 5)),
    )
    flat = np.concatenate(list(mean), -1), np.repeat([1.0, 2, 3], 5)[None] * np.ones((4, 1))
    found, expected = forecasts.measured(mean, sigma, targets), forecasts.measured(*flat, targets.ravel())
    assert found == pytest.approx(expected, rel=1e-12)
    other = forecasts.measured(10 * mean, 10 * sigma, 10 * targets)
    for name, metric in forecasts.measures("mm").items():
        assert other[name] == pytest.approx(found[name] * (10 if metric.unit == "mm" else 1))


# ---- PIT values


def test_distance_is_that_of_kolmogorov():
    values = np.random.default_rng(0).beta(2, 1, size=(3, 40))
    expected = stats.kstest(values.ravel(), "uniform").statistic
    assert forecasts.distance(values) == pytest.approx(expected, rel=1e-12)


def pit(share, worlds=2000):
    """PIT values of the predictive of y = w x + noise, for `share` of the posterior's sd of w.

    Weights are drawn from the prior N(0, 1), four points from the weight, one test point at x = 3; the
    posterior of w is normal.
    """
    rng = np.random.default_rng(5)
    w = rng.normal(size=worlds)
    x, noise = rng.normal(size=(worlds, 4)), 0.5
    y = w[:, None] * x + noise * rng.normal(size=(worlds, 4))
    variance = 1 / (1 + (x**2).sum(1) / noise**2)
    mean = variance * (x * y).sum(1) / noise**2
    new = 3 * w + noise * rng.normal(size=worlds)
    sigma = np.sqrt((3 * share) ** 2 * variance + noise**2)
    return normals.below(3 * mean[None], sigma[None], new)


def test_pit_values_of_the_exact_posterior_are_uniform_and_those_of_half_its_width_are_not():
    """By Kolmogorov's test at a level of 0.001, which is how often fresh seeds would refuse the truth."""
    allowed = stats.kstwo.ppf(0.999, 2000)
    assert forecasts.distance(pit(1.0)) < allowed
    assert forecasts.distance(pit(0.5)) > 1.3 * allowed


def test_a_histogram_is_one_where_values_are_even_and_a_valley_where_predictions_are_narrow():
    even = (np.arange(1000) + 0.5).reshape(10, 100) / 1000
    np.testing.assert_allclose(forecasts.histogram(even), 1)
    found = forecasts.histogram(pit(0.3))
    assert found.mean() == pytest.approx(1)
    assert min(found[0], found[-1]) > 1.5 > 1 > found[4:6].max()
