"""Conjugate linear regression against a dense normal, numerical integration and Bayes' chain rule."""

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats
import torch
from conformance import problems
from oracles import linear
from torch import nn
from torch.distributions import MultivariateNormal
from torch.testing import assert_close
from torch.utils.data import TensorDataset

from bench import likelihoods, networks, priors
from bench import weights as weights_module
from bench.contract import JOINT, Batch, Budget, Problem
from bench.engine.engine import Engine, TrainerOptions
from bench.errors import UsageError
from bench.methods.linear import Linear, Settings

BIASES = pytest.mark.parametrize("bias", [True, False])


def fit(problem, batch_size=None):
    engine = Engine(Linear, Settings(), 0, trainer=TrainerOptions(accelerator="cpu"))
    return engine.fit(problem, Budget(1, batch_size))


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def in_double(make):
    """The network that `make` makes, in float64: no rounding of prior or features."""
    return lambda dropout=0.0: make(dropout=dropout).double()


def gaussian(sigma, outputs=1):
    """A likelihood whose known sigma is not rounded to float32."""
    likelihood = likelihoods.Gaussian(sigma, outputs).double()
    if sigma != "per_example":
        likelihood.log_sigma.fill_(math.log(sigma))
    return likelihood


def joint_prior(size, seed=5):
    """A correlated normal over all weights: mean, covariance and prior."""
    g = generator(seed)
    mean = torch.randn(size, generator=g).double()
    root = torch.randn(size, size + 2, generator=g).double()
    covariance = 0.3 * root @ root.T / size
    return mean, covariance, lambda parameters: {JOINT: MultivariateNormal(mean, covariance)}


class Enumerated:
    """A problem with K = 2 outputs, its dense joint normal of weights and targets, and what follows from it.

    Attributes:
        problem: The problem.
        mean, covariance: Of the exact posterior in the order of ravel.
        log_evidence: In nats.
    """

    def __init__(self, bias=True, joint=True, per_example=False):
        g = generator(2)
        rows, inputs, outputs = 13, 3, 2
        x = torch.randn(rows, inputs, generator=g).double()
        y = 1.5 * torch.randn(rows, outputs, generator=g).double() + 4
        size = outputs * (inputs + bias)
        if joint:
            mean, covariance, prior = joint_prior(size)
        else:
            g2 = generator(6)
            mean, std = (
                torch.randn(size, generator=g2).double(),
                0.5 + torch.rand(size, generator=g2).double(),
            )
            covariance = std.square().diag()
            cut = outputs * inputs

            def prior(parameters):
                parts = {"2.weight": slice(0, cut), "2.bias": slice(cut, None)}
                return {
                    n: priors.normal_tensor(mean[parts[n]].view_as(p), std[parts[n]].view_as(p))
                    for n, p in parameters.items()
                }

        sigma = torch.full((rows, outputs), 0.7, dtype=torch.float64)
        if per_example:
            sigma = 0.3 + torch.rand(rows, outputs, generator=g).double()
        network = in_double(
            lambda dropout: nn.Sequential(
                networks.Dropout(dropout), nn.Flatten(), nn.Linear(inputs, outputs, bias), nn.Identity()
            )
        )
        targets = torch.stack([y, sigma], -1) if per_example else y
        self.problem = Problem(
            network,
            gaussian("per_example" if per_example else 0.7, outputs),
            prior,
            TensorDataset(x[:, None], targets),
            None,
            rows,
        )
        # One row per (output, example): y = design w + noise.
        blocks = [torch.kron(torch.eye(outputs).double(), x)]
        if bias:
            blocks.append(torch.kron(torch.eye(outputs).double(), torch.ones(rows, 1).double()))
        design = torch.cat(blocks, 1)
        noise = sigma.T.reshape(-1).square().diag()
        flat = y.T.reshape(-1)
        marginal = noise + design @ covariance @ design.T
        gain = covariance @ design.T @ marginal.inverse()
        self.mean = mean + gain @ (flat - design @ mean)
        self.covariance = covariance - gain @ design @ covariance
        self.log_evidence = scipy.stats.multivariate_normal.logpdf(flat, design @ mean, marginal)


# ---- posterior and evidence


def test_one_output_is_the_truth_of_the_other_oracles():
    """Independent normals of mean 0.3, a bias, sigma 0.6: mean, precision and evidence of oracles.linear."""
    truth = linear.Truth()
    method = fit(replace(truth.problem, network=in_double(linear.network), likelihood=gaussian(linear.SIGMA)))
    assert_close(method.mean, truth.mean, rtol=1e-7, atol=0)
    covariance = method.scale_tril @ method.scale_tril.T
    assert_close(covariance, truth.precision.inverse(), rtol=1e-6, atol=1e-12)
    assert method.log_evidence() == pytest.approx(truth.log_evidence(), rel=1e-7)
    mean, variance = linear.flat(method.moments())
    assert_close(mean, method.mean)
    assert_close(variance, covariance.diagonal())
    assert torch.equal(method.scale_tril, method.scale_tril.tril())


@BIASES
@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("per_example", [True, False])
def test_several_outputs_by_conditioning_a_dense_normal(bias, joint, per_example):
    """Two outputs of correlated weights: condition the joint normal of weights and targets on the targets."""
    truth = Enumerated(bias, joint, per_example)
    for batch_size in (None, 4):
        method = fit(truth.problem, batch_size)
        assert_close(method.mean, truth.mean, rtol=1e-9, atol=1e-9)
        assert_close(method.scale_tril @ method.scale_tril.T, truth.covariance, rtol=1e-9, atol=1e-11)
        assert method.log_evidence() == pytest.approx(truth.log_evidence, rel=1e-10)


def test_evidence_of_weighted_examples_by_integration():
    """Slope and intercept on a grid: weights of any size stand in the exponents."""
    problem = problems.straight_line()
    x, y = (t.double() for t in problem.train.tensors)
    weights = torch.rand(len(x), generator=generator(3)).double() * 1.7
    problem = replace(
        problem,
        network=in_double(problem.network),
        likelihood=gaussian(0.5),
        train=TensorDataset(x, y, weights),
        prior=priors.normal(0.25, 0.75),
    )
    method = fit(problem, 6)
    steps = torch.linspace(-4, 4, 1201, dtype=torch.float64)
    w, b = torch.meshgrid(steps, steps, indexing="ij")
    log_joint = sum(scipy.stats.norm.logpdf(t, 0.25, 0.75) for t in (w, b))
    for xi, yi, weight in zip(x, y, weights, strict=True):
        log_joint = log_joint + weight.item() * scipy.stats.norm.logpdf(yi, w * xi + b, 0.5)
    density = np.exp(log_joint - log_joint.max())
    cell = (steps[1] - steps[0]).item() ** 2
    expected = math.log(density.sum() * cell) + log_joint.max()
    assert method.log_evidence() == pytest.approx(expected, rel=1e-8)
    share = torch.from_numpy(density / density.sum())
    mean, variance = linear.flat(method.moments())
    for i, grid in enumerate((w, b)):
        assert mean[i].item() == pytest.approx((share * grid).sum().item(), rel=1e-8)
        assert variance[i].item() == pytest.approx((share * (grid - mean[i]).square()).sum().item(), rel=1e-8)


def test_whole_weights_count_examples():
    """Weight 2 is the example twice and weight 0 the example absent, in posterior and evidence."""
    truth = Enumerated()
    rows = torch.arange(13)
    weights = torch.tensor([2.0, 0.0, 1.0]).repeat(5)[:13]
    weighted = fit(problems.with_rows(truth.problem, rows, weights), 5)
    counted = fit(problems.with_rows(truth.problem, rows.repeat_interleave(weights.long())))
    assert_close(weighted.mean, counted.mean)
    assert_close(weighted.scale_tril, counted.scale_tril)
    assert weighted.log_evidence() == pytest.approx(counted.log_evidence(), rel=1e-12)


@pytest.mark.slow
@BIASES
@pytest.mark.parametrize("batch_size", [None, 4])
def test_many_weightings_are_as_many_posteriors(bias, batch_size):
    """Two outputs, a correlated prior, 40 weightings with zeros: posterior, evidence, prediction."""
    problem = Enumerated(bias).problem
    weights = torch.rand(40, 13, generator=generator(11)).double() * 2
    weights[weights < 0.5] = 0
    x, y = problem.train.tensors
    together = fit(replace(problem, train=TensorDataset(x, y, weights.T)), batch_size)
    inputs = torch.randn(5, 1, 3, generator=generator(9)).double()
    predicted = together.predict(inputs, 3, generator(2)).mean.unflatten(0, (40, 3))
    for r, row in enumerate(weights):
        kept = row.nonzero().squeeze(1)
        alone = fit(problems.with_rows(problem, kept, row[kept]), batch_size)
        assert_close(together.mean[r], alone.mean, rtol=1e-9, atol=1e-9)
        assert_close(together.scale_tril[r], alone.scale_tril, rtol=1e-9, atol=1e-9)
        assert together.evidence[r].item() == pytest.approx(alone.log_evidence(), rel=1e-10)
        expected = alone.predict(inputs, 3, generator(2)).mean
        assert_close(predicted[r], expected, rtol=1e-9, atol=1e-9)


def test_order_of_samples_does_not_depend_on_pieces(monkeypatch):
    """Posterior after posterior, also where draws are made a few at a time."""
    problem = Enumerated().problem
    x, y = problem.train.tensors
    weighted = replace(problem, train=TensorDataset(x, y, torch.tensor([[1.0, 5.0]] * 13)))
    method = fit(weighted)
    whole = method.predict(x, 7, generator(2)).mean
    monkeypatch.setattr(weights_module, "_CHUNK", 2 * 8)
    pieces = method.predict(x, 7, generator(2)).mean
    spread = whole.unflatten(0, (2, 7)).std(1).mean((1, 2))
    assert spread[0] > 1.5 * spread[1]
    assert_close(pieces.unflatten(0, (2, 7)).std(1).mean((1, 2)), spread, rtol=0.9, atol=0)
    assert_close(pieces[:2], whole[:2])
    assert_close(pieces[7:9], whole[7:9])


def test_posterior_mean_is_near_weighted_least_squares():
    """A prior of sd 10 and noise of 0.001 pull by the ratio of their precisions, 1e-8, over the data's.

    Weights as unequal as unbiased estimators make them, few examples: within 1e-6 of numpy's least squares.
    """
    g = generator(12)
    x, y = torch.rand(40, 1, generator=g).double(), torch.randn(40, 1, generator=g).double()
    weights = torch.exp(2 * torch.randn(30, 40, generator=g)).double()
    weights[:, 12:] = 0
    data = TensorDataset(x, y, weights.T)
    network = in_double(lambda dropout: nn.Linear(1, 1))
    method = fit(Problem(network, gaussian(0.001), priors.normal(0, 10), data, None, 40))
    design = torch.cat([x, torch.ones_like(x)], 1)
    for mean, row in zip(method.mean, weights, strict=True):
        root = row.sqrt()[:, None]
        expected = np.linalg.lstsq((root * design).numpy(), (root * y).numpy()[:, 0], rcond=None)[0]
        assert_close(mean.numpy(), expected, rtol=1e-6, atol=1e-6)
        assert not np.array_equal(mean.numpy(), expected)


def test_posterior_as_prior_obeys_the_chain_rule():
    """Half of the data, then the rest under the posterior of the first: the posterior and evidence of all."""
    truth = Enumerated(joint=False)
    first = fit(problems.with_rows(truth.problem, torch.arange(6)))
    rest = replace(problems.with_rows(truth.problem, torch.arange(6, 13)), prior=first.as_prior())
    second = fit(rest)
    assert_close(second.mean, truth.mean, rtol=1e-9, atol=1e-9)
    assert_close(second.scale_tril @ second.scale_tril.T, truth.covariance, rtol=1e-9, atol=1e-11)
    total = first.log_evidence() + second.log_evidence()
    assert total == pytest.approx(truth.log_evidence, rel=1e-10)


def test_without_data_it_is_the_prior():
    """Before the fit, and under weights of zero: prior mean and covariance, log evidence 0."""
    truth = Enumerated()
    mean, covariance, _ = joint_prior(8)
    nothing = problems.with_rows(truth.problem, torch.arange(13), torch.zeros(13))
    for method in (Linear(truth.problem, Settings()), fit(nothing)):
        assert_close(method.mean, mean)
        assert_close(method.scale_tril @ method.scale_tril.T, covariance)
        assert method.log_evidence() == 0


def test_nearly_singular_data_and_sharp_noise_keep_their_digits():
    """Two equal inputs under noise of 1e-4: the well-determined sum and the undetermined difference.

    The undetermined direction is the smallest eigenvalue of a precision whose largest is `sharpest`; sums in
    another order (another processor) move it by that many units of rounding.
    """
    x = torch.randn(40, 1, generator=generator(8)).double()
    network = in_double(lambda dropout: nn.Linear(2, 1, bias=False))
    data = TensorDataset(torch.cat([x, x], 1), 3 * x)
    method = fit(Problem(network, gaussian(1e-4), priors.normal(0, 1), data, None, 40))
    covariance = method.scale_tril @ method.scale_tril.T
    total, difference = torch.tensor([1.0, 1.0]).double(), torch.tensor([1.0, -1.0]).double()
    sharpest = 1 + 2 * x.square().sum().item() * 1e8
    rounding = sharpest * torch.finfo(torch.float64).eps
    assert rounding < 3e-6
    assert (total @ method.mean).item() == pytest.approx(3, rel=1e-8)
    assert (difference @ covariance @ difference).item() == pytest.approx(2, rel=2 * rounding)
    expected = 1 / (0.5 + x.square().sum().item() * 1e8)
    assert (total @ covariance @ total).item() == pytest.approx(expected, rel=1e-4)


# ---- the distribution


def test_density_and_draws_are_of_the_posterior():
    """Log density by scipy; mean and covariance of 40,000 draws. False alarm: 44 x 7e-6 = 3e-4."""
    truth = Enumerated()
    method = fit(truth.problem)
    draws = method.sample_weights(40_000, generator(1))
    flat = torch.cat([w.flatten(1) for w in draws.values()], 1)
    expected = scipy.stats.multivariate_normal.logpdf(flat[:50], truth.mean, truth.covariance)
    few = {n: w[:50] for n, w in draws.items()}
    assert_close(method.log_prob(few), torch.from_numpy(expected), rtol=1e-7, atol=1e-6)
    away = flat - truth.mean
    assert (away.mean(0).abs() < 4.5 * away.std(0) / 200).all()
    products = away[:, :, None] * away[:, None, :]
    assert ((products.mean(0) - truth.covariance).abs() < 4.5 * products.std(0) / 200).all()


def test_prediction_mixes_functions_to_the_exact_predictive():
    """Mean and variance over 20,000 functions are x mean and x covariance x + sigma^2. False alarm: 2e-4."""
    truth = Enumerated(bias=False)
    method = fit(truth.problem)
    inputs = torch.randn(5, 1, 3, generator=generator(9)).double()
    prediction = method.predict(inputs, 20_000, generator(2))
    assert_close(prediction.variance, torch.full_like(prediction.mean, 0.49))
    for k in range(2):
        block = slice(3 * k, 3 * k + 3)
        means = inputs[:, 0] @ truth.mean[block]
        stds = (inputs[:, 0] @ truth.covariance[block, block] * inputs[:, 0]).sum(1).sqrt()
        away = prediction.mean[..., k] - means
        assert (away.mean(0).abs() < 4.5 * stds / 20_000**0.5).all()
        assert ((away.std(0) / stds - 1).abs() < 4.5 / 40_000**0.5).all()


def test_float32_network_keeps_its_precision_and_float64_statistics():
    """A float32 problem: buffers in float64, draws and prior in float32, numbers near the exact ones."""
    truth = linear.Truth()
    method = fit(truth.problem)
    assert method.mean.dtype == torch.float64
    assert method.sample_weights(1, generator())["weight"].dtype == torch.float32
    assert method.as_prior()(dict(method.network.named_parameters()))[JOINT].loc.dtype == torch.float32
    assert_close(method.mean, truth.mean, rtol=1e-5, atol=1e-6)


# ---- what it refuses


def refused(**parts):
    problem = replace(linear.Truth().problem, **parts)
    with pytest.raises(UsageError) as info:
        Linear(problem, Settings())
    assert "\n" not in str(info.value)
    return str(info.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda **_: networks.mlp(3, 1, (2,)),
        lambda **_: nn.Sequential(nn.Linear(3, 1), nn.Tanh()),
        lambda **_: nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 1)),
        lambda **_: nn.Conv2d(1, 1, 1),
        lambda **_: problems.Residual(0.0),
    ],
)
def test_other_networks_are_refused(make):
    assert refused(network=make) == (
        "linear needs a network whose only weights are those of one linear layer at its end"
    )


def test_other_likelihoods_and_priors_are_refused():
    for likelihood in (likelihoods.Gaussian("learned"), likelihoods.Categorical()):
        assert refused(likelihood=likelihood) == "linear needs a Gaussian likelihood of known sigma"
    assert refused(prior=priors.scale_mixture()).startswith("linear needs a normal prior: ")


def test_large_networks_are_refused():
    wide = refused(network=lambda **_: nn.Linear(5000, 1))
    assert wide == "linear needs a network of at most 5,000 weights, not 5,001"


def test_fixed_features_may_come_first():
    """Modules without weights before the layer are features: cos(x) here."""

    class Cosine(nn.Module):
        def forward(self, inputs):
            return inputs.cos()

    truth = Enumerated()
    x, y = truth.problem.train.tensors
    base = truth.problem.network
    featured = replace(
        truth.problem,
        network=lambda dropout=0.0: nn.Sequential(nn.Sequential(Cosine()), base()),
    )
    made = replace(truth.problem, train=TensorDataset(x.cos(), y))
    assert_close(fit(featured).mean, fit(made).mean)


def test_state_survives():
    """Mean, factor and evidence travel in the state dictionary."""
    method = fit(Enumerated().problem)
    other = Linear(method.problem, Settings())
    other.load_state_dict(copy.deepcopy(method.state_dict()))
    assert other.log_evidence() == method.log_evidence()
    batch = Batch(*method.problem.train.tensors)
    a, b = (m.predict(batch.inputs, 3, generator(4)) for m in (method, other))
    assert torch.equal(a.mean, b.mean)
