"""Distribution shift: classes of clean, of corrupted and of foreign images, by one fit to clean ones.

Question: does a posterior stay right, or at least say that it does not know, when images are not as they were
in training?

Protocol: one fit to clean training images. The same test images are then predicted as they are and under
twelve corruptions (`bench/corruptions.py`) at severities 1, 3 and 5; so are foreign images, which have none
of the classes. All predictions share the draws of the weights. Two parts of the training set, a seventh of it
each and at most 1,000 images, are not trained on: the temperature is fitted on the first, conformal sets on
the second, both in `score`, from stored predictions. Splits are the same in every run; the seed is that of
the fit. An epoch sees `num_train` images, of fewer again and again. Images are in whole levels of 255,
normalised by mean and standard deviation of the training images, per channel, foreign ones too. Prior N(0, 1)
on every weight, no augmentation.

Foreign images: of digits and CIFAR-10 uniform noise, and the test images with their pixels shuffled, which
are as bright as known ones; of MNIST FashionMNIST and back, and noise. Detection needs no fit of its own, so
its scores are columns here, beside those under shift.

`bench tune` chooses by the NLL of the first of these parts under the same corruptions, each image once at
every severity. Clean, its images are all but solved and do not tell a sure posterior from a right one. So a
search knows which kinds of corruption are tested, and no test image.

With `joint` batches of ten images are predicted jointly (bench/studies/joint.py), clean ones and ones at the
largest severity. The first 200 test images make 100 pairs, and each image of a batch is one of a pair, by the
toss of a coin. Draws are scored as they are, at whatever `calibration`.

With `calibration` temperature every score is of predictions at the fitted temperature. Without it some such
scores stand beside the others (`nll_scaled`), so that methods are compared that way without a second fit.

Source: Ovadia et al. 2019, "Can You Trust Your Model's Uncertainty? Evaluating Predictive Uncertainty Under
Dataset Shift"; Hendrycks and Dietterich 2019, "Benchmarking Neural Network Robustness to Common Corruptions
and Perturbations". Deviations: the preset standard has 10,000 training images, 1,000 test images, severities
1, 3 and 5 and twelve of their nineteen corruptions; networks have filter response normalisation or none.

What would mislead: accuracy falls with severity for all, so a worse NLL alone says little of calibration;
noise is detected by nearly anything, and one foreign data set by its brightness alone, which is why that
control stands beside each score; the mutual information of two methods compares only at equal numbers of
samples; conformal sets promise their coverage for clean images alone; images of 8 pixels are hardly blurred.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from bench import corruptions, metrics
from bench.contract import (
    Arrays,
    Budget,
    Comparison,
    Engine,
    FinishedRun,
    Layout,
    Metrics,
    Row,
    Spec,
)
from bench.data import array_digest
from bench.predictions import Categorical
from bench.settings import Count, settings
from bench.spec import PREDICTED
from bench.studies import shift
from bench.studies.acquisition import bald
from bench.studies.pictures import ImageGroup, ImageGroups, PictureTask, brightness

NAMES: dict[str, dict[str, object]] = {
    "shift_digits": {"dataset": "digits"},
    "shift_fashion_mnist": {"dataset": "fashion_mnist"},
    "shift_mnist": {"dataset": "mnist"},
    "shift_cifar10": {"dataset": "cifar10"},
}

PRESETS: dict[str, dict[str, object]] = {
    "smoke": {"num_train": 200, "channels": 2, "epochs": 1, "test_images": 100, "test_samples": 2},
    "paper": {"num_train": None, "epochs": 200, "test_images": None, "all_severities": True},
}

SEVERITIES = (1, 3, 5)
PROBE = 10
"""Test images whose corruptions are part of the digest of the data."""


@settings
class Settings:
    """Settings of the tasks under distribution shift."""

    dataset: Literal["digits", "mnist", "fashion_mnist", "cifar10"]
    """Images: fixed by the task's name."""
    network: Literal["default", "small_cnn", "resnet20"] = "default"
    """small_cnn has 3 convolutions, resnet20 19; the default is small_cnn, of CIFAR-10 resnet20."""
    channels: Count = 16
    """Feature maps of the first convolution, at least 1."""
    num_train: Count | None = 10_000
    """Training images, at least 1, or all if there are fewer, and images per epoch; null takes all, once."""
    epochs: Count = 20
    """Epochs, at least 1."""
    batch_size: Count = 128
    """Images per training step, at least 1."""
    test_images: Count | None = 1000
    """Test images, at least 1, evenly spread, or all if there are fewer; null takes all."""
    all_severities: bool = False
    """Severities 1 to 5 in place of 1, 3 and 5."""
    test_samples: Count = 8
    """Weight samples S per prediction, at least 1."""
    calibration: Literal["none", "temperature"] = "none"
    """temperature scores all predictions at the temperature of least validation NLL."""
    joint: bool = False
    """Keep the predictions of single draws at pairs of images, and score batches of them jointly."""


class Shift(PictureTask):
    """Clean, corrupted and foreign images, by one fit."""

    settings_class = Settings
    settings: Settings

    @property
    def severities(self) -> tuple[int, ...]:
        """Those predicted, above 0."""
        return tuple(range(1, 1 + corruptions.LARGEST)) if self.settings.all_severities else SEVERITIES

    @property
    def spec(self) -> Spec:
        """What is measured."""
        found = shift.measures(self.severities, self.foreign)
        return Spec(
            question="Does a posterior stay right, or say that it does not know, when images are shifted?",
            source="Ovadia et al. 2019; Hendrycks and Dietterich 2019",
            version=2,
            metrics=found | shift.JOINT if self.settings.joint else found,
            main_metric="nll",
            validation_metric="nll",
            baseline="map",
            reference="deep_ensemble",
        )

    def data_digest(self) -> str:
        """Of data and rows, and of corruptions of a few test images, by severity."""
        digests = [super().data_digest(), *corruptions.digests(self.pictures.test[:PROBE])]
        return array_digest(
            {str(i): np.frombuffer(bytes.fromhex(d), np.uint8) for i, d in enumerate(digests)}
        )

    # ---- protocol

    def run(self, engine: Engine) -> Arrays:
        """Mean log-probabilities and mutual information of all images; labels of the two held-out parts."""
        own, rows = self.settings, self.rows
        engine.stage("fit")
        method = engine.fit(self.problem(), Budget(own.epochs, own.batch_size, draws=own.num_train))
        test, others = self.test, self.others()
        held_out = [ImageGroup(self.pictures.train[rows[part]]) for part in ("val", "calibration")]
        cells = [
            ImageGroup(test),
            *(ImageGroup(test, kind, s) for s in self.severities for kind in corruptions.KINDS),
        ]
        searched, labels = self.searched
        parts = ImageGroups([*held_out, *cells, *map(ImageGroup, others), *searched], *self.moments)
        prediction = engine.predict(method, parts, own.test_samples)
        ends = np.cumsum([*parts.sizes[:2], len(cells) * len(test), len(others) * len(test)])
        *of_parts, seen = np.split(metrics.store(prediction.average()), ends)
        names = "val_log_probs", "calibration_log_probs", "log_probs", "foreign_log_probs"
        arrays = dict(zip(names, of_parts, strict=True))
        information = bald(prediction).float().numpy()
        _, _, arrays["information"], arrays["foreign_information"], _ = np.split(information, ends)
        for name in ("log_probs", "information", "foreign_log_probs", "foreign_information"):
            arrays[name] = arrays[name].reshape(-1, len(test), *arrays[name].shape[1:])
        if own.joint:
            cell = shift.joint_cells(self.pairs, self.severities)
            at = ends[1] + cell * len(test) + np.arange(2 * self.pairs)
            assert isinstance(prediction, Categorical)
            arrays["joint_log_probs"] = metrics.store(prediction.log_probs[:, at])
        engine.log("nll", metrics.negative_log_likelihood(metrics.restore(seen), labels))
        clean = metrics.restore(arrays["val_log_probs"])
        engine.log("nll_clean", metrics.negative_log_likelihood(clean, self.held_out("val")))
        return arrays

    @property
    def searched(self) -> tuple[list[ImageGroup], np.ndarray]:
        """What a search chooses by: validation images, each once at every severity, kinds in turn; labels."""
        rows, kinds = self.rows["val"], list(corruptions.KINDS)
        turns = [(s, k, rows[k :: len(kinds)]) for s in self.severities for k in range(len(kinds))]
        groups = [ImageGroup(self.pictures.train[own], kinds[k], s) for s, k, own in turns]
        return groups, self.pictures.train_labels[np.concatenate([own for *_, own in turns])]

    @property
    def pairs(self) -> int:
        """Pairs of test images that are predicted jointly."""
        return min(shift.PAIRS, self.num_test // 2)

    def held_out(self, part: str) -> np.ndarray:
        """Labels of a part of the training set, uint8 `[V]`."""
        return self.pictures.train_labels[self.rows[part]].astype(np.uint8)

    def given(self) -> Arrays:
        """Labels of the two parts kept from training, and the brightness of all images."""
        parts = {f"{part}_labels": self.held_out(part) for part in ("val", "calibration")}
        return parts | {"brightness": brightness(self.test, *self.others())}

    def layouts(self) -> dict[str, Layout]:
        """Predictions of N test images clean and corrupted, of foreign ones, and of two held-out parts."""
        cells, foreign = 1 + len(self.severities) * len(corruptions.KINDS), len(self.foreign)
        n, classes = self.num_test, self.num_classes
        found = {
            "log_probs": Layout("float16", (cells, n, classes), is_log_probs=True),
            "information": Layout(PREDICTED, (cells, n)),
            "foreign_log_probs": Layout("float16", (foreign, n, classes), is_log_probs=True),
            "foreign_information": Layout(PREDICTED, (foreign, n)),
            "brightness": Layout("float32", (1 + foreign, n)),
            "labels": Layout("uint8", (n,)),
        }
        for part, size in {"val": "V", "calibration": "Q"}.items():
            found[f"{part}_log_probs"] = Layout("float16", (size, classes), is_log_probs=True)
            found[f"{part}_labels"] = Layout("uint8", (size,))
        if self.settings.joint:
            shape = "S", 2, 2 * self.pairs, classes
            found["joint_log_probs"] = Layout("float16", shape, is_log_probs=True)
        return found

    # ---- scoring

    def readings(self, arrays: Arrays, scaled: bool = False) -> shift.Readings:
        """What the run predicted; at the fitted temperature if the task or the caller says so."""
        is_scaled = scaled or self.settings.calibration == "temperature"
        return shift.Readings.of(arrays, self.severities, self.foreign, is_scaled)

    def score(self, arrays: Arrays) -> Metrics:
        """Scores of clean and of corrupted images, conformal sets, detection of foreign images."""
        found = shift.scores(self.readings(arrays), self.readings(arrays, scaled=True))
        if self.settings.joint:
            found |= shift.joint_scores(metrics.restore(arrays["joint_log_probs"]), arrays["labels"])
        return found

    def losses(self, arrays: Arrays) -> np.ndarray:
        """-log p(label) of each test image, in nats, mean over corruptions and severities, `[N]`."""
        return self.readings(arrays).losses

    def curves(self, arrays: Arrays) -> list[Row]:
        """Every measure by severity; reliability; histograms of uncertainty."""
        return shift.curves(self.readings(arrays))

    def figures(self, arrays: Arrays) -> dict[str, Any]:
        """Measures against severity, reliability, histograms of uncertainty."""
        return shift.charts(self.curves(arrays))

    @classmethod
    def compare(cls, runs: Sequence[FinishedRun]) -> Comparison:
        """Measures against severity by method, and means of all metrics."""
        return shift.compare(runs)
