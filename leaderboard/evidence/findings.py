"""Headlines of the documents, held against the committed records: reproduced, contradicted or undecided.

A claim (docs/findings.yaml) names a contrast, a weighted sum of metrics of cells or the least of them, and
where it should lie: above or below a number, within a margin of 0 (an equality), or on one side of 0 (a
difference). The contrast has a value for every seed that all its cells have; runs that share no seed are
never compared. The 95% t interval over these values decides, and below `FEWEST` of them nothing does. Where
the values are of random splits of one table, the interval allows for the rows that splits share
(`bench.intervals.student`).

Equality and difference of one quantity share one margin, so that one size never counts as both: a difference
is reproduced beyond the margin alone. Where the document prints its size, it has to be met within a factor
`FACTOR` too. What has the right sign and no more is a verdict of its own, `direction only`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import pydantic
from scipy import special

from bench.errors import UsageError
from bench.intervals import FEWEST, Interval, student
from bench.leaderboard.evidence.entries import RECORDS
from bench.leaderboard.evidence.store import CURVES, needed
from bench.leaderboard.evidence.submission import OURS, SUBMISSIONS
from bench.runs.plan import Plan
from bench.runs.records import Record, read_curves, read_record
from bench.runs.registry import NONE
from bench.runs.resolution import resolve
from bench.runs.runner import task_of
from bench.settings import Schema, build, read_yaml

Word = Literal["reproduced", "direction only", "contradicted", "undecided", "no verdict"]
FACTOR = 2
"""A printed size is met where the interval reaches from its half to its double, or touches that range."""
MOST = 100
"""Seeds up to which it is said how many would decide."""
REPETITION = "repetition"
SPLIT = "split"
SECONDS = "training_seconds"
"""The metric that every run has: the seconds of its fits, as its record has them."""
ROOTS = (SUBMISSIONS / OURS, RECORDS)


class _OfYaml(Schema):
    """YAML knows no tuples, and writes a whole number where a real one is meant."""

    model_config = pydantic.ConfigDict(strict=False)


class Term(_OfYaml):
    """One cell of a contrast, by the fields of a `Plan`, its weight and its own metric."""

    weight: float = 1.0
    metric: str | None = None
    method: str
    task: str
    preset: str = "standard"
    method_settings: dict[str, Any] = {}
    task_settings: dict[str, Any] = {}

    def plan(self, seed: int = 0) -> Plan:
        """The run of this cell with a seed; raises UsageError where there can be none."""
        fields = ("method", "task", "preset", "method_settings", "task_settings")
        return build(Plan, {"seed": seed, **{name: getattr(self, name) for name in fields}})


class Claim(_OfYaml):
    """A headline of a document and what decides it; docs/findings.yaml says what each field is."""

    id: str
    claim: str
    source: str
    metric: str
    contrast: str | None = None
    least: bool = False
    terms: list[Term] = pydantic.Field(min_length=1)
    above: float | None = None
    below: float | None = None
    within: float | None = None
    direction: Literal["above", "below"] | None = None
    margin: float | None = pydantic.Field(None, gt=0)
    size: float | None = pydantic.Field(None, gt=0)
    why: str
    seeds: list[int] = [0, 1, 2]
    per: str | None = None
    diverged: float | None = None
    needs: str | None = None
    same: str | None = None
    other: str | None = None
    command: str | None = None

    @pydantic.model_validator(mode="after")
    def _is_whole(self) -> Self:
        asked = (self.above, self.below, self.within, self.direction)
        if sum(limit is not None for limit in asked) != 1:
            raise ValueError(f"{self.id}: give one of above, below, within and direction")
        if self.direction is None and (self.margin is not None or self.size is not None):
            raise ValueError(f"{self.id}: margin and size are of a direction alone")
        if self.size is not None and self.margin is None:
            raise ValueError(f"{self.id}: a size needs the margin from which a difference counts")
        if self.same is not None and self.other is not None:
            raise ValueError(f"{self.id}: give same or other, not both")
        if self.protocol == "paper" and any(term.preset != "paper" for term in self.terms):
            raise ValueError(f"{self.id}: is not at preset paper, so that same or other must say why")
        is_plain = not self.least and [term.weight for term in self.terms] in ([1], [1, -1])
        if self.contrast is None and not is_plain:
            raise ValueError(f"{self.id}: is no simple difference, so that contrast must say what it is")
        return self

    @property
    def protocol(self) -> Literal["paper", "same", "other"]:
        """The document's own, a smaller one that answers the same question, or one that does not."""
        return "same" if self.same is not None else "paper" if self.other is None else "other"

    @property
    def expected(self) -> str:
        """Where the contrast should lie, in words."""
        if self.within is not None:
            return f"within ±{self.within:g}"
        if self.direction is None:
            return f"above {self.above:g}" if self.above is not None else f"below {self.below:g}"
        sign = "" if self.direction == "above" else "-"
        counts = "" if self.margin is None else f", by more than {self.margin:g}"
        return f"{self.direction} 0{counts}" + ("" if self.size is None else f", printed {sign}{self.size:g}")

    @property
    def limits(self) -> tuple[float, float]:
        """Between which the contrast should lie, whatever its size."""
        if self.within is not None:
            return -self.within, self.within
        if self.direction is not None:
            return (0.0, np.inf) if self.direction == "above" else (-np.inf, 0.0)
        low = -np.inf if self.above is None else self.above
        return low, np.inf if self.below is None else self.below

    def judge(self, interval: Interval) -> Word:
        """Whether an interval lies wholly between the limits, wholly beyond one of them, or neither.

        A difference that is surely smaller than its margin, and may be none, is contradicted too.
        """
        if np.isnan(interval.low):
            return "no verdict"
        low, high = self.limits
        if low < interval.low and interval.high < high:
            return "reproduced" if self.direction is None or self._has_size(interval) else "direction only"
        if interval.high < low or interval.low > high:
            return "contradicted"
        smaller = self.margin is not None and max(self._towards(interval)) < self.margin
        return "contradicted" if smaller else "undecided"

    def _towards(self, interval: Interval) -> tuple[float, float]:
        """The ends of an interval in the claimed direction, the lower first."""
        up = self.direction == "above"
        return (interval.low, interval.high) if up else (-interval.high, -interval.low)

    def _has_size(self, interval: Interval) -> bool:
        """Whether a difference of the claimed sign is beyond the margin, and of the printed size."""
        low, high = self._towards(interval)
        if self.margin is None or low <= self.margin:
            return False
        return self.size is None or (low <= FACTOR * self.size and high >= self.size / FACTOR)

    def needed(self, values: Sequence[float]) -> int | None:
        """The fewest values at which an interval of this mean and spread would decide; None above MOST."""
        mean, sd = float(np.mean(values)), float(np.std(values, ddof=1))
        distance = min(abs(mean - limit) for limit in self.limits)
        if self.margin is not None:
            distance = max(distance, self.margin - (mean if self.direction == "above" else -mean))
        for size in range(FEWEST, MOST + 1):
            if special.stdtrit(size - 1, 0.975) * sd / size**0.5 < distance:
                return size
        return None


@dataclass(frozen=True)
class Finding:
    """A claim and what the records say of it.

    Attributes:
        claim: The claim.
        values: The contrast for every key that all terms share: seeds, unless the claim says what else.
        missing: Why some values are not there, such as a run that diverged; empty if nothing of that kind.
        test_to_train: Of splits that share rows, the test rows over the training rows of one; else 0.
    """

    claim: Claim
    values: Mapping[Any, float]
    missing: str = ""
    test_to_train: float = 0.0

    @property
    def is_exact(self) -> bool:
        """Whether the contrast is of studies in closed form, which have no seeds."""
        return all(term.method == NONE for term in self.claim.terms)

    @cached_property
    def interval(self) -> Interval | None:
        """Interval of the contrast; of width 0 where it is exact, None where there is no value."""
        values = list(self.values.values())
        if self.is_exact and values:
            return Interval(values[0], values[0], values[0], "exact")
        unit = self.claim.per or "seed"
        number = f"{len(values)} {unit}{'' if len(values) == 1 else 's'}"
        return student(values, number, self.test_to_train) if values else None

    @property
    def verdict(self) -> Word:
        """The word; none where a value is missing that should be there."""
        return "no verdict" if self.missing or self.interval is None else self.claim.judge(self.interval)

    @property
    def needed(self) -> int | None:
        """How many values would decide an undecided claim; None above MOST or of given splits."""
        return None if self.claim.per == SPLIT else self.claim.needed(list(self.values.values()))

    def commands(self) -> list[str]:
        """What makes the runs of the first seed, a line for each cell."""
        if self.claim.command is not None:
            return [self.claim.command]
        return list(dict.fromkeys(term.plan(self.claim.seeds[0]).command() for term in self.claim.terms))


def read(path: Path) -> list[Claim]:
    """The claims of a file.

    Raises:
        UsageError: If it is no such file, or two claims have one id; one line.
    """
    try:
        claims = pydantic.TypeAdapter(list[Claim]).validate_python(read_yaml(path, "claims"))
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    ids = [claim.id for claim in claims]
    if again := sorted({name for name in ids if ids.count(name) > 1}):
        raise UsageError(f"{path}: two claims are called {again[0]}")
    return claims


def find(claim: Claim, roots: Sequence[Path] = ROOTS) -> Finding:
    """What the records below some folders say of a claim; of equal runs those of the last folder count.

    Raises:
        UsageError: If a term is no run that there can be, or its metric is none of the run's.
    """
    found: list[dict[Any, float | None]] = []
    unmet: set[Any] = set()
    ratio = 0.0
    for term in claim.terms:
        metric, values = term.metric or claim.metric, dict[Any, float | None]()
        for path, record in _runs(claim, term, roots):
            if claim.per == SPLIT:
                ratio = task_of(record).spec.split_ratio or 0.0
            of_run = _values(claim, metric, path, record)
            values |= of_run
            if claim.needs is not None and record.metrics.get(claim.needs) != 1:
                unmet |= of_run.keys()
        found.append(values)
    keys = sorted(set.intersection(*map(set, found)))
    absent = [key for key in keys if any(values[key] is None for values in found)]
    combine = min if claim.least else sum
    contrast = {
        key: float(
            combine(
                term.weight * (values[key] or 0.0) for term, values in zip(claim.terms, found, strict=True)
            )
        )
        for key in keys
        if key not in absent
    }
    unit = claim.per or "seed"
    if absent:
        return Finding(claim, contrast, f"{unit} {absent[0]}: diverged or undefined")
    if unmet := unmet & contrast.keys():
        return Finding(claim, contrast, f"{claim.needs} is not 1 in {len(unmet)} of {len(contrast)} {unit}s")
    return Finding(claim, _over_seeds(contrast) if claim.per == SPLIT else contrast, test_to_train=ratio)


def _over_seeds(contrast: Mapping[tuple[int, int], float]) -> dict[int, float]:
    """Split -> mean over the seeds that all cells have: seeds of one split are no further splits."""
    splits = sorted({split for _, split in contrast})
    return {
        split: float(np.mean([value for key, value in contrast.items() if key[1] == split]))
        for split in splits
    }


def _runs(claim: Claim, term: Term, roots: Sequence[Path]) -> Iterator[tuple[Path, Record]]:
    """The committed runs of a cell; where another setting of the task is paired, at all its values.

    There the settings that the term names are the run's, and it may have others beside them.
    """
    if claim.per in (None, REPETITION, SPLIT):
        choice = resolve(term.plan())
        pattern = f"{choice.task_identity}/{choice.method_identity}/seed*"
    else:
        pattern = f"{term.task}*/{term.method}*/seed*"
    found = {path.parts[-3:]: path for root in roots for path in root.glob(pattern)}
    for _, path in sorted(found.items()):
        record = _record(path)
        is_cell = (record.task.name, record.method.name) == (term.task, term.method)
        named = term.task_settings.items() <= record.task.settings.items()
        if is_cell and named and term.method_settings.items() <= record.method.settings.items():
            yield path, record


@cache
def _record(path: Path) -> Record:
    """A record, read once: many claims are about one cell."""
    return read_record(path)


def _values(claim: Claim, metric: str, path: Path, record: Record) -> dict[Any, float | None]:
    """What a run says of a metric, by what is paired; None where it diverged or the metric is undefined."""
    if claim.per == REPETITION:
        points = [row for row in read_curves(path, needed(path, CURVES)) if row.curve == metric]
        return {(record.seed, row.x): row.value for row in points if np.isfinite(row.value)}
    if claim.per == SPLIT:
        if record.status != "completed":
            task: Any = task_of(record)
            return {(record.seed, split): claim.diverged for split in range(1, task.num_splits + 1)}
        points = [row for row in read_curves(path, needed(path, CURVES)) if row.curve == metric]
        if not points:
            raise UsageError(f"{claim.id}: {path} has no {metric} of single splits")
        return {(record.seed, int(row.x)): row.value for row in points if row.series == "test"}
    key = record.seed if claim.per is None else record.task.settings[claim.per]
    if record.status != "completed":
        return {key: claim.diverged}
    last = record.fits[-1].diagnostics if record.fits else {}
    spent = {SECONDS: sum(fit.seconds for fit in record.fits)}
    for table in (record.metrics, record.validation, last, spent):
        if metric in table:
            return {key: table[metric]}
    raise UsageError(f"{claim.id}: {path} has no {metric}")
