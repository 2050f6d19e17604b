"""Lightning's hooks, common to all methods that are trained by gradients; a method overrides one at need.

`bench.contract.Method` stands on this class and says what the hooks call: `draw_noise`, `loss_terms`,
`predict`. Shapes: S samples, B examples.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, ClassVar

import pytorch_lightning as pl
import torch
from torch import Tensor

from bench import optimizers
from bench.system.processes import from_first

if TYPE_CHECKING:
    from bench.contract import Batch, Method, Problem, WeightDistribution


class Hooks(pl.LightningModule):
    """Optimiser, training step, validation, and what a checkpoint holds beside the state dictionary.

    Args:
        problem: What to infer; the method gets a likelihood of its own.
        settings: Of the method; `optimizer`, `learning_rate` and perhaps `rate_decay` name its optimiser.
        start: For the method's own `__init__`.
    """

    validation_samples: ClassVar[int] = 8
    """Draws behind the validation NLL."""

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
        method: Any = self
        parameters = dict(method.network.named_parameters())
        first = next(iter(parameters.values()))
        if self._prior is None or self._prior[0] != (first.device, first.dtype):
            self._prior = (first.device, first.dtype), method.make_prior(parameters)
        return self._prior[1]

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
        method: Any = self
        noise = method.draw_noise(self.num_train_samples, self.generator)
        likelihood_term, prior_term = method.loss_terms(batch, noise)
        scale = 1.0 / self.problem.num_train
        return {
            "loss": (likelihood_term + method.prior_weight * prior_term) * scale,
            "likelihood_term": likelihood_term.detach() * scale,
            "prior_term": prior_term.detach() * scale,
        }

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Logs the validation NLL; every epoch uses the same draws, so that epochs can be compared."""
        method: Any = self
        generator = torch.Generator(batch.inputs.device).manual_seed(0)
        with torch.autocast(batch.inputs.device.type, enabled=False):  # as predictions are after the fit
            prediction = method.predict(batch.inputs, self.validation_samples, generator)
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
