"""Ranks of a truth among the draws of a posterior, and what they say of its width.

Shapes: W worlds, S draws, T places in each. Where the truth is drawn from the prior, its rank among S
independent draws of the exact posterior is uniform on 0 to S: Talts et al. 2018, "Validating Bayesian
Inference Algorithms with Simulation-Based Calibration", Theorem 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bench import figures
from bench.comparison import Comparison, FinishedRun

LEVEL = 0.95
"""Of the band in which all distances of exact posteriors lie at a time, so often."""


def placed(draws: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """How many of the draws `[W, S, T]` lie below the truth `[W, T]`: ranks from 0 to S, `[W, T]`."""
    return np.asarray((draws < truth[:, None]).sum(1))


def deviations(ranks: np.ndarray, number: int) -> np.ndarray:
    """Largest distance of the ranks' distribution from uniform on 0 to `number`, at each place `[T]`."""
    found = np.arange(number + 1)
    shares = (ranks[:, :, None] <= found).mean(0)  # [T, S + 1]
    return np.asarray(np.abs(shares - (found + 1) / (number + 1)).max(1))


def band(worlds: int, places: int, level: float = LEVEL) -> float:
    """What the largest of `places` distances of an exact posterior stays below, at least so often.

    The inequality of Dvoretzky, Kiefer and Wolfowitz with Massart's constant (1990, "The Tight Constant in
    the Dvoretzky-Kiefer-Wolfowitz Inequality", Corollary 1), which holds for any distribution and all ranks
    at a time, at each of the places with an equal share of 1 - level.
    """
    return float(np.sqrt(np.log(2 * places / (1 - level)) / (2 * worlds)))


def covered(ranks: np.ndarray, number: int, level: float) -> tuple[float, float]:
    """Share of ranks in the central interval nearest to a level, and the share of an exact posterior."""
    outside = round((number + 1) * (1 - level) / 2)
    inside = (ranks >= outside) & (ranks <= number - outside)
    return float(inside.mean()), (number + 1 - 2 * outside) / (number + 1)


def scale(draws: np.ndarray, truth: np.ndarray) -> float | None:
    """Root mean square of (truth - mean) / sd over worlds and places; None where draws have no spread.

    1 for an exact posterior of many draws, but for sqrt(1 + 2 / S) of so few; above 1 it is too narrow, or
    its mean is off.
    """
    if not (sd := draws.std(1, ddof=1)).all():
        return None
    return float(np.sqrt(np.square((truth - draws.mean(1)) / sd).mean()))


def comparison(runs: Sequence[FinishedRun]) -> Comparison:
    """A row per run: its distance, the band, and whether the posterior is too narrow or too wide."""
    rows, curves = [], []
    for run in runs:
        draws, truth = run.task.kept(run.arrays)
        ranks, number = placed(draws, truth), draws.shape[1]
        distance, limit = deviations(ranks, number).max(), band(*truth.shape)
        inside, exact = covered(ranks, number, 0.9)
        width = scale(draws, truth)
        if exact == 1:  # so few draws have no interval of 90%
            verdict = "too narrow" if width is None or width > 1 else "too wide"
        else:
            verdict = "too narrow" if inside < exact else "too wide"
        rows.append(
            [
                f"`{run.line}`",
                f"`{run.task_name}`",
                str(run.seed),
                f"{distance:.3f}",
                f"{limit:.3f}",
                "as an exact posterior" if distance <= limit else verdict,
                "-" if exact == 1 else f"{inside:.0%}",
                "-" if width is None else f"{width:.2f}",
                f"{run.metrics['nll']:.3f}",
            ]
        )
        levels = (np.arange(number + 1) + 1) / (number + 1)
        shares = (ranks[:, :, None] <= np.arange(number + 1)).mean((0, 1)) - levels
        curves.append(figures.Curve(run.task_name, run.line, list(zip(levels, shares, strict=True))))
    header = [
        *("method", "task", "seed", "deviation", "band", "the posterior is"),
        *("truths in the 90% interval", "rms of (truth - mean) / sd", "NLL, nats"),
    ]
    chart = figures.panels(curves, "share of ranks, exact", "share of ranks, minus exact")
    return Comparison({"sbc-ranks": chart}, header, rows)
