"""Microcanonical Langevin dynamics: chains whose velocity has length 1, and how they choose their steps.

The equations are dx = u dt, du = -(I - u u^T) (grad U / (d - 1) dt - eta dW), where U is the negative log
joint of d weights: left alone for long, x is a draw from exp(-U) and u a uniform direction. A step is of the
minimal-norm integrator, between two partial refreshments of u; it has no Metropolis decision, and its energy
error says how large it may be.

Source: Robnik, De Luca, Silverstein and Seljak 2023, "Microcanonical Hamiltonian Monte Carlo" (the equations,
their exact update of u, and the energy error); Robnik and Seljak 2023, "Fluctuation without Dissipation:
Microcanonical Langevin Monte Carlo" (the noise, and three phases of tuning, with the constants of the
authors' code); the integrator is that of McLachlan 1995, "On the Numerical Integration of Ordinary
Differential Equations by Symmetric Composition Methods".

Shapes: C chains, d weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bench.contract import Batch, Budget, Method, Prediction, Problem
from bench.diagnostics import effective_sample_size, prediction_rhat, split_rhat
from bench.divergence import log_prob
from bench.errors import UsageError
from bench.weights import forward, sampled_outputs, unravel

LARGEST = 2**30
"""Bytes of draws that are kept at most, 1 GiB."""
_ROWS = 250
"""Inputs at which all draws predict at once; bounds memory."""
_OUTER = 0.1931833275037836
"""Share of a step in the first and in the last update of u: of all symmetric splittings the least error."""
_TRUST, _LENGTH = 1.5, 0.4
"""Width of the weights of step sizes; the length L in units of the path between independent draws."""
_WATCHED = 2000
"""Weights that this length is estimated from at most."""

Slope = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Energies `[C]` in float64 and gradients `[C, d]` at positions `[C, d]`, in nats."""


# ------------------------------------------------------------------------------------------------ dynamics


def kick(directions: Tensor, slopes: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
    """Directions u `[C, d]` after these times at constant slope, and the kinetic energy gained, `[C]`, nats.

    Exact: with e downhill, of length 1, and D = time |slope| / (d - 1), u becomes the direction of
    u + e (sinh D + u.e (cosh D - 1)), and what is gained is (d - 1) log(cosh D + u.e sinh D).

    Args:
        directions: Of length 1, `[C, d]`.
        slopes: Gradients of the energy, `[C, d]`.
        times: `[C]`, in float64.
    """
    size = directions.shape[1] - 1
    norms = slopes.norm(dim=1, keepdim=True).clamp(min=torch.finfo(slopes.dtype).tiny)
    downhill = -slopes / norms
    along = (directions * downhill).sum(1).double()
    delta = times * norms[:, 0].double() / size
    shrink = (-delta).exp()
    ahead = (1 - shrink) * (1 + shrink + along * (1 - shrink))
    turned = ahead.to(slopes)[:, None] * downhill + (2 * shrink).to(slopes)[:, None] * directions
    gained = size * (delta + torch.log1p((1 - along) / 2 * torch.expm1(-2 * delta)))
    return nn.functional.normalize(turned, dim=1), gained


def integrate(
    slope: Slope, positions: Tensor, directions: Tensor, slopes: Tensor, steps: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """One step of the minimal-norm integrator: two gradients, reversible, of second order.

    Args:
        slope: Energies and gradients.
        positions: `[C, d]`.
        directions: Of length 1, `[C, d]`.
        slopes: Gradients at the positions.
        steps: Sizes `[C]`, in float64.

    Returns:
        New positions, directions and slopes `[C, d]`, energies there and the kinetic energy gained, `[C]`.
    """
    half = (steps / 2).to(positions)[:, None]
    directions, first = kick(directions, slopes, _OUTER * steps)
    positions = positions + half * directions
    directions, second = kick(directions, slope(positions)[1], (1 - 2 * _OUTER) * steps)
    positions = positions + half * directions
    energies, slopes = slope(positions)
    directions, third = kick(directions, slopes, _OUTER * steps)
    return positions, directions, slopes, energies, first + second + third


def refresh(directions: Tensor, noise: Tensor, shares: Tensor) -> Tensor:
    """Directions that forget: after shares of 1 a correlation of 1 / e is left.

    Args:
        directions: Of length 1, `[C, d]`.
        noise: Standard normal, `[C, d]`.
        shares: Path in units of the length L, `[C]`.
    """
    scale = (torch.expm1(2 * shares) / directions.shape[1]).sqrt()
    return nn.functional.normalize(directions + scale.to(noise)[:, None] * noise, dim=1)


# ------------------------------------------------------------------------------------------------- chains


class Microcanonical(Method):
    """Parallel chains over all weights. A subclass says where they start, and how they are tuned.

    The settings have `chains`, `burn`, `kept`, `steps` and `energy_variance`. An epoch is one transition of
    every chain: `steps` steps on all data, of which the last is kept.
    """

    provides = frozenset({"weight_samples", "moments", "weighted"})
    data_parallel = False
    name: ClassVar[str]
    """The method's, for what it refuses."""
    phases: ClassVar[tuple[float, float]]
    """Shares of the burn-in in which the step size alone is tuned, and in which variances give L."""
    memory: ClassVar[int]
    """Steps that the step size remembers."""
    settings: Any
    positions: nn.Parameter  # [C, d], where the chains are
    directions: Tensor  # [C, d], of length 1
    draws: Tensor  # [C, kept, d]
    step_size: Tensor  # [C]
    largest_step: Tensor  # [C], below sizes that have left the finite numbers
    length: Tensor  # [C], L
    tuning: Tensor  # [2, C], weighted sums of the estimates of size^-6, and of their weights
    spread: Tensor  # [3, C, d], path-weighted sums of 1, x, x^2
    energy_error: Tensor  # [C], sum of squared energy errors a weight after burn-in
    divergences: Tensor  # steps that left the finite numbers, after burn-in, all chains
    transitions: Tensor  # of each chain
    gradients: Tensor  # of the full data, all chains

    def __init__(self, problem: Problem, settings: Any, start: Microcanonical | None = None) -> None:
        super().__init__(problem, settings, start)
        self.automatic_optimization = False
        self.num_chains, self.num_draws = settings.chains, settings.chains * settings.kept
        self._starts_from = problem.starts_from if start is None else None
        self.network = problem.network().requires_grad_(False)  # gives the architecture
        self._like = dict(self.network.named_parameters())
        self._refuse()
        networks = [self.network, *(problem.network() for _ in range(1, settings.chains))]
        vectors = torch.stack([nn.utils.parameters_to_vector(m.parameters()) for m in networks]).detach()
        self.positions = nn.Parameter(vectors if start is None else start.positions.detach().clone(), False)
        chains, size = vectors.shape
        noise = torch.randn(vectors.shape, generator=self.generator)
        self.register_buffer("directions", nn.functional.normalize(noise, dim=1))
        self.register_buffer("draws", vectors.new_zeros(chains, settings.kept, size))
        zeros = torch.zeros(chains, dtype=torch.float64)
        self.register_buffer("step_size", zeros + self.first_step(size))
        self.register_buffer("largest_step", zeros + math.inf)
        self.register_buffer("length", zeros + self.first_length(size))
        self.register_buffer("tuning", torch.zeros(2, chains, dtype=torch.float64))
        self.register_buffer("spread", torch.zeros(3, chains, size, dtype=torch.float64))
        self.register_buffer("energy_error", zeros.clone())
        for name in ("divergences", "transitions", "gradients"):
            self.register_buffer(name, torch.zeros((), dtype=torch.long))

    def _refuse(self) -> None:
        if next(self.likelihood.parameters(), None) is not None:
            raise UsageError(
                f"{self.name}: the likelihood has parameters of its own (a learned noise) and no prior to "
                "draw them under: pose it with a known sigma"
            )
        size, own = sum(p.numel() for p in self._like.values()), self.settings
        if size < 2:
            raise UsageError(f"{self.name}: a direction takes at least two weights: take another method")
        if (needed := 4 * own.chains * own.kept * size) > LARGEST:
            raise UsageError(
                f"{self.name}: {own.chains} x {own.kept} draws of {size:,} weights take "
                f"{needed / 2**30:.1f} GiB, more than {LARGEST / 2**30:.0f}: lower --method.kept or "
                "--method.chains"
            )

    def first_step(self, size: int) -> float:
        """Size of the first step, of d weights."""
        return 0.25 * math.sqrt(size)

    def first_length(self, size: int) -> float:
        """L until it is tuned, of d weights."""
        return math.sqrt(size)

    def target(self, share: float) -> float:
        """Variance of the energy error a weight that steps are tuned to, after a share of that tuning."""
        variance: float = self.settings.energy_variance
        return variance

    # ---- sampling

    def spends(self, budget: Budget) -> Budget:
        """One transition on all data per epoch: burn-in and what is kept, whatever the task poses."""
        return Budget(epochs=self.settings.burn + self.settings.kept)

    def configure_optimizers(self) -> Any:
        """None: a step of the chain is no optimiser's step."""

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """One transition of every chain; the loss is the mean negative log joint per example."""
        done = int(self.transitions)
        self.start_where_told()
        slope = partial(self.slope, batch)
        energies, slopes = slope(self.positions)
        for step in range(self.settings.steps):
            energies, slopes = self._step(slope, energies, slopes, done * self.settings.steps + step)
        self.gradients += self.settings.chains * (2 * self.settings.steps + 1)
        if done >= self.settings.burn:
            self.draws[:, done - self.settings.burn] = self.positions.detach()
        self.transitions += 1
        return {"loss": energies.mean() / self.problem.num_train}

    @torch.no_grad()
    def start_where_told(self) -> None:
        """Puts all chains where the problem says, before their first gradient."""
        if int(self.gradients) == 0 and self._starts_from is not None:
            weights = self._starts_from()
            self.positions.copy_(torch.cat([weights[name].flatten() for name in self._like]))

    @torch.no_grad()
    def _step(self, slope: Slope, energies: Tensor, slopes: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """One step of every chain, counted from 0 over all; a chain that leaves the finite numbers stays."""
        half = self.step_size / self.length / 2
        directions = refresh(self.directions, self._noise(), half)
        state = integrate(slope, self.positions, directions, slopes, self.step_size)
        positions, directions, new_slopes, new_energies, gained = state
        error = new_energies - energies + gained
        moved = error.isfinite() & positions.isfinite().all(1) & new_slopes.isfinite().all(1)
        row = moved[:, None]
        noise = self._noise()
        self.directions.copy_(
            torch.where(row, refresh(directions, noise, half), nn.functional.normalize(noise, dim=1))
        )
        self.positions.copy_(torch.where(row, positions, self.positions))
        total = self.settings.burn * self.settings.steps
        if number < total:
            self._tune(number, total, torch.where(moved, error, 0.0), moved)
        else:
            self.divergences += (~moved).sum()
            self.energy_error += torch.where(moved, error, 0.0).square() / len(slopes[0])
        return torch.where(moved, new_energies, energies), torch.where(row, new_slopes, slopes)

    def _noise(self) -> Tensor:
        like = self.directions
        return torch.randn(like.shape, generator=self.generator, device=like.device, dtype=like.dtype)

    def slope(self, batch: Batch, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Energies `[C]` in float64 and gradients `[C, d]` of the negative log joint, in nats."""
        with torch.enable_grad():
            at = positions.detach().requires_grad_()
            energies = self.energy(batch, at)
            (slopes,) = torch.autograd.grad(energies.sum(), at)
        return energies.detach(), slopes

    def energy(self, batch: Batch, positions: Tensor) -> Tensor:
        """Negative log joint of weights `[C, d]`, `[C]`, in nats; examples are summed in float64."""
        weights = unravel(positions, self._like)
        log_probs = self.likelihood.log_prob(forward(self.network, weights, batch.inputs), batch.targets)
        log_probs = log_probs if batch.weights is None else log_probs * batch.weights
        return -log_probs.double().sum(-1) - log_prob(self.prior, weights)

    # ---- tuning

    def _tune(self, number: int, total: int, error: Tensor, moved: Tensor) -> None:
        """What a step of the burn-in teaches: of its size, then of the variances, then of the memory."""
        first, second = (round(share * total) for share in self.phases)
        if number < first + second:
            self._tune_step(self.target(number / (first + second)), error, moved)
            if number >= first:
                path = (self.step_size * moved)[:, None].double()
                at = self.positions.double()
                self.spread += torch.stack([path.expand_as(at), path * at, path * at.square()])
            if number == first + second - 1:
                weight, mean, square = self.spread
                mean, square = mean / weight.clamp(min=1e-300), square / weight.clamp(min=1e-300)
                length = (square - mean.square()).clamp(min=0).sum(1).sqrt()
                self.length.copy_(torch.where(length > 0, length, self.length))
        else:
            self._watch(number - first - second, total - first - second)

    def _tune_step(self, target: float, error: Tensor, moved: Tensor) -> None:
        """The size whose energy error has the variance aimed at, which grows as its sixth power."""
        ratio = error.square() / (self.directions.shape[1] * target) + 1e-8
        weight = torch.exp(-0.5 * (ratio.log() / (6 * _TRUST)).square()) * moved
        self.tuning.mul_((self.memory - 1) / (self.memory + 1))
        self.tuning += torch.stack([weight * ratio / self.step_size**6, weight])
        shrunk = torch.minimum(self.largest_step, 0.8 * self.step_size)
        self.largest_step.copy_(torch.where(moved, self.largest_step, shrunk))
        sums, weights = self.tuning
        size = torch.where(weights > 0, (sums / weights.clamp(min=1e-300)) ** (-1 / 6), self.step_size)
        self.step_size.copy_(torch.minimum(size, self.largest_step))

    def _watch(self, number: int, total: int) -> None:
        """Keeps positions where the draws will be, and sets L by their effective sample size at the end."""
        stride = -(-total // self.settings.kept)
        if number % stride == stride - 1:
            self.draws[:, number // stride] = self.positions.detach()
        if number != total - 1 or (watched := total // stride) < 4:
            return
        some = torch.linspace(0, self.draws.shape[2] - 1, min(_WATCHED, self.draws.shape[2])).long()
        for c, chain in enumerate(self.draws[:, :watched, some].cpu()):
            sizes = torch.from_numpy(effective_sample_size(chain[None].numpy()))
            self.length[c] = _LENGTH * self.step_size[c] * (watched * stride / sizes).mean()

    # ---- the draws

    @property
    def _so_far(self) -> Tensor:
        """Draws `[C, N, d]`; where the chains are, if there is none yet."""
        count = int(self.transitions) - self.settings.burn
        return self.draws[:, :count] if count > 0 else self.positions.detach()[:, None]

    def _choose(self, num_samples: int, generator: torch.Generator) -> Tensor:
        """Draws `[S, d]`, chain after chain: of each a random subset, after all of it where S is more."""
        draws = self._so_far
        chosen = []
        for c, chain in enumerate(draws):
            share = num_samples // len(draws) + (c < num_samples % len(draws))
            rounds, rest = divmod(share, len(chain))
            subset = torch.randperm(len(chain), generator=generator, device=generator.device)[:rest]
            chosen += [*rounds * [chain], chain[subset.sort().values]]
        return torch.cat(chosen)

    def sample_weights(self, num_samples: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Draws of all chains, stacked `[S, *shape]`, chain after chain."""
        return unravel(self._choose(num_samples, generator), self._like)

    def moments(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Mean and variance of every weight over all draws."""
        draws = self._so_far.flatten(0, 1)
        both = unravel(torch.stack([draws.mean(0), draws.var(0, correction=0)]), self._like)
        return {n: w[0] for n, w in both.items()}, {n: w[1] for n, w in both.items()}

    def predict(self, inputs: Tensor, num_samples: int, generator: torch.Generator) -> Prediction:
        """Predictions under S draws, chain after chain, of every chain equally many if C divides S."""
        return self._predict(inputs, self._choose(num_samples, generator))

    def _predict(self, inputs: Tensor, vectors: Tensor) -> Prediction:
        left = vectors

        def draw(count: int, generator: torch.Generator) -> dict[str, Tensor]:
            nonlocal left
            taken, left = left[:count], left[count:]
            return unravel(taken, self._like)

        return self.likelihood.predict(
            sampled_outputs(self.network, draw, inputs, len(vectors), self.generator)
        )

    def diagnostics(self, inputs: Tensor | None = None) -> dict[str, float]:
        """Steps, lengths, energy errors, gradients after the fit, R-hat and effective sample size.

        Over weights the worst; at inputs `prediction_rhat`, the largest R-hat of what all draws predict.
        """
        draws = self._so_far
        if draws.shape[1] < 4:
            return {}
        if inputs is not None:
            parts = [self._predict(part, draws.flatten(0, 1)) for part in inputs.split(_ROWS)]
            return {"prediction_rhat": max(prediction_rhat(part, len(draws)) for part in parts)}
        return {
            "step_size": self.step_size.mean().item(),
            "decoherence_length": self.length.mean().item(),
            "energy_variance": (self.energy_error / (draws.shape[1] * self.settings.steps)).mean().item(),
            "divergences": self.divergences.item(),
            "gradient_evaluations": self.gradients.item(),
            "weight_rhat": float(split_rhat(draws.cpu()).max()),
            "weight_ess": float(effective_sample_size(draws.cpu()).min()),
        }
