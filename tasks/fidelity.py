"""Fidelity: how far from the exact posterior is what a method predicts?

Question: how far are a method's predictions from those of the exact posterior?

Protocol: one small problem with a normal prior N(0, 1) and known noise, so that Hamiltonian Monte Carlo draws
from its posterior. One fit in batches; then S = 80 weight samples at fixed test inputs. What is compared is
the function at an input, for classes their probabilities. The main metric is the 1-Wasserstein distance
between the S draws and the reference's 80 quantiles, mean over inputs: of a number in standard deviations of
the reference at that input, of probabilities half the sum over the classes. A method of one draw is a point
mass. The problems:

- toy: every tenth of the 1500 points of `toy_regression`, under noise of 0.4; a hidden layer of 20 units,
  leaky ReLU; 200 test inputs at the data and 100 between them;
- iris: the flowers of `iris_depth` at depth 2, two hidden layers of 4 units, leaky ReLU; 50 test flowers;
- diabetes: the first split of `diabetes_regression`, inputs and target standardised by its 398 training rows,
  under noise of 54, the residual of least squares; a hidden layer of 20 units, ReLU; 44 test rows;
- digits: 0 against 1, the first pair of `split_digits`, with one output; a hidden layer of 20 units, ReLU;
  test images of all ten digits, since on 0 and 1 alone nearly every method is sure and right.

The reference is one run of a sampler with an even number of chains: two independent runs, the first half of
them and the second. The first half gives the quantiles, of the second 80 draws are kept. Their distance, by
the same function, is the floor that stands beside every score: what exact draws score that are as few. A run
may become a reference only if split R-hat of the predictions at every test input, over all chains of both
halves, is at most 1.05.

Source: none; agreement and total variation as in Wilson et al. 2022, Evaluating Approximate Inference in
Bayesian Deep Learning; data as in the tasks named above (docs/sources.md).

What would mislead: a distance below the floor is no distance, for 80 draws say no more. Agreement and total
variation compare averaged predictions alone: a point prediction in the right place has them right and no
posterior at all, and only `wasserstein` tells. A standard deviation is small where there are many data: there
a fit that has not converged is many of them away. Nearer to the posterior is not better at predicting, since
prior and noise are chosen, not true: `nll` stands beside it.
"""

from __future__ import annotations

from functools import cached_property, partial
from typing import Literal, NamedTuple

import numpy as np
import torch
from scipy.special import expit, logsumexp
from torch import Tensor
from torch.utils.data import TensorDataset

from bench import data, likelihoods, metrics, networks, predictions, priors, tables
from bench.contract import (
    Arrays,
    Budget,
    Engine,
    Layout,
    Method,
    Metric,
    Metrics,
    Prediction,
    Problem,
    Spec,
    Task,
    Undefined,
)
from bench.data import array_digest
from bench.settings import Count, Share, settings
from bench.spec import PREDICTED
from bench.studies import functions, references
from bench.studies.small import flowers, points, split_rows

NAMES: dict[str, dict[str, object]] = {
    "fidelity_toy": {"posterior": "toy"},
    "fidelity_iris": {"posterior": "iris"},
    "fidelity_diabetes": {"posterior": "diabetes"},
    "fidelity_digits": {"posterior": "digits"},
}

PRESETS: dict[str, dict[str, object]] = {"smoke": {"epochs": 5, "test_samples": 4}}

LEVELS = functions.LEVELS
"""Probabilities of the quantiles that a reference keeps."""
PARTS = ("test", "gap")
"""Held-out parts of the toy data."""


class Posed(NamedTuple):
    """A problem, but for its data.

    Attributes:
        network: Inputs, outputs, hidden units, activation.
        likelihood: Of its outputs; None is normal, with the standard deviation `noise`.
        noise: Standard deviation of observed numbers, in the unit of the target.
        epochs: Of a standard run, which come to about 3000 steps.
        batch_size: Examples per step.
        test: Number of test inputs.
        classes: Of a prediction that is kept as log-probabilities; 0 if one number is kept.
    """

    network: tuple[int, int, tuple[int, ...], str]
    likelihood: type[likelihoods.Categorical | likelihoods.Bernoulli] | None
    noise: float
    epochs: int
    batch_size: int
    test: int
    classes: int = 0


POSED = {
    "toy": Posed((1, 1, (20,), "leaky_relu"), None, 0.4, 1000, 50, 300),
    "iris": Posed((4, 3, (4, 4), "leaky_relu"), likelihoods.Categorical, 0, 400, 16, 50, 3),
    "diabetes": Posed((10, 1, (20,), "relu"), None, 54, 250, 32, 44),
    "digits": Posed((64, 1, (20,), "relu"), likelihoods.Bernoulli, 0, 300, 32, 355),
}
THINNED = 10
"""Of the toy data every so many points are trained on."""


@settings
class Settings:
    """Settings of fidelity."""

    posterior: Literal["toy", "iris", "diabetes", "digits"]
    """Problem: fixed by the task's name."""
    units: Count | None = None
    """Units of every hidden layer, at least 1; null is as many as the problem has. Another number of units is
    another posterior, with a reference of its own."""
    epochs: Count | None = None
    """Epochs, at least 1; null is as many as make about 3000 steps."""
    test_samples: Count = 80
    """Weight samples S per prediction, at least 1."""
    validation: Share | None = None
    """Share of the training examples that are set aside, evenly over them, to tune by; null sets none aside.
    The posterior is then that of the others, and the reference is not."""


class Examples(NamedTuple):
    """Training examples and test inputs; `centre` and `scale` turn outputs into the target's unit."""

    inputs: Tensor
    targets: Tensor
    test_inputs: Tensor
    centre: float = 0.0
    scale: float = 1.0


class Fidelity(Task):
    """One fit, and its distance to the exact posterior."""

    settings_class = Settings
    settings: Settings
    tuned_with = {"validation": 0.2}
    tuned_by = "wasserstein"

    @property
    def posed(self) -> Posed:
        """The problem, but for its data."""
        posed = POSED[self.settings.posterior]
        if self.settings.units is None:
            return posed
        inputs, outputs, hidden, activation = posed.network
        return posed._replace(network=(inputs, outputs, (self.settings.units,) * len(hidden), activation))

    @property
    def spec(self) -> Spec:
        """What is measured."""
        classes = self.posed.likelihood is not None
        absent = not references.exists(self.target)
        distance = "1-Wasserstein distance to the reference's draws, mean over test inputs"
        unit = "probability" if classes else "sd of the reference"
        found = {
            "wasserstein": Metric(distance, unit, 0, np.inf, absent),
            "nll": Metric("mean of -log p(target) on test targets", "nats", -np.inf, np.inf),
        }
        if classes:
            found |= {
                "total_variation": Metric(
                    "distance of the averaged probabilities to the reference's, mean over test inputs",
                    "fraction",
                    0,
                    1,
                    absent,
                ),
                "agreement": Metric(
                    "share of test inputs where the reference names the same class", "fraction", 1, 0, absent
                ),
            }
        for name in [name for name in found if name != "nll"]:
            metric = found[name]
            about = f"the {name} of a second independent run of the reference's sampler"
            found[f"{name}_floor"] = Metric(about, metric.unit, metric.best, metric.worst, absent)
        return Spec(
            question="How far are a method's predictions from those of the exact posterior?",
            source="Wilson et al. 2022, Evaluating Approximate Inference in Bayesian Deep Learning",
            version=1,
            metrics=found,
            main_metric="wasserstein",
            validation_metric="nll" if self.settings.validation else None,
            baseline="map",
            reference="hmc",
        )

    # ---- data

    def own_data(self, part: str) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a part, of toy and iris."""
        if self.settings.posterior not in ("toy", "iris"):
            return super().own_data(part)
        return points(part) if self.settings.posterior == "toy" else flowers(part)

    @cached_property
    def examples(self) -> Examples:
        """The data, read once."""
        return getattr(self, f"_{self.settings.posterior}")()

    def _toy(self) -> Examples:
        inputs, targets = (values[::THINNED] for values in self.own_data("train"))
        return Examples(inputs, targets, torch.cat([self.own_data(part)[0] for part in PARTS]))

    def _iris(self) -> Examples:
        return Examples(*self.own_data("train"), self.own_data("test")[0])

    def _diabetes(self) -> Examples:
        table = tables.load("diabetes", self.data_dir)
        train, test = split_rows(len(table.targets), 0)
        mean, std = table.inputs[train].mean(0), table.inputs[train].std(0)
        centre, scale = float(table.targets[train].mean()), float(table.targets[train].std())
        inputs, test_inputs = (
            torch.from_numpy((table.inputs[r] - mean) / std).float() for r in (train, test)
        )
        targets = torch.from_numpy((table.targets[train, None] - centre) / scale).float()
        return Examples(inputs, targets, test_inputs, centre, scale)

    def _digits(self) -> Examples:
        images = data.load("digits", self.data_dir)
        pair = images.train_labels < 2
        return Examples(images.train_inputs[pair], images.train_labels[pair], images.test_inputs)

    def held_out(self) -> np.ndarray:
        """Test targets `[N]` in their own unit: numbers or classes; of digits any of the ten."""
        match self.settings.posterior:
            case "toy":
                return np.concatenate([self.own_data(part)[1].squeeze(1).numpy() for part in PARTS])
            case "iris":
                return self.own_data("test")[1].byte().numpy()
            case "diabetes":
                targets = tables.load("diabetes", self.data_dir).targets
                return targets[split_rows(len(targets), 0)[1]]
        return data.load("digits", self.data_dir).test_labels.byte().numpy()

    def data_digest(self) -> str:
        """Digest over all examples and the reference."""
        given = self.examples
        tensors = {"inputs": given.inputs, "targets": given.targets, "test_inputs": given.test_inputs}
        return array_digest({**tensors, **self.targets()})

    # ---- protocol

    @cached_property
    def set_aside(self) -> Tensor:
        """Which training examples no fit sees, `[N]` of bool."""
        reached = (torch.arange(len(self.examples.inputs) + 1) * (self.settings.validation or 0)).floor()
        return reached.diff() > 0

    def problem(self) -> Problem:
        """The training examples that are not set aside; no fit is stopped early."""
        given, posed, kept = self.examples, self.posed, ~self.set_aside
        inputs, outputs, hidden, activation = posed.network
        likelihood = (
            posed.likelihood() if posed.likelihood else likelihoods.Gaussian(posed.noise / given.scale)
        )
        return Problem(
            network=partial(networks.mlp, inputs, outputs, hidden, activation),
            likelihood=likelihood,
            prior=priors.normal(0, 1),
            train=TensorDataset(given.inputs[kept], given.targets[kept]),
            val=None,
            num_train=int(kept.sum()),
        )

    def run(self, engine: Engine) -> Arrays:
        """Draws of what is compared, at the test inputs."""
        engine.stage("fit")
        method = engine.fit(
            self.problem(), Budget(self.settings.epochs or self.posed.epochs, self.posed.batch_size)
        )
        given = self.examples
        if self.set_aside.any():
            targets = given.targets[self.set_aside]
            if self.posed.likelihood is None:
                targets = given.centre + given.scale * targets.squeeze(1)
            seen = self.predicted(engine, method, given.inputs[self.set_aside])
            engine.log("nll", self.nll_of(seen, targets.numpy()))
        return {"draws": self.predicted(engine, method, given.test_inputs)}

    def predicted(self, engine: Engine, method: Method, inputs: Tensor) -> np.ndarray:
        """What is kept of the predictions at the inputs `[N, ...]`, float32 `[S, N]` or `[S, N, C]`."""
        draws = self.draws(engine.predict(method, inputs, self.settings.test_samples))
        # An ensemble has more draws than asked for, member after member: every member keeps its share.
        return draws[_spread(len(draws), self.settings.test_samples)].float().numpy()

    def draws(self, prediction: Prediction) -> Tensor:
        """What is kept of a prediction: function or log-odds `[S, N]`, or log-probabilities `[S, N, C]`.

        Of a normal wider than the noise the quantiles, since what is compared are inputs one by one.
        """
        match prediction:
            case predictions.Categorical():
                return prediction.log_probs.clamp(min=metrics.LOWEST)
            case predictions.Bernoulli():
                return prediction.log_odds
        assert isinstance(prediction, predictions.Gaussian)
        given, noise = self.examples, self.posed.noise / self.examples.scale
        values = functions.drawn(prediction, noise, self.settings.test_samples)
        return given.centre + given.scale * values

    def targets(self) -> Arrays:
        """Test targets `[N]`, and quantiles of the reference with draws of the second run if there is one."""
        name = "labels" if self.posed.likelihood else "targets"
        return {name: self.held_out()} | references.read(self.target)

    def layouts(self) -> dict[str, Layout]:
        """Draws of N test inputs; S is 1 of a method without spread."""
        posed = self.posed
        form = (posed.test, posed.classes) if posed.classes else (posed.test,)
        name = "labels" if posed.likelihood else "targets"
        kind = {"toy": "float32", "diabetes": "float64"}.get(self.settings.posterior, "uint8")
        found = {"draws": Layout(PREDICTED, ("S", *form)), name: Layout(kind, (posed.test,))}
        return found | {
            key: Layout(array.dtype.name, (len(LEVELS), *form))
            for key, array in references.read(self.target).items()
        }

    @property
    def target(self) -> str:
        """The problem, and its units where they are others; nothing else decides the posterior."""
        units = "" if self.settings.units is None else f"-units={self.settings.units}"
        return f"fidelity-{self.settings.posterior}{units}"

    def reference(self, arrays: Arrays) -> Arrays:
        """Quantiles of the first half of the draws, and draws of the second half, each `[80, N, ...]`.

        The halves are of different chains if their number is even, for draws come chain after chain.
        """
        first, second = np.array_split(arrays["draws"].astype(np.float64), 2)
        kept = second[_spread(len(second), len(LEVELS))]
        return {
            "reference": np.quantile(first, LEVELS, axis=0).astype(np.float32),
            "second": kept.astype(np.float32),
        }

    # ---- scoring

    def score(self, arrays: Arrays) -> Metrics:
        """Distances of the run to the reference, and those of a second run of the reference's sampler."""
        scores: Metrics = {"nll": self.nll(arrays)}
        if "reference" not in arrays:
            nothing = Undefined(references.missing(self.target))
            return dict.fromkeys(self.spec.metrics, nothing) | scores
        for name, run in (("{}", "draws"), ("{}_floor", "second")):
            distances = self.distances(arrays[run], arrays["reference"])
            scores |= {name.format(metric): value for metric, value in distances.items()}
        return scores

    def distances(self, draws: np.ndarray, reference: np.ndarray) -> dict[str, float]:
        """Between draws `[S, N, ...]` and a reference's `[R, N, ...]`."""
        one, other = self.compared(draws), self.compared(reference)
        columns = (metrics.wasserstein(one[..., k], other[..., k], order=1) for k in range(one.shape[-1]))
        apart = np.stack(list(columns), -1)  # [N, K]
        if self.posed.likelihood is None:
            return {"wasserstein": float((apart / other.std(0)).mean())}
        first, second = (np.log(values.mean(0).clip(min=1e-300)) for values in (one, other))
        return {
            "wasserstein": float(apart.sum(-1).mean() / 2),
            "total_variation": metrics.total_variation(first, second),
            "agreement": metrics.agreement(first, second),
        }

    def compared(self, draws: np.ndarray) -> np.ndarray:
        """Kept numbers as what is compared, `[S, N, K]`: a function, or the probabilities of K classes."""
        values = draws.astype(np.float64)
        if self.posed.classes:
            return np.exp(values)
        return values[..., None] if self.posed.likelihood is None else expit(np.stack([-values, values], -1))

    def nll(self, arrays: Arrays) -> float:
        """Mean of -log p(test target) under the equal mixture of the draws, in nats; digits: 0 and 1."""
        return self.nll_of(arrays["draws"], arrays["labels" if self.posed.likelihood else "targets"])

    def nll_of(self, draws: np.ndarray, targets: np.ndarray) -> float:
        """The same of draws `[S, N, ...]` at any inputs, and of their targets `[N]`."""
        draws = draws.astype(np.float64)
        if self.posed.likelihood is None:
            z = (targets - draws) / self.posed.noise
            densities = -0.5 * z**2 - np.log(self.posed.noise * np.sqrt(2 * np.pi))
        else:
            known = targets < (self.posed.classes or 2)
            draws, labels = draws[:, known], targets[known]
            if self.posed.classes:
                densities = metrics.restore(draws)[:, np.arange(len(labels)), labels]
            else:
                densities = -np.logaddexp(0, np.where(labels == 1, -1, 1) * draws)
        return float(-(logsumexp(densities, axis=0) - np.log(len(densities))).mean())


def _spread(number: int, most: int) -> np.ndarray:
    """At most so many of `number` rows, evenly over them, the first and the last among them."""
    return np.linspace(0, number - 1, min(number, most)).round().astype(int)
