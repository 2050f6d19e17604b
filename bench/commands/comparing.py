"""Many finished runs: `bench runs` lists them, `bench compare` gives their means over seeds."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from bench.commands.formats import Row, add_format, drawn, plain, write
from bench.commands.parser import Parser, add_imports, errors, output
from bench.commands.results import direction, in_words, metrics_of, say_twice
from bench.errors import UsageError
from bench.registry import nearest

if TYPE_CHECKING:
    from bench.means import Line
    from bench.runs import Found


def list_runs(arguments: list[str]) -> None:
    """Lists the runs below a folder, those of one task together."""
    parser = Parser(
        "bench runs",
        description="List the runs below a folder: what became of each, its main metric, its seconds. On a "
        "terminal the heading is the folder of a task; a run lies in METHOD/PRESET-seedSEED below it.",
    )
    parser.add_argument("DIR", nargs="?", type=str, default="runs", help="folder; runs unless given")
    parser.add_argument(
        "--status",
        type=Literal["completed", "diverged", "failed", "unfinished", "running", "damaged"] | None,
        default=None,
        help="only runs of this status",
    )
    add_imports(parser)
    add_format(parser)
    chosen = parser.parse_args(arguments)

    from bench.runs import below

    found = [run for run in below(Path(chosen.DIR)) if chosen.status in (None, run.status)]
    if not found:
        errors.print(f"bench: no {chosen.status or ''} run below {chosen.DIR}".replace("  ", " "))
    if chosen.format != "table":
        write([_listed(run) for run in found], chosen.format, aside=("directory",))
        return
    for (folder, _), group in groupby(found, lambda run: (_folder(run), run.named["task"])):
        runs = list(group)
        first = next((run.record for run in runs if run.record is not None), None)
        words = f": {in_words(first, first.task.main_metric)}" if first else ""
        output.print(plain(folder + words), soft_wrap=True)
        rows = [_listed(run) for run in runs]
        output.print(drawn(rows, output.width, without=("directory", "task", "metric", "note")))
        for run in runs:
            if run.note:
                output.print(plain(f"{run.directory}: {run.note}"), soft_wrap=True)
        output.print()


def _listed(run: Found) -> Row:
    record = run.record
    return {
        "directory": str(run.directory),
        **run.named,
        "status": run.status,
        "metric": record.task.main_metric if record else None,
        "value": record.metrics.get(record.task.main_metric) if record else None,
        "seconds": record.seconds if record else None,
        "note": run.note,
    }


def _folder(run: Found) -> str:
    """The folder of the task's runs; that of the run itself where it does not lie in one named as usual."""
    method = run.directory.parent
    return str(method.parent if method.name == run.named["method"] else run.directory)


def compare(arguments: list[str]) -> None:
    """Prints means over seeds of every method, by task, preset and metric."""
    parser = Parser(
        "bench compare",
        description="Means over seeds with Student's intervals (95 percent), by task, preset and method. "
        "Nothing is ranked. Runs that differ in task version or data are kept apart; of runs of one seed the "
        "newest counts.",
    )
    parser.add_argument(
        "RUN", nargs="+", type=str, help="directory of a run, or folder with runs below it: runs/split_digits"
    )
    parser.add_argument(
        "--metric", type=str | None, default=None, help="another metric than the main one; all: every one"
    )
    add_imports(parser)
    add_format(parser)
    chosen = parser.parse_args(arguments)

    from bench.means import lines
    from bench.runs import gather

    runs, again = gather([Path(name) for name in chosen.RUN])
    say_twice(again)
    found, said = lines(runs)
    for sentence in said:
        errors.print(f"bench: {plain(sentence)}", soft_wrap=True)
    if not found:
        raise UsageError(f"no finished run at or below {', '.join(chosen.RUN)}")
    known = sorted({name for line in found for record in line.records for name in record.metrics})
    if chosen.metric not in (None, "all", *known):
        raise UsageError(f"--metric {chosen.metric}: {nearest(chosen.metric, known)}")
    everything: list[Row] = []
    for protocol, group in groupby(found, lambda line: line.protocol):
        of_protocol = list(group)
        for metric in _metrics(of_protocol, chosen.metric):
            rows = [_mean(line, metric) for line in of_protocol]
            everything += rows
            if chosen.format == "table":
                words = in_words(of_protocol[0].records[0], metric)
                output.print(plain(f"{protocol}: {words}"), soft_wrap=True)
                complete = not any(line.count("diverged") + line.count("failed") for line in of_protocol)
                counts = ("diverged", "failed") if complete else ()
                output.print(drawn(rows, output.width, without=(*_IN_HEADING, *counts)))
                output.print()
    if chosen.format != "table":
        write(everything, chosen.format, aside=("task_version", "data_digest"))


_IN_HEADING = ("task", "preset", "task_version", "data_digest", "metric", "unit", "better")


def _metrics(of_protocol: list[Line], wish: str | None) -> list[str]:
    """The metrics to show of a protocol, the main one first."""
    first = of_protocol[0].records[0]
    main = first.task.main_metric
    if wish is None:
        return [main]
    return sorted((name for name in first.metrics if wish in ("all", name)), key=lambda name: name != main)


def _mean(line: Line, metric: str) -> Row:
    first = line.records[0]
    known = metrics_of(first)[0].get(metric)
    values, completed = line.values(metric), line.count("completed")
    notes = [] if line.seed_matters else ["the method's answer does not depend on the seed"]
    if len(values) < completed:
        notes.append(f"undefined in {completed - len(values)} completed runs")
    return {
        "task": first.task.identity,
        "preset": first.preset,
        "task_version": first.task.version,
        "data_digest": first.task.data_digest,
        "metric": metric,
        "unit": known.unit if known else "",
        "better": direction(known) if known else "",
        "method": line.method,
        "mean": line.mean(metric),
        "seeds": len(values),
        "diverged": line.count("diverged"),
        "failed": line.count("failed"),
        "note": "; ".join(notes),
    }
