"""Static figures: the charts that tasks share, and Altair charts saved as SVG and PNG without a browser.

Altair takes 0.4 s to import, and a run trains before it draws: the functions that draw import it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.contract import Row
from bench.intervals import Band, Moments
from bench.system.files import write
from bench.text import all_escaped

Label = tuple[str, str, str, int]
"""Of a run: identities of method and task, preset, seed."""

COLOURS = (
    *("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756"),
    *("#72b7b2", "#eeca3b", "#ff9da6", "#9d755d", "#bab0ac"),
)
"""Of the series of a chart, in their order; then from the start again."""
LEVEL = "#666666"
"""Of levels, such as that of guessing, whose lines are dashed."""

APART: dict[str, Any] = dict.fromkeys(("stroke", "strokeDash", "fill"), "independent")
"""For `resolve_scale` of charts beside each other whose series are not the same: each has its own legend."""

_DASHES = [4, 4]
_CONFIG: dict[str, Any] = {
    "axis": {"labelFlush": False, "labelOverlap": True},
    "legend": {"labelLimit": 0, "symbolOpacity": 1, "titleLimit": 0},
    "padding": {"left": 5, "top": 5, "right": 40, "bottom": 5},
    "title": {"anchor": "start", "frame": "group", "subtitleColor": "#444444"},
}
"""Of all figures: labels of an axis never touch, and no text is cut off.

The widths of texts are those of the font that vl-convert brings. A reader's sans-serif may be a fifth wider:
the padding to the right leaves it room.
"""
_OF_THE_WHOLE = ("$schema", "autosize", "background", "config", "datasets", "padding", "params", "usermeta")
"""What Vega-Lite takes at the top of a specification alone."""


def footer(labels: Iterable[Label], are_many: bool = False) -> str:
    """What every figure says of the runs that it shows: their methods, tasks, presets and seeds.

    Of several identities it says the names alone; which is which, their figure's legend says. Where methods
    have not equally many seeds, it says the fewest and the most.

    Args:
        labels: Of the runs.
        are_many: The methods are counted and not named.
    """
    labels = list(dict.fromkeys(labels))
    methods, tasks, presets, seeds = (list(dict.fromkeys(part)) for part in zip(*labels, strict=True))
    who, where = (
        names if len(names) == 1 else list(dict.fromkeys(name.partition("+")[0] for name in names))
        for names in (methods, tasks)
    )
    if are_many:
        who = [f"{len(methods)} methods"]
    seeds.sort()
    which = ", ".join(map(str, seeds))
    if len(seeds) > 2 and seeds[-1] - seeds[0] == len(seeds) - 1:
        which = f"{seeds[0]} to {seeds[-1]}"
    counts = Counter(label[:-1] for label in labels).values()
    fewest, most = min(counts), max(counts)
    if len(seeds) == 1:
        count = "seed "
    elif fewest < most:
        count = f"{fewest} to {most} seeds: "
    else:
        count = f"{most} seed{'s' * (most > 1)}{' each' * (most < len(seeds))}: "
    return f"{', '.join(who)} on {', '.join(where)}, {', '.join(presets)}, {count}{which}"


def save(charts: Mapping[str, Any], folder: Path, footer: str) -> list[Path]:
    """Writes every chart as `<name>.svg` and `<name>.png`; returns the paths.

    Args:
        charts: Altair charts by name.
        folder: Where to.
        footer: Stands below every chart, in as many lines as it needs: of which runs it is.

    Raises:
        OutputError: If a file cannot be written.
    """
    import vl_convert

    paths = []
    for name, chart in charts.items():
        drawn = svg(chart, footer)
        for ending, content in (("svg", drawn.encode()), ("png", vl_convert.svg_to_png(drawn, scale=2))):
            paths.append(folder / f"{name}.{ending}")
            write(paths[-1], content)
    return paths


def svg(chart: Any, footer: str) -> str:
    """A chart above its footer as SVG; equal charts give equal text."""
    import vl_convert

    return _renumbered(vl_convert.vegalite_to_svg(_whole(chart, footer)))


def _whole(chart: Any, footer: str) -> dict[str, Any]:
    """The specification; escaped, since what XML does not know would end the process.

    Altair has checked its parts when they were made; to check the whole again takes seconds of long data.
    """
    return all_escaped(_with_footer(chart.to_dict(validate=False), footer))


def _with_footer(chart: dict[str, Any], footer: str) -> dict[str, Any]:
    """The specification of a chart above a text, under the settings of all figures."""
    whole = {key: chart.pop(key) for key in _OF_THE_WHOLE if key in chart}
    config = dict(_CONFIG)
    for part, own in whole.get("config", {}).items():
        config[part] = {**_CONFIG.get(part, {}), **own} if isinstance(own, dict) else own
    look = {"orient": "bottom", "anchor": "start", "fontSize": 10, "fontWeight": "normal", "color": LEVEL}
    text = {"text": wrapped(footer, 80), "offset": 12, **look}
    return {**whole, "config": config, "vconcat": [chart], "title": text}


def wrapped(text: str, width: int) -> list[str]:
    """Lines of at most `width` characters where that can be, broken after spaces, commas and plus signs."""
    lines = [""]
    for piece in re.findall(r"[^ ,+]*[ ,+]*", text):
        if lines[-1] and len(lines[-1]) + len(piece.rstrip()) > width:
            lines.append("")
        lines[-1] += piece
    return [line.rstrip() for line in lines]


def titled(title: str | Sequence[str]) -> Any:
    """A title that fits a panel: of several lines the first is the title, the others stand small below it."""
    import altair as alt

    first, *notes = [title] if isinstance(title, str) else title
    head, below = wrapped(first, 52), [line for note in notes for line in wrapped(note, 66)]
    return first if [first] == head and not below else alt.Title(head, subtitle=below)


class _Looks(NamedTuple):
    """How the series of a chart look, with a legend: stroke and dash of lines, fill of areas and dots."""

    stroke: Any
    dash: Any
    fill: Any


def _looks(series: Iterable[str], levels: Iterable[str] = ()) -> _Looks:
    """Colours of named series, and of levels, which are dashed."""
    import altair as alt

    series, levels = list(series), list(levels)
    colours = [COLOURS[i % len(COLOURS)] for i in range(len(series))] + [LEVEL] * len(levels)
    names = [*series, *levels]
    scale = alt.Scale(domain=names, range=colours)
    dashes = alt.Scale(domain=names, range=[[1, 0]] * len(series) + [_DASHES] * len(levels))
    legend = alt.Legend(symbolType="stroke", symbolStrokeWidth=2)
    return _Looks(
        alt.Stroke("series:N", title=None, scale=scale, legend=legend),
        alt.StrokeDash("series:N", title=None, scale=dashes, legend=legend),
        alt.Fill("series:N", title=None, scale=scale, legend=legend),
    )


def _axis(values: Iterable[float]) -> Any:
    """An axis with whole numbers where all values are whole: counts have no halves."""
    import altair as alt

    is_count = all(float(v).is_integer() for v in values)
    return alt.Axis(tickMinStep=1, format=",d") if is_count else alt.Axis()


def _renumbered(svg: str) -> str:
    """Counts gradients and clips in the figure, so that it draws alike: vl-convert counts in the process."""
    numbers: dict[str, str] = {}
    names = r"\b(gradient_|clip)\d+\b"
    return re.sub(names, lambda m: numbers.setdefault(m[0], f"{m[1]}{len(numbers)}"), svg)


def heat_map(
    matrix: np.ndarray, title: str | list[str], row_title: str, column_title: str, colour_title: str
) -> Any:
    """A matrix of shares in [0, 1] with its numbers, rows from top to bottom, both counted from 1.

    NaN stays empty; a title may have several lines.
    """
    import altair as alt

    values = [
        {"row": t, "column": s, "value": float(v)}
        for t, row in enumerate(matrix, 1)
        for s, v in enumerate(row, 1)
        if np.isfinite(v)
    ]
    base = alt.Chart(
        alt.Data(values=values), title=titled(title), width=60 * matrix.shape[1], height=40 * len(matrix)
    )
    base = base.encode(
        x=alt.X("column:O", title=column_title, axis=alt.Axis(labelAngle=0, orient="bottom")),
        y=alt.Y("row:O", title=row_title),
    )
    scale = alt.Scale(scheme="blues", domain=[0, 1])
    colour = base.mark_rect().encode(color=alt.Color("value:Q", title=colour_title, scale=scale))
    shade = alt.condition("datum.value > 0.5", alt.value("white"), alt.value("black"))
    return colour + base.mark_text().encode(text=alt.Text("value:Q", format=".3f"), color=shade)


def lines(
    rows: Sequence[Row], title: str | list[str], x_title: str, y_title: str, chance: float | None = None
) -> Any:
    """One line per series, values in [0, 1]; `chance` draws the level of guessing.

    A title may have several lines.
    """
    import altair as alt

    values = [{"series": r.series, "x": r.x, "value": r.value} for r in rows]
    guessing = {} if chance is None else {f"guessing: {chance:.3g}": chance}
    looks = _looks(dict.fromkeys(r.series for r in rows), guessing)
    base = alt.Chart(alt.Data(values=values)).encode(
        x=alt.X("x:Q", title=x_title, axis=_axis(r.x for r in rows)),
        y=alt.Y("value:Q", title=y_title, scale=alt.Scale(domain=[0, 1])),
    )
    layers = [
        base.mark_line().encode(stroke=looks.stroke, strokeDash=looks.dash),
        base.mark_point(filled=True, opacity=1).encode(fill=looks.fill),
        *_rules(guessing, looks),
    ]
    return alt.layer(*layers).properties(title=titled(title), width=360, height=240)


def unit_square(
    series: Mapping[str, Sequence[tuple[float, float]]],
    title: str | list[str],
    x_title: str,
    y_title: str,
    diagonal: str,
) -> Any:
    """A line per series through points (x, y) in [0, 1] x [0, 1], and the diagonal, dashed, by its name."""
    import altair as alt

    named = {**series, diagonal: [(0.0, 0.0), (1.0, 1.0)]}
    values = [{"series": n, "x": float(x), "y": float(y)} for n, of in named.items() for x, y in of]
    looks, scale = _looks(series, [diagonal]), alt.Scale(domain=[0, 1])
    base = alt.Chart(alt.Data(values=values)).encode(
        x=alt.X("x:Q", title=x_title, scale=scale), y=alt.Y("y:Q", title=y_title, scale=scale)
    )
    drawn = base.mark_line().encode(stroke=looks.stroke, strokeDash=looks.dash)
    return drawn.properties(title=titled(title), width=260, height=260)


def _rules(levels: Mapping[str, float], looks: _Looks) -> list[Any]:
    """A layer with a dashed line at every level, if there is one."""
    import altair as alt

    if not levels:
        return []
    heights = alt.Data(values=[{"series": name, "level": height} for name, height in levels.items()])
    rule = alt.Chart(heights).mark_rule()
    return [rule.encode(y="level:Q", stroke=looks.stroke, strokeDash=looks.dash)]


class Curve(NamedTuple):
    """One run's values `(x, value)`: a line of the `series` in a panel of this title."""

    panel: str
    series: str
    points: Sequence[tuple[float, float]]


def panels(
    runs: Sequence[Curve],
    x_title: str,
    y_title: str,
    chance: Mapping[str, float] | None = None,
    notes: Mapping[str, str] | None = None,
) -> Any:
    """Means over the runs of a series, with a band of one standard deviation, panels beside each other.

    Args:
        runs: All runs, in any order.
        x_title: Of every panel.
        y_title: Of every panel.
        chance: Panel -> the level that guessing has, where values are shares in [0, 1].
        notes: Panel -> a second line of its title.
    """
    import altair as alt

    guessing = "guessing"
    names = sorted({run.series for run in runs})
    looks = _looks(names, [guessing] if chance else [])

    def panel(title: str) -> Any:
        found: dict[tuple[str, float], list[float]] = {}
        for run in runs:
            if run.panel == title:
                for x, value in run.points:
                    found.setdefault((run.series, x), []).append(value)
        values = []
        for (series, x), of_runs in found.items():
            mean, sd, _ = Moments.of(of_runs)
            low, high = mean - (sd or 0.0), mean + (sd or 0.0)
            values.append({"series": series, "x": x, "mean": mean, "low": low, "high": high})
        base = alt.Chart(alt.Data(values=values)).encode(
            x=alt.X("x:Q", title=x_title, axis=_axis(x for _, x in found))
        )
        scale = alt.Scale(domain=[0, 1]) if chance else alt.Scale(zero=True)
        centre = alt.Y("mean:Q", title=y_title, scale=scale)
        band = base.mark_area(opacity=0.2, clip=True)
        layers = [
            band.encode(y=alt.Y("low:Q", title=y_title, scale=scale), y2="high:Q", fill=looks.fill),
            base.mark_line().encode(y=centre, stroke=looks.stroke, strokeDash=looks.dash),
            base.mark_point(filled=True, opacity=1).encode(y=centre, fill=looks.fill),
            *_rules({guessing: chance[title]} if chance else {}, looks),
        ]
        note = (notes or {}).get(title)
        heading = titled([title, note]) if note else title
        return alt.layer(*layers).properties(title=heading, width=360, height=240)

    return alt.concat(*map(panel, sorted({run.panel for run in runs})), columns=2)


def bands(
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
    import altair as alt

    looks = _looks(series, levels or {})
    axis = alt.Scale(type="log" if logarithmic else "linear", zero=False)
    values = [
        {"series": name, "x": float(at), "centre": float(c), "low": float(low), "high": float(high)}
        for name, curve in series.items()
        for at, c, low, high in zip(x, *curve, strict=True)
    ]
    across = alt.X("x:Q", title=x_title, axis=_axis(x))
    if logarithmic_x:
        across = across.scale(type="log")
    base = alt.Chart(alt.Data(values=values)).encode(x=across)
    centre = alt.Y("centre:Q", title=y_title, scale=axis)
    layers = [
        base.mark_area(opacity=0.2).encode(
            y=alt.Y("low:Q", title=y_title, scale=axis), y2="high:Q", fill=looks.fill
        ),
        base.mark_line().encode(y=centre, stroke=looks.stroke, strokeDash=looks.dash),
        *_rules(levels or {}, looks),
    ]
    return alt.layer(*layers).properties(title=titled(title), width=400, height=260)


def functions(
    series: Mapping[str, tuple[np.ndarray, np.ndarray]],
    x: np.ndarray,
    title: str,
    y_domain: tuple[float, float],
    truth: np.ndarray,
    points: Sequence[tuple[float, float]] = (),
) -> Any:
    """Mean with one and two standard deviations over x, one panel per series, beside each other.

    Args:
        series: Name -> mean and standard deviation of the predicted functions at x, each `[M]`.
        x: Abscissae `[M]`.
        title: Of the whole figure.
        y_domain: Range of y that is shown; what leaves it is cut off.
        truth: The true function at x `[M]`, drawn as a dashed line.
        points: Training data (x, y).
    """
    import altair as alt

    axis = alt.Scale(domain=list(y_domain), nice=False)
    names = ["mean; bands: 1 and 2 standard deviations", "truth"]
    looks = _looks(names[:1], names[1:])
    grey = alt.Scale(domain=["training data"], range=["grey"])

    def xy(name: str, pairs: Iterable[tuple[float, float]]) -> Any:
        data = alt.Data(values=[{"series": name, "x": float(x), "y": float(y)} for x, y in pairs])
        return alt.Chart(data).encode(x=across, y=alt.Y("y:Q", title="y", scale=axis))

    across = alt.X("x:Q", title="x", axis=alt.Axis(tickCount=7))

    def panel(name: str) -> Any:
        mean, sd = series[name]
        dots = xy("training data", points).mark_circle(size=8, clip=True)
        layers = [dots.encode(fill=alt.Fill("series:N", title=None, scale=grey))]
        for width in (2, 1):
            limits = zip(x, mean - width * sd, mean + width * sd, strict=True)
            values = [{"x": float(at), "low": float(low), "high": float(high)} for at, low, high in limits]
            area = alt.Chart(alt.Data(values=values)).mark_area(opacity=0.25, color=COLOURS[0], clip=True)
            layers.append(area.encode(x=across, y=alt.Y("low:Q", title="y", scale=axis), y2="high:Q"))
        for line, height in zip(names, (mean, truth), strict=True):
            drawn = xy(line, zip(x, height, strict=True)).mark_line(clip=True)
            layers.append(drawn.encode(stroke=looks.stroke, strokeDash=looks.dash))
        return alt.layer(*layers).properties(title=titled(name), width=360, height=240)

    whole = alt.concat(*map(panel, series), columns=4).properties(title=title)
    return whole.resolve_legend(fill="shared", stroke="shared")


def points_and_lines(
    points: Mapping[str, Sequence[tuple[float, float]]],
    through: Mapping[str, Sequence[tuple[float, float]]],
    title: str | list[str],
) -> Any:
    """Named sets of points (x, y), from black to grey, and named lines through others, the last dashed."""
    import altair as alt

    def chart(named: Mapping[str, Sequence[tuple[float, float]]]) -> Any:
        values = [{"series": n, "x": float(x), "y": float(y)} for n, of in named.items() for x, y in of]
        return alt.Chart(alt.Data(values=values)).encode(x=alt.X("x:Q", title="x"), y=alt.Y("y:Q", title="y"))

    shades = alt.Scale(domain=list(points), range=["black", "#cccccc"])
    *solid, dashed = through
    looks = _looks(solid, [dashed])
    dots = (
        chart(points)
        .mark_point(filled=True, opacity=1)
        .encode(fill=alt.Fill("series:N", title=None, scale=shades))
    )
    drawn = chart(through).mark_line().encode(stroke=looks.stroke, strokeDash=looks.dash)
    layers = alt.layer(dots, drawn).resolve_scale(**APART)
    return layers.properties(title=titled(title), width=400, height=260)
