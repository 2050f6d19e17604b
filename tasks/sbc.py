"""Simulation-based calibration: is a posterior as wide as it should be, over worlds that its prior draws?

Question: where the truth is drawn from the prior, does it lie in the posterior as often as it says?

Protocol: 200 worlds. In each the weights of a small network are drawn from its prior N(0, 1), 30 observations
are drawn from the network under known noise of 0.3, and the method is fitted to them with the same prior and
noise. Its S = 79 draws of the function are kept at 5 test inputs. The rank of the true function among the
draws is uniform on 0 to S if the posterior is exact, at every input: so the ranks of 200 worlds tell an
approximation from the posterior without any reference. `deviation` is the largest distance of the ranks'
distribution from the uniform one, over ranks and test inputs. The inputs are two normal numbers, those of the
test half as far out again; all worlds share them. The networks:

- sbc: a hidden layer of 8 tanh units;
- sbc_linear: no hidden layer, so that `linear` is exact.

Source: Talts, Betancourt, Simpson, Vehtari, Gelman 2018, "Validating Bayesian Inference Algorithms with
Simulation-Based Calibration", sections 3 and 4.

What would mislead: the prior has uniform ranks too, since it is exact for no data at all: ranks tell nothing
of how much was learned, which `nll` does. A point is above half of all truths, as one draw of an exact
posterior is: so a method of one draw counts as S equal ones. Draws of a chain that depend on each other crowd
at the ends, as those of a posterior that is too narrow do. Errors that differ from world to world may cancel.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Literal

import numpy as np
import torch
from scipy.special import logsumexp
from torch import Tensor
from torch.utils.data import TensorDataset

from bench import likelihoods, networks, priors, randomness
from bench.comparison import Comparison, FinishedRun
from bench.contract import (
    Arrays,
    Budget,
    Engine,
    Layout,
    Metric,
    Metrics,
    Problem,
    Row,
    Spec,
    Task,
    Undefined,
)
from bench.data import array_digest
from bench.predictions import Gaussian
from bench.settings import Count, settings
from bench.spec import PREDICTED
from bench.studies import functions, ranks
from bench.weights import forward

NAMES: dict[str, dict[str, object]] = {
    "sbc": {"model": "network"},
    "sbc_linear": {"model": "linear"},
}

PRESETS: dict[str, dict[str, object]] = {"smoke": {"worlds": 4, "epochs": 5, "test_samples": 7}}

NOISE = 0.3
"""Standard deviation of an observation."""
NUM_TRAIN, NUM_TEST = 30, 5
"""Observations and test inputs of a world."""
HIDDEN = {"network": (8,), "linear": ()}
"""Units of the hidden layers."""
PRIOR = priors.normal(0, 1)
"""One for all worlds: fits that share their prior can be trained side by side."""


@settings
class Settings:
    """Settings of simulation-based calibration."""

    model: Literal["network", "linear"]
    """Network: fixed by the task's name."""
    worlds: Count = 200
    """Draws of weights and data, at least 1."""
    epochs: Count = 1000
    """Full-batch epochs of each fit, at least 1."""
    test_samples: Count = 79
    """Weight samples S per prediction, at least 1."""


class SBC(Task):
    """Ranks of true functions among those that a posterior draws."""

    settings_class = Settings
    settings: Settings

    @property
    def spec(self) -> Spec:
        """What is measured."""
        no_spread = "undefined of a method without spread"
        return Spec(
            question="Is the posterior as wide as it should be, over worlds that its prior draws?",
            source="Talts et al. 2018, Simulation-Based Calibration",
            version=1,
            metrics={
                "deviation": Metric(
                    "largest distance of the ranks' distribution from the uniform one, over test inputs",
                    "probability",
                    0,
                    1,
                ),
                "coverage_error": Metric(
                    "mean over central intervals of 50%, 80% and 90% of |share of truths inside - level|",
                    "fraction",
                    0,
                    1,
                ),
                "scale_error": Metric(
                    f"|log of the rms of (truth - mean) / sd|; {no_spread}", "1", 0, np.inf, True
                ),
                "nll": Metric(
                    "expected -log p(y) of an observation at the test inputs", "nats", -np.inf, np.inf
                ),
            },
            main_metric="deviation",
            ranked=False,
        )

    # ---- data

    @property
    def network(self) -> partial[torch.nn.Sequential]:
        """Two inputs, one output."""
        return partial(networks.mlp, 2, 1, HIDDEN[self.settings.model], "tanh")

    @cached_property
    def worlds(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Part -> inputs `[W * N, 2]` and the function's values there `[W * N, 1]`, world after world."""
        generator = torch.Generator().manual_seed(randomness.derive(0, "sbc", self.settings.model) % 2**63)
        train = torch.randn(NUM_TRAIN, 2, generator=generator)
        test = 1.5 * torch.randn(NUM_TEST, 2, generator=generator)
        network, size = self.network(), self.settings.worlds
        weights = {
            name: torch.randn(size, *parameter.shape, generator=generator)
            for name, parameter in network.named_parameters()
        }
        with torch.no_grad():
            values = forward(network, weights, torch.cat([train, test])).flatten(1)  # [W, N]
        ends = {"train": (train, values[:, :NUM_TRAIN]), "test": (test, values[:, NUM_TRAIN:])}
        return {part: (x.repeat(size, 1), f.reshape(-1, 1)) for part, (x, f) in ends.items()}

    def own_data(self, part: str) -> tuple[Tensor, Tensor]:
        """Inputs `[W * N, 2]`, and observations (train) or values of the function (test), `[W * N, 1]`."""
        inputs, values = self.worlds[part]
        if part == "test":
            return inputs, values
        generator = torch.Generator().manual_seed(randomness.derive(0, "sbc", "noise") % 2**63)
        return inputs, values + NOISE * torch.randn(values.shape, generator=generator)

    def data_digest(self) -> str:
        """Digest over all worlds."""
        parts = {part: self.own_data(part) for part in ("train", "test")}
        return array_digest(
            {f"{p}_{k}": t.numpy() for p, of in parts.items() for k, t in zip("xy", of, strict=True)}
        )

    # ---- protocol

    def problem(self, world: int = 0) -> Problem:
        """The observations of a world."""
        inputs, targets = self.own_data("train")
        rows = slice(world * NUM_TRAIN, (world + 1) * NUM_TRAIN)
        train = TensorDataset(inputs[rows], targets[rows])
        return Problem(self.network, likelihoods.Gaussian(NOISE), PRIOR, train, None, NUM_TRAIN)

    def run(self, engine: Engine) -> Arrays:
        """Draws of the function at the test inputs of every world, `[W, S, 5]`."""
        engine.stage("worlds")
        size, number = self.settings.worlds, self.settings.test_samples
        methods = engine.fit_many([self.problem(w) for w in range(size)], Budget(self.settings.epochs))
        inputs, found = self.own_data("test")[0], []
        for world, method in enumerate(methods):
            rows = slice(world * NUM_TEST, (world + 1) * NUM_TEST)
            prediction = engine.predict(method, inputs[rows], number)
            assert isinstance(prediction, Gaussian)
            draws = functions.drawn(prediction, NOISE, number)
            # An ensemble has more draws than asked for, member after member: every member keeps its share.
            kept = torch.linspace(0, len(draws) - 1, min(number, len(draws))).round().long()
            found.append(draws[kept])
        return {"draws": torch.stack(found).float().numpy()}

    def targets(self) -> Arrays:
        """The true functions at the test inputs, `[W, 5]`."""
        return {"truth": self.own_data("test")[1].reshape(self.settings.worlds, NUM_TEST).numpy()}

    def layouts(self) -> dict[str, Layout]:
        """Draws, of which S is 1 of a method without spread, and truths."""
        size = self.settings.worlds
        return {
            "draws": Layout(PREDICTED, (size, "S", NUM_TEST)),
            "truth": Layout("float32", (size, NUM_TEST)),
        }

    # ---- scoring

    def kept(self, arrays: Arrays) -> tuple[np.ndarray, np.ndarray]:
        """Draws `[W, S, 5]` and truths `[W, 5]`; a point is S equal draws."""
        draws, truth = (arrays[name].astype(np.float64) for name in ("draws", "truth"))
        if draws.shape[1] == 1:
            draws = draws.repeat(self.settings.test_samples, axis=1)
        return draws, truth

    def score(self, arrays: Arrays) -> Metrics:
        """Of the ranks, of the posterior's scale, and of what it predicts."""
        draws, truth = self.kept(arrays)
        placed, number = ranks.placed(draws, truth), draws.shape[1]
        covered = [ranks.covered(placed, number, level) for level in (0.5, 0.8, 0.9)]
        scale = ranks.scale(draws, truth)
        nothing = Undefined("the draws have no spread")
        return {
            "deviation": float(ranks.deviations(placed, number).max()),
            "coverage_error": float(np.mean([abs(found - exact) for found, exact in covered])),
            "scale_error": nothing if scale is None else abs(float(np.log(scale))),
            "nll": self.nll(draws, truth),
        }

    @staticmethod
    def nll(draws: np.ndarray, truth: np.ndarray) -> float:
        """Expected -log p(y), in nats, of observations y of the truth, by Gauss and Hermite's rule."""
        total = 0.0
        for node, weight in zip(*np.polynomial.hermite_e.hermegauss(9), strict=True):
            z = (truth[:, None] + node * NOISE - draws) / NOISE
            density = logsumexp(-0.5 * z**2, axis=1) - np.log(draws.shape[1])
            total -= weight * density.mean() / np.sqrt(2 * np.pi)
        return float(total + np.log(NOISE * np.sqrt(2 * np.pi)))

    def curves(self, arrays: Arrays) -> list[Row]:
        """Share of truths of at most each rank, over all test inputs."""
        draws, truth = self.kept(arrays)
        placed, number = ranks.placed(draws, truth), draws.shape[1]
        shares = [(placed <= rank).mean() for rank in range(number + 1)]
        return [Row("ranks", "all test inputs", r / number, float(s)) for r, s in enumerate(shares)]

    @classmethod
    def compare(cls, runs: Sequence[FinishedRun]) -> Comparison:
        """Which posteriors are too narrow, too wide, or off: a row per run."""
        return ranks.comparison(runs)
