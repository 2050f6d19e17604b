"""Where more seeds are worth their time: how many pairs of entries they would separate, and at what cost.

The variance of a difference has a part by seeds, which more seeds shrink, and a part by test examples, which
they do not (`contrasts`). Of each pair that is open it is known from there how many more seeds of both would
separate it, if means and spreads stayed as they are and no entry were added. That is a forecast for a budget
and no promise: a difference that is due to few seeds shrinks with them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from bench.leaderboard.rank.ranking import Standing

STEPS = (1, 2, 3, 5, 10, 20, 50, 100)
"""Numbers of further seeds of which it is told what they would separate."""


@dataclass(frozen=True)
class Outlook:
    """What further seeds of a task's entries would do.

    Attributes:
        entries: The ranked entries, by the names of the standing.
        needed: Pair of entries -> further seeds of both that separate it; 0 where it is separated, infinity
            where the test examples alone leave it open or nothing is known of its seeds.
        seconds: Entry -> mean seconds of a run.
    """

    entries: tuple[str, ...]
    needed: Mapping[tuple[str, str], float]
    seconds: Mapping[str, float]

    @classmethod
    def of(cls, standing: Standing, seconds: Mapping[str, float]) -> Outlook:
        """What further seeds of the entries of a table would do."""
        names = tuple(place.name for place in standing.places if place.ranks)
        needed = {}
        for pair in combinations(names, 2):
            more = standing.seeds_to_separate(*pair)
            needed[pair] = math.inf if more is None else more
        return cls(names, needed, {name: seconds[name] for name in names})

    def separated(self, more: float) -> int:
        """Pairs that are separated with so many further seeds of both entries."""
        return sum(needed <= more for needed in self.needed.values())

    def gaining(self, more: float) -> tuple[str, ...]:
        """The entries of pairs that so many further seeds would separate: no other needs a run."""
        pairs = [pair for pair, needed in self.needed.items() if 0 < needed <= more]
        return tuple(name for name in self.entries if any(name in pair for pair in pairs))

    def cost(self, more: int) -> float:
        """Seconds of all further runs of the entries that gain by so many."""
        return more * sum(self.seconds[name] for name in self.gaining(more))

    def best_first(self, more: int) -> Sequence[tuple[str, int, float]]:
        """Entry, pairs of it that so many further seeds separate, and its seconds; most pairs a second first.

        A pair is gained by the runs of two entries, and counts for both.
        """
        rows = []
        for name in self.gaining(more):
            pairs = sum(name in pair and 0 < needed <= more for pair, needed in self.needed.items())
            rows.append((name, pairs, more * self.seconds[name]))
        return sorted(rows, key=lambda row: -row[1] / max(row[2], 1e-9))
