"""What happens to a fit when its gradient becomes noisy: a convolutional network followed over 500 epochs.

Question: does training accuracy fall when the noise of the likelihood's gradient grows?

Protocol: the first 512 training images, three 3x3 convolutions of 40, 80 and 160 channels, prior N(0, 1),
batches of 64, 500 epochs. At the start of every fifth epoch a probe measures, under the same noise each time:
training accuracy with 4 weight samples; the standard deviation of the gradient of the negative log likelihood
of 64 fixed images, in nats per example, with respect to the means of the last convolution, averaged over its
entries, for one weight sample; the cross-entropy to the prior, and the posterior's standard deviations in
that layer. The two terms of the loss stand beside them. Nothing is held out.

Source: Farquhar 2022, thesis "Understanding Approximation" (docs/sources.md), section 4.4 (Fig. 4.7) and
appendix B.3: Adam at 1e-4, 4 training samples; and Fig. 4.6b, where truncated noise is compared with
untruncated by what is learned from it. Deviations: the source trains VGG-16 at 5/8 of its channels, 40, on
44,594 photographs of eyes; ours has three of its convolutions and grey images. Its 150 epochs until the fall
are about 100,000 steps, in which Adam at 1e-4 moves rho by up to 10; ours are 4,000 in all, so that the same
way takes a learning rate of 3e-3.

What would mislead: accuracy here is that of training, which a better posterior need not raise; whoever starts
with a smaller sigma, or moves it more slowly, falls later or not at all within the epochs. The best accuracy
is a maximum over time, so that a fall above 0 is seen in every noisy curve; it counts from 0.05 on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import TensorDataset

from bench import data, figures, intervals, likelihoods, priors
from bench.comparison import by_task, of_metrics
from bench.contract import (
    Arrays,
    Batch,
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
)
from bench.figures import Curve
from bench.settings import Count, settings
from bench.studies import active, gradients

NAMES: dict[str, dict[str, object]] = {
    "training_dynamics": {"dataset": "fashion_mnist"},
    "training_dynamics_digits": {"dataset": "digits"},
}

PRESETS: dict[str, dict[str, object]] = {
    "smoke": {"images": 64, "channels": 4, "epochs": 10, "pairs": 2},
}

COLUMNS = {
    "likelihood_term": "negative log likelihood, nats per example",
    "prior_term": "KL(q || prior), nats per example",
    "prior_cross_entropy": "cross-entropy to the prior, nats per example",
    "accuracy": "training accuracy",
    "gradient_sd": "standard deviation of the gradient, nats",
    "weight_sd": "root of the mean variance of a weight",
}
"""What is followed, after the number of the epoch."""
FALL = 0.05
"""Least loss of training accuracy that counts as a fall."""


@settings
class Settings:
    """Settings of the study of training dynamics."""

    dataset: Literal["fashion_mnist", "digits"]
    """Images: fixed by the task's name."""
    images: Count = 512
    """Training images, at least 1, or as many as there are."""
    channels: Count = 40
    """Channels of the first convolution, at least 1; the others have twice and four times as many."""
    epochs: Count = 500
    """Epochs, at least 1."""
    batch_size: Count = 64
    """Examples per training step, and those of the probe's gradient, at least 1."""
    every: Count = 5
    """Epochs from one measurement to the next, at least 1."""
    pairs: Count = 8
    """Pairs of draws behind a standard deviation of the gradient, at least 1."""
    samples: Count = 4
    """Weight samples behind a training accuracy, at least 1."""


class TrainingDynamics(Task):
    """One long fit, measured on its way."""

    settings_class = Settings
    settings: Settings

    @property
    def spec(self) -> Spec:
        """What is measured."""
        last, best = "at the end", "where accuracy is best"
        return Spec(
            question="Does training accuracy fall when the noise of the likelihood's gradient grows?",
            source="Farquhar 2022, section 4.4, Fig. 4.7 and appendix B.3",
            version=1,
            metrics={
                "accuracy": Metric(f"training accuracy {last}", "fraction", 1, 0),
                "best_accuracy": Metric("highest training accuracy on the way", "fraction", 1, 0),
                "best_epoch": Metric("the epoch of it", "epochs", np.inf, 0),
                "fall": Metric("best training accuracy minus that at the end", "fraction", 0, 1),
                "nll": Metric(f"likelihood term {last}", "nats", 0, np.inf),
                "nll_at_best": Metric(f"likelihood term {best}", "nats", 0, np.inf),
                "prior_cross_entropy": Metric(f"cross-entropy to the prior {last}", "nats", 0, np.inf),
                "prior_cross_entropy_at_best": Metric(
                    f"cross-entropy to the prior {best}", "nats", 0, np.inf
                ),
                "gradient_sd": Metric(f"standard deviation of the gradient {last}", "nats", 0, np.inf),
                "gradient_sd_at_best": Metric(
                    f"standard deviation of the gradient {best}", "nats", 0, np.inf
                ),
                "weight_sd": Metric(f"posterior standard deviation {last}", "weight", np.inf, 0),
            },
            main_metric="accuracy",
            requires=frozenset({"loss_terms", "moments"}),
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

    # ---- protocol

    def problem(self) -> Problem:
        """The first training images, standardised."""
        own, images = self.settings, self.images
        inputs = active.standardise(own.dataset, images.train_inputs[: own.images])
        train = TensorDataset(inputs, images.train_labels[: own.images])
        widths = (own.channels, 2 * own.channels, 4 * own.channels)
        network = partial(gradients.convolutional, inputs.shape[-1], widths, data.CLASSES)
        return Problem(network, likelihoods.Categorical(), priors.normal(0, 1), train, None, len(train))

    def run(self, engine: Engine) -> Arrays:
        """Of every measured epoch its number and the `COLUMNS`, `[M, 7]`."""
        engine.stage("fit")
        budget = Budget(self.settings.epochs, self.settings.batch_size)
        method = engine.fit(self.problem(), budget, probe=self.probe)
        rows = [row for row in method.history if "gradient_sd" in row]
        return {"history": np.array([[row[name] for name in ("epoch", *COLUMNS)] for row in rows])}

    def probe(self, method: Method, batch: Batch, generator: torch.Generator) -> dict[str, float]:
        """What is measured at the start of an epoch; nothing in those between."""
        own = self.settings
        if len(method.history) % own.every:
            return {}
        name, few = gradients.last_convolution(method.network), own.batch_size
        first = Batch(batch.inputs[:few], batch.targets[:few])
        scatter = gradients.scatter(method, [first], name, own.pairs, generator)
        predicted = method.predict(batch.inputs, own.samples, generator).average().argmax(1)
        means, variances = method.moments()
        weights = sum(mean.numel() for mean in means.values())
        squares = sum((means[n].square().sum() + variances[n].sum()).item() for n in means)
        return {
            "accuracy": (predicted == batch.targets).double().mean().item(),
            "gradient_sd": math.sqrt(scatter.variances.mean()),
            # To N(0, 1), whatever family has these moments.
            "prior_cross_entropy": (squares + weights * math.log(2 * math.pi)) / 2 / method.problem.num_train,
            "weight_sd": variances[name].mean().sqrt().item(),
        }

    def targets(self) -> Arrays:
        """None: nothing is held out."""
        return {}

    # ---- scoring

    def score(self, arrays: Arrays) -> Metrics:
        """What the fit has at its end, and where its training accuracy was best: means over a tenth of it."""
        history = arrays["history"]
        width = max(1, len(history) // 10)
        tenths = np.lib.stride_tricks.sliding_window_view(history, width, 0).mean(-1)  # [M - width + 1, 7]
        where = {name: i for i, name in enumerate(("epoch", *COLUMNS))}
        best, last = tenths[tenths[:, where["accuracy"]].argmax()], tenths[-1]
        scores = {
            "accuracy": last[where["accuracy"]],
            "best_accuracy": best[where["accuracy"]],
            "best_epoch": best[where["epoch"]],
            "fall": best[where["accuracy"]] - last[where["accuracy"]],
            "nll": last[where["likelihood_term"]],
            "nll_at_best": best[where["likelihood_term"]],
            "prior_cross_entropy": last[where["prior_cross_entropy"]],
            "prior_cross_entropy_at_best": best[where["prior_cross_entropy"]],
            "gradient_sd": last[where["gradient_sd"]],
            "gradient_sd_at_best": best[where["gradient_sd"]],
            "weight_sd": last[where["weight_sd"]],
        }
        return {name: float(value) for name, value in scores.items()}

    def curves(self, arrays: Arrays) -> list[Row]:
        """Every column against the epoch."""
        return [
            Row(title, "fit", float(row[0]), float(row[i]))
            for i, title in enumerate(COLUMNS.values(), 1)
            for row in arrays["history"]
        ]

    def figures(self, arrays: Arrays) -> dict[str, Any]:
        """Every column against the epoch, a panel each."""
        return {"dynamics": chart({"this run": [arrays]})}

    @classmethod
    def compare(cls, runs: Sequence[FinishedRun]) -> Comparison:
        """The same for several lines, every metric with its interval, and whether training accuracy falls."""
        tables = of_metrics(runs)
        charts: dict[str, Any] = {}
        sentences: list[str] = []
        for task, lines in by_task(runs).items():
            charts[f"{task}-dynamics"] = chart(
                {line: [run.arrays for run in of.values()] for line, of in lines.items()}
            )
            for line, of in lines.items():
                sentences.append(f"{task}, {line}: {falls([*of.values()])}")
        return Comparison(charts, tables.header, tables.rows, [*sentences, *tables.sentences])


def chart(lines: dict[str, list[Arrays]]) -> Any:
    """A panel for every column, a mean with a band of one standard deviation for every line."""
    curves = [
        Curve(title, line, [(row[0], row[i]) for row in arrays["history"]])
        for i, title in enumerate(COLUMNS.values(), 1)
        for line, of in lines.items()
        for arrays in of
    ]
    return figures.panels(curves, "epoch", "")


def falls(runs: Sequence[FinishedRun]) -> str:
    """Whether training accuracy falls, and what the gradient's noise does meanwhile, over the seeds."""
    fall = intervals.student(np.array([run.metrics["fall"] for run in runs], float))
    end, best = (
        np.array([run.metrics[name] for run in runs], float)
        for name in ("gradient_sd", "gradient_sd_at_best")
    )
    growth = intervals.student(np.log10(end / best))
    said = fall.said(f"it falls by more than {FALL}", f"it does not fall by {FALL}", FALL)
    return (
        f"training accuracy ends {fall:.3g} below its best{said}; from there on the standard deviation "
        f"of the gradient grows by {growth:.3g} powers of ten"
    )
