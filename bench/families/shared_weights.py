"""Networks that share weight matrices and differ in factors on their rows and columns.

Shapes: M networks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional

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


def stack_outputs(
    layers: Sequence[tuple[str, nn.Module]],
    weights: Mapping[str, Tensor],
    factors: Mapping[str, tuple[Tensor, Tensor]],
    inputs: Tensor,
) -> Tensor:
    """Outputs `[M, n, ...]` of M networks W o r s^T, each for n inputs of its own.

    x (W o r s^T)^T is (x o s) W^T o r, which makes no matrix for each network: of wide layers these are
    larger than a batch.

    Args:
        layers: What `bench.weights.linear_stack` says of the network.
        weights: The shared matrices `[outputs, inputs]` and the networks' own biases `[M, outputs]`.
        factors: Of every shared matrix r `[M, outputs, 1]` and s `[M, 1, inputs]`.
        inputs: `[M, n, ...]`, or `[1, n, ...]` of all networks.
    """
    hidden = inputs
    for name, layer in layers:
        if type(layer) is nn.Flatten:
            hidden = hidden.flatten(2)
        elif type(layer) is nn.Linear:
            r, s = factors[f"{name}.weight"]
            units = functional.linear(hidden * s, weights[f"{name}.weight"])
            bias = weights.get(f"{name}.bias")
            hidden = units * r.mT if bias is None else torch.addcmul(bias[:, None], units, r.mT)
        else:
            hidden = layer(hidden)
    return hidden
