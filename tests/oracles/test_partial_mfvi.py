"""Partially stochastic mean field against the optimum of a linear problem, MFVI, and energies written out."""

from dataclasses import replace

import pytest
import torch
from conformance import problems
from oracles.linear import Truth, flat, optimise
from torch.distributions import Normal, kl_divergence
from torch.nn import functional
from torch.testing import assert_close

from bench import networks
from bench.contract import JOINT, Batch
from bench.errors import UsageError
from bench.methods.mfvi import MFVI
from bench.methods.mfvi import Settings as MFVISettings
from bench.methods.partial_mfvi import PartialMFVI, Settings, chosen
from bench.priors import normal_tensor
from bench.settings import build


def method_of(problem, cls=PartialMFVI, own=None):
    """The method in float64, from a fixed start."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return cls(problem, own or Settings()).double()


@pytest.mark.parametrize(
    ("which", "stochastic"),
    [("name:weight", [1, 1, 1, 0]), ("name:bias", [0, 0, 0, 1]), ("last", [1, 1, 1, 1])],
)
def test_the_optimum_is_the_joint_mode_and_the_precisions_diagonal(which, stochastic):
    """Means and points at the posterior's mean, variances 1 / P_ii on the stochastic weights, 0 elsewhere."""
    truth = Truth()
    method = optimise(method_of(truth.problem, own=Settings(stochastic=which)))
    mean, variance = flat(method.moments())
    assert_close(mean, truth.mean, rtol=1e-4, atol=1e-5)
    expected = torch.tensor(stochastic).double() / truth.precision.diagonal()
    assert_close(variance, expected, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("problem", [problems.mlp, problems.cnn, problems.regression, problems.residual])
def test_all_weights_are_mfvi(problem):
    """The same start and loss under the same noise; with some of the weights it is another."""
    problem = problem()
    inputs, targets = problem.train.tensors
    batch = Batch(inputs.double(), targets.double() if targets.is_floating_point() else targets)
    mean_field = method_of(problem, MFVI, MFVISettings())
    noise = mean_field.draw_noise(3, torch.Generator().manual_seed(2))
    expected = mean_field.loss_terms(batch, noise)
    for which, is_mfvi in (("all", True), ("last", False), ("first", False)):
        found = method_of(problem, own=Settings(stochastic=which)).loss_terms(batch, noise)
        for a, b in zip(found, expected, strict=True):
            assert torch.allclose(a, b, rtol=1e-9) == is_mfvi


def test_points_pay_their_log_prior_and_normals_their_divergence():
    """Weight by weight, by torch's own distributions; the last layer alone is drawn."""
    problem = problems.mlp()
    method = method_of(problem)
    batch = Batch(problem.train.tensors[0].double(), problem.train.tensors[1])
    noise = method.draw_noise(2, torch.Generator().manual_seed(1))
    assert [*noise] == method.stochastic == [name for name, _ in method.network.named_parameters()][-2:]
    prior, expected, hidden = Normal(0.1, 0.8), 0.0, []
    rho = dict(zip(method.stochastic, method.rho, strict=True))
    for name, mean in method.network.named_parameters():
        if name in rho:
            expected = expected + kl_divergence(Normal(mean, functional.softplus(rho[name])), prior).sum()
            hidden.append(mean + functional.softplus(rho[name]) * noise[name])
        else:
            expected = expected - prior.log_prob(mean).sum()
    nll, prior_term = method.loss_terms(batch, noise)
    assert_close(prior_term, expected, rtol=1e-6, atol=1e-6)
    below = torch.nn.Sequential(*list(method.network)[:-1])(batch.inputs)
    outputs = torch.stack([functional.linear(below, w, b) for w, b in zip(*hidden, strict=True)])
    terms = [functional.cross_entropy(o, batch.targets, reduction="sum") for o in outputs]
    assert_close(nll, torch.stack(terms).mean(), rtol=1e-9, atol=1e-9)


def test_layers_are_chosen_by_place_and_by_name():
    names = [name for name, _ in networks.mlp(4, 3, (6, 5)).named_parameters()]
    assert chosen(names, "first") == names[:2]
    assert chosen(names, "last") == names[-2:]
    assert chosen(names, "all") == names
    assert chosen(names, "name:bias$") == names[1::2]
    with pytest.raises(UsageError, match=r"no weight has a name like --method\.stochastic name:norm"):
        chosen(names, "name:norm")


@pytest.mark.parametrize("text", ["middle", "name:", "name:("])
def test_other_words_are_refused(text):
    """In one line that names the flag."""
    with pytest.raises(UsageError, match=r"--method.stochastic") as caught:
        build(Settings, {"stochastic": text}, "method")
    assert "\n" not in str(caught.value)


def test_a_prior_that_couples_weights_is_refused():
    """In one line."""
    problem = replace(problems.mlp(), prior=coupled)
    with pytest.raises(UsageError, match="partial_mfvi: the prior couples all weights"):
        method_of(problem)


def coupled(parameters):
    """A normal over the ravelled vector."""
    size = sum(p.numel() for p in parameters.values())
    return {JOINT: normal_tensor(torch.zeros(size), torch.ones(size))}
