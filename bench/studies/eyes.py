"""Tasks on photographs of eyes: their parts, their labels, and how a network is fed with them.

A task on photographs has the settings `dataset`, `size`, `preprocess` and `images`, and perhaps `shift`, of
`bench.tasks.retinopathy`.
"""

from __future__ import annotations

import tempfile
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from bench import augmentation
from bench.contract import Stored, Task
from bench.data import array_digest
from bench.fresh import Fresh
from bench.spec import Arrays
from bench.system import places

if TYPE_CHECKING:
    from bench.photographs.photographs import Photographs

SICK = 2
"""The lowest severity of an eye that is called sick."""
SEVERE = 3
"""The lowest severity of the sick eyes on which the severity shift is tested."""
ABROAD = "retinopathy_aptos"
"""What the country shift is tested on."""
FEWEST = 20
"""Synthetic eyes that are drawn together at least."""
MEASURED = 1000
"""Training eyes, evenly spread, whose pixels give mean and standard deviation of the channels."""


class Selection:
    """Some of the prepared photographs: their images `[N, H, W, 3]`, uint8, read when they are asked for.

    Args:
        photographs: All.
        rows: Numbers of those that are meant, `[N]`.
    """

    def __init__(self, photographs: Photographs, rows: np.ndarray) -> None:
        self.photographs, self.rows = photographs, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> np.ndarray:
        return self.photographs.images[self.rows[index]]


class Eyes(Stored):
    """Photographs of eyes with their labels, augmented in training as in Farquhar 2022, B.3.

    Args:
        images: Gives uint8 `[B, H, W, 3]` for B row numbers.
        labels: 1 is sick, `[N]`.
        mean: Of the channels, over the training eyes, `[3]`.
        std: Their standard deviation, `[3]`.
    """

    num_uniforms = augmentation.NUM_UNIFORMS

    def __init__(self, images: Any, labels: np.ndarray, mean: Tensor, std: Tensor) -> None:
        self.images, self.labels = images, torch.from_numpy(labels)
        self.mean, self.std = mean, std

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Images uint8 `[B, 3, H, W]` and labels `[B]`."""
        pixels = torch.from_numpy(np.ascontiguousarray(self.images[rows.numpy()]))
        return pixels.permute(0, 3, 1, 2), self.labels[rows]

    def finish(self, inputs: Tensor, uniforms: Tensor | None) -> Tensor:
        """Normalised by channel, `[B, 3, H, W]`; turned, flipped, shifted and cropped by `uniforms`."""
        channels = self.mean.to(inputs.device), self.std.to(inputs.device)
        return augmentation.photographs(inputs, uniforms, *channels)


class PhotographTask(Task):
    """A task whose examples are photographs of eyes, prepared and in their published parts."""

    @property
    def shift(self) -> str:
        """How test eyes differ from training eyes: none, severity or country."""
        return getattr(self.settings, "shift", "none")

    def _prepared(self, dataset: str) -> Photographs:
        """Prepared photographs; synthetic ones are made and prepared unless as many are there."""
        from bench.photographs import photographs, preparing  # here, since to score a run takes none of them

        own = self.settings
        size = own.size, own.preprocess
        if dataset != "retinopathy_synthetic":
            return photographs.prepared(dataset, self.data_dir, *size)
        with suppress(places.NotFound):
            found = photographs.prepared(dataset, self.data_dir, *size)
            if len(found.names) + len(found.bad) == own.images:
                return found
        from bench.photographs import fundus

        made = fundus.find_or_make(self.data_dir, own.images, own.size, seed=0)
        return preparing.prepare(dataset, made, made, *size)

    @cached_property
    def photographs(self) -> Photographs:
        """The photographs that are trained on."""
        return self._prepared(self.settings.dataset)

    @cached_property
    def tested(self) -> Photographs:
        """The photographs that are tested on."""
        return self._prepared(ABROAD) if self.shift == "country" else self.photographs

    def rows(self, part: str) -> np.ndarray:
        """Numbers of the photographs of the part train, val or test."""
        source, shift = self.tested if part == "test" else self.photographs, self.shift
        if part == "test" and shift == "country":
            return np.arange(len(source.levels))
        is_in = source.parts == part
        if shift == "severity":
            mild, severe = source.levels < SICK, source.levels >= SEVERE
            is_in &= mild | severe if part == "test" else ~severe
        return np.flatnonzero(is_in)

    def own_data(self, part: str) -> tuple[Any, np.ndarray]:
        """Photographs uint8 `[N, H, W, 3]`, read when indexed, and labels `[N]` of train, val or test."""
        source, rows = self.tested if part == "test" else self.photographs, self.rows(part)
        return Selection(source, rows), (source.levels[rows] >= SICK).astype(np.int64)

    def data_digest(self) -> str:
        """Digest of the photographs' own digests, and of the rows of every part."""
        digests = {"trained": self.photographs.digest, "tested": self.tested.digest}
        arrays = {name: np.frombuffer(bytes.fromhex(d), np.uint8) for name, d in digests.items()}
        return array_digest(arrays | {part: self.rows(part) for part in ("train", "val", "test")})

    def eyes(self, part: str) -> Eyes:
        """A part, normalised by the training part's channels."""
        return self.normalised(*self.own_data(part))

    def normalised(self, images: Any, labels: np.ndarray) -> Eyes:
        """Photographs uint8 `[N, H, W, 3]` with labels `[N]`, normalised by the training part's channels."""
        return Eyes(images, labels, *self._channels)

    @cached_property
    def _channels(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of each channel, `[3]`, of MEASURED training eyes; 1 is white."""
        images, _ = self.own_data("train")
        some = np.unique(np.linspace(0, len(images) - 1, MEASURED).round().astype(int))
        counts = np.zeros((3, 256))
        for row in some:
            counts += [np.bincount(c.ravel(), minlength=256) for c in np.moveaxis(images[row], -1, 0)]
        shares, levels = counts / counts.sum(1, keepdims=True), np.arange(256) / 255
        mean = shares @ levels
        std = np.sqrt(shares @ levels**2 - mean**2).clip(min=1 / 255)
        return torch.from_numpy(mean).float(), torch.from_numpy(std).float()


class FreshEyes(Fresh):
    """Other synthetic eyes than the task's own, as many as it tests on, or the next even number."""

    def __init__(self, task: PhotographTask) -> None:
        self.task = task

    def draw(self, seed: int) -> tuple[Arrays, Arrays]:
        """Photographs uint8 `[N, H, W, 3]`; which are of sick eyes, and whose, a number per patient."""
        from bench.photographs import fundus, preparing

        own, wanted = self.task.settings, len(self.task.rows("test"))
        number = max(wanted + wanted % 2, FEWEST)
        with tempfile.TemporaryDirectory(prefix="bench-round-") as folder:
            made = fundus.make(Path(folder) / "made", number, own.size, seed, workers=1)
            drawn = preparing.prepare(own.dataset, made, folder, own.size, own.preprocess)
            images = np.array(drawn.images)
        patients = np.unique(drawn.patients, return_inverse=True)[1]
        labels = drawn.levels >= SICK
        return {"images": images}, {"labels": labels.astype(np.uint8), "patients": patients.astype(np.int32)}
