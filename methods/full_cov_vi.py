"""Full-covariance variational inference: one normal over all weights, or one per weight tensor.

Approximates the posterior by N(mu, L L^T), L lower triangular with softplus(rho) on its diagonal, that
maximises the evidence lower bound E_q[log p(D | w)] - KL(q || prior). The rest of row i is in units of its
diagonal entry, so that steps of the optimiser change correlations alike whatever the scale of a weight.

Source: Farquhar 2022, thesis "Understanding Approximation" (docs/sources.md), section 3.3 (Table 3.1) and
appendix A.3; Barber and Bishop 1998.
Deviations: the time that Table 3.1 gives for a tensor of K^2 weights, K^12, should read K^6. Biases are
weights like others: over the whole network they are correlated with everything, per tensor they are a block.
Cost: O(S d^2) a step and S forward and backward passes, O(d^3) a step where the prior has a full covariance;
d + d^2 stored numbers for a block of d weights, of which (d^2 - d)/2 stay zero.
Valid for: every differentiable network and likelihood, up to 5,000 weights in a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Size, Tensor, nn
from torch.distributions import (
    Distribution,
    Independent,
    MultivariateNormal,
    constraints,
    kl_divergence,
    register_kl,
)
from torch.nn.functional import softplus

from bench import optimizers, priors
from bench.contract import JOINT, Batch, Noise, Prior, Problem, WeightDistribution
from bench.divergence import cross_entropy, weight_divergence
from bench.energy import likelihood_term
from bench.errors import UsageError
from bench.families.variational import Variational
from bench.priors import joined_normals, normal_tensor
from bench.settings import Count, Positive, settings
from bench.weights import forward, ravel, unravel

NAMES: dict[str, dict[str, object]] = {"full_cov_vi": {}}
SEARCH = {
    "learning_rate": (1e-4, 1e-1, "log"),
    "initial_rho": (-9.0, -1.0, "linear"),
    "train_samples": [1, 4, 16],
}


class FullNormal(Distribution):
    """Normal with a full covariance over one tensor, which is one event.

    Args:
        loc: Mean `[*shape]` of D weights.
        scale_tril: Lower factor of their covariance in the order of `loc.flatten()`, `[D, D]`.
        validate_args: As in every torch distribution.
    """

    arg_constraints = {"loc": constraints.real, "scale_tril": constraints.lower_cholesky}
    has_rsample = True

    def __init__(self, loc: Tensor, scale_tril: Tensor, validate_args: bool | None = None) -> None:
        self.loc, self.scale_tril = loc, scale_tril
        self.vector = MultivariateNormal(loc.flatten(), scale_tril=scale_tril, validate_args=False)
        super().__init__(Size(), loc.shape, validate_args=validate_args)

    @property
    def support(self) -> constraints.Constraint:
        """Every real tensor of the event's shape."""
        return constraints.independent(constraints.real, self.loc.ndim)

    @property
    def mean(self) -> Tensor:
        """Mean of every weight."""
        return self.loc

    @property
    def variance(self) -> Tensor:
        """Variance of every weight."""
        return self.vector.variance.view_as(self.loc)

    def expand(self, batch_shape: Any, _instance: Distribution | None = None) -> FullNormal:
        """Only the empty batch shape is possible: the whole tensor is one event."""
        if Size(batch_shape) != Size():
            raise ValueError("FullNormal has no batch dimensions: its whole tensor is one event")
        return self

    def transform(self, noise: Tensor) -> Tensor:
        """Draws loc + L noise, `[S, *shape]`, from standard normal noise `[S, *shape]`."""
        return self.loc + (noise.reshape(len(noise), -1) @ self.scale_tril.mT).reshape(noise.shape)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Reparametrised draws `[*sample_shape, *shape]`."""
        shape = Size(sample_shape)
        return self.vector.rsample(shape).view(*shape, *self.loc.shape)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density, `[*sample_shape]`, in nats."""
        if self._validate_args:
            self._validate_sample(value)
        return self.vector.log_prob(value.reshape(*value.shape[: value.ndim - self.loc.ndim], -1))

    def entropy(self) -> Tensor:
        """Entropy, a scalar, in nats."""
        return self.vector.entropy()


@register_kl(FullNormal, Independent)
def _kl_full_independent(q: FullNormal, p: Independent) -> Tensor:
    return cross_entropy(q, p) - q.entropy()


@register_kl(FullNormal, FullNormal)
def _kl_full_full(q: FullNormal, p: FullNormal) -> Tensor:
    return kl_divergence(q.vector, p.vector)


@register_kl(FullNormal, MultivariateNormal)
def _kl_full_multivariate(q: FullNormal, p: MultivariateNormal) -> Tensor:
    if p.event_shape != q.event_shape:
        raise NotImplementedError
    return kl_divergence(q.vector, p)


# ------------------------------------------------------------------------------------------- the method


@settings
class Settings:
    """Settings of full-covariance variational inference."""

    learning_rate: Positive = 1e-3
    """Step size of the optimiser, above 0."""
    optimizer: optimizers.Name = "adam"
    """adam, amsgrad, or sgd with Nesterov momentum 0.9."""
    train_samples: Count = 1
    """Weight samples per training step, at least 1."""
    initial_rho: float = -3.0
    """Start of rho for every weight; correlations start at 0, standard deviations at softplus(rho)."""
    scope: Literal["network", "tensor"] = "network"
    """What one covariance spans: all weights of the network, or each weight tensor by itself."""


class FullCovVI(Variational):
    """A normal with full covariance over the network, or over every weight tensor."""

    settings_class = Settings
    approximates = "the posterior by a normal with full covariance over the network or per tensor"
    declares = "optimum of KL among normals", {"learning_rate": 0.01, "train_samples": 16}
    provides = frozenset({"weight_samples", "density", "moments", "sequential", "weighted", "loss_terms"})
    settings: Settings
    stacks = True
    LARGEST = 5_000
    """Weights of a block above which a problem is refused."""

    def __init__(self, problem: Problem, settings: Settings, start: FullCovVI | None = None) -> None:
        super().__init__(problem, settings, start)
        self.network = problem.network()  # its parameters are the means
        sizes = [p.numel() for p in self.network.parameters()]
        blocks = [sum(sizes)] if settings.scope == "network" else sizes
        if max(blocks) > self.LARGEST:
            smaller = settings.scope == "network" and max(sizes) <= self.LARGEST
            raise UsageError(
                f"full_cov_vi needs {16e-9 * max(blocks) ** 2:,.1f} GB for the covariance of {max(blocks):,} "
                "weights (its factor, the gradient and two moments of Adam) and takes at most "
                f"{self.LARGEST:,}: take a smaller network{' or --method.scope tensor' if smaller else ''}"
            )
        like = next(self.network.parameters())
        self.factors = nn.ParameterList(like.new_full((n,), settings.initial_rho).diag() for n in blocks)
        if start is not None:
            self.load_state_dict(start.state_dict())

    @classmethod
    def parameters_per_weight(cls, settings: Any) -> None:
        """None: a covariance grows with the square of the number of weights."""

    def make_prior(self, parameters: Mapping[str, Tensor]) -> WeightDistribution:
        """The task's prior; independent normals as one vector where the posterior is one."""
        prior = super().make_prior(parameters)
        normals = joined_normals(prior)
        return (
            prior if self.settings.scope == "tensor" or normals is None else {JOINT: normal_tensor(*normals)}
        )

    # ---- the distribution

    def posterior(self) -> dict[str, FullNormal]:
        """The normals, under `JOINT` or per tensor, with gradients to means and factors."""
        means: dict[str, Tensor] = dict(self.network.named_parameters())
        if self.settings.scope == "network":
            means = {JOINT: torch.cat([m.flatten() for m in means.values()])}
        factors = map(_lower, self.factors)
        return {
            name: FullNormal(mean, factor, validate_args=False)
            for (name, mean), factor in zip(means.items(), factors, strict=True)
        }

    def _weights(self, posterior: Mapping[str, FullNormal], noise: Noise) -> dict[str, Tensor]:
        """Stacked weights `[S, *shape]`."""
        if JOINT in posterior:
            return unravel(posterior[JOINT].transform(ravel(noise)), dict(self.network.named_parameters()))
        return {name: q.transform(noise[name]) for name, q in posterior.items()}

    def sample_weights(self, num_samples: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Draws from the posterior, stacked `[S, *shape]`."""
        with torch.no_grad():
            return self._weights(self.posterior(), self.draw_noise(num_samples, generator))

    def as_prior(self) -> Prior:
        """The normals as they are now: one over all weights, or one per tensor."""
        make = _multivariate if self.settings.scope == "network" else FullNormal
        return priors.frozen({name: (q.loc, q.scale_tril) for name, q in self.posterior().items()}, make)

    # ---- loss

    def loss_terms(self, batch: Batch, noise: Noise) -> tuple[Tensor, Tensor]:
        """Expected negative log likelihood and KL(q || prior), in nats."""
        posterior = self.posterior()
        weights = self._weights(posterior, noise)
        outputs = forward(self.network, weights, batch.inputs)
        nll = likelihood_term(self.likelihood, outputs, batch, self.problem.num_train)
        return nll, weight_divergence(posterior, self.prior, weights)


def _lower(raw: Tensor) -> Tensor:
    """Lower factor with the diagonal softplus(raw_ii); the rest of row i is in units of that entry."""
    scale = softplus(raw.diagonal())
    return scale[:, None] * raw.tril(-1) + scale.diag()


def _multivariate(mean: Tensor, scale_tril: Tensor) -> MultivariateNormal:
    return MultivariateNormal(mean, scale_tril=scale_tril, validate_args=False)
