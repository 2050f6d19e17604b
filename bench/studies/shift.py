"""Scores, curves and charts of predictions under shift, from one run's stored arrays, and of several runs.

Shapes: N test images, K corruptions, F foreign data sets, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from bench import corruptions, figures, intervals, metrics
from bench.comparison import Comparison, FinishedRun, by_task, of_metrics
from bench.contract import Arrays, Metric, Metrics, Row, Undefined
from bench.intervals import Band
from bench.studies import calibration, detection, joint

SCALED = ("nll", "ece")
"""Measures that are also given at the fitted temperature."""
NONE_WRONG = Undefined("every validation image is classified right: no temperature has the least NLL")
CONFORMAL = {
    "conformal_coverage": Metric(
        f"share of the conformal sets, promised {calibration.LEVEL:.0%}, that hold the label",
        "fraction",
        1,
        0,
    ),
    "conformal_size": Metric("mean number of classes in a conformal set", "classes", 0, np.inf),
}
JOINT = {
    f"joint_nll{place}{kind}": Metric(f"{text} of ten {of}, mean over batches", "nats", 0, np.inf)
    for place, of in {"": "images at the largest severity", "_clean": "clean images"}.items()
    for kind, text in {
        "": "-log of the probability of all labels together",
        "_independent": "sum of -log p(label)",
    }.items()
}
"""Metrics of joint predictions: of what draws say of a batch, and of what they say of its images alone."""
PAIRS = 100
"""Pairs of test images that are predicted jointly, at most."""
DRAWN = {"nll": "NLL, nats", "accuracy": "accuracy", "ece": "calibration error"}
"""Measures of which there are figures, and their axes."""
ALL, RELIABILITY = "all corruptions", "share of right classes against largest probability"
"""A series of every measure, and a curve."""
KNOWN = "known images"
"""A series of the histograms."""
HISTOGRAM = 20
"""Bins of a histogram of uncertainty."""


@dataclass(frozen=True, eq=False)
class Readings:
    """What a run predicted, in float64, and the truth.

    Attributes:
        clean: Log-probabilities of the test images `[N, C]`.
        corrupted: Severity -> those of the corrupted test images, `[K, N, C]`.
        foreign: Name -> those of the foreign images, `[N, C]`.
        information: Mutual information of the clean test images and of each foreign set, `[1 + F, N]`.
        brightness: Mean level of the same images, from 0 to 255, `[1 + F, N]`.
        labels: Of the test images `[N]`.
        temperature: Of least NLL on the validation part; None if there is none.
        threshold: Of the conformal sets.
    """

    clean: np.ndarray
    corrupted: dict[int, np.ndarray]
    foreign: dict[str, np.ndarray]
    information: np.ndarray
    brightness: np.ndarray
    labels: np.ndarray
    temperature: float | None
    threshold: float

    @classmethod
    def of(cls, arrays: Arrays, severities: Sequence[int], foreign: Sequence[str], scaled: bool) -> Readings:
        """Reads them from the arrays of a run; if `scaled`, all predictions at the fitted temperature."""
        restored = {name: metrics.restore(a) for name, a in arrays.items() if name.endswith("log_probs")}
        fitted = calibration.temperature(restored["val_log_probs"], arrays["val_labels"])
        if scaled and fitted is not None:
            restored = {name: calibration.tempered(a, fitted) for name, a in restored.items()}
        clean, *cells = restored["log_probs"]
        kinds = len(corruptions.KINDS)
        return cls(
            clean,
            {s: np.stack(cells[i * kinds : (i + 1) * kinds]) for i, s in enumerate(severities)},
            dict(zip(foreign, restored["foreign_log_probs"], strict=True)),
            np.concatenate([arrays["information"][:1], arrays["foreign_information"]]).astype(np.float64),
            arrays["brightness"],
            arrays["labels"].astype(np.int64),
            fitted,
            calibration.threshold(restored["calibration_log_probs"], arrays["calibration_labels"]),
        )

    @property
    def severities(self) -> tuple[int, ...]:
        """The severities that were predicted, from 0."""
        return (0, *self.corrupted)

    def at(self, severity: int) -> np.ndarray:
        """Predictions at a severity, `[K, N, C]`; of clean images K is 1."""
        return self.corrupted[severity] if severity else self.clean[None]

    @cached_property
    def measured(self) -> dict[str, dict[int, np.ndarray]]:
        """Measure -> severity -> its value for every corruption, `[K]`."""
        found: dict[str, dict[int, np.ndarray]] = {}
        for s in self.severities:
            of_kinds = []
            for log_probs in self.at(s):
                sets = calibration.covered(log_probs, self.labels, self.threshold)
                values = calibration.measured(log_probs, self.labels)
                of_kinds.append(values | dict(zip(CONFORMAL, sets, strict=True)))
            for name in of_kinds[0]:
                found.setdefault(name, {})[s] = np.array([values[name] for values in of_kinds])
        return found

    @cached_property
    def uncertainties(self) -> dict[str, dict[str, np.ndarray]]:
        """Every uncertainty `[N]`, of the known images and of each foreign data set."""
        of = {KNOWN: self.clean, **self.foreign}
        return {
            name: detection.uncertainties(log_probs, self.information[i])
            for i, (name, log_probs) in enumerate(of.items())
        }

    @property
    def losses(self) -> np.ndarray:
        """-log p(label) of each test image, in nats, mean over corruptions and severities, `[N]`."""
        cells = np.concatenate(list(self.corrupted.values()))  # [cells, N, C]
        return -cells[:, np.arange(len(self.labels)), self.labels].mean(0)


def measures(severities: Sequence[int], foreign: Sequence[str]) -> dict[str, Metric]:
    """The metrics of a run by name, at severities above 0."""
    found: dict[str, Metric] = {}

    def said(name: str, metric: Metric, where: str, may_be_undefined: bool = False) -> None:
        text = f"{metric.description}; {where}"
        found[name] = Metric(text, metric.unit, metric.best, metric.worst, may_be_undefined)

    for name, metric in (calibration.MEASURES | CONFORMAL).items():
        said(name, metric, "mean over corruptions and severities")
        said(f"{name}_clean", metric, "clean images")
        for s in severities:
            said(f"{name}_severity_{s}", metric, f"mean over corruptions, severity {s}")
    found["temperature"] = Metric(
        "temperature of least validation NLL; above 1 is overconfident", "factor", 0, np.inf, True
    )
    for name in SCALED:
        for place in (name, f"{name}_clean"):
            said(f"{place}_scaled", found[place], "at the fitted temperature", True)
    for name in foreign:
        found |= detection.measures(name)
    text = f"area under the ROC curve of detection by entropy, mean over {' and '.join(foreign)}"
    return found | {"ood_auroc": Metric(text, "fraction", 1, 0)}


def scores(readings: Readings, scaled: Readings) -> Metrics:
    """Every metric of `measures`, of predictions and of the same at the fitted temperature."""
    found: Metrics = {}
    severities = readings.severities[1:]
    for name, values in readings.measured.items():
        found[name] = float(np.mean([values[s] for s in severities]))
        found[f"{name}_clean"] = float(values[0].mean())
        found |= {f"{name}_severity_{s}": float(values[s].mean()) for s in severities}
    fits = readings.temperature is not None
    found["temperature"] = NONE_WRONG if readings.temperature is None else readings.temperature
    for name in SCALED:
        values = scaled.measured[name]
        mean, clean = np.mean([values[s] for s in severities]), values[0].mean()
        found[f"{name}_scaled"] = float(mean) if fits else NONE_WRONG
        found[f"{name}_clean_scaled"] = float(clean) if fits else NONE_WRONG
    known = readings.uncertainties[KNOWN]
    for i, name in enumerate(readings.foreign):
        brightness = readings.brightness[0], readings.brightness[1 + i]
        found |= detection.scores(name, known, readings.uncertainties[name], brightness)
    of_foreign = (readings.uncertainties[name]["entropy"] for name in readings.foreign)
    by_entropy = [detection.auroc(known["entropy"], values) for values in of_foreign]
    return found | {"ood_auroc": float(np.mean(by_entropy))}


def joint_cells(pairs: int, severities: Sequence[int]) -> np.ndarray:
    """Which cell, clean or of a severity and a corruption, each image of the pairs is of, `[2, 2P]`.

    First all are clean; then those of a pair have one corruption at the largest severity, the pairs in turn.
    """
    kinds = len(corruptions.KINDS)
    largest = 1 + (len(severities) - 1) * kinds + np.arange(pairs) % kinds
    return np.stack([np.zeros(2 * pairs, int), largest.repeat(2)])


def joint_scores(log_probs: np.ndarray, labels: np.ndarray) -> Metrics:
    """The metrics `JOINT`.

    Args:
        log_probs: Of every draw at the images of the pairs, as `joint_cells` orders them, `[S, 2, 2P, C]`.
        labels: Of the test images, the first 2P of which are those of the pairs, `[N]`.
    """
    rows = joint.rows(joint.anchors(log_probs.shape[2] // 2, "shift"))  # [P, T]
    found: Metrics = {}
    for place, of_place in zip(("_clean", ""), np.moveaxis(log_probs, 1, 0), strict=True):
        of_labels = of_place[:, rows, labels[rows]]
        found[f"joint_nll{place}"] = float(joint.log_losses(of_labels).mean())
        alone = -joint.BATCH * joint.marginal(of_labels).mean()
        found[f"joint_nll{place}_independent"] = float(alone)
    return found


# ------------------------------------------------------------------------------------------- curves, charts


def curves(readings: Readings) -> list[Row]:
    """Measures by severity, of each corruption and in the mean; reliability; histograms of uncertainty."""
    rows = []
    for name, values in readings.measured.items():
        for s in readings.severities:
            rows.append(Row(name, ALL, s, float(values[s].mean())))
            of_kinds = np.broadcast_to(values[s], len(corruptions.KINDS))
            rows += [Row(name, k, s, float(v)) for k, v in zip(corruptions.KINDS, of_kinds, strict=True)]
    for s in readings.severities:
        log_probs = readings.at(s)
        right = log_probs.argmax(2) == readings.labels  # [K, N]
        bins = calibration.reliability(np.exp(log_probs.max(2)).ravel(), right.ravel(), adaptive=False)
        name = f"severity {s}" if s else "clean"
        rows += [Row(RELIABILITY, name, float(p), float(share)) for _, p, share in zip(*bins, strict=True)]
    is_spread = bool(readings.information.any())
    return rows + histograms(readings.uncertainties, readings.clean.shape[1], is_spread)


def histograms(uncertainties: dict[str, dict[str, np.ndarray]], classes: int, is_spread: bool) -> list[Row]:
    """Shares of the images in bins of entropy and, where samples differ, of mutual information.

    Args:
        uncertainties: Set of images -> uncertainty -> its values `[N]`.
        classes: C, which bounds both.
        is_spread: Whether samples differ.
    """
    rows, edges = [], np.linspace(0, np.log(classes) * (1 + 1e-3), HISTOGRAM + 1)
    for name in ("entropy", "information") if is_spread else ("entropy",):
        for part, values in uncertainties.items():
            shares = np.histogram(values[name], edges)[0] / len(values[name])
            points = zip((edges[1:] + edges[:-1]) / 2, shares, strict=True)
            rows += [Row(detection.SHOWN[name], part, float(x), float(share)) for x, share in points]
    return rows


def charts(rows: Sequence[Row]) -> dict[str, Any]:
    """Measures against severity, reliability, and histograms of uncertainty, of a run's `curves`."""
    found = {f"{name}_by_severity": _by_severity(rows, name) for name in DRAWN}
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row.curve == RELIABILITY:
            series.setdefault(row.series, []).append((row.x, row.value))
    axes = "largest probability", "share of right classes"
    found["reliability"] = figures.unit_square(series, "Reliability", *axes, "calibrated")
    return found | histogram_charts(rows)


def histogram_charts(rows: Sequence[Row]) -> dict[str, Any]:
    """Charts of `histograms`."""
    found = {}
    for name in ("entropy", "information"):
        shown = detection.SHOWN[name]
        if drawn := [row for row in rows if row.curve == shown]:
            title = [f"{shown.capitalize()} of known and of foreign images", f"{HISTOGRAM} bins of one width"]
            found[f"{name}_histogram"] = figures.lines(drawn, title, f"{shown}, nats", "share of images")
    return found


def _by_severity(rows: Sequence[Row], name: str) -> Any:
    """A measure's mean over the corruptions against severity, from the least to the largest of them."""
    own = [row for row in rows if row.curve == name and row.series != ALL]
    x = sorted({row.x for row in own})
    values = np.array([[row.value for row in own if row.x == at] for at in x])
    around = Band(values.mean(1), values.min(1), values.max(1))
    title = [f"{DRAWN[name]} by severity", "band: from the least to the largest of the corruptions"]
    return figures.bands({ALL: around}, x, title, "severity; 0 is clean", DRAWN[name])


def compare(runs: Sequence[FinishedRun]) -> Comparison:
    """Measures against severity, a line per method and variant; means of all metrics over the seeds."""
    found, drawn = of_metrics(runs), {}
    for task, lines in by_task(runs).items():
        for name, shown in DRAWN.items():
            around: dict[str, Band] = {}
            # Runs of other severities have an x of their own: those that all runs have are drawn.
            of_runs = {line: [_points(run, name) for run in of.values()] for line, of in lines.items()}
            x = sorted(set.intersection(*(set(points) for of in of_runs.values() for points in of)))
            for line, of in of_runs.items():
                values = np.array([[points[at] for at in x] for points in of])
                is_one = len(values) == 1
                around[line] = Band.flat(values[0]) if is_one else intervals.band(values, "standard_error")
            title = [f"{shown} by severity", task, f"{intervals.CAPTIONS['standard_error']} over the seeds"]
            drawn[f"{task}-{name}"] = figures.bands(around, x, title, "severity; 0 is clean", shown)
    return Comparison(drawn, found.header, found.rows, found.sentences)


def _points(run: FinishedRun, name: str) -> dict[float, float]:
    """Severity -> a measure's mean over the corruptions."""
    return {x: value for curve, series, x, value in run.curves if (curve, series) == (name, ALL)}
