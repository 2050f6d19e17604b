"""What a task poses: examples, network, likelihood, prior, and how much may be spent. Part of the contracts.

`bench.contract` hands these names on. Shapes: S weight samples, B examples of a batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.utils.data import TensorDataset

from bench.predictions import Prediction

WeightDistribution = Mapping[str, Distribution]
"""A distribution over weights: parameter name -> distribution whose one event is the whole tensor.

A distribution that couples several tensors stands alone under the key `JOINT`, over the ravelled vector `[d]`
(`bench.weights.ravel`). A distribution whose `normalised` attribute is False has no normaliser: a method
may use it as prior, but the run then has no ELBO.
"""

JOINT = "*"
Prior = Callable[[Mapping[str, Tensor]], WeightDistribution]
"""Makes the prior for a dictionary of parameters. It depends on their shapes and device, not their values."""


class Batch(NamedTuple):
    """Examples: inputs `[B, ...]`, targets `[B, ...]`, and weights `[B]` that multiply the log likelihood."""

    inputs: Tensor
    targets: Tensor
    weights: Tensor | None = None


class Likelihood(nn.Module, ABC):
    """How outputs explain a target. Its own parameters (a learned noise) are trained with the method's."""

    @abstractmethod
    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Log likelihood of each example under each sample, `[S, B]`, from outputs `[S, B, ...]`, in nats."""

    @abstractmethod
    def predict(self, outputs: Tensor) -> Prediction:
        """The prediction that outputs `[S, B, ...]` stand for."""

    def fisher(self, outputs: Tensor) -> Tensor | None:
        """Expected Hessian of the NLL in outputs `[B, C]`, `[B, C, C]`, the expectation over targets.

        None where the Hessian is that whatever the target, as of all whose outputs are natural parameters.
        """
        return None


class Stored(ABC):
    """Examples `(input, target)` on disk, perhaps more than memory holds.

    Loader processes call `read`, so that it must neither draw nor depend on the process; the device then has
    raw inputs turned into what the network takes by `finish`. In training `finish` augments: all that is
    random in it are the numbers that it is handed.
    """

    num_uniforms: int = 0
    """Random numbers per example that an augmentation takes; 0 is none."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of examples."""

    @abstractmethod
    def read(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs `[B, ...]` as they are stored, such as uint8, and targets `[B, ...]` of rows `[B]`."""

    @abstractmethod
    def finish(self, inputs: Tensor, uniforms: Tensor | None) -> Tensor:
        """Inputs `[B, ...]` as the network takes them, each from its own stored input and numbers alone.

        Args:
            inputs: As `read` gave them, on the device.
            uniforms: Independent uniform numbers on [0, 1), `[B, num_uniforms]`; None augments nothing.
        """

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        """Input and target of one example, not augmented."""
        if not 0 <= row < len(self):
            raise IndexError(row)
        inputs, targets = self.read(torch.tensor([row]))
        return self.finish(inputs, None)[0], targets[0]


class NetworkFactory(Protocol):
    """Makes a fresh plain module; its initial weights come from torch's global generator."""

    def __call__(self, dropout: float = 0.0, width: float = 1.0) -> nn.Module:
        """A fresh network.

        Args:
            dropout: Rate of dropout, a fraction from 0 to below 1.
            width: The network has, as nearly as whole channels allow, width^2 times the parameters of width
                1. Given for problems with `equal_parameters` alone: other factories need not take it.
        """


@dataclass(frozen=True)
class Problem:
    """What a task poses: a model and data.

    `train` and `val` hold examples `(input, target)` or `(input, target, weight)`, or `Stored` ones.
    `num_train` is the number of examples that the likelihood counts (rows, not their weights). With
    `equal_parameters` methods are compared at equal numbers of trained parameters: one that trains k per
    weight gets a network of width k^-1/2 (`bench.contract.Method.made_for`). `starts_from` gives the weights,
    name -> tensor, from which all chains of a sampler start; None leaves each at a fresh network of its own.
    Methods without chains do not look at it.
    """

    network: NetworkFactory
    likelihood: Likelihood
    prior: Prior
    train: TensorDataset | Stored
    val: TensorDataset | Stored | None
    num_train: int
    equal_parameters: bool = False
    starts_from: Callable[[], Mapping[str, Tensor]] | None = None


@dataclass(frozen=True)
class Budget:
    """The most that a method may spend on one fit; the task poses it.

    No epochs leave a method at its start. `batch_size` None means full batch. `patience` ends a fit after so
    many epochs without a better validation NLL and keeps the best epoch; None trains to the end. Without
    validation examples the training loss takes the NLL's place. `draws` is the number of examples in an
    epoch, permutation after permutation of the data; None means each example once.
    """

    epochs: int
    batch_size: int | None = None
    patience: int | None = None
    draws: int | None = None
