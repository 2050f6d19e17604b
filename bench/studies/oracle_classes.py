"""Worlds of classes: the softmax of Gaussian processes is the law, and the ideal posterior is sampled.

Of C classes each has a latent function, an independent draw of a Gaussian process
(`bench/studies/oracle.py`); the probabilities of the classes are their softmax. In the condition noisier a
label is replaced by a uniformly drawn one in `FLIPPED` of the cases, so that the function stays and its
labels say less.

The posterior has no closed form. Hamiltonian Monte Carlo draws it in coordinates in which the prior is
standard normal: chains mix within few transitions there. Latent functions at the test inputs follow from
those at the training rows by a normal. `python -m bench.studies.oracle_classes` makes
`oracle_classes.safetensors`, the truth of the worlds that the standard settings pose, from `DRAWS_OF_FILE`
draws each, and prints how exact it is. Other worlds are sampled when they are posed, with `DRAWS` draws.

Shapes: W worlds, R rows, N test inputs, C classes, S draws, M chains. Units: nats.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import safetensors.numpy
import torch
from scipy.linalg import cholesky, solve_triangular
from scipy.special import log_softmax

from bench import metrics, randomness
from bench.studies import oracle
from bench.system.files import write

CLASSES = 4
FLIPPED = 0.3
"""Share of the labels that are drawn anew, uniformly, in the condition noisier."""

CHAINS, BURN, LEAPFROGS, STEP = 64, 40, 12, 0.12
"""Chains side by side, transitions before any is kept, steps of a trajectory, and their mean size."""
DRAWS, DRAWS_OF_FILE = 3200, 25_600
"""Draws of the ideal posterior where a world is sampled when posed, and in the file."""
TRAIN, WORLDS_OF_FILE = 300, 2
"""Training rows and number of worlds of the standard settings, whose truth is in the file."""
FILE = Path(__file__).with_suffix(".safetensors")


class Draws(NamedTuple):
    """Draws of the ideal posterior: latent functions `[S, N, C]`, and the share that was accepted."""

    latent: np.ndarray
    accepted: float


def log_probs(latent: np.ndarray, flipped: float) -> np.ndarray:
    """Log-probabilities of the classes `[..., C]`, of latent values and the share of labels drawn anew."""
    own = log_softmax(latent, -1)
    if flipped == 0:
        return np.asarray(own)
    return np.asarray(np.log((1 - flipped) * np.exp(own) + flipped / latent.shape[-1]))


def _log_likelihood(latent: np.ndarray, labels: np.ndarray, flipped: float) -> tuple[np.ndarray, np.ndarray]:
    """Of labels `[R]` under latent values `[R, C, M]`: `[M]`, and its gradient in them."""
    p = np.exp(log_softmax(latent, 1))
    hot = np.eye(latent.shape[1])[labels][:, :, None]
    of_label = (p * hot).sum(1)
    mixed = (1 - flipped) * of_label + flipped / latent.shape[1]
    return np.log(mixed).sum(0), ((1 - flipped) * of_label / mixed)[:, None] * (hot - p)


def sample(
    kernel: oracle.Kernel,
    rows: np.ndarray,
    labels: np.ndarray,
    inputs: np.ndarray,
    flipped: float,
    draws: int,
    seed: int,
) -> Draws:
    """Draws the latent functions at inputs `[N, D]` given labels `[R]` at rows `[R, D]`.

    Neal 2011, "MCMC using Hamiltonian dynamics"; the size of the steps is uniform within a fifth of `STEP`.
    """
    generator = np.random.default_rng(seed)
    root = cholesky(kernel.within(rows), lower=True)
    shape = (len(rows), CLASSES * CHAINS)

    def value_and_slope(white: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        latent = (root @ white).reshape(len(rows), CLASSES, CHAINS)
        value, slope = _log_likelihood(latent, labels, flipped)
        squares = (white.reshape(latent.shape) ** 2).sum((0, 1))
        return value - squares / 2, root.T @ slope.reshape(shape) - white

    across = solve_triangular(root, kernel.between(rows, inputs), lower=True)
    left = cholesky(kernel.within(inputs) - across.T @ across, lower=True)
    white = generator.standard_normal(shape)
    value, slope = value_and_slope(white)
    kept, accepted = [], []
    for transition in range(BURN + -(-draws // CHAINS)):
        step = STEP * generator.uniform(0.8, 1.2)
        momentum = generator.standard_normal(shape)
        energy = value - (momentum.reshape(len(rows), CLASSES, CHAINS) ** 2).sum((0, 1)) / 2
        place, new_slope = white, slope
        for _ in range(LEAPFROGS):
            momentum = momentum + step / 2 * new_slope
            place = place + step * momentum
            new_value, new_slope = value_and_slope(place)
            momentum = momentum + step / 2 * new_slope
        new_energy = new_value - (momentum.reshape(len(rows), CLASSES, CHAINS) ** 2).sum((0, 1)) / 2
        taken = np.log(generator.uniform(size=CHAINS)) < new_energy - energy
        value = np.where(taken, new_value, value)
        taken = np.tile(taken, CLASSES)
        white, slope = np.where(taken, place, white), np.where(taken, new_slope, slope)
        if transition >= BURN:
            latent = across.T @ white + left @ generator.standard_normal((len(inputs), shape[1]))
            kept.append(latent.reshape(len(inputs), CLASSES, CHAINS).transpose(2, 0, 1))
            accepted.append(taken.mean())
    return Draws(np.concatenate(kept)[:draws], float(np.mean(accepted)))


VAL, TEST = 100, 100
"""Rows that follow the training rows: those that are validated on, and those that are tested on."""


class Classes(NamedTuple):
    """Worlds of `oracle_classification`, rows in the order train, val, test.

    Attributes:
        inputs: `[R, D]`.
        functions: Latent values, `[W, R, C]`.
        labels: As they are, and with labels drawn anew, `[2, W, R]`.
        parts: Epistemic and aleatoric part of the ideal posterior at the test inputs, by condition,
            `[3, 2, W, N]`.
    """

    inputs: np.ndarray
    functions: np.ndarray
    labels: np.ndarray
    parts: np.ndarray


def labels_of(probabilities: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """Classes `[...]` drawn with probabilities `[..., C]` by uniform numbers `[...]`."""
    below = probabilities.cumsum(-1)[..., :-1] < uniforms[..., None]
    return np.asarray(below.sum(-1))


def _observed(world: int, functions: np.ndarray) -> np.ndarray:
    """Labels of a world with latent values `[R, C]`: as they are, and with some drawn anew, `[2, R]`."""
    generator = np.random.default_rng(randomness.derive(world, "oracle_classification", "labels"))
    own, flip, anew = generator.random((3, len(functions)))
    labels = labels_of(np.exp(log_probs(functions, 0)), own)
    return np.stack([labels, np.where(flip < FLIPPED, (CLASSES * anew).astype(int), labels)])


def ideal(world: int, train: int, draws: int) -> list[Draws]:
    """The ideal posterior of a world at the test inputs, by condition."""
    found = _posed(world, train)
    return [
        sample(
            oracle.DIGITS,
            found.inputs[:rows],
            found.labels[int(condition == "noisier"), 0, :rows],
            found.inputs[train + VAL :],
            flipped(condition),
            draws,
            randomness.derive(world, "oracle_classification", "ideal", condition),
        )
        for condition, rows in zip(oracle.CONDITIONS, (train, train, oracle.fewer(train)), strict=True)
    ]


def flipped(condition: str) -> float:
    """Share of labels that are drawn anew in a condition."""
    return FLIPPED if condition == "noisier" else 0.0


def parts_of(draws: list[Draws]) -> np.ndarray:
    """Epistemic and aleatoric part, by condition, `[3, 2, N]`, in nats."""
    found = [
        torch.from_numpy(log_probs(d.latent, flipped(c)))
        for c, d in zip(oracle.CONDITIONS, draws, strict=True)
    ]
    return np.stack(
        [torch.stack([metrics.mutual_information(p), metrics.expected_entropy(p)]).numpy() for p in found]
    )


def _posed(world: int, train: int) -> Classes:
    """One world, without its truth."""
    inputs = oracle.digits()[: train + VAL + TEST]
    seeds = [randomness.derive(world, "oracle_classification", "class", c) for c in range(CLASSES)]
    functions = oracle.functions(oracle.DIGITS, inputs, seeds).T
    return Classes(inputs, functions[None], _observed(world, functions)[:, None], np.empty(0))


@cache
def _truth(world: int, train: int) -> np.ndarray:
    """The parts of the ideal posterior of a world, `[3, 2, N]`: from the file, or sampled now."""
    if train == TRAIN and FILE.exists():
        stored = safetensors.numpy.load(FILE.read_bytes())
        if str(world) in stored:
            return stored[str(world)].astype(np.float64)
    return parts_of(ideal(world, train, DRAWS))


@cache
def worlds(first: int, number: int, train: int) -> Classes:
    """The worlds with the numbers `first` to `first + number - 1`, with so many training rows.

    A world that is not in the file takes minutes at the standard size.
    """
    each = [_posed(world, train) for world in range(first, first + number)]
    return Classes(
        each[0].inputs,
        np.concatenate([world.functions for world in each]),
        np.concatenate([world.labels for world in each], 1),
        np.stack([_truth(world, train) for world in range(first, first + number)], 2),
    )


def main() -> None:
    """Makes the file; says how exact it is: of each condition's parts the largest standard error."""
    found = {}
    for world in range(WORLDS_OF_FILE):
        draws = ideal(world, TRAIN, DRAWS_OF_FILE)
        found[str(world)] = parts_of(draws).astype(np.float32)
        chains = [parts_of([Draws(d.latent[k::8], 0) for d in draws]) for k in range(8)]
        errors = (np.std(chains, 0, ddof=1) / np.sqrt(8)).max(-1)
        for condition, error, drawn in zip(oracle.CONDITIONS, errors, draws, strict=True):
            print(
                f"world {world}, {condition}: accepted {drawn.accepted:.2f}, largest standard error of the "
                f"epistemic part {error[0]:.4f}, of the aleatoric part {error[1]:.4f} nats",
                flush=True,
            )
    write(FILE, safetensors.numpy.save(found))


if __name__ == "__main__":
    main()
