"""How entries stand within a task and across tasks: intervals, ranks that admit ties, scores between anchors.

Shapes: k compared entries, S seeds, N test examples.

**A cell** is the mean of the main metric over seeds with Student's interval: of fresh seeds on this test set.
**A difference** of two entries is one of fresh seeds and fresh test examples, and all differences of a task
hold at once with 95% (leaderboard/rank/contrasts.py). Two entries are **separated** where it excludes 0.

**The rank interval** is [1 + entries separated above, k - entries separated below]. **Tie groups** cut the
table, best first, wherever everything above the cut is separated from everything below. So entries that are
not separated are never in different groups; within a group some may be, as their rank intervals show.

**Compared** are entries with a value for every run and at least three runs that differ. A seed that diverged
is no number, and the mean over the others would be that of the lucky: such an entry stands below, with that
mean and the reason. Seeds with the same predictions are one seed, since copies are no evidence. A method
whose answer no seed can change has one value, exact on this test set: its cell has no width, and it differs
from others by their seeds and by examples. Where nothing varies there is no interval and no separation.

**Across tasks** an entry's score is (x - baseline) / (reference - baseline), which no rival can move, unlike
mean ranks. Only complete rows are compared.
Rank intervals are those of Mogstad, Romano, Shaikh and Wilhelm 2024, Inference for ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from bench.errors import UsageError
from bench.intervals import FEWEST, Interval, student
from bench.leaderboard.rank.contrasts import Differences, Evidence, Parts, limits, variances

_FIRM = 0.2
"""Largest half-width of the difference of two anchors, relative to it, at which it gives a scale."""


@dataclass(frozen=True, eq=False)
class Replicate:
    """What one seed gave, or one split of the data.

    Attributes:
        value: Of the main metric; None if the run diverged or left the metric undefined.
        losses: `[N]`, of each test example, with mean `value`; None where the metric is no such mean.
        digest: Of the predictions: runs of an entry with the same digest are one. None: of its own.
    """

    value: float | None
    losses: np.ndarray | None = None
    digest: str | None = None


@dataclass(frozen=True, eq=False)
class Entry:
    """A method on a task: one run per seed, and whether another seed can change the method's answer."""

    name: str
    runs: Sequence[Replicate]
    seed_matters: bool = True


@dataclass(frozen=True)
class Place:
    """Where an entry stands.

    Attributes:
        name: Of the entry.
        cell: Mean with its interval; None if no run has a value.
        ranks: First and last rank that the data admit; None if the entry is not compared.
        group: Tie group, counted from 1; None if the entry is not compared.
        why: Why it is not compared; else empty.
    """

    name: str
    cell: Interval | None
    ranks: tuple[int, int] | None = None
    group: int | None = None
    why: str = ""


@dataclass(frozen=True, eq=False)
class Standing:
    """How entries stand; the order in which they were given plays no part.

    Attributes:
        places: In the order of the table: compared entries, best first; then the others, best first.
        low: Lower limits `[k, k]` of row minus column, in the order of the places; all hold at once.
        high: Upper limits.
        evidence: On which the differences stand; None of several tasks together.
    """

    places: tuple[Place, ...]
    low: np.ndarray
    high: np.ndarray
    evidence: Evidence | None = field(default=None, repr=False)

    def difference(self, first: str, second: str) -> Interval:
        """First minus second, of compared entries; holds at once with those of all other pairs."""
        cells = {place.name: place.cell for place in self.places if place.cell and place.ranks}
        i, j = (list(cells).index(name) for name in (first, second))
        centre = cells[first].centre - cells[second].centre
        return Interval(centre, self.low[i, j], self.high[i, j], f"{len(cells)} entries at once")

    def seeds_to_separate(self, first: str, second: str) -> float | None:
        """How many more seeds of both would separate two entries, if nothing but the width changed.

        0 where they are separated; infinity where the test examples alone leave the difference open. None
        where the evidence is not one of seeds, or nothing varies.
        """
        found = self.difference(first, second)
        if self.evidence is None or not np.isfinite(found.low):
            return None
        if found.sign():
            return 0
        reach = found.centre - found.low if found.centre > 0 else found.high - found.centre
        return self.evidence.more_seeds(first, second, abs(found.centre), reach)


@dataclass(frozen=True, eq=False)
class Overall:
    """Several tasks together.

    Attributes:
        standing: By the mean score over the tasks; higher is better.
        scores: Task -> entry -> score with an interval of its own.
        left_out: Task -> why it gives no scores.
    """

    standing: Standing
    scores: Mapping[str, Mapping[str, Interval]]
    left_out: Mapping[str, str]


def order(value: float | None, higher_is_better: bool) -> tuple[bool, float]:
    """Key that sorts values best first, and None last whichever direction is better."""
    return value is None, 0.0 if value is None else -value if higher_is_better else value


def rank(entries: Sequence[Entry], higher_is_better: bool, test_to_train: float | None = None) -> Standing:
    """How the entries of a task stand.

    Args:
        entries: With losses for all runs, of the same examples in the same order, or for none.
        higher_is_better: Direction of the values.
        test_to_train: Where runs are splits of the same data and not seeds, the same splits in the same order
            for all entries: size of a test set over that of its training set.

    Raises:
        UsageError: If entries do not fit together, or losses do not fit their value.
    """
    if len({entry.name for entry in entries}) < len(entries):
        raise UsageError("an entry is given twice")
    places: list[Place] = []
    values: dict[str, np.ndarray] = {}
    losses: dict[str, np.ndarray] = {}
    for entry in sorted(entries, key=lambda entry: entry.name):
        runs = _distinct(entry, test_to_train is not None)
        found = np.array([run.value for run in runs], float)
        _check(entry.name, runs, found)
        is_constant = len(runs) == 1 and not entry.seed_matters and test_to_train is None
        why = ""
        if missing := sum(run.value is None for run in entry.runs):
            why = f"{missing} of {len(entry.runs)} runs gave no value"
        elif len(runs) < FEWEST and not is_constant:
            why = f"runs that differ: {len(runs)}; needed: {FEWEST}"
        places.append(Place(entry.name, _cell(found, why, is_constant, test_to_train), why=why))
        if not why:
            values[entry.name] = found
            if any(run.losses is not None for run in runs):
                losses[entry.name] = np.array([run.losses for run in runs], float)
    if losses and (losses.keys() < values.keys() or len({of.shape[1] for of in losses.values()}) > 1):
        raise UsageError("entries have losses of different examples, or some have none")
    if test_to_train is not None and len({len(of) for of in values.values()}) > 1:
        raise UsageError("entries have different numbers of splits")
    if test_to_train is None:
        evidence = Evidence.of_seeds(values, losses)
    else:
        evidence = Evidence.of_splits(values, test_to_train)
    parts = [(evidence, np.eye(len(values)))]
    return _stand(places, higher_is_better, parts, parts, evidence)


def across(standings: Mapping[str, Standing], anchors: Mapping[str, tuple[str, str]]) -> Overall:
    """Entries by their mean score (x - baseline) / (reference - baseline) over the tasks, complete rows only.

    Intervals are those of the ratio made linear (delta method), so a task gives scores only where the
    difference of its anchors is known to a fifth. The tasks are these, not a sample of tasks.

    Args:
        standings: Of tasks, by name.
        anchors: Task -> names of its baseline and its reference.
    """
    left_out, scores, linear = {}, {}, []
    for task, standing in sorted(standings.items()):
        base, top = anchors[task]
        evidence = standing.evidence
        if evidence is None or not {base, top} <= set(evidence.names):
            left_out[task] = "baseline or reference is not compared"
        elif not (span := standing.difference(top, base)).half <= _FIRM * abs(span.centre):
            left_out[task] = f"reference minus baseline is {span:.3g}, too rough for a scale"
        else:
            centre, weights = _scores(evidence, base, top)
            linear.append((evidence, weights))
            cells = _intervals(centre, linear[-1:], task)
            scores[task] = dict(zip(evidence.names, cells, strict=True))
    names = sorted({place.name for standing in standings.values() for place in standing.places})
    tasks = {name: sum(name in of_task for of_task in scores.values()) for name in names}
    complete = [name for name in names if tasks[name] == len(scores) > 0]
    parts, plain = [], []
    for evidence, weights in linear:
        rows = [evidence.names.index(name) for name in complete]
        parts.append((evidence, weights[rows] / len(linear)))
        plain.append((evidence, np.eye(len(evidence.names))[rows]))
    centre = np.array([np.mean([of_task[name].centre for of_task in scores.values()]) for name in complete])
    means = dict(zip(complete, _intervals(centre, parts, f"{len(parts)} tasks"), strict=True))
    places = [
        Place(name, means.get(name), why="" if name in means else f"{tasks[name]} of {len(scores)} tasks")
        for name in names
    ]
    return Overall(_stand(places, True, parts, plain, None), scores, left_out)


def _stand(
    places: Sequence[Place], higher_is_better: bool, parts: Parts, plain: Parts, evidence: Evidence | None
) -> Standing:
    """Compares the places that nothing speaks against.

    `parts` makes their cells, in order; `plain` picks their means, which have to vary.
    """

    def key(place: Place) -> tuple:
        return order(place.cell.centre if place.cell else None, higher_is_better), place.name

    compared = [place for place in places if not place.why]
    rows = sorted(range(len(compared)), key=lambda i: key(compared[i]))
    compared = [compared[i] for i in rows]
    k = len(compared)
    low, high = np.zeros((2, k, k))
    if k > 1:
        first, second = np.triu_indices(k, 1)
        ours, means = ([(of, weights[rows]) for of, weights in given] for given in (parts, plain))
        cells = np.array([place.cell.centre for place in compared if place.cell])
        centre = cells[first] - cells[second]
        between = np.array(Differences(ours).limits(centre))
        between[:, variances(means) <= (1e-12 * centre) ** 2] = np.nan  # nothing but rounding
        low[first, second], high[first, second] = between
        high[second, first], low[second, first] = -between
    above = low > 0 if higher_is_better else high < 0  # the row is separated from the column, and better
    group = 0
    for i in range(k):
        group += int(above[:i, i:].all())
        ranks = 1 + int(above[:, i].sum()), k - int(above[i].sum())
        compared[i] = replace(compared[i], ranks=ranks, group=group)
    others = sorted((place for place in places if place.why), key=key)
    return Standing((*compared, *others), low, high, evidence)


def _intervals(centre: np.ndarray, parts: Parts, basis: str) -> list[Interval]:
    """95% intervals, each by itself."""
    if not len(centre):
        return []
    low, high = limits(centre, parts)
    return [Interval(float(x), float(a), float(b), basis) for x, a, b in zip(centre, low, high, strict=True)]


def _scores(evidence: Evidence, base: str, top: str) -> tuple[np.ndarray, np.ndarray]:
    """Scores `[k]` of a task, and the weights `[k, k]` of the entries' means in them, made linear."""
    i, j = evidence.names.index(base), evidence.names.index(top)
    distance = evidence.means[j] - evidence.means[i]
    score = (evidence.means - evidence.means[i]) / distance
    weights = np.eye(len(score))
    weights[:, i] -= 1 - score
    weights[:, j] -= score
    return score, weights / distance


def _cell(values: np.ndarray, why: str, is_constant: bool, test_to_train: float | None) -> Interval | None:
    """Mean of an entry's values, with an interval if nothing speaks against the entry."""
    if not len(values):
        return None
    cell = student(values, test_to_train=test_to_train or 0)
    if why:
        return cell._replace(low=np.nan, high=np.nan)
    if is_constant:
        return Interval(cell.centre, cell.centre, cell.centre, "the same for every seed")
    return cell


def _distinct(entry: Entry, are_splits: bool) -> list[Replicate]:
    """Runs with a value, in order, copies left out; equal values on two splits are no copies."""
    found: dict[object, Replicate] = {}
    for number, run in enumerate(entry.runs):
        if run.value is not None:
            key = run.digest or (number if entry.seed_matters else run.value)
            found.setdefault(number if are_splits else key, run)
    return list(found.values())


def _check(name: str, runs: Sequence[Replicate], values: np.ndarray) -> None:
    """Refuses runs that contradict themselves."""
    if not np.isfinite(values).all():
        raise UsageError(f"{name}: a value is not finite; where a run gave none it is None")
    if len({np.shape([] if run.losses is None else run.losses) for run in runs}) > 1:
        raise UsageError(f"{name}: its runs have losses of different examples, or some have none")
    for run, value in zip(runs, values, strict=True):
        if run.losses is not None and not abs(run.losses.mean() - value) <= 1e-9 + 1e-6 * abs(value):
            raise UsageError(f"{name}: the losses of a run have another mean than its value")
