"""Time of a training step of cheap ensembles and `vbll` beside the layers of their packages, in one process.

    pip install 'torch-uncertainty==0.13.0'
    python benchmarks/cheap_ensembles.py [--rounds 15] [--json FILE]

A step is zero grad, loss, backward and the fused Adam on one batch, for four members. Ours has the task's
log prior in its loss, the package's layers have weight decay in its place, of which Adam is the whole cost.
The package's networks take the batch in the way of its own training loops: Packed-Ensembles repeat its
outputs' targets, masks and BatchEnsemble split the batch by position. Of the authors' package vbll the step
leaves out the prediction that its `forward` makes along. `map` and the plain network stand beside. Contenders
take turns, on one thread and by the process's own time; a ratio is the median over the rounds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import vbll as of_vbll
from timing import Step, interleaved, print_table, quartiles, ratio, write
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from bench import networks, priors
from bench.contract import Batch, Method, Problem
from bench.engine import trainer
from bench.likelihoods import Categorical
from bench.methods import batch_ensemble, map, masksembles, packed, vbll
from bench.networks import Dropout

MEMBERS, NUM_TRAIN, RATE = 4, 60_000, 1e-3
CASES: dict[str, tuple[Callable[[], nn.Sequential], tuple[int, ...], int]] = {
    "MLP 784-256-256-10, B 128": (partial(networks.mlp, 784, 10, (256, 256)), (784,), 128),
    "LeNet, B 64": (networks.lenet, (1, 28, 28), 64),
}
"""Name -> network, shape of an example, and examples of a batch."""


def ours(method: Method, batch: Batch) -> Step:
    """A step of a method of the suite."""
    method.generator = torch.Generator().manual_seed(0)
    optimizer = method.configure_optimizers()

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        method.training_step(batch, 0)["loss"].backward()
        optimizer.step()

    return step


def theirs(network: nn.Module, loss: Callable[[], Tensor], decay: float = 1 / NUM_TRAIN) -> Step:
    """A step of a network of layers, under weight decay."""
    optimizer = torch.optim.Adam(network.parameters(), RATE, weight_decay=decay, fused=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss().backward()
        optimizer.step()

    return step


def classified(network: nn.Module, inputs: Tensor, targets: Tensor) -> Step:
    """A step by the cross entropy of the outputs."""
    return theirs(network, lambda: cross_entropy(network(inputs), targets))


def last_layer_of_vbll(network: nn.Sequential, inputs: Tensor, targets: Tensor) -> Step:
    """A step by the package's bound, with its layer in place of the last."""
    *features, last = network
    made = nn.Sequential(
        *features, of_vbll.DiscClassification(last.in_features, last.out_features, 1 / NUM_TRAIN)
    )
    return theirs(made, lambda: made[-1]._get_train_loss_fn(made[:-1](inputs))(targets))


def rebuilt(
    network: nn.Sequential, linear: Callable[..., nn.Module], conv: Callable[..., nn.Module]
) -> nn.Sequential:
    """The network with layers of a package in place of its own; dropout, which is off, is left out."""
    places = [i for i, module in enumerate(network) if isinstance(module, nn.Linear | nn.Conv2d)]
    layers: list[nn.Module] = []
    for i, module in enumerate(network):
        ends = {"first": i == places[0], "last": i == places[-1]}
        if isinstance(module, nn.Linear):
            layers.append(linear(module.in_features, module.out_features, **ends))
        elif isinstance(module, nn.Conv2d):
            layers.append(conv(module.in_channels, module.out_channels, module.kernel_size[0], **ends))
        elif not isinstance(module, Dropout):
            layers.append(module)
    return nn.Sequential(*layers)


def packages(network: Callable[[], nn.Sequential], batch: Batch) -> dict[str, Step]:
    """The contenders of torch-uncertainty."""
    from torch_uncertainty.layers import batch_ensemble as of_batch
    from torch_uncertainty.layers import masksembles as of_masks
    from torch_uncertainty.layers import packed as of_packs

    def masked(linear: bool, *sizes: int, first: bool, last: bool) -> nn.Module:
        plain, kind = (nn.Linear, of_masks.MaskedLinear) if linear else (nn.Conv2d, of_masks.MaskedConv2d)
        return plain(*sizes) if first else kind(*sizes, num_estimators=MEMBERS, scale=2.0)

    def in_packs(linear: bool, *sizes: int, first: bool, last: bool) -> nn.Module:
        kind = (
            of_packs.PackedLinear if linear else partial(of_packs.PackedConv2d, minimum_channels_per_group=1)
        )
        return kind(*sizes, alpha=2, num_estimators=MEMBERS, first=first, last=last)

    def of_batches(linear: bool, *sizes: int, first: bool, last: bool) -> nn.Module:
        return (of_batch.BatchLinear if linear else of_batch.BatchConv2d)(*sizes, num_estimators=MEMBERS)

    inputs, targets = batch.inputs, batch.targets
    build = {
        "masksembles": (masked, targets),
        "packed": (in_packs, targets.repeat(MEMBERS)),
        "batch_ensemble": (of_batches, targets),
    }
    return {
        f"{name} of torch-uncertainty": classified(
            rebuilt(network(), partial(layer, True), partial(layer, False)), inputs, expected
        )
        for name, (layer, expected) in build.items()
    }


def case(name: str, rounds: int) -> list[dict[str, object]]:
    """A row per method: its step over that of the package's layers, or of `map` over the plain network."""
    network, shape, size = CASES[name]
    torch.manual_seed(0)
    inputs, targets = torch.randn(size, *shape), torch.randint(10, (size,))
    problem = Problem(
        network, Categorical(), priors.normal(), TensorDataset(inputs, targets), None, NUM_TRAIN
    )
    batch = Batch(inputs, targets)
    methods: dict[str, Method] = {
        "map": map.MAP(problem, map.Settings()),
        "masksembles": masksembles.Masksembles(problem, masksembles.Settings(masks=MEMBERS)),
        "packed": packed.Packed(problem, packed.Settings(ensemble_size=MEMBERS)),
        "batch_ensemble": batch_ensemble.BatchEnsemble(
            problem, batch_ensemble.Settings(ensemble_size=MEMBERS)
        ),
        "vbll": vbll.VBLL(problem, vbll.Settings()),
    }
    steps = {method: ours(made, batch) for method, made in methods.items()}
    steps |= packages(network, batch) | {
        "the authors' package": last_layer_of_vbll(network(), inputs, targets),
        "plain network": classified(network(), inputs, targets),
    }
    others = {"map": "plain network", "vbll": "the authors' package"}
    measured = interleaved(steps, rounds)
    rows = []
    for method in methods:
        other = others.get(method, f"{method} of torch-uncertainty")
        low, high = quartiles(measured, method, other)
        rows.append(
            {
                "case": name,
                "method": method,
                "against": other,
                "ratio": ratio(measured, method, other),
                "low": low,
                "high": high,
            }
        )
    return rows


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds, at least 1")
    parser.add_argument("--json", type=Path, help="file for the rows")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    trainer.keep_memory()
    rows = [row for name in CASES for row in case(name, arguments.rounds)]
    print_table(rows)
    if arguments.json:
        write(arguments.json, {"rounds": arguments.rounds, "members": MEMBERS, "cases": rows})


if __name__ == "__main__":
    main()
