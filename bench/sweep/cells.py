"""What a sweep writes beside its runs, so that anybody can tell how it stands while it goes on.

    <out>/sweep/plan.json                                the cells that the last sweep of this folder planned
    <out>/sweep/<task>/<method>/<preset>-seed<k>.json    how a cell stands, its progress while it runs
    <out>/sweep/<task>/<method>/<preset>-seed<k>.log     what the process of a cell printed

Neither holds a result: those are in the runs' own directories. A cell whose process died twice has no record,
since the next start of the sweep goes on from its checkpoint; that it failed, and why, stands here.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from bench.errors import UsageError
from bench.runs.folders import look
from bench.runs.plan import Plan
from bench.runs.progress import Course
from bench.runs.records import Record
from bench.runs.resolution import resolve
from bench.system.files import is_locked, write

FOLDER = "sweep"
EVERY = 1.0
"""Seconds between two notes on the progress of a cell."""

State = Literal["completed", "diverged", "failed", "refused", "damaged", "running", "unfinished", "planned"]
STATES: tuple[State, ...] = get_args(State)


class Note:
    """The file that says how a cell stands.

    Args:
        out: The folder for runs.
        run: The run's directory, relative to `out`.
    """

    def __init__(self, out: Path, run: Path) -> None:
        self.directory = out / run
        self.path = out / FOLDER / run.parent / f"{run.name}.json"
        self.log = self.path.with_suffix(".log")
        self._course = Course()
        self._told = -float("inf")

    @classmethod
    def of(cls, cell: Plan) -> Note:
        """The note of a cell; raises UsageError where the cell can have no run."""
        return cls(cell.out, resolve(cell).directory(cell.seed))

    def observe(self, event: str, values: dict[str, Any]) -> None:
        """As an observer of the run: notes its progress, at every stage and at most once a second else."""
        self._course.follow(event, values)
        if event == "stage" or time.monotonic() - self._told >= EVERY:
            self._told = time.monotonic()
            *_, what = next(self._course.words("")).partition(": ")
            self.write_state("running", share=self._course.share, left=self._course.seconds_left, what=what)

    def write_state(self, state: State, reason: str = "", **values: Any) -> None:
        """Writes how the cell stands."""
        write(self.path, json.dumps({"state": state, "reason": reason, **values}).encode())

    def read(self) -> dict[str, Any]:
        """What was written last; nothing where nothing is, or nothing that can be read."""
        try:
            content = json.loads(self.path.read_bytes())
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) and content.get("state") in STATES else {}

    def forget(self) -> None:
        """Removes what an earlier sweep wrote."""
        for path in (self.path, self.log):
            path.unlink(missing_ok=True)


@dataclass(frozen=True)
class Standing:
    """How a cell stands.

    Attributes:
        cell: What it is, in words.
        directory: Of its run; None if it can have none.
        share: The part of the run that is done, in [0, 1], while it is known.
        left: Seconds that are left, while they are known.
        what: What the run is at.
        reason: Why it did not complete.
        log: The file to look into, of a cell that did not complete.
        record: Its record, once there is one.
    """

    cell: str
    preset: str
    directory: Path | None
    state: State
    share: float | None = None
    left: float | None = None
    what: str = ""
    reason: str = ""
    log: Path | None = None
    record: Record | None = None

    @property
    def value(self) -> float | None:
        """The main metric, once there is one."""
        return self.record.metrics.get(self.record.task.main_metric) if self.record else None


def write_plan(out: Path, cells: Sequence[Plan]) -> None:
    """Writes down the cells of a sweep; those of an earlier one of this folder are forgotten, its runs not.

    Raises:
        OutputError: If that cannot be written.
    """
    planned = []
    for cell in cells:
        entry: dict[str, Any] = {"cell": str(cell), "preset": cell.preset}
        try:
            entry["run"] = str(resolve(cell).directory(cell.seed))
        except UsageError as error:
            entry["refused"] = str(error)
        planned.append(entry)
    write(out / FOLDER / "plan.json", (json.dumps({"cells": planned}, indent=1) + "\n").encode())


def standings(out: Path) -> list[Standing]:
    """How every cell of the last sweep of a folder stands, in the order of the sweep.

    Raises:
        UsageError: If no sweep has written its plan there.
    """
    path = out / FOLDER / "plan.json"
    try:
        planned = json.loads(path.read_bytes())["cells"]
        return [_standing(out, entry) for entry in planned]
    except OSError:
        raise UsageError(f"{out} is the folder of no sweep: {path} is not there") from None
    except (ValueError, TypeError, KeyError):
        raise UsageError(f"{path} is damaged: start the sweep again, which writes it anew") from None


def _standing(out: Path, planned: dict[str, str]) -> Standing:
    cell, preset = planned["cell"], planned["preset"]
    if "run" not in planned:
        return Standing(cell, preset, None, "refused", reason=planned["refused"])
    return standing(cell, preset, Note(out, Path(planned["run"])))


def standing(cell: str, preset: str, note: Note) -> Standing:
    """How a cell stands, by its run's directory and its note; of both the newer counts."""
    directory = note.directory
    noted = note.read()
    state = noted.get("state", "planned")
    log = note.log if note.log.exists() else None
    if is_locked(directory):
        return Standing(
            cell, preset, directory, "running", noted.get("share"), noted.get("left"), noted.get("what", "")
        )
    if state in ("refused", "failed") and not _is_newer(directory / "record.json", note.path):
        return Standing(cell, preset, directory, state, reason=noted["reason"], log=log)
    with suppress(UsageError):  # no run yet, not even an unfinished one
        found = look(directory)
        if found.status == "unfinished":
            return Standing(cell, preset, directory, "unfinished", noted.get("share"), reason=found.note)
        if found.status == "failed":
            log = directory / "log.txt"
        reason = "" if found.status == "completed" else found.note
        share = 1.0 if found.status == "completed" else None
        shown = None if found.status == "completed" else log
        return Standing(
            cell, preset, directory, found.status, share, reason=reason, log=shown, record=found.record
        )
    return Standing(cell, preset, directory, "planned")


def _is_newer(path: Path, other: Path) -> bool:
    try:
        return path.stat().st_mtime_ns > other.stat().st_mtime_ns
    except OSError:
        return False
