"""Maximum a posteriori against ridge regression in closed form."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.data import TensorDataset

from bench import likelihoods, priors
from bench.contract import Batch, Budget, Problem
from bench.engine.engine import Engine, TrainerOptions
from bench.methods.map import MAP, Settings

SIGMA, STD, MEAN = 0.5, 0.7, 0.2


def linear(dropout=0.0):
    return nn.Linear(3, 1)


@pytest.fixture
def ridge():
    """A linear problem and its mode: weights (3) and intercept."""
    g = torch.Generator().manual_seed(0)
    inputs = torch.randn(25, 3, generator=g) * torch.tensor([1.0, 2.0, 0.5]) + 0.3
    targets = inputs @ torch.tensor([[1.0], [-0.5], [2.0]]) + 0.4 + SIGMA * torch.randn(25, 1, generator=g)
    problem = Problem(
        linear,
        likelihoods.Gaussian(SIGMA),
        priors.normal(MEAN, STD),
        TensorDataset(inputs, targets),
        None,
        25,
    )
    x = np.hstack([inputs.double().numpy(), np.ones((25, 1))])
    precision = x.T @ x / SIGMA**2 + np.eye(4) / STD**2
    mode = np.linalg.solve(precision, x.T @ targets.double().numpy()[:, 0] / SIGMA**2 + MEAN / STD**2)
    return problem, mode


def test_the_gradient_is_zero_at_the_mode_alone(ridge):
    """At the closed form the gradient of the loss vanishes; a step away it is precision times the step."""
    problem, mode = ridge
    method = MAP(problem, Settings()).double()
    batch = Batch(*(t.double() for t in problem.train.tensors))
    x = np.hstack([batch.inputs.numpy(), np.ones((25, 1))])
    precision = x.T @ x / SIGMA**2 + np.eye(4) / STD**2
    for step in (np.zeros(4), np.array([0.1, -0.2, 0.05, 0.3])):
        method.network.weight.data = torch.from_numpy(mode[None, :3] + step[None, :3])
        method.network.bias.data = torch.from_numpy(mode[3:] + step[3:])
        method.zero_grad()
        sum(method.loss_terms(batch, {})).backward()
        gradient = torch.cat([method.network.weight.grad[0], method.network.bias.grad])
        assert_close(gradient, torch.from_numpy(precision @ step), rtol=1e-5, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adam", "amsgrad", "sgd"])
def test_training_reaches_the_mode(ridge, optimizer):
    """Full-batch training by the engine ends at the closed form."""
    problem, mode = ridge
    settings = Settings(learning_rate=0.02, optimizer=optimizer)
    engine = Engine(MAP, settings, 0, trainer=TrainerOptions(accelerator="cpu"))
    method = engine.fit(problem, Budget(800))
    found = torch.cat([method.network.weight[0], method.network.bias]).detach().double()
    assert_close(found, torch.from_numpy(mode), rtol=1e-3, atol=1e-3)


def test_the_loss_at_the_mode_is_the_negative_log_joint(ridge):
    """Likelihood and prior term against scipy-free formulas in nats."""
    problem, mode = ridge
    method = MAP(problem, Settings()).double()
    method.network.weight.data, method.network.bias.data = (
        torch.from_numpy(mode[None, :3]),
        torch.from_numpy(mode[3:]),
    )
    batch = Batch(*(t.double() for t in problem.train.tensors))
    likelihood_term, prior_term = method.loss_terms(batch, {})
    residuals = (batch.targets[:, 0] - batch.inputs @ torch.from_numpy(mode[:3]) - mode[3]).numpy()
    nll = (residuals**2 / (2 * SIGMA**2) + 0.5 * np.log(2 * np.pi * SIGMA**2)).sum()
    nlp = ((mode - MEAN) ** 2 / (2 * STD**2) + 0.5 * np.log(2 * np.pi * STD**2)).sum()
    assert likelihood_term.item() == pytest.approx(nll, rel=1e-6)
    assert prior_term.item() == pytest.approx(nlp, rel=1e-6)


def test_the_prior_of_the_next_fit_is_the_given_one(ridge):
    """MAP has no posterior to hand on: it keeps the prior and goes on from its weights."""
    problem, _ = ridge
    engine = Engine(MAP, Settings(), 0, trainer=TrainerOptions(accelerator="cpu"))
    method = engine.fit(problem, Budget(1))
    assert method.as_prior() is problem.prior
    again = MAP(problem, Settings(), start=method)
    assert_close(again.state_dict(), method.state_dict(), rtol=0, atol=0)
