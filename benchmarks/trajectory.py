"""What bounds a trajectory of `active_mnist`: its parts beside what their multiplications alone would take.

    python benchmarks/trajectory.py [--method radial] [--json FILE]

A trajectory of the preset standard is 123 fits of 20 epochs at most (all but a few end there), each with a
validation, 60 scores of the pool, and 63 predictions of the test set. A call of every part is timed with one
thread, in turns with a product of two square matrices, and counted by torch's counter of floating-point
operations. The least that a part can take, with the same numbers, is what they take at the product's speed.
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
from torch.utils.flop_counter import FlopCounterMode

from bench.contract import Batch
from bench.runs.plan import Plan
from bench.runs.resolution import resolve
from bench.studies import active
from bench.tasks import active_learning

SIZE = 512
"""Rows of the matrices whose product has the speed that nothing exceeds; 3 MiB, which stay in the cache."""
POINTS = 40
"""Points of the fit that is timed: the mean over a trajectory from 10 to 70."""
AT_ONCE = 10
"""Weight samples of a score that are timed."""
ROUNDS = 7


Part = tuple[Callable[[], object], int]
"""One call of a part, and how many such calls a trajectory has."""


def calls(plan: Plan) -> dict[str, Part]:
    """The parts of a trajectory by name."""
    choice = resolve(plan)
    task = choice.task.cls(choice.task_settings, plan.data_dir)
    own, data, generator = task.settings, task.data, torch.Generator().manual_seed(0)
    oracle = active.Oracle(data.pool_labels)
    problem = task.problem(active.at_random(POINTS, oracle, len(data.pool), generator))
    method = choice.method.cls(problem, choice.method_settings)
    rows = torch.randint(POINTS, (active_learning.BATCH_SIZE,), generator=generator)
    batch = Batch(*(tensor[rows] for tensor in problem.train.tensors))
    tests = len({*range(0, own.acquired, active_learning.EVERY), own.acquired})
    epochs = own.epochs * (own.acquired + len(active.OBJECTIVES) * tests)
    steps = epochs * -(-active_learning.DRAWS // active_learning.BATCH_SIZE)
    held_out = data.val.tensors[0]

    def step() -> None:
        method.zero_grad()
        method.training_step(batch, 0)["loss"].backward()

    def predict(images: torch.Tensor, samples: int) -> None:
        method.predict(images, samples, generator)

    tested = torch.cat([data.test, held_out])
    return {
        "training steps": (step, steps),
        "validations": (partial(predict, held_out, method.validation_samples), epochs),
        f"scores of the pool, {AT_ONCE} samples": (
            partial(predict, data.pool, AT_ONCE),
            own.acquired * own.acquisition_samples // AT_ONCE,
        ),
        "tests": (partial(predict, tested, own.test_samples), len(active.OBJECTIVES) * tests),
    }


def operations(run: Callable[[], object]) -> int:
    """Floating-point operations of products and convolutions in one call."""
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def measure(parts: dict[str, Part], rounds: int = ROUNDS) -> dict:
    """Minutes of every part, and the least that they can be."""
    matrix = torch.randn(SIZE, SIZE)
    speed = "product"
    runs = {speed: lambda: matrix @ matrix} | {part: run for part, (run, _) in parts.items()}
    seconds = {name: median(of) for name, of in interleaved(runs, rounds, clock=time.perf_counter).items()}
    per_second = 2 * SIZE**3 / seconds[speed]
    rows = []
    for part, (run, count) in parts.items():
        least = operations(run) / per_second
        rows.append(
            {
                "part": part,
                "calls": round(count),
                "ms": round(1e3 * seconds[part], 2),
                "ms at the speed of a product": round(1e3 * least, 2),
                "minutes": round(seconds[part] * count / 60, 1),
                "minutes at the speed of a product": round(least * count / 60, 1),
            }
        )
    rows.append({"part": "all", "calls": "", "ms": "", "ms at the speed of a product": ""})
    for column in ("minutes", "minutes at the speed of a product"):
        rows[-1][column] = round(sum(row[column] for row in rows[:-1]), 1)
    return {"gflops_of_a_product": round(per_second / 1e9, 1), "parts": rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", default="radial", help="a method that trains (radial)")
    parser.add_argument("--json", type=Path, help="file for the numbers (benchmarks/trajectory.json)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(calls(Plan(method=arguments.method, task="active_mnist")))
    print_table(found["parts"])
    print(f"a product of matrices: {found['gflops_of_a_product']} GFLOP/s")
    if arguments.json:
        write(arguments.json, {"method": arguments.method} | found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
