"""Stochastic gradient Langevin dynamics: gradient steps with just as much noise as makes them draws.

Approximates the posterior by states of one chain, w <- w - e/2 grad U(w) + sqrt(e) N(0, I), where U is the
negative log joint and e the step size. Every so many steps the state is kept as a draw.

Source: Welling and Teh 2011, "Bayesian Learning via Stochastic Gradient Langevin Dynamics", equation 4.
Deviations: the step size is constant, and every gradient is of all data. There is no Metropolis decision:
along a direction of curvature c the variance of the draws is too large by a share of about e c / 4.
Cost: one gradient of the full data a step; (burn_in + kept) * thinning steps; the draws are kept in memory.
Valid for: every differentiable network and likelihood without parameters of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bench.contract import Batch, Budget, Method, Prediction, Problem
from bench.divergence import log_prob
from bench.energy import likelihood_term
from bench.errors import UsageError
from bench.settings import Count, Positive, Whole, settings
from bench.weights import forward, ravel, sampled_outputs, unravel

NAMES: dict[str, dict[str, object]] = {"sgld": {}}
PRESETS = {"smoke": {"burn_in": 5, "thinning": 5, "kept": 20}}


@settings
class Settings:
    """Settings of stochastic gradient Langevin dynamics."""

    step_size: Positive = 1e-4
    """e, above 0; times the largest curvature of the energy it should stay well below 1."""
    burn_in: Whole = 100
    """Draws, 0 or more, that are thrown away first."""
    thinning: Count = 10
    """Steps from one draw to the next, at least 1."""
    kept: Count = 100
    """Draws that are kept, at least 1."""


class SGLD(Method):
    """One chain of Langevin dynamics over all weights, which are the network's parameters."""

    settings_class = Settings
    approximates = "the posterior by draws of one chain of noisy gradient steps"
    provides = frozenset({"weight_samples", "moments", "weighted", "invariant"})
    settings: Settings
    draws: Tensor  # [kept, d]
    taken: Tensor  # draws so far, those of the burn-in included

    def __init__(self, problem: Problem, settings: Settings, start: SGLD | None = None) -> None:
        super().__init__(problem, settings, start)
        if next(self.likelihood.parameters(), None) is not None:
            raise UsageError("sgld: the likelihood has parameters of its own: pose it with a known sigma")
        self.automatic_optimization = False  # Lightning steps no optimiser: `training_step` moves the weights
        self.network = problem.network()
        if start is not None:
            self.network.load_state_dict(start.network.state_dict())
        size = sum(w.numel() for w in self.network.parameters())
        # Buffers are in every checkpoint, so that a stopped fit goes on with the draws that it has.
        self.register_buffer("draws", torch.zeros(settings.kept, size))
        self.register_buffer("taken", torch.zeros((), dtype=torch.long))

    # ---- sampling

    def spends(self, budget: Budget) -> Budget:
        """One draw per epoch, each epoch one batch of all data, whatever the task poses."""
        return Budget(epochs=self.settings.burn_in + self.settings.kept)

    def configure_optimizers(self) -> None:
        """None: a step of the chain is no optimiser's step."""

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Steps to the next draw, and keeps it after the burn-in; the loss is the energy per example."""
        for _ in range(self.settings.thinning):
            energy = self.energy(batch)
            slopes = torch.autograd.grad(energy, list(self.network.parameters()))
            self.step(slopes)
        place = int(self.taken) - self.settings.burn_in
        if place >= 0:
            self.draws[place] = ravel(self._state())[0].detach()
        self.taken += 1
        return {"loss": energy.detach() / self.problem.num_train}

    def energy(self, batch: Batch) -> Tensor:
        """Negative log joint of the full training set, in nats."""
        weights = self._state()
        outputs = forward(self.network, weights, batch.inputs)
        nll = likelihood_term(self.likelihood, outputs, batch, self.problem.num_train)
        return nll - log_prob(self.prior, weights).sum()

    def step(self, slopes: tuple[Tensor, ...]) -> None:
        """One step of the chain, given the slopes of the energy."""
        size = self.settings.step_size
        with torch.no_grad():
            for w, slope in zip(self.network.parameters(), slopes, strict=True):
                w += size**0.5 * self.langevin_noise(w) - size / 2 * slope

    def langevin_noise(self, like: Tensor) -> Tensor:
        """Standard normal noise for one tensor, from the method's own generator, which checkpoints hold."""
        return torch.randn(like.shape, generator=self.generator, device=like.device, dtype=like.dtype)

    def _state(self) -> dict[str, Tensor]:
        """Where the chain is, `[1, *shape]`."""
        return {name: w[None] for name, w in self.network.named_parameters()}

    # ---- the draws

    @property
    def _so_far(self) -> Tensor:
        """Draws `[N, d]`; where the chain is, if there is none yet."""
        count = int(self.taken) - self.settings.burn_in
        return self.draws[:count] if count > 0 else ravel(self._state()).detach()

    def _weights(self, vectors: Tensor) -> dict[str, Tensor]:
        return unravel(vectors, dict(self.network.named_parameters()))

    def sample_weights(self, num_samples: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Kept draws in their order, stacked `[S, *shape]`: all, as often as S allows, and a random rest."""
        draws = self._so_far
        rounds, rest = divmod(num_samples, len(draws))
        subset = torch.randperm(len(draws), generator=generator, device=generator.device)[:rest]
        return self._weights(torch.cat([*rounds * [draws], draws[subset.sort().values]]))

    def moments(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Mean and variance of every weight over the draws."""
        draws = self._so_far
        both = self._weights(torch.stack([draws.mean(0), draws.var(0, correction=0)]))
        return {n: w[0] for n, w in both.items()}, {n: w[1] for n, w in both.items()}

    def predict(self, inputs: Tensor, num_samples: int, generator: torch.Generator) -> Prediction:
        """Predictions under S draws, each shared by all inputs."""
        drawn = ravel(self.sample_weights(num_samples, generator))
        rows = iter(drawn.split(1))

        def draw(count: int, _: torch.Generator) -> dict[str, Tensor]:
            return self._weights(torch.cat([next(rows) for _ in range(count)]))

        return self.likelihood.predict(sampled_outputs(self.network, draw, inputs, num_samples, generator))
