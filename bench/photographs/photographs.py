"""Photographs of the fundus, prepared once: a memory map of pixels beside an index.

`prepare` (`bench/photographs/preparing.py`) leaves of a source a folder `<name>-<size>-<preprocess>`:

    images.u8        pixels, uint8 [N, size, size, 3] and nothing else
    index.json       per photograph name, level, patient, part and SHA-256 of its pixels; what was left out
                     and why; the digest; a checksum of the index. Where it stands, the folder is finished
    unfinished.jsonl while it is not: what is done
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np

from bench.errors import DataError
from bench.photographs.preprocessing import Way
from bench.photographs.sources import PARTS, SOURCES
from bench.system import places

SCHEMA = 1
"""Grows with every change of what is written, pixels included."""
PIXELS, INDEX, UNFINISHED = "images.u8", "index.json", "unfinished.jsonl"


@dataclass(frozen=True, eq=False)
class Photographs:
    """A prepared set of labelled photographs, rows in the order train, val, test. Pickled, it is its folder.

    Attributes:
        images: [N, size, size, 3] uint8, a read-only memory map.
        levels: [N] int64, severity 0..4.
        patients: [N] int64, equal for the eyes of one patient.
        parts: [N] of "train", "val", "test"; a patient is in one.
        names: N names.
        digest: SHA-256 over the sorted names, levels, parts and pixels.
        bad: (name, reason) of the photographs that were left out.
        folder: Where it lies.
    """

    images: np.memmap
    levels: np.ndarray
    patients: np.ndarray
    parts: np.ndarray
    names: list[str]
    digest: str
    bad: list[tuple[str, str]]
    folder: Path

    def __reduce__(self) -> tuple[Callable[[Path], Photographs], tuple[Path]]:
        return opened, (self.folder,)


def prepared(name: str, data_dir: Path | str | None, size: int, preprocess: Way = "resize") -> Photographs:
    """Open photographs that `prepare` has made.

    Args:
        name: One of SOURCES.
        data_dir: Folder to look in first.
        size: Side in pixels.
        preprocess: How they were made.

    Raises:
        UsageError: No source has this name.
        DataError: They are not there (the message says every step to get them), or damaged.
    """
    places.known(name, SOURCES, "source of photographs")
    for root in places.roots(data_dir):
        if ((folder := folder_of(root, name, size, preprocess)) / INDEX).is_file():
            return opened(folder)
    raise _missing(name, data_dir, size, preprocess)


# -------------------------------------------------------------------------------- bench data list, get, check


def find(name: str, data_dir: Path | str | None = None) -> str | None:
    """The folders of prepared photographs, finished or not, in one line; None if there is none."""
    return ", ".join(map(str, _finished(name, data_dir))) or _unfinished(name, data_dir) or None


def get(name: str, data_dir: Path | str | None = None) -> str:
    """The folders of prepared photographs.

    Raises:
        DataError: There are none; the message says every step to get them, since none can be downloaded.
    """
    if folders := _finished(name, data_dir):
        return "\n".join(map(str, folders))
    raise _missing(name, data_dir, SOURCES[name].size, "resize")


def check(name: str, data_dir: Path | str | None = None) -> str:
    """Reads every pixel of the prepared photographs, and reports in one line what was found where.

    Raises:
        DataError: There are none, or a byte is not as it was written.
    """
    lines = []
    for folder in _finished(name, data_dir):
        photographs, index = opened(folder), read_index(folder)
        for row, digest in enumerate(index["pixels"]):
            if hashlib.sha256(photographs.images[row].tobytes()).hexdigest() != digest:
                raise _damaged(folder / PIXELS, f"{photographs.names[row]} differs from its checksum")
        if _digest(index) != photographs.digest:
            raise _damaged(folder / INDEX, "the digest is not that of its photographs")
        lines.append(f"{described(photographs)}, sha256 {photographs.digest}, in {folder}")
    if not lines:
        get(name, data_dir)
    return f"{name}: {SOURCES[name].title}, " + "; ".join(lines)


def described(photographs: Photographs) -> str:
    """How many photographs there are of each part, and how many were left out."""
    counts = ", ".join(f"{np.count_nonzero(photographs.parts == part)} {part}" for part in PARTS)
    side, bad = photographs.images.shape[1], len(photographs.bad)
    return f"{counts} photographs of {side} x {side} pixels, {bad} left out{some(photographs.bad)}"


def some(bad: list[tuple[str, str]], shown: int = 3) -> str:
    """The first of those left out, with their reasons, behind a colon."""
    told = [f"{name} ({reason})" for name, reason in bad[:shown]] + ["..."] * (len(bad) > shown)
    return f": {', '.join(told)}" if bad else ""


def folder_of(root: Path, name: str, size: int, preprocess: str) -> Path:
    """Where prepared photographs lie below a data folder."""
    return root / f"{name}-{size}-{preprocess}"


def _missing(name: str, data_dir: Path | str | None, size: int, preprocess: str) -> places.NotFound:
    roots, begun = ", ".join(map(str, places.roots(data_dir))), _unfinished(name, data_dir)
    what = f"{name}, {size} pixels, {preprocess}," if size else name
    sized = f" --size {size}" if size else ""
    return places.NotFound(
        f"{what} is not prepared in {roots}{f' ({begun})' if begun else ''}; {SOURCES[name].steps}; then run "
        f"`bench data prepare {name} --source DIR{sized} --preprocess {preprocess}`"
    )


def _folders(name: str, data_dir: Path | str | None, file: str) -> list[Path]:
    """The prepared folders that hold a file, by size."""
    places.known(name, SOURCES, "source of photographs")
    pattern = re.compile(rf"{re.escape(name)}-(\d+)-({'|'.join(get_args(Way))})")
    found = []
    for root in places.roots(data_dir):
        with suppress(OSError):
            names = [(int(m[1]), path) for path in root.iterdir() if (m := pattern.fullmatch(path.name))]
            found += [path for _, path in sorted(names) if (path / file).is_file()]
    return found


def _finished(name: str, data_dir: Path | str | None) -> list[Path]:
    return _folders(name, data_dir, INDEX)


def _unfinished(name: str, data_dir: Path | str | None) -> str:
    folders = [f for f in _folders(name, data_dir, UNFINISHED) if not (f / INDEX).is_file()]
    return f"unfinished: {', '.join(map(str, folders))}" if folders else ""


# -------------------------------------------------------------------------------------------------- the index


def opened(folder: Path) -> Photographs:
    """Opens a finished folder; its index is checked, its pixels are not.

    Raises:
        DataError: It is damaged.
    """
    index = read_index(folder)
    path, side, number = folder / PIXELS, index["size"], len(index["names"])
    with _reading(path):
        size = path.stat().st_size
        if size != number * side * side * 3:
            raise _damaged(path, f"expected {number * side * side * 3} bytes, found {size}")
        images = np.memmap(path, np.uint8, "r", shape=(number, side, side, 3))
    return Photographs(
        images=images,
        levels=np.array(index["levels"], np.int64),
        patients=np.unique(index["patients"], return_inverse=True)[1].astype(np.int64),
        parts=np.array(index["parts"]),
        names=index["names"],
        digest=index["digest"],
        bad=[(name, reason) for name, reason in index["bad"]],
        folder=folder,
    )


def read_index(folder: Path) -> dict[str, Any]:
    """What `sealed` wrote.

    Raises:
        DataError: It cannot be read, or differs from its checksum.
    """
    path = folder / INDEX
    with _reading(path):
        try:
            index = json.loads(path.read_bytes())
            whole = index.pop("checksum") == _checksum(index)
        except (ValueError, KeyError, TypeError, AttributeError):
            whole = False
    if not whole:
        raise _damaged(path, "it differs from its checksum")
    if index["schema"] != SCHEMA:
        raise _damaged(path, f"expected schema {SCHEMA}, found {index['schema']}")
    return index


def sealed(index: dict[str, Any]) -> bytes:
    """The content of `index.json`: an index with its digest and its checksum."""
    index = index | {"digest": _digest(index)}
    return json.dumps(index | {"checksum": _checksum(index)}, indent=1).encode()


def _checksum(index: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()


def _digest(index: dict[str, Any]) -> str:
    """SHA-256 over a line per photograph, sorted: its name, level and part, and the SHA-256 of its pixels."""
    columns = (index["names"], index["levels"], index["parts"], index["pixels"])
    lines = sorted(
        f"{name} {level} {part} {pixels}\n" for name, level, part, pixels in zip(*columns, strict=True)
    )
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _damaged(path: Path, what: str) -> DataError:
    return DataError(f"{path} is damaged, {what}: delete its folder, and prepare the photographs again")


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from None
