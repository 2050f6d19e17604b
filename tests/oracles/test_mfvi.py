"""Mean-field VI against the closed form of a linear model, the soap-bubble laws, and its tweaks by hand."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import scipy.stats
import torch
from conformance import problems
from oracles import linear
from torch import nn
from torch.distributions import Normal, kl_divergence
from torch.nn.functional import softplus
from torch.testing import assert_close

from bench import priors
from bench.contract import Batch, Budget
from bench.engine.engine import Engine, TrainerOptions
from bench.methods.mfvi import MFVI, Settings


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def method_of(problem=None, start=None, **values):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        method = MFVI(problem or linear.Truth().problem, Settings(**values), start)
        with torch.no_grad():
            for r in method.rho:
                r += 0.5 * torch.randn_like(r)
    return method


def batch_of(method):
    return Batch(*method.problem.train.tensors)


def fit(problem=None, epochs=3, cls=MFVI, **values):
    engine = Engine(cls, Settings(**values), 0, trainer=TrainerOptions(accelerator="cpu"))
    return engine.fit(problem or linear.Truth().problem, Budget(epochs))


# ---- linear regression


def test_linear_regression_optimum_is_reached():
    """With exact expectations: the posterior's own mean, and as precision the diagonal of its precision."""
    truth = linear.Truth()
    method = linear.optimise(MFVI(truth.problem, Settings()))
    mean, variance = linear.flat(method.moments())
    assert_close(mean, truth.mean, rtol=1e-5, atol=1e-6)
    assert_close(variance, 1 / truth.precision.diagonal(), rtol=1e-4, atol=1e-8)
    exact = truth.precision.inverse().diagonal()
    assert (variance < 0.9 * exact).any(), "the inputs are correlated, so mean field must be too sure"


def test_linear_regression_bound_is_the_closed_form():
    """Loss at the optimum = -log evidence + KL(q || posterior), the latter (sum log L_ii - log det L) / 2."""
    truth = linear.Truth()
    method = linear.optimise(MFVI(truth.problem, Settings()))
    batch = Batch(*(t.double() for t in truth.problem.train.tensors))
    likelihood_term, prior_term = method.loss_terms(batch, linear.exact_noise(method))
    variance = (1 / truth.precision.diagonal()).numpy()
    entropy = 0.5 * np.log(2 * math.pi * math.e * variance).sum()
    assert likelihood_term.item() == pytest.approx(truth.expected_nll(variance), rel=1e-6)
    assert prior_term.item() == pytest.approx(truth.prior_cross_entropy(variance) - entropy, rel=1e-6)
    gap = 0.5 * (truth.precision.diagonal().log().sum() - torch.logdet(truth.precision)).item()
    assert (likelihood_term + prior_term).item() == pytest.approx(-truth.log_evidence() + gap, rel=1e-6)


@pytest.mark.slow
def test_gradient_vanishes_at_the_optimum_in_the_mean():
    """Under the method's own noise the mean gradient at the closed form is 0. False alarm: 8 x 6e-7."""
    truth = linear.Truth()
    method = linear.optimise(MFVI(truth.problem, Settings())).float()
    g, gradients = generator(1), []
    for _ in range(1500):
        method.zero_grad()
        sum(method.loss_terms(batch_of(method), method.draw_noise(1, g))).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in method.parameters()]))
    gradients = torch.stack(gradients).double()
    error = gradients.std(0) / len(gradients) ** 0.5
    assert (error > 0).all()
    assert (gradients.mean(0).abs() <= 5 * error + 1e-3).all(), f"{gradients.mean(0) / error}"


@pytest.mark.slow
def test_linear_regression_optimum_is_reached_by_training():
    """The engine's own noisy training ends near the optimum; tolerances are a few times what was seen."""
    truth = linear.Truth()
    method = fit(truth.problem, 1000, learning_rate=0.02, train_samples=16, initial_rho=-2.0)
    mean, variance = linear.flat(method.moments())
    std = truth.precision.diagonal().rsqrt()
    assert ((mean - truth.mean).abs() < 0.5 * std).all(), f"{(mean - truth.mean) / std}"
    assert_close(variance.sqrt(), std, rtol=0.25, atol=0)


# ---- the distribution


def test_prior_term_is_torchs_divergence():
    """KL summed over all weights, by torch.distributions, for N(m0, s0^2) priors."""
    method = method_of()
    expected = sum(
        kl_divergence(Normal(m, softplus(r)), Normal(linear.MEAN, linear.STD)).sum()
        for m, r in zip(method.network.parameters(), method.rho, strict=True)
    )
    actual = method.loss_terms(batch_of(method), method.draw_noise(2, generator()))[1]
    assert_close(actual, expected)


def test_prior_term_to_the_standard_normal_by_hand():
    """Sum of (sigma^2 + mu^2 - 1)/2 - log sigma (eq. 4.9 with its constant)."""
    method = method_of(linear.Truth(priors.normal(0, 1)).problem)
    mu, sigma = (v.double().numpy() for v in linear.flat(method.moments()))
    sigma = np.sqrt(sigma)
    expected = ((sigma**2 + mu**2 - 1) / 2 - np.log(sigma)).sum()
    actual = method.loss_terms(batch_of(method), method.draw_noise(1, generator()))[1]
    assert actual.item() == pytest.approx(expected, rel=1e-5)


def test_density_is_that_of_independent_normals():
    """Against scipy at draws and elsewhere."""
    method = method_of()
    mean, variance = (v.numpy() for v in linear.flat(method.moments()))
    weights = {
        n: torch.randn(6, *p.shape, generator=generator(3)) for n, p in method.network.named_parameters()
    }
    w = torch.cat([t.flatten(1) for t in weights.values()], 1).double().numpy()
    expected = scipy.stats.norm.logpdf(w, mean, np.sqrt(variance)).sum(1)
    assert_close(method.log_prob(weights).double(), torch.from_numpy(expected), rtol=1e-5, atol=1e-3)


def test_soap_bubble():
    """|w - mu| = sigma sqrt(D) and |w - w'| = sigma sqrt(2 D) (Figs 4.1 to 4.3). False alarm: 1e-5."""
    size = 20000
    wide = replace(linear.Truth().problem, network=lambda dropout=0.0: nn.Linear(size, 1, bias=False))
    method = MFVI(wide, Settings(initial_rho=-2.0))
    sigma = math.log1p(math.exp(-2))
    w = method.sample_weights(400, generator(4))["weight"].flatten(1).double()
    centre = method.network.weight.detach().double()
    for distances, expected in (
        ((w - centre).norm(dim=1), sigma * math.sqrt(size)),
        ((w[::2] - w[1::2]).norm(dim=1), sigma * math.sqrt(2 * size)),
    ):
        error = distances.std() / len(distances) ** 0.5
        assert abs(distances.mean() - expected) < 4.5 * error + 1e-4 * expected
        assert distances.std() < 0.02 * expected, "a thin shell"


def test_posterior_is_the_next_prior():
    """The second fit starts where the first ended and pays nothing there; elsewhere torch's KL."""
    first = method_of()
    problem = linear.Truth(first.as_prior()).problem
    second = MFVI(problem, Settings(), start=first)
    batch, noise = Batch(*problem.train.tensors), second.draw_noise(1, generator())
    assert second.loss_terms(batch, noise)[1].item() == pytest.approx(0, abs=1e-5)
    with torch.no_grad():
        for p in second.parameters():
            p += 0.2
    old, new = first.posterior(), second.posterior()
    expected = sum(kl_divergence(new[n].base_dist, old[n].base_dist).sum() for n in new)
    assert_close(second.loss_terms(batch, noise)[1], expected)


# ---- tweaks


class Recorder(MFVI):
    """Keeps the parameters at the end of every epoch."""

    def on_train_epoch_end(self):
        """Copies means and rhos."""
        seen = self.__dict__.setdefault("seen", [])
        means = torch.cat([p.detach().flatten() for p in self.network.parameters()])
        seen.append((means, torch.cat([r.detach().flatten().clone() for r in self.rho])))


def test_pretraining_trains_the_means_alone_and_adds_epochs():
    """Two epochs on top of the budget without prior term, in which rho stays; then both move."""
    method = fit(epochs=2, cls=Recorder, pretrain_epochs=2, learning_rate=0.05)
    assert [row["epoch"] for row in method.history] == [1, 2, 3, 4]
    assert [row["prior_term"] == 0 for row in method.history] == [True, True, False, False]
    means, rhos = zip(*method.seen, strict=True)
    start = torch.full_like(rhos[0], -3.0)
    assert [torch.equal(r, start) for r in rhos] == [True, True, False, False]
    assert all(not torch.equal(a, b) for a, b in pairwise(means))


def test_pretraining_is_the_nll_at_the_means():
    """In pretraining the loss is the negative log likelihood at the means, without noise."""
    method = method_of(pretrain_epochs=1)
    assert method.draw_noise(3, generator()) == {}
    out = method.training_step(batch_of(method), 0)
    inputs, targets = method.problem.train.tensors
    nll = -method.likelihood.log_prob(method.network(inputs)[None], targets).sum() / linear.ROWS
    assert_close(out["loss"], nll)
    out["loss"].backward()
    assert all(r.grad is None for r in method.rho)


def test_pretraining_belongs_to_the_first_fit():
    """A fit that goes on from another has no pretraining."""
    first = method_of(pretrain_epochs=3)
    assert first.extra_epochs == 3
    second = method_of(start=first, pretrain_epochs=3)
    assert second.extra_epochs == 0
    assert second.draw_noise(1, generator())


def test_annealing_ramps_the_prior_weight():
    """From 0 at the first epoch after pretraining linearly to kl_weight after the named number of epochs."""
    method = method_of(kl_annealing_epochs=4, kl_weight=0.8, pretrain_epochs=2)
    weights = []
    for epoch in range(9):
        method.epoch = epoch
        weights.append(method.prior_weight)
    assert weights == pytest.approx([0, 0, 0, 0.2, 0.4, 0.6, 0.8, 0.8, 0.8])


@pytest.mark.parametrize("weight", [0.0, 0.3])
def test_annealing_and_weight_reach_the_loss(weight):
    """History rows have loss = likelihood + weight of the epoch * prior."""
    method = fit(epochs=4, kl_annealing_epochs=2, kl_weight=weight)
    for row, ramp in zip(method.history, [0, 0.5, 1, 1], strict=True):
        expected = row["likelihood_term"] + weight * ramp * row["prior_term"]
        assert row["loss"] == pytest.approx(expected, rel=1e-5)
        assert row["prior_term"] > 0


def test_tight_prior():
    """N(0, 1/D) per tensor replaces the task's prior in the first fit only."""
    method = method_of(prior="tight")
    for name, p in method.prior.items():
        size = method.network.get_parameter(name).numel()
        assert_close(p.stddev, torch.full(p.event_shape, size**-0.5))
        assert_close(p.mean, torch.zeros(p.event_shape))
    second = method_of(start=method, prior="tight")
    assert all((p.stddev == linear.STD).all() for p in second.prior.values())


def test_scale_mixture_prior():
    """The prior term is the mean of log q - log p over the draws, p half N(0, 1), half N(0, e^-12)."""
    method = method_of(prior="scale_mixture")
    noise = method.draw_noise(3, generator())
    log_ratio = np.zeros(3)
    for (name, m), r in zip(method.network.named_parameters(), method.rho, strict=True):
        mean, std = (t.detach().double().numpy() for t in (m, softplus(r)))
        w = mean + std * noise[name].double().numpy()
        p = 0.5 * scipy.stats.norm.pdf(w) + 0.5 * scipy.stats.norm.pdf(w, 0, math.exp(-6))
        log_ratio += (scipy.stats.norm.logpdf(w, mean, std) - np.log(p)).reshape(3, -1).sum(1)
    actual = method.loss_terms(batch_of(method), noise)[1]
    assert actual.item() == pytest.approx(log_ratio.mean(), rel=1e-4)


@pytest.mark.parametrize("prior", ["task", "tight"])
def test_prior_mean_follows(prior):
    """The prior term is the KL at equal means and gives the means no gradient."""
    method = method_of(prior_mean_follows=True, prior=prior)
    prior_term = method.loss_terms(batch_of(method), method.draw_noise(1, generator()))[1]
    expected = 0.0
    for r, p in zip(method.rho, method.prior.values(), strict=True):
        ratio = softplus(r) / p.stddev
        expected += (ratio.square() / 2 - 0.5 - ratio.log()).sum()
    assert_close(prior_term, expected)
    prior_term.backward()
    for p in method.network.parameters():
        assert p.grad is None or not p.grad.any()
    assert all(r.grad.any() for r in method.rho)


def test_initial_rho():
    """Every sigma starts at softplus(rho)."""
    variances = MFVI(linear.Truth().problem, Settings(initial_rho=-5.0)).moments()[1]
    for v in variances.values():
        assert_close(v, torch.full_like(v, math.log1p(math.exp(-5)) ** 2))


def test_train_samples_reach_the_noise():
    """S draws a step: the noise of a training step is stacked S deep."""
    seen = []

    class Listener(MFVI):
        def loss_terms(self, batch, noise):
            seen.append({len(e) for e in noise.values()})
            return super().loss_terms(batch, noise)

    fit(problems.mlp(), 1, Listener, train_samples=5)
    assert seen == [{5}]
