"""What the parts of every page are made of: the committed runs, and how numbers are written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from bench import figures
from bench.contract import Comparison, FinishedRun
from bench.intervals import student
from bench.leaderboard.evidence import entries
from bench.runs.records import Record

ROOT = Path(__file__).parent.parent.parent


Group = list[tuple[Path, Record]]

Part = Callable[[], str]
"""Writes a generated part of a page."""
Drawing = tuple[dict[str, Any], str]
"""Charts by the names of their files, and what stands below each."""


EWC = "ewc+strength=10000000.0"
"""`ewc` on split_mnist, of the strength that validation chose."""


def is_of_a_search(task_name: str, method_identity: str) -> bool:
    """Whether a run is of a strength of `ewc` that was tried and not chosen; a table of its own has these."""
    is_ewc = method_identity.split("+")[0] == "ewc"
    return is_ewc and task_name == "split_mnist" and method_identity != EWC


@cache
def committed() -> Group:
    """Every committed run and its record, read once."""
    return list(entries.committed())


def groups(task: str) -> Iterator[tuple[str, str, Group]]:
    """Committed runs of a task by (task identity, method identity), all seeds together."""
    runs = [(path, record) for path, record in committed() if record.task.name == task]
    for key, group in groupby(runs, key=lambda run: (run[1].task.identity, run[1].method.identity)):
        yield *key, list(group)


def by_seed(task_identity: str, method_identity: str) -> dict[int, tuple[Path, Record]]:
    """Committed runs of one choice of settings, by seed."""
    return {
        record.seed: (path, record)
        for path, record in committed()
        if (record.task.identity, record.method.identity) == (task_identity, method_identity)
    }


@cache
def finished(path: Path) -> FinishedRun:
    """A committed run, read once."""
    return entries.finished_run(path)


def finished_runs(*tasks: str) -> list[FinishedRun]:
    """Completed committed runs of some tasks."""
    return [finished(path) for path, r in committed() if r.task.name in tasks and r.status == "completed"]


def standard_runs(task: str) -> list[FinishedRun]:
    """Those of the preset standard with no setting changed."""
    return [run for run in finished_runs(task) if run.label[:3] == (run.method_name, task, "standard")]


@cache
def compared(task: str, standard: bool = False) -> Comparison:
    """What a task says of its committed runs together, or of the `standard_runs` among them."""
    runs = standard_runs(task) if standard else finished_runs(task)
    return type(runs[0].task).compare(runs)


def footer(runs: list[FinishedRun]) -> str:
    """What stands below a figure of runs."""
    return figures.footer(run.label for run in runs)


def interval(values: list[float]) -> str:
    """Mean with the half width of its 95% t interval over the seeds; no interval below three seeds."""
    of = student(values)
    return f"{of.centre:.4f}" + ("" if np.isnan(of.half) else f" ± {of.half:.4f}")


def metric(group: Group, name: str) -> str:
    """A metric over the seeds of a group."""
    values = [record.metrics[name] for _, record in group]
    if any(value is None for value in values):
        return "-"
    return interval([value for value in values if value is not None])


def milliseconds_per_step(group: Group) -> str:
    """Wall clock of the fits per training step, over all seeds."""
    fits = [fit for _, record in group for fit in record.fits]
    return f"{1000 * sum(fit.seconds for fit in fits) / sum(fit.steps for fit in fits):.1f}"


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def or_none(header: list[str], rows: list[list[str]]) -> str:
    """A table, or a sentence in place of an empty one."""
    return table(header, rows) if rows else "No such run is committed yet."


def compared_table(task: str) -> str:
    """The table in which a task sets its committed runs side by side."""
    if not finished_runs(task):
        return "No run is committed yet."
    found = compared(task)
    return table(found.header, found.rows)


def said(task: str, standard: bool = False) -> str:
    """What `bench figures RUN.. --to DIR` says of the committed runs of a task, or of `standard_runs`."""
    return "\n".join(f"- {sentence}" for sentence in compared(task, standard).sentences)


def said_if_any(task: str) -> str:
    """What `bench figures RUN.. --to DIR` says of the committed runs of a task."""
    return said(task) if finished_runs(task) else "No run is committed yet."
