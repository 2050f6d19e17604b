"""The board as one plain data structure, computed from submissions; pages only show it.

A submission is read as it lies: its manifest, and for each run the record and the arrays, beside it or in the
store. Nothing that a stranger wrote ends the build: what cannot be read is an entry with a reason, or a line
among the problems. What a task came to is kept in a cache under a digest of every file that it was computed
from and of the source that computed it, so a second build computes nothing, and imports no torch.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from multiprocessing import get_all_start_methods, get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pydantic

from bench import places
from bench.errors import OutputError, UsageError
from bench.files import write
from bench.intervals import Interval
from bench.leaderboard import submission as layout
from bench.leaderboard.contrasts import Evidence
from bench.leaderboard.pairing import Pair
from bench.leaderboard.ranking import Place, Standing, across
from bench.leaderboard.standings import Cell, Computed, RunFiles, Table, cleaned, compute
from bench.source import source_hash
from bench.text import hidden, one_line

STORE = Path(__file__).parent / "store"
"""Arrays of submissions, by the SHA-256 of their files."""
STATUS = Path(__file__).parent / "status.toml"
"""What maintainers say of submissions."""
_LARGEST_MANIFEST = 64 * 2**20
_WORTH_PROCESSES = 300
"""Runs to score below which starting processes takes longer than they save."""


class Word(pydantic.BaseModel):
    """What maintainers say of a submission, in `status.toml` under its slug.

    Attributes:
        tier: "re-run" where they ran it again themselves and found the same.
        withdrawn: Why it was withdrawn; its entries stay, struck out.
        superseded_by: Slug of the submission that takes its place.
    """

    model_config = pydantic.ConfigDict(strict=True, extra="forbid", frozen=True)

    tier: str | None = pydantic.Field(default=None, pattern="^re-run$")
    withdrawn: str | None = pydantic.Field(default=None, min_length=1, max_length=300)
    superseded_by: str | None = pydantic.Field(default=None, pattern=r"^[a-z0-9-]{1,64}$")

    @property
    def struck(self) -> str:
        """Why entries are out of the ranking; empty if they are in it."""
        if self.withdrawn:
            return f"withdrawn: {self.withdrawn}"
        return f"superseded: by {self.superseded_by}" if self.superseded_by else ""


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
        records: Files of the records of each cell: (task, slug, method) -> paths, in order of the seeds.
    """

    tables: dict[str, Table] = field(default_factory=dict)
    pairs: dict[str, list[Pair]] = field(default_factory=dict)
    figures: dict[str, dict[str, str]] = field(default_factory=dict)
    standings: dict[str, Standing] = field(default_factory=dict)
    labels: dict[str, np.ndarray] = field(default_factory=dict)
    overall: dict[str, Any] = field(default_factory=dict)
    submissions: dict[str, dict[str, Any]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    records: dict[tuple[str, str, str], list[Path]] = field(default_factory=dict)

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
    status: Path = STATUS,
    store: Path = STORE,
    imports: Sequence[str] = (),
    workers: int | None = None,
) -> Board:
    """Computes the board.

    Args:
        submissions: Their folder.
        cache: Folder for what was computed; None is the user's.
        status: File of the maintainers' words; need not be there.
        store: Folder of arrays by digest.
        imports: Own tasks, as `package.module:Class`.
        workers: Processes; None takes one for each processor where there is enough to do.

    Raises:
        UsageError: If there is no such folder, or the maintainers' file is wrong.
    """
    if not submissions.is_dir():
        raise UsageError(f"{submissions} is no folder of submissions")
    board, words = Board(), _words(status)
    if unknown := sorted(words.keys() - {path.name for path in _inside(submissions)}):
        raise UsageError(f"{status} names {unknown[0]}, of which there is no submission in {submissions}")
    jobs = _gathered(board, submissions, store, words)
    kept = _Cache(_folder(cache, submissions), imports)
    found = _computed(kept, jobs, imports, workers)
    for task, (computed, _) in sorted(found.items()):
        board.tables[task], board.pairs[task], board.figures[task] = computed[:3]
        if computed.standing is not None:
            board.standings[task] = computed.standing
        if computed.labels is not None:
            board.labels[task] = computed.labels
    board.overall = _overall(kept, found)
    kept.forget_others()
    return board


# ---------------------------------------------------------------------------------------------- what there is


class Job(NamedTuple):
    """A task with its cells, and a digest of all their files and of what is said of them."""

    task: str
    cells: tuple[Cell, ...]
    digest: str


def _words(status: Path) -> dict[str, Word]:
    try:
        content = tomllib.loads(status.read_text())
        return {slug: Word.model_validate(word) for slug, word in content.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UsageError(f"{status}: {one_line(error)}") from None


def _inside(folder: Path) -> list[Path]:
    """Directories of a folder that no link leads to, in order of their names."""
    with suppress(OSError):
        found = [Path(entry) for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
        return sorted(path for path in found if not path.name.startswith("."))
    return []


def _manifest(directory: Path) -> layout.Submission:
    """The manifest of a submission.

    Raises:
        UsageError: If there is none that can be believed; one line.
    """
    path = directory / layout.MANIFEST
    try:
        if path.stat().st_size > _LARGEST_MANIFEST:
            raise ValueError("it is too large")
        manifest = layout.Submission.model_validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{directory.name}: {layout.MANIFEST} cannot be read: {one_line(error, 120)}"
        ) from None
    if manifest.slug != directory.name:
        raise UsageError(f"{directory.name}: {layout.MANIFEST} is of the slug {manifest.slug}")
    if next(hidden(manifest.model_dump(exclude={"files"})), None) is not None:
        raise UsageError(f"{directory.name}: {layout.MANIFEST} holds characters that are never shown")
    return manifest


def _gathered(board: Board, submissions: Path, store: Path, words: Mapping[str, Word]) -> list[Job]:
    """Puts manifests and problems on the board; returns a job for every task."""
    cells: dict[str, list[tuple[Cell, str]]] = {}
    for directory in _inside(submissions):
        slug = directory.name
        try:
            if not layout.SLUG.fullmatch(slug):
                raise UsageError(f"{one_line(slug, 80)}: a slug holds a-z, 0-9 and hyphens")
            manifest = _manifest(directory)
        except UsageError as error:
            board.problems.append(str(error))
            continue
        word = words.get(slug, Word())
        described = manifest.model_dump(exclude={"files"}) | {"word": word.model_dump()}
        board.submissions[slug] = cleaned(described)
        for task, method, runs in _cells(directory):
            files = _hashed(directory, runs, manifest.files, store)
            struck, was_repeated = word.struck, word.tier is not None
            cell = Cell(slug, method, tuple(run for run, _ in files), struck, was_repeated)
            board.records[task, slug, method] = [run.record for run, _ in files]
            said = [slug, method, struck, was_repeated, [digest for _, digest in files]]
            cells.setdefault(task, []).append((cell, json.dumps(said)))
    jobs = []
    for task, of_task in sorted(cells.items()):
        digest = hashlib.sha256("\n".join([task, *(said for _, said in of_task)]).encode()).hexdigest()
        jobs.append(Job(task, tuple(cell for cell, _ in of_task), digest))
    return jobs


def _cells(submission: Path) -> Iterator[tuple[str, str, list[Path]]]:
    """Task, method and directories of runs, of every cell of a submission whose names are allowed."""
    for task in _inside(submission):
        for method in _inside(task):
            if not (layout.NAME.fullmatch(task.name) and layout.NAME.fullmatch(method.name)):
                continue
            runs = [run for run in _inside(method) if layout.seed_of(run) >= 0]
            if runs:
                yield task.name, method.name, sorted(runs, key=layout.seed_of)


def _hashed(
    submission: Path, runs: Iterable[Path], files: Mapping[str, str], store: Path
) -> list[tuple[RunFiles, str]]:
    """The files of runs, and a digest of each run as it lies here."""
    found = []
    for run in runs:
        name = run.relative_to(submission).as_posix()
        record, arrays = run / "record.json", run / "arrays.safetensors"
        wanted = {path.name: files.get(f"{name}/{path.name}") for path in (record, arrays)}
        listed = wanted[arrays.name]
        at: Path | None = arrays
        if not arrays.exists():
            at = store / listed[:2] / f"{listed}.safetensors" if listed else None
        digests = {record.name: _digest(record), arrays.name: _digest(at)}
        altered = next((file for file, is_ in digests.items() if is_ and is_ != wanted[file]), "")
        digest = digests[arrays.name]
        files_of_run = RunFiles(layout.seed_of(run), record, at if digest else None, digest, altered)
        found.append((files_of_run, f"{name} {digests} {altered}"))
    return found


def _digest(path: Path | None) -> str | None:
    """SHA-256 of a regular file; None if there is none."""
    if path is None:
        return None
    try:
        with path.open("rb", buffering=0) as file:
            return hashlib.sha256(file.read()).hexdigest()
    except OSError:
        return None


# ------------------------------------------------------------------------------------------------ computing


def _computed(
    cache: _Cache, jobs: Sequence[Job], imports: Sequence[str], workers: int | None
) -> dict[str, tuple[Computed, str]]:
    """Task -> what it came to, from the cache where that has it, and its key."""
    found: dict[str, tuple[Computed, str]] = {}
    missing = []
    for job in jobs:
        key = cache.key("task", job.task, job.digest)
        if (kept := cache.task(key)) is not None:
            found[job.task] = kept, key
        else:
            missing.append((job, key))
    for (job, key), computed in zip(
        missing, _all([job for job, _ in missing], imports, workers), strict=True
    ):
        cache.keep_task(key, computed)
        found[job.task] = computed, key
    return found


def _all(jobs: Sequence[Job], imports: Sequence[str], workers: int | None) -> Iterable[Computed]:
    """Computes tasks, in processes of their own where that is worth it."""
    if not jobs:
        return []
    runs = sum(len(cell.runs) for job in jobs for cell in job.cells)
    if workers is None:
        workers = min(len(jobs), os.cpu_count() or 1) if runs >= _WORTH_PROCESSES else 1
    if workers <= 1:
        _prepare(imports)
        return [compute(job.task, job.cells) for job in jobs]
    is_forking = "forkserver" in get_all_start_methods()
    context = get_context("forkserver" if is_forking else "spawn")
    if is_forking:  # torch is imported once, by the server
        context.set_forkserver_preload(["bench.runner"])  # type: ignore[attr-defined]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with ProcessPoolExecutor(workers, context, _prepare, (tuple(imports),)) as pool:
        return list(pool.map(_job, jobs))


def _prepare(imports: Sequence[str]) -> None:
    from bench.registry import import_own

    import_own(*imports)


def _job(job: Job) -> Computed:
    return compute(job.task, job.cells)


def _overall(cache: _Cache, found: Mapping[str, tuple[Computed, str]]) -> dict[str, Any]:
    """The standing across tasks: rows with their mean score, ranks, group, and the score on every task.

    A row that is not complete has no ranks, and says of how many tasks it has a score.
    """
    standings, anchors, left_out, keys = {}, {}, {}, []
    for task, (computed, key) in sorted(found.items()):
        table = computed.table
        if not table["is_ranked"]:
            continue
        if computed.standing is None or not (table["baseline"] and table["reference"]):
            left_out[task] = table["problem"] or "the task names no baseline and reference"
            continue
        standings[task], keys = computed.standing, [*keys, key]
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
    made = {"rows": rows, "tasks": sorted(whole.scores), "left_out": dict(whole.left_out)}
    cache.write(key, made)
    return made | {"left_out": made["left_out"] | left_out}


def _limits(interval: Interval | None) -> list[float | None]:
    if interval is None:
        return [None, None, None]
    return [float(x) if np.isfinite(x) else None for x in interval[:3]]


# ------------------------------------------------------------------------------------------------- the cache


def _folder(cache: Path | None, submissions: Path) -> Path:
    own = hashlib.sha256(str(submissions.resolve()).encode()).hexdigest()[:12]
    return (places.CACHE_ROOT / "board" if cache is None else cache) / own


class _Cache:
    """What tasks came to, by a key of all that it depends on. A cache that is damaged costs time alone."""

    def __init__(self, folder: Path, imports: Sequence[str]) -> None:
        self._folder = folder
        self._source = _fingerprint(imports)
        self._used: set[str] = set()

    def key(self, *parts: str) -> str:
        """The name of what depends on these and on the source."""
        return hashlib.sha256("\n".join([self._source, *parts]).encode()).hexdigest()[:40]

    def read(self, key: str) -> Any:
        """What was kept; None if nothing was."""
        self._used.add(f"{key}.json")
        try:
            content = json.loads((self._folder / f"{key}.json").read_bytes())
            text = json.dumps(content["found"])
            return content["found"] if content["seal"] == hashlib.sha256(text.encode()).hexdigest() else None
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def write(self, key: str, found: Any) -> None:
        """Keeps it; a cache that cannot be written is none."""
        seal = hashlib.sha256(json.dumps(found).encode()).hexdigest()
        with suppress(OutputError):
            write(self._folder / f"{key}.json", json.dumps({"seal": seal, "found": found}).encode())

    def task(self, key: str) -> Computed | None:
        """What a task came to."""
        self._used.add(f"{key}.npz")
        kept = self.read(key)
        if kept is None:
            return None
        standing = labels = None
        if kept["has_standing"]:
            try:
                with np.load(self._folder / f"{key}.npz", allow_pickle=False) as arrays:
                    standing = _standing(kept["table"], arrays)
                    labels = arrays.get("labels")
            except (OSError, ValueError, KeyError, EOFError):
                return None
        return Computed(kept["table"], kept["pairs"], kept["figures"], standing, labels)

    def keep_task(self, key: str, computed: Computed) -> None:
        """Keeps what a task came to."""
        standing = computed.standing
        if standing is not None and standing.evidence is not None:
            evidence = standing.evidence
            arrays = {name: getattr(evidence, name) for name in _EVIDENCE}
            if computed.labels is not None:
                arrays["labels"] = computed.labels
            content = io.BytesIO()
            np.savez(content, low=standing.low, high=standing.high, names=np.array(evidence.names), **arrays)
            with suppress(OutputError):
                write(self._folder / f"{key}.npz", content.getvalue())
        kept = {"table": computed.table, "pairs": computed.pairs, "figures": computed.figures}
        kept["has_standing"] = standing is not None
        self.write(key, kept)

    def forget_others(self) -> None:
        """Removes what this build did not use."""
        with suppress(OSError):
            for entry in os.scandir(self._folder):
                if entry.name not in self._used:
                    os.unlink(entry.path)


_EVIDENCE = ("means", "seeds", "freedom", "noise", "paired", "share")


def _standing(table: Table, arrays: Mapping[str, np.ndarray]) -> Standing:
    """A standing as it was before it was kept."""
    evidence = Evidence(
        tuple(map(str, arrays["names"])),
        *(arrays[name] for name in _EVIDENCE[:-1]),
        share=float(arrays["share"]),
    )
    places = []
    for row in table["entries"]:
        cell = None
        if row["mean"] is not None:
            low, high = (np.nan if x is None else x for x in (row["low"], row["high"]))
            cell = Interval(row["mean"], low, high, row["basis"])
        ranks = (row["ranks"][0], row["ranks"][1]) if row["ranks"] else None
        places.append(Place(row["name"], cell, ranks, row["group"], row["why"]))
    return Standing(tuple(places), arrays["low"], arrays["high"], evidence)


def _fingerprint(imports: Sequence[str]) -> str:
    """A digest of all that computes: source of suite, board and own tasks, versions of libraries."""
    sha = hashlib.sha256(source_hash().encode())
    own = [spec.origin for name in imports if (spec := importlib.util.find_spec(name.partition(":")[0]))]
    folder = Path(__file__).parent
    for path in [*sorted(folder.glob("*.py")), *(Path(origin) for origin in own if origin)]:
        sha.update(f"{path.name}\0".encode() + path.read_bytes() + b"\0")
    for library in ("numpy", "scipy", "torch", "altair", "vl-convert-python"):
        sha.update(f"{library} {version(library)}\0".encode())
    return sha.hexdigest()
