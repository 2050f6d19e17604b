"""A run's directory while the run is unfinished: whose it is, what the run was, how long it took so far.

The directory holds `unfinished.json`: the run's fingerprint, that is everything that must be equal for the
run to go on, `seconds`, the wall-clock time of all its starts, and `energy`, what they took, where every one
of them was measured by the same counters.
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
from bench.system.joules import Meter

_KEPT_EVERY = 1.0
"""Seconds of a run that a process which is killed may lose from the count, if events come so often."""


class Claim:
    """A directory that one process has to itself, for one run.

    Args:
        directory: Of the run.
        fingerprint: What must be equal for the run to go on, as JSON gives it back.
        meter: Counts the run's joules from now on; None where nothing does.

    Raises:
        UsageError: If the directory holds an unfinished run with another fingerprint, or a damaged one.
    """

    def __init__(self, directory: Path, fingerprint: dict[str, Any], meter: Meter | None = None) -> None:
        self.marker = directory / "unfinished.json"
        self._fingerprint = fingerprint
        seconds, energy = self._earlier_starts()
        self._began = time.perf_counter() - seconds
        self._meter, self._earlier = meter, _summable(energy, meter)
        self.keep()

    @property
    def seconds(self) -> float:
        """Wall-clock seconds of the run, those of earlier starts included."""
        return time.perf_counter() - self._began

    @property
    def energy(self) -> records.RecordedEnergy | None:
        """Joules of the run, those of earlier starts included; None if one of them was not measured."""
        if self._meter is None or self._earlier is None or (joules := self._meter.joules) is None:
            return None
        return records.RecordedEnergy(joules=round(self._earlier + joules, 3), source=self._meter.source)

    def observe(self, event: str, values: dict[str, Any]) -> None:
        """As an observer of the run: keeps the seconds, should the process be killed."""
        if time.perf_counter() - self._kept >= _KEPT_EVERY:
            self.keep()

    def keep(self) -> None:
        """Writes `unfinished.json`."""
        self._kept = time.perf_counter()
        content = self._fingerprint | {"seconds": round(self.seconds, 3)}
        if (energy := self.energy) is not None:
            content["energy"] = energy.model_dump()
        write(self.marker, json.dumps(content, indent=2, sort_keys=True).encode())

    def _earlier_starts(self) -> tuple[float, records.RecordedEnergy | None]:
        """Seconds and energy of the starts before this one; of the latter None if one was not measured."""
        if not self.marker.exists():
            return 0.0, records.RecordedEnergy(joules=0.0, source="")
        try:
            old = json.loads(read(self.marker))
            seconds, kept = float(old.get("seconds", 0.0)), old.get("energy")
            energy = None if kept is None else records.RecordedEnergy.model_validate(kept)
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
        return seconds, energy


def _summable(earlier: records.RecordedEnergy | None, meter: Meter | None) -> float | None:
    """Joules of earlier starts, to which a meter's can be added; None if other counters gave them."""
    if meter is None or earlier is None or earlier.source not in ("", meter.source):
        return None
    return earlier.joules


@contextmanager
def claimed(
    directory: Path, fingerprint: dict[str, Any], force: bool, meter: Meter | None = None
) -> Iterator[Claim]:
    """Claims a run's directory, or says in one line why it cannot be had; a refused run leaves no folder.

    Args:
        directory: Of the run, made if it is not there.
        fingerprint: What must be equal for the run to go on.
        force: Whether to empty the directory first.
        meter: Counts the run's joules; None where nothing does.
    """
    new = [path for path in (directory, *directory.parents) if not path.exists()]
    _refuse_links(directory, force)
    try:
        with locked(directory):
            try:
                _make_room(directory, force)
                claim = Claim(directory, fingerprint, meter)
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
