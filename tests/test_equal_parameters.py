"""Methods compared at equal numbers of trained parameters: who trains more per weight gets fewer channels."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from conformance import laws
from torch.utils.data import TensorDataset

import bench
from bench import likelihoods, networks, priors
from bench.contract import Budget, Problem
from bench.engine.engine import Engine
from bench.errors import UsageError
from bench.methods.map import MAP
from bench.methods.mc_dropout import MCDropout
from bench.methods.mfvi import MFVI
from bench.methods.mixture_vi import MixtureVI
from bench.methods.radial import Radial
from bench.runs import registry

CHANNELS = 16
BUDGET = Budget(epochs=1, batch_size=4)
PER_WEIGHT = [
    (MAP, {}, 1),
    (MCDropout, {}, 1),
    (MFVI, {}, 2),
    (Radial, {}, 2),
    (MixtureVI, {"components": 3}, 6),
]


def problem(**values):
    """Eight photographs of noise for the small VGG."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(8, 3, 16, 16), torch.arange(8) % 2)
    network = partial(networks.small_vgg, CHANNELS)
    given = Problem(network, likelihoods.Bernoulli(), priors.normal(), data, data, len(data))
    return replace(given, equal_parameters=True, **values)


def channels(method):
    return method.network[0].out_channels


def engine(cls, **options):
    return Engine(cls, cls.settings_class(), 0, trainer=laws.TrainerOptions(accelerator="cpu"), **options)


@pytest.mark.parametrize(("cls", "values", "multiple"), PER_WEIGHT)
def test_channels_bring_the_trained_parameters_nearest_to_those_of_map(cls, values, multiple):
    """By the count of a small VGG, 1098 c^2 + 70 c + 1, at every number of channels."""
    counts = {c: 1098 * c**2 + 70 * c + 1 for c in range(1, CHANNELS + 1)}
    method = cls.made_for(problem(), cls.settings_class(**values))
    assert channels(method) == min(counts, key=lambda c: abs(multiple * counts[c] - counts[CHANNELS]))
    trained = sum(p.numel() for p in method.parameters() if p.requires_grad)
    assert trained == multiple * counts[channels(method)] + values.get("components", 0)


def test_dropout_reaches_a_network_of_another_width():
    method = MCDropout.made_for(problem(), MCDropout.settings_class(rate=0.25))
    assert {m.p for m in method.network if isinstance(m, networks.Dropout)} == {0.25}


def test_other_problems_are_inferred_as_they_are():
    """Their factories need not know of a width."""
    plain = replace(
        problem(), equal_parameters=False, network=lambda dropout=0.0: networks.small_vgg(4, dropout)
    )
    assert channels(Radial.made_for(plain, Radial.settings_class())) == 4
    assert channels(engine(Radial).fit(plain, BUDGET)) == 4


def test_members_keep_their_size_and_a_posterior_can_be_the_next_prior():
    """Through the engine: fits, members, warm starts and priors are of the same narrow network."""
    ensemble = engine(MFVI, members=2)
    first = ensemble.fit(problem(), BUDGET)
    second = ensemble.fit(problem(prior=first.as_prior()), BUDGET, start=first)
    assert [channels(m) for m in (*first.members, *second.members)] == [11] * 4


@pytest.mark.parametrize("name", ["full_cov_vi", "matrix_normal_vi", "nf_gamma", "nf_gaussian"])
def test_a_method_without_a_count_is_refused_in_one_line(name):
    cls = registry.method(name).cls
    with pytest.raises(UsageError, match=f"^{name} cannot be compared at equal numbers") as error:
        cls.made_for(problem(), cls.settings_class())
    assert "\n" not in str(error.value)


def test_a_loaded_run_has_the_width_of_its_fit(tmp_path):
    """Half of the 20 hidden units that the task has at width 1."""
    done = bench.run("mfvi", "toys:EqualParameters", preset="smoke", out=tmp_path)
    loaded = bench.load(done.directory)
    assert loaded.network[1].out_features == 10
    assert len(loaded.history) == 1
