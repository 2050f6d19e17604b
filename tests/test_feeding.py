"""Examples from disk: what is read, how it is augmented, and that neither workers nor batches matter."""

from dataclasses import asdict, replace

import pytest
import torch
from conformance import problems
from test_engine import BUDGET, CPU, digest, make
from torch.testing import assert_close
from torch.utils.data import TensorDataset

from bench import augmentation
from bench.batches import batches
from bench.contract import Budget
from bench.engine.engine import TrainerOptions
from bench.errors import UsageError
from bench.laws.problems import OnDisk
from bench.methods.map import MAP
from bench.methods.mfvi import MFVI
from bench.runs.setup import _DECIDING

PLAIN = torch.tensor([0.0, 0.0, 0.5, 0.0, 0.5, 0.5, 0.5, 0.5, 0.5])
"""Uniform numbers that change nothing: not mirrored, no angle, no padding, zoom 1."""


# ---- the engine


@pytest.mark.parametrize("cls", [MAP, MFVI])
def test_a_fit_from_disk_is_the_fit_from_memory(cls):
    posed = problems.mlp()
    assert digest(make(cls).fit(problems.on_disk(posed), BUDGET)) == digest(make(cls).fit(posed, BUDGET))


def test_draws_and_processes_share_an_epoch_as_in_memory():
    tensors = torch.arange(7.0)[:, None], torch.arange(7)
    for share in ((0, 1), (0, 2), (1, 2)):
        made = (batches(kind(*tensors), 4, 3, share, draws=20) for kind in (OnDisk, TensorDataset))
        from_disk, in_memory = ([batch.targets.tolist() for batch in loader] for loader in made)
        assert from_disk == in_memory


def test_neither_workers_nor_batches_change_the_numbers():
    """The augmentation of an example follows from seed, epoch and row alone."""
    posed = problems.on_disk(problems.mlp(), num_uniforms=3)

    def inputs(batch_size, epoch, seed=5, workers=0):
        loader = batches(posed.train, batch_size, seed, workers=workers)
        loader.set_epoch(epoch)
        moved = [(row, x) for b in loader for row, x in zip(b.targets.tolist(), b.inputs, strict=True)]
        return torch.stack([x for _, x in sorted(moved, key=lambda pair: (pair[0], pair[1].tolist()))])

    first = inputs(3, 0)
    assert torch.equal(inputs(7, 0), first)
    assert torch.equal(inputs(3, 0, workers=2), first)
    assert not torch.equal(inputs(3, 1), first)
    assert not torch.equal(inputs(3, 0, seed=6), first)


@pytest.mark.slow
def test_a_fit_is_the_same_with_loader_processes():
    posed, two = problems.on_disk(problems.mlp(), num_uniforms=3), replace(CPU, workers=2)
    reading = make(MFVI)
    reading.options = two
    assert digest(reading.fit(posed, BUDGET)) == digest(make(MFVI).fit(posed, BUDGET))
    assert {name for name in asdict(CPU) if getattr(two, name) != getattr(CPU, name)} == {"workers"}
    assert "workers" not in _DECIDING


def test_training_is_augmented_and_nothing_else_is():
    seen = {"training": [], "after": [], "predicted": []}

    class Sees(MAP):
        def loss_terms(self, batch, noise):
            seen["training"].append(batch.inputs)
            return super().loss_terms(batch, noise)

        def finish_fit(self, loader):
            seen["after"] += [batch.inputs for batch in loader]

        def predict(self, inputs, num_samples, generator):
            seen["predicted"].append(inputs)
            return super().predict(inputs, num_samples, generator)

    posed = problems.on_disk(problems.mlp(), num_uniforms=2)
    plain, _ = posed.train.tensors
    engine = make(Sees)
    method = engine.fit(posed, Budget(1, 6))
    engine.predict(method, posed.train, 2)
    found = {what: torch.cat(parts) for what, parts in seen.items()}
    assert_close(found["predicted"], plain)
    assert_close(found["after"].sort(0).values, plain.sort(0).values)
    moved = found["training"].mean() - plain.mean()  # two uniform numbers have the mean 1 and variance 1/6
    assert abs(moved - 1) < 4 * (1 / 6 / len(plain)) ** 0.5  # false alarm 6e-5


def test_predictions_are_those_from_memory_and_read_in_pieces(monkeypatch):
    posed = problems.mlp()
    stored = problems.on_disk(posed).train
    engine, again = make(MFVI), make(MFVI)
    method = engine.fit(posed, BUDGET)
    whole = engine.predict(method, stored.tensors[0], 4)
    assert digest(again.fit(posed, BUDGET)) == digest(method)
    stored.most_rows = 0
    monkeypatch.setattr("bench.batches._LARGEST_PIECE", 3 * 50 * 4)
    assert_close(again.predict(method, stored, 4).log_probs, whole.log_probs)
    assert stored.most_rows == 3


def test_validation_from_disk_has_pieces_of_bounded_memory(monkeypatch):
    posed = problems.mlp()
    val = OnDisk(*posed.val.tensors)
    monkeypatch.setattr("bench.batches._LARGEST_PIECE", 5 * 4)
    method = make(MAP).fit(replace(posed, val=val), Budget(2, 6, patience=2))
    assert val.most_rows == 5
    expected = make(MAP).fit(posed, Budget(2, 6, patience=2))
    assert [row["val_nll"] for row in method.history] == pytest.approx(
        [r["val_nll"] for r in expected.history]
    )


def test_examples_from_disk_have_no_weightings():
    posed = problems.on_disk(problems.mlp())
    with pytest.raises(UsageError, match="in memory"):
        make(MAP).fit_weighted(posed, torch.ones(2, 20), BUDGET)


def test_a_negative_number_of_workers_is_refused():
    with pytest.raises(ValueError, match="greater than or equal to 0"):
        TrainerOptions(workers=-1)


# ---- the augmentation


def changed(images, **numbers):
    """Images under uniform numbers that change nothing but for those given by place, not normalised."""
    uniforms = PLAIN.repeat(len(images), 1)
    for place, value in numbers.items():
        uniforms[:, int(place[1:])] = value
    one = torch.ones(images.shape[1])
    return augmentation.photographs(images, uniforms, 0 * one, one / 255)


@pytest.fixture(scope="module")
def images():
    """Two images of 8 x 8 pixels."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (2, 3, 8, 8), generator=generator, dtype=torch.uint8)


def test_flips_and_right_angles_are_exact(images):
    real = images.float()
    for result, expected in [
        (changed(images), real),
        (changed(images, u0=0.9), real.flip(3)),
        (changed(images, u1=0.9), real.flip(2)),
        (changed(images, u2=0.0), real.flip(2, 3)),
        (changed(images, u2=0.75), real.rot90(1, (2, 3))),
    ]:
        assert_close(result, expected, rtol=0, atol=2e-3)


def test_shift_and_zoom_move_a_ramp_as_computed_by_hand():
    """Interpolation of a linear ramp is exact, so that a pixel's value tells where it was looked at."""
    size = 40
    x = torch.arange(size, dtype=torch.uint8).repeat(1, 1, size, 1)  # the value is the column
    centre, columns = (size - 1) / 2, torch.arange(size).float()
    inside = slice(8, 32)  # no pixel that is mixed with what lies beyond the image
    shifted = changed(x, u3=1.0, u4=1.0)[0, 0, 20]  # 5% of 40 pixels
    assert_close(shifted[inside], columns[inside] + 2, rtol=0, atol=1e-3)
    assert shifted[-1] == 0  # beyond the image
    zoomed = changed(x, u6=0.0)[0, 0, 20]
    assert_close(zoomed[inside], centre + 0.9 * (columns[inside] - centre), rtol=0, atol=1e-3)
    aside = changed(x, u6=0.0, u7=1.0)[0, 0, 20]  # the crop of 36 pixels touches the right edge
    assert_close(aside[inside], zoomed[inside] + 2, rtol=0, atol=1e-3)


def test_normalisation_is_by_channel(images):
    mean, std = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.5, 1.0, 2.0])
    expected = (images.float() / 255 - mean[:, None, None]) / std[:, None, None]
    assert_close(augmentation.photographs(images, None, mean, std), expected)


def test_an_image_does_not_depend_on_its_company(images):
    uniforms = torch.rand(2, augmentation.NUM_UNIFORMS, generator=torch.Generator().manual_seed(1))
    both = augmentation.photographs(images, uniforms, torch.zeros(3), torch.ones(3))
    alone = augmentation.photographs(images[1:], uniforms[1:], torch.zeros(3), torch.ones(3))
    assert_close(both[1:], alone)
