"""SGLD on linear regression: the chain's own law, discretisation included; schedule, preconditioner."""

from dataclasses import replace

import pytest
import torch
from conformance import problems
from oracles import linear
from oracles.chains import chain_of, standard_errors_off, stationary
from torch.testing import assert_close

from bench.contract import Batch, Budget
from bench.errors import UsageError
from bench.methods.sgld import SGLD, Settings


def at_step(truth):
    """A step e so large that the variance along the stiffest direction is 1.43 times the posterior's."""
    return 1.2 / torch.linalg.eigvalsh(truth.precision).max().item()


def closed_form(truth):
    """Covariance of the draws `[4, 4]`.

    Along an eigenvector of the posterior's precision, of eigenvalue p, a step is
    v <- (1 - e p/2) v + sqrt(e) z, and the stationary variance is 1 / (p (1 - e p/4)).
    """
    p, vectors = torch.linalg.eigh(truth.precision)
    return vectors @ (1 / (p * (1 - at_step(truth) * p / 4))).diag() @ vectors.T


class Noisier(SGLD):
    """Noise of variance 2 e, as where the step is not halved."""

    def standard_noise(self):
        """Too large by sqrt(2)."""
        return 2**0.5 * super().standard_noise()


def test_stationary_law_is_the_closed_form():
    """Mean and covariance, at a step so large that these are not the posterior's."""
    truth = linear.Truth()
    method, batch = chain_of(SGLD, truth.problem, learning_rate=at_step(truth) * linear.ROWS / 2)
    mean, covariance = stationary(method, batch, ("position",))
    assert_close(mean, truth.mean, rtol=1e-6, atol=1e-7)
    assert_close(covariance, closed_form(truth), rtol=1e-6, atol=1e-9)
    assert (covariance.diagonal() > 1.05 * truth.precision.inverse().diagonal()).any()


@pytest.mark.slow
def test_draws_have_the_closed_form_covariance():
    """Ten second moments within 4.5 standard errors, false alarm 10 x 7e-6; a noisier chain's are not."""
    truth = linear.Truth()
    chosen = {"learning_rate": at_step(truth) * linear.ROWS / 2}
    assert standard_errors_off(SGLD, truth, closed_form(truth), **chosen) < 4.5
    assert standard_errors_off(Noisier, truth, closed_form(truth), **chosen) > 10


def test_batches_are_unbiased():
    """The batches' energies and gradients, weighted by rows, are those of all data."""
    method, batch = chain_of(SGLD, problems.known_noise())
    energy, slope = method.gradient(batch)
    parts = [Batch(batch.inputs[a:b], batch.targets[a:b]) for a, b in ((0, 3), (3, 13), (13, 20))]
    found = [(len(part.inputs) / 20, *method.gradient(part)) for part in parts]
    assert_close(sum(share * u for share, u, _ in found), energy)
    assert_close(sum(share * g for share, _, g in found), slope)


# ---- schedule


def observed(**values):
    """Rates, noises and draws of eight steps in two epochs of four batches."""
    method, batch = chain_of(SGLD, problems.known_noise(), learning_rate=0.02, **values)
    budget = method.spends(Budget(epochs=2, batch_size=5, patience=3))
    assert budget == Budget(epochs=2, batch_size=5)
    moves, places = [], []

    def move(slope, size, noisy):
        moves.append((size * 20, noisy))
        method.position += 1

    method.move = move
    start = method.position.clone()
    for _ in range(8):
        method.training_step(batch, 0)
    places = (method._so_far - start)[:, 0].round().int().tolist()
    return [rate for rate, _ in moves], [noisy for _, noisy in moves], places, method


def test_constant_step_size_keeps_even_draws_after_its_burn_in():
    """All eight steps have noise; of the last four two are kept."""
    rates, noisy, places, method = observed(kept=2)
    assert rates == pytest.approx([0.02] * 8)
    assert noisy == [True] * 8
    assert places == [6, 8]
    assert method.warmup_epochs == 1
    assert method.diagnostics() == {"draws": 2}


def test_cyclical_step_size_explores_without_noise_and_then_draws():
    """Two cycles of four steps: half a cosine each, draws and noise in their second half alone."""
    rates, noisy, places, _ = observed(kept=4, schedule="cyclical", cycles=2)
    assert rates == pytest.approx([0.02, 0.0170711, 0.01, 0.0029289] * 2, rel=1e-4)
    assert noisy == [False, False, True, True] * 2
    assert places == [3, 4, 7, 8]


# ---- what the draws are worth


def test_predictions_have_the_autocorrelation_of_the_chain():
    """Draws of a linear network along one line, an autoregression: (1 + a)/(1 - a) = 9 of them are worth one.

    What is predicted is the network under every draw in its order, of at most 100 of the inputs.
    """
    method, batch = chain_of(SGLD, linear.Truth().problem, kept=4000)
    assert method.diagnostics(batch.inputs) == {}  # no draw yet
    noise = torch.randn(4000, generator=torch.Generator().manual_seed(0)).double()
    level = noise[0].clone()
    for i in range(4000):
        level = 0.8 * level + 0.6 * noise[i]
        method.draws[i] = method.position * level
    method.found.fill_(4000)
    found = method.diagnostics(batch.inputs)["prediction_autocorrelation"]
    assert 7 < found < 16  # over 40 seeds it lay between 7.4 and 15.4
    many = batch.inputs.repeat_interleave(30, 0)
    few = method.diagnostics(many[::6])["prediction_autocorrelation"]
    assert method.diagnostics(many)["prediction_autocorrelation"] == few
    method.found.fill_(3)
    assert method.diagnostics(batch.inputs) == {}


# ---- what it takes


def test_starts_where_the_problem_says():
    """At the first step, not before: the fit that gives the weights may not be there yet."""
    problem = problems.known_noise()
    weights = {name: torch.full_like(w, 0.25) for name, w in problem.network().named_parameters()}
    method, batch = chain_of(SGLD, replace(problem, starts_from=lambda: weights), learning_rate=1e-12)
    method.training_step(batch, 0)
    assert_close(method.position, torch.full_like(method.position, 0.25), rtol=0, atol=1e-4)


def test_a_learned_noise_is_refused():
    """In one line."""
    with pytest.raises(UsageError, match=r"^sgld: the likelihood has parameters of its own"):
        SGLD(problems.regression(), Settings())
