"""What is ours in the arrays of a run: targets, and all else that is no prediction.

A submission brings its test targets along, so that it can be scored without data. They are not believed: the
digests of the targets of every ranked task stand in `targets.txt`, and arrays are held to them wherever a
submission is checked or ranked, with the data or without. Of a task whose data nobody could read when the
list was written nothing is known; only data at hand can then tell.

A line has four words: task, version, array, and the digest of that array (`bench.data.array_digest`). The
array `@data` stands for the digest of the task's data, which every record names.

`python -m bench.leaderboard.check.truth` writes the lines of the tasks whose data are here, and leaves those
of the others as they are.
"""

from __future__ import annotations

from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from bench.errors import BenchError
from bench.spec import Arrays, array_digest
from bench.system.files import write

if TYPE_CHECKING:
    from bench.contract import Task

LIST: Final = Path(__file__).with_name("targets.txt")
_DATA: Final = "@data"
_WITHIN: Final = 1e-6
"""Relative error of numbers that another processor may sum in another order."""


class Truth:
    """What is known of a task's own arrays; its data are read only where the list does not decide."""

    def __init__(self, task: Task, name: str) -> None:
        """Knows a task by the name that it is listed under, which is that of its standard settings."""
        self._task = task
        self._digests = dict(listed().get((name, task.spec.version), {}))
        self._data = self._digests.pop(_DATA, None)

    @property
    def is_known(self) -> bool:
        """Whether anything can be compared."""
        return bool(self._digests) or self._own is not None

    @cached_property
    def data(self) -> str | None:
        """Digest of the task's data; None if neither the list nor the data tell it."""
        return self._data if self._data or self._own is None else self._task.data_digest()

    def other(self, arrays: Arrays) -> str | None:
        """Name of the first array that is not the task's own; None if all are, or nothing is known."""
        names = self._digests.keys() or (self._own or {}).keys()
        return next((name for name in sorted(names) if not self._is_own(name, arrays.get(name))), None)

    def _is_own(self, name: str, given: np.ndarray | None) -> bool:
        if given is None:
            return False
        if name in self._digests:
            if self._digests[name] == _digest(name, given):
                return True
            if given.dtype.kind != "f":  # numbers may differ by how a processor sums
                return False
        own = (self._own or {}).get(name)
        if own is None or given.dtype != own.dtype or given.shape != own.shape:
            return False
        if own.dtype.kind != "f":
            return np.array_equal(given, own)
        return np.allclose(given, own, rtol=_WITHIN, atol=0, equal_nan=True)

    @cached_property
    def _own(self) -> Arrays | None:
        """The arrays by the data at hand; None where these are not here, and are not fetched."""
        try:
            return self._task.given() | self._task.targets()
        except BenchError:
            return None


@cache
def listed() -> dict[tuple[str, int], dict[str, str]]:
    """The list: task and version -> array -> digest."""
    found: dict[tuple[str, int], dict[str, str]] = {}
    for line in LIST.read_text().splitlines():
        name, version, array, digest = line.split()
        found.setdefault((name, int(version)), {})[array] = digest
    return found


def lines(task: Task, name: str) -> dict[str, str]:
    """What the list says of a task whose data are here.

    Raises:
        DataError: If they are not.
    """
    found = {array: _digest(array, content) for array, content in (task.given() | task.targets()).items()}
    return found | {_DATA: task.data_digest()}


def _digest(name: str, array: np.ndarray) -> str:
    return array_digest({name: array})


def main() -> None:
    """Writes the list anew, for the tasks whose data are here."""
    from bench.runs.registry import tasks
    from bench.settings import build

    known = dict(listed())
    for name, entry in sorted(tasks().items()):
        standard = {**entry.fixed, **entry.presets.get("standard", {})}
        task = entry.cls(build(entry.cls.settings_class, standard, "task"), None)
        if not task.spec.ranked:
            continue
        try:
            known = {key: of for key, of in known.items() if key[0] != name} | {
                (name, task.spec.version): lines(task, name)
            }
            print(f"{name}: listed")
        except BenchError as error:
            print(f"{name}: left as it was: {error}")
    text = [
        f"{name} {version} {array} {digest}\n"
        for (name, version), of in sorted(known.items())
        for array, digest in sorted(of.items())
    ]
    write(LIST, "".join(text).encode())


if __name__ == "__main__":
    main()
