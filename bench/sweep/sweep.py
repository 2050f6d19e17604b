"""Sweeps: the cells of a grid, each of which is one run.

A grid is a YAML file of one block, or of a list of blocks:

    methods: [mfvi, radial]               # names, or package.module:Class
    tasks: split_digits
    seeds: [0, 1, 2]                      # 0 unless given
    preset: standard                      # smoke, standard or paper
    members: [null, 5]                    # null is what the method's name says
    method: {learning_rate: [1e-3, 1e-2]} # settings of every method of the block
    task: {epochs: 10}                    # settings of every task of the block
    trainer: {stacked: true}              # options of Lightning's Trainer; one process runs a cell

Every value may be a list; the cells of a block are the product of all its lists, the seeds innermost. A cell
is a `bench.runs.plan.Plan`: plain data, so that cells may be run anywhere and in any order.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import pydantic
import torch
from pydantic import BeforeValidator, Field

from bench.errors import BenchError, DataError, OutputError, UsageError
from bench.runs import holdings, runner
from bench.runs.plan import Plan
from bench.runs.records import Record, read_record
from bench.runs.registry import nearest
from bench.runs.resolution import PRESETS, Choice, resolve
from bench.settings import Count, Seed, build, read_yaml


@dataclass(frozen=True)
class Outcome:
    """What became of a cell.

    Attributes:
        cell: Its plan.
        directory: Directory of its run; None if there can be none.
        record: Its record; None if the cell was refused, or the process that ran it died.
        refusal: Why there is none: a UsageError or DataError if the cell was refused.
        began: Whether the task ran in this process, be it that a method then refused one of its problems.
    """

    cell: Plan
    directory: Path | None
    record: Record | None
    refusal: BenchError | None = None
    began: bool = False

    @property
    def status(self) -> Literal["completed", "diverged", "failed", "refused"]:
        """The record's status; without a record refused, or failed if the process that ran the cell died."""
        if self.record is None:
            return "refused" if isinstance(self.refusal, UsageError | DataError) else "failed"
        return self.record.status


# -------------------------------------------------------------------------------------------------- grids


Value = TypeVar("Value")
Several = Annotated[
    list[Value], BeforeValidator(lambda v: v if isinstance(v, list) else [v]), Field(min_length=1)
]
"""A value or a list of values."""
Table = Annotated[dict[str, Several[str | int | float | bool | None]], BeforeValidator(lambda v: v or {})]
"""Settings by name, each a value or a list of values."""


class _Block(pydantic.BaseModel):
    """A block of a grid, as the file has it."""

    model_config = pydantic.ConfigDict(strict=True, extra="forbid", frozen=True)

    methods: Several[str]
    tasks: Several[str]
    seeds: Several[Seed] = [0]
    preset: Several[Literal["smoke", "standard", "paper"]] = ["standard"]
    members: Several[Count | None] = [None]
    method: Table = {}
    task: Table = {}
    trainer: Table = {}

    def cells(self) -> Iterator[dict[str, Any]]:
        """Fields of a plan, for every cell."""
        names = ("method", "task", "preset", "members", "method_settings", "task_settings", "trainer", "seed")
        lists = (self.methods, self.tasks, self.preset, self.members)
        tables = map(_products, (self.method, self.task, self.trainer))
        for values in itertools.product(*lists, *tables, self.seeds):
            yield dict(zip(names, values, strict=True))


_MUST_BE = {
    "methods": "a name",
    "tasks": "a name",
    "seeds": "0 or more, below 2^63",
    "preset": f"one of {', '.join(PRESETS)}",
    "members": "1 or more, or null",
    "method": "a value",
    "task": "a value",
    "trainer": "a value",
}
_OF_SEVERAL_PROCESSES = ("devices", "num_nodes", "strategy")
"""Options of the trainer that no cell has: the processes that they start would each be a whole sweep."""


def _products(table: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """Every combination of the values of a table of settings."""
    return [dict(zip(table, values, strict=True)) for values in itertools.product(*table.values())]


def read(path: Path, **common: Any) -> list[Plan]:
    """The cells of a grid file.

    Args:
        path: The file.
        common: Fields that all plans have in common: out, data_dir, threads, force.

    Raises:
        UsageError: If it cannot be read or is no grid; one line that names the key.
    """
    grid = read_yaml(path, "--grid")
    build(Plan, {"method": "", "task": "", **common})  # says which of them is wrong, not that the grid is
    try:
        return cells(grid, **common)
    except UsageError as error:
        raise UsageError(f"--grid {path}: {error}") from None


def cells(grid: Any, **common: Any) -> list[Plan]:
    """The cells of a grid, a block or a list of blocks; `common` as in `read`.

    Raises:
        UsageError: If it is no grid; one line that names the key.
    """
    blocks = grid if isinstance(grid, list) else [grid]
    if not blocks:
        raise UsageError("holds no block")
    found: list[Plan] = []
    for number, block in enumerate(blocks, 1):
        where = f"block {number}: " if len(blocks) > 1 else ""
        try:
            read_block = _Block.model_validate(block)
        except pydantic.ValidationError as error:
            raise UsageError(where + _first(error, block)) from None
        if several := [name for name in _OF_SEVERAL_PROCESSES if name in read_block.trainer]:
            raise UsageError(f"{where}trainer.{several[0]}: each cell of a sweep runs in one process")
        values = list(read_block.cells())
        found += [build(Plan, {**cell, **common}) for cell in values]
    return found


def distinct(plans: list[Plan]) -> tuple[list[Plan], str | None]:
    """The cells without those that are the run of an earlier one, and a sentence on these if there are any.

    Two cells are one run if they have one directory, as where one spells out what is its preset's anyway.
    """
    first: dict[Path | str, Plan] = {}
    again: list[tuple[Plan, Plan]] = []
    for plan in plans:
        try:
            run: Path | str = directory_of(plan)
        except UsageError:
            run = repr(plan)
        if (earlier := first.setdefault(run, plan)) is not plan:
            again.append((plan, earlier))
    if not again:
        return plans, None
    number = f"{len(again)} of {len(plans)} cells {'is' if len(again) == 1 else 'are'}"
    example = f"{again[0][0]} is that of {again[0][1]}"
    return list(first.values()), f"{number} the run of another cell, and made once: {example}"


def _first(error: pydantic.ValidationError, block: Any) -> str:
    """One line on the first thing that is wrong with a block."""
    first = error.errors()[0]
    if not first["loc"]:
        return f"must hold the keys {', '.join(_MUST_BE)}"
    key, *inside = first["loc"]
    match first["type"]:
        case "extra_forbidden" | "invalid_key":
            return f"unknown key {key}: {nearest(str(key), list(_MUST_BE))}"
        case "missing":
            return f"{key}: must be given"
    where, must_be = str(key), _MUST_BE[str(key)]
    if key in ("method", "task", "trainer"):
        if not inside or "[key]" in inside:
            return f"{key}: {block[key]}: must hold settings by name"
        where = f"{key}.{inside[0]}"
    if first["type"] == "too_short":
        return f"{where}: the list is empty"
    return f"{where}: {first['input']}: must be {must_be}, or a list of such"


# --------------------------------------------------------------------------------------------------- runs


def run_cell(cell: Plan, observers: tuple[runner.Observer, ...] = ()) -> Outcome:
    """Runs a cell, or finds its finished run; one that diverges, fails or is refused is told, not raised.

    Args:
        cell: The cell; its `force` runs a failed one again, and replaces a finished run that has the cell's
            name and other settings.
        observers: As those of `bench.run`.

    Raises:
        OutputError: If the results cannot be written: so it will be with every other cell.
    """
    if (known := settled(cell)) is not None:
        return known
    cell = on_one_device(cell)
    began: list[str] = []
    directory = directory_of(cell)
    try:
        record = runner.execute(cell, (*observers, lambda event, _: began.append(event))).record
    except OutputError:
        raise
    except BenchError as error:
        if isinstance(error, UsageError | DataError):
            return Outcome(cell, directory, None, error, bool(began))
        record = read_record(directory)  # diverged or failed
    return Outcome(cell, directory, record, began=bool(began))


def on_one_device(cell: Plan) -> Plan:
    """The cell as a sweep runs it: Lightning would start a process per device, each of them a whole sweep."""
    several = torch.cuda.device_count() > 1
    return replace(cell, trainer={**cell.trainer, "devices": 1}) if several else cell


def settled(cell: Plan) -> Outcome | None:
    """What is known of a cell before it runs: its finished run, or its refusal; None if it is to run."""
    directory: Path | None = None
    try:
        choice = resolve(cell)
        directory = cell.out / choice.directory(cell.seed)
        record = finished(directory, choice, cell.force)
    except BenchError as error:
        return Outcome(cell, directory, None, error)
    return None if record is None else Outcome(cell, directory, record)


def directory_of(cell: Plan) -> Path:
    """Directory of a cell's run.

    Raises:
        UsageError: If there can be none.
    """
    return cell.out / resolve(cell).directory(cell.seed)


def finished(directory: Path, choice: Choice, force: bool = False) -> Record | None:
    """The record of a finished run that need not be made again; None if there is none.

    Raises:
        UsageError: If there is one, but not of these settings: a preset has changed since.
    """
    if not (directory / "record.json").exists():
        return None
    record = read_record(directory)
    if not force and record.status != "failed":
        holdings.check(directory)
    now = [asdict(choice.method_settings), choice.method.members, asdict(choice.task_settings)]
    then = [record.method.settings, record.method.members, record.task.settings]
    if json.loads(json.dumps(now)) == then:
        return None if force and record.status == "failed" else record
    if not force:
        raise UsageError(f"{directory} holds a run with other settings; --force replaces it")
    return None
