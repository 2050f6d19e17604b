"""Runs of singular_evidence beside the published tables and figures, and the claims of the paper on them.

The paper is "Variational Inference via Resolution of Singularities" 2022 (docs/sources.md): its Tables 2 to
4, its Figs 1 and 2, and the claims of its section 7.

Shapes: R repetitions (data sets), S draws of the weights, X inputs. Psi, in nats, is a lower bound of the
normalised log evidence (eq. 2 of the paper). As there, mean and sd are over the repetitions that converged.
A difference is paired over the data sets that both methods hold, told by their digests, else Welch's.
"""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from importlib.resources import files
from itertools import permutations
from typing import Any, NamedTuple

import altair as alt
import numpy as np
from scipy import stats

from bench import registry
from bench.contract import Arrays
from bench.errors import UsageError
from bench.records import Record
from bench.settings import build
from bench.studies import bands
from bench.tasks import singular_evidence
from bench.tasks.singular_evidence import SingularEvidence

NUM_TRAIN, EPOCHS = 5000, 2000
"""Of every published row (section 7 of the paper)."""
FEWEST = 3
"""Data sets from which on an interval is given."""
_ROW = ("model", "hidden", "true_weight", "prior_mean", "prior_variance", "num_train", "repetitions")
"""Settings of the task that a table's row names."""


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
    text = (files("bench") / "published" / "singular_evidence.csv").read_text()
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


class Run(NamedTuple):
    """A run of singular_evidence: one row of a table.

    Attributes:
        method: As typed.
        preset: With the settings that are not its own, those of triplet and size apart.
        seed: Of the run.
        triplet: Model, truth and prior.
        num_train: Size n of a data set.
        epochs: Of training.
        psis: [R] float64, nats; NaN where the repetition did not converge.
        digests: [R, 32] uint8, of the data sets.
        leading_term: -lambda log n + (m - 1) log log n, nats; None where lambda is not known.
        generalisation: Error of the predictive in nats (appendix E of the paper) and its standard error, or
            None.
        functions: [S, X] draws of f on the task's grid; None but for the tanh network.
    """

    method: str
    preset: str
    seed: int
    triplet: Triplet
    num_train: int
    epochs: int
    psis: np.ndarray
    digests: np.ndarray
    leading_term: float | None
    generalisation: tuple[float | None, float | None]
    functions: np.ndarray | None

    @classmethod
    def of(cls, record: Record, task: SingularEvidence, arrays: Arrays) -> Run:
        """What a committed or just finished run measured.

        Raises:
            UsageError: If its method cannot be found.
        """
        s, converged = task.settings, singular_evidence.converged(arrays)
        error, of_error = "generalisation_error", "generalisation_standard_error"
        return cls(
            record.method.name,
            ", ".join([record.preset, *_changed(record, task)]),
            record.seed,
            Triplet(
                s.model,
                s.hidden,
                None if s.model == "reduced_rank" else s.true_weight,
                s.prior_mean,
                s.prior_variance,
            ),
            s.num_train,
            s.epochs,
            np.where(converged, singular_evidence.psis(arrays), np.nan),
            arrays["data_digests"],
            task.leading_term,
            (record.metrics[error], record.metrics[of_error]),
            arrays.get("functions") if converged.any() else None,
        )

    @property
    def values(self) -> np.ndarray:
        """Psi of the converged repetitions, [count]."""
        return self.psis[np.isfinite(self.psis)]


def _changed(record: Record, task: SingularEvidence) -> list[str]:
    """Settings that are not the preset's, but for those that a table's row names."""
    method = record.method
    preset = registry.choose(method.name, record.task.name, record.preset, members=method.members)
    given = asdict(build(type(preset.method_settings), method.settings, "method")), asdict(task.settings)
    own = asdict(preset.method_settings), asdict(preset.task_settings) | dict.fromkeys(_ROW)
    given[1].update(dict.fromkeys(_ROW))
    return [f"{k}={v}" for g, o in zip(given, own, strict=True) for k, v in g.items() if v != o[k]]


def check(runs: Sequence[Run]) -> None:
    """Refuses runs that cannot stand together.

    Raises:
        UsageError: If one is given twice, or two that must share data sets (equal seed, model, truth and n)
            do not: their methods would be compared on different data.
    """
    seen: set[tuple[Any, ...]] = set()
    data: dict[tuple[Any, ...], Run] = {}
    for run in runs:
        name = (run.triplet, run.num_train, run.method, run.preset, run.seed)
        if name in seen:
            raise UsageError(f"{_named(run)}: given twice")
        seen.add(name)
        other = data.setdefault((run.seed, *run.triplet[:3], run.num_train), run)
        both = min(len(run.digests), len(other.digests))
        if not np.array_equal(run.digests[:both], other.digests[:both]):
            raise UsageError(f"{_named(run)} has other data sets than {_named(other)}: they must be the same")


def _named(run: Run) -> str:
    return f"{run.method} ({run.triplet}, n = {run.num_train}, {run.preset}, seed {run.seed})"


# --------------------------------------------------------------------------------------------------- table


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

    run: Run
    repetitions: int
    mean: float | None
    sd: float | None
    published: Published | None
    z: float | None
    sd_ratio: float | None


def line(run: Run) -> Line:
    """A run beside its published row."""
    values = run.values
    mean = float(values.mean()) if len(values) else None
    sd = float(values.std(ddof=1)) if len(values) > 1 else None
    row = _row(run)
    z = ratio = None
    if row is not None and row.sd and mean is not None and sd is not None:
        z = (mean - row.mean) / float(np.sqrt(sd**2 / len(values) + row.sd**2 / row.repetitions))
        ratio = sd / row.sd
    return Line(run, len(values), mean, sd, row, z, ratio)


def _row(run: Run) -> Published | None:
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


def table(runs: Iterable[Run]) -> list[list[str]]:
    """Rows under HEADER in the order of the paper; rows that it does not have come last."""
    return [_cells(line(run)) for run in sorted(runs, key=_place)]


def _place(run: Run) -> tuple[Any, ...]:
    """Sorts runs in the order of the paper; rows that it does not have come last."""
    name = parsed(run.method)
    places = (i for i, p in enumerate(published()) if p.triplet == run.triplet and parsed(p.method) == name)
    place = next(places, len(published()))
    return place, str(run.triplet), run.num_train, run.method, run.preset, run.seed


def _cells(of: Line) -> list[str]:
    run, row = of.run, of.published
    model, hidden, true_weight, prior_mean, prior_variance = run.triplet
    error, of_error = run.generalisation
    over = None if None in (of.mean, run.leading_term) else of.mean - run.leading_term  # type: ignore[operator]
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


# ------------------------------------------------------------------------------------------------- claims


class Moments(NamedTuple):
    """Mean and sd (correction 1; None if unknown) of so many values of Psi, nats."""

    mean: float
    sd: float | None
    repetitions: int


class Difference(NamedTuple):
    """Difference of two means of Psi in nats with its 95% interval, NaN below FEWEST data sets each.

    `how` it was found: "paired over n data sets" or "Welch".
    """

    centre: float
    low: float
    high: float
    how: str

    def __str__(self) -> str:
        if np.isnan(self.low):
            return f"{self.centre:.2f} (no interval below {FEWEST} data sets)"
        return f"{self.centre:.2f} ({self.low:.2f} to {self.high:.2f}, 95%, {self.how})"

    @property
    def sign(self) -> int:
        """1 or -1 where the interval lies above or below 0, else 0."""
        return int(self.low > 0) - int(self.high < 0)


Sample = Mapping[bytes, float]
"""Digest of a data set -> Psi of the fit to it, where that converged."""


def difference(first: Sample, second: Sample) -> Difference | None:
    """First minus second: Student's t over the data sets of both if there are enough, else Welch's.

    None if either has none.
    """
    if not first or not second:
        return None
    shared = sorted(first.keys() & second.keys())
    if len(shared) < FEWEST:
        return welch(_moments(first.values()), _moments(second.values()))
    change = np.array([first[d] - second[d] for d in shared])
    centre = float(change.mean())
    half = float(stats.t.ppf(0.975, len(change) - 1) * change.std(ddof=1) / np.sqrt(len(change)))
    return Difference(centre, centre - half, centre + half, f"paired over {len(shared)} data sets")


def welch(first: Moments, second: Moments) -> Difference:
    """First minus second from moments alone, degrees of freedom by Satterthwaite."""
    centre = first.mean - second.mean
    if first.sd is None or second.sd is None or min(first.repetitions, second.repetitions) < FEWEST:
        return Difference(centre, np.nan, np.nan, "Welch")
    size = np.array([first.repetitions, second.repetitions])
    variance = np.array([first.sd, second.sd]) ** 2 / size
    freedom = variance.sum() ** 2 / (variance**2 / (size - 1)).sum()
    half = float(stats.t.ppf(0.975, freedom) * np.sqrt(variance.sum()))
    return Difference(centre, centre - half, centre + half, "Welch")


def _moments(values: Iterable[float]) -> Moments:
    """Moments of at least one value."""
    of = np.array(list(values))
    return Moments(float(of.mean()), float(of.std(ddof=1)) if len(of) > 1 else None, len(of))


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
    difference: Difference

    def __str__(self) -> str:
        shown = {1: "shown", 0: "not shown", -1: "contradicted"}[self.difference.sign]
        return (
            f"{self.triplet}, {self.where}: {self.gamma} minus {self.gaussian} in Psi is {self.difference}: "
            f"{self.what}: {shown}"
        )


def claims(runs: Iterable[Run]) -> list[Claim]:
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


def _samples(runs: Iterable[Run]) -> dict[tuple[Triplet, int, str], dict[str, dict[bytes, float]]]:
    """(Triplet, n, preset) -> method -> its converged fits, of all seeds."""
    found: dict[tuple[Triplet, int, str], dict[str, dict[bytes, float]]] = {}
    for run in sorted(runs, key=_place):
        of = found.setdefault((run.triplet, run.num_train, run.preset), {}).setdefault(run.method, {})
        of |= {d.tobytes(): float(p) for d, p in zip(run.digests, run.psis, strict=True) if np.isfinite(p)}
    return found


def _pairs(triplet: Triplet, methods: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """What is claimed of which gamma and Gaussian with the same mean of the source."""
    for gamma, gaussian in permutations(methods, 2):
        first, second = _source(gamma), _source(gaussian)
        if first is None or second is None or (first.is_gamma, second.is_gamma) != (True, False):
            continue
        if not np.isclose(first.mean, second.mean):
            continue
        if triplet.model == "tanh" and triplet.true_weight == 5:
            if first.learned:
                yield LEARNED, gamma, gaussian
        elif triplet.model != "linear" and first.mean >= FAR_MEAN:
            yield FAR, gamma, gaussian


class _Source(NamedTuple):
    is_gamma: bool
    mean: float
    learned: bool


def _source(method: str) -> _Source | None:
    """The source of a flow, as its name says."""
    match parsed(method):
        case ("nf", "gamma", float(shape), float(_), float(rate), learned):
            return _Source(True, shape / rate, learned == "True")
        case ("nf", "gaussian", float(mean), float(_)):
            return _Source(False, mean, False)
    return None


class Rise(NamedTuple):
    """By how much Psi rises where the preset standard takes the place of paper; `preset` says if any changed.

    Moments and difference are None where no repetition converged.
    """

    triplet: Triplet
    num_train: int
    method: str
    preset: str
    paper: Moments | None
    standard: Moments | None
    difference: Difference | None


def rises(runs: Iterable[Run]) -> list[Rise]:
    """Standard minus paper, of every method with runs of both presets on one triplet and size."""
    samples = _samples(runs)
    return [
        Rise(
            triplet,
            num_train,
            method,
            changed,
            _moments(old.values()) if old else None,
            _moments(new.values()) if new else None,
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
    """

    triplet: Triplet
    preset: str
    method: str
    sizes: tuple[int, ...]
    slope: float
    standard_error: float
    repetitions: int
    expected: float | None

    def __str__(self) -> str:
        against = "not known" if self.expected is None else f"{self.expected:g}"
        return (
            f"{self.triplet}, {self.preset}, {self.method}: Psi has slope {self.slope:.2f} "
            f"(standard error {self.standard_error:.2f}, {self.repetitions} repetitions) in log n, "
            f"n = {self.sizes[0]} to {self.sizes[-1]}; -lambda is {against}"
        )


def slopes(runs: Iterable[Run]) -> list[Slope]:
    """The slope of every method that has runs of several n on one triplet, all else equal.

    Each repetition has its own slope, since its data sets of different n may have points in common.
    """
    found = []
    for (triplet, preset, method), of in _over_sizes(runs).items():
        sizes = tuple(of)
        log_n = np.log(sizes)
        values = [_by_repetition(of[n]) for n in sizes]
        whole = [r for r in values[0] if all(np.isfinite(v.get(r, np.nan)) for v in values)]
        weights = (log_n - log_n.mean()) / ((log_n - log_n.mean()) ** 2).sum()
        each = np.array([weights @ [v[r] for v in values] for r in whole])
        error = each.std(ddof=1) / np.sqrt(len(each)) if len(each) > 1 else np.nan
        mean = each.mean() if len(each) else np.nan
        known = singular_evidence.learning_coefficient(
            triplet.model, triplet.hidden, triplet.true_weight or 0.0
        )
        expected = None if known is None else -known[0]
        found.append(Slope(triplet, preset, method, sizes, float(mean), float(error), len(each), expected))
    return found


def _over_sizes(runs: Iterable[Run]) -> dict[tuple[Triplet, str, str], dict[int, list[Run]]]:
    """(Triplet, preset, method) -> n, ascending -> its runs; of those with several n."""
    found: dict[tuple[Triplet, str, str], dict[int, list[Run]]] = {}
    for run in sorted(runs, key=lambda run: (run.num_train, run.seed)):
        of = found.setdefault((run.triplet, run.preset, run.method), {})
        of.setdefault(run.num_train, []).append(run)
    return {key: found[key] for key in sorted(found, key=str) if len(found[key]) > 1}


def _by_repetition(runs: Iterable[Run]) -> dict[tuple[int, int], float]:
    """(Seed, repetition) -> Psi."""
    return {(run.seed, r): float(psi) for run in runs for r, psi in enumerate(run.psis)}


def psi_charts(runs: Sequence[Run]) -> dict[str, Any]:
    """Psi against n, mean and standard error, beside the leading term; a panel per method and preset."""
    groups = _over_sizes(runs)
    panels: dict[Triplet, list[Any]] = {}
    for slope in slopes(runs):
        of = groups[slope.triplet, slope.preset, slope.method]
        values = [np.concatenate([run.values for run in of[n]]) for n in slope.sizes]
        if not all(map(len, values)):
            continue
        series = {"Psi": bands.Band(*np.transpose([_mean_and_error(v) for v in values]))}
        leading = [of[n][0].leading_term for n in slope.sizes]
        if None not in leading:
            level = np.array(leading, float)
            series["-lambda log n + (m - 1) log log n"] = bands.Band(level, level, level)
        against = "" if slope.expected is None else f", -lambda {slope.expected:g}"
        title = [
            f"{slope.method}, {slope.preset}",
            f"slope {slope.slope:.2f}, standard error {slope.standard_error:.2f}{against}",
            bands.CAPTIONS["standard_error"],
        ]
        chart = bands.chart(series, slope.sizes, title, "n", "Psi, nats", logarithmic_x=True)
        panels.setdefault(slope.triplet, []).append(chart)
    return {
        f"psi-{_slug(triplet)}": alt.concat(*of, columns=2).properties(title=str(triplet))
        for triplet, of in panels.items()
    }


def _mean_and_error(values: np.ndarray) -> tuple[float, float, float]:
    """Mean, and mean -+ standard error where there are several values."""
    of = _moments(values)
    error = (of.sd or 0.0) / of.repetitions**0.5
    return of.mean, of.mean - error, of.mean + error


# ---------------------------------------------------------------------------------------- predictive bands


def predictive_charts(runs: Iterable[Run]) -> dict[str, Any]:
    """The 5 to 95% band of the next observation, and the truth's: Figs 1 and 2, a panel per method.

    Of the first repetition that converged, of runs that keep functions.
    """
    x = singular_evidence.GRID
    panels: dict[tuple[Triplet, int, str, int], list[Any]] = {}
    for run in sorted(runs, key=_place):
        if run.functions is None or not np.isfinite(run.functions).all():
            continue
        weight = run.triplet.true_weight or 0.0
        truth = run.triplet.hidden * weight * np.tanh(weight * x)
        chart = singular_evidence.predictive_chart(run.functions, truth, run.method)
        group = run.triplet, run.num_train, run.preset, run.seed
        panels.setdefault(group, []).append(chart)
    charts = {}
    for (triplet, num_train, preset, seed), of in panels.items():
        whole = f"{triplet}, n = {num_train}, {preset}, seed {seed}"
        chart = alt.concat(*of, columns=2).properties(title=whole)
        charts[f"predictive-{_slug(triplet)}-n{num_train}-{_slug(preset)}-seed{seed}"] = chart
    return charts


def _slug(name: object) -> str:
    """A name for files."""
    return re.sub(r"[^A-Za-z0-9.]+", "_", str(name)).strip("_")


# -------------------------------------------------------------------------------------------------- together


def comparison(runs: Sequence[Run]) -> tuple[dict[str, Any], list[list[str]], list[str]]:
    """Figures of several runs, their rows under HEADER, and what can be said of them, with intervals.

    Raises:
        UsageError: If a run is given twice, or runs that must share data sets have others.
    """
    check(runs)
    sentences = [str(claim) for claim in claims(runs)]
    for rise in rises(runs):
        what = f"{rise.triplet}, n = {rise.num_train}, {rise.method}: {rise.preset} minus paper in Psi is"
        sentences.append(f"{what} {rise.difference or 'unknown: a preset has no converged repetition'}")
    sentences += [str(slope) for slope in slopes(runs)]
    return predictive_charts(runs) | psi_charts(runs), table(runs), sentences
