"""Scores and uncertainties of class predictions, in nats and fractions.

Shapes: S samples, B examples, C classes. Log-probabilities may be minus infinity (probability zero).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

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
