"""Random changes of photographs that keep their label.

Of eyes (`photographs`): flips, rotation, shift and zoom as one affine map. Of things (`shifted`): a shift by
whole pixels and a flip left to right.

Source: Farquhar 2022, thesis "Understanding Approximation" (docs/sources.md), appendix B.3: flip both ways,
rotate by up to 180 degrees either way, pad by 0 to 5% and crop back to the size, crop to 90 to 110% of the
size with zeros beyond the image, resize. Deviations: one interpolation in place of one per step, so that a
corner which one step moves out of the frame may be moved back in by a later one; the share of padding is the
same for both axes.

Shapes: B images, H = W pixels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

NUM_UNIFORMS = 9
"""Uniform numbers on [0, 1) that one image takes."""

PADDING = 0.05
ZOOM = 0.1


def affine(uniforms: Tensor) -> Tensor:
    """Where each image is looked at: maps `[B, 2, 3]` from coordinates of the result to those of the source.

    Coordinates run from -1 to 1 over the image, x first.

    Args:
        uniforms: `[B, 9]`: whether mirrored left to right, whether upside down, angle, padding, shift along x
            and y as a share of the padding, zoom, and place of the crop along x and y.
    """
    mirror = torch.where(uniforms[:, :2] < 0.5, 1.0, -1.0)  # [B, 2]
    angle = (2 * uniforms[:, 2] - 1) * math.pi
    shift = (2 * uniforms[:, 4:6] - 1) * 2 * PADDING * uniforms[:, 3:4]
    zoom = 1 - ZOOM + 2 * ZOOM * uniforms[:, 6:7]  # [B, 1]
    crop = (2 * uniforms[:, 7:9] - 1) * (1 - zoom).abs()
    cos, sin = angle.cos(), angle.sin()
    rotation = torch.stack([torch.stack([cos, -sin], 1), torch.stack([sin, cos], 1)], 1)  # [B, 2, 2]
    turned = mirror[:, :, None] * rotation
    return torch.cat([turned * zoom[:, :, None], turned @ (crop + shift)[:, :, None]], 2)


def photographs(images: Tensor, uniforms: Tensor | None, mean: Tensor, std: Tensor) -> Tensor:
    """Stored photographs as a network takes them: augmented, and normalised channel by channel.

    Args:
        images: uint8 `[B, C, H, W]`.
        uniforms: `[B, NUM_UNIFORMS]`; None augments nothing.
        mean: Of each channel over the training set `[C]`, where 1 is white; what lies beyond an image is
            black before it is normalised.
        std: Standard deviation likewise.
    """
    inputs = images.to(mean.dtype) / 255
    if uniforms is not None:
        grid = functional.affine_grid(affine(uniforms).to(inputs), list(inputs.shape), align_corners=False)
        inputs = functional.grid_sample(inputs, grid, align_corners=False)
    return (inputs - mean[:, None, None]) / std[:, None, None]


NUM_UNIFORMS_OF_SHIFT = 3
"""Uniform numbers on [0, 1) that one image takes in `shifted`."""

FRAME = 4
"""Black pixels around an image, from which a crop of its own size is cut."""


def shifted(images: Tensor, uniforms: Tensor | None) -> Tensor:
    """Images padded by black, cropped to their size at a random place, and mirrored or not.

    The usual augmentation of CIFAR: He et al. 2016, "Deep Residual Learning for Image Recognition", section
    4.2; Maddox et al. 2019 in its public code.

    Args:
        images: `[B, C, H, W]`.
        uniforms: `[B, 3]`: place of the crop along x and along y, whether mirrored left to right; None
            changes nothing.
    """
    if uniforms is None:
        return images
    height, width = images.shape[-2:]
    padded = functional.pad(images, [FRAME] * 4)
    place = (uniforms[:, :2].to(images.device) * (2 * FRAME + 1)).long()
    columns = place[:, :1] + torch.arange(width, device=images.device)
    rows = place[:, 1:] + torch.arange(height, device=images.device)
    is_mirrored = uniforms[:, 2:].to(images.device) < 0.5
    columns = torch.where(is_mirrored, columns.flip(1), columns)
    of_image = torch.arange(len(images), device=images.device)[:, None, None]
    # Indexed so, channels come last.
    return padded[of_image, :, rows[:, :, None], columns[:, None, :]].movedim(-1, 1)
