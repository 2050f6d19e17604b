"""Single-headed continual learning: five pairs of classes in sequence, one ten-way head.

Question: after learning classes {0, 1}, then {2, 3}, ... {8, 9}, each pair from its own data alone and with
the last posterior as prior, does one network still know all ten?

Protocol: five steps. All ten classes always compete, in training and in test; no task label is given at any
time; no example of an earlier step is kept. The prior of step t is the posterior of step t - 1 and training
starts there; the first prior is N(0, 1). The last 10% of each class of the training data are set aside for
validation; the test set is the published one, whole. Inputs are in [0, 1].

With `coreset` some examples of every step are taken out of its training data and kept. After every step a
copy of the posterior is trained on all that was kept so far, predicts, and is thrown away: the next step goes
on from the posterior. With `coreset_only` every step's prior is N(0, 1), while training still starts at the
last posterior.

Source: Farquhar 2022, thesis "Understanding Approximation" (docs/sources.md), section 5.1 (Figs 5.2 and 5.3);
Nguyen et al. 2018 for network, training and coresets.

What would mislead: a head per task, or class labels at test time, turn five two-way problems into one easy
score (`tasks/split_mnist_contrast.py` shows it); 20% at the end is both total forgetting (the last pair is
known) and learning nothing after the first step, so the matrix A[t, s] is shown beside the average, and
`minimum_learning_accuracy` tells the two apart; a coreset can do all the work, so its score is no score of a
posterior, and the prior of its copy, on which the source is silent, decides the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch

from bench import data, metrics
from bench.contract import Arrays, Budget, Engine, Layout, Metrics, Spec
from bench.errors import UsageError
from bench.settings import settings
from bench.studies import continual
from bench.studies.continual import NUM_CLASSES, SPLIT

NAMES: dict[str, dict[str, object]] = {
    "split_mnist": {"dataset": "mnist"},
    "split_fashion_mnist": {"dataset": "fashion_mnist"},
    "split_digits": {"dataset": "digits"},
}

PRESETS: dict[str, dict[str, object]] = {
    "smoke": {"epochs": 1, "test_samples": 4},
    "paper": {"epochs": 120, "batch_size": None},
}


@settings
class Scenario(continual.ImageSettings):
    """What is learnt in which order."""

    order: Literal["sequential", "joint"] = "sequential"
    """sequential is the task; joint trains on all classes at once, the upper bound."""


@settings
class Settings(continual.StepSettings, Scenario):
    """Settings of single-headed split tasks."""


class SplitMNIST(continual.ContinualTask):
    """Five pairs of classes in sequence, one head."""

    settings_class = Settings
    settings: Settings

    def __init__(self, settings: Settings, data_dir: str | None = None) -> None:
        super().__init__(settings, data_dir)
        if settings.order == "joint" and settings.coreset != "none":
            raise UsageError(f"--task.coreset {settings.coreset}: joint training has all data and keeps none")

    @property
    def spec(self) -> Spec:
        """What is measured."""
        joint = self.settings.order == "joint"
        return Spec(
            question="Does sequential inference keep what earlier steps taught?",
            source="Farquhar 2022, section 5.1",
            version=1,
            metrics=continual.measures(joint),
            main_metric="average_accuracy",
            requires=frozenset() if joint else frozenset({"sequential"}),
            ranked=not joint,
            validation_metric="average_accuracy",
            baseline=None if joint else "map",
            reference=None if joint else "vgr",
        )

    # ---- protocol

    def steps(self) -> Sequence[Sequence[int]]:
        """The classes of each training step."""
        return (tuple(range(NUM_CLASSES)),) if self.settings.order == "joint" else SPLIT

    def run(self, engine: Engine) -> Arrays:
        """Class predictions on the whole test set after every step, log-probabilities after the last."""
        own, steps = self.settings, len(self.steps())
        predicted, seen, kept = [], [], []
        budget = Budget(own.epochs, own.batch_size)
        for step, problem, method in continual.sequence(engine, self.problem, steps, budget, own):
            if step == 0:
                first = method
            predictor = method
            if own.coreset != "none":
                kept.append(self.examples(step, "coreset"))
                engine.stage(f"step {step + 1}, coresets", step + 1, steps)
                predictor = continual.rehearse(engine, method, problem, kept, own)
            seen.append(self.examples(step, "val"))
            inputs = torch.cat([self.images.test_inputs, *(val.tensors[0] for val in seen)])
            log_probs = engine.predict(predictor, inputs, own.test_samples).average()
            log_probs, *held_out = log_probs.split([len(self.images.test_inputs), *map(len, seen)])
            right = [
                (p.argmax(1) == val.tensors[1]).double().mean() for p, val in zip(held_out, seen, strict=True)
            ]
            engine.log("average_accuracy", float(torch.stack(right).mean()), step + 1)
            predicted.append(log_probs.argmax(1))
        arrays = {"log_probs": metrics.store(log_probs)}
        if steps > 1:
            arrays["predicted"] = torch.stack(predicted[:-1]).byte().numpy()
            # After all else, so that it shifts the draws of no other prediction.
            engine.stage("after step 1", steps, steps)
            inputs = self.examples(1, "train").tensors[0]
            upcoming = engine.predict(first, inputs, own.test_samples).average()
            continual.log_next_task_entropy(engine, upcoming)
        return arrays

    def layouts(self) -> dict[str, Layout]:
        """Predictions for N test images after the last step, classes after the others, and labels."""
        n, earlier = data.SOURCES[self.settings.dataset].test, len(self.steps()) - 1
        found = {
            "log_probs": Layout("float16", (n, NUM_CLASSES), is_log_probs=True),
            "labels": Layout("uint8", (n,)),
        }
        return found | ({"predicted": Layout("uint8", (earlier, n))} if earlier else {})

    # ---- scoring

    @staticmethod
    def accuracy_matrix(arrays: Arrays) -> np.ndarray:
        """A[t, s], accuracy after step t on pair s, `[T, 5]`; one row if training was joint."""
        labels = arrays["labels"]
        last = metrics.restore(arrays["log_probs"]).argmax(1)
        predicted = [*arrays.get("predicted", []), last]
        pairs = [np.isin(labels, pair) for pair in SPLIT]
        return np.array([[metrics.accuracy(p[rows], labels[rows]) for rows in pairs] for p in predicted])

    def score(self, arrays: Arrays) -> Metrics:
        """Accuracies from the matrix A[t, s], and the NLL after the last step."""
        matrix = self.accuracy_matrix(arrays)
        labels = arrays["labels"]
        log_probs = metrics.restore(arrays["log_probs"])
        nlls = [
            metrics.negative_log_likelihood(log_probs[rows], labels[rows])
            for rows in (np.isin(labels, pair) for pair in SPLIT)
        ]
        return continual.scores(matrix, nlls)

    def losses(self, arrays: Arrays) -> np.ndarray:
        """Whether each test image is right in the end `[N]`, weighted so that every pair counts alike."""
        labels = arrays["labels"]
        pair = np.argmax([np.isin(labels, pair) for pair in SPLIT], axis=0)
        right = metrics.restore(arrays["log_probs"]).argmax(1) == labels
        return right * len(labels) / (len(SPLIT) * np.bincount(pair)[pair])
