"""Normalizing flow with a generalized-gamma source: the standard form of singular posteriors, bent to fit.

Approximates the posterior by w = g(xi), xi independent with densities proportional to
xi^(2 k lambda - 1) exp(-beta xi^(2k)) on (0, inf), and g a flow of affine coupling layers
(bench/families/flow.py) that learns the resolution of the model's singularities together with the source.

Source: the paper "Variational Inference via Resolution of Singularities" 2022 (docs/sources.md), sections 5
and 6, appendices B and D. A name as the paper prints it is accepted:
`nf_gamma_{lambda0}_{k0}_{beta0}_{trainable}`, where lambda = (1, lambda0, ...), k = (k0, ...) and beta = (n,
beta0, ...), n the number of training examples; beta_1 stays n.
Deviations: coupling layers in their invertible form; lambda, k and beta are the absolute values, or the
exponentials, of what is trained, so that no step can leave their range. The preset paper trains with
V = relu(lambda + sqrt(lambda) eps) / beta for V ~ Gamma(lambda, beta), as published; others have exact draws
with implicit gradients, masks of exact halves and a falling rate.
Cost: S forward and backward passes, and of the flow 264 multiplications per weight and sample at 16 units.
Valid for: every differentiable network and likelihood, up to 100,000 weights.
"""

from __future__ import annotations

import math
import re
from typing import Any, Literal

import torch
from torch import Size, Tensor, nn
from torch.distributions import Distribution, constraints

from bench.contract import Noise, Problem
from bench.families import flow
from bench.families.flow import NUMBER, FlowVI
from bench.settings import Count, Positive, settings

NAMES: dict[str, dict[str, object]] = {"nf_gamma": {}}
PATTERN = re.compile(
    rf"nf_gamma_(?P<shape>{NUMBER})_(?P<k>{NUMBER})_(?P<rate>{NUMBER})_(?P<trainable>True|False)"
)
PRESETS: dict[str, dict[str, object]] = {
    "paper": {"gradient": "gaussian", "masks": "published", "schedule": "constant"},
}
SEARCH = {"learning_rate": (1e-4, 1e-1, "log"), "train_samples": [1, 5, 10]}


_RELATIVE = 0.1
"""A step in the logarithm of lambda or beta, in units of the published step."""


# ------------------------------------------------------------------------------------- generalized gamma


def log_normalizer(lam: Tensor, k: Tensor, beta: Tensor) -> Tensor:
    """Log of the integral of xi^(2 k lam - 1) exp(-beta xi^(2k)) over (0, inf), `[d]`, in nats.

    Arguments `[d]`, all above 0.
    """
    return torch.lgamma(lam) - torch.log(2 * k) - lam * torch.log(beta)


def expected_log_prob(lam: Tensor, k: Tensor, beta: Tensor) -> Tensor:
    """E log q of independent generalized gammas, summed over the d entries; a scalar, in nats.

    (lam - 1/(2k)) (psi(lam) - log beta) - lam - log Z per entry (appendix B.2 of the paper). Arguments `[d]`.
    """
    expected_log_v = torch.digamma(lam) - torch.log(beta)
    return ((lam - 0.5 / k) * expected_log_v - lam - log_normalizer(lam, k, beta)).sum()


def truncated_normalizer(lam: Tensor, k: Tensor, beta: Tensor) -> Tensor:
    """B: the integral of xi^(2 k lam - 1) exp(-beta xi^(2k)) over (0, 1], `[d]` (eq. 12 of the paper).

    beta^(-lam) Gamma(lam) P(lam, beta) / (2k), P the regularised lower incomplete gamma function.
    """
    return log_normalizer(lam, k, beta).exp() * torch.special.gammainc(lam, beta)


def truncated_moment(lam: Tensor, beta: Tensor) -> Tensor:
    """G: E xi^(2k) of the source truncated to (0, 1], `[d]` (appendix B.1 of the paper); k plays no part.

    (lam / beta) P(lam + 1, beta) / P(lam, beta).
    """
    return lam / beta * torch.special.gammainc(lam + 1, beta) / torch.special.gammainc(lam, beta)


class GeneralizedGamma(Distribution):
    """Independent densities proportional to xi^(2 k lam - 1) exp(-beta xi^(2k)) on (0, inf).

    xi = V^(1 / (2k)) with V ~ Gamma(lam, rate beta); section 5 of the paper.

    Args:
        lam: Shapes `[d]`, above 0.
        k: Half the power, `[d]`, above 0.
        beta: Rates `[d]`, above 0.
        validate_args: As in every torch distribution.
    """

    arg_constraints = {"lam": constraints.positive, "k": constraints.positive, "beta": constraints.positive}
    support = constraints.positive
    has_rsample = True

    def __init__(self, lam: Tensor, k: Tensor, beta: Tensor, validate_args: bool | None = None) -> None:
        self.lam, self.k, self.beta = torch.broadcast_tensors(lam, k, beta)
        super().__init__(self.lam.shape, validate_args=validate_args)

    def rsample(self, sample_shape: Any = (), generator: torch.Generator | None = None) -> Tensor:
        """Draws `[*sample_shape, d]`, with implicit gradients to all three parameters."""
        lam = self.lam.expand(*Size(sample_shape), *self.lam.shape)
        return self.transform(torch._standard_gamma(lam.detach().contiguous(), generator=generator))

    def transform(self, gamma: Tensor) -> Tensor:
        """Draws `[S, d]` from draws of Gamma(lam, 1), through which lam gets its gradient implicitly."""
        return self._root(_StandardGamma.apply(self.lam.expand_as(gamma), gamma))

    def transform_normal(self, noise: Tensor) -> Tensor:
        """Draws `[S, d]` from standard normal noise, V as a normal of its own mean and variance cut at 0.

        The published training draw (section 6 of the paper): not the same law. A V of 0 has no gradient.
        """
        return self._root(torch.relu(self.lam + self.lam.sqrt() * noise))

    def _root(self, gamma: Tensor) -> Tensor:
        positive = gamma > 0
        v = torch.where(positive, gamma, 1.0) / self.beta
        return torch.where(positive, torch.exp(torch.log(v) / (2 * self.k)), 0.0)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log densities `[*sample_shape, d]`, in nats; -inf where the value is not above 0."""
        inside = value > 0
        log_value = torch.where(inside, value, 1.0).log()
        power = torch.exp(2 * self.k * log_value)
        density = (2 * self.k * self.lam - 1) * log_value - self.beta * power
        return torch.where(inside, density - log_normalizer(self.lam, self.k, self.beta), -math.inf)

    def entropy(self) -> Tensor:
        """Entropies `[d]`, in nats."""
        expected_log_v = torch.digamma(self.lam) - torch.log(self.beta)
        negative = (self.lam - 0.5 / self.k) * expected_log_v - self.lam
        return log_normalizer(self.lam, self.k, self.beta) - negative


class _StandardGamma(torch.autograd.Function):
    """A draw of Gamma(lam, 1) whose gradient in lam keeps its quantile (Figurnov et al. 2018)."""

    @staticmethod
    def forward(lam: Tensor, draw: Tensor) -> Tensor:
        return draw.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        lam, draw = ctx.saved_tensors
        return gradient * torch._standard_gamma_grad(lam.contiguous(), draw), None

    @staticmethod
    def vmap(info: Any, in_dims: Any, lam: Tensor, draw: Tensor) -> tuple[Tensor, int]:
        copies = zip((lam, draw), in_dims, strict=True)
        lam, draw = (t if d is None else t.movedim(d, 0) for t, d in copies)
        return _StandardGamma.apply(lam.expand_as(draw), draw), 0


# ------------------------------------------------------------------------------------------- the method


def num_examples(problem: Problem) -> float:
    """n, in which an example of weight 2 is the example twice."""
    tensors: tuple[Tensor, ...] = getattr(problem.train, "tensors", ())
    return max(1.0, float(tensors[2].sum())) if len(tensors) > 2 else float(problem.num_train)


@settings
class Settings:
    """Settings of the flow with a generalized-gamma source."""

    shape: Positive = 100.0
    """lambda0, above 0: start of every lambda but the first, which starts at 1."""
    k: Positive = 5.0
    """k0, above 0: start of every k."""
    rate: Positive = 100.0
    """beta0, above 0: start of every beta but the first, which is the number of training examples."""
    trainable: bool = True
    """Whether lambda, k and beta are trained."""
    gradient: Literal["implicit", "gaussian"] = "implicit"
    """Training draws: implicit is exact, with steps in the logarithms of lambda, k and beta; gaussian is the
    published one, a normal cut at 0 for a gamma, with steps in lambda, k and beta."""
    learning_rate: Positive = 1e-3
    """Step size of Adam, above 0, for flow and k."""
    source_learning_rate: Positive = 1e-1
    """Step size of Adam, above 0, for lambda and beta; a tenth of it for their logarithms."""
    schedule: flow.Schedule = "cosine"
    """Rates over the epochs: cosine falls to 0, the flow's from twice its own; constant is published."""
    train_samples: Count = 5
    """Weight samples per training step, at least 1."""
    masks: flow.Masks = "halves"
    """What coupling layers keep: halves of the entries, or published, draws with replacement."""
    start: flow.Start = "random"
    """The flow at first: random as published, or the identity."""
    units: Count = 16
    """Hidden units of a layer of the coupling networks, at least 1; 16 is published."""


class NFGamma(FlowVI):
    """A coupling flow from independent generalized gammas."""

    settings_class = Settings
    approximates = "the posterior by a coupling flow from independent generalized gammas"
    declares = "none"
    settings: Settings
    first_rate: Tensor

    def __init__(self, problem: Problem, settings: Settings, start: NFGamma | None = None) -> None:
        super().__init__(problem, settings, start)
        lam, beta = torch.full((self.size,), settings.shape), torch.full((self.size - 1,), settings.rate)
        lam[0] = 1.0
        # Steps of exact draws are relative: at a lambda or k near 0 their logarithms have no bound.
        self.in_logs = settings.gradient == "implicit"
        starts = (t.log() if self.in_logs else t for t in (lam, torch.full_like(lam, settings.k), beta))
        self.lam, self.k, self.beta = (nn.Parameter(t, requires_grad=settings.trainable) for t in starts)
        self.register_buffer("first_rate", torch.tensor([num_examples(problem)]))
        if start is not None:
            self.load_state_dict(start.state_dict())

    def distribution(self) -> GeneralizedGamma:
        """The source, with gradients to lambda, k and beta."""
        lam, k, beta = (t.exp() if self.in_logs else t.abs() for t in (self.lam, self.k, self.beta))
        rates = torch.cat([self.first_rate, beta])
        return GeneralizedGamma(lam, k, rates, validate_args=False)

    def source_parameters(self) -> list[dict[str, Any]]:
        """Of k at the published rate of the flow, of lambda and beta at their own; none of a fixed source."""
        if not self.settings.trainable:
            return []
        rate = self.settings.source_learning_rate * (_RELATIVE if self.in_logs else 1.0)
        k = {"params": [self.k], "lr": self.settings.learning_rate}
        return [k, {"params": [self.lam, self.beta], "lr": rate}]

    def draw_noise(self, num_samples: int, generator: torch.Generator) -> Noise:
        """Draws of Gamma(lambda, 1) at the present lambda, or standard normal noise, `[S, d]`."""
        if self.settings.gradient == "gaussian":
            return {"normal": torch.randn(num_samples, self.size, generator=generator, device=self.device)}
        shapes = self.distribution().lam.detach().expand(num_samples, -1).contiguous()
        return {"gamma": torch._standard_gamma(shapes, generator=generator)}

    def source(self, noise: Noise) -> tuple[Tensor, Tensor]:
        """Training draws of xi `[S, d]`, and E log q(xi) in nats."""
        q = self.distribution()
        xi = q.transform_normal(noise["normal"]) if "normal" in noise else q.transform(noise["gamma"])
        return xi, expected_log_prob(q.lam, q.k, q.beta)

    def exact_source(self, num_samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Exact draws of xi `[S, d]`, whatever training draws, and E log q(xi) in nats."""
        q = self.distribution()
        return q.rsample((num_samples,), generator), expected_log_prob(q.lam, q.k, q.beta)

    def source_log_prob(self, xi: Tensor) -> Tensor:
        """Log density of xi `[S, d]`, `[S]`, in nats."""
        q = self.distribution()
        wide = GeneralizedGamma(q.lam.to(xi), q.k.to(xi), q.beta.to(xi), validate_args=False)
        return wide.log_prob(xi).sum(-1)
