"""A run in Weights & Biases: what was asked for, its numbers while it goes on, tables, figures and record.

Every run (so every seed) is one W&B run, grouped by task and method. `wandb/run.json` in the run's directory
holds its id and how far it came, so that a stopped run goes on in the same W&B run and says nothing twice.

Names begin with the task, so that runs of several tasks share a project:

- `<task>/steps/<stage>/<term>`: the loss or a term of it, mean over up to 50 training steps of a stage;
- `<task>/epochs/<stage>/<term>`: mean over an epoch, of the first that ends in every 50 training steps and of
  a fit's last;
- `<task>/validation/<name>`: a number on validation data, over its own `<task>/validation/step`;
- `<task>/metrics/<name>`: the final metrics, in the summary;
- `<task>/tables/...`, `<task>/figures/<name>`: of the finished run.

`trainer/global_step`, the training steps of the run over all its stages, is their axis. W&B's own steps are
not: a run that goes on offline counts them from 0 again.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import bench
from bench.engine.watch import STEPS_TOLD
from bench.errors import BenchError, UsageError
from bench.runs import records
from bench.runs.events import Observer, Reader, terms
from bench.runs.resolution import Choice
from bench.system.files import write

if TYPE_CHECKING:
    import wandb

PROJECT = "posterior-bench"
"""Where runs are logged, unless `WANDB_PROJECT` names another project."""

STEPS = "trainer/global_step"
"""Name of the training steps of a run so far."""

_SENT_EVERY = 1.0
"""Seconds for which numbers are collected before they are sent."""

_FINISHES_IN = 60.0
"""Seconds, at most, that the end of a run waits for its upload."""


def key(task: str, *parts: str) -> str:
    """The W&B name of something of a task; W&B asks for names without spaces and punctuation."""
    return "/".join(re.sub(r"[^\w.-]+", "_", part).strip("_") for part in (task, *parts))


@contextmanager
def logging(
    name: str, directory: Path, choice: Choice, asked: Mapping[str, Any], warn: Callable[[str], None]
) -> Iterator[Observer]:
    """An observer that tells W&B of a run; ends the W&B run with the exit code of whatever ended the block.

    Args:
        name: wandb or wandb-offline.
        directory: The run's directory.
        choice: What is run.
        asked: All that the run was asked for, as JSON; the configuration of the W&B run.
        warn: Tells the user a sentence: of trouble with W&B that does not end the run.

    Raises:
        UsageError: If the W&B run cannot be opened (no login, no connection).
        OutputError: If `wandb/run.json` cannot be written.
    """
    path = directory / "wandb" / "run.json"
    reached = json.loads(path.read_bytes()) if path.exists() else None
    run = _opened(name, directory, choice, asked, reached and reached["id"])
    told = _Told(
        run,
        choice.task_identity,
        path,
        reached or {"id": run.id, STEPS: -1, "epoch": -1, "numbers": []},
        warn,
    )
    exit_code = 1
    try:
        told.send()
        yield told.observe
        exit_code = 0
    except BenchError as error:
        exit_code = error.exit_code
        raise
    except KeyboardInterrupt:
        exit_code = 130
        raise
    finally:
        told.finish(exit_code)


def _opened(
    name: str, directory: Path, choice: Choice, asked: Mapping[str, Any], known: str | None
) -> wandb.Run:
    """The W&B run: a new one, or the one with a known id."""
    import wandb

    method, task = choice.method.name, choice.task.name
    tags = (task, method, choice.preset, f"v{bench.__version__}")
    config = {
        **asked,
        "method": {"name": method, "identity": choice.method_identity, **asked["method"]},
        "task": {"name": task, "identity": choice.task_identity, **asked["task"]},
        "preset": choice.preset,
        "version": bench.__version__,
    }
    try:
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            group=f"{choice.task_identity}/{choice.method_identity}",
            name=f"{choice.method_identity} {choice.preset} seed {asked['seed']}",
            tags=[tag[:64] for tag in dict.fromkeys(tags)],  # the most that W&B takes
            config=config,
            dir=directory,
            mode="offline" if name == "wandb-offline" else "online",
            id=known,
            resume="allow" if known else None,
            reinit="create_new",  # two runs of a process are two
            settings=wandb.Settings(
                console="off", silent=True, finish_timeout=_FINISHES_IN, finish_timeout_raises=True
            ),
        )
    except (wandb.Error, ValueError) as error:
        raise UsageError(f"--logger {name}: {' '.join(str(error).split())}") from None
    validation = key(choice.task_identity, "validation")
    run.define_metric(STEPS, hidden=True)
    for kind in ("steps", "epochs"):
        run.define_metric(f"{key(choice.task_identity, kind)}/*", step_metric=STEPS)
    run.define_metric(f"{validation}/*", step_metric=f"{validation}/step")
    return run


class _Told:
    """What a W&B run was told.

    Args:
        run: The W&B run.
        task: Identity of the task.
        path: Keeps how far the W&B run came.
        reached: What is kept there: the id, the training steps of the last numbers, which these are, and the
            training steps of the last epoch.
        warn: Tells the user a sentence.
    """

    def __init__(
        self, run: wandb.Run, task: str, path: Path, reached: dict[str, Any], warn: Callable[[str], None]
    ) -> None:
        self.run, self.task, self.path, self.reached, self.warn = run, task, path, reached, warn
        self.works = True
        self._reader = Reader()
        self._rows: list[dict[str, float]] = []
        self._epoch: tuple[int, dict[str, float]] | None = None  # the last, if its numbers are held back
        self._sent = time.monotonic()

    def observe(self, event: str, values: dict[str, Any]) -> None:
        """Takes an event of the run."""
        steps = values["steps"]
        if event not in ("steps", "epoch", "notice"):
            self._add_epoch()
        numbers = self._reader.read(event, values)
        if event == "steps":
            self._add(steps, {self._key("steps", name): value for name, value in terms(values).items()})
        elif event == "epoch":
            row = {self._key("epochs", number.name): number.value for number in numbers}
            self._epoch = steps, row | {"trainer/epoch": values["epoch"]}
            if steps // STEPS_TOLD > self.reached["epoch"] // STEPS_TOLD:
                self._add_epoch()
        elif event == "log":
            (number,) = numbers
            at = {key(self.task, "validation", "step"): number.step}
            self._add(steps, {key(self.task, "validation", number.name): number.value}, at)
        elif event == "record":
            self._try(self._send_record, Path(values["directory"]))
        if time.monotonic() - self._sent >= _SENT_EVERY:
            self.send()

    def finish(self, exit_code: int) -> None:
        """Sends what is left and ends the W&B run."""
        self._add_epoch()
        try:
            self.send()
        finally:
            self._try(self.run.finish, exit_code)

    def _key(self, kind: str, name: str) -> str:
        return key(self.task, kind, self._reader.place, name)

    def _add_epoch(self) -> None:
        """Adds the epoch whose numbers are held back, if there is one."""
        if self._epoch is not None:
            (steps, row), self._epoch = self._epoch, None
            self._add(steps, row)
            self.reached["epoch"] = max(steps, self.reached["epoch"])

    def _add(self, steps: int, row: dict[str, float], at: Mapping[str, float] | None = None) -> None:
        """Adds a row, unless an earlier start of the run has sent it; `at` is its place on its own axis."""
        number = [*row, *(at or {}).values()]
        if steps < self.reached[STEPS] or (
            steps == self.reached[STEPS] and number in self.reached["numbers"]
        ):
            return
        if steps > self.reached[STEPS]:
            self.reached |= {STEPS: steps, "numbers": []}
        self.reached["numbers"].append(number)
        self._rows.append({STEPS: steps, **row, **(at or {})})

    def send(self) -> None:
        """Sends what was collected, and notes how far the run came."""
        rows, self._rows = self._rows, []
        for row in rows:
            self._try(self.run.log, row)
        write(self.path, json.dumps(self.reached).encode())
        self._sent = time.monotonic()

    def _try(self, call: Callable[[Any], Any], argument: Any) -> None:
        """Calls what speaks with W&B; trouble there is told once, and the run goes on without."""
        if not self.works and call != self.run.finish:
            return
        try:
            call(argument)
        except BenchError:
            raise
        except Exception as error:
            self.works = False
            first = (str(error).strip().splitlines() or [""])[0]
            where = self.path.parent
            self.warn(
                f"Weights & Biases: {type(error).__name__}: {first}; wandb sync sends what lies in {where}"
            )

    def _send_record(self, directory: Path) -> None:
        """Final metrics, tables, figures and the record itself."""
        import wandb

        self.send()
        record = records.read_record(directory)
        self.run.config.update(
            {part: getattr(record, part).model_dump(mode="json") for part in ("environment", "provenance")}
        )
        self.run.summary.update(
            {key(self.task, "metrics", name): value for name, value in record.metrics.items()}
            | {"status": record.status, "reason": record.reason, "seconds": record.seconds}
        )
        metrics = [
            [name, value, name == record.task.main_metric, record.undefined.get(name)]
            for name, value in record.metrics.items()
        ]
        fits = [
            [number, fit.stage, fit.epochs, fit.steps, fit.seconds, fit.compiled, json.dumps(fit.diagnostics)]
            for number, fit in enumerate(record.fits, 1)
        ]
        of_fits: list[str | int] = ["fit", "stage", "epochs", "steps", "seconds", "compiled", "diagnostics"]
        shown: dict[str, Any] = {
            key(self.task, "tables", "metrics"): wandb.Table(
                ["metric", "value", "main", "undefined"], metrics
            ),
            key(self.task, "tables", "fits"): wandb.Table(of_fits, fits),
        }
        for path in sorted((directory / "figures").glob("*.png")):
            shown[key(self.task, "figures", path.stem)] = wandb.Image(str(path))
        self.run.log(shown | {STEPS: max(self.reached[STEPS], 0)})
        artifact = wandb.Artifact(f"record-{self.run.id}", "record", metadata={"status": record.status})
        for path in (directory / "record.json", directory / "arrays.safetensors"):
            if path.exists():
                artifact.add_file(
                    str(path), policy="immutable", skip_cache=True
                )  # no copies in the home folder
        self.run.log_artifact(artifact)
