"""Covariance by depth: the network, the augmentation, which images are used, and what two methods share."""

import generated
import numpy as np
import pytest
import torch
from torch.nn import functional
from torchvision.transforms import functional as transforms

from bench import augmentation, cifar, resnet
from bench.comparison import FinishedRun
from bench.contract import Budget
from bench.engine.engine import Engine, TrainerOptions
from bench.runs import registry
from bench.tasks import depth_covariance


def task(name="depth_covariance_cifar10", **values):
    entry = registry.task(name)
    settings = registry.build(
        entry.cls.settings_class, {**entry.fixed, **entry.presets["smoke"], **values}, "task"
    )
    return entry.cls(settings)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(cifar, "load", generated.cifar)


# --------------------------------------------------------------------------------------------- the network


@pytest.mark.parametrize(
    ("depth", "parameters"),
    [
        (2, 27 * 16 + 3 * 16 + 170),  # a convolution, a normalisation with its threshold, a linear layer
        (8, 27 * 16 + 9 * 512 + 9 * 1536 + 512 + 9 * 6144 + 2048 + 3 * 240 + 650),
        (14, 78_090 + 9 * 2 * (256 + 1024 + 4096) + 3 * 2 * (16 + 32 + 64)),  # a block a stage more
    ],
)
def test_parameters_counted_by_hand(depth, parameters):
    network = resnet.preresnet_frn(depth)
    assert sum(p.numel() for p in network.parameters()) == parameters
    convolutions = [
        m for m in network.modules() if isinstance(m, torch.nn.Conv2d) and m.kernel_size == (3, 3)
    ]
    assert len(convolutions) + 1 == max(depth, 2)
    assert network(torch.randn(3, 3, 32, 32)).shape == (3, 10)


@pytest.mark.parametrize("depth", [0, 1, 3, 9])
def test_other_depths_are_refused(depth):
    with pytest.raises(ValueError, match=r"depth must be 2, 8, 14"):
        resnet.preresnet_frn(depth)


def test_depth_8_is_the_published_block_written_out():
    """Pre-activation, shortcut by a 1x1 convolution of the raw input where the shape changes."""
    torch.manual_seed(0)
    network = resnet.preresnet_frn(8, outputs=4, channels=3).double()
    with torch.no_grad():
        for p in network.parameters():
            p.add_(0.1 * torch.randn_like(p))
    weights = iter(network.parameters())

    def activated(x):
        gamma, beta, tau = (next(weights)[:, None, None] for _ in range(3))
        scaled = x / (x.square().mean((2, 3), keepdim=True) + 1e-6).sqrt()
        return torch.maximum(gamma * scaled + beta, tau)

    x = images = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    x = functional.conv2d(x, next(weights), padding=1)
    for stride in (1, 2, 2):
        inner = functional.conv2d(activated(x), next(weights), stride=stride, padding=1)
        inner = functional.conv2d(activated(inner), next(weights), padding=1)
        x = inner + (x if stride == 1 else functional.conv2d(x, next(weights), stride=stride))
    pooled = activated(x).mean((2, 3))
    expected = functional.linear(pooled, next(weights), next(weights))
    torch.testing.assert_close(network(images), expected)
    assert next(weights, None) is None


# ---------------------------------------------------------------------------------------- the augmentation


def test_shifts_are_crops_of_a_black_frame():
    images = torch.randint(1, 256, (4, 3, 6, 5), dtype=torch.uint8)
    uniforms = torch.tensor([[0.5, 0.5, 0.9], [0.0, 0.99, 0.9], [0.3, 0.7, 0.1], [0.99, 0.0, 0.2]])
    found = augmentation.shifted(images, uniforms)
    for image, (u, v, m), result in zip(images, uniforms.tolist(), found, strict=True):
        framed = transforms.pad(image, [4, 4, 4, 4])
        expected = transforms.crop(framed, int(9 * v), int(9 * u), 6, 5)
        torch.testing.assert_close(result, transforms.hflip(expected) if m < 0.5 else expected)
    torch.testing.assert_close(found[0], images[0])  # the middle, not mirrored
    assert augmentation.shifted(images, None) is images


def test_only_training_images_are_moved():
    photos = task().photos("train")
    inputs, labels = photos.read(torch.arange(5))
    assert labels.tolist() == photos.labels[:5].tolist()
    plain = photos.finish(inputs, None)
    torch.testing.assert_close(plain[2], photos[2][0])
    moved = photos.finish(inputs, torch.zeros(5, photos.num_uniforms))
    assert not torch.allclose(plain, moved)


# ------------------------------------------------------------------------------------------------ the data


def test_images_are_normalised_by_the_training_images():
    """Test images by the same numbers, whatever theirs are."""
    posed = task()
    train, test = posed.photos("train"), posed.photos("test")
    every = torch.stack([x for x, _ in train])
    torch.testing.assert_close(every.mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(every.std((0, 2, 3), correction=0), torch.ones(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(test.mean, train.mean)


def test_examples_are_balanced_and_more_contain_fewer():
    labels = np.repeat(np.arange(10), 30)
    rows = {size: depth_covariance.spread(labels, size, "train") for size in (20, 45, 300)}
    assert np.bincount(labels[rows[20]]).tolist() == [2] * 10
    assert sorted(np.bincount(labels[rows[45]])) == [4] * 5 + [5] * 5
    assert set(rows[20]) < set(rows[45]) < set(rows[300]) == set(range(300))
    assert (labels[rows[20]][:10] != np.arange(10)).any()  # not class by class
    assert not np.array_equal(rows[45], depth_covariance.spread(labels, 45, "test"))


def test_prior_has_the_gradient_of_the_published_weight_decay():
    """-log p(w) / N has the gradient 3e-4 w."""
    problem = task().problem()
    w = torch.tensor([2.0], requires_grad=True)
    (-problem.prior({"w": w})["w"].log_prob(w) / problem.num_train).backward()
    assert w.grad.item() == pytest.approx(3e-4 * 2.0, rel=1e-5)


# ------------------------------------------------------------------------------------------- two methods


def test_both_methods_have_the_same_moments_and_draw_from_others(tmp_path):
    """Runs of one seed: nothing but the draws tells them apart."""
    posed = task(images=40, tested=20, channels=2)
    fits = []
    for name in ("swag", "swag_diagonal"):
        method = registry.method(name)
        settings = registry.build(method.cls.settings_class, {**method.fixed, "learning_rate": 0.1}, "method")
        engine = Engine(method.cls, settings, 0, trainer=TrainerOptions(accelerator="cpu"))
        fits.append(engine.fit(posed.problem(), Budget(4, 20)))
    one, other = (fit.iterates for fit in fits)
    torch.testing.assert_close(one.mean, other.mean, rtol=0, atol=0)
    torch.testing.assert_close(one.rows, other.rows, rtol=0, atol=0)
    g = torch.Generator().manual_seed
    draws = [fit.sample_weights(2, g(0)) for fit in fits]
    assert any(not torch.equal(draws[0][k], draws[1][k]) for k in draws[0])


def run(method, depth, seed, nll):
    found = task(depth=depth)
    metrics = {"nll": nll, "accuracy": 0.5}
    identity = f"depth_covariance_cifar10+depth={depth}"
    name = "depth_covariance_cifar10"
    return FinishedRun(found, name, identity, method, method, "standard", seed, metrics=metrics)


def test_methods_are_compared_at_equal_depth():
    """A difference of 0.1 at depth 2 and of 0 at depth 8; never one between depths."""
    noise = [0.01, -0.02, 0.01]
    runs = [
        run(method, depth, seed, 1 + (depth == 2) * gap + (depth == 8) * change * noise[seed])
        for method, gap, change in (("swag", 0.1, 0), ("swag_diagonal", 0, 1))
        for depth in (2, 8)
        for seed in range(3)
    ]
    found = depth_covariance.DepthCovariance.compare(runs)
    assert list(found.charts) == ["depth_covariance_cifar10-by-depth"]
    near, far = found.sentences
    assert "swag, depth=2 minus swag_diagonal, depth=2 in nll is 0.1" in near
    assert "swag is higher" in near or "swag, depth=2 is higher" in near
    assert "depth=8 minus swag_diagonal, depth=8 in nll is" in far
    assert "is higher" not in far
