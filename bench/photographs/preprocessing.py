"""Photographs of the fundus as networks take them: decoded, square, of one size, perhaps of raised contrast.

Two ways, both without parameters to choose:

- `resize`: the fundus' bounding square, scaled. Columns and rows count as fundus where their mean is brighter
  than a tenth of the picture's; the shorter side is padded with black, so the aspect stays.
- `contrast`: scaled to a fixed radius r of the fundus, then 4 x picture - 4 x its Gaussian blur (standard
  deviation r / 30) + 128 inside a circle of 0.9 r about the centre, 128 outside. Here r is size / 1.8, so
  that the circle touches the edges. B. Graham, who won Kaggle's competition of 2015, prepared them so.

Pictures are taken as they are stored: an orientation noted in their EXIF data is not applied.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image
from scipy.ndimage import gaussian_filter

from bench.photographs import decoding

Way = Literal["resize", "contrast"]

KEPT = 0.9
"""Radius of the circle that `contrast` keeps, in radii of the fundus."""
GAIN = 4.0
GREY = 128
SMALLEST = 8
"""Least side in pixels of a picture that can be used."""

_FORMATS = ("JPEG", "PNG")
_FILTER = Image.Resampling.BILINEAR  # of Pillow: smooths when it shrinks, and overshoots at no edge


def decoded(path: Path, side: int) -> Image.Image:
    """Reads a JPEG or PNG as 8-bit RGB, as it is stored.

    Args:
        path: The file.
        side: To which the picture will be scaled.

    Raises:
        Unusable: It is no such picture, a damaged one, or one that cannot be converted exactly.
        OSError: The system cannot read the file.
    """
    picture = decoding.decoded(path, _FORMATS, side, turn=False)
    if min(picture.size) < SMALLEST:
        raise decoding.Unusable(f"only {picture.width} x {picture.height} pixels")
    return picture


def finished(picture: Image.Image, size: int, way: Way, is_cropped: bool = False) -> np.ndarray:
    """A picture as networks take it, uint8 [size, size, 3].

    Args:
        picture: In RGB.
        size: Side in pixels.
        way: How it is made, see above.
        is_cropped: It shows the fundus alone already, so `resize` cuts nothing off.
    """
    if way == "contrast":
        return contrast(picture, size)
    if is_cropped:
        return np.asarray(picture.resize((size, size), _FILTER))
    return _squared(picture, size)


def radius(picture: Image.Image) -> float:
    """Radius of the fundus in pixels: half the pixels of the middle row brighter than a tenth of its mean.

    Where that is less than an eighth of the height the picture is too bad to tell, and half the height is
    taken.
    """
    middle = picture.height // 2
    row = np.asarray(picture.crop((0, middle, picture.width, middle + 1)), np.float64)[0].sum(1)
    found = np.count_nonzero(row > row.mean() / 10) / 2
    return found if found >= picture.height / 8 else picture.height / 2


def contrast(picture: Image.Image, size: int) -> np.ndarray:
    """A picture with its slow changes of colour removed and the rest raised, uint8 [size, size, 3]."""
    wanted = size / (2 * KEPT)
    found = radius(picture)
    # Nothing beyond 1.1 radii reaches into the circle: the blur ends after 4 of its standard deviations.
    half = [min(1.1 * found, side / 2) for side in picture.size]
    centre = [side / 2 for side in picture.size]
    box = (centre[0] - half[0], centre[1] - half[1], centre[0] + half[0], centre[1] + half[1])
    # Sides as even or odd as `size`, so that the centre stays the centre.
    width, height = (max(1, 2 * round(h * wanted / found - size % 2 / 2) + size % 2) for h in half)
    scaled = np.asarray(picture.resize((width, height), _FILTER, box=box), np.float32)
    blurred = gaussian_filter(scaled, (wanted / 30, wanted / 30, 0), mode="nearest")
    raised = np.rint(np.clip(GAIN * (scaled - blurred) + GREY, 0, 255)).astype(np.uint8)
    made = np.full((size, size, 3), GREY, np.uint8)
    rows, columns = (min(size, side) for side in (height, width))
    top, left = (size - rows) // 2, (size - columns) // 2
    from_top, from_left = (height - rows) // 2, (width - columns) // 2
    made[top : top + rows, left : left + columns] = raised[
        from_top : from_top + rows, from_left : from_left + columns
    ]
    offset = np.arange(size) - (size - 1) / 2
    made[offset[:, None] ** 2 + offset**2 > (size / 2) ** 2] = GREY
    return made


def _squared(picture: Image.Image, size: int) -> np.ndarray:
    """The fundus' bounding square, the middle of the fundus in its middle, scaled."""
    grey = np.asarray(picture.convert("L"))
    bright = grey.mean() / 10
    box = []
    for profile in (grey.mean(0), grey.mean(1)):
        inside = np.flatnonzero(profile > bright)
        box.append((int(inside[0]), int(inside[-1]) + 1) if len(inside) else (0, len(profile)))
    (left, right), (top, bottom) = box
    longest = max(right - left, bottom - top)
    width, height = (max(1, round(size * (end - begin) / longest)) for begin, end in box)
    scaled = picture.resize((width, height), _FILTER, box=(left, top, right, bottom))
    made = np.zeros((size, size, 3), np.uint8)
    row, column = (size - height) // 2, (size - width) // 2
    made[row : row + height, column : column + width] = np.asarray(scaled)
    return made
