"""Kullback-Leibler divergence between distributions over weights: exact where known, else Monte Carlo."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution, Normal, kl_divergence

from bench.contract import JOINT, WeightDistribution
from bench.priors import is_normal
from bench.weights import ravel


def location_scale_divergence(
    mean: Tensor, scale: Tensor, noise_variance: float, noise_entropy: float, p: Normal
) -> Tensor:
    """KL(q || p) to independent normals of a q that draws mean + scale * noise, in nats.

    Args:
        mean: Mean of every weight `[*shape]`.
        scale: Scale of every weight.
        noise_variance: Variance of each entry of the noise; its entries have mean 0 and are uncorrelated.
        noise_entropy: Entropy of the noise as a whole, in nats.
        p: The prior.
    """
    constant = 0.5 * mean.numel() * math.log(2 * math.pi) - noise_entropy
    if (std := _one_scale(p)) is not None:
        return _OneScale.apply(mean, scale, noise_variance, p.loc, std) + (
            constant + mean.numel() * std.log()
        )
    squares = ((mean - p.loc).square() + noise_variance * scale.square()) / p.scale.square()
    return 0.5 * squares.sum() - scale.log().sum() + p.scale.log().sum() + constant


def _one_scale(p: Normal) -> Tensor | None:
    """The standard deviation that fixed normals have in common, if it is stored once; else None."""
    shared = p.scale.stride() == (0,) * p.scale.ndim and not (p.loc.requires_grad or p.scale.requires_grad)
    return p.scale[(0,) * p.scale.ndim] if shared else None


def cross_entropy(q: Distribution, p: Distribution) -> Tensor:
    """-E_q log p of independent normals p, in nats: of q it takes the means and variances alone.

    Raises:
        NotImplementedError: p is of another form than independent normals of the shape of q.
    """
    if not is_normal(p) or p.event_shape != q.event_shape:
        raise NotImplementedError
    normal = p.base_dist
    squares = ((q.mean - normal.loc).square() + q.variance) / normal.scale.square()
    return (0.5 * squares + normal.scale.log() + 0.5 * math.log(2 * math.pi)).sum()


class _OneScale(torch.autograd.Function):
    """The part of a divergence to normals of one `std` that depends on q; its gradient is written out."""

    generate_vmap_rule = True

    @staticmethod
    def forward(mean: Tensor, scale: Tensor, noise_variance: float, loc: Tensor, std: Tensor) -> Tensor:
        squares = (mean - loc).square().sum() + noise_variance * scale.square().sum()
        return 0.5 * squares / std.square() - scale.log().sum()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        mean, scale, ctx.noise_variance, loc, std = inputs
        ctx.save_for_backward(mean, scale, loc, std)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        mean, scale, loc, std = ctx.saved_tensors
        factor = gradient / std.square()
        to_scale = scale * (factor * ctx.noise_variance) - scale.reciprocal() * gradient
        return (mean - loc) * factor, to_scale, None, None, None


def divergence(q: Distribution, p: Distribution, draws: Tensor) -> Tensor:
    """KL(q || p) of one tensor, in nats: closed form where registered, else the mean over draws from q.

    Args:
        q: Posterior of the tensor.
        p: Prior of the tensor.
        draws: Reparametrised draws from q, `[S, *shape]`.
    """
    if is_normal(q) and is_normal(p):
        normal, dimension = q.base_dist, q.event_shape.numel()
        entropy = 0.5 * dimension * (1 + math.log(2 * math.pi))
        return location_scale_divergence(normal.loc, normal.scale, 1.0, entropy, p.base_dist)
    try:
        return kl_divergence(q, p)
    except NotImplementedError as error:
        # Raised without a word by a registered form that declines, and so by torch where none is registered;
        # any other has met an operation that the device lacks.
        if str(error) and not str(error).startswith("No KL("):
            raise
        return (q.log_prob(draws) - p.log_prob(draws)).mean()


def weight_divergence(q: WeightDistribution, p: WeightDistribution, draws: Mapping[str, Tensor]) -> Tensor:
    """KL(q || p) over all weights, in nats; per tensor where both are, else on the joint draws."""
    if JOINT in q and JOINT in p:
        return divergence(q[JOINT], p[JOINT], ravel(draws))
    if JOINT not in q and JOINT not in p:
        return torch.stack([divergence(q[name], p[name], draws[name]) for name in q]).sum()
    return (log_prob(q, draws) - log_prob(p, draws)).mean()


def log_prob(distribution: WeightDistribution, weights: Mapping[str, Tensor]) -> Tensor:
    """Log density of stacked weights `[S, *shape]` per sample, `[S]`, in nats."""
    if JOINT in distribution:
        return distribution[JOINT].log_prob(ravel(weights))
    plain, parts = [], []
    for name, p in distribution.items():
        if is_normal(p) and (std := _one_scale(p.base_dist)) is not None:
            plain.append((p.base_dist.loc, std, weights[name]))
        else:
            parts.append(p.log_prob(weights[name]))
    if plain:
        parts.append(_Normals.apply(*chain.from_iterable(zip(*plain, strict=True))))
    return torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]


class _Normals(torch.autograd.Function):
    """Log density `[S]` of tensors `[S, *shape]` under normals of one standard deviation a tensor.

    Normal.log_prob makes a variance and a logarithm for every weight, and autograd keeps four tensors as
    large: of a plain network that was a third of a step. Here the gradient is written out.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(*given: Tensor) -> Tensor:
        """Means, standard deviations and weights, of as many tensors each."""
        parts = []
        for loc, std, weights in _thirds(given):
            away = torch.linalg.vector_norm((weights - loc).reshape(len(weights), -1), dim=1)
            constant = math.prod(weights.shape[1:]) * (std.log() + 0.5 * math.log(2 * math.pi))
            parts.append(-0.5 * (away / std).square() - constant)
        return torch.stack(parts).sum(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        given = ctx.saved_tensors
        slopes = []
        for loc, std, weights in _thirds(given):
            factor = (gradient / std.square()).reshape(-1, *[1] * (weights.ndim - 1))
            slopes.append((loc - weights) * factor)
        return *[None] * (len(given) - len(slopes)), *slopes


def _thirds(given: Sequence[Tensor]) -> zip[tuple[Tensor, Tensor, Tensor]]:
    """The first, second and last third, side by side."""
    size = len(given) // 3
    return zip(given[:size], given[size : 2 * size], given[2 * size :], strict=True)


def is_normalised(distribution: WeightDistribution) -> bool:
    """Whether every part has a normaliser, so that a bound on the evidence exists."""
    return all(getattr(p, "normalised", True) for p in distribution.values())
