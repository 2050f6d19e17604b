"""Claims of a published paper on its tables, held against its own numbers and runs of ours; slopes of Psi.

The paper is "Variational Inference via Resolution of Singularities" 2022 (docs/sources.md), section 7.

A difference is paired over the data sets that both methods hold, told by their digests, else Welch's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import permutations
from typing import NamedTuple

import numpy as np

from bench import intervals
from bench.intervals import FEWEST, Interval, Moments, welch
from bench.studies.singular.models import MODELS
from bench.studies.singular.table import EvidenceRun, Triplet, parsed, place, published

Sample = Mapping[bytes, float]
"""Digest of a data set -> Psi of the fit to it, where that converged."""


def difference(first: Sample, second: Sample) -> Interval | None:
    """First minus second: Student's over the data sets of both if there are enough, else Welch's.

    None if either has none.
    """
    if not first or not second:
        return None
    change = intervals.differences(first, second)
    if len(change) < FEWEST:
        return welch(Moments.of(first.values()), Moments.of(second.values()))
    return intervals.student(change, f"paired over {len(change)} data sets")


LEARNED = "learned generalised gamma above Gaussian at w0 = 5"
FAR = "generalised gamma above Gaussian from a far source"
FAR_MEAN = 5.0
"""Mean of a source that section 7 calls very far from w0."""


class Claim(NamedTuple):
    """A claim of section 7 of the paper on one pair of methods whose sources have the same mean.

    Attributes:
        what: LEARNED or FAR.
        triplet: Of both.
        where: Size and preset of both, or "published".
        gamma: Name of the method with a generalised gamma source, of mean lambda0 / beta0.
        gaussian: Name of the method with a Gaussian source, of mean mu0.
        difference: Gamma minus Gaussian; the claim is shown where its sign is 1.
    """

    what: str
    triplet: Triplet
    where: str
    gamma: str
    gaussian: str
    difference: Interval

    def __str__(self) -> str:
        shown = {1: "shown", 0: "not shown", -1: "contradicted"}[self.difference.sign()]
        return (
            f"{self.triplet}, {self.where}: {self.gamma} minus {self.gaussian} in Psi is "
            f"{self.difference:.2f}: {self.what}: {shown}"
        )


def claims(runs: Iterable[EvidenceRun]) -> list[Claim]:
    """What section 7 claims, on every pair of methods with runs of one triplet, size and preset."""
    found = []
    for (triplet, num_train, preset), methods in _samples(runs).items():
        for what, gamma, gaussian in _pairs(triplet, methods):
            change = difference(methods[gamma], methods[gaussian])
            if change is not None:
                found.append(Claim(what, triplet, f"n = {num_train}, {preset}", gamma, gaussian, change))
    return found


def published_claims() -> list[Claim]:
    """What section 7 claims, from the published mean, sd and count of every pair (Welch)."""
    of: dict[Triplet, dict[str, Moments]] = defaultdict(dict)
    for row in published():
        of[row.triplet][row.method] = Moments(row.mean, row.sd, row.repetitions)
    return [
        Claim(what, triplet, "published", gamma, gaussian, welch(rows[gamma], rows[gaussian]))
        for triplet, rows in of.items()
        for what, gamma, gaussian in _pairs(triplet, rows)
    ]


def _samples(runs: Iterable[EvidenceRun]) -> dict[tuple[Triplet, int, str], dict[str, dict[bytes, float]]]:
    """(Triplet, n, preset) -> method -> its converged fits, of all seeds."""
    found: dict[tuple[Triplet, int, str], dict[str, dict[bytes, float]]] = {}
    for run in sorted(runs, key=place):
        of = found.setdefault((run.triplet, run.num_train, run.preset), {}).setdefault(run.method, {})
        of |= {d.tobytes(): float(p) for d, p in zip(run.digests, run.psis, strict=True) if np.isfinite(p)}
    return found


def _pairs(triplet: Triplet, methods: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """What is claimed of which gamma and Gaussian with the same mean of the source."""
    for gamma, gaussian in permutations(methods, 2):
        first, second = _base_distribution(gamma), _base_distribution(gaussian)
        if first is None or second is None or (first.is_gamma, second.is_gamma) != (True, False):
            continue
        if not np.isclose(first.mean, second.mean):
            continue
        if triplet.model == "tanh" and triplet.true_weight == 5:
            if first.learned:
                yield LEARNED, gamma, gaussian
        elif triplet.model != "linear" and first.mean >= FAR_MEAN:
            yield FAR, gamma, gaussian


class _BaseDistribution(NamedTuple):
    is_gamma: bool
    mean: float
    learned: bool


def _base_distribution(method: str) -> _BaseDistribution | None:
    """The base distribution of a flow, as its name says."""
    match parsed(method):
        case ("nf", "gamma", float(shape), float(_), float(rate), learned):
            return _BaseDistribution(True, shape / rate, learned == "True")
        case ("nf", "gaussian", float(mean), float(_)):
            return _BaseDistribution(False, mean, False)
    return None


class Rise(NamedTuple):
    """The rise of Psi where the preset standard takes the place of paper.

    `preset` is standard with the settings changed, if any were. Moments and difference are None where no
    repetition converged.
    """

    triplet: Triplet
    num_train: int
    method: str
    preset: str
    paper: Moments | None
    standard: Moments | None
    difference: Interval | None

    def __str__(self) -> str:
        what = f"{self.triplet}, n = {self.num_train}, {self.method}: {self.preset} minus paper in Psi is"
        if self.difference is None:
            return f"{what} unknown: a preset has no converged repetition"
        return f"{what} {self.difference:.2f}"


def rises(runs: Iterable[EvidenceRun]) -> list[Rise]:
    """Standard minus paper, of every method with runs of both presets on one triplet and size."""
    samples = _samples(runs)
    return [
        Rise(
            triplet,
            num_train,
            method,
            changed,
            Moments.of(old.values()) if old else None,
            Moments.of(new.values()) if new else None,
            difference(new, old),
        )
        for (triplet, num_train, preset), methods in samples.items()
        if preset == "paper"
        for method, old in methods.items()
        for changed in sorted({p for t, n, p in samples if (t, n) == (triplet, num_train)})
        if changed.startswith("standard")
        and (new := samples[triplet, num_train, changed].get(method)) is not None
    ]


# -------------------------------------------------------------------------------------------- Psi against n


class Slope(NamedTuple):
    """Least-squares slope of Psi in log n, nats.

    Attributes:
        triplet: Of its runs.
        preset: Of its runs.
        method: Of its runs.
        sizes: The n, ascending.
        slope: Mean over the repetitions that converged at every n; NaN if there are none.
        standard_error: Of it, over those repetitions; NaN of fewer than two.
        repetitions: How many they are.
        expected: -lambda; None where it is not known.
        evidence: Slope of the log evidence of the same repetitions; NaN where it is not known.
        lacking: Of the log evidence at the largest n, mean over them, nats; NaN where it is not known.
    """

    triplet: Triplet
    preset: str
    method: str
    sizes: tuple[int, ...]
    slope: float
    standard_error: float
    repetitions: int
    expected: float | None
    evidence: float
    lacking: float

    def __str__(self) -> str:
        against = "not known" if self.expected is None else f"{self.expected:g}"
        known = "" if np.isnan(self.evidence) else f", the slope of the log evidence {self.evidence:.2f}"
        return (
            f"{self.triplet}, {self.preset}, {self.method}: Psi has slope {self.slope:.2f} "
            f"(standard error {self.standard_error:.2f}, {self.repetitions} repetitions) in log n, "
            f"n = {self.sizes[0]} to {self.sizes[-1]}; -lambda is {against}{known}"
        )


def slopes(runs: Iterable[EvidenceRun]) -> list[Slope]:
    """The slope of every method that has runs of several n on one triplet under one preset.

    Each repetition has its own slope, since its data sets of different n may have points in common.
    """
    found = []
    for (triplet, preset, method), of in over_sizes(runs).items():
        sizes = tuple(of)
        log_n = np.log(sizes)
        values = [_by_repetition(of[n]) for n in sizes]
        whole = [r for r in values[0] if all(np.isfinite(v.get(r, np.nan)) for v in values)]
        weights = (log_n - log_n.mean()) / ((log_n - log_n.mean()) ** 2).sum()
        psi = np.array([[v[r] for v in values] for r in whole]).reshape(-1, len(sizes))
        evidences = [_by_repetition(of[n], "log_evidences") for n in sizes]
        evidence = np.array([[e[r] for e in evidences] for r in whole]).reshape(-1, len(sizes))
        each = psi @ weights
        error = intervals.standard_error(each) if len(each) > 1 else np.nan
        known = MODELS[triplet.model](triplet.hidden, triplet.true_weight or 0.0).learning_coefficient()
        expected = None if known is None else -known[0]
        of_evidence, lacking = evidence @ weights, (evidence - psi)[:, -1]
        means = (float(v.mean()) if len(v) else np.nan for v in (each, of_evidence, lacking))
        slope, *against = means
        found.append(Slope(triplet, preset, method, sizes, slope, error, len(each), expected, *against))
    return found


def over_sizes(runs: Iterable[EvidenceRun]) -> dict[tuple[Triplet, str, str], dict[int, list[EvidenceRun]]]:
    """(Triplet, preset, method) -> n, ascending -> its runs; of those with several n."""
    found: dict[tuple[Triplet, str, str], dict[int, list[EvidenceRun]]] = {}
    for run in sorted(runs, key=lambda run: (run.num_train, run.seed)):
        of = found.setdefault((run.triplet, run.preset, run.method), {})
        of.setdefault(run.num_train, []).append(run)
    return {key: found[key] for key in sorted(found, key=str) if len(found[key]) > 1}


def _by_repetition(runs: Iterable[EvidenceRun], name: str = "psis") -> dict[tuple[int, int], float]:
    """(Seed, repetition) -> Psi, or the log evidence."""
    return {(run.seed, r): float(value) for run in runs for r, value in enumerate(getattr(run, name))}
