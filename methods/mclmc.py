"""Microcanonical Langevin Monte Carlo: draws along paths of constant speed, without a Metropolis decision.

Approximates the posterior by the states of Markov chains. A chain moves at speed 1, turns downhill by the
slope of the energy, and forgets its direction over the length L. Steps are as large as an energy error
allows.

Source: Robnik, De Luca, Silverstein and Seljak 2023, "Microcanonical Hamiltonian Monte Carlo"; Robnik and
Seljak 2023, "Fluctuation without Dissipation: Microcanonical Langevin Monte Carlo". Equations, integrator and
tuning are in `bench/families/microcanonical.py`, since `mile` has them too.
The step is tuned to a variance of the energy error of 5e-4 a weight, over the last 150 steps; each of three
parts of the burn-in tunes one number: the size of the step, L by the variances of the weights, and L by the
effective sample size of the chain.
Deviations: the published code makes each part a tenth of all steps; here `burn` says how many there are. It
knows one chain; here are several, each tuned for itself, from an independent initialisation of the network.
Weights are not scaled by their variances. Effective sample sizes are of ranks.
Target: the task's own posterior at temperature 1, no augmentation. Steps are not 0 and nothing is rejected:
the law of the draws is the posterior's but for an error that falls with the energy error.
Cost: 2 gradients of the full data a step and chain, and one more a transition; all chains in one walk. Draws
are kept in memory.
Valid for: every differentiable network of two weights or more, and likelihoods without parameters of their
own.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from bench.families.microcanonical import Microcanonical
from bench.settings import Count, Positive, settings

NAMES: dict[str, dict[str, object]] = {"mclmc": {}}
PRESETS = {"smoke": {"chains": 2, "burn": 12, "kept": 20, "steps": 3}}
SEARCH = {"energy_variance": (5e-5, 0.5, "log"), "steps": [5, 10, 20, 50]}


@settings
class Settings:
    """Settings of microcanonical Langevin Monte Carlo."""

    chains: Count = 4
    """Chains, at least 1; with one alone its two halves are compared."""
    burn: Annotated[int, Field(ge=3)] = 500
    """Transitions of each chain, at least 3, that tune its steps and are thrown away."""
    kept: Annotated[int, Field(ge=4)] = 500
    """Transitions of each chain, at least 4, that are kept as draws after them."""
    steps: Count = 10
    """Steps of one transition, at least 1."""
    energy_variance: Positive = 5e-4
    """Variance of the energy error that a step is tuned to, a weight, above 0, in nats^2."""


class MCLMC(Microcanonical):
    """Parallel chains of microcanonical Langevin dynamics over all weights."""

    settings_class = Settings
    approximates = "the posterior by draws of chains of constant speed, without a Metropolis decision"
    declares = "exact in the limit of steps", {"burn": 60, "kept": 120, "steps": 8}
    name = "mclmc"
    phases = (1 / 3, 1 / 3)
    memory = 150
    settings: Settings
