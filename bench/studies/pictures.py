"""Small images of classes for tasks that test on other images than they train on.

Images are in whole levels of 255; those predicted may be corrupted when they are read.

Shapes: N images, C channels, H = W pixels, B images of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from bench import cifar, corruptions, data, likelihoods, networks, priors, randomness, resnet
from bench.contract import Arrays, Problem, Stored, Task
from bench.data import array_digest

MADE = ("noise", "shuffled")
"""Foreign images that are made, not read: uniform noise; known images with their pixels shuffled."""


class Pictures(NamedTuple):
    """A data set in whole levels: images uint8 `[N, C, H, W]`, labels `[N]`; digest of what was read."""

    train: np.ndarray
    train_labels: np.ndarray
    test: np.ndarray
    test_labels: np.ndarray
    digest: str


def load(name: str, data_dir: str | None) -> Pictures:
    """A data set of `bench.data` or `bench.cifar`.

    Raises:
        DataError: As there.
    """
    if name in cifar.SOURCES:
        found = cifar.load(name, data_dir)
        train, train_labels = found["train_inputs"], found["train_labels"]
        digest = array_digest(found)
        return Pictures(train, train_labels, found["test_inputs"], found["test_labels"], digest)
    images = data.load(name, data_dir)
    train, test = (
        (255 * inputs).round().clamp(0, 255).byte().numpy()
        for inputs in (images.train_inputs, images.test_inputs)
    )
    return Pictures(train, images.train_labels.numpy(), test, images.test_labels.numpy(), images.digest)


def evenly(size: int, wanted: int | None) -> np.ndarray:
    """Numbers of `wanted` of `size` images, evenly spread; of all if there are fewer, or None are wanted."""
    count = min(size, wanted or size)
    return np.arange(count) * size // count


def foreign(name: str, known: np.ndarray, data_dir: str | None) -> np.ndarray:
    """As many foreign images uint8 `[N, C, H, W]` as there are known ones, of the same form.

    Args:
        name: One of `MADE`, whose images each have a generator of their own, or a data set's.
        known: Test images `[N, C, H, W]`.
        data_dir: Folder of data sets.
    """
    if name not in MADE:
        test = load(name, data_dir).test
        return test[evenly(len(test), len(known))]
    own = (randomness.generator(0, "shift", name, number) for number in range(len(known)))
    if name == "noise":
        return torch.stack([torch.randint(0, 256, known.shape[1:], generator=g) for g in own]).byte().numpy()
    flat = known.reshape(*known.shape[:2], -1)
    orders = (torch.randperm(flat.shape[2], generator=g).numpy() for g in own)
    return np.stack([image[:, order] for image, order in zip(flat, orders, strict=True)]).reshape(known.shape)


class ImageGroup(NamedTuple):
    """Images uint8 `[N, C, H, W]` that are predicted together, and how they are corrupted; None is not."""

    images: np.ndarray
    kind: str | None = None
    severity: int = 0


class ImageGroups(Stored):
    """Parts one after another, corrupted when they are read; their targets are zeros.

    Args:
        parts: What is predicted, all of one form.
        mean: Of the channels `[C, 1, 1]`, 1 is white.
        std: Their standard deviation `[C, 1, 1]`.
    """

    def __init__(self, parts: Sequence[ImageGroup], mean: Tensor, std: Tensor) -> None:
        self.parts, self.mean, self.std = parts, mean, std
        self.sizes = [len(part.images) for part in parts]

    def __len__(self) -> int:
        return sum(self.sizes)

    def read(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Images uint8 `[B, C, H, W]`."""
        numbers, ends = rows.numpy(), np.cumsum(self.sizes)
        of = np.searchsorted(ends, numbers, "right")
        found = np.empty((len(rows), *self.parts[0].images.shape[1:]), np.uint8)
        for i in np.unique(of):
            images, kind, severity = self.parts[i]
            own = numbers[of == i] - (ends[i] - self.sizes[i])
            found[of == i] = (
                images[own] if kind is None else corruptions.numbered(images[own], kind, severity, own)
            )
        return torch.from_numpy(found), torch.zeros(len(rows), dtype=torch.long)

    def finish(self, inputs: Tensor, uniforms: Tensor | None) -> Tensor:
        """Normalised, `[B, C, H, W]`."""
        return normalised(inputs, self.mean, self.std)


def normalised(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Images uint8 `[B, C, H, W]` as a network takes them, from moments `[C, 1, 1]` of levels from 0 to 1."""
    return (images.float() / 255 - mean.to(images.device)) / std.to(images.device)


def moments(images: np.ndarray) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the channels of uint8 `[N, C, H, W]`, `[C, 1, 1]` each; 1 is white."""
    shares = np.stack([np.bincount(channel.ravel(), minlength=256) for channel in images.swapaxes(0, 1)])
    shares, levels = shares / shares.sum(1, keepdims=True), np.arange(256) / 255
    mean = shares @ levels
    std = np.sqrt(shares @ levels**2 - mean**2).clip(1 / 255)
    found = [torch.from_numpy(moment).float()[:, None, None] for moment in (mean, std)]
    return found[0], found[1]


# ------------------------------------------------------------------------------------------------ the task

HELD_OUT, SHARE = 1000, 7
"""The parts val and calibration have at most so many images each, and at most one in so many."""
FOREIGN = {
    "digits": ("noise", "shuffled"),
    "mnist": ("fashion_mnist", "noise"),
    "fashion_mnist": ("mnist", "noise"),
    "cifar10": ("noise", "shuffled"),
}
"""Data set -> foreign ones."""
NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "small_cnn": networks.small_cnn,
    "resnet20": partial(resnet.preresnet_frn, 20),
}
DEFAULT_NETWORK = {"cifar10": "resnet20"}
"""Of other data sets it is small_cnn."""


class PictureTask(Task):
    """A task that fits to clean images of some classes and predicts others.

    It has the settings `dataset`, `network`, `channels`, `num_train` and `test_images` of `tasks/shift.py`.
    """

    num_classes = 10
    """Classes trained on: the first so many."""

    @property
    def foreign(self) -> tuple[str, ...]:
        """Names of the foreign data sets."""
        return FOREIGN[self.settings.dataset]

    @cached_property
    def pictures(self) -> Pictures:
        """The data set, read once."""
        return load(self.settings.dataset, self.data_dir)

    @cached_property
    def rows(self) -> dict[str, np.ndarray]:
        """Numbers of the images of every part: train, val and calibration of the training set; test."""
        size = len(self.pictures.train)
        order = torch.randperm(size, generator=randomness.generator(0, "shift", "split")).numpy()
        order = order[self.pictures.train_labels[order] < self.num_classes]
        held = min(HELD_OUT, len(order) // SHARE)
        val, of_sets, train = np.split(order, [held, 2 * held])
        test = evenly(len(self.pictures.test), self.settings.test_images)
        return {"train": train[: self.settings.num_train], "val": val, "calibration": of_sets, "test": test}

    @property
    def num_test(self) -> int:
        """Test images; needs no data."""
        name = self.settings.dataset
        published = cifar.TEST if name in cifar.SOURCES else data.SOURCES[name].test
        return len(evenly(published, self.settings.test_images))

    @property
    def test(self) -> np.ndarray:
        """Test images, uint8 `[N, C, H, W]`."""
        return self.pictures.test[self.rows["test"]]

    @cached_property
    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of each channel over the training images, `[C, 1, 1]`; 1 is white."""
        return moments(self.pictures.train[self.rows["train"]])

    def data_digest(self) -> str:
        """Digest of the data sets, foreign ones too, and of the rows of every part.

        Raises:
            DataError: If one of them is not there and cannot be had: before anything is trained.
        """
        digests = {self.settings.dataset: self.pictures.digest}
        for name in set(self.foreign) - set(MADE):
            digests[name] = load(name, self.data_dir).digest
        arrays = {name: np.frombuffer(bytes.fromhex(digest), np.uint8) for name, digest in digests.items()}
        return array_digest(arrays | self.rows)

    def examples(self, part: str) -> TensorDataset:
        """A part of the training set as the network takes it, and its labels."""
        rows = self.rows[part]
        images = normalised(torch.from_numpy(self.pictures.train[rows]), *self.moments)
        return TensorDataset(images, torch.from_numpy(self.pictures.train_labels[rows].astype(np.int64)))

    def problem(self) -> Problem:
        """The training images."""
        own, train = self.settings, self.examples("train")
        name = DEFAULT_NETWORK.get(own.dataset, "small_cnn") if own.network == "default" else own.network
        form = {"inputs": self.pictures.train.shape[1], "outputs": self.num_classes, "channels": own.channels}
        network, prior = partial(NETWORKS[name], **form), priors.normal(0, 1)
        return Problem(network, likelihoods.Categorical(), prior, train, self.examples("val"), len(train))

    def others(self) -> list[np.ndarray]:
        """The images of every foreign data set, each uint8 `[N, C, H, W]`."""
        return [foreign(name, self.test, self.data_dir) for name in self.foreign]

    def targets(self) -> Arrays:
        """Test labels `[N]`."""
        return {"labels": self.pictures.test_labels[self.rows["test"]].astype(np.uint8)}


def brightness(*sets: np.ndarray) -> np.ndarray:
    """Mean level of each image of F sets uint8 `[N, C, H, W]`, from 0 to 255, `[F, N]`, as it is stored."""
    return np.stack([images.mean((1, 2, 3), dtype=np.float64) for images in sets]).astype(np.float32)
