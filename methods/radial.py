"""Radial posterior: a uniformly random direction and a normal radius for every weight tensor.

Approximates the posterior, tensor by tensor, by w = mu + sigma * e * r, with e uniform on the unit sphere of
the tensor's D dimensions and r ~ N(0, 1) one scalar: draws stay near the mean, where those of a normal in D
dimensions lie on a shell of radius sigma sqrt(D).

Source: Farquhar 2022, thesis "Understanding Approximation" (docs/sources.md), section 4.2 (eqs 4.5 to 4.8)
and appendices B.1 and B.2; Farquhar et al. 2020.
Deviations: the constant of the entropy is the exact one (B.23 is wrong). The cross-entropy to a normal prior
is in closed form, because Cov[w] = diag(sigma^2)/D, where the thesis draws it. The density as a prior keeps
the factor u^(1-D) that B.33 to B.37 drop although it depends on the optimised variables, and integrates the
radius by quadrature for a drawn direction.
Cost: as mean-field variational inference plus one norm per tensor and sample; two numbers per weight.
Valid for: every differentiable network and likelihood.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Size, Tensor, nn
from torch.distributions import Distribution, Independent, Normal, constraints, register_kl

from bench import optimizers, priors
from bench.contract import Batch, Noise, Prior, Problem
from bench.divergence import location_scale_divergence
from bench.energy import likelihood_term
from bench.families import location_scale
from bench.families.location_scale import SOFTPLUS, Family, LocationScale
from bench.families.variational import Variational, fill_rho
from bench.priors import normal_tensor
from bench.settings import Count, Factor, NonNegative, Positive, Whole, settings
from bench.weights import forward, lay_together, normal_noise, reparametrise

NAMES: dict[str, dict[str, object]] = {"radial": {}, "radial_ensemble": {"members": 3}}
SEARCH = {
    "learning_rate": (1e-4, 1e-1, "log"),
    "initial_rho": (-6.0, 5.0, "linear"),
    "train_samples": [1, 2, 4, 8],
}

LOG_TWO_PI = math.log(2 * math.pi)
MEAN_LOG_RADIUS = (torch.special.digamma(torch.tensor(0.5, dtype=torch.float64)).item() + math.log(2)) / 2
"""E log|r| for r ~ N(0, 1)."""


def log_sphere(dimension: int) -> float:
    """Log surface of the unit sphere in D dimensions, log(2 pi^(D/2) / Gamma(D/2))."""
    return math.log(2) + dimension / 2 * math.log(math.pi) - math.lgamma(dimension / 2)


def noise_entropy(dimension: int) -> float:
    """Entropy of e * r in D dimensions, in nats."""
    radius = 0.5 * LOG_TWO_PI + 0.5 - math.log(2)
    return radius + log_sphere(dimension) + (dimension - 1) * MEAN_LOG_RADIUS


class RadialNormal(Distribution):
    """w = loc + scale * e * r, e uniform on the unit sphere, r ~ N(0, 1): the whole tensor is one event.

    The density has a pole at w = loc when D > 1. With D = 1 this is the normal.

    Args:
        loc: Mean `[*shape]`.
        scale: Positive scale `[*shape]`; the variance of a weight is scale^2 / D, D the number of weights.
        validate_args: As in every torch distribution.
    """

    arg_constraints = {"loc": constraints.real, "scale": constraints.positive}
    has_rsample = True

    def __init__(self, loc: Tensor, scale: Tensor, validate_args: bool | None = None) -> None:
        self.loc, self.scale = torch.broadcast_tensors(torch.as_tensor(loc), torch.as_tensor(scale))
        super().__init__(Size(), self.loc.shape, validate_args=validate_args)

    @property
    def support(self) -> constraints.Constraint:
        """Every real tensor of the event's shape."""
        return constraints.independent(constraints.real, self.loc.ndim)

    @property
    def dimension(self) -> int:
        """D, the number of weights in the tensor."""
        return self.loc.numel()

    @property
    def mean(self) -> Tensor:
        """Mean of every weight."""
        return self.loc

    @property
    def variance(self) -> Tensor:
        """Variance of every weight, scale^2 / D; the weights are uncorrelated."""
        return self.scale.square() / self.dimension

    def expand(self, batch_shape: Any, _instance: Distribution | None = None) -> RadialNormal:
        """Only the empty batch shape is possible: the whole tensor is one event."""
        if Size(batch_shape) != Size():
            raise ValueError("RadialNormal has no batch dimensions: its whole tensor is one event")
        return self

    def rsample(self, sample_shape: Any = (), generator: torch.Generator | None = None) -> Tensor:
        """Reparametrised draws `[*sample_shape, *shape]` (eq. 4.6)."""
        shape = Size(sample_shape)
        noise = radial_noise(shape.numel(), {"w": self.loc}, generator)["w"]
        return self.loc + self.scale * noise.view(*shape, *self.loc.shape)

    def log_prob(self, value: Tensor) -> Tensor:
        """Exact log density in weight space, `[*sample_shape]`, in nats; infinite at the pole."""
        if self._validate_args:
            self._validate_sample(value)
        standard = (value - self.loc) / self.scale
        radius = (
            standard.flatten(value.ndim - self.loc.ndim).norm(dim=-1) if self.loc.ndim else standard.abs()
        )
        return (
            math.log(2)
            - 0.5 * LOG_TWO_PI
            - 0.5 * radius.square()
            - torch.special.xlogy(torch.tensor(self.dimension - 1.0), radius)
            - log_sphere(self.dimension)
            - self.scale.log().sum()
        )

    @property
    def noise_entropy(self) -> float:
        """Entropy of e * r, in nats."""
        return noise_entropy(self.dimension)

    def entropy(self) -> Tensor:
        """Exact entropy, a scalar, in nats (B.24 with the constant that B.23 prints wrong)."""
        return self.scale.log().sum() + self.noise_entropy


def radial_noise(
    num_samples: int,
    like: Mapping[str, Tensor],
    generator: torch.Generator | None,
    exact_norm: bool = True,
) -> dict[str, Tensor]:
    """E * r per sample, `[S, *shape]`: one direction and one scalar radius for every tensor.

    Without `exact_norm` the noise is divided by sqrt(D) in place of its norm (section 4.2).
    """
    noise = normal_noise(num_samples, like, generator)
    first = next(iter(like.values()))
    kind: dict[str, Any] = {"generator": generator, "device": first.device, "dtype": first.dtype}
    radii = torch.randn(len(like), num_samples, 1, **kind)
    for directions, radius in zip(noise.values(), radii, strict=True):
        rows = directions.view(num_samples, -1)
        rows.mul_(radius / (rows.norm(dim=1, keepdim=True) if exact_norm else math.sqrt(rows.shape[1])))
    return noise


@register_kl(RadialNormal, Independent)
def _kl_radial_normal(q: RadialNormal, p: Independent) -> Tensor:
    if type(p.base_dist) is not Normal or p.event_shape != q.event_shape:
        raise NotImplementedError
    return location_scale_divergence(q.loc, q.scale, 1 / q.dimension, q.noise_entropy, p.base_dist)


# --------------------------------------------------------------------- the divergence to a radial prior


def mean_log_radius(a: Tensor, b: Tensor, c: Tensor, points: int = 400) -> Tensor:
    """E log |x + r y| over r ~ N(0, 1), from a = |x|^2, b = x.y, c = |y|^2 > 0.

    The integrand 1/2 log(a + 2 r b + r^2 c) has its singularity at r = -b/c +- i h, h = sqrt(a c - b^2)/c;
    substituting r = -b/c + h sinh(t) moves it away, and the trapezoidal rule then converges geometrically.
    """
    a, b, c = a.double(), b.double(), c.double()
    with torch.no_grad():
        centre = -b / c
        # At x = 0 the singularity reaches the real line: keep it a hair away, below rounding of the value.
        height = ((a * c - b.square()).clamp(min=0).sqrt() / c).clamp(min=1e-9)
        low, high = (torch.asinh((edge - centre) / height) for edge in (-9.0, 9.0))
        steps = torch.linspace(0, 1, points, dtype=torch.float64, device=a.device)
        t = low[..., None] + (high - low)[..., None] * steps
        offset = height[..., None] * t.sinh()
        r = centre[..., None] + offset
        density = torch.exp(-0.5 * r.square() - 0.5 * LOG_TWO_PI) * height[..., None] * t.cosh()
        weights = density / density.sum(-1, keepdim=True)
        floor = (1e-9 * c).square() / c
    # c (r + b/c)^2 + (a - b^2/c): the integrand's argument as a sum that rounding cannot turn negative.
    along = offset + (centre + b / c)[..., None]
    across = (a - b.square() / c).clamp(min=0) + floor
    return (weights * 0.5 * (along.square() * c[..., None] + across[..., None]).log()).sum(-1)


def radial_divergence(
    q: Mapping[str, RadialNormal], p: Mapping[str, RadialNormal], noise: Mapping[str, Tensor]
) -> Tensor:
    """Unbiased estimate of KL(q || p) over all tensors, in nats: exact but for the directions.

    Args:
        q: Posterior, by tensor.
        p: Prior.
        noise: e * r `[S, *shape]`; only its directions are used, averaged over S.
    """
    vectors, rest = [], []
    for name, at in q.items():
        prior, e = p[name], noise[name].reshape(len(noise[name]), -1)
        shift = ((at.loc - prior.loc) / prior.scale).flatten()
        ratio = (at.scale / prior.scale).flatten()
        direction = ratio * (e / e.norm(dim=1, keepdim=True))  # [S, D]
        square = shift.square().sum()
        vectors.append((square.expand(len(e)), direction @ shift, direction.square().sum(1)))
        expected_log_p = (
            math.log(2)
            - 0.5 * LOG_TWO_PI
            - 0.5 * (square + ratio.square().mean())
            - log_sphere(prior.dimension)
            - prior.scale.log().sum()
        )
        rest.append(-at.entropy() - expected_log_p)
    a, b, c = map(torch.stack, zip(*vectors, strict=True))  # [tensors, S]
    log_radii = mean_log_radius(a, b, c).mean(1)
    powers = log_radii.new_tensor([at.dimension - 1 for at in q.values()])
    return torch.stack(rest).sum() + (powers @ log_radii).to(rest[0].dtype)


# ------------------------------------------------------------------------------------------- the method


@settings
class Settings:
    """Settings of the radial posterior."""

    learning_rate: Positive = 1e-3
    """Step size of the optimiser, above 0."""
    optimizer: optimizers.Name = "adam"
    """adam, amsgrad, or sgd with Nesterov momentum 0.9."""
    rate_decay: Factor = 1.0
    """Factor of the step size after every epoch, above 0, at most 1."""
    train_samples: Count = 1
    """Weight samples per training step, at least 1."""
    initial_rho: float = -4.0
    """Start of rho, scale = softplus(rho); the standard deviation of a weight is scale / sqrt(D)."""
    initial_rho_std: NonNegative = 0.0
    """Standard deviation of the start of rho over the weights, 0 or more; the published code has 0.5."""
    pretrain_epochs: Whole = 0
    """Tweak: epochs of the means by NLL alone, before a run's first fit, on top of its budget; 0 or more."""
    kl_weight: NonNegative = 1.0
    """Tweak: constant factor of the KL, 0 or more."""
    norm: Literal["exact", "sqrt_dimension"] = "exact"
    """Norm of the noise in the draws: its own, or its approximation sqrt(D) for D weights."""
    sequential_prior: Literal["radial", "normal"] = "radial"
    """Form of the posterior as next prior: the radial density, or the normal of equal mean and variance."""


def _radial(loc: Tensor, scale: Tensor) -> RadialNormal:
    return RadialNormal(loc, scale, validate_args=False)


_FAMILY = Family(_radial, SOFTPLUS, lambda dimension: 1 / dimension, noise_entropy)


class Radial(Variational):
    """A radial distribution over every weight tensor; weights and biases apart."""

    settings_class = Settings
    approximates = "the posterior by a uniform direction and a normal radius per tensor"
    declares = "mean-field optimum of KL", {"learning_rate": 0.05, "rate_decay": 0.995, "initial_rho": 2.0}
    provides = frozenset(
        {
            *("weight_samples", "density", "moments", "sequential", "weighted", "loss_terms"),
            "scale_settable",
        }
    )
    stacks = True
    settings: Settings

    def __init__(self, problem: Problem, settings: Settings, start: Radial | None = None) -> None:
        super().__init__(problem, settings, start)
        self.network = problem.network()  # its parameters are the means
        self.rho = nn.ParameterList(
            settings.initial_rho + settings.initial_rho_std * torch.randn_like(p)
            for p in self.network.parameters()
        )
        lay_together(self.network.parameters())
        lay_together(self.rho)
        self.extra_epochs = settings.pretrain_epochs if start is None else 0
        if start is not None:
            self.load_state_dict(start.state_dict())

    @classmethod
    def parameters_per_weight(cls, settings: Any) -> float:
        """A mean and a rho."""
        return 2.0

    @property
    def pretraining(self) -> bool:
        """Whether the present epoch trains the means by NLL alone."""
        return self.epoch < self.extra_epochs

    @property
    def prior_weight(self) -> float:
        """Factor of the KL in the present epoch."""
        return 0.0 if self.pretraining else self.settings.kl_weight

    # ---- the distribution

    def posterior(self) -> Mapping[str, RadialNormal]:
        """The radial distributions, with gradients to means and rhos."""
        return LocationScale(_FAMILY, dict(self.network.named_parameters()), self.rho)

    def draw_noise(self, num_samples: int, generator: torch.Generator) -> Noise:
        """Directions times radii, e * r, `[S, *shape]` per tensor; none while the means are pretrained."""
        return {} if self.pretraining else self._noise(num_samples, generator)

    def _noise(self, num_samples: int, generator: torch.Generator) -> Noise:
        like = dict(self.network.named_parameters())
        return radial_noise(num_samples, like, generator, self.settings.norm == "exact")

    def sample_weights(self, num_samples: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Draws from the posterior, stacked `[S, *shape]`."""
        return location_scale.draw(self.posterior(), self._noise(num_samples, generator))

    def set_scale(self, sigma: float) -> None:
        """Sigma of every weight: the standard deviation of a weight is then sigma / sqrt(D)."""
        fill_rho(self.rho, sigma)

    def as_prior(self) -> Prior:
        """The posterior as it is now, in the form that `sequential_prior` names."""
        posterior = self.posterior()
        if self.settings.sequential_prior == "normal":
            return priors.frozen({name: (q.mean, q.stddev) for name, q in posterior.items()}, normal_tensor)
        return priors.frozen({name: (q.loc, q.scale) for name, q in posterior.items()}, RadialNormal)

    # ---- loss

    def loss_terms(self, batch: Batch, noise: Noise) -> tuple[Tensor, Tensor]:
        """Expected negative log likelihood and KL(q || prior), in nats."""
        posterior, prior = self.posterior(), self.prior
        if not noise:  # while the means are pretrained
            weights = {name: m[None] for name, m in self.network.named_parameters()}
        elif all(isinstance(p, RadialNormal) for p in prior.values()):
            posterior = dict(posterior)  # each made once
            weights = {name: reparametrise(q.loc, q.scale, noise[name]) for name, q in posterior.items()}
            divergence = radial_divergence(posterior, prior, noise)  # type: ignore[arg-type]
        else:
            weights, divergence = self.draw(posterior, noise, prior)
        outputs = forward(self.network, weights, batch.inputs)
        nll = likelihood_term(self.likelihood, outputs, batch, self.problem.num_train)
        return nll, divergence if noise else nll.new_zeros(())
