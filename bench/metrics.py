"""Scores and uncertainties of predictions, and distances to a reference posterior's.

Shapes: S samples, B examples, N inputs, C classes. Units: nats, fractions, those of the
target. Log-probabilities may be minus infinity (probability zero).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from bench.errors import UsageError
from bench.predictions import average_log_probs

LOWEST = -1e4
"""Stored log-probabilities are clamped here, so that they are finite and fit float16."""


def _entropy(log_probs: Tensor) -> Tensor:
    return -torch.special.xlogy(log_probs.exp(), log_probs.exp()).sum(-1)


def predictive_entropy(log_probs: Tensor) -> Tensor:
    """Entropy of the averaged prediction, H[mean_s p_s], `[B]` from `[S, B, C]`, in nats."""
    return _entropy(average_log_probs(torch.as_tensor(log_probs).double()))


def expected_entropy(log_probs: Tensor) -> Tensor:
    """Average entropy of the samples' predictions, mean_s H[p_s], `[B]` from `[S, B, C]`, in nats."""
    return _entropy(torch.as_tensor(log_probs).double()).mean(0)


def mutual_information(log_probs: Tensor) -> Tensor:
    """Information about the weights in a label (BALD): H[mean p] - mean H[p], `[B]`, in nats.

    Never negative; a rounding error below zero is returned as zero.
    """
    return (predictive_entropy(log_probs) - expected_entropy(log_probs)).clamp(min=0)


def store(log_probs: Tensor) -> np.ndarray:
    """Log-probabilities as they are stored: float16, clamped at `LOWEST`."""
    return log_probs.clamp(min=LOWEST).half().cpu().numpy()


def restore(stored: np.ndarray) -> np.ndarray:
    """Stored log-probabilities `[N, C]` in float64, normalised again."""
    log_probs = stored.astype(np.float64)
    shifted = log_probs - log_probs.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def negative_log_likelihood(log_probs: np.ndarray, labels: np.ndarray) -> float:
    """Mean of -log p(label), in nats, from normalised log-probabilities `[N, C]` and labels `[N]`."""
    return float(-log_probs[np.arange(len(labels)), labels].mean())


def accuracy(predicted: np.ndarray, labels: np.ndarray) -> float:
    """Share of predicted classes `[N]` that equal the labels `[N]`."""
    return float((predicted == labels).mean())


# ----------------------------------------------------------------------------------- two classes, referral


def auc_of_counts(ones: np.ndarray, zeros: np.ndarray) -> float:
    """Area under the ROC curve: how probably a score of class 1 lies above one of class 0; ties count half.

    Args:
        ones: How often class 1 has each of the different scores, which ascend, `[G]`; any weights do.
        zeros: The same of class 0, `[G]`.

    Returns:
        A fraction; NaN if a class does not occur.
    """
    pairs = ones.sum() * zeros.sum()
    return float(ones @ (zeros.cumsum() - zeros / 2) / pairs) if pairs else math.nan


def roc_auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """Area under the ROC curve of scores `[N]` for labels `[N]` in {0, 1}; NaN if a class is missing."""
    _, group = np.unique(scores, return_inverse=True)
    return auc_of_counts(*(np.bincount(group, labels == label) for label in (1, 0)))


def referral_auc(
    labels: ArrayLike, scores: ArrayLike, uncertainty: ArrayLike, fractions: Sequence[float]
) -> list[float]:
    """Area under the ROC curve of the examples that are kept when the most uncertain are referred.

    Of N examples the round(N (1 - f)) least uncertain are kept; of equally uncertain ones the first.

    Args:
        labels: In {0, 1}, `[N]`.
        scores: Larger where class 1 is likelier, `[N]`.
        uncertainty: Larger where an example is referred earlier, `[N]`.
        fractions: The shares f that are referred, each in [0, 1].

    Returns:
        The area at each fraction; NaN where one class or none is left.

    Raises:
        UsageError: If the three differ in length, a label is neither 0 nor 1, a number is NaN, or a fraction
            lies outside [0, 1].
    """
    labels, scores, uncertainty = (np.asarray(values) for values in (labels, scores, uncertainty))
    if not (labels.ndim == 1 and labels.shape == scores.shape == uncertainty.shape):
        shapes = ", ".join(str(list(values.shape)) for values in (labels, scores, uncertainty))
        raise UsageError(f"referral_auc needs labels, scores and uncertainty [N] of one length, not {shapes}")
    if not np.isin(labels, (0, 1)).all() or np.isnan(scores).any() or np.isnan(uncertainty).any():
        raise UsageError("referral_auc needs labels 0 or 1, and scores and uncertainty that are not NaN")
    if not all(0 <= fraction <= 1 for fraction in fractions):
        raise UsageError(f"referral_auc needs fractions in [0, 1], not {list(fractions)}")
    order = np.argsort(uncertainty, kind="stable")
    kept = [order[: round(len(order) * (1 - fraction))] for fraction in fractions]
    return [roc_auc(labels[rows], scores[rows]) for rows in kept]


# ------------------------------------------------------------------------- against a reference posterior


def agreement(log_probs: np.ndarray, reference: np.ndarray) -> float:
    """Share of inputs on which two class predictions `[N, C]` name the same class.

    Wilson et al. 2022, Evaluating Approximate Inference in Bayesian Deep Learning, as the two below.
    """
    return accuracy(log_probs.argmax(-1), reference.argmax(-1))


def total_variation(log_probs: np.ndarray, reference: np.ndarray) -> float:
    """Mean over inputs of the total variation distance between class predictions `[N, C]`, in [0, 1]."""
    return float(np.abs(np.exp(log_probs) - np.exp(reference)).sum(-1).mean() / 2)


def wasserstein(draws: np.ndarray, reference: np.ndarray, order: int = 2) -> np.ndarray:
    """Wasserstein distance per input, `[N]`, between the empirical distributions of `[S, N]` and `[R, N]`.

    Exact: in one dimension it is the L1 (order 1) or L2 (order 2) distance between the quantile functions,
    here step functions whose steps lie at multiples of 1/S and 1/R. In the unit of the draws.
    """
    first, second = (np.sort(x.astype(np.float64), axis=0) for x in (draws, reference))
    s, r = len(first), len(second)
    ends = np.union1d(np.arange(1, s + 1) * r, np.arange(1, r + 1) * s)  # whole multiples of 1/(S R)
    shares = np.diff(ends, prepend=0) / (s * r)
    apart = np.abs(first[(ends - 1) // r] - second[(ends - 1) // s])
    return (shares @ apart**order) ** (1 / order)
