"""Predicted numbers as runs keep them: mixtures of S normals, for targets that were standardised.

Shapes: S weight samples, N test rows; arrays may have further axes in front, such as one of K splits. Units:
stored means and variances are of standardised targets, everything computed from them is in the target's own.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from scipy.special import logsumexp, ndtr, ndtri

from bench import figures, likelihoods
from bench.contract import Likelihood
from bench.spec import Arrays, Row
from bench.studies import conformal

Noise = Literal["learned", "heteroscedastic"]
"""Of the target: one standard deviation that is learned along, or one per input that the network gives."""

LEVELS = np.arange(10, 100, 10)
"""Central intervals whose coverage is drawn, in percent."""

SMALLEST = 1e-12
"""Least stored variance, in squared standard deviations of the target."""

_NEAR, _ULPS = 1e-12, 4 * np.finfo(np.float64).eps
"""Tolerance of a quantile: in standard deviations of the narrowest normal, and of its own size."""
_BLOCK = 20_000
"""Normals of the mixtures that are solved at once, few enough for the cache of a processor."""


def posed(noise: Noise) -> tuple[int, Likelihood]:
    """How many outputs a network has for a number with this noise, and how they explain it."""
    if noise == "heteroscedastic":
        return 2, likelihoods.Heteroscedastic()
    return 1, likelihoods.Gaussian("learned")


def stored(mean: torch.Tensor, variance: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Means and variances `[S, N]` as float32, in which networks compute: nothing is rounded."""
    return mean.float().numpy(), variance.clamp(min=SMALLEST).float().numpy()


def without_repeats(variance: np.ndarray) -> np.ndarray:
    """Variances `[..., S, N]` with a single entry along S or N where all are equal there."""
    for axis in (-2, -1):
        first = variance.take([0], axis)
        if (variance == first).all():
            variance = first
    return variance


def mixtures(arrays: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of the S normals of every prediction, `[..., S, N]`.

    Both in the target's unit; the second with one entry along S or N where it is the same for all.

    Args:
        arrays: `mean`, `variance` and `centre_and_scale` `[..., 2]`, those of the target.
    """
    centre, scale = np.moveaxis(arrays["centre_and_scale"], -1, 0)[..., None, None]
    mean = centre + scale * arrays["mean"].astype(np.float64)
    return mean, scale * np.sqrt(arrays["variance"].astype(np.float64))


def log_density(mean: np.ndarray, sigma: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Log density of targets `[..., N]` under their mixtures, `[..., N]`, in nats per the target's unit."""
    z = (targets[..., None, :] - mean) / sigma
    normaliser = np.log(mean.shape[-2] * np.sqrt(2 * np.pi))
    return np.asarray(logsumexp(-0.5 * z**2 - np.log(sigma), axis=-2) - normaliser)


def below(mean: np.ndarray, sigma: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Probability of a number below the values `[..., N]` under their mixtures, `[..., N]`."""
    return np.asarray(ndtr((values[..., None, :] - mean) / sigma).mean(-2))


def coverage(below: np.ndarray, level: float) -> float:
    """Share of targets inside the central interval of this level, of the probabilities below them."""
    return float((np.abs(below - 0.5) <= level / 2).mean())


def by_width(mean: np.ndarray, sigma: np.ndarray, below: np.ndarray) -> list[conformal.Quartile]:
    """Coverage of the central 90% intervals by quarters of the predicted standard deviation.

    Args:
        mean: Of mixtures `[S, N]`.
        sigma: Of mixtures, as `mixtures` gives them.
        below: Probabilities below the targets `[N]`.
    """
    sd = np.sqrt((np.broadcast_to(sigma, mean.shape) ** 2).mean(0) + mean.var(0))
    return conformal.by_width(sd, np.abs(below - 0.5) <= 0.45)


def remarks(arrays: Arrays) -> list[str]:
    """Sentences on the coverage of the central 90% intervals by quarters of the predicted width.

    Args:
        arrays: As of `mixtures`, of one split, and `targets` `[N]`.
    """
    mean, sigma = mixtures(arrays)
    quarters = by_width(mean, sigma, below(mean, sigma, arrays["targets"]))
    if not quarters:
        return [
            "the 90% intervals are equally wide in all rows: where the noise differs from row to row, "
            "--task.noise heteroscedastic learns it"
        ]
    shares = ", ".join(f"{covered / size:.2f}" for size, covered in quarters)
    said = [f"coverage of the 90% intervals by quarters of the rows, the narrowest first: {shares}"]
    if conformal.is_bad(quarters, 0.9):
        said.append(
            "warning: some of these are too far from 0.90 for chance (binomial, false alarms in 1%): the "
            "intervals are wrong where they are narrow or wide; --task.noise heteroscedastic, or "
            "conformal ones (docs/own-data.md)"
        )
    return said


def coverage_rows(below: np.ndarray) -> list[Row]:
    """The coverage of central intervals by their level in percent, as points of `curves.csv`."""
    return [Row("coverage", "test", int(c), coverage(below, c / 100)) for c in LEVELS]


def coverage_chart(rows: list[Row]) -> Any:
    """The coverage that is among the points of a run, against its level."""
    rows = [row._replace(series="measured") for row in rows if row.curve == "coverage"]
    rows += [Row("coverage", "calibrated", int(c), c / 100) for c in LEVELS]
    return figures.lines(
        rows, "Share of test targets in central intervals", "level of the interval, %", "share"
    )


def quantiles(mean: np.ndarray, sigma: np.ndarray, probability: float) -> np.ndarray:
    """The number below which a mixture has this probability, `[N]`, to 1e-12 of its narrowest normal.

    Newton's steps on the logarithm of the probability inside a bracket. One that leaves the bracket, or is
    not half as long as the last, is replaced by halving. The bracket begins with the quantiles of the S
    normals, among which the mixture's lies.

    Args:
        mean: Of the normals, `[S, N]`.
        sigma: Their standard deviations, above 0; `[S, N]`, or with one entry along S or N.
        probability: In (0, 1).
    """
    if probability > 0.5:  # 1 - p is exact there, and small probabilities have all their digits
        return -quantiles(-mean, sigma, 1 - probability)
    sigma = np.broadcast_to(sigma, mean.shape)
    size = max(1, _BLOCK // len(mean))
    columns = [slice(i, i + size) for i in range(0, mean.shape[1], size)]
    return np.concatenate([_quantiles(mean[:, rows], sigma[:, rows], probability) for rows in columns])


def _quantiles(mean: np.ndarray, sigma: np.ndarray, probability: float) -> np.ndarray:
    each = mean + sigma * ndtri(probability)
    low, high = each.min(0), each.max(0)
    spread = np.sqrt((sigma**2).mean(0) + mean.var(0))
    found = np.clip(mean.mean(0) + spread * ndtri(probability), low, high)
    last, narrowest, left = high - low, sigma.min(0), np.arange(mean.shape[1])
    while len(left):
        x, m, s = found[left], mean[:, left], sigma[:, left]
        z = (x - m) / s
        # By torch, whose error function takes half of scipy's time, and is right in the lower tail too.
        value = torch.erfc(torch.from_numpy(z * -np.sqrt(0.5))).numpy().mean(0) / 2
        density = (np.exp(-0.5 * z**2) / s).mean(0) / np.sqrt(2 * np.pi)
        low[left], high[left] = (
            np.where(value < probability, x, low[left]),
            np.where(value < probability, high[left], x),
        )
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            step = -value / density * np.log(value / probability)
        bound = _NEAR * narrowest[left] + _ULPS * np.abs(x)
        settled = np.abs(step) <= bound
        inside = (x + step > low[left]) & (x + step < high[left]) & (2 * np.abs(step) <= last[left])
        found[left] = np.where(settled | inside, x + step, (low[left] + high[left]) / 2)
        last[left] = np.abs(found[left] - x)
        left = left[~settled & (high[left] - low[left] > bound)]
    return found
