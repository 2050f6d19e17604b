"""How often the leaderboard's intervals hold the truth, and part what differs, in made-up worlds.

    python benchmarks/ranking.py [--worlds 1000] [--json benchmarks/ranking.json] [--check]

A world has k entries of S seeds on N test examples. The variance of a difference of two entries is 1; a share
of it is due to examples (half of that to the noise of single losses), the rest to seeds. Coverage of ranks
counts worlds in which every rank interval holds all true ranks of its entry; coverage of cells counts cells.
`--check` demands of every row what tests/test_ranking.py demands.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import special, stats
from timing import print_table, write

from bench.leaderboard.rank.ranking import Entry, Replicate, rank

COVERAGE = 0.93
COVERAGE_OF_SKEWED = 0.90
POWER = 0.80


class World(NamedTuple):
    """Losses `[k, S, N]`, and of each entry `[k]` the true mean on this test set and on all."""

    losses: np.ndarray
    here: np.ndarray
    everywhere: np.ndarray


class Verdict(NamedTuple):
    """Limits `[2, k]` of the cells, and whether the row is separated from the column and lower, `[k, k]`."""

    cells: np.ndarray
    below: np.ndarray


# -------------------------------------------------------------------------------------- what is judged


def by_rank(losses: np.ndarray) -> Verdict:
    """What the leaderboard says."""
    entries = [
        Entry(f"{e:03}", [Replicate(float(row.mean()), row) for row in of]) for e, of in enumerate(losses)
    ]
    standing = rank(entries, higher_is_better=False)
    back = np.argsort([int(place.name) for place in standing.places])
    cells = np.array([[place.cell.low, place.cell.high] for place in standing.places])
    return Verdict(cells[back].T, (standing.high < 0)[np.ix_(back, back)])


def by_percentiles(losses: np.ndarray) -> Verdict:
    """A bootstrap of the seeds: percentiles of the means, and of the differences of means."""
    k, seeds, _ = losses.shape
    values = losses.mean(2)
    chosen = np.random.default_rng(0).integers(seeds, size=(400, k, seeds))
    means = np.take_along_axis(values[None], chosen, 2).mean(2)  # [400, k]
    level = 2.5 / (k * (k - 1) / 2)
    high = np.percentile(means[:, :, None] - means[:, None], 100 - level, axis=0)
    return Verdict(np.percentile(means, [2.5, 97.5], axis=0), high < 0)


def by_t(parts: str, pairs: float | None = None) -> Callable[[np.ndarray], Verdict]:
    """Student's intervals of a part of the variance alone: "seeds", "examples", or "unpaired" (both).

    For so many pairs by Sidak's level, as many as there are if None.
    """

    def judge(losses: np.ndarray) -> Verdict:
        k, seeds, count = losses.shape
        values, rows = losses.mean(2), losses.mean(1)
        of_seeds = values.var(1, ddof=1) / seeds
        if parts == "unpaired":
            alone = of_seeds + rows.var(1, ddof=1) / count
            variance, freedom = alone[:, None] + alone, 2 * (seeds - 1)
        elif parts == "examples":
            variance, freedom = (rows[:, None] - rows).var(2, ddof=1) / count, count - 1
        else:
            variance, freedom = of_seeds[:, None] + of_seeds, 2 * (seeds - 1)
        tail = (1 - 0.95 ** (1 / (pairs or k * (k - 1) / 2))) / 2
        difference = values.mean(1)[:, None] - values.mean(1)
        half = stats.t.ppf(0.975, seeds - 1) * np.sqrt(of_seeds)
        cells = values.mean(1) + np.array([[-1], [1]]) * half
        return Verdict(cells, difference + special.stdtrit(freedom, 1 - tail) * np.sqrt(variance) < 0)

    return judge


def by_sidak(losses: np.ndarray) -> Verdict:
    """Seeds and examples with Satterthwaite's degrees of freedom, at Sidak's level."""
    k, seeds, count = losses.shape
    values, rows = losses.mean(2), losses.mean(1)
    rest = losses - values[:, :, None] - rows[:, None] + values.mean(1)[:, None, None]
    noise = (rest**2).sum((1, 2)) / ((seeds - 1) * (count - 1)) / (seeds * count)
    of_seeds = np.maximum(values.var(1, ddof=1) / seeds, noise)
    examples = (rows[:, None] - rows).var(2, ddof=1) / count - noise[:, None] - noise
    examples = np.maximum(examples, 1e-12)
    variance = of_seeds[:, None] + of_seeds + examples
    squares = of_seeds**2 / (seeds - 1)
    freedom = variance**2 / (squares[:, None] + squares + examples**2 / (count - 1))
    tail = (1 - 0.95 ** (2 / (k * (k - 1)))) / 2
    difference = values.mean(1)[:, None] - values.mean(1)
    return Verdict(
        by_t("seeds")(losses).cells, difference + special.stdtrit(freedom, 1 - tail) * variance**0.5 < 0
    )


def by_nothing(losses: np.ndarray) -> Verdict:
    """Nobody is ever separated."""
    return Verdict(np.full((2, len(losses)), [[-np.inf], [np.inf]]), np.zeros((len(losses),) * 2, bool))


# ----------------------------------------------------------------------------------------------- worlds


def normal_worlds(
    worlds: int, seeds: int, share: float, means: Sequence[float], examples: int = 300
) -> Iterator[World]:
    """Normal effects; `share` of the variance of a difference is due to examples; their own are large."""
    k = len(means)
    for number in range(worlds):
        g = np.random.default_rng([16, number, seeds])
        of_examples = 10 * g.standard_normal(examples)  # shared: only pairing takes them away
        own = np.sqrt(share / 4 * examples) * g.standard_normal((k, examples))
        of_seeds = np.sqrt((1 - share) / 2 * seeds) * g.standard_normal((k, seeds))
        noise = np.sqrt(share / 4 * examples * seeds) * g.standard_normal((k, seeds, examples))
        fixed = np.asarray(means)[:, None] + of_examples + own
        yield World(fixed[:, None] + of_seeds[..., None] + noise, fixed.mean(1), np.asarray(means))


def skewed_worlds(worlds: int, seeds: int, tails: Sequence[float], examples: int = 300) -> Iterator[World]:
    """Lognormal losses of expectation 1 whose logarithms have these standard deviations, half shared."""
    tail = np.asarray(tails)[:, None]
    for number in range(worlds):
        g = np.random.default_rng([16, number, seeds])
        own = g.standard_normal((len(tails), examples))
        fixed = np.exp(tail * np.sqrt(0.5) * (g.standard_normal(examples) + own) - tail**2 / 2)
        noise = np.exp(0.1 * g.standard_normal((len(tails), seeds, examples)) - 0.005)
        of_seeds = 0.02 * g.standard_normal((len(tails), seeds, 1))
        yield World(fixed[:, None] * noise + of_seeds, fixed.mean(1), np.ones(len(tails)))


def judged(judge: Callable[[np.ndarray], Verdict], worlds: Iterator[World]) -> dict[str, float]:
    """Coverage of cells and of ranks, and power: how often the last entry is separated from the first."""
    cells, ranks, power = [], [], []
    for world in worlds:
        low_high, below = judge(world.losses)
        truth = world.everywhere
        cells.append(((low_high[0] <= world.here) & (world.here <= low_high[1])).mean())
        # A rank interval holds all true ranks where nobody is separated from one who is not truly worse.
        ranks.append(not (below & (truth[:, None] >= truth)).any())
        power.append(below[0, -1])
    return {"cells": float(np.mean(cells)), "ranks": float(np.mean(ranks)), "power": float(np.mean(power))}


# ----------------------------------------------------------------------------------------------- report


def rows(worlds: int) -> Iterator[dict]:
    """All that is committed."""
    for k, seeds, share in itertools.product((5, 20), (3, 5, 10), (0.1, 0.5, 0.9)):
        named = {"losses": "normal", "entries": k, "seeds": seeds, "share": share}
        found = judged(by_rank, normal_worlds(worlds, seeds, share, [0.0] * k))
        apart = judged(by_rank, normal_worlds(worlds // 4, seeds, share, [0.0] * (k - 1) + [5.0]))
        sidak = judged(by_sidak, normal_worlds(worlds, seeds, share, [0.0] * k))
        yield named | {**found, "power": apart["power"], "ranks by Sidak": sidak["ranks"]}
    for seeds, tails in itertools.product((3, 5, 10), ([1.0] * 5, [0.2, 0.5, 0.8, 1.0, 1.2], [0.1, 1.5])):
        named = {"losses": f"lognormal {tails}", "entries": len(tails), "seeds": seeds, "share": None}
        found = judged(by_rank, skewed_worlds(worlds, seeds, tails))
        sidak = judged(by_sidak, skewed_worlds(worlds, seeds, tails))
        yield named | {**found, "power": None, "ranks by Sidak": sidak["ranks"]}


def is_kept(row: dict) -> bool:
    """Whether a row keeps what the tests demand."""
    if row["share"] is None:
        return row["ranks"] >= COVERAGE_OF_SKEWED
    # Twenty entries are 190 pairs, among which five standard errors are little.
    has_power = row["power"] >= POWER or row["seeds"] < 5 or row["entries"] > 5
    return has_power and min(row["cells"], row["ranks"]) >= COVERAGE


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", type=int, default=1000)
    parser.add_argument("--json", type=Path, help="file for the rows (benchmarks/ranking.json)")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a row misses a target")
    arguments = parser.parse_args()
    found = list(rows(arguments.worlds))
    print_table(found)
    if arguments.json:
        write(arguments.json, {"worlds": arguments.worlds, "rows": found})
    missed = [row for row in found if not is_kept(row)]
    print(f"{len(missed)} of {len(found)} rows miss a target")
    return int(arguments.check and bool(missed))


if __name__ == "__main__":
    sys.exit(main())
