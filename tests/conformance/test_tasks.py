"""Every discovered task obeys the laws; `pytest tests/conformance -k NAME` checks one task.

Tasks on data that are not in the package are slow, and are skipped where the data are missing. Images must be
there if BENCH_REQUIRE_DATA=1. Of the names of one file on images, the first runs on the published ones, the
others on a few made-up ones (`truth.py`): they differ in the name of the data, which `test_data.py` reads.
UCI tables that are missing are made up in their published layout, and so are small CIFARs
(`tests/generated.py`), photographs of eyes (`tests/eyes.py`) and vectors of texts (`truth.py`). Tasks on a
user's own data get a committed file (`tests/given.py`).
"""

import re
import sys
import time
import types
import typing
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import eyes
import generated
import numpy as np
import pytest
import torch
import toys
from drawn import half_counts, names_in_legends, texts, unnamed
from given import GIVEN, flags
from plans import resolved
from published import need, of_task

import bench
from bench import cifar, cli, data, figures, tables
from bench.data import array_digest
from bench.errors import BenchError, UsageError
from bench.laws import tasks
from bench.photographs import photographs
from bench.runs import records, registry, resolution
from bench.runs.registry import misleads
from bench.runs.runner import finished, load_scores
from bench.spec import Layout, Undefined, misfit
from bench.studies import hmc_predictions, references, topics
from conformance import truth

EMBEDDED = [name for name, source in data.SOURCES.items() if not source.files]
EMBEDDED += [name for name, source in tables.SOURCES.items() if not source.folder]


def settings_of(name, **values):
    """Settings of a task under its preset smoke, but for `values`."""
    entry = registry.task(name)
    given = {**entry.fixed, **entry.presets.get("smoke", {}), **GIVEN.get(name, {}), **values}
    return registry.build(entry.cls.settings_class, given, "task")


def is_embedded(name):
    """Whether a task needs no data but those in the package."""
    return getattr(settings_of(name), "dataset", EMBEDDED[0]) in EMBEDDED


@pytest.fixture(scope="module")
def photographed(tmp_path_factory):
    """A folder of data with small prepared photographs of eyes."""
    return eyes.write_all(tmp_path_factory.mktemp("photographed"))


@pytest.fixture
def name(request, monkeypatch, tmp_path_factory):
    """The name of a task whose data are there."""
    dataset = getattr(settings_of(request.param), "dataset", None)
    if dataset in photographs.SOURCES:
        monkeypatch.setenv("BENCH_DATA", str(request.getfixturevalue("photographed")))
    elif dataset in tables.SOURCES:
        if tables.find(dataset) is None:  # made-up numbers in the table's form
            folder = tmp_path_factory.mktemp("generated")
            generated.write_public(folder, dataset)
            monkeypatch.setenv("BENCH_DATA", str(folder))
    elif dataset in cifar.SOURCES:
        monkeypatch.setattr(cifar, "load", generated.cifar)
        monkeypatch.setattr(hmc_predictions, "load", generated.chains)
    elif dataset in topics.SOURCES:
        monkeypatch.setattr(topics, "load", truth.small_topics)
    elif request.param in alike(request.param)[1:] and dataset not in EMBEDDED:
        small = replace(data.SOURCES[dataset], train=truth.SIZE, test=truth.TEST)
        monkeypatch.setitem(data.SOURCES, dataset, small)
        for reader in ("load", "unbalanced"):
            monkeypatch.setattr(data, reader, partial(truth.World().images, reader))
    else:
        need(*of_task(make(request.param)))
    return request.param


every_name = pytest.mark.parametrize("name", registry.tasks())


COLLAPSED = tasks.collapsed_predictions_are_scored

QUICK = ("split_digits", "diabetes_regression")
"""Tasks that the quick tests run: one of classes, one of numbers. All others are slow."""

every_task = pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in registry.tasks()],
    indirect=True,
)


def of_one_protocol():
    """Names that differ in more than their data; of the others one, on data of the package if it can be."""
    first = {}
    for name in sorted(registry.tasks(), key=is_embedded, reverse=True):
        entry = registry.task(name)
        protocol = {key: value for key, value in entry.fixed.items() if key != "dataset"}
        first.setdefault((entry.cls, repr(sorted(protocol.items()))), name)
    return first.values()


every_protocol = pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in of_one_protocol()],
    indirect=True,
)
"""For what is drawn, which is dear, and the same code whatever the data."""


def make(name, **values):
    """A task under its preset smoke."""
    return registry.task(name).cls(settings_of(name, **values))


def alike(name):
    """Names of the task's file on data that are not in the package, which are of one size."""
    return [
        n for n, e in registry.tasks().items() if e.file == registry.task(name).file and not is_embedded(n)
    ]


def method_for(name):
    """The dearest of the first methods that can do what the task needs; of tasks alike, for one of them.

    A study in closed form has none.
    """
    if make(name).spec.closed_form:
        return registry.NONE
    able = make(name).spec.requires <= registry.method("radial").provides
    return "radial" if able and name not in alike(name)[1:] else "map"


class Done(NamedTuple):
    """A finished run, made by the command."""

    directory: Path
    record: records.Record
    seconds: float
    """From the command to its end, once `bench` is imported."""


@pytest.fixture(scope="module")
def start_up(tmp_path_factory):
    """Seconds of a whole `bench` process with a small run in it: above what imports and first calls take."""
    began = time.monotonic()
    called = toys.call(["run", "map", "split_digits", "--preset", "smoke"], tmp_path_factory.mktemp("small"))
    assert called.returncode == 0, called.stderr
    return time.monotonic() - began


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Finished smoke runs by name, each made by the command, in this process, when it is first asked for."""
    done = {}

    def get(name):
        if name not in done:
            folder, began = tmp_path_factory.mktemp(name), time.monotonic()
            words = ["run", method_for(name), name, "--preset", "smoke", "--out", str(folder)]
            code = cli.main(words + flags(name))
            seconds = time.monotonic() - began
            assert code == 0
            (path,) = folder.rglob("record.json")
            done[name] = Done(path.parent, records.read_record(path.parent), seconds)
        return done[name]

    return get


def test_tasks_are_discovered():
    """The registry knows the first tasks, and one of them runs anywhere, so the laws below are not empty."""
    assert registry.tasks().keys() >= {"split_mnist", "split_fashion_mnist", "split_digits"}
    assert any(is_embedded(name) for name in registry.tasks())


# ---- what a task says


@every_name
@pytest.mark.parametrize("law", tasks.OF_WORDS, ids=lambda law: law.__name__)
def test_law_of_words(law, name):
    """What a task says; it needs no data."""
    law(make(name))


def test_ranked_tasks_name_two_anchors_that_they_take():
    """Two different methods in the settings of the preset; a task that is not ranked has none."""
    for name in registry.tasks():
        spec = make(name).spec
        if not spec.ranked:
            assert spec.baseline is spec.reference is None
            continue
        assert spec.baseline != spec.reference
        for anchor in (spec.baseline, spec.reference):
            chosen = resolved(anchor, name, "standard")  # refuses what lacks a capability
            assert (chosen.task_identity, chosen.method_identity) == (name, anchor)


def test_law_catches_a_file_that_does_not_say_what_would_mislead():
    """Negative control: a file without the paragraph; and one whose paragraph is the second of three."""
    assert misleads(toys.Peeks) == ""
    module = types.ModuleType("told", "A task.\n\nWhat would mislead: a\nmean.\n\nSource: none.\n")
    sys.modules["told"] = module
    try:
        assert misleads(type("Told", (), {"__module__": "told"})) == "a mean."
    finally:
        del sys.modules["told"]


@every_name
def test_target_is_a_file_name_and_comes_with_a_digest_of_its_reference(name, monkeypatch):
    """A reference posterior is found by it, is part of the targets, and changes the identity of the data."""
    task = make(name)
    if task.target is None:
        return
    assert task.target.startswith(registry.task(name).file)
    assert re.fullmatch(r"[A-Za-z0-9._+=,-]{1,120}", task.target)
    digest = task.data_digest()
    monkeypatch.setattr(references, "read", lambda target: {"reference": np.zeros(3)})
    assert "reference" in task.targets()
    assert task.data_digest() != digest


@every_name
@pytest.mark.parametrize("preset", resolution.PRESETS)
def test_every_preset_has_a_spec(name, preset):
    values = registry.task(name).presets.get(preset, {})
    spec = make(name, **values).spec
    assert spec.main_metric in spec.metrics


def another(annotation, value):
    """A valid value of a setting other than `value`."""
    parts = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Literal:
        return next(part for part in parts if part != value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value / 2 if 0 < value < 1 else value + 1
    if value == "auto":
        return 7
    if value is None:
        kind = next(part for part in parts if part is not type(None))
        literals = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
        if kind is float:
            return 0.5  # a share
        return literals[0] if literals else "other:name" if kind is str else 1
    raise NotImplementedError(f"a setting of the kind {annotation}")


def changeable():
    """Every setting of every task."""
    return [(name, flag) for name, entry in registry.tasks().items() for flag in entry.flags()]


@pytest.mark.parametrize(("name", "flag"), changeable())
def test_every_setting_is_part_of_the_identity(name, flag):
    """Two protocols never share a folder or a row of a board."""
    entry = registry.task(name)
    standard = registry.build(entry.cls.settings_class, dict(entry.fixed), "task")
    kind = typing.get_type_hints(entry.cls.settings_class)[flag]
    other = replace(standard, **{flag: another(kind, getattr(standard, flag))})
    assert resolution.identity(entry, standard, standard) == name
    assert resolution.identity(entry, other, standard).startswith(f"{name}+{flag}=")
    assert {field.name for field in fields(other)} == {*entry.flags(), *entry.fixed}


# ---- what a task does


@every_task
@pytest.mark.parametrize(
    "law", [law for law in tasks.OF_RUNS if law is not COLLAPSED], ids=lambda law: law.__name__
)
def test_law_of_runs(law, name, runs):
    """What a finished run left, and the scores of it."""
    law(*load_scores(runs(name).directory))


@every_protocol
def test_law_of_collapsed_predictions(name, runs):
    """Of one name of each protocol, since it scores four times what depends on no data."""
    COLLAPSED(*load_scores(runs(name).directory))


@every_task
@pytest.mark.parametrize("law", tasks.OF_RECORDS, ids=lambda law: law.__name__)
def test_law_of_records(law, name, runs):
    """What the record says of a finished run."""
    directory, record, _ = runs(name)
    law(load_scores(directory)[0], record)


@every_task
def test_record_has_the_scores_of_the_arrays(name, runs):
    directory, record, _ = runs(name)
    task, arrays = load_scores(directory)
    scores = task.score(arrays)
    assert records.split_metrics(scores, task.spec) == (record.metrics, record.undefined)
    assert array_digest(arrays) == record.provenance.arrays_digest


def test_law_catches_a_run_that_reads_the_targets(tmp_path):
    """Negative control: such a task fails under the runner."""
    with pytest.raises(BenchError, match="the targets of a task are not to be read by its run"):
        bench.run("mfvi", "toys:Peeks", out=tmp_path)


def test_law_catches_a_validation_metric_that_no_run_logs(runs):
    """Negative control: the record of a run that logged another metric; a search on it would find nothing."""
    directory, record, _ = runs("split_digits")
    task = load_scores(directory)[0]
    tasks.validation_metric_is_logged(task, record)
    with pytest.raises(AssertionError, match=f"logged no {task.spec.validation_metric}"):
        tasks.validation_metric_is_logged(task, record.model_copy(update={"validation": {"other": 1.0}}))


def test_law_catches_a_task_that_asks_for_half_of_the_draws(tmp_path):
    """Negative control: such a task, the task that it was made of, and one that never asks the engine."""
    few = {"task_settings": {"order": "joint"}, "out": tmp_path}
    half, sound = (bench.run("mfvi", f"toys:{task}", **few) for task in ("AsksForHalf", "OwnTask"))
    task, record = load_scores(half.directory)[0], records.read_record(half.directory)
    with pytest.raises(AssertionError, match=r"test_samples is 4, asked for were \[2\]"):
        tasks.draws_are_those_of_the_settings(task, record)
    record = records.read_record(sound.directory)
    tasks.draws_are_those_of_the_settings(task, record)
    with pytest.raises(AssertionError, match="does not say how many"):
        tasks.draws_are_those_of_the_settings(task, record.model_copy(update={"draws": []}))
    one_more = [*record.draws, record.draws[0].model_copy(update={"asked": 3})]
    with pytest.raises(AssertionError, match=r"asked for \[3\] draws"):
        tasks.draws_are_those_of_the_settings(task, record.model_copy(update={"draws": one_more}))


@pytest.mark.parametrize(
    "cheat",
    [
        lambda losses: losses * 0 + losses.mean(),  # the mean is right, the examples say nothing
        lambda losses: np.sort(losses),  # of the right values, in an order that no other run shares
        lambda losses: 1 - losses,  # the errors, where the metric is the accuracy
    ],
    ids=["constant", "sorted", "errors"],
)
def test_law_catches_losses_of_no_example(cheat, runs, monkeypatch):
    """Negative controls on split_digits."""
    task, arrays = load_scores(runs("split_digits").directory)
    tasks.losses_are_of_the_main_metric(task, arrays)
    honest = task.losses
    monkeypatch.setattr(task, "losses", lambda arrays: cheat(honest(arrays)), raising=False)
    with pytest.raises(AssertionError):
        tasks.losses_are_of_the_main_metric(task, arrays)


@pytest.mark.parametrize(
    ("cheat", "told"),
    [(lambda found: Undefined("sure"), "is undefined"), (lambda found: float("inf"), "lies outside")],
    ids=["undefined", "infinite"],
)
def test_law_catches_a_score_that_sure_predictions_have_not(cheat, told, runs, monkeypatch):
    """Negative controls: the main metric of `ood_digits` where all is sure of one class."""
    task, arrays = load_scores(runs("ood_digits").directory)
    tasks.collapsed_predictions_are_scored(task, arrays)
    honest, main = task.score, task.spec.main_metric

    def score(arrays):
        found = honest(arrays)
        is_sure = (arrays["log_probs"].max(-1) == 0).all()
        return found | {main: cheat(found[main])} if is_sure else found

    monkeypatch.setattr(task, "score", score)
    with pytest.raises(AssertionError, match=rf"\(sure of one class\): .*{told}"):
        tasks.collapsed_predictions_are_scored(task, arrays)


def test_collapses_are_told_apart(runs):
    """Of draws and classes all four; of stored means of draws those of classes; of what is neither none."""
    task, arrays = load_scores(runs("oracle_classification").directory)
    shape = arrays["log_probs"].shape
    found = {
        name: array["log_probs"].astype(float).copy()
        for name, array in tasks._collapses(arrays, {"log_probs": task.layouts()["log_probs"]})
    }
    for log_probs in found.values():
        assert log_probs.shape == shape
        assert np.exp(log_probs).sum(-1) == pytest.approx(1, abs=1e-3)
    assert (found["one draw"] == arrays["log_probs"][:, :1]).all()
    assert np.exp(found["no class told from another"]) == pytest.approx(0.25, abs=1e-3)
    assert (found["sure of one class"].argmax(-1) == 0).all()
    torn = found["each draw sure of another class"]
    assert (torn.argmax(-1) == np.arange(shape[1])[None, :, None] % 4).all()
    assert set(torn.ravel()) == {0.0, tasks.metrics.LOWEST}
    means = Layout("float16", ("N", 4), is_log_probs=True)
    names = [name for name, _ in tasks._collapses({"log_probs": np.zeros((5, 4))}, {"log_probs": means})]
    assert names == ["no class told from another", "sure of one class"]
    assert not list(tasks._collapses({"rows": np.zeros(3)}, {"rows": Layout("float32", ("N",))}))


def told(arrays):
    """Of arrays what `misfit` looks at."""
    return {key: (array.dtype.name, array.shape) for key, array in arrays.items()}


@every_task
def test_law_catches_arrays_of_another_layout(name, runs):
    """Negative controls: an array that is missing, of another type, with other axes, or one too many."""
    task, arrays = load_scores(runs(name).directory)
    layouts = task.layouts()
    if layouts is None:
        return
    for key, array in arrays.items():
        others = {other: kind for other, kind in told(arrays).items() if other != key}
        assert misfit(layouts, others) == f"the array {key} is missing"
        for cheat in (array.astype(complex), array[None], array[..., :0], array[:, None]):
            assert misfit(layouts, others | told({key: cheat})), key
        if array.shape[-1] > 1 and not isinstance(layouts[key].shape[-1], str):
            assert misfit(layouts, others | told({key: np.repeat(array, 2, -1)})), key
    assert misfit(layouts, told(arrays | {"extra": np.zeros(3)}))


def test_law_catches_samples_that_are_counted_otherwise_than_they_are():
    """Negative control: one mean and eighty variances of it would add log 80 to the log likelihood."""
    layouts = make("diabetes_regression", splits=2).layouts()
    found = {key: (layout.dtype, layout.shape) for key, layout in layouts.items()}
    for samples, widths, is_right in [
        (80, 80, True),
        (80, 1, True),
        (1, 1, True),
        (1, 80, False),
        (80, 2, False),
    ]:
        for rows in (1, 44):
            found["variance"] = ("float32", (2, widths, rows))
            for kind in ("float32", "float16"):  # the second of runs from before
                found["mean"] = (kind, (2, samples, 44))
                assert (misfit(layouts, found) is None) == is_right
    found["mean"] = ("float64", (2, 80, 44))
    assert misfit(layouts, found) == "the array mean is of float64, not of float32 or float16"


@every_protocol
def test_figures_are_drawn(name, runs, tmp_path):
    """Small pictures, of the same bytes as those that the run left."""
    directory, record, _ = runs(name)
    task, arrays = load_scores(directory)
    charts = task.figures(arrays)
    footer = figures.footer([record.label])
    paths = figures.save(charts, tmp_path, footer)
    assert [path.name for path in paths] == [
        f"{chart}.{ending}" for chart in charts for ending in ("svg", "png")
    ]
    for path in paths:
        content = path.read_bytes()
        assert content.startswith(b"<svg" if path.suffix == ".svg" else b"\x89PNG")
        assert len(content) < 2**20
        assert content == (directory / "figures" / path.name).read_bytes()


@every_protocol
def test_figures_say_what_they_show(name, runs):
    """Method, task, preset and seed; what each dashed line and dot is; counts in whole numbers."""
    directory, record, _ = runs(name)
    task, arrays = load_scores(directory)
    charts = task.figures(arrays)
    drawn = {path.stem: path.read_text() for path in (directory / "figures").glob("*.svg")}
    assert drawn.keys() == charts.keys()
    for chart, svg in drawn.items():
        said = texts(svg)
        for word in (record.method.identity, record.task.identity, f"{record.preset},seed{record.seed}"):
            assert word in "".join(said).replace(" ", "")
        assert not unnamed(charts[chart])
        assert not half_counts(charts[chart])
        assert names_in_legends(charts[chart]) <= set(said)


@every_protocol
def test_runs_are_compared(name, runs, tmp_path):
    """A run alone, and twice as two seeds: a table whose rows fit its header or sentences, and charts."""
    run = finished(runs(name).directory)
    for given in ([run], [run, replace(run, seed=run.seed + 1)]):
        found = type(run.task).compare(given)
        assert found.rows or found.sentences
        assert all(len(row) == len(found.header) for row in found.rows)
    footer = figures.footer(each.label for each in given)
    paths = figures.save(found.charts, tmp_path, footer)
    assert len(paths) == 2 * len(found.charts)  # of both: the dearer to draw
    for chart in found.charts.values():
        assert not unnamed(chart)
        assert not half_counts(chart)


@pytest.mark.slow
@every_task
def test_smoke_preset_takes_less_than_a_minute(name, runs, start_up):
    """From the command to its end, imports and figures included, and a small run's time too much."""
    assert start_up + runs(name).seconds < 60


@every_task
def test_problem_is_the_one_that_a_fitted_method_is_rebuilt_from(name, runs):
    """A study in closed form poses none, and leaves nothing that could predict."""
    if make(name).spec.closed_form:
        with pytest.raises(UsageError, match="no checkpoint"):
            bench.load(runs(name).directory)
        with pytest.raises(AttributeError, match="poses no problem"):
            make(name).problem()
        return
    fitted = bench.load(runs(name).directory)
    if make(name).spec.own_data:  # what predicts rows of the user's holds the method that does
        fitted = fitted.method
    problem = make(name).problem()
    assert problem.num_train == len(problem.train)
    inputs = torch.stack([problem.train[i][0] for i in range(3)])
    prediction = fitted.predict(inputs, 2, torch.Generator().manual_seed(0))
    assert prediction.log_score(torch.stack([problem.train[i][1] for i in range(3)])).isfinite().all()
