"""Single fits: made on Lightning, or read from the checkpoints that an earlier start of the run has left.

The seeds of a fit follow from (seed of the run, stage, number of the fit). Where several processes share a
fit, each trains on its share of every batch (`bench.batches`, `bench.engine.watch`), and the first one does
what follows training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench import randomness
from bench.batches import OnDevice, batches, most_rows
from bench.contract import Budget, Method, Probe, Problem, Stored
from bench.engine import checkpoints, compiled, predicting, stacked, trainer
from bench.engine.checkpoints import Damaged
from bench.engine.spreading import Fitted, Part
from bench.engine.trainer import TrainerOptions
from bench.engine.watch import Watch
from bench.errors import Diverged, UsageError
from bench.system.processes import Place, from_first, ranks

if TYPE_CHECKING:
    from pytorch_lightning import Trainer

_PROBED = 10_000
"""Examples, at most, that a probe sees."""


@dataclass
class _Job:
    """One fit under way; `fit` holds the record's entry for the fit; None until the fit is finished.

    `loader` gives this process its share of the training examples; `once` all of them once, where training
    does otherwise.
    """

    part: Part
    method: Method
    budget: Budget
    trainer: Trainer
    loader: Any
    once: Any
    path: Path | None
    fit: dict[str, Any] | None = None
    compiled: bool = False

    @property
    def everything(self) -> Any:
        """Gives every process all training examples, once."""
        return self.loader.whole if self.once is None else self.once

    @property
    def is_finished(self) -> bool:
        return self.fit is not None


class Fits:
    """Makes the fits of one method.

    Args:
        method_class: The method to fit.
        method_settings: An instance of its settings.
        seed: Seed of the run.
        folder: For checkpoints; None keeps nothing, and nothing can be resumed.
        options: Of the Trainer.
        seconds: An unfinished fit is saved at the first epoch's end after so many.
        tell: `tell(event, values, number)` is called on every epoch, with the number of the fit, and on what
            the user should know, without.
    """

    def __init__(
        self,
        method_class: type[Method],
        method_settings: Any,
        seed: int,
        folder: Path | None,
        options: TrainerOptions,
        seconds: float,
        tell: Callable[..., None],
    ) -> None:
        self.method_class, self.method_settings, self.seed = method_class, method_settings, seed
        self.folder, self.options, self.seconds, self.tell = folder, options, seconds, tell
        self._told: set[str] = set()

    @cached_property
    def place(self) -> Place:
        """Where this process stands among those of the run."""
        return trainer.place(self.options)

    @property
    def device(self) -> torch.device:
        """Where this process trains."""
        return self.place.device

    def fit(self, part: Part, budget: Budget, probe: Probe | None) -> Fitted:
        """Makes one fit, or reads it from its checkpoint.

        Raises:
            Damaged: If a checkpoint is; see `until_whole`.
        """
        job = self._job(part, budget)
        measure = None if probe is None else self._measure(job, probe)
        kept = (job.path, self.seconds)
        tell = partial(self.tell, number=part.count)
        watch = Watch(part.stage, tell, *kept, job.budget.patience, measure)
        if not job.is_finished:
            with _marked(job.method):
                if job.method.trains:
                    self._train(job, watch)
                self._finish_fit(job)
        return self._finish(job, watch.steps, watch.seconds_spent)

    def _finish_fit(self, job: _Job) -> None:
        """The method's work after training, by one process; all then have the same method."""
        method, world = job.method, ranks()[1]

        def work() -> dict[str, Any] | None:
            method.to(self.device)
            method.finish_fit(OnDevice(job.everything, self.device))
            method.to("cpu")
            return checkpoints.content(method, {}) if world > 1 else None

        content = from_first(work)
        if ranks()[0] > 0 and content is not None:
            checkpoints.give(method.to("cpu"), content)

    def new(self, part: Part) -> Method:
        """The method of a fit, untrained."""
        with randomness.seeded(self.seed, "initialise", part.stage, part.count):
            return self.method_class.made_for(part.problem, self.method_settings, part.start)

    def _job(self, part: Part, budget: Budget) -> _Job:
        """A fit of the run, untrained; or finished, if its checkpoint is there."""
        method, problem, key = self.new(part), part.problem, (part.stage, part.count)
        if not method.trains and self.options.precision != "32-true":
            raise UsageError("--trainer.precision is that of training steps, and this method takes none")
        budget = method.spends(budget)
        lightning = trainer.make(self.options, budget, self.place)
        share = ranks()
        method.generator.manual_seed(randomness.derive(self.seed, "noise", share[0], *key))
        order = (problem.train, budget.batch_size, randomness.derive(self.seed, "shuffle", *key))
        loader = self._batches(*order, share, budget.draws)
        is_plain = budget.draws is None and not isinstance(problem.train, Stored)
        once = None if is_plain else self._batches(*order, augment=False)
        path = None if self.folder is None else self.folder / checkpoints.name(part.count, part.stage)
        job = _Job(part, method, budget, lightning, loader, once, path)
        if path is not None and (kept := self.kept_in(path)) is not None:
            with checkpoints.fitting(path):
                job.fit = checkpoints.give(method, kept)
                checkpoints.must_predict_alike(method, kept, path)
        return job

    def kept_in(self, path: Path | None) -> dict[str, Any] | None:
        """What a checkpoint holds, in every process, if it is there."""
        return from_first(lambda: checkpoints.read(path) if path and path.exists() else None)

    def _batches(self, *order: Any, augment: bool = True) -> Any:
        """Batches that this engine's fits read (`bench.batches.batches`)."""
        workers = trainer.reads_ahead(self.options, self.device)
        read: Any = partial(batches, device=self.device, workers=workers, augment=augment)
        return read(*order)

    def compiles(self, problem: Problem, budget: Budget) -> bool:
        """Whether a fit of this length is compiled, if it is trained alone."""
        if self.options.compiled is not None or "compiled" not in self.method_class.fastest:
            return self.options.compiled is True and compiled.suits(self.method_class)
        examples = budget.draws or len(problem.train)
        if budget.epochs * -(-examples // (budget.batch_size or examples)) < compiled.SHORTEST:
            return False
        return ranks()[1] == 1 and self.place.device.type == "cpu"

    @contextmanager
    def _compiled(self, job: _Job) -> Iterator[None]:
        """Within, the job's training step is compiled; the job then says whether it was."""
        with compiled.compiling(job.method, self.notice) as terms:
            try:
                yield
            finally:
                job.compiled = not terms.failed

    def until_whole(self, work: Callable[[], Any]) -> Any:
        """What `work` returns; at a damaged checkpoint, which is told and removed, it begins again."""
        while True:
            try:
                return work()
            except Damaged as damaged:
                self.notice(f"{damaged.path} is damaged; what it held is made again")
                checkpoints.forget(damaged.path)

    def notice(self, text: str) -> None:
        """Tells the user a text, once in a run."""
        if text not in self._told:
            self._told.add(text)
            self.tell("notice", {"text": text})

    def _measure(self, job: _Job, probe: Probe) -> Callable[[], dict[str, float]]:
        """The probe of a method, on the same examples under the same noise every time."""
        method, seed = job.method, randomness.derive(self.seed, "probe", job.part.stage, job.part.count)

        def measure() -> dict[str, float]:
            train = method.problem.train
            seen = self._batches(train, min(_PROBED, most_rows(train)), seed, augment=False)
            examples = next(iter(OnDevice(seen, self.device)))
            return probe(method, examples, torch.Generator(self.device).manual_seed(seed))

        return measure

    def _finish(self, job: _Job, steps: int, seconds: float) -> Fitted:
        """Writes the fit's checkpoint, and makes its entry for the record."""
        method, was_there = job.method, job.is_finished
        if job.fit is None:
            fit = {
                "stage": job.part.stage,
                "epochs": len(method.history),
                "steps": steps,
                "seconds": round(seconds, 3),
                "compiled": job.compiled,
                "diagnostics": method.diagnostics() if method.diverged is None else {"diverged": 1.0},
            }
            if (path := job.path) is not None:
                from_first(lambda: checkpoints.keep(method, fit, path))
            job.fit = fit
        return Fitted(method, job.fit, was_there)

    def stack(self, parts: Sequence[Part], budget: Budget) -> list[Fitted] | None:
        """All fits side by side, or None where they cannot be; raises Damaged as `fit`."""
        jobs = [self._job(part, budget) for part in parts]
        if all(job.is_finished for job in jobs):
            return [self._finish(job, 0, 0) for job in jobs]
        if any(job.is_finished for job in jobs):  # the run was stopped between these checkpoints
            for job in jobs:
                if job.path is not None:
                    job.path.unlink(missing_ok=True)
            jobs = [self._job(part, budget) for part in parts]
        if not stacked.fit_together([job.method for job in jobs], [job.budget for job in jobs]):
            return None
        first = jobs[0]
        side_by_side = stacked.Stacked([job.method for job in jobs], first.part.stage, first.budget.patience)
        path = first.path and first.path.with_suffix(".stacked")
        tell = partial(self.tell, number=first.part.count)
        watch = Watch(first.part.stage, tell, path, self.seconds, copies=len(jobs))
        loader = stacked.Batches([job.loader for job in jobs])
        with suppress(Diverged):  # all of them, each marked
            self._run(first, side_by_side, watch, loader)
        side_by_side.hand_back()
        seconds = watch.seconds_spent / len(jobs)
        for job in jobs:
            if job.method.diverged is None:
                with _marked(job.method):
                    job.method.finish_fit(job.everything)
        counted = zip(jobs, side_by_side.stopped, strict=True)  # what has stopped ended with its history
        steps = [len(job.method.history) * len(loader) if ended else watch.steps for job, ended in counted]
        fitted = [self._finish(job, count, seconds) for job, count in zip(jobs, steps, strict=True)]
        watch.forget()
        return fitted

    def _train(self, job: _Job, watch: Watch) -> None:
        method, val = job.method, job.method.problem.val
        val_loader = None
        if val is not None and job.budget.patience:
            val_loader = self._batches(val, min(1000, most_rows(val)), None)
        compiles = self.compiles(method.problem, job.budget)
        if compiles and watch.probe is not None:
            compiles = False
            self.notice("training runs eager, not compiled: its gradients are measured on other batches")
        with self._compiled(job) if compiles else nullcontext():
            self._run(job, method, watch, job.loader, val_loader)
        if watch.best is not None:
            method.load_state_dict(watch.best)

    def _run(self, job: _Job, module: Any, watch: Watch, loader: Any, val: Any = None) -> None:
        # The method's own code may draw from torch's global generator: give it a seed, and give it back.
        rank, part = ranks()[0], job.part
        purpose: list[str | int] = ["train", part.stage, part.count, *([rank] if rank else [])]
        with randomness.seeded(self.seed, *purpose), predicting.finite_predictions(part.stage):
            trainer.fit(job.trainer, module, watch, loader, val)


@contextmanager
def _marked(method: Method) -> Iterator[None]:
    """A fit that diverges inside the block is marked."""
    try:
        yield
    except Diverged as error:
        method.diverged = str(error)
