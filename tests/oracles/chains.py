"""The law of a chain on a linear problem, without sampling: its transition, and where that comes to rest."""

from __future__ import annotations

import scipy.linalg
import torch
from oracles.linear import Truth
from torch import Tensor

from bench.contract import Batch, Budget, Problem
from bench.diagnostics import effective_sample_size
from bench.families.chain import Chain


def chain_of(cls: type[Chain], problem: Problem, **values: object) -> tuple[Chain, Batch]:
    """The method in float64 before its first step, and all data."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        method = cls(problem, cls.settings_class(**values)).double()
    return method, Batch(*(t.double() for t in problem.train.tensors))


def stationary(method: Chain, batch: Batch, state: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    """Mean `[d]` and covariance `[d, d]` of the position under the chain's stationary law.

    A step is affine in the state and in its noise: s <- A s + b + B z. Unit vectors give A and B, and the
    covariance C solves C = A C A' + B B', by scipy.

    Args:
        method: On a linear problem with normal noise and prior.
        batch: All data.
        state: Names of the buffers that a step moves, the position first.
    """
    d = len(method.position)

    def step(at: Tensor, noise: Tensor) -> Tensor:
        for name, part in zip(state, at.split(d), strict=True):
            getattr(method, name).copy_(part)
        method.standard_noise = lambda: noise
        _, slope = method.gradient(batch)
        method.move(slope, method.rate(0) / method.problem.num_train, noisy=True)
        return torch.cat([getattr(method, name) for name in state])

    origin, silence = torch.zeros(d * len(state)).double(), torch.zeros(d).double()
    shift = step(origin, silence)
    moves = torch.stack([step(unit, silence) - shift for unit in torch.eye(len(origin)).double()], 1)
    noise = torch.stack([step(origin, unit) - shift for unit in torch.eye(d).double()], 1)
    mean = torch.linalg.solve(torch.eye(len(origin)).double() - moves, shift)
    covariance = scipy.linalg.solve_discrete_lyapunov(moves.numpy(), (noise @ noise.T).numpy())
    return mean[:d], torch.from_numpy(covariance)[:d, :d]


def standard_errors_off(cls: type[Chain], truth: Truth, covariance: Tensor, **values: object) -> float:
    """Of the ten second moments of some 2,000 draws in a row the largest distance from `covariance` `[4, 4]`.

    In their own standard errors, each from its effective sample size, which must be 100.
    """
    method, batch = chain_of(cls, truth.problem, burn_in=0.02, kept=2000, **values)
    method.spends(Budget(epochs=2040))
    for _ in range(2040):
        method.training_step(batch, 0)
    root = torch.linalg.cholesky(covariance)
    z = torch.linalg.solve_triangular(root, (method._so_far - truth.mean).T, upper=False)  # [4, N]
    pairs = torch.triu_indices(4, 4)
    products = z[pairs[0]] * z[pairs[1]]
    sizes = torch.from_numpy(effective_sample_size(products.T[None].numpy()))
    assert sizes.min() > 100
    expected = (pairs[0] == pairs[1]).double()
    return float(((products.mean(1) - expected).abs() / (products.std(1) / sizes.sqrt())).max())
