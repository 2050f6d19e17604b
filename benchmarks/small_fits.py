"""What a small fit costs beyond its steps, and whether many fits are faster together than alone.

    python benchmarks/small_fits.py [--rounds 30] [--device cpu] [--json FILE] [--check]

First table: a fit through `bench.engine.engine.Engine` against a bare loop over the same method and batches,
10 and 110 steps; `--check` demands at most 15 ms per fit of 10 steps beyond its steps, and 0.5 ms per step.

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

import torch
from timing import interleaved, median, print_table, write
from torch.utils.data import TensorDataset

from bench import networks, priors
from bench.batches import batches
from bench.contract import Budget, NetworkFactory, Problem
from bench.engine.engine import Engine, TrainerOptions
from bench.likelihoods import Categorical
from bench.methods.mfvi import MFVI

LARGEST_EXTRA_PER_FIT = 15.0
LARGEST_EXTRA_PER_STEP = 0.5
TIE = 1.05


def problem_of(network: NetworkFactory, shape: tuple[int, ...], rows: int) -> Problem:
    """Random examples of ten classes."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(rows, *shape), torch.randint(10, (rows,)))
    return Problem(network, Categorical(), priors.normal(), data, None, rows)


# ------------------------------------------------------------------------------- beyond the steps of a fit


def overhead(rounds: int) -> list[dict]:
    """Milliseconds of a fit through the engine and of a bare loop, on the processor."""
    problem = problem_of(partial(networks.mlp, 784, 10, (50,)), (1, 28, 28), 320)
    rows = []
    for epochs in (1, 11):

        def by_engine(epochs: int = epochs) -> None:
            Engine(MFVI, MFVI.settings_class(), 0, None, TrainerOptions(accelerator="cpu")).fit(
                problem, Budget(epochs, 32)
            )

        def by_loop(epochs: int = epochs) -> None:
            method = MFVI(problem, MFVI.settings_class())
            optimizer = method.configure_optimizers()
            loader = batches(problem.train, 32, seed=0)
            for epoch in range(epochs):
                loader.set_epoch(epoch)  # type: ignore[union-attr]
                for i, batch in enumerate(loader):
                    optimizer.zero_grad(set_to_none=True)
                    method.training_step(batch, i)["loss"].backward()
                    optimizer.step()

        measured = interleaved({"engine": by_engine, "loop": by_loop}, rounds)
        extra = median(a - b for a, b in zip(measured["engine"], measured["loop"], strict=True))
        rows.append(
            {
                "steps": 10 * epochs,
                "engine_milliseconds": 1000 * median(measured["engine"]),
                "loop_milliseconds": 1000 * median(measured["loop"]),
                "extra_milliseconds": 1000 * extra,
            }
        )
    return rows


def per_step(rows: list[dict]) -> float:
    """Milliseconds beyond the loop for each further step."""
    short, long = rows
    return (long["extra_milliseconds"] - short["extra_milliseconds"]) / (long["steps"] - short["steps"])


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
    first = overhead(arguments.rounds)
    print_table(first)
    slope = per_step(first)
    print(f"\nA fit of 10 steps costs {first[0]['extra_milliseconds']:.1f} ms beyond its steps,")
    print(f"each further step {slope:.2f} ms.\n")
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
