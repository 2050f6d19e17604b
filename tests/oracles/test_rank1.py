"""The rank-1 BNN against exact expectations, a divergence of torch's, and an evidence by quadrature."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from conformance import problems
from oracles.doubles import batch_of, off_start
from oracles.linear import SIGMA, Truth
from torch import nn
from torch.distributions import Normal, kl_divergence
from torch.func import functional_call
from torch.testing import assert_close

from bench import likelihoods, priors
from bench.contract import JOINT, Problem
from bench.divergence import log_prob
from bench.errors import UsageError
from bench.methods.rank1 import Rank1, Settings


def method_of(problem, **values):
    """The method in float64, off its start."""
    return off_start(Rank1, problem, Settings(**values))


def corners(method):
    """All signs of the factors' noise, `[2^d, K, d]`: under them means of squares are expectations."""
    count, size = method.mean.shape
    signs = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=size))).double()
    return {"factors": signs[:, None].expand(-1, count, -1)}


def explicit(method, k, factors):
    """The weights of component k under its factors `[d]`, entry by entry where they are shared."""
    values, own, weights = iter(factors), iter(method.own), {}
    for name, p in method.network.named_parameters():
        if name in method.shared:
            r = [next(values) for _ in range(p.shape[0])]
            s = [next(values) for _ in range(p.shape[1])]
            weights[name] = torch.stack(
                [torch.stack([p[o, i] * r[o] * s[i] for i in range(len(s))]) for o in range(len(r))]
            )
        else:
            weights[name] = next(own)[k]
    return weights


# ---- the loss


def test_divergence_is_torchs():
    """To N(1, s0^2), summed over the factors and its mean over the components."""
    method = method_of(problems.cnn(), prior_std=0.3)
    each = kl_divergence(
        Normal(method.mean, method.log_std.exp()), Normal(torch.tensor(1.0), torch.tensor(0.3))
    )
    assert_close(method.divergence(), each.sum(1).mean(), check_dtype=False)


@pytest.mark.parametrize("components", [1, 3])
def test_likelihood_term_is_the_expected_energy_of_a_linear_model(components):
    """E|y - X w - b|^2 by the mean and covariance of w_i = W_i r s_i, which share r."""
    truth = Truth()
    method = method_of(truth.problem, components=components)
    nll, _ = method.loss_terms(batch_of(truth.problem), corners(method))
    w, x = method.network.weight[0], truth.design[:, :3]
    expected = []
    for k in range(components):
        mean, square = method.mean[k], method.mean[k].square() + (2 * method.log_std[k]).exp()
        centre = w * mean[0] * mean[1:]
        second = torch.outer(mean[1:], mean[1:])
        second = second - second.diag().diag() + square[1:].diag()
        covariance = torch.outer(w, w) * square[0] * second - torch.outer(centre, centre)
        residual = truth.targets - x @ centre - method.own[0][k]
        squares = residual.square().sum() + torch.einsum("ni,ij,nj->", x, covariance, x)
        expected.append(squares / (2 * SIGMA**2) + len(x) * 0.5 * math.log(2 * math.pi * SIGMA**2))
    assert_close(nll, torch.stack(expected).mean(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("problem", [problems.mlp, problems.cnn, problems.residual])
def test_loss_is_the_mean_over_components_and_draws(problem):
    """Each under its own rank-one factors, written out; the prior is at W and at a component's own."""
    problem = problem()
    method, batch = method_of(problem, components=3), batch_of(problem)
    noise = method.draw_noise(2, torch.Generator().manual_seed(0))
    nll, prior_term = method.loss_terms(batch, noise)
    nlls, log_priors = [], []
    for k in range(3):
        for z in noise["factors"][:, k]:
            weights = explicit(method, k, method.mean[k] + method.log_std[k].exp() * z)
            outputs = functional_call(method.network, weights, (batch.inputs,))[None]
            nlls.append(-method.likelihood.log_prob(outputs, batch.targets).sum())
        at = {
            n: (p if n in method.shared else weights[n])[None] for n, p in method.network.named_parameters()
        }
        log_priors.append(log_prob(method.prior, at).sum())
    assert_close(nll, torch.stack(nlls).mean(), rtol=1e-9, atol=1e-9)
    expected = method.divergence() - torch.stack(log_priors).mean()
    assert_close(prior_term, expected, rtol=1e-9, atol=1e-9)


def test_a_prior_over_all_weights_at_once():
    """Couples tensors: the mean over components of its log density at W and each component's own."""
    problem = problems.mlp()

    def joint(parameters):
        ones = torch.ones(sum(p.numel() for p in parameters.values())).double()
        return {JOINT: priors.normal_tensor(0.1 * ones, 0.8 * ones)}

    a, b = method_of(problem), method_of(replace(problem, prior=joint))
    noise = a.draw_noise(1, torch.Generator())
    assert_close(a.loss_terms(batch_of(problem), noise), b.loss_terms(batch_of(problem), noise))


def slope_problem():
    """One slope without a bias, noise of 0.5."""
    problem = problems.straight_line()
    return Problem(
        lambda dropout=0.0: nn.Linear(1, 1, bias=False),
        likelihoods.Gaussian(0.5),
        priors.normal(),
        *(problem.train, None, 20),
    )


def negative_log_evidence(weight, prior_std):
    """-log of the integral of p(y | W r s) over r and s, by Gauss and Hermite, in nats."""
    inputs, targets = (t.double().numpy() for t in slope_problem().train.tensors)
    points, shares = np.polynomial.hermite_e.hermegauss(60)
    z = 1 + prior_std * points
    slopes = weight * np.multiply.outer(z, z)
    squares = (targets - inputs * slopes.ravel()) ** 2  # [20, 3600]
    log_likelihoods = -squares.sum(0) / (2 * 0.25) - 20 * 0.5 * math.log(2 * math.pi * 0.25)
    grid = np.multiply.outer(shares, shares).ravel() / shares.sum() ** 2
    return -np.log((grid * np.exp(log_likelihoods)).sum())


def test_loss_bounds_the_evidence():
    """Of the factors, W fixed: never below, and near it once they are trained; without the KL it is below."""
    method = method_of(slope_problem(), prior_std=0.05)
    with torch.no_grad():
        method.network.weight.fill_(1.0)
    least = negative_log_evidence(1.0, 0.05)
    batch, noise = batch_of(method.problem), corners(method)
    optimizer = torch.optim.LBFGS([method.mean, method.log_std], max_iter=200, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = method.loss_terms(batch, noise)[0] + method.divergence()
        loss.backward()
        return loss

    assert closure().item() > least + 1
    optimizer.step(closure)
    assert least < closure().item() < least + 0.1
    assert method.loss_terms(batch, noise)[0].item() < least  # negative control


# ---- the components


def test_a_layer_is_torch_uncertaintys():
    """Its BatchEnsemble layer, given the factors of a draw; its r is on the inputs."""
    layers = pytest.importorskip("torch_uncertainty.layers.batch_ensemble")
    network = lambda dropout=0.0: nn.Linear(4, 3)  # noqa: E731
    method = method_of(replace(problems.mlp(), network=network))
    factors = method.mean + method.log_std.exp() * method.draw_noise(1, torch.Generator())["factors"][0]
    weights = method._weights(factors, list(method.own))
    theirs = layers.BatchLinear(4, 3, 4).double()
    theirs.linear.weight, theirs.bias = method.network.weight, method.own[0]
    theirs.r_group, theirs.s_group = (nn.Parameter(p) for p in (factors[:, 3:], factors[:, :3]))
    inputs = batch_of(problems.mlp()).inputs[:8]
    for k in range(4):
        own = functional_call(method.network, {n: w[k] for n, w in weights.items()}, (inputs,))
        assert_close(own, theirs(inputs.repeat(4, 1))[8 * k : 8 * k + 8])


def test_draws_take_every_component_before_any_again():
    """Own parameters tell which; all draws of the shared weights differ."""
    method = method_of(problems.mlp(), components=5)
    drawn = method.sample_weights(5, torch.Generator().manual_seed(0))["1.bias"]
    assert len(drawn.unique(dim=0)) == 5
    two = method.sample_weights(10, torch.Generator().manual_seed(0))
    assert len(two["1.bias"].unique(dim=0)) == 5
    assert len(two["1.weight"].flatten(1).unique(dim=0)) == 10


def test_a_network_without_matrices_is_refused():
    """There is nothing to be random."""
    network = lambda dropout=0.0: nn.Sequential(nn.Flatten(), nn.LayerNorm(36))  # noqa: E731
    with pytest.raises(UsageError, match="rank1 needs a linear or convolutional layer"):
        method_of(replace(problems.cnn(), network=network))
