"""Quality against cost: the main metric of ranked tasks beside the seconds of training, and the fronts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
from parts.evidence import Drawing, Group, Part, committed, table

from bench import figures
from bench.intervals import Interval, student
from bench.leaderboard.evidence.submission import OURS, SUBMISSIONS
from bench.leaderboard.rank import fronts
from bench.leaderboard.rank.fronts import Cost, Panel, Point
from bench.leaderboard.rank.placing import Canvas, Frame, stairs
from bench.runs.runner import task_of
from bench.runs.searches import searches
from bench.spec import Metric

CANVAS = Canvas(600, 360)


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
    """A method's point; None where a run has no value, or no fit."""
    records = [record for _, record in group]
    values = [record.metrics.get(metric) for record in records]
    cost = Cost.of(records)
    if cost is None or any(value is None for value in values):
        return None
    quality = student([float(value) for value in values if value is not None])
    task = records[0].task.name
    is_tuned = all(searches(task).is_tuned(record.method.tuning, method) for record in records)
    return Point(method, cost, quality, is_tuned, len(group))


@cache
def panels() -> list[Panel]:
    """All panels: of each ranked task, and of each kind of machine that made enough of its methods."""
    found = []
    for task, cells in sorted(_cells().items()):
        name, metric = _main(task)
        points = filter(None, (_point(method, group, name) for method, group in cells.items()))
        found += fronts.panels(task, name, metric.higher_is_better, points)
    return found


def _pointed(task: str) -> set[str]:
    """The methods of a task that some panel of it has."""
    return {point.name for panel in panels() if panel.task == task for point in panel.points}


def machines(task: str) -> list[str]:
    """The kinds of machine of a task's panels, that of most methods first."""
    return [panel.machine for panel in panels() if panel.task == task]


def _file(panel: Panel) -> str:
    """Name of the file of a panel's figure."""
    number = machines(panel.task).index(panel.machine)
    return f"pareto-{panel.task}" + (f"-{number + 1}" if number else "")


def _titled(panel: Panel) -> str:
    return f"`{panel.task}`" + (f" on {panel.machine}" if len(machines(panel.task)) > 1 else "")


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _quality(of: Interval) -> str:
    return f"{_number(of.centre)}" + (
        f" ({_number(of.low)} to {_number(of.high)})" if of.half == of.half else ""
    )


def _spread(point: Point) -> str:
    return f"{point.cost.spread:.2f}" if point.seeds > 1 and point.cost.spread else "-"


def _joules(point: Point) -> str:
    cost = point.cost
    return "-" if cost.joules is None else f"{_number(cost.joules)} J ({cost.counters})"


def on_the_fronts() -> str:
    """Of each task the methods on the front, from the cheapest to the best."""
    rows = []
    for panel in panels():
        names = [f"`{p.name}`{'' if p.is_tuned else ' ○'} {_number(p.cost.seconds)} s" for p in panel.front]
        metric = f"{panel.metric.replace('_', ' ')}, {panel.better}"
        rows.append([_titled(panel), metric, str(len(panel.points)), ", ".join(names)])
    return table(["task", "metric, better is", "methods", "on the front, the cheapest first"], rows)


def noise() -> str:
    """How far seconds of equal work differ, and how often each method is on a front."""
    spreads = [
        (p.cost.spread, p.name, panel.task)
        for panel in panels()
        for p in panel.points
        if p.cost.spread and p.cost.spread > 1
    ]
    most, method, task = max(spreads)
    middle = float(np.median([spread for spread, *_ in spreads]))
    entered: dict[str, int] = defaultdict(int)
    on: dict[str, int] = defaultdict(int)
    for panel in panels():
        for point in panel.points:
            entered[point.name] += 1
        for point in panel.front:
            on[point.name] += 1
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
        front = ", ".join(p.name for p in panel.front)
        name = f"{panel.metric.replace('_', ' ')} against seconds of training"
        shown.append(f"### {_titled(panel)}\n\n![{name}; on the front: {front}](figures/{_file(panel)}.svg)")
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
        front = {p.name for p in panel.front}
        counted = any(p.cost.counters for p in panel.points)
        rows = [
            [
                *(f"`{p.name}`", _quality(p.quality), _number(p.cost.seconds), _spread(p), str(p.seeds)),
                *("tuned" if p.is_tuned else "not tuned", "yes" if p.name in front else "no"),
                *([_joules(p)] if counted else []),
            ]
            for p in panel.points
        ]
        metric = f"{panel.metric.replace('_', ' ')}, {panel.better} is better; {panel.machine}."
        pointless = sorted(_cells()[panel.task].keys() - _pointed(panel.task))
        names = ", ".join(f"`{method}`" for method in pointless)
        lacking = f" In no figure, for one of the reasons above: {names}." if pointless else ""
        shown.append(
            f"**{_titled(panel)}**: {metric}{lacking}\n\n{table(header + ['energy'] * counted, rows)}"
        )
    return "\n\n".join(shown)


def drawn() -> Iterator[Drawing]:
    """A figure for each panel."""
    for panel in panels():
        names = {p.name for p in panel.points}
        runs = [r for m, group in _cells()[panel.task].items() if m in names for _, r in group]
        yield {_file(panel): chart(panel)}, figures.footer((r.label for r in runs), are_many=True)


def chart(panel: Panel) -> Any:
    """Named points with their intervals over seconds, those on the front joined by steps.

    Points far from the best are named in the title and are not in the frame. A label that does not stand
    beside its point is joined to it by a line; one for which there is no room is left out.
    """
    import altair as alt

    frame, front = Frame.of(panel, CANVAS), panel.front
    shown = sorted((p for p in panel.points if frame.has(p)), key=lambda p: (p not in front, p.cost.seconds))
    steps = [p for p in shown if p in front]
    scale = alt.Scale(domain=[frame.low, frame.high], nice=False, zero=False)
    costs = alt.Scale(type="log", domain=[frame.left, frame.right], nice=False)
    title = f"{panel.metric.replace('_', ' ')} ({panel.better} is better)"
    x = alt.X("x:Q", title="seconds of training", scale=costs)
    y, ends = (alt.Y(name, title=title, scale=scale) for name in ("y:Q", "low:Q"))
    bars = [
        {"x": p.cost.seconds, "low": bar[0], "high": bar[1]}
        for p in shown
        if (bar := frame.bar(p)) is not None
    ]
    corners = stairs([frame.pixel(p) for p in steps])
    found = CANVAS.labels([(p.name, *frame.pixel(p)) for p in shown], corners)
    words = [{"name": label.name, **_at(frame, label.left, label.middle)} for label in found]
    ties = [
        _at(frame, *label.of) | {f"{name}2": value for name, value in _at(frame, *label.end).items()}
        for label in found
        if label.is_away
    ]

    def layer(values: list[dict[str, Any]]) -> Any:
        return alt.Chart(alt.Data(values=values)).encode(x=x)

    marks = [_of(p) | {"series": _mark(p.is_tuned, p in front)} for p in shown]
    layers = [
        layer(bars).mark_rule(color="#c8c8c8").encode(y=ends, y2="high:Q"),
        layer(ties).mark_rule(color="#888888", strokeWidth=0.7).encode(y=y, x2="x2:Q", y2="y2:Q"),
        layer([_of(p) for p in steps])
        .mark_line(interpolate="step-after", stroke=figures.COLOURS[1])
        .encode(y=y),
        layer(marks).mark_point(size=50, opacity=1).encode(y=y, **_of_marks()),
        layer(words).mark_text(align="left", baseline="middle").encode(y=y, text="name:N"),
    ]
    far = [f"{p.name} ({p.quality.centre:.3g})" for p in panel.points if not frame.has(p)]
    lines = [panel.task, f"Intervals of 95% over the seeds; {panel.machine}."]
    lines += [f"Outside the frame: {', '.join(far)}."] if far else []
    size = {"width": CANVAS.width, "height": CANVAS.height}
    return alt.layer(*layers).properties(title=figures.titled(lines), **size)


def _of(point: Point) -> dict[str, float]:
    return {"x": point.cost.seconds, "y": point.quality.centre}


def _at(frame: Frame, across: float, down: float) -> dict[str, float]:
    return dict(zip("xy", frame.value(across, down), strict=True))


def _mark(is_tuned: bool, is_on_front: bool) -> str:
    """What the mark of a point says."""
    return f"{'on the front' if is_on_front else 'behind it'}, {'tuned' if is_tuned else 'not tuned'}"


def _of_marks() -> dict[str, Any]:
    """Stroke and fill of the marks, with a legend: a hollow one is not tuned."""
    import altair as alt

    kinds = [(is_on, is_tuned) for is_on in (True, False) for is_tuned in (True, False)]
    names = [_mark(is_tuned, is_on) for is_on, is_tuned in kinds]
    strokes = [figures.COLOURS[is_on] for is_on, _ in kinds]
    fills = [stroke if is_tuned else "white" for stroke, (_, is_tuned) in zip(strokes, kinds, strict=True)]
    return {
        "stroke": alt.Stroke("series:N", title=None, scale=alt.Scale(domain=names, range=strokes)),
        "fill": alt.Fill("series:N", title=None, scale=alt.Scale(domain=names, range=fills)),
    }


PARTS: dict[str, Part] = {
    "pareto fronts": on_the_fronts,
    "pareto noise": noise,
    "pareto figures": pictures,
    "pareto tables": tables,
}
