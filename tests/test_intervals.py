"""Bands: exact where theory is exact, and their coverage of whole curves where it is not."""

import numpy as np
import pytest
from scipy import integrate, optimize, stats

from bench import figures
from bench.errors import UsageError
from bench.studies import bands


def rows(repetitions, points, seed=0):
    return np.random.default_rng(seed).normal(size=(repetitions, points))


@pytest.mark.parametrize("repetitions", [2, 39, 40, 1000])
@pytest.mark.parametrize("level", [0.8, 0.95])
def test_one_point_has_students_interval(repetitions, level):
    """Exactly below 40 repetitions; from there on within the error of 4,000 draws, 5%."""
    values = rows(repetitions, 1) + 3
    band = bands.simultaneous_band(values, level)
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
    band = bands.simultaneous_band(values)
    error = values.std(0, ddof=1) / 60**0.5
    np.testing.assert_allclose(band.high / error, largest_t(10, 59, 0.95), rtol=0.04)


def test_few_repetitions_have_bonferronis_intervals():
    values = rows(5, 8)
    band, error = bands.simultaneous_band(values), values.std(0, ddof=1) / 5**0.5
    np.testing.assert_allclose((band.high - band.centre) / error, stats.t.ppf(1 - 0.05 / 16, 4))


def test_equal_points_need_no_more_than_one():
    """Correlation 1: ten copies of a curve's point are one point."""
    values = rows(50, 1)
    one, ten = bands.simultaneous_band(values), bands.simultaneous_band(np.repeat(values, 10, 1))
    np.testing.assert_allclose(ten.high, np.repeat(one.high, 10), rtol=1e-9)


def coverage(make, truth, repetitions=400, **options):
    """Share of samples whose band holds the whole curve."""
    held = [not bands.simultaneous_band(make(i), **options).excludes(truth).any() for i in range(repetitions)]
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
    band = bands.simultaneous_band(values)
    assert band.high[1] - band.low[1] < 1e-14
    np.testing.assert_allclose(band.high[[0, 2]], bands.simultaneous_band(values[:, [0, 2]]).high, rtol=1e-12)
    flat = bands.simultaneous_band(np.full((4, 2), 7.0))
    np.testing.assert_array_equal([flat.low, flat.high], np.full((2, 2), 7.0))


def test_scale_moves_the_band_and_nothing_else():
    values = rows(30, 4)
    band, scaled = bands.simultaneous_band(values), bands.simultaneous_band(5 - 3 * values)
    np.testing.assert_allclose(scaled.low, 5 - 3 * band.high, rtol=1e-9)


def test_excludes():
    band = bands.Band(np.zeros(3), np.array([-1.0, 0.5, -2.0]), np.array([1.0, 2.0, -0.1]))
    assert band.excludes(0).tolist() == [False, True, True]
    assert band.excludes(0.5).tolist() == [False, False, True]


# ---- pairs


def test_paired_difference_is_the_band_of_the_differences():
    a, b = rows(20, 3, 1), rows(20, 3, 2)
    for x, y in zip(bands.paired_difference(a, b), bands.simultaneous_band(a - b), strict=True):
        np.testing.assert_array_equal(x, y)


def test_paired_ratio():
    """The ratio of the means; exactly 1 without width for equal measures; reciprocal if swapped."""
    a, b = rows(200, 3, 1) ** 2, rows(200, 3, 2) ** 2
    ratio, swapped = bands.paired_ratio(a, b), bands.paired_ratio(b, a)
    np.testing.assert_allclose(ratio.centre, a.mean(0) / b.mean(0))
    np.testing.assert_allclose(ratio.low, 1 / swapped.high, rtol=1e-9)
    same = bands.paired_ratio(a, a)
    np.testing.assert_allclose([same.low, same.centre, same.high], np.ones((3, 3)), rtol=1e-12)
    np.testing.assert_allclose(bands.paired_ratio(4 * a, b).high, 4 * ratio.high)


def test_paired_ratio_of_variances_agrees_with_theory():
    """Independent normals, variances 1 and 4: the log ratio has standard error sqrt(4/R); within 15%."""
    a, b = rows(4000, 1, 3), 2 * rows(4000, 1, 4)
    band = bands.paired_ratio((a - a.mean()) ** 2, (b - b.mean()) ** 2)
    width = np.log(band.high[0] / band.low[0])
    assert width == pytest.approx(2 * 1.96 * (4 / 4000) ** 0.5, rel=0.15)
    assert band.low[0] < 0.25 < band.high[0]


# ---- by name


def test_bands_by_name():
    values = np.array([[0.0], [1.0], [2.0], [5.0]])
    sd = values.std(ddof=1)
    limits = {"sd": (2 - sd, 2 + sd), "standard_error": (2 - sd / 2, 2 + sd / 2), "iqr": (0.75, 2.75)}
    for kind, (low, high) in limits.items():
        band = bands.band(values, kind)
        assert band.centre[0] == (1.5 if kind == "iqr" else 2.0)
        assert (band.low[0], band.high[0]) == pytest.approx((low, high))
    assert bands.band(values, "simultaneous").high == bands.simultaneous_band(values).high
    assert bands.CAPTIONS.keys() == {*limits, "simultaneous"}


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda: bands.simultaneous_band(np.zeros(3)), "values [R, M] of at least 2 repetitions, not [3]"),
        (lambda: bands.band(np.zeros((1, 3)), "sd"), "of at least 2 repetitions, not [1, 3]"),
        (lambda: bands.band(np.full((2, 3), np.nan), "iqr"), "a band needs finite values"),
        (lambda: bands.paired_ratio(np.zeros((2, 1)), np.ones((2, 1))), "a ratio of means needs means above"),
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
    band = bands.Band(np.array([1.0, 2.0]), np.array([0.5, 1.0]), np.array([2.0, 3.0]))
    chart = bands.chart(
        {"B": band, "A": band}, [10, 20], ["title", "note"], "M", "risk", {"whole pool": 0.7}, logarithmic
    )
    svg, _ = figures.save({"figure": chart}, tmp_path)
    text = svg.read_text()
    for word in ("A", "B", "whole pool", "title", "note", "M", "risk"):
        assert f">{word}<" in text
    assert text.index(">B<") < text.index(">A<")
