"""Toy regression: metrics of hand-made functions, the data, the protocol, and what the temperature means."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from bench import figures
from bench.batches import batches
from bench.contract import FinishedRun, Undefined
from bench.data import array_digest
from bench.energy import likelihood_term
from bench.predictions import Gaussian
from bench.runs import registry, resolution
from bench.studies import forecasts, references
from bench.studies.small import NOISE, points, sine
from bench.tasks.toy_regression import GRID, Settings, ToyRegression

NUM_INPUTS = len(GRID) + 300
GAP_INPUTS = np.array([x for x in GRID if -0.8 <= x <= 0.4])


@pytest.fixture(autouse=True)
def no_reference(monkeypatch, tmp_path):
    """Whatever references there are by now: these tests bring their own."""
    monkeypatch.setattr(references, "FOLDER", tmp_path)


def make(**values):
    """The task with its standard settings, but for `values`."""
    return ToyRegression(Settings(**values))


def inputs():
    """All inputs that a run predicts at, `[541]`."""
    return np.concatenate([GRID, *(points(part)[0][:, 0].numpy() for part in ("test", "gap"))])


def arrays_of(means, variances=NOISE**2):
    """Arrays of a run that predicted these means `[S, 541]`."""
    variances = np.broadcast_to(np.float32(variances), (1, 1)) if np.isscalar(variances) else variances
    return {"means": means, "variances": variances} | make().targets()


def normal_arrays(sd, draws=400):
    """A run whose function at x is normal around the truth, in quantiles with the deviation `sd(x)`."""
    levels = stats.norm.ppf((np.arange(draws) + 0.5) / draws)
    levels /= levels.std()  # without the tails beyond the outermost it is too small
    x = inputs()
    return arrays_of(sine(x) + levels[:, None] * sd(x))


def in_clusters(x):
    """Whether inputs lie at the data."""
    return ((x >= -2) & (x <= -1.4)) | ((x >= 1) & (x <= 1.8))


# ---- metrics by hand


def test_spread_of_known_functions():
    scores = make().score(normal_arrays(lambda x: np.where(in_clusters(x), 0.02, 0.5)))
    assert scores["data_sd"] == pytest.approx(0.02, rel=1e-6)
    assert scores["gap_sd"] == pytest.approx(0.5, rel=1e-6)
    assert scores["gap_ratio"] == pytest.approx(25, rel=1e-9)


def test_spread_is_averaged_over_the_regions_of_the_protocol():
    """Sd that grows with x: the mean over each region's grid inputs, and the regions' ends are in."""
    scores = make().score(normal_arrays(lambda x: 1 + x**2))
    assert scores["gap_sd"] == pytest.approx((1 + GAP_INPUTS**2).mean(), rel=1e-6)
    at_data = GRID[in_clusters(GRID)]
    assert scores["data_sd"] == pytest.approx((1 + at_data**2).mean(), rel=1e-6)
    assert (len(GAP_INPUTS), len(at_data)) == (49, 25 + 33)


def test_point_prediction_has_no_spread():
    scores = make().score(arrays_of(sine(inputs())[None]))
    assert scores["gap_ratio"] == scores["gap_sd"] == scores["data_sd"] == 0.0


def test_nll_of_the_truth_is_the_entropy_of_the_noise():
    """Standard error of a mean of 200 chi-squares over 2 is 0.05, of 100 0.07; false alarm 1e-4 (4 s.e.)."""
    scores = make().score(arrays_of(sine(inputs())[None]))
    entropy = 0.5 * math.log(2 * math.pi * math.e * NOISE**2)
    assert scores["test_nll"] == pytest.approx(entropy, abs=0.2)
    assert scores["gap_nll"] == pytest.approx(entropy, abs=0.28)


def test_nlls_by_hand():
    """Two samples far apart, each with half of the mass, and every target on its own side."""
    arrays = arrays_of(np.stack([np.zeros(NUM_INPUTS), np.full(NUM_INPUTS, 50.0)]))
    arrays["test_targets"] = np.full(200, 50.0 + 2 * NOISE, np.float32)
    arrays["gap_targets"] = np.zeros(100, np.float32)
    at_mean = math.log(2) + 0.5 * math.log(2 * math.pi * NOISE**2)
    scores = make().score(arrays)
    assert scores["test_nll"] == pytest.approx(at_mean + 2, abs=1e-3)
    assert scores["gap_nll"] == pytest.approx(at_mean, abs=1e-3)


def test_half_precision_of_the_means_does_not_matter():
    arrays = normal_arrays(lambda x: np.full_like(x, 0.02))
    rounded = make().score(arrays | {"means": arrays["means"].astype(np.float16)})
    for name, value in make().score(arrays).items():
        if not isinstance(value, Undefined):
            assert rounded[name] == pytest.approx(value, rel=1e-3, abs=2e-3), name


def test_variance_beyond_the_noise_is_spread_of_the_function():
    """A closed-form prediction, one normal per input, scores as many draws from that normal do."""
    x = inputs()
    sd = np.where(in_clusters(x), 0.02, 0.5)
    closed = arrays_of(sine(x)[None], (NOISE**2 + sd**2)[None].astype(np.float32))
    drawn = make().score(normal_arrays(lambda x: np.where(in_clusters(x), 0.02, 0.5)))
    scores = make().score(closed)
    for name in ("gap_ratio", "gap_sd", "data_sd"):
        assert scores[name] == pytest.approx(drawn[name], rel=5e-3), name
    for name in ("test_nll", "gap_nll"):
        assert scores[name] == pytest.approx(drawn[name], abs=0.01), name


@pytest.fixture
def without_crps(monkeypatch):
    """The CRPS of 2,000 draws is a sum over two million pairs, and no part of a distance."""
    monkeypatch.setattr(forecasts, "crps", lambda mean, sigma, targets: np.zeros(len(targets)))


@pytest.mark.usefixtures("without_crps")
def test_distance_to_a_normal_reference_has_its_closed_form():
    """Means 0.1 apart everywhere; deviations 0.3 apart between the clusters and equal elsewhere."""
    task = make()
    between = (GRID >= -1.4) & (GRID <= 1)
    own = normal_arrays(lambda x: np.full_like(x, 0.5), draws=2000)
    other = normal_arrays(lambda x: np.where((x >= -1.4) & (x <= 1), 0.2, 0.5), draws=2000)
    scores = task.score(own | task.reference(other | {"means": other["means"] + 0.1}))
    assert scores["wasserstein_in_gap"] == pytest.approx(math.hypot(0.1, 0.3), rel=5e-3)
    share = between.mean()
    assert scores["wasserstein_to_reference"] == pytest.approx(math.sqrt(0.1**2 + share * 0.3**2), rel=5e-3)


@pytest.mark.usefixtures("without_crps")
def test_run_is_at_no_distance_from_a_reference_made_of_itself():
    task = make()
    arrays = normal_arrays(lambda x: np.full_like(x, 0.1), draws=2000)
    reference = task.reference(arrays)
    assert reference["reference"].shape == (200, len(GRID))
    assert reference["reference"].dtype == np.float32
    # 200 quantiles stand for 2000 draws: what they cut off the tails is 3% of the deviation.
    assert task.score(arrays | reference)["wasserstein_to_reference"] < 0.004


def test_without_reference_the_distances_say_why():
    scores = make().score(arrays_of(sine(inputs())[None]))
    for name in ("wasserstein_to_reference", "wasserstein_in_gap"):
        assert "no reference for toy_regression-layers=1,hidden=100,temperature=65" in scores[name].reason


# ---- data


def test_data_are_those_of_the_source():
    x, y = points("train")
    assert x.shape == y.shape == (1500, 1)
    first, second = x[:750], x[750:]
    assert first.min() >= -2
    assert first.max() <= -1.4
    assert second.min() >= 1
    assert second.max() <= 1.8
    residuals = (y - torch.sin(4 * (x - 4.3))).flatten()
    # Standard errors 0.05/sqrt(1500) and 0.05/sqrt(3000); 4 of them, false alarm 1e-4.
    assert residuals.mean().abs() < 0.0052
    assert residuals.std() == pytest.approx(0.05, abs=0.0037)
    assert torch.equal(points("train")[0], x)
    gap = points("gap")[0]
    assert gap.min() >= -1.4
    assert gap.max() <= 1
    assert not set(x.flatten().tolist()) & set(points("test")[0].flatten().tolist())


def test_data_are_the_same_everywhere():
    """The digest of the project's data; a new one means another task."""
    assert make().data_digest() == make(layers=3).data_digest()
    x, y = points("train")
    assert array_digest({"x": x, "y": y}) == DIGEST


DIGEST = "568edfac8bde054300ad292e260f7486fea3b0785b630b8f626cb7851d1d615b"


# ---- protocol


@pytest.mark.parametrize(("kind", "weight"), [("kl", 1 / 65), ("likelihood", 65.0)])
def test_temperature_is_a_power_of_the_likelihood(kind, weight):
    """The energy that a method sees is weight * NLL sum; by hand from the normal density."""
    task = make(temperature_on=kind)
    assert task.spec.requires == {"weighted"}
    problem = task.problem()
    (batch,) = batches(problem.train, None, None)
    outputs = torch.randn(3, 1500, 1, generator=torch.Generator().manual_seed(0))
    density = stats.norm(outputs.numpy(), NOISE).logpdf(batch.targets.numpy())
    got = likelihood_term(problem.likelihood, outputs, batch, problem.num_train)
    assert got.item() == pytest.approx(-weight * density.sum((1, 2)).mean(), rel=1e-5)
    assert problem.num_train == 1500


def test_temperature_one_is_bayes_and_needs_no_weights():
    for kind in ("kl", "likelihood"):
        task = make(temperature=1, temperature_on=kind)
        assert not task.spec.requires
        assert len(task.problem().train.tensors) == 2


def test_target_names_the_posterior_and_nothing_else():
    target = make().target
    assert target == "toy_regression-layers=1,hidden=100,temperature=65"
    assert make(epochs=7, test_samples=3).target == target
    assert make(temperature=1 / 65, temperature_on="likelihood").target == target
    others = [
        {"layers": 2},
        {"hidden": 50},
        {"temperature": 64},
        {"temperature_on": "likelihood"},
        {"temperature": 1},
    ]
    assert len({make(**values).target for values in others} | {target}) == 6


def test_network_is_that_of_the_source():
    network = make(layers=3).problem().network()
    assert [w.shape for w in network.parameters() if w.ndim == 2] == [
        (100, 1),
        (100, 100),
        (100, 100),
        (1, 100),
    ]
    assert any(isinstance(layer, torch.nn.LeakyReLU) for layer in network)
    prior = make().problem().prior(dict(network.named_parameters()))
    assert all((p.mean == 0).all() and (p.variance == 1).all() for p in prior.values())


class Recorder:
    """An engine that fits nothing, predicts the inputs themselves, and keeps what it was asked."""

    def __init__(self, copies=1, variance=NOISE**2):
        self.copies, self.variance = copies, variance
        self.budgets, self.logged = [], {}

    def fit(self, problem, budget, start=None):
        """Fits nothing."""
        self.budgets.append(budget)

    def predict(self, method, inputs, num_samples):
        """Sample s is x + s."""
        mean = inputs + torch.arange(float(num_samples * self.copies))[:, None, None]
        variance = torch.full_like(mean, NOISE**2) * (1 + (self.variance - NOISE**2) * inputs.abs())
        return Gaussian(mean, variance)

    def log(self, name, value, step):
        """Keeps it."""
        self.logged[name] = value

    def stage(self, *arguments):
        """Nothing."""


def test_run_predicts_at_grid_and_test_points():
    engine = Recorder()
    arrays = make(test_samples=5).run(engine)
    assert (engine.budgets[0].epochs, engine.budgets[0].batch_size) == (2000, 250)
    assert arrays["means"].shape == (5, NUM_INPUTS)
    assert arrays["means"].dtype == np.float32
    assert arrays["variances"].shape == (1, 1)
    np.testing.assert_allclose(arrays["means"][0], inputs(), atol=2e-3)
    assert engine.logged.keys() == {make().spec.validation_metric}


def test_more_draws_than_asked_for_are_thinned_evenly():
    """Three members of 200 draws each: every member keeps a third, first and last draw included."""
    arrays = make().run(Recorder(copies=3))
    kept = (arrays["means"][:, 120].astype(float)).round()  # the grid's middle, x = 0
    assert len(set(kept)) == 200
    assert [int(((kept >= low) & (kept < low + 200)).sum()) for low in (0, 200, 400)] == pytest.approx(
        [200 / 3] * 3, abs=1
    )
    assert sum(array.nbytes for array in (arrays | make().targets()).values()) < 440_000


def test_variances_are_kept_where_they_differ():
    arrays = make(test_samples=5).run(Recorder(variance=1.0))
    assert arrays["variances"].shape == (5, NUM_INPUTS)


# ---- figures


def finished(method, arrays, seed=0):
    names = "toy_regression", "toy_regression", method, method
    return FinishedRun(make(), *names, "standard", seed, read_arrays=arrays.copy)


@pytest.mark.slow
def test_functions_of_several_runs_stand_beside_each_other():
    narrow = normal_arrays(lambda x: np.full_like(x, 0.1), 50)
    wide = normal_arrays(lambda x: np.full_like(x, 0.5), 50)

    def titles(*runs):
        (chart,) = ToyRegression.compare(runs).charts.values()
        return [panel["title"] for panel in chart.to_dict()["concat"]]

    assert titles(finished("narrow", narrow), finished("wide", wide)) == ["narrow", "wide"]
    referred = wide | make().reference(narrow)
    assert titles(finished("wide", referred), finished("narrow", narrow)) == ["reference", "wide", "narrow"]
    seeds = titles(finished("wide", wide), finished("wide", narrow, seed=1))
    assert seeds == ["wide, seed 0", "wide, seed 1"]


def test_reference_is_drawn_beside_the_run(tmp_path):
    task = make()
    arrays = normal_arrays(lambda x: np.full_like(x, 0.1), 50)
    charts = task.figures(arrays | task.reference(arrays))
    assert len(charts["function"].to_dict()["concat"]) == 2
    assert len(figures.save(charts, tmp_path, "footer")) == 2


def test_preset_of_mean_field_is_the_published_one():
    method, task, provenance = resolution.preset_values(
        registry.method("mfvi"), registry.task("toy_regression"), "paper"
    )
    assert (method["optimizer"], method["learning_rate"], method["initial_rho"]) == ("amsgrad", 1e-3, -3)
    assert task["epochs"] == 6000
    assert provenance == "published"
