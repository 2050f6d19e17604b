"""Weight space: a posterior is a distribution over a plain network's dictionary of parameters.

S draws of the weights are one dictionary of stacked tensors `[S, *shape]`, and `forward` runs the network
under each of them. How S is walked is private to this file and chosen by measurement (docs/decisions.md):

    stacked   one batched matrix product per layer; networks that are plain stacks of linear layers
    loop      one sample after another through `torch.func.functional_call`, images in channels-last order
    vmap      `torch.func.vmap`; never chosen by default

All walks see the same weights and give the same outputs and gradients.

Shapes: S samples, B examples, d weights in all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

Walk = Literal["stacked", "loop", "vmap"]
Weights = Mapping[str, Tensor]

_ELEMENTWISE = (
    nn.ReLU,
    nn.LeakyReLU,
    nn.Tanh,
    nn.ELU,
    nn.GELU,
    nn.SiLU,
    nn.Sigmoid,
    nn.Softplus,
    nn.Identity,
)
_LARGEST_STACK = 4_000_000
"""Floats of the largest activation above which one sample at a time is faster than all at once."""
_CHUNK = 2_000_000
"""Weights drawn at once in prediction; bounds memory, and the draws do not depend on the inputs."""


# ----------------------------------------------------------------------------------------- flat vectors


def ravel(weights: Weights) -> Tensor:
    """Stacked weights `[S, *shape]` as vectors `[S, d]`, in the dictionary's order."""
    return torch.cat([w.flatten(1) for w in weights.values()], 1)


def unravel(vectors: Tensor, like: Weights) -> dict[str, Tensor]:
    """Vectors `[S, d]` as stacked weights `[S, *shape]`; `like` holds tensors `[*shape]` in the same order."""
    sizes = [w.numel() for w in like.values()]
    if vectors.shape[-1] != sum(sizes):
        raise ValueError(f"vectors have {vectors.shape[-1]} entries, the weights {sum(sizes)}")
    parts = vectors.split(sizes, -1)
    return {name: part.unflatten(-1, w.shape) for part, (name, w) in zip(parts, like.items(), strict=True)}


# ---------------------------------------------------------------------------------------------- forward


def forward(network: nn.Module, weights: Weights, inputs: Tensor, walk: Walk | None = None) -> Tensor:
    """Outputs `[S, B, ...]` of the network for inputs `[B, ...]` under each of S stacked weights.

    Args:
        network: Gives the architecture; its own parameters are not used.
        weights: A tensor `[S, *shape]` for every parameter of the network.
        inputs: Examples `[B, ...]`, shared by all samples.
        walk: How to go over the samples; None takes the fastest.
    """
    layers = _linear_stack(network)
    if walk is None:
        walk = "stacked" if layers is not None and _fits(weights, inputs) else "loop"
    if walk == "stacked":
        if layers is None:
            raise ValueError("the stacked walk needs a plain stack of linear layers")
        return _stacked(layers, weights, inputs)
    if inputs.ndim == 4:
        inputs = inputs.contiguous(memory_format=torch.channels_last)
    if walk == "vmap":
        return vmap(lambda w: functional_call(network, w, (inputs,)))(dict(weights))
    return torch.stack([functional_call(network, w, (inputs,)) for w in _unstack(weights)])


def sampled_outputs(
    network: nn.Module,
    draw: Callable[[int, torch.Generator], Weights],
    inputs: Tensor,
    num_samples: int,
    generator: torch.Generator,
) -> Tensor:
    """Outputs `[S, B, ...]` under weights drawn a few samples at a time, without gradients.

    Args:
        network: Gives the architecture.
        draw: `draw(n, generator)` gives n stacked weights.
        inputs: Examples `[B, ...]`.
        num_samples: S.
        generator: Drives the draws; how they are split depends on the network alone, never on the inputs.
    """
    size = sum(p.numel() for p in network.parameters())
    chunk = max(1, min(num_samples, _CHUNK // size))
    counts = [min(chunk, num_samples - done) for done in range(0, num_samples, chunk)]
    with torch.no_grad():
        return torch.cat([forward(network, draw(n, generator), inputs) for n in counts])


def _unstack(weights: Weights) -> Iterator[dict[str, Tensor]]:
    parts = {name: w.unbind(0) for name, w in weights.items()}
    for s in range(len(next(iter(parts.values())))):
        yield {name: part[s] for name, part in parts.items()}


def _linear_stack(network: nn.Module) -> list[tuple[str, nn.Module]] | None:
    """The layers of a plain stack by name, or None if the network is anything else."""
    if type(network).forward is not nn.Sequential.forward:
        return None
    layers = list(network.named_children())
    plain = all(
        type(layer) in (nn.Linear, nn.Flatten, *_ELEMENTWISE) or getattr(layer, "is_identity", False)
        for _, layer in layers
    )
    return layers if plain and any(type(layer) is nn.Linear for _, layer in layers) else None


def _fits(weights: Weights, inputs: Tensor) -> bool:
    widest = max(w.shape[1] for w in weights.values())
    samples = len(next(iter(weights.values())))
    return samples * len(inputs) * widest <= _LARGEST_STACK


def _stacked(layers: list[tuple[str, nn.Module]], weights: Weights, inputs: Tensor) -> Tensor:
    samples = len(next(iter(weights.values())))
    hidden = inputs  # [B, ...] while all samples share it, [S, B, ...] from the first linear layer on
    shared = True
    for name, layer in layers:
        if type(layer) is nn.Flatten:
            hidden = hidden.flatten(1) if shared else hidden.flatten(2)
        elif type(layer) is nn.Linear:
            weight = weights[f"{name}.weight"].transpose(1, 2)  # [S, in, out]
            bias = weights.get(f"{name}.bias")
            if samples == 1:
                rows = hidden if shared else hidden[0]
                product = rows @ weight[0] if bias is None else torch.addmm(bias[0], rows, weight[0])
                hidden = product[None]
            else:
                rows = hidden.expand(samples, *hidden.shape) if shared else hidden
                hidden = rows @ weight if bias is None else torch.baddbmm(bias[:, None], rows, weight)
            shared = False
        else:
            hidden = layer(hidden)
    return hidden
