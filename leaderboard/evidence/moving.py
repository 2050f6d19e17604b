"""Moving evidence between history, cache and further places: `bench store check`, `pull` and `push`.

The place `git:` is the repository's own history, which comes first. Further places are URLs of fsspec, such
as `file://`, `s3://` or `hf://`; `store.toml` names those of the project. Files move byte for byte.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem

from bench.errors import BenchError, OutputError, UsageError
from bench.leaderboard.evidence import history
from bench.leaderboard.evidence.manifest import ROOT
from bench.leaderboard.evidence.store import (
    Object,
    ProgressCallback,
    from_history,
    is_right,
    kept,
    name_of,
    named,
    parts,
    sha256,
)
from bench.system.files import locked, sweep, write
from bench.text import one_line

PLACES = ROOT / "store.toml"
"""Further places."""
GIT = "git:"
"""The place that is the repository's own history."""


def places(path: Path = PLACES) -> list[str]:
    """The URLs of further places.

    Raises:
        UsageError: If the file is none that names places.
    """
    try:
        known = tomllib.loads(path.read_text())
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {one_line(error)}") from None
    urls = known.pop("places", [])
    if known or not isinstance(urls, list) or not all(isinstance(url, str) and "://" in url for url in urls):
        raise UsageError(f'{path} must say places = ["s3://...", ...] and nothing else')
    return urls


@dataclass(frozen=True)
class Whereabouts:
    """Where an object is.

    Attributes:
        digest: SHA-256 of its bytes.
        where: The files of the tree, the place in the history, and of further places the first that hold it.
        damaged: Those whose bytes are others.
    """

    digest: str
    where: tuple[str, ...]
    damaged: tuple[str, ...]


def check(
    root: Path = ROOT,
    urls: Sequence[str] = (),
    tasks: Collection[str] = (),
    progress: ProgressCallback = lambda done, of: None,
) -> Iterator[Whereabouts]:
    """Reads every file of evidence: in the tree, in the history, or, where it is in neither, elsewhere.

    The user's cache counts for nothing: what lies there alone is lost to everybody else. An object counts as
    in the history if a commit up to HEAD holds it, so that every clone has it; a shallow clone, which cannot
    know, believes its remote.

    Raises:
        BenchError: If a place cannot be reached.
    """
    objects = list(named(root, tasks).values())
    held = {entry.blob for entry in objects if entry.blob}
    if held and not history.is_shallow(root):
        held &= history.reachable(root)
    done = 0
    for part in parts(objects):
        blobs = [entry.blob for entry in part if entry.blob in held]
        if blobs:
            history.fetch(root, blobs)  # type: ignore[arg-type]
        stored = dict(history.contents(root, blobs)) if blobs else {}  # type: ignore[arg-type]
        for entry in part:
            yield _whereabouts(entry, root, stored.get(entry.blob or ""), urls)
            progress(done := done + 1, len(objects))


def _whereabouts(entry: Object, root: Path, stored: bytes | None, urls: Sequence[str]) -> Whereabouts:
    right: list[str] = []
    wrong: list[str] = []
    for path in entry.near(root):
        (right if is_right(path, entry.digest) else wrong).append(str(path))
    if stored is not None:
        (right if sha256(stored) == entry.digest else wrong).append(f"{GIT}{entry.blob}")
    for url in urls:
        if not right and (content := _fetched(url, entry)) is not None:
            at = f"{url.rstrip('/')}/{name_of(entry.digest, entry.file)}"
            (right if sha256(content) == entry.digest else wrong).append(at)
    return Whereabouts(entry.digest, tuple(right), tuple(wrong))


def push(
    url: str,
    root: Path = ROOT,
    force: bool = False,
    tasks: Collection[str] = (),
    progress: ProgressCallback = lambda done, of: None,
) -> int:
    """Copies the files of evidence that are at hand or in the history to a place; returns how many went.

    What is there already with as many bytes is left as it is.

    Args:
        url: The place.
        root: Folder with records, submissions and manifests.
        force: Write again what is there.
        tasks: Of which tasks; none are all.
        progress: Progress.

    Raises:
        UsageError: If the bytes of a file at hand are not those that its submission names.
        BenchError: If the place cannot be reached or written.
    """
    objects = list(named(root, tasks).values())
    gone = done = 0
    with _alone(url):
        for part in parts(objects):
            lacking = [entry for entry in part if not entry.near(root)]
            from_history(lacking, root)
            for entry in part:
                here = next(iter(entry.near(root)), kept(entry.digest, entry.file))
                with suppress(FileNotFoundError):
                    content = here.read_bytes()
                    if sha256(content) != entry.digest:
                        raise UsageError(
                            f"{here} is damaged: its bytes are not those that its submission names"
                        )
                    gone += _sent(url, entry, content, force)
                progress(done := done + 1, len(objects))
    return gone


def pull(
    root: Path = ROOT,
    urls: Sequence[str] = (),
    tasks: Collection[str] = (),
    progress: ProgressCallback = lambda done, of: None,
) -> tuple[int, list[str]]:
    """Fetches into the user's cache what is not at hand: from the history, then from further places.

    What was fetched stays, so a pull that was stopped goes on where it was.

    Returns:
        How many were fetched, and a line for every reason why others were not: they are nowhere, or damaged
        where they are.

    Raises:
        BenchError: If a place cannot be reached.
    """
    lacking = [
        entry
        for entry in named(root, tasks).values()
        if not any(is_right(path, entry.digest) for path in entry.near(root))
        and not is_right(kept(entry.digest, entry.file), entry.digest)
    ]
    absent, why = from_history(lacking, root, progress)
    fetched = len(lacking) - len(absent)
    missing: dict[str, list[Object]] = {}
    for number, entry in enumerate(absent, 1):
        reason = why or "is at none of the places"
        for url in urls:
            content = _fetched(url, entry)
            if content is not None and sha256(content) == entry.digest:
                write(kept(entry.digest, entry.file), content)
                fetched += 1
                break
            if content is not None:
                reason = f"is damaged at {url}"
        else:
            missing.setdefault(reason, []).append(entry)
        progress(len(lacking) - len(absent) + number, len(lacking))
    return fetched, [_told(reason, entries) for reason, entries in missing.items()]


def _told(reason: str, entries: Sequence[Object]) -> str:
    """One line on files that were not fetched for one reason."""
    first = f"{entries[0].digest} of {entries[0].beside[0].parent}"
    return f"{first} {reason}" if len(entries) == 1 else f"{len(entries)} files, such as {first}: {reason}"


# --------------------------------------------------------------------------------------------- further places


def _at(url: str, entry: Object) -> tuple[fsspec.AbstractFileSystem, str]:
    """The file system of a place, and an object's path there."""
    system, root = _system(url)
    return system, f"{root.rstrip('/')}/{name_of(entry.digest, entry.file)}"


def _system(url: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """The file system of a place, and its path there."""
    try:
        system, root = fsspec.core.url_to_fs(url)
    except ImportError as error:
        extra = ": pip install 'posterior-bench[s3]'" if url.startswith("s3:") else ""
        raise UsageError(f"{url} cannot be reached: {one_line(error)}{extra}") from None
    except ValueError as error:
        raise UsageError(f"{url} is no place: {one_line(error)}") from None
    return system, root


@contextmanager
def _alone(url: str) -> Iterator[None]:
    """Keeps other writers out of a place that is a folder, and removes what killed ones have left there."""
    system, path = _system(url)
    if not isinstance(system, LocalFileSystem):
        yield
        return
    with locked(Path(path), wait=True):
        sweep(Path(path))
        yield


def _fetched(url: str, entry: Object) -> bytes | None:
    """The bytes of an object at a place; None if it is not there."""
    system, path = _at(url, entry)
    try:
        content: bytes = system.cat_file(path)
    except FileNotFoundError:
        return None
    except Exception as error:  # every file system has errors of its own
        raise BenchError(f"cannot read {url}: {one_line(error)}") from None
    return content


def _sent(url: str, entry: Object, content: bytes, force: bool) -> bool:
    """Writes an object to a place, in one step; whether it was not there."""
    system, path = _at(url, entry)
    try:
        if not force and system.exists(path) and system.size(path) == len(content):
            return False
        if isinstance(system, LocalFileSystem):
            write(Path(path), content)  # others show an object when all of it is there
        else:
            system.pipe_file(path, content)
    except OutputError:
        raise
    except Exception as error:
        raise BenchError(f"cannot write {url}: {one_line(error)}") from None
    return True
