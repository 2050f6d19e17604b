"""`bench store commit`: new evidence goes into the history of the repository and leaves its tree.

Two commits are made. The first holds every new record with its arrays and curves; the second takes the arrays
and curves out again and leaves lines in the manifests. In between a fresh clone is made of the first, and
every file is read from it: nothing leaves the tree that a stranger could not read. A command that was stopped
goes on when it is given again.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.errors import BenchError, UsageError
from bench.leaderboard.evidence import history, manifest
from bench.leaderboard.evidence.manifest import ROOT, Line
from bench.leaderboard.evidence.store import (
    ARRAYS,
    CURVES,
    ProgressCallback,
    kept,
    listed,
    name_of,
    named,
    sha256,
)
from bench.system.files import write, writing
from bench.text import one_line

_FOLDERS = ("records", "submissions", "store")


def in_tree(root: Path = ROOT) -> Iterator[Path]:
    """The files that belong into the history: arrays and curves of runs, and objects of the store.

    In order; the tree of a commit has none of them (`tests/test_store.py`).
    """
    for folder in _FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.name in (ARRAYS, CURVES) or (folder == "store" and path.is_file()):
                yield path


def commit(message: str, root: Path = ROOT, progress: ProgressCallback = lambda done, of: None) -> int:
    """Commits new evidence, and takes its arrays and curves out of the tree; returns how many files left it.

    Args:
        message: Of the first commit: what was run, and why.
        root: Folder of records, submissions, store and manifests.
        progress: Progress.

    Raises:
        UsageError: If the folder is in no repository or in one that lacks objects, other changes are staged,
            or a file of the store is named by no submission.
        BenchError: If git refuses, or a fresh clone does not hold every file; the tree is then as it was.
    """
    root = root.resolve()
    if not history.is_here(root):
        raise UsageError(f"{root} lies in no git repository: evidence is kept in its history")
    if history.lacking(root) is not None:
        raise UsageError("this clone is shallow or without all objects: add evidence from a full clone")
    top = Path(history.git(root, "rev-parse", "--show-toplevel").strip())
    inside = root.relative_to(top).as_posix()
    staged = history.git(root, "diff", "--cached", "--name-only", "-z").split("\0")[:-1]
    if other := next((name for name in staged if not name.startswith(f"{inside}/")), None):
        raise UsageError(f"{other} is staged: commit it first, evidence has commits of its own")
    files = list(in_tree(root))
    lines = _lines(root, files)
    _do(root, "add", "--force", "--", *(name for name in _FOLDERS if (root / name).exists()))
    if history.git(root, "diff", "--cached", "--name-only").strip():
        _do(root, "commit", "--quiet", "--message", message)
    _must_be_in_a_fresh_clone(top, lines, progress)
    for path in files:
        write(kept(sha256(content := path.read_bytes()), path.name), content)
    manifests = manifest.write(_all_lines(root, files, lines), root)
    for path in files:
        with writing(path):
            path.unlink()
    _do(root, "add", "--all", "--", *_FOLDERS[:2], *(["store"] if _is_tracked(root, "store") else []))
    _do(root, "add", "--", *map(str, manifests))
    if history.git(root, "diff", "--cached", "--name-only").strip():
        _do(root, "commit", "--quiet", "--message", f"Out of the tree, into the manifest: {message}")
    return len(files)


def _lines(root: Path, files: list[Path]) -> list[Line]:
    """The lines of the manifest for files of the tree."""
    by_digest = named(root)
    found = []
    for path in files:
        content = path.read_bytes()
        digest = sha256(content)
        if path.is_relative_to(root / "store"):
            if digest not in by_digest or path != root / "store" / name_of(digest):
                raise UsageError(f"{path} is named by no submission: remove it, or add its submission")
            places = [at.relative_to(root).as_posix() for at in by_digest[digest].beside]
        else:
            places = [path.relative_to(root).as_posix()]
        blob = history.blob_of(content)
        found += [Line(digest, len(content), blob, place) for place in places]
    return found


def _all_lines(root: Path, files: list[Path], new: list[Line]) -> list[Line]:
    """New lines, and those of other runs that are still there; a run that was replaced loses all it had.

    A run is replaced if a file of it lies in the tree, or if a new line gives one of its files another
    digest. A run whose arrays equal those of a new one is not: it only shares their object. What a submission
    shares with another run gets a line of its own, so that it stays when the other goes. A file that its
    submission names no more has none: a run may be replaced by one that diverged, which has no arrays.
    """
    old = manifest.read(root)
    beside_their_record = [path.parent for path in files if not path.is_relative_to(root / "store")]
    replaced = {run.relative_to(root).as_posix() for run in beside_their_record}
    replaced |= {_run(line) for line in new if line.path in old and old[line.path].digest != line.digest}
    lines = {line.path: line for line in new}
    for path, line in old.items():
        if _run(line) not in replaced and _has_still(path, root):
            lines.setdefault(path, line)
    held = {line.digest: line for line in [*old.values(), *new]}
    for entry in named(root).values():
        for path in (at.relative_to(root).as_posix() for at in entry.beside):
            if entry.digest in held and path.startswith("submissions/") and _has_still(path, root):
                lines.setdefault(path, held[entry.digest]._replace(path=path))
    return list(lines.values())


def _run(line: Line) -> str:
    return line.path.rpartition("/")[0]


def _has_still(path: str, root: Path) -> bool:
    """Whether the run of a file is there and, if it lies in a submission, has the file still."""
    folder, slug, name = path.split("/", 2)
    if not (root / path).with_name("record.json").exists():
        return False
    return folder != "submissions" or name in listed(root / folder / slug)


def _is_tracked(root: Path, name: str) -> bool:
    return bool(history.git(root, "ls-files", "--", name).strip())


def _must_be_in_a_fresh_clone(top: Path, lines: list[Line], progress: ProgressCallback) -> None:
    """Reads every file from a new clone of the repository.

    Raises:
        BenchError: If one is not there, or not byte for byte.
    """
    blobs = {line.blob: line.digest for line in lines}
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "clone"
        _do(top, "clone", "--quiet", "--no-local", "--bare", "--single-branch", str(top), str(clone))
        for number, (blob, content) in enumerate(history.contents(clone, list(blobs)), 1):
            if content is None or sha256(content) != blobs[blob]:
                path = next(line.path for line in lines if line.blob == blob)
                raise BenchError(f"a fresh clone does not hold {path}: nothing was taken out of the tree")
            progress(number, len(blobs))


def _do(folder: Path, *arguments: str) -> None:
    try:
        history.git(folder, *arguments)
    except subprocess.CalledProcessError as error:
        said = (error.stderr or b"").decode(errors="replace").strip() or "no reason was given"
        raise BenchError(f"git {arguments[0]}: {one_line(said)}") from None
