"""Sweeps: the cells of a grid, each of which is one run.

A grid is a YAML file of one block, or of a list of blocks:

    methods: [mfvi, radial]               # names, or package.module:Class
    tasks: split_digits
    seeds: [0, 1, 2]                      # 0 unless given
    preset: standard                      # smoke, standard or paper
    members: [null, 5]                    # null is what the method's name says
    method: {learning_rate: [1e-3, 1e-2]} # settings of every method of the block
    task: {epochs: 10}                    # settings of every task of the block

Every value may be a list; the cells of a block are the product of all its lists, the seeds innermost. A cell
is plain data and `run_cell` needs nothing but it, so that cells may be run anywhere and in any order.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from bench import registry, runner
from bench.errors import BenchError, DataError, OutputError, UsageError
from bench.records import Record, read_record
from bench.registry import PRESETS, Choice, nearest

_KEYS = ("methods", "tasks", "seeds", "preset", "members", "method", "task")


@dataclass(frozen=True)
class Cell:
    """One run of a sweep, by name."""

    method: str
    task: str
    seed: int
    preset: str
    members: int | None
    method_settings: Mapping[str, Any]
    task_settings: Mapping[str, Any]

    def choice(self) -> Choice:
        """The method and the task with their settings.

        Raises:
            UsageError: If a name or a setting is wrong, or the method lacks what the task needs.
        """
        return registry.choose(
            self.method, self.task, self.preset, self.method_settings, self.task_settings, self.members
        )

    def __str__(self) -> str:
        words = [self.method, self.task]
        words += [f"{name}={value}" for name, value in {**self.method_settings, **self.task_settings}.items()]
        words += [f"members={self.members}"] if self.members is not None else []
        return " ".join([*words, f"seed {self.seed}"])


@dataclass(frozen=True)
class Outcome:
    """What became of a cell.

    Attributes:
        cell: The cell.
        directory: Directory of its run; None if there can be none.
        record: Its record; None if the cell was refused.
        refusal: Why it was refused.
        began: Whether the task ran in this process, be it that a method then refused one of its problems.
    """

    cell: Cell
    directory: Path | None
    record: Record | None
    refusal: BenchError | None = None
    began: bool = False

    @property
    def status(self) -> str:
        """The record's status: completed, diverged or failed; or refused."""
        return "refused" if self.record is None else self.record.status


# -------------------------------------------------------------------------------------------------- grids


def read(path: Path) -> list[Cell]:
    """The cells of a grid file.

    Raises:
        UsageError: If it cannot be read or is no grid; one line that names the key.
    """
    try:
        grid = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"--grid {path}: {' '.join(str(error).split())}") from None
    try:
        return cells(grid)
    except UsageError as error:
        raise UsageError(f"--grid {path}: {error}") from None


def cells(grid: Any) -> list[Cell]:
    """The cells of a grid, a block or a list of blocks, each cell once.

    Raises:
        UsageError: If it is no grid; one line that names the key.
    """
    blocks = grid if isinstance(grid, list) else [grid]
    if not blocks:
        raise UsageError("holds no block")
    found: dict[str, Cell] = {}
    for number, block in enumerate(blocks, 1):
        try:
            found |= {repr(cell): cell for cell in _block(block)}
        except UsageError as error:
            raise UsageError(f"block {number}: {error}" if len(blocks) > 1 else str(error)) from None
    return list(found.values())


def _block(block: Any) -> list[Cell]:
    if not isinstance(block, dict):
        raise UsageError(f"must hold the keys {', '.join(_KEYS)}")
    for key in block:
        if key not in _KEYS:
            raise UsageError(f"unknown key {key}: {nearest(str(key), list(_KEYS))}")
    if missing := [key for key in ("methods", "tasks") if key not in block]:
        raise UsageError(f"{missing[0]}: must be given")
    names = [_values(block, key, "a name", lambda v: isinstance(v, str)) for key in ("methods", "tasks")]
    seeds = _values(block, "seeds", "0 or more", lambda v: type(v) is int and v >= 0, 0)
    presets = _values(block, "preset", f"one of {', '.join(PRESETS)}", PRESETS.__contains__, "standard")
    members = _values(
        block, "members", "1 or more, or null", lambda v: v is None or (type(v) is int and v >= 1)
    )
    settings = [_settings(block, key) for key in ("method", "task")]
    return [
        Cell(method, task, seed, preset, count, method_settings, task_settings)
        for method, task, preset, count, method_settings, task_settings, seed in itertools.product(
            *names, presets, members, *settings, seeds
        )
    ]


def _values(
    table: Mapping[str, Any], key: str, what: str, accepts: Callable[[Any], bool], default: Any = None
) -> list[Any]:
    value = table.get(key, default)
    values = value if isinstance(value, list) else [value]
    if not values:
        raise UsageError(f"{key}: the list is empty")
    for value in values:
        if not accepts(value):
            raise UsageError(f"{key}: {value}: must be {what}, or a list of such")
    return values


def _settings(block: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """Every combination of the values of a table of settings."""
    table = block.get(key) or {}
    if not (isinstance(table, dict) and all(isinstance(name, str) for name in table)):
        raise UsageError(f"{key}: {table}: must hold settings by name")
    lists = []
    for name in table:
        try:
            lists.append(_values(table, name, "a value", lambda v: not isinstance(v, list | dict)))
        except UsageError as error:
            raise UsageError(f"{key}.{error}") from None
    return [dict(zip(table, values, strict=True)) for values in itertools.product(*lists)]


# --------------------------------------------------------------------------------------------------- runs


def run_cell(
    cell: Cell,
    *,
    out: str | Path = "runs",
    data_dir: str | None = None,
    threads: int | None = None,
    force: bool = False,
    observers: tuple[runner.Observer, ...] = (),
) -> Outcome:
    """Runs a cell, or finds its finished run; one that diverges, fails or is refused is told, not raised.

    Args:
        cell: The cell.
        out: Folder for runs.
        data_dir: Folder with data files.
        threads: CPU threads; None leaves torch's choice.
        force: Run a failed one again, and replace a finished run that has the cell's name and other settings.
        observers: As those of `bench.run`.

    Raises:
        OutputError: If the results cannot be written: so it will be with every other cell.
    """
    began: list[str] = []
    directory: Path | None = None
    try:
        choice = cell.choice()
        directory = Path(out) / choice.directory(cell.seed)
        record = finished(directory, choice, force)
        if record is None:
            record = runner.run(
                cell.method,
                cell.task,
                preset=cell.preset,
                seed=cell.seed,
                method_settings=cell.method_settings,
                task_settings=cell.task_settings,
                members=cell.members,
                # Lightning would start further processes for further devices, each a whole sweep.
                trainer={"devices": 1} if torch.cuda.device_count() > 1 else None,
                threads=threads,
                out=out,
                data_dir=data_dir,
                force=force,
                observers=(*observers, lambda event, _: began.append(event)),
            ).record
    except OutputError:
        raise
    except BenchError as error:
        if directory is None or isinstance(error, UsageError | DataError):
            return Outcome(cell, directory, None, error, bool(began))
        record = read_record(directory)  # diverged or failed
    return Outcome(cell, directory, record, began=bool(began))


def finished(directory: Path, choice: Choice, force: bool = False) -> Record | None:
    """The record of a finished run that need not be made again; None if there is none.

    Raises:
        UsageError: If there is one, but not of these settings: a preset has changed since.
    """
    if not (directory / "record.json").exists():
        return None
    record = read_record(directory)
    now = [asdict(choice.method_settings), choice.method.members, asdict(choice.task_settings)]
    then = [record.method.settings, record.method.members, record.task.settings]
    if json.loads(json.dumps(now)) == then:
        return None if force and record.status == "failed" else record
    if not force:
        raise UsageError(f"{directory} holds a run with other settings; --force replaces it")
    return None
