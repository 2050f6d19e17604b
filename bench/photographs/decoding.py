"""The one door for pictures from files: 8-bit RGB, converted exactly, or refused with the reason.

Exact are grey, black and white, palettes and an alpha channel that is opaque, since they hold no more than
8-bit RGB does. Of 16 bits the upper 8 are kept. CMYK becomes (255 - C)(255 - K) / 255, without colour
profiles; nor is a profile or gamma applied to any other. Refused are pictures in Lab or HSV, whose conversion
rounds, that do not say which number is white (of 32 bits, of floating point, of 16
bits of which few are used), that need a background (transparent ones), and files of several pictures.
"""

from __future__ import annotations

import io
import re
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from bench.text import one_line

FORMATS = ("JPEG", "PNG", "BMP", "TIFF", "WEBP", "PPM", "GIF")
"""Those that are read: Pillow knows others, and runs a program for some."""
FEWEST_LEVELS = 16
"""A picture of 16 bits whose brightest pixel is darker, of 256 levels, was not meant to have 16 bits."""


class Unusable(ValueError):
    """What a file holds is no picture that can be used; the message says why."""


def decoded(
    path: Path, formats: tuple[str, ...] = FORMATS, side: int | None = None, turn: bool = True
) -> Image.Image:
    """Reads a picture as 8-bit RGB.

    Args:
        path: The file.
        formats: Which it may have, some of FORMATS.
        side: To which the picture will be scaled, if it will. A JPEG may come out smaller than stored, but at
            least twice as large as this, which saves most of the time of decoding.
        turn: Turn it as its EXIF data say a viewer should.

    Raises:
        Unusable: It is no such picture, a damaged one, or one that cannot be converted exactly.
        OSError: The system cannot read the file.
    """
    content = path.read_bytes()
    try:
        picture: Image.Image = Image.open(io.BytesIO(content), formats=formats)
        frames = getattr(picture, "n_frames", 1)
        if frames > 1 and picture.format != "MPO":  # whose others are previews
            raise Unusable(f"holds {frames} pictures")
        if side is not None:
            picture.draft(None, (2 * side, 2 * side))
        is_deep = _is_deep(picture, content)
        picture.load()
        if turn:
            ImageOps.exif_transpose(picture, in_place=True)
        return _rgb(picture, is_deep)
    except UnidentifiedImageError:
        known = " nor ".join(formats) if len(formats) == 2 else ", ".join(formats)
        reason = f"neither {known}" if len(formats) == 2 else f"none of {known}"
        raise Unusable(reason if content else "empty file") from None
    except Unusable:
        raise
    except Exception as error:  # Pillow has no common class for what damaged files end in
        raise Unusable(f"damaged, {one_line(re.sub(r'<.*?>', '', str(error)), 100)}") from None


def _is_deep(picture: Image.Image, content: bytes) -> bool:
    """Whether the file has 16 bits a channel, of which Pillow shows the upper 8 where they are coloured."""
    if picture.format == "PNG":
        return content[24] == 16
    if picture.format == "PPM":
        return picture.mode == "I"
    bits = getattr(picture, "tag_v2", {}).get(258, 8)  # BitsPerSample of a TIFF
    return max(bits if isinstance(bits, tuple) else (bits,)) == 16 or picture.mode.startswith("I;16")


def _rgb(picture: Image.Image, is_deep: bool) -> Image.Image:
    """The picture in 8-bit RGB."""
    if picture.mode == "F" or (picture.mode == "I" and not is_deep):
        kind = "floating point" if picture.mode == "F" else "32-bit numbers"
        raise Unusable(f"its pixels are {kind}, which do not say what is white: save it in 8 or 16 bits")
    if picture.mode in ("LAB", "HSV"):
        raise Unusable(f"its colours are {picture.mode}, whose conversion is not exact: save it in RGB")
    few = Unusable("has 16 bits and uses few of them, so that nobody knows what is white: save it in 8 bits")
    if picture.mode.startswith("I"):
        levels = np.asarray(picture).astype(np.int64)
        if 0 < levels.max() < 256 * FEWEST_LEVELS:
            raise few
        if levels.min() < 0 or levels.max() >= 1 << 16:
            raise Unusable("its pixels are beyond 16 bits")
        if getattr(picture, "tag_v2", {}).get(262) == 0 or "transparency" in picture.info:
            raise Unusable("its 16 bits are inverted or transparent: save it in 8 bits")
        return Image.fromarray((levels >> 8).astype(np.uint8)).convert("RGB")
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        if np.asarray(picture)[..., 3].min() < 255:
            raise Unusable("is transparent in parts: put it on a background")
    made = picture if picture.mode == "RGB" else picture.convert("RGB")
    if is_deep and np.asarray(made).max() < FEWEST_LEVELS:
        raise few
    return made
