"""Networks beside trees on a user's own tables: four small ones, five splits; and what a large one costs.

    python benchmarks/own_tables.py compare [--to FOLDER] [--data FOLDER] [--json FILE]
    python benchmarks/own_tables.py large [METHOD ...] [--to FOLDER] [--json FILE]

`compare` writes the tables as CSV, runs every method on the same rows, and prints each method's main metric
and its difference from gradient boosting, with an interval for splits that overlap (Nadeau and Bengio 2003,
"Inference for the Generalization Error"). Of numbers the coverage of the 90% intervals is told by quarters of
the predicted width. Two tables are scikit-learn's, two of UCI.
A finished run is not made again.

`large` makes 50,000 rows of 27 numbers and 3 categories, and measures the processor's seconds of reading and
encoding, of a run, and of a forecast (`--dry-run`). Wall clock depends on what else runs.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from sklearn import datasets
from timing import print_table, write

import bench
from bench import intervals, tables
from bench.runs.forecast import forecast
from bench.runs.plan import Plan
from bench.runs.runner import load_scores
from bench.studies import normals
from bench.tasks.own_table import OwnTable, Settings

SPLITS = 5
BOOSTING = "bench.trees:GradientBoosting"
METHODS: dict[str, tuple[str, dict[str, object]]] = {
    "gradient boosting": (BOOSTING, {}),
    "gradient boosting, conformal": (BOOSTING, {"noise": "conformal"}),
    "gradient boosting, quantiles": (BOOSTING, {"noise": "quantile"}),
    "random forest": ("bench.trees:RandomForest", {}),
    "map": ("map", {}),
    "deep_ensemble": ("deep_ensemble", {}),
    "mfvi": ("mfvi", {}),
    "laplace": ("laplace", {}),
}
TABLES = ("diabetes", "breast_cancer", "energy", "yacht")
OF_NUMBERS = {"diabetes", "energy", "yacht"}


def columns(name: str, data: str | None) -> dict[str, Any]:
    """A table by column, the target named `target`."""
    if name == "breast_cancer":
        bunch = datasets.load_breast_cancer()
        inputs, targets = bunch.data, bunch.target_names[bunch.target]
    else:
        table = tables.load(name, data)
        inputs, targets = table.inputs, table.targets
    return {f"x{i}": column for i, column in enumerate(inputs.T)} | {"target": targets}


def large(rows: int = 50_000) -> dict[str, Any]:
    """A made-up table of 30 inputs, of which seven matter; the noise has standard deviation 0.5."""
    draw = np.random.default_rng(0)
    x, codes = draw.normal(size=(rows, 27)).round(5), draw.integers(0, 8, (3, rows))
    mean = 2 * x[:, 0] + np.sin(2 * x[:, 1]) * x[:, 2] + np.abs(x[:, 3]) + codes[0] % 3
    found: dict[str, Any] = {f"x{i}": column for i, column in enumerate(x.T)}
    found |= {f"c{i}": [f"k{code}" for code in column] for i, column in enumerate(codes)}
    return found | {"target": (mean + 0.5 * draw.normal(size=rows)).round(5)}


def written(path: Path, make: Callable[[], dict[str, Any]]) -> Path:
    """The file, written if it is not there."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        found = make()
        with path.open("w", newline="") as file:
            lines = csv.writer(file)
            lines.writerow(found)
            lines.writerows(zip(*found.values(), strict=True))
    return path


def compared(folder: Path, data: str | None, methods: Iterable[str]) -> list[dict[str, Any]]:
    """A row for every table and method: metrics over the splits, and the difference from boosting."""
    for method in methods:  # so that what is stopped has whole methods
        for name in TABLES:
            if _fits(method, name):
                made = [_run(method, name, split, folder, data) for split in range(SPLITS)]
                print(method, name, *(f"{run.record.metrics['nll']:.4f}" for run in made), flush=True)
    rows = []
    for name in TABLES:
        for method in methods:
            if not _fits(method, name):
                continue
            runs, first = (
                [_run(each, name, split, folder, data) for split in range(SPLITS)]
                for each in (method, "gradient boosting")
            )
            nll = [run.record.metrics["nll"] for run in runs]
            before = [run.record.metrics["nll"] for run in first]
            change = intervals.student(np.subtract(nll, before), test_to_train=0.25)
            shown = ("rmse", "coverage_error") if name in OF_NUMBERS else ("accuracy", "ece")
            rows.append(
                {
                    "table": name,
                    "method": method,
                    "nll": float(np.mean(nll)),
                    "difference": change.centre,
                    "low": change.low,
                    "high": change.high,
                    **{n: float(np.mean([run.record.metrics[n] for run in runs])) for n in shown},
                    **({"by width": _by_width(runs)} if name in OF_NUMBERS else {}),
                    "seconds": float(np.mean([sum(f.seconds for f in run.record.fits) for run in runs])),
                }
            )
    return rows


def _fits(method: str, table: str) -> bool:
    """Whether a method is one of its own on a table: what boosting makes of noise is of numbers."""
    return table in OF_NUMBERS or not method.startswith("gradient boosting, ")


def _by_width(runs: Iterable[Any]) -> str:
    """Coverage of the 90% intervals by quarters of a split's rows, the narrowest first, over the splits."""
    covered = np.zeros(4)
    rows = np.zeros(4)
    for run in runs:
        _, arrays = load_scores(run.directory)
        mean, sigma = normals.mixtures(arrays)
        quarters = normals.by_width(mean, sigma, normals.below(mean, sigma, arrays["targets"]))
        if not quarters:
            return "equally wide"
        covered += [quarter.covered for quarter in quarters]
        rows += [quarter.size for quarter in quarters]
    return " ".join(f"{share:.2f}" for share in covered / rows)


@cache
def _run(method: str, table: str, split: int, folder: Path, data: str | None) -> Any:
    name, settings = METHODS[method]
    path = written(folder / f"{table}.csv", lambda: columns(table, data))
    kind = "regression" if table in OF_NUMBERS else "classification"
    given = {"file": str(path), "target": "target", "split": split, "kind": kind}
    return bench.run(name, "own_table", method_settings=settings, task_settings=given, out=folder / "runs")


def costs(folder: Path, methods: list[str]) -> list[dict[str, Any]]:
    """Processor seconds of the large table: reading, and of each method a fit and a forecast."""
    path = written(folder / "large.csv", large)
    given = {"file": str(path), "target": "target"}
    began = time.process_time()
    OwnTable(Settings(**given)).data_digest()
    rows: list[dict[str, Any]] = [{"what": "read and encode", "seconds": time.process_time() - began}]
    for method in methods:
        began = time.process_time()
        run = bench.run(method, "own_table", task_settings=given, out=folder / "runs", force=True)
        spent = time.process_time() - began
        kept = {name: run.record.metrics[name] for name in ("nll", "rmse", "coverage_error")}
        epochs = max(fit.epochs for fit in run.record.fits)
        rows.append({"what": f"run {method}", "seconds": spent, "epochs": epochs, **kept})
        began = time.process_time()
        told = forecast(Plan(method=method, task="own_table", task_settings=given, out=folder / "none"))
        spent = time.process_time() - began
        rows.append({"what": f"dry run {method}", "seconds": spent, "forecast": told.seconds})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["compare", "large"])
    parser.add_argument("methods", nargs="*", help="fewer than all")
    parser.add_argument("--to", type=Path, default=Path("own-tables"), help="folder of tables and runs")
    parser.add_argument("--data", help="where the UCI tables lie")
    parser.add_argument("--json", type=Path, help="where to write what was found")
    options = parser.parse_args()
    if options.what == "compare":
        rows = compared(options.to, options.data, options.methods or list(METHODS))
    else:
        rows = costs(options.to, options.methods or ["map", "deep_ensemble", BOOSTING])
    for table in TABLES if options.what == "compare" else [None]:
        print_table([row for row in rows if row.get("table") == table])
    if options.json:
        write(options.json, {options.what: rows})


if __name__ == "__main__":
    main()
