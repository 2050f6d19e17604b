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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, Self

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from bench import optimizers
from bench.comparison import Comparison, FinishedRun, of_metrics
from bench.errors import UsageError
from bench.fresh import Fresh
from bench.predictions import Prediction
from bench.problem import JOINT as JOINT
from bench.problem import Batch, Budget, Prior, Problem, Stored, WeightDistribution
from bench.problem import Likelihood as Likelihood
from bench.problem import NetworkFactory as NetworkFactory
from bench.spec import Arrays, Layout, Metrics, Row, Spec
from bench.spec import Metric as Metric
from bench.spec import Undefined as Undefined
from bench.system.processes import from_first
from bench.weights import forward, sampled_outputs

CAPABILITIES = {
    "weight_samples": "sample_weights(num_samples, generator) draws stacked weights",
    "density": "log_prob(weights), exact, in nats",
    "moments": "mean and variance per weight",
    "sequential": "as_prior() turns the posterior into the next prior",
    "weighted": "example weights multiply the log likelihood",
    "reweighted": "R weights per example, `[B, R]`, give finish_fit R posteriors at once",
    "loss_terms": "likelihood and prior term of a batch, in nats",
    "exact_when_linear": "the fit is the posterior where the network is linear, noise and prior normal",
    "invariant": "the draws leave the posterior invariant: exact but for their finite number",
    "scale_settable": "set_scale(sigma) gives every weight the same scale, and leaves the means",
}
STATEMENTS = {
    "exact": "the fit is the posterior where the network is linear, noise and prior normal",
    "exact in the limit of steps": "the draws tend to the posterior as steps grow in number and shrink",
    "exact in the limit of particles": "the particles tend to the posterior as they grow in number",
    "mode and curvature exact": "mode and curvature are those of the negative log joint",
    "mode exact": "the network that predicts is that at the mode of the posterior",
    "mean-field optimum of KL": "independent weights, with the moments of the normals of least KL(q || p)",
    "optimum of KL among normals": "the normal of least KL(q || p): the posterior, where that is normal",
    "optimum of KL within its family": "least KL(q || p) in a family that holds all independent normals",
    "moments of iterates": "mean and variances are those of the last iterates of an optimiser",
    "none": "nothing that a law could hold",
}
"""What a method may declare of its posterior; `bench.laws.statements` has the law of each."""
OF_WEIGHTS = frozenset({"weight_samples", "density", "moments", "sequential", "scale_settable"})
"""Capabilities that speak of the weights of the problem's network."""


# ------------------------------------------------------------------------------------------------- methods

Noise = dict[str, Tensor]
"""All randomness of one loss, tensors `[S, ...]`. Sample s uses entry s of every tensor."""


class Method(pl.LightningModule, ABC):
    """An approximation of the posterior, trained through Lightning's own hooks.

    A file under `methods/` declares one subclass and `NAMES`, a dictionary from each public name to the
    settings that the name fixes; the word `members` in it makes the name an ensemble of so many independent
    copies. It is written out, since names are read from the source (`bench.system.names`). The file may
    declare `PRESETS` (preset -> settings on every task, other than the defaults), `SEARCH` (setting -> its
    range in `bench tune`) and `PATTERN`, a regular expression for names that begin with the file's and spell
    out settings; its named groups are the settings. A problem that the method cannot infer is refused in
    `__init__`, by a UsageError. A method does not touch Lightning's trainer.

    Args:
        problem: What to infer; the method gets a likelihood of its own.
        settings: An instance of the subclass's `settings_class`; `optimizer`, `learning_rate` and perhaps
            `rate_decay` name its optimiser.
        start: An earlier fitted method of the same class, from which the fit goes on; None starts afresh.
    """

    # Of the class: known without a problem.
    settings_class: ClassVar[type]
    approximates: ClassVar[str]
    """What stands in for the posterior, in one line."""
    provides: frozenset[str] = frozenset()
    """Out of `CAPABILITIES`."""
    declares: ClassVar[str | tuple[str, Mapping[str, Any]]]
    """Out of `STATEMENTS`, and perhaps the settings under which the method is held to it; on one line."""
    data_parallel: ClassVar[bool] = True
    """False where every step needs all data at once: one process then makes the fit, whatever the devices."""
    seed_matters: ClassVar[bool] = True
    """False where the fits of equal problems are equal under every seed."""
    fastest: ClassVar[tuple[Literal["compiled", "stacked"], ...]] = ()
    """Ways of training that were measured to be faster on a CPU, the fastest first: a long fit with
    `loss_terms` compiled; several fits stacked side by side. Empty: one after another, as written."""

    validation_samples: ClassVar[int] = 8
    """Draws behind the validation NLL."""
    compilable: ClassVar[str] = "loss_terms"  # in which training spends its time, for `bench.engine.compiled`

    @classmethod
    def parameters_per_weight(cls, settings: Any) -> float | None:
        """How many numbers training optimises per weight of the network, at least 1.

        None: no fixed multiple. Not counted are what is computed from the trained (a curvature, moments of
        iterates), draws, other members of an ensemble, and a generator of data.
        """
        return 1.0

    @classmethod
    def made_for(cls, problem: Problem, settings: Any, start: Self | None = None) -> Self:
        """An unfitted instance, with a network of its width if the problem has `equal_parameters`.

        Raises:
            UsageError: If the method cannot infer the problem, or has no width.
        """
        if problem.equal_parameters:
            multiple = cls.parameters_per_weight(settings)
            if multiple is None:
                raise UsageError(
                    f"{cls.__module__.rpartition('.')[2]} cannot be compared at equal numbers of parameters, "
                    "which are no fixed multiple of its network's: take another method"
                )
            problem = replace(problem, network=partial(problem.network, width=multiple**-0.5))
        return cls(problem, settings, start)

    # Of one fitted or unfitted instance: may depend on its settings.
    trains: bool = True
    """False where `finish_fit` does all the work and no optimiser step is taken."""
    stacks: bool = False
    """Whether `loss_terms` runs under `torch.func.vmap` over copies and training has no hooks of its own."""
    extra_epochs: int = 0
    """Epochs on top of the budget (pretraining); the record's steps count them."""
    num_chains: int = 1
    """C, above 1 where the draws are those of C Markov chains: S of them, a multiple of C, in weights as in
    predictions, are S / C of each in its own order, chain after chain."""
    num_draws: int | None = None
    """Draws that there are, of all chains together, which repeat where more are asked for; None: no end."""
    diverged: str | None = None
    """Why this fit is no posterior: its loss was not finite. `Engine.fit_many` sets it."""
    network: nn.Module
    """The problem's own; or, where what was published is a layer, with that in place of its last one. Such a
    method has other weights than were posed, and provides nothing that is over weights (`OF_WEIGHTS`)."""

    def __init__(self, problem: Problem, settings: Any, start: Method | None = None) -> None:
        super().__init__()
        self.problem = problem
        self.settings = settings
        self.likelihood = copy.deepcopy(problem.likelihood)
        self.epoch = 0
        """The present epoch, or the last one: it outlives the trainer. Counted from 0."""
        self.history: list[dict[str, float]] = []
        """Of every epoch its number from 1, its losses in nats per example, and what was validated."""
        # The engine builds methods under a seeded global generator: one draw from it seeds ours.
        self.generator = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
        """Source of all randomness in training; on the device of the weights."""
        self._prior: tuple[tuple[torch.device, torch.dtype], WeightDistribution] | None = None

    @property
    def num_train_samples(self) -> int:
        """Weight samples per training step; 1 for methods without the setting."""
        return getattr(self.settings, "train_samples", 1)

    @property
    def prior(self) -> WeightDistribution:
        """The prior over the network's weights, on their device and in their type: that of `make_prior`."""
        first = next(self.network.parameters())
        if self._prior is None or self._prior[0] != (first.device, first.dtype):
            parameters = dict(self.network.named_parameters())
            self._prior = (first.device, first.dtype), self.make_prior(parameters)
        return self._prior[1]

    # ---- prediction: a method with `weight_samples` has it already

    def predict(self, inputs: Tensor, num_samples: int, generator: torch.Generator) -> Prediction:
        """Predictions for inputs `[B, ...]`; S = 1 if deterministic, else `num_samples`.

        Equal generator states give equal draws of the weights, whatever the inputs. So a prediction depends
        neither on how inputs are split into batches, nor on train or eval mode. It changes no weight.
        """
        draws = (self.network, self.sample_weights, inputs, num_samples, generator, self.outputs)
        return self.likelihood.predict(sampled_outputs(*draws))

    def outputs(self, weights: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        """Outputs `[S, B, ...]` of the network for inputs `[B, ...]` under drawn weights `[S, *shape]`.

        Overridden by the network linearised at its own parameters (`bench.weights.linearised`) or not at all.
        """
        return forward(self.network, weights, inputs)

    # ---- training

    def draw_noise(self, num_samples: int, generator: torch.Generator) -> Noise:
        """The randomness of one evaluation of the loss with S samples; empty if there is none."""
        return {}

    def loss_terms(self, batch: Batch, noise: Noise) -> tuple[Tensor, Tensor]:
        """Likelihood term and prior term of the negative log joint (or negative ELBO), in nats.

        Both are on the scale of the FULL training set; `bench.energy.likelihood_term` rescales the batch.
        Their sum then estimates the same number, without bias, at every batch size. For given noise the
        gradient with S samples is the mean of the S gradients with one sample each.
        """
        raise self._lacks("loss_terms")

    def finish_fit(self, loader: Iterable[Batch]) -> None:
        """The work after training, such as a covariance; where `trains` is False, all of the fit."""

    def spends(self, budget: Budget) -> Budget:
        """The budget that this fit uses: the task's epochs and `extra_epochs`.

        A sampler takes as many epochs as its settings ask for, one full-batch transition each.
        """
        return replace(budget, epochs=budget.epochs + self.extra_epochs)

    @property
    def warmup_epochs(self) -> int:
        """Epochs after which there is no posterior yet. Early stopping neither counts nor keeps them."""
        return self.extra_epochs

    @property
    def prior_weight(self) -> float:
        """Factor of the prior term in the training loss at present; 1 is Bayes."""
        return 1.0

    def make_prior(self, parameters: Mapping[str, Tensor]) -> WeightDistribution:
        """The prior of this fit; `self.prior` keeps it. Overridden where settings replace the task's."""
        return self.problem.prior(parameters)

    def diagnostics(self, inputs: Tensor | None = None) -> dict[str, float]:
        """Numbers that tell how far this fit can be trusted, for the record.

        Args:
            inputs: None asks for diagnostics of the fit (acceptance, weights of components), inputs
                `[B, ...]` for those of the predictions there (R-hat), of which the record keeps the largest.
        """
        return {}

    # ---- Lightning's hooks, common to all methods that are trained by gradients

    def configure_optimizers(self) -> Any:
        """The optimiser that the settings name, over every parameter that is trained; its rate may decay."""
        trained = (p for p in self.parameters() if p.requires_grad)
        optimizer = optimizers.make(trained, self.settings.optimizer, self.settings.learning_rate)
        decay = getattr(self.settings, "rate_decay", 1.0)
        if decay == 1:
            return optimizer
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, decay)
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """One draw of the loss per example: (likelihood term + prior weight * prior term) / num_train."""
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
        with torch.autocast(batch.inputs.device.type, enabled=False):  # as predictions are after the fit
            prediction = self.predict(batch.inputs, self.validation_samples, generator)
        self.log("val_nll", -prediction.log_score(batch.targets).mean(), batch_size=len(batch.inputs))

    def on_fit_start(self) -> None:
        """Moves the generator to the device of the weights."""
        if self.generator.device.type != self.device.type:
            self.generator = torch.Generator(self.device).manual_seed(self.generator.initial_seed())

    def on_train_epoch_start(self) -> None:
        """Keeps the number of the epoch."""
        self.epoch = self.current_epoch

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        """Tells the method which step is an epoch's last."""
        if self.trainer.is_last_batch:
            self.on_last_step()

    def on_last_step(self) -> None:
        """Called after an epoch's last step, before its validation and its checkpoint; does nothing here."""

    def agree(self, decision: bool) -> bool:
        """The first process's decision, in all of them: devices of other kinds round otherwise."""
        return from_first(lambda: decision)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds what the state dictionary does not hold."""
        checkpoint["generator_state"] = self.generator.get_state()
        checkpoint["generator_device"] = str(self.generator.device)
        checkpoint["method_epoch"] = self.epoch
        checkpoint["method_history"] = self.history

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restores what `on_save_checkpoint` added; the generator where its device is not here too stays."""
        device = torch.device(checkpoint["generator_device"])
        if device.type == "cpu" or torch.get_device_module(device).is_available():
            self.generator = torch.Generator(device)
            self.generator.set_state(checkpoint["generator_state"].cpu())
        self.epoch = checkpoint["method_epoch"]
        self.history = checkpoint["method_history"]

    # ---- capabilities, each declared in `provides`

    def sample_weights(self, num_samples: int, generator: torch.Generator) -> dict[str, Tensor]:
        """`weight_samples`: draws from the posterior, stacked `[S, *shape]`."""
        raise self._lacks("weight_samples")

    def log_prob(self, weights: Mapping[str, Tensor]) -> Tensor:
        """`density`: exact log density of stacked weights, `[S]`, in nats."""
        raise self._lacks("density")

    def sample_and_log_prob(
        self, num_samples: int, generator: torch.Generator
    ) -> tuple[dict[str, Tensor], Tensor]:
        """`density`: draws, stacked `[S, *shape]`, and S numbers whose expectation is E log q, in nats.

        The numbers are log densities; a summand whose expectation is known may be replaced by it.
        """
        weights = self.sample_weights(num_samples, generator)
        with torch.no_grad():
            return weights, self.log_prob(weights)

    def moments(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """`moments`: mean and variance of every weight, each `[*shape]`."""
        raise self._lacks("moments")

    def as_prior(self) -> Prior:
        """`sequential`: the posterior as the prior of the next fit, frozen as it is now."""
        raise self._lacks("sequential")

    def set_scale(self, sigma: float) -> None:
        """`scale_settable`: every weight's scale parameter becomes `sigma`, above 0, in weight units.

        The means, which are the parameters of `network`, stay, and training can go on from there. The
        standard deviations within a tensor are then equal and proportional to sigma, and in a tensor of one
        weight they are sigma. How they depend on the size of the tensor is the family's own.
        """
        raise self._lacks("scale_settable")

    def _lacks(self, capability: str) -> AttributeError:
        return AttributeError(f"{type(self).__name__} does not provide {capability}")


# --------------------------------------------------------------------------------------------------- tasks

Probe = Callable[[Method, Batch, torch.Generator], dict[str, float]]
"""Measures a method at the start of an epoch: on the same examples, under the same noise every time."""


class Engine(Protocol):
    """What a task may ask for; `bench.engine.engine.Engine` is the one implementation."""

    def fit(
        self, problem: Problem, budget: Budget, start: Method | None = None, probe: Probe | None = None
    ) -> Method:
        """Fits the run's method to the problem; a stopped run that goes on does not repeat a finished fit.

        A fit that diverges ends the run. The numbers of a `probe` are added to every epoch's history.
        """

    def fit_many(
        self, problems: list[Problem], budget: Budget, starts: list[Method] | None = None
    ) -> list[Method]:
        """Independent fits of the run's method, one per problem; side by side where that is faster.

        A fit that diverges gives a method whose `diverged` says why. Predicting with it ends the run.
        """

    def fit_stages(
        self, stages: list[str], pose: Callable[[int], Problem], budget: Budget
    ) -> Iterator[Method]:
        """A fit per stage, none of which needs another: `stage` and `fit` in turn, spread over the devices.

        `pose(k)` gives the problem of stage k, from 0. Whatever is asked of the engine between two fits is
        of the stage of the first.
        """

    def fit_weighted(self, problem: Problem, weights: Tensor, budget: Budget) -> Method:
        """R fits of one problem that differ in the weights of its examples `[R, N]` alone, as one method.

        The method can only predict. Its samples `[R * S, B, ...]` are the S samples of the first fit, then
        those of the second, and so on, all under the same draws. A fit does not see examples of weight 0. The
        training data must lie in memory; weights that they already have multiply these.
        """

    def predict(self, method: Method, inputs: Tensor | Stored, num_samples: int) -> Prediction:
        """Predictions for inputs `[N, ...]` in pieces of bounded memory, gathered on the CPU."""

    def log(self, name: str, value: float, step: int | None = None) -> None:
        """Keeps a number seen during the run (never one computed from test labels)."""

    def stage(self, name: str, number: int = 1, of: int = 1) -> None:
        """Names what follows, the `number`-th of `of` parts of the run; a stopped run goes on from here."""

    def cached(self, compute: Callable[[], Arrays]) -> Arrays:
        """Calls `compute` and keeps the small arrays that it returns; a run that goes on reads them.

        Fits inside leave no checkpoints, except the last of the run. Later stages have the arrays alone.
        """

    def generator(self, *purpose: str | int) -> torch.Generator:
        """For random numbers of the task itself: the same for all methods, another for every seed."""


class Task(ABC):
    """An evaluation protocol.

    A file under `tasks/` declares one subclass, `NAMES` (public name -> settings that this name fixes,
    written out as a dictionary) and `PRESETS` (preset -> settings other than the defaults; the defaults are
    the preset `standard`). A task is made of an instance of its `settings_class` and the folder of data
    files, None to search the usual places.
    """

    settings_class: ClassVar[type]
    tuned_with: ClassVar[Mapping[str, Any]] = {}
    """Of a task that trains on all its examples: the settings under which a search has some
    to validate on."""
    tuned_by: ClassVar[str] = "validation"
    """What `bench tune` chooses by: the validation metric; or a metric of the task, for every method, where
    it asks what a method can do and validation data do not tell."""

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
        """Inputs and targets `[N, ...]` of a part, where data are from neither `bench.data` nor tables.

        Such a task has data from nowhere else: the laws of tasks change them here. `run` may use the parts
        `train`, `val` and `pool` as it likes; every other part, such as `test`, is held out.
        """
        raise AttributeError(f"{type(self).__name__} has no data of its own")

    def problem(self) -> Problem:
        """The first problem that the task poses; `bench.load` rebuilds a fitted method from it.

        Every task has one but studies in closed form (`Spec.closed_form`).
        """
        raise AttributeError(f"{type(self).__name__} poses no problem")

    def loaded(self, directory: Path, restore: Callable[[Problem], Method]) -> Any:
        """What `bench.load` gives of a run: by default the method that `restore` rebuilds for a problem."""
        return restore(self.problem())

    def notes(self) -> Mapping[str, str]:
        """Texts that a run keeps beside its record, by file name; `notes.txt` is shown under its metrics."""
        return {}

    def remarks(self, arrays: Arrays) -> list[str]:
        """Sentences of one line on a run's predictions, from the arrays alone: what its metrics would hide.

        They are added to `notes.txt`, and stand in the report.
        """
        return []

    @abstractmethod
    def run(self, engine: Engine) -> Arrays:
        """Fits and predicts; returns what scoring needs. Must not touch `targets`."""

    @abstractmethod
    def targets(self) -> Arrays:
        """The held-out truth. The runner locks it during `run`, and adds it to the arrays afterwards."""

    def given(self) -> Arrays:
        """What else scoring needs and no method says, such as whose eyes the test images show.

        The runner adds it to the arrays. Neither this nor the targets are believed of a stranger
        (`leaderboard/check/truth.py`).
        """
        return {}

    @abstractmethod
    def score(self, arrays: Arrays) -> Metrics:
        """Every metric of the spec, from the arrays alone; the leaderboard calls it again on stored ones."""

    def layouts(self) -> dict[str, Layout] | None:
        """What every array of a run looks like, targets included; needs no data. A ranked task says it."""
        return None

    def losses(self, arrays: Arrays) -> np.ndarray | None:
        """The main metric of each held-out example `[N]`, in the order of the arrays; its mean is the metric.

        Under overlapping splits (`Spec.split_ratio`), of each split. None: the metric is no such mean.
        """
        return None

    def fresh(self) -> Fresh | None:
        """How the task draws other test sets, for rounds with hidden labels; None if it draws none."""
        return None

    @property
    def target(self) -> str | None:
        """Name, fit for a file, of the posterior that runs of any budget approximate; None: no reference."""
        return None

    def reference(self, arrays: Arrays) -> Arrays:
        """The part of a run's arrays that serves other runs with the same `target` as reference posterior."""
        return {}

    def curves(self, arrays: Arrays) -> list[Row]:
        """Points of `curves.csv`, from the arrays alone."""
        return []

    def figures(self, arrays: Arrays) -> dict[str, Any]:
        """Altair charts by file name, from the arrays alone."""
        return {}

    @classmethod
    def compare(cls, runs: Sequence[FinishedRun]) -> Comparison:
        """Several runs together: charts, a table, and what can be said of their differences, with intervals.

        The runs are of all tasks that inherit the same `compare`; UsageError says that they cannot stand
        together. By default every metric is tabled and the main metric compared (`bench.comparison`).
        """
        return of_metrics(runs)
