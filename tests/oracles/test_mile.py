"""Microcanonical Langevin ensembles: members descend as each alone would, and go on as chains."""

import pytest
import torch
from oracles.linear import Truth
from torch.testing import assert_close

from bench.contract import Batch, Budget
from bench.energy import likelihood_term
from bench.engine.engine import Engine
from bench.methods.mile import MILE, Settings
from bench.weights import forward, unravel

SHORT = {"chains": 3, "burn": 3, "kept": 4, "steps": 1}


def watched(settings, problem):
    """The fitted method, where its members were before each epoch, and at the end."""
    seen = []

    class Watched(MILE):
        def training_step(self, batch, batch_idx):
            seen.append(self.positions.detach().clone())
            return super().training_step(batch, batch_idx)

    method = Engine(Watched, settings, seed=0).fit(problem, Budget(epochs=1))
    return method, [*seen, method.positions.detach()]


def test_members_descend_to_the_mode():
    """Which is the mean of the exact posterior, to a thousandth of its standard deviations."""
    truth = Truth()
    _, seen = watched(Settings(**SHORT | {"steps": 10}, optimised=80, learning_rate=0.05), truth.problem)
    away = (seen[80].double() - truth.mean) @ torch.linalg.cholesky(truth.precision)
    assert away.abs().max() < 1e-3
    assert len(seen) == 80 + 3 + 4 + 1


def test_every_member_descends_as_it_would_alone():
    """By torch's own Adam on the negative log joint per example of one network."""
    truth = Truth()
    method, seen = watched(Settings(**SHORT, optimised=5, learning_rate=0.03), truth.problem)
    batch = Batch(*truth.problem.train.tensors)
    like = dict(method.network.named_parameters())
    for c in range(3):
        alone = seen[0][c].clone().requires_grad_()
        optimizer = torch.optim.Adam([alone], lr=0.03)
        for step in range(5):
            assert_close(seen[step][c], alone.detach())
            weights = unravel(alone[None], like)
            outputs = forward(method.network, weights, batch.inputs)
            nll = likelihood_term(method.likelihood, outputs, batch, 15)
            prior = sum(method.prior[name].log_prob(w).sum() for name, w in weights.items())
            optimizer.zero_grad()
            ((nll - prior) / 15).backward()
            optimizer.step()
    assert not torch.allclose(seen[0][0], seen[0][1])


def test_the_published_schedule():
    """Energy errors aimed at go from 0.5 to 0.1; steps begin at 0.001, L at 15; gradients are counted."""
    method, _ = watched(Settings(**SHORT, optimised=5), Truth().problem)
    assert [method.target(share) for share in (0, 0.5, 1)] == pytest.approx([0.5, 0.3, 0.1])
    fresh = MILE(Truth().problem, Settings(**SHORT))
    assert fresh.step_size.tolist() == [1e-3] * 3
    assert fresh.length.tolist() == [15.0] * 3
    assert int(method.gradients) == 3 * (5 + 7 * 3)
    assert method.draws.shape == (3, 4, 4)
    assert len(method.draws.unique(dim=1)[0]) == 4
