"""Fits side by side end where fits one after another end."""

from dataclasses import replace

import pytest
import torch
from conformance import problems
from torch.testing import assert_close
from torch.utils.data import TensorDataset

from bench import registry
from bench.contract import Budget
from bench.engine import Engine, TrainerOptions
from bench.settings import build

BUDGET = Budget(epochs=5, batch_size=6)


def stacking():
    """Names of the methods that can be stacked."""
    return [n for n, e in registry.methods().items() if e.cls.stacks and e.members == 1]


def fits(name, values, stacked, budget=BUDGET, folder=None, problems_=None, cls=None):
    """Three fits on data of their own."""
    entry = registry.method(name)
    settings = build(entry.cls.settings_class, values, "method")
    options = TrainerOptions(accelerator="cpu", stacked=stacked)
    engine = Engine(cls or entry.cls, settings, 0, folder, options)
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
    """Parameters, histories and predictions to 1e-5; data, orders and noise are each fit's own."""
    alone, _ = fits(name, {}, False, problems_=three(make))
    together, engine = fits(name, {}, True, problems_=three(make))
    assert [fit["steps"] for fit in engine.fits] == [15, 15, 15]
    for a, b in zip(alone, together, strict=True):
        for key, value in a.state_dict().items():
            assert_close(b.state_dict()[key], value, rtol=1e-5, atol=1e-5)
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
    monkeypatch.setattr("bench.stacked.Stacked.__init__", never)
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


def test_a_copy_that_diverges_ends_the_fits():
    from bench.errors import Diverged

    given = three()
    inputs, targets = given[1].train.tensors
    given[1] = replace(given[1], train=TensorDataset(inputs * float("inf"), targets))
    with pytest.raises(Diverged, match="the loss is nan"):
        fits("map", {}, True, problems_=given)
