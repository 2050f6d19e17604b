"""Plain networks of the papers (docs/sources.md): no Bayesian layers, no running statistics.

Every function here has the keyword `dropout` of `bench.contract.NetworkFactory`, those for photographs the
keyword `width` too; a task binds the rest with `functools.partial`. Weights start at He's normal
initialisation, biases at zero. `bench.resnet` has the network with residual blocks.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn


class Dropout(nn.Module):
    """Identity, until `dropout_masks` makes it multiply by a random mask divided by 1 - p.

    Unlike `torch.nn.Dropout` it does not look at train or eval mode and takes its masks from an explicit
    generator. `channels` drops whole feature maps of images `[B, C, H, W]`.
    """

    def __init__(self, p: float, channels: bool = False) -> None:
        super().__init__()
        self.p, self.channels = p, channels
        self.source: tuple[torch.Generator, bool] | None = None

    @property
    def is_identity(self) -> bool:
        """Whether inputs pass unchanged at present."""
        return self.p == 0 or self.source is None

    def forward(self, inputs: Tensor) -> Tensor:
        """Inputs `[B, ...]` times a mask of their own shape, or of one example's shape if shared."""
        if self.source is None or self.p == 0:
            return inputs
        generator, shared = self.source
        shape = list(inputs.shape)
        if shared:
            shape[0] = 1
        if self.channels:
            shape[2:] = [1] * (len(shape) - 2)
        uniform = torch.rand(shape, generator=generator, device=inputs.device)
        return inputs * ((uniform >= self.p).to(inputs.dtype) / (1 - self.p))


@contextmanager
def dropout_masks(network: nn.Module, generator: torch.Generator, shared: bool) -> Iterator[None]:
    """Inside the block every `Dropout` of the network draws masks from the generator.

    Args:
        network: The network.
        generator: Source of the masks.
        shared: One mask for all examples of a call (consistent dropout) instead of one per example.
    """
    layers = [m for m in network.modules() if isinstance(m, Dropout)]
    for layer in layers:
        layer.source = (generator, shared)
    try:
        yield
    finally:
        for layer in layers:
            layer.source = None


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "leaky_relu_0.5": partial(nn.LeakyReLU, 0.5),
    "leaky_relu_0.95": partial(nn.LeakyReLU, 0.95),
    "tanh": nn.Tanh,
    "linear": nn.Identity,
}
_SLOPES = {"leaky_relu": 0.01, "leaky_relu_0.5": 0.5, "leaky_relu_0.95": 0.95, "linear": 1.0}
"""Below 0, of activations that have one."""


def he_initialise(network: nn.Sequential, negative_slope: float = 0.0) -> nn.Sequential:
    """Weights from He's normal initialisation (fan in), biases zero; returns the network."""
    for layer in network.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, a=negative_slope)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return network


def mlp(
    inputs: int,
    outputs: int,
    hidden: Sequence[int],
    activation: str = "relu",
    dropout: float = 0.0,
) -> nn.Sequential:
    """Fully connected network: inputs `[B, ...]` are flattened, outputs are `[B, outputs]`.

    Args:
        inputs: Number of inputs per example.
        outputs: Number of outputs.
        hidden: Units of each hidden layer.
        activation: A name out of `ACTIVATIONS`.
        dropout: Rate of dropout after each hidden layer.
    """
    layers: list[nn.Module] = [nn.Flatten()]
    previous = inputs
    for units in hidden:
        layers += [nn.Linear(previous, units), ACTIVATIONS[activation](), Dropout(dropout)]
        previous = units
    layers.append(nn.Linear(previous, outputs))
    return he_initialise(nn.Sequential(*layers), _SLOPES.get(activation, 0.0))


def lenet(outputs: int = 10, dropout: float = 0.0) -> nn.Sequential:
    """The convolutional network of the active-learning studies (Farquhar 2022, C.1): images `[B, 1, 28, 28]`.

    Convolution to 16 channels 5x5, max pool 2, ReLU, convolution to 32 channels 5x5, max pool 2, ReLU, linear
    512-128, ReLU, linear 128-10. Dropout drops whole feature maps after the convolutions and single units
    after the linear layer.
    """
    return he_initialise(
        nn.Sequential(
            nn.Conv2d(1, 16, 5),
            Dropout(dropout, channels=True),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Conv2d(16, 32, 5),
            Dropout(dropout, channels=True),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(512, 128),
            nn.ReLU(),
            Dropout(dropout),
            nn.Linear(128, outputs),
        )
    )


def small_cnn(inputs: int = 1, outputs: int = 10, channels: int = 16, dropout: float = 0.0) -> nn.Sequential:
    """Three convolutions 3x3 for images `[B, inputs, H, W]` of at least 4 pixels; logits `[B, outputs]`.

    They have C, 2 C and 4 C maps, each with ReLU; max pool 2 after the first two, the mean of every map after
    the third; linear. Dropout drops whole feature maps after every convolution. The pools come before ReLU,
    which then has a quarter of the pixels to look at; either order gives the same outputs and gradients.

    Args:
        inputs: Channels of an image.
        outputs: Number of logits.
        channels: C.
        dropout: Rate of dropout.
    """
    layers: list[nn.Module] = []
    previous = inputs
    for maps in (channels, 2 * channels, 4 * channels):
        layers += [nn.Conv2d(previous, maps, 3, padding=1), Dropout(dropout, channels=True)]
        last = maps == 4 * channels
        layers += [nn.ReLU(), nn.AdaptiveAvgPool2d(1)] if last else [nn.MaxPool2d(2), nn.ReLU()]
        previous = maps
    return he_initialise(nn.Sequential(*layers, nn.Flatten(), nn.Linear(previous, outputs)))


def nearest_channels(make: Callable[[int], nn.Module], channels: int, width: float) -> int:
    """The number of channels that gives a network nearest to width^2 times the parameters that it has now.

    Args:
        make: `make(c)` is the network of c channels, not initialised; the more channels, the more parameters.
        channels: Those of the network of width 1.
        width: About the ratio of the channels, above 0.
    """
    if width == 1:
        return channels

    def count(c: int) -> int:
        with torch.device("meta"):  # shapes alone: no memory, no random numbers
            return sum(p.numel() for p in make(c).parameters())

    wanted = width**2 * count(channels)
    choices = range(1, 1 + max(1, math.ceil(width * channels)))
    enough = min(bisect_left(choices, wanted, key=count), len(choices) - 1)  # place of the first with as many
    return min(choices[max(0, enough - 1) : enough + 1], key=lambda c: abs(count(c) - wanted))


class MeanMaxPool(nn.Module):
    """Global mean and global maximum of every map, side by side: `[B, C, H, W]` to `[B, 2 C]`."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Means `[B, C]`, then maxima `[B, C]`."""
        return torch.cat([inputs.mean((2, 3)), inputs.amax((2, 3))], 1)


VGG16 = ((1, 1), (2, 2), (4, 4, 4), (8, 8, 8), (8, 8, 8))
SMALL_VGG = ((1,), (2,), (4, 4), (8, 8))
"""Channels after every convolution, block by block, in multiples of the first's."""
VGG_SLOPE = 0.2
"""Of LeakyReLU below 0."""


def _vgg(blocks: Sequence[Sequence[int]], dropout: float, channels: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    previous = 3
    for block in blocks:
        if layers:
            layers.append(nn.MaxPool2d(2))
        for multiple in block:
            maps = multiple * channels
            layers += [
                nn.Conv2d(previous, maps, 3, stride=1 if layers else 2, padding=1),
                Dropout(dropout, channels=True),
                nn.LeakyReLU(VGG_SLOPE),
            ]
            previous = maps
    layers += [MeanMaxPool(), nn.Linear(2 * previous, 1)]
    return nn.Sequential(*layers)


def vgg16(channels: int = 64, dropout: float = 0.0, width: float = 1.0) -> nn.Sequential:
    """The 13 convolutions of VGG-16 for photographs `[B, 3, H, W]` of at least 32 pixels; one logit `[B, 1]`.

    Convolutions 3x3 with LeakyReLU 0.2 in five blocks, the first with stride 2; max pool 2 after blocks 1 to
    4; global mean and global maximum of the last maps ("mean and average" in Farquhar 2022, B.3; see
    docs/sources.md); linear to one output. Dropout drops whole feature maps after every convolution. The
    convolutions are those of Simonyan and Zisserman 2015, "Very Deep Convolutional Networks for Large-Scale
    Image Recognition", configuration D.

    With c channels it has 3591 c^2 + 109 c + 1 parameters: 14,715,713 at 64.

    Args:
        channels: Feature maps of the first block at width 1; later blocks have 2, 4, 8 and 8 times as many.
        dropout: Rate of dropout.
        width: About the factor of `channels`; see `nearest_channels`.
    """
    make = partial(_vgg, VGG16, dropout)
    return he_initialise(make(nearest_channels(make, channels, width)), VGG_SLOPE)


def small_vgg(channels: int = 16, dropout: float = 0.0, width: float = 1.0) -> nn.Sequential:
    """A `vgg16` of 6 convolutions in four blocks, for photographs of 64 to 128 pixels; one logit `[B, 1]`.

    With c channels it has 1098 c^2 + 70 c + 1 parameters: 282,209 at 16.

    Args:
        channels: Feature maps of the first block at width 1; later blocks have 2, 4 and 8 times as many.
        dropout: Rate of dropout.
        width: About the factor of `channels`; see `nearest_channels`.
    """
    make = partial(_vgg, SMALL_VGG, dropout)
    return he_initialise(make(nearest_channels(make, channels, width)), VGG_SLOPE)
