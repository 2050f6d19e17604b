"""Whether reading photographs from disk keeps up with training on them.

    python benchmarks/feeding.py [--sizes 64 256 512] [--workers 0 2] [--device cpu] [--json FILE]

Images per second, by size: of the loader (random rows of a memory map of uint8, in batches of 16, with the
numbers of their augmentation), of what the device does to them before the network (augmentation and
normalisation), and of a training step of `map` on the VGG-16 of retinopathy: 64 channels on an accelerator,
16 on a CPU. Headroom is the loader's rate over the step's: above 1 the loader does not hold training up,
where it has a core of its own. Medians over the rounds by the clock; the file lies in the page cache.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from timing import median, print_table, write

from bench import likelihoods, networks, priors
from bench.batches import batches
from bench.contract import Batch, Problem
from bench.methods.map import MAP
from bench.studies.eyes import Eyes

BATCH, BATCHES = 16, 8
IMAGES = BATCH * BATCHES


def photographs(folder: Path, size: int) -> Eyes:
    """A memory map of random pixels, as prepared photographs lie on disk."""
    path = folder / f"{size}.u8"
    np.random.default_rng(0).integers(256, size=(IMAGES, size, size, 3), dtype=np.uint8).tofile(path)
    pixels = np.memmap(path, np.uint8, "r", shape=(IMAGES, size, size, 3))
    labels = np.arange(IMAGES) % 2
    return Eyes(pixels, labels, torch.full((3,), 0.5), torch.full((3,), 0.3))


def rate(work: Callable[[], object], images: int, rounds: int, device: torch.device) -> float:
    """Images per second, the median over the rounds, after one that is not counted."""
    rates = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        rates.append(images / (time.perf_counter() - began))
    return median(rates[1:])


def measured(
    eyes: Eyes, size: int, workers: list[int], device: torch.device, rounds: int
) -> dict[str, float]:
    """Rates of one size."""
    row: dict[str, float] = {"pixels": size}
    cpu = torch.device("cpu")
    for count in workers:
        loader = batches(eyes, BATCH, 0, device=cpu, workers=count)
        # What `finish` does is measured below, on the device.
        loader.examples = _Raw(eyes)  # type: ignore[union-attr]
        row[f"loader, {count} workers"] = rate(lambda loader=loader: list(loader), IMAGES, rounds, device)
    raw = eyes.read(torch.arange(BATCH))[0].to(device)
    uniforms = torch.rand(BATCH, eyes.num_uniforms).to(device)
    row["augmentation"] = rate(lambda: eyes.finish(raw, uniforms), BATCH, 4 * rounds, device)
    channels = 64 if device.type == "cuda" else 16
    network = partial(networks.vgg16, channels)
    problem = Problem(network, likelihoods.Bernoulli(), priors.normal(0, 1), eyes, None, IMAGES)
    method = MAP(problem, MAP.settings_class()).to(device)
    optimizer = method.configure_optimizers()
    batch = Batch(eyes.finish(raw, uniforms), eyes.read(torch.arange(BATCH))[1].to(device))

    def step() -> None:
        optimizer.zero_grad()
        sum(method.loss_terms(batch, {})).backward()  # type: ignore[union-attr]
        optimizer.step()

    row["training step"] = rate(step, BATCH, rounds, device)
    row["headroom"] = max(row[f"loader, {count} workers"] for count in workers) / row["training step"]
    return row


class _Raw(Eyes):
    """The same photographs, left as they are read."""

    def __init__(self, eyes: Eyes) -> None:
        super().__init__(eyes.images, eyes.labels.numpy(), eyes.mean, eyes.std)

    def finish(self, inputs: torch.Tensor, uniforms: torch.Tensor | None) -> torch.Tensor:
        return inputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 256, 512])
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=None, help="write the rows here")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            measured(photographs(Path(folder), size), size, chosen.workers, chosen.device, chosen.rounds)
            for size in chosen.sizes
        ]
    print_table(rows)
    if chosen.json:
        write(chosen.json, {"images per second": rows}, chosen.device.type)


if __name__ == "__main__":
    main()
