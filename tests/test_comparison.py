"""Runs beside each other: what lines are, which are compared, and the table and sentences of the default."""

from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from bench import comparison
from bench.contract import FinishedRun, Metric
from bench.errors import UsageError

SPEC = SimpleNamespace(
    metrics={"error": Metric("", "nats", 0, 1), "share": Metric("", "fraction", 1, 0)}, main_metric="error"
)


def run(method="map", seed=0, variant="", task="some_task", **metrics):
    """A finished run of a task with two metrics."""
    identity = f"{task}+{variant}" if variant else task
    given = {"error": 0.5, "share": 0.25} | metrics
    made = SimpleNamespace(spec=SPEC)
    return FinishedRun(made, task, identity, method, method, "standard", seed, metrics=given)


def test_a_line_is_method_and_variant():
    assert run("map").line == "map"
    assert run("map+rate=1", variant="size=3").line == "map+rate=1, size=3"


def test_runs_are_sorted_by_task_line_and_seed():
    found = comparison.by_task([run("b", 1), run("a"), run("b", 0), run("a", task="other")])
    assert {task: {line: list(of) for line, of in lines.items()} for task, lines in found.items()} == {
        "other": {"a": [0]},
        "some_task": {"a": [0], "b": [0, 1]},
    }
    with pytest.raises(UsageError, match="some_task, a: seed 0 is given twice"):
        comparison.by_task([run("a"), run("a")])


def test_pairs_differ_in_one_thing_and_share_a_seed():
    given = [run("a"), run("b"), run("a", variant="size=3"), run("b", variant="size=3"), run("c", seed=7)]
    assert list(comparison.pairs(comparison.by_task(given)["some_task"])) == [
        ("a", "a, size=3"),
        ("a", "b"),
        ("a, size=3", "b, size=3"),
        ("b", "b, size=3"),
    ]


def test_default_tables_every_metric_and_compares_the_main_one_paired():
    rng = np.random.default_rng(0)
    base = rng.normal(0, 10, 6)
    lower = base - 1 + rng.normal(0, 0.1, 6)
    given = [run("a", s, error=x) for s, x in enumerate(base)] + [
        run("b", s, error=x, share=None) for s, x in enumerate(lower)
    ]
    found = comparison.of_metrics(given)
    assert not found.charts
    rows = {(metric, line): (unit, mean) for _, metric, unit, line, mean in found.rows}
    assert rows.keys() == {(metric, line) for metric in SPEC.metrics for line in "ab"}
    low, high = stats.ttest_1samp(base, 0).confidence_interval()
    assert rows["error", "a"] == ("nats", f"{base.mean():.4g} ({low:.4g} to {high:.4g}, 95%, n = 6)")
    assert rows["share", "b"] == ("fraction", "undefined")
    low, high = stats.ttest_rel(base, lower).confidence_interval()
    (sentence,) = found.sentences
    assert sentence == (
        f"some_task: a minus b in error is {(base - lower).mean():.4g} "
        f"({low:.4g} to {high:.4g}, 95%, n = 6): a is higher"
    )


def test_what_is_undefined_or_too_little_is_not_compared():
    assert not comparison.of_metrics([run("a", error=None), run("b")]).sentences
    few = [run(method, seed, error=float(method == "a")) for method in "ab" for seed in (0, 1)]
    found = comparison.of_metrics(few)
    assert not found.sentences
    assert found.rows[0][-1] == "1 (n = 2: no interval below 3)"
