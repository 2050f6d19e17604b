"""What a fitted posterior predicts for new rows, in the target's own terms, and which it would not tell.

A prediction is the equal mixture of S distributions, one per draw of the weights. Its uncertainty has two
parts: the aleatoric one is left if the weights are known, the epistemic one is what knowing them would take
away. Of numbers they add up to the variance (law of total variance), of classes to the entropy of the
averaged probabilities, where the epistemic part is the mutual information of class and weights.

Whoever may leave a share of the rows to somebody else leaves those with the largest expected loss: of numbers
the predictive variance, which is the expected squared error of the mean; of classes 1 - the largest
probability, which is the expected error of the most probable class (Chow 1970, "On Optimum Recognition Error
and Reject Tradeoff").

Shapes: S weight samples, B rows, C classes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.special import entr

from bench import figures
from bench.batches import most_rows
from bench.contract import Method
from bench.errors import UsageError
from bench.predictions import Categorical, Gaussian
from bench.spec import Row
from bench.studies import normals

SHARES = np.arange(10, 101, 10)
"""Shares of the rows whose risk is drawn, in percent."""


class Predictive(ABC):
    """Predictive distributions of B rows."""

    @property
    @abstractmethod
    def expected_loss(self) -> np.ndarray:
        """What the best single answer is expected to lose, `[B]`: squared error, or error."""

    def abstain(self, share: float) -> np.ndarray:
        """Which rows, `[B]`, to leave to somebody else: the share of largest expected loss, rounded down.

        Of rows that are alike the first are left.

        Raises:
            UsageError: If the share is not in [0, 1).
        """
        if not isinstance(share, int | float | np.number) or not 0 <= share < 1:
            raise UsageError(f"abstain {share!r}: must be a share of the rows, from 0 to below 1")
        number = math.floor(share * len(self.expected_loss) + 1e-9)
        found = np.zeros(len(self.expected_loss), bool)
        found[np.argsort(-self.expected_loss, kind="stable")[:number]] = True
        return found


@dataclass(frozen=True)
class Numbers(Predictive):
    """Mixtures of S normals: `means` and standard deviations `sigmas`, `[S, B]`, in the target's unit."""

    means: np.ndarray
    sigmas: np.ndarray

    @property
    def mean(self) -> np.ndarray:
        """`[B]`, in the target's unit."""
        return np.asarray(self.means.mean(0))

    @property
    def aleatoric(self) -> np.ndarray:
        """Mean of the S variances, `[B]`, in the target's unit squared."""
        return np.asarray((self.sigmas**2).mean(0))

    @property
    def epistemic(self) -> np.ndarray:
        """Variance of the S means, `[B]`, in the target's unit squared."""
        return np.asarray(self.means.var(0))

    @property
    def variance(self) -> np.ndarray:
        """Variance of the mixture, `[B]`: the aleatoric and the epistemic part."""
        return self.aleatoric + self.epistemic

    expected_loss = variance

    def quantile(self, probability: float) -> np.ndarray:
        """The number below which the target lies with this probability, in (0, 1), `[B]`.

        Raises:
            UsageError: If the probability is not in (0, 1).
        """
        if not 0 < probability < 1:
            raise UsageError(f"the quantile {probability}: must be a probability above 0 and below 1")
        return normals.quantiles(self.means, self.sigmas, probability)

    def interval(self, level: float = 0.9) -> tuple[np.ndarray, np.ndarray]:
        """Ends of the central interval, each `[B]`, which holds the target with a probability of `level`.

        Raises:
            UsageError: If the level is not in (0, 1).
        """
        if not 0 < level < 1:
            raise UsageError(f"the level {level}: must be a probability above 0 and below 1, such as 0.9")
        return self.quantile((1 - level) / 2), -normals.quantiles(-self.means, self.sigmas, (1 - level) / 2)

    def sample(self, count: int, seed: int = 0) -> np.ndarray:
        """Independent draws of the targets, `[count, B]`, in their unit."""
        generator = np.random.default_rng(seed)
        chosen = generator.integers(len(self.means), size=(count, self.means.shape[1]))
        rows = np.arange(self.means.shape[1])
        noise = generator.standard_normal(chosen.shape)
        return np.asarray(self.means[chosen, rows] + self.sigmas[chosen, rows] * noise)


@dataclass(frozen=True)
class Classes(Predictive):
    """S times the probabilities of C classes, `[S, B, C]`, and the names of the classes `[C]`."""

    by_sample: np.ndarray
    names: Sequence[Any]

    @property
    def probabilities(self) -> np.ndarray:
        """Averaged over the samples, `[B, C]`."""
        return np.asarray(self.by_sample.mean(0))

    @property
    def entropy(self) -> np.ndarray:
        """Entropy of the averaged probabilities, `[B]`, in nats: the aleatoric and the epistemic part."""
        return np.asarray(entr(self.probabilities).sum(-1))

    @property
    def aleatoric(self) -> np.ndarray:
        """Mean of the S entropies, `[B]`, in nats."""
        return np.asarray(entr(self.by_sample).sum(-1).mean(0))

    @property
    def epistemic(self) -> np.ndarray:
        """Mutual information of class and weights, `[B]`, in nats."""
        return np.maximum(self.entropy - self.aleatoric, 0)  # it is never negative, but for rounding

    @property
    def expected_loss(self) -> np.ndarray:
        """1 - the largest probability, `[B]`."""
        return np.asarray(1 - self.probabilities.max(-1))

    def sample(self, count: int, seed: int = 0) -> np.ndarray:
        """Independent draws of the classes, by their names, `[count, B]`."""
        uniform = np.random.default_rng(seed).random((count, self.by_sample.shape[1], 1))
        drawn = (uniform >= self.probabilities.cumsum(-1)[:, :-1]).sum(-1)
        return np.asarray(self.names)[drawn]


def predicted(
    method: Method, inputs: torch.Tensor, num_samples: int, seed: int, target: Any
) -> Numbers | Classes:
    """What a method predicts for inputs `[B, ...]`, in pieces of bounded memory.

    Args:
        method: Fitted.
        inputs: As the network takes them, at least one.
        num_samples: Draws of the weights, which all rows share; at least 1.
        seed: Of the draws.
        target: Its `mean` and `scale`, by which it was standardised, or its `classes`.

    Raises:
        UsageError: If no sample is asked for, or number or seed are no whole numbers.
    """
    for name, value in {"num_samples": num_samples, "seed": seed}.items():
        if not isinstance(value, int | np.integer):
            raise UsageError(f"{name} {value!r}: must be a whole number")
    if num_samples < 1:
        raise UsageError(f"{num_samples} samples: at least 1 is needed")
    pieces: list[Any] = []
    with torch.no_grad():
        for piece in inputs.split(most_rows(inputs, 50 * num_samples)):
            pieces.append(method.predict(piece, num_samples, torch.Generator().manual_seed(int(seed))))
    if isinstance(pieces[0], Categorical):
        log_probs = torch.cat([piece.log_probs for piece in pieces], 1).double()
        return Classes(log_probs.softmax(-1).numpy(), target.classes)
    assert isinstance(pieces[0], Gaussian)
    mean = torch.cat([piece.mean[..., 0] for piece in pieces], 1).double().numpy()
    variance = torch.cat([piece.variance[..., 0] for piece in pieces], 1).double().numpy()
    return Numbers(target.mean + target.scale * mean, target.scale * np.sqrt(variance))


# -------------------------------------------------------------------------------------- risk by coverage


def risk_rows(expected_loss: np.ndarray, loss: np.ndarray, curve: str, root: bool = False) -> list[Row]:
    """Mean loss of the rows that are kept when those of largest expected loss are left out, by their share.

    Args:
        expected_loss: `[N]`; rows that are alike come in all orders, so that each has their mean loss.
        loss: `[N]`.
        curve: Name of the curve.
        root: Whether its root is taken.

    Returns:
        A point for each of `SHARES`, of the rows rounded up.
    """
    _, group = np.unique(expected_loss, return_inverse=True)
    ordered = (np.bincount(group, loss) / np.bincount(group))[np.sort(group)]
    found = []
    for share in SHARES:
        risk = ordered[: math.ceil(share * len(loss) / 100)].mean()
        found.append(Row(curve, "test", int(share), float(np.sqrt(risk) if root else risk)))
    return found


def risk_chart(rows: Sequence[Row], unit: str) -> Any:
    """The risk that is among the points of a run, against the share of rows that is kept."""
    points = [(row.x, row.value) for row in rows]
    title = "Risk of the test rows that are kept, the surest first"
    return figures.panels([figures.Curve(title, "measured", points)], "rows kept, %", unit)
