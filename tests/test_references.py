"""Reference posteriors: what is refused, what is kept, and how a task finds it."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

import bench
from bench import cli, metrics
from bench.contract import Undefined
from bench.data import array_digest
from bench.diagnostics import RHAT_LIMIT
from bench.errors import DataError, UsageError
from bench.leaderboard.evidence.references import add
from bench.methods.mfvi import MFVI
from bench.runs import records, registry
from bench.runs.runner import load_scores, task_of
from bench.studies import references
from bench.studies.references import Reference

FEW = {"epochs": 1, "repetitions": 2, "test_samples": 4}
TARGET = "iris_depth-depth=2"


def change(run, **parts):
    """Rewrites entries of the record; a dictionary is merged into its part, an empty one empties it."""
    record = json.loads((run / "record.json").read_text())
    for name, value in parts.items():
        record[name] = record[name] | value if isinstance(value, dict) and value else value
    (run / "record.json").write_text(json.dumps(record))


def disguise(run):
    """Makes the record say that chains mixed, and that a commit holds the source."""
    change(
        run,
        diagnostics={"prediction_rhat": 1.01},
        provenance={"commit": "0" * 40, "dirty": False},
    )


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A run of mfvi in the guise of a sampler that mixed, made without references; not to be changed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(references, "FOLDER", tmp_path_factory.mktemp("none"))
        folder = tmp_path_factory.mktemp("runs")
        run = bench.run("mfvi", "iris_depth", seed=2, task_settings=FEW, out=folder).directory
    disguise(run)
    return run


@pytest.fixture
def run(good, tmp_path):
    """A copy of it that may be changed."""
    return Path(shutil.copytree(good, tmp_path / "run"))


@pytest.fixture(autouse=True)
def sampler(monkeypatch):
    """Mfvi says that its draws leave the posterior invariant, for it is fast."""
    monkeypatch.setattr(MFVI, "provides", MFVI.provides | {"invariant"})


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder that is that of the references."""
    monkeypatch.setattr(references, "FOLDER", tmp_path / "references")
    return tmp_path / "references"


def iris(**values):
    """The task of the runs."""
    cls = registry.task("iris_depth").cls
    return cls(registry.build(cls.settings_class, values, "task"))


def test_reference_is_kept_and_says_where_it_comes_from(good, folder):
    path = add(good)
    assert path == folder / f"{TARGET}.json"
    assert sorted(p.name for p in folder.iterdir()) == [f"{TARGET}.json", f"{TARGET}.safetensors"]
    record = records.read_record(good)
    found = Reference.model_validate_json(path.read_bytes())
    arrays = references.read(TARGET)
    assert found.digest == array_digest(arrays)
    assert (found.target, found.seed, found.commit, found.method) == (TARGET, 2, "0" * 40, "mfvi")
    assert (found.command, found.task, found.task_version) == (record.command, record.task.identity, 1)
    assert found.diagnostics == {"prediction_rhat": 1.01}
    fits = metrics.restore(records.read_arrays(good)["log_probs"])
    np.testing.assert_allclose(np.exp(metrics.restore(arrays["reference"])), np.exp(fits).mean(0), atol=1e-3)


def test_task_scores_against_it_under_any_budget(good, folder, tmp_path):
    """Before: no value and why. After: one, in every run of the same posterior, and none of another."""
    before = iris()
    assert isinstance(before.score(load_scores(good)[1])["agreement"], Undefined)
    digest = before.data_digest()
    add(good)
    assert iris().data_digest() != digest
    assert iris(repetitions=7, epochs=3).targets().keys() == {"labels", "reference"}
    assert iris(depth=1).targets().keys() == {"labels"}

    done = bench.run("map", "iris_depth", task_settings=FEW | {"repetitions": 3}, out=tmp_path)
    assert done.record.metrics["total_variation"] is not None
    assert done.record.undefined == {}
    # The run keeps the reference that it was scored against: the score is the same without the file.
    shutil.rmtree(folder)
    task, arrays = load_scores(done.directory)
    assert records.split_metrics(task.score(arrays), task.spec)[0] == done.record.metrics
    # The run that became the reference is at no distance from its own average.
    own = load_scores(good)[1]
    average = np.log(np.exp(metrics.restore(own["log_probs"])).mean(0))
    own |= {"log_probs": average[None], "reference": average}
    assert iris(repetitions=1).score(own)["agreement"] == 1
    assert iris(repetitions=1).score(own)["total_variation"] == pytest.approx(0, abs=1e-12)


def test_reference_that_is_there_is_kept_and_force_replaces_it(run, folder):
    add(run)
    change(run, seed=5)
    with pytest.raises(UsageError, match="is there already: it is kept; --force replaces it"):
        add(run)
    path = add(run, force=True)
    assert Reference.model_validate_json(path.read_bytes()).seed == 5


def tamper(run):
    change(run, metrics={"accuracy": 1.0 if records.read_record(run).metrics["accuracy"] < 1 else 0.0})


def rhat(value):
    """Sets it."""
    return lambda run: change(run, diagnostics={"prediction_rhat": value})


def diverge(run):
    metrics = records.read_record(run).metrics
    nothing = {"metrics": dict.fromkeys(metrics), "undefined": dict.fromkeys(metrics, "the run diverged")}
    change(run, status="diverged", reason="the loss is nan", **nothing)


REFUSED = {
    "not mixed": (rhat(1.2), r"did not mix: R-hat of its predictions is 1\.200, .* 1\.05"),
    "just not mixed": (rhat(RHAT_LIMIT * (1 + 1e-9)), "did not mix"),
    "does not say": (lambda run: change(run, diagnostics={}), "does not say whether it mixed"),
    "smoke": (lambda run: change(run, preset="smoke"), "is a smoke run"),
    "dirty": (lambda run: change(run, provenance={"dirty": True}), "was made from changed source"),
    "outside git": (
        lambda run: change(run, provenance={"commit": None, "source_hash": "0" * 64}),
        "outside a git repository",
    ),
    "failed": (lambda run: change(run, status="failed", reason="failed: E"), "a defect is no evidence"),
    "diverged": (diverge, "diverged: a reference needs a completed run"),
    "tampered": (tamper, "the metrics of the record are not those of its arrays"),
    "another version": (lambda run: change(run, task={"version": 2}), "is of version 2 of iris_depth, now 1"),
    "no run": (lambda run: (run / "record.json").unlink(), "holds no run"),
    "no arrays": (lambda run: (run / "arrays.safetensors").unlink(), "holds no arrays"),
}


@pytest.mark.parametrize(("spoil", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_reference_is_refused_in_one_line(run, folder, spoil, message):
    spoil(run)
    with pytest.raises(UsageError, match=message) as caught:
        add(run)
    assert "\n" not in str(caught.value)
    assert not folder.exists()


def test_method_that_does_not_say_that_it_is_invariant_makes_no_reference(run, tmp_path, monkeypatch):
    """Whatever its record says: it is asked of the method of today."""
    monkeypatch.undo()
    capabilities = [*records.read_record(run).method.capabilities, "invariant"]
    change(run, method={"capabilities": capabilities})
    with pytest.raises(UsageError, match=r"is a run of mfvi, whose draws do not .*: hmc") as caught:
        add(run, tmp_path / "references")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "references").exists()


def test_task_without_a_target_keeps_no_reference(folder, tmp_path):
    few = {"epochs": 1, "test_samples": 4}
    run = bench.run("mfvi", "split_digits", task_settings=few, out=tmp_path).directory
    disguise(run)
    assert task_of(records.read_record(run)).target is None
    with pytest.raises(UsageError, match="split_digits keeps no reference posterior"):
        add(run)


def test_absent_reference_is_empty(folder):
    assert references.read(TARGET) == {}


def test_damaged_reference_is_one_line(good, folder):
    add(good)
    path = folder / f"{TARGET}.safetensors"
    arrays = safetensors.numpy.load(path.read_bytes())
    safetensors.numpy.save_file({"reference": arrays["reference"] * 2}, path)
    with pytest.raises(DataError, match="their digests differ"):
        references.read(TARGET)
    path.write_bytes(b"nothing")
    with pytest.raises(DataError, match="cannot be read"):
        references.read(TARGET)
    path.unlink()
    with pytest.raises(DataError, match="cannot be read") as caught:
        references.read(TARGET)
    assert "\n" not in str(caught.value)


def test_command_line(good, run, tmp_path, capsys):
    to = tmp_path / "elsewhere"
    assert cli.main(["reference", "add", str(good), "--to", str(to)]) == 0
    assert capsys.readouterr().out.strip() == str(to / f"{TARGET}.json")
    change(run, diagnostics={})
    assert cli.main(["reference", "add", str(run), "--to", str(to), "--force"]) == UsageError.exit_code
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1


# ---- the references of the project


def test_every_reference_is_whole_and_of_the_present_version():
    """Whatever is there by now: readable, mixed, and of a task that still poses that posterior."""
    versions = {}
    for entry in registry.tasks().values():
        task = entry.cls(registry.build(entry.cls.settings_class, dict(entry.fixed), "task"))
        if task.target is not None:
            versions[task.target.split("-")[0]] = task.spec.version
    names = {p.name for p in references.FOLDER.iterdir()} - {"README.md"}
    descriptions = sorted(references.FOLDER.glob("*.json"))
    stems = [path.name.removesuffix(".json") for path in descriptions]
    assert names == {f"{stem}.{kind}" for stem in stems for kind in ("json", "safetensors")}
    for path in descriptions:
        found = Reference.model_validate_json(path.read_bytes())
        assert path.name == f"{found.target}.json"
        assert found.task_version == versions[found.target.split("-")[0]]
        assert found.diagnostics["prediction_rhat"] <= RHAT_LIMIT
        assert references.read(found.target)
