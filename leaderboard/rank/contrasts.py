"""Combinations of the means of entries, such as differences, and how surely each is known, or all at once.

Shapes: k entries, S seeds, N test examples, R rows (combinations), P pairs of rows, B simulated worlds.

A mean over seeds and test examples strays by three parts (analysis of variance, seeds crossed by examples):
the seeds, independent between entries; the examples, on which entries are paired since all predict the same
ones; and the noise of single losses, which the variance over seeds and that over examples both hold, so that
it is subtracted once. Degrees of freedom are Satterthwaite's. Without losses per example only the seeds are
left, and a difference has Welch's interval. Over overlapping splits it has that of the corrected resampled t.

Simultaneous limits take the quantile of the largest |t| in worlds simulated from the variances found (Zhang
2015), not Sidak's: with three seeds a variance over seeds is often tiny by chance, Satterthwaite then takes
the examples for all there is, and among many pairs that happens to some (docs/decisions/statistics.md).

Losses with a long tail bend a limit outwards, by Hall's transformation, where the mean may lie far.

Sources: Satterthwaite 1946; Nadeau and Bengio 2003, Inference for the generalization error; Hall 1992, On the
removal of skewness by transformation; Zhang 2015, simultaneous confidence intervals under heteroscedasticity
by parametric bootstrap.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy import special

from bench import randomness

_LEVEL = 0.95
_SINGLE = float(special.ndtri((1 + _LEVEL) / 2))
"""Normal deviate of one interval by itself."""
_WORLDS = 1000
"""The level of simultaneous limits is off by 0.7 percentage points (standard error)."""
_TINY = 1e-300
_BLOCK = 2**15
"""Numbers made at once: they stay in the processor's cache."""
_MOST_SEEDS = 100_000
"""More that this are as good as none."""
_MANY = 100
"""Rows from which on threads are worth their start."""


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
        of_overlap: Whether they are values of splits that overlap, and not of seeds.
    """

    names: tuple[str, ...]
    means: np.ndarray
    seeds: np.ndarray
    freedom: np.ndarray
    noise: np.ndarray
    paired: np.ndarray
    share: float
    of_overlap: bool = False

    @classmethod
    def of_seeds(
        cls, values: Mapping[str, np.ndarray], losses: Mapping[str, np.ndarray] | None = None
    ) -> Evidence:
        """Made from values `[S]` of each entry and, if any, losses `[S, N]` of the same N examples."""
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
        """Made from values `[J]` of each entry on the same J splits, whose training sets overlap."""
        splits = np.array(list(values.values())) if values else np.zeros((0, 2))
        k, count = splits.shape
        means = splits.mean(1)
        nothing, share = np.zeros(k), 1 / count + test_to_train
        return cls(
            tuple(values), means, nothing, np.full(k, np.inf), nothing, splits - means[:, None], share, True
        )

    def more_seeds(self, first: str, second: str, distance: float, reach: float) -> float | None:
        """How many more seeds of each of two entries make the reach of their interval less than a distance.

        With m more seeds an entry's variance by seeds is S / (S + m) times what it was, with m more degrees
        of freedom; that by examples stays. The level is that of the interval found, skewness left out.

        Args:
            first: Name of an entry.
            second: Of the other.
            distance: Between their means, 0 or more.
            reach: From the difference to the limit on the side of 0, as it is now.

        Returns:
            A whole number, or infinity; None where values are of splits, or nothing varies.
        """
        if self.of_overlap:
            return None
        pair = [self.names.index(name) for name in (first, second)]
        freedom, seeds, count = self.freedom[pair], self.seeds[pair], self.paired.shape[1]
        away = self.paired[pair[0]] - self.paired[pair[1]]
        examples = max(0.0, (away**2).sum() / (count - 1) * self.share - self.noise[pair].sum())

        def width(more: float) -> tuple[float, float]:
            """Variance of the difference, and its degrees of freedom."""
            grown = np.where(np.isfinite(freedom), freedom + more, np.inf)
            part = np.where(np.isfinite(freedom), seeds * (freedom + 1) / (freedom + 1 + more), seeds)
            variance = float(part.sum() + examples)
            imprecision = float((part**2 / grown).sum() + examples**2 / (count - 1))
            return variance, variance**2 / imprecision if imprecision else np.inf

        variance, known = width(0)
        if not variance:
            return None
        level = special.stdtr(known, reach / np.sqrt(variance))

        def separates(more: float) -> bool:
            variance, known = width(more)
            return bool(special.stdtrit(known, level) * np.sqrt(variance) < distance)

        most = 1
        while not separates(most):
            most *= 2
            if most > _MOST_SEEDS:
                return np.inf
        return bisect.bisect_left(range(most), True, key=separates)

    def worlds(self, generator: np.random.Generator) -> np.ndarray:
        """Worlds where every true mean is 0, `[3, k, B]`.

        The means found, the variances by seeds, and factors of a variance by examples, which are averaged
        over the entries of a combination.
        """
        k, count = self.paired.shape
        size = k, _WORLDS
        # By correlations: beside an entry whose losses are 1e12 the covariances of others are mere rounding.
        spread = np.sqrt((self.paired**2).sum(1, keepdims=True))
        unit = self.paired / np.where(spread > 0, spread, 1)
        values, vectors = np.linalg.eigh(unit @ unit.T)
        of_examples = (vectors * np.sqrt(values.clip(0))) @ generator.standard_normal(size)
        of_examples *= spread * np.sqrt(self.share / (count - 1))
        freedom = np.where(np.isfinite(self.freedom), self.freedom, 1)[:, None]
        seeds = self.seeds[:, None] * generator.chisquare(freedom, size) / freedom
        seeds = np.maximum(seeds, self.noise[:, None])
        # That raises the variances found, and so must those of the means be raised.
        own = np.sqrt(seeds.mean(1) - self.noise)[:, None]
        of_seeds = own * generator.standard_normal(size)
        half = (count - 1) / 2
        return np.stack([of_examples + of_seeds, seeds, generator.chisquare(half, size) / half])


Parts = list[tuple[Evidence, np.ndarray]]
"""Of each task its evidence and weights `[R, k]`: numbers that are sums over tasks of combinations."""


class _Moments(NamedTuple):
    """Of combinations `[R]`: variance, its parts squared over their degrees of freedom, third cumulant."""

    variance: np.ndarray
    imprecision: np.ndarray
    third: np.ndarray


def limits(centre: np.ndarray, parts: Parts) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper limits `[R]` of the 95% intervals of rows, each by itself."""
    found = [_moments(evidence, weights, weights @ evidence.paired)[0] for evidence, weights in parts]
    return _around(centre, _SINGLE, _Moments(*np.sum(found, axis=0)))


def variances(parts: Parts) -> np.ndarray:
    """Variances `[P]` of all differences of two rows, in the order of `np.triu_indices`."""
    total = np.zeros(())
    for evidence, weights in parts:
        from scipy.spatial import distance  # here, for its import takes a third of a second

        seeds, noise = (distance.pdist(weights, "sqeuclidean", w=w) for w in (evidence.seeds, evidence.noise))
        examples = distance.pdist(weights @ evidence.paired, "sqeuclidean") / (evidence.paired.shape[1] - 1)
        total = total + seeds + np.maximum(0, examples * evidence.share - noise)
    return total


class Differences:
    """All differences of two rows, an earlier minus a later one, in the order of `np.triu_indices`."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        size = len(parts[0][1])
        self._scales = np.zeros((len(parts), size, size))
        found: list[list[_Moments]] = [[] for _ in range(size - 1)]
        for (evidence, weights), scale in zip(parts, self._scales, strict=True):
            examples = weights @ evidence.paired
            for i, of_row in enumerate(found):
                away = weights[i] - weights[i + 1 :]
                moments, of_examples = _moments(evidence, away, examples[i] - examples[i + 1 :])
                of_row.append(moments)
                # Factor by examples in a world -> variance by examples there.
                scale[i, i + 1 :] = of_examples / np.maximum((away**2).sum(1), _TINY)
        totals = [np.sum(of_row, axis=0) for of_row in found]
        self._moments = _Moments(*np.concatenate(totals, axis=1)) if totals else _Moments(*np.zeros((3, 0)))

    def limits(self, centre: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper limits `[P]`, which all hold at once with 95%."""
        deviate = self._simultaneous() if len(centre) > 1 else _SINGLE
        return _around(centre, deviate, self._moments)

    def _simultaneous(self) -> float:
        """Normal deviate whose limits all hold together in 95% of simulated worlds."""
        if not self._moments.variance.any():
            return _SINGLE
        generator = np.random.default_rng(randomness.derive(0, "simultaneous contrasts"))
        drawn = [_Drawn(evidence, rows, generator) for evidence, rows in self._parts]
        rows = len(self._parts[0][1])
        # Worlds do not know of each other, and numpy lets threads run side by side where there is much to do.
        threads = (os.cpu_count() or 1) if rows >= _MANY else 1
        size = max(1, min(_BLOCK // rows, -(-_WORLDS // threads)))
        blocks = [slice(at, at + size) for at in range(0, _WORLDS, size)]
        with ThreadPoolExecutor(threads) as pool:
            found = list(pool.map(lambda worlds: self._largest(drawn, worlds), blocks))
        return float(np.quantile([_SINGLE, *np.concatenate(found)], _LEVEL))

    def _largest(self, drawn: list[_Drawn], worlds: slice) -> np.ndarray:
        """The largest |t| of every world, as a normal deviate."""
        means, seeds, imprecisions = (
            np.sum([getattr(of_task, name)[:, worlds] for of_task in drawn], axis=0)
            for name in ("means", "seeds", "imprecision")
        )
        rows, number = means.shape
        largest, t_largest, freedom_largest = np.zeros((3, number))
        for i in range(rows - 1):
            rest = slice(i + 1, rows)
            variance, imprecision = seeds[i] + seeds[rest], imprecisions[i] + imprecisions[rest]
            for of_task, scale in zip(drawn, self._scales, strict=True):
                examples = of_task.add_shared(i, worlds, variance, imprecision)
                examples *= scale[i, rest, None]
                variance += examples
                examples *= examples
                examples *= 1 / of_task.examples_freedom
                imprecision += examples
            t_squared = means[i] - means[rest]
            t_squared *= t_squared
            with np.errstate(divide="ignore", invalid="ignore"):
                t_squared /= variance
            # A normal deviate is less than its t, so most pairs of a world cannot be its largest.
            may_be = np.flatnonzero(t_squared > largest)
            world = may_be % number
            t, freedom = t_squared.flat[may_be], variance.flat[may_be] ** 2 / imprecision.flat[may_be]
            # Wallace's normal deviate of Student's t finds the largest; of that one it is made exact.
            nearly = ((8 * freedom + 1) / (8 * freedom + 3)) ** 2 * freedom * np.log1p(t / freedom)
            np.maximum.at(largest, world, nearly)
            is_it = nearly == largest[world]
            t_largest[world[is_it]], freedom_largest[world[is_it]] = t[is_it], freedom[is_it]
        # Where nothing varies in any world there is no t.
        found = t_largest > 0
        deviates = np.zeros(number)
        deviates[found] = -special.ndtri(special.stdtr(freedom_largest[found], -np.sqrt(t_largest[found])))
        return deviates


class _Drawn:
    """Simulated worlds of a task, `[R, B]` each, as far as a row has them for itself.

    Most entries have weight in one row alone; the square of a difference of weights is then the sum of their
    squares. Entries that several rows share, such as anchors, are added for each pair.

    Attributes:
        means: Of the rows.
        seeds: Variance by seeds, of unshared entries.
        imprecision: Its square over its degrees of freedom.
        examples_freedom: Degrees of freedom of the variance by examples.
    """

    def __init__(self, evidence: Evidence, rows: np.ndarray, generator: np.random.Generator) -> None:
        means, seeds, factors = evidence.worlds(generator)
        squared = seeds**2 / evidence.freedom[:, None]
        is_shared = np.count_nonzero(rows, axis=0) > 1
        own = np.where(is_shared, 0, rows) ** 2
        self.means, self.seeds, self.imprecision = rows @ means, own @ seeds, own**2 @ squared
        self.examples_freedom = evidence.paired.shape[1] - 1
        self._examples = own @ factors
        self._shared = rows[:, is_shared]
        self._of_shared = seeds[is_shared], squared[is_shared], factors[is_shared]

    def add_shared(self, i: int, worlds: slice, variance: np.ndarray, imprecision: np.ndarray) -> np.ndarray:
        """Adds what row i and the later rows share; returns the factors by examples of their differences."""
        examples = self._examples[i, worlds] + self._examples[i + 1 :, worlds]
        if self._shared.shape[1]:
            squares = (self._shared[i] - self._shared[i + 1 :]) ** 2
            seeds, squared, factors = (of[:, worlds] for of in self._of_shared)
            variance += squares @ seeds
            imprecision += squares**2 @ squared
            examples += squares @ factors
        return examples


def _moments(evidence: Evidence, weights: np.ndarray, away: np.ndarray) -> tuple[_Moments, np.ndarray]:
    """Moments of combinations, and the part of their variance that is by examples, less the noise.

    Args:
        evidence: Of the task.
        weights: `[R, k]`.
        away: `[R, N]`, the combinations of what entries are paired on.
    """
    count = evidence.paired.shape[1]
    squares, powers = weights**2, away**2
    examples = powers.sum(1) / (count - 1) * evidence.share
    examples = np.maximum(0, examples - squares @ evidence.noise)
    # Of overlapping splits the third cumulant is unknown.
    has_third = abs(evidence.share * count - 1) < 1e-9
    third = np.einsum("rn,rn->r", powers, away) / count * evidence.share**2 * has_third
    variance = squares @ evidence.seeds + examples
    imprecision = squares**2 @ (evidence.seeds**2 / evidence.freedom) + examples**2 / (count - 1)
    return _Moments(variance, imprecision, third), examples


def _around(centre: np.ndarray, deviate: float, moments: _Moments) -> tuple[np.ndarray, np.ndarray]:
    """Limits at a normal deviate, made wider as Student's t is, and bent."""
    with np.errstate(divide="ignore", invalid="ignore"):
        skewness = np.nan_to_num(moments.third / moments.variance**1.5)
        freedom = moments.variance**2 / moments.imprecision
    freedom = np.nan_to_num(freedom, nan=np.inf, posinf=np.inf)
    half = special.stdtrit(freedom, special.ndtr(deviate)) * np.sqrt(moments.variance)
    # Bent outwards alone: on the other side the tail found is too uncertain to say how much is to spare.
    low, high = (np.maximum(1, _bent(side, skewness) / side) for side in (deviate, -deviate))
    return centre - half * low, centre + half * high


def _bent(deviate: float, skewness: np.ndarray) -> np.ndarray:
    """Deviate of the studentised mean whose probability is that of a normal deviate (Hall 1992).

    Args:
        deviate: Normal.
        skewness: `[P]`, of the mean.
    """
    is_skewed = np.abs(skewness) > 1e-6
    safe = np.where(is_skewed, skewness, 1.0)
    return np.where(is_skewed, 3 / safe * (np.cbrt(1 + safe * (deviate - safe / 6)) - 1), deviate)
