"""What a user would take in place of a network: two regressions of scikit-learn on the splits of a task.

    python benchmarks/anchors.py [diabetes_regression] [--json FILE]

Each sees the rows that a network is trained on, standardised as they are there, and predicts one normal a
test row; the task itself scores it. Noise, prior and length scales are those of the largest evidence, so that
neither needs the validation rows. Nothing here is drawn at random.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.linear_model import BayesianRidge
from timing import print_table, write

from bench.runs import registry
from bench.settings import build
from bench.studies import normals


def process(inputs: int) -> GaussianProcessRegressor:
    """A Gaussian process with a length scale for every input, and noise."""
    return GaussianProcessRegressor(ConstantKernel() * RBF(np.ones(inputs)) + WhiteKernel())


ANCHORS: dict[str, Callable[[int], Any]] = {
    "Bayesian linear regression": lambda inputs: BayesianRidge(),
    "Gaussian process": process,
}


def scores(task: Any, make: Callable[[int], Any]) -> dict[str, Any]:
    """Metrics of an anchor on a task of tasks/uci_regression.py, and its log likelihood on each split."""
    means, variances, scales = [], [], []
    for k in range(task.num_splits):
        part = task.standardised(k)
        inputs, targets = (t.double().numpy() for t in part.train.tensors)
        with warnings.catch_warnings():  # a length scale at its bound: an input that does not matter
            warnings.simplefilter("ignore", ConvergenceWarning)
            fitted = make(inputs.shape[1]).fit(inputs, targets[:, 0])
        found = fitted.predict(part.test_inputs.double().numpy(), return_std=True)
        mean, sigma = (torch.from_numpy(values).float()[None] for values in found)
        kept = normals.stored(mean, sigma**2)
        means.append(kept[0])
        variances.append(kept[1])
        scales.append((part.centre, part.scale))
    arrays = {
        "mean": np.stack(means),
        "variance": np.stack(variances),
        "centre_and_scale": np.array(scales),
        **task.targets(),
    }
    return task.score(arrays) | {"splits": task.losses(arrays).tolist()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "tasks", nargs="*", default=["diabetes_regression"], help="of tasks/uci_regression.py"
    )
    parser.add_argument("--json", type=Path, help="where to write what was found")
    options = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    for name in options.tasks:
        entry = registry.task(name)
        task = entry.cls(build(entry.cls.settings_class, entry.fixed, "task"))
        found[name] = {anchor: scores(task, make) for anchor, make in ANCHORS.items()}
    print_table(
        [
            {"task": task, "anchor": anchor} | {name: v for name, v in values.items() if name != "splits"}
            for task, anchors in found.items()
            for anchor, values in anchors.items()
        ]
    )
    if options.json:
        write(options.json, {"tasks": found})


if __name__ == "__main__":
    main()
