"""Residual networks with filter response normalisation: no statistics of a batch, so an output is its own.

Source: He et al. 2016, "Deep Residual Learning for Image Recognition"; Singh and Krishnan 2020, "Filter
Response Normalization Layer: Eliminating Batch Dependence in the Training of Deep Neural Networks".
Deviations: the stride of a block lies on its 3x3 convolution, as in torchvision. Epsilon is fixed at 1e-6,
which the authors do unless maps have one pixel: learned, it would be a weight with a posterior that must stay
positive.

Shapes: B photographs, C channels.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.networks import Dropout, he_initialise, nearest_channels

STAGES = ((1, 3), (2, 4), (4, 6), (8, 3))
"""Of every stage its channels, in multiples of the stem's, and its number of blocks."""
EXPANSION = 4
"""Channels at the end of a block per channel inside it."""


class FilterResponseNorm(nn.Module):
    """Every map of every example divided by its root mean square, times gamma, plus beta: `[B, C, H, W]`.

    gamma (`weight`) starts at 1 and beta (`bias`) at 0, each `[C]`.

    Args:
        channels: C.
        epsilon: Added to the mean square, above 0.
    """

    def __init__(self, channels: int, epsilon: float = 1e-6) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, inputs: Tensor) -> Tensor:
        """Times gamma / sqrt(mean of x^2 over the pixels + epsilon), plus beta."""
        mean_square = inputs.square().mean((2, 3), keepdim=True)
        scale = self.weight[:, None, None] * (mean_square + self.epsilon).rsqrt()
        return torch.addcmul(self.bias[:, None, None], inputs, scale)


class ThresholdedLinear(nn.Module):
    """The larger of an input and a threshold tau `[C]` per channel, learned from 0: `[B, C, H, W]`.

    It goes with `FilterResponseNorm`, whose outputs are not centred.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.threshold = nn.Parameter(torch.zeros(channels))

    def forward(self, inputs: Tensor) -> Tensor:
        """max(x, tau)."""
        # As relu(x - tau) + tau: the gradient of torch's maximum takes several times as long.
        threshold = self.threshold[:, None, None]
        return functional.relu(inputs - threshold) + threshold


class Bottleneck(nn.Module):
    """Convolutions 1x1, 3x3 and 1x1 beside a shortcut: `[B, C, H, W]` to `[B, 4 D, H / stride, W / stride]`.

    Args:
        inputs: C.
        channels: D, maps inside the block.
        stride: Of the 3x3 convolution and of the shortcut.
        dropout: Rate of dropout of whole maps, before the last convolution.
    """

    def __init__(self, inputs: int, channels: int, stride: int, dropout: float) -> None:
        super().__init__()
        outputs = EXPANSION * channels
        self.residual = nn.Sequential(
            *_convolution(inputs, channels, 1),
            ThresholdedLinear(channels),
            *_convolution(channels, channels, 3, stride),
            ThresholdedLinear(channels),
            Dropout(dropout, channels=True),
            *_convolution(channels, outputs, 1),
        )
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Sequential(
            *([] if same else [_thinned(stride), *_convolution(inputs, outputs, 1)])
        )
        self.activation = ThresholdedLinear(outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        """The activation of shortcut plus residual."""
        return self.activation(self.shortcut(inputs) + self.residual(inputs))


def _thinned(stride: int) -> nn.Module:
    """Every stride-th pixel.

    A convolution 1x1 of that stride would do the same, but in channels-last order torch 2.15 ends the process
    in its gradient, on a CPU and below eight channels.
    """
    return nn.AvgPool2d(1, stride)


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> list[nn.Module]:
    """A convolution and its normalisation, which makes a bias of the former useless."""
    convolution = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    return [convolution, FilterResponseNorm(outputs)]


def _resnet50(dropout: float, channels: int) -> nn.Sequential:
    layers: list[nn.Module] = [
        *_convolution(3, channels, 7, stride=2),
        ThresholdedLinear(channels),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]
    previous = channels
    for stage, (multiple, blocks) in enumerate(STAGES):
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            layers.append(Bottleneck(previous, multiple * channels, stride, dropout))
            previous = EXPANSION * multiple * channels
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(previous, 1)]
    return nn.Sequential(*layers)


def resnet50_frn(channels: int = 64, dropout: float = 0.0, width: float = 1.0) -> nn.Sequential:
    """ResNet-50 with filter response normalisation for photographs `[B, 3, H, W]`; one logit `[B, 1]`.

    It has 23,532,801 parameters at 64 channels. H and W should be above 32: maps of the last stage that have
    one pixel would be normalised to their sign.

    Args:
        channels: Feature maps of the stem at width 1.
        dropout: Rate of dropout of whole maps, in every block before its last convolution.
        width: About the factor of `channels`; see `bench.networks.nearest_channels`.
    """
    make = partial(_resnet50, dropout)
    return he_initialise(make(nearest_channels(make, channels, width)))


class PreActivation(nn.Module):
    """A pre-activation block of two 3x3 convolutions: `[B, C, H, W]` to `[B, D, H / stride, W / stride]`.

    Args:
        inputs: C.
        outputs: D.
        stride: Of the first convolution, and of the shortcut where the shape changes.
        dropout: Rate of dropout of whole maps, before the second convolution.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            *_activation(inputs),
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            *_activation(outputs),
            Dropout(dropout, channels=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        )
        same = inputs == outputs and stride == 1
        thinned = [_thinned(stride), nn.Conv2d(inputs, outputs, 1, bias=False)]
        self.shortcut = nn.Sequential(*([] if same else thinned))

    def forward(self, inputs: Tensor) -> Tensor:
        """Shortcut plus residual."""
        return self.shortcut(inputs) + self.residual(inputs)


def _activation(channels: int) -> list[nn.Module]:
    return [FilterResponseNorm(channels), ThresholdedLinear(channels)]


def preresnet_frn(
    depth: int, outputs: int = 10, channels: int = 16, dropout: float = 0.0, inputs: int = 3
) -> nn.Sequential:
    """PreResNet with filter response normalisation for images `[B, inputs, H, W]`; logits `[B, outputs]`.

    A convolution, three stages of (depth - 2) / 6 blocks of two convolutions with C, 2 C and 4 C maps, and a
    linear layer. At depth 2 the stages have no block, so the linear layer sees the C maps of the convolution.

    Source: He et al. 2016, "Identity Mappings in Deep Residual Networks"; Maddox et al. 2019, public code.
    There depth 2 gets one block a stage, which makes it the network of depth 8. Initial weights are He's by
    fan in; there by fan out.

    Args:
        depth: 2, 8, 14, ...: number of convolutions on the main path, and the linear layer.
        outputs: Number of logits.
        channels: C.
        dropout: Rate of dropout of whole maps, in every block before its second convolution.
        inputs: Channels of an image.

    Raises:
        ValueError: No network of this kind has such a depth.
    """
    if depth < 2 or (depth - 2) % 6:
        raise ValueError(f"depth must be 2, 8, 14, ..., got {depth}")
    layers: list[nn.Module] = [nn.Conv2d(inputs, channels, 3, padding=1, bias=False)]
    previous, blocks = channels, (depth - 2) // 6
    for stage, maps in enumerate((channels, 2 * channels, 4 * channels)):
        for block in range(blocks):
            layers.append(PreActivation(previous, maps, 2 if stage and not block else 1, dropout))
            previous = maps
    layers += [*_activation(previous), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(previous, outputs)]
    return he_initialise(nn.Sequential(*layers))
