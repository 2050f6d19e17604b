"""A user's own files, for the tasks that need some.

`penguins.csv`: 344 penguins near Palmer Station, with missing values and categories. Gorman, Williams and
Fraser 2014, PLoS ONE 9(3), e90081; made a table by Horst, Hill and Gorman (palmerpenguins), under CC0. Images
are made up: two classes, one of which has more red.
"""

import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import numpy as np
from PIL import Image

PENGUINS = Path(__file__).parent / "penguins.csv"


def write_images(folder: Path, per_class: int = 20) -> Path:
    """Writes pictures of 12 x 10 pixels in a folder for each of two classes; returns the folder."""
    generator = np.random.default_rng(0)
    for name, red in (("blue", 0), ("red", 120)):
        (folder / name).mkdir(parents=True)
        for number in range(per_class):
            pixels = generator.integers(0, 120, (10, 12, 3)).astype(np.uint8)
            pixels[..., 0] += np.uint8(red)
            Image.fromarray(pixels).save(folder / name / f"{number:02}.png")
    return folder


def _images() -> Path:
    """A folder with them, at one place for all processes of a run, since its path is a setting."""
    folder = Path(tempfile.gettempdir()) / "posterior-bench-own-images"
    if not folder.is_dir():
        own = Path(tempfile.mkdtemp())
        with suppress(OSError):  # another process was first
            write_images(own / "images").rename(folder)
        shutil.rmtree(own)
    return folder


IMAGES = _images()

GIVEN = {
    "own_table": {"file": str(PENGUINS), "target": "body_mass_g"},
    "own_images": {"folder": str(IMAGES), "size": 8, "channels": 2},
}
"""Task -> the settings that it cannot do without, and small ones."""


def flags(name: str) -> list[str]:
    """The same as words of a command line."""
    return [word for key, value in GIVEN.get(name, {}).items() for word in (f"--task.{key}", str(value))]
