"""The engine: fits the run's method on Lightning, predicts in pieces, and finds finished work again.

A task talks to `Engine` alone. The seeds of a fit follow from (seed of the run, stage, number of the fit). So
a run that was stopped ends with the same numbers: a finished fit is read from its checkpoint, an unfinished
one goes on from its last saved epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from bench import randomness
from bench.contract import Arrays, Budget, Method, Probe, Problem, Stored
from bench.diagnostics import distinct_draws
from bench.engine import checkpoints, compiled, ensemble, predicting, stacked
from bench.engine.ensemble import Ensemble
from bench.engine.fitting import Fits
from bench.engine.spreading import FitRequest, Fitted, spread
from bench.engine.trainer import TrainerOptions
from bench.errors import Diverged, UsageError
from bench.predictions import Prediction
from bench.system import processes
from bench.system.processes import Place, alone, from_first, ranks


class Engine:
    """Runs one method for one task; see `bench.contract.Engine` for what a task may call.

    Args:
        method_class: The method to fit.
        method_settings: An instance of its settings.
        seed: Seed of the run.
        checkpoints: Folder for checkpoints; None keeps nothing, and nothing can be resumed.
        trainer: Options of the Trainer.
        members: Number of independent copies per fit; their draws are pooled.
        checkpoint_seconds: An unfinished fit is saved at the first epoch's end after this many seconds.

    Attributes:
        fits: What the record says of every finished fit.
        diagnostics: Diagnostics of predictions by name, the largest over all predictions.
        draws: What the record says of the draws behind predictions (`bench.runs.records.RecordedDraws`).
        logged: (name, stage, step, value) of every number that the task logged.
        histories: (stage, rows of the epochs) of every finished fit.
    """

    def __init__(
        self,
        method_class: type[Method],
        method_settings: Any,
        seed: int,
        checkpoints: Path | None = None,
        trainer: TrainerOptions | None = None,
        members: int = 1,
        checkpoint_seconds: float = 30.0,
    ) -> None:
        self.method_class, self.seed, self.checkpoints = method_class, seed, checkpoints
        self.members, self.options = members, trainer or TrainerOptions()
        kept = (checkpoints, self.options, checkpoint_seconds, self._notify)
        self._fits = Fits(method_class, method_settings, seed, *kept)
        self.fits: list[dict[str, Any]] = []
        self.diagnostics: dict[str, float] = {}
        self.draws: list[dict[str, Any]] = []
        self.logged: list[tuple[str, str, float, float]] = []
        self.histories: list[tuple[str, list[dict[str, float]]]] = []
        self._observe: Callable[[str, dict[str, Any]], Any] = lambda event, values: None
        self._stage = "fit"
        self._predictions = self._kept = 0
        self._spent: list[int] = []
        self._call = (0, 1)  # of `fit` or `fit_many`: number of its first fit, and how many it has

    def observe(self, observer: Callable[[str, dict[str, Any]], Any]) -> None:
        """Has `observer(event, values)` called on every stage, epoch, finished fit and logged number."""
        self._observe = observer

    def check(self) -> int:
        """Brings the processes of the run together; gives the rank of this one.

        Raises:
            UsageError: If Lightning or the method cannot work under the options; in one line.
        """
        if self.options.stacked and self.options.compiled:
            raise UsageError("--trainer.stacked and --trainer.compiled: what is side by side is not compiled")
        if self.options.compiled and not compiled.suits(self.method_class):
            raise UsageError(
                "--trainer.compiled: it is for steps that can be compiled, and this method has none"
            )
        processes.join(self.place)
        return self.place.rank

    @property
    def place(self) -> Place:
        """Where this process stands among those of the run."""
        return self._fits.place

    @property
    def device(self) -> torch.device:
        """Where this process trains."""
        return self._fits.device

    # ---- what a task may call

    def stage(self, name: str, number: int = 1, of: int = 1) -> None:
        """Names what follows, the `number`-th of `of` stages; fits and predictions take its name."""
        self._stage = name
        self._observe("stage", {"name": name, "number": number, "of": of})

    def cached(self, compute: Callable[[], Arrays]) -> Arrays:
        """The arrays of `compute`, or those that an earlier start of this run has kept.

        The record's entries of the fits inside are kept with the arrays. Checkpoints of these fits are
        deleted, except those of the run's last fit and its members.
        """
        self._kept += 1
        path = None if self.checkpoints is None else self.checkpoints / f"{self._kept:03d}.kept"
        first = len(self.fits)
        kept = self._fits.until_whole(lambda: self._fits.kept_in(path))
        if kept is not None:
            self.fits += kept["fits"]
            self.histories += kept["histories"]
            self.logged += kept["logged"]
            self.draws = kept["draws"]
            self.diagnostics, self._predictions = kept["diagnostics"], kept["predictions"]
            arrays = {name: tensor.numpy() for name, tensor in kept["arrays"].items()}
        else:
            logged = len(self.logged)
            found = compute()
            arrays = from_first(lambda: found)
            kept = {
                "arrays": {name: torch.tensor(array) for name, array in arrays.items()},
                "fits": self.fits[first:],
                "histories": self.histories[first:],
                "logged": self.logged[logged:],
                "diagnostics": self.diagnostics,
                "draws": self.draws,
                "predictions": self._predictions,
            }
            if path is not None:
                from_first(lambda: checkpoints.save(kept, path))
        self._spent += range(first, len(self.fits))
        if self.checkpoints is not None and ranks()[0] == 0:
            for count in self._spent[: -self.members]:
                for spent in self.checkpoints.glob(f"{count:03d}-*.ckpt"):
                    spent.unlink()
        self._spent = self._spent[-self.members :]
        return arrays

    def generator(self, *purpose: str | int) -> torch.Generator:
        """Drives what the task itself draws, on the CPU."""
        return randomness.generator(self.seed, "task", *purpose)

    def log(self, name: str, value: float, step: int | None = None) -> None:
        """Keeps a number seen during the run."""
        step_or_count = float(len(self.logged) if step is None else step)
        self.logged.append((name, self._stage, step_or_count, float(value)))
        self._observe("log", {"name": name, "value": value, "step": step})

    def fit(
        self, problem: Problem, budget: Budget, start: Method | None = None, probe: Probe | None = None
    ) -> Method:
        """Fits the method to the problem within the budget; of an ensemble, every member.

        Raises:
            Diverged: If the loss of a step is not finite; says at which stage and step.
        """
        (method,) = self._fit_all([problem], budget, [start], probe)
        if method.diverged is not None:
            raise Diverged(method.diverged)
        return method

    def fit_many(
        self, problems: list[Problem], budget: Budget, starts: list[Method] | None = None
    ) -> list[Method]:
        """Independent fits, one per problem, each with its own initial weights, data order and noise.

        One whose loss is not finite has a `diverged` that says why; the others go on.
        """
        return self._fit_all(problems, budget, [*(starts or len(problems) * [None])])

    def _fit_all(
        self,
        problems: list[Problem],
        budget: Budget,
        starts: list[Method | None],
        probe: Probe | None = None,
    ) -> list[Method]:
        pairs = [
            pair
            for problem, start in zip(problems, starts, strict=True)
            for pair in ensemble.split(problem, start, self.members)
        ]
        first = len(self.fits)
        self._call = (first, len(pairs))
        requests = [FitRequest(first + i, self._stage, *pair) for i, pair in enumerate(pairs)]
        return self._pooled([self._book(fitted) for fitted in self._fitted(requests, budget, probe)])

    def fit_stages(
        self, stages: list[str], pose: Callable[[int], Problem], budget: Budget
    ) -> Iterator[Method]:
        """A fit per stage, none of which needs another; each device makes its own, or several side by side.

        Raises:
            Diverged: As `fit`, in the order of the stages.
        """
        world = ranks()[1]
        at_once = len(stages) if self.options.stacked else world
        if at_once == 1:
            for k, stage in enumerate(stages):
                self.stage(stage, k + 1, len(stages))
                yield self.fit(pose(k), budget)
            return
        for low in range(0, len(stages), at_once):
            some = range(len(stages))[low : low + at_once]
            self.stage(stages[low], low + 1, len(stages))
            pairs = [(k, pair) for k in some for pair in ensemble.split(pose(k), None, self.members)]
            requests = [FitRequest(len(self.fits) + i, stages[k], *pair) for i, (k, pair) in enumerate(pairs)]
            fitted = self._fitted(requests, budget, together=self.members * -(-len(some) // world))
            for k in some:
                if k > low:
                    self.stage(stages[k], k + 1, len(stages))
                self._call = (len(self.fits), self.members)
                (method,) = self._pooled([self._book(next(fitted)) for _ in range(self.members)])
                if method.diverged is not None:
                    raise Diverged(method.diverged)
                yield method

    def _pooled(self, fitted: list[Method]) -> list[Method]:
        if self.members == 1:
            return fitted
        return [Ensemble(fitted[i : i + self.members]) for i in range(0, len(fitted), self.members)]

    def fit_weighted(self, problem: Problem, weights: Tensor, budget: Budget) -> Method:
        """R fits that differ in the weights of the examples `[R, N]` alone; see `bench.contract.Engine`.

        Raises:
            UsageError: If the data do not lie in memory, or the weights are not R rows of N that are finite,
                at least 0, and above 0 somewhere.
        """
        inputs, targets, weights = stacked.weighted(problem, weights)
        if "reweighted" in self.method_class.provides and self.members == 1:
            train = TensorDataset(inputs, targets, weights.mT.contiguous())
            return stacked.Reweighted([self.fit(replace(problem, train=train), budget)])
        problems = []
        for row in weights:
            kept = row > 0
            train = TensorDataset(inputs[kept], targets[kept], row[kept])
            problems.append(replace(problem, train=train, num_train=len(train)))
        return stacked.Reweighted(self.fit_many(problems, budget))

    def predict(self, method: Method, inputs: Tensor | Stored, num_samples: int) -> Prediction:
        """Predictions for inputs `[N, ...]`, on the CPU; each draw of the weights is shared by all inputs.

        Raises:
            Diverged: If the fit has diverged, or a prediction is not finite.
        """
        if method.diverged is not None:
            raise Diverged(method.diverged)
        self._predictions += 1
        seed = randomness.derive(self.seed, "predict", self._stage, self._predictions)
        draws = (num_samples, self.members, seed, self._stage, self.device)
        prediction, found = predicting.predict(method, inputs, *draws)
        for name, value in found.items():
            self.diagnostics[name] = max(value, self.diagnostics.get(name, value))
        self._count(num_samples, distinct_draws(prediction))
        return prediction

    # ---- how

    def _count(self, asked: int, distinct: int) -> None:
        """Takes the draws behind a prediction into the record; those alike in a stage are one entry."""
        entry = {"stage": self._stage, "asked": asked, "distinct": distinct}
        same = next((known for known in self.draws if entry.items() <= known.items()), None)
        if same is None:
            self.draws.append(entry | {"predictions": 1})
        else:
            same["predictions"] += 1

    def _fitted(
        self, requests: Sequence[FitRequest], budget: Budget, probe: Probe | None = None, together: int = 0
    ) -> Iterator[Fitted]:
        """Makes fits, or reads them from their checkpoints, in their order.

        Several are spread over the processes of the run; one is shared by all of them.

        Args:
            requests: At least one.
            budget: Of each.
            probe: As of `fit`.
            together: How many of them one process is to make; 0 leaves that open.
        """

        def here(requests: Sequence[FitRequest]) -> Iterator[Fitted]:
            if len(requests) > 1 and self._stacks(requests[0].problem, budget):
                stack = self._fits.until_whole(partial(self._fits.stack, requests, budget))
                if stack is not None:
                    yield from stack
                    return
                if self.options.stacked:
                    self._fits.notice("fits are trained one after another: these cannot be side by side")
            for request in requests:
                yield self._fits.until_whole(partial(self._fits.fit, request, budget, probe))

        world = ranks()[1]
        is_shared = len(requests) == 1 and not together and self.method_class.data_parallel
        if world == 1 or is_shared:
            yield from here(requests)
            return
        with alone():
            size = together or (
                -(-len(requests) // world) if self._stacks(requests[0].problem, budget) else 1
            )
        yield from spread(requests, size, here, self._fits.new)

    def _stacks(self, problem: Problem, budget: Budget) -> bool:
        """Whether several fits are trained side by side where they can be."""
        if self.options.stacked is not None:
            return self.options.stacked
        return "stacked" in self.method_class.fastest and not self._fits.compiles(problem, budget)

    def _notify(self, event: str, values: dict[str, Any], number: int | None = None) -> None:
        """Tells an event; that of a fit of that number with its place among the fits of the call."""
        if number is not None:
            values = values | {"fit": number - self._call[0] + 1, "fits": self._call[1]}
        self._observe(event, values)

    def _book(self, fitted: Fitted) -> Method:
        """Takes a fit into the record and tells it."""
        method, fit, count = fitted.method, fitted.fit, len(self.fits)
        if not fitted.is_told and not fitted.was_there:
            for row in method.history:
                steps = round(fit["steps"] * row["epoch"] / fit["epochs"])
                self._notify("epoch", row | {"of": fit["epochs"], "steps": steps}, count)
        self._notify("fit", {"was_there": fitted.was_there, "steps": fit["steps"]}, count)
        self.fits.append(fit)
        self.histories.append((fit["stage"], method.history))
        return method
