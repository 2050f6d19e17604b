"""Small data that several tasks pose: a sine seen in two intervals, flowers, splits of a table."""

from __future__ import annotations

import numpy as np
import torch

from bench import randomness

NOISE = 0.05
"""Standard deviation of the sine's observations."""
CLUSTERS = ((-2.0, -1.4), (1.0, 1.8))
GAP = (-1.4, 1.0)

POINTS = {
    # part: its intervals, each with a number of points
    "train": ((*CLUSTERS[0], 750), (*CLUSTERS[1], 750)),
    "val": ((*CLUSTERS[0], 100), (*CLUSTERS[1], 100)),
    "test": ((*CLUSTERS[0], 100), (*CLUSTERS[1], 100)),
    "gap": ((*GAP, 100),),
}

NUM_FLOWERS, NUM_TRAIN = 150, 100
"""Of iris: all, and those that are trained on."""


def sine(x: np.ndarray) -> np.ndarray:
    """The function that was observed."""
    return np.sin(4 * (x - 4.3))


def points(part: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and observations of a part of POINTS, each `[N, 1]`; the same in every run."""
    generator = np.random.default_rng(randomness.derive(0, "toy_regression", part))
    x = np.concatenate([generator.uniform(low, high, size) for low, high, size in POINTS[part]])
    y = sine(x) + NOISE * generator.standard_normal(len(x))
    return torch.from_numpy(x[:, None]).float(), torch.from_numpy(y[:, None]).float()


def fresh_points(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and observations of other test points, in the clusters and between them, each `[N, 1]`.

    Places and noise come from generators of their own: the inputs, which are published, tell nothing of it.
    """
    places, noise = (
        np.random.default_rng(randomness.derive(seed, "toy_regression", kind)) for kind in ("places", "noise")
    )
    intervals = POINTS["test"] + POINTS["gap"]
    x = np.concatenate([places.uniform(low, high, size) for low, high, size in intervals])
    y = sine(x) + NOISE * noise.standard_normal(len(x))
    return x[:, None].astype(np.float32), y[:, None].astype(np.float32)


def flowers(part: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs `[N, 4]`, raw, and classes `[N]` of the part train or test; the same in every run."""
    from sklearn import datasets  # here, for its import takes a second

    inputs, labels = datasets.load_iris(return_X_y=True)
    order = np.random.default_rng(randomness.derive(0, "iris_depth")).permutation(len(labels))
    rows = order[:NUM_TRAIN] if part == "train" else order[NUM_TRAIN:]
    return torch.from_numpy(inputs[rows]).float(), torch.from_numpy(labels[rows]).long()


def split_rows(number: int, split: int) -> tuple[np.ndarray, np.ndarray]:
    """Row numbers of a table of so many rows: the 90% of a random split that are trained on, and the rest."""
    order = torch.randperm(number, generator=randomness.generator(0, "regression split", split)).numpy()
    cut = round(0.9 * number)
    return order[:cut], order[cut:]
