"""Retinopathy: which eyes train and which test, how a photograph reaches the network, a run of each task."""

import csv

import eyes
import numpy as np
import pytest
import torch

from bench import augmentation, cli, likelihoods
from bench.errors import DataError
from bench.photographs import photographs
from bench.predictions import Bernoulli
from bench.runs import records, registry
from bench.runs.runner import finished, load_scores
from bench.studies import referral_comparison
from bench.system import places
from bench.tasks.retinopathy import Retinopathy

NAMES = [name for name, entry in registry.tasks().items() if entry.file == "retinopathy"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return eyes.write_all(tmp_path_factory.mktemp("eyes"))


@pytest.fixture(autouse=True)
def _no_other_roots(monkeypatch, tmp_path, folder):
    monkeypatch.setenv("BENCH_DATA", str(folder))
    monkeypatch.setattr(places, "CACHE_ROOT", tmp_path / "cache")


def make(name="retinopathy", **values):
    """A task under its preset smoke."""
    entry = registry.task(name)
    settings = entry.fixed | dict(entry.presets["smoke"]) | values
    return Retinopathy(registry.build(entry.cls.settings_class, settings, "task"))


# ------------------------------------------------------------------------------------------------ the eyes


@pytest.mark.parametrize("name", NAMES)
def test_no_patient_has_eyes_in_two_parts(name):
    """Of photographs of one source; those from abroad are of other patients."""
    task = make(name)
    seen = [task.photographs.patients[task.rows(part)] for part in ("train", "val")]
    if task.tested is task.photographs:
        seen.append(task.tested.patients[task.rows("test")])
    everyone = np.concatenate([np.unique(patients) for patients in seen])
    assert len(everyone) == len(np.unique(everyone)) > 0


def test_an_eye_is_sick_above_level_one():
    task = make()
    for part in ("train", "val", "test"):
        images, labels = task.own_data(part)
        levels = task.photographs.levels[task.photographs.parts == part]
        assert labels.tolist() == [int(level > 1) for level in levels]
        assert len(images) == len(labels) == 2 * eyes.PATIENTS[part]


def test_severity_shift_trains_up_to_level_two_and_tests_above_next_to_the_healthy():
    task = make("retinopathy_severity_shift")
    levels = {part: task.photographs.levels[task.rows(part)] for part in ("train", "val", "test")}
    assert set(levels["train"]) == set(levels["val"]) == {0, 1, 2}
    assert set(levels["test"]) == {0, 1, 3, 4}
    whole = make()
    of_test = whole.photographs.levels[whole.rows("test")]
    assert len(levels["test"]) == (of_test != 2).sum()
    assert task.own_data("test")[1].tolist() == [int(level >= 3) for level in levels["test"]]


def test_country_shift_trains_on_kaggles_eyes_and_tests_on_all_of_aptos():
    task, kaggle, aptos = (make(f"retinopathy{n}") for n in ("_country_shift", "", "_aptos"))
    assert task.photographs.digest == kaggle.photographs.digest
    assert task.tested.digest == aptos.photographs.digest
    assert (task.rows("train") == kaggle.rows("train")).all()
    assert (task.own_data("test")[1] == (aptos.photographs.levels > 1)).all()


def test_digest_tells_data_and_parts_apart():
    digests = {name: make(name).data_digest() for name in NAMES}
    assert len(set(digests.values())) == len(NAMES)
    assert make(channels=5, epochs=3).data_digest() == digests["retinopathy"]


def test_missing_photographs_are_told_with_every_step(monkeypatch, tmp_path):
    monkeypatch.setenv("BENCH_DATA", str(tmp_path))
    with pytest.raises(DataError, match="bench data prepare retinopathy --source DIR --size 64"):
        make().problem()


def test_synthetic_eyes_that_were_prepared_are_taken_if_they_are_as_many(monkeypatch):
    """200 lie there; of another number the task makes its own."""
    from bench.photographs import fundus, preparing

    asked = []
    monkeypatch.setattr(fundus, "find_or_make", lambda *a, **k: asked.append((a, k)) or "made")
    monkeypatch.setattr(preparing, "prepare", lambda *a: asked.append(a) or "prepared")
    assert len(make("retinopathy_synthetic").photographs.names) == 200
    assert not asked
    assert make("retinopathy_synthetic", images=60).photographs == "prepared"
    assert asked == [
        ((None, 60, 64), {"seed": 0}),
        ("retinopathy_synthetic", "made", "made", 64, "resize"),
    ]


# ------------------------------------------------------------------------------------ what the network sees


def test_channels_are_normalised_by_the_training_eyes():
    """Mean 0 and standard deviation 1 over their pixels; test eyes by the same numbers."""
    task = make()
    train = task.problem().train
    inputs = torch.stack([train[i][0] for i in range(len(train))])
    torch.testing.assert_close(inputs.mean((0, 2, 3)), torch.zeros(3), atol=1e-4, rtol=0)
    torch.testing.assert_close(inputs.std((0, 2, 3), correction=0), torch.ones(3), atol=1e-4, rtol=0)
    pixel = task.photographs.images[task.rows("test")[0]][32, 32] / 255
    found = task.eyes("test")[0][0][:, 32, 32]
    torch.testing.assert_close(found * train.std + train.mean, torch.from_numpy(pixel).float())


def test_training_eyes_are_augmented_and_test_eyes_are_not():
    task = make()
    stored = task.eyes("train")
    raw, labels = stored.read(torch.tensor([5, 2]))
    assert (raw.dtype, raw.shape) == (torch.uint8, (2, 3, 64, 64))
    assert labels.tolist() == task.own_data("train")[1][[5, 2]].tolist()
    as_is = stored.finish(raw, None)
    torch.testing.assert_close(as_is[0], stored[5][0])
    uniforms = torch.rand(2, stored.num_uniforms, generator=torch.Generator().manual_seed(0))
    assert stored.num_uniforms == augmentation.NUM_UNIFORMS
    assert not torch.allclose(stored.finish(raw, uniforms), as_is)


def test_problem_compares_at_equal_numbers_of_parameters():
    problem = make().problem()
    assert problem.equal_parameters
    assert isinstance(problem.likelihood, likelihoods.Bernoulli)
    assert (problem.num_train, len(problem.val)) == (120, 20)
    prior = problem.prior(dict(problem.network().named_parameters()))
    assert all((p.mean == 0).all() and (p.variance == 1).all() for p in prior.values())
    counts = [sum(p.numel() for p in problem.network(width=w).parameters()) for w in (1.0, 2**-0.5)]
    assert 0.3 < counts[1] / counts[0] < 0.7


@pytest.mark.parametrize("name", NAMES)
def test_paper_is_the_network_of_the_source(name):
    """VGG-16 of 64 channels, 14.7 million parameters, at 512 pixels, batches of 16 and 16 samples."""
    entry = registry.task(name)
    own = registry.build(entry.cls.settings_class, entry.fixed | dict(entry.presets["paper"]), "task")
    assert (own.size, own.network, own.channels, own.batch_size, own.test_samples) == (
        512,
        "vgg16",
        64,
        16,
        16,
    )
    assert own.preprocess == "resize"


# ------------------------------------------------------------------------------------------------- the run


class Recorder:
    """An engine that fits nothing; its readings are the row's number, the same for all samples but one."""

    def __init__(self):
        self.inputs, self.logged, self.budgets = [], [], []

    def stage(self, *arguments):
        """Nothing."""

    def fit(self, problem, budget):
        """Nothing."""
        self.budgets.append(budget)

    def predict(self, method, inputs, num_samples):
        """Log-odds that grow with the row."""
        self.inputs.append(inputs)
        log_odds = torch.linspace(-2, 2, len(inputs)).repeat(num_samples, 1)
        log_odds[0] += 1
        return Bernoulli(log_odds)

    def log(self, *arguments):
        """Keeps them."""
        self.logged.append(arguments)


def test_run_reads_validation_eyes_for_the_log_and_test_eyes_for_the_arrays(monkeypatch):
    task, engine = make("retinopathy_country_shift"), Recorder()
    monkeypatch.setattr(task, "targets", lambda: pytest.fail("the run read the targets"))
    arrays = task.run(engine) | task.given()
    assert [len(inputs) for inputs in engine.inputs] == [20, 200]
    assert (engine.budgets[0].epochs, engine.budgets[0].batch_size) == (1, 32)
    labels = task.own_data("val")[1]
    p = engine.predict(None, labels, 2).log_odds.sigmoid().mean(0).numpy()
    expected = -np.log(np.where(labels == 1, p, 1 - p)).mean()
    assert engine.logged == [("nll", pytest.approx(expected, rel=1e-5))]
    assert arrays["log_probs"].shape == (200, 2)
    assert (arrays["patients"][::2] == arrays["patients"][1::2]).all()
    assert len(set(arrays["patients"])) == 100
    assert (arrays["deviation"] > 0).all()


def test_generated_eyes_through_the_whole_path(monkeypatch, tmp_path):
    """They are made, prepared, trained on and scored by one command, and again with the same digests.

    How strongly each test photograph is hidden is known from the seed, in the order of the prepared ones.
    """
    few = ["--task.images", "60", "--task.size", "32", "--preset", "smoke"]
    done = []
    for where in ("first", "again"):
        monkeypatch.setenv("BENCH_DATA", str(tmp_path / where))
        out = tmp_path / "runs" / where
        assert cli.main(["run", "radial", "retinopathy_synthetic", *few, "--out", str(out)]) == 0
        (path,) = out.rglob("record.json")
        done.append(finished(path.parent))
    first, again = done
    assert first.metrics == again.metrics
    assert all((first.arrays[key] == again.arrays[key]).all() for key in first.arrays)
    (table,) = (tmp_path / "first").glob("*/artefacts.csv")
    with table.open() as file:
        hidden = {row["image"]: float(row["strength"]) for row in csv.DictReader(file)}
    task = make("retinopathy_synthetic", images=60, size=32)
    names = [task.photographs.names[row] for row in task.rows("test")]
    found = referral_comparison.strengths(first)
    np.testing.assert_allclose(found, [hidden[name] for name in names], atol=1e-6)
    compared = referral_comparison.compare([first])
    assert {f"retinopathy_synthetic-artefacts_{n}" for n in ("entropy", "information")} <= set(
        compared.charts
    )


def test_rank_correlation_with_artefacts_tells_honest_from_inverted():
    """Negative control: an uncertainty that falls as artefacts grow."""
    strength = np.random.default_rng(0).random(50)
    assert referral_comparison.rank_correlation(strength**3, strength) == pytest.approx(1)
    assert referral_comparison.rank_correlation(-strength, strength) == pytest.approx(-1)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == NAMES[0] else pytest.mark.slow) for n in NAMES]
)
def test_smoke_run_by_the_command(name, folder, tmp_path):
    """Every metric has a value or a reason, and none needs a photograph; arrays alone give the same again."""
    arguments = ["run", "radial", name, "--preset", "smoke", "--out", str(tmp_path)]
    assert cli.main(arguments) == 0
    (path,) = tmp_path.rglob("record.json")
    record = records.read_record(path.parent)
    task, arrays = load_scores(path.parent)
    assert record.metrics["nll"] == pytest.approx(task.losses(arrays).mean())
    assert 0 <= record.metrics["auc_0"] <= 1
    assert {curve for curve, *_ in task.curves(arrays)} >= {"AUC", "AUC, negative control"}
    assert {p.stem for p in (path.parent / "figures").glob("*.svg")} == {"referral", "calibration", "roc"}


def test_prepared_photographs_of_the_tests_are_whole(folder):
    """What they are checked by is what `bench data check` asks."""
    assert "200" not in photographs.check("retinopathy", folder)  # told by part
    assert "120 train, 20 val, 60 test" in photographs.check("retinopathy", folder)
