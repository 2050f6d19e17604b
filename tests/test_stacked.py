"""Fits side by side end where fits one after another end."""

from dataclasses import replace
from functools import cache
from typing import Literal

import pytest
import torch
from conformance import problems
from torch.testing import assert_close
from torch.utils.data import TensorDataset

from bench.contract import Budget
from bench.engine.engine import Engine, TrainerOptions
from bench.engine.stacked import Stacked
from bench.errors import Diverged
from bench.runs import registry
from bench.runs.progress import Course
from bench.settings import build, settings

BUDGET = Budget(epochs=5, batch_size=6)


@settings
class Double(TrainerOptions):
    """In float64, which trains, and which users are refused."""

    precision: Literal["64-true"] = "64-true"


def stacking():
    """Names of the methods that can be stacked."""
    return [n for n, e in registry.methods().items() if e.cls.stacks and e.members == 1]


def fits(
    name, values, stacked, budget=BUDGET, folder=None, problems_=None, cls=None, precision="32-true", **kept
):
    """Three fits on data of their own."""
    entry = registry.method(name)
    own = build(entry.cls.settings_class, values, "method")
    kind = Double if precision == "64-true" else TrainerOptions
    options = kind(accelerator="cpu", stacked=stacked)
    engine = Engine(cls or entry.cls, own, 0, folder, options, **kept)
    return engine.fit_many(problems_ or three(), budget), engine


def three(make=problems.mlp):
    """Problems with different rows, of one prior."""
    problem = make()
    rows = [torch.arange(0, 14), torch.arange(3, 17), torch.arange(6, 20)]
    return [problems.with_rows(problem, r) for r in rows]


def test_methods_that_stack_are_there():
    assert {"map", "mfvi", "radial"} <= set(stacking())


@pytest.mark.parametrize("make", problems.PROBLEMS.values(), ids=problems.PROBLEMS)
@pytest.mark.parametrize("name", stacking())
def test_stacked_is_one_by_one(name, make):
    """Parameters and histories to 1e-5; data, orders and noise are each fit's own.

    Of flows to 1e-12 in float64: where gradients are rounding alone, as in places of one that begins as the
    identity, Adam makes whole steps of them in float32.
    """
    flow = name.startswith("nf_")
    precision, tolerance = ("64-true", 1e-12) if flow else ("32-true", 1e-5)
    budget = replace(BUDGET, epochs=3)
    alone, _ = fits(name, {}, False, budget, problems_=three(make), precision=precision)
    together, engine = fits(name, {}, True, budget, problems_=three(make), precision=precision)
    assert [fit["steps"] for fit in engine.fits] == [9, 9, 9]
    for a, b in zip(alone, together, strict=True):
        for key, value in a.state_dict().items():
            assert_close(b.state_dict()[key], value, rtol=tolerance, atol=tolerance, check_dtype=False)
        assert torch.equal(a.generator.get_state(), b.generator.get_state())
        assert a.epoch == b.epoch
        for row, expected in zip(b.history, a.history, strict=True):
            assert row == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("optimizer", ["adam", "amsgrad", "sgd"])
def test_every_optimiser_works_weight_by_weight(optimizer):
    values = {"optimizer": optimizer, "train_samples": 3, "pretrain_epochs": 1, "kl_annealing_epochs": 2}
    alone, _ = fits("mfvi", values, False)
    together, _ = fits("mfvi", values, True)
    for a, b in zip(alone, together, strict=True):
        for key, value in a.state_dict().items():
            assert_close(b.state_dict()[key], value, rtol=1e-5, atol=1e-5)


def test_example_weights_are_each_fits_own():
    weighted = [
        problems.with_rows(problems.mlp(), torch.arange(20), torch.full((20,), float(w))) for w in (0, 1, 2)
    ]
    weighted = [replace(p, prior=weighted[0].prior) for p in weighted]
    alone, _ = fits("map", {}, False, problems_=weighted)
    together, _ = fits("map", {}, True, problems_=weighted)
    for a, b in zip(alone, together, strict=True):
        for key, value in a.state_dict().items():
            assert_close(b.state_dict()[key], value, rtol=1e-5, atol=1e-5)
    assert together[0].history[-1]["likelihood_term"] == 0


def never(self, *_):
    """Stands for the side-by-side path where it must not be taken."""
    raise AssertionError("stacked")


@pytest.mark.parametrize("why", ["patience", "rows", "prior", "method"])
def test_what_cannot_be_stacked_is_fitted_one_by_one(why, monkeypatch):
    monkeypatch.setattr("bench.engine.stacked.Stacked.__init__", never)
    given, budget, name = three(), BUDGET, "mfvi"
    if why == "patience":
        budget = replace(BUDGET, patience=2)
    elif why == "rows":
        given[1] = problems.with_rows(problems.mlp(), torch.arange(5))
    elif why == "prior":
        given[1] = replace(given[1], prior=problems.mlp().prior)
    else:
        name = "mc_dropout"
    together, _ = fits(name, {}, True, budget, problems_=given)
    alone, _ = fits(name, {}, False, budget, problems_=given)
    for a, b in zip(alone, together, strict=True):
        assert all(torch.equal(v, b.state_dict()[k]) for k, v in a.state_dict().items())


PATIENT = Budget(epochs=25, batch_size=6, patience=2)


def unvalidated():
    """Three problems without validation examples: patience then watches the training loss."""
    return [replace(problem, val=None) for problem in three()]


def patient(name, stacked, **kwargs):
    """Three fits at a rate so large that they stop apart."""
    values = {"learning_rate": 0.1} | ({"pretrain_epochs": 3} if name == "mfvi" else {})
    given = {"budget": PATIENT, "problems_": unvalidated()} | kwargs
    return fits(name, values, stacked, **given)


@pytest.mark.parametrize("name", ["map", "mfvi"])
def test_each_copy_stops_where_it_stops_alone(name):
    """Weights of its best epoch, history, noise and steps; a copy that kept its last weights is another."""
    alone, one_by_one = patient(name, False, precision="64-true")
    together, engine = patient(name, True, precision="64-true")
    lengths = [len(method.history) for method in alone]
    assert len(set(lengths)) > 1, "they stop apart"
    assert min(lengths) < PATIENT.epochs
    assert [fit["steps"] for fit in engine.fits] == [fit["steps"] for fit in one_by_one.fits]
    for a, b in zip(alone, together, strict=True):
        for key, value in a.state_dict().items():
            assert_close(b.state_dict()[key], value, rtol=1e-9, atol=1e-9)
        assert torch.equal(a.generator.get_state(), b.generator.get_state())
        assert (a.epoch, len(a.history)) == (b.epoch, len(b.history))
        for row, expected in zip(b.history, a.history, strict=True):
            assert row == pytest.approx(expected, rel=1e-9)


def test_copies_that_stopped_stay_stopped_where_the_others_go_on_later(monkeypatch, tmp_path):
    whole, _ = patient("mfvi", True)
    lengths = sorted(len(method.history) for method in whole)
    with monkeypatch.context() as patch:
        stopped(patch, 3 * lengths[0] + 2)  # within the epoch after the first copy has stopped
        with pytest.raises(MemoryError):
            patient("mfvi", True, folder=tmp_path, checkpoint_seconds=0)
    again, engine = patient("mfvi", True, folder=tmp_path, checkpoint_seconds=0)
    assert sorted(fit["epochs"] for fit in engine.fits) == lengths
    for a, b in zip(again, whole, strict=True):
        assert_same_fit(a, b)


def test_copy_that_diverges_after_it_has_stopped_has_not(monkeypatch):
    """Its weights go on beside the others', and nobody looks at them."""
    whole, _ = patient("map", True)
    first = min(range(3), key=lambda i: len(whole[i].history))
    step = Stacked.training_step

    def training_step(self, batch, batch_idx):
        if self.stopped[first]:
            for together in self.stacked:
                together.data[first] = float("nan")
        return step(self, batch, batch_idx)

    monkeypatch.setattr(Stacked, "training_step", training_step)
    again, _ = patient("map", True)
    assert [method.diverged for method in again] == [None, None, None]
    for a, b in zip(again, whole, strict=True):
        assert_same_fit(a, b)


def test_stacked_fits_are_found_again(tmp_path):
    first, _ = fits("mfvi", {}, True, folder=tmp_path)
    assert len(list(tmp_path.glob("*.ckpt"))) == 3

    class NotAgain(registry.method("mfvi").cls):
        def loss_terms(self, batch, noise):
            raise AssertionError("trained again")

    again, _ = fits("mfvi", {}, True, folder=tmp_path, cls=NotAgain)
    for a, b in zip(first, again, strict=True):
        assert all(torch.equal(v, b.state_dict()[k]) for k, v in a.state_dict().items())
    next(tmp_path.glob("001*.ckpt")).unlink()  # as if stopped while the checkpoints were written
    again, _ = fits("mfvi", {}, True, folder=tmp_path)
    for a, b in zip(first, again, strict=True):
        assert all(torch.equal(v, b.state_dict()[k]) for k, v in a.state_dict().items())


def test_members_of_an_ensemble_are_stacked_too():
    entry = registry.method("map")
    made = []
    for stacked in (False, True):
        options = TrainerOptions(accelerator="cpu", stacked=stacked)
        engine = Engine(entry.cls, entry.cls.settings_class(), 0, None, options, members=2)
        made.append(engine.fit_many([problems.mlp(), problems.mlp()][:1], BUDGET)[0])
    for a, b in zip(made[0].members, made[1].members, strict=True):
        for key, value in a.state_dict().items():
            assert_close(b.state_dict()[key], value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stacked", [False, True])
def test_progress_of_fits_side_by_side_is_that_of_all(stacked):
    """Three fits: after the first epoch of E they have come as far as 1 / E; one alone a third of that."""
    cls = registry.method("map").cls
    options = TrainerOptions(accelerator="cpu", stacked=stacked)
    made, course, shares = Engine(cls, cls.settings_class(), 0, None, options), Course(), []

    def follow(event, values):
        course.follow(event, values)
        if event == "epoch":
            shares.append(course.share)

    made.observe(follow)
    made.fit_many(3 * [problems.mlp()], BUDGET)
    assert shares[0] == pytest.approx((1 if stacked else 1 / 3) / BUDGET.epochs)
    assert shares[-1] == pytest.approx(1)
    assert len(shares) == (1 if stacked else 3) * BUDGET.epochs


@pytest.mark.parametrize("members", [1, 2])
def test_stages_are_side_by_side_where_asked(members, monkeypatch):
    """Each keeps its name, its seeds and its place; all are trained in one go."""
    entry, given, told, made = registry.method("map"), three(), [], []
    widths = []
    init = Stacked.__init__
    monkeypatch.setattr(
        Stacked, "__init__", lambda self, fits, *more: (widths.append(len(fits)), init(self, fits, *more))[1]
    )
    for stacked in (False, True):
        options = TrainerOptions(accelerator="cpu", stacked=stacked)
        engine = Engine(entry.cls, entry.cls.settings_class(), 0, None, options, members=members)
        engine.observe(lambda event, values: told.append(values["text"]) if event == "notice" else None)
        made.append(list(engine.fit_stages(["one", "two", "three"], given.__getitem__, BUDGET)))
        assert [fit["stage"] for fit in engine.fits] == [
            s for s in ("one", "two", "three") for _ in range(members)
        ]
    assert widths == [3 * members]
    assert not told
    for a, b in zip(*made, strict=True):
        for key, value in a.state_dict().items():
            assert_close(b.state_dict()[key], value, rtol=1e-5, atol=1e-5)


def test_flag_that_can_do_nothing_says_so():
    entry, told = registry.method("mc_dropout"), []
    options = TrainerOptions(accelerator="cpu", stacked=True)
    engine = Engine(entry.cls, entry.cls.settings_class(), 0, None, options)
    engine.observe(lambda event, values: told.append(values["text"]) if event == "notice" else None)
    list(engine.fit_stages(["one", "two", "three"], three().__getitem__, BUDGET))
    assert told == ["fits are trained one after another: these cannot be side by side"]


# ---- fits of which some diverge


def with_infinite(given, which):
    """The problems, the inputs of some of them infinite: their loss is not a number from the first step."""
    for i in which:
        inputs, targets = given[i].train.tensors
        given[i] = replace(given[i], train=TensorDataset(inputs * float("inf"), targets))
    return given


def kept(name, stacked, given, folder=None, members=1, cls=None):
    """Fits of which every epoch is saved."""
    entry = registry.method(name)
    options = TrainerOptions(accelerator="cpu", stacked=stacked)
    settings = entry.cls.settings_class()
    engine = Engine(cls or entry.cls, settings, 0, folder, options, members, checkpoint_seconds=0)
    return engine.fit_many(given, BUDGET), engine


@cache
def undisturbed(name, stacked):
    """Fits that neither diverge nor are stopped; not to be changed."""
    return kept(name, stacked, three())[0]


def assert_same_fit(a, b):
    """Equal weights, history, draws and epoch."""
    for key, value in a.state_dict().items():
        assert torch.equal(value, b.state_dict()[key]), key
    assert a.history == b.history
    assert a.epoch == b.epoch
    assert torch.equal(a.generator.get_state(), b.generator.get_state())


@pytest.mark.slow
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("name", ["map", "mfvi", "nf_gamma", "nf_gaussian"])
def test_others_end_where_they_end_without_the_one_that_diverges(name, stacked):
    """One by one to the last bit, side by side to 1e-5."""
    sound = undisturbed(name, False)
    fitted, engine = kept(name, stacked, with_infinite(three(), [1]))
    assert [m.diverged is not None for m in fitted] == [False, True, False]
    assert [fit["diagnostics"].get("diverged") for fit in engine.fits] == [None, 1.0, None]
    assert [len(m.history) for m in fitted] == [5, 0, 5]
    for i in (0, 2):
        for key, value in sound[i].state_dict().items():
            tolerance = {"rtol": 1e-5, "atol": 1e-5} if stacked else {"rtol": 0, "atol": 0}
            assert_close(fitted[i].state_dict()[key], value, **tolerance)


@pytest.mark.parametrize("stacked", [False, True])
def test_predicting_with_one_that_diverged_ends_the_run(stacked):
    """Its reason says where; the others predict."""
    fitted, engine = kept("map", stacked, with_infinite(three(), [1]))
    inputs = three()[0].val.tensors[0]
    engine.predict(fitted[0], inputs, 1)
    with pytest.raises(Diverged, match=r"^diverged at stage 'fit', epoch 1.*: the loss is nan$"):
        engine.predict(fitted[1], inputs, 1)


@pytest.mark.parametrize("stacked", [False, True])
def test_all_may_diverge(stacked, tmp_path):
    """And are found again."""
    for _ in range(2):
        fitted, engine = kept("mfvi", stacked, with_infinite(three(), range(3)), tmp_path)
        assert all(m.diverged is not None for m in fitted)
        assert [fit["diagnostics"] for fit in engine.fits] == 3 * [{"diverged": 1.0}]
    assert [path.suffix for path in tmp_path.iterdir()] == 3 * [".ckpt"]


@pytest.mark.parametrize("stacked", [False, True])
def test_flag_is_found_again(stacked, tmp_path):
    """Of a finished fit."""
    first, _ = kept("mfvi", stacked, with_infinite(three(), [1]), tmp_path)
    again, _ = kept("mfvi", stacked, with_infinite(three(), [1]), tmp_path)
    assert [m.diverged for m in again] == [m.diverged for m in first]
    assert [m.diverged is not None for m in again] == [False, True, False]
    for i in (0, 2):
        assert_same_fit(again[i], first[i])


@pytest.mark.parametrize("stacked", [False, True])
def test_ensemble_of_which_a_member_diverged_has(stacked):
    fitted, _ = kept("map", stacked, with_infinite(three(), [1])[:2], members=2)
    assert [m.diverged is not None for m in fitted] == [False, True]
    assert [m.diverged is not None for m in fitted[1].members] == [True, True]


def stopped(monkeypatch, at):
    """Has the step `at`, counted from 1, of fits side by side end by an error."""
    taken, step = [], Stacked.training_step

    def training_step(self, batch, batch_idx):
        taken.append(self.current_epoch)
        if len(taken) == at:
            raise MemoryError
        return step(self, batch, batch_idx)

    monkeypatch.setattr(Stacked, "training_step", training_step)
    return taken


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mfvi", "nf_gamma", "nf_gaussian"])
@pytest.mark.parametrize("stop", [2, 8, 15])
def test_stopped_side_by_side_goes_on_to_the_same_weights(name, stop, monkeypatch, tmp_path):
    """To the last bit: draws of a learned gamma, rates that fall, and every copy's order of the data."""
    folder = tmp_path / "stopped"
    with monkeypatch.context() as patch:
        stopped(patch, stop)
        with pytest.raises(MemoryError):
            kept(name, True, three(), folder)
    saved = [path.name for path in folder.glob("*")]
    assert saved == (["000-fit.stacked.partial"] if stop > 3 else [])
    with monkeypatch.context() as patch:
        epochs = stopped(patch, None)
        again, engine = kept(name, True, three(), folder)
    assert epochs == [e for e in range((stop - 1) // 3, 5) for _ in range(3)]
    assert [fit["steps"] for fit in engine.fits] == 3 * [15]
    for a, b in zip(again, undisturbed(name, True), strict=True):
        assert_same_fit(a, b)
    assert [path.suffix for path in folder.iterdir()] == 3 * [".ckpt"]


def test_flag_survives_a_stop(monkeypatch, tmp_path):
    """The loss is NaN in the second epoch alone and moves no weight: all but the flag forgets it."""
    given = three()
    inputs, targets = given[1].train.tensors
    given[1] = replace(given[1], train=TensorDataset(inputs.index_fill(0, torch.arange(14), 3.0), targets))

    class Once(registry.method("mfvi").cls):
        def loss_terms(self, batch, noise):
            likelihood_term, prior_term = super().loss_terms(batch, noise)
            lost = (batch.inputs == 3.0).all() & torch.tensor(self.epoch == 1)
            return torch.where(lost, float("nan"), likelihood_term), prior_term

    whole, _ = kept("mfvi", True, given, cls=Once)
    with monkeypatch.context() as patch:
        stopped(patch, 11)
        with pytest.raises(MemoryError):
            kept("mfvi", True, given, tmp_path, cls=Once)
    again, engine = kept("mfvi", True, given, tmp_path, cls=Once)
    assert [m.diverged for m in again] == [m.diverged for m in whole]
    assert [m.diverged is not None for m in again] == [False, True, False]
    assert [fit["diagnostics"].get("diverged") for fit in engine.fits] == [None, 1.0, None]
    assert [len(m.history) for m in again] == [5, 1, 5]
    for a, b in zip(again, whole, strict=True):
        assert_same_fit(a, b)
