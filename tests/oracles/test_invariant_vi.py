"""Invariance-abiding inference on over-parametrised linear regression, where its optimum is the posterior."""

from dataclasses import replace

import pytest
import torch
from conformance import problems
from oracles import linear
from torch import nn
from torch.distributions import MultivariateNormal, kl_divergence
from torch.testing import assert_close
from torch.utils.data import TensorDataset

from bench import likelihoods, priors
from bench.contract import Batch, Budget, Problem
from bench.divergence import divergence
from bench.engine.engine import Engine
from bench.errors import UsageError
from bench.methods import mfvi
from bench.methods.invariant_vi import InvariantVI, Settings, passed_on_divergence
from bench.priors import normal_tensor
from bench.tasks.invariance_gap import linear_model
from bench.weights import forward

NOISE, MEAN, VARIANCE = 0.4, 0.3, 1.3
"""Standard deviation of an observation; mean and variance of the function under the prior, if x sums to 1."""
SCALES = torch.tensor([1.0, 1, 1, 0.5, 2, -1]).double()
"""Of the vector that all inputs are multiples of."""
TARGETS = torch.tensor([0.9, 1.4, 1.1, 0.6, 2.1, -1.3]).double()


def over_parametrised(x, scales=SCALES):
    """Targets c x'w + noise: K weights of prior N(MEAN, K VARIANCE), inputs c x `[N, K]` of one direction."""
    size = len(x)
    inputs = scales[:, None] * x
    prior = priors.normal(MEAN, (size * VARIANCE) ** 0.5)
    data = TensorDataset(inputs, TARGETS[: len(scales), None])
    network = problems_in_double(lambda **_: nn.Linear(size, 1, bias=False))
    return Problem(network, likelihoods.Gaussian(NOISE), prior, data, None, len(scales))


def problems_in_double(make):
    """A factory of networks in float64."""
    return lambda dropout=0.0: make().double()


def exact(x, scales=SCALES):
    """Mean and variance of x'w under the posterior, from that of one number with a normal prior."""
    mean, variance = MEAN * x.sum(), len(x) * VARIANCE * x.square().sum()
    precision = 1 / variance + scales.square().sum() / NOISE**2
    slope = mean / variance + (scales * TARGETS[: len(scales)]).sum() / NOISE**2
    return slope / precision, 1 / precision


def equal(size):
    return torch.full((size,), 1 / size).double()


def uneven(size):
    """Signs and sizes mixed; no entry is 0."""
    return torch.linspace(-1, 1.3, size).double() / size**0.5


def of_function(method, x):
    """Mean and variance of x'w under draws of the method, in closed form."""
    mean, variance = linear.flat(method.moments())
    return x @ mean, x.square() @ variance


def optimise(method):
    """At the minimum of the layer's exact loss: under noise 1 and -1 a quadratic has no Monte Carlo error."""
    batch = Batch(*method.problem.train.tensors)
    kind = {"max_iter": 500, "line_search_fn": "strong_wolfe", "tolerance_change": 1e-16}
    optimizer = torch.optim.LBFGS(method.parameters(), tolerance_grad=1e-10, **kind)

    def closure():
        optimizer.zero_grad()
        loss = sum(method.layer_terms(batch, 0, signs))
        loss.backward()
        return loss

    optimizer.step(closure)
    return method


def signs(like):
    """1 for the first sample of every example, -1 for the second."""
    half = torch.ones_like(like[: len(like) // 2])
    return torch.cat([half, -half])


# ---- the claim


@pytest.mark.parametrize("inputs", [equal, uneven])
@pytest.mark.parametrize("size", [2, 4, 64])
def test_reaches_the_exact_predictive_at_every_width(inputs, size):
    """Mean-field draws have the mean and variance of the true posterior over functions."""
    x = inputs(size)
    method = optimise(InvariantVI(over_parametrised(x), Settings(train_samples=2)).double())
    mean, variance = of_function(method, x)
    assert_close(mean, exact(x)[0], rtol=1e-6, atol=1e-6)
    assert_close(variance, exact(x)[1], rtol=1e-5, atol=0)


@pytest.mark.parametrize("size", [2, 4, 64])
def test_mean_field_inference_falls_back_to_the_prior(size):
    """The negative control; both optima are those of the closed forms of the linear model (eqs 18, 19)."""
    x, ones = equal(size), SCALES[:3]
    model = linear_model(size, TARGETS[:3].numpy(), NOISE**2, size * VARIANCE, MEAN)
    problem = over_parametrised(x, ones)
    abiding = optimise(InvariantVI(problem, Settings(train_samples=2)).double())
    collapsed = linear.optimise(mfvi.MFVI(problem, mfvi.Settings(initial_rho=0.0)))
    for method, theta in ((abiding, model.theta_mixed), (collapsed, model.theta_mean_field)):
        found = torch.stack(of_function(method, x))
        assert_close(found, torch.tensor(model.function(theta)).double(), rtol=2e-4, atol=1e-6)
    kept = of_function(collapsed, x)[1] / VARIANCE
    assert kept > {2: 0.05, 4: 0.1, 64: 0.6}[size]
    assert exact(x, ones)[1] < 0.05 * VARIANCE


@pytest.mark.slow
def test_training_reaches_it_through_the_engine():
    """By Adam on noisy gradients: the mean to a tenth of its standard deviation, the variance to 5%."""
    x = uneven(64)
    problem = over_parametrised(x)
    settings = Settings(learning_rate=0.05, rate_decay=0.98, train_samples=16)
    method = Engine(InvariantVI, settings, seed=0).fit(problem, Budget(epochs=300))
    mean, variance = of_function(method, x)
    assert (mean - exact(x)[0]).abs() < 0.1 * exact(x)[1].sqrt()
    assert_close(variance, exact(x)[1], rtol=0.05, atol=0)


# ---- the divergence


def units(seed=0, count=3, size=5):
    """Means and scales of units `[U, D]`, and those of their prior."""
    g = torch.Generator().manual_seed(seed)
    means, prior_means = torch.randn(2, count, size, generator=g).double()
    scales, prior_scales = (0.2 + torch.rand(2, count, size, generator=g)).double()
    return means, scales, prior_means, prior_scales


def abiding(z, theta_means, theta_variances, prior_means, prior_scales):
    """q_mix given activations z `[D]`, as eq. 23 prints it, of one unit."""
    sigma = prior_scales.square().diag()
    along = sigma @ z
    total = z @ (theta_variances.diag() + sigma) @ z
    mean = prior_means + (z @ (theta_means - prior_means)) / total * along
    return MultivariateNormal(mean, sigma - along.outer(along) / total)


def test_one_point_costs_the_divergence_of_equation_23():
    """Where V is proportional to Sigma, of which q_0 is the product with the prior (eq. 6a)."""
    theta_means, _, prior_means, prior_scales = units()
    z = torch.randn(4, 5, generator=torch.Generator().manual_seed(1)).double()
    ratio = 0.6
    variances = ratio * prior_scales.square()
    means = prior_means + (theta_means - prior_means) / (1 + ratio)
    scales = prior_scales * (ratio / (1 + ratio)) ** 0.5
    expected = sum(
        kl_divergence(
            abiding(x, theta_means[u], variances[u], prior_means[u], prior_scales[u]),
            MultivariateNormal(prior_means[u], prior_scales[u].square().diag()),
        )
        for x in z
        for u in range(3)
    )
    ones = torch.ones(4).double()
    own = passed_on_divergence(z, ones, means, scales, prior_means, prior_scales, points=1)
    assert_close(own, expected / 4)


def test_several_points_cost_the_divergence_of_what_they_pass_on():
    """Generic normals, with a point twice in a group; from D points on it is mean-field inference's KL."""
    means, scales, prior_means, prior_scales = units()
    z = torch.randn(6, 5, generator=torch.Generator().manual_seed(2)).double()
    z[1] = -2 * z[0]

    def generic(rows):
        return sum(
            kl_divergence(
                MultivariateNormal(rows @ means[u], rows @ scales[u].square().diag() @ rows.T),
                MultivariateNormal(rows @ prior_means[u], rows @ prior_scales[u].square().diag() @ rows.T),
            )
            for u in range(3)
        )

    arguments = (torch.ones(6).double(), *units())
    mean_field = divergence(normal_tensor(means, scales), normal_tensor(prior_means, prior_scales), means)
    found = {points: passed_on_divergence(z, *arguments, points=points) for points in (1, 2, 3, 6)}
    assert_close(found[2], (generic(z[:1]) + generic(z[2:4]) + generic(z[4:])) / 3)
    assert_close(found[3], (generic(z[1:3]) + generic(z[3:])) / 2)
    assert_close(found[6], mean_field)
    assert found[1] < found[2] < found[3] < found[6]


def test_weights_count_activations():
    """Weight 2 is the point twice, weight 0 is the point absent, however long its activations are."""
    z = torch.randn(4, 5, generator=torch.Generator().manual_seed(3)).double()
    weighted = passed_on_divergence(z, torch.tensor([2.0, 1, 0, 1]).double(), *units(), points=1)
    rows = z[[0, 0, 1, 3]]
    assert_close(weighted, passed_on_divergence(rows, torch.ones(4).double(), *units(), points=1))
    no_length = z * torch.tensor([1.0, 0, 1, 1]).double()[:, None]
    silent = passed_on_divergence(no_length, torch.ones(4).double(), *units(), points=1)
    without = passed_on_divergence(z[[0, 2, 3]], torch.ones(3).double(), *units(), points=1)
    assert_close(silent, 0.75 * without)


# ---- layer by layer


def test_a_turn_trains_its_layer_and_draws_up_to_it():
    """Gradients reach the layer's means and rhos alone; later layers draw nothing."""
    problem = problems.mlp()
    method = InvariantVI(problem, Settings())
    for turn in range(3):
        drawn = []
        method.zero_grad()
        batch = Batch(*problem.train.tensors)
        terms = method.layer_terms(
            batch, turn, lambda like, d=drawn: d.append(like.shape) or torch.ones_like(like)
        )
        sum(terms).backward()
        names = [n for n, p in method.network.named_parameters() if p.grad is not None]
        assert names == [f"{method.layers[turn]}.weight", f"{method.layers[turn]}.bias"]
        assert [k // 2 for k, r in enumerate(method.rho) if r.grad is not None] == [turn, turn]
        assert drawn == [(problems.TRAIN, units) for units in (6, 5, 3)[: turn + 1]]


def test_last_turn_fits_what_draws_predict():
    """Its likelihood term is that of drawn weights, by 4,000 draws and 200 means of 20. False alarm: 7e-6."""
    problem = problems.known_noise()
    method = InvariantVI(problem, Settings(initial_rho=-1.0, train_samples=20))
    batch, g = Batch(*problem.train.tensors), torch.Generator().manual_seed(4)
    weights = method.sample_weights(4000, g)
    whole = -problem.likelihood.log_prob(forward(method.network, weights, batch.inputs), batch.targets).sum(1)
    with torch.no_grad():
        terms = torch.stack([method.layer_terms(batch, 1, method._normal)[0] for _ in range(200)])
    error = (whole.var() / 4000 + terms.var() / 200).sqrt()
    assert (whole.mean() - terms.mean()).abs() < 4.5 * error


def test_every_layer_gets_the_budget():
    """Epochs and patience times the layers; turns of several steps."""
    method = InvariantVI(problems.mlp(), Settings(steps_per_layer=2))
    assert method.spends(Budget(epochs=5, patience=2)) == Budget(epochs=15, patience=6)
    turns = []
    method.layer_terms = lambda batch, turn, draw: turns.append(turn) or (torch.zeros(()), torch.zeros(()))
    for _ in range(8):
        method.training_step(None, 0)
    assert turns == [0, 0, 1, 1, 2, 2, 0, 0]


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        (problems.cnn(), "needs a network whose parameters all belong to Linear layers"),
        (replace(problems.mlp(), prior=priors.scale_mixture()), "needs a prior of independent normals"),
    ],
)
def test_other_problems_are_refused(problem, said):
    with pytest.raises(UsageError) as info:
        InvariantVI(problem, Settings())
    assert str(info.value) == f"invariant_vi {said}: take another method, such as mfvi"
