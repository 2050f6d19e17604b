"""Independent copies of one method trained side by side: one vmap over their stacked parameters.

Every copy keeps its own initial weights, data, data order and noise, and ends where training it alone would
have ended, up to rounding: the optimisers of the suite work weight by weight, and the summed loss gives each
copy its own gradient. benchmarks/small_fits.py compares the speed with one after another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils.data import TensorDataset

from bench.batches import TensorBatches
from bench.contract import Batch, Budget, Method, Noise, Prediction, Problem
from bench.engine.watch import Patience
from bench.errors import UsageError


def fit_together(methods: list[Method], budgets: list[Budget]) -> bool:
    """Whether these fits can be stacked.

    They cannot if the method does not stack, if early stopping watches validation examples, if their data
    differ in number of rows or do not lie in memory, or if each has a prior or a network of its own.
    """
    first = methods[0]
    return all(
        m.stacks
        and m.trains
        and b == budgets[0]
        and (b.patience is None or m.problem.val is None)
        and m.problem.prior is first.problem.prior
        and type(m.likelihood) is type(first.likelihood)
        and _shapes(m) is not None
        and _shapes(m) == _shapes(first)
        and [p.shape for p in m.parameters()] == [p.shape for p in first.parameters()]
        for m, b in zip(methods, budgets, strict=True)
    )


def _shapes(method: Method) -> list[torch.Size] | None:
    """Shapes of the training examples, if they lie in memory."""
    train = method.problem.train
    return [t.shape for t in train.tensors] if isinstance(train, TensorDataset) else None


def weighted(problem: Problem, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets and R weightings `[R, N]` of the training examples; weights that they have multiply.

    Raises:
        UsageError: If the data do not lie in memory, or the weights are not R rows of N that are finite, at
            least 0, and above 0 somewhere.
    """
    if not isinstance(problem.train, TensorDataset):
        raise UsageError("fits under several weightings need a data set in memory, a TensorDataset")
    inputs, targets, *own = problem.train.tensors
    if weights.shape[1:] != inputs.shape[:1] or len(weights) == 0:
        raise UsageError(f"example weights must be [R, {len(inputs)}], not {list(weights.shape)}")
    weights = (weights * own[0] if own else weights).to(inputs.dtype)
    if not (weights.isfinite() & (weights >= 0)).all() or not (weights > 0).any(1).all():
        raise UsageError("example weights must be finite, at least 0, and above 0 in every row somewhere")
    return inputs, targets, weights


class Reweighted(Method):
    """Fits of one problem under several weightings of its examples, side by side: for prediction alone.

    Args:
        fits: One after the other, at least 1; or one that holds them all (`reweighted`).
    """

    approximates = "several posteriors, which differ in the weights of the examples"

    def __init__(self, fits: list[Method]) -> None:
        with torch.random.fork_rng(devices=[]):  # the base class draws a seed that is of no use here
            super().__init__(fits[0].problem, fits[0].settings)
        self.fits = nn.ModuleList(fits)
        self.diverged = next((f.diverged for f in fits if f.diverged is not None), None)

    def predict(self, inputs: Tensor, num_samples: int, generator: torch.Generator) -> Prediction:
        """Predictions `[R * S, B, ...]`, fit after fit, under equal draws: differences are of the fits."""
        state = generator.get_state()
        parts = []
        for fit in self.fits:
            assert isinstance(fit, Method)
            generator.set_state(state)
            parts.append(fit.predict(inputs, num_samples, generator))
        return type(parts[0])(**{name: torch.cat([vars(p)[name] for p in parts]) for name in vars(parts[0])})


class Batches:
    """The batches of every copy, `[M, B, ...]`, each in the order that it would have alone.

    Args:
        loaders: One per copy, of equal length.
    """

    def __init__(self, loaders: list[TensorBatches]) -> None:
        self.loaders = loaders
        self.sampler = self

    def set_epoch(self, epoch: int) -> None:
        """Chooses the orders of the next pass."""
        for loader in self.loaders:
            loader.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.loaders[0])

    def __iter__(self) -> Iterator[Batch]:
        for batches in zip(*self.loaders, strict=True):
            yield Batch(*(torch.stack(p) for p in zip(*batches, strict=True) if p[0] is not None))


class _Loss(nn.Module):
    """The loss terms of a method as the forward of a module, for `functional_call`."""

    def __init__(self, method: Method) -> None:
        super().__init__()
        self.method = method

    def forward(self, batch: Batch, noise: Noise) -> tuple[Tensor, Tensor]:
        return self.method.loss_terms(batch, noise)


class Stacked(pl.LightningModule):
    """M copies of one method; trained through Lightning like one.

    Args:
        methods: The copies, before training; `hand_back` gives them their trained parameters.
        stage: Of the run, named where a copy's loss is not finite: it is marked, and the others go on.
        patience: Epochs without a better training loss after which a copy stops (`bench.contract.Budget`):
            it then has the weights of its best epoch, and the others go on. None never.
    """

    def __init__(self, methods: list[Method], stage: str, patience: int | None = None) -> None:
        super().__init__()
        self.methods = methods  # a plain list: their own parameters are not trained
        self.stage = stage
        self.template = [_Loss(methods[0])]
        self.history: list[dict[str, float]] = []
        self.waits = None if patience is None else [Patience(patience) for _ in methods]
        self.stopped = [False] * len(methods)
        self.best: list[Tensor] | None = None
        """The stacked weights, of every copy's best epoch so far; where there is patience."""
        parameters = [dict(m.named_parameters()) for m in methods]
        self.names = list(parameters[0])
        self.stacked = nn.ParameterList(
            nn.Parameter(
                torch.stack([p[name].detach() for p in parameters]), parameters[0][name].requires_grad
            )
            for name in self.names
        )

    def configure_optimizers(self) -> Any:
        """The method's own optimiser, with its schedule if it has one, over the stacked parameters."""
        own: Any = self.methods[0].configure_optimizers()
        optimizer = own["optimizer"] if isinstance(own, dict) else own
        names = {id(p): name for name, p in self.methods[0].named_parameters()}
        side_by_side = dict(zip(self.names, self.stacked, strict=True))
        for group in optimizer.param_groups:
            group["params"] = [side_by_side[names[id(p)]] for p in group["params"]]
        return own

    def on_fit_start(self) -> None:
        """Moves buffers and generators of the copies to the device of the weights."""
        for method in self.methods:
            method.to(self.device)
            method.on_fit_start()
        self.methods[0].prior  # noqa: B018  made here, outside vmap
        # The copies see what they are being trained to: noise may depend on it (draws of a gamma).
        for i, method in enumerate(self.methods):
            for parameter, together in zip(method.parameters(), self.stacked, strict=True):
                parameter.data = together.data[i]
        buffers = [dict(m.named_buffers()) for m in self.methods]
        self.own_buffers = {name: torch.stack([b[name] for b in buffers]) for name in buffers[0]}

    def on_train_epoch_start(self) -> None:
        """Tells the copies the epoch, which decides pretraining and annealing."""
        for method, stopped in zip(self.methods, self.stopped, strict=True):
            if not stopped:
                method.epoch = self.current_epoch
        self._rows = 0
        self._sums = dict.fromkeys(
            ("loss", "likelihood_term", "prior_term"), torch.zeros((), device=self.device)
        )

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """The summed loss of the copies."""
        first = self.methods[0]
        drawn = [
            None if stopped else m.draw_noise(m.num_train_samples, m.generator)
            for m, stopped in zip(self.methods, self.stopped, strict=True)
        ]
        any_of_them = next(noise for noise in drawn if noise is not None)  # for copies that have stopped
        noises = [any_of_them if noise is None else noise for noise in drawn]
        noise = {name: torch.stack([n[name] for n in noises]) for name in noises[0]}
        state = {f"method.{name}": p for name, p in zip(self.names, self.stacked, strict=True)}
        state |= {f"method.{name}": b for name, b in self.own_buffers.items()}
        present = [part for part in batch if part is not None]

        def terms(state: dict[str, Tensor], parts: list[Tensor], noise: Noise) -> tuple[Tensor, Tensor]:
            likelihood_term, prior_term = functional_call(self.template[0], state, (Batch(*parts), noise))
            return likelihood_term, prior_term

        likelihood_term, prior_term = vmap(terms)(state, present, noise)
        scale = 1.0 / first.problem.num_train
        losses = (likelihood_term + first.prior_weight * prior_term) * scale
        self._rows += batch.inputs.shape[1]
        for name, values in zip(
            self._sums, (losses, likelihood_term * scale, prior_term * scale), strict=True
        ):
            self._sums[name] = self._sums[name] + values.detach() * batch.inputs.shape[1]
        for i, loss in enumerate(losses.tolist()):
            if not math.isfinite(loss) and self._goes_on(i):
                where = f"stage '{self.stage}', epoch {self.current_epoch + 1}"
                self.methods[i].diverged = f"diverged at {where}: the loss is {loss}"
        kept = losses.new_tensor([self._goes_on(i) for i in range(len(self.methods))]).bool()
        if kept.any():  # its gradients reach no other copy's weights
            losses = torch.where(kept, losses, 0)
        return {"loss": losses.sum()}

    def on_train_epoch_end(self) -> None:
        """Adds the epoch to the history of every copy that goes on."""
        means = {name: (total / self._rows).tolist() for name, total in self._sums.items()}
        for i, method in enumerate(self.methods):
            if self._goes_on(i):
                method.history.append(
                    {"epoch": self.current_epoch + 1} | {name: values[i] for name, values in means.items()}
                )
        if self.waits is not None:
            self._stop_early(self.waits)

    def _stop_early(self, waits: list[Patience]) -> None:
        """Keeps the weights of copies whose epoch was their best, and stops those whose patience ends."""
        epoch, warmup = self.current_epoch, self.methods[0].warmup_epochs
        going_on = [i for i in range(len(self.methods)) if self._goes_on(i)]
        better = [
            i for i in going_on if waits[i].improves(epoch, self.methods[i].history[-1]["loss"], warmup)
        ]
        latest = [i for i in going_on if waits[i].best_score == math.inf]  # before the warm-up ends
        if self.best is None:
            self.best = [together.detach().clone() for together in self.stacked]
        for best, together in zip(self.best, self.stacked, strict=True):
            best[better + latest] = together.detach()[better + latest]
        for i in set(going_on) - set(better):
            self.stopped[i] = waits[i].ends(epoch, warmup)
        if not any(map(self._goes_on, going_on)):
            self.trainer.should_stop = True

    def _goes_on(self, i: int) -> bool:
        """Whether a copy neither has stopped nor has diverged."""
        return not self.stopped[i] and self.methods[i].diverged is None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds what every copy keeps beside its parameters."""
        checkpoint["copies"] = [{"diverged": m.diverged} for m in self.methods]
        checkpoint["early"] = [vars(w) for w in self.waits or []], self.stopped, self.best
        for method, copy in zip(self.methods, checkpoint["copies"], strict=True):
            method.on_save_checkpoint(copy)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restores what `on_save_checkpoint` added."""
        waits, self.stopped, self.best = checkpoint["early"]
        self.waits = [Patience(**own) for own in waits] or None
        for method, copy in zip(self.methods, checkpoint["copies"], strict=True):
            method.on_load_checkpoint(copy)
            method.diverged = copy["diverged"]

    def hand_back(self) -> None:
        """Gives every copy its trained parameters: where there is patience those of its best epoch."""
        with torch.no_grad():
            for kept, together in zip(self.best or [], self.stacked, strict=False):
                together.copy_(kept)
            for method in self.methods:
                for parameter in method.parameters():
                    parameter.data = parameter.data.clone()
                method.to("cpu")
