"""A network of the user's own: a plain module from a factory, made fit for a posterior over its weights.

The factory is called with the shape of one input and the number of outputs, and returns any `nn.Module`, with
pretrained weights if it loads some. Weights that are frozen, here or by `requires_grad_(False)` in the
factory, become buffers: posterior and prior do not know them. BatchNorm keeps the statistics that it came
with, since a prediction must not depend on the batch. `nn.Dropout` does nothing but where a method asks for
dropout, at the method's rate.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from bench.errors import UsageError
from bench.networks import Dropout

imported: dict[str, Callable[..., nn.Module]] = {}
"""Factories by the name `package.module:factory`; `bench.runs.registry.import_own` alone fills it."""


class StoredNorm(nn.Module):
    """BatchNorm at its stored statistics: `(x - mean) / sqrt(variance + eps) * weight + bias`, by channel.

    Args:
        norm: With running statistics; its weight and bias, if it has them, stay as trainable as they were.
    """

    mean: Tensor
    variance: Tensor

    def __init__(self, norm: _BatchNorm) -> None:
        super().__init__()
        self.eps = norm.eps
        self.weight, self.bias = norm.weight, norm.bias
        self.register_buffer("mean", norm.running_mean)
        self.register_buffer("variance", norm.running_var)

    def forward(self, inputs: Tensor) -> Tensor:
        """Outputs of the shape of the inputs `[B, C, ...]`."""
        shape = (-1, *(1,) * (inputs.ndim - 2))
        outputs = (inputs - self.mean.view(shape)) * (self.variance + self.eps).rsqrt().view(shape)
        if self.weight is None:
            return outputs
        return outputs * self.weight.view(shape) + self.bias.view(shape)


def network(
    name: str,
    inputs: tuple[int, ...],
    outputs: int,
    freeze: bool = False,
    dropout: float = 0.0,
) -> nn.Module:
    """A fresh network of the factory of this name.

    Args:
        name: `package.module:factory`, imported already.
        inputs: Shape of one input.
        outputs: Number of outputs.
        freeze: Whether only the last layer that has weights stays trainable.
        dropout: The rate of its `nn.Dropout` layers.

    Raises:
        UsageError: If the factory is not imported, or its network cannot be used; one line.
    """
    if name not in imported:
        raise UsageError(
            f"the network '{name}' is not part of this suite: bench.load(run, imports=('{name}',)) runs its "
            "code, if you trust it"
        )
    made = imported[name](inputs, outputs)
    if not isinstance(made, nn.Module):
        raise UsageError(f"--task.network {name}: must return a torch.nn.Module, not {type(made).__name__}")
    found = 0
    for parent, key, child in list(_children(made)):
        if isinstance(child, _BatchNorm):
            if child.running_mean is None:
                raise UsageError(
                    f"--task.network {name}: {key} normalises by the batch and keeps no statistics: a "
                    "prediction would depend on its batch; take another normalisation"
                )
            setattr(parent, key, StoredNorm(child))
        elif isinstance(child, _DropoutNd):
            found += 1
            setattr(parent, key, Dropout(dropout, channels=not isinstance(child, nn.Dropout)))
    if dropout and not found:
        raise UsageError(f"--task.network {name}: this method needs layers of nn.Dropout, and it has none")
    if isinstance(made, _BatchNorm | _DropoutNd):
        raise UsageError(f"--task.network {name}: is a single {type(made).__name__}, and no network")
    _freeze(made, freeze)
    if next(made.parameters(), None) is None:
        raise UsageError(f"--task.network {name}: has no weights to infer")
    return made


def _children(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for parent in module.modules():
        for key, child in parent.named_children():
            yield parent, key, child


def _freeze(made: nn.Module, all_but_last: bool) -> None:
    """Turns weights into buffers: all that need no gradient, and those of all layers but the last."""
    layers = [layer for layer in made.modules() if any(True for _ in layer.parameters(recurse=False))]
    for layer in layers:
        for key, weight in list(layer.named_parameters(recurse=False)):
            if (all_but_last and layer is not layers[-1]) or not weight.requires_grad:
                delattr(layer, key)
                layer.register_buffer(key, weight.detach())


def check(make: Callable[[], nn.Module], name: str, inputs: Tensor, outputs: int) -> list[str]:
    """Calls a fresh network on two inputs; gives sentences on its weights.

    Raises:
        UsageError: If its outputs are not `[2, outputs]`, finite, and the same for an input in any batch.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        made = make()
        found, alone = made(inputs[:2]), made(inputs[:1])
    if not isinstance(found, Tensor) or found.shape != (2, outputs):
        got = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise UsageError(
            f"--task.network {name}: must turn inputs [B, ...] into outputs [B, {outputs}], not {got}"
        )
    if not found.isfinite().all():
        raise UsageError(f"--task.network {name}: gives outputs that are not finite")
    if not torch.allclose(found[:1], alone, rtol=1e-3, atol=1e-4):
        raise UsageError(f"--task.network {name}: gives an input another output in another batch")
    free = sum(weight.numel() for weight in made.parameters())
    norms = [module for module in made.modules() if isinstance(module, StoredNorm)]
    kept = sum(buffer.numel() for buffer in made.buffers() if buffer.is_floating_point())
    frozen = kept - sum(norm.mean.numel() + norm.variance.numel() for norm in norms)
    said = f"network {name}: {free:,} weights in the posterior, {frozen:,} frozen"
    return [said + (f"; BatchNorm layers at their stored statistics: {len(norms)}" if norms else "")]


def source(name: str) -> Path | None:
    """The file of the factory, None if it has none."""
    try:
        return Path(inspect.getfile(imported[name]))
    except (OSError, TypeError, KeyError):
        return None


def is_factory(value: Any) -> bool:
    """Whether an imported thing can be a factory of networks: a function, or a class of modules."""
    return inspect.isfunction(value) or (inspect.isclass(value) and issubclass(value, nn.Module))
