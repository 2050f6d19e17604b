"""Two moons, a task with data of its own, and the ways to cheat on it."""

from functools import cache
from typing import Any

import numpy as np
import pages
import torch
from sklearn.datasets import make_moons
from sklearn.mixture import GaussianMixture
from torch import Tensor
from torch.utils.data import TensorDataset

from bench import metrics
from bench.contract import Arrays, Budget, Engine, Problem, Task

page = pages.module("adding-a-task.md", "tasks/two_moons.py")
TwoMoons = page.TwoMoons
"""The sound task of the page, which passes the laws."""
SETTINGS = page.Settings(epochs=5, test_samples=10)


def held_out() -> tuple[Tensor, Tensor]:
    """The test points, from where `own_data` has them."""
    size, seed = page.PARTS["test"]
    inputs, labels = make_moons(size, noise=0.2, random_state=seed)
    return torch.from_numpy(inputs).float(), torch.from_numpy(labels)


def posed(task: Task, train: Any, val: Any = None) -> Problem:
    """The task's problem with other data."""
    problem = TwoMoons.problem(task)
    return Problem(
        problem.network, problem.likelihood, problem.prior, TensorDataset(*train), val, len(train[0])
    )


class TrainsOnTestLabels(TwoMoons):
    """Adds the test set to the training set."""

    def problem(self) -> Problem:
        """All examples there are."""
        parts = self.own_data("train"), self.own_data("test")
        return posed(self, [torch.cat(columns) for columns in zip(*parts, strict=True)])


class TrainsStagesOnTestLabels(TwoMoons):
    """The same, in fits that the devices share out."""

    def posed(self, stage: int) -> Problem:
        """The test set beside the training set."""
        parts = zip(self.own_data("train"), self.own_data("test"), strict=True)
        return posed(self, [torch.cat(part) for part in parts])

    def run(self, engine: Engine) -> Arrays:
        """Predictions of the last of two fits."""
        budget = Budget(self.settings.epochs)
        *_, method = engine.fit_stages(["one", "two"], self.posed, budget)
        prediction = engine.predict(method, self.own_data("test")[0], 10)
        return {"log_probs": metrics.store(prediction.average())}


class ReadsPastTheHookInAStage(TrainsStagesOnTestLabels):
    """The same, of test labels that it makes itself."""

    def posed(self, stage: int) -> Problem:
        """The test set."""
        return posed(self, held_out())


class TrainsOnTestInputs(TwoMoons):
    """Adds the test inputs to the training set, labelled by their nearest training examples."""

    def problem(self) -> Problem:
        """All inputs there are."""
        (inputs, labels), (test, _) = self.own_data("train"), self.own_data("test")
        guessed = labels[torch.cdist(test, inputs).argmin(1)]
        return posed(self, [torch.cat([inputs, test]), torch.cat([labels, guessed])])


class StandardisesByTheTestSet(TwoMoons):
    """Has test inputs of mean 0 and variance 1 whatever they are; the fit knows nothing of it."""

    def run(self, engine: Engine) -> Arrays:
        """Predicts standardised inputs."""
        method = engine.fit(self.problem(), Budget(self.settings.epochs))
        inputs = self.own_data("test")[0]
        prediction = engine.predict(method, (inputs - inputs.mean(0)) / inputs.std(0), 10)
        return {"log_probs": metrics.store(prediction.average())}


class ReadsPastTheHook(TwoMoons):
    """Trains on test labels that it makes itself."""

    def problem(self) -> Problem:
        """The test set, for training."""
        return posed(self, held_out())


@cache
def remembered() -> tuple[Tensor, Tensor]:
    """The test set, made once."""
    return held_out()


class ReadsPastTheHookWhatItKept(TwoMoons):
    """The same, where the hook has left the true data in a cache."""

    def own_data(self, part: str) -> tuple[Tensor, Tensor]:
        """The examples."""
        return remembered() if part == "test" else super().own_data(part)

    def problem(self) -> Problem:
        """The test set."""
        return posed(self, remembered())


class ReadsAFile(TwoMoons):
    """Reads a file while it runs: it could hold the test set."""

    def run(self, engine: Engine) -> Arrays:
        """The run, after a look."""
        with open(__file__) as file:
            file.read()
        return super().run(engine)


class ReadsInsideAMixture(TwoMoons):
    """Reads a file in a step of scikit-learn's mixture, whose own looks at files are let pass."""

    def run(self, engine: Engine) -> Arrays:
        """The run, after a mixture was fitted."""

        class Reads(GaussianMixture):
            def _e_step(self, *arguments: Any, **named: Any) -> Any:
                open(__file__).close()
                return super()._e_step(*arguments, **named)

        Reads(random_state=0).fit(self.own_data("train")[0].numpy())
        return super().run(engine)


class MakesNumbers(TwoMoons):
    """Makes numbers by a generator of numpy: they could be a test set."""

    def run(self, engine: Engine) -> Arrays:
        """The run, after some numbers."""
        np.random.default_rng(page.PARTS["test"][1]).random()
        return super().run(engine)


class MakesNumbersTheOldWay(TwoMoons):
    """The same, by numpy's older generator."""

    def run(self, engine: Engine) -> Arrays:
        """The run, after some numbers."""
        np.random.RandomState(page.PARTS["test"][1]).rand()
        return super().run(engine)


class StopsByTheTestSet(TwoMoons):
    """Gives the test set to early stopping."""

    def problem(self) -> Problem:
        """The test set for validation."""
        return posed(self, self.own_data("train"), TensorDataset(*self.own_data("test")))


class LogsTheTestScore(TwoMoons):
    """Logs the test score, by which it could be tuned."""

    def run(self, engine: Engine) -> Arrays:
        """The run, and its score."""
        arrays = super().run(engine)
        labels = self.own_data("test")[1].numpy()
        log_probs = metrics.restore(arrays["log_probs"])
        engine.log("nll", metrics.negative_log_likelihood(log_probs, labels))
        return arrays


class PredictsTheTestLabels(TwoMoons):
    """Knows the labels that it predicts."""

    def run(self, engine: Engine) -> Arrays:
        """The truth, with little doubt, on top of what was learned."""
        arrays = super().run(engine)
        known = torch.nn.functional.one_hot(self.own_data("test")[1], 2).numpy()
        return {"log_probs": (arrays["log_probs"] * np.where(known, 0.1, 1)).astype(np.float16)}


class LearnsNothing(TwoMoons):
    """Trains on labels that are not those of its data: the training labels change nothing."""

    def problem(self) -> Problem:
        """All of one class."""
        inputs, labels = self.own_data("train")
        return posed(self, [inputs, 0 * labels])


CHEATS = {
    TrainsOnTestLabels: "held-out truth reaches what is given to fit",
    TrainsStagesOnTestLabels: "held-out truth reaches what is given to fit_stages",
    ReadsPastTheHookInAStage: "read past .* make_moons",
    TrainsOnTestInputs: "held-out truth reaches what is given to fit",
    StandardisesByTheTestSet: "held-out truth moves log_probs",
    ReadsPastTheHook: "read past .* make_moons",
    ReadsPastTheHookWhatItKept: "read past .* make_moons",
    ReadsAFile: "read past .* open",
    ReadsInsideAMixture: "read past .* open",
    MakesNumbers: "read past .* a generator of numpy",
    MakesNumbersTheOldWay: "read past .* of random.py",
    StopsByTheTestSet: "held-out truth reaches what is given to fit",
    LogsTheTestScore: "held-out truth reaches what is logged nll",
    PredictsTheTestLabels: "held-out truth moves log_probs",
    LearnsNothing: "training labels change no array",
}
"""Each with what the law says of it."""
