"""What a run will cost, told from a few of its steps: `bench run METHOD TASK --dry-run`.

The task runs with an engine that takes a few steps of every kind of fit, predicts the first inputs alone,
times both, and gives the task answers of the right shape; the task's own code runs whole. The forecast is the
wall clock of this rehearsal, and what the engine left out. It does not see that the later steps of a fit take
longer than the first, as the trees of NUTS may, and it knows of early stopping only that it may come.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from bench.batches import most_rows
from bench.contract import Budget, Method, Stored
from bench.engine import trainer
from bench.engine.engine import Engine
from bench.engine.fitting import Fits
from bench.engine.spreading import FitRequest
from bench.engine.stacked import Stacked
from bench.engine.watch import Watch
from bench.errors import BenchError, UsageError
from bench.predictions import Prediction
from bench.runs import setup
from bench.runs.plan import Plan

LONGEST = 50
"""Steps, at most, of an epoch of a rehearsed fit."""
SECONDS = 0.5
"""About how long such an epoch may take."""
TIMED = 2.0
"""Seconds, about, of the epochs from which the pace of a fit is told: short ones are timed many at a time."""


@dataclass(frozen=True)
class Forecast:
    """What a run is expected to cost on this machine.

    Attributes:
        weights: Of the largest network that is fitted.
        parameters: Trained ones of its method.
        fits: How many there are, members of an ensemble each.
        steps: Training steps of all fits.
        may_stop: Whether a fit may stop early: steps and seconds are then the most that there can be.
        seconds: Wall clock.
        training: The part of it that fits take.
        prediction: The part of it that predictions take.
        memory: Largest memory at a time, in bytes: of the accelerator, else of the process.
        unknown: Why the rehearsal ended before the run's end; numbers are then of what came before.
    """

    weights: int
    parameters: int
    fits: int
    steps: int
    may_stop: bool
    seconds: float
    training: float
    prediction: float
    memory: int
    unknown: str | None = None


def forecast(plan: Plan) -> Forecast:
    """Rehearses a run; writes nothing.

    Raises:
        UsageError: As `bench.run` does.
        DataError: If the task's data cannot be had.
    """
    made = setup.set_up(plan)
    choice = made.choice
    own = (choice.method.cls, choice.method_settings, plan.seed, made.engine.options, choice.method.members)
    engine = Rehearsal(*own)
    fits = engine.rehearsed
    if engine.place.world > 1:
        raise UsageError("--dry-run tells the cost on one device: leave --trainer.devices out")
    engine.check()
    began, unknown = time.perf_counter(), None
    try:
        arrays = made.protocol.run(engine)
        made.protocol.score(arrays | made.protocol.given() | made.protocol.targets())
    except (Exception, SystemExit) as error:  # answers of the right shape are not those of a fit
        if isinstance(error, BenchError) and not fits.sizes:
            raise
        unknown = f"without fits the task went no further: {type(error).__name__}: {error}"
    weights, parameters = max(fits.sizes, default=(0, 0))
    return Forecast(
        weights,
        parameters,
        len(engine.fits),
        sum(fit["steps"] for fit in engine.fits),
        fits.may_stop,
        time.perf_counter() - began + engine.left_out + fits.left_out,
        fits.training,
        engine.prediction,
        memory(engine.device),
        unknown,
    )


def memory(device: torch.device) -> int:
    """Largest memory so far, in bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@dataclass(frozen=True)
class _Pace:
    """Seconds of a fit whatever its length, and of every epoch, its validation included."""

    start: float
    epoch: float

    def seconds(self, epochs: int) -> float:
        """Seconds of a whole fit of so many epochs."""
        return self.start + self.epoch * epochs


@dataclass
class _First:
    """The first batches of a loader."""

    loader: Any
    count: int

    def __len__(self) -> int:
        return min(self.count, len(self.loader))

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.loader), len(self))


class _Head(Stored):
    """The first examples of those on disk."""

    def __init__(self, examples: Stored, count: int) -> None:
        self.examples, self.count = examples, count

    def __len__(self) -> int:
        return self.count

    def read(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """As those on disk."""
        return self.examples.read(rows)

    def finish(self, inputs: Tensor, uniforms: Tensor | None) -> Tensor:
        """As those on disk."""
        return self.examples.finish(inputs, uniforms)


class _Rehearsed(Fits):
    """Takes a few steps in place of every fit and says how long all would have taken."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.sizes: list[tuple[int, int]] = []
        self.left_out = self.training = 0.0
        self.may_stop = False
        self._paces: dict[Any, _Pace] = {}

    def _begin(self, request: FitRequest, budget: Budget) -> Any:
        made = super()._begin(request, budget)
        method = made.method
        weights = sum(p.numel() for p in method.network.parameters())
        self.sizes.append((weights, sum(p.numel() for p in method.parameters() if p.requires_grad)))
        self.may_stop |= made.budget.patience is not None
        return made

    def _run(self, current: Any, module: Any, watch: Watch, loader: Any, val: Any = None) -> None:
        epochs, began, seconds = current.trainer.max_epochs, time.perf_counter(), 0.0
        shapes = tuple(tuple(p.shape) for p in module.parameters())
        copies = module.methods if isinstance(module, Stacked) else [module]
        extra = copies[0].extra_epochs
        if isinstance(module, Stacked):
            module.waits = None  # a few steps tell nothing of when copies stop
        for pretrains, count in ((True, extra), (False, epochs - extra)):  # their steps are not alike
            key = (type(module), shapes, len(loader), val is not None, pretrains)
            for copy in copies:
                copy.extra_epochs = sys.maxsize if pretrains else 0
            if key not in self._paces and count:
                self._paces[key] = self._pace(current, module, watch, loader, val)
            seconds += self._paces[key].seconds(count) if count else 0.0
        for copy in copies:
            copy.extra_epochs = extra
        watch.steps = epochs * len(loader)
        self.training += seconds
        self.left_out += seconds - (time.perf_counter() - began)

    def _pace(self, current: Any, module: Any, watch: Watch, loader: Any, val: Any) -> _Pace:
        """Times epochs of a few steps, the first of which is not counted: all pretrain, or none does."""

        def timed(epochs: int, steps: int, validates: bool = True) -> float:
            patience = epochs + 1 if watch.waits else None
            told = (lambda *_: None, None, float("inf"))
            own = Watch(current.request.stage, *told, patience, watch.probe, watch.copies)
            short = replace(current, trainer=trainer.make(self.options, Budget(epochs=epochs), self.place))
            began = time.perf_counter()
            super(_Rehearsed, self)._run(
                short, module, own, _First(loader, steps), val if validates else None
            )
            return time.perf_counter() - began

        first = timed(1, 2, False)
        again = timed(1, 2, False)
        steps = min(len(loader), LONGEST, max(2, round(SECONDS / (again / 2))))
        one = timed(1, steps, False)
        more = min(max(2, round(TIMED / one)), max(2, current.trainer.max_epochs - 1))
        epoch = (timed(1 + more, steps, False) - one) / more
        validation = max(0.0, timed(1, 2) - again) if val is not None else 0.0
        return _Pace(max(0.0, one - epoch) + first - again, epoch * len(loader) / steps + validation)


class Rehearsal(Engine):
    """An engine whose fits are `_Rehearsed`, and that predicts the first inputs alone."""

    def __init__(
        self, method_class: type[Method], method_settings: Any, seed: int, options: Any, members: int
    ) -> None:
        super().__init__(method_class, method_settings, seed, trainer=options, members=members)
        none = (None, self.options, float("inf"), self._notify)
        self.rehearsed = self._fits = _Rehearsed(method_class, method_settings, seed, *none)
        self.prediction = self.left_out = 0.0
        self._warm: set[Any] = set()

    def predict(self, method: Method, inputs: Tensor | Stored, num_samples: int) -> Prediction:
        """Predictions of the first inputs, over and over."""
        size = most_rows(inputs, 50 * num_samples * self.members)
        if len(inputs) <= 2 * size:
            began = time.perf_counter()
            prediction = super().predict(method, inputs, num_samples)
            self.prediction += time.perf_counter() - began
            return prediction
        began = time.perf_counter()
        head = _Head(inputs, size) if isinstance(inputs, Stored) else inputs[:size]
        if size not in self._warm:
            self._warm.add(size)
            super().predict(method, head, num_samples)
        counted = time.perf_counter()
        prediction = super().predict(method, head, num_samples)
        now = time.perf_counter()
        seconds = (now - counted) * len(inputs) / size
        self.prediction += seconds
        self.left_out += seconds - (now - began)
        rows = torch.arange(len(inputs)) % size
        return replace_rows(prediction, rows)


def replace_rows(prediction: Prediction, rows: Tensor) -> Prediction:
    """A prediction of the given rows of its inputs."""
    return type(prediction)(**{name: value[:, rows] for name, value in vars(prediction).items()})
