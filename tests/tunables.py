"""A method that can be tuned and tasks to tune it on, in milliseconds, named `tunables:Class`."""

from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import TensorDataset

from bench import likelihoods, networks, priors
from bench.contract import Arrays, Batch, Budget, Engine, Metric, Metrics, Noise, Problem, Spec, Task
from bench.errors import UsageError
from bench.methods.map import MAP
from bench.settings import Count, Positive, settings

SEARCH = {"learning_rate": (1e-4, 1.0, "log"), "size": (1, 9, "linear")}

BEGUN: list[Any] = []
"""The method settings of every run that began."""


@settings
class Settings:
    """Settings of a method that does what it is told."""

    learning_rate: Positive = 0.5
    """Step size of the optimiser."""
    size: Count = 5
    """Nothing."""
    optimizer: str = "adam"
    """Name of the optimiser."""
    trouble: Literal["none", "diverges", "fails", "refuses", "stops"] = "none"
    """What happens to every fit."""


class Obedient(MAP):
    """MAP, or trouble."""

    settings_class = Settings
    settings: Settings

    def __init__(self, problem: Problem, settings: Settings, start: Any = None) -> None:
        super().__init__(problem, settings, start)
        if settings.trouble == "refuses":
            raise UsageError("obedient refuses this problem: choose another")

    def loss_terms(self, batch: Batch, noise: Noise) -> tuple[torch.Tensor, torch.Tensor]:
        """The terms of MAP, or trouble."""
        if self.settings.trouble == "fails":
            raise RuntimeError("told to")
        if self.settings.trouble == "stops":
            raise KeyboardInterrupt
        factor = float("nan") if self.settings.trouble == "diverges" else 1.0
        likelihood_term, prior_term = super().loss_terms(batch, noise)
        return likelihood_term * factor, prior_term


@settings
class TaskSettings:
    """Settings of the tasks."""

    epochs: Count = 1
    """Epochs."""


class Distance(Task):
    """On validation data the distance of the learning rate from 0.01, in decades; on test data the reverse.

    Whoever looks at the test metric chooses the worst configuration.
    """

    settings_class = TaskSettings
    settings: TaskSettings
    metric = Metric("distance", "decades", 0, np.inf)
    validation_metric: str | None = "closeness"

    @property
    def spec(self) -> Spec:
        """One metric."""
        return Spec(
            "How far?", "none", 1, {"closeness": self.metric}, "closeness",
            validation_metric=self.validation_metric,
        )  # fmt: skip

    def data_digest(self) -> str:
        """Of no data."""
        return "0" * 64

    def problem(self) -> Problem:
        """Two points."""
        data = TensorDataset(torch.tensor([[0.0], [1.0]]), torch.tensor([[0.0], [1.0]]))
        network = partial(networks.mlp, 1, 1, ())
        return Problem(network, likelihoods.Gaussian(0.3), priors.normal(0, 1), data, None, 2)

    def value(self, learning_rate: float) -> float:
        """The criterion."""
        return abs(float(np.log10(learning_rate)) + 2)

    def run(self, engine: Engine) -> Arrays:
        """One fit, and a number on what stands for validation data."""
        engine.stage("fit")
        method = engine.fit(self.problem(), Budget(self.settings.epochs))
        BEGUN.append(method.settings)
        value = self.value(method.settings.learning_rate) + self.luck(method.settings, engine.seed)
        engine.log("closeness", value)
        return {"value": np.array([value])}

    def luck(self, settings: Settings, seed: int) -> float:
        """What the seed adds to the criterion."""
        return 0.0

    def targets(self) -> Arrays:
        """None."""
        return {}

    def score(self, arrays: Arrays) -> Metrics:
        """The reverse of the criterion."""
        return {"closeness": 10 - float(arrays["value"][0])}


class Lucky(Distance):
    """The same, where size 9 is worse and looks better under seed 0."""

    def luck(self, settings: Settings, seed: int) -> float:
        """Decades."""
        if settings.size != 9:
            return 0.0
        return -5.0 if seed == 0 else 5.0


class Closeness(Distance):
    """The same, where higher is better."""

    metric = Metric("minus the distance", "decades", 10, -np.inf)

    def value(self, learning_rate: float) -> float:
        """The criterion."""
        return -super().value(learning_rate)


class NoValidation(Distance):
    """Logs nothing that tuning may look at."""

    validation_metric = None


class LogsNothing(Distance):
    """Names a metric that it then does not log as a finite number."""

    def value(self, learning_rate: float) -> float:
        """No number."""
        return float("inf")

    def score(self, arrays: Arrays) -> Metrics:
        """A number."""
        return {"closeness": 1.0}
