"""Masksembles: one network under a few fixed masks on its units, each a member of an ensemble.

Approximates the posterior by the equal mixture of N point masses: the weights of one network, in which member
n leaves out the units that mask n is 0 for. A layer's mask is on its inputs, so that its weights are W o
m_n^T. Masked is every linear and convolutional layer but those that see the data themselves; of a convolution
whole maps are.

Source: Durasov, Bagautdinov, Baque and Fua 2021, "Masksembles for Uncertainty Estimation", CVPR, section 3,
and the authors' public code.
Target: the smallest mean over the members of the negative log joint. Every example of a batch goes to one
member drawn at random, in shares that are as equal as can be: over the draws the loss is that of all members
on all examples.
Masks: N sets of K of a layer's c units, drawn until they differ and together have every unit. K = c / (S (1 -
(1 - 1/S)^N)), rounded down: the scale S sets how much of a mask another one shares, about 1/S. As in the
public code sets are of P > c positions, of which those in no set are dropped, and are drawn until c are left;
that leaves all such masks equally likely, whatever P.
Deviations: P is the least number at which about c are left in the mean, there S is changed until that is so.
Masks may be equal only where there are fewer than N, and layers may be narrower than ten units. The public
code splits a batch by position, which of a full batch would be the same examples always.
Cost: as maximum a posteriori, and a product with each masked layer's inputs; N numbers of one bit per unit.
Valid for: networks with a linear or ungrouped `Conv2d` layer above the first, whose every such layer gets one
row per example; others are refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from bench import optimizers, randomness
from bench.contract import Batch, Method, Noise, Problem
from bench.divergence import with_log_prob
from bench.energy import likelihood_term
from bench.errors import UsageError
from bench.families.shared_weights import is_matrix
from bench.settings import Count, Positive, settings
from bench.weights import channels_last, forward, linear_stack

NAMES: dict[str, dict[str, object]] = {"masksembles": {}}
SEARCH = {"learning_rate": (1e-4, 1e-2, "log"), "scale": (1.2, 4.0, "linear")}

Layers = Sequence[tuple[str, nn.Module]] | None
"""Of a plain stack of linear layers; None of other networks."""
Scale = Annotated[float, Field(ge=1, le=6)]


@settings
class Settings:
    """Settings of Masksembles."""

    masks: Count = 4
    """N, at least 1."""
    scale: Scale = 2.0
    """S, from 1, where every mask has all units, to 6: the larger, the less two masks share."""
    learning_rate: Positive = 1e-3
    """Step size of the optimiser, above 0."""
    optimizer: optimizers.Name = "adam"
    """adam, amsgrad, or sgd with Nesterov momentum 0.9."""


class Masksembles(Method):
    """One network, and for every masked weight the masks `[N, inputs]` on its columns."""

    settings_class = Settings
    approximates = "the posterior by one network under a few fixed masks on its units"
    declares = "none"
    provides = frozenset({"weight_samples", "moments", "weighted", "loss_terms"})
    settings: Settings

    def __init__(self, problem: Problem, settings: Settings, start: Masksembles | None = None) -> None:
        super().__init__(problem, settings, start)
        self.network = problem.network()
        self.num_draws = settings.masks
        example = problem.train[0][0]
        self.masked = _hidden_weights(self.network, example)
        if not self.masked:
            raise UsageError("masksembles needs a linear or convolutional layer above the first one")
        for number, name in enumerate(self.masked):
            width = self.network.get_parameter(name).shape[1]
            masks = draw_masks(width, settings.masks, settings.scale, self.generator)
            self.register_buffer(f"masks_{number}", masks)
        if start is not None:
            self.load_state_dict(start.state_dict())
        if not self._passes_are_the_members(example):
            raise UsageError(
                "masksembles needs layers that get one row per example, each weight in its place"
            )

    # ---- the members

    @property
    def masks(self) -> dict[str, Tensor]:
        """Name of a masked weight -> masks on its inputs, `[N, inputs]`, of zeros and ones."""
        return {name: self.get_buffer(f"masks_{number}") for number, name in enumerate(self.masked)}

    def _members(self) -> dict[str, Tensor]:
        """Weights of all members, `[N, *shape]`."""
        masks, count = self.masks, self.settings.masks
        return {
            name: p * _beside(masks[name][:, None], p.ndim + 1)
            if name in masks
            else p.expand(count, *p.shape)
            for name, p in self.network.named_parameters()
        }

    def sample_weights(self, num_samples: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Weights of a random subset of the members, `[S, *shape]`: each once before any is taken again."""
        chosen = randomness.subset(self.settings.masks, num_samples, generator)
        with torch.no_grad():
            return {name: w[chosen] for name, w in self._members().items()}

    def moments(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Mean and variance of every weight over the members."""
        with torch.no_grad():
            members = self._members()
            means = {name: w.mean(0) for name, w in members.items()}
            return means, {name: w.var(0, correction=0) for name, w in members.items()}

    # ---- training

    def draw_noise(self, num_samples: int, generator: torch.Generator) -> Noise:
        """One seed per sample, `[S]`, from which a batch is split among the members."""
        seeds = torch.randint(2**62, (num_samples,), generator=generator, device=generator.device)
        return {"seeds": seeds}

    def loss_terms(self, batch: Batch, noise: Noise) -> tuple[Tensor, Tensor]:
        """Negative log likelihood, each example under its member, and negative log prior, in nats."""
        rows = len(batch.inputs)
        splits = [self._split(rows, seed, batch.inputs.device) for seed in noise["seeds"].tolist()]
        layers = linear_stack(self.network, batch.inputs)
        weights, log_prior = with_log_prob(self.prior, self._weights(), {}, layers is not None)
        passes = [self._pass(layers, weights, batch.inputs, split)[None] for split in splits]
        outputs = torch.cat(passes) if len(passes) > 1 else passes[0]
        return likelihood_term(self.likelihood, outputs, batch, self.problem.num_train), -log_prior

    def _split(self, rows: int, seed: int, device: torch.device) -> Tensor:
        """The member that every example of a batch goes to, `[rows]`."""
        generator = torch.Generator(device).manual_seed(seed)
        order = torch.randperm(rows, generator=generator, device=device)
        # The largest share of an uneven split is any member's: each example is everyone's alike.
        first = torch.randint(self.settings.masks, (), generator=generator, device=device)
        return (order + first) % self.settings.masks

    def _weights(self) -> dict[str, Tensor]:
        """The network's weights, `[*shape]`."""
        return dict(self.network.named_parameters())

    def _pass(self, layers: Layers, weights: Mapping[str, Tensor], inputs: Tensor, members: Tensor) -> Tensor:
        """Outputs `[B, ...]` of every input under a member of its own: one pass for all.

        `layers` is what `linear_stack` says of the network.
        """
        factors = {name: masks.index_select(0, members) for name, masks in self.masks.items()}
        if layers is None:
            with _multiplied(self.network, self.masked, factors):
                images = channels_last(inputs) if inputs.ndim == 4 else inputs
                return functional_call(self.network, dict(weights), (images,))
        return _masked_stack(layers, weights, factors, inputs)

    def _passes_are_the_members(self, example: Tensor) -> bool:
        """Whether one pass over several members gives what each member's weights give."""
        count = min(self.settings.masks, 3)
        inputs = torch.stack([example, example.roll(1), example.flip(0)])[:count]
        rows = torch.arange(count)
        members = {name: w[:count] for name, w in self._members().items()}
        with torch.no_grad():
            try:
                layers = linear_stack(self.network, inputs)
                found = self._pass(layers, self._weights(), inputs, rows)
            except RuntimeError:  # no row per example: masks and inputs are of other shapes
                return False
            return torch.allclose(found, forward(self.network, members, inputs)[rows, rows], 1e-3, 1e-5)


# ------------------------------------------------------------------------------------------------- masks


def draw_masks(width: int, count: int, scale: float, generator: torch.Generator) -> Tensor:
    """Masks `[count, width]` of zeros and ones: each has equally many ones, and every unit is in one.

    Args:
        width: c, units of the layer, at least 1.
        count: N, at least 1.
        scale: S, at least 1.
        generator: Draws them.
    """
    ones, positions = sizes(width, count, scale)
    distinct = count if math.comb(width, ones) >= count else 1
    while True:
        chosen = torch.stack([torch.randperm(positions, generator=generator)[:ones] for _ in range(count)])
        masks = torch.zeros(count, positions).scatter_(1, chosen, 1.0)
        masks = masks[:, masks.any(0)]
        if masks.shape[1] == width and len(masks.unique(dim=0)) >= distinct:
            return masks


def sizes(width: int, count: int, scale: float) -> tuple[int, int]:
    """K ones of a mask, and P positions that they are drawn from."""
    share = scale * (1 - (1 - 1 / scale) ** count)
    ones = max(1, int(width / share), math.ceil(width / count))
    positions = width
    while positions * (1 - (1 - ones / positions) ** count) < width - 0.5:
        positions += 1
    return ones, positions


# ------------------------------------------------------------------------------------------------ layers


def _hidden_weights(network: nn.Module, example: Tensor) -> dict[str, list[nn.Module]]:
    """Names of the weights that see other weights' outputs alone, each with the layers that have it."""
    names = {id(p): name for name, p in network.named_parameters()}
    layers: dict[str, list[nn.Module]] = {}
    for module in network.modules():
        if is_matrix(module) and id(module.weight) in names:
            layers.setdefault(names[id(module.weight)], []).append(module)
    sees_weights: dict[nn.Module, bool] = {}

    def look(module: nn.Module, given: tuple[Any, ...]) -> None:
        sees_weights[module] = sees_weights.get(module, True) and bool(given) and given[0].requires_grad

    handles = [m.register_forward_pre_hook(look) for of_weight in layers.values() for m in of_weight]
    with torch.enable_grad():
        network(example[None])
    for handle in handles:
        handle.remove()
    return {name: found for name, found in layers.items() if all(sees_weights.get(m, False) for m in found)}


@contextmanager
def _multiplied(
    network: nn.Module, layers: Mapping[str, list[nn.Module]], factors: Mapping[str, Tensor]
) -> Iterator[None]:
    """Inside the block inputs `[B, ..., c]` of linear layers, or `[B, c, H, W]`, are times `[B, c]`."""

    def hook(factor: Tensor) -> Any:
        def times(module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
            inputs, *others = given
            ones = [1] * (inputs.ndim - 2)
            last = isinstance(module, nn.Linear)
            shape = [len(factor), *ones, factor.shape[1]] if last else [*factor.shape, *ones]
            return inputs * factor.view(shape), *others

        return times

    handles = [m.register_forward_pre_hook(hook(f)) for name, f in factors.items() for m in layers[name]]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _masked_stack(
    layers: Sequence[tuple[str, nn.Module]],
    weights: Mapping[str, Tensor],
    factors: Mapping[str, Tensor],
    inputs: Tensor,
) -> Tensor:
    """Outputs `[B, ...]` of a plain stack of linear layers, whose inputs are times factors `[B, units]`."""
    hidden = inputs
    for name, layer in layers:
        if type(layer) is nn.Flatten:
            hidden = hidden.flatten(1)
        elif type(layer) is nn.Linear:
            weight, factor = weights[f"{name}.weight"], factors.get(f"{name}.weight")
            given = hidden if factor is None else hidden * factor
            hidden = functional.linear(given, weight, weights.get(f"{name}.bias"))
        elif not getattr(layer, "is_identity", False):
            hidden = layer(hidden)
    return hidden


def _beside(tensor: Tensor, ndim: int) -> Tensor:
    """The tensor with axes of length 1 at its end, up to so many."""
    return tensor.view(*tensor.shape, *[1] * (ndim - tensor.ndim))
