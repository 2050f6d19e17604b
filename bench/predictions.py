"""What a method predicts: one distribution per input and weight sample, checked when it is made.

Shapes: S weight samples, B inputs, C classes, K regression outputs. Averaging over S happens here and nowhere
else, in log space where it is a probability.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


def average_log_probs(log_probs: Tensor) -> Tensor:
    """Log of the mean probability over the samples, `[B, C]` from `[S, B, C]`, in the precision given."""
    return log_probs.logsumexp(0) - math.log(len(log_probs))


class BadPrediction(ValueError):
    """A prediction is not finite, not normalised or of the wrong shape."""


def _check(condition: bool | Tensor, message: str) -> None:
    if not bool(condition):
        raise BadPrediction(message)


class Prediction(ABC):
    """Predictions for B inputs under S weight samples: `Categorical`, `Bernoulli` or `Gaussian`.

    The sample axis comes first; deterministic methods have S = 1. Checked once, when it is made.
    """

    @abstractmethod
    def average(self) -> Any:
        """The prediction averaged over the samples, in log space where it is a probability."""

    @abstractmethod
    def log_score(self, targets: Tensor) -> Tensor:
        """Log probability or density of the targets under the averaged prediction, `[B]`, in nats."""


@dataclass(frozen=True)
class Categorical(Prediction):
    """Class predictions, one distribution per weight sample: log-probabilities `[S, B, C]`, in nats.

    A probability of exactly zero (minus infinity) is allowed.

    Raises:
        BadPrediction: If the shape is wrong, an entry is NaN or positive, or a row does not sum to one.
    """

    log_probs: Tensor

    def __post_init__(self) -> None:
        x = self.log_probs
        _check(x.ndim == 3, f"log_probs must be [S, B, C], got {tuple(x.shape)}")
        _check((x <= 1e-3).all(), "log_probs hold a NaN or a positive entry")
        _check((x.logsumexp(-1).abs() < 1e-3).all(), "log_probs are not normalised over the classes")

    def average(self) -> Tensor:
        """Log of the probabilities averaged over the samples, `[B, C]`."""
        return average_log_probs(self.log_probs)

    def log_score(self, targets: Tensor) -> Tensor:
        """Log probability of the classes `targets` `[B]` under the averaged prediction, `[B]`, in nats."""
        return self.average().gather(-1, targets.long()[:, None]).squeeze(-1)


@dataclass(frozen=True)
class Bernoulli(Prediction):
    """Two-class predictions: log-odds of class 1, `[S, B]`.

    Raises:
        BadPrediction: If the shape is wrong or an entry is not finite.
    """

    log_odds: Tensor

    def __post_init__(self) -> None:
        _check(self.log_odds.ndim == 2, f"log_odds must be [S, B], got {tuple(self.log_odds.shape)}")
        _check(self.log_odds.isfinite().all(), "log_odds hold an entry that is not finite")

    def average(self) -> Tensor:
        """Log of the probabilities of the classes 0 and 1 averaged over the samples, `[B, 2]`."""
        both = nn.functional.logsigmoid(torch.stack([-self.log_odds, self.log_odds], -1))
        return average_log_probs(both)

    def log_score(self, targets: Tensor) -> Tensor:
        """Log probability of the classes `targets` `[B]` under the averaged prediction, `[B]`, in nats."""
        return self.average().gather(-1, targets.long()[:, None]).squeeze(-1)


@dataclass(frozen=True)
class Gaussian(Prediction):
    """Regression predictions: mean and variance of a normal per sample, each `[S, B, K]`.

    Raises:
        BadPrediction: If the shapes are wrong, an entry is not finite, or a variance is negative.
    """

    mean: Tensor
    variance: Tensor

    def __post_init__(self) -> None:
        _check(self.mean.ndim == 3, f"mean must be [S, B, K], got {tuple(self.mean.shape)}")
        _check(self.variance.shape == self.mean.shape, "variance must have the shape of mean")
        _check(self.mean.isfinite().all(), "mean holds an entry that is not finite")
        _check((self.variance.isfinite() & (self.variance >= 0)).all(), "variance is negative or not finite")

    def average(self) -> tuple[Tensor, Tensor]:
        """Mean and variance of the equal mixture over the samples, each `[B, K]`."""
        mean = self.mean.mean(0)
        return mean, self.variance.mean(0) + (self.mean - mean).square().mean(0)

    def parts(self) -> tuple[Tensor, Tensor]:
        """Epistemic and aleatoric variance, each `[B, K]`: their sum is that of `average`.

        The variance of the samples' means, which more data would shrink, and the mean of their variances, the
        noise: the law of total variance.
        """
        return (self.mean - self.mean.mean(0)).square().mean(0), self.variance.mean(0)

    def log_score(self, targets: Tensor) -> Tensor:
        """Log density of the targets under the equal mixture of the samples, `[B]`, in nats.

        Targets are `[B, K]`, or `[B, K, 2]` where each brings the standard deviation of its own noise.
        """
        variance = self.variance
        if targets.ndim == 3:
            targets, sigma = targets.unbind(-1)
            variance = variance + sigma.square()
        normal = torch.distributions.Normal(self.mean, variance.sqrt(), validate_args=False)
        return normal.log_prob(targets).sum(-1).logsumexp(0) - math.log(len(self.mean))
