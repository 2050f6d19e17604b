"""Normalizing flow with a Gaussian source: what nf_gamma is compared with.

Approximates the posterior by w = g(xi), xi independent normals, and g the same flow of affine coupling layers
(bench/families/flow.py) that nf_gamma has.

Source: the paper "Variational Inference via Resolution of Singularities" 2022 (docs/sources.md), sections 6
and 7. A name as the paper prints it is accepted: `nf_gaussian_{mu0}_{v0}`, where every xi ~ N(mu0, v0) and v0
is a VARIANCE; the source is not trained there.
Deviations: coupling layers in their invertible form. The source can be trained too (`trainable`), so that a
comparison with nf_gamma need not be one of a learned source with a fixed one.
Cost: S forward and backward passes, and of the flow 264 multiplications per weight and sample at 16 units.
Valid for: every differentiable network and likelihood, up to 100,000 weights.
"""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch import Tensor, nn

from bench.contract import Noise, Problem
from bench.families import flow
from bench.families.flow import NUMBER, FlowVI
from bench.settings import Count, Positive, settings

NAMES: dict[str, dict[str, object]] = {"nf_gaussian": {}}
PATTERN = re.compile(rf"nf_gaussian_(?P<mean>-?{NUMBER})_(?P<variance>{NUMBER})")
PRESETS: dict[str, dict[str, object]] = {
    "paper": {"masks": "published", "schedule": "constant"},
}
SEARCH = {
    "learning_rate": (1e-4, 1e-1, "log"),
    "variance": (1e-4, 1.0, "log"),
    "trainable": [False, True],
    "start": ["random", "identity"],
    "train_samples": [1, 5, 10],
}


@settings
class Settings:
    """Settings of the flow with a Gaussian source."""

    mean: float = 0.1
    """mu0: mean of every source variable."""
    variance: Positive = 1e-3
    """v0, above 0: variance of every source variable."""
    trainable: bool = False
    """Whether means and log variances of the source are trained."""
    learning_rate: Positive = 1e-3
    """Step size of Adam, above 0."""
    schedule: flow.Schedule = "cosine"
    """Rates over the epochs: cosine falls to 0, the flow's from twice its own; constant is published."""
    train_samples: Count = 5
    """Weight samples per training step, at least 1."""
    masks: flow.Masks = "halves"
    """What coupling layers keep: halves of the entries, or published, draws with replacement."""
    start: flow.Start = "random"
    """The flow at first: random as published, or the identity."""
    units: Count = 16
    """Hidden units of a layer of the coupling networks, at least 1; 16 is published."""


class NFGaussian(FlowVI):
    """A coupling flow from independent normals."""

    settings_class = Settings
    approximates = "the posterior by a coupling flow from independent normals"
    declares = "optimum of KL within its family", {"learning_rate": 0.01, "trainable": True}
    settings: Settings

    def __init__(self, problem: Problem, settings: Settings, start: NFGaussian | None = None) -> None:
        super().__init__(problem, settings, start)
        self.mean = nn.Parameter(torch.full((self.size,), settings.mean), requires_grad=settings.trainable)
        log_std = torch.full((self.size,), 0.5 * math.log(settings.variance))
        self.log_std = nn.Parameter(log_std, requires_grad=settings.trainable)
        if start is not None:
            self.load_state_dict(start.state_dict())

    def source_parameters(self) -> list[dict[str, Any]]:
        """Means and log standard deviations at the flow's rate; none of a fixed source."""
        return [{"params": [self.mean, self.log_std]}] if self.settings.trainable else []

    def draw_noise(self, num_samples: int, generator: torch.Generator) -> Noise:
        """Standard normal noise `[S, d]`."""
        return {"normal": torch.randn(num_samples, self.size, generator=generator, device=self.device)}

    def source(self, noise: Noise) -> tuple[Tensor, Tensor]:
        """Draws of xi `[S, d]`, and E log q(xi) = -(d/2) log(2 pi e) - sum of log standard deviations."""
        xi = torch.addcmul(self.mean, self.log_std.exp(), noise["normal"])
        return xi, -(self.log_std + 0.5 * math.log(2 * math.pi * math.e)).sum()

    def exact_source(self, num_samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """The same: training draws are exact."""
        return self.source(self.draw_noise(num_samples, generator))

    def source_log_prob(self, xi: Tensor) -> Tensor:
        """Log density of xi `[S, d]`, `[S]`, in nats."""
        mean, log_std = self.mean.to(xi), self.log_std.to(xi)
        squares = ((xi - mean) * (-log_std).exp()).square()
        return (-0.5 * squares - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)
