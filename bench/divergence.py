"""Kullback-Leibler divergence between distributions over weights: exact where known, else Monte Carlo."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, Normal, kl_divergence
from torch.nn.functional import mse_loss

from bench.contract import JOINT, WeightDistribution
from bench.weights import ravel


def _is_normal(distribution: Distribution) -> bool:
    return isinstance(distribution, Independent) and type(distribution.base_dist) is Normal


def scaled_squares(mean: Tensor, std: Tensor, p: Normal) -> tuple[Tensor, Tensor]:
    """What the cross-entropy to a normal is made of: expected squared distance and log scale, summed.

    Args:
        mean: Mean of every weight `[*shape]` under some posterior.
        std: Standard deviation of every weight.
        p: The normal prior.

    Returns:
        The sum of ((mean - p.loc)^2 + std^2) / p.scale^2 and the sum of log p.scale.
    """
    if p.scale.stride() == (0,) * p.scale.ndim:  # one scale for the whole tensor
        scale = p.scale[(0,) * p.scale.ndim]
        squares = _squared_distance(mean, p.loc) + _squared_distance(std, torch.zeros_like(scale))
        return squares / scale.square(), mean.numel() * scale.log()
    squares = _squared_distance(mean / p.scale, p.loc / p.scale)
    return squares + (std / p.scale).square().sum(), p.scale.log().sum()


def _squared_distance(a: Tensor, b: Tensor) -> Tensor:
    # One pass over the weights in each direction, where (a - b).square().sum() takes two and four.
    return mse_loss(a, b.expand_as(a), reduction="sum")


def _normal_divergence(q: Normal, p: Normal) -> Tensor:
    squares, log_scale = scaled_squares(q.loc, q.scale, p)
    return 0.5 * (squares - q.loc.numel()) - q.scale.log().sum() + log_scale


def divergence(q: Distribution, p: Distribution, draws: Tensor) -> Tensor:
    """KL(q || p) of one tensor, in nats: closed form where registered, else the mean over draws from q.

    Args:
        q: Posterior of the tensor.
        p: Prior of the tensor.
        draws: Reparametrised draws from q, `[S, *shape]`.
    """
    if _is_normal(q) and _is_normal(p):
        return _normal_divergence(q.base_dist, p.base_dist)
    try:
        return kl_divergence(q, p)
    except NotImplementedError:
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
    return torch.stack([p.log_prob(weights[name]) for name, p in distribution.items()]).sum(0)


def is_normalised(distribution: WeightDistribution) -> bool:
    """Whether every part has a normaliser, so that a bound on the evidence exists."""
    return all(getattr(p, "normalised", True) for p in distribution.values())
