"""SVGD against its equation written out, against MAP, and at rest where two particles have a closed form."""

import math

import pytest
import torch
from conformance import problems
from torch import nn
from torch.testing import assert_close
from torch.utils.data import TensorDataset

from bench import likelihoods, priors
from bench.contract import Batch, Budget, Problem
from bench.engine.engine import Engine, TrainerOptions
from bench.methods.map import MAP
from bench.methods.map import Settings as MAPSettings
from bench.methods.svgd import SVGD, Settings, direction


def fit(cls, settings, problem, budget):
    return Engine(cls, settings, 0, trainer=TrainerOptions(accelerator="cpu")).fit(problem, budget)


# ---- the direction


def written_out(particles, slopes):
    """Minus the mean over j of k(x_j, x_i) grad log p(x_j) + the gradient of k in x_j, pair by pair."""
    count = len(particles)
    pairs = [(particles[i] - particles[j]).norm() for i in range(count) for j in range(i)]
    width = torch.stack(pairs).quantile(0.5) ** 2 / math.log(count)
    found = torch.zeros_like(particles)
    for i in range(count):
        for j in range(count):
            x = particles[j].clone().requires_grad_()
            k = (-(x - particles[i]).square().sum() / width).exp()
            (repulsion,) = torch.autograd.grad(k, x)
            found[i] -= (-k.detach() * slopes[j] + repulsion) / count
    return found


@pytest.mark.parametrize("count", [2, 3, 6])
def test_direction_is_the_equation(count):
    """Equation 8 with the kernel's gradient by autograd; odd and even numbers of pairs."""
    g = torch.Generator().manual_seed(count)
    particles, slopes = torch.randn(2, count, 4, generator=g, dtype=torch.float64)
    assert_close(direction(particles, slopes), written_out(particles, slopes))
    assert (direction(particles, slopes) - slopes).abs().max() > 0.1


# ---- one particle


@pytest.mark.parametrize("problem", [problems.mlp, problems.regression])
def test_one_particle_is_map(problem):
    """The same start, the same steps: weights to rounding, and a learned noise too."""
    problem, budget = problem(), Budget(epochs=5, batch_size=8)
    one = fit(SVGD, Settings(particles=1, learning_rate=0.01), problem, budget)
    mode = fit(MAP, MAPSettings(learning_rate=0.01), problem, budget)
    weights = one.sample_weights(1, torch.Generator())
    for name, w in mode.network.named_parameters():
        assert_close(weights[name][0], w.detach(), rtol=1e-4, atol=1e-5)
    for a, b in zip(one.likelihood.parameters(), mode.likelihood.parameters(), strict=True):
        assert_close(a, b, rtol=1e-4, atol=1e-5)
    three = fit(SVGD, Settings(particles=3, learning_rate=0.01), problem, budget)
    assert len({tuple(p.tolist()) for p in three.particles[:, :3]}) == 3


# ---- two particles

NOISE, STD, CENTRE = 0.5, 0.8, 0.3


def one_weight():
    """A slope, its posterior N(m, 1 / c); the problem, m and c."""
    x = torch.tensor([[0.5], [-1.0], [1.5], [0.2]])
    y = torch.tensor([[0.6], [-0.7], [1.1], [0.3]])
    problem = Problem(
        lambda dropout=0.0: nn.Sequential(nn.Linear(1, 1, bias=False)),
        likelihoods.Gaussian(NOISE),
        priors.normal(CENTRE, STD),
        TensorDataset(x, y),
        None,
        4,
    )
    c = float(x.square().sum() / NOISE**2 + 1 / STD**2)
    return problem, float((x * y).sum() / NOISE**2 + CENTRE / STD**2) / c, c


def at_rest(towards):
    """Where two particles of one weight come to rest, in order, if they go along `towards`."""
    problem, _, c = one_weight()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        method = SVGD(problem, Settings(particles=2)).double()
    batch = Batch(*(t.double() for t in problem.train.tensors))
    for _ in range(200):
        method.zero_grad()
        method.energy(batch).backward()
        with torch.no_grad():
            method.particles -= towards(method.particles, 2 * method.particles.grad) / c
    return method.particles.detach()[:, 0].sort().values


def test_two_particles_rest_at_the_closed_form():
    """With h = med^2 / log 2 the kernel of two is 1/2, and they rest sqrt(log 2 / c) from the mean."""
    _, mean, c = one_weight()
    expected = torch.tensor([-1, 1]).double() * math.sqrt(math.log(2) / c) + mean
    assert_close(at_rest(direction), expected, rtol=1e-5, atol=1e-7)


def test_two_particles_without_repulsion_collapse():
    """Negative control: both at the mode."""
    _, mean, _ = one_weight()
    expected = torch.tensor([mean, mean]).double()
    assert_close(at_rest(lambda particles, slopes: slopes / 2), expected, rtol=1e-5, atol=1e-7)


def test_predictions_are_of_the_particles():
    """Each of five once in five draws, and again in the sixth."""
    method = fit(SVGD, Settings(particles=5), problems.mlp(), Budget(epochs=2, batch_size=8))
    generator = torch.Generator().manual_seed(0)
    draws = method._weights(method.particles.detach())
    name = next(iter(draws))
    drawn = method.sample_weights(6, generator)[name].flatten(1)
    assert len(drawn[:5].unique(dim=0)) == len(drawn.unique(dim=0)) == 5
    mean, variance = (moments[name] for moments in method.moments())
    assert_close(mean, draws[name].mean(0))
    assert_close(variance, (draws[name] - mean).square().mean(0))  # of five predictions that count alike
