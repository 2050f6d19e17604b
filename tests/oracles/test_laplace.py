"""Laplace against exact posteriors of linear models, brute-force curvature, and the exact evidence."""

import math
from dataclasses import replace

import numpy as np
import pytest
import scipy.optimize
import scipy.stats
import torch
from conformance import laws, problems
from oracles import linear
from torch import nn
from torch.distributions import MultivariateNormal
from torch.func import functional_call
from torch.testing import assert_close
from torch.utils.data import TensorDataset

from bench import likelihoods, priors
from bench.contract import JOINT, Batch, Budget, Problem
from bench.divergence import log_prob
from bench.engine.engine import Engine, TrainerOptions
from bench.errors import UsageError
from bench.methods import laplace
from bench.methods.laplace import Laplace, Settings
from bench.weights import ravel, unravel

CURVATURES = ["diagonal", "kronecker", "full"]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def method_of(problem, start=None, cls=Laplace, **values):
    """Untrained, in float64, weights moved off their start."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        method = cls(problem, Settings(**values), start).double()
        with torch.no_grad():
            for p in method.parameters():
                p += 0.3 * torch.randn_like(p)
    return method


def put(method, vector):
    """Sets all weights."""
    parameters = dict(method.network.named_parameters())
    with torch.no_grad():
        for name, value in unravel(vector[None].double(), parameters).items():
            parameters[name].copy_(value[0])
    return method


def batches_of(problem, sizes=(3, 2, 1)):
    """The training set in batches of these sizes, then the rest, in a random order and in float64."""
    tensors = problem.train.tensors
    rows = len(tensors[0])
    order = torch.randperm(rows, generator=generator(9)).split([*sizes, rows - sum(sizes)])
    return [Batch(*(t[i].double() if t.is_floating_point() else t[i] for t in tensors)) for i in order]


def finished(problem, start=None, cls=Laplace, at=None, **values):
    method = method_of(problem, start, cls, **values)
    if at is not None:
        put(method, at)
    method.finish_fit(batches_of(problem))
    return method


def covariance(method):
    """Of the draws, `[k, k]`: exact, since they are linear in their noise."""
    roots = [b.colour(torch.eye(b.size, dtype=torch.float64)) for b in method.blocks]
    root = torch.block_diag(*roots)
    return root.T @ root


def hessian(problem, outputs, targets, sigma=None):
    """Of one example's negative log likelihood in its outputs, by hand."""
    if isinstance(problem.likelihood, likelihoods.Categorical):
        p = outputs.softmax(0)
        return p.diag() - p.outer(p)
    if isinstance(problem.likelihood, likelihoods.Bernoulli):
        return (outputs.sigmoid() * (1 - outputs.sigmoid())).diag()
    return (sigma.expand_as(outputs) ** -2).diag()


def brute_force(method, weights=None, sigmas=None):
    """J^T H J over all weights, `[d, d]`, example by example."""
    problem = method.problem
    parameters = {name: p.detach() for name, p in method.network.named_parameters()}
    vector = torch.cat([p.flatten() for p in parameters.values()])
    total = torch.zeros(len(vector), len(vector), dtype=torch.float64)
    for i, x in enumerate(problem.train.tensors[0].double()):

        def outputs(v, x=x):
            tensors = {name: w[0] for name, w in unravel(v[None], parameters).items()}
            return functional_call(method.network, tensors, (x[None],))[0]

        jacobian = torch.autograd.functional.jacobian(outputs, vector)
        sigma = None if sigmas is None else sigmas[i]
        h = hessian(problem, outputs(vector), problem.train.tensors[1][i], sigma)
        total += (1.0 if weights is None else weights[i]) * jacobian.T @ h @ jacobian
    return total


def with_prior(ggn, std=0.8):
    return ggn + torch.eye(len(ggn), dtype=torch.float64) / std**2


def binary():
    """Two classes from vectors of 3, one logit."""
    x = torch.randn(14, 3, generator=generator(5))
    data = TensorDataset(x, (x[:, 0] > x[:, 1]).long())
    network = lambda dropout=0.0: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))  # noqa: E731
    return Problem(network, likelihoods.Bernoulli(), priors.normal(0, 0.8), data, None, 14)


class Recurrent(nn.Module):
    """A layer that is called twice, in place activations."""

    def __init__(self, inplace=True):
        super().__init__()
        self.first, self.again, self.act = nn.Linear(4, 5), nn.Linear(5, 5), nn.ReLU(inplace=inplace)
        self.last = nn.Linear(5, 3, bias=False)

    def forward(self, inputs):
        """Scores `[B, 3]`."""
        hidden = self.act(self.first(inputs))
        return self.last(self.act(self.again(self.act(self.again(hidden)))))


def recurrent():
    return replace(problems.mlp(), network=lambda dropout=0.0: Recurrent())


def per_example_noise():
    """Two outputs, each with an error of its own per example."""
    problem = problems.regression()
    x, y = problem.train.tensors
    sigma = 0.2 + torch.rand(y.shape, generator=generator(6))
    data = TensorDataset(x, torch.stack([y, sigma], -1))
    return replace(problem, likelihood=likelihoods.Gaussian("per_example"), train=data)


# ---- linear models


@pytest.mark.parametrize("curvature", ["kronecker", "full"])
def test_linear_regression_is_exact(curvature):
    """At the mode: the exact posterior's mean and covariance; with one output A (x) G is exact too."""
    truth = linear.Truth()
    method = finished(truth.problem, at=truth.mean, curvature=curvature)
    assert_close(covariance(method), truth.precision.inverse())
    mean, variance = linear.flat(method.moments())
    assert_close(mean, truth.mean)
    assert_close(variance, truth.precision.inverse().diagonal())


def test_diagonal_is_the_inverse_of_the_precisions_diagonal():
    """And not the diagonal of the inverse."""
    truth = linear.Truth()
    method = finished(truth.problem, at=truth.mean)
    assert_close(covariance(method), (1 / truth.precision.diagonal()).diag())
    assert (covariance(method).diagonal() < 0.9 * truth.precision.inverse().diagonal()).any()


@pytest.mark.parametrize("curvature", CURVATURES)
def test_engine_reaches_the_posterior(curvature):
    """Trained on mini-batches in float32; tolerances are a few times what Adam's last steps leave."""
    truth = linear.Truth()
    settings = Settings(curvature=curvature, learning_rate=0.05)
    method = Engine(Laplace, settings, 0, trainer=TrainerOptions(accelerator="cpu")).fit(
        truth.problem, Budget(60, 5)
    )
    mean, variance = linear.flat(method.moments())
    assert ((mean - truth.mean).abs() < 0.5 * variance.sqrt()).all()
    expected = truth.precision.inverse().diagonal()
    if curvature == "diagonal":
        expected = 1 / truth.precision.diagonal()
    assert_close(variance, expected, rtol=1e-4, atol=0)


class FirstBatchOnly(Laplace):
    """Takes the curvature of one batch for that of the data."""

    def finish_fit(self, loader):
        """Forgets the other batches."""
        super().finish_fit(loader[:1])


class WithoutPrior(Laplace):
    """Leaves out the prior's precision."""

    def _prior_terms(self):
        return [t._replace(precision=torch.zeros_like(t.precision)) for t in super()._prior_terms()]


@pytest.mark.parametrize("broken", [FirstBatchOnly, WithoutPrior])
def test_negative_controls(broken):
    """Curvature of one batch, or no prior, is not the posterior."""
    truth = linear.Truth()
    method = finished(truth.problem, cls=broken, at=truth.mean, curvature="full")
    with pytest.raises(AssertionError, match="not close"):
        assert_close(covariance(method), truth.precision.inverse())


# ---- curvature


NETWORKS = {
    "categorical": problems.mlp,
    "bernoulli": binary,
    "cnn": problems.cnn,
    "skip": problems.residual,
    "called_twice": recurrent,
}


@pytest.mark.parametrize("curvature", ["diagonal", "full"])
@pytest.mark.parametrize("name", NETWORKS)
def test_curvature_is_brute_force(name, curvature):
    """Precision = sum over the examples of J^T H J, H by hand, plus the prior's."""
    problem = NETWORKS[name]()
    method = finished(problem, curvature=curvature)
    expected = with_prior(brute_force(method))
    if curvature == "diagonal":
        expected = expected.diagonal().diag()
    assert_close(covariance(method).inverse(), expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", ["categorical", "cnn", "called_twice"])
def test_layers_and_jacobians_agree(name):
    """The diagonal by layers, whose squares are summed without the gradients themselves, and by Jacobians."""
    problem = NETWORKS[name]()
    by_layers, by_jacobians = method_of(problem), method_of(problem)
    assert by_layers.layers
    by_jacobians.layers = None
    for method in (by_layers, by_jacobians):
        method.finish_fit(batches_of(problem))
    assert_close(covariance(by_layers), covariance(by_jacobians))


@pytest.mark.parametrize("noise", ["known", "learned", "per_example"])
@pytest.mark.parametrize("curvature", ["diagonal", "full"])
def test_curvature_under_gaussian_noise(noise, curvature):
    """H = diag(1 / sigma^2): one sigma, one per output, one per example and output."""
    problem = {
        "known": problems.known_noise,
        "learned": problems.regression,
        "per_example": per_example_noise,
    }[noise]()
    method = finished(problem, curvature=curvature)
    sigmas = {
        "known": torch.full((20, 2), 0.3).double(),
        "learned": method.likelihood.log_sigma.detach().exp().expand(20, 2),
        "per_example": problem.train.tensors[1][..., -1].double(),
    }[noise]
    expected = with_prior(brute_force(method, sigmas=sigmas))
    if curvature == "diagonal":
        expected = expected.diagonal().diag()
    assert_close(covariance(method).inverse(), expected, rtol=1e-6, atol=1e-9)


def one_example(problem):
    return replace(problem, train=TensorDataset(*(t[:1] for t in problem.train.tensors)), num_train=1)


def finish_whole(method):
    """One batch of all examples."""
    method.finish_fit(batches_of(method.problem, ()))
    return method


@pytest.mark.parametrize("name", ["categorical", "bernoulli"])
def test_kronecker_is_exact_for_one_example(name):
    """With one example A (x) G is the layer's block of J^T H J."""
    method = finish_whole(method_of(one_example(NETWORKS[name]()), curvature="kronecker"))
    exact = with_prior(brute_force(method))
    sizes = [b.size for b in method.blocks]
    assert len(sizes) > 1
    blocks = [exact[s - n : s, s - n : s] for s, n in zip(np.cumsum(sizes), sizes, strict=True)]
    assert_close(covariance(method).inverse(), torch.block_diag(*blocks), rtol=1e-7, atol=1e-9)


def test_kronecker_of_a_convolution():
    """By loops: A the mean of a a^T over 20 x 16 patches, G the sum of J^T H J over them."""
    problem = problems.cnn()
    method = finished(problem, curvature="kronecker")
    convolution, rest = method.network[0], method.network[1:]
    a_sum, g_sum = torch.zeros(10, 10).double(), torch.zeros(3, 3).double()
    for image in problem.train.tensors[0].double():
        activations = convolution(image[None]).detach()  # [1, 3, 4, 4]
        jacobian = torch.autograd.functional.jacobian(lambda h: rest(h)[0], activations)[:, 0]  # [C, 3, 4, 4]
        h = hessian(problem, rest(activations)[0].detach(), None)
        for i in range(4):
            for j in range(4):
                patch = torch.cat([image[0, i : i + 3, j : j + 3].flatten(), torch.ones(1).double()])
                a_sum += patch.outer(patch)
                g_sum += jacobian[:, :, i, j].T @ h @ jacobian[:, :, i, j]
    block = method.blocks[0]
    root = block.colour(torch.eye(block.size, dtype=torch.float64))
    as_matrices = block.matrix(torch.eye(block.size, dtype=torch.float64)).flatten(1)  # vector -> matrix
    expected = as_matrices @ torch.kron(g_sum, a_sum / 320).double() @ as_matrices.T
    assert_close((root.T @ root).inverse(), with_prior(expected), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("curvature", CURVATURES)
@pytest.mark.parametrize("make", [problems.mlp, problems.cnn])
def test_weights_count_examples(curvature, make):
    """Weight 2 is the example twice, weight 0 the example absent."""
    problem = make()
    rows = torch.arange(20)
    weights = torch.where(rows < 5, 2.0, torch.where(rows < 9, 0.0, 1.0))
    weighted = finished(problems.with_rows(problem, rows, weights), curvature=curvature)
    counted = finished(
        problems.with_rows(problem, rows.repeat_interleave(weights.long())), curvature=curvature
    )
    assert_close(covariance(weighted), covariance(counted))
    plain = finished(problem, curvature=curvature)
    assert not torch.allclose(covariance(weighted), covariance(plain))


def test_fractional_weights():
    """Weights multiply each example's J^T H J."""
    problem = problems.mlp()
    weights = torch.rand(20, generator=generator(7)) * 3
    method = finished(problems.with_rows(problem, torch.arange(20), weights), curvature="full")
    expected = with_prior(brute_force(method, weights.double()))
    assert_close(covariance(method).inverse(), expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("curvature", CURVATURES)
def test_last_layer(curvature):
    """Its block of the curvature, inverted on its own; elsewhere a point mass."""
    problem = one_example(problems.mlp())
    method = finish_whole(method_of(problem, curvature=curvature, weights="last_layer"))
    exact = with_prior(brute_force(method))[-18:, -18:]
    if curvature == "diagonal":
        exact = exact.diagonal().diag()
    assert_close(covariance(method).inverse(), exact, rtol=1e-7, atol=1e-9)
    variance = linear.flat(method.moments())[1]
    assert not variance[:-18].any()
    assert_close(variance[-18:], exact.inverse().diagonal())
    draws = ravel(method.sample_weights(5, generator()))
    assert_close(draws[:, :-18].std(0), torch.zeros(len(variance) - 18).double())
    assert (draws[:, -18:].std(0) > 0).all()


# ---- prior precision by the evidence


def ridge_problem(std, network=linear.network):
    return replace(linear.Truth().problem, prior=priors.normal(0, std), network=network)


def ridge_mode(truth, precision):
    curvature = truth.design.T @ truth.design / linear.SIGMA**2
    gradient = truth.design.T @ truth.targets / linear.SIGMA**2
    return torch.linalg.solve(curvature + precision * torch.eye(4, dtype=torch.float64), gradient)


@pytest.mark.parametrize("curvature", ["kronecker", "full"])
def test_tuning_finds_the_optimum_of_the_exact_evidence(curvature):
    """The precision that maximises log N(y | 0, sigma^2 I + X X^T / t) is found at its own mode."""
    truth = linear.Truth()
    x, y = truth.design.numpy(), truth.targets.numpy()

    def minus_evidence(log_precision):
        marginal = linear.SIGMA**2 * np.eye(len(y)) + math.exp(-log_precision) * x @ x.T
        return -scipy.stats.multivariate_normal.logpdf(y, np.zeros(len(y)), marginal)

    best = scipy.optimize.minimize_scalar(
        minus_evidence, bounds=(-6, 6), method="bounded", options={"xatol": 1e-10}
    )
    optimum = math.exp(best.x)
    assert 0.1 < optimum < 10
    problem = ridge_problem(optimum**-0.5)
    method = finished(problem, at=ridge_mode(truth, optimum), curvature=curvature, prior_precision="tuned")
    assert method.diagnostics() == {"prior_precision": pytest.approx(optimum, rel=1e-4)}


@pytest.mark.parametrize("curvature", CURVATURES)
@pytest.mark.parametrize("size", [0.05, 1.3])
def test_tuning_of_equal_curvatures_in_closed_form(curvature, size):
    """Orthogonal inputs, X^T X = 6 I, sigma 0.5: t^2 + h t = d h / |w|^2 with h = 24, d = 3; P = h + t."""
    q = torch.linalg.qr(torch.randn(8, 3, generator=generator(3)).double())[0].float() * 6**0.5
    data = TensorDataset(q, torch.zeros(8, 1))
    network = lambda dropout=0.0: nn.Linear(3, 1, bias=False)  # noqa: E731
    problem = Problem(network, likelihoods.Gaussian(0.5), priors.normal(0, 0.4), data, None, 8)
    method = method_of(problem, curvature=curvature, prior_precision="tuned")
    put(method, size * torch.tensor([1.0, -1, 2]))
    method.finish_fit(batches_of(problem, (3,)))
    h, squares = 24.0, 6 * size**2
    expected = (-h + math.sqrt(h**2 + 12 * h / squares)) / 2
    assert method.diagnostics()["prior_precision"] == pytest.approx(expected, rel=1e-5)
    variance = linear.flat(method.moments())[1]
    assert_close(variance, torch.full((3,), 1 / (h + expected)).double(), rtol=1e-5, atol=0)


def test_tuning_belongs_to_the_first_fit():
    """A fit that goes on adds to the precision that it was handed."""
    problem = ridge_problem(0.9)
    first = finished(problem, prior_precision="tuned")
    second = finished(replace(problem, prior=first.as_prior()), first, prior_precision="tuned")
    assert second.diagnostics() == {}
    alike = finished(replace(problem, prior=first.as_prior()), first)
    assert_close(covariance(second), covariance(alike))


@pytest.mark.parametrize("prior", [priors.normal(0.1, 1), priors.tight_normal()])
def test_tuning_refuses_other_priors(prior):
    with pytest.raises(UsageError, match="laplace: prior_precision tuned needs"):
        Laplace(linear.Truth(prior).problem, Settings(prior_precision="tuned"))


# ---- prior precision by validation


def validation_problem(precision):
    """Curvature 1 at w* = 0, and validation errors of the variance, 1 + 100 / (1 + t), that t predicts."""
    train = TensorDataset(torch.full((4, 1), 0.5), torch.zeros(4, 1))
    x = torch.tensor([[10.0], [-10], [10], [-10]])
    error = math.sqrt(1 + 100 / (1 + precision)) if precision < laplace.PRECISIONS[-1] else 0.0
    val = TensorDataset(x, error * torch.tensor([[1.0], [1], [-1], [-1]]))
    network = lambda dropout=0.0: nn.Linear(1, 1, bias=False)  # noqa: E731
    return Problem(network, likelihoods.Gaussian(1.0), priors.normal(0, 0.4), train, val, 4)


def validated(problem, **values):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # of the method's own generator
        method = put(Laplace(problem, Settings(prior_precision="validation", **values)), torch.zeros(1))
    method.finish_fit([Batch(*problem.train.tensors)])
    return method


def exact_choice(val):
    """The t of least -log N(y | 0, 1 + x^2 / (1 + t)), the predictive of w* = 0 and curvature 1."""
    x, y = (t.double() for t in val.tensors)
    scales = [(1 + x.square() / (1 + t)).sqrt() for t in laplace.PRECISIONS]
    nlls = [-torch.distributions.Normal(0.0, s).log_prob(y).sum() for s in scales]
    return laplace.PRECISIONS[int(torch.stack(nlls).argmin())]


@pytest.mark.parametrize("precision", [10.0, 1000.0, 1e8])
@pytest.mark.parametrize(
    "values", [{"curvature": "full"}, {"curvature": "kronecker", "predictive": "network"}, {}]
)
def test_validation_finds_the_least_of_the_exact_curve(values, precision, monkeypatch):
    """Neighbours on the grid have three times the variance, that of 400 draws errs by 7%; 1e8 is a point."""
    monkeypatch.setattr(laplace, "DRAWS", 400)
    problem = validation_problem(precision)
    assert exact_choice(problem.val) == pytest.approx(precision)
    method = validated(problem, **values)
    assert method.diagnostics() == {"prior_precision": pytest.approx(precision)}
    variance = linear.flat(method.moments())[1]
    assert_close(variance, torch.tensor([1 / (1 + precision)]).double(), rtol=1e-5, atol=0)


def test_training_examples_in_place_of_validation_choose_another():
    """Negative control: they lie on the line, and ask for a point."""
    problem = validation_problem(10.0)
    assert exact_choice(problem.train) == pytest.approx(1e8)
    assert validated(replace(problem, val=problem.train)).diagnostics()["prior_precision"] > 1e5  # in float32


def test_validation_passes_over_precisions_that_overflow():
    """Twenty layers of draws of standard deviation 100 are beyond float32."""
    network = lambda dropout=0.0: nn.Sequential(*(nn.Linear(8, 8) for _ in range(20)))  # noqa: E731
    x, y = torch.ones(4, 8), torch.zeros(4, 8)
    problem = replace(
        validation_problem(10.0), network=network, train=TensorDataset(x, y), val=TensorDataset(x, y)
    )
    method = Laplace(problem, Settings(prior_precision="validation", predictive="network"))
    with torch.no_grad():
        for p in method.network.parameters():
            p.zero_()
    method.finish_fit([Batch(x, y)])
    assert method.diagnostics()["prior_precision"] > 1


def test_validation_refuses_a_fit_without_validation_examples():
    """A later fit of a run, and a fitted method that is loaded, need none."""
    problem = validation_problem(10.0)
    settings = Settings(prior_precision="validation")
    engine = Engine(Laplace, settings, 0, trainer=TrainerOptions(accelerator="cpu"))
    with pytest.raises(UsageError, match=r"^laplace: .*--task\.validation 0\.2 .*task or tuned$"):
        engine.fit(replace(problem, val=None), Budget(1, 5))
    first = validated(problem)
    loaded = Laplace(replace(problem, val=None), settings)
    loaded.load_state_dict(first.state_dict())
    assert loaded.moments() == first.moments()
    assert loaded.diagnostics() == first.diagnostics()
    later = Laplace(replace(problem, val=None, prior=first.as_prior()), settings, first)
    assert later.spends(Budget(1, 5)) == Budget(1, 5)
    assert later.diagnostics() == {}


# ---- sequential


def halves(truth):
    x, y = truth.problem.train.tensors
    parts = [slice(0, 7), slice(7, None)]
    return [
        replace(truth.problem, train=TensorDataset(x[p], y[p]), num_train=len(x[p])) for p in parts
    ], parts


@pytest.mark.parametrize("curvature", CURVATURES)
def test_two_halves_are_the_whole(curvature):
    """Two fits in turn end at the exact posterior of all data; diagonal: precisions' diagonals add up."""
    truth = linear.Truth()
    (one, two), (part, _) = halves(truth)
    eye = torch.eye(4, dtype=torch.float64)
    x, y = truth.design[part], truth.targets[part]
    precision = x.T @ x / linear.SIGMA**2 + eye / linear.STD**2
    mode = torch.linalg.solve(precision, x.T @ y / linear.SIGMA**2 + linear.MEAN / linear.STD**2)
    first = finished(one, at=mode, curvature=curvature)
    second = method_of(replace(two, prior=first.as_prior()), first, curvature=curvature)
    if curvature == "diagonal":
        precision = precision.diagonal().diag()
        expected = truth.precision.diagonal().diag()
        x, y = truth.design[7:], truth.targets[7:]
        step = x.T @ x / linear.SIGMA**2 + precision
        final = torch.linalg.solve(step, x.T @ y / linear.SIGMA**2 + precision @ mode)
    else:
        expected, final = truth.precision, truth.mean
    put(second, final)
    (whole,) = batches_of(two, ())
    sum(second.loss_terms(whole, {})).backward()
    for p in second.network.parameters():
        assert_close(p.grad, torch.zeros_like(p), rtol=0, atol=1e-6)
    second.finish_fit([whole])
    assert_close(covariance(second), expected.inverse(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("weights", ["all", "last_layer"])
@pytest.mark.parametrize("curvature", CURVATURES)
def test_as_prior_is_the_posterior(curvature, weights):
    """Its log density is that of N(w*, covariance); outside the last layer that of the prior given."""
    method = finished(problems.mlp(), curvature=curvature, weights=weights)
    parameters = dict(method.network.named_parameters())
    size, chosen = sum(p.numel() for p in parameters.values()), len(covariance(method))
    mean, full = torch.full((size,), 0.1).double(), 0.64 * torch.eye(size, dtype=torch.float64)
    mean[-chosen:] = torch.cat([p.detach().flatten() for p in parameters.values()])[-chosen:]
    full[-chosen:, -chosen:] = covariance(method)
    prior = method.as_prior()(parameters)
    assert (JOINT in prior) is (curvature != "diagonal")
    if (curvature, weights) == ("full", "all"):
        assert isinstance(prior[JOINT], MultivariateNormal)
    points = mean + torch.randn(4, size, generator=generator(2)).double()
    expected = scipy.stats.multivariate_normal(mean.numpy(), full.numpy()).logpdf(points.numpy())
    assert_close(log_prob(prior, unravel(points, parameters)), torch.from_numpy(expected))


@pytest.mark.parametrize("weights", ["all", "last_layer"])
@pytest.mark.parametrize("curvature", ["diagonal", "full"])
def test_precision_accumulates(curvature, weights):
    """After a second fit: curvature at its own mode plus the first's precision."""
    problem = problems.mlp()
    values = {"curvature": curvature, "weights": weights}
    first = finished(problem, **values)
    vector = torch.cat([p.detach().flatten() for p in first.network.parameters()])
    second = finished(replace(problem, prior=first.as_prior()), first, at=vector + 0.2, **values)
    size = len(covariance(second))
    ggn = brute_force(second)[-size:, -size:]
    if curvature == "diagonal":
        ggn = ggn.diagonal().diag()
    expected = ggn + covariance(first).inverse()
    assert_close(covariance(second).inverse(), expected, rtol=1e-5, atol=1e-6)


def test_kronecker_keeps_the_trace_of_the_sum():
    """Without a common eigenbasis the sum's diagonal in another basis is kept: its trace is the sum's."""
    problem = problems.mlp()
    first = finished(problem, curvature="kronecker")
    vector = torch.cat([p.detach().flatten() for p in first.network.parameters()])
    alone = finished(problem, at=vector + 0.2, curvature="kronecker")
    second = finished(replace(problem, prior=first.as_prior()), first, at=vector + 0.2, curvature="kronecker")
    for a, b, c in zip(first.blocks, alone.blocks, second.blocks, strict=True):
        traces = [(block.std.square().reciprocal()).sum() for block in (a, b, c)]
        assert_close(traces[2], traces[0] + traces[1] - a.size / 0.64, rtol=1e-6, atol=0)
    assert isinstance(second.as_prior()(dict(second.network.named_parameters())), dict)


def test_kronecker_under_independent_normals():
    """A prior of another scale per tensor: the kept precision is the sum's diagonal in the kept basis."""
    problem = replace(problems.mlp(), prior=priors.tight_normal())
    method = finished(problem, curvature="kronecker")
    plain = finished(replace(problem, prior=priors.normal(0, 1)), curvature="kronecker")
    shift = 0
    for block, other in zip(method.blocks, plain.blocks, strict=True):
        basis = block.vector(
            torch.einsum("ai,bj->ijab", block.left, block.right).flatten(0, 1)
        )  # [k, k]: rows are the basis
        root = other.colour(torch.eye(other.size, dtype=torch.float64))
        dense = (root.T @ root).inverse() - torch.eye(other.size, dtype=torch.float64)
        stds = torch.cat([method.prior[n].stddev.flatten() for n in method.names]).double()
        dense += (stds[shift : shift + block.size] ** -2).diag()
        shift += block.size
        expected = (basis @ dense @ basis.T).diagonal()
        assert_close(block.std.square().reciprocal().flatten(), expected, rtol=1e-6, atol=1e-6)


# ---- draws


@pytest.mark.parametrize("curvature", CURVATURES)
def test_draws_have_the_covariance(curvature):
    """Mean and covariance of 20,000 draws within 5 standard errors. False alarm: 3 x 14 x 6e-7."""
    truth = linear.Truth()
    method = finished(truth.problem, at=truth.mean, curvature=curvature)
    draws = ravel(method.sample_weights(20000, generator(1))) - truth.mean
    laws.assert_mean_is(draws, 0.0, errors=5)
    products = (draws[:, :, None] * draws[:, None]).flatten(1)
    laws.assert_mean_is(products, covariance(method).flatten(), errors=5)


@pytest.mark.parametrize("curvature", CURVATURES)
def test_draws_do_not_depend_on_their_number(curvature):
    method = finished(problems.mlp(), curvature=curvature)
    few, many = (ravel(method.sample_weights(n, generator())) for n in (2, 5))
    assert_close(few, many[:2])


@pytest.mark.parametrize("curvature", CURVATURES)
def test_before_the_fit_ends_it_is_a_point_mass(curvature):
    method = method_of(problems.mlp(), curvature=curvature)
    mean, variance = linear.flat(method.moments())
    assert not variance.any()
    assert torch.equal(ravel(method.sample_weights(3, generator())), mean.expand(3, -1))


# ---- refusals, and the laws under other settings


def grouped(dropout=0.0):
    return nn.Sequential(nn.Conv2d(2, 2, 3, groups=2), nn.Flatten(), nn.Linear(32, 3))


@pytest.mark.parametrize(
    ("values", "changes", "reason"),
    [
        ({"curvature": "full"}, {"network": problems.large().network}, "10402 weights needs 4.3 GB"),
        ({"curvature": "kronecker"}, {"network": problems.residual().network}, "plain Linear or Conv2d"),
        ({"curvature": "kronecker"}, {"network": grouped}, "plain Linear or Conv2d"),
        (
            {"weights": "last_layer"},
            {"network": lambda dropout=0.0: nn.Conv2d(1, 1, 1)},
            "linear layer at the end",
        ),
        ({}, {"prior": priors.scale_mixture()}, "independent normals"),
    ],
)
def test_refusals(values, changes, reason):
    with pytest.raises(UsageError, match=f"^laplace: .*{reason}") as info:
        Laplace(replace(problems.mlp(), **changes), Settings(**values))
    assert "\n" not in str(info.value)


def test_posterior_of_other_settings_is_refused():
    """A Kronecker posterior is no prior of a diagonal fit, nor a full one of the last layer."""
    problem = problems.mlp()
    for before, after in (
        ({"curvature": "kronecker"}, {}),
        ({"curvature": "full"}, {"curvature": "kronecker"}),
        ({"curvature": "full", "weights": "last_layer"}, {"weights": "last_layer"}),
    ):
        prior = finished(problem, **before).as_prior()
        with pytest.raises(UsageError, match="independent normals, or a posterior of these settings"):
            Laplace(replace(problem, prior=prior), Settings(**after))


OTHERS = {
    "kronecker": {"curvature": "kronecker"},
    "full": {"curvature": "full"},
    "last_diagonal": {"weights": "last_layer"},
    "last_kronecker": {"weights": "last_layer", "curvature": "kronecker"},
    "last_full": {"weights": "last_layer", "curvature": "full"},
}


@pytest.mark.parametrize("problem", ["mlp", pytest.param("cnn", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", OTHERS)
def test_laws_under_other_settings(name, problem, tmp_path):
    """What the conformance suite checks under the defaults, where the covariance has another form."""
    case = laws.Case(Laplace, OTHERS[name], problems.PROBLEMS[problem]())
    laws.predictions_are_valid(case)
    laws.prediction_ignores_its_company(case)
    laws.prediction_follows_its_generator(case)
    laws.double_precision_is_kept(case)
    laws.posterior_becomes_the_prior(case)
    laws.finished_fit_is_found_again(case, tmp_path / "found")
    laws.stopped_fit_goes_on(case, tmp_path / "stopped", None)


@pytest.mark.parametrize("by", ["tuned", "validation"])
def test_laws_when_tuned(by, tmp_path):
    """A tuned precision survives checkpoints, and the next fit goes on."""
    problem = replace(problems.mlp(), prior=priors.normal(0, 0.8))
    case = laws.Case(Laplace, {"prior_precision": by}, problem)
    laws.posterior_becomes_the_prior(case)
    laws.finished_fit_is_found_again(case, tmp_path / "found")
    laws.stopped_fit_goes_on(case, tmp_path / "stopped", None)
