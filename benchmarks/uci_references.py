"""Predictors that are no networks, on the published splits of the UCI tables: reference rows of docs/uci.md.

    python benchmarks/uci_references.py [uci_yacht ..] [--csv benchmarks/uci_references.csv]

Each sees the standardised rows that a network is trained on. Those set aside stop the boosting of normals and
make an interval conformal; the others pass over them. A predictor that tells a density has a log likelihood
and a CRPS; the others have a mean and the central 90% interval alone. A table is written when it is done.

Source: Duan et al. 2020, "NGBoost: Natural Gradient Boosting for Probabilistic Prediction"; Lei et al. 2018,
"Distribution-Free Predictive Inference for Regression" (the interval around ridge regression). Everything
else is scikit-learn's, at its own settings unless said.

Shapes: n training rows, N test rows, D inputs. Units: of the standardised target inside, the target's own in
the file, log likelihoods in nats.
"""

from __future__ import annotations

import argparse
import csv
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from anchors import process
from scipy.special import ndtri
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.linear_model import BayesianRidge, RidgeCV
from sklearn.tree import DecisionTreeRegressor

from bench.runs import registry
from bench.settings import build
from bench.studies import conformal, forecasts, normals
from bench.studies.published_splits import mc_dropout
from bench.system.files import write

LEVEL = 90
"""Of the central interval, in percent."""
MOST_OF_A_PROCESS = 2000
"""Rows of a table from which on a Gaussian process costs too much here."""
SCALED_ON = 300
"""Most rows that choose the scales of a Gaussian process; all rows are conditioned on."""
ROUNDS, RATE, DEPTH, BATCH = 200, 0.1, 3, 500
"""Of the boosting of normals: rounds at most, rate, depth of a tree, rows at most that a tree is grown on."""
STEPS = 2.0 ** np.arange(-4, 5)
"""Lengths of a boosting step that are tried."""
SCORES = ("log_likelihood", "rmse", "crps", f"interval_score_{LEVEL}", f"width_{LEVEL}", f"covered_{LEVEL}")


class Rows(NamedTuple):
    """Standardised rows of a split: inputs `[., D]` and targets `[.]` in double precision."""

    inputs: np.ndarray
    targets: np.ndarray
    held_out: np.ndarray
    held_out_targets: np.ndarray
    test: np.ndarray


class Predicted(NamedTuple):
    """Of test rows, `[N]` each: mean, ends of the central interval, and the sd where it is a normal."""

    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    sd: np.ndarray | None = None


def normal(mean: np.ndarray, sd: np.ndarray) -> Predicted:
    """What a normal predicts."""
    half = float(ndtri(0.5 + LEVEL / 200)) * sd
    return Predicted(mean, mean - half, mean + half, sd)


# ---------------------------------------------------------------------------------------------- predictors


def linear(rows: Rows) -> Predicted:
    """Bayesian linear regression; prior and noise are those of the largest evidence."""
    fitted = BayesianRidge().fit(rows.inputs, rows.targets)
    return normal(*fitted.predict(rows.test, return_std=True))


def gaussian_process(rows: Rows) -> Predicted:
    """A Gaussian process, a length scale for every input; scales and noise are of the largest evidence."""
    some = slice(SCALED_ON)
    with warnings.catch_warnings():  # a length scale at its bound: an input that does not matter
        warnings.simplefilter("ignore", ConvergenceWarning)
        scaled = process(rows.inputs.shape[1]).fit(rows.inputs[some], rows.targets[some])
    fitted = GaussianProcessRegressor(scaled.kernel_, optimizer=None).fit(rows.inputs, rows.targets)
    return normal(*fitted.predict(rows.test, return_std=True))


def natural_gradient(targets: np.ndarray, mean: np.ndarray, log_sd: np.ndarray) -> np.ndarray:
    """Of -log N(y; mean, sd^2) by mean and log sd, `[2, n]`: the gradient over the Fisher information."""
    z = (targets - mean) * np.exp(-log_sd)
    return np.stack([mean - targets, (1 - z**2) / 2])


def loss(targets: np.ndarray, parameters: np.ndarray) -> float:
    """Mean of -log N(y; mean, sd^2) but for a constant; parameters are mean and log sd, `[2, n]`."""
    mean, log_sd = parameters
    return float((0.5 * ((targets - mean) * np.exp(-log_sd)) ** 2 + log_sd).mean())


def boosted_normals(rows: Rows) -> Predicted:
    """Natural gradient boosting of mean and log sd, to the round of the least loss on held-out rows."""
    inputs = np.concatenate([rows.inputs, rows.held_out, rows.test]).astype(np.float32)
    number, generator = len(rows.targets), np.random.default_rng(0)
    to = number + len(rows.held_out)
    parameters = np.empty((2, len(inputs)))
    parameters[:] = [[rows.targets.mean()], [np.log(rows.targets.std())]]
    best, least = parameters[:, to:].copy(), loss(rows.held_out_targets, parameters[:, number:to])
    for _ in range(ROUNDS):
        batch = generator.permutation(number)[:BATCH]
        gradient = natural_gradient(rows.targets, *parameters[:, :number])
        trees = [DecisionTreeRegressor(max_depth=DEPTH).fit(inputs[batch], g[batch]) for g in gradient]
        direction = np.stack([tree.predict(inputs) for tree in trees])
        losses = [loss(rows.targets, (parameters - s * direction)[:, :number]) for s in STEPS]
        parameters -= RATE * STEPS[int(np.argmin(losses))] * direction
        if (now := loss(rows.held_out_targets, parameters[:, number:to])) < least:
            best, least = parameters[:, to:].copy(), now
    return normal(best[0], np.exp(best[1]))


def boosted_quantiles(rows: Rows) -> Predicted:
    """Gradient boosting of the two quantiles of the interval, and of the mean."""
    tail = (1 - LEVEL / 100) / 2
    low, high, mean = (
        HistGradientBoostingRegressor(**of, early_stopping=False, random_state=0)
        .fit(rows.inputs, rows.targets)
        .predict(rows.test)
        for of in ({"loss": "quantile", "quantile": tail}, {"loss": "quantile", "quantile": 1 - tail}, {})
    )
    return Predicted(mean, np.minimum(low, high), np.maximum(low, high))


def conformal_ridge(rows: Rows) -> Predicted:
    """Ridge regression, and the interval that holds a new target with 90% at least, whatever its law."""
    fitted = RidgeCV(np.logspace(-3, 3, 13)).fit(rows.inputs, rows.targets)
    mean, held_out = fitted.predict(rows.test), fitted.predict(rows.held_out)
    half = conformal.margin(held_out, held_out, rows.held_out_targets, LEVEL / 100)
    return Predicted(mean, mean - half, mean + half)


REFERENCES: dict[str, Callable[[Rows], Predicted]] = {
    "Gaussian process": gaussian_process,
    "Bayesian linear regression": linear,
    "boosting of normals": boosted_normals,
    "boosting of quantiles": boosted_quantiles,
    "conformal ridge": conformal_ridge,
}


# ------------------------------------------------------------------------------------------------- scoring


def rows_of(task: Any, split: int) -> tuple[Rows, float, float]:
    """The rows of a split, and mean and standard deviation by which its targets are standardised."""
    part = task.standardised(split)
    (x, y), (held_out, held_out_y) = (
        [tensor.double().numpy() for tensor in data.tensors] for data in (part.train, part.val)
    )
    rows = Rows(x, y[:, 0], held_out, held_out_y[:, 0], part.test_inputs.double().numpy())
    return rows, part.centre, part.scale


def scored(found: Predicted, targets: np.ndarray, centre: float, scale: float) -> dict[str, float | None]:
    """`SCORES` of a prediction, in the unit of the targets `[N]`."""
    mean, low, high = (centre + scale * values for values in found[:3])
    told: dict[str, float | None] = dict.fromkeys(SCORES)
    told["rmse"] = float(np.sqrt(((mean - targets) ** 2).mean()))
    told[f"interval_score_{LEVEL}"] = float(forecasts.interval_score(low, high, targets, LEVEL / 100).mean())
    told[f"width_{LEVEL}"] = float((high - low).mean())
    told[f"covered_{LEVEL}"] = float(((low <= targets) & (targets <= high)).mean())
    if found.sd is not None:
        of = mean[None], scale * found.sd[None], targets
        told["log_likelihood"] = float(normals.log_density(*of).mean())
        told["crps"] = float(forecasts.crps(*of).mean())
    return told


def of_table(name: str, data_dir: str | None = None) -> list[dict[str, Any]]:
    """Scores of every reference on every published split of a table, a row each."""
    entry = registry.task(name)
    task: Any = entry.cls(
        build(entry.cls.settings_class, {**entry.fixed, "published_splits": True}, "task"), data_dir
    )
    targets = task.targets()["targets"]
    few = len(task.table.targets) < MOST_OF_A_PROCESS
    found = []
    for reference, predict in REFERENCES.items():
        if predict is gaussian_process and not few:
            continue
        for split in range(task.num_splits):
            rows, centre, scale = rows_of(task, split)
            told = scored(predict(rows), targets[split], centre, scale)
            found.append({"table": task.settings.dataset, "reference": reference, "split": split, **told})
    return found


def text(found: list[dict[str, Any]]) -> str:
    """The file: six digits of every number, nothing where there is none."""
    written = io.StringIO()
    table = csv.writer(written, lineterminator="\n")
    table.writerow(["table", "reference", "split", *SCORES])
    for row in found:
        numbers = ["" if row[name] is None else f"{row[name]:.6g}" for name in SCORES]
        table.writerow([row["table"], row["reference"], row["split"], *numbers])
    return written.getvalue()


def merged(kept: str, made: str) -> str:
    """A file with the rows of the tables that were made in place of its own, table by table."""
    header, *rows = made.splitlines()
    tables = {row.partition(",")[0] for row in rows}
    rows += [row for row in kept.splitlines()[1:] if row.partition(",")[0] not in tables]
    return "\n".join([header, *sorted(rows, key=lambda row: row.partition(",")[0])]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [f"uci_{table}" for table in mc_dropout()]
    parser.add_argument("tasks", nargs="*", default=names, help="all nine unless given")
    parser.add_argument("--csv", type=Path, help="file whose rows of these tables are written anew")
    options = parser.parse_args()
    for name in options.tasks:
        made = text(of_table(name))
        if options.csv:
            kept = options.csv.read_text() if options.csv.exists() else ""
            write(options.csv, merged(kept, made).encode())
        else:
            print(made, end="")


if __name__ == "__main__":
    main()
