"""Rank-1 BNN: a mixture of networks that share their weight matrices, each times random rank-one factors.

Approximates the posterior by the equal mixture of K components. Component k has the weights W o r s^T in
every linear and convolutional layer: W is shared and a point, r has a number per output (channel) and s one
per input (channel), all independent normals of component k. All other parameters, such as biases, are points
of each component's own.

Source: Dusenberry, Jerfel, Wen, Ma, Snoek, Heller, Lakshminarayanan and Tran 2020, "Efficient and Scalable
Bayesian Neural Nets with Rank-1 Factors", ICML, section 3, and the authors' public code.
Target: the smallest mean over the components of E_k[-log p(data | weights)] + KL(q_k || p) - log p(W, own),
where p has r and s as N(1, s0^2) and all else as the task's prior. Since the KL is convex, the first two
terms are a bound from above of those of the mixture. Every component sees the whole batch.
Deviations: the public code sums the KL over the components and lets it in slowly. Components start at draws
from N(1, s0^2), there at random signs; standard deviations start at sqrt(p / (1 - p)) for p = 0.001, as
there.
Cost: K forward and backward passes a step per sample; per layer of n inputs and k outputs 2 K (n + k) numbers
beside the shared ones, and K for each other parameter.
Valid for: every differentiable network and likelihood. Weights of layers other than `Linear` and ungrouped
`Conv2d` are points: a network without such layers is refused.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from bench import optimizers, randomness
from bench.contract import Batch, Method, Noise, Problem
from bench.divergence import with_log_prob
from bench.energy import likelihood_term
from bench.errors import UsageError
from bench.families.shared_weights import is_matrix, stack_outputs
from bench.settings import Count, Positive, settings
from bench.weights import forward, linear_stack, normal_noise

NAMES: dict[str, dict[str, object]] = {"rank1": {}}
SEARCH = {"learning_rate": (1e-4, 1e-2, "log"), "prior_std": (0.03, 0.5, "log")}

_START_STD = math.sqrt(0.001 / 0.999)
"""Standard deviation of every factor at the start."""


@settings
class Settings:
    """Settings of the rank-1 BNN."""

    components: Count = 4
    """K, at least 1."""
    prior_std: Positive = 0.1
    """s0, the standard deviation of the prior of every factor about 1, above 0."""
    learning_rate: Positive = 1e-3
    """Step size of the optimiser, above 0."""
    optimizer: optimizers.Name = "adam"
    """adam, amsgrad, or sgd with Nesterov momentum 0.9."""
    train_samples: Count = 1
    """Draws of every component's factors per training step, at least 1."""


class Rank1(Method):
    """Components of one network; its weight matrices are the shared ones, its other parameters are unused.

    All factors lie in one vector `[d]` a component: of every shared weight r, then s.
    """

    settings_class = Settings
    approximates = "the posterior by a mixture of networks that share weights up to random rank-one factors"
    declares = "none"
    provides = frozenset({"weight_samples", "moments", "weighted", "loss_terms"})
    settings: Settings
    stacks = True

    def __init__(self, problem: Problem, settings: Settings, start: Rank1 | None = None) -> None:
        super().__init__(problem, settings, start)
        self.network = problem.network()
        count = settings.components
        shared = {id(m.weight) for m in self.network.modules() if is_matrix(m)}
        self.shared = [name for name, p in self.network.named_parameters() if id(p) in shared]
        if not self.shared:
            raise UsageError("rank1 needs a linear or convolutional layer with a weight of its own")
        self.own = nn.ParameterList()
        for name, p in self.network.named_parameters():
            if name not in self.shared:
                p.requires_grad_(False)
                self.own.append(nn.Parameter(p.repeat(count, *[1] * p.ndim)))
        size = sum(sum(self.network.get_parameter(name).shape[:2]) for name in self.shared)
        noise = torch.randn(count, size, generator=self.generator)
        self.mean = nn.Parameter(1 + settings.prior_std * noise)
        self.log_std = nn.Parameter(torch.full((count, size), math.log(_START_STD)))
        if start is not None:
            self.load_state_dict(start.state_dict())

    @classmethod
    def parameters_per_weight(cls, settings: Settings) -> None:
        """No fixed multiple: factors are the fewer, the wider the layers."""

    # ---- training

    def draw_noise(self, num_samples: int, generator: torch.Generator) -> Noise:
        """Standard normal noise of all factors, `[S, K, d]`."""
        return normal_noise(num_samples, {"factors": self.mean}, generator)

    def loss_terms(self, batch: Batch, noise: Noise) -> tuple[Tensor, Tensor]:
        """Mean negative log likelihood of the components, and their mean KL less the log prior, in nats."""
        factors = self.mean + self.log_std.exp() * noise["factors"]
        own = [p.repeat(len(factors), *[1] * (p.ndim - 1)) for p in self.own]
        outputs = self._outputs(factors.flatten(0, 1), own, batch.inputs)
        nll = likelihood_term(self.likelihood, outputs, batch, self.problem.num_train)
        return nll, self.divergence() - self._log_prior()

    def _outputs(self, factors: Tensor, own: list[Tensor], inputs: Tensor) -> Tensor:
        """Outputs `[N, B, ...]` under factors `[N, d]` and own parameters, each `[N, *shape]`."""
        layers = linear_stack(self.network, inputs)
        if layers is None:
            return forward(self.network, self._weights(factors, own), inputs)
        others = iter(own)
        weights = {n: p if n in self.shared else next(others) for n, p in self.network.named_parameters()}
        return stack_outputs(layers, weights, self._pairs(factors), inputs[None])

    def divergence(self) -> Tensor:
        """KL of the factors to N(1, s0^2), the mean over the components, in nats."""
        scale = self.settings.prior_std
        squares = ((2 * self.log_std).exp() + (self.mean - 1).square()) / scale**2
        return (0.5 * (squares - 1) - self.log_std + math.log(scale)).sum(1).mean()

    def _log_prior(self) -> Tensor:
        """Log prior of W and of the components' own parameters, its mean over the components, in nats."""
        named = dict(self.network.named_parameters())
        shared = {name: named[name] for name in self.shared}
        own = dict(zip((name for name in named if name not in shared), self.own, strict=True))
        return with_log_prob(self.prior, shared, own)[1]

    # ---- the components

    def _pairs(self, factors: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Vectors `[N, d]` as r `[N, outputs, 1, ...]` and s `[N, 1, inputs, ...]` of every shared weight."""
        shapes = {n: p.shape for n, p in self.network.named_parameters() if n in self.shared}
        parts = iter(factors.split([size for shape in shapes.values() for size in shape[:2]], 1))
        pairs = {}
        for name, shape in shapes.items():
            ones = [1] * (len(shape) - 2)
            pairs[name] = next(parts).view(-1, shape[0], 1, *ones), next(parts).view(-1, 1, shape[1], *ones)
        return pairs

    def _weights(self, factors: Tensor, own: list[Tensor]) -> dict[str, Tensor]:
        """Weights `[N, *shape]` under factors `[N, d]` and own parameters, each `[N, *shape]`."""
        pairs, others = self._pairs(factors), iter(own)
        return {
            name: p * (pairs[name][0] * pairs[name][1]) if name in pairs else next(others)
            for name, p in self.network.named_parameters()
        }

    def sample_weights(self, num_samples: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Draws `[S, *shape]` from the components in random order, each once before any is taken again."""
        chosen = randomness.subset(self.settings.components, num_samples, generator)
        mean = self.mean[chosen]
        noise = torch.randn(mean.shape, generator=generator, device=mean.device, dtype=mean.dtype)
        with torch.no_grad():
            factors = mean + self.log_std[chosen].exp() * noise
            return self._weights(factors, [p[chosen] for p in self.own])

    def moments(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Mean and variance of every weight: r and s of a component are independent."""
        with torch.no_grad():
            first = self._pairs(self.mean)
            second = self._pairs(self.mean.square() + (2 * self.log_std).exp())
            own, means, variances = iter(self.own), {}, {}
            for name, p in self.network.named_parameters():
                if name in first:
                    means[name] = p * (first[name][0] * first[name][1]).mean(0)
                    squares = p.square() * (second[name][0] * second[name][1]).mean(0)
                    variances[name] = squares - means[name].square()
                else:
                    values = next(own)
                    means[name], variances[name] = values.mean(0), values.var(0, correction=0)
            return means, variances
