"""Fidelity at full size: predictions on CIFAR-10 beside those of long Hamiltonian Monte Carlo chains.

Question: how far are a method's predictions on CIFAR-10 from those of the exact posterior of a real network?

Protocol: ResNet-20 with filter response normalisation and swish (16, 32 and 64 maps, 274,042 weights) under
the prior N(0, 5), a variance, on every weight; inputs less (0.49, 0.48, 0.44), over 0.2; no augmentation,
temperature 1, no validation set. One fit, then S weight samples on the 10,000 test images, whose
probabilities are averaged. They are compared with the mean probabilities of the chains by total variation,
the main metric, and by the share of images on which both name one class; labels give accuracy, NLL and
calibration error.

The reference is read when a run is scored, and is no array of the run: its source states no licence
(`bench/studies/hmc_predictions.py`, which holds it to a digest). Every score is still a function of the
arrays, with a constant in it. Without the reference no run begins.

The preset paper has the published budget of a single network, 500 epochs in batches of 80. The preset
standard is the protocol of a processor, and smaller: 10 epochs in batches of 128, which take a single network
less than an hour on one core. It has all images all the same, since the posterior of fewer images is another
one than that of the chains.

Source: Izmailov et al. 2021, What Are Bayesian Neural Network Posteriors Really Like?; Wilson et al. 2022,
Evaluating Approximate Inference in Bayesian Deep Learning (reference and metrics). Deviations: optimisers and
their rates are those of the methods here; initial weights are He's normal, not cut off.

What would mislead: only averaged predictions are compared, so that a method may be near for a wrong reason,
as two errors that cancel are. A fit that has not converged is far away whatever its posterior. The chains are
a reference and not the truth: they themselves vary, in predictions more than their number of draws suggests.
Two public documents state two priors, of variance 5 and 1/5, and two numbers of training images. What the
chains had is known from the competition's own notebook alone, so the last few hundredths of a distance may be
those of another posterior. Nearer to the chains is not better at predicting.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from bench import cifar, likelihoods, metrics, priors, resnet
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
    Spec,
    Task,
)
from bench.data import array_digest
from bench.settings import Count, Positive, settings
from bench.studies import calibration, fidelity_rows, hmc_predictions

NAMES: dict[str, dict[str, object]] = {"fidelity_cifar10": {"dataset": "cifar10"}}

PRESETS: dict[str, dict[str, object]] = {
    "smoke": {"num_train": 200, "channels": 2, "epochs": 1, "test_samples": 2},
    "paper": {"epochs": 500, "batch_size": 80, "test_samples": 50},
}


@settings
class Settings:
    """Settings of fidelity_cifar10."""

    dataset: Literal["cifar10"]
    """Images: fixed by the task's name."""
    num_train: Count = 50_000
    """Training images, at least 1: the first so many of CIFAR-10's order, or all if there are fewer. The
    paper's runs had 40,960."""
    prior_variance: Positive = 5.0
    """Variance of the prior of every weight, above 0. The competition states 5, the paper 0.2."""
    channels: Count = 16
    """Maps of the first stage, at least 1; the chains had 16."""
    epochs: Count = 10
    """Epochs, at least 1."""
    batch_size: Count = 128
    """Images per training step, at least 1."""
    test_samples: Count = 20
    """Weight samples S per prediction, at least 1."""


class FidelityCifar10(Task):
    """One fit, and its distance to the chains."""

    settings_class = Settings
    settings: Settings
    tuned_by = "total_variation"

    @property
    def spec(self) -> Spec:
        """What is measured."""
        found = {
            "total_variation": Metric(
                "distance of the averaged probabilities to those of the chains, mean over test images",
                "fraction",
                0,
                1,
            ),
            "agreement": Metric(
                "share of test images where the chains name the same class", "fraction", 1, 0
            ),
        }
        return Spec(
            question="How far are predictions on CIFAR-10 from those of a real network's exact posterior?",
            source="Izmailov et al. 2021; Wilson et al. 2022",
            version=1,
            metrics=found | {name: calibration.MEASURES[name] for name in ("nll", "accuracy", "ece")},
            main_metric="total_variation",
            min_seeds=1,
            baseline="map",
            reference="deep_ensemble",
        )

    # ---- data

    @cached_property
    def pictures(self) -> Arrays:
        """The data set, read once."""
        return cifar.load("cifar10", self.data_dir)

    def inputs(self, part: str) -> Tensor:
        """Images of the part train or test as the network takes them, `[N, 3, 32, 32]`."""
        images = self.pictures[f"{part}_inputs"][: self.settings.num_train if part == "train" else None]
        return hmc_predictions.standardised(images)

    def data_digest(self) -> str:
        """Of the data set and of the reference.

        Raises:
            DataError: If one of them is not there and cannot be had: before anything is trained.
        """
        return array_digest(self.pictures | {"chains": hmc_predictions.load(self.data_dir)})

    # ---- protocol

    def problem(self) -> Problem:
        """The first `num_train` training images; there is no validation set."""
        own, inputs = self.settings, self.inputs("train")
        labels = torch.from_numpy(self.pictures["train_labels"][: len(inputs)].astype(np.int64))
        return Problem(
            network=partial(resnet.resnet_frn_swish, 20, channels=own.channels),
            likelihood=likelihoods.Categorical(),
            prior=priors.normal(0, math.sqrt(own.prior_variance)),
            train=TensorDataset(inputs, labels),
            val=None,
            num_train=len(inputs),
        )

    def run(self, engine: Engine) -> Arrays:
        """Log-probabilities of the test images, averaged over the draws."""
        own = self.settings
        engine.stage("fit")
        method = engine.fit(self.problem(), Budget(own.epochs, own.batch_size))
        prediction = engine.predict(method, self.inputs("test"), own.test_samples)
        return {"log_probs": metrics.store(prediction.average())}

    def targets(self) -> Arrays:
        """Test labels `[N]`."""
        return {"labels": self.pictures["test_labels"]}

    def layouts(self) -> dict[str, Layout]:
        """Predictions of N test images, and their labels."""
        return {
            "log_probs": Layout("float16", ("N", 10), is_log_probs=True),
            "labels": Layout("uint8", ("N",)),
        }

    # ---- scoring

    def score(self, arrays: Arrays) -> Metrics:
        """Distance and agreement with the chains; accuracy, NLL and calibration error by the labels."""
        log_probs = metrics.restore(arrays["log_probs"])
        chains = np.log(hmc_predictions.load(self.data_dir).astype(np.float64))
        measured = calibration.measured(log_probs, arrays["labels"])
        return {
            "total_variation": metrics.total_variation(log_probs, chains),
            "agreement": metrics.agreement(log_probs, chains),
            **{name: measured[name] for name in ("nll", "accuracy", "ece")},
        }

    @classmethod
    def compare(cls, runs: Sequence[FinishedRun]) -> Comparison:
        """Runs beside published rows and beside what no posterior scores."""
        return fidelity_rows.compare(runs)
