"""What runs will cost: `bench run --dry-run` and `bench sweep --dry-run`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from bench.commands.formats import Cell, Format, Row, drawn, plain, write
from bench.commands.parser import errors, output
from bench.errors import BenchError
from bench.runs.plan import Plan

if TYPE_CHECKING:
    from bench.sweep.costs import Cost


def print_cost(plan: Plan, form: Format) -> None:
    """Prints what a run will cost; makes none."""
    from bench.runs.forecast import forecast

    cost = forecast(plan)
    if cost.unknown:
        errors.print(f"bench: cannot tell the whole: {cost.unknown}", soft_wrap=True)
    rows: list[Row] = [
        {"what": "weights of the network", "value": cost.weights},
        {"what": "trained parameters", "value": cost.parameters},
        {"what": "fits", "value": cost.fits},
        {"what": "training steps", "value": cost.steps},
        {"what": "seconds", "value": round(cost.seconds, 1)},
        {"what": "seconds of training", "value": round(cost.training, 1)},
        {"what": "seconds of prediction", "value": round(cost.prediction, 1)},
        {"what": "MiB of memory", "value": round(cost.memory / 2**20)},
        {"what": "may stop earlier", "value": "yes" if cost.may_stop else "no"},
    ]
    if form == "table":
        output.print(drawn(rows, output.width, str(plan)))
    else:
        write(rows, form)


def print_costs(cells: list[Plan], workers: str | None, threads: int | None, form: Format) -> int:
    """Prints what the cells of a grid will cost, and all together; makes no run.

    Args:
        cells: No two of them the same run.
        workers: Where they would run, as `bench sweep --workers` has it.
        threads: Of each; None is torch's choice.
        form: Of the table.

    Returns:
        The exit code: that of an error if a cell is refused.
    """
    from bench.sweep.costs import alike, costs

    at_a_time = _at_a_time(workers, threads)
    told: list[Cost] = []
    for number, cost in enumerate(costs(cells), 1):
        told.append(cost)
        errors.print(f"{number} of {len(alike(cells))}: {cost.name}", soft_wrap=True)
    rows = [_row(cost) for cost in told]
    rows += [_sum(told, len(cells), number) for number in sorted({1, at_a_time})]
    if form == "table":
        shown: list[Row] = [
            {name: _hours(cell) if name.startswith("seconds") else cell for name, cell in row.items()}
            for row in rows
        ]
        output.print(drawn(shown, output.width, f"{len(cells)} cells", without=("preset", "note")))
        for row in rows:
            if row["note"]:
                output.print(plain(f"{row['cell']}: {row['note']}"), soft_wrap=True)
    else:
        write(rows, form)
    return BenchError.exit_code if any(cost.refused for cost in told) else 0


def _at_a_time(workers: str | None, threads: int | None) -> int:
    """How many cells run side by side, as far as the flags say it; warns if that is unknown or too many."""
    if workers is None:
        return 1
    if not workers.isdecimal():
        errors.print(f"--workers {workers}: how many cells it runs at a time is not known here")
        return 1
    number = max(1, int(workers))
    if (needed := number * (threads or 1)) > (there := os.cpu_count() or 1):
        errors.print(f"--workers {workers}: {needed} threads on {there} cores take longer than is told")
    return number


def _row(cost: Cost) -> Row:
    """What the runs that cost the same will cost."""
    forecast = cost.forecast
    return {
        "cell": cost.name,
        "preset": cost.cells[0].preset,
        "runs": len(cost.cells),
        "done": cost.done,
        "weights": forecast.weights if forecast else None,
        "parameters": forecast.parameters if forecast else None,
        "steps": forecast.steps if forecast else None,
        "MiB": round(forecast.memory / 2**20) if forecast else None,
        "seconds": round(forecast.seconds, 1) if forecast else None,
        "seconds left": None if cost.is_open and not forecast else round(sum(cost.left), 1),
        "note": cost.note,
    }


def _sum(told: list[Cost], runs: int, workers: int) -> Row:
    """What all runs will cost together, so many of them side by side."""
    from bench.sweep.costs import finish

    note = []
    if open_rows := sum(cost.is_open for cost in told):
        note.append(f"at least: {open_rows} of {len(told)} rows cannot be told whole")
    if any(cost.forecast and cost.forecast.may_stop for cost in told):
        note.append("less if fits stop early")
    left = [seconds for cost in told for seconds in cost.left]
    return {
        **dict.fromkeys(_row(told[0])),
        "cell": "all" if workers == 1 else f"all on {workers} workers",
        "preset": "",
        "runs": runs,
        "done": sum(cost.done for cost in told),
        "seconds left": round(finish(left, workers), 1),
        "note": "; ".join(note),
    }


def _hours(seconds: Cell) -> str | None:
    from bench.runs.progress import duration

    return duration(seconds) if isinstance(seconds, int | float) else None
