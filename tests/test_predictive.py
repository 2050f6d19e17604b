"""Predictive mixtures: quantiles, the two parts of uncertainty, draws, abstention, risk by coverage."""

import time

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.optimize import brentq

from bench.errors import UsageError
from bench.studies import calibration, normals, own
from bench.studies.predictive import Classes, Numbers, risk_rows

PROBABILITIES = (1e-300, 1e-100, 1e-12, 1e-3, 0.05, 0.3, 0.5, 0.7, 0.95, 0.999, 1 - 1e-12)


def mixtures(size, samples, seed=0, spread=1.0):
    """Means and standard deviations `[S, N]` of random mixtures; the logarithms of scales have this sd."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(samples, size)), np.exp(spread * rng.normal(size=(samples, size)))


# ---- quantiles


def test_quantiles_are_those_of_an_independent_solver():
    """By brentq on the normals of scipy; and one normal is its own mixture."""
    mean, sigma = mixtures(20, 7)
    for p in (0.001, 0.05, 0.5, 0.9):
        found = normals.quantiles(mean, sigma, p)
        for n in range(20):
            m, s = mean[:, n], sigma[:, n]
            ends = stats.norm.ppf(p, m, s).min() - 1, stats.norm.ppf(p, m, s).max() + 1
            expected = brentq(lambda x: stats.norm.cdf(x, m, s).mean() - p, *ends, xtol=1e-13)  # noqa: B023
            assert found[n] == pytest.approx(expected, abs=1e-11)
        np.testing.assert_allclose(
            normals.quantiles(mean[:1], sigma[:1], p), stats.norm.ppf(p, mean[0], sigma[0])
        )


def test_an_interval_leaves_out_as_much_on_both_sides():
    """5% of the mixture below it and above it, by the normals of scipy."""
    mean, sigma = mixtures(20, 7)
    for end, share in zip(Numbers(mean, sigma).interval(0.9), (0.05, 0.95), strict=True):
        np.testing.assert_allclose(stats.norm.cdf(end, mean, sigma).mean(0), share, rtol=1e-10)


@given(
    st.lists(st.tuples(st.floats(-1e4, 1e4), st.floats(-4, 4)), min_size=1, max_size=5),
    st.sampled_from(PROBABILITIES),
)
@settings(max_examples=40, deadline=None)
def test_far_tails_and_unequal_scales_are_right_to_tolerance(normals_, p):
    """Against mpmath with 40 digits: the root is bracketed by the quantile less and plus the tolerance.

    The tolerance is 1e-12 of the narrowest scale, 1e-15 of the quantile, and what rounding of the
    probabilities moves it by.
    """
    mean, sigma = (np.array(part)[:, None] for part in zip(*normals_, strict=True))
    sigma = 10.0**sigma
    (found,) = normals.quantiles(mean, sigma, p)
    tail = min(p, 1 - p)
    density = stats.norm.pdf(found, mean, sigma).mean()
    rounding = 20 * tail * np.finfo(float).eps / density if density else np.inf
    bound = 1e-12 * sigma.min() + 4e-15 * abs(found) + rounding
    if bound > 1e5:  # between two far normals, where every number has this probability
        return

    def excess(x):
        with mpmath.workdps(40):
            terms = [
                mpmath.ncdf((mpmath.mpf(x) - m) / s) for m, s in zip(mean[:, 0], sigma[:, 0], strict=True)
            ]
            return sum(terms) / len(terms) - mpmath.mpf(p)

    slack = mpmath.mpf(20 * np.finfo(float).eps * tail)
    assert excess(float(found - bound)) <= slack
    assert excess(float(found + bound)) >= -slack


@pytest.mark.parametrize("spread", [0.5, 5])
def test_quantiles_grow_with_the_probability(spread):
    """From 1e-12 to 1 - 1e-12; so intervals of higher levels hold those of lower ones."""
    mean, sigma = mixtures(50, 6, spread=spread)
    levels = np.concatenate(
        [10.0 ** np.arange(-12, -2), np.arange(0.01, 1, 0.01), 1 - 10.0 ** np.arange(-3, -13, -1)]
    )
    found = np.stack([normals.quantiles(mean, sigma, p) for p in levels])
    assert (np.diff(found, axis=0) > 0).all()
    dist = Numbers(mean, sigma)
    (low, high), (lower, higher) = dist.interval(0.8), dist.interval(0.9)
    assert ((lower < low) & (low < high) & (high < higher)).all()


def test_the_old_way_by_bisection_is_not_nearer():
    """The probability below is the one asked for, to rounding; one scale for all rows is broadcast."""
    mean, _ = mixtures(200, 30)
    for p in (0.05, 0.95):
        found = normals.quantiles(mean, np.full((1, 1), 0.3), p)
        np.testing.assert_allclose(stats.norm.cdf(found, mean, 0.3).mean(0), p, rtol=1e-13)


@pytest.mark.slow
def test_ten_thousand_rows_take_less_than_a_second():
    """Both ends of an interval under 30 samples, in seconds of the processor; 0.1 were measured."""
    dist = Numbers(*mixtures(10_000, 30, spread=0.5))
    start = time.process_time()
    dist.interval(0.9)
    assert time.process_time() - start < 1


# ---- uncertainty


def test_the_parts_of_a_variance_add_up_to_that_of_the_mixture():
    """By E[x^2] - E[x]^2 of the mixture, and by 20,000 draws (6 standard errors: one false alarm in 1e8)."""
    mean, sigma = mixtures(5, 4)
    dist = Numbers(mean, sigma)
    second = (mean**2 + sigma**2).mean(0)
    np.testing.assert_allclose(dist.aleatoric + dist.epistemic, second - mean.mean(0) ** 2)
    np.testing.assert_allclose(dist.variance, second - mean.mean(0) ** 2)
    np.testing.assert_allclose(Numbers(mean[:1], sigma[:1]).epistemic, 0)
    drawn = dist.sample(20_000)
    assert drawn.shape == (20_000, 5)
    error = np.sqrt(dist.variance / 20_000)
    assert (np.abs(drawn.mean(0) - dist.mean) < 6 * error).all()
    below = (drawn < dist.quantile(0.1)).mean(0)
    assert (np.abs(below - 0.1) < 6 * np.sqrt(0.09 / 20_000)).all()


def test_the_parts_of_an_entropy_are_expected_entropy_and_mutual_information():
    """The second as the mean divergence of the samples from their average, by scipy; draws by frequency."""
    rng = np.random.default_rng(0)
    by_sample = rng.dirichlet([0.3, 0.5, 1], (6, 8))
    dist = Classes(by_sample, np.array(["a", "b", "c"]))
    mean = by_sample.mean(0)
    divergence = np.mean([stats.entropy(p, mean, axis=-1) for p in by_sample], 0)
    np.testing.assert_allclose(dist.epistemic, divergence, atol=1e-12)
    np.testing.assert_allclose(dist.aleatoric, stats.entropy(by_sample, axis=-1).mean(0))
    np.testing.assert_allclose(dist.aleatoric + dist.epistemic, stats.entropy(mean, axis=-1))
    certain = Classes(np.array([[[1.0, 0.0]], [[0.0, 1.0]]]), ["a", "b"])
    assert (certain.aleatoric, certain.epistemic) == (0, pytest.approx(np.log(2)))
    drawn = dist.sample(20_000)
    shares = np.stack([(drawn == name).mean(0) for name in "abc"], 1)
    assert np.abs(shares - mean).max() < 6 * np.sqrt(0.25 / 20_000)


# ---- decisions


def test_the_share_of_largest_expected_loss_is_left():
    """Rounded down; of numbers the variance decides, of classes the least largest probability."""
    dist = Numbers(np.zeros((1, 7)), np.array([[1.0, 5, 3, 5, 2, 0.1, 4]]))
    assert dist.abstain(0.3).nonzero()[0].tolist() == [1, 3]  # of 2.1 rows
    assert dist.abstain(0.5).nonzero()[0].tolist() == [1, 3, 6]
    assert dist.abstain(0).sum() == 0
    assert Numbers(np.zeros((1, 100)), np.ones((1, 100))).abstain(0.29).sum() == 29  # 0.29 * 100 < 29
    # The entropy of the first is larger; its most probable class is the surer one.
    classes = Classes(np.array([[[0.5, 0.25, 0.25], [0.52, 0.48, 0.0], [0.49, 0.51, 0.0]]]), "abc")
    assert classes.entropy.argmax() == 0
    assert classes.abstain(0.34).tolist() == [True, False, False]
    for share in (-0.1, 1, 10, np.nan):
        with pytest.raises(UsageError, match="from 0 to below 1"):
            dist.abstain(share)


def test_risk_by_coverage_is_the_mean_loss_of_the_surest():
    """By a sort of its own; rows that are alike have their mean loss; all rows have the whole risk."""
    rng = np.random.default_rng(0)
    expected, loss = rng.random(53), rng.random(53)
    found = risk_rows(expected, loss, "risk", root=True)
    order = sorted(range(53), key=expected.__getitem__)
    for row in found:
        kept = order[: -(-int(row.x) * 53 // 100)]
        assert row.value == pytest.approx(np.sqrt(np.mean([loss[i] for i in kept])))
    assert found[-1].x == 100
    alike = risk_rows(np.ones(10), np.arange(10) == 0, "risk")
    assert [row.value for row in alike] == pytest.approx([0.1] * 10)


def test_curves_of_classes_are_accuracy_by_confidence_and_error_by_share():
    rng = np.random.default_rng(1)
    log_probs = np.log(rng.dirichlet([1, 1, 1], 90))
    labels = rng.integers(0, 3, 90)
    arrays = {"log_probs": log_probs.astype(np.float16), "labels": labels}
    rows = own.curves(arrays)
    bins = [row for row in rows if row.curve == "accuracy by confidence"]
    assert len(bins) == calibration.BINS
    right = log_probs.argmax(1) == labels
    assert np.mean([row.value for row in bins]) == pytest.approx(right.mean())  # bins of as many rows
    assert [row.value for row in rows if row.curve == "risk, error"][-1] == pytest.approx(1 - right.mean())
    assert own.figures_of(arrays).keys() == {"calibration", "risk"}
