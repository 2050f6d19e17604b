"""Kullback-Leibler divergence between distributions over weights: exact where known, else Monte Carlo."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributions import Distribution, Normal, kl_divergence

from bench.contract import JOINT, WeightDistribution
from bench.priors import is_normal
from bench.weights import are_transformed, ravel


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
    stds, centred = _centred(distribution, weights)
    parts = [p.log_prob(weights[name]) for name, p in distribution.items() if name not in stds]
    if stds:
        parts.append(_Normals.apply(tuple(stds.values()), *centred.values()))
    return torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]


def with_log_prob(
    distribution: WeightDistribution,
    shared: Mapping[str, Tensor],
    own: Mapping[str, Tensor],
    owns_gradients: bool = False,
) -> tuple[dict[str, Tensor], Tensor]:
    """The weights of M networks, and their log density, its mean over the networks, in nats.

    What comes back to a tensor by either is joined in one pass over it.

    Args:
        distribution: Over the weights of one network.
        shared: Tensors `[*shape]` that are in all networks.
        own: Tensors `[M, *shape]`, of each network its own.
        owns_gradients: Whether what comes back by the weights lies in memory that nothing else has, as
            matrix products do; then it is written over.
    """
    weights = {**shared, **own}
    if JOINT in distribution:
        count = len(next(iter(own.values()))) if own else 1
        whole = {n: own[n] if n in own else w.expand(count, *w.shape) for n, w in weights.items()}
        return weights, log_prob(distribution, whole).mean()
    if are_transformed(weights.values()):
        groups = {name: w[None] for name, w in shared.items()}, own
        parts = [log_prob({n: distribution[n] for n in group}, group).mean() for group in groups if group]
        return weights, torch.stack(parts).sum()
    stds, centred = _centred(distribution, weights)
    parts = [p.log_prob(weights[name]).mean() for name, p in distribution.items() if name not in stds]
    if stds:
        kinds = tuple((std, len(own[name]) if name in own else 1) for name, std in stds.items())
        part, *same = _MeanNormals.apply(kinds, owns_gradients, *centred.values())
        parts.append(part)
        weights |= {n: w for n, w in zip(stds, same, strict=True) if centred[n] is weights[n]}
    return weights, torch.stack(parts).sum() if len(parts) > 1 else parts[0]


def _centred(
    distribution: WeightDistribution, weights: Mapping[str, Tensor]
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Of tensors under normals of one standard deviation: that number, and the weights less their means."""
    stds: dict[str, float] = {}  # an alias that is called would break the graph of compiled code
    centred: dict[str, Tensor] = {}
    for name, p in distribution.items():
        if is_normal(p) and (known := _numbers(p.base_dist)) is not None:
            is_centred, stds[name] = known
            centred[name] = weights[name] if is_centred else weights[name] - p.base_dist.loc
    return stds, centred


_READ: WeakKeyDictionary[Normal, tuple[tuple[int, ...], tuple[bool, float]]] = WeakKeyDictionary()
"""What `_numbers` found, and the versions of the tensors where it did; it lives as long as the prior."""


def _numbers(p: Normal) -> tuple[bool, float] | None:
    """Whether fixed normals all have mean 0, and the standard deviation that they share; None of others.

    They are read once, since on an accelerator reading waits for the device. Compiled code fuses the plain
    formula, and cannot read.
    """
    if torch.compiler.is_compiling():
        return None
    versions = tuple(0 if t.is_inference() else t._version for t in (p.loc, p.scale))
    before, found = _READ.get(p, (None, None))
    if before != versions:
        std, loc = _one_scale(p), p.loc
        if std is None or are_transformed([std, loc]):
            return None
        is_one = loc.stride() == (0,) * loc.ndim
        found = is_one and loc[(0,) * loc.ndim].item() == 0, std.item()
        _READ[p] = versions, found
    return found


_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


class _Normals(torch.autograd.Function):
    """Log density `[S]` of tensors `[S, *shape]` under normals of mean 0, of a standard deviation a tensor.

    Normal.log_prob makes a variance and a logarithm for every weight, and autograd keeps four tensors as
    large: of a plain network that was a third of a step. Here the gradient is written out.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(stds: tuple[float, ...], *weights: Tensor) -> Tensor:
        norms = [torch.linalg.vector_norm(w.reshape(len(w), -1), dim=1) for w in weights]
        parts = [norm / std for norm, std in zip(norms, stds, strict=True)]
        sizes = [w.shape[1:].numel() for w in weights]
        constant = sum(n * (math.log(std) + _HALF_LOG_2PI) for n, std in zip(sizes, stds, strict=True))
        return -0.5 * torch.stack(parts).square().sum(0) - constant

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.stds, *weights = inputs
        ctx.save_for_backward(*weights)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        pairs = zip(ctx.stds, ctx.saved_tensors, strict=True)
        return None, *(w * (slope * (-1 / std**2)).reshape(-1, *[1] * (w.ndim - 1)) for std, w in pairs)


class _MeanNormals(torch.autograd.Function):
    """The same as a mean over networks, and the tensors: what comes back by these is added in the same pass.

    It changes no tensor's shape and has no rule for vmap, which alone takes longer than the norms.
    """

    @staticmethod
    def forward(
        ctx: Any, kinds: tuple[tuple[float, int], ...], owned: bool, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        """`kinds` are the standard deviation of every tensor and the number of networks in it.

        `owned` is `owns_gradients` of `with_log_prob`.
        """
        ctx.kinds, ctx.owned = kinds, owned
        ctx.save_for_backward(*weights)
        ctx.set_materialize_grads(False)
        norms = [torch.linalg.vector_norm(w) for w in weights]
        sizes = dict.fromkeys(kinds, 0)
        for kind, w in zip(kinds, weights, strict=True):
            sizes[kind] += w.numel()
        constant = sum(n / count * (math.log(std) + _HALF_LOG_2PI) for (std, count), n in sizes.items())
        std, count = kinds[0]
        if len(sizes) > 1:
            scales = [std / other * math.sqrt(count / each) for other, each in kinds]
            norms = [norm * scale for norm, scale in zip(norms, scales, strict=True)]
        density = torch.stack(norms).square().sum() * (-0.5 / (std**2 * count)) - constant
        return density, *(w.view_as(w) for w in weights)

    @staticmethod
    def backward(ctx: Any, slope: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, ...]:
        if slope is None:
            return None, None, *others
        in_place = ctx.owned and not torch.is_grad_enabled()
        factors = {kind: slope * (-1 / (kind[0] ** 2 * kind[1])) for kind in set(ctx.kinds)}
        gradients = []
        for kind, w, other in zip(ctx.kinds, ctx.saved_tensors, others, strict=True):
            if other is None:
                gradients.append(w * factors[kind])
            else:
                add = other.addcmul_ if in_place else other.addcmul
                gradients.append(add(w, factors[kind]))
        return None, None, *gradients


def is_normalised(distribution: WeightDistribution) -> bool:
    """Whether every part has a normaliser, so that a bound on the evidence exists."""
    return all(getattr(p, "normalised", True) for p in distribution.values())
