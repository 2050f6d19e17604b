"""Predictions of long HMC chains on CIFAR-10's test images: the reference of fidelity_cifar10, by its digest.

They are the mean class probabilities that the NeurIPS 2021 competition on approximate inference published for
ResNet-20-FRN with swish under a normal prior. Their repository states no licence, so this project has their
digest and not their numbers: who has downloaded them brings them into CIFAR-10's own order by
`bench data prepare cifar10_hmc --source probs.csv`.

Source: Wilson et al. 2022, "Evaluating Approximate Inference in Bayesian Deep Learning"; Izmailov et al.
2021, "What Are Bayesian Neural Network Posteriors Really Like?" (how such chains are run).
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bench.data import array_digest, not_published
from bench.errors import DataError
from bench.system import places
from bench.system.files import write

MEAN, STD = (0.49, 0.48, 0.44), 0.2
"""Of the channels, 1 is white; as published, for training and test images."""
FILE = "cifar10_resnet20_hmc.npz"
ARRAY = "probabilities"
TEST, CLASSES = 10_000, 10


@dataclass(frozen=True)
class ChainSource:
    """Where predictions of chains come from and what their content must be.

    Attributes:
        title: What they are.
        digest: `bench.data.array_digest` of their array, in the order of the test images.
        origin: Where they are published, in another order (`in_order`).
        licence: The terms under which they may be used.
        examples: What they predict.
    """

    title: str
    digest: str
    origin: str
    licence: str
    examples: str


SOURCES = {
    "cifar10_hmc": ChainSource(
        "predictions of HMC chains on CIFAR-10",
        "98622c0b4744e6ce08463a5d3ec23997bfc3da49e8c07dd0e619dd7535cd99ec",
        "https://github.com/izmailovpavel/neurips_bdl_starter_kit, data/cifar10/probs.csv",
        "none stated by its authors",
        "10000 test images",
    )
}


def standardised(images: np.ndarray) -> Tensor:
    """Images uint8 `[B, 3, 32, 32]` as the network of the chains takes them."""
    return (torch.from_numpy(images).float() / 255 - torch.tensor(MEAN)[:, None, None]) / STD


def levels(inputs: Tensor) -> Tensor:
    """Images uint8 `[B, 3, 32, 32]` of what `standardised` gave."""
    mean = torch.tensor(MEAN, device=inputs.device)[:, None, None]
    return ((inputs * STD + mean) * 255).round().clamp(0, 255).byte()


def in_order(published: np.ndarray) -> np.ndarray:
    """Published rows `[N, C]` in the order of the test images.

    The published ones are in that of TFDS: row k is of the example whose MD5 of "test" and its number is the
    k-th in size.
    """
    numbers = sorted(range(len(published)), key=lambda i: hashlib.md5(b"test%d" % i).hexdigest())
    found = np.empty_like(published)
    found[numbers] = published
    return found


def prepare(source: Path | str, data_dir: Path | str | None = None) -> Path:
    """Brings the published `probs.csv` into the order of the test images; returns the file written.

    Args:
        source: The published file: a row of ten probabilities per test image.
        data_dir: Folder to write to; None is the first folder of the search for data.

    Raises:
        DataError: The file cannot be read, or is not the published one.
        OutputError: The result cannot be written.
    """
    try:
        rows = np.loadtxt(source, delimiter=",", dtype=np.float32, ndmin=2)
    except (OSError, ValueError) as error:
        raise DataError(f"{source}: cannot be read ({' '.join(str(error).split())})") from None
    if rows.shape != (TEST, CLASSES):
        raise DataError(f"{source}: expected {TEST} rows of {CLASSES} probabilities, found {rows.shape}")
    chains, known = in_order(rows), SOURCES["cifar10_hmc"]
    if (digest := array_digest({ARRAY: chains})) != known.digest:
        raise not_published(Path(source), known.title, known.digest, digest)
    file = io.BytesIO()
    np.savez_compressed(file, probabilities=chains)
    path = places.roots(data_dir)[0] / FILE
    write(path, file.getvalue())
    return path


def _locate(name: str, data_dir: Path | str | None) -> tuple[Path, np.ndarray]:
    """The place of the file and its probabilities `[10000, 10]`, verified to be the published ones."""
    source, roots = SOURCES[name], places.roots(data_dir)
    for path in (root / FILE for root in roots):
        if not path.is_file():
            continue
        try:
            with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as arrays:
                found = arrays[ARRAY].astype(np.float32, copy=False)
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise DataError(f"{path}: no array {ARRAY} ({' '.join(str(error).split())})") from None
        if (digest := array_digest({ARRAY: found})) != source.digest:
            raise not_published(path, source.title, source.digest, digest)
        return path, found
    raise places.NotFound(
        f"{name} ({source.title}) is not here: download {source.origin}, then run `bench data prepare {name} "
        f"--source probs.csv`; {FILE} was looked for in {', '.join(map(str, roots))}"
    )


def _told(source: ChainSource, chains: np.ndarray) -> str:
    return f"{source.title}, {source.examples}, as published (sha256 {array_digest({ARRAY: chains})})"


_CHAINS = places.Door("data set", SOURCES, _locate, lambda *_: None, _told)
find, get, check = _CHAINS.find, _CHAINS.get, _CHAINS.check


def load(data_dir: Path | str | None = None) -> np.ndarray:
    """Mean probabilities of the chains, float32 `[10000, 10]`, in the order of CIFAR-10's test images.

    Args:
        data_dir: Folder to look in first.

    Raises:
        DataError: If they are not here, with the way to have them, or are not the published ones.
    """
    return _CHAINS.load("cifar10_hmc", data_dir)
