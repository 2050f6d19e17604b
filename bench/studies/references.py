"""Reference posteriors: predictions of an exact sampler that mixed, kept as data of the tasks.

A reference is two files of `tasks/references/`: `<target>.safetensors`, the arrays that the task says are its
reference, and `<target>.json`, where they come from. `Task.target` names the posterior; settings that change
the budget of a run alone are not in it, so that runs under any of them are compared with the same reference.
Tasks read references here; `bench.leaderboard.evidence.references` makes them of runs.
"""

from __future__ import annotations

from pathlib import Path

import pydantic
import safetensors.numpy

import bench.tasks
from bench.contract import Arrays
from bench.data import array_digest
from bench.errors import DataError

FOLDER = Path(bench.tasks.__path__[0]) / "references"
"""The references of the project."""


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


def exists(target: str) -> bool:
    """Whether there is a reference of this name."""
    return (FOLDER / f"{target}.json").exists()


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
    return (
        f"no reference for {target}: `bench run` of a method with the capability invariant, then "
        "`bench reference add`, makes one"
    )
