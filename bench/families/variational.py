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

from bench import divergence
from bench.contract import JOINT, Method, Noise, Problem, WeightDistribution
from bench.families import location_scale
from bench.families.location_scale import LocationScale, Normals
from bench.weights import are_transformed, lay_together, normal_noise, unravel

_NORMALS = location_scale.normals()


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

    def __init__(self, problem: Problem, settings: Any, start: Any = None) -> None:
        super().__init__(problem, settings, start)
        self._joined: tuple[WeightDistribution, Normals | None] | None = None  # the last prior of `draw`

    @abstractmethod
    def posterior(self) -> WeightDistribution:
        """The distribution over the weights, with gradients to what is trained."""

    def draw_noise(self, num_samples: int, generator: torch.Generator) -> Noise:
        """Standard normal noise `[S, *shape]` per tensor."""
        return self.standard_noise(num_samples, generator)

    def standard_noise(self, num_samples: int, generator: torch.Generator) -> Noise:
        """The same, also where the noise of training is of another kind; one draw for all tensors."""
        return normal_noise(num_samples, dict(self.network.named_parameters()), generator)

    def draw(
        self, posterior: WeightDistribution, noise: Noise, prior: WeightDistribution
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Weights drawn with the noise, stacked `[S, *shape]`, and KL(posterior || prior) in nats.

        The one place that chooses how: over flat vectors, where the posterior is a `LocationScale` and the
        prior independent normals; else tensor by tensor, which compiles and maps over fits side by side.
        """
        if not isinstance(posterior, LocationScale) or are_transformed(posterior.means.values()):
            return location_scale.draw_with_divergence(posterior, noise, prior, None)
        if self._joined is None or self._joined[0] is not prior:
            self._joined = prior, Normals.of(posterior.family, prior)
        return location_scale.draw_with_divergence(posterior, noise, prior, self._joined[1])

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
        lay_together(self.network.parameters())
        lay_together(self.rho)

    @classmethod
    def parameters_per_weight(cls, settings: Any) -> float:
        """A mean and a rho."""
        return 2.0

    def posterior(self) -> Mapping[str, Any]:
        """The independent normals, with gradients to means and rhos."""
        return LocationScale(_NORMALS, dict(self.network.named_parameters()), self.rho)

    def set_scale(self, sigma: float) -> None:
        """Every weight's standard deviation becomes sigma."""
        fill_rho(self.rho, sigma)

    def sample_weights(self, num_samples: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Draws from the posterior, stacked `[S, *shape]`."""
        return location_scale.draw(self.posterior(), self.standard_noise(num_samples, generator))
