"""Diabetic retinopathy: a model reads photographs of eyes, and sends those that it is unsure of to an expert.

Question: does a posterior know which photographs of eyes it reads wrongly?

Protocol: one fit to the training eyes, stopped early by the validation eyes; then every test eye is read. An
eye is sick if its severity, graded 0 to 4, is above 1. Parts of the data are the published ones, and no
patient has eyes in two of them. A reading is the probability of sick, averaged over the posterior's samples.
The most uncertain 0, 10, 20, 30 and 50% are referred, and the AUC is that of the rest: by the entropy of the
mean prediction, the mutual information of label and weights, the standard deviation of the probability over
the samples, and by a baseline that needs no posterior, how close the predicted log-odds are to those of the
probability 1/11 from which on an eye is sent to a doctor. That threshold belongs to a price: a sick eye that
is missed costs as much as 10 false alarms. Standard errors are those of 100 resamples of the test patients,
each ranked and referred anew. Unit normal prior; the imbalance of the classes is left as it is.

Severity shift: trained and validated on eyes of severity 0 to 2, tested on those of severity 3 and 4 next to
all healthy test eyes (severity 0 and 1); test eyes of severity 2 are left out. Country shift: trained and
validated on Kaggle's eyes (USA), tested on all graded eyes of APTOS 2019 (India), whatever their part there.

Source: Farquhar 2022, thesis "Understanding Approximation" (docs/sources.md), sections 4.3 and B.3; shifts
after Band et al. 2021, "Benchmarking Bayesian Deep Learning on Diabetic Retinopathy Detection Tasks".
Deviations: the source's parts (44,594, 7,026 and 10,000 eyes) fit no public ones, so these are Kaggle's own;
entropy, standard deviation and baseline stand beside the mutual information. Band et al. test the severity
shift on severity 3 and 4 alone, where there is no AUC, and set a fifth of APTOS aside for validation.

What would mislead: referring middling scores can raise the AUC without any posterior, so read the mutual
information against the threshold (`information_over_threshold`) and against the entropy, which refers in the
order of closeness to p = 1/2 and needs no posterior either (`information_over_entropy`). Referral changes the
share of sick among the rest, and accuracy with it; the AUC sees neither that share nor calibration. Under the
severity shift the sick are sicker and may be easier to tell. Grades are noisy: no reader has AUC 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field

from bench import likelihoods, networks, priors, resnet
from bench.contract import (
    Arrays,
    Budget,
    Comparison,
    Engine,
    FinishedRun,
    Layout,
    Method,
    Metrics,
    Problem,
    Row,
    Spec,
)
from bench.data import array_digest
from bench.fresh import Fresh
from bench.settings import Count, settings
from bench.studies import referral, referral_comparison
from bench.studies.eyes import FreshEyes, PhotographTask

NAMES: dict[str, dict[str, object]] = {
    "retinopathy": {"dataset": "retinopathy", "shift": "none"},
    "retinopathy_synthetic": {"dataset": "retinopathy_synthetic", "shift": "none"},
    "retinopathy_mnist": {"dataset": "retinamnist", "shift": "none"},
    "retinopathy_aptos": {"dataset": "retinopathy_aptos", "shift": "none"},
    "retinopathy_severity_shift": {"dataset": "retinopathy", "shift": "severity"},
    "retinopathy_country_shift": {"dataset": "retinopathy", "shift": "country"},
    "retinopathy_synthetic_severity_shift": {"dataset": "retinopathy_synthetic", "shift": "severity"},
}

PRESETS: dict[str, dict[str, object]] = {
    "smoke": {"images": 200, "channels": 4, "epochs": 1, "test_samples": 2},
    "paper": {"size": 512, "network": "vgg16", "channels": 64, "epochs": 300, "batch_size": 16},
}

NETWORKS: dict[str, Callable[..., torch.nn.Module]] = {
    "small_vgg": networks.small_vgg,
    "vgg16": networks.vgg16,
    "resnet50": resnet.resnet50_frn,
}


@settings
class Settings:
    """Settings of diabetic retinopathy."""

    dataset: Literal["retinopathy", "retinopathy_synthetic", "retinopathy_aptos", "retinamnist"]
    """Photographs: fixed by the task's name."""
    shift: Literal["none", "severity", "country"]
    """How test eyes differ from training eyes: fixed by the task's name."""
    size: Annotated[int, Field(ge=16)] = 64
    """Side of the prepared photographs in pixels, at least 16; published: 512."""
    preprocess: Literal["resize", "contrast"] = "resize"
    """resize cuts out the fundus and scales it; contrast takes a blurred copy off as well."""
    images: Annotated[int, Field(ge=50)] = 4000
    """Synthetic eyes in all parts together, at least 50; other data have as many as there are."""
    network: Literal["small_vgg", "vgg16", "resnet50"] = "small_vgg"
    """small_vgg has 6 convolutions, vgg16 13; resnet50 has filter response normalisation."""
    channels: Count = 16
    """Feature maps of the first block, at least 1, at one trained parameter per weight; else fewer."""
    epochs: Count = 40
    """Epochs at most, at least 1."""
    patience: Count | None = 15
    """Epochs without a better validation NLL after which the fit stops; null trains to the end."""
    batch_size: Count = 32
    """Eyes per training step, at least 1."""
    test_samples: Count = 16
    """Weight samples S per prediction, at least 1."""


class Retinopathy(PhotographTask):
    """Photographs of eyes, and which of them an expert should see."""

    settings_class = Settings
    settings: Settings

    @property
    def shift(self) -> str:  # type: ignore[override]
        """How test eyes differ from training eyes."""
        return self.settings.shift

    @property
    def spec(self) -> Spec:
        """What is measured."""
        return Spec(
            question="Does a posterior know which photographs of eyes it reads wrongly?",
            source="Farquhar 2022, sections 4.3 and B.3",
            version=1,
            metrics=referral.measures(),
            main_metric="nll",
            validation_metric="nll",
            baseline="map",
            reference="deep_ensemble",
        )

    # ---- protocol

    def problem(self) -> Problem:
        """All training and validation eyes; methods are compared at equal numbers of parameters."""
        train = self.eyes("train")
        return Problem(
            network=partial(NETWORKS[self.settings.network], self.settings.channels),
            likelihood=likelihoods.Bernoulli(),
            prior=priors.normal(0, 1),
            train=train,
            val=self.eyes("val"),
            num_train=len(train),
            equal_parameters=True,
        )

    def run(self, engine: Engine) -> Arrays:
        """Readings of the test eyes."""
        own = self.settings
        engine.stage("fit")
        method = engine.fit(self.problem(), Budget(own.epochs, own.batch_size, own.patience))
        val = self.eyes("val")
        seen = engine.predict(method, val, own.test_samples)
        engine.log("nll", -float(seen.log_score(val.labels).mean()))
        prediction = engine.predict(method, self.eyes("test"), own.test_samples)
        return referral.stored(prediction)

    def targets(self) -> Arrays:
        """Test labels `[N]`, 1 is sick."""
        return {"labels": self.own_data("test")[1].astype(np.uint8)}

    def given(self) -> Arrays:
        """Whose the test eyes are, `[N]`, a number per patient."""
        patients = np.unique(self.tested.patients[self.rows("test")], return_inverse=True)[1]
        return {"patients": patients.astype(np.int32)}

    def layouts(self) -> dict[str, Layout]:
        """Readings, patients and labels."""
        return referral.layouts()

    def fresh(self) -> Fresh | None:
        """Other synthetic eyes; real ones are as many as there are."""
        own = self.settings
        is_drawn = own.dataset == "retinopathy_synthetic" and own.shift == "none"
        return FreshReadings(self) if is_drawn else None

    # ---- scoring

    def readings(self, arrays: Arrays) -> referral.Readings:
        """What the run read; kept, since scores, curves and figures ask for the same resamples."""
        key = array_digest(arrays)
        if getattr(self, "_read", (None,))[0] != key:
            self._read = key, referral.Readings.of(arrays)
        return self._read[1]

    def score(self, arrays: Arrays) -> Metrics:
        """NLL, AUC under referral, calibration, cost; with standard errors."""
        return referral.scores(self.readings(arrays))

    def losses(self, arrays: Arrays) -> np.ndarray:
        """-log p(label) of every test eye, in nats, `[N]`."""
        return self.readings(arrays).losses

    def curves(self, arrays: Arrays) -> list[Row]:
        """Referral curves, their errors and negative controls; calibration; ROC."""
        return referral.curves(self.readings(arrays))

    def figures(self, arrays: Arrays) -> dict[str, Any]:
        """Referral, calibration and ROC curves."""
        return referral.charts(self.readings(arrays))

    @classmethod
    def compare(cls, runs: Sequence[FinishedRun]) -> Comparison:
        """Referral curves over the seeds, and the claims of the source's Table 4.1."""
        return referral_comparison.compare(runs)


class FreshReadings(FreshEyes):
    """Readings of other synthetic eyes than the task's own."""

    task: Retinopathy

    @property
    def layouts(self) -> dict[str, Layout]:
        """Those of a run's readings."""
        return {name: of for name, of in self.task.layouts().items() if name not in ("labels", "patients")}

    def predict(self, engine: Engine, method: Method, inputs: Arrays) -> Arrays:
        """Readings, as a run keeps them."""
        images = inputs["images"]
        eyes = self.task.normalised(images, np.zeros(len(images), np.int64))
        return referral.stored(engine.predict(method, eyes, self.task.settings.test_samples))

    def losses(self, arrays: Arrays) -> np.ndarray:
        """-log p(label) of every eye, in nats."""
        return self.task.losses(arrays)
