"""Runs of several depths together: whether independent weights lose less in deeper networks.

Source: Farquhar 2022, thesis "Understanding Approximation" (docs/sources.md), Fig. 3.2 and Table A.4.

A line is one activation (of one method, under otherwise equal settings), a cell is one depth of it, and its
runs are the restarts. Chains that leave the posterior invariant may be longer in one cell than in another:
once they have mixed, their draws are of the same distribution. A cell of which a restart has not mixed is
shown, marked, and enters neither a curve nor a difference: to leave out the restart alone would choose runs
by what came out. Curves and differences of E_KL are of infinitely many draws, from above (`kl_limit`):
chains of deep networks move slowly, and few draws of any posterior seem to be correlated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from bench import intervals
from bench.comparison import Comparison, FinishedRun, by_task
from bench.figures import COLOURS, titled

ERRORS = {
    "kl": ("E_KL", "nats", ("limit", "limit_low", "error", "floor")),
    "wasserstein": ("E_W", "weight units", ("error", "floor")),
}
"""Of either error what tables call it, its unit, and its kinds, of which the first tells what depth does."""
HEADER = (
    *("line", "hidden layers", "restarts", "of them mixed"),
    *("E_KL, nats", "from below", "of the draws", "floor", "E_W", "floor"),
    *("draws per weight", "components", "accuracy", "accuracy of a draw", "acceptance"),
)
KINDS = {
    "limit": "infinitely many draws of the posterior",
    "limit_low": "the same from below",
    "error": "draws of the posterior",
    "floor": "floor: as many independent draws of the diagonal fit",
}
STATES = ("all restarts mixed", "not all restarts mixed")

Depths = Mapping[int, Sequence[FinishedRun]]
"""Hidden layers -> restarts."""


def compare(runs: Sequence[FinishedRun]) -> Comparison:
    """Both errors over depth, a table of all cells, and what the largest depth says against the least.

    Raises:
        UsageError: If a run is given twice.
    """
    by_task(runs)
    lines: dict[str, dict[int, list[FinishedRun]]] = {}
    named = [(_names(run, runs), run) for run in runs]
    differing = [len(set(parts)) > 1 for parts in zip(*(names for names, _ in named), strict=True)]
    for names, run in sorted(named, key=lambda pair: (pair[0], pair[1].task.settings.depth, pair[1].seed)):
        cells = lines.setdefault(_line(names, differing), {})
        cells.setdefault(run.task.settings.depth, []).append(run)
    charts = {error: chart(lines, error) for error in ERRORS}
    rows = [_row(line, depth, of) for line, cells in lines.items() for depth, of in cells.items()]
    sentences = [
        said for error in ERRORS for line, cells in lines.items() for said in trend(line, cells, error)
    ]
    return Comparison(charts, HEADER, rows, sentences)


def _method(run: FinishedRun, runs: Sequence[FinishedRun]) -> str:
    """The method with its settings; without them if all chains of this cell are of one length."""
    if "invariant" not in run.provides:
        return run.method_identity
    of_cell = (run.method_name, run.preset, run.task_identity)
    lengths = {r.method_identity for r in runs if (r.method_name, r.preset, r.task_identity) == of_cell}
    return run.method_name if len(lengths) == 1 else run.method_identity


def _names(run: FinishedRun, runs: Sequence[FinishedRun]) -> tuple[str, str, str, str]:
    """Activation, method, preset, and other settings of the task that differ from the preset standard."""
    others = [
        part for part in run.variant.split(",") if part.split("=")[0] not in ("depth", "activation", "")
    ]
    return run.task.settings.activation, _method(run, runs), run.preset, ",".join(others)


def _line(names: Sequence[str], differing: Sequence[bool]) -> str:
    """The activation, and of the other names those in which the runs differ."""
    return ", ".join(
        name for name, is_told in zip(names, (True, *differing[1:]), strict=True) if is_told and name
    )


def is_mixed(runs: Sequence[FinishedRun]) -> bool:
    """Whether all restarts of a cell have mixed."""
    return all(run.metrics["mixed"] == 1 for run in runs)


def trend(line: str, cells: Depths, error: str) -> list[str]:
    """What the cells that have mixed say: the largest depth against the least, and every step between."""
    name, unit, (kind, *_) = ERRORS[error]
    metric = f"{error}_{kind}"
    of: dict[int, dict[int, float]] = {}
    left: dict[str, list[str]] = {}
    for depth in sorted(cells):
        values = {run.seed: value for run in cells[depth] if (value := run.metrics[metric]) is not None}
        if not is_mixed(cells[depth]):
            left.setdefault("not all restarts mixed", []).append(str(depth))
        elif len(values) < len(cells[depth]):
            left.setdefault(f"`{metric}` is not defined", []).append(str(depth))
        else:
            of[depth] = values
    said = [
        f"{line}: {name} at {', '.join(depths)} hidden layers enters no trend: {why}"
        for why, depths in left.items()
    ]
    told = list(of)
    if len(told) < 2:
        return [*said, f"{line}: {name} has no trend, for fewer than two depths tell of it"]
    steps = [(told[0], told[-1]), *(pairwise(told) if len(told) > 2 else ())]
    for low, high in steps:
        change = intervals.differences(of[high], of[low])
        if len(change) >= intervals.FEWEST:
            difference = intervals.student(change)
            said.append(
                f"{line}: {name} with {high} hidden layers minus that with {low} is {difference:.4g} {unit}"
                + difference.said("it rises with depth", "it falls with depth")
            )
    return said


def _values(runs: Sequence[FinishedRun], metric: str) -> list[float]:
    return [value for run in runs if (value := run.metrics[metric]) is not None]


def _row(line: str, depth: int, runs: Sequence[FinishedRun]) -> list[str]:
    """Of the table: means over the restarts."""

    def mean(metric: str, form: str = ".4g") -> str:
        values = _values(runs, metric)
        return format(sum(values) / len(values), form) if values else "-"

    cells = [line, str(depth), str(len(runs)), f"{sum(_values(runs, 'mixed')):.0f}"]
    for error, (_, _, (kind, *others)) in ERRORS.items():
        values = _values(runs, f"{error}_{kind}")
        cells += [f"{intervals.student(values):.4g}" if values else "-"]
        cells += [mean(f"{error}_{other}") for other in others]
    cells += [mean("draws_per_weight", ".3g"), mean("components", ".2g")]
    return cells + [mean(metric, ".1%") for metric in ("accuracy", "draw_accuracy", "acceptance")]


def chart(lines: Mapping[str, Depths], error: str) -> Any:
    """An error over depth, a colour per line, with its floor: Farquhar 2022, Fig. 3.2."""
    import altair as alt

    name, unit, kinds = ERRORS[error]
    values: list[dict[str, Any]] = []
    for line, cells in lines.items():
        for depth, runs in cells.items():
            for kind in kinds:
                if not (of := _values(runs, f"{error}_{kind}")):
                    continue
                found = intervals.Moments.of(of)
                half = (found.sd or 0.0) / found.size**0.5
                limits = {"centre": found.mean, "low": found.mean - half, "high": found.mean + half}
                state = STATES[not is_mixed(runs)]
                values.append({"line": line, "depth": depth, "kind": KINDS[kind], "state": state, **limits})
    colours = alt.Scale(domain=list(lines), range=[COLOURS[i % len(COLOURS)] for i in range(len(lines))])
    stroke = alt.Stroke("line:N", title=None, scale=colours, legend=alt.Legend(symbolType="stroke"))
    dashes = alt.Scale(
        domain=[KINDS[kind] for kind in kinds], range=[[1, 0], [4, 4], [1, 3], [8, 2, 2, 2]][: len(kinds)]
    )
    dash = alt.StrokeDash("kind:N", title=None, scale=dashes)
    shape = alt.Shape("state:N", title=None, scale=alt.Scale(domain=STATES, range=["circle", "cross"]))
    # A KL is above 0, and of depths that have not mixed it may be a thousand times that of the others.
    across_decades = error == "kl" and all(row["low"] > 0 for row in values)
    scale = alt.Scale(type="log" if across_decades else "linear")
    y = alt.Y("centre:Q", title=f"{name}, {unit}", scale=scale)

    def layer(rows: Any) -> Any:
        across = alt.X("depth:Q", title="hidden layers", axis=alt.Axis(tickMinStep=1, format=",d"))
        return alt.Chart(alt.Data(values=list(rows))).encode(x=across)

    drawn = [row for row in values if row["kind"] == KINDS[kinds[0]]]
    curves = [row for row in values if row["kind"] == KINDS["floor"] or row["state"] == STATES[0]]
    band = alt.Fill("line:N", title=None, scale=colours)
    layers = [
        layer(row for row in drawn if row["state"] == STATES[0])
        .mark_area(opacity=0.2)
        .encode(y=alt.Y("low:Q", title=f"{name}, {unit}", scale=scale), y2="high:Q", fill=band),
        layer(curves).mark_line().encode(y=y, stroke=stroke, strokeDash=dash),
        layer(drawn).mark_point(size=50).encode(y=y, stroke=stroke, shape=shape),
    ]
    title = [f"{name} over depth", intervals.CAPTIONS["standard_error"]]
    return alt.layer(*layers).properties(title=titled(title), width=400, height=260)
