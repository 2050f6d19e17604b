"""What second derivatives of a likelihood are made of: roots at the outputs, gradients layer by layer.

The generalised Gauss-Newton matrix of the negative log likelihood is J^T H J, with J the Jacobian of the
outputs and H the likelihood's Hessian in the outputs; R R^T = H gives it as a sum of outer products of the
rows of R^T J.

Shapes: B examples, C outputs, T positions at which a layer uses its weights (1 for linear layers on vectors).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.contract import Batch, Likelihood

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


def output_roots(likelihood: Likelihood, outputs: Tensor, piece: Batch) -> Tensor:
    """R `[B, C, C]`: R R^T is the Hessian of an example's weighted NLL in its outputs `[B, C]`."""
    outputs = outputs.detach().requires_grad_()
    nll = -likelihood.log_prob(outputs[None], piece.targets).sum()
    (slope,) = torch.autograd.grad(nll, outputs, create_graph=True)
    columns = [torch.autograd.grad(c.sum(), outputs, retain_graph=True)[0] for c in slope.unbind(1)]
    hessian = torch.stack(columns, 2).double()
    if piece.weights is not None:
        hessian = hessian * piece.weights[:, None, None]
    values, vectors = torch.linalg.eigh(hessian)
    return (vectors * values.clamp(min=0).sqrt()[:, None]).to(outputs.dtype)


def plain_layers(network: nn.Module, names: list[str]) -> list[nn.Linear | nn.Conv2d] | None:
    """The linear and convolutional layers that own exactly these weights, or None if others own some."""
    layers, owned = [], []
    for prefix, m in network.named_modules():
        is_plain_convolution = (
            type(m) is nn.Conv2d
            and m.groups == 1
            and m.padding_mode == "zeros"
            and not isinstance(m.padding, str)
        )
        own = [".".join(filter(None, (prefix, name))) for name, _ in m.named_parameters(recurse=False)]
        if own and set(own) <= set(names) and (type(m) is nn.Linear or is_plain_convolution):
            layers.append(m)
            owned += own
    return layers if owned == names else None  # type: ignore[return-value]


def layer_gradients(
    network: nn.Module, layers: list[nn.Linear | nn.Conv2d], likelihood: Likelihood, piece: Batch
) -> Iterator[tuple[Tensor, Tensor]]:
    """Per layer its inputs `[B, T, in + 1]` and the gradients at its outputs `[C, B, T, out]`, T positions.

    The sum over T of their outer products is the gradient of the weights: a row of R^T J.
    """
    calls: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {layer: [] for layer in layers}

    def keep(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        calls[layer].append((inputs[0].detach(), output))
        return output.clone()  # what an activation in place overwrites

    handles = [layer.register_forward_hook(keep) for layer in layers]
    try:
        outputs = network(piece.inputs)
    finally:
        for handle in handles:
            handle.remove()
    roots = output_roots(likelihood, outputs, piece)
    kept = [output for layer in layers for _, output in calls[layer]]
    per_root = [torch.autograd.grad(outputs, kept, root, retain_graph=True) for root in roots.unbind(2)]
    gradients = iter([torch.stack(parts) for parts in zip(*per_root, strict=True)])  # each [C, B, ...]
    for layer in layers:
        pairs = [_positions(layer, inputs, next(gradients)) for inputs, _ in calls[layer]]
        yield torch.cat([a for a, _ in pairs], 1), torch.cat([g for _, g in pairs], 2)


def _positions(layer: nn.Linear | nn.Conv2d, inputs: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    if isinstance(layer, nn.Conv2d):
        how = (layer.kernel_size, layer.dilation, layer.padding, layer.stride)
        a, g = functional.unfold(inputs, *how).mT, gradients.flatten(3).mT  # type: ignore[arg-type]
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
    return sum(torch.einsum("bti,cbto->cboi", a, g).square().sum((0, 1)) for a, g in parts)  # type: ignore[return-value]
