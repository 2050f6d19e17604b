"""Whether `map` on a shift task is what plain torch gives: a loop with steps, loss and scores of its own.

    python benchmarks/bare_loop.py shift_digits [--draws torch] [--seeds 3] [--json FILE]

The loop takes from the suite the network, the images and their corruptions. Fit and scores are written out
here: Adam, cross-entropy plus the prior's squared weights, whole epochs. With the draws of `map` it starts
from the weights of `map` at the same seed and takes its batches, so that seed by seed only rounding may tell
the two apart. With nudged ones it starts a part in 10^7 away: the loop beside itself says how far rounding
parts two fits. `fused` are the draws of `map` with Adam as the one kernel that `map` takes. With those of
torch it draws both itself: means over seeds say whether the suite's draws are as good.

With --json each seed is kept at once, beside those of other tasks, draws, processors and rates of learning.
`docs/tasks/shift.md` compares them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from timing import print_table, processor, write
from torch import Tensor, nn
from torch.nn import functional

from bench import corruptions, randomness
from bench.batches import batches
from bench.runs import registry, resolution
from bench.settings import build
from bench.studies.pictures import normalised


def rate_of_map(task: registry.Entry) -> float:
    """That of `map` under its preset for the task."""
    values = resolution.preset_values(registry.method("map"), task, "standard")[0]
    return float(values.get("learning_rate", 1e-3))


def drawn_by_map(task: Any, seed: int) -> tuple[nn.Module, Iterator[Tensor]]:
    """The network before the fit of `map`, and the rows of its batches, epoch by epoch."""
    entry, problem, own = registry.method("map"), task.problem(), task.settings
    with randomness.seeded(seed, "initialise", "fit", 0):
        network = entry.cls.made_for(problem, build(entry.cls.settings_class, entry.fixed, "method")).network
    shuffle = randomness.derive(seed, "shuffle", "fit", 0)
    order = batches(problem.train, own.batch_size, shuffle, draws=own.num_train)

    def rows() -> Iterator[Tensor]:
        for epoch in range(own.epochs):
            order.set_epoch(epoch)
            yield from (order.order() % order.size).split(own.batch_size)

    return network, rows()


def drawn_by_torch(task: Any, seed: int) -> tuple[nn.Module, Iterator[Tensor]]:
    """A new network, and rows of batches in orders that follow from the same global seed."""
    torch.manual_seed(seed)
    own, problem = task.settings, task.problem()
    network, size = problem.network(), len(problem.train)

    def rows() -> Iterator[Tensor]:
        drawn = own.num_train or size
        for _ in range(own.epochs):
            orders = [torch.randperm(size) for _ in range(-(-drawn // size))]
            yield from torch.cat(orders)[:drawn].split(own.batch_size)

    return network, rows()


def nudged(task: Any, seed: int) -> tuple[nn.Module, Iterator[Tensor]]:
    """As those of `map`, but every initial weight larger by a part in 10^7, the size of rounding."""
    network, rows = drawn_by_map(task, seed)
    with torch.no_grad():
        for weight in network.parameters():
            weight.mul_(1 + 1e-7)
    return network, rows


DRAWS = {"map": drawn_by_map, "fused": drawn_by_map, "nudged": nudged, "torch": drawn_by_torch}


def fit(task: Any, draws: str, seed: int, rate: float = 1e-3) -> nn.Module:
    """A network fitted to the training images of a task of `tasks/shift.py`, in steps of a rate.

    With the draws `fused` Adam is the one kernel that `map` takes, so that on one processor the two have the
    same numbers to the last bit; with all others it is torch's default, the same formula in other roundings.
    """
    network, order = DRAWS[draws](task, seed)
    network = network.to(memory_format=torch.channels_last)
    inputs, labels = task.examples("train").tensors
    optimizer = torch.optim.Adam(network.parameters(), rate, fused=draws == "fused")
    for rows in order:
        squares = sum(weight.square().sum() for weight in network.parameters())
        loss = functional.cross_entropy(network(inputs[rows]), labels[rows]) + squares / (2 * len(labels))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"seed {seed}: the last batch has a loss of {loss.item():.4f}", flush=True)
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
    parser.add_argument(
        "--draws",
        choices=DRAWS,
        default="map",
        help="initial weights, batches; of fused, Adam's kernel",
    )
    parser.add_argument("--seeds", type=int, default=3, help="how many: 0, 1, ...")
    parser.add_argument("--rate", type=float, help="of learning; unless given that of `map` on the task")
    parser.add_argument("--data-dir", help="folder of data sets")
    parser.add_argument(
        "--json", type=Path, help="file that the seeds are added to (benchmarks/bare_loop.json)"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    entry = registry.task(options.task)
    task = entry.cls(build(entry.cls.settings_class, entry.fixed, "task"), options.data_dir)
    rate, found = options.rate or rate_of_map(entry), list[dict[str, Any]]()
    for seed in range(options.seeds):
        network = fit(task, options.draws, seed, rate)
        found.append({"seed": seed, "device": processor(), "rate": rate} | scores(task, network))
        if options.json:
            keep(options.json, options.task, options.draws, found[-1])
    print(f"a rate of {rate:g}")
    print_table([{name: value for name, value in run.items() if name != "rate"} for run in found])


def keep(path: Path, task: str, draws: str, run: dict[str, Any]) -> None:
    """Adds a seed to a file, in place of the same seed at the same rate on the same processor."""
    tasks = json.loads(path.read_text())["tasks"] if path.exists() else {}
    own = tasks.setdefault(task, {})
    same = ("seed", "device", "rate")
    others = [old for old in own.get(draws, []) if any(old.get(name) != run[name] for name in same)]
    own[draws] = [*others, run]
    write(path, {"tasks": tasks})


if __name__ == "__main__":
    main()
