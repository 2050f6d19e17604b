"""Contrast: pairs of classes in sequence, with the task told in test. Not a measure of sequential inference.

Question: how well does one network tell the two classes of every pair apart, once it is told which pair?

Protocol: the five steps of `tasks/split_mnist.py`, its data, network, priors and coresets. In test every
image comes with its pair, and only the two classes of this pair compete.

- `task_known_at_test`: trained single-headed, as in `tasks/split_mnist.py`: all ten classes compete in
  training. The prediction is the single head's, conditioned on the pair.
- `multi_head`: a head of two outputs per pair on a shared body; in training, too, an image is explained by
  the head of its pair alone. With coresets there is a copy per pair, trained on this pair's coreset, which
  predicts with this pair's head.

Source: Farquhar 2022, thesis "Understanding Approximation" (docs/sources.md), section 5.1 (Fig. 5.3), which
shows them as inadequate; Zenke et al. 2017; Nguyen et al. 2018.

What would mislead: everything here, read as sequential inference. Who is told the pair need not know p(y | x)
under all data, only p(y | x, pair): a network that takes every 0 for an 8 may still tell 0 from 1, so that a
posterior that forgot scores like one that remembers. With a head per pair there are several functions that
share weights, and to take the last posterior for the prior of the next step (eq. 5.6) does not follow from
Bayes' rule.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from bench import likelihoods, metrics
from bench.contract import Arrays, Budget, Engine, Likelihood, Method, Metrics, Problem, Spec
from bench.settings import settings
from bench.studies import continual
from bench.studies.continual import SPLIT

NAMES: dict[str, dict[str, object]] = {
    "split_mnist_multi_head": {"dataset": "mnist", "scenario": "multi_head"},
    "split_fashion_mnist_multi_head": {"dataset": "fashion_mnist", "scenario": "multi_head"},
    "split_digits_multi_head": {"dataset": "digits", "scenario": "multi_head"},
    "split_mnist_task_known_at_test": {"dataset": "mnist", "scenario": "task_known_at_test"},
    "split_fashion_mnist_task_known_at_test": {"dataset": "fashion_mnist", "scenario": "task_known_at_test"},
    "split_digits_task_known_at_test": {"dataset": "digits", "scenario": "task_known_at_test"},
}

PRESETS: dict[str, dict[str, object]] = {
    "smoke": {"epochs": 1, "test_samples": 4},
    "paper": {"epochs": 120, "batch_size": None},
}

PAIRS = len(SPLIT)

WARNINGS = {
    "multi_head": "No measure of sequential inference: a head per pair, and test tells the pair",
    "task_known_at_test": "No measure of sequential inference: test tells which two classes compete",
}


@settings
class Scenario(continual.ImageSettings):
    """What is told to whom."""

    scenario: Literal["multi_head", "task_known_at_test"]
    """Who is told the pair: training and test, or test alone; fixed by the task's name."""


@settings
class Settings(continual.StepSettings, Scenario):
    """Settings of split tasks that tell the pair in test."""


class SplitMNISTContrast(continual.ContinualTask):
    """Five pairs of classes in sequence, the pair told in test: no measure of sequential inference."""

    settings_class = Settings
    settings: Settings
    chance = 1 / 2

    @property
    def spec(self) -> Spec:
        """What is measured; never ranked."""
        return Spec(
            question="How well are two classes told apart, once it is known which two?",
            source="Farquhar 2022, section 5.1, as an inadequate evaluation",
            version=2,
            metrics=continual.measures(ahead=True),
            main_metric="average_accuracy",
            requires=frozenset({"sequential"}),
            ranked=False,
            validation_metric="average_accuracy",
        )

    @property
    def warning(self) -> str:
        """What every figure says."""
        return WARNINGS[self.settings.scenario]

    # ---- protocol

    def likelihood(self) -> Likelihood:
        """With a head per pair an image is explained by its own alone; head s has outputs 2s and 2s + 1."""
        multi_head = self.settings.scenario == "multi_head"
        return likelihoods.MultiHead(PAIRS) if multi_head else likelihoods.Categorical()

    def run(self, engine: Engine) -> Arrays:
        """Within every pair the class predicted after every step, and log-probabilities after the last."""
        own = self.settings
        predicted, seen, kept = [], [], []
        budget = Budget(own.epochs, own.batch_size)
        for step, problem, method in continual.sequence(engine, self.problem, PAIRS, budget, own):
            if step == 0:
                first = method
            if own.coreset != "none":
                kept.append(self.examples(step, "coreset"))
            seen.append(self.examples(step, "val"))
            inputs = torch.cat([self.images.test_inputs, *(val.tensors[0] for val in seen)])
            log_probs = self.predict(engine, method, problem, kept, inputs)
            log_probs, *held_out = log_probs.split([len(self.images.test_inputs), *map(len, seen)])
            right = [
                (p[:, s].argmax(1) == val.tensors[1] - SPLIT[s][0]).double().mean()
                for s, (p, val) in enumerate(zip(held_out, seen, strict=True))
            ]
            engine.log("average_accuracy", float(torch.stack(right).mean()), step + 1)
            predicted.append(log_probs.argmax(2))
        engine.stage("after step 1", PAIRS, PAIRS)
        upcoming = self.predict(engine, first, problem, [], self.examples(1, "train").tensors[0])
        continual.log_next_task_entropy(engine, upcoming[:, 1])
        return {
            "log_probs": metrics.store(log_probs),
            "predicted": torch.stack(predicted[:-1]).byte().numpy(),
        }

    def predict(
        self, engine: Engine, method: Method, problem: Problem, kept: list[TensorDataset], inputs: Tensor
    ) -> Tensor:
        """Log-probabilities within every pair, `[N, 5, 2]`: scoring picks each input's own pair.

        Args:
            engine: Predicts.
            method: The method after a step.
            problem: Of that step.
            kept: Coresets of the steps so far, if any.
            inputs: `[N, ...]`.
        """
        own = self.settings

        def within_pairs(predictor: Method) -> Tensor:
            log_probs = engine.predict(predictor, inputs, own.test_samples).average()
            return log_probs.unflatten(1, (PAIRS, 2)).log_softmax(2)

        if not kept:
            return within_pairs(method)
        if own.scenario == "task_known_at_test":
            engine.stage(f"step {len(kept)}, coresets", len(kept), PAIRS)
            return within_pairs(continual.rehearse(engine, method, problem, kept, own))
        log_probs = within_pairs(method)
        for s, coreset in enumerate(kept):
            engine.stage(f"step {len(kept)}, coreset {s + 1}", len(kept), PAIRS)
            copy = continual.rehearse(engine, method, problem, [coreset], own)
            log_probs[:, s] = within_pairs(copy)[:, s]
        return log_probs

    # ---- scoring

    @staticmethod
    def accuracy_matrix(arrays: Arrays) -> np.ndarray:
        """A[t, s], accuracy after step t on pair s among its two classes, `[5, 5]`."""
        labels = arrays["labels"]
        last = metrics.restore(arrays["log_probs"]).argmax(2)
        pairs = [np.isin(labels, pair) for pair in SPLIT]
        return np.array(
            [
                [metrics.accuracy(p[rows, s], labels[rows] % 2) for s, rows in enumerate(pairs)]
                for p in [*arrays["predicted"], last]
            ]
        )

    def score(self, arrays: Arrays) -> Metrics:
        """Accuracies from the matrix A[t, s], and the NLL after the last step."""
        labels = arrays["labels"]
        log_probs = metrics.restore(arrays["log_probs"])
        nlls = [
            metrics.negative_log_likelihood(log_probs[rows, s], labels[rows] % 2)
            for s, rows in enumerate(np.isin(labels, pair) for pair in SPLIT)
        ]
        return continual.scores(self.accuracy_matrix(arrays), nlls, self.chance)
