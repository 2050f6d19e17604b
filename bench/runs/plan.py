"""The description of a run before it starts; command line, sweeps, tuning and `bench.run` make one.

`Plan` is the one place where an option of a run is written: the flags of the commands, their help and the
keywords of `bench.run` are read from its fields.
"""

from __future__ import annotations

import ast
import inspect
import shlex
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, field, fields
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

from pydantic import BeforeValidator

from bench.errors import UsageError
from bench.runs.registry import nearest
from bench.settings import Count, Folder, Seed, Threads, settings

PRESETS = ("smoke", "standard", "paper")


def known_preset(name: Any) -> Any:
    """The name of a preset.

    Raises:
        UsageError: If there is none of that name; says the nearest.
    """
    if name not in PRESETS:
        raise UsageError(f"unknown preset '{name}': {nearest(str(name), list(PRESETS))}")
    return name


Preset = Annotated[Literal["smoke", "standard", "paper"], BeforeValidator(known_preset)]
Logger = Literal["csv", "tensorboard", "wandb", "wandb-offline"]


@settings
class Plan:
    """What to run and how: plain values, checked when the plan is made.

    `bench.settings.build(Plan, values)` says in one line which value is wrong. What stands under a field is
    the help of its flag.
    """

    method: str
    """name of the method, or package.module:Class"""
    task: str
    """name of the task, or package.module:Class"""
    preset: Preset = "standard"
    """smoke: under a minute, to see that all works; standard: the settings that are compared and ranked;
    paper: the settings of the publication that the task comes from"""
    seed: Seed = 0
    """seed of everything random in the run"""
    method_settings: Mapping[str, Any] = field(default_factory=dict)
    """settings of the method other than the preset's, by name"""
    task_settings: Mapping[str, Any] = field(default_factory=dict)
    """settings of the task other than the preset's, by name"""
    members: Count | None = None
    """fit so many independent copies and pool their draws; default is what the method's name says"""
    trainer: Mapping[str, Any] = field(default_factory=dict)
    """options of Lightning's Trainer (`bench.engine.engine.TrainerOptions`), by name"""
    threads: Threads | None = None
    """CPU threads; default is torch's choice"""
    out: Folder = Path("runs")
    """folder for runs"""
    data_dir: str | None = None
    """folder of data files; also $BENCH_DATA"""
    loggers: tuple[Logger, ...] = ()
    """write epochs and numbers live: csv, tensorboard, wandb, wandb-offline; may be repeated"""
    force: bool = False
    """replace what stands in the run's directory"""

    def command(self, threads: int | None = None, processes: int = 1) -> str:
        """The command line that makes this run again: all that changes its numbers, no folders.

        Args:
            threads: What was chosen where the plan leaves the threads open; None leaves them open.
            processes: How many processes of a machine share a fit.
        """
        words = ["bench", "run", self.method, self.task]
        if self.members is not None:
            words += ["--members", str(self.members)]
        if self.preset != "standard":
            words += ["--preset", self.preset]
        from bench.engine.trainer import (
            TrainerOptions,  # here, since it needs torch, and plans are made without
        )

        usual = asdict(TrainerOptions())
        trainer = {**self.trainer, "devices": processes} if processes > 1 else self.trainer
        changed = {name: value for name, value in trainer.items() if value != usual.get(name)}
        settings = {"method": self.method_settings, "task": self.task_settings, "trainer": changed}
        for flag, values in settings.items():
            for name, value in values.items():
                words += [f"--{flag}.{name}", "null" if value is None else str(value)]
        words += ["--seed", str(self.seed)]
        if (number := self.threads or threads) is not None:
            words += ["--threads", str(number)]
        return shlex.join(words)

    def __str__(self) -> str:
        words = [self.method, self.task]
        words += [f"{name}={value}" for name, value in {**self.method_settings, **self.task_settings}.items()]
        words += [f"members={self.members}"] if self.members is not None else []
        return " ".join([*words, f"seed {self.seed}"])


class Option(NamedTuple):
    """A field of a plan, for its flag and for the keywords of `bench.run`."""

    kind: Any
    """Its type; the bounds of its values are the plan's to check."""
    default: Any
    help: str


@cache
def options() -> dict[str, Option]:
    """The fields of a plan, in their order, but for method and task, which every run names."""
    kinds, help = get_type_hints(Plan), _documentation(Plan)
    return {
        each.name: Option(kinds[each.name], {} if each.default is MISSING else each.default, help[each.name])
        for each in fields(Plan)
        if each.name not in ("method", "task")
    }


def _documentation(cls: type) -> dict[str, str]:
    """What stands under the fields of a class, by name."""
    (definition,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(definition, ast.ClassDef)
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in pairwise(definition.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        if isinstance(text.value.value, str)
    }


def with_options(function: Callable[..., Any]) -> inspect.Signature:
    """The signature of a function whose last parameter takes the options of a plan: with each of them."""
    own = inspect.signature(function)
    keywords = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, (kind, default, _) in options().items()
    ]
    return own.replace(parameters=[*list(own.parameters.values())[:-1], *keywords])
