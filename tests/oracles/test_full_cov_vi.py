"""Full-covariance VI against exact posteriors of linear models, dense normals, and mean-field VI."""

import math
from dataclasses import replace

import pytest
import scipy.stats
import torch
from conformance import laws, problems
from oracles import linear
from torch import nn
from torch.distributions import MultivariateNormal, kl_divergence
from torch.testing import assert_close

from bench import priors
from bench.contract import JOINT, Batch, Budget
from bench.engine.engine import Engine, TrainerOptions
from bench.errors import UsageError
from bench.methods.full_cov_vi import FullCovVI, FullNormal, Settings
from bench.methods.linear import Linear
from bench.methods.linear import Settings as LinearSettings
from bench.methods.mfvi import MFVI
from bench.methods.mfvi import Settings as MFVISettings

SCOPES = pytest.mark.parametrize("scope", ["network", "tensor"])


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def lower(size, seed):
    """A lower factor with a positive diagonal, in float64."""
    raw = torch.randn(size, size, generator=generator(seed)).double()
    return raw.tril(-1) + raw.diagonal().abs().add(0.2).diag()


def method_of(problem=None, start=None, **values):
    """A method in float64 whose factors are off their start."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        method = FullCovVI(problem or linear.Truth().problem, Settings(**values), start).double()
        with torch.no_grad():
            for f in method.factors:
                f += 0.5 * torch.randn_like(f)
    return method


def batch_of(method):
    return Batch(*(t.double() for t in method.problem.train.tensors))


def covariance_of(method):
    """Covariance of all weights by the distributions' own factors, `[d, d]`."""
    factors = [q.scale_tril.detach() for q in method.posterior().values()]
    return torch.block_diag(*(f @ f.T for f in factors))


def loss_of(method):
    """Exact negative ELBO: the likelihood of a linear model is quadratic in the weights."""
    return sum(method.loss_terms(batch_of(method), linear.exact_noise(method))).item()


# ---- linear regression


def test_network_scope_reaches_the_posterior_and_the_evidence():
    """The normal with full covariance is the exact posterior, so that nothing is lost in the bound."""
    truth = linear.Truth()
    method = linear.optimise(FullCovVI(truth.problem, Settings()))
    mean, variance = linear.flat(method.moments())
    exact = truth.precision.inverse()
    assert_close(mean, truth.mean, rtol=1e-5, atol=1e-6)
    assert_close(covariance_of(method), exact, rtol=1e-4, atol=1e-7)
    assert_close(variance, exact.diagonal(), rtol=1e-4, atol=1e-8)
    assert -loss_of(method) == pytest.approx(truth.log_evidence(), abs=1e-5)
    conjugate = Linear(truth.problem, LinearSettings())
    conjugate.finish_fit([Batch(*truth.problem.train.tensors)])
    assert -loss_of(method) == pytest.approx(conjugate.log_evidence(), abs=1e-5)


def test_tensor_scope_reaches_the_block_optimum():
    """The posterior's means; covariances that invert the precision's blocks; the gap in closed form."""
    truth = linear.Truth()
    method = linear.optimise(FullCovVI(truth.problem, Settings(scope="tensor")))
    mean, _ = linear.flat(method.moments())
    blocks = [truth.precision[:3, :3], truth.precision[3:, 3:]]
    expected = torch.block_diag(*(block.inverse() for block in blocks))
    assert_close(mean, truth.mean, rtol=1e-5, atol=1e-6)
    assert_close(covariance_of(method), expected, rtol=1e-4, atol=1e-7)
    gap = 0.5 * (sum(map(torch.logdet, blocks)) - torch.logdet(truth.precision)).item()
    assert gap > 0.05, "the bias is correlated with the weights"
    assert loss_of(method) == pytest.approx(-truth.log_evidence() + gap, abs=1e-5)


def test_two_outputs_and_a_correlated_prior():
    """The exact posterior under a prior over all weights, itself the posterior of the first half."""
    problem = problems.linear()
    rows = torch.arange(problems.TRAIN)
    first, both = (Linear(problem, LinearSettings()) for _ in range(2))
    x, y = problem.train.tensors
    first.finish_fit([Batch(x[:10], y[:10])])
    both.finish_fit([Batch(x, y)])
    rest = replace(problems.with_rows(problem, rows[10:]), prior=first.double().as_prior())
    method = linear.optimise(FullCovVI(rest, Settings()))
    assert set(method.prior) == {JOINT}
    assert_close(linear.flat(method.moments())[0], both.mean, rtol=1e-4, atol=1e-5)
    assert_close(covariance_of(method), both.scale_tril @ both.scale_tril.T, rtol=1e-3, atol=1e-7)
    assert -loss_of(method) == pytest.approx(both.log_evidence() - first.log_evidence(), abs=1e-4)


def test_sequential_fits_add_up():
    """Its own posterior of the first half as prior of the second: the posterior of all."""
    truth = linear.Truth()
    rows = torch.arange(linear.ROWS)
    first = linear.optimise(FullCovVI(problems.with_rows(truth.problem, rows[:7]), Settings()))
    rest = replace(problems.with_rows(truth.problem, rows[7:]), prior=first.as_prior())
    second = FullCovVI(rest, Settings(), start=first)
    second = linear.optimise(second)
    assert_close(linear.flat(second.moments())[0], truth.mean, rtol=1e-4, atol=1e-5)
    assert_close(covariance_of(second), truth.precision.inverse(), rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_training_reaches_the_posterior():
    """The engine's own noisy training ends near the optimum; tolerances are a few times what was seen."""
    truth = linear.Truth()
    settings = Settings(learning_rate=0.02, train_samples=16, initial_rho=-2.0)
    engine = Engine(FullCovVI, settings, 0, trainer=TrainerOptions(accelerator="cpu"))
    method = engine.fit(truth.problem, Budget(1000))
    mean, variance = linear.flat(method.moments())
    exact = truth.precision.inverse()
    std = exact.diagonal().sqrt()
    assert ((mean - truth.mean).abs() < 0.5 * std).all()
    assert_close(variance.sqrt(), std, rtol=0.25, atol=0)
    learnt, expected = (c / torch.outer(s := c.diagonal().sqrt(), s) for c in (covariance_of(method), exact))
    assert expected.tril(-1).abs().max() > 0.4, "correlations worth learning"
    assert_close(learnt.double(), expected, rtol=0, atol=0.2)


# ---- the distribution


@pytest.mark.parametrize("shape", [(6,), (2, 3), (2, 1, 3), ()])
def test_full_normal_is_scipys(shape):
    """Density, entropy and moments of a tensor of any shape, against scipy's normal of the flat vector."""
    size = math.prod(shape)
    loc, factor = torch.randn(shape, generator=generator(1)).double(), lower(size, 2)
    q = FullNormal(loc, factor)
    assert (q.batch_shape, q.event_shape) == ((), shape)
    dense = scipy.stats.multivariate_normal(loc.flatten().numpy(), (factor @ factor.T).numpy())
    values = torch.randn(2, 4, *shape, generator=generator(3)).double()
    expected = dense.logpdf(values.reshape(2, 4, size).numpy())
    assert_close(q.log_prob(values), torch.as_tensor(expected).reshape(2, 4))
    assert q.entropy().item() == pytest.approx(dense.entropy())
    assert_close(q.variance.flatten(), (factor @ factor.T).diagonal())
    assert torch.equal(q.mean, loc)
    assert q.rsample((2, 4)).shape == values.shape
    draws = q.transform(torch.eye(size).double().reshape(size, *shape)) - loc
    assert_close(draws.reshape(size, size).T, factor)


def test_divergence_to_independent_normals_is_torchs():
    """Every prior mean and scale its own: torch's divergence between two dense normals."""
    shape, g = (2, 3), generator(4)
    q = FullNormal(torch.randn(shape, generator=g).double(), lower(6, 5))
    loc, scale = torch.randn(shape, generator=g).double(), 0.3 + torch.rand(shape, generator=g).double()
    dense = MultivariateNormal(loc.flatten(), scale_tril=scale.flatten().diag())
    expected = kl_divergence(MultivariateNormal(q.loc.flatten(), scale_tril=q.scale_tril), dense)
    assert_close(kl_divergence(q, priors.normal_tensor(loc, scale)), expected)


def test_divergence_to_another_by_the_formula():
    """[tr(P S) + m P m - D + log det S_p / det S_q] / 2 with explicit inverses, tensor and vector."""
    shape, g = (3, 2), generator(6)
    q, p = (FullNormal(torch.randn(shape, generator=g).double(), lower(6, seed)) for seed in (7, 8))
    s, t = (f.scale_tril @ f.scale_tril.T for f in (q, p))
    away = (q.loc - p.loc).flatten()
    expected = 0.5 * ((t.inverse() @ s).trace() + away @ t.inverse() @ away - 6 + t.logdet() - s.logdet())
    assert_close(kl_divergence(q, p), expected)
    flat = FullNormal(q.loc.flatten(), q.scale_tril)
    assert_close(kl_divergence(flat, MultivariateNormal(p.loc.flatten(), t)), expected)


@SCOPES
def test_prior_term_is_the_divergence_between_dense_normals(scope):
    """To N(m0, s0^2) per weight, over the whole network, for a given posterior."""
    method = method_of(scope=scope)
    mean, _ = linear.flat(method.moments())
    dense = MultivariateNormal(mean, covariance_of(method))
    size = len(mean)
    prior = MultivariateNormal(
        torch.full((size,), linear.MEAN).double(), linear.STD**2 * torch.eye(size).double()
    )
    actual = method.loss_terms(batch_of(method), method.draw_noise(3, generator()))[1]
    assert_close(actual, kl_divergence(dense, prior))


@SCOPES
def test_other_priors_are_sampled(scope):
    """To a mixture of normals the prior term is the mean of log q - log p over the draws."""
    method = method_of(linear.Truth(priors.scale_mixture(0.4, 0.8, 0.1)).problem, scope=scope)
    noise = method.draw_noise(5, generator(1))
    mean, _ = linear.flat(method.moments())
    factor = torch.linalg.cholesky(covariance_of(method))
    draws = mean + torch.cat([e.flatten(1) for e in noise.values()], 1) @ factor.T
    log_q = scipy.stats.multivariate_normal.logpdf(draws, mean, covariance_of(method))
    p = 0.4 * scipy.stats.norm.pdf(draws, 0, 0.8) + 0.6 * scipy.stats.norm.pdf(draws, 0, 0.1)
    expected = log_q - torch.from_numpy(p).log().sum(1).numpy()
    actual = method.loss_terms(batch_of(method), noise)[1]
    assert actual.item() == pytest.approx(expected.mean(), rel=1e-6)


@SCOPES
def test_posterior_is_the_next_prior(scope):
    """The second fit starts where the first ended and pays nothing there; elsewhere torch's divergence."""
    first = method_of(scope=scope)
    second = FullCovVI(linear.Truth(first.as_prior()).problem, Settings(scope=scope), start=first.float())
    noise = second.draw_noise(1, generator())
    assert second.loss_terms(Batch(*second.problem.train.tensors), noise)[1].item() == pytest.approx(
        0, abs=1e-3
    )
    before = MultivariateNormal(linear.flat(first.moments())[0], covariance_of(first.double()))
    second = FullCovVI(linear.Truth(first.as_prior()).problem, Settings(scope=scope)).double()
    with torch.no_grad():
        for p in second.parameters():
            p += 0.2
    after = MultivariateNormal(linear.flat(second.moments())[0], covariance_of(second))
    actual = second.loss_terms(batch_of(second), linear.exact_noise(second))[1]
    assert_close(actual, kl_divergence(after, before), rtol=1e-6, atol=1e-6)


@SCOPES
def test_without_correlations_it_is_mean_field(scope):
    """At the start: loss terms, draws and density of mean-field VI itself, for the same noise."""
    problem = problems.cnn()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        full = FullCovVI(problem, Settings(initial_rho=-1.5, scope=scope)).double()
        torch.manual_seed(0)
        field = MFVI(problem, MFVISettings(initial_rho=-1.5)).double()
    batch = laws.in_double(Batch(*problem.train.tensors))
    noise = full.draw_noise(4, generator(2))
    for a, b in zip(full.loss_terms(batch, noise), field.loss_terms(batch, noise), strict=True):
        assert_close(a, b)
    draws = full.sample_weights(3, generator(3))
    for name, w in field.sample_weights(3, generator(3)).items():
        assert_close(draws[name], w)
    assert_close(full.log_prob(draws), field.log_prob(draws))


# ---- the scope per tensor, which the conformance suite does not try


@pytest.mark.parametrize(
    "law",
    [
        laws.gradients_reach_every_parameter,
        laws.sample_gradients_average,
        laws.batch_size_does_not_matter,
        laws.prior_term_is_the_divergence,
        laws.density_integrates_to_one,
        laws.density_fits_the_samples,
        laws.moments_are_those_of_the_samples,
        laws.posterior_becomes_the_prior,
        laws.predictions_are_of_the_weight_samples,
    ],
)
def test_laws_hold_per_tensor(law):
    """On images, whose kernels have four dimensions; false alarm 1e-3 in all."""
    law(laws.Case(FullCovVI, {"scope": "tensor"}, problems.cnn()))


# ---- what it refuses


def test_large_blocks_are_refused_with_their_memory():
    """10,402 weights: 16 bytes x d^2; per tensor the largest tensor counts."""
    with pytest.raises(UsageError) as info:
        FullCovVI(problems.large(), Settings())
    assert str(info.value) == (
        "full_cov_vi needs 1.7 GB for the covariance of 10,402 weights (its factor, the gradient and two "
        "moments of Adam) and takes at most 5,000: take a smaller network"
    )
    with pytest.raises(UsageError, match="of 10,100 weights"):
        FullCovVI(problems.large(), Settings(scope="tensor"))
    two = replace(
        problems.large(), network=lambda **_: nn.Sequential(nn.Linear(101, 40), nn.Tanh(), nn.Linear(40, 60))
    )
    with pytest.raises(UsageError, match=r"take a smaller network or --method\.scope tensor$"):
        FullCovVI(two, Settings())
    FullCovVI(two, Settings(scope="tensor"))
