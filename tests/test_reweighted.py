"""Fits of one problem under several weightings: which path they take, and what is refused.

That they are those made one by one is a law of tests/conformance.
"""

from dataclasses import replace

import pytest
import torch
from conformance import problems

from bench.contract import Budget
from bench.engine.engine import Engine, TrainerOptions
from bench.errors import UsageError
from bench.methods.linear import Linear
from bench.methods.linear import Settings as LinearSettings
from bench.methods.map import MAP
from bench.methods.map import Settings as MAPSettings

FOUR = torch.ones(4, problems.TRAIN)


def engine(cls=Linear, settings=LinearSettings, checkpoints=None, members=1):
    options = TrainerOptions(accelerator="cpu")
    return Engine(cls, settings(), 0, checkpoints, options, members)


def test_one_fit_where_the_method_takes_all_weightings():
    own = engine()
    method = own.fit_weighted(problems.linear(), FOUR, Budget(1))
    assert len(own.fits) == 1
    inputs = problems.linear().val.tensors[0]
    assert own.predict(method, inputs, 3).mean.shape == (12, len(inputs), 2)


@pytest.mark.parametrize(("cls", "settings", "members"), [(MAP, MAPSettings, 1), (Linear, LinearSettings, 2)])
def test_as_many_fits_as_weightings_elsewhere(cls, settings, members):
    """Of other methods, and of ensembles, whose members have draws of their own."""
    own = engine(cls, settings, members=members)
    method = own.fit_weighted(problems.linear(), FOUR, Budget(1))
    assert len(own.fits) == 4 * members
    inputs = problems.linear().val.tensors[0]
    samples = 1 if cls is MAP else 3 * members
    assert own.predict(method, inputs, 3).mean.shape == (4 * samples, len(inputs), 2)


def test_fits_made_one_by_one_have_their_weights():
    """Of `linear`, whose posteriors are exact: two members each, beside one fit that takes all weightings."""
    weights = torch.rand(3, problems.TRAIN, generator=torch.Generator().manual_seed(1))
    weights[weights < 0.2] = 0
    (at_once,), each = (
        engine(members=members).fit_weighted(problems.linear(), weights, Budget(1)).fits for members in (1, 2)
    )
    assert len(each) == 3
    for mean, ensemble in zip(at_once.mean, each, strict=True):
        for member in ensemble.members:
            torch.testing.assert_close(member.mean, mean, rtol=1e-5, atol=1e-6)
    assert (at_once.mean[0] - at_once.mean[1]).abs().max() > 0.01


def test_weights_of_the_data_are_multiplied():
    problem = problems.linear()
    rows = torch.arange(problems.TRAIN)
    weights = torch.rand(2, problems.TRAIN, generator=torch.Generator().manual_seed(0))
    doubled = problems.with_rows(problem, rows, torch.full((problems.TRAIN,), 2.0))
    (one,), (two,) = (
        engine().fit_weighted(p, w, Budget(1)).fits for p, w in ((doubled, weights), (problem, 2 * weights))
    )
    assert torch.equal(one.mean, two.mean)


def test_finished_fits_are_found_again(tmp_path):
    inputs = problems.linear().val.tensors[0]
    means = []
    for _ in range(2):
        own = engine(checkpoints=tmp_path)
        means.append(own.predict(own.fit_weighted(problems.linear(), FOUR, Budget(1)), inputs, 2).mean)
    assert torch.equal(*means)
    assert len(list(tmp_path.iterdir())) == 1


def test_only_predictions_can_be_asked_of_it():
    method = engine().fit_weighted(problems.linear(), FOUR, Budget(1))
    assert not method.provides
    for ask in (method.moments, method.as_prior, lambda: method.sample_weights(1, torch.Generator())):
        with pytest.raises(AttributeError, match="Reweighted"):
            ask()


@pytest.mark.parametrize(
    ("weights", "line"),
    [
        (torch.ones(problems.TRAIN), "example weights must be [R, 20], not [20]"),
        (torch.ones(2, 3), "example weights must be [R, 20], not [2, 3]"),
        (torch.ones(0, problems.TRAIN), "not [0, 20]"),
        (-FOUR, "example weights must be finite, at least 0, and above 0 in every row somewhere"),
        (FOUR * torch.nan, "must be finite"),
        (torch.cat([FOUR, 0 * FOUR]), "above 0 in every row somewhere"),
    ],
)
def test_bad_weights_are_one_clear_line(weights, line):
    with pytest.raises(UsageError) as info:
        engine().fit_weighted(problems.linear(), weights, Budget(1))
    assert line in str(info.value)
    assert "\n" not in str(info.value)


def test_data_must_lie_in_memory():
    problem = replace(problems.linear(), train=list(problems.linear().train))
    with pytest.raises(UsageError, match="need a data set in memory"):
        engine().fit_weighted(problem, FOUR, Budget(1))
