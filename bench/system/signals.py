"""Signals that end a command: Ctrl-C, a scheduler's SIGTERM, and SIGHUP of a terminal that is closed."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP")  # Windows has no SIGHUP
_ENDING_SECONDS = 5.0
"""For so long after a signal further ones are ignored: `timeout` sends two, and users press Ctrl-C twice."""


@dataclass(eq=False)
class Stop:
    """What stopped a block, if anything did.

    Attributes:
        exit_code: 128 and the signal's number, as shells have it: 130, 143 or 129; None if nothing did.
    """

    exit_code: int | None = None


_stops: list[Stop] = []
"""Of the blocks of `stoppable` that the process is in, the innermost last."""


@contextmanager
def unturned() -> Iterator[None]:
    """Inside the block an error into which a library turned an interrupt is a KeyboardInterrupt again.

    Else a run that was stopped would be recorded as one that failed, and could not go on.
    """
    try:
        yield
    except Exception as error:
        if any(stop.exit_code is not None for stop in _stops) or _is_of_interrupt(error):
            raise KeyboardInterrupt from error
        raise


def _is_of_interrupt(error: BaseException | None) -> bool:
    """Whether an error was raised by or while an interrupt was handled."""
    behind, seen = [error], set()
    while behind:
        error = behind.pop()
        if isinstance(error, KeyboardInterrupt):
            return True
        if error is not None and id(error) not in seen:
            seen.add(id(error))
            behind += [error.__cause__, error.__context__]
    return False


@contextmanager
def stoppable(last: bool = False) -> Iterator[Stop]:
    """Inside the block every one of the signals is a KeyboardInterrupt, which ends the block in one line.

    So whatever cleans up after Ctrl-C cleans up after the others. A signal that was ignored before (`nohup`)
    stays ignored. An error into which a library turned the interrupt counts as the interrupt.

    Args:
        last: Nothing but the end of the process follows the block: once stopped, no signal disturbs it.
    """
    stop, heard = Stop(), -float("inf")

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal heard
        stop.exit_code = 128 + number
        if time.monotonic() - heard > _ENDING_SECONDS:
            heard = time.monotonic()
            raise KeyboardInterrupt

    before = {}
    if threading.current_thread() is threading.main_thread():  # Python heeds signals in no other
        before = {
            number: signal.signal(number, interrupt)
            for number in (getattr(signal, name) for name in _NAMES if hasattr(signal, name))
            if signal.getsignal(number) not in (signal.SIG_IGN, None)
        }
    _stops.append(stop)
    try:
        yield stop
        stop.exit_code = None  # what came to its end was not stopped
    except BaseException as error:
        if stop.exit_code is None and not isinstance(error, KeyboardInterrupt):
            raise
        stop.exit_code = stop.exit_code or 128 + signal.SIGINT
        print("bench: stopped; the same command goes on from here", file=sys.stderr, flush=True)
    finally:
        _stops.remove(stop)
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if last and stop.exit_code else handler)
