"""Second derivatives of a likelihood: roots of its Hessian at the outputs, gradients layer by layer.

The generalised Gauss-Newton matrix of the negative log likelihood is J^T H J, with J the Jacobian of the
outputs and H the likelihood's Hessian in the outputs; R R^T = H gives it as a sum of outer products of the
rows of R^T J.

Shapes: B examples, C outputs, T positions at which a layer uses its weights (1 for linear layers on vectors).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.nn import functional

from bench.contract import Batch, Likelihood
from bench.errors import UsageError
from bench.text import one_line
from bench.weights import linearises

_ROWS = 250
"""Examples whose curvature is computed at once."""
LARGEST = 20_000_000
"""Floats of the largest stack of per-example gradients."""


def pieces(batch: Batch) -> Iterator[Batch]:
    """The batch in pieces of bounded size."""
    parts = [batch.inputs.split(_ROWS), batch.targets.split(_ROWS)]
    if batch.weights is not None:
        parts.append(batch.weights.split(_ROWS))
    return (Batch(*tensors) for tensors in zip(*parts, strict=True))


def must_linearise(method: str, network: nn.Module, inputs: Tensor) -> None:
    """Refuses a network that cannot be linearised at inputs `[B, ...]`.

    Raises:
        UsageError: In the name of the method, with what torch says.
    """
    reason = ""
    try:
        if not linearises(network, inputs):
            reason = "an operation has no second one"
    except (RuntimeError, NotImplementedError) as error:
        reason = one_line(error, 100)
    if reason:
        raise UsageError(f"{method}: the network lacks a derivative that is needed ({reason})")


def output_roots(likelihood: Likelihood, outputs: Tensor, piece: Batch) -> Tensor:
    """R `[B, C, C]`: R R^T is the Hessian of an example's weighted NLL in its outputs `[B, C]`.

    Or its expectation, the Fisher information, where the Hessian depends on the target and may be negative
    (`Likelihood.fisher`; Martens 2020, "New Insights and Perspectives on the Natural Gradient Method").
    """
    outputs = outputs.detach().requires_grad_()
    expected = likelihood.fisher(outputs.detach())
    if expected is None:
        nll = -likelihood.log_prob(outputs[None], piece.targets).sum()
        (slope,) = torch.autograd.grad(nll, outputs, create_graph=True)
        columns = [torch.autograd.grad(c.sum(), outputs, retain_graph=True)[0] for c in slope.unbind(1)]
        expected = torch.stack(columns, 2)
    hessian = expected.double()
    if piece.weights is not None:
        hessian = hessian * piece.weights[:, None, None]
    values, vectors = torch.linalg.eigh(hessian)
    return (vectors * values.clamp(min=0).sqrt()[:, None]).to(outputs.dtype)


def plain_layers(network: nn.Module, names: list[str], inputs: Tensor) -> list[nn.Linear | nn.Conv2d] | None:
    """The linear and convolutional layers in whose own calls alone these weights act, or None.

    Args:
        network: What the layers are of.
        names: Of the weights, in the order of the network.
        inputs: A few examples `[B, ...]` on which that is tried.
    """
    return None if odd_weight(network, names, inputs) is not None else owners(network, names)


def odd_weight(network: nn.Module, names: list[str], inputs: Tensor) -> str | None:
    """The first of these weights that does not act in a plain layer's own calls alone; None if all do.

    Such are weights of other layers, those of which a layer's other part is frozen, and those that the
    network also, or only, uses in another way: shared, transposed, pruned, normalised, by a function. They
    are found by what they do: the gradients of single examples from the calls of the layers are compared
    with autograd's, at weights off their start.
    """
    layers = owners(network, names)
    owned = {id(weight) for layer in layers for weight in layer.parameters(recurse=False)}
    for name in names:
        if id(network.get_parameter(name)) not in owned:
            return name
    if not names:
        return None
    generator = torch.Generator().manual_seed(0)
    moved = {}
    for name, weight in network.named_parameters():
        noise = torch.randn(weight.shape, generator=generator).to(weight)
        size = weight.detach().square().mean().sqrt()
        moved[name] = weight.detach() + 0.1 * torch.where(size > 0, size, 1.0) * noise
    chosen = [moved[name].requires_grad_() for name in names]
    with torch.enable_grad(), _calls(layers) as calls:
        outputs = functional_call(network, moved, (inputs,))
    kept = [output for layer in layers for _, output in calls[layer]]
    for row in range(len(inputs)):
        along = torch.zeros_like(outputs)
        along[row] = torch.randn(outputs[row].shape, generator=generator).to(outputs)
        found = torch.autograd.grad(
            outputs, [*chosen, *kept], along, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        from_calls = iter(found[len(chosen) :])
        expected = dict(zip(names, found, strict=False))
        for layer in layers:
            total: Tensor | float = 0.0
            for given, _ in calls[layer]:
                a, g = _positions(layer, given, next(from_calls)[None])
                if len(a) != len(inputs):  # positions among the examples: squares of sums are none of these
                    return _name(network, layer.weight)
                total = total + g[0, row].T @ a[row]
            whole = [expected[_name(network, layer.weight)].flatten(1)]
            if layer.bias is not None:
                whole.append(expected[_name(network, layer.bias)][:, None])
            truth = torch.cat(whole, 1)
            if not (truth - total).norm() <= _TOLERANCE * truth.norm():
                return _name(network, layer.weight)
    return None


_TOLERANCE = 1e-2
"""Share of a gradient by which rounding may move it."""


def owners(network: nn.Module, names: list[str]) -> list[nn.Linear | nn.Conv2d]:
    """The plain layers all of whose weights are among these, in the order of the network."""
    found = []
    for prefix, m in network.named_modules():
        is_plain_convolution = (
            type(m) is nn.Conv2d
            and m.groups == 1
            and m.padding_mode == "zeros"
            and not isinstance(m.padding, str)
        )
        own = {".".join(filter(None, (prefix, name))) for name, _ in m.named_parameters(recurse=False)}
        if (type(m) is nn.Linear or is_plain_convolution) and own and own <= set(names):
            whole = {key for key in ("weight", "bias") if getattr(m, key) is not None}
            if whole == {key for key, _ in m.named_parameters(recurse=False)}:
                found.append(m)
    return found


def _name(network: nn.Module, weight: Tensor) -> str:
    return next(name for name, other in network.named_parameters() if other is weight)


Calls = dict[nn.Module, list[tuple[Tensor, Tensor]]]


@contextmanager
def _calls(layers: list[nn.Linear | nn.Conv2d]) -> Iterator[Calls]:
    """What each layer gets and gives, call by call, inside the block."""
    calls: Calls = {layer: [] for layer in layers}

    def keep(
        layer: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Tensor], output: Tensor
    ) -> Tensor:
        given = next(iter((*inputs, *named.values())))
        calls[layer].append((given.detach(), output))
        return output.clone()  # what an activation in place overwrites

    handles = [layer.register_forward_hook(keep, with_kwargs=True) for layer in layers]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def layer_gradients(
    network: nn.Module, layers: list[nn.Linear | nn.Conv2d], likelihood: Likelihood, piece: Batch
) -> Iterator[tuple[Tensor, Tensor]]:
    """Per layer its inputs `[B, T, in + 1]` and the gradients at its outputs `[C, B, T, out]`, T positions.

    The sum over T of their outer products is the gradient of the weights: a row of R^T J. A layer that is not
    called has no positions.
    """
    with _calls(layers) as calls:
        outputs = network(piece.inputs)
    roots = output_roots(likelihood, outputs, piece)
    kept = [output for layer in layers for _, output in calls[layer]]
    how: Any = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    per_root = [torch.autograd.grad(outputs, kept, root, **how) for root in roots.unbind(2)] if kept else []
    gradients = iter([torch.stack(parts) for parts in zip(*per_root, strict=True)])  # each [C, B, ...]
    for layer in layers:
        pairs = [_positions(layer, inputs, next(gradients)) for inputs, _ in calls[layer]]
        if pairs:
            yield torch.cat([a for a, _ in pairs], 1), torch.cat([g for _, g in pairs], 2)
        else:
            size, columns = len(layer.weight), layer.weight[0].numel() + (layer.bias is not None)
            rows, classes = roots.shape[:2]
            yield outputs.new_zeros(rows, 0, columns), outputs.new_zeros(classes, rows, 0, size)


def jacobians(network: nn.Module, names: list[str], inputs: Tensor, roots: Tensor) -> Tensor:
    """R^T J `[B, C, k]` of inputs `[B, ...]` and roots R `[B, C, C]`, J that of the outputs in these weights.

    All examples at once, or, where an operation cannot be batched so, one after another.
    """
    fixed = {name: p.detach() for name, p in network.named_parameters()}
    chosen = {name: fixed.pop(name) for name in names}

    def outputs(chosen: dict[str, Tensor], example: Tensor, root: Tensor) -> Tensor:
        return root.T @ functional_call(network, {**fixed, **chosen}, (example[None],))[0]

    try:
        with warnings.catch_warnings():  # of operations that are batched in a loop
            warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
            parts = vmap(jacrev(outputs), (None, 0, 0))(chosen, inputs, roots)
        return torch.cat([parts[name].reshape(*roots.shape[:2], -1) for name in names], 2)
    except (RuntimeError, NotImplementedError):
        leaves = {name: weight.requires_grad_() for name, weight in chosen.items()}
    how: Any = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    rows = []
    for example, root in zip(inputs, roots, strict=True):
        with torch.enable_grad():
            found = outputs(leaves, example, root)
        gradients = (torch.autograd.grad(one, [*leaves.values()], **how) for one in found)
        rows.append(torch.stack([torch.cat([g.flatten() for g in some]) for some in gradients]))
    return torch.stack(rows)


def _positions(layer: nn.Linear | nn.Conv2d, inputs: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    if isinstance(layer, nn.Conv2d):
        how: Any = (layer.kernel_size, layer.dilation, layer.padding, layer.stride)
        a, g = functional.unfold(inputs, *how).mT, gradients.flatten(3).mT
    else:
        a = inputs.reshape(len(inputs), -1, inputs.shape[-1])
        g = gradients.reshape(*gradients.shape[:2], -1, gradients.shape[-1])
    return (a if layer.bias is None else functional.pad(a, (0, 1), value=1.0)), g


def squares(a: Tensor, g: Tensor) -> Tensor:
    """Squared gradients of the weights, summed over examples and outputs, `[out, in + 1]`."""
    if a.shape[1] == 1:
        return g[:, :, 0].square().sum(0).T @ a[:, 0].square()
    chunk = max(1, LARGEST // (len(g) * g.shape[-1] * a.shape[-1]))
    parts = zip(a.split(chunk), g.split(chunk, 1), strict=True)
    return reduce(torch.add, (torch.einsum("bti,cbto->cboi", a, g).square().sum((0, 1)) for a, g in parts))
