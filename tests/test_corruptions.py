"""Corruptions: published constants show in moments that one computes by hand; generators are explicit."""

import colorsys

import numpy as np
import pytest
import torch
from scipy import ndimage, stats

from bench import corruptions, data
from bench.errors import UsageError

BY_NOISE = ("gaussian_noise", "shot_noise", "impulse_noise")
RANDOM = (*BY_NOISE, "motion_blur", "snow", "fog")


def flat(level, size=32, channels=3, number=40):
    """Images of one level."""
    return np.full((number, channels, size, size), level, np.uint8)


@pytest.fixture(scope="module")
def smooth():
    """Coloured images with structure at all lengths, `[6, 3, 32, 32]`."""
    draw = np.random.default_rng(0).normal(size=(6, 3, 32, 32))
    blurred = sum(ndimage.gaussian_filter(draw, (0, 0, sd, sd)) * sd for sd in (1, 2, 4))
    return (127 + 90 * blurred / np.abs(blurred).max()).round().astype(np.uint8)


@pytest.fixture(scope="module")
def digits():
    """Grey images of 8 pixels."""
    images = data.load("digits").test_inputs[:6]
    return (255 * images).round().byte().numpy()


@pytest.mark.parametrize("kind", corruptions.KINDS)
@pytest.mark.parametrize("form", ["smooth", "digits"])
def test_severity_is_distance(kind, form, request):
    """0 is the identity; form and type stay; 5 is farther from the image than 1, which is farther than 0."""
    images = request.getfixturevalue(form)
    before = images.copy()
    found = [corruptions.numbered(images, kind, s) for s in (0, 1, 5)]
    assert all(each.shape == images.shape and each.dtype == np.uint8 for each in found)
    np.testing.assert_array_equal(images, before)
    np.testing.assert_array_equal(found[0], images)
    none, little, much = (np.abs(each.astype(float) - images).mean() for each in found)
    assert none == 0 < little < much


@pytest.mark.parametrize("kind", corruptions.KINDS)
def test_draws_are_those_of_the_generators_alone(kind, smooth):
    """An image's fate depends on its own number; the global generators neither move nor matter."""
    torch.manual_seed(1)
    state = torch.get_rng_state()
    found = corruptions.numbered(smooth, kind, 3)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    np.testing.assert_array_equal(corruptions.numbered(smooth[4:], kind, 3, [4, 5]), found[4:])
    other = corruptions.numbered(smooth, kind, 3, range(6, 12))
    assert (other != found).any() == (kind in RANDOM)


def test_noise_has_the_published_strength():
    """Standard deviation of normal noise, variance over mean of counts, share of white and black pixels.

    122,880 pixels: each bound is 5 standard errors, false alarms in 1e-6 of all seeds.
    """
    grey, size = flat(128), 40 * 3 * 32 * 32
    off = (corruptions.numbered(grey, "gaussian_noise", 1) - 128.0) / 255
    assert off.std() == pytest.approx(np.hypot(0.04, 1 / 255 / 12**0.5), rel=5 / (2 * size) ** 0.5)
    counts = corruptions.numbered(grey, "shot_noise", 5) / 255 * 50
    assert counts.mean() == pytest.approx(50 * 128 / 255, abs=5 * (25 / size) ** 0.5)
    assert counts.var() == pytest.approx(50 * 128 / 255, rel=0.03)
    salt = corruptions.numbered(grey, "impulse_noise", 5)
    for level in (0, 255):
        assert stats.binomtest(int((salt == level).sum()), size, 0.035).pvalue > 1e-6
    assert ((salt == 128) | (salt == 0) | (salt == 255)).all()


def test_brightness_raises_the_value_of_hsv(smooth):
    """By Python's own conversion; black turns grey."""
    found = corruptions.numbered(smooth[:1, :, :4, :4].copy(), "brightness", 3)[0] / 255
    for row, column in np.ndindex(4, 4):
        hue, saturation, value = colorsys.rgb_to_hsv(*smooth[0, :, row, column] / 255)
        expected = colorsys.hsv_to_rgb(hue, saturation, min(value + 0.15, 1))
        np.testing.assert_allclose(found[:, row, column], expected, atol=0.5 / 255 + 1e-9)
    assert (corruptions.numbered(flat(0), "brightness", 3) == round(0.15 * 255)).all()


def test_contrast_shrinks_towards_the_mean_of_each_channel(smooth):
    x = smooth[:1] / 255
    mean = x.mean((2, 3), keepdims=True)
    expected = np.rint(255 * (mean + 0.15 * (x - mean)))
    np.testing.assert_array_equal(corruptions.numbered(smooth[:1], "contrast", 5), expected)


@pytest.mark.parametrize(("severity", "radius", "sd"), [(2, 0.4, 0.5), (4, 1, 0.2), (5, 1.5, 0.1)])
def test_defocus_is_a_convolution_with_the_published_disk(severity, radius, sd, smooth):
    """At 32 pixels: the disk on whole pixels, blurred by three taps, mirrored at the border by scipy."""
    i, j = np.mgrid[-8:9, -8:9]
    taps = np.exp(-0.5 * np.array([-1, 0, 1]) ** 2 / sd**2)
    kernel = ndimage.convolve((i**2 + j**2 <= radius**2).astype(float), np.outer(taps, taps))
    for channel, found in zip(
        smooth[0], corruptions.numbered(smooth[:1], "defocus_blur", severity)[0], strict=True
    ):
        expected = ndimage.convolve(channel / 255, kernel / kernel.sum(), mode="mirror")
        np.testing.assert_allclose(found, 255 * expected, atol=0.5 + 1e-6)


@pytest.mark.parametrize("kind", ["defocus_blur", "motion_blur", "zoom_blur", "contrast", "pixelate"])
def test_what_blurs_leaves_a_level_as_it_is(kind):
    """Weights sum to one, at the border too, and at sides that are no multiple of 8."""
    for size in (8, 28, 32, 33):
        images = flat(100, size, channels=1, number=2)
        np.testing.assert_array_equal(corruptions.numbered(images, kind, 5), images)


def test_lengths_are_shares_of_the_side():
    """A blur of an image whose pixels stand for 4 x 4 each is as wide in shares of the side."""
    spread = {}
    for size in (32, 64):
        image = flat(0, size, 1, 1)
        image[:, :, size // 2 :] = 255  # an edge
        blurred = corruptions.numbered(image, "defocus_blur", 5)[0, 0, :, size // 2] / 255
        at = (np.arange(size - 1) + 1) / size
        density = np.diff(blurred) / np.diff(blurred).sum()
        spread[size] = np.sqrt(density @ at**2 - (density @ at) ** 2)
    assert spread[64] == pytest.approx(spread[32], rel=0.1)


def test_grey_is_corrupted_as_colour_of_equal_channels():
    """Where nothing is drawn per channel; JPEG treats colour by itself."""
    grey = flat(0, 16, 1, 1)
    grey[0, 0, 4:12, 4:12] = np.arange(64).reshape(8, 8) * 3
    for kind in (
        "defocus_blur",
        "motion_blur",
        "zoom_blur",
        "snow",
        "fog",
        "brightness",
        "contrast",
        "pixelate",
    ):
        colour = corruptions.numbered(np.repeat(grey, 3, 1), kind, 3)
        difference = colour.astype(int) - corruptions.numbered(grey, kind, 3)
        assert np.abs(difference).max() <= 1, kind  # 0.299 + 0.587 + 0.114 rounds


def test_fog_is_rough_at_all_lengths_and_fills_its_range():
    """The landscape reaches 0 and 1, and its neighbours differ less the faster its roughness decays."""
    own = [torch.Generator().manual_seed(seed) for seed in range(8)]
    rough, smoother = (corruptions._plasma(decay, own) for decay in (1.75, 3))
    for land in (rough, smoother):
        assert land.shape == (8, 32, 32, 1)
        assert (land.min((1, 2)) == 0).all()
        assert (land.max((1, 2)) == 1).all()
    assert np.abs(np.diff(smoother, axis=1)).mean() < np.abs(np.diff(rough, axis=1)).mean()


def test_layers_are_resized_by_areas():
    """The mean stays, at 32 pixels all stays, at 8 each pixel is the mean of 16."""
    layer = np.random.default_rng(0).random((2, 32, 32, 1))
    np.testing.assert_allclose(corruptions._resized(layer, 32), layer, atol=1e-12)
    np.testing.assert_allclose(corruptions._resized(layer, 28).mean((1, 2)), layer.mean((1, 2)))
    expected = layer.reshape(2, 8, 4, 8, 4, 1).mean((2, 4))
    np.testing.assert_allclose(corruptions._resized(layer, 8), expected)


def test_digest_per_severity(digits):
    """Six, all different, the same again, and each moves with one pixel."""
    first = corruptions.digests(digits[:2])
    assert len(set(first)) == 6
    assert corruptions.digests(digits[:2]) == first
    other = digits[:2].copy()
    other[1, 0, 0, 0] ^= 128
    assert not set(corruptions.digests(other)) & set(first)


@pytest.mark.parametrize(
    ("images", "kind", "severity", "said"),
    [
        (flat(0), "frost", 1, "corruption 'frost', severity 1: must be one of gaussian_noise, "),
        (flat(0), "fog", 6, "0 to 5"),
        (flat(0).astype(float), "fog", 1, "must be uint8"),
        (flat(0)[:, :, :8], "fog", 1, r"not uint8 \[40, 3, 8, 32\]"),
        (flat(0, channels=2), "fog", 1, "1 or 3"),
    ],
)
def test_what_cannot_be_corrupted_is_said(images, kind, severity, said):
    with pytest.raises(UsageError, match=said):
        corruptions.numbered(images, kind, severity)
