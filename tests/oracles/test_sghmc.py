"""SGHMC on linear regression: the chain's own law in closed form, discretisation included."""

import pytest
import torch
from conformance import problems
from oracles import linear
from oracles.chains import chain_of, standard_errors_off, stationary
from torch.testing import assert_close

from bench.methods.sghmc import SGHMC


def at_step(truth, friction):
    """A step h so large that the variance along the stiffest direction is 1.43 times the posterior's."""
    return 0.3 * (4 - 2 * friction) / torch.linalg.eigvalsh(truth.precision).max().item()


def closed_form(truth, friction):
    """Covariance of the draws `[4, 4]`.

    Along an eigenvector of the posterior's precision, of eigenvalue p, the positions are an autoregression
    of order 2, x'' = (2 - a - h p) x' - (1 - a) x + sqrt(2 a h) z, of variance 1 / (p (1 - h p / (4 - 2 a))).
    """
    p, vectors = torch.linalg.eigh(truth.precision)
    h = at_step(truth, friction)
    return vectors @ (1 / (p * (1 - h * p / (4 - 2 * friction)))).diag() @ vectors.T


@pytest.mark.parametrize("temperature", [1.0, 0.2, 3.0])
@pytest.mark.parametrize("friction", [0.05, 0.4, 1.0])
def test_stationary_law_is_the_closed_form(friction, temperature):
    """Mean and covariance, at a step so large that these are not the posterior's; friction 1 is SGLD's.

    A normal density to the power 1/T is the normal of T times the covariance.
    """
    truth = linear.Truth()
    chosen = {"learning_rate": at_step(truth, friction) * linear.ROWS, "temperature": temperature}
    method, batch = chain_of(SGHMC, truth.problem, friction=friction, **chosen)
    mean, covariance = stationary(method, batch, ("position", "velocity"))
    assert_close(mean, truth.mean, rtol=1e-6, atol=1e-7)
    assert_close(covariance, temperature * closed_form(truth, friction), rtol=1e-6, atol=1e-9)
    exact = temperature * truth.precision.inverse().diagonal()
    assert (covariance.diagonal() > 1.05 * exact).any()


class Noisier(SGHMC):
    """Noise of twice the variance that its friction takes out."""

    def standard_noise(self):
        """Too large by sqrt(2)."""
        return 2**0.5 * super().standard_noise()


@pytest.mark.slow
def test_draws_have_the_closed_form_covariance():
    """Ten second moments within 4.5 standard errors, false alarm 10 x 7e-6; a noisier chain's are not."""
    truth = linear.Truth()
    chosen = {"learning_rate": at_step(truth, 0.4) * linear.ROWS, "friction": 0.4}
    assert standard_errors_off(SGHMC, truth, closed_form(truth, 0.4), **chosen) < 4.5
    assert standard_errors_off(Noisier, truth, closed_form(truth, 0.4), **chosen) > 10


def test_two_steps_by_hand():
    """Equation 15 of Chen et al. 2014 with beta = 0, from given noise; without it SGD with momentum."""
    method, batch = chain_of(SGHMC, problems.known_noise(), learning_rate=0.003, friction=0.3)
    w, v = method.position.clone(), torch.zeros_like(method.position)
    h = 0.003 / 20
    for seed in range(2):
        z = torch.randn(len(w), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        method.standard_noise = lambda z=z: z
        slope = method.gradient(batch)[1]
        v = v - h * slope - 0.3 * v + (2 * 0.3 * h) ** 0.5 * z
        w = w + v
        method.training_step(batch, 0)
        assert_close(method.position, w)

    quiet, _ = chain_of(SGHMC, problems.known_noise(), friction=0.3)
    theirs = quiet.position.clone().requires_grad_()
    sgd = torch.optim.SGD([theirs], lr=h, momentum=0.7)
    for _ in range(3):
        theirs.grad = slope = quiet.gradient(batch)[1]
        quiet.move(slope, h, noisy=False)
        sgd.step()
        assert_close(quiet.position, theirs.detach())
