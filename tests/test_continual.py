"""What tasks of continual learning share: the division of the data, and measures of a triangular matrix."""

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from plans import resolved

import bench
from bench import cli
from bench.contract import FinishedRun, Row
from bench.errors import UsageError
from bench.runs import records, registry
from bench.runs.runner import finished, load_scores
from bench.studies import continual


def settings(**values):
    """Settings of coresets; none are kept but for `values`."""
    standard = {"coreset": "none", "coreset_size": 3, "coreset_epochs": 1}
    return SimpleNamespace(**standard | {"coreset_prior": "posterior", "coreset_only": False} | values)


LABELS = torch.tensor([0, 1] * 20 + [2] * 25)
INPUTS = torch.randn(65, 1, 2, 3, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("coreset", ["none", "k_center", "random"])
def test_division_is_of_all_examples_of_the_classes(coreset):
    train, val, kept = continual.divide(INPUTS, LABELS, (0, 2), settings(coreset=coreset))
    of_classes = (LABELS != 1).nonzero().squeeze(1)
    assert torch.equal(torch.cat([train, val, kept]).sort().values, of_classes)
    assert val.tolist() == [36, 38, 63, 64]  # the last 2 of 20, the last 2 of 25
    assert len(kept) == (0 if coreset == "none" else 3)
    assert torch.equal(train, train.sort().values)


def test_coreset_must_leave_something_to_train_on():
    assert len(continual.divide(INPUTS, LABELS, (0,), settings(coreset="random", coreset_size=17)).train) == 1
    message = "--task.coreset_size 18: step 3 has 18 training examples in all"
    for coreset in ("random", "k_center"):
        with pytest.raises(UsageError, match=message):
            continual.divide(INPUTS, LABELS, (0,), settings(coreset=coreset, coreset_size=18), step=2)


def test_size_means_nothing_without_a_coreset():
    assert len(continual.divide(INPUTS, LABELS, (0,), settings(coreset_size=10**6)).train) == 18


TRIANGLE = np.array([[0.5, np.nan, np.nan], [0.75, 1.0, np.nan], [0.25, 0.5, 0.75]])


def test_measures_of_a_triangle_by_hand():
    """No measure looks at s > t."""
    scores = continual.scores(TRIANGLE, [1.0, 2.0, 6.0])
    assert scores.keys() == continual.measures().keys()
    assert scores == {
        "average_accuracy": pytest.approx(0.5),
        "average_nll": pytest.approx(3.0),
        "learning_accuracy": pytest.approx(0.75),
        "minimum_learning_accuracy": 0.5,
        "forgetting": pytest.approx((0.5 + 0.5) / 2),
        "backward_transfer": pytest.approx((-0.25 - 0.5) / 2),
    }


def test_a_step_that_is_known_best_at_last_counts_against_forgetting():
    """By hand: 0.25 gained on the first step, 0.5 lost on the second."""
    matrix = np.array([[0.5, np.nan, np.nan], [0.25, 1.0, np.nan], [0.75, 0.5, 1.0]])
    assert continual.scores(matrix, [0.0])["forgetting"] == (-0.25 + 0.5) / 2


def test_forward_transfer_is_of_the_step_before():
    """A[1, 2] and A[2, 3] less chance; nothing else, such as what is known two steps ahead."""
    matrix = np.array([[0.5, 0.9, 0.1], [0.75, 1.0, 0.7], [0.25, 0.5, 0.75]])
    found = continual.scores(matrix, [1.0], chance=0.2)
    assert found.keys() == continual.measures(ahead=True).keys()
    assert found["forward_transfer"] == pytest.approx((0.9 + 0.7) / 2 - 0.2)
    elsewhere = matrix + np.array([[0, 0, 0.5], [0, -0.5, 0], [0.1, 0, 0.2]])
    assert continual.scores(elsewhere, [1.0], chance=0.2)["forward_transfer"] == found["forward_transfer"]


def test_curves_leave_out_what_was_not_measured():
    rows = continual.curves(TRIANGLE, "part")
    assert [(r.series, r.x, r.value) for r in rows] == [
        ("part 1", 1, 0.5),
        ("seen parts", 1, 0.5),
        ("part 1", 2, 0.75),
        ("part 2", 2, 1.0),
        ("seen parts", 2, 0.875),
        ("part 1", 3, 0.25),
        ("part 2", 3, 0.5),
        ("part 3", 3, 0.75),
        ("seen parts", 3, 0.5),
    ]


def test_charts_say_their_notes_and_leave_out_what_was_not_measured():
    for chart in continual.charts(TRIANGLE, "part", 0.5, ["this is a note"]).values():
        text = chart.to_json()
        assert "this is a note" in text
        assert "NaN" not in text
        json.loads(text)
    heat_map = continual.charts(TRIANGLE, "part", 0.5)["accuracy_matrix"].to_dict()
    assert len(heat_map["data"]["values"]) == 6


# ---- several runs in one figure


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs in a second each: two seeds, a variant, a contrast task, joint training."""
    folder = tmp_path_factory.mktemp("runs")
    few = {"epochs": 1, "test_samples": 2, "hidden": 4}
    chosen = [
        ("split_digits", 0, {}),
        ("split_digits", 1, {}),
        ("split_digits", 0, {"coreset": "random", "coreset_epochs": 1}),
        ("split_digits", 0, {"order": "joint"}),
        ("split_digits_multi_head", 0, {}),
    ]
    return [
        str(bench.run("map", task, seed=seed, task_settings=few | values, out=folder).directory)
        for task, seed, values in chosen
    ]


def test_comparison_has_a_panel_per_task_and_a_line_per_variant(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli.output, "_width", 200)
    assert cli.main(["figures", *runs, "--to", "figures"]) == 0
    shown = capsys.readouterr().out
    assert shown.split()[:4] == [
        "figures/accuracy.svg",
        "figures/accuracy.png",
        "figures/gradients.svg",
        "figures/gradients.png",
    ]
    assert re.search(r"^split_digits +average_accuracy +fraction +map, \S+  .*n = 2", shown, re.MULTILINE)
    assert re.search(r"^split_digits_multi_head +average_nll +nats +map, \S+  .*n = 1", shown, re.MULTILINE)
    text = Path("figures/accuracy.svg").read_text()
    for word in ("split_digits", "split_digits_multi_head", "No measure of sequential inference"):
        assert word in text
    assert "coreset=random" in text
    assert "order=joint" in text


def test_band_is_over_the_seeds_of_a_line(runs):
    loaded = [load_scores(Path(run)) for run in runs[:2]]
    chart = continual.accuracies([finished(Path(run)) for run in runs[:2]]).to_dict()
    values = chart["concat"][0]["layer"][0]["data"]["values"]
    seen = np.array(
        [[row[:t].mean() for t, row in enumerate(task.accuracy_matrix(a), 1)] for task, a in loaded]
    )
    np.testing.assert_allclose([v["mean"] for v in values], seen.mean(0))
    np.testing.assert_allclose([v["high"] - v["mean"] for v in values], seen.std(0, ddof=1), atol=1e-12)
    assert [v["x"] for v in values] == [1, 2, 3, 4, 5]


def of_curves(rows):
    """A run with these curves, all else without meaning."""
    return FinishedRun(None, "task", "task", "mfvi", "mfvi", "standard", 0, read_curves=rows.copy)


def test_gradients_are_of_step_2_and_their_ratio_is_of_each_seed(tmp_path):
    def rows(likelihood, prior):
        return [
            Row(f"{term}_gradient", step, x, value * (1 if step == "step 2" else 100))
            for step in ("step 2", "step 3")
            for term, values in (("likelihood", likelihood), ("prior", prior))
            for x, value in enumerate(values, 1)
        ]

    records.write_curves(tmp_path, rows([4, 2], [0, 1]))
    seeds = [records.read_curves(tmp_path), rows([2, 2], [0, 3])]
    chart = continual.gradients([of_curves(rows) for rows in seeds]).to_dict()
    panels = {panel["title"]: panel["data"]["values"] for panel in chart["concat"]}
    expected = {"Likelihood term": [3, 2], "Prior term": [0, 2], "Prior over likelihood": [0, 1]}
    assert {title: [v["mean"] for v in values] for title, values in panels.items()} == expected
    assert panels["Prior over likelihood"][1]["high"] == pytest.approx(1 + np.std([0.5, 1.5], ddof=1))
    assert continual.gradients([of_curves([Row("accuracy", "pair 1", 1, 0.5)])]) is None


# ---- the scenario is the name

OTHER = {
    "order": "joint",
    "hidden": 17,
    "epochs": 3,
    "batch_size": None,
    "test_samples": 7,
    "coreset": "random",
    "coreset_size": 11,
    "coreset_epochs": 13,
    "coreset_prior": "initial",
    "coreset_only": True,
}
"""A value that no task has, of every setting that can be changed."""
NAMED = [name for name, entry in registry.tasks().items() if issubclass(entry.cls, continual.ContinualTask)]


@pytest.mark.parametrize("name", NAMED)
def test_whatever_changes_the_scenario_changes_the_identity(name):
    fixed = registry.task(name).fixed
    fields = [f.name for f in dataclasses.fields(registry.task(name).cls.settings_class)]
    free = [field for field in fields if field not in fixed]
    identities = {resolved("map", name).task_identity}
    assert identities == {name}
    for field in free:
        values = {"coreset": "k_center"} if field == "coreset_only" else {}
        values[field] = OTHER[field]
        identities.add(resolved("map", name, task_settings=values).task_identity)
    assert len(identities) == 1 + len(free)
    for field, value in fixed.items():
        with pytest.raises(UsageError, match=field):
            resolved("map", name, task_settings={field: value})


def test_the_contrast_is_never_ranked_and_the_ranked_are_single_headed():
    ranked = {
        name
        for name in NAMED
        if resolved("map", name).task.cls(resolved("map", name).task_settings).spec.ranked
    }
    assert ranked == {"split_mnist", "split_fashion_mnist", "split_digits"}
