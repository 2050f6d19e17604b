"""Microcanonical Langevin dynamics: its differential equations, its Jacobian, a known posterior."""

import itertools
import math
from dataclasses import replace
from functools import partial

import pytest
import scipy.integrate
import torch
from conformance import problems
from oracles import linear
from torch.testing import assert_close

from bench.contract import Batch
from bench.diagnostics import effective_sample_size
from bench.errors import UsageError
from bench.families import microcanonical
from bench.families.microcanonical import integrate, kick, refresh
from bench.methods.mclmc import MCLMC, Settings

SHAPE = (3, 5)


def normals(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def units(*shape, seed=1):
    return torch.nn.functional.normalize(normals(*shape, seed=seed), dim=-1)


def made(problem, cls=MCLMC, **values):
    """The method in float64 before its first step, and all data."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        method = cls(problem, cls.settings_class(**values)).double()
    return method, Batch(*(t.double() if t.is_floating_point() else t for t in problem.train.tensors))


# ---- the dynamics


def test_a_kick_solves_the_differential_equation():
    """du/dt = -(I - u u^T) g / (d - 1), and what is gained is what a path downhill loses: dK/dt = -g.u."""
    g, u, times = 4 * normals(*SHAPE), units(*SHAPE), torch.tensor([0.1, 1.0, 3.0]).double()
    turned, gained = kick(u, g, times)

    def velocity(_, state, slope):
        u = state[:-1]
        return [*(-(slope - u * (u @ slope)) / (len(u) - 1)), -(u @ slope)]

    for c, time in enumerate(times.tolist()):
        solved = scipy.integrate.solve_ivp(
            velocity, (0, time), [*u[c].tolist(), 0.0], args=(g[c].numpy(),), rtol=1e-11, atol=1e-12
        ).y[:, -1]
        assert_close(turned[c], torch.from_numpy(solved[:-1]), rtol=0, atol=1e-8)
        assert math.isclose(gained[c], solved[-1], abs_tol=1e-7)


def test_what_a_kick_gains_is_the_volume_that_it_takes():
    """The log Jacobian of u -> u' on the sphere is -K: why exp(-U) stays as it is where energies do."""
    g, u = 4 * normals(*SHAPE, seed=2), units(*SHAPE, seed=3)
    times = torch.tensor([0.1, 1.0, 3.0]).double()
    turned, gained = kick(u, g, times)
    for c, time in enumerate(times):
        step = partial(lambda v, c, time: kick(v[None], g[c : c + 1], time[None])[0][0], c=c, time=time)
        jacobian = torch.autograd.functional.jacobian(step, u[c])
        frames = (torch.cat([v[:, None], torch.eye(5).double()], 1) for v in (u[c], turned[c]))
        before, after = (torch.linalg.qr(frame)[0] for frame in frames)
        tangent = after[:, 1:].T @ jacobian @ before[:, 1:]
        assert math.isclose(torch.linalg.slogdet(tangent).logabsdet, -gained[c], abs_tol=1e-10)


def test_kicks_along_the_slope_are_finite():
    """Straight downhill, straight uphill, without a slope, and for a time that turns everything."""
    u = torch.eye(4)[:1].repeat(4, 1)
    g = torch.stack([-u[0], u[0], 0 * u[0], torch.ones(4)])
    turned, gained = kick(u, g, torch.tensor([0.3, 0.3, 1.0, 1e6]).double())
    assert_close(turned[:3], u[:3])
    assert_close(gained[:3], torch.tensor([0.3, -0.3, 0.0]).double())
    assert_close(turned[3], -torch.ones(4) / 2)


def energies(method, batch, size, count):
    """Largest error of the total energy, and of |u| - 1, over a path of steps of one size."""
    slope = partial(method.slope, batch)
    x, u = method.positions.detach(), units(*method.positions.shape)
    start, g = slope(x)
    total, errors, lengths = torch.zeros_like(start), [], []
    for _ in range(count):
        x, u, g, energy, gained = integrate(slope, x, u, g, torch.full_like(start, size))
        total = total + gained
        errors.append(energy - start + total)
        lengths.append((u.norm(dim=1) - 1).abs().max())
    return torch.stack(errors), max(lengths)


def test_energy_errors_fall_as_published():
    """Over a path as the square of the step, of one step as its cube; directions keep their length."""
    method, batch = made(problems.known_noise(), chains=2)
    paths, steps = [], []
    for halvings in range(3):
        found, length = energies(method, batch, 0.003 / 2**halvings, 20 * 2**halvings)
        paths.append(found.abs().max(0).values)
        steps.append(found[0].abs())
        assert length < 1e-14
    for coarse, fine in itertools.pairwise(paths):
        assert_close(coarse / fine, torch.full_like(fine, 4.0), rtol=0.1, atol=0)
    for coarse, fine in itertools.pairwise(steps):
        assert_close(coarse / fine, torch.full_like(fine, 8.0), rtol=0.15, atol=0)


def test_a_step_is_reversible():
    """With the direction turned round it leads back, and gains what it had lost."""
    method, batch = made(problems.known_noise(), chains=2)
    slope = partial(method.slope, batch)
    x, u, size = method.positions.detach(), units(*method.positions.shape), torch.tensor([0.1, 0.4]).double()
    there, v, g, _, gained = integrate(slope, x, u, slope(x)[1], size)
    back, w, _, _, lost = integrate(slope, there, -v, g, size)
    assert_close(back, x, rtol=0, atol=1e-12)
    assert_close(w, -u, rtol=0, atol=1e-12)
    assert_close(gained + lost, torch.zeros(2).double(), rtol=0, atol=1e-10)
    assert (there - x).norm(dim=1).max() > 0.05


def test_directions_forget_over_their_length():
    """In 10^4 dimensions the correlation after shares s of L is exp(-s), to a hundredth."""
    u, shares = units(3, 10_000), torch.tensor([0.1, 1.0, 2.0]).double()
    kept = (refresh(u, normals(3, 10_000, seed=4), shares) * u).sum(1)
    assert_close(kept, (-shares).exp(), rtol=0, atol=0.02)


# ---- tuning


def test_a_step_is_tuned_to_its_energy_error():
    """Where the squared error a weight is c e^6, the size is (target / c)^(1/6) after every step."""
    method, _ = made(problems.mlp(), chains=2)
    size, d = torch.tensor([7.0, 0.02]).double(), method.directions.shape[1]
    for _ in range(5):
        error = (d * 3e-4 / size**6).sqrt() * method.step_size**3
        method._tune_step(3e-4, error, torch.tensor([True, True]))
        assert_close(method.step_size, size, rtol=1e-4, atol=0)


def test_a_step_that_leaves_the_numbers_is_not_taken_again():
    """The chain stays, with another direction, and its steps stay below four fifths of that size."""
    method, batch = made(problems.mlp(), chains=2)
    x, before = method.positions.detach().clone(), method.step_size.clone()

    def slope(at):
        energy, g = method.slope(batch, at)
        return energy.where(torch.tensor([True, False]), torch.tensor(math.nan)), g

    energy, g = method.slope(batch, x)
    after, _ = method._step(slope, energy, g, 0)
    assert_close(method.positions[1], x[1], rtol=0, atol=0)
    assert not torch.equal(method.positions[0], x[0])
    assert after[1] == energy[1]
    assert_close(method.largest_step, torch.tensor([math.inf, 0.8 * before[1]]).double())
    assert method.step_size[1] == 0.8 * before[1]


def test_lengths_are_those_of_the_phases():
    """L is the root of the path-weighted variances' sum, then 0.4 of the path between independent draws.

    The last part sees autoregressions of 0.6 and 0.2, whose draws are worth 1/4 and 2/3: L within a quarter.
    """
    method, _ = made(problems.known_noise(), chains=2, burn=6000, kept=2000, steps=1)
    d, total = method.positions.shape[1], 6000
    method.step_size.copy_(torch.tensor([0.1, 0.3]))
    method._tune_step = lambda *_: None
    states, state, generator = [], normals(2, d), torch.Generator().manual_seed(5)
    for number in range(total):
        noise = torch.randn(2, d, generator=generator, dtype=torch.float64)
        rho = torch.tensor([0.6, 0.2]).double()[:, None]
        state = rho * state + (1 - rho**2).sqrt() * noise
        states.append(state)
        with torch.no_grad():
            method.positions.copy_(state)
        method._tune(number, total, torch.zeros(2), torch.tensor([True, True]))
        if number == 3999:
            expected = torch.stack(states[2000:]).var(0, correction=0).sum(1).sqrt()
            assert_close(method.length, expected, rtol=1e-10, atol=0)
    assert_close(method.length, torch.tensor([0.4 * 0.1 * 4, 0.4 * 0.3 * 1.5]).double(), rtol=0.25, atol=0)


# ---- the draws


def standard_errors_off(truth):
    """Of the means and second moments of 100 chains' draws the largest distance from the exact posterior's.

    The step is fixed, and so small that variances are within 1% of the posterior's.
    """
    stack = replace(truth.problem, network=lambda: torch.nn.Sequential(linear.network()))
    method, batch = made(stack, chains=100)  # in one walk
    slope = partial(method.slope, batch)
    method._tune = lambda *_: None
    method.step_size.fill_(0.15 / truth.precision.diagonal().max().sqrt())
    method.length.fill_(1.0)
    energies, slopes = slope(method.positions)
    states = []
    for number in range(500):
        energies, slopes = method._step(slope, energies, slopes, number)
        if number >= 200 and number % 20 == 0:
            states.append(method.positions.detach().clone())
    z = (torch.stack(states, 1) - truth.mean) @ torch.linalg.cholesky(truth.precision)  # [C, N, 4]
    i, j = torch.triu_indices(4, 4)
    values = torch.cat([z, z[..., i] * z[..., j]], -1)
    expected = torch.cat([torch.zeros(4), (i == j).float()]).double()
    sizes = torch.from_numpy(effective_sample_size(values.numpy()))
    assert sizes.min() > 300
    found = values.flatten(0, 1)
    return float(((found.mean(0) - expected).abs() / (found.std(0) / sizes.sqrt())).max())


def test_draws_are_of_a_normal_with_known_covariance(monkeypatch):
    """Four means and ten second moments within 4.5 standard errors: false alarm 14 x 7e-6.

    The control is a slope over d in place of d - 1, which makes variances 4/3 of what they are.
    """
    truth = linear.Truth()
    assert standard_errors_off(truth) < 4.5
    right = microcanonical.kick
    monkeypatch.setattr(microcanonical, "kick", lambda u, g, times: right(u, g, times * 3 / 4))
    assert standard_errors_off(truth) > 6


def test_chains_start_where_the_problem_says():
    """All of them."""
    problem = problems.known_noise()
    weights = {name: torch.full_like(w, 0.25) for name, w in problem.network().named_parameters()}
    method, batch = made(replace(problem, starts_from=lambda: weights), chains=2, steps=1)
    method.step_size.fill_(1e-9)
    method.training_step(batch, 0)
    assert_close(method.positions.detach(), torch.full_like(method.positions, 0.25), rtol=0, atol=1e-6)


def test_what_has_no_direction_or_no_prior_is_refused():
    """In one line."""
    with pytest.raises(UsageError, match=r"^mclmc: the likelihood has parameters of its own"):
        MCLMC(problems.regression(), Settings())
    single = replace(problems.known_noise(), network=lambda: torch.nn.Linear(1, 1, bias=False))
    with pytest.raises(UsageError, match=r"^mclmc: a direction takes at least two weights"):
        MCLMC(single, Settings())
    with pytest.raises(UsageError, match=r"^mclmc: 4 x 100000000 draws .* lower --method.kept"):
        MCLMC(problems.known_noise(), Settings(kept=100_000_000))
