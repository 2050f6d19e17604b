"""Reference posteriors: which runs may become one, and how they do; `bench.studies.references` reads them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import safetensors.numpy

from bench.data import array_digest
from bench.diagnostics import RHAT_LIMIT, mixed
from bench.errors import UsageError
from bench.leaderboard.evidence.entries import refuse
from bench.runs import registry
from bench.runs.records import Record, read_record
from bench.runs.runner import load_scores
from bench.studies import references
from bench.studies.references import Reference
from bench.system.files import write_all


def add(run: Path, to: Path | None = None, force: bool = False) -> Path:
    """Makes a finished run the reference of its target; returns the description's path.

    Args:
        run: Directory of the run.
        to: Folder of the references; None is that of the tasks.
        force: Replace an older reference.

    Raises:
        UsageError: If the run is no evidence, if its method does not leave the posterior invariant, if its
            chains did not mix or do not say so, or if its task keeps no reference.
        OutputError: If it cannot be written.
    """
    record = read_record(run)
    refuse(run, record)
    if record.status != "completed":
        raise UsageError(f"{run} {record.status}: a reference needs a completed run")
    _must_have_mixed(run, record)
    task, arrays = load_scores(run)
    with registry.defects(f"the reference of {run}"):
        reference, target = task.reference(arrays), task.target
    if target is None or not reference:
        raise UsageError(f"{record.task.name} keeps no reference posterior")
    description = (references.FOLDER if to is None else to) / f"{target}.json"
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
    write_all(
        {
            description.with_name(f"{target}.safetensors"): safetensors.numpy.save(contiguous),
            description: (found.model_dump_json(indent=2) + "\n").encode(),
        }
    )
    return description


def _must_have_mixed(run: Path, record: Record) -> None:
    """Refuses a run whose error is more than that of finitely many draws, or may be."""
    if "invariant" not in registry.method(record.method.name).provides:
        able = [name for name, entry in registry.methods().items() if "invariant" in entry.provides]
        raise UsageError(
            f"{run} is a run of {record.method.name}, whose draws do not leave the posterior invariant; "
            f"those of these methods do: {', '.join(able)}"
        )
    match mixed(record.diagnostics):
        case None:
            raise UsageError(f"{run} does not say whether it mixed: R-hat needs at least two chains")
        case False:
            rhat = record.diagnostics["prediction_rhat"]
            raise UsageError(
                f"{run} did not mix: R-hat of its predictions is {rhat:.3f}, a reference needs less than "
                f"{RHAT_LIMIT}; take more draws or a longer warm-up"
            )
