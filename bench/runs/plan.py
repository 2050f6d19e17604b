"""The description of a run before it starts; command line, sweeps, tuning and `bench.run` make one.

`Plan` is the one place where an option of a run is written: the flags of the commands, their help and the
keywords of `bench.run` are read from its fields.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import shlex
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, asdict, field, fields
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, ParamSpec, TypeVar, cast, get_type_hints

from pydantic import AfterValidator, BeforeValidator

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
_NEEDS = {"tensorboard": "tensorboard", "wandb": "wandb", "wandb-offline": "wandb"}
"""Logger -> the package that it needs, which is also the name of our extra."""


def _installed(logger: Logger) -> Logger:
    """A logger whose package is there; else one line that says what to install."""
    package = _NEEDS.get(logger)
    if package and importlib.util.find_spec(package) is None:
        raise UsageError(f"--logger {logger} needs {package}: pip install 'posterior-bench[{package}]'")
    return logger


@settings
class Plan:
    """What to run and how: plain values, checked when the plan is made.

    `bench.settings.build(Plan, values)` says in one line which value is wrong. What stands under a field is
    the help of its flag.
    """

    method: str = field(kw_only=False)
    """name of the method, or package.module:Class"""
    task: str = field(kw_only=False)
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
    loggers: tuple[Annotated[Logger, AfterValidator(_installed)], ...] = ()
    """write epochs and numbers live: csv, tensorboard, wandb, wandb-offline; may be repeated"""
    energy: bool = False
    """say why, where no energy of the run can be recorded; where the machine counts it, it always is"""
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


_NAMED = ("method", "task")
"""What every run names; all other fields are options."""


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
        each.name: Option(kinds[each.name], _default(each), help[each.name])
        for each in fields(Plan)
        if each.name not in _NAMED
    }


def _default(option: Field[Any]) -> Any:
    return {} if option.default is MISSING else option.default


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


P = ParamSpec("P")
T = TypeVar("T")


def called_as(described: Callable[P, Plan]) -> Callable[[Callable[..., T]], Callable[P, T]]:
    """Gives a function the parameters of a plan with more fields, for type checkers and for `help` alike.

    Args:
        described: The plan with what else the function takes, as a settings class.
    """

    def named(function: Callable[..., T]) -> Callable[P, T]:
        kinds = get_type_hints(described)
        parameters = [
            inspect.Parameter(
                each.name,
                inspect.Parameter.KEYWORD_ONLY if each.kw_only else inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=inspect.Parameter.empty if each.name in _NAMED else _default(each),
                annotation=kinds[each.name],
            )
            for each in fields(cast("type[Plan]", described))
        ]
        own = inspect.signature(function)
        function.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        return function

    return named
