"""Where photographs of the fundus come from: each source's layout, read into one list of eyes.

Nothing here opens a photograph. What is in order is an `Eye`; the rest is listed with its reason and left
out: a photograph without a label, a label without a photograph, a level that is none. Eyes of one patient are
in one part: those of a patient who has an eye in a later part (train, val, test) are left out of the earlier.
"""

from __future__ import annotations

import csv
import hashlib
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench import randomness
from bench.errors import DataError
from bench.text import one_line

PARTS = ("train", "val", "test")
LEVELS = range(5)
"""Severity of the retinopathy: 0 none, 1 mild, 2 moderate, 3 severe, 4 proliferative."""
ENDINGS = (".jpeg", ".jpg", ".png")
APTOS_SHARES = {"test": 0.2, "val": 0.1}
"""APTOS 2019 publishes no labels of its test images: parts of the labelled ones, by a hash of the name."""


@dataclass(frozen=True, eq=False)
class Eye:
    """A labelled photograph of one eye.

    Attributes:
        name: Of the photograph, once in a source.
        level: One of LEVELS.
        patient: Whose eye it is.
        part: One of PARTS.
        picture: Its file; or its pixels, uint8 [side, side, 3].
        fingerprint: Tells this picture from another of the same name, without opening its file.
    """

    name: str
    level: int
    patient: str
    part: str
    picture: Path | np.ndarray
    fingerprint: str


@dataclass(frozen=True, eq=False)
class Listing:
    """What a source holds.

    Attributes:
        eyes: In the order of PARTS, then of names.
        bad: (name, reason) of what cannot be used, sorted.
        side: Side in pixels where all are square and show the fundus alone already; else 0.
    """

    eyes: list[Eye]
    bad: list[tuple[str, str]]
    side: int = 0

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all that is known without opening the photographs."""
        lines = [f"{e.name} {e.level} {e.patient} {e.part} {e.fingerprint}" for e in self.eyes]
        return hashlib.sha256("\n".join([*lines, *map(repr, self.bad)]).encode()).hexdigest()


@dataclass(frozen=True)
class PhotographSource:
    """A source of photographs.

    Attributes:
        title: Its usual name.
        origin: Who made it, and where it is published.
        licence: The terms under which it may be used.
        examples: How many it has.
        size: Side in pixels of the prepared photographs if none is named; 0: as they are published.
        steps: How to get it, up to the command that prepares it.
        listing: Reads its layout.
    """

    title: str
    origin: str
    licence: str
    examples: str
    size: int
    steps: str
    listing: Callable[[Path], Listing]


def _kaggle(folder: Path) -> Listing:
    """`trainLabels.csv` (image, level), `retinopathy_solution.csv` (and Usage), `train/`, `test/`."""
    usages = {"Public": "val", "Private": "test"}
    bad: list[tuple[str, str]] = []
    solution = _rows(folder / "retinopathy_solution.csv", "image", "level", "Usage")
    train = [(image, level, "train") for image, level in _rows(folder / "trainLabels.csv", "image", "level")]
    test = [(image, level, usages.get(usage, "")) for image, level, usage in solution]
    eyes = [
        *_matched(train, folder / "train", bad, _patient),
        *_matched(test, folder / "test", bad, _patient),
    ]
    return _in_order(_apart(eyes, bad), bad)


def _patient(name: str) -> str | None:
    patient, _, side = name.rpartition("_")
    return patient if side in ("left", "right") and patient else None


def _aptos(folder: Path) -> Listing:
    """`train.csv` (id_code, diagnosis), `train_images/`; patients unknown: each photograph its own."""
    bad: list[tuple[str, str]] = []
    rows = _rows(folder / "train.csv", "id_code", "diagnosis")
    labels = [(name, level, _aptos_part(name)) for name, level in rows]
    return _in_order(list(_matched(labels, folder / "train_images", bad, lambda name: name)), bad)


def _aptos_part(name: str) -> str:
    drawn, up_to = randomness.derive(0, "aptos", name) / 2**63, 0.0
    for part, share in APTOS_SHARES.items():
        up_to += share
        if drawn < up_to:
            return part
    return "train"


def _medmnist(path: Path) -> Listing:
    """An `.npz` of `{train,val,test}_images` [N, side, side, 3], `{...}_labels` [N, 1]; patients unknown."""
    if path.is_dir():
        files = sorted(path.glob("retinamnist*.npz"))
        if len(files) != 1:
            found = ", ".join(file.name for file in files) or "none"
            raise DataError(f"{path}: expected one file retinamnist*.npz, found {found}; name it by --source")
        path = files[0]
    eyes, bad, sides = [], [], set()
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            for part in PARTS:
                images, levels = arrays[f"{part}_images"], arrays[f"{part}_labels"]
                square = images.ndim == 4 and images.shape[1] == images.shape[2] and images.shape[3] == 3
                if not square or images.dtype != np.uint8:
                    raise DataError(
                        f"{path}: expected {part}_images [N, side, side, 3] of uint8, as RetinaMNIST has, "
                        f"found {list(images.shape)} of {images.dtype}"
                    )
                if levels.size != len(images) or levels.dtype.kind not in "iu":
                    raise DataError(
                        f"{path}: expected {part}_labels of {len(images)} integers, "
                        f"found {list(levels.shape)} of {levels.dtype}"
                    )
                sides.add(images.shape[1])
                for row, (image, level) in enumerate(zip(images, levels.ravel().tolist(), strict=True)):
                    name = f"{part}_{row:04d}"
                    if level in LEVELS:
                        fingerprint = hashlib.sha256(image.tobytes()).hexdigest()
                        eyes.append(Eye(name, level, name, part, image, fingerprint))
                    else:
                        bad.append((name, f"level {level} is none of 0 to 4"))
    except KeyError as error:
        raise DataError(f"{path}: lacks an array, {error.args[0]}; expected RetinaMNIST's") from None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        reason = getattr(error, "strerror", None) or one_line(error, 100)
        raise DataError(f"{path}: expected RetinaMNIST's .npz, which cannot be read ({reason})") from None
    if len(sides) > 1:
        raise DataError(f"{path}: expected images of one size, found sides of {sides} pixels")
    return _in_order(eyes, bad, sides.pop())


def _rows(path: Path, *columns: str) -> Iterator[tuple[str, ...]]:
    """The values of some columns of a CSV file, without the blanks around them.

    Raises:
        DataError: It cannot be read, or lacks one of the columns.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, skipinitialspace=True)
            names = {name.strip(): name for name in reader.fieldnames or []}
            if missing := [column for column in columns if column not in names]:
                found = one_line(", ".join(names) or "none", 100)
                raise DataError(f"{path}: lacks the column {' and '.join(missing)}; it has {found}")
            for row in reader:
                yield tuple((row[names[column]] or "").strip() for column in columns)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: expected a CSV file in UTF-8 ({one_line(error, 100)})") from None


def _files(folder: Path, bad: list[tuple[str, str]]) -> dict[str, tuple[Path, int]]:
    """Name without its ending -> file and bytes, of the photographs in a folder."""
    found: dict[str, tuple[Path, int]] = {}
    try:
        with os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                name, ending = os.path.splitext(entry.name)
                if ending.lower() not in ENDINGS or name.startswith(".") or not entry.is_file():
                    continue
                if name in found:
                    bad.append((name, f"{entry.name} has the name of {found[name][0].name}, which is taken"))
                else:
                    found[name] = (Path(entry.path), entry.stat().st_size)
    except OSError as error:
        raise DataError(f"{folder}: cannot be read ({error.strerror or error})") from None
    return found


def _matched(
    labels: Iterable[tuple[str, str, str]],
    folder: Path,
    bad: list[tuple[str, str]],
    patient_of: Callable[[str], str | None],
) -> Iterator[Eye]:
    """The eyes of one folder: (name, level, part) of the labels joined with the files; adds to `bad`."""
    files, labelled = _files(folder, bad), set()
    for name, level, part in labels:
        patient = patient_of(name)
        if name in labelled:
            bad.append((name, "labelled twice; the first label holds"))
        elif level not in map(str, LEVELS):
            bad.append((name, f"level {one_line(level, 40)!r} is none of 0 to 4"))
        elif part not in PARTS:
            bad.append((name, "Usage is neither Public nor Private"))
        elif patient is None:
            bad.append((name, "not named PATIENT_left or PATIENT_right, so nobody knows whose eye it is"))
        elif name not in files:
            bad.append((name, f"label without a photograph in {folder.name}"))
        else:
            path, size = files[name]
            yield Eye(name, int(level), patient, part, path, str(size))
        labelled.add(name)
    bad.extend(
        (name, f"photograph in {folder.name} without a label") for name in files if name not in labelled
    )


def _apart(eyes: list[Eye], bad: list[tuple[str, str]]) -> list[Eye]:
    """The eyes of which each patient's are in one part, the latest that has one; adds the others to `bad`."""
    latest: dict[str, int] = {}
    for eye in eyes:
        latest[eye.patient] = max(latest.get(eye.patient, 0), PARTS.index(eye.part))
    kept = []
    for eye in eyes:
        if eye.part == (part := PARTS[latest[eye.patient]]):
            kept.append(eye)
        else:
            bad.append((eye.name, f"left out of {eye.part}: its patient has an eye in {part}"))
    return kept


def _in_order(eyes: list[Eye], bad: list[tuple[str, str]], side: int = 0) -> Listing:
    return Listing(sorted(eyes, key=lambda e: (PARTS.index(e.part), e.name)), sorted(bad), side)


_KAGGLE_FILES = "trainLabels.csv, retinopathy_solution.csv, train/*.jpeg and test/*.jpeg"
SOURCES = {
    "retinopathy": PhotographSource(
        title="Kaggle diabetic retinopathy detection, 2015",
        origin="EyePACS, https://www.kaggle.com/c/diabetic-retinopathy-detection",
        licence="rules of the competition",
        examples="35126 + 10906 + 42670",
        size=512,
        steps=(
            "it cannot be fetched without an account: (1) at kaggle.com make one and accept the rules of the "
            "competition diabetic-retinopathy-detection; (2) in an empty folder DIR run `kaggle competitions "
            "download -c diabetic-retinopathy-detection` (82 GB) and unzip what comes; (3) run `cat "
            "train.zip.* > train.zip && unzip train.zip`, the same with test, and `unzip "
            "trainLabels.csv.zip`; (4) put retinopathy_solution.csv (columns image, level, Usage), which "
            "Kaggle published in the competition's forum after its end, into DIR, so that it has "
            f"{_KAGGLE_FILES}"
        ),
        listing=_kaggle,
    ),
    "retinopathy_synthetic": PhotographSource(
        title="Procedural photographs of the fundus",
        origin="made by this project, in Kaggle's layout",
        licence="Apache-2.0",
        examples="as many as made",
        size=64,
        steps=(
            "`bench data make retinopathy_synthetic --images 2000 --size 64 --seed 0` makes a folder DIR "
            f"with {_KAGGLE_FILES}"
        ),
        listing=_kaggle,
    ),
    "retinopathy_aptos": PhotographSource(
        title="APTOS 2019 blindness detection",
        origin="Aravind Eye Hospital, https://www.kaggle.com/c/aptos2019-blindness-detection",
        licence="rules of the competition",
        examples="3662",
        size=512,
        steps=(
            "it cannot be fetched without an account: (1) at kaggle.com make one and accept the rules of the "
            "competition aptos2019-blindness-detection; (2) in an empty folder DIR run `kaggle competitions "
            "download -c aptos2019-blindness-detection` (10 GB) and unzip what comes, so that DIR has "
            "train.csv (columns id_code, diagnosis) and train_images/*.png"
        ),
        listing=_aptos,
    ),
    "retinamnist": PhotographSource(
        title="RetinaMNIST",
        origin="MedMNIST v2, from DeepDRiD, https://medmnist.com",
        licence="CC BY 4.0",
        examples="1080 + 120 + 400",
        size=0,
        steps=(
            "fetch one of its files retinamnist.npz (28 pixels), retinamnist_64.npz, retinamnist_128.npz or "
            "retinamnist_224.npz from the place that medmnist.com names into a folder DIR, or `pip install "
            "medmnist` and `python -c \"import medmnist; medmnist.RetinaMNIST('train', download=True, "
            "size=28, root='DIR')\"`"
        ),
        listing=_medmnist,
    ),
}
