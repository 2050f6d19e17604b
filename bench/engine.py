"""The engine: fits the run's method on Lightning, predicts in pieces, and finds finished work again.

A task talks to `Engine` alone. Each fit gets a Trainer of its own (a second `fit` on one Trainer silently
does nothing) and seeds derived from (seed, stage, count), so that a run that was stopped and started again
ends with the same numbers: finished fits are read from their checkpoints, an unfinished one goes on from
its last saved epoch.
"""

from __future__ import annotations

import ctypes
import io
import logging
import math
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytorch_lightning as pl
import torch
import torch.distributed
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import TensorDataset

from bench import compiled, ensemble, randomness, stacked
from bench.batches import OnDevice, batches
from bench.contract import Arrays, Batch, Budget, Method, Problem
from bench.diagnostics import gradient_norms
from bench.ensemble import Ensemble
from bench.errors import Diverged, UsageError
from bench.files import write, writing
from bench.predictions import BadPrediction, Prediction
from bench.settings import Count, settings

_LARGEST_PIECE = 50_000_000
"""Floats of inputs, or of outputs at 50 per example and sample, that one piece of a prediction may hold."""

_PROBED = 10_000
"""Examples, at most, on which gradients are measured."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""From glibc's malloc.h."""

if not torch.cuda.is_available():
    # Set by Lightning: torch then looks for NVIDIA's library whenever asked for a GPU, by Adam at every step.
    os.environ.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)
for _name in ("pytorch_lightning", "lightning.pytorch", "lightning.fabric"):
    logging.getLogger(_name).setLevel(logging.ERROR)


@settings
class TrainerOptions:
    """Options of Lightning's Trainer, passed through."""

    accelerator: str = "auto"
    """Kind of device: auto, cpu, gpu, ..."""
    devices: int | Literal["auto"] = "auto"
    """How many devices; on a CPU auto is one process."""
    strategy: str = "auto"
    """How several devices share a fit: auto, ddp, ..."""
    num_nodes: Count = 1
    """Number of machines."""
    precision: str = "32-true"
    """Floating-point precision: 32-true, bf16-mixed, ..."""
    stacked: bool | None = None
    """Train independent fits side by side, where method and budget allow (bench.stacked); not given: where
    that is faster."""
    compiled: bool | None = None
    """Compile the training step (bench.compiled), where a C++ compiler is found; not given: of long fits on
    a CPU, where method and length make that faster."""


@dataclass
class _Job:
    """One fit under way; `fit` is what the record will say of it, None until it is finished.

    `loader` gives this process its share of the training examples, `everything` gives every process all.
    """

    method: Method
    budget: Budget
    trainer: pl.Trainer
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
        members: Every fit is one of so many independent copies, whose draws are pooled.
        checkpoint_seconds: An unfinished fit is saved at the first epoch's end after this many seconds.
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
        self._predictions = 0
        self._kept = 0
        self._spent: list[int] = []

    def observe(self, observer: Callable[[str, dict[str, Any]], Any]) -> None:
        """Has `observer(event, values)` called on every stage, epoch and logged number."""
        self._observe = observer

    def check(self) -> int:
        """Finds out whether Lightning accepts the options; returns the rank that this process has under them.

        Raises:
            UsageError: If it does not; in one line.
        """
        if self.options.stacked and self.options.compiled:
            raise UsageError("--trainer.stacked and --trainer.compiled: what is side by side is not compiled")
        return self._trainer(Budget(epochs=1)).global_rank

    # ---- what a task may call

    def stage(self, name: str, number: int = 1, of: int = 1) -> None:
        """Names what follows, the `number`-th of `of` stages; fits and predictions take its name."""
        self._stage = name
        self._observe("stage", {"name": name, "number": number, "of": of})

    def once(self, compute: Callable[[], Arrays]) -> Arrays:
        """What `compute` returns, read where an earlier start of this run has kept it.

        Kept with it is what the record says of the fits inside; their checkpoints are then deleted, but those
        of the run's last fit and its members.
        """
        self._kept += 1
        path = None if self.checkpoints is None else self.checkpoints / f"{self._kept:03d}.kept"
        first = len(self.fits)
        if path is not None and path.exists():
            kept = torch.load(path, weights_only=True)
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
                save(kept, path)
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
        self, problem: Problem, budget: Budget, start: Method | None = None, probe: bool = False
    ) -> Method:
        """Fits the method to the problem within the budget; of an ensemble, every member.

        Raises:
            Diverged: If the loss of a step is not finite; says at which stage and step.
        """
        return self.fit_many([problem], budget, None if start is None else [start], probe)[0]

    def fit_many(
        self,
        problems: list[Problem],
        budget: Budget,
        starts: list[Method] | None = None,
        probe: bool = False,
        *,
        keep_diverged: bool = False,
    ) -> list[Method]:
        """Independent fits, one per problem, each with its own initial weights, data order and noise.

        Raises:
            Diverged: If the loss of one is not finite; `keep_diverged` sets its `diverged` instead.
        """
        parts = [
            part
            for problem, start in zip(problems, starts or len(problems) * (None,), strict=True)
            for part in ensemble.split(problem, start, self.members)
        ]
        side_by_side = self.options.stacked
        if side_by_side is None:
            side_by_side = self.method_class.stacks_faster and not self._compiles(problems[0], budget)
        fitted = self._fit_stacked(parts, budget, keep_diverged) if side_by_side and len(parts) > 1 else None
        if fitted is None:
            fitted = [self._fit(problem, budget, start, probe, keep_diverged) for problem, start in parts]
        if self.members == 1:
            return fitted
        together = [fitted[i : i + self.members] for i in range(0, len(fitted), self.members)]
        ensembles: list[Method] = [Ensemble(members) for members in together]
        for whole, members in zip(ensembles, together, strict=True):
            whole.diverged = any(m.diverged for m in members)
        return ensembles

    def fit_weighted(self, problem: Problem, weights: Tensor, budget: Budget) -> Method:
        """R fits that differ in the weights of the examples `[R, N]` alone; see `bench.contract.Engine`.

        Raises:
            UsageError: If the data do not lie in memory, or the weights are not R rows of N that are finite,
                at least 0, and above 0 somewhere.
        """
        if not isinstance(problem.train, TensorDataset):
            raise UsageError("fits under several weightings need a data set in memory, a TensorDataset")
        inputs, targets, *own = problem.train.tensors
        if weights.shape[1:] != inputs.shape[:1] or len(weights) == 0:
            raise UsageError(f"example weights must be [R, {len(inputs)}], not {list(weights.shape)}")
        weights = (weights * own[0] if own else weights).to(inputs.dtype)
        if not (weights.isfinite() & (weights >= 0)).all() or not (weights > 0).any(1).all():
            raise UsageError("example weights must be finite, at least 0, and above 0 in every row somewhere")
        if self.method_class.reweights and self.members == 1:
            train = TensorDataset(inputs, targets, weights.mT.contiguous())
            return stacked.Reweighted([self.fit(replace(problem, train=train), budget)])
        problems = []
        for row in weights:
            kept = row > 0
            train = TensorDataset(inputs[kept], targets[kept], row[kept])
            problems.append(replace(problem, train=train, num_train=len(train)))
        return stacked.Reweighted(self.fit_many(problems, budget))

    def predict(self, method: Method, inputs: Tensor, num_samples: int) -> Prediction:
        """Predictions for inputs `[N, ...]`, on the CPU; each draw of the weights is shared by all inputs.

        Raises:
            Diverged: If a prediction is not finite.
        """
        self._predictions += 1
        seed = randomness.derive(self.seed, "predict", self._stage, self._predictions)
        rows = _LARGEST_PIECE // max(inputs[0].numel(), 50 * num_samples * self.members)
        rank, world = ranks()
        pieces = list(inputs.split(max(1, min(rows, -(-len(inputs) // world)))))
        method.to(self.device)
        done = {}
        for i in range(rank, len(pieces), world):
            generator = torch.Generator(self.device).manual_seed(seed)
            piece = pieces[i].to(self.device)
            with self._finite_predictions():
                prediction = method.predict(piece, num_samples, generator)
            for name, value in method.diagnostics(piece).items():
                self.diagnostics[name] = max(value, self.diagnostics.get(name, value))
            done[i] = {name: value.cpu() for name, value in vars(prediction).items()}
        kind = type(prediction)
        method.to("cpu")
        if world > 1:
            gathered: list[Any] = [None] * world
            torch.distributed.all_gather_object(gathered, done)
            done = {i: piece for part in gathered for i, piece in part.items()}
        return kind(**{name: torch.cat([done[i][name] for i in sorted(done)], 1) for name in done[0]})

    # ---- how

    def _fit(
        self, problem: Problem, budget: Budget, start: Method | None, probe: bool, keep_diverged: bool
    ) -> Method:
        """One fit, or what its checkpoint holds."""
        began = time.perf_counter()
        job = self._job(problem, budget, start, len(self.fits))
        watch = _Watch(self, job.path, job.budget.patience, self._probe(job.method) if probe else None)
        if not job.is_finished:
            with _marked(job.method, keep_diverged):
                if job.method.trains:
                    self._train(job, watch)
                job.method.to(self.device)
                job.method.finish_fit(OnDevice(job.everything, self.device))
            job.method.to("cpu")
        return self._finish(job, watch.steps, watch.earlier_seconds + time.perf_counter() - began)

    def _job(self, problem: Problem, budget: Budget, start: Method | None, count: int) -> _Job:
        """The `count`-th fit of the run before its training, or after it if a checkpoint holds it."""
        with randomness.seeded(self.seed, "initialise", self._stage, count):
            method = self.method_class(problem, self.method_settings, start)
        budget = method.spends(budget)
        trainer = self._trainer(budget)
        self.device = trainer.strategy.root_device
        method.generator.manual_seed(
            randomness.derive(self.seed, "noise", trainer.global_rank, self._stage, count)
        )
        shuffle_seed = randomness.derive(self.seed, "shuffle", self._stage, count)
        share = (trainer.global_rank, trainer.world_size)
        loader = batches(problem.train, budget.batch_size, shuffle_seed, share, budget.draws)
        is_plain = share[1] == 1 and budget.draws is None
        everything = loader if is_plain else batches(problem.train, budget.batch_size, shuffle_seed)
        job = _Job(method, budget, trainer, loader, everything, self._checkpoint_path(count))
        if job.path is not None and job.path.exists():
            checkpoint = torch.load(job.path, weights_only=True, map_location="cpu")
            method.load_state_dict(checkpoint["state_dict"])
            method.on_load_checkpoint(checkpoint)
            job.fit = checkpoint["fit"]
            method.diverged = "diverged" in checkpoint["fit"]["diagnostics"]
        return job

    def _compiles(self, problem: Problem, budget: Budget) -> bool:
        """Whether a fit of this length is compiled, if it is trained alone."""
        if self.options.compiled is not None or not self.method_class.compiles_faster:
            return self.options.compiled is True and "loss_terms" in self.method_class.provides
        examples = budget.draws or len(problem.train)  # type: ignore[arg-type]
        if budget.epochs * -(-examples // (budget.batch_size or examples)) < compiled.SHORTEST:
            return False
        trainer = self._trainer(budget)
        return trainer.world_size == 1 and trainer.strategy.root_device.type == "cpu"

    @contextmanager
    def _compiled(self, job: _Job) -> Iterator[None]:
        """Within, the job's training step is compiled; the job then says whether it was."""
        with compiled.compiling(job.method, self._tell) as terms:
            try:
                yield
            finally:
                job.compiled = not terms.failed

    def _tell(self, text: str) -> None:
        """Tells the user, once a run."""
        if text not in self._told:
            self._told.add(text)
            self._observe("notice", {"text": text})

    def _probe(self, method: Method) -> Callable[[], dict[str, float]] | None:
        """What measures the method's gradients, on the same examples under the same noise every time."""
        if "loss_terms" not in method.provides:
            return None
        seed = randomness.derive(self.seed, "probe", self._stage, len(self.fits))

        def measure() -> dict[str, float]:
            examples = next(iter(OnDevice(batches(method.problem.train, _PROBED, seed), self.device)))
            return gradient_norms(method, examples, torch.Generator(self.device).manual_seed(seed))

        return measure

    def _finish(self, job: _Job, steps: int, seconds: float) -> Method:
        """Keeps what the fit left: in the record, and in its checkpoint."""
        method = job.method
        if job.fit is None:
            job.fit = {
                "stage": self._stage,
                "epochs": len(method.history),
                "steps": steps,
                "seconds": round(seconds, 3),
                "compiled": job.compiled,
                "diagnostics": {"diverged": 1.0} if method.diverged else method.diagnostics(),
            }
            if job.path is not None and job.trainer.global_rank == 0:
                checkpoint = {"state_dict": method.state_dict(), "fit": job.fit}
                method.on_save_checkpoint(checkpoint)
                save(checkpoint, job.path)
                _partial(job.path).unlink(missing_ok=True)
        self.fits.append(job.fit)
        self.histories.append((self._stage, method.history))
        return method

    def _fit_stacked(
        self, parts: list[tuple[Problem, Method | None]], budget: Budget, keep_diverged: bool
    ) -> list[Method] | None:
        """All fits side by side, or None where they cannot be."""
        began = time.perf_counter()
        jobs = [self._job(p, budget, s, len(self.fits) + i) for i, (p, s) in enumerate(parts)]
        if all(job.is_finished for job in jobs):
            return [self._finish(job, 0, 0) for job in jobs]
        if any(job.is_finished for job in jobs):  # stopped while the checkpoints were written: once more
            for job in jobs:
                if job.path is not None:
                    job.path.unlink(missing_ok=True)
            jobs = [self._job(p, budget, s, len(self.fits) + i) for i, (p, s) in enumerate(parts)]
        if not stacked.fit_together([job.method for job in jobs], [job.budget for job in jobs]):
            return None
        side_by_side = stacked.Stacked([job.method for job in jobs], keep_diverged)
        path = jobs[0].path and jobs[0].path.with_suffix(".stacked")
        watch = _Watch(self, path, None)
        partial = path and _partial(path)
        resume = str(partial) if partial and partial.exists() else None
        loader = stacked.Batches([job.loader for job in jobs])  # type: ignore[arg-type]
        try:
            self._run(jobs[0].trainer, side_by_side, watch, loader, resume=resume)
        except Diverged:  # all of them, or the first
            if not keep_diverged:
                raise
        side_by_side.hand_back()
        seconds = (watch.earlier_seconds + time.perf_counter() - began) / len(jobs)
        for job in jobs:
            if not job.method.diverged:
                with _marked(job.method, keep_diverged):
                    job.method.finish_fit(job.everything)
        fitted = [self._finish(job, watch.steps, seconds) for job in jobs]
        if partial:
            partial.unlink(missing_ok=True)
        return fitted

    @contextmanager
    def _finite_predictions(self) -> Iterator[None]:
        try:
            yield
        except BadPrediction as error:
            raise Diverged(f"diverged at stage '{self._stage}': the prediction's {error}") from None

    def _checkpoint_path(self, count: int) -> Path | None:
        if self.checkpoints is None:
            return None
        return self.checkpoints / f"{count:03d}-{re.sub('[^a-z0-9]+', '-', self._stage.lower())}.ckpt"

    def _trainer(self, budget: Budget) -> pl.Trainer:
        with warnings.catch_warnings(), _as_usage_error():
            warnings.filterwarnings("ignore", module="pytorch_lightning")
            return pl.Trainer(
                accelerator=self.options.accelerator,
                devices=self.options.devices if self.options.devices != "auto" else self._auto_devices(),
                strategy=self.options.strategy,
                num_nodes=self.options.num_nodes,
                precision=self.options.precision,  # type: ignore[arg-type]
                max_epochs=budget.epochs,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                num_sanity_val_steps=0,
                use_distributed_sampler=False,
            )

    def _auto_devices(self) -> int | str:
        return 1 if self.options.accelerator in ("auto", "cpu") and not torch.cuda.is_available() else "auto"

    def _train(self, job: _Job, watch: _Watch) -> None:
        method, patience = job.method, job.budget.patience
        val = method.problem.val if patience else None
        partial = job.path and _partial(job.path)
        resume = str(partial) if partial and partial.exists() else None
        val_loader = batches(val, 1000, None) if val is not None else None
        compiles = watch.probe is None and self._compiles(method.problem, job.budget)
        with self._compiled(job) if compiles else nullcontext():
            self._run(job.trainer, method, watch, job.loader, val_loader, resume)
        if watch.best is not None:
            method.load_state_dict(watch.best)

    def _run(
        self,
        trainer: pl.Trainer,
        module: Any,
        watch: _Watch,
        loader: Any,
        val: Any = None,
        resume: Any = None,
    ) -> None:
        keep_memory()
        trainer.callbacks.append(watch)  # type: ignore[attr-defined]
        # The method's own code may draw from torch's global generator: give it a seed, and give it back.
        with warnings.catch_warnings(), randomness.seeded(self.seed, "train", self._stage, len(self.fits)):
            warnings.filterwarnings("ignore", module="pytorch_lightning")
            with _interruptible(), self._finite_predictions():
                trainer.fit(module, loader, val, ckpt_path=resume, weights_only=True if resume else None)
        module.trainer = None


@contextmanager
def _as_usage_error() -> Iterator[None]:
    try:
        yield
    except (MisconfigurationException, TypeError, ValueError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0]
        raise UsageError(f"--trainer: Lightning does not accept these options: {first}") from None


@contextmanager
def _marked(method: Method, keep_diverged: bool) -> Iterator[None]:
    """With `keep_diverged` a fit that diverges is marked, in place of what it raises."""
    try:
        yield
    except Diverged:
        if not keep_diverged:
            raise
        method.diverged = True


@contextmanager
def _interruptible() -> Iterator[None]:
    """Lightning answers Ctrl-C by ending the process; ours is for the caller to end."""
    try:
        yield
    except SystemExit as error:
        if not isinstance(error.__context__, KeyboardInterrupt):
            raise
        raise KeyboardInterrupt from None


class _Watch(pl.callbacks.Checkpoint):
    """Follows one fit: history, divergence, best epoch, unfinished checkpoints.

    A Checkpoint, because Lightning calls those at an epoch's end after the method's own hook.
    """

    def __init__(
        self,
        engine: Engine,
        path: Path | None,
        patience: int | None,
        probe: Callable[[], dict[str, float]] | None = None,
    ) -> None:
        self.engine, self.path, self.patience, self.probe = engine, path, patience, probe
        self.steps = 0
        self.earlier_seconds = 0.0
        self.best: dict[str, Tensor] | None = None
        self.best_score, self.best_epoch = float("inf"), 0
        self._began = self._saved = time.perf_counter()
        self._sums: Tensor | None = None  # over an epoch's examples, in the order of `_terms`
        self._terms: list[str] = []
        self._rows = 0
        self._probed: dict[str, float] = {}

    def on_train_epoch_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._sums, self._rows = None, 0
        self._probed = self.probe() if self.probe else {}

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        self.steps += 1
        if not math.isfinite(loss := outputs["loss"].item()):
            where = f"stage '{self.engine._stage}', epoch {trainer.current_epoch + 1}, step {self.steps}"
            raise Diverged(f"diverged at {where}: the loss is {loss}")
        rows = len(batch.inputs)
        self._rows += rows
        terms = torch.stack([value.detach() for value in outputs.values()]) * rows
        self._sums = terms if self._sums is None else self._sums + terms
        self._terms = list(outputs)

    def _stop_early(self, trainer: pl.Trainer, module: Method, patience: int) -> None:
        """Stops after `patience` epochs without a better validation NLL, or training loss without one."""
        epoch = trainer.current_epoch
        if epoch < module.warmup_epochs:
            return
        row = module.history[-1]
        score = row.get("val_nll", row["loss"])
        if score < self.best_score:
            self.best_score, self.best_epoch = score, epoch
            self.best = {name: value.detach().clone() for name, value in module.state_dict().items()}
        elif epoch - max(self.best_epoch, module.warmup_epochs) >= patience:
            trainer.should_stop = True

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Method) -> None:  # type: ignore[override]
        row: dict[str, float] = {"epoch": trainer.current_epoch + 1}
        assert self._sums is not None  # an epoch has a batch
        row |= self._probed | dict(zip(self._terms, (self._sums / self._rows).tolist(), strict=True))
        row |= {name: value.item() for name, value in trainer.callback_metrics.items()}
        module.history.append(row)
        if self.patience is not None:
            self._stop_early(trainer, module, self.patience)
        self.engine._observe("epoch", row | {"of": trainer.max_epochs})
        last = trainer.should_stop or trainer.current_epoch + 1 == trainer.max_epochs
        if self.path is None or last:
            return
        due = time.perf_counter() - self._saved >= self.engine.checkpoint_seconds
        if trainer.strategy.broadcast(due):  # all processes save together, or they wait for each other
            self._saved = time.perf_counter()
            partial = _partial(self.path)
            with writing(partial):
                trainer.save_checkpoint(partial.with_suffix(".writing"))
                if trainer.global_rank == 0:
                    os.replace(partial.with_suffix(".writing"), partial)

    def state_dict(self) -> dict[str, Any]:
        seconds = self.earlier_seconds + time.perf_counter() - self._began
        names = ("steps", "best", "best_score", "best_epoch")
        return {name: getattr(self, name) for name in names} | {"earlier_seconds": seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, value in state_dict.items():
            setattr(self, name, value)


@cache
def keep_memory() -> None:
    """Has glibc keep the memory of freed tensors for the next step, up to 256 MiB; elsewhere nothing.

    Else it hands the memory of larger tensors back, and the kernel clears it anew at every step.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 * 2**20)  # the most that it takes
        mallopt(_M_TRIM_THRESHOLD, 256 * 2**20)


def _partial(path: Path) -> Path:
    """Where the unfinished fit lies whose checkpoint will be `path`."""
    return path.with_name(f"{path.name.removesuffix('.ckpt')}.partial")


def ranks() -> tuple[int, int]:
    """(rank, number of processes) of this process."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def save(checkpoint: dict[str, Any], path: Path) -> None:
    """Writes a checkpoint in one step: the file is whole or not there."""
    content = io.BytesIO()
    torch.save(checkpoint, content)
    write(path, content.getvalue())
