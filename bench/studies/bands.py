"""Statistics over trajectories or runs along a curve: bands, paired differences and ratios, and their figure.

Shapes: R independent repetitions (trajectories, runs), M points of the curve: values are `[R, M]`.

A simultaneous band covers the whole expected curve with the stated probability, not each point by itself: if
it excludes 0 at some point, that point's mean is not 0, however many points were looked at. It is that of
single-step max-t intervals (Hothorn, Bretz and Westfall 2008): mean +- c standard errors, c the quantile of
the largest |t| over the curve. The correlations are those of the sample, by a normal multiplier bootstrap of
the rows (Chernozhukov, Chetverikov and Kato 2013), over the root of a chi-squared with R - 1 degrees of
freedom. Fewer than 40 repetitions tell no correlations: they get Student's intervals by Bonferroni, which are
never too narrow, and of a few seeds very wide. Means of R rows must be nearly normal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import altair as alt
import numpy as np
from scipy import special, stats

from bench import randomness
from bench.errors import UsageError

_DRAWS = 4000
"""Draws of the bootstrap: the level of a 95% band is off by 0.3 percentage points (standard error)."""
_BLOCK = 500
"""Draws made at once."""
_BISECTIONS = 64
_FEW = 40
"""Repetitions below which a band of 30 points would hold its curve in less than 93% (measured)."""


class Band(NamedTuple):
    """A curve `[M]` with its lower and upper limit."""

    centre: np.ndarray
    low: np.ndarray
    high: np.ndarray

    def excludes(self, value: float) -> np.ndarray:
        """Where the value lies outside, `[M]`."""
        return (self.low > value) | (self.high < value)


def simultaneous_band(values: np.ndarray, level: float = 0.95) -> Band:
    """Means with a band that holds the whole expected curve with probability `level`; see the module.

    Where all repetitions are equal the band has no width. Randomness is fixed: equal values, equal bands.

    Args:
        values: `[R, M]`, R at least 2.
        level: In (0, 1).

    Raises:
        UsageError: If there are fewer than two repetitions, or a value is not finite.
    """
    values = _checked(values)
    rows, _ = values.shape
    mean, error = values.mean(0), values.std(0, ddof=1) / np.sqrt(rows)
    width = _largest_t(values, level) * error
    return Band(mean, mean - width, mean + width)


def paired_difference(first: np.ndarray, second: np.ndarray, level: float = 0.95) -> Band:
    """Mean of first - second over the same repetitions `[R, M]`, with a simultaneous band."""
    return simultaneous_band(np.asarray(first, float) - np.asarray(second, float), level)


def paired_ratio(first: np.ndarray, second: np.ndarray, level: float = 0.95) -> Band:
    """Ratio of the means of two measures of the same repetitions, `[R, M]`, with a simultaneous band.

    Of positive means, by the delta method on the logarithm of the ratio. Two variances are the means of
    squared deviations, two mean squared errors those of squared errors.

    Raises:
        UsageError: As `simultaneous_band`, or if a mean is not above 0.
    """
    first, second = _checked(first), _checked(second)
    if not (first.mean(0) > 0).all() or not (second.mean(0) > 0).all():
        raise UsageError("a ratio of means needs means above 0")
    log_ratio = np.log(first.mean(0) / second.mean(0))
    influence = first / first.mean(0) - second / second.mean(0)  # of each repetition on it; their mean is 0
    around = simultaneous_band(influence, level)
    return Band(*(np.exp(log_ratio + limit) for limit in around))


Kind = Literal["sd", "standard_error", "iqr", "simultaneous"]

CAPTIONS: dict[Kind, str] = {
    "sd": "band: 1 sd",
    "standard_error": "band: 1 standard error",
    "iqr": "median, band: quartiles",
    "simultaneous": "band: simultaneous 95% of the mean",
}


def band(values: np.ndarray, kind: Kind) -> Band:
    """A band by its name: what a figure shades, which its caption must say.

    Args:
        values: `[R, M]`, R at least 2.
        kind: sd and standard_error, mean +- one of it (correction 1); iqr, median and quartiles;
            simultaneous, the band of `simultaneous_band` at 95%.
    """
    if kind == "simultaneous":
        return simultaneous_band(values)
    values = _checked(values)
    if kind == "iqr":
        low, centre, high = np.quantile(values, [0.25, 0.5, 0.75], axis=0)
        return Band(centre, low, high)
    width = values.std(0, ddof=1) / (1 if kind == "sd" else np.sqrt(len(values)))
    return Band(values.mean(0), values.mean(0) - width, values.mean(0) + width)


def mixture_quantiles(means: np.ndarray, probabilities: Sequence[float]) -> np.ndarray:
    """Quantiles of the equal mixture of N(means, 1) over the draws, exact to rounding, by bisection.

    Args:
        means: `[S, M]`, finite.
        probabilities: `[P]`, in (0, 1).

    Returns:
        `[P, M]`, in double precision.
    """
    centres = np.asarray(means, np.float64)
    p = np.asarray(probabilities, np.float64)[:, None]
    low, high = centres.min(0) + special.ndtri(p), centres.max(0) + special.ndtri(p)  # [P, M]
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        is_below = special.ndtr(middle[:, None] - centres).mean(1) < p
        low, high = np.where(is_below, middle, low), np.where(is_below, high, middle)
    return (low + high) / 2


def _largest_t(values: np.ndarray, level: float) -> float:
    """The quantile of the largest |t| over the points whose values differ."""
    rows, _ = values.shape
    away = values - values.mean(0)
    sd = away.std(0)
    # Equal values leave deviations of rounding errors, which are no sample of anything.
    differ = sd > 1e-12 * np.abs(values).max(0)
    if not differ.any():
        return 0.0
    if rows < _FEW:
        return float(stats.t.ppf(1 - (1 - level) / (2 * differ.sum()), rows - 1))
    standardised = away[:, differ] / (sd[differ] * np.sqrt(rows))
    generator = np.random.default_rng(randomness.derive(0, "simultaneous band"))
    largest = []
    for _ in range(_DRAWS // _BLOCK):
        multipliers = generator.standard_normal((_BLOCK, rows))
        scale = np.sqrt(generator.chisquare(rows - 1, _BLOCK) / (rows - 1))
        largest.append(np.abs(multipliers @ standardised).max(1) / scale)
    return float(np.quantile(np.concatenate(largest), level))


def _checked(values: np.ndarray) -> np.ndarray:
    values = np.asarray(values, np.float64)
    if values.ndim != 2 or len(values) < 2:
        raise UsageError(f"a band needs values [R, M] of at least 2 repetitions, not {list(values.shape)}")
    if not np.isfinite(values).all():
        raise UsageError("a band needs finite values")
    return values


COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2")
"""Of the series of a chart, in their order."""
LEVEL = "#666666"
"""Of its horizontal lines."""


def chart(
    series: Mapping[str, Band],
    x: Sequence[float],
    title: str | list[str],
    x_title: str,
    y_title: str,
    levels: Mapping[str, float] | None = None,
    logarithmic: bool = False,
    logarithmic_x: bool = False,
) -> Any:
    """Curves with their bands over x, and named horizontal lines; what the bands are the title must say.

    Args:
        series: Name -> its band over x; in a legend in this order.
        x: Abscissae `[M]`.
        title: Perhaps of several lines.
        x_title: Of the axis.
        y_title: Of the axis.
        levels: Name -> height of a dashed line.
        logarithmic: A logarithmic y axis, for bands above 0.
        logarithmic_x: A logarithmic x axis, for abscissae above 0.
    """
    names = [*series, *(levels or {})]
    colours = [COLOURS[i % len(COLOURS)] for i in range(len(series))] + [LEVEL] * len(levels or {})
    scale = alt.Scale(domain=names, range=colours)
    colour = alt.Color("series:N", title=None, scale=scale, legend=alt.Legend(labelLimit=0, symbolOpacity=1))
    axis = alt.Scale(type="log" if logarithmic else "linear", zero=False)
    values = [
        {"series": name, "x": float(at), "centre": float(c), "low": float(low), "high": float(high)}
        for name, curve in series.items()
        for at, c, low, high in zip(x, *curve, strict=True)
    ]
    across = alt.X("x:Q", title=x_title)
    if logarithmic_x:
        across = across.scale(type="log")
    base = alt.Chart(alt.Data(values=values)).encode(x=across, color=colour)
    layers = [
        base.mark_area(opacity=0.2).encode(y=alt.Y("low:Q", scale=axis), y2="high:Q"),
        base.mark_line().encode(y=alt.Y("centre:Q", title=y_title, scale=axis)),
    ]
    if levels:
        heights = alt.Data(values=[{"series": name, "level": height} for name, height in levels.items()])
        rule = alt.Chart(heights).mark_rule(strokeDash=[4, 4])
        layers.append(rule.encode(y=alt.Y("level:Q", scale=axis), color=colour))
    return alt.layer(*layers).properties(title=title, width=400, height=260)
