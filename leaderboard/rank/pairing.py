"""Two entries of a task beside each other: their difference, and the examples that it comes from."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, TypedDict

import numpy as np

from bench.leaderboard.rank.ranking import Standing

MOST = 25
"""Entries of a table, from the top, that have compare pages; the others are compared by command."""
_BINS = 25
_MOST_CLASSES = 30


class Pair(TypedDict, total=False):
    """First minus second. `better`, `equal` and `worse` count examples by who has the better mean over seeds.

    `unit` says what an example is: a test example, or a split. `counts` are of a histogram of the
    differences over `[-reach, reach]`, whose end bins hold what lies beyond. `classes` has rows (class,
    examples, mean difference).
    """

    first: str
    second: str
    centre: float
    low: float | None
    high: float | None
    verdict: int
    unit: str
    examples: int
    better: int
    equal: int
    worse: int
    reach: float
    counts: list[int]
    classes: list[list[Any]]


class Counts(TypedDict):
    """Pairs of ranked entries: all, the separated ones, and the most clearly separated one."""

    separated: int
    compared_pairs: int
    widest: dict[str, Any] | None


def counted(standing: Standing) -> Counts:
    """How many pairs of ranked entries there are, how many are separated, and which is so most clearly."""
    names, k = _names(standing), len(standing.low)
    first, second = np.triu_indices(k, 1)
    low, high = standing.low[first, second], standing.high[first, second]
    is_separated = (low > 0) | (high < 0)
    widest: dict[str, Any] | None = None
    if is_separated.any():
        half, nearest = (high - low) / 2, np.maximum(low, -high)
        with np.errstate(divide="ignore", invalid="ignore"):
            clearness = np.where(is_separated & (half > 0), nearest / half, -1.0)
        at = int(clearness.argmax())
        if clearness[at] > 0:
            i, j = int(first[at]), int(second[at])
            widest = dict(_difference(standing, names[i], names[j])) | {"clearness": float(clearness[at])}
    return {"separated": int(is_separated.sum()), "compared_pairs": len(first), "widest": widest}


def pairs(
    standing: Standing, anchors: Sequence[str], higher_is_better: bool, labels: np.ndarray | None
) -> list[Pair]:
    """Neighbours in the table, and every entry against the anchors, as far as there are pages."""
    names = _names(standing)
    wanted = dict.fromkeys(_wanted(names, anchors))
    return [pair(standing, first, second, higher_is_better, labels) for first, second in wanted]


def pair(
    standing: Standing, first: str, second: str, higher_is_better: bool, labels: np.ndarray | None = None
) -> Pair:
    """Two ranked entries beside each other.

    Args:
        standing: Of their task.
        first: Name of an entry.
        second: Name of another.
        higher_is_better: Direction of the metric.
        labels: Class of each test example `[N]`; None if there are none.
    """
    found = _difference(standing, first, second)
    evidence = standing.evidence
    if evidence is None or not evidence.share or evidence.paired.shape[1] < 3:
        return found
    i, j = evidence.names.index(first), evidence.names.index(second)
    away = evidence.paired[i] - evidence.paired[j] + evidence.means[i] - evidence.means[j]
    tiny = 1e-12 * max(1.0, float(np.abs(away).max()))
    signed = away if higher_is_better else -away
    reach = float(np.quantile(np.abs(away), 0.99)) or float(np.abs(away).max())
    # Overlapping splits tell less than as many examples would.
    is_split = not math.isclose(evidence.share * len(away), 1)
    found["unit"] = "split" if is_split else "test example"
    found["examples"] = len(away)
    found["better"], found["worse"] = int((signed > tiny).sum()), int((signed < -tiny).sum())
    found["equal"] = len(away) - found["better"] - found["worse"]
    found["reach"] = reach
    if reach > 0:
        edges = np.linspace(-reach, reach, _BINS + 1)
        found["counts"] = np.histogram(np.clip(away, -reach, reach), edges)[0].tolist()
    classes = np.unique([] if labels is None else labels)
    if 1 < len(classes) <= _MOST_CLASSES and labels is not None:
        found["classes"] = [
            [int(c), int((labels == c).sum()), float(away[labels == c].mean())] for c in classes
        ]
    return found


def _wanted(names: Sequence[str], anchors: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Pairs in order of the table, the better placed first."""
    for i, name in enumerate(names[:MOST]):
        if i + 1 < len(names):
            yield name, names[i + 1]
        for anchor in anchors:
            if anchor in names and anchor != name:
                at = names.index(anchor)
                yield (name, anchor) if i < at else (anchor, name)


def _names(standing: Standing) -> list[str]:
    return [place.name for place in standing.places if place.ranks]


def _difference(standing: Standing, first: str, second: str) -> Pair:
    interval = standing.difference(first, second)
    low, high = (float(x) if math.isfinite(x) else None for x in interval[1:3])
    return Pair(
        first=first,
        second=second,
        centre=float(interval.centre),
        low=low,
        high=high,
        verdict=interval.sign(),
    )
