"""Explicit randomness: every generator is seeded from (seed, purpose), and global state is left alone."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def derive(seed: int, *purpose: str | int) -> int:
    """A seed in [0, 2^63) for one purpose of a run: a hash, so that purposes do not overlap."""
    text = "/".join(map(str, (seed, *purpose)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, *purpose: str | int, device: torch.device | str = "cpu") -> torch.Generator:
    """A fresh generator for one purpose of a run."""
    import torch  # here, since seeds alone need none

    return torch.Generator(device).manual_seed(derive(seed, *purpose))


def subset(size: int, count: int, generator: torch.Generator) -> torch.Tensor:
    """Numbers below `size` in random order, `[count]`: each once before any is taken again."""
    import torch

    order = torch.randperm(size, generator=generator, device=generator.device)
    return order.repeat(-(-count // size))[:count]


@contextmanager
def seeded(seed: int, *purpose: str | int) -> Iterator[None]:
    """Seeds torch's global generator inside the block and puts its old state back afterwards.

    For code that cannot be handed a generator: a network's own initialisation.
    """
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(derive(seed, *purpose))
        yield
