"""Subnetwork Laplace against exact posteriors of linear models: which weights, which block, what is lost."""

from dataclasses import replace

import pytest
import torch
from conformance import problems
from oracles import linear
from torch import nn
from torch.testing import assert_close

from bench.contract import Batch
from bench.errors import UsageError
from bench.methods.subnetwork_laplace import Settings, SubnetworkLaplace
from bench.priors import scale_mixture
from bench.weights import ravel


def finished(problem, at=None, sizes=(4, 5), **values):
    """The method in float64 with its mode at given weights, after a pass over batches."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        method = SubnetworkLaplace(problem, Settings(**values)).double()
    if at is not None:
        nn.utils.vector_to_parameters(at, method.network.parameters())
    inputs, targets = problem.train.tensors
    rest = len(inputs) - sum(sizes)
    parts = (inputs.double().split([*sizes, rest]), targets.split([*sizes, rest]))
    method.finish_fit(
        [Batch(x, y.double() if y.is_floating_point() else y) for x, y in zip(*parts, strict=True)]
    )
    return method


def covariance_of(method):
    """Of all weights, `[d, d]`, zero outside the subnetwork."""
    size = sum(p.numel() for p in method.network.parameters())
    whole = torch.zeros(size, size).double()
    whole[method.chosen[:, None], method.chosen] = method.root @ method.root.T
    return whole


@pytest.mark.parametrize("largest", [1, 2, 3, 4])
def test_it_is_the_posterior_given_all_other_weights(largest):
    """Linear regression: the k least entries of the precision's diagonal, and the inverse of their block."""
    truth = linear.Truth()
    method = finished(truth.problem, truth.mean, largest=largest)
    chosen = truth.precision.diagonal().argsort()[:largest].sort().values
    assert_close(method.chosen, chosen)
    block = truth.precision[chosen[:, None], chosen].inverse()
    assert_close(method.root @ method.root.T, block, rtol=1e-6, atol=1e-9)
    variances = torch.cat([v.flatten() for v in method.moments()[1].values()])
    assert_close(variances, covariance_of(method).diagonal())


def test_it_never_says_more_than_the_whole_posterior():
    """Of linear models: variances of predictions grow with k, at every input, up to the exact ones at k = d.

    Inputs are correlated here: without the fourth weight a tenth of the summed variance is lost, or more.
    """
    truth = linear.Truth()
    exact = truth.precision.inverse()
    inputs = torch.randn(68, 4, generator=torch.Generator().manual_seed(3)).double()
    before = torch.zeros(68).double()
    for largest in (1, 2, 3, 4):
        covariance = covariance_of(finished(truth.problem, truth.mean, largest=largest))
        variance = torch.einsum("ni,ij,nj->n", inputs, covariance, inputs)
        assert (variance >= before - 1e-9).all()
        assert (variance <= torch.einsum("ni,ij,nj->n", inputs, exact, inputs) * (1 + 1e-6)).all()
        if largest == 3:
            assert variance.sum() < 0.9 * torch.einsum("ni,ij,nj->", inputs, exact, inputs)
        before = variance
    assert_close(covariance, exact, rtol=1e-6, atol=1e-9)


def test_blocks_reach_over_tensors_of_a_network_of_classes():
    """Against the Hessian by autograd of a linear softmax, where it is the Gauss-Newton matrix."""
    problem = replace(problems.mlp(), network=lambda dropout=0.0: nn.Linear(4, 3))
    method = finished(problem, largest=14)
    inputs, targets = problem.train.tensors
    mode = torch.cat([p.detach().flatten() for p in method.network.parameters()])

    def energy(w):
        scores = inputs.double() @ w[:12].view(3, 4).T + w[12:]
        return (
            nn.functional.cross_entropy(scores, targets, reduction="sum") + w.sub(0.1).square().sum() / 1.28
        )

    hessian = torch.autograd.functional.hessian(energy, mode)
    chosen = hessian.diagonal().argsort()[:14].sort().values
    assert {bool(i < 12) for i in chosen} == {True, False}
    assert_close(method.chosen, chosen)
    assert_close(
        method.root @ method.root.T, hessian[chosen[:, None], chosen].inverse(), rtol=1e-6, atol=1e-8
    )


def test_draws_are_of_that_normal_and_others_stay():
    """Ten second moments within 4.5 standard errors: false alarm 7e-5; the mode elsewhere, bit by bit."""
    truth = linear.Truth()
    method = finished(truth.problem, truth.mean, largest=3)
    draws = ravel(method.sample_weights(4000, torch.Generator().manual_seed(0))) - truth.mean
    expected = covariance_of(method)
    products = draws[:, :, None] * draws[:, None]
    error = products.std(0) / len(draws) ** 0.5
    assert ((products.mean(0) - expected).abs() <= 4.5 * error + 1e-12).all()
    (left,) = {0, 1, 2, 3} - set(method.chosen.tolist())
    assert (draws[:, left] == 0).all()


def test_what_is_no_prior_of_independent_normals_is_refused():
    """In one line."""
    with pytest.raises(UsageError, match=r"^subnetwork_laplace: the prior must be independent normals"):
        SubnetworkLaplace(replace(problems.mlp(), prior=scale_mixture()), Settings())
