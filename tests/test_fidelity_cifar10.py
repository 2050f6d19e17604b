"""fidelity_cifar10: scores by an independent script, anchors, the problem as published, a file handed in."""

import math

import generated
import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from safetensors.numpy import load_file
from test_submitting import WORDS, change
from toys import Recorder

from bench import cifar, metrics, peers
from bench.errors import UsageError
from bench.leaderboard.evidence import submission, submitting
from bench.runs import registry
from bench.runs.folders import gather
from bench.runs.runner import finished, run
from bench.studies import fidelity_rows, hmc_predictions
from bench.tasks.fidelity_cifar10 import FidelityCifar10, Settings

SMALL = {"num_train": 60, "channels": 2, "epochs": 1, "test_samples": 2}


def make(**values):
    """The task, with small settings but for `values`."""
    return FidelityCifar10(Settings(dataset="cifar10", **{**SMALL, **values}))


@pytest.fixture
def made_up(monkeypatch):
    """Small images and a small reference, drawn."""
    monkeypatch.setattr(cifar, "load", generated.cifar)
    monkeypatch.setattr(hmc_predictions, "load", generated.chains)


def scored(probabilities, labels):
    """What the task makes of probabilities `[N, C]`, stored as a run stores them."""
    stored = metrics.store(torch.from_numpy(probabilities).double().log())
    return make().score({"log_probs": stored, "labels": labels})


def by_hand(stored, chains, labels):
    """Total variation, agreement, accuracy and NLL from float16 log-probabilities, by NumPy alone."""
    p = np.exp(stored.astype(np.float64))
    p /= p.sum(1, keepdims=True)
    q = chains.astype(np.float64)
    hits = p.argmax(1)
    return {
        "total_variation": 0.5 * np.mean(np.sum(np.abs(p - q), 1)),
        "agreement": np.mean(hits == q.argmax(1)),
        "accuracy": np.mean(hits == labels),
        "nll": -np.mean(np.log(p[np.arange(len(p)), labels])),
    }


# ---- scores


def test_scores_of_two_fits_are_those_of_a_script_that_shares_no_code(made_up, tmp_path):
    """Of the arrays that two methods left, to 1e-9; a shuffled reference is seen."""
    for method in ("map", "swag"):
        done = run(method, "fidelity_cifar10", preset="smoke", task_settings={"num_train": 60}, out=tmp_path)
        arrays = load_file(done.directory / "arrays.safetensors")
        assert arrays.keys() == {"log_probs", "labels"}, "the reference lies in no run"
        expected = by_hand(arrays["log_probs"], generated.chains(), arrays["labels"])
        for name, value in expected.items():
            assert done.record.metrics[name] == pytest.approx(value, abs=1e-9), name
        other = by_hand(arrays["log_probs"], generated.chains()[::-1], arrays["labels"])
        assert abs(other["total_variation"] - expected["total_variation"]) > 1e-6


def test_metrics_by_hand(monkeypatch):
    """Three images: distances 0, 0.1 and 0.6; the third is named otherwise."""
    chains = np.array([[0.7, 0.2, 0.1], [0.3, 0.5, 0.2], [0.8, 0.1, 0.1]], np.float32)
    monkeypatch.setattr(hmc_predictions, "load", lambda *_: chains)
    predicted = np.array([[0.7, 0.2, 0.1], [0.2, 0.6, 0.2], [0.2, 0.7, 0.1]])
    found = scored(predicted, np.array([0, 1, 0], np.uint8))
    assert found["total_variation"] == pytest.approx(0.7 / 3, abs=2e-4)
    assert found["agreement"] == pytest.approx(2 / 3)
    assert found["accuracy"] == pytest.approx(2 / 3)
    assert found["nll"] == pytest.approx(-np.log(0.7 * 0.6 * 0.2) / 3, abs=1e-3)


def test_the_reference_scores_nothing_and_its_mirror_as_far_as_can_be(made_up):
    chains, labels = generated.chains(), generated.cifar("cifar10")["test_labels"]
    assert scored(chains, labels)["total_variation"] < 1e-3
    assert scored(chains, labels)["agreement"] > 0.99, "in float16 a few ties may break otherwise"
    sure = np.eye(10)[chains.argmin(1)]
    assert scored(sure, labels)["agreement"] == 0


@pytest.fixture
def published():
    """The published reference, and the labels of the images."""
    if hmc_predictions.find("cifar10_hmc") is None or cifar.find("cifar10") is None:
        pytest.skip("cifar10 or cifar10_hmc is not here: `bench data get cifar10_hmc` says how to have it")
    return hmc_predictions.load(), cifar.load("cifar10")["test_labels"]


def test_anchors_of_the_published_reference(published):
    """Uniform probabilities, its classes taken as sure and itself score what the rows of the page say."""
    chains, labels = published
    rows = {line.row: line.metrics for line in fidelity_rows.published()}
    given = {
        "uniform probabilities": np.full((10_000, 10), 0.1),
        "the chains' own class as sure": np.eye(10)[chains.argmax(1)],
        "the chains": chains,
    }
    for row, probabilities in given.items():
        found = scored(probabilities, labels)
        for name, value in rows[row].items():
            if value is not None:
                assert found[name] == pytest.approx(value, abs=5e-4), (row, name)
    order = np.random.default_rng(0).permutation(len(labels))
    assert scored(chains[order], labels)["accuracy"] < 0.13, "an order that is not that of the images is seen"


def test_rows_that_are_no_runs_stand_beside_runs(made_up, tmp_path):
    """Each says where it comes from; none is taken for ours."""
    done = run("map", "fidelity_cifar10", preset="smoke", task_settings={"num_train": 60}, out=tmp_path)
    found = FidelityCifar10.compare([finished(done.directory)])
    shown = {row[3]: row[4] for row in found.rows if row[1] == "total_variation"}
    assert shown["uniform probabilities (computed from the reference)"] == "0.8098"
    assert all(line.source for line in fidelity_rows.published())
    assert len(shown) == 1 + sum(
        line.metrics["total_variation"] is not None for line in fidelity_rows.published()
    )


# ---- the problem


def test_problem_is_the_published_one(made_up):
    """Inputs, prior, network; the log density of the prior at 0 is the constant that the competition printed.

    Its notebook printed -472671.84 as the mean log joint of the first epoch's batches of 100: that constant,
    -472354.5, and some hundred nats of likelihood.
    """
    task = make(num_train=50, channels=16)
    problem = task.problem()
    images, labels = problem.train.tensors
    raw = generated.cifar("cifar10")
    assert problem.num_train == len(images) == 50
    assert labels.tolist() == raw["train_labels"][:50].tolist()
    expected = (raw["train_inputs"][:50] / 255 - np.reshape([0.49, 0.48, 0.44], (3, 1, 1))) / 0.2
    assert_allclose(images, expected, atol=1e-5)
    assert problem.val is None
    weights = {name: torch.zeros_like(p) for name, p in problem.network().named_parameters()}
    prior = problem.prior(weights)
    at_zero = sum(float(prior[name].log_prob(w)) for name, w in weights.items())
    assert sum(w.numel() for w in weights.values()) == 274_042
    assert at_zero == pytest.approx(-0.5 * 274_042 * math.log(2 * math.pi * 5), rel=1e-6)
    assert -472_671.84 < at_zero < -472_671.84 + 500


@pytest.mark.parametrize("variance", [5.0, 0.2])
def test_prior_has_the_variance_and_not_the_deviation(made_up, variance):
    network = torch.nn.Linear(3, 2)
    prior = make(prior_variance=variance).problem().prior(dict(network.named_parameters()))
    assert prior["weight"].variance.unique().item() == pytest.approx(variance)


def test_one_fit_and_one_prediction_of_all_test_images(made_up):
    recorder = Recorder()
    arrays = make(epochs=7, batch_size=16).run(recorder)
    (budget,) = recorder.budgets
    assert (budget.epochs, budget.batch_size) == (7, 16)
    assert [len(inputs) for inputs in recorder.inputs] == [500]
    assert arrays.keys() == {"log_probs"}


def test_presets_are_the_processor_s_and_the_published_one():
    entry = registry.task("fidelity_cifar10")
    standard = entry.cls.settings_class(dataset="cifar10")
    assert (standard.num_train, standard.prior_variance, standard.epochs) == (50_000, 5.0, 10)
    assert entry.presets["paper"] == {"epochs": 500, "batch_size": 80, "test_samples": 50}


# ---- probabilities of another library


OUTSIDE = "bench.peers:Cifar10Predictions"


def handed_in(folder, probabilities, **more):
    """A run of a file of probabilities."""
    np.save(folder / "probs.npy", probabilities)
    return run(
        OUTSIDE,
        "fidelity_cifar10",
        method_settings={"file": str(folder / "probs.npy")},
        task_settings=SMALL,
        out=folder / "runs",
        **more,
    )


def test_probabilities_of_a_file_are_scored_row_by_row(made_up, tmp_path):
    """A file in another order scores otherwise; an image keeps its row wherever it stands."""
    probabilities = np.random.default_rng(1).dirichlet(np.ones(10), 500)
    labels = generated.cifar("cifar10")["test_labels"]
    found = handed_in(tmp_path, probabilities).record
    assert found.metrics == pytest.approx(scored(probabilities.astype(np.float32), labels), abs=1e-6)
    other = handed_in(tmp_path, probabilities[::-1], force=True).record
    assert abs(other.metrics["total_variation"] - found.metrics["total_variation"]) > 1e-4
    assert found.method.seed_matters is False
    method = peers.Cifar10Predictions(
        make().problem(), peers.PredictionsSettings(file=str(tmp_path / "probs.npy"))
    )
    images, generator = make().inputs("test"), torch.Generator()
    there = method.predict(images, 3, generator).average()
    back = method.predict(images.flip(0), 3, generator).average().flip(0)
    torch.testing.assert_close(there, back, rtol=0, atol=0)
    unknown = method.predict(make().inputs("train")[:2], 3, generator).average()
    torch.testing.assert_close(unknown.exp(), torch.full((2, 10), 0.1))


@pytest.mark.parametrize("level", range(0, 256, 51))
def test_pixels_come_back_from_what_the_network_takes(level):
    images = np.arange(3 * 32 * 32, dtype=np.int64).reshape(1, 3, 32, 32) % 256 ^ level
    images = images.astype(np.uint8)
    assert (hmc_predictions.levels(hmc_predictions.standardised(images)).numpy() == images).all()


def test_probabilities_of_a_file_are_submitted(made_up, tmp_path):
    """Arrays hold predictions and labels alone, so that the reference is handed on by nobody."""
    done = handed_in(tmp_path, np.full((500, 10), 0.1))
    standard = {"identity": "fidelity_cifar10", "settings": vars(Settings(dataset="cifar10"))}
    change(done.directory, task=standard, provenance={"commit": "0" * 40, "dirty": False})
    directory = submitting.submit(gather([tmp_path / "runs"])[0], tmp_path / "outside", WORDS)
    (seed,) = submission.runs_in(directory)
    assert load_file(seed / "arrays.safetensors").keys() == {"log_probs", "labels"}


@pytest.mark.parametrize(
    ("probabilities", "message"),
    [
        (np.full((499, 10), 0.1), r"probabilities \[499, 10\], and CIFAR-10 has 500 test images of 10"),
        (np.full((500, 4), 0.25), r"probabilities \[500, 4\]"),
        (np.full((500, 10), 0.2), "row 0 holds no probabilities"),
        (np.log(np.full((500, 10), 0.1)), "row 0 holds no probabilities"),
        (np.full((500, 10), np.nan), "row 0 holds no probabilities"),
        (np.zeros((500, 10), int), r"must hold one array of probabilities \[N, C\]"),
        (np.full((5, 500, 10), 0.1), r"must hold one array of probabilities \[N, C\]"),
        (np.array([{}], dtype=object), "no NumPy file"),
        (None, "no NumPy file"),
    ],
)
def test_other_files_are_refused_in_one_line(made_up, tmp_path, probabilities, message):
    file = tmp_path / "probs.npy"
    if probabilities is not None:
        np.save(file, probabilities)
    problem, given = make().problem(), peers.PredictionsSettings(file=str(file))
    with pytest.raises(UsageError, match=message) as raised:
        peers.Cifar10Predictions(problem, given)
    assert "\n" not in str(raised.value)
