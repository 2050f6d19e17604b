"""Stein variational gradient descent: networks that go downhill together and keep apart.

Approximates the posterior by n particles. Each moves by a mean over all of them: of their gradients of the
log joint, weighted by how near they are, and of a force that drives near ones apart. One particle goes to the
mode.

Source: Liu and Wang 2016, "Stein Variational Gradient Descent: A General Purpose Bayesian Inference
Algorithm", algorithm 1 and equation 8; kernel k(x, y) = exp(-|x - y|^2 / h) with h = med^2 / log n, where med
is the median of the distances between the particles at that step (section 5).
Target: the task's own posterior at temperature 1, no augmentation.
Deviations: Adam in place of AdaGrad, so that one particle is `map`, step for step. The median is over pairs
of two different particles; the published code counts each particle's distance to itself too. Each particle
starts at a network of its own. Parameters of a likelihood have no prior: they follow the mean over the
particles.
Cost: n forward and backward passes a step, and n^2 d operations for the kernel; n numbers per weight.
Valid for: every differentiable network and likelihood. In many dimensions distances are nearly equal, and
the force is weak against the gradients: the particles of a large network lie closer than draws would.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from bench import optimizers, randomness
from bench.contract import Batch, Method, Problem
from bench.divergence import log_prob
from bench.energy import likelihood_term
from bench.settings import Count, Positive, settings
from bench.weights import forward, unravel

NAMES: dict[str, dict[str, object]] = {"svgd": {}}
PRESETS = {"smoke": {"particles": 5}}
SEARCH = {"learning_rate": (1e-4, 1.0, "log")}


@settings
class Settings:
    """Settings of Stein variational gradient descent."""

    particles: Count = 10
    """n, at least 1."""
    learning_rate: Positive = 1e-3
    """Step size of the optimiser, above 0."""
    optimizer: optimizers.Name = "adam"
    """adam, amsgrad, or sgd with Nesterov momentum 0.9."""


class SVGD(Method):
    """Particles that descend together."""

    settings_class = Settings
    approximates = "the posterior by particles that go uphill together and drive each other apart"
    declares = "exact in the limit of particles", {"particles": 300, "learning_rate": 0.05}
    provides = frozenset({"weight_samples", "moments", "weighted"})
    data_parallel = False
    settings: Settings

    def __init__(self, problem: Problem, settings: Settings, start: SVGD | None = None) -> None:
        super().__init__(problem, settings, start)
        self.automatic_optimization = False  # the direction of a step is no gradient of a loss
        networks = [problem.network() for _ in range(settings.particles)]
        self.network = networks[0].requires_grad_(False)  # gives the architecture
        self._like = dict(self.network.named_parameters())
        vectors = torch.stack([nn.utils.parameters_to_vector(m.parameters()) for m in networks])
        self.particles = nn.Parameter(vectors.detach())  # [n, d]
        self.num_draws = settings.particles
        if start is not None:
            self.load_state_dict(start.state_dict())

    @classmethod
    def parameters_per_weight(cls, settings: Settings) -> float:
        """One per particle."""
        return float(settings.particles)

    # ---- training

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """One step of all particles; the loss is their mean energy per example."""
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        energy = self.energy(batch)
        (energy / self.problem.num_train).backward()
        gradient, num_train = self.particles.grad, self.problem.num_train
        assert gradient is not None
        with torch.no_grad():
            slopes = len(self.particles) * num_train * gradient  # of each particle's own energy
            self.particles.grad = direction(self.particles, slopes) / num_train
        optimizer.step()
        return {"loss": energy.detach() / self.problem.num_train}

    def energy(self, batch: Batch) -> Tensor:
        """Mean over the particles of the negative log joint of the full training set, in nats."""
        weights = self._weights(self.particles)
        outputs = forward(self.network, weights, batch.inputs)
        nll = likelihood_term(self.likelihood, outputs, batch, self.problem.num_train)
        return nll - log_prob(self.prior, weights).mean()

    # ---- the particles

    def _weights(self, vectors: Tensor) -> dict[str, Tensor]:
        return unravel(vectors, self._like)

    def sample_weights(self, num_samples: int, generator: torch.Generator) -> dict[str, Tensor]:
        """A random subset of the particles, `[S, *shape]`: each once before any is taken again."""
        chosen = randomness.subset(len(self.particles), num_samples, generator)
        return self._weights(self.particles.detach()[chosen])

    def moments(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Mean and variance of every weight over the particles."""
        particles = self.particles.detach()
        both = self._weights(torch.stack([particles.mean(0), particles.var(0, correction=0)]))
        return {n: w[0] for n, w in both.items()}, {n: w[1] for n, w in both.items()}


def direction(particles: Tensor, slopes: Tensor) -> Tensor:
    """Minus the phi of equation 8 at every particle, `[n, d]`: the descent that replaces their gradients.

    Args:
        particles: `[n, d]`.
        slopes: Gradient of the energy at each, `[n, d]`, in nats.
    """
    count = len(particles)
    if count == 1:  # k is 1 and has no slope
        return slopes
    distances = torch.pdist(particles)
    width = distances.quantile(0.5).square() / math.log(count)  # h
    squares = particles.new_zeros(count, count)
    first, second = torch.triu_indices(count, count, 1, device=particles.device)
    squares[first, second] = squares[second, first] = distances.square()
    kernel = (-squares / width).exp()
    apart = 2 / width * (particles * kernel.sum(1, keepdim=True) - kernel @ particles)
    return (kernel @ slopes - apart) / count
