"""Batches of a data set for one fit: in a new order every epoch, the same for the same seed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler, TensorDataset, default_collate

from bench import randomness
from bench.contract import Batch
from bench.errors import UsageError


class TensorBatches:
    """Batches of a data set that lies in memory, in a new order every epoch.

    Args:
        tensors: Inputs `[N, ...]`, targets `[N, ...]` and perhaps weights `[N]`.
        batch_size: Examples per batch; None is all of them.
        seed: Of the orders; None keeps the data set's own order.
        ranks: (rank, number of processes): every process takes its share of each epoch.
        draws: Examples in an epoch of batches, permutation after permutation of the data; None is each once.
    """

    def __init__(
        self,
        tensors: tuple[Tensor, ...],
        batch_size: int | None,
        seed: int | None,
        ranks: tuple[int, int],
        draws: int | None = None,
    ) -> None:
        self.tensors, self.seed, self.ranks = tensors, seed, ranks
        self.draws = draws if draws and batch_size else len(tensors[0])
        self.rows = self.draws // ranks[1]
        self.batch_size = min(batch_size or self.rows, self.rows)
        self.epoch = 0
        if seed is not None:  # Lightning takes what has a sampler for a DataLoader, but for set_epoch
            self.sampler = self

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of the next pass."""
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-self.rows // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        rank, world = self.ranks
        if self.seed is None or (self.batch_size == self.rows == len(self.tensors[0]) and world == 1):
            for parts in zip(*(t.split(self.batch_size) for t in self.tensors), strict=True):
                yield Batch(*parts)
            return
        generator, size = randomness.generator(self.seed, self.epoch), len(self.tensors[0])
        passes = [torch.randperm(size, generator=generator) for _ in range(-(-self.draws // size))]
        order = torch.cat(passes)[: self.draws]
        for index in order[rank::world][: self.rows].split(self.batch_size):
            yield Batch(*(t[index] for t in self.tensors))


class _EpochGenerator(Sampler):
    """Order of a data set that is read from disk; new every epoch."""

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.seed, self.epoch = size, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.size, generator=randomness.generator(self.seed, self.epoch)).tolist())


def _collate(rows: list[Any]) -> Batch:
    return Batch(*default_collate(rows))


def batches(
    dataset: Dataset,
    batch_size: int | None,
    seed: int | None,
    ranks: tuple[int, int] = (0, 1),
    draws: int | None = None,
) -> TensorBatches | DataLoader:
    """Batches of any data set; those in memory are sliced, others go through a DataLoader.

    Raises:
        UsageError: If `draws` are asked of a data set that does not lie in memory.
    """
    if isinstance(dataset, TensorDataset):
        return TensorBatches(dataset.tensors, batch_size, seed, ranks, draws)
    if draws is not None:
        raise UsageError("a budget with draws needs a data set in memory, a TensorDataset")
    size = len(dataset)  # type: ignore[arg-type]
    if seed is None:
        return DataLoader(dataset, batch_size or size, collate_fn=_collate)
    sampler = (
        DistributedSampler(dataset, ranks[1], ranks[0], seed=seed % 2**31, drop_last=True)
        if ranks[1] > 1
        else _EpochGenerator(size, seed)
    )
    source = randomness.generator(seed, "workers")
    return DataLoader(dataset, batch_size or size, sampler=sampler, collate_fn=_collate, generator=source)


class OnDevice:
    """The batches of a loader, on a device.

    Args:
        loader: Gives batches, as often as it is walked.
        device: Where to.
    """

    def __init__(self, loader: Iterable[Batch], device: torch.device) -> None:
        self.loader, self.device = loader, device

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.loader:
            yield Batch(*(part.to(self.device) for part in batch if part is not None))
