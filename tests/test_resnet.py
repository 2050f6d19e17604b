"""ResNet-50 with filter response normalisation: its formulas, that of torchvision, independent examples."""

import math

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torchvision.models import resnet50

from bench.networks import Dropout, dropout_masks
from bench.resnet import FilterResponseNorm, ThresholdedLinear, resnet50_frn
from bench.weights import forward


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
