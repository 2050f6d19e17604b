"""What runs will cost: `bench run --dry-run` and `bench sweep --dry-run`."""

from __future__ import annotations

import os

from bench.commands.formats import Format, Row, drawn, plain, write
from bench.commands.parser import errors, output
from bench.errors import BenchError
from bench.runs.plan import Plan


def tell_cost(plan: Plan, form: Format) -> None:
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


def tell_costs(cells: list[Plan], workers: str | None, threads: int | None, form: Format) -> int:
    """Prints what the cells of a grid will cost, and all together; makes no run.

    Args:
        cells: No two of them the same run.
        workers: Where they would run, as `bench sweep --workers` has it.
        threads: Of each; None is torch's choice.
        form: Of the table.

    Returns:
        The exit code: that of an error if a cell is refused.
    """
    from bench.sweep.costs import alike, costs, finish

    at_a_time = 1
    if workers is not None and workers.isdecimal():
        at_a_time = max(1, int(workers))
        if (needed := at_a_time * (threads or 1)) > (there := os.cpu_count() or 1):
            errors.print(f"--workers {workers}: {needed} threads on {there} cores take longer than is told")
    elif workers is not None:
        errors.print(f"--workers {workers}: how many cells it runs at a time is not known here")
    told = []
    for number, cost in enumerate(costs(cells), 1):
        told.append(cost)
        errors.print(f"{number} of {len(alike(cells))}: {cost.name}", soft_wrap=True)
    rows: list[dict[str, str | int | float | None]] = [
        {
            "cell": cost.name,
            "preset": cost.cells[0].preset,
            "runs": len(cost.cells),
            "done": cost.done,
            "weights": cost.forecast.weights if cost.forecast else None,
            "parameters": cost.forecast.parameters if cost.forecast else None,
            "steps": cost.forecast.steps if cost.forecast else None,
            "MiB": round(cost.forecast.memory / 2**20) if cost.forecast else None,
            "seconds": round(cost.forecast.seconds, 1) if cost.forecast else None,
            "seconds left": None if cost.is_open and not cost.forecast else round(sum(cost.left), 1),
            "note": cost.note,
        }
        for cost in told
    ]
    note = []
    if open_rows := sum(cost.is_open for cost in told):
        note.append(f"at least: {open_rows} of {len(told)} rows cannot be told whole")
    if any(cost.forecast and cost.forecast.may_stop for cost in told):
        note.append("less if fits stop early")
    left = [seconds for cost in told for seconds in cost.left]
    for number in sorted({1, at_a_time}):
        row: dict[str, str | int | float | None] = dict.fromkeys(rows[0])
        row |= {"cell": "all" if number == 1 else f"all on {number} workers", "preset": ""}
        row |= {"runs": len(cells), "done": sum(cost.done for cost in told)}
        rows.append(row | {"seconds left": round(finish(left, number), 1), "note": "; ".join(note)})
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


def _hours(seconds: str | float | None) -> str | None:
    from bench.runs.progress import duration

    return duration(seconds) if isinstance(seconds, int | float) else None
