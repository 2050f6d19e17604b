"""Estimators of expectations over independent normal weights whose noise is drawn per example.

Under weights of mean m and standard deviation s every example can have a draw of its own, although no weight
is drawn per example:

    local     the outputs of a linear layer come from their own normal, N(x m, x^2 s^2)
              (Kingma, Salimans and Welling 2015, section 2.2)
    flipout   one draw s * e of the weights' deviations, its rows and columns times signs of each example
              (Wen et al. 2018, equation 4); linear layers and convolutions

The outputs of each single example are distributed as under drawn weights (pathwise: one draw for the whole
batch). Those of different examples are independent (local) or uncorrelated (flipout) given what enters the
layer, which takes their covariance out of the variance of the batch's mean.

`truncated` is the noise of Farquhar 2022 (docs/sources.md), section 4.4: standard normal, given that no entry
exceeds a bound.

Shapes: S samples, B examples of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.weights import channels_last

Name = Literal["pathwise", "local", "flipout"]
Hook = Callable[[nn.Module, tuple[Tensor, ...], Tensor], Any]

_LAYERS: dict[str, tuple[type[nn.Module], ...]] = {
    "local": (nn.Linear,),
    "flipout": (nn.Linear, nn.Conv2d),
}
_LEAST_VARIANCE = 1e-30
"""Keeps the slope of a standard deviation finite where all inputs of a unit without bias are 0."""


def truncated(noise: Tensor, bound: float) -> Tensor:
    """Maps standard normal noise to draws of a standard normal e given |e| <= bound.

    The map is monotone and goes entry by entry; no draw is rejected.
    """
    share = math.erf(bound / math.sqrt(2))  # P(|e| <= bound)
    return (math.sqrt(2) * torch.erfinv(share * torch.erf(noise / math.sqrt(2)))).clamp(-bound, bound)


def outputs(
    network: nn.Module, scales: Mapping[str, Tensor], inputs: Tensor, seeds: Tensor, estimator: Name
) -> Tensor:
    """Outputs `[S, B, ...]` with a draw of every example's own, for inputs `[B, ...]`.

    Args:
        network: Its parameters are the means; see `unsuited` for what it may hold.
        scales: Standard deviations `[*shape]` by name of parameter.
        inputs: Examples, shared by all samples.
        seeds: One per sample, `[S]`, integers; the noise of a sample follows from its seed and B.
        estimator: local or flipout.
    """
    sources = [torch.Generator(inputs.device).manual_seed(seed) for seed in seeds.tolist()]
    perturb = {"local": _local, "flipout": _flipout}[estimator]
    names = {module: name for name, module in network.named_modules()}

    def hook(layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        prefix = f"{names[layer]}." if names[layer] else ""
        return perturb(
            layer, scales[f"{prefix}weight"], scales.get(f"{prefix}bias"), args[0], output, sources
        )

    rows = (
        inputs if len(sources) == 1 else inputs.repeat(len(sources), *[1] * (inputs.ndim - 1))
    )  # [S * B, ...]
    if rows.ndim == 4:
        rows = channels_last(rows)
    with _hooked(network, hook):
        return network(rows).unflatten(0, (len(sources), -1))


def unsuited(network: nn.Module, inputs: Tensor, estimator: Name) -> str | None:
    """Why the estimator does not apply to a network, or None if it does.

    Args:
        network: The network.
        inputs: An example or more, `[B, ...]`, to see how layers are used.
        estimator: Its name.
    """
    kinds, layers = _LAYERS[estimator], _layers(network)
    if any(type(layer) not in kinds for layer in layers):
        names = " or ".join(kind.__name__ for kind in kinds)
        return f"needs a network whose parameters all belong to {names} layers"
    if any(layer._buffers for layer in layers):
        return "needs layers that are trained or frozen as a whole"
    used: list[nn.Module] = []
    ranks: list[int] = []

    def look(layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        used.append(layer)
        ranks.append(args[0].ndim)

    with torch.no_grad(), _hooked(network, look):
        network(inputs)
    owned = [p for layer in layers for p in layer.parameters(recurse=False)]
    if len(set(used)) < len(used) or len(set(owned)) < len(owned):
        return "needs a network that uses each of its weights once"
    if estimator == "local" and any(rank > 2 for rank in ranks):
        return "needs linear layers on vectors, not on positions that share their weights"
    return None


def _layers(network: nn.Module) -> list[nn.Module]:
    """Modules with parameters of their own."""
    return [m for m in network.modules() if next(m.parameters(recurse=False), None) is not None]


@contextmanager
def _hooked(network: nn.Module, hook: Hook) -> Iterator[None]:
    """Inside the block the hook sees, and may replace, the output of every layer with parameters."""
    handles = [layer.register_forward_hook(hook) for layer in _layers(network)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _local(
    layer: nn.Module,
    scale: Tensor,
    bias_scale: Tensor | None,
    inputs: Tensor,
    output: Tensor,
    sources: list[torch.Generator],
) -> Tensor:
    """Output `[S * B, out]` at the means plus noise of the variance that the weights give each unit."""
    bias_variance = None if bias_scale is None else bias_scale.square()
    variance = functional.linear(inputs.square(), scale.square(), bias_variance)
    noise = torch.empty_like(output)
    for part, source in zip(noise.chunk(len(sources)), sources, strict=True):
        part.normal_(generator=source)
    return torch.addcmul(output, variance.clamp(min=_LEAST_VARIANCE).sqrt(), noise)


def _flipout(
    layer: nn.Module,
    scale: Tensor,
    bias_scale: Tensor | None,
    inputs: Tensor,
    output: Tensor,
    sources: list[torch.Generator],
) -> Tensor:
    """Output at the means plus ((x * a) W + b) * c, with W, b one draw per sample and signs a, c per example.

    The signs of an example multiply deviations that are symmetric and independent, so that given its signs
    they are distributed as without: also that of the bias, which has the sign of its unit.
    """
    parts = []
    for rows, source in zip(inputs.chunk(len(sources)), sources, strict=True):
        weight = scale * torch.empty_like(scale).normal_(generator=source)
        bias = bias_scale
        if bias is not None:
            bias = bias * torch.empty_like(bias).normal_(generator=source)
        if isinstance(layer, nn.Conv2d):
            deviation = layer._conv_forward(rows * _signs(rows, 1, source), weight, bias)
            parts.append(deviation * _signs(deviation, 1, source))
        else:
            deviation = functional.linear(rows * _signs(rows, -1, source), weight, bias)
            parts.append(deviation * _signs(deviation, -1, source))
    return output + torch.cat(parts)


def _signs(like: Tensor, axis: int, source: torch.Generator) -> Tensor:
    """Random signs per example and entry of `axis`, the same at all positions."""
    shape = [1] * like.ndim
    shape[0], shape[axis] = like.shape[0], like.shape[axis]
    coins = torch.empty(shape, dtype=like.dtype, device=like.device).bernoulli_(generator=source)
    return 2 * coins - 1
