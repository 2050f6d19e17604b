"""Where the examples stand inside a stack of linear layers: last, as in `bench.weights`, or before the units.

    python benchmarks/stacks.py [--rounds 7]

The gradient of a loss over stacked weights, S samples and B examples, in turns; processor time of one thread.
The ratio is that of the suite's own walk over the other.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from timing import interleaved, median, print_table, ratio
from torch import Tensor, nn

from bench import networks, weights

Walk = Callable[[nn.Sequential, weights.Weights, Tensor], Tensor]
CASES = [
    (4, 500, 2, (4,) * 8, 1),
    (4, 250, 1, (100,), 1),
    (8, 250, 64, (100,), 10),
    (1, 128, 784, (256, 256), 10),
    (4, 128, 784, (256, 256), 10),
]
"""Samples, examples, inputs, hidden units, outputs."""


def units_last(network: nn.Sequential, stacked: weights.Weights, inputs: Tensor) -> Tensor:
    """Outputs `[S, B, out]` by products `[S, B, in] x [S, in, out]`."""
    hidden = inputs.expand(len(next(iter(stacked.values()))), *inputs.shape)
    for name, layer in network.named_children():
        if isinstance(layer, nn.Linear):
            hidden = torch.baddbmm(stacked[f"{name}.bias"][:, None], hidden, stacked[f"{name}.weight"].mT)
        elif not isinstance(layer, nn.Flatten):  # inputs are vectors
            hidden = layer(hidden)
    return hidden


def gradient(walk: Walk, network: nn.Sequential, stacked: dict[str, Tensor], inputs: Tensor) -> list[Tensor]:
    """Of a loss of the outputs, for every tensor of weights."""
    loss = walk(network, stacked, inputs).square().sum()
    return list(torch.autograd.grad(loss, list(stacked.values())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds of every comparison")
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    rows = []
    for samples, examples, columns, hidden, outputs in CASES:
        network, inputs = networks.mlp(columns, outputs, hidden), torch.randn(examples, columns)
        stacked = {
            name: (0.3 * torch.randn(samples, *w.shape)).requires_grad_()
            for name, w in network.named_parameters()
        }
        walks: dict[str, Walk] = {"last": weights.forward, "before": units_last}
        about = network, stacked, inputs
        for first, second in zip(*(gradient(walk, *about) for walk in walks.values()), strict=True):
            torch.testing.assert_close(first, second, rtol=1e-3, atol=1e-3 * float(first.abs().max()))
        measured = interleaved(
            {name: partial(gradient, walk, *about) for name, walk in walks.items()}, rounds
        )
        row = {"S": samples, "B": examples, "network": f"{columns}-{'-'.join(map(str, hidden))}-{outputs}"}
        row |= {f"{name}, ms": 1000 * median(times) for name, times in measured.items()}
        rows.append(row | {"ratio": ratio(measured, "last", "before")})
    print_table(rows)


if __name__ == "__main__":
    main()
