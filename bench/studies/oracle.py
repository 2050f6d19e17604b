"""Worlds whose truth is known: a Gaussian process at real inputs is the law that draws the targets.

Inputs are real rows; what is observed there is drawn. The function of a world is a draw of a Gaussian process
of mean 0 with covariance k(x, x') = s^2 exp(-|x - x'|^2 / (2 l^2)), and a little more where x is x'. Whoever
knows this law has the ideal posterior: nobody can be better on average, and its parts are the truth that
estimates of uncertainty are held to. `bench/studies/oracle_fit.py` says where s, l and the noise come from.

Each world is posed three times (`CONDITIONS`): as it is; with more noise, the function and the inputs the
same; and with a quarter of the training rows, the noise the same.

Shapes: W worlds, R rows, N test inputs, D inputs of a row. Units: of the drawn targets, whose sd is about 1.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
from scipy.linalg import cho_factor, cho_solve, cholesky

from bench import randomness

CONDITIONS = ("base", "noisier", "fewer")
"""Of a world: as it is, with more noise, with a quarter of the training rows."""
SHARE_OF_FEWER = 0.25
NUGGET = 1e-4
"""Of s^2: variance of the part of a function that is independent from row to row.

It bounds the condition of the covariance, so that all machines draw the same numbers."""
GRID = 1 / 1024
"""Drawn numbers are rounded to multiples of it: machines that sum in other orders then agree."""

NOISE_FACTOR = 2.0
"""What the sd of the noise is multiplied by in the condition noisier."""


class Kernel(NamedTuple):
    """Covariance of a Gaussian process: standard deviation s, length scale l in units of the inputs."""

    scale: float
    lengthscale: float

    def between(self, one: np.ndarray, other: np.ndarray) -> np.ndarray:
        """Covariances of rows `[R, D]` and other rows `[N, D]`, `[R, N]`."""
        squares = (one**2).sum(1)[:, None] + (other**2).sum(1) - 2 * one @ other.T
        covariance: np.ndarray = self.scale**2 * np.exp(-0.5 * squares.clip(min=0) / self.lengthscale**2)
        return covariance

    def within(self, rows: np.ndarray) -> np.ndarray:
        """Covariances of rows `[R, D]` among themselves, `[R, R]`, with the nugget."""
        covariance = self.between(rows, rows)
        np.fill_diagonal(covariance, self.scale**2 * (1 + NUGGET))
        return covariance


DIABETES = Kernel(1.082, 6.241)
"""Of the law of `oracle_regression`."""
NOISE, NOISE_SLOPE, NOISE_COLUMN = 0.6774, 0.1295, 2
"""Sd of the noise where the body mass index is average; by how much its log grows per sd of it; its
column."""
DIGITS = Kernel(3.0, 0.746)
"""Of each class' latent function in `oracle_classification`; s is a choice, l is fitted."""
COMPONENTS = 3
"""Principal components of digits that are inputs."""


def rounded(values: np.ndarray) -> np.ndarray:
    """The nearest multiples of `GRID`."""
    multiples: np.ndarray = np.round(values / GRID) * GRID
    return multiples


def diabetes() -> np.ndarray:
    """The inputs of diabetes `[442, 10]` in a fixed random order, each of mean 0 and sd 1."""
    from sklearn import datasets  # here, for its import takes a second

    inputs = datasets.load_diabetes(scaled=False).data
    order = np.random.default_rng(randomness.derive(0, "oracle_regression", "rows")).permutation(len(inputs))
    standard: np.ndarray = ((inputs - inputs.mean(0)) / inputs.std(0))[order]
    return standard


def digits() -> np.ndarray:
    """First principal components of the digits `[1797, 3]` in a fixed random order, each of sd 1.

    The sign of a component is that of its largest pixel.
    """
    from sklearn import datasets

    pixels = datasets.load_digits().data
    centred = pixels - pixels.mean(0)
    axes = np.linalg.eigh(centred.T @ centred)[1][:, ::-1][:, :COMPONENTS]
    axes = axes * np.sign(axes[np.abs(axes).argmax(0), np.arange(COMPONENTS)])
    components = centred @ axes
    order = np.random.default_rng(randomness.derive(0, "oracle_classification", "rows"))
    return rounded(components / components.std(0))[order.permutation(len(pixels))]


def noise(inputs: np.ndarray) -> np.ndarray:
    """Standard deviation of the noise of `oracle_regression` at rows `[R, 10]`, `[R]`."""
    sd: np.ndarray = NOISE * np.exp(NOISE_SLOPE * inputs[:, NOISE_COLUMN])
    return sd


def functions(kernel: Kernel, inputs: np.ndarray, seeds: list[int]) -> np.ndarray:
    """Draws of the process at rows `[R, D]`, one for each seed, `[W, R]`."""
    root = cholesky(kernel.within(inputs), lower=True)
    normals = [np.random.default_rng(seed).standard_normal(len(inputs)) for seed in seeds]
    return rounded((root @ np.stack(normals, 1)).T)


class Posterior(NamedTuple):
    """What the ideal observer knows of the function at N inputs: mean `[N]` and covariance `[N, N]`."""

    mean: np.ndarray
    covariance: np.ndarray


def regression(
    kernel: Kernel, rows: np.ndarray, sigma: np.ndarray, targets: np.ndarray, inputs: np.ndarray
) -> Posterior:
    """The posterior of a function that was observed with normal noise: the closed form.

    Rasmussen and Williams 2006, "Gaussian Processes for Machine Learning", equations 2.23 and 2.24.

    Args:
        kernel: Of the process.
        rows: Where it was observed, `[R, D]`.
        sigma: Standard deviation of the noise there, `[R]`.
        targets: What was observed, `[R]`.
        inputs: Where it is asked for, `[N, D]`; none of the rows.
    """
    observed = cho_factor(kernel.within(rows) + np.diag(sigma**2), lower=True)
    across = kernel.between(rows, inputs)
    known = cho_solve(observed, across)
    return Posterior(known.T @ targets, kernel.within(inputs) - across.T @ known)


TRAIN, VAL, TEST = 240, 102, 100
"""Rows of diabetes that are trained on, that are validated on, and that are tested on."""


class Regression(NamedTuple):
    """Worlds of `oracle_regression`, rows in the order train, val, test.

    Attributes:
        inputs: `[R, D]`.
        sigma: Standard deviation of the noise, `[R]`.
        functions: `[W, R]`.
        targets: Observations as they are, and with more noise of the same draws, `[2, W, R]`.
        variance: Of the function in the ideal posterior at the test inputs, by condition, `[3, N]`. It is
            the same in all worlds.
    """

    inputs: np.ndarray
    sigma: np.ndarray
    functions: np.ndarray
    targets: np.ndarray
    variance: np.ndarray


def fewer(train: int) -> int:
    """How many of so many training rows, the first ones, are left in the condition fewer."""
    return max(2, round(SHARE_OF_FEWER * train))


@cache
def regression_worlds(first: int, worlds: int) -> Regression:
    """The worlds with the numbers `first` to `first + worlds - 1`."""
    inputs = diabetes()
    sigma = noise(inputs)
    numbers = range(first, first + worlds)
    seeds = [randomness.derive(k, "oracle_regression", "function") for k in numbers]
    drawn = functions(DIABETES, inputs, seeds)
    errors = np.stack(
        [
            np.random.default_rng(randomness.derive(k, "oracle_regression", "noise")).standard_normal(
                len(inputs)
            )
            for k in numbers
        ]
    )
    targets = np.stack([rounded(drawn + factor * sigma * errors) for factor in (1.0, NOISE_FACTOR)])
    tested = inputs[TRAIN + VAL :]
    posed = ((TRAIN, 1.0), (TRAIN, NOISE_FACTOR), (fewer(TRAIN), 1.0))
    variance = [
        np.diag(regression(DIABETES, inputs[:n], c * sigma[:n], np.zeros(n), tested).covariance)
        for n, c in posed
    ]
    return Regression(inputs, sigma, drawn, targets, np.stack(variance))
