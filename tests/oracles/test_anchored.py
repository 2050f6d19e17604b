"""Anchored networks on linear regression: every mode, and the law of the modes, in closed form."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from conformance import problems
from oracles.linear import MEAN, SIGMA, STD, Truth, optimise
from torch.nn.utils import parameters_to_vector
from torch.testing import assert_close

from bench import priors
from bench.contract import JOINT, Batch
from bench.errors import UsageError
from bench.laws.linear import Replicas
from bench.methods.anchored import Anchored, Settings


def made(problem, seed):
    """An unfitted network, whose generator and start are drawn under a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Anchored(problem, Settings())


@pytest.mark.parametrize("seed", range(3))
def test_a_fit_ends_at_the_mode_of_its_anchor(seed):
    """(L + P)^-1 (X^T y / sigma^2 + P a), for the anchor a; not at the mode of the task's own prior."""
    truth = Truth()
    method = optimise(made(truth.problem, seed))
    prior = torch.eye(4).double() / STD**2
    at = truth.design.T @ truth.targets / SIGMA**2 + prior @ method.anchor
    found = parameters_to_vector(method.network.parameters())
    assert_close(found.detach(), torch.linalg.solve(truth.precision, at), rtol=1e-6, atol=1e-6)
    assert (found - truth.mean).abs().max() > 0.01  # negative control


@cache
def modes():
    """Of twelve fits to thirty-two regressions side by side, `[384, 2]`, about the posteriors' means."""
    truth = Replicas()
    fits = [optimise(made(truth.problem, seed)) for seed in range(12)]
    return torch.cat([fit.network.weight.detach() - truth.mean for fit in fits])


def distances(modes, precision):
    """Standard errors between second moments and those of a normal of this precision, `[3]`."""
    z = modes @ torch.linalg.cholesky(precision)
    seen = torch.stack([*z.square().unbind(1), z.prod(1)], 1)
    expected, variance = torch.tensor([1.0, 1, 0]), torch.tensor([2.0, 2, 1])
    return (seen.mean(0) - expected).abs() / (variance / len(z)).sqrt()


def test_modes_have_the_mean_of_the_posterior_and_less_spread():
    """N(mean, (L + P)^-1 P (L + P)^-1). False alarm: five comparisons at 4.5 standard errors, 4e-5.

    The cheat that declares the posterior's own covariance (L + P)^-1 is seen.
    """
    truth = Replicas()
    precision = truth.precision @ truth.precision * truth.STD**2
    spread = torch.linalg.inv(precision).diagonal().sqrt()
    assert (modes().mean(0).abs() < 4.5 * spread / len(modes()) ** 0.5).all()
    assert (distances(modes(), precision) < 4.5).all()
    assert distances(modes(), truth.precision).max() > 9


def test_without_data_the_modes_are_the_prior():
    """Weights of examples that are all 0 leave the anchor itself, a draw from the prior."""
    truth = Replicas()
    method = made(truth.problem, 0).double()
    inputs, targets = (t.double() for t in truth.problem.train.tensors)
    with torch.no_grad():
        method.network.weight.copy_(method.anchor.view(-1, 2))
    nll, prior_term = method.loss_terms(Batch(inputs, targets, torch.zeros(len(inputs))), {})
    assert nll == 0
    (slope,) = torch.autograd.grad(prior_term, method.network.weight)
    assert not slope.any()


def test_anchors_are_draws_from_the_prior():
    """Of 300 fits to come. False alarm: means and squares of 4 weights at 4.5 standard errors, 6e-5."""
    anchors = torch.stack([made(Truth().problem, seed).anchor for seed in range(300)])
    z = (anchors - MEAN) / STD
    assert (z.mean(0).abs() < 4.5 / 300**0.5).all()
    assert ((z.square().mean(0) - 1).abs() < 4.5 * (2 / 300) ** 0.5).all()
    shared = torch.corrcoef(z.T).triu(1).abs().max()
    assert shared < 4.5 / 300**0.5


def test_a_prior_over_all_weights_at_once_is_moved_too():
    """The same anchor, the same loss."""
    problem = problems.mlp()

    def joint(parameters):
        ones = torch.ones(sum(p.numel() for p in parameters.values()))
        return {JOINT: priors.normal_tensor(0.1 * ones, 0.8 * ones)}

    a, b = made(problem, 4), made(replace(problem, prior=joint), 4)
    batch = Batch(*problem.train.tensors)
    assert_close(a.loss_terms(batch, {}), b.loss_terms(batch, {}))


def test_other_priors_are_refused():
    """They have no centre to move."""
    with pytest.raises(UsageError, match="anchored draws the centre of a normal prior"):
        made(replace(problems.mlp(), prior=priors.scale_mixture()), 0)
