"""Networks that share weight matrices and differ in factors on their rows and columns.

Shapes: M networks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeGuard

import torch
from torch import Tensor, nn

from bench.contract import JOINT, WeightDistribution
from bench.divergence import log_prob


def is_matrix(module: nn.Module) -> TypeGuard[nn.Linear | nn.Conv2d]:
    """Whether a module's weight is a matrix of outputs and inputs: no group of them meets some alone."""
    return type(module) is nn.Linear or (type(module) is nn.Conv2d and module.groups == 1)


def log_prior(prior: WeightDistribution, weights: Mapping[str, Tensor], count: int) -> Tensor:
    """Log prior of weights, its mean over the networks, in nats.

    Args:
        prior: Over the weights of one network.
        weights: Of every tensor those that all share, `[1, *shape]`, or each network's own, `[M, *shape]`.
        count: M.
    """
    if JOINT in prior:
        return log_prob(prior, {name: w.expand(count, *w.shape[1:]) for name, w in weights.items()}).mean()
    sizes = {len(w) for w in weights.values()}
    parts = [{name: p for name, p in prior.items() if len(weights[name]) == size} for size in sizes]
    return torch.stack([log_prob(part, weights).mean() for part in parts]).sum()
