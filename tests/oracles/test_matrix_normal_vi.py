"""Matrix-normal VI against the dense normal of covariance V (x) U, exact posteriors, and mean-field VI."""

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
from torch.utils.data import TensorDataset

from bench import likelihoods, priors
from bench.contract import Batch, Budget, Problem
from bench.engine.engine import Engine, TrainerOptions
from bench.errors import UsageError
from bench.methods.linear import Linear
from bench.methods.linear import Settings as LinearSettings
from bench.methods.matrix_normal_vi import MatrixNormal, MatrixNormalVI, Settings
from bench.methods.mfvi import MFVI
from bench.methods.mfvi import Settings as MFVISettings

SHAPES = pytest.mark.parametrize("shape", [(2, 3), (4, 2), (1, 5), (5, 1), (2, 1, 3), (3, 2, 1, 2)])


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def lower(size, seed):
    """A lower factor with a positive diagonal, in float64."""
    raw = torch.randn(size, size, generator=generator(seed)).double()
    return raw.tril(-1) + raw.diagonal().abs().add(0.2).diag()


def matrix_normal(shape, seed=0):
    """One with dense factors and a random mean."""
    loc = torch.randn(shape, generator=generator(seed)).double()
    return MatrixNormal(loc, lower(shape[0], seed + 1), lower(math.prod(shape[1:]), seed + 2))


def by_columns(tensor, dimensions):
    """Vec: the columns of the m x n matrices in the last `dimensions` axes, one below another."""
    matrices = tensor.flatten(tensor.ndim - dimensions + 1)
    return matrices.mT.flatten(-2)


def dense(q):
    """N(vec M, V (x) U) by torch's Kronecker product: q's truth."""
    u, v = (f @ f.T for f in (q.row_tril, q.column_tril))
    return MultivariateNormal(by_columns(q.loc, q.loc.ndim), torch.kron(v, u))


def method_of(problem, start=None, **values):
    """A method in float64 whose factors are off their start."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        method = MatrixNormalVI(problem, Settings(**values), start).double()
        with torch.no_grad():
            for f in method.factors.parameters():
                f += 0.4 * torch.randn_like(f)
    return method


# ---- the distribution


@SHAPES
def test_density_entropy_and_moments_are_the_dense_normal_s(shape):
    """At stacked values, for matrices and kernels."""
    q = matrix_normal(shape)
    truth = dense(q)
    values = torch.randn(3, 2, *shape, generator=generator(9)).double()
    assert_close(q.log_prob(values), truth.log_prob(by_columns(values, len(shape))))
    assert_close(q.log_prob(values[0, 0]), truth.log_prob(by_columns(values[0, 0], len(shape))))
    assert_close(q.entropy(), truth.entropy())
    assert_close(by_columns(q.variance, len(shape)), truth.variance)
    assert torch.equal(q.mean, q.loc)
    assert (q.batch_shape, q.event_shape) == ((), shape)
    assert q.rsample((2, 3)).shape == (2, 3, *shape)


@SHAPES
def test_transform_has_the_dense_covariance(shape):
    """Exactly: the map of unit noise is a root of V (x) U."""
    q = matrix_normal(shape, 20)
    size = q.loc.numel()
    root = by_columns(q.transform(torch.eye(size).double().reshape(size, *shape)) - q.loc, len(shape))
    assert_close(root.T @ root, dense(q).covariance_matrix)


def test_covariance_of_samples():
    """Of 40,000 draws, every entry. False alarm: 36 x 7e-6 = 2.4e-4."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        q = matrix_normal((2, 3), 30)
        away = by_columns(q.rsample((40_000,)) - q.loc, 2)
    products = away[:, :, None] * away[:, None, :]
    assert ((products.mean(0) - dense(q).covariance_matrix).abs() < 4.5 * products.std(0) / 200).all()
    assert (away.mean(0).abs() < 4.5 * away.std(0) / 200).all()


@SHAPES
def test_divergence_to_independent_normals_by_enumeration(shape):
    """Every prior mean and scale its own: torch's divergence between the dense normals."""
    q = matrix_normal(shape, 40)
    loc = torch.randn(shape, generator=generator(50)).double()
    scale = 0.3 + torch.rand(shape, generator=generator(51)).double()
    p = MultivariateNormal(by_columns(loc, len(shape)), by_columns(scale, len(shape)).square().diag())
    assert_close(kl_divergence(q, priors.normal_tensor(loc, scale)), kl_divergence(dense(q), p))


def test_divergence_to_one_normal_is_the_printed_formula():
    """[tr U tr V/s0^2 + |M - m0|^2/s0^2 - mn + mn log s0^2 - n log|U| - m log|V|]/2."""
    (m, n), m0, s0 = (3, 4), 0.3, 0.7
    q = matrix_normal((m, n), 60)
    u, v = (f @ f.T for f in (q.row_tril, q.column_tril))
    traces = u.trace() * v.trace() / s0**2 + (q.loc - m0).square().sum() / s0**2
    expected = 0.5 * (traces - m * n + m * n * math.log(s0**2) - n * u.logdet() - m * v.logdet())
    p = priors.normal(m0, s0)({"w": q.loc})["w"]
    assert_close(kl_divergence(q, p), expected)


@SHAPES
def test_divergence_to_another_by_enumeration(shape):
    """Torch's divergence between the dense normals; zero to itself."""
    q, p = matrix_normal(shape, 70), matrix_normal(shape, 80)
    assert_close(kl_divergence(q, p), kl_divergence(dense(q), dense(p)))
    assert_close(kl_divergence(q, q), torch.zeros((), dtype=torch.float64), rtol=0, atol=1e-12)


def test_scale_may_move_between_the_factors():
    """(c A, B / c) is the same distribution: density, entropy and divergence cannot tell."""
    q, p = matrix_normal((3, 2), 90), matrix_normal((3, 2), 95)
    same = MatrixNormal(q.loc, 7 * q.row_tril, q.column_tril / 7)
    assert_close(same.log_prob(p.loc), q.log_prob(p.loc))
    assert_close(same.entropy(), q.entropy())
    assert_close(kl_divergence(same, p), kl_divergence(q, p))
    assert_close(kl_divergence(p, same), kl_divergence(p, q))


# ---- linear regression


def one_sided(outputs):
    """A network whose one tensor is a row (several inputs) or a column (several outputs), without bias."""
    g = generator(4)
    inputs = 4 if outputs == 1 else 1
    x = torch.randn(12, inputs, generator=g) @ (torch.eye(inputs) + 0.5) + 0.3
    y = x @ torch.randn(inputs, outputs, generator=g) + 0.4 * torch.randn(12, outputs, generator=g)
    return Problem(
        lambda dropout=0.0: nn.Linear(inputs, outputs, bias=False),
        likelihoods.Gaussian(0.4, outputs),
        priors.normal(0.2, 0.9),
        TensorDataset(x, y),
        None,
        12,
    )


@pytest.mark.parametrize("outputs", [1, 3])
def test_row_or_column_reaches_the_posterior_and_the_evidence(outputs):
    """A matrix of one row or column has a full covariance: the posterior is exact, the bound tight."""
    problem = one_sided(outputs)
    method = linear.optimise(MatrixNormalVI(problem, Settings()))
    exact = Linear(problem, LinearSettings())
    exact.finish_fit([Batch(*problem.train.tensors)])
    (q,) = method.posterior().values()
    covariance = torch.kron(*(f @ f.T for f in (q.row_tril, q.column_tril)))  # by rows: U (x) V
    assert_close(q.loc.flatten(), exact.mean, rtol=1e-4, atol=1e-5, check_dtype=False)
    assert_close(covariance.detach(), exact.scale_tril @ exact.scale_tril.T, rtol=1e-3, atol=1e-7)
    loss = sum(method.loss_terms(laws.in_double(Batch(*problem.train.tensors)), linear.exact_noise(method)))
    assert -loss.item() == pytest.approx(exact.log_evidence(), abs=1e-4)


def test_outputs_share_the_covariance_of_their_inputs():
    """With one noise and one prior scale the posterior of K outputs is a matrix normal, and is reached."""
    problem = replace(
        problems.linear(),
        network=lambda dropout=0.0: nn.Linear(3, 2, bias=False),
        prior=priors.normal(0.2, 0.9),
    )
    method = linear.optimise(MatrixNormalVI(problem, Settings()))
    exact = Linear(problem, LinearSettings())
    exact.finish_fit([Batch(*problem.train.tensors)])
    (q,) = method.posterior().values()
    covariance = torch.kron(*(f @ f.T for f in (q.row_tril, q.column_tril)))
    assert_close(covariance.detach(), exact.scale_tril @ exact.scale_tril.T, rtol=1e-3, atol=1e-6)
    loss = sum(method.loss_terms(laws.in_double(Batch(*problem.train.tensors)), linear.exact_noise(method)))
    assert -loss.item() == pytest.approx(exact.log_evidence(), abs=1e-4)


def test_biases_are_apart():
    """With a bias: a full covariance of the one row, an independent normal of the bias; the gap is known."""
    truth = linear.Truth()
    method = linear.optimise(MatrixNormalVI(truth.problem, Settings()))
    mean, variance = linear.flat(method.moments())
    blocks = [truth.precision[:3, :3], truth.precision[3:, 3:]]
    assert_close(mean, truth.mean, rtol=1e-4, atol=1e-5)
    expected = torch.cat([block.inverse().diagonal() for block in blocks])
    assert_close(variance, expected, rtol=1e-3, atol=1e-7)
    gap = 0.5 * (sum(map(torch.logdet, blocks)) - torch.logdet(truth.precision)).item()
    batch = laws.in_double(Batch(*truth.problem.train.tensors))
    loss = sum(method.loss_terms(batch, linear.exact_noise(method))).item()
    assert loss == pytest.approx(-truth.log_evidence() + gap, abs=1e-4)


@pytest.mark.slow
def test_training_reaches_the_posterior():
    """The engine's own noisy training ends near the optimum; tolerances are a few times what was seen."""
    problem = one_sided(1)
    settings = Settings(learning_rate=0.02, train_samples=16, initial_rho=-2.0)
    engine = Engine(MatrixNormalVI, settings, 0, trainer=TrainerOptions(accelerator="cpu"))
    mean, variance = linear.flat(engine.fit(problem, Budget(1000)).moments())
    exact = Linear(problem, LinearSettings())
    exact.finish_fit([Batch(*problem.train.tensors)])
    std = exact.scale_tril.square().sum(1).sqrt()
    assert ((mean - exact.mean).abs() < 0.5 * std).all()
    assert_close(variance.sqrt(), std, rtol=0.25, atol=0)


# ---- the method


def test_start_is_mean_field():
    """Equal loss terms, draws and density for the same noise as mean-field VI itself."""
    problem = problems.residual()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        matrix = MatrixNormalVI(problem, Settings(initial_rho=-1.5)).double()
        torch.manual_seed(0)
        field = MFVI(problem, MFVISettings(initial_rho=-1.5)).double()
    batch = laws.in_double(Batch(*problem.train.tensors))
    noise = matrix.draw_noise(4, generator(2))
    for a, b in zip(matrix.loss_terms(batch, noise), field.loss_terms(batch, noise), strict=True):
        assert_close(a, b)
    draws = matrix.sample_weights(3, generator(3))
    for name, w in field.sample_weights(3, generator(3)).items():
        assert_close(draws[name], w)
    assert_close(matrix.log_prob(draws), field.log_prob(draws))


def test_diagonal_factors_are_independent_normals():
    """Diagonal U and V: density and divergence of normals of variance U_ii V_jj."""
    g = generator(7)
    rows, columns = torch.rand(3, generator=g).double() + 0.2, torch.rand(4, generator=g).double() + 0.2
    loc, value = torch.randn(2, 3, 4, generator=g).double()
    q = MatrixNormal(loc, rows.diag(), columns.diag())
    independent = priors.normal_tensor(loc, torch.outer(rows, columns))
    p = priors.normal(0.1, 0.6)({"w": loc})["w"]
    assert_close(q.log_prob(value), independent.log_prob(value))
    assert_close(kl_divergence(q, p), kl_divergence(independent.base_dist, p.base_dist).sum())


def test_prior_term_over_a_network():
    """Kernels, matrices and biases together, to N(0.1, 0.8^2): the sum of dense divergences."""
    problem = problems.cnn()
    method = method_of(problem)
    expected = 0.0
    for q in method.posterior().values():
        if isinstance(q, MatrixNormal):
            normal = dense(q)
        else:
            normal = MultivariateNormal(q.mean, scale_tril=q.stddev.diag())
        size = normal.loc.numel()
        prior = MultivariateNormal(torch.full((size,), 0.1).double(), 0.64 * torch.eye(size).double())
        expected = expected + kl_divergence(normal, prior)
    noise = method.draw_noise(2, generator())
    actual = method.loss_terms(laws.in_double(Batch(*problem.train.tensors)), noise)[1]
    assert_close(actual, expected)


def test_other_priors_are_sampled():
    """To a mixture of normals the prior term is the mean of log q - log p over the draws."""
    problem = replace(one_sided(1), prior=priors.scale_mixture(0.4, 0.8, 0.1))
    method = method_of(problem)
    noise = method.draw_noise(5, generator(1))
    q = dense(method.posterior()["weight"])
    draws = q.loc + noise["weight"][:, 0] @ q.scale_tril.T
    p = 0.4 * scipy.stats.norm.pdf(draws.detach(), 0, 0.8) + 0.6 * scipy.stats.norm.pdf(
        draws.detach(), 0, 0.1
    )
    expected = q.log_prob(draws) - torch.from_numpy(p).log().sum(1)
    actual = method.loss_terms(laws.in_double(Batch(*problem.train.tensors)), noise)[1]
    assert_close(actual, expected.mean(), rtol=1e-5, atol=1e-6)


def test_posterior_is_the_next_prior():
    """The second fit starts where the first ended and pays nothing there; elsewhere the dense divergence."""
    problem = problems.mlp()
    first = method_of(problem)
    batch = laws.in_double(Batch(*problem.train.tensors))
    following = replace(problem, prior=first.as_prior())
    second = MatrixNormalVI(following, Settings(), start=first).double()
    noise = second.draw_noise(1, generator())
    assert second.loss_terms(batch, noise)[1].item() == pytest.approx(0, abs=1e-3)
    second = method_of(following, initial_rho=-1.0)
    expected = 0.0
    old = first.posterior()
    for name, q in second.posterior().items():
        if isinstance(q, MatrixNormal):
            expected = expected + kl_divergence(dense(q), dense(old[name]))
        else:
            expected = expected + kl_divergence(q.base_dist, old[name].base_dist).sum()
    assert_close(second.loss_terms(batch, noise)[1], expected)


def test_initial_rho():
    """Every standard deviation starts at softplus(rho), shared evenly by rows and columns."""
    method = MatrixNormalVI(problems.cnn(), Settings(initial_rho=-5.0))
    for v in method.moments()[1].values():
        assert_close(v, torch.full_like(v, math.log1p(math.exp(-5)) ** 2))
    q = method.posterior()["0.weight"]
    assert_close(q.row_tril.diagonal()[:1], q.column_tril.diagonal()[:1])


def test_long_sides_are_refused_with_their_memory():
    """16 bytes x (rows^2 + columns^2)."""
    problem = replace(problems.mlp(), network=lambda **_: nn.Linear(6000, 3))
    with pytest.raises(UsageError) as info:
        MatrixNormalVI(problem, Settings())
    assert str(info.value) == (
        "matrix_normal_vi needs 0.6 GB for the factors of a matrix of 3 x 6,000 weights (with their "
        "gradients and two moments of Adam) and takes at most 5,000 rows or columns: take narrower layers"
    )
