"""Static figures: Altair charts saved as SVG and PNG, without a browser or network."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np
import vl_convert

from bench.contract import Row
from bench.records import write


def save(charts: Mapping[str, Any], folder: Path) -> list[Path]:
    """Writes every chart as `<name>.svg` and `<name>.png`; returns the paths.

    Raises:
        OutputError: If a file cannot be written.
    """
    paths = []
    for name, chart in charts.items():
        specification = chart.to_dict()
        svg = _renumbered(vl_convert.vegalite_to_svg(specification)).encode()
        png = vl_convert.vegalite_to_png(specification, scale=2)
        for ending, content in (("svg", svg), ("png", png)):
            paths.append(folder / f"{name}.{ending}")
            write(paths[-1], content)
    return paths


def _renumbered(svg: str) -> str:
    """vl-convert counts gradients through the process: counts them in the figure, so that it draws alike."""
    numbers: dict[str, str] = {}
    return re.sub(r"gradient_\d+", lambda m: numbers.setdefault(m[0], f"gradient_{len(numbers)}"), svg)


def heat_map(matrix: np.ndarray, title: str, row_title: str, column_title: str, colour_title: str) -> Any:
    """A matrix of shares in [0, 1] with its numbers, rows from top to bottom, both counted from 1."""
    values = [
        {"row": t, "column": s, "value": float(v)}
        for t, row in enumerate(matrix, 1)
        for s, v in enumerate(row, 1)
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


def lines(rows: Sequence[Row], title: str, x_title: str, y_title: str, chance: float | None = None) -> Any:
    """One line per series over integer abscissae, values in [0, 1]; `chance` draws a level."""
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
