"""The linear layer at the end of a network: what it is called, and what it gets.

Shapes: B examples, P inputs of the layer, K outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bench.families import curvature
from bench.weights import channels_last


def last_linear(network: nn.Module) -> str | None:
    """Path (`get_submodule`) of the last module with weights; None if it is no linear layer with its own."""
    owners = [path for path, m in network.named_modules() if list(m.parameters(recurse=False))]
    if not owners or type(network.get_submodule(owners[-1])) is not nn.Linear:
        return None
    is_own = {*names_of(network, owners[-1])} <= {name for name, _ in network.named_parameters()}
    return owners[-1] if is_own else None  # a weight that layers share has the first one's name


def names_of(network: nn.Module, path: str) -> list[str]:
    """Names of a layer's own weights among those of the network."""
    own = network.get_submodule(path).named_parameters(recurse=False)
    return [".".join(filter(None, (path, name))) for name, _ in own]


def features(network: nn.Module, path: str, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """What a layer gets, `[B, P]`, and what the network says, `[B, K]`, for inputs `[B, ...]`."""
    seen: list[Tensor] = []
    layer = network.get_submodule(path)
    handle = layer.register_forward_pre_hook(
        lambda _, arguments, named: seen.append(next(iter((*arguments, *named.values())))), with_kwargs=True
    )
    try:
        outputs = network(channels_last(inputs) if inputs.ndim == 4 else inputs)
    finally:
        handle.remove()
    return seen[0], outputs


def is_final(network: nn.Module, path: str, inputs: Tensor) -> bool:
    """Whether the network says what this layer says of vectors, once and unchanged, for inputs `[B, ...]`.

    And whether all of the layer's weights are free and act in that call alone.
    """
    said: list[Tensor] = []
    layer = network.get_submodule(path)
    handle = layer.register_forward_hook(lambda _, arguments, output: said.append(output))
    try:
        with torch.no_grad():
            outputs = network(inputs)
    finally:
        handle.remove()
    if len(said) != 1 or outputs is not said[0] or outputs.ndim != 2:
        return False
    is_whole = [layer] == curvature.owners(network, names_of(network, path))
    return is_whole and curvature.odd_weight(network, names_of(network, path), inputs) is None
