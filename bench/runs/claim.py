"""A run's directory while the run is unfinished: whose it is, what the run was, how long it took so far.

The directory holds `unfinished.json`: the run's fingerprint, that is everything that must be equal for the
run to go on, and `seconds`, the wall-clock time of all its starts.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from bench.errors import OutputError, UsageError
from bench.runs import holdings, records
from bench.system.files import LOCK, NotPlain, locked, read, refuse_links, write

_KEPT_EVERY = 1.0
"""Seconds of a run that a process which is killed may lose from the count, if events come so often."""


class Claim:
    """A directory that one process has to itself, for one run.

    Args:
        directory: Of the run.
        fingerprint: What must be equal for the run to go on, as JSON gives it back.

    Raises:
        UsageError: If the directory holds an unfinished run with another fingerprint, or a damaged one.
    """

    def __init__(self, directory: Path, fingerprint: dict[str, Any]) -> None:
        self.marker = directory / "unfinished.json"
        self._fingerprint = fingerprint
        self._began = time.perf_counter() - self._seconds_of_earlier_starts()
        self.keep()

    @property
    def seconds(self) -> float:
        """Wall-clock seconds of the run, those of earlier starts included."""
        return time.perf_counter() - self._began

    def observe(self, event: str, values: dict[str, Any]) -> None:
        """As an observer of the run: keeps the seconds, should the process be killed."""
        if time.perf_counter() - self._kept >= _KEPT_EVERY:
            self.keep()

    def keep(self) -> None:
        """Writes `unfinished.json`."""
        self._kept = time.perf_counter()
        content = self._fingerprint | {"seconds": round(self.seconds, 3)}
        write(self.marker, json.dumps(content, indent=2, sort_keys=True).encode())

    def _seconds_of_earlier_starts(self) -> float:
        if not self.marker.exists():
            return 0.0
        try:
            old = json.loads(read(self.marker))
            seconds = float(old.get("seconds", 0.0))
            damaged = not 0.0 <= seconds < float("inf")
        except (ValueError, TypeError, AttributeError):
            damaged = True
        if damaged:
            raise UsageError(
                f"{self.marker} is damaged, so that nobody knows what the run was; --force starts anew"
            )
        if differing := ", ".join(k for k, v in self._fingerprint.items() if old.get(k) != v):
            where = self.marker.parent
            raise UsageError(f"{where} holds an unfinished run with another {differing}; --force starts anew")
        return seconds


@contextmanager
def claimed(directory: Path, fingerprint: dict[str, Any], force: bool) -> Iterator[Claim]:
    """Claims a run's directory, or says in one line why it cannot be had; a refused run leaves no folder.

    Args:
        directory: Of the run, made if it is not there.
        fingerprint: What must be equal for the run to go on.
        force: Whether to empty the directory first.
    """
    new = [path for path in (directory, *directory.parents) if not path.exists()]
    _refuse_links(directory, force)
    try:
        with locked(directory):
            try:
                _make_room(directory, force)
                claim = Claim(directory, fingerprint)
                try:
                    yield claim
                finally:
                    if claim.marker.exists():
                        with suppress(OutputError):  # what ends the run is what is told
                            claim.keep()
            except UsageError:
                if directory in new:
                    shutil.rmtree(directory, ignore_errors=True)
                raise
    except UsageError:
        with suppress(OSError):  # a folder in which another run lies by now is not empty
            for path in new[1:]:
                path.rmdir()
        raise


def _refuse_links(directory: Path, force: bool) -> None:
    """Refuses links and pipes in the places of files, through which a run would write."""
    if force and ((lock := directory / LOCK).is_symlink() or lock.is_fifo()):
        lock.unlink()
    try:
        if not force:
            refuse_links(directory, *holdings.FOLDERS)
    except NotPlain as error:
        raise UsageError(
            f"{error.filename} {error.strerror}: remove it, or --force makes the run anew"
        ) from None
    except OSError:  # which is told where something is written
        return


def _make_room(directory: Path, force: bool) -> None:
    """Empties a directory that holds a failed run, or any run under `force`."""
    finished = (directory / "record.json").exists()
    if finished and not force and (status := records.read_record(directory).status) != "failed":
        raise UsageError(f"{directory} holds a {status} run: it is kept; --force replaces it")
    if finished or force:
        for path in directory.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != LOCK:
                path.unlink()
