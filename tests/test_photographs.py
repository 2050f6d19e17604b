"""Photographs of the fundus: from folders as downloaded to a memory map, whatever is wrong with them.

The folders are made here, in the layouts of Kaggle, APTOS and MedMNIST, of discs with noise. What is expected
of pixels is known by hand: a disc's radius, a constant's contrast, the digest's definition.
"""

import csv
import errno
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.stats import norm

from bench import cli
from bench.errors import DataError, OutputError, UsageError
from bench.photographs import photographs, preparing, preprocessing
from bench.photographs import sources as photograph_sources
from bench.system import places

SIDE = 24


def disc(width, height, radius, value=200, noise=0, seed=0):
    """A bright disc in the middle of a black picture, uint8 [height, width, 3]."""
    y, x = np.mgrid[:height, :width]
    inside = (y - (height - 1) / 2) ** 2 + (x - (width - 1) / 2) ** 2 <= radius**2
    grain = np.random.default_rng(seed).integers(-noise, noise + 1, (height, width, 3))
    return np.where(inside[..., None], value + grain, 0).astype(np.uint8)


def write_csv(path, header, rows):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])


def read_csv(path):
    """The rows below the header."""
    return list(csv.reader(path.read_text().splitlines()))[1:]


def kaggle(folder, train=8, val=2, test=4, seed=0):
    """A folder in Kaggle's layout with so many patients, two eyes each."""
    draw = np.random.default_rng(seed)
    parts = ["train"] * train + ["val"] * val + ["test"] * test
    labels = {"train": [], "test": []}
    for patient, part in enumerate(parts, 1):
        for side in ("left", "right"):
            where = "train" if part == "train" else "test"
            (folder / where).mkdir(parents=True, exist_ok=True)
            picture = disc(60, 40, draw.uniform(15, 19), noise=50, seed=int(draw.integers(2**31)))
            Image.fromarray(picture).save(folder / where / f"{patient}_{side}.jpeg", quality=90)
            usage = {"train": [], "val": ["Public"], "test": ["Private"]}[part]
            labels[where].append([f"{patient}_{side}", int(draw.integers(5)), *usage])
    write_csv(folder / "trainLabels.csv", ["image", "level"], labels["train"])
    write_csv(folder / "retinopathy_solution.csv", ["image", "level", "Usage"], labels["test"])
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return kaggle(tmp_path_factory.mktemp("kaggle"))


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory):
    """Prepared by one worker, without anything in the way."""
    return preparing.prepare("retinopathy", source, tmp_path_factory.mktemp("whole"), SIDE, workers=1)


@pytest.fixture(autouse=True)
def _no_other_roots(monkeypatch, tmp_path):
    monkeypatch.delenv("BENCH_DATA", raising=False)
    monkeypatch.setattr(places, "CACHE_ROOT", tmp_path / "cache")


@pytest.fixture
def own(source, tmp_path):
    """A copy of the source, to be spoilt."""
    return Path(shutil.copytree(source, tmp_path / "own"))


def one_line(info):
    message = str(info.value)
    assert "\n" not in message
    return message


def call(capsys, *arguments):
    code = cli.main([str(argument) for argument in arguments])
    return code, *capsys.readouterr()


# ---------------------------------------------------------------------------------------------- preprocessing


def test_radius_of_a_disc_is_found():
    """To half a pixel: a row has whole pixels."""
    for radius in (50, 90.3, 120.7):
        assert abs(preprocessing.radius(Image.fromarray(disc(400, 300, radius))) - radius) <= 0.5


@pytest.mark.parametrize(
    "picture", [np.zeros((300, 400, 3), np.uint8), disc(400, 300, 20)], ids=["black", "speck"]
)
def test_radius_of_a_picture_too_bad_for_one_is_half_its_height(picture):
    assert preprocessing.radius(Image.fromarray(picture)) == 150


@pytest.mark.parametrize("size", [64, 65])
def test_contrast_of_a_constant_disc_is_grey(size):
    """Exactly as far inside as the blur reaches (4 of its deviations); at the edge by the blur of a step.

    The step at radius r is 3 deviations from 0.9 r. A deviation is 1.2 pixels, and scaling to whole pixels
    moves and widens the step by less than 0.6 of it; 4 x 200 x (1 - Phi(2.4)) is 6.6.
    """
    made = preprocessing.contrast(Image.fromarray(disc(600, 400, 190)), size).astype(int)
    away = np.hypot(*np.meshgrid(*[np.arange(size) - (size - 1) / 2] * 2)) / (size / 1.8)
    assert made.shape == (size, size, 3)
    assert np.all(made[away < 1 - 5 / 30] == 128)
    assert np.all(made[away > 0.9] == 128)
    assert np.abs(made - 128).max() <= 4 * 200 * norm.sf(2.4)


def test_contrast_of_a_wave_is_four_times_what_the_blur_takes_away():
    """A Gaussian blur of deviation s takes a wave of frequency w to exp(-(s w)^2 / 2) of its height."""
    size, height = 180, 10.0
    picture = disc(2 * size, 2 * size, size)  # of radius `size`: it is scaled by 100 / 180
    wave = height * np.sin(2 * np.pi * (np.arange(2 * size) + 0.5) / 36)  # 20 pixels once scaled
    picture = np.where(picture > 0, np.rint(120 + wave)[None, :, None], 0).astype(np.uint8)
    made = preprocessing.contrast(Image.fromarray(picture), size).astype(float)
    row = made[size // 2 - 20 : size // 2 + 20, 40:140].mean((0, 2))
    expected = 4 * height * (1 - np.exp(-((100 / 30 * 2 * np.pi / 20) ** 2) / 2))
    wave = np.sin(2 * np.pi * (18 + (np.arange(40, 140) + 0.5) * 1.8) / 36)  # the circle begins at 0.1 r
    assert abs(2 * (row - 128) @ wave / 100 - expected) < 0.05 * expected  # of scaling, which smooths too


def test_resize_cuts_to_the_fundus_and_keeps_the_aspect():
    """A disc, wherever it lies, fills the square: pi / 4 of it. One cut off above keeps its margins."""
    for shape in ((400, 300), (300, 400)):
        picture = np.roll(disc(*shape, 100), (20, -10), (0, 1))
        made = preprocessing.finished(Image.fromarray(picture), 64, "resize")
        assert abs(made.mean() / 200 - np.pi / 4) < 0.01
    cut = preprocessing.finished(
        Image.fromarray(disc(300, 150, 100)), 64, "resize"
    )  # 200 x 150: 8 rows above
    assert cut[:7].max() == 0
    assert cut[9, 32].min() > 190
    assert cut[32, 1].min() > 190


def test_a_black_picture_and_one_that_is_cropped_already_keep_their_frame():
    assert preprocessing.finished(Image.fromarray(disc(40, 30, 0, 0)), 8, "resize").shape == (8, 8, 3)
    picture = disc(64, 64, 10)
    same = preprocessing.finished(Image.fromarray(picture), 64, "resize", is_cropped=True)
    assert np.array_equal(same, picture)


def test_extreme_shapes_stay_small():
    """A strip's radius is thousands of times its height."""
    for shape in ((3000, 8), (8, 3000)):
        for way in ("resize", "contrast"):
            picture = Image.fromarray(np.full((*shape, 3), 90, np.uint8))
            assert preprocessing.finished(picture, 16, way).shape == (16, 16, 3)


# --------------------------------------------------------------------------------------------- what comes out


def test_what_is_prepared_is_what_the_folder_holds(source, whole):
    assert whole.images.shape == (28, SIDE, SIDE, 3)
    assert whole.images.dtype == np.uint8
    assert not whole.images.flags.writeable
    assert (whole.bad, len(whole.names)) == ([], 28)
    labels = dict(read_csv(source / "trainLabels.csv"))
    for name, level, part in zip(whole.names, whole.levels, whole.parts, strict=True):
        if part == "train":
            assert labels[name] == str(level)
            picture = preprocessing.decoded(source / "train" / f"{name}.jpeg", SIDE)
            made = preprocessing.finished(picture, SIDE, "resize")
            assert np.array_equal(whole.images[whole.names.index(name)], made)
    assert [np.count_nonzero(whole.parts == part) for part in ("train", "val", "test")] == [16, 4, 8]
    assert whole.patients.dtype == whole.levels.dtype == np.int64
    of_patient = {}
    for name, patient in zip(whole.names, whole.patients, strict=True):
        of_patient.setdefault(patient, set()).add(name.partition("_")[0])
    assert len(of_patient) == 14
    assert all(len(names) == 1 for names in of_patient.values())


def test_digest_is_the_documented_one(whole):
    columns = zip(whole.names, whole.levels, whole.parts, whole.images, strict=True)
    lines = sorted(
        f"{n} {level} {p} {hashlib.sha256(i.tobytes()).hexdigest()}\n" for n, level, p, i in columns
    )
    assert whole.digest == hashlib.sha256("".join(lines).encode()).hexdigest()


def test_rows_are_read_and_a_copy_in_another_process_is_the_folder(whole):
    rows = np.array([5, 0, 27, 5])
    assert np.array_equal(whole.images[rows], np.stack([whole.images[row] for row in rows]))
    sent = ForkingPickler.dumps(whole)
    assert len(sent) < 1000
    again = ForkingPickler.loads(sent)
    assert isinstance(again.images, np.memmap)
    assert (again.digest, again.names) == (whole.digest, whole.names)


@pytest.mark.parametrize("way", ["resize", "contrast"])
def test_workers_change_no_byte(source, whole, tmp_path, way):
    two = preparing.prepare("retinopathy", source, tmp_path / "2", SIDE, way, workers=2)
    one = (
        whole if way == "resize" else preparing.prepare("retinopathy", source, tmp_path, SIDE, way, workers=1)
    )
    for file in (photographs.PIXELS, photographs.INDEX):
        assert (two.folder / file).read_bytes() == (one.folder / file).read_bytes()
    assert sorted(path.name for path in two.folder.iterdir()) == ["images.u8", "index.json"]


def test_what_is_there_is_not_made_again(source, whole, monkeypatch):
    monkeypatch.setattr(preparing, "_make", None)
    again = preparing.prepare("retinopathy", source, whole.folder.parent, SIDE)
    assert (
        again.digest == photographs.prepared("retinopathy", whole.folder.parent, SIDE).digest == whole.digest
    )


def test_another_source_is_refused_in_the_same_folder(whole, own):
    (own / "train" / "1_left.jpeg").write_bytes(b"another size")
    with pytest.raises(UsageError, match="holds photographs prepared from another source: delete it") as info:
        preparing.prepare("retinopathy", own, whole.folder.parent, SIDE)
    one_line(info)


# --------------------------------------------------------------------------------- bad photographs and labels


def spoilt(folder):
    """Spoils a Kaggle folder in every way that is not fatal: name -> what must be said of it."""
    train, test = folder / "train", folder / "test"
    jpeg = (train / "1_left.jpeg").read_bytes()
    (train / "1_left.jpeg").write_bytes(jpeg[: len(jpeg) // 2])
    (train / "1_right.jpeg").write_bytes(b"\x00" * 100)
    (train / "2_left.jpeg").write_bytes(b"")
    (train / "2_right.jpeg").unlink()
    (train / "99_left.jpeg").write_bytes(jpeg)
    (train / "._98_left.jpeg").write_bytes(b"of another system's file browser")
    (train / "notes.txt").write_text("no photograph")
    (train / "3_left.jpeg").unlink()
    (train / "3_left.jpeg").mkdir()
    Image.new("RGB", (4, 4)).save(train / "3_right.jpeg")
    Image.fromarray(disc(60, 40, 18)).save(train / "4_left.png")
    rows = read_csv(folder / "trainLabels.csv")
    levels = {"5_left": "7", "5_right": "", "6_left": "1.5"}
    rows = [[name, levels.get(name, level)] for name, level in rows]
    rows += [["7_left", 0], ["middle", 1], ["10_right", 0]]
    (train / "middle.jpeg").write_bytes(jpeg)
    (train / "10_right.jpeg").write_bytes(jpeg)  # patient 10 is one of val
    write_csv(folder / "trainLabels.csv", ["image", "level"], rows)
    rows = read_csv(folder / "retinopathy_solution.csv")
    rows = [[name, level, "Pubic" if name == "9_left" else usage] for name, level, usage in rows]
    write_csv(folder / "retinopathy_solution.csv", ["image", "level", "Usage"], rows)
    (test / "9_right.jpeg").unlink()
    return {
        "1_left": "damaged, image file is truncated",
        "1_right": "neither JPEG nor PNG",
        "2_left": "empty file",
        "2_right": "label without a photograph in train",
        "99_left": "photograph in train without a label",
        "3_left": "label without a photograph in train",
        "3_right": "only 4 x 4 pixels",
        "4_left": "4_left.png has the name of 4_left.jpeg, which is taken",
        "5_left": "level '7' is none of 0 to 4",
        "5_right": "level '' is none of 0 to 4",
        "6_left": "level '1.5' is none of 0 to 4",
        "7_left": "labelled twice; the first label holds",
        "middle": "not named PATIENT_left or PATIENT_right",
        "10_right": "left out of train: its patient has an eye in val",
        "9_left": "Usage is neither Public nor Private",
        "9_right": "label without a photograph in test",
    }


def test_what_is_bad_is_listed_and_the_rest_is_used(own, whole, tmp_path, capsys):
    expected = spoilt(own)
    out = tmp_path / "out"
    code, printed, told = call(
        capsys, "data", "prepare", "retinopathy", "--source", own, "--size", SIDE, "--data-dir", out
    )
    assert (code, printed) == (0, f"{out}/retinopathy-{SIDE}-resize\n")
    found = photographs.prepared("retinopathy", out, SIDE)
    listed = {}
    for name, reason in found.bad:
        listed.setdefault(name, []).append(reason)
    assert listed.keys() == expected.keys()
    for name, reason in expected.items():
        assert any(said.startswith(reason) for said in listed[name]), (name, listed[name])
    assert "ETA" in told
    assert re.search(
        rf"7 train, 2 val, 8 test photographs of {SIDE} x {SIDE} pixels, 16 left out: 10_right \(left", told
    )
    same = [name for name in whole.names if name in found.names]
    assert {"4_left", "7_left", "10_right"} <= set(same)  # by their first file or label; the eye of val
    for name in same:
        first, second = (p.images[p.names.index(name)] for p in (found, whole))
        assert np.array_equal(first, second)


@pytest.mark.parametrize(
    ("mode", "ending"),
    [("L", "jpeg"), ("CMYK", "jpeg"), ("I;16", "png"), ("RGBA", "png"), ("P", "png"), ("1", "png")],
)
def test_grey_and_deep_pictures_are_converted(tmp_path, mode, ending):
    """A disc of half the full intensity stays one, whatever the depth."""
    grey = disc(60, 60, 25, 128)[..., 0]
    if mode == "I;16":
        picture = Image.fromarray(grey.astype(np.uint16) * 256 + 7)
    else:
        picture = Image.fromarray(np.stack([grey] * 3, 2)).convert(mode)
    picture.save(tmp_path / f"x.{ending}")
    made = np.asarray(preprocessing.decoded(tmp_path / f"x.{ending}", 60))
    assert made.shape == (60, 60, 3)
    inside = made[20:40, 20:40].mean()
    assert abs(inside - 128) < (10 if mode == "1" else 2)  # black and white has grain


def test_patients_are_never_split(own, tmp_path):
    """The law on the real path, and the control: eyes dealt to parts one by one break it."""
    write_csv(  # patient 1 has an eye in train and one in test, patient 9 one in val and one in test
        own / "retinopathy_solution.csv",
        ["image", "level", "Usage"],
        [
            ["1_right", 0, "Private"],
            ["9_left", 1, "Public"],
            ["9_right", 1, "Private"],
            ["10_left", 1, "Public"],
        ],
    )
    (own / "train" / "1_right.jpeg").rename(own / "test" / "1_right.jpeg")
    found = preparing.prepare("retinopathy", own, tmp_path, SIDE)
    assert not split_patients(found.patients, found.parts)
    bad = dict(found.bad)
    assert bad["1_left"] == "left out of train: its patient has an eye in test"
    assert bad["9_left"] == "left out of val: its patient has an eye in test"
    assert {"1_right", "9_right", "10_left"} <= set(found.names)
    dealt = np.array(photograph_sources.PARTS)[np.arange(len(found.names)) % 3]
    assert split_patients(found.patients, dealt)


def split_patients(patients, parts):
    return [p for p in set(patients.tolist()) if len(set(parts[patients == p].tolist())) > 1]


def test_photograph_that_may_not_be_read_is_listed_and_a_lost_disk_is_fatal(own, tmp_path, monkeypatch):
    read = Path.read_bytes

    def refused(number):
        def read_bytes(path):
            if path.name == "4_left.jpeg":
                raise OSError(number, os.strerror(number), str(path))
            return read(path)

        monkeypatch.setattr(Path, "read_bytes", read_bytes)

    refused(errno.EIO)
    with pytest.raises(
        DataError, match=r"4_left.jpeg: cannot be read \(Input/output error\); the same"
    ) as info:
        preparing.prepare("retinopathy", own, tmp_path, SIDE)
    one_line(info)
    refused(errno.EACCES)
    assert preparing.prepare("retinopathy", own, tmp_path, SIDE).bad == [("4_left", "Permission denied")]


def test_a_bomb_is_listed(own, tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 60 * 40)
    Image.new("RGB", (61, 40)).save(own / "train" / "4_left.jpeg")
    ((name, reason),) = preparing.prepare("retinopathy", own, tmp_path, SIDE).bad
    assert name == "4_left"
    assert "exceeds limit" in reason


# -------------------------------------------------------------------------------------------- fatal, one line


def remove(path):
    shutil.rmtree(path) if path.is_dir() else path.unlink()


FATAL = {
    "no folder": (lambda f: remove(f), r"own: no such folder or file; to have one: it cannot be fetched"),
    "no labels": (lambda f: remove(f / "trainLabels.csv"), r"trainLabels.csv: cannot be read \(No such file"),
    "no photographs": (lambda f: remove(f / "train"), r"own/train: cannot be read \(No such file"),
    "no solution": (lambda f: remove(f / "retinopathy_solution.csv"), r"solution.csv: cannot be read"),
    "a wrong column": (
        lambda f: write_csv(f / "trainLabels.csv", ["image", "lvl"], [["1_left", 0]]),
        r"trainLabels.csv: lacks the column level; it has image, lvl$",
    ),
    "an empty file": (
        lambda f: (f / "trainLabels.csv").write_text(""),
        r"lacks the column image and level; it has none",
    ),
    "no text": (
        lambda f: (f / "trainLabels.csv").write_bytes(b"image,level\n\xff\xfe,1"),
        r"expected a CSV file in UTF-8",
    ),
    "a file as folder": (
        lambda f: (remove(f / "train"), (f / "train").write_text("")),
        r"own/train: cannot be read \(Not a directory\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("spoil", "message"), FATAL.values(), ids=FATAL)
def test_what_is_fatal_is_one_line(own, tmp_path, capsys, spoil, message):
    spoil(own)
    out = tmp_path / "out"
    code, printed, told = call(capsys, "data", "prepare", "retinopathy", "--source", own, "--data-dir", out)
    assert (code, printed, told.count("\n")) == (3, "", 1)
    assert re.search(message, told), told
    assert not out.exists()


def test_nothing_of_use_is_fatal(own, tmp_path):
    for path in (*own.glob("train/*"), *own.glob("test/*")):
        path.write_bytes(b"spoilt")
    with pytest.raises(
        DataError, match=r"none of 28 photographs can be used: 1_left \(neither JPEG nor PNG\)"
    ) as info:
        preparing.prepare("retinopathy", own, tmp_path, SIDE)
    one_line(info)
    for path in (*own.glob("train/*"), *own.glob("test/*")):
        path.unlink()
    with pytest.raises(DataError, match=r"holds no labelled photograph: 10_left \(label without") as info:
        preparing.prepare("retinopathy", own, tmp_path, SIDE)
    one_line(info)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "arguments are required: NAME"),
        (["mnist", "--source", "."], "unknown source of photographs 'mnist'; the nearest names are"),
        (["retinopathy", "--sorce", "."], "unknown flag --sorce: did you mean --source"),
        (["retinopathy"], "--source is required; `bench data get retinopathy` says how to have it"),
        (["retinopathy", "--source", ".", "--preprocess", "blur"], "blur: must be one of resize, contrast"),
        (["retinopathy", "--source", "SOURCE", "--size", "7"], "--size 7: must be from 8 to 4096 pixels"),
        (["retinopathy", "--source", "SOURCE", "--workers", "0"], "--workers 0: must be 1 or more"),
        (
            ["retinopathie", "--source", "."],
            "unknown source of photographs 'retinopathie'; the nearest names are retinopathy",
        ),
    ],
)
def test_wrong_arguments_are_one_line(source, capsys, tmp_path, arguments, message):
    arguments = [str(source) if argument == "SOURCE" else argument for argument in arguments]
    code, printed, told = call(capsys, "data", "prepare", *arguments, "--data-dir", tmp_path)
    assert (code, printed, told.count("\n")) == (2, "", 1)
    assert message in told


def test_prepare_comes_first(capsys):
    code, _, told = call(capsys, "data", "--format", "json", "prepare", "retinopathy")
    message = "bench: bench data prepare NAME ...: prepare comes first, its flags follow\n"
    assert (code, told) == (2, message)


# -------------------------------------------------------------------------------------------------- full disk


def test_a_disk_that_fills_leaves_no_index_and_the_rest_is_made_later(source, whole, tmp_path, monkeypatch):
    append, calls = preparing._append, []

    def full(file, content):
        calls.append(len(content))
        if len(calls) > 10:
            file.write(content[:100])  # what went in before the disk was full
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append(file, content)

    monkeypatch.setattr(preparing, "_append", full)
    needed = 28 * SIDE * SIDE * 3
    message = rf"retinopathy-{SIDE}-resize: the disk is full, {needed} bytes are needed; make room"
    with pytest.raises(DataError, match=message) as info:
        preparing.prepare("retinopathy", source, tmp_path, SIDE)
    one_line(info)
    folder = tmp_path / f"retinopathy-{SIDE}-resize"
    assert sorted(path.name for path in folder.iterdir()) == ["images.u8", "unfinished.jsonl"]
    with pytest.raises(DataError, match=r"is not prepared in .* \(unfinished: "):
        photographs.prepared("retinopathy", tmp_path, SIDE)
    monkeypatch.setattr(preparing, "_append", lambda file, content: (calls.append(0), append(file, content)))
    calls.clear()
    assert preparing.prepare("retinopathy", source, tmp_path, SIDE).digest == whole.digest
    assert len(calls) == 18


def test_too_little_space_is_told_before_the_work(source, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1000, 900, 100))
    with pytest.raises(
        DataError, match=rf"{28 * SIDE * SIDE * 3} bytes are needed, 100 are free; make room"
    ) as info:
        preparing.prepare("retinopathy", source, tmp_path, SIDE)
    one_line(info)


def test_a_folder_that_cannot_be_written(source, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"cannot write .*: Not a directory; choose") as info:
        preparing.prepare("retinopathy", source, tmp_path / "file", SIDE)
    one_line(info)


# ------------------------------------------------------------------------------------ killed, and two at once

SLOWLY = """
import sys, time
from bench.photographs import preparing
finished = preparing.preprocessing.finished
def slow(*arguments):
    time.sleep(0.05)
    return finished(*arguments)
preparing.preprocessing.finished = slow
preparing.FLUSHED_EVERY = 0.0
print(preparing.prepare("retinopathy", sys.argv[1], sys.argv[2], int(sys.argv[3]), workers=1).digest)
"""


def begun(source, out):
    """A process that prepares slowly, and its folder, once some photographs are done."""
    command = [sys.executable, "-c", SLOWLY, str(source), str(out), str(SIDE)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    folder, until = out / f"retinopathy-{SIDE}-resize", time.monotonic() + 60
    journal = folder / photographs.UNFINISHED
    while not journal.exists() or journal.read_bytes().count(b"\n") < 6:
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.01)
    return process, folder


def test_killed_in_the_middle_it_goes_on_with_the_same_digest(source, whole, tmp_path):
    process, folder = begun(source, tmp_path)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (folder / photographs.INDEX).exists()
    journal = folder / photographs.UNFINISHED
    journal.write_bytes(journal.read_bytes() + b'{"pixels": "torn')
    done = journal.read_bytes().count(b"\n") - 1
    told = []
    made = preparing.prepare("retinopathy", source, tmp_path, SIDE, progress=lambda *now: told.append(now))
    assert 5 <= done < 28
    assert told == [(number, 28) for number in range(done, 29)]
    assert made.digest == whole.digest
    for file in (photographs.PIXELS, photographs.INDEX):
        assert (folder / file).read_bytes() == (whole.folder / file).read_bytes()


def test_of_two_at_once_one_waits_and_the_command_refuses(source, whole, tmp_path, capsys):
    process, folder = begun(source, tmp_path)
    code, _, told = call(
        capsys, "data", "prepare", "retinopathy", "--source", source, "--size", SIDE, "--data-dir", tmp_path
    )
    assert (code, told) == (2, f"bench: {folder} is being written by another process\n")
    made = preparing.prepare(
        "retinopathy", source, tmp_path, SIDE, progress=lambda done, of: pytest.fail("made")
    )
    assert made.digest == whole.digest == process.communicate()[0].strip()


def test_what_was_begun_otherwise_begins_anew(source, whole, tmp_path):
    folder = tmp_path / f"retinopathy-{SIDE}-resize"
    folder.mkdir()
    header = {"schema": 0}
    for content in (b"", b"no json\n", json.dumps(header).encode() + b'\n{"pixels": "x"}\n'):
        (folder / photographs.UNFINISHED).write_bytes(content)
        (folder / photographs.PIXELS).write_bytes(b"x" * 3000)
        assert preparing.prepare("retinopathy", source, tmp_path, SIDE).digest == whole.digest
        (folder / photographs.INDEX).unlink()


def test_pixels_lost_behind_the_journal_begin_anew(source, whole, tmp_path, monkeypatch):
    def stopped(done, of):
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        preparing.prepare("retinopathy", source, tmp_path, SIDE, progress=stopped)
    folder = tmp_path / f"retinopathy-{SIDE}-resize"
    assert (folder / photographs.UNFINISHED).read_bytes().count(b"\n") == 6
    (folder / photographs.PIXELS).write_bytes(b"")
    assert preparing.prepare("retinopathy", source, tmp_path, SIDE).digest == whole.digest


# ---------------------------------------------------------------------------------------------- other layouts


def test_aptos_is_split_by_a_hash_that_is_the_same_for_ever(tmp_path):
    folder = tmp_path / "aptos"
    (folder / "train_images").mkdir(parents=True)
    names = [f"{number:012x}" for number in range(40)]
    for row, name in enumerate(names):
        Image.fromarray(disc(30, 20, 9, seed=row, noise=20)).save(folder / "train_images" / f"{name}.png")
    write_csv(
        folder / "train.csv", ["id_code", "diagnosis"], [[name, row % 5] for row, name in enumerate(names)]
    )
    found = preparing.prepare("retinopathy_aptos", folder, tmp_path, SIDE)
    assert sorted(found.names) == names
    assert len(set(found.patients.tolist())) == 40
    for name, level, part in zip(found.names, found.levels, found.parts, strict=True):
        assert level == int(name, 16) % 5
        drawn = int.from_bytes(hashlib.sha256(f"0/aptos/{name}".encode()).digest()[:8], "big") / 2**64
        assert part == ("test" if drawn < 0.2 else "val" if drawn < 0.3 else "train")
    assert {"train", "val", "test"} == set(found.parts)


def medmnist(path, side=28, **changed):
    draw = np.random.default_rng(0)
    arrays = {}
    for part, number in (("train", 6), ("val", 2), ("test", 3)):
        arrays[f"{part}_images"] = draw.integers(0, 256, (number, side, side, 3), dtype=np.uint8)
        arrays[f"{part}_labels"] = draw.integers(0, 5, (number, 1), dtype=np.uint8)
    arrays |= changed
    np.savez_compressed(path, **{name: array for name, array in arrays.items() if array is not None})
    return arrays


@pytest.mark.parametrize("side", [28, 64])
def test_retinamnist_is_taken_as_published(tmp_path, side):
    file = tmp_path / f"retinamnist_{side}.npz"
    arrays = medmnist(file, side)
    found = preparing.prepare("retinamnist", tmp_path, tmp_path)
    assert found.folder.name == f"retinamnist-{side}-resize"
    for part in ("train", "val", "test"):
        assert np.array_equal(found.images[found.parts == part], arrays[f"{part}_images"])
        assert np.array_equal(found.levels[found.parts == part], arrays[f"{part}_labels"].ravel())
    assert preparing.prepare("retinamnist", file, tmp_path, 32).images.shape == (11, 32, 32, 3)
    assert preparing.prepare("retinamnist", file, tmp_path, 32, "contrast").images.shape == (11, 32, 32, 3)


BAD_NPZ = {
    "no zip": (lambda path: path.write_bytes(b"spoilt"), "expected RetinaMNIST's .npz, which cannot be read"),
    "cut off": (
        lambda path: (medmnist(path), path.write_bytes(path.read_bytes()[:3000])),
        "expected RetinaMNIST's .npz, which cannot be read",
    ),
    "pickled": (
        lambda path: medmnist(path, val_labels=np.array([[0], [None]])),
        "expected RetinaMNIST's .npz, which cannot be read",
    ),
    "grey": (
        lambda path: medmnist(path, val_images=np.zeros((2, 28, 28), np.uint8)),
        r"expected val_images \[N, side, side, 3\] of uint8, .* found \[2, 28, 28\] of uint8",
    ),
    "an array less": (lambda path: medmnist(path, test_labels=None), "lacks an array, .*test_labels"),
    "a label less": (
        lambda path: medmnist(path, val_labels=np.zeros((1, 1), np.uint8)),
        r"expected val_labels of 2 integers, found \[1, 1\] of uint8",
    ),
    "two sizes": (
        lambda path: medmnist(path, val_images=np.zeros((2, 64, 64, 3), np.uint8)),
        "expected images of one size, found sides of {64, 28} pixels",
    ),
    "no file": (lambda path: None, "expected one file retinamnist.*npz, found none"),
}


@pytest.mark.parametrize(("spoil", "message"), BAD_NPZ.values(), ids=BAD_NPZ)
def test_another_npz_is_one_line(tmp_path, spoil, message):
    spoil(tmp_path / "retinamnist.npz")
    with pytest.raises(DataError, match=message) as info:
        preparing.prepare("retinamnist", tmp_path, tmp_path)
    one_line(info)


def test_retinamnist_of_other_levels_is_listed(tmp_path):
    medmnist(tmp_path / "x.npz", val_labels=np.array([[3], [5]], np.uint8))
    found = preparing.prepare("retinamnist", tmp_path / "x.npz", tmp_path)
    assert found.bad == [("val_0001", "level 5 is none of 0 to 4")]
    assert len(found.names) == 10


# -------------------------------------------------------------------------------- bench data list, get, check


@pytest.mark.parametrize("name", photographs.SOURCES)
def test_what_is_missing_is_one_line_with_every_step(name, capsys, tmp_path):
    code, printed, told = call(capsys, "data", "get", name, "--data-dir", tmp_path)
    assert (code, printed, told.count("\n")) == (3, "", 1)
    steps = {
        "retinopathy": (
            "diabetic-retinopathy-detection",
            "trainLabels.csv",
            "retinopathy_solution.csv",
            "unzip",
        ),
        "retinopathy_synthetic": ("bench data make retinopathy_synthetic",),
        "retinopathy_aptos": ("aptos2019-blindness-detection", "train.csv", "train_images/*.png", "unzip"),
        "retinamnist": ("retinamnist_64.npz", "medmnist"),
    }
    for step in (*steps[name], f"`bench data prepare {name} --source DIR"):
        assert step in told
    with pytest.raises(
        DataError, match=rf"prepare {name} --source DIR --size 33 --preprocess contrast`"
    ) as info:
        photographs.prepared(name, tmp_path, 33, "contrast")
    one_line(info)


def test_list_get_and_check_know_the_prepared(whole, capsys, tmp_path, source):
    root = tmp_path / "d"
    shutil.copytree(whole.folder, root / whole.folder.name)
    (root / "retinopathy-9-contrast").mkdir(parents=True)
    (root / "retinopathy-9-contrast" / "unfinished.jsonl").write_bytes(b"")
    code, printed, _ = call(capsys, "data", "list", "--data-dir", root, "--format", "json")
    assert code == 0
    found = {row["name"]: row["found in"] for row in json.loads(printed)}
    assert found["retinopathy"] == f"{root}/retinopathy-{SIDE}-resize"
    assert found["retinamnist"] == "not here"
    assert call(capsys, "data", "get", "retinopathy", "--data-dir", root)[:2] == (
        0,
        found["retinopathy"] + "\n",
    )
    code, printed, _ = call(capsys, "data", "check", "retinopathy", "--data-dir", root)
    assert code == 0
    assert (
        f"16 train, 4 val, 8 test photographs of {SIDE} x {SIDE} pixels, 0 left out, sha256 {whole.digest}"
        in printed
    )
    shutil.rmtree(root / f"retinopathy-{SIDE}-resize")
    assert photographs.find("retinopathy", root) == f"unfinished: {root}/retinopathy-9-contrast"


@pytest.mark.parametrize("file", ["images.u8", "index.json"])
def test_check_finds_one_flipped_byte_wherever_it_is(whole, capsys, tmp_path, file):
    folder = Path(shutil.copytree(whole.folder, tmp_path / whole.folder.name))
    content = (folder / file).read_bytes()
    places_ = np.random.default_rng(0).choice(len(content), 12, replace=False)
    for place in places_:
        flipped = bytearray(content)
        flipped[place] ^= 1
        (folder / file).write_bytes(flipped)
        code, printed, told = call(capsys, "data", "check", "retinopathy", "--data-dir", tmp_path)
        if file == "index.json" and chr(content[place]).isspace() and chr(flipped[place]).isspace():
            continue  # between the words of the index
        assert (code, printed, told.count("\n")) == (3, "", 1), (place, told)
        assert f"{file} is damaged" in told
    (folder / file).write_bytes(content[:-1])
    assert call(capsys, "data", "check", "retinopathy", "--data-dir", tmp_path)[0] == 3
    (folder / file).unlink()
    assert call(capsys, "data", "check", "retinopathy", "--data-dir", tmp_path)[0] == 3
