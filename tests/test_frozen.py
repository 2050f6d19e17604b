"""The frozen part of a network: its features give the posterior of the whole network, and are kept."""

import json

import numpy as np
import pytest
import torch
from given import IMAGES, write_images

import bench
from bench import own_network
from bench.errors import UsageError
from bench.runs import registry
from bench.runs.runner import load_scores
from bench.studies import frozen
from bench.system import keeping, places
from bench.tasks.own_images import Images, OwnImages, Settings

BACKBONE = """
import torch
from torch import nn


def body(inputs, channels=6):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return nn.Sequential(
            nn.Conv2d(inputs[0], channels, 3), nn.BatchNorm2d(channels), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )


class Make(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.body, self.dropout, self.fc = body(inputs), nn.Dropout(0.5), nn.Linear(6, outputs)

    def forward(self, x):
        return self.fc(self.dropout(self.body(x)))


def inside(inputs, outputs):
    first, second = body(inputs), body((6,))
    return nn.Sequential(*first[:3], nn.Dropout(0.5), *second, nn.Linear(6, outputs))


def drawn(inputs, outputs):
    return nn.Sequential(nn.Conv2d(inputs[0], 6, 3), *body(inputs)[2:], nn.Linear(6, outputs))


class Doubled(Make):
    def forward(self, x):
        return 2 * super().forward(x)


class Hooked(Make):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.fc.register_forward_pre_hook(lambda _, given: (given[0] + 1,))


class Tied(Make):
    def forward(self, x):
        return self.fc(self.body(x) + self.fc.weight.sum())


def convolved(inputs, outputs):
    return nn.Sequential(*body(inputs)[:4], nn.Conv2d(6, outputs, 1), nn.Flatten())


def bare(inputs, outputs):
    return nn.Sequential(*body(inputs), nn.Linear(6, outputs))
"""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of its own, and the networks in the present folder."""
    monkeypatch.setattr(places, "CACHE_ROOT", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "backbones.py").write_text(BACKBONE.replace("SEED", "3"))
    return tmp_path / "cache" / "features"


@pytest.fixture
def whole(monkeypatch):
    """The way without features, as it was before they were kept: of every epoch."""

    def patched():
        monkeypatch.setattr(frozen, "cut", lambda *_: "so that both ways can be compared")

    return patched


def settings(**changed):
    return {
        "folder": str(IMAGES),
        "size": 8,
        "network": "backbones:Make",
        "freeze": True,
        "epochs": 3,
        "batch_size": 8,
        **changed,
    }


def task(**changed):
    made = OwnImages(Settings(**settings(**changed)))
    registry.import_own(made.settings.network)
    return made


@pytest.mark.parametrize("method", ["mfvi", "mc_dropout", "sngp", "laplace_last_layer"])
def test_both_ways_give_one_posterior(method, tmp_path, whole, cache):
    """What is loaded predicts the same: by draws, dropout before the last layer, and a layer in its place.

    Laplace's draws go by eigenvectors, whose signs are rounding's: its moments are compared.
    """
    own = settings() if method == "mc_dropout" else settings(network="backbones:bare")
    kept = bench.run(method, "own_images", task_settings=own, out=tmp_path / "kept")
    assert len(list(cache.iterdir())) == 2
    paths = sorted(IMAGES.rglob("*.png"))[::7]
    loaded = bench.load(kept.directory)
    found, arrays = loaded.predict(paths), load_scores(kept.directory)[1]
    whole()
    every = bench.run(method, "own_images", task_settings=own, out=tmp_path / "every")
    reloaded = bench.load(every.directory)
    if method == "laplace_last_layer":
        for one, other in zip(loaded.method.moments(), reloaded.method.moments(), strict=True):
            for a, b in zip(one.values(), other.values(), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
        return
    for row, expected in zip(found, reloaded.predict(paths), strict=True):
        assert row["probabilities"] == pytest.approx(expected["probabilities"], abs=2e-5)
    stored = load_scores(every.directory)[1]["log_probs"]
    np.testing.assert_allclose(arrays["log_probs"].astype(float), stored.astype(float), atol=2e-3)  # float16


def test_the_next_method_and_seed_compute_no_features(tmp_path, cache, monkeypatch):
    """Negative control: with another split, whose training images are others, they are computed."""
    computed, called = [], frozen.Part.__call__
    monkeypatch.setattr(
        frozen.Part, "__call__", lambda part, batches: computed.append(1) or called(part, batches)
    )

    def runs(method, seed, **changed):
        computed.clear()
        run = bench.run(
            method, "own_images", seed=seed, task_settings=settings(epochs=1, **changed), out=tmp_path
        )
        said = (run.directory / "notes.txt").read_text()
        assert "the frozen part is computed once for each image: 6 features, kept" in said
        return len(computed) - 1  # but for the witness

    assert runs("map", 0) == 2
    assert runs("map", 1) == runs("mfvi", 0) == 0
    assert runs("map", 0, split=1) == 2
    assert len(list(cache.iterdir())) == 4


def test_all_that_decides_features_is_in_their_digest(tmp_path, monkeypatch):
    """A weight, a statistic, a picture, the size, the moments of channels, the code, a version of torch."""

    def key(**changed):
        keys = []
        with monkeypatch.context() as patch:
            patch.setattr(keeping, "kept", lambda kind, key, shape, _: keys.append(key) or np.zeros(shape))
            made = task(**changed)
            for part in ("train", "test"):
                made._inputs(part)
        return tuple(keys)

    images = write_images(tmp_path / "images")
    same = key()
    assert key(folder=str(images)) == same  # the same pictures elsewhere
    assert key(size=9) != same
    (images / "red" / "00.png").write_bytes((images / "red" / "01.png").read_bytes())
    keys = [same, key(folder=str(images)), key(split=1)]
    part = task().frozen_part
    digests = [part.digest({})]
    for name in ("body.0.weight", "body.1.variance"):
        part._made.get_buffer(name)[0] += 1e-3
        digests.append(part.digest({}))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "0")
        digests.append(part.digest({}))
    assert len({*keys}) == len(keys)
    assert len({*digests}) == len(digests)


def test_a_file_that_is_cut_or_changed_is_computed_again(cache):
    """By a byte of the content, of the digest or of the header; a file that is whole is read."""
    array, calls = np.arange(12, dtype=np.float32).reshape(3, 4), []

    def get(shape=(3, 4)):
        calls.clear()
        found = keeping.kept("features", "key", shape, lambda: calls.append(1) or array.reshape(shape))
        np.testing.assert_array_equal(found, array.reshape(shape))
        return bool(calls)

    assert get()
    assert not get()
    path = cache / "key.safetensors"
    whole = path.read_bytes()
    for place in range(0, len(whole), 5):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        get()  # a space of the header says nothing
        path.write_bytes(whole[:place])
        assert get()
    path.write_bytes(whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:])
    assert get()
    assert not get()
    assert get((4, 3))
    assert [*cache.iterdir()] == [path]


def test_where_nothing_can_be_written_nothing_is_kept(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(places, "CACHE_ROOT", tmp_path / "file")
    assert keeping.kept("features", "key", (2,), lambda: np.ones(2)).tolist() == [1, 1]


OTHERWISE = {
    "inside": "it has dropout inside its frozen part",
    "drawn": "its frozen part is drawn anew for every fit",
    "Doubled": "it does not end with one call of its last layer, on vectors",
    "Hooked": "more than its last layer stands behind its frozen part",
    "Tied": "the weights of its last layer act before it too",
    "convolved": "its last layer is no nn.Linear of which all weights are free",
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_where_features_would_mean_something_else_the_fit_is_to_images(name):
    """And one line of the notes says why."""
    made = task(network=f"backbones:{name}")
    assert made.frozen_part == OTHERWISE[name]
    assert isinstance(made._inputs("train"), Images)
    assert f"the frozen part is computed in every epoch, for {OTHERWISE[name]}" in made.notes()["notes.txt"]
    assert json.loads(made.notes()["encoder.json"])["features"] is None
    assert task(freeze=False).frozen_part == "nothing is frozen"


def test_a_run_whose_frozen_part_is_another_now_is_not_loaded(tmp_path, monkeypatch):
    """The last layer's weights are in the checkpoint, and would say nothing of it."""
    run = bench.run("map", "own_images", task_settings=settings(epochs=1), out=tmp_path)
    bench.load(run.directory)
    factory = own_network.imported["backbones:Make"]

    def another(inputs, outputs):
        made = factory(inputs, outputs)
        made.body[0].weight.data += 0.1
        return made

    monkeypatch.setitem(own_network.imported, "backbones:Make", another)
    with pytest.raises(UsageError, match="the frozen part of the network 'backbones:Make' computes other"):
        bench.load(run.directory)
