"""What methods share that train a distribution over weights: its draws, density and moments.

Shapes: S samples.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Independent
from torch.nn.functional import softplus

from bench import divergence
from bench.contract import JOINT, Method, Noise, Problem, WeightDistribution
from bench.priors import normal_tensor
from bench.weights import unravel


def fill_rho(rhos: Iterable[Tensor], sigma: float) -> None:
    """Sets all entries of all tensors to the rho with softplus(rho) = sigma, above 0."""
    rho = sigma + math.log(-math.expm1(-sigma))  # log(exp(sigma) - 1), which would overflow
    with torch.no_grad():
        for tensor in rhos:
            tensor.fill_(rho)


class Variational(Method):
    """A method that holds its posterior as a distribution; density and moments are those of it.

    The parameters of its network are the means.
    """

    @abstractmethod
    def posterior(self) -> WeightDistribution:
        """The distribution over the weights, with gradients to what is trained."""

    def draw_noise(self, num_samples: int, generator: torch.Generator) -> Noise:
        """Standard normal noise `[S, *shape]` per tensor."""
        return self.standard_noise(num_samples, generator)

    def standard_noise(self, num_samples: int, generator: torch.Generator) -> Noise:
        """The same, also where the noise of training is of another kind."""
        return {
            name: torch.randn(num_samples, *m.shape, generator=generator, device=m.device, dtype=m.dtype)
            for name, m in self.network.named_parameters()
        }

    def log_prob(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Log density of stacked weights, `[S]`, in nats."""
        return divergence.log_prob(self.posterior(), weights)

    def moments(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Mean and variance of every weight."""
        posterior = self.posterior()
        means = {name: q.mean.detach() for name, q in posterior.items()}
        variances = {name: q.variance.detach() for name, q in posterior.items()}
        return self._per_tensor(means), self._per_tensor(variances)

    def _per_tensor(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """One value per weight, by tensor, where the distribution may be over the ravelled vector."""
        if JOINT not in values:
            return values
        like = dict(self.network.named_parameters())
        return {name: value[0] for name, value in unravel(values[JOINT][None], like).items()}


class MeanField(Variational):
    """Independent normals over all weights, sigma = softplus(rho); rho starts at `settings.initial_rho`."""

    def __init__(self, problem: Problem, settings: Any, start: MeanField | None = None) -> None:
        super().__init__(problem, settings, start)
        self.network = problem.network()  # its parameters are the means
        self.rho = nn.ParameterList(
            torch.full_like(p, settings.initial_rho) for p in self.network.parameters()
        )

    @classmethod
    def parameters_per_weight(cls, settings: Any) -> float:
        """A mean and a rho."""
        return 2.0

    def posterior(self) -> dict[str, Independent]:
        """The independent normals, with gradients to means and rhos."""
        means = self.network.named_parameters()
        return {name: normal_tensor(m, softplus(r)) for (name, m), r in zip(means, self.rho, strict=True)}

    def set_scale(self, sigma: float) -> None:
        """Every weight's standard deviation becomes sigma."""
        fill_rho(self.rho, sigma)

    def sample_weights(self, num_samples: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Draws from the posterior, stacked `[S, *shape]`."""
        with torch.no_grad():
            noise = self.standard_noise(num_samples, generator)
            return {name: q.mean + q.base_dist.scale * noise[name] for name, q in self.posterior().items()}
