"""Near out-of-distribution detection: two classes that training never showed.

Question: does a posterior know an image of a class that it was never shown?

Protocol: one fit to the training images of the first eight classes. All test images are predicted, those of
the two held-out classes among them: nobody but `score` knows which they are. So are foreign images, as in
`tasks/shift.py`, from which data, network and preprocessing are too. Each uncertainty is scored by how well
it tells held-out classes from known ones. Unlike foreign data sets, held-out classes are photographed,
centred and scaled as the known ones are; they need a fit of their own, and so a task of their own.

Source: Hendrycks and Gimpel 2017, "A Baseline for Detecting Misclassified and Out-of-Distribution Examples in
Neural Networks"; held-out classes as in Neal et al. 2018, "Open Set Learning with Counterfactual Images".
Deviations: one split of the classes in place of several random ones, since a split changes the difficulty
more than a method does: scores are of these two classes.

What would mislead: the two classes may resemble a known one (a shirt, a truck), so that scores of two data
sets do not compare; average precision depends on the share of foreign images, which is two tenths here and
one half for foreign data sets; a network that errs much on known images is uncertain there too, so that the
area falls without any fault in what it says of the new classes. Accuracy stands beside it.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from bench import metrics
from bench.contract import Arrays, Budget, Engine, Layout, Metric, Metrics, Row, Spec
from bench.settings import Count, settings
from bench.spec import PREDICTED
from bench.studies import calibration, detection, shift
from bench.studies.acquisition import bald
from bench.studies.pictures import ImageGroup, ImageGroups, PictureTask, brightness

NAMES: dict[str, dict[str, object]] = {
    "ood_digits": {"dataset": "digits"},
    "ood_fashion_mnist": {"dataset": "fashion_mnist"},
    "ood_cifar10": {"dataset": "cifar10"},
}

PRESETS: dict[str, dict[str, object]] = {
    "smoke": {"num_train": 200, "channels": 2, "epochs": 1, "test_images": 100, "test_samples": 2},
    "paper": {"num_train": None, "epochs": 200, "test_images": None},
}

NEW = "held_out"
"""Name of the two classes among the foreign data sets."""


@settings
class Settings:
    """Settings of the tasks with held-out classes."""

    dataset: Literal["digits", "fashion_mnist", "cifar10"]
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
    test_samples: Count = 8
    """Weight samples S per prediction, at least 1."""


class OutOfDistribution(PictureTask):
    """Eight classes are known, two are new."""

    settings_class = Settings
    settings: Settings
    num_classes = 8

    @property
    def spec(self) -> Spec:
        """What is measured."""
        found = {
            "auroc": Metric(
                "area under the ROC curve of detecting the new classes by entropy", "fraction", 1, 0
            )
        }
        for name, metric in calibration.MEASURES.items():
            text = f"{metric.description}; test images of known classes"
            found[name] = Metric(text, metric.unit, metric.best, metric.worst)
        for name in (NEW, *self.foreign):
            found |= detection.measures(name)
        return Spec(
            question="Does a posterior know an image of a class that it was never shown?",
            source="Hendrycks and Gimpel 2017; Neal et al. 2018",
            version=2,
            metrics=found,
            main_metric="auroc",
            validation_metric="nll",
            baseline="map",
            reference="deep_ensemble",
        )

    # ---- protocol

    def run(self, engine: Engine) -> Arrays:
        """Mean log-probabilities and mutual information of all test images and of foreign ones."""
        own = self.settings
        engine.stage("fit")
        method = engine.fit(self.problem(), Budget(own.epochs, own.batch_size, draws=own.num_train))
        val, sets = self.rows["val"], (self.test, *self.others())
        parts = ImageGroups([*map(ImageGroup, sets), ImageGroup(self.pictures.train[val])], *self.moments)
        prediction = engine.predict(method, parts, own.test_samples)
        average, form = prediction.average(), (len(sets), len(self.test))
        count = len(sets) * len(self.test)
        seen = metrics.restore(metrics.store(average[count:]))
        engine.log("nll", metrics.negative_log_likelihood(seen, self.pictures.train_labels[val]))
        information = bald(prediction)[:count].float().numpy()
        return {
            "log_probs": metrics.store(average[:count]).reshape(*form, -1),
            "information": information.reshape(form),
        }

    def given(self) -> Arrays:
        """The brightness of all images."""
        return {"brightness": brightness(self.test, *self.others())}

    def layouts(self) -> dict[str, Layout]:
        """Predictions of N test images, then of the foreign data sets, and test labels."""
        sets, n = 1 + len(self.foreign), self.num_test
        return {
            "log_probs": Layout("float16", (sets, n, self.num_classes), is_log_probs=True),
            "information": Layout(PREDICTED, (sets, n)),
            "brightness": Layout("float32", (sets, n)),
            "labels": Layout("uint8", (n,)),
        }

    # ---- scoring

    def uncertainties(self, arrays: Arrays) -> dict[str, dict[str, np.ndarray]]:
        """Known images, new classes and foreign data sets -> every uncertainty, and brightness."""
        values = [
            detection.uncertainties(log_probs, information) | {detection.BRIGHTNESS: bright}
            for log_probs, information, bright in zip(
                metrics.restore(arrays["log_probs"]), arrays["information"], arrays["brightness"], strict=True
            )
        ]
        is_new = arrays["labels"] >= self.num_classes
        of_test = {
            name: {u: of[rows] for u, of in values[0].items()}
            for name, rows in ((shift.KNOWN, ~is_new), (NEW, is_new))
        }
        return of_test | dict(zip(self.foreign, values[1:], strict=True))

    def score(self, arrays: Arrays) -> Metrics:
        """Detection of new classes and of foreign data sets; scores of known test images."""
        labels = arrays["labels"].astype(np.int64)
        is_known = labels < self.num_classes
        log_probs = metrics.restore(arrays["log_probs"][0])[is_known]
        found: Metrics = dict(calibration.measured(log_probs, labels[is_known]))
        known, *others = self.uncertainties(arrays).items()
        for name, values in others:
            pair = known[1][detection.BRIGHTNESS], values[detection.BRIGHTNESS]
            found |= detection.scores(name, known[1], values, pair)
        return {"auroc": found[f"auroc_{NEW}_entropy"]} | found

    def curves(self, arrays: Arrays) -> list[Row]:
        """Histograms of uncertainty."""
        found = self.uncertainties(arrays)
        is_spread = any(of["information"].any() for of in found.values())
        return shift.histograms(found, self.num_classes, is_spread)

    def figures(self, arrays: Arrays) -> dict[str, Any]:
        """Histograms of uncertainty."""
        return shift.histogram_charts(self.curves(arrays))
