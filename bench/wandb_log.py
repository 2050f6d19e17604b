"""Weights & Biases as a further observer of a run; off unless asked for, and never needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from bench.errors import UsageError
from bench.registry import Choice


@contextmanager
def logged(
    mode: Literal["offline", "online"], directory: Path, choice: Choice, seed: int
) -> Iterator[Callable[[str, dict[str, Any]], None]]:
    """An observer that sends every epoch and logged number to a run of its own; closes it at the end.

    Args:
        mode: offline writes `<directory>/wandb/`, online sends.
        directory: The run's directory.
        choice: What is run; becomes the configuration.
        seed: The run's seed.

    Raises:
        UsageError: If the run cannot be opened (no login, no connection).
    """
    import wandb

    try:
        run = wandb.init(
            project="posterior-bench",
            group=f"{choice.task_identity}/{choice.method_identity}",
            name=f"{choice.method_identity} {choice.preset} seed {seed}",
            mode=mode,
            dir=directory,
            reinit="create_new",
            settings=wandb.Settings(finish_timeout=60, silent=True),
            config={
                "method": {"name": choice.method.name, **asdict(choice.method_settings)},
                "task": {"name": choice.task.name, **asdict(choice.task_settings)},
                "preset": choice.preset,
                "seed": seed,
            },
        )
    except wandb.Error as error:
        raise UsageError(f"--wandb {mode}: {' '.join(str(error).split())}") from None
    stage = ""

    def observe(event: str, values: dict[str, Any]) -> None:
        nonlocal stage
        if event == "stage":
            stage = values["name"]
        elif event == "log":
            run.log({f"validation/{values['name']}": values["value"], "step": values["step"]})
        elif event == "epoch":
            run.log({f"{stage}/{name}": value for name, value in values.items() if name != "of"})

    exit_code = 1
    try:
        yield observe
        exit_code = 0
    finally:
        run.finish(exit_code=exit_code)
