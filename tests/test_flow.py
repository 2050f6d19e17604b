"""Coupling layers against autograd's Jacobian, their own inverse, and the networks written out with torch.nn.

"False alarm" is the probability that a correct program fails a statistical test; seeds are fixed.
"""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from conformance import laws, problems
from oracles import flows
from torch import nn
from torch.testing import assert_close

from bench.contract import Batch
from bench.errors import UsageError
from bench.families.flow import CouplingFlow
from bench.methods.nf_gamma import NFGamma

SIZES = pytest.mark.parametrize("size", [1, 2, 5, 12])
MASKS = pytest.mark.parametrize("masks", ["halves", "published"])


def made(size, masks="halves", start="random", seed=0, units=16):
    """A flow in float64 under a seed of its own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return CouplingFlow(size, masks, start, units).double()


def moved(size, masks, seed=0):
    """A flow far from where any flow starts."""
    flow = made(size, masks, "identity", seed)
    flows.perturb(flow, 0.4, seed)
    return flow


def points(count, size, seed=5):
    return 2 * torch.randn(count, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ------------------------------------------------------------------------------------------- the map


@SIZES
@MASKS
def test_log_det_is_that_of_autograds_jacobian(size, masks):
    """By torch.linalg.slogdet, at points on both sides of the kinks."""
    flow, xi = moved(size, masks), points(6, size)
    weights, log_det = flow(xi)
    assert (weights.shape, log_det.shape) == ((6, size), (6,))
    for s in range(6):
        jacobian = torch.autograd.functional.jacobian(lambda x: flow(x[None])[0][0], xi[s])
        assert_close(log_det[s], torch.linalg.slogdet(jacobian).logabsdet)
    assert log_det.abs().min() > 1e-3


@SIZES
@MASKS
def test_inverse_undoes_the_map(size, masks):
    """Both ways round; the inverse tells the log determinant of the forward map."""
    flow, xi = moved(size, masks), points(50, size)
    weights, log_det = flow(xi)
    assert (weights - xi).abs().max() > 0.1
    back, same = flow.inverse(weights)
    assert_close(back, xi)
    assert_close(same, log_det)
    assert_close(flow(flow.inverse(xi)[0])[0], xi)


@MASKS
def test_identity_start_is_the_identity(masks):
    """To the last bit, with log determinant 0; the gradient leads away from it."""
    flow, xi = made(6, masks, "identity"), points(4, 6)
    weights, log_det = flow(xi)
    assert torch.equal(weights, xi)
    assert torch.equal(log_det, torch.zeros(4).double())
    assert torch.equal(flow.inverse(xi)[0], xi)
    (weights.square().sum() + log_det.sum()).backward()
    assert sum(p.grad.abs().sum() for p in flow.parameters()) > 0


def test_random_start_is_that_of_torchs_linear_layers():
    """Weights and biases uniform within 1/sqrt(inputs); no layer at rest. False alarm: 6 x 6e-7."""
    flow = made(400, start="random")
    for name, p in flow.named_parameters():
        bound = (400 if name.startswith("enter") else 16) ** -0.5
        assert p.abs().max() <= bound
        laws.assert_mean_is((p.detach() / bound).flatten().square(), 1 / 3, errors=5)
    xi = points(3, 400)
    assert not torch.equal(flow(xi)[0], xi)


def written_out(flow, layer, kind):
    """The network for the scale (kind 0) or the shift (1) of a layer, of torch's own modules."""
    size = flow.masks.shape[1]
    tensors = [(flow.enter[layer], flow.enter_bias[layer])]
    tensors += list(zip(flow.hidden[layer], flow.hidden_bias[layer], strict=True))
    tensors += [(flow.leave[layer], flow.leave_bias[layer])]
    parts = []
    for (before, after), (weight, bias) in zip(pairwise([size, 16, 16, 16, size]), tensors, strict=True):
        linear = nn.Linear(before, after).double()
        linear.load_state_dict({"weight": weight[kind].T, "bias": bias[kind, 0]})
        parts += [linear, nn.LeakyReLU(0.01)]
    return nn.Sequential(*parts[:-1], nn.Identity() if kind else nn.Tanh())


@MASKS
@pytest.mark.parametrize("make", [moved, made])
def test_layers_are_the_published_networks(masks, make):
    """Four linear layers of 16 units with leaky ReLU between; tanh ends the scale network, none the shift.

    Each layer is v = r u + (1 - r) (u exp(s(r u)) + t(r u)).
    """
    flow, xi = make(7, masks), points(5, 7)
    value, log_det = xi, torch.zeros(5).double()
    for layer, r in enumerate(flow.masks):
        scale, shift = (written_out(flow, layer, kind)(r * value) for kind in (0, 1))
        value = r * value + (1 - r) * (value * scale.exp() + shift)
        log_det = log_det + ((1 - r) * scale).sum(1)
    found = flow(xi)
    assert_close(found[0], value)
    assert_close(found[1], log_det)


def test_printed_coupling_is_not_invertible():
    """As printed, the moved entries are those that the networks see: u exp(s(u)) can turn back."""
    u = torch.linspace(-3, 3, 601, dtype=torch.float64)
    printed = u * torch.exp(torch.tanh(2 - 2 * u))
    assert (printed.diff() > 0).any()
    assert (printed.diff() < 0).any()


def test_float32_and_float64_agree():
    """A flow in float32 maps float64 vectors in float64."""
    flow = made(5, seed=3)
    vectors = points(4, 5)
    single = made(5, seed=3).float()
    assert single(vectors)[0].dtype == torch.float64
    assert single(vectors.float())[0].dtype == torch.float32
    assert_close(single(vectors)[0], flow(vectors)[0], rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------------- masks


@SIZES
@MASKS
def test_pairs_are_a_mask_and_its_complement(size, masks):
    """Every entry is kept by one layer of a pair and moved by the other; the two pairs differ."""
    flow = made(size, masks)
    assert flow.masks.shape == (4, size)
    assert set(flow.masks.flatten().tolist()) <= {0.0, 1.0}
    for pair in flow.masks.view(2, 2, size):
        assert torch.equal(pair.sum(0), torch.ones(size).double())
    assert size < 12 or not torch.equal(flow.masks[0], flow.masks[2])


@pytest.mark.parametrize("size", [1, 2, 7, 100, 1001])
def test_halves_are_halves(size):
    """The first layer of a pair moves d // 2 entries."""
    flow = made(size, "halves")
    assert (1 - flow.masks[[0, 2]]).sum(1).tolist() == 2 * [size // 2]


def test_halves_are_random():
    """Over 1000 flows every entry is kept half of the time. False alarm: 8 x 7e-6."""
    kept = torch.stack([made(8, "halves", seed=s).masks[0] for s in range(1000)])
    laws.assert_mean_is(kept, 0.5)


def test_published_masks_draw_with_replacement():
    """D // 2 draws out of d leave (1 - 1/d)^(d/2) = 61% of the entries.

    Within 5 standard deviations of the number of empty boxes; false alarm: 2 x 6e-7.
    """
    d = 10_000
    flow = made(d, "published")
    share = 1 - flow.masks[[0, 2]].mean(1)
    expected = 1 - (1 - 1 / d) ** (d // 2)
    assert expected == pytest.approx(1 - math.exp(-0.5), abs=1e-4)
    half = math.exp(-0.5)
    std = math.sqrt((half - 1.5 * half**2) / d)
    assert ((share - expected).abs() < 5 * std).all()
    assert (share < 0.5 - 5 * std).all()


def test_masks_are_kept_with_the_flow():
    """They are in the state, so that a saved flow is the same map."""
    flow, other = made(9, seed=1), made(9, seed=2)
    assert not torch.equal(flow.masks, other.masks)
    other.load_state_dict(flow.state_dict())
    xi = points(3, 9)
    assert torch.equal(flow(xi)[0], other(xi)[0])


# -------------------------------------------------------------------------- what methods built on it share


@flows.METHODS
def test_weights_are_the_flows_image_of_the_source(cls):
    """Draws of the weights are the network's tensors in order, by hand from draws of the source."""
    method = flows.method_of(cls, problems.regression())
    draws = method.sample_weights(5, laws.generator(1))
    xi, _ = method.exact_source(5, laws.generator(1))
    flat = torch.cat([draws[name].flatten(1) for name, _ in method.network.named_parameters()], 1)
    assert_close(flat, method.flow(xi)[0].detach())


@flows.METHODS
def test_loss_terms_by_hand(cls):
    """The two terms written out from the source draws of the same noise."""
    method = flows.method_of(cls)
    batch = Batch(*(t.double() for t in method.problem.train.tensors))
    noise = laws.in_double(method.draw_noise(3, laws.generator(2)))
    nll, prior_term = method.loss_terms(batch, noise)
    xi, negative_entropy = method.source(noise)
    weights, log_det = method.flow(xi)
    slope, intercept = weights.T[..., None]
    predicted = slope * batch.inputs[:, 0] + intercept
    log_density = -0.5 * (predicted - batch.targets[:, 0]) ** 2 / 0.25 - 0.5 * math.log(2 * math.pi * 0.25)
    assert_close(nll, -log_density.sum(1).mean())
    prior = torch.distributions.Normal(torch.tensor(0.1).double(), torch.tensor(0.8).double())
    expected = negative_entropy - (log_det + prior.log_prob(weights).sum(1)).mean()
    # The prior's float32 parameters are the tolerance.
    assert_close(prior_term, expected, rtol=1e-6, atol=1e-6)


@flows.METHODS
def test_a_start_is_taken_over(cls):
    """With `start` the flow and the source are those of the earlier fit."""
    method = flows.method_of(cls)
    again = flows.method_of(cls, start=method, amount=0.0)
    for name, value in method.state_dict().items():
        assert torch.equal(again.state_dict()[name], value.float().to(value))


@pytest.mark.slow
@flows.METHODS
def test_density_integrates_to_one(cls):
    """On the plane, far from the identity, by the trapezoid rule in the weights."""
    assert flows.mass(flows.method_of(cls)) == pytest.approx(1, abs=1e-3)


@flows.METHODS
@MASKS
def test_density_of_own_draws(cls, masks):
    """It is log q(xi) - log det at the draws' own xi."""
    method = flows.method_of(cls, problems.regression(), masks=masks)
    draws = method.sample_weights(6, laws.generator(3))
    xi, _ = method.exact_source(6, laws.generator(3))
    _, log_det = method.flow(xi)
    assert_close(method.log_prob(draws), method.source_log_prob(xi) - log_det, rtol=1e-6, atol=1e-6)


@flows.METHODS
def test_expected_log_densities_are_exact_in_the_source(cls):
    """The mean of the numbers beside the draws is that of their log densities, with less error."""
    method = flows.method_of(cls)
    draws, log_q = method.sample_and_log_prob(20_000, laws.generator(4))
    densities = method.log_prob(draws).detach()
    laws.assert_mean_is(densities - log_q, 0.0)
    xi, negative_entropy = method.exact_source(20_000, laws.generator(4))
    _, log_det = method.flow(xi)
    assert_close(log_q, (negative_entropy - log_det).detach())


@flows.METHODS
def test_large_networks_are_refused(cls):
    """In one line, with the method's name and the number of parameters that the flow would have."""
    large = replace(problems.linear(), network=lambda dropout=0.0: nn.Linear(1000, 101))
    with pytest.raises(UsageError, match=r"over 101,101 weights has 26,690,664 parameters.* 100,000") as info:
        flows.method_of(cls, large)
    assert "\n" not in str(info.value)
    assert ("nf_gamma" if cls is NFGamma else "nf_gaussian") in str(info.value)


@pytest.mark.parametrize(("units", "numbers"), [(16, 264), (3, 56)])
def test_the_flow_has_so_many_numbers_per_weight(units, numbers):
    """As the refusal of large networks says: the number of its parameters grows with d, and with the units.

    Two networks of four layers have a row of `units` in, one out, and a bias for each weight.
    """
    counts = [sum(p.numel() for p in made(d, units=units).parameters()) for d in (100, 101)]
    assert counts[1] - counts[0] == numbers == 4 * 2 * (2 * units + 1)


@flows.METHODS
def test_a_method_has_the_units_that_its_settings_ask_for(cls):
    """A setting that no network took would leave 16."""
    network = flows.method_of(cls, problems.linear(), units=4).flow
    assert {tuple(w.shape[1:]) for w in network.enter} == {(network.masks.shape[1], 4)}
