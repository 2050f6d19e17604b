"""Finished runs of a task beside each other: what `Task.compare` gets, what it gives, and its default.

Runs of one line have the same method and the same settings of the task, and differ in their seeds. Two lines
are compared where they differ in either the method or the settings, paired by the seeds that both have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import Any

import numpy as np

from bench import intervals
from bench.errors import UsageError


@dataclass(frozen=True, eq=False)
class FinishedRun:
    """A finished run, as its task gets it to compare it with others.

    Its arrays and curves are read when first asked for: most comparisons are of metrics.

    Attributes:
        task: The task, with the settings of the run.
        task_name: As typed on the command line.
        task_identity: The name and every setting that differs from the preset standard.
        method_name: As typed on the command line.
        method_identity: The name and every setting that differs from the preset standard.
        preset: smoke, standard or paper.
        seed: Of the run.
        changed: Settings that differ from the run's own preset, by their flag: "task.epochs" -> 5.
        metrics: Every metric; None where it is undefined.
        read_arrays: Gives `arrays`.
        read_curves: Gives `curves`.
        provides: Capabilities of the method (`bench.contract.CAPABILITIES`).
    """

    task: Any
    task_name: str
    task_identity: str
    method_name: str
    method_identity: str
    preset: str
    seed: int
    changed: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    read_arrays: Callable[[], dict[str, np.ndarray]] = dict
    read_curves: Callable[[], Sequence[Any]] = tuple
    provides: frozenset[str] = frozenset()

    @cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        """What the run is scored from, targets included."""
        return self.read_arrays()

    @cached_property
    def curves(self) -> Sequence[Any]:
        """Points `(curve, series, x, value)` of `curves.csv`."""
        return self.read_curves()

    @property
    def label(self) -> tuple[str, str, str, int]:
        """Identities of method and task, preset, seed: what figures say of the run."""
        return self.method_identity, self.task_identity, self.preset, self.seed

    @property
    def variant(self) -> str:
        """Settings of the task that differ from the preset standard; empty if none do."""
        return self.task_identity.removeprefix(self.task_name).removeprefix("+")

    @property
    def line(self) -> str:
        """Method and variant: what runs of other seeds share."""
        return ", ".join(filter(None, (self.method_identity, self.variant)))


@dataclass(frozen=True)
class Comparison:
    """How several runs stand together.

    Attributes:
        charts: Altair charts by file name.
        header: Of the table's columns.
        rows: Of the table, cells of text.
        sentences: What can be said, with intervals.
    """

    charts: Mapping[str, Any] = field(default_factory=dict)
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    sentences: Sequence[str] = ()


Lines = dict[str, dict[int, FinishedRun]]
"""Line -> seed -> run."""


def by_task(runs: Iterable[FinishedRun]) -> dict[str, Lines]:
    """Name of the task -> its runs by line and seed, all sorted.

    Raises:
        UsageError: If a run is given twice.
    """
    found: dict[str, Lines] = {}
    for run in sorted(runs, key=lambda run: (run.task_name, run.line, run.seed)):
        of_line = found.setdefault(run.task_name, {}).setdefault(run.line, {})
        if run.seed in of_line:
            raise UsageError(f"{run.task_name}, {run.line}: seed {run.seed} is given twice")
        of_line[run.seed] = run
    return found


def pairs(lines: Lines) -> Iterator[tuple[str, str]]:
    """Pairs of lines that differ in either method or variant and have a seed in common."""
    for first, second in combinations(lines, 2):
        one, other = (next(iter(lines[line].values())) for line in (first, second))
        is_one_change = (one.method_identity == other.method_identity) != (one.variant == other.variant)
        if is_one_change and lines[first].keys() & lines[second].keys():
            yield first, second


def of_metrics(runs: Sequence[FinishedRun]) -> Comparison:
    """Means of every metric over the seeds of a line, and differences in the main metric, with intervals.

    Lines are compared that differ in one thing and have at least three seeds in common.
    """
    rows, sentences = [], []
    for task, lines in by_task(runs).items():
        spec = runs[[run.task_name for run in runs].index(task)].task.spec
        values = {
            name: {
                line: {
                    seed: value for seed, run in of.items() if (value := run.metrics.get(name)) is not None
                }
                for line, of in lines.items()
            }
            for name in spec.metrics
        }
        for name, metric in spec.metrics.items():
            for line, of_line in values[name].items():
                mean = f"{intervals.student(list(of_line.values())):.4g}" if of_line else "undefined"
                rows.append([task, name, metric.unit, line, mean])
        main = values[spec.main_metric]
        for first, second in pairs(lines):
            change = intervals.differences(main[first], main[second])
            if len(change) >= intervals.FEWEST:
                difference = intervals.student(change)
                sentences.append(
                    f"{task}: {first} minus {second} in {spec.main_metric} is {difference:.4g}"
                    + difference.said(f"{first} is higher", f"{second} is higher")
                )
    return Comparison({}, ["task", "metric", "unit", "method and settings", "mean"], rows, sentences)
