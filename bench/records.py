"""What a run leaves behind: the schema of `record.json`, and reading and writing of the files beside it.

A run's directory holds

    record.json          one `Record`: what was run, on which data, from which source, and every metric
    arrays.safetensors   predictions and held-out truth: all that scoring needs, so that every metric of the
                         record can be computed again
    curves.csv           losses and scores over the run, one `bench.contract.Row` a line
    figures/, log.txt, checkpoints/

The record is written last: a directory without it is an unfinished run.
"""

from __future__ import annotations

import csv
import hashlib
import io
import platform
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import version as installed_version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import pydantic
import safetensors.numpy
import torch

import bench
from bench.contract import Arrays, Metrics, Row, Spec, Undefined
from bench.data import array_digest
from bench.errors import UsageError
from bench.files import write

SCHEMA_VERSION: Final = 1


class _Part(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class TaskPart(_Part):
    """Which protocol, on which data."""

    name: str
    identity: str
    version: int
    data_digest: str
    settings: dict[str, Any]
    main_metric: str


class MethodPart(_Part):
    """Which approximation of the posterior, with which settings.

    Attributes:
        name: As on the command line.
        identity: The name and every setting that differs from the preset `standard`.
        members: Independent fits whose draws are pooled; 1 is a single fit.
        settings: Every setting by name.
        tuning: Where the settings come from: a publication, `bench tune`, or neither.
        capabilities: What the method provided, out of `bench.contract.CAPABILITIES`.
        seed_matters: Whether another seed can give another answer to the same problem. None in records
            written before methods said so: ask the method of that name.
    """

    name: str
    identity: str
    members: int = 1
    settings: dict[str, Any]
    tuning: Literal["published", "tuned", "untuned"]
    capabilities: list[str]
    seed_matters: bool | None = None


class FitPart(_Part):
    """One fit of the run.

    Attributes:
        stage: What the task called the stage, such as `step 3`.
        epochs: Epochs that were trained.
        steps: Training steps, those of pretraining included.
        seconds: Wall-clock time.
        compiled: Whether the training step was compiled (`bench.compiled`).
        diagnostics: Numbers by which the method says how far the fit can be trusted.
    """

    stage: str
    epochs: int
    steps: int
    seconds: float
    compiled: bool = False
    diagnostics: dict[str, float] = {}


class Environment(_Part):
    """On what the run was computed: versions, system, model of the device, number of CPU threads."""

    python: str
    torch: str
    pytorch_lightning: str
    system: str
    device: str
    threads: int


class Provenance(_Part):
    """From which source the run was made.

    Attributes:
        version: Version of this package.
        source_hash: `source_hash` of the suite.
        method_file_hash: Hash of the file that defines the method, which may be a user's own.
        commit: Commit of the git repository in which that file lies; None outside a repository.
        dirty: Whether that repository held source that no commit holds; None outside a repository.
        arrays_digest: `bench.data.array_digest` of the arrays; None if the run left none.
    """

    version: str
    source_hash: str
    method_file_hash: str
    commit: str | None
    dirty: bool | None
    arrays_digest: str | None


class Record(_Part):
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
        seconds: Wall-clock time of the run.
        environment: On what it was computed.
        trainer: Options of Lightning's Trainer.
        provenance: From which source it was made.
    """

    schema_version: Literal[1]
    status: Literal["completed", "diverged", "failed"]
    reason: str | None
    task: TaskPart
    method: MethodPart
    preset: str
    seed: int
    command: str
    created: str
    metrics: dict[str, float | None]
    undefined: dict[str, str]
    validation: dict[str, float]
    fits: list[FitPart]
    diagnostics: dict[str, float] = {}
    seconds: float
    environment: Environment
    trainer: dict[str, Any]
    provenance: Provenance

    @property
    def label(self) -> tuple[str, str, str, int]:
        """Identities of method and task, preset, seed: what figures say of the run."""
        return self.method.identity, self.task.identity, self.preset, self.seed


# ----------------------------------------------------------------------------------------- reading, writing


def write_record(directory: Path, record: Record) -> None:
    """Writes `record.json`."""
    write(directory / "record.json", (record.model_dump_json(indent=2) + "\n").encode())


def read_record(directory: Path) -> Record:
    """Reads the record of a run's directory.

    Raises:
        UsageError: If there is none, or it does not follow the schema.
    """
    path = directory / "record.json"
    try:
        return Record.model_validate_json(path.read_bytes())
    except OSError:
        hint = "an unfinished run" if (directory / "unfinished.json").exists() else "no run"
        raise UsageError(f"{directory} holds {hint}: there is no record.json") from None
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UsageError(f"{path} is no record of schema {SCHEMA_VERSION}: {where}: {first['msg']}") from None


def write_arrays(directory: Path, arrays: Arrays) -> None:
    """Writes `arrays.safetensors`."""
    contiguous = {name: np.ascontiguousarray(array) for name, array in sorted(arrays.items())}
    write(directory / "arrays.safetensors", safetensors.numpy.save(contiguous))


def read_arrays(directory: Path) -> Arrays:
    """Reads the arrays of a run.

    Raises:
        UsageError: If they are missing, damaged, or not those that the record names.
    """
    path = directory / "arrays.safetensors"
    try:
        arrays = safetensors.numpy.load(path.read_bytes())
    except OSError:
        raise UsageError(f"{directory} holds no arrays.safetensors") from None
    except safetensors.SafetensorError as error:
        raise UsageError(f"{path} is damaged: {error}") from None
    if array_digest(arrays) != read_record(directory).provenance.arrays_digest:
        raise UsageError(f"{path} does not hold the arrays of the record beside it: their digests differ")
    return arrays


def write_curves(directory: Path, rows: Iterable[Row]) -> None:
    """Writes `curves.csv`."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(Row._fields)
    writer.writerows(rows)
    write(directory / "curves.csv", text.getvalue().encode())


def read_curves(directory: Path) -> list[Row]:
    """Reads `curves.csv`.

    Raises:
        UsageError: If there is none or it is not of that form.
    """
    path = directory / "curves.csv"
    try:
        with path.open(newline="") as file:
            header, *rows = csv.reader(file)
            if tuple(header) != Row._fields:
                raise ValueError(f"the header is not {','.join(Row._fields)}")
            return [Row(curve, series, float(x), float(value)) for curve, series, x, value in rows]
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: {' '.join(str(error).split())}") from None


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


# ------------------------------------------------------------------------------------------- provenance


def _hash(paths: Iterable[tuple[str, Path]]) -> str:
    digest = hashlib.sha256()
    for name, path in sorted(paths):
        digest.update(f"{name}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


_FOLDERS = ("methods", "tasks", "leaderboard")
"""Packages of `bench` that have folders of their own in the sources; installed they lie inside it."""


def source_files() -> dict[str, Path]:
    """Every Python and preset file of engine, methods and tasks, by its path in the sources."""
    found = {}
    for name in ("bench", "methods", "tasks"):
        # Found by name, not imported: methods and tasks stand above this file.
        spec = find_spec("bench" if name == "bench" else f"bench.{name}")
        for root in map(Path, (spec and spec.submodule_search_locations) or []):
            for path in (*root.rglob("*.py"), *root.rglob("*.toml")):
                inside = path.relative_to(root)
                if name != "bench" or inside.parts[0] not in _FOLDERS:
                    found[f"{name}/{inside.as_posix()}"] = path
    return found


def source_hash() -> str:
    """Hash over the source of the suite, subfolders included."""
    return _hash(source_files().items())


def file_hash(path: Path) -> str:
    """Hash of one source file."""
    return _hash([(path.name, path)])


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def provenance(method_file: Path, arrays_digest: str | None) -> Provenance:
    """Provenance of a run of the method in this file."""
    commit = _git(method_file.parent, "rev-parse", "HEAD")
    top = _git(method_file.parent, "rev-parse", "--show-toplevel")
    changed = _git(Path(top), "status", "--porcelain", "--", "*.py", "*.toml") if top else None
    return Provenance(
        version=bench.__version__,
        source_hash=source_hash(),
        method_file_hash=file_hash(method_file),
        commit=commit,
        dirty=None if changed is None else bool(changed),
        arrays_digest=arrays_digest,
    )


def environment(device: str) -> Environment:
    """The present environment."""
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
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "cpu"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "cpu")
