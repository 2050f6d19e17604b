"""Where the arrays of submissions live: each once, under the hash of its bytes.

A run's arrays lie beside its record, or in `store/<first two>/<sha256>.safetensors`, or at a place that
`store.toml` names, any URL of fsspec (`file://`, `s3://`, `hf://`), under the same path. A submission's
manifest holds the hash. Arrays move byte for byte, and nothing takes its name before its bytes are known to
be right.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem

from bench.errors import BenchError, UsageError
from bench.leaderboard.evidence import submission
from bench.leaderboard.evidence.submission import MANIFEST, SUBMISSIONS
from bench.system.files import write
from bench.text import one_line

STORE = Path(__file__).parent.parent / "store"
"""The store of this project."""
PLACES = Path(__file__).parent.parent / "store.toml"
"""Further places."""
ARRAYS = "arrays.safetensors"

Tell = Callable[[int, int], None]
"""Called with the number of arrays that are done, and of all."""


def sha256(content: bytes) -> str:
    """The name of some bytes."""
    return hashlib.sha256(content).hexdigest()


def name_of(digest: str) -> str:
    """Path of an object inside a store."""
    return f"{digest[:2]}/{digest}.safetensors"


def run_arrays(run: Path, store: Path = STORE) -> Path | None:
    """The arrays of a committed or handed-in run: beside its record, else in the store; None if neither.

    Args:
        run: Directory of the run.
        store: The folder of the store.
    """
    if (beside := run / ARRAYS).exists():
        return beside
    root = run.parents[2]
    digest = _files(root).get(f"{run.relative_to(root).as_posix()}/{ARRAYS}")
    if digest is None or not (path := store / name_of(digest)).exists():
        return None
    return path


def _files(root: Path) -> dict[str, str]:
    """The files that the manifest of a submission names; none where there is no manifest."""
    try:
        return _manifest(root, (root / MANIFEST).stat().st_mtime_ns)
    except FileNotFoundError:
        return {}


@cache
def _manifest(root: Path, changed: int) -> dict[str, str]:
    return submission.read(root).files


def named(submissions: Path = SUBMISSIONS) -> dict[str, list[Path]]:
    """What submissions name: hash -> where the arrays would lie beside their records."""
    found: dict[str, list[Path]] = {}
    for manifest in sorted(submissions.glob(f"*/{MANIFEST}")):
        for path, digest in _files(manifest.parent).items():
            if path.endswith(f"/{ARRAYS}"):
                found.setdefault(digest, []).append(manifest.parent / path)
    return dict(sorted(found.items()))


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
class Object:
    """An array that submissions name.

    Attributes:
        digest: SHA-256 of its bytes.
        where: The files and URLs that hold it, those at hand first; of further places the first that does.
        damaged: The files and URLs whose bytes are others.
    """

    digest: str
    where: tuple[str, ...]
    damaged: tuple[str, ...]


def check(submissions: Path = SUBMISSIONS, store: Path = STORE, urls: Sequence[str] = ()) -> Iterator[Object]:
    """Reads every array that a submission names, at hand or, where it is not, from the further places.

    Raises:
        BenchError: If a place cannot be reached.
    """
    for digest, beside in named(submissions).items():
        right: list[str] = []
        wrong: list[str] = []
        for path in (*beside, store / name_of(digest)):
            if path.exists():
                (right if sha256(path.read_bytes()) == digest else wrong).append(str(path))
        for url in urls:
            if not right and (content := _fetched(url, digest)) is not None:
                (right if sha256(content) == digest else wrong).append(f"{url.rstrip('/')}/{name_of(digest)}")
        yield Object(digest, tuple(right), tuple(wrong))


def push(
    url: str,
    submissions: Path = SUBMISSIONS,
    store: Path = STORE,
    force: bool = False,
    tell: Tell = lambda done, of: None,
) -> int:
    """Copies the arrays that submissions name and that are at hand to a place; returns how many went.

    What is there already with as many bytes is left as it is.

    Args:
        url: The place.
        submissions: Folder of the submissions.
        store: Folder of the store.
        force: Write again what is there.
        tell: Progress.

    Raises:
        UsageError: If the bytes of an array at hand are not those that its submission names.
        BenchError: If the place cannot be reached or written.
    """
    gone, objects = 0, named(submissions)
    for number, (digest, beside) in enumerate(objects.items(), 1):
        here = next((path for path in (*beside, store / name_of(digest)) if path.exists()), None)
        if here is not None:
            content = here.read_bytes()
            if sha256(content) != digest:
                raise UsageError(f"{here} is damaged: its bytes are not those that its submission names")
            gone += _sent(url, digest, content, force)
        tell(number, len(objects))
    return gone


def pull(
    submissions: Path = SUBMISSIONS,
    store: Path = STORE,
    urls: Sequence[str] = (),
    tell: Tell = lambda done, of: None,
) -> tuple[int, list[str]]:
    """Fetches into the store the arrays that are not at hand.

    What was fetched stays, so a pull that was stopped goes on where it was.

    Returns:
        How many were fetched, and a line for each that was not: it is nowhere, or damaged where it is.

    Raises:
        BenchError: If a place cannot be reached.
    """
    fetched, missing, objects = 0, [], named(submissions)
    for number, (digest, beside) in enumerate(objects.items(), 1):
        path = store / name_of(digest)
        if not any(_is_right(at, digest) for at in (*beside, path)):
            why = "is at none of the places"
            for url in urls:
                content = _fetched(url, digest)
                if content is not None and sha256(content) == digest:
                    write(path, content)
                    fetched += 1
                    break
                if content is not None:
                    why = f"is damaged at {url}"
            else:
                missing.append(f"{digest} of {beside[0].parent} {why}")
        tell(number, len(objects))
    return fetched, missing


def keep(content: bytes, store: Path = STORE) -> Path:
    """Puts the bytes of arrays into the store; returns the file."""
    path = store / name_of(digest := sha256(content))
    if not _is_right(path, digest):
        write(path, content)
    return path


def _is_right(path: Path, digest: str) -> bool:
    return path.exists() and sha256(path.read_bytes()) == digest


# --------------------------------------------------------------------------------------------- further places


def _at(url: str, digest: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """The file system of a place, and an object's path there."""
    try:
        system, root = fsspec.core.url_to_fs(url)
    except ImportError as error:
        extra = ": pip install 'posterior-bench[s3]'" if url.startswith("s3:") else ""
        raise UsageError(f"{url} cannot be reached: {one_line(error)}{extra}") from None
    except ValueError as error:
        raise UsageError(f"{url} is no place: {one_line(error)}") from None
    return system, f"{root.rstrip('/')}/{name_of(digest)}"


def _fetched(url: str, digest: str) -> bytes | None:
    """The bytes of an object at a place; None if it is not there."""
    system, path = _at(url, digest)
    try:
        content: bytes = system.cat_file(path)
    except FileNotFoundError:
        return None
    except Exception as error:  # every file system has errors of its own
        raise BenchError(f"cannot read {url}: {one_line(error)}") from None
    return content


def _sent(url: str, digest: str, content: bytes, force: bool) -> bool:
    """Writes an object to a place, in one step; whether it was not there."""
    system, path = _at(url, digest)
    try:
        if not force and system.exists(path) and system.size(path) == len(content):
            return False
        if isinstance(system, LocalFileSystem):
            write(Path(path), content)  # others show an object when all of it is there
        else:
            system.pipe_file(path, content)
    except BenchError:
        raise
    except Exception as error:
        raise BenchError(f"cannot write {url}: {one_line(error)}") from None
    return True
