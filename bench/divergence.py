"""Kullback-Leibler divergence between distributions over weights: exact where known, else Monte Carlo."""

from __future__ import annotations

import math
from collections.abc import Mapping
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
    return torch.stack([tensor_log_prob(p, weights[name]) for name, p in distribution.items()]).sum(0)


def tensor_log_prob(p: Distribution, weights: Tensor) -> Tensor:
    """Log density of one tensor's stacked weights `[S, *shape]` per sample, `[S]`, in nats."""
    if not is_normal(p) or (std := _one_scale(p.base_dist)) is None:
        return p.log_prob(weights)
    # A third of the time of Normal.log_prob, which makes variance and logarithm for every weight.
    squares = (weights - p.base_dist.loc).square().reshape(len(weights), -1).sum(1)
    constant = p.event_shape.numel() * (std.log() + 0.5 * math.log(2 * math.pi))
    return -0.5 * squares / std.square() - constant


def is_normalised(distribution: WeightDistribution) -> bool:
    """Whether every part has a normaliser, so that a bound on the evidence exists."""
    return all(getattr(p, "normalised", True) for p in distribution.values())
