"""Energy, likelihoods and priors against formulas written out by hand and scipy."""

import math

import numpy as np
import pytest
import scipy.integrate
import scipy.stats
import torch
from torch.distributions import Independent, Normal
from torch.testing import assert_close

from bench import likelihoods, priors
from bench.contract import JOINT, Batch
from bench.divergence import divergence, is_normalised, log_prob, weight_divergence
from bench.energy import likelihood_term

PARAMETERS = {"weight": torch.zeros(2, 3), "bias": torch.zeros(3), "one": torch.zeros(())}


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---- energy


def test_energy_rescales_a_batch_to_the_training_set():
    """-(n / B) sum_b weight_b mean_s log p, summed by hand with loops."""
    outputs, targets = random(3, 4, 2), torch.tensor([0, 1, 1, 0])
    weights = torch.tensor([1.0, 2.0, 0.0, 0.5], dtype=torch.float64)
    total = 0.0
    for b in range(4):
        for s in range(3):
            logits = outputs[s, b].numpy()
            total += float(weights[b]) * (logits[targets[b]] - np.logaddexp(*logits)) / 3
    actual = likelihood_term(likelihoods.Categorical(), outputs, Batch(None, targets, weights), 100)
    assert actual.item() == pytest.approx(-100 / 4 * total, rel=1e-12)


def test_energy_without_weights_has_weight_one():
    """No weights are weights of one."""
    outputs, targets = random(2, 5, 1), random(5, 1, seed=1)
    ones = Batch(None, targets, torch.ones(5, dtype=torch.float64))
    likelihood = likelihoods.Gaussian(0.4)
    a = likelihood_term(likelihood, outputs, Batch(None, targets), 7)
    assert_close(a, likelihood_term(likelihood, outputs, ones, 7))


# ---- likelihoods


def test_categorical_log_prob_by_hand():
    """Logit of the target minus the log of the summed exponentials."""
    outputs, targets = 3 * random(3, 4, 5), torch.tensor([4, 0, 2, 2])
    actual = likelihoods.Categorical().log_prob(outputs, targets)
    for s in range(3):
        for b in range(4):
            logits = outputs[s, b].numpy()
            expected = logits[targets[b]] - math.log(sum(math.exp(x) for x in logits))
            assert actual[s, b].item() == pytest.approx(expected, rel=1e-12)


def test_categorical_prediction_scores_the_mean_probability():
    """The averaged prediction is the mean of the probabilities, not of their logarithms."""
    outputs, targets = 3 * random(3, 4, 5), torch.tensor([4, 0, 2, 2])
    probabilities = np.exp(outputs.numpy())
    probabilities /= probabilities.sum(-1, keepdims=True)
    expected = np.log(probabilities.mean(0)[np.arange(4), targets.numpy()])
    actual = likelihoods.Categorical().predict(outputs).log_score(targets)
    assert_close(actual, torch.from_numpy(expected))


def test_bernoulli_log_prob_by_hand():
    """-log(1 + exp(-logit)) for class 1, -log(1 + exp(logit)) for class 0; far logits stay finite."""
    outputs, targets = random(2, 4, 1), torch.tensor([0, 1, 1, 0])
    actual = likelihoods.Bernoulli().log_prob(outputs, targets)
    for s in range(2):
        for b in range(4):
            sign = 1 if targets[b] else -1
            expected = -math.log1p(math.exp(-sign * outputs[s, b, 0].item()))
            assert actual[s, b].item() == pytest.approx(expected, rel=1e-12)
    far = likelihoods.Bernoulli().log_prob(torch.tensor([[[500.0], [500.0]]]), torch.tensor([0, 1]))
    assert far.tolist() == [[-500.0, 0.0]]


def test_bernoulli_prediction_scores_the_mean_probability():
    """Mean over the samples of sigmoid(log-odds)."""
    outputs, targets = random(3, 4, 1), torch.tensor([0, 1, 1, 0])
    p = 1 / (1 + np.exp(-outputs.numpy()[..., 0]))
    expected = np.log(np.where(targets.numpy() == 1, p.mean(0), 1 - p.mean(0)))
    actual = likelihoods.Bernoulli().predict(outputs).log_score(targets)
    assert_close(actual, torch.from_numpy(expected))


def test_gaussian_log_prob_with_fixed_noise():
    """Against scipy's normal, summed over the outputs."""
    outputs, targets = random(3, 4, 2), random(4, 2, seed=1)
    actual = likelihoods.Gaussian(0.35).double().log_prob(outputs, targets)
    expected = scipy.stats.norm.logpdf(targets.numpy(), outputs.numpy(), 0.35).sum(-1)
    assert_close(actual, torch.from_numpy(expected), rtol=1e-6, atol=1e-6)


def test_gaussian_log_prob_with_learned_noise():
    """Each output has its own sigma, trained along: its gradient is (z^2 - 1) summed."""
    outputs, targets = random(3, 4, 2), random(4, 2, seed=1)
    likelihood = likelihoods.Gaussian("learned", outputs=2).double()
    sigma = np.array([0.3, 2.0])
    likelihood.log_sigma.data = torch.from_numpy(np.log(sigma))
    actual = likelihood.log_prob(outputs, targets)
    expected = scipy.stats.norm.logpdf(targets.numpy(), outputs.numpy(), sigma).sum(-1)
    assert_close(actual, torch.from_numpy(expected))
    actual.sum().backward()
    z = (targets.numpy() - outputs.numpy()) / sigma
    assert_close(likelihood.log_sigma.grad, torch.from_numpy((z**2 - 1).sum((0, 1))))


def test_gaussian_log_prob_with_noise_per_example():
    """Targets bring their own sigma; the prediction is that of the noiseless function."""
    outputs, values = random(3, 4, 2), random(4, 2, seed=1)
    sigma = random(4, 2, seed=2).abs() + 0.1
    likelihood = likelihoods.Gaussian("per_example")
    actual = likelihood.log_prob(outputs, torch.stack([values, sigma], -1))
    expected = scipy.stats.norm.logpdf(values.numpy(), outputs.numpy(), sigma.numpy()).sum(-1)
    assert_close(actual, torch.from_numpy(expected))
    assert likelihood.predict(outputs).variance.eq(0).all()
    assert not list(likelihood.parameters())


def test_gaussian_prediction_is_scored_under_the_noise_that_a_target_brings():
    """The equal mixture of the samples' functions, each with the target's own noise, against scipy."""
    outputs, values = random(3, 4, 2), random(4, 2, seed=1)
    sigma = random(4, 2, seed=2).abs() + 0.1
    actual = likelihoods.Gaussian("per_example").predict(outputs).log_score(torch.stack([values, sigma], -1))
    densities = scipy.stats.norm.pdf(values.numpy(), outputs.numpy(), sigma.numpy()).prod(-1)
    assert_close(actual, torch.from_numpy(np.log(densities.mean(0))))


@pytest.mark.parametrize("sigma", [0.35, "learned"])
def test_gaussian_prediction_is_the_mixture_over_the_samples(sigma):
    """Score, mean and variance of the equal mixture, against scipy."""
    outputs, targets = random(3, 4, 2), random(4, 2, seed=1)
    likelihood = likelihoods.Gaussian(sigma, outputs=2).double()
    std = 0.35 if sigma == 0.35 else 1.0
    prediction = likelihood.predict(outputs)
    densities = scipy.stats.norm.pdf(targets.numpy(), outputs.numpy(), std).prod(-1)
    assert_close(
        prediction.log_score(targets), torch.from_numpy(np.log(densities.mean(0))), rtol=1e-6, atol=1e-6
    )
    mean, variance = prediction.average()
    assert_close(mean, outputs.mean(0))
    expected = torch.from_numpy(outputs.numpy().var(0) + std**2)
    assert_close(variance, expected, rtol=1e-6, atol=1e-6)


# ---- priors


def draws(samples=4):
    return {name: random(samples, *p.shape, seed=i).float() for i, (name, p) in enumerate(PARAMETERS.items())}


def test_normal_prior_by_hand():
    """-(w - m)^2 / 2 s^2 - log s - log(2 pi) / 2, summed over all weights of a sample."""
    weights = draws()
    actual = log_prob(priors.normal(0.3, 1.7)(PARAMETERS), weights)
    for s in range(4):
        w = np.concatenate([t[s].double().numpy().ravel() for t in weights.values()])
        expected = (-((w - 0.3) ** 2) / (2 * 1.7**2) - math.log(1.7) - math.log(2 * math.pi) / 2).sum()
        assert actual[s].item() == pytest.approx(expected, rel=1e-5)


def test_tight_prior_by_hand():
    """Standard deviation 1/sqrt(D), D the number of weights of the tensor."""
    weights = draws()
    actual = log_prob(priors.tight_normal()(PARAMETERS), weights)
    expected = sum(
        scipy.stats.norm.logpdf(t.double().numpy(), 0, p.numel() ** -0.5).reshape(4, -1).sum(1)
        for t, p in zip(weights.values(), PARAMETERS.values(), strict=True)
    )
    assert_close(actual.double(), torch.from_numpy(expected), rtol=1e-5, atol=1e-5)


def test_scale_mixture_prior_by_hand():
    """The log of share N(w; 0, std^2) + (1 - share) N(w; 0, narrow^2) per weight, on both scales."""
    prior = priors.scale_mixture(0.3, 1.5, 0.02)(PARAMETERS)
    weights = {
        name: w * torch.tensor([1, 0.02, 1, 0.02]).view(-1, *[1] * (w.ndim - 1))
        for name, w in draws().items()
    }
    expected = np.zeros(4)
    for w in weights.values():
        x = w.double().numpy().reshape(4, -1)
        density = 0.3 * scipy.stats.norm.pdf(x, 0, 1.5) + 0.7 * scipy.stats.norm.pdf(x, 0, 0.02)
        expected += np.log(density).sum(1)
    assert_close(log_prob(prior, weights).double(), torch.from_numpy(expected), rtol=1e-5, atol=1e-4)


def test_frozen_prior_keeps_copies():
    """A frozen prior does not follow the tensors that it was made of."""
    mean, std = torch.ones(3), torch.full((3,), 2.0)
    prior = priors.frozen({"bias": (mean, std)}, priors.normal_tensor)
    mean.zero_()
    std.zero_()
    distribution = prior({"bias": torch.zeros(3)})["bias"]
    assert_close(distribution.mean, torch.ones(3))
    assert_close(distribution.stddev, torch.full((3,), 2.0))


def test_a_prior_without_normaliser_says_so():
    """`is_normalised` is False as soon as one part says that it has no normaliser."""
    prior = dict(priors.normal()(PARAMETERS))
    assert is_normalised(prior)
    prior["bias"].normalised = False
    assert not is_normalised(prior)


# ---- divergence


@pytest.mark.parametrize("shape", [(), (1,), (4,), (2, 3)])
@pytest.mark.parametrize("shared", [True, False])
def test_divergence_of_normals_is_torchs(shape, shared):
    """The written-out KL equals torch.distributions', and its gradients do."""
    mean, rho, m0 = (random(*shape, seed=i) for i in range(3))
    s0 = torch.tensor(1.7, dtype=torch.float64) if shared else random(*shape, seed=3).exp()
    results = []
    for compute in (
        lambda q, p: divergence(q, p, None),
        lambda q, p: torch.distributions.kl_divergence(q.base_dist, p.base_dist).sum(),
    ):
        leaves = [mean.clone().requires_grad_(), rho.clone().requires_grad_()]
        q = priors.normal_tensor(leaves[0], leaves[1].exp())
        p = priors.normal_tensor(m0, s0.expand(shape))
        value = compute(q, p)
        results.append([value, *torch.autograd.grad(value, leaves)])
    for a, b in zip(*results, strict=True):
        assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_divergence_of_normals_by_quadrature():
    """KL(N(0.4, 0.3^2) || N(-0.5, 1.2^2)) by scipy's quadrature of q log(q / p)."""
    q, p = scipy.stats.norm(0.4, 0.3), scipy.stats.norm(-0.5, 1.2)
    expected, _ = scipy.integrate.quad(lambda x: q.pdf(x) * (q.logpdf(x) - p.logpdf(x)), -4, 4, points=[0.4])
    tensors = [torch.tensor([v], dtype=torch.float64) for v in (0.4, 0.3, -0.5, 1.2)]
    actual = divergence(priors.normal_tensor(*tensors[:2]), priors.normal_tensor(*tensors[2:]), None)
    assert actual.item() == pytest.approx(expected, rel=1e-8)


def test_divergence_without_closed_form_is_the_mean_over_the_draws():
    """Normal to scale mixture has no closed form: mean_s log q(w_s) - log p(w_s), exactly."""
    q = priors.normal_tensor(torch.zeros(3), torch.full((3,), 0.5))
    p = priors.scale_mixture()({"bias": torch.zeros(3)})["bias"]
    w = random(5, 3).float() * 0.5
    expected = torch.stack([q.log_prob(w[s]) - p.log_prob(w[s]) for s in range(5)]).mean()
    assert_close(divergence(q, p, w), expected)


def test_divergence_of_joint_distributions():
    """Joint against joint is torch's KL of the vectors; joint against tensors the mean over the draws."""
    shapes = {"a": (2, 1), "b": (3,)}
    covariance = torch.eye(5, dtype=torch.float64) * 0.5 + 0.1
    q = torch.distributions.MultivariateNormal(torch.zeros(5, dtype=torch.float64), covariance)
    p = torch.distributions.MultivariateNormal(
        torch.ones(5, dtype=torch.float64), torch.eye(5, dtype=torch.float64)
    )
    vectors = random(6, 5)
    w = {"a": vectors[:, :2].reshape(6, 2, 1), "b": vectors[:, 2:]}
    exact = torch.distributions.kl_divergence(q, p)
    assert_close(weight_divergence({JOINT: q}, {JOINT: p}, w), exact)
    parts = {
        n: Independent(Normal(torch.ones(s).double(), torch.ones(s).double()), len(s))
        for n, s in shapes.items()
    }
    mixed = weight_divergence({JOINT: q}, parts, w)
    assert_close(mixed, (q.log_prob(vectors) - p.log_prob(vectors)).mean())
