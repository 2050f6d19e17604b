"""Stochastic gradient Langevin dynamics: steps on mini-batch gradients with the noise that makes them draws.

Approximates the posterior by states of one chain, w <- w - e/2 grad U(w) + sqrt(e) N(0, I), where U is the
negative log joint and the gradient that of a mini-batch, rescaled.

Source: Welling and Teh 2011, "Bayesian Learning via Stochastic Gradient Langevin Dynamics", equation 4.
Cyclical step size: Zhang et al. 2020, "Cyclical Stochastic Gradient MCMC for Bayesian Deep Learning",
algorithm 1.
Target: the task's own posterior at temperature 1, no augmentation.
Deviations: the step size is set as learning_rate = e N / 2, that of SGD on the mean over N examples. It is
constant and not decreasing, or goes by cycles. So the law of the draws is not quite the posterior: with all
data, along a direction of curvature c, their variance is 1 / (1 - e c / 4) times too large; the noise of
mini-batches adds to that.
Cost: one forward and backward pass a step, as SGD with the same budget; the draws are kept in memory.
Valid for: every differentiable network and likelihood without parameters of its own.
"""

from __future__ import annotations

from torch import Tensor

from bench.families.chain import Chain, ChainSettings
from bench.settings import Positive, settings

NAMES: dict[str, dict[str, object]] = {"sgld": {}, "sgld_cyclical": {"schedule": "cyclical"}}
PRESETS = {"smoke": {"learning_rate": 0.01, "burn_in": 0.0, "kept": 20}}
SEARCH = {"learning_rate": (1e-3, 10.0, "log"), "burn_in": (0.0, 0.8, "linear")}


@settings
class Settings(ChainSettings):
    """Settings of stochastic gradient Langevin dynamics."""

    learning_rate: Positive = 0.1
    """Largest step size, above 0, of the gradient per example, as that of SGD."""


class SGLD(Chain):
    """One chain of Langevin dynamics over all weights."""

    settings_class = Settings
    approximates = "the posterior by draws of one chain of noisy gradient steps"
    declares = "exact in the limit of steps", {"learning_rate": 0.16, "burn_in": 0.05, "kept": 400}
    name = "sgld"
    settings: Settings

    def move(self, slope: Tensor, size: float, noisy: bool) -> None:
        """One step of the chain; `size` is e / 2."""
        self.position -= size * slope
        if noisy:
            self.position += (2 * size) ** 0.5 * self.standard_noise()
