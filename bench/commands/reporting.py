"""`bench report`: one self-contained HTML file of a run or of several.

Records may come from strangers. The template escapes every text of theirs, no link is made of one, and
figures are images, in which a browser neither runs nor loads anything. The page needs no script and no
network, and the same runs give the same bytes.
"""

from __future__ import annotations

import base64
import json
import math
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import bench
from bench.commands.formats import interval, number, plain
from bench.commands.parser import Parser, add_imports, errors, output
from bench.commands.results import direction, metrics_of, say_twice
from bench.errors import BenchError, UsageError
from bench.text import escaped

if TYPE_CHECKING:
    from bench.runs.folders import Found
    from bench.runs.means import Line
    from bench.runs.records import Record
    from bench.spec import Metric, Row

_LARGEST = 2 * 2**20
"""Bytes of a figure; a larger one is left out."""
_POINTS = 300
"""Points of a line of a chart, at most."""
_WIDTH, _HEIGHT = 320, 120
"""Of a chart."""


def report(arguments: list[str]) -> None:
    """Writes a report of runs; prints its path."""
    parser = Parser(
        "bench report",
        description="Write one HTML file of a run or of several: settings, metrics, figures, curves, "
        "environment, provenance, and what would mislead. It needs no network and no script.",
    )
    parser.add_argument(
        "RUN", nargs="+", type=str, help="directory of a run, or folder with runs below it: runs/split_digits"
    )
    parser.add_argument("--to", type=str, default="report.html", help="the file; report.html unless given")
    add_imports(parser)
    chosen = parser.parse_args(arguments)
    to = Path(chosen.to)
    if to.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"--to {chosen.to}: the name of the report must end in .html")

    from bench.runs.folders import gather
    from bench.runs.means import lines
    from bench.system.files import write

    runs, again = gather([Path(name) for name in chosen.RUN])
    say_twice(again)
    found, said = lines(runs)
    for sentence in said:
        errors.print(plain(f"bench: {sentence}"), soft_wrap=True)
    if not found:
        raise UsageError(f"no finished run at or below {', '.join(chosen.RUN)}")
    write(to, page(found).encode())
    output.print(str(to), soft_wrap=True)


def page(lines: Sequence[Line]) -> str:
    """The report of runs, as HTML."""
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(files("bench.commands").joinpath("report.html.j2").read_text())
    sections = [_section(title, list(group)) for title, group in groupby(lines, lambda line: line.protocol)]
    methods = list(dict.fromkeys(line.method for line in lines))
    tasks = list(dict.fromkeys(line.records[0].task.identity for line in lines))
    count = sum(len(line.runs) for line in lines)
    return template.render(
        title=f"{_some(methods, 'methods')} on {_some(tasks, 'tasks')}",
        count=f"{count} run{'s' if count > 1 else ''}",
        sections=sections,
        version=bench.__version__,
    )


def _some(names: Sequence[str], kind: str) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{len(names)} {kind}"


# ----------------------------------------------------------------------------------------- of one protocol


def _section(title: str, lines: Sequence[Line]) -> dict[str, Any]:
    """The runs of one protocol, methods beside each other."""
    from bench.runs.registry import misleads
    from bench.runs.runner import task_of

    records = [record for line in lines for record in line.records]
    first = records[0]
    known, unknown = metrics_of(first)
    task = None if unknown else task_of(first)
    names = sorted(first.metrics, key=lambda name: name != first.task.main_metric)
    metrics = [
        {
            "name": name,
            "description": _described(known[name]) if name in known else "",
            "cells": [_cell(line, name) for line in lines],
        }
        for name in names
    ]
    return {
        "title": title,
        "unknown": unknown,
        "question": task.spec.question if task else "",
        "source": task.spec.source if task else "",
        "is_ranked": task is not None and task.spec.ranked,
        "misleads": misleads(type(task)) if task else "",
        "methods": [line.method for line in lines],
        "metrics": metrics,
        "task": _listed(records, lambda record: record.task.settings, lambda record: record.method.identity)
        | {"version": str(first.task.version), "digest of the data": first.task.data_digest},
        "lines": [_line(line, task) for line in lines],
    }


def _described(metric: Metric) -> str:
    return f"{metric.description} ({metric.unit}, {direction(metric)} is better)"


def _cell(line: Line, metric: str) -> str:
    mean = line.mean(metric)
    return "undefined" if mean is None else interval(mean)


def _line(line: Line, task: Any) -> dict[str, Any]:
    """The runs of one method."""
    records = line.records
    main = records[0].task.main_metric
    figures, note = _figures(line.runs, task)
    return {
        "method": line.method,
        "runs": [
            {
                "seed": record.seed,
                "status": record.status,
                "value": _number(record.metrics.get(main)),
                "seconds": number(record.seconds),
                "steps": sum(fit.steps for fit in record.fits),
                "created": record.created,
                "note": record.reason or "",
                "command": record.command,
            }
            for record in records
        ],
        "main": main,
        "undefined": _listed(records, lambda record: record.undefined),
        "tables": {
            "Settings": _listed(records, _settings),
            "Diagnostics": _listed(records, _diagnostics),
            "Environment": _listed(records, lambda record: record.environment.model_dump()),
            "Provenance": _listed(records, lambda record: record.provenance.model_dump()),
        },
        "figures": figures,
        "note": note,
        "remarks": _remarks(line.runs, task),
        "curves": _curves(line.runs),
    }


def _settings(record: Record) -> dict[str, Any]:
    method = {f"method.{name}": value for name, value in record.method.settings.items()}
    trainer = {f"trainer.{name}": value for name, value in record.trainer.items()}
    return {"tuning": record.method.tuning, "members": record.method.members, **method, **trainer}


def _diagnostics(record: Record) -> dict[str, Any]:
    """Of predictions, of the last fit, and what validation data gave at the end."""
    last = record.fits[-1].diagnostics if record.fits else {}
    validation = {f"{name} (validation)": value for name, value in record.validation.items()}
    found = {**record.diagnostics, **{f"{name} (last fit)": value for name, value in last.items()}}
    return {name: _number(value) for name, value in (found | validation).items()}


def _number(value: float | None) -> str:
    return "undefined" if value is None else number(value)


def _of_seed(record: Record) -> str:
    return f"seed {record.seed}"


def _listed(
    records: Sequence[Record],
    of: Callable[[Record], Mapping[str, Any]],
    whose: Callable[[Record], str] = _of_seed,
) -> dict[str, str]:
    """Values by name: one where all records have it, else each with those that do."""
    found = [(whose(record), of(record)) for record in records]
    table = {}
    for name in dict.fromkeys(name for _, values in found for name in values):
        groups: dict[str, dict[str, None]] = {}
        for owner, values in found:
            if name in values:
                groups.setdefault(_text(values[name]), {})[owner] = None
        is_one = len(groups) == 1 and all(name in values for _, values in found)
        several = (f"{text} ({', '.join(owners)})" for text, owners in groups.items())
        table[name] = next(iter(groups)) if is_one else "; ".join(several)
    return table


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


# ---------------------------------------------------------------------------------------- figures and curves


def _figures(runs: Iterable[Found], task: Any) -> tuple[list[dict[str, str]], str]:
    """The figures of the first completed run as data URIs, and what is to be said of them.

    Those that lie beside the record, else those that its task draws of its arrays.
    """
    from bench.leaderboard.evidence.store import run_arrays

    for run in runs:
        if run.record is None or run.record.status != "completed":
            continue
        paths = sorted((run.directory / "figures").glob("*.svg"))
        found = {path.stem: content for path in paths if (content := _svg(path))}
        left_out = len(paths) - len(found)
        note = f"figures left out, being links, no SVG or over 2 MiB: {left_out}" if left_out else ""
        if not paths and task is not None and (arrays := run_arrays(run.directory)) is not None:
            try:
                found = _redrawn(run.directory, arrays)
            except BenchError as error:
                note = f"figures could not be drawn: {error}"
        return [
            {
                "name": escaped(name),
                "seed": str(run.record.seed),
                "uri": "data:image/svg+xml;base64," + base64.b64encode(content).decode(),
            }
            for name, content in found.items()
        ], escaped(note)
    return [], ""


def _remarks(runs: Iterable[Found], task: Any) -> list[str]:
    """What the task says of the predictions of each completed run, where it says anything."""
    from bench.contract import Task
    from bench.leaderboard.evidence.store import run_arrays
    from bench.runs import registry
    from bench.runs.runner import load_scores

    if task is None or type(task).remarks is Task.remarks:
        return []
    said = []
    for run in runs:
        path = run_arrays(run.directory)
        if run.record is None or run.record.status != "completed" or path is None:
            continue
        with registry.defects(f"the remarks on {run.directory}"):
            protocol, arrays = load_scores(run.directory, path)
            said += [escaped(f"seed {run.record.seed}: {remark}") for remark in protocol.remarks(arrays)]
    return said


def _svg(path: Path) -> bytes:
    """A figure's file; empty if it is no SVG, or a link, which may lead to what nobody meant to send."""
    if path.is_symlink() or path.parent.is_symlink() or not path.is_file() or path.stat().st_size > _LARGEST:
        return b""
    content = path.read_bytes()
    return content if content.lstrip()[:5] in (b"<svg ", b"<?xml") else b""


def _redrawn(directory: Path, path: Path) -> dict[str, bytes]:
    from bench import figures
    from bench.runs import registry
    from bench.runs.records import read_record
    from bench.runs.runner import load_scores

    task, arrays = load_scores(directory, path)
    with registry.defects(f"the figures of {directory}"), tempfile.TemporaryDirectory() as folder:
        footer = figures.footer([read_record(directory).label])
        paths = figures.save(task.figures(arrays), Path(folder), footer)
        return {path.stem: path.read_bytes() for path in paths if path.suffix == ".svg"}


def _curves(runs: Iterable[Found]) -> list[dict[str, Any]]:
    """A chart of every curve of `curves.csv`, a colour a series, a line a seed."""
    from bench.leaderboard.evidence.store import run_curves
    from bench.runs.records import read_curves

    rows: dict[str, dict[str, list[list[Row]]]] = {}
    for run in runs:
        if (path := run_curves(run.directory)) is None:
            continue
        of_run: dict[tuple[str, str], list[Row]] = {}
        for row in read_curves(run.directory, path):
            if math.isfinite(row.x) and math.isfinite(row.value):
                of_run.setdefault((row.curve, row.series), []).append(row)
        for (curve, series), line in of_run.items():
            rows.setdefault(curve, {}).setdefault(series, []).append(sorted(line, key=lambda row: row.x))
    return [_chart(curve, series) for curve, series in sorted(rows.items())]


def _chart(curve: str, series: Mapping[str, Sequence[Sequence[Row]]]) -> dict[str, Any]:
    from bench.figures import COLOURS

    points = [row for of_series in series.values() for line in of_series for row in line]
    left, right = min(row.x for row in points), max(row.x for row in points)
    bottom, top = min(row.value for row in points), max(row.value for row in points)

    def place(row: Row) -> str:
        x = (row.x - left) / ((right - left) or 1) * _WIDTH
        y = _HEIGHT - (row.value - bottom) / ((top - bottom) or 1) * _HEIGHT
        return f"{x:.1f},{y:.1f}"

    return {
        "name": curve,
        "x": (_short(left), _short(right)),
        "y": (_short(bottom), _short(top)),
        "size": (_WIDTH, _HEIGHT),
        "series": [
            {
                "name": name,
                "colour": COLOURS[i % len(COLOURS)],
                "lines": [[place(row) for row in _thinned(line)] for line in of_series],
            }
            for i, (name, of_series) in enumerate(series.items())
        ],
    }


def _short(value: float) -> str:
    return number(int(value) if value.is_integer() and abs(value) < 1e6 else value)


def _thinned(line: Sequence[Row]) -> Sequence[Row]:
    """At most so many points, evenly taken, the first and the last among them."""
    if len(line) <= _POINTS:
        return line
    return [line[round(i * (len(line) - 1) / (_POINTS - 1))] for i in range(_POINTS)]
