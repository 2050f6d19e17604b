"""ResNet-50 with filter response normalisation: its formulas, that of torchvision, independent examples."""

import math

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torchvision.models import resnet50

from bench.networks import Dropout, dropout_masks
from bench.resnet import (
    FilterResponse,
    FilterResponseNorm,
    ThresholdedLinear,
    filter_response,
    resnet50_frn,
    resnet_frn_swish,
)
from bench.weights import channels_last, forward, linearises


def count(network):
    return sum(p.numel() for p in network.parameters())


def stacked(networks):
    return {n: torch.stack([m.get_parameter(n) for m in networks]) for n, _ in networks[0].named_parameters()}


def perturbed(network):
    """The network in float64 with gains, biases and thresholds off their start."""
    with torch.no_grad():
        for p in network.double().parameters():
            if p.ndim == 1:
                p += 0.3 * torch.randn_like(p)
    return network


def test_filter_response_norm_is_its_formula():
    """Singh and Krishnan 2020, equation 1, map by map; epsilon so large that its place shows."""
    torch.manual_seed(0)
    layer = perturbed(FilterResponseNorm(3, epsilon=0.5))
    images = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    outputs = layer(images)
    for b in range(2):
        for c in range(3):
            pixels = images[b, c].flatten().tolist()
            root = math.sqrt(sum(x * x for x in pixels) / len(pixels) + 0.5)
            gamma, beta = layer.weight[c].item(), layer.bias[c].item()
            expected = torch.tensor([gamma * x / root + beta for x in pixels], dtype=torch.float64)
            torch.testing.assert_close(outputs[b, c].flatten(), expected)


def test_normalised_maps_have_mean_square_one_and_do_not_change_with_scale():
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    outputs = FilterResponseNorm(3).double()(images)
    torch.testing.assert_close(outputs.square().mean((2, 3)), torch.ones(2, 3).double(), rtol=1e-5, atol=0)
    again = FilterResponseNorm(3).double()(1000 * images)
    torch.testing.assert_close(again, outputs, rtol=1e-5, atol=0)


def test_threshold_is_the_larger_of_input_and_tau():
    layer = ThresholdedLinear(2)
    images = torch.tensor([-1.0, 0.5]).expand(1, 2, 1, 2).contiguous()
    torch.testing.assert_close(layer(images), images.relu())
    with torch.no_grad():
        layer.threshold.copy_(torch.tensor([-2.0, 0.75]))
    torch.testing.assert_close(layer(images), torch.tensor([[[[-1.0, 0.5]], [[0.75, 0.75]]]]))


def test_it_is_the_resnet50_of_torchvision_with_another_normalisation(monkeypatch):
    """Same outputs where the thresholds are 0, as a ReLU's; as many parameters, and the thresholds."""
    torch.manual_seed(0)
    ours = resnet50_frn().double()
    monkeypatch.setattr(nn.init, "kaiming_normal_", lambda *_, **__: None)  # slow where there is no memory
    with torch.device("meta"):
        torchvisions = resnet50(num_classes=1, norm_layer=FilterResponseNorm)
    thresholds = {id(m.threshold) for m in ours.modules() if isinstance(m, ThresholdedLinear)}
    shared = [p for p in ours.parameters() if id(p) not in thresholds]
    names, shapes = zip(*((name, p.shape) for name, p in torchvisions.named_parameters()), strict=True)
    assert tuple(p.shape for p in shared) == shapes
    with torch.no_grad():
        for p in shared:
            if p.ndim == 1:
                p += 0.1 * torch.randn_like(p)
        images = torch.randn(2, 3, 48, 64, dtype=torch.float64)
        expected = functional_call(torchvisions, dict(zip(names, shared, strict=True)), images)
        torch.testing.assert_close(ours(images), expected)
    taus = 64 + 6 * (3 * 64 + 4 * 128 + 6 * 256 + 3 * 512)  # the stem's; D, D and 4 D in every block
    assert count(ours) == count(torchvisions) + taus == 23_532_801


def small():
    torch.manual_seed(0)
    return perturbed(resnet50_frn(2))


def test_an_output_does_not_depend_on_other_examples():
    network, images = small(), torch.randn(3, 3, 48, 48, dtype=torch.float64)
    alone = torch.cat([network(image[None]) for image in images])
    torch.testing.assert_close(network(images), alone)
    assert not list(network.buffers())  # no running statistics
    network[1] = nn.BatchNorm2d(2).double()
    alone = torch.cat([network(image[None]) for image in images])
    with pytest.raises(AssertionError):
        torch.testing.assert_close(network(images), alone)


def test_stacked_weights_in_channels_last_give_the_outputs_of_each_network():
    members = [small(), perturbed(resnet50_frn(2))]
    weights = stacked(members)
    images = torch.randn(2, 3, 40, 48, dtype=torch.float64)
    expected = torch.stack([m(images) for m in members])
    assert (expected[0] != expected[1]).all()
    torch.testing.assert_close(forward(members[0], weights, images), expected)


def test_weights_start_at_he_gains_at_one_biases_and_thresholds_at_zero():
    torch.manual_seed(0)
    for layer in resnet50_frn(16).modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            n, expected = layer.weight.numel(), 2 / layer.weight[0].numel()
            assert abs(layer.weight.square().mean().item() - expected) < 5 * expected * math.sqrt(2 / n)
            assert layer.bias is None or not layer.bias.any()
        elif isinstance(layer, FilterResponseNorm):
            assert (layer.weight == 1).all()
            assert not layer.bias.any()
        elif isinstance(layer, ThresholdedLinear):
            assert not layer.threshold.any()


def test_every_block_drops_whole_maps():
    network = resnet50_frn(2, dropout=0.5)
    assert [(m.p, m.channels) for m in network.modules() if isinstance(m, Dropout)] == 16 * [(0.5, True)]
    images, outputs = torch.randn(2, 3, 48, 48), []
    for seed in (0, 1):
        with dropout_masks(network, torch.Generator().manual_seed(seed), shared=False):
            outputs.append(network(images))
    assert (outputs[0] != outputs[1]).all()


def test_width_halves_the_parameters_as_nearly_as_channels_allow():
    wanted = count(resnet50_frn(8)) / 2
    counts = [count(resnet50_frn(c)) for c in (5, 6, 7)]
    assert count(resnet50_frn(8, width=2**-0.5)) == min(counts, key=lambda n: abs(n - wanted))


# ---- with swish


@pytest.mark.parametrize("swish", [True, False])
def test_filter_response_is_its_formula_pixel_by_pixel(swish):
    """swish(max(gamma x / root + beta, tau)); epsilon so large that its place shows."""
    torch.manual_seed(0)
    layer = perturbed(FilterResponse(3, swish, epsilon=0.5))
    images = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    outputs = layer(images)
    for b in range(2):
        for c in range(3):
            pixels = images[b, c].flatten().tolist()
            root = math.sqrt(sum(x * x for x in pixels) / len(pixels) + 0.5)
            gamma, beta, tau = (p[c].item() for p in (layer.weight, layer.bias, layer.threshold))
            z = [max(gamma * x / root + beta, tau) for x in pixels]
            expected = [v / (1 + math.exp(-v)) for v in z] if swish else z
            torch.testing.assert_close(outputs[b, c].flatten(), torch.tensor(expected).double())


@pytest.mark.parametrize("swish", [True, False])
@pytest.mark.parametrize("order", [channels_last, torch.Tensor.contiguous])
def test_gradient_of_filter_response_is_the_one_by_differences_and_that_of_autograd(swish, order):
    """First and second, in float64; the second is what the linearised network needs."""
    torch.manual_seed(1)
    layer = perturbed(FilterResponse(2, swish, epsilon=0.1))
    own = [p.detach().clone().requires_grad_() for p in layer.parameters()]
    images = order(torch.randn(2, 2, 3, 3, dtype=torch.float64)).requires_grad_()

    def written_out(images, *own):
        for (name, _), p in zip(layer.named_parameters(), own, strict=True):
            layer.__dict__["_parameters"][name] = p
        return layer(images)

    assert torch.autograd.gradcheck(written_out, (images, *own), raise_exception=False)
    assert torch.autograd.gradgradcheck(written_out, (images, *own), raise_exception=False)
    along = torch.randn(2, 2, 3, 3, dtype=torch.float64)
    found, expected = (
        torch.autograd.grad(outputs, (images, *own), along)
        for outputs in (written_out(images, *own), filter_response(images, *own, swish, 0.1))
    )
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_gradient_of_a_frozen_parameter_is_left_out():
    """As of a last layer's method: no gradient is asked for below, in the first order and in the second."""
    layer = perturbed(FilterResponse(2, swish=True))
    layer.weight.requires_grad_(False)
    images = torch.randn(2, 2, 4, 4, dtype=torch.float64)
    first, second = (
        torch.autograd.grad(layer(images).sum(), layer.bias, create_graph=create)[0]
        for create in (False, True)
    )
    torch.testing.assert_close(first, second)


def test_resnet_with_swish_is_the_published_one():
    """274,042 parameters: what the competition's printed log prior implies, 472,354 nats under N(0, 5)."""
    network = resnet_frn_swish(20)
    assert count(network) == 274_042
    convolutions = [m for m in network.modules() if isinstance(m, nn.Conv2d)]
    assert len(convolutions) == 19 + 2
    assert all(m.bias is not None for m in convolutions)
    assert [m.swish for m in network.modules() if isinstance(m, FilterResponse)].count(True) == 1 + 9
    for depth in (2, 9, 19):
        with pytest.raises(ValueError, match="depth must be 8, 14, 20"):
            resnet_frn_swish(depth)


def test_padding_at_stride_two_lies_right_and_below():
    """As XLA's "same" of an even map: output (i, j) sees the pixels (2i .. 2i+2, 2j .. 2j+2)."""
    torch.manual_seed(0)
    block = perturbed(next(m for m in resnet_frn_swish(8, channels=2) if getattr(m, "shortcut", None)))
    first = nn.Sequential(*list(block.residual)[:2])
    images = torch.zeros(1, 2, 6, 6, dtype=torch.float64)
    base = first(images)
    images[0, :, 2, 4] = 1.0
    moved = (first(images) - base).abs().sum(1)[0].nonzero().tolist()
    assert moved == [[0, 1], [0, 2], [1, 1], [1, 2]]


def test_network_with_swish_runs_stacked_and_is_linearised():
    torch.manual_seed(0)
    network = resnet_frn_swish(8, channels=4)
    weights = stacked([network, resnet_frn_swish(8, channels=4)])
    images = torch.randn(3, 3, 16, 16)
    torch.testing.assert_close(forward(network, weights, images, "vmap"), forward(network, weights, images))
    assert linearises(network, images)
