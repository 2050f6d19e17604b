"""Fronts of quality against cost: which entries of a task no other is better and cheaper than.

Seconds of different machines say nothing to each other, so entries are compared whose runs were all made on
one kind of machine with one number of threads.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from bench.intervals import Interval
from bench.runs.records import Record

FEWEST = 3
"""Entries below which there is no panel: a front of two says nothing."""
SEVERAL = "several machines"


class Cost(NamedTuple):
    """What the runs of an entry took.

    Attributes:
        seconds: Wall clock of a run's fits in seconds. Of seeds that take equally many steps the shortest:
            other work on a machine only adds. Of others the median.
        machine: Model and threads, such as `AMD EPYC, 1 thread`, or SEVERAL.
        is_accelerated: Whether an accelerator computed some of it.
        spread: The longest seed's seconds over the shortest's; None where not all take as many steps.
        joules: Energy of a whole run, the median over the seeds; None unless the same counters counted all.
        counters: What counted it, such as `RAPL, 2 packages`; empty where joules are None.
    """

    seconds: float
    machine: str
    is_accelerated: bool
    spread: float | None
    joules: float | None = None
    counters: str = ""

    @classmethod
    def of(cls, records: Sequence[Record]) -> Cost | None:
        """The cost of the runs of an entry; None of a run without a fit that took time."""
        seconds = [sum(fit.seconds for fit in record.fits) for record in records]
        if not seconds or not all(0 < of_run < math.inf for of_run in seconds):
            return None
        steps = {sum(fit.steps for fit in record.fits) for record in records}
        made = {record.environment.machine for record in records}
        counted = [record.energy for record in records if record.energy is not None]
        counters = {energy.source for energy in counted}
        is_counted = len(counted) == len(records) and len(counters) == 1
        return cls(
            min(seconds) if len(steps) == 1 else float(np.median(seconds)),
            made.pop() if len(made) == 1 else SEVERAL,
            any(record.environment.is_accelerated for record in records),
            max(seconds) / min(seconds) if len(steps) == 1 else None,
            float(np.median([energy.joules for energy in counted])) if is_counted else None,
            counters.pop() if is_counted else "",
        )


class Point(NamedTuple):
    """An entry on a task: its cost, and the main metric with its interval."""

    name: str
    cost: Cost
    quality: Interval
    is_tuned: bool
    seeds: int


class Panel(NamedTuple):
    """The entries of a task whose runs were all made on one kind of machine, the cheapest first."""

    task: str
    machine: str
    metric: str
    higher_is_better: bool
    points: list[Point]

    @property
    def front(self) -> list[Point]:
        """The points that are on the front, the cheapest first."""
        sign = -1 if self.higher_is_better else 1
        found = on_front([(p.cost.seconds, sign * p.quality.centre) for p in self.points])
        return [p for p, is_on in zip(self.points, found, strict=True) if is_on]

    @property
    def better(self) -> str:
        """Which values are: higher or lower."""
        return "higher" if self.higher_is_better else "lower"


def panels(task: str, metric: str, higher_is_better: bool, points: Iterable[Point]) -> list[Panel]:
    """The panels of a task, one for each kind of machine that made enough of its entries, of most first."""
    apart: dict[str, list[Point]] = defaultdict(list)
    for point in points:
        apart[point.cost.machine].append(point)
    return [
        Panel(task, machine, metric, higher_is_better, sorted(of, key=lambda p: p.cost.seconds))
        for machine, of in sorted(apart.items(), key=lambda item: (-len(item[1]), item[0]))
        if machine != SEVERAL and len(of) >= FEWEST
    ]


def on_front(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Which of some pairs (cost, loss) no other is at least as good as in both and better than in one."""
    found = [False] * len(points)
    best = math.inf
    order = sorted(range(len(points)), key=points.__getitem__)
    for number in order:
        cost, loss = points[number]
        is_equal = any(found[other] and points[other] == (cost, loss) for other in order)
        found[number] = loss < best or is_equal
        best = min(best, loss)
    return found
