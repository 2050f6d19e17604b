"""What a method asks of a network: gradients per training step, forward passes per prediction.

    python benchmarks/passes.py docs/tasks/shift.yaml docs/tasks/ood.yaml [--json FILE]

Counted are the floating-point operations of products and convolutions, by torch's own counter, in units of
the plain network's: of a training step of `map`, and of its prediction. So a method that draws four weights
a step has 4 gradients, whatever it says of itself, and work that is no pass of the network (a product of
factors, the power iterations of a norm) counts by its size. What a fit does beside its steps, such as a
covariance after them, is spread over the steps that the task poses. A prediction has the task's number of
weight samples. Counts are the same on every machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timing import write
from trajectory import operations

from bench.contract import Budget, Problem
from bench.engine.engine import Engine
from bench.engine.trainer import TrainerOptions
from bench.errors import UsageError
from bench.runs.plan import Plan
from bench.runs.resolution import resolve
from bench.sweep import sweep


def counted(plan: Plan) -> tuple[float, int]:
    """Operations of a training step, the rest of the fit spread over the steps, and of a prediction.

    Raises:
        UsageError: If the method cannot infer the task's problem.
    """
    choice = resolve(plan)
    posed: Any = choice.task.cls(choice.task_settings, plan.data_dir)
    own, problem = posed.settings, posed.problem()
    steps = own.epochs * -(-(own.num_train or len(problem.train)) // own.batch_size)
    options, members = TrainerOptions(accelerator="cpu"), plan.members or choice.method.members

    def fit(number: int, problem: Problem) -> Any:
        """A fit of so many steps."""
        engine = Engine(choice.method.cls, choice.method_settings, 0, None, options, members)
        return engine.fit(problem, Budget(1, own.batch_size, draws=number * own.batch_size))

    unwatched = replace(problem, val=None)  # validation is no work of a method, unless it chooses by it
    try:
        fit(1, unwatched)
    except UsageError:
        unwatched = problem
    few, many = (operations(partial(fit, number, unwatched)) for number in (1, 3))
    step = (many - few) / 2
    fitted, batch = fit(1, unwatched), problem.train.tensors[0][: own.batch_size]
    generator = torch.Generator().manual_seed(0)
    return step + (few - step) / steps, operations(lambda: fitted.predict(batch, own.test_samples, generator))


def rows(plans: Sequence[Plan]) -> Iterator[dict[str, Any]]:
    """A row for every method and task, in units of `map` on that task, and the settings that it is of."""
    unit = {task: counted(Plan(method="map", task=task)) for task in {plan.task for plan in plans}}
    for plan in plans:
        (gradient, forward), (step, prediction) = unit[plan.task], counted(plan)
        told = {"gradients": round(step / gradient, 4), "forward": round(prediction / forward, 4)}
        own = {"settings": asdict(resolve(plan).method_settings)}
        yield {"task": plan.task, "method": plan.method} | told | own


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("grids", nargs="+", type=Path, help="files of bench sweep, with tasks of pictures")
    parser.add_argument("--json", type=Path, help="file for the rows (benchmarks/passes.json)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    plans = {(p.task, p.method): p for grid in arguments.grids for p in sweep.read(grid)}
    found = []
    for row in rows(list(plans.values())):
        found.append(row)
        print(row, flush=True)
    if arguments.json:
        write(arguments.json, {"rows": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
