"""FSP-Laplace against exact Gaussian process regression, and against normals written out in weight space."""

from dataclasses import replace

import pytest
import torch
from conformance import problems
from oracles import linear
from sklearn.gaussian_process import kernels
from torch import nn
from torch.testing import assert_close
from torch.utils.data import TensorDataset

from bench.contract import Batch, Problem
from bench.errors import UsageError
from bench.likelihoods import Gaussian
from bench.methods import fsp_laplace
from bench.methods.fsp_laplace import FSPLaplace, Settings, gram
from bench.priors import normal

TRUTHS = {
    "rbf": kernels.RBF,
    "matern12": lambda length: kernels.Matern(length, nu=0.5),
    "matern32": lambda length: kernels.Matern(length, nu=1.5),
    "matern52": lambda length: kernels.Matern(length, nu=2.5),
}


def covariance_of(kernel, points, lengthscale, variance):
    """The kernel matrix by scikit-learn, with the nugget."""
    flat = points.flatten(1).double()
    found = TRUTHS[kernel](lengthscale * flat.shape[1] ** 0.5)(flat.numpy())
    return variance * (torch.from_numpy(found) + 1e-4 * torch.eye(len(flat)).double())


def made(problem, **values):
    """The method in float64, its kernel matrix inverted there too, from a fixed start."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        method = FSPLaplace(problem, Settings(**values)).double()
    own = method.settings
    matrix = covariance_of(own.kernel, method.points, own.lengthscale, own.variance)
    exact = torch.linalg.inv(torch.linalg.cholesky(matrix))
    assert_close(method.whiten, exact, rtol=1e-5, atol=1e-5 * exact.abs().max().item())
    method.whiten.copy_(exact)
    return method


def finish(method):
    """A pass over the training data in two batches."""
    inputs, targets = method.problem.train.tensors
    targets = targets.double() if targets.is_floating_point() else targets
    parts = zip(inputs.double().split(len(inputs) // 2 + 1), targets.split(len(inputs) // 2 + 1), strict=True)
    method.finish_fit([Batch(*part) for part in parts])
    return method.root @ method.root.T


@pytest.mark.parametrize("kernel", TRUTHS)
def test_kernels_are_those_of_scikit_learn(kernel):
    """At inputs of several shapes, the length scale in units of the root of their size."""
    generator = torch.Generator().manual_seed(0)
    for shape in ((1,), (3,), (2, 4)):
        a = torch.randn(5, *shape, generator=generator)
        expected = covariance_of(kernel, a, 0.7, 1.0) - 1e-4 * torch.eye(5).double()
        assert_close(gram(kernel, a, a, 0.7), expected)


# ---- a network that is any function of its inputs


class Bumps(nn.Module):
    """A linear combination of one bump for each of so many points, so that it takes any values there."""

    def __init__(self, points, dropout=0.0):
        super().__init__()
        self.register_buffer("points", points)
        self.weight = nn.Parameter(torch.randn(len(points)))

    def features(self, inputs):
        """Bumps `[B, n]` at inputs `[B, 1]`."""
        return torch.exp(-0.5 * ((inputs - self.points.to(inputs).T) / 0.3).square())

    def forward(self, inputs):
        """Outputs `[B, 1]`."""
        return self.features(inputs) @ self.weight[:, None]


SIGMA = 0.3


def any_function():
    """Noisy targets at nine points, of which the network takes any values."""
    points = torch.linspace(-2, 2, 9)[:, None]
    targets = torch.sin(2 * points) + 0.3 * torch.randn(9, 1, generator=torch.Generator().manual_seed(2))
    train = TensorDataset(points, targets)
    return Problem(lambda dropout=0.0: Bumps(points), Gaussian(SIGMA), normal(), train, None, 9)


@pytest.mark.parametrize("kernel", TRUTHS)
def test_where_the_network_is_any_function_it_is_the_gaussian_process(kernel):
    """Context points at the training inputs: mean K (K + s^2 I)^-1 y and covariance K - K (K + s^2 I)^-1 K.

    Predictions elsewhere are those of the network's functions, not of the process.
    """
    problem = any_function()
    method = made(problem, kernel=kernel, lengthscale=0.8, variance=1.7, context="train", context_points=50)
    linear.optimise(method)
    inputs, targets = (t.double() for t in problem.train.tensors)
    prior = covariance_of(kernel, inputs, 0.8, 1.7)
    gain = prior @ torch.linalg.inv(prior + SIGMA**2 * torch.eye(9).double())
    assert_close(method.network(inputs), gain @ targets, rtol=1e-5, atol=1e-5)
    features = method.network.features(inputs)
    assert_close(features @ finish(method) @ features.T, prior - gain @ prior, rtol=1e-5, atol=1e-6)


# ---- networks that are not


@pytest.mark.parametrize("context", ["box", "train"])
def test_a_linear_model_is_bayesian_linear_regression(context):
    """The prior on its weights is what the process says at the context points: precision X_C^T K^-1 X_C."""
    truth = linear.Truth()
    method = made(truth.problem, kernel="matern32", lengthscale=0.6, variance=2.0, context=context)
    linear.optimise(method)
    at_context = torch.cat([method.points, torch.ones(len(method.points), 1).double()], 1)
    matrix = covariance_of("matern32", method.points, 0.6, 2.0)
    prior = at_context.T @ torch.linalg.solve(matrix, at_context)
    precision = truth.design.T @ truth.design / linear.SIGMA**2 + prior
    mean = torch.linalg.solve(precision, truth.design.T @ truth.targets / linear.SIGMA**2)
    weights = torch.cat([p.detach().flatten() for p in method.network.parameters()])
    assert_close(weights, mean, rtol=1e-5, atol=1e-6)
    assert_close(finish(method), torch.linalg.inv(precision), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("points", [3, 40])
def test_classes_have_the_normal_on_the_span_of_the_prior(points):
    """A linear softmax: V (V^T P V)^-1 V^T, V the rows of J_C and P the Hessian by autograd of the energy.

    With three points the prior leaves weights free: these do not move. Variances at the context points are
    never above the prior's.
    """
    problem = replace(problems.mlp(), network=lambda dropout=0.0: nn.Linear(4, 3))
    method = made(problem, lengthscale=0.9, variance=1.4, context_points=points)
    inputs, targets = problem.train.tensors
    context = method.points
    matrix = covariance_of("rbf", context, 0.9, 1.4)
    mode = torch.cat([p.detach().flatten() for p in method.network.parameters()])

    def energy(w):
        scores, at = (x.double() @ w[:12].view(3, 4).T + w[12:] for x in (inputs, context))
        nll = nn.functional.cross_entropy(scores, targets, reduction="sum")
        return nll + 0.5 * (at * torch.linalg.solve(matrix, at)).sum()

    found = sum(method.loss_terms(Batch(inputs.double(), targets), {}))
    assert_close(found, energy(mode), rtol=1e-6, atol=1e-8)
    hessian = torch.autograd.functional.hessian(energy, mode)
    scores = torch.autograd.functional.jacobian(
        lambda w: (context @ w[:12].view(3, 4).T + w[12:]).flatten(), mode
    )
    _, lengths, rows = torch.linalg.svd(scores, full_matrices=False)
    span = rows[lengths > 1e-9 * lengths[0]].T
    assert span.shape[1] == (9 if points == 3 else 15)
    covariance = finish(method)
    assert_close(covariance, span @ torch.linalg.inv(span.T @ hessian @ span) @ span.T, rtol=1e-5, atol=1e-7)
    variances = torch.einsum("nd,de,ne->n", scores, covariance, scores)
    assert (variances <= matrix[0, 0] * (1 + 1e-6)).all()
    whole = torch.linalg.pinv(hessian)
    assert points == 40 or not torch.allclose(covariance, whole, rtol=1e-2)  # negative control


def test_draws_are_of_that_normal():
    """Moments of 20,000 draws within 4.5 standard errors: false alarm 4 x 7e-6, and means bit by bit."""
    truth = linear.Truth()
    method = made(truth.problem, lengthscale=0.6)
    covariance = finish(method)
    mean, variances = linear.flat(method.moments())
    assert_close(variances, covariance.diagonal())
    draws = method.sample_weights(20_000, torch.Generator().manual_seed(0))
    away = torch.cat([w.flatten(1) for w in draws.values()], 1) - mean
    ratio = away.square().mean(0) / variances
    assert ((ratio - 1).abs() < 4.5 * (2 / 20_000) ** 0.5).all()


def test_too_many_numbers_are_refused_in_one_line(monkeypatch):
    """And the line says how many context points would do."""
    monkeypatch.setattr(fsp_laplace, "LARGEST", 1000)
    with pytest.raises(UsageError, match="take at most") as caught:
        made(linear.Truth().problem, context_points=900)
    assert "\n" not in str(caught.value)
