"""Intervals of promised coverage around predicted numbers, and how coverage hides: by predicted width.

A conformal interval is a predicted one made wider on both sides (or narrower) by one number, so that enough
of n held-out examples lie inside. If these and a new example are exchangeable, the new one lies inside with
the promised probability, averaged over examples and whatever the predictions are worth.

Source: Vovk et al. 2005, "Algorithmic Learning in a Random World"; Lei et al. 2018, "Distribution-Free
Predictive Inference for Regression" (split conformal: around a mean); Romano et al. 2019, "Conformalized
Quantile Regression" (around two quantiles).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from scipy.stats import binom

ALARM = 0.01
"""How often a posterior whose intervals are right is warned of."""
QUARTILES = 4


def smallest(scores: np.ndarray, level: float) -> float:
    """The ceil((n + 1) level)-th smallest of n scores; infinite if there is none.

    A further score, exchangeable with these, is at most that with a probability of at least `level`; without
    ties of ceil((n + 1) level) / (n + 1) exactly.
    """
    rank = math.ceil((len(scores) + 1) * level - 1e-9)
    return float(np.sort(scores)[rank - 1]) if rank <= len(scores) else math.inf


def fewest(level: float) -> int:
    """The least number n of examples of which there is a ceil((n + 1) level)-th."""
    return math.ceil(level / (1 - level) - 1e-9)


def margin(low: np.ndarray, high: np.ndarray, targets: np.ndarray, level: float) -> float:
    """Width to add to intervals on both sides; below 0 if they are too wide.

    Args:
        low: Lower ends of the intervals of held-out examples, `[n]`; with `high` the same, around a mean.
        high: Upper ends, `[n]`.
        targets: `[n]`.
        level: Coverage promised, in (0, 1).
    """
    return smallest(np.maximum(low - targets, targets - high), level)


def widened(low: np.ndarray, high: np.ndarray, by: float) -> np.ndarray:
    """Intervals `[N, 2]`, wider by this on both sides; one that would end before it begins is a point."""
    middle = low + (high - low) / 2
    return np.stack([np.minimum(low - by, middle), np.maximum(high + by, middle)], -1)


class Quartile(NamedTuple):
    """A quarter of the examples by predicted width: how many, and how many of them were in their interval."""

    size: int
    covered: int


def by_width(sd: np.ndarray, is_covered: np.ndarray) -> list[Quartile]:
    """Quarters of the examples by their predicted standard deviation `[N]`, the narrowest first.

    Empty where all are equally wide, but for rounding: there is no order then.
    """
    if sd.max() <= (1 + 1e-6) * sd.min():
        return []
    parts = np.array_split(np.argsort(sd, kind="stable"), QUARTILES)
    return [Quartile(len(rows), int(is_covered[rows].sum())) for rows in parts]


def is_bad(quartiles: list[Quartile], level: float) -> bool:
    """Whether coverage of some quarter is too far from the level for chance.

    Exact binomial, two-sided, over all quarters together by Bonferroni: intervals that are right are called
    bad with a probability of at most `ALARM`.
    """
    least = 1.0
    for size, covered in quartiles:
        tails = binom.cdf(covered, size, level), binom.sf(covered - 1, size, level)
        least = min(least, 2 * float(min(tails)))
    return QUARTILES * least < ALARM
