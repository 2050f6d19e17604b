"""The scores of a submission: arrays as the task declares them, its own targets, every metric computed again.

The task is built from its name and the settings of the record; names come from the suite's own catalogue, so
nothing of a submission is executed. The method is a label that nobody looks up.

Tolerances. Log-probabilities are stored as float16, whose rounding moves the sum of ten probabilities by at
most 1.1e-3: 2e-3 is allowed. Scores are computed in float64 from what is stored, and differ between
processors in the order of a sum, and a fitted temperature by what its search leaves open: a claim may be off
by 1e-9 of the number, or by 1e-12. Both are far below what one example moves.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from bench.contract import Task
from bench.data import array_digest
from bench.errors import BenchError
from bench.leaderboard.check.codes import Rejected
from bench.leaderboard.check.reading import arrays_of, read_header
from bench.leaderboard.check.screens import Gallery, Seen, examine, look
from bench.leaderboard.check.structure import Checked, HandedIn
from bench.leaderboard.check.truth import Truth
from bench.leaderboard.evidence.store import STORE, found, listed
from bench.leaderboard.evidence.submission import entry_name, seed_of
from bench.runs import registry, resolution
from bench.runs.records import RELATIVE, Record, RecordedTask, same, split_metrics
from bench.settings import build
from bench.spec import Arrays, Layout, Metric, misfit
from bench.system import places
from bench.text import one_line

NORMALISED_WITHIN: Final = 2e-3


@dataclass(frozen=True)
class Scored:
    """What stands of an accepted submission.

    Attributes:
        tier: How far its numbers can be trusted.
        message: What was checked, in words.
        flags: What the screens saw of its entries: task and method, name of the screen, reason.
    """

    tier: str
    message: str
    flags: list[tuple[str, str, str]]


@dataclass(frozen=True)
class Posed:
    """A task as a record names it.

    Attributes:
        said: What the record says of it.
        task: The task.
        layouts: What its arrays look like.
        truth: What is known of its own arrays and data.
    """

    said: RecordedTask
    task: Task
    layouts: Mapping[str, Layout]
    truth: Truth


def score(
    checked: Checked, data_dir: str | None = None, against: Path | None = None, store: Path = STORE
) -> Scored:
    """Checks the scores of a submission whose structure stands, and screens its entries.

    Args:
        checked: The submission.
        data_dir: Folder of data files; None to search the usual places.
        against: Folder of submissions whose predictions the screens compare with; its slug is passed over.
        store: Folder of arrays by their SHA-256.

    Raises:
        Rejected: With the first reason found.
    """
    posed: dict[str, Posed] = {}
    for run in checked.runs:
        if (name := run.record.task.identity) not in posed:
            posed[name] = pose(run.record, run.name, data_dir)
        elif run.record.task != posed[name].said:  # as of a record from before a setting was there
            task_of(run.record, run.name)
    _refuse_few_seeds(checked, posed)
    for run in checked.runs:
        stands(run, posed[run.record.task.identity])
    if checked.changed is not None:
        raise Rejected("file-hash", f"{checked.changed} has not the SHA-256 that submission.json gives")
    cells = {run.cell for run in checked.runs}
    unseen = sorted(name for name, task in posed.items() if not task.truth.is_known)
    told = f"{len(checked.runs)} runs, {len(cells)} entries: every metric computed again; " + (
        f"targets of {', '.join(unseen)} were not compared: nobody listed them, and the data are not here"
        if unseen
        else "targets compared with the tasks' own"
    )
    flags, absent = _screened(checked, posed, against, store)
    if absent:
        told += f"; not compared with {absent} runs on the board, whose arrays are not here"
    return Scored(min(map(tier, posed.values()), key=TIERS.index), told, flags)


TIERS: Final = ("targets unseen", "self-reported", "recomputed")
"""From less trust to more; `re-run` is given by maintainers."""


def tier(posed: Posed) -> str:
    """`recomputed`, if every metric of the task follows from predictions and its own targets.

    `self-reported`, if one is the method's own word; `targets unseen`, if nobody here can know the targets.
    """
    if not posed.truth.is_known:
        return TIERS[0]
    return TIERS[1 if posed.task.spec.self_reported else 2]


def _refuse_few_seeds(checked: Checked, posed: dict[str, Posed]) -> None:
    counts: dict[tuple[str, str], int] = {}
    for run in checked.runs:
        key = run.record.task.identity, run.cell
        counts[key] = counts.get(key, 0) + 1
    for (identity, cell), count in counts.items():
        if count < (least := posed[identity].task.spec.min_seeds):
            raise Rejected("seeds-too-few", f"{cell} has {count} seeds; the task asks for {least}")


# --------------------------------------------------------------------------------------------------- screens


def _screened(
    checked: Checked, posed: Mapping[str, Posed], against: Path | None, store: Path
) -> tuple[list[tuple[str, str, str]], int]:
    """The flags of a submission's entries, and how many runs on the board they could not be compared with."""
    flags: list[tuple[str, str, str]] = []
    absent = 0
    for identity, task in posed.items():
        own: dict[str, list[Seen]] = {}
        cells: dict[str, str] = {}
        for run in checked.runs:
            if run.record.task.identity == identity:
                name = entry_name(run.cell.rpartition("/")[2], checked.submission.slug)
                seen = own.setdefault(name, [])
                cells[name] = run.cell
                if run.record.status == "completed":
                    seen.append(examine(run.record.seed, run.arrays(), run.record.metrics, task.task))
        others, lacking = _others(identity, task, checked.submission.slug, against, store)
        absent += lacking
        gallery = Gallery(others | own)
        for name, cell in cells.items():
            flags += [(cell, *flag) for flag in gallery.flags(name, others)]
    return flags, absent


def _others(
    identity: str, posed: Posed, slug: str, against: Path | None, store: Path
) -> tuple[dict[str, list[Seen]], int]:
    """What screens see of other submissions' entries on a task, and how many of their runs are not here."""
    seen: dict[str, list[Seen]] = {}
    absent = 0
    for other in sorted(against.iterdir()) if against is not None and against.is_dir() else []:
        for path in sorted((other / identity).glob("*/seed*/record.json")) if other.name != slug else []:
            try:
                arrays = _on_board(path.parent, other, store)
                if misfit(posed.layouts, {n: (a.dtype.name, a.shape) for n, a in arrays.items()}):
                    continue
                name = entry_name(path.parts[-3], other.name)
                run = look(seed_of(path.parent), arrays)
                seen.setdefault(name, []).append(run)
            except (BenchError, OSError):
                absent += 1
    return {name: sorted(runs, key=lambda run: run.seed) for name, runs in seen.items()}, absent


def _on_board(run: Path, submission: Path, store: Path) -> Arrays:
    """The arrays of a run of another submission, beside its record or in the store.

    Raises:
        Rejected: If they are not of the form of safetensors.
        OSError: If they are not here.
    """
    path = run / "arrays.safetensors"
    if not path.exists():
        digest = listed(submission).get(path.relative_to(submission).as_posix(), "")
        path = found(digest, store=store) or path
    content = path.read_bytes()
    return arrays_of(content, read_header(content, run.name))


# ----------------------------------------------------------------------------------------------------- tasks


def pose(record: Record, where: str, data_dir: str | None = None) -> Posed:
    """The task of a record with what it says of its runs, and its data if they are here.

    Raises:
        Rejected: As `task_of`, or if the task is not ranked.
    """
    task = task_of(record, where, data_dir)
    layouts = task.layouts()
    if not task.spec.ranked or layouts is None:
        raise Rejected("task-unranked", f"{where}: {record.task.name} is not ranked")
    return Posed(record.task, task, layouts, Truth(task, record.task.identity))


def task_of(record: Record, where: str, data_dir: str | None = None) -> Task:
    """The task of a record, by the suite's own catalogue.

    Raises:
        Rejected: If there is none, it does not take the record's settings, they belong to another identity,
            or it is of another version.
    """
    part = record.task
    if part.name not in registry.tasks():
        raise Rejected("task-unknown", f"{where}: the suite has no task {part.name}")
    entry = registry.tasks()[part.name]
    try:
        settings = build(entry.cls.settings_class, dict(part.settings), "task")
        standard = build(
            entry.cls.settings_class, {**entry.fixed, **entry.presets.get("standard", {})}, "task"
        )
        task: Task = entry.cls(settings, data_dir)
        spec = task.spec
    except BenchError as error:
        raise Rejected("task-settings", f"{where}: {error}") from None
    if any(getattr(settings, name) != value for name, value in entry.fixed.items()):
        raise Rejected("task-settings", f"{where}: {part.name} fixes other settings")
    if (identity := resolution.identity(entry, settings, standard)) != part.identity:
        raise Rejected("task-settings", f"{where}: settings are of {identity}, not of {part.identity}")
    if part.version != spec.version:
        raise Rejected("task-version", f"{where} is of version {part.version}; the task is of {spec.version}")
    return task


# ------------------------------------------------------------------------------------------------------ runs


def stands(run: HandedIn, posed: Posed) -> None:
    """Checks one run: its arrays, and every metric that its record claims.

    Raises:
        Rejected: With the first reason found.
    """
    record, spec = run.record, posed.task.spec
    if posed.truth.data not in (None, record.task.data_digest):
        raise Rejected("data-differ", f"{run.name} was made on other data than the task's")
    if (record.metrics.keys(), record.task.main_metric) != (spec.metrics.keys(), spec.main_metric):
        raise Rejected("metrics-unknown", f"{run.name}: its metrics are not those of {record.task.name}")
    if run.arrays_file is None:  # it diverged
        return
    arrays = run.arrays()
    _refuse_arrays(run, arrays, posed)
    if record.status == "completed":
        refuse_values(run.name, arrays, posed.layouts)
        _refuse_claims(run, arrays, posed.task)


def _refuse_arrays(run: HandedIn, arrays: Arrays, posed: Posed) -> None:
    """Refuses arrays that are not those of the task, its targets, or those that the record names."""
    found = {name: (array.dtype.name, array.shape) for name, array in arrays.items()}
    if wrong := misfit(posed.layouts, found):
        raise Rejected("arrays-unexpected", f"{run.name}: {wrong}")
    if (name := posed.truth.other(arrays)) is not None:
        raise Rejected("targets-differ", f"{run.name}: {name} is not the task's own")
    if array_digest(arrays) != run.record.provenance.arrays_digest:
        raise Rejected("arrays-digest", f"{run.name}: the arrays are not those whose digest the record gives")


def refuse_values(where: str, arrays: Arrays, layouts: Mapping[str, Layout]) -> None:
    """Refuses numbers that no run leaves: not finite, or probabilities that do not sum to 1."""
    for name, array in arrays.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise Rejected("arrays-not-finite", f"{where}: {name} holds NaN or infinity")
        if layouts[name].is_log_probs:
            if array.max() > NORMALISED_WITHIN:  # before the exponential, which would overflow
                raise Rejected("arrays-not-normalised", f"{where}: {name} holds probabilities above 1")
            error = float(np.abs(np.exp(array.astype(np.float64)).sum(-1) - 1).max())
            if error > NORMALISED_WITHIN:
                raise Rejected(
                    "arrays-not-normalised", f"{where}: probabilities of {name} sum to 1 but for {error:.2g}"
                )


def _refuse_claims(run: HandedIn, arrays: Arrays, task: Task) -> None:
    """Refuses metrics that cannot be, and those that the task does not compute from the arrays."""
    spec, claims = task.spec, run.record.metrics
    for name, claim in claims.items():
        if claim is not None and not possible(claim, spec.metrics[name]):
            raise Rejected("metric-impossible", f"{run.name}: {name} is {claim!r}, out of its range")
    with _scoring(run.name):
        scores = task.score(arrays)
    try:
        again, _ = split_metrics(scores, spec)
    except ValueError as error:
        raise Rejected("metric-undefined", f"{run.name}: {one_line(error)}") from None
    for name, claim in claims.items():
        computed = again[name]
        if (claim is None) != (computed is None):
            raise Rejected("metric-undefined", f"{run.name}: {name} is {claim}, computed is {computed}")
        if claim is not None and computed is not None and not same(name, claim, computed):
            raise Rejected("metric-differs", f"{run.name}: {name} is {claim!r}, computed is {computed!r}")
    with _scoring(run.name):
        losses = task.losses(arrays)
    main = again[spec.main_metric]
    if losses is not None and main is not None:
        mean = float(np.mean(losses))
        if not math.isclose(mean, main, rel_tol=1e-6, abs_tol=1e-9):
            raise Rejected(
                "losses-differ", f"{run.name}: losses have the mean {mean!r}, {spec.main_metric} is {main!r}"
            )


def possible(value: float, metric: Metric) -> bool:
    """Whether a value lies between the best and the worst of its metric."""
    low, high = sorted((metric.best, metric.worst))
    return low - RELATIVE <= value <= high + RELATIVE


@contextmanager
def _scoring(where: str) -> Iterator[None]:
    """Tells what a task's own code says of arrays that it did not expect."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except MemoryError:
            raise
        except places.NotFound as error:
            raise Rejected("reference-missing", str(error)) from None
        except Exception as error:
            raise Rejected("score-failed", f"{where}: {type(error).__name__}: {error}") from None
