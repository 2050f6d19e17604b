"""Images of one's own: what the network sees, which are held out, what is refused, what predicts new ones."""

import shutil

import numpy as np
import pytest
import torch
from given import IMAGES, write_images
from PIL import Image
from torchvision import datasets, transforms

import bench
from bench import cli, own_network
from bench.errors import UsageError
from bench.runs import registry
from bench.runs.runner import load_scores
from bench.studies import own
from bench.tasks.own_images import OwnImages, Settings, picture


def make(folder=IMAGES, **values):
    """The task on a folder, with small images."""
    return OwnImages(Settings(**{"folder": str(folder), "size": 8, "channels": 2, **values}))


def test_images_and_classes_are_those_of_imagefolder():
    """Over train and test; a square that needs no scaling holds the pixels themselves."""
    task = make(size=10)
    expected = datasets.ImageFolder(str(IMAGES), transforms.CenterCrop(10))
    pixels = {np.array(image).tobytes(): label for image, label in expected}
    found = {}
    for part in ("train", "test"):
        for image, label in zip(*task.own_data(part), strict=True):
            found[image.permute(1, 2, 0).contiguous().numpy().tobytes()] = int(label)
    assert found == pixels
    assert task.encoder.classes == expected.classes == ["blue", "red"]


def test_a_picture_keeps_its_proportions(tmp_path):
    """The middle of a wide one, at half its size; a grey one becomes coloured."""
    pixels = np.zeros((8, 24), np.uint8)
    pixels[:, 8:16] = 200
    Image.fromarray(pixels).save(tmp_path / "wide.png")
    found = picture(tmp_path / "wide.png", 4)
    assert found.shape == (4, 4, 3)
    assert (found[:, 1:3] > 190).all()


def test_channels_are_standardised_by_the_training_images_alone():
    """Negative control: those of all images have another mean."""
    task = make()
    train, every = task.own_data("train")[0], torch.cat([task.own_data(p)[0] for p in ("train", "test")])
    problem = task.problem()
    inputs = problem.train.finish(problem.train.read(torch.arange(len(train)))[0], None)
    torch.testing.assert_close(inputs.mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(inputs.std((0, 2, 3), correction=0), torch.ones(3))
    cheating = (every.double() / 255).mean((0, 2, 3))
    assert (torch.tensor(task.encoder.mean).double() - cheating).abs().max() > 1e-4


def test_of_every_class_a_fifth_is_held_out_whatever_the_seed_of_the_fit():
    first, again, other = (make(split=split).own_data("test") for split in (0, 0, 1))
    assert torch.bincount(first[1]).tolist() == [4, 4]
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], other[0])


def one_left(folder):
    """Takes all images but one out of a class."""
    for path in sorted((folder / "red").iterdir())[1:]:
        path.unlink()


def parted(folder):
    """The folders of classes inside those of parts, as many data sets come."""
    for part in ("train", "Val"):
        shutil.copytree(folder / "red", folder / part / "red")
        shutil.copytree(folder / "blue", folder / part / "blue")
    for name in ("red", "blue"):
        shutil.rmtree(folder / name)


REFUSED = {
    "Val and train are parts of a split": parted,
    r"\.ipynb_checkpoints holds pictures": lambda folder: shutil.copytree(
        folder / "red", folder / ".ipynb_checkpoints"
    ),
    "No such file or directory": shutil.rmtree,
    "holds images of one class": lambda folder: shutil.rmtree(folder / "red"),
    "Found no valid file for the classes red": lambda folder: [
        p.unlink() for p in (folder / "red").iterdir()
    ],
    "the class red has only one image": one_left,
    "03.png: cannot be read as an image": lambda folder: (folder / "red" / "03.png").write_bytes(b"no image"),
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_cannot_be_is_named_in_one_line(said, tmp_path):
    REFUSED[said](write_images(tmp_path / "images"))
    with pytest.raises(UsageError, match=said) as caught:
        make(tmp_path / "images").data_digest()
    assert "\n" not in str(caught.value)


def test_copies_and_files_that_are_not_read_are_told(tmp_path):
    """Counted by hand; negative control: of the pictures alone nothing is said."""
    folder = write_images(tmp_path / "images")
    assert "very inputs" not in make(folder).notes()["notes.txt"]
    assert "not read" not in make(folder).notes()["notes.txt"]
    for name in ("a.heic", "b.HEIC", "c.txt"):
        (folder / "red" / name).write_bytes(b"x")
    for path in sorted((folder / "red").glob("*.png")):
        shutil.copy(path, folder / "blue" / f"red{path.name}")
    task = make(folder)
    train, test = ({i.numpy().tobytes() for i in task.own_data(part)[0]} for part in ("train", "test"))
    again = [image.numpy().tobytes() in train for image in task.own_data("test")[0]]
    said = task.notes()["notes.txt"]
    assert 0 < sum(again) <= len(test)
    assert f"{sum(again)} of {len(again)} held-out images have the very inputs" in said
    assert "3 files are not read, for how their names end or where they lie: .heic 2, .txt 1" in said


def test_pictures_of_two_classes_are_told(tmp_path):
    """Counted by hand; negative control: two of one class are not."""
    folder = write_images(tmp_path / "images")
    shutil.copy(folder / "red" / "03.png", folder / "red" / "again.png")
    assert "more than one class" not in make(folder).notes()["notes.txt"]
    for name in ("04", "05", "06"):
        shutil.copy(folder / "red" / f"{name}.png", folder / "blue" / f"red{name}.png")
    assert "warning: 3 images stand in more than one class" in make(folder).notes()["notes.txt"]


def test_few_images_or_none_are_refused(tmp_path):
    with pytest.raises(UsageError, match="10 images are too few to learn and to test: at least 20"):
        make(write_images(tmp_path / "few", 5)).data_digest()
    with pytest.raises(UsageError, match=r"own_images needs images: --task\.folder FOLDER"):
        OwnImages(Settings()).data_digest()


def test_a_run_learns_is_compared_and_predicts_without_the_folder(tmp_path, capsys):
    """Red is told from blue; a loaded run predicts what it predicted, by map, which draws nothing."""
    folder = write_images(tmp_path / "images")
    settings = {"folder": str(folder), "size": 8, "channels": 4, "epochs": 30, "batch_size": 4}
    for seed in range(3):
        for method in ("map", "mfvi"):
            run = bench.run(method, "own_images", seed=seed, task_settings=settings, out=tmp_path / "runs")
    assert run.record.metrics.keys() == {"nll", *own.OF_CLASSES}
    assert cli.main(["compare", str(tmp_path / "runs")]) == 0
    assert "your mfvi against your map" in capsys.readouterr().out
    assert "blue (16 + 4), red (16 + 4)" in (run.directory / "notes.txt").read_text()

    directory = run.directory.parent.parent / "map" / "standard-seed0"
    task, arrays = load_scores(directory)
    assert task.score(arrays)["accuracy"] == 1.0
    paths = sorted(folder.rglob("*.png"))
    kept = [shutil.copy(path, tmp_path / f"{i}.png") for i, path in enumerate(paths)]
    test = [
        image.tobytes() for image in make(folder).own_data("test")[0].permute(0, 2, 3, 1).contiguous().numpy()
    ]
    rows = [test.index(p) for p in (picture(path, 8).tobytes() for path in kept) if p in test]
    held_out = [path for path in kept if picture(path, 8).tobytes() in test]
    shutil.rmtree(folder)
    found = bench.load(directory).predict(held_out)
    expected = np.exp(arrays["log_probs"].astype(float))[rows]
    np.testing.assert_allclose([list(row["probabilities"].values()) for row in found], expected, atol=2e-3)
    with pytest.raises(UsageError, match=r"none.jpg: cannot be read as an image"):
        bench.load(directory).predict([tmp_path / "none.jpg"])


def test_a_pretrained_network_keeps_its_frozen_weights(tmp_path, monkeypatch):
    """A small convolutional network with BatchNorm, of which the last layer alone is inferred."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pretrained.py").write_text(PRETRAINED)
    values = {"network": "pretrained:make", "freeze": True, "epochs": 2, "size": 8, "folder": str(IMAGES)}
    run = bench.run("mfvi", "own_images", task_settings=values, out=tmp_path)
    said = (run.directory / "notes.txt").read_text()
    assert "10 weights in the posterior (" in said
    assert ", 120 frozen; BatchNorm layers at their stored statistics: 1" in said
    network = bench.load(run.directory).method.network
    assert torch.equal(network.get_buffer("0.weight"), torch.full((4, 3, 3, 3), 0.1))
    assert torch.equal(network[1].mean, torch.full((4,), 0.5))
    with monkeypatch.context() as patch:
        patch.delitem(own_network.imported, "pretrained:make")
        with pytest.raises(UsageError, match="is not part of this suite"):
            bench.load(run.directory)


PRETRAINED = """
import torch
from torch import nn


def make(inputs, outputs):
    made = nn.Sequential(
        nn.Conv2d(inputs[0], 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(4, outputs),
    )
    made[0].weight.data.fill_(0.1)
    made[1].running_mean.fill_(0.5)
    return made
"""


def test_it_is_on_no_board():
    spec = registry.task("own_images").cls(Settings()).spec
    assert spec.own_data
    assert not spec.ranked
