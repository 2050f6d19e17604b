"""Maximum a posteriori: the single most probable network, the deterministic baseline.

Approximates the posterior by a point mass at its mode.

Source: any textbook; Farquhar 2022, thesis "Understanding Approximation" (docs/sources.md), section 2.2 (the
mode that Laplace starts from).
Deviations: none. As a sequential method it keeps the prior it was given and goes on from its weights, which
is plain fine-tuning: the baseline that every sequential posterior must beat.
Cost: one forward and backward pass a step; one number per weight.
Valid for: every differentiable network and likelihood.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bench import optimizers
from bench.contract import Batch, Method, Noise, Prediction, Prior, Problem
from bench.divergence import log_prob
from bench.energy import likelihood_term
from bench.settings import Positive, settings
from bench.weights import forward

NAMES: dict[str, dict[str, object]] = {"map": {}, "deep_ensemble": {"members": 3}}
SEARCH = {"learning_rate": (1e-4, 1.0, "log")}


@settings
class Settings:
    """Settings of maximum a posteriori."""

    learning_rate: Positive = 1e-3
    """Step size of the optimiser, above 0."""
    optimizer: optimizers.Name = "adam"
    """adam, amsgrad, or sgd with Nesterov momentum 0.9."""


class MAP(Method):
    """A point mass at the mode of the posterior."""

    settings_class = Settings
    approximates = "the posterior by a point mass at its mode"
    declares = "mode exact", {"learning_rate": 0.05}
    provides = frozenset({"sequential", "weighted", "loss_terms"})
    stacks = True
    settings: Settings

    def __init__(self, problem: Problem, settings: Settings, start: MAP | None = None) -> None:
        super().__init__(problem, settings, start)
        self.network = problem.network()
        if start is not None:
            self.load_state_dict(start.state_dict())

    def _weights(self) -> dict[str, Tensor]:
        return {name: p[None] for name, p in self.network.named_parameters()}

    def loss_terms(self, batch: Batch, noise: Noise) -> tuple[Tensor, Tensor]:
        """Negative log likelihood and negative log prior of the weights, in nats."""
        weights = self._weights()
        outputs = forward(self.network, weights, batch.inputs)
        prior_term = -log_prob(self.prior, weights).sum()
        return likelihood_term(self.likelihood, outputs, batch, self.problem.num_train), prior_term

    def predict(self, inputs: Tensor, num_samples: int, generator: torch.Generator) -> Prediction:
        """One prediction: S = 1 whatever `num_samples` says."""
        with torch.no_grad():
            return self.likelihood.predict(forward(self.network, self._weights(), inputs))

    def as_prior(self) -> Prior:
        """The prior that this fit was given: the next fit goes on from these weights."""
        return self.problem.prior
