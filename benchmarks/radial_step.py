"""Time of a training step of radial against one of mc_dropout, on the VGG-16 of retinopathy.

    python benchmarks/radial_step.py [--size 128] [--channels 64] [--batch 16] [--device cpu]
        [--precision 32-true] [--rounds 20] [--json FILE] [--check]

A step is zero grad, noise or masks, `loss_terms` with S = 1, backward and the fused Adam, as in training.
mc_dropout has all channels. radial has as many (equal width), and then as many as give it the number of
trained parameters of mc_dropout (equal parameters), as a problem with `equal_parameters` poses it.

The contenders take turns, so that another program's load falls on all of them; a time is the median over the
rounds, a ratio the median of the rounds' ratios. On a CPU it is one thread and the process's own time, which
on an idle machine is what passes; on a GPU it is the clock's, up to the end of the device's work. Peak memory
is that of the GPU, of the contender alone; for a CPU it is null.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from timing import Step, interleaved, median, print_table, ratio, write
from torch.utils.data import TensorDataset

from bench import networks, priors
from bench.contract import Batch, Method, Problem
from bench.engine import trainer
from bench.likelihoods import Bernoulli
from bench.methods.mc_dropout import MCDropout
from bench.methods.radial import Radial

FLOOR = "mc_dropout"
LARGEST_RATIO = {"radial, equal width": 1.3, "radial, equal parameters": 0.8}
"""Targets: time over that of mc_dropout."""
NUM_TRAIN = 35_126
"""Photographs of the competition, by which the loss is scaled."""


def problem_of(channels: int, size: int, batch: int, device: str) -> Problem:
    """Photographs of noise, as many as a batch has, on the device."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(batch, 3, size, size).to(device), torch.arange(batch).to(device) % 2)
    network = partial(networks.vgg16, channels)
    return Problem(network, Bernoulli(), priors.normal(), data, None, NUM_TRAIN)


def methods_of(problem: Problem) -> dict[str, Callable[[], Method]]:
    """What makes the method of each contender."""
    settings = Radial.settings_class()
    fair = replace(problem, equal_parameters=True)
    return {
        FLOOR: lambda: MCDropout(problem, MCDropout.settings_class()),
        "radial, equal width": lambda: Radial(problem, settings),
        "radial, equal parameters": lambda: Radial.made_for(fair, settings),
    }


def step_of(method: Method, precision: str, device: str) -> Step:
    """One training step of the method on all photographs of its problem."""
    method.to(device)
    method.generator = torch.Generator(device).manual_seed(0)
    optimizer = method.configure_optimizers()
    batch = Batch(*method.problem.train.tensors)
    mixed = partial(torch.autocast, device, torch.bfloat16, enabled=precision == "bf16-mixed")

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with mixed():
            loss = method.training_step(batch, 0)["loss"]
        loss.backward()
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()

    return step


def trained(method: Method) -> int:
    """Number of trained parameters."""
    return sum(p.numel() for p in method.parameters() if p.requires_grad)


def peak_gigabytes(make: Callable[[], Method], precision: str) -> float:
    """Most memory of the GPU that three steps take, parameters and optimiser included, in GiB."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step = step_of(make(), precision, "cuda")
    for _ in range(3):
        step()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def rows_of(problem: Problem, precision: str, device: str, rounds: int) -> list[dict]:
    """One row per contender."""
    makers = methods_of(problem)
    peaks = {name: peak_gigabytes(make, precision) for name, make in makers.items() if device == "cuda"}
    methods = {name: make() for name, make in makers.items()}
    steps = {name: step_of(method, precision, device) for name, method in methods.items()}
    clock = time.process_time if device == "cpu" else time.perf_counter
    measured = interleaved(steps, rounds, clock=clock)
    rows = []
    for name, method in methods.items():
        to_floor = ratio(measured, name, FLOOR)
        rows.append(
            {
                "method": name,
                "channels": method.network[0].out_channels,
                "parameters": trained(method),
                "milliseconds": 1000 * median(measured[name]),
                "fastest_milliseconds": 1000 * min(measured[name]),
                "images_per_second": len(problem.train) / median(measured[name]),
                "ratio_to_mc_dropout": to_floor,
                "peak_gib": peaks.get(name),
                "missed": to_floor > LARGEST_RATIO.get(name, float("inf")),
            }
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=128, help="pixels of a side of the photographs")
    parser.add_argument("--channels", type=int, default=64, help="of the first convolution of mc_dropout")
    parser.add_argument("--batch", type=int, default=16, help="photographs a step")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--precision", choices=("32-true", "bf16-mixed"), default="32-true")
    parser.add_argument("--rounds", type=int, default=20, help="interleaved rounds, at least 1")
    parser.add_argument(
        "--json", type=Path, help="file for the rows (the committed one is benchmarks/radial_step.json)"
    )
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    trainer.keep_memory()
    problem = problem_of(arguments.channels, arguments.size, arguments.batch, arguments.device)
    rows = rows_of(problem, arguments.precision, arguments.device, arguments.rounds)
    print_table(rows)
    if arguments.json:
        content = {
            "rounds": arguments.rounds,
            "size": arguments.size,
            "batch_size": arguments.batch,
            "samples": 1,
            "precision": arguments.precision,
            "cases": rows,
        }
        write(arguments.json, content, arguments.device)
    return int(arguments.check and any(row["missed"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
