"""A process that runs cells of a sweep, one after another: `python -P -m bench.sweep.worker`.

`bench.sweep.workers.Process` starts it. Every line of standard input is a cell; to each it answers one line
on standard output, what became of it. While a cell runs, whatever is printed goes to the cell's log. When the
input ends, so does the process; in the middle of a cell that means that whoever started it is gone, and the
cell is stopped as by SIGTERM: an orphan would keep the run's directory for itself.
"""

from __future__ import annotations

import faulthandler
import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from bench.runs import resolution
from bench.runs.plan import Plan
from bench.settings import build
from bench.system import shells
from bench.system.signals import stoppable

GRACE = 20.0
"""Seconds in which a process that is told to stop does so; then it is killed."""


@dataclass(frozen=True)
class End:
    """What became of a cell in a process.

    Attributes:
        state: As that of `bench.sweep.sweep.Outcome`, whose record is on the disk; `busy`, if another process
            has the run's directory; `unwritable`, if results cannot be written; `died`, if the process did.
        reason: Of a cell that is refused, unwritable, or whose process died.
        began: Whether the task ran.
    """

    state: Literal["completed", "diverged", "failed", "refused", "busy", "unwritable", "died"]
    reason: str = ""
    began: bool = False


def message(cell: Plan, log: Path) -> str:
    """A cell as one line: plain values, whether tuned presets are read, and the file for what is printed."""
    values = {name: str(value) if isinstance(value, Path) else value for name, value in vars(cell).items()}
    told = {"cell": values, "untuned": resolution.is_untuned(), "log": str(log)}
    return json.dumps(told, default=dict)


def run(cell: Plan) -> End:
    """Runs a cell, and notes its progress."""
    from bench.errors import Busy, OutputError
    from bench.sweep.cells import Note
    from bench.sweep.sweep import directory_of, run_cell, settled
    from bench.system.files import is_locked

    if (outcome := settled(cell)) is None:
        if is_locked(directory_of(cell)):
            return End("busy")
        note = Note.of(cell)
        try:
            outcome = run_cell(cell, (note.observe,))
        except OutputError as error:
            return End("unwritable", str(error))
        if isinstance(outcome.refusal, Busy):
            return End("busy")
        if outcome.status in ("completed", "diverged"):
            note.write_state(outcome.status)
    return End(outcome.status, str(outcome.refusal or ""), outcome.began)


class _Input:
    """The lines of standard input, read while cells run."""

    def __init__(self) -> None:
        self.is_over = False
        self.is_running = False
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="input", daemon=True).start()

    def _listen(self) -> None:
        for line in sys.stdin:
            self._lines.put(line)
        self.is_over = True
        self._lines.put(None)
        if self.is_running:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(GRACE)
            os._exit(128 + signal.SIGTERM)

    def __iter__(self) -> Iterator[str]:
        while (line := self._lines.get()) is not None:
            self.is_running = True
            if self.is_over:
                return
            yield line


def _redirect(log: Path) -> None:
    """Sends all that this process and its libraries print to a file, after what is there."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    log.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def main() -> int:
    """Runs cells until the input ends; returns the exit code."""
    shells.install()
    answers = os.fdopen(os.dup(1), "w")
    faulthandler.enable()
    with stoppable(last=True) as stop:
        lines = _Input()
        for line in lines:
            told: dict[str, Any] = json.loads(line)
            _redirect(Path(told["log"]))
            with resolution.untuned() if told["untuned"] else nullcontext():
                end = run(build(Plan, told["cell"]))
            lines.is_running = False
            with suppress(BrokenPipeError):
                print(json.dumps(asdict(end)), file=answers, flush=True)
    return stop.exit_code or 0


if __name__ == "__main__":
    sys.exit(main())
