"""Stochastic gradient Hamiltonian Monte Carlo: SGD with momentum, and the noise that its friction asks for.

Approximates the posterior by states of one chain with a momentum v: v <- (1 - a) v - h grad U(w)
+ N(0, 2 a h I), w <- w + v, where U is the negative log joint, its gradient that of a mini-batch, rescaled.

Source: Chen et al. 2014, "Stochastic Gradient Hamiltonian Monte Carlo", equation 15 (with no estimate of the
noise of gradients: beta = 0). Cyclical step size: Zhang et al. 2020, "Cyclical Stochastic Gradient MCMC for
Bayesian Deep Learning", algorithm 1.
Target: the task's own posterior, no augmentation. At a `temperature` T its density to the power 1/T (Wenzel
et al. 2020, "How Good is the Bayes Posterior in Deep Neural Networks Really?"): the noise has T times the
variance, and so have the draws around a mode.
Deviations: the step size is set as learning_rate = h N, that of SGD on the mean over N examples. It is
constant or goes by cycles. The momentum starts at 0 and is never drawn anew. So the law of the draws is not
quite the posterior: with all data, along a direction of curvature c, their variance is
1 / (1 - h c / (4 - 2 a)) times too large; the noise of mini-batches adds to that.
Cost: one forward and backward pass a step, as SGD with the same budget; the draws are kept in memory.
Valid for: every differentiable network and likelihood without parameters of its own.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from bench.contract import Problem
from bench.families.chain import Chain, ChainSettings
from bench.settings import Positive, settings

NAMES: dict[str, dict[str, object]] = {"sghmc": {}, "sghmc_cyclical": {"schedule": "cyclical"}}
PRESETS = {"smoke": {"learning_rate": 0.01, "burn_in": 0.0, "kept": 20}}
SEARCH = {
    "learning_rate": (1e-3, 10.0, "log"),
    "friction": [0.01, 0.03, 0.1, 0.3],
    "burn_in": (0.0, 0.8, "linear"),
}


@settings
class Settings(ChainSettings):
    """Settings of stochastic gradient Hamiltonian Monte Carlo."""

    friction: Annotated[float, Field(gt=0, le=1)] = 0.1
    """a, the share of its momentum that a step loses, above 0, at most 1: momentum 0.9 of SGD is 0.1."""
    temperature: Positive = 1.0
    """T, above 0: what is drawn from is the posterior to the power 1/T. Below 1 it is a cold posterior."""


class SGHMC(Chain):
    """One chain with a momentum over all weights."""

    settings_class = Settings
    approximates = "the posterior by draws of one chain of noisy gradient steps with momentum"
    declares = "exact in the limit of steps", {"learning_rate": 0.05, "burn_in": 0.05, "kept": 400}
    name = "sghmc"
    settings: Settings
    velocity: Tensor  # [d]

    def __init__(self, problem: Problem, settings: Settings, start: SGHMC | None = None) -> None:
        super().__init__(problem, settings, start)
        self.register_buffer("velocity", torch.zeros_like(self.position))

    def move(self, slope: Tensor, size: float, noisy: bool) -> None:
        """One step of the chain; `size` is h."""
        friction = self.settings.friction
        self.velocity.mul_(1 - friction).sub_(size * slope)
        if noisy:
            variance = 2 * friction * size * self.settings.temperature
            self.velocity += variance**0.5 * self.standard_noise()
        self.position += self.velocity
