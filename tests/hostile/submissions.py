"""Submissions made by code: honest ones, and the tools by which they are broken.

No training is needed. Predictions are made up, and the task scores them: the records are as true as those of
a run, and a test that changes one thing knows what it changed.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import safetensors.numpy

from bench import metrics
from bench.data import array_digest
from bench.leaderboard.check.scoring import pose
from bench.leaderboard.evidence.submission import runs_in
from bench.runs import registry, resolution
from bench.runs.records import Record, read_record, split_metrics
from bench.settings import build
from bench.system.source import source_hash

ENVIRONMENT = {
    "python": "3.11.7",
    "torch": "2.11.0",
    "pytorch_lightning": "2.6.0",
    "system": "linux x86_64",
    "device": "a processor",
    "threads": 2,
}


def log_probs(labels: np.ndarray, skill: float, seed: int, classes: int = 10) -> np.ndarray:
    """Predictions `[N, C]` as a split task stores them: noise, and so much skill in logits for the label."""
    import torch

    logits = np.random.default_rng(seed).normal(size=(len(labels), classes))
    logits[np.arange(len(labels)), labels] += skill
    return metrics.store(torch.from_numpy(logits).log_softmax(-1))


def digits(labels: np.ndarray, skill: float = 2.0, seed: int = 0) -> dict[str, np.ndarray]:
    """The arrays of a run of split_digits."""
    steps = [log_probs(labels, skill * step / 5, 100 * seed + step) for step in range(1, 6)]
    predicted = np.stack([step.argmax(1) for step in steps[:-1]]).astype(np.uint8)
    return {"log_probs": steps[-1], "predicted": predicted, "labels": labels}


def record(
    method: str, seed: int, task: str = "split_digits", digest: str | None = None, **settings: object
) -> Record:
    """A record of a run that diverged; `fill` gives it arrays and metrics.

    `digest` is that of the task's data, for a task that takes long to draw them.
    """
    entry = registry.tasks()[task]
    chosen = build(entry.cls.settings_class, {**entry.fixed, **settings}, "task")
    standard = build(entry.cls.settings_class, dict(entry.fixed), "task")
    own = entry.cls(chosen)
    names = list(own.spec.metrics)
    return Record(
        schema_version=1,
        status="diverged",
        reason="the loss is NaN",
        task={
            "name": task,
            "identity": resolution.identity(entry, chosen, standard),
            "version": own.spec.version,
            "data_digest": digest or own.data_digest(),
            "settings": {name: getattr(chosen, name) for name in vars(chosen)},
            "main_metric": own.spec.main_metric,
        },
        method={
            "name": method,
            "identity": method,
            "settings": {"learning_rate": 0.001},
            "tuning": "untuned",
            "capabilities": ["sequential"],
            "seed_matters": True,
        },
        preset="standard",
        seed=seed,
        command=f"bench run {method} {task} --seed {seed}",
        created="2026-01-01T00:00:00+00:00",
        metrics=dict.fromkeys(names),
        undefined=dict.fromkeys(names, "the run diverged"),
        validation={},
        fits=[{"stage": "step 1", "epochs": 10, "steps": 100, "seconds": 3.0}],
        seconds=36.0,
        environment=ENVIRONMENT,
        trainer={"precision": "32-true"},
        provenance={
            "version": "0.1.0",
            "source_hash": source_hash(),
            "method_file_hash": "0" * 64,
            "commit": "0" * 40,
            "dirty": False,
            "arrays_digest": None,
        },
    )


def fill(empty: Record, arrays: dict[str, np.ndarray]) -> Record:
    """The record of a completed run with these arrays."""
    task = pose(empty, "test").task
    numbers, undefined = split_metrics(task.score(arrays), task.spec)
    made = empty.provenance.model_copy(update={"arrays_digest": array_digest(arrays)})
    completed = {"status": "completed", "reason": None, "provenance": made}
    return empty.model_copy(update={**completed, "metrics": numbers, "undefined": undefined})


def add(submission: Path, made: Record, arrays: dict[str, np.ndarray] | None) -> Path:
    """Puts a run into a submission."""
    run = submission / made.task.identity / made.method.identity.replace("~", "-") / f"seed{made.seed}"
    run.mkdir(parents=True)
    (run / "record.json").write_text(made.model_dump_json(indent=2))
    if arrays is not None:
        write_arrays(run, arrays)
    return run


def manifest(submission: Path, **changes: object) -> None:
    """Writes a `submission.json` that fits the runs, but for what is changed."""
    found = [json.loads((run / "record.json").read_text()) for run in runs_in(submission)]
    files = sorted(
        path for path in submission.rglob("*") if path.is_file() and path.name != "submission.json"
    )
    content = {
        "schema_version": 1,
        "slug": submission.name,
        "authors": ["A. Author"],
        "licence": "CC-BY-4.0",
        "paper": None,
        "code": "https://example.org/code",
        "tuning_budget": 0,
        "trained_on": [],
        "environments": [ENVIRONMENT],
        "hours": sum(run["seconds"] for run in found) / 3600,
        "files": {
            path.relative_to(submission).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in files
        },
    }
    (submission / "submission.json").write_text(json.dumps(content | changes, indent=1))


def honest(
    folder: Path, slug: str = "honest", methods: tuple[str, ...] = ("one", "two"), seeds: int = 3
) -> Path:
    """A submission of made-up methods on split_digits that is accepted."""
    submission = folder / slug
    labels = np.array(pose(record("one", 0), "test").task.targets()["labels"])
    for number, method in enumerate(methods):
        for seed in range(3):
            arrays = digits(labels, 2.0 + number, 10 * number + seed)
            add(submission, fill(record(method, seed), arrays), arrays)
    manifest(submission)
    return submission


# ---------------------------------------------------------------------------------------------- breaking


def change(run: Path, **parts: object) -> None:
    """Rewrites entries of a record; a dictionary is merged into its part."""
    content = json.loads((run / "record.json").read_text())
    for name, value in parts.items():
        content[name] = content[name] | value if isinstance(value, dict) else value
    (run / "record.json").write_text(json.dumps(content))


def read(run: Path) -> dict[str, np.ndarray]:
    """The arrays of a run."""
    return safetensors.numpy.load((run / "arrays.safetensors").read_bytes())


def write_arrays(run: Path, arrays: dict[str, np.ndarray]) -> None:
    """Puts arrays beside a record, whatever it says of them."""
    ordered = {name: np.ascontiguousarray(array) for name, array in sorted(arrays.items())}
    (run / "arrays.safetensors").write_bytes(safetensors.numpy.save(ordered))


def change_arrays(
    run: Path, rescore: bool = False, only: dict[str, np.ndarray] | None = None, **arrays: np.ndarray
) -> None:
    """Other arrays under their own digest; with `rescore` under their own metrics, too; or these `only`."""
    whole = (read(run) if only is None else only) | arrays
    write_arrays(run, whole)
    if rescore:
        (run / "record.json").write_text(fill(read_record(run), whole).model_dump_json(indent=2))
    else:
        change(run, provenance={"arrays_digest": array_digest(whole)})
