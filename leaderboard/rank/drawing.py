"""The figures of a task on the board: what the task itself draws of the best entries, as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench import figures as charts
from bench.comparison import FinishedRun
from bench.contract import Task
from bench.leaderboard.rank.cells import load
from bench.runs.records import Record
from bench.runs.runner import task_of
from bench.text import one_line

MOST = 10
"""Entries, from the top of the table, that a figure shows."""


def figures(runs: Sequence[tuple[Record, str]]) -> tuple[dict[str, str], list[str]]:
    """SVG by name, and what is to be said of figures that could not be drawn.

    Drawn are the comparison of all these runs (`Task.compare`) and the figures of the first (`Task.figures`).

    Args:
        runs: Records with the files of their arrays, of one task, the best entry's first.
    """
    if not runs:
        return {}, []
    drawn: dict[str, str] = {}
    said: list[str] = []
    cls = type(task_of(runs[0][0]))
    compares = cls.compare.__func__ is not Task.compare.__func__  # type: ignore[attr-defined]
    if compares:
        _draw(drawn, said, "comparison", lambda: _together(cls, runs), [record for record, _ in runs])
    if cls.figures is not Task.figures:
        first = _finished(*runs[0])
        _draw(drawn, said, "figures", lambda: first.task.figures(first.arrays), [runs[0][0]])
    return drawn, said


def _draw(drawn: dict[str, str], said: list[str], what: str, make: Any, records: Sequence[Record]) -> None:
    try:
        made = make()
        for name, chart in made.items():
            drawn.setdefault(name, charts.svg(chart, charts.footer(record.label for record in records)))
    except (Exception, SystemExit) as error:
        said.append(f"The {what} of this task could not be drawn: {one_line(error, 200)}")


def _together(cls: type[Task], runs: Sequence[tuple[Record, str]]) -> Any:
    return cls.compare([_finished(record, arrays) for record, arrays in runs]).charts


def _finished(record: Record, arrays: str) -> FinishedRun:
    """The run as `Task.compare` takes it; its method is a name and nothing is looked up by it."""
    task = task_of(record)
    run = FinishedRun(
        task=task,
        task_name=record.task.name,
        task_identity=record.task.identity,
        method_name=record.method.name,
        method_identity=record.method.identity,
        preset=record.preset,
        seed=record.seed,
        metrics=record.metrics,
        read_arrays=lambda: load(arrays),
        read_curves=lambda: task.curves(run.arrays),
    )
    return run
