"""How good class predictions are: proper scores, calibration, risk by coverage; temperature; conformal sets.

Source: Guo et al. 2017, "On Calibration of Modern Neural Networks" (temperature); Vovk et al. 2005,
"Algorithmic Learning in a Random World", and Lei et al. 2018, "Distribution-Free Predictive Inference for
Regression" (split conformal sets); Geifman and El-Yaniv 2017, "Selective Classification for Deep Neural
Networks" (risk and coverage); Geifman et al. 2019, "Bias-Reduced Uncertainty Estimation for Deep Neural
Classifiers" (excess area, E-AURC); Traub et al. 2024, "Overcoming Common Flaws in the Evaluation of Selective
Classification Systems" (generalised area, AUGRC).

Shapes: N examples, C classes. Log-probabilities are normalised, in nats and in float64.
"""

from __future__ import annotations

import numpy as np
from scipy import optimize

from bench import metrics
from bench.spec import HOTTEST, Metric
from bench.studies import conformal

BINS = 15
"""Of both calibration errors."""
LEVEL = 0.9
"""Coverage that conformal sets promise."""

MEASURES = {
    "nll": Metric("mean of -log p(label)", "nats", 0, np.inf),
    "accuracy": Metric("share of right classes", "fraction", 1, 0),
    "ece": Metric(
        f"calibration error of the largest probability, {BINS} bins of one width", "fraction", 0, 1
    ),
    "adaptive_ece": Metric(f"the same, {BINS} bins of as many examples", "fraction", 0, 1),
    "brier": Metric("mean over examples of the squared distance to the label's unit vector", "squared", 0, 2),
    "risk_area": Metric("mean error of the k surest examples, over all k (AURC)", "fraction", 0, 1),
    "excess_risk_area": Metric(
        "the same less that of the best order of these predictions (E-AURC)", "fraction", 0, 1
    ),
    "generalised_risk_area": Metric(
        "share of all examples that are wrong and among the k surest, mean over k (AUGRC)", "fraction", 0, 1
    ),
}
"""What `measured` gives."""


def measured(log_probs: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Every one of `MEASURES`, from log-probabilities `[N, C]` and labels `[N]`."""
    confidence, right = np.exp(log_probs.max(1)), log_probs.argmax(1) == labels
    return {
        "nll": metrics.negative_log_likelihood(log_probs, labels),
        "accuracy": float(right.mean()),
        "ece": calibration_error(confidence, right, adaptive=False),
        "adaptive_ece": calibration_error(confidence, right, adaptive=True),
        "brier": brier(log_probs, labels),
        "risk_area": risk_area(confidence, right),
        "excess_risk_area": excess_risk_area(confidence, right),
        "generalised_risk_area": generalised_risk_area(confidence, right),
    }


def brier(log_probs: np.ndarray, labels: np.ndarray) -> float:
    """Mean of sum_c (p_c - [c is the label])^2, from 0 to 2."""
    p = np.exp(log_probs)
    p[np.arange(len(labels)), labels] -= 1
    return float((p**2).sum(1).mean())


def reliability(
    confidence: np.ndarray, right: np.ndarray, adaptive: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Share of all examples, mean confidence and accuracy in every bin that holds an example.

    Args:
        confidence: Largest probabilities `[N]`.
        right: Whether the prediction is right, `[N]`.
        adaptive: Bins of as many examples, in place of as wide ones. Equal confidences share a bin.
    """
    if adaptive:
        lower = np.searchsorted(np.sort(confidence), confidence, "left") / len(confidence)
        bins = np.minimum((BINS * lower).astype(int), BINS - 1)
    else:  # open below, closed above
        bins = np.searchsorted(np.linspace(0, 1, BINS + 1)[1:-1], confidence, "left")
    size = np.bincount(bins, minlength=BINS)
    held = size > 0
    mean, accuracy = (np.bincount(bins, values, BINS)[held] / size[held] for values in (confidence, right))
    return size[held] / len(confidence), mean, accuracy


def calibration_error(confidence: np.ndarray, right: np.ndarray, adaptive: bool) -> float:
    """Mean distance of confidence from accuracy over the bins of `reliability`, weighted by their size."""
    share, mean, accuracy = reliability(confidence, right, adaptive)
    return float(share @ np.abs(mean - accuracy))


def risk_area(confidence: np.ndarray, right: np.ndarray) -> float:
    """Area under the curve of risk by coverage: mean over k of the error of the k surest examples.

    Examples of one confidence come in all orders, so each has the mean error of its group.
    """
    ordered = _wrong(confidence, right)
    return float((ordered.cumsum() / np.arange(1, len(ordered) + 1)).mean())


def excess_risk_area(confidence: np.ndarray, right: np.ndarray) -> float:
    """`risk_area` less its least value at this accuracy, that of an order with all wrong examples last."""
    ordered = np.sort(~right)
    best = (ordered.cumsum() / np.arange(1, len(ordered) + 1)).mean()
    return max(risk_area(confidence, right) - float(best), 0.0)  # never below 0, but for rounding


def generalised_risk_area(confidence: np.ndarray, right: np.ndarray) -> float:
    """Area under the curve of the share of all N examples that are wrong and accepted, by that accepted.

    By trapezoids from (0, 0) on. A wrong example counts by how many are less sure than it, where `risk_area`
    lets the few surest decide. It is (1 - AUROC) a (1 - a) + (1 - a)^2 / 2 of the accuracy a and the AUROC of
    right against wrong examples by confidence.
    """
    ordered = _wrong(confidence, right)
    return float(((ordered.cumsum() - ordered / 2) / len(ordered)).mean())


def _wrong(confidence: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Error of the examples `[N]`, the surest first; those of one confidence have their mean."""
    _, group = np.unique(-confidence, return_inverse=True)
    return np.asarray((np.bincount(group, ~right) / np.bincount(group))[np.sort(group)])


# -------------------------------------------------------------------------------------------- temperature


def tempered(log_probs: np.ndarray, temperature: float) -> np.ndarray:
    """Probabilities to the power of 1 / temperature, normalised again, as logarithms `[..., C]`.

    The order of the classes stays, so accuracy does.
    """
    return metrics.restore(log_probs / temperature)


def temperature(log_probs: np.ndarray, labels: np.ndarray) -> float | None:
    """The temperature of least NLL, which is convex in its inverse; from 1 / HOTTEST to HOTTEST.

    None where every label is the most probable class: the NLL then falls all the way to temperature 0, and
    what these labels teach is not how sure to be elsewhere.
    """
    if (log_probs.argmax(-1) == labels).all():
        return None

    def nll(inverse: float) -> float:
        return metrics.negative_log_likelihood(metrics.restore(log_probs * inverse), labels)

    # In two pieces, since a bounded search is as fine as its interval is long.
    pieces = [(1 / HOTTEST, 1.0), (1.0, HOTTEST)]
    found = [
        optimize.minimize_scalar(nll, bounds=piece, method="bounded", options={"xatol": 1e-6})
        for piece in pieces
    ]
    return float(1 / min(found, key=lambda each: each.fun).x)


# ---------------------------------------------------------------------------------------- conformal sets


def threshold(log_probs: np.ndarray, labels: np.ndarray, level: float = LEVEL) -> float:
    """Largest -log p(class), in nats, with which a class enters the sets: split conformal inference.

    The ceil((n + 1) level)-th smallest score of n calibration examples; infinite if there is none, so that
    every class enters. If these and a new example are exchangeable, its set holds its label with a
    probability of at least `level`; of scores without ties, of ceil((n + 1) level) / (n + 1) exactly.

    Args:
        log_probs: Of the calibration examples `[n, C]`.
        labels: `[n]`.
        level: Coverage promised, in (0, 1).
    """
    return conformal.smallest(-log_probs[np.arange(len(labels)), labels], level)


def sets(log_probs: np.ndarray, largest: float) -> np.ndarray:
    """Whether each class is in an example's set, `[N, C]`, under a `threshold`."""
    return -log_probs <= largest


def covered(log_probs: np.ndarray, labels: np.ndarray, largest: float) -> tuple[float, float]:
    """Share of sets that hold the label, and mean number of classes in a set."""
    found = sets(log_probs, largest)
    return float(found[np.arange(len(labels)), labels].mean()), float(found.sum(1).mean())
