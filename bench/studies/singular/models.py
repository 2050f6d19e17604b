"""The models of `singular_evidence` by name: each with its truth, and what theory knows of it.

Shapes: N observations, inputs `[N, M]`, outputs `[N, K]`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import pairwise

import torch
from torch import Tensor, nn

from bench.studies.singular.evidence import LogEvidence, of_linear, of_tanh
from bench.studies.singular.tanh_network import TanhNetwork
from bench.studies.singular.theory import rlct_reduced_rank, rlct_tanh


class Model(ABC):
    """Observations are N(truth, I), and the truth is the model's function at certain weights.

    Args:
        hidden: H, the size of the model.
        true_weight: True value of every weight, where `has_true_weight`.
    """

    has_true_weight = True
    """Whether the weights of the truth have one value; False of a model with a truth of its own."""
    keeps_functions = False
    """Whether a run keeps draws of the function, which has one input and one output."""
    draws_evidence = False
    """Whether the log evidence is a mean over draws, which may miss what carries it."""

    def __init__(self, hidden: int, true_weight: float = 0.0) -> None:
        self.hidden, self.true_weight = hidden, true_weight

    @abstractmethod
    def inputs(self, num: int, generator: torch.Generator) -> Tensor:
        """Inputs `[num, M]`."""

    @abstractmethod
    def truth(self, inputs: Tensor) -> Tensor:
        """Noiseless observations `[N, K]`."""

    @abstractmethod
    def network(self, dropout: float = 0.0) -> nn.Module:
        """A network with initial weights; the size is the task's, so dropout does not change it."""

    @abstractmethod
    def learning_coefficient(self) -> tuple[float, int] | None:
        """Learning coefficient and multiplicity; None where none is known."""

    @property
    def num_weights(self) -> int:
        """D."""
        with torch.device("meta"):  # where nothing is drawn
            return sum(weight.numel() for weight in self.network().parameters())

    def finds_evidence(self, prior_mean: float) -> bool:
        """Whether log evidences are looked for."""
        return False

    def log_evidence(
        self, inputs: Tensor, observed: Tensor, mean: float, variance: float, generator: torch.Generator
    ) -> LogEvidence:
        """Log evidence of observations `[N]` under N(mean, variance) on every weight, unnormalised.

        Raises:
            NotImplementedError: If the model has none (`finds_evidence`).
        """
        raise NotImplementedError


class Tanh(Model):
    """y = sum_h b_h tanh(a_h x), x ~ U(-1, 1)."""

    keeps_functions = True
    draws_evidence = True

    def inputs(self, num: int, generator: torch.Generator) -> Tensor:
        """U(-1, 1)."""
        return 2 * torch.rand(num, 1, generator=generator) - 1

    def truth(self, inputs: Tensor) -> Tensor:
        """H w0 tanh(w0 x)."""
        return self.true_weight * self.hidden * torch.tanh(self.true_weight * inputs)

    def network(self, dropout: float = 0.0) -> nn.Module:
        """The network with weights a and b `[H]`."""
        return _small(TanhNetwork(self.hidden))

    def learning_coefficient(self) -> tuple[float, int] | None:
        """Known where the true weights are 0."""
        return None if self.true_weight else rlct_tanh(self.hidden)

    def finds_evidence(self, prior_mean: float) -> bool:
        """Whether there are few units; draws of a prior away from 0 may miss what carries the evidence."""
        return self.hidden <= 32 and prior_mean == 0

    def log_evidence(
        self, inputs: Tensor, observed: Tensor, mean: float, variance: float, generator: torch.Generator
    ) -> LogEvidence:
        """A mean over the inner weights."""
        x = inputs[:, 0]
        return of_tanh(x, observed, self.hidden, mean, variance, generator=generator)


class ReducedRank(Model):
    """y = B A x, x ~ N(0, I_M), M = H + 3, H outputs."""

    has_true_weight = False

    def inputs(self, num: int, generator: torch.Generator) -> Tensor:
        """N(0, I), `[num, H + 3]`."""
        return torch.randn(num, self.hidden + 3, generator=generator)

    def truth(self, inputs: Tensor) -> Tensor:
        """B0 A0 x, A0 = [I_H, ones(H, 3)] and B0 = I_H."""
        return inputs[:, : self.hidden] + inputs[:, self.hidden :].sum(1, keepdim=True)

    def network(self, dropout: float = 0.0) -> nn.Module:
        """The network with weights A and B."""
        return _linear(self.hidden + 3, self.hidden, self.hidden)

    def learning_coefficient(self) -> tuple[float, int] | None:
        """Learning coefficient of a truth of full rank."""
        return rlct_reduced_rank(self.hidden + 3, self.hidden, self.hidden, self.hidden)


class Linear(Model):
    """y = w . x, x ~ N(0, I_H): regular."""

    def inputs(self, num: int, generator: torch.Generator) -> Tensor:
        """N(0, I), `[num, H]`."""
        return torch.randn(num, self.hidden, generator=generator)

    def truth(self, inputs: Tensor) -> Tensor:
        """The sum of the inputs times w0."""
        return self.true_weight * inputs.sum(1, keepdim=True)

    def network(self, dropout: float = 0.0) -> nn.Module:
        """The network with weights w `[1, H]`."""
        return _linear(self.hidden, 1)

    def learning_coefficient(self) -> tuple[float, int] | None:
        """Half the number of weights, as of every regular model."""
        return self.hidden / 2, 1

    def finds_evidence(self, prior_mean: float) -> bool:
        """Always."""
        return True

    def log_evidence(
        self, inputs: Tensor, observed: Tensor, mean: float, variance: float, generator: torch.Generator
    ) -> LogEvidence:
        """Log evidence in closed form."""
        return of_linear(inputs, observed, mean, variance)


MODELS: dict[str, type[Model]] = {"tanh": Tanh, "reduced_rank": ReducedRank, "linear": Linear}


def _linear(*widths: int) -> nn.Module:
    layers = (nn.Linear(before, after, bias=False) for before, after in pairwise(widths))
    return _small(nn.Sequential(*layers))


def _small(network: nn.Module) -> nn.Module:
    """Weights of standard deviation 1 / sqrt(fan in)."""
    for weight in network.parameters():
        nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    return network
