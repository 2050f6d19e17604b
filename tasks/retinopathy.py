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
from contextlib import suppress
from functools import cached_property, partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from bench import augmentation, likelihoods, networks, places, priors, resnet
from bench.contract import (
    Arrays,
    Budget,
    Comparison,
    Engine,
    FinishedRun,
    Layout,
    Metrics,
    Problem,
    Row,
    Spec,
    Stored,
    Task,
)
from bench.data import array_digest
from bench.settings import Count, settings
from bench.studies import referral, referral_comparison

if TYPE_CHECKING:
    from bench.photographs import Photographs

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
SICK = 2
"""The lowest severity of an eye that is called sick."""
SEVERE = 3
"""The lowest severity of the sick eyes on which the severity shift is tested."""
ABROAD = "retinopathy_aptos"
"""What the country shift is tested on."""
MEASURED = 1000
"""Training eyes, evenly spread, whose pixels give mean and standard deviation of the channels."""


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


class Selection:
    """Some of the prepared photographs: their images `[N, H, W, 3]`, uint8, read when they are asked for.

    Args:
        photographs: All.
        rows: Numbers of those that are meant, `[N]`.
    """

    def __init__(self, photographs: Photographs, rows: np.ndarray) -> None:
        self.photographs, self.rows = photographs, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> np.ndarray:
        return self.photographs.images[self.rows[index]]


class Eyes(Stored):
    """Photographs of eyes with their labels, augmented in training as in Farquhar 2022, B.3.

    Args:
        images: Gives uint8 `[B, H, W, 3]` for B row numbers.
        labels: 1 is sick, `[N]`.
        mean: Of the channels, over the training eyes, `[3]`.
        std: Their standard deviation, `[3]`.
    """

    num_uniforms = augmentation.NUM_UNIFORMS

    def __init__(self, images: Any, labels: np.ndarray, mean: Tensor, std: Tensor) -> None:
        self.images, self.labels = images, torch.from_numpy(labels)
        self.mean, self.std = mean, std

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Images uint8 `[B, 3, H, W]` and labels `[B]`."""
        pixels = torch.from_numpy(np.ascontiguousarray(self.images[rows.numpy()]))
        return pixels.permute(0, 3, 1, 2), self.labels[rows]

    def finish(self, inputs: Tensor, uniforms: Tensor | None) -> Tensor:
        """Normalised by channel, `[B, 3, H, W]`; turned, flipped, shifted and cropped by `uniforms`."""
        channels = self.mean.to(inputs.device), self.std.to(inputs.device)
        return augmentation.photographs(inputs, uniforms, *channels)


class Retinopathy(Task):
    """Photographs of eyes, and which of them an expert should see."""

    settings_class = Settings
    settings: Settings

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

    # ---- data

    def _prepared(self, dataset: str) -> Photographs:
        """Prepared photographs; synthetic ones are made and prepared unless as many are there."""
        from bench import photographs, preparing  # here, since to score a run takes none of them

        own = self.settings
        size = own.size, own.preprocess
        if dataset != "retinopathy_synthetic":
            return photographs.prepared(dataset, self.data_dir, *size)
        with suppress(places.NotFound):
            found = photographs.prepared(dataset, self.data_dir, *size)
            if len(found.names) + len(found.bad) == own.images:
                return found
        from bench import fundus

        made = fundus.find_or_make(self.data_dir, own.images, own.size, seed=0)
        return preparing.prepare(dataset, made, made, *size)

    @cached_property
    def photographs(self) -> Photographs:
        """Those trained on."""
        return self._prepared(self.settings.dataset)

    @cached_property
    def tested(self) -> Photographs:
        """Those tested on."""
        return self._prepared(ABROAD) if self.settings.shift == "country" else self.photographs

    def rows(self, part: str) -> np.ndarray:
        """Numbers of the photographs of the part train, val or test."""
        source, shift = self.tested if part == "test" else self.photographs, self.settings.shift
        if part == "test" and shift == "country":
            return np.arange(len(source.levels))
        is_in = source.parts == part
        if shift == "severity":
            mild, severe = source.levels < SICK, source.levels >= SEVERE
            is_in &= mild | severe if part == "test" else ~severe
        return np.flatnonzero(is_in)

    def own_data(self, part: str) -> tuple[Any, np.ndarray]:
        """Photographs uint8 `[N, H, W, 3]`, read when indexed, and labels `[N]` of train, val or test."""
        source, rows = self.tested if part == "test" else self.photographs, self.rows(part)
        return Selection(source, rows), (source.levels[rows] >= SICK).astype(np.int64)

    def data_digest(self) -> str:
        """Digest of the photographs' own digests, and of the rows of every part."""
        digests = {"trained": self.photographs.digest, "tested": self.tested.digest}
        arrays = {name: np.frombuffer(bytes.fromhex(d), np.uint8) for name, d in digests.items()}
        return array_digest(arrays | {part: self.rows(part) for part in ("train", "val", "test")})

    def eyes(self, part: str) -> Eyes:
        """A part, normalised by the training part's channels."""
        images, labels = self.own_data(part)
        return Eyes(images, labels, *self._channels)

    @cached_property
    def _channels(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of each channel, `[3]`, of MEASURED training eyes; 1 is white."""
        images, _ = self.own_data("train")
        some = np.unique(np.linspace(0, len(images) - 1, MEASURED).round().astype(int))
        counts = np.zeros((3, 256))
        for row in some:
            counts += [np.bincount(c.ravel(), minlength=256) for c in np.moveaxis(images[row], -1, 0)]
        shares, levels = counts / counts.sum(1, keepdims=True), np.arange(256) / 255
        mean = shares @ levels
        std = np.sqrt(shares @ levels**2 - mean**2).clip(min=1 / 255)
        return torch.from_numpy(mean).float(), torch.from_numpy(std).float()

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
        """Readings of the test eyes, and whose eyes they are."""
        own = self.settings
        engine.stage("fit")
        problem = self.problem()
        method = engine.fit(problem, Budget(own.epochs, own.batch_size, own.patience))
        seen = engine.predict(method, problem.val, own.test_samples)
        engine.log("nll", -float(seen.log_score(problem.val.labels).mean()))
        prediction = engine.predict(method, self.eyes("test"), own.test_samples)
        return referral.stored(prediction, self.tested.patients[self.rows("test")])

    def targets(self) -> Arrays:
        """Test labels `[N]`, 1 is sick."""
        return {"labels": self.own_data("test")[1].astype(np.uint8)}

    def layouts(self) -> dict[str, Layout]:
        """Readings, patients and labels."""
        return referral.layouts()

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
