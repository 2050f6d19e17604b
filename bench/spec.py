"""What a task measures, as data that a leaderboard can read: metrics, their units and directions.

`bench.contract` hands these names on; this file stands apart because it needs no torch: records are read
without.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

Arrays = dict[str, np.ndarray]
"""Named arrays: a run leaves them behind, and scoring may look at nothing else."""


@dataclass(frozen=True)
class Metric:
    """A number that a task reports.

    `unit` is "fraction" or "nats" or whatever it is measured in; `best` and
    `worst` bound its values; either may be infinite. Larger values are better if `best` is above `worst`.
    """

    description: str
    unit: str
    best: float
    worst: float
    may_be_undefined: bool = False

    @property
    def higher_is_better(self) -> bool:
        """Whether larger values are better."""
        return self.best > self.worst


@dataclass(frozen=True)
class Undefined:
    """A metric that has no value here, and why."""

    reason: str


Metrics = dict[str, float | Undefined]


@dataclass(frozen=True)
class Spec:
    """What a task measures. `version` grows whenever the same predictions would score differently.

    `validation_metric` names a metric that the run also logs on validation data, the only number that tuning
    looks at. A task without one cannot be tuned. `split_ratio` is of a task whose test sets are overlapping
    splits of one table: test over training examples of a split (Nadeau and Bengio 2003, "Inference for the
    Generalization Error"); None says that all test examples are different ones.

    `baseline` and `reference` are the anchors of a ranked task: identities of two methods, the second known
    to be better here, that stand at 0 and 1 where scores of several tasks are averaged. `self_reported` names
    the metrics that rest on a number which the method says of itself, such as its log density, and nobody
    can compute again from predictions. A study in `closed_form` fits nothing: its METHOD is `none`,
    and none of its numbers depends on data.

    `own_data` is of a task on a user's own data: it is on no board, and `bench compare` says how methods
    stand among the runs that it is given.
    """

    question: str
    source: str
    version: int
    metrics: Mapping[str, Metric]
    main_metric: str
    requires: frozenset[str] = frozenset()
    ranked: bool = True
    min_seeds: int = 3
    validation_metric: str | None = None
    split_ratio: float | None = None
    baseline: str | None = None
    reference: str | None = None
    self_reported: frozenset[str] = frozenset()
    closed_form: bool = False
    own_data: bool = False


RHAT_LIMIT = 1.05
"""Largest R-hat of chains that agree: "only using the sample if R-hat is less than 1.05" (rstan, `Rhat`)."""
HOTTEST = 100.0
"""Temperatures of predictions are looked for from its inverse to this (`bench.studies.calibration`)."""

Axis = int | str
"""Size of an axis: a number, or a letter for one that is free, but the same wherever the letter stands."""


PREDICTED = ("float32", "float16")
"""Types of predicted numbers: runs keep float32; those from before kept float16, which is read as it is."""


class Layout(NamedTuple):
    """What an array of a task looks like.

    Attributes:
        dtype: Name that numpy gives the type; of several, any of them.
        shape: Of each axis its size; of a tuple of sizes, any of them.
        is_log_probs: Whether it holds log-probabilities, normalised over the last axis (`metrics.store`).
    """

    dtype: str | tuple[str, ...]
    shape: tuple[Axis | tuple[Axis, ...], ...]
    is_log_probs: bool = False


def misfit(layouts: Mapping[str, Layout], found: Mapping[str, tuple[str, tuple[int, ...]]]) -> str | None:
    """How arrays differ from their layouts, in one line; None if they are as they should be.

    Args:
        layouts: What is expected, by name.
        found: Of each array the type by numpy's name and the shape; their contents are not needed.
    """
    if wrong := sorted(layouts.keys() ^ found.keys()):
        missing = [name for name in wrong if name in layouts]
        if missing:
            return f"the array {missing[0]} is missing"
        return f"there is an array {wrong[0]!r}, and the task has {', '.join(sorted(layouts))}"
    sizes: dict[str, int] = {}
    for letters_only in (True, False):  # a free size is set where it has no alternative
        for name, layout in layouts.items():
            dtype, shape = found[name]
            if dtype not in (kinds := (layout.dtype,) if isinstance(layout.dtype, str) else layout.dtype):
                return f"the array {name} is of {dtype}, not of {' or '.join(kinds)}"
            if len(shape) != len(layout.shape):
                return f"the array {name} has {len(shape)} axes, not {len(layout.shape)}"
            for number, (size, allowed) in enumerate(zip(shape, layout.shape, strict=True)):
                if isinstance(allowed, str):
                    sizes.setdefault(allowed, size)
                if letters_only and not isinstance(allowed, int | str):
                    continue
                choices = allowed if isinstance(allowed, tuple) else (allowed,)
                known = [sizes.get(choice, size) if isinstance(choice, str) else choice for choice in choices]
                if size not in known or size < 1:
                    expected = " or ".join(map(str, dict.fromkeys(known)))
                    return f"axis {number} of the array {name} has {size} entries, not {expected}"
    return None


def array_digest(arrays: Mapping[str, np.ndarray | Tensor]) -> str:
    """SHA-256 (hex) of named arrays: the same for the same numbers on every machine.

    Hashed are, in order of the names, repr((name, dtype, shape)) such as "('x', '<f4', (2, 3))" and then
    the bytes in C order, little endian.

    Raises:
        TypeError: An array does not hold booleans or numbers.
    """
    sha = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        array = np.asarray(array.detach().cpu() if hasattr(array, "detach") else array)
        if array.dtype.kind not in "biufc":
            raise TypeError(f"array {name!r} holds {array.dtype}, expected booleans or numbers")
        dtype = array.dtype.newbyteorder("<")
        sha.update(repr((str(name), dtype.str, array.shape)).encode())
        sha.update(array.astype(dtype, copy=False).tobytes())
    return sha.hexdigest()


def mixed(diagnostics: Mapping[str, float]) -> bool | None:
    """Whether a run's chains predict the same (`prediction_rhat`); None if the run is no sampler's."""
    rhat = diagnostics.get("prediction_rhat")
    return None if rhat is None else rhat <= RHAT_LIMIT


class Row(NamedTuple):
    """One point: `curve` (what is measured), `series` (which line of the chart), abscissa `x`, `value`."""

    curve: str
    series: str
    x: float
    value: float
