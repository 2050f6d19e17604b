"""Normalizing flows over all weights: affine coupling layers, and what methods built on them share.

The layers are those of "Variational Inference via Resolution of Singularities" 2022 (docs/sources.md),
section 6 and appendix D: two pairs, the mask of a pair and then its complement, networks for scale and shift
with three hidden layers, of 16 units where nothing else is asked for. The coupling printed there is not
invertible; this one is v = r u + (1 - r) (u exp(s(r u)) + t(r u)).

A method of this kind is a source distribution over `xi` and this flow; see methods/nf_gamma.py.

Shapes: S samples, d weights in all.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench import divergence
from bench.contract import JOINT, Batch, Budget, Method, Noise, Problem, WeightDistribution
from bench.energy import likelihood_term
from bench.errors import UsageError
from bench.priors import joined_normals, normal_tensor
from bench.weights import forward, ravel, unravel

Masks = Literal["halves", "published"]
Start = Literal["identity", "random"]
Schedule = Literal["cosine", "constant"]

NUMBER = r"(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?"
"""A setting in a method's name, as Python reads it."""
Layer = tuple[Tensor, ...]
"""Mask, complement, and of the two networks weights and biases."""

_PAIRS = 2
_PEAK = 2.0
"""Where rates that fall begin, in units of the constant rate that is published."""


class CouplingFlow(nn.Module):
    """Four affine coupling layers over vectors `[S, d]`.

    Masks and initial weights come from torch's global generator.

    Args:
        size: d, at least 1.
        masks: "halves" keeps a random half of the entries in one layer of a pair and the other half in the
            next; "published" keeps what d // 2 draws with replacement leave, about 61%, and then the rest.
        start: "identity" begins as the identity map, "random" with torch's own initial weights everywhere.
        units: Hidden units of a layer of the networks, at least 1.
    """

    masks: Tensor

    def __init__(self, size: int, masks: Masks, start: Start, units: int) -> None:
        super().__init__()
        kept = torch.stack([_mask(size, masks) for _ in range(_PAIRS)])
        self.register_buffer("masks", torch.stack([kept, 1 - kept], 1).flatten(0, 1))  # [4, d]
        # Of every layer the networks for scale and shift, side by side; few tensors make fast steps.
        layers = 2 * _PAIRS
        self.enter = nn.ParameterList(_uniform(2, size, units, fan_in=size) for _ in range(layers))
        self.enter_bias = _uniform(layers, 2, 1, units, fan_in=size)
        self.hidden = _uniform(layers, 2, 2, units, units, fan_in=units)
        self.hidden_bias = _uniform(layers, 2, 2, 1, units, fan_in=units)
        self.leave = nn.ParameterList(_uniform(2, units, size, fan_in=units) for _ in range(layers))
        self.leave_bias = _uniform(layers, 2, 1, size, fan_in=units)
        if start == "identity":
            for parameter in (*self.leave, self.leave_bias):
                nn.init.zeros_(parameter)

    def _layers(self, like: Tensor) -> list[Layer]:
        """What each layer computes with, in the type of `like`."""
        masks = self.masks.to(like)
        # Taken apart at once: one operation each, and one of the backward pass, in place of five.
        parts = (t.to(like).flatten(0, 1).unbind() for t in (self.hidden, self.hidden_bias))
        hidden = (list(zip(p[::2], p[1::2], strict=True)) for p in parts)
        enter = ([w.to(like) for w in self.enter], self.enter_bias.to(like))
        leave = ([w.to(like) for w in self.leave], self.leave_bias.to(like))
        return list(zip(masks, 1 - masks, *enter, *hidden, *leave, strict=True))

    def forward(self, xi: Tensor) -> tuple[Tensor, Tensor]:
        """Weights `[S, d]` of source vectors `[S, d]`, and log|det| of the map's Jacobian there, `[S]`."""
        log_scales = []
        for layer in self._layers(xi):
            log_scale, shift = _scale_and_shift(layer, xi)
            xi = torch.addcmul(shift, xi, log_scale.exp())
            log_scales.append(log_scale)
        return xi, torch.stack(log_scales).sum((0, -1))

    def inverse(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Source vectors `[S, d]` of weights `[S, d]`, and log|det| of the FORWARD map there, `[S]`."""
        log_det = weights.new_zeros(())
        for layer in reversed(self._layers(weights)):
            log_scale, shift = _scale_and_shift(layer, weights)
            weights = (weights - shift) * (-log_scale).exp()
            log_det = log_det + log_scale.sum(-1)
        return weights, log_det


def _scale_and_shift(layer: Layer, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Log scale and shift `[S, d]` of a layer, 0 where its mask keeps; they see kept entries alone."""
    kept, moved, enter, enter_bias, hidden, hidden_bias, leave, leave_bias = layer
    units = torch.baddbmm(enter_bias, (vectors * kept).expand(2, *vectors.shape), enter)
    for weight, bias in zip(hidden, hidden_bias, strict=True):
        units = torch.baddbmm(bias, functional.leaky_relu(units), weight)
    scale, shift = torch.baddbmm(leave_bias, functional.leaky_relu(units), leave).mul(moved).unbind(0)
    return scale.tanh(), shift


def _uniform(*shape: int, fan_in: int) -> nn.Parameter:
    """The initial weights and biases of torch's linear layers."""
    return nn.Parameter(torch.empty(shape).uniform_(-(fan_in**-0.5), fan_in**-0.5))


def _mask(size: int, masks: Masks) -> Tensor:
    """1 where a layer keeps an entry, `[d]`."""
    mask = torch.ones(size)
    zeros = torch.randperm(size)[: size // 2] if masks == "halves" else torch.randint(size, (size // 2,))
    mask[zeros] = 0
    return mask


def _cosine(epoch: int, peak: float, epochs: int) -> float:
    """Factor of a rate: from `peak` to 0."""
    return peak * 0.5 * (1 + math.cos(math.pi * min(epoch / epochs, 1)))


class FlowVI(Method):
    """Variational inference with weights w = g(xi): a source distribution over xi, and a coupling flow g.

    A subclass declares the source: `draw_noise`, `source`, `exact_source` and `source_log_prob`. Its
    settings have `learning_rate`, `schedule`, `train_samples`, `masks`, `start` and `units`.
    """

    provides = frozenset({"weight_samples", "density", "weighted", "loss_terms"})
    stacks = True
    fastest = ("compiled", "stacked")
    LARGEST = 100_000
    """Weights above which a problem is refused: the flow of 16 units has 264 numbers for each."""

    def __init__(self, problem: Problem, settings: Any, start: FlowVI | None = None) -> None:
        super().__init__(problem, settings, start)
        self.network = problem.network().requires_grad_(False)  # gives the architecture alone
        self.size = sum(p.numel() for p in self.network.parameters())
        if self.size > self.LARGEST:
            name = type(self).__module__.rpartition(".")[2]
            parameters = (16 * settings.units + 8) * self.size
            raise UsageError(
                f"the flow of {name} over {self.size:,} weights has {parameters:,} parameters; it takes at "
                f"most {self.LARGEST:,} weights: take a smaller network"
            )
        self.flow = CouplingFlow(self.size, settings.masks, settings.start, settings.units)
        self.epochs = 1

    @classmethod
    def parameters_per_weight(cls, settings: Any) -> None:
        """None: the flow goes by its own layers."""

    # ---- the source, by the subclass

    @abstractmethod
    def source(self, noise: Noise) -> tuple[Tensor, Tensor]:
        """Training draws of xi `[S, d]`, and E log q(xi), a scalar, in nats; with gradients."""

    @abstractmethod
    def exact_source(self, num_samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Exact draws of xi `[S, d]`, and E log q(xi), a scalar, in nats."""

    @abstractmethod
    def source_log_prob(self, xi: Tensor) -> Tensor:
        """Log density of xi `[S, d]`, `[S]`, in nats."""

    def source_parameters(self) -> list[dict[str, Any]]:
        """Groups for the optimiser of what is trained of the source; one that has a rate "lr" keeps it."""
        return []

    # ---- training

    def spends(self, budget: Budget) -> Budget:
        """The budget's epochs, over which the rate falls."""
        self.epochs = budget.epochs
        return super().spends(budget)

    def configure_optimizers(self) -> Any:
        """Adam; with the schedule "cosine" every rate falls to 0, that of the flow from twice its own."""
        flow = {"params": [*self.flow.parameters(), *self.likelihood.parameters()]}
        groups = [flow, *self.source_parameters()]
        peaks = [1.0 if "lr" in group else _PEAK for group in groups]
        optimizer = torch.optim.Adam(groups, lr=self.settings.learning_rate, fused=True)
        if self.settings.schedule == "constant":
            return optimizer
        rates: list[Callable[[int], float]] = [partial(_cosine, peak=p, epochs=self.epochs) for p in peaks]
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, rates)}

    def make_prior(self, parameters: Mapping[str, Tensor]) -> WeightDistribution:
        """The task's prior; independent normals as one vector."""
        prior = super().make_prior(parameters)
        normals = joined_normals(prior)
        return prior if normals is None else {JOINT: normal_tensor(*normals)}

    def loss_terms(self, batch: Batch, noise: Noise) -> tuple[Tensor, Tensor]:
        """Expected negative log likelihood, and E log q(xi) - E log|det g'| - E log prior, in nats."""
        xi, negative_entropy = self.source(noise)
        vectors, log_det = self.flow(xi)
        weights, prior = self._as_weights(vectors), self.prior
        outputs = forward(self.network, weights, batch.inputs)
        nll = likelihood_term(self.likelihood, outputs, batch, self.problem.num_train)
        joint = prior.get(JOINT)
        log_prior = divergence.log_prob(prior, weights) if joint is None else joint.log_prob(vectors)
        return nll, negative_entropy - (log_det + log_prior).mean()

    # ---- the posterior

    def _as_weights(self, vectors: Tensor) -> dict[str, Tensor]:
        return unravel(vectors, dict(self.network.named_parameters()))

    def sample_weights(self, num_samples: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Exact draws, stacked `[S, *shape]`."""
        with torch.no_grad():
            return self._as_weights(self.flow(self.exact_source(num_samples, generator)[0])[0])

    def log_prob(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Log density of stacked weights, `[S]`, in nats; -inf outside the support."""
        xi, log_det = self.flow.inverse(ravel(weights).double())
        return self.source_log_prob(xi) - log_det

    def sample_and_log_prob(
        self, num_samples: int, generator: torch.Generator
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Draws, with E log q(xi) - log|det g'| in place of their log densities."""
        with torch.no_grad():
            xi, negative_entropy = self.exact_source(num_samples, generator)
            vectors, log_det = self.flow(xi)
            return self._as_weights(vectors), negative_entropy.double() - log_det.double()
