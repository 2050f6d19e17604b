"""Many finished runs: `bench runs` lists them, `bench compare` shows how they stand."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from bench.commands.formats import Row, add_format, drawn, interval, plain, that_fit, write
from bench.commands.parser import Parser, add_imports, errors, output
from bench.commands.results import direction, in_words, marks_of, metrics_of, say_twice
from bench.errors import UsageError
from bench.runs.registry import nearest
from bench.runs.searches import LINE, NONE_TUNED, parted

if TYPE_CHECKING:
    from bench.leaderboard.rank.against import Measured, Shelf, Stood
    from bench.runs.folders import Found
    from bench.runs.means import Line
    from bench.runs.records import Record
    from bench.spec import Metric


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

    from bench.runs.folders import below

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
    """Prints how runs stand beside others of their task, or their means over seeds."""
    chosen = _compare_parser().parse_args(arguments)

    from bench.runs.folders import gather
    from bench.runs.means import lines

    runs, again = gather([Path(name) for name in chosen.RUN])
    say_twice(again)
    found, said = lines(runs)
    _say(said)
    if not found:
        raise UsageError(f"no finished run at or below {', '.join(chosen.RUN)}")
    known = sorted({name for line in found for record in line.records for name in record.metrics})
    if chosen.metric not in (None, "all", *known):
        raise UsageError(f"--metric {chosen.metric}: {nearest(chosen.metric, known)}")
    others = _others(chosen.against, runs)
    everything: list[Row] = []
    for protocol, group in groupby(found, lambda line: line.protocol):
        of_protocol = list(group)
        for metric in _metrics(of_protocol, chosen.metric):
            rows, sentences, notes = _compared(of_protocol, metric, others)
            everything += rows
            if chosen.format == "table":
                first = of_protocol[0].records[0]
                output.print(plain(f"{protocol}: {in_words(first, metric)}"), soft_wrap=True)
                _print_rows(rows, sentences, notes)
    if chosen.format != "table":
        in_full = chosen.format in ("csv", "json")
        write(everything if in_full else _named(everything), chosen.format, aside=_ASIDE)


def _compare_parser() -> Parser:
    parser = Parser(
        "bench compare",
        description="Means over seeds with 95 percent intervals, by task, preset and method. In the main "
        "metric of tasks that rank, your methods stand beside the committed entries, with ranks and "
        "differences. Runs that differ in task version or data are kept apart; of several runs of a seed the "
        "newest counts.",
    )
    parser.add_argument(
        "RUN", nargs="+", type=str, help="directory of a run, or folder with runs below it: runs/split_digits"
    )
    parser.add_argument(
        "--against",
        type=str | None,
        default=None,
        help="in place of the committed entries: folder of runs or submissions, or JSON of a task of a board",
    )
    parser.add_argument(
        "--metric", type=str | None, default=None, help="another metric than the main one; all: every one"
    )
    add_imports(parser)
    add_format(parser)
    return parser


def _others(against: str | None, own: list[Found]) -> Shelf:
    """What one's own runs are compared with: the committed entries, or what `--against` names."""
    from bench.leaderboard.rank.against import shelf

    others = shelf(Path(against) if against else None, own)
    if not others.is_there:
        _say(
            [
                "this installation holds no committed entries: the given runs are compared among themselves; "
                "--against takes a folder of submissions or the JSON of a board"
            ]
        )
    return others


def _compared(of_protocol: list[Line], metric: str, others: Shelf) -> tuple[list[Row], list[str], list[str]]:
    """The table of a protocol in one metric; of the main one sentences on one's own methods, and notes."""
    first = of_protocol[0].records[0]
    if metric == first.task.main_metric and (task := _ranking(first)) is not None:
        return _standing(of_protocol, others, task)
    return [_mean(line, metric) for line in of_protocol], [], []


def _print_rows(rows: list[Row], sentences: list[str], notes: list[str]) -> None:
    """Prints what was asked for, the table, and its notes; one that is written out is no column."""
    for sentence in sentences:
        output.print(plain(sentence), soft_wrap=True)
    complete = not any(row["diverged"] or row["failed"] for row in rows)
    hidden = ("note",) if notes or sentences else ()
    counts = ("diverged", "failed") if complete else ()
    rows, line = _above_and_below(rows)
    without = (*_ASIDE, *_IN_HEADING, *hidden, *counts, "tuned", "marks")
    named = _named(rows)
    differences = [name for name in named[0] if name.endswith(_MINUS)]
    fit = that_fit(named, output.width, differences, without)
    out = differences[len(fit) :]
    output.print(drawn(named, output.width, without=(*without, *out), line=line))
    if out:
        notes = [
            *notes,
            f"{len(out)} columns of differences are left out for want of width: --format csv has all",
        ]
    for note in [*notes, *_said_of_marks(rows)]:
        output.print(plain(note), soft_wrap=True)
    if any(row.get("tuned") is not None for row in rows) and not any(row["tuned"] for row in rows):
        output.print(plain(NONE_TUNED), soft_wrap=True)
    elif line is not None:
        output.print("ranks and differences are those of one ranking, above the line and below it")
    output.print()


def _above_and_below(rows: list[Row]) -> tuple[list[Row], tuple[int, str] | None]:
    """Rows with the tuned ones first, and the line below these; no line where all stand on one side."""
    above, below = parted(rows, lambda row: bool(row.get("tuned")))
    return [*above, *below], (len(above), LINE) if above and below else None


def _named(rows: Sequence[Row]) -> list[Row]:
    """Rows for eyes: an entry under its name, which says whose it is, with a star if it has a mark."""
    shown: list[Row] = []
    for row in rows:
        marks = _marks_in(row)
        name = f"{row.get('entry', row['method'])}{' *' if marks else ''}"
        shown.append({**row, "method": name, "marks": "; ".join(marks)})
    return shown


def _said_of_marks(rows: Sequence[Row]) -> list[str]:
    """A line for each mark of a row."""
    found = [(row.get("entry", row["method"]), mark) for row in rows for mark in _marks_in(row)]
    return [f"* {name}: {mark}" for name, mark in found]


def _marks_in(row: Row) -> list[str]:
    marks = row["marks"]
    assert isinstance(marks, list)
    return marks


def _say(sentences: Iterable[str]) -> None:
    for sentence in sentences:
        errors.print(plain(f"bench: {sentence}"), soft_wrap=True)


_IN_HEADING = ("task", "preset", "metric", "unit", "better")
_ASIDE = ("task_version", "data_digest", "entry", "submission", "best_rank", "worst_rank", "basis")
"""Columns for programs, not for eyes."""
_MINUS = " minus it"
"""How the heading of a column of differences ends."""


def _metrics(of_protocol: list[Line], wish: str | None) -> list[str]:
    """The metrics to show of a protocol, the main one first."""
    first = of_protocol[0].records[0]
    main = first.task.main_metric
    if wish is None:
        return [main]
    return sorted((name for name in first.metrics if wish in ("all", name)), key=lambda name: name != main)


def _mean(line: Line, metric: str) -> Row:
    values, completed = line.values(metric), line.count("completed")
    notes = [] if line.seed_matters else ["the method's answer does not depend on the seed"]
    if len(values) < completed:
        notes.append(f"undefined in {completed - len(values)} completed runs")
    return {
        **_heading(line.records[0], metric),
        "method": line.method,
        "mean": line.mean(metric),
        "seeds": len(values),
        "diverged": line.count("diverged"),
        "failed": line.count("failed"),
        "note": "; ".join(notes),
        "marks": _marks(line),
    }


def _marks(line: Line) -> list[str]:
    """What speaks against the runs of a method."""
    from bench.runs.marks import together

    found = [(run.record.seed, marks_of(run.directory, run.record)) for run in line.runs if run.record]
    return list(map(str, together(found)))


def _heading(first: Record, metric: str) -> Row:
    """What rows of one table share."""
    known = metrics_of(first)[0].get(metric)
    return {
        "task": first.task.identity,
        "preset": first.preset,
        "task_version": first.task.version,
        "data_digest": first.task.data_digest,
        "metric": metric,
        "unit": known.unit if known else "",
        "better": direction(known) if known else "",
    }


# ---------------------------------------------------------------------------------- beside the committed ones


def _ranking(first: Record) -> Measured | None:
    """The task of runs, where it ranks methods and they may be ranked; says why it is not so."""
    from bench.leaderboard.rank.against import Measured
    from bench.runs.measures import spec_of

    if metrics_of(first)[1]:
        return None  # not known here, which the heading says
    if first.preset == "smoke" and spec_of(first).ranked:
        _say([f"{first.task.identity}: smoke runs prove the pipe and measure nothing: means alone"])
        return None
    task = Measured(first)
    if not (task.spec.ranked or task.spec.own_data):
        _say([f"{first.task.name} does not rank methods: means alone"])
        return None
    return task


def _standing(lines: Sequence[Line], others: Shelf, task: Measured) -> tuple[list[Row], list[str], list[str]]:
    """The table of a protocol with one's own methods in it, a sentence on each of them, and notes."""
    from bench.leaderboard.rank.against import Protocol, rival, rivals, stand

    first, metric = lines[0].records[0], task.spec.metrics[task.spec.main_metric]
    found, said = rivals(others, Protocol.of(first), task)
    if not task.spec.own_data:  # of which nobody else has entries
        _say(said)
    own = [rival(line.method, "", line.runs, task, is_own=True) for line in lines]
    stood = stand([*own, *found], task)
    compared = {place.name for place in stood.standing.places if place.ranks}
    methods = {mine.key: mine.method if len(own) > 1 else "yours" for mine in own}
    # In the order of the places, so that a narrow terminal shows those of the best.
    columns = {
        place.name: f"{methods[place.name]}{_MINUS}"
        for place in stood.standing.places
        if place.name in methods and place.name in compared and len(compared) > 1
    }
    rows: list[Row] = []
    for place in stood.standing.places:
        entry = stood.rivals[place.name]
        best, worst = place.ranks or (None, None)
        differences = {
            column: stood.standing.difference(mine, place.name)
            if mine != place.name and place.name in compared
            else None
            for mine, column in columns.items()
        }
        rows.append(
            {
                **_heading(first, task.spec.main_metric),
                "method": entry.method,
                "entry": entry.name,
                "submission": "yours" if entry.is_own else entry.slug,
                "mean": place.cell,
                "seeds": sum(result.value is not None for result in entry.results),
                "diverged": entry.count("diverged"),
                "failed": entry.count("failed"),
                "rank": _range(place.ranks) if place.ranks else None,
                "best_rank": best,
                "worst_rank": worst,
                "group": place.group,
                **differences,
                "basis": stood.basis,
                "note": (f"not ranked ({place.why})" if place.why else "")
                or ("" if entry.seed_matters else "no seed changes the answer"),
                "tuned": entry.is_tuned,
                "marks": list(map(str, entry.marks)),
            }
        )
    sentences = [_sentence(mine.key, stood, first, metric) for mine in own if mine.key in stood.rivals]
    notes = []
    if len(compared) > 1:
        notes.append(f"differences hold all at once with 95%, for {stood.basis}")
    for note in dict.fromkeys(row["note"] for row in rows if row["note"]):
        notes.append(f"{note}: {', '.join(str(row['entry']) for row in rows if row['note'] == note)}")
    return rows, sentences, notes


def _sentence(mine: str, stood: Stood, first: Record, metric: Metric) -> str:
    """How one's own method stands beside the best of the others; of one's own where there is no other."""
    places = {place.name: place for place in stood.standing.places}
    own, task = places[mine], first.task
    if own.ranks is None:
        return f"{mine} on {task.identity}: not ranked ({own.why})"
    rank = f"rank {_range(own.ranks)} of {sum(place.ranks is not None for place in places.values())}"
    rivals = [name for name, place in places.items() if place.ranks and name != mine]
    rivals.sort(key=lambda name: stood.rivals[name].is_own)
    if not rivals:
        return f"{mine} on {task.identity}: {rank}: it stands alone"
    difference = stood.standing.difference(mine, rivals[0])
    shows = difference.sign() * (1 if metric.higher_is_better else -1)
    verdict = {1: "better", -1: "worse", 0: "no difference shown"}[shows]
    if not shows and (more := stood.standing.seeds_to_separate(mine, rivals[0])) is not None:
        verdict += f" ({_more_seeds(more)})"
    return (
        f"{mine} against {stood.rivals[rivals[0]].name}, the best other, on {task.identity}: "
        f"{'+' if difference.centre > 0 else ''}{interval(difference)} {metric.unit} of {task.main_metric}, "
        f"{direction(metric)} is better: {verdict}; {rank}"
    )


def _more_seeds(more: float) -> str:
    """How many more seeds would show a difference of the size found."""
    if math.isinf(more):
        return "no number of seeds would show one of this size: the test examples are too few"
    return f"{more:.0f} more seed{'s' * (more > 1)} of both would show one of this size"


def _range(ranks: tuple[int, int]) -> str:
    return str(ranks[0]) if ranks[0] == ranks[1] else f"{ranks[0]} to {ranks[1]}"
