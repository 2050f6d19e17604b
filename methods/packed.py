"""Packed-Ensembles: M networks, each alpha / M times as wide as the task's, in one fit.

Approximates the posterior by the equal mixture of M point masses, networks of their own: every layer has
alpha times the task's units, in M groups that do not meet. All see the same inputs, each has all outputs.

Source: Laurent, Lafage, Tartaglione, Daniel, Martinez, Bursuc and Franchi 2023, "Packed-Ensembles for
Efficient Uncertainty Estimation", ICLR, section 3.
Target: the smallest mean over the members of the negative log joint, with the task's prior on each member's
weights. Every member sees the whole batch: members differ by their start.
Deviations: a group is one matrix (gamma = 1). Weights start as those of a member's share of the task's own
fresh network, times the root of the inputs lost, which keeps the variance of sums. Linear layers are batched
products, and networks other than plain stacks are walked member by member, in place of grouped convolutions:
the same products.
Cost: about alpha^2 / M forward and backward passes of the task's network a step, and as many numbers per
weight.
Valid for: networks that end in a linear layer, in which units meet in linear and ungrouped `Conv2d` layers
alone, and other layers have at most a vector of a number per unit; those that do not run with fewer units are
refused. Capabilities over weights are missing, since these are not the posed network's
(`bench.contract.OF_WEIGHTS`).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from bench import optimizers, randomness
from bench.contract import Batch, Method, Noise, Prediction, Problem
from bench.divergence import with_log_prob
from bench.energy import likelihood_term
from bench.errors import UsageError
from bench.families import last_layer
from bench.families.shared_weights import is_matrix
from bench.settings import Count, Positive, settings
from bench.weights import Walk, blocks, conv_stack, forward

NAMES: dict[str, dict[str, object]] = {"packed": {}}
SEARCH = {"learning_rate": (1e-4, 1e-1, "log"), "alpha": (1.0, 4.0, "linear")}


@settings
class Settings:
    """Settings of Packed-Ensembles."""

    ensemble_size: Count = 4
    """M, at least 1."""
    alpha: Positive = 2.0
    """Units of all members together, in multiples of the task's, above 0."""
    learning_rate: Positive = 1e-3
    """Step size of the optimiser, above 0."""
    optimizer: optimizers.Name = "adam"
    """adam, amsgrad, or sgd with Nesterov momentum 0.9."""


class Packed(Method):
    """Members of one narrow network, whose own parameters are unused."""

    settings_class = Settings
    approximates = "the posterior by narrower networks that are fitted side by side"
    declares = "none"
    provides = frozenset({"weighted", "loss_terms"})
    settings: Settings
    stacks = True

    def __init__(self, problem: Problem, settings: Settings, start: Packed | None = None) -> None:
        super().__init__(problem, settings, start)
        self.num_draws = size = settings.ensemble_size
        example = problem.train[0][0][None]
        networks = [narrowed(problem.network(), settings.alpha / size, example) for _ in range(size)]
        self.network = networks[0]
        self.stacked = nn.ParameterList()
        for parameters in zip(*(network.parameters() for network in networks), strict=True):
            self.stacked.append(nn.Parameter(torch.stack([p.detach() for p in parameters])))
            parameters[0].requires_grad_(False)
        if start is not None:
            self.load_state_dict(start.state_dict())

    @classmethod
    def parameters_per_weight(cls, settings: Settings) -> None:
        """No fixed multiple: about alpha^2 / M, but for the first layer, the last, and whole units."""

    def _weights(self) -> dict[str, Tensor]:
        """Weights of all members, `[M, *shape]`."""
        return {name: w for (name, _), w in zip(self.network.named_parameters(), self.stacked, strict=True)}

    def loss_terms(self, batch: Batch, noise: Noise) -> tuple[Tensor, Tensor]:
        """Negative log likelihood and negative log prior, each the mean over the members, in nats."""
        weights, log_prior = with_log_prob(self.prior, {}, self._weights())
        # The published way, which was faster for images in a measurement (docs/decisions/speed.md).
        walk: Walk | None = "grouped" if conv_stack(self.network, batch.inputs) else None
        outputs = forward(self.network, weights, batch.inputs, walk)
        return likelihood_term(self.likelihood, outputs, batch, self.problem.num_train), -log_prior

    def predict(self, inputs: Tensor, num_samples: int, generator: torch.Generator) -> Prediction:
        """Predictions of members in random order, each once before any is taken again."""
        chosen = randomness.subset(self.settings.ensemble_size, num_samples, generator)
        with torch.no_grad():
            outputs = [forward(self.network, self._weights(), block)[chosen] for block in blocks(inputs)]
            return self.likelihood.predict(torch.cat(outputs, 1))


def narrowed(network: nn.Module, width: float, inputs: Tensor) -> nn.Module:
    """The network with `width` times the units in every layer but the last: the first of them, at least one.

    Args:
        network: Fresh; it is changed.
        width: Above 0; above 1 there is nothing to take units from.
        inputs: Examples `[B, ...]`.

    Raises:
        UsageError: If there is no last linear layer, or the network does not run with fewer units.
    """
    path = last_layer.last_linear(network)
    if width > 1:
        raise UsageError("packed: members would be wider than the network; lower --method.alpha")
    if path is None or not last_layer.is_final(network, path, inputs):
        raise UsageError("packed needs a network whose outputs are those of a linear layer at its end")
    names = list(network.named_parameters(remove_duplicate=False))
    if len(names) > len(list(network.parameters())):
        raise UsageError("packed needs a network in which no two layers share a weight")
    last, taken = network.get_submodule(path), set[nn.Module]()

    def narrow(module: nn.Module, given: tuple[Any, ...]) -> None:
        if is_matrix(module) and isinstance(module.weight, nn.Parameter):
            if module not in taken:
                _take(module, given[0], width if module is not last else 1.0)
                taken.add(module)
        elif given and isinstance(given[0], Tensor) and given[0].ndim > 1:
            for name, p in module.named_parameters(recurse=False):
                if p.ndim == 1 and len(p) > given[0].shape[1]:
                    setattr(module, name, nn.Parameter(p.detach()[: given[0].shape[1]].clone()))

    with torch.no_grad():
        shape = network(inputs).shape
        handles = [m.register_forward_pre_hook(narrow) for m in network.modules()]
        try:
            fits = network(inputs).shape == shape
        except (RuntimeError, ValueError, IndexError):  # layers that have their number of units elsewhere too
            fits = False
        for handle in handles:
            handle.remove()
    if not fits:
        raise UsageError("packed needs layers that also run with fewer units; this network's do not")
    return network


def _take(layer: nn.Linear | nn.Conv2d, inputs: Tensor, width: float) -> None:
    """Gives a layer the first of its units, for inputs that have lost units already."""
    kept = inputs.shape[-1 if isinstance(layer, nn.Linear) else 1]
    before, units = layer.weight.shape[1], max(1, round(width * layer.weight.shape[0]))
    weight = layer.weight.detach()[:units, :kept] * math.sqrt(before / kept)
    layer.weight = nn.Parameter(weight.clone())
    if layer.bias is not None:
        layer.bias = nn.Parameter(layer.bias.detach()[:units].clone())
    for name, number in zip(("in", "out"), (kept, units), strict=True):
        setattr(layer, f"{name}_{'features' if isinstance(layer, nn.Linear) else 'channels'}", number)
