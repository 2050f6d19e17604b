"""Combinations of the means of entries, such as differences, and how surely each is known, or all at once.

Shapes: k entries, S seeds, N test examples, P combinations, B simulated worlds.

A mean over seeds and test examples strays by three parts (analysis of variance, seeds crossed by examples):
the seeds, independent between entries; the examples, on which entries are paired since all predict the same
ones; and the noise of single losses, which the variance over seeds and that over examples both hold, so that
it is subtracted once. Degrees of freedom are Satterthwaite's. Without losses per example only the seeds are
left, and a difference has Welch's interval. Over overlapping splits it has that of the corrected resampled t.

Simultaneous limits take the quantile of the largest |t| in worlds simulated from the variances found (Zhang
2015), not Sidak's: with three seeds a variance over seeds is often tiny by chance, Satterthwaite then takes
the examples for all there is, and among many pairs that happens to some (docs/decisions.md, Ranking).

Losses with a long tail bend a limit outwards, by Hall's transformation, where the mean may lie far.

Sources: Satterthwaite 1946; Nadeau and Bengio 2003, Inference for the generalization error; Hall 1992, On the
removal of skewness by transformation; Zhang 2015, simultaneous confidence intervals under heteroscedasticity
by parametric bootstrap.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy import sparse, special

from bench import randomness

_LEVEL = 0.95
_SINGLE = float(special.ndtri((1 + _LEVEL) / 2))
"""Normal deviate of one interval by itself."""
_WORLDS = 1000
"""The level of simultaneous limits is off by 0.7 percentage points (standard error)."""
_TINY = 1e-300
_BLOCK = 2**20
"""Numbers made at once: they stay in the processor's cache."""


@dataclass(frozen=True, eq=False)
class Evidence:
    """What one task tells of its entries. Variances are those of means.

    Attributes:
        names: Of the entries.
        means: `[k]`.
        seeds: `[k]`, variance by seeds, the noise of single losses included.
        freedom: `[k]`, its degrees of freedom.
        noise: `[k]`, variance by the noise of single losses.
        paired: `[k, N]`, what entries are paired on, less its mean: losses of examples, or values of splits.
        share: Variance of the mean of such a row over that of a number in it.
    """

    names: tuple[str, ...]
    means: np.ndarray
    seeds: np.ndarray
    freedom: np.ndarray
    noise: np.ndarray
    paired: np.ndarray
    share: float

    @classmethod
    def of_seeds(
        cls, values: Mapping[str, np.ndarray], losses: Mapping[str, np.ndarray] | None = None
    ) -> Evidence:
        """From values `[S]` of each entry and, where there are, losses `[S, N]` of the same N examples."""
        rows = list(values.values())
        # Equal values have a variance of rounding errors.
        seeds = np.array([row.var(ddof=1) / len(row) if np.ptp(row) > 0 else 0.0 for row in rows])
        freedom = np.array([len(row) - 1.0 if len(row) > 1 else np.inf for row in rows])
        noise, paired, share = np.zeros(len(rows)), np.zeros((len(rows), 2)), 0.0
        if losses:
            paired = np.stack([losses[name].mean(0) - losses[name].mean() for name in values])
            share = 1 / paired.shape[1]
            for i, name in enumerate(values):
                rest = losses[name] - losses[name].mean(1, keepdims=True) - paired[i]
                noise[i] = (rest**2).sum() / max(1, (len(rest) - 1) * (len(paired[i]) - 1)) / rest.size
            # Values of seeds hold this noise, which is better known than their variance.
            seeds = np.maximum(seeds, noise)
        means = np.array([row.mean() for row in rows])
        return cls(tuple(values), means, seeds, freedom, noise, paired, share)

    @classmethod
    def of_splits(cls, values: Mapping[str, np.ndarray], test_to_train: float) -> Evidence:
        """From values `[J]` of each entry on the same J splits, whose training sets overlap."""
        splits = np.array(list(values.values())) if values else np.zeros((0, 2))
        k, count = splits.shape
        means = splits.mean(1)
        nothing, share = np.zeros(k), 1 / count + test_to_train
        return cls(tuple(values), means, nothing, np.full(k, np.inf), nothing, splits - means[:, None], share)

    def worlds(self, generator: np.random.Generator) -> np.ndarray:
        """Worlds where every true mean is 0, `[3, k, B]`.

        The means found, the variances by seeds, and factors of a variance by examples, which are averaged
        over the entries of a combination.
        """
        k, count = self.paired.shape
        size = k, _WORLDS
        values, vectors = np.linalg.eigh(self.paired @ self.paired.T * (self.share / (count - 1)))
        of_examples = (vectors * np.sqrt(values.clip(0))) @ generator.standard_normal(size)
        freedom = np.where(np.isfinite(self.freedom), self.freedom, 1)[:, None]
        seeds = self.seeds[:, None] * generator.chisquare(freedom, size) / freedom
        seeds = np.maximum(seeds, self.noise[:, None])
        # That raises the variances found, and so must those of the means be raised.
        own = np.sqrt(seeds.mean(1) - self.noise)[:, None]
        of_seeds = own * generator.standard_normal(size)
        half = (count - 1) / 2
        return np.stack([of_examples + of_seeds, seeds, generator.chisquare(half, size) / half])


Parts = list[tuple[Evidence, sparse.csr_array]]
"""Of each task its evidence and weights `[P, k]`: numbers that are sums over tasks of combinations."""


class Contrasts:
    """P numbers, each a sum over tasks of a combination of the task's entries.

    Attributes:
        variance: `[P]`.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = [(evidence, weights, *_of_examples(evidence, weights)) for evidence, weights in parts]
        totals = [
            (*_spread(evidence, weights.power(2), evidence.seeds[:, None], examples[:, None]), third[:, None])
            for evidence, weights, examples, third in self._parts
        ]
        self.variance, self._imprecision, self._third = np.sum(totals, axis=0)[..., 0]

    def limits(self, centre: np.ndarray, at_once: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper limits `[P]` of 95% intervals, each by itself or all at once."""
        deviate = self._simultaneous() if at_once and len(centre) > 1 else _SINGLE
        with np.errstate(divide="ignore", invalid="ignore"):
            skewness = np.nan_to_num(self._third / self.variance**1.5)
            freedom = np.nan_to_num(self.variance**2 / self._imprecision, nan=np.inf, posinf=np.inf)
        half = special.stdtrit(freedom, special.ndtr(deviate)) * np.sqrt(self.variance)
        # Bent outwards alone: on the other side the tail found is too uncertain to say how much is to spare.
        low, high = (np.maximum(1, _bent(side, skewness) / side) for side in (deviate, -deviate))
        return centre - half * low, centre + half * high

    def _simultaneous(self) -> float:
        """Normal deviate whose limits all hold together in 95% of simulated worlds."""
        varying = np.flatnonzero(self.variance)
        generator = np.random.default_rng(randomness.derive(0, "simultaneous contrasts"))
        parts = []
        for evidence, weights, examples, _ in self._parts:
            squares = weights[varying].power(2)
            scale = examples[varying] / np.maximum(squares.sum(1), _TINY)
            parts.append((evidence, weights[varying], squares, scale[:, None], evidence.worlds(generator)))
        size = max(1, _BLOCK // max(1, len(varying)))
        deviates = [np.full(1, _SINGLE)]
        for at in range(0, _WORLDS if len(varying) else 0, size):
            found, variance, imprecision = np.zeros((3, len(varying), min(size, _WORLDS - at)))
            for evidence, weights, squares, scale, worlds in parts:
                means, seeds, factors = worlds[..., at : at + size]
                spread = _spread(evidence, squares, seeds, scale * (squares @ factors))
                found += weights @ means
                variance += spread[0]
                imprecision += spread[1]
            t_squared, freedom = found**2 / variance, variance**2 / imprecision
            # Wallace's normal deviate of Student's t finds the largest; of that one it is made exact.
            nearly = ((8 * freedom + 1) / (8 * freedom + 3)) ** 2 * freedom * np.log1p(t_squared / freedom)
            which = nearly.argmax(0), np.arange(nearly.shape[1])
            deviates.append(-special.ndtri(special.stdtr(freedom[which], -np.sqrt(t_squared[which]))))
        return float(np.quantile(np.concatenate(deviates), _LEVEL))


def _of_examples(evidence: Evidence, weights: sparse.csr_array) -> tuple[np.ndarray, np.ndarray]:
    """Variance by examples, less the noise, and third cumulant of combinations, `[P]` each."""
    count = evidence.paired.shape[1]
    variance, third = np.zeros((2, weights.shape[0]))
    size = max(1, _BLOCK // count)
    for at in range(0, weights.shape[0], size):
        rows = weights[at : at + size] @ evidence.paired
        squares = rows**2
        variance[at : at + size] = squares.sum(1) / (count - 1)
        third[at : at + size] = (squares * rows).mean(1)
    variance = np.maximum(0, variance * evidence.share - weights.power(2) @ evidence.noise)
    # Of overlapping splits the third cumulant is unknown.
    return variance, third * evidence.share**2 * np.isclose(evidence.share * count, 1)


def _spread(
    evidence: Evidence, squares: sparse.csr_array, seeds: np.ndarray, examples: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Variance of combinations, and its parts squared over their degrees of freedom, `[P, B]` each.

    From squared weights, variances by seeds `[k, B]` and variances by examples `[P, B]`.
    """
    count = evidence.paired.shape[1]
    imprecision = squares.power(2) @ (seeds**2 / evidence.freedom[:, None]) + examples**2 / (count - 1)
    return squares @ seeds + examples, imprecision


def _bent(deviate: float, skewness: np.ndarray) -> np.ndarray:
    """Deviate of the studentised mean whose probability is that of a normal deviate (Hall 1992).

    Args:
        deviate: Normal.
        skewness: `[P]`, of the mean.
    """
    is_skewed = np.abs(skewness) > 1e-6
    safe = np.where(is_skewed, skewness, 1.0)
    return np.where(is_skewed, 3 / safe * (np.cbrt(1 + safe * (deviate - safe / 6)) - 1), deviate)
