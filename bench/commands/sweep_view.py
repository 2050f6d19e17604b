"""A sweep on standard error while it runs: a live table on a terminal, plain lines in a log file or a pipe.

Both say how many cells are in which state, the share of the sweep that is done and the time that is left, as
if all cells took equally long. Lines come whenever a cell begins or ends, and at least every half minute.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from bench.commands.formats import number, plain
from bench.runs.progress import EVERY, Clock, duration, is_terminal
from bench.sweep.cells import STATES, Standing
from bench.sweep.dispatch import Board
from bench.text import escaped

_REFRESH = 1.0
"""Seconds between two readings of all notes."""


def summary(standings: list[Standing]) -> str:
    """How many cells are in which state.

    >>> summary([Standing("a", "smoke", None, state) for state in ("planned", "completed", "planned")])
    '3 cells: 1 completed, 2 planned'
    """
    counts = Counter(standing.state for standing in standings)
    parts = [f"{counts[state]} {state}" for state in STATES if counts[state]]
    return f"{len(standings)} cells: {', '.join(parts)}"


def metric(standing: Standing) -> str:
    """The main metric by name, once there is one."""
    if standing.record is None or standing.value is None:
        return ""
    return f"{standing.record.task.main_metric} {number(standing.value)}"


def share_of(standings: list[Standing]) -> float:
    """The part of a sweep that is done, in [0, 1]."""
    ended = ("completed", "diverged", "failed", "refused", "damaged")
    shares = [1.0 if each.state in ended else each.share or 0.0 for each in standings]
    return sum(shares) / max(len(shares), 1)


class _View:
    def __init__(self, console: Console, clock: Clock) -> None:
        self.console, self.clock = console, clock
        self.began = self.last = clock()
        self.looked = -float("inf")
        self.board: Board | None = None
        self.share_before: float | None = None
        self.before: dict[int, str] = {}
        self.deaths: Counter[int] = Counter()
        self.live: Live | None = None

    def look(self, board: Board) -> None:
        """Shows how the sweep stands, if it was not just shown."""
        is_over = len(board.outcomes) == len(board.cells)
        if self.clock() - self.looked < _REFRESH and not is_over:
            return
        self.looked = self.clock()
        if board is not self.board:  # the next round of a search
            self.board, self.share_before, self.before = board, None, {}
            self.deaths.clear()
        standings = [board.standing(each) for each in range(len(board.cells))]
        share = share_of(standings)
        if self.share_before is None:
            self.share_before = share
        left = None
        if self.share_before < share < 1:
            left = (self.clock() - self.began) * (1 - share) / (share - self.share_before)
        heading = f"{int(100 * share):3d} %  ETA {duration(left)}  {summary(standings)}"
        with suppress(OSError):  # a full disk, a closed pipe: the sweep goes on unseen
            for place, reasons in board.deaths.items():
                for reason in reasons[self.deaths[place] :]:
                    self.line(f"{board.cells[place]}: {reason}; it is tried again")
                self.deaths[place] = len(reasons)
            self.show(standings, heading)

    def show(self, standings: list[Standing], heading: str) -> None:
        """Lines on what has changed, and a heading where there was none for long."""
        for place, each in enumerate(standings):
            before = self.before.get(place)
            if before is not None and each.state != before:
                words = [f"{each.cell}: {each.state}", metric(each), each.reason]
                self.line(", ".join(word for word in words if word))
            self.before[place] = each.state
        if self.clock() - self.last >= EVERY or self.last == self.began:
            self.line(heading)

    def line(self, text: str) -> None:
        self.last = self.clock()
        self.console.print(escaped(f"{time.strftime('%H:%M:%S')}  {text}"), soft_wrap=True)


class _Table(_View):
    def show(self, standings: list[Standing], heading: str) -> None:
        """A table of what is going on and what went wrong, and of the latest results as room allows."""
        order = ("running", "failed", "refused", "damaged", "diverged", "completed")
        for place, each in enumerate(standings):
            if self.before.get(place) != each.state:
                self.before.pop(place, None)  # what changed last comes last
                self.before[place] = each.state
        latest = {place: rank for rank, place in enumerate(reversed(self.before))}
        shown = [place for place, each in enumerate(standings) if each.state in order]
        shown.sort(key=lambda place: (order.index(standings[place].state), latest[place]))
        table = Table(title=heading, title_justify="left", box=None, pad_edge=False, title_style="bold")
        for column in ("cell", "state", "progress", "ETA", "main metric"):
            table.add_column(column, no_wrap=True, overflow="ellipsis")
        room = max(self.console.height - 4, 1)
        for place in shown[:room]:
            each = standings[place]
            running = each.state == "running"
            progress = "" if each.share is None else f"{int(100 * each.share):3d} %"
            told = each.what if running else metric(each) or each.reason
            left = duration(each.left) if running else ""
            table.add_row(*(Text(plain(cell)) for cell in (each.cell, each.state, progress, left, told)))
        if len(shown) > room:
            table.caption = f"and {len(shown) - room} more: bench sweep status shows all"
        if self.live is None:
            self.live = Live(console=self.console, transient=True, auto_refresh=False)
            self.live.start()
        self.live.update(table, refresh=True)


@contextmanager
def watched(console: Console, clock: Clock = time.monotonic) -> Iterator[_View]:
    """Shows a sweep: `look` is what `bench.sweep.dispatch.run_all` calls.

    Args:
        console: Where to, standard error.
        clock: Tells the time.
    """
    view = _Table(console, clock) if is_terminal(console) else _View(console, clock)
    try:
        yield view
    finally:
        if view.live is not None:
            with suppress(OSError):
                view.live.stop()
