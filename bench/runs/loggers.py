"""Loggers of a run: its epochs and logged numbers, written live below the run's directory; none is needed.

- `csv`: rows `stage, fit, step, name, value` in `log.csv`, in the order in which they came; a number on
  validation data has no fit. `curves.csv` holds the same numbers and more, once the run has ended.
- `tensorboard`: for `tensorboard --logdir`, in `tensorboard/`.
- `wandb`, `wandb-offline`: Weights & Biases, in `wandb/` (`bench.runs.wandb_run`).

All of them, when a stopped run goes on, leave out what an earlier start has written: the same epoch again,
since a fit goes on from its last checkpoint, or the same number again.
"""

from __future__ import annotations

import csv
import importlib.util
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench.errors import UsageError
from bench.runs import wandb_run
from bench.runs.events import Number, Observer, Reader
from bench.runs.resolution import Choice
from bench.system.files import write, writing

_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "wandb-offline": "wandb"}
"""Logger -> the package that it needs, which is also the name of our extra."""


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
def logging(
    names: Sequence[str],
    directory: Path,
    choice: Choice,
    asked: Mapping[str, Any],
    warn: Callable[[str], None],
) -> Iterator[list[Observer]]:
    """Observers that write every epoch and logged number at once; closes what they write to at the end.

    Args:
        names: Of the loggers, each once or more.
        directory: The run's directory.
        choice: What is run.
        asked: All that the run was asked for, as JSON (`bench.runs.setup.Setup.fingerprint`).
        warn: Tells the user a sentence.

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
                opened = wandb_run.logging(name, directory, choice, asked, warn)
            observers.append(stack.enter_context(opened))
        yield observers


@contextmanager
def _csv(path: Path) -> Iterator[Observer]:
    reader, earlier = Reader(), ""
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

    reader, there = Reader(), set(_in_tensorboard(folder)) if folder.exists() else set()
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
