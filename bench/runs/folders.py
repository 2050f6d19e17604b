"""The runs below a folder: which there are, how each stands, and all of them as a data frame.

A directory with `record.json` holds a finished run, one with `unfinished.json` alone a run that goes on or
was stopped. A record that cannot be read, or a file that is missing, makes a damaged run, told as such: no
listing fails for one of them.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bench.errors import UsageError
from bench.runs import holdings
from bench.runs.records import Record, read_record
from bench.runs.resolution import PRESETS
from bench.system.files import is_locked

if TYPE_CHECKING:
    import pandas

    from bench.runs.runner import Run

Status = Literal["completed", "diverged", "failed", "unfinished", "running", "damaged"]


@dataclass(frozen=True)
class Found:
    """A run as it lies on disk.

    Attributes:
        directory: Where it lies.
        status: As the record says; without one running, if a process has its lock, or unfinished; damaged, if
            the record cannot be read or something that the run holds is missing.
        record: Its record; None if there is none that can be read.
        note: What else is to be said: why it did not complete, when it last moved.
    """

    directory: Path
    status: Status
    record: Record | None = None
    note: str = ""

    @property
    def named(self) -> dict[str, str | int | None]:
        """Task, method (identities), preset and seed: of the record, else by the names of its folders."""
        if (record := self.record) is not None:
            return {
                "task": record.task.identity,
                "method": record.method.identity,
                "preset": record.preset,
                "seed": record.seed,
            }
        match = re.fullmatch(rf"({'|'.join(PRESETS)})-seed(\d+)", self.directory.name)
        if match is None:
            return dict.fromkeys(("task", "method", "preset", "seed"))
        method = self.directory.parent
        return {
            "task": method.parent.name,
            "method": method.name,
            "preset": match[1],
            "seed": int(match[2]),
        }


def look(directory: Path) -> Found:
    """How the run in a directory stands.

    Raises:
        UsageError: If the directory holds no run, not even an unfinished one.
    """
    if not (directory / "record.json").exists() and (directory / "unfinished.json").exists():
        if is_locked(directory):
            return Found(directory, "running", note=f"last moved {_ago(directory)}")
        return Found(directory, "unfinished", note=f"last moved {_ago(directory)}")
    try:
        record = read_record(directory)
        holdings.check(directory)
    except UsageError as error:
        if not (directory / "record.json").exists():
            raise
        return Found(
            directory,
            "damaged",
            note=str(error).removeprefix(f"{directory} is damaged: ").removeprefix(f"{directory}/"),
        )
    return Found(directory, record.status, record, record.reason or "")


def below(folder: Path) -> list[Found]:
    """All runs at and below a folder, in order of their paths; hidden folders are passed over.

    Raises:
        UsageError: If there is no such folder.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder")
    found = []
    for name, folders, files in os.walk(folder):
        if "record.json" in files or "unfinished.json" in files:
            folders.clear()
            found.append(look(Path(name)))
        folders[:] = [inside for inside in folders if not inside.startswith(".")]
    return sorted(found, key=lambda run: run.directory)


def distinct(directories: Iterable[Path]) -> tuple[list[Path], list[Path]]:
    """Directories, each once however its path is written, and those that came again."""
    once: dict[Path, Path] = {}
    again = []
    for directory in directories:
        try:
            place = directory.resolve()
        except (OSError, ValueError):  # no path at all, which reading it will tell
            place = directory
        if place in once:
            again.append(directory)
        once.setdefault(place, directory)
    return list(once.values()), again


def table(runs: str | Path | Run | Iterable[str | Path | Run]) -> pandas.DataFrame:
    """Runs as a data frame, a row for each.

    Args:
        runs: Directories of runs, what `bench.run` returned, or folders with runs below them; one or several.

    Returns:
        Columns task, method, preset, seed, status, every metric of the runs (NaN where a run has no value),
        seconds and directory. A run that is unfinished or damaged has a row too.

    Raises:
        UsageError: If pandas is not installed, or a folder is none.
    """
    try:
        import pandas
    except ImportError:
        raise UsageError("bench.table needs pandas: pip install 'posterior-bench[pandas]'") from None
    several: Iterable[Any] = runs if isinstance(runs, Iterable) and not isinstance(runs, str) else [runs]
    folders = [Path(getattr(run, "directory", run)) for run in several]
    found = gather(folders)[0]
    metrics = dict.fromkeys(name for run in found if run.record for name in run.record.metrics)
    rows = []
    for run in found:
        values = run.record.metrics if run.record else {}
        rows.append(
            run.named
            | {"status": run.status}
            | {name: values.get(name) for name in metrics}
            | {"seconds": run.record.seconds if run.record else None, "directory": str(run.directory)}
        )
    columns = ["task", "method", "preset", "seed", "status", *metrics, "seconds", "directory"]
    frame = pandas.DataFrame(rows, columns=columns)
    return frame.astype(dict.fromkeys([*metrics, "seconds"], "float64"))


def gather(folders: Sequence[Path]) -> tuple[list[Found], list[Path]]:
    """The runs below several folders, each once, and the directories of those that came again.

    Raises:
        UsageError: If there is no such folder.
    """
    runs = [run for folder in folders for run in below(folder)]
    once, again = distinct(run.directory for run in runs)
    by_directory = {run.directory: run for run in runs}
    return [by_directory[directory] for directory in once], again


def _ago(directory: Path) -> str:
    """How long ago a file of the directory was last written."""
    moments = []
    for path in (directory, *directory.rglob("*")):
        try:
            moments.append(path.stat().st_mtime)
        except OSError:  # removed meanwhile: the run moves
            moments.append(time.time())
    seconds = max(time.time() - max(moments), 0)
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
