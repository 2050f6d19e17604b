"""Ensembles: independent copies of one method on one problem, whose draws are pooled.

Approximates the posterior by the equal mixture of the members' approximations; with point masses as members,
the deep ensemble of Lakshminarayanan et al. 2017.

Source: Farquhar 2022, thesis "Understanding Approximation" (docs/sources.md), section 4.3. Members keep their
size: they do not share one network's parameter count.
Cost: as many fits, predictions and parameters as members.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Size, Tensor, nn
from torch.distributions import Distribution, constraints

from bench.contract import JOINT, Method, Prediction, Prior, Problem, WeightDistribution
from bench.divergence import log_prob
from bench.weights import unravel


def capabilities(provides: frozenset[str], members: int) -> frozenset[str]:
    """What an ensemble can do of what its members can: each has a loss, and scales, of its own."""
    return provides if members == 1 else provides - {"loss_terms", "reweighted", "scale_settable"}


class Mixture(Distribution):
    """The equal mixture of distributions over all weights, over the ravelled vector `[d]`.

    Args:
        parts: Distributions over the weights.
        like: The weights, tensors `[*shape]` in order.
    """

    arg_constraints: dict[str, constraints.Constraint] = {}

    def __init__(self, parts: list[WeightDistribution], like: Mapping[str, Tensor]) -> None:
        self.parts, self.like = parts, dict(like)
        size = sum(w.numel() for w in like.values())
        super().__init__(Size(), Size([size]), validate_args=False)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density of vectors `[S, d]`, `[S]`, in nats."""
        weights = unravel(value, self.like)
        densities = torch.stack([log_prob(part, weights) for part in self.parts])
        return densities.logsumexp(0) - math.log(len(self.parts))


class MemberPriors:
    """A prior for every member; as one distribution it is their equal mixture.

    Args:
        priors: One per member.
    """

    def __init__(self, priors: list[Prior]) -> None:
        self.priors = priors

    def __call__(self, parameters: Mapping[str, Tensor]) -> WeightDistribution:
        """The mixture, over the ravelled vector."""
        return {JOINT: Mixture([prior(parameters) for prior in self.priors], parameters)}


def split(problem: Problem, start: Method | None, members: int) -> list[tuple[Problem, Method | None]]:
    """The problem and the start of every member: of a posterior that became the prior, each has its own."""
    priors = problem.prior.priors if isinstance(problem.prior, MemberPriors) else [problem.prior] * members
    starts: list[Method | None] = [*start.members] if isinstance(start, Ensemble) else [start] * members
    return [(replace(problem, prior=p), s) for p, s in zip(priors, starts, strict=True)]


class Ensemble(Method):
    """Fitted members, whose draws form one sample axis `[M * S]`, member after member.

    Args:
        members: Fits of one method, at least 2, to problems that differ at most in data and prior.
    """

    approximates = "the posterior by independent fits, their draws pooled"

    def __init__(self, members: list[Method]) -> None:
        with torch.random.fork_rng(devices=[]):  # the base class draws a seed that is of no use here
            super().__init__(members[0].problem, members[0].settings)
        self.parts = nn.ModuleList(members)
        self.network = members[0].network
        self.diverged = next((m.diverged for m in members if m.diverged is not None), None)
        self.provides = capabilities(members[0].provides, len(members))

    @property
    def members(self) -> list[Method]:
        """The fitted members."""
        return [part for part in self.parts if isinstance(part, Method)]

    def predict(self, inputs: Tensor, num_samples: int, generator: torch.Generator) -> Prediction:
        """Predictions of every member under `num_samples` draws of its own."""
        parts = [m.predict(inputs, num_samples, generator) for m in self.members]
        return type(parts[0])(**{name: torch.cat([vars(p)[name] for p in parts]) for name in vars(parts[0])})

    def sample_weights(self, num_samples: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Draws from the mixture, stacked `[S, *shape]`: each from a member drawn at random."""
        chosen = torch.randint(
            len(self.members), (num_samples,), generator=generator, device=generator.device
        )
        draws = [m.sample_weights(num_samples, generator) for m in self.members]
        rows = torch.arange(num_samples, device=chosen.device)
        return {name: torch.stack([d[name] for d in draws])[chosen, rows] for name in draws[0]}

    def log_prob(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Log density of the mixture at stacked weights, `[S]`, in nats."""
        densities = torch.stack([m.log_prob(weights) for m in self.members])
        return densities.logsumexp(0) - math.log(len(self.members))

    def moments(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Mean and variance of every weight under the mixture."""
        parts = [m.moments() for m in self.members]
        means = {name: torch.stack([mean[name] for mean, _ in parts]) for name in parts[0][0]}
        within = {name: torch.stack([variance[name] for _, variance in parts]) for name in parts[0][1]}
        variances = {name: within[name].mean(0) + m.var(0, correction=0) for name, m in means.items()}
        return {name: m.mean(0) for name, m in means.items()}, variances

    def as_prior(self) -> Prior:
        """Every member's posterior as its own next prior."""
        return MemberPriors([m.as_prior() for m in self.members])

    def diagnostics(self, inputs: Tensor | None = None) -> dict[str, float]:
        """The largest of the members' values, by the name of the number; not all members need have all."""
        parts = [m.diagnostics(inputs) for m in self.members]
        names = dict.fromkeys(name for part in parts for name in part)
        return {name: max(part[name] for part in parts if name in part) for name in names}
