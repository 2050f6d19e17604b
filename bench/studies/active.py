"""What active learning and active testing share: the data, labels one by one, objectives, scores.

Shapes: N points of a pool, M acquired points in order of acquisition, C classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from bench import data, networks
from bench.contract import NetworkFactory
from bench.errors import UsageError
from bench.studies import acquisition, risk

NUM_CLASSES = 10
FLOOR = 0.1
"""Of the proposal `proportional`: no score counts less than this share of the mean score."""

# -------------------------------------------------------------------------------------------------- data


@dataclass(frozen=True)
class Sizes:
    """How a data set is used.

    Attributes:
        train_share: Factor on the shares of the classes that are kept of the training set.
        num_val: Points set aside for validation.
        mean: Of all published training pixels, in [0, 1].
        sd: Their standard deviation.
    """

    train_share: float
    num_val: int
    mean: float
    sd: float


SIZES = {
    "mnist": Sizes(0.25, 1000, 0.1307, 0.3081),
    "fashion_mnist": Sizes(0.25, 1000, 0.2860, 0.3530),
    "digits": Sizes(1.0, 100, 0.3053, 0.3755),
}


@dataclass(frozen=True, eq=False)
class Data:
    """A pool, points for validation, and a test set; inputs standardised, the same in every run.

    Attributes:
        pool: Inputs `[N, 1, H, W]`.
        pool_labels: Their labels `[N]`, for an `Oracle` to hand out.
        val: Inputs and labels set aside for early stopping.
        test: Inputs `[T, 1, H, W]`.
        test_labels: True labels `[T]`.
        digest: Of all images and labels.
    """

    pool: Tensor
    pool_labels: Tensor
    val: TensorDataset
    test: Tensor
    test_labels: Tensor
    digest: str


def load(name: str, balanced: bool = False, data_dir: str | None = None) -> Data:
    """The unbalanced data of active learning with noisy labels in pool and validation set.

    Args:
        name: One of SIZES.
        balanced: The variant with as many examples, the classes in their usual proportions.
        data_dir: As in `bench.data.load`.
    """
    sizes = SIZES[name]
    images = data.unbalanced(name, data_dir, sizes.train_share, balanced)
    inputs, labels, cut = standardise(name, images.train_inputs), images.train_labels, sizes.num_val
    return Data(
        pool=inputs[cut:],
        pool_labels=labels[cut:],
        val=TensorDataset(inputs[:cut], labels[:cut]),
        test=standardise(name, images.test_inputs),
        test_labels=images.test_labels,
        digest=images.digest,
    )


def standardise(name: str, inputs: Tensor) -> Tensor:
    """Pixels in [0, 1], minus the mean and over the standard deviation of the data set `name`."""
    return (inputs - SIZES[name].mean) / SIZES[name].sd


def check_acquired(asked: int, there: int, what: str) -> None:
    """Refuses more acquisitions than there are points, before anything is trained.

    Args:
        asked: The task's setting `acquired`.
        there: How many can be acquired.
        what: What they are, behind their number.

    Raises:
        UsageError: If more are asked for than are there; one line.
    """
    if asked > there:
        raise UsageError(f"--task.acquired {asked}: only {there:,} {what}; give {there} or fewer")


class Oracle:
    """Hands out the labels of a pool, one point at a time, and knows which were asked for.

    Args:
        labels: `[N]`.
    """

    def __init__(self, labels: Tensor) -> None:
        self._labels = labels
        self.asked: list[int] = []

    def label(self, index: int) -> int:
        """The label of one point."""
        self.asked.append(index)
        return int(self._labels[index])


def network(kind: Literal["conv", "mlp"], pixels: int) -> NetworkFactory:
    """The networks of Farquhar 2022 (docs/sources.md), C.1: the convolutional one, or one hidden layer of 50.

    Args:
        kind: Which.
        pixels: Inputs of the latter.
    """
    if kind == "conv":
        return partial(networks.lenet, NUM_CLASSES)
    return partial(networks.mlp, pixels, NUM_CLASSES, (50,))


# ------------------------------------------------------------------------------- objectives and proposals

Objective = Literal["plain", "pure", "lure"]
OBJECTIVES = {"plain": "R~", "pure": "PURE", "lure": "LURE"}
"""What is minimised in training, and estimates a risk: its name in metrics, and in figures."""


def estimate(objective: str, losses: np.ndarray, proposal: np.ndarray, pool_size: int) -> np.ndarray:
    """The risk of a pool of N points, `[...]`, from losses and proposal probabilities `[..., M]`."""
    if objective == "plain":
        return risk.plain(losses)
    return (risk.pure if objective == "pure" else risk.lure)(losses, proposal, pool_size)


def weights(objective: str, proposal: Tensor, pool_size: int) -> Tensor:
    """v_m `[..., M]`, float64, of the objective (1/M) sum_m v_m L_m; of the plain one 1."""
    if objective == "plain":
        return torch.ones_like(proposal)
    return (risk.pure_weights if objective == "pure" else risk.lure_weights)(proposal, pool_size)


@dataclass(frozen=True, eq=False)
class Points:
    """What was acquired of a pool so far, in order.

    Attributes:
        index: Where the points lie in the pool, `[M]`.
        labels: What the oracle said, `[M]`.
        proposal: Probability with which each was drawn from those left, `[M]`, float64.
    """

    index: Tensor
    labels: Tensor
    proposal: Tensor

    def __len__(self) -> int:
        return len(self.index)

    def and_then(self, index: int, label: int, probability: float) -> Points:
        """These points and one more."""
        return Points(
            torch.cat([self.index, torch.tensor([index])]),
            torch.cat([self.labels, torch.tensor([label])]),
            torch.cat([self.proposal, torch.tensor([probability], dtype=torch.float64)]),
        )


def at_random(count: int, oracle: Oracle, pool_size: int, generator: torch.Generator) -> Points:
    """Points drawn one by one, uniformly and without replacement."""
    index = torch.randperm(pool_size, generator=generator)[:count]
    labels = torch.tensor([oracle.label(i) for i in index.tolist()])
    left = pool_size - torch.arange(count, dtype=torch.float64)
    return Points(index, labels, 1 / left)


Score = Literal["bald", "predictive_entropy", "variation_ratio"]
SCORES = {
    "bald": acquisition.bald,
    "predictive_entropy": acquisition.predictive_entropy,
    "variation_ratio": acquisition.variation_ratio,
}
Proposal = Literal["softmax", "proportional", "uniform"]


def propose(proposal: str, scores: Tensor, temperature: float) -> Tensor:
    """Probabilities `[N]` of the next draw from scores `[N]` of the candidates, 0 or more.

    Args:
        proposal: Its name; all have full support, which PURE and LURE need.
        scores: Larger is sooner.
        temperature: Of softmax, on scores divided by their sum.
    """
    function = acquisition.full_support(proposal)
    parameter = {"softmax": (temperature,), "proportional": (FLOOR,), "uniform": ()}[proposal]
    return function(scores, *parameter)


# ----------------------------------------------------------------------------------------- what is measured


@dataclass(frozen=True, eq=False)
class Learning:
    """One trajectory of active learning, tested E times under each of the three OBJECTIVES.

    Attributes:
        points: M at each test, `[E]`.
        nll: Test NLL, `[E, 3]`, in nats.
        accuracy: Of the test set, `[E, 3]`.
        risks: What each estimator (last axis) says on the M training points of the fit under each objective
            (axis before it), `[E, 3, 3]`, in nats.
    """

    points: np.ndarray
    nll: np.ndarray
    accuracy: np.ndarray
    risks: np.ndarray

    @property
    def overfitting_bias(self) -> np.ndarray:
        """Test NLL minus LURE on the training points, `[E, 3]`: Farquhar 2022, equation 5.10."""
        return self.nll - self.risks[..., list(OBJECTIVES).index("lure")]

    def measures(self) -> dict[str, np.ndarray]:
        """Everything by name, each `[E, 3]`."""
        estimates = {
            f"{name} on the training points": self.risks[..., i] for i, name in enumerate(OBJECTIVES.values())
        }
        own = {
            "test NLL": self.nll,
            "test accuracy": self.accuracy,
            "overfitting bias": self.overfitting_bias,
        }
        return own | estimates
