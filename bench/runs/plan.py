"""The description of a run before it starts; command line, sweeps, tuning and `bench.run` make one."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any, Literal, TypedDict

from pydantic import Field

from bench.runs import registry
from bench.runs.registry import Choice
from bench.settings import Count, Folder, Seed, Threads, code_in, settings

Logger = Literal["csv", "tensorboard", "wandb", "wandb-offline"]


@settings
class Plan:
    """What to run and how: plain values, checked when the plan is made.

    `bench.settings.build(Plan, values)` says in one line which value is wrong.
    """

    method: str
    """Name of the method, or `package.module:Class`."""
    task: str
    """Name of the task, or `package.module:Class`."""
    preset: str = "standard"
    """smoke, standard or paper."""
    seed: Seed = 0
    """Seed of everything random in the run."""
    method_settings: Mapping[str, Any] = Field(default_factory=dict)
    """Settings of the method other than the preset's, by name."""
    task_settings: Mapping[str, Any] = Field(default_factory=dict)
    """Settings of the task other than the preset's, by name."""
    members: Count | None = None
    """Fit so many independent copies and pool their draws; None is what the method's name says."""
    trainer: Mapping[str, Any] = Field(default_factory=dict)
    """Options of Lightning's Trainer (`bench.engine.engine.TrainerOptions`), by name."""
    threads: Threads | None = None
    """CPU threads; None leaves torch's choice. The same seed and threads give the same numbers."""
    out: Folder = Path("runs")
    """Folder for runs."""
    data_dir: str | None = None
    """Folder with data files; None searches the usual places."""
    loggers: tuple[Logger, ...] = ()
    """Where the run's epochs and numbers are also written, live (`bench.runs.loggers`)."""
    force: bool = False
    """Replace what stands in the run's directory."""

    def choice(self) -> Choice:
        """The method and the task with all their settings; imports a user's own.

        Raises:
            UsageError: If a name or a setting is wrong, or the method lacks what the task needs.
        """
        registry.import_own(self.method, self.task)
        precision = self.trainer.get("precision", registry.FULL_PRECISION)
        given = self.preset, self.method_settings, self.task_settings, self.members, precision
        choice = registry.choose(self.method, self.task, *given)
        registry.import_own(*code_in(choice.task_settings))
        return registry.under_its_name(choice, self.task_settings, precision)

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


class Options(TypedDict, total=False):
    """The fields of a plan but method and task, for editors and type checkers; a test holds it so."""

    preset: str
    seed: int
    method_settings: Mapping[str, Any]
    task_settings: Mapping[str, Any]
    members: int | None
    trainer: Mapping[str, Any]
    threads: int | None
    out: Path | str
    data_dir: str | None
    loggers: tuple[Logger, ...]
    force: bool


def shown(function: Callable[..., Any]) -> inspect.Signature:
    """The signature of a function that takes `Options`, with each option and its default, for `help`."""
    own = inspect.signature(function)
    plan = {field.name: field for field in fields(Plan)}
    options = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default={} if plan[name].default is MISSING else plan[name].default,
            annotation=annotation,
        )
        for name, annotation in Options.__annotations__.items()
    ]
    return own.replace(parameters=[*list(own.parameters.values())[:-1], *options])
