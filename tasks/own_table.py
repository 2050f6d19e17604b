"""Own table: which posterior predicts the rows of your own file best?

Question: of several posteriors over one small network, which predicts held-out rows of a user's table best,
and which knows its own error?

Protocol: a file with a line of names, one column of which is the target. 20% of the rows are held out: at
random (of classes the same share each), by whole groups, or as a column says. Columns are encoded by what
scikit-learn's transformers learn from the training rows alone (`bench.encoding`); a numeric target is
standardised by them, and scores are in its own unit. One fit per run of a network with one hidden layer of 50
units, ReLU, prior N(0, 1); of a numeric target the standard deviation of the noise is learned along, or given
by the network for every row (`--task.noise heteroscedastic`). `--seed` moves the fit, `--task.split` the
held-out rows: runs of several seeds share their held-out rows, so that `bench compare` pairs them.

Source: Hernandez-Lobato and Adams 2015 for network and standardisation; the table is the user's.

What would mislead: one split of a small table, since another may turn the order around (`--task.split 1`);
rows of one customer, patient or day on both sides of a random split, which `--task.group` keeps together;
settings of methods that nobody tuned for the table.
"""

from __future__ import annotations

import json
import math
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import TensorDataset

from bench import encoding, metrics, networks, own_network, priors
from bench.cells import read, text
from bench.contract import (
    Arrays,
    Budget,
    Engine,
    Method,
    Metric,
    Metrics,
    NetworkFactory,
    Problem,
    Row,
    Spec,
    Task,
    Undefined,
)
from bench.data import array_digest
from bench.encoding import Column, Encoder
from bench.errors import UsageError
from bench.predictions import Categorical, Gaussian, Prediction
from bench.settings import Code, Count, Whole, settings
from bench.studies import conformal, normals, own, trying
from bench.text import one_line

NAMES: dict[str, dict[str, object]] = {"own_table": {}}

PRESETS: dict[str, dict[str, object]] = {"smoke": {"epochs": 2, "test_samples": 4}}

FEWEST_TRAINED, FEWEST_TESTED = 10, 3
NOTHING: dict[encoding.Kind, str] = {
    "regression": "the target is a number",
    "classification": "the target is a class",
}


@settings
class Settings:
    """Settings of a table of one's own."""

    file: str | None = None
    """The table: CSV with a first line of names, or .parquet; must be given."""
    target: str | None = None
    """The column to predict; must be given."""
    kind: Literal["regression", "classification"] | None = None
    """Of the target; null guesses it from the column, and the run says so."""
    split: Whole = 0
    """Seed of the random rows that are held out, 0 or more; --seed does not move them."""
    split_column: str | None = None
    """A column that says train or test of every row, in place of a random split; it is no input."""
    group: str | None = None
    """A column whose equal values stay together, all trained on or all held out; it is no input."""
    hidden: Count = 50
    """Units of the hidden layer, at least 1."""
    network: Code | None = None
    """Your own: package.module:factory, called with the shape of an input and the number of outputs."""
    freeze: bool = False
    """Of your own network: train only its last layer with weights; the rest is no part of the posterior."""
    noise: normals.Noise = "learned"
    """Standard deviation of a number's noise: learned is one for all rows, heteroscedastic one per row, which
    the network gives as a second output."""
    epochs: Count | None = None
    """Epochs, at least 1; null is 200 for fewer than 2,000 training rows, else 40."""
    batch_size: Count | None = 32
    """Examples per training step, at least 1; null is full batch."""
    test_samples: Count = 80
    """Weight samples S per prediction, at least 1."""


class OwnTable(Task):
    """Held-out rows of a user's table."""

    settings_class = Settings
    settings: Settings

    @property
    def spec(self) -> Spec:
        """What is measured; which of it is defined, the target decides."""
        unit = self.settings.target or "target"
        of_numbers = {
            "rmse": Metric("root mean squared error of the mean", unit, 0, np.inf, may_be_undefined=True),
            "coverage_error": Metric(
                "distance from 0.9 of the share of test targets in the central 90% interval",
                "fraction",
                0,
                1,
                may_be_undefined=True,
            ),
        }
        return Spec(
            question="Which posterior predicts the rows of one's own table best?",
            source="the user's table",
            version=1,
            metrics={
                "nll": Metric(
                    f"mean of -log p(test target); of a number its density per {unit}",
                    "nats",
                    -np.inf,
                    np.inf,
                ),
                **of_numbers,
                **own.undefinable(own.OF_CLASSES),
            },
            main_metric="nll",
            ranked=False,
            own_data=True,
        )

    # ---- data

    @cached_property
    def columns(self) -> dict[str, Column]:
        """The columns that are used, judged, without rows that have no target."""
        given = self.settings
        if given.file is None or given.target is None:
            raise UsageError("own_table needs a table: --task.file FILE.csv --task.target COLUMN")
        path = Path(given.file)
        table = read(path)
        for flag, name in (
            ("target", given.target),
            ("split_column", given.split_column),
            ("group", given.group),
        ):
            if name is not None and name not in table:
                names = ", ".join(one_line(each) for each in list(table)[:20])
                raise UsageError(f"--task.{flag} {name}: {path} has no such column; it has {names}")
        kept = [row for row, cell in enumerate(table[given.target]) if text(cell) is not None]
        if len(kept) < own.FEWEST:
            raise UsageError(
                f"{path}: {len(kept)} rows with a target are too few to learn and to test: at least "
                f"{own.FEWEST} are needed"
            )
        self.left_out = len(table[given.target]) - len(kept)
        beside = (given.split_column, given.group)
        return {
            name: encoding.column(path, name, [table[name][row] for row in kept], name in beside)
            for name in table
        }

    @cached_property
    def kind(self) -> encoding.Kind:
        """Whether the target is a number or a class."""
        target = self.target_column
        name, path = one_line(target.name), self.settings.file
        kind = self.settings.kind or encoding.guessed(target)[0]
        if kind == "regression" and not target.is_number:
            raise UsageError(f"--task.kind regression: the target '{name}' holds texts, which are no numbers")
        counts = Counter(self.labels if kind == "classification" else target.values)
        if len(counts) < 2:
            raise UsageError(
                f"{path}: the target '{name}' is {one_line(self.labels[0])} in all rows: there is "
                "nothing to learn"
            )
        if kind == "classification":
            alone = [value for value in encoding.classes(self.labels) if counts[value] == 1]
            otherwise = "; --task.kind regression takes the target as a number" if target.is_number else ""
            if alone:
                raise UsageError(
                    f"{path}: the class {one_line(alone[0])} of the target '{name}' is in "
                    "only one row, which cannot be both learned and tested: take the row out, or put it in "
                    f"another class{otherwise}"
                )
        return kind

    @property
    def target_column(self) -> Column:
        """The target."""
        return self.columns[self.settings.target or ""]

    @cached_property
    def labels(self) -> list[str]:
        """Of each row the name of its class, if the target is taken for classes, `[N]`."""
        return encoding.identities(self.target_column)

    @cached_property
    def inputs(self) -> list[Column]:
        """The columns that the network sees."""
        beside = {self.settings.target, self.settings.split_column, self.settings.group}
        found = [column for name, column in self.columns.items() if name not in beside]
        if not found:
            raise UsageError(f"{self.settings.file}: holds no column but the target to learn from")
        return found

    @cached_property
    def rows(self) -> dict[str, np.ndarray]:
        """Numbers of the rows of train and test, ascending."""
        kind, labels = self.kind, np.array(self.labels, object)
        if self.settings.split_column is not None and self.settings.group is not None:
            raise UsageError("--task.group and --task.split_column: a column says it all, give one of them")
        if self.settings.split_column is not None:
            is_test = self._as_said(self.columns[self.settings.split_column])
        elif self.settings.group is not None:
            is_test = self._whole_groups(self.columns[self.settings.group])
        else:
            strata = labels if kind == "classification" else np.zeros(len(labels))
            is_test = own.at_random(strata, self.settings.split)
        found = {"train": np.flatnonzero(~is_test), "test": np.flatnonzero(is_test)}
        for part, fewest in (("train", FEWEST_TRAINED), ("test", FEWEST_TESTED)):
            if len(found[part]) < fewest:
                raise UsageError(
                    f"{self.settings.file}: {len(found[part])} rows to {part}: at least {fewest} are needed"
                )
        if kind == "classification" and (new := set(labels[is_test]) - set(labels[~is_test])):
            raise UsageError(
                f"{self.settings.file}: the class {one_line(encoding.classes(new)[0])} is in test rows "
                "alone: nothing could have learned it; split otherwise"
            )
        return found

    def _as_said(self, column: Column) -> np.ndarray:
        if wrong := [value for value in column.values if value not in ("train", "test")]:
            raise UsageError(
                f"--task.split_column {column.name}: every row must say train or test, and one says "
                f"'{'' if wrong[0] is None else one_line(wrong[0])}'"
            )
        return np.array([value == "test" for value in column.values])

    def _whole_groups(self, column: Column) -> np.ndarray:
        """Groups in random order, of which the first are held out, up to the share of test rows."""
        if None in column.values:
            raise UsageError(f"--task.group {column.name}: row {column.values.index(None) + 1} has no group")
        groups, of_row = np.unique(np.array(column.values), return_inverse=True)
        if len(groups) < 2:
            raise UsageError(f"--task.group {column.name}: all rows are of one group, which cannot be parted")
        order = own.permutation(len(groups), self.settings.split)
        rows_so_far = np.bincount(of_row)[order].cumsum()
        number = max(1, np.searchsorted(rows_so_far, own.TEST_SHARE * len(of_row), side="right"))
        return np.isin(of_row, order[: min(number, len(groups) - 1)])

    @cached_property
    def encoder(self) -> Encoder:
        """What the training rows teach."""
        return encoding.fit(self.inputs, self.target_column, self.kind, self.rows["train"])

    def own_data(self, part: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Encoded inputs `[N, D]` and targets of the part train or test.

        Targets are classes `[N]`; or numbers, standardised `[N, 1]` to train and as they are `[N]` to test.
        """
        rows, target = self.rows[part], self.encoder.target
        values = {c.name: [c.values[row] for row in rows] for c in self.inputs}
        inputs = torch.from_numpy(self.encoder.encode(values)).float()
        if self.kind == "classification":
            index = {name: number for number, name in enumerate(target.classes)}
            return inputs, torch.tensor([index[self.labels[row]] for row in rows])
        numbers = np.array([self.target_column.values[row] for row in rows], np.float64)
        if part == "test":
            target.refuse_far(numbers)
            return inputs, torch.from_numpy(numbers)
        return inputs, torch.from_numpy((numbers - target.mean) / target.scale).float()[:, None]

    def data_digest(self) -> str:
        """Of all rows as they are encoded, parted into train and test: of the content, not of the path.

        Of one's own network its file too.
        """
        parts = {part: self.own_data(part) for part in ("train", "test")}
        arrays = {f"{part}{i}": array for part, found in parts.items() for i, array in enumerate(found)}
        learned = np.frombuffer(self.encoder.model_dump_json().encode(), np.uint8)
        return array_digest(arrays | {"encoder": learned} | self._own_network()[0])

    def _own_network(self) -> tuple[Arrays, list[str]]:
        """What decides which network one's own is, and sentences on it; it is tried out."""
        name, freeze = self.settings.network, self.settings.freeze
        if name is None:
            if freeze:
                raise UsageError("--task.freeze true: is of a network of your own: --task.network")
            return {}, []
        problem = self.problem()
        outputs, _ = own.posed(self.encoder.target.classes, self.settings.noise)
        return trying.network(problem.network, name, self.own_data("train")[0], outputs)

    # ---- protocol

    def problem(self) -> Problem:
        """The training rows."""
        train = TensorDataset(*self.own_data("train"))
        return self._posed(train, len(train), self.encoder.target)

    def _posed(self, train: TensorDataset, number: int, target: encoding.Target) -> Problem:
        width, (outputs, likelihood) = (
            train.tensors[0].shape[1],
            own.posed(target.classes, self.settings.noise),
        )
        network: NetworkFactory
        if self.settings.network is None:
            network = partial(networks.mlp, width, outputs, (self.settings.hidden,))
        else:
            network = partial(
                own_network.network, self.settings.network, (width,), outputs, self.settings.freeze
            )
        return Problem(network, likelihood, priors.normal(0, 1), train, None, number)

    def loaded(self, directory: Path, restore: Callable[[Problem], Method]) -> Any:
        """What predicts new rows; needs the run alone, and not the table."""
        encoder = own.read_encoder(directory, Encoder)
        inputs = torch.zeros(1, encoder.width)
        target = torch.zeros(1, dtype=torch.long) if encoder.target.classes else torch.zeros(1, 1)
        method = restore(self._posed(TensorDataset(inputs, target), encoder.rows, encoder.target))
        return Predictor(method, encoder, own.held_out(directory))

    def run(self, engine: Engine) -> Arrays:
        """Predictions on the held-out rows."""
        problem = self.problem()
        engine.stage("fit")
        epochs = self.settings.epochs or (200 if problem.num_train < 2000 else 40)
        method = engine.fit(problem, Budget(epochs, self.settings.batch_size))
        prediction = engine.predict(method, self.own_data("test")[0], self.settings.test_samples)
        if not isinstance(prediction, Gaussian):
            return {"log_probs": metrics.store(prediction.average())}
        mean, variance = normals.stored(prediction.mean[..., 0], prediction.variance[..., 0])
        target = self.encoder.target
        return {
            "mean": mean,
            "variance": normals.without_repeats(variance),
            "centre_and_scale": np.array([target.mean, target.scale]),
            "inputs": self.own_data("test")[0].numpy(),  # conformal intervals are calibrated on them
        }

    def targets(self) -> Arrays:
        """Targets `[N]` of the held-out rows: numbers in their own unit, or classes as `labels`."""
        return {"targets" if self.kind == "regression" else "labels": self.own_data("test")[1].numpy()}

    def notes(self) -> Mapping[str, str]:
        """The encoder, and how columns and rows were used."""
        given, target, rows = self.settings, self.encoder.target, self.rows
        how = f"--task.split {given.split}"
        if given.split_column or given.group:
            how = f"by {given.split_column or given.group}" + (f", {how}" if given.group else "")
        said = [
            f"{given.file}: {len(rows['train'])} rows trained on, {len(rows['test'])} held out ({how})"
            + (f", {self.left_out} left out, since they have no target" if self.left_out else "")
        ]
        kind, why = encoding.guessed(self.target_column)
        guess = "" if given.kind else f", guessed from {why}; --task.kind says otherwise"
        learned = f"mean {target.mean:.4g}, sd {target.scale:.4g} of the training rows"
        if target.classes:
            shares = np.bincount(self.own_data("train")[1].numpy()) / len(rows["train"])
            largest = one_line(target.classes[shares.argmax()])
            learned = f"{len(target.classes)} classes, the commonest {largest} in {shares.max():.0%}"
        said.append(f"target {one_line(target.name)}: {given.kind or kind}, {learned}{guess}")
        said += encoding.sentences(self.encoder, self.inputs, rows["train"]) + self._own_network()[1]
        said.append(
            "next: run further methods and seeds (bench sweep), then bench compare their folder; "
            'bench.load("this directory").predict("new.csv") predicts new rows'
        )
        return {
            own.ENCODER: json.dumps(self.encoder.model_dump(), indent=1) + "\n",
            "notes.txt": "\n".join(said) + "\n",
        }

    # ---- scoring

    def score(self, arrays: Arrays) -> Metrics:
        """NLL, and what the kind of target has beside it."""
        nll = float(self.losses(arrays).mean())
        of_numbers: Metrics = dict.fromkeys(("rmse", "coverage_error"), Undefined(NOTHING["classification"]))
        of_classes: Metrics = dict.fromkeys(own.OF_CLASSES, Undefined(NOTHING["regression"]))
        if "labels" in arrays:
            of_classes = {**own.of_classes(arrays)}
        else:
            (mean, sigma), targets = normals.mixtures(arrays), arrays["targets"]
            below = normals.below(mean, sigma, targets)
            of_numbers = {
                "rmse": float(np.sqrt(((mean.mean(0) - targets) ** 2).mean())),
                "coverage_error": abs(normals.coverage(below, 0.9) - 0.9),
            }
        return {"nll": nll, **of_numbers, **of_classes}

    def losses(self, arrays: Arrays) -> np.ndarray:
        """-log p of each held-out target, in nats, `[N]`."""
        if "labels" in arrays:
            return own.losses(arrays)
        return -normals.log_density(*normals.mixtures(arrays), arrays["targets"])

    def curves(self, arrays: Arrays) -> list[Row]:
        """Of a number: the coverage of central intervals by their level in percent."""
        if "labels" in arrays:
            return []
        return normals.coverage_rows(normals.below(*normals.mixtures(arrays), arrays["targets"]))

    def figures(self, arrays: Arrays) -> dict[str, Any]:
        """Of a number: coverage of the central intervals against their level."""
        rows = self.curves(arrays)
        return {"coverage": normals.coverage_chart(rows)} if rows else {}

    def remarks(self, arrays: Arrays) -> list[str]:
        """Of a number: coverage of the 90% intervals by quarters of the predicted width."""
        return [] if "labels" in arrays else normals.remarks(arrays)


class Predictor:
    """A fitted posterior with the encoder of its training rows: predicts new rows in the target's own terms.

    Attributes:
        method: The fitted method.
        encoder: What was learned from the training rows.
        held_out: Encoded inputs `[n, D]` and targets `[n]` of rows that neither training nor early stopping
            saw, by which intervals are calibrated; None of classes, and of runs from before.
    """

    def __init__(
        self, method: Method, encoder: Encoder, held_out: tuple[np.ndarray, np.ndarray] | None = None
    ) -> None:
        self.method, self.encoder, self.held_out = method, encoder, held_out

    def predict(self, rows: Any, num_samples: int = 200, seed: int = 0) -> list[dict[str, Any]]:
        """Predictions of new rows, a dictionary each, in their order.

        A missing value is encoded as one of the training rows, a category that they do not have as none of
        theirs; further columns, such as the target, are not looked at.

        Args:
            rows: The path of a CSV or Parquet file, a data frame of pandas or polars, a structured array of
                numpy, or rows: dictionaries from column to value, Series or named tuples. One row means the
                same in all of these forms (`bench.cells`).
            num_samples: Weight samples S that are averaged, at least 1.
            seed: Of the samples.

        Returns:
            Of a number `mean`, `sd`, and `low` and `high`, the central 90% interval, in the target's unit. Of
            classes `class`, the most probable one, and `probabilities` by class.

        Raises:
            UsageError: If a column is missing in a row, a number is none, or a value may be one of several
                categories; one line that names it.
        """
        prediction = self._prediction(self._encoded(rows), num_samples, seed)
        if isinstance(prediction, Categorical):
            return own.told(prediction, self.encoder.target.classes)
        mean, sigma = self._mixtures(prediction)
        sd = np.sqrt((sigma**2).mean(0) + mean.var(0))
        low, high = (normals.quantiles(mean, sigma, p) for p in (0.05, 0.95))
        names = ("mean", "sd", "low", "high")
        return [
            dict(zip(names, map(float, row), strict=True))
            for row in zip(mean.mean(0), sd, low, high, strict=True)
        ]

    def interval(
        self,
        rows: Any,
        level: float = 0.9,
        kind: Literal["posterior", "residual", "quantile"] = "posterior",
        num_samples: int = 200,
        seed: int = 0,
    ) -> np.ndarray:
        """Intervals of new rows' targets, low and high `[B, 2]`, in the target's unit.

        `posterior`: the central interval of the prediction, right as far as the model is. The others are
        conformal (`bench.studies.conformal`): whatever the model, they hold a new row's target with a
        probability of at least `level`, averaged over rows, if new rows are exchangeable with the run's
        held-out ones. That they are not where rows come in groups, or later. `residual` has one width around
        the mean; `quantile` widens or narrows the posterior's intervals by one number, and so keeps how they
        differ in width.

        Args:
            rows: As `predict` takes them.
            level: Probability that is promised, above 0 and below 1.
            kind: Of interval.
            num_samples: Weight samples S that are averaged, at least 1.
            seed: Of the samples.

        Raises:
            UsageError: If the target is a class, the level is no probability, or the run has too few held-out
                rows for it; and as `predict`.
        """
        if self.encoder.target.classes:
            raise UsageError("interval: the target is a class, which has none; predict gives probabilities")
        if kind not in ("posterior", "residual", "quantile"):
            raise UsageError(f"interval: kind {kind!r} must be posterior, residual or quantile")
        if not 0 < level < 1:
            raise UsageError(f"interval: level {level!r} must be above 0 and below 1")
        given = [self._encoded(rows)]
        if kind != "posterior":
            inputs, targets = self._calibration(level)
            given.append(inputs)

        def ends(inputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            mean, sigma = self._mixtures(self._prediction(inputs, num_samples, seed))
            if kind == "residual":
                return mean.mean(0), mean.mean(0)
            low, high = (normals.quantiles(mean, sigma, (1 + sign * level) / 2) for sign in (-1, 1))
            return low, high

        (low, high), *of_held_out = map(ends, given)
        by = conformal.margin(*of_held_out[0], targets, level) if of_held_out else 0.0
        return conformal.widened(low, high, by)

    def _calibration(self, level: float) -> tuple[np.ndarray, np.ndarray]:
        if self.held_out is None:
            raise UsageError(
                "interval: the run is from before held-out rows were kept with it: run it again with "
                "--force, or take kind posterior"
            )
        number, fewest = len(self.held_out[1]), conformal.fewest(level)
        if number < fewest:
            raise UsageError(
                f"interval: level {level:g} takes at least {fewest} held-out rows, and the run has {number}: "
                "take a smaller level, or kind posterior"
            )
        return self.held_out

    def _encoded(self, rows: Any) -> np.ndarray:
        """Inputs `[B, D]`; warns of the first that is farther out than any training row can have been."""
        inputs = self.encoder.encode_rows(rows)
        # No one of n numbers is more than sqrt(n - 1) of their standard deviations from their mean.
        far = np.abs(inputs) > math.sqrt(self.encoder.rows) + 1e-6
        if far.any():
            row, place = np.argwhere(far)[0]
            warnings.warn(
                f"row {row + 1}: column '{one_line(self.encoder.names[place])}' lies "
                f"{abs(inputs[row, place]):.3g} standard deviations from the training rows' mean, outside "
                f"all of them ({far.any(1).sum()} such rows): a prediction there is a guess, and so is its "
                "interval",
                stacklevel=3,
            )
        return inputs

    def _prediction(self, inputs: np.ndarray, num_samples: int, seed: int) -> Prediction:
        """Of encoded inputs `[B, D]`; all share their draws of the weights, in any call with this seed."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            return self.method.predict(torch.from_numpy(inputs).float(), num_samples, generator)

    def _mixtures(self, prediction: Prediction) -> tuple[np.ndarray, np.ndarray]:
        """Means and standard deviations of the S normals, each `[S, B]`, in the target's unit."""
        assert isinstance(prediction, Gaussian)
        target = self.encoder.target
        mean = target.mean + target.scale * prediction.mean[..., 0].double().numpy()
        return mean, target.scale * prediction.variance[..., 0].double().sqrt().numpy()
