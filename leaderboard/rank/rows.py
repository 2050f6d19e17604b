"""Rows of the board's tables, as plain data: what pages show, and what stands in the JSON beside them."""

from __future__ import annotations

import math
from typing import Any, TypedDict
from unicodedata import normalize

import numpy as np

from bench.intervals import student
from bench.leaderboard.check.facts import command
from bench.leaderboard.evidence.submission import OURS
from bench.leaderboard.rank.cells import Candidate, Scored
from bench.leaderboard.rank.fronts import Cost
from bench.leaderboard.rank.ranking import Place
from bench.runs import registry
from bench.runs.marks import together
from bench.spec import Spec
from bench.text import escaped

LONGEST_REASON = 300


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

    `status` is ranked, not ranked, held, withdrawn or superseded; `why` says why it is not ranked. `flags`
    has of each screen that saw something its name, the reason, and why a maintainer cleared it. `marks` has
    name and reason of each mark (`bench.runs.marks`) that a run of the entry has. An entry of the first tie
    group is `provisional` until maintainers have made a run of it again. `ranks` are the first and the last
    that the data admit. `low` and `high` are None where there is no interval. `metrics` has mean and limits
    of every metric, `basis` what the interval is of. `tuning` says where the settings come from, and `tuned`
    whether that is a search with the budget of the task (`bench.runs.searches`), which the board adds. `cost`
    is what the runs took (`bench.leaderboard.rank.fronts.Cost`), None where no record says it.
    `declares` is what is said of the posterior in the method's file, empty if that is not here.
    """

    name: str
    slug: str
    method: str
    folder: str
    status: str
    why: str
    flags: list[list[str]]
    marks: list[list[str]]
    tier: str
    provisional: bool
    ranks: list[int] | None
    group: int | None
    mean: float | None
    low: float | None
    high: float | None
    basis: str
    seeds: int
    seconds: float | None
    cost: dict[str, Any] | None
    tuning: str
    tuned: bool
    declares: str
    created: str
    seed_matters: bool
    settings: dict[str, Any]
    command: str
    metrics: dict[str, list[float | None]]
    runs: list[RunRow]


class Table(TypedDict, total=False):
    """A task of the board, ranked rows first.

    `problem` says why nothing could be computed. `basis` says on what differences rest; `without_arrays` how
    many entries lack predictions here. `separated` and `compared_pairs` count pairs of ranked entries.
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
    without_arrays: int
    separated: int
    compared_pairs: int
    widest: dict[str, Any] | None
    entries: list[EntryRow]
    notes: list[str]


def row(candidate: Candidate, place: Place, spec: Spec, targets_known: bool = True) -> EntryRow:
    """The row of an entry; `targets_known` says whether its test targets could be compared."""
    record, cell, interval = candidate.record, candidate.cell, place.cell
    struck = cell.struck.partition(":")[0]
    metrics: dict[str, list[float | None]] = {}
    for name in spec.metrics:
        values = [v for run in candidate.runs if (v := run.metrics.get(name)) is not None]
        with np.errstate(over="ignore"):  # some metrics of some runs are as large as numbers get
            metrics[name] = [finite(x) for x in student(values)[:3]] if values else [None, None, None]
    records = [run.record for run in candidate.runs if run.record is not None]
    seconds = [of_run.seconds for of_run in records]
    cost = Cost.of(records)
    tier = _tier(candidate, spec, targets_known)
    return EntryRow(
        name=place.name,
        slug=cell.slug,
        method=record.method.identity if record else cell.method,
        folder=cell.method,
        status="ranked" if place.ranks else struck or ("held" if candidate.held else "not ranked"),
        why=escaped(place.why or candidate.why)[:LONGEST_REASON],
        flags=[[*flag, cell.cleared.get(flag.screen, "")] for flag in candidate.flags],
        marks=[list(mark) for mark in together([(run.files.seed, run.marks) for run in candidate.runs])],
        tier=tier,
        provisional=place.group == 1 and tier != "re-run",
        ranks=list(place.ranks) if place.ranks else None,
        group=place.group,
        mean=finite(interval.centre) if interval else None,
        low=finite(interval.low) if interval else None,
        high=finite(interval.high) if interval else None,
        basis=interval.basis if interval else "",
        seeds=len(candidate.runs),
        seconds=float(np.mean(seconds)) if seconds else None,
        cost=cost._asdict() if cost else None,
        tuning=record.method.tuning if record else "",
        declares=declared(record.method.name) if record else "",
        created=max((run.record.created for run in candidate.runs if run.record), default=""),
        seed_matters=candidate.seed_matters,
        settings=record.method.settings if record else {},
        command=command(record) if record else "",
        metrics=metrics,
        runs=[_run_row(run, spec) for run in candidate.runs],
    )


def declared(name: str) -> str:
    """What the method of this name declares of its posterior; empty if its file is not here."""
    known = registry.methods()
    entry = known[name] if name in known else known.of_pattern(name)
    return entry.declares if entry else ""


def _tier(candidate: Candidate, spec: Spec, targets_known: bool) -> str:
    if candidate.cell.was_repeated:
        return "re-run"
    if candidate.is_recomputed and not targets_known and candidate.cell.slug != OURS:
        return "targets unseen"
    own_word = spec.main_metric in spec.self_reported
    return "recomputed" if candidate.is_recomputed and not own_word else "self-reported"


def _run_row(run: Scored, spec: Spec) -> RunRow:
    record = run.record
    found = RunRow(
        seed=run.files.seed,
        status=record.status if record else "unreadable",
        reason=escaped(run.problem or (record.reason or "" if record else ""))[:LONGEST_REASON],
        value=finite(run.value),
        seconds=record.seconds if record else math.nan,
    )
    if record is None:
        del found["seconds"]
    if spec.split_ratio is not None and run.losses is not None:
        found["splits"] = [float(value) for value in run.losses]
    return found


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


def finite(value: float | None) -> float | None:
    """The number; None for what JSON has not."""
    return None if value is None or not math.isfinite(value) else float(value)
