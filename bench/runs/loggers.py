"""Who is told of a run: its log, its observers, and the loggers that its plan names.

`log.txt` has every event but those of single steps. A logger writes epochs and logged numbers live, below the
run's directory; none is needed:

- `csv`: rows `stage, fit, step, name, value` in `log.csv`, in the order in which they came; a number on
  validation data has no fit. `curves.csv` holds the same numbers and more, once the run has ended.
- `tensorboard`: for `tensorboard --logdir`, in `tensorboard/`.
- `wandb`, `wandb-offline`: Weights & Biases, in `wandb/` (`bench.runs.wandb_run`).

All of them, when a stopped run goes on, leave out what an earlier start has written: the same epoch again,
since a fit goes on from its last checkpoint, or the same number again.
"""

from __future__ import annotations

import csv
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.runs import wandb_run
from bench.runs.events import Number, Observer, Reader, written
from bench.system.files import writing

if TYPE_CHECKING:
    from bench.runs.resolution import Choice
    from bench.runs.setup import Setup


@contextmanager
def telling(setup: Setup, observers: Sequence[Observer]) -> Iterator[tuple[logging.Logger, Observer]]:
    """Has the engine of a run tell its events to the log, the observers and the plan's loggers.

    Gives the log and, for events that are not the engine's, who tells them.

    Raises:
        UsageError: If a run of Weights & Biases cannot be opened (no login, no connection).
        OutputError: If a file cannot be written.
    """
    engine, told = setup.engine, list(observers)

    def notify(event: str, values: dict[str, Any]) -> None:
        steps = sum(fit["steps"] for fit in engine.fits) + values.get("steps", 0)
        for observer in told:
            observer(event, values | {"steps": steps})

    def warn(text: str) -> None:
        notify("notice", {"text": text})

    with ExitStack() as stack:
        log = stack.enter_context(_log(setup.directory / "log.txt"))
        told.append(written(log))
        live = opened(setup.plan.loggers, setup.directory, setup.choice, setup.fingerprint, warn)
        told += stack.enter_context(live)
        engine.observe(notify)
        yield log, notify


class _LogHandler(logging.FileHandler):
    """Ends the run in one line if the disk is full, where logging would print a traceback for every line."""

    def handleError(self, record: logging.LogRecord) -> None:
        with writing(Path(self.baseFilename)):
            raise


@contextmanager
def _log(path: Path) -> Iterator[logging.Logger]:
    """A logger that writes to a file alone, with the time before every line."""
    logger = logging.getLogger(f"bench.run.{path}")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    with writing(path):
        handler = _LogHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logger.addHandler(handler)
    try:
        yield logger
    finally:
        logger.removeHandler(handler)
        with writing(path):
            handler.close()


@contextmanager
def opened(
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
    """
    in_files = {
        "csv": (directory / "log.csv", _csv),
        "tensorboard": (directory / "tensorboard", _tensorboard),
    }
    with ExitStack() as stack:
        observers = []
        for name in dict.fromkeys(names):
            if name in in_files:
                logger = _in_file(*in_files[name])
            else:
                logger = wandb_run.logging(name, directory, choice, asked, warn)
            observers.append(stack.enter_context(logger))
        yield observers


@contextmanager
def _in_file(path: Path, logger: Callable[[Path], AbstractContextManager[Observer]]) -> Iterator[Observer]:
    """A logger that writes below a path, of whose full disk one line tells, whatever it was doing."""
    stack = ExitStack()
    with writing(path):
        observe = stack.enter_context(logger(path))

    def observe_or_tell(event: str, values: dict[str, Any]) -> None:
        with writing(path):
            observe(event, values)

    try:
        yield observe_or_tell
    finally:
        with writing(path):
            stack.close()


@contextmanager
def _csv(path: Path) -> Iterator[Observer]:
    reader = Reader()
    with path.open("a+", newline="") as file:
        file.seek(0)
        earlier = file.read()
        whole = earlier[: earlier.rfind("\n") + 1]  # a killed run may leave half a line
        file.truncate(len(whole.encode()))
        there = {tuple(row[:-1]) for row in csv.reader(whole.splitlines())}
        writer = csv.writer(file, lineterminator="\n")
        if not whole:
            writer.writerow(Number._fields)

        def observe(event: str, values: dict[str, Any]) -> None:
            rows = reader.read(event, values)
            writer.writerows(row for row in rows if tuple(map(str, row[:-1])) not in there)
            file.flush()

        yield observe


@contextmanager
def _tensorboard(folder: Path) -> Iterator[Observer]:
    from torch.utils.tensorboard.writer import SummaryWriter

    reader, there = Reader(), set(_in_tensorboard(folder)) if folder.exists() else set()
    writer = SummaryWriter(str(folder))

    def observe(event: str, values: dict[str, Any]) -> None:
        numbers = reader.read(event, values)
        for number in numbers:
            if (number.tag, step := int(number.step)) not in there:
                writer.add_scalar(number.tag, number.value, step)
        if numbers:
            writer.flush()

    try:
        yield observe
    finally:
        writer.close()


def _in_tensorboard(folder: Path) -> Iterator[tuple[str, int]]:
    """Tag and step of every number in a folder."""
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={SCALARS: 0}).Reload()
    for tag in found.Tags()[SCALARS]:
        yield from ((tag, event.step) for event in found.Scalars(tag))
