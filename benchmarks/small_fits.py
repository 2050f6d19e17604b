"""What a small fit costs beyond its steps, and whether many fits are faster together than alone.

    python benchmarks/small_fits.py [--rounds 30] [--device cpu] [--json FILE] [--check]

First table: a fit through `bench.engine.engine.Engine` against a bare loop over the same method and batches,
10 and 110 steps; `--check` demands at most 10 ms per fit of 10 steps beyond its steps, and 0.25 ms per step.

Second table: 45 fits of an MLP with 50 hidden units on 70 points, through `fit_many` one after another,
through `fit_many` side by side (`--trainer.stacked true`), and as 45 single calls of `fit`; and 9 fits of
LeNet. `--check` demands that `fit_many` is not slower than the single fits, ties of 5% allowed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import quantiles

import torch
from timing import interleaved, median, print_table, write
from torch.utils.data import TensorDataset

from bench import networks, priors
from bench.batches import batches
from bench.contract import Budget, NetworkFactory, Problem
from bench.engine.engine import Engine, TrainerOptions
from bench.likelihoods import Categorical
from bench.methods.mfvi import MFVI

LARGEST_EXTRA_PER_FIT = 10.0
LARGEST_EXTRA_PER_STEP = 0.25
"""Goals: milliseconds beyond a bare loop."""
TIE = 1.05


def problem_of(network: NetworkFactory, shape: tuple[int, ...], rows: int) -> Problem:
    """Random examples of ten classes."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(rows, *shape), torch.randint(10, (rows,)))
    return Problem(network, Categorical(), priors.normal(), data, None, rows)


# ------------------------------------------------------------------------------- beyond the steps of a fit


def overhead(rounds: int) -> tuple[list[dict], dict[str, float]]:
    """Milliseconds of fits through the engine and of bare loops, on the processor, and of each further step.

    All take turns in every round; what is told is the median over the rounds, and its quartiles.
    """
    problem = problem_of(partial(networks.mlp, 784, 10, (50,)), (1, 28, 28), 320)

    def by_engine(epochs: int) -> None:
        engine = Engine(MFVI, MFVI.settings_class(), 0, None, TrainerOptions(accelerator="cpu"))
        engine.fit(problem, Budget(epochs, 32))

    def by_loop(epochs: int) -> None:
        method = MFVI(problem, MFVI.settings_class())
        optimizer = method.configure_optimizers()
        loader = batches(problem.train, 32, seed=0)
        for epoch in range(epochs):
            loader.set_epoch(epoch)
            for i, batch in enumerate(loader):
                optimizer.zero_grad(set_to_none=True)
                method.training_step(batch, i)["loss"].backward()
                optimizer.step()

    lengths = (1, 11)  # epochs of ten steps
    contenders = {f"{n}": partial(by_engine, n) for n in lengths} | {
        f"{n} bare": partial(by_loop, n) for n in lengths
    }
    measured = interleaved(contenders, rounds)
    extra = {
        n: [a - b for a, b in zip(measured[f"{n}"], measured[f"{n} bare"], strict=True)] for n in lengths
    }
    rows = [
        {
            "steps": 10 * n,
            "engine_milliseconds": 1000 * median(measured[f"{n}"]),
            "loop_milliseconds": 1000 * median(measured[f"{n} bare"]),
        }
        | spread("extra", extra[n])
        for n in lengths
    ]
    short, long = extra.values()
    return rows, spread("extra", [(b - a) / 100 for a, b in zip(short, long, strict=True)])


def spread(name: str, seconds: list[float]) -> dict[str, float]:
    """Median and quartiles, in milliseconds."""
    low, middle, high = (1000 * value for value in quantiles(seconds, n=4, method="inclusive"))
    return {f"{name}_milliseconds": middle, f"{name}_lower": low, f"{name}_upper": high}


# -------------------------------------------------------------------------------------- many fits at once


def wall(run: Callable[[], object], device: str) -> float:
    """Seconds that pass until the device is done."""
    began = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def many(rounds: int, device: str) -> list[dict]:
    """Seconds of many fits: alone, through `fit_many`, and side by side."""
    rows = []
    cases = {
        "MLP 784-50-10, 45 fits on 70 points": (partial(networks.mlp, 784, 10, (50,)), 45, 20),
        "LeNet, 9 fits on 70 points": (networks.lenet, 9, 5),
    }
    accelerator = "gpu" if device == "cuda" else "cpu"
    for name, (network, count, epochs) in cases.items():
        problems = [problem_of(network, (1, 28, 28), 70)] * count
        budget = Budget(epochs, 64)

        def engine(stacked: bool = False) -> Engine:
            options = TrainerOptions(accelerator=accelerator, devices=1, stacked=stacked)
            return Engine(MFVI, MFVI.settings_class(), 0, None, options)

        ways = {
            "single": lambda p=problems, b=budget: [engine().fit(problem, b) for problem in p],
            "fit_many": lambda p=problems, b=budget: engine().fit_many(p, b),
            "stacked": lambda p=problems, b=budget: engine(stacked=True).fit_many(p, b),
        }
        for way in ways.values():
            wall(way, device)
        order = list(ways)
        measured: dict[str, list[float]] = {way: [] for way in order}
        for i in range(rounds):
            for way in order[i % 3 :] + order[: i % 3]:
                measured[way].append(wall(ways[way], device))
        relative = {
            way: median(a / b for a, b in zip(measured[way], measured["single"], strict=True))
            for way in ("fit_many", "stacked")
        }
        rows.append(
            {"case": name, "steps_per_fit": 2 * epochs}
            | {f"{way}_seconds": median(times) for way, times in measured.items()}
            | {f"{way}_to_single": value for way, value in relative.items()}
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30, help="interleaved rounds of the first table")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where many fits run")
    parser.add_argument("--json", type=Path, help="file for the rows (benchmarks/small_fits.json)")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    first, step = overhead(arguments.rounds)
    print_table(first)
    slope = step["extra_milliseconds"]
    print(f"\nA fit of 10 steps costs {first[0]['extra_milliseconds']:.1f} ms beyond its steps,")
    print(f"each further step {slope:.2f} ms ({step['extra_lower']:.2f} to {step['extra_upper']:.2f}).\n")
    second = many(max(3, arguments.rounds // 5), arguments.device)
    print_table(second)
    if arguments.json:
        found = {"overhead": first, "extra_milliseconds_per_step": slope, "many": second}
        write(arguments.json, found, arguments.device)
    missed = first[0]["extra_milliseconds"] > LARGEST_EXTRA_PER_FIT or slope > LARGEST_EXTRA_PER_STEP
    missed |= any(row["fit_many_to_single"] > TIE for row in second)
    return int(arguments.check and missed)


if __name__ == "__main__":
    sys.exit(main())
