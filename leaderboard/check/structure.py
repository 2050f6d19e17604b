"""The structure of a submission: files, JSON, records and the headers of arrays. It needs no torch.

`check` walks a directory by lstat and refuses what the layout (`submission.py`) does not have, before a byte
is read. It then reads every file with its limits (`reading.py`) and holds the parts against each other:
manifest, records, seeds, and arrays that are there twice. What the numbers are worth, `scoring.py` asks.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import stat
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final

from bench.leaderboard.check.codes import Rejected
from bench.leaderboard.check.facts import refuse_contradictions, refuse_facts
from bench.leaderboard.check.reading import arrays_of, parsed, read_header, read_record
from bench.leaderboard.evidence import submission as layout
from bench.leaderboard.evidence.store import STORE, found
from bench.leaderboard.evidence.submission import Submission
from bench.runs import registry
from bench.runs.records import Record
from bench.spec import Arrays
from bench.system.source import source_hash

LARGEST: Final = {
    "submission.json": 8 * 2**20,
    "record.json": 2**20,
    "arrays.safetensors": 8 * 2**20,
}
"""Bytes that a file may have at most, by its name."""
LARGEST_IN_ALL: Final = 2**30
MOST_FILES: Final = 20_001
"""Files and directories of a submission, counted together."""
RELEASES: Final = Path(__file__).parent.parent / "releases.toml"


# ---------------------------------------------------------------------------------------------------- files


@dataclass(frozen=True)
class Tree:
    """The files of a directory as lstat found them.

    Attributes:
        root: The directory.
        files: Path inside it -> what lstat said.
    """

    root: Path
    files: dict[str, os.stat_result] = field(default_factory=dict)

    def read(self, name: str) -> bytes:
        """The bytes of a file.

        Raises:
            Rejected: If it cannot be opened, or is not the file that was found.
        """
        return _read(self.root / name, name, self.files[name])


def _read(path: Path, name: str, known: os.stat_result) -> bytes:
    """The bytes of the file that lstat knew, be it that somebody exchanges files meanwhile."""
    try:
        # Neither a link that was put in its place nor a pipe without a writer is waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            same = _signature(os.fstat(descriptor)) == _signature(known)
            content = file.read(known.st_size + 1) if same else b""
    except OSError as error:
        code = "file-unreadable" if isinstance(error, PermissionError) else "file-changed"
        raise Rejected(code, f"{name}: {error.strerror}") from None
    if not same or len(content) != known.st_size:
        raise Rejected("file-changed", f"{name} was exchanged or rewritten while it was checked")
    return content


def _signature(found: os.stat_result) -> tuple[int, ...]:
    return (
        *(found.st_mode, found.st_dev, found.st_ino, found.st_nlink),
        *(found.st_size, found.st_mtime_ns, found.st_ctime_ns),
    )


def tree(root: Path) -> Tree:
    """The files of a submission; nothing is opened.

    Raises:
        Rejected: If a name, kind, place, size or number of files is not as the layout has it.
    """
    try:
        kind = root.lstat().st_mode
    except (OSError, ValueError):
        raise Rejected("no-submission", f"there is no directory {root}") from None
    if stat.S_ISLNK(kind):
        raise Rejected("file-symlink", f"{root} is a symbolic link")
    if not stat.S_ISDIR(kind):
        raise Rejected("no-submission", f"{root} is no directory")
    found = Tree(root)
    count = total = 0
    for name, known in _walk(root, ""):
        count, total = count + 1, total + (known.st_size if stat.S_ISREG(known.st_mode) else 0)
        if count > MOST_FILES:
            raise Rejected("too-many-files", f"more than {MOST_FILES} files and directories")
        if total > LARGEST_IN_ALL:
            raise Rejected("submission-too-large", f"more than {LARGEST_IN_ALL // 2**20} MiB in all")
        if stat.S_ISREG(known.st_mode):
            found.files[name] = known
    if not count:
        raise Rejected("no-submission", f"{root} is empty")
    return found


def taken(root: Path, to: Path) -> Path:
    """A copy of a submission that nobody else can change, below a folder of one's own; returns its directory.

    What is verified and what is adopted is then the same, whatever happens to the original meanwhile.

    Raises:
        Rejected: As `tree` does, and if a file is exchanged while it is copied.
    """
    root = Path(os.path.abspath(root))
    found = tree(root)
    for name in found.files:
        path = to / root.name / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(found.read(name))
    return to / root.name


def _walk(directory: Path, inside: str) -> Iterator[tuple[str, os.stat_result]]:
    """Every file and directory below one, with what lstat says, in no order; each is checked by itself."""
    depth = inside.count("/")
    seen: dict[str, str] = {}
    below = []
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                name = inside + entry.name
                known = entry.stat(follow_symlinks=False)
                _refuse_name(entry.name, name)
                if (twin := seen.setdefault(entry.name.lower(), entry.name)) != entry.name:
                    raise Rejected("name-collision", f"{name} and {twin} differ in nothing but case")
                _refuse_kind(entry.name, name, known, depth)
                yield name, known
                if stat.S_ISDIR(known.st_mode):
                    below.append(entry.name)
    except OSError as error:
        raise Rejected("file-unreadable", f"{inside or directory}: {error.strerror}") from None
    if inside and not seen:
        raise Rejected("file-missing", f"{inside} is empty")
    for part in sorted(below):
        yield from _walk(directory / part, f"{inside}{part}/")


def _refuse_name(name: str, where: str) -> None:
    if name.startswith("."):
        raise Rejected("name-hidden", f"{where} begins with a dot")
    if not layout.NAME.fullmatch(name):
        raise Rejected("name-invalid", f"{where} is not of the form [A-Za-z0-9_+=,.-]{{1,120}}")


def _refuse_kind(name: str, where: str, known: os.stat_result, depth: int) -> None:
    """Refuses links, what is no file, and what lies where the layout has nothing of its kind."""
    allowed = {0: (layout.MANIFEST,), 3: layout.RUN_FILES}.get(depth, ())
    if stat.S_ISLNK(known.st_mode):
        raise Rejected("file-symlink", f"{where} is a symbolic link")
    if stat.S_ISDIR(known.st_mode) and depth < 3 and name not in allowed:
        if depth == 2 and layout.seed_of(Path(name)) < 0:
            raise Rejected("file-unknown", f"{where}: a run's directory is named seed0, seed1 and so on")
        return
    if not stat.S_ISREG(known.st_mode) and (name in allowed or not stat.S_ISDIR(known.st_mode)):
        raise Rejected("file-not-regular", f"{where} is no regular file")
    if name not in allowed:
        raise Rejected(
            "file-unknown",
            f"{where}: a submission holds submission.json and <task>/<method>/seed<k>/ with record.json and "
            "arrays.safetensors, nothing else",
        )
    if known.st_nlink != 1:
        raise Rejected("file-hardlink", f"{where} has {known.st_nlink} names: copy it")
    if known.st_size > LARGEST[name]:
        raise Rejected("file-too-large", f"{where}: {known.st_size} bytes; at most {LARGEST[name]}")


# ----------------------------------------------------------------------------------------------------- runs


@dataclass(frozen=True)
class HandedIn:
    """A run of a submission whose structure stands.

    Attributes:
        name: `<task identity>/<method identity>/seed<k>`.
        record: Its record.
        arrays_file: Its arrays, beside the record or in the store; None if it left none.
        known: What lstat said of them.
    """

    name: str
    record: Record
    arrays_file: Path | None
    known: os.stat_result | None

    @property
    def cell(self) -> str:
        """The task and the method."""
        return self.name.rpartition("/")[0]

    def arrays(self) -> Arrays:
        """The arrays of the run, read again.

        Raises:
            Rejected: If they are not the file that was checked, or there are none.
        """
        where = f"{self.name}/arrays.safetensors"
        if self.arrays_file is None or self.known is None:
            raise Rejected("arrays-missing", f"{where} is not there")
        content = _read(self.arrays_file, where, self.known)
        return arrays_of(content, read_header(content, where))


@dataclass(frozen=True)
class Checked:
    """A submission whose structure stands.

    Attributes:
        submission: Its `submission.json`.
        runs: Its runs, in order of task, method and seed.
        changed: A file whose SHA-256 is not that of `submission.json`; None if every one is. A change may
            have a reason that says more, so the scores are looked at before this is told.
    """

    submission: Submission
    runs: list[HandedIn]
    changed: str | None


def check(directory: Path, against: Path | None = None, store: Path = STORE) -> Checked:
    """Checks the structure of a submission.

    Args:
        directory: The submission; its name is the slug.
        against: Folder of submissions, such as those on the board, whose arrays this one must not have.
        store: Folder of arrays by their SHA-256; it, and after it the user's cache, is looked at where arrays
            are not beside their record.

    Raises:
        Rejected: With the first reason found.
    """
    root = Path(os.path.abspath(directory))
    files = tree(root)
    if layout.MANIFEST not in files.files:
        raise Rejected("file-missing", f"there is no {layout.MANIFEST}")
    submission = parsed(Submission, files.read(layout.MANIFEST), layout.MANIFEST)
    if submission.slug != root.name:
        raise Rejected("slug-differs", f"the slug is {submission.slug}, the directory is {root.name}")
    listed, there = submission.files, files.files.keys() - {layout.MANIFEST}
    if unlisted := min(there - listed.keys(), default=None):
        raise Rejected("file-unlisted", f"{unlisted} is not listed in {layout.MANIFEST}")
    for name in sorted(listed.keys() - there):
        place = name.removesuffix("/arrays.safetensors")
        if place == name or f"{place}/record.json" not in there:
            raise Rejected("file-missing", f"{name} is listed in {layout.MANIFEST} and not there")
    runs: list[HandedIn] = []
    changed: list[str] = []
    for record_name in sorted((name for name in there if name.endswith("/record.json")), key=_order):
        run, differing = _run(files, record_name.removesuffix("/record.json"), submission, store)
        runs.append(run)
        changed += differing
    if lone := min(
        (name for name in there if f"{name.rpartition('/')[0]}/record.json" not in there), default=None
    ):
        raise Rejected("file-missing", f"{lone} has no record.json beside it")
    cells = _refuse_cells(runs)
    refuse_contradictions(submission, ([run.record for run in seeds] for seeds in cells.values()))
    _refuse_summary(submission, runs)
    _refuse_duplicates(runs, _on_board(runs, against, submission.slug))
    return Checked(submission, runs, min(changed, default=None))


def _order(name: str) -> tuple[str, str, int]:
    task, method, seed, _ = name.split("/")
    return task, method, layout.seed_of(Path(seed))


def _run(tree: Tree, name: str, submission: Submission, store: Path) -> tuple[HandedIn, list[str]]:
    """A run, and those of its files whose digests are not as listed."""
    record_name, arrays_name = f"{name}/record.json", f"{name}/arrays.safetensors"
    content = tree.read(record_name)
    record = read_record(content, record_name)
    digests = {record_name: hashlib.sha256(content).hexdigest()}
    _refuse_record(record, name)
    path, known = tree.root / arrays_name, tree.files.get(arrays_name)
    if known is None and (digest := submission.files.get(arrays_name)):
        path = found(digest, store=store) or path
        with suppress(OSError):
            known = path.lstat()
        if known is None or not stat.S_ISREG(known.st_mode) or known.st_size > LARGEST["arrays.safetensors"]:
            raise Rejected("arrays-missing", f"{arrays_name} is neither beside its record nor in the store")
    if (known is None and record.status == "completed") or (known is None) != (
        record.provenance.arrays_digest is None
    ):
        raise Rejected(
            "arrays-missing", f"{name}: a run has arrays and its record names their digest, or neither"
        )
    if known is None:
        return HandedIn(name, record, None, None), _differing(digests, submission.files)
    content = _read(path, arrays_name, known)
    digests[arrays_name] = hashlib.sha256(content).hexdigest()
    read_header(content, arrays_name)
    return HandedIn(name, record, path, known), _differing(digests, submission.files)


def _differing(digests: Mapping[str, str], listed: Mapping[str, str]) -> list[str]:
    return [name for name, digest in digests.items() if listed.get(name) != digest]


@cache
def released() -> frozenset[str]:
    """Source hashes that need no commit: those of releases, and of the suite that checks."""
    return frozenset(tomllib.loads(RELEASES.read_text()).values()) | {source_hash()}


def _refuse_record(record: Record, name: str) -> None:
    """Refuses a record that lies elsewhere than it says, or that is no evidence whatever its arrays are."""
    task, method, seed = name.split("/")
    if layout.run_name(record.task.identity, record.method.identity, 0) != f"{task}/{method}/seed0":
        raise Rejected(
            "run-misplaced", f"{name}: the record is of {record.method.identity} on {record.task.identity}"
        )
    if f"seed{record.seed}" != seed:
        raise Rejected("seed-differs", f"{name}: the record is of seed {record.seed}")
    if record.status == "failed":
        raise Rejected("run-failed", f"{name} failed ({record.reason}): a defect is no result")
    if record.preset not in ("standard", "paper"):
        raise Rejected("run-smoke", f"{name} is of the preset {record.preset}, not standard or paper")
    refuse_facts(record, name)
    made = record.provenance
    if made.commit is None:
        if made.source_hash not in released():
            raise Rejected("run-without-source", f"{name}: no commit, and source that is of no release")
    elif not re.fullmatch(r"[0-9a-f]{40}([0-9a-f]{24})?", made.commit):
        raise Rejected("run-without-source", f"{name}: {made.commit} is no commit")
    elif made.dirty is not False:
        raise Rejected("run-dirty", f"{name} was made from changed source: commit, then run again")
    if record.task.name not in registry.tasks():
        raise Rejected("task-unknown", f"{name}: the suite has no task {record.task.name}")
    if record.task.identity != record.task.name:
        raise Rejected("task-variant", f"{name}: ranked is {record.task.name} under its standard settings")
    if record.status == "diverged" and any(value is not None for value in record.metrics.values()):
        raise Rejected("metric-undefined", f"{name} diverged and has metrics all the same")


def _refuse_cells(runs: Iterable[HandedIn]) -> dict[str, list[HandedIn]]:
    """Refuses gaps between seeds, a task that is posed in two ways, and seeds that were run differently.

    Returns the runs of each cell.
    """
    cells: dict[str, list[HandedIn]] = {}
    posed: dict[str, HandedIn] = {}
    for run in runs:
        cells.setdefault(run.cell, []).append(run)
        first = posed.setdefault(run.record.task.identity, run)
        own, other = run.record.task, first.record.task
        if (own.version, own.data_digest) != (other.version, other.data_digest):
            raise Rejected("runs-mixed", f"{run.name} and {first.name}: other data or version of the task")
    for cell, seeds in cells.items():
        if [run.record.seed for run in seeds] != list(range(len(seeds))):
            given = ", ".join(str(run.record.seed) for run in seeds[:20])
            raise Rejected("seeds-not-contiguous", f"{cell}: seeds {given}; must be 0 to {len(seeds) - 1}")
        for run in seeds[1:]:
            for what, own, other in zip(
                ("method or settings", "version of the suite", "source of the method"),
                *map(_made_of, (run.record, seeds[0].record)),
                strict=True,
            ):
                if own != other:
                    raise Rejected("runs-mixed", f"{run.name}: another {what} than those of seed 0")
    return cells


def _made_of(record: Record) -> tuple[object, ...]:
    """What the seeds of an entry have in common, beside the task."""
    made = record.provenance
    return record.method, made.version, made.method_file_hash


def _refuse_summary(submission: Submission, runs: list[HandedIn]) -> None:
    """Refuses a manifest that says other environments or hours than its records."""
    environments = {run.record.environment.model_dump_json() for run in runs}
    said = [one.model_dump_json() for one in submission.environments]
    if len(said) != len(set(said)) or set(said) != environments:
        raise Rejected("environments-differ", "environments are not those of the records, each once")
    hours = sum(run.record.seconds for run in runs) / 3600
    if not math.isclose(hours, submission.hours, rel_tol=0.01, abs_tol=0.01):
        raise Rejected("hours-differ", f"hours is {submission.hours:g}, the records sum to {hours:.4g}")


# ----------------------------------------------------------------------------------------------- duplicates


def _on_board(runs: Iterable[HandedIn], board: Path | None, slug: str) -> dict[tuple[str, str], str]:
    """(Task identity, digest of arrays) -> the run on the board; of other submissions than this one."""
    found: dict[tuple[str, str], str] = {}
    tasks = {run.record.task.identity for run in runs}
    for other in sorted(board.iterdir()) if board is not None and board.is_dir() else []:
        for task in sorted(tasks) if other.name != slug and other.is_dir() else []:
            for path in sorted((other / task).glob("*/seed*/record.json")):
                with suppress(Rejected, OSError):  # what is on the board is no business of this submission
                    digest = read_record(path.read_bytes(), str(path)).provenance.arrays_digest
                    if digest is not None:
                        found.setdefault((task, digest), "/".join(path.parts[-5:-1]))
    return found


def _refuse_duplicates(runs: Iterable[HandedIn], board: Mapping[tuple[str, str], str]) -> None:
    """Refuses arrays that are there twice; that a record names the digest of its own, `scoring.py` sees."""
    first: dict[tuple[str, str], HandedIn] = {}
    for run in runs:
        if (digest := run.record.provenance.arrays_digest) is None:
            continue
        key = run.record.task.identity, digest
        if key in board:
            raise Rejected(
                "duplicate-entry", f"{run.name} has the arrays of {board[key]}, which is on the board"
            )
        twin = first.setdefault(key, run)
        if twin is run:
            continue
        if twin.cell != run.cell:
            raise Rejected("duplicate-runs", f"{run.name} has the arrays of {twin.name}")
        if run.record.method.seed_matters is not False:
            raise Rejected("duplicate-seeds", f"{run.name} has the arrays of seed {twin.record.seed}")
