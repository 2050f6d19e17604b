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

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
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
        log: log s, of r and s.
        slope: ds/dr, of r and s.
    """

    scale: Callable[[Tensor], Tensor]
    log: Callable[[Tensor, Tensor], Tensor]
    slope: Callable[[Tensor, Tensor], Tensor]


SOFTPLUS = Link(softplus, lambda r, s: s.log(), lambda r, s: r.sigmoid())
EXP = Link(torch.exp, lambda r, s: r, lambda r, s: s)


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

    def centred(self, mean: Tensor) -> Tensor:
        """Means `[d]` of a posterior less those of the prior."""
        return mean if self.loc is None else mean - self.loc


def as_vector(tensors: list[Tensor]) -> Tensor:
    """Tensors as one vector `[d]`, or the one number that all their entries are known to be."""
    if all(t.stride() == (0,) * t.ndim for t in tensors):
        values = torch.stack([t[(0,) * t.ndim] for t in tensors])
        if (values == values[0]).all():
            return values[0]
    return torch.cat([t.flatten() for t in tensors])


class _Draw(torch.autograd.Function):
    """The divergence but for its constant, all scales `[d]`, and of every tensor draws `[S, *shape]`.

    Of the tensors that it is given the first third is noise, the second means, the last numbers.
    """

    @staticmethod
    def forward(link: Link, prior: Normals, *tensors: Tensor) -> tuple[Tensor, ...]:
        noise, means, numbers = _thirds(tensors)
        mean, number = join(means), join(numbers)
        scale = link.scale(number)
        squares = prior.centred(mean).square().mul_(prior.precision).sum()
        squares = squares + scale.square().mul_(prior.spread).sum()
        divergence = 0.5 * squares - link.log(number, scale).sum()
        parts = zip(noise, means, _split(scale, means), strict=True)
        return divergence, scale, *(torch.addcmul(m, s, e) for e, m, s in parts)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.link, ctx.prior, *tensors = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output[1], *tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_divergence: Tensor | None, _: None, *to_draws: Tensor | None) -> Any:
        scale, *tensors = ctx.saved_tensors
        noise, means, numbers = _thirds(tensors)
        prior, k = ctx.prior, scale.new_zeros(()) if to_divergence is None else to_divergence
        # In place from here: memory that was just written is several times as fast as fresh memory.
        to_mean = prior.centred(join(means)) * (prior.precision * k)
        to_scale = (scale * (prior.spread * k)).sub_(k / scale)
        gradients = [_split(whole, means) for whole in (to_mean, to_scale)]
        for g, e, of_mean, of_scale in zip(to_draws, noise, *gradients, strict=True):
            if g is None:
                continue
            of_mean.add_(g.sum(0) if len(g) > 1 else g[0])
            for of_sample, noise_of_sample in zip(g, e, strict=True):
                of_scale.addcmul_(of_sample, noise_of_sample)
        to_scale.mul_(ctx.link.slope(join(numbers), scale))
        return (None,) * (2 + len(noise)) + (*gradients[0], *gradients[1])


def draw(q: WeightDistribution, noise: Weights) -> dict[str, Tensor]:
    """Weights `[S, *shape]` drawn from a posterior, without gradients."""
    with torch.no_grad():
        if not isinstance(q, LocationScale):
            return {name: torch.addcmul(*_location_and_scale(d), noise[name]) for name, d in q.items()}
        means = q.means.values()
        scales = _split(q.family.link.scale(join([*q.numbers.values()])), means)
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
    tensors = ([noise[name] for name in q], q.means.values(), q.numbers.values())
    divergence, _, *draws = _Draw.apply(q.family.link, joined, *itertools.chain(*tensors))
    return dict(zip(q, draws, strict=True)), divergence + joined.constant


def _thirds(tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], ...]:
    third = len(tensors) // 3
    return tensors[:third], tensors[third : 2 * third], tensors[2 * third :]


def _split(vector: Tensor, like: Collection[Tensor]) -> list[Tensor]:
    """A vector `[d]` as tensors `[*shape]`, views of it, each of which may be written to."""
    ends = itertools.accumulate((t.numel() for t in like), initial=0)
    return [vector.narrow(0, at, t.numel()).view(t.shape) for at, t in zip(ends, like, strict=False)]


def _location_and_scale(d: Any) -> tuple[Tensor, Tensor]:
    part = d.base_dist if is_normal(d) else d
    return part.loc, part.scale
