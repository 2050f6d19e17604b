"""Posteriors of other libraries: Laplace's equals ours, the others the closed forms of a linear model."""

import runpy
import warnings
from dataclasses import replace

import pages
import pytest
import torch
from conformance import problems
from oracles.linear import Truth
from torch.testing import assert_close

from bench import peers, priors
from bench.contract import Budget
from bench.diagnostics import effective_sample_size
from bench.engine.engine import Engine, TrainerOptions
from bench.errors import UsageError
from bench.methods.laplace import Laplace


def fitted(cls, problem, budget, **values):
    """A fit, and what that library warns of while it is imported left aside."""
    engine = Engine(cls, cls.settings_class(**values), 3, trainer=TrainerOptions(accelerator="cpu"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return engine.fit(problem, budget)


@pytest.mark.parametrize("name", ["LaplaceTorch", "PosteriorsLaplace"])
@pytest.mark.parametrize("posed", [problems.mlp, problems.straight_line])
def test_laplace_is_ours(name, posed):
    """Mode, variances and the mean of predictions, after the same fit."""
    problem = replace(posed(), prior=priors.normal(0, 0.8))
    theirs = fitted(getattr(peers, name), problem, Budget(30, 8), learning_rate=0.02)
    ours = fitted(Laplace, problem, Budget(30, 8), learning_rate=0.02, curvature="full")
    mean, variance = (torch.cat([t.flatten() for t in tree.values()]) for tree in ours.moments())
    assert_close(theirs.mode, mean.detach(), rtol=1e-5, atol=1e-6)
    assert_close(theirs.root.square().sum(1), variance, rtol=1e-3, atol=1e-6)
    inputs = posed().val.tensors[0]
    means = [
        m.predict(inputs, 2000, torch.Generator().manual_seed(0)).average().exp()
        if posed is problems.mlp
        else m.predict(inputs, 2000, torch.Generator().manual_seed(0)).mean.mean(0)
        for m in (theirs, ours)
    ]
    assert_close(*means, rtol=0, atol=0.05)


def test_class_of_the_page_is_ours(tmp_path):
    """`docs/entering-a-library.md` to the letter: its file, on classes under N(0, 1)."""
    (block,) = (block for block in pages.blocks("entering-a-library.md") if block.file)
    (tmp_path / block.file).write_text(block.text)
    problem = replace(problems.mlp(), prior=priors.normal(0, 1))
    found = [
        fitted(cls, problem, Budget(10, 8), learning_rate=0.02)
        for cls in (runpy.run_path(str(tmp_path / block.file))["MyLaplace"], peers.LaplaceTorch)
    ]
    assert_close(found[0].mode, found[1].mode, rtol=0, atol=0)
    assert_close(found[0].root, found[1].root, rtol=0, atol=0)
    assert found[0].root.any()


def test_mean_field_inference_finds_the_optimum_of_a_linear_model():
    """Means of the posterior, variances 1 / diag(precision), within the noise of one sample a step."""
    truth = Truth()
    found = fitted(peers.PosteriorsVI, truth.problem, Budget(2000), learning_rate=3e-3)
    mean, sd = found.normal.double()
    exact = truth.precision.diagonal() ** -0.5
    assert ((mean - truth.mean).abs() < 0.6 * exact).all()
    assert_close(sd, exact, rtol=0.15, atol=0)
    assert not torch.allclose(sd, truth.precision.inverse().diagonal().sqrt(), rtol=0.15)  # the marginal ones


def test_langevin_dynamics_has_the_moments_of_its_own_law():
    """Along an eigenvector of precision p a step is v <- (1 - e p) v + sqrt(2 e) z, whose law is known.

    Within 4.5 standard errors, by the effective sample size. False alarm: 8 x 7e-6.
    """
    truth = Truth()
    p, vectors = torch.linalg.eigh(truth.precision)
    e = 0.6 / p.max().item()
    rate = e * truth.problem.num_train
    found = fitted(
        peers.PosteriorsSGLD, truth.problem, Budget(3000), learning_rate=rate, kept=1000, burn_in=0.1
    )
    away = (found.draws.double() - truth.mean) @ vectors
    variance = 1 / (p * (1 - e * p / 2))
    for values, expected, spread in ((away, 0 * p, variance), (away.square(), variance, 2 * variance**2)):
        draws = torch.from_numpy(effective_sample_size(values[None].numpy()))
        assert draws.min() > 50
        assert ((values.mean(0) - expected).abs() < 4.5 * (spread / draws).sqrt()).all()


@pytest.mark.parametrize("name", ["LaplaceTorch", "PosteriorsVI"])
def test_a_library_that_is_not_there_is_one_line_before_training(name, monkeypatch):
    monkeypatch.setattr(peers, "find_spec", lambda package: None)
    with pytest.raises(UsageError, match=r"laplace and posteriors cannot be imported: pip install"):
        fitted(getattr(peers, name), problems.mlp(), Budget(1))


def test_what_they_cannot_infer_is_one_line():
    with pytest.raises(UsageError, match="take another task"):
        fitted(peers.LaplaceTorch, problems.regression(), Budget(1))
