"""Tries out a network of the user's own (`bench.own_network`) before anything is trained.

What would otherwise give a wrong number without a word is looked for by what the network does, not by which
modules it is made of: it is called in training and in evaluation mode, with its weights put into their
places and handed over, and as three copies that are made under three seeds and given one state.
"""

from __future__ import annotations

import hashlib
import inspect
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from bench import own_network
from bench.errors import UsageError
from bench.own_network import StoredNorm, joined
from bench.spec import Arrays

_ROWS = 8
"""Inputs, at most, on which a network is tried."""
_SEEDS = (0, 1, 2)
_DRAWS = 16
"""Draws of all weights, from N(0, 1) and from N(0, 30^2), under which outputs are looked at: those that may
have either sign keep one throughout in less than 2^-16 of networks."""
_FEW = 4
"""Tensors that are told by their names: which layer is the last is decided by the order of attributes."""
_MOVED = 0.1
"""How far weights are moved off their start, in units of their root mean square: a factor that starts at 0
would hide what stands behind it."""


def network(
    make: Callable[[], nn.Module], name: str, inputs: Tensor, outputs: int
) -> tuple[Arrays, list[str]]:
    """Tries a fresh network out on inputs `[B, ...]`, B at least 2.

    Args:
        make: Makes the network.
        name: Of the factory, imported already.
        inputs: Examples, of which the first few are used.
        outputs: Number of outputs.

    Returns:
        What decides which network it is, for the digest of the data: the factory's file, the user's modules
        that it uses, the files that it opens, and the weights that are no draws. And sentences on its
        weights.

    Raises:
        UsageError: If its outputs are not `[B, outputs]`, finite, and the same for an input in any batch, in
            both modes and in any copy of one state; if they are probabilities, no gradient reaches a weight,
            or it raises an error; one line.
    """
    with _global_state(), own_network.told(name), torch.no_grad():
        copies = fresh(make)
        inputs = inputs[:_ROWS]
        _is_a_function(copies[0], name, inputs, outputs)
        _is_the_same_in_every_call(copies[0], name, inputs)
        pretrained = _no_draws([made.state_dict() for made in copies])
        _move(copies[0])
        _is_its_state(copies, name, inputs)
        _reads_its_weights(copies[0], name, inputs)
        _gives_no_probabilities(copies[0], name, inputs)
        _lets_gradients_through(copies[0], name, inputs)
        said = [_sentence(copies[0], name), *_bounds(copies[1], name, inputs)]
    return _content(name, pretrained), said


def fresh(make: Callable[[], nn.Module]) -> list[nn.Module]:
    """Fresh networks, each under another seed; all global generators stay as they are."""
    with _global_state():
        return [_made(make, seed) for seed in _SEEDS]


def _sentence(made: nn.Module, name: str) -> str:
    weights = dict(made.named_parameters())
    free = sum(weight.numel() for weight in weights.values())
    norms = [module for module in made.modules() if isinstance(module, StoredNorm)]
    kept = sum(buffer.numel() for buffer in made.buffers() if buffer.is_floating_point())
    frozen = kept - sum(norm.mean.numel() + norm.variance.numel() for norm in norms)
    which = f" ({', '.join(weights)})" if frozen and len(weights) <= _FEW else ""
    said = f"network {name}: {free:,} weights in the posterior{which}, {frozen:,} frozen"
    return said + (f"; BatchNorm layers at their stored statistics: {len(norms)}" if norms else "")


@contextmanager
def _global_state() -> Iterator[None]:
    """Puts the states of all global generators back."""
    own, numpys = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(own)
        np.random.set_state(numpys)


def _made(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    torch.random.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    return make()


def _near(a: Tensor, b: Tensor, share: float = 1e-3) -> bool:
    """Whether outputs agree to this share of the largest."""
    return bool((a - b).abs().max() <= share * b.abs().max() + 1e-6)


# ----------------------------------------------------------------------------------------- as a function


def _is_a_function(made: nn.Module, name: str, inputs: Tensor, outputs: int) -> None:
    before = inputs.clone()
    found = made(inputs[:2])
    if not isinstance(found, Tensor) or found.shape != (2, outputs):
        got = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise UsageError(
            f"--task.network {name}: must turn inputs [B, ...] into outputs [B, {outputs}], not {got}"
        )
    if found.dtype != torch.float32:
        raise UsageError(
            f"--task.network {name}: gives outputs of {found.dtype}, and torch.float32 is computed with: end "
            "with .float(), and leave autocast out"
        )
    if not found.isfinite().all():
        raise UsageError(f"--task.network {name}: gives outputs that are not finite")
    if not torch.equal(before, inputs):
        raise UsageError(
            f"--task.network {name}: changes the inputs that it is given: its first step must copy"
        )


def _is_the_same_in_every_call(made: nn.Module, name: str, inputs: Tensor) -> None:
    """Refuses a network whose outputs depend on the mode, the batch or earlier calls."""
    outputs: dict[bool, Tensor] = {}
    for mode in (True, False):
        before = {path: value.clone() for path, value in made.named_buffers()}
        outputs[mode] = made.train(mode)(inputs)
        for path, value in made.named_buffers():
            if not torch.equal(before[path], value):
                raise UsageError(
                    f"--task.network {name}: changes its buffer {path} when it is called, so that a "
                    "prediction would depend on what was predicted before it: take a layer that keeps none"
                )
    if not _near(made(inputs), outputs[False]):
        raise UsageError(f"--task.network {name}: gives other outputs every time that it is called")
    made.train()
    if _near(outputs[True], outputs[False]):
        if not torch.allclose(made(inputs[:1]), outputs[True][:1], rtol=1e-3, atol=1e-4):
            raise UsageError(f"--task.network {name}: gives an input another output in another batch")
        return
    raise UsageError(
        f"--task.network {name}: {_mode_decides(made, inputs)} gives other outputs in training than in "
        "evaluation: take a layer that does not look at the mode, or set its dropout to 0"
    )


def _mode_decides(made: nn.Module, inputs: Tensor) -> str:
    """Which module it is: the first whose mode alone changes the outputs."""

    def called() -> Tensor:
        torch.random.default_generator.manual_seed(0)
        outputs: Tensor = made(inputs)
        return outputs

    made.eval()
    expected = called()
    for path, module in made.named_modules():
        module.training = True
        if not _near(called(), expected):
            made.train()
            return f"{path or 'its forward'} ({type(module).__name__})"
        module.training = False
    made.train()
    return "it"


def _move(made: nn.Module) -> None:
    """Moves every weight off its start."""
    generator = torch.Generator().manual_seed(0)
    for weight in made.parameters():
        size = weight.square().mean().sqrt()
        noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
        weight.add_(_MOVED * torch.where(size > 0, size, 1.0) * noise)


def _reads_its_weights(made: nn.Module, name: str, inputs: Tensor) -> None:
    """Refuses a network that computes with copies or views of its weights: draws would not reach it."""
    inside = made(inputs)
    weights = {path: weight.clone() for path, weight in made.named_parameters()}
    _move(made)
    if _near(functional_call(made, weights, (inputs,)), inside):
        return
    elsewhere = dict(made.named_parameters())
    for path, weight in weights.items():
        if not _near(functional_call(made, {path: weight}, (inputs,)), _put(made, path, weight, inputs)):
            break
        elsewhere.pop(path)
    raise UsageError(
        f"--task.network {name}: computes with a copy of {path} that draws of the weights do not reach: "
        "read the weight in `forward` itself (torch's recurrent layers keep such copies)"
    )


def _put(made: nn.Module, path: str, value: Tensor, inputs: Tensor) -> Tensor:
    """Outputs with one weight put in its place."""
    weight = made.get_parameter(path)
    before = weight.clone()
    weight.copy_(value)
    outputs: Tensor = made(inputs)
    weight.copy_(before)
    return outputs


def _gives_no_probabilities(made: nn.Module, name: str, inputs: Tensor) -> None:
    """Refuses a network that ends with a softmax, whose outputs would be taken for logits."""
    outputs = torch.cat([made(size * inputs) for size in (1, -10, 100)])
    is_one = torch.allclose(outputs.sum(1), torch.ones(len(outputs)), atol=1e-4)
    if outputs.shape[1] > 1 and is_one and outputs.min() >= 0:
        raise UsageError(
            f"--task.network {name}: gives probabilities (outputs of 0 or more that add up to 1): what is "
            "wanted are logits, so leave its last softmax out"
        )


def _bounds(made: nn.Module, name: str, inputs: Tensor) -> list[str]:
    """A sentence on outputs that no weights bring out of some bounds, if so; the weights are drawn anew."""
    generator, outputs = torch.Generator().manual_seed(0), []
    for size in (1, 30):
        for _ in range(_DRAWS):
            for weight in made.parameters():
                weight.copy_(size * torch.randn(weight.shape, generator=generator))
            outputs.append(made(inputs))
    every = torch.cat(outputs)
    if not every.isfinite().all():
        return []
    wanted = "logits, and numbers, which are standardised, have none: leave its last activation out"
    if 0.999 <= every.abs().max() <= 1:
        low = 0 if every.min() >= 0 else -1
        return [f"warning: outputs of network {name} lie between {low} and 1, whatever its weights; {wanted}"]
    if (every.amin(0) >= 0).any():
        return [f"warning: outputs of network {name} are never below 0, whatever its weights; {wanted}"]
    return []


def _lets_gradients_through(made: nn.Module, name: str, inputs: Tensor) -> None:
    """Refuses a network of which a weight moves the outputs and gets no gradient: it would not be trained."""
    weights = {path: weight.clone().requires_grad_() for path, weight in made.named_parameters()}
    with torch.enable_grad():
        outputs = functional_call(made, weights, (inputs,))
        along = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(1))
        found: tuple[Tensor | None, ...] = (None,) * len(weights)
        if outputs.requires_grad:
            found = torch.autograd.grad(outputs, list(weights.values()), along, allow_unused=True)
    for (path, weight), gradient in zip(weights.items(), found, strict=True):
        if gradient is None or not gradient.any():
            step = 1e-3 * (weight.abs().max() + 1)  # small, so that a unit that is off stays off
            moved = weights | {path: weight + step}
            if not torch.equal(functional_call(made, moved, (inputs,)), outputs):
                raise UsageError(
                    f"--task.network {name}: no gradient reaches {path}, which decides its outputs, so that "
                    "it would not be trained: leave out detach, no_grad and .data, or freeze it by "
                    "requires_grad_(False)"
                )


# -------------------------------------------------------------------------------------------- as a state


def _is_its_state(copies: list[nn.Module], name: str, inputs: Tensor) -> None:
    """Refuses a network that computes with something that its state_dict does not hold."""
    first, *others = copies
    expected = first(inputs)
    for other in others:
        try:
            other.load_state_dict(first.state_dict())
        except RuntimeError:
            raise UsageError(
                f"--task.network {name}: makes a network of other shapes every time: fix what it draws"
            ) from None
        if not _near(other(inputs), expected, 1e-4):
            what = _differing(first, other) or "something that no attribute of a module shows"
            raise UsageError(
                f"--task.network {name}: {what} is drawn anew with every network and is not in its "
                "state_dict, so that bench.load would rebuild another: make it a persistent buffer "
                "(register_buffer)"
            )


def _differing(one: nn.Module, other: nn.Module) -> str | None:
    """The first attribute of a module that differs, of two networks that were called in one state."""
    kept = dict(other.named_modules())
    for path, module in one.named_modules():
        twin = kept.get(path)
        if twin is None:
            return path
        for own, others in ((module._buffers, twin._buffers), (vars(module), vars(twin))):
            for key, value in own.items():
                if key not in _OF_EVERY_MODULE and not _equal(value, others.get(key)):
                    return joined(path, key)
    return None


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def _equal(a: Any, b: Any) -> bool:
    """Whether two attributes hold equal numbers; what holds none is not looked at."""
    if isinstance(a, Tensor | np.ndarray):
        return type(a) is type(b) and a.shape == b.shape and np.array_equal(_array(a), _array(b))
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    return a == b if isinstance(a, int | float | complex | str | np.generic) else True


def _array(value: Tensor | np.ndarray) -> np.ndarray:
    found: np.ndarray = value.detach().numpy() if isinstance(value, Tensor) else value
    return found


# ------------------------------------------------------------------------------------------- as a digest


def _no_draws(states: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Tensors that are the same under every seed, and not one number throughout, as a bias of zeros is."""
    first, *others = states
    return {
        path: value
        for path, value in first.items()
        if isinstance(value, Tensor)
        and value.numel()
        and (value != value.flatten()[0]).any()
        and all(path in state and torch.equal(value, state[path]) for state in others)
    }


def _content(name: str, pretrained: dict[str, Tensor]) -> Arrays:
    """What decides which network a factory makes; of files their content and not their paths."""
    path = own_network.source(name)
    arrays = {"network": np.frombuffer(path.read_bytes() if path else b"", np.uint8)}
    further = {_digest(p) for p in [*own_network.opened[name], *_modules(name)] if p.is_file() and p != path}
    for number, digest in enumerate(sorted(further)):
        arrays[f"network file {number}"] = np.frombuffer(digest, np.uint8)
    if pretrained:
        sha = hashlib.sha256()
        for key, value in pretrained.items():
            sha.update(repr((key, str(value.dtype), tuple(value.shape))).encode())
            sha.update(value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        arrays["network weights"] = np.frombuffer(sha.digest(), np.uint8)
    return arrays


def _digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _modules(name: str) -> list[Path]:
    """Files of the user's own modules that the factory's module names, and those of theirs."""
    found: dict[Path, None] = {}
    waiting = [inspect.getmodule(own_network.imported[name])]
    while waiting:
        module = waiting.pop()
        file = getattr(module, "__file__", None)
        if module is None or file is None or Path(file) in found or not _is_the_users(module.__name__, file):
            continue
        found[Path(file)] = None
        for value in list(vars(module).values()):
            owner = value if isinstance(value, ModuleType) else getattr(value, "__module__", None)
            waiting.append(sys.modules.get(owner) if isinstance(owner, str) else owner)
    return list(found)


def _is_the_users(name: str, file: str) -> bool:
    """Whether a module is of no installed package, not of Python and not of the suite."""
    path = Path(file)
    inside = any(path.is_relative_to(place) for place in (sys.base_prefix, sys.prefix))
    return name.split(".")[0] != "bench" and not inside and "site-packages" not in path.parts
