"""Quality against cost on the page across tasks: a drawing for each task, and who is on how many fronts.

A drawing has the entries whose runs were all made on one kind of processor, that of most entries; seconds of
an accelerator are not among them. It is plain numbers in pixels, which a template writes as SVG: its colours
are those of the page, light or dark.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from bench.intervals import Interval
from bench.leaderboard.rank.fronts import Cost, Panel, Point, panels
from bench.leaderboard.rank.placing import Canvas, Frame, Label, stairs
from bench.leaderboard.rank.rows import EntryRow, Table

CANVAS = Canvas(336, 190, letter=7.3, line=13.0, dot=4.5)
"""Of a drawing, without its axes: at the width of a phone a pixel of it is one of the screen."""
_LONGEST = 22
"""Letters of a name in a drawing."""
_STEPS: tuple[tuple[float, ...], ...] = ((1, 1.5, 2, 3, 4, 5, 6, 8), (1, 2, 3, 5), (1, 2, 5), (1, 3), (1,))
"""Ticks of a decade, from the closest; `_MOST` of them have room."""
_MOST = 5


class Dot(NamedTuple):
    """A point in a drawing, with the ends of its interval, from the left and from the top."""

    name: str
    x: float
    y: float
    ends: tuple[float, float] | None
    is_tuned: bool
    is_on_front: bool


class Drawing(NamedTuple):
    """A panel in pixels.

    `dots` end with those on the front, which lie on top; `steps` join these. `outside` are names far from the
    best, with their values, `elsewhere` those ranked entries that the panel has not.
    """

    panel: Panel
    dots: list[Dot]
    steps: str
    labels: list[Label]
    costs: list[tuple[float, str]]
    values: list[tuple[float, str]]
    outside: list[tuple[str, float]]
    elsewhere: list[str]

    @property
    def says(self) -> str:
        """What it shows, for those who do not see it."""
        front = ", ".join(f"{p.name} at {p.cost.seconds:.3g} seconds" for p in self.panel.front)
        return f"{self.panel.metric} against seconds of training; on the front: {front}"


def panel_of(table: Table) -> Panel | None:
    """The panel of a ranked task on the processor of most of its entries; None where too few ran on one."""
    if not table["is_ranked"]:
        return None
    points = [point for row in table["entries"] if row["ranks"] and (point := _point(row)) is not None]
    found = panels(table["task"], table["metric"], table["higher_is_better"], points)
    return found[0] if found else None


def _point(row: EntryRow) -> Point | None:
    """A ranked entry; None if nobody knows its cost, or an accelerator computed it."""
    if row["cost"] is None or row["mean"] is None or (cost := Cost(**row["cost"])).is_accelerated:
        return None
    low, high = (math.nan if limit is None else limit for limit in (row["low"], row["high"]))
    quality = Interval(row["mean"], low, high, row["basis"])
    return Point(row["name"], cost, quality, row["tuned"], row["seeds"])


def drawing(panel: Panel, table: Table) -> Drawing:
    """The panel of a task's table in pixels."""
    frame, front = Frame.of(panel, CANVAS), panel.front
    shown = sorted((p for p in panel.points if frame.has(p)), key=lambda p: (p in front, p.cost.seconds))
    dots = [_dot(p, frame, p in front) for p in shown]
    corners = [(dot.x, dot.y) for dot in dots if dot.is_on_front]
    taken = stairs(corners) + [CANVAS.around(dot.x, dot.y) for dot in dots]
    named = [(_short(dot.name), dot.x, dot.y) for dot in dots if dot.is_on_front]
    have = {p.name for p in panel.points}
    return Drawing(
        panel,
        dots,
        "M"
        + "H".join(f"{x:.1f} {y:.1f}" if k == 0 else f"{x:.1f}V{y:.1f}" for k, (x, y) in enumerate(corners)),
        CANVAS.labels(named, taken),
        [(frame.across(at), f"{at:g}") for at in _decades(frame.left, frame.right)],
        [(frame.down(at), said) for at, said in _round(frame.low, frame.high)],
        [(p.name, p.quality.centre) for p in panel.points if not frame.has(p)],
        [row["name"] for row in table["entries"] if row["ranks"] and row["name"] not in have],
    )


def _dot(point: Point, frame: Frame, is_on_front: bool) -> Dot:
    x, y = frame.pixel(point)
    bar = frame.bar(point)
    ends = bar and (frame.down(bar[0]), frame.down(bar[1]))
    return Dot(point.name, x, y, ends, point.is_tuned, is_on_front)


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}\N{HORIZONTAL ELLIPSIS}"


def _decades(low: float, high: float) -> list[float]:
    """Round seconds between two, as close as there is room."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in _STEPS:
        found = [step * 10.0**decade for decade in decades for step in steps]
        if len(inside := [at for at in found if low <= at <= high]) <= _MOST:
            break
    return inside


def _round(low: float, high: float) -> list[tuple[float, str]]:
    """Round values between two, some five, as they are written."""
    rough = (high - low) / 5
    decade = math.floor(math.log10(rough))
    step = next(s for s in (1, 2, 5, 10) if s * 10.0**decade >= rough * 0.999) * 10.0**decade
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return [
        (k * step, f"{k * step:.{digits}f}")
        for k in range(math.ceil(low / step), math.floor(high / step) + 1)
    ]


class Standing(NamedTuple):
    """An entry over all panels.

    `times` is its cost: the seconds over those of the cheapest entry of a panel, the median over its panels.
    `seconds` has, by task, its seconds and whether it is on the front.
    """

    name: str
    times: float
    seconds: Mapping[str, tuple[float, bool]]

    @property
    def fronts(self) -> int:
        """The number of fronts that it is on."""
        return sum(is_on for _, is_on in self.seconds.values())


def standings(found: Iterable[Panel]) -> list[Standing]:
    """Every entry that some panel has, the cheapest first."""
    seconds: dict[str, dict[str, tuple[float, bool]]] = {}
    times: dict[str, list[float]] = {}
    for panel in found:
        front, cheapest = panel.front, panel.points[0].cost.seconds
        for point in panel.points:
            seconds.setdefault(point.name, {})[panel.task] = (point.cost.seconds, point in front)
            times.setdefault(point.name, []).append(point.cost.seconds / cheapest)
    all_ = [Standing(name, float(np.median(times[name])), of) for name, of in seconds.items()]
    return sorted(all_, key=lambda standing: (standing.times, standing.name))


def rows(found: Iterable[Standing], tasks: Iterable[str]) -> list[dict[str, Any]]:
    """The table as CSV and JSON have it."""
    tasks = list(tasks)
    return [
        {"entry": of.name, "times the cheapest": of.times, "fronts": of.fronts, "panels": len(of.seconds)}
        | {task: of.seconds[task][0] if task in of.seconds else None for task in tasks}
        | {"on the front of": [task for task, (_, is_on) in of.seconds.items() if is_on]}
        for of in found
    ]
