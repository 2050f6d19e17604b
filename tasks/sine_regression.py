"""How many modes a posterior has: a sine, and a mixture of normals with more components than it needs.

Question: does a mixture that may have several components use more than one, and what do the others cost?

Protocol: y = sin(x) / 2 + N(0, 0.1^2) at 100 evenly spaced inputs in [-7, 7], the same for every run. A
network of one hidden layer of 100 tanh units, with a tanh on its output; known noise and the prior N(0, 1).
One fit of 3000 full-batch steps. What a method says of itself after the fit (number of components, their
weights, the bound on the evidence for every number that was tried) is in the record, and its course in the
curves. 100 weight samples at 1000 new points of [-7, 7] and on a grid say what the posterior predicts.

Source: shuiruge 2017, "Neural Network for Posterior", nn4post (docs/sources.md), Fig. 1 and section 6; its
settings are those of the public code that the figure names. Deviations: the source gives neither test points
nor where components start; ours start at weights drawn from the prior.

What would mislead: two components that have come to one place share its weight, and look like two modes by
their number; the bound tells. A mixture whose components all sit at one mode predicts as one normal does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from bench import figures, likelihoods, networks, predictions, priors, randomness
from bench.contract import (
    Arrays,
    Budget,
    Comparison,
    Engine,
    FinishedRun,
    Metric,
    Metrics,
    Problem,
    Row,
    Spec,
    Task,
)
from bench.data import array_digest
from bench.settings import Count, settings
from bench.studies import forecasts, normals

NAMES: dict[str, dict[str, object]] = {"sine_regression": {}}

PRESETS: dict[str, dict[str, object]] = {
    "smoke": {"hidden": 5, "epochs": 20, "test_samples": 20},
    "paper": {},
}

NOISE = 0.1
"""Standard deviation of an observation."""
ENDS = (-7.0, 7.0)
GRID = np.linspace(*ENDS, 141)
NUM_TRAIN, NUM_TEST = 100, 1000


def sine(x: np.ndarray) -> np.ndarray:
    """The function that was observed."""
    half: np.ndarray = np.sin(x) / 2
    return half


def network(hidden: int, dropout: float = 0.0) -> nn.Sequential:
    """1-hidden-1 with tanh units, the output too; weights and biases are drawn from N(0, 1)."""
    layers = nn.Sequential(*networks.mlp(1, 1, (hidden,), "tanh", dropout), nn.Tanh())
    for parameter in layers.parameters():
        nn.init.normal_(parameter)
    return layers


@settings
class Settings:
    """Settings of the sine."""

    hidden: Count = 100
    """Units of the hidden layer, at least 1."""
    epochs: Count = 3000
    """Full-batch steps, at least 1."""
    test_samples: Count = 100
    """Weight samples S per prediction, at least 1."""


class SineRegression(Task):
    """A sine, observed with noise."""

    settings_class = Settings
    settings: Settings

    @property
    def spec(self) -> Spec:
        """What is measured."""
        return Spec(
            question="Does a mixture that may have several components use more than one?",
            source="shuiruge 2017, Fig. 1 and section 6",
            version=2,
            metrics={
                "test_nll": Metric("mean of -log p(y) at new points", "nats", -np.inf, np.inf),
                "rmse": Metric("of the mean, against the true function on the grid", "units of y", 0, np.inf),
                "sd": Metric("mean over the grid of the function's sd", "units of y", 0, np.inf),
                **forecasts.measures("units of y"),
            },
            main_metric="test_nll",
            ranked=False,
        )

    # ---- data

    def own_data(self, part: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and observations of the part train or test, each `[N, 1]`."""
        generator = np.random.default_rng(randomness.derive(0, "sine_regression", part))
        is_train = part == "train"
        x = np.linspace(*ENDS, NUM_TRAIN) if is_train else generator.uniform(*ENDS, NUM_TEST)
        y = sine(x) + NOISE * generator.standard_normal(len(x))
        return torch.from_numpy(x[:, None]).float(), torch.from_numpy(y[:, None]).float()

    def data_digest(self) -> str:
        """Digest over all points."""
        parts = {part: self.own_data(part) for part in ("train", "test")}
        return array_digest(
            {f"{p}_{k}": t.numpy() for p, of in parts.items() for k, t in zip("xy", of, strict=True)}
        )

    # ---- protocol

    def problem(self) -> Problem:
        """The training points."""
        train = TensorDataset(*self.own_data("train"))
        posed = partial(network, self.settings.hidden)
        return Problem(posed, likelihoods.Gaussian(NOISE), priors.normal(0, 1), train, None, len(train))

    def run(self, engine: Engine) -> Arrays:
        """Mean and variance of every draw on the grid and at the test points."""
        engine.stage("fit")
        method = engine.fit(self.problem(), Budget(self.settings.epochs))
        grid = torch.from_numpy(GRID[:, None]).float()
        inputs = torch.cat([grid, self.own_data("test")[0]])
        found = engine.predict(method, inputs, self.settings.test_samples)
        assert isinstance(found, predictions.Gaussian)
        # An ensemble has more draws than asked for, member after member: every member keeps its share.
        size = min(self.settings.test_samples, len(found.mean))
        rows = torch.linspace(0, len(found.mean) - 1, size).round().long()
        means, variances = normals.stored(found.mean[rows, :, 0], found.variance[rows, :, 0])
        return {"means": means, "variances": normals.without_repeats(variances)}

    def targets(self) -> Arrays:
        """Observations of the test points `[1000]`."""
        return {"targets": self.own_data("test")[1].squeeze(1).numpy()}

    # ---- scoring

    def score(self, arrays: Arrays) -> Metrics:
        """NLL and further scores of the mixture over the draws; error and spread of the function."""
        means, sigma = arrays["means"].astype(np.float64), np.sqrt(arrays["variances"].astype(np.float64))
        tested = means[:, len(GRID) :]
        sigma = np.broadcast_to(sigma, means.shape)[:, len(GRID) :]
        targets = arrays["targets"].astype(np.float64)
        log_density = normals.log_density(tested, sigma, targets)
        mean, sd = function(arrays)
        return {
            "test_nll": float(-log_density.mean()),
            "rmse": float(np.sqrt(np.square(mean - sine(GRID)).mean())),
            "sd": float(sd.mean()),
            **forecasts.measured(tested, sigma, targets),
        }

    def curves(self, arrays: Arrays) -> list[Row]:
        """Mean and standard deviation of the function over the grid."""
        return [
            Row(curve, "posterior", float(x), float(value))
            for curve, values in zip(("mean", "standard deviation"), function(arrays), strict=True)
            for x, value in zip(GRID, values, strict=True)
        ]

    def figures(self, arrays: Arrays) -> dict[str, Any]:
        """The posterior over functions."""
        title = "Function with 1 and 2 standard deviations"
        observed = list(zip(*(t[:, 0].tolist() for t in self.own_data("train")), strict=True))
        series = {"posterior": function(arrays)}
        return {"function": figures.functions(series, GRID, title, (-1.2, 1.2), sine(GRID), observed)}

    @classmethod
    def compare(cls, runs: Sequence[FinishedRun]) -> Comparison:
        """Loss and largest weight of a component, by step (Fig. 1), and all metrics."""
        charts = {"loss": by_step(runs, "loss"), "weight": by_step(runs, "largest_weight")}
        named = {f"sine_regression-{name}": chart for name, chart in charts.items() if chart is not None}
        return replace(super().compare(runs), charts=named)


def function(arrays: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of the function over the grid, each `[141]`, without observation noise."""
    means = arrays["means"][:, : len(GRID)].astype(np.float64)
    variances = np.broadcast_to(arrays["variances"].astype(np.float64), arrays["means"].shape)
    excess = (variances[:, : len(GRID)] - NOISE**2).mean(0).clip(min=0)
    return means.mean(0), np.sqrt(means.var(0) + excess)


def by_step(runs: Sequence[FinishedRun], curve: str) -> Any:
    """A curve of the fits, a colour per method, a line per seed; None if no fit has it."""
    import altair as alt

    values = [
        {"method": run.method_identity, "seed": run.seed, "step": row.x, "value": row.value}
        for run in runs
        for row in run.curves
        if (row.curve, row.series) == (curve, "fit")
    ]
    if not values:
        return None
    names = sorted({row["method"] for row in values})
    colours = alt.Scale(domain=names, range=list(figures.COLOURS[: len(names)]))
    title, scale = {
        "loss": ("loss per observation, nats", alt.Scale(type="symlog", constant=0.1)),
        "largest_weight": ("largest weight of a component", alt.Scale(domain=[0, 1])),
    }[curve]
    steps = alt.Axis(tickMinStep=1, format=",d")
    return (
        alt.Chart(alt.Data(values=values))
        .mark_line()
        .encode(
            x=alt.X("step:Q", title="step", scale=alt.Scale(type="log"), axis=steps),
            y=alt.Y("value:Q", title=title, scale=scale),
            stroke=alt.Stroke("method:N", title=None, scale=colours, legend=alt.Legend(symbolType="stroke")),
            detail="seed:N",
        )
        .properties(
            title=figures.titled(f"{title.capitalize()}; a line for each seed"), width=400, height=260
        )
    )
