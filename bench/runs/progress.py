"""Progress of runs on standard error: a bar on a terminal, plain lines in a log file or a pipe.

Both say the share of the run that is done and the time that is left. A bar is one line as wide as the
terminal. Lines come at every stage, and at least every half minute, so that a job's output shows that the job
is alive; they are never wrapped and hold no control characters.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from bench.errors import Diverged

EVERY = 30.0
"""Seconds without a line after which there is one, away from a terminal."""

Clock = Callable[[], float]
"""Seconds since some moment."""


class Course:
    """How far a run has come, by its events.

    Stages are equal parts of a run, the fits of one call of `Engine.fit` or `Engine.fit_many` equal parts of
    their stage, epochs equal parts of their fit, or of all fits that are trained side by side (`together`),
    those of later stages included. Further calls in a stage have no part of their own.

    Args:
        clock: Tells the time.

    Attributes:
        share: The part of the run that is done, in [0, 1]; never decreases.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.clock = clock
        self.share = 0.0
        self._stage: dict[str, Any] = {"name": "", "number": 1, "of": 1}
        self._places: list[str] = []  # fit and epoch, in words
        self._loss, self._logged = "", ""
        self._began = clock()
        self._share_before: float | None = None
        """The share that an earlier start of the run had reached; None before this start fits something."""

    def follow(self, event: str, values: dict[str, Any]) -> None:
        """Takes an event of the run."""
        fit, fits = values.get("fit", 1), max(values.get("fits", 1), 1)
        if event == "stage":
            self._stage, self._places, self._loss = values, [], ""
            self._reach(0.0)
        elif event == "epoch":
            epoch, of, together = values["epoch"], max(values["of"], 1), values.get("together", 1)
            self._works_from((fit - 1 + together * (epoch - 1) / of) / fits)
            self._reach((fit - 1 + together * epoch / of) / fits)
            name = f"fit {fit}" if together == 1 else f"fits {fit} to {fit + together - 1}"
            self._places = [f"{name} of {fits}"] * (fits > 1) + [f"epoch {epoch} of {of}"]
            self._loss = f"loss {values['loss']:.4g}"
        elif event == "fit":
            if not values["was_there"]:
                self._works_from((fit - 1) / fits)
            self._reach(fit / fits)
        elif event == "log":
            self._logged = f"{values['name']} {values['value']:.4g} (validation)"
        if self._share_before is None:
            self._began = self.clock()

    def _at(self, part: float) -> float:
        """The share at a part of the stage."""
        of = max(self._stage["of"], 1)
        return min(max((self._stage["number"] - 1 + part) / of, 0.0), 1.0)

    def _reach(self, part: float) -> None:
        self.share = max(self.share, self._at(part))

    def _works_from(self, part: float) -> None:
        """The first time: this start of the run began with the work that follows this part of the stage."""
        if self._share_before is None:
            self._share_before = max(self.share, self._at(part))

    def words(self, title: str) -> Iterator[str]:
        """What is going on, from the longest to the shortest text that says it."""
        name = _printable(self._stage["name"])
        if self._stage["of"] > 1:
            name += f" ({self._stage['number']} of {self._stage['of']})"
        number = _printable(self._logged) or self._loss
        for parts in ([name, *self._places], [name, *self._places[-1:]], [name], []):
            what = ", ".join(part for part in parts if part)
            yield ", ".join(part for part in (f"{title}: {what}" if what else title, number) if part)
        yield title
        yield number

    @property
    def percentage(self) -> int:
        """The share in percent, rounded down; at most 99, since only the run's end is the end."""
        return min(int(100 * self.share + 1e-9), 99)

    @property
    def left(self) -> str:
        """Time that is left, as hours:minutes:seconds; dashes where nothing tells it."""
        return duration(self.seconds_left)

    @property
    def seconds_left(self) -> float | None:
        """Time that is left, in seconds; None where nothing tells it."""
        before = self._share_before
        if before is None or not before < self.share < 1:
            return None
        return (self.clock() - self._began) * (1 - self.share) / (self.share - before)


class _Bar:
    """One line at the foot of a terminal, drawn anew four times a second."""

    def __init__(self, console: Console, title: str, course: Course) -> None:
        self.console, self.title, self.course = console, title, course
        self.spinner = Spinner("dots")
        self.live = Live(get_renderable=self.frame, console=console, transient=True)

    def frame(self) -> Table:
        """The line as it is now: bar, percentage and time left, and as much text as there is room for."""
        width, course = self.console.width, self.course
        bar = min(max(width // 8, 8), 40)
        percentage, left = f"{course.percentage:3d} %", f"ETA {course.left}"
        room = width - bar - len(percentage) - len(left) - 5  # 5: the spinner and the spaces
        texts = [text for text in course.words(self.title) if text]
        text = next((text for text in texts if cell_len(text) <= room), self.title)
        grid = Table.grid(padding=(0, 1))
        for _ in range(5):
            grid.add_column(no_wrap=True, overflow="ellipsis")
        line = Text(text, no_wrap=True)
        line.truncate(max(room, 0), overflow="ellipsis")
        grid.add_row(self.spinner, ProgressBar(1.0, course.share, width=bar), percentage, left, line)
        return grid

    def start(self) -> None:
        self.live.start(refresh=True)

    def update(self, event: str) -> None:
        if event in ("stage", "log"):
            self.live.refresh()

    def notice(self, text: str) -> None:
        self.console.print(text, soft_wrap=True)

    def stop(self, ending: str) -> None:
        self.live.stop()


class _Lines:
    """Lines at every stage, and by a thread of their own where nothing was told for `seconds`."""

    def __init__(self, console: Console, title: str, course: Course, seconds: float) -> None:
        self.console, self.title, self.course, self.seconds = console, title, course, seconds
        self.last = course.clock()
        self.lock = threading.Lock()  # a line is written whole
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._beat, name="progress", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def update(self, event: str) -> None:
        self.write(only_if_due=event != "stage")

    def notice(self, text: str) -> None:
        with self.lock:
            self.console.print(text, soft_wrap=True)

    def stop(self, ending: str) -> None:
        self.over.set()
        self.thread.join()
        self.write(ending)

    def _beat(self) -> None:
        while not self.over.wait(max(self.last + self.seconds - self.course.clock(), 0.01)):
            try:
                self.write(only_if_due=True)
            except OSError:
                return

    def write(self, ending: str = "", only_if_due: bool = False) -> None:
        """Writes a line; `only_if_due`, if the last one is old."""
        with self.lock:
            if only_if_due and self.course.clock() - self.last < self.seconds:
                return
            self.last = self.course.clock()
            text = next(self.course.words(self.title))
            percentage = 100 if ending == "completed" else self.course.percentage
            what = f"{text}: {ending}" if ending else f"ETA {self.course.left}  {text}"
            self.console.print(f"{time.strftime('%H:%M:%S')}  {percentage:3d} %  {what}", soft_wrap=True)


class Shown:
    """An observer of a run that shows its progress, from the first event on.

    Besides a run's events it takes "end", whose `status` says how the run ended (completed, diverged, failed,
    refused): of a run whose failure its caller has caught.
    """

    def __init__(self, console: Console, title: str, clock: Clock, seconds: float) -> None:
        self.title = _printable(title)
        self.course = Course(clock)
        self.is_shown = False  # a further process of a distributed run sees no event, and shows nothing
        self.ending = "completed"
        self.view: _Bar | _Lines
        if is_terminal(console):
            self.view = _Bar(console, self.title, self.course)
        else:
            self.view = _Lines(console, self.title, self.course, seconds)

    def __call__(self, event: str, values: dict[str, Any]) -> None:
        """Takes an event."""
        if event == "end":
            self.ending = values["status"]
            return
        self.course.follow(event, values)
        with suppress(OSError):  # a full disk, a closed pipe: the run goes on unseen
            if not self.is_shown:
                self.is_shown = True
                self.view.start()
            if event == "notice":
                self.view.notice(f"{self.title}: {_printable(values['text'])}")
            else:
                self.view.update(event)

    def stop(self, ending: str | None = None) -> None:
        """Ends what is shown."""
        with suppress(OSError):
            if self.is_shown:
                self.view.stop(ending or self.ending)


@contextmanager
def shown(
    console: Console, title: str, clock: Clock = time.monotonic, seconds: float = EVERY
) -> Iterator[Shown]:
    """An observer that shows share done, time left, stage, epoch, and the last logged number or the loss.

    Args:
        console: Where to, standard error.
        title: What is run.
        clock: Tells the time.
        seconds: Away from a terminal, the longest time without a line.
    """
    observer = Shown(console, title, clock, seconds)
    try:
        yield observer
    except Diverged:
        observer.stop("diverged")
        raise
    except Exception:
        observer.stop("failed")
        raise
    except BaseException:  # Ctrl-C, a signal
        observer.stop("stopped")
        raise
    observer.stop()


def is_terminal(console: Console) -> bool:
    """Whether a console can draw a line anew; colours that are asked for do not make a file a terminal."""
    if "FORCE_COLOR" in os.environ and not console.file.isatty():
        return False
    return console.is_terminal and not console.is_dumb_terminal


def _printable(text: str) -> str:
    """In one line and without control characters."""
    return "".join(c if c.isprintable() else " " for c in str(text))


def duration(seconds: float | None) -> str:
    """A time as hours:minutes:seconds; dashes where it is not known."""
    if seconds is None:
        return "-:--:--"
    minutes, whole = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{whole:02d}"
