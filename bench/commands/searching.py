"""Many runs at a time: `bench sweep` and `bench tune`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Literal

from bench import registry
from bench.commands.formats import Row, add_format, drawn, write
from bench.commands.parser import Parser, add_method_and_task, add_run_arguments, errors, folder, output
from bench.errors import BenchError, Diverged, UsageError
from bench.plan import Plan
from bench.settings import build


def sweep(arguments: list[str]) -> int:
    """Runs every cell of a grid; returns the exit code of the worst."""
    parser = Parser("bench sweep", description="Run every cell of a grid, and go on after one that fails.")
    parser.add_argument(
        "--grid",
        type=str,
        required=True,
        help="YAML: methods, tasks, seeds, preset, members, and settings under method and task; "
        "each a value or a list, of which the product is run; or a list of such blocks",
    )
    add_run_arguments(parser)
    parser.add_argument(
        "--force",
        action="store_true",
        help="run failed cells again, and replace finished runs whose preset has changed since",
    )
    add_format(parser)
    chosen = parser.parse_args(arguments)

    from bench.progress import shown
    from bench.sweep import distinct, read, run_cell

    common = {name: chosen[name] for name in ("out", "data_dir", "threads", "force")}
    cells, twice = distinct(read(Path(chosen.grid), **common))
    if twice is not None:
        errors.print(twice, soft_wrap=True)
    for cell in cells:  # what can be refused is told before hours are spent on the others
        try:
            cell.choice()
        except UsageError as error:
            errors.print(f"{cell}: refused: {error}", soft_wrap=True)
    outcomes = []
    for number, cell in enumerate(cells, 1):
        with shown(errors, f"{number} of {len(cells)}: {cell}") as observer:
            outcomes.append(run_cell(cell, (observer,)))
            observer("end", {"status": outcomes[-1].status})
    rows: list[Row] = []
    for outcome in outcomes:
        record = outcome.record
        rows.append(
            {
                "cell": str(outcome.cell),
                "preset": outcome.cell.preset,
                "status": f"refused: {outcome.refusal}" if record is None else record.reason or record.status,
                "main metric": record.task.main_metric if record else None,
                "value": record.metrics.get(record.task.main_metric) if record else None,
                "directory": str(outcome.directory) if record else "",
            }
        )
    if chosen.format == "table":
        errors.print(drawn(rows, errors.width, f"{len(cells)} cells", without=("directory",)))
        for directory in dict.fromkeys(o.directory for o in outcomes if o.record is not None):
            output.print(str(directory), soft_wrap=True)
    else:
        write(rows, chosen.format, aside=("directory",))
    statuses = {outcome.status for outcome in outcomes}
    if statuses & {"failed", "refused"}:
        return BenchError.exit_code
    return Diverged.exit_code if "diverged" in statuses else 0


def tune(arguments: list[str]) -> None:
    """Chooses settings by validation data, within a budget."""
    parser = Parser(
        "bench tune", description="Choose settings for METHOD on TASK by validation data, within a budget."
    )
    add_method_and_task(parser)
    parser.add_argument(
        "--budget",
        type=int,
        required=True,
        help="configurations to try, the untuned one among them; the same for every method of a task",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws and of every run")
    parser.add_argument(
        "--preset",
        type=Literal["smoke", "standard"],
        default="standard",
        help="smoke proves the pipe and writes no result",
    )
    add_run_arguments(parser)
    parser.add_argument(
        "--to",
        type=folder,
        default=str(registry.TUNED),
        help="folder of results; bench run reads the default",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="run failed configurations and those of another source again, replace any earlier result",
    )
    add_format(parser)
    chosen = parser.parse_args(arguments)
    registry.refuse_unknown(chosen.METHOD, chosen.TASK)

    from bench.progress import shown
    from bench.tune import tune as search
    from bench.tune import unequal_budgets

    registry.import_own(chosen.METHOD, chosen.TASK)
    registry.method(chosen.METHOD), registry.task(chosen.TASK)  # before a warning that speaks of them
    options = {name: chosen[name] for name in ("seed", "preset", "out", "data_dir", "threads", "force")}
    plan = build(Plan, {"method": chosen.METHOD, "task": chosen.TASK, **options})
    unequal = unequal_budgets(chosen.METHOD, chosen.TASK, chosen.budget, Path(chosen.to))
    if unequal and chosen.preset != "smoke":
        errors.print(f"bench: warning: {unequal}", soft_wrap=True)
    result = search(plan, chosen.budget, Path(chosen.to), partial(shown, errors))
    criterion = result.criterion
    direction = "higher" if criterion.higher_is_better else "lower"
    title = f"{result.method} on {result.task}: {criterion.metric} on validation data, {direction} is better"
    rows: list[Row] = [
        {
            "number": f"{c.number} (chosen)" if c.number == result.chosen_number else str(c.number),
            "settings": c.settings,
            "status": c.reason or c.status,
            criterion.metric: c.value,
            "s": c.seconds,
            "training steps": c.steps,
        }
        for c in result.configurations
    ]
    is_table = chosen.format == "table"
    if is_table:
        errors.print(drawn(rows, errors.width, title))
    else:
        write(rows, chosen.format)
    if chosen.preset == "smoke":
        errors.print("a smoke search proves the pipe and measures nothing: no result is written")
    else:
        path = registry.tuned_path(chosen.METHOD, chosen.TASK, Path(chosen.to))
        (output if is_table else errors).print(str(path), soft_wrap=True)
