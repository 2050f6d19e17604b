"""Quality against cost: the main metric of ranked tasks beside the seconds of training, and the fronts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from parts.evidence import Drawing, Group, Part, committed, table

from bench import figures
from bench.intervals import Interval, student
from bench.leaderboard.evidence.submission import OURS, SUBMISSIONS
from bench.runs.runner import task_of
from bench.runs.searches import searches
from bench.spec import Metric

FEWEST = 3
"""Methods below which a task has no figure: a front of two says nothing."""
SEVERAL = "several machines"


class Point(NamedTuple):
    """A method on a task: the main metric with an interval, and the median of the seeds' seconds.

    `spread` is the longest seed's seconds over the shortest's where all take as many steps; else it is NaN.
    """

    method: str
    seconds: float
    quality: Interval
    is_tuned: bool
    machine: str
    spread: float
    seeds: int


class Panel(NamedTuple):
    """The methods of a task whose runs were all made on one kind of machine."""

    task: str
    machine: str
    metric: str
    better: str
    points: list[Point]

    @property
    def front(self) -> list[Point]:
        """The points that are on the front, the cheapest first."""
        sign = -1 if self.better == "higher" else 1
        found = on_front([(p.seconds, sign * p.quality.centre) for p in self.points])
        return [p for p, is_on in zip(self.points, found, strict=True) if is_on]

    @property
    def name(self) -> str:
        """Of its figure's file."""
        number = machines(self.task).index(self.machine)
        return f"pareto-{self.task}" + (f"-{number + 1}" if number else "")


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


@cache
def _cells() -> dict[str, dict[str, Group]]:
    """Task -> method -> its committed runs, of ranked tasks."""
    found: dict[str, dict[str, Group]] = defaultdict(lambda: defaultdict(list))
    for path, record in committed():
        if path.is_relative_to(SUBMISSIONS / OURS):
            found[record.task.identity][record.method.identity].append((path, record))
    return found


def _main(task: str) -> tuple[str, Metric]:
    """The main metric of a task."""
    ((_, record), *_), *_ = _cells()[task].values()
    spec = task_of(record).spec
    return spec.main_metric, spec.metrics[spec.main_metric]


def _point(method: str, group: Group, metric: str) -> Point | None:
    """A method's point; None where a run has no value."""
    values = [record.metrics.get(metric) for _, record in group]
    if any(value is None for value in values):
        return None
    seconds = [sum(fit.seconds for fit in record.fits) for _, record in group]
    steps = {sum(fit.steps for fit in record.fits) for _, record in group}
    task = group[0][1].task.name
    is_tuned = all(searches(task).is_tuned(record.method.tuning, method) for _, record in group)
    made = {f"{r.environment.device}, {_threads(r.environment.threads)}" for _, r in group}
    return Point(
        method,
        float(np.median(seconds)),
        student([float(value) for value in values if value is not None]),
        is_tuned,
        made.pop() if len(made) == 1 else SEVERAL,
        max(seconds) / min(seconds) if len(steps) == 1 else math.nan,
        len(group),
    )


def _threads(number: int) -> str:
    return f"{number} thread" + ("" if number == 1 else "s")


@cache
def panels() -> list[Panel]:
    """All panels: of each ranked task, and of each kind of machine that made enough of its methods."""
    found = []
    for task, cells in sorted(_cells().items()):
        name, metric = _main(task)
        apart = defaultdict(list)
        for point in filter(None, (_point(method, group, name) for method, group in cells.items())):
            apart[point.machine].append(point)
        better = "higher" if metric.higher_is_better else "lower"
        for machine, points in sorted(apart.items(), key=lambda item: (-len(item[1]), item[0])):
            if machine != SEVERAL and len(points) >= FEWEST:
                found.append(Panel(task, machine, name, better, sorted(points, key=lambda p: p.seconds)))
    return found


def _pointed(task: str) -> set[str]:
    """The methods of a task that some panel of it has."""
    return {point.method for panel in panels() if panel.task == task for point in panel.points}


def machines(task: str) -> list[str]:
    """The kinds of machine of a task's panels, that of most methods first."""
    return [panel.machine for panel in panels() if panel.task == task]


def _titled(panel: Panel) -> str:
    return f"`{panel.task}`" + (f" on {panel.machine}" if len(machines(panel.task)) > 1 else "")


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _quality(of: Interval) -> str:
    return f"{_number(of.centre)}" + (
        f" ({_number(of.low)} to {_number(of.high)})" if of.half == of.half else ""
    )


def _spread(point: Point) -> str:
    return f"{point.spread:.2f}" if point.seeds > 1 and point.spread == point.spread else "-"


def fronts() -> str:
    """Of each task the methods on the front, from the cheapest to the best."""
    rows = []
    for panel in panels():
        names = [f"`{p.method}`{'' if p.is_tuned else ' ○'} {_number(p.seconds)} s" for p in panel.front]
        metric = f"{panel.metric.replace('_', ' ')}, {panel.better}"
        rows.append([_titled(panel), metric, str(len(panel.points)), ", ".join(names)])
    return table(["task", "metric, better is", "methods", "on the front, the cheapest first"], rows)


def noise() -> str:
    """How far seconds of equal work differ, and how often each method is on a front."""
    spreads = [(p.spread, p.method, panel.task) for panel in panels() for p in panel.points if p.spread > 1]
    most, method, task = max(spreads)
    middle = float(np.median([spread for spread, *_ in spreads]))
    entered: dict[str, int] = defaultdict(int)
    on: dict[str, int] = defaultdict(int)
    for panel in panels():
        for point in panel.points:
            entered[point.method] += 1
        for point in panel.front:
            on[point.method] += 1
    often = sorted(on, key=lambda name: (-on[name], name))
    counts = ", ".join(f"`{name}` {on[name]} of {entered[name]}" for name in often if on[name] > 1)
    slowest = f"{middle:.2f} times as long as the fastest, in the worst {most:.1f} times"
    return (
        f"- On more than one front: {counts}.\n"
        "- Seeds of one method mostly take equally many steps. In the middle case the slowest took "
        f"{slowest} (`{method}` on `{task}`): machines were shared."
    )


def pictures() -> str:
    """The figures, by task."""
    shown = []
    for panel in panels():
        front = ", ".join(p.method for p in panel.front)
        name = f"{panel.metric.replace('_', ' ')} against seconds of training"
        shown.append(f"### {_titled(panel)}\n\n![{name}; on the front: {front}](figures/{panel.name}.svg)")
    return "\n\n".join(shown)


def tables() -> str:
    """Every point of every figure."""
    shown = []
    header = [
        "method",
        "quality",
        "seconds",
        "slowest seed over fastest",
        "seeds",
        "settings",
        "on the front",
    ]
    for panel in panels():
        front = {p.method for p in panel.front}
        rows = [
            [
                *(f"`{p.method}`", _quality(p.quality), _number(p.seconds), _spread(p), str(p.seeds)),
                *("tuned" if p.is_tuned else "not tuned", "yes" if p.method in front else "no"),
            ]
            for p in panel.points
        ]
        metric = f"{panel.metric.replace('_', ' ')}, {panel.better} is better; {panel.machine}."
        pointless = sorted(_cells()[panel.task].keys() - _pointed(panel.task))
        names = ", ".join(f"`{method}`" for method in pointless)
        lacking = f" In no figure, for one of the reasons above: {names}." if pointless else ""
        shown.append(f"**{_titled(panel)}**: {metric}{lacking}\n\n{table(header, rows)}")
    return "\n\n".join(shown)


def drawn() -> Iterator[Drawing]:
    """A figure for each panel."""
    for panel in panels():
        names = {p.method for p in panel.points}
        runs = [r for m, group in _cells()[panel.task].items() if m in names for _, r in group]
        front = {p.method for p in panel.front}
        places = [
            figures.Place(p.method, p.seconds, p.quality, p.is_tuned, p.method in front) for p in panel.points
        ]
        metric = f"{panel.metric.replace('_', ' ')} ({panel.better} is better)"
        title = [panel.task, f"Intervals of 95% over the seeds; {panel.machine}."]
        chart = figures.front(places, title, "seconds of training", metric, "tuned", "not tuned")
        yield {panel.name: chart}, footer_of(runs)


def footer_of(records: Sequence[object]) -> str:
    """What stands below a figure of all methods of a task: too many to name twice."""
    labels = [record.label for record in records]  # type: ignore[attr-defined]
    return figures.footer((str(len({m for m, *_ in labels})) + " methods", *rest) for _, *rest in labels)


PARTS: dict[str, Part] = {
    "pareto fronts": fronts,
    "pareto noise": noise,
    "pareto figures": pictures,
    "pareto tables": tables,
}
