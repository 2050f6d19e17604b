"""Microcanonical Langevin ensembles: members of a deep ensemble, each of which goes on as a chain.

Approximates the posterior by draws of chains of microcanonical Langevin dynamics, as `mclmc`, one from each
of several optimised networks: the optimiser finds the modes, the chains what is around them.

Source: Sommer, Robnik, Nozadze, Seljak and Ruegamer 2025, "Microcanonical Langevin Ensembles: Advancing the
Sampling of Bayesian Neural Networks", ICLR; settings of its public code for tables: 12 members, 50,000 steps
of burn-in, then 10,000 of which each tenth is kept (preset `paper`). The variance of the energy error aimed
at falls from 0.5 to 0.1 a weight while steps are tuned, 1,000 to 200 times that of `mclmc`. Eight tenths of
the burn-in tune the step by its last 100 steps, one tenth and one more tune L, which begins at 15 or more.
Deviations: members go to the mode of the posterior by Adam on all data, in place of AdamW on mini-batches
until validation stops it; so they use no validation examples, and the prior is that of the chain.
Target: the task's own posterior at temperature 1, no augmentation, but for the error of large steps: at the
published `energy_variance` it is no longer small.
Cost: one gradient of the full data a step of the optimiser, then as `mclmc`.
Valid for: every differentiable network of two weights or more, and likelihoods without parameters of their
own.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from bench import optimizers
from bench.contract import Batch, Budget, Problem
from bench.families.microcanonical import Microcanonical
from bench.settings import Count, Positive, settings

NAMES: dict[str, dict[str, object]] = {"mile": {}}
PRESETS = {
    "smoke": {"chains": 2, "optimised": 8, "burn": 12, "kept": 20, "steps": 3},
    "paper": {"chains": 12, "burn": 5000, "kept": 1000},
}
SEARCH = {
    "learning_rate": (1e-4, 1e-1, "log"),
    "optimised": [50, 100, 200, 500],
    "energy_variance": (1e-3, 1.0, "log"),
}


@settings
class Settings:
    """Settings of microcanonical Langevin ensembles."""

    chains: Count = 4
    """Members, at least 1, each of which becomes a chain."""
    optimised: Count = 100
    """Transitions of each member, at least 1, that are as many steps of the optimiser."""
    burn: Annotated[int, Field(ge=3)] = 500
    """Transitions of each chain, at least 3, that tune its steps and are thrown away."""
    kept: Annotated[int, Field(ge=4)] = 500
    """Transitions of each chain, at least 4, that are kept as draws after them."""
    steps: Count = 10
    """Steps of one transition, at least 1."""
    energy_variance: Positive = 0.1
    """Variance of the energy error that a step is tuned to, a weight, above 0, in nats^2; tuning begins at 5
    times that."""
    learning_rate: Positive = 1e-2
    """Step size of the optimiser, above 0."""
    optimizer: optimizers.Name = "adam"
    """adam, amsgrad, or sgd with Nesterov momentum 0.9."""


class MILE(Microcanonical):
    """Optimised members that go on as chains."""

    settings_class = Settings
    approximates = "the posterior by draws of chains of constant speed, each from an optimised network"
    declares = "exact in the limit of steps", {"burn": 60, "kept": 160, "steps": 8, "energy_variance": 5e-4}
    name = "mile"
    phases = (0.8, 0.1)
    memory = 100
    settings: Settings
    descended: Tensor  # transitions of the optimiser so far

    def __init__(self, problem: Problem, settings: Settings, start: MILE | None = None) -> None:
        super().__init__(problem, settings, start)
        self.positions.requires_grad_()
        self.register_buffer("descended", torch.zeros((), dtype=torch.long))

    @classmethod
    def parameters_per_weight(cls, settings: Settings) -> float:
        """One per member."""
        return float(settings.chains)

    def first_step(self, size: int) -> float:
        """That of the public code."""
        return 1e-3

    def first_length(self, size: int) -> float:
        """At least 15."""
        return max(math.sqrt(size), 15.0)

    def target(self, share: float) -> float:
        """Falls from 5 times the setting to it."""
        return self.settings.energy_variance * (5 - 4 * share)

    def spends(self, budget: Budget) -> Budget:
        """One transition on all data per epoch: of the optimiser, burn-in, and what is kept."""
        return Budget(epochs=self.settings.optimised + self.settings.burn + self.settings.kept)

    def configure_optimizers(self) -> Any:
        """The optimiser of all members: what it does to one weight, no other knows of."""
        return optimizers.make([self.positions], self.settings.optimizer, self.settings.learning_rate)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """One transition of every member, by the optimiser and then by the chain."""
        if int(self.descended) >= self.settings.optimised:
            return super().training_step(batch, batch_idx)
        self.start_where_told()
        optimizer: Any = self.optimizers()
        for _ in range(self.settings.steps):
            energies, slopes = self.slope(batch, self.positions)
            self.positions.grad = slopes / self.problem.num_train
            optimizer.step()
        self.gradients += self.settings.chains * self.settings.steps
        self.descended += 1
        return {"loss": energies.mean() / self.problem.num_train}
