"""What a run leaves behind: the schema of `record.json`, and reading and writing of the files beside it.

A run's directory holds

    record.json          one `Record`: what was run, on which data, from which source, and every metric
    arrays.safetensors   predictions and held-out truth: all that scoring needs, so that every metric of the
                         record can be computed again
    curves.csv           losses and scores over the run, one `bench.contract.Row` a line
    files.json           what the run holds, with lengths (`bench.runs.holdings`)
    figures/, log.txt, checkpoints/

The record is written last: a directory without it is an unfinished run.
"""

from __future__ import annotations

import csv
import io
import math
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self

import numpy as np
import pydantic
import safetensors.numpy

import bench
from bench.errors import UsageError
from bench.settings import Count, Schema
from bench.spec import Arrays, Metrics, Row, Spec, Undefined, array_digest
from bench.system.files import read, write
from bench.system.source import file_hash, source_hash
from bench.text import all_escaped, hidden, is_plain, one_line

if TYPE_CHECKING:
    import torch

SCHEMA_VERSION: Final = 1


class RecordedTask(Schema):
    """Which protocol, on which data."""

    name: str
    identity: str
    version: int
    data_digest: str
    settings: dict[str, Any]
    main_metric: str


class RecordedMethod(Schema):
    """Which approximation of the posterior, with which settings.

    Attributes:
        name: As on the command line.
        identity: The name and every setting that differs from the preset `standard`.
        members: Independent fits whose draws are pooled; 1 is a single fit.
        settings: Every setting by name.
        tuning: Where the settings come from: a publication, `bench tune`, somebody's hand, or nowhere.
        capabilities: What the method provided, out of `bench.contract.CAPABILITIES`.
        seed_matters: Whether another seed can give another answer to the same problem. None in records
            written before methods said so: ask the method of that name.
    """

    name: str
    identity: str
    members: int = 1
    settings: dict[str, Any]
    tuning: Literal["published", "tuned", "by_hand", "untuned"]
    capabilities: list[str]
    seed_matters: bool | None = None


class RecordedFit(Schema):
    """One fit of the run.

    Attributes:
        stage: What the task called the stage, such as `step 3`.
        epochs: Epochs that were trained.
        steps: Training steps, those of pretraining included.
        seconds: Wall-clock time.
        compiled: Whether the training step was compiled (`bench.engine.compiled`).
        diagnostics: Numbers by which the method says how far the fit can be trusted, where they are finite.
    """

    stage: str
    epochs: int
    steps: int
    seconds: float
    compiled: bool = False
    diagnostics: dict[str, float] = {}


class RecordedDraws(Schema):
    """What stands behind some predictions of a stage, counted by the engine in what the method returned.

    Attributes:
        stage: What the task called the stage.
        asked: Draws of the weights that the task asked for, of each member of an ensemble.
        distinct: Draws that differ in what they predict (`bench.diagnostics.distinct_draws`), of all members
            together: 1 of a point, at most the members of an ensemble of points, and of a sampler no more
            than its chains have kept. Under several weightings of the examples, over all of them.
        predictions: How many predictions of the stage these numbers are of.
    """

    stage: str
    asked: Count
    distinct: Count
    predictions: Count


class RecordedEnergy(Schema):
    """Energy of the run as the machine counted it (`bench.system.joules`).

    Attributes:
        joules: Of the whole packages and accelerators, with whatever else ran there; of all starts together.
        source: What counted, such as `RAPL, 2 packages`.
    """

    joules: Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)]
    source: str


class Environment(Schema):
    """What the run was computed on: versions, system, model of the device, number of CPU threads."""

    python: str
    torch: str
    pytorch_lightning: str
    system: str
    device: str
    threads: int

    @property
    def machine(self) -> str:
        """The device and its threads, to which seconds belong: `AMD EPYC, 1 thread`."""
        return f"{self.device}, {self.threads} thread" + ("" if self.threads == 1 else "s")

    @property
    def is_accelerated(self) -> bool:
        """Whether the device is an accelerator, which its name tells: records have no more."""
        return re.match(r"NVIDIA|Tesla|Quadro|GeForce|AMD (Instinct|Radeon)", self.device) is not None


class Provenance(Schema):
    """The source that the run was made from.

    Attributes:
        version: Version of this package.
        source_hash: `source_hash` of the suite.
        method_file_hash: Hash of the file that defines the method, which may be a user's own.
        task_file_hash: Hash of the file that defines the task. None in records from before it was kept.
        commit: Commit of the git repository in which that file lies; None outside a repository.
        dirty: Whether that repository held source that no commit holds; None outside a repository.
        arrays_digest: `bench.data.array_digest` of the arrays; None if the run left none.
    """

    version: str
    source_hash: str
    method_file_hash: str
    task_file_hash: str | None = None
    commit: str | None
    dirty: bool | None
    arrays_digest: str | None


class Record(Schema):
    """One run.

    Attributes:
        schema_version: Version of this schema.
        status: completed; diverged, if a loss or prediction stopped being finite; failed, if there was a bug.
        reason: Why a run did not complete; None if it did.
        task: The protocol and its data.
        method: The approximation of the posterior.
        preset: smoke, standard or paper.
        seed: Seed of everything random in the run.
        command: A command line that repeats the run.
        created: When the run ended, ISO 8601 in UTC.
        metrics: Every metric of the task by name; None if it has no value.
        undefined: Metric without a value -> the reason.
        validation: Last value of each number that was logged on validation data.
        fits: The fits, in order.
        diagnostics: Diagnostics of predictions, of each the largest over the run (`prediction_rhat`).
        draws: What stands behind the predictions. None in records from before it was counted.
        seconds: Wall-clock time of the run, summed over its starts where it was stopped.
        energy: What the machine counted meanwhile; None where it counts nothing, or not of every start.
        environment: On what it was computed.
        trainer: Options of Lightning's Trainer.
        provenance: From which source it was made.
    """

    schema_version: Literal[1]
    status: Literal["completed", "diverged", "failed"]
    reason: str | None
    task: RecordedTask
    method: RecordedMethod
    preset: str
    seed: int
    command: str
    created: str
    metrics: dict[str, float | None]
    undefined: dict[str, str]
    validation: dict[str, float]
    fits: list[RecordedFit]
    diagnostics: dict[str, float] = {}
    draws: list[RecordedDraws] | None = None
    seconds: float
    energy: RecordedEnergy | None = None
    environment: Environment
    trainer: dict[str, Any]
    provenance: Provenance

    @property
    def precision(self) -> str:
        """Floating-point precision of the training, which is part of the method's identity."""
        return str(self.trainer.get("precision", "32-true"))

    @pydantic.model_validator(mode="after")
    def _is_coherent(self) -> Self:
        """Refuses parts that contradict each other, and names that are none of a file."""
        if self.task.main_metric not in self.metrics:
            raise ValueError(f"the main metric {self.task.main_metric} is none of the metrics")
        without = {name for name, value in self.metrics.items() if value is None}
        if self.undefined.keys() != without:
            raise ValueError("undefined does not name the metrics without a value")
        for identity in (self.task.identity, self.method.identity):
            if not re.fullmatch(r"[A-Za-z0-9_~][A-Za-z0-9._+,=~-]*", identity):
                raise ValueError(f"the identity {identity} is no name of a folder")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"the seed {self.seed} is not in [0, 2^63)")
        if self.method.members < 1:
            raise ValueError(f"{self.method.members} members: must be 1 or more")
        return self

    @property
    def label(self) -> tuple[str, str, str, int]:
        """Identities of method and task, preset, seed: what figures say of the run."""
        return self.method.identity, self.task.identity, self.preset, self.seed


# ----------------------------------------------------------------------------------------- reading, writing


def write_record(directory: Path, record: Record) -> None:
    """Writes `record.json`; what no record may hold is escaped (`bench.text`)."""
    write(directory / "record.json", content(Record.model_validate(all_escaped(record.model_dump()))))


def content(record: Record) -> bytes:
    """What `record.json` holds of a record."""
    return (record.model_dump_json(indent=2) + "\n").encode()


def read_record(directory: Path) -> Record:
    """Reads the record of a run's directory.

    Raises:
        UsageError: If there is none, it does not follow the schema, or a string holds characters that could
            deceive a terminal.
    """
    path = directory / "record.json"
    try:
        raw = read(path)
        record = Record.model_validate_json(raw)
    except (FileNotFoundError, NotADirectoryError):
        hint = "an unfinished run" if (directory / "unfinished.json").exists() else "no run"
        raise UsageError(f"{directory} holds {hint}: there is no record.json") from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        why = one_line(f"{where}: {first['msg'].removeprefix('Value error, ')}".removeprefix(": "))
        raise UsageError(f"{path} is no record of schema {SCHEMA_VERSION}: {why}") from None
    except ValueError as error:  # a path that no file has
        raise UsageError(f"cannot read {path}: {error}") from None
    if not is_plain(raw):
        _refuse_hidden(path, record.model_dump())
    return record


def _refuse_hidden(path: Path, value: Any) -> None:
    if (found := next(hidden(value), None)) is not None:
        raise UsageError(f"{path} holds characters that are never printed: '{one_line(found)}'")


def write_arrays(directory: Path, arrays: Arrays) -> None:
    """Writes `arrays.safetensors`.

    Raises:
        ValueError: If a name holds hidden characters (`bench.text`), with which no array is read again.
    """
    if (found := next(hidden(list(arrays)), None)) is not None:
        raise ValueError(f"an array is named '{found}'")
    contiguous = {name: np.asarray(array, order="C") for name, array in sorted(arrays.items())}
    write(directory / "arrays.safetensors", safetensors.numpy.save(contiguous))


def read_arrays(directory: Path, path: Path | None = None) -> Arrays:
    """Reads the arrays of a run.

    Args:
        directory: Of the run.
        path: The file, where it does not lie beside the record.

    Raises:
        UsageError: If they are missing, damaged, or not those that the record names.
    """
    content = partial(read, directory / "arrays.safetensors") if path is None else path.read_bytes
    path = path or directory / "arrays.safetensors"
    try:
        arrays = safetensors.numpy.load(content())
    except FileNotFoundError:
        raise UsageError(f"{directory} holds no arrays.safetensors") from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except (safetensors.SafetensorError, LookupError, TypeError, ValueError) as error:
        # Of types that numpy does not have, such as bfloat16, the reader knows nothing.
        raise UsageError(f"{path} is damaged: {one_line(error)}") from None
    _refuse_hidden(path, list(arrays))
    if array_digest(arrays) != read_record(directory).provenance.arrays_digest:
        raise UsageError(f"{path} does not hold the arrays of the record beside it: their digests differ")
    return arrays


def checked_curves(rows: list[Row]) -> list[Row]:
    """The rows, if they are points of curves; raises ValueError or TypeError if they are not."""
    for curve, series, x, value in rows:
        if not (isinstance(curve, str) and isinstance(series, str)):
            raise TypeError(f"curve and series must be text, not {curve!r} and {series!r}")
        float(x), float(value)
    return rows


def write_curves(directory: Path, rows: Iterable[Sequence[Any]]) -> None:
    """Writes `curves.csv`; hidden characters of names are escaped (`bench.text`)."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(Row._fields)
    writer.writerows(all_escaped([tuple(row) for row in rows]))
    write(directory / "curves.csv", text.getvalue().encode())


def replace_curves(directory: Path, rows: list[Row]) -> None:
    """Puts rows into `curves.csv` in place of those of the same curve and series; others stay as they are.

    Raises:
        UsageError: If there is none or it is not of that form.
    """
    read_curves(directory)
    new = {(row.curve, row.series) for row in rows}
    with (directory / "curves.csv").open(newline="") as file:
        _, *kept = csv.reader(file)  # numbers as they are written
    write_curves(directory, [*rows, *(row for row in kept if tuple(row[:2]) not in new)])


def read_curves(directory: Path, path: Path | None = None) -> list[Row]:
    """Reads `curves.csv`.

    Args:
        directory: Of the run.
        path: The file, where it does not lie beside the record.

    Raises:
        UsageError: If there is none or it is not of that form.
    """
    path = path or directory / "curves.csv"
    try:
        header, *rows = csv.reader(io.StringIO(read(path).decode(), newline=""))
        if tuple(header) != Row._fields:
            raise ValueError(f"the header is not {','.join(Row._fields)}")
        found = [Row(curve, series, float(x), float(value)) for curve, series, x, value in rows]
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, csv.Error) as error:
        raise UsageError(f"{path} is damaged: {one_line(error)}") from None
    _refuse_hidden(path, sorted({name for row in found for name in row[:2]}))
    return found


Scores = tuple[dict[str, float | None], dict[str, str]]
"""Metric -> number or None, and metric without a number -> reason."""


def split_metrics(scores: Metrics, spec: Spec) -> Scores:
    """Metrics as a record keeps them: numbers or null, and the reasons of the nulls.

    Raises:
        ValueError: If the metrics are not those of the spec, or one without a value must have one.
    """
    if set(scores) != set(spec.metrics):
        raise ValueError(f"score gave {sorted(scores)}, the spec declares {sorted(spec.metrics)}")
    numbers: dict[str, float | None] = {}
    undefined = {}
    for name, metric in spec.metrics.items():
        value = scores[name]
        if not isinstance(value, Undefined) and not np.isfinite(value):
            value = Undefined(f"not finite: {value}")
        if isinstance(value, Undefined):
            if not metric.may_be_undefined:
                raise ValueError(f"the metric {name} may not be undefined: {value.reason}")
            numbers[name], undefined[name] = None, value.reason
        else:
            numbers[name] = float(value)
    return numbers, undefined


RELATIVE: Final = 1e-9
ABSOLUTE: Final = 1e-12


A_SWAP: Final = 1e-5
"""Of areas under curves of ranks: processors order otherwise what differs in its last bits."""
_AREA: Final = re.compile(r"(^|_)(auroc|aupr|auc|aurc|augrc)(_|$)")


def same(name: str, claim: float, computed: float) -> bool:
    """Whether two numbers are the metric of this name of the same arrays on two processors."""
    absolute = A_SWAP if _AREA.search(name) else ABSOLUTE
    return math.isclose(claim, computed, rel_tol=RELATIVE, abs_tol=absolute)


# ------------------------------------------------------------------------------------------- provenance


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def provenance(method_file: Path, arrays_digest: str | None, task_file: Path | None = None) -> Provenance:
    """Provenance of a run of the method in this file on the task in that."""
    # An environment may lie inside a repository that has nothing to do with what is installed there.
    is_ignored = _git(method_file.parent, "check-ignore", str(method_file)) is not None
    found = None if is_ignored else _git(method_file.parent, "rev-parse", "HEAD", "--show-toplevel")
    commit, _, top = (found or "").partition("\n")
    changed = _git(Path(top), "status", "--porcelain", "--", "*.py", "*.toml") if top else None
    return Provenance(
        version=bench.__version__,
        source_hash=source_hash(),
        method_file_hash=file_hash(method_file),
        task_file_hash=None if task_file is None else file_hash(task_file),
        commit=commit or None,
        dirty=None if changed is None else bool(changed),
        arrays_digest=arrays_digest,
    )


def with_commit(record: Record) -> Record:
    """The record of a run that was made outside a repository, with the commit that holds its source.

    Unchanged where the run names a commit, and where the suite itself has other source, or lies in no
    repository whose source is committed.
    """
    run = record.provenance
    if run.commit is not None:
        return record
    suite = provenance(Path(bench.__file__), None)
    if run.source_hash != suite.source_hash or suite.dirty is not False:
        return record
    known = run.model_copy(update={"commit": suite.commit, "dirty": False})
    return record.model_copy(update={"provenance": known})


def environment(device: str) -> Environment:
    """The present environment."""
    import torch

    return Environment(
        python=platform.python_version(),
        torch=torch.__version__,
        pytorch_lightning=installed_version("pytorch-lightning"),
        system=f"{sys.platform} {platform.machine()}",
        device=device,
        threads=torch.get_num_threads(),
    )


def device_name(device: torch.device) -> str:
    """Model of the processor or accelerator."""
    if device.type == "cuda":
        import torch

        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "cpu"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "cpu")
