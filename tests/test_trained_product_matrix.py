"""Product matrices of trained networks: local products against the network, and what is posed."""

import math

import pytest
import torch
from plans import resolved

from bench import data, networks
from bench.errors import UsageError
from bench.runs import registry
from bench.studies import product
from bench.tasks.trained_product_matrix import TrainedProductMatrix
from bench.weights import forward

# ---- local products


@pytest.mark.parametrize("activation", product.SLOPES)
def test_local_product_times_the_input_is_the_network(activation):
    """With all columns; and the share of units that are on is counted by hand."""
    network = product.deep(5, 3, (4, 6), activation)
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(7, *p.shape, generator=generator) for name, p in network.named_parameters()}
    inputs = torch.randn(5, generator=generator)
    local, on = product.local_product(
        product.layers_of(weights), inputs, product.SLOPES[activation], range(5)
    )
    torch.testing.assert_close(local @ inputs, forward(network, weights, inputs[None])[:, 0])
    first = product.layers_of(weights)[0] @ inputs
    second = (
        product.layers_of(weights)[1]
        @ torch.where(first > 0, first, product.SLOPES[activation] * first)[..., None]
    )
    expected = torch.cat([first > 0, second[..., 0] > 0], 1).float().mean(1)
    torch.testing.assert_close(on, expected)
    some, _ = product.local_product(product.layers_of(weights), inputs, product.SLOPES[activation], [3, 1])
    torch.testing.assert_close(some, local[:, :, [3, 1]])


def test_linear_local_product_is_the_product():
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(4, *shape, generator=generator) for shape in [(3, 5), (2, 3)]]
    local, _ = product.local_product(weights, torch.ones(5), 1.0, range(5))
    torch.testing.assert_close(local, product.product(weights))


def test_network_starts_as_he_starts_it():
    """He's standard deviation for the slope, and no bias."""
    for activation, slope in product.SLOPES.items():
        network = product.deep(1000, 10, (200,), activation)
        (first, last) = [p for _, p in network.named_parameters()]
        assert (first.shape, last.shape) == ((200, 1000), (10, 200))
        assert first.std().item() == pytest.approx(math.sqrt(2 / (1 + slope**2) / 1000), rel=0.02)
    assert isinstance(network[0], networks.nn.Flatten)


# ---- the study of trained networks


def task(**values):
    """The study on digits."""
    entry = registry.task("trained_product_matrix_digits")
    return TrainedProductMatrix(registry.build(entry.cls.settings_class, {**entry.fixed, **values}, "task"))


def test_columns_are_the_pixels_in_the_middle():
    assert task().columns == [27, 28, 35, 36]  # of 8 x 8


def test_validation_is_the_last_tenth():
    posed = task().problem()
    images = data.load("digits")
    assert (len(posed.train), len(posed.val)) == (1298, 144)
    assert torch.equal(posed.val.tensors[1], images.train_labels[-144:])


def test_study_needs_moments_and_draws():
    with pytest.raises(UsageError, match=r"map cannot run .* lacks the capability moments, weight_samples"):
        resolved("map", "trained_product_matrix_digits")


def test_published_settings_of_the_table():
    """Table A.2."""
    choice = resolved("mfvi", "trained_product_matrix", "paper")
    own, of_task = choice.method_settings, choice.task_settings
    assert (own.optimizer, own.learning_rate, own.train_samples, own.initial_rho) == (
        "amsgrad",
        1e-3,
        16,
        -3.0,
    )
    assert (of_task.width, of_task.epochs, of_task.draws) == (16, 10, 10_000)
    assert choice.tuning == "published"
