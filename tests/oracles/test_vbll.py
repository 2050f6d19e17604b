"""VBLL against exact posteriors, quadrature, draws through the network, and the authors' own package."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import vbll
from conformance import laws, problems
from oracles import linear
from torch import nn
from torch.testing import assert_close
from torch.utils.data import TensorDataset

from bench import likelihoods, priors
from bench.contract import Batch
from bench.divergence import log_prob
from bench.errors import UsageError
from bench.methods.vbll import VBLL, Settings, expected_log_prob
from bench.weights import forward, ravel

COVARIANCES = ["dense", "diagonal"]


class WrongSign(VBLL):
    """Takes the trace term as a gain."""

    def output_variance(self, features):
        """Below 0."""
        return -super().output_variance(features)


def method_of(problem, cls=VBLL, **values):
    """Untrained, in float64, all parameters off their start: correlations among them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        method = cls(problem, Settings(initial_rho=-1.0, **values)).double()
        with torch.no_grad():
            for p in method.parameters():
                p += 0.4 * torch.randn_like(p)
    return method


def batch_of(problem):
    """All training examples in float64."""
    return laws.in_double(Batch(*problem.train.tensors))


def heteroscedastic():
    """The regression problem whose examples bring their own sigma."""
    problem = problems.regression()
    inputs, targets = problem.train.tensors
    sigma = 0.3 + inputs[:, :2].abs()
    train = TensorDataset(inputs, torch.stack([targets, sigma], -1))
    return replace(problem, likelihood=likelihoods.Gaussian("per_example"), train=train)


def two_classes():
    """The problem with three classes as one of two, by one logit."""
    inputs, targets = problems.mlp().train.tensors
    network = lambda dropout=0.0: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))  # noqa: E731
    train = TensorDataset(inputs, (targets > 0).float())
    return replace(problems.mlp(), network=network, likelihood=likelihoods.Bernoulli(), train=train)


# ---- the exact posterior


@pytest.mark.parametrize("covariance", COVARIANCES)
def test_reaches_the_posterior_of_linear_regression(covariance):
    """Dense: the posterior and its evidence. Diagonal: the mean-field optimum, whose bound is lower."""
    truth = linear.Truth()
    method = linear.optimise(method_of(truth.problem, covariance=covariance))
    mean, variance = linear.flat(method.moments())
    bound = -sum(method.loss_terms(batch_of(truth.problem), {})).item()
    assert_close(mean, truth.mean, rtol=1e-6, atol=1e-7)
    if covariance == "dense":
        (factor,) = method.factors.detach()
        assert_close(factor @ factor.T, torch.linalg.inv(truth.precision), rtol=1e-6, atol=1e-8)
        assert bound == pytest.approx(truth.log_evidence(), abs=1e-6)
    else:
        assert_close(variance, 1 / truth.precision.diagonal(), rtol=1e-6, atol=0)
        gap = 0.5 * (truth.precision.diagonal().log().sum() - truth.precision.logdet()).item()
        assert bound == pytest.approx(truth.log_evidence() - gap, abs=1e-6)
        assert gap > 0.1


@pytest.mark.parametrize("bias", [True, False])
def test_reaches_the_posterior_of_two_outputs(bias):
    """Each output's own, by draws: weights and biases are where the network has them. False alarm: 3e-4."""
    sigma = torch.tensor([0.3, 0.8])
    likelihood = likelihoods.Gaussian(0.5, 2)
    likelihood.log_sigma = sigma.log()
    problem = replace(
        problems.linear(), likelihood=likelihood, network=lambda dropout=0.0: nn.Linear(3, 2, bias)
    )
    method = linear.optimise(method_of(problem))
    inputs, targets = (t.double() for t in problem.train.tensors)
    design = torch.cat([inputs, torch.ones(len(inputs), 1)], 1) if bias else inputs
    draws = method.sample_weights(4000, laws.generator())
    for k in range(2):
        s = sigma[k].double()
        precision = design.T @ design / s**2 + torch.eye(design.shape[1], dtype=s.dtype) / 0.8**2
        mean = torch.linalg.solve(precision, design.T @ targets[:, k] / s**2 + 0.1 / 0.8**2)
        rows = torch.cat([draws["weight"][:, k], *([draws["bias"][:, k, None]] if bias else [])], 1)
        z = (rows - mean) @ torch.linalg.cholesky(precision)
        laws.assert_mean_is(z, 0.0)
        laws.assert_mean_is(z[:, :, None] * z[:, None], torch.eye(len(mean), dtype=s.dtype))


# ---- the expected log likelihood


def quadrature(likelihood, mean, variance, targets, points=60):
    """E log p(y | z) of one example, over a Gauss-Hermite grid of independent normals z `[K]`."""
    nodes, weights = (torch.from_numpy(a) for a in np.polynomial.hermite_e.hermegauss(points))
    grid = torch.cartesian_prod(*[nodes] * len(mean)).view(-1, len(mean))
    share = torch.cartesian_prod(*[weights] * len(mean)).view(-1, len(mean)).prod(1)
    outputs = mean + variance.sqrt() * grid
    return (share * likelihood.log_prob(outputs[:, None], targets[None])[:, 0]).sum() / share.sum()


LIKELIHOODS = {
    "known": (likelihoods.Gaussian(0.7), 2, lambda n: torch.randn(n, 2)),
    "learned": (likelihoods.Gaussian("learned", 2), 2, lambda n: torch.randn(n, 2)),
    "per example": (
        likelihoods.Gaussian("per_example"),
        2,
        lambda n: torch.stack([torch.randn(n, 2), 0.3 + torch.rand(n, 2)], -1),
    ),
    "classes": (likelihoods.Categorical(), 3, lambda n: torch.randint(3, (n,))),
    "two classes": (likelihoods.Bernoulli(), 1, lambda n: torch.randint(2, (n,)).float()),
}


def moments_of(kind, size):
    """A likelihood in float64, with means, variances of up to `size`, and targets of 12 outputs."""
    likelihood, outputs, draw = LIKELIHOODS[kind]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        mean, variance = 2 * torch.randn(12, outputs).double(), size * torch.rand(12, outputs).double()
        targets = laws.in_double(draw(12))
        likelihood = likelihood.double()
        for p in likelihood.parameters():
            p.copy_(torch.tensor([-0.4, 0.6]))
    return likelihood, mean, variance, targets


def both(kind, size):
    """What the method says of 12 outputs, and the truth by quadrature."""
    likelihood, mean, variance, targets = moments_of(kind, size)
    with torch.no_grad():
        said = expected_log_prob(likelihood, mean, variance, targets)
        truth = [quadrature(likelihood, *row) for row in zip(mean, variance, targets, strict=True)]
    return said, torch.stack(truth)


@pytest.mark.parametrize("kind", ["known", "learned", "per example"])
def test_expectation_under_normal_noise_is_exact(kind):
    """Against quadrature, which is exact for a square."""
    said, truth = both(kind, 4.0)
    assert_close(said, truth, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ["classes", "two classes"])
def test_bound_of_classes_is_below_the_truth_and_meets_it(kind):
    """Below by more than the quadrature errs, and where nothing varies by less than 1e-6."""
    said, truth = both(kind, 4.0)
    assert (said < truth - 1e-3).all()
    said, truth = both(kind, 1e-7)
    assert_close(said, truth, rtol=0, atol=1e-6)


def test_bound_of_two_classes_is_that_of_three_with_the_difference_as_score():
    """Jensen for the classes' scores less the target's: 0 and -z, or 0 and z."""
    _, mean, variance, targets = moments_of("two classes", 4.0)
    signed = torch.where(targets.bool(), -mean[:, 0], mean[:, 0])
    zeros = torch.zeros(12, 1).double()
    scores, variances = torch.cat([zeros, signed[:, None]], 1), torch.cat([zeros, variance], 1)
    expected = expected_log_prob(likelihoods.Categorical(), scores, variances, torch.zeros(12).long())
    assert_close(expected_log_prob(likelihoods.Bernoulli(), mean, variance, targets), expected)


def drawn_terms(method, samples=4000):
    """Both terms of the loss by draws through the network, `[S]` each; KL by its densities at the draws."""
    batch = batch_of(method.problem)
    draws = method.sample_weights(samples, laws.generator(5))
    with torch.no_grad():
        outputs = forward(method.network, draws, batch.inputs)
        nll = -method.likelihood.log_prob(outputs, batch.targets).sum(1)
        loc, factors = method._mean, method.factors
        rows = method._rows(draws)
        if factors.ndim == 2:
            factors = factors.diag_embed()
        q = torch.distributions.MultivariateNormal(loc, scale_tril=factors)
        return nll, q.log_prob(rows).sum(1) - log_prob(method.prior, draws)


@pytest.mark.parametrize("covariance", COVARIANCES)
@pytest.mark.parametrize("make", [problems.regression, heteroscedastic, problems.mlp, two_classes])
def test_loss_is_that_of_draws(make, covariance):
    """Of normal noise the mean over draws, of classes no less; KL and the features' prior.

    False alarm: 7e-6 a comparison.
    """
    method = method_of(make(), covariance=covariance)
    with torch.no_grad():
        nll, prior_term = method.loss_terms(batch_of(method.problem), {})
    drawn, ratios = drawn_terms(method)
    laws.assert_mean_is(ratios, prior_term)
    if isinstance(method.likelihood, likelihoods.Gaussian):
        laws.assert_mean_is(drawn, nll)
    else:
        assert nll > drawn.mean() + 4.5 * drawn.std() / len(drawn) ** 0.5


@pytest.mark.parametrize("make", [problems.regression, problems.mlp])
def test_wrong_sign_of_the_trace_is_seen(make):
    """Negative control: the loss is then below that of draws, by far."""
    method = method_of(make(), WrongSign)
    nll, _ = method.loss_terms(batch_of(method.problem), {})
    drawn, _ = drawn_terms(method)
    assert nll < drawn.mean() - 10 * drawn.std() / len(drawn) ** 0.5


# ---- the authors' package


def theirs(method, kind):
    """Their layer with our parameters: on features and a 1, without its noise prior and its score noise."""
    rows, columns = method._mean.shape
    covariance = method.settings.covariance
    std = method.prior[method.own[0]].stddev.flatten()[0].item()
    scale = std**2 * columns / (2 if kind is vbll.DiscClassification else 1)
    n = method.problem.num_train
    layer = kind(columns, rows, 1 / n, covariance, prior_scale=scale).double()
    layer.wishart_scale = layer.dof = 0.0
    factors = method.factors.detach()
    with torch.no_grad():
        layer.W_mean.copy_(method._mean)
        if covariance == "dense":
            layer.W_logdiag.copy_(factors.diagonal(dim1=1, dim2=2).log())
            layer.W_offdiag.copy_(factors)
        else:
            layer.W_logdiag.copy_(factors.log())
        noise = -30.0 if kind is vbll.DiscClassification else method.likelihood.log_sigma.item()
        layer.noise_logdiag.fill_(noise)
    return layer


@pytest.mark.parametrize("covariance", COVARIANCES)
@pytest.mark.parametrize("kind", [vbll.Regression, vbll.DiscClassification])
def test_loss_is_that_of_the_authors_package(kind, covariance):
    """Per example, on the same parameters, under a prior N(0, s^2); their KL lacks a constant, d / 2.

    Their regression is of one output: for several it divides each variance by all sigmas.
    """
    problem = problems.mlp()
    if kind is vbll.Regression:
        inputs = problem.train.tensors[0]
        network = lambda dropout=0.0: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))  # noqa: E731
        train = TensorDataset(inputs, inputs[:, :1].sin())
        problem = replace(problem, network=network, train=train, likelihood=likelihoods.Gaussian(0.4))
    problem = replace(problem, prior=priors.normal(0.0, 0.8))
    method, batch = method_of(problem, covariance=covariance), batch_of(problem)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        layer = theirs(method, kind)
        features = batch.inputs
        for module in list(method.network)[:-1]:
            features = module(features)
        features = torch.cat([features, torch.ones(len(features), 1)], 1)
        expected = layer(features).train_loss_fn(batch.targets)
        nll, prior_term = method.loss_terms(batch, {})
    weights = {n: p[None] for n, p in method.network.named_parameters() if n not in method.own}
    of_features = -log_prob({n: method.prior[n] for n in weights}, weights).sum()
    constant = method._mean.numel() / 2
    said = (nll + prior_term - of_features + constant) / problem.num_train
    assert_close(said.detach(), expected, rtol=1e-9, atol=1e-9)


# ---- refusals


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"network": lambda dropout=0.0: nn.Sequential(nn.Linear(4, 3), nn.Tanh())},
            "outputs are those of one",
        ),
        (
            {"network": lambda dropout=0.0: nn.Sequential(nn.Conv1d(4, 3, 1), nn.Flatten())},
            "outputs are those",
        ),
        ({"likelihood": likelihoods.MultiHead(3)}, "Gaussian, a Categorical or a Bernoulli"),
        ({"prior": priors.scale_mixture()}, "independent normals"),
        ({"network": lambda dropout=0.0: nn.Sequential(nn.Linear(4, 5001), nn.Linear(5001, 3))}, "diagonal"),
    ],
)
def test_what_it_cannot_infer_is_refused_in_one_line(changes, reason):
    problem = replace(problems.mlp(), **changes)
    if "Conv1d" in str(problem.network()):
        problem = replace(problem, train=TensorDataset(torch.zeros(2, 4, 1), torch.zeros(2).long()))
    with pytest.raises(UsageError, match=f"^vbll: .*{reason}") as told:
        VBLL(problem, Settings())
    assert "\n" not in str(told.value)


def test_a_point_mass_before_the_last_layer():
    """Of the residual network too: its variances are 0 but for the last layer's, and so are its draws'."""
    method = method_of(problems.residual())
    assert method.own == ["leave.weight", "leave.bias"]
    variance = {name: v.any().item() for name, v in method.moments()[1].items()}
    assert variance == {name: name in method.own for name in variance}
    assert math.prod(method.rho.shape) == 3 * 6 * 6
    assert ravel(method.sample_weights(2, laws.generator())).isfinite().all()
