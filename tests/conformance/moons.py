"""Two moons, a task with data of its own, and the ways to cheat on it."""

from functools import cache, partial
from typing import Any

import numpy as np
import torch
from sklearn.datasets import make_moons
from torch import Tensor
from torch.utils.data import TensorDataset

from bench import likelihoods, metrics, networks, priors
from bench.contract import Arrays, Budget, Engine, Metric, Metrics, Problem, Spec, Task
from bench.data import array_digest
from bench.settings import Count, settings

SEEDS = {"train": 0, "test": 1}


@settings
class Settings:
    """Settings of two moons."""

    epochs: Count = 5
    """Epochs, at least 1."""


class TwoMoons(Task):
    """Two interleaved half circles, a class each."""

    settings_class = Settings
    settings: Settings

    @property
    def spec(self) -> Spec:
        """What is measured."""
        nll = Metric("mean of -log p(label)", "nats", 0, np.inf)
        return Spec("How well are two moons told apart?", "the tests", 1, {"nll": nll}, "nll")

    def own_data(self, part: str) -> tuple[Tensor, Tensor]:
        """Inputs `[100, 2]` and labels `[100]` of the part train or test."""
        inputs, labels = make_moons(100, noise=0.1, random_state=SEEDS[part])
        return torch.from_numpy(inputs).float(), torch.from_numpy(labels)

    def data_digest(self) -> str:
        """Of all examples."""
        return array_digest({f"{part}{i}": a for part in SEEDS for i, a in enumerate(self.own_data(part))})

    def problem(self) -> Problem:
        """All training examples."""
        train = TensorDataset(*self.own_data("train"))
        network = partial(networks.mlp, 2, 2, (10,))
        return Problem(network, likelihoods.Categorical(), priors.normal(0, 1), train, None, len(train))

    def run(self, engine: Engine) -> Arrays:
        """Log-probabilities on the test set."""
        method = engine.fit(self.problem(), Budget(self.settings.epochs))
        prediction = engine.predict(method, self.own_data("test")[0], 10)
        return {"log_probs": metrics.store(prediction.average())}

    def targets(self) -> Arrays:
        """Test labels."""
        return {"labels": self.own_data("test")[1].byte().numpy()}

    def score(self, arrays: Arrays) -> Metrics:
        """NLL."""
        log_probs = metrics.restore(arrays["log_probs"])
        return {"nll": metrics.negative_log_likelihood(log_probs, arrays["labels"])}


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
        """The test set, from where `own_data` has it."""
        inputs, labels = make_moons(100, noise=0.1, random_state=SEEDS["test"])
        return posed(self, [torch.from_numpy(inputs).float(), torch.from_numpy(labels)])


@cache
def remembered() -> tuple[Tensor, Tensor]:
    """The test set, made once."""
    inputs, labels = make_moons(100, noise=0.1, random_state=SEEDS["test"])
    return torch.from_numpy(inputs).float(), torch.from_numpy(labels)


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


class MakesNumbers(TwoMoons):
    """Makes numbers by a generator of numpy: they could be a test set."""

    def run(self, engine: Engine) -> Arrays:
        """The run, after some numbers."""
        np.random.default_rng(SEEDS["test"]).random()
        return super().run(engine)


class MakesNumbersTheOldWay(TwoMoons):
    """The same, by numpy's older generator."""

    def run(self, engine: Engine) -> Arrays:
        """The run, after some numbers."""
        np.random.RandomState(SEEDS["test"]).rand()
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
    TrainsOnTestInputs: "held-out truth reaches what is given to fit",
    StandardisesByTheTestSet: "held-out truth moves log_probs",
    ReadsPastTheHook: "read past .* make_moons",
    ReadsPastTheHookWhatItKept: "read past .* make_moons",
    ReadsAFile: "read past .* open",
    MakesNumbers: "read past .* a generator of numpy",
    MakesNumbersTheOldWay: "read past .* of random.py",
    StopsByTheTestSet: "held-out truth reaches what is given to fit",
    LogsTheTestScore: "held-out truth reaches what is logged nll",
    PredictsTheTestLabels: "held-out truth moves log_probs",
    LearnsNothing: "training labels change no array",
}
"""Each with what the law says of it."""
