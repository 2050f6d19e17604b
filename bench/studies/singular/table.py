"""Runs of singular models as rows beside published ones.

The paper is "Variational Inference via Resolution of Singularities" 2022 (docs/sources.md), Tables 2 to 4.

Shapes: R repetitions (data sets), S draws of the weights, X inputs. Psi, in nats, is a lower bound of the
normalised log evidence (eq. 2 of the paper). As there, mean and sd are over the repetitions that converged.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np

from bench.errors import UsageError
from bench.intervals import Moments

NUM_TRAIN, EPOCHS = 5000, 2000
"""Of every published row (section 7 of the paper)."""


class Triplet(NamedTuple):
    """Model, truth and prior; `true_weight` is None of reduced rank regression, whose truth is fixed."""

    model: str
    hidden: int
    true_weight: float | None
    prior_mean: float
    prior_variance: float

    def __str__(self) -> str:
        truth = "" if self.true_weight is None else f"w0 = {self.true_weight:g}, "
        return f"{self.model}, H = {self.hidden}, {truth}prior ({self.prior_mean:g}, {self.prior_variance:g})"


class Published(NamedTuple):
    """A row of a table of the paper; `sd` is None where it prints NaN."""

    table: int
    triplet: Triplet
    method: str
    repetitions: int
    mean: float
    sd: float | None


@cache
def published() -> tuple[Published, ...]:
    """All 176 rows of Tables 2, 3 and 4, in their order."""
    text = (files("bench.studies") / "published" / "singular_evidence.csv").read_text()
    return tuple(
        Published(
            int(row["table"]),
            Triplet(
                row["model"],
                int(row["hidden"]),
                _optional(row["true_weight"]),
                float(row["prior_mean"]),
                float(row["prior_variance"]),
            ),
            row["method"],
            int(row["count"]),
            float(row["mean"]),
            _optional(row["sd"]),
        )
        for row in csv.DictReader(text.splitlines())
    )


def _optional(cell: str) -> float | None:
    return float(cell) if cell else None


def parsed(method: str) -> tuple[str | float, ...]:
    """The parts of a method's name, numbers as numbers: nf_gaussian_5_5e-2 is nf_gaussian_5_0.05."""
    number = re.compile(r"-?[0-9.]+(e[+-]?[0-9]+)?")
    return tuple(float(part) if number.fullmatch(part) else part for part in method.split("_"))


class EvidenceRun(NamedTuple):
    """A run of singular_evidence: one row of a table.

    Attributes:
        method: As typed.
        preset: With the settings of the run that are not the preset's, those of triplet and size apart.
        seed: Of the run.
        triplet: Model, truth and prior.
        num_train: Size n of a data set.
        epochs: Of training.
        psis: [R] float64, nats; NaN where the repetition did not converge.
        log_evidences: [R] float64, nats, normalised, of the same data sets; NaN where they are not known.
        digests: [R, 32] uint8, of the data sets.
        leading_term: -lambda log n + (m - 1) log log n, nats; None where lambda is not known.
        generalisation: Error of the predictive in nats (appendix E) and its standard error, or None.
        functions: [S, X] draws of f on the task's grid; None but for the tanh network.
    """

    method: str
    preset: str
    seed: int
    triplet: Triplet
    num_train: int
    epochs: int
    psis: np.ndarray
    log_evidences: np.ndarray
    digests: np.ndarray
    leading_term: float | None
    generalisation: tuple[float | None, float | None]
    functions: np.ndarray | None

    @property
    def values(self) -> np.ndarray:
        """Psi of the converged repetitions, [count]."""
        return self.psis[np.isfinite(self.psis)]


def check(runs: Sequence[EvidenceRun]) -> None:
    """Refuses runs that cannot stand together.

    Raises:
        UsageError: If one is given twice, or two that must share data sets (equal seed, model, truth and n)
            do not: their methods would be compared on different data.
    """
    seen: set[tuple[Any, ...]] = set()
    data: dict[tuple[Any, ...], EvidenceRun] = {}
    for run in runs:
        name = (run.triplet, run.num_train, run.method, run.preset, run.seed)
        if name in seen:
            raise UsageError(f"{_named(run)}: given twice")
        seen.add(name)
        other = data.setdefault((run.seed, *run.triplet[:3], run.num_train), run)
        both = min(len(run.digests), len(other.digests))
        if not np.array_equal(run.digests[:both], other.digests[:both]):
            raise UsageError(f"{_named(run)} has other data sets than {_named(other)}: they must be the same")


def _named(run: EvidenceRun) -> str:
    return f"{run.method} ({run.triplet}, n = {run.num_train}, {run.preset}, seed {run.seed})"


class Line(NamedTuple):
    """A run beside its published row.

    Attributes:
        run: The run.
        repetitions: That converged.
        mean: Of their Psi, nats; None if there are none.
        sd: With correction 1; None of fewer than two.
        published: The row with the same method, triplet, n and epochs; None if there is none.
        z: (m1 - m2) / sqrt(s1^2 / n1 + s2^2 / n2), ours minus published; None without two sds.
        sd_ratio: Ours over the published; None without two sds.
    """

    run: EvidenceRun
    repetitions: int
    mean: float | None
    sd: float | None
    published: Published | None
    z: float | None
    sd_ratio: float | None


def line(run: EvidenceRun) -> Line:
    """A run beside its published row."""
    row = _row(run)
    if not len(run.values):
        return Line(run, 0, None, None, row, None, None)
    mean, sd, count = Moments.of(run.values)
    z = ratio = None
    if row is not None and row.sd and sd is not None:
        z = (mean - row.mean) / float(np.sqrt(sd**2 / count + row.sd**2 / row.repetitions))
        ratio = sd / row.sd
    return Line(run, count, mean, sd, row, z, ratio)


def _row(run: EvidenceRun) -> Published | None:
    if (run.num_train, run.epochs) != (NUM_TRAIN, EPOCHS):
        return None
    name = parsed(run.method)
    return next((p for p in published() if p.triplet == run.triplet and parsed(p.method) == name), None)


HEADER = [
    "table",
    "model",
    "H",
    "w0",
    "prior",
    "n",
    "method",
    "preset",
    "seed",
    "count",
    "mean",
    "sd",
    "published count",
    "published mean",
    "published sd",
    "z",
    "sd ratio",
    "leading term",
    "Psi minus it",
    "generalisation error",
]


def rows(runs: Iterable[EvidenceRun]) -> list[list[str]]:
    """Rows under HEADER, in the order of the paper; runs that it does not have come last."""
    return [_cells(line(run)) for run in sorted(runs, key=place)]


def place(run: EvidenceRun) -> tuple[Any, ...]:
    """Sorts runs in the order of the paper; runs that it does not have come last."""
    name = parsed(run.method)
    places = (i for i, p in enumerate(published()) if p.triplet == run.triplet and parsed(p.method) == name)
    return next(places, len(published())), str(run.triplet), run.num_train, run.method, run.preset, run.seed


def _cells(of: Line) -> list[str]:
    run, row = of.run, of.published
    model, hidden, true_weight, prior_mean, prior_variance = run.triplet
    error, of_error = run.generalisation
    over = None if of.mean is None or run.leading_term is None else of.mean - run.leading_term
    return [
        str(row.table) if row else "-",
        model,
        str(hidden),
        _number(true_weight, "g"),
        f"({prior_mean:g}, {prior_variance:g})",
        str(run.num_train),
        run.method,
        run.preset,
        str(run.seed),
        f"{of.repetitions} of {len(run.psis)}",
        _number(of.mean, ".2f"),
        _number(of.sd, ".2f"),
        str(row.repetitions) if row else "-",
        _number(row.mean if row else None, ".2f"),
        _number(row.sd if row else None, ".2f"),
        _number(of.z, ".2f"),
        _number(of.sd_ratio, ".2f"),
        _number(run.leading_term, ".2f"),
        _number(over, ".2f"),
        _number(error, ".3g") + ("" if of_error is None else f" ± {of_error:.1g}"),
    ]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
