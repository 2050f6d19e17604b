"""Plain networks of the papers (docs/sources.md): no Bayesian layers, no running statistics.

Every function here has the keyword `dropout` of `bench.contract.NetworkFactory`; a task binds the rest with
`functools.partial`. Weights start at He's normal initialisation, biases at zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

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


ACTIVATIONS = {"relu": nn.ReLU, "leaky_relu": nn.LeakyReLU, "tanh": nn.Tanh}


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
    return he_initialise(nn.Sequential(*layers), 0.01 if activation == "leaky_relu" else 0.0)


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
