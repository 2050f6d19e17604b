"""One run, from its plan to its record; and `load`, which gives the fitted method back.

A run has four steps, which `execute` takes: its directory is claimed, the task is run and scored, the record
is made of what came out, everything is written. The directory of a run is
`<out>/<task identity>/<method identity>/<preset>-seed<k>/`. While the run is unfinished its directory holds
`unfinished.json`; the same command then goes on where the run stopped, and ends with the same numbers.
"""

from __future__ import annotations

import inspect
import json
import logging
import math
import shutil
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from bench import figures, loggers, records, registry
from bench.contract import Arrays, FinishedRun, Method, Row, Task
from bench.data import array_digest
from bench.engine import Engine, TrainerOptions
from bench.ensemble import Ensemble
from bench.errors import BenchError, Diverged, UsageError
from bench.files import LOCK, locked, write, writing
from bench.plan import Plan
from bench.registry import Choice
from bench.settings import build

Observer = Callable[[str, dict[str, Any]], None]
"""Called with (event, values) on every stage, epoch and logged number of a run."""


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        directory: Where it lies.
        is_first_process: False in a further process of a distributed run, which computes along and writes
            nothing.
    """

    directory: Path
    is_first_process: bool = True

    @cached_property
    def record(self) -> records.Record:
        """What was run, and what came out; read from the directory."""
        return records.read_record(self.directory)


def run(method: str, task: str, *, observers: tuple[Observer, ...] = (), **options: Any) -> Run:
    """Fits a method on a task, scores it, and writes the record; what `bench run` does.

    Args:
        method: Name of the method, or `package.module:Class`.
        task: Name of the task, or `package.module:Class`.
        observers: Called with (event, values) on every stage, epoch and logged number.
        options: Further fields of `bench.plan.Plan`: preset, seed, method_settings, task_settings, members,
            trainer, threads, out, data_dir, loggers, force.

    Raises:
        UsageError: If an argument is wrong or a finished run stands in the way.
        DataError: If the task's data cannot be had.
        Diverged: If the run diverged; its record says so.
        OutputError: If the results cannot be written.
        BenchError: If the run failed; its record says so.
    """
    return execute(build(Plan, {"method": method, "task": task, **options}), observers)


def execute(plan: Plan, observers: tuple[Observer, ...] = ()) -> Run:
    """Runs a plan; see `run`."""
    job = _job(plan)
    if job.engine.check() > 0:
        _compute(job.protocol, job.engine)
        return Run(job.directory, is_first_process=False)
    with (
        _claimed(job),
        _log_file(job.directory / "log.txt") as log,
        _observed(job, (*observers, _logging(log))),
    ):
        log.info(plan.command)
        outcome = _outcome(job, log)
        record = _record(job, outcome)
        _write(job, outcome, record)
        log.info(f"{outcome.status} in {outcome.seconds:.1f} s: {record.metrics}")
        if (failure := outcome.failure) is not None:
            where = f"the traceback is in {job.directory}/log.txt"
            hint = where if outcome.status == "failed" else f"recorded in {job.directory}"
            raise type(failure)(f"{failure}; {hint}")
    return Run(job.directory)


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


def finished(directory: Path) -> FinishedRun:
    """A finished run as `Task.compare` gets it; needs no data set.

    Raises:
        UsageError: If the directory holds no finished run, or its method cannot be found.
    """
    record = records.read_record(directory)
    task, made = task_of(record), record.method
    method = registry.with_members(registry.method(made.name), made.members)
    *preset, _ = registry.preset_values(method, registry.task(record.task.name), record.preset)
    given = build(method.cls.settings_class, made.settings, "method"), task.settings
    changed = {
        f"{kind}.{name}": value
        for kind, own, values in zip(("method", "task"), given, preset, strict=True)
        for name, value in asdict(own).items()
        if value != getattr(build(type(own), values, kind), name)
    }
    return FinishedRun(
        task=task,
        task_name=record.task.name,
        task_identity=record.task.identity,
        method_name=made.name,
        method_identity=made.identity,
        preset=record.preset,
        seed=record.seed,
        changed=changed,
        metrics=record.metrics,
        arrays=records.read_arrays(directory),
        curves=records.read_curves(directory),
    )


def load_scores(directory: Path) -> tuple[Task, Arrays]:
    """The task of a finished run and the arrays that it is scored from; needs no data set."""
    return task_of(records.read_record(directory)), records.read_arrays(directory)


# ------------------------------------------------------------------------------------------- before the run


@dataclass(frozen=True)
class _Job:
    """A plan and what was made of it; `digest` is that of the task's data."""

    plan: Plan
    choice: Choice
    protocol: Task
    digest: str
    engine: Engine
    directory: Path

    @property
    def method_file(self) -> Path:
        """The file that defines the method."""
        return Path(inspect.getfile(self.choice.method.cls))


def _job(plan: Plan) -> _Job:
    """Makes task and engine of a plan; whatever can be refused without a run is refused here."""
    choice = plan.choice()
    options = build(TrainerOptions, dict(plan.trainer), "trainer")
    protocol: Task = choice.task.cls(choice.task_settings, plan.data_dir)
    digest = protocol.data_digest()
    loggers.check(plan.loggers)
    if plan.threads is not None:
        torch.set_num_threads(plan.threads)
    directory = plan.out / choice.directory(plan.seed)
    engine = Engine(
        choice.method.cls,
        choice.method_settings,
        plan.seed,
        directory / "checkpoints",
        options,
        choice.method.members,
    )
    return _Job(plan, choice, protocol, digest, engine, directory)


def _fingerprint(job: _Job) -> dict[str, Any]:
    """Everything that must be equal for an unfinished run to go on."""
    return {
        "method": asdict(job.choice.method_settings) | {"members": job.choice.method.members},
        "task": asdict(job.choice.task_settings),
        "seed": job.plan.seed,
        "data": job.digest,
        "threads": torch.get_num_threads(),
        "trainer": asdict(job.engine.options),
        "source": records.source_hash(),
        "method_file": records.file_hash(job.method_file),
    }


@contextmanager
def _claimed(job: _Job) -> Iterator[None]:
    """Claims the run's directory, or says in one line why it cannot be had; a refused run leaves none."""
    fingerprint = _fingerprint(job)
    was_there = job.directory.exists()
    with locked(job.directory):
        try:
            _make_room(job.directory, job.plan.force)
            _mark(job.directory, fingerprint)
            yield
        except UsageError:
            if not was_there:
                shutil.rmtree(job.directory, ignore_errors=True)
            raise


def _make_room(directory: Path, force: bool) -> None:
    """Empties a directory that holds a failed run, or any run under `force`."""
    finished = (directory / "record.json").exists()
    if finished and not force and (status := records.read_record(directory).status) != "failed":
        raise UsageError(f"{directory} holds a {status} run: it is kept; --force replaces it")
    if finished or force:
        for path in directory.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != LOCK:
                path.unlink()


def _mark(directory: Path, fingerprint: dict[str, Any]) -> None:
    """Writes `unfinished.json`; refuses a directory whose unfinished run had another fingerprint."""
    marker = directory / "unfinished.json"
    content = json.dumps(fingerprint, indent=2, sort_keys=True).encode()
    if marker.exists() and marker.read_bytes() != content:
        old = json.loads(marker.read_bytes())
        differs = ", ".join(k for k in fingerprint if old.get(k) != fingerprint[k])
        raise UsageError(f"{directory} holds an unfinished run with another {differs}; --force starts anew")
    write(marker, content)


class _LogHandler(logging.FileHandler):
    """Ends the run in one line if the disk is full, where logging would print a traceback for every line."""

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


def _logging(log: logging.Logger) -> Observer:
    def observe(event: str, values: dict[str, Any]) -> None:
        log.info(" ".join([event, *(f"{name}={value}" for name, value in values.items())]))

    return observe


@contextmanager
def _observed(job: _Job, observers: tuple[Observer, ...]) -> Iterator[None]:
    """Has the observers told of the run, and the plan's loggers."""
    with loggers.logging(job.plan.loggers, job.directory, job.choice, job.plan.seed) as further:
        told = (*observers, *further)
        job.engine.observe(lambda event, values: [observer(event, values) for observer in told])
        yield


# ------------------------------------------------------------------------------------------- the run itself


def _compute(protocol: Task, engine: Engine) -> Arrays:
    """Runs the task with its targets locked, and appends the targets to its arrays."""

    def closed() -> Arrays:
        raise RuntimeError("the targets of a task are not to be read by its run")

    vars(protocol)["targets"] = closed  # before the class's own
    try:
        arrays = protocol.run(engine)
    finally:
        del vars(protocol)["targets"]
    return arrays | protocol.targets()


@dataclass(frozen=True)
class _Outcome:
    """The result of a run. A completed run has arrays and scores; any other has a failure.

    A run found to have diverged when it was scored has arrays too: they are what the verdict rests on.
    """

    status: Literal["completed", "diverged", "failed"]
    seconds: float
    failure: BenchError | None = None
    arrays: Arrays | None = None
    scores: records.Scores | None = None


def _outcome(job: _Job, log: logging.Logger) -> _Outcome:
    """Runs and scores the task.

    A run that diverges is a result. So is a defect, in the suite or in a user's own method or task: it is
    recorded, then told.
    """
    began = time.perf_counter()
    arrays = None
    try:
        arrays = _compute(job.protocol, job.engine)
        scores = records.split_metrics(job.protocol.score(arrays), job.protocol.spec)
    except Diverged as error:
        return _Outcome("diverged", time.perf_counter() - began, error, arrays)
    except BenchError:
        raise
    except Exception as error:
        log.error(traceback.format_exc())
        first = (str(error).strip().splitlines() or [""])[0]
        failure = BenchError(f"failed: {type(error).__name__}: {first}")
        return _Outcome("failed", time.perf_counter() - began, failure)
    return _Outcome("completed", time.perf_counter() - began, None, arrays, scores)


# -------------------------------------------------------------------------------------------- after the run


def _record(job: _Job, outcome: _Outcome) -> records.Record:
    choice, engine, spec = job.choice, job.engine, job.protocol.spec
    nothing = dict.fromkeys(spec.metrics), dict.fromkeys(spec.metrics, f"the run {outcome.status}")
    metrics, undefined = outcome.scores or nothing
    digest = None if outcome.arrays is None else array_digest(outcome.arrays)
    return records.Record(
        schema_version=records.SCHEMA_VERSION,
        status=outcome.status,
        reason=None if outcome.failure is None else str(outcome.failure),
        task=records.TaskPart(
            name=choice.task.name,
            identity=choice.task_identity,
            version=spec.version,
            data_digest=job.digest,
            settings=asdict(choice.task_settings),
            main_metric=spec.main_metric,
        ),
        method=records.MethodPart(
            name=choice.method.name,
            identity=choice.method_identity,
            members=choice.method.members,
            settings=asdict(choice.method_settings),
            tuning=choice.tuning,
            capabilities=sorted(choice.method.provides),
            seed_matters=choice.method.cls.seed_matters,
        ),
        preset=choice.preset,
        seed=job.plan.seed,
        command=job.plan.command,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        metrics=metrics,
        undefined=undefined,
        validation=_last_finite(engine.logged),
        fits=[records.FitPart(**fit) for fit in engine.fits],
        diagnostics=engine.diagnostics,
        seconds=round(outcome.seconds, 3),
        environment=records.environment(records.device_name(engine.device)),
        trainer=asdict(engine.options),
        provenance=records.provenance(job.method_file, digest),
    )


def _last_finite(logged: list[tuple[str, str, float, float]]) -> dict[str, float]:
    """The last value of each logged number, left out where it is not finite."""
    last = {name: value for name, _, _, value in logged}
    return {name: value for name, value in last.items() if math.isfinite(value)}


def _write(job: _Job, outcome: _Outcome, record: records.Record) -> None:
    """Writes everything, `record.json` last: a directory with it holds a finished run."""
    directory, engine, arrays = job.directory, job.engine, outcome.arrays
    rows = [Row(f"{name} (validation)", stage, x, value) for name, stage, x, value in engine.logged]
    for stage, history in engine.histories:
        rows += [Row(k, stage, r["epoch"], v) for r in history for k, v in r.items() if k != "epoch"]
    if arrays is not None:
        rows = job.protocol.curves(arrays) + rows
        records.write_arrays(directory, arrays)
        charts = job.protocol.figures(arrays)
        figures.save(charts, directory / "figures", figures.footer([record.label]))
    records.write_curves(directory, rows)
    records.write_record(directory, record)
    (directory / "unfinished.json").unlink(missing_ok=True)
