"""Means over the seeds of finished runs: which runs may stand in one mean, and what is to be said of it.

A mean is over runs of one method (its identity) under one protocol: task (its identity), preset, version of
the task, digest of its data. What differs in one of these stands apart. Different source does not part runs,
since every change of the suite is another source; it is said.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench import intervals
from bench.intervals import Interval
from bench.runs.folders import Found
from bench.runs.measures import seed_matters
from bench.runs.records import Record


@dataclass(frozen=True)
class Line:
    """Runs of one method under one protocol, at most one of each seed.

    Attributes:
        protocol: Name of the protocol: task and preset, and what else tells it from others among the runs.
        method: Identity of the method.
        runs: Finished, in order of their seeds.
    """

    protocol: str
    method: str
    runs: tuple[Found, ...]

    @property
    def records(self) -> list[Record]:
        """The records of the runs that have one."""
        return [run.record for run in self.runs if run.record is not None]

    def count(self, status: str) -> int:
        """Runs of a status."""
        return sum(record.status == status for record in self.records)

    def values(self, metric: str) -> list[float]:
        """Values of the completed runs that have one."""
        completed = [record.metrics.get(metric) for record in self.records if record.status == "completed"]
        return [value for value in completed if value is not None]

    def mean(self, metric: str) -> Interval | None:
        """Mean over the seeds with Student's 95% interval; None if no run has a value.

        There is no interval of fewer than `intervals.FEWEST` values, nor of equal values of a method whose
        answer does not depend on the seed: they are one value, repeated.
        """
        values = self.values(metric)
        if not values:
            return None
        if not self.seed_matters and len(set(values)) == 1:
            return Interval(values[0], math.nan, math.nan, "equal for every seed")
        return intervals.student(values)

    @property
    def seed_matters(self) -> bool:
        """Whether the method's answer can depend on the seed."""
        return seed_matters(self.records[0])


def lines(runs: Iterable[Found]) -> tuple[list[Line], list[str]]:
    """The finished runs by protocol and method, and a sentence on each thing that does not meet the eye.

    Of runs of one seed the newest counts.
    """
    said = []
    finished: dict[tuple[str, ...], list[tuple[Record, Found]]] = {}
    unfinished = 0
    for run in runs:
        if run.record is None:
            unfinished += run.status != "damaged"
            if run.status == "damaged":
                said.append(f"{run.directory} is damaged and not counted: {run.note}")
            continue
        finished.setdefault(_protocol(run.record), []).append((run.record, run))
    if unfinished:
        said.append(f"runs that are not finished and not counted: {unfinished}")
    found = []
    for protocol, title in _titles(list(finished)).items():
        runs_of = finished[protocol]
        if (sources := len({record.provenance.source_hash for record, _ in runs_of})) > 1:
            said.append(f"{title}: the runs are of {sources} states of the suite's source")
        for method in sorted({record.method.identity for record, _ in runs_of}):
            own = [(record, run) for record, run in runs_of if record.method.identity == method]
            if len({record.provenance.method_file_hash for record, _ in own}) > 1:
                said.append(f"{title}: the runs of {method} are of different states of its file")
            newest = {record.seed: run for record, run in sorted(own, key=lambda each: each[0].created)}
            for seed in newest:
                if (times := sum(record.seed == seed for record, _ in own)) > 1:
                    said.append(f"{title}: seed {seed} of {method} is there {times} times; the newest counts")
            found.append(Line(title, method, tuple(newest[seed] for seed in sorted(newest))))
    return found, said


def _protocol(record: Record) -> tuple[str, ...]:
    """What runs must have in common to be compared."""
    return record.task.identity, record.preset, str(record.task.version), record.task.data_digest


def _titles(protocols: Sequence[tuple[str, ...]]) -> dict[tuple[str, ...], str]:
    """Protocol -> its name: task and preset, with version and data where another has the same two."""
    titles: dict[tuple[str, ...], str] = {}
    for task, preset, version, digest in sorted(protocols):
        alike = [other for other in protocols if other[:2] == (task, preset)]
        title = f"{task}, {preset}"
        if len({other[2] for other in alike}) > 1:
            title += f", version {version}"
        if len({other[3] for other in alike}) > 1:
            title += f", data {digest[:8]}"
        titles[task, preset, version, digest] = title
    return titles
