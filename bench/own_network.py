"""A network of the user's own: a plain module from a factory, made fit for a posterior over its weights.

The factory is called with the shape of one input and the number of outputs, and returns any `nn.Module`, with
pretrained weights if it loads some; `opened` keeps the files that it opens. Weights that are frozen, here or
by `requires_grad_(False)` in the factory, become buffers: posterior and prior do not know them. BatchNorm
keeps the statistics that it came with, since a prediction must not depend on the batch. `nn.Dropout` does
nothing but where a method asks for dropout, at the method's rate. `bench.studies.trying` tries a network out
before it is trained.
"""

from __future__ import annotations

import inspect
import itertools
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy

from bench.errors import UsageError
from bench.networks import Dropout
from bench.system import opening
from bench.text import one_line

imported: dict[str, Callable[..., nn.Module]] = {}
"""Factories by the name `package.module:factory`; `bench.runs.registry.import_own` alone fills it."""
opened: dict[str, set[Path]] = {}
"""Files that a factory has opened for reading in this process, by its name; code is not among them."""


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
    with opening.noted(opened.setdefault(name, set())), told(name):
        made = imported[name](inputs, outputs)
    if not isinstance(made, nn.Module):
        raise UsageError(f"--task.network {name}: must return a torch.nn.Module, not {type(made).__name__}")
    if lazy := [path for path, weight in made.named_parameters() if is_lazy(weight)]:
        raise UsageError(
            f"--task.network {name}: {lazy[0]} has no shape until the network is called: give its layer one, "
            "as nn.Linear(inputs, outputs) in place of nn.LazyLinear(outputs)"
        )
    _must_be_plain(made, name)
    instead: dict[nn.Module, nn.Module] = {}  # a layer that is used twice stays one
    found = 0
    for parent in list(made.modules()):
        for key, child in list(parent._modules.items()):
            if isinstance(child, _BatchNorm):
                if child.running_mean is None:
                    raise UsageError(
                        f"--task.network {name}: {key} normalises by the batch and keeps no statistics: a "
                        "prediction would depend on its batch; take another normalisation"
                    )
                setattr(parent, key, instead.setdefault(child, StoredNorm(child)))
            elif isinstance(child, _DropoutNd):
                found += 1
                own = Dropout(dropout, channels=not isinstance(child, nn.Dropout))
                setattr(parent, key, instead.setdefault(child, own))
    if dropout and not found:
        raise UsageError(f"--task.network {name}: this method needs layers of nn.Dropout, and it has none")
    if isinstance(made, _BatchNorm | _DropoutNd):
        raise UsageError(f"--task.network {name}: is a single {type(made).__name__}, and no network")
    _freeze(made, freeze, name)
    _must_not_share(made, name)
    if next(made.parameters(), None) is None:
        raise UsageError(f"--task.network {name}: has no weights to infer")
    return made


@contextmanager
def told(name: str) -> Iterator[None]:
    """Tells an error that the code of a network raises in one line, with the place in the user's file.

    Raises:
        UsageError: In place of any other error.
    """
    try:
        yield
    except UsageError:
        raise
    except Exception as error:  # whatever the user's code raises
        file = source(name)
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(file)]
        where = f" ({file.name}, line {lines[-1]})" if file and lines else ""
        said = one_line(error)[:200]
        raise UsageError(f"--task.network {name}: {type(error).__name__}: {said}{where}") from error


def _must_be_plain(made: nn.Module, name: str) -> None:
    """Refuses weights that the suite does not compute with: not float32, sparse, without memory.

    Raises:
        UsageError: One line that names the first.
    """
    for path, weight in made.named_parameters():
        if not weight.requires_grad:
            continue
        if weight.is_meta:
            raise UsageError(f"--task.network {name}: {path} lies on the device meta and has no numbers")
        if weight.layout is not torch.strided:
            raise UsageError(f"--task.network {name}: {path} is {weight.layout}: make it dense")
        if weight.dtype != torch.float32:
            raise UsageError(
                f"--task.network {name}: {path} is {weight.dtype}, and torch.float32 is computed with: end "
                "the factory with .float()"
            )


def _freeze(made: nn.Module, all_but_last: bool, name: str) -> None:
    """Turns weights into buffers: all that need no gradient, and those of all layers but the last.

    Raises:
        UsageError: If a weight that layers share would be frozen in one of them and inferred in another.
    """
    places: dict[Tensor, list[tuple[str, nn.Module, str]]] = {}  # a weight that layers share has several
    last = ""
    for path, layer in made.named_modules():
        for key, weight in layer.named_parameters(recurse=False):
            places.setdefault(weight, []).append((path, layer, key))
            last = _layer_of(path)
    for weight, where in places.items():
        inside = [joined(path, key) for path, _, key in where if _layer_of(path) == last]
        outside = [joined(path, key) for path, _, key in where if _layer_of(path) != last]
        if all_but_last and weight.requires_grad and inside and outside:
            raise UsageError(
                f"--task.freeze true: in --task.network {name} {outside[0]} and {inside[0]} are one weight, "
                "which cannot be frozen in the one layer and inferred in the last: give each its own"
            )
        if not weight.requires_grad or (all_but_last and not inside):
            frozen = weight.detach()
            for _, layer, key in where:
                delattr(layer, key)
                layer.register_buffer(key, frozen)


def _layer_of(path: str) -> str:
    """Path of the layer to which the parameters of a module belong: of a parametrization what it is of."""
    return path.partition("parametrizations.")[0].rstrip(".")


def joined(path: str, key: str) -> str:
    """Name of a tensor among those of the network."""
    return f"{path}.{key}".removeprefix(".")


def _must_not_share(made: nn.Module, name: str) -> None:
    """Refuses a weight in whose memory something else lies: it would move with every step of training.

    Raises:
        UsageError: One line that names both.
    """
    weights = dict(made.named_parameters())
    others = [(path, t) for path, t in [*made.named_buffers(), *kept_tensors(made)]]
    of_storage: dict[int, list[tuple[int, int, str, bool]]] = {}
    for path, tensor in [*weights.items(), *others]:
        if tensor.layout is torch.strided and tensor.numel() and tensor.device.type != "meta":
            start = tensor.data_ptr()
            last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
            place = start, start + (last + 1) * tensor.element_size(), path, path in weights
            of_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(place)
    for places in of_storage.values():
        for (low, high, one, is_one), (start, end, other, is_other) in itertools.combinations(places, 2):
            if (is_one or is_other) and low < end and start < high:
                raise UsageError(
                    f"--task.network {name}: {one} and {other} lie in the same memory, so that training one "
                    "moves the other: make them one nn.Parameter, or clone"
                )


def kept_tensors(made: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors that are neither parameters nor buffers: attributes of modules, by their names."""
    for path, module in made.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, Tensor):
                yield joined(path, key), value


def source(name: str) -> Path | None:
    """The file of the factory, None if it has none."""
    try:
        return Path(inspect.getfile(imported[name]))
    except (OSError, TypeError, KeyError):
        return None


def is_factory(value: Any) -> bool:
    """Whether an imported thing can be a factory of networks: a function, or a class of modules."""
    return inspect.isfunction(value) or (inspect.isclass(value) and issubclass(value, nn.Module))
