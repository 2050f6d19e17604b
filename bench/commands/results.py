"""What becomes of finished runs: `bench show`, `figures`, `record` and `reference`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.table import Table

from bench.commands.parser import Parser, output
from bench.errors import UsageError

if TYPE_CHECKING:
    from bench.contract import FinishedRun
    from bench.figures import Label


def print_record(directory: Path, console: Console) -> None:
    """Prints the record of a run: metrics, cost, and how far its samplers mixed."""
    from bench.diagnostics import mixed
    from bench.records import read_record
    from bench.runner import task_of

    record = read_record(directory)
    spec = task_of(record).spec
    title = f"{record.method.identity} on {record.task.identity}, {record.preset}, seed {record.seed}"
    table = Table(title=f"{title}: {record.status}", title_justify="left")
    for column in ("metric", "value", "unit", ""):
        table.add_column(column)
    for name, value in record.metrics.items():
        metric = spec.metrics[name]
        shown = f"{value:.4f}" if value is not None else "-"
        note = record.undefined.get(name, metric.description)
        main = " (main)" if name == record.task.main_metric else ""
        table.add_row(name + main, shown, metric.unit, note)
    console.print(table)
    steps = sum(fit.steps for fit in record.fits)
    console.print(
        f"{record.seconds:.1f} s, {steps} training steps, {record.environment.threads} threads, "
        f"settings {record.method.tuning}"
    )
    for fit in record.fits[-1:]:  # of a sequence, its end
        if fit.diagnostics:
            numbers = ", ".join(f"{name} {value:.4g}" for name, value in fit.diagnostics.items())
            console.print(f"last fit: {numbers}")
    if (agree := mixed(record.diagnostics)) is not None:
        verdict = "the chains agree" if agree else "the chains do not agree: no reference, not to be compared"
        console.print(f"R-hat of predictions {record.diagnostics['prediction_rhat']:.3f}: {verdict}")
    for path in sorted((directory / "figures").glob("*.svg")):
        console.print(f"figure: {path}", soft_wrap=True)


def show(arguments: list[str]) -> None:
    """Prints the record of a run."""
    parser = Parser("bench show", description="Show the record of a run.")
    parser.add_argument("RUN", type=str, help="directory of a run")
    print_record(Path(parser.parse_args(arguments).RUN), output)


def draw(arguments: list[str]) -> None:
    """Draws every run by itself, or with --to all runs together, as their tasks say."""
    from bench.records import read_record
    from bench.runner import load_scores

    parser = Parser(
        "bench figures",
        description="Draw the figures of runs anew, from their arrays. With --to, draw the runs together, as "
        "their tasks compare them, and say what their differences show, with intervals.",
    )
    parser.add_argument("RUN", nargs="+", type=str, help="directory of a run or committed record")
    parser.add_argument(
        "--to",
        type=str | None,
        default=None,
        help="folder for figures of all runs together; without it each run's own are drawn in its directory",
    )
    chosen = parser.parse_args(arguments)
    if chosen.to is not None:
        _draw_together(chosen.RUN, Path(chosen.to))
        return
    for name in chosen.RUN:
        task, arrays = load_scores(Path(name))
        _save(task.figures(arrays), Path(name) / "figures", [read_record(Path(name)).label])


def _draw_together(names: list[str], folder: Path) -> None:
    """Compares the runs of tasks that share a `compare`; prints paths, table and sentences of each."""
    from bench.runner import finished

    groups: dict[Any, list[FinishedRun]] = {}
    for name in names:
        run = finished(Path(name))
        owner = next(cls for cls in type(run.task).__mro__ if "compare" in vars(cls))
        groups.setdefault(owner, []).append(run)
    drawn: set[str] = set()
    for owner, runs in groups.items():
        comparison = owner.compare(runs)
        if twice := sorted(drawn & comparison.charts.keys()):
            raise UsageError(f"tasks of two kinds draw a figure named {twice[0]}: draw their runs apart")
        drawn |= comparison.charts.keys()
        _save(comparison.charts, folder, [run.label for run in runs])
        table = [list(comparison.header), *map(list, comparison.rows)] if comparison.rows else []
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        for row in table:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            output.print("  ".join(cells).rstrip(), soft_wrap=True)
        for sentence in comparison.sentences:
            output.print(sentence, soft_wrap=True)


def _save(charts: Mapping[str, Any], folder: Path, labels: Iterable[Label]) -> None:
    from bench import figures

    for path in figures.save(charts, folder, figures.footer(labels)):
        output.print(str(path), soft_wrap=True)


def record(arguments: list[str]) -> None:
    """Copies runs to the committed records."""
    from bench.leaderboard.entries import RECORDS, add

    parser = Parser("bench record", description="Keep runs as evidence.")
    parser.add_argument("action", type=Literal["add"], help="add copies runs to the committed records")
    parser.add_argument(
        "RUN", nargs="+", type=str, help="directory of a run; neither smoke nor from changed source"
    )
    parser.add_argument("--to", type=str, default=str(RECORDS), help="folder of the committed records")
    parser.add_argument("--force", action="store_true", help="replace an older record of the same run")
    chosen = parser.parse_args(arguments)
    for name in chosen.RUN:
        output.print(str(add(Path(name), Path(chosen.to), chosen.force)), soft_wrap=True)


def reference(arguments: list[str]) -> None:
    """Copies predictions of runs to the references."""
    from bench.leaderboard.references import add
    from bench.studies.references import FOLDER

    parser = Parser("bench reference", description="Make runs of a sampler the reference of their task.")
    parser.add_argument("action", type=Literal["add"], help="add copies predictions to the references")
    parser.add_argument(
        "RUN", nargs="+", type=str, help="directory of a run that mixed, of a method that provides invariant"
    )
    parser.add_argument("--to", type=str, default=str(FOLDER), help="folder of the references")
    parser.add_argument("--force", action="store_true", help="replace an older reference of the same target")
    chosen = parser.parse_args(arguments)
    for name in chosen.RUN:
        output.print(str(add(Path(name), Path(chosen.to), chosen.force)), soft_wrap=True)
