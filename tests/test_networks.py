"""The networks of the documents and their dropout."""

import math

import pytest
import torch
from torch import nn

from bench.networks import ACTIVATIONS, Dropout, dropout_masks, he_initialise, lenet, mlp


def count(network):
    return sum(p.numel() for p in network.parameters())


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


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_by_name(name):
    assert sum(isinstance(m, ACTIVATIONS[name]) for m in mlp(4, 2, (3, 3), activation=name)) == 2


# ------------------------------------------------------------------------------------------- initialisation


@pytest.mark.parametrize(
    ("make", "slope"),
    [
        (lambda: mlp(784, 10, (400, 400)), 0.0),
        (lambda: mlp(784, 10, (400, 400), activation="leaky_relu"), 0.01),
        (lenet, 0.0),
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
