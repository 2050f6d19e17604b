"""Runs of fidelity_cifar10 beside published rows and beside what is no posterior at all.

`published/fidelity_cifar10.csv` holds the rows that are no runs of ours, each with its source. The first
three follow from the reference: probabilities that know nothing, its own classes taken as sure, and itself.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from typing import NamedTuple

from bench.comparison import Comparison, FinishedRun, of_metrics

COLUMNS = ("total_variation", "agreement", "accuracy", "nll")
"""Metrics that published rows have."""


class Published(NamedTuple):
    """A row that is no run of ours; a metric that its source does not give is None."""

    row: str
    metrics: dict[str, float | None]
    source: str


def published() -> tuple[Published, ...]:
    """The rows, as the file has them."""
    text = (files("bench.studies") / "published" / "fidelity_cifar10.csv").read_text()
    return tuple(
        Published(
            line["row"], {name: float(line[name]) if line[name] else None for name in COLUMNS}, line["source"]
        )
        for line in csv.DictReader(text.splitlines())
    )


def compare(runs: Sequence[FinishedRun]) -> Comparison:
    """Means of all metrics over the seeds, and the rows that are no runs."""
    found = of_metrics(runs)
    spec = runs[0].task.spec
    others = [
        [runs[0].task_name, name, spec.metrics[name].unit, f"{other.row} ({other.source})", f"{value:.4g}"]
        for name in COLUMNS
        for other in published()
        if (value := other.metrics[name]) is not None
    ]
    return replace(found, rows=[*found.rows, *others])
