"""Marks: what a finished run's own diagnostics say against its numbers, read from its record.

A mark changes no rank. It stands beside the number wherever that is shown, with a name and a reason. A record
without a diagnostic has no mark of it: silence says nothing of a run.

Source: Vehtari et al. 2021 (docs/sources.md), effective sample size and R-hat; Guo et al. 2017, "On
Calibration of Modern Neural Networks", the temperature; Clopper and Pearson 1934, "The Use of Confidence or
Fiducial Limits Illustrated in the Case of the Binomial", the limit of an accuracy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from bench.runs.records import Record
from bench.spec import HOTTEST, RHAT_LIMIT, mixed

FEWEST_DRAWS = 2.0
"""Effective draws of the slowest weight below which that weight did not move.

Records hold the least effective sample size over all weights. Of 50 independent draws of each of 400,000
weights (40 simulations of 10,000) that least one was 2.2, and below 5 in each simulation, so that a limit of
5 would mark an exact sampler; a weight that drifts one way through all 50 has 1.45. A chain that is worth a
third of its draws (autocorrelation 0.5) may fall below 2 among 2,000 weights. With 20 draws or fewer no chain
gets under the limit, and none is marked.
"""
FEWEST_PREDICTED = 5.0
"""Effective draws of what a chain predicts below which its predictions did not move; a tenth of the draws
where those are fewer than 50.

By the median over predicted numbers, which a single slow weight does not decide. Of 50 draws one number of an
exact sampler lies below it with a probability of 0.2%; the median of random walks is 2.5, and of drifts 1.45
(20,000 simulations each).
"""
CHANCE = 0.005
"""An accuracy is at chance where naming the largest class would do as well or better with at least this
probability: the lower limit of its 99% interval (two-sided, Clopper and Pearson) is not above that share."""
NEAR_BOUND = 0.01
"""A fitted temperature this near to an end of its range, relative to that end, would have gone further."""

MEANINGS = {
    "predictions did not move": "a sampler half of whose predicted numbers are worth fewer than "
    f"{FEWEST_PREDICTED:g} independent draws: the chain stayed about where it was, or drifted one way",
    "a weight did not move": "a sampler whose slowest weight is worth fewer than "
    f"{FEWEST_DRAWS:g} independent draws, in a record that says nothing of its predictions: at least "
    "one weight drifted through all draws and never came back; whether predictions moved is not known",
    "chains disagree": f"a sampler whose chains predict different things: R-hat above {RHAT_LIMIT:g}",
    "accuracy at chance": "an accuracy that is not shown to be above the share of the largest class, by its "
    "99% interval; on unequal classes an order of the examples may still tell something",
    "temperature at its bound": "a fitted temperature at an end of the range in which it is looked for: "
    "predictions so far off that no temperature of the range mends them",
}
"""Every mark by its name, and what it says."""


class Mark(NamedTuple):
    """One of `MEANINGS` by its name, and the numbers that are the reason, in one line."""

    name: str
    reason: str

    def __str__(self) -> str:
        """Name and reason, as a line has them."""
        return f"{self.name}: {self.reason}"


def marks(record: Record, arrays: Mapping[str, np.ndarray] | None = None) -> tuple[Mark, ...]:
    """What speaks against a run, in the order of `MEANINGS`; nothing against one that did not complete.

    Args:
        record: Of the run.
        arrays: Those of the run, of which the classes of the test examples are used, `[N]`. Without them
            nothing is said of its accuracy.
    """
    if record.status != "completed":
        return ()
    classes = None if arrays is None else next((arrays[name] for name in _CLASSES if name in arrays), None)
    found = [_unmoved(record), _still(record), _apart(record), _guessing(record, classes), _hot(record)]
    return tuple(mark for mark in found if mark is not None)


def of_run(record: Record, find: Callable[[], Path | None]) -> tuple[Mark, ...]:
    """The marks of a run on disk.

    Args:
        record: Of the run.
        find: Where its arrays lie, None if nowhere; asked only if the run has an accuracy. Arrays that
            cannot be read are none.
    """
    path = find() if _accuracy(record) is not None else None
    if path is None:
        return marks(record)
    try:
        with safe_open(path, "numpy") as file:
            names = set(_CLASSES).intersection(file.keys())
            return marks(record, {name: file.get_tensor(name) for name in names})
    except (OSError, SafetensorError, TypeError, ValueError):
        return marks(record)


def together(of_seeds: Sequence[tuple[int, tuple[Mark, ...]]]) -> tuple[Mark, ...]:
    """The marks of an entry: each once, with the number of seeds that have it and the reason of the first.

    Args:
        of_seeds: Every seed of the entry, with the marks of its run.
    """
    found = []
    for name in MEANINGS:
        own = [(seed, mark.reason) for seed, of_seed in of_seeds for mark in of_seed if mark.name == name]
        if own:
            seed, reason = own[0]
            where = f"in {len(own)} of {len(of_seeds)} seeds, in seed {seed}: " if len(of_seeds) > 1 else ""
            found.append(Mark(name, where + reason))
    return tuple(found)


def independent_draws(record: Record) -> tuple[float, float] | None:
    """How many independent draws half of a chain's predictions are worth at least, and how many draws it has.

    By the longest autocorrelation time of all predictions of the run. None of a run that tells none, or a
    time or a number of draws that cannot be.
    """
    time = record.diagnostics.get("prediction_autocorrelation", 0.0)
    draws = max((fit.diagnostics.get("draws", 0.0) for fit in record.fits), default=0.0)
    return (draws / time, draws) if time > 0 and draws > 0 else None


# ------------------------------------------------------------------------------------------------- each mark

_CLASSES = ("labels", "full_labels")
"""Arrays with the classes of the test examples."""


def _unmoved(record: Record) -> Mark | None:
    counted = independent_draws(record)
    if counted is None:
        return None
    worth, draws = counted
    if worth >= min(FEWEST_PREDICTED, draws / 10):
        return None
    reason = f"half of what it predicts is worth fewer than {worth:.2f} of {draws:g} independent draws"
    return Mark("predictions did not move", reason)


def _still(record: Record) -> Mark | None:
    """Of several fits the slowest, where nothing is known of predictions."""
    if independent_draws(record) is not None:
        return None
    known = [fit.diagnostics for fit in record.fits if "weight_ess" in fit.diagnostics]
    slowest = min(known, key=lambda of_fit: of_fit["weight_ess"], default=None)
    if slowest is None or slowest["weight_ess"] >= FEWEST_DRAWS:
        return None
    draws = f" of {slowest['draws']:g}" if "draws" in slowest else ""
    worth = f"{slowest['weight_ess']:.2f}{draws}"
    return Mark("a weight did not move", f"its slowest weight is worth {worth} independent draws")


def _apart(record: Record) -> Mark | None:
    """By what the chains predict: weights that exchange their places differ and predict the same."""
    if mixed(record.diagnostics) is not False:
        return None
    rhat = record.diagnostics["prediction_rhat"]
    return Mark("chains disagree", f"R-hat of predictions is {rhat:.3f}, above {RHAT_LIMIT:g}")


def _accuracy(record: Record) -> float | None:
    """On images as they are, where a task also has shifted ones: there chance may be what it shows."""
    return record.metrics.get("accuracy_clean", record.metrics.get("accuracy"))


def _guessing(record: Record, classes: np.ndarray | None) -> Mark | None:
    accuracy = _accuracy(record)
    if accuracy is None or not 0 <= accuracy <= 1 or classes is None:
        return None
    if not classes.size or classes.dtype.kind not in "biu":
        return None
    count, largest = classes.size, int(np.unique(classes, return_counts=True)[1].max())
    if at_least(round(accuracy * count), count, largest / count) < CHANCE:
        return None
    share = f"{largest / count:.4f} are of the largest class"
    return Mark("accuracy at chance", f"accuracy is {accuracy:.4f} on {count} examples, of which {share}")


def at_least(right: int, count: int, share: float) -> float:
    """Probability of so many successes or more among `count`, each of probability `share`."""
    if right <= 0 or share >= 1:
        return 1.0
    logs = [
        math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1)
        + k * math.log(share) + (count - k) * math.log1p(-share)
        for k in range(right, count + 1)
    ]  # fmt: skip
    return min(1.0, math.fsum(map(math.exp, logs)))


def _hot(record: Record) -> Mark | None:
    temperature = record.metrics.get("temperature")
    if temperature is None or "nll_scaled" not in record.metrics:  # else it is nothing that was fitted
        return None
    if 1 / HOTTEST * (1 + NEAR_BOUND) < temperature < HOTTEST * (1 - NEAR_BOUND):
        return None
    bounds = f"looked for from {1 / HOTTEST:g} to {HOTTEST:g}"
    return Mark("temperature at its bound", f"the fitted temperature is {temperature:.4g}, {bounds}")
