"""Trees as methods: they predict what scikit-learn's models do, and what they say of their error is true."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import nn
from torch.utils.data import TensorDataset

import bench
from bench import likelihoods, priors
from bench.contract import Batch, Problem
from bench.errors import UsageError
from bench.trees import LEVELS, BoostingSettings, ForestSettings, GradientBoosting, RandomForest


def posed(targets, likelihood, rows=600):
    """A problem of random rows with four inputs, and its inputs as scikit-learn takes them."""
    inputs = torch.randn(rows, 4, generator=torch.Generator().manual_seed(0))
    train = TensorDataset(inputs, targets(inputs, torch.Generator().manual_seed(1)))
    return Problem(lambda: nn.Linear(4, 1), likelihood, priors.normal(0, 1), train, None, rows), inputs


def number(inputs, generator):
    noise = torch.randn(len(inputs), generator=generator) * (0.2 + 0.8 * (inputs[:, 1] > 0))
    return (2 * inputs[:, 0] + inputs[:, 1].abs() + noise)[:, None]


def three(inputs, generator):
    return torch.bucketize(number(inputs, generator)[:, 0], torch.tensor([-0.5, 1.5]))


def two(inputs, generator):
    return (number(inputs, generator)[:, 0] > 0).long()


def fitted(cls, values, problem):
    torch.manual_seed(0)
    method = cls(problem, values)
    method.finish_fit([Batch(*problem.train.tensors)])
    return method


NORMAL = likelihoods.Gaussian("learned")
CASES = {
    f"{cls.__name__} {targets.__name__}": (cls, values(trees=20), targets)
    for cls, values in ((RandomForest, ForestSettings), (GradientBoosting, BoostingSettings))
    for targets in (number, two, three)
}


@pytest.mark.parametrize("case", CASES)
def test_tensors_predict_what_scikit_learn_does(case, monkeypatch):
    """On rows that were not seen; a fitted method that is loaded from its state predicts the same."""
    cls, values, targets = CASES[case]
    likelihood = NORMAL if targets is number else likelihoods.Categorical()
    problem, _ = posed(targets, likelihood)
    models, made = [], cls.model
    monkeypatch.setattr(
        cls, "model", lambda self, seed, **kw: models.append(made(self, seed, **kw)) or models[-1]
    )
    method = fitted(cls, values, problem)
    new = torch.randn(50, 4, generator=torch.Generator().manual_seed(5))
    found = method.predict(new, 7, torch.Generator())
    if targets is number:
        truth = models[0].predict(new.double().numpy())
        np.testing.assert_allclose(found.mean[0, :, 0], truth, rtol=1e-5, atol=1e-6)
    else:
        truth, doubt = models[0].predict_proba(new.double().numpy()), float(method.spread)
        truth = (1 - doubt) * truth + doubt / truth.shape[1]
        np.testing.assert_allclose(found.log_probs[0].exp(), truth, rtol=1e-5, atol=1e-6)
    other = cls(problem, values)
    other.load_state_dict(method.state_dict())
    assert torch.equal(other.raw(new), method.raw(new))


@pytest.mark.parametrize("noise", ["normal", "conformal", "quantile"])
@pytest.mark.parametrize("cls", [RandomForest, GradientBoosting])
def test_intervals_cover_rows_that_were_not_seen(cls, noise):
    """90% of 4,000 new rows, to 0.04. Cheat: the spread of residuals of the trained rows covers fewer."""
    if noise == "quantile" and cls is RandomForest:
        return
    problem, inputs = posed(number, NORMAL)
    values = (ForestSettings if cls is RandomForest else BoostingSettings)(trees=30, noise=noise)
    method = fitted(cls, values, problem)
    new = torch.randn(4000, 4, generator=torch.Generator().manual_seed(7))
    targets = number(new, torch.Generator().manual_seed(8))[:, 0].double().numpy()

    def coverage(prediction, spread):
        below = norm.cdf(targets, prediction.mean[..., 0].double().numpy(), spread).mean(0)
        return (np.abs(below - 0.5) <= 0.45).mean()

    prediction = method.predict(new, 1, torch.Generator())
    assert prediction.mean.shape[0] == {"normal": 1, "conformal": 50, "quantile": len(LEVELS)}[noise]
    assert coverage(prediction, float(method.spread)) == pytest.approx(0.9, abs=0.04)
    if noise == "normal":
        residuals = problem.train.tensors[1] - method.predict(inputs, 1, torch.Generator()).mean[0]
        assert coverage(prediction, float(residuals.std())) < 0.86


def test_quantiles_see_noise_that_depends_on_the_input():
    """Ten quantiles lie farther apart where the noise is five times as large."""
    problem, _ = posed(number, NORMAL, 1000)
    method = fitted(GradientBoosting, BoostingSettings(noise="quantile", trees=60), problem)
    new = torch.randn(400, 4, generator=torch.Generator().manual_seed(7))
    sd = method.predict(new, 1, torch.Generator()).mean[..., 0].std(0)
    assert sd[new[:, 1] > 0].mean() > 1.4 * sd[new[:, 1] < 0].mean()


def test_what_is_no_table_is_refused():
    images = TensorDataset(torch.zeros(5, 1, 2, 2), torch.zeros(5, dtype=torch.long))
    problem = Problem(nn.Identity, likelihoods.Categorical(), priors.normal(0, 1), images, None, 5)
    with pytest.raises(UsageError, match="trees take the rows of a table"):
        RandomForest(problem, ForestSettings())


def test_a_run_stands_beside_networks_and_predicts_new_rows(tmp_path, capsys):
    """From the name alone, without --import: run, compare and load."""
    from given import PENGUINS

    from bench import cli

    settings = {"file": str(PENGUINS), "target": "body_mass_g", "epochs": 2}
    for method in ("bench.trees:GradientBoosting", "map"):
        for seed in (0, 1, 2):
            run = bench.run(method, "own_table", seed=seed, task_settings=settings, out=tmp_path)
            if method != "map":
                trees = run
    assert trees.record.metrics["rmse"] < 400 < 805  # grams; of the target's own spread
    predictor = bench.load(trees.directory)
    row = {"species": "Gentoo", "island": "Biscoe", "bill_length_mm": 47.5, "flipper_length_mm": 217}
    (told,) = predictor.predict([row | {"bill_depth_mm": None, "sex": "female", "year": 2009}])
    assert told["low"] < told["mean"] < told["high"]
    assert math.isfinite(told["sd"])
    assert cli.main(["compare", str(tmp_path)]) == 0
    assert "bench.trees.GradientBoosting" in capsys.readouterr().out
