"""Robustness to hyperparameters: how many random configurations learn to read photographs of eyes.

Question: how often does a posterior learn anything where nobody has tuned it?

Protocol: 86 configurations of optimiser, rate, its decay, batch size, samples per step, initial rho and
number of channels are drawn once and tried with every method. This task takes the number of a configuration,
from which it has batch size and channels; the rest are settings of the method, which the grid
docs/tasks/retinopathy_robustness.yaml gives:

    bench sweep --grid docs/tasks/retinopathy_robustness.yaml --threads 1

A run fits to the training eyes, keeps the epoch of least validation NLL, and reports the AUC on the test
eyes. One that diverges has no AUC, and is counted among those that learned nothing. `bench figures` counts
over all runs: AUC below 0.55 is nothing, within 0.02 of the best run of the study is good.

Source: Farquhar 2022, thesis "Understanding Approximation" (docs/sources.md), section 4.3 (Fig. 4.5a) and
appendix B.3. Deviations: the preset standard has 1,000 synthetic photographs of 64 pixels, a VGG of 6
convolutions and 30 epochs, where the source has Kaggle's at 256 pixels, VGG-16 of 16 channels and 150 epochs
(preset paper, `--task.dataset retinopathy`); the epoch is chosen by validation NLL, since the source's best
accuracy at any epoch is noisier; the draws are ours, since the source's are not known.

What would mislead: a share of random configurations is a statement on the lists they are drawn from. Both
methods have the same channels, so the same number of parameters. A grid that is not finished compares only
the configurations that both methods have.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from bench import likelihoods, metrics, networks, priors
from bench.contract import (
    Arrays,
    Budget,
    Comparison,
    Engine,
    FinishedRun,
    Metric,
    Metrics,
    Problem,
    Spec,
    Undefined,
)
from bench.settings import Count, settings
from bench.studies import robustness
from bench.studies.eyes import PhotographTask

NAMES: dict[str, dict[str, object]] = {"retinopathy_robustness": {}}

PRESETS: dict[str, dict[str, object]] = {
    "smoke": {"images": 100, "size": 32, "epochs": 1, "test_samples": 2},
    "paper": {"size": 256, "network": "vgg16", "epochs": 150},
}

NETWORKS = {"small_vgg": networks.small_vgg, "vgg16": networks.vgg16}
CHANNELS = 16
"""Feature maps of the first block at width 1."""


@settings
class Settings:
    """Settings of the study of robustness."""

    configuration: Annotated[int, Field(ge=0, lt=robustness.COUNT)] = 0
    """Number of the configuration, from 0 to 85."""
    dataset: Literal["retinopathy_synthetic", "retinopathy"] = "retinopathy_synthetic"
    """Photographs; published: Kaggle's, retinopathy."""
    size: Annotated[int, Field(ge=16)] = 64
    """Side of the prepared photographs in pixels, at least 16; published: 256."""
    preprocess: Literal["resize", "contrast"] = "resize"
    """resize cuts out the fundus and scales it; contrast takes a blurred copy off as well."""
    images: Annotated[int, Field(ge=50)] = 1000
    """Synthetic eyes in all parts together, at least 50."""
    network: Literal["small_vgg", "vgg16"] = "small_vgg"
    """small_vgg has 6 convolutions, vgg16 13."""
    epochs: Count = 30
    """Epochs, at least 1, on top of the one in which the means are trained alone."""
    test_samples: Count = 16
    """Weight samples S per prediction, at least 1."""


class RetinopathyRobustness(PhotographTask):
    """One configuration of the study."""

    settings_class = Settings
    settings: Settings

    @property
    def configuration(self) -> robustness.Configuration:
        """What this run is trained with."""
        return robustness.CONFIGURATIONS[self.settings.configuration]

    @property
    def spec(self) -> Spec:
        """What is measured."""
        return Spec(
            question="How often does a posterior learn anything where nobody has tuned it?",
            source="Farquhar 2022, section 4.3 and appendix B.3",
            version=1,
            metrics={
                "auc": Metric("area under the ROC curve on the test eyes", "fraction", 1, 0, True),
                "learned": Metric(f"1 if the AUC is at least {robustness.LEARNED}", "fraction", 1, 0),
                "nll": Metric("mean of -log p(label) on the test eyes", "nats", 0, np.inf, True),
            },
            main_metric="learned",
            ranked=False,
        )

    # ---- protocol

    def problem(self) -> Problem:
        """All training and validation eyes; as many channels as the configuration has."""
        train, of = self.eyes("train"), self.configuration
        return Problem(
            network=partial(NETWORKS[self.settings.network], max(1, round(CHANNELS * of.width))),
            likelihood=likelihoods.Bernoulli(),
            prior=priors.normal(0, 1),
            train=train,
            val=self.eyes("val"),
            num_train=len(train),
        )

    def run(self, engine: Engine) -> Arrays:
        """Probability of sick of every test eye; NaN where the fit diverged."""
        own, problem = self.settings, self.problem()
        engine.stage("fit")
        budget = Budget(own.epochs, self.configuration.batch_size, patience=own.epochs)
        (method,) = engine.fit_many([problem], budget)
        eyes = self.eyes("test")
        if method.diverged is not None:
            return {"probabilities": np.full(len(eyes), np.nan, np.float32)}
        average = engine.predict(method, eyes, own.test_samples).average()
        return {"probabilities": average[:, 1].double().exp().float().numpy()}

    def targets(self) -> Arrays:
        """Test labels `[N]`, 1 is sick."""
        return {"labels": self.own_data("test")[1].astype(np.uint8)}

    # ---- scoring

    def score(self, arrays: Arrays) -> Metrics:
        """AUC and NLL on the test eyes, and whether the run learned anything."""
        probabilities, labels = arrays["probabilities"].astype(float), arrays["labels"]
        if np.isnan(probabilities).any():
            reason = Undefined("the fit diverged")
            return {"auc": reason, "learned": 0.0, "nll": reason}
        (auc,) = metrics.referral_auc(labels, probabilities, np.zeros(len(labels)), [0])
        of_label = np.where(labels == 1, probabilities, 1 - probabilities).clip(1e-12)
        return {
            "auc": auc if np.isfinite(auc) else Undefined("the test eyes have one class"),
            "learned": float(auc >= robustness.LEARNED),
            "nll": float(-np.log(of_label).mean()),
        }

    @classmethod
    def compare(cls, runs: Sequence[FinishedRun]) -> Comparison:
        """How many configurations learned nothing, how many are good, and which method is more robust."""
        return robustness.compare(runs)
