"""What every method costs: a training step and its memory, in units of a deterministic step.

    python benchmarks/methods.py [--rounds 15] [--json FILE]

A step is zero grad, the method's training step, backward and its optimiser's step, one thread. The unit is
the step of `map` on the same network and batch, which takes turns with the method. Memory is what tensors
occupy at the peak of a step (parameters, buffers, state of the optimiser and all that the step allocates, as
the profiler counts it). `after` is the time of `finish_fit` on 1,000 examples, in the same unit. `numbers` is
what a fitted method stores per weight of the network. What a method refuses is left out, with its reason.

Networks: a small one that every method can hold, an MLP and a CNN.
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from pathlib import Path

import torch
from memory import peak as peak_of
from timing import Step, interleaved, median, ratio, write
from torch.utils.data import TensorDataset

from bench import likelihoods, networks, priors
from bench.batches import batches
from bench.contract import Batch, Budget, Method, Problem
from bench.errors import UsageError
from bench.runs.registry import Entry, methods

ROWS = 1000


def line_of(columns: int, outputs: int) -> partial:
    """A network without hidden layer."""
    return partial(networks.mlp, columns, outputs, ())


def problem(name: str) -> tuple[Problem, Batch]:
    """A problem on random examples, and a batch of it."""
    torch.manual_seed(0)
    if name == "MLP 1-100-1, B 250":
        inputs, targets = torch.randn(ROWS, 1), torch.randn(ROWS, 1)
        network, likelihood, size = partial(networks.mlp, 1, 1, (100,)), likelihoods.Gaussian(0.1), 250
    elif name == "linear 100-1, B 250":
        inputs, targets = torch.randn(ROWS, 100), torch.randn(ROWS, 1)
        network, likelihood, size = line_of(100, 1), likelihoods.Gaussian(0.1), 250
    else:
        inputs, targets = torch.rand(ROWS, 1, 28, 28), torch.randint(10, (ROWS,))
        likelihood = likelihoods.Categorical()
        mlp = partial(networks.mlp, 784, 10, (256, 256))
        network, size = (mlp, 128) if name.startswith("MLP 784") else (networks.lenet, 64)
    data = TensorDataset(inputs, targets)
    posed = Problem(network, likelihood, priors.normal(), data, None, ROWS)
    return posed, Batch(inputs[:size], targets[:size])


NETWORKS = ("linear 100-1, B 250", "MLP 1-100-1, B 250", "MLP 784-256-256-10, B 128", "LeNet, B 64")


def make(entry: Entry, posed: Problem) -> Method:
    """The method with the settings that its name stands for, ready to step."""
    torch.manual_seed(1)
    method = entry.cls(posed, entry.cls.settings_class(**entry.fixed))
    method.spends(Budget(epochs=10))
    return method


def step_of(method: Method, batch: Batch) -> tuple[Step, list[torch.Tensor]]:
    """A training step, and the tensors that stay between steps."""
    made = method.configure_optimizers()
    optimizer = made["optimizer"] if isinstance(made, dict) else made
    if isinstance(optimizer, tuple | list):
        optimizer = optimizer[0][0]

    def step() -> None:
        if optimizer is None:  # a sampler: its step is a transition of all chains
            method.training_step(batch, 0)
            return
        optimizer.zero_grad(set_to_none=True)
        method.training_step(batch, 0)["loss"].backward()
        optimizer.step()

    step()
    state = [] if optimizer is None else [v for s in optimizer.state.values() for v in s.values()]
    kept = [t for t in [*method.parameters(), *method.buffers(), *state] if torch.is_tensor(t)]
    return step, kept


def peak(step: Step, kept: list[torch.Tensor]) -> int:
    """Bytes of all tensors at the peak of a step."""
    for tensor in kept:
        tensor.grad = None
    return peak_of(step) + sum(t.numel() * t.element_size() for t in kept)


def row(name: str, entry: Entry, rounds: int) -> dict:
    """One method on one network, in units of `map` there."""
    posed, batch = problem(name)
    about = {"network": name, "method": entry.name}
    try:
        method = make(entry, posed)
    except UsageError as error:
        return about | {"refused": str(error)}
    stored = sum(t.numel() for t in (*method.parameters(), *method.buffers()))
    about["numbers"] = stored / sum(p.numel() for p in method.network.parameters())
    unit, unit_kept = step_of(make(methods()["map"], posed), batch)
    if method.trains:
        step, kept = step_of(method, batch)
        measured = interleaved({"map": unit, "method": step}, rounds)
        about["step"] = ratio(measured, "method", "map")
        about["milliseconds"] = 1000 * median(measured["method"])
        about["memory"] = peak(step, kept) / peak(unit, unit_kept)
        unit_seconds = median(measured["map"])
    else:
        unit_seconds = median(interleaved({"map": unit}, rounds)["map"])
    if type(method).finish_fit is not Method.finish_fit:
        loader = batches(posed.train, len(batch.inputs), seed=0)
        began = time.process_time()
        method.finish_fit(loader)
        about["after"] = (time.process_time() - began) / unit_seconds
    return about


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds of every comparison")
    parser.add_argument("--json", type=Path, help="file for the rows (benchmarks/methods.json)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in NETWORKS:
        for entry in methods().values():
            if entry.members > 1:
                continue  # as many steps as members, by construction
            rows.append(row(name, entry, arguments.rounds))
            print(rows[-1], flush=True)
    if arguments.json:
        write(arguments.json, {"rounds": arguments.rounds, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
