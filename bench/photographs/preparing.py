"""Preparing photographs of the fundus: every one square and of one size, in one memory map.

`prepare` reads a source's folder (`bench/photographs/sources.py`), makes every photograph square and of one
size (`bench/photographs/preprocessing.py`) and appends its pixels to `images.u8`, then a line to
`unfinished.jsonl`. Lines follow the pixels onto the disk, so a process that is killed loses the work of
FLUSHED_EVERY seconds at most. `index.json` is written last, in one step (`bench/photographs/photographs.py`
says what it holds).

Order and bytes depend neither on the number of workers nor on interruptions. Workers are threads: Pillow,
NumPy and SciPy do their work outside of Python's lock, and threads end with their process, however it ends.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO, get_args

from PIL import Image

from bench.errors import DataError, OutputError, UsageError
from bench.photographs import decoding, preprocessing
from bench.photographs.photographs import (
    INDEX,
    PIXELS,
    SCHEMA,
    UNFINISHED,
    Photographs,
    folder_of,
    opened,
    read_index,
    sealed,
    some,
)
from bench.photographs.preprocessing import Way
from bench.photographs.sources import SOURCES, Eye, Listing, PhotographSource
from bench.system import places
from bench.system.files import locked, write

FLUSHED_EVERY = 2.0
LARGEST = 4096
"""Largest side in pixels."""

ProgressCallback = Callable[[int, int], None]
"""Takes how many photographs are done, and of how many; first of all how many an earlier start had done."""


def prepare(
    name: str,
    source: Path | str,
    data_dir: Path | str | None = None,
    size: int | None = None,
    preprocess: Way = "resize",
    workers: int | None = None,
    progress: ProgressCallback = lambda done, of: None,
    wait: bool = True,
) -> Photographs:
    """Prepare a source's photographs, or go on where an earlier start ended; at once if they are there.

    Photographs that cannot be used are listed in `Photographs.bad` and end nothing.

    Args:
        name: One of SOURCES.
        source: The folder (RetinaMNIST: the file) as downloaded.
        data_dir: Where the prepared folder lies; by default $BENCH_DATA, else ~/.cache/posterior-bench.
        size: Side in pixels; by default the source's own.
        preprocess: See `bench/photographs/preprocessing.py`.
        workers: Threads; by default one per core.
        progress: Is told of progress.
        wait: For another process that prepares the same folder, rather than to raise UsageError.

    Raises:
        UsageError: A bad argument; or the folder holds other photographs, which are not overwritten.
        DataError: The source lacks a file or a column or holds nothing of use, or the disk is full.
        OutputError: The folder cannot be written.
    """
    known = places.known(name, SOURCES, "source of photographs")
    if preprocess not in get_args(Way):
        raise UsageError(f"--preprocess {preprocess}: must be one of {', '.join(get_args(Way))}")
    if workers is not None and workers < 1:
        raise UsageError(f"--workers {workers}: must be 1 or more")
    listing = _listing(known, Path(os.path.expanduser(source)))
    side = known.size or listing.side if size is None else size
    if not preprocessing.SMALLEST <= side <= LARGEST:
        raise UsageError(f"--size {side}: must be from {preprocessing.SMALLEST} to {LARGEST} pixels")
    folder = folder_of(places.roots(data_dir)[0], name, side, preprocess)
    header = {
        "schema": SCHEMA,
        "name": name,
        "size": side,
        "preprocess": preprocess,
        "source": listing.fingerprint,
    }
    if not (folder / INDEX).is_file():
        with _writing(folder, 0):
            folder.mkdir(parents=True, exist_ok=True)
        with locked(folder, wait):
            if not (folder / INDEX).is_file():
                _make(folder, header, listing, workers or os.cpu_count() or 1, progress)
    _refuse_others(folder, header)
    return opened(folder)


def _listing(source: PhotographSource, path: Path) -> Listing:
    """What lies at the path, with at least one photograph that has a label."""
    if not os.path.exists(path):
        raise DataError(f"{path}: no such folder or file; to have one: {source.steps}")
    listing = source.listing(path)
    if not listing.eyes:
        raise DataError(f"{path}: holds no labelled photograph{some(listing.bad)}")
    return listing


def _refuse_others(folder: Path, header: dict[str, Any]) -> None:
    """Refuses a finished folder that was prepared from something else than the header says."""
    index = read_index(folder)
    if differing := [key for key, value in header.items() if index[key] != value]:
        raise UsageError(
            f"{folder} holds photographs prepared from another {' and '.join(differing)}: "
            "delete it, or choose another --data-dir"
        )


def _make(
    folder: Path, header: dict[str, Any], listing: Listing, workers: int, progress: ProgressCallback
) -> None:
    """Makes what is not made yet, then the index."""
    eyes, side = listing.eyes, header["size"]
    made = _made_before(folder, header)
    missing, each = len(eyes) - len(made), side * side * 3
    free = shutil.disk_usage(folder).free
    if missing * each > free:
        raise _full(folder, missing * each, f", {free} are free")
    progress(len(made), len(eyes))
    with (
        _writing(folder, missing * each),
        (folder / PIXELS).open("ab", buffering=0) as pixels,
        (folder / UNFINISHED).open("ab") as journal,
        closing(_pictures(eyes[len(made) :], header, listing.side > 0, workers)) as pictures,
    ):
        pixels.truncate(_bytes(made, side))
        fresh: list[dict[str, str]] = []
        flushed = time.monotonic()
        try:
            for reason, content in pictures:
                _append(pixels, content)
                digest = hashlib.sha256(content).hexdigest()
                fresh.append({"bad": reason} if reason else {"pixels": digest})
                progress(len(made) + len(fresh), len(eyes))
                if time.monotonic() - flushed > FLUSHED_EVERY:
                    _keep(fresh, made, pixels, journal)
                    flushed = time.monotonic()
        finally:
            _keep(fresh, made, pixels, journal)
    good = [(eye, entry["pixels"]) for eye, entry in zip(eyes, made, strict=True) if "bad" not in entry]
    bad = [(eye.name, entry["bad"]) for eye, entry in zip(eyes, made, strict=True) if "bad" in entry]
    if not good:
        raise DataError(f"{folder}: none of {len(eyes)} photographs can be used{some(bad)}")
    index = header | {
        "made_with": {package: version(package) for package in ("numpy", "pillow", "scipy")},
        "names": [eye.name for eye, _ in good],
        "levels": [eye.level for eye, _ in good],
        "patients": [eye.patient for eye, _ in good],
        "parts": [eye.part for eye, _ in good],
        "pixels": [digest for _, digest in good],
        "bad": sorted([*listing.bad, *bad]),
    }
    write(folder / INDEX, sealed(index))
    (folder / UNFINISHED).unlink()


def _made_before(folder: Path, header: dict[str, Any]) -> list[dict[str, str]]:
    """What an earlier start of the same preparation has made, a reason or a digest each; keeps just that."""
    made: list[dict[str, str]] = []
    with suppress(FileNotFoundError, ValueError):
        lines = (folder / UNFINISHED).read_bytes().splitlines(keepends=True)
        if lines and json.loads(lines[0]) == header:
            made = [json.loads(line) for line in lines[1:] if line.endswith(b"\n")]  # the last may be torn
        if (folder / PIXELS).stat().st_size < _bytes(made, header["size"]):
            made = []
    write(folder / UNFINISHED, b"".join(map(_line, [header, *made])))
    return made


def _bytes(made: list[dict[str, str]], side: int) -> int:
    return sum("bad" not in entry for entry in made) * side * side * 3


def _keep(
    fresh: list[dict[str, str]], made: list[dict[str, str]], pixels: BinaryIO, journal: BinaryIO
) -> None:
    """Notes what is newly made, after its pixels are on the disk."""
    os.fsync(pixels.fileno())
    journal.write(b"".join(map(_line, fresh)))
    journal.flush()
    made += fresh
    fresh.clear()


def _line(entry: dict[str, Any]) -> bytes:
    return json.dumps(entry).encode() + b"\n"


def _append(file: BinaryIO, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[file.write(rest) :]


def _pictures(
    eyes: list[Eye], header: dict[str, Any], is_cropped: bool, workers: int
) -> Generator[tuple[str, bytes], None, None]:
    """(reason, pixels) of every eye, in order; one of the two is empty."""
    waiting: deque[Future[tuple[str, bytes]]] = deque()
    with warnings.catch_warnings(), ThreadPoolExecutor(workers) as pool:
        warnings.filterwarnings("ignore", module=r"PIL\.")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            for eye in eyes:
                waiting.append(pool.submit(_picture, eye, header["size"], header["preprocess"], is_cropped))
                if len(waiting) > 4 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def _picture(eye: Eye, size: int, way: Way, is_cropped: bool) -> tuple[str, bytes]:
    try:
        if isinstance(eye.picture, Path):
            picture = preprocessing.decoded(eye.picture, size)
        else:
            picture = Image.fromarray(eye.picture)
    except (decoding.Unusable, PermissionError) as error:
        return getattr(error, "strerror", None) or str(error), b""
    except OSError as error:  # a disk that is gone, not a bad photograph
        raise DataError(
            f"{eye.picture}: cannot be read ({error.strerror}); the same command goes on from here"
        ) from None
    return "", preprocessing.finished(picture, size, way, is_cropped).tobytes()


@contextmanager
def _writing(folder: Path, needed: int) -> Iterator[None]:
    """Turns what the system says of a failed write into one line that names the folder."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", None)):  # Windows has no quota's
            raise _full(folder, needed) from None
        raise OutputError(
            f"cannot write {folder}: {error.strerror or error}; choose another --data-dir"
        ) from None


def _full(folder: Path, needed: int, more: str = "") -> DataError:
    return DataError(
        f"{folder}: the disk is full, {needed} bytes are needed{more}; make room, and the same command goes "
        "on from here, or choose another --data-dir"
    )
