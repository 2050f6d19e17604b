"""Product matrices of trained networks: how much structure a factorised posterior gives the function.

Question: do the entries of the product of trained factorised layers depend on each other, and are they
multimodal once there are activations between the layers?

Protocol: a fully connected network without biases, 16 units in `hidden_layers` layers, linear or leaky ReLU
of slope 0.1, is fitted to standardised images, 9/10 for training and 1/10 for validation, prior N(0, 0.23^2).
At the first validation image the method's draws give local product matrices. Columns of one input pixel
depend on those of others through the layers above alone, so the columns of 2 x 2 pixels in the middle stand
for all. Their covariance is estimated from the draws; of a linear network the closed form for independent
weights stands beside it. The share of units that are on is that at the same image.

Source: Farquhar 2022, thesis "Understanding Approximation" (docs/sources.md), section 3.3, Figs 3.8 and 3.10,
Table A.2. Deviations: a part of the columns in place of all 784; modes by a normal mixture chosen by BIC, in
place of looking at 20 histograms; no biases, which the source's definition leaves aside.

What would mislead: a correlation of this matrix is one of the function's coefficients, under the
approximation and not under the posterior; it does not say that the correlations are right. Towards the rim of
an image pixels are nearly always black, and their weights stay at the prior. A correlation estimated from S
draws is never 0: its noise is 1 / sqrt(S).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch.utils.data import TensorDataset

from bench import data, figures, likelihoods, metrics, priors
from bench.contract import (
    Arrays,
    Budget,
    Comparison,
    Engine,
    FinishedRun,
    Method,
    Metric,
    Metrics,
    Problem,
    Row,
    Spec,
    Task,
    Undefined,
)
from bench.intervals import Band
from bench.settings import Count, Whole, settings
from bench.studies import active, product

NAMES: dict[str, dict[str, object]] = {
    "trained_product_matrix": {"dataset": "fashion_mnist"},
    "trained_product_matrix_digits": {"dataset": "digits"},
}

PRESETS: dict[str, dict[str, object]] = {
    "smoke": {"epochs": 1, "num_train": 1000, "draws": 200, "entries": 4}
}

BATCH_SIZE = 64
PRIOR_SD = 0.23
SIDE = 2
"""Of the square of pixels whose columns are kept."""
VALIDATION = 10
"""One in so many training images is for validation."""
SAMPLES = 16
"""Weight samples S of the validation accuracy (Table A.2)."""


@settings
class Settings:
    """Settings of the study of trained product matrices."""

    dataset: Literal["fashion_mnist", "digits"]
    """Images: fixed by the task's name."""
    activation: Literal["linear", "leaky_relu"] = "leaky_relu"
    """Between layers: none, or leaky ReLU of slope 0.1."""
    hidden_layers: Whole = 2
    """Hidden layers, 0 or more: one less than there are matrices."""
    width: Count = 16
    """Units of every hidden layer, at least 1."""
    num_train: Count | None = None
    """Training images, at least 1, and a ninth as many for validation; None is nine tenths of all."""
    epochs: Count = 10
    """Epochs, at least 1."""
    draws: Annotated[int, Field(ge=2)] = 10_000
    """Draws of the weights behind a covariance, at least 2."""
    entries: Count = 20
    """Entries whose modes are counted, at least 1."""


class TrainedProductMatrix(Task):
    """Local product matrices of a fitted network."""

    settings_class = Settings
    settings: Settings

    @property
    def spec(self) -> Spec:
        """What is measured."""
        own = self.settings
        on_average = not own.hidden_layers
        return Spec(
            question="Do the entries of a trained product matrix depend on each other, with several modes?",
            source="Farquhar 2022, section 3.3, Figs 3.8 and 3.10, Table A.2",
            version=1,
            metrics={
                "off_diagonal": Metric(
                    "root mean square correlation between different entries", "correlation", 1, 0
                ),
                "sharing_nothing": Metric(
                    "the same between entries that share neither row nor column", "correlation", 1, 0
                ),
                "multimodal": Metric("share of entries with several modes", "fraction", 1, 0),
                "distance": Metric(
                    "Frobenius distance of the draws' covariance to that of independent weights, in norms",
                    *("ratio", 0, np.inf),
                    may_be_undefined=own.activation != "linear",
                ),
                "units_on": Metric(
                    "share of hidden units that are on", "fraction", 1, 0, may_be_undefined=on_average
                ),
                "units_on_sd": Metric(
                    "its standard deviation over the draws", "fraction", 0, 1, may_be_undefined=on_average
                ),
                "accuracy": Metric("share of right classes on the validation images", "fraction", 1, 0),
            },
            main_metric="off_diagonal",
            requires=frozenset({"weight_samples", "moments"}),
            ranked=False,
        )

    # ---- data

    @cached_property
    def images(self) -> data.Images:
        """The published data set, read once."""
        return data.load(self.settings.dataset, self.data_dir)

    def data_digest(self) -> str:
        """Digest of the raw images and labels."""
        return self.images.digest

    @property
    def columns(self) -> list[int]:
        """Numbers of the pixels in the middle."""
        pixels = self.images.train_inputs.shape[-1]
        rows = range((pixels - SIDE) // 2, (pixels - SIDE) // 2 + SIDE)
        return [row * pixels + column for row in rows for column in rows]

    def targets(self) -> Arrays:
        """None: no test image is looked at."""
        return {}

    # ---- protocol

    def problem(self) -> Problem:
        """Training images, standardised; those after them are for validation."""
        own, images = self.settings, self.images
        inputs, labels = active.standardise(own.dataset, images.train_inputs), images.train_labels
        count = own.num_train or len(inputs) - len(inputs) // VALIDATION
        end = count + max(1, own.num_train // (VALIDATION - 1)) if own.num_train else None
        train, val = (TensorDataset(inputs[part], labels[part]) for part in (slice(count), slice(count, end)))
        hidden = (own.width,) * own.hidden_layers
        network = partial(product.deep, inputs[0].numel(), data.CLASSES, hidden, own.activation)
        return Problem(network, likelihoods.Categorical(), priors.normal(0, PRIOR_SD), train, val, len(train))

    def run(self, engine: Engine) -> Arrays:
        """Covariances `[E, E]`, shares of units on `[S]`, of multimodal entries, of right classes."""
        engine.stage("fit", 1, 2)
        problem = self.problem()
        method = engine.fit(problem, Budget(self.settings.epochs, BATCH_SIZE))
        assert isinstance(problem.val, TensorDataset)
        inputs, labels = problem.val.tensors
        predicted = engine.predict(method, inputs, SAMPLES).average().argmax(1)
        engine.stage("product", 2, 2)
        measured = engine.cached(partial(self.measure, engine, method, inputs[0]))
        accuracy = metrics.accuracy(predicted.numpy(), labels.numpy())
        return measured | {"accuracy": np.array(accuracy)}

    def measure(self, engine: Engine, method: Method, inputs: torch.Tensor) -> Arrays:
        """What is measured of a fitted method at one image."""
        own, columns = self.settings, self.columns
        slope = product.SLOPES[own.activation]
        drawn = product.draw(method, inputs, slope, columns, own.draws, engine.generator("draws"))
        draws = drawn["products"]
        arrays = {
            "covariance": np.cov(draws.T).astype(np.float32),
            "units_on": drawn["on"].astype(np.float32),
            "multimodal": np.array(product.multimodal_share(draws, own.entries)),
            "entry": self.shown(draws).astype(np.float32),
        }
        if own.activation == "linear":
            means, variances = (
                [layer.double().cpu().numpy() for layer in product.layers_of(of)] for of in method.moments()
            )
            means[0], variances[0] = means[0][:, columns], variances[0][:, columns]
            mean, covariance = product.moments(means, variances)
            arrays["closed"] = covariance.astype(np.float32)
            arrays["agreement"] = np.array(product.agreement(draws, mean.reshape(-1), covariance))
        return arrays

    def shown(self, draws: np.ndarray) -> np.ndarray:
        """Draws of the entry of least kurtosis, standardised: two modes far apart have little."""
        standard = (draws - draws.mean(0)) / np.maximum(draws.std(0), 1e-12)
        return standard[:2000, np.argmin(np.mean(standard**4, 0))]

    # ---- scoring

    def score(self, arrays: Arrays) -> Metrics:
        """Correlations, modes, units."""
        covariance = arrays["covariance"].astype(float)
        reason = "there is no closed form with activations between the layers"
        scores: Metrics = {
            "off_diagonal": product.off_diagonal(covariance),
            "sharing_nothing": product.sharing_nothing(covariance, SIDE**2),
            "multimodal": float(arrays["multimodal"]),
            "distance": float(arrays["agreement"][0]) if "agreement" in arrays else Undefined(reason),
            "units_on": Undefined("there is no hidden unit"),
            "units_on_sd": Undefined("there is no hidden unit"),
            "accuracy": float(arrays["accuracy"]),
        }
        if self.settings.hidden_layers:
            on = arrays["units_on"].astype(float)
            scores |= {"units_on": float(on.mean()), "units_on_sd": float(on.std(ddof=1))}
        return scores

    def curves(self, arrays: Arrays) -> list[Row]:
        """Histogram of the entry of least kurtosis, in its standard deviations."""
        density, edges = np.histogram(arrays["entry"], bins=40, range=(-4, 4), density=True)
        middle = (edges[1:] + edges[:-1]) / 2
        pairs = zip(middle, density, strict=True)
        return [Row("density", "entry of least kurtosis", float(x), float(y)) for x, y in pairs]

    @property
    def title(self) -> str:
        """What network it is."""
        own = self.settings
        activation = "linear" if own.activation == "linear" else "leaky ReLU"
        return f"{own.hidden_layers + 1} matri{'x' if not own.hidden_layers else 'ces'}, {activation}"

    def figures(self, arrays: Arrays) -> dict[str, Any]:
        """Correlations of the entries, and of a linear network those of the closed form."""
        panels = {f"{self.title}, draws": product.correlation(arrays["covariance"].astype(float))}
        if "closed" in arrays:
            panels["closed form"] = product.correlation(arrays["closed"].astype(float))
        density = self.curves(arrays)
        band = Band.flat(np.array([row.value for row in density]))
        title = ["Density of an entry", f"{self.title}: the entry of least kurtosis"]
        axes = [row.x for row in density], title, "value in standard deviations", "density"
        return {
            "covariance": product.heat_maps(panels, TITLE),
            "density": figures.bands({"draws": band}, *axes),
        }

    @classmethod
    def compare(cls, runs: Sequence[FinishedRun]) -> Comparison:
        """The metrics, and the heat maps of the first seed of every line beside each other (Fig. 3.8)."""
        found = super().compare(runs)
        firsts: dict[str, FinishedRun] = {}
        for run in sorted(runs, key=lambda run: run.seed):
            firsts.setdefault(f"{run.method_identity}: {run.task.title} ({run.task_name})", run)
        panels = {
            name: product.correlation(run.arrays["covariance"].astype(float)) for name, run in firsts.items()
        }
        charts = {"trained_product_matrix-covariance": product.heat_maps(panels, TITLE)}
        return Comparison(charts, found.header, found.rows, found.sentences)


TITLE = [
    "Correlations in the product matrix",
    f"{SIDE**2} pixels in the middle, class after class; at the first validation image",
]
