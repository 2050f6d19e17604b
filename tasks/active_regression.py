"""Active linear regression: what the bias of actively drawn points does to a model that can hardly overfit.

Question: is the risk of actively acquired points biased, do PURE and LURE mend it, and does a straight line
get better when it is trained with them?

Protocol: y = max(0, x) (|x|^1.5 + sin(20 x)/4) without noise. A pool of N = 101 inputs, 5 in [-1.2, -0.8] and
48 in each of [0, 0.5] and [1, 1.5], the same in every run, as are 10,100 test points in the same proportions.
A trajectory acquires 100 points one by one without replacement, the first uniformly. Its scores are distances
to the points acquired before, summed, so that it depends on no label and no model:

- boltzmann: squared distances, standardised over the points left, beta = 1; boltzmann_by_mean divides them by
  their mean instead (the source says "normalised" and not how: see `bench.studies.acquisition.boltzmann`);
- epsilon_greedy: plain distances, the largest with probability 0.9 and a uniform point left with 0.1.

At every M from 10 to 100 a straight line with intercept is fitted to the M points with each of three
objectives: squared losses summed under equal weights (R~), or under those of PURE or LURE. Least squares is
posed as the posterior mean under noise of 0.001 and a prior N(0, 10^2), which add 1e-8 (w^2 + b^2) to the sum
and leaves lines within 1e-5 of numpy's least squares. Only the mean of a method's predictions counts; of each
line two values are kept, at the ends of the inputs.

The bias and variance of R~, PURE and LURE as estimates of a risk are those for ONE function that does not
depend on the points drawn: the line fitted to the whole pool, whose mean loss R^ over the pool is the truth.
The source does not name the function; its estimators are unbiased only for one chosen without the points
("our results all assume that theta is chosen independently of the training data"), and its networks' bias is
that of a network trained beforehand and then fixed. Of a line fitted to the points themselves the
overfitting bias is measured: test risk - R_LURE of the training points.

Source: Farquhar 2022, thesis "Understanding Approximation" (docs/sources.md), section 5.2 (Figs 5.4, 5.8a and
5.9a), appendix C.1 (equations C.1 to C.3, Figs C.1a, C.2 and C.3a); Farquhar, Gal and Rainforth 2021. Its "96
points in each" cluster are 96 in both: N is 101.

What would mislead: intervals are over the trajectories of one pool, and say nothing of other pools; bands are
simultaneous over M (`bench.intervals`), so about one run in twenty shows a bias of an unbiased
estimator; from about M = 90 on all objectives fit nearly the same points, and nothing is left to tell apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.utils.data import TensorDataset

from bench import figures, intervals, likelihoods, networks, predictions, priors, randomness
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
from bench.intervals import Band
from bench.settings import Count, settings
from bench.studies import acquisition, active, risk
from bench.studies.active import OBJECTIVES

NAMES: dict[str, dict[str, object]] = {"active_regression": {}}

PRESETS: dict[str, dict[str, object]] = {
    "smoke": {"trajectories": 3, "step": 45, "epochs": 20},
}

CLUSTERS = ((-1.2, -0.8, 5), (0.0, 0.5, 48), (1.0, 1.5, 48))
"""Interval of the inputs, and points in the pool."""
POOL = 101
TEST_FACTOR = 100
"""Test points for each point of the pool."""
ACQUIRED = 100
FIRST = 10
"""Acquired points from which on lines are fitted."""
NOISE, PRIOR_SD = 0.001, 10.0
BETA, EPSILON = 1.0, 0.1
ENDS = (-1.2, 1.5)
"""Inputs at which fitted lines are kept."""
BIAS_RANGE, ERROR_RANGE = (10, 90), (15, 80)
"""Acquired points M, both ends included, over which risk estimates and test errors are compared."""

X_TITLE = "acquired points M"

Lines = np.ndarray
"""Intercepts and slopes, `[..., 2]`."""


def truth(x: np.ndarray) -> np.ndarray:
    """The function to be learned (equation C.2)."""
    return np.maximum(0, x) * (np.abs(x) ** 1.5 + np.sin(20 * x) / 4)


def draw(part: str) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets `[N]` of the part pool or test, in float32; the same in every run."""
    generator = np.random.default_rng(randomness.derive(0, "active_regression", part))
    factor = TEST_FACTOR if part == "test" else 1
    x = np.concatenate([generator.uniform(low, high, factor * size) for low, high, size in CLUSTERS])
    x = x.astype(np.float32)
    return x, truth(x.astype(np.float64)).astype(np.float32)


def measures() -> dict[str, Metric]:
    """What is measured: name -> what it is."""
    at_bias, at_error = ("M from {} to {}".format(*ends) for ends in (BIAS_RANGE, ERROR_RANGE))

    def squares(description: str) -> Metric:
        return Metric(description, "squared units of y", 0, np.inf)

    def share(description: str, best: int) -> Metric:
        return Metric(f"share of {description}", "fraction", best, 1 - best)

    found = {"full_pool_test_error": squares("mean squared test error, trained on the whole pool")}
    for name, sign in OBJECTIVES.items():
        trained = f"of lines trained with {sign}"
        found |= {
            f"{name}_test_error": squares(f"mean squared test error {trained}, mean over {at_error}"),
            f"{name}_bias": squares(f"largest |mean of {sign} - R^| over {at_bias}"),
            f"{name}_biased": share(f"{at_bias} at which the 95% band of {sign} - R^ excludes 0", best=0),
            f"{name}_overfitting_bias": squares(
                f"largest |mean of test risk - R_LURE| {trained}, over {at_bias}"
            ),
        }
    for name in ("pure", "lure"):
        found[f"{name}_lower_error"] = share(
            f"{at_error} at which the 95% band of test error, trained with {OBJECTIVES[name]} minus trained"
            " with R~, is below 0",
            best=1,
        )
    found["lure_lower_variance"] = share(
        f"{at_bias} at which the 95% band of the variance of LURE over that of PURE is below 1", best=1
    )
    found["variance_ratio"] = Metric(
        f"largest variance of LURE over that of PURE, {at_bias}", "ratio", 0, np.inf
    )
    return found


@settings
class Settings:
    """Settings of active linear regression."""

    proposal: Literal["boltzmann", "boltzmann_by_mean", "epsilon_greedy"] = "boltzmann"
    """How points are drawn: see the protocol."""
    trajectories: Annotated[int, Field(ge=2)] = 1000
    """Repetitions, each with draws of its own, at least 2."""
    step: Annotated[int, Field(ge=1, le=45)] = 1
    """Acquired points between two fits, 1 to 45: methods that fit one after another need large ones."""
    epochs: Count = 1000
    """Full-batch epochs of a fit, at least 1; nothing to a method in closed form."""
    test_samples: Count = 16
    """Weight samples S whose predictions are averaged, at least 1."""


class ActiveRegression(Task):
    """Straight lines through actively acquired points."""

    settings_class = Settings
    settings: Settings

    @property
    def spec(self) -> Spec:
        """What is measured."""
        return Spec(
            question="Does a line get better when the bias of its actively acquired points is removed?",
            source="Farquhar 2022, section 5.2 and appendix C.1",
            version=1,
            metrics=measures(),
            main_metric="lure_test_error",
            requires=frozenset({"weighted"}),
            ranked=False,
            min_seeds=1,
        )

    # ---- data

    def own_data(self, part: str) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets `[N]` of the part pool or test."""
        return draw(part)

    def data_digest(self) -> str:
        """Digest over pool and test points."""
        points = (*self.own_data("pool"), *self.own_data("test"))
        return array_digest(dict(zip(("pool_x", "pool_y", "test_x", "test_y"), points, strict=True)))

    # ---- protocol

    def problem(self) -> Problem:
        """The whole pool."""
        inputs, targets = (torch.from_numpy(a)[:, None] for a in self.own_data("pool"))
        return Problem(
            network=partial(networks.mlp, 1, 1, ()),
            likelihood=likelihoods.Gaussian(NOISE),
            prior=priors.normal(0, PRIOR_SD),
            train=TensorDataset(inputs, targets),
            val=None,
            num_train=POOL,
        )

    def acquire(self, engine: Engine) -> tuple[Tensor, Tensor]:
        """Acquired indices and the probabilities of their draws, `[R, 100]`, all trajectories at once."""
        rows = self.settings.trajectories
        uniforms = torch.stack(
            [
                torch.rand(ACQUIRED, generator=engine.generator("trajectory", r), dtype=torch.float64)
                for r in range(rows)
            ]
        )
        inputs = torch.from_numpy(self.own_data("pool")[0]).double()
        power = 1 if self.settings.proposal == "epsilon_greedy" else 2
        apart = (inputs[:, None] - inputs).abs() ** power
        summed = torch.zeros(rows, POOL, dtype=torch.float64)  # distances to the points acquired so far
        left = torch.arange(POOL).expand(rows, -1)
        acquired = []
        for m in range(ACQUIRED):
            scores = summed.gather(1, left)
            probabilities = acquisition.uniform(scores) if m == 0 else self.propose(scores)
            place = acquisition.inverse_cdf(probabilities, uniforms[:, m])[:, None]
            index = left.gather(1, place)
            acquired.append((index, probabilities.gather(1, place)))
            summed += apart[index[:, 0]]
            left = left[torch.arange(left.shape[1]) != place].view(rows, -1)
        indices, probabilities = (torch.cat(parts, 1) for parts in zip(*acquired, strict=True))
        return indices, probabilities

    def propose(self, scores: Tensor) -> Tensor:
        """Probabilities of the points left, `[R, n]`, from their scores."""
        if self.settings.proposal == "epsilon_greedy":
            return acquisition.epsilon_greedy(scores, EPSILON)
        by_mean = self.settings.proposal == "boltzmann_by_mean"
        return acquisition.boltzmann(scores, BETA, "by_mean" if by_mean else "standardised")

    @property
    def sizes(self) -> list[int]:
        """Acquired points M at which lines are fitted."""
        return list(range(FIRST, ACQUIRED + 1, self.settings.step))

    def run(self, engine: Engine) -> Arrays:
        """Acquisitions of every trajectory, and the ends of every fitted line."""
        stages = len(self.sizes) + 1
        engine.stage("acquisition", 1, stages)
        indices, probabilities = self.acquire(engine)
        problem, sizes, ends = self.problem(), self.sizes, []
        for i, size in enumerate(sizes, 1):
            engine.stage(f"{size} points", i, stages)
            fit = partial(self.fit, engine, problem, indices[:, :size], probabilities[:, :size])
            ends.append(engine.cached(fit)["ends"])
        engine.stage("whole pool", stages, stages)
        full = self.values_at_ends(engine, engine.fit(problem, self.budget), 1)
        pool_inputs, pool_targets = self.own_data("pool")
        return {
            "indices": indices.byte().numpy(),
            "proposal": probabilities.numpy(),
            "ends": np.stack(ends, 1),
            "full_pool_ends": full[0],
            "pool_inputs": pool_inputs,
            "pool_targets": pool_targets,
        }

    @property
    def budget(self) -> Budget:
        """Of every fit."""
        return Budget(self.settings.epochs)

    def fit(self, engine: Engine, problem: Problem, indices: Tensor, probabilities: Tensor) -> Arrays:
        """Lines trained with every objective on the first M points of every trajectory: ends `[3, R, 2]`."""
        weights = torch.stack([active.weights(o, probabilities, POOL) for o in OBJECTIVES])  # [3, R, M]
        of_pool = torch.zeros(*weights.shape[:2], POOL, dtype=torch.float64)
        of_pool.scatter_(2, indices.expand_as(weights), weights)
        fitted = engine.fit_weighted(problem, of_pool.flatten(0, 1), self.budget)
        values = self.values_at_ends(engine, fitted, len(weights) * len(indices))
        return {"ends": values.reshape(*weights.shape[:2], len(ENDS))}

    def values_at_ends(self, engine: Engine, method: Any, fits: int) -> np.ndarray:
        """Averaged predictions at the ends, `[fits, 2]`."""
        prediction = engine.predict(method, torch.tensor(ENDS)[:, None], self.settings.test_samples)
        assert isinstance(prediction, predictions.Gaussian)
        return prediction.mean[..., 0].unflatten(0, (fits, -1)).mean(1).numpy()

    def targets(self) -> Arrays:
        """Inputs and targets of the test points, `[N]`."""
        inputs, targets = self.own_data("test")
        return {"test_inputs": inputs, "test_targets": targets}

    # ---- scoring

    def score(self, arrays: Arrays) -> Metrics:
        """Test errors of the three objectives, and bias and variance of the three estimates."""
        sizes = np.array(self.sizes)
        early, central = ((low <= sizes) & (sizes <= high) for low, high in (BIAS_RANGE, ERROR_RANGE))
        errors, overfitting = line_errors(arrays), overfitting_biases(arrays, sizes)
        biases = {name: values[:, early] for name, values in risk_errors(arrays, sizes).items()}
        scores: Metrics = {f"{name}_test_error": float(e[:, central].mean()) for name, e in errors.items()}
        scores["full_pool_test_error"] = full_pool_error(arrays)
        for name in ("pure", "lure"):
            difference = intervals.paired_difference(errors[name][:, central], errors["plain"][:, central])
            scores[f"{name}_lower_error"] = float((difference.high < 0).mean())
        for name, values in biases.items():
            scores[f"{name}_biased"] = float(intervals.simultaneous_band(values).excludes(0).mean())
            scores[f"{name}_bias"] = float(np.abs(values.mean(0)).max())
            mean = overfitting[name][:, early].mean(0)
            scores[f"{name}_overfitting_bias"] = float(np.abs(mean).max())
        ratio = intervals.paired_ratio(squared_deviations(biases["lure"]), squared_deviations(biases["pure"]))
        scores["lure_lower_variance"] = float((ratio.high < 1).mean())
        scores["variance_ratio"] = float(ratio.centre.max())
        return scores

    def curves(self, arrays: Arrays) -> list[Row]:
        """Means over the trajectories by M: test error, R^ - estimate, its variance, overfitting bias."""
        sizes = self.sizes
        errors = risk_errors(arrays, np.array(sizes))
        measured = {
            "test error": line_errors(arrays),
            "R^ - estimate": {name: -values for name, values in errors.items()},
            "variance of the estimate": {n: squared_deviations(v) for n, v in errors.items()},
            "test risk - R_LURE": overfitting_biases(arrays, np.array(sizes)),
        }
        return [
            Row(curve, OBJECTIVES[name], size, float(value))
            for curve, of_objectives in measured.items()
            for name, values in of_objectives.items()
            for size, value in zip(sizes, values.mean(0), strict=True)
        ]

    def figures(self, arrays: Arrays) -> dict[str, Any]:
        """Example (Fig 5.4a), test error (5.4b), bias (5.8a), variance (C.1a), overfitting bias (5.9a)."""
        return self._figures(arrays)

    def _figures(self, arrays: Arrays, *notes: str) -> dict[str, Any]:
        """The figures, with further lines of their titles."""
        sizes = np.array(self.sizes)
        estimates = {name: -values for name, values in risk_errors(arrays, sizes).items()}
        whole_pool = {"whole pool": full_pool_error(arrays)}
        how = f"{self.settings.proposal}, {len(arrays['indices'])} trajectories"

        def chart(
            title: str,
            y_title: str,
            values: dict[str, np.ndarray],
            kind: intervals.Kind,
            levels: dict[str, float],
        ) -> Any:
            named = {OBJECTIVES[name]: intervals.band(v, kind) for name, v in values.items()}
            titles = [title, f"{how}; {intervals.CAPTIONS[kind]}", *notes]
            return figures.bands(named, self.sizes, titles, X_TITLE, y_title, levels)

        fixed, none = "estimates of one fixed line's risk", {"no bias": 0.0}
        bias, overfitting = "R^ - estimate", overfitting_biases(arrays, sizes)
        unbiased = {name: estimates[name] for name in ("pure", "lure")}
        variances = {OBJECTIVES[n]: Band.flat(v.var(0, ddof=1)) for n, v in estimates.items()}
        return {
            "example": example(arrays, self.sizes, *notes),
            "test_error": chart(
                "Test error after training", "mean squared error", line_errors(arrays), "sd", whole_pool
            ),
            "bias": chart(f"Bias of {fixed}", bias, estimates, "sd", none),
            "unbiased": chart(f"Bias of unbiased {fixed}", bias, unbiased, "simultaneous", none),
            "variance": figures.bands(
                variances,
                self.sizes,
                [f"Variance of {fixed}", how, *notes],
                X_TITLE,
                "variance",
                logarithmic=True,
            ),
            "overfitting_bias": chart(
                "Overfitting bias after training", "test risk - R_LURE", overfitting, "sd", none
            ),
        }

    @classmethod
    def compare(cls, runs: Sequence[FinishedRun]) -> Comparison:
        """The figures of every run, whose bands are over its own trajectories, and all metrics."""
        charts = {
            f"{run.task_identity}-{run.method_identity}-seed{run.seed}-{name}": chart
            for run in runs
            for name, chart in run.task._figures(run.arrays, figures.footer([run.label])).items()
        }
        return replace(super().compare(runs), charts=charts)


# --------------------------------------------------------------------------------- what the arrays tell


def lines(ends: np.ndarray) -> Lines:
    """The lines that pass through values `[..., 2]` at the ends of the inputs."""
    first, last = np.moveaxis(ends.astype(np.float64), -1, 0)
    slope = (last - first) / (ENDS[1] - ENDS[0])
    return np.stack([first - slope * ENDS[0], slope], -1)


def mean_squared_error(line: Lines, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Mean of (y - line(x))^2 over the points `[N]`, `[...]`: from their moments, whatever N."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    best, intercept = np.polyfit(x, y, 1)
    residual = np.mean((y - intercept - best * x) ** 2)
    # The residuals of the best line are orthogonal to every line: errors add.
    shift, tilt = np.moveaxis(line, -1, 0)
    shift, tilt = shift - intercept, tilt - best
    return residual + shift**2 + 2 * shift * tilt * x.mean() + tilt**2 * np.mean(x**2)


def full_pool_error(arrays: Arrays) -> float:
    """Mean squared test error of the line fitted to the whole pool."""
    line = lines(arrays["full_pool_ends"])
    return float(mean_squared_error(line, arrays["test_inputs"], arrays["test_targets"]))


def line_errors(arrays: Arrays) -> dict[str, np.ndarray]:
    """Mean squared test errors `[R, M]` of the lines trained with each objective."""
    errors = mean_squared_error(lines(arrays["ends"]), arrays["test_inputs"], arrays["test_targets"])
    return {name: e.T for name, e in zip(OBJECTIVES, errors, strict=True)}


def _acquired_losses(arrays: Arrays, line: Lines, size: int) -> np.ndarray:
    """Squared losses of the first `size` points of every trajectory, `[R, M]`, under lines `[..., 2]`."""
    x, y = (
        arrays[f"pool_{k}"].astype(np.float64)[arrays["indices"][:, :size]] for k in ("inputs", "targets")
    )
    return (y - line[..., :1] - line[..., 1:] * x) ** 2


def risk_errors(arrays: Arrays, sizes: np.ndarray) -> dict[str, np.ndarray]:
    """Estimates of the full-pool line's risk minus the risk R^, `[R, M]`."""
    line = lines(arrays["full_pool_ends"])
    full = mean_squared_error(line, arrays["pool_inputs"], arrays["pool_targets"])
    errors: dict[str, list[np.ndarray]] = {name: [] for name in OBJECTIVES}
    for size in sizes:
        losses, q = _acquired_losses(arrays, line, size), arrays["proposal"][:, :size]
        for name, values in errors.items():
            values.append(active.estimate(name, losses, q, POOL) - full)
    return {name: np.stack(values, 1) for name, values in errors.items()}


def overfitting_biases(arrays: Arrays, sizes: np.ndarray) -> dict[str, np.ndarray]:
    """Test risk minus R_LURE of the training points (5.10), `[R, M]`, of lines trained by each objective."""
    of_training: dict[str, list[np.ndarray]] = {name: [] for name in OBJECTIVES}
    for i, size in enumerate(sizes):
        for name, line in zip(OBJECTIVES, lines(arrays["ends"][:, i]), strict=True):
            losses = _acquired_losses(arrays, line, size)
            of_training[name].append(risk.lure(losses, arrays["proposal"][:, :size], POOL))
    return {name: e - np.stack(of_training[name], 1) for name, e in line_errors(arrays).items()}


def squared_deviations(values: np.ndarray) -> np.ndarray:
    """Squared deviations from the mean over the repetitions `[R, M]`, whose mean is the variance (R - 1)."""
    return (values - values.mean(0)) ** 2 * len(values) / (len(values) - 1)


def example(arrays: Arrays, sizes: list[int], *notes: str) -> Any:
    """The pool, the points that the first trajectory acquired first, and the lines fitted to them."""
    at = int(np.abs(np.array(sizes) - 20).argmin())
    pool = np.stack([arrays["pool_inputs"], arrays["pool_targets"]], 1)
    is_acquired = np.isin(np.arange(len(pool)), arrays["indices"][0, : sizes[at]])
    fitted = {sign: arrays["ends"][k, at, 0] for k, sign in enumerate(OBJECTIVES.values())}
    fitted["whole pool"] = arrays["full_pool_ends"]
    return figures.points_and_lines(
        {"acquired": pool[is_acquired].tolist(), "in the pool": pool[~is_acquired].tolist()},
        {name: list(zip(ENDS, ends.tolist(), strict=True)) for name, ends in fitted.items()},
        [f"The first trajectory with M = {sizes[at]}", "lines trained with each objective", *notes],
    )
