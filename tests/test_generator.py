"""The generator of replay: its bound against distributions and quadrature, and what it has learned."""

import copy

import pytest
import torch
from torch import Size
from torch.distributions import Bernoulli, Normal, kl_divergence
from torch.testing import assert_close

from bench.families import generator
from bench.families.generator import VAE


def source(seed=0):
    return torch.Generator().manual_seed(seed)


def vae_of(shape=(2, 3), hidden=7, latent=4, seed=0):
    """An autoencoder in float64 whose biases, 0 at the start, are moved too."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        vae = VAE(Size(shape), hidden, latent).double()
        with torch.no_grad():
            for p in vae.parameters():
                p += 0.3 * torch.randn_like(p)
    return vae.requires_grad_(False)


def images(size=5, shape=(2, 3), seed=1):
    return torch.rand(size, *shape, generator=source(seed), dtype=torch.float64)


def test_bound_is_the_likelihood_less_the_divergence():
    """At given noise: binary pixels by torch's Bernoulli, the divergence by torch's normals."""
    vae, inputs = vae_of(), images().round()
    noise = torch.randn(5, 4, generator=source(2), dtype=torch.float64)
    mean, log_variance = vae.posterior(inputs)
    q = Normal(mean, log_variance.exp().sqrt())
    assert (log_variance.abs() > 0.1).any()
    logits = vae.decoder(mean + q.stddev * noise)
    log_likelihood = Bernoulli(logits=logits).log_prob(inputs.flatten(1)).sum(1)
    expected = log_likelihood - kl_divergence(q, Normal(0.0, 1.0)).sum(1)
    assert_close(vae.bound(inputs, noise), expected, rtol=1e-12, atol=0)


def test_grey_pixel_is_the_expectation_over_on_and_off():
    """The reconstruction is linear in a pixel, here in the one that the encoder does not see."""
    vae, noise = vae_of(), torch.randn(1, 4, generator=source(3), dtype=torch.float64)
    vae.encoder[1].weight[:, 0] = 0
    image = images(1)
    off, on, grey = (image.index_put((torch.tensor(0),) * 3, image.new_tensor(v)) for v in (0, 1, 0.3))
    expected = 0.7 * vae.bound(off, noise) + 0.3 * vae.bound(on, noise)
    assert_close(vae.bound(grey, noise), expected, rtol=1e-12, atol=0)


def test_mean_bound_is_the_evidence_less_the_divergence_to_the_true_posterior():
    """With one latent variable both are sums over a fine grid; the gap is KL(q || p(z | x)), above 0."""
    vae, image = vae_of(latent=1), images(1).round()
    grid = torch.linspace(-9, 9, 6001, dtype=torch.float64)
    step, standard = grid[1] - grid[0], Normal(grid.new_zeros(()), grid.new_ones(()))
    bounds = vae.bound(image.expand(len(grid), 2, 3), grid[:, None])
    mean_bound = (bounds * standard.log_prob(grid).exp() * step).sum()
    log_likelihood = Bernoulli(logits=vae.decoder(grid[:, None])).log_prob(image.flatten(1)).sum(1)
    log_joint = log_likelihood + standard.log_prob(grid)
    log_evidence = log_joint.logsumexp(0) + step.log()
    mean, log_variance = (part.squeeze() for part in vae.posterior(image))
    q = Normal(mean, (0.5 * log_variance).exp()).log_prob(grid)
    gap = (q.exp() * (q - log_joint + log_evidence) * step).sum()
    assert gap > 0.01
    assert_close(mean_bound, log_evidence - gap, rtol=1e-6, atol=0)


def test_samples_are_pixels_that_follow_from_the_seed():
    vae = vae_of()
    once = vae.sample(50, source())
    assert once.shape == (50, 2, 3)
    assert once.dtype == torch.float64
    assert ((once > 0) & (once < 1)).all()
    assert torch.equal(once, vae.sample(50, source()))
    assert not torch.equal(once, vae.sample(50, source(1)))


def test_mean_sample_is_the_decoder_under_the_prior():
    """With one latent variable, against quadrature. False alarm: 6 pixels x 7e-6."""
    vae = vae_of(latent=1)
    grid = torch.linspace(-9, 9, 6001, dtype=torch.float64)
    density = Normal(grid.new_zeros(()), grid.new_ones(())).log_prob(grid).exp() * (grid[1] - grid[0])
    expected = density @ vae.decoder(grid[:, None]).sigmoid()
    draws = vae.sample(4000, source()).flatten(1)
    assert ((draws.mean(0) - expected).abs() < 4.5 * draws.std(0) / 4000**0.5).all()


def trained(inputs, steps, past=None, num_past=0):
    vae = copy.deepcopy(past) if past is not None else vae_of(inputs.shape[1:], 32, 4).float()
    generator.train(vae, inputs, num_past, steps, source(4))
    return vae


def test_few_images_are_learned_by_heart():
    inputs = images(4, (4, 4)).round().float()
    vae = trained(inputs, 500)
    assert not any(p.requires_grad for p in vae.parameters())
    rebuilt = vae.decoder(vae.posterior(inputs)[0]).sigmoid().view_as(inputs)
    assert (rebuilt - inputs).abs().mean() < 0.05
    nearest = (vae.sample(200, source())[:, None] - inputs).abs().mean((2, 3)).argmin(1)
    assert nearest.unique().tolist() == [0, 1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("num_past", [0, 60])
def test_generated_past_keeps_its_share(num_past):
    """Of 20 new and `num_past` earlier examples each kind is generated about as often as there are of it."""
    left = torch.zeros(20, 4, 4)
    left[:, :, :2] = 1
    earlier = trained(left, 300)
    kept = copy.deepcopy(earlier.state_dict())
    both = trained(1 - left, 600, earlier, num_past)
    share = both.sample(1000, source())[:, :, :2].mean().item()
    assert share == pytest.approx(num_past / (20 + num_past), abs=0.1)
    for name, value in earlier.state_dict().items():
        assert torch.equal(value, kept[name])


def test_training_draws_from_its_generator_alone():
    inputs, before = images(4, (4, 4)).float(), torch.random.get_rng_state()
    one, two = trained(inputs, 3), trained(inputs, 3)
    assert torch.equal(torch.random.get_rng_state(), before)
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)
