"""What the cells of a grid will cost: `bench sweep --dry-run`.

Cells that differ in nothing but their seed cost the same, and one of them is rehearsed
(`bench.runs.forecast`), in a process of its own, `python -P -m bench.sweep.costs`: so the largest memory of
one is not that of another, and one that dies takes nothing with it. Nothing is written.
"""

from __future__ import annotations

import heapq
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.errors import BenchError
from bench.runs import resolution
from bench.runs.forecast import Forecast, forecast
from bench.runs.plan import Plan
from bench.settings import build
from bench.sweep.sweep import on_one_device, settled
from bench.sweep.worker import message
from bench.sweep.workers import environment


@dataclass(frozen=True)
class Cost:
    """What cells that differ only in their seed will cost.

    Attributes:
        cells: The plans.
        done: How many are finished.
        to_run: How many are to be run: the others are finished or refused.
        forecast: Of one of the others; None if there is no other, or none can be made.
        reason: Why none can be made.
        refused: Whether that is because the cells will be refused.
    """

    cells: Sequence[Plan]
    done: int
    to_run: int
    forecast: Forecast | None = None
    reason: str = ""
    refused: bool = False

    @property
    def name(self) -> str:
        """The cells in words, without their seeds."""
        return str(self.cells[0]).removesuffix(f" seed {self.cells[0].seed}")

    @property
    def left(self) -> list[float]:
        """Seconds of every run that is to be made, as far as they are known."""
        return [self.forecast.seconds] * self.to_run if self.forecast else []

    @property
    def is_open(self) -> bool:
        """Whether something is to be run whose cost is not known, or not to its end."""
        return self.to_run > 0 and (self.forecast is None or self.forecast.unknown is not None)

    @property
    def note(self) -> str:
        """What is to be said beside the numbers."""
        words = []
        if self.reason:
            words.append(f"{'refused' if self.refused else 'cannot be told'}: {self.reason}")
        if self.forecast is not None and self.forecast.unknown is not None:
            words.append(f"cannot be told whole: {self.forecast.unknown}")
        if self.forecast is not None and self.forecast.may_stop:
            words.append("less if fits stop early")
        return "; ".join(words)


def alike(cells: Sequence[Plan]) -> list[list[Plan]]:
    """The cells, those together that differ only in their seed; in the order of the first of each."""
    groups: dict[str, list[Plan]] = {}
    for cell in cells:
        groups.setdefault(repr(replace(cell, seed=0)), []).append(cell)
    return list(groups.values())


def costs(cells: Sequence[Plan]) -> Iterator[Cost]:
    """What every group of cells that are `alike` costs; rehearses one of each that is not done."""
    for group in alike(cells):
        known = [settled(cell) for cell in group]
        done = sum(outcome is not None and outcome.record is not None for outcome in known)
        left = [cell for cell, outcome in zip(group, known, strict=True) if outcome is None]
        refusals = [str(o.refusal) for o in known if o is not None and o.record is None]
        cost = Cost(group, done, len(left), None, *((refusals[0], True) if refusals else ()))
        yield replace(cost, **_rehearsed(left[0])) if left else cost


def _rehearsed(cell: Plan) -> dict[str, Any]:
    """A forecast made by another process, or why there is none: fields of a `Cost`."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "bench.sweep.costs"],
        input=message(on_one_device(cell), Path(os.devnull)),
        capture_output=True,
        text=True,
        env={**os.environ, **(environment(cell.threads) if cell.threads is not None else {})},
        start_new_session=True,  # Ctrl-C reaches this process alone, which then kills the other
    )
    if done.returncode == 0:
        told = json.loads(done.stdout)
        return {"forecast": Forecast(**told)} if "seconds" in told else told
    last = (done.stderr.strip().splitlines() or ["no word of it"])[-1]
    how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
    return {"reason": f"the rehearsal ended with {how}: {last}"}


def finish(seconds: Sequence[float], workers: int) -> float:
    """Seconds until all runs are made by so many workers, each of which takes the next when it is free.

    >>> finish([4, 3, 2, 1], workers=2)
    5.0
    """
    ends = [0.0] * workers
    for one in seconds:
        heapq.heapreplace(ends, ends[0] + one)
    return max(ends)


def main() -> int:
    """Rehearses the cell that standard input names, as `worker.message` writes it; prints its cost."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    told = json.loads(sys.stdin.read())
    try:
        with resolution.untuned() if told["untuned"] else nullcontext():
            print(json.dumps(asdict(forecast(build(Plan, told["cell"])))), file=answer)
    except BenchError as error:
        print(json.dumps({"reason": str(error), "refused": True}), file=answer)
    answer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
