"""Reference posteriors: predictions of an exact sampler that mixed, kept as data of the tasks.

A reference is two files of `tasks/references/`: `<target>.safetensors`, the arrays that the task says are its
reference, and `<target>.json`, where they come from. `Task.target` names the posterior; settings that change
the budget of a run alone are not in it, so that runs under any of them are compared with the same reference.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pydantic
import safetensors.numpy

import bench.tasks
from bench.contract import Arrays
from bench.data import array_digest
from bench.errors import DataError, UsageError

FOLDER = Path(bench.tasks.__path__[0]) / "references"

SAMPLERS = ("hmc",)
"""Methods whose only error, once their chains mixed, is that of finitely many draws."""


class Reference(pydantic.BaseModel):
    """Where a reference comes from: the run that made it, and the digest of its arrays."""

    model_config = pydantic.ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    target: str
    digest: str
    task: str
    task_version: int
    method: str
    seed: int
    command: str
    created: str
    commit: str
    source_hash: str
    diagnostics: dict[str, float]


def read(target: str) -> Arrays:
    """The arrays of a reference, empty if there is none.

    Raises:
        DataError: If it is damaged, or not what the file beside it says.
    """
    description = FOLDER / f"{target}.json"
    if not description.exists():
        return {}
    path = FOLDER / f"{target}.safetensors"
    try:
        arrays = safetensors.numpy.load(path.read_bytes())
        expected = Reference.model_validate_json(description.read_bytes()).digest
    except (OSError, safetensors.SafetensorError, pydantic.ValidationError) as error:
        raise DataError(f"{path}: cannot be read ({' '.join(str(error).split())})") from None
    if array_digest(arrays) != expected:
        raise DataError(f"{path}: not the reference that {description.name} describes, their digests differ")
    return arrays


def missing(target: str) -> str:
    """Why a metric that needs a reference has no value."""
    return f"no reference for {target}: `bench run hmc` and `bench reference add` make one"


def add(run: Path, to: Path | None = None, force: bool = False) -> Path:
    """Makes a finished run the reference of its target; returns the description's path.

    Args:
        run: Directory of the run.
        to: Folder of the references; None is that of the tasks.
        force: Replace an older reference.

    Raises:
        UsageError: If the run is no evidence, its method no exact sampler, if its chains did not mix or do
            not say so, or if its task keeps no reference.
        OutputError: If it cannot be written.
    """
    # Here, for the tasks import this file to read.
    from bench.diagnostics import RHAT_LIMIT, mixed
    from bench.leaderboard.entries import refuse
    from bench.records import read_record, write
    from bench.runner import load_scores

    record = read_record(run)
    refuse(run, record)
    if record.status != "completed":
        raise UsageError(f"{run} {record.status}: a reference needs a completed run")
    if record.method.name not in SAMPLERS:
        raise UsageError(f"{run} is a run of {record.method.name}: a reference needs {' or '.join(SAMPLERS)}")
    match mixed(record.diagnostics):
        case None:
            raise UsageError(f"{run} does not say whether it mixed: R-hat needs at least two chains")
        case False:
            rhat = record.diagnostics["prediction_rhat"]
            raise UsageError(
                f"{run} did not mix: R-hat of its predictions is {rhat:.3f}, a reference needs less than "
                f"{RHAT_LIMIT}; take more draws or a longer warm-up"
            )
    task, arrays = load_scores(run)
    if record.task.version != task.spec.version:
        raise UsageError(f"{run} is of version {record.task.version} of its task, now {task.spec.version}")
    reference, target = task.reference(arrays), task.target
    if target is None or not reference:
        raise UsageError(f"{record.task.name} keeps no reference posterior")
    description = (FOLDER if to is None else to) / f"{target}.json"
    if description.exists() and not force:
        raise UsageError(f"{description} is there already: it is kept; --force replaces it")
    found = Reference(
        target=target,
        digest=array_digest(reference),
        task=record.task.identity,
        task_version=record.task.version,
        method=record.method.identity,
        seed=record.seed,
        command=record.command,
        created=record.created,
        commit=str(record.provenance.commit),
        source_hash=record.provenance.source_hash,
        diagnostics=record.diagnostics,
    )
    contiguous = {name: np.ascontiguousarray(array) for name, array in sorted(reference.items())}
    write(description.with_name(f"{target}.safetensors"), safetensors.numpy.save(contiguous))
    write(description, (found.model_dump_json(indent=2) + "\n").encode())
    return description
