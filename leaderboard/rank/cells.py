"""A method's runs on a task, as they lie here: read once, and scored once from their arrays.

What cannot be read, is not the file that was handed in, or does not give what its record claims, is a run
with a problem, in words; nothing that a stranger wrote raises.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pydantic

from bench.leaderboard.check.screens import Flag, Seen, examine, look
from bench.leaderboard.evidence.submission import entry_name
from bench.runs.marks import Mark, marks
from bench.runs.records import Record, same
from bench.spec import Arrays
from bench.text import one_line

if TYPE_CHECKING:
    from bench.contract import Task
    from bench.leaderboard.check.truth import Truth


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
    record: str
    arrays: str | None
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
        adopted: Place among the submissions in the order in which they came to the board, ours at 0; those of
            which that is not known share the last.
        cleared: Screen -> why maintainers let the entry pass it.
    """

    slug: str
    method: str
    runs: tuple[RunFiles, ...]
    struck: str = ""
    was_repeated: bool = False
    adopted: int = 0
    cleared: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """As the board shows it."""
        return entry_name(self.method, self.slug)


# ----------------------------------------------------------------------------------------------- of one run


@dataclass(frozen=True, eq=False)
class Scored:
    """A run as far as it can be read; `problem` says what cannot, `is_recomputed` whether it was scored.

    `seen` is what the screens keep of a run that was scored, `marks` what speaks against it: without its
    arrays nothing of its accuracy.
    """

    files: RunFiles
    record: Record | None = None
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    losses: np.ndarray | None = None
    is_recomputed: bool = False
    problem: str = ""
    seen: Seen | None = None
    marks: tuple[Mark, ...] = ()

    @property
    def value(self) -> float | None:
        """Value of the main metric; None if the run has none."""
        if self.record is None or self.record.status != "completed":
            return None
        return self.metrics.get(self.record.task.main_metric)


def read(files: RunFiles) -> Scored:
    """The run with what its record claims."""
    if files.altered:
        return Scored(files, problem=f"{files.altered} of seed {files.seed} is not the submitted file")
    try:
        record = Record.model_validate_json(Path(files.record).read_bytes())
    except (OSError, pydantic.ValidationError):
        return Scored(files, problem=f"the record of seed {files.seed} cannot be read")
    if record.seed != files.seed:
        return Scored(files, problem=f"the record in seed{files.seed} is of seed {record.seed}")
    return Scored(files, record, record.metrics, marks=marks(record))


def scored(run: Scored, task: Task, known: Truth, examined: bool = True) -> Scored:
    """The run with its metrics computed again, and its losses, where its arrays are here.

    Args:
        run: As it was read.
        task: Of its record.
        known: What is known of the task's own arrays; a run that has others has a problem.
        examined: Whether the screens look at it by itself too; else others are compared with it alone.
    """
    files, record = run.files, run.record
    if record is None or record.status != "completed" or files.arrays is None:
        return run
    try:
        arrays = load(files.arrays)
        if (name := known.other(arrays)) is not None:
            return replace(run, problem=f"seed {files.seed}: {name} is not the task's own")
        found = task.score(arrays)
        losses = task.losses(arrays)
        seen = examine(files.seed, arrays, record.metrics, task) if examined else look(files.seed, arrays)
    except (Exception, SystemExit) as error:  # whatever arrays can lead a score to
        what = (
            f"could not be computed again: seed {files.seed}: {type(error).__name__}: {one_line(error, 120)}"
        )
        return replace(run, problem=what)
    metrics = {
        name: float(value) if isinstance(value, float | int) and math.isfinite(value) else None
        for name, value in found.items()
    }
    wrong = [name for name, value in metrics.items() if not _agree(name, value, record.metrics.get(name))]
    if wrong:
        is_, was = metrics[wrong[0]], record.metrics.get(wrong[0])
        problem = f"its arrays give {wrong[0]} {_short(is_)}, its record of seed {files.seed} {_short(was)}"
        return replace(run, metrics=metrics, losses=losses, problem=problem)
    if losses is not None:
        losses = np.asarray(losses, float)
    said = marks(record, arrays)
    return replace(run, metrics=metrics, losses=losses, is_recomputed=True, seen=seen, marks=said)


def load(path: str) -> Arrays:
    """The arrays of a file."""
    import safetensors.numpy

    return safetensors.numpy.load(Path(path).read_bytes())


def _agree(name: str, first: float | None, second: float | None) -> bool:
    """Whether two values of a metric are the same, or neither is defined."""
    if first is None or second is None:
        return first is second
    return same(name, first, second)


def _short(value: float | None) -> str:
    return "none" if value is None else f"{value:.6g}"


# ---------------------------------------------------------------------------------------------- of an entry


@dataclass(frozen=True, eq=False)
class Candidate:
    """An entry with its runs, and why it is not compared; `why` is empty if nothing speaks against it.

    `flags` are what the screens saw of it, `held` those of them that no maintainer has cleared.
    """

    cell: Cell
    runs: tuple[Scored, ...]
    why: str = ""
    flags: tuple[Flag, ...] = ()

    @property
    def held(self) -> list[Flag]:
        """Flags that wait for a maintainer's word."""
        return [flag for flag in self.flags if flag.screen not in self.cell.cleared]

    @property
    def name(self) -> str:
        """As the board shows it."""
        return self.cell.name

    @property
    def record(self) -> Record | None:
        """The first that can be read."""
        return next((run.record for run in self.runs if run.record is not None), None)

    @property
    def values(self) -> list[float]:
        """Values of the main metric, of the runs that have one."""
        return [run.value for run in self.runs if run.value is not None]

    @property
    def is_recomputed(self) -> bool:
        """Whether every number was computed again; a run that diverged has none."""
        ran = [run for run in self.runs if run.record is None or run.record.status == "completed"]
        return all(run.is_recomputed for run in ran) and bool(ran)

    @property
    def runs_without_arrays(self) -> int:
        """Completed runs whose arrays are not here."""
        return sum(
            run.files.arrays is None for run in self.runs if run.record and run.record.status == "completed"
        )

    @property
    def seed_matters(self) -> bool:
        """Whether another seed can give another answer."""
        from bench.runs.means import seed_matters

        return self.record is None or seed_matters(self.record)
