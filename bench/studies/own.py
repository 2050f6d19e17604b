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

from bench import figures, likelihoods, metrics, randomness
from bench.contract import Likelihood
from bench.errors import UsageError
from bench.spec import Arrays, Metric, Row
from bench.studies import calibration, normals, predictive
from bench.system import files
from bench.text import one_line

Kept = TypeVar("Kept", bound=pydantic.BaseModel)

ENCODER = "encoder.json"
"""File of a run that holds what was learned from its training examples."""
TEST_SHARE = 0.2
FEWEST = 20
"""Examples; with fewer, 20% are no test."""

SHOWN = ("accuracy", "ece", "brier", "risk_area", "excess_risk_area", "generalised_risk_area")
OF_CLASSES = {name: calibration.MEASURES[name] for name in SHOWN}


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


def at_random(strata: np.ndarray, split: int, share: float = TEST_SHARE) -> np.ndarray:
    """Which examples are held out, `[N]`: of each value among the strata `[N]` the same share, never all."""
    is_test, order = np.zeros(len(strata), bool), permutation(len(strata), split)
    for value in sorted(set(strata)):
        of_value = order[strata[order] == value]
        is_test[of_value[: round(share * len(of_value))]] = True
    return is_test


def whole_groups(groups: np.ndarray, split: int, share: float = TEST_SHARE) -> np.ndarray:
    """Which examples are held out, `[N]`: whole groups `[N]` in random order, up to the share of examples.

    It is one group at least, and never all.
    """
    different, of_example = np.unique(groups, return_inverse=True)
    order = permutation(len(different), split)
    so_far = np.bincount(of_example)[order].cumsum()
    number = max(1, int(np.searchsorted(so_far, share * len(of_example), side="right")))
    return np.isin(of_example, order[: min(number, len(different) - 1)])


def latest(times: np.ndarray, share: float = TEST_SHARE) -> np.ndarray:
    """Which examples are held out, `[N]`: the latest by their times `[N]`, at most the share of them.

    Examples of one time stay together, so that all that are held out are later than all others. Where the
    latest time alone has more than the share, it is what is held out.
    """
    different, of_example = np.unique(times, return_inverse=True)
    later = np.bincount(of_example)[::-1].cumsum()
    number = max(1, int(np.searchsorted(later, share * len(of_example), side="right")))
    return of_example >= len(different) - min(number, len(different) - 1)


def copies(train: torch.Tensor, test: torch.Tensor, what: str) -> list[str]:
    """A sentence on held-out examples whose inputs are those of a training example, bit for bit, if any.

    Args:
        train: Inputs `[N, ...]`.
        test: Inputs `[M, ...]`.
        what: Examples are, in the plural.
    """
    known = {row.numpy().tobytes() for row in train}
    number = sum(row.numpy().tobytes() in known for row in test)
    if not number:
        return []
    return [
        f"{number} of {len(test)} held-out {what} have the very inputs of one that is trained on: where "
        "these are copies, the scores say little of new ones"
    ]


def losses(arrays: Arrays) -> np.ndarray:
    """-log p of each held-out class, in nats, `[N]`, from `log_probs` and `labels`."""
    labels = arrays["labels"]
    return -metrics.restore(arrays["log_probs"])[np.arange(len(labels)), labels]


def of_classes(arrays: Arrays) -> dict[str, float]:
    """Every one of `OF_CLASSES`."""
    found = calibration.measured(metrics.restore(arrays["log_probs"]), arrays["labels"])
    return {name: found[name] for name in OF_CLASSES}


def curves(arrays: Arrays) -> list[Row]:
    """Accuracy by the largest probability, in bins of as many examples, and error by the share that is kept.

    Both from `log_probs` and `labels`.
    """
    log_probs = metrics.restore(arrays["log_probs"])
    confidence, right = np.exp(log_probs.max(1)), log_probs.argmax(1) == arrays["labels"]
    _, mean, accuracy = calibration.reliability(confidence, right, adaptive=True)
    points = zip(mean.tolist(), accuracy.tolist(), strict=True)
    bins = [Row("accuracy by confidence", "test", x, y) for x, y in points]
    return bins + predictive.risk_rows(1 - confidence, ~right, "risk, error")


def figures_of(arrays: Arrays) -> dict[str, Any]:
    """The curves of classes, each drawn."""
    rows = curves(arrays)
    bins = [(row.x, row.value) for row in rows if row.curve == "accuracy by confidence"]
    titles = ("Accuracy by confidence", "largest probability", "share of right classes")
    risk = predictive.risk_chart([row for row in rows if row.curve == "risk, error"], "error")
    return {"calibration": figures.unit_square({"measured": bins}, *titles, "calibrated"), "risk": risk}


def told(found: predictive.Classes, abstain: float | None = None) -> list[dict[str, Any]]:
    """The most probable class of each input, the probabilities by class, and whether it is left out.

    Args:
        found: What is predicted.
        abstain: The share that is left out, those of the least largest probability; None says nothing of it.
    """
    probabilities = found.probabilities.tolist()
    rows = [
        {
            "class": found.names[int(np.argmax(row))],
            "probabilities": dict(zip(found.names, row, strict=True)),
        }
        for row in probabilities
    ]
    if abstain is not None:
        rows = [row | {"abstained": bool(a)} for row, a in zip(rows, found.abstain(abstain), strict=True)]
    return rows
