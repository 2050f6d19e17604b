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
from bench.engine.spreading import FitRequest, Fitted
from bench.engine.trainer import TrainerOptions
from bench.engine.watch import Watch
from bench.errors import Diverged, UsageError
from bench.system.processes import Place, from_first, ranks

if TYPE_CHECKING:
    from pytorch_lightning import Trainer

_PROBED = 10_000
"""Examples, at most, that a probe sees."""


@dataclass
class _FitUnderWay:
    """One fit under way; `fit` holds the record's entry for the fit; None until the fit is finished.

    `loader` gives this process its share of the training examples; `single_pass` all of them once, where
    training does otherwise.
    """

    request: FitRequest
    method: Method
    budget: Budget
    trainer: Trainer
    loader: Any
    single_pass: Any
    path: Path | None
    fit: dict[str, Any] | None = None
    compiled: bool = False

    @property
    def everything(self) -> Any:
        """Gives every process all training examples, once."""
        return self.loader.whole if self.single_pass is None else self.single_pass

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
        notify: `notify(event, values, number)` is called on every epoch, with the number of the fit, and on
            what the user should know, without.
    """

    def __init__(
        self,
        method_class: type[Method],
        method_settings: Any,
        seed: int,
        folder: Path | None,
        options: TrainerOptions,
        seconds: float,
        notify: Callable[..., None],
    ) -> None:
        self.method_class, self.method_settings, self.seed = method_class, method_settings, seed
        self.folder, self.options, self.seconds, self.notify = folder, options, seconds, notify
        self._told: set[str] = set()

    @cached_property
    def place(self) -> Place:
        """Where this process stands among those of the run."""
        return trainer.place(self.options)

    @property
    def device(self) -> torch.device:
        """Where this process trains."""
        return self.place.device

    def fit(self, request: FitRequest, budget: Budget, probe: Probe | None) -> Fitted:
        """Makes one fit, or reads it from its checkpoint.

        Raises:
            Damaged: If a checkpoint is; see `until_whole`.
        """
        current = self._begin(request, budget)
        measure = None if probe is None else self._measure(current, probe)
        kept = (current.path, self.seconds)
        notify = partial(self.notify, number=request.count)
        watch = Watch(request.stage, notify, *kept, current.budget.patience, measure)
        if not current.is_finished:
            with _marked(current.method):
                if current.method.trains:
                    self._train(current, watch)
                self._finish_fit(current)
        return self._finish(current, watch.steps, watch.seconds_spent)

    def _finish_fit(self, current: _FitUnderWay) -> None:
        """The method's work after training, by one process; all then have the same method."""
        method, world = current.method, ranks()[1]

        def work() -> dict[str, Any] | None:
            method.to(self.device)
            method.finish_fit(OnDevice(current.everything, self.device))
            method.to("cpu")
            return checkpoints.content(method, {}) if world > 1 else None

        content = from_first(work)
        if ranks()[0] > 0 and content is not None:
            checkpoints.give(method.to("cpu"), content)

    def new(self, request: FitRequest) -> Method:
        """The method of a fit, untrained."""
        with randomness.seeded(self.seed, "initialise", request.stage, request.count):
            return self.method_class.made_for(request.problem, self.method_settings, request.start)

    def _begin(self, request: FitRequest, budget: Budget) -> _FitUnderWay:
        """A fit of the run, untrained; or finished, if its checkpoint is there."""
        method, problem, key = self.new(request), request.problem, (request.stage, request.count)
        if not method.trains and self.options.precision != "32-true":
            raise UsageError("--trainer.precision is that of training steps, and this method takes none")
        budget = method.spends(budget)
        lightning = trainer.make(self.options, budget, self.place)
        share = ranks()
        method.generator.manual_seed(randomness.derive(self.seed, "noise", share[0], *key))
        order = (problem.train, budget.batch_size, randomness.derive(self.seed, "shuffle", *key))
        loader = self._batches(*order, share, budget.draws)
        is_plain = budget.draws is None and not isinstance(problem.train, Stored)
        single_pass = None if is_plain else self._batches(*order, augment=False)
        path = None if self.folder is None else self.folder / checkpoints.name(request.count, request.stage)
        current = _FitUnderWay(request, method, budget, lightning, loader, single_pass, path)
        if path is not None and (kept := self.kept_in(path)) is not None:
            with checkpoints.fitting(path):
                current.fit = checkpoints.give(method, kept)
                checkpoints.must_predict_alike(method, kept, path)
        return current

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
    def _compiled(self, current: _FitUnderWay) -> Iterator[None]:
        """Within, the job's training step is compiled; the job then says whether it was."""
        with compiled.compiling(current.method, self.notice) as terms:
            try:
                yield
            finally:
                current.compiled = not terms.failed

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
            self.notify("notice", {"text": text})

    def _measure(self, current: _FitUnderWay, probe: Probe) -> Callable[[], dict[str, float]]:
        """The probe of a method, on the same examples under the same noise every time."""
        method, seed = (
            current.method,
            randomness.derive(self.seed, "probe", current.request.stage, current.request.count),
        )

        def measure() -> dict[str, float]:
            train = method.problem.train
            seen = self._batches(train, min(_PROBED, most_rows(train)), seed, augment=False)
            examples = next(iter(OnDevice(seen, self.device)))
            return probe(method, examples, torch.Generator(self.device).manual_seed(seed))

        return measure

    def _finish(self, current: _FitUnderWay, steps: int, seconds: float) -> Fitted:
        """Writes the fit's checkpoint, and makes its entry for the record."""
        method, was_there = current.method, current.is_finished
        if current.fit is None:
            fit = {
                "stage": current.request.stage,
                "epochs": len(method.history),
                "steps": steps,
                "seconds": round(seconds, 3),
                "compiled": current.compiled,
                "diagnostics": method.diagnostics() if method.diverged is None else {"diverged": 1.0},
            }
            if (path := current.path) is not None:
                from_first(lambda: checkpoints.keep(method, fit, path))
            current.fit = fit
        return Fitted(method, current.fit, was_there)

    def stack(self, requests: Sequence[FitRequest], budget: Budget) -> list[Fitted] | None:
        """All fits side by side, or None where they cannot be; raises Damaged as `fit`."""
        fits = [self._begin(request, budget) for request in requests]
        if all(current.is_finished for current in fits):
            return [self._finish(current, 0, 0) for current in fits]
        if any(current.is_finished for current in fits):  # the run was stopped between these checkpoints
            for current in fits:
                if current.path is not None:
                    current.path.unlink(missing_ok=True)
            fits = [self._begin(request, budget) for request in requests]
        if not stacked.fit_together(
            [current.method for current in fits], [current.budget for current in fits]
        ):
            return None
        first = fits[0]
        side_by_side = stacked.Stacked(
            [current.method for current in fits], first.request.stage, first.budget.patience
        )
        path = first.path and first.path.with_suffix(".stacked")
        notify = partial(self.notify, number=first.request.count)
        watch = Watch(first.request.stage, notify, path, self.seconds, copies=len(fits))
        loader = stacked.Batches([current.loader for current in fits])
        with suppress(Diverged):  # all of them, each marked
            self._run(first, side_by_side, watch, loader)
        side_by_side.hand_back()
        seconds = watch.seconds_spent / len(fits)
        for current in fits:
            if current.method.diverged is None:
                with _marked(current.method):
                    current.method.finish_fit(current.everything)
        counted = zip(fits, side_by_side.stopped, strict=True)  # what has stopped ended with its history
        steps = [
            len(current.method.history) * len(loader) if ended else watch.steps for current, ended in counted
        ]
        fitted = [self._finish(current, count, seconds) for current, count in zip(fits, steps, strict=True)]
        watch.forget()
        return fitted

    def _train(self, current: _FitUnderWay, watch: Watch) -> None:
        method, val = current.method, current.method.problem.val
        val_loader = None
        if val is not None and current.budget.patience:
            val_loader = self._batches(val, min(1000, most_rows(val)), None)
        compiles = self.compiles(method.problem, current.budget)
        if compiles and watch.probe is not None:
            compiles = False
            self.notice("training runs eager, not compiled: its gradients are measured on other batches")
        with self._compiled(current) if compiles else nullcontext():
            self._run(current, method, watch, current.loader, val_loader)
        if watch.best is not None:
            method.load_state_dict(watch.best)

    def _run(self, current: _FitUnderWay, module: Any, watch: Watch, loader: Any, val: Any = None) -> None:
        # The method's own code may draw from torch's global generator: give it a seed, and give it back.
        rank, request = ranks()[0], current.request
        purpose: list[str | int] = ["train", request.stage, request.count, *([rank] if rank else [])]
        with randomness.seeded(self.seed, *purpose), predicting.finite_predictions(request.stage):
            trainer.fit(current.trainer, module, watch, loader, val)


@contextmanager
def _marked(method: Method) -> Iterator[None]:
    """A fit that diverges inside the block is marked."""
    try:
        yield
    except Diverged as error:
        method.diverged = str(error)
