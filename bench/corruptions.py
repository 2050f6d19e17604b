"""Corrupted images: noise, blur, weather and the digital kind, at severities from 0 to 5.

The constants are those of CIFAR-10-C, published for images of 32 pixels. Lengths in them (the taps of a blur,
the grid of fog and snow) are shares of the side, so that images of other sizes are corrupted alike; of small
images that leaves little blur. Noise is per pixel at every size. Every image draws from a generator of its
own, so that what happens to it depends neither on other images nor on their number; severities share draws.

Source: Hendrycks and Dietterich 2019, "Benchmarking Neural Network Robustness to Common Corruptions and
Perturbations", and its public code. Deviations: results are rounded, where the code truncates, which darkens
by half a level; zooms are continuous, where the code crops whole pixels; the taps of a motion blur are
interpolated, where ImageMagick rounds them. Glass blur, frost and elastic transforms are left out: the first
and the last move whole pixels of 32, and the photographs of frost are not ours to ship.

Shapes: N images, C channels (1 or 3), H = W pixels; x are images `[N, H, W, C]` in [0, 1].
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import product
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from bench import randomness
from bench.data import array_digest
from bench.errors import UsageError

if TYPE_CHECKING:
    from PIL import Image

SIDE = 32
"""Pixels for which the constants are published."""
LARGEST = 5
"""Severity; 0 is no corruption."""

Tap = tuple[float, float, float]
"""Of a blur: how far down and right the pixel lies that is read, in pixels of SIDE, and its weight."""


def corrupt(
    images: np.ndarray, kind: str, severity: int, generators: Sequence[torch.Generator]
) -> np.ndarray:
    """Corrupts images.

    Args:
        images: uint8 `[N, C, H, W]`.
        kind: One of `KINDS`.
        severity: From 1 to 5, or 0, which returns the images as they are.
        generators: Of each image where its random numbers come from, on the CPU.

    Returns:
        uint8 `[N, C, H, W]`.

    Raises:
        UsageError: No corruption has this name or severity, or the images are of another form.
    """
    if kind not in KINDS or severity not in range(LARGEST + 1):
        known = ", ".join(KINDS)
        raise UsageError(f"corruption {kind!r}, severity {severity}: must be one of {known}, 0 to {LARGEST}")
    form = images.shape
    if images.dtype != np.uint8 or len(form) != 4 or form[1] not in (1, 3) or form[2] != form[3]:
        raise UsageError(f"images must be uint8 [N, 1 or 3, H, H], not {images.dtype} {list(form)}")
    if severity == 0:
        return images.copy()
    apply, constants = KINDS[kind]
    found = apply(images.transpose(0, 2, 3, 1) / 255, constants[severity - 1], generators)
    return np.rint(255 * found.clip(0, 1)).astype(np.uint8).transpose(0, 3, 1, 2)


def numbered(
    images: np.ndarray, kind: str, severity: int, numbers: Iterable[int] | None = None
) -> np.ndarray:
    """Images uint8 `[N, C, H, W]` corrupted; each draws by its own number, from 0 on unless given."""
    numbers = range(len(images)) if numbers is None else numbers
    own = [randomness.generator(0, "corruptions", kind, int(number)) for number in numbers]
    return corrupt(images, kind, severity, own)


def digests(images: np.ndarray) -> list[str]:
    """The digest of the images uint8 `[N, C, H, W]` under all kinds, one for every severity from 0 to 5."""
    return [
        array_digest({kind: numbered(images, kind, severity) for kind in KINDS})
        for severity in range(LARGEST + 1)
    ]


# -------------------------------------------------------------------------------------------------- noise

Generators = Sequence[torch.Generator]


def _gaussian_noise(x: np.ndarray, sd: float, own: Generators) -> np.ndarray:
    return x + sd * _normal(x.shape[1:], own)


def _shot_noise(x: np.ndarray, photons: float, own: Generators) -> np.ndarray:
    counts = [torch.poisson(torch.from_numpy(photons * x[n]), each) for n, each in enumerate(own)]
    return torch.stack(counts).numpy() / photons


def _impulse_noise(x: np.ndarray, share: float, own: Generators) -> np.ndarray:
    is_hit, is_white = _uniform((2, *x.shape[1:]), own).swapaxes(0, 1)
    return np.where(is_hit < share, is_white < 0.5, x)


# --------------------------------------------------------------------------------------------------- blur


def _defocus_blur(x: np.ndarray, constants: tuple[float, float], own: Generators) -> np.ndarray:
    return _spread(x, _disk(*constants), x.shape[1] / SIDE, "reflect")


def _motion_blur(x: np.ndarray, constants: tuple[float, float], own: Generators) -> np.ndarray:
    angles, scale = 90 * _uniform((), own) - 45, x.shape[1] / SIDE
    lines = (_line(*constants, angle) for angle in angles)
    return np.concatenate([_spread(x[n : n + 1], line, scale, "edge") for n, line in enumerate(lines)])


def _zoom_blur(x: np.ndarray, stop: float, own: Generators) -> np.ndarray:
    factors = np.arange(1, stop, 0.01)
    return (x + sum(_zoomed(x, float(factor)) for factor in factors)) / (len(factors) + 1)


def _spread(
    x: np.ndarray, taps: Sequence[Tap], scale: float, border: Literal["reflect", "edge"]
) -> np.ndarray:
    """The weighted mean of shifted images; a shift by parts of a pixel interpolates linearly."""
    weights: dict[tuple[int, int], float] = {}
    for down, right, weight in taps:
        (top, below), (left, beside) = (divmod(scale * shift, 1) for shift in (down, right))
        for i, j in product((0, 1), (0, 1)):
            share = weight * (below if i else 1 - below) * (beside if j else 1 - beside)
            if share > 1e-9:
                at = int(top) + i, int(left) + j
                weights[at] = weights.get(at, 0.0) + share
    size = x.shape[1]
    reach = min(max(abs(shift) for at in weights for shift in at), size - 1)
    padded, found = np.pad(x, ((0, 0), (reach, reach), (reach, reach), (0, 0)), mode=border), np.zeros_like(x)
    for at, weight in weights.items():
        top, left = (reach + min(max(shift, -reach), reach) for shift in at)
        found += weight * padded[:, top : top + size, left : left + size]
    return found / sum(weights.values())


@cache
def _disk(radius: float, sd: float) -> tuple[Tap, ...]:
    """Pixels of a disk, blurred by three taps a direction."""
    inside = [(i, j) for i, j in product(range(-2, 3), range(-2, 3)) if i**2 + j**2 <= radius**2]
    near = {-1: math.exp(-0.5 / sd**2), 0: 1.0, 1: math.exp(-0.5 / sd**2)}
    return tuple((i + di, j + dj, near[di] * near[dj]) for i, j in inside for di in near for dj in near)


def _line(radius: float, sd: float, angle: float) -> list[Tap]:
    """A half line of 2 radius + 1 taps, whose weights fall as a normal density; the angle is in degrees."""
    down, right = math.sin(math.radians(angle)), math.cos(math.radians(angle))
    return [(i * down, i * right, math.exp(-0.5 * (i / sd) ** 2)) for i in range(int(2 * radius) + 1)]


def _zoomed(x: np.ndarray, factor: float) -> np.ndarray:
    """Enlarged about the centre by linear interpolation, and cut to its size."""
    size = x.shape[1]
    centre = (size - 1) / 2
    at = centre + (np.arange(size) - centre) / factor
    return _along_both(np.maximum(0, 1 - np.abs(at[:, None] - np.arange(size))), x)


def _along_both(matrix: np.ndarray, x: np.ndarray) -> np.ndarray:
    """A matrix `[M, H]` applied to the rows and to the columns of `[N, H, H, C]`: `[N, M, M, C]`."""
    tall = np.tensordot(matrix, x, (1, 1))  # [M, N, H, C]
    return np.tensordot(matrix, tall, (1, 2)).transpose(2, 1, 0, 3)


# ------------------------------------------------------------------------------------------------ weather


def _fog(x: np.ndarray, constants: tuple[float, float], own: Generators) -> np.ndarray:
    density, decay = constants
    most = x.max((1, 2, 3), keepdims=True)
    return (x + density * _resized(_plasma(decay, own), x.shape[1])) * most / (most + density)


def _snow(x: np.ndarray, constants: tuple[float, ...], own: Generators) -> np.ndarray:
    mean, sd, factor, threshold, radius, blur, kept = constants
    layer = _zoomed(mean + sd * _normal((SIDE, SIDE, 1), own), factor)
    layer = np.where(layer < threshold, 0, layer).clip(0, 1)
    lines = (_line(radius, blur, angle) for angle in 90 * _uniform((), own) - 135)
    falling = [_spread(layer[n : n + 1], line, 1, "edge") for n, line in enumerate(lines)]
    flakes = _resized(np.concatenate(falling), x.shape[1])
    grey = x if x.shape[3] == 1 else (x @ [0.299, 0.587, 0.114])[..., None]
    whiter = kept * x + (1 - kept) * np.maximum(x, 1.5 * grey + 0.5)
    return whiter + flakes + np.rot90(flakes, 2, (1, 2))


def _brightness(x: np.ndarray, added: float, own: Generators) -> np.ndarray:
    """The value of HSV raised: all channels times one factor; black, which has no hue, turns grey."""
    value = x.max(3, keepdims=True)
    raised = np.minimum(value + added, 1)
    return np.where(value > 0, x * raised / np.where(value > 0, value, 1), raised)


def _plasma(decay: float, own: Generators) -> np.ndarray:
    """Fractal landscapes `[N, SIDE, SIDE, 1]` from 0 to 1 by the diamond-square algorithm, periodic."""
    land, step, rough = np.zeros((len(own), SIDE, SIDE)), SIDE, 100.0

    def wobbled(total: np.ndarray) -> np.ndarray:
        return total / 4 + rough**2 * (2 * _uniform(total.shape[1:], own) - 1)

    while step >= 2:
        half = step // 2
        corners = land[:, ::step, ::step]
        below = corners + np.roll(corners, -1, 1)
        middles = land[:, half::step, half::step] = wobbled(below + np.roll(below, -1, 2))
        land[:, ::step, half::step] = wobbled(
            middles + np.roll(middles, 1, 1) + corners + np.roll(corners, -1, 2)
        )
        land[:, half::step, ::step] = wobbled(
            middles + np.roll(middles, 1, 2) + corners + np.roll(corners, -1, 1)
        )
        step, rough = half, rough / decay
    land -= land.min((1, 2), keepdims=True)
    return (land / land.max((1, 2), keepdims=True))[..., None]


def _resized(layer: np.ndarray, size: int) -> np.ndarray:
    """Layers `[N, SIDE, SIDE, 1]` as means over areas, `[N, size, size, 1]`."""
    edges, pixels = np.arange(size + 1) * SIDE / size, np.arange(SIDE)
    covered = np.minimum(edges[1:, None], pixels + 1) - np.maximum(edges[:-1, None], pixels)
    return _along_both(covered.clip(0) * size / SIDE, layer)


# ------------------------------------------------------------------------------------------------ digital


def _contrast(x: np.ndarray, factor: float, own: Generators) -> np.ndarray:
    mean = x.mean((1, 2), keepdims=True)
    return (x - mean) * factor + mean


def _pixelate(x: np.ndarray, share: float, own: Generators) -> np.ndarray:
    from PIL.Image import Resampling

    size = x.shape[1]
    small = int(size * share)

    def one(image: Image.Image) -> Image.Image:
        return image.resize((small, small), Resampling.BOX).resize((size, size), Resampling.BOX)

    return _by_pillow(x, one)


def _jpeg(x: np.ndarray, quality: int, own: Generators) -> np.ndarray:
    from PIL import Image

    def one(image: Image.Image) -> Image.Image:
        file = io.BytesIO()
        image.save(file, "JPEG", quality=quality)
        return Image.open(file)

    return _by_pillow(x, one)


def _by_pillow(x: np.ndarray, change: Callable[[Image.Image], Image.Image]) -> np.ndarray:
    from PIL import Image  # here, since few runs need it

    levels = np.rint(255 * x).astype(np.uint8)
    images = levels[..., 0] if levels.shape[3] == 1 else levels
    changed = np.stack([np.asarray(change(Image.fromarray(image))) for image in images]) / 255
    return changed.reshape(x.shape)


# ------------------------------------------------------------------------------------------------ numbers


def _normal(shape: tuple[int, ...], own: Generators) -> np.ndarray:
    """Standard normal numbers `[N, *shape]`."""
    return torch.stack([torch.randn(shape, generator=g, dtype=torch.float64) for g in own]).numpy()


def _uniform(shape: tuple[int, ...], own: Generators) -> np.ndarray:
    """Numbers in [0, 1), `[N, *shape]`."""
    return torch.stack([torch.rand(shape, generator=g, dtype=torch.float64) for g in own]).numpy()


KINDS: dict[str, tuple[Callable[..., np.ndarray], tuple]] = {
    "gaussian_noise": (_gaussian_noise, (0.04, 0.06, 0.08, 0.09, 0.10)),
    "shot_noise": (_shot_noise, (500, 250, 100, 75, 50)),
    "impulse_noise": (_impulse_noise, (0.01, 0.02, 0.03, 0.05, 0.07)),
    "defocus_blur": (_defocus_blur, ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1))),
    "motion_blur": (_motion_blur, ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5))),
    "zoom_blur": (_zoom_blur, (1.06, 1.11, 1.16, 1.21, 1.26)),
    "snow": (
        _snow,
        (
            (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
            (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
            (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
            (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
            (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
        ),
    ),
    "fog": (_fog, ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75))),
    "brightness": (_brightness, (0.05, 0.1, 0.15, 0.2, 0.3)),
    "contrast": (_contrast, (0.75, 0.5, 0.4, 0.3, 0.15)),
    "pixelate": (_pixelate, (0.95, 0.9, 0.85, 0.75, 0.65)),
    "jpeg": (_jpeg, (80, 65, 58, 50, 40)),
}
"""Kind -> its function of images, constants and generators, and the published constants by severity."""
