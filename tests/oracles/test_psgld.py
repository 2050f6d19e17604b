"""Preconditioned SGLD: its steps by hand, and the law of its draws where the preconditioner stands still."""

import pytest
import torch
from conformance import problems
from oracles import linear
from oracles.chains import chain_of, stationary
from torch.testing import assert_close

from bench.errors import UsageError
from bench.methods import psgld
from bench.methods.psgld import PSGLD, Settings


def test_steps_by_hand():
    """Two steps of algorithm 1 of Li et al. 2016 without Gamma, from given noise."""
    method, batch = chain_of(PSGLD, problems.known_noise(), learning_rate=0.003)
    w, v = method.position.clone(), 0
    e = 2 * 0.003 / 20
    for seed in range(2):
        z = torch.randn(len(w), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        method.standard_noise = lambda z=z: z
        slope = method.gradient(batch)[1]
        v = 0.99 * v + 0.01 * (slope / 20) ** 2
        g = 1 / (1e-5 + v.sqrt())
        w = w - e / 2 * g * slope + (e * g).sqrt() * z
        method.training_step(batch, 0)
        assert_close(method.position, w)


def test_draws_under_a_preconditioner_that_stands_still_are_the_posterior_s_but_for_the_step(monkeypatch):
    """Where V is constant, w / sqrt(G) moves as under SGLD, with the precision sqrt(G) P sqrt(G).

    Along an eigenvector of that, of eigenvalue p, the variance is 1 / (p (1 - e p / 4)), the step so large
    that this is 1.43 times the posterior's in the stiffest direction. The mean is the posterior's.
    """
    monkeypatch.setattr(psgld, "_DECAY", 1.0)
    truth = linear.Truth()
    squares = torch.tensor([0.04, 0.3, 2.0, 0.6], dtype=torch.float64)
    root = (1 / (1e-5 + squares.sqrt())).sqrt()
    p, vectors = torch.linalg.eigh(root[:, None] * truth.precision * root)
    e = 1.2 / p.max().item()
    method, batch = chain_of(PSGLD, truth.problem, learning_rate=e * linear.ROWS / 2)
    method.squares.copy_(squares)
    mean, covariance = stationary(method, batch, ("position",))
    expected = vectors @ (1 / (p * (1 - e * p / 4))).diag() @ vectors.T
    assert_close(mean, truth.mean, rtol=1e-6, atol=1e-7)
    assert_close(covariance, root[:, None] * expected * root, rtol=1e-6, atol=1e-9)


def test_a_learned_noise_is_refused():
    """In one line."""
    with pytest.raises(UsageError, match=r"^psgld: the likelihood has parameters of its own"):
        PSGLD(problems.regression(), Settings())
