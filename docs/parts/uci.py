"""The UCI tables on the published splits: runs beside the published MC dropout of the very same split."""

from __future__ import annotations

import numpy as np
from parts.evidence import Part, finished_runs, or_none

from bench import tables
from bench.studies.published_splits import mc_dropout, pairings
from bench.tasks.uci_regression import NAMES

TASKS = {name: str(fixed["dataset"]) for name, fixed in NAMES.items() if name.startswith("uci_")}
"""Task -> its table."""
SCORES = ("crps", "interval_score_90", "width_90", "coverage_error", "pit_distance")


def paired() -> str:
    """A row for every method on a table, beside the published MC dropout."""
    rows = []
    for found in pairings(finished_runs(*TASKS)):
        means = {
            name: np.mean([run.metrics[name] for run in found.runs])
            for name in ("log_likelihood", "rmse", *SCORES)
        }
        line = found.line.replace(", published_splits=true", "")
        rows.append(
            [f"`{found.task}`", f"`{line}`", str(len(found.runs))]
            + [f"{means['log_likelihood']:.3f}", f"{found.log_likelihood:.2g}"]
            + [f"{means['rmse']:.3g}", f"{found.rmse:.2g}"]
            + [f"{means[name]:.3g}" for name in SCORES]
        )
    header = ["task", "method", "seeds", "log likelihood", "less the published", "RMSE", "less the published"]
    return or_none([*header, *(f"`{name}`" for name in SCORES)], rows)


def published() -> str:
    """What the published MC dropout has on every table."""
    rows = []
    for task, table in TASKS.items():
        (log_likelihood, rmse), unit = mc_dropout()[table].T, tables.SOURCES[table].unit
        span = f"{log_likelihood.min():.2f} to {log_likelihood.max():.2f}"
        means = [f"{log_likelihood.mean():.3f}", span, f"{rmse.mean():.3g}"]
        rows.append([f"`{task}`", unit, str(len(rmse)), *means])
    return or_none(["task", "unit", "splits", "log likelihood", "of single splits", "RMSE"], rows)


PARTS: dict[str, Part] = {"uci published": published, "uci paired": paired}
