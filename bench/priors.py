"""Priors over a network's weights: each function here returns a `bench.contract.Prior`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TypeGuard

import torch
from torch import Tensor
from torch.distributions import Categorical as Index
from torch.distributions import Distribution, Independent, MixtureSameFamily, Normal

from bench.contract import Prior, WeightDistribution


def independent(distribution: Distribution) -> Independent:
    """Makes the whole tensor one event."""
    return Independent(distribution, len(distribution.batch_shape), validate_args=False)


def normal_tensor(loc: Tensor, scale: Tensor) -> Independent:
    """Independent normals over one tensor, as one event."""
    return independent(Normal(loc, scale, validate_args=False))


def is_normal(distribution: Distribution) -> TypeGuard[Independent]:
    """Whether a tensor's distribution is independent normals, as `normal_tensor` makes them."""
    return isinstance(distribution, Independent) and type(distribution.base_dist) is Normal


def joined_normals(prior: WeightDistribution) -> tuple[Tensor, Tensor] | None:
    """Means and standard deviations `[d]` of independent normals over all weights; None of another prior."""
    normals = [p.base_dist for p in prior.values() if is_normal(p)]
    if len(normals) < len(prior):
        return None
    return torch.cat([p.loc.flatten() for p in normals]), torch.cat([p.scale.flatten() for p in normals])


def _per_tensor(make: Callable[[Tensor], Distribution]) -> Prior:
    return lambda parameters: {name: make(tensor.detach()) for name, tensor in parameters.items()}


def normal(mean: float = 0.0, std: float = 1.0) -> Prior:
    """The same normal for every weight."""
    return _per_tensor(
        lambda w: normal_tensor(w.new_tensor(mean).expand_as(w), w.new_tensor(std).expand_as(w))
    )


def tight_normal() -> Prior:
    """Normal of mean 0 and standard deviation 1/sqrt(D) for a tensor of D weights (Farquhar 2022, 4.4)."""
    return _per_tensor(
        lambda w: normal_tensor(w.new_zeros(()).expand_as(w), w.new_tensor(w.numel() ** -0.5).expand_as(w))
    )


def scale_mixture(share: float = 0.5, std: float = 1.0, narrow_std: float = math.exp(-6)) -> Prior:
    """Per weight: normal of `std` with probability `share`, else of `narrow_std` (Blundell et al. 2015)."""

    def make(w: Tensor) -> Distribution:
        shape = (*w.shape, 2)
        index = Index(probs=w.new_tensor([share, 1 - share]).expand(shape), validate_args=False)
        scales = w.new_tensor([std, narrow_std]).expand(shape)
        components = Normal(torch.zeros_like(scales), scales, validate_args=False)
        return independent(MixtureSameFamily(index, components, validate_args=False))

    return _per_tensor(make)


def frozen(tensors: Mapping[str, tuple[Tensor, ...]], make: Callable[..., Distribution]) -> Prior:
    """A posterior of an earlier step: `make(*tensors[name])` per parameter, from copies of the tensors."""
    copies = {name: tuple(t.detach().clone() for t in parts) for name, parts in tensors.items()}

    def prior(parameters: Mapping[str, Tensor]) -> WeightDistribution:
        device = next(iter(parameters.values())).device
        return {name: make(*(t.to(device) for t in parts)) for name, parts in copies.items()}

    return prior
