"""What samplers share that step on mini-batches: one chain, its step size over time, and the draws it keeps.

Step sizes by cycles: Zhang et al. 2020, "Cyclical Stochastic Gradient MCMC for Bayesian Deep Learning",
equation 1. Shapes: d weights in all, N draws.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from bench import randomness
from bench.contract import Batch, Budget, Method, Problem
from bench.diagnostics import effective_sample_size, prediction_autocorrelation
from bench.divergence import log_prob
from bench.energy import likelihood_term
from bench.errors import UsageError
from bench.settings import Count, Positive, Share, settings
from bench.weights import forward, unravel

_MOST_INPUTS = 100
"""Inputs at which the draws are compared: every number depends on the same chain, so that few tell."""


@settings
class ChainSettings:
    """Settings of every chain."""

    learning_rate: Positive = 0.03
    """Largest step size, above 0, of the gradient per example, as that of SGD."""
    schedule: Literal["constant", "cyclical"] = "constant"
    """Step size over the budget: constant, or in each cycle half a cosine towards 0."""
    cycles: Count = 4
    """Cycles of the cyclical step size, at least 1."""
    burn_in: Share = 0.5
    """Share of the budget, and of every cycle, before the first draw, from 0 to below 1. In a cycle these
    steps have no noise: its exploration stage."""
    kept: Count = 50
    """Draws that are kept of all steps after that, evenly; at least 1."""


class Chain(Method):
    """One chain over all weights that takes the task's budget: as many gradients as a fit by SGD.

    A subclass moves the chain (`move`), and keeps what it needs beside the position in buffers.
    """

    provides = frozenset({"weight_samples", "moments", "weighted"})
    data_parallel = False
    name: ClassVar[str]
    """The method's, for what it refuses."""
    settings: Any
    position: Tensor  # [d], where the chain is
    draws: Tensor  # [kept, d]
    steps: Tensor  # taken so far
    found: Tensor  # draws so far

    def __init__(self, problem: Problem, settings: Any, start: Chain | None = None) -> None:
        super().__init__(problem, settings, start)
        if next(self.likelihood.parameters(), None) is not None:
            raise UsageError(
                f"{self.name}: the likelihood has parameters of its own (a learned noise) and no prior to "
                "draw them under: pose it with a known sigma"
            )
        self.automatic_optimization = False
        self.network = problem.network().requires_grad_(False)  # gives the architecture
        self._like = dict(self.network.named_parameters())
        position = torch.cat([w.flatten() for w in self._like.values()])
        self.register_buffer("position", position.clone() if start is None else start.position.clone())
        self.register_buffer("draws", position.new_zeros(settings.kept, len(position)))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("found", torch.zeros((), dtype=torch.long))
        self._starts_from = problem.starts_from if start is None else None
        self._epochs, self._total, self._places = 1, 1, frozenset({0})

    @property
    def num_draws(self) -> int:  # type: ignore[override]
        """Draws that the chain has kept."""
        return max(1, int(self.found))

    # ---- schedule

    def spends(self, budget: Budget) -> Budget:
        """The budget without its patience; step sizes and draws go by its steps."""
        examples = budget.draws or len(self.problem.train)
        self._total = budget.epochs * -(-examples // (budget.batch_size or examples))
        sampling = [k for k in range(self._total) if self.progress(k) >= self.settings.burn_in]
        kept = min(self.settings.kept, len(sampling))
        self._places = frozenset(sampling[(i + 1) * len(sampling) // kept - 1] for i in range(kept))
        self._epochs = budget.epochs
        return Budget(budget.epochs, budget.batch_size, None, budget.draws)

    def progress(self, step: int) -> float:
        """Share of the cycle, or of a budget without cycles, before a step, counted from 0."""
        length = self._total
        if self.settings.schedule == "cyclical":
            length = -(-length // self.settings.cycles)
        return step % length / length

    def rate(self, step: int) -> float:
        """Step size of the gradient per example."""
        largest: float = self.settings.learning_rate
        if self.settings.schedule == "constant":
            return largest
        return largest / 2 * (1 + math.cos(math.pi * self.progress(step)))

    @property
    def warmup_epochs(self) -> int:
        """Epochs that end before the first draw."""
        return self._epochs * min(self._places, default=0) // max(1, self._total)

    # ---- sampling

    def configure_optimizers(self) -> None:
        """None: a step of the chain is no optimiser's step."""

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """One step; the loss is the energy per example before it, estimated from the batch."""
        step = int(self.steps)
        if step == 0 and self._starts_from is not None:
            weights = self._starts_from()
            self.position.copy_(torch.cat([weights[name].flatten() for name in self._like]))
        energy, slope = self.gradient(batch)
        explores = self.settings.schedule == "cyclical" and self.progress(step) < self.settings.burn_in
        self.move(slope, self.rate(step) / self.problem.num_train, not explores)
        if step in self._places:
            self.draws[int(self.found)] = self.position
            self.found += 1
        self.steps += 1
        return {"loss": energy / self.problem.num_train}

    def gradient(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The energy, the negative log joint of the full training set, in nats, and its gradient `[d]`."""
        with torch.enable_grad():
            position = self.position.detach().requires_grad_()
            weights = self._weights(position[None])
            outputs = forward(self.network, weights, batch.inputs)
            nll = likelihood_term(self.likelihood, outputs, batch, self.problem.num_train)
            energy = nll - log_prob(self.prior, weights).sum()
            (slope,) = torch.autograd.grad(energy, position)
        return energy.detach(), slope

    @abstractmethod
    def move(self, slope: Tensor, size: float, noisy: bool) -> None:
        """Moves the position.

        Args:
            slope: Gradient of the energy, `[d]`.
            size: Step size of this gradient, in nats: the learning rate per training example.
            noisy: Whether the step has its noise.
        """

    def standard_noise(self) -> Tensor:
        """Standard normal numbers `[d]`, from the method's own generator, which checkpoints hold."""
        like = self.position
        return torch.randn(like.shape, generator=self.generator, device=like.device, dtype=like.dtype)

    # ---- the draws

    @property
    def _so_far(self) -> Tensor:
        """Draws `[N, d]`; where the chain is, if there is none yet."""
        return self.draws[: int(self.found)] if self.found else self.position[None]

    def _weights(self, vectors: Tensor) -> dict[str, Tensor]:
        return unravel(vectors, self._like)

    def sample_weights(self, num_samples: int, generator: torch.Generator) -> dict[str, Tensor]:
        """A random subset of the draws in their order, `[S, *shape]`: each once before any is taken again."""
        draws = self._so_far
        chosen = randomness.subset(len(draws), num_samples, generator)
        return self._weights(draws[chosen.sort().values])

    def moments(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Mean and variance of every weight over the draws."""
        draws = self._so_far
        both = self._weights(torch.stack([draws.mean(0), draws.var(0, correction=0)]))
        return {n: w[0] for n, w in both.items()}, {n: w[1] for n, w in both.items()}

    def diagnostics(self, inputs: Tensor | None = None) -> dict[str, float]:
        """How many draws were kept, and how many independent ones they are worth for the worst weight.

        At inputs `prediction_autocorrelation`, the draws that half of what is predicted takes for one
        independent draw, of at most 100 inputs evenly over all.
        """
        draws = self._so_far
        if inputs is None:
            found = {"draws": float(self.found)}
            if len(draws) >= 4:
                found["weight_ess"] = float(effective_sample_size(draws[None].cpu()).min())
            return found
        if len(draws) < 4:
            return {}
        few = inputs[:: -(-len(inputs) // _MOST_INPUTS)]
        prediction = self.likelihood.predict(forward(self.network, self._weights(draws), few))
        return {"prediction_autocorrelation": prediction_autocorrelation(prediction)}
