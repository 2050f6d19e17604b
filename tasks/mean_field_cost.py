"""The cost of independent weights by depth: geometry of the draws of a posterior.

Question: do independent weights lose less of the posterior when the network is deeper?

Protocol: two moons, 500 training points without noise. A network of `depth` hidden layers, whose width gives
it about `weights` weights, biases not counted; prior N(0, 1), Bernoulli likelihood. Chains of a sampler start
at an optimum of the evidence lower bound over independent normals. To `draws` draws of all weights and biases
mixtures of 1 to 4 Gaussians are fitted; the heaviest component of the one with the least BIC stands for one
mode of the posterior. Its diagonal fit has its mean and the variances 1 / diag(Sigma^-1). E_KL is KL(full ||
diagonal); E_W is W(p, diagonal) - W(p, full), where p are the draws of the component and W is the exact
2-Wasserstein distance between at most 1000 of them and as many of each Gaussian. Beside each stands its
floor: the same estimator on as many independent draws from the diagonal fit, which loses nothing.

A run has mixed if split R-hat is at most 1.05, of every weight over the chains that have half their draws or
more in the heaviest component (the one with the most, if none has), and of every prediction at the training
points over all chains. Weights of the other chains need not agree, for networks have symmetries. A depth
enters a trend only if all its restarts (seeds) have mixed.

Source: Farquhar 2022, thesis "Understanding Approximation" (docs/sources.md), section 3.1 (Fig. 3.2) and
appendix A.1 (Table A.4). Deviations: preset standard has about 100 weights and 4000 draws, preset paper the
published 1000 and 1000; the source starts all restarts at one optimum, ours each at its own, so that the
spread of modes is in its band; the source says neither its test set nor the noise of its moons, which is none
by default: ours are 1000 other points of the same curves.

What would mislead: 1000 draws cannot tell a covariance of 1000 weights. It has rank 999 at most, and E_KL is
then set by the ridge (10^-6, scikit-learn's default) and by BIC, which splits even draws of one Gaussian:
read E_KL beside `kl_floor`, and take a difference for geometry only where `draws_per_weight` is 20 or more.
The floor has independent draws, and those of a chain are not: they tell less than their number, which the
limits of infinitely many draws allow for (`kl_limit` from above, `kl_limit_low` from below). E_W may be
negative: draws of one Gaussian of many weights lie about the root of 2 tr Sigma apart, those of a narrower
one, such as the diagonal fit, are nearer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.utils.data import TensorDataset

from bench import likelihoods, metrics, networks, priors
from bench.contract import (
    Arrays,
    Budget,
    Comparison,
    Engine,
    FinishedRun,
    Method,
    Metric,
    Metrics,
    Problem,
    Spec,
    Task,
    Undefined,
)
from bench.data import array_digest
from bench.diagnostics import RHAT_LIMIT, prediction_rhat, split_rhat
from bench.errors import UsageError
from bench.predictions import Bernoulli
from bench.settings import Count, Positive, Whole, settings
from bench.studies import mean_field, mean_field_comparison
from bench.studies.mean_field import kl_error as kl_error
from bench.weights import ravel

NAMES: dict[str, dict[str, object]] = {"mean_field_cost": {}}

PRESETS: dict[str, dict[str, object]] = {
    "smoke": {"weights": 20, "draws": 40, "start_steps": 20, "epochs": 20},
    "paper": {"weights": 1000, "draws": 1000},
}

LIMITS = ("kl_limit", "kl_limit_low")
RESOLVED = 0.25
"""Nats between the two limits of E_KL up to which they tell as much."""
PARTS = {"train": (500, 0), "test": (1000, 1)}
"""Part -> number of points and random state."""


def width(depth: int, weights: int) -> int:
    """Units of each of `depth` hidden layers between 2 inputs and 1 output, for about so many weights."""
    choices = range(1, weights + 2)
    return min(choices, key=lambda units: abs(3 * units + (depth - 1) * units**2 - weights))


@settings
class Settings:
    """Settings of the cost of independent weights."""

    depth: Count = 2
    """Hidden layers, at least 1."""
    activation: Literal["relu", "leaky_relu_0.5", "leaky_relu_0.95", "linear"] = "relu"
    """relu; leaky_relu_0.5 or leaky_relu_0.95, by their slopes below 0; or linear, none at all."""
    weights: Count = 100
    """About so many weights, at least 1; biases are not counted, and belong to the draws."""
    draws: Annotated[int, Field(ge=8)] = 4000
    """Draws of the weights at most, of all chains together, at least 8."""
    ridge: Positive = 1e-6
    """Added to the diagonal of every covariance, above 0, in squared weight units."""
    start_steps: Whole = 2000
    """Steps of the optimiser towards the optimum at which chains start, 0 or more."""
    epochs: Count = 2000
    """Full-batch epochs of a method that trains, at least 1; a sampler has its own count."""


class MeanFieldCost(Task):
    """Draws of a posterior against the Gaussian with independent weights."""

    settings_class = Settings
    settings: Settings

    @property
    def spec(self) -> Spec:
        """What is measured."""
        return Spec(
            question="Do independent weights lose less of the posterior when the network is deeper?",
            source="Farquhar 2022, section 3.1, Fig. 3.2 and Table A.4",
            version=2,
            metrics={
                "kl_error": Metric("E_KL: KL from the full Gaussian to its diagonal fit", "nats", 0, np.inf),
                "kl_floor": Metric("E_KL of as many draws of the diagonal fit", "nats", 0, np.inf),
                "kl_limit": Metric(
                    "E_KL of infinitely many draws, from all, their halves and their quarters, from above",
                    *("nats", -np.inf, np.inf, True),
                ),
                "kl_limit_low": Metric("the same from below", "nats", -np.inf, np.inf, True),
                "wasserstein_error": Metric(
                    "E_W: distance of the draws to the diagonal fit less that to the full Gaussian",
                    "weight units",
                    -np.inf,
                    np.inf,
                ),
                "wasserstein_floor": Metric(
                    "E_W of as many draws of the diagonal fit", "weight units", -np.inf, np.inf
                ),
                "accuracy": Metric("share of right classes on the test points", "fraction", 1, 0),
                "draw_accuracy": Metric("mean over the draws of their own accuracy", "fraction", 1, 0),
                "acceptance": Metric("share of neighbouring draws of a chain that differ", "fraction", 1, 0),
                "components": Metric("of the mixture with the least BIC", "Gaussians", 1, 4),
                "heaviest_share": Metric("draws in the heaviest component over all", "fraction", 1, 0),
                "draws_per_weight": Metric(
                    "draws in the heaviest component over weights and biases", "ratio", np.inf, 0
                ),
                "weight_rhat": Metric(
                    "largest split R-hat of a weight over the heaviest component's chains", "ratio", 0, np.inf
                ),
                "prediction_rhat": Metric(
                    "largest split R-hat of a prediction over all chains", "ratio", 0, np.inf
                ),
                "mixed": Metric("1 if both are at most 1.05, else 0", "yes or no", 1, 0),
                "resolved": Metric(
                    f"1 if mixed and the two limits of E_KL differ by at most {RESOLVED} nats, else 0",
                    *("yes or no", 1, 0),
                ),
            },
            main_metric="kl_error",
            requires=frozenset({"weight_samples"}),
            ranked=False,
        )

    # ---- data

    def own_data(self, part: str) -> tuple[Tensor, Tensor]:
        """Points `[N, 2]` and moons `[N]` of the part train or test."""
        from sklearn.datasets import make_moons  # here, for its import takes a second

        size, state = PARTS[part]
        inputs, labels = make_moons(size, random_state=state)
        return torch.from_numpy(inputs).float(), torch.from_numpy(labels)

    def data_digest(self) -> str:
        """Of all points."""
        parts = {part: self.own_data(part) for part in PARTS}
        return array_digest(
            {f"{p}_{k}": t.numpy() for p, of in parts.items() for k, t in zip("xy", of, strict=True)}
        )

    # ---- protocol

    def problem(self) -> Problem:
        """All training points; where chains start, the run adds."""
        s = self.settings
        hidden = (width(s.depth, s.weights),) * s.depth
        train = TensorDataset(*self.own_data("train"))
        network = partial(networks.mlp, 2, 1, hidden, s.activation)
        return Problem(network, likelihoods.Bernoulli(), priors.normal(0, 1), train, None, len(train))

    def run(self, engine: Engine) -> Arrays:
        """Predictions, and what the draws of the weights say."""
        engine.stage("fit")
        problem = self.problem()
        start = partial(mean_field.optimum, problem, self.settings.start_steps, engine.generator("start"))
        posed = replace(problem, starts_from=start)
        method = engine.fit(posed, Budget(self.settings.epochs))
        count = min(self.settings.draws, method.num_draws or self.settings.draws)
        count -= count % method.num_chains
        if count < 4 * method.num_chains:
            raise UsageError(
                f"mean_field_cost: R-hat takes at least 4 draws of each of {method.num_chains} chains, and "
                f"there are {count} in all: raise --task.draws"
            )
        train, test = (engine.predict(method, self.own_data(part)[0], count) for part in ("train", "test"))
        assert isinstance(test, Bernoulli)
        agree = prediction_rhat(train, method.num_chains)
        return self.geometry(method, count, engine) | {
            "prediction_rhat": np.array([agree]),
            "probabilities": test.log_odds.sigmoid().mean(0).float().numpy(),
            "votes": (test.log_odds > 0).float().mean(0).numpy(),
        }

    def geometry(self, method: Method, count: int, engine: Engine) -> Arrays:
        """What is told of draws of the weights: numbers, for the draws themselves are too many to keep."""
        ridge = self.settings.ridge
        with torch.no_grad():
            draws = ravel(method.sample_weights(count, engine.generator("draws"))).double().numpy()
        mode = mean_field.heaviest(draws, ridge, engine.generator("mixture"))
        members = draws[mode.members]
        found = mean_field.errors(members, mode.mean, mode.covariance, engine.generator("errors"))
        least = mean_field.floor(len(members), mode.mean, found.variances, ridge, engine.generator("floor"))
        chains = draws.reshape(method.num_chains, -1, draws.shape[1])
        is_member = mode.members.reshape(method.num_chains, -1)
        shares = is_member.mean(1)
        own = chains[shares >= min(0.5, shares.max())]
        moved = (chains[:, 1:] != chains[:, :-1]).any(2)
        return {
            "kl": np.array([found.kl, least.kl]),
            "kl_of_parts": mean_field.of_parts(chains, is_member, ridge),
            "wasserstein": np.array([found[1:3], least[1:3]]),
            "bic": mode.bic,
            "sizes": np.array([len(members), *draws.shape]),
            "acceptance": np.array([moved.mean()]),
            "weight_rhat": np.array([split_rhat(own).max()]),
        }

    def targets(self) -> Arrays:
        """Moons of the test points `[1000]`."""
        return {"labels": self.own_data("test")[1].byte().numpy()}

    # ---- scoring

    def score(self, arrays: Arrays) -> Metrics:
        """Errors and floors, accuracy, and whether the chains mixed."""
        labels, votes = arrays["labels"], arrays["votes"].astype(np.float64)
        members, draws, weights = arrays["sizes"].tolist()
        (kl, least), (distances, of_floor) = arrays["kl"], arrays["wasserstein"]
        low, high = mean_field.limits(arrays["kl_of_parts"])
        unknown = Undefined("a quarter of the draws has fewer than two for every weight, or no chain moved")
        limits = {name: unknown if np.isnan(v) else v for name, v in zip(LIMITS, (high, low), strict=True)}
        rhats = {name: float(arrays[name][0]) for name in ("weight_rhat", "prediction_rhat")}
        mixed = max(rhats.values()) <= RHAT_LIMIT
        return {
            "kl_error": float(kl),
            "kl_floor": float(least),
            **limits,
            "wasserstein_error": float(distances[1] - distances[0]),
            "wasserstein_floor": float(of_floor[1] - of_floor[0]),
            "accuracy": metrics.accuracy(arrays["probabilities"] > 0.5, labels),
            "draw_accuracy": float(np.where(labels, votes, 1 - votes).mean()),
            "acceptance": float(arrays["acceptance"][0]),
            "components": float(arrays["bic"].argmin() + 1),
            "heaviest_share": members / draws,
            "draws_per_weight": members / weights,
            **rhats,
            "mixed": float(mixed),
            "resolved": float(mixed and high - low <= RESOLVED),
        }

    @classmethod
    def compare(cls, runs: Sequence[FinishedRun]) -> Comparison:
        """Both errors over depth, an activation a line (Fig. 3.2), Table A.4, and whether they fall."""
        return mean_field_comparison.compare(runs)
