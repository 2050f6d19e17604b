"""What active learning and active testing share: the data, labels one by one, objectives, scores.

Shapes: N points of a pool, M acquired points in order of acquisition, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from bench import data, networks, randomness
from bench.contract import NetworkFactory
from bench.intervals import Band, paired_ratios
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
        """With one more."""
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


GUIDES = ("softmax", "proportional")
"""Proposals of active testing; uniform sampling is what they are compared with."""
_CHUNK = 400_000
"""Numbers drawn at once: few enough for a processor's cache."""
_MOST = 0.5
"""Share of the probability that the drawn hold at most, where what is left is the difference to 1."""
_ROUNDING = 1e-12
"""Relative size of an error that is none."""


def log_weights(proposal: str, scores: np.ndarray, temperature: float) -> np.ndarray:
    """Logarithm of `propose`, up to a constant, `[N]`: finite where a probability is 0 in float64."""
    if proposal == "softmax":
        return temperature * scores / (scores.sum() or 1.0)
    return np.log(propose(proposal, torch.from_numpy(scores), temperature).numpy())


def races(
    weights: Mapping[str, np.ndarray], trajectories: int, draws: int
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Draws without replacement in proportion to fixed weights, in R paired trajectories; always the same.

    In a race in which point n finishes after an exponential time of mean 1/w_n, the order of arrival has the
    distribution of such draws (Efraimidis and Spirakis 2006). The same standard times serve all weights, so
    that trajectories are paired.

    Args:
        weights: Name -> log w `[N]`.
        trajectories: R.
        draws: M, below N.

    Returns:
        Name -> indices `[R, M]` in order, and the probability of each among those left `[R, M]`.
    """
    generator = np.random.default_rng(randomness.derive(0, "races"))
    size = len(next(iter(weights.values())))
    early = {name: _early(log_w, 2 * draws) for name, log_w in weights.items()}
    found: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {name: [] for name in weights}
    step = max(1, _CHUNK // size)
    for first in range(0, trajectories, step):
        log_times = np.log(generator.standard_exponential((min(step, trajectories - first), size)))
        for name, log_w in weights.items():
            found[name].append(_winners(log_times, log_w, draws, early[name]))
    return {
        name: (np.concatenate([i for i, _ in parts]), np.concatenate([q for _, q in parts]))
        for name, parts in found.items()
    }


def _early(log_w: np.ndarray, points: int) -> float:
    """Log of the time by which so many points finish on average; infinite if that is most of them."""
    if points > len(log_w) / 2:
        return np.inf
    low, high = -log_w.max() - 50, -log_w.min() + 50
    for _ in range(60):
        middle = (low + high) / 2
        few = -np.expm1(-np.exp(np.minimum(log_w + middle, 50))).sum() < points
        low, high = (middle, high) if few else (low, middle)
    return high


def _first(log_times: np.ndarray, log_w: np.ndarray, draws: int, early: float) -> np.ndarray:
    """The first of races with standard times `[R, N]` in order, indices `[R, M]`.

    Only points that finish before `early` are sorted, a tenth of the work; all are if a race has too few.
    """
    near = log_times < log_w + early
    counts = near.sum(1)
    if counts.min() < draws:
        return (log_times - log_w).argsort(1)[:, :draws]
    rows, columns = np.nonzero(near)
    place = np.arange(len(rows)) - np.repeat(counts.cumsum() - counts, counts)
    finish = np.full((len(near), counts.max()), np.inf)
    finish[rows, place] = log_times[rows, columns] - log_w[columns]
    points = np.zeros(finish.shape, int)
    points[rows, place] = columns
    return np.take_along_axis(points, finish.argsort(1)[:, :draws], 1)


def _winners(
    log_times: np.ndarray, log_w: np.ndarray, draws: int, early: float
) -> tuple[np.ndarray, np.ndarray]:
    """The first of races with standard times `[R, N]`, and their probabilities among those left."""
    index = _first(log_times, log_w, draws, early)
    own, total = log_w[index], np.logaddexp.reduce(log_w)
    drawn = np.exp(own - total).sum(1, keepdims=True)
    rest = total + np.log1p(-np.minimum(drawn, _MOST))
    if (heavy := np.flatnonzero(drawn > _MOST)).size:  # of the difference little would be right
        others = np.tile(log_w, (len(heavy), 1))
        np.put_along_axis(others, index[heavy], -np.inf, 1)
        largest = others.max(1, keepdims=True)
        rest[heavy] = largest + np.log(np.exp(others - largest).sum(1, keepdims=True))
    left = np.logaddexp.accumulate(np.concatenate([rest, own[:, ::-1]], 1), 1)[:, :0:-1]
    return index, np.exp(own - left)


@dataclass(frozen=True, eq=False)
class Trajectories:
    """Estimates of one fixed model's risk on its test pool, over R paired trajectories.

    Attributes:
        points: Numbers of labels M at which is estimated, `[K]`.
        pool_size: N, test points of the pool.
        risk: The mean loss over the whole pool, in nats.
        estimates: Proposal, uniform among them -> estimator out of OBJECTIVES -> `[R, K]`, in nats.
        first_draw: Guide -> exact mean squared error of PURE and LURE, equal then, after one draw, over that
            of one uniform draw; infinite if it overflows.
    """

    points: np.ndarray
    pool_size: int
    risk: float
    estimates: dict[str, dict[str, np.ndarray]]
    first_draw: dict[str, float]

    def bias(self, proposal: str, estimator: str) -> np.ndarray:
        """Risk minus estimate, `[R, K]`: below 0 if the risk is overestimated (Farquhar 2022, Fig. 5.8)."""
        return self.risk - self.estimates[proposal][estimator]

    def squared_error(self, proposal: str, estimator: str) -> np.ndarray:
        """`[R, K]`, in nats squared."""
        return self.bias(proposal, estimator) ** 2

    @cached_property
    def ratios(self) -> dict[str, Band]:
        """By guide: mean squared error of LURE over that of the mean of as many uniform draws, `[K]`.

        With the 95% band over R. Where all losses are equal no draw can help, and it is 1; so it is where the
        guide draws as uniform sampling does, but for rounding.
        """
        uniform = self.squared_error("uniform", "plain")
        if uniform.mean(0).min() <= (_ROUNDING * self.risk) ** 2:
            return dict.fromkeys(GUIDES, Band.flat(np.ones(len(self.points))))
        by_chance = self.estimates["uniform"]["plain"]
        errors = [
            uniform
            if np.allclose(self.estimates[guide]["lure"], by_chance, rtol=1e-9)
            else self.squared_error(guide, "lure")
            for guide in GUIDES
        ]
        return dict(zip(GUIDES, paired_ratios(errors, uniform), strict=True))

    def ratio_at_least(self, guide: str) -> np.ndarray:
        """Exact lower bound of what `ratios` estimates, `[K]`: what the first draw alone adds.

        LURE is (1/M) sum_m c_m a_m with uncorrelated a_m of mean risk, a_1 the estimate of one draw and
        c_1 = (N - M)/(N - 1) (Farquhar, Gal and Rainforth 2021); M uniform draws have c_1/M times
        the variance of one. Far above 1 where the variance sits on points that are all but never drawn, and
        that no number of trajectories shows.
        """
        left = (self.pool_size - self.points) / (self.pool_size - 1)
        return self.first_draw[guide] * left / self.points


def first_draw_ratio(losses: np.ndarray, log_weights: np.ndarray) -> float:
    """Exact mean squared error of LURE after one draw over that of one uniform draw; it may be infinite.

    The former is sum_n L_n^2 / (N^2 q_n) - R^^2 (Farquhar, Gal and Rainforth 2021), q the probabilities and
    R^ the mean loss. Where all losses are equal no draw can help, and the ratio is 1.

    Args:
        losses: L, `[N]`, in nats.
        log_weights: Logarithm of q, up to a constant, `[N]`.
    """
    size, risk_of_all = len(losses), float(losses.mean())
    if np.ptp(losses) <= _ROUNDING * risk_of_all:
        return 1.0

    def mean_square(log_w: np.ndarray) -> float:
        with np.errstate(over="ignore"):
            inverse = np.exp(np.logaddexp.reduce(log_w) - log_w)  # 1/q
            return float((losses**2 * inverse).sum()) / size**2 - risk_of_all**2

    return mean_square(log_weights) / mean_square(np.zeros(size))


def simulate(
    losses: np.ndarray, scores: np.ndarray, temperature: float, trajectories: int, acquired: int
) -> Trajectories:
    """Active testing of a fixed model whose losses on the test pool are known, `[N]`.

    Args:
        losses: In nats.
        scores: Of the same points, `[N]`, 0 or more; proposals are made of them once, over the whole pool.
        temperature: Of the softmax.
        trajectories: R.
        acquired: M, of a small pool all but one at most.
    """
    size, risk_of_all = len(losses), float(losses.mean())
    acquired = min(acquired, size - 1)
    points = np.array(sorted({1, acquired, *range(5, acquired, 5)}))
    names = (*GUIDES, "uniform")
    weights = {name: log_weights(name, scores, temperature) for name in names}
    drawn = {name: (losses[index], q) for name, (index, q) in races(weights, trajectories, acquired).items()}
    estimates = {
        name: {e: v[:, points - 1] for e, v in zip(OBJECTIVES, risk.running(own, q, size), strict=True)}
        for name, (own, q) in drawn.items()
    }
    first_draw = {name: first_draw_ratio(losses, weights[name]) for name in GUIDES}
    return Trajectories(points, size, risk_of_all, estimates, first_draw)
