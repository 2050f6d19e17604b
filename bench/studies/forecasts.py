"""How good predicted numbers are: CRPS, interval scores, coverage, sharpness, and PIT values.

A prediction is the equal mixture of S normals, as `bench.studies.normals` reads it from a run.

Source: Gneiting and Raftery 2007, "Strictly Proper Scoring Rules, Prediction, and Estimation" (CRPS, interval
score); Grimit et al. 2006, "The continuous ranked probability score for circular variables and its
application to mesoscale forecast ensemble verification" (CRPS of a mixture of normals in closed form); Dawid
1984, "Statistical Theory: The Prequential Approach" (PIT values are uniform where predictions are right).

Shapes: S weight samples, N test rows. Units: CRPS, interval scores and widths are in the target's own, the
others are fractions.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench import figures
from bench.spec import Metric
from bench.studies import normals

LEVELS = (90, 50, 80, 95)
"""Central intervals that are scored, in percent; the first are shown first."""
BINS = 10
"""Of the PIT histogram."""
_BLOCK = 32_000
"""Normals of mixtures that are scored at once, few enough for the cache of a processor."""


def measures(unit: str, where: str = "") -> dict[str, Metric]:
    """The metrics of `measured` by name.

    Args:
        unit: Of the target.
        where: What descriptions end with, such as "; between the clusters".
    """
    found = {"crps": Metric(f"mean continuous ranked probability score{where}", unit, 0, np.inf)}
    for level in LEVELS:
        interval = f"the central {level}% interval{where}"
        share = f"distance from {level / 100:g} of the share of test targets in {interval}"
        found[covered(level)] = Metric(share, "fraction", 0, 1)
        found[f"interval_score_{level}"] = Metric(f"mean score of {interval}", unit, 0, np.inf)
        found[f"width_{level}"] = Metric(f"mean width of {interval}: sharpness", unit, 0, np.inf)
    distance = f"largest distance of the PIT values' distribution function from the uniform one{where}"
    return found | {"pit_distance": Metric(distance, "fraction", 0, 1)}


def measured(mean: np.ndarray, sigma: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    """Every one of `measures`.

    Args:
        mean: Of the normals, `[..., S, N]`.
        sigma: Their standard deviations, above 0, of a shape that broadcasts to the same.
        targets: `[..., N]`.
    """
    # All scores are of single rows: those of several splits make one table.
    sigma = np.moveaxis(np.broadcast_to(sigma, mean.shape), -2, 0).reshape(mean.shape[-2], -1)
    mean, targets = np.moveaxis(mean, -2, 0).reshape(sigma.shape), targets.ravel()
    below = normals.below(mean, sigma, targets)
    found = {"crps": float(crps(mean, sigma, targets).mean())}
    for level in LEVELS:
        tail = (1 - level / 100) / 2
        low, high = normals.quantiles(mean, sigma, tail), -normals.quantiles(-mean, sigma, tail)
        score = interval_score(low, high, targets, level / 100)
        found[covered(level)] = abs(normals.coverage(below, level / 100) - level / 100)
        found[f"interval_score_{level}"] = float(score.mean())
        found[f"width_{level}"] = float((high - low).mean())
    return found | {"pit_distance": distance(below)}


def covered(level: int) -> str:
    """Name of the metric of coverage; that of 90% is older than the others, and says no level."""
    return "coverage_error" if level == 90 else f"coverage_error_{level}"


def crps(mean: np.ndarray, sigma: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Integral of (F(x) - [y <= x])^2 over x, for targets y under their mixtures F, `[N]`.

    In closed form: E|X - y| - E|X - X'| / 2 of independent X and X' is a sum of expected absolute values of
    normals, its second part over pairs of the S.

    Args:
        mean: Of the normals, `[S, N]`.
        sigma: Their standard deviations, above 0, `[S, N]`.
        targets: `[N]`.
    """
    tensors = (torch.tensor(array, dtype=torch.float64) for array in (mean, sigma, targets))
    columns = max(1, _BLOCK // len(mean))
    blocks = zip(*(tensor.split(columns, -1) for tensor in tensors), strict=True)
    return np.concatenate([_crps(*block).numpy() for block in blocks])


def _crps(mean: Tensor, sigma: Tensor, targets: Tensor) -> Tensor:
    size, variance = len(mean), sigma**2
    between = torch.zeros_like(targets)
    for i in range(size - 1):
        between += _absolute(mean[i] - mean[i + 1 :], variance[i] + variance[i + 1 :]).sum(0)
    within = 2 / math.sqrt(math.pi) * sigma.sum(0)  # of X and X' from one normal
    return _absolute(targets - mean, variance).mean(0) - (between + within / 2) / size**2


def _absolute(mean: Tensor, variance: Tensor) -> Tensor:
    """Expected absolute value of normals; by torch, whose error function takes a third of scipy's time."""
    sigma = variance.sqrt()
    z = mean / sigma
    sure = torch.erf(z / math.sqrt(2)).mul_(mean)
    return z.square_().mul_(-0.5).exp_().mul_(sigma).mul_(math.sqrt(2 / math.pi)).add_(sure)


def interval_score(low: np.ndarray, high: np.ndarray, targets: np.ndarray, level: float) -> np.ndarray:
    """Width of each interval, and 2 / (1 - level) times how far its target lies outside, `[N]`.

    Proper for the central interval of this level (Gneiting and Raftery 2007, eq. 43).

    Args:
        low: Lower ends, `[N]`.
        high: Upper ends, `[N]`.
        targets: `[N]`.
        level: Probability of the intervals, in (0, 1).
    """
    outside = np.maximum(low - targets, 0) + np.maximum(targets - high, 0)
    return np.asarray(high - low + 2 / (1 - level) * outside)


def distance(values: np.ndarray) -> float:
    """Largest distance of the distribution function of values in [0, 1] from the uniform one (Kolmogorov)."""
    ordered = np.sort(values, axis=None)
    steps = np.arange(len(ordered) + 1) / len(ordered)
    return float(np.maximum(steps[1:] - ordered, ordered - steps[:-1]).max())


def histogram(below: np.ndarray) -> np.ndarray:
    """Share of PIT values in each of `BINS` bins of one width, times their number: 1 everywhere if uniform.

    Args:
        below: Probabilities below the targets, of any shape (`normals.below`).
    """
    counts = np.histogram(below, BINS, (0, 1))[0]
    return np.asarray(counts * BINS / below.size)


def chart(below: np.ndarray) -> Any:
    """The PIT histogram: a valley where predictions are too narrow, a hill where they are too wide."""
    middles = (np.arange(BINS) + 0.5) / BINS
    points = list(zip(middles.tolist(), histogram(below).tolist(), strict=True))
    level = [(x, 1.0) for x, _ in points]
    title = "Density of the predicted probabilities below the test targets (PIT)"
    curves = [figures.Curve(title, "measured", points), figures.Curve(title, "calibrated", level)]
    return figures.panels(curves, "probability below the target", "density")
