"""A predictor as ONNX: what the file says is what the predictor says, and what it cannot say is refused."""

import json
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from given import IMAGES, PENGUINS
from scipy.special import ndtr

import bench
from bench import cli
from bench.errors import UsageError
from bench.studies import exporting
from bench.system import places
from bench.tasks.own_images import picture

NEEDED = pytest.mark.skipif(
    not all(map(exporting.find_spec, exporting.NEEDED)),
    reason="onnx, onnxscript and onnxruntime are the extra onnx",
)


def said(path, inputs):
    """Answers of the file by name, and what it says of itself."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, {"inputs": inputs}), strict=True)), {
        name: json.loads(value) if value[:1] in "[{" else value
        for name, value in session.get_modelmeta().custom_metadata_map.items()
    }


@NEEDED
def test_a_table_of_numbers_is_predicted_from_raw_numbers(tmp_path, capsys):
    """Mean, sd and interval of an ensemble whose noise differs by row; missing values; one row and many.

    Negative control: rows that are standardised already are predicted otherwise.
    """
    table = pd.read_csv(PENGUINS).dropna()[["bill_length_mm", "bill_depth_mm", "body_mass_g"]][:80]
    table.loc[table.index[:5], "bill_depth_mm"] = None
    table.to_csv(tmp_path / "t.csv", index=False)
    values = {"file": str(tmp_path / "t.csv"), "target": "body_mass_g", "epochs": 3}
    values |= {"noise": "heteroscedastic", "hidden": 5}
    run = bench.run("mfvi", "own_table", members=2, task_settings=values, out=tmp_path)
    path = tmp_path / "made" / "model.onnx"
    assert cli.main(["export", str(run.directory), "--to", str(path), "--level", "0.8"]) == 0
    assert capsys.readouterr().out.split() == [str(path)]
    rows = table[["bill_length_mm", "bill_depth_mm"]].to_numpy(float)
    found, words = said(path, rows)
    predictor = bench.load(run.directory)
    expected = predictor.predict(table)
    for name in ("mean", "sd"):
        np.testing.assert_allclose(found[name], [row[name] for row in expected], rtol=1e-5)
    ends = np.stack([found["low"], found["high"]], 1)
    np.testing.assert_allclose(ends, predictor.interval(table, level=0.8), rtol=1e-5)
    assert words["inputs"] == ["bill_length_mm", "bill_depth_mm"]
    assert (words["target"], words["level"]) == ("body_mass_g", "0.8")
    one, _ = said(path, rows[3:4])
    np.testing.assert_allclose(one["low"], found["low"][3:4], rtol=1e-6)
    assert (
        np.abs(said(path, predictor.encoder.encode_rows(table)[:, :2])[0]["mean"] - found["mean"]).max() > 1
    )
    far, _ = said(path, np.array([[1e30, 20.0], [np.inf, 20.0], [40.0, 20.0]]))
    assert [np.isnan(far[name]).tolist() for name in found] == 4 * [[True, True, False]]
    assert [*path.parent.iterdir()] == [path]


@NEEDED
def test_pictures_are_predicted_through_the_frozen_part(tmp_path, monkeypatch):
    """Probabilities and mutual information; the pictures as bytes, standardised in the file."""
    monkeypatch.setattr(places, "CACHE_ROOT", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "fixed_body.py").write_text(FIXED)
    values = {"folder": str(IMAGES), "size": 8, "network": "fixed_body:make", "freeze": True, "epochs": 2}
    run = bench.run("laplace_last_layer", "own_images", task_settings=values, out=tmp_path)
    predictor = bench.load(run.directory)
    assert predictor.part is not None
    predictor.export(tmp_path / "model.onnx")
    paths = sorted(IMAGES.rglob("*.png"))[::5]
    squares = np.stack([picture(path, 8) for path in paths]).transpose(0, 3, 1, 2)
    found, words = said(tmp_path / "model.onnx", squares)
    expected = [list(row["probabilities"].values()) for row in predictor.predict(paths)]
    np.testing.assert_allclose(found["probabilities"], expected, atol=1e-5)
    generator = torch.Generator().manual_seed(0)
    inputs = predictor.part([predictor.encoder.encode(torch.from_numpy(squares))])
    each = predictor.method.predict(inputs, 50, generator).log_probs.double()
    entropies = [-(p.exp() * p).sum(-1) for p in (each, each.logsumexp(0) - np.log(50))]
    np.testing.assert_allclose(found["mutual_information"], entropies[1] - entropies[0].mean(0), atol=1e-5)
    assert found["mutual_information"].max() > 1e-4
    assert words["classes"] == ["blue", "red"]


FIXED = """
import torch
from torch import nn


def make(inputs, outputs):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        first, second = nn.Conv2d(inputs[0], 6, 3), nn.Linear(54, 8)
    body = [first, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), second, nn.Tanh()]
    return nn.Sequential(*body, nn.Linear(8, outputs))
"""


@NEEDED
def test_of_categories_the_encoded_rows_are_taken_and_named(tmp_path):
    """Whatever the encoder makes of a row; and a half-written file is never there."""
    values = {"file": str(PENGUINS), "target": "species", "epochs": 1, "hidden": 3}
    run = bench.run("map", "own_table", task_settings=values, out=tmp_path)
    predictor = bench.load(run.directory)
    predictor.export(str(tmp_path / "model.onnx"))
    rows = pd.read_csv(PENGUINS)[:9]
    found, words = said(tmp_path / "model.onnx", predictor.encoder.encode_rows(rows))
    expected = [list(row["probabilities"].values()) for row in predictor.predict(rows)]
    np.testing.assert_allclose(found["probabilities"], expected, atol=1e-5)
    assert len(words["inputs"]) == predictor.encoder.width
    assert words["inputs"][:2] == ["island: is Biscoe", "island: is Dream"]
    np.testing.assert_array_equal(found["mutual_information"], 0)


@pytest.mark.parametrize(
    ("method", "settings", "said_of_it"),
    [
        ("laplace", {}, "predicts otherwise than by its network under draws of the weights"),
        ("sngp", {"features": 8}, "predicts otherwise than by its network under draws of the weights"),
        ("bench.trees:RandomForest", {}, "this method has no network"),
    ],
)
@NEEDED
def test_what_cannot_be_written_is_refused_in_one_line(method, settings, said_of_it, tmp_path):
    values = {"file": str(PENGUINS), "target": "body_mass_g", "epochs": 1, "hidden": 3}
    run = bench.run(method, "own_table", method_settings=settings, task_settings=values, out=tmp_path)
    with pytest.raises(UsageError, match=said_of_it) as caught:
        bench.load(run.directory, imports=(method,) if ":" in method else ()).export(tmp_path / "m.onnx")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "m.onnx").exists()


def test_a_run_of_a_benchmark_a_missing_package_and_a_level_are_refused(tmp_path, capsys, monkeypatch):
    values = {"file": str(PENGUINS), "target": "body_mass_g", "epochs": 1, "hidden": 3}
    run = bench.run("map", "own_table", task_settings=values, out=tmp_path)
    words = ["export", str(run.directory), "--to", str(tmp_path / "m.onnx")]
    monkeypatch.setattr(exporting, "find_spec", lambda name: None if name == "onnx" else sys)
    assert cli.main(words) == 2
    assert "onnx cannot be imported: pip install 'posterior-bench[onnx]'" in capsys.readouterr().err
    monkeypatch.setattr(exporting, "find_spec", lambda _: sys)
    assert cli.main([*words, "--level", "1"]) == 2
    assert "--level 1: must be a probability" in capsys.readouterr().err
    other = bench.run("map", "toy_regression", preset="smoke", out=tmp_path)
    assert cli.main(["export", str(other.directory), "--to", str(tmp_path / "m.onnx")]) == 2
    assert "only runs on own data" in capsys.readouterr().err
    assert not (tmp_path / "m.onnx").exists()


def test_the_quantiles_of_the_file_are_those_of_the_mixture():
    """Against scipy's normal distribution: exact far into both tails, which 32 bits are not."""
    z = torch.linspace(-30, 8, 1000, dtype=torch.float64)
    np.testing.assert_allclose(exporting._below(z), ndtr(z.numpy()), rtol=2e-7)
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(7, 5, 1, generator=generator) * 3
    target = type("Target", (), {"mean": 5.0, "scale": 2.0})
    sigma = torch.rand(7, 1, generator=generator).double() + 0.1
    for level in (0.5, 0.9, 0.9999):
        made = exporting._Number(target, sigma, level)
        *_, centres, sigmas, low, high = made(outputs, torch.zeros(5, dtype=torch.float64))
        for _ in range(exporting._HALVINGS):
            low, high = exporting._Halved(level)(low, high, centres, sigmas)
        means = 5 + 2 * outputs[..., 0].double().numpy()
        for end, probability in ((low[0], (1 - level) / 2), (-low[1], (1 + level) / 2)):
            below = ndtr((end.numpy() - means) / (2 * sigma.numpy())).mean(0)
            tail = min(probability, 1 - probability)
            np.testing.assert_allclose(below, probability, atol=1e-6 * tail)
