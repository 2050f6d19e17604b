"""Weight space: a posterior is a distribution over a plain network's dictionary of parameters.

S draws of the weights are one dictionary of stacked tensors `[S, *shape]`, and `forward` runs the network
under each of them. How S is walked is private to this file and chosen by measurement, on processors and on
accelerators (decisions/speed.md):

    stacked   one batched matrix product per layer; networks that are plain stacks of linear layers, no hooks
    grouped   one convolution per layer, in S groups; plain stacks with convolutions, where it is asked for
    loop      one sample after another through `torch.func.functional_call`, images in channels-last order;
              plain stacks without gradients layer by layer, since none has to keep what the next writes over
    vmap      `torch.func.vmap`; training steps of plain stacks with convolutions on an accelerator

All walks see the same weights and give the same outputs and gradients.

Shapes: S samples, B examples, d weights in all.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor, is_functorch_wrapped_tensor
from torch.func import functional_call, vmap
from torch.nn import functional
from torch.nn.modules import module as every

Walk = Literal["stacked", "grouped", "loop", "vmap"]
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
_PER_MAP = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d)
_LARGEST_STACK, _LARGEST_STACK_ELSEWHERE = 1_000_000, 100_000_000
"""Floats of the largest activation above which samples go one at a time: on a processor that is faster then,
and elsewhere all at once would take too much memory."""
_FEW_UNITS = 5
"""Units of a layer up to which a sum is compiled to faster code than a matrix product."""
_LARGE_TENSOR = 10_000
"""Weights of a tensor from which the gradient of its draws is accumulated sample by sample."""
_CPU_BLOCK, _BLOCK = 250, 4_000
"""Inputs predicted at once, on a CPU and elsewhere."""
_STACK_BLOCK = 1_000
"""The same of a stack of linear layers on a CPU, whose weights are read again for every block."""
_CHUNK = 2_000_000
"""Weights drawn at once in prediction; bounds memory, and the draws do not depend on the inputs."""


# ----------------------------------------------------------------------------------------- flat vectors


def ravel(weights: Weights) -> Tensor:
    """Stacked weights `[S, *shape]` as vectors `[S, d]`, in the dictionary's order."""
    return torch.cat([w.reshape(len(w), -1) for w in weights.values()], 1)


def join(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors `[*shape]` as one vector `[d]`: a view where `lay_together` has laid them so, else a copy."""
    if _end_to_end(tensors):
        return tensors[0].as_strided((sum(t.numel() for t in tensors),), (1,))
    return torch.cat([t.reshape(-1) for t in tensors])


@torch.no_grad()
def give(vector: Tensor, tensors: Sequence[Tensor]) -> None:
    """Writes a vector `[d]` to the tensors that it is of; nothing is to do where `join` gave a view."""
    if vector.data_ptr() == tensors[0].data_ptr():
        return
    for t, part in zip(tensors, vector.split([t.numel() for t in tensors]), strict=True):
        t.copy_(part.view_as(t))


def lay_together(parameters: Iterable[Tensor]) -> None:
    """Puts parameters end to end into one vector, of which they then are views; no value changes.

    Those that share memory, lie apart in type or device, or lie so already stay as they are.
    """
    parameters = list(parameters)
    tensors = [p.detach() for p in parameters]
    kinds = {(t.dtype, t.device) for t in tensors}
    places = {t.untyped_storage().data_ptr() for t in tensors}
    if len(kinds) != 1 or len(places) < len(tensors):
        return
    vector = torch.cat([t.reshape(-1) for t in tensors])
    for p, t, part in zip(parameters, tensors, vector.split([t.numel() for t in tensors]), strict=True):
        p.data = part.view(t.shape)


def _end_to_end(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors lie one after another in one memory."""
    if are_transformed(tensors):
        return False
    first, storage = tensors[0], tensors[0].untyped_storage()
    *starts, end = itertools.accumulate((t.nbytes for t in tensors), initial=first.data_ptr())
    return (
        starts == [t.data_ptr() for t in tensors]
        and end <= storage.data_ptr() + storage.nbytes()
        and all(t.is_contiguous() and t.dtype == first.dtype for t in tensors)
    )


def are_transformed(tensors: Iterable[Tensor]) -> bool:
    """Whether tensors stand for others: compiled, or under `torch.func`, as of fits side by side."""
    return torch.compiler.is_compiling() or any(map(is_functorch_wrapped_tensor, tensors))


def unravel(vectors: Tensor, like: Weights) -> dict[str, Tensor]:
    """Vectors `[S, d]` as stacked weights `[S, *shape]`; `like` has tensors `[*shape]` in the same order."""
    sizes = [w.numel() for w in like.values()]
    if vectors.shape[-1] != sum(sizes):
        raise ValueError(f"vectors have {vectors.shape[-1]} entries, the weights {sum(sizes)}")
    parts = vectors.split(sizes, -1)
    return {name: part.reshape(-1, *w.shape) for part, (name, w) in zip(parts, like.items(), strict=True)}


def normal_noise(num_samples: int, like: Weights, generator: torch.Generator | None) -> dict[str, Tensor]:
    """Standard normal noise `[S, *shape]` for tensors `[*shape]`: one draw, laid out tensor after tensor."""
    first, sizes = next(iter(like.values())), [num_samples * w.numel() for w in like.values()]
    noise = torch.randn(sum(sizes), generator=generator, device=first.device, dtype=first.dtype)
    parts = noise.split(sizes)
    return {n: part.view(num_samples, *w.shape) for part, (n, w) in zip(parts, like.items(), strict=True)}


# ------------------------------------------------------------------------------------- reparametrisation


def reparametrise(mean: Tensor, scale: Tensor, noise: Tensor) -> Tensor:
    """Draws mean + scale * noise, `[S, *shape]`, of a tensor with mean and scale `[*shape]`.

    The noise `[S, *shape]` gets no gradient.
    """
    if len(noise) > 1 and mean.numel() >= _LARGE_TENSOR:
        return _Reparametrise.apply(mean, scale, noise)
    return torch.addcmul(mean[None], scale[None], noise.detach())


class _Reparametrise(torch.autograd.Function):
    """The gradient written out: autograd's own allocates one more tensor of the size of the noise."""

    generate_vmap_rule = True

    @staticmethod
    def forward(mean: Tensor, scale: Tensor, noise: Tensor) -> Tensor:
        return torch.addcmul(mean, scale, noise)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        (noise,) = ctx.saved_tensors
        to_scale = gradient[0] * noise[0]
        for g, e in zip(gradient[1:], noise[1:], strict=True):
            to_scale = torch.addcmul(to_scale, g, e)
        return gradient.sum(0), to_scale, None


# ---------------------------------------------------------------------------------------------- forward


def forward(network: nn.Module, weights: Weights, inputs: Tensor, walk: Walk | None = None) -> Tensor:
    """Outputs `[S, B, ...]` of the network for inputs `[B, ...]` under each of S stacked weights.

    Args:
        network: Gives the architecture; its own parameters are not used. One that has a faster way of its own
            defines `forward_samples(weights, inputs)`, which returns the same.
        weights: A tensor `[S, *shape]` for every parameter of the network.
        inputs: Examples `[B, ...]`, shared by all samples.
        walk: How to go over the samples; None takes the fastest.
    """
    own_way: Any = getattr(network, "forward_samples", None)
    if walk is None and own_way is not None and not _does_more(*network.modules()):
        return own_way(weights, inputs)
    layers = linear_stack(network, inputs)
    if walk is None:
        walk = _fastest(network, layers, weights, inputs, inputs.device.type)
    if walk == "stacked":
        if layers is None:
            raise ValueError("the stacked walk needs a plain stack of linear layers; take the loop")
        return _stacked(layers, weights, inputs)
    if inputs.ndim == 4:
        inputs = channels_last(inputs)
    if walk == "grouped":
        layers = conv_stack(network, inputs)
        if layers is None:
            raise ValueError("the grouped walk needs a plain stack of convolutions; take the loop")
        return _grouped(layers, weights, inputs)
    if walk == "loop" and not torch.is_grad_enabled() and not are_transformed([inputs, *weights.values()]):
        layers = layers or conv_stack(network, inputs)
        if layers is not None:
            return torch.stack([_in_place(layers, w, inputs) for w in _unstack(weights)])
    kept = _buffers_of_type(network, weights)
    if walk == "vmap":
        return vmap(lambda w: functional_call(network, {**kept, **w}, (inputs,)))(dict(weights))
    return torch.stack([functional_call(network, {**kept, **w}, (inputs,)) for w in _unstack(weights)])


def _buffers_of_type(network: nn.Module, weights: Weights) -> dict[str, Tensor]:
    """Frozen weights in the type of the others, where that is not the network's: energies are in float64."""
    own, given = next(network.parameters()).dtype, next(iter(weights.values())).dtype
    if own == given:
        return {}
    return {name: b.to(given) for name, b in network.named_buffers() if b.dtype == own}


def linearised(network: nn.Module, weights: Weights, inputs: Tensor) -> Tensor:
    """Outputs `[S, B, ...]` of the network's first-order expansion at its own parameters: f + J (w - w*).

    Args:
        network: Its parameters are w*.
        weights: A tensor `[S, *shape]` for every parameter of the network.
        inputs: Examples `[B, ...]`, shared by all samples.
    """
    mode = {name: p.detach() for name, p in network.named_parameters()}
    # Weights that all draws leave where they are need no derivative: of a last layer, those of all others.
    moved = [name for name, w in mode.items() if (weights[name] != w).any()] or list(mode)
    with torch.enable_grad():
        centre = {name: mode[name].requires_grad_() for name in moved}
        value = functional_call(network, mode, (inputs,))
        # J^T u is linear in u, so that its derivative along v is J v: one graph serves all samples.
        along = torch.zeros_like(value, requires_grad=True)
        kind = {"allow_unused": True, "materialize_grads": True}
        slopes = torch.autograd.grad(value, list(centre.values()), along, create_graph=True, **kind)
    parts: list[Tensor] = []
    for w in _unstack(weights):
        steps = [w[name] - c.detach() for name, c in centre.items()]
        parts += torch.autograd.grad(slopes, along, steps, retain_graph=True)
    return value.detach() + torch.stack(parts)


def linearises(network: nn.Module, inputs: Tensor) -> bool:
    """Whether `linearised` is right at inputs `[B, ...]`: it differentiates twice, and some operations once.

    Such an operation may leave its part out without an error. Compared is a step along all weights with the
    gradient of a random sum of the outputs.

    Raises:
        RuntimeError: If an operation says that it has no derivative.
    """
    weights = {name: p.detach() for name, p in network.named_parameters()}
    moved = linearised(network, {name: w[None] + 1 for name, w in weights.items()}, inputs)[0]
    with torch.enable_grad():
        value = functional_call(network, {n: w.requires_grad_() for n, w in weights.items()}, (inputs,))
    along = torch.randn(value.shape, generator=torch.Generator().manual_seed(0)).to(value)
    slopes = torch.autograd.grad(value, [*weights.values()], along, allow_unused=True, materialize_grads=True)
    step = ((moved - value.detach()) * along).sum() - sum(slope.sum() for slope in slopes)
    return bool(step.abs() <= 1e-3 * sum(slope.abs().sum() for slope in slopes))


def sampled_outputs(
    network: nn.Module,
    draw: Callable[[int, torch.Generator], Weights],
    inputs: Tensor,
    num_samples: int,
    generator: torch.Generator,
    run: Callable[[Weights, Tensor], Tensor] | None = None,
) -> Tensor:
    """Outputs `[S, B, ...]` without gradients: weights drawn a few samples at a time, inputs in blocks.

    Args:
        network: Gives the architecture.
        draw: `draw(n, generator)` gives n stacked weights.
        inputs: Examples `[B, ...]`.
        num_samples: S.
        generator: Drives the draws; how they are split depends on the network alone, never on the inputs.
        run: `run(weights, inputs)` gives the outputs under stacked weights; None is `forward`.
    """
    run = run or partial(forward, network)
    is_stack = inputs.device.type == "cpu" and linear_stack(network, inputs) is not None
    parts = inputs.split(_STACK_BLOCK) if is_stack else blocks(inputs)
    outputs = []
    with torch.no_grad():
        for weights in draws(network, draw, num_samples, generator):
            outputs.append(torch.cat([run(weights, part) for part in parts], 1))
    return torch.cat(outputs)


def draws(
    network: nn.Module,
    draw: Callable[[int, torch.Generator], Weights],
    num_samples: int,
    generator: torch.Generator,
) -> Iterator[Weights]:
    """The stacked weights of `sampled_outputs`, a few draws at a time; its arguments."""
    chunk = max(1, _CHUNK // sum(p.numel() for p in network.parameters()))
    for done in range(0, num_samples, chunk):
        yield draw(min(chunk, num_samples - done), generator)


def blocks(inputs: Tensor) -> tuple[Tensor, ...]:
    """Inputs `[B, ...]` in pieces whose activations stay in the cache of a CPU, and bounded elsewhere."""
    return inputs.split(_CPU_BLOCK if inputs.device.type == "cpu" else _BLOCK)


def _unstack(weights: Weights) -> Iterator[dict[str, Tensor]]:
    if len(next(iter(weights.values()))) == 1:  # the gradient of a squeeze is a view, that of unbind a copy
        yield {name: w.squeeze(0) for name, w in weights.items()}
        return
    parts = {name: w.unbind(0) for name, w in weights.items()}
    for s in range(len(next(iter(parts.values())))):
        yield {name: part[s] for name, part in parts.items()}


def channels_last(images: Tensor) -> Tensor:
    """Images `[B, C, H, W]` in channels-last order, in which convolutions on a CPU are fastest.

    Images stay as they are inside vmap, which does not support that order.
    """
    if is_batchedtensor(images):
        return images
    images = images.contiguous(memory_format=torch.channels_last)
    if images.shape[1] > 1:
        return images
    # With one channel both orders are the same memory; convolutions take the strides' word for which it is.
    _, _, height, width = images.shape
    return images.as_strided(images.shape, (height * width, 1, width, 1))


def linear_stack(network: nn.Module, inputs: Tensor) -> list[tuple[str, nn.Module]] | None:
    """The layers of a plain stack by name, or None if the network or its inputs are anything else."""
    layers = _plain_layers(network, (nn.Linear,), ())
    return layers if layers and (inputs.ndim == 2 or _is_flatten(layers[0][1])) else None


def conv_stack(network: nn.Module, inputs: Tensor) -> list[tuple[str, nn.Module]] | None:
    """The layers of a plain stack that begins with convolutions, ends with linear layers; None of others."""
    layers = _plain_layers(network, (nn.Linear, nn.Conv2d), _PER_MAP)
    if layers is None or inputs.ndim != 4:
        return None
    kinds = [type(layer) for _, layer in layers]
    if kinds.count(nn.Flatten) != 1 or not {nn.Linear, nn.Conv2d} <= set(kinds):
        return None
    where = kinds.index(nn.Flatten)
    apart = nn.Linear not in kinds[:where] and not {nn.Conv2d, *_PER_MAP} & set(kinds[where:])
    whole = all(
        layer.groups == 1 and layer.padding_mode == "zeros" for _, layer in layers if type(layer) is nn.Conv2d
    )
    return layers if apart and whole else None


def _plain_layers(
    network: nn.Module, with_weights: tuple[type[nn.Module], ...], others: tuple[type[nn.Module], ...]
) -> list[tuple[str, nn.Module]] | None:
    """Layers by name of a network that calls them in turn, of these kinds or elementwise; else None."""
    if type(network) is not nn.Sequential:
        return None
    # Not named_children(), which leaves out an activation used twice.
    layers = list(network._modules.items())
    linear = [layer for _, layer in layers if type(layer) in with_weights]
    plain = all(
        type(layer) in (*with_weights, *others, *_ELEMENTWISE)
        or _is_flatten(layer)
        or getattr(layer, "is_identity", False)
        for _, layer in layers
    )
    own = [weight for layer in linear for weight in layer._parameters.values() if weight is not None]
    if not plain or not linear or len(own) > len(set(own)):  # a weight that two layers share has one name
        return None
    if any(layer._buffers or layer._parameters.get("weight") is None for layer in linear):
        return None  # a frozen weight is a buffer
    if _does_more(network, *network):
        return None
    return layers


def _does_more(*modules: nn.Module) -> bool:
    """Whether a call of one does more than its class's `forward`, which the stacked walk stands for.

    That is under hooks, its own or those of all modules, and where its call or its forward is another.
    """
    for_all = (
        every._global_forward_hooks,
        every._global_forward_pre_hooks,
        every._global_backward_hooks,
        every._global_backward_pre_hooks,
    )
    return any(for_all) or any(
        own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
        or "forward" in own
        or "_call_impl" in own
        or cls.__call__ is not nn.Module.__call__
        or cls._call_impl is not nn.Module._call_impl
        for own, cls in ((vars(module), type(module)) for module in modules)
    )


def _is_flatten(layer: nn.Module) -> bool:
    return type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1)


def _fastest(
    network: nn.Module, layers: list[Any] | None, weights: Weights, inputs: Tensor, device: str
) -> Walk:
    """The walk to take on a device of this type; `layers` are those of a linear stack."""
    samples = len(next(iter(weights.values())))
    if layers is not None:
        widest = max(w.shape[1] for w in weights.values())
        most = _LARGEST_STACK if device == "cpu" else _LARGEST_STACK_ELSEWHERE
        return "stacked" if samples * len(inputs) * widest <= most else "loop"
    # An accelerator is idle between calls, so that one call for all samples is faster. Without gradients a
    # loop keeps the activations of one sample alone.
    in_one = device == "cuda" and samples > 1 and torch.is_grad_enabled()
    if in_one and not are_transformed([inputs, *weights.values()]) and conv_stack(network, inputs):
        return "vmap"
    return "loop"


def _in_place(layers: list[tuple[str, nn.Module]], weights: Weights, inputs: Tensor) -> Tensor:
    """Outputs `[B, ...]` of a plain stack under one sample `[*shape]`, bit by bit those of its layers."""
    hidden, own = inputs, False  # whether the inputs are behind
    for name, layer in layers:
        if type(layer) in (nn.Linear, nn.Conv2d):
            weight, bias, own = weights[f"{name}.weight"], weights.get(f"{name}.bias"), True
            if type(layer) is nn.Linear:
                hidden = functional.linear(hidden, weight, bias)
            else:
                how: tuple[Any, ...] = (layer.stride, layer.padding, layer.dilation)
                hidden = functional.conv2d(hidden, weight, bias, *how)
        elif own and type(layer) is nn.ReLU:
            hidden = hidden.relu_()
        elif type(layer) is nn.MaxPool2d and hidden.device.type == "cpu" and _halves(layer):
            # torch's own also finds where the maxima lie, and takes longer than a convolution of few maps.
            rows, columns = (size // 2 * 2 for size in hidden.shape[2:])
            hidden = torch.maximum(hidden[:, :, 0:rows:2], hidden[:, :, 1:rows:2])
            hidden = torch.maximum(hidden[..., 0:columns:2], hidden[..., 1:columns:2])
        else:
            hidden = layer(hidden)
    return hidden


def _halves(layer: nn.MaxPool2d) -> bool:
    sizes = [layer.kernel_size, layer.stride, layer.padding, layer.dilation]
    pairs = [size if isinstance(size, tuple) else (size, size) for size in sizes]
    return pairs == [(2, 2), (2, 2), (0, 0), (1, 1)] and not layer.ceil_mode and not layer.return_indices


def _grouped(layers: list[tuple[str, nn.Module]], weights: Weights, images: Tensor) -> Tensor:
    samples, hidden, groups = len(next(iter(weights.values()))), images, 1  # then [B, S * C, H, W]
    for place, (name, layer) in enumerate(layers):
        if type(layer) is nn.Flatten:
            rows = hidden.unflatten(1, (groups, -1)).flatten(2)  # [B, S, units]
            return _stacked(layers[place + 1 :], weights, rows.permute(1, 2, 0), shared=False)
        if type(layer) is nn.Conv2d:
            weight, bias = weights[f"{name}.weight"].flatten(0, 1), weights.get(f"{name}.bias")
            how: tuple[Any, ...] = (layer.stride, layer.padding, layer.dilation, groups)
            hidden = functional.conv2d(hidden, weight, None if bias is None else bias.flatten(), *how)
            groups = samples
        else:
            hidden = layer(hidden)
    raise AssertionError("no linear layers")


def _stacked(
    layers: list[tuple[str, nn.Module]], weights: Weights, inputs: Tensor, shared: bool = True
) -> Tensor:
    hidden = inputs  # [B, ...] while all samples share it
    # Afterwards [S, units, B]: with the examples last, layers of few units have long rows
    for name, layer in layers:
        if type(layer) is nn.Flatten:
            hidden = hidden.flatten(1) if shared else hidden
        elif type(layer) is nn.Linear:
            weight, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")  # [S, out, in], [S, out]
            if shared:  # the samples' units one below the other: one matrix product
                units, inward = weight.flatten(0, 1), hidden.mT
                units = units @ inward if bias is None else torch.addmm(bias.reshape(-1, 1), units, inward)
                hidden = units.unflatten(0, weight.shape[:2])
            elif bias is None:
                hidden = weight @ hidden
            elif torch.compiler.is_compiling() and max(weight.shape[1:]) <= _FEW_UNITS:
                hidden = (weight[..., None] * hidden[:, None]).sum(2) + bias[..., None]  # fused with the rest
            else:
                hidden = torch.baddbmm(bias[..., None], weight, hidden)
            shared = False
        else:
            hidden = layer(hidden)
    return hidden.mT  # [S, B, out]
