"""HMC against closed forms: its integrator, its decisions, its step sizes, and exact posteriors."""

import importlib.util
import math
import sys
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from conformance import problems
from oracles import linear
from torch import nn
from torch.distributions import MultivariateNormal
from torch.testing import assert_close
from torch.utils.data import TensorDataset

from bench import likelihoods, priors, randomness
from bench.contract import JOINT, Batch, Budget, Problem
from bench.diagnostics import FROZEN, RHAT_LIMIT, effective_sample_size, mixed
from bench.engine.engine import Engine, TrainerOptions
from bench.errors import UsageError
from bench.methods import hmc
from bench.methods.hmc import HMC, Settings, kinetic_energy, leapfrog
from bench.weights import forward, ravel, unravel


def linear_problem(prior=None):
    """Linear regression with a network that all chains run through at once."""
    return replace(linear.Truth(prior).problem, network=lambda dropout=0.0: nn.Sequential(nn.Linear(3, 1)))


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def method_of(problem=None, seed=0, cls=HMC, start=None, **values):
    """The method in float64, and its data."""
    problem = problem or linear_problem()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        method = cls(problem, Settings(**values), start).double()
    tensors = (t.double() if t.is_floating_point() else t for t in problem.train.tensors)
    return method, Batch(*tensors)


def sampled(problem=None, seed=0, cls=HMC, **values):
    """The method after all its transitions, without the engine's overhead."""
    method, batch = method_of(problem, seed, cls, **values)
    method.seen = [method.training_step(batch, 0) for _ in range(method.spends(Budget(1)).epochs)]
    return method


def fit(problem=None, **values):
    engine = Engine(HMC, Settings(**values), 0, trainer=TrainerOptions(accelerator="cpu"))
    method = engine.fit(problem or linear_problem(), Budget(1))
    return method, engine


def assert_draws_are_of(draws, mean, covariance, least=400):
    """Draws `[C, N, d]` have this mean and covariance within 4.5 standard errors, each of 1 / sqrt(ESS).

    Whitened, so that every first moment has variance 1, every product variance 1 and every square variance 2.
    Gated on at least `least` effective draws of each of them. False alarm: d (d + 3) / 2 x 7e-6.
    """
    root = torch.linalg.cholesky(covariance)
    z = torch.linalg.solve_triangular(root, (draws.double() - mean).mT, upper=False).mT  # [C, N, d]
    for name, values, expected, variance in (
        ("mean", z, torch.zeros(z.shape[-1]), torch.ones(z.shape[-1])),
        (
            "covariance",
            z[..., :, None] * z[..., None, :],
            torch.eye(z.shape[-1]),
            1 + torch.eye(z.shape[-1]),
        ),
    ):
        size = torch.from_numpy(effective_sample_size(values))
        assert size.min() > least, f"{size} effective draws are too few to tell"
        errors = (values.flatten(0, 1).mean(0) - expected) / (variance / size).sqrt()
        assert errors.abs().max() < 4.5, f"{name} is off by {errors} standard errors"


# ---- the energy


def correlated(parameters):
    """A normal that couples all weights, in the precision of the problem's other tensors."""
    size = sum(p.numel() for p in parameters.values())
    scale = torch.eye(size) + 0.3 * torch.tril(torch.ones(size, size), -1)
    return {JOINT: MultivariateNormal(torch.full((size,), 0.2), scale_tril=scale)}


@pytest.mark.parametrize("prior", [None, correlated])
@pytest.mark.parametrize("weighted", [False, True])
def test_energy_is_the_exact_quadratic(prior, weighted):
    """Energy and gradient of a linear model: its normal posterior's, under weights and coupled priors."""
    truth = linear.Truth(prior)
    rows = 0.5 + torch.arange(linear.ROWS) % 3 if weighted else torch.ones(linear.ROWS)
    x, design = truth.problem.train.tensors[0], truth.design
    problem = replace(
        truth.problem, train=TensorDataset(x, truth.problem.train.tensors[1], *([rows] * weighted))
    )
    if prior is None:
        prior_precision, prior_mean = torch.eye(4) / linear.STD**2, torch.full((4,), linear.MEAN)
    else:
        joint = correlated({"all": torch.zeros(4)})[JOINT]
        prior_precision, prior_mean = joint.precision_matrix, joint.mean
    prior_precision, prior_mean, rows = prior_precision.double(), prior_mean.double(), rows.double()
    precision = (design.T * rows) @ design / linear.SIGMA**2 + prior_precision
    shift = (design.T * rows) @ truth.targets / linear.SIGMA**2 + prior_precision @ prior_mean
    mean = torch.linalg.solve(precision, shift)

    method, batch = method_of(problem, chains=3)
    method.float()
    w = (mean + torch.randn(3, 4, generator=generator(1), dtype=torch.float64)).float()
    away = w.double() - mean
    expected = (away @ precision * away).sum(1) / 2
    energy = method._energy(w, batch)
    assert energy.dtype == torch.float64
    assert_close(energy - energy[:1], expected - expected[:1], rtol=1e-5, atol=1e-5)
    single = Batch(*problem.train.tensors)
    assert_close(method._gradient(single)(w).double(), away @ precision, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.2])
@pytest.mark.parametrize("prior", [priors.normal(0.3, 0.7), priors.tight_normal(), priors.scale_mixture(0.4)])
def test_gradient_is_that_of_the_energy(prior, temperature):
    """By central differences of the energy, for a network, whatever the prior."""
    method, batch = method_of(replace(problems.mlp(), prior=prior), chains=2, temperature=temperature)
    w = method.positions + 0.1
    slope = method._gradient(batch)(w)
    for i in (0, 17, 40, w.shape[1] - 1):
        step = torch.zeros_like(w)
        step[:, i] = 1e-5
        numeric = (method._energy(w + step, batch) - method._energy(w - step, batch)) / 2e-5
        assert_close(slope[:, i], numeric, rtol=1e-5, atol=1e-6)


def test_a_tempered_posterior_has_its_temperature_times_the_covariance():
    """Of a normal posterior, whose density to the power 1/T is the normal of T times the covariance.

    14 moments, false alarm 14 x 7e-6. The control: the same draws are not of the posterior itself.
    """
    truth = linear.Truth()
    chosen = {"target_acceptance": 0.85, "initial_step_size": 0.03, "leapfrog_steps": 5}
    draws = sampled(temperature=0.3, chains=20, burn=120, kept=200, **chosen).draws
    assert_draws_are_of(draws, truth.mean, 0.3 * truth.precision.inverse())
    with pytest.raises(AssertionError, match="covariance is off"):
        assert_draws_are_of(draws, truth.mean, truth.precision.inverse())


def test_large_energies_keep_their_digits():
    """Of a float32 chain at 1e6 nats: float64 keeps what decides; added up in float32 it is lost."""
    g = generator(2)
    x = torch.randn(3000, 3, generator=g)
    y = x.sum(1, keepdim=True) + torch.randn(3000, 1, generator=g)
    problem = replace(
        linear.Truth().problem,
        train=TensorDataset(x, y),
        likelihood=likelihoods.Gaussian(0.03),
        num_train=3000,
    )
    method = method_of(problem, chains=64)[0].float()
    w = (0.9 + 1e-3 * torch.randn(64, 4, generator=g)).float()
    away = x.double() @ w[:, :3].double().T + w[:, 3].double() - y.double()
    sigma = math.exp(float(torch.tensor(math.log(0.03))))
    expected = (away.square() / (2 * sigma**2)).sum(0) + (w.double() - linear.MEAN).square().sum(1) / (
        2 * linear.STD**2
    )
    energy = method._energy(w, Batch(x, y))
    assert energy.mean() > 1e6
    assert_close(energy - energy[0], expected - expected[0], rtol=1e-6, atol=1e-3)
    weights = unravel(w, dict(method.network.named_parameters()))
    outputs = forward(method.network, weights, x)
    plain = -method.likelihood.log_prob(outputs, y).sum(-1).double()
    assert ((plain - plain[0]) - (expected - expected[0])).abs().max() > 0.02


# ---- the integrator


def smooth():
    return replace(problems.known_noise(), prior=priors.normal(0.2, 0.6))


def test_leapfrog_is_reversible():
    """Back with the momenta turned around, to rounding."""
    method, batch = method_of(smooth(), chains=3)
    gradient, steps = method._gradient(batch), torch.tensor([0.01, 0.02, 0.03], dtype=torch.float64)
    momenta = torch.randn(method.positions.shape, generator=generator(), dtype=torch.float64)
    there, final = leapfrog(gradient, method.positions, momenta, steps, 20)
    assert (there - method.positions).abs().max() > 0.1
    back, turned = leapfrog(gradient, there, -final, steps, 20)
    assert_close(back, method.positions, rtol=0, atol=1e-9)
    assert_close(-turned, momenta, rtol=0, atol=1e-8)


def test_leapfrog_conserves_volume():
    """The Jacobian of a trajectory in a potential that is no quadratic has determinant 1."""
    steps = torch.tensor([0.3], dtype=torch.float64)

    def trajectory(state):
        def gradient(q):
            return q**3 - q.flip(1).sin()

        return torch.cat(leapfrog(gradient, state[None, :3], state[None, 3:], steps, 7), 1)[0]

    state = torch.randn(6, generator=generator(4), dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(trajectory, state)
    assert (jacobian - torch.eye(6)).abs().max() > 0.5
    assert torch.linalg.det(jacobian).item() == pytest.approx(1, abs=1e-9)


def test_energy_error_is_of_second_order():
    """Half the step, twice the steps: a quarter of the error, for each of three chains."""
    method, batch = method_of(smooth(), chains=3, seed=1)
    momenta = torch.randn(method.positions.shape, generator=generator(), dtype=torch.float64)

    def error(step, num_steps):
        steps = torch.full((3,), step, dtype=torch.float64)
        q, p = leapfrog(method._gradient(batch), method.positions, momenta, steps, num_steps)
        before = method._energy(method.positions, batch) + kinetic_energy(momenta)
        return method._energy(q, batch) + kinetic_energy(p) - before

    coarse, fine = error(0.004, 10), error(0.002, 20)
    assert (coarse.abs() > 1e-6).all()
    assert_close(coarse / fine, torch.full((3,), 4.0, dtype=torch.float64), rtol=0.1, atol=0)


# ---- the decision

SCALE = 0.35


def one_weight(network=lambda: nn.Sequential(nn.Linear(1, 1, bias=False)), scale=SCALE):
    """N(1.5, scale^2) over one weight of a linear network: one example under the prior N(0, 2^2)."""
    noise = (1 / scale**2 - 1 / 4) ** -0.5
    target = 1.5 * noise**2 / scale**2
    data = TensorDataset(torch.ones(1, 1), torch.tensor([[target]]))
    likelihood = likelihoods.Gaussian(noise)
    return Problem(lambda dropout=0.0: network(), likelihood, priors.normal(0, 2), data, None, 1)


class Always(HMC):
    """Accepts every proposal: what remains without the decision of Metropolis."""

    def _accept(self, probability):
        return torch.ones_like(probability, dtype=torch.bool)


LONG = {"chains": 400, "burn": 0, "kept": 70, "leapfrog_steps": 3, "initial_step_size": 1.6 * SCALE}


ONE = torch.tensor([1.5], dtype=torch.float64), torch.tensor([[SCALE**2]], dtype=torch.float64)


@pytest.fixture(scope="module")
def long():
    return sampled(one_weight(), **LONG)


def test_step_size_does_not_bias_the_variance(long):
    """At steps of 1.6 standard deviations, where many are rejected, mean and variance are exact.

    False alarm: 2 x 7e-6.
    """
    assert 0.5 < long.diagnostics()["acceptance"] < 0.95
    assert_draws_are_of(long.draws[:, 20:], *ONE, least=3000)


def test_steps_that_vary_do_not_bias_the_variance():
    """From 0.8 to 2.4 standard deviations, a fifth of them unstable. False alarm: 2 x 7e-6."""
    method = sampled(one_weight(), **LONG, step_jitter=0.5)
    assert 0.3 < method.diagnostics()["acceptance"] < 0.9
    assert_draws_are_of(method.draws[:, 20:], *ONE, least=3000)


def test_steps_that_vary_let_out_a_chain_that_its_own_step_holds():
    """20 steps of 2.5 standard deviations are unstable, and every trajectory diverges; of half of it not."""
    values = {**LONG, "chains": 4, "leapfrog_steps": 20, "initial_step_size": 2.5 * SCALE}
    held, free = (sampled(one_weight(), **values, step_jitter=jitter) for jitter in (0.0, 0.5))
    assert (held.draws == held.draws[:, :1]).all()
    assert all(len(chain.unique()) > 5 for chain in free.draws)


def test_without_the_decision_the_variance_is_wrong():
    """Negative control: the leapfrog conserves p^2/2 + q^2 (1 - e^2/4)/2: variance 1/(1 - e^2/4)."""
    method = sampled(one_weight(), cls=Always, **LONG)
    ratio = method.draws[:, 20:].var() / SCALE**2
    assert ratio.item() == pytest.approx(1 / (1 - 1.6**2 / 4), rel=0.1)
    with pytest.raises(AssertionError, match="covariance is off"):
        assert_draws_are_of(method.draws[:, 20:], *ONE)


def test_acceptance_is_the_share_that_moved(long):
    """Moves minus their probabilities are a martingale of variance n/4 at most. False alarm: 7e-6."""
    moved = (long.draws[:, 1:] != long.draws[:, :-1]).any(-1).double()
    acceptance = torch.stack([seen["acceptance"] for seen in long.seen])
    assert abs(moved.mean() - acceptance[1:].mean()) < 4.5 / math.sqrt(4 * moved.numel())
    assert long.diagnostics()["acceptance"] == pytest.approx(acceptance.mean().item(), rel=1e-9)


@pytest.mark.parametrize("step", [50.0, 1e30])
def test_a_rejected_proposal_repeats_the_state_and_is_flagged(step):
    """Steps far too large, up to energies that are not finite: no chain moves, and every number says so."""
    method = sampled(problems.mlp(), chains=3, burn=0, kept=6, leapfrog_steps=8, initial_step_size=step)
    start, _ = method_of(problems.mlp(), chains=3, kept=6)
    assert_close(method.draws, start.positions[:, None].expand(3, 6, -1), rtol=0, atol=0)
    assert all(seen["loss"].isfinite() for seen in method.seen)
    found = method.diagnostics()
    assert found["divergences"] == 18
    assert found["acceptance"] == 0
    assert found["weight_ess"] == 3
    assert found["weight_rhat"] == FROZEN
    inputs = problems.mlp().val.tensors[0].double()
    assert mixed(method.diagnostics(inputs)) is False


def test_a_bad_chain_leaves_the_others_alone():
    """One chain's step size blown up: it stays, and the others move as they did without that."""
    method, batch = method_of(problems.mlp(), chains=3, burn=0, leapfrog_steps=5, initial_step_size=0.01)
    other, _ = method_of(problems.mlp(), chains=3, burn=0, leapfrog_steps=5, initial_step_size=0.01)
    other.log_step[1] = 30.0
    for _ in range(4):
        method.training_step(batch, 0)
        other.training_step(batch, 0)
    assert_close(other.positions[[0, 2]], method.positions[[0, 2]], rtol=1e-9, atol=1e-9)
    assert (other.draws[1, :4] == other.draws[1, 0]).all()
    assert other.divergences == 4


# ---- the step size


def test_dual_averaging_is_that_of_pyro():
    """The recursion of Hoffman and Gelman, against pyro's, on made-up acceptances of two chains."""
    from pyro.ops.dual_averaging import DualAveraging

    values = {"chains": 2, "burn": 30, "target_acceptance": 0.7, "initial_step_size": 0.03}
    method, _ = method_of(**values)
    acceptances = torch.rand(30, 2, generator=generator(3), dtype=torch.float64)
    theirs = [DualAveraging(prox_center=math.log(10 * 0.03)) for _ in range(2)]
    for m, acceptance in enumerate(acceptances, 1):
        method._adapt(m, acceptance)
        for scheme, a in zip(theirs, acceptance, strict=True):
            scheme.step(0.7 - a)
        which = 1 if m == 30 else 0  # after burn-in the average
        expected = torch.stack([scheme.get_state()[which] for scheme in theirs])
        assert_close(method.log_step, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("target", [0.6, 0.9])
@pytest.mark.parametrize("step", [1e-4, 3.0])
def test_step_size_reaches_the_target_acceptance(target, step):
    """Starting far too small and far too large; every chain has its own, fixed after burn-in.

    While adapting the mean is the target; the averaged step afterwards accepts more, as the acceptance falls
    the faster the larger the step. Seen: within 0.03, and 0.02 to 0.17 above.
    """
    values = {"target_acceptance": target, "initial_step_size": step, "leapfrog_steps": 4}
    method = sampled(chains=100, burn=200, kept=30, **values)
    adapting = torch.stack([seen["acceptance"] for seen in method.seen[100:200]])
    assert adapting.mean().item() == pytest.approx(target, abs=0.06)
    assert target - 0.03 < method.diagnostics()["acceptance"] < target + 0.25
    assert_close(method.log_step, method.average_log_step, rtol=0, atol=0)
    assert len(method.log_step.unique()) == 100


# ---- exact posteriors


def test_linear_regression_posterior_is_reached():
    """Through the engine, in float32: mean and covariance of all four weights. False alarm: 14 x 7e-6.

    Five steps: some other lengths are near a whole period of one of the directions, and R-hat flags them.
    How near five are depends on the step size that a processor's rounding leads to: with 100 draws a chain
    the square of one direction had 347 effective ones on one processor, and over 400 on others.
    """
    truth = linear.Truth()
    values = {"target_acceptance": 0.85, "initial_step_size": 0.05}
    method, engine = fit(chains=20, burn=120, kept=200, leapfrog_steps=5, **values)
    assert method.draws.dtype == torch.float32
    assert_draws_are_of(method.draws, truth.mean, truth.precision.inverse())
    mean, variance = linear.flat(method.moments())
    assert_close(mean, method.draws.flatten(0, 1).double().mean(0), rtol=1e-5, atol=1e-6)
    assert_close(variance, method.draws.flatten(0, 1).double().var(0, correction=0), rtol=1e-4, atol=1e-6)

    (record,) = engine.fits
    assert record["steps"] == record["epochs"] == 320
    found = record["diagnostics"]
    assert found["gradient_evaluations"] == 20 * 320 * 6
    assert found["acceptance"] == pytest.approx(0.9, abs=0.08)
    assert found["weight_rhat"] < RHAT_LIMIT
    assert found["weight_ess"] > 400
    inputs = torch.randn(300, 3, generator=generator(5))
    engine.predict(method, inputs, 100)
    assert mixed(engine.diagnostics) is True


class Square(nn.Module):
    """One weight, whose sign nobody can tell."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.randn(()))

    def forward(self, inputs):
        """A line through the origin of positive slope."""
        return self.gain.square() * inputs


@pytest.mark.slow
def test_modes_of_equal_function_are_told_apart():
    """Chains on both sides of a symmetry: the weights do not mix, what they predict does."""
    problem = one_weight(Square, 0.1)
    method = sampled(problem, seed=3, chains=8, burn=120, kept=120, leapfrog_steps=7, initial_step_size=0.05)
    signs = method.draws[..., 0].sign()
    assert (signs == signs[:, :1]).all(), "no chain crosses"
    assert len(signs[:, 0].unique()) == 2, "and they do not start on one side"
    assert method.diagnostics()["weight_rhat"] > 1.5
    assert mixed(method.diagnostics(torch.ones(1, 1).double())) is True


# ---- start, draws, refusals


def test_chains_start_apart_or_where_the_last_fit_ended():
    """Every chain at an initialisation of its own; a second fit goes on from the first's chains."""
    method, batch = method_of(problems.mlp(), chains=3, burn=1, kept=4, leapfrog_steps=3)
    assert len(method.positions.unique(dim=0)) == 3
    own = ravel({name: p[None] for name, p in method.network.named_parameters()})
    assert_close(method.positions[:1], own, rtol=0, atol=0)
    method.training_step(batch, 0)
    second, _ = method_of(problems.mlp(), start=method, chains=3, burn=1, kept=4)
    assert_close(second.positions, method.positions, rtol=0, atol=0)
    kept = method.positions.clone()
    second.training_step(batch, 0)
    assert_close(method.positions, kept, rtol=0, atol=0)
    assert second.transitions == 1


@pytest.mark.parametrize("kernel", ["hmc", pytest.param("nuts", marks=pytest.mark.slow)])
def test_chains_start_where_the_problem_says(kernel):
    """All of them; a second fit goes on from the first's chains all the same, and so does a resumed one."""
    asked = []

    def start():
        asked.append(1)
        return {"0.bias": torch.full((1,), 4.0), "0.weight": torch.tensor([[1.0, 2.0, 3.0]])}

    problem = replace(linear_problem(), starts_from=start)
    values = {"kernel": kernel, "chains": 3, "burn": 0, "kept": 4, "leapfrog_steps": 1}
    method, batch = method_of(problem, initial_step_size=1e-9, **values)
    method.training_step(batch, 0)
    expected = torch.tensor([[1.0, 2.0, 3.0, 4.0]], dtype=torch.float64).expand(3, 4)
    assert_close(method.positions, expected, rtol=0, atol=1e-6)
    method.training_step(batch, 0)
    second, _ = method_of(problem, start=method, initial_step_size=1e-9, **values)
    second.training_step(batch, 0)
    assert_close(second.positions, method.positions, rtol=0, atol=1e-6)
    assert len(asked) == 1


def test_trajectories_of_burn_in_may_have_another_length():
    """The gradients of 5 transitions of 2 steps and 4 of 7, for 3 chains; a step more for each transition."""
    method = sampled(chains=3, burn=5, kept=4, leapfrog_steps=7, burn_leapfrog_steps=2)
    assert method.gradients == 3 * (5 * 3 + 4 * 8)


def test_draws_are_taken_chain_after_chain():
    """Equally many of each chain in order, none twice before all are taken; and predictions are theirs."""
    method, _ = method_of(chains=3, burn=2, kept=8)
    assert (method.num_chains, method.num_draws) == (3, 24)
    method.transitions.fill_(10)
    method.draws.copy_(torch.arange(3 * 8 * 4).reshape(3, 8, 4))
    numbers = method.draws[..., 0].flatten()  # of chain c from 32 c on
    for samples, of_each in ((6, [2, 2, 2]), (7, [3, 2, 2]), (1, [1, 0, 0])):
        taken = method._choose(samples, generator())[:, 0]
        assert_close(taken, taken.unique(), rtol=0, atol=0)
        assert [((taken // 32) == c).sum().item() for c in range(3)] == of_each
    assert_close(method._choose(24, generator())[:, 0], numbers, rtol=0, atol=0)
    twice = method._choose(54, generator())[:, 0].reshape(3, 18)
    assert_close(twice[:, :8], numbers.reshape(3, 8), rtol=0, atol=0)
    assert_close(twice[:, 8:16], numbers.reshape(3, 8), rtol=0, atol=0)
    inputs = linear.Truth().problem.train.tensors[0].double()
    prediction = method.predict(inputs, 7, generator(9))
    weights = method.sample_weights(7, generator(9))
    assert_close(prediction.mean, inputs @ weights["0.weight"].mT + weights["0.bias"][:, None])


def test_draws_of_large_networks_stay_in_order(monkeypatch):
    """However few draws predict at once."""
    method, _ = method_of(chains=3, kept=8, burn=0)
    method.transitions.fill_(8)
    method.draws.copy_(torch.randn(3, 8, 4, generator=generator()))
    inputs = linear.Truth().problem.train.tensors[0].double()
    whole = method.predict(inputs, 12, generator(1))
    monkeypatch.setattr("bench.weights._CHUNK", 20)
    assert_close(method.predict(inputs, 12, generator(1)).mean, whole.mean)


def refusal(problem=None, **values):
    with pytest.raises(UsageError, match=r"^hmc") as info:
        method_of(problem, **values)
    assert "\n" not in str(info.value)
    return str(info.value)


def test_learned_noise_is_refused():
    assert "known sigma" in refusal(problems.regression())


def test_too_many_draws_are_refused(monkeypatch):
    monkeypatch.setattr(hmc, "_LARGEST", 3 * 10 * 4 * 4)
    method_of(chains=3, kept=10)
    assert "--method.kept" in refusal(chains=3, kept=11)


def test_nuts_without_pyro_is_refused(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "pyro" else found(name, *rest)
    )
    assert "pip install 'posterior-bench[nuts]'" in refusal(kernel="nuts")
    method_of(kernel="hmc")


def test_nuts_refuses_steps_that_vary():
    assert "--method.step_jitter" in refusal(kernel="nuts", step_jitter=0.1)


# ---- the kernel nuts

NUTS = {"kernel": "nuts", "chains": 2, "burn": 100, "kept": 300, "initial_step_size": 0.1}


@pytest.fixture(scope="module")
def nuts():
    before = torch.random.get_rng_state(), np.random.get_state()[1].copy(), warnings.filters[:]
    method, engine = fit(**NUTS)
    assert "pyro" in sys.modules
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()
    assert warnings.filters == before[2]
    return method, engine


@pytest.mark.slow
def test_nuts_reaches_the_linear_regression_posterior(nuts):
    """Mean and covariance; false alarm 14 x 7e-6. And the record says how it went."""
    method, engine = nuts
    truth = linear.Truth()
    assert_draws_are_of(method.draws, truth.mean, truth.precision.inverse(), least=150)
    (record,) = engine.fits
    assert record["steps"] == 400
    found = record["diagnostics"]
    assert found["acceptance"] == pytest.approx(0.8, abs=0.15)
    assert found["weight_rhat"] < 1.1
    assert found["gradient_evaluations"] > 2 * 400
    assert found["divergences"] == 0
    assert 0.05 < found["step_size"] < 3


SHORT = {"kernel": "nuts", "chains": 2, "burn": 40, "kept": 6, "initial_step_size": 0.1}


@pytest.mark.slow
def test_nuts_takes_the_draws_of_pyros_mcmc_in_one_go():
    """With the seed of each chain, through burn-in, adapted mass and all."""
    from pyro.infer import MCMC, NUTS

    method, batch = method_of(**SHORT)
    seed = int(torch.randint(2**62, (), generator=generator(method.generator.initial_seed())))
    starts = method.positions.clone()
    for _ in range(46):
        method.training_step(batch, 0)
    for chain in range(2):
        kernel = NUTS(
            potential_fn=lambda w: method._energy(w["weights"][None], batch)[0],
            step_size=0.1,
            target_accept_prob=0.8,
        )
        at = {"weights": starts[chain]}
        whole = MCMC(kernel, 6, warmup_steps=40, initial_params=at, disable_progbar=True)
        with warnings.catch_warnings(), randomness.seeded(seed, chain):
            warnings.simplefilter("ignore")
            whole.run()
        assert torch.equal(whole.get_samples()["weights"], method.draws[chain])


@pytest.mark.parametrize("kernel", ["hmc", pytest.param("nuts", marks=pytest.mark.slow)])
def test_chains_stopped_anywhere_go_on_to_the_same_draws(tmp_path, kernel):
    """At the first transition, while mass and step size are adapted, at the ends of both, among the draws.

    All but the transition under way is kept, and every transition is told.
    """
    values = {**SHORT, "kernel": kernel, "leapfrog_steps": 3}
    whole, undisturbed = fit(**values)
    told = []

    def stops_at(number):
        def observe(event, row):
            if event != "epoch":
                return
            told.append((row["epoch"], row["of"]))
            if row["epoch"] == number:
                raise MemoryError

        return observe

    for number in (1, 2, 7, 20, 36, 37, 40, 41, 44, 46):
        engine = Engine(HMC, Settings(**values), 0, tmp_path, TrainerOptions(accelerator="cpu"), 1, 0)
        engine.observe(stops_at(number))
        with pytest.raises(MemoryError):
            engine.fit(linear_problem(), Budget(1))
    engine = Engine(HMC, Settings(**values), 0, tmp_path, TrainerOptions(accelerator="cpu"), 1, 0)
    method = engine.fit(linear_problem(), Budget(1))
    for name, value in whole.state_dict().items():
        assert torch.equal(method.state_dict()[name], value), name
    assert torch.equal(method.generator.get_state(), whole.generator.get_state())
    assert method.history == whole.history
    assert engine.fits[0]["diagnostics"] == undisturbed.fits[0]["diagnostics"]
    assert {row[1] for row in told} == {46}
    assert len(told) == 46 + 9  # a stop repeats the transition that was told and not yet saved


def test_nuts_refuses_a_precision_that_would_do_nothing():
    engine = Engine(
        HMC, Settings(**SHORT), 0, trainer=TrainerOptions(accelerator="cpu", precision="bf16-mixed")
    )
    with pytest.raises(UsageError, match=r"^hmc: .*float64.*--trainer\.precision 32-true"):
        engine.fit(linear_problem(), Budget(1))


@pytest.mark.slow
def test_nuts_follows_its_seed(capfd, tmp_path):
    """Equal seeds, equal draws; chains differ; nothing is printed; a finished fit is found again."""
    values = {**NUTS, "burn": 5, "kept": 8}
    first = fit(**values)[0]
    assert_close(fit(**values)[0].draws, first.draws, rtol=0, atol=0)
    assert not torch.equal(first.draws[0], first.draws[1])
    assert_close(first.positions, first.draws[:, -1], rtol=0, atol=0)
    settings, options = Settings(**values), TrainerOptions(accelerator="cpu")
    problem = linear.Truth().problem
    for seed in (0, 0, 1):
        engine = Engine(HMC, settings, seed, trainer=options, checkpoints=tmp_path / str(seed))
        again = engine.fit(problem, Budget(1))
        assert torch.equal(again.draws, first.draws) is (seed == 0)
    inputs = problem.train.tensors[0]
    assert_close(
        again.predict(inputs, 6, generator()).mean, again.predict(inputs, 6, generator()).mean, rtol=0, atol=0
    )
    assert capfd.readouterr() == ("", "")
