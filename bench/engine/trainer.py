"""Lightning's Trainer as the engine uses it: its options, one per fit, and what a fit needs around it.

A second `fit` on one Trainer silently does nothing, so every fit gets a Trainer of its own. It knows of one
device: what several processes do together is in `bench.system.processes`, and in `bench.engine.watch` where
they train.
"""

from __future__ import annotations

import ctypes
import inspect
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from pytorch_lightning.plugins.io import CheckpointIO
from pytorch_lightning.trainer.connectors import callback_connector
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from bench.contract import Budget
from bench.engine import steps
from bench.engine.checkpoints import fitting, forget, read, save
from bench.engine.watch import Watch
from bench.errors import UsageError
from bench.settings import Count, Whole, settings
from bench.system.processes import Place, from_first

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""From glibc's malloc.h."""

_RESTORED = ("state_dict", "loops", "callbacks", "optimizer_states", "lr_schedulers")
"""What Lightning restores of an unfinished fit."""

_TORCHRUN = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
"""Variables that torchrun sets."""

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
    """How many devices of each machine, a process for each; on a CPU auto is one process, under torchrun as
    many as it has started."""
    strategy: str = "auto"
    """How several devices share a fit: ddp, by examples; auto is the same."""
    num_nodes: Count = 1
    """Number of machines."""
    precision: Literal["32-true", "bf16-mixed", "16-mixed"] = "32-true"
    """Floating-point precision of training steps; weights and predictions are float32 under each. 16-mixed is
    for GPUs."""
    workers: Whole | None = None
    """Processes that read examples from disk ahead of training, where a task has such examples; not given:
    none on a CPU, else 4. No number depends on it."""
    stacked: bool | None = None
    """Train independent fits side by side, where method and budget allow (bench.engine.stacked); not given:
    where that is faster."""
    compiled: bool | None = None
    """Compile the training step (bench.engine.compiled), where a C++ compiler is found; not given: of long
    fits on a CPU, where method and length make that faster."""


def reads_ahead(options: TrainerOptions, device: torch.device) -> int:
    """How many processes read examples from disk: on a CPU its cores train."""
    if options.workers is not None:
        return options.workers
    return 0 if device.type == "cpu" else 4


def place(options: TrainerOptions) -> Place:
    """Where this process stands among those of a run: as torchrun, Slurm or LOCAL_RANK say.

    Raises:
        UsageError: If Lightning does not accept the options, or others have started another number of
            processes; in one line.
    """
    trainer = _trainer(options)
    strategy: Any = trainer.strategy
    if options.strategy not in ("auto", "ddp"):
        raise UsageError(f"--trainer.strategy {options.strategy}: several devices share a fit by ddp alone")
    if trainer.world_size == 1:
        return Place(0, 1, 0, 1, strategy.root_device)
    around, local_world = strategy.cluster_environment, strategy.num_processes
    with _as_usage_error():
        around.validate_settings(num_devices=local_world, num_nodes=options.num_nodes)
    return Place(
        trainer.global_rank,
        trainer.world_size,
        around.local_rank(),
        local_world,
        strategy.root_device,
        around.main_address,
        around.main_port,
        around.creates_processes_externally,
    )


def make(options: TrainerOptions, budget: Budget, place: Place) -> pl.Trainer:
    """A Trainer for one fit on the device of this process."""
    devices: Any = [place.device.index] if place.device.type == "cuda" else 1
    own = replace(options, devices=devices, num_nodes=1, strategy="auto")
    return _trainer(own, [LightningEnvironment()], max_epochs=budget.epochs)


def _trainer(options: TrainerOptions, plugins: list[Any] | None = None, max_epochs: int = 1) -> pl.Trainer:
    on_cpu = options.accelerator in ("auto", "cpu") and not torch.cuda.is_available()
    devices: Any = options.devices
    if devices == "auto" and (on_cpu or options.accelerator == "cpu"):
        devices = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if plugins is None:  # these variables are torchrun's, whoever has set them
        plugins = [TorchElasticEnvironment()] if os.environ.keys() >= _TORCHRUN else []
    with warnings.catch_warnings(), _as_usage_error(), _own_callbacks_alone():
        warnings.filterwarnings("ignore", module="pytorch_lightning")
        trainer = _Trainer(
            accelerator=options.accelerator,
            devices=devices,
            strategy=options.strategy,
            num_nodes=options.num_nodes,
            precision=options.precision,
            max_epochs=max_epochs,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,
            plugins=[_Checkpoints(), *plugins],
        )
    if trainer.precision != options.precision:
        given = f"--trainer.precision {options.precision}"
        raise UsageError(f"{given}: on this device Lightning would take {trainer.precision}")
    return trainer


def fit(trainer: pl.Trainer, module: pl.LightningModule, watch: Watch, loader: Any, val: Any = None) -> None:
    """Trains a module, from where an earlier start of the run has left the watched fit.

    Args:
        trainer: A new one.
        module: A method, or several side by side.
        watch: Follows the fit.
        loader: Gives the training batches.
        val: Gives the validation batches, if there are any.

    Raises:
        Damaged: If the checkpoint of the unfinished fit is damaged; the module is then as it was.
        UsageError: If the checkpoint does not fit.
        KeyboardInterrupt: Lightning answers Ctrl-C by ending the process; ending it is the caller's.
    """
    keep_memory()
    callbacks: list[Any] = vars(trainer)["callbacks"]  # untyped there
    callbacks.append(watch)
    resume = from_first(lambda: watch.resume)
    with (
        warnings.catch_warnings(),
        _interruptible(trainer),
        _restored(watch, resume),
        steps.at_once(trainer, module, watch, loader) as batches,
    ):
        warnings.filterwarnings("ignore", module="pytorch_lightning")
        trainer.fit(module, batches, val, ckpt_path=resume, weights_only=True if resume else None)
    module.trainer = None


class _Trainer(pl.Trainer):
    """Lightning's Trainer, without the options that variables `PL_TRAINER_...` add: no record would tell."""

    __init__ = inspect.unwrap(pl.Trainer.__init__)


class _Checkpoints(CheckpointIO):
    """Has Lightning write and read the checkpoints of unfinished fits like all others: by one process."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        from_first(lambda: save(checkpoint, Path(path)))

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: Any = True) -> Any:
        checkpoint = from_first(lambda: read(Path(path)))
        with fitting(Path(path)):  # what is not there Lightning leaves as it is, without a word
            return checkpoint | {name: checkpoint[name] for name in _RESTORED}

    def remove_checkpoint(self, path: Any) -> None:
        forget(Path(path))


@contextmanager
def _own_callbacks_alone() -> Iterator[None]:
    """Inside the block Lightning gives a Trainer no callbacks of packages that happen to be installed.

    No record would tell of them. Looking for them reads what is known of every package, at every fit.
    """
    name, kept = "_load_external_callbacks", getattr(callback_connector, "_load_external_callbacks", None)
    setattr(callback_connector, name, lambda group: [])
    try:
        yield
    finally:
        setattr(callback_connector, name, kept)


@contextmanager
def _as_usage_error() -> Iterator[None]:
    try:
        yield
    except (MisconfigurationException, TypeError, ValueError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0]
        raise UsageError(f"--trainer: Lightning does not accept these options: {first}") from None


@contextmanager
def _restored(watch: Watch, resume: Path | None) -> Iterator[None]:
    """What fails while Lightning restores an unfinished fit lies at its checkpoint."""
    try:
        yield
    except Exception:
        if resume is None or watch.trains:
            raise
        with fitting(resume):
            raise


@contextmanager
def _interruptible(trainer: pl.Trainer) -> Iterator[None]:
    """What a signal does is the process's choice (`bench.system.signals`), and Ctrl-C a KeyboardInterrupt.

    Lightning would hear SIGTERM even where it is ignored, and end with exit code 0. It answers Ctrl-C by
    ending the process, and ignores it from then on.
    """
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    except SystemExit as error:
        if not isinstance(error.__context__, KeyboardInterrupt):
            raise
        raise KeyboardInterrupt from None
    finally:
        if threading.current_thread() is threading.main_thread() and handler is not None:
            signal.signal(signal.SIGINT, handler)


@cache
def keep_memory() -> None:
    """Has glibc keep the memory of freed tensors for the next step, up to 256 MiB; elsewhere nothing.

    By default it returns the memory of large tensors to the kernel, which clears it again at every step.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 * 2**20)  # the most that it takes
        mallopt(_M_TRIM_THRESHOLD, 256 * 2**20)
