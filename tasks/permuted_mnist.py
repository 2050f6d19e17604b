"""Permuted pixels in sequence, one ten-way head: the easy case of continual learning, shown as contrast.

Question: after learning ten data sets that differ in a permutation of their pixels, one after another, does
one network still know them all?

Protocol: ten steps. Step 1 has the images as they are, every later one the same images under a fixed random
permutation of the pixels, the same for all methods and seeds. The prior of step t is the posterior of step
t - 1 and training starts there; the first prior is N(0, 1). No label of the step is given at any time. The
last 10% of each class of the training data are set aside for validation; the test sets are the published one,
whole, under each permutation seen so far. Inputs are in [0, 1]. Coresets are those of `tasks/split_mnist.py`.

Source: Farquhar 2022, thesis "Understanding Approximation" (docs/sources.md), section 5.1 (Figs 5.1 and
5.3a), which shows it as inadequate; Goodfellow et al. 2013; Nguyen et al. 2018 for network and training.

What would mislead: this score in place of that of `split_mnist`. A new permutation looks like nothing that
was seen, so that the network is uncertain of it, the gradients of the likelihood start small and the prior
holds; new situations of the world look like old ones, and a network is wrong about them with confidence.
`next_task_entropy` shows the difference. The task is not ranked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from bench import data, metrics, randomness
from bench.contract import Arrays, Budget, Engine, Metrics, Spec
from bench.settings import Count, settings
from bench.studies import continual

NAMES: dict[str, dict[str, object]] = {
    "permuted_mnist": {"dataset": "mnist"},
    "permuted_fashion_mnist": {"dataset": "fashion_mnist"},
    "permuted_digits": {"dataset": "digits"},
}

PRESETS: dict[str, dict[str, object]] = {
    "smoke": {"hidden": 20, "epochs": 1, "batch_size": 1024, "test_samples": 2},
    "paper": {"epochs": 100},
}

STEPS = 10


@settings
class Settings(continual.StepSettings, continual.ImageSettings):
    """Settings of permuted tasks."""

    hidden: Count = 100
    batch_size: Count | None = 256
    coreset_size: Count = 200
    coreset_epochs: Count = 100


class PermutedMNIST(continual.ContinualTask):
    """Ten permutations of the pixels in sequence, one head."""

    settings_class = Settings
    settings: Settings
    step_brings = "permutation"
    warning = "Every step looks new: an easy case, which does not tell whether sequential inference works"

    @property
    def spec(self) -> Spec:
        """What is measured; never ranked."""
        return Spec(
            question="Is sequential inference able to keep steps that have nothing in common?",
            source="Farquhar 2022, section 5.1, as an inadequate evaluation",
            version=1,
            metrics=continual.measures(),
            main_metric="average_accuracy",
            requires=frozenset({"sequential"}),
            ranked=False,
            validation_metric="average_accuracy",
        )

    # ---- data

    def permutation(self, step: int) -> Tensor:
        """Where the pixels of a step, counted from 0, come from: `[P]`; the first step's stay."""
        pixels = self.images.train_inputs[0].numel()
        if step == 0:
            return torch.arange(pixels)
        return torch.randperm(pixels, generator=randomness.generator(0, "permuted_mnist", step))

    def permuted(self, inputs: Tensor, step: int) -> Tensor:
        """Images `[N, 1, H, W]` as a step has them."""
        return inputs.flatten(1).index_select(1, self.permutation(step)).view_as(inputs)

    def data_digest(self) -> str:
        """Digest of the raw images and labels, and of the permutations."""
        permutations = torch.stack([self.permutation(step) for step in range(STEPS)])
        images = np.frombuffer(bytes.fromhex(self.images.digest), np.uint8)
        return data.array_digest({"images": images, "permutations": permutations})

    def steps(self) -> Sequence[Sequence[int]]:
        """All classes in every step."""
        return STEPS * (range(continual.NUM_CLASSES),)

    def rows(self, step: int) -> continual.Rows:
        """Where the examples of a step lie among the training images.

        A permutation leaves distances as they are, so that farthest points are the same in all steps.
        """
        return super().rows(step if self.settings.coreset == "random" else 0)

    def examples(self, step: int, part: Literal["train", "val", "coreset"]) -> TensorDataset:
        """Training images as a step has them, and their labels."""
        inputs, labels = super().examples(step, part).tensors
        return TensorDataset(self.permuted(inputs, step), labels)

    # ---- protocol

    def run(self, engine: Engine) -> Arrays:
        """Class predictions on every test set seen so far, log-probabilities after the last step."""
        own = self.settings
        predicted, kept = [], []
        budget = Budget(own.epochs, own.batch_size)
        for step, problem, method in continual.sequence(engine, self.problem, STEPS, budget, own):
            if step == 0:
                first = method
            predictor = method
            if own.coreset != "none":
                kept.append(self.examples(step, "coreset"))
                engine.stage(f"step {step + 1}, coresets", step + 1, STEPS)
                predictor = continual.rehearse(engine, method, problem, kept, own)
            tested, right = [], []
            for s in range(step + 1):
                val, labels = self.examples(s, "val").tensors
                inputs = torch.cat([self.permuted(self.images.test_inputs, s), val])
                log_probs = engine.predict(predictor, inputs, own.test_samples).average()
                test, held_out = log_probs.split([len(self.images.test_inputs), len(val)])
                tested.append(test)
                right.append((held_out.argmax(1) == labels).double().mean())
            engine.log("average_accuracy", float(torch.stack(right).mean()), step + 1)
            predicted += [log_probs.argmax(1) for log_probs in tested]
        engine.stage("after step 1", STEPS, STEPS)
        inputs = self.examples(1, "train").tensors[0]
        continual.log_next_task_entropy(engine, engine.predict(first, inputs, own.test_samples).average())
        return {
            "log_probs": metrics.store(torch.stack(tested)),
            "predicted": torch.stack(predicted[:-STEPS]).byte().numpy(),
        }

    # ---- scoring

    @staticmethod
    def accuracy_matrix(arrays: Arrays) -> np.ndarray:
        """A[t, s], accuracy after step t on the test set of step s <= t, `[10, 10]`; NaN for s > t.

        `predicted` `[45, N]` holds the steps but the last one after another, step t with t test sets;
        `log_probs` `[10, N, C]` is of the last.
        """
        last = metrics.restore(arrays["log_probs"]).argmax(2)
        matrix = np.full((STEPS, STEPS), np.nan)
        matrix[np.tril_indices(STEPS)] = [
            metrics.accuracy(p, arrays["labels"]) for p in [*arrays["predicted"], *last]
        ]
        return matrix

    def score(self, arrays: Arrays) -> Metrics:
        """Accuracies from the matrix A[t, s], and the NLL after the last step."""
        nlls = [
            metrics.negative_log_likelihood(log_probs, arrays["labels"])
            for log_probs in metrics.restore(arrays["log_probs"])
        ]
        return continual.scores(self.accuracy_matrix(arrays), nlls)
