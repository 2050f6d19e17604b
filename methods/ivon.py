"""Improved variational online Newton: mean-field variational inference by natural gradients.

Approximates the posterior by the product of normals N(m, sigma^2) that maximises the evidence lower bound, as
`mfvi` does, with another optimiser: the step of a mean is scaled by its own variance, and variances follow an
estimate of the diagonal Hessian, sigma^2 = 1 / (N (h + delta)).

Source: Shen et al. 2024, "Variational Learning is Effective for Large Deep Networks" (IVON), algorithm 1,
with its optional rescaling of the step size by h0 + delta; learning rate by a cosine, as in its experiments.
Target: the task's own posterior at temperature 1, no augmentation: lambda = N, and delta = 1 / (N s^2) of a
prior N(m0, s^2), per weight; the published decay is towards m0 = 0.
Deviations: the trained scale is log sigma and not h, since the update of h keeps only h + delta above 0. With
the negative bound L in nats the published estimate is h^ = h + (h + delta) dL/dlog sigma, so that autograd
gives it, and the update is sigma^-2 <- sigma^-2 (1 + x + x^2 / 2), where x = (1 - beta2) dL/dlog sigma.
The start is set as sigma0 and not as h0 = 1 / (N sigma0^2) - delta, so that it does not depend on N.
The published beta2 = 1 - 1e-5 forgets in 100,000 steps, the default here in 100. The source's optional
clipping of steps is left out.
Parameters of a likelihood have no prior: theirs are the steps of a mean whose variance stays at its start.
Cost: S forward and backward passes a step and a normal draw per weight and sample; two trained numbers per
weight, and one of momentum.
Valid for: every differentiable network and likelihood, under priors of independent normals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bench import priors
from bench.contract import Batch, Budget, Noise, Prior, Problem
from bench.energy import likelihood_term
from bench.errors import UsageError
from bench.families import location_scale
from bench.families.location_scale import EXP, LocationScale, as_vector
from bench.families.variational import Variational
from bench.priors import is_normal, normal_tensor
from bench.settings import Count, Positive, Share, settings
from bench.weights import forward, give, join, lay_together

NAMES: dict[str, dict[str, object]] = {"ivon": {}}
SEARCH = {
    "learning_rate": (1e-3, 1.0, "log"),
    "initial_scale": (1e-2, 0.2, "log"),
    "beta2": [0.9, 0.99, 0.999, 0.9999],
    "train_samples": [1, 2, 4, 8],
}


@settings
class Settings:
    """Settings of improved variational online Newton."""

    learning_rate: Positive = 0.1
    """Step size of the first epoch, above 0: of the gradient per example, where sigma = sigma0."""
    beta1: Share = 0.9
    """Share of the gradient's running mean that a step keeps, from 0 to below 1."""
    beta2: Share = 0.99
    """Share of the Hessian's running mean that a step keeps, from 0 to below 1."""
    initial_scale: Positive = 0.05
    """sigma0, above 0, the standard deviation that every weight starts with."""
    train_samples: Count = 1
    """Weight samples per training step, at least 1."""


_NORMALS = location_scale.normals(EXP)


class IVON(Variational):
    """Independent normals over all weights, trained by natural gradients."""

    settings_class = Settings
    approximates = "the posterior by independent normals, one per weight, found by natural gradients"
    declares = "mean-field optimum of KL", {"initial_scale": 0.4, "train_samples": 8}
    provides = frozenset({"weight_samples", "density", "moments", "sequential", "weighted", "loss_terms"})
    stacks = True
    settings: Settings

    def __init__(self, problem: Problem, settings: Settings, start: IVON | None = None) -> None:
        super().__init__(problem, settings, start)
        self.network = problem.network()  # its parameters are the means
        if not all(is_normal(p) for p in self.prior.values()):
            raise UsageError(
                "ivon: needs a prior of independent normals, whose precision is the decay of its steps; "
                "take mfvi"
            )
        self.epochs = 1
        start_at = math.log(settings.initial_scale)
        self.log_scale = nn.ParameterList(torch.full_like(p, start_at) for p in self.network.parameters())
        lay_together(self.network.parameters())
        lay_together(self.log_scale)
        if start is not None:
            self.load_state_dict(start.state_dict())

    @classmethod
    def parameters_per_weight(cls, settings: Settings) -> float:
        """A mean and a log scale."""
        return 2.0

    def _decay(self) -> list[tuple[Tensor, Tensor]]:
        """Of every tensor the prior's mean and delta, its precision per training example."""
        normals = [p.base_dist for p in self.prior.values()]  # type: ignore[attr-defined]
        return [(n.loc, 1 / (self.problem.num_train * n.scale.square())) for n in normals]

    # ---- the distribution

    def posterior(self) -> Mapping[str, Any]:
        """The independent normals, with gradients to means and log scales."""
        return LocationScale(_NORMALS, dict(self.network.named_parameters()), self.log_scale)

    def sample_weights(self, num_samples: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Draws from the posterior, stacked `[S, *shape]`."""
        return location_scale.draw(self.posterior(), self.draw_noise(num_samples, generator))

    def as_prior(self) -> Prior:
        """The normals as they are now."""
        return priors.frozen({n: (q.mean, q.stddev) for n, q in self.posterior().items()}, normal_tensor)

    # ---- training

    def loss_terms(self, batch: Batch, noise: Noise) -> tuple[Tensor, Tensor]:
        """Expected negative log likelihood and KL(q || prior), in nats."""
        weights, divergence = self.draw(self.posterior(), noise, self.prior)
        outputs = forward(self.network, weights, batch.inputs)
        return likelihood_term(self.likelihood, outputs, batch, self.problem.num_train), divergence

    def spends(self, budget: Budget) -> Budget:
        """The budget as it is; the learning rate goes by its epochs."""
        self.epochs = budget.epochs
        return budget

    def configure_optimizers(self) -> Any:
        """The natural gradient, and its step size by epochs: half a cosine, from the setting towards 0."""
        optimizer = NaturalGradient(
            [*zip(self.network.parameters(), self.log_scale, strict=True)],
            self._decay(),
            [*self.likelihood.parameters()],
            self.problem.num_train,
            self.settings,
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda epoch: (1 + math.cos(math.pi * min(epoch / self.epochs, 1))) / 2
        )
        return {"optimizer": optimizer, "lr_scheduler": schedule}


class NaturalGradient(torch.optim.Optimizer):
    """The steps of algorithm 1, from the gradient of the negative bound per training example.

    Args:
        pairs: Mean and log standard deviation of the normals over each tensor.
        decay: For each of them the prior's mean, and its precision over `num_train`.
        others: Parameters without a distribution.
        num_train: N.
        settings: Of the method.
    """

    def __init__(
        self,
        pairs: list[tuple[Tensor, Tensor]],
        decay: list[tuple[Tensor, Tensor]],
        others: list[Tensor],
        num_train: int,
        settings: Settings,
    ) -> None:
        groups = [{"params": list(pair)} for pair in pairs] + ([{"params": others}] if others else [])
        super().__init__(groups, {"lr": settings.learning_rate})
        self.decay, self.num_train, self.settings = decay, num_train, settings
        self.vectors: tuple[Tensor | None, Tensor] | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step; the closure, if there is one, computes the gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        pairs = self.param_groups[: len(self.decay)]
        means, log_scales = ([group["params"][i] for group in pairs] for i in (0, 1))
        if self.vectors is None:
            self.vectors = self._vectors(means)
        centre, delta = self.vectors
        mean, log_scale = join(means), join(log_scales)  # [d]
        slope, c = join([s.grad for s in log_scales]), (1 - self.settings.beta2) * self.num_train
        growth = torch.addcmul(slope, slope, slope, value=0.5 * c).mul_(c)  # x + x^2 / 2, x = c slope
        log_scale.add_(growth.log1p_(), alpha=-0.5)
        # The pull to the prior is taken out of the gradient that is averaged, and acts at once.
        from_prior = mean if centre is None else mean - centre
        gradient = join([m.grad for m in means]).addcmul(from_prior, delta, value=-1)
        momentum, bias = self._averaged(means, gradient)
        step = torch.addcmul(momentum, from_prior, delta * bias)
        variance = log_scale.mul(2).exp_()
        mean.addcmul_(variance, step, value=-pairs[0]["lr"] / bias / self.settings.initial_scale**2)
        give(mean, means)
        give(log_scale, log_scales)
        for group in self.param_groups[len(pairs) :]:
            for parameter in group["params"]:
                momentum, bias = self._averaged([parameter], parameter.grad.flatten())
                parameter.sub_(momentum.view_as(parameter), alpha=group["lr"] / bias)
        return loss

    def _vectors(self, means: list[Tensor]) -> tuple[Tensor | None, Tensor]:
        """The decay over all weights: the prior's means, None where 0, and delta; `[d]` or one number."""
        centre, delta = (
            as_vector([part.expand_as(m) for part, m in zip(parts, means, strict=True)])
            for parts in zip(*self.decay, strict=True)
        )
        return centre if centre.any() else None, delta

    def _averaged(self, parameters: list[Tensor], gradient: Tensor) -> tuple[Tensor, float]:
        """Running mean of the gradients `[d]` of parameters, and the factor of it due to its start at 0."""
        states, beta1 = [self.state[p] for p in parameters], self.settings.beta1
        momenta = [state.get("momentum") for state in states]
        momentum = join(momenta) if momenta[0] is not None else torch.zeros_like(gradient)
        if momenta[0] is None or momentum.data_ptr() != momenta[0].data_ptr():  # new, or from a checkpoint
            parts = momentum.split([p.numel() for p in parameters])
            for state, p, part in zip(states, parameters, parts, strict=True):
                state["momentum"] = part.view_as(p)
        momentum.mul_(beta1).add_(gradient, alpha=1 - beta1)
        for state in states:
            state["steps"] = state.get("steps", 0) + 1
        return momentum, 1 - beta1 ** states[0]["steps"]
