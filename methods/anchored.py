"""Anchored networks: modes of posteriors whose priors are centred at draws from the prior.

Approximates the posterior by the mode under the task's prior N(m, s^2) with its mean m replaced by an anchor,
one draw from N(m, s^2) for a whole fit. `anchored` is one such draw, a network; `anchored_ensemble` has five,
each with an anchor of its own.

Source: Pearce, Leibfried, Brintrup, Zaki and Neely 2020, "Uncertainty in Neural Networks: Approximately
Bayesian Ensembling", AISTATS, sections 3 and 4.
Target: where the network is linear, noise and prior normal, of precisions L and P, the anchors' modes are
normal about the posterior's mean with covariance (L + P)^-1 P (L + P)^-1. That is the posterior's (L + P)^-1
along what the data say nothing of, and P / (L + P) times its variance along all else: too small, and the more
so the more the data say. The covariance would be exact with anchors from N(m, P^-1 + P^-1 L P^-1), for which
L would have to be known; the authors take the prior's own, as here.
Deviations: none. Weights start where the network's own initialisation puts them, apart from the anchor.
Cost: as maximum a posteriori, and one stored number more per weight.
Valid for: every differentiable network and likelihood, under normal priors.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from bench import optimizers
from bench.contract import Batch, Method, Noise, Prediction, Problem, WeightDistribution
from bench.divergence import log_prob
from bench.energy import likelihood_term
from bench.errors import UsageError
from bench.priors import is_normal, joined_normals, normal_tensor
from bench.settings import Positive, settings
from bench.weights import forward

NAMES: dict[str, dict[str, object]] = {"anchored": {}, "anchored_ensemble": {"members": 5}}
SEARCH = {"learning_rate": (1e-4, 1e-2, "log")}


@settings
class Settings:
    """Settings of an anchored network."""

    learning_rate: Positive = 1e-3
    """Step size of the optimiser, above 0."""
    optimizer: optimizers.Name = "adam"
    """adam, amsgrad, or sgd with Nesterov momentum 0.9."""


class Anchored(Method):
    """A point mass at the mode under a prior that is centred at a draw from it."""

    settings_class = Settings
    approximates = "the posterior by modes under priors centred at draws from the prior"
    declares = "none"
    provides = frozenset({"weighted", "loss_terms"})
    settings: Settings
    anchor: Tensor  # [d], in the order of the prior's tensors

    def __init__(self, problem: Problem, settings: Settings, start: Anchored | None = None) -> None:
        super().__init__(problem, settings, start)
        self.network = problem.network()
        normals = joined_normals(problem.prior(dict(self.network.named_parameters())))
        if normals is None:
            raise UsageError("anchored draws the centre of a normal prior; this task's is of another form")
        mean, std = normals
        noise = torch.randn(mean.shape, generator=self.generator, dtype=mean.dtype)
        self.register_buffer("anchor", mean + std * noise)
        if start is not None:
            self.load_state_dict(start.state_dict())

    def make_prior(self, parameters: Mapping[str, Tensor]) -> WeightDistribution:
        """The task's prior, moved from its mean to the anchor."""
        given = {name: p for name, p in self.problem.prior(parameters).items() if is_normal(p)}
        parts = self.anchor.split([p.event_shape.numel() for p in given.values()])
        return {
            name: normal_tensor(part.view(p.event_shape), p.base_dist.scale)
            for (name, p), part in zip(given.items(), parts, strict=True)
        }

    def loss_terms(self, batch: Batch, noise: Noise) -> tuple[Tensor, Tensor]:
        """Negative log likelihood and negative log density of the anchored prior, in nats."""
        weights = {name: p[None] for name, p in self.network.named_parameters()}
        outputs = forward(self.network, weights, batch.inputs)
        prior_term = -log_prob(self.prior, weights).sum()
        return likelihood_term(self.likelihood, outputs, batch, self.problem.num_train), prior_term

    def predict(self, inputs: Tensor, num_samples: int, generator: torch.Generator) -> Prediction:
        """One prediction: S = 1 whatever `num_samples` says."""
        weights = {name: p[None] for name, p in self.network.named_parameters()}
        with torch.no_grad():
            return self.likelihood.predict(forward(self.network, weights, inputs))
