"""Many runs at a time: `bench sweep` and `bench tune`."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bench.commands.costing import print_costs
from bench.commands.formats import Format, Row, add_format, drawn, plain, write
from bench.commands.parser import (
    Parser,
    add_method_and_task,
    add_option,
    add_run_arguments,
    errors,
    folder,
    output,
)
from bench.errors import BenchError, Diverged, UsageError
from bench.runs import registry, resolution
from bench.runs.plan import Plan
from bench.runs.resolution import resolve
from bench.settings import build
from bench.sweep.workers import Cluster

if TYPE_CHECKING:
    from bench.sweep.sweep import Outcome
    from bench.sweep.tune import Tuning


_LISTS = ("methods", "tasks", "seeds", "preset", "members")
"""Flags of a sweep that are the keys of a block of a grid."""


def sweep(arguments: list[str]) -> int:
    """Runs every cell of a grid; returns the exit code of the worst."""
    if arguments[:1] == ["status"]:
        return _status(arguments[1:])
    tables, rest = _tables(arguments)
    chosen = _sweep_parser().parse_args(rest)

    from bench.sweep.cells import write_plan
    from bench.sweep.sweep import distinct

    _pin_threads(chosen)
    cells, twice = distinct(_planned(chosen, tables))
    if twice is not None:
        errors.print(twice, soft_wrap=True)
    if chosen.dry_run:
        return print_costs(cells, chosen.workers, chosen.threads, chosen.format)
    with _on_workers(chosen) as run:
        for cell in cells:  # what can be refused is told before hours are spent on the others
            try:
                resolve(cell)
            except UsageError as error:
                errors.print(f"{cell}: refused: {error}", soft_wrap=True)
        write_plan(Path(chosen.out), cells)
        outcomes = run(cells) if run else _one_after_another(cells)
    rows = [_result(outcome) for outcome in outcomes]
    if chosen.format == "table":
        errors.print(drawn(rows, errors.width, f"{len(cells)} cells", without=("directory",)))
        for directory in dict.fromkeys(o.directory for o in outcomes if o.record is not None):
            output.print(str(directory), soft_wrap=True)
    else:
        write(rows, chosen.format, aside=("directory",))
    return _exit_code({outcome.status for outcome in outcomes})


def _sweep_parser() -> Parser:
    parser = Parser(
        "bench sweep",
        description="Run every cell of a grid, and go on after one that fails. The grid is a file, or the "
        "product of --methods, --tasks, --seeds, --preset, --members and of settings of methods, tasks and "
        "trainer, --method.NAME VALUES, --task.NAME VALUES and --trainer.NAME VALUES. Values stand with "
        "commas or blanks between them. "
        "`bench sweep status DIR` shows how the last sweep of a folder stands.",
    )
    parser.add_argument(
        "--grid",
        type=str | None,
        default=None,
        help="YAML: methods, tasks, seeds, preset, members, and settings under method, task and trainer; "
        "each a value or a list, of which the product is run; or a list of such blocks",
    )
    for name, help in (
        ("methods", "names of methods, or package.module:Class: mfvi,radial"),
        ("tasks", "names of tasks, or package.module:Class"),
        ("seeds", "seeds, 0 unless given: 0-2 is 0, 1 and 2"),
        ("preset", "smoke, standard or paper; standard unless given"),
        ("members", "independent copies to fit; null, what the method's name says, unless given"),
    ):
        parser.add_argument(f"--{name}", nargs="+", type=str, default=None, help=help)
    _add_workers(parser)
    add_run_arguments(parser)
    add_option(
        parser,
        "force",
        help="run failed cells again, and replace finished runs whose preset has changed since",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="tell what the grid will cost, from a few steps of every cell; write nothing",
    )
    add_format(parser)
    return parser


def _planned(chosen: Any, tables: dict[str, dict[str, list[Any]]]) -> list[Plan]:
    """The cells of the grid that a file or the flags describe, with the flags that all of them share."""
    from bench.sweep.sweep import cells, read

    common = {name: chosen[name] for name in ("out", "data_dir", "threads", "force")}
    given = {name: chosen[name] for name in _LISTS if chosen[name] is not None} | tables
    if chosen.grid is not None and given:
        raise UsageError(f"--grid and --{next(iter(given))}: give a file or flags, not both")
    if chosen.grid is not None:
        return read(Path(chosen.grid), **common)
    if "methods" not in given or "tasks" not in given:
        raise UsageError("--grid, or --methods and --tasks, is required")
    block = {name: _values(name, values) for name, values in given.items() if name in _LISTS} | tables
    try:
        return cells(block, **common)
    except UsageError as error:
        raise UsageError(f"--{str(error).removeprefix('--')}") from None


def _result(outcome: Outcome) -> Row:
    """What became of a cell."""
    record, refused = outcome.record, "" if outcome.status == "failed" else "refused: "
    return {
        "cell": str(outcome.cell),
        "preset": outcome.cell.preset,
        "status": f"{refused}{outcome.refusal}" if record is None else record.reason or record.status,
        "main metric": record.task.main_metric if record else None,
        "value": record.metrics.get(record.task.main_metric) if record else None,
        "directory": str(outcome.directory) if record else "",
    }


def _add_workers(parser: Parser) -> None:
    """Adds the flags that say where cells run."""
    parser.add_argument(
        "--workers",
        type=str | None,
        default=None,
        help="where cells run, each on --threads cores, 1 unless given. N: so many processes of this machine "
        "at a time, each on one of its accelerators if there are any; ray or ray://HOST:PORT: a cluster of "
        "Ray; slurm: jobs by submitit. Without it this process runs one cell after another",
    )
    parser.add_settings(Cluster, "cluster")
    parser.add_argument(
        "--retries",
        type=int,
        default=1,
        help="how often a cell whose worker process died is tried again, from its checkpoint",
    )


def _pin_threads(chosen: Any) -> None:
    """Cells on workers have one thread unless given: their numbers depend on it, and must on no machine."""
    if chosen.workers is not None and chosen.threads is None:
        chosen.threads = 1


@contextmanager
def _on_workers(chosen: Any) -> Iterator[Callable[[list[Plan]], list[Outcome]] | None]:
    """What runs cells on the workers that the flags name, inside the block; None if they name none."""
    if chosen.retries < 0:
        raise UsageError(f"--retries {chosen.retries}: must be 0 or more")
    if chosen.workers is None:
        yield None
        return

    from bench.commands.sweep_view import watched
    from bench.sweep.dispatch import chosen_workers, run_all

    cluster = build(Cluster, vars(chosen.cluster), "cluster")
    workers = chosen_workers(chosen.workers, chosen.threads, cluster, Path(chosen.out))
    with closing(workers), watched(errors) as view:
        yield lambda cells: run_all(cells, workers, chosen.retries, view.look)


def _one_after_another(cells: list[Plan]) -> list[Outcome]:
    """Runs cells in this process."""
    from bench.runs.progress import shown
    from bench.sweep.cells import Note
    from bench.sweep.sweep import run_cell, settled

    outcomes = []
    for number, cell in enumerate(cells, 1):
        with shown(errors, f"{number} of {len(cells)}: {cell}") as observer:
            if (outcome := settled(cell)) is None:
                note = Note.of(cell)
                note.forget()
                outcome = run_cell(cell, (observer, note.observe))
            if outcome.refusal is not None and outcome.directory is not None:
                Note.of(cell).write_state("refused", str(outcome.refusal))
            outcomes.append(outcome)
            observer("end", {"status": outcome.status})
    return outcomes


def _exit_code(states: set[str]) -> int:
    if states & {"failed", "refused", "damaged"}:
        return BenchError.exit_code
    return Diverged.exit_code if "diverged" in states else 0


def _tables(arguments: list[str]) -> tuple[dict[str, dict[str, list[Any]]], list[str]]:
    """Settings of methods, tasks and the trainer, each with its values, and the other arguments."""
    tables: dict[str, dict[str, list[Any]]] = {}
    rest: list[str] = []
    taking: list[Any] | None = None
    for argument in arguments:
        flag, has_value, value = argument.partition("=")
        table, dot, name = flag.removeprefix("--").partition(".")
        if argument.startswith("--"):
            taking = None
        if argument.startswith("--") and dot and table in ("method", "task", "trainer"):
            taking = tables.setdefault(table, {}).setdefault(name, [])
            taking += map(_scalar, _words([value] if has_value else []))
        elif taking is not None:
            taking += map(_scalar, _words([argument]))
        else:
            rest.append(argument)
    return tables, rest


def _words(given: list[str]) -> list[str]:
    return [word for text in given for word in text.split(",") if word]


def _scalar(word: str) -> Any:
    """A value as JSON has it: a number, true, false, null; else the word."""
    try:
        value = json.loads(word)
    except ValueError:
        return word
    return word if isinstance(value, list | dict) else value


def _values(name: str, given: list[str]) -> list[Any]:
    """The values of a flag: names, or numbers of which 0-2 is 0, 1 and 2."""
    words = _words(given)
    if name == "seeds":
        found: list[Any] = []
        for word in words:
            ends = re.fullmatch(r"(\d+)-(\d+)", word)
            found += range(int(ends[1]), int(ends[2]) + 1) if ends else [_scalar(word)]
        return found
    return [_scalar(word) for word in words] if name == "members" else words


def _status(arguments: list[str]) -> int:
    """Shows how the last sweep of a folder stands; returns the exit code that it has so far."""
    parser = Parser(
        "bench sweep status",
        description="Show how each cell of the last sweep of a folder stands, begun or not; "
        "`bench runs` lists the runs of all sweeps.",
    )
    parser.add_argument("DIR", nargs="?", type=str, default="runs", help="--out of the sweep; else runs")
    add_format(parser)
    chosen = parser.parse_args(arguments)

    from bench.commands.sweep_view import share_of, summary
    from bench.runs.progress import duration
    from bench.sweep.cells import standings

    found = standings(Path(chosen.DIR))
    rows: list[Row] = [
        {
            "cell": each.cell,
            "preset": each.preset,
            "state": each.state,
            "progress": each.share,
            "seconds left": each.left,
            "main metric": each.record.task.main_metric if each.record else None,
            "value": each.value,
            "seconds": each.record.seconds if each.record else None,
            "directory": str(each.directory or ""),
            "note": each.reason or each.what,
            "log": str(each.log or ""),
        }
        for each in found
    ]
    if chosen.format != "table":
        write(rows, chosen.format, aside=("directory", "note", "log"))
    else:
        rows = [
            {
                **row,
                "progress": None if each.share is None else f"{int(100 * each.share)} %",
                "seconds left": None if each.left is None else duration(each.left),
            }
            for row, each in zip(rows, found, strict=True)
        ]
        title = f"{summary(found)}; {int(100 * share_of(found))} %"
        aside = ("directory", "note", "log", "preset")
        output.print(drawn(rows, output.width, title, without=aside))
        for each in found:
            if each.reason or each.log is not None:
                words = [each.cell, each.reason or each.state, f"log {each.log}" if each.log else ""]
                output.print(plain(": ".join(word for word in words if word)), soft_wrap=True)
    return _exit_code({each.state for each in found})


_OWN_DATA = ("own_table",)
"""Tasks whose settings name the data that a search is on."""


def tune(arguments: list[str]) -> None:
    """Chooses settings by validation data, within a budget."""
    parser = _tune_parser()
    if own := [word for word in arguments if word in _OWN_DATA]:
        entry = registry.task(own[0])
        parser.add_settings(entry.cls.settings_class, "task", entry.fixed)
    chosen = parser.parse_args(arguments)
    registry.refuse_unknown(chosen.METHOD, chosen.TASK)

    from bench.runs.progress import shown
    from bench.sweep.edges import edges
    from bench.sweep.tune import OTHERWISE, Sampler, criterion_of, no_gain, result_path, unequal_budgets
    from bench.sweep.tune import tune as search

    registry.import_own(chosen.METHOD, chosen.TASK)
    registry.method(chosen.METHOD), registry.task(chosen.TASK)  # before a warning that speaks of them
    if chosen.round < 1 or (chosen.round > 1 and chosen.search == "random"):
        raise UsageError(f"--round {chosen.round}: must be 1 or more, and 1 unless with --search tpe")
    sampler = Sampler(name=chosen.search, round=chosen.round)
    _pin_threads(chosen)
    options = {name: chosen[name] for name in ("seed", "preset", "out", "data_dir", "threads", "force")}
    if own:
        usual = parser.get_defaults()["task"]
        options["task_settings"] = {k: v for k, v in vars(chosen.task).items() if v != usual[k]}
    plan = build(Plan, {"method": chosen.METHOD, "task": chosen.TASK, **options})
    is_usual = chosen.criterion in (None, criterion_of(chosen.TASK))
    to = Path(chosen.to or (resolution.TUNED if is_usual else OTHERWISE))
    unequal = unequal_budgets(plan, chosen.budget, to)
    if unequal and chosen.preset != "smoke":
        errors.print(f"bench: warning: {unequal}", soft_wrap=True)
    with _on_workers(chosen) as run:
        result = search(plan, chosen.budget, to, partial(shown, errors), sampler, run, chosen.criterion)
    _print_tried(result, chosen.format)
    if chosen.preset == "smoke":
        errors.print("a smoke search proves the pipe and measures nothing: no result is written")
    else:
        path = result_path(plan, to)
        for name, end in edges(result).items():
            errors.print(
                f"bench: note: {name} {result.chosen[name]} is at the {end} end of its range: the best may "
                f"lie outside; widen it in SEARCH of {result.method}",
                soft_wrap=True,
            )
        if gain := no_gain(result):
            errors.print(f"bench: note: {gain}", soft_wrap=True)
        if own:
            errors.print(plain(f"on all training rows: {_with_the_choice(plan, result)}"), soft_wrap=True)
        (output if chosen.format == "table" else errors).print(str(path), soft_wrap=True)


def _with_the_choice(plan: Plan, result: Tuning) -> str:
    """The command that runs what a search on own data has chosen."""
    chosen = result.configurations[result.chosen_number].settings
    words = ["bench", "run", plan.method, plan.task]
    for flag, values in (("task", plan.task_settings), ("method", chosen)):
        for name, value in values.items():
            words += [f"--{flag}.{name}", str(value)]
    return shlex.join(words)


def _tune_parser() -> Parser:
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
    add_option(parser, "seed", help="seed of the draws and of every run")
    add_option(
        parser,
        "preset",
        type=Literal["smoke", "standard"],
        help="smoke proves the pipe and writes no result",
    )
    parser.add_argument(
        "--search",
        type=Literal["random", "tpe"],
        default="random",
        help="random: each configuration drawn by itself; tpe: the first 10 too, the later ones by a "
        "tree-structured Parzen estimator given the earlier ones",
    )
    parser.add_argument(
        "--round",
        type=int,
        default=1,
        help="tpe: configurations drawn at a time, which workers run side by side; part of the search",
    )
    _add_workers(parser)
    add_run_arguments(parser)
    parser.add_argument(
        "--to",
        type=folder,
        default=None,
        help="folder of results; unless given the one that bench run reads",
    )
    parser.add_argument(
        "--criterion",
        type=str | None,
        default=None,
        help="validation, or a metric of TASK, which looks at test data or at a reference; unless given what "
        "TASK says. bench run reads no result of another criterion than the task's",
    )
    add_option(
        parser,
        "force",
        help="run failed configurations and those of another source again, replace any earlier result",
    )
    add_format(parser)
    return parser


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _print_tried(result: Tuning, form: Format) -> None:
    """Prints the configurations that a search has tried, with what each gave on validation data."""
    criterion = result.criterion
    direction = "higher" if criterion.higher_is_better else "lower"
    title = (
        f"{result.method} on {result.task}: {criterion.metric} on {criterion.on} data, {direction} is better"
    )
    rows: list[Row] = [
        {
            "number": f"{c.number} (chosen)" if c.number == result.chosen_number else str(c.number),
            "settings": c.settings,
            "status": c.reason or c.status,
            criterion.metric: c.value,
            "further seeds": [_short(v) for v in c.others] or None if form == "table" else c.others,
            "s": c.seconds,
            "training steps": c.steps,
        }
        for c in result.configurations
    ]
    if form == "table":
        errors.print(drawn(rows, errors.width, title))
    else:
        write(rows, form)
