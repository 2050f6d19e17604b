"""Mixture VI against MFVI, quadrature, exact evidence and targets of known modes, with a negative control."""

import math
from dataclasses import replace

import numpy as np
import pytest
import scipy.integrate
import scipy.stats
import torch
from conformance import laws, problems
from oracles import linear
from torch import nn
from torch.distributions import Categorical, MixtureSameFamily, Normal
from torch.testing import assert_close
from torch.utils.data import TensorDataset

from bench import likelihoods, networks, priors
from bench.contract import JOINT, Batch, Budget, Problem
from bench.divergence import log_prob
from bench.engine.engine import Engine, TrainerOptions
from bench.errors import UsageError
from bench.methods import mfvi
from bench.methods.mixture_vi import MixtureVI, Settings
from bench.optimizers import make

SHARES, CENTRES, STDS = (0.3, 0.7), (-2.0, 1.5), (0.3, 0.5)
"""Two modes 9 standard deviations apart: their masses are their shares."""


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def method_of(problem=None, start=None, seed=0, cls=MixtureVI, **values):
    """A method in float64 whose components differ in everything."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        method = cls(problem or linear.Truth().problem, Settings(**values), start).double()
        with torch.no_grad():
            method.rho += 0.5 * torch.randn_like(method.rho)
            method.logits += torch.randn_like(method.logits)
    return method


def batch_of(method):
    return Batch(*(t.double() for t in method.problem.train.tensors))


def fit(problem, epochs, cls=MixtureVI, settings=Settings, batch_size=None, seed=0, **values):
    engine = Engine(cls, settings(**values), seed, trainer=TrainerOptions(accelerator="cpu"))
    return engine.fit(problem, Budget(epochs, batch_size))


def components(method):
    """Weights `[N_c]`, means and standard deviations `[N_c, d]` as arrays, not by the method's own code."""
    n = int(method.active)
    logits, means, rho = (p.detach().double().numpy()[:n] for p in (method.logits, method.means, method.rho))
    weights = np.exp(logits) / np.exp(logits).sum()
    return weights, means, np.log1p(np.exp(rho))


def log_density(method, vectors):
    """Log density of vectors `[S, d]` by scipy."""
    weights, means, stds = components(method)
    parts = [
        math.log(w) + scipy.stats.norm.logpdf(vectors, m, s).sum(-1)
        for w, m, s in zip(weights, means, stds, strict=True)
    ]
    return scipy.special.logsumexp(parts, 0)


# ---- one component is mean-field VI


class TensorByTensor(mfvi.MFVI):
    """Draws the noise of one tensor after the other, as the mixture does; `mfvi` draws it at once."""

    def standard_noise(self, num_samples, generator):
        """Noise `[S, *shape]` per tensor."""
        return {
            name: torch.randn(num_samples, *p.shape, generator=generator, dtype=p.dtype)
            for name, p in self.network.named_parameters()
        }


def test_one_component_is_mfvi():
    """Same noise, same terms: under a normal prior in closed form, under another by the same draws."""
    for prior in (priors.normal(0.2, 0.7), priors.scale_mixture()):
        problem = replace(problems.mlp(), prior=prior)
        mixture = method_of(problem, components=1)
        simple = TensorByTensor(problem, mfvi.Settings()).double()
        copy_to(simple, mixture)
        batch = Batch(problem.train.tensors[0].double(), problem.train.tensors[1])
        noise = simple.draw_noise(3, generator())
        expected = simple.loss_terms(batch, noise)
        assert_close(mixture.loss_terms(batch, {n: e[:, None] for n, e in noise.items()}), expected)
        for name, draws in simple.sample_weights(4, generator(1)).items():
            assert_close(mixture.sample_weights(4, generator(1))[name], draws)
        for actual, part in zip(mixture.moments(), simple.moments(), strict=True):
            assert_close(actual, part)


def copy_to(simple, mixture):
    """Gives an MFVI the parameters of the one component."""
    sizes = [p.numel() for p in simple.network.parameters()]
    means, rhos = mixture.means[0].detach().split(sizes), mixture.rho[0].detach().split(sizes)
    for p, r, m, z in zip(simple.network.parameters(), simple.rho, means, rhos, strict=True):
        p.data, r.data = m.clone().view_as(p), z.clone().view_as(r)


@pytest.mark.parametrize("problem", [problems.mlp, problems.regression])
def test_one_component_trains_as_mfvi(problem):
    """The same seed gives the same history and moments, in a first fit and in one that goes on from it."""
    values = {"learning_rate": 0.02, "train_samples": 2, "initial_rho": -2.5, "optimizer": "amsgrad"}
    fits = []
    for cls, settings in (
        (MixtureVI, Settings(**values, components=1)),
        (TensorByTensor, mfvi.Settings(**values)),
    ):
        engine = Engine(cls, settings, 4, trainer=TrainerOptions(accelerator="cpu"))
        first = engine.fit(problem(), Budget(4, 8))
        second = engine.fit(replace(problem(), prior=first.as_prior()), Budget(3, 8), start=first)
        fits.append((first, second))
    for mixture, simple in zip(*fits, strict=True):
        for a, b in zip(mixture.history, simple.history, strict=True):
            assert a == pytest.approx(b, rel=1e-4)
        for a, b in zip(mixture.moments(), simple.moments(), strict=True):
            assert_close(a, b, rtol=1e-3, atol=1e-5)


# ---- the bound


def test_bound_is_the_log_evidence_less_the_divergence():
    """Bound = log evidence - KL(q || posterior), here exactly, and so below the evidence.

    Draw by draw log p(D, w) = log evidence + log posterior(w), so it holds whatever the draws.
    """
    truth = linear.Truth()
    method = method_of(truth.problem, components=3)
    with torch.no_grad():
        method.means += 0.3
        noise = method.draw_noise(400, generator(2))
        bound = -sum(method.loss_terms(batch_of(method), noise)).item()
    weights, means, stds = components(method)
    standard = torch.cat([e.flatten(2) for e in noise.values()], 2).numpy()  # [S, N_c, d]
    draws = means + stds * standard
    posterior = scipy.stats.multivariate_normal(truth.mean.numpy(), truth.precision.inverse().numpy())
    ratios = log_density(method, draws) - posterior.logpdf(draws)
    divergences = (ratios * weights).sum(1)
    # The data and the evidence of the oracle are float64, the noise of the likelihood float32.
    assert bound == pytest.approx(truth.log_evidence() - divergences.mean(), rel=1e-6)
    assert divergences.mean() > 5 * divergences.std() / 20, "the bound is below the evidence"


def one_weight(prior, rows=1):
    """A problem whose data say nothing of its one weight: the posterior is the prior."""

    def network(dropout=0.0):
        layer = nn.Linear(1, 1, bias=False)
        nn.init.normal_(layer.weight, 0, 2)
        return layer

    zeros = torch.zeros(rows, 1)
    return Problem(network, likelihoods.Gaussian(1.0), prior, TensorDataset(zeros, zeros), None, rows)


def two_modes(parameters):
    """A prior of two separated normals for every weight."""

    def make(w):
        shares, centres, stds = (w.new_tensor(v).expand(*w.shape, 2) for v in (SHARES, CENTRES, STDS))
        return priors.independent(MixtureSameFamily(Categorical(shares), Normal(centres, stds)))

    return {name: make(p.detach()) for name, p in parameters.items()}


def at(method, logits, means, stds):
    """The method with given components of one weight."""
    with torch.no_grad():
        method.logits.copy_(torch.tensor(logits))
        method.means.copy_(torch.tensor(means)[:, None])
        method.rho.copy_(torch.tensor(stds, dtype=torch.float64).expm1().log()[:, None])
    return method


def quantiles(method, count=4000):
    """Noise that makes means over the draws integrals: the midpoints of equal shares of the normal."""
    points = scipy.stats.norm.ppf((np.arange(count) + 0.5) / count)
    shape = (count, int(method.active), 1, 1)
    return {"weight": torch.from_numpy(points)[:, None, None, None].expand(shape)}


def integrated_divergence(logits, means, stds):
    """KL(q || two modes) by scipy's quadrature, for overlapping components."""
    shares = np.exp(logits) / np.exp(logits).sum()

    def density(x, shares, means, stds):
        parts = zip(shares, means, stds, strict=True)
        return sum(w / s * math.exp(-0.5 * ((x - m) / s) ** 2) for w, m, s in parts) / math.sqrt(2 * math.pi)

    def integrand(x):
        q = density(x, shares, means, stds)
        return q * math.log(q / density(x, SHARES, CENTRES, STDS))

    return scipy.integrate.quad(integrand, -6, 6, points=[-2, 0, 1.5], limit=400, epsabs=1e-10)[0]


def test_divergence_and_its_gradients_by_quadrature():
    """Value, and gradients to logits, means and scales as difference quotients of the integral."""
    values = [[0.3, -0.4, 0.1], [-1.6, 0.4, 1.1], [0.4, 0.35, 0.5]]
    method = at(method_of(one_weight(two_modes), components=3), *values)
    prior_term = method.loss_terms(batch_of(method), quantiles(method))[1]
    assert prior_term.item() == pytest.approx(integrated_divergence(*values), rel=2e-3)
    prior_term.backward()
    slopes = method.rho.detach()[:, 0].sigmoid()  # of softplus
    actual = [method.logits.grad, method.means.grad[:, 0], method.rho.grad[:, 0] / slopes]
    for which in range(3):
        for i in range(3):
            shifted = []
            for step in (1e-4, -1e-4):
                moved = [list(v) for v in values]
                moved[which][i] += step
                shifted.append(integrated_divergence(*moved))
            expected = (shifted[0] - shifted[1]) / 2e-4
            assert actual[which][i].item() == pytest.approx(expected, rel=1e-2, abs=5e-3), (which, i)


# ---- the weights of the components, and what ordinary draws make of them


class OrdinaryDraws(MixtureVI):
    """Negative control: one draw, its component drawn by weight and then a constant to the gradient."""

    def draw_noise(self, num_samples, generator):
        """Standard normal noise, and which component it is for."""
        shares = self.logits.detach().softmax(0)
        index = torch.multinomial(shares, num_samples, replacement=True, generator=generator)
        return super().draw_noise(num_samples, generator) | {"index": index}

    def loss_terms(self, batch, noise):
        """The mean over those draws, which has the right value."""
        index = noise["index"]
        logits, means, scales = self._components()
        draws = (means[index] + scales[index] * noise["weight"][:, 0, :, 0])[:, None]
        ratios = self.posterior()[JOINT].log_prob(draws[:, 0]) - log_prob(self.prior, {"weight": draws})
        return 0 * logits.sum(), ratios.mean()


def logit_gradients(cls, repetitions):
    """Gradients of the loss to the first logit, at the right modes with equal weights."""
    method = at(method_of(one_weight(two_modes), cls=cls), [0.0, 0.0], CENTRES, STDS)
    g, gradients = generator(3), []
    for _ in range(repetitions):
        method.zero_grad()
        sum(method.loss_terms(batch_of(method), method.draw_noise(1, g))).backward()
        gradients.append(method.logits.grad[0].item())
    return torch.tensor(gradients, dtype=torch.float64)


def test_gradient_of_the_weights():
    """At separated modes dKL/da_1 = w_1 w_2 (log(w_1 / p_1) - log(w_2 / p_2)), here log(7/3) / 4 = 0.21."""
    gradients = logit_gradients(MixtureVI, 20)
    assert_close(gradients.mean().item(), math.log(7 / 3) / 4, rtol=1e-5, atol=0)


def test_gradient_of_the_weights_through_ordinary_draws_is_noise():
    """Their gradient is 0 in the mean, many standard errors from the truth. False alarm: 7e-6."""
    gradients = logit_gradients(OrdinaryDraws, 600)
    error = gradients.std() / len(gradients) ** 0.5
    assert gradients.std() > 0.4
    assert abs(gradients.mean()) < 4.5 * error
    assert math.log(7 / 3) / 4 > 9 * error


def weights_find_the_masses(cls):
    """From equal weights, training ends with the masses of the modes."""
    method = at(method_of(one_weight(two_modes), cls=cls), [0.0, 0.0], (-1.5, 1.2), (0.5, 0.5))
    optimizer, g = make(method._trained(), "adam", 0.05), generator(5)
    for step in range(300):
        optimizer.param_groups[0]["lr"] = 0.05 * min(1.0, (300 - step) / 150)
        optimizer.zero_grad()
        sum(method.loss_terms(batch_of(method), method.draw_noise(4, g))).backward()
        optimizer.step()
    weights, means, stds = components(method)
    assert_close(weights, np.array(SHARES), rtol=0, atol=0.02)
    assert_close(means[:, 0], np.array(CENTRES), rtol=0, atol=0.05)
    assert_close(stds[:, 0], np.array(STDS), rtol=0, atol=0.05)


def test_weights_find_the_masses():
    weights_find_the_masses(MixtureVI)


def test_weights_from_ordinary_draws_do_not_find_the_masses():
    with pytest.raises(AssertionError):
        weights_find_the_masses(OrdinaryDraws)


# ---- the distribution


def test_density_and_moments():
    """Density by scipy; mean and variance by the laws of total mean and variance."""
    method = method_of(components=3)
    draws = method.sample_weights(5, generator(6))
    vectors = torch.cat([w.flatten(1) for w in draws.values()], 1).numpy()
    assert_close(method.log_prob(draws), torch.from_numpy(log_density(method, vectors)), check_dtype=False)
    weights, means, stds = components(method)
    mean = weights @ means
    mean_square = weights @ (means**2 + stds**2)
    actual = linear.flat(method.moments())
    assert_close(actual[0].numpy(), mean)
    assert_close(actual[1].numpy(), mean_square - mean**2)


def test_draws_come_from_each_component_as_often_as_its_weight():
    """Means of 4,000 draws of each weight, in standard errors; under equal weights they are far off.

    False alarm: 5 standard errors, 6e-7 for each of four weights.
    """
    method = method_of(components=3)
    weights, means, _ = components(method)
    drawn = method.sample_weights(4000, generator(8))
    draws = torch.cat([w.flatten(1) for w in drawn.values()], 1).double().numpy()
    error = draws.std(0) / len(draws) ** 0.5
    assert (np.abs(draws.mean(0) - weights @ means) < 5 * error).all()
    assert (np.abs(draws.mean(0) - means.mean(0)) > 10 * error).any()


def test_posterior_is_the_next_prior():
    """Frozen, it is the mixture; the second fit starts there and pays nothing, and keeps what was found."""
    first = method_of(components=2)
    second = MixtureVI(linear.Truth(first.as_prior()).problem, Settings(), first).double()
    draws = first.sample_weights(6, generator(7))
    assert second.prior.keys() == {JOINT}
    assert_close(log_prob(second.prior, draws), first.log_prob(draws))
    prior_term = second.loss_terms(batch_of(second), second.draw_noise(2, generator()))[1]
    assert prior_term.item() == pytest.approx(0, abs=1e-6)  # the prior is float32


# ---- the document's prior


def test_nn4post_prior_by_hand():
    """-1/2 mean of squares per weight tensor, 0 on biases; of the first fit, which then has no ELBO."""
    problem = problems.mlp()
    method = method_of(problem, prior="nn4post")
    noise = method.draw_noise(2, generator(8))
    weights, means, stds = components(method)
    draws = means + stds * torch.cat([e.flatten(2) for e in noise.values()], 2).numpy()  # [S, N_c, d]
    expected, offset = log_density(method, draws), 0
    for name, p in method.network.named_parameters():
        part = draws[..., offset : offset + p.numel()]
        offset += p.numel()
        if name.endswith("weight"):
            expected = expected + 0.5 * (part**2).mean(-1)
    batch = Batch(problem.train.tensors[0].double(), problem.train.tensors[1])
    actual = method.loss_terms(batch, noise)[1]
    assert actual.item() == pytest.approx((expected.mean(0) * weights).sum(), rel=1e-6)
    assert not any(name.startswith("elbo") for name in fit(problem, 1, prior="nn4post").diagnostics())
    again = MixtureVI(problem, Settings(prior="nn4post"), start=fit(problem, 1, prior="nn4post"))
    assert all(p.mean.unique() == 0.1 for p in again.prior.values()), "the later prior is the task's"


@pytest.mark.parametrize("choice", ["searched", "grown"])
def test_choice_needs_a_normalised_prior(choice):
    with pytest.raises(UsageError, match="mixture_vi: this prior has no normaliser") as info:
        MixtureVI(problems.mlp(), Settings(prior="nn4post", choice=choice))
    assert "\n" not in str(info.value)


# ---- the number of components


def test_elbo_is_estimated_on_the_full_training_set():
    """In batches as at once, with example weights, and with the standard error of its draws."""
    g = generator(9)
    inputs, targets = torch.randn(1005, 3, generator=g), torch.randn(1005, 1, generator=g)
    weights = torch.rand(1005, generator=g)
    problem = replace(linear.Truth().problem, train=TensorDataset(inputs, targets, weights), num_train=1005)
    method = fit(problem, 1, elbo_samples=5)
    losses, g = [], generator(0)
    with torch.no_grad():
        for _ in range(5):
            terms = method.loss_terms(Batch(inputs, targets, weights), method.draw_noise(1, g))
            losses.append(sum(terms).item())
    found = method.diagnostics()
    assert found["components"] == 2
    assert found["weight_1"] + found["weight_2"] == pytest.approx(1)
    assert found["elbo_2"] == pytest.approx(-np.mean(losses), rel=1e-5)
    assert found["elbo_error_2"] == pytest.approx(np.std(losses, ddof=1) / 5**0.5, rel=1e-3)


def test_budget():
    """A search takes the budget for every N_c, growth takes it once; the ELBO decides, not patience."""
    posed = Budget(7, 8, patience=2)
    for choice, expected in (
        ("fixed", posed),
        ("searched", Budget(21, 8)),
        ("grown", Budget(7, 8)),
    ):
        first = MixtureVI(problems.mlp(), Settings(choice=choice, components=3))
        assert first.spends(posed) == expected
        second = MixtureVI(problems.mlp(), Settings(choice=choice, components=3), start=first)
        assert second.spends(posed) == posed
        assert second.active == first.active


def test_search_fits_afresh():
    """Every N_c starts where the parameters started, with an optimiser that has seen nothing."""
    seen = []

    class Recorder(MixtureVI):
        def on_train_epoch_start(self):
            super().on_train_epoch_start()
            untouched = torch.equal(self.means, self.initial[: self.means.numel()].view_as(self.means))
            steps = sum(len(o.state) for o in self.trainer.optimizers)
            seen.append((int(self.active), untouched, steps == 0))

    class MeansFirst(Recorder):
        def _trained(self):
            return sorted(super()._trained(), key=lambda p: p is not self.means)

    fit(problems.mlp(), 2, MeansFirst, components=3, choice="searched", elbo_samples=2)
    assert seen == [(n, fresh, fresh) for n in (1, 2, 3) for fresh in (True, False)]


def test_a_loss_is_stable():
    """Stable are two windows since the last change whose means differ by less than their error."""
    method = MixtureVI(problems.mlp(), Settings(choice="grown", stable_epochs=4))
    falling, flat = np.linspace(9, 5, 8), np.array([5.1, 4.9, 5, 5.05, 4.95, 5.02, 4.99, 5.01])
    for losses, expected in ((falling, False), (flat, True), (flat[:7], False), ([*falling, *flat], True)):
        method.history = [{"loss": loss} for loss in losses]
        assert method._is_stable() is expected
    method.changed_at.fill_(9)  # the last change was there
    assert not method._is_stable()


def test_growth():
    """The new component takes the largest logit and a fresh start; one that does not pay is taken back."""
    seen = []

    class Scripted(MixtureVI):
        def _is_stable(self):
            return self.epoch in (2, 4, 6)

        def _compare(self):
            if self.epoch == 6:
                return False
            self.kept.copy_(nn.utils.parameters_to_vector(self._trained()))
            self.kept_active.copy_(self.active)
            return True

        def on_train_epoch_start(self):
            before = [p.detach().clone() for p in (self.logits, self.means)]
            super().on_train_epoch_start()
            seen.append(
                (int(self.active), bool(self.settled), before, self.logits.tolist(), self.means.clone())
            )

        def finish_fit(self, loader):
            """Leaves all as it is."""

    start = fit(problems.mlp(), 0, MixtureVI, components=4).means
    method = fit(problems.mlp(), 8, Scripted, components=4, choice="grown", learning_rate=0.1)
    assert [active for active, *_ in seen] == [1, 1, 2, 2, 3, 3, 2, 2]
    assert [settled for _, settled, *_ in seen] == [False] * 6 + [True] * 2
    for epoch, new in ((2, 1), (4, 2)):
        _, _, (logits, means), now, placed = seen[epoch]
        assert now[new] == logits[:new].max()
        assert torch.equal(placed, means), "what is there goes on"
        assert_close(placed[new], start[new], rtol=0, atol=0)
    assert torch.equal(seen[6][4][:2], seen[4][4][:2]), "back to where the third was added"
    assert not torch.equal(method.means[:2], seen[6][4][:2]), "and trained on"


@pytest.mark.parametrize("choice", ["searched", "grown"])
def test_choice_goes_on_after_a_stop(choice, tmp_path):
    """A stopped search or growth ends with the same numbers, bit by bit; and seeds decide."""
    values = {"choice": choice, "components": 3, "stable_epochs": 2, "elbo_samples": 3}
    case = laws.Case(MixtureVI, {**values, "learning_rate": 0.05}, problems.regression())
    laws.stopped_fit_goes_on(case, tmp_path, None)
    laws.seed_decides(case)
    laws.posterior_becomes_the_prior(case)
    laws.fit_leaves_global_state(case)


QUICK = {"learning_rate": 0.05, "train_samples": 16, "initial_rho": -1.0, "elbo_samples": 200}


@pytest.mark.slow
@pytest.mark.parametrize(("choice", "epochs"), [("searched", 300), ("grown", 700)])
@pytest.mark.parametrize("modes", [1, 2])
def test_number_of_modes_is_found(choice, epochs, modes):
    """N_c = 2 of 3 for two modes with their masses, 1 for one; the ELBO is then the evidence."""
    problem = one_weight(two_modes if modes == 2 else priors.normal(0.4, 0.8))
    found = fit(problem, epochs, choice=choice, components=3, seed=5, stable_epochs=50, **QUICK).diagnostics()
    assert found["components"] == modes
    assert {"elbo_1", "elbo_2"} <= found.keys()
    assert found[f"elbo_{modes}"] == pytest.approx(-0.5 * math.log(2 * math.pi), abs=0.03)
    if modes == 2:
        weights = sorted([found["weight_1"], found["weight_2"]])
        assert weights == pytest.approx(SHARES, abs=0.03)
        assert found["elbo_2"] - found["elbo_1"] > 0.3, (
            "log(1 / 0.7) = 0.36 nats, or 1.2 from the lesser mode"
        )


@pytest.mark.slow
def test_figure_1():
    """1-100-1 tanh, Adam 0.1: after 500 steps one of two components is left, with the mixture's loss."""
    x = torch.linspace(-7, 7, 100)[:, None]
    y = 0.5 * x.sin() + 0.1 * torch.randn(100, 1, generator=generator(0))

    def network(dropout=0.0):
        layers = nn.Sequential(*networks.mlp(1, 1, (100,), "tanh"), nn.Tanh())
        for p in layers.parameters():
            nn.init.normal_(p)
        return layers

    problem = Problem(network, likelihoods.Gaussian(0.1), priors.normal(0, 1), TensorDataset(x, y), None, 100)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        method = MixtureVI(problem, Settings(learning_rate=0.1))
        alone = MixtureVI(problem, Settings(components=1))
    optimizer, g = method.configure_optimizers(), generator(0)
    for step in range(500):
        optimizer.zero_grad()
        sum(method.loss_terms(Batch(x, y), method.draw_noise(10, g))).backward()
        optimizer.step()
        if step == 0:
            assert components(method)[0].min() > 0.4
    weights = components(method)[0]
    assert weights.min() < 0.01
    left = int(weights.argmax())
    with torch.no_grad():
        alone.means[0], alone.rho[0] = method.means[left], method.rho[left]
        noise = method.draw_noise(50, g)
        both = sum(method.loss_terms(Batch(x, y), noise)).item()
        one = sum(alone.loss_terms(Batch(x, y), {n: e[:, left : left + 1] for n, e in noise.items()})).item()
    assert both == pytest.approx(one, rel=0.01)
