"""The model from which synthetic eyes are drawn, and what the best reader of their photographs could know.

An eye has a severity z ~ N(0, 1) that nobody sees. Each kind of lesion has a Poisson number of lesions, whose
mean grows with z. A grader writes a level 0-4: the severity with an error, cut into five; rarely a level that
has nothing to do with the eye. A photograph has an artefact of strength s in [0, 1] that hides each lesion
with probability s. So of kind k there are to be seen

    c_k | z, s ~ Poisson((1 - s) rate_k(z)),

and nothing else in the photograph depends on z. Given the counts c and s, level and photograph are
independent: whoever sees the photograph, of this eye alone, can rank eyes no better than by
P(level > 1 | c, s), which `positive_probability` integrates. Its AUC (`bayes_auc`) is a bound from above for
every network.

Shares of the levels: those of the 35,126 training images of Kaggle's diabetic retinopathy detection (2015).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.special import expit, ndtr, ndtri

SHARES = (0.735, 0.070, 0.151, 0.025, 0.019)
"""Probability of each level 0-4."""
KINDS = ("microaneurysms", "haemorrhages", "exudates")
REFERABLE = 2
"""The lowest level whose label is positive."""
EYES_CORRELATION = 0.8
"""Of the severities of a patient's two eyes."""
GRADER_ERROR = 0.2
"""Standard deviation of the severity that the grader sees, about the eye's own."""
CARELESS = 0.003
"""Probability that the level written has nothing to do with the eye."""
ARTEFACTS = (0.5, 1.0)
"""The strength of artefacts is Beta distributed with these parameters."""
SECOND_CAMERA = 0.4
"""Share of patients whose eyes are photographed with the second camera."""


class Rate(NamedTuple):
    """Mean number of lesions of a kind: `background + most / (1 + exp(-steepness (z - middle)))`."""

    background: float
    most: float
    steepness: float
    middle: float

    def __call__(self, severity: np.ndarray) -> np.ndarray:
        """The mean number, of the shape of `severity`."""
        return self.background + self.most * expit(self.steepness * (severity - self.middle))


RATES = (
    Rate(background=0.30, most=8.0, steepness=4.0, middle=0.95),
    Rate(background=0.06, most=12.0, steepness=3.5, middle=1.40),
    Rate(background=0.15, most=16.0, steepness=3.0, middle=1.80),
)
"""One for each of KINDS; what stands in the background are marks of healthy eyes that look alike."""

GRID = np.linspace(-5.0, 5.0, 201)
"""Severities at which integrals over N(0, 1) are evaluated: the trapezoidal rule, error below 1e-6."""


@dataclass(frozen=True, kw_only=True)
class Eyes:
    """Eyes of P patients, left and right.

    Attributes:
        severity: `[P, 2]`, what nobody sees.
        levels: `[P, 2]`, 0-4, what a grader wrote.
        strength: `[P, 2]`, in [0, 1], of the photograph's artefact.
        visible: `[P, 2, 3]`, lesions of each kind that the artefact leaves.
        camera: `[P]`, 0 or 1.
    """

    severity: np.ndarray
    levels: np.ndarray
    strength: np.ndarray
    visible: np.ndarray
    camera: np.ndarray


def draw(generator: np.random.Generator, patients: int) -> Eyes:
    """Draws the eyes of so many patients."""
    pairs = (patients, 2)
    shared, own = generator.standard_normal((patients, 1)), generator.standard_normal(pairs)
    severity = np.sqrt(EYES_CORRELATION) * shared + np.sqrt(1 - EYES_CORRELATION) * own
    seen = severity + GRADER_ERROR * generator.standard_normal(pairs)
    levels = np.searchsorted(_cuts(), seen)
    careless = generator.random(pairs) < CARELESS
    levels = np.where(careless, generator.choice(len(SHARES), pairs, p=SHARES), levels)
    strength = generator.beta(*ARTEFACTS, pairs)
    means = np.stack([rate(severity) for rate in RATES], -1)
    visible = generator.poisson((1 - strength[..., None]) * means)
    camera = (generator.random(patients) < SECOND_CAMERA).astype(np.int64)
    return Eyes(severity=severity, levels=levels, strength=strength, visible=visible, camera=camera)


def _cuts() -> np.ndarray:
    """Where the severity that the grader sees passes from one level to the next, `[4]`."""
    return np.sqrt(1 + GRADER_ERROR**2) * ndtri(np.cumsum(SHARES)[:-1])


def positive_given_severity(severity: np.ndarray) -> np.ndarray:
    """P(level > 1 | z), of the shape of `severity`."""
    attentive = ndtr((severity - _cuts()[REFERABLE - 1]) / GRADER_ERROR)
    return CARELESS * sum(SHARES[REFERABLE:]) + (1 - CARELESS) * attentive


def positive_probability(visible: np.ndarray, strength: np.ndarray) -> np.ndarray:
    """P(level > 1 | lesions that are visible, strength of the artefact): all that a photograph can tell.

    By Bayes's rule p(z | c, s) is proportional to exp(-z^2 / 2) prod_k rate_k(z)^c_k exp(-(1 - s) rate_k(z)).

    Args:
        visible: Counts of each kind `[..., 3]`.
        strength: `[...]`.
    """
    means = np.stack([rate(GRID) for rate in RATES])  # [3, G]
    log_density = np.asarray(visible) @ np.log(means) - (1 - np.asarray(strength)[..., None]) * means.sum(0)
    log_density -= GRID**2 / 2
    density = np.exp(log_density - log_density.max(-1, keepdims=True))  # [..., G]
    return density @ positive_given_severity(GRID) / density.sum(-1)


@functools.cache
def bayes_auc(batches: int = 20, patients: int = 5_000) -> tuple[float, float]:
    """AUC for level > 1 that no reader of single photographs exceeds on average, and its standard error.

    Monte Carlo over so many populations from a fixed seed. In each, a pair of eyes i, j counts by the
    probability p_i (1 - p_j) that i alone is positive, in place of labels: less noise.
    """
    generator = np.random.default_rng(17)
    values = []
    for _ in range(batches):
        eyes = draw(generator, patients)
        probability = positive_probability(eyes.visible, eyes.strength).ravel()
        values.append(expected_auc(probability, probability))
    return float(np.mean(values)), float(np.std(values, ddof=1) / np.sqrt(batches))


def expected_auc(scores: np.ndarray, probability: np.ndarray) -> float:
    """AUC of scores where labels are known by their probabilities (0 and 1 where they are known).

    Args:
        scores: `[N]`, higher for what is rather positive; ties count half.
        probability: Of being positive, `[N]`.
    """
    _, rank = np.unique(scores, return_inverse=True)
    positive, negative = np.bincount(rank, probability), np.bincount(rank, 1 - probability)
    below = np.cumsum(negative) - negative
    return float(positive @ (below + negative / 2) / (positive.sum() * negative.sum()))
