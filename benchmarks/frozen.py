"""What a run of `own_images` costs whose network is frozen but for its last layer: images or features.

    python benchmarks/frozen.py [METHOD ...] [--images 300] [--size 64] [--epochs 40]

Processor seconds of whole runs on pictures of noise under torchvision's ResNet-18 with weights of one seed:
with its frozen part computed in every epoch, with its features computed once, and of the next seed, which
finds them.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image
from timing import print_table
from torch import nn

import bench
from bench.studies import frozen
from bench.system import places


def resnet18(inputs: tuple[int, ...], outputs: int) -> nn.Module:
    """ResNet-18 whose weights are the same in every fit, as pretrained ones are, but for the last layer's."""
    from torchvision import models

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = models.resnet18()
    made.fc = nn.Linear(made.fc.in_features, outputs)
    return made


def written(folder: Path, number: int, size: int) -> Path:
    """Pictures of noise, a folder for each of two classes."""
    generator = np.random.default_rng(0)
    for i in range(number):
        path = folder / "images" / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (size, size, 3)).astype(np.uint8)).save(path)
    return folder / "images"


@contextmanager
def every_epoch() -> Iterator[None]:
    """Inside, no network is found to be frozen but for its last layer."""
    with patch.object(frozen, "cut", lambda *_: "its cost is measured"):
        yield


def measured(method: str, settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Processor seconds of runs of a method, by how the frozen part is computed."""

    def run(way: str, seed: int = 0) -> float:
        began = time.process_time()
        bench.run(method, "own_images", seed=seed, task_settings=settings, out=folder / way)
        return time.process_time() - began

    with every_epoch():
        before = run("before")
    return {"method": method, "in_every_epoch": before, "once": run("after"), "next_seed": run("after", 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("methods", nargs="*", default=["map", "mfvi"], metavar="METHOD")
    parser.add_argument("--images", type=int, default=300, help="number of pictures")
    parser.add_argument("--size", type=int, default=64, help="their height and width in pixels")
    parser.add_argument("--epochs", type=int, default=40, help="of every fit")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        settings = {"folder": str(written(folder, given.images, given.size)), "size": given.size}
        settings |= {"network": "frozen:resnet18", "freeze": True, "epochs": given.epochs}
        rows = []
        for method in given.methods:
            with patch.object(places, "CACHE_ROOT", folder / method / "cache"):
                rows.append(measured(method, settings, folder / method))
        print_table(rows)


if __name__ == "__main__":
    main()
