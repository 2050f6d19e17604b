"""IVON against the authors' own package, step by step from the same noise, and against a closed form."""

import copy
import math
from dataclasses import replace

import ivon
import pytest
import torch
from conformance import problems
from oracles import linear
from torch import nn
from torch.testing import assert_close

from bench import priors
from bench.contract import Batch, Budget
from bench.errors import UsageError
from bench.methods.ivon import IVON, Settings
from bench.weights import unravel

STD = 0.7
CHOSEN = {"learning_rate": 0.05, "beta1": 0.8, "beta2": 0.95, "initial_scale": 0.3}
RATES = {"lr": "learning_rate", "beta1": "beta1", "beta2": "beta2"}


def method_of(problem, cls=IVON, **values):
    """The method in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        method = cls(problem, Settings(**values)).double()
    for log_scale in method.log_scale:
        nn.init.constant_(log_scale, math.log(method.settings.initial_scale))  # made in float32
    return method


def problem_of():
    """Regression under N(0, STD^2) with ten rows in the training set, of which batches see some."""
    return replace(problems.known_noise(), prior=priors.normal(0.0, STD))


def batches_of(problem):
    """Three batches of 7, 7 and 6 rows."""
    inputs, targets = (t.double().split(7) for t in problem.train.tensors)
    return [Batch(*pair) for pair in zip(inputs, targets, strict=True)]


def steps_of(method, num_samples, num_steps=12):
    """Means after every step of the method, `[T, d]`, and its last variances; noise as `theirs` has it."""
    optimizer = method.configure_optimizers()["optimizer"]
    like, seen = dict(method.network.named_parameters()), []
    size = sum(p.numel() for p in like.values())
    batches = batches_of(method.problem)
    for step in range(num_steps):
        torch.manual_seed(step)
        drawn = torch.stack([torch.randn(size, dtype=torch.float64) for _ in range(num_samples)])
        optimizer.zero_grad()
        terms = method.loss_terms(batches[step % 3], unravel(drawn, like))
        (sum(terms) / method.problem.num_train).backward()
        optimizer.step()
        seen.append(nn.utils.parameters_to_vector(like.values()).detach())
    return torch.stack(seen), linear.flat(method.moments())[1]


def theirs(method, num_samples, num_steps=12):
    """The same by the package, on the mean loss per example with weight decay for the prior."""
    problem, network = method.problem, method.network
    n, decay = problem.num_train, 1 / (problem.num_train * STD**2)
    chosen = {theirs: CHOSEN[ours] for theirs, ours in RATES.items()}
    optimizer = ivon.IVON(network.parameters(), ess=n, weight_decay=decay, **chosen)
    (group,) = optimizer.param_groups
    group["hess_init"] = (
        -2 * method.log_scale[0][0, 0]
    ).exp().item() / n - decay  # as float32 has rounded it
    group["hess"].fill_(group["hess_init"])
    batches, seen = batches_of(problem), []
    for step in range(num_steps):
        torch.manual_seed(step)
        batch = batches[step % 3]
        for _ in range(num_samples):
            with optimizer.sampled_params(train=True):
                optimizer.zero_grad()
                log_probs = method.likelihood.log_prob(network(batch.inputs)[None], batch.targets)
                (-log_probs.mean()).backward()
        optimizer.step()
        seen.append(nn.utils.parameters_to_vector(network.parameters()).detach())
    return torch.stack(seen), 1 / (n * (group["hess"] + decay))


@pytest.fixture(autouse=True)
def _own_randomness():
    """The package draws from torch's global generator."""
    with torch.random.fork_rng(devices=[]):
        yield


@pytest.mark.parametrize("num_samples", [1, 3])
def test_trajectory_is_that_of_the_authors_package(num_samples):
    """Twelve steps on mini-batches, from the same noise, in float64: every mean, and all variances."""
    means, variances = steps_of(method_of(problem_of(), **CHOSEN), num_samples)
    expected, expected_variances = theirs(method_of(problem_of(), **CHOSEN), num_samples)
    assert (expected[-1] - expected[0]).abs().max() > 0.05, "it must go somewhere"
    assert (expected_variances / expected_variances[0] - 1).abs().max() > 0.3
    assert_close(means, expected, rtol=1e-9, atol=1e-10)
    assert_close(variances, expected_variances, rtol=1e-9, atol=0)


class MomentumOfThePrior(IVON):
    """Takes the whole gradient of the bound into its momentum, with a prior that pulls nowhere."""

    def _decay(self):
        return [(centre, 1e-9 * delta) for centre, delta in super()._decay()]


class Cold(IVON):
    """Counts the data twice."""

    def loss_terms(self, batch, noise):
        """The likelihood term twice."""
        nll, prior_term = super().loss_terms(batch, noise)
        return 2 * nll, prior_term


@pytest.mark.parametrize("cheat", [MomentumOfThePrior, Cold])
def test_another_rule_has_another_trajectory(cheat):
    """Negative controls: the prior in the momentum, and a cold posterior."""
    means, _ = steps_of(method_of(problem_of(), cheat, **CHOSEN), 1)
    expected, _ = theirs(method_of(problem_of(), **CHOSEN), 1)
    assert (means - expected).abs().max() > 1e-3


def test_rests_at_the_mean_field_optimum_of_linear_regression():
    """With exact expectations, under a prior whose mean is not 0: posterior mean, diagonal of its precision.

    Mean field is at its optimum where the precisions are those diagonals, `[4]`; no step leads away.
    """
    truth = linear.Truth()
    method = method_of(truth.problem, learning_rate=0.03, beta1=0.3, beta2=0.6)
    optimizer = method.configure_optimizers()["optimizer"]
    batch = Batch(*(t.double() for t in truth.problem.train.tensors))
    noise = linear.exact_noise(method)
    for _ in range(100):
        optimizer.zero_grad()
        (sum(method.loss_terms(batch, noise)) / linear.ROWS).backward()
        optimizer.step()
    mean, variance = linear.flat(method.moments())
    assert_close(mean, truth.mean, rtol=1e-6, atol=1e-7)
    assert_close(variance, 1 / truth.precision.diagonal(), rtol=1e-6, atol=0)


def test_learning_rate_goes_by_a_cosine():
    """From the setting in the first epoch to (1 + cos(3 pi / 4)) / 2 of it in the fourth of four."""
    method = method_of(problem_of(), **CHOSEN)
    method.spends(Budget(epochs=4))
    found, batch = method.configure_optimizers(), batches_of(method.problem)[0]
    rates = []
    for _ in range(4):
        rates.append(found["optimizer"].param_groups[0]["lr"])
        found["optimizer"].zero_grad()
        sum(method.loss_terms(batch, method.draw_noise(1, method.generator))).backward()
        found["optimizer"].step()
        found["lr_scheduler"].step()
    assert rates == pytest.approx([0.05, 0.05 * 0.8535534, 0.025, 0.05 * 0.1464466])


@pytest.mark.parametrize("is_resumed", [False, True])
@pytest.mark.parametrize("mean", [0.0, 0.3])
def test_steps_are_the_formula_weight_by_weight(mean, is_resumed):
    """Given gradients, whatever the prior's mean; after half of them the optimiser is made from its state."""
    method = method_of(replace(problems.known_noise(), prior=priors.normal(mean, STD)), **CHOSEN)
    n, delta = method.problem.num_train, 1 / (method.problem.num_train * STD**2)
    m, r = (
        nn.utils.parameters_to_vector(p).detach().clone()
        for p in (method.network.parameters(), method.log_scale)
    )
    momentum, optimizer = torch.zeros_like(m), method.configure_optimizers()["optimizer"]
    for step in range(1, 5):
        for p in method.parameters():
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step)).to(p)
        g, h = (
            torch.cat([p.grad.flatten() for p in part])
            for part in (method.network.parameters(), method.log_scale)
        )
        optimizer.step()
        x = (1 - 0.95) * n * h
        r = r - 0.5 * (1 + x + x**2 / 2).log()
        momentum = 0.8 * momentum + 0.2 * (g - delta * (m - mean))
        m = m - 0.05 * (2 * r).exp() / 0.3**2 * (momentum / (1 - 0.8**step) + delta * (m - mean))
        assert_close(nn.utils.parameters_to_vector(method.network.parameters()).detach(), m)
        assert_close(nn.utils.parameters_to_vector(method.log_scale).detach(), r)
        if is_resumed and step == 2:
            kept, optimizer = optimizer.state_dict(), method.configure_optimizers()["optimizer"]
            optimizer.load_state_dict(copy.deepcopy(kept))


def test_parameters_of_the_likelihood_go_by_averaged_gradients():
    """Two steps by hand: running means of 0.2 g and 0.16 g + 0.2 g' over 0.2 and 0.36."""
    method = method_of(problems.regression(), **CHOSEN)
    (noise,) = method.likelihood.parameters()
    before = noise.detach().clone()
    optimizer = method.configure_optimizers()["optimizer"]
    for p in method.parameters():
        p.grad = torch.zeros_like(p)
    moved = 0.0
    for gradient, averaged in ((1.0, 1.0), (-3.0, (0.16 - 0.6) / 0.36)):
        noise.grad = torch.full_like(noise, gradient)
        optimizer.step()
        moved += 0.05 * averaged
    assert_close(noise.detach(), before - moved)


def test_priors_that_are_no_independent_normals_are_refused():
    """In one line."""
    with pytest.raises(UsageError, match=r"^ivon: needs a prior of independent normals"):
        method_of(replace(problems.mlp(), prior=priors.scale_mixture()))
