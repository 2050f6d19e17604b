"""What tasks of continual learning share: settings, data, coresets, and the measures of a matrix A[t, s].

A[t, s] is the accuracy after step t on the test examples of step s, `[T, S]`, NaN where it was not measured.
One row alone is joint training. Shapes: N examples, C classes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from bench import data, diagnostics, figures, likelihoods, metrics, networks, priors, randomness
from bench.contract import (
    Arrays,
    Budget,
    Comparison,
    Engine,
    FinishedRun,
    Likelihood,
    Method,
    Metric,
    Metrics,
    Prior,
    Problem,
    Row,
    Task,
    Undefined,
)
from bench.errors import UsageError
from bench.settings import Count, settings
from bench.studies import coreset

SPLIT = ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9))
"""The pairs of classes of split tasks."""
NUM_CLASSES = 10


@settings
class ImageSettings:
    """The first setting of all tasks of continual learning; those that a task has alone come next."""

    dataset: Literal["mnist", "fashion_mnist", "digits"]
    """Images: fixed by the task's name."""


@settings
class StepSettings:
    """The further settings of all tasks of continual learning, with the defaults of split tasks.

    Named before `ImageSettings` among the bases of a task's settings: fields of the last base come first.
    """

    hidden: Count = 256
    """Units in each of the two hidden layers, at least 1."""
    epochs: Count = 10
    """Epochs per step, at least 1."""
    batch_size: Count | None = 128
    """Examples per training step, at least 1; null is full batch."""
    test_samples: Count = 100
    """Weight samples S per prediction, at least 1."""
    coreset: Literal["none", "k_center", "random"] = "none"
    """Examples kept of every step: none, far from each other in pixels, or drawn at random."""
    coreset_size: Count = 40
    """Examples kept of every step, at least 1; they are not trained on in that step."""
    coreset_epochs: Count = 120
    """Full-batch epochs of a copy that predicts, at least 1; published: as many as a step has."""
    coreset_prior: Literal["posterior", "initial"] = "posterior"
    """Prior of a copy that predicts: the posterior that it starts from, or N(0, 1)."""
    coreset_only: bool = False
    """Every step's prior is N(0, 1), so that nothing but coresets and starting weights is carried on."""


# ------------------------------------------------------------------------------------------------- data


class Rows(NamedTuple):
    """Where the training images of a step lie in the data set: indices, disjoint."""

    train: Tensor
    val: Tensor
    coreset: Tensor


def divide(
    inputs: Tensor, labels: Tensor, classes: Sequence[int], settings: StepSettings, step: int = 0
) -> Rows:
    """Examples of some classes: the last 10% of each class for validation, a coreset, the rest to train on.

    Args:
        inputs: `[N, ...]`.
        labels: `[N]`.
        classes: The classes of the step.
        settings: Of the task.
        step: Seeds the choice at random, which is the same for all methods and seeds.

    Raises:
        UsageError: If the coreset would leave nothing to train on.
    """
    parts: tuple[list[Tensor], list[Tensor]] = ([], [])
    for c in classes:
        rows = (labels == c).nonzero().squeeze(1)
        cut = len(rows) - len(rows) // 10
        for part, own in zip(parts, (rows[:cut], rows[cut:]), strict=True):
            part.append(own)
    train, val = (torch.cat(part).sort().values for part in parts)
    if settings.coreset == "none":
        return Rows(train, val, train[:0])
    size = settings.coreset_size
    if size >= len(train):
        raise UsageError(
            f"--task.coreset_size {size}: step {step + 1} has {len(train)} training examples in all"
        )
    points = inputs[train].flatten(1)
    if settings.coreset == "k_center":
        chosen = coreset.k_center(points, size)
    else:
        chosen = coreset.random(points, size, randomness.generator(0, "coreset", step))
    is_left = torch.ones(len(train), dtype=torch.bool)
    is_left[chosen] = False
    return Rows(train[is_left], val, train[chosen])


# --------------------------------------------------------------------------------------------- protocol


def sequence(
    engine: Engine,
    pose: Callable[[int, Prior | None], Problem],
    steps: int,
    budget: Budget,
    settings: StepSettings,
) -> Iterator[tuple[int, Problem, Method]]:
    """Fits step after step, each from the last fit, with the last posterior as prior.

    The epochs of the second keep the gradient norms of Farquhar 2022 (docs/sources.md), Fig. 5.1.

    Args:
        engine: Fits them.
        pose: The problem of a step, counted from 0, under a prior; under the first one if None is given.
        steps: How many.
        budget: Of each.
        settings: Of the task; with `coreset_only` every step has the first prior.

    Yields:
        Each step, its problem, and the method fitted to it.
    """
    method, prior = None, None
    for step in range(steps):
        engine.stage(f"step {step + 1}", step + 1, steps)
        problem = pose(step, prior)
        probe = diagnostics.gradient_norms if step == 1 else None
        method = engine.fit(problem, budget, start=method, probe=probe)
        prior = method.as_prior() if step + 1 < steps and not settings.coreset_only else None
        yield step, problem, method


def rehearse(
    engine: Engine, method: Method, problem: Problem, kept: Sequence[TensorDataset], settings: StepSettings
) -> Method:
    """The method that predicts where coresets are kept: a copy, trained on them, to be thrown away.

    It starts at the method's posterior and trains full batch; the likelihood counts the examples kept.

    Args:
        engine: Fits the copy.
        method: The method after a step.
        problem: Of that step; its network and likelihood are the copy's.
        kept: Coresets, of which the copy sees the union.
        settings: Of the task.
    """
    union = TensorDataset(*(torch.cat(parts) for parts in zip(*(c.tensors for c in kept), strict=True)))
    prior: Prior = method.as_prior() if settings.coreset_prior == "posterior" else priors.normal(0, 1)
    problem = replace(problem, prior=prior, train=union, val=None, num_train=len(union))
    return engine.fit(problem, Budget(settings.coreset_epochs), start=method)


def log_next_task_entropy(engine: Engine, log_probs: Tensor) -> None:
    """Keeps the mean entropy, in nats, of predictions after step 1 on the training inputs of step 2.

    Args:
        engine: Keeps it as `next_task_entropy`.
        log_probs: Averaged over the samples, `[N, C]`.
    """
    engine.log("next_task_entropy", float(metrics.predictive_entropy(log_probs[None]).mean()), 1)


# ---------------------------------------------------------------------------------------------- scoring


def measures(joint: bool = False, ahead: bool = False) -> dict[str, Metric]:
    """What `scores` gives.

    Args:
        joint: Training has one step, so that the measures of forgetting are undefined.
        ahead: Steps to come are tested before they are learnt, so that there is forward transfer.
    """
    found = {
        "average_accuracy": Metric("mean over s of accuracy after the last step", "fraction", 1, 0),
        "learning_accuracy": Metric("mean of A[t, t]", "fraction", 1, 0, may_be_undefined=joint),
        "minimum_learning_accuracy": Metric("least A[t, t]", "fraction", 1, 0, may_be_undefined=joint),
        "forgetting": Metric(
            "mean over earlier s of best past accuracy minus last", "fraction", -1, 1, may_be_undefined=joint
        ),
        "backward_transfer": Metric(
            "mean over earlier s of last accuracy minus A[s, s]", "fraction", 1, -1, may_be_undefined=joint
        ),
        "average_nll": Metric("mean over s of -log p(label) after the last step", "nats", 0, np.inf),
    }
    transfer = Metric("mean over later s of accuracy before step s minus chance", "fraction", 1, -1)
    return found | ({"forward_transfer": transfer} if ahead else {})


def scores(matrix: np.ndarray, nlls: Sequence[float], chance: float | None = None) -> Metrics:
    """The measures of A[t, s] `[T, S]` and of the NLL of every s after the last step `[S]`.

    Backward and forward transfer are those of Lopez-Paz and Ranzato 2017, "Gradient Episodic Memory for
    Continual Learning", section 2. Theirs compares a step to come with the accuracy of an initial network, of
    which `chance` is the expectation: no class is before another in how weights are drawn.

    Args:
        matrix: A[t, s].
        nlls: Of every s.
        chance: Accuracy of guessing where steps to come are tested, for forward transfer; None elsewhere.
    """
    found: Metrics = {"average_accuracy": float(matrix[-1].mean()), "average_nll": float(np.mean(nlls))}
    if chance is not None:
        found["forward_transfer"] = float(np.diag(matrix, 1).mean()) - chance
    if len(matrix) == 1:
        reason = Undefined("joint training has one step")
        names = ("learning_accuracy", "minimum_learning_accuracy", "forgetting", "backward_transfer")
        return found | dict.fromkeys(names, reason)
    diagonal = np.diag(matrix)
    best_past = np.array([matrix[s:-1, s].max() for s in range(len(matrix) - 1)])
    return found | {
        "learning_accuracy": float(diagonal.mean()),
        "minimum_learning_accuracy": float(diagonal.min()),
        "forgetting": float((best_past - matrix[-1, :-1]).mean()),
        "backward_transfer": float((matrix[-1, :-1] - diagonal[:-1]).mean()),
    }


def curves(matrix: np.ndarray, what: str) -> list[Row]:
    """A[t, s] by t, and its average over the steps so far.

    Args:
        matrix: A[t, s].
        what: What the examples of a step are called, in the singular.
    """
    rows = []
    for t, accuracies in enumerate(matrix, 1):
        measured = [(s, float(a)) for s, a in enumerate(accuracies, 1) if np.isfinite(a)]
        rows += [Row("accuracy", f"{what} {s}", t, a) for s, a in measured]
        seen = accuracies if len(matrix) == 1 else accuracies[:t]
        rows.append(Row("accuracy", f"seen {what}s", t, float(seen.mean())))
    return rows


def charts(matrix: np.ndarray, what: str, chance: float, notes: Sequence[str] = ()) -> dict[str, Any]:
    """A[t, s] as a heat map, and accuracy on what was seen so far against the step.

    Args:
        matrix: A[t, s].
        what: As in `curves`.
        chance: Accuracy of guessing.
        notes: Further lines of both titles.
    """
    seen = [row for row in curves(matrix, what) if row.series == f"seen {what}s"]

    def titled(title: str) -> str | list[str]:
        return [title, *notes] if notes else title

    heat_map = figures.heat_map(
        matrix, titled("Test accuracy A[t, s]"), "after step t", f"on {what} s", "accuracy"
    )
    against_step = figures.lines(
        seen, titled(f"Accuracy on the {what}s seen so far"), "step", "accuracy", chance=chance
    )
    return {"accuracy_matrix": heat_map, "accuracy_by_step": against_step}


class ContinualTask(Task):
    """A task that learns images of ten classes step after step, and is tested on the steps so far."""

    settings: Any
    """Both `ImageSettings` and `StepSettings`."""
    chance = 1 / NUM_CLASSES
    """Accuracy of guessing."""
    step_brings = "pair"
    """What the examples of a step are called, in the singular."""

    def __init__(self, settings: Any, data_dir: str | None = None) -> None:
        super().__init__(settings, data_dir)
        if settings.coreset_only and settings.coreset == "none":
            raise UsageError(
                "--task.coreset_only true: there is no coreset; give --task.coreset k_center or random"
            )
        self._rows: dict[int, Rows] = {}

    @property
    def warning(self) -> str:
        """What every figure must say; empty if nothing."""
        return ""

    # ---- data

    @cached_property
    def images(self) -> data.Images:
        """The data set, read once."""
        return data.load(self.settings.dataset, self.data_dir)

    def data_digest(self) -> str:
        """Digest of the raw images and labels."""
        return self.images.digest

    def steps(self) -> Sequence[Sequence[int]]:
        """The classes of each training step."""
        return SPLIT

    def rows(self, step: int) -> Rows:
        """Where the examples of a step lie among the training images."""
        if step not in self._rows:
            inputs, labels = self.images.train_inputs, self.images.train_labels
            self._rows[step] = divide(inputs, labels, self.steps()[step], self.settings, step)
        return self._rows[step]

    def examples(self, step: int, part: Literal["train", "val", "coreset"]) -> TensorDataset:
        """Training images of a step, as it has them, and their labels."""
        rows = getattr(self.rows(step), part)
        return TensorDataset(self.images.train_inputs[rows], self.images.train_labels[rows])

    def likelihood(self) -> Likelihood:
        """How labels are explained: all ten classes compete."""
        return likelihoods.Categorical()

    def problem(self, step: int = 0, prior: Any = None) -> Problem:
        """The problem of a step; its prior is N(0, 1) unless one is given."""
        train, val = self.examples(step, "train"), self.examples(step, "val")
        pixels, units = self.images.train_inputs[0].numel(), self.settings.hidden
        network = partial(networks.mlp, pixels, NUM_CLASSES, (units, units))
        return Problem(network, self.likelihood(), prior or priors.normal(0, 1), train, val, len(train))

    def targets(self) -> Arrays:
        """Test labels `[N]`."""
        return {"labels": self.images.test_labels.byte().numpy()}

    # ---- scoring

    @staticmethod
    @abstractmethod
    def accuracy_matrix(arrays: Arrays) -> np.ndarray:
        """A[t, s]."""

    def curves(self, arrays: Arrays) -> list[Row]:
        """A[t, s] by step and s, and the average over the steps so far."""
        return curves(self.accuracy_matrix(arrays), self.step_brings)

    def figures(self, arrays: Arrays) -> dict[str, Any]:
        """The matrix A[t, s], and accuracy on what was seen so far against the step."""
        notes = [*filter(None, [self.warning]), *variant(self.settings)]
        return charts(self.accuracy_matrix(arrays), self.step_brings, self.chance, notes)

    @classmethod
    def compare(cls, runs: Sequence[FinishedRun]) -> Comparison:
        """Accuracy step by step, the gradients of step 2 of runs that kept them, and all metrics."""
        charts = {"accuracy": accuracies(runs), "gradients": gradients(runs)}
        return replace(super().compare(runs), charts={n: c for n, c in charts.items() if c is not None})


def accuracies(runs: Sequence[FinishedRun]) -> Any:
    """Accuracy on what was seen so far against the step, as in Farquhar 2022, Figs 5.2 and 5.3.

    A panel per task, a line per method and variant, a band of one standard deviation over its seeds.
    """
    found = []
    for run in runs:
        matrix = run.task.accuracy_matrix(run.arrays)
        points = [(float(t), float(row[:t].mean())) for t, row in enumerate(matrix, 1)]
        if len(matrix) == 1:  # joint training, which has seen everything
            points = [(float(matrix.shape[1]), float(matrix.mean()))]
        found.append(figures.Curve(run.task_name, run.line, points))
    chance = {run.task_name: run.task.chance for run in runs}
    notes = {run.task_name: run.task.warning for run in runs}
    return figures.panels(found, "step", "accuracy on the steps seen so far", chance, notes)


def gradients(runs: Sequence[FinishedRun]) -> Any | None:
    """What pulled at the last layer in every epoch of step 2, as in Farquhar 2022, Fig. 5.1.

    The prior term has no gradient where the second fit starts, at the optimum of that term, for the methods
    whose posterior is their next prior; so the share begins there at 0.

    Returns:
        Norms of both terms, and prior over likelihood; None if no run has them.
    """
    found = []
    for run in runs:
        norms = {
            curve: {row.x: row.value for row in run.curves if (row.curve, row.series) == (curve, "step 2")}
            for curve in ("likelihood_gradient", "prior_gradient")
        }
        likelihood, prior = norms["likelihood_gradient"], norms["prior_gradient"]
        series = f"{run.task_name}: {run.line}"
        if likelihood:
            share = [(x, prior[x] / value) for x, value in likelihood.items() if value > 0]
            found += [
                figures.Curve("Likelihood term", series, list(likelihood.items())),
                figures.Curve("Prior term", series, list(prior.items())),
                figures.Curve("Prior over likelihood", series, share),
            ]
    if not found:
        return None
    return figures.panels(found, "epoch of step 2", "norm, or ratio of norms, at its start")


def variant(settings: StepSettings) -> list[str]:
    """What a figure says of the coresets; nothing where there are none."""
    if settings.coreset == "none":
        return []
    only = ", coreset only" if settings.coreset_only else ""
    return [
        f"Coreset {settings.coreset}, {settings.coreset_size} a step, {settings.coreset_prior} prior{only}"
    ]
