"""Training dynamics: metrics by hand, what the probe measures, and when."""

import math

import numpy as np
import pytest
import torch

from bench.comparison import FinishedRun
from bench.contract import Batch
from bench.divergence import log_prob
from bench.engine.engine import Engine, TrainerOptions
from bench.laws.cases import assert_mean_is
from bench.methods import mfvi, radial
from bench.tasks.training_dynamics import COLUMNS, Settings, TrainingDynamics

SMALL = {"images": 24, "channels": 2, "batch_size": 8, "pairs": 2, "every": 3, "samples": 2}


def make(**values):
    """The task on digits."""
    return TrainingDynamics(Settings(**{"dataset": "digits", **values}))


def history_of(accuracies, **columns):
    """Arrays of a run that measured these accuracies at epochs 1, 2, ..; other columns are 1 unless given."""
    found = np.ones((len(accuracies), 1 + len(COLUMNS)))
    found[:, 0] = np.arange(1, len(found) + 1)
    for name, values in {"accuracy": accuracies, **columns}.items():
        found[:, 1 + list(COLUMNS).index(name)] = values
    return {"history": found}


# ---- metrics by hand


def test_metrics_by_hand():
    """Nine measurements: a tenth is one of them. The best is the fourth, the end the ninth."""
    sds = np.arange(1, 10)
    scores = make().score(
        history_of([0.1, 0.4, 0.6, 0.9, 0.8, 0.7, 0.7, 0.6, 0.5], gradient_sd=sds, likelihood_term=sds / 10)
    )
    assert scores["accuracy"] == 0.5
    assert scores["best_accuracy"] == 0.9
    assert scores["best_epoch"] == 4
    assert scores["fall"] == pytest.approx(0.4)
    assert (scores["gradient_sd_at_best"], scores["gradient_sd"]) == (4, 9)
    assert (scores["nll_at_best"], scores["nll"]) == pytest.approx((0.4, 0.9))
    assert scores["weight_sd"] == 1


def test_a_tenth_is_averaged():
    """Of twenty measurements two: a single outlier counts half."""
    scores = make().score(history_of([0.5] * 10 + [1.0] + [0.5] * 9))
    assert scores["best_accuracy"] == 0.75
    assert scores["fall"] == 0.25


def runs_of(line, falls):
    """Finished runs of a line that end so far below their best, with a tenfold gradient."""
    task = make()
    runs = []
    for seed, fall in enumerate(falls):
        arrays = history_of([0.2, 0.9, 0.9 - fall], gradient_sd=[1, 1, 10])
        names = {"task_name": "t", "task_identity": "t", "preset": "standard", "seed": seed}
        more = {"metrics": task.score(arrays), "read_arrays": arrays.copy}
        runs.append(FinishedRun(task, **names, method_name=line, method_identity=line, **more))
    return runs


def test_comparison_says_whether_training_accuracy_falls():
    """A fall within its noise above 0 is none: the best of a curve is a maximum."""
    runs = runs_of("a", [0.3, 0.31, 0.32]) + runs_of("b", [0.01, 0.02, 0.01]) + runs_of("c", [0.0, 0.1, 0.2])
    found = TrainingDynamics.compare(runs)
    a, b, c = (next(s for s in found.sentences if s.startswith(f"t, {line}:")) for line in "abc")
    assert "it falls by more than 0.05" in a
    assert "grows by 1 (1 to 1" in a
    assert "it does not fall by 0.05" in b
    assert "no difference shown" in c
    assert list(found.charts) == ["t-dynamics"]
    assert any("a minus b in accuracy is -0.2" in s for s in found.sentences)


# ---- the probe


@pytest.fixture(scope="module", params=[mfvi.MFVI, radial.Radial])
def fitted(request):
    """Task, method and arrays of a small fit over seven epochs."""
    task = make(epochs=7, **SMALL)
    cls = request.param
    engine = Engine(cls, cls.settings_class(), 0, trainer=TrainerOptions(accelerator="cpu"))
    methods = []
    fit = engine.fit
    engine.fit = lambda *args, **kwargs: methods.append(fit(*args, **kwargs)) or methods[0]
    return task, task.run(engine), methods[0]


def test_every_third_epoch_is_measured_before_its_first_step(fitted):
    _, arrays, method = fitted
    assert arrays["history"][:, 0].tolist() == [1, 4, 7]
    assert np.isfinite(arrays["history"]).all()
    start = math.log1p(math.exp(method.settings.initial_rho))  # softplus
    name = 1 + list(COLUMNS).index("weight_sd")
    weights = 4 * 8 * 9 if isinstance(method, radial.Radial) else 1
    assert arrays["history"][0, name] == pytest.approx(start / math.sqrt(weights), rel=1e-5)


def test_cross_entropy_is_that_of_the_draws(fitted):
    """E_q[-log p(w)] in closed form against draws. False alarm: 7e-6."""
    task, _, method = fitted
    method.history = []
    found = task.probe(method, Batch(*method.problem.train.tensors), torch.Generator().manual_seed(0))
    draws = method.sample_weights(500, torch.Generator().manual_seed(1))
    with torch.no_grad():
        said = -log_prob(method.prior, draws).double() / method.problem.num_train
    assert_mean_is(said, found["prior_cross_entropy"], slack=1e-5 * found["prior_cross_entropy"])
