"""Active learning with and without its bias: does a posterior know which labels it needs?

Question: trained on few labels that its own uncertainty chose, how well does a posterior predict, and how
much of that is owed to the bias of the choice?

Protocol: ten points of a pool are labelled at random; then one point after another is drawn with a
probability that grows with its score (BALD) under a fit from scratch to all labels so far. Every three
points three further fits see the same points under three objectives: R~, the plain mean of the losses, and
the unbiased PURE and LURE, which weigh each loss by how likely its point was to be drawn
(`bench.studies.risk`); each is tested. The weights multiply the log likelihood of every method, M points
count as M, and the validation NLL stops a fit early. Classes are unbalanced in the pool and in the test set;
a tenth of the labels of pool and validation set is random, test labels are true (`bench.data.unbalanced`). A
run is one trajectory: seeds share the data and differ in the first points and in every draw.

Source: Farquhar 2022, thesis "Understanding Approximation" (docs/sources.md), section 5.2 (Figs 5.5, 5.6,
5.9) and appendix C (Table C.1, Figs C.3 to C.7); Farquhar, Gal and Rainforth 2021 and its public code.
Deviations: preset standard has at most 20 epochs with patience 5 where paper has 100 with 20, and methods 2
training samples for 8. The KL counts in full, 1/M per example, where the code has 1/160 (`kl_weight`).
Dropout sees the weights, which in the code had no effect on it, and shares its masks over the pool. Which
examples of a class are kept is random; the code keeps the first.

What would mislead: ranking posteriors by it. What actively chosen points teach depends on the bias of the
choice, which can make up for overfitting: to remove it may turn the order of two methods around although
neither posterior changed. So this task is not ranked, and `bench figures RUN.. --to DIR` says that an order
turns only where paired runs show it. A method without spread has BALD 0 everywhere and draws at random.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import TensorDataset

from bench import likelihoods, metrics, priors
from bench.contract import (
    Arrays,
    Budget,
    Comparison,
    Engine,
    FinishedRun,
    Method,
    Metric,
    Metrics,
    Problem,
    Row,
    Spec,
    Task,
)
from bench.settings import Count, Positive, settings
from bench.studies import acquisition, active, active_comparison

NAMES: dict[str, dict[str, object]] = {
    "active_mnist": {"dataset": "mnist"},
    "active_fashion_mnist": {"dataset": "fashion_mnist"},
    "active_digits": {"dataset": "digits", "network": "mlp"},
}

PRESETS: dict[str, dict[str, object]] = {
    "smoke": {"acquired": 2, "epochs": 1, "acquisition_samples": 4, "test_samples": 2},
    "paper": {"epochs": 100, "patience": 20},
}

START, EVERY = 10, 3
"""Points labelled at random at first, and acquisitions from one test to the next."""
BATCH_SIZE, DRAWS = 64, 1000
"""Examples of a training step and of an epoch, which goes over the points again and again."""
PUBLISHED_EXAMPLES = 160
"""The public code's loss is the mean NLL + KL/160, whatever M."""


@settings
class Settings:
    """Settings of active learning."""

    dataset: Literal["mnist", "fashion_mnist", "digits"]
    """Images: fixed by the task's name."""
    network: Literal["conv", "mlp"] = "conv"
    """conv has two convolutional and two linear layers, mlp one hidden layer of 50 units."""
    balanced: bool = False
    """As many examples, but with the classes in their usual proportions."""
    acquired: Count = 60
    """Points acquired after the first ten, at least 1."""
    score: active.Score = "bald"
    """What makes a point worth its label: bald (mutual information), predictive_entropy, variation_ratio."""
    proposal: active.Proposal = "softmax"
    """Draw by the softmax of the scores, in proportion to them, or uniformly whatever they are."""
    temperature: Positive = 10_000.0
    """T of the softmax, on scores divided by their sum, above 0; published ablation: 1,000 to 20,000."""
    acquisition_objective: active.Objective = "plain"
    """Objective of the fits that choose the next point; published ablation: lure."""
    kl_weight: Literal["bayes", "published"] = "bayes"
    """Factor of the prior term per example: 1/M, or 1/160, posed as example weights times 160/M."""
    epochs: Count = 20
    """Epochs of a fit at most, of 1000 draws from its points each, at least 1."""
    patience: Count = 5
    """Epochs without a better validation NLL after which a fit stops, at least 1."""
    acquisition_samples: Count = 100
    """Weight samples S per score, at least 1."""
    test_samples: Count = 8
    """Weight samples S per test prediction, at least 1."""


class ActiveLearning(Task):
    """One trajectory of acquisitions, and three objectives on its points."""

    settings_class = Settings
    settings: Settings

    @property
    def spec(self) -> Spec:
        """What is measured; never ranked."""
        found: dict[str, Metric] = {}
        for o, name in active.OBJECTIVES.items():
            when = f"of fits with {name}, mean over M"
            found |= {
                f"mean_nll_{o}": Metric(f"test NLL {when}", "nats", 0, np.inf),
                f"mean_accuracy_{o}": Metric(f"test accuracy {when}", "fraction", 1, 0),
                f"last_nll_{o}": Metric(f"test NLL of the last fit with {name}", "nats", 0, np.inf),
                f"last_accuracy_{o}": Metric(f"test accuracy of the last fit with {name}", "fraction", 1, 0),
                f"overfitting_bias_{o}": Metric(
                    f"test NLL minus LURE on the training points {when}", "nats", -np.inf, np.inf
                ),
            }
            if o != "plain":
                found[f"cost_of_{o}"] = Metric(f"mean_nll_{o} - mean_nll_plain", "nats", -np.inf, np.inf)
        found["surprise"] = Metric("mean of -log p(label) of points when drawn", "nats", np.inf, 0)
        return Spec(
            question="Does the posterior know which labels it needs, and what does that bias?",
            source="Farquhar 2022, section 5.2 and Table C.1; Farquhar, Gal and Rainforth 2021",
            version=1,
            metrics=found,
            main_metric="mean_nll_plain",
            requires=frozenset({"weighted"}),
            ranked=False,
            validation_metric="mean_nll_plain",
        )

    # ---- data

    @cached_property
    def data(self) -> active.Data:
        """Pool, validation and test set, read once."""
        return active.load(self.settings.dataset, self.settings.balanced, self.data_dir)

    def data_digest(self) -> str:
        """Digest of the images and labels that are used.

        Raises:
            UsageError: If more points are to be acquired than there are.
        """
        active.check_acquired(
            self.settings.acquired, len(self.data.pool) - START, "points of the pool are left"
        )
        return self.data.digest

    # ---- protocol

    def problem(self, points: active.Points | None = None, objective: str = "plain") -> Problem:
        """The problem of a fit to acquired points; without any, to the pool's first ten in their place."""
        if points is None:
            index = torch.arange(START)
            points = active.Points(index, self.data.pool_labels[index], torch.ones(START).double())
        weights = active.weights(objective, points.proposal, len(self.data.pool))
        if self.settings.kl_weight == "published":
            weights = weights * (PUBLISHED_EXAMPLES / len(points))
        pixels = self.data.pool[0].numel()
        return Problem(
            network=active.network(self.settings.network, pixels),
            likelihood=likelihoods.Categorical(),
            prior=priors.normal(0, 0.25),
            train=TensorDataset(self.data.pool[points.index], points.labels, weights.float()),
            val=self.data.val,
            num_train=len(points),
        )

    @property
    def budget(self) -> Budget:
        """Of every fit."""
        return Budget(self.settings.epochs, BATCH_SIZE, self.settings.patience, DRAWS)

    def run(self, engine: Engine) -> Arrays:
        """Acquires point after point; of every test the class predictions on test set and acquired points."""
        own, size = self.settings, len(self.data.pool)
        oracle = active.Oracle(self.data.pool_labels)
        points = active.at_random(START, oracle, size, engine.generator("start"))
        losses: list[float] = []
        tests: list[Arrays] = []
        counts: list[int] = []
        tested = {*range(0, own.acquired, EVERY), own.acquired}
        numbers, stages = itertools.count(1), len(tested) + own.acquired
        for step in range(own.acquired + 1):
            name = f"{len(points)} points"
            if step in tested:
                engine.stage(name, next(numbers), stages)
                tests.append(engine.cached(partial(self._test, engine, points)))
                counts.append(len(points))
                for objective, nll in zip(
                    active.OBJECTIVES, np.mean([t["val_nll"] for t in tests], 0), strict=True
                ):
                    engine.log(f"mean_nll_{objective}", nll, len(points))
            if step < own.acquired:
                engine.stage(name, next(numbers), stages)
                drawn = engine.cached(partial(self._acquire, engine, points, oracle))
                losses.append(float(drawn["loss"]))
                points = points.and_then(int(drawn["index"]), int(drawn["label"]), float(drawn["proposal"]))
        acquired = np.zeros((len(tests), len(active.OBJECTIVES), len(points), active.NUM_CLASSES), np.float16)
        for test, into in zip(tests, acquired, strict=True):
            into[:, : test["acquired_log_probs"].shape[1]] = test["acquired_log_probs"]
        return {
            "pool_size": np.array([size], np.int32),
            "index": points.index.int().numpy(),
            "acquired_labels": points.labels.byte().numpy(),
            "proposal": points.proposal.numpy(),
            "loss": np.array(losses, np.float32),
            "points": np.array(counts, np.int32),
            "log_probs": np.stack([t["log_probs"] for t in tests]),
            "acquired_log_probs": acquired,
        }

    def _acquire(self, engine: Engine, points: active.Points, oracle: active.Oracle) -> Arrays:
        """Fits to the points, scores all others, and draws one of them."""
        own, pool = self.settings, self.data.pool
        method = engine.fit(self.problem(points, own.acquisition_objective), self.budget)
        is_left = torch.ones(len(pool), dtype=torch.bool)
        is_left[points.index] = False
        left = is_left.nonzero().squeeze(1)
        prediction = engine.predict(method, pool[left], own.acquisition_samples)
        probabilities = active.propose(own.proposal, active.SCORES[own.score](prediction), own.temperature)
        place, probability = acquisition.draw(probabilities, engine.generator("acquire", len(points)))
        index = int(left[place])
        label = oracle.label(index)
        return {
            "index": np.array(index),
            "label": np.array(label),
            "proposal": np.array(probability),
            "loss": -prediction.average()[place, label].numpy(),
        }

    def _test(self, engine: Engine, points: active.Points) -> Arrays:
        """Fits to the points under every objective; class predictions `[3, T, C]` and `[3, M, C]`."""
        problems = [self.problem(points, objective) for objective in active.OBJECTIVES]
        methods = engine.fit_many(problems, self.budget)
        parts = [self._predict(engine, method, points) for method in methods]
        return {name: np.stack([part[name] for part in parts]) for name in parts[0]}

    def _predict(self, engine: Engine, method: Method, points: active.Points) -> Arrays:
        """Class predictions of one method on test set and acquired points; its NLL on the validation set."""
        val, labels = self.data.val.tensors
        inputs = [self.data.test, self.data.pool[points.index], val]
        log_probs = engine.predict(method, torch.cat(inputs), self.settings.test_samples).average()
        test, acquired, held_out = log_probs.split([len(part) for part in inputs])
        nll = metrics.negative_log_likelihood(held_out.double().numpy(), labels.numpy())
        return {
            "log_probs": metrics.store(test),
            "acquired_log_probs": metrics.store(acquired),
            "val_nll": np.array(nll),
        }

    def targets(self) -> Arrays:
        """True labels of the test set `[T]`."""
        return {"labels": self.data.test_labels.byte().numpy()}

    # ---- scoring

    def measured(self, arrays: Arrays) -> active.Learning:
        """What was measured every three points."""
        size, labels, own = int(arrays["pool_size"][0]), arrays["labels"], arrays["acquired_labels"]
        nll, accuracy, risks = [], [], []
        for count, test, acquired in zip(
            arrays["points"].tolist(), arrays["log_probs"], arrays["acquired_log_probs"], strict=True
        ):
            log_probs = metrics.restore(test)  # [3, T, C]
            nll.append([metrics.negative_log_likelihood(p, labels) for p in log_probs])
            accuracy.append([metrics.accuracy(p.argmax(1), labels) for p in log_probs])
            losses = -metrics.restore(acquired)[:, np.arange(count), own[:count]]  # [3, M]
            proposal = arrays["proposal"][:count]
            risks.append([active.estimate(e, losses, proposal, size) for e in active.OBJECTIVES])
        return active.Learning(
            arrays["points"].astype(int), np.array(nll), np.array(accuracy), np.array(risks).swapaxes(1, 2)
        )

    def score(self, arrays: Arrays) -> Metrics:
        """Test NLL, accuracy and overfitting bias under every objective."""
        found = self.measured(arrays)
        scores: Metrics = {"surprise": float(arrays["loss"].mean(dtype=np.float64))}
        for i, o in enumerate(active.OBJECTIVES):
            scores |= {
                f"mean_nll_{o}": float(found.nll[:, i].mean()),
                f"mean_accuracy_{o}": float(found.accuracy[:, i].mean()),
                f"last_nll_{o}": float(found.nll[-1, i]),
                f"last_accuracy_{o}": float(found.accuracy[-1, i]),
                f"overfitting_bias_{o}": float(found.overfitting_bias[:, i].mean()),
            }
            if i > 0:
                scores[f"cost_of_{o}"] = float((found.nll[:, i] - found.nll[:, 0]).mean())
        return scores

    def curves(self, arrays: Arrays) -> list[Row]:
        """What was measured, against the number of points; of every draw its probability and loss."""
        found = self.measured(arrays)
        names = active.OBJECTIVES.values()
        rows = []
        for curve, values in found.measures().items():
            rows += [
                Row(curve, f"trained with {name}", float(x), float(value))
                for x, row in zip(found.points, values, strict=True)
                for name, value in zip(names, row, strict=True)
            ]
        draws = range(1, len(arrays["proposal"]) + 1)
        rows += [Row("proposal", "draw", m, float(q)) for m, q in zip(draws, arrays["proposal"], strict=True)]
        by_score = zip(draws[START:], arrays["loss"], strict=True)
        return rows + [Row("surprise", "draw", m, float(loss)) for m, loss in by_score]

    def figures(self, arrays: Arrays) -> dict[str, Any]:
        """Test NLL, accuracy and overfitting bias against the number of points."""
        return active_comparison.learning_charts({"One trajectory": [self.measured(arrays)]})

    @classmethod
    def compare(cls, runs: Sequence[FinishedRun]) -> Comparison:
        """Learning curves, a line per method and variant; what removing the bias costs."""
        return active_comparison.compare_learning(runs)
