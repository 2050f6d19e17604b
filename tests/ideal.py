"""The oracle tasks with one world each, and what the ideal posterior would leave in a run of theirs."""

from functools import cache

import numpy as np
import pytest
import torch

from bench import metrics
from bench.studies import oracle, oracle_classes
from bench.tasks import oracle_classification, oracle_regression
from bench.tasks.oracle_classification import OracleClassification
from bench.tasks.oracle_regression import OracleRegression

DRAWS = 800


def numbers(**values):
    """The task of numbers, with one world."""
    return OracleRegression(oracle_regression.Settings(**{"worlds": 1, **values}))


def classes(**values):
    """The task of classes, with one small world."""
    return OracleClassification(oracle_classification.Settings(**{"worlds": 1, "num_train": 24, **values}))


def of_run(task, arrays):
    """All arrays of a run that left these."""
    return arrays | task.given() | task.targets()


@cache
def ideal_numbers():
    """What the ideal posterior would leave: draws of the function, and the noise as it is."""
    task = numbers()
    w, size = task.truth, oracle.TRAIN
    tested, g = slice(size + oracle.VAL, None), np.random.default_rng(0)
    known = oracle.regression(
        oracle.DIABETES, w.inputs[:size], w.sigma[:size], w.targets[0, 0, :size], w.inputs[tested]
    )
    mean = g.multivariate_normal(known.mean, known.covariance, DRAWS)[None]
    variance = w.sigma[tested] ** 2
    moved = np.stack([np.stack([w.variance[1], 4 * variance]), np.stack([w.variance[2], variance])])
    return {
        "mean": mean.astype(np.float16),
        "variance": variance[None, None].astype(np.float16),
        "moved_parts": moved[:, :, None].astype(np.float32),
    }


@cache
def ideal_classes():
    """What the ideal posterior would leave: draws of an independent run of the sampler."""
    task = classes()
    parts, kept = [], None
    for k, condition in enumerate(oracle.CONDITIONS):
        rows = oracle.fewer(24) if condition == "fewer" else 24
        drawn = oracle_classes.sample(
            oracle.DIGITS,
            task.truth.inputs[:rows],
            task.truth.labels[int(condition == "noisier"), 0, :rows],
            task.truth.inputs[24 + oracle_classes.VAL :],
            oracle_classes.flipped(condition),
            DRAWS,
            seed=77 + k,
        )
        log_probs = oracle_classes.log_probs(drawn.latent, oracle_classes.flipped(condition))
        if kept is None:
            kept = log_probs
        else:
            parts.append(oracle_classification.parts_of(log_probs))
    return {
        "log_probs": metrics.store(torch.from_numpy(kept))[None],
        "moved_parts": np.stack(parts)[:, :, None].astype(np.float32),
    }


CASES = {"numbers": (numbers, ideal_numbers), "classes": (classes, ideal_classes)}
each = pytest.mark.parametrize("kind", CASES)
