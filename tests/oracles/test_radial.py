"""The radial posterior against normals, quadrature, Monte Carlo and the closed form of a linear model.

"False alarm" is the probability that a correct program fails a statistical test; seeds are fixed, so that a
test that passes keeps passing.
"""

import math
from itertools import pairwise

import numpy as np
import pytest
import scipy.integrate
import scipy.special
import scipy.stats
import torch
from oracles import linear
from torch import nn
from torch.distributions import Normal, kl_divergence
from torch.testing import assert_close

from bench import likelihoods, priors
from bench.contract import Batch, Budget
from bench.divergence import divergence
from bench.engine.engine import Engine, TrainerOptions
from bench.methods.radial import (
    Radial,
    RadialNormal,
    Settings,
    log_sphere,
    mean_log_radius,
)
from bench.methods.radial import radial_divergence as divergence_of_all
from bench.methods.radial import radial_noise as noise_of_all
from bench.priors import normal_tensor


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def random(*shape, seed=0):
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64)


def radial(*shape, seed=0):
    """A radial distribution off its standard form: every location and scale is different."""
    return RadialNormal(random(*shape, seed=seed), (0.5 * random(*shape, seed=seed + 100)).exp())


def assert_mean_is(samples, expected, errors=4.5, slack=1e-9):
    """The mean of the samples is `expected` within `errors` standard errors (4.5: false alarm 7e-6)."""
    error = samples.std(0) / len(samples) ** 0.5
    assert ((samples.mean(0) - expected).abs() <= errors * error + slack).all(), (
        f"{samples.mean(0)} +- {error} is not {expected}"
    )


def radial_divergence(q, p, noise):
    """Of a single tensor."""
    return divergence_of_all({"w": q}, {"w": p}, {"w": noise})


def radial_noise(num_samples, like, generator, exact_norm=True):
    """Of a single tensor."""
    return noise_of_all(num_samples, {"w": like}, generator, exact_norm)["w"]


def legendre(low, high, points):
    """Nodes and weights of Gauss-Legendre quadrature."""
    x, w = np.polynomial.legendre.leggauss(points)
    half = (high - low) / 2
    return torch.from_numpy(low + half * (x + 1)), torch.from_numpy(half * w)


def polar(q, integrand):
    """The integral of q(w) * integrand(w) over the plane, in polar coordinates around the location."""
    v, wv = legendre(0, 10**0.25, 100)
    u, wu = v**4, wv * 4 * v**3  # takes the sting out of log u at the origin
    angle = torch.arange(64, dtype=torch.float64) * (2 * math.pi / 64)
    direction = torch.stack([angle.cos(), angle.sin()], -1)  # [A, 2]
    w = q.loc + q.scale * (u[:, None, None] * direction)  # [U, A, 2]
    jacobian = u * q.scale.prod()
    values = q.log_prob(w).exp() * integrand(w)
    return ((wu * jacobian)[:, None] * values).sum() * (2 * math.pi / 64)


# ---- one dimension is the normal


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_weight_is_the_normal(shape):
    """With D = 1 density, entropy, moments and KL are those of the normal."""
    q = radial(*shape)
    normal = normal_tensor(q.loc, q.scale)
    w = torch.cat([random(7, *shape, seed=3), q.loc[None]])
    assert_close(q.log_prob(w), normal.log_prob(w))
    assert_close(q.entropy(), normal.entropy())
    assert_close(q.variance, normal.variance)
    p = normal_tensor(random(*shape, seed=5), random(*shape, seed=6).exp())
    expected = kl_divergence(normal.base_dist, p.base_dist).sum()
    assert_close(kl_divergence(q, p), expected)
    assert_close(divergence(q, p, w), expected)


def test_draws_of_one_weight_are_normal():
    """Kolmogorov-Smirnov against the normal's distribution. False alarm: 1e-5."""
    q = radial(1)
    w = q.rsample((20000,), generator(1))[:, 0].numpy()
    assert scipy.stats.kstest(w, scipy.stats.norm(q.loc.item(), q.scale.item()).cdf).pvalue > 1e-5


# ---- density and entropy


def test_sphere():
    """Circumference 2 pi, surface 4 pi, two points in one dimension."""
    for dimension, surface in ((1, 2), (2, 2 * math.pi), (3, 4 * math.pi), (4, 2 * math.pi**2)):
        assert log_sphere(dimension) == pytest.approx(math.log(surface))


def test_density_integrates_to_one_in_two_dimensions():
    """By quadrature in polar coordinates; the means and variances come out of the same integral."""
    q = radial(2)
    assert polar(q, lambda w: torch.ones(())).item() == pytest.approx(1, abs=1e-9)
    for i in range(2):
        mean = polar(q, lambda w, i=i: w[..., i])
        variance = polar(q, lambda w, i=i: (w[..., i] - q.loc[i]).square())
        assert_close(mean, q.mean[i])
        assert_close(variance, q.variance[i])
    product = polar(q, lambda w: (w - q.loc).prod(-1))
    assert product.item() == pytest.approx(0, abs=1e-12)


def test_density_integrates_to_one_in_three_dimensions():
    """By quadrature in spherical coordinates."""
    q = radial(3)
    u, wu = legendre(0, 10, 100)
    height, wh = legendre(-1, 1, 12)
    angle = torch.arange(24, dtype=torch.float64) * (2 * math.pi / 24)
    side = (1 - height.square()).sqrt()[:, None]
    direction = torch.stack([side * angle.cos(), side * angle.sin(), height[:, None].expand(-1, 24)], -1)
    density = q.log_prob(q.loc + q.scale * u[:, None, None, None] * direction).exp()
    weights = (wu * u.square())[:, None, None] * wh[:, None] * (2 * math.pi / 24) * q.scale.prod()
    assert (weights * density).sum().item() == pytest.approx(1, abs=1e-9)


def test_density_by_hand_in_weight_space():
    """By hand: log 2 - log(2 pi)/2 - u^2/2 - (D-1) log u - log S_D - sum log sigma."""
    q, w = radial(2, 3), random(2, 3, seed=9)
    u = np.linalg.norm(((w - q.loc) / q.scale).numpy())
    surface = 2 * math.pi**3 / math.gamma(3)
    expected = (
        scipy.stats.halfnorm.logpdf(u) - 5 * math.log(u) - math.log(surface) - q.scale.log().sum().item()
    )
    assert q.log_prob(w).item() == pytest.approx(expected, rel=1e-12)


def test_density_has_a_pole_at_its_location():
    """Infinite for D > 1, never NaN."""
    q = radial(2)
    assert q.log_prob(q.loc).item() == math.inf
    assert q.log_prob(q.loc.expand(3, 2)).tolist() == [math.inf] * 3


@pytest.mark.parametrize("shape", [(), (5,), (2, 3)])
def test_log_prob_keeps_the_sample_shape(shape):
    """One number per sample; `expand` knows no batch."""
    q = radial(*shape)
    assert q.log_prob(q.rsample((4, 2), generator())).shape == (4, 2)
    assert q.event_shape == torch.Size(shape)
    with pytest.raises(ValueError, match="no batch dimensions"):
        q.expand(torch.Size([2]))


def test_entropy_by_quadrature():
    """-integral of q log q in two dimensions."""
    q = radial(2)
    expected = -polar(q, q.log_prob)
    assert q.entropy().item() == pytest.approx(expected.item(), abs=1e-8)


@pytest.mark.parametrize("dimension", [1, 2, 7, 1000])
def test_entropy_by_monte_carlo(dimension):
    """-E log q over draws. False alarm: 7e-6 each."""
    q = radial(dimension)
    assert_mean_is(-q.log_prob(q.rsample((4000,), generator(2))), q.entropy())


def test_entropy_gradient_is_that_of_the_log_scales():
    """1 / sigma for every weight."""
    scale = random(5).exp().requires_grad_()
    RadialNormal(torch.zeros(5, dtype=torch.float64), scale).entropy().backward()
    assert_close(scale.grad, 1 / scale.detach())


# ---- draws


def test_draws_have_covariance_scale_squared_over_dimension():
    """Cov = diag(scale^2)/D, elementwise. False alarm: 21 x 6e-7."""
    q = radial(6)
    w = q.rsample((40000,), generator(3)) - q.loc
    products = w[:, :, None] * w[:, None, :]
    assert_mean_is(products, torch.diag(q.scale.square() / 6), errors=5)
    assert_mean_is(w, torch.zeros(()), errors=5)


def test_radius_is_half_normal():
    """The distance from the mean in units of scale is |N(0, 1)| whatever D. False alarm: 1e-5 each."""
    for dimension in (1, 3, 500):
        q = radial(dimension)
        u = ((q.rsample((5000,), generator(4)) - q.loc) / q.scale).norm(dim=1)
        assert scipy.stats.kstest(u.numpy(), scipy.stats.halfnorm.cdf).pvalue > 1e-5


def test_distance_between_draws():
    """E|w - w'| = scale sqrt(pi/2) in high dimension (Farquhar 2022, 4.2); no bubble. False alarm: 7e-6."""
    q = RadialNormal(torch.zeros(20000), torch.full((20000,), 0.3))
    w = q.rsample((2000,), generator(5)).double()
    assert_mean_is((w[::2] - w[1::2]).norm(dim=1), 0.3 * math.sqrt(math.pi / 2), slack=1e-3)


def test_marginal_in_ten_dimensions():
    """One weight has the distribution of e_1 r: an integral over e_1, by quadrature. False alarm: 1e-5."""
    t, wt = np.polynomial.legendre.leggauss(400)
    share = wt * (1 - t**2) ** ((10 - 3) / 2)
    share /= share.sum()
    q = RadialNormal(torch.full((10,), 0.7).double(), torch.full((10,), 0.4).double())

    def cdf(x):
        return (share * scipy.stats.norm.cdf((x[:, None] - 0.7) / (0.4 * np.abs(t)))).sum(1)

    w = q.rsample((10000,), generator(6))[:, 3].numpy()
    assert scipy.stats.kstest(w, cdf).pvalue > 1e-5
    assert scipy.stats.kurtosis(w) > 1, "a normal marginal would have none"


def test_approximate_norm_has_the_same_covariance():
    """Dividing by sqrt(D) in place of the norm keeps variance 1/D. False alarm: 40 x 6e-7."""
    for exact in (True, False):
        noise = radial_noise(20000, torch.zeros(4, 5, dtype=torch.float64), generator(7), exact)
        assert_mean_is(noise.square(), torch.full((4, 5), 1 / 20).double(), errors=5)
    exact, rough = (radial_noise(3, torch.zeros(4), generator(8), e) for e in (True, False))
    assert not torch.equal(exact, rough)


# ---- divergence to a normal


def test_divergence_to_a_normal_by_quadrature():
    """The closed form against integrals of q (log q - log p) in one and two dimensions."""
    q, p = radial(1), normal_tensor(random(1, seed=5), random(1, seed=6).exp())
    a, b = scipy.stats.norm(q.loc.item(), q.scale.item()), scipy.stats.norm(p.mean.item(), p.stddev.item())
    expected, _ = scipy.integrate.quad(
        lambda x: a.pdf(x) * (a.logpdf(x) - b.logpdf(x)), *a.interval(1 - 1e-15)
    )
    assert kl_divergence(q, p).item() == pytest.approx(expected, rel=1e-7)
    q, p = radial(2), normal_tensor(random(2, seed=5), random(2, seed=6).exp())
    expected = polar(q, lambda w: q.log_prob(w) - p.log_prob(w))
    assert kl_divergence(q, p).item() == pytest.approx(expected.item(), abs=1e-7)


@pytest.mark.parametrize("shape", [(50,), (5, 10)])
def test_divergence_to_a_normal_by_monte_carlo(shape):
    """E[log q - log p] over draws, in 50 dimensions. False alarm: 7e-6 each."""
    q, p = radial(*shape), normal_tensor(random(*shape, seed=5), random(*shape, seed=6).exp())
    w = q.rsample((20000,), generator(9))
    assert_mean_is(q.log_prob(w) - p.log_prob(w), kl_divergence(q, p))


def test_divergence_to_a_normal_is_least_at_scale_sqrt_dimension():
    """The optimum is loc = m0, scale = s0 sqrt(D): no gradient there, larger values beside."""
    ones, s0 = torch.ones(30, dtype=torch.float64), 1.3
    m0 = 0.4 * ones
    p = normal_tensor(m0, s0 * ones)
    loc, scale = m0.clone().requires_grad_(), (s0 * math.sqrt(30) * ones).requires_grad_()
    least = kl_divergence(RadialNormal(loc, scale), p)
    least.backward()
    assert_close(loc.grad, torch.zeros_like(loc), rtol=0, atol=1e-12)
    assert_close(scale.grad, torch.zeros_like(loc), rtol=0, atol=1e-12)
    for factor in (0.95, 1.05):
        assert kl_divergence(RadialNormal(m0, factor * scale.detach()), p) > least
    assert kl_divergence(RadialNormal(m0 + 0.05, scale.detach()), p) > least


def test_divergence_to_other_families_is_monte_carlo():
    """A scale mixture has no closed form: the mean over the draws."""
    q, p = radial(3), priors.scale_mixture()({"w": torch.zeros(3)})["w"]
    w = q.rsample((5,), generator())
    assert_close(divergence(q, p, w), (q.log_prob(w) - p.log_prob(w)).mean())


# ---- divergence to a radial prior


def log_radius_by_quadrature(a, b, c):
    """E 1/2 log(a + 2 r b + r^2 c), scipy, split where the integrand is steep."""
    centre = -b / c
    height = math.sqrt(max(a * c - b * b, 0)) / c

    def integrand(r):
        return scipy.stats.norm.pdf(r) * 0.5 * math.log(((r - centre) ** 2 + height**2) * c)

    edges = {-12.0, 12.0}
    for width in (0, 1e-6, 1e-4, 1e-2, 0.3, 1, 3):
        edges |= {e for e in (centre - width, centre + width) if -12 < e < 12}
    edges = sorted(edges)
    kind = {"limit": 500, "epsabs": 1e-13, "epsrel": 1e-12}
    return sum(scipy.integrate.quad(integrand, x, y, **kind)[0] for x, y in pairwise(edges))


CASES = {
    "ordinary": (1.3, 0.4, 0.8),
    "negative b": (1.3, -0.4, 0.8),
    "far": (400.0, 3.0, 1.0),
    "very far": (1e6, -200.0, 0.5),
    "tiny a": (1e-10, 0.0, 0.7),
    "small a": (1e-4, 5e-3, 0.7),
    "parallel": (0.49, 0.7 * (1 - 1e-9), 1.0),
    "nearly parallel": (0.49, -0.7 * (1 - 1e-5), 1.0),
    "parallel and far": (9.0, 3 * (1 - 1e-10), 1.0),
    "large c": (0.5, 3.0, 400.0),
    "small c": (0.5, 1e-3, 1e-4),
}


@pytest.mark.parametrize("case", CASES)
def test_mean_log_radius_by_quadrature(case):
    """E log|x + r y| against scipy, near the singularities too."""
    values = torch.tensor(CASES[case], dtype=torch.float64)[:, None]
    actual = mean_log_radius(*values).item()
    assert actual == pytest.approx(log_radius_by_quadrature(*CASES[case]), rel=1e-6, abs=2e-6)


def test_mean_log_radius_of_parallel_vectors_is_finite():
    """With y = k x rounding puts b^2 on either side of a c: value and gradients stay finite."""
    x, k = random(2000, seed=20), random(2000, seed=21)
    leaves = [v.clone().requires_grad_() for v in (x * x, k * x * x, (k * x).square())]
    values = mean_log_radius(*leaves)
    values.sum().backward()
    assert values.isfinite().all()
    assert all(leaf.grad.isfinite().all() for leaf in leaves)
    assert values[0].item() == pytest.approx(
        log_radius_by_quadrature(*(v[0].item() for v in leaves)), abs=2e-6
    )


def test_mean_log_radius_without_shift():
    """At x = 0 it is log|y| + E log|r|, E log|r| = -(gamma + log 2)/2."""
    zero, c = torch.zeros(1), torch.tensor([0.7])
    expected = 0.5 * math.log(0.7) - 0.5 * (np.euler_gamma + math.log(2))
    assert mean_log_radius(zero, zero, c).item() == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize(
    "case", ["ordinary", "negative b", "far", "small a", "nearly parallel", "large c", "small c"]
)
def test_gradient_of_mean_log_radius_by_finite_differences(case):
    """Derivatives in a, b and c against central differences of scipy's integral."""
    leaves = [torch.tensor([v], dtype=torch.float64, requires_grad=True) for v in CASES[case]]
    mean_log_radius(*leaves).sum().backward()
    a, b, c = CASES[case]
    room = (a * c - b * b) / max(a, c, 2 * abs(b))  # how far a step may go and keep a c > b^2
    for i, leaf in enumerate(leaves):
        step = min(1e-3 * max(abs(CASES[case][i]), 1e-2), 0.02 * room)
        up, down = (
            log_radius_by_quadrature(*(v + s * (i == j) for j, v in enumerate((a, b, c))))
            for s in (step, -step)
        )
        expected = (up - down) / (2 * step)
        assert leaf.grad.item() == pytest.approx(expected, rel=2e-3, abs=1e-6), "abc"[i]


def shifted(shift, dimension=12, seed=0):
    """Posterior and prior whose locations are `shift` prior scales apart, with different scales."""
    p = radial(dimension, seed=seed)
    direction = random(dimension, seed=seed + 50)
    loc = p.loc + shift * p.scale * direction / direction.norm()
    return RadialNormal(loc, p.scale * (0.4 * random(dimension, seed=seed + 60)).exp()), p


@pytest.mark.slow
@pytest.mark.parametrize("dimension", [1, 2, 12])
@pytest.mark.parametrize("shift", [0.0, 0.01, 0.5, 3.0, 20.0])
def test_radial_divergence_is_unbiased(shift, dimension):
    """Equal in the mean to log q - log p over draws, and with less variance. False alarm: 7e-6 each."""
    q, p = shifted(shift, dimension)
    w = q.rsample((20000,), generator(10))
    plain = q.log_prob(w) - p.log_prob(w)
    noise = radial_noise(1500, q.loc, generator(11))
    estimates = torch.stack([radial_divergence(q, p, n[None]) for n in noise])
    error = (plain.var() / len(plain) + estimates.var() / len(estimates)).sqrt()
    assert abs(plain.mean() - estimates.mean()) <= 4.5 * error + 1e-6
    assert estimates.var() < 0.5 * plain.var() + 1e-12


@pytest.mark.parametrize("dimension", [1, 2])
def test_radial_divergence_is_finite_in_single_precision(dimension):
    """In float32 and few dimensions shift and direction are often parallel: no NaN in 500 pairs."""
    for seed in range(500):
        q, p = (RadialNormal(d.loc.float(), d.scale.float()) for d in shifted(0.7, dimension, seed))
        loc = q.loc.clone().requires_grad_()
        value = radial_divergence(RadialNormal(loc, q.scale), p, radial_noise(2, q.loc, generator(seed)))
        value.backward()
        assert value.isfinite()
        assert loc.grad.isfinite().all()


def test_radial_divergence_averages_over_the_samples():
    """S directions give the mean of the S estimates of one direction each."""
    q, p = shifted(1.0)
    noise = radial_noise(6, q.loc, generator(12))
    singles = torch.stack([radial_divergence(q, p, n[None]) for n in noise])
    assert_close(radial_divergence(q, p, noise), singles.mean())


@pytest.mark.parametrize("dimension", [1, 3, 1000])
def test_radial_divergence_to_itself_is_zero(dimension):
    """At equal location and scale the divergence is 0 whatever the direction."""
    q = radial(dimension)
    noise = radial_noise(5, q.loc, generator(13))
    value = radial_divergence(q, RadialNormal(q.loc.clone(), q.scale.clone()), noise)
    assert value.item() == pytest.approx(0, abs=1e-7 * dimension)


def test_radial_divergence_at_equal_location_by_hand():
    """With scale k times the prior's: (k^2 - 1)/2 - log k, that of two normal radii, in any dimension."""
    p = radial(40)
    for k in (0.3, 2.0):
        q = RadialNormal(p.loc, k * p.scale)
        value = radial_divergence(q, p, radial_noise(3, q.loc, generator(14)))
        assert value.item() == pytest.approx((k**2 - 1) / 2 - math.log(k), abs=1e-5)


def test_radial_divergence_of_one_weight_is_that_of_normals():
    """With D = 1 there is one direction up to sign and the estimate is exact."""
    q, p = shifted(0.8, dimension=1)
    expected = kl_divergence(Normal(q.loc, q.scale), Normal(p.loc, p.scale)).sum()
    for seed in range(4):
        loc, scale = q.loc.clone().requires_grad_(), q.scale.clone().requires_grad_()
        value = radial_divergence(RadialNormal(loc, scale), p, radial_noise(1, q.loc, generator(seed)))
        assert_close(value, expected, rtol=1e-9, atol=1e-9)
        value.backward()
        assert_close(loc.grad, (q.loc - p.loc) / p.scale.square())
        assert_close(scale.grad, q.scale / p.scale.square() - 1 / q.scale)


@pytest.mark.parametrize("shift", [0.05, 1.0])
def test_gradient_of_radial_divergence_by_finite_differences(shift):
    """Gradients in location and scale for given directions."""
    q, p = shifted(shift, dimension=5)
    noise = radial_noise(3, q.loc, generator(15))
    loc, scale = q.loc.clone().requires_grad_(), q.scale.clone().requires_grad_()
    radial_divergence(RadialNormal(loc, scale), p, noise).backward()
    for name, leaf in (("loc", loc), ("scale", scale)):
        for i in range(5):
            values = []
            for step in (1e-5, -1e-5):
                moved = {"loc": q.loc.clone(), "scale": q.scale.clone()}
                moved[name][i] += step
                values.append(radial_divergence(RadialNormal(**moved), p, noise).item())
            assert leaf.grad[i].item() == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("dimension", [1, 50])
def test_gradient_of_radial_divergence_at_the_prior_is_finite(dimension):
    """The next fit starts at its prior, on the pole: the gradient is finite there, zero in the mean."""
    q = radial(dimension)
    loc, scale = q.loc.clone().requires_grad_(), q.scale.clone().requires_grad_()
    noise = radial_noise(2, q.loc, generator(16))
    noise = torch.cat([noise, -noise])
    radial_divergence(RadialNormal(loc, scale), q, noise).backward()
    assert loc.grad.isfinite().all()
    assert scale.grad.isfinite().all()
    assert_close(loc.grad, torch.zeros_like(loc), rtol=0, atol=1e-6)
    # Directions are few, so that single scales feel them; their sum weighted by the scales does not.
    assert (scale.grad * scale.detach()).sum().item() == pytest.approx(0, abs=1e-5 * dimension)


# ---- linear regression


def test_linear_regression_optimum_is_reached():
    """With exact expectations the optimum has the posterior's mean and the variance 1 / Lambda_ii.

    E_q of a quadratic form needs Cov = diag(scale^2)/D per tensor only, and the entropy's gradient is that of
    sum log scale, so scale_i = sqrt(D / Lambda_ii).
    """
    truth = linear.Truth()
    method = linear.optimise(Radial(truth.problem, Settings()), radial=True)
    mean, variance = linear.flat(method.moments())
    assert_close(mean, truth.mean, rtol=1e-5, atol=1e-6)
    assert_close(variance, 1 / truth.precision.diagonal(), rtol=1e-4, atol=1e-8)


def test_linear_regression_bound_is_the_closed_form():
    """At the optimum both terms are those of the formulas in numpy, the entropy's constant included."""
    truth = linear.Truth()
    method = linear.optimise(Radial(truth.problem, Settings()), radial=True)
    batch = Batch(*(t.double() for t in truth.problem.train.tensors))
    likelihood_term, prior_term = method.loss_terms(batch, linear.exact_noise(method, radial=True))
    variance = (1 / truth.precision.diagonal()).numpy()
    assert likelihood_term.item() == pytest.approx(truth.expected_nll(variance), rel=1e-6)
    entropy = 0.0
    for part in (variance[:3], variance[3:]):
        d = len(part)
        log_surface = math.log(2 * math.pi ** (d / 2) / math.gamma(d / 2))
        entropy += (
            0.5 * np.log(d * part).sum() - math.log(2) + 0.5 * math.log(2 * math.pi) + 0.5 + log_surface
        )
        entropy += (d - 1) * (scipy.special.digamma(0.5) + math.log(2)) / 2
    assert prior_term.item() == pytest.approx(truth.prior_cross_entropy(variance) - entropy, rel=1e-6)
    loss = (likelihood_term + prior_term).item()
    assert loss > -truth.log_evidence(), "a bound on the evidence"


@pytest.mark.slow
def test_linear_regression_optimum_is_reached_by_training():
    """The engine's own noisy training ends near the optimum; tolerances are a few times what was seen."""
    truth = linear.Truth()
    settings = Settings(learning_rate=0.02, train_samples=16, initial_rho=-2.0)
    engine = Engine(Radial, settings, 0, trainer=TrainerOptions(accelerator="cpu"))
    mean, variance = linear.flat(engine.fit(truth.problem, Budget(1000)).moments())
    std = truth.precision.diagonal().rsqrt()
    assert ((mean - truth.mean).abs() < 0.5 * std).all(), f"{(mean - truth.mean) / std}"
    assert_close(variance.sqrt(), std, rtol=0.25, atol=0)


# ---- settings


def method_of(**values):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Radial(linear.Truth().problem, Settings(**values))


def test_initial_rho():
    """Constant, or normal with the given spread. False alarm: below 1e-5."""
    assert all((r == -4).all() for r in method_of().rho)
    rho = torch.cat([r.flatten() for r in method_of(initial_rho=-2.0, initial_rho_std=0.5).rho])
    assert len(rho.unique()) == 4
    assert (rho + 2).abs().max() < 2.5


@pytest.mark.parametrize("form", ["radial", "normal"])
def test_sequential_prior_has_the_moments_of_the_posterior(form):
    """Both forms keep mean and variance; the first is the radial density itself."""
    method = method_of(sequential_prior=form, initial_rho_std=0.3)
    means, variances = method.moments()
    prior = method.as_prior()(dict(method.network.named_parameters()))
    assert prior.keys() == means.keys()
    for name, p in prior.items():
        assert isinstance(p, RadialNormal) is (form == "radial")
        assert_close(p.mean, means[name])
        assert_close(p.variance, variances[name])


def test_second_fit_pays_the_radial_divergence():
    """Under a radial prior the prior term is the sum of `radial_divergence` over the tensors, by hand."""
    first = method_of(initial_rho_std=0.3)
    problem = linear.Truth(prior=first.as_prior()).problem
    second = Radial(problem, Settings(), start=first)
    with torch.no_grad():
        for p in second.parameters():
            p += 0.1
    noise = second.draw_noise(3, generator())
    actual = second.loss_terms(Batch(*problem.train.tensors), noise)[1]
    old, new = first.posterior(), second.posterior()
    expected = sum(radial_divergence(new[name], old[name], noise[name]) for name in new)
    assert_close(actual, expected)
    at_start = Radial(problem, Settings(), start=first)
    assert at_start.loss_terms(Batch(*problem.train.tensors), noise)[1].item() == pytest.approx(0, abs=1e-5)


def test_pretraining_trains_the_means_alone():
    """In the first epochs there is no noise, no prior term and no gradient of rho; then there is."""
    method = method_of(pretrain_epochs=2)
    batch = Batch(*linear.Truth().problem.train.tensors)
    for epoch, pretraining in ((0, True), (1, True), (2, False)):
        method.epoch = epoch
        method.zero_grad()
        out = method.training_step(batch, 0)
        out["loss"].backward()
        assert (out["prior_term"] == 0) == pretraining
        assert all((r.grad is None) == pretraining for r in method.rho)
        assert all(p.grad.any() for p in method.network.parameters())


def test_kl_weight_scales_the_prior_term():
    """Loss = likelihood term + kl_weight * prior term."""
    method = method_of(kl_weight=0.3)
    out = method.training_step(Batch(*linear.Truth().problem.train.tensors), 0)
    assert_close(out["loss"].detach(), out["likelihood_term"] + 0.3 * out["prior_term"])


def test_every_tensor_has_its_own_radius():
    """Weights and biases apart: their distances from the mean are independent half-normals."""
    method = Radial(linear.Truth().problem, Settings(initial_rho=0.0))
    posterior = method.posterior()
    draws = method.sample_weights(4000, generator(17))
    radii = [((w - posterior[n].loc) / posterior[n].scale).flatten(1).norm(dim=1) for n, w in draws.items()]
    correlation = torch.corrcoef(torch.stack(radii).detach())[0, 1].item()
    assert abs(correlation) < 4.5 / math.sqrt(4000), "false alarm 7e-6"
    assert isinstance(method.network, nn.Linear)
    assert isinstance(method.likelihood, likelihoods.Gaussian)
