"""Several runs of a referral task together: curves over the seeds, and the published claims beside them.

The claims are those of Farquhar 2022 (docs/sources.md), Table 4.1, on Kaggle's photographs at 512 pixels. A
claim holds, or is contradicted, only where the interval over the seeds of a paired difference shows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bench import figures, intervals
from bench.comparison import Comparison, FinishedRun, Lines, by_task, of_metrics
from bench.intervals import Band
from bench.studies.eyes import SICK
from bench.studies.referral import AUC, GRID, SHOWN, Readings

TABLE_4_1 = {
    "mc_dropout": (93.0, 94.1, 94.5, 95.1),
    "mfvi": (63.6, 63.5, 63.5, 62.6),
    "mfvi with tweaks": (93.9, 94.4, 95.4, 96.4),
    "radial": (94.3, 95.3, 96.1, 96.8),
    "deep_ensemble": (93.9, 96.0, 96.6, 97.2),
    "radial_ensemble": (94.5, 97.9, 98.0, 98.1),
}
"""Published AUC of a row, in percent, at PUBLISHED percent referred by mutual information."""
PUBLISHED = (0, 10, 20, 30)
FIRST_ABOVE_SECOND = (
    *(("radial", other) for other in ("mc_dropout", "mfvi", "mfvi with tweaks")),
    ("mfvi with tweaks", "mfvi"),
    ("deep_ensemble", "mc_dropout"),
    *(("radial_ensemble", other) for other in ("radial", "deep_ensemble")),
)
"""Rows of the table of which the first is above the second at every share."""

TENTHS = 10
"""Groups of test photographs, by the strength of their artefacts, of which a chart shows the means."""
TWEAKS = {"pretrain_epochs", "kl_weight", "kl_annealing_epochs", "prior", "prior_mean_follows", "truncation"}
"""Settings of mfvi with which the source's mean-field inference learns."""


def row_of(run: FinishedRun) -> str:
    """The row of Table 4.1 that a run repeats; another initial scale alone is no tweak of mean-field's."""
    if run.method_name != "mfvi":
        return run.method_identity
    changed = {word.partition("=")[0] for word in run.method_identity.partition("+")[2].split(",")}
    return "mfvi with tweaks" if changed & TWEAKS else "mfvi"


def compare(runs: Sequence[FinishedRun]) -> Comparison:
    """Referral curves, a line per method and variant; means of the metrics; verdicts on the claims."""
    charts: dict[str, Any] = {}
    found = of_metrics(runs)
    sentences = list(found.sentences)
    for task, lines in by_task(runs).items():
        hidden, told = artefacts(task, lines)
        drawn = referral_charts(task, lines) | hidden
        charts |= {f"{task}-{name}": chart for name, chart in drawn.items()}
        sentences += [f"{task}: {said}" for said in (*risen(lines), *verdicts(lines), *told)]
    return Comparison(charts, found.header, found.rows, sentences)


def referral_charts(task: str, lines: Lines) -> dict[str, Any]:
    """A chart per uncertainty of the mean AUC over the seeds against the percentage referred."""
    charts = {}
    for name, shown in SHOWN.items():
        measured = {line: _curves(of.values(), shown) for line, of in lines.items()}
        series = {line: _around(values) for line, values in measured.items() if len(values)}
        if series:
            title = [f"AUC of the rest, referred by {shown}", task, intervals.CAPTIONS["standard_error"]]
            charts[f"referral_{name}"] = figures.bands(
                series, GRID, title, "most uncertain images referred, %", "AUC"
            )
    return charts


def _curves(runs: Any, shown: str) -> np.ndarray:
    """AUC of the runs that have it everywhere, `[R, M]`."""
    curves = []
    for run in runs:
        values = {x: value for curve, series, x, value in run.curves if (curve, series) == (AUC, shown)}
        if all(percent in values for percent in GRID):
            curves.append([values[percent] for percent in GRID])
    return np.array(curves)


def _around(values: np.ndarray) -> Band:
    return intervals.band(values, "standard_error") if len(values) > 1 else Band.flat(values[0])


def _auc(runs: Mapping[int, FinishedRun], referred: int) -> dict[int, float]:
    """AUC by seed when a percentage is referred by mutual information, of the runs that have it."""
    name = "auc_0" if referred == 0 else f"auc_{referred}_information"
    return {seed: value for seed, run in runs.items() if (value := run.metrics.get(name)) is not None}


def risen(lines: Lines) -> list[str]:
    """Says of every line whether its AUC rises with referral by mutual information, and as published."""
    sentences = []
    last = PUBLISHED[-1]
    for line, runs in lines.items():
        if change := intervals.differences(_auc(runs, last), _auc(runs, 0)):
            gain = intervals.student(change)
            said = f"{line}: referring {last}% by mutual information changes the AUC by {gain:.4g}"
            published = TABLE_4_1.get(row_of(next(iter(runs.values()))))
            if published:
                said += f", published {(published[-1] - published[0]) / 100:+.3f}"
            sentences.append(said + gain.said("it rises", "it falls"))
    return sentences


def verdicts(lines: Lines) -> list[str]:
    """Table 4.1: which of two methods is above the other, at 0 and at 30% referred, paired by seed."""
    rows: dict[str, list[str]] = {}
    for line, runs in lines.items():
        if not (run := next(iter(runs.values()))).variant:
            rows.setdefault(row_of(run), []).append(line)
    sentences = []
    for first, second in FIRST_ABOVE_SECOND:
        for one, other in ((a, b) for a in rows.get(first, ()) for b in rows.get(second, ())):
            for place in (0, -1):
                referred = PUBLISHED[place]
                change = intervals.differences(_auc(lines[one], referred), _auc(lines[other], referred))
                if change:
                    gap, numbers = (
                        intervals.student(change),
                        [TABLE_4_1[row][place] for row in (first, second)],
                    )
                    sentences.append(
                        f"Farquhar 2022, Table 4.1, {referred}% referred: {first} {numbers[0]:.1f} above "
                        f"{second} {numbers[1]:.1f}; here {one} minus {other} in AUC is {gap:.4g}"
                        + gap.said("the claim holds", "the claim is contradicted")
                    )
    return sentences


# ----------------------------------------------------------------------- artefacts, of synthetic photographs


def strengths(run: FinishedRun) -> np.ndarray | None:
    """Strength of the artefacts in each test photograph, in [0, 1], `[N]`; None if nobody knows it.

    The generator's seed tells it of synthetic eyes, without their photographs.
    """
    own = run.task.settings
    if own.dataset != "retinopathy_synthetic" or own.shift != "none":
        return None
    from bench.photographs import fundus  # here, since other data need none of it

    patients, found = own.images // 2, {}
    for patient in range(1, patients + 1):
        if fundus.part_of(patient, patients) == "test":
            eyes = fundus.eyes_of(0, patient)
            for eye, side in enumerate(fundus.SIDES):
                found[f"{patient}_{side}"] = eyes.strength[0, eye], eyes.levels[0, eye] >= SICK
    in_order = (found[name] for name in sorted(found))  # as the prepared photographs are
    strength, sick = (np.array(values) for values in zip(*in_order, strict=True))
    return strength if np.array_equal(sick, run.arrays["labels"]) else None


def artefacts(task: str, lines: Lines) -> tuple[dict[str, Any], list[str]]:
    """How uncertainty goes with artefacts: a chart per uncertainty; rank correlations over the seeds."""
    strength = strengths(next(iter(next(iter(lines.values())).values())))
    if strength is None:
        return {}, []
    tenths = np.array_split(np.argsort(strength, kind="stable"), TENTHS)
    x = [float(strength[rows].mean()) for rows in tenths]
    series: dict[str, dict[str, Band]] = {"entropy": {}, "information": {}}
    sentences = []
    for line, runs in lines.items():
        of_runs = [Readings.of(run.arrays).uncertainty for run in runs.values()]
        for name, around in series.items():
            values = [of[name] for of in of_runs if name in of and len(of[name]) == len(strength)]
            if values:
                around[line] = _around(np.array([[v[rows].mean() for rows in tenths] for v in values]))
                correlation = intervals.student([rank_correlation(v, strength) for v in values])
                sentences.append(
                    f"{line}: {SHOWN[name]} and strength of artefacts have the rank correlation "
                    f"{correlation:.3g}" + correlation.said("it rises with them", "it falls with them")
                )
    charts = {}
    for name, around in series.items():
        if around:
            note = f"means over tenths of the test photographs; {intervals.CAPTIONS['standard_error']}"
            title = [f"{SHOWN[name].capitalize()} against the strength of artefacts", task, note]
            x_title, y_title = "strength of artefacts", f"{SHOWN[name]}, nats"
            charts[f"artefacts_{name}"] = figures.bands(around, x, title, x_title, y_title)
    return charts, sentences


def rank_correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Spearman's, of values without ties."""
    ranks = (np.argsort(np.argsort(values, kind="stable"), kind="stable") for values in (first, second))
    one, other = (rank - rank.mean() for rank in ranks)
    return float(one @ other / (one @ one))
