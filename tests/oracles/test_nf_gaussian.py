"""The Gaussian flow against scipy's normal and exact evidences.

"False alarm" is the probability that a correct program fails a statistical test; seeds are fixed.
"""

import math

import pytest
import scipy.stats
import torch
from conformance import laws, problems
from oracles import flows
from plans import resolved
from torch.testing import assert_close

from bench.contract import Budget
from bench.engine.engine import Engine, TrainerOptions
from bench.errors import UsageError
from bench.methods.nf_gaussian import NFGaussian, Settings
from bench.runs import registry


def fitted(problem, **values):
    """After a short fit, in batches."""
    engine = Engine(NFGaussian, Settings(**values), 0, trainer=TrainerOptions(accelerator="cpu"))
    return engine.fit(problem, Budget(3, 5))


def test_second_number_is_a_variance():
    """Draws of the source are N(mu0, v0), Kolmogorov-Smirnov on 20,000. False alarm: 1e-5."""
    method = NFGaussian(problems.straight_line(), Settings(mean=5, variance=0.05))
    xi = method.exact_source(10_000, laws.generator(1))[0].detach().flatten().double().numpy()
    assert scipy.stats.kstest(xi, scipy.stats.norm(5, math.sqrt(0.05)).cdf).pvalue > 1e-5


def test_density_and_expected_log_density_of_the_source():
    """scipy's, and E log q = -(d/2) log(2 pi e v0)."""
    method = flows.method_of(NFGaussian, problems.regression())
    mean, variance = (flows.SOURCES[NFGaussian][name] for name in ("mean", "variance"))
    xi, negative_entropy = method.exact_source(7, laws.generator(2))
    xi = xi.detach()
    expected = scipy.stats.norm(mean, math.sqrt(variance)).logpdf(xi.numpy()).sum(1)
    assert_close(method.source_log_prob(xi).detach(), torch.from_numpy(expected), rtol=1e-5, atol=1e-5)
    entropy = 0.5 * method.size * math.log(2 * math.pi * math.e * variance)
    assert negative_entropy.item() == pytest.approx(-entropy, rel=1e-6)


def test_expected_log_density_of_a_learned_source():
    """With scales of their own, by Monte Carlo over the source's draws. False alarm: 7e-6."""
    method = flows.method_of(NFGaussian, problems.regression(), trainable=True)
    with torch.no_grad():
        method.log_std += torch.linspace(-1, 1, method.size)
        method.mean += torch.linspace(-2, 2, method.size)
    xi, negative_entropy = method.exact_source(20_000, laws.generator(3))
    xi = xi.detach()
    values = method.source_log_prob(xi).detach()
    laws.assert_mean_is(values, negative_entropy.item())
    dense = torch.distributions.Normal(method.mean.detach(), method.log_std.detach().exp())
    assert_close(values, dense.log_prob(xi).sum(1))


def test_at_the_identity_weights_are_the_source():
    """Before training the density of the weights is that of d independent normals."""
    settings = Settings(start="identity", **flows.SOURCES[NFGaussian])
    method = NFGaussian(problems.regression(), settings).double()
    draws = method.sample_weights(4, laws.generator(4))
    flat = torch.cat([w.flatten(1) for w in draws.values()], 1)
    mean, variance = (flows.SOURCES[NFGaussian][name] for name in ("mean", "variance"))
    expected = torch.distributions.Normal(mean, math.sqrt(variance)).log_prob(flat).sum(1)
    assert_close(method.log_prob(draws).detach(), expected, rtol=1e-5, atol=1e-5)


def test_fixed_source_stays_and_its_flow_moves():
    """As published: the default trains the flow alone."""
    problem = problems.regression()
    start, method = NFGaussian(problem, Settings()), fitted(problem)
    assert torch.equal(start.mean, method.mean)
    assert torch.equal(start.log_std, method.log_std)
    xi, _ = start.exact_source(3, laws.generator())
    assert not torch.equal(method.flow(xi)[0], xi)


def test_learned_source_moves():
    """The fair control: means and scales are trained, every one of them."""
    problem = problems.regression()
    start, method = NFGaussian(problem, Settings()), fitted(problem, trainable=True)
    assert (start.mean != method.mean).all()
    assert (start.log_std != method.log_std).all()


@pytest.mark.parametrize("trainable", [True, False])
def test_optimiser_gets_what_is_trained(trainable):
    """All at one rate."""
    method = NFGaussian(problems.linear(), Settings(trainable=trainable, schedule="constant"))
    groups = method.configure_optimizers().param_groups
    assert {group["lr"] for group in groups} == {1e-3}
    found = {id(p) for group in groups for p in group["params"]}
    assert found == {id(p) for p in method.parameters() if p.requires_grad}
    assert (id(method.mean) in found) is trainable


@pytest.mark.parametrize(
    ("name", "fixed"),
    [
        ("nf_gaussian_5_5e-2", {"mean": 5, "variance": 0.05}),
        ("nf_gaussian_0_1", {"mean": 0, "variance": 1}),
        ("nf_gaussian_0.1_0.001", {"mean": 0.1, "variance": 0.001}),
        ("nf_gaussian_1_1e-2", {"mean": 1, "variance": 0.01}),
        ("nf_gaussian_-2_1", {"mean": -2, "variance": 1}),
    ],
)
def test_published_names(name, fixed):
    """The registry reads the settings from the name and keeps the name as typed; its source stays fixed."""
    entry = registry.method(name)
    assert (entry.name, entry.cls, entry.fixed) == (name, NFGaussian, fixed)
    assert resolved(name, "singular_evidence").method_identity == name
    choice = resolved(name, "singular_evidence", "paper")
    assert {key: getattr(choice.method_settings, key) for key in fixed} == fixed
    assert not choice.method_settings.trainable
    assert choice.method_settings.masks == "published"


@pytest.mark.parametrize(
    "name",
    ["nf_gaussian_5", "nf_gaussian_5_0", "nf_gaussian_5_-1", "nf_gaussian_x_1", "nf_gaussian_1_1_1",
     "nf_gaussian_1.2.3_1", "nf_gaussian_01_1", "nf_gaussian_1_1e999"],
)  # fmt: skip
def test_bad_names_are_one_line(name):
    """Neither a traceback nor a source outside its range."""
    with pytest.raises(UsageError) as info:
        registry.method(name)
    assert "\n" not in str(info.value)
    assert len(str(info.value)) > 10
