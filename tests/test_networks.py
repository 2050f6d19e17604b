"""The networks of the documents, their dropout, and their width at equal numbers of parameters."""

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torchvision.models import vgg

from bench.networks import (
    ACTIVATIONS,
    Dropout,
    MeanMaxPool,
    dropout_masks,
    he_initialise,
    lenet,
    mlp,
    nearest_channels,
    small_cnn,
    small_vgg,
    vgg16,
)
from bench.weights import forward


def count(network):
    return sum(p.numel() for p in network.parameters())


def stacked(networks):
    return {n: torch.stack([m.get_parameter(n) for m in networks]) for n, _ in networks[0].named_parameters()}


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


# ----------------------------------------------------------------------------------------------- shapes


def test_mlp_shapes_and_parameter_count():
    network = mlp(784, 10, (400, 300))
    assert network(torch.randn(7, 1, 28, 28)).shape == (7, 10)
    assert network(torch.randn(7, 784)).shape == (7, 10)
    assert count(network) == 784 * 400 + 400 + 400 * 300 + 300 + 300 * 10 + 10


def test_mlp_without_hidden_layers_is_a_linear_model():
    network = mlp(5, 2, ())
    inputs = torch.randn(3, 5)
    torch.testing.assert_close(network(inputs), inputs @ network[-1].weight.T)


def test_lenet_has_the_parameters_of_the_thesis():
    network = lenet()
    layers = [m for m in network if isinstance(m, nn.Conv2d | nn.Linear)]
    assert [count(layer) for layer in layers] == [416, 12_832, 65_664, 1_290]
    assert count(network) == 80_202
    assert network(torch.randn(7, 1, 28, 28)).shape == (7, 10)


def test_lenet_outputs():
    assert lenet(outputs=3)(torch.randn(2, 1, 28, 28)).shape == (2, 3)


def convolutions(network):
    return [layer for layer in network.modules() if isinstance(layer, nn.Conv2d)]


def test_vgg16_has_the_convolutions_of_vgg16():
    """Those of torchvision, but for the stride of the first; about the thesis's 15 million parameters."""
    with torch.device("meta"):
        torchvisions = convolutions(vgg.make_layers(vgg.cfgs["D"]))
    network = vgg16()
    ours = convolutions(network)
    assert [c.weight.shape for c in ours] == [c.weight.shape for c in torchvisions]
    assert all(c.kernel_size == (3, 3) and c.padding == (1, 1) and c.bias is not None for c in ours)
    assert [c.stride for c in ours] == [(2, 2)] + 12 * [(1, 1)]
    assert count(network) == 14_715_713


@pytest.mark.parametrize("channels", [1, 3, 16])
def test_parameters_of_the_vggs_counted_by_hand(channels):
    """Kernels of 9 and a bias per map, from 3 colours on; then two numbers per last map, and a bias."""
    c = channels
    pairs = {
        vgg16: ["3-1 1-1 1-2 2-2 2-4 4-4 4-4 4-8 8-8 8-8 8-8 8-8 8-8", 3591 * c**2 + 109 * c + 1],
        small_vgg: ["3-1 1-2 2-4 4-4 4-8 8-8", 1098 * c**2 + 70 * c + 1],
    }
    for make, (layers, polynomial) in pairs.items():
        edges = [[int(n) for n in edge.split("-")] for edge in layers.split()]
        maps = [(inputs if i == 0 else inputs * c, outputs * c) for i, (inputs, outputs) in enumerate(edges)]
        by_hand = sum(9 * i * o + o for i, o in maps) + 2 * 8 * c + 1
        assert count(make(c)) == by_hand == polynomial


def test_parameters_of_the_robustness_study():
    """With two for every weight; the thesis says 1.3 million."""
    assert 2 * count(vgg16(16)) == 1_842_082


@pytest.mark.parametrize(("make", "pools"), [(vgg16, 4), (small_vgg, 3)])
def test_vgg_halves_its_maps_and_pools_them_by_mean_and_maximum(make, pools):
    network = make(2)
    assert sum(isinstance(layer, nn.MaxPool2d) for layer in network) == pools
    assert [layer.negative_slope for layer in network if isinstance(layer, nn.LeakyReLU)] == [0.2] * len(
        convolutions(network)
    )
    images = torch.randn(3, 3, 64, 96)
    maps = network[:-2](images)
    halves = 2 ** (1 + pools)
    assert maps.shape == (3, 16, 64 // halves, 96 // halves)
    pooled = network[-2](maps)
    for row, example in zip(pooled, maps, strict=True):
        expected = [sum(m.flatten().tolist()) / m.numel() for m in example]
        expected += [max(m.flatten().tolist()) for m in example]
        torch.testing.assert_close(row, torch.tensor(expected))
    assert isinstance(network[-2], MeanMaxPool)
    assert network(images).shape == (3, 1)


def test_small_cnn_is_bit_by_bit_the_network_that_pools_what_relu_left():
    """Committed records are of the other order. Ties might tell them apart: pixels alike, maps below 0."""
    network = small_cnn(1, channels=4)
    with torch.no_grad():
        network[0].bias[0] = -10.0
    layers = list(network)
    for place in (2, 6):
        assert [type(layer) for layer in layers[place : place + 2]] == [nn.MaxPool2d, nn.ReLU]
        layers[place : place + 2] = [nn.ReLU(), nn.MaxPool2d(2)]
    images = torch.randn(16, 1, 9, 9, generator=generator())
    images[0], images[1, :, 2:6] = 0.0, 1.0
    found = []
    for order in (network, nn.Sequential(*layers)):
        outputs = order(images)
        found.append([outputs, *torch.autograd.grad(outputs.square().sum(), list(order.parameters()))])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.any()


def assert_outputs_do_not_depend_on_company(network, images):
    together = network(images)
    alone = torch.cat([network(image[None]) for image in images])
    torch.testing.assert_close(together, alone)


def test_an_output_does_not_depend_on_other_examples():
    torch.manual_seed(0)
    images = torch.randn(4, 3, 32, 32, dtype=torch.float64)
    network = small_vgg(2).double()
    assert_outputs_do_not_depend_on_company(network, images)
    network.insert(1, nn.BatchNorm2d(2).double())
    with pytest.raises(AssertionError):
        assert_outputs_do_not_depend_on_company(network, images)


def test_stacked_weights_in_channels_last_give_the_outputs_of_each_network():
    torch.manual_seed(0)
    members = [small_vgg(2).double() for _ in range(3)]
    weights = stacked(members)
    images = torch.randn(4, 3, 32, 40, dtype=torch.float64)
    expected = torch.stack([m(images) for m in members])
    for walk in (None, "vmap"):
        torch.testing.assert_close(forward(members[0], weights, images, walk), expected)
    second, last = dict(members[1].named_parameters()), images.contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(functional_call(members[0], second, last), expected[1])


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_by_name(name):
    kind = type(ACTIVATIONS[name]())
    assert sum(type(m) is kind for m in mlp(4, 2, (3, 3), activation=name)) == 2


def test_slopes_of_the_activations_by_name():
    """At -1: what the name says; a linear network is the product of its matrices."""
    slopes = {"relu": 0.0, "leaky_relu": 0.01, "leaky_relu_0.5": 0.5, "leaky_relu_0.95": 0.95, "linear": 1.0}
    for name, slope in slopes.items():
        assert ACTIVATIONS[name]()(torch.tensor(-1.0)).item() == pytest.approx(-slope)


# ------------------------------------------------------------------------------------------- initialisation


@pytest.mark.parametrize(
    ("make", "slope"),
    [
        (lambda: mlp(784, 10, (400, 400)), 0.0),
        (lambda: mlp(784, 10, (400, 400), activation="leaky_relu"), 0.01),
        (lenet, 0.0),
        (partial(vgg16, 4), 0.2),
        (partial(small_vgg, 8), 0.2),
    ],
)
def test_weights_start_at_he_and_biases_at_zero(make, slope):
    torch.manual_seed(0)
    for layer in make():
        if not isinstance(layer, nn.Linear | nn.Conv2d):
            continue
        n, fan_in = layer.weight.numel(), layer.weight[0].numel()
        expected = 2 / ((1 + slope**2) * fan_in)
        standard_error = expected * math.sqrt(2 / n)  # of the variance of n normals of known mean
        assert abs(layer.weight.square().mean().item() - expected) < 5 * standard_error
        assert abs(layer.weight.mean().item()) < 5 * math.sqrt(expected / n)
        assert not layer.bias.any()


def test_initialisation_follows_the_global_generator_and_returns_the_network():
    networks = []
    for _ in range(2):
        torch.manual_seed(3)
        networks.append(lenet())
    for a, b in zip(*(n.parameters() for n in networks), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert he_initialise(networks[0]) is networks[0]


# ------------------------------------------------------------------------------------------------ dropout


def test_dropout_is_the_identity_outside_the_block_in_train_and_eval_mode():
    layer, inputs = Dropout(0.5), torch.randn(3, 4)
    for module in (layer.train(), layer.eval()):
        assert module.is_identity
        assert module(inputs) is inputs
    with dropout_masks(layer, generator(), shared=False):
        assert not layer.is_identity
    assert layer.is_identity


def test_dropout_does_not_look_at_train_or_eval_mode():
    layer, inputs = Dropout(0.5), torch.ones(50, 4)
    outputs = []
    for module in (layer.train(), layer.eval()):
        with dropout_masks(module, generator(), shared=False):
            outputs.append(module(inputs))
    torch.testing.assert_close(*outputs, rtol=0, atol=0)
    assert (outputs[0] == 0).any()


def test_dropout_of_rate_zero_draws_nothing():
    layer, inputs, source = Dropout(0.0), torch.randn(3, 4), generator()
    before = source.get_state()
    with dropout_masks(layer, source, shared=False):
        assert layer.is_identity
        assert layer(inputs) is inputs
    assert torch.equal(source.get_state(), before)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_masks_are_zero_or_one_over_the_keep_rate_and_unbiased(p):
    layer, n = Dropout(p), 100_000
    with dropout_masks(layer, generator(), shared=False):
        mask = layer(torch.ones(1000, n // 1000, dtype=torch.float64))
    kept = mask[mask != 0]
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / (1 - p)))
    assert abs(len(kept) / n - (1 - p)) < 5 * math.sqrt(p * (1 - p) / n)


def test_masks_are_per_example_or_shared():
    layer, inputs = Dropout(0.5), torch.ones(20, 30)
    with dropout_masks(layer, generator(), shared=True):
        mask = layer(inputs)
        assert (mask == mask[0]).all()
        assert (layer(inputs)[0] != mask[0]).any()  # the next call has another mask
    with dropout_masks(layer, generator(), shared=False):
        mask = layer(inputs)
    assert len(mask.unique(dim=0)) == 20


@pytest.mark.parametrize("shared", [False, True])
def test_channels_are_dropped_whole(shared):
    layer = Dropout(0.5, channels=True)
    with dropout_masks(layer, generator(), shared):
        mask = layer(torch.ones(20, 30, 4, 5))
    assert (mask == mask[:, :, :1, :1]).all()
    assert 0 < (mask == 0).float().mean() < 1
    assert len(mask[:, :, 0, 0].unique(dim=0)) == (1 if shared else 20)


def test_equal_generators_give_equal_masks_and_the_global_one_is_untouched():
    network, inputs = lenet(dropout=0.5), torch.randn(4, 1, 28, 28)
    before = torch.get_rng_state()
    outputs = []
    for seed in (0, 0, 1):
        with dropout_masks(network, generator(seed), shared=False):
            outputs.append(network(inputs))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=0)
    assert (outputs[0] != outputs[2]).any()
    assert torch.equal(torch.get_rng_state(), before)


def test_shared_masks_do_not_depend_on_the_inputs():
    network, inputs = mlp(6, 3, (20, 20), dropout=0.5).double(), torch.randn(8, 6, dtype=torch.float64)
    outputs = []
    for part in (inputs, inputs[:3]):
        with dropout_masks(network, generator(), shared=True):
            outputs.append(network(part))
    torch.testing.assert_close(outputs[0][:3], outputs[1])


def test_masks_end_with_the_block_even_after_an_error():
    network = lenet(dropout=0.3)
    with pytest.raises(RuntimeError), dropout_masks(network, generator(), shared=False):
        raise RuntimeError
    assert all(m.is_identity for m in network.modules() if isinstance(m, Dropout))


def test_every_dropout_layer_of_the_networks():
    assert [(m.p, m.channels) for m in lenet(dropout=0.3) if isinstance(m, Dropout)] == [
        (0.3, True),
        (0.3, True),
        (0.3, False),
    ]
    assert [(m.p, m.channels) for m in mlp(4, 2, (3, 3), dropout=0.2) if isinstance(m, Dropout)] == [
        (0.2, False),
        (0.2, False),
    ]
    for make, convolutions in ((vgg16, 13), (small_vgg, 6)):
        found = [(m.p, m.channels) for m in make(1, dropout=0.1) if isinstance(m, Dropout)]
        assert found == convolutions * [(0.1, True)]


# ------------------------------------------------------------------------------------------------- width


def test_width_one_is_the_network_as_it_is():
    assert nearest_channels(lambda c: pytest.fail("not asked for"), 64, 1) == 64


@pytest.mark.parametrize("channels", [1, 2, 16, 64])
@pytest.mark.parametrize("multiple", [1.5, 2, 4, 6, 1000, 0.5])
def test_channels_are_those_with_the_nearest_count(channels, multiple):
    """By trying all numbers of channels, in exact arithmetic."""
    make = lambda c: nn.Linear(3 * c, c)  # noqa: E731
    wanted = (3 * channels**2 + channels) / multiple
    best = min(range(1, 200), key=lambda c: abs(3 * c**2 + c - wanted))
    assert nearest_channels(make, channels, multiple**-0.5) == best


def test_rounding_the_channels_is_not_the_nearest_count():
    """16 / sqrt(6) = 6.5: seven channels are 15.4% too many, six 15.1% too few."""
    narrow = small_vgg(16, width=6**-0.5)
    assert (narrow[0].out_channels, round(16 * 6**-0.5)) == (6, 7)


def test_half_the_parameters_of_vgg16_are_45_channels():
    """1.1% too few; the 46 of the thesis, which is 64 / sqrt(2) rounded up, would be 3.3% too many."""
    ours, thesis = (2 * (3591 * c**2 + 109 * c + 1) / 14_715_713 for c in (45, 46))
    assert (round(ours, 3), round(thesis, 3)) == (0.989, 1.033)
    assert vgg16(width=2**-0.5)[0].out_channels == 45


def test_a_narrow_network_is_the_one_of_so_many_channels():
    """Finding the number of channels draws nothing."""
    networks = []
    for make in (partial(vgg16, 4, width=2**-0.5), partial(vgg16, 3)):
        torch.manual_seed(0)
        networks.append(make())
    for a, b in zip(*(n.parameters() for n in networks), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
