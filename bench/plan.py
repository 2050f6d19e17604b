"""The description of a run before it starts; command line, sweeps, tuning and `bench.run` make one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from bench import registry
from bench.registry import Choice
from bench.settings import Count, Whole, settings

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
    seed: Whole = 0
    """Seed of everything random in the run."""
    method_settings: Mapping[str, Any] = Field(default_factory=dict)
    """Settings of the method other than the preset's, by name."""
    task_settings: Mapping[str, Any] = Field(default_factory=dict)
    """Settings of the task other than the preset's, by name."""
    members: Count | None = None
    """Fit so many independent copies and pool their draws; None is what the method's name says."""
    trainer: Mapping[str, Any] = Field(default_factory=dict)
    """Options of Lightning's Trainer (`bench.engine.TrainerOptions`), by name."""
    threads: Count | None = None
    """CPU threads; None leaves torch's choice. The same seed and threads give the same numbers."""
    out: Path = Path("runs")
    """Folder for runs."""
    data_dir: str | None = None
    """Folder with data files; None searches the usual places."""
    loggers: tuple[Logger, ...] = ()
    """Where the run's epochs and numbers are also written, live (`bench.loggers`)."""
    force: bool = False
    """Replace what stands in the run's directory."""

    def choice(self) -> Choice:
        """The method and the task with all their settings.

        Raises:
            UsageError: If a name or a setting is wrong, or the method lacks what the task needs.
        """
        return registry.choose(
            self.method, self.task, self.preset, self.method_settings, self.task_settings, self.members
        )

    @property
    def command(self) -> str:
        """The command line that makes this run again."""
        words = ["bench run", self.method, self.task]
        if self.members is not None:
            words.append(f"--members {self.members}")
        if self.preset != "standard":
            words.append(f"--preset {self.preset}")
        for flag, values in (("method", self.method_settings), ("task", self.task_settings)):
            words += [f"--{flag}.{name} {'null' if v is None else v}" for name, v in values.items()]
        return " ".join([*words, f"--seed {self.seed}"])

    def __str__(self) -> str:
        words = [self.method, self.task]
        words += [f"{name}={value}" for name, value in {**self.method_settings, **self.task_settings}.items()]
        words += [f"members={self.members}"] if self.members is not None else []
        return " ".join([*words, f"seed {self.seed}"])
