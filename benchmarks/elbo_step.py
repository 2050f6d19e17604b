"""Time of one ELBO training step, against the deterministic floor and against bayesian-torch.

    python benchmarks/elbo_step.py [--rounds 50] [--json FILE] [--check]

A step is zero grad, noise, forward, KL to N(0, 1), backward and an Adam step; one thread, fixed seeds. The
contenders take turns of 30 ms in every round, so that another program's load falls on all of them; a time is
the median over the rounds, a ratio the median of the rounds' ratios. Times are the process's own, which on an
idle machine is what passes. All use the fused Adam, which is no part of any of them.

    mfvi, radial    this project's methods, through `training_step`
    floor           the plain network, forward and backward of the cross-entropy on S * B examples
    bayesian-torch  its reparametrisation layers, one forward pass per sample, as in its examples: every layer
                    returns its KL with its output

Shapes: S weight samples, B examples.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from bayesian_torch.layers import Conv2dReparameterization, LinearReparameterization
from timing import interleaved, median, print_table, processor, ratio
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from bench import networks, optimizers, priors
from bench.contract import Batch, Method, Problem
from bench.likelihoods import Categorical
from bench.methods.mfvi import MFVI
from bench.methods.radial import Radial

Step = Callable[[], None]

NUM_TRAIN = 60_000
NETWORKS = {
    "MLP 784-400-400-10": (partial(networks.mlp, 784, 10, (400, 400)), 128),
    "MLP 784-256-256-10": (partial(networks.mlp, 784, 10, (256, 256)), 128),
    "MLP 784-100-100-10": (partial(networks.mlp, 784, 10, (100, 100)), 256),
    "LeNet": (networks.lenet, 64),
}
SAMPLES = (1, 8)
LARGEST_RATIO_TO_PEER = {"MLP 784-400-400-10": 0.90, "LeNet": 0.90}
LARGEST_RATIO_TO_FLOOR = {"LeNet": 1.1}
"""Targets; the networks of continual learning have none."""


# ----------------------------------------------------------------------------------------------- contenders


class BayesianTorch(nn.Module):
    """The network with every layer replaced by bayesian-torch's; gives the outputs and the sum of the KLs."""

    def __init__(self, network: nn.Sequential) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(self._layer, network))

    @staticmethod
    def _layer(layer: nn.Module) -> nn.Module:
        if isinstance(layer, nn.Linear):
            return LinearReparameterization(layer.in_features, layer.out_features)
        if isinstance(layer, nn.Conv2d):
            return Conv2dReparameterization(layer.in_channels, layer.out_channels, layer.kernel_size)
        return layer

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs `[B, C]` and KL under one draw of the weights."""
        hidden, total = inputs, inputs.new_zeros(())
        for layer in self.layers:
            hidden = layer(hidden)
            if isinstance(hidden, tuple):
                hidden, kl = hidden
                total = total + kl
        return hidden, total


def problem_of(network: Callable[..., nn.Module], batch: Batch) -> Problem:
    data = TensorDataset(batch.inputs, batch.targets)
    return Problem(network, Categorical(), priors.normal(), data, None, NUM_TRAIN)


def our_step(method: Method, batch: Batch) -> Step:
    optimizer = method.configure_optimizers()

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        method.training_step(batch, 0)["loss"].backward()
        optimizer.step()

    return step


def floor_step(network: nn.Module, batch: Batch, samples: int) -> Step:
    optimizer = optimizers.make(network.parameters(), "adam", 1e-3)
    inputs = batch.inputs.repeat(samples, *[1] * (batch.inputs.ndim - 1))
    targets = batch.targets.repeat(samples)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        cross_entropy(network(inputs), targets).backward()
        optimizer.step()

    return step


def peer_step(network: nn.Sequential, batch: Batch, samples: int) -> Step:
    # Equal work, other numbers: its KL is the mean over the weights of a tensor where a bound needs the sum,
    # and for S > 1 its gradient of rho is wrong (checked on 0.5.0 at S = 2 against autograd): every pass
    # overwrites the noise that the backward pass of the earlier ones still needs.
    model = BayesianTorch(network)
    optimizer = optimizers.make(model.parameters(), "adam", 1e-3)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        outputs, divergences = zip(*(model(batch.inputs) for _ in range(samples)), strict=True)
        nll = cross_entropy(torch.cat(outputs), batch.targets.repeat(samples))
        (nll + torch.stack(divergences).mean() / NUM_TRAIN).backward()
        optimizer.step()

    return step


def contenders(network: Callable[..., nn.Sequential], batch_size: int, samples: int) -> dict[str, Step]:
    torch.manual_seed(0)
    batch = Batch(torch.randn(batch_size, 1, 28, 28), torch.randint(10, (batch_size,)))
    problem = problem_of(network, batch)
    return {
        "floor": floor_step(network(), batch, samples),
        "bayesian-torch": peer_step(network(), batch, samples),
        "mfvi": our_step(MFVI(problem, MFVI.settings_class(train_samples=samples)), batch),
        "radial": our_step(Radial(problem, Radial.settings_class(train_samples=samples)), batch),
    }


# -------------------------------------------------------------------------------------------------- timing


def step_rows(rounds: int) -> list[dict]:
    """One row per network, S and method."""
    rows = []
    for name, (network, batch_size) in NETWORKS.items():
        for samples in SAMPLES:
            measured = interleaved(contenders(network, batch_size, samples), rounds)
            for method in ("mfvi", "radial"):
                to_floor, to_peer = (ratio(measured, method, to) for to in ("floor", "bayesian-torch"))
                missed = to_peer > LARGEST_RATIO_TO_PEER.get(name, float("inf"))
                missed |= to_floor > LARGEST_RATIO_TO_FLOOR.get(name, float("inf"))
                times = {k: median(measured[k]) for k in (method, "floor", "bayesian-torch")}
                rows.append(
                    {
                        "network": name,
                        "batch_size": batch_size,
                        "samples": samples,
                        "method": method,
                        "milliseconds": 1000 * times[method],
                        "floor_milliseconds": 1000 * times["floor"],
                        "bayesian_torch_milliseconds": 1000 * times["bayesian-torch"],
                        "ratio_to_floor": to_floor,
                        "ratio_to_bayesian_torch": to_peer,
                        "missed": missed,
                    }
                )
    return rows


# ------------------------------------------------------------------------------------------------ the report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=50, help="interleaved rounds of every comparison")
    parser.add_argument(
        "--json",
        type=Path,
        help="file for the rows (the committed one is benchmarks/elbo_step.json)",
    )
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    steps = step_rows(arguments.rounds)
    print_table(steps)
    if arguments.json:
        content = {
            "date": datetime.date.today().isoformat(),
            "device": processor(),
            "torch": torch.__version__,
            "rounds": arguments.rounds,
            "cases": steps,
        }
        arguments.json.write_text(json.dumps(content, indent=2) + "\n")
    return int(arguments.check and any(row["missed"] for row in steps))


if __name__ == "__main__":
    sys.exit(main())
