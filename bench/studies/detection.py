"""Out-of-distribution detection: is the uncertainty about foreign images above that about known ones?

Foreign images are the positive class. Each score comes with a control that knows no network: the mean
brightness of an image.

Source: Hendrycks and Gimpel 2017, "A Baseline for Detecting Misclassified and Out-of-Distribution Examples in
Neural Networks".

Shapes: N known and M foreign images, C classes.
"""

from __future__ import annotations

import numpy as np

from bench import metrics
from bench.spec import Metric, Metrics, Undefined

UNCERTAINTIES = {
    "entropy": "entropy of the mean prediction",
    "information": "mutual information of label and weights",
    "confidence": "largest probability, negative",
}
"""Name -> what it is, in the order of charts."""
SHOWN = {"entropy": "entropy", "information": "mutual information", "confidence": "largest probability"}
BRIGHTNESS = "brightness"
"""Name of the control."""
DETECTED = 0.95
"""Share of the foreign images that is detected where false alarms are counted."""
NO_SPREAD = "the mutual information is 0 everywhere: one sample, or samples that agree"

SCORES = {
    "auroc": Metric("area under the ROC curve of detecting {} by {}", "fraction", 1, 0),
    "aupr": Metric("average precision of detecting {} by {}", "fraction", 1, 0),
    "fpr95": Metric("share of known images called foreign where 95% of {} are, by {}", "fraction", 0, 1),
}
"""What `scores` gives of each uncertainty."""


def uncertainties(log_probs: np.ndarray, information: np.ndarray) -> dict[str, np.ndarray]:
    """Uncertainties by name, each `[N]`, larger where more uncertain.

    Args:
        log_probs: Of the mean predictions, normalised, `[N, C]`.
        information: Mutual information `[N]`.
    """
    entropy = -(np.exp(log_probs) * log_probs).sum(1)
    return {
        "entropy": entropy,
        "information": information.astype(np.float64),
        "confidence": -log_probs.max(1),  # in the order of -p, and finer where p rounds to 1
    }


def auroc(known: np.ndarray, foreign: np.ndarray) -> float:
    """Probability that a foreign image has the larger score; ties count half."""
    return metrics.roc_auc(*_joined(known, foreign))


def average_precision(known: np.ndarray, foreign: np.ndarray) -> float:
    """Sum over thresholds of precision times the gain in recall; images of one score pass together."""
    found, passed, of = _passed(known, foreign)
    return float((np.diff(found, prepend=0) / of * (found / passed)).sum())


def false_alarms(known: np.ndarray, foreign: np.ndarray, detected: float = DETECTED) -> float:
    """Share of known images above the highest threshold that detects so large a share of the foreign ones."""
    found, passed, of = _passed(known, foreign)
    first = int(np.argmax(found >= detected * of - 1e-9))
    return float((passed - found)[first] / len(known))


def _joined(known: np.ndarray, foreign: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    is_foreign = np.repeat([0, 1], [len(known), len(foreign)])
    return is_foreign, np.concatenate([known, foreign])


def _passed(known: np.ndarray, foreign: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Foreign and all images above each threshold, from the highest; number of foreign ones."""
    is_foreign, scores = _joined(known, foreign)
    _, group = np.unique(-scores, return_inverse=True)
    return np.bincount(group, is_foreign).cumsum(), np.bincount(group).cumsum(), len(foreign)


def measures(foreign: str) -> dict[str, Metric]:
    """The metrics of a foreign data set by name."""
    found = {
        f"{score}_{foreign}_{name}": Metric(
            metric.description.format(foreign, what),
            metric.unit,
            metric.best,
            metric.worst,
            name == "information",
        )
        for name, what in UNCERTAINTIES.items()
        for score, metric in SCORES.items()
    }
    control = f"area under the ROC curve of detecting {foreign} by mean brightness alone: a control"
    return found | {f"auroc_{foreign}_{BRIGHTNESS}": Metric(control, "fraction", 1, 0)}


def says_nothing(uncertainty: str, *values: np.ndarray) -> bool:
    """Whether an uncertainty is none: draws that agree everywhere have no mutual information.

    An entropy that is 0 everywhere is one, of predictions that are sure of every image: all are ties.

    Args:
        uncertainty: Its name.
        values: Of all images, in any number of arrays.
    """
    return uncertainty == "information" and not any(of.any() for of in values)


def scores(
    name: str,
    known: dict[str, np.ndarray],
    foreign: dict[str, np.ndarray],
    brightness: tuple[np.ndarray, np.ndarray],
) -> Metrics:
    """The metrics of `measures`.

    Args:
        name: Of the foreign data set.
        known: `uncertainties` of the known images, each `[N]`.
        foreign: Those of the foreign ones, each `[M]`.
        brightness: Of known `[N]` and foreign images `[M]`.
    """
    found: Metrics = {}
    for uncertainty in UNCERTAINTIES:
        pair = known[uncertainty], foreign[uncertainty]
        nothing = says_nothing(uncertainty, *pair)
        for score, of in (("auroc", auroc), ("aupr", average_precision), ("fpr95", false_alarms)):
            found[f"{score}_{name}_{uncertainty}"] = Undefined(NO_SPREAD) if nothing else of(*pair)
    return found | {f"auroc_{name}_{BRIGHTNESS}": auroc(*brightness)}
