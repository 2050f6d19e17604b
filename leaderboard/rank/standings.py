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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bench.errors import BenchError
from bench.intervals import student
from bench.leaderboard.check.screens import Gallery
from bench.leaderboard.evidence.submission import OURS
from bench.leaderboard.rank import pairing
from bench.leaderboard.rank.cells import Candidate, Cell, Scored, load, read, scored
from bench.leaderboard.rank.ranking import Entry, Place, Replicate, Standing, order, rank
from bench.leaderboard.rank.rows import LONGEST_REASON, Table, cleaned, row
from bench.spec import Spec
from bench.text import one_line

if TYPE_CHECKING:
    from bench.contract import Task
    from bench.leaderboard.check.truth import Truth

NOT_HERE = "could not be computed again: its arrays are not here"
ALONE = "the arrays of the project's entries, which it would stand beside, are not here"
HELD = "held for a maintainer's word"
UNSEEN = "nobody here can tell whether its test targets are the task's own"


class Computed(NamedTuple):
    """A task's table, what its compare pages show, its figures as SVG; its standing, and classes `[N]`."""

    table: Table
    pairs: list[pairing.Pair]
    figures: dict[str, str]
    standing: Standing | None = None
    labels: np.ndarray | None = None


def compute(identity: str, cells: Sequence[Cell], figures: bool = True) -> Computed:
    """The table of a task.

    Args:
        identity: Of the task: the name of its folder.
        cells: Entries with their runs.
        figures: Whether the task's figures are drawn.
    """
    from bench.leaderboard.check.truth import Truth  # here and below, since what is kept needs no torch
    from bench.runs.registry import misleads

    candidates = [Candidate(cell, tuple(map(read, cell.runs))) for cell in cells]
    try:
        task, make = _task(candidates)
        spec = task.spec
    except BenchError as error:
        return Computed(cleaned(_unknown(identity, candidates, one_line(error, LONGEST_REASON))), [], {})
    known = Truth(task, identity)
    candidates = [_scored(c, make, known) for c in candidates]
    protocol = (spec.version, known.data) if known.data else _protocol(candidates, spec)
    some = any(run.is_recomputed for c in candidates for run in c.runs)
    if _ours_are_absent(candidates):
        candidates, some = [_by_claims(c) for c in candidates], False
    candidates = [replace(c, why=_reasons(c, protocol, spec, some)) for c in candidates]
    if not known.is_known:
        candidates = _without_unseen(candidates)
    candidates = _screened(candidates)
    candidates, standing = _ranked(candidates, spec)
    by_name = {candidate.name: candidate for candidate in candidates}
    higher = spec.metrics[spec.main_metric].higher_is_better
    others = [Place(c.name, _mean(c), why=c.why) for c in candidates if c.why]
    below = [place for place in standing.places if not place.ranks] + others
    below.sort(key=lambda place: (*order(place.cell.centre if place.cell else None, higher), place.name))
    places = [place for place in standing.places if place.ranks] + below
    table = _described(identity, spec, misleads(type(task))) | Table(
        data_digest=protocol[1],
        basis=_basis(standing, spec, some),
        without_arrays=sum(c.runs_without_arrays > 0 for c in candidates),
        entries=[row(by_name[place.name], place, spec, known.is_known) for place in places],
    )
    table |= pairing.counted(standing)
    labels = _labels(by_name, standing)
    anchors = [name for name in (table["reference"],) if name]
    pairs = pairing.pairs(standing, anchors, higher, labels)
    drawn: dict[str, str] = {}
    if figures:
        from bench.leaderboard.rank import drawing

        shown = [by_name[place.name] for place in standing.places if place.ranks]
        runs = [(run.record, run.files.arrays) for c in shown[: drawing.MOST] for run in c.runs]
        drawn, said = drawing.figures([(r, a) for r, a in runs if r is not None and a is not None])
        table["notes"] = said
    return Computed(cleaned(table), cleaned(pairs), drawn, standing, labels)


def recorded(identity: str, cells: Sequence[Cell]) -> Computed:
    """The table of runs that the project keeps as evidence, as their records say; by name, since unranked."""
    from bench.runs.registry import misleads

    candidates = [Candidate(cell, tuple(map(read, cell.runs))) for cell in cells]
    try:
        task, _ = _task(candidates)
        spec = task.spec
    except BenchError as error:
        return Computed(cleaned(_unknown(identity, candidates, one_line(error, LONGEST_REASON))), [], {})
    candidates.sort(key=lambda c: c.name)
    rows = [row(c, Place(c.name, student(c.values) if c.values else None), spec) for c in candidates]
    table = _described(identity, spec, misleads(type(task))) | Table(
        data_digest=_protocol(candidates, spec)[1], entries=rows
    )
    return Computed(cleaned(table), [], {})


def _scored(candidate: Candidate, make: Callable[[Scored], Task], known: Truth) -> Candidate:
    """An entry with its runs scored; a stranger's runs are examined too."""
    examined = candidate.cell.slug != OURS
    return replace(candidate, runs=tuple(scored(run, make(run), known, examined) for run in candidate.runs))


def _reasons(entry: Candidate, protocol: tuple[int, str], spec: Spec, some_recomputed: bool) -> str:
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
    if spec.split_ratio and not some_recomputed and entry.is_recomputed:
        return ALONE  # a split's value is the mean of its losses
    return ""


def _ours_are_absent(candidates: Iterable[Candidate]) -> bool:
    """Whether an entry of ours cannot be computed again, for want of its arrays."""
    return any(c.cell.slug == OURS and c.values and c.runs_without_arrays for c in candidates)


def _by_claims(candidate: Candidate) -> Candidate:
    """An entry as its records claim it: beside ones without arrays, losses of its own would rank it alone."""
    return replace(candidate, runs=tuple(replace(run, losses=None) for run in candidate.runs))


def _without_unseen(candidates: list[Candidate]) -> list[Candidate]:
    """Of a task whose targets nobody here can know: beside entries of ours no stranger's is ranked."""
    if all(c.cell.slug != OURS or c.why for c in candidates):
        return candidates
    return [replace(c, why=c.why or (UNSEEN if c.cell.slug != OURS else "")) for c in candidates]


def _screened(candidates: list[Candidate]) -> list[Candidate]:
    """Holds strangers' entries back that the screens flag and no maintainer cleared.

    An entry is compared with those that were on the board before it, so that a copy that is handed in later
    holds nobody back; where neither is known to be the first, each is compared with the other.
    """
    if all(c.cell.slug == OURS for c in candidates):
        return candidates
    gallery = Gallery({c.name: [run.seen for run in c.runs if run.seen is not None] for c in candidates})

    def screened(one: Candidate) -> Candidate:
        own = one.cell
        if one.why or own.slug == OURS or own.was_repeated:  # no copy gives its numbers when it is run again
            return one
        before = [c.name for c in candidates if c.cell.slug != own.slug and c.cell.adopted <= own.adopted]
        one = replace(one, flags=tuple(gallery.flags(one.name, before)))
        held = "; ".join(f"{flag.screen}: {flag.reason}" for flag in one.held)
        return replace(one, why=f"{HELD}: {held}") if held else one

    return [screened(one) for one in candidates]


def _entry(candidate: Candidate, spec: Spec) -> Entry:
    """What is ranked: runs are seeds, or splits where these overlap."""
    runs = candidate.runs
    if spec.split_ratio is None:
        found = [Replicate(run.value, run.losses, run.files.digest) for run in runs]
        return Entry(candidate.name, found, candidate.seed_matters)
    losses = [run.losses for run in runs if run.losses is not None]
    splits = [Replicate(float(value)) for value in np.mean(losses, axis=0)] if losses else []
    missing = [Replicate(None) for run in runs if run.value is None]
    return Entry(candidate.name, [*splits, *missing], candidate.seed_matters)


def _task(candidates: Iterable[Candidate]) -> tuple[Task, Any]:
    """The task, and what gives that of a run: with the settings that its record has."""
    from bench.runs.runner import task_of

    known: dict[str, Task] = {}

    def make(run: Scored) -> Task:
        assert run.record is not None
        key = run.record.task.name + json.dumps(run.record.task.settings, sort_keys=True)
        if key not in known:
            known[key] = task_of(run.record)
        return known[key]

    runs = [run for c in candidates for run in c.runs if run.record is not None]
    if not runs:
        raise BenchError("no record of this task can be read")
    preferred = sorted(runs, key=lambda run: run.files.record.split("/")[-5] != OURS)
    first = make(preferred[0])

    def safe(run: Scored) -> Task:
        try:
            return make(run) if run.record is not None else first
        except BenchError:  # settings that the task does not take: its score will tell
            return first

    return first, safe


def _protocol(candidates: Iterable[Candidate], spec: Spec) -> tuple[int, str]:
    """Version of the task, and digest of the data that most runs have, ours before others."""
    digests = Counter(
        (c.cell.slug == OURS, run.record.task.data_digest)
        for c in candidates
        for run in c.runs
        if run.record is not None and run.record.task.version == spec.version
    )
    best = max(digests, key=lambda key: (key[0], digests[key], key[1]), default=(False, ""))
    return spec.version, best[1]


def _ranked(candidates: list[Candidate], spec: Spec) -> tuple[list[Candidate], Standing]:
    """Ranks those that nothing speaks against; one that does not fit the others is taken out."""
    higher = spec.metrics[spec.main_metric].higher_is_better
    sizes = Counter(
        (c.cell.slug == OURS, run.losses.shape)
        for c in candidates
        if not c.why
        for run in c.runs
        if run.losses is not None
    )
    _, usual = max(sizes, key=lambda size: (size[0], sizes[size], size), default=(False, None))

    def misfit(candidate: Candidate) -> str:
        if candidate.why:
            return candidate.why
        odd = [run for run in candidate.runs if run.losses is not None and run.losses.shape != usual]
        if odd and usual and (losses := odd[0].losses) is not None:
            return f"seed {odd[0].files.seed} has {len(losses)} test examples, others {usual[0]}"
        return ""

    def contradiction(candidate: Candidate) -> str:
        try:
            rank([_entry(candidate, spec)], higher, spec.split_ratio)
        except BenchError as error:
            return candidate.why or one_line(error, LONGEST_REASON)
        return candidate.why

    candidates = [replace(c, why=misfit(c)) for c in candidates]

    def of_all() -> Standing:
        return rank([_entry(c, spec) for c in candidates if not c.why], higher, spec.split_ratio)

    try:
        return candidates, of_all()
    except BenchError:
        candidates = [replace(c, why=contradiction(c)) for c in candidates]
        return candidates, of_all()


def _mean(candidate: Candidate) -> Any:
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


def _labels(by_name: Mapping[str, Candidate], standing: Standing) -> np.ndarray | None:
    """Classes of the test examples `[N]`, where the arrays call them labels; None elsewhere."""
    evidence = standing.evidence
    if evidence is None or not evidence.names or not evidence.share:
        return None
    path = by_name[evidence.names[0]].runs[0].files.arrays
    labels = load(path).get("labels") if path else None
    if labels is None or labels.shape != evidence.paired.shape[1:] or labels.dtype.kind not in "iu":
        return None
    return labels


def _described(identity: str, spec: Spec, misleads: str = "", problem: str = "") -> Table:
    """What the task says of itself, and a table without entries."""
    main = spec.metrics.get(spec.main_metric)
    return Table(
        task=identity,
        task_name=identity.partition("+")[0],
        task_version=spec.version,
        data_digest="",
        problem=problem,
        question=spec.question,
        source=spec.source,
        misleads=misleads,
        metric=spec.main_metric,
        unit=main.unit if main else "",
        description=main.description if main else "",
        higher_is_better=main is None or main.higher_is_better,
        min_seeds=spec.min_seeds,
        is_ranked=spec.ranked,
        baseline=spec.baseline,
        reference=spec.reference,
        metrics={
            name: {"unit": m.unit, "description": m.description, "higher_is_better": m.higher_is_better}
            for name, m in spec.metrics.items()
        },
        basis="",
        without_arrays=0,
        separated=0,
        compared_pairs=0,
        widest=None,
        entries=[],
        notes=[],
    )


_NOTHING = Spec(question="", source="", version=0, metrics={}, main_metric="", ranked=False)
"""Of a task that is not known here."""


def _unknown(identity: str, candidates: Sequence[Candidate], problem: str) -> Table:
    """The table of a task that is not known here: nothing of it can be ranked."""
    why = "its task is not known here"
    rows = [row(c, Place(c.name, None, why=c.cell.struck or why), _NOTHING) for c in candidates]
    return _described(identity, _NOTHING, problem=problem) | Table(entries=rows)
