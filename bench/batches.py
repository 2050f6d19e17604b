"""Batches of a data set for one fit: in a new order every epoch, the same for the same seed."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Self

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from bench import randomness
from bench.contract import Batch, Stored
from bench.errors import UsageError

CPU = torch.device("cpu")

_LARGEST_PIECE = 50_000_000
"""Floats of inputs, or of outputs, that one piece of a prediction may hold."""
_LARGEST_ON_DEVICE = 2**31
"""Bytes of a data set in memory that is brought to a device whole; of a larger one every batch is."""


class _Ordered:
    """Which rows make the batches of an epoch.

    Args:
        size: Number of examples.
        batch_size: Examples per batch; None is all of them.
        seed: Of the orders; None keeps the data set's own order.
        ranks: (rank, number of processes): every process takes its share of each batch.
        draws: Examples in an epoch of batches, permutation after permutation of the data; None is each once.
    """

    def __init__(
        self,
        size: int,
        batch_size: int | None,
        seed: int | None,
        ranks: tuple[int, int] = (0, 1),
        draws: int | None = None,
    ) -> None:
        self.size, self.seed, self.ranks = size, seed, ranks
        self.draws = draws if draws and batch_size else size
        self.batch_size = min(batch_size or self.draws, self.draws)
        self.epoch = 0
        self.handed_out = (0, 0)
        """Examples of the last batch: those of this process, and all."""
        if seed is not None:  # Lightning takes what has a sampler for a DataLoader, but for set_epoch
            self.sampler = self

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of the next pass."""
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-self.draws // self.batch_size)

    @property
    def in_own_order(self) -> bool:
        """Whether every pass is that of the data set itself, in which nothing is drawn."""
        return self.seed is None or self.batch_size == self.draws == self.size

    def order(self) -> Tensor:
        """Rows of this epoch, one after another; beyond the data set's size, pass by pass.

        The row r of pass p is given as p * size + r.
        """
        if self.in_own_order:
            return torch.arange(self.size)
        assert self.seed is not None
        generator, passes = randomness.generator(self.seed, self.epoch), -(-self.draws // self.size)
        drawn = [p * self.size + torch.randperm(self.size, generator=generator) for p in range(passes)]
        return torch.cat(drawn)[: self.draws]

    @property
    def whole(self) -> Self:
        """The batches of the present epoch with the shares of all processes."""
        if self.ranks[1] == 1:
            return self
        found = copy.copy(self)
        found.ranks = (0, 1)
        return found

    def share(self, rows: Tensor) -> Tensor:
        """The rows of a batch that this process has; if it has none the first, which does not count."""
        rank, world = self.ranks
        own = rows[rank::world]
        self.handed_out = (len(own), len(rows))
        return own if len(own) else rows[:1]


class TensorBatches(_Ordered):
    """Batches of a data set that lies in memory, in a new order every epoch.

    Args:
        tensors: Inputs `[N, ...]`, targets `[N, ...]` and perhaps weights `[N]`.
        order: As of `batches`.
        device: Where batches are gathered: all examples are brought there once, unless they are too large.
    """

    def __init__(
        self,
        tensors: tuple[Tensor, ...],
        batch_size: int | None,
        seed: int | None,
        ranks: tuple[int, int] = (0, 1),
        draws: int | None = None,
        device: torch.device = CPU,
    ) -> None:
        super().__init__(len(tensors[0]), batch_size, seed, ranks, draws)
        self.tensors = tensors
        self.device = device if sum(t.nbytes for t in tensors) <= _LARGEST_ON_DEVICE else CPU

    def __iter__(self) -> Iterator[Batch]:
        self.tensors = tuple(t.to(self.device) for t in self.tensors)
        if self.in_own_order and self.ranks[1] == 1:
            for parts in zip(*(t.split(self.batch_size) for t in self.tensors), strict=True):
                yield Batch(*parts)
            return
        for rows in (self.order() % self.size).to(self.device).split(self.batch_size):
            own = self.share(rows)
            yield Batch(*(t[own] for t in self.tensors))


class StoredBatches(_Ordered):
    """Batches of a data set on disk: read by loader processes, finished on the device.

    The numbers behind the augmentation of an example are drawn from (seed, epoch, row): neither the batches
    nor the number of loader processes change them. Lightning keeps `state_dict` in its checkpoints, so that
    an epoch goes on where it was stopped.

    Args:
        examples: What is stored.
        device: Where batches are finished and left.
        workers: Processes that read ahead; 0 reads when a batch is asked for.
        augment: Whether examples are augmented.
    """

    def __init__(
        self,
        examples: Stored,
        batch_size: int | None,
        seed: int | None,
        ranks: tuple[int, int] = (0, 1),
        draws: int | None = None,
        device: torch.device = CPU,
        workers: int = 0,
        augment: bool = True,
    ) -> None:
        super().__init__(len(examples), batch_size, seed, ranks, draws)
        self.examples, self.device, self.workers = examples, device, workers
        self.augment = augment and seed is not None and examples.num_uniforms > 0
        self._done = 0  # batches of the present pass that were handed out
        self._restored: dict[str, int] = {}

    def state_dict(self) -> dict[str, int]:
        """How far the present pass is."""
        return {"epoch": self.epoch, "done": self._done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Has the next pass begin where `state_dict` was asked, if it is of the same epoch."""
        self._restored = state

    def __iter__(self) -> Iterator[Batch]:
        restored, self._restored = self._restored, {}
        self._done = restored["done"] if restored.get("epoch") == self.epoch else 0
        rows = list(self.order().split(self.batch_size))[self._done :]
        own = [self.share(batch) for batch in rows]
        reader = DataLoader(
            _Reads(self.examples, own, (self.seed, self.epoch) if self.augment else None),
            batch_size=None,
            num_workers=self.workers,
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator().manual_seed(0),  # of the workers' seeds, from which nothing is drawn
        )
        for batch, (inputs, targets, *uniforms) in zip(rows, reader, strict=True):
            self._done += 1
            self.share(batch)
            moved = [part.to(self.device, non_blocking=True) for part in (inputs, *uniforms)]
            finished = self.examples.finish(moved[0], moved[1] if uniforms else None)
            yield Batch(finished, targets.to(self.device, non_blocking=True))


class _Reads(Dataset):
    """The batches of an epoch as stored, and the uniform numbers `[B, U]` of their augmentation."""

    def __init__(self, examples: Stored, rows: list[Tensor], key: tuple[int | None, int] | None) -> None:
        self.examples, self.rows, self.key = examples, rows, key

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        rows = self.rows[index]
        read = self.examples.read(rows % len(self.examples))
        if self.key is None:
            return read
        seed, epoch = self.key
        assert seed is not None
        sources = (randomness.generator(seed, "augment", epoch, row) for row in rows.tolist())
        drawn = [torch.rand(self.examples.num_uniforms, generator=source) for source in sources]
        return *read, torch.stack(drawn)


def batches(
    examples: TensorDataset | Stored,
    batch_size: int | None,
    seed: int | None,
    ranks: tuple[int, int] = (0, 1),
    draws: int | None = None,
    device: torch.device = CPU,
    workers: int = 0,
    augment: bool = True,
) -> TensorBatches | StoredBatches:
    """Batches of examples in memory or on disk; see `_Ordered` and `StoredBatches` for the arguments.

    Raises:
        UsageError: If the examples are neither.
    """
    if isinstance(examples, TensorDataset):
        return TensorBatches(examples.tensors, batch_size, seed, ranks, draws, device)
    if isinstance(examples, Stored):
        return StoredBatches(examples, batch_size, seed, ranks, draws, device, workers, augment)
    raise UsageError(f"examples must be a TensorDataset or a Stored, not a {type(examples).__name__}")


def inputs_of(inputs: Tensor | Stored, rows: slice, device: torch.device) -> Tensor:
    """Inputs of some rows on a device, as a network takes them; those on disk are read, not augmented."""
    if not isinstance(inputs, Stored):
        return inputs[rows].to(device)
    raw = inputs.read(torch.arange(len(inputs))[rows])[0]
    return inputs.finish(raw.to(device), None)


def few(examples: TensorDataset | Stored) -> Tensor:
    """Inputs `[B, ...]` of the first examples, two where there are two: enough to try something on."""
    return torch.stack([examples[row][0] for row in range(min(2, len(examples)))])


def most_rows(inputs: Tensor | TensorDataset | Stored, outputs: int = 0) -> int:
    """Rows, at least 1, that one piece of bounded memory may have, at so many floats of output per row."""
    first = inputs[0] if isinstance(inputs, Tensor) else inputs[0][0]
    return max(1, _LARGEST_PIECE // max(first.numel(), outputs, 1))


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
