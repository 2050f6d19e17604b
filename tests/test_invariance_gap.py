"""The invariance gap: closed forms against dense normals, permanents against enumeration."""

import itertools
import math
import time

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal
from torch.distributions import MultivariateNormal, kl_divergence

from bench.errors import UsageError
from bench.runs import registry
from bench.studies import invariance
from bench.tasks.invariance_gap import InvarianceGap, linear_model

SIZES = (2, 4, 64)
NOISE, PRIOR_MEAN = 0.07, 0.4
TIGHT = {"rtol": 1e-9, "atol": 1e-9}


def dense(mean, covariance):
    """A normal of torch in float64, `[K]` and `[K, K]`."""
    return MultivariateNormal(
        *(torch.as_tensor(np.array(part), dtype=torch.float64) for part in (mean, covariance))
    )


def kl(first, second):
    """KL of two normals, by torch."""
    return kl_divergence(first, second).item()


class Reference:
    """The same model, written out: design `[N, K]`, dense precisions, numpy's inverse."""

    def __init__(self, size, prior_mean=PRIOR_MEAN):
        g = np.random.default_rng(size)
        self.size, self.observations = size, g.normal(1, 0.3, 7)
        self.variance, self.mean = 1.3 * size, np.full(size, prior_mean)
        design = np.full((7, size), 1 / size)
        self.prior = dense(self.mean, self.variance * np.eye(size))
        precision = design.T @ design / NOISE + np.eye(size) / self.variance
        self.covariance = np.linalg.inv(precision)
        self.posterior_mean = self.covariance @ (
            design.T @ self.observations / NOISE + self.mean / self.variance
        )
        self.posterior = dense(self.posterior_mean, self.covariance)
        marginal = NOISE * np.eye(7) + self.variance * design @ design.T
        self.log_evidence = multivariate_normal(design @ self.mean, marginal).logpdf(self.observations)
        self.model = linear_model(size, self.observations, NOISE, self.variance, prior_mean)

    def mean_field(self, theta):
        """q_0: the product of two normals per weight."""
        precision = 1 / self.variance + 1 / theta[1]
        mean = (self.mean / self.variance + theta[0] / theta[1]) / precision
        return dense(mean, np.eye(self.size) / precision)

    def mixed(self, theta):
        """q_mix: prior times the likelihood factor without its K - 1 directions of equal sum (eq. 14)."""
        ones = np.ones((self.size, self.size)) / (self.size * theta[1])
        covariance = np.linalg.inv(np.eye(self.size) / self.variance + ones)
        away = covariance @ ones @ (np.full(self.size, theta[0]) - self.mean)
        return dense(self.mean + away, covariance)


@pytest.fixture(params=SIZES)
def reference(request):
    return Reference(request.param)


def thetas(model):
    """The optima and two others."""
    return [
        model.theta_mixed,
        model.theta_mean_field,
        model.theta_mean_field_printed,
        (0.2, 3.0),
        (-5, 400.0),
    ]


# ---- the linear model


def test_posterior_and_evidence_are_those_of_the_dense_model(reference):
    model = reference.model
    np.testing.assert_allclose(model.posterior_mean, reference.posterior_mean, **TIGHT)
    np.testing.assert_allclose(model.posterior_covariance, reference.covariance, **TIGHT)
    assert model.posterior_variance == pytest.approx(reference.covariance[0, 0], rel=1e-9)
    assert model.log_evidence == pytest.approx(reference.log_evidence, rel=1e-9)


def test_divergences_and_bounds_are_those_of_dense_normals(reference):
    """KL(q_0 || q_mix), both KLs to the prior, and both bounds as log evidence minus KL to the posterior."""
    model = reference.model
    for theta in thetas(model):
        own, mix = reference.mean_field(theta), reference.mixed(theta)
        assert model.gap(theta) == pytest.approx(kl(own, mix), rel=1e-9, abs=1e-9)
        assert model.kl_mean_field(theta) == pytest.approx(kl(own, reference.prior), rel=1e-9)
        assert model.kl_mixed(theta) == pytest.approx(kl(mix, reference.prior), rel=1e-9, abs=1e-9)
        for found, q in ((model.elbo_mean_field(theta), own), (model.elbo_mixed(theta), mix)):
            assert found == pytest.approx(reference.log_evidence - kl(q, reference.posterior), rel=1e-9)
        assert model.elbo_mixed(theta) - model.elbo_mean_field(theta) == pytest.approx(
            model.gap(theta), rel=1e-6
        )


def test_both_approximations_predict_alike(reference):
    design = torch.full((reference.size,), 1 / reference.size, dtype=torch.float64)
    for theta in thetas(reference.model):
        for q in (reference.mean_field(theta), reference.mixed(theta)):
            assert reference.model.function(theta).mean == pytest.approx((design @ q.mean).item(), rel=1e-9)
            variance = (design @ q.covariance_matrix @ design).item()
            assert reference.model.function(theta).variance == pytest.approx(variance, rel=1e-9)


def test_optimum_of_the_mixed_bound_is_the_posterior(reference):
    model = reference.model
    assert kl(reference.mixed(model.theta_mixed), reference.posterior) == pytest.approx(0, abs=1e-9)
    assert model.elbo_mixed(model.theta_mixed) == pytest.approx(reference.log_evidence, rel=1e-9)


def test_optima_are_optima(reference):
    """No step of 1% in either number raises the bound; from the printed optimum one does."""
    model = reference.model
    for theta, bound in (
        (model.theta_mixed, model.elbo_mixed),
        (model.theta_mean_field, model.elbo_mean_field),
    ):
        for mean, variance in itertools.product((0.99, 1, 1.01), repeat=2):
            assert bound((mean * theta[0], variance * theta[1])) <= bound(theta) + 1e-9
    printed = model.theta_mean_field_printed
    assert model.elbo_mean_field(printed) < model.elbo_mean_field(model.theta_mean_field)


def test_a_hundred_thousand_weights_take_no_time():
    """All quantities in under a second; the dense covariance, of 80 GB, is refused in a line."""
    began = time.perf_counter()
    model = linear_model(100_000, np.ones(10), 1 / (2 * math.pi * math.e), 1e5)
    gaps = [model.gap(theta) for theta in thetas(model)]
    bounds = [(model.elbo_mean_field(t), model.elbo_mixed(t), model.function(t)) for t in thetas(model)]
    assert np.isfinite([*gaps, *(b for b, *_ in bounds), model.log_evidence, model.data_bound]).all()
    assert model.posterior_mean.shape == (100_000,)
    assert time.perf_counter() - began < 1
    with pytest.raises(UsageError, match="100,000 weights is written out up to 5,000"):
        _ = model.posterior_covariance


def test_claims_of_the_source():
    """Figs 1 and 2: the gap at theta_mix is linear in K; the fit returns to the prior, within the bound."""
    models = {
        k: linear_model(k, np.ones(10), 1 / (2 * math.pi * math.e), float(k)) for k in (10, 100, 1000, 10**5)
    }
    rise = {k: m.gap(m.theta_mixed) / (k - 1) for k, m in models.items()}
    assert max(rise.values()) == pytest.approx(min(rise.values()), rel=1e-9)
    shares = [m.function(m.theta_mean_field).variance for m in models.values()]
    assert shares == sorted(shares)
    assert shares[-1] > 0.99
    gaps = [m.gap(m.theta_mean_field) for m in models.values()]
    assert max(gaps) not in (gaps[0], gaps[-1])  # not monotone
    assert all(m.kl_mean_field(m.theta_mean_field) <= m.data_bound for m in models.values())
    assert models[1000].kl_mean_field(models[1000].theta_mixed) > models[1000].data_bound


@pytest.mark.parametrize(
    "arguments",
    [
        (0, [1.0], 1.0, 1.0),
        (2, [], 1.0, 1.0),
        (2, [np.nan], 1.0, 1.0),
        (2, [1.0], 0.0, 1.0),
        (2, [1.0], 1.0, np.inf),
    ],
)
def test_what_is_no_linear_model_is_one_line(arguments):
    with pytest.raises(UsageError, match=r"^a linear model needs"):
        linear_model(*arguments)


# ---- any inputs


@pytest.mark.parametrize("size", SIZES)
def test_node_at_any_inputs(size):
    """q_mix (eq. 23) is prior times the likelihood factor without the translations; the gap is torch's KL."""
    g = np.random.default_rng(size)
    inputs, mean, prior_mean = g.normal(size=(3, size))
    variances, prior = g.uniform(0.5, 2, (2, size))
    moves = invariance.translations(inputs)
    np.testing.assert_allclose(inputs @ moves, 0, atol=1e-12)
    inverse = np.diag(1 / variances)
    flat = inverse - inverse @ moves @ np.linalg.solve(moves.T @ inverse @ moves, moves.T @ inverse)
    covariance = np.linalg.inv(np.diag(1 / prior) + flat)
    found = invariance.mixed(inputs, mean, variances, prior_mean, prior)
    np.testing.assert_allclose(found.dense(), covariance, **TIGHT)
    np.testing.assert_allclose(found.mean, prior_mean + covariance @ flat @ (mean - prior_mean), **TIGHT)
    own_mean, own = invariance.mean_field(mean, variances, prior_mean, prior)
    gap = invariance.translation_gap(inputs, mean, variances, prior_mean, prior)
    assert gap == pytest.approx(kl(dense(own_mean, np.diag(own)), dense(found.mean, covariance)), rel=1e-9)


def test_inputs_of_one_are_the_linear_model_and_tied_variances_forget_the_inputs():
    model = linear_model(5, [1.0, 2.0], 0.3, 2.0, 0.1)
    ones, theta = np.ones(5), (0.7, 1.5)
    for inputs in (ones, np.array([3.0, -1, 0, 0.01, 2])):
        gap = invariance.translation_gap(inputs, 0.1 * ones, 1.5 * ones, 0.1 * ones, 2 * ones)
        assert gap == pytest.approx(model.gap(theta), rel=1e-12)
    found = invariance.mixed(ones, 0.7 * ones, 1.5 * ones, 0.1 * ones, 2 * ones)
    assert ones @ found.mean / 5 == pytest.approx(model.function(theta).mean, rel=1e-12)
    with pytest.raises(UsageError, match="an input other than 0"):
        invariance.mixed(0 * ones, ones, ones, ones, ones)


# ---- permutations


def enumerated(logs):
    """Log of the permanent of one matrix, by all permutations."""
    size = len(logs)
    terms = [math.fsum(logs[i, p[i]] for i in range(size)) for p in itertools.permutations(range(size))]
    return np.logaddexp.reduce(terms)


def test_permanent_is_the_sum_over_all_permutations():
    """Also far outside the range of a float."""
    g = np.random.default_rng(0)
    for size, scale, shift in ((1, 1, 0), (2, 1, 0), (5, 3, 0), (6, 1, -2000), (7, 0.1, 900)):
        logs = scale * g.normal(size=(2, size, size)) + shift
        np.testing.assert_allclose(invariance.log_permanent(logs), [*map(enumerated, logs)], rtol=1e-12)
    ones = invariance.log_permanent(np.zeros((1, 12, 12)))
    np.testing.assert_allclose(ones, math.lgamma(13), rtol=1e-12)


def test_bounds_hold_and_the_estimate_is_near():
    """200 matrices of 6 units; the estimate's relative error with 500 draws is below 0.1 for nearly all."""
    g = np.random.default_rng(1)
    logs = g.uniform(0.1, 4, (200, 1, 1)) * g.normal(size=(200, 6, 6))
    exact = invariance.log_permanent(logs)
    low, high = invariance.log_permanent_bounds(logs)
    assert (low <= exact + 1e-9).all()
    assert (exact <= high + 1e-9).all()
    estimate = invariance.log_permanent_estimate(logs, 500, torch.Generator().manual_seed(0))
    assert np.median(np.abs(estimate - exact)) < 0.05
    assert np.abs((estimate - exact).mean()) < 0.02


def test_gap_of_separated_units_is_log_factorial_and_of_equal_units_nothing():
    generator = torch.Generator().manual_seed(0)
    apart = 100 * np.arange(1.0, 6)[:, None] * np.ones((5, 2))
    for means, expected in ((apart, math.log(120)), (np.ones((5, 2)), 0.0)):
        logs = invariance.log_densities(means, np.ones((5, 2)), 20, generator)
        gap = invariance.permutation_gaps(logs, invariance.log_permanent(logs))
        assert gap.value == pytest.approx(expected, abs=1e-9)
        assert gap.error < 1e-9


def test_gap_of_two_units_is_that_of_quadrature():
    """Two units of one weight: KL of N(a, 1) x N(b, 1) to its mean with the exchange, on a fine grid."""
    x = np.linspace(-9, 9, 1201)
    own = np.exp(-0.5 * ((x[:, None] - 0.8) ** 2 + (x[None] + 0.4) ** 2)) / (2 * np.pi)
    expected = float((own * np.log(own / (0.5 * own + 0.5 * own.T))).sum() * (x[1] - x[0]) ** 2)
    generator = torch.Generator().manual_seed(0)
    logs = invariance.log_densities(np.array([[0.8], [-0.4]]), np.ones((2, 1)), 20_000, generator)
    gap = invariance.permutation_gaps(logs, invariance.log_permanent(logs))
    assert abs(gap.value - expected) < 4 * gap.error  # false alarm 6e-5
    assert gap.error < 0.01


# ---- the study


def test_sizes_go_from_two_to_the_largest():
    settings = registry.build(registry.task("invariance_gap").cls.settings_class, {}, "task")
    assert InvarianceGap(settings).sizes[:3] == [2, 3, 5]
    assert InvarianceGap(settings).sizes[-1] == 100_000
    smallest = registry.build(type(settings), {"num_weights": 2}, "task")
    assert InvarianceGap(smallest).sizes == [2]
