"""One task of the board: from the runs of its entries to a table, computed once and only shown afterwards.

A run is scored once, from its arrays, by the task's own `score`; `losses` gives what entries are paired on.
An entry with a file that is damaged, that is not the one its submission names, or whose arrays do not give
what its records claim, stays in the table with the reason and is not ranked. Where no entry of a task has
arrays, the metrics that records claim are ranked, on seeds alone. All that is returned is plain data.

Shapes: S seeds, N test examples, K splits.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict
from unicodedata import normalize

import numpy as np
import pydantic

from bench.errors import BenchError
from bench.intervals import FEWEST, student
from bench.leaderboard import pairing
from bench.leaderboard.ranking import Entry, Place, Run, Standing, order, rank
from bench.leaderboard.submission import OURS
from bench.records import Record
from bench.spec import Arrays, Spec
from bench.text import escaped, one_line

if TYPE_CHECKING:
    from bench.contract import Task

NOT_HERE = "could not be computed again: its arrays are not here"
_REASON = 300
"""Longest reason that is shown."""


# --------------------------------------------------------------------------------------------- what goes in


@dataclass(frozen=True)
class RunFiles:
    """Where a run lies.

    Attributes:
        seed: As its directory names it.
        record: Path of its record.
        arrays: Path of its arrays; None if they are nowhere here.
        digest: SHA-256 of the arrays' file; None without one.
        altered: Which of the files is not the one that the submission names; else empty.
    """

    seed: int
    record: Path
    arrays: Path | None
    digest: str | None
    altered: str = ""


@dataclass(frozen=True)
class Cell:
    """The runs of an entry on a task.

    Attributes:
        slug: Of the submission.
        method: Name of the directory, which is the method's identity where it has no `~`.
        runs: In order of the seeds.
        struck: Why it is out of the ranking, in the maintainers' words, such as "withdrawn: ..."; else empty.
        was_repeated: Whether maintainers ran it again.
    """

    slug: str
    method: str
    runs: tuple[RunFiles, ...]
    struck: str = ""
    was_repeated: bool = False

    @property
    def name(self) -> str:
        """As the board shows it."""
        return entry_name(self.method, self.slug)


def entry_name(method: str, slug: str) -> str:
    """How the board calls a method of a submission; ours go without the slug."""
    return method if slug == OURS else f"{method} ({slug})"


# -------------------------------------------------------------------------------------------- what comes out


class RunRow(TypedDict, total=False):
    """A seed. `splits` are the values by split, of tasks with overlapping splits."""

    seed: int
    status: str
    reason: str
    value: float | None
    seconds: float
    splits: list[float]


class EntryRow(TypedDict, total=False):
    """An entry of a task.

    `status` is ranked, not ranked, withdrawn or superseded; `why` says why it is not ranked. `ranks` are the
    first and the last that the data admit. `low` and `high` are None where there is no interval. `metrics`
    has mean and limits of every metric, `basis` what the interval is of.
    """

    name: str
    slug: str
    method: str
    folder: str
    status: str
    why: str
    tier: str
    ranks: list[int] | None
    group: int | None
    mean: float | None
    low: float | None
    high: float | None
    basis: str
    seeds: int
    seconds: float | None
    tuning: str
    created: str
    seed_matters: bool
    settings: dict[str, Any]
    command: str
    metrics: dict[str, list[float | None]]
    runs: list[RunRow]


class Table(TypedDict, total=False):
    """A task of the board, ranked rows first.

    `problem` says why nothing could be computed. `basis` says on what differences rest. `separated` and
    `compared_pairs` count pairs of ranked entries.
    """

    task: str
    task_name: str
    task_version: int
    data_digest: str
    problem: str
    question: str
    source: str
    misleads: str
    metric: str
    unit: str
    description: str
    higher_is_better: bool
    min_seeds: int
    is_ranked: bool
    baseline: str | None
    reference: str | None
    metrics: dict[str, dict[str, Any]]
    basis: str
    separated: int
    compared_pairs: int
    widest: dict[str, Any] | None
    entries: list[EntryRow]
    notes: list[str]


class Computed(NamedTuple):
    """A task's table, what its compare pages show, its figures as SVG; its standing, and classes `[N]`."""

    table: Table
    pairs: list[pairing.Pair]
    figures: dict[str, str]
    standing: Standing | None = None
    labels: np.ndarray | None = None


# ----------------------------------------------------------------------------------------------- of one run


@dataclass(frozen=True, eq=False)
class _Scored:
    """A run as far as it can be read; `problem` says what cannot, `is_recomputed` whether it was scored."""

    files: RunFiles
    record: Record | None = None
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    losses: np.ndarray | None = None
    is_recomputed: bool = False
    problem: str = ""

    @property
    def value(self) -> float | None:
        """Of the main metric."""
        if self.record is None or self.record.status != "completed":
            return None
        return self.metrics.get(self.record.task.main_metric)


def _read(files: RunFiles) -> _Scored:
    """The run with what its record claims."""
    if files.altered:
        return _Scored(files, problem=f"{files.altered} of seed {files.seed} is not the submitted file")
    try:
        record = Record.model_validate_json(files.record.read_bytes())
    except (OSError, pydantic.ValidationError):
        return _Scored(files, problem=f"the record of seed {files.seed} cannot be read")
    if record.seed != files.seed:
        return _Scored(files, problem=f"the record in seed{files.seed} is of seed {record.seed}")
    return _Scored(files, record, record.metrics)


def _scored(run: _Scored, task: Task) -> _Scored:
    """The run with its metrics computed again, and its losses, where its arrays are here."""
    files, record = run.files, run.record
    if record is None or record.status != "completed" or files.arrays is None:
        return run
    try:
        arrays = _load(files.arrays)
        found = task.score(arrays)
        losses = task.losses(arrays)
    except (Exception, SystemExit) as error:  # whatever arrays can lead a score to
        what = (
            f"could not be computed again: seed {files.seed}: {type(error).__name__}: {one_line(error, 120)}"
        )
        return replace(run, problem=what)
    metrics = {
        name: float(value) if isinstance(value, float | int) and math.isfinite(value) else None
        for name, value in found.items()
    }
    wrong = [name for name, value in metrics.items() if not _agree(value, record.metrics.get(name))]
    if wrong:
        is_, was = metrics[wrong[0]], record.metrics.get(wrong[0])
        problem = f"its arrays give {wrong[0]} {_short(is_)}, its record of seed {files.seed} {_short(was)}"
        return replace(run, metrics=metrics, losses=losses, problem=problem)
    if losses is not None:
        losses = np.asarray(losses, float)
    return replace(run, metrics=metrics, losses=losses, is_recomputed=True)


def _load(path: Path) -> Arrays:
    import safetensors.numpy

    return safetensors.numpy.load(path.read_bytes())


def _agree(first: float | None, second: float | None) -> bool:
    """Whether two numbers are the same but for what processors differ by."""
    if first is None or second is None:
        return first is second
    return math.isclose(first, second, rel_tol=1e-6, abs_tol=1e-9)


def _short(value: float | None) -> str:
    return "none" if value is None else f"{value:.6g}"


# -------------------------------------------------------------------------------------------- of an entry


@dataclass(frozen=True, eq=False)
class _Candidate:
    """An entry with its runs, and why it is not compared; `why` is empty if nothing speaks against it."""

    cell: Cell
    runs: tuple[_Scored, ...]
    why: str = ""

    @property
    def name(self) -> str:
        return self.cell.name

    @property
    def record(self) -> Record | None:
        """The first that can be read."""
        return next((run.record for run in self.runs if run.record is not None), None)

    @property
    def values(self) -> list[float]:
        return [run.value for run in self.runs if run.value is not None]

    @property
    def is_recomputed(self) -> bool:
        """Whether every number was computed again; a run that diverged has none."""
        ran = [run for run in self.runs if run.record is None or run.record.status == "completed"]
        return all(run.is_recomputed for run in ran) and bool(ran)

    @property
    def seed_matters(self) -> bool:
        """Whether another seed can give another answer."""
        return self.record is None or seed_matters(self.record)


def seed_matters(record: Record) -> bool:
    """As the record says; of old records as the suite's method of that name says."""
    if record.method.seed_matters is not None:
        return record.method.seed_matters
    from bench import registry

    try:
        return bool(registry.method(record.method.name).cls.seed_matters)
    except BenchError:
        return True


def _reasons(entry: _Candidate, protocol: tuple[int, str], spec: Spec, some_recomputed: bool) -> str:
    """Why an entry cannot stand in the ranking; empty if it can."""
    if entry.cell.struck:
        return entry.cell.struck
    for run in entry.runs:
        if run.problem:
            return run.problem
    records = [run.record for run in entry.runs if run.record is not None]
    version, digest = protocol
    for record in records:
        if record.task.version != version:
            return f"of version {record.task.version} of the task, which is now {version}"
        if record.task.data_digest != digest:
            return "its data are others than those of the table"
    if [run.files.seed for run in entry.runs] != list(range(len(entry.runs))):
        return "its seeds are not 0, 1, 2, ..."
    if len(entry.runs) < spec.min_seeds and entry.seed_matters:
        return f"seeds: {len(entry.runs)}; the task asks for {spec.min_seeds}"
    if (some_recomputed or spec.split_ratio) and not entry.is_recomputed and entry.values:
        return NOT_HERE
    return ""


def _entry(candidate: _Candidate, spec: Spec) -> Entry:
    """What is ranked: runs are seeds, or splits where these overlap."""
    runs = candidate.runs
    if spec.split_ratio is None:
        found = [Run(run.value, run.losses, run.files.digest) for run in runs]
        return Entry(candidate.name, found, candidate.seed_matters)
    losses = [run.losses for run in runs if run.losses is not None]
    splits = [Run(float(value)) for value in np.mean(losses, axis=0)] if losses else []
    missing = [Run(None) for run in runs if run.value is None]
    return Entry(candidate.name, [*splits, *missing], candidate.seed_matters)


def _row(candidate: _Candidate, place: Place, spec: Spec) -> EntryRow:
    """The row of an entry."""
    record, cell, interval = candidate.record, candidate.cell, place.cell
    struck = cell.struck.partition(":")[0]
    metrics = {}
    for name in spec.metrics:
        values = [v for run in candidate.runs if (v := run.metrics.get(name)) is not None]
        metrics[name] = [_finite(x) for x in student(values)[:3]] if values else [None, None, None]
    seconds = [run.record.seconds for run in candidate.runs if run.record is not None]
    return EntryRow(
        name=place.name,
        slug=cell.slug,
        method=record.method.identity if record else cell.method,
        folder=cell.method,
        status="ranked" if place.ranks else struck or "not ranked",
        why=escaped(place.why or candidate.why)[:_REASON],
        tier=_tier(candidate, spec),
        ranks=list(place.ranks) if place.ranks else None,
        group=place.group,
        mean=_finite(interval.centre) if interval else None,
        low=_finite(interval.low) if interval else None,
        high=_finite(interval.high) if interval else None,
        basis=interval.basis if interval else "",
        seeds=len(candidate.runs),
        seconds=float(np.mean(seconds)) if seconds else None,
        tuning=record.method.tuning if record else "",
        created=max((run.record.created for run in candidate.runs if run.record), default=""),
        seed_matters=candidate.seed_matters,
        settings=record.method.settings if record else {},
        command=record.command if record else "",
        metrics=metrics,
        runs=[_run_row(run, spec) for run in candidate.runs],
    )


def _tier(candidate: _Candidate, spec: Spec) -> str:
    if candidate.cell.was_repeated:
        return "re-run"
    own_word = spec.main_metric in spec.self_reported
    return "recomputed" if candidate.is_recomputed and not own_word else "self-reported"


def _run_row(run: _Scored, spec: Spec) -> RunRow:
    record = run.record
    row = RunRow(
        seed=run.files.seed,
        status=record.status if record else "unreadable",
        reason=escaped(run.problem or (record.reason or "" if record else ""))[:_REASON],
        value=_finite(run.value),
        seconds=record.seconds if record else math.nan,
    )
    if record is None:
        del row["seconds"]
    if spec.split_ratio is not None and run.losses is not None:
        row["splits"] = [float(value) for value in run.losses]
    return row


def cleaned(value: Any) -> Any:
    """Plain data with every string composed (NFC) and without hidden characters, fit to be shown."""
    match value:
        case str():
            return value if value.isascii() and value.isprintable() else escaped(normalize("NFC", value))
        case dict():
            return {cleaned(key): cleaned(inner) for key, inner in value.items()}
        case list() | tuple():
            return [cleaned(inner) for inner in value]
    return value


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


# ----------------------------------------------------------------------------------------------- of the task


def compute(identity: str, cells: Sequence[Cell], figures: bool = True) -> Computed:
    """The table of a task.

    Args:
        identity: Of the task: the name of its folder.
        cells: Entries with their runs.
        figures: Whether the task's figures are drawn.
    """
    candidates = [_Candidate(cell, tuple(map(_read, cell.runs))) for cell in cells]
    try:
        task, make = _task(candidates)
        spec = task.spec
    except BenchError as error:
        return Computed(cleaned(_unknown(identity, candidates, one_line(error, _REASON))), [], {})
    candidates = [replace(c, runs=tuple(_scored(run, make(run)) for run in c.runs)) for c in candidates]
    protocol = _protocol(candidates, spec)
    some = any(run.is_recomputed for c in candidates for run in c.runs)
    candidates = [replace(c, why=_reasons(c, protocol, spec, some)) for c in candidates]
    candidates, standing = _ranked(candidates, spec)
    by_name = {candidate.name: candidate for candidate in candidates}
    higher = spec.metrics[spec.main_metric].higher_is_better
    others = [Place(c.name, _mean(c), why=c.why) for c in candidates if c.why]
    below = [place for place in standing.places if not place.ranks] + others
    below.sort(key=lambda place: (*order(place.cell.centre if place.cell else None, higher), place.name))
    places = [place for place in standing.places if place.ranks] + below
    table = _described(identity, task, spec) | Table(
        data_digest=protocol[1],
        basis=_basis(standing, spec, some),
        entries=[_row(by_name[place.name], place, spec) for place in places],
        notes=[],
        **pairing.counted(standing),
    )
    labels = _labels(by_name, standing)
    anchors = [name for name in (table["reference"],) if name]
    pairs = pairing.pairs(standing, anchors, higher, labels)
    drawn: dict[str, str] = {}
    if figures:
        from bench.leaderboard import drawing

        shown = [by_name[place.name] for place in standing.places if place.ranks]
        runs = [(run.record, run.files.arrays) for c in shown[: drawing.MOST] for run in c.runs]
        drawn, said = drawing.figures([(r, a) for r, a in runs if r is not None and a is not None])
        table["notes"] = said
    return Computed(cleaned(table), cleaned(pairs), drawn, standing, labels)


def _task(candidates: Iterable[_Candidate]) -> tuple[Task, Any]:
    """The task, and what gives that of a run: with the settings that its record has."""
    from bench.runner import task_of

    known: dict[str, Task] = {}

    def make(run: _Scored) -> Task:
        assert run.record is not None
        key = run.record.task.name + json.dumps(run.record.task.settings, sort_keys=True)
        if key not in known:
            known[key] = task_of(run.record)
        return known[key]

    runs = [run for c in candidates for run in c.runs if run.record is not None]
    if not runs:
        raise BenchError("no record of this task can be read")
    preferred = sorted(runs, key=lambda run: run.files.record.parts[-5] != OURS)
    first = make(preferred[0])

    def safe(run: _Scored) -> Task:
        try:
            return make(run) if run.record is not None else first
        except BenchError:  # settings that the task does not take: its score will tell
            return first

    return first, safe


def _protocol(candidates: Iterable[_Candidate], spec: Spec) -> tuple[int, str]:
    """Version of the task, and digest of the data that most runs have, ours before others."""
    digests = Counter(
        (c.cell.slug == OURS, run.record.task.data_digest)
        for c in candidates
        for run in c.runs
        if run.record is not None and run.record.task.version == spec.version
    )
    best = max(digests, key=lambda key: (key[0], digests[key], key[1]), default=(False, ""))
    return spec.version, best[1]


def _ranked(candidates: list[_Candidate], spec: Spec) -> tuple[list[_Candidate], Standing]:
    """Ranks those that nothing speaks against; one that does not fit the others is taken out."""
    higher = spec.metrics[spec.main_metric].higher_is_better
    sizes = Counter(
        run.losses.shape for c in candidates if not c.why for run in c.runs if run.losses is not None
    )
    usual = max(sizes, key=lambda size: (sizes[size], size), default=None)

    def misfit(candidate: _Candidate) -> str:
        if candidate.why:
            return candidate.why
        odd = [run for run in candidate.runs if run.losses is not None and run.losses.shape != usual]
        if odd:
            return f"seed {odd[0].files.seed} has {len(odd[0].losses)} test examples, others {usual[0]}"
        return ""

    def contradiction(candidate: _Candidate) -> str:
        try:
            rank([_entry(candidate, spec)], higher, spec.split_ratio)
        except BenchError as error:
            return candidate.why or one_line(error, _REASON)
        return candidate.why

    candidates = [replace(c, why=misfit(c)) for c in candidates]

    def of_all() -> Standing:
        return rank([_entry(c, spec) for c in candidates if not c.why], higher, spec.split_ratio)

    try:
        return candidates, of_all()
    except BenchError:
        candidates = [replace(c, why=contradiction(c)) for c in candidates]
        return candidates, of_all()


def _mean(candidate: _Candidate) -> Any:
    """Of an entry that is not compared: a mean without an interval."""
    values = candidate.values
    return student(values)._replace(low=math.nan, high=math.nan) if values else None


def _basis(standing: Standing, spec: Spec, some: bool) -> str:
    """On what the differences of a table rest, in words."""
    if spec.split_ratio is not None:
        return "overlapping splits: the corrected resampled t of Nadeau and Bengio"
    evidence = standing.evidence
    if evidence is not None and evidence.share > 0:
        return f"seeds, and {evidence.paired.shape[1]} test examples on which entries are paired"
    return "seeds alone" if some else "seeds alone: the metrics that records claim, since no arrays are here"


def _labels(by_name: Mapping[str, _Candidate], standing: Standing) -> np.ndarray | None:
    """Classes of the test examples `[N]`, where the arrays call them labels; None elsewhere."""
    evidence = standing.evidence
    if evidence is None or not evidence.names or not evidence.share:
        return None
    path = by_name[evidence.names[0]].runs[0].files.arrays
    labels = _load(path).get("labels") if path else None
    if labels is None or labels.shape != evidence.paired.shape[1:] or labels.dtype.kind not in "iu":
        return None
    return labels


def _described(identity: str, task: Task, spec: Spec) -> Table:
    """What the task says of itself."""
    from bench.catalogue import misleads

    main = spec.metrics[spec.main_metric]
    return Table(
        task=identity,
        task_name=identity.partition("+")[0],
        task_version=spec.version,
        data_digest="",
        problem="",
        question=spec.question,
        source=spec.source,
        misleads=misleads(type(task)),
        metric=spec.main_metric,
        unit=main.unit,
        description=main.description,
        higher_is_better=main.higher_is_better,
        min_seeds=spec.min_seeds,
        is_ranked=spec.ranked,
        baseline=spec.baseline,
        reference=spec.reference,
        metrics={
            name: {"unit": m.unit, "description": m.description, "higher_is_better": m.higher_is_better}
            for name, m in spec.metrics.items()
        },
    )


def _unknown(identity: str, candidates: Sequence[_Candidate], problem: str) -> Table:
    """The table of a task that is not known here: nothing of it can be ranked."""
    metrics: dict[str, Any] = {}
    spec = partial(Spec, question="", source="", version=0, main_metric="", requires=frozenset())
    rows = [
        _row(c, Place(c.name, None, why=c.cell.struck or "its task is not known here"), spec(metrics=metrics))
        for c in candidates
    ]
    return Table(
        task=identity,
        task_name=identity.partition("+")[0],
        task_version=0,
        data_digest="",
        problem=problem,
        question="",
        source="",
        misleads="",
        metric="",
        unit="",
        description="",
        higher_is_better=True,
        min_seeds=FEWEST,
        is_ranked=False,
        baseline=None,
        reference=None,
        metrics={},
        basis="",
        separated=0,
        compared_pairs=0,
        widest=None,
        entries=rows,
        notes=[],
    )
