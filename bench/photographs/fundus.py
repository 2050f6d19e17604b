"""The data set `retinopathy_synthetic`: photographs that nobody took, in the folders of a real data set.

A folder in the layout of Kaggle's diabetic retinopathy detection (2015), so that what reads the real
photographs reads these:

    train/<patient>_<side>.jpeg    trainLabels.csv             image,level
    test/<patient>_<side>.jpeg     retinopathy_solution.csv    image,level,Usage

where Usage is Public for validation and Private for test. `artefacts.csv` lists what only a generator knows;
training never reads it. `made.json` is written last: settings, and a digest of all images and tables.

`bench.photographs.fundus_population` is the model of the eyes, `bench.photographs.fundus_photograph` draws
them.
"""

from __future__ import annotations

import hashlib
import io
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from bench import randomness
from bench.errors import BenchError, UsageError
from bench.photographs import fundus_population as population
from bench.photographs.fundus_photograph import photograph
from bench.system import files, places

NAME = "retinopathy_synthetic"
VERSION = 1
"""Of the generator: grows when the same settings give other photographs."""
SHARES = {"train": 0.6, "val": 0.1, "test": 0.3}
"""Of the patients in each part; both eyes of a patient are in one."""
SIDES = ("left", "right")
SIZES = range(32, 2049)
"""Height and width in pixels that can be drawn."""
QUALITY = 92
"""Of the JPEG files."""

Progress = Callable[[int, int], None]
"""Is told after each patient how many images are there, and of how many."""


def find_or_make(
    data_dir: Path | str | None,
    images: int,
    size: int,
    seed: int,
    workers: int | None = 1,
    progress: Progress | None = None,
) -> Path:
    """The folder with these settings, made if it is in none of the folders of data (`bench.system.places`).

    Args:
        data_dir: Folder to look in first, and to make it in; else $BENCH_DATA, else ~/.cache/posterior-bench.
        images: As in `make`.
        size: As in `make`.
        seed: As in `make`.
        workers: As in `make`. One draws in this process: more need a script with a main guard.
        progress: As in `make`.

    Raises:
        UsageError: As in `make`.
        OutputError: As in `make`.
    """
    name = f"{NAME}-{images}-{size}-{seed}"
    roots = places.roots(data_dir)
    made = (root / name for root in roots if _read(root / name / "made.json"))
    return make(next(made, roots[0] / name), images, size, seed, workers, progress)


def make(
    folder: Path,
    images: int,
    size: int,
    seed: int,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Path:
    """Makes the data set in a folder, or what is missing of it; the bytes follow from the settings alone.

    Args:
        folder: Made if it is not there; may hold an unfinished set of the same settings.
        images: Number of photographs, two for each patient.
        size: Their height and width in pixels.
        seed: Fixes the patients and all that is seen of them.
        workers: Number of processes; default is one for each core.
        progress: Is told how far it has come.

    Returns:
        The folder.

    Raises:
        UsageError: A setting is out of range, or the folder holds a set of other settings.
        OutputError: Something cannot be written.
    """
    if images < 20 or images % 2:
        raise UsageError(f"--images {images}: must be even, two eyes of each patient, and at least 20")
    if size not in SIZES:
        raise UsageError(f"--size {size}: must be {SIZES[0]} to {SIZES[-1]} pixels")
    if seed < 0:
        raise UsageError(f"--seed {seed}: must not be negative")
    if workers is not None and workers < 1:
        raise UsageError(f"--workers {workers}: must be at least 1")
    settings = {"name": NAME, "version": VERSION, "images": images, "size": size, "seed": seed}
    if _is_made(folder, settings):
        return folder
    with _alone(folder):
        if not _is_made(folder, settings):
            files.sweep(folder)
            files.write(folder / "making.json", _json(settings))
            digests = _write_photographs(folder, images, size, seed, workers, progress)
            tables = _tables(images, seed)
            files.write_all({folder / name: content for name, content in tables.items()})
            digests |= {name: _sha256(content) for name, content in tables.items()}
            digest = _sha256("".join(f"{name} {digests[name]}\n" for name in sorted(digests)).encode())
            files.write(folder / "made.json", _json(settings | {"digest": digest}))
            (folder / "making.json").unlink()
    return folder


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keeps other processes out of the folder, after one that makes the same is done."""
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(files.locked(folder))
                break
            except UsageError:
                time.sleep(0.5)
        yield


def _is_made(folder: Path, settings: dict[str, Any]) -> bool:
    """Whether the folder holds all that the settings say.

    Raises:
        UsageError: It holds something else, or the beginning of it.
    """
    for name in ("making.json", "made.json"):  # in this order: the latter is there before the former goes
        there = _read(folder / name)
        differing = [key for key in settings if there and there.get(key) != settings[key]]
        if there and differing:
            found = ", ".join(f"{key} {there.get(key)}" for key in differing)
            asked = ", ".join(f"{key} {settings[key]}" for key in differing)
            raise UsageError(
                f"{folder} holds {NAME} of {found}, not {asked}; remove it or name another folder"
            )
        if there:
            return name == "made.json"
    if folder.is_dir() and any(not entry.name.startswith(".") for entry in folder.iterdir()):
        raise UsageError(f"{folder} holds other files than {NAME}; name another folder")
    return False


def _read(path: Path) -> dict[str, Any] | None:
    """What a JSON file says, None if it is none."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=1) + "\n").encode()


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def part_of(patient: int, patients: int) -> str:
    """The part, "train", "val" or "test", that patient 1..patients is in."""
    train, val = (round(patients * SHARES[part]) for part in ("train", "val"))
    return "train" if patient <= train else "val" if patient <= train + val else "test"


def eyes_of(seed: int, patient: int) -> population.Eyes:
    """The two eyes of a patient, arrays with P = 1."""
    return population.draw(np.random.default_rng(randomness.derive(seed, NAME, patient)), 1)


def _write_photographs(
    folder: Path, images: int, size: int, seed: int, workers: int | None, progress: Progress | None
) -> dict[str, str]:
    """Writes what is missing; returns path below the folder -> SHA-256 for all."""
    patients = images // 2
    workers = min(workers or os.cpu_count() or 1, patients)
    write = partial(_write_patient, folder, patients, size, seed)
    digests: dict[str, str] = {}
    with _mapped(workers) as mapped:
        for number, written in enumerate(mapped(write, range(1, patients + 1)), 1):
            digests |= written
            if progress:
                progress(2 * number, images)
    return digests


@contextmanager
def _mapped(workers: int) -> Iterator[Callable[..., Iterable[dict[str, str]]]]:
    """A `map` that works in so many processes; one is this one."""
    if workers == 1:
        yield map
        return
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(workers, mp_context=context, initializer=_serve) as pool:
            yield partial(pool.map, chunksize=4)
    except BrokenProcessPool:
        raise BenchError(
            f"a process that draws {NAME} was killed; the same command goes on from here"
        ) from None


def _serve() -> None:
    """In a worker: Ctrl-C is the parent's to handle, and without the parent there is nothing to do."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def follow() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _write_patient(folder: Path, patients: int, size: int, seed: int, patient: int) -> dict[str, str]:
    """Writes those of a patient's two photographs that are not there; returns the SHA-256 of both."""
    digests = {}
    part = "train" if part_of(patient, patients) == "train" else "test"
    eyes = eyes_of(seed, patient)
    for eye, side in enumerate(SIDES):
        name = f"{part}/{patient}_{side}.jpeg"
        content = _whole(folder / name)
        if content is None:
            pixels = photograph(
                eyes.visible[0, eye].tolist(),
                float(eyes.strength[0, eye]),
                int(eyes.camera[0]),
                side,
                size,
                randomness.derive(seed, NAME, patient, side),
            )
            buffer = io.BytesIO()
            Image.fromarray(pixels).save(buffer, "JPEG", quality=QUALITY)
            content = buffer.getvalue()
            files.write(folder / name, content)
        digests[name] = _sha256(content)
    return digests


def _whole(path: Path) -> bytes | None:
    """The bytes of a JPEG file, None if it is not there or not whole."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    return content if content[:2] == b"\xff\xd8" and content[-2:] == b"\xff\xd9" else None


def _tables(images: int, seed: int) -> dict[str, bytes]:
    """File name -> content of the three tables."""
    rows: dict[str, list[str]] = {
        "trainLabels.csv": ["image,level"],
        "retinopathy_solution.csv": ["image,level,Usage"],
        "artefacts.csv": [
            f"image,part,camera,strength,{','.join(population.KINDS)},bayes_probability",
        ],
    }
    usage = {"val": "Public", "test": "Private"}
    patients = images // 2
    for patient in range(1, patients + 1):
        part, eyes = part_of(patient, patients), eyes_of(seed, patient)
        probability = population.positive_probability(eyes.visible, eyes.strength)
        for eye, side in enumerate(SIDES):
            name, level = f"{patient}_{side}", eyes.levels[0, eye]
            if part == "train":
                rows["trainLabels.csv"].append(f"{name},{level}")
            else:
                rows["retinopathy_solution.csv"].append(f"{name},{level},{usage[part]}")
            known = [eyes.camera[0], f"{eyes.strength[0, eye]:.6f}", *eyes.visible[0, eye]]
            row = [name, part, *known, f"{probability[0, eye]:.6f}"]
            rows["artefacts.csv"].append(",".join(map(str, row)))
    return {name: ("\n".join(lines) + "\n").encode() for name, lines in rows.items()}


def contact_sheet(columns: int = 6, size: int = 100, seed: int = 17) -> Image.Image:
    """A sheet of photographs in 256 colours: a row for each level 0-4, and two eyes under growing artefacts.

    Args:
        columns: Photographs in a row.
        size: Of a photograph, in pixels.
        seed: Of the patients, of whom the first that fit are shown.
    """
    rows: dict[str, list[np.ndarray]] = {f"level {level}": [] for level in range(len(population.SHARES))}
    patient = 0
    while any(len(row) < columns for row in rows.values()):
        patient += 1
        eyes = eyes_of(seed, patient)
        for eye, side in enumerate(SIDES):
            row, strength = rows[f"level {eyes.levels[0, eye]}"], float(eyes.strength[0, eye])
            if len(row) < columns and strength < 0.3:
                of_eye = (eyes.visible[0, eye].tolist(), strength, int(eyes.camera[0]), side)
                row.append(photograph(*of_eye, size, randomness.derive(seed, NAME, patient, side)))
    for number in range(2):
        rows[f"strength 0 to 1, camera {number}"] = [
            photograph([round(n * (1 - s)) for n in (7, 7, 8)], s, number, "right", size, seed + number)
            for s in np.linspace(0, 1, columns).tolist()
        ]
    band = 14
    sheet = Image.new("RGB", (columns * size, len(rows) * (size + band)))
    for number, (title, row) in enumerate(rows.items()):
        top = number * (size + band)
        sheet.paste(Image.fromarray(np.concatenate(row, 1)), (0, top + band))
        ImageDraw.Draw(sheet).text((4, top + 2), title, fill=(230, 230, 230))
    return sheet.quantize(256, Image.Quantize.MAXCOVERAGE, kmeans=1, dither=Image.Dither.NONE)
