"""Posteriors m + s * e: draws of all weights, and their divergence to normals, over two flat vectors.

Tensor by tensor a training step is hundreds of operations on small tensors. Here the means are one vector,
and so are the trained numbers behind the scales; a draw of all weights and its divergence are one node of
the graph, whose derivatives are written out:

    w = m + s * e,   KL(q || N(c, 1 / a)) = sum (a (m - c)^2 + v a s^2) / 2 - log s, and a constant
    dw + k dKL:      to m   sum over S of g + k a (m - c)
                     to s   sum over S of g * e + k (v a s - 1 / s)

where v is the variance of an entry of e, and g and k are the gradients of the weights and of the divergence.
Both are what `bench.divergence` and `bench.weights.reparametrise` give tensor by tensor, which serve where
`Normals.of` says that the prior is no such vector of normals.

Shapes: S samples, d weights in all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors as _unflatten
from torch.autograd.function import once_differentiable
from torch.distributions import Distribution
from torch.nn.functional import softplus

from bench.contract import JOINT, WeightDistribution
from bench.divergence import weight_divergence
from bench.priors import is_normal, normal_tensor
from bench.weights import Weights, join, reparametrise

LOG_TWO_PI = math.log(2 * math.pi)


@dataclass(frozen=True)
class Link:
    """How a scale follows from the number r that is trained for it.

    Attributes:
        scale: s of r.
        log_sum: The sum of log s over all entries, of r and s.
        slope: ds/dr, of r and s.
    """

    scale: Callable[[Tensor], Tensor]
    log_sum: Callable[[Tensor, Tensor], Tensor]
    slope: Callable[[Tensor, Tensor], Tensor]


def sum_of_logs(values: Tensor) -> Tensor:
    """Sum of the logarithms of positive numbers `[d]`.

    A processor's logarithm is slow: of four numbers between 1e-9 and 1e9 it is that of their product, which
    float32 holds. Numbers on an accelerator, and beyond that range, have one each.
    """
    quarter = len(values) // 4
    if values.device.type != "cpu" or quarter == 0:
        return values.log().sum()
    low, high = values.aminmax()
    if not (low > 1e-9 and high < 1e9):
        return values.log().sum()
    products = values[: 4 * quarter].view(4, quarter).prod(0)
    return products.log_().sum() + values[4 * quarter :].log().sum()


SOFTPLUS = Link(softplus, lambda r, s: sum_of_logs(s), lambda r, s: r.sigmoid())
EXP = Link(torch.exp, lambda r, s: r.sum(), lambda r, s: s)


@dataclass(frozen=True)
class Family:
    """Distributions of m + s * e over one tensor; e has mean 0 and uncorrelated entries.

    Attributes:
        make: The distribution, from m and s `[*shape]`.
        link: Of the scales.
        variance: Of an entry of e, from the number of weights in the tensor.
        entropy: Of e as a whole, in nats, from the same.
    """

    make: Callable[[Tensor, Tensor], Distribution]
    link: Link
    variance: Callable[[int], float]
    entropy: Callable[[int], float]


def normals(link: Link = SOFTPLUS) -> Family:
    """Independent normals."""
    return Family(normal_tensor, link, lambda size: 1.0, lambda size: 0.5 * size * (1 + LOG_TWO_PI))


class LocationScale(Mapping[str, Any]):
    """Name of a tensor -> its distribution, with gradients; made when it is asked for.

    Args:
        family: Of all tensors.
        means: m `[*shape]` of every tensor, by name.
        numbers: What is trained for the scales `[*shape]`, in the same order.
    """

    def __init__(self, family: Family, means: Mapping[str, Tensor], numbers: Iterable[Tensor]) -> None:
        self.family, self.means = family, means
        self.numbers = dict(zip(means, numbers, strict=True))

    def __getitem__(self, name: str) -> Any:
        return self.family.make(self.means[name], self.family.link.scale(self.numbers[name]))

    def __contains__(self, name: object) -> bool:
        return name in self.means

    def __iter__(self) -> Iterator[str]:
        return iter(self.means)

    def __len__(self) -> int:
        return len(self.means)


@dataclass(frozen=True)
class Normals:
    """A prior of independent normals as vectors, and what of a divergence to it depends on the prior alone.

    Attributes:
        loc: Means, `[d]`, or one number where all are equal; None where all are 0.
        precision: 1 / std^2, `[d]` or one number.
        spread: The same times the variance of the posterior's noise.
        constant: Of the divergence, in nats.
    """

    loc: Tensor | None
    precision: Tensor
    spread: Tensor
    constant: Tensor

    @classmethod
    def of(cls, family: Family, prior: WeightDistribution) -> Normals | None:
        """The prior for posteriors of a family; None if it is joint, learned, or other than normals."""
        parts = [p.base_dist for p in prior.values() if is_normal(p)]
        if JOINT in prior or len(parts) < len(prior):
            return None
        if any(p.loc.requires_grad or p.scale.requires_grad for p in parts):
            return None
        sizes = [p.loc.numel() for p in parts]
        loc, std = as_vector([p.loc for p in parts]), as_vector([p.scale for p in parts])
        precision = std.square().reciprocal()
        variances = as_vector(
            [p.loc.new_tensor(family.variance(p.loc.numel())).expand_as(p.loc) for p in parts]
        )
        log_std = std.log().sum() * (1 if std.ndim else sum(sizes))
        constant = log_std + (0.5 * sum(sizes) * LOG_TWO_PI - sum(map(family.entropy, sizes)))
        return cls(loc if loc.any() else None, precision, precision * variances, constant)

    def divergence(self, mean: Tensor, scale: Tensor) -> Tensor:
        """KL of a posterior with means and scales `[d]`, in nats, but for the sum of their logarithms."""
        squares = _weighted(self._centred(mean).square(), self.precision)
        return squares.add_(_weighted(scale.square(), self.spread)).mul_(0.5).add_(self.constant)

    def add_slopes(self, to_mean: Tensor, to_scale: Tensor, mean: Tensor, scale: Tensor, k: Tensor) -> None:
        """Adds k times the derivatives of the whole divergence, `[d]`, to gradients."""
        if k.device.type == "cpu":  # a number that is known saves a vector; elsewhere it would be waited for
            to_mean.addcmul_(self._centred(mean), self.precision, value=k.item())
            to_scale.addcmul_(scale, self.spread, value=k.item())
        else:
            to_mean.addcmul_(self._centred(mean), self.precision * k)
            to_scale.addcmul_(scale, self.spread * k)
        to_scale.addcdiv_(k, scale, value=-1)

    def _centred(self, mean: Tensor) -> Tensor:
        return mean if self.loc is None else mean - self.loc


def _weighted(squares: Tensor, weights: Tensor) -> Tensor:
    """Sum of squares times weights, which are `[d]` or one number."""
    return squares.sum().mul_(weights) if weights.ndim == 0 else squares.mul_(weights).sum()


def as_vector(tensors: list[Tensor]) -> Tensor:
    """Tensors as one vector `[d]`, or the one number that all their entries are known to be."""
    if all(t.stride() == (0,) * t.ndim for t in tensors):
        values = torch.stack([t[(0,) * t.ndim] for t in tensors])
        if (values == values[0]).all():
            return values[0]
    return torch.cat([t.flatten() for t in tensors])


class _Draw(torch.autograd.Function):
    """Draws `[S, *shape]` of every tensor, and last the divergence.

    Of the tensors that it is given the first half is means, the second numbers.
    """

    @staticmethod
    def forward(ctx: Any, link: Link, prior: Normals, noise: list[Tensor], *tensors: Tensor) -> Any:
        half = len(tensors) // 2
        means, mean, number = tensors[:half], join(tensors[:half]), join(tensors[half:])
        scale = link.scale(number)
        if len(noise[0]) == 1:  # the samples of all tensors, too, are one vector
            draws = _unflatten(torch.addcmul(mean, scale, join(noise)), noise)
        else:
            parts = zip(noise, _unflatten(mean, means), _unflatten(scale, means), strict=True)
            draws = [torch.addcmul(m, s, e) for e, m, s in parts]
        ctx.link, ctx.prior, ctx.means = link, prior, means
        ctx.save_for_backward(mean, number, scale, *noise)
        ctx.set_materialize_grads(False)
        return *draws, prior.divergence(mean, scale).sub_(link.log_sum(number, scale))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        mean, number, scale, *noise = ctx.saved_tensors
        *to_draws, k = gradients
        to_mean, to_scale = _sums(to_draws, noise, ctx.means, scale)
        if k is not None:
            ctx.prior.add_slopes(to_mean, to_scale, mean, scale, k)
        to_scale.mul_(ctx.link.slope(number, scale))
        return None, None, None, *_unflatten(to_mean, ctx.means), *_unflatten(to_scale, ctx.means)


def _sums(
    gradients: Sequence[Tensor | None], noise: list[Tensor], like: Sequence[Tensor], scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Sums over S of gradients `[S, *shape]` of draws, and of their products with the noise, each `[d]`."""
    given = [g for g in gradients if g is not None]
    if len(noise[0]) == 1 and len(given) == len(noise):
        to_mean = torch.cat([g.reshape(-1) for g in given])
        return to_mean, to_mean * join(noise)
    sums = torch.zeros_like(scale), torch.zeros_like(scale)
    for g, e, to_mean, to_scale in zip(gradients, noise, *(_unflatten(s, like) for s in sums), strict=True):
        if g is None:
            continue
        torch.sum(g, 0, out=to_mean)
        for of_sample, noise_of_sample in zip(g, e, strict=True):
            to_scale.addcmul_(of_sample, noise_of_sample)
    return sums


def draw(q: WeightDistribution, noise: Weights) -> dict[str, Tensor]:
    """Weights `[S, *shape]` drawn from a posterior, without gradients."""
    with torch.no_grad():
        if not isinstance(q, LocationScale):
            return {name: torch.addcmul(*_location_and_scale(d), noise[name]) for name, d in q.items()}
        means = q.means.values()
        scales = _unflatten(q.family.link.scale(join([*q.numbers.values()])), [*means])
        parts = zip(q, means, scales, strict=True)
        return {name: torch.addcmul(m, s, noise[name]) for name, m, s in parts}


def draw_with_divergence(
    q: WeightDistribution, noise: Weights, prior: WeightDistribution, joined: Normals | None
) -> tuple[dict[str, Tensor], Tensor]:
    """Weights `[S, *shape]` drawn from a posterior, and KL(q || prior) in nats, both with gradients.

    Args:
        q: The posterior.
        noise: e `[S, *shape]` by tensor.
        prior: Over the same tensors.
        joined: The same as vectors; None goes tensor by tensor.
    """
    if joined is None or not isinstance(q, LocationScale):
        weights = {name: reparametrise(*_location_and_scale(d), noise[name]) for name, d in q.items()}
        return weights, weight_divergence(q, prior, weights)
    every = [noise[name] for name in q]
    *draws, divergence = _Draw.apply(q.family.link, joined, every, *q.means.values(), *q.numbers.values())
    return dict(zip(q, draws, strict=True)), divergence


def _location_and_scale(d: Any) -> tuple[Tensor, Tensor]:
    part = d.base_dist if is_normal(d) else d
    return part.loc, part.scale
