"""Noise that depends on the input: its likelihood and curvature, and intervals around numbers."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.autograd.functional import hessian
from torch.func import jacrev

from bench.contract import Batch
from bench.families import curvature
from bench.likelihoods import Gaussian, Heteroscedastic
from bench.predictions import Gaussian as Normals
from bench.studies import conformal, normals


def outputs_of(rows=6, samples=3):
    """Outputs `[S, B, 2]` and targets `[B, 1]`, float64."""
    draw = torch.Generator().manual_seed(0)
    kind = {"generator": draw, "dtype": torch.float64}
    return torch.randn(samples, rows, 2, **kind) * 3, torch.randn(rows, 1, **kind)


# ---- the likelihood


def test_log_density_and_prediction_are_those_of_scipys_normal():
    outputs, targets = outputs_of()
    sigma = np.log1p(np.exp(outputs[..., 1].numpy())) + 1e-3
    expected = stats.norm.logpdf(targets[:, 0].numpy(), outputs[..., 0].numpy(), sigma)
    np.testing.assert_allclose(Heteroscedastic().log_prob(outputs, targets).numpy(), expected, rtol=1e-12)
    prediction = Heteroscedastic().predict(outputs)
    np.testing.assert_allclose(prediction.variance[..., 0].numpy(), sigma**2, rtol=1e-12)
    mean, variance = (part[:, 0].numpy() for part in prediction.average())
    np.testing.assert_allclose(mean, outputs[..., 0].mean(0).numpy())
    np.testing.assert_allclose(variance, (sigma**2).mean(0) + outputs[..., 0].var(0, correction=0).numpy())


def test_parts_of_the_variance_add_up_and_are_what_they_are_called():
    """Samples that agree have no epistemic part, samples without noise no aleatoric one."""
    outputs, _ = outputs_of()
    prediction = Heteroscedastic().predict(outputs)
    epistemic, aleatoric = prediction.parts()
    torch.testing.assert_close(epistemic + aleatoric, prediction.average()[1])
    agreeing = Heteroscedastic().predict(outputs[:1].expand(3, -1, -1))
    torch.testing.assert_close(agreeing.parts()[0], torch.zeros(6, 1, dtype=torch.float64))
    known = Normals(prediction.mean, torch.zeros_like(prediction.mean))
    torch.testing.assert_close(known.parts()[1], torch.zeros(6, 1, dtype=torch.float64))


def test_gradients_are_those_of_the_closed_form():
    """d/dm = (y - m) / s^2, d/dr = sigmoid(r) ((y - m)^2 / s^3 - 1 / s)."""
    outputs, targets = outputs_of()
    outputs.requires_grad_()
    Heteroscedastic().log_prob(outputs, targets).sum().backward()
    mean, raw = outputs.detach().unbind(-1)
    sigma, off = torch.nn.functional.softplus(raw) + 1e-3, targets[:, 0] - mean
    slope = torch.stack([off / sigma**2, raw.sigmoid() * (off**2 / sigma**3 - 1 / sigma)], -1)
    torch.testing.assert_close(outputs.grad, slope)


def test_fisher_is_the_expected_hessian():
    """By Gauss-Hermite quadrature over targets of autograd's Hessian, quadratic in them: exact."""
    (outputs, *_), _ = outputs_of()
    likelihood = Heteroscedastic()
    nodes, weights = np.polynomial.hermite_e.hermegauss(5)
    prediction = likelihood.predict(outputs[None])
    expected = torch.zeros(6, 2, 2, dtype=torch.float64)
    negative = False
    for node, weight in zip(nodes, weights / math.sqrt(2 * math.pi), strict=True):
        targets = prediction.mean[0] + node * prediction.variance[0].sqrt()
        for row in range(6):
            target = targets[row : row + 1]
            h = hessian(
                lambda f, target=target: -likelihood.log_prob(f[None, None], target).sum(), outputs[row]
            )
            expected[row] += weight * h
            negative |= bool(torch.linalg.eigvalsh(h)[0] < 0)
    torch.testing.assert_close(likelihood.fisher(outputs), expected, rtol=1e-9, atol=1e-12)
    assert negative  # hence not the Hessian itself


def test_curvature_is_jacobians_around_the_fisher():
    """Roots, and layer by layer sums of squares, against autograd's J^T F J; weights of examples multiply."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    inputs, targets = torch.randn(5, 2).double(), torch.randn(5, 1).double()
    piece = Batch(inputs, targets, torch.arange(1.0, 6).double())
    outputs = network(inputs).detach()
    fisher = Heteroscedastic().fisher(outputs) * piece.weights[:, None, None]
    roots = curvature.output_roots(Heteroscedastic(), outputs, piece)
    torch.testing.assert_close(roots @ roots.mT, fisher)
    names = [name for name, _ in network.named_parameters()]
    weights = {name: p.detach() for name, p in network.named_parameters()}
    jacobian = jacrev(lambda w: torch.func.functional_call(network, w, (inputs,)))(weights)
    j = torch.cat([jacobian[name].flatten(2) for name in names], 2)
    expected = torch.einsum("bci,bcd,bdi->i", j, fisher, j)
    layers = curvature.owners(network, names)
    gradients = curvature.layer_gradients(network, layers, Heteroscedastic(), piece)
    found = [(s[:, :-1].flatten(), s[:, -1]) for s in (curvature.squares(a, g) for a, g in gradients)]
    torch.testing.assert_close(torch.cat([part for pair in found for part in pair]), expected)
    assert Gaussian("learned").fisher(outputs) is None  # the Hessian, as ever


# ---- conformal intervals

REPEATS, HELD_OUT = 4000, 20


@pytest.mark.parametrize(("kind", "level"), [("residual", 0.9), ("quantile", 0.9), ("quantile", 0.8)])
def test_conformal_intervals_cover_what_they_promise(kind, level):
    """Wrong predictions of noisy numbers, a fresh one after each calibration: ceil((n + 1) level) / (n + 1).

    Fails once in a million runs of fresh seeds. Negative control: the predicted intervals, and n in place of
    n + 1, cover too little.
    """
    draw = np.random.default_rng(0)
    x = draw.normal(size=(REPEATS, HELD_OUT + 1))
    targets = x + (0.2 + np.abs(x)) * draw.standard_t(4, x.shape)
    half = stats.norm.ppf((1 + level) / 2) * (0.1 + 0.3 * np.abs(x)) * (kind == "quantile")
    low, high = 0.8 * x - half, 0.8 * x + half
    expected = math.ceil((HELD_OUT + 1) * level) / (HELD_OUT + 1)
    limits = stats.binom.ppf([5e-7, 1 - 5e-7], REPEATS, expected)
    inside = dict.fromkeys(("conformal", "predicted", "n"), 0)
    for lo, hi, y in zip(low, high, targets, strict=True):
        by = conformal.margin(lo[:-1], hi[:-1], y[:-1], level)
        scores = np.sort(np.maximum(lo - y, y - hi)[:-1])
        too_small = scores[math.ceil(HELD_OUT * level) - 1]
        for name, b in (("conformal", by), ("predicted", 0.0), ("n", too_small)):
            (a, c), *_ = conformal.widened(lo[-1:], hi[-1:], b)
            inside[name] += a <= y[-1] <= c
    assert limits[0] <= inside["conformal"] <= limits[1]
    assert inside["predicted"] < limits[0]
    assert inside["n"] < limits[0]


@pytest.mark.parametrize("level", [0.5, 0.75, 0.8, 0.9, 0.95, 0.99])
def test_fewest_examples_are_those_with_a_finite_quantile(level):
    number = conformal.fewest(level)
    assert math.isfinite(conformal.smallest(np.arange(number, dtype=float), level))
    assert conformal.smallest(np.arange(number - 1, dtype=float), level) == math.inf


def test_an_interval_that_would_be_turned_around_is_a_point():
    found = conformal.widened(np.array([0.0, 0.0]), np.array([1.0, 6.0]), -2.0)
    np.testing.assert_array_equal(found, [[0.5, 0.5], [2.0, 4.0]])


# ---- coverage by predicted width


def quarters(noise, rows=4000, seed=0):
    """Of one learned noise and a little spread that grows with |x|; `noise(|x|)` is the truth."""
    draw = np.random.default_rng(seed)
    x = draw.normal(size=rows)
    sd = noise(np.abs(x))
    targets = sd * draw.normal(size=rows)
    sigma = np.full((1, 1), np.sqrt((sd**2).mean()))
    mean = 0.01 * np.abs(x) * np.array([[-1.0], [1.0]])
    below = normals.below(mean, sigma, targets)
    return normals.by_width(mean, sigma, below), normals.coverage(below, 0.9)


def test_coverage_by_quarters_shows_what_the_mean_hides():
    found, coverage = quarters(lambda x: 0.5 + 0.5 * x)
    shares = [covered / size for size, covered in found]
    assert abs(coverage - 0.9) < 0.02  # looks right
    assert shares[0] > 0.95 > 0.85 > shares[-1]
    assert sum(size for size, _ in found) == 4000
    assert conformal.is_bad(found, 0.9)


def test_right_intervals_are_seldom_called_bad():
    """In at most 1% of 2,000 tables, up to the binomial limit of one in a million."""
    draw = np.random.default_rng(0)
    for size in (15, 17, 250):
        covered = draw.binomial(size, 0.9, (2000, 4))
        bad = sum(conformal.is_bad([conformal.Quartile(size, int(k)) for k in row], 0.9) for row in covered)
        assert bad <= stats.binom.ppf(1 - 1e-6, 2000, conformal.ALARM)


def test_equal_widths_have_no_order():
    sd = np.full(8, 0.3) * (1 + 1e-9 * np.arange(8))
    assert conformal.by_width(sd, np.ones(8, bool)) == []
