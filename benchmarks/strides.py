"""What compiling gains a sampler: a leapfrog step of `hmc`, eager and compiled, four and one in a piece.

    python benchmarks/strides.py

Processor time of one thread, in milliseconds a step and four chains, in networks without a prior's cost.
Compiled layers of few units are sums, of more units products: `products` has no sums, `sums` up to 16 units.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from unittest import mock

import torch
from timing import interleaved, median, print_table
from torch.utils.data import TensorDataset

from bench import likelihoods, networks, priors, weights
from bench.contract import Batch, Problem
from bench.engine import compiled
from bench.methods.hmc import HMC, Settings

CASES = [(2, 500, (4,) * 8), (2, 500, (8,) * 8), (2, 500, (16,) * 4), (1, 120, (50,))]
"""Inputs, examples, hidden units."""
FEW = weights._FEW_UNITS
WAYS = [("eager", 4, FEW), ("four", 4, FEW), ("one", 1, FEW), ("products", 4, 0), ("sums", 4, 16)]
"""Name, leapfrog steps in a piece, units of a layer up to which compiled code sums."""


def main() -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    rows = []
    for columns, examples, hidden in CASES:
        inputs = torch.randn(examples, columns)
        data = TensorDataset(inputs, (inputs[:, 0] > 0).long())
        network = partial(networks.mlp, columns, 1, hidden)
        problem = Problem(network, likelihoods.Bernoulli(), priors.normal(0, 1), data, None, examples)
        batch = Batch(*data.tensors)
        row: dict = {"network": f"{columns}-{'-'.join(map(str, hidden))}-1", "B": examples}
        for name, count, few in WAYS:
            method = HMC(problem, Settings())
            start = method.positions, torch.randn_like(method.positions), torch.full((4, 1), 1e-4), count
            with (
                mock.patch.object(weights, "_FEW_UNITS", few),
                nullcontext() if name == "eager" else compiled.compiling(method, lambda _: None),
            ):
                step = partial(method.stride, batch, method._normal(), *start)
                (times,) = interleaved({name: step}, 15).values()
            row[name] = 1000 * median(times) / count
        rows.append(row)
    print_table(rows)


if __name__ == "__main__":
    main()
