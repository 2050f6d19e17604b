"""The board as one plain data structure, computed from submissions; pages only show it.

A submission is read as it lies: its manifest, and for each run the record and the arrays, beside it or in the
store. Nothing that a stranger wrote ends the build: what cannot be read is an entry with a reason, or a line
among the problems. What a task came to is kept in a cache under a digest of every file that it was computed
from and of the source that computed it, so a second build computes nothing, and imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass, field
from multiprocessing import active_children, get_all_start_methods, get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.errors import UsageError
from bench.intervals import Interval
from bench.leaderboard.check.screens import SCREENS
from bench.leaderboard.evidence import submission as layout
from bench.leaderboard.evidence.store import bring
from bench.leaderboard.evidence.store import found as stored
from bench.leaderboard.rank.cells import Cell, RunFiles
from bench.leaderboard.rank.kept import Cache, folder
from bench.leaderboard.rank.pairing import Pair
from bench.leaderboard.rank.ranking import Standing, across
from bench.leaderboard.rank.rows import Table, cleaned
from bench.leaderboard.rank.standings import Computed, compute, recorded
from bench.runs.searches import searches
from bench.text import hidden, one_line

RECORDS = layout.RECORDS
STORE = "store"
"""Beside the folder of submissions: what maintainers say of them, and the store of their arrays."""
_LARGEST_MANIFEST = 64 * 2**20
_WORTH_PROCESSES = 300
"""Runs to score below which starting processes takes longer than they save."""


@dataclass
class Board:
    """All that the pages show.

    Attributes:
        tables: Of the tasks, by identity.
        pairs: Task -> compare pages.
        figures: Task -> SVG by name.
        standings: Of the tasks that have one.
        labels: Task -> classes of its test examples `[N]`, where it has such.
        overall: The standing across tasks, see `_overall`.
        submissions: Manifests by slug, without their files, with the maintainers' word.
        problems: What is wrong with submissions as a whole, a line each.
        records: Of each cell the content of its records: (task, slug, method) -> seed -> bytes.
        recorded: Tables of runs that are kept as evidence and not ranked, by the identity of their task.
        recorded_files: Content of their records: (task, method) -> seed -> bytes.
    """

    tables: dict[str, Table] = field(default_factory=dict)
    pairs: dict[str, list[Pair]] = field(default_factory=dict)
    figures: dict[str, dict[str, str]] = field(default_factory=dict)
    standings: dict[str, Standing] = field(default_factory=dict)
    labels: dict[str, np.ndarray] = field(default_factory=dict)
    overall: dict[str, Any] = field(default_factory=dict)
    submissions: dict[str, dict[str, Any]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    records: dict[tuple[str, str, str], dict[int, bytes | None]] = field(default_factory=dict)
    recorded: dict[str, Table] = field(default_factory=dict)
    recorded_files: dict[tuple[str, str], dict[int, bytes | None]] = field(default_factory=dict)

    @property
    def without_arrays(self) -> str:
        """A sentence on the entries whose predictions are not here; empty if all are."""
        lacking = sum(table.get("without_arrays", 0) for table in self.tables.values())
        entries = sum(len(table["entries"]) for table in self.tables.values())
        if not lacking:
            return ""
        return (
            f"the predictions of {lacking} of {entries} entries are not here: those stand as their records "
            "claim, compared by seeds alone; in a clone with its history `bench store pull` brings them"
        )

    @property
    def not_again(self) -> list[str]:
        """Entries of which not every number was computed again, with the reason."""
        return [
            f"{row['name']} on {task}: {row['why'] or 'shown as its records claim'}"
            for task, table in sorted(self.tables.items())
            for row in table["entries"]
            if row["tier"] == "self-reported" and row["status"] not in ("withdrawn", "superseded")
        ]


def build(
    submissions: Path = layout.SUBMISSIONS,
    cache: Path | None = None,
    imports: Sequence[str] = (),
    workers: int | None = None,
    records: Path | None = None,
) -> Board:
    """Computes the board.

    Args:
        submissions: Their folder. Beside it may stand `status.toml`, the maintainers' words; `owners.toml`,
            in whose order submissions came to the board; and `store`.
        cache: Folder for what was computed; None is the user's.
        imports: Own tasks, as `package.module:Class`.
        workers: Processes; None takes one for each processor where there is enough to do.
        records: Folder of runs that are kept as evidence; None shows none.

    Raises:
        UsageError: If there is no such folder, or the maintainers' file is wrong.
    """
    if not submissions.is_dir():
        raise UsageError(f"{submissions} is no folder of submissions")
    beside = submissions.resolve().parent
    status = beside / layout.STATUS.name
    board, words = Board(), layout.words(status)
    if submissions.resolve() == layout.SUBMISSIONS.resolve():
        bring(path.parent for path in submissions.glob("*/*/*/seed*/record.json"))
    if unknown := sorted(words.keys() - set(_inside(submissions))):
        raise UsageError(f"{status} names {unknown[0]}, of which there is no submission in {submissions}")
    adopted = [layout.OURS, *layout.owners(beside / layout.OWNERS.name)]
    order = {slug: place for place, slug in enumerate(adopted)}
    jobs = _gathered(board, submissions, beside / STORE, words, order)
    _refuse_unknown_flags(status, words, board)
    if records is not None:
        jobs += _recorded(board, records)
    kept = Cache(folder(cache, submissions), imports)
    found = _computed(kept, jobs, imports, workers)
    for (kind, task), (computed, _) in sorted(found.items()):
        if kind == "records":
            board.recorded[task] = computed.table
            continue
        board.tables[task], board.pairs[task], board.figures[task] = computed[:3]
        _say_tuned(computed.table, board.submissions)
        if computed.standing is not None:
            board.standings[task] = computed.standing
        if computed.labels is not None:
            board.labels[task] = computed.labels
    board.overall = _overall(kept, found)
    kept.forget_others()
    return board


def _say_tuned(table: Table, submissions: Mapping[str, Mapping[str, Any]]) -> None:
    """Says of every entry whether it is tuned: searches are no files that the table is kept under."""
    found = searches(table["task_name"])
    for row in table["entries"]:
        tried = None if row["slug"] == layout.OURS else submissions[row["slug"]]["tuning_budget"]
        row["tuned"] = found.is_tuned(row["tuning"], row["method"], tried)


# ---------------------------------------------------------------------------------------------- what there is


class TaskCells(NamedTuple):
    """A task with its cells, and a digest of all their files and of what is said of them.

    `kind` is task for what is ranked, records for what is kept as evidence.
    """

    kind: str
    task: str
    cells: tuple[Cell, ...]
    digest: str


def _inside(folder: str | Path) -> list[str]:
    """Names of the directories in a folder that no link leads to, in order."""
    try:
        with os.scandir(folder) as entries:
            return sorted(e.name for e in entries if e.name[0] != "." and e.is_dir(follow_symlinks=False))
    except OSError:
        return []


def _manifest(directory: Path) -> layout.Submission:
    """The manifest of a submission.

    Raises:
        UsageError: If there is none that can be believed; one line, without the place of the folder.
    """
    slug, path = directory.name, directory / layout.MANIFEST
    if not layout.SLUG.fullmatch(slug):
        raise UsageError(f"{one_line(slug, 80)}: a slug holds a-z, 0-9 and hyphens")
    if path.exists() and path.stat().st_size > _LARGEST_MANIFEST:
        raise UsageError(f"{slug}/{layout.MANIFEST} is too large")
    try:
        manifest = layout.read(directory)
    except UsageError as error:
        raise UsageError(str(error).replace(str(path), f"{slug}/{layout.MANIFEST}")) from None
    if manifest.slug != slug:
        raise UsageError(f"{slug}/{layout.MANIFEST} is of the slug {manifest.slug}")
    if next(hidden(manifest.model_dump(exclude={"files"})), None) is not None:
        raise UsageError(f"{slug}/{layout.MANIFEST} holds characters that are never shown")
    return manifest


def _gathered(
    board: Board,
    submissions: Path,
    store: Path,
    words: Mapping[str, layout.Word],
    order: Mapping[str, int],
) -> list[TaskCells]:
    """Puts manifests and problems on the board; returns a job for every task."""
    cells: dict[str, list[tuple[Cell, str]]] = {}
    for slug in _inside(submissions):
        try:
            manifest = _manifest(submissions / slug)
        except UsageError as error:
            board.problems.append(str(error))
            continue
        word = words.get(slug, layout.Word())
        described = manifest.model_dump(exclude={"files"}) | {"word": word.model_dump()}
        board.submissions[slug] = cleaned(described)
        for task, method, seeds in _cells(submissions / slug):
            cell = f"{submissions}/{slug}/{task}/{method}"
            runs, contents, digests = zip(*_hashed(cell, seeds, manifest.files, store), strict=True)
            board.records[task, slug, method] = dict(zip(seeds, contents, strict=True))
            struck, was_repeated = word.struck, word.tier is not None
            adopted, cleared = order.get(slug, len(order)), word.cleared.get(f"{task}/{method}", {})
            said = [slug, method, struck, was_repeated, adopted, cleared]
            said.append(list(zip(seeds, digests, strict=True)))
            found = Cell(slug, method, runs, struck, was_repeated, adopted, cleared)
            cells.setdefault(task, []).append((found, json.dumps(said)))
    return _jobs("task", cells)


def _refuse_unknown_flags(status: Path, words: Mapping[str, layout.Word], board: Board) -> None:
    """Refuses words that clear what there is not: they would clear nothing, and nobody would notice."""
    entries = {(slug, f"{task}/{method}") for task, slug, method in board.records}
    for slug, word in words.items():
        for entry, cleared in word.cleared.items() if slug in board.submissions else ():
            if (slug, entry) not in entries:
                raise UsageError(f"{status}: {slug} has no entry {one_line(entry, 120)}")
            if unknown := sorted(cleared.keys() - set(SCREENS)):
                known = ", ".join(SCREENS)
                raise UsageError(f"{status}: there is no screen {one_line(unknown[0], 40)}: {known}")


def _jobs(kind: str, cells: Mapping[str, Sequence[tuple[Cell, str]]]) -> list[TaskCells]:
    jobs = []
    for task, of_task in sorted(cells.items()):
        digest = hashlib.sha256("\n".join([task, *(said for _, said in of_task)]).encode()).hexdigest()
        jobs.append(TaskCells(kind, task, tuple(cell for cell, _ in of_task), digest))
    return jobs


def _recorded(board: Board, records: Path) -> list[TaskCells]:
    """Jobs for the runs that the project keeps as evidence, of which the records alone are read."""
    cells: dict[str, list[tuple[Cell, str]]] = {}
    for task, method, seeds in _cells(records):
        paths = {seed: f"{records}/{task}/{method}/seed{seed}/record.json" for seed in seeds}
        contents = {seed: _content(path) for seed, path in paths.items()}
        files = tuple(RunFiles(seed, path, None, None) for seed, path in paths.items())
        said = json.dumps([method, [(seed, _digest(content)) for seed, content in contents.items()]])
        cells.setdefault(task, []).append((Cell(layout.OURS, method, files), said))
        board.recorded_files[task, method] = contents
    return _jobs("records", cells)


def _cells(submission: Path) -> Iterator[tuple[str, str, list[int]]]:
    """Task, method and seeds of every cell of a submission whose names are allowed."""
    for task in _inside(submission):
        for method in _inside(submission / task):
            if layout.NAME.fullmatch(task) and layout.NAME.fullmatch(method):
                seeds = [layout.seed_of(Path(name)) for name in _inside(submission / task / method)]
                if found := sorted(seed for seed in seeds if seed >= 0):
                    yield task, method, found


def _hashed(
    cell: str, seeds: Iterable[int], digests: Mapping[str, str], store: Path
) -> Iterator[tuple[RunFiles, bytes | None, str]]:
    """Of each run its files, the content of its record, and a digest of it as it lies here.

    Strings are paths here: a board may have 80,000 files. `digests` are those that the manifest names.
    """
    for seed in seeds:
        record, arrays = (f"{cell}/seed{seed}/{name}" for name in ("record.json", "arrays.safetensors"))
        listed = digests.get(_inside_submission(arrays))
        content, at = _content(record), arrays
        found = {"record.json": _digest(content), "arrays.safetensors": _digest(_content(arrays))}
        if found["arrays.safetensors"] is None and listed:
            at = str(stored(listed, store=store) or "")
            found["arrays.safetensors"] = _digest(_content(at))
        wanted = {"record.json": digests.get(_inside_submission(record)), "arrays.safetensors": listed}
        altered = next((name for name, digest in found.items() if digest and digest != wanted[name]), "")
        digest = found["arrays.safetensors"]
        yield RunFiles(seed, record, at if digest else None, digest, altered), content, f"{found} {altered}"


def _inside_submission(path: str) -> str:
    """The path of a run's file as the manifest has it: from the task on."""
    return "/".join(path.rsplit("/", 4)[1:])


def _content(path: str) -> bytes | None:
    """What a file holds; None if there is none."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read()
    except OSError:
        return None


def _digest(content: bytes | None) -> str | None:
    return None if content is None else hashlib.sha256(content).hexdigest()


# ------------------------------------------------------------------------------------------------ computing


def _computed(
    cache: Cache, jobs: Sequence[TaskCells], imports: Sequence[str], workers: int | None
) -> dict[tuple[str, str], tuple[Computed, str]]:
    """Kind and task -> what it came to, from the cache where that has it, and its key.

    A task is kept as soon as it is computed, so a build that is stopped goes on behind it.
    """
    found: dict[tuple[str, str], tuple[Computed, str]] = {}
    missing = []
    for job in jobs:
        key = cache.key(job.kind, job.task, job.digest)
        if (kept := cache.task(key)) is not None:
            found[job.kind, job.task] = kept, key
        else:
            missing.append((job, key))
    with closing(_each([job for job, _ in missing], imports, workers)) as computing:
        for number, computed in computing:
            job, key = missing[number]
            cache.keep_task(key, computed)
            found[job.kind, job.task] = computed, key
    return found


def _each(
    jobs: Sequence[TaskCells], imports: Sequence[str], workers: int | None
) -> Generator[tuple[int, Computed], None, None]:
    """Computes tasks, in processes where that is worth it; gives each with its number when it is done."""
    if not jobs:
        return
    runs = sum(len(cell.runs) for job in jobs for cell in job.cells)
    if workers is None:
        workers = min(len(jobs), os.cpu_count() or 1) if runs >= _WORTH_PROCESSES else 1
    if workers <= 1:
        _prepare(imports)
        yield from ((number, _done(job)) for number, job in enumerate(jobs))
        return
    is_forking = "forkserver" in get_all_start_methods()
    context = get_context("forkserver" if is_forking else "spawn")
    if is_forking:  # torch is imported once, by the server
        context.set_forkserver_preload(["bench.runs.runner"])  # type: ignore[attr-defined]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    others = set(active_children())
    with ProcessPoolExecutor(workers, context, _prepare, (tuple(imports),)) as pool:
        try:
            numbers = {pool.submit(_done, job): number for number, job in enumerate(jobs)}
            for future in as_completed(numbers):
                yield numbers[future], future.result()
        except BaseException:  # whoever stops the build does not wait for tasks that nobody will keep
            pool.shutdown(wait=False, cancel_futures=True)
            for process in set(active_children()) - others:
                process.terminate()
            raise


def _prepare(imports: Sequence[str]) -> None:
    from bench.runs.registry import import_own

    import_own(*imports)


def _done(job: TaskCells) -> Computed:
    return (compute if job.kind == "task" else recorded)(job.task, job.cells)


def _overall(cache: Cache, found: Mapping[tuple[str, str], tuple[Computed, str]]) -> dict[str, Any]:
    """The standing across tasks: rows with their mean score, ranks, group, and the score on every task.

    A row that is not complete has no ranks, and says of how many tasks it has a score.
    """
    standings: dict[str, Standing] = {}
    anchors: dict[str, tuple[str, str]] = {}
    left_out: dict[str, str] = {}
    keys: list[str] = []
    for (kind, task), (computed, key) in sorted(found.items()):
        table = computed.table
        if kind != "task" or not table["is_ranked"]:
            continue
        if computed.standing is None or not (table["baseline"] and table["reference"]):
            left_out[task] = table["problem"] or "the task names no baseline and reference"
            continue
        standings[task] = computed.standing
        keys.append(key)
        anchors[task] = table["baseline"], table["reference"]
    if not standings:
        return {"rows": [], "tasks": [], "left_out": left_out}
    key = cache.key("across", *keys)
    if (kept := cache.read(key)) is not None:
        return kept | {"left_out": kept["left_out"] | left_out}
    whole = across(standings, anchors)
    rows = []
    for place in whole.standing.places:
        cell = place.cell
        scores = {task: _limits(of_task.get(place.name)) for task, of_task in whole.scores.items()}
        rows.append(
            {
                "name": place.name,
                "score": _limits(cell),
                "ranks": list(place.ranks) if place.ranks else None,
                "group": place.group,
                "why": place.why,
                "scores": scores,
            }
        )
    unscaled = dict(whole.left_out)
    made = {"rows": rows, "tasks": sorted(whole.scores), "left_out": unscaled}
    cache.write(key, made)
    return made | {"left_out": unscaled | left_out}


def _limits(interval: Interval | None) -> list[float | None]:
    if interval is None:
        return [None, None, None]
    return [float(x) if np.isfinite(x) else None for x in interval[:3]]
