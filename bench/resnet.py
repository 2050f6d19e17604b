"""Residual networks with filter response normalisation: no statistics of a batch, so an output is its own.

Source: He et al. 2016, "Deep Residual Learning for Image Recognition"; Singh and Krishnan 2020, "Filter
Response Normalization Layer: Eliminating Batch Dependence in the Training of Deep Neural Networks"; Izmailov
et al. 2021, "What Are Bayesian Neural Network Posteriors Really Like?", public code (swish).
Deviations: the stride of a block lies on its 3x3 convolution, as in torchvision. Epsilon is fixed at 1e-6,
which the authors do unless maps have one pixel: learned, it would be a weight with a posterior that must stay
positive.

Shapes: B photographs, C channels.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.networks import Dropout, he_initialise, nearest_channels
from bench.weights import are_transformed

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


# ----------------------------------------------------------------------------------------------- with swish


class FilterResponse(nn.Module):
    """Filter response normalisation, its threshold and, if asked for, swish: `[B, C, H, W]`.

    swish(max(gamma x / sqrt(mean of x^2 over the pixels + epsilon) + beta, tau)), where swish(z) is
    z sigmoid(z). gamma (`weight`) starts at 1, beta (`bias`) and tau (`threshold`) at 0, each `[C]`.

    Args:
        channels: C.
        swish: Whether swish follows the threshold.
        epsilon: Added to the mean square, above 0.
    """

    def __init__(self, channels: int, swish: bool, epsilon: float = 1e-6) -> None:
        super().__init__()
        self.swish, self.epsilon = swish, epsilon
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.threshold = nn.Parameter(torch.zeros(channels))

    def forward(self, inputs: Tensor) -> Tensor:
        """One function with its gradient written out; single operations where torch has to see each."""
        own = inputs, self.weight, self.bias, self.threshold
        response: Any = filter_response if are_transformed(own) else _FilterResponse.apply
        return response(*own, self.swish, self.epsilon)


def filter_response(
    inputs: Tensor, weight: Tensor, bias: Tensor, threshold: Tensor, swish: bool, epsilon: float
) -> Tensor:
    """The formula of `FilterResponse`, operation by operation."""
    inverse = (inputs.square().mean((2, 3), keepdim=True) + epsilon).rsqrt()
    normalised = torch.addcmul(bias[:, None, None], inputs, weight[:, None, None] * inverse)
    found = torch.maximum(normalised, threshold[:, None, None])
    return functional.silu(found) if swish else found


class _FilterResponse(torch.autograd.Function):
    """`filter_response` in fewer passes over the pixels: only its input is kept for the gradient.

    With y the normalised maps, n = x r, r = 1 / sqrt(mean of x^2 + epsilon), and g the gradient at y,
    which is 0 where y is below tau: that of x is gamma r (g - n (mean of g n over the pixels)).
    """

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor,
        threshold: Tensor,
        swish: bool,
        epsilon: float,
    ) -> Tensor:
        norm = torch.linalg.vector_norm(inputs, dim=(2, 3), keepdim=True)
        inverse = (norm.square() / inputs[0, 0].numel() + epsilon).rsqrt()
        found = torch.addcmul(bias[:, None, None], inputs, weight[:, None, None] * inverse)
        torch.maximum(found, threshold[:, None, None], out=found)
        ctx.save_for_backward(inputs, weight, bias, threshold, inverse)
        ctx.swish, ctx.epsilon = swish, epsilon
        return functional.silu(found, inplace=True) if swish else found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        inputs, weight, bias, threshold, inverse = ctx.saved_tensors
        if torch.is_grad_enabled():  # a gradient of the gradient will be asked for
            own = inputs, weight, bias, threshold
            again = filter_response(inputs, weight, bias, threshold, ctx.swish, ctx.epsilon)
            needed = [given for given, is_needed in zip(own, ctx.needs_input_grad, strict=False) if is_needed]
            made = iter(torch.autograd.grad(again, needed, gradient, create_graph=True))
            return *(next(made) if is_needed else None for is_needed in ctx.needs_input_grad[:4]), None, None
        scale = weight[:, None, None] * inverse
        above = torch.addcmul((bias - threshold)[:, None, None], inputs, scale)
        if ctx.swish:
            found = functional.relu(above).add_(threshold[:, None, None])
            gradient = torch.ops.aten.silu_backward(gradient, found)
        whole = gradient.sum((0, 2, 3))
        gradient = torch.ops.aten.threshold_backward(gradient, above, 0)
        to_bias = gradient.sum((0, 2, 3))
        along = torch.mul(gradient, inputs, out=above).sum((2, 3), keepdim=True) * inverse
        back = scale * inverse * along / inputs[0, 0].numel()
        to_inputs = gradient.mul_(scale).addcmul_(inputs, back, value=-1)
        return to_inputs, along.sum((0, 2, 3)), to_bias, whole - to_bias, None, None


class SwishBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut, swish of their sum: `[B, C, H, W]` to `[B, D, H/s, W/s]`.

    Args:
        inputs: C.
        outputs: D.
        stride: s of the first convolution, and of the shortcut where the shape changes.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            *_responding(inputs, outputs, 3, swish=True, stride=stride),
            *_responding(outputs, outputs, 3, swish=False),
        )
        same = inputs == outputs and stride == 1
        thinned = [_thinned(stride), *_responding(inputs, outputs, 1, swish=False)]
        self.shortcut = nn.Sequential(*([] if same else thinned))

    def forward(self, inputs: Tensor) -> Tensor:
        """Swish of shortcut plus residual."""
        return functional.silu(self.shortcut(inputs) + self.residual(inputs))


def _responding(inputs: int, outputs: int, size: int, swish: bool, stride: int = 1) -> list[nn.Module]:
    """A convolution with a bias, which the normalisation does not remove, and its `FilterResponse`.

    At stride 2 the padding of even maps lies right and below alone, as in the public code.
    """
    padding = [nn.ZeroPad2d((0, 1, 0, 1))] if stride == 2 else []
    convolution = nn.Conv2d(inputs, outputs, size, stride, padding=0 if padding else size // 2)
    return [*padding, convolution, FilterResponse(outputs, swish)]


def resnet_frn_swish(depth: int, outputs: int = 10, channels: int = 16, inputs: int = 3) -> nn.Sequential:
    """ResNet with filter response normalisation and swish for images `[B, inputs, H, W]`, as published.

    A convolution, three stages of (depth - 2) / 6 blocks with C, 2 C and 4 C maps, and a linear layer, whose
    logits are `[B, outputs]`. At depth 20 and 16 channels it has 274,042 parameters. H and W should be
    multiples of 4, and above 4.

    Source: Izmailov et al. 2021, public code. Deviation: initial weights are He's normal, there cut off at
    two standard deviations.

    Args:
        depth: 8, 14, 20, ...: number of convolutions on the main path, and the linear layer.
        outputs: Number of logits.
        channels: C.
        inputs: Channels of an image.

    Raises:
        ValueError: No network of this kind has such a depth.
    """
    if depth < 8 or (depth - 2) % 6:
        raise ValueError(f"depth must be 8, 14, 20, ..., got {depth}")
    layers = _responding(inputs, channels, 3, swish=True)
    previous = channels
    for stage, maps in enumerate((channels, 2 * channels, 4 * channels)):
        for block in range((depth - 2) // 6):
            layers.append(SwishBlock(previous, maps, 2 if stage and not block else 1))
            previous = maps
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(previous, outputs)]
    return he_initialise(nn.Sequential(*layers))
