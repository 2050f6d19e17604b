"""Ensembles: independent members, pooled draws, names, records."""

import math
from dataclasses import replace

import pytest
import torch
from conformance import laws, problems
from plans import resolved
from torch.testing import assert_close

import bench
from bench.contract import Budget
from bench.divergence import log_prob
from bench.engine.ensemble import Ensemble, MemberPriors
from bench.engine.spreading import FitRequest
from bench.errors import UsageError
from bench.laws.cases import Case
from bench.methods.map import MAP
from bench.methods.mfvi import MFVI
from bench.runs import registry
from bench.runs.records import read_record
from bench.weights import ravel

BUDGET = Budget(epochs=2, batch_size=8)


def case(cls=MFVI, members=3, problem=None):
    """An ensemble on a small problem."""
    return Case(cls, {}, problem or problems.mlp(), members)


def test_draws_of_the_members_form_one_axis():
    fitted = case().fit()
    assert isinstance(fitted, Ensemble)
    inputs = problems.mlp().val.tensors[0]
    pooled = laws.predict(fitted, inputs, 4)
    assert pooled.log_probs.shape[0] == 12
    generator = laws.generator()
    for i, member in enumerate(fitted.members):
        own = member.predict(inputs, 4, generator)
        assert torch.equal(pooled.log_probs[4 * i : 4 * i + 4], own.log_probs)


def test_ensemble_of_one_is_its_member():
    """Equal seed, equal numbers, bit by bit: and it is the member's own class."""
    one, plain = case(members=1).fit(), case().engine().fit(problems.mlp(), BUDGET).members[0]
    assert type(one) is MFVI
    inputs = problems.mlp().val.tensors[0]
    laws.assert_same_prediction(laws.predict(one, inputs), laws.predict(plain, inputs), exact=True)
    laws.assert_same_prediction(laws.predict(Ensemble([one]), inputs), laws.predict(one, inputs), exact=True)


def test_members_differ_in_start_order_and_noise():
    for cls in (MAP, MFVI):
        fitted = case(cls, 3).fit(budget=Budget(epochs=0))
        starts = [next(m.network.parameters()) for m in fitted.members]
        assert not torch.equal(starts[0], starts[1])
    seeds = {m.generator.initial_seed() for m in case().fit().members}
    assert len(seeds) == 3
    engine = case().engine()
    orders = [
        engine._fits._begin(FitRequest(i, "fit", problems.mlp(), None), BUDGET).loader.seed for i in range(3)
    ]
    assert len(set(orders)) == 3


def test_density_and_moments_are_those_of_the_mixture():
    """By hand from the members."""
    fitted = case().fit()
    weights = fitted.sample_weights(5, laws.generator())
    by_hand = torch.stack([m.log_prob(weights).double().exp() for m in fitted.members]).mean(0).log()
    assert_close(fitted.log_prob(weights).double(), by_hand, rtol=1e-4, atol=1e-4)
    mean, variance = fitted.moments()
    parts = [m.moments() for m in fitted.members]
    for name in mean:
        first = torch.stack([p[0][name] for p in parts]).mean(0)
        second = torch.stack([p[1][name] + p[0][name].square() for p in parts]).mean(0)
        assert_close(mean[name], first)
        assert_close(variance[name], second - first.square(), rtol=1e-3, atol=1e-6)


def test_draws_of_the_weights_come_from_all_members_alike():
    """Of 3,000 draws each is nearest to its member's mean: a third of each. False alarm: 3 x 6e-7."""
    fitted = case().fit()
    draws = ravel(fitted.sample_weights(3000, laws.generator()))
    means = torch.cat([ravel({n: w[None] for n, w in m.moments()[0].items()}) for m in fitted.members])
    counts = torch.cdist(draws, means).argmin(1).bincount(minlength=3)
    assert ((counts - 1000).abs() < 5 * (3000 * 2 / 9) ** 0.5).all()


def test_every_member_goes_on_from_its_own_posterior():
    engine = case().engine()
    problem = problems.mlp()
    first = engine.fit(problem, BUDGET)
    prior = first.as_prior()
    assert isinstance(prior, MemberPriors)
    second = engine.fit(replace(problem, prior=prior), Budget(epochs=0), start=first)
    for old, new in zip(first.members, second.members, strict=True):
        parameters = dict(new.network.named_parameters())
        assert all(torch.equal(p, dict(old.network.named_parameters())[n]) for n, p in parameters.items())
        at = {name: p[None] + 0.1 for name, p in parameters.items()}
        assert_close(log_prob(new.prior, at), old.log_prob(at))
    at = {name: p[None] + 0.1 for name, p in parameters.items()}
    joint = log_prob(prior(parameters), at)
    assert_close(joint, first.log_prob(at), msg="as one distribution the prior is the mixture")


def test_an_ensemble_of_members_with_own_data():
    """`fit_many` gives one ensemble per problem."""
    problem = problems.mlp()
    half = problems.with_rows(problem, torch.arange(10))
    fitted = case(members=2).engine().fit_many([problem, half], BUDGET)
    assert [len(f.members) for f in fitted] == [2, 2]
    assert [f.members[0].problem.num_train for f in fitted] == [20, 10]


# ---- names


def test_names_stand_for_members():
    assert registry.method("deep_ensemble").members == 3
    assert registry.method("deep_ensemble").cls is registry.method("map").cls
    for name in ("deep_ensemble", "mfvi_ensemble", "radial_ensemble"):
        assert "loss_terms" not in registry.method(name).provides


@pytest.mark.parametrize(
    ("name", "members", "identity"),
    [
        ("map", None, "map"),
        ("map", 1, "map"),
        ("map", 3, "deep_ensemble"),
        ("map", 5, "deep_ensemble+members=5"),
        ("deep_ensemble", None, "deep_ensemble"),
        ("deep_ensemble", 1, "map"),
        ("mc_dropout", 4, "mc_dropout+members=4"),
    ],
)
def test_one_posterior_has_one_identity(name, members, identity):
    choice = resolved(name, "split_digits", task_settings={"order": "joint"}, members=members)
    assert choice.method_identity == identity
    assert choice.method.members == (members or registry.method(name).members)


def test_run_of_an_ensemble_leaves_a_record_and_can_be_loaded(tmp_path):
    few = {"epochs": 1, "test_samples": 4, "order": "joint"}
    done = bench.run("mfvi", "split_digits", task_settings=few, members=2, out=tmp_path)
    record = read_record(done.directory)
    assert record.method.name == "mfvi_ensemble"
    assert record.method.members == 2
    assert len(record.fits) == 2
    assert "--members 2" in record.command
    assert record.draws
    assert all((each.asked, each.distinct) == (4, 8) for each in record.draws)
    fitted = bench.load(done.directory)
    assert len(fitted.members) == 2
    inputs = fitted.problem.val.tensors[0][:5]
    assert fitted.predict(inputs, 3, laws.generator()).log_probs.shape == (6, 5, 10)


def test_no_members_is_refused():
    with pytest.raises(UsageError, match="--members 0: must be 1 or more"):
        bench.run("map", "split_digits", members=0)


def test_entropy_of_pooled_members_is_at_least_theirs():
    """Jensen: the mixture is never more certain than its members on average."""
    fitted = case(MAP).fit()
    log_probs = laws.predict(fitted, problems.mlp().val.tensors[0]).log_probs
    average = log_probs.logsumexp(0) - math.log(len(log_probs))
    entropy = -(average.exp() * average).sum(-1)
    own = -(log_probs.exp() * log_probs).sum(-1).mean(0)
    assert (entropy >= own - 1e-6).all()
