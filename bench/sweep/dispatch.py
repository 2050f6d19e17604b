"""A sweep on workers: submits cells, tries again those whose process died, and collects what became of all.

The one rule for every kind of workers: a cell whose process dies (killed, out of memory, its node gone) is
submitted again, `retries` times, and goes on from its checkpoint. After that it is a failed cell with reason
and log, and without a record: the next start of the sweep goes on with it. A run that fails by itself has a
record that says so, and is not tried again. A cell whose run another process is at is waited for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from bench.errors import BenchError, DataError, OutputError, UsageError
from bench.runs.plan import Plan
from bench.runs.records import read_record
from bench.sweep.cells import Note, Standing, State
from bench.sweep.sweep import Outcome, settled
from bench.sweep.worker import End, message
from bench.sweep.workers import Cluster, Local, Workers, devices
from bench.system.files import is_locked

EVERY = 0.5
"""Seconds between two looks at what runs."""


class Board:
    """How all cells of a sweep stand, as far as this process knows.

    Attributes:
        cells: The plans, in order.
        outcomes: Of the cells that have ended, by number.
        deaths: How the process of a cell died each time, by number.
    """

    def __init__(self, cells: Sequence[Plan]) -> None:
        self.cells = list(cells)
        self.outcomes: dict[int, Outcome] = {}
        self.deaths: defaultdict[int, list[str]] = defaultdict(list)
        self._notes: dict[int, Note] = {}

    def note(self, number: int) -> Note:
        """The note of a cell, made when it is first asked for."""
        if number not in self._notes:
            self._notes[number] = Note.of(self.cells[number])
        return self._notes[number]

    def standing(self, number: int) -> Standing:
        """How a cell stands; of one that has not ended by its note: to ask for a lock is to have it."""
        cell = self.cells[number]
        if (outcome := self.outcomes.get(number)) is None:
            noted = self.note(number).read()
            state: State = noted.get("state", "planned")
            told = (noted.get("share"), noted.get("left"), noted.get("what", ""))
            return Standing(str(cell), cell.preset, self.note(number).directory, state, *told)
        reason = str(outcome.refusal or (outcome.record and outcome.record.reason) or "")
        log = None
        if outcome.status == "failed" and outcome.directory is not None:
            log = outcome.directory / "log.txt" if outcome.record else self.note(number).log
        share = 1.0 if outcome.status == "completed" else None
        return Standing(
            *(str(cell), cell.preset, outcome.directory, outcome.status, share),
            reason=reason, log=log, record=outcome.record,
        )  # fmt: skip


def run_all(
    cells: Sequence[Plan],
    workers: Workers,
    retries: int = 1,
    watch: Callable[[Board], None] = lambda board: None,
) -> list[Outcome]:
    """Runs cells on workers, which stay as they are: who made them closes them.

    Args:
        cells: No two of them the same run (`bench.sweep.sweep.distinct`).
        workers: Where.
        retries: How often a cell whose process died is tried again.
        watch: Called with all that is known, several times a second.

    Returns:
        An outcome for every cell, in their order.

    Raises:
        OutputError: If results cannot be written.
    """
    board = Board(cells)
    elsewhere: set[int] = set()

    def send(numbers: Sequence[int]) -> None:
        lines = {}
        for number in numbers:
            cell = board.cells[number]
            if (outcome := settled(cell)) is not None:
                board.outcomes[number] = outcome
                if outcome.refusal is not None and outcome.directory is not None:
                    board.note(number).write_state("refused", str(outcome.refusal))
            elif is_locked(board.note(number).directory):
                elsewhere.add(number)
            else:
                if not board.deaths[number]:
                    board.note(number).forget()
                lines[str(number)] = message(cell, board.note(number).log)
        workers.submit(lines)

    send(range(len(cells)))
    watch(board)
    while len(board.outcomes) < len(cells):
        again = []
        for name, end in workers.ended(EVERY):
            number = int(name)
            if end.state == "died" and len(board.deaths[number]) < retries:
                again.append(number)
                board.deaths[number].append(end.reason)
                board.cells[number] = _resuming(board, number)
            elif end.state == "busy":
                elsewhere.add(number)
            else:
                board.outcomes[number] = _outcome(board, number, end)
        free = {number for number in elsewhere if not is_locked(board.note(number).directory)}
        elsewhere -= free
        if again or free:
            send([*again, *sorted(free)])
        watch(board)
    return [board.outcomes[number] for number in range(len(cells))]


def _resuming(board: Board, number: int) -> Plan:
    """The cell without `force`, which would empty the directory of the run that is to go on."""
    has_begun = not (board.note(number).directory / "record.json").exists()
    return replace(board.cells[number], force=False) if has_begun else board.cells[number]


def _outcome(board: Board, number: int, end: End) -> Outcome:
    """What became of a cell, with its record; notes what no record tells.

    Raises:
        OutputError: If the cell could not be written.
    """
    cell, note = board.cells[number], board.note(number)
    if end.state == "unwritable":
        raise OutputError(end.reason)
    if end.state == "refused":
        note.write_state("refused", end.reason)
        return Outcome(cell, note.directory, None, UsageError(end.reason), end.began)
    if end.state == "died":
        times = f", {len(board.deaths[number]) + 1} times" if board.deaths[number] else ""
        reason = f"failed: {end.reason}{times}; what it printed is in {note.log}"
        note.write_state("failed", reason)
        return Outcome(cell, note.directory, None, BenchError(reason), True)
    try:
        return Outcome(cell, note.directory, read_record(note.directory), began=end.began)
    except UsageError as error:  # removed meanwhile, or not to be seen from here
        return Outcome(cell, note.directory, None, DataError(str(error)), end.began)


def chosen_workers(text: str, threads: int, cluster: Cluster, out: Path) -> Workers:
    """The workers that `--workers` names: a number, ray, ray://HOST:PORT or slurm.

    Args:
        text: The name.
        threads: Of each cell.
        cluster: What a cell asks of Ray or Slurm.
        out: The folder for runs.

    Raises:
        UsageError: If it names none, or the package that it needs is not installed.
        BenchError: If there is no such cluster.
    """
    if text.isdecimal() and int(text) > 0:
        return Local(int(text), threads, devices())
    if text == "ray" or text.startswith("ray://"):
        with _installed("ray"):
            from bench.sweep.workers_ray import OnRay
        return OnRay(None if text == "ray" else text, threads, cluster)
    if text == "slurm":
        with _installed("submitit", "slurm"):
            from bench.sweep.workers_slurm import OnSlurm
        return OnSlurm(out / "sweep" / "slurm", threads, cluster)
    raise UsageError(f"--workers {text}: must be a number, 1 or more, ray, ray://HOST:PORT or slurm")


@contextmanager
def _installed(package: str, extra: str = "") -> Iterator[None]:
    """Says in one line that a package is not installed."""
    try:
        yield
    except ImportError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        extra = extra or package
        raise UsageError(
            f"--workers {extra} needs {package}: pip install 'posterior-bench[{extra}]'"
        ) from None
