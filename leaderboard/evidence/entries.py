"""The committed records: what the project shows as evidence, and the way in.

A record lies in `records/<task identity>/<method identity>/seed<k>/`. The arrays from which every one of its
numbers can be computed again, and its curves, thinned, lie there too until they are committed; then the
history has them (`store.py`). Runs of ranked tasks lie in the project's own submission (`submission.py`),
without curves; what a page draws the training of lies in both.
"""

from __future__ import annotations

import csv
import io
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from bench.contract import FinishedRun, Task
from bench.errors import UsageError
from bench.leaderboard.evidence.store import CURVES, needed, run_arrays, run_curves
from bench.leaderboard.evidence.submission import OURS, RECORDS, SUBMISSIONS, run_name
from bench.runs import registry, resolution
from bench.runs.plan import Plan
from bench.runs.records import (
    Record,
    content,
    read_curves,
    read_record,
    same,
    split_metrics,
    with_commit,
)
from bench.runs.resolution import resolve
from bench.runs.runner import finished, load_scores, task_of
from bench.settings import build
from bench.spec import Arrays, Row, Spec
from bench.system.files import write_folder
from bench.system.source import source_hash

_LARGEST = 8 * 2**20
_FILES = ("arrays.safetensors", "curves.csv", "record.json")
POINTS = 100
"""Most points of a series in committed curves: more than a chart can show, and the repository stays small."""


def add(run: Path, to: Path = RECORDS, force: bool = False) -> Path:
    """Copies a run's record, arrays and thinned curves to the committed records; returns the new directory.

    Args:
        run: Directory of the run.
        to: Folder of the committed records.
        force: Replace an older record of the same run.

    Raises:
        UsageError: If the run is unfinished or failed, of the preset smoke, from source that no commit holds,
            too large, of a task or method that is not known or by now another, or if its metrics are not
            those of its arrays.
        OutputError: If it cannot be written; an older record is then as it was.
    """
    record = read_record(run)
    refuse(run, record)
    if not all(math.isfinite(row.x) for row in read_curves(run)):
        raise UsageError(f"{run / 'curves.csv'}: an abscissa is not finite")
    contents = {name: (run / name).read_bytes() for name in _FILES if (run / name).exists()}
    contents["curves.csv"] = thinned(contents["curves.csv"])
    contents["record.json"] = as_kept(record, contents["record.json"])
    if (size := sum(map(len, contents.values()))) > _LARGEST:
        raise UsageError(f"{run} has {size / 2**20:.1f} MiB of results; a committed record has at most 8")
    directory = to / record.task.identity / record.method.identity / f"seed{record.seed}"
    write_folder(directory, contents, force)
    return directory


def as_kept(record: Record, written: bytes) -> bytes:
    """What is written in a `record.json`, with the commit of its source where the run could not know it."""
    whole = with_commit(record)
    return written if whole == record else content(whole)


def thinned(curves: bytes) -> bytes:
    """The content of a `curves.csv` with at most `POINTS` points of a series, unchanged and in their order.

    The first, the last, the least and the largest stay; the others are evenly spaced by number.
    """
    header, *rows = csv.reader(io.StringIO(curves.decode(), newline=""))
    series = defaultdict(list)
    for number, (curve, name, *_) in enumerate(rows):
        series[curve, name].append(number)
    if all(len(numbers) <= POINTS for numbers in series.values()):
        return curves
    kept: list[int] = []
    for numbers in series.values():
        if len(numbers) > POINTS:
            values = np.array([float(rows[number][3]) for number in numbers])
            even = np.linspace(0, len(numbers) - 1, POINTS - 2).round().astype(int)
            extremes = [] if np.isnan(values).all() else [np.nanargmin(values), np.nanargmax(values)]
            kept += [numbers[i] for i in {*even.tolist(), *map(int, extremes)}]
        else:
            kept += numbers
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *(rows[number] for number in sorted(kept))])
    return text.getvalue().encode()


def refuse(run: Path, record: Record, code: str | None = None) -> None:
    """Says why a run is no evidence.

    Source is known where a commit holds it, where it is the installed release's, or where it is published.
    What is then kept of a run of the installed release names the commit, if there is one (`as_kept`): a
    later release is another.

    Args:
        run: Its directory.
        record: Its record.
        code: Where the source is published that no commit holds.

    Raises:
        UsageError: With the reason, in one line.
    """
    if record.status == "failed":
        raise UsageError(f"{run} failed ({record.reason}): a defect is no evidence; mend it and run again")
    if record.preset == "smoke":
        raise UsageError(f"{run} is a smoke run: it proves the pipe and measures nothing")
    if record.provenance.commit is None and code is None:
        _must_be_of_this_release(run, record)
    if record.provenance.dirty:
        raise UsageError(f"{run} was made from changed source: commit, then run again")
    spec = _spec(run, record)
    if record.task.version != spec.version:
        raise UsageError(
            f"{run} is of version {record.task.version} of {record.task.name}, now {spec.version}: run again"
        )
    named, now = (record.task.identity, record.method.identity), identities(record)
    for then, by_now in zip(named, now, strict=True):
        if then != by_now:
            raise UsageError(f"{run} was named {then} and is {by_now} by now: run again")
    if record.status != "completed":
        if any(value is not None for value in record.metrics.values()):
            raise UsageError(f"{run} {record.status} and has metrics all the same")
    else:
        task, arrays = load_scores(run, run_arrays(run))
        with registry.defects(f"the score of {run}"):
            again, _ = split_metrics(task.score(arrays), spec)
        if not agree(again, record.metrics):
            raise UsageError(f"{run}: the metrics of the record are not those of its arrays")


def _must_be_of_this_release(run: Path, record: Record) -> None:
    """Refuses a run from a file of a user's own, or from another release than the one that is installed."""
    for kind, part in (("method", record.method), ("task", record.task)):
        if ":" in part.name:
            raise UsageError(
                f"{run} was made outside a git repository: no commit holds the source of the {kind} "
                f"{part.name}; put it under git, then run again"
            )
    if record.provenance.source_hash != source_hash():
        raise UsageError(
            f"{run} was made outside a git repository, by another release than the installed one "
            f"(its source is {record.provenance.source_hash[:8]}): run again"
        )


def _spec(run: Path, record: Record) -> Spec:
    """What the task of a record measures; refuses a record that method and task could not have made."""
    if record.preset not in resolution.PRESETS:
        raise UsageError(f"{run}: there is no preset '{record.preset}'")
    for flag, part, entry in (
        ("method", record.method, registry.method(record.method.name)),
        ("task", record.task, registry.task(record.task.name)),
    ):
        try:
            settings = build(entry.cls.settings_class, part.settings, flag)
        except UsageError as error:
            raise UsageError(f"{run} has settings that {part.name} does not take: {error}") from None
        for name, value in entry.fixed.items():
            if getattr(settings, name) != value:
                raise UsageError(f"{run}: {part.name} fixes {name} to {value}, not {part.settings[name]}")
    spec = task_of(record).spec
    if (record.metrics.keys(), record.task.main_metric) != (spec.metrics.keys(), spec.main_metric):
        raise UsageError(f"{run}: its metrics are not those of {record.task.name}")
    return spec


def agree(first: Mapping[str, float | None], second: Mapping[str, float | None]) -> bool:
    """Whether metrics are the same numbers but for what processors differ by (`records.same`)."""
    return first.keys() == second.keys() and all(
        a is b is None or (a is not None and b is not None and same(name, a, b))
        for name, a, b in ((name, a, second[name]) for name, a in first.items())
    )


def identities(record: Record) -> tuple[str, str]:
    """What task and method of a record are called today; presets that were tuned since change the names."""
    method, task = record.method, record.task
    open_m, open_t = registry.method(method.name).flags(), registry.task(task.name).flags()
    plan = Plan(
        method=method.name,
        task=task.name,
        method_settings={name: value for name, value in method.settings.items() if name in open_m},
        task_settings={name: value for name, value in task.settings.items() if name in open_t},
        members=method.members,
        trainer={"precision": record.precision},
    )
    choice = resolve(plan, is_typed=False)
    return choice.task_identity, choice.method_identity


def committed(root: Path | None = None) -> Iterator[tuple[Path, Record]]:
    """All committed records with their directories, each run once, in order of task, method and seed.

    Args:
        root: Folder of records; None is that of the project, and the project's own submission.
    """
    found: dict[tuple[str, ...], Path] = {}
    for folder in (SUBMISSIONS / OURS, RECORDS) if root is None else (root,):
        found |= {path.parent.parts[-3:]: path.parent for path in folder.glob("*/*/seed*/record.json")}
    for _, directory in sorted(found.items()):
        yield directory, read_record(directory)


def directory_of(task: str, method: str, seed: int = 0) -> Path:
    """Where the committed run of these identities lies; under `records/` if it is in the submission too."""
    name = run_name(task, method, seed)
    return RECORDS / name if (RECORDS / name).exists() else SUBMISSIONS / OURS / name


def scores_of(directory: Path) -> tuple[Task, Arrays]:
    """The task of a committed run, and its arrays.

    Raises:
        UsageError: If they are not at hand and cannot be brought.
    """
    return load_scores(directory, needed(directory))


def curves_of(directory: Path) -> list[Row]:
    """The curves of a committed run, thinned.

    Raises:
        UsageError: If they are not at hand and cannot be brought.
    """
    return read_curves(directory, needed(directory, CURVES))


def finished_run(directory: Path) -> FinishedRun:
    """A committed run as `Task.compare` gets it.

    Its arrays raise a UsageError when they are asked for, are not at hand and cannot be brought.
    """
    return finished(directory, needed, run_curves)
