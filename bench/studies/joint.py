"""Joint predictions: the log loss of whole batches of targets, which tells what marginals cannot.

A predictor gives S draws of its model. Under one draw targets are independent, and over the draws they are
not: a model that is unsure of a function expects the targets of two like inputs to be wrong together. The
joint log loss of a batch of targets y_1 .. y_T at inputs x_1 .. x_T is

    -log 1/S sum_s prod_t p_s(y_t | x_t)

It is a proper score of the joint prediction. Most batches of independent inputs hardly see dependence, so the
batches are dyadic: two inputs are drawn as anchors, and each of the T = 10 inputs of a batch is one of the
two, by the toss of a coin. Osband et al. 2022, "The Neural Testbed: Evaluating Joint Predictions".

N inputs make N / 2 pairs of anchors, the inputs 2i and 2i + 1, so that no two pairs share an input. Every
pair has `REPEATS` batches. Shapes: P pairs, S draws, T = `REPEATS` x `BATCH` targets of a pair. Units: nats.
"""

from __future__ import annotations

import numpy as np
from scipy.special import logsumexp

from bench import randomness

BATCH, REPEATS = 10, 10
"""Targets of a batch, batches of a pair."""


def anchors(pairs: int, *purpose: str | int) -> np.ndarray:
    """Which of its two anchors each input of the batches is, 0 or 1, uint8 `[P, T]`, for a purpose."""
    generator = np.random.default_rng(randomness.derive(0, *purpose))
    return generator.integers(2, size=(pairs, REPEATS * BATCH)).astype(np.uint8)


def rows(anchors: np.ndarray) -> np.ndarray:
    """Numbers of the inputs that the batches are made of, `[P, T]`, of which anchor each is."""
    return 2 * np.arange(len(anchors))[:, None] + anchors


def log_losses(log_probs: np.ndarray, batch: int = BATCH) -> np.ndarray:
    """Joint log loss of each pair, mean over its batches, `[P]`.

    Args:
        log_probs: Log-probability or log density of each target under each draw, `[S, P, T]`.
        batch: Targets of a batch; those of a pair are its batches, one after another.
    """
    size, pairs, _ = log_probs.shape
    of_batch = log_probs.reshape(size, pairs, -1, batch).sum(-1)
    return np.asarray((np.log(size) - logsumexp(of_batch, axis=0)).mean(-1))


def marginal(log_probs: np.ndarray) -> np.ndarray:
    """Log-probability of each target by itself, averaged over the draws, `[P, T]`, of `[S, P, T]`."""
    return log_losses(log_probs.reshape(len(log_probs), -1, 1), 1).reshape(log_probs.shape[1:]) * -1
