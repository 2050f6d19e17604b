"""What tasks on a user's own data share: which examples are held out, and how classes are scored and told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pydantic
import safetensors.numpy
import torch

from bench import likelihoods, metrics, randomness
from bench.contract import Likelihood
from bench.errors import UsageError
from bench.predictions import Prediction
from bench.spec import Arrays, Metric
from bench.studies import calibration, normals
from bench.system import files
from bench.text import one_line

Kept = TypeVar("Kept", bound=pydantic.BaseModel)

ENCODER = "encoder.json"
"""File of a run that holds what was learned from its training examples."""
TEST_SHARE = 0.2
FEWEST = 20
"""Examples; with fewer, 20% are no test."""

OF_CLASSES = {name: calibration.MEASURES[name] for name in ("accuracy", "ece", "brier")}


def read_encoder(directory: Path, kind: type[Kept]) -> Kept:
    """The encoder that a run keeps.

    Args:
        directory: Of the run.
        kind: The class of encoders of its task.

    Raises:
        UsageError: If the file is not there, or holds none; one line.
    """
    path = directory / ENCODER
    try:
        return kind.model_validate_json(files.read(path))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from None
    except pydantic.ValidationError as error:
        raise UsageError(f"{path} is no encoder: {one_line(error.errors()[0]['msg'])}") from None


def posed(classes: Sequence[str], noise: normals.Noise) -> tuple[int, Likelihood]:
    """How many outputs a network has for a target of these classes, or of none, and how they explain it.

    Raises:
        UsageError: If noise is to be learned of a class.
    """
    if not classes:
        return normals.posed(noise)
    if noise != "learned":
        raise UsageError(f"--task.noise {noise}: is of numbers, and the target is a class")
    return len(classes), likelihoods.Categorical()


def held_out(directory: Path) -> tuple[np.ndarray, np.ndarray] | None:
    """Encoded inputs `[n, D]` and numbers `[n]` of a run's held-out rows; None if it keeps none.

    Raises:
        UsageError: If the file of its arrays is not there, or damaged; one line.
    """
    path = directory / "arrays.safetensors"
    try:
        arrays = safetensors.numpy.load(files.read(path))
    except (OSError, safetensors.SafetensorError) as error:
        raise UsageError(f"{path}: cannot be read: {one_line(error)}") from None
    return (arrays["inputs"], arrays["targets"]) if "inputs" in arrays else None


def undefinable(measures: dict[str, Metric]) -> dict[str, Metric]:
    """The same measures, each of which a run may leave undefined."""
    return {name: replace(metric, may_be_undefined=True) for name, metric in measures.items()}


def permutation(size: int, split: int) -> np.ndarray:
    """A random order of so many things, one for every split."""
    return torch.randperm(size, generator=randomness.generator(0, "own data", split)).numpy()


def at_random(strata: np.ndarray, split: int) -> np.ndarray:
    """Which examples are held out, `[N]`: of each value among the strata `[N]` the same share, never all."""
    is_test, order = np.zeros(len(strata), bool), permutation(len(strata), split)
    for value in sorted(set(strata)):
        of_value = order[strata[order] == value]
        is_test[of_value[: round(TEST_SHARE * len(of_value))]] = True
    return is_test


def losses(arrays: Arrays) -> np.ndarray:
    """-log p of each held-out class, in nats, `[N]`, from `log_probs` and `labels`."""
    labels = arrays["labels"]
    return -metrics.restore(arrays["log_probs"])[np.arange(len(labels)), labels]


def of_classes(arrays: Arrays) -> dict[str, float]:
    """Every one of `OF_CLASSES`."""
    found = calibration.measured(metrics.restore(arrays["log_probs"]), arrays["labels"])
    return {name: found[name] for name in OF_CLASSES}


def told(prediction: Prediction, classes: list[str]) -> list[dict[str, Any]]:
    """The most probable class of each input, and the probabilities by class."""
    rows = prediction.average().exp().tolist()
    return [
        {"class": classes[int(np.argmax(row))], "probabilities": dict(zip(classes, row, strict=True))}
        for row in rows
    ]
