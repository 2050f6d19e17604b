"""Intervals of means and bands of curves: what may be said of repetitions, and how surely.

Shapes: R independent repetitions (seeds, trajectories, data sets), M points of a curve: values are `[R, M]`.

An interval is Student's, over the values or over paired differences; two samples that share nothing have
Welch's. A simultaneous band covers the whole expected curve with the stated probability, not each point by
itself: if the band excludes 0 at some point, that point's mean is not 0, however many points were looked at.
The band is that of single-step max-t intervals (Hothorn, Bretz and Westfall 2008): mean +- c standard errors,
c the quantile of the largest |t| over the curve. The correlations are those of the sample, by a normal
multiplier bootstrap of the rows (Chernozhukov, Chetverikov and Kato 2013), over the root of a chi-squared
with R - 1 degrees of freedom. Fewer than 40 repetitions tell no correlations: they get Student's intervals by
Bonferroni, which are never too narrow, and of a few seeds very wide. Means of R rows must be nearly normal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
from scipy import special

from bench import randomness
from bench.errors import UsageError

FEWEST = 3
"""Values from which on an interval is given."""
_DRAWS = 4000
"""Draws of the bootstrap: the level of a 95% band is off by 0.3 percentage points (standard error)."""
_BLOCK = 500
"""Draws made at once."""
_MOST_KEPT = 5000
"""Repetitions up to which the draws are kept from one curve to the next, in 160 MB."""
_BISECTIONS = 64
_FEW = 40
"""Repetitions below which a band of 30 points would hold its curve in less than 93% (measured)."""


# ---------------------------------------------------------------------------------------------- of a number


class Interval(NamedTuple):
    """A number with its 95% interval; both limits are NaN where there were fewer than FEWEST values.

    `basis` says of what, such as "n = 5". `f"{interval:.3g}"` writes all three numbers in this format.
    """

    centre: float
    low: float
    high: float
    basis: str

    def __format__(self, form: str) -> str:
        centre, low, high = (format(limit, form) for limit in self[:3])
        if np.isnan(self.low):
            return f"{centre} ({self.basis}: no interval below {FEWEST})"
        return f"{centre} ({low} to {high}, 95%, {self.basis})"

    @property
    def half(self) -> float:
        """Half the width."""
        return (self.high - self.low) / 2

    def sign(self, null: float = 0.0) -> int:
        """1 or -1 where the interval lies above or below `null`, else 0."""
        return int(self.low > null) - int(self.high < null)

    def said(self, above: str, below: str, null: float = 0.0) -> str:
        """What the interval shows; nothing is shown where it holds `null`."""
        return {1: f": {above}", -1: f": {below}", 0: ": no difference shown"}[self.sign(null)]


class Moments(NamedTuple):
    """Mean and standard deviation (correction 1; None if unknown) of so many values."""

    mean: float
    sd: float | None
    size: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Moments:
        """Moments of at least one value; one value has no standard deviation."""
        array = np.array(list(values))
        return cls(float(array.mean()), float(array.std(ddof=1)) if len(array) > 1 else None, len(array))


def standard_error(values: np.ndarray) -> float:
    """Standard error of the mean of at least two values `[R]`."""
    return float(values.std(ddof=1) / np.sqrt(len(values)))


def student(
    values: Sequence[float] | np.ndarray, basis: str | None = None, test_to_train: float = 0.0
) -> Interval:
    """Student's 95% interval of the mean of at least one value; `basis` is "n = R" unless given.

    Of values over random splits of one table it is that of Nadeau and Bengio 2003, Inference for the
    generalization error: test over training rows of a split is added to 1/R.
    """
    array = np.asarray(values, np.float64)
    centre, basis = float(array.mean()), basis or f"n = {len(array)}"
    if len(array) < FEWEST:
        return Interval(centre, np.nan, np.nan, basis)
    half = _quantile(0.025, len(array) - 1) * standard_error(array) * np.sqrt(1 + len(array) * test_to_train)
    return Interval(centre, centre - half, centre + half, basis)


def differences(first: Mapping[Any, float], second: Mapping[Any, float]) -> list[float]:
    """First minus second, of the keys that both have, in order: of paired values, for `student`."""
    return [first[key] - second[key] for key in sorted(first.keys() & second.keys())]


def welch(first: Moments, second: Moments) -> Interval:
    """Welch's 95% interval of first minus second, from moments alone, degrees of freedom by Satterthwaite."""
    centre = first.mean - second.mean
    if first.sd is None or second.sd is None or min(first.size, second.size) < FEWEST:
        return Interval(centre, np.nan, np.nan, "Welch")
    size = np.array([first.size, second.size])
    variance = np.array([first.sd, second.sd]) ** 2 / size
    freedom = variance.sum() ** 2 / (variance**2 / (size - 1)).sum()
    half = _quantile(0.025, freedom) * float(np.sqrt(variance.sum()))
    return Interval(centre, centre - half, centre + half, "Welch")


def _quantile(tail: float, freedom: float) -> float:
    """What Student's t exceeds with probability `tail`."""
    return float(special.stdtrit(freedom, 1 - tail))


# ----------------------------------------------------------------------------------------------- of a curve


class Band(NamedTuple):
    """A curve `[M]` with its lower and upper limit."""

    centre: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @classmethod
    def flat(cls, curve: np.ndarray) -> Band:
        """A curve whose band has no width."""
        return cls(curve, curve, curve)

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
    (band,) = _bands([_checked(values)], level)
    return band


def _bands(curves: Sequence[np.ndarray], level: float = 0.95) -> list[Band]:
    """The simultaneous band of each of several curves `[R, M]`, all of the same R."""
    found = []
    for values, width in zip(curves, _largest_t(curves, level), strict=True):
        mean, error = values.mean(0), values.std(0, ddof=1) / np.sqrt(len(values))
        found.append(Band(mean, mean - width * error, mean + width * error))
    return found


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
    (band,) = paired_ratios([first], second, level)
    return band


def paired_ratios(firsts: Sequence[np.ndarray], second: np.ndarray, level: float = 0.95) -> list[Band]:
    """`paired_ratio` of each of several measures to the same second one; draws the bootstrap once for all."""
    firsts, second = [_checked(first) for first in firsts], _checked(second)
    if not all((values.mean(0) > 0).all() for values in (*firsts, second)):
        raise UsageError("a ratio of means needs means above 0")
    # Of each repetition on the logarithm of the ratio; their mean is 0.
    influences = [first / first.mean(0) - second / second.mean(0) for first in firsts]
    log_ratios = [np.log(first.mean(0) / second.mean(0)) for first in firsts]
    return [
        Band(*(np.exp(log_ratio + limit) for limit in around))
        for log_ratio, around in zip(log_ratios, _bands(influences, level), strict=True)
    ]


Kind = Literal["sd", "standard_error", "simultaneous"]

CAPTIONS: dict[Kind, str] = {
    "sd": "band: 1 sd",
    "standard_error": "band: 1 standard error",
    "simultaneous": "band: simultaneous 95% of the mean",
}


def band(values: np.ndarray, kind: Kind) -> Band:
    """A band by its name: what a figure shades, which its caption must say.

    Args:
        values: `[R, M]`, R at least 2.
        kind: sd and standard_error, mean +- one of it (correction 1); simultaneous, the band of
            `simultaneous_band` at 95%.
    """
    if kind == "simultaneous":
        return simultaneous_band(values)
    values = _checked(values)
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


def _largest_t(curves: Sequence[np.ndarray], level: float) -> list[float]:
    """Of each curve the quantile of the largest |t| over the points whose values differ."""
    rows, found, standardised = len(curves[0]), [0.0] * len(curves), {}
    for i, values in enumerate(curves):
        away = values - values.mean(0)
        sd = away.std(0)
        # Equal values leave deviations of rounding errors, which are no sample of anything.
        differ = sd > 1e-12 * np.abs(values).max(0)
        if differ.any() and rows < _FEW:
            found[i] = _quantile((1 - level) / (2 * differ.sum()), rows - 1)  # by Bonferroni
        elif differ.any():
            standardised[i] = away[:, differ] / (sd[differ] * np.sqrt(rows))
    if not standardised:
        return found
    largest: dict[int, list[np.ndarray]] = {i: [] for i in standardised}
    for multipliers, scale in _kept(rows) if rows <= _MOST_KEPT else _drawn(rows):
        for i, values in standardised.items():
            largest[i].append(np.abs(multipliers @ values).max(1) / scale)
    for i, drawn in largest.items():
        found[i] = float(np.quantile(np.concatenate(drawn), level))
    return found


def _drawn(rows: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Blocks of the bootstrap, the same for all curves of R rows: multipliers `[B, R]`, scales `[B]` of t."""
    generator = np.random.default_rng(randomness.derive(0, "simultaneous band"))
    for _ in range(_DRAWS // _BLOCK):
        multipliers = generator.standard_normal((_BLOCK, rows))
        yield multipliers, np.sqrt(generator.chisquare(rows - 1, _BLOCK) / (rows - 1))


@lru_cache(maxsize=1)
def _kept(rows: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """The same blocks at once: runs scored one after another would spend most of their time on drawing."""
    return list(_drawn(rows))


def _checked(values: np.ndarray) -> np.ndarray:
    values = np.asarray(values, np.float64)
    if values.ndim != 2 or len(values) < 2:
        raise UsageError(f"a band needs values [R, M] of at least 2 repetitions, not {list(values.shape)}")
    if not np.isfinite(values).all():
        raise UsageError("a band needs finite values")
    return values
