"""SWAG with and without off-diagonal covariance by depth: residual networks on CIFAR.

Question: does a posterior with correlated weights predict better than a diagonal one, and does depth decide?

Protocol: a PreResNet with filter response normalisation of one depth (2, 8, ..., 38: three stages of
(depth - 2) / 6 blocks), trained from scratch on CIFAR with shifts and mirror images, as long as the budget
says; there is no validation set. Predictions average the softmax over 30 weight samples. `swag` and
`swag_diagonal` train alike: runs of one seed have the same moments and differ in the covariance they draw
from. A study compares both at several depths, by paired differences of runs with one seed.

Source: Farquhar 2022, thesis "Understanding Approximation" (docs/sources.md), section 3.3 (Figs 3.12, 3.13)
and appendix A ("Diagonal- and Structured-SWAG at Varying Depths"); Maddox et al. 2019 and its public code.
Deviations: filter response normalisation in place of batch normalisation, whose statistics are no weights. In
the public code a stage without blocks gets one, so its depth 2 is its depth 8; here depth 2 has none. The
prior's variance makes its gradient that of the published weight decay, 3e-4.

What would mislead: a smaller network or a shorter training, where the posterior of either kind is the same
point. That two curves overlap shows no equality: the paired difference has an interval, and the size of a
difference that the runs could have shown is its half width. Accuracy moves in steps of one test image.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from bench import augmentation, cifar, figures, likelihoods, metrics, priors, randomness, resnet
from bench.comparison import by_task, of_metrics
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
    Stored,
    Task,
)
from bench.data import array_digest
from bench.settings import Count, settings

NAMES: dict[str, dict[str, object]] = {
    "depth_covariance": {"dataset": "cifar100"},
    "depth_covariance_cifar10": {"dataset": "cifar10"},
}

PRESETS: dict[str, dict[str, object]] = {
    "smoke": {"depth": 2, "images": 200, "tested": 100, "epochs": 3, "test_samples": 2},
    "paper": {"channels": 16, "images": cifar.TRAIN, "tested": cifar.TEST, "epochs": 300},
}

BATCH_SIZE = 128
WEIGHT_DECAY = 3e-4
"""Of the mean loss: a normal prior of variance 1 / (WEIGHT_DECAY N) has this gradient."""


@settings
class Settings:
    """Settings of the study of covariance by depth."""

    dataset: Literal["cifar10", "cifar100"]
    """Images: fixed by the task's name."""
    depth: Literal[2, 8, 14, 20, 26, 32, 38] = 8
    """Layers of the network."""
    channels: Count = 8
    """Maps of the first stage; published 16."""
    images: Annotated[Count, Field(le=cifar.TRAIN)] = 5_000
    """Training images, drawn evenly from the classes, the same in every run; published 50,000."""
    tested: Annotated[Count, Field(le=cifar.TEST)] = 2_000
    """Test images likewise; published 10,000."""
    epochs: Count = 40
    """Epochs of the fit, at least 1; published 300."""
    test_samples: Count = 30
    """Weight samples S per prediction, at least 1."""


class Photos(Stored):
    """Small photographs in memory as bytes, shifted and mirrored in training.

    Args:
        images: uint8 `[N, 3, H, W]`.
        labels: Classes `[N]`.
        mean: Of each channel over the training images, where 1 is white, `[3]`.
        std: Standard deviation likewise.
    """

    num_uniforms = augmentation.NUM_UNIFORMS_OF_SHIFT

    def __init__(self, images: Tensor, labels: Tensor, mean: Tensor, std: Tensor) -> None:
        self.images, self.labels, self.mean, self.std = images, labels, mean, std

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Images uint8 `[B, 3, H, W]` and labels `[B]`."""
        return self.images[rows], self.labels[rows]

    def finish(self, inputs: Tensor, uniforms: Tensor | None) -> Tensor:
        """Normalised by channel, `[B, 3, H, W]`; shifted and mirrored by `uniforms`."""
        mean, std = (v.to(inputs.device)[:, None, None] for v in (self.mean, self.std))
        return (augmentation.shifted(inputs, uniforms).to(mean.dtype) / 255 - mean) / std


class DepthCovariance(Task):
    """One fit of a residual network of one depth."""

    settings_class = Settings
    settings: Settings

    @property
    def spec(self) -> Spec:
        """What is measured; a study of its own methods, never ranked."""
        return Spec(
            question="Does off-diagonal covariance help a deep network's posterior?",
            source="Farquhar 2022, section 3.3, Figs 3.12 and 3.13",
            version=1,
            metrics={
                "nll": Metric("mean of -log p(label)", "nats", 0, np.inf),
                "accuracy": Metric("share of right classes", "fraction", 1, 0),
            },
            main_metric="nll",
            ranked=False,
        )

    # ---- data

    def own_data(self, part: str) -> tuple[Tensor, Tensor]:
        """Images uint8 `[N, 3, 32, 32]` and classes `[N]` of the part train or test that are used."""
        arrays = cifar.load(self.settings.dataset, self.data_dir)
        labels = arrays[f"{part}_labels"]
        rows = spread(labels, self.settings.images if part == "train" else self.settings.tested, part)
        return torch.from_numpy(arrays[f"{part}_inputs"][rows]), torch.from_numpy(labels[rows]).long()

    @cached_property
    def data(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Both parts, read once."""
        return {part: self.own_data(part) for part in ("train", "test")}

    def data_digest(self) -> str:
        """Digest of the images and labels that are used."""
        return array_digest(
            {f"{part}_{k}": t for part, of in self.data.items() for k, t in zip("xy", of, strict=True)}
        )

    def photos(self, part: str) -> Photos:
        """The part train or test, normalised by the training images."""
        std, mean = torch.std_mean(self.data["train"][0].double() / 255, (0, 2, 3), correction=0)
        return Photos(*self.data[part], mean.float(), std.float())

    # ---- protocol

    def problem(self) -> Problem:
        """All training images that are used; there is no validation set."""
        own = self.settings
        classes = cifar.SOURCES[own.dataset].classes
        return Problem(
            network=partial(resnet.preresnet_frn, own.depth, classes, own.channels),
            likelihood=likelihoods.Categorical(),
            prior=priors.normal(0, (WEIGHT_DECAY * own.images) ** -0.5),
            train=self.photos("train"),
            val=None,
            num_train=own.images,
        )

    def run(self, engine: Engine) -> Arrays:
        """Log-probabilities on the test images, `[T, C]`."""
        engine.stage("fit")
        method = engine.fit(self.problem(), Budget(self.settings.epochs, BATCH_SIZE))
        prediction = engine.predict(method, self.photos("test"), self.settings.test_samples)
        return {"log_probs": metrics.store(prediction.average())}

    def targets(self) -> Arrays:
        """Test labels `[T]`."""
        return {"labels": self.data["test"][1].byte().numpy()}

    def layouts(self) -> dict[str, Layout]:
        """Predictions and labels."""
        n, classes = self.settings.tested, cifar.SOURCES[self.settings.dataset].classes
        return {
            "log_probs": Layout("float16", (n, classes), is_log_probs=True),
            "labels": Layout("uint8", (n,)),
        }

    # ---- scoring

    def score(self, arrays: Arrays) -> Metrics:
        """NLL and accuracy on the test images."""
        log_probs, labels = metrics.restore(arrays["log_probs"]), arrays["labels"]
        return {
            "nll": metrics.negative_log_likelihood(log_probs, labels),
            "accuracy": metrics.accuracy(log_probs.argmax(1), labels),
        }

    def losses(self, arrays: Arrays) -> np.ndarray:
        """-log p(label) of each test image in nats, `[T]`."""
        labels = arrays["labels"]
        return -metrics.restore(arrays["log_probs"])[np.arange(len(labels)), labels]

    def curves(self, arrays: Arrays) -> list[Row]:
        """The losses, from the least to the largest, at their quantiles."""
        quantiles = np.linspace(0, 1, 101)
        losses = np.quantile(self.losses(arrays), quantiles)
        return [
            Row("loss", "test images", float(q), float(v)) for q, v in zip(quantiles, losses, strict=True)
        ]

    @classmethod
    def compare(cls, runs: Sequence[FinishedRun]) -> Comparison:
        """NLL and accuracy against depth, a line per method; of methods at one depth, what differs."""
        depths = sorted({run.task.settings.depth for run in runs})
        sentences = [
            sentence
            for depth in depths
            for sentence in of_metrics([run for run in runs if run.task.settings.depth == depth]).sentences
        ]
        charts = {}
        for task, lines in by_task(runs).items():
            found: dict[tuple[str, int], list[FinishedRun]] = {}
            for run in (run for of_line in lines.values() for run in of_line.values()):
                apart = [v for v in run.variant.split(",") if v and not v.startswith("depth=")]
                found.setdefault((", ".join([run.method_identity, *apart]), run.seed), []).append(run)
            charts[f"{task}-by-depth"] = figures.panels(
                [
                    figures.Curve(
                        title,
                        line,
                        [
                            (run.task.settings.depth, value)
                            for run in of_seed
                            if (value := run.metrics[name]) is not None
                        ],
                    )
                    for (line, _), of_seed in found.items()
                    for name, title in {"nll": "Test NLL, nats", "accuracy": "Test accuracy"}.items()
                ],
                "depth",
                "",
            )
        tables = of_metrics(runs)
        return Comparison(charts, tables.header, tables.rows, sentences)


def spread(labels: np.ndarray, size: int, part: str) -> np.ndarray:
    """Rows of `size` examples, as many of every class as can be, in a random order that no seed changes.

    More examples of one call contain those of fewer.
    """
    g = np.random.default_rng(randomness.derive(0, "depth_covariance", part))
    order = g.permutation(len(labels))
    rank = np.zeros(len(labels), int)
    for c in np.unique(labels):
        own = order[labels[order] == c]
        rank[own] = np.arange(len(own))
    return order[np.argsort(rank[order], kind="stable")][:size]
