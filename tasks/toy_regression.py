"""In-between uncertainty: a sine seen in two intervals, and a posterior that should be unsure between them.

Question: how much wider is the posterior over functions between two clusters of data than at the clusters?

Protocol: y = sin(4(x - 4.3)) + N(0, 0.05^2), 750 training points in each of [-2, -1.4] and [1.0, 1.8], the
same for every run. Networks of `layers` hidden layers of 100 units, leaky ReLU; the noise is known, the prior
N(0, 1). One fit in batches of 250, then 200 weight samples on a grid over [-3, 3] and at test points in the
clusters and between them. The standard deviation of the function (observation noise excluded) is averaged
over the grid inputs in the clusters, and over those in [-0.8, 0.4], the middle half of the gap. The
temperature T weighs prior against likelihood: "kl" is the loss NLL + T KL, i.e. the likelihood to the power
1/T, "likelihood" the power T. Both are posed as example weights, so that every method infers the same
posterior, a sampler included.

Source: Farquhar 2022, thesis "Understanding Approximation" (docs/sources.md), section 3.2 (Figs 3.6 and 3.7)
and Table A.1. Deviations: what T multiplies is not said there; preset standard has a third of the published
epochs and, for mean-field inference, a higher rate; methods draw weights once a batch, where the thesis used
Flipout; the slope of the leaky ReLU is 0.01.

What would mislead: the ratio depends on the temperature and compares methods at one T only; it is no score
(a posterior can be too wide), hence this task is not ranked and the distance to a reference posterior stands
beside it. A fit that has not converged is wide at the data, which makes the ratio small: see `data_sd`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import TensorDataset

from bench import figures, likelihoods, metrics, networks, predictions, priors
from bench.contract import (
    Arrays,
    Budget,
    Comparison,
    Engine,
    FinishedRun,
    Layout,
    Method,
    Metric,
    Metrics,
    Problem,
    Row,
    Spec,
    Task,
    Undefined,
)
from bench.data import array_digest
from bench.fresh import Fresh
from bench.settings import Count, Positive, settings
from bench.studies import forecasts, references
from bench.studies.small import CLUSTERS, GAP, NOISE, POINTS, fresh_points, points, sine

NAMES: dict[str, dict[str, object]] = {"toy_regression": {}}

PRESETS: dict[str, dict[str, object]] = {
    "smoke": {"epochs": 20, "test_samples": 20},
    "paper": {"epochs": 6000},
}

MIDDLE = (-0.8, 0.4)
GRID = np.arange(-120, 121) / 40  # ends of the regions fall on it, to the last bit
BATCH_SIZE = 250
GAPPED = ", between the clusters"
"""Ends the descriptions of scores there."""

_DRAWS = 200
"""Quantiles that a reference keeps of the function at each input."""


@settings
class Settings:
    """Settings of toy regression."""

    layers: Count = 1
    """Hidden layers, at least 1."""
    hidden: Count = 100
    """Units in each hidden layer, at least 1."""
    temperature: Positive = 65.0
    """T, above 0; 1 is Bayes."""
    temperature_on: Literal["kl", "likelihood"] = "kl"
    """What T multiplies: kl, as in the loss NLL + T KL, or likelihood, as in T NLL + KL."""
    epochs: Count = 2000
    """Epochs, at least 1."""
    test_samples: Count = 200
    """Weight samples S per prediction, at least 1."""


class ToyRegression(Task):
    """A sine seen in two intervals."""

    settings_class = Settings
    settings: Settings

    @property
    def spec(self) -> Spec:
        """What is measured."""
        distance = "root mean square"
        return Spec(
            question="How much wider is the posterior over functions between the data than at them?",
            source="Farquhar 2022, section 3.2 and Table A.1",
            version=2,
            metrics={
                "gap_ratio": Metric("gap_sd over data_sd; 0 without spread", "ratio", np.inf, 0),
                "gap_sd": Metric("mean sd of the function in [-0.8, 0.4]", "units of y", np.inf, 0),
                "data_sd": Metric("mean sd of the function in the clusters", "units of y", 0, np.inf),
                "test_nll": Metric("mean of -log p(y) in the clusters", "nats", -np.inf, np.inf),
                "gap_nll": Metric("mean of -log p(y) between the clusters", "nats", -np.inf, np.inf),
                "wasserstein_to_reference": Metric(
                    f"{distance} over the grid of the 2-Wasserstein distance to the reference's function",
                    "units of y",
                    0,
                    np.inf,
                    may_be_undefined=True,
                ),
                "wasserstein_in_gap": Metric(
                    "the same over the grid between the clusters", "units of y", 0, np.inf, True
                ),
                **forecasts.measures("units of y", ", in the clusters"),
                **{
                    f"gap_{name}": metric for name, metric in forecasts.measures("units of y", GAPPED).items()
                },
            },
            main_metric="gap_ratio",
            requires=frozenset() if self.likelihood_weight == 1 else frozenset({"weighted"}),
            ranked=False,
            validation_metric="test_nll",
        )

    @property
    def likelihood_weight(self) -> float:
        """The power of the likelihood in the posterior: the weight of every training example."""
        t = self.settings.temperature
        return 1 / t if self.settings.temperature_on == "kl" else t

    # ---- data

    def own_data(self, part: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and observations of a part of POINTS, each `[N, 1]`."""
        return points(part)

    def data_digest(self) -> str:
        """Digest over all points and the reference."""
        arrays = {
            f"{part}_{kind}": t.numpy()
            for part in POINTS
            for kind, t in zip("xy", self.own_data(part), strict=True)
        }
        return array_digest(arrays | references.read(self.target))

    # ---- protocol

    def problem(self) -> Problem:
        """The training points, weighted."""
        inputs, targets = self.own_data("train")
        weights = () if self.likelihood_weight == 1 else (torch.full((len(inputs),), self.likelihood_weight),)
        hidden = (self.settings.hidden,) * self.settings.layers
        return Problem(
            network=partial(networks.mlp, 1, 1, hidden, "leaky_relu"),
            likelihood=likelihoods.Gaussian(NOISE),
            prior=priors.normal(0, 1),
            train=TensorDataset(inputs, targets, *weights),
            val=TensorDataset(*self.own_data("val")),
            num_train=len(inputs),
        )

    def run(self, engine: Engine) -> Arrays:
        """Predicted means on the grid, at the test points of the clusters, and at those of the gap."""
        engine.stage("fit")
        problem = self.problem()
        method = engine.fit(problem, Budget(self.settings.epochs, BATCH_SIZE))
        samples = self.settings.test_samples
        inputs, targets = self.own_data("val")
        held_out = engine.predict(method, inputs, samples)
        engine.log("test_nll", float(-held_out.log_score(targets).mean()), self.settings.epochs)
        grid = torch.from_numpy(GRID[:, None]).float()
        places = torch.cat([grid, *(self.own_data(part)[0] for part in ("test", "gap"))])
        return stored(engine.predict(method, places, samples), samples)

    def targets(self) -> Arrays:
        """Observations `[N]` at the test points, and the reference's function `[R, 241]` if there is one."""
        observed = {f"{part}_targets": self.own_data(part)[1].squeeze(1).numpy() for part in ("test", "gap")}
        return observed | references.read(self.target)

    def fresh(self) -> Fresh:
        """Other points, in the clusters and between them."""
        return FreshPoints(self.settings.test_samples)

    @property
    def target(self) -> str:
        """Network and power of the likelihood; temperatures of either kind with one power share it."""
        s = self.settings
        return (
            f"toy_regression-layers={s.layers},hidden={s.hidden},temperature={1 / self.likelihood_weight:.9g}"
        )

    def reference(self, arrays: Arrays) -> Arrays:
        """Quantiles of the function at every grid input, `[200, 241]`."""
        levels = (np.arange(_DRAWS) + 0.5) / _DRAWS
        quantiles = np.quantile(functions(arrays)[:, : len(GRID)], levels, axis=0)
        return {"reference": quantiles.astype(np.float32)}

    # ---- scoring

    def score(self, arrays: Arrays) -> Metrics:
        """Spread of the function, scores of the mixture over the samples, distances to the reference."""
        _, sd = moments(arrays)
        at_data = np.any([(low <= GRID) & (high >= GRID) for low, high in CLUSTERS], 0)
        in_gap = (MIDDLE[0] <= GRID) & (MIDDLE[1] >= GRID)
        gap_sd, data_sd = float(sd[in_gap].mean()), float(sd[at_data].mean())
        test, gap = nlls(arrays)
        scores: Metrics = {
            "gap_ratio": gap_sd / data_sd if data_sd > 0 else 0.0,
            "gap_sd": gap_sd,
            "data_sd": data_sd,
            "test_nll": test,
            "gap_nll": gap,
            **_forecasts(arrays),
        }
        if "reference" not in arrays:
            names = ("wasserstein_to_reference", "wasserstein_in_gap")
            return scores | dict.fromkeys(names, Undefined(references.missing(self.target)))
        squared = metrics.wasserstein(functions(arrays)[:, : len(GRID)], arrays["reference"]) ** 2
        between = (GAP[0] <= GRID) & (GAP[1] >= GRID)
        return scores | {
            "wasserstein_to_reference": float(np.sqrt(squared.mean())),
            "wasserstein_in_gap": float(np.sqrt(squared[between].mean())),
        }

    def curves(self, arrays: Arrays) -> list[Row]:
        """Mean and standard deviation of the function over the grid."""
        return [
            Row(curve, "posterior", float(x), float(value))
            for curve, values in zip(("mean", "standard deviation"), moments(arrays), strict=True)
            for x, value in zip(GRID, values, strict=True)
        ]

    def figures(self, arrays: Arrays) -> dict[str, Any]:
        """The posterior over functions, beside the reference's if there is one."""
        series = {"posterior": moments(arrays)}
        if "reference" in arrays:
            series["reference"] = reference_moments(arrays)
        return {"function": chart(series)}

    @classmethod
    def compare(cls, runs: Sequence[FinishedRun]) -> Comparison:
        """The functions of all runs of one problem beside each other, the reference's first; all metrics."""
        charts = {}
        for identity in dict.fromkeys(run.task_identity for run in runs):
            of_problem = [run for run in runs if run.task_identity == identity]
            several = len({run.seed for run in of_problem}) > 1
            series = {
                run.method_identity + (f", seed {run.seed}" if several else ""): moments(run.arrays)
                for run in of_problem
            }
            referred = [run.arrays for run in of_problem if "reference" in run.arrays]
            if referred:
                series = {"reference": reference_moments(referred[0])} | series
            charts[f"{identity}-side_by_side"] = chart(series)
        return replace(super().compare(runs), charts=charts)


class FreshPoints(Fresh):
    """Other test points than the task's own; `samples` are the weight samples of a prediction."""

    layouts = {
        "means": Layout("float32", ("S", "N")),
        "variances": Layout("float32", (("S", 1), ("N", 1))),
    }

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def draw(self, seed: int) -> tuple[Arrays, Arrays]:
        """Inputs and observations, each `[N, 1]`."""
        inputs, targets = fresh_points(seed)
        return {"inputs": inputs}, {"targets": targets}

    def predict(self, engine: Engine, method: Method, inputs: Arrays) -> Arrays:
        """Means and variances, as a run keeps them."""
        return stored(engine.predict(method, torch.from_numpy(inputs["inputs"]), self.samples), self.samples)

    def losses(self, arrays: Arrays) -> np.ndarray:
        """-log p(y) of each point under the mixture of the samples, in nats."""
        return log_losses(arrays, slice(None), arrays["targets"])


def stored(prediction: predictions.Prediction, samples: int) -> Arrays:
    """What is kept of N points: means `[S, N]`, and variances `[S, N]` or, if all are equal, `[1, 1]`."""
    assert isinstance(prediction, predictions.Gaussian)
    # An ensemble has more draws than asked for, member after member: every member keeps its share.
    rows = torch.linspace(0, len(prediction.mean) - 1, min(samples, len(prediction.mean))).round().long()
    variances = prediction.variance[rows, :, 0]
    if (variances == variances[0, 0]).all():  # no more than the observation noise, as in most methods
        variances = variances[:1, :1]
    means = prediction.mean[rows, :, 0]
    return {"means": means.float().numpy(), "variances": variances.float().numpy()}


def functions(arrays: Arrays) -> np.ndarray:
    """Equally probable values of the function, without observation noise, at every stored input, `[S, N]`.

    A prediction whose variance exceeds the noise stands for a normal of its own: 25 values per sample that
    have its mean and variance.
    """
    means = arrays["means"].astype(np.float64)
    excess = arrays["variances"].astype(np.float64) - NOISE**2
    if (excess <= 1e-6 * NOISE**2).all():
        return means
    levels = torch.special.ndtri((torch.arange(25, dtype=torch.float64) + 0.5) / 25).numpy()
    spread = np.sqrt(excess.clip(min=0)) * (levels / levels.std())[:, None, None]
    return (means + spread).reshape(-1, means.shape[1])


def nlls(arrays: Arrays) -> tuple[float, float]:
    """Mean of -log p(y) under the equal mixture of the samples, in the clusters and between them, in nats."""
    targets = np.concatenate([arrays["test_targets"], arrays["gap_targets"]])
    losses = torch.from_numpy(log_losses(arrays, slice(len(GRID), None), targets[:, None]))
    test, gap = losses.split([len(arrays["test_targets"]), len(arrays["gap_targets"])])
    return float(test.mean()), float(gap.mean())


def _forecasts(arrays: Arrays) -> dict[str, float]:
    """CRPS and what belongs to it, of the mixture over the samples, in the clusters and between them."""
    means, sigma = arrays["means"].astype(np.float64), np.sqrt(arrays["variances"].astype(np.float64))
    sigma = np.broadcast_to(sigma, means.shape)
    end = len(GRID) + len(arrays["test_targets"])
    found: dict[str, float] = {}
    for prefix, rows, targets in (
        ("", slice(len(GRID), end), arrays["test_targets"]),
        ("gap_", slice(end, None), arrays["gap_targets"]),
    ):
        scores = forecasts.measured(means[:, rows], sigma[:, rows], targets.astype(np.float64))
        found |= {prefix + name: value for name, value in scores.items()}
    return found


def log_losses(arrays: Arrays, rows: slice, targets: np.ndarray) -> np.ndarray:
    """-log p(y) of some of the stored inputs with observations `[N, 1]`, in nats, `[N]`."""
    means = torch.from_numpy(arrays["means"].astype(np.float64))
    variances = torch.from_numpy(arrays["variances"].astype(np.float64)).expand_as(means)
    prediction = predictions.Gaussian(means[:, rows, None], variances[:, rows, None])
    return -prediction.log_score(torch.from_numpy(targets.astype(np.float64))).numpy()


Moments = tuple[np.ndarray, np.ndarray]
"""Mean and standard deviation of the function over the grid, each `[241]`."""


def moments(arrays: Arrays) -> Moments:
    """Of a run."""
    draws = functions(arrays)[:, : len(GRID)]
    return draws.mean(0), draws.std(0)


def reference_moments(arrays: Arrays) -> Moments:
    """Of the reference that a run was compared with."""
    draws = arrays["reference"].astype(np.float64)
    return draws.mean(0), draws.std(0)


def chart(series: Mapping[str, Moments]) -> Any:
    """Functions of one or several runs, beside each other, with the true function and every tenth point."""
    inputs, targets = (t[::10, 0].tolist() for t in points("train"))
    title = "Function with 1 and 2 standard deviations"
    tenth = list(zip(inputs, targets, strict=True))
    return figures.functions(series, GRID, title, (-3, 3), sine(GRID), tenth)
