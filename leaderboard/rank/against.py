"""One's own runs beside the entries of a board: where those come from, and how all of them stand.

Entries are the committed ones, runs or submissions below a folder, or the JSON that stands beside a table of
the board. From runs come the losses of each test example, on which methods are compared most sharply
(leaderboard/rank/ranking.py). The JSON has values of seeds alone.

Shapes: S seeds, N test examples, K splits.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import numpy as np
import pydantic

from bench.errors import OutputError, UsageError
from bench.leaderboard.evidence.store import run_arrays
from bench.leaderboard.evidence.submission import MANIFEST, OURS, RECORDS, STATUS, SUBMISSIONS, words
from bench.leaderboard.evidence.submission import read as read_manifest
from bench.leaderboard.rank.ranking import Entry, Replicate, Standing, rank
from bench.runs import registry
from bench.runs.folders import Found, below
from bench.runs.marks import Mark, marks, together
from bench.runs.measures import is_standard, seed_matters, spec_of
from bench.runs.records import Record, read_arrays
from bench.runs.searches import searches
from bench.settings import Schema
from bench.spec import Arrays, Spec, array_digest
from bench.system import places
from bench.system.files import write
from bench.system.source import source_hash
from bench.text import hidden, one_line

if TYPE_CHECKING:
    from bench.contract import Task

_LARGEST = 2**24
"""Bytes of a board's JSON; 200 entries of 10 seeds are below 200 kB."""


class Measured:
    """The task of a record, as far as runs are compared: its code is imported for losses that are not kept.

    Losses are kept in the user's cache, under the arrays, the task's settings and the source that gave them.
    A cache that is damaged, or cannot be written, costs time and nothing else.
    """

    def __init__(self, record: Record) -> None:
        self._record = record
        self.spec: Spec = spec_of(record) if is_standard(record) else self._task.spec

    @cached_property
    def _task(self) -> Task:
        from bench.runs.runner import task_of  # here, since it needs torch

        return task_of(self._record)

    def losses(self, arrays: Arrays) -> np.ndarray | None:
        """As `Task.losses`."""
        part = self._record.task
        if part.name not in registry.tasks():  # a user's own, whose source is not known
            return self._task.losses(arrays)
        said = json.dumps([part.name, part.settings, array_digest(arrays)], sort_keys=True)
        path = self._folder / f"{hashlib.sha256(said.encode()).hexdigest()[:40]}.npy"
        with suppress(OSError, ValueError, EOFError):
            seal, content = (read := path.read_bytes())[:32], read[32:]
            if seal == hashlib.sha256(content).digest():
                kept: np.ndarray = np.load(io.BytesIO(content), allow_pickle=False)
                return kept
        losses = self._task.losses(arrays)
        if losses is not None:
            made = io.BytesIO()
            np.save(made, losses, allow_pickle=False)
            with suppress(OutputError):
                write(path, hashlib.sha256(made.getvalue()).digest() + made.getvalue())
        return losses

    @cached_property
    def _folder(self) -> Path:
        """That of the present source; what others kept is removed when it is new."""
        root = places.CACHE_ROOT / "losses"
        folder = root / source_hash()[:16]
        with suppress(OSError):
            for old in root.iterdir() if not folder.exists() else ():
                shutil.rmtree(old, ignore_errors=True)
        return folder


class Protocol(NamedTuple):
    """What runs have in common that may stand in one table.

    Attributes:
        task: Its identity.
        version: Of the task.
        digest: Of its data.
    """

    task: str
    version: int
    digest: str

    @classmethod
    def of(cls, record: Record) -> Protocol:
        """The protocol of a run."""
        return cls(record.task.identity, record.task.version, record.task.data_digest)


@dataclass(frozen=True, eq=False)
class Result:
    """What one seed gave.

    Attributes:
        status: completed, diverged or failed.
        value: Of the main metric; None if there is none.
        losses: `[N]`, of each test example; of a task with overlapping splits `[K]`, of each split.
        digest: Of the arrays.
    """

    status: str
    value: float | None
    losses: np.ndarray | None = None
    digest: str | None = None


@dataclass(frozen=True, eq=False)
class Rival:
    """A method's results on one task.

    Attributes:
        method: Its identity.
        slug: Of the submission in which they are; empty if in none.
        results: In order of their seeds.
        seed_matters: Whether another seed can change the method's answer.
        is_own: Whether they are one's own; such a method may be on the board too.
        is_tuned: Whether its settings are tuned with the budget of the task (`bench.runs.searches`).
        marks: What speaks against its runs.
    """

    method: str
    slug: str
    results: Sequence[Result]
    seed_matters: bool = True
    is_own: bool = False
    is_tuned: bool = False
    marks: tuple[Mark, ...] = ()

    @property
    def key(self) -> str:
        """What tells it from all others of its task."""
        return f"your {self.method}" if self.is_own else f"{self.method} ({self.slug})"

    @property
    def name(self) -> str:
        """As a sentence has it."""
        return self.method if not self.is_own and self.slug in ("", OURS) else self.key

    def count(self, status: str) -> int:
        """Runs of a status."""
        return sum(result.status == status for result in self.results)


@dataclass(frozen=True, eq=False)
class Stood:
    """How rivals stand on a task.

    Attributes:
        standing: Its names are keys of rivals.
        rivals: By key.
        basis: On what the differences rest.
    """

    standing: Standing
    rivals: dict[str, Rival]
    basis: str


# -------------------------------------------------------------------------------------------- who is there


class Shelf(NamedTuple):
    """Entries beside which runs may be put.

    Attributes:
        runs: Finished ones, each with the slug of its submission; empty if it lies in none.
        boards: Read from a board's JSON.
        source: Where they are, in words.
        is_there: Whether the place holds entries, be it of other tasks.
    """

    runs: list[tuple[str, Found]]
    boards: list[BoardTask]
    source: str
    is_there: bool = True


def shelf(against: Path | None, own: Iterable[Found], tasks: Iterable[str] = ()) -> Shelf:
    """The entries below a folder or in a board's JSON; the committed ones of some tasks unless told.

    Args:
        against: Folder of runs or submissions, or file.
        own: One's own runs, which are no rivals of themselves; their tasks are among those wanted.
        tasks: Identities of further tasks that are wanted.

    Raises:
        UsageError: If there is no such folder or file, or the file is no board's JSON.
    """
    if against is not None and not against.is_dir():
        return Shelf([], [read_board(against)], str(against))
    own = list(own)
    mine = {run.directory.resolve() for run in own}
    wanted = {run.record.task.identity for run in own if run.record is not None} | set(tasks)
    struck = {slug for slug, word in words(STATUS).items() if word.struck}
    found: list[tuple[str, Found]] = []
    for folder in (SUBMISSIONS, RECORDS) if against is None else (against,):
        # Records are the pages' evidence: where a task has submissions, those are what is ranked.
        taken = {run.record.task.identity for _, run in found if run.record}
        found += [
            (slug, run)
            for run in (below(folder) if against is not None else _committed(folder, wanted))
            if run.record is not None
            and run.record.task.identity not in taken
            and run.directory.resolve() not in mine
            and ((slug := _slug(run.directory)) not in struck or folder != SUBMISSIONS)
        ]
    is_there = against is not None or SUBMISSIONS.is_dir() or RECORDS.is_dir()
    return Shelf(found, [], "the committed entries" if against is None else str(against), is_there)


def _committed(folder: Path, tasks: Iterable[str]) -> Iterator[Found]:
    """The committed runs of some tasks: their folders are named by the task."""
    slugs = "*/" if folder == SUBMISSIONS else ""
    for task in sorted(tasks):
        for of_task in sorted(folder.glob(f"{slugs}{escape(task)}")):
            yield from below(of_task)


def _slug(run: Path) -> str:
    """The slug of the submission in which a run lies: the name of its folder; empty if it lies in none."""
    above = run.resolve().parents
    return above[2].name if len(above) > 2 and (above[2] / MANIFEST).exists() else ""


def rivals(shelf: Shelf, protocol: Protocol, task: Task | Measured) -> tuple[list[Rival], list[str]]:
    """The entries of a protocol, and a sentence on those of its task that are not of it.

    Args:
        shelf: Where to look.
        protocol: Task, version and data of one's own runs.
        task: That of the protocol.

    Raises:
        UsageError: If arrays are damaged, or a board's JSON has another metric.
    """
    groups: dict[tuple[str, str], dict[int, Found]] = {}
    others: dict[Protocol, int] = {}
    for slug, run in sorted(shelf.runs, key=lambda each: each[1].record.created if each[1].record else ""):
        record = run.record
        if record is None or record.task.identity != protocol.task or record.preset == "smoke":
            continue
        if (its := Protocol.of(record)) == protocol:
            groups.setdefault((record.method.identity, slug), {})[record.seed] = run  # the newest
        else:
            others[its] = others.get(its, 0) + 1
    found = [
        rival(method, slug, [of_seed[seed] for seed in sorted(of_seed)], task)
        for (method, slug), of_seed in sorted(groups.items())
    ]
    for board in shelf.boards:
        its = Protocol(board.task, board.task_version, board.data_digest)
        if its == protocol:
            found += board.rivals(task)
        elif its.task == protocol.task:
            others[its] = sum(len(entry.runs) for entry in board.entries)
    said = []
    for its, count in sorted(others.items()):
        parts = []
        if its.version != protocol.version:
            parts.append(f"of version {its.version} of the task, yours of {protocol.version}")
        if its.digest != protocol.digest:
            parts.append(f"on data {its.digest[:8]}, yours on {protocol.digest[:8]}")
        said.append(f"{protocol.task}: {count} runs in {shelf.source} are {', '.join(parts)}: not compared")
    if not found and shelf.is_there:
        said.append(f"{protocol.task}: there is nothing in {shelf.source} to compare yours with")
    return found, said


def rival(
    method: str, slug: str, runs: Iterable[Found], task: Task | Measured, is_own: bool = False
) -> Rival:
    """An entry made of finished runs, with their losses where their arrays are there.

    Raises:
        UsageError: If arrays are damaged, or the task can make nothing of them.
    """
    records = [(run.record, run.directory) for run in runs if run.record is not None]
    results, marked = [], []
    for record, directory in records:
        arrays = _arrays(record, directory)
        losses = None
        if arrays is not None:
            with registry.defects(f"the losses of {directory}"):
                losses = task.losses(arrays)
        value, digest = record.metrics.get(record.task.main_metric), record.provenance.arrays_digest
        results.append(Result(record.status, value, losses, digest))
        marked.append((record.seed, marks(record, arrays)))
    matters = seed_matters(records[0][0])
    return Rival(method, slug, results, matters, is_own, _is_tuned(records, slug), together(marked))


def _arrays(record: Record, directory: Path) -> Arrays | None:
    if record.status != "completed" or (path := run_arrays(directory)) is None:
        return None
    return read_arrays(directory, path)


def _is_tuned(records: Sequence[tuple[Record, Path]], slug: str) -> bool:
    """Whether every run has the settings of a search with the budget of the task."""
    if any(record.method.tuning != "tuned" for record, _ in records):
        return False
    tried = None
    if slug not in ("", OURS):
        tried = read_manifest(records[0][1].resolve().parents[2]).tuning_budget
    first = records[0][0]
    return searches(first.task.name).is_tuned("tuned", first.method.name, tried)


# --------------------------------------------------------------------------------------------- a board's JSON


class _OfBoard(Schema):
    """The board may say more than is read here."""

    model_config = pydantic.ConfigDict(extra="ignore")


_Name = Annotated[str, pydantic.StringConstraints(min_length=1, max_length=300)]
_Few = pydantic.Field(max_length=100)


class BoardRun(_OfBoard):
    """What a seed gave; `splits` are its values by split, of a task whose splits overlap."""

    seed: Annotated[int, pydantic.Field(ge=0)]
    value: float | None
    splits: list[float] | None = None


class BoardEntry(_OfBoard):
    """An entry; `status` says whether the board ranks it, as it does where nothing is said."""

    name: _Name
    slug: _Name
    seed_matters: bool
    runs: Annotated[list[BoardRun], pydantic.Field(min_length=1, max_length=10_000)]
    method: _Name | None = None
    status: _Name = "ranked"
    tuned: bool = False
    marks: Annotated[list[Annotated[list[_Name], pydantic.Field(min_length=2, max_length=2)]], _Few] = []

    @property
    def identity(self) -> str:
        """The identity of the method."""
        return self.method or self.name.removesuffix(f" ({self.slug})")


class BoardTask(_OfBoard):
    """The JSON beside a table of the board."""

    task: _Name
    task_version: int
    data_digest: _Name
    metric: _Name
    higher_is_better: bool
    entries: Annotated[list[BoardEntry], pydantic.Field(max_length=10_000)]

    def rivals(self, task: Task | Measured) -> list[Rival]:
        """The entries of the task, but for those that the board does not rank.

        Raises:
            UsageError: If its metric is not the task's.
        """
        main = task.spec.main_metric
        if (self.metric, self.higher_is_better) != (main, task.spec.metrics[main].higher_is_better):
            raise UsageError(f"the board ranks {self.task} by {self.metric}, the task here by {main}")
        return [
            Rival(
                entry.identity,
                entry.slug,
                [
                    Result(
                        "diverged" if run.value is None else "completed",
                        run.value,
                        None if run.splits is None else np.array(run.splits),
                    )
                    for run in sorted(entry.runs, key=lambda run: run.seed)
                ],
                entry.seed_matters,
                is_tuned=entry.tuned,
                marks=tuple(Mark(*mark) for mark in entry.marks),
            )
            for entry in self.entries
            if entry.status == "ranked"
        ]


def read_board(path: Path) -> BoardTask:
    """Reads the JSON of a task of the board.

    Raises:
        UsageError: If there is none or it is not of that form.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST + 1)
        if len(content) > _LARGEST:
            raise UsageError(f"{path} is no board's JSON: it has more than {_LARGEST >> 20} MiB")
        board = BoardTask.model_validate(json.loads(content))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = one_line(".".join(map(str, first["loc"])))
        raise UsageError(f"{path} is no JSON of a task of the board: {where}: {first['msg']}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no JSON: {one_line(error)}") from None
    if (found := next(hidden(board.model_dump()), None)) is not None:
        raise UsageError(f"{path} holds characters that are never printed: '{one_line(found)}'")
    if len({(entry.identity, entry.slug) for entry in board.entries}) < len(board.entries):
        raise UsageError(f"{path} is no JSON of a task of the board: an entry is there twice")
    return board


# ------------------------------------------------------------------------------------------- how they stand


def stand(entries: Sequence[Rival], task: Task | Measured) -> Stood:
    """How entries of one protocol stand; what cannot be compared with the others is said in the basis.

    Raises:
        UsageError: If losses do not fit their value, or the splits of entries are different ones.
    """
    spec = task.spec
    higher, ratio = spec.metrics[spec.main_metric].higher_is_better, spec.split_ratio
    if ratio is not None:
        able = [entry for entry in entries if all(map(_has_losses, entry.results))]
        basis = "the same overlapping splits for all entries (corrected resampled t)"
        if left := [entry.name for entry in entries if entry not in able]:
            basis += f"; left out, since their values by split are not there: {', '.join(left)}"
        ranked = [Entry(entry.key, _by_split(entry), entry.seed_matters) for entry in able]
    else:
        without = [entry.name for entry in entries if not all(map(_has_losses, entry.results))]
        ranked = [
            Entry(
                entry.key,
                [Replicate(r.value, None if without else r.losses, r.digest) for r in entry.results],
                entry.seed_matters,
            )
            for entry in entries
        ]
        able = list(entries)
        if not without:
            basis = "fresh seeds and fresh test examples, on which the entries are paired"
        else:
            of = "any entry" if len(without) == len(entries) else ", ".join(without)
            basis = f"fresh seeds alone (Welch), since there are no losses per example of {of}"
    return Stood(rank(ranked, higher, ratio), {entry.key: entry for entry in able}, basis)


def _has_losses(result: Result) -> bool:
    return result.value is None or result.losses is not None


def _by_split(entry: Rival) -> list[Replicate]:
    """A run for every split, the mean over its seeds; one without a value for every seed that gave none."""
    found = []
    for result in entry.results:
        if result.value is None:
            continue
        splits = result.losses
        if splits is None or not np.isclose(splits.mean(), result.value, rtol=1e-6, atol=1e-9):
            raise UsageError(f"{entry.name}: the splits of a run have another mean than its value")
        found.append(splits)
    if len({splits.shape for splits in found}) > 1:
        raise UsageError(f"{entry.name}: its runs have different numbers of splits")
    runs = [Replicate(float(x)) for x in np.mean(found, axis=0)] if found else []
    return runs + [Replicate(None) for result in entry.results if result.value is None]
