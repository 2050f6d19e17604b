"""One run from names to a record: `run`, and its counterpart `load`, which gives the fitted method back.

A run's directory is `<out>/<task identity>/<method identity>/<preset>-seed<k>/`. While it is unfinished it
holds `unfinished.json`; the same command then goes on where it stopped, and ends with the same numbers.
"""

from __future__ import annotations

import fcntl
import inspect
import json
import logging
import math
import shutil
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from bench import figures, records, registry
from bench.contract import Arrays, Method, Row, Task
from bench.data import array_digest
from bench.engine import Engine, TrainerOptions
from bench.ensemble import Ensemble
from bench.errors import BenchError, Diverged, OutputError, UsageError
from bench.files import write, writing
from bench.registry import Choice
from bench.settings import build

Observer = Callable[[str, dict[str, Any]], None]


@dataclass(frozen=True)
class Run:
    """A finished run: its directory and its record."""

    directory: Path
    record: records.Record


def run(
    method: str,
    task: str,
    *,
    preset: str = "standard",
    seed: int = 0,
    method_settings: Mapping[str, Any] | None = None,
    task_settings: Mapping[str, Any] | None = None,
    members: int | None = None,
    trainer: Mapping[str, Any] | None = None,
    threads: int | None = None,
    out: str | Path = "runs",
    data_dir: str | None = None,
    wandb: str = "off",
    force: bool = False,
    observers: tuple[Observer, ...] = (),
) -> Run:
    """Fits a method on a task, scores it, and writes the record; what `bench run` does.

    Args:
        method: Name of the method, or `package.module:Class`.
        task: Name of the task, or `package.module:Class`.
        preset: smoke, standard or paper.
        seed: Seed of everything random in the run.
        method_settings: Settings of the method other than the preset's.
        task_settings: Settings of the task other than the preset's.
        members: Fit so many independent copies and pool their draws; None is what the method's name says.
        trainer: Options of Lightning's Trainer (`bench.engine.TrainerOptions`).
        threads: CPU threads; None leaves torch's choice. The same seed and threads give the same numbers.
        out: Folder for runs.
        data_dir: Folder with data files.
        wandb: off, offline or online.
        force: Replace what stands in the run's directory.
        observers: Called with (event, values) on every stage, epoch and logged number.

    Raises:
        UsageError: If an argument is wrong or a finished run stands in the way.
        DataError: If the task's data cannot be had.
        Diverged: If the run diverged; its record says so.
        OutputError: If the results cannot be written.
        BenchError: If the run failed; its record says so.
    """
    if members is not None and members < 1:
        raise UsageError(f"--members {members}: must be 1 or more")
    choice = registry.choose(method, task, preset, method_settings, task_settings, members)
    options = build(TrainerOptions, dict(trainer or {}), "trainer")
    if seed < 0:
        raise UsageError(f"--seed {seed}: must be 0 or more")
    if threads is not None and threads < 1:
        raise UsageError(f"--threads {threads}: must be 1 or more")
    protocol: Task = choice.task.cls(choice.task_settings, data_dir)
    digest = protocol.data_digest()
    directory = Path(out) / choice.directory(seed)
    if threads is not None:
        torch.set_num_threads(threads)
    command = _command(choice, method, task, seed, method_settings, task_settings, members)
    engine = Engine(
        choice.method.cls,
        choice.method_settings,
        seed,
        directory / "checkpoints",
        options,
        choice.method.members,
    )
    if engine.check() > 0:  # a further process of a distributed run computes along and writes nothing
        _compute(protocol, engine)
        return Run(directory, None)  # type: ignore[arg-type]
    with ExitStack() as stack:
        fingerprint = _fingerprint(choice, seed, digest, options)
        stack.enter_context(_claimed(directory, fingerprint, force))
        log = stack.enter_context(_log_file(directory / "log.txt"))
        observers = (*observers, _logging_observer(log))
        if wandb != "off":
            from bench.wandb_log import logged

            observers += (stack.enter_context(logged(wandb, directory, choice, seed)),)
        engine.observe(lambda event, values: [o(event, values) for o in observers])
        log.info(command)
        began = time.perf_counter()
        arrays: Arrays | None = None
        scores: records.Scores | None = None
        status = "completed"
        failure: BenchError | None = None
        try:
            arrays = _compute(protocol, engine)
            scores = records.split_metrics(protocol.score(arrays), protocol.spec)
        except Diverged as error:
            status, failure = "diverged", error
        except (BenchError, KeyboardInterrupt):
            raise
        except Exception as error:  # a defect, ours or of a user's own method or task: recorded, then told
            log.error(traceback.format_exc())
            first = (str(error).strip().splitlines() or [""])[0]
            arrays, status = None, "failed"
            failure = BenchError(f"failed: {type(error).__name__}: {first}")
        seconds = time.perf_counter() - began
        record = _record(
            choice, protocol, engine, digest, command, seed, status, failure, arrays, scores, seconds
        )
        _write(directory, protocol, engine, record, arrays)
        log.info(f"{status} in {seconds:.1f} s: {record.metrics}")
        if failure is not None:
            hint = {"failed": f"the traceback is in {directory}/log.txt"}.get(
                status, f"recorded in {directory}"
            )
            raise type(failure)(f"{failure}; {hint}")
    return Run(directory, record)


def load(run: str | Path, data_dir: str | None = None) -> Method:
    """The fitted method of a finished run, ready to predict.

    Args:
        run: The run's directory, with its checkpoints.
        data_dir: Folder with data files; the task's problem is posed again to rebuild the network.

    Raises:
        UsageError: If the directory holds no completed run with a checkpoint.
    """
    directory = Path(run)
    record = records.read_record(directory)
    checkpoints = sorted((directory / "checkpoints").glob("*.ckpt"))
    if not checkpoints:
        raise UsageError(f"{directory} holds no checkpoint")
    method = registry.method(record.method.name)
    settings = build(method.cls.settings_class, record.method.settings, "method")
    problem = task_of(record, data_dir).problem()
    members: list[Method] = []
    for path in checkpoints[-record.method.members :]:
        checkpoint = torch.load(path, weights_only=True, map_location="cpu")
        fitted: Method = method.cls(problem, settings)
        fitted.load_state_dict(checkpoint["state_dict"])
        fitted.on_load_checkpoint(checkpoint)
        members.append(fitted)
    return members[0] if len(members) == 1 else Ensemble(members)


def task_of(record: records.Record, data_dir: str | None = None) -> Task:
    """The task of a record, with the settings that it had."""
    task = registry.task(record.task.name)
    protocol: Task = task.cls(build(task.cls.settings_class, record.task.settings, "task"), data_dir)
    return protocol


def load_scores(directory: Path) -> tuple[Task, Arrays]:
    """The task of a finished run and the arrays that it is scored from; needs no data set."""
    return task_of(records.read_record(directory)), records.read_arrays(directory)


# ------------------------------------------------------------------------------------------------- parts


def _compute(protocol: Task, engine: Engine) -> Arrays:
    """Arrays of the run with the targets appended; the targets cannot be had while it runs."""

    def locked() -> Arrays:
        raise RuntimeError("the targets of a task are not to be read by its run")

    protocol.targets = locked  # type: ignore[method-assign]
    try:
        arrays = protocol.run(engine)
    finally:
        del protocol.targets
    return arrays | protocol.targets()


def _fingerprint(choice: Choice, seed: int, digest: str, options: Any) -> dict[str, Any]:
    """What must be equal for an unfinished run to go on."""
    return {
        "method": asdict(choice.method_settings) | {"members": choice.method.members},
        "task": asdict(choice.task_settings),
        "seed": seed,
        "data": digest,
        "threads": torch.get_num_threads(),
        "trainer": asdict(options),
        "source": records.source_hash(),
        "method_file": records.file_hash(Path(inspect.getfile(choice.method.cls))),
    }


@contextmanager
def _claimed(directory: Path, fingerprint: dict[str, Any], force: bool) -> Iterator[None]:
    """Makes the directory ours, or says in one line why it cannot be; a refused run leaves none."""
    was_there = directory.exists()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / ".lock").open("w")
    except OSError as error:
        raise OutputError(f"cannot write {directory}: {error.strerror}; choose another --out") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(f"{directory} is being written by another process") from None
        try:
            _make_room(directory, force)
            _mark(directory, fingerprint)
            yield
        except UsageError:
            if not was_there:
                shutil.rmtree(directory, ignore_errors=True)
            raise
        finally:
            (directory / ".lock").unlink(missing_ok=True)


def _make_room(directory: Path, force: bool) -> None:
    """Removes what may be replaced."""
    finished = (directory / "record.json").exists()
    if finished and not force and (status := records.read_record(directory).status) != "failed":
        raise UsageError(f"{directory} holds a {status} run: it is kept; --force replaces it")
    if finished or force:
        for path in directory.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != ".lock":
                path.unlink()


def _mark(directory: Path, fingerprint: dict[str, Any]) -> None:
    """Marks the directory as unfinished, unless it holds an unfinished run that cannot go on."""
    marker = directory / "unfinished.json"
    content = json.dumps(fingerprint, indent=2, sort_keys=True).encode()
    if marker.exists() and marker.read_bytes() != content:
        old = json.loads(marker.read_bytes())
        differs = ", ".join(k for k in fingerprint if old.get(k) != fingerprint[k])
        raise UsageError(f"{directory} holds an unfinished run with another {differs}; --force starts anew")
    write(marker, content)


class _LogHandler(logging.FileHandler):
    """A log on a full disk ends the run in one line; logging's own answer is a traceback a line."""

    def handleError(self, record: logging.LogRecord) -> None:
        with writing(Path(self.baseFilename)):
            raise


@contextmanager
def _log_file(path: Path) -> Iterator[logging.Logger]:
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


def _logging_observer(log: logging.Logger) -> Observer:
    def observe(event: str, values: dict[str, Any]) -> None:
        log.info(" ".join([event, *(f"{name}={value}" for name, value in values.items())]))

    return observe


def _command(
    choice: Choice,
    method: str,
    task: str,
    seed: int,
    method_settings: Mapping[str, Any] | None,
    task_settings: Mapping[str, Any] | None,
    members: int | None,
) -> str:
    words = ["bench run", method, task]
    if members is not None:
        words.append(f"--members {members}")
    if choice.preset != "standard":
        words.append(f"--preset {choice.preset}")
    for flag, values in (("method", method_settings), ("task", task_settings)):
        words += [f"--{flag}.{k} {'null' if v is None else v}" for k, v in (values or {}).items()]
    return " ".join([*words, f"--seed {seed}"])


def _record(
    choice: Choice,
    protocol: Task,
    engine: Engine,
    digest: str,
    command: str,
    seed: int,
    status: Any,
    failure: BenchError | None,
    arrays: Arrays | None,
    scores: records.Scores | None,
    seconds: float,
) -> records.Record:
    spec = protocol.spec
    nothing = dict.fromkeys(spec.metrics), dict.fromkeys(spec.metrics, f"the run {status}")
    numbers, undefined = scores or nothing
    method_file = Path(inspect.getfile(choice.method.cls))
    return records.Record(
        schema_version=records.SCHEMA_VERSION,
        status=status,
        reason=None if failure is None else str(failure),
        task=records.TaskPart(
            name=choice.task.name,
            identity=choice.task_identity,
            version=spec.version,
            data_digest=digest,
            settings=asdict(choice.task_settings),
            main_metric=spec.main_metric,
        ),
        method=records.MethodPart(
            name=choice.method.name,
            identity=choice.method_identity,
            members=choice.method.members,
            settings=asdict(choice.method_settings),
            tuning=choice.tuning,  # type: ignore[arg-type]
            capabilities=sorted(choice.method.provides),
        ),
        preset=choice.preset,
        seed=seed,
        command=command,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        metrics=numbers,
        undefined=undefined,
        validation=_last_finite(engine.logged),
        fits=[records.FitPart(**fit) for fit in engine.fits],
        diagnostics=engine.diagnostics,
        seconds=round(seconds, 3),
        environment=records.environment(records.device_name(engine.device)),
        trainer=asdict(engine.options),
        provenance=records.provenance(method_file, None if arrays is None else array_digest(arrays)),
    )


def _last_finite(logged: list[tuple[str, str, float, float]]) -> dict[str, float]:
    """The last value of each logged number; none where the last is not finite, whatever stood before it."""
    last = {name: value for name, _, _, value in logged}
    return {name: value for name, value in last.items() if math.isfinite(value)}


def _write(
    directory: Path, protocol: Task, engine: Engine, record: records.Record, arrays: Arrays | None
) -> None:
    """Writes everything, the record last: where it stands, the run is finished."""
    rows = [Row(f"{name} (validation)", stage, x, value) for name, stage, x, value in engine.logged]
    for stage, history in engine.histories:
        rows += [Row(k, stage, r["epoch"], v) for r in history for k, v in r.items() if k != "epoch"]
    if arrays is not None:
        rows = protocol.curves(arrays) + rows
        records.write_arrays(directory, arrays)
        figures.save(protocol.figures(arrays), directory / "figures")
    records.write_curves(directory, rows)
    records.write_record(directory, record)
    (directory / "unfinished.json").unlink(missing_ok=True)
