"""Hamiltonian Monte Carlo: draws from the posterior itself, the reference for every approximation.

Approximates the posterior by the states of Markov chains that leave it invariant: Gaussian momenta, a fixed
number of leapfrog steps, and a Metropolis decision. A rejected proposal counts the old state again.

Source: Farquhar 2022, thesis "Understanding Approximation" (docs/sources.md), section 3.1 and appendix A;
Neal 2011, "MCMC using Hamiltonian dynamics", section 3; step size by dual averaging, Hoffman & Gelman 2014,
section 3.2, with their constants gamma = 0.05, t0 = 10, kappa = 0.75 and mu = log(10 * first step size), one
step size per chain, fixed after burn-in.
The published counts have two readings: all transitions have 100 leapfrog steps, or those of burn-in have one
(`burn_leapfrog_steps` 1), which is nearer to the 125,000 evaluations a chain that the thesis counts.
Deviations: the thesis names its sampler NUTS, but it is this one (100 leapfrog steps, acceptance 0.8, burn-in
10,000, 1000 draws kept: preset `paper`). A true NUTS is the kernel `nuts`, by pyro-ppl, with its defaults
(adapted diagonal mass, trees of depth 10 at most). Chains start at independent initialisations of the
network, since R-hat wants dispersed starts, unless the problem says where (`starts_from`). The mass is the
identity.
Gradients have the precision of the network; the energies that decide over a proposal are in float64, since
float32 leaves an error of 0.06 nats in an energy of 1e6. NUTS is in float64 throughout.
Cost: leapfrog_steps + 1 gradients of the full data a transition and chain; all chains in one walk. Draws are
kept in memory. Of a small network most of the time passes between its operations: `--trainer.compiled true`.
Target: the task's own posterior, no augmentation; at a `temperature` T its density to the power 1/T (Wenzel
et al. 2020, "How Good is the Bayes Posterior in Deep Neural Networks Really?").
Valid for: every differentiable network and likelihood without parameters of its own. Whether the chains
agree is for the diagnostics to say: the weights of a network seldom mix, its predictions may
(`prediction_rhat`). A trajectory of fixed length that is near a whole period of some direction ends where it
began; R-hat shows it. A chain that ends its burn-in where the posterior is narrower than its step never moves
again; steps that vary (`step_jitter`; Neal 2011, section 4.2) let it out.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from bench import randomness
from bench.contract import JOINT, Batch, Budget, Method, Prediction, Problem
from bench.diagnostics import effective_sample_size, prediction_rhat, split_rhat
from bench.divergence import log_prob
from bench.errors import UsageError
from bench.families.no_u_turn import NoUTurn
from bench.priors import joined_normals
from bench.settings import Count, Positive, Whole, settings
from bench.weights import forward, sampled_outputs, unravel

NAMES: dict[str, dict[str, object]] = {"hmc": {}}
PRESETS = {
    "smoke": {"chains": 2, "burn": 20, "kept": 20, "leapfrog_steps": 5},
    "paper": {"burn": 10_000, "kept": 1000},
}
SEARCH = {
    "leapfrog_steps": [25, 50, 100, 200],
    "target_acceptance": (0.6, 0.95, "linear"),
}

_LARGEST = 2**30
"""Bytes of draws that are kept at most, 1 GiB."""
_LARGEST_ERROR = 1000.0
"""Nats of energy error from which a trajectory has diverged (Hoffman & Gelman 2014, section 3.1.1)."""
_ROWS = 250
"""Inputs at which all draws predict at once; bounds memory."""
_STRIDE = 4
"""Leapfrog steps that are compiled in one piece: twice as many take twice as long to compile."""
_GAMMA, _T0, _KAPPA = 0.05, 10.0, 0.75


@settings
class Settings:
    """Settings of Hamiltonian Monte Carlo."""

    kernel: Literal["hmc", "nuts"] = "hmc"
    """hmc, trajectories of a fixed number of steps; or nuts, the No-U-Turn Sampler, which needs pyro-ppl."""
    chains: Count = 4
    """Chains, at least 1; with one alone its two halves are compared."""
    burn: Whole = 1000
    """Transitions of each chain, 0 or more, that adapt the step size and are thrown away."""
    kept: Annotated[int, Field(ge=4)] = 500
    """Transitions of each chain, at least 4, that are kept as draws after them."""
    leapfrog_steps: Count = 100
    """Steps of one trajectory, at least 1; nuts chooses its own."""
    burn_leapfrog_steps: Count | None = None
    """Steps of one trajectory in burn-in, at least 1; as many as afterwards if not given."""
    target_acceptance: Annotated[float, Field(gt=0, lt=1)] = 0.8
    """Mean probability of acceptance that the step size is adapted to, a fraction."""
    step_jitter: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share, below 1, up to which a chain's step size varies from one transition to the next; 0 for nuts."""
    initial_step_size: Positive = 0.01
    """First step size, above 0; that of all transitions without burn-in."""
    temperature: Positive = 1.0
    """T, above 0: what is drawn from is the posterior to the power 1/T. Below 1 it is a cold posterior."""


class HMC(Method):
    """Parallel chains of Hamiltonian Monte Carlo over all weights."""

    settings_class = Settings
    approximates = "the posterior by draws of Markov chains that leave it invariant"
    declares = "exact in the limit of steps", {"burn": 80, "kept": 200, "step_jitter": 0.5}
    provides = frozenset({"weight_samples", "moments", "weighted", "invariant"})
    data_parallel = False
    compilable = "stride"
    settings: Settings
    positions: Tensor  # [C, d], where the chains are
    draws: Tensor  # [C, kept, d]
    log_step: Tensor  # [C]
    average_log_step: Tensor  # [C]
    shortfall: Tensor  # [C], running mean of target minus acceptance
    acceptance: Tensor  # [C], sum of probabilities after burn-in
    divergences: Tensor  # after burn-in, all chains
    transitions: Tensor  # of each chain
    gradients: Tensor  # of the full data, all chains

    def __init__(self, problem: Problem, settings: Settings, start: HMC | None = None) -> None:
        super().__init__(problem, settings, start)
        self.automatic_optimization = False
        self.num_chains, self.num_draws = settings.chains, settings.chains * settings.kept
        self._starts_from = problem.starts_from if start is None else None
        self._chains: list[NoUTurn] = []  # of the kernel nuts
        self._left: list[Any] = []  # their states in the checkpoint of an unfinished fit
        self.network = problem.network().requires_grad_(False)  # gives the architecture
        self._like = dict(self.network.named_parameters())
        self._refuse()
        networks = [self.network, *(problem.network() for _ in range(1, settings.chains))]
        positions = torch.cat(
            [nn.utils.parameters_to_vector(m.parameters())[None] for m in networks]
        ).detach()
        self.register_buffer("positions", positions if start is None else start.positions.clone())
        self.register_buffer("draws", positions.new_zeros(settings.chains, settings.kept, positions.shape[1]))
        zeros = torch.zeros(settings.chains, dtype=torch.float64)
        self.register_buffer("log_step", zeros + math.log(settings.initial_step_size))
        for name in ("average_log_step", "shortfall", "acceptance"):
            self.register_buffer(name, zeros.clone())
        for name in ("divergences", "transitions", "gradients"):
            self.register_buffer(name, torch.zeros((), dtype=torch.long))

    def _refuse(self) -> None:
        if next(self.likelihood.parameters(), None) is not None:
            raise UsageError(
                "hmc: the likelihood has parameters of its own (a learned noise) and no prior to draw them "
                "under: pose it with a known sigma"
            )
        size = sum(p.numel() for p in self.network.parameters())
        chains, kept = self.settings.chains, self.settings.kept
        if (needed := 4 * chains * kept * size) > _LARGEST:
            raise UsageError(
                f"hmc: {chains} x {kept} draws of {size:,} weights take {needed / 2**30:.1f} GiB, more than "
                f"{_LARGEST / 2**30:.0f}: lower --method.kept or --method.chains"
            )
        if self.settings.kernel == "nuts" and importlib.util.find_spec("pyro") is None:
            raise UsageError("hmc --method.kernel nuts needs pyro: pip install 'posterior-bench[nuts]'")
        if self.settings.kernel == "nuts" and self.settings.step_jitter:
            raise UsageError("hmc: the steps of the kernel nuts do not vary: leave out --method.step_jitter")

    # ---- sampling

    def spends(self, budget: Budget) -> Budget:
        """One transition on all data per epoch: burn-in and what is kept, whatever the task poses."""
        return Budget(epochs=self.settings.burn + self.settings.kept)

    def configure_optimizers(self) -> None:
        """None: a transition is no optimiser's step."""

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """One transition of every chain; the loss is the mean of `_energy` per example."""
        done = int(self.transitions)
        if done == 0 and self._starts_from is not None:
            weights = self._starts_from()
            self.positions.copy_(torch.cat([weights[name].flatten() for name in self._like]))
        terms = self._no_u_turn(batch) if self.settings.kernel == "nuts" else self._trajectory(batch)
        if done >= self.settings.burn:
            self.draws[:, done - self.settings.burn] = self.positions
        self.transitions += 1
        return terms

    def _trajectory(self, batch: Batch) -> dict[str, Tensor]:
        """One transition of every chain by a trajectory of fixed length."""
        settings, done = self.settings, int(self.transitions)
        momenta = torch.randn(
            self.positions.shape, generator=self.generator, device=self.device, dtype=self.positions.dtype
        )
        energy = self._energy(self.positions, batch)
        steps = settings.leapfrog_steps
        if done < settings.burn and settings.burn_leapfrog_steps is not None:
            steps = settings.burn_leapfrog_steps
        start = (self._gradient(batch), self.positions, momenta, self._step_sizes(), steps)
        proposal, final = leapfrog(*start, partial(self.stride, batch, self._normal()))
        proposed_energy = self._energy(proposal, batch)
        error = proposed_energy + kinetic_energy(final) - energy - kinetic_energy(momenta)  # [C], nats
        acceptance = torch.where(error.isfinite(), (-error).clamp(max=0).exp(), 0.0)
        accepted = self._accept(acceptance)
        self.positions.copy_(torch.where(accepted[:, None], proposal, self.positions))
        self.gradients += settings.chains * (steps + 1)
        if done < settings.burn:
            self._adapt(done + 1, acceptance)
        else:
            self.acceptance += acceptance
            self.divergences += (~(error <= _LARGEST_ERROR)).sum()
        loss = torch.where(accepted, proposed_energy, energy).mean() / self.problem.num_train
        return {"loss": loss, "acceptance": acceptance.mean()}

    def _step_sizes(self) -> Tensor:
        """Of one transition, `[C]`. A draw that no position knows of leaves the posterior invariant."""
        steps, jitter = self.log_step.exp(), self.settings.step_jitter
        if jitter:
            uniform = torch.rand(
                len(steps), generator=self.generator, device=steps.device, dtype=torch.float64
            )
            steps = steps * (1 + jitter * (2 * uniform - 1))
        return steps

    def _accept(self, probability: Tensor) -> Tensor:
        uniform = torch.rand(
            len(probability), generator=self.generator, device=probability.device, dtype=torch.float64
        )
        return uniform < probability

    def _adapt(self, transition: int, acceptance: Tensor) -> None:
        """Dual averaging of the step sizes (Hoffman & Gelman 2014, eq. 6) after a transition, from 1."""
        self.shortfall.lerp_(self.settings.target_acceptance - acceptance, 1 / (transition + _T0))
        centre = math.log(10 * self.settings.initial_step_size)
        self.log_step.copy_(centre - self.shortfall * (math.sqrt(transition) / _GAMMA))
        self.average_log_step.lerp_(self.log_step, transition**-_KAPPA)
        if transition == self.settings.burn:
            self.log_step.copy_(self.average_log_step)

    def _log_likelihood(self, positions: Tensor, batch: Batch) -> Tensor:
        """Of all data under each of the weights `[C, d]`, `[C]`, in nats."""
        outputs = forward(self.network, self._weights(positions), batch.inputs)
        log_probs = self.likelihood.log_prob(outputs, batch.targets)  # [C, B]
        return (log_probs if batch.weights is None else log_probs * batch.weights).sum(-1)

    def _energy(self, positions: Tensor, batch: Batch) -> Tensor:
        """Negative log joint of weights `[C, d]` over the temperature, in float64, `[C]`, in nats."""
        double = positions.double()
        tensors: Any = (t.double() if t is not None and t.is_floating_point() else t for t in batch)
        # What is linear algebra in a coupled prior wants the precision of its own tensors.
        at = double.to(self.positions.dtype) if JOINT in self.prior else double
        joint = self._log_likelihood(double, Batch(*tensors)) + log_prob(self.prior, self._weights(at))
        return -joint / self.settings.temperature

    def _normal(self) -> tuple[Tensor, Tensor] | None:
        """Means and precisions `[d]` of a prior of normals, whose gradient has a closed form; else None."""
        normals = joined_normals(self.prior)
        return None if normals is None or JOINT in self.prior else (normals[0], normals[1] ** -2)

    def _gradient(self, batch: Batch) -> Callable[[Tensor], Tensor]:
        """The gradient of the energy at weights `[C, d]`, in their own precision."""
        return partial(self._slope, batch, self._normal())

    def stride(
        self, batch: Batch, normal: tuple[Tensor, Tensor] | None, *state: Any
    ) -> tuple[Tensor, Tensor]:
        """`full_steps` from a state; compiled in one piece, since between two pieces time is lost."""
        return full_steps(partial(self._slope, batch, normal), *state)

    def _slope(self, batch: Batch, normal: tuple[Tensor, Tensor] | None, positions: Tensor) -> Tensor:

        def energy(at: Tensor) -> Tensor:
            energy = -self._log_likelihood(at, batch).sum()
            return energy if normal is not None else energy - log_prob(self.prior, self._weights(at)).sum()

        if torch.compiler.is_compiling():  # eager it takes twice the time
            slope = torch.func.grad(energy)(positions)
        else:
            with torch.enable_grad():
                leaves = positions.detach().requires_grad_()
                (slope,) = torch.autograd.grad(energy(leaves), leaves)
        if normal is not None:
            slope = slope.addcmul_(positions - normal[0], normal[1])
        temperature = self.settings.temperature
        return slope if temperature == 1 else slope / temperature

    def _no_u_turn(self, batch: Batch) -> dict[str, Tensor]:
        """One transition of every chain by pyro's kernel, which adapts itself."""
        if torch.is_autocast_enabled(self.device.type):
            raise UsageError("hmc: the kernel nuts is in float64 throughout: --trainer.precision 32-true")
        if "stride" in vars(self):
            raise UsageError("hmc: the kernel nuts is not compiled: leave out --trainer.compiled")

        def energy(weights: Tensor) -> Tensor:
            return self._energy(weights[None], batch).squeeze(0)

        self._chains = self._chains or self._begin(energy)
        kept = max(0, int(self.transitions) + 1 - self.settings.burn)
        for c, chain in enumerate(self._chains):
            chain.energy = energy
            self.positions[c] = chain.step()
            self.log_step[c] = math.log(chain.kernel.step_size)
            self.acceptance[c] = kept * chain.kernel._mean_accept_prob
        self.divergences.fill_(sum(len(chain.kernel._divergences) for chain in self._chains))
        self.gradients.fill_(sum(chain.gradients for chain in self._chains))
        energies = torch.stack([chain.kernel._potential_energy_last for chain in self._chains])
        return {"loss": energies.mean() / self.problem.num_train}

    def _begin(self, energy: Callable[[Tensor], Tensor]) -> list[NoUTurn]:
        """The chains of the kernel nuts, new or as an earlier start of the run has left them."""
        seed = 0
        if not self._left:
            seed = int(torch.randint(2**62, (), generator=self.generator, device=self.device))
        own = self.settings
        adapting = own.burn, own.initial_step_size, own.target_acceptance
        chains = [
            NoUTurn(*adapting, position, energy, randomness.derive(seed, number))
            for number, position in enumerate(self.positions)
        ]
        for chain, state in zip(chains, self._left, strict=False):
            chain.state = state
        return chains

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds what pyro's kernels hold while they have transitions to make."""
        super().on_save_checkpoint(checkpoint)
        unfinished = int(self.transitions) < self.settings.burn + self.settings.kept
        checkpoint["chains"] = [chain.state for chain in self._chains] if unfinished else []

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restores what `on_save_checkpoint` added."""
        super().on_load_checkpoint(checkpoint)
        self._left = checkpoint["chains"]

    # ---- the draws

    @property
    def _so_far(self) -> Tensor:
        """Draws `[C, N, d]`; where the chains are, if there is none yet."""
        count = int(self.transitions) - self.settings.burn
        return self.draws[:, :count] if count > 0 else self.positions[:, None]

    def _weights(self, vectors: Tensor) -> dict[str, Tensor]:
        return unravel(vectors, self._like)

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
        return self._weights(self._choose(num_samples, generator))

    def moments(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Mean and variance of every weight over all draws."""
        draws = self._so_far.flatten(0, 1)
        parts = (self._weights(m[None]) for m in (draws.mean(0), draws.var(0, correction=0)))
        mean, variance = ({name: w.squeeze(0) for name, w in part.items()} for part in parts)
        return mean, variance

    def predict(self, inputs: Tensor, num_samples: int, generator: torch.Generator) -> Prediction:
        """Predictions under S draws, chain after chain, of every chain equally many if C divides S."""
        return self._predict(inputs, self._choose(num_samples, generator))

    def _predict(self, inputs: Tensor, vectors: Tensor) -> Prediction:
        left = vectors

        def draw(count: int, generator: torch.Generator) -> dict[str, Tensor]:
            nonlocal left
            taken, left = left[:count], left[count:]
            return self._weights(taken)

        return self.likelihood.predict(
            sampled_outputs(self.network, draw, inputs, len(vectors), self.generator)
        )

    def diagnostics(self, inputs: Tensor | None = None) -> dict[str, float]:
        """Acceptance, step size, divergences and gradients after the fit, R-hat and effective sample size.

        Over weights the worst; at inputs `prediction_rhat`, the largest R-hat of what all draws predict.
        """
        draws = self._so_far
        if draws.shape[1] < 4:
            return {}
        if inputs is not None:
            parts = [self._predict(part, draws.flatten(0, 1)) for part in inputs.split(_ROWS)]
            return {"prediction_rhat": max(prediction_rhat(part, len(draws)) for part in parts)}
        return {
            "acceptance": (self.acceptance / draws.shape[1]).mean().item(),
            "step_size": self.log_step.exp().mean().item(),
            "divergences": self.divergences.item(),
            "gradient_evaluations": self.gradients.item(),
            "weight_rhat": float(split_rhat(draws.cpu()).max()),
            "weight_ess": float(effective_sample_size(draws.cpu()).min()),
        }


Stride = Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]


def leapfrog(
    gradient: Callable[[Tensor], Tensor],
    positions: Tensor,
    momenta: Tensor,
    step_sizes: Tensor,
    num_steps: int,
    stride: Stride | None = None,
) -> tuple[Tensor, Tensor]:
    """Positions and momenta `[C, d]` after steps of sizes `[C]`, unit mass (Neal 2011, section 2.3).

    All but the first half step and the last are those of `stride`, by default `full_steps`, a few at once.
    """
    stride = stride or partial(full_steps, gradient)
    steps = step_sizes.to(positions)[:, None]
    momenta = momenta - steps / 2 * gradient(positions)
    strides, single = divmod(num_steps - 1, _STRIDE)
    for count in (*strides * [_STRIDE], *single * [1]):
        positions, momenta = stride(positions, momenta, steps, count)
    positions = torch.addcmul(positions, steps, momenta)
    return positions, momenta - steps / 2 * gradient(positions)


def full_steps(
    gradient: Callable[[Tensor], Tensor], positions: Tensor, momenta: Tensor, steps: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """Positions and momenta `[C, d]` after so many full steps of both, of sizes `[C, 1]`."""
    for _ in range(count):
        positions = torch.addcmul(positions, steps, momenta)
        momenta = torch.addcmul(momenta, steps, gradient(positions), value=-1)
    return positions, momenta


def kinetic_energy(momenta: Tensor) -> Tensor:
    """Of momenta `[C, d]` with unit mass in float64, `[C]`, in nats."""
    return momenta.double().square().sum(-1) / 2
