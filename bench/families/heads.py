"""Networks with several heads: last layers one below the other in the place of one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from bench.errors import UsageError
from bench.families import last_layer


def with_heads(make: Callable[[], nn.Module], count: int, example: Tensor, who: str) -> nn.Module:
    """A fresh network with the last layers of `count` one below the other: `count` times the outputs.

    Args:
        make: Makes networks.
        count: At least 1.
        example: One input.
        who: The method, as a refusal names it.

    Raises:
        UsageError: If what the network says is not what a linear layer says.
    """
    networks = [make() for _ in range(count)]
    path = last_layer.last_linear(networks[0])
    if path is None or not last_layer.is_final(networks[0], path, example[None]):
        raise UsageError(f"{who} needs a network whose outputs are those of a linear layer at its end")
    layers = [network.get_submodule(path) for network in networks]
    for name in dict(layers[0].named_parameters()):
        heads = torch.cat([layer.get_parameter(name).detach() for layer in layers])
        setattr(layers[0], name, nn.Parameter(heads))
    return networks[0]
