"""Partially stochastic mean field: independent normals over some of the weights, and points for all others.

Approximates the posterior by normals over the weights that `stochastic` names, given points for the others,
which are trained along with them.

Source: Sharma, Farquhar, Nalisnick and Rainforth 2023, "Do Bayesian Neural Networks Need To Be Fully
Stochastic?", AISTATS, sections 2 and 5, with the normals of Blundell et al. 2015 (`methods/mfvi.py`).
Target: the smallest E_q[-log p(data | weights)] + KL(q || prior of the stochastic weights) - log prior of the
points, over normals and points together. It bounds the negative log of the evidence given the points, times
their prior.
Deviations: there stochastic and other weights are trained one after the other as well; here together.
Cost: as `mfvi`; two numbers per stochastic weight and one per other.
Valid for: every differentiable network and likelihood, and priors that do not couple tensors. Points have no
density, so that there is neither a density nor a next prior.
"""

from __future__ import annotations

import re
from typing import Annotated

import torch
from pydantic import AfterValidator
from torch import Tensor, nn
from torch.nn.functional import softplus

from bench import optimizers
from bench.contract import JOINT, Batch, Method, Noise, Problem
from bench.divergence import log_prob, weight_divergence
from bench.energy import likelihood_term
from bench.errors import UsageError
from bench.priors import normal_tensor
from bench.settings import Count, Factor, Positive, settings
from bench.weights import forward, normal_noise, reparametrise

NAMES: dict[str, dict[str, object]] = {"partial_mfvi": {}}
SEARCH = {
    "learning_rate": (1e-4, 1e-1, "log"),
    "initial_rho": (-7.0, -1.0, "linear"),
    "stochastic": ["first", "last", "all"],
}


def _which(text: str) -> str:
    """First, last, all, or `name:` and a regular expression."""
    if text not in ("first", "last", "all"):
        kind, _, pattern = text.partition(":")
        if kind != "name" or not pattern:
            raise ValueError("must be first, last, all, or name: and a regular expression")
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"is no regular expression: {error}") from error
    return text


Which = Annotated[str, AfterValidator(_which)]


@settings
class Settings:
    """Settings of partially stochastic mean field."""

    stochastic: Which = "last"
    """The stochastic weights: those of the first or last layer, all, or `name:` and a regular expression that
    is found in their names."""
    learning_rate: Positive = 1e-3
    """Step size of the optimiser, above 0."""
    optimizer: optimizers.Name = "adam"
    """adam, amsgrad, or sgd with Nesterov momentum 0.9."""
    rate_decay: Factor = 1.0
    """Factor of the step size after every epoch, above 0, at most 1."""
    train_samples: Count = 1
    """Weight samples per training step, at least 1."""
    initial_rho: float = -3.0
    """Start of rho for every stochastic weight; sigma = softplus(rho)."""


class PartialMFVI(Method):
    """A network whose parameters are means and points, and a rho for each tensor that is stochastic."""

    settings_class = Settings
    approximates = "the posterior by independent normals over one layer, and points for all other weights"
    declares = "mean-field optimum of KL", {"learning_rate": 0.05, "rate_decay": 0.995}
    provides = frozenset({"weight_samples", "moments", "weighted", "loss_terms"})
    settings: Settings
    stacks = True

    def __init__(self, problem: Problem, settings: Settings, start: PartialMFVI | None = None) -> None:
        super().__init__(problem, settings, start)
        self.network = problem.network()  # its parameters are the means and the points
        parameters = dict(self.network.named_parameters())
        self.stochastic = chosen([*parameters], settings.stochastic)
        if JOINT in problem.prior(parameters):
            raise UsageError("partial_mfvi: the prior couples all weights: pose one of independent tensors")
        self.rho = nn.ParameterList(
            torch.full_like(parameters[name], settings.initial_rho) for name in self.stochastic
        )
        if start is not None:
            self.load_state_dict(start.state_dict())

    @classmethod
    def parameters_per_weight(cls, settings: Settings) -> None:
        """No fixed multiple: from 1 to 2, by the share of stochastic weights."""

    # ---- the distribution

    def _normals(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Mean and standard deviation of every stochastic tensor."""
        parameters = dict(self.network.named_parameters())
        pairs = zip(self.stochastic, self.rho, strict=True)
        return {name: (parameters[name], softplus(rho)) for name, rho in pairs}

    def draw_noise(self, num_samples: int, generator: torch.Generator) -> Noise:
        """Standard normal noise `[S, *shape]` per stochastic tensor."""
        return normal_noise(num_samples, dict(zip(self.stochastic, self.rho, strict=True)), generator)

    def _draw(self, noise: Noise) -> dict[str, Tensor]:
        """Weights `[S, *shape]`: draws, and each point S times."""
        normals, count = self._normals(), len(noise[self.stochastic[0]])
        return {
            name: reparametrise(*normals[name], noise[name]) if name in normals else p.expand(count, *p.shape)
            for name, p in self.network.named_parameters()
        }

    def sample_weights(self, num_samples: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Draws of the stochastic weights beside the points, stacked `[S, *shape]`."""
        with torch.no_grad():
            weights = self._draw(self.draw_noise(num_samples, generator))
        return {name: w.detach() for name, w in weights.items()}

    def moments(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Mean and variance of every weight; the variance of a point is 0."""
        means = {name: p.detach() for name, p in self.network.named_parameters()}
        variances = {name: torch.zeros_like(mean) for name, mean in means.items()}
        return means, variances | {name: std.detach().square() for name, (_, std) in self._normals().items()}

    # ---- loss

    def loss_terms(self, batch: Batch, noise: Noise) -> tuple[Tensor, Tensor]:
        """Expected negative log likelihood, and KL less the log prior of the points, in nats."""
        weights = self._draw(noise)
        outputs = forward(self.network, weights, batch.inputs)
        nll = likelihood_term(self.likelihood, outputs, batch, self.problem.num_train)
        normals = {name: normal_tensor(*pair) for name, pair in self._normals().items()}
        divergence = weight_divergence(normals, self.prior, weights)
        points = {name: p for name, p in self.prior.items() if name not in normals}
        if not points:
            return nll, divergence
        return nll, divergence - log_prob(points, {name: weights[name][:1] for name in points}).sum()


def chosen(names: list[str], which: str) -> list[str]:
    """Names of the stochastic tensors, in their order.

    Args:
        names: Of all tensors, in the order of the network.
        which: As the setting says it; a layer is all tensors of one module.

    Raises:
        UsageError: If it names none.
    """
    if which.startswith("name:"):
        found = [name for name in names if re.search(which.removeprefix("name:"), name)]
        if not found:
            raise UsageError(
                f"partial_mfvi: no weight has a name like --method.stochastic {which}: "
                f"there are {', '.join(names)}"
            )
        return found
    if which == "all":
        return names
    layer = names[0 if which == "first" else -1].rpartition(".")[0]
    return [name for name in names if name.rpartition(".")[0] == layer]
