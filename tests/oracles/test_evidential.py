"""Evidential losses against quadrature and scipy, draws against the distributions that they are of."""

import math
from dataclasses import replace

import pytest
import scipy.stats
import torch
from conformance import problems
from oracles.doubles import batch_of, off_start
from scipy.integrate import quad
from torch import nn
from torch.nn import functional
from torch.testing import assert_close

from bench import likelihoods
from bench.divergence import log_prob
from bench.errors import UsageError
from bench.methods import evidential
from bench.methods.evidential import Evidential, Settings


def method_of(problem, **values):
    """The method in float64, off its start."""
    return off_start(Evidential, problem, Settings(**values))


def row(*values):
    return torch.tensor([values], dtype=torch.float64)


# ---- classes


@pytest.mark.parametrize(("first", "second"), [(1.0, 1.0), (1.4, 3.2), (9.0, 2.5)])
def test_a_class_costs_its_expected_squared_error(first, second):
    """Of two classes, by quadrature over the beta distribution of the probability of the first."""
    density = scipy.stats.beta(first, second).pdf
    for target in (0, 1):
        expected = quad(lambda p, t=target: 2 * (1 - t - p) ** 2 * density(p), 0, 1)[0]
        found = evidential.class_losses(row(first, second), torch.tensor([target]), 0.0)
        assert found.item() == pytest.approx(expected, rel=1e-6)


def test_three_classes_cost_by_the_moments_of_a_dirichlet():
    """As scipy gives mean and variance."""
    alpha = [1.2, 4.0, 2.3]
    truth = scipy.stats.dirichlet(alpha)
    for target in range(3):
        squares = (torch.eye(3)[target].numpy() - truth.mean()) ** 2 + truth.var()
        found = evidential.class_losses(row(*alpha), torch.tensor([target]), 0.0)
        assert found.item() == pytest.approx(squares.sum(), rel=1e-6)


def test_only_wrong_evidence_is_drawn_to_none():
    """The KL to the uniform distribution by quadrature, its factor, and none of it for right evidence."""
    wrong = scipy.stats.beta(3.0, 1.0)  # evidence of the first class, where the second is true
    divergence = quad(lambda p: wrong.pdf(p) * wrong.logpdf(p), 0, 1)[0]
    for target, expected in ((1, divergence), (0, 0.0)):
        alpha = row(3.0, 1.0)
        free, half = (evidential.class_losses(alpha, torch.tensor([target]), f) for f in (0.0, 0.5))
        assert (half - free).item() == pytest.approx(0.5 * expected, abs=1e-7)


def test_the_factor_grows_over_ten_epochs():
    """From 0 by a tenth an epoch, then 1; without annealing it is 1."""
    method = method_of(problems.mlp())
    found = []
    for method.epoch in (0, 3, 10, 25):
        found.append(method.kl_factor)
    assert found == [0.0, 0.3, 1.0, 1.0]
    assert method_of(problems.mlp(), kl_annealing_epochs=0).kl_factor == 1


# ---- numbers


def test_a_number_costs_by_students_t():
    """-log density as scipy has it, and as quadrature over the variance; and the penalty by hand."""
    gamma, nu, alpha, beta, y = 0.3, 0.7, 2.4, 1.3, -0.9
    parts = [row(v) for v in (gamma, nu, alpha, beta)]
    scale = math.sqrt(beta * (1 + nu) / (nu * alpha))
    student = scipy.stats.t(2 * alpha, gamma, scale)

    def joint(v):
        """Inverse gamma density of a variance, times the normal's of the number given it."""
        shape = beta**alpha / math.gamma(alpha) * v ** (-alpha - 1) * math.exp(-beta / v)
        spread = v * (1 + 1 / nu)
        return shape * math.exp(-((y - gamma) ** 2) / (2 * spread)) / math.sqrt(2 * math.pi * spread)

    mixture = quad(joint, 0, math.inf)[0]
    found = evidential.number_losses(*parts, row(y), 0.0).item()
    assert found == pytest.approx(-student.logpdf(y), rel=1e-9)
    assert found == pytest.approx(-math.log(mixture), rel=1e-5)
    penalised = evidential.number_losses(*parts, row(y), 0.5).item()
    assert penalised - found == pytest.approx(0.5 * abs(y - gamma) * (2 * nu + alpha), rel=1e-9)


def test_parameters_are_in_their_ranges():
    """Of any outputs: alpha above 1, nu and beta above 0, and a class has at least 1."""
    outputs = torch.tensor([[-300.0, 0.0, 5.0, -300.0] * 2, [3.0, -300.0, -300.0, -300.0] * 2])
    gamma, nu, alpha, beta = evidential.normal_inverse_gamma(outputs)
    assert torch.equal(gamma, outputs[:, :2])
    assert (nu > 0).all()
    assert (alpha >= 1).all()
    assert (beta > 0).all()
    assert (evidential.concentrations(outputs) >= 1).all()


# ---- the method


@pytest.mark.parametrize("problem", [problems.mlp, problems.regression, problems.varying_noise])
def test_the_energy_is_the_weighted_sum_of_losses(problem):
    """Row by row from the network's outputs, times the weights, rescaled; the prior counts once."""
    problem = problem()
    method, batch = method_of(problem, evidence_weight=0.3), batch_of(problem)
    method.epoch = 4
    batch = batch._replace(weights=torch.linspace(0, 2, 20).double())
    method.problem = replace(problem, num_train=60)
    total = 0.0
    for x, y, weight in zip(*batch, strict=True):
        outputs = method.network(x[None])
        if method.is_of_classes:
            loss = evidential.class_losses(1 + functional.softplus(outputs), y[None], 0.4)
        else:
            k = outputs.shape[1] // 4
            gamma, nu, alpha, beta = (outputs[:, i * k : i * k + k] for i in range(4))
            raw = (functional.softplus(v) for v in (nu, alpha, beta))
            parts = [v + least for v, least in zip(raw, (1e-6, 1, 1e-6), strict=True)]
            loss = evidential.number_losses(gamma, *parts, y[None], 0.3)
        total = total + 3 * weight * loss.squeeze()
    loss_term, prior_term = method.energies(batch)
    assert_close(loss_term, total)
    weights = {name: p[None] for name, p in method.network.named_parameters()}
    assert_close(prior_term, -log_prob(method.prior, weights).sum())


@pytest.mark.parametrize("shape", [1.0, 1.6, 40.0])
def test_gamma_draws_are_of_their_shape(shape):
    """Kolmogorov and Smirnov's test on 20,000 draws; those of another shape fail it. False alarm: 1e-5."""
    kind = {"generator": torch.Generator().manual_seed(2), "dtype": torch.float64}
    shapes = torch.tensor([[shape], [1.1 * shape]]).double()
    drawn = evidential.gamma_draws(shapes, *evidential.proposals(20_000, 1, kind))[..., 0].T
    p_values = [scipy.stats.kstest(d.numpy(), scipy.stats.gamma(shape).cdf).pvalue for d in drawn]
    assert p_values[0] > 1e-5
    assert p_values[1] < 1e-5


def test_class_draws_have_the_moments_of_a_dirichlet():
    """Mean and variance at two inputs over 4,000 draws. False alarm: 12 comparisons at 4.5 errors, 8e-5."""
    method, batch = method_of(problems.mlp()), batch_of(problems.mlp())
    drawn = method.predict(batch.inputs[:2], 4000, torch.Generator().manual_seed(1)).log_probs.exp()
    alpha = 1 + functional.softplus(method.network(batch.inputs[:2]))
    for b in range(2):
        truth = scipy.stats.dirichlet(alpha[b].detach().numpy())
        mean, variance = torch.from_numpy(truth.mean()), torch.from_numpy(truth.var())
        for values, expected in ((drawn[:, b], mean), ((drawn[:, b] - mean).square(), variance)):
            assert ((values.mean(0) - expected).abs() < 4.5 * values.std(0) / math.sqrt(4000)).all()


def test_two_classes_of_one_output_are_a_dirichlet():
    """The mean probability of class 1 over 4,000 draws, at 4.5 standard errors. False alarm: 5 x 7e-6."""
    problem = problems.pixel_line()
    method, batch = method_of(problem), batch_of(problem)
    drawn = method.predict(batch.inputs[:5], 4000, torch.Generator().manual_seed(1)).log_odds.sigmoid()
    alpha = 1 + functional.softplus(method.network(batch.inputs[:5]))
    expected = alpha[:, 1] / alpha.sum(1)
    assert ((drawn.mean(0) - expected).abs() < 4.5 * drawn.std(0) / math.sqrt(4000)).all()


def test_draws_of_numbers_mix_to_students_t():
    """The density of the mixture of 4,000 draws at five numbers. False alarm: 5 comparisons, 4e-5."""
    method, batch = method_of(problems.straight_line()), batch_of(problems.straight_line())
    inputs = batch.inputs[:1]
    drawn = method.predict(inputs, 4000, torch.Generator().manual_seed(1))
    gamma, nu, alpha, beta = (
        v.item() for v in evidential.normal_inverse_gamma(method.network(inputs).detach())
    )
    student = scipy.stats.t(2 * alpha, gamma, math.sqrt(beta * (1 + nu) / (nu * alpha)))
    for y in (-2.0, -0.5, 0.1, 0.8, 3.0):
        densities = (
            torch.distributions.Normal(drawn.mean, drawn.variance.sqrt()).log_prob(torch.tensor(y)).exp()
        )
        error = densities.std() / math.sqrt(4000)
        assert abs(densities.mean() - student.pdf(y)) < 4.5 * error


def test_noise_that_the_task_lets_learn_is_not_trained():
    """It has no part in the loss."""
    method = method_of(problems.regression())
    assert not any(p.requires_grad for p in method.likelihood.parameters())
    assert all(p.requires_grad for p in method.network.parameters())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"likelihood": likelihoods.MultiHead(1)}, "evidential needs classes of one head"),
        ({"likelihood": likelihoods.Gaussian("per_example")}, "evidential needs classes of one head"),
        (
            {
                "likelihood": likelihoods.Gaussian(0.3),
                "network": lambda dropout=0.0: nn.Sequential(nn.Linear(4, 3), nn.Tanh()),
            },
            "evidential needs a network whose outputs are those of a linear layer",
        ),
    ],
    ids=["heads", "noise of each", "no last layer"],
)
def test_what_has_no_such_distribution_is_refused(changes, says):
    """In one line."""
    with pytest.raises(UsageError, match=says):
        method_of(replace(problems.mlp(), **changes))
