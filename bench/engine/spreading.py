"""Independent fits spread over the processes of a run: each fit is made by one process, on its own device.

So its numbers are those of a run on one device. The processes work round by round, a fit each (or several
side by side), and after every round each has all fits of the round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bench.contract import Method, Problem
from bench.engine import checkpoints
from bench.system.processes import from_each, ranks


@dataclass(frozen=True)
class FitRequest:
    """A fit to be made.

    Attributes:
        count: Its number in the run, from 0.
        stage: Of the run.
        problem: What is fitted.
        start: The fit to go on from.
    """

    count: int
    stage: str
    problem: Problem
    start: Method | None


@dataclass(frozen=True)
class Fitted:
    """A fit that was made.

    Attributes:
        method: The fit itself, on the CPU.
        fit: The record's entry.
        was_there: Whether an earlier start of the run has made it.
        is_told: Whether the observers of this process have seen its epochs.
    """

    method: Method
    fit: dict[str, Any]
    was_there: bool
    is_told: bool = True


def spread(
    requests: Sequence[FitRequest],
    together: int,
    fit: Callable[[Sequence[FitRequest]], Iterator[Fitted]],
    new: Callable[[FitRequest], Method],
) -> Iterator[Fitted]:
    """Fits, in the order of their requests, each made by one process and given to all.

    Args:
        requests: What to fit.
        together: How many of them a process makes in a round.
        fit: Makes some of them, in a process that is alone.
        new: The unfitted method of a request, in every process the same.
    """
    rank, world = ranks()
    groups = [requests[i : i + together] for i in range(0, len(requests), together)]
    for low in range(0, len(groups), world):
        some = groups[low : low + world]
        mine: list[Fitted] = []

        def work(
            some: list[Sequence[FitRequest]] = some, mine: list[Fitted] = mine
        ) -> list[tuple[Any, bool]]:
            mine += fit(some[rank]) if rank < len(some) else []
            return [(checkpoints.content(f.method, f.fit), f.was_there) for f in mine]

        made = from_each(work)
        for number, group in enumerate(some):
            if number == rank:
                yield from mine
                continue
            for request, (content, was_there) in zip(group, made[number], strict=True):
                method = new(request)
                yield Fitted(method, checkpoints.give(method, content), was_there, is_told=False)
