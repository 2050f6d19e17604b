"""UCI regression: small tables, random splits, one hidden layer.

Question: how well does a posterior over a small network predict a number, and does it know its own error?

Protocol: 20 random splits (5 of protein, 10 of airfoil and bike) into 90% training and 10% test rows; of the
training rows the last 10% are set aside for validation. One fit per split of a network with one hidden layer
of 50 units (100 for protein), ReLU, prior N(0, 1). Inputs and target are standardised by the rows that are
trained on; the standard deviation of the observation noise is learned along with each fit, or given by the
network for every input (`--task.noise heteroscedastic`). Test log likelihood and RMSE are in the own unit of
the target: means over the splits with their standard errors. CRPS, intervals and PIT values are of the rows
of all splits.

Source: Farquhar 2022, thesis "Understanding Approximation" (docs/sources.md), section 4.3 (Table 4.2);
Hernandez-Lobato and Adams 2015 for sets, splits and networks.

What would mislead: the log likelihood of standardised targets, which is larger by the log of their standard
deviation; a noise that is not learned, which decides the log likelihood whatever the posterior; the RMSE
alone, at which a single network is as good; the table bike, whose target is a function of two of its inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch.utils.data import TensorDataset

from bench import networks, priors, tables
from bench.contract import (
    Arrays,
    Budget,
    Comparison,
    Engine,
    FinishedRun,
    Layout,
    Metric,
    Metrics,
    Problem,
    Row,
    Spec,
    Task,
    Undefined,
)
from bench.data import array_digest
from bench.errors import UsageError
from bench.intervals import standard_error
from bench.predictions import Gaussian
from bench.settings import Count, settings
from bench.spec import PREDICTED
from bench.studies import forecasts, normals, published_splits
from bench.studies.small import split_rows

NAMES: dict[str, dict[str, object]] = {
    "uci_airfoil": {"dataset": "airfoil"},
    "uci_bike": {"dataset": "bike"},
    "uci_boston": {"dataset": "boston"},
    "uci_concrete": {"dataset": "concrete"},
    "uci_energy": {"dataset": "energy"},
    "uci_kin8nm": {"dataset": "kin8nm"},
    "uci_naval": {"dataset": "naval"},
    "uci_power_plant": {"dataset": "power_plant"},
    "uci_protein": {"dataset": "protein"},
    "uci_wine": {"dataset": "wine"},
    "uci_yacht": {"dataset": "yacht"},
    "diabetes_regression": {"dataset": "diabetes"},
}

PRIOR = priors.normal(0, 1)
"""One for all splits: fits that share their prior can be trained side by side."""

PRESETS: dict[str, dict[str, object]] = {
    "smoke": {"splits": 2, "epochs": 2, "batch_size": 512, "test_samples": 4}
}


@settings
class Settings:
    """Settings of UCI regression."""

    dataset: Literal[
        "airfoil",
        "bike",
        "boston",
        "concrete",
        "energy",
        "kin8nm",
        "naval",
        "power_plant",
        "protein",
        "wine",
        "yacht",
        "diabetes",
    ]
    """Table: fixed by the task's name."""
    splits: Count | None = None
    """Splits, at least 1; null is 20, for protein 5, for airfoil and bike 10."""
    published_splits: bool = False
    """Take the public split files that lie beside the table instead of our own permutations."""
    hidden: Count | None = None
    """Units of the hidden layer, at least 1; null is 50, for protein 100."""
    epochs: Count | None = None
    """Epochs per split, at least 1; null is 200 for tables of fewer than 2,000 rows, else 40."""
    batch_size: Count | None = 32
    """Examples per training step, at least 1; null is full batch."""
    noise: normals.Noise = "learned"
    """Standard deviation of the noise: learned is one for all rows, heteroscedastic one per input, which the
    network gives as a second output."""
    test_samples: Count = 80
    """Weight samples S per prediction, at least 1; all are stored, and 80 of the largest table fit 8 MB."""


class Standardised(NamedTuple):
    """One split, standardised: inputs `[n, D]`, targets `[n, 1]`; `centre` and `scale` are the target's."""

    train: TensorDataset
    val: TensorDataset
    test_inputs: torch.Tensor
    centre: float
    scale: float


class UCIRegression(Task):
    """Random splits of a table."""

    settings_class = Settings
    settings: Settings

    @property
    def spec(self) -> Spec:
        """What is measured."""
        unit = self.source.unit
        return Spec(
            question="How well does the posterior predict a number, and does it know its own error?",
            source="Farquhar 2022, section 4.3",
            version=2,
            metrics={
                "log_likelihood": Metric(
                    f"log density (per {unit}) of a test target, mean over splits", "nats", np.inf, -np.inf
                ),
                "log_likelihood_standard_error": Metric(
                    "its standard error over splits", "nats", 0, np.inf, may_be_undefined=True
                ),
                "rmse": Metric("root mean squared error of the mean, mean over splits", unit, 0, np.inf),
                "rmse_standard_error": Metric(
                    "its standard error over splits", unit, 0, np.inf, may_be_undefined=True
                ),
                **forecasts.measures(unit),
            },
            main_metric="log_likelihood",
            min_seeds=1,  # the splits are the repetitions
            validation_metric="log_likelihood",
            split_ratio=1 / 9,
            baseline="map",
            reference="deep_ensemble",
        )

    # ---- data

    @cached_property
    def table(self) -> tables.Table:
        """The table, read once."""
        return tables.load(self.settings.dataset, self.data_dir)

    @property
    def num_splits(self) -> int:
        """Splits of a run."""
        return self.settings.splits or self.source.splits

    @property
    def source(self) -> tables.TableSource:
        """What is known of the table without reading it."""
        return tables.SOURCES[self.settings.dataset]

    @cached_property
    def splits(self) -> Sequence[tables.Split]:
        """Row numbers of the training and the test part of every split, or of every public one."""
        if not self.settings.published_splits:
            return [split_rows(len(self.table.targets), split) for split in range(self.num_splits)]
        published = self.table.published
        if len(published) < self.num_splits:
            raise UsageError(
                f"--task.published_splits true: {len(published)} public splits lie beside the table "
                f"{self.settings.dataset} and {self.num_splits} are asked for; put the public files "
                "index_train_*.txt and index_test_*.txt there, or leave it false for our own splits"
            )
        return published

    def rows(self, split: int) -> tables.Split:
        """Row numbers of the training and the test part of a split."""
        return self.splits[split]

    @property
    def is_ragged(self) -> bool:
        """Whether the splits are folds, some of which have a row more than others."""
        return self.settings.published_splits and self.source.masks

    @cached_property
    def most_tested(self) -> int:
        """Test rows of the largest split."""
        return max(len(test) for _, test in self.splits)

    def data_digest(self) -> str:
        """Digest of the table and of the rows of every split, training rows first."""
        order = np.stack([np.concatenate(self.rows(k)) for k in range(self.num_splits)])
        return array_digest({"inputs": self.table.inputs, "targets": self.table.targets, "splits": order})

    def trained_on(self, split: int) -> tuple[np.ndarray, np.ndarray]:
        """Row numbers of training and validation, the last 10% of the training part.

        A row more than in other splits is one of validation: all fits have as many rows, and can be stacked.
        """
        least = len(self.table.targets) - self.most_tested
        train, val = np.split(self.rows(split)[0], [least - least // 10])
        return train, val

    def standardised(self, split: int) -> Standardised:
        """The data of a split."""
        (train, val), test = self.trained_on(split), self.rows(split)[1]
        inputs, targets = self.table.inputs, self.table.targets
        mean, std = inputs[train].mean(0), inputs[train].std(0)
        std[np.ptp(inputs[train], 0) == 0] = 1  # two inputs of naval never change
        centre, scale = self.units(split)

        def standard_inputs(rows: np.ndarray) -> torch.Tensor:
            return torch.from_numpy((inputs[rows] - mean) / std).float()

        def examples(rows: np.ndarray) -> TensorDataset:
            standard_targets = torch.from_numpy((targets[rows] - centre) / scale).float()
            return TensorDataset(standard_inputs(rows), standard_targets[:, None])

        return Standardised(examples(train), examples(val), standard_inputs(test), centre, scale)

    def units(self, split: int) -> tuple[float, float]:
        """Mean and standard deviation of the targets that a split trains on."""
        targets = self.table.targets[self.trained_on(split)[0]]
        return float(targets.mean()), float(targets.std())

    def padded(self, rows: np.ndarray) -> np.ndarray:
        """What is of the test rows of a split `[..., n]`, as long as the largest: its last entry repeated."""
        missing = self.most_tested - rows.shape[-1] if rows.shape[-1] > 1 else 0
        return np.pad(rows, [*[(0, 0)] * (rows.ndim - 1), (0, missing)], "edge")

    # ---- protocol

    def problem(self, split: int = 0) -> Problem:
        """The problem of a split."""
        own = self.standardised(split)
        units = self.settings.hidden or (100 if self.settings.dataset == "protein" else 50)
        outputs, likelihood = normals.posed(self.settings.noise)
        network = partial(networks.mlp, own.test_inputs.shape[1], outputs, (units,))
        return Problem(network, likelihood, PRIOR, own.train, own.val, len(own.train))

    def run(self, engine: Engine) -> Arrays:
        """Predictive mixtures on the test rows of every split, for standardised targets."""
        number = self.num_splits
        epochs = self.settings.epochs or (200 if len(self.table.targets) < 2000 else 40)
        budget = Budget(epochs, self.settings.batch_size)
        means, variances, validation = [], [], []
        stages = [f"split {k + 1}" for k in range(number)]
        for k, method in enumerate(engine.fit_stages(stages, self.problem, budget)):
            own = self.standardised(k)
            inputs = torch.cat([own.test_inputs, own.val.tensors[0]])
            prediction = engine.predict(method, inputs, self.settings.test_samples)
            assert isinstance(prediction, Gaussian)
            rows = len(own.test_inputs)
            mean, variance = prediction.mean[:, :rows, 0], prediction.variance[:, :rows, 0]
            held_out = Gaussian(prediction.mean[:, rows:], prediction.variance[:, rows:])
            score = held_out.log_score(own.val.tensors[1]).mean() - np.log(own.scale)
            validation.append(float(score))
            engine.log("log_likelihood", float(np.mean(validation)), k + 1)  # of the splits so far
            kept = [self.padded(array) for array in normals.stored(mean, variance)]
            means.append(kept[0])
            variances.append(kept[1])
        return {"mean": np.stack(means), "variance": normals.without_repeats(np.stack(variances))}

    def targets(self) -> Arrays:
        """Test targets `[K, N]` in their own unit, K splits of N rows; of smaller ones the last again."""
        of = [self.padded(self.table.targets[self.rows(k)[1]]) for k in range(self.num_splits)]
        return {"targets": np.stack(of)}

    def given(self) -> Arrays:
        """Mean and standard deviation by which each split is standardised `[K, 2]`; rows of folds `[K]`.

        Unequal splits are kept as long as the largest, and `sizes` says how much of each counts.
        """
        units = {"centre_and_scale": np.array([self.units(k) for k in range(self.num_splits)])}
        if not self.is_ragged:
            return units
        return units | {"sizes": np.array([len(self.rows(k)[1]) for k in range(self.num_splits)])}

    def layouts(self) -> dict[str, Layout]:
        """Mixtures of S normals for N test rows of K splits, standardised as said beside them, and targets.

        S is 1 of a method without spread and grows with the members of an ensemble.
        """
        k, rows = self.num_splits, self.source.rows
        n = -(-rows // self.source.splits) if self.is_ragged else rows - round(0.9 * rows)
        found = {
            "mean": Layout(PREDICTED, (k, "S", n)),
            "variance": Layout("float32", (k, ("S", 1), (n, 1))),
            "centre_and_scale": Layout("float64", (k, 2)),
            "targets": Layout("float64", (k, n)),
        }
        return found | ({"sizes": Layout("int64", (k,))} if self.is_ragged else {})

    # ---- scoring

    @staticmethod
    def tested(arrays: Arrays) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Mean and standard deviation of the mixtures `[S, n]` and targets `[n]` of each split's n rows."""
        (mean, sigma), targets = normals.mixtures(arrays), arrays["targets"]
        sizes = arrays.get("sizes", [targets.shape[1]] * len(targets))
        return [(mean[k, :, :size], sigma[k, :, :size], targets[k, :size]) for k, size in enumerate(sizes)]

    @classmethod
    def per_split(cls, arrays: Arrays) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Log likelihood `[K]`, RMSE `[K]`, and predictive distribution function at all targets `[R]`."""
        splits = cls.tested(arrays)
        log_likelihood = [normals.log_density(*split).mean() for split in splits]
        rmse = [np.sqrt(((mean.mean(0) - targets) ** 2).mean()) for mean, _, targets in splits]
        below = [normals.below(*split) for split in splits]
        return np.array(log_likelihood), np.array(rmse), np.concatenate(below)

    def score(self, arrays: Arrays) -> Metrics:
        """Means over the splits with their standard errors, and scores of the rows of all splits."""
        log_likelihood, rmse, _ = self.per_split(arrays)
        splits = [(mean, np.broadcast_to(sd, mean.shape), of) for mean, sd, of in self.tested(arrays)]
        return {
            "log_likelihood": float(log_likelihood.mean()),
            "log_likelihood_standard_error": _standard_error(log_likelihood),
            "rmse": float(rmse.mean()),
            "rmse_standard_error": _standard_error(rmse),
            **forecasts.measured(*(np.concatenate(part, -1) for part in zip(*splits, strict=True))),
        }

    def losses(self, arrays: Arrays) -> np.ndarray:
        """Log likelihood of each split in nats, `[K]`; the splits overlap."""
        return self.per_split(arrays)[0]

    def curves(self, arrays: Arrays) -> list[Row]:
        """Scores and noise of every split; the coverage of central intervals by their level in percent."""
        log_likelihood, rmse, below = self.per_split(arrays)
        noise = np.array([np.sqrt((sigma**2).mean()) for _, sigma, _ in self.tested(arrays)])
        per_split = {"log_likelihood": log_likelihood, "rmse": rmse, "noise": noise}
        rows = [
            Row(name, "test", k, float(value))
            for name, values in per_split.items()
            for k, value in enumerate(values, 1)
        ]
        return rows + normals.coverage_rows(below)

    def figures(self, arrays: Arrays) -> dict[str, Any]:
        """Coverage of the central intervals against their level, and the PIT histogram."""
        below = self.per_split(arrays)[2]
        return {"coverage": normals.coverage_chart(self.curves(arrays)), "pit": forecasts.chart(below)}

    @classmethod
    def compare(cls, runs: Sequence[FinishedRun]) -> Comparison:
        """All metrics; on the published splits also each method less the published MC dropout."""
        found = super().compare(runs)
        return replace(found, sentences=[*found.sentences, *published_splits.sentences(runs)])


def _standard_error(values: np.ndarray) -> float | Undefined:
    return standard_error(values) if len(values) > 1 else Undefined("one split has no standard error")
