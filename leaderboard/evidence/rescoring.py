"""`bench record rescore`: metrics of committed records, computed again from their arrays.

A task whose scores change gets a higher `version`, and its records follow without any run. A number that was
there before and is the same but for its last bits stays as it is written.
"""

from __future__ import annotations

import json
from pathlib import Path

from bench.errors import UsageError
from bench.leaderboard.evidence.entries import scores_of
from bench.leaderboard.evidence.store import sha256
from bench.leaderboard.evidence.submission import MANIFEST, OURS, RECORDS, SUBMISSIONS
from bench.runs import registry
from bench.runs.records import read_record, same, split_metrics
from bench.system.files import write

Moved = dict[str, tuple[float | None, float | None]]
"""Metric -> what it was and what it is, where these are other numbers."""


def rescore(run: Path) -> Moved:
    """Writes the metrics of a committed record, and the version of its task, as the task is now.

    Nothing else of the record changes. In the project's own submission the manifest follows.

    Args:
        run: Directory of the record.

    Returns:
        The metrics that were there before and moved.

    Raises:
        UsageError: If it is no committed record of the project, its run is not completed, or its arrays are
            not at hand.
    """
    run = run.resolve()
    if run.parents[2] not in (RECORDS.resolve(), (SUBMISSIONS / OURS).resolve()):
        raise UsageError(f"{run} is no committed record: only those are scored again; others are run again")
    before = read_record(run)
    if before.status != "completed":
        raise UsageError(f"{run} {before.status}: it has no scores")
    task, arrays = scores_of(run)
    spec = task.spec
    with registry.defects(f"the score of {run}"):
        metrics, undefined = split_metrics(task.score(arrays), spec)
    moved: Moved = {}
    for name in metrics.keys() & before.metrics.keys():
        was, now = before.metrics[name], metrics[name]
        if was is not None and now is not None and same(name, was, now):
            metrics[name] = was
        elif was != now:
            moved[name] = was, now
    # Field by field, since a record from before a field was there does not have it.
    content = json.loads((run / "record.json").read_bytes())
    content["task"]["version"] = spec.version
    content["metrics"], content["undefined"] = metrics, undefined
    written = (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
    write(run / "record.json", written)
    _list(run, written)
    return moved


def _list(run: Path, record: bytes) -> None:
    """Writes the digest of a record into the manifest of its submission, if it lies in one."""
    submission = run.parents[2]
    if not (submission / MANIFEST).exists():
        return
    content = json.loads((submission / MANIFEST).read_bytes())
    content["files"][f"{run.relative_to(submission).as_posix()}/record.json"] = sha256(record)
    write(submission / MANIFEST, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())
