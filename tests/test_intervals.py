"""Intervals and bands: exact where theory is exact, and their coverage of whole curves where it is not."""

import numpy as np
import pytest
from scipy import integrate, optimize, stats

from bench import figures, intervals
from bench.errors import UsageError


def rows(repetitions, points, seed=0):
    return np.random.default_rng(seed).normal(size=(repetitions, points))


# ---- intervals of a number


@pytest.mark.parametrize("count", [3, 5, 40])
def test_students_interval_is_scipys(count):
    values = rows(1, count)[0] + 3
    found = intervals.student(values)
    expected = stats.ttest_1samp(values, 0).confidence_interval()
    assert (found.low, found.high) == pytest.approx(tuple(expected))
    assert found.centre == pytest.approx(values.mean())
    assert found.half == pytest.approx((expected.high - expected.low) / 2)
    assert found.basis == f"n = {count}"
    assert intervals.standard_error(values) == pytest.approx(stats.sem(values))


@pytest.mark.parametrize("splits", [3, 20])
def test_overlapping_splits_have_the_interval_of_equally_correlated_values(splits):
    """Nadeau and Bengio 2003 take a correlation r = test / (test + train), and r / (1 - r) is test / train.

    So the variance of the mean over the expected sample variance, both from the covariance matrix, is what
    stands in place of 1 / K.
    """
    test, train = 51, 455
    r, values = test / (test + train), rows(1, splits, seed=3)[0]
    covariance = np.full((splits, splits), r) + (1 - r) * np.eye(splits)
    centring = np.eye(splits) - 1 / splits
    of_mean = covariance.mean()
    of_sample = np.trace(centring @ covariance) / (splits - 1)
    half = stats.t.ppf(0.975, splits - 1) * values.std(ddof=1) * np.sqrt(of_mean / of_sample)
    assert intervals.student(values, test_to_train=test / train).half == pytest.approx(half, rel=1e-12)
    assert intervals.student(values).half < half  # the cheat: splits that shared nothing


def test_students_interval_holds_the_mean_as_often_as_it_says():
    """2,000 intervals of five normal values: 95% within 4 standard errors (0.0195). False alarm: 6e-5."""
    found = [intervals.student(values) for values in rows(2000, 5)]
    assert np.mean([of.low < 0 < of.high for of in found]) == pytest.approx(0.95, abs=0.0195)


def test_few_values_have_no_interval_and_show_nothing():
    found = intervals.student([1.0, 2.0])
    assert (found.centre, found.sign()) == (1.5, 0)
    assert np.isnan([found.low, found.high, found.half]).all()
    assert f"{found:.2f}" == "1.50 (n = 2: no interval below 3)"
    assert found.said("more", "less") == ": no difference shown"


def test_interval_is_written_and_says_what_it_excludes():
    found = intervals.Interval(1.25, 0.5, 2.0, "n = 4")
    assert f"{found:.1f}" == "1.2 (0.5 to 2.0, 95%, n = 4)"
    assert found.said("more", "less") == ": more"
    assert found.said("more", "less", null=3.0) == ": less"
    assert found.said("more", "less", null=1.0) == ": no difference shown"
    assert [found.sign(null) for null in (0, 0.5, 2.0, 2.1)] == [1, 0, 0, -1]


def test_differences_are_of_what_both_have():
    assert intervals.differences({2: 5.0, 1: 3.0, 9: 0.0}, {1: 1.0, 2: 1.0, 3: 7.0}) == [2.0, 4.0]
    assert intervals.differences({1: 1.0}, {2: 1.0}) == []


def test_moments_of_one_value_have_no_spread():
    assert intervals.Moments.of([3.0]) == (3.0, None, 1)
    assert intervals.Moments.of([1.0, 3.0]) == (2.0, pytest.approx(2**0.5), 2)


# ---- bands of a curve


@pytest.mark.parametrize("repetitions", [2, 39, 40, 1000])
@pytest.mark.parametrize("level", [0.8, 0.95])
def test_one_point_has_students_interval(repetitions, level):
    """Exactly below 40 repetitions; from there on within the error of 4,000 draws, 5%."""
    values = rows(repetitions, 1) + 3
    band = intervals.simultaneous_band(values, level)
    low, high = stats.t.interval(level, repetitions - 1, values.mean(), stats.sem(values[:, 0]))
    assert band.centre[0] == pytest.approx(values.mean(), rel=1e-12)
    assert band.high[0] - band.low[0] == pytest.approx(high - low, rel=1e-9 if repetitions < 40 else 0.05)
    assert band.high[0] - band.centre[0] == pytest.approx(band.centre[0] - band.low[0])


def largest_t(points, freedom, level):
    """Quantile of the largest of |t_1|, ..., |t_M| of independent numerators over one chi, by integration."""

    def coverage(c):
        def given(s):
            return (2 * stats.norm.cdf(c * s) - 1) ** points * stats.chi.pdf(s * freedom**0.5, freedom)

        return integrate.quad(given, 0, 3)[0] * freedom**0.5

    return optimize.brentq(lambda c: coverage(c) - level, 1, 12)


def test_independent_points_have_the_quantile_of_the_largest_t():
    """Ten uncorrelated points of 60 rows, made exactly so: quantile by integration, within 4%."""
    values = np.linalg.qr(rows(60, 11) * np.r_[0, np.ones(10)] + np.r_[1, np.zeros(10)])[0][:, 1:]
    assert np.abs(values.sum(0)).max() < 1e-12
    band = intervals.simultaneous_band(values)
    error = values.std(0, ddof=1) / 60**0.5
    np.testing.assert_allclose(band.high / error, largest_t(10, 59, 0.95), rtol=0.04)


def test_few_repetitions_have_bonferronis_intervals():
    values = rows(5, 8)
    band, error = intervals.simultaneous_band(values), values.std(0, ddof=1) / 5**0.5
    np.testing.assert_allclose((band.high - band.centre) / error, stats.t.ppf(1 - 0.05 / 16, 4))


def test_equal_points_need_no_more_than_one():
    """Correlation 1: ten copies of a curve's point are one point."""
    values = rows(50, 1)
    one, ten = intervals.simultaneous_band(values), intervals.simultaneous_band(np.repeat(values, 10, 1))
    np.testing.assert_allclose(ten.high, np.repeat(one.high, 10), rtol=1e-9)


def coverage(make, truth, repetitions=400, **options):
    """Share of samples whose band holds the whole curve."""
    held = [
        not intervals.simultaneous_band(make(i), **options).excludes(truth).any() for i in range(repetitions)
    ]
    return np.mean(held)


@pytest.mark.slow
@pytest.mark.parametrize("points", [1, 30])
@pytest.mark.parametrize("size", [5, 60])
def test_band_holds_a_random_walk_as_often_as_it_says(size, points):
    """Correlated normal rows, mean 0: coverage 0.95 within 4 standard errors (0.044). False alarm: 2e-4.

    Of many points and few rows it may be more.
    """
    held = coverage(lambda i: rows(size, points, i).cumsum(1), 0)
    error = 4 * (0.95 * 0.05 / 400) ** 0.5
    assert held > 0.95 - error
    assert held < 0.95 + error or (size == 5 and points == 30)


@pytest.mark.slow
def test_band_holds_skewed_means_of_many_rows():
    """Exponential rows, 500 of them, correlated: at least 0.95 - 0.087. False alarm: 1e-3 (binomial)."""

    def skewed(i):
        g = np.random.default_rng(i)
        return g.exponential(size=(500, 10)) + g.exponential(size=(500, 1)) - 2

    assert coverage(skewed, 0, 100) > 0.95 - 4 * (0.95 * 0.05 / 100) ** 0.5


def test_points_without_spread_have_no_width_and_take_none_from_others():
    values = rows(30, 3)
    values[:, 1] = 0.1  # a sum of equal values has rounding errors
    band = intervals.simultaneous_band(values)
    assert band.high[1] - band.low[1] < 1e-14
    np.testing.assert_allclose(
        band.high[[0, 2]], intervals.simultaneous_band(values[:, [0, 2]]).high, rtol=1e-12
    )
    flat = intervals.simultaneous_band(np.full((4, 2), 7.0))
    np.testing.assert_array_equal([flat.low, flat.high], np.full((2, 2), 7.0))


def test_scale_moves_the_band_and_nothing_else():
    values = rows(30, 4)
    band, scaled = intervals.simultaneous_band(values), intervals.simultaneous_band(5 - 3 * values)
    np.testing.assert_allclose(scaled.low, 5 - 3 * band.high, rtol=1e-9)


def test_draws_that_are_kept_change_no_bit(monkeypatch):
    """Of curves of other sizes in turn, so that what is kept is not another curve's."""
    curves = [rows(size, 3, seed) for seed, size in enumerate([50, 60, 50, 50])]
    kept = [intervals.simultaneous_band(values) for values in curves]
    monkeypatch.setattr(intervals, "_MOST_KEPT", 0)
    for band, values in zip(kept, curves, strict=True):
        np.testing.assert_array_equal(band, intervals.simultaneous_band(values))


def test_excludes():
    band = intervals.Band(np.zeros(3), np.array([-1.0, 0.5, -2.0]), np.array([1.0, 2.0, -0.1]))
    assert band.excludes(0).tolist() == [False, True, True]
    assert band.excludes(0.5).tolist() == [False, False, True]


# ---- pairs


def test_paired_difference_is_the_band_of_the_differences():
    a, b = rows(20, 3, 1), rows(20, 3, 2)
    for x, y in zip(intervals.paired_difference(a, b), intervals.simultaneous_band(a - b), strict=True):
        np.testing.assert_array_equal(x, y)


def test_paired_ratio():
    """The ratio of the means; exactly 1 without width for equal measures; reciprocal if swapped."""
    a, b = rows(200, 3, 1) ** 2, rows(200, 3, 2) ** 2
    ratio, swapped = intervals.paired_ratio(a, b), intervals.paired_ratio(b, a)
    np.testing.assert_allclose(ratio.centre, a.mean(0) / b.mean(0))
    np.testing.assert_allclose(ratio.low, 1 / swapped.high, rtol=1e-9)
    same = intervals.paired_ratio(a, a)
    np.testing.assert_allclose([same.low, same.centre, same.high], np.ones((3, 3)), rtol=1e-12)
    np.testing.assert_allclose(intervals.paired_ratio(4 * a, b).high, 4 * ratio.high)


def test_ratios_made_together_are_those_made_one_by_one():
    a, b, c, equal = (rows(200, 3, seed) ** 2 for seed in (1, 2, 3, 3))
    for together, first in zip(intervals.paired_ratios([a, equal, b], c), (a, equal, b), strict=True):
        for limit, alone in zip(together, intervals.paired_ratio(first, c), strict=True):
            np.testing.assert_array_equal(limit, alone)


def test_paired_ratio_of_variances_agrees_with_theory():
    """Independent normals, variances 1 and 4: the log ratio has standard error sqrt(4/R); within 15%."""
    a, b = rows(4000, 1, 3), 2 * rows(4000, 1, 4)
    band = intervals.paired_ratio((a - a.mean()) ** 2, (b - b.mean()) ** 2)
    width = np.log(band.high[0] / band.low[0])
    assert width == pytest.approx(2 * 1.96 * (4 / 4000) ** 0.5, rel=0.15)
    assert band.low[0] < 0.25 < band.high[0]


# ---- by name


def test_bands_by_name():
    values = np.array([[0.0], [1.0], [2.0], [5.0]])
    sd = values.std(ddof=1)
    limits = {"sd": (2 - sd, 2 + sd), "standard_error": (2 - sd / 2, 2 + sd / 2)}
    for kind, (low, high) in limits.items():
        band = intervals.band(values, kind)
        assert band.centre[0] == 2.0
        assert (band.low[0], band.high[0]) == pytest.approx((low, high))
    assert intervals.band(values, "simultaneous").high == intervals.simultaneous_band(values).high
    assert intervals.CAPTIONS.keys() == {*limits, "simultaneous"}


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda: intervals.simultaneous_band(np.zeros(3)), "[R, M] of at least 2 repetitions, not [3]"),
        (lambda: intervals.band(np.zeros((1, 3)), "sd"), "of at least 2 repetitions, not [1, 3]"),
        (lambda: intervals.band(np.full((2, 3), np.nan), "sd"), "a band needs finite values"),
        (lambda: intervals.paired_ratio(np.zeros((2, 1)), np.ones((2, 1))), "a ratio of means needs means"),
    ],
)  # fmt: skip
def test_bad_input_is_one_clear_line(call, line):
    with pytest.raises(UsageError) as info:
        call()
    assert line in str(info.value)
    assert "\n" not in str(info.value)


# ---- figure


@pytest.mark.parametrize("logarithmic", [True, False])
def test_chart_is_drawn_with_all_its_names(tmp_path, logarithmic):
    band = intervals.Band(np.array([1.0, 2.0]), np.array([0.5, 1.0]), np.array([2.0, 3.0]))
    chart = figures.bands(
        {"B": band, "A": band}, [10, 20], ["title", "note"], "M", "risk", {"whole pool": 0.7}, logarithmic
    )
    svg, _ = figures.save({"figure": chart}, tmp_path, "footer")
    text = svg.read_text()
    for word in ("A", "B", "whole pool", "title", "note", "M", "risk"):
        assert f">{word}<" in text
    assert text.index(">B<") < text.index(">A<")
