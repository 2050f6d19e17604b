"""EWC: Fishers by hand and in closed form, and sequential diagonal Laplace on the linear-Gaussian model.

Statistical: the sampled Fisher is compared within 5 standard errors per number, passed by chance once in 1.7
million (normal approximation). Seeds are fixed.
"""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from conformance import laws, problems
from oracles import linear
from torch import nn
from torch.distributions import Normal
from torch.testing import assert_close
from torch.utils.data import TensorDataset

from bench import likelihoods, networks, priors
from bench.contract import Batch, Budget, Problem
from bench.divergence import is_normalised, log_prob
from bench.errors import UsageError
from bench.laws.cases import Case
from bench.methods import ewc
from bench.methods.ewc import EWC, Settings


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def method_of(problem, start=None, **values):
    """EWC in float64, its weights off their start."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        method = EWC(problem, Settings(**values), start).double()
        if start is None:
            with torch.no_grad():
                for p in method.parameters():
                    p += 0.3 * torch.randn_like(p)
    return method


def batch_of(method):
    return laws.in_double(Batch(*method.problem.train.tensors))


def flat(weights):
    return torch.cat([w.flatten() for w in weights.values()])


def weights_of(method):
    return flat({n: p.detach() for n, p in method.network.named_parameters()})


def problem_of(likelihood, targets, outputs, inputs=3, hidden=(), rows=9):
    """A problem whose network has no hidden layer, unless asked for."""
    x = torch.randn(rows, inputs, generator=generator(3))
    network = partial(networks.mlp, inputs, outputs, hidden, "tanh")
    return Problem(network, likelihood, priors.normal(0.2, 0.7), TensorDataset(x, targets), None, rows)


def softmax_regression(rows=9):
    targets = torch.randint(4, (rows,), generator=generator(4))
    return problem_of(likelihoods.Categorical(), targets, 4, rows=rows)


def logistic_regression(rows=9):
    targets = torch.randint(2, (rows,), generator=generator(5))
    return problem_of(likelihoods.Bernoulli(), targets, 1, rows=rows)


def least_squares(rows=9, sigma=0.4):
    return problem_of(
        likelihoods.Gaussian(sigma, 2), torch.randn(rows, 2, generator=generator(6)), 2, rows=rows
    )


def own_noise(rows=9):
    """Regression where every value brings its standard deviation."""
    targets = torch.randn(rows, 2, 2, generator=generator(7))
    targets[..., 1] = targets[..., 1].abs() + 0.2
    return problem_of(likelihoods.Gaussian("per_example", 2), targets, 2, rows=rows)


def closed_form(method):
    """Diagonal Fisher of a generalised linear model: sum_n J_oo(x_n) x_ni^2, weights `[out, in]`, biases.

    J_oo is p (1 - p) of each class or 1/sigma^2.
    """
    x, targets, _ = batch_of(method)
    with torch.no_grad():
        f = method.network(x)
    if isinstance(method.likelihood, likelihoods.Categorical):
        p = f.softmax(1)
        curvature = p * (1 - p)
    elif isinstance(method.likelihood, likelihoods.Bernoulli):
        curvature = f.sigmoid() * (1 - f.sigmoid())
    elif method.likelihood.per_example:
        curvature = targets[..., 1] ** -2
    else:
        curvature = torch.full_like(f, 0.4**-2)
    return torch.cat([(curvature.T @ x.square()).flatten(), curvature.sum(0)])


GENERALISED_LINEAR = [softmax_regression, logistic_regression, least_squares, own_noise]


# ---- the penalty


def test_penalty_by_hand():
    """(3/2) (2 * 0.5^2 + 0 * 1 + 4 * 1^2) = 6.75, of tensors and of dictionaries of tensors."""
    theta, star = torch.tensor([1.5, 2.0, -1.0]), torch.tensor([1.0, 3.0, 0.0])
    fisher = torch.tensor([2.0, 0.0, 4.0])
    assert ewc.penalty(theta, star, fisher, 3.0).item() == 6.75
    parts = [{"a": t[:2].reshape(2, 1), "b": t[2]} for t in (theta, star, fisher)]
    assert ewc.penalty(*parts, 3.0).item() == 6.75
    theta.requires_grad_()
    (slope,) = torch.autograd.grad(ewc.penalty(theta, star, fisher, 3.0), theta)
    assert_close(slope, 3 * fisher * (theta.detach() - star))


def test_first_fit_is_maximum_a_posteriori():
    """The prior term is minus the log density of the task's prior, normaliser included."""
    method = method_of(softmax_regression())
    prior_term = method.loss_terms(batch_of(method), {})[1]
    assert_close(prior_term, -Normal(0.2, 0.7).log_prob(weights_of(method)).sum())


@pytest.mark.parametrize("strength", [1.0, 2.5])
def test_second_fit_pays_the_penalty(strength):
    """NLL + (strength/2) sum F (theta - theta*)^2 + sum (theta - theta*)^2 / (2 * 0.7^2), not normalised."""
    first = method_of(softmax_regression(), strength=strength, fisher="exact")
    first.finish_fit([batch_of(first)])
    second = method_of(replace(softmax_regression(), prior=first.as_prior()), first, strength=strength)
    assert not is_normalised(second.prior)
    assert second.loss_terms(batch_of(second), {})[1].item() == pytest.approx(0, abs=1e-12)
    with torch.no_grad():
        for p in second.parameters():
            p += 0.3 * torch.randn(p.shape, generator=generator(8))
    theta, star = weights_of(second), weights_of(first)
    expected = ewc.penalty(theta, star, closed_form(first), strength) + ewc.penalty(
        theta, star, torch.full_like(star, 0.7**-2), 1.0
    )
    likelihood_term, prior_term = second.loss_terms(batch_of(second), {})
    assert_close(prior_term, expected, rtol=1e-6, atol=0)
    outputs = second.network(batch_of(second).inputs)
    assert_close(likelihood_term, nn.functional.cross_entropy(outputs, batch_of(second).targets) * 9)


# ---- Fishers


@pytest.mark.parametrize("make", GENERALISED_LINEAR)
def test_exact_fisher_is_the_closed_form(make):
    method = method_of(make(), fisher="exact")
    assert_close(flat(method.fisher_information([batch_of(method)])), closed_form(method))


@pytest.mark.parametrize("make", [*GENERALISED_LINEAR, problems.regression, problems.cnn, problems.residual])
def test_empirical_fisher_is_the_sum_of_squared_gradients(make):
    """Example by example, by autograd, on networks of every kind."""
    method = method_of(make(), fisher="empirical")
    batch = batch_of(method)
    expected = 0
    for x, y in zip(batch.inputs, batch.targets, strict=True):
        log_p = method.likelihood.log_prob(method.network(x[None])[None], y[None]).sum()
        gradients = torch.autograd.grad(log_p, list(method.network.parameters()))
        expected = expected + torch.cat([g.flatten() for g in gradients]).square()
    assert_close(flat(method.fisher_information([batch])), expected)


def test_empirical_fisher_by_hand():
    """Logistic regression through one weight, p = 1/2: ((y - p) x)^2 summed is (4 + 9 + 1)/4."""
    targets = torch.tensor([1, 0, 1])
    data = TensorDataset(torch.tensor([[2.0], [3.0], [-1.0]]), targets)
    network = partial(nn.Linear, 1, 1, bias=False)
    problem = Problem(lambda dropout=0.0: network(), likelihoods.Bernoulli(), priors.normal(), data, None, 3)
    method = EWC(problem, Settings())
    nn.init.zeros_(method.network.weight)
    fisher = method.fisher_information([Batch(*data.tensors)])["weight"]
    assert_close(fisher, torch.tensor([[3.5]]))


@pytest.mark.slow
@pytest.mark.parametrize("make", GENERALISED_LINEAR)
def test_sampled_fisher_is_the_exact_one_in_the_mean(make):
    method = method_of(make(), fisher="sampled")
    draws = torch.stack([flat(method.fisher_information([batch_of(method)])) for _ in range(800)])
    assert (draws.std(0) > 0).all()
    laws.assert_mean_is(draws, closed_form(method), errors=5, slack=0)


def test_sampled_fisher_follows_the_method_s_generator():
    method = method_of(softmax_regression(), fisher="sampled")
    state = method.generator.get_state()
    once, other = (flat(method.fisher_information([batch_of(method)])) for _ in range(2))
    method.generator.set_state(state)
    assert torch.equal(flat(method.fisher_information([batch_of(method)])), once)
    assert not torch.equal(once, other)


@pytest.mark.parametrize("fisher", ["empirical", "exact"])
def test_fisher_is_a_sum_over_examples(fisher, monkeypatch):
    """Twice the examples, twice the Fisher; batches and pieces of any size add up; weights count examples."""
    method = method_of(problems.mlp(), fisher=fisher)
    x, y, _ = batch_of(method)
    once = flat(method.fisher_information([Batch(x, y)]))
    split = [Batch(a, b) for a, b in zip(x.split(7), y.split(7), strict=True)]
    assert_close(flat(method.fisher_information(split)), once)
    monkeypatch.setattr(ewc, "_CPU_CHUNK", 3 * len(once))
    assert_close(flat(method.fisher_information([Batch(x, y)])), once)

    rows = torch.arange(20)
    counts = torch.where(rows < 6, 2.0, torch.where(rows < 9, 0.0, 1.0))
    doubled = method_of(
        problems.with_rows(problems.mlp(), rows.repeat_interleave(counts.long())), fisher=fisher
    )
    expected = flat(doubled.fisher_information([batch_of(doubled)]))
    assert_close(flat(method.fisher_information([Batch(x, y, counts)])), expected)
    twice = method_of(problems.with_rows(problems.mlp(), rows.repeat(2)), fisher=fisher)
    assert_close(flat(twice.fisher_information([batch_of(twice)])), 2 * once)


def test_fisher_has_the_scale_of_the_likelihood_term():
    """Where the likelihood counts other than the rows at hand, so does the Fisher."""
    method = method_of(problems.mlp())
    counts_more = method_of(replace(problems.mlp(), num_train=60))
    once, more = (flat(m.fisher_information([batch_of(m)])) for m in (method, counts_more))
    assert_close(more, 3 * once)


# ---- tasks in sequence


def halves():
    """The linear-Gaussian model in two tasks: designs `[n, 4]` and targets, and their problems."""
    truth = linear.Truth()
    parts = [slice(0, 6), slice(6, linear.ROWS)]
    x, y = truth.problem.train.tensors
    made = [replace(truth.problem, train=TensorDataset(x[p], y[p]), num_train=len(x[p])) for p in parts]
    return [(truth.design[p], truth.targets[p], problem) for p, problem in zip(parts, made, strict=True)]


def optimised(problem, start=None, **values):
    method = linear.optimise(EWC(problem, Settings(**values), start))
    method.finish_fit([batch_of(method)])
    return method


def ridge(x, y, precision, centre):
    """Mode of a linear-Gaussian likelihood under a normal prior of diagonal precision."""
    left = x.T @ x / linear.SIGMA**2 + torch.diag(precision)
    return torch.linalg.solve(left, x.T @ y / linear.SIGMA**2 + precision * centre)


@pytest.mark.parametrize("strength", [1.0, 0.4])
def test_sequence_is_diagonal_laplace(strength):
    """Every mode is a ridge solution around the last one, its precision the prior's plus all Fishers'.

    With strength 1 this is sequential Laplace with the diagonal of the Hessian, here |x_i|^2 / sigma^2.
    """
    centre = torch.full((4,), linear.MEAN, dtype=torch.float64)
    precision = torch.full((4,), linear.STD**-2, dtype=torch.float64)
    method = None
    tasks = halves()
    for x, y, problem in [*tasks, tasks[0]]:
        prior = method.as_prior() if method else problem.prior
        method = optimised(replace(problem, prior=prior), method, strength=strength, fisher="exact")
        centre = ridge(x, y, precision, centre)
        precision = precision + strength * x.square().sum(0) / linear.SIGMA**2
        assert_close(weights_of(method), centre, rtol=1e-5, atol=1e-6)
        penalties = method.as_prior()(dict(method.network.named_parameters()))
        assert_close(flat({n: p.precision for n, p in penalties.items()}), precision, rtol=1e-6, atol=0)
        assert_close(flat({n: p.loc for n, p in penalties.items()}), centre, rtol=1e-5, atol=1e-6)


def test_every_mode_keeps_its_penalty():
    """Value and gradient after two tasks: the prior around its mean, each Fisher around its own mode."""
    tasks, method, anchors = halves(), None, []
    for x, _, problem in tasks:
        prior = method.as_prior() if method else problem.prior
        method = optimised(
            replace(problem, prior=prior), method, strength=0.6, fisher="exact", anchors="every"
        )
        anchors.append((weights_of(method), x.square().sum(0) / linear.SIGMA**2))
    third = method_of(replace(tasks[0][2], prior=method.as_prior()), method, anchors="every")
    with torch.no_grad():
        third.network.weight += torch.tensor([[0.4, -0.3, 0.9]])
    theta = weights_of(third)
    value = (theta - linear.MEAN).square().sum() / (2 * linear.STD**2)
    slope = (theta - linear.MEAN) / linear.STD**2
    for mode, fisher in anchors:
        value = value + 0.6 / 2 * (fisher * (theta - mode).square()).sum()
        slope = slope + 0.6 * fisher * (theta - mode)
    prior_term = third.loss_terms(batch_of(third), {})[1]
    assert_close(prior_term, value, rtol=1e-6, atol=1e-9)
    gradient = torch.autograd.grad(prior_term, list(third.network.parameters()))
    assert_close(torch.cat([g.flatten() for g in gradient]), slope, rtol=1e-5, atol=1e-8)
    assert (anchors[0][0] - anchors[1][0]).abs().max() > 0.05


def test_one_task_has_one_anchor():
    """After the first task the two settings differ by the centre of the first prior alone."""
    problem = halves()[0][2]
    last, every = (optimised(problem, fisher="exact", anchors=a) for a in ("last", "every"))
    w = {
        n: torch.randn(3, *p.shape, generator=generator(9)).double()
        for n, p in every.network.named_parameters()
    }
    values = [log_prob(m.as_prior()(dict(m.network.named_parameters())), w) for m in (last, every)]
    vectors, mode = torch.cat([t.flatten(1) for t in w.values()], 1), weights_of(last)
    moved = [(vectors - c).square().sum(1) / (2 * linear.STD**2) for c in (mode, linear.MEAN)]
    assert_close(values[0] - values[1], moved[1] - moved[0], rtol=1e-5, atol=1e-6)


# ---- laws off the defaults


@pytest.mark.parametrize(
    "values",
    [{"fisher": "exact", "anchors": "every"}, {"fisher": "sampled", "strength": 3.0}],
    ids=["exact-every", "sampled"],
)
def test_laws(values, tmp_path):
    """State survives checkpoints, sequences go on."""
    case = Case(EWC, values, problems.mlp())
    laws.stopped_fit_goes_on(case, tmp_path / "stopped", None)
    laws.finished_fit_is_found_again(case, tmp_path / "finished")
    for problem in (problems.mlp, problems.cnn, problems.regression):
        laws.posterior_becomes_the_prior(case.on(problem()))


def test_third_fit_through_the_engine(tmp_path):
    """A sequence that is found again on disk goes on with the penalty that it had."""

    def sequence(folder):
        engine = Case(EWC, {"anchors": "every"}, problems.mlp()).engine(checkpoints=folder)
        method, prior = None, problems.mlp().prior
        for _ in range(3):
            method = engine.fit(replace(problems.mlp(), prior=prior), Budget(2, 8), start=method)
            prior = method.as_prior()
        return method

    once, again = sequence(tmp_path), sequence(tmp_path)
    for name, value in once.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])
    assert (once.quadratic[1] > 0.8**-2).all()


# ---- refusals


def test_other_priors_are_refused():
    with pytest.raises(UsageError, match=r"^ewc needs a prior of independent normals"):
        EWC(replace(problems.mlp(), prior=priors.scale_mixture()), Settings())


def test_unknown_likelihoods_have_the_empirical_fisher_alone():
    class Own(likelihoods.Likelihood):
        """Squared error on raw outputs."""

        def log_prob(self, outputs, targets):
            """Minus half the squared error."""
            return -0.5 * (outputs - targets).square().sum(-1)

        def predict(self, outputs):
            """Not needed here."""

    problem = replace(problems.linear(), likelihood=Own())
    for fisher in ("exact", "sampled"):
        with pytest.raises(UsageError, match=f"^ewc has no {fisher} Fisher for this likelihood"):
            EWC(problem, Settings(fisher=fisher))
    method = method_of(problem)
    x, y, _ = batch_of(method)
    residual = y - method.network(x).detach()
    expected = torch.cat([(residual.square().T @ x.square()).flatten(), residual.square().sum(0)])
    assert_close(flat(method.fisher_information([Batch(x, y)])), expected)


def test_learned_noise_enters_the_fisher():
    """Of regression with learned noise the exact Fisher has the noise that was learned."""
    method = method_of(problems.regression(), fisher="exact")
    fixed = method_of(replace(problems.regression(), likelihood=likelihoods.Gaussian(1.0, 2)), fisher="exact")
    fixed.network.load_state_dict(method.network.state_dict())
    with torch.no_grad():
        method.likelihood.log_sigma.fill_(math.log(0.5))
    once, unit = (flat(m.fisher_information([batch_of(m)])) for m in (method, fixed))
    assert_close(once, 4 * unit)
