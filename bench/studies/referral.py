"""Referral: a model reads photographs, and the most uncertain of them go to an expert.

All that is computed from one run's stored predictions: scores, bootstrap standard errors, curves and charts.
What several runs say together stands in `bench.studies.referral_comparison`.

Source: Farquhar 2022, thesis "Understanding Approximation" (docs/sources.md), section 4.3 and appendix B.3;
Leibig et al. 2017, "Leveraging uncertainty information from deep neural networks for disease detection".

Shapes: N test images, G different scores, M shares referred, R resamples. Percentages are whole numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from bench import figures, metrics, randomness
from bench.contract import Arrays, Layout, Metric, Metrics, Row, Undefined
from bench.intervals import Band
from bench.predictions import Bernoulli, Prediction

REFERRED = (10, 20, 30, 50)
"""Percentages referred, of which a run reports the AUC."""
GRID = tuple(range(0, 55, 5))
"""Percentages referred over which the area under the referral curve is the mean AUC."""
PRICE = 10
"""What a sick eye that is called healthy costs, in healthy eyes that are called sick."""
BINS = 10
"""Of the calibration errors."""
RESAMPLES = 100
"""Of the patients, for standard errors."""
SPECIFICITIES = (80, 95)
"""Percentages, at which a run reports its sensitivity."""

UNCERTAINTIES = {
    "entropy": "entropy of the mean prediction",
    "information": "mutual information of label and weights",
    "deviation": "standard deviation of the probability over the samples",
    "threshold": f"closeness of the predicted log-odds to those of 1/{PRICE + 1}",
}
"""Name -> what it is, in the order of charts. The first and the last need no posterior."""
SPREADS = ("information", "deviation")
"""Uncertainties that are 0 without several samples."""
BASELINES = ("threshold", "entropy")
"""Uncertainties that are functions of the mean prediction alone."""

ERRORS = (
    "nll",
    "auc_0",
    *(f"referral_area_{name}" for name in UNCERTAINTIES),
    *(f"information_over_{name}" for name in BASELINES),
    "expected_cost",
)
"""Metrics whose bootstrap standard error is a metric too; those of all others stand in `curves`."""
NO_SPREAD = "no prediction differs between samples: a stable order would refer by file order"


def measures() -> dict[str, Metric]:
    """The metrics of a referral study by name."""

    def auc(description: str) -> Metric:
        return Metric(description, "fraction", 1, 0, may_be_undefined=True)

    area = f"mean AUC over 0, {GRID[1]}, {GRID[2]}, ... {GRID[-1]}% referred"
    found = {
        "nll": Metric("mean of -log p(label)", "nats", 0, np.inf),
        "accuracy": Metric("share of right labels, sick where p > 1/2", "fraction", 1, 0),
        "auc_0": auc("area under the ROC curve, nothing referred"),
    }
    for name, what in UNCERTAINTIES.items():
        found |= {f"auc_{p}_{name}": auc(f"AUC of the rest, {p}% referred by {what}") for p in REFERRED}
    found |= {f"referral_area_{name}": auc(f"{area} by {what}") for name, what in UNCERTAINTIES.items()}
    found |= {
        f"information_over_{name}": Metric(
            f"referral_area_information - referral_area_{name}", "fraction", 1, -1, may_be_undefined=True
        )
        for name in BASELINES
    }
    found |= {
        "ece": Metric(f"calibration error of p(sick), {BINS} bins of one width", "fraction", 0, 1),
        "adaptive_ece": Metric(f"calibration error of p(sick), {BINS} bins of as many", "fraction", 0, 1),
        "brier": Metric("mean of (p(sick) - label)^2", "fraction", 0, 1),
        "expected_cost": Metric(
            f"mean cost of a reading, sick where p >= 1/{PRICE + 1}: {PRICE} a missed one, 1 a false alarm",
            "false alarms",
            0,
            PRICE,
        ),
    }
    found |= {
        f"sensitivity_{p}": auc(f"largest sensitivity at a specificity of at least {p}%")
        for p in SPECIFICITIES
    }
    for name in ERRORS:
        what = f"standard error of {name}, {RESAMPLES} resamples of the patients"
        found[f"{name}_error"] = Metric(what, found[name].unit, 0, _largest(found[name]), True)
    return found


def _largest(metric: Metric) -> float:
    return 1 if metric.unit == "fraction" else np.inf


# ------------------------------------------------------------------------------------------------- arrays


def stored(prediction: Prediction) -> Arrays:
    """What a run keeps of its predictions: 16 bytes an image.

    Args:
        prediction: A `Bernoulli` of the test images, log-odds `[S, N]`.

    Returns:
        Log-probabilities of healthy and sick `[N, 2]`, averaged over the samples; mutual information, in
        nats, and standard deviation of p(sick) over the samples, each `[N]`, 0 if S = 1.
    """
    assert isinstance(prediction, Bernoulli)
    log_odds = prediction.log_odds.double()
    of_samples = torch.nn.functional.logsigmoid(torch.stack([-log_odds, log_odds], -1))  # [S, N, 2]
    return {
        "log_probs": Bernoulli(log_odds).average().float().numpy(),
        "information": metrics.mutual_information(of_samples).float().numpy(),
        "deviation": log_odds.sigmoid().std(0, correction=0).float().numpy(),
    }


def layouts() -> dict[str, Layout]:
    """Layouts of the arrays of `stored` and of the labels; the data tell how many images N there are."""
    return {
        "log_probs": Layout("float32", ("N", 2), is_log_probs=True),
        **dict.fromkeys(SPREADS, Layout("float32", ("N",))),
        "patients": Layout("int32", ("N",)),
        "labels": Layout("uint8", ("N",)),
    }


# ----------------------------------------------------------------------------------------------- statistics


@dataclass(frozen=True, eq=False)
class Readings:
    """What a model said of N test images, and the truth.

    A statistic is a function of how often each image occurs, `counts` `[N]`: once each in the test set, as
    often as its patient was drawn in a resample.

    Attributes:
        labels: 1 is sick, `[N]`.
        log_probs: Of healthy and sick, normalised, `[N, 2]`.
        uncertainty: Name -> value per image `[N]`; without those that are the same for all images.
        patients: A number per patient, `[N]`.
    """

    labels: np.ndarray
    log_probs: np.ndarray
    uncertainty: dict[str, np.ndarray]
    patients: np.ndarray

    @classmethod
    def of(cls, arrays: Arrays) -> Readings:
        """Reads them from the arrays of a run."""
        log_probs = metrics.restore(arrays["log_probs"])
        uncertainty = {
            "entropy": -(np.exp(log_probs) * log_probs).sum(1),
            **{name: arrays[name].astype(np.float64) for name in SPREADS if arrays[name].any()},
            "threshold": -np.abs(log_probs[:, 1] - log_probs[:, 0] + np.log(PRICE)),
        }
        return cls(arrays["labels"].astype(np.int64), log_probs, uncertainty, arrays["patients"])

    @property
    def probabilities(self) -> np.ndarray:
        """Probabilities of being sick, `[N]`."""
        return np.exp(self.log_probs[:, 1])

    @property
    def losses(self) -> np.ndarray:
        """-log p(label) of each image, in nats, `[N]`."""
        return -self.log_probs[np.arange(len(self.labels)), self.labels]

    @cached_property
    def each_one(self) -> np.ndarray:
        """The counts of the test set itself, `[N]`."""
        return np.ones(len(self.labels))

    @cached_property
    def _group(self) -> np.ndarray:
        """Rank of the image's score among the different scores, `[N]`."""
        return np.unique(self.log_probs[:, 1] - self.log_probs[:, 0], return_inverse=True)[1]

    @cached_property
    def _orders(self) -> dict[str, np.ndarray]:
        """Uncertainty -> rows from the least uncertain on, `[N]`."""
        return {name: np.argsort(values, kind="stable") for name, values in self.uncertainty.items()}

    def _by_score(self, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """How often sick and healthy have each score, both `[G]`."""
        size = self._group.max() + 1
        return (
            np.bincount(self._group, counts * self.labels, size),
            np.bincount(self._group, counts * (1 - self.labels), size),
        )

    def kept(self, order: np.ndarray, counts: np.ndarray, referred: int) -> np.ndarray:
        """How often each image is left `[N]` if a percentage of all is referred, the last in order first."""
        ordered = counts[order]
        before = ordered.cumsum() - ordered
        left = np.empty(len(order))
        left[order] = np.clip(round(counts.sum() * (1 - referred / 100)) - before, 0, ordered)
        return left

    def referral_curve(self, order: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """AUC of the images left, at every percentage of `GRID`, `[M]`; NaN where one class is left."""
        left = (self.kept(order, counts, referred) for referred in GRID)
        return np.array([metrics.auc_of_counts(*self._by_score(each)) for each in left])

    def sensitivity(self, counts: np.ndarray, specificity: int) -> float:
        """Largest share of the sick called sick, of thresholds that call a percentage of the healthy so."""
        sick, healthy = (values[::-1].cumsum() for values in self._by_score(counts))
        if not sick[-1] or not healthy[-1]:
            return np.nan
        allowed = healthy <= healthy[-1] * (100 - specificity) / 100 + 1e-9
        return float(sick[allowed].max(initial=0) / sick[-1])

    def calibration(self, counts: np.ndarray, adaptive: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Share of all images, mean p(sick) and share of sick in every bin that holds an image.

        Args:
            counts: Of the images.
            adaptive: Bins of as many images, in place of as wide ones. Equal predictions share a bin.
        """
        if adaptive:
            of_group = np.bincount(self._group, counts)
            lower = (of_group.cumsum() - of_group)[self._group] / counts.sum()
        else:
            lower = self.probabilities
        bins = np.minimum((BINS * lower).astype(int), BINS - 1)
        size, predicted, sick = (
            np.bincount(bins, counts * values, BINS)
            for values in (self.each_one, self.probabilities, self.labels)
        )
        held = size > 0
        return size[held] / size.sum(), predicted[held] / size[held], sick[held] / size[held]

    def statistics(self, counts: np.ndarray) -> dict[str, float]:
        """Every metric but the errors, and the AUC at all of `GRID`; NaN where it has no value."""
        total, p = counts.sum(), self.probabilities
        is_called = self.log_probs[:, 1] > self.log_probs[:, 0]
        costs = np.where(p >= 1 / (PRICE + 1), 1 - self.labels, PRICE * self.labels)
        found = {
            "nll": counts @ self.losses / total,
            "accuracy": counts @ (is_called == self.labels) / total,
            "auc_0": metrics.auc_of_counts(*self._by_score(counts)),
            "brier": counts @ (p - self.labels) ** 2 / total,
            "expected_cost": counts @ costs / total,
        }
        for name, adaptive in {"ece": False, "adaptive_ece": True}.items():
            share, predicted, sick = self.calibration(counts, adaptive)
            found[name] = share @ np.abs(predicted - sick)
        found |= {f"sensitivity_{s}": self.sensitivity(counts, s) for s in SPECIFICITIES}
        for name, order in self._orders.items():
            curve = self.referral_curve(order, counts)
            found |= {f"auc_{p}_{name}": value for p, value in zip(GRID, curve, strict=True)}
            found[f"referral_area_{name}"] = curve.mean()
        if "information" in self._orders:
            for name in BASELINES:
                gain = found["referral_area_information"] - found[f"referral_area_{name}"]
                found[f"information_over_{name}"] = gain
        return {name: float(value) for name, value in found.items()}

    def resamples(self, number: int = RESAMPLES) -> Iterator[np.ndarray]:
        """Counts of as many patients, drawn with replacement; both eyes of a patient come together."""
        generator = np.random.default_rng(randomness.derive(0, "referral", "patients"))
        _, patient = np.unique(self.patients, return_inverse=True)
        size = patient.max() + 1
        for _ in range(number):
            yield np.bincount(generator.integers(size, size=size), minlength=size)[patient].astype(float)

    @cached_property
    def values(self) -> dict[str, float]:
        """The statistics of the test set."""
        return self.statistics(self.each_one)

    @cached_property
    def errors(self) -> dict[str, float]:
        """Their bootstrap standard errors; NaN where a resample has no value. Each is ranked anew."""
        drawn = [self.statistics(counts) for counts in self.resamples()]
        return {name: float(np.std([each[name] for each in drawn], ddof=1)) for name in self.values}


def scores(readings: Readings) -> Metrics:
    """Every metric of `measures`."""
    found: Metrics = {}
    for name in measures():
        of = name.removesuffix("_error")
        values = readings.values if of == name else readings.errors
        if of not in values:
            found[name] = Undefined(NO_SPREAD)
        elif np.isnan(values[of]):
            found[name] = Undefined("one class is left" + (" in a resample" if of != name else ""))
        else:
            found[name] = values[of]
    return found


# ------------------------------------------------------------------------------------------- curves, charts

SHOWN = {"entropy": "entropy", "information": "mutual information", "deviation": "standard deviation"}
SHOWN["threshold"] = "closeness to the threshold"
"""Uncertainty -> its name in charts and curves."""
AUC, AUC_ERROR, CONTROL = "AUC", "AUC, bootstrap standard error", "AUC, negative control"
"""Curves over the percentage referred."""
CALIBRATION, ROC = "share of sick against predicted", "sensitivity against share of false alarms"


def controls(readings: Readings) -> dict[str, np.ndarray]:
    """AUC at every percentage of `GRID` when a broken uncertainty refers, `[M]`.

    A shuffled one leaves the AUC as it is, but for chance, an inverted one lowers it. Both are made of the
    mutual information, or of the entropy if there is none.
    """
    name = "information" if "information" in readings.uncertainty else "entropy"
    shuffled = np.random.default_rng(randomness.derive(0, "referral", "shuffled")).permutation
    inverted = np.argsort(-readings.uncertainty[name], kind="stable")
    orders = {"shuffled": shuffled(len(readings.labels)), "inverted": inverted}
    return {
        f"{SHOWN[name]}, {what}": readings.referral_curve(order, readings.each_one)
        for what, order in orders.items()
    }


def curves(readings: Readings) -> list[Row]:
    """AUC against the percentage referred, its standard error, negative controls, calibration and ROC."""
    rows = []
    for name in readings.uncertainty:
        for curve, values in {AUC: readings.values, AUC_ERROR: readings.errors}.items():
            rows += [Row(curve, SHOWN[name], p, values[f"auc_{p}_{name}"]) for p in GRID]
    for name, broken in controls(readings).items():
        rows += [Row(CONTROL, name, p, float(v)) for p, v in zip(GRID, broken, strict=True)]
    _, predicted, sick = readings.calibration(readings.each_one, adaptive=True)
    bins = f"{BINS} bins of as many images"
    rows += [Row(CALIBRATION, bins, float(p), float(s)) for p, s in zip(predicted, sick, strict=True)]
    sensitivities = [readings.sensitivity(readings.each_one, 100 - alarms) for alarms in range(101)]
    rows += [Row(ROC, "nothing referred", a / 100, value) for a, value in enumerate(sensitivities)]
    return [row for row in rows if np.isfinite(row.value)]


def charts(readings: Readings) -> dict[str, Any]:
    """Referral curves with their standard errors; calibration; ROC curve."""
    found: dict[str, Any] = {}
    names, values = list(readings.uncertainty), readings.values
    at = [p for p in GRID if all(np.isfinite(values[f"auc_{p}_{name}"]) for name in names)]
    if at:
        around = {}
        for name in names:
            keys = [f"auc_{p}_{name}" for p in at]
            centre = np.array([values[key] for key in keys])
            error = np.nan_to_num([readings.errors[key] for key in keys])
            around[SHOWN[name]] = Band(centre, centre - error, centre + error)
        note = f"band: 1 standard error, {RESAMPLES} resamples; none where one of them leaves one class"
        title = ["AUC of the images that are not referred", note]
        found["referral"] = figures.bands(around, at, title, "most uncertain images referred, %", "AUC")
    drawn = curves(readings)
    for name, curve, heading, x_title, y_title, diagonal in (
        ("calibration", CALIBRATION, "Calibration", "predicted p(sick)", "share of sick", "calibrated"),
        ("roc", ROC, "ROC curve", "1 - specificity", "sensitivity", "guessing"),
    ):
        series: dict[str, list[tuple[float, float]]] = {}
        for row in drawn:
            if row.curve == curve:
                series.setdefault(row.series, []).append((row.x, row.value))
        if series:
            found[name] = figures.unit_square(series, heading, x_title, y_title, diagonal)
    return found


def mistakes(readings: Readings, number: int) -> dict[str, np.ndarray]:
    """Rows of the images with a wrong label, the most and the least certain, `[<= number]` each.

    Certain by the mutual information, or by the entropy if there is none; a page draws the photographs.
    """
    is_called = readings.log_probs[:, 1] > readings.log_probs[:, 0]
    name = "information" if "information" in readings.uncertainty else "entropy"
    order = np.argsort(readings.uncertainty[name], kind="stable")
    wrong = order[(is_called != readings.labels)[order]]
    return {"most certain": wrong[:number], "least certain": wrong[::-1][:number]}
