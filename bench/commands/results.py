"""What becomes of finished runs: `bench show`, `figures`, `record` and `reference`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console

from bench.commands.formats import Cell, Format, Row, add_format, drawn, number, plain, write
from bench.commands.parser import Parser, add_imports, errors, folder, output
from bench.errors import BenchError, UsageError

if TYPE_CHECKING:
    from bench.contract import FinishedRun
    from bench.runs.marks import Mark
    from bench.runs.records import Record
    from bench.spec import Metric


ASIDE = ("directory", "main", "marks")
"""Columns of `metric_rows` that are for programs."""
_SHOWN = 6
"""Metrics of a record that are printed unless all are asked for: the main one, then those with a value."""
_GONE = "no metric of the task as it is now"


def metrics_of(record: Record) -> tuple[Mapping[str, Metric], str]:
    """What the record's task says of its metrics; where the task is not known here, nothing, and why."""
    from bench.runs.measures import spec_of

    try:
        return spec_of(record).metrics, ""
    except BenchError as error:
        return {}, str(error)


def in_words(record: Record, metric: str) -> str:
    """A metric of a record with its unit and direction."""
    known, unknown = metrics_of(record)
    if metric not in known:
        return f"{metric} ({unknown or _GONE})"
    return f"{metric} ({known[metric].unit}, {direction(known[metric])} is better)"


def direction(metric: Metric) -> str:
    """Which values are better: higher or lower ones."""
    return "higher" if metric.higher_is_better else "lower"


def say_twice(again: Iterable[Path]) -> None:
    """Says which directories were given more than once, be it by another path."""
    for directory in again:
        errors.print(plain(f"bench: {directory} is given twice: it counts once"), soft_wrap=True)


def _runs(names: list[str]) -> list[Path]:
    """Directories of runs, each once; says which were given twice."""
    from bench.runs.folders import distinct

    once, again = distinct(map(Path, names))
    say_twice(again)
    return once


def print_record(directory: Path, console: Console, every: bool = False) -> None:
    """Prints the record of a run: its first metrics or every one, cost, and how far its samplers mixed."""
    from bench.runs.marks import independent_draws
    from bench.runs.records import read_record
    from bench.spec import mixed

    record = read_record(directory)
    title = f"{record.method.identity} on {record.task.identity}, {record.preset}, seed {record.seed}"
    console.print(plain(f"{title}: {record.status}"), soft_wrap=True)
    rows = sorted(metric_rows(directory, record), key=lambda row: (not row["main"], row["value"] is None))
    left = 0 if every else len(rows[_SHOWN:])
    rows = rows[: len(rows) - left]
    marked = [row | {"metric": f"{row['metric']} (main)"} if row["main"] else row for row in rows]
    without = ("directory", "task", "method", "preset", "seed", "status", "main", "marks")
    console.print(drawn(marked, console.width, without=without))
    if left:
        console.print(plain(f"{left} more metrics: bench show {directory} --all"), soft_wrap=True)
    if unknown := metrics_of(record)[1]:
        console.print(plain(f"units and directions are not known here: {unknown}"), soft_wrap=True)
    steps = sum(fit.steps for fit in record.fits)
    console.print(
        f"{number(record.seconds)} s, {steps} training steps, {record.environment.threads} threads, "
        f"settings {record.method.tuning}"
    )
    if record.energy is not None:
        console.print(
            plain(f"{number(record.energy.joules)} J ({record.energy.source}, whatever else ran there)")
        )
    for fit in record.fits[-1:]:  # of a sequence, its end
        if fit.diagnostics:
            numbers = ", ".join(f"{name} {number(value)}" for name, value in fit.diagnostics.items())
            console.print(plain(f"last fit: {numbers}"))
    if (agree := mixed(record.diagnostics)) is not None:
        verdict = "the chains agree" if agree else "the chains do not agree: no reference, not to be compared"
        console.print(f"R-hat of predictions {record.diagnostics['prediction_rhat']:.3f}: {verdict}")
    if (counted := independent_draws(record)) is not None:
        worth, draws = counted
        half = "half of what the chain predicts is worth"
        console.print(f"{half} {worth:.1f} of {draws:g} independent draws or more", soft_wrap=True)
    fewest = min(record.draws or [], key=lambda counted: counted.distinct / counted.asked, default=None)
    if fewest is not None and 1 < fewest.distinct < fewest.asked:  # a point is one by nature
        console.print(f"distinct draws behind a prediction: {fewest.distinct} of {fewest.asked} asked for")
    for mark in marks_of(directory, record):
        console.print(plain(f"mark: {mark}"), soft_wrap=True)
    for path in sorted((directory / "figures").glob("*.svg")):
        console.print(f"figure: {path}", soft_wrap=True)
    with suppress(OSError, UnicodeDecodeError):
        for line in (directory / "notes.txt").read_text().splitlines():
            console.print(plain(line), soft_wrap=True)


def marks_of(directory: Path, record: Record) -> tuple[Mark, ...]:
    """What speaks against a run, be it one's own or a committed one."""
    from bench.leaderboard.evidence.store import run_arrays
    from bench.runs.marks import of_run

    return of_run(record, lambda: run_arrays(directory))


def metric_rows(directory: Path, record: Record) -> list[dict[str, Cell]]:
    """A row for every metric of a record; every row has the marks of the run."""
    known, unknown = metrics_of(record)
    marks = list(map(str, marks_of(directory, record)))
    rows: list[dict[str, Cell]] = []
    for name, value in record.metrics.items():
        metric = known.get(name)
        row: dict[str, Cell] = {
            "directory": str(directory),
            "task": record.task.identity,
            "method": record.method.identity,
            "preset": record.preset,
            "seed": record.seed,
            "status": record.status,
            "metric": name,
            "main": name == record.task.main_metric,
            "value": value,
            "unit": metric.unit if metric else "",
            "better": direction(metric) if metric else "",
            "note": record.undefined.get(name, metric.description if metric else "" if unknown else _GONE),
            "marks": marks,
        }
        rows.append(row)
    return rows


def show(arguments: list[str]) -> None:
    """Prints the records of runs below each other."""
    parser = Parser("bench show", description="Show the records of runs.")
    parser.add_argument("RUN", nargs="+", type=str, help="directory of a run")
    parser.add_argument(
        "--all", action="store_true", help="every metric, where a task has more than the six that are shown"
    )
    add_imports(parser)
    add_format(parser)
    chosen = parser.parse_args(arguments)

    from bench.runs.records import read_record

    records = {directory: read_record(directory) for directory in _runs(chosen.RUN)}
    if chosen.format != "table":
        rows = [row for item in records.items() for row in metric_rows(*item)]
        write(rows, chosen.format, aside=ASIDE)
        return
    for position, directory in enumerate(records):
        if position:
            output.print()
        print_record(directory, output, chosen.all)


def draw(arguments: list[str]) -> None:
    """Draws every run by itself, or with --to all runs together, as their tasks say."""
    parser = Parser(
        "bench figures",
        description="Draw the figures of runs anew, from their arrays. With --to, draw the runs together, as "
        "their tasks compare them, and say what their differences show, with intervals.",
    )
    parser.add_argument("RUN", nargs="+", type=str, help="directory of a run or committed record")
    parser.add_argument(
        "--to",
        type=folder,
        default=None,
        help="folder for figures of all runs together; without it each run's own are drawn in its directory",
    )
    add_imports(parser)
    add_format(parser)
    chosen = parser.parse_args(arguments)
    if chosen.to is not None:
        _draw_together(_runs(chosen.RUN), Path(chosen.to), chosen.format)
        return
    if chosen.format != "table":
        raise UsageError(f"--format {chosen.format}: bench figures prints a table only with --to")

    from bench.runs.runner import redraw

    for directory in _runs(chosen.RUN):
        for path in redraw(directory):
            output.print(str(path), soft_wrap=True)


def _draw_together(directories: list[Path], folder: Path, form: Format) -> None:
    """Compares the runs of tasks that share a `compare`; prints paths, table and sentences of each.

    Where the table is for programs, it alone is on standard output.
    """
    from bench import figures
    from bench.leaderboard.evidence.store import run_arrays, run_curves
    from bench.runs.registry import defects
    from bench.runs.runner import finished

    groups: dict[Any, list[FinishedRun]] = {}
    for directory in directories:
        run = finished(directory, run_arrays, run_curves)
        owner = next(cls for cls in type(run.task).__mro__ if "compare" in vars(cls))
        groups.setdefault(owner, []).append(run)
    say = output if form == "table" else errors
    names: set[str] = set()
    everything: list[Row] = []
    for owner, runs in groups.items():
        with defects(f"the comparison of {', '.join(run.task_name for run in runs)}"):
            comparison = owner.compare(runs)
        if twice := sorted(names & comparison.charts.keys()):
            raise UsageError(f"tasks of two kinds draw a figure named {twice[0]}: draw their runs apart")
        names |= comparison.charts.keys()
        for path in figures.save(comparison.charts, folder, figures.footer([run.label for run in runs])):
            say.print(str(path), soft_wrap=True)
        rows: list[dict[str, Cell]] = [
            dict(zip(comparison.header, row, strict=True)) for row in comparison.rows
        ]
        everything += rows
        if rows and form == "table":
            output.print(drawn(rows, output.width))
        for sentence in comparison.sentences:
            say.print(sentence, soft_wrap=True)
    if form != "table":
        write(everything, form)


def record(arguments: list[str]) -> None:
    """Copies runs to the committed records, or scores committed records again."""
    parser = Parser("bench record", description="Keep runs as evidence.")
    parser.add_argument(
        "action",
        type=Literal["add", "rescore"],
        help="add copies runs to the committed records; bench store commit follows. rescore computes the "
        "metrics of committed records from their arrays, after the version of their task has grown",
    )
    parser.add_argument(
        "RUN",
        nargs="+",
        type=str,
        help="directory of a run, neither smoke nor from changed source; to rescore, of a committed record",
    )
    parser.add_argument(
        "--to",
        type=folder,
        default=None,
        help="folder of the committed records; default is leaderboard/records/ of this project",
    )
    parser.add_argument("--force", action="store_true", help="replace an older record of the same run")
    add_imports(parser)
    chosen = parser.parse_args(arguments)

    from bench.leaderboard.evidence.entries import RECORDS, add
    from bench.leaderboard.evidence.rescoring import rescore

    if chosen.action == "rescore":
        if chosen.to is not None or chosen.force:
            raise UsageError("--to and --force are of bench record add: rescore works where a record lies")
        for directory in _runs(chosen.RUN):
            moved = [f"; {name} was {was}, is {now}" for name, (was, now) in rescore(directory).items()]
            output.print(plain(f"{directory}{''.join(moved)}"), soft_wrap=True)
        return
    to = RECORDS if chosen.to is None else Path(chosen.to)
    for directory in _runs(chosen.RUN):
        output.print(str(add(directory, to, chosen.force)), soft_wrap=True)


def reference(arguments: list[str]) -> None:
    """Copies predictions of runs to the references."""
    parser = Parser("bench reference", description="Make runs of a sampler the reference of their task.")
    parser.add_argument("action", type=Literal["add"], help="add copies predictions to the references")
    parser.add_argument(
        "RUN", nargs="+", type=str, help="directory of a run that mixed, of a method that provides invariant"
    )
    parser.add_argument(
        "--to",
        type=folder,
        default=None,
        help="folder of the references; default is tasks/references/ of this project",
    )
    parser.add_argument("--force", action="store_true", help="replace an older reference of the same target")
    add_imports(parser)
    chosen = parser.parse_args(arguments)

    from bench.leaderboard.evidence.references import add

    to = None if chosen.to is None else Path(chosen.to)
    for directory in _runs(chosen.RUN):
        output.print(str(add(directory, to, chosen.force)), soft_wrap=True)
