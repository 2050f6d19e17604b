"""An epoch whose steps are made in one call of Lightning's is the epoch that Lightning makes step by step."""

from dataclasses import replace

import pytest
import pytorch_lightning as pl
import torch
import toys
from conformance import problems
from torch.utils.data import TensorDataset

from bench.batches import batches
from bench.contract import Budget
from bench.engine import steps, watch
from bench.engine.engine import Engine, TrainerOptions
from bench.errors import Diverged
from bench.methods.map import MAP
from bench.runs import registry
from bench.settings import build

EPOCHS, STEPS = 4, 16
BUDGET = Budget(epochs=EPOCHS, batch_size=6)
"""Of 20 examples: three batches of six and one of two."""


class LossAlone(MAP):
    """Returns its loss by itself, as Lightning allows."""

    def training_step(self, batch, batch_idx):
        """The loss."""
        return super().training_step(batch, batch_idx)["loss"]


class LossLast(MAP):
    """Names its loss after its terms."""

    def training_step(self, batch, batch_idx):
        """The terms and the loss."""
        return dict(reversed(super().training_step(batch, batch_idx).items()))


class Decays(MAP):
    """Halves its rate after every epoch."""

    def configure_optimizers(self):
        """That of MAP, with the schedule."""
        optimizer = super().configure_optimizers()
        return {
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        }


CASES = {
    "plain": ("map", {}, BUDGET),
    "patience and validation": ("map", {"learning_rate": 0.3}, Budget(60, 5, patience=3)),
    "patience of the training loss": ("mfvi", {"learning_rate": 0.3}, Budget(60, 5, patience=1)),
    "noise": ("mfvi", {"train_samples": 3, "pretrain_epochs": 1}, BUDGET),
    "longer than the data": ("radial", {}, Budget(3, 6, draws=47)),
    "all at once": ("mfvi", {}, Budget(5)),
    "a rate that decays": (Decays, {"optimizer": "sgd"}, BUDGET),
    "a schedule, and work after an epoch": ("swag", {}, BUDGET),
    "an optimiser of its own": ("ivon", {}, BUDGET),
    "work after a step": ("sngp", {}, BUDGET),
    "steps of its own": ("svgd", {}, BUDGET),
    "a chain": ("sgld", {}, BUDGET),
    "a leapfrog chain": ("sghmc", {}, BUDGET),
    "a transition an epoch": ("hmc", {"burn": 2, "kept": 4, "leapfrog_steps": 3}, BUDGET),
    "more terms": ("mixture_vi", {"components": 2}, BUDGET),
    "the loss alone": (LossAlone, {}, BUDGET),
    "the loss last": (LossLast, {}, BUDGET),
}


def fitted(kind, values, budget, posed=None, **options):
    """All that a fit leaves and tells, with the batches that Lightning has seen."""
    entry = registry.method(kind) if isinstance(kind, str) else None
    cls = kind if entry is None else entry.cls
    settings = build(cls.settings_class, ({} if entry is None else entry.fixed) | values, "method")
    engine = Engine(cls, settings, 0, None, TrainerOptions(accelerator="cpu", **options))
    told, seen = [], []
    engine.observe(lambda event, row: told.append((event, [*row], str(row))))
    end = watch.Watch.on_train_batch_end
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(watch, "STEPS_TOLD", 3)
        patched.setattr(watch.Watch, "on_train_batch_end", lambda *a: (seen.append(a[5]), end(*a)))
        methods = engine.fit_many([posed or problems.mlp()] * (2 if options else 1), budget)
    left = [
        (m.history, {n: v.tolist() for n, v in m.state_dict().items()}, m.generator.get_state().tolist())
        for m in methods
    ]
    fits = [{k: v for k, v in fit.items() if k != "seconds"} for fit in engine.fits]
    return (left, told, fits), len(seen)


def step_by_step(*case, **options):
    """The same, where Lightning makes every step."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(steps, "_alike", lambda *_: False)
        return fitted(*case, **options)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_no_bit_differs(case):
    """Of weights, losses, what is told on the way, and where the noise is."""
    once, calls = fitted(*case)
    singly, batches_seen = step_by_step(*case)
    fit = once[2][0]
    assert (calls, batches_seen) == (fit["epochs"], fit["steps"])
    assert fit["epochs"] < 60, "patience did not stop it"
    assert once == singly


def test_no_bit_differs_side_by_side():
    options = {"stacked": True}
    once, calls = fitted("mfvi", {"train_samples": 2}, BUDGET, **options)
    singly, batches_seen = step_by_step("mfvi", {"train_samples": 2}, BUDGET, **options)
    assert (calls, batches_seen) == (EPOCHS, STEPS)
    assert once == singly


@pytest.mark.parametrize("cheat", ["short", "order", "schedule"])
def test_another_epoch_would_be_seen(cheat, monkeypatch):
    """The negative control."""
    case = ("swag", {}, BUDGET)
    make, made = steps._Epochs.make, steps._Epochs.__init__

    def begin(self, *given):
        made(self, *given)
        if cheat == "order":
            self.sampler = None
        if cheat == "short":
            self.loader.draws = 18

    def without_schedule(self, batch, index):
        monkeypatch.setattr(self.module, "lr_schedulers", lambda: None)
        return make(self, batch, index)

    monkeypatch.setattr(steps._Epochs, "__init__", begin)
    if cheat == "schedule":
        monkeypatch.setattr(steps._Epochs, "make", without_schedule)
    assert fitted(*case)[0][0] != step_by_step(*case)[0][0]


# ---- where single steps are needed


@pytest.mark.parametrize("hook", [*steps._AROUND_A_STEP, "on_train_batch_end", "optimizer_step"])
def test_a_methods_own_hook_is_called_for_every_step(hook):
    called = []

    def own(self, *arguments, **named):
        called.append(hook)
        return getattr(MAP, hook)(self, *arguments, **named)

    fitted(type("Hooked", (Decays,), {hook: own}), {}, BUDGET)
    assert len(called) == (EPOCHS if hook == "lr_scheduler_step" else STEPS)


class BySteps(MAP):
    """Halves its rate after every second step."""

    def configure_optimizers(self):
        """That of MAP, with the schedule."""
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        self.rate = lambda: optimizer.param_groups[0]["lr"] / self.settings.learning_rate
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step", "frequency": 2},
        }


class ByItsLoss(MAP):
    """Halves its rate after every epoch whose validation NLL is no better, which none can be."""

    def configure_optimizers(self):
        """That of MAP, with the schedule."""
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.5, patience=0, threshold=1e9
        )
        self.rate = lambda: optimizer.param_groups[0]["lr"] / self.settings.learning_rate
        return {"optimizer": optimizer, "lr_scheduler": schedule, "monitor": "val_nll"}


@pytest.mark.parametrize(("cls", "halvings"), [(BySteps, STEPS // 2), (ByItsLoss, EPOCHS)])
def test_schedules_that_do_not_go_by_epochs_are_lightnings(cls, halvings):
    made = []

    class Kept(cls):
        def __init__(self, *given):
            super().__init__(*given)
            made.append(self)

    _, calls = fitted(Kept, {}, replace(BUDGET, patience=100))
    assert calls == STEPS
    assert made[0].rate() == 0.5**halvings


@pytest.mark.parametrize("diverges", [False, True])
def test_a_method_is_left_as_it_was(diverges):
    made = []

    class Kept(toys.TurnsNaN):
        def __init__(self, *given):
            super().__init__(*given)
            made.append(self)

    engine = Engine(Kept, Kept.settings_class(at_step=7 if diverges else 99), 0)
    if diverges:
        with pytest.raises(Diverged, match="epoch 2, step 7: the loss is nan"):
            engine.fit(problems.mlp(), BUDGET)
    else:
        engine.fit(problems.mlp(), BUDGET)
    (method,) = made
    assert method.automatic_optimization
    assert method.steps_taken == (7 if diverges else STEPS)  # none after the one that diverged
    assert not {"training_step", "configure_optimizers"} & {*vars(method)}


# ---- what surrounds a fit


def test_variables_of_lightning_change_no_fit(monkeypatch):
    """`PL_TRAINER_MAX_STEPS=3` would end it after three steps; no record would tell."""
    monkeypatch.setenv("PL_TRAINER_MAX_STEPS", "3")
    monkeypatch.setenv("PL_TRAINER_GRADIENT_CLIP_VAL", "0.001")
    assert pl.Trainer(logger=False, accelerator="cpu").max_steps == 3
    assert fitted("map", {}, BUDGET)[0][2][0]["steps"] == STEPS


@pytest.mark.parametrize("batch_size", [6, None])
def test_batches_in_memory_are_gathered_on_the_device(batch_size, monkeypatch):
    examples = TensorDataset(torch.randn(20, 3), torch.arange(20), torch.rand(20))
    loader = batches(examples, batch_size, 0, device=torch.device("meta"))
    for _ in range(2):
        shapes = [(part.device.type, *part.shape) for batch in loader for part in batch[:1]]
        assert shapes == [("meta", n, 3) for n in ([6, 6, 6, 2] if batch_size else [20])]
    monkeypatch.setattr("bench.batches._LARGEST_ON_DEVICE", 20 * (3 * 4 + 8 + 4) - 1)
    too_large = batches(examples, batch_size, 0, device=torch.device("meta"))
    assert {part.device.type for batch in too_large for part in batch} == {"cpu"}
