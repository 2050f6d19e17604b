"""The steps of an epoch in one call of Lightning's, where nothing asks for them one by one.

What Lightning does around a batch (hooks, precision, fetching, counting) takes longer than many a step here.
An epoch is then one batch of Lightning's, and its steps are made by manual optimisation: the same steps, on
the same batches, in the same order, so that no number changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytorch_lightning as pl
from torch import Tensor, optim

from bench.batches import OnDevice
from bench.contract import Batch, Method
from bench.engine.watch import Watch
from bench.system.processes import ranks

_AROUND_A_STEP = (
    "on_train_batch_start",
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
    "on_before_zero_grad",
    "optimizer_zero_grad",
    "on_before_backward",
    "backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "lr_scheduler_step",
)
"""Hooks that Lightning calls for every step, and `_Epochs` does not."""


@contextmanager
def at_once(trainer: pl.Trainer, module: pl.LightningModule, watch: Watch, loader: Any) -> Iterator[Any]:
    """Within, the trainer makes an epoch's steps in one call where that is the same fit; gives it its loader.

    Args:
        trainer: Before its fit.
        module: What it is going to fit.
        watch: Is told of every step.
        loader: Gives the batches of an epoch.
    """
    if not _alike(trainer, module, loader):
        yield loader
        return
    epochs, automatic = _Epochs(trainer, module, watch, loader), module.automatic_optimization
    own = {"configure_optimizers": epochs.configure, "training_step": epochs.make}
    vars(module).update(own)
    try:
        yield epochs
    finally:
        for name in own:
            del vars(module)[name]
        module.automatic_optimization = automatic


def _alike(trainer: pl.Trainer, module: pl.LightningModule, loader: Any) -> bool:
    """Whether an epoch in one call is the epoch that Lightning would make step by step.

    It is not where several processes share a step, where its precision is mixed, where the module has hooks
    around it, or where a loader can go on inside an epoch, which is then saved between two steps.
    """
    kind = type(module)
    has_hooks = any(getattr(kind, name) is not getattr(pl.LightningModule, name) for name in _AROUND_A_STEP)
    after = (Method.on_train_batch_end, pl.LightningModule.on_train_batch_end)  # both of an epoch's last step
    return (
        ranks()[1] == 1
        and trainer.precision == "32-true"
        and not has_hooks
        and kind.on_train_batch_end in after
        and not hasattr(loader, "state_dict")
    )


class _Epochs:
    """A loader with one batch, itself: all batches of an epoch. And what makes their steps.

    Attributes:
        whole: False where it is a loader like any other: of a schedule that Lightning alone can follow.
    """

    def __init__(self, trainer: pl.Trainer, module: Any, watch: Watch, loader: Any) -> None:
        self.trainer, self.module, self.watch, self.loader = trainer, module, watch, loader
        self.automatic, self.whole = module.automatic_optimization, True
        self.own_optimizers, self.own_step = module.configure_optimizers, module.training_step
        self.sampler = getattr(loader, "sampler", None)  # Lightning tells it the epoch

    def __len__(self) -> int:
        return 1 if self.whole else len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return iter([self] if self.whole else self.loader)

    def configure(self) -> Any:
        """What the module's `configure_optimizers` returns; called before training begins."""
        made = self.own_optimizers()
        schedule = made.get("lr_scheduler") if isinstance(made, dict) else None
        by_epochs = schedule is None or isinstance(schedule, optim.lr_scheduler.LRScheduler)
        by_epochs &= not isinstance(schedule, optim.lr_scheduler.ReduceLROnPlateau)
        self.whole = not self.automatic or (by_epochs and isinstance(made, dict | optim.Optimizer))
        self.module.automatic_optimization = self.automatic and not self.whole
        return made

    def make(self, batch: Any, batch_idx: int) -> Any:
        """Makes every step of the epoch that this is; of one batch its step."""
        if not self.whole:
            return self.own_step(batch, batch_idx)
        optimizer = self.module.optimizers(use_pl_optimizer=False) if self.automatic else None
        step = self.own_step if optimizer is None else partial(self._optimised, optimizer)
        for index, part in enumerate(OnDevice(self.loader, self.module.device)):
            self.watch.add(self.trainer, step(part, index), part)
        schedule = self.module.lr_schedulers()
        if self.automatic and schedule is not None:  # one at most, by `configure`
            schedule.step()
        return None

    def _optimised(self, optimizer: optim.Optimizer, batch: Batch, index: int) -> dict[str, Tensor]:
        """Makes one step of the optimiser as Lightning does; returns the loss and its terms."""
        terms: dict[str, Tensor] = {}

        def closure() -> Tensor:
            found = self.own_step(batch, index)
            terms.update({"loss": found} if isinstance(found, Tensor) else {"loss": found["loss"]} | found)
            optimizer.zero_grad()
            terms["loss"].backward()
            return terms["loss"]

        self.module.optimizer_step(self.trainer.current_epoch, index, optimizer, closure)
        return terms
