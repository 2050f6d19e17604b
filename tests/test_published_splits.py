"""Runs on the published splits beside the published MC dropout of the same split."""

import generated
import numpy as np
import pytest
from scipy import stats

from bench import tables
from bench.contract import FinishedRun
from bench.runs import registry
from bench.studies import published_splits
from bench.tasks.uci_regression import NAMES, UCIRegression

TABLES = [
    name
    for fixed in NAMES.values()
    if not tables.SOURCES[name := fixed["dataset"]].masks and tables.SOURCES[name].folder
]


def finished(root, log_likelihood, seed=0, method="map", **values):
    """A run on yacht whose predictions of every split have this log likelihood `[K]`, and an RMSE of 0."""
    entry = registry.task("uci_yacht")
    given = {**entry.fixed, "published_splits": True, **values}
    task = UCIRegression(registry.build(entry.cls.settings_class, given, "task"), root)
    targets = np.array(task.targets()["targets"])
    sd = np.exp(-np.asarray(log_likelihood)) / np.sqrt(2 * np.pi)
    arrays = {
        "mean": targets[:, None],
        "variance": (sd**2)[:, None, None],
        "centre_and_scale": np.tile([0.0, 1.0], (len(targets), 1)),
        "targets": targets,
    }
    metrics = task.score(arrays)
    identity = "uci_yacht+published_splits=true"
    return FinishedRun(
        task, "uci_yacht", identity, method, method, "standard", seed, {}, metrics, arrays.copy
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tables")
    generated.write_public(folder, "yacht", splits=20)
    return folder


def test_every_table_has_a_row_for_every_published_split():
    """And means that are those of all splits: a file read in another order or column would have others."""
    found = published_splits.mc_dropout()
    assert sorted(found) == sorted(TABLES)
    assert {name: len(values) for name, values in found.items()} == {
        name: 5 if name == "protein" else 20 for name in TABLES
    }
    np.testing.assert_allclose(found["boston"].mean(0), (-2.40, 2.90), atol=0.005)
    np.testing.assert_allclose(found["wine"].mean(0), (-0.93, 0.62), atol=0.005)


def test_a_run_is_paired_with_the_same_split(root):
    """Log likelihoods a little above the published ones of the same split, and seeds on both sides."""
    theirs = published_splits.mc_dropout()["yacht"]
    by = 0.1 + 0.01 * np.arange(20)
    runs = [finished(root, theirs[:, 0] + by + d, seed) for seed, d in enumerate((-0.05, 0.05))]
    (found,) = published_splits.pairings(runs)
    half = stats.t.ppf(0.975, 19) * by.std(ddof=1) * np.sqrt(1 / 20 + 1 / 9)
    assert (found.line, len(found.runs)) == ("map, published_splits=true", 2)
    assert tuple(found.log_likelihood)[:3] == pytest.approx((by.mean(), by.mean() - half, by.mean() + half))
    assert found.rmse.centre == pytest.approx(-theirs[:, 1].mean())
    (sentence,) = UCIRegression.compare(runs).sentences
    assert sentence.startswith("uci_yacht: map, published_splits=true minus the published MC dropout")
    assert sentence.count("better") == 2


def test_splits_of_another_order_are_another_pairing(root):
    """The cheat: the same log likelihoods, each on the next split. Same mean, wide interval."""
    theirs = published_splits.mc_dropout()["yacht"][:, 0]
    (right,), (wrong,) = (
        published_splits.pairings([finished(root, values)])
        for values in (theirs + 0.1, np.roll(theirs, 1) + 0.1)
    )
    assert right.log_likelihood.centre == pytest.approx(wrong.log_likelihood.centre)
    assert right.log_likelihood.half < 1e-6 < 0.01 < wrong.log_likelihood.half


def test_runs_on_splits_of_our_own_or_on_some_of_the_published_ones_have_no_pairing(root):
    runs = [finished(root, np.zeros(20), published_splits=False), finished(root, np.zeros(3), 1, splits=3)]
    assert list(published_splits.pairings(runs[:1])) == list(published_splits.pairings(runs[1:])) == []
