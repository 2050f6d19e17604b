"""Figures of singular models: bands of the next observation, and Psi against n.

The paper is "Variational Inference via Resolution of Singularities" 2022 (docs/sources.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from bench import figures, intervals
from bench.intervals import Band, Moments
from bench.studies.singular.claims import over_sizes, slopes
from bench.studies.singular.table import EvidenceRun, Triplet, place

GRID = np.linspace(0.5, 1, 51)
"""Inputs at which runs of the tanh network keep its function."""


def psi_charts(runs: Sequence[EvidenceRun]) -> dict[str, Any]:
    """Psi against n, mean and standard error, beside the log evidence and its leading term.

    A panel per method and preset.
    """
    import altair as alt

    groups = over_sizes(runs)
    panels: dict[Triplet, list[Any]] = {}
    for slope in slopes(runs):
        of = groups[slope.triplet, slope.preset, slope.method]
        values = [np.concatenate([run.values for run in of[n]]) for n in slope.sizes]
        if not all(map(len, values)):
            continue
        series = {"Psi": Band(*np.transpose([_mean_and_error(v) for v in values]))}
        leading = [of[n][0].leading_term for n in slope.sizes]
        if None not in leading:
            level = np.array(leading, float)
            series["-lambda log n + (m - 1) log log n"] = Band.flat(level)
        evidences = [np.concatenate([run.log_evidences for run in of[n]]) for n in slope.sizes]
        if all(np.isfinite(v).all() for v in evidences):
            series["log evidence"] = Band(*np.transpose([_mean_and_error(v) for v in evidences]))
        against = "" if slope.expected is None else f", -lambda {slope.expected:g}"
        title = [
            f"{slope.method}, {slope.preset}",
            f"slope {slope.slope:.2f}, standard error {slope.standard_error:.2f}{against}",
            intervals.CAPTIONS["standard_error"],
        ]
        chart = figures.bands(series, slope.sizes, title, "n", "Psi, nats", logarithmic_x=True)
        panels.setdefault(slope.triplet, []).append(chart)
    return {
        f"psi-{_slug(triplet)}": alt.concat(*of, columns=2)
        .properties(title=str(triplet))
        .resolve_scale(**figures.APART)
        for triplet, of in panels.items()
    }


def _mean_and_error(values: np.ndarray) -> tuple[float, float, float]:
    """Mean, and mean -+ standard error where there are several values."""
    mean, sd, count = Moments.of(values)
    error = (sd or 0.0) / count**0.5
    return mean, mean - error, mean + error


def predictive_chart(functions: np.ndarray, truth: np.ndarray, title: str) -> Any:
    """What the next observation at the inputs of GRID will be, 5 to 95%, beside the same of the truth.

    Args:
        functions: Draws of f, `[S, 51]`, finite.
        truth: The true f, `[51]`.
        title: Of the chart.
    """
    levels = (0.5, 0.05, 0.95)
    series = {
        "truth": Band(*intervals.mixture_quantiles(truth[None], levels)),
        "predictive": Band(*intervals.mixture_quantiles(functions, levels)),
    }
    caption = "median; band: 5 to 95%, observation noise included"
    return figures.bands(series, GRID.tolist(), [title, caption], "x", "y")


def predictive_charts(runs: Iterable[EvidenceRun]) -> dict[str, Any]:
    """The 5 to 95% band of the next observation, and the truth's: Figs 1 and 2, a panel per method.

    Of the first repetition that converged, of runs that keep functions.
    """
    import altair as alt

    panels: dict[tuple[Triplet, int, str, int], list[Any]] = {}
    for run in sorted(runs, key=place):
        if run.functions is None or not np.isfinite(run.functions).all():
            continue
        weight = run.triplet.true_weight or 0.0
        truth = run.triplet.hidden * weight * np.tanh(weight * GRID)
        chart = predictive_chart(run.functions, truth, run.method)
        group = run.triplet, run.num_train, run.preset, run.seed
        panels.setdefault(group, []).append(chart)
    charts = {}
    for (triplet, num_train, preset, seed), of in panels.items():
        whole = f"{triplet}, n = {num_train}, {preset}, seed {seed}"
        chart = alt.concat(*of, columns=2).properties(title=whole).resolve_scale(**figures.APART)
        charts[f"predictive-{_slug(triplet)}-n{num_train}-{_slug(preset)}-seed{seed}"] = chart
    return charts


def _slug(name: object) -> str:
    """A name for files."""
    return re.sub(r"[^A-Za-z0-9.]+", "_", str(name)).strip("_")
