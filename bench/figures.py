"""Static figures: the charts that tasks share, and Altair charts saved as SVG and PNG without a browser."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import altair as alt
import numpy as np
import vl_convert

from bench.contract import Row
from bench.files import write
from bench.intervals import Band, Moments
from bench.text import all_escaped

COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2")
"""Of the series of a chart, in their order."""
LEVEL = "#666666"
"""Of horizontal lines."""


def save(charts: Mapping[str, Any], folder: Path) -> list[Path]:
    """Writes every chart as `<name>.svg` and `<name>.png`; returns the paths.

    Raises:
        OutputError: If a file cannot be written.
    """
    paths = []
    for name, chart in charts.items():
        specification = all_escaped(chart.to_dict())  # what XML does not know would end the process
        svg = _renumbered(vl_convert.vegalite_to_svg(specification)).encode()
        png = vl_convert.vegalite_to_png(specification, scale=2)
        for ending, content in (("svg", svg), ("png", png)):
            paths.append(folder / f"{name}.{ending}")
            write(paths[-1], content)
    return paths


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
    values = [
        {"row": t, "column": s, "value": float(v)}
        for t, row in enumerate(matrix, 1)
        for s, v in enumerate(row, 1)
        if np.isfinite(v)
    ]
    base = alt.Chart(
        alt.Data(values=values), title=title, width=60 * matrix.shape[1], height=40 * len(matrix)
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
    """One line per series over integer abscissae, values in [0, 1]; `chance` draws a level.

    A title may have several lines.
    """
    values = [{"series": r.series, "x": r.x, "value": r.value} for r in rows]
    chart = (
        alt.Chart(alt.Data(values=values), title=title, width=360, height=240)
        .mark_line(point=True)
        .encode(
            x=alt.X("x:Q", title=x_title, axis=alt.Axis(tickMinStep=1)),
            y=alt.Y("value:Q", title=y_title, scale=alt.Scale(domain=[0, 1])),
            color=alt.Color("series:N", title=None),
        )
    )
    if chance is None:
        return chart
    level = alt.Chart(alt.Data(values=[{"value": chance}]))
    return chart + level.mark_rule(strokeDash=[4, 4], color="grey").encode(y="value:Q")


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
    names = sorted({run.series for run in runs})
    colour = alt.Color(
        "series:N",
        title=None,
        scale=alt.Scale(domain=names),
        legend=alt.Legend(labelLimit=0, symbolOpacity=1),
    )

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
            x=alt.X("x:Q", title=x_title, axis=alt.Axis(tickMinStep=1)), color=colour
        )
        axis = alt.Scale(domain=[0, 1]) if chance else alt.Scale(zero=True)
        band = base.mark_area(opacity=0.2, clip=True).encode(y=alt.Y("low:Q", scale=axis), y2="high:Q")
        line = base.mark_line(point=True).encode(y=alt.Y("mean:Q", title=y_title, scale=axis))
        layers = [band, line]
        if chance:
            level = alt.Chart(alt.Data(values=[{"level": chance[title]}]))
            layers.append(level.mark_rule(strokeDash=[4, 4], color="grey").encode(y="level:Q"))
        note = (notes or {}).get(title)
        chart = alt.layer(*layers)
        return chart.properties(title=[title, note] if note else title, width=360, height=240)

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
    axis = alt.Scale(domain=list(y_domain), nice=False)

    def xy(pairs: Iterable[tuple[float, float]]) -> Any:
        data = alt.Data(values=[{"x": float(x), "y": float(y)} for x, y in pairs])
        return alt.Chart(data).encode(x="x:Q", y=alt.Y("y:Q", scale=axis))

    def panel(name: str) -> Any:
        mean, sd = series[name]
        layers = [xy(points).mark_circle(size=8, color="grey", clip=True)]
        for width in (2, 1):
            limits = zip(x, mean - width * sd, mean + width * sd, strict=True)
            values = [{"x": float(at), "low": float(low), "high": float(high)} for at, low, high in limits]
            area = alt.Chart(alt.Data(values=values)).mark_area(opacity=0.25, color="steelblue", clip=True)
            layers.append(area.encode(x="x:Q", y=alt.Y("low:Q", scale=axis), y2="high:Q"))
        line = xy(zip(x, mean, strict=True)).mark_line(color="steelblue", clip=True)
        dashed = xy(zip(x, truth, strict=True)).mark_line(strokeDash=[4, 4], color="black", clip=True)
        chart = alt.layer(*layers, line, dashed).properties(title=name, width=360, height=240)
        return chart.encode(x=alt.X("x:Q", title="x"), y=alt.Y(title="y"))

    return alt.concat(*map(panel, series), columns=4).properties(title=title)


def points_and_lines(
    points: Mapping[str, Sequence[tuple[float, float]]],
    through: Mapping[str, Sequence[tuple[float, float]]],
    title: str,
) -> Any:
    """Named sets of points (x, y), from black to grey, and named lines through others."""

    def values(named: Mapping[str, Sequence[tuple[float, float]]]) -> Any:
        return alt.Data(
            values=[{"name": n, "x": float(x), "y": float(y)} for n, of in named.items() for x, y in of]
        )

    shades = alt.Scale(domain=list(points), range=["black", "#cccccc"])
    dots = alt.Chart(values(points)).mark_point(filled=True)
    dots = dots.encode(
        x=alt.X("x:Q", title="x"),
        y=alt.Y("y:Q", title="y"),
        fill=alt.Fill("name:N", title=None, scale=shades),
    )
    colours = alt.Scale(domain=list(through), range=[*COLOURS[: len(through) - 1], LEVEL])
    drawn = alt.Chart(values(through)).mark_line()
    drawn = drawn.encode(x="x:Q", y="y:Q", stroke=alt.Stroke("name:N", title=None, scale=colours))
    layers = alt.layer(dots, drawn).resolve_scale(fill="independent", stroke="independent")
    return layers.properties(title=title, width=400, height=260)
