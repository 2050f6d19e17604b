"""Epinet: its two parts against the equations, entry by entry, and what reaches the base network."""

import math
from dataclasses import replace

import pytest
import torch
from conformance import problems
from torch.distributions import Normal
from torch.nn import functional
from torch.testing import assert_close

from bench.contract import Batch
from bench.errors import UsageError
from bench.methods.epinet import Epinet, Settings


def made(problem=None, **values):
    """The method in float64, and all data."""
    problem = problem or problems.mlp()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        method = Epinet(problem, Settings(**values)).double()
    inputs, targets = problem.train.tensors
    return method, Batch(inputs.double(), targets)


def indices(method, count=3):
    return method.draw_noise(count, torch.Generator().manual_seed(1))["index"]


def test_prior_part_is_a_sum_of_random_networks_by_the_index():
    """Without the learned part: base(x) + a sum_i p_i(x) z_i, each network by itself, and linear in z."""
    method, batch = made(prior_scale=0.7, index=4)
    for p in method.learned.leave.parameters():
        p.data.zero_()
    z, expected = indices(method), []
    for one in z:
        total = method.network(batch.inputs)
        for i in range(4):
            hidden = batch.inputs
            for number in range(3):
                layer = torch.nn.Linear(
                    *getattr(method.fixed, f"layer_{number}")[i].shape, bias=False
                ).double()
                layer.weight.data = getattr(method.fixed, f"layer_{number}")[i].T
                hidden = layer(hidden) if number == 2 else functional.relu(layer(hidden))
            total = total + 0.7 * one[i] * hidden
        expected.append(total)
    found = method.functions(batch.inputs, z)
    assert_close(found, torch.stack(expected))
    base = method.network(batch.inputs)
    assert_close(method.functions(batch.inputs, -2 * z) - base, -2 * (found - base))


def test_learned_part_is_the_contraction_of_the_equation():
    """g([h, z])^T z, input by input and index by index; without an index it is nothing."""
    method, batch = made(prior_scale=0.0, index=3, units=7)
    z, own = indices(method), method.learned
    hidden = method.network[:-1](batch.inputs)  # the last layer of this stack is the head
    found = method.functions(batch.inputs, z)
    base = method.network(batch.inputs)
    for s in range(3):
        for b in (0, 5):
            g = own.leave(own.hidden(own.enter(torch.cat([hidden[b], z[s]])).relu()).relu()).view(3, 3)
            said = torch.stack([sum(g[k, d] * z[s, d] for d in range(3)) for k in range(3)])
            assert_close(found[s, b], base[b] + said)
    assert_close(method.functions(batch.inputs, 0 * z), base.expand(3, *base.shape))


def test_loss_is_the_mean_over_indices_plus_both_priors():
    """And the gradient of the base network is that of its outputs, what is added held as it is."""
    method, batch = made(index=3, prior_scale=0.4)
    z = indices(method)
    likelihood, prior = method.loss_terms(batch, {"index": z})
    said = method.network(batch.inputs)
    added = (method.functions(batch.inputs, z) - said).detach()
    nll = sum(functional.cross_entropy(said + a, batch.targets, reduction="sum") for a in added) / 3
    assert_close(likelihood, nll)
    weights = torch.cat([p.flatten() for p in method.network.parameters()])
    small = torch.cat([p.flatten() for p in method.learned.parameters()])
    expected = -Normal(0.1, 0.8).log_prob(weights).sum() - Normal(0.0, 1.0).log_prob(small).sum()
    assert_close(prior, expected, rtol=1e-6, atol=0)
    base = list(method.network.parameters())
    for found, right in zip(
        torch.autograd.grad(likelihood, base), torch.autograd.grad(nll, base), strict=True
    ):
        assert_close(found, right)


def test_random_networks_are_random_and_are_not_trained():
    """Of D = 400 a unit's outputs at x have variance |x|^2 / N: within 4.5 standard errors, 7e-6 a value."""
    method, batch = made(index=400, prior_units=50)
    layer = method.fixed.layer_0
    sums = (batch.inputs[0] @ layer).flatten()  # [400 x 50] independent normals
    variance = batch.inputs[0].square().mean()
    assert abs(sums.var() / variance - 1) < 4.5 * math.sqrt(2 / len(sums))
    assert not dict(method.fixed.named_parameters())
    assert not layer.requires_grad


def test_a_network_without_a_linear_end_is_refused():
    """In one line."""
    ends = replace(
        problems.mlp(), network=lambda: torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh())
    )
    with pytest.raises(
        UsageError, match=r"^epinet needs a network whose outputs are those of one linear layer"
    ):
        Epinet(ends, Settings())
