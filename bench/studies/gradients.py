"""What the studies of gradients share: a small convolutional network, and how its gradients scatter.

The gradient is that of the likelihood term in nats per example with respect to the means of one layer, under
one draw of the method's noise. Draws come in pairs (g, g'): |g - g'|^2 / 2 is an unbiased estimate of the
summed variance of all entries, g . g' one of the squared norm of the expected gradient. Pairs are independent
of each other, so that their means have standard errors. The gradient under S samples has 1/S of the variance.

Source: Farquhar 2022, thesis "Understanding Approximation" (docs/sources.md), section 4.4.

Shapes: P pairs of draws, B examples of a batch, D weights of the layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle

import numpy as np
import torch
from torch import Tensor, nn

from bench.contract import Batch, Method
from bench.errors import UsageError
from bench.networks import Dropout, he_initialise

SLOPE = 0.2
"""Of the leaky ReLU (Farquhar 2022, B.3)."""
_LARGE = 16
"""Pixels of a side from which the first convolution has stride 2."""


class MeanAndMax(nn.Module):
    """Mean and maximum of every feature map beside each other: `[B, 2C]` from `[B, C, H, W]`."""

    def forward(self, maps: Tensor) -> Tensor:
        """The pooled maps."""
        return torch.cat([maps.mean((2, 3)), maps.amax((2, 3))], 1)


def convolutional(pixels: int, widths: Sequence[int], outputs: int, dropout: float = 0.0) -> nn.Sequential:
    """A short VGG: 3x3 convolutions, one per width, from grey images `[B, 1, pixels, pixels]`.

    Images of 16 pixels or more enter with stride 2. A max pool halves the maps before the second and the
    third convolution; the last has the third's maps. Mean and maximum of every map lead to a linear layer.
    """
    layers: list[nn.Module] = []
    inputs = 1
    for number, width in enumerate(widths):
        if number in (1, 2):
            layers.append(nn.MaxPool2d(2))
        stride = 2 if number == 0 and pixels >= _LARGE else 1
        layers += [
            nn.Conv2d(inputs, width, 3, stride, padding=1),
            nn.LeakyReLU(SLOPE),
            Dropout(dropout, channels=True),
        ]
        inputs = width
    return he_initialise(nn.Sequential(*layers, MeanAndMax(), nn.Linear(2 * inputs, outputs)), SLOPE)


def last_convolution(network: nn.Module) -> str:
    """Name of the weights of the network's last convolution."""
    return [f"{name}.weight" for name, m in network.named_modules() if isinstance(m, nn.Conv2d)][-1]


@dataclass(frozen=True)
class Scatter:
    """Pairs of gradients with respect to one tensor of D weights.

    Attributes:
        variances: |g - g'|^2 / 2D of each pair `[P]`, (nats per weight unit)^2; the mean is the variance
            averaged over the tensor's entries.
        products: g . g' / D of each pair `[P]`; the mean is the squared expected gradient, averaged alike.
        cosines: Of the angle between g and g', `[P]`, in [-1, 1].
    """

    variances: np.ndarray
    products: np.ndarray
    cosines: np.ndarray


def scatter(
    method: Method, batches: Iterable[Batch], name: str, num_pairs: int, generator: torch.Generator
) -> Scatter:
    """How gradients of a method's likelihood term differ between draws of its noise.

    Args:
        method: Provides `loss_terms`.
        batches: Examples of the draws, taken in turn and again from the start; a single one serves them all.
        name: Of the tensor in the method's network.
        num_pairs: P, at least 1.
        generator: Source of the noise; a pair takes two draws after each other.

    Raises:
        UsageError: If the method does not train this tensor as the mean of its posterior.
    """
    means = method.network.get_parameter(name)
    if not means.requires_grad:
        raise UsageError(
            f"{type(method).__name__} has no single trained mean of {name}, of which gradients could be "
            "compared: take another method, such as mfvi"
        )
    turns = cycle(batches)

    def gradient() -> Tensor:
        with torch.enable_grad():
            nll, _ = method.loss_terms(next(turns), method.draw_noise(1, generator))
            (found,) = torch.autograd.grad(nll, means)
        return found.flatten().double() / method.problem.num_train

    rows = []
    for _ in range(num_pairs):
        one, other = gradient(), gradient()
        product, lengths = torch.dot(one, other), one.norm() * other.norm()
        rows.append([(one - other).square().mean() / 2, product / len(one), product / lengths])
    return Scatter(*np.array([[value.item() for value in row] for row in rows]).T)


def distances(method: Method, name: str, num_draws: int, generator: torch.Generator) -> np.ndarray:
    """How far draws of a tensor lie from its mean, |w - mu|, `[num_draws]`.

    Args:
        method: Provides `weight_samples`; the parameters of its network are the means.
        name: Of the tensor in the method's network.
        num_draws: At least 1.
        generator: Source of the draws.
    """
    mean = method.network.get_parameter(name).detach()
    draws = (method.sample_weights(1, generator)[name][0] for _ in range(num_draws))
    return np.array([(draw - mean).norm().item() for draw in draws])
