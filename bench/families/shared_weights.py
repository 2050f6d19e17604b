"""Networks that share weight matrices and differ in factors on their rows and columns.

Shapes: M networks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional


def is_matrix(module: nn.Module) -> TypeGuard[nn.Linear | nn.Conv2d]:
    """Whether a module's weight is a matrix of outputs and inputs: no group of them meets some alone."""
    return type(module) is nn.Linear or (type(module) is nn.Conv2d and module.groups == 1)


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
