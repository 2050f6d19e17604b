"""What `map` has on a shift task, found again by a loop in plain torch: its own batches, loss and scores.

    python benchmarks/bare_loop.py shift_digits [--seeds 3] [--json FILE]

The loop takes from the suite the network, the images and their corruptions. Fit and scores are written out
here: Adam, cross-entropy plus the prior's squared weights, whole epochs in a new order. Numbers of a seed
cannot agree with those of `map`, whose batches and initial weights are others; means over the seeds must.

With --json a task's seeds are kept beside those of other tasks. `docs/tasks/shift.md` compares them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from timing import print_table, write
from torch import Tensor, nn
from torch.nn import functional

from bench import corruptions, registry
from bench.settings import build
from bench.studies.pictures import normalised

LEARNING_RATE = 1e-3
"""That of `map`."""


def fit(task: Any, seed: int) -> nn.Module:
    """A network fitted to the training images of a task of `tasks/shift.py`."""
    torch.manual_seed(seed)
    network = task.problem().network().to(memory_format=torch.channels_last)
    inputs, labels = task.examples("train").tensors
    optimizer = torch.optim.Adam(network.parameters(), LEARNING_RATE)
    drawn = task.settings.num_train or len(labels)
    for epoch in range(task.settings.epochs):
        orders = [torch.randperm(len(labels)) for _ in range(-(-drawn // len(labels)))]
        for rows in torch.cat(orders)[:drawn].split(task.settings.batch_size):
            squares = sum(weight.square().sum() for weight in network.parameters())
            loss = functional.cross_entropy(network(inputs[rows]), labels[rows]) + squares / (2 * len(labels))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"seed {seed}, epoch {epoch + 1} of {task.settings.epochs}: {loss.item():.4f}", flush=True)
    return network.eval()


@torch.no_grad()
def loss_and_hits(network: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Mean of -log p(label) in nats, and the share of images that are read rightly, `[2]`."""
    log_probs = torch.cat([network(part) for part in images.split(500)]).log_softmax(1)
    hits = (log_probs.argmax(1) == labels).double()
    return torch.stack([-log_probs.gather(1, labels[:, None]).double().mean(), hits.mean()])


def scores(task: Any, network: nn.Module) -> dict[str, float]:
    """NLL and accuracy of clean test images, and in the mean over corruptions and severities."""
    test, labels = task.test, torch.from_numpy(task.targets()["labels"]).long()

    def of(images: Any) -> Tensor:
        return loss_and_hits(network, normalised(torch.from_numpy(images), *task.moments), labels)

    numbers = range(len(test))
    shifted = [
        of(corruptions.numbered(test, kind, severity, numbers))
        for severity in task.severities
        for kind in corruptions.KINDS
    ]
    names = ("nll_clean", "accuracy_clean", "nll", "accuracy")
    return dict(zip(names, torch.cat([of(test), torch.stack(shifted).mean(0)]).tolist(), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", help="of tasks/shift.py")
    parser.add_argument("--seeds", type=int, default=3, help="how many: 0, 1, ...")
    parser.add_argument("--data-dir", help="folder of data sets")
    parser.add_argument(
        "--json", type=Path, help="file that the seeds are added to (benchmarks/bare_loop.json)"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    entry = registry.task(options.task)
    task = entry.cls(build(entry.cls.settings_class, entry.fixed, "task"), options.data_dir)
    found = [scores(task, fit(task, seed)) for seed in range(options.seeds)]
    print_table(found)
    if options.json:
        known = json.loads(options.json.read_text())["tasks"] if options.json.exists() else {}
        write(options.json, {"tasks": known | {options.task: found}})


if __name__ == "__main__":
    main()
