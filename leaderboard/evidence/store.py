"""The one door to the arrays and curves of committed runs: each is known by the SHA-256 of its bytes.

A file of a run lies beside its record while it is new, or in `store/` where a submission was adopted. After
`bench store commit` it is in the history of the repository (`history.py`), and the manifest says under which
name (`manifest.py`). What is read comes from the user's cache, into which the history gives it, or a further
place (`moving.py`). Nothing takes its name before its bytes are known to be right.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from bench.errors import UsageError
from bench.leaderboard.evidence import history, manifest, submission
from bench.leaderboard.evidence.manifest import ROOT
from bench.leaderboard.evidence.submission import MANIFEST
from bench.system import places
from bench.system.files import write

STORE = ROOT / "store"
"""Arrays of adopted submissions that are not yet committed."""
ARRAYS, CURVES = "arrays.safetensors", "curves.csv"
_AT_ONCE = 32 * 2**20
"""Bytes that are fetched in one request: what was brought stays, so a pull that is stopped goes on."""

ProgressCallback = Callable[[int, int], None]
"""Called with the number of files that are done, and of all."""


def sha256(content: bytes) -> str:
    """The name of some bytes."""
    return hashlib.sha256(content).hexdigest()


def name_of(digest: str, file: str = ARRAYS) -> str:
    """Path of an object inside a store or the cache; `file` is the name it has beside a record."""
    return f"{digest[:2]}/{digest}{Path(file).suffix}"


def kept(digest: str, file: str = ARRAYS) -> Path:
    """Where an object lies in the user's cache, once it was brought there."""
    return places.CACHE_ROOT / "evidence" / name_of(digest, file)


@dataclass
class Object:
    """A file of evidence, known by its bytes.

    Attributes:
        digest: SHA-256 of its bytes.
        file: Its name beside a record.
        blob: Its name in the history; None if it is not committed.
        length: Its bytes; 0 where no manifest says.
        beside: Where it would lie beside its records.
    """

    digest: str
    file: str
    blob: str | None = None
    length: int = 0
    beside: list[Path] = field(default_factory=list)

    def near(self, root: Path) -> list[Path]:
        """Files in the tree that should be it, where they are there."""
        return [p for p in (*self.beside, root / "store" / name_of(self.digest, self.file)) if p.exists()]


def named(root: Path = ROOT, tasks: Collection[str] = ()) -> dict[str, Object]:
    """What manifests and submissions name, by digest in its order.

    Args:
        root: Folder with submissions/ and manifests/.
        tasks: Identities of tasks, or their names before the first `+`; none are all.

    Raises:
        UsageError: If a task has no evidence.
    """
    found: dict[str, Object] = {}
    known = set()

    def add(digest: str, path: str, blob: str | None = None, length: int = 0) -> None:
        *_, task, _, _, file = path.split("/")
        known.add(task)
        if tasks and task not in tasks and task.split("+")[0] not in tasks:
            return
        known.update((task, task.split("+")[0]))
        entry = found.setdefault(digest, Object(digest, file))
        entry.blob, entry.length = entry.blob or blob, entry.length or length
        if (at := root / path) not in entry.beside:
            entry.beside.append(at)

    for line in manifest.read(root).values():
        add(line.digest, line.path, line.blob, line.length)
    for slug in sorted((root / "submissions").glob(f"*/{MANIFEST}")):
        for path, digest in listed(slug.parent).items():
            if path.endswith(f"/{ARRAYS}"):
                add(digest, f"submissions/{slug.parent.name}/{path}")
    if unknown := sorted(set(tasks) - known):
        raise UsageError(f"there is no evidence on {unknown[0]}: bench list tasks names the tasks")
    return dict(sorted(found.items()))


# -------------------------------------------------------------------------------------------------- the door


class NotAtHand(UsageError):
    """A file of evidence is neither here nor in the history of this clone."""


def run_arrays(run: Path, store: Path = STORE) -> Path | None:
    """The arrays of a committed or handed-in run; None if they are not at hand and cannot be brought."""
    return _file(run, ARRAYS, store)


def run_curves(run: Path) -> Path | None:
    """The curves of a committed run; None if it has none, or if they cannot be brought."""
    return _file(run, CURVES, STORE)


def needed(run: Path, file: str = ARRAYS) -> Path:
    """A file of a committed run.

    Raises:
        NotAtHand: If it cannot be brought; in one line, with the way to get it.
    """
    if (path := _file(run, file, STORE)) is None:
        why = bring([run]) or "no manifest names them"
        task = run.parts[-3]
        raise NotAtHand(f"the {Path(file).stem} of {run} are not at hand ({why}): bench store pull {task}")
    return path


def _file(run: Path, file: str, store: Path) -> Path | None:
    """A file of a run: beside its record, in the store, or in the cache, into which the history gives it."""
    if (beside := run / file).exists():
        return beside
    run = run.resolve()
    line = _line(run, file)
    digest = line.digest if line else _listed(run).get(f"{'/'.join(run.parts[-3:])}/{file}")
    if digest is None:
        return None
    if (path := found(digest, file, store)) is None and line is not None:
        from_history([Object(line.digest, file, line.blob, line.length)])
        path = found(digest, file, store)
    return path


def found(digest: str, file: str = ARRAYS, store: Path = STORE) -> Path | None:
    """The object of a digest in the store or the user's cache, a whole one first; None if in neither."""
    at, other = store / name_of(digest, file), kept(digest, file)
    whole = next((path for path in (at, other) if is_right(path, digest)), None)
    return whole or (at if at.exists() else None)


def _line(run: Path, file: str) -> manifest.Line | None:
    """The line of the manifest that stands for a file of a run of this project.

    Of other folders no manifest is read: it would have git work in a repository that may be a stranger's.
    """
    root = manifest.ROOT.resolve()
    if not run.is_relative_to(root):
        return None
    return manifest.read(root).get(f"{run.relative_to(root).as_posix()}/{file}")


def bring(runs: Iterable[Path], progress: ProgressCallback = lambda done, of: None) -> str:
    """Has the arrays and curves of committed runs at hand, as far as the history has them, in few requests.

    Returns:
        Why some could not be brought, in one line; empty if all were.
    """
    objects: dict[str, Object] = {}
    for run in runs:
        for file in (ARRAYS, CURVES):
            line = _line(run.resolve(), file)
            if line is not None and not (run / file).exists():
                objects[line.digest] = Object(line.digest, file, line.blob, line.length)
    missing, why = from_history(list(objects.values()), progress=progress)
    return (why or "the history of this clone does not hold them") if missing else ""


def from_history(
    objects: Sequence[Object], root: Path | None = None, progress: ProgressCallback = lambda done, of: None
) -> tuple[list[Object], str]:
    """Brings objects from the history of a folder's repository into the cache.

    Returns:
        Those that it does not have, and why.
    """
    folder = root or manifest.ROOT
    missing: list[Object] = []
    wanted, done, why = [], 0, ""
    for entry in objects:
        if is_right(kept(entry.digest, entry.file), entry.digest):
            done += 1
        elif entry.blob is None:
            missing.append(entry)
        else:
            wanted.append(entry)
    progress(done, len(objects))
    for part in parts(wanted):
        why = why or history.fetch(folder, [entry.blob for entry in part if entry.blob])
        for entry, (_, content) in zip(
            part, history.contents(folder, [entry.blob or "" for entry in part]), strict=True
        ):
            if content is None or sha256(content) != entry.digest:
                missing.append(entry)
            else:
                write(kept(entry.digest, entry.file), content)
            progress(done := done + 1, len(objects))
    return missing, why


def parts(objects: Sequence[Object]) -> Iterator[list[Object]]:
    """The objects in order, in parts of about as many bytes as are fetched at once."""
    part: list[Object] = []
    size = 0
    for entry in objects:
        part.append(entry)
        size += entry.length
        if size >= _AT_ONCE:
            yield part
            part, size = [], 0
    if part:
        yield part


def _listed(run: Path) -> dict[str, str]:
    """The files that the manifest of a run's submission names; none where there is no manifest."""
    if len(run.parents) < 3:
        return {}
    return listed(run.parents[2])


def listed(submission: Path) -> dict[str, str]:
    """The files that the manifest of a submission names; none where there is no manifest."""
    try:
        return _submission(submission, (submission / MANIFEST).stat().st_mtime_ns)
    except (FileNotFoundError, NotADirectoryError):
        return {}


@cache
def _submission(root: Path, changed: int) -> dict[str, str]:
    return submission.read(root).files


def keep(content: bytes, store: Path = STORE) -> Path:
    """Puts the bytes of arrays into the store; returns the file."""
    path = store / name_of(digest := sha256(content))
    if not is_right(path, digest):
        write(path, content)
    return path


def is_right(path: Path, digest: str) -> bool:
    """Whether a file is there, and has the bytes of this digest."""
    try:
        return sha256(path.read_bytes()) == digest
    except OSError:
        return False
