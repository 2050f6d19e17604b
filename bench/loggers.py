"""Loggers of a run: its epochs and logged numbers, written live below the run's directory; none is needed.

- `csv`: rows `stage, fit, step, name, value` in `log.csv`, in the order in which they came; a number on
  validation data has no fit. `curves.csv` holds the same numbers and more, once the run has ended.
- `tensorboard`: for `tensorboard --logdir`, in `tensorboard/`.
- `wandb`, `wandb-offline`: Weights & Biases, in `wandb/`. Each start of a stopped run is a run of its own.

csv and tensorboard of a stopped run that goes on leave out what an earlier start has written: the same epoch
again, since a fit goes on from its last checkpoint, or the same number again.
"""

from __future__ import annotations

import csv
import importlib.util
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, NamedTuple

from bench.errors import UsageError
from bench.files import write, writing
from bench.registry import Choice

Observer = Callable[[str, dict[str, Any]], None]

_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "wandb-offline": "wandb"}
"""Logger -> the package that it needs, which is also the name of our extra."""


class Number(NamedTuple):
    """A number of an event: fits are counted within their stage, from 1; one on validation data has none."""

    stage: str
    fit: int | Literal[""]
    step: float
    name: str
    value: float

    @property
    def tag(self) -> str:
        """The name of its curve."""
        if not self.fit:  # one curve over all stages
            return f"validation/{self.name}"
        return f"{self.stage if self.fit == 1 else f'{self.stage}, fit {self.fit}'}/{self.name}"


class _Reader:
    """Turns events into numbers."""

    def __init__(self) -> None:
        self.stage, self.fit, self.logged = "fit", 1, 0

    def read(self, event: str, values: dict[str, Any]) -> list[Number]:
        """The numbers of an event."""
        if event == "stage":
            self.stage, self.fit = values["name"], 1
            if values["of"] > 1:  # two stages may have one name
                self.stage += f" ({values['number']} of {values['of']})"
        elif event == "fit":
            self.fit += 1
        elif event == "epoch":
            apart = ("epoch", "of", "fit", "fits")
            numbers = {name: value for name, value in values.items() if name not in apart}
            return [Number(self.stage, self.fit, values["epoch"], n, v) for n, v in numbers.items()]
        elif event == "log":
            self.logged += 1
            step = self.logged if values["step"] is None else values["step"]
            return [Number(self.stage, "", step, values["name"], values["value"])]
        return []


def check(names: Sequence[str]) -> None:
    """Refuses loggers whose packages are not installed.

    Raises:
        UsageError: One line that says what to install.
    """
    for name in names:
        package = _PACKAGES.get(name)
        if package and importlib.util.find_spec(package) is None:
            raise UsageError(f"--logger {name} needs {package}: pip install 'posterior-bench[{package}]'")


@contextmanager
def logging(names: Sequence[str], directory: Path, choice: Choice, seed: int) -> Iterator[list[Observer]]:
    """Observers that write every epoch and logged number at once; closes what they write to at the end.

    Args:
        names: Of the loggers, each once or more.
        directory: The run's directory.
        choice: What is run.
        seed: The run's seed.

    Raises:
        UsageError: If a run of Weights & Biases cannot be opened (no login, no connection).
        OutputError: If a file cannot be written.
    """
    with ExitStack() as stack:
        observers = []
        for name in dict.fromkeys(names):
            opened: AbstractContextManager[Observer]
            if name == "csv":
                opened = _csv(directory / "log.csv")
            elif name == "tensorboard":
                opened = _tensorboard(directory / "tensorboard")
            else:
                opened = _wandb(name, directory, choice, seed)
            observers.append(stack.enter_context(opened))
        yield observers


@contextmanager
def _csv(path: Path) -> Iterator[Observer]:
    reader, earlier = _Reader(), ""
    with writing(path):
        if path.exists():
            earlier = path.read_text()
            earlier = earlier[: earlier.rfind("\n") + 1]  # a killed run may leave half a line
            write(path, earlier.encode())
        there = {tuple(row[:-1]) for row in csv.reader(io.StringIO(earlier))}
        file = path.open("a", newline="")
    with file:
        writer = csv.writer(file, lineterminator="\n")

        def observe(event: str, values: dict[str, Any]) -> None:
            rows = reader.read(event, values)
            with writing(path):
                writer.writerows(row for row in rows if tuple(map(str, row[:-1])) not in there)
                file.flush()

        if not earlier:
            with writing(path):
                writer.writerow(Number._fields)
        yield observe


@contextmanager
def _tensorboard(folder: Path) -> Iterator[Observer]:
    from torch.utils.tensorboard.writer import SummaryWriter

    reader, there = _Reader(), set(_in_tensorboard(folder)) if folder.exists() else set()
    with writing(folder):
        writer = SummaryWriter(str(folder))

    def observe(event: str, values: dict[str, Any]) -> None:
        numbers = reader.read(event, values)
        with writing(folder):
            for number in numbers:
                if (number.tag, step := int(number.step)) not in there:
                    writer.add_scalar(number.tag, number.value, step)
            if numbers:
                writer.flush()

    try:
        yield observe
    finally:
        with writing(folder):
            writer.close()


def _in_tensorboard(folder: Path) -> Iterator[tuple[str, int]]:
    """Tag and step of every number in a folder."""
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={SCALARS: 0}).Reload()
    for tag in found.Tags()[SCALARS]:
        yield from ((tag, event.step) for event in found.Scalars(tag))


@contextmanager
def _wandb(name: str, directory: Path, choice: Choice, seed: int) -> Iterator[Observer]:
    import wandb

    try:
        run = wandb.init(
            project="posterior-bench",
            group=f"{choice.task_identity}/{choice.method_identity}",
            name=f"{choice.method_identity} {choice.preset} seed {seed}",
            mode="offline" if name == "wandb-offline" else "online",
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
        raise UsageError(f"--logger {name}: {' '.join(str(error).split())}") from None
    reader = _Reader()

    def observe(event: str, values: dict[str, Any]) -> None:
        if numbers := reader.read(event, values):
            run.log({**{number.tag: number.value for number in numbers}, "step": numbers[0].step})

    exit_code = 1
    try:
        yield observe
        exit_code = 0
    finally:
        run.finish(exit_code=exit_code)
