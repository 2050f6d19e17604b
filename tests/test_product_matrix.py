"""Product matrices in closed form: the recursion against enumeration and draws, modes, densities by depth."""

import itertools

import numpy as np
import pytest
import torch
from scipy import stats

from bench.errors import UsageError
from bench.studies import product
from bench.tasks.product_matrix import CHAINS, GRID, chi_squared, density, moments

CHAIN = [(3, 2), (2, 3), (3, 2), (2, 3)]


def layers(count, seed):
    """Means and variances of so many layers."""
    g = np.random.default_rng(seed)
    return [g.normal(size=s) for s in CHAIN[:count]], [g.uniform(0.1, 1, s) for s in CHAIN[:count]]


def drawn(means, variances, count, seed):
    """Products of normal layers, `[S, E]`."""
    generator = torch.Generator().manual_seed(seed)
    weights = [
        torch.tensor(m) + torch.tensor(v).sqrt() * torch.randn(count, *m.shape, generator=generator).double()
        for m, v in zip(means, variances, strict=True)
    ]
    return product.product(weights).flatten(1).numpy()


# ---- closed form


@pytest.mark.parametrize("count", [2, 3, 4])
def test_recursion_is_that_of_draws(count):
    """Within four standard errors at every entry: 21 or 36 pairs each, a false alarm in 0.2% of the seeds."""
    means, variances = layers(count, count)
    mean, covariance = moments(means, variances)
    draws = drawn(means, variances, 100_000, count)
    assert product.agreement(draws, mean.reshape(-1), covariance).within == 1
    error = draws.std(0) / len(draws) ** 0.5
    assert (np.abs(draws.mean(0) - mean.reshape(-1)) < 4 * error).all()


@pytest.mark.parametrize(
    "cheat",
    [
        lambda c: np.diag(np.diag(c)),  # no dependence between entries
        lambda c: c.reshape(2, 3, 2, 3)[:, ::-1, :, ::-1].reshape(6, 6),  # columns in another order
        lambda c: 1.05 * c,
    ],
    ids=["diagonal", "order", "scaled"],
)
def test_draws_catch_a_wrong_covariance(cheat):
    g = np.random.default_rng(7)
    means, variances = (
        [g.uniform(0.5, 2, s) for s in [(4, 3), (2, 4)]],
        [np.full((4, 3), 0.3), np.full((2, 4), 0.2)],
    )
    mean, covariance = moments(means, variances)
    draws = drawn(means, variances, 100_000, 7)
    assert product.agreement(draws, mean.reshape(-1), covariance).within == 1
    assert product.agreement(draws, mean.reshape(-1), cheat(covariance)).within < 0.9


def test_recursion_is_that_of_enumerated_two_point_weights():
    """Weights that are mean plus or minus sd: all 2^8 products, so no error but that of rounding."""
    g = np.random.default_rng(0)
    means, sds = [g.normal(size=(2, 2)) for _ in range(2)], [g.uniform(0.2, 1, (2, 2)) for _ in range(2)]
    signs = np.array(list(itertools.product((-1, 1), repeat=8))).reshape(-1, 2, 2, 2)
    draws = [((means[1] + sds[1] * s[1]) @ (means[0] + sds[0] * s[0])).reshape(-1) for s in signs]
    mean, covariance = moments(means, [sd**2 for sd in sds])
    np.testing.assert_allclose(mean.reshape(-1), np.mean(draws, 0), atol=1e-12)
    np.testing.assert_allclose(covariance, np.cov(np.transpose(draws), bias=True), atol=1e-12)


def test_one_layer_is_itself():
    mean, covariance = moments([np.eye(2)], [np.arange(4.0).reshape(2, 2)])
    np.testing.assert_array_equal(mean, np.eye(2))
    np.testing.assert_array_equal(covariance, np.diag(np.arange(4.0)))


def test_matrix_variate_normal_is_a_product_of_three():
    """Proposition 3: A, C fixed, B of unit variance: Cov vec(ABC) = (C^T C) kron (A A^T), by columns."""
    g = np.random.default_rng(1)
    a, b, c = g.normal(size=(3, 2)), g.normal(size=(2, 4)), g.normal(size=(4, 2))
    mean, covariance = moments([c, b, a], [np.zeros(c.shape), np.ones(b.shape), np.zeros(a.shape)])
    np.testing.assert_allclose(mean, a @ b @ c, atol=1e-12)
    by_columns = covariance.reshape(3, 2, 3, 2).transpose(1, 0, 3, 2).reshape(6, 6)
    np.testing.assert_allclose(by_columns, np.kron(c.T @ c, a @ a.T), atol=1e-12)


def test_every_pair_of_entries_can_depend_on_each_other_from_three_layers_on():
    """Proposition 2: with two, entries that share neither row nor column do not."""
    shape = (2, 2)
    for count, is_full in ((2, False), (3, True)):
        _, covariance = moments([np.ones(shape)] * count, [np.ones(shape)] * count)
        assert (covariance > 0).all() == is_full
        assert (product.sharing_nothing(covariance, 2) > 0) == is_full
    assert product.off_diagonal(np.eye(4)) == product.sharing_nothing(np.eye(4), 2) == 0


@pytest.mark.parametrize(
    ("means", "variances", "said"),
    [
        ([], [], "that fit each other"),
        ([np.ones((2, 3)), np.ones((2, 3))], [np.ones((2, 3))] * 2, "that fit each other"),
        ([np.ones((2, 3))], [np.ones((3, 2))], "that fit each other"),
        ([np.ones((2, 2))], [-np.ones((2, 2))], "0 or more"),
    ],
)
def test_what_is_no_product_is_one_line(means, variances, said):
    with pytest.raises(UsageError, match=said):
        moments(means, variances)


# ---- modes


@pytest.mark.parametrize(
    ("make", "is_multimodal"),
    [
        (lambda g: g.normal(size=3000), False),
        (lambda g: g.standard_t(3, 3000), False),  # heavy tails take two components
        (lambda g: g.uniform(size=3000), False),  # sharp edges take four, with valleys
        (lambda g: g.exponential(size=3000), False),
        (
            lambda g: np.concatenate([g.normal(size=1500), g.normal(1.8, 1, 1500)]),
            False,
        ),  # below 2 sd: one mode
        (lambda g: np.concatenate([g.normal(size=2000), g.normal(4, 1, 1000)]), True),
        (lambda g: np.concatenate([g.normal(0, 0.1, 500), g.normal(1, 1, 2500)]), False),  # a spike on a hill
        (lambda g: np.zeros(100), False),
    ],
)
def test_modes_are_those_of_the_density(make, is_multimodal):
    assert product.is_multimodal(make(np.random.default_rng(0))) == is_multimodal


def test_share_is_of_entries_spread_over_all():
    g = np.random.default_rng(0)
    two = np.concatenate([g.normal(size=(500, 4)), g.normal(6, 1, (500, 4))])
    draws = np.concatenate([two, g.normal(size=(1000, 4))], 1)
    assert product.multimodal_share(draws, 4) == 0.5


# ---- densities by depth


def test_density_of_one_matrix_is_normal_and_of_two_that_of_a_product():
    """Of 1 x 1 matrices the density of two is Bessel's; of many, variance and kurtosis are as scored."""
    np.testing.assert_allclose(density(np.ones((0, CHAINS))), stats.norm(0, 0.23).pdf(GRID), rtol=1e-9)
    generator = torch.Generator().manual_seed(0)
    x, width, depth = GRID[GRID > 0.03], 16, 7
    chains = chi_squared(width, depth - 1, generator)
    second = 0.23**2 * np.mean((0.23**2 * chains).prod(0))
    fourth = 3 * 0.23**4 * np.mean((0.23**4 * chains**2).prod(0))
    assert second == pytest.approx(0.23**2 * (width * 0.23**2) ** (depth - 1), rel=0.1)
    assert fourth / second**2 == pytest.approx(3 * (1 + 2 / width) ** (depth - 1), rel=0.2)
    from scipy.special import k0

    found = density(chi_squared(1, 1, generator))[GRID > 0.03]
    expected = k0(x / 0.23**2) / (np.pi * 0.23**2)
    near = expected > 0.01
    np.testing.assert_allclose(found[near], expected[near], rtol=0.15)


def test_heat_map_refuses_nothing_and_knows_entries_that_do_not_vary():
    covariance = np.diag([1.0, 0.0])
    np.testing.assert_array_equal(product.correlation(covariance), np.diag([1.0, 0.0]))
