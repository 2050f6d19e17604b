"""The contracts between methods, tasks and the engine. The docstrings are normative.

A task poses problems and scores predictions, a method turns a problem into a posterior, the engine runs
them. A method never names a task, a task never names a method, and neither knows of trainers, files,
loggers or devices.

Shapes: S weight samples, B examples of a batch, C classes, K regression outputs, d weights.
Units: every energy and log density is in nats; every share (accuracy, rate) is a fraction.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from bench.predictions import Prediction

if TYPE_CHECKING:
    from torch.utils.data import Dataset

Arrays = dict[str, np.ndarray]
"""Named arrays: what a run leaves behind and all that scoring may look at."""

WeightDistribution = Mapping[str, Distribution]
"""A distribution over weights: parameter name -> distribution whose one event is that whole tensor.

One that couples several tensors stands alone under the key `JOINT`, over the ravelled vector `[d]`
(`bench.weights.ravel`). A distribution whose `normalised` attribute is False has no normaliser: a method
may use it as prior, but the run then has no ELBO.
"""

JOINT = "*"

Prior = Callable[[Mapping[str, Tensor]], WeightDistribution]
"""Makes the prior for a dictionary of parameters; their shapes and device count, not their values."""

CAPABILITIES = {
    "weight_samples": "sample_weights(num_samples, generator) draws stacked weights",
    "density": "log_prob(weights), exact, in nats",
    "moments": "mean and variance per weight",
    "sequential": "as_prior() turns the posterior into the next prior",
    "weighted": "example weights multiply the log likelihood",
    "loss_terms": "likelihood and prior term of a batch, in nats",
    "exact_when_linear": "the fit is the posterior where the network is linear, noise and prior normal",
    "invariant": "the draws leave the posterior invariant: exact but for their finite number",
}


# ------------------------------------------------------------------------------------------------ problems


class Batch(NamedTuple):
    """Examples: inputs `[B, ...]`, targets `[B, ...]`, and weights `[B]` that multiply the log likelihood."""

    inputs: Tensor
    targets: Tensor
    weights: Tensor | None = None


class Likelihood(nn.Module, ABC):
    """How outputs explain a target. Parameters of its own (a learned noise) are trained along."""

    @abstractmethod
    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Log likelihood of each example under each sample, `[S, B]`, from outputs `[S, B, ...]`, in nats."""

    @abstractmethod
    def predict(self, outputs: Tensor) -> Prediction:
        """The prediction that outputs `[S, B, ...]` stand for."""


class NetworkFactory(Protocol):
    """Makes a fresh plain module; its initial weights come from torch's global generator."""

    def __call__(self, dropout: float = 0.0, width: float = 1.0) -> nn.Module:
        """A fresh network with dropout rate `dropout` and hidden layers scaled by `width`."""


@dataclass(frozen=True)
class Problem:
    """What a task poses: a model and data.

    `train` and `val` hold examples `(input, target)` or `(input, target, weight)`. `num_train` is the number
    of examples that the likelihood counts (rows, not their weights).
    """

    network: NetworkFactory
    likelihood: Likelihood
    prior: Prior
    train: Dataset
    val: Dataset | None
    num_train: int


@dataclass(frozen=True)
class Budget:
    """What every method may spend on one fit; posed by the task.

    `batch_size` None means full batch; `patience` stops after that many epochs without a better validation
    NLL and keeps the best epoch, None trains to the end. Without validation examples the training loss, an
    estimate of the negative ELBO where there is one, stands in for the NLL. `draws` is the number of examples
    in an epoch of batches, the data gone over again and again; None is each example once.
    """

    epochs: int
    batch_size: int | None = None
    patience: int | None = None
    draws: int | None = None


# ------------------------------------------------------------------------------------------------- methods

Noise = dict[str, Tensor]
"""All randomness of one loss, each tensor stacked `[S, ...]`: sample s uses the entries at s."""


class Method(pl.LightningModule, ABC):
    """An approximation of the posterior, trained through Lightning's own hooks.

    A file under `methods/` declares one subclass and `NAMES`, a dictionary from each public name to the
    settings that this name fixes; the word `members` in it makes the name an ensemble of so many independent
    copies. It may declare `PRESETS` (preset -> settings on every task, other than the defaults), `SEARCH`
    (setting -> its range in `bench tune`, see `bench.tune`) and `PATTERN`, a regular expression of names that
    spell out settings, its named groups. The subclass declares `settings_class`,
    `provides` (out of `CAPABILITIES`) and `approximates` (one line). A problem that it cannot infer is
    refused in `__init__` by a UsageError.

    Args:
        problem: What to infer.
        settings: An instance of the subclass's `settings_class`.
        start: An earlier fitted method of the same kind; carries warm starts and other state forward.
    """

    settings_class: ClassVar[type]
    approximates: ClassVar[str]
    provides: ClassVar[frozenset[str]] = frozenset()
    trains: ClassVar[bool] = True
    """False where `finish_fit` does all the work and no optimiser step is taken."""
    extra_epochs: int = 0
    """Epochs on top of the budget (pretraining); they are counted in the record's steps."""
    prior_weight: float = 1.0
    """Factor of the prior term in the training loss at present; 1 is Bayes."""
    validation_samples: ClassVar[int] = 8
    stacks: bool = False
    """Whether `loss_terms` runs under `torch.func.vmap` over copies and training has no hooks of its own."""
    stacks_faster: ClassVar[bool] = False
    """Whether copies side by side are measured faster than one after another on a CPU too."""
    compiles_faster: ClassVar[bool] = False
    """Whether a long fit on a CPU is measured faster with `loss_terms` compiled; and than side by side."""
    diverged: bool = False
    """Set by `Engine.fit_many(..., keep_diverged=True)` where the training loss was not finite."""
    reweights: bool = False
    """Whether `finish_fit` takes example weights `[B, R]` and leaves R posteriors, whose predictions have the
    samples of one after the other, under equal draws; all else then speaks of none of them."""
    linearises: bool = False
    """Whether a draw of the weights predicts by the network linearised at its own parameters."""
    num_chains: int = 1
    """Of a sampler with several chains: its prediction's samples come chain after chain, equally many."""
    network: nn.Module

    def __init__(self, problem: Problem, settings: Any, start: Method | None = None) -> None:
        super().__init__()
        self.problem = problem
        self.settings = settings
        self.likelihood = copy.deepcopy(problem.likelihood)
        self.epoch = 0
        self.history: list[dict[str, float]] = []
        self._prior: tuple[tuple[torch.device, torch.dtype], WeightDistribution] | None = None
        # The engine builds methods under a seeded global generator: one draw from it seeds ours.
        self.generator = torch.Generator().manual_seed(int(torch.randint(2**62, ())))

    # ---- what a method must say

    @abstractmethod
    def predict(self, inputs: Tensor, num_samples: int, generator: torch.Generator) -> Prediction:
        """Predictions for inputs `[B, ...]`; S = 1 if deterministic, else `num_samples`.

        Equal generator states give equal weight draws whatever the inputs, so that a prediction does not
        depend on how the inputs are split into batches, nor on train or eval mode. Changes no weight.
        """

    def draw_noise(self, num_samples: int, generator: torch.Generator) -> Noise:
        """The randomness of one evaluation of the loss with S samples; empty if there is none."""
        return {}

    def loss_terms(self, batch: Batch, noise: Noise) -> tuple[Tensor, Tensor]:
        """Likelihood term and prior term of the negative log joint (or negative ELBO), in nats.

        On the scale of the FULL training set (`bench.energy.likelihood_term` rescales the batch), so that
        their sum is an unbiased estimate of the same number at every batch size. For given noise the
        gradient with S samples is the mean of the S gradients with one sample each.
        """
        raise AttributeError(f"{type(self).__name__} declares no loss_terms")

    def finish_fit(self, loader: Iterable[Batch]) -> None:
        """What follows training (a covariance, a generator), or replaces it where `trains` is False."""

    def spends(self, budget: Budget) -> Budget:
        """What this fit takes of the task's budget: its epochs and `extra_epochs`.

        A sampler takes one full-batch transition per epoch, as many as its settings say. Whatever it is, the
        record counts the steps.
        """
        return replace(budget, epochs=budget.epochs + self.extra_epochs)

    @property
    def warmup_epochs(self) -> int:
        """Epochs that leave no posterior yet: early stopping neither counts nor keeps them."""
        return self.extra_epochs

    def diagnostics(self, inputs: Tensor | None = None) -> dict[str, float]:
        """Numbers that tell how far this fit can be trusted, for the record.

        Args:
            inputs: None for those of the fit itself (acceptance, weights of components); inputs `[B, ...]`
                for those of the predictions there (R-hat), of which the record keeps the largest.
        """
        return {}

    @classmethod
    def parameters_per_weight(cls, settings: Any) -> float:
        """Trained numbers per network weight, so that networks of equal cost can be posed.

        Meaningless where it depends on the shapes (full covariance, matrix normal); docs/methods.md has
        measured ones for all.
        """
        return 1.0

    # ---- capabilities, each declared in `provides`

    def sample_weights(self, num_samples: int, generator: torch.Generator) -> dict[str, Tensor]:
        """`weight_samples`: draws from the posterior, stacked `[S, *shape]`."""
        raise AttributeError(f"{type(self).__name__} does not provide weight_samples")

    def log_prob(self, weights: Mapping[str, Tensor]) -> Tensor:
        """`density`: exact log density of stacked weights, `[S]`, in nats."""
        raise AttributeError(f"{type(self).__name__} does not provide density")

    def sample_and_log_prob(
        self, num_samples: int, generator: torch.Generator
    ) -> tuple[dict[str, Tensor], Tensor]:
        """`density`: draws, stacked `[S, *shape]`, and S numbers whose expectation is E log q, in nats.

        Their log densities, or, where a part of E log q is known exactly, that in place of the part.
        """
        weights = self.sample_weights(num_samples, generator)
        with torch.no_grad():
            return weights, self.log_prob(weights)

    def moments(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """`moments`: mean and variance of every weight."""
        raise AttributeError(f"{type(self).__name__} does not provide moments")

    def as_prior(self) -> Prior:
        """`sequential`: the posterior as the prior of the next fit, frozen as it is now."""
        raise AttributeError(f"{type(self).__name__} does not provide sequential")

    # ---- Lightning's hooks, common to all methods trained by gradients

    @property
    def num_train_samples(self) -> int:
        """Weight samples per training step; 1 for methods without the setting."""
        return getattr(self.settings, "train_samples", 1)

    @property
    def prior(self) -> WeightDistribution:
        """The problem's prior over this method's network, on the device and in the type of the weights."""
        parameters = dict(self.network.named_parameters())
        first = next(iter(parameters.values()))
        if self._prior is None or self._prior[0] != (first.device, first.dtype):
            self._prior = (first.device, first.dtype), self.make_prior(parameters)
        return self._prior[1]

    def make_prior(self, parameters: Mapping[str, Tensor]) -> WeightDistribution:
        """The prior of this fit; a method whose settings replace the task's prior overrides this."""
        return self.problem.prior(parameters)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """One draw of the loss per example: (likelihood term + weight * prior term) / num_train."""
        noise = self.draw_noise(self.num_train_samples, self.generator)
        likelihood_term, prior_term = self.loss_terms(batch, noise)
        scale = 1.0 / self.problem.num_train
        return {
            "loss": (likelihood_term + self.prior_weight * prior_term) * scale,
            "likelihood_term": likelihood_term.detach() * scale,
            "prior_term": prior_term.detach() * scale,
        }

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Logs the validation NLL; every epoch uses the same draws, so that epochs can be compared."""
        generator = torch.Generator(batch.inputs.device).manual_seed(0)
        prediction = self.predict(batch.inputs, self.validation_samples, generator)
        self.log("val_nll", -prediction.log_score(batch.targets).mean(), batch_size=len(batch.inputs))

    def on_fit_start(self) -> None:
        """Moves the generator to the device of the weights."""
        if self.generator.device.type != self.device.type:
            self.generator = torch.Generator(self.device).manual_seed(self.generator.initial_seed())

    def on_train_epoch_start(self) -> None:
        """Keeps the number of the epoch, which outlives the trainer."""
        self.epoch = self.current_epoch

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds what the state dictionary does not hold."""
        checkpoint["generator_state"] = self.generator.get_state()
        checkpoint["method_epoch"] = self.epoch
        checkpoint["method_history"] = self.history

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restores what `on_save_checkpoint` added."""
        self.generator.set_state(checkpoint["generator_state"].cpu())
        self.epoch = checkpoint["method_epoch"]
        self.history = checkpoint["method_history"]


# --------------------------------------------------------------------------------------------------- tasks


@dataclass(frozen=True)
class Metric:
    """A number that a task reports.

    `unit` is "fraction" or "nats" or whatever it is measured in; `best` is the value it cannot pass and
    `worst` the other end, either may be infinite: the direction follows from them.
    """

    description: str
    unit: str
    best: float
    worst: float
    may_be_undefined: bool = False

    @property
    def higher_is_better(self) -> bool:
        """Whether larger values are better."""
        return self.best > self.worst


@dataclass(frozen=True)
class Undefined:
    """A metric that has no value here, and why."""

    reason: str


Metrics = dict[str, float | Undefined]


@dataclass(frozen=True)
class Spec:
    """What a task measures. `version` grows whenever the same predictions would score differently.

    `validation_metric` names a metric that the run also logs on validation data: all that tuning may look
    at; None: cannot be tuned.
    """

    question: str
    source: str
    version: int
    metrics: Mapping[str, Metric]
    main_metric: str
    requires: frozenset[str] = frozenset()
    ranked: bool = True
    min_seeds: int = 3
    seed_matters: bool = True
    validation_metric: str | None = None


class Engine(Protocol):
    """What a task may ask for; `bench.engine.Engine` is the one implementation."""

    def fit(
        self, problem: Problem, budget: Budget, start: Method | None = None, probe: bool = False
    ) -> Method:
        """Fits the run's method to the problem; a stopped run finds finished fits again.

        With `probe` every epoch's history says by how much the two terms of the loss pulled at its start
        (`bench.diagnostics.gradient_norms`), where the method has `loss_terms`; no other number changes.
        """

    def fit_many(
        self,
        problems: list[Problem],
        budget: Budget,
        starts: list[Method] | None = None,
        *,
        keep_diverged: bool = False,
    ) -> list[Method]:
        """Independent fits of the run's method, one per problem; side by side where that is faster.

        One that diverges ends the run, or with `keep_diverged` leaves a method whose `diverged` is True.
        """

    def fit_weighted(self, problem: Problem, weights: Tensor, budget: Budget) -> Method:
        """R fits of one problem that differ in the weights of its examples `[R, N]` alone, as one method.

        It can predict and nothing else: its samples are those of one fit after the other, `[R * S, B, ...]`,
        all under the same draws. An example of weight 0 is not in that fit's data. The training data must lie
        in memory; weights that they have are multiplied.
        """

    def predict(self, method: Method, inputs: Tensor, num_samples: int) -> Prediction:
        """Predictions for inputs `[N, ...]` in pieces of bounded memory, gathered on the CPU."""

    def log(self, name: str, value: float, step: int | None = None) -> None:
        """Keeps a number seen during the run (never one computed from test labels)."""

    def stage(self, name: str, number: int = 1, of: int = 1) -> None:
        """Names what follows: a point from which a stopped run resumes."""

    def once(self, compute: Callable[[], Arrays]) -> Arrays:
        """What `compute` returns, small arrays, kept: a stopped run reads them and does not compute again.

        The fits inside leave no checkpoints, but for the last of the run: what later stages need of a fit is
        in the arrays.
        """

    def generator(self, *purpose: str | int) -> torch.Generator:
        """Drives what the task itself draws: the same for all methods, another for every seed of a run."""


class Row(NamedTuple):
    """One point of a curve: `curve` (what is measured), `series` (of which line), abscissa `x`, `value`."""

    curve: str
    series: str
    x: float
    value: float


class Task(ABC):
    """An evaluation protocol.

    A file under `tasks/` declares one subclass, `NAMES` (public name -> settings that this name fixes) and
    `PRESETS` (preset -> settings other than the defaults; the defaults are the preset `standard`).

    Args:
        settings: An instance of the subclass's `settings_class`.
        data_dir: Where data files lie; None searches the usual places.
    """

    settings_class: ClassVar[type]

    def __init__(self, settings: Any, data_dir: str | None = None) -> None:
        self.settings = settings
        self.data_dir = data_dir

    @property
    @abstractmethod
    def spec(self) -> Spec:
        """What is measured, under these settings; needs no data."""

    @abstractmethod
    def data_digest(self) -> str:
        """SHA-256 over the arrays that the task uses."""

    def own_data(self, part: str) -> tuple[Any, Any]:
        """Inputs and targets `[N, ...]` of a part, for a task whose data are not from `bench.data` or tables.

        Such a task overrides this method and has data from nowhere else. `run` may use the parts `train`,
        `val` and `pool` as it likes; every other part, such as `test`, is held out. The laws of tasks change
        what this method returns.
        """
        raise AttributeError(f"{type(self).__name__} has no data of its own")

    @abstractmethod
    def problem(self) -> Problem:
        """The first problem that the task poses; `bench.load` rebuilds a fitted method from it."""

    @abstractmethod
    def run(self, engine: Engine) -> Arrays:
        """Fits and predicts; returns what scoring needs. Must not touch `targets`."""

    @abstractmethod
    def targets(self) -> Arrays:
        """The held-out truth, appended by the engine after `run`."""

    @abstractmethod
    def score(self, arrays: Arrays) -> Metrics:
        """Every metric of the spec, from the arrays alone: pure, and what the leaderboard recomputes."""

    @property
    def target(self) -> str | None:
        """Names the posterior that runs approximate, as a file name: from it a reference is found.

        Runs that differ in budget, repetitions or seed alone share it. None: no run can be a reference.
        """
        return None

    def reference(self, arrays: Arrays) -> Arrays:
        """What of a run's arrays serves as the reference posterior of other runs with the same `target`."""
        return {}

    def curves(self, arrays: Arrays) -> list[Row]:
        """Points of `curves.csv`, from the arrays alone."""
        return []

    def figures(self, arrays: Arrays) -> dict[str, Any]:
        """Altair charts by file name, from the arrays alone."""
        return {}
