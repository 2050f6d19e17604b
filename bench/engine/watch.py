"""What is followed of one fit while Lightning trains it: history, divergence, best epoch, checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor

from bench.contract import Batch
from bench.engine import checkpoints
from bench.errors import Diverged
from bench.system.processes import average_gradients, from_each, from_first, ranks, sum_up

STEPS_TOLD = 50
"""Training steps whose mean is told at once: to log every step would take longer than many a step."""
AT_ONCE = frozenset({"cpu"})
"""Kinds of devices whose losses are looked at after every step. Others would have to end their queue of work
for that: there losses are looked at when they are told, at an epoch's end, and before anything is saved."""


@dataclass
class Patience:
    """Early stopping of one fit: its best epoch so far, and whether to wait for a better one.

    Attributes:
        epochs: Without a better score after which to stop.
        best_score: The lowest so far.
        best_epoch: Of that score, counted from 0.
    """

    epochs: int
    best_score: float = math.inf
    best_epoch: int = 0

    def improves(self, epoch: int, score: float, warmup: int) -> bool:
        """Takes the score of an epoch; whether it is the best from epoch `warmup` on."""
        if epoch < warmup or not score < self.best_score:
            return False
        self.best_score, self.best_epoch = score, epoch
        return True

    def ends(self, epoch: int, warmup: int) -> bool:
        """Whether the fit stops after this epoch."""
        return epoch - max(self.best_epoch, warmup) >= self.epochs


class Watch(pl.callbacks.Checkpoint):
    """Follows one fit; its own state travels in Lightning's checkpoints of the unfinished fit.

    Where several processes share the fit, it makes their gradients and losses those of the whole batch: bit
    for bit the same in each, so that all decide alike. A Checkpoint of Lightning's, because those are called
    at an epoch's end after the method's own hook.

    Args:
        stage: Name of the run's stage, for messages.
        observe: `observe("epoch", row)` is called at every epoch's end, and `observe("steps", means)` with
            the means of the loss and its terms over every `STEPS_TOLD` steps, and over the last of the fit;
            both say how many `steps` the fit has made, or the fits.
        path: Where the finished fit's checkpoint will lie; None keeps nothing.
        seconds: An unfinished fit is saved at the first epoch's end after this many seconds; where a stopped
            epoch can go on, at the first step's.
        patience: Epochs without a better score after which to stop (`bench.contract.Budget`); None never.
        probe: Called at every epoch's start; its numbers join the epoch's row.
        copies: How many fits are side by side, each of which makes every step.
    """

    def __init__(
        self,
        stage: str,
        observe: Callable[[str, dict[str, Any]], Any],
        path: Path | None,
        seconds: float,
        patience: int | None = None,
        probe: Callable[[], dict[str, float]] | None = None,
        copies: int = 1,
    ) -> None:
        self.stage, self.observe, self.seconds = stage, observe, seconds
        self.waits = None if patience is None else Patience(patience)
        self.probe, self.copies = probe, copies
        self.partial = None if path is None else checkpoints.partial(path)
        self.steps = 0
        self.earlier_seconds = 0.0
        self.best: dict[str, Tensor] | None = None
        """State dictionary of the best epoch so far, where there is patience."""
        self.trains = False
        """Whether the first step is reached: what an earlier start has left is then restored."""
        self._began = self._saved = time.perf_counter()
        self._sums: Tensor | None = None  # over an epoch's examples, in the order of `_terms`
        self._terms: list[str] = []
        self._rows = 0
        self._untold: list[Tensor] = []  # a step each, in the order of `_terms`
        self._seen = 0  # of these
        self._probed: dict[str, float] = {}

    @property
    def resume(self) -> Path | None:
        """The checkpoint of the unfinished fit, where an earlier start of the run has left one."""
        return self.partial if self.partial is not None and self.partial.exists() else None

    @property
    def seconds_spent(self) -> float:
        """Wall-clock seconds of this fit, those of earlier starts included."""
        return self.earlier_seconds + time.perf_counter() - self._began

    def forget(self) -> None:
        """Removes the checkpoint of the unfinished fit."""
        if self.partial is not None:
            checkpoints.forget(self.partial)

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Notes that training begins, and brings what a checkpoint held to where the fit is made."""
        self.trains = True
        self._untold = [terms.to(module.device) for terms in self._untold]
        self._sums = None if self._sums is None else self._sums.to(module.device)

    def on_train_epoch_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Starts the sums of the epoch."""
        self._sums, self._rows = None, 0
        self._probed = self.probe() if self.probe else {}

    def on_after_backward(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Makes the gradients those of the whole batch."""
        if ranks()[1] > 1:
            own, rows = _rows(trainer)
            average_gradients(module.parameters(), own / rows)

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        """Adds a step that Lightning has made, and saves the fit where its epoch can go on.

        Raises:
            Diverged: As `add`.
        """
        if not isinstance(batch, Batch):  # an epoch, of which `bench.engine.steps` has told every step
            return
        self.add(trainer, outputs, batch)
        goes_on = hasattr(trainer.train_dataloader, "state_dict") and not trainer.is_last_batch
        if self.partial is not None and goes_on:
            self._save(trainer, self.partial)

    def add(self, trainer: pl.Trainer, outputs: dict[str, Tensor], batch: Batch) -> None:
        """Adds the losses of a step.

        Args:
            trainer: Of the fit.
            outputs: The loss and its terms, in nats per example, under their names.
            batch: What the step was made on.

        Raises:
            Diverged: If the loss is not finite, of this step or of one that was not looked at yet.
        """
        self.steps += 1
        rows = len(batch.inputs)
        terms = torch.stack([value.detach() for value in outputs.values()])
        if ranks()[1] > 1:
            own, rows = _rows(trainer)
            terms = sum_up(terms * (own / rows) if own else torch.zeros_like(terms))
        self._terms = list(outputs)
        self._untold.append(terms)
        is_told = self.steps % STEPS_TOLD == 0
        if is_told or terms.device.type in AT_ONCE:
            self._look(trainer)
        self._rows += rows
        self._sums = terms * rows if self._sums is None else self._sums + terms * rows
        if is_told:
            self._notify_steps()

    def _look(self, trainer: pl.Trainer) -> None:
        """Raises Diverged at the first step since the last look whose loss is not finite."""
        unseen, self._seen = self._untold[self._seen :], len(self._untold)
        at = self._terms.index("loss")
        losses = torch.stack([terms[at] for terms in unseen]).tolist() if unseen else []
        for step, loss in enumerate(losses, self.steps - len(losses) + 1):
            if not math.isfinite(loss):
                self._notify_steps()
                where = f"stage '{self.stage}', epoch {trainer.current_epoch + 1}, step {step}"
                raise Diverged(f"diverged at {where}: the loss is {loss}")

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        """Adds the epoch to the module's history, stops where patience ends, saves where it is time.

        Raises:
            Diverged: If the loss of a step that was not looked at yet is not finite.
        """
        self._look(trainer)
        row: dict[str, float] = {"epoch": trainer.current_epoch + 1}
        assert self._sums is not None  # an epoch has a batch
        row |= self._probed | dict(zip(self._terms, (self._sums / self._rows).tolist(), strict=True))
        row |= {name: value.item() for name, value in trainer.callback_metrics.items()}
        module.history.append(row)
        if self.waits is not None:
            self._stop_early(trainer, module, self.waits)
        last = trainer.should_stop or trainer.current_epoch + 1 == trainer.max_epochs
        if last:
            self._notify_steps()
        place = {"of": trainer.max_epochs, "together": self.copies, "steps": self.copies * self.steps}
        self.observe("epoch", row | place)
        if self.partial is not None and not last:
            self._save(trainer, self.partial)

    def _notify_steps(self) -> None:
        """Tells the means over the steps since they were last told, if there are any."""
        if self._untold:
            means = torch.stack(self._untold).mean(0).tolist()
            self._untold, self._seen = [], 0
            row = dict(zip(self._terms, means, strict=True))
            self.observe("steps", row | {"steps": self.copies * self.steps})

    def _stop_early(self, trainer: pl.Trainer, module: Any, waits: Patience) -> None:
        """Stops after `patience` epochs without a better validation NLL, or training loss without one."""
        epoch, warmup, row = trainer.current_epoch, module.warmup_epochs, module.history[-1]
        if waits.improves(epoch, from_first(lambda: row.get("val_nll", row["loss"])), warmup):
            self.best = {name: value.detach().clone() for name, value in module.state_dict().items()}
        elif waits.ends(epoch, warmup):
            trainer.should_stop = True

    def _save(self, trainer: pl.Trainer, path: Path) -> None:
        if from_first(lambda: time.perf_counter() - self._saved >= self.seconds):
            self._saved = time.perf_counter()
            self._look(trainer)
            trainer.save_checkpoint(path)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Adds where the noise of each process is."""
        if ranks()[1] > 1:
            checkpoint["generators"] = from_each(lambda: _source(module).get_state())

    def on_load_checkpoint(
        self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Restores the noise of this process."""
        if "generators" in checkpoint:
            _source(module).set_state(checkpoint["generators"][ranks()[0]].cpu())

    def state_dict(self) -> dict[str, Any]:
        """What a resumed fit needs of this watch."""
        names = (
            "steps",
            "best",
            "_untold",
            "_sums",
            "_terms",
            "_rows",
            "_probed",
        )
        state = {name: getattr(self, name) for name in names} | {"earlier_seconds": self.seconds_spent}
        return state | ({"waits": vars(self.waits)} if self.waits else {})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        if "waits" in state_dict:
            self.waits = Patience(**state_dict.pop("waits"))
        for name, value in state_dict.items():
            setattr(self, name, value)
        self._seen = len(self._untold)  # nothing is saved before it was looked at


def _rows(trainer: pl.Trainer) -> tuple[int, int]:
    """Examples of the present batch: those of this process, and all."""
    loader: Any = trainer.train_dataloader
    handed_out: tuple[int, int] = loader.handed_out
    return handed_out


def _source(module: Any) -> torch.Generator:
    generator: torch.Generator = module.generator
    return generator
