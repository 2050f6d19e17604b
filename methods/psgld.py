"""Preconditioned stochastic gradient Langevin dynamics: every weight steps at its own pace, as in RMSprop.

Approximates the posterior by states of one chain, w <- w - e/2 G grad U(w) + sqrt(e G) N(0, I), where U is
the negative log joint, its gradient that of a mini-batch, rescaled, and the diagonal G 1 / (1e-5 + sqrt(V))
for V the running mean of squared gradients per example.

Source: Li et al. 2016, "Preconditioned Stochastic Gradient Langevin Dynamics for Deep Neural Networks",
algorithm 1, with alpha and lambda of its section 5.
Target: the task's own posterior at temperature 1, no augmentation.
Deviations: V is of the whole gradient, the prior's part included. The term Gamma, of the derivative of G, is
left out, which biases the draws. The step size is set as learning_rate = e N / 2 for N examples, and is
constant.
Cost: one forward and backward pass a step, as SGD with the same budget; the draws are kept in memory.
Valid for: every differentiable network and likelihood without parameters of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bench.contract import Problem
from bench.families.chain import Chain, ChainSettings
from bench.settings import Positive, settings

NAMES: dict[str, dict[str, object]] = {"psgld": {}}
PRESETS = {"smoke": {"learning_rate": 0.001, "burn_in": 0.0, "kept": 20}}
SEARCH = {"learning_rate": (1e-4, 1.0, "log"), "burn_in": (0.0, 0.8, "linear")}

_DECAY, _SMALLEST = 0.99, 1e-5
"""alpha and lambda."""


@settings
class Settings(ChainSettings):
    """Settings of preconditioned stochastic gradient Langevin dynamics."""

    learning_rate: Positive = 0.003
    """Largest step size, above 0: about how far a step moves a weight."""


class PSGLD(Chain):
    """One chain of Langevin dynamics over all weights, each at a pace of its own."""

    settings_class = Settings
    approximates = "the posterior by draws of one chain of noisy gradient steps, scaled weight by weight"
    declares = "none"
    name = "psgld"
    settings: Settings
    squares: Tensor  # [d], running mean of squared gradients per example

    def __init__(self, problem: Problem, settings: Settings, start: PSGLD | None = None) -> None:
        super().__init__(problem, settings, start)
        self.register_buffer("squares", torch.zeros_like(self.position))

    def move(self, slope: Tensor, size: float, noisy: bool) -> None:
        """One step of the chain; `size` is e / 2."""
        self.squares.lerp_((slope / self.problem.num_train).square(), 1 - _DECAY)
        scale = 1 / (_SMALLEST + self.squares.sqrt())
        self.position -= size * scale * slope
        if noisy:
            self.position += (2 * size * scale).sqrt() * self.standard_noise()
