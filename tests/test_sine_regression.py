"""The sine with a mixture: its data, its scores by hand, and what is drawn of several runs."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from bench.comparison import FinishedRun
from bench.runs.records import Row
from bench.tasks.sine_regression import ENDS, GRID, NOISE, NUM_TEST, Settings, SineRegression, function, sine


@pytest.fixture
def task():
    return SineRegression(Settings())


def test_points_are_those_of_the_source(task):
    """100 evenly spaced inputs; the noise has its standard deviation (p > 0.001, one seed, fixed)."""
    x, y = (t[:, 0].double().numpy() for t in task.own_data("train"))
    np.testing.assert_allclose(x, np.linspace(*ENDS, 100), rtol=1e-6)
    assert stats.chi2.sf(np.square((y - np.sin(x) / 2) / NOISE).sum(), 100) > 0.001
    new = task.own_data("test")[0]
    assert len(new) == NUM_TEST
    assert not set(new.flatten().tolist()) & set(x.tolist())


def test_network_is_that_of_the_source(task):
    """301 weights from the prior (p > 0.001), and no output beyond 1."""
    torch.manual_seed(0)
    network = task.problem().network()
    weights = torch.cat([p.detach().flatten() for p in network.parameters()])
    assert len(weights) == 301
    assert stats.kstest(weights.numpy(), "norm").pvalue > 0.001
    assert network(torch.linspace(-50, 50, 100)[:, None]).abs().max() <= 1


def arrays_of(task, means, variance=NOISE**2):
    """Every draw is a constant more than the sine."""
    inputs = np.concatenate([GRID, task.own_data("test")[0][:, 0].numpy()])
    draws = sine(inputs) + np.array(means)[:, None]
    stored = {"means": draws.astype(np.float64), "variances": np.full((1, 1), variance)}
    return stored | task.targets()


def test_scores_by_hand(task):
    """Two draws, 0.2 below the truth and 0.4 above it: their mean is 0.1 away, and their sd 0.3."""
    arrays = arrays_of(task, [-0.2, 0.4])
    scores = task.score(arrays)
    away = arrays["targets"] - sine(task.own_data("test")[0][:, 0].numpy())
    density = (stats.norm.pdf(away, -0.2, NOISE) + stats.norm.pdf(away, 0.4, NOISE)) / 2
    assert scores["test_nll"] == pytest.approx(-np.log(density).mean())
    assert scores["rmse"] == pytest.approx(0.1)
    assert scores["sd"] == pytest.approx(0.3)


def test_spread_that_is_no_noise_counts(task):
    """One draw whose variance is 0.05^2 more than the observation noise."""
    _, sd = function(arrays_of(task, [0.0], NOISE**2 + 0.05**2))
    np.testing.assert_allclose(sd, 0.05)


def finished(seed, identity, values):
    curves = [Row(name, "fit", step, value) for name, of in values.items() for step, value in of]
    task = SineRegression(Settings())
    metrics = dict.fromkeys(task.spec.metrics, 0.5)
    more = {"metrics": metrics, "read_curves": curves.copy}
    return FinishedRun(task, "sine_regression", "sine_regression", identity, identity, "paper", seed, **more)


def test_course_is_drawn_by_seed_where_a_fit_has_it():
    loss = [(1, 30.0), (2, math.e)]
    both = finished(0, "mixture", {"loss": loss, "largest_weight": [(1, 0.5), (2, 0.9)]})
    one = finished(0, "one", {"loss": loss})
    charts = SineRegression.compare([both, one]).charts
    drawn = charts["sine_regression-loss"].to_dict()["data"]["values"]
    assert [(row["method"], row["step"], row["value"]) for row in drawn] == [
        *(("mixture", *point) for point in loss),
        *(("one", *point) for point in loss),
    ]
    weights = charts["sine_regression-weight"].to_dict()["data"]["values"]
    assert {(row["method"], row["value"]) for row in weights} == {("mixture", 0.5), ("mixture", 0.9)}
    assert SineRegression.compare([one]).charts.keys() == {"sine_regression-loss"}
