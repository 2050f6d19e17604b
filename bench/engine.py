"""The engine: fits the run's method on Lightning, predicts in pieces, and finds finished work again.

A task talks to `Engine` alone. The seeds of a fit follow from (seed of the run, stage, number of the fit). So
a run that was stopped ends with the same numbers: a finished fit is read from its checkpoint, an unfinished
one goes on from its last saved epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from bench import checkpoints, compiled, ensemble, randomness, stacked, trainer
from bench.batches import OnDevice, batches, inputs_of, most_rows
from bench.checkpoints import Damaged
from bench.contract import Arrays, Budget, Method, Probe, Problem, Stored
from bench.ensemble import Ensemble
from bench.errors import Diverged, UsageError
from bench.predictions import BadPrediction, Prediction
from bench.trainer import TrainerOptions, ranks
from bench.watch import Watch

if TYPE_CHECKING:
    from pytorch_lightning import Trainer

_PROBED = 10_000
"""Examples, at most, that a probe sees."""


@dataclass
class _Job:
    """One fit under way; `fit` holds the record's entry for the fit; None until the fit is finished.

    `loader` gives this process its share of the training examples, `everything` gives every process all.
    """

    method: Method
    budget: Budget
    trainer: Trainer
    loader: Any
    everything: Any
    path: Path | None
    fit: dict[str, Any] | None = None
    compiled: bool = False

    @property
    def is_finished(self) -> bool:
        return self.fit is not None


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
        logged: (name, stage, step, value) of every number that the task logged.
        histories: (stage, rows of the epochs) of every finished fit.
        device: Where the fits are trained.
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
        self.method_class, self.method_settings, self.seed = method_class, method_settings, seed
        self.checkpoints, self.members = checkpoints, members
        self.options = trainer or TrainerOptions()
        self.checkpoint_seconds = checkpoint_seconds
        self.fits: list[dict[str, Any]] = []
        self.diagnostics: dict[str, float] = {}
        self.logged: list[tuple[str, str, float, float]] = []
        self.histories: list[tuple[str, list[dict[str, float]]]] = []
        self.device = torch.device("cpu")
        self._observe: Callable[[str, dict[str, Any]], Any] = lambda event, values: None
        self._told: set[str] = set()
        self._stage = "fit"
        self._predictions = self._kept = 0
        self._spent: list[int] = []
        self._call = (0, 1)  # of `fit` or `fit_many`: number of its first fit, and how many it has

    def observe(self, observer: Callable[[str, dict[str, Any]], Any]) -> None:
        """Has `observer(event, values)` called on every stage, epoch, finished fit and logged number."""
        self._observe = observer

    def check(self) -> int:
        """The rank of this process under the trainer's options.

        Raises:
            UsageError: If Lightning or the method cannot work under the options; in one line.
        """
        if self.options.stacked and self.options.compiled:
            raise UsageError("--trainer.stacked and --trainer.compiled: what is side by side is not compiled")
        if self.options.compiled and "loss_terms" not in self.method_class.provides:
            raise UsageError("--trainer.compiled: only `loss_terms` are compiled, and this method has none")
        return self._alone.global_rank

    @cached_property
    def _alone(self) -> Trainer:
        """A Trainer that trains nothing, and knows device and processes."""
        return trainer.make(self.options, Budget(epochs=1))

    # ---- what a task may call

    def stage(self, name: str, number: int = 1, of: int = 1) -> None:
        """Names what follows, the `number`-th of `of` stages; fits and predictions take its name."""
        self._stage = name
        self._observe("stage", {"name": name, "number": number, "of": of})

    def once(self, compute: Callable[[], Arrays]) -> Arrays:
        """The arrays of `compute`, or those that an earlier start of this run has kept.

        The record's entries of the fits inside are kept with the arrays. Checkpoints of these fits are
        deleted, except those of the run's last fit and its members.
        """
        self._kept += 1
        path = None if self.checkpoints is None else self.checkpoints / f"{self._kept:03d}.kept"
        first = len(self.fits)
        kept = self._until_whole(lambda: checkpoints.read(path) if path and path.exists() else None)
        if kept is not None:
            self.fits += kept["fits"]
            self.histories += kept["histories"]
            self.logged += kept["logged"]
            self.diagnostics, self._predictions = kept["diagnostics"], kept["predictions"]
            arrays = {name: tensor.numpy() for name, tensor in kept["arrays"].items()}
        else:
            logged = len(self.logged)
            arrays = compute()
            kept = {
                "arrays": {name: torch.tensor(array) for name, array in arrays.items()},
                "fits": self.fits[first:],
                "histories": self.histories[first:],
                "logged": self.logged[logged:],
                "diagnostics": self.diagnostics,
                "predictions": self._predictions,
            }
            if path is not None and ranks()[0] == 0:
                checkpoints.save(kept, path)
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
        parts = [
            part
            for problem, start in zip(problems, starts, strict=True)
            for part in ensemble.split(problem, start, self.members)
        ]
        self._call = (len(self.fits), len(parts))
        side_by_side = self.options.stacked
        if side_by_side is None:
            side_by_side = "stacked" in self.method_class.fastest and not self._compiles(problems[0], budget)
        together = partial(self._fit_stacked, parts, budget)
        fitted = self._until_whole(together) if side_by_side and len(parts) > 1 else None
        if fitted is None:
            fits = (partial(self._fit, problem, budget, start, probe) for problem, start in parts)
            fitted = [self._until_whole(fit) for fit in fits]
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
        rank, world = ranks()
        size = min(most_rows(inputs, 50 * num_samples * self.members), -(-len(inputs) // world))
        method.to(self.device)
        done = {}
        for i in range(rank, -(-len(inputs) // size), world):
            generator = torch.Generator(self.device).manual_seed(seed)
            piece = inputs_of(inputs, slice(i * size, (i + 1) * size), self.device)
            with self._finite_predictions():
                prediction = method.predict(piece, num_samples, generator)
            for name, value in method.diagnostics(piece).items():
                self.diagnostics[name] = max(value, self.diagnostics.get(name, value))
            done[i] = {name: value.cpu() for name, value in vars(prediction).items()}
        kind = type(prediction)
        method.to("cpu")
        done = trainer.gathered(done)
        return kind(**{name: torch.cat([done[i][name] for i in sorted(done)], 1) for name in done[0]})

    # ---- how

    def _fit(self, problem: Problem, budget: Budget, start: Method | None, probe: Probe | None) -> Method:
        """Makes one fit, or reads it from its checkpoint."""
        job = self._job(problem, budget, start, len(self.fits))
        measure = None if probe is None else self._measure(job.method, probe)
        kept = (job.path, self.checkpoint_seconds)
        watch = Watch(self._stage, self._tell_of_fit, *kept, job.budget.patience, measure)
        if not job.is_finished:
            with _marked(job.method):
                if job.method.trains:
                    self._train(job, watch)
                job.method.to(self.device)
                job.method.finish_fit(OnDevice(job.everything, self.device))
            job.method.to("cpu")
        return self._finish(job, watch.steps, watch.seconds_spent)

    def _job(self, problem: Problem, budget: Budget, start: Method | None, count: int) -> _Job:
        """The `count`-th fit of the run, untrained; or finished, if its checkpoint is there."""
        with randomness.seeded(self.seed, "initialise", self._stage, count):
            method = self.method_class.made_for(problem, self.method_settings, start)
        if not method.trains and self.options.precision != "32-true":
            raise UsageError("--trainer.precision is that of training steps, and this method takes none")
        budget = method.spends(budget)
        lightning = trainer.make(self.options, budget)
        self.device = lightning.strategy.root_device
        share = (lightning.global_rank, lightning.world_size)
        method.generator.manual_seed(randomness.derive(self.seed, "noise", share[0], self._stage, count))
        shuffle_seed = randomness.derive(self.seed, "shuffle", self._stage, count)
        order = (problem.train, budget.batch_size, shuffle_seed)
        loader = self._batches(*order, share, budget.draws)
        is_plain = share[1] == 1 and budget.draws is None and not isinstance(problem.train, Stored)
        everything = loader if is_plain else self._batches(*order, augment=False)
        path = None if self.checkpoints is None else self.checkpoints / checkpoints.name(count, self._stage)
        job = _Job(method, budget, lightning, loader, everything, path)
        if job.path is not None and job.path.exists():
            job.fit = checkpoints.restore(method, job.path)
        return job

    def _batches(self, *order: Any, augment: bool = True) -> Any:
        """Batches that this engine's fits read (`bench.batches.batches`)."""
        workers = trainer.reads_ahead(self.options, self.device)
        read: Any = partial(batches, device=self.device, workers=workers, augment=augment)
        return read(*order)

    def _compiles(self, problem: Problem, budget: Budget) -> bool:
        """Whether a fit of this length is compiled, if it is trained alone."""
        if self.options.compiled is not None or "compiled" not in self.method_class.fastest:
            return self.options.compiled is True and "loss_terms" in self.method_class.provides
        examples = budget.draws or len(problem.train)
        if budget.epochs * -(-examples // (budget.batch_size or examples)) < compiled.SHORTEST:
            return False
        return self._alone.world_size == 1 and self._alone.strategy.root_device.type == "cpu"

    @contextmanager
    def _compiled(self, job: _Job) -> Iterator[None]:
        """Within, the job's training step is compiled; the job then says whether it was."""
        with compiled.compiling(job.method, self._tell) as terms:
            try:
                yield
            finally:
                job.compiled = not terms.failed

    def _until_whole(self, work: Callable[[], Any]) -> Any:
        """What `work` returns; at a damaged checkpoint, which is told and removed, it begins again."""
        while True:
            try:
                return work()
            except Damaged as damaged:
                self._tell(f"{damaged.path} is damaged; what it held is made again")
                checkpoints.forget(damaged.path)

    def _tell(self, text: str) -> None:
        """Tells the user a text, once in a run."""
        if text not in self._told:
            self._told.add(text)
            self._observe("notice", {"text": text})

    def _tell_of_fit(self, event: str, values: dict[str, Any]) -> None:
        """Tells an event of the next fit, with its place among the fits of the call."""
        place = {"fit": len(self.fits) - self._call[0] + 1, "fits": self._call[1]}
        self._observe(event, values | place)

    def _measure(self, method: Method, probe: Probe) -> Callable[[], dict[str, float]]:
        """The probe of a method, on the same examples under the same noise every time."""
        seed = randomness.derive(self.seed, "probe", self._stage, len(self.fits))

        def measure() -> dict[str, float]:
            train = method.problem.train
            seen = self._batches(train, min(_PROBED, most_rows(train)), seed, augment=False)
            examples = next(iter(OnDevice(seen, self.device)))
            return probe(method, examples, torch.Generator(self.device).manual_seed(seed))

        return measure

    def _finish(self, job: _Job, steps: int, seconds: float) -> Method:
        """Writes the fit's checkpoint and its entry for the record."""
        method, was_there = job.method, job.is_finished
        if job.fit is None:
            job.fit = {
                "stage": self._stage,
                "epochs": len(method.history),
                "steps": steps,
                "seconds": round(seconds, 3),
                "compiled": job.compiled,
                "diagnostics": method.diagnostics() if method.diverged is None else {"diverged": 1.0},
            }
            if job.path is not None and job.trainer.global_rank == 0:
                checkpoints.keep(method, job.fit, job.path)
        self._tell_of_fit("fit", {"was_there": was_there, "steps": job.fit["steps"]})
        self.fits.append(job.fit)
        self.histories.append((self._stage, method.history))
        return method

    def _fit_stacked(self, parts: list[tuple[Problem, Method | None]], budget: Budget) -> list[Method] | None:
        """All fits side by side, or None where they cannot be."""
        jobs = [self._job(p, budget, s, len(self.fits) + i) for i, (p, s) in enumerate(parts)]
        if all(job.is_finished for job in jobs):
            return [self._finish(job, 0, 0) for job in jobs]
        if any(job.is_finished for job in jobs):  # the run was stopped between these checkpoints
            for job in jobs:
                if job.path is not None:
                    job.path.unlink(missing_ok=True)
            jobs = [self._job(p, budget, s, len(self.fits) + i) for i, (p, s) in enumerate(parts)]
        if not stacked.fit_together([job.method for job in jobs], [job.budget for job in jobs]):
            return None
        side_by_side = stacked.Stacked([job.method for job in jobs], self._stage)
        path = jobs[0].path and jobs[0].path.with_suffix(".stacked")
        watch = Watch(self._stage, self._observe, path, self.checkpoint_seconds, copies=len(jobs))
        loader = stacked.Batches([job.loader for job in jobs])
        with suppress(Diverged):  # all of them, each marked
            self._run(jobs[0].trainer, side_by_side, watch, loader)
        side_by_side.hand_back()
        seconds = watch.seconds_spent / len(jobs)
        for job in jobs:
            if job.method.diverged is None:
                with _marked(job.method):
                    job.method.finish_fit(job.everything)
        fitted = [self._finish(job, watch.steps, seconds) for job in jobs]
        watch.forget()
        return fitted

    @contextmanager
    def _finite_predictions(self) -> Iterator[None]:
        try:
            yield
        except BadPrediction as error:
            raise Diverged(f"diverged at stage '{self._stage}': the prediction's {error}") from None

    def _train(self, job: _Job, watch: Watch) -> None:
        method, val = job.method, job.method.problem.val
        val_loader = None
        if val is not None and job.budget.patience:
            val_loader = self._batches(val, min(1000, most_rows(val)), None)
        compiles = self._compiles(method.problem, job.budget)
        if compiles and watch.probe is not None:
            compiles = False
            self._tell("training runs eager, not compiled: its gradients are measured on other batches")
        with self._compiled(job) if compiles else nullcontext():
            self._run(job.trainer, method, watch, job.loader, val_loader)
        if watch.best is not None:
            method.load_state_dict(watch.best)

    def _run(self, lightning: Trainer, module: Any, watch: Watch, loader: Any, val: Any = None) -> None:
        # The method's own code may draw from torch's global generator: give it a seed, and give it back.
        with randomness.seeded(self.seed, "train", self._stage, len(self.fits)), self._finite_predictions():
            trainer.fit(lightning, module, watch, loader, val)


@contextmanager
def _marked(method: Method) -> Iterator[None]:
    """A fit that diverges inside the block is marked."""
    try:
        yield
    except Diverged as error:
        method.diverged = str(error)
