"""One run, from its plan to its record; and `load`, which gives the fitted method back.

A run has four steps, which `execute` takes: its directory is claimed, the task is run and scored, the record
is made of what came out, everything is written. The directory of a run is
`<out>/<task identity>/<method identity>/<preset>-seed<k>/`. While the run is unfinished its directory holds
`unfinished.json`; the same command then goes on where the run stopped, and ends with the same numbers.
"""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from bench import figures
from bench.contract import Arrays, FinishedRun, Method, Problem, Row, Task
from bench.data import array_digest
from bench.engine import checkpoints
from bench.engine.engine import Engine, TrainerOptions
from bench.engine.ensemble import Ensemble
from bench.errors import BenchError, Diverged, OutputError, UsageError
from bench.runs import holdings, loggers, records, registry, resolution
from bench.runs.claim import Claim, claimed
from bench.runs.events import Observer, noticing
from bench.runs.plan import Plan, called_as
from bench.runs.setup import Setup, set_up
from bench.settings import build, settings
from bench.system import files, joules, processes, signals


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        directory: Where it lies.
        is_first_process: False in a further process of a distributed run, which computes along and writes
            nothing.
        notices: Sentences on what was out of the ordinary: the run was there already, its figures could not
            be drawn.
    """

    directory: Path
    is_first_process: bool = True
    notices: tuple[str, ...] = ()

    @cached_property
    def record(self) -> records.Record:
        """What was run, and what came out; read from the directory."""
        return records.read_record(self.directory)


@settings
class _Call(Plan):
    """What `run` takes: a plan, and who is told."""

    observers: tuple[Observer, ...] = ()


@called_as(_Call)
def run(method: str, task: str, *, observers: tuple[Observer, ...] = (), **options: Any) -> Run:
    """Fits a method on a task, scores it, and writes the record; what `bench run` does.

    A run that is there already is returned as it is, and so is told where the suite's source is another by
    now; a run that was stopped goes on.

    Args:
        method: Name of the method, or `package.module:Class`.
        task: Name of the task, or `package.module:Class`.
        observers: Called with (event, values) on every event of the run (`bench.runs.events`).
        options: Further fields of `bench.runs.plan.Plan`, which says what they mean.

    Raises:
        UsageError: If an argument is wrong, or another run stands in the way.
        DataError: If the task's data cannot be had.
        Diverged: If the run diverged; its record says so.
        OutputError: If the results cannot be written.
        BenchError: If the run failed; its record says so.
    """
    return execute(build(Plan, {"method": method, "task": task, **options}), observers)


def execute(plan: Plan, observers: tuple[Observer, ...] = ()) -> Run:
    """Runs a plan; see `run`."""
    setup = set_up(plan)
    place = setup.engine.place
    starts = place.starts_others or place.world == 1  # processes that may be started in vain
    if not starts or (record := setup.made) is None:
        setup.engine.check()
        if plan.threads is None:
            processes.divide_threads(place)
        with processes.running():
            if (record := processes.from_first(lambda: setup.made)) is None:
                return _further(setup) if place.rank > 0 else _first(setup, observers)
    return _as_it_is(setup, record, observers)


def _first(setup: Setup, observers: tuple[Observer, ...]) -> Run:
    """The run in the first process, which alone writes what the run leaves; checkpoints of fits apart."""
    notices: list[str] = []
    opened: list[Any] = []
    with ExitStack() as stack:

        def begin() -> None:
            meter, why = _meter(setup, stack)
            claim = stack.enter_context(claimed(setup.directory, setup.fingerprint, setup.plan.force, meter))
            observing = (claim.observe, *observers, noticing(notices))
            opened.extend((claim, *stack.enter_context(loggers.telling(setup, observing))))
            if why and setup.plan.energy:
                opened[-1]("notice", {"text": f"no energy is recorded: {why}"})

        processes.from_first(begin)
        claim, log, notify = opened
        log.info(setup.command)
        outcome = _outcome(setup, claim, log)
        ending = partial(_end, setup, outcome, claim, log, notify)
        if outcome.status == "failed":  # the further processes have ended by the same defect
            ending()
        processes.from_first(ending)
    return Run(setup.directory, notices=tuple(notices))


def _meter(setup: Setup, stack: ExitStack) -> tuple[joules.Meter | None, str]:
    """What counts the joules of the run until the stack is left, or why nothing does."""
    if setup.engine.place.world > 1:
        return None, "several processes share the run, and each would count its own part"
    try:
        found = joules.meter(_uuid(setup.engine.device))
    except joules.NoMeter as error:
        return None, str(error)
    stack.callback(found.close)
    return found, ""


def _uuid(device: torch.device) -> str | None:
    """By which NVML knows an accelerator; None of a processor."""
    if device.type != "cuda":
        return None
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def _end(setup: Setup, outcome: _Outcome, claim: Claim, log: logging.Logger, notify: Observer) -> None:
    """Writes what the run leaves; raises what it failed by."""
    record = _record(setup, outcome)
    _write(setup, outcome, record, log, notify)
    notify("record", {"directory": str(setup.directory)})
    claim.marker.unlink(missing_ok=True)
    log.info(f"{outcome.status} in {outcome.seconds:.1f} s: {record.metrics}")
    if (failure := outcome.failure) is not None:
        where = f"the traceback is in {setup.directory}/log.txt"
        hint = where if outcome.status == "failed" else f"recorded in {setup.directory}"
        raise type(failure)(f"{failure}; {hint}")


def _further(setup: Setup) -> Run:
    """The run in a further process, which computes along."""
    processes.from_first(lambda: None)  # the directory is claimed
    try:
        with signals.unturned():
            _compute(setup.protocol, setup.engine)
    except Diverged:  # as the first process has: it writes the record, and tells
        pass
    except Exception as error:
        if not isinstance(error, BenchError):
            processes.report(error)
        raise
    processes.from_first(lambda: None)  # all is written
    return Run(setup.directory, is_first_process=False)


def load(run: str | Path, data_dir: str | None = None, imports: tuple[str, ...] = ()) -> Any:
    """The fitted method of a finished run, ready to predict; on own data what takes rows (`Task.loaded`).

    Args:
        run: The run's directory, with its checkpoints.
        data_dir: Folder with data files; the task's problem is posed again to rebuild the network.
        imports: Names `package.module:Class` of own methods and tasks whose code may run; a name that the
            record holds is looked up and never imported.

    Raises:
        UsageError: If the directory holds no completed run with a checkpoint, the checkpoint is damaged, or
            method or task is not known.
    """
    registry.import_own(*imports)
    directory = Path(run)
    record = records.read_record(directory)
    holdings.check(directory)
    paths = sorted((directory / "checkpoints").glob("*.ckpt"))
    if not paths:
        raise UsageError(f"{directory} holds no checkpoint")
    method = registry.method(record.method.name)
    settings = build(method.cls.settings_class, record.method.settings, "method")

    def restore(problem: Problem) -> Method:
        members: list[Method] = []
        for path in paths[-record.method.members :]:
            fitted: Method = method.cls.made_for(problem, settings)
            checkpoints.restore(fitted, path)
            members.append(fitted)
        return members[0] if len(members) == 1 else Ensemble(members)

    return task_of(record, data_dir).loaded(directory, restore)


def predicting(run: Path, stage: str, data_dir: str | None = None) -> tuple[Engine, Method]:
    """What a finished run predicts other inputs by: an engine of its seed, and its fitted method.

    Args:
        run: The run's directory, with its checkpoints.
        stage: Name of what is predicted: the draws of the weights follow from it and from the run's seed.
        data_dir: Folder with data files.

    Raises:
        UsageError: As of `load`.
    """
    record = records.read_record(run)
    method = registry.method(record.method.name)
    settings = build(method.cls.settings_class, record.method.settings, "method")
    options = build(TrainerOptions, record.trainer, "trainer")
    engine = Engine(method.cls, settings, record.seed, None, options, record.method.members)
    engine.stage(stage)
    return engine, load(run, data_dir)


def task_of(record: records.Record, data_dir: str | None = None) -> Task:
    """The task of a record, with the settings that it had."""
    task = registry.task(record.task.name)
    with registry.defects(f"the task '{record.task.name}'"):
        protocol: Task = task.cls(build(task.cls.settings_class, record.task.settings, "task"), data_dir)
    return protocol


def finished(
    directory: Path,
    arrays_of: Callable[[Path], Path | None] = lambda directory: None,
    curves_of: Callable[[Path], Path | None] = lambda directory: None,
) -> FinishedRun:
    """A finished run as `Task.compare` gets it; needs no data set.

    A run handed in has no `curves.csv`: its curves are the task's own, without those of the training.

    Args:
        directory: Of the run.
        arrays_of: The file of its arrays, None if it lies there; asked when the arrays are.
        curves_of: The file of its curves, likewise.

    Raises:
        UsageError: If the directory holds no finished run, or its method cannot be found. Arrays and curves
            raise it too, when they are asked for and cannot be read.
    """
    record = records.read_record(directory)
    holdings.check(directory)
    task, made = task_of(record), record.method
    method = registry.with_members(registry.method(made.name), made.members)
    *preset, _ = resolution.preset_values(method, registry.task(record.task.name), record.preset)
    given = build(method.cls.settings_class, made.settings, "method"), task.settings
    changed = {
        f"{kind}.{name}": value
        for kind, own, values in zip(("method", "task"), given, preset, strict=True)
        for name, value in asdict(own).items()
        if value != getattr(build(type(own), values, kind), name)
    }
    if record.precision != resolution.FULL_PRECISION:
        changed["trainer.precision"] = record.precision

    def curves() -> list[Row]:
        path = curves_of(directory)
        if (path or directory / "curves.csv").exists():
            return records.read_curves(directory, path)
        with registry.defects(f"the curves of {directory}"):
            return records.checked_curves(task.curves(found.arrays))

    found = FinishedRun(
        task=task,
        task_name=record.task.name,
        task_identity=record.task.identity,
        method_name=made.name,
        method_identity=made.identity,
        preset=record.preset,
        seed=record.seed,
        changed=changed,
        metrics=record.metrics,
        read_arrays=lambda: records.read_arrays(directory, arrays_of(directory)),
        read_curves=curves,
        provides=method.cls.provides,
    )
    return found


def load_scores(directory: Path, path: Path | None = None) -> tuple[Task, Arrays]:
    """The task of a finished run and the arrays that it is scored from; needs no data set.

    `path` is the file of the arrays, where it does not lie in the directory.
    """
    return task_of(records.read_record(directory)), records.read_arrays(directory, path)


def redraw(directory: Path) -> list[Path]:
    """Makes the figures of a finished run anew, and the task's own curves; returns the figures' paths.

    Losses and validation numbers in `curves.csv` come from the run itself, and stay.

    Raises:
        UsageError: If the directory holds no run with arrays, or its task cannot be found or has a defect.
        OutputError: If they cannot be written.
    """
    holdings.check(directory)
    task, arrays = load_scores(directory)
    with registry.defects(f"the figures of {directory}"):
        footer = figures.footer([records.read_record(directory).label])
        paths = figures.save(task.figures(arrays), directory / "figures", footer)
    with registry.defects(f"the curves of {directory}"):
        records.replace_curves(directory, records.checked_curves(task.curves(arrays)))
    holdings.keep_again(directory)
    return paths


# ------------------------------------------------------------------------------------------- before the run


def _as_it_is(setup: Setup, record: records.Record, observers: tuple[Observer, ...]) -> Run:
    """A run that was made already, told as such; raises Diverged if it diverged."""
    same = record.provenance.source_hash == records.source_hash()
    source = "" if same else " by another version of the suite"
    told = f"{setup.directory} holds this run, made {record.created}{source}; --force makes it anew"
    if record.status == "diverged":
        raise Diverged(f"{record.reason}; {told}")
    for observer in observers:
        observer("notice", {"text": told})
    return Run(setup.directory, notices=(told,))


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
    return arrays | protocol.given() | protocol.targets()


@dataclass(frozen=True)
class _Outcome:
    """The result of a run. A completed run has arrays and scores; any other has a failure.

    A run found to have diverged when it was scored has arrays too: they are what the verdict rests on. So has
    one whose score has a bug. They are written already.
    """

    status: Literal["completed", "diverged", "failed"]
    seconds: float
    energy: records.RecordedEnergy | None
    failure: BenchError | None = None
    arrays: Arrays | None = None
    digest: str | None = None
    scores: records.Scores | None = None


def _outcome(setup: Setup, claim: Claim, log: logging.Logger) -> _Outcome:
    """Runs the task, writes its arrays, and scores it.

    A run that diverges is a result. So is a defect, in the suite or in a user's own method or task: it is
    recorded, then told.
    """
    arrays = digest = None
    try:
        with signals.unturned():
            found = _compute(setup.protocol, setup.engine)
        records.write_arrays(setup.directory, found)
        arrays, digest = found, array_digest(found)
        scores = _scores(setup.protocol, arrays)
    except Diverged as error:
        return _Outcome("diverged", claim.seconds, claim.energy, error, arrays, digest)
    except BenchError as error:
        if isinstance(error, processes.Lost):
            log.error(traceback.format_exc())
        raise
    except (Exception, SystemExit) as error:  # a method that ends the process has a defect like any other
        log.error(traceback.format_exc())
        failure = BenchError(f"failed: {_first_line(error)}")
        return _Outcome("failed", claim.seconds, claim.energy, failure, arrays, digest)
    return _Outcome("completed", claim.seconds, claim.energy, None, arrays, digest, scores)


def _scores(protocol: Task, arrays: Arrays) -> records.Scores:
    """The metrics of the arrays, and why some have no value.

    Raises:
        Diverged: If a metric that always has a value has none, and predictions are too large for their type.
    """
    floats = {name: array for name, array in arrays.items() if array.dtype.kind == "f"}
    beyond = [name for name, array in floats.items() if not np.isfinite(array).all()]
    try:
        with np.errstate(all="ignore") if beyond else nullcontext():
            return records.split_metrics(protocol.score(arrays), protocol.spec)
    except ValueError as error:
        if not beyond:
            raise
        too_large = f"{beyond[0]} of the predictions is beyond {arrays[beyond[0]].dtype}"
        raise Diverged(f"diverged: {too_large}, and {error}") from None


# -------------------------------------------------------------------------------------------- after the run


def _record(setup: Setup, outcome: _Outcome) -> records.Record:
    choice, engine, spec = setup.choice, setup.engine, setup.protocol.spec
    nothing = dict.fromkeys(spec.metrics), dict.fromkeys(spec.metrics, f"the run {outcome.status}")
    metrics, undefined = outcome.scores or nothing
    return records.Record(
        schema_version=records.SCHEMA_VERSION,
        status=outcome.status,
        reason=None if outcome.failure is None else str(outcome.failure),
        task=records.RecordedTask(
            name=choice.task.name,
            identity=choice.task_identity,
            version=spec.version,
            data_digest=setup.digest,
            settings=asdict(choice.task_settings),
            main_metric=spec.main_metric,
        ),
        method=records.RecordedMethod(
            name=choice.method.name,
            identity=choice.method_identity,
            members=choice.method.members,
            settings=asdict(choice.method_settings),
            tuning=choice.tuning,
            capabilities=sorted(choice.method.provides),
            seed_matters=choice.method.cls.seed_matters,
        ),
        preset=choice.preset,
        seed=setup.plan.seed,
        command=setup.command,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        metrics=metrics,
        undefined=undefined,
        validation=_finite({name: value for name, _, _, value in engine.logged}),
        fits=[
            records.RecordedFit(**fit | {"diagnostics": _finite(fit["diagnostics"])}) for fit in engine.fits
        ],
        diagnostics=_finite(engine.diagnostics),
        draws=[records.RecordedDraws(**counted) for counted in engine.draws],
        seconds=round(outcome.seconds, 3),
        energy=outcome.energy,
        environment=records.environment(records.device_name(engine.device)),
        trainer=asdict(engine.options),
        provenance=records.provenance(setup.method_file, outcome.digest, setup.task_file),
    )


def _finite(values: dict[str, Any]) -> dict[str, float]:
    """Numbers as a record keeps them: one that is not finite, or none at all, is left out."""
    found = {}
    for name, value in values.items():
        with suppress(TypeError, ValueError):
            if math.isfinite(number := float(value)):
                found[name] = number
    return found


def _write(
    setup: Setup, outcome: _Outcome, record: records.Record, log: logging.Logger, notify: Observer
) -> None:
    """Writes what is not written yet, `record.json` last: a directory with it holds a finished run."""
    directory, engine, task, arrays = setup.directory, setup.engine, setup.protocol, outcome.arrays
    own: list[Row] = []
    rows = [Row(f"{name} (validation)", stage, x, value) for name, stage, x, value in engine.logged]
    for stage, history in engine.histories:
        rows += [Row(k, stage, r["epoch"], v) for r in history for k, v in r.items() if k != "epoch"]
    if arrays is not None:
        with _spared(directory, log, notify, "curves"):
            own = records.checked_curves(task.curves(arrays))
        with _spared(directory, log, notify, "figures"):
            charts = task.figures(arrays)
            figures.save(charts, directory / "figures", figures.footer([record.label]))
    with _spared(directory, log, notify, "notes"):
        notes = dict(task.notes())
        if remarks := [] if arrays is None else task.remarks(arrays):
            notes["notes.txt"] = (
                "\n".join([notes.get("notes.txt", "").rstrip("\n"), *remarks]).lstrip() + "\n"
            )
        for name, text in notes.items():
            files.write(directory / name, text.encode())
    records.write_curves(directory, own + rows)
    holdings.keep(directory)
    records.write_record(directory, record)


@contextmanager
def _spared(directory: Path, log: logging.Logger, notify: Observer, what: str) -> Iterator[None]:
    """A defect of the task inside the block costs its curves or figures, and not the run: it is told."""
    try:
        yield
    except OutputError:
        raise
    except (Exception, SystemExit) as error:
        log.error(traceback.format_exc())
        text = (
            f"the task cannot make its {what}: {_first_line(error)}; "
            f"the traceback is in {directory}/log.txt; once mended, bench figures {directory} makes them"
        )
        notify("notice", {"text": text})


def _first_line(error: BaseException) -> str:
    """What an error is, in one line."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
