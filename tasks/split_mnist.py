"""Single-headed continual learning: five pairs of classes in sequence, one ten-way head.

Question: after learning classes {0, 1}, then {2, 3}, ... {8, 9}, each pair from its own data alone and with
the last posterior as prior, does one network still know all ten?

Protocol: five steps. All ten classes always compete, in training and in test; no task label is given at any
time; no example of an earlier step is kept. The prior of step t is the posterior of step t - 1 and training
starts there; the first prior is N(0, 1). The last 10% of each class of the training data are set aside for
validation; the test set is the published one, whole. Inputs are in [0, 1].

Source: thesis 004, section 5.1 (Figs 5.2 and 5.3); Nguyen et al. 2018 for network and training.

What would mislead: a head per task, or class labels at test time, turn five two-way problems into one easy
score; 20% at the end is both total forgetting (the last pair is known) and learning nothing after the first
step, so the matrix A[t, s] is shown beside the average, and `minimum_learning_accuracy` tells the two apart.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import TensorDataset

from bench import data, figures, likelihoods, metrics, networks, priors
from bench.contract import Arrays, Budget, Engine, Metric, Metrics, Problem, Row, Spec, Task, Undefined
from bench.settings import Count, settings

NAMES: dict[str, dict[str, object]] = {
    "split_mnist": {"dataset": "mnist"},
    "split_fashion_mnist": {"dataset": "fashion_mnist"},
    "split_digits": {"dataset": "digits"},
}

PRESETS: dict[str, dict[str, object]] = {
    "smoke": {"epochs": 1, "test_samples": 4},
    "paper": {"epochs": 120, "batch_size": None},
}

NUM_CLASSES = 10
SPLIT = ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9))


@settings
class Settings:
    """Settings of single-headed split tasks."""

    dataset: Literal["mnist", "fashion_mnist", "digits"]
    """Images: fixed by the task's name."""
    order: Literal["sequential", "joint"] = "sequential"
    """sequential is the task; joint trains on all classes at once, the upper bound."""
    hidden: Count = 256
    """Units in each of the two hidden layers, at least 1."""
    epochs: Count = 10
    """Epochs per step, at least 1."""
    batch_size: Count | None = 128
    """Examples per training step, at least 1; null is full batch."""
    test_samples: Count = 100
    """Weight samples S per prediction, at least 1."""


class SplitMNIST(Task):
    """Five pairs of classes in sequence, one head."""

    settings_class = Settings
    settings: Settings

    @property
    def spec(self) -> Spec:
        """What is measured."""
        joint = self.settings.order == "joint"
        return Spec(
            question="Does sequential inference keep what earlier steps taught?",
            source="thesis 004, section 5.1",
            version=1,
            metrics={
                "average_accuracy": Metric(
                    "mean over the five pairs of accuracy after the last step", "fraction", 1, 0
                ),
                "learning_accuracy": Metric("mean of A[t, t]", "fraction", 1, 0, may_be_undefined=joint),
                "minimum_learning_accuracy": Metric(
                    "least A[t, t]", "fraction", 1, 0, may_be_undefined=joint
                ),
                "forgetting": Metric(
                    "mean over earlier pairs of best past accuracy minus last",
                    "fraction",
                    -1,
                    1,
                    may_be_undefined=joint,
                ),
                "backward_transfer": Metric(
                    "mean over earlier pairs of last accuracy minus A[t, t]",
                    "fraction",
                    1,
                    -1,
                    may_be_undefined=joint,
                ),
                "average_nll": Metric(
                    "mean over the pairs of -log p(label) after the last step", "nats", 0, np.inf
                ),
            },
            main_metric="average_accuracy",
            requires=frozenset() if joint else frozenset({"sequential"}),
            ranked=not joint,
            validation_metric="average_accuracy",
        )

    # ---- data

    @property
    def images(self) -> data.Images:
        """The data set, read once."""
        if not hasattr(self, "_images"):
            self._images = data.load(self.settings.dataset, self.data_dir)
        return self._images

    def data_digest(self) -> str:
        """Digest of the raw images and labels."""
        return self.images.digest

    def subset(self, classes: tuple[int, ...]) -> tuple[TensorDataset, TensorDataset]:
        """Training and validation examples of some classes; validation is the last 10% of each class."""
        labels = self.images.train_labels
        train, val = [], []
        for c in classes:
            rows = (labels == c).nonzero().squeeze(1)
            cut = len(rows) - len(rows) // 10
            train.append(rows[:cut])
            val.append(rows[cut:])
        index = [torch.cat(rows).sort().values for rows in (train, val)]
        inputs = self.images.train_inputs
        return TensorDataset(inputs[index[0]], labels[index[0]]), TensorDataset(
            inputs[index[1]], labels[index[1]]
        )

    # ---- protocol

    def steps(self) -> tuple[tuple[int, ...], ...]:
        """The classes of each training step."""
        return (tuple(range(NUM_CLASSES)),) if self.settings.order == "joint" else SPLIT

    def problem(self, step: int = 0, prior: Any = None) -> Problem:
        """The problem of a step; its prior is N(0, 1) unless one is given."""
        train, val = self.subset(self.steps()[step])
        units = self.settings.hidden
        pixels = self.images.train_inputs[0].numel()
        network = partial(networks.mlp, pixels, NUM_CLASSES, (units, units))
        prior = prior or priors.normal(0, 1)
        return Problem(network, likelihoods.Categorical(), prior, train, val, len(train))

    def run(self, engine: Engine) -> Arrays:
        """Class predictions on the whole test set after every step, log-probabilities after the last."""
        budget = Budget(self.settings.epochs, self.settings.batch_size)
        samples = self.settings.test_samples
        steps = self.steps()
        method, prior, predicted, seen = None, None, [], []
        for step, classes in enumerate(steps):
            engine.stage(f"step {step + 1}", step + 1, len(steps))
            method = engine.fit(self.problem(step, prior), budget, start=method)
            prior = method.as_prior() if step + 1 < len(steps) else None
            seen.append(self.subset(classes)[1])
            inputs = torch.cat([self.images.test_inputs, *(val.tensors[0] for val in seen)])
            log_probs = engine.predict(method, inputs, samples).average()
            log_probs, *held_out = log_probs.split([len(self.images.test_inputs), *map(len, seen)])
            right = [
                (p.argmax(1) == val.tensors[1]).double().mean() for p, val in zip(held_out, seen, strict=True)
            ]
            engine.log("average_accuracy", float(torch.stack(right).mean()), step + 1)
            predicted.append(log_probs.argmax(1))
        arrays = {"log_probs": metrics.store(log_probs)}
        if len(steps) > 1:
            arrays["predicted"] = torch.stack(predicted[:-1]).byte().numpy()
        return arrays

    def targets(self) -> Arrays:
        """Test labels `[N]`."""
        return {"labels": self.images.test_labels.byte().numpy()}

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
        scores: Metrics = {"average_accuracy": float(matrix[-1].mean()), "average_nll": float(np.mean(nlls))}
        if len(matrix) == 1:
            reason = Undefined("joint training has one step")
            names = ("learning_accuracy", "minimum_learning_accuracy", "forgetting", "backward_transfer")
            return scores | dict.fromkeys(names, reason)
        diagonal = np.diag(matrix)
        best_past = np.array([matrix[s:-1, s].max() for s in range(len(SPLIT) - 1)])
        return scores | {
            "learning_accuracy": float(diagonal.mean()),
            "minimum_learning_accuracy": float(diagonal.min()),
            "forgetting": float((best_past - matrix[-1, :-1]).mean()),
            "backward_transfer": float((matrix[-1, :-1] - diagonal[:-1]).mean()),
        }

    def curves(self, arrays: Arrays) -> list[Row]:
        """A[t, s] by step and pair, and the average over the pairs seen so far."""
        matrix = self.accuracy_matrix(arrays)
        joint = len(matrix) == 1
        rows = []
        for t, accuracies in enumerate(matrix, 1):
            rows += [Row("accuracy", f"pair {s}", t, float(a)) for s, a in enumerate(accuracies, 1)]
            rows.append(Row("accuracy", "seen pairs", t, float(accuracies[: 5 if joint else t].mean())))
        return rows

    def figures(self, arrays: Arrays) -> dict[str, Any]:
        """The matrix A[t, s], and accuracy on the pairs seen so far against the step."""
        matrix = self.accuracy_matrix(arrays)
        heat_map = figures.heat_map(matrix, "Test accuracy A[t, s]", "after step t", "on pair s", "accuracy")
        seen = [row for row in self.curves(arrays) if row.series == "seen pairs"]
        against_step = figures.lines(
            seen, "Accuracy on the pairs seen so far", "step", "accuracy", chance=1 / NUM_CLASSES
        )
        return {"accuracy_matrix": heat_map, "accuracy_by_step": against_step}
