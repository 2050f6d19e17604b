"""Whole runs: what they leave, what stops them, and how they go on."""

import json
import logging
import math
import os
import re
import resource
import shutil
import signal
import time
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import toys
from plans import resolved

import bench
from bench import cli, metrics, randomness
from bench.data import array_digest
from bench.errors import BenchError, Diverged, OutputError, UsageError
from bench.laws.cases import Case
from bench.leaderboard.evidence import entries
from bench.runs import claim, records, registry, runner, setup
from bench.runs.plan import Plan
from bench.runs.resolution import resolve
from bench.runs.runner import load_scores
from bench.sweep import sweep
from bench.tasks import split_mnist

FILES = ["arrays.safetensors", "checkpoints", "curves.csv", "figures", "files.json", "log.txt", "record.json"]
WAITS = ["run", "toys:Waits", "split_digits", "--preset", "smoke", "--threads", "1"]
"""A run that waits in step 3 for its process to be ended, where the environment says so (`toys.Waits`)."""


def run(folder, method="mfvi", task="split_digits", **options):
    """A smoke run in a folder."""
    return bench.run(method, task, out=folder, **{"preset": "smoke"} | options)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A finished run of mfvi on split_digits; not to be changed."""
    return run(tmp_path_factory.mktemp("runs"))


def digest_of(directory):
    """Digest of a run's arrays."""
    return records.read_record(directory).provenance.arrays_digest


def one_line(text):
    """The one line on standard error that speaks for `bench`, and nothing like a traceback."""
    assert "Traceback" not in text, text
    (line,) = [line for line in text.splitlines() if line.startswith("bench: ")]
    return line


# ---- what a run leaves


def test_run_returns_its_directory_and_record(done):
    assert done.directory.parts[-3:] == ("split_digits+epochs=1,test_samples=4", "mfvi", "smoke-seed0")
    assert sorted(path.name for path in done.directory.iterdir()) == FILES
    assert done.record == records.read_record(done.directory)
    assert done.record.status == "completed"
    assert done.record.reason is None
    assert [fit.stage for fit in done.record.fits] == [f"step {t}" for t in range(1, 6)]
    assert sorted(p.name for p in (done.directory / "checkpoints").iterdir()) == [
        f"00{t - 1}-step-{t}.ckpt" for t in range(1, 6)
    ]
    assert done.record.command == "bench run mfvi split_digits --preset smoke --seed 0 --threads 1"


def test_curves_hold_matrix_history_and_validation(done):
    lines = [line.split(",") for line in (done.directory / "curves.csv").read_text().splitlines()]
    assert lines[0] == ["curve", "series", "x", "value"]
    matrix = [line for line in lines if line[0] == "accuracy" and line[1].startswith("pair")]
    assert len(matrix) == 25
    assert len([line for line in lines if line[0] == "average_accuracy (validation)"]) == 5
    for term in ("loss", "likelihood_term", "prior_term"):
        assert [line[1:3] for line in lines if line[0] == term] == [[f"step {t}", "1"] for t in range(1, 6)]


def test_log_tells_stages(done):
    log = (done.directory / "log.txt").read_text()
    assert "stage name=step 3 number=3 of=5" in log
    assert "completed in" in log


def test_record_is_what_its_arrays_score(done):
    """Score is pure: on a task that never saw its data, and it leaves the arrays as they are."""
    task, arrays = load_scores(done.directory)
    before = array_digest(arrays)
    scores = task.score(arrays)
    assert scores == task.score(arrays)
    assert array_digest(arrays) == before == done.record.provenance.arrays_digest
    assert records.split_metrics(scores, task.spec) == (done.record.metrics, done.record.undefined)
    assert not hasattr(task, "_images")


def test_loaded_method_predicts_as_its_run_did(done):
    """The run's last prediction, once more: of its inputs the test set stood first."""
    method = bench.load(done.directory)
    task, arrays = load_scores(done.directory)
    generator = torch.Generator().manual_seed(randomness.derive(0, "predict", "step 5", 5))
    again = metrics.store(method.predict(task.images.test_inputs, 4, generator).average())
    np.testing.assert_allclose(again.astype(float), arrays["log_probs"].astype(float), rtol=2e-3, atol=2e-3)
    assert len(method.history) == 1


def test_load_without_checkpoint_is_one_line(done, tmp_path):
    shutil.copytree(done.directory, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints"))
    with pytest.raises(
        UsageError, match=r"checkpoints/000-step-1.ckpt is missing, .* and 2 more; bench run --fo"
    ):
        bench.load(tmp_path / "run")
    (tmp_path / "run" / "files.json").unlink()  # as of runs from before the list
    with pytest.raises(UsageError, match="holds no checkpoint"):
        bench.load(tmp_path / "run")
    with pytest.raises(UsageError, match=r"holds no run: there is no record\.json"):
        bench.load(tmp_path)


def orders():
    """Every method in sequence, or jointly where it cannot go on from its posterior; two both ways."""
    for name, entry in registry.methods().items():
        both = name in ("map", "mfvi")
        marks = [] if both else pytest.mark.slow
        for order in ("sequential", "joint"):
            if both or (order == "sequential") == ("sequential" in entry.provides):
                yield pytest.param(name, order, marks=marks, id=f"{order}-{name}")


FEW_STEPS = {"hmc": {"burn": 2, "kept": 4, "leapfrog_steps": 2}}
"""Settings of methods whose preset smoke makes more gradients than equal arrays need."""


def test_method_that_cannot_go_on_is_refused_in_sequence(tmp_path):
    for name, entry in registry.methods().items():
        if "sequential" not in entry.provides:
            with pytest.raises(UsageError, match=r"lacks the capability sequential; methods that .* map, "):
                run(tmp_path, name)


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(("method", "order"), list(orders()))
def test_same_seed_same_arrays(tmp_path, method, order):
    few = {"order": order, "hidden": 2}
    options = {"method": method, "task_settings": few, "method_settings": FEW_STEPS.get(method, {})}
    choice = resolved(method, "split_digits", "smoke", task_settings=few)
    problem = choice.task.cls(choice.task_settings).problem()
    refusal = Case(choice.method.cls, asdict(choice.method_settings), problem).refusal()
    if refusal is not None:  # what a method cannot infer it refuses by name, and the run leaves nothing
        assert refusal.startswith(choice.method.file.split("_")[0])
        with pytest.raises(UsageError, match=re.escape(refusal)):
            run(tmp_path, **options)
        assert not [path for path in tmp_path.rglob("*") if path.is_file()]
        return
    same = [run(tmp_path / str(i), **options).record.provenance.arrays_digest for i in range(2)]
    assert same[0] == same[1]
    assert run(tmp_path, seed=6, **options).record.provenance.arrays_digest != same[0]


def test_user_s_own_method_and_task_run_load_and_show(tmp_path):
    done = run(tmp_path, "toys:OnlyFirstStep", "toys:OwnTask")
    assert done.directory.relative_to(tmp_path).parts[:2] == ("toys.OwnTask", "toys.OnlyFirstStep")
    assert done.record.method.name == "toys:OnlyFirstStep"
    assert bench.load(done.directory).__class__ is toys.OnlyFirstStep
    task, arrays = load_scores(done.directory)
    assert records.split_metrics(task.score(arrays), task.spec)[0] == done.record.metrics


def test_number_that_is_not_finite_stays_out_of_the_record_and_in_the_curves(tmp_path):
    done = run(tmp_path, "map", "toys:LogsInfinity")
    assert done.record.validation.keys() == {"average_accuracy", "next_task_entropy"}
    assert "nll (validation),fit,0.0,inf" in (done.directory / "curves.csv").read_text()


# ---- wrong arguments from Python


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "redial"}, "unknown method 'redial': did you mean radial"),
        ({"task": "split_mnits"}, "unknown task 'split_mnits': did you mean split_mnist"),
        ({"preset": "smok"}, "unknown preset 'smok': did you mean smoke"),
        ({"seed": -1}, "--seed -1: must be 0 or more"),
        ({"threads": 0}, "--threads 0: must be 1 or more"),
        ({"members": 0}, "--members 0: must be 1 or more"),
        ({"seed": "first"}, "--seed first: should be a valid integer"),
        ({"loggers": ["on"]}, "--loggers on: should be 'csv', 'tensorboard', 'wandb' or 'wandb-offline'"),
        ({"sed": 1}, "--sed 1: Unexpected keyword argument"),
        ({"method_settings": {"learning_rate": 0}}, "--method.learning_rate 0: .*greater than 0"),
        ({"method_settings": {"learning_rat": 1}}, "mfvi has no such setting; did you mean learning_rate"),
        ({"task_settings": {"dataset": "mnist"}}, "--task.dataset: split_digits has no such setting"),
        ({"trainer": {"devises": 2}}, "--trainer.devises 2: "),
        ({"method": "toys:CannotGoOn"}, "lacks the capability sequential; .* map, "),
        ({"method": "toys:NoSuchClass"}, "cannot import 'toys:NoSuchClass'"),
        ({"method": "toys:OwnTask"}, "'toys:OwnTask' is no Method"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_written(tmp_path, options, message):
    with pytest.raises(UsageError, match=message) as caught:
        run(tmp_path, **options)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


# ---- a directory that is taken


def forgotten(directory, **provenance):
    """Gives the record of a run another provenance."""
    record = records.read_record(directory)
    changed = record.provenance.model_copy(update=provenance)
    records.write_record(directory, record.model_copy(update={"provenance": changed}))


def test_finished_run_is_returned_and_force_makes_it_anew(tmp_path):
    first = run(tmp_path)
    assert first.notices == ()
    before = (first.directory / "record.json").read_bytes()
    (first.directory / "note.txt").write_text("mine")
    told = []
    again = run(tmp_path, observers=(lambda event, values: told.append((event, values.get("text"))),))
    sentence = f"{first.directory} holds this run, made {first.record.created}; --force makes it anew"
    assert (again.directory, again.record, again.notices) == (first.directory, first.record, (sentence,))
    assert told == [("notice", sentence)]  # and nothing was computed
    assert (first.directory / "record.json").read_bytes() == before
    assert sorted(path.name for path in first.directory.iterdir()) == sorted([*FILES, "note.txt"])
    new = run(tmp_path, force=True)
    assert sorted(path.name for path in new.directory.iterdir()) == FILES
    assert new.record.provenance.arrays_digest == first.record.provenance.arrays_digest


def test_finished_run_of_another_source_is_returned_and_told(tmp_path, done):
    shutil.copytree(done.directory, directory := tmp_path / Path(*done.directory.parts[-3:]))
    forgotten(directory, source_hash="0" * 64, task_file_hash=None)  # as before that was kept
    (notice,) = run(tmp_path).notices
    assert "by another version of the suite; --force makes it anew" in notice


@pytest.mark.parametrize("what", ["method_file", "task_file", "data", "threads", "trainer", "method"])
def test_another_run_in_the_way_is_one_line(tmp_path, monkeypatch, done, what):
    """Its identity is the same, but it is not what was asked for; nothing of it is touched."""
    shutil.copytree(done.directory, directory := tmp_path / Path(*done.directory.parts[-3:]))
    options = {"threads": {"threads": 2}, "trainer": {"trainer": {"stacked": True}}}.get(what, {})
    if what.endswith("_file"):
        forgotten(directory, **{f"{what}_hash": "0" * 64})
    elif what == "data":
        monkeypatch.setattr(split_mnist.SplitMNIST, "data_digest", lambda self: "0" * 64)
    elif what == "method":
        settings = registry.method("mfvi").cls.settings_class(learning_rate=0.5)
        monkeypatch.setattr(setup, "resolve", lambda plan: replace(resolve(plan), method_settings=settings))
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    try:
        with pytest.raises(
            UsageError, match=f"holds a completed run with another {what}: it is kept; --force"
        ):
            run(tmp_path, **options)
    finally:
        torch.set_num_threads(1)
    assert before == {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_precision_is_part_of_the_identity(tmp_path, done):
    """Two precisions are two runs; the tools that name a run by its record know it."""
    few = {"method": "map", "task": "toys:OwnTask", "trainer": {"precision": "bf16-mixed"}}
    low = run(tmp_path, **few)
    assert low.record.method.identity == "map+precision=bf16-mixed"
    assert low.directory.parent.name == "map+precision=bf16-mixed"
    assert entries.identities(low.record)[1] == low.record.method.identity
    compared = runner.finished(low.directory)
    assert compared.method_identity == low.record.method.identity
    assert compared.changed == {"trainer.precision": "bf16-mixed"}
    full = run(tmp_path, "map", "toys:OwnTask")
    assert full.record.method.identity == "map"
    assert digest_of(full.directory) != digest_of(low.directory)
    assert "--trainer.precision bf16-mixed" in low.record.command
    assert "--trainer" not in full.record.command


@pytest.mark.parametrize("force", [False, True])
def test_second_process_on_a_directory_is_refused(tmp_path, force):
    """While the first runs, the second gets one line and touches nothing, --force or not."""
    refused = []

    def second(event, values):
        if event == "log":
            with pytest.raises(UsageError, match="is being written by another process") as caught:
                run(tmp_path, force=force)
            refused.append(str(caught.value))

    done = run(tmp_path, observers=(second,))
    assert len(refused) == 6
    assert sorted(path.name for path in done.directory.iterdir()) == FILES


def stop_in_step_3(folder, **options):
    """A run that is stopped when its third fit has ended; returns its directory."""

    def stop(event, values):
        if event == "log" and values["step"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(folder, observers=(stop,), **options)
    (marker,) = folder.rglob("unfinished.json")
    return marker.parent


def test_stopped_run_is_visibly_unfinished_and_goes_on(tmp_path, done):
    directory = stop_in_step_3(tmp_path)
    assert sorted(p.name for p in directory.iterdir()) == ["checkpoints", "log.txt", "unfinished.json"]
    assert len(list((directory / "checkpoints").iterdir())) == 3
    with pytest.raises(UsageError, match="holds an unfinished run"):
        records.read_record(directory)
    epochs = []
    again = run(tmp_path, observers=(lambda event, values: epochs.append(event),))
    assert epochs.count("epoch") == 2
    assert again.record.provenance.arrays_digest == done.record.provenance.arrays_digest
    assert again.record.metrics == done.record.metrics
    assert [fit.steps for fit in again.record.fits] == [fit.steps for fit in done.record.fits]
    assert sorted(path.name for path in directory.iterdir()) == FILES


def test_seconds_are_those_of_all_starts(tmp_path):
    """However often a run is stopped, no second is counted twice and none is lost."""
    measured = 0.0
    for step in (2, 3, 4, None):

        def stop(event, values, step=step):
            if event == "log":
                time.sleep(0.5)  # seconds of the run, beside which those of its setting up are few
                if values["step"] == step:
                    raise KeyboardInterrupt

        began = time.perf_counter()
        with nullcontext() if step is None else pytest.raises(KeyboardInterrupt):
            last = run(tmp_path, observers=(stop,))
        measured += time.perf_counter() - began
        if step is not None:
            (marker,) = tmp_path.rglob("unfinished.json")
            kept = json.loads(marker.read_text())["seconds"]
            assert 0.5 * measured < kept < measured
    assert kept < last.record.seconds < measured
    assert last.record.seconds > 0.5 * measured
    # Days of earlier starts are counted as they were kept.
    again = stop_in_step_3(tmp_path, force=True) / "unfinished.json"
    again.write_text(json.dumps(json.loads(again.read_text()) | {"seconds": 1e5}))
    assert 1e5 < run(tmp_path).record.seconds < 1e5 + 60


def test_seconds_are_kept_while_the_run_goes_on(tmp_path, monkeypatch):
    """At most once a second: a process that is killed loses no more."""
    clock, kept = [0.0], []
    monkeypatch.setattr(claim.time, "perf_counter", lambda: clock[0])

    def observe(event, values):
        if event == "epoch":
            (marker,) = tmp_path.rglob("unfinished.json")
            kept.append(json.loads(marker.read_text())["seconds"])
            clock[0] += 0.4

    assert run(tmp_path, observers=(observe,)).record.seconds == 2.0
    assert kept == [0.0, 0.0, 0.0, 1.2, 1.2]


@pytest.mark.parametrize("content", ["", "[]", "{", '{"seconds": "long"}', '{"seconds": NaN}'])
def test_damaged_marker_is_one_line(tmp_path, content):
    directory = stop_in_step_3(tmp_path)
    (directory / "unfinished.json").write_text(content)
    with pytest.raises(UsageError, match=r"unfinished.json is damaged, .*; --force starts anew"):
        run(tmp_path)
    assert (directory / "unfinished.json").read_text() == content
    assert len(list((directory / "checkpoints").iterdir())) == 3


@pytest.mark.parametrize("there", ["nothing", "the folder of runs", "another run"])
def test_refused_run_leaves_no_folder(tmp_path, there):
    """Whatever of its path was not there is gone again, and nothing else."""
    out = tmp_path / "a" / "runs"
    if there != "nothing":
        out.mkdir(parents=True)
    if there == "another run":
        run(out, "tunables:Obedient", "tunables:Distance", preset="standard")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UsageError, match="obedient refuses this problem"):
        run(out, "tunables:Obedient", "tunables:Distance", method_settings={"trouble": "refuses"})
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("what", ["source", "threads", "trainer", "method"])
def test_unfinished_run_under_other_circumstances_is_one_line(tmp_path, monkeypatch, what):
    # The directory names only settings that differ from `standard`; when that preset itself moves, the
    # directory stays and the settings differ.
    directory = stop_in_step_3(tmp_path)
    options = {}
    if what == "source":
        monkeypatch.setattr(records, "source_hash", lambda: "another")
    elif what == "threads":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    elif what == "trainer":
        options = {"trainer": {"stacked": False}}
    else:
        settings = registry.method("mfvi").cls.settings_class(learning_rate=0.5)
        monkeypatch.setattr(setup, "resolve", lambda plan: replace(resolve(plan), method_settings=settings))
    with pytest.raises(UsageError, match=f"holds an unfinished run with another {what}; --force") as caught:
        run(tmp_path, **options)
    assert "\n" not in str(caught.value)
    assert len(list((directory / "checkpoints").iterdir())) == 3
    epochs = []
    run(tmp_path, force=True, observers=(lambda event, values: epochs.append(event),), **options)
    assert epochs.count("epoch") == 5


# ---- runs that go wrong


def test_predictions_beyond_their_stored_type_are_recorded_as_diverged(tmp_path):
    """They are finite, so that no law of predictions is broken; what float16 makes of them has no score."""
    told = r"diverged: mean of the predictions is beyond float16, and the metric joint_log_loss may not be"
    with pytest.raises(Diverged, match=told):
        run(tmp_path, "toys:PredictsHuge", task="oracle_regression", preset="smoke", task_settings={})
    (path,) = tmp_path.rglob("record.json")
    record = records.read_record(path.parent)
    assert record.status == "diverged"
    assert record.reason.startswith("diverged: mean of the predictions")
    assert set(record.metrics.values()) == {None}
    assert records.read_arrays(path.parent)["mean"].dtype == np.float16


def test_diverged_run_is_recorded_with_stage_and_step(tmp_path, done):
    with pytest.raises(Diverged, match="epoch 1, step 2: the loss is nan; recorded in"):
        run(tmp_path, "toys:TurnsNaN", method_settings={"at_step": 2})
    (path,) = tmp_path.rglob("record.json")
    record = records.read_record(path.parent)
    assert record.status == "diverged"
    assert record.reason == "diverged at stage 'step 1', epoch 1, step 2: the loss is nan"
    assert record.metrics.keys() == record.undefined.keys() == done.record.metrics.keys()
    assert set(record.metrics.values()) == {None}
    assert set(record.undefined.values()) == {"the run diverged"}
    assert record.provenance.arrays_digest is None
    assert not (path.parent / "unfinished.json").exists()
    with pytest.raises(Diverged, match=r"the loss is nan; .* holds this run, made .*; --force makes it anew"):
        run(tmp_path, "toys:TurnsNaN", method_settings={"at_step": 2})


def test_failed_run_is_recorded_and_the_next_one_replaces_it(tmp_path, monkeypatch):
    with pytest.raises(BenchError, match="this method has a bug; the traceback is in") as caught:
        run(tmp_path, "toys:HasBug")
    assert caught.value.exit_code == 1
    assert "\n" not in str(caught.value)
    (path,) = tmp_path.rglob("record.json")
    record = records.read_record(path.parent)
    assert (record.status, record.reason) == ("failed", "failed: RuntimeError: this method has a bug")
    assert set(record.metrics.values()) == {None}
    assert "says so in two lines" in (path.parent / "log.txt").read_text()
    monkeypatch.delattr(toys.HasBug, "loss_terms")
    again = run(tmp_path, "toys:HasBug")
    assert again.record.status == "completed"
    assert "Traceback" not in (again.directory / "log.txt").read_text()


def test_method_that_ends_the_process_is_a_failed_run(tmp_path):
    with pytest.raises(BenchError, match="failed: SystemExit: 0; the traceback is in"):
        run(tmp_path, "toys:Exits")
    (path,) = tmp_path.rglob("record.json")
    assert records.read_record(path.parent).status == "failed"


def test_missing_file_of_a_method_is_its_bug_and_no_full_disk(tmp_path):
    with pytest.raises(BenchError, match="failed: FileNotFoundError") as caught:
        run(tmp_path, "toys:MissesFile")
    assert caught.value.exit_code == 1


def test_score_with_a_bug_is_a_failed_run(tmp_path):
    with pytest.raises(BenchError, match="failed: ValueError: score gave"):
        run(tmp_path, "map", "toys:CannotScore")
    (path,) = tmp_path.rglob("record.json")
    assert records.read_record(path.parent).status == "failed"


@pytest.mark.parametrize("task", ["toys:CannotDraw", "toys:CannotCurve", "toys:CurvesOfNothing"])
def test_task_that_cannot_show_its_run_keeps_it(tmp_path, monkeypatch, task):
    """Figures or curves with a bug cost themselves alone; once mended, `bench figures` makes both."""
    done = run(tmp_path, "map", task, preset="standard")
    what = "figures" if task == "toys:CannotDraw" else "curves"
    assert done.record.status == "completed"
    (notice,) = done.notices
    assert notice.startswith(f"the task cannot make its {what}: ")
    assert notice.endswith(f"once mended, bench figures {done.directory} makes them")
    assert "Traceback" in (done.directory / "log.txt").read_text()
    assert (done.directory / "figures").exists() == (what == "curves")
    rows = records.read_curves(done.directory)
    assert ("accuracy" in {row.curve for row in rows}) == (what == "figures")
    assert {"loss", "average_accuracy (validation)"} <= {row.curve for row in rows}
    with pytest.raises(UsageError, match=rf"^the {what} of .*Error|^no curve$"):
        runner.redraw(done.directory)

    whole = run(tmp_path / "whole", "map", "toys:OwnTask", preset="standard")
    monkeypatch.delattr(getattr(toys, task.partition(":")[2]), what)
    drawn = {path.name for path in runner.redraw(done.directory)}
    assert drawn == {path.name for path in (whole.directory / "figures").iterdir()}
    assert (done.directory / "curves.csv").read_bytes() == (whole.directory / "curves.csv").read_bytes()


def test_drawing_again_changes_no_curve(tmp_path, done):
    shutil.copytree(done.directory, tmp_path / "run")
    runner.redraw(tmp_path / "run")
    again, before = (folder / "curves.csv" for folder in (tmp_path / "run", done.directory))
    assert again.read_bytes() == before.read_bytes()


def test_score_with_a_bug_keeps_the_arrays(tmp_path, done):
    with pytest.raises(BenchError, match="failed: ValueError: score gave"):
        run(tmp_path, "map", "toys:CannotScore")
    (path,) = tmp_path.rglob("record.json")
    assert array_digest(records.read_arrays(path.parent)) == digest_of(path.parent)


def test_diagnostics_that_are_no_numbers_stay_out_of_the_record(tmp_path):
    record = run(tmp_path, "toys:SaysNonsense", "toys:OwnTask").record
    assert [fit.diagnostics for fit in record.fits] == 5 * [{"good": 1.0}]


DEFECTS = {
    "settings_class = None": "settings_class",
    "def __init__(self, settings, data_dir=None): raise KeyError('lost')": "KeyError: 'lost'",
    "spec = property(lambda self: 1 / 0)": "ZeroDivisionError: division by zero",
    "def data_digest(self): raise RuntimeError('no digest')": "RuntimeError: no digest",
    "def data_digest(self): raise SystemExit(0)": "SystemExit: 0",
    "settings_class = s.settings(type('S', (), {'__annotations__': {'x': object}, 'x': min}))": "JSON",
    "def problem(self): raise RuntimeError('none')": "failed: RuntimeError: none",
    "def run(self, engine): return 3": "failed: ",
    "def run(self, engine): return {'value': [object()]}": "failed: ",
    "def score(self, arrays): return None": "failed: ",
}


@pytest.mark.parametrize("body", DEFECTS)
def test_every_defect_of_a_task_is_one_line_and_one_cell_of_a_sweep(tmp_path, monkeypatch, body):
    source = f"import tunables, bench.settings as s\nclass Own(tunables.Distance):\n    {body}\n"
    name = f"defect{list(DEFECTS).index(body)}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    out = tmp_path / "runs"
    with pytest.raises(BenchError) as caught:
        run(out, "tunables:Obedient", f"{name}:Own")
    assert "\n" not in str(caught.value)
    assert DEFECTS[body] in str(caught.value)
    failed = "failed" in str(caught.value)
    assert len(list(tmp_path.rglob("record.json"))) == failed
    assert out.exists() == failed
    cell = Plan(method="tunables:Obedient", task=f"{name}:Own", preset="smoke", out=out)
    assert sweep.run_cell(cell).status == ("failed" if failed else "refused")


def test_targets_are_locked_while_a_task_runs(tmp_path):
    with pytest.raises(BenchError, match="failed: RuntimeError: the targets of a task are not to be read"):
        run(tmp_path, "map", "toys:Peeks")


@pytest.mark.parametrize("place", ["below a file", "/proc"])
def test_directory_that_cannot_be_written_is_one_line(tmp_path, place):
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "runs" if place == "below a file" else "/proc/runs"
    with pytest.raises(OutputError, match=r"cannot write .*; choose another --out") as caught:
        run(out)
    assert caught.value.exit_code == 5


@pytest.mark.parametrize("name", ["001-step-2.ckpt", "arrays.safetensors", "curves.csv", "record.json"])
def test_full_disk_at_any_file_is_one_line_and_the_run_goes_on(tmp_path, monkeypatch, done, name):
    real = os.replace

    def full(source, target):
        if str(target).endswith(name):
            raise OSError(28, "No space left on device", str(target))
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(OutputError, match="No space left on device") as caught:
            run(tmp_path)
    assert "\n" not in str(caught.value)
    (marker,) = tmp_path.rglob("unfinished.json")
    present = sorted(path.name for path in marker.parent.rglob("*"))
    assert name not in present
    assert "record.json" not in present
    assert not [path for path in present if path.endswith(".writing")]
    assert run(tmp_path).record.provenance.arrays_digest == done.record.provenance.arrays_digest


def test_full_disk_under_the_log_is_one_line(tmp_path, monkeypatch, capsys):
    """Logging's own answer to a failing stream would be a traceback for every line of the log."""

    def full(self):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(logging.StreamHandler, "flush", full)
    with pytest.raises(OutputError, match=r"log\.txt: No space left on device"):
        run(tmp_path)
    monkeypatch.undo()
    assert "Traceback" not in capsys.readouterr().err
    assert run(tmp_path).record.status == "completed"


# ---- processes


def wait_for(process, condition, seconds=600):
    """Waits until a condition holds while the process lives."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    pytest.fail("the run did not get so far")


def in_step_3(out):
    """Whether the run below a folder trains its third step."""
    log = next(out.rglob("log.txt"), None)
    return log is not None and "stage name=step 3" in (text := log.read_text()) and "step 4" not in text


@pytest.fixture
def call(capsys):
    """Calls `bench ARGUMENTS` in this process; returns exit code and standard error."""

    def call(*arguments):
        capsys.readouterr()
        return cli.main([str(a) for a in arguments]), capsys.readouterr().err

    return call


@pytest.mark.slow
def test_killed_run_goes_on_to_the_numbers_of_an_undisturbed_one(tmp_path, call):
    """`kill -9` in step 3, a second process meanwhile, and the same command again."""
    command = [*WAITS, "--out"]
    process = toys.start([*command, "killed"], tmp_path, env=toys.environment(WAITS_IN_FIT="3"))
    wait_for(process, lambda: in_step_3(tmp_path / "killed"))
    process.send_signal(signal.SIGSTOP)
    code, err = call(*command, tmp_path / "killed")
    process.send_signal(signal.SIGKILL)
    assert code == 2
    assert "is being written by another process" in one_line(err)
    process.communicate()
    (directory,) = [path.parent for path in (tmp_path / "killed").rglob("log.txt")]
    assert process.returncode == -signal.SIGKILL
    names = {path.name for path in directory.rglob("*")}
    assert "unfinished.json" in names
    marker = json.loads((directory / "unfinished.json").read_text())
    (directory / "unfinished.json").write_text(json.dumps(marker | {"seconds": marker["seconds"] + 1000}))
    assert "record.json" not in names
    assert {"000-step-1.ckpt", "001-step-2.ckpt"} <= names
    code, err = call("show", directory)
    assert code == 2
    assert "holds an unfinished run" in one_line(err)

    for folder in ("killed", "whole"):
        code, err = call(*command, tmp_path / folder)
        assert code == 0, err
    (undisturbed,) = [path.parent for path in (tmp_path / "whole").rglob("record.json")]
    assert digest_of(directory) == digest_of(undisturbed)
    assert records.read_record(directory).seconds > 1000  # what the process that was killed has kept counts
    log = (directory / "log.txt").read_text()
    assert log.count("bench run toys:Waits split_digits") == 2


@pytest.mark.slow
def test_ctrl_c_ends_with_one_line_and_130(tmp_path):
    process = toys.start(WAITS, tmp_path, env=toys.environment(WAITS_IN_FIT="3"))
    wait_for(process, lambda: in_step_3(tmp_path))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130
    assert one_line(err) == "bench: stopped; the same command goes on from here"
    assert out == ""
    (marker,) = tmp_path.rglob("unfinished.json")
    assert json.loads(marker.read_text())["seed"] == 0
    assert not list(tmp_path.rglob("record.json"))


@pytest.mark.slow
def test_file_size_limit_is_a_full_disk(tmp_path, call):
    """A real write that fails half-way: one line, exit 5, nothing half-written, and the run goes on."""
    command = ["run", "mfvi", "split_digits", "--preset", "smoke", "--threads", "1"]

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    process = toys.start(command, tmp_path, preexec_fn=limit)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 5, err
    assert one_line(err).endswith("000-step-1.ckpt: File too large")
    assert out == ""
    present = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
    assert present == ["log.txt", "unfinished.json"]
    code, err = call(*command, "--out", tmp_path / "runs")
    assert code == 0, err


@pytest.mark.slow
def test_two_processes_train_one_run(tmp_path, done):
    """DDP: one record, written once; and the same command goes on with a run that was stopped."""
    ddp = ["--trainer.accelerator", "cpu", "--trainer.devices", "2", "--trainer.strategy", "ddp"]
    command = ["run", "mfvi", "split_digits", "--preset", "smoke", "--threads", "1", *ddp]
    finished = toys.call(command, tmp_path)
    assert finished.returncode == 0, finished.stderr
    (path,) = tmp_path.rglob("record.json")
    assert finished.stdout.splitlines() == [str(path.parent.relative_to(tmp_path))]
    record = records.read_record(path.parent)
    assert sorted(p.name for p in path.parent.iterdir()) == FILES
    assert (path.parent / "log.txt").read_text().count("bench run mfvi") == 1
    assert [fit.steps for fit in record.fits] == [fit.steps for fit in done.record.fits] == [3, 3, 3, 3, 2]
    task, arrays = load_scores(path.parent)
    assert records.split_metrics(task.score(arrays), task.spec)[0] == record.metrics

    # As if it had been killed after step 3.
    for name in ("record.json", "arrays.safetensors", "curves.csv"):
        (path.parent / name).unlink()
    for number in (3, 4):
        next((path.parent / "checkpoints").glob(f"00{number}-*")).unlink()
    trainer = {"accelerator": "cpu", "devices": 2, "strategy": "ddp"}
    plan = Plan(method="mfvi", task="split_digits", preset="smoke", trainer=trainer)
    (path.parent / "unfinished.json").write_text(json.dumps(setup.set_up(plan).fingerprint | {"threads": 1}))
    again = toys.call(command, tmp_path)
    assert again.returncode == 0, again.stderr
    assert digest_of(path.parent) == record.provenance.arrays_digest


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("method", registry.methods())
def test_every_method_runs_on_the_toy_problem_or_says_why_not(tmp_path, method):
    options = {"task": "toy_regression", "task_settings": {"epochs": 3, "test_samples": 8, "hidden": 10}}
    refused = {"linear": "a network", "vgr": "weighted", "replay": "weighted"}
    if method in refused:
        with pytest.raises(UsageError, match=f"^{method}.*{refused[method]}"):
            run(tmp_path, method, **options)
        return
    record = run(tmp_path, method, **options).record
    assert record.status == "completed"
    assert math.isfinite(record.metrics["test_nll"])
    assert len(record.fits) == registry.method(method).members
