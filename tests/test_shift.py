"""Tasks under shift: what is posed and predicted, and scores of hand-made predictions."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from toys import Reader

from bench import corruptions, data, metrics, resnet
from bench.contract import Undefined
from bench.leaderboard.check import scoring
from bench.networks import small_cnn
from bench.runs import records, registry, resolution
from bench.spec import misfit
from bench.studies import joint, pictures, shift
from bench.tasks.shift import SEVERITIES, Settings, Shift

CELLS = 1 + len(SEVERITIES) * len(corruptions.KINDS)
FEW = {"dataset": "digits", "test_images": 30}


@pytest.fixture(scope="module")
def done():
    """A task on 30 test digits, its arrays with targets, and what its engine was asked."""
    task, reader = Shift(Settings(**FEW, test_samples=3)), Reader()
    return task, task.run(reader) | task.given() | task.targets(), reader


def test_one_fit_and_one_prediction_of_all_parts(done):
    """Equal draws for all; two parts of the training set are not trained on; the epoch has 10,000 images."""
    task, arrays, reader = done
    (problem,), (budget,) = reader.problems, reader.budgets
    assert (budget.epochs, budget.batch_size, budget.draws, budget.patience) == (20, 128, 10_000, None)
    assert problem.num_train == len(problem.train) == 1442 - 2 * 206
    rows = task.rows
    parts = [set(rows[part].tolist()) for part in ("train", "val", "calibration")]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 1442
    assert len(problem.val) == 206
    (images,) = reader.inputs
    assert len(images) == 2 * 206 + (CELLS + 2) * 30 + len(SEVERITIES) * 206
    assert misfit(task.layouts(), {k: (a.dtype.name, a.shape) for k, a in arrays.items()}) is None
    assert sum(array.nbytes for array in arrays.values()) < 2**20


def test_images_are_normalised_by_the_training_images(done):
    """Mean 0 and variance 1 over the training images; noise is far from that."""
    task, _, reader = done
    train = reader.problems[0].train.tensors[0].double()
    assert float(train.mean()) == pytest.approx(0, abs=1e-4)
    assert float(train.var()) == pytest.approx(1, abs=1e-3)
    (images,) = reader.inputs
    ends = len(images) - len(SEVERITIES) * 206
    noise = images[ends - 60 : ends - 30].double() * task.moments[1] + task.moments[0]
    assert float(noise.mean()) == pytest.approx(0.5, abs=5 / (12 * 30 * 64) ** 0.5)


def test_a_search_sees_every_validation_image_once_at_every_severity(done):
    """Under each kind in turn, never a test image: their NLL by hand is the number that the run logged."""
    task, _, reader = done
    rows = task.rows["val"]
    assert not len(np.intersect1d(rows, np.concatenate([task.rows["train"], task.rows["calibration"]])))
    images, labels = [], []
    for severity in SEVERITIES:
        for turn, kind in enumerate(corruptions.KINDS):
            own = [row for place, row in enumerate(rows) if place % 12 == turn]
            images.append(corruptions.numbered(task.pictures.train[own], kind, severity))
            labels += [int(task.pictures.train_labels[row]) for row in own]
    shown = pictures.normalised(torch.from_numpy(np.concatenate(images)), *task.moments)
    torch.testing.assert_close(reader.inputs[0][-len(labels) :], shown)
    assert sorted(labels) == sorted(len(SEVERITIES) * task.held_out("val").tolist())
    logits = -((shown.mean((1, 2, 3))[:, None] - torch.linspace(-1, 1, 10)) ** 2)
    draws = torch.stack([(logits / temper).softmax(-1) for temper in (1, 2, 3)]).mean(0)
    by_hand = -draws.log()[torch.arange(len(labels)), torch.tensor(labels)].mean()
    logged = dict(reader.logged)
    assert logged["nll"] == pytest.approx(float(by_hand), abs=1e-3)  # stored in half precision


def test_severity_0_is_the_clean_score(done, monkeypatch):
    """With every corruption at severity 0, all scores under corruption are those of clean images."""
    task = Shift(Settings(**FEW, test_samples=3))
    real = corruptions.corrupt
    monkeypatch.setattr(
        corruptions, "corrupt", lambda images, kind, severity, own: real(images, kind, 0, own)
    )
    arrays = task.run(Reader()) | task.given() | task.targets()
    scores, shifted = task.score(arrays), task.score(done[1])
    for name in ("nll", "accuracy", "ece", "adaptive_ece", "brier", "risk_area", "conformal_coverage"):
        assert scores[name] == pytest.approx(scores[f"{name}_clean"], rel=1e-12)
        assert scores[f"{name}_severity_5"] == pytest.approx(scores[f"{name}_clean"], rel=1e-12)
    assert scores["nll_clean"] == shifted["nll_clean"]
    assert shifted["nll_severity_5"] != pytest.approx(shifted["nll_clean"])


def test_scores_are_means_over_cells(done):
    """Of the NLL by hand; each image's loss is its own mean."""
    task, arrays, _ = done
    scores = task.score(arrays)
    log_probs, labels = metrics.restore(arrays["log_probs"]), arrays["labels"]
    nlls = [metrics.negative_log_likelihood(cell, labels) for cell in log_probs]
    assert scores["nll_clean"] == pytest.approx(nlls[0])
    assert scores["nll"] == pytest.approx(np.mean(nlls[1:]))
    assert scores["nll_severity_3"] == pytest.approx(np.mean(nlls[13:25]))
    assert task.losses(arrays).mean() == pytest.approx(scores["nll"])
    of_severities = [scores[f"accuracy_severity_{s}"] for s in SEVERITIES]
    assert scores["accuracy"] == pytest.approx(np.mean(of_severities))


def test_temperature_is_one_number_and_leaves_accuracy(done):
    """The task with the setting scores the same arrays as the columns `_scaled` say, and has its own name."""
    task, arrays, _ = done
    scaled = Shift(replace(task.settings, calibration="temperature"))
    plain, tempered = task.score(arrays), scaled.score(arrays)
    assert plain.keys() == tempered.keys()
    for name in shift.SCALED:
        assert tempered[name] == plain[f"{name}_scaled"] == tempered[f"{name}_scaled"]
        assert tempered[f"{name}_clean"] == plain[f"{name}_clean_scaled"]
    for name in plain:
        if name.startswith("accuracy") or name == "temperature":
            assert tempered[name] == plain[name]
    assert tempered["nll"] != plain["nll"]
    entry = registry.task("shift_digits")
    standard = registry.build(entry.cls.settings_class, dict(entry.fixed), "task")
    other = replace(standard, calibration="temperature")
    assert resolution.identity(entry, other, standard) == "shift_digits+calibration=temperature"


def test_validation_images_that_are_all_right_leave_the_columns_of_the_temperature_empty(done):
    """And a task that asks for the temperature then scores predictions as they are."""
    task, arrays, _ = done
    right = arrays | {"val_labels": arrays["val_log_probs"].argmax(1).astype(np.uint8)}
    plain = task.score(right)
    empty = {name for name, value in plain.items() if isinstance(value, Undefined)}
    scaled = {f"{name}{place}_scaled" for name in shift.SCALED for place in ("", "_clean")}
    assert empty - {n for n, v in task.score(arrays).items() if isinstance(v, Undefined)} == scaled | {
        "temperature"
    }
    asked = Shift(replace(task.settings, calibration="temperature")).score(right)
    assert asked["nll"] == plain["nll"]
    records.split_metrics(plain, task.spec)


def test_a_posterior_that_is_too_cautious_has_a_temperature_below_1_which_is_no_impossible_metric(done):
    """Nine of ten validation images are right at a probability of a half: such a run can be submitted."""
    task, arrays, _ = done
    labels, size = arrays["val_labels"], len(arrays["val_labels"])
    named = np.where(np.arange(size) % 10 == 0, (labels + 1) % 10, labels)
    probabilities = np.full((size, 10), 0.5 / 9)
    probabilities[np.arange(size), named] = 0.5
    scores = task.score(arrays | {"val_log_probs": metrics.store(torch.from_numpy(probabilities).log())})
    assert scores["temperature"] < 1
    for name, value in scores.items():
        if not isinstance(value, Undefined):
            assert scoring.possible(value, task.spec.metrics[name]), name


def test_test_labels_move_neither_temperature_nor_sets(done):
    """Both are fitted on parts of the training set: other test labels leave them."""
    task, arrays, _ = done
    readings = task.readings(arrays)
    other = task.readings(arrays | {"labels": np.roll(arrays["labels"], 7)})
    assert (readings.temperature, readings.threshold) == (other.temperature, other.threshold)
    moved = arrays | {"calibration_labels": np.roll(arrays["calibration_labels"], 1)}
    assert task.readings(moved).threshold != readings.threshold
    assert task.readings(moved).temperature == readings.temperature


def test_shuffled_pixels_are_as_bright_and_noise_is_not(done):
    """The control that ranks by mean brightness alone tells the first from known images by chance only."""
    task, arrays, _ = done
    scores = task.score(arrays)
    assert scores["auroc_shuffled_brightness"] == pytest.approx(0.5)
    assert scores["auroc_noise_brightness"] > 0.99
    known = task.pictures.test[task.rows["test"]]
    shuffled = pictures.foreign("shuffled", known, None)
    np.testing.assert_array_equal(np.sort(shuffled.reshape(30, -1)), np.sort(known.reshape(30, -1)))
    assert (shuffled != known).any((1, 2, 3)).all()


def test_one_sample_has_no_mutual_information():
    task = Shift(Settings(**FEW, test_samples=1))
    scores = task.score(task.run(Reader()) | task.given() | task.targets())
    undefined = {name for name, value in scores.items() if isinstance(value, Undefined)}
    assert undefined == {f"{s}_{f}_information" for s in ("auroc", "aupr", "fpr95") for f in task.foreign}


def test_corruptions_are_read_as_they_are_made(done):
    """Any rows, in any order: part after part, each image by its own number."""
    task = done[0]
    images = task.pictures.test[:5]
    parts = pictures.ImageGroups(
        [
            pictures.ImageGroup(images),
            pictures.ImageGroup(images, "fog", 3),
            pictures.ImageGroup(images[:2], "snow", 5),
        ],
        *task.moments,
    )
    fog, snow = corruptions.numbered(images, "fog", 3), corruptions.numbered(images[:2], "snow", 5)
    whole = np.concatenate([images, fog, snow])
    rows = torch.tensor([11, 0, 7, 5, 10])
    np.testing.assert_array_equal(parts.read(rows)[0].numpy(), whole[rows.numpy()])
    assert len(parts) == 12
    expected = (torch.from_numpy(whole[7:8]) / 255 - task.moments[0]) / task.moments[1]
    torch.testing.assert_close(parts[7][0], expected[0])


def test_moments_are_those_of_numpy():
    images = np.random.default_rng(0).integers(0, 256, (9, 3, 4, 4)).astype(np.uint8)
    mean, std = pictures.moments(images)
    np.testing.assert_allclose(mean.ravel(), (images / 255).mean((0, 2, 3)), rtol=1e-6)
    np.testing.assert_allclose(std.ravel(), (images / 255).std((0, 2, 3)), rtol=1e-6)
    assert (pictures.moments(np.zeros((2, 1, 4, 4), np.uint8))[1] == np.float32(1 / 255)).all()


def test_the_digest_names_data_rows_and_corruptions(monkeypatch):
    """It moves with each of them."""
    digest = Shift(Settings(**FEW)).data_digest()
    assert digest == Shift(Settings(**FEW)).data_digest()
    assert digest != Shift(Settings(dataset="digits", test_images=31)).data_digest()
    monkeypatch.setitem(corruptions.KINDS, "jpeg", (corruptions._jpeg, (79, 65, 58, 50, 40)))
    assert digest != Shift(Settings(**FEW)).data_digest()


def test_paper_has_all_images_and_severities():
    entry = registry.task("shift_cifar10")
    task = Shift(Settings(**entry.fixed, **entry.presets["paper"]))
    assert task.severities == (1, 2, 3, 4, 5)
    assert task.layouts()["log_probs"].shape == (61, 10_000, 10)
    assert data.SOURCES["mnist"].test == 10_000
    assert "nll_severity_2" in task.spec.metrics


def test_networks():
    """Logits for every form of image that there is; parameters by hand."""
    for size, channels in ((8, 1), (28, 1), (32, 3)):
        images = torch.zeros(2, channels, size, size)
        assert small_cnn(channels)(images).shape == (2, 10)
        assert resnet.preresnet_frn(20, channels=4, inputs=channels)(images).shape == (2, 10)
    count = sum(p.numel() for p in small_cnn().parameters())
    assert count == (9 + 1) * 16 + (9 * 16 + 1) * 32 + (9 * 32 + 1) * 64 + 65 * 10


# ---- joint predictions


def joint_arrays(right, labels):
    """Log-probabilities of ten classes `[S, 2, 2P, 10]` that give each label these `[S, 2P]`, both times."""
    draws, images = right.shape
    log_probs = np.full((draws, images, 10), 0.0)
    log_probs[:] = np.log((1 - right) / 9)[..., None]
    log_probs[:, np.arange(images), labels[:images]] = np.log(right)
    return np.stack([log_probs] * 2, 1)


def test_joint_scores_are_those_of_every_batch_written_out():
    """Each batch of ten by its own product under each draw; the other metric by single images."""
    g = np.random.default_rng(0)
    right, labels = g.uniform(0.05, 0.95, (3, 8)), g.integers(0, 10, 20)
    found = shift.joint_scores(joint_arrays(right, labels), labels)
    together, alone = [], []
    for pair, coins in enumerate(joint.anchors(4, "shift")):
        for batch in coins.reshape(-1, 10):
            of_batch = right[:, 2 * pair + batch]
            together.append(-np.log(np.mean([np.prod(of_draw) for of_draw in of_batch])))
            alone.append(-sum(np.log(p) for p in of_batch.mean(0)))
    for place in ("", "_clean"):
        assert found[f"joint_nll{place}"] == pytest.approx(np.mean(together), rel=1e-12)
        assert found[f"joint_nll{place}_independent"] == pytest.approx(np.mean(alone), rel=1e-12)
    assert found.keys() == shift.JOINT.keys()


def test_draws_that_are_shuffled_between_images_lose_what_they_know_together():
    """The cheat has equal marginals; honest draws are right of both images of a pair or wrong of both."""
    labels = np.arange(20) % 10
    right = np.where(np.arange(8) % 2, 0.9, 0.1)[:, None].repeat(20, 1)
    honest = shift.joint_scores(joint_arrays(right, labels), labels)
    shuffled = right.copy()
    for image in range(1, 20, 2):
        shuffled[:, image] = np.random.default_rng(image).permutation(right[:, image])
    cheat = shift.joint_scores(joint_arrays(shuffled, labels), labels)
    assert honest["joint_nll"] == pytest.approx(-np.log((0.9**10 + 0.1**10) / 2), rel=1e-12)
    assert cheat["joint_nll"] > honest["joint_nll"] + 0.5
    assert cheat["joint_nll_independent"] == pytest.approx(honest["joint_nll_independent"], rel=1e-12)
    assert honest["joint_nll"] < honest["joint_nll_independent"] - 1


def test_one_draw_has_no_joint_knowledge():
    labels = np.arange(20) % 10
    right = np.random.default_rng(0).uniform(0.1, 0.9, (1, 20))
    found = shift.joint_scores(joint_arrays(right, labels), labels)
    assert found["joint_nll"] == pytest.approx(found["joint_nll_independent"], rel=1e-12)


def test_joint_draws_are_those_whose_mean_is_kept_anyway(done):
    """At the images and cells that the metrics say; everything else is as it is without them."""
    task = Shift(Settings(**FEW, test_samples=3, joint=True))
    arrays = task.run(Reader()) | task.given() | task.targets()
    assert misfit(task.layouts(), {k: (a.dtype.name, a.shape) for k, a in arrays.items()}) is None
    draws = arrays.pop("joint_log_probs")
    assert draws.shape == (3, 2, 30, 10)
    for name, array in done[1].items():
        np.testing.assert_array_equal(arrays[name], array)
    mean = np.log(np.exp(draws.astype(float)).mean(0))
    kinds = len(corruptions.KINDS)
    for image in range(30):
        cells = 0, 1 + 2 * kinds + image // 2 % kinds
        for place, cell in enumerate(cells):
            kept = arrays["log_probs"][cell, image]
            np.testing.assert_allclose(mean[place, image], kept, atol=0.02, rtol=2e-3)
    scores = task.score(arrays | {"joint_log_probs": draws})
    assert scores.keys() == task.spec.metrics.keys()
    assert {k: v for k, v in scores.items() if k not in shift.JOINT} == done[0].score(done[1])
    assert not shift.JOINT.keys() & done[0].spec.metrics.keys()
