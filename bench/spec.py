"""What a task measures, as data that a leaderboard can read: metrics, their units and directions.

`bench.contract` hands these names on; this file stands apart because it needs no torch: records are read
without.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

Arrays = dict[str, np.ndarray]
"""Named arrays: a run leaves them behind, and scoring may look at nothing else."""


@dataclass(frozen=True)
class Metric:
    """A number that a task reports.

    `unit` is "fraction" or "nats" or whatever it is measured in; `best` and
    `worst` bound its values; either may be infinite. Larger values are better if `best` is above `worst`.
    """

    description: str
    unit: str
    best: float
    worst: float
    may_be_undefined: bool = False

    @property
    def higher_is_better(self) -> bool:
        """Whether larger values are better."""
        return self.best > self.worst


@dataclass(frozen=True)
class Undefined:
    """A metric that has no value here, and why."""

    reason: str


Metrics = dict[str, float | Undefined]


@dataclass(frozen=True)
class Spec:
    """What a task measures. `version` grows whenever the same predictions would score differently.

    `validation_metric` names a metric that the run also logs on validation data, the only number that tuning
    looks at. A task without one cannot be tuned. `split_ratio` is of a task whose test sets are overlapping
    splits of one table: test over training examples of a split (Nadeau and Bengio 2003, "Inference for the
    Generalization Error"); None says that all test examples are different ones.
    """

    question: str
    source: str
    version: int
    metrics: Mapping[str, Metric]
    main_metric: str
    requires: frozenset[str] = frozenset()
    ranked: bool = True
    min_seeds: int = 3
    validation_metric: str | None = None
    split_ratio: float | None = None


class Row(NamedTuple):
    """One point: `curve` (what is measured), `series` (which line of the chart), abscissa `x`, `value`."""

    curve: str
    series: str
    x: float
    value: float
