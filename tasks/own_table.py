"""Own table: which posterior predicts the rows of your own file best?

Question: of several posteriors over one small network, which predicts held-out rows of a user's table best,
and which knows its own error?

Protocol: a file with a line of names, one column of which is the target. 20% of the rows are held out: at
random (of classes the same share each), by whole groups, the latest, or as a column says. From 10,000 other
rows on a tenth of these is kept aside, and the fit stops when it predicts them no better. Columns are encoded
by what scikit-learn's transformers learn from the training rows alone (`bench.learning`); a numeric target is
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
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import TensorDataset

from bench import columns, encoding, learning, metrics, networks, own_network, priors
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
    Undefined,
)
from bench.data import array_digest
from bench.encoding import Encoder
from bench.errors import UsageError
from bench.predictions import Gaussian
from bench.settings import Code, Count, Share, Whole, settings
from bench.studies import conformal, exporting, forecasts, normals, own, predictive, trying
from bench.studies import own_rows as rows_of
from bench.text import one_line

NAMES: dict[str, dict[str, object]] = {"own_table": {}}

PRESETS: dict[str, dict[str, object]] = {"smoke": {"epochs": 2, "test_samples": 4}}

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
    """A column that says train, validation or test of every row, in place of a split; it is no input."""
    group: str | None = None
    """A column whose equal values stay together, all trained on or all held out; it is no input."""
    time: str | None = None
    """A column of numbers or dates: the latest rows are held out; an input only if --task.dates names it."""
    drop: str | None = None
    """Columns that are left out, with commas between them."""
    categorical: str | None = None
    """Columns that are of categories, with commas between them: codes, or more texts than 50."""
    dates: str | None = None
    """Columns of dates, with commas between them, of which calendar parts become inputs."""
    text: str | None = None
    """Columns of free text, with commas between them, which --task.text_encoder turns into inputs."""
    text_encoder: str | None = None
    """Folder of a BERT, as sentence-transformers writes it: config.json, vocab.txt, model.safetensors."""
    decimal: Literal[".", ","] = "."
    """The mark in numbers that are written as text."""
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
    """Epochs, at least 1; null is 200 below 2,000 rows not held out, 40 below 10,000, then at most 100."""
    batch_size: Count | Literal["auto"] | None = "auto"
    """Examples per training step, at least 1; null is full batch, auto 32 and more from 10,000 rows on."""
    validation: Share | None = None
    """Share of the rows not held out that is kept aside to stop by; null is 0, or 0.1 from 10,000 rows on."""
    patience: Count | None = None
    """Epochs without a better validation NLL that end a fit; null is no end, or 5 from 10,000 rows on."""
    test_samples: Count = 80
    """Weight samples S per prediction, at least 1."""


class OwnTable(rows_of.TableTask):
    """Held-out rows of a user's table."""

    settings_class = Settings
    tuned_with = {"validation": 0.2}
    settings: Settings
    weights: np.ndarray | None = None
    """Of the training rows, above 0: they multiply the log likelihood; None is 1 each."""

    @property
    def spec(self) -> Spec:
        """What is measured; which of it is defined, the target decides."""
        unit = self.settings.target or "target"
        of_numbers = {
            "rmse": Metric("root mean squared error of the mean", unit, 0, np.inf),
            **forecasts.measures(unit),
        }
        return Spec(
            question="Which posterior predicts the rows of one's own table best?",
            source="the user's table",
            version=2,
            metrics={
                "nll": Metric(
                    f"mean of -log p(test target); of a number its density per {unit}",
                    "nats",
                    -np.inf,
                    np.inf,
                ),
                **own.undefinable(of_numbers),
                **own.undefinable(own.OF_CLASSES),
            },
            main_metric="nll",
            validation_metric="nll" if self.settings.validation else None,
            ranked=False,
            own_data=True,
        )

    # ---- data

    @cached_property
    def encoder(self) -> Encoder:
        """What the training rows teach."""
        texts_by = self.settings.text_encoder or ""
        train = self.rows["train"]
        return learning.fit(self.inputs, self.target_column, self.kind, train, self.weights, texts_by)

    @cached_property
    def _encoded(self) -> dict[str, np.ndarray]:
        """Inputs `[N, D]` of train, val and test."""
        found = {
            "train": learning.of_training(
                self.encoder, self.inputs, self.target_column, self.rows["train"], self.weights
            )
        }
        for part in ("val", "test"):
            values = {c.name: [c.values[row] for row in self.rows[part]] for c in self.inputs}
            found[part] = self.encoder.encode(values)
        return found

    def own_data(self, part: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Encoded inputs `[N, D]` and targets of the part train, val or test.

        Targets are classes `[N]`; or numbers, standardised `[N, 1]`, those to test as they are `[N]`.
        """
        rows, target = self.rows[part], self.encoder.target
        inputs = torch.from_numpy(self._encoded[part]).float()
        if self.kind == "classification":
            index = {name: number for number, name in enumerate(target.classes)}
            return inputs, torch.tensor([index[self.labels[row]] for row in rows], dtype=torch.long)
        numbers = np.array([self.target_column.values[row] for row in rows], np.float64)
        target.refuse_far(numbers)
        if part == "test":
            return inputs, torch.from_numpy(numbers)
        return inputs, torch.from_numpy((numbers - target.mean) / target.scale).float()[:, None]

    def data_digest(self) -> str:
        """Of all rows as they are encoded, parted as they are used: of the content, not of the path.

        Of one's own network its file too.
        """
        arrays: dict[str, Any] = {}
        is_text = self.encoder.of_texts
        for part in (part for part, rows in self.rows.items() if len(rows)):
            inputs, targets = self.own_data(part)
            arrays |= {f"{part}0": inputs[:, ~is_text] if is_text.any() else inputs, f"{part}1": targets}
            if is_text.any():  # their vectors may differ in the last bit from machine to machine
                texts = [[c.values[row] for row in self.rows[part]] for c in self.inputs if c.is_text]
                arrays[f"{part} texts"] = np.frombuffer(json.dumps(texts).encode(), np.uint8)
        learned = np.frombuffer(self.encoder.content.encode(), np.uint8)
        return array_digest(arrays | {"encoder": learned} | _own_network(self)[0])

    # ---- protocol

    def problem(self) -> Problem:
        """The training rows, and those that are kept aside to stop by."""
        weights = () if self.weights is None else (torch.from_numpy(self.weights).float(),)
        train = TensorDataset(*self.own_data("train"), *weights)
        val = TensorDataset(*self.own_data("val")) if len(self.rows["val"]) else None
        return self._posed(train, len(train), self.encoder.target, val)

    def posed_again(self, encoder: Encoder) -> Problem:
        """The problem of an encoder's training rows, with a row of zeros in their place."""
        inputs = torch.zeros(1, encoder.width)
        target = torch.zeros(1, dtype=torch.long) if encoder.target.classes else torch.zeros(1, 1)
        return self._posed(TensorDataset(inputs, target), encoder.rows, encoder.target)

    def _posed(
        self, train: TensorDataset, number: int, target: encoding.Target, val: TensorDataset | None = None
    ) -> Problem:
        width = train.tensors[0].shape[1]
        outputs, likelihood = own.posed(target.classes, self.settings.noise)
        network: NetworkFactory
        if self.settings.network is None:
            network = partial(networks.mlp, width, outputs, (self.settings.hidden,))
        else:
            network = partial(
                own_network.network, self.settings.network, (width,), outputs, self.settings.freeze
            )
        return Problem(network, likelihood, priors.normal(0, 1), train, val, number)

    def loaded(self, directory: Path, restore: Callable[[Problem], Method]) -> Any:
        """What predicts new rows; needs the run alone, and not the table."""
        encoder = own.read_encoder(directory, Encoder)
        method = restore(self.posed_again(encoder))
        return Predictor(method, encoder, directory, own.held_out(directory))

    @property
    def budget(self) -> Budget:
        """Epochs, batches and patience, by the number of rows that are not held out."""
        given, kept = self.settings, len(self.rows["train"]) + len(self.rows["val"])
        epochs = given.epochs or (200 if kept < 2000 else 100 if self.is_large else 40)
        size = given.batch_size
        if size == "auto":  # from 10,000 rows on 64 to 128 steps an epoch
            size = max(32, 2 ** (len(self.rows["train"]) // 64).bit_length() // 2) if self.is_large else 32
        patience = given.patience or (5 if self.is_large and len(self.rows["val"]) else None)
        return Budget(epochs, size, patience)

    def _log_validation(self, engine: Engine, method: Method) -> None:
        """Tells the NLL of the rows kept aside, in the target's unit: what `bench tune` looks at."""
        inputs, targets = self.own_data("val")
        score = engine.predict(method, inputs, self.settings.test_samples).log_score(targets)
        engine.log("nll", float(np.log(self.encoder.target.scale) - score.double().mean()))

    def fitted(self, engine: Engine) -> Method:
        """The method, fitted to the training rows."""
        problem = self.problem()
        engine.stage("fit")
        return engine.fit(problem, self.budget)

    def run(self, engine: Engine) -> Arrays:
        """Predictions on the held-out rows."""
        method = self.fitted(engine)
        if len(self.rows["val"]):
            self._log_validation(engine, method)
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
        if given.time:
            how = f"the latest by {given.time}"
        aside = f"{len(rows['val'])} kept aside to stop by, " if len(rows["val"]) else ""
        said = [
            f"{given.file}: {len(rows['train'])} rows trained on, {aside}{len(rows['test'])} held out ({how})"
            + (f", {self.left_out} left out, since they have no target" if self.left_out else "")
        ]
        kind, why = learning.guessed(self.target_column)
        guess = "" if given.kind else f", guessed from {why}; --task.kind says otherwise"
        learned = f"mean {target.mean:.4g}, sd {target.scale:.4g} of the training rows"
        if target.classes:
            shares = np.bincount(self.own_data("train")[1].numpy()) / len(rows["train"])
            largest = one_line(target.classes[shares.argmax()])
            learned = f"{len(target.classes)} classes, the commonest {largest} in {shares.max():.0%}"
        said.append(f"target {one_line(target.name)}: {given.kind or kind}, {learned}{guess}")
        said += encoding.sentences(self.encoder, self.inputs, rows["train"])
        labels = self.labels if self.kind == "classification" else None
        said += columns.remarks(self.inputs, self.target_column, labels) + _own_network(self)[1]
        said += own.copies(self.own_data("train")[0], self.own_data("test")[0], "rows")
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
        names = ("rmse", *forecasts.measures(""))
        of_numbers: Metrics = dict.fromkeys(names, Undefined(NOTHING["classification"]))
        of_classes: Metrics = dict.fromkeys(own.OF_CLASSES, Undefined(NOTHING["regression"]))
        if "labels" in arrays:
            of_classes = {**own.of_classes(arrays)}
        else:
            (mean, sigma), targets = normals.mixtures(arrays), arrays["targets"]
            of_numbers = {
                "rmse": float(np.sqrt(((mean.mean(0) - targets) ** 2).mean())),
                **forecasts.measured(mean, sigma, targets),
            }
        return {"nll": nll, **of_numbers, **of_classes}

    def losses(self, arrays: Arrays) -> np.ndarray:
        """-log p of each held-out target, in nats, `[N]`."""
        if "labels" in arrays:
            return own.losses(arrays)
        return -normals.log_density(*normals.mixtures(arrays), arrays["targets"])

    def curves(self, arrays: Arrays) -> list[Row]:
        """Risk by the share of rows that are kept; coverage of intervals, or accuracy by confidence."""
        if "labels" in arrays:
            return own.curves(arrays)
        (mean, sigma), targets = normals.mixtures(arrays), arrays["targets"]
        found = predictive.Numbers(mean, np.broadcast_to(sigma, mean.shape))
        risk = predictive.risk_rows(found.variance, (found.mean - targets) ** 2, "risk, rmse", root=True)
        return normals.coverage_rows(normals.below(mean, sigma, targets)) + risk

    def figures(self, arrays: Arrays) -> dict[str, Any]:
        """The curves, each drawn."""
        if "labels" in arrays:
            return own.figures_of(arrays)
        rows, unit = self.curves(arrays), f"root mean squared error, {self.settings.target}"
        risk = predictive.risk_chart([row for row in rows if row.curve == "risk, rmse"], unit)
        below = normals.below(*normals.mixtures(arrays), arrays["targets"])
        return {"coverage": normals.coverage_chart(rows), "pit": forecasts.chart(below), "risk": risk}

    def remarks(self, arrays: Arrays) -> list[str]:
        """Of a number: coverage of the 90% intervals by quarters of the predicted width."""
        return [] if "labels" in arrays else normals.remarks(arrays)


def _own_network(task: OwnTable) -> tuple[Arrays, list[str]]:
    """What decides which network one's own is, and sentences on it; it is tried out."""
    name, freeze = task.settings.network, task.settings.freeze
    if name is None:
        if freeze:
            raise UsageError("--task.freeze true: is of a network of your own: --task.network")
        return {}, []
    problem = task.problem()
    outputs, _ = own.posed(task.encoder.target.classes, task.settings.noise)
    return trying.network(problem.network, name, task.own_data("train")[0], outputs)


class Predictor:
    """A fitted posterior with the encoder of its training rows: predicts new rows in the target's own terms.

    Attributes:
        method: The fitted method.
        encoder: What was learned from the training rows.
        run: Directory of the run that it was loaded from.
        held_out: Encoded inputs `[n, D]` and targets `[n]` of rows that neither training nor early stopping
            saw, by which intervals are calibrated; None of classes, and of runs from before.
    """

    def __init__(
        self,
        method: Method,
        encoder: Encoder,
        run: Path,
        held_out: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> None:
        self.method, self.encoder, self.run, self.held_out = method, encoder, run, held_out

    def predict(
        self, rows: Any, num_samples: int = 200, seed: int = 0, abstain: float | None = None
    ) -> list[dict[str, Any]]:
        """Predictions of new rows, a dictionary each, in their order.

        A missing value is encoded as one of the training rows, a category that they do not have as none of
        theirs; further columns, such as the target, are not looked at.

        Args:
            rows: The path of a CSV or Parquet file, a data frame of pandas or polars, a structured array of
                numpy, or rows: dictionaries from column to value, Series or named tuples. One row means the
                same in all of these forms (`bench.cells`).
            num_samples: Weight samples S that are averaged, at least 1.
            seed: Of the samples.
            abstain: The share of these rows, from 0 to below 1 and rounded down, that is left to somebody
                else: those of largest predictive variance, or of least probability of the class that is told.

        Returns:
            Of a number `mean`, `sd`, and `low` and `high`, the central 90% interval, in the target's unit. Of
            classes `class`, the most probable one, and `probabilities` by class. With `abstain` also
            `abstained`, whether the row is left to somebody else.

        Raises:
            UsageError: If a column is missing in a row, a number is none, or a value may be one of several
                categories; one line that names it.
        """
        found = self._predicted(self._encoded(rows), num_samples, seed)
        if isinstance(found, predictive.Classes):
            return own.told(found, abstain)
        low, high = found.interval(0.9)
        columns = {"mean": found.mean, "sd": np.sqrt(found.variance), "low": low, "high": high}
        if abstain is not None:
            columns["abstained"] = found.abstain(abstain)
        values = zip(*(column.tolist() for column in columns.values()), strict=True)
        return [dict(zip(columns, row, strict=True)) for row in values]

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
        if not isinstance(level, int | float | np.number) or not 0 < level < 1:
            raise UsageError(f"interval: level {level!r} must be above 0 and below 1")
        given = [self._encoded(rows)]
        if kind != "posterior":
            inputs, targets = self._calibration(level)
            given.append(inputs)

        def ends(inputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            found = self._predicted(inputs, num_samples, seed)
            assert isinstance(found, predictive.Numbers)
            return (found.mean, found.mean) if kind == "residual" else found.interval(level)

        (low, high), *of_held_out = map(ends, given)
        by = conformal.margin(*of_held_out[0], targets, level) if of_held_out else 0.0
        return conformal.widened(low, high, by)

    def estimator(self) -> Any:
        """The same as a fitted estimator of scikit-learn (`bench.sklearn`), with the same predictions.

        Raises:
            UsageError: If the run's record cannot be read.
        """
        from bench import sklearn  # here, since it stands above the tasks

        return sklearn.of_run(self.run, self.method, self.encoder)

    def export(self, path: str | Path, level: float = 0.9) -> None:
        """Writes the predictor as ONNX: `predict` under its 200 draws, which are constants of the file.

        Of a table of numbers alone it takes rows `[B, columns]` as they are, NaN where one is missing; of any
        other rows as `encoder.encode_rows` gives them, `[B, D]`. The file's metadata name its inputs.

        Args:
            path: Of the file.
            level: Probability inside `low` and `high` of a number.

        Raises:
            UsageError: If packages are missing, texts are read, or it cannot be written so; one line.
            OutputError: If the file cannot be written.
        """
        columns = self.encoder.columns
        if any(isinstance(column, encoding.Texts) for column in columns):
            raise UsageError("texts are read by an encoder of its own, which is not written as ONNX")
        numbers = [column for column in columns if isinstance(column, encoding.Numbers)]
        if len(numbers) == len(columns):
            before: torch.nn.Module = exporting.Numbers(numbers)
            names = [column.name for column in numbers]
            rows = [[c.median for c in numbers], [c.median + c.scale[0] for c in numbers]]
            probe = torch.tensor([*rows, [math.nan] * len(numbers)], dtype=torch.float64)
        else:
            before, names = exporting.Encoded(), exporting.names_of(self.encoder)
            probe = torch.linspace(-1, 1, 3 * len(names), dtype=torch.float64).view(3, -1)
        target = self.encoder.target
        words = {"target": target.name, "inputs": json.dumps(names), "classes": json.dumps(target.classes)}
        told = exporting.Told(self.method, target, 200, level, before, probe, words)
        exporting.write(told, Path(path))

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

    def _predicted(
        self, inputs: np.ndarray, num_samples: int, seed: int
    ) -> predictive.Numbers | predictive.Classes:
        """Of encoded inputs `[B, D]`; all share their draws of the weights, in any call with this seed."""
        given = torch.from_numpy(inputs).float()
        return predictive.predicted(self.method, given, num_samples, seed, self.encoder.target)
