"""Numbers with known uncertainty: estimates of both of its parts against the truth, in worlds of a known law.

Question: does a posterior know what it does not know, and tell it from noise?

Protocol: inputs are the rows of the diabetes table. A world's function is a draw of a Gaussian process at
them, and its targets have normal noise, whose standard deviation grows with the body mass index. The scale
and length scale of the process and the noise are those of greatest marginal likelihood of the table's own
target (`python -m bench.studies.oracle_fit`). 240 rows are trained on, 102 validated on, 100 tested on. Every
world is posed three times: as it is, with twice the sd of the noise, and with 60 training rows. One
full-batch fit each, of a network with one hidden layer of 50 tanh units that gives mean and noise of each
input, from the prior N(0, 0.3^2). A run has two worlds; `--task.world` takes others. The seed is that of the
fits.

The truth: the variance of the function in the Gaussian process posterior, in closed form (epistemic); the
variance of the noise (aleatoric). The estimates: the variance of the draws' means, and the mean of their
variances. `bench/studies/disentangling.py` defines errors, correlations and leaks, `bench/studies/joint.py`
the joint log loss, by which posteriors are ranked. `excess_log_loss` is the mean of KL(truth || prediction)
of a target, `excess_risk` that of the squared error: what each is above the loss of who knows the function.

Source: the laws are ours; Osband et al. 2022, "The Neural Testbed: Evaluating Joint Predictions" for the
joint log loss; UDBench 2026, arXiv 2608.05995, for worlds of a known law.

What would mislead: the truth is that of an observer who knows the law, and a network's prior is another law,
so that its exact posterior has errors too; the noise differs little from input to input, so that correlations
of the aleatoric part are small for all; two worlds are few, and differences between methods that are as large
as those between worlds say little.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from bench import likelihoods, networks, predictions, priors, randomness
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
)
from bench.data import array_digest
from bench.settings import Count, Positive, Whole, settings
from bench.studies import disentangling, joint, normals, oracle

NAMES: dict[str, dict[str, object]] = {"oracle_regression": {}}

PRESETS: dict[str, dict[str, object]] = {
    "smoke": {"worlds": 1, "hidden": 5, "epochs": 20, "test_samples": 8},
}

SMALLEST = 1e-6
"""Least stored variance of a prediction, which float16 still holds."""
NODES = 20
"""Of the Gauss-Hermite quadrature over a target."""


@settings
class Settings:
    """Settings of oracle regression."""

    world: Whole = 0
    """Number of the first world; other numbers are fresh worlds of the same law."""
    worlds: Count = 2
    """Worlds of a run, at least 1; each takes three fits."""
    hidden: Count = 50
    """Units of the hidden layer, at least 1."""
    prior_std: Positive = 0.3
    """Standard deviation of the prior of each weight, above 0."""
    epochs: Count = 300
    """Full-batch epochs of each fit, at least 1."""
    test_samples: Count = 64
    """Weight samples S per prediction, at least 1; all are stored."""


class OracleRegression(Task):
    """Worlds of a Gaussian process at the rows of diabetes."""

    settings_class = Settings
    settings: Settings

    @property
    def spec(self) -> Spec:
        """What is measured."""
        return Spec(
            question="Does a posterior know what it does not know, and tell it from noise?",
            source="Osband et al. 2022, The Neural Testbed; worlds of bench/studies/oracle.py",
            version=1,
            metrics={
                "joint_log_loss": Metric(
                    "-log p(10 targets at two inputs), mean over batches", "nats", -np.inf, np.inf
                ),
                "log_likelihood": Metric("mean of log p(target)", "nats", np.inf, -np.inf),
                "excess_log_loss": Metric(
                    "KL of the true law to the prediction of a target, mean over inputs", "nats", 0, np.inf
                ),
                "excess_risk": Metric(
                    "squared error of the mean above the noise, mean over inputs",
                    "squared units of y",
                    0,
                    np.inf,
                ),
                **disentangling.measures("units of y"),
            },
            main_metric="joint_log_loss",
            validation_metric="log_likelihood",
            baseline="map",
            reference="mfvi",
        )

    # ---- data

    @property
    def truth(self) -> oracle.Regression:
        """The worlds of this run."""
        return oracle.regression_worlds(self.settings.world, self.settings.worlds)

    def own_data(self, part: str) -> tuple[Tensor, Tensor]:
        """Inputs `[N, 10]`, and what is known of them in all W worlds.

        Of the parts train and val targets `[N, 2 W]`, world by world as they are and then with more noise. Of
        test the truth `[N, W + 4]`: functions, standard deviation of the noise, epistemic variances by
        condition.
        """
        w = self.truth
        first, last = oracle.TRAIN, oracle.TRAIN + oracle.VAL
        rows = {"train": slice(0, first), "val": slice(first, last), "test": slice(last, None)}[part]
        if part == "test":
            known = np.concatenate([w.functions[:, rows], w.sigma[None, rows], w.variance])
        else:
            known = w.targets[:, :, rows].reshape(-1, len(w.inputs[rows]))
        return torch.from_numpy(w.inputs[rows]).float(), torch.from_numpy(known.T)

    def data_digest(self) -> str:
        """Of all inputs and drawn numbers."""
        w = self.truth
        return array_digest(
            {"inputs": oracle.rounded(w.inputs), "functions": w.functions, "targets": w.targets}
        )

    # ---- protocol

    def problem(self, k: int = 0) -> Problem:
        """The k-th fit: all worlds in the condition base, then in noisier, then in fewer."""
        condition, world = divmod(k, self.settings.worlds)
        name = oracle.CONDITIONS[condition]
        inputs, targets = self.own_data("train")
        rows = oracle.fewer(len(inputs)) if name == "fewer" else len(inputs)
        column = world + self.settings.worlds * (name == "noisier")
        train = TensorDataset(inputs[:rows], targets[:rows, [column]].float())
        val_inputs, val_targets = self.own_data("val")
        return Problem(
            network=partial(networks.mlp, inputs.shape[1], 2, (self.settings.hidden,), "tanh"),
            likelihood=likelihoods.Heteroscedastic(),
            prior=priors.normal(0, self.settings.prior_std),
            train=train,
            val=TensorDataset(val_inputs, val_targets[:, [column]].float()),
            num_train=rows,
        )

    def run(self, engine: Engine) -> Arrays:
        """Predicted means and variances of the base worlds, and the parts of both others."""
        worlds, size = self.settings.worlds, self.settings.test_samples
        inputs, (held_out, targets) = self.own_data("test")[0], self.own_data("val")
        means, variances, parts, validation = [], [], [], []
        stages = [f"{name}, world {w + 1}" for name in oracle.CONDITIONS for w in range(worlds)]
        budget = Budget(self.settings.epochs)
        for k, method in enumerate(engine.fit_stages(stages, self.problem, budget)):
            is_base = k < worlds
            found = engine.predict(method, torch.cat([inputs, held_out]) if is_base else inputs, size)
            assert isinstance(found, predictions.Gaussian)
            # An ensemble has more draws than asked for, member after member: every member keeps its share.
            rows = torch.linspace(0, len(found.mean) - 1, min(size, len(found.mean))).round().long()
            mean, variance = found.mean[rows], found.variance[rows].clamp(min=SMALLEST)
            if is_base:
                seen = predictions.Gaussian(mean[:, len(inputs) :], variance[:, len(inputs) :])
                validation.append(float(seen.log_score(targets[:, [k]].float()).mean()))
                engine.log("log_likelihood", float(np.mean(validation)), k + 1)
                means.append(mean[:, : len(inputs), 0].half().numpy())
                variances.append(variance[:, : len(inputs), 0].half().numpy())
            else:
                both = predictions.Gaussian(mean, variance).parts()
                parts.append(torch.cat(both, 1).T.float().numpy())
        moved = np.stack(parts).reshape(2, worlds, 2, -1).swapaxes(1, 2)
        spread = normals.without_repeats(np.stack(variances))
        return {"mean": np.stack(means), "variance": spread, "moved_parts": np.ascontiguousarray(moved)}

    def targets(self) -> Arrays:
        """Targets of the batches, functions, noise and epistemic variances at the test inputs."""
        known = self.own_data("test")[1].numpy()
        functions, sigma, epistemic = np.split(known.T, [self.settings.worlds, self.settings.worlds + 1])
        rows = joint.rows(self._anchors())
        errors = np.concatenate([self._errors(world) for world in range(self.settings.worlds)])
        targets = functions.ravel()[rows] + np.tile(sigma[0], self.settings.worlds)[rows] * errors
        return {
            "targets": targets.astype(np.float16),
            "function": functions.astype(np.float32),
            "noise": sigma[0].astype(np.float32),
            "epistemic": epistemic.astype(np.float32),
        }

    def _errors(self, world: int) -> np.ndarray:
        """Standard normal errors of the targets of a world's batches, `[P, T]`."""
        seed = randomness.derive(self.settings.world + world, "oracle_regression", "batches")
        shape = (oracle.TEST // 2, joint.REPEATS * joint.BATCH)
        return np.random.default_rng(seed).standard_normal(shape)

    def _anchors(self) -> np.ndarray:
        return joint.anchors(self.settings.worlds * oracle.TEST // 2, "oracle_regression", "anchors")

    def given(self) -> Arrays:
        """Which of its two inputs each target of a batch is of, 0 or 1."""
        return {"anchors": self._anchors()}

    def layouts(self) -> dict[str, Layout]:
        """Predictions of N test inputs in W worlds, P pairs of inputs with T targets each."""
        w, n = self.settings.worlds, oracle.TEST
        p, t = w * n // 2, joint.REPEATS * joint.BATCH
        return {
            "mean": Layout("float16", (w, "S", n)),
            "variance": Layout("float16", (w, ("S", 1), (n, 1))),
            "moved_parts": Layout("float32", (2, 2, w, n)),
            "targets": Layout("float16", (p, t)),
            "function": Layout("float32", (w, n)),
            "noise": Layout("float32", (n,)),
            "epistemic": Layout("float32", (3, n)),
            "anchors": Layout("uint8", (p, t)),
        }

    # ---- scoring

    def score(self, arrays: Arrays) -> Metrics:
        """Joint and marginal losses, and both parts against the truth."""
        log_density = densities(arrays)
        (mean, _), function = mixture(arrays), arrays["function"].astype(np.float64).ravel()
        return {
            "joint_log_loss": float(joint.log_losses(log_density).mean()),
            "log_likelihood": float(joint.marginal(log_density).mean()),
            "excess_log_loss": float(divergences(arrays).mean()),
            "excess_risk": float(np.square(mean.mean(0) - function).mean()),
            **disentangling.scores(*parts(arrays), are_variances=True),
        }

    def losses(self, arrays: Arrays) -> np.ndarray:
        """Joint log loss of each pair of test inputs, in nats, `[P]`."""
        return joint.log_losses(densities(arrays))

    def curves(self, arrays: Arrays) -> list[Row]:
        """Both parts by condition."""
        return disentangling.curves(*parts(arrays))

    def figures(self, arrays: Arrays) -> dict[str, Any]:
        """Estimates against the truth."""
        return {"parts": disentangling.chart(*parts(arrays), "sd in units of y", are_variances=True)}


def mixture(arrays: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance of every draw at every test input, world after world, each `[S, W N]`."""
    mean = arrays["mean"].astype(np.float64)
    variance = np.broadcast_to(arrays["variance"].astype(np.float64), mean.shape)
    mean, variance = (values.swapaxes(0, 1).reshape(mean.shape[1], -1) for values in (mean, variance))
    return mean, variance


def densities(arrays: Arrays) -> np.ndarray:
    """Log density of each target of the batches under each draw, `[S, P, T]`, in nats."""
    rows, targets = joint.rows(arrays["anchors"]), arrays["targets"].astype(np.float64)
    mean, variance = (values[:, rows] for values in mixture(arrays))
    return np.asarray(-0.5 * ((targets - mean) ** 2 / variance + np.log(2 * np.pi * variance)))


def divergences(arrays: Arrays) -> np.ndarray:
    """KL divergence of the true law of a target to the prediction at each test input, `[W N]`, in nats."""
    mean, variance = mixture(arrays)
    function = arrays["function"].astype(np.float64).ravel()
    sigma = np.tile(arrays["noise"].astype(np.float64), len(arrays["function"]))
    nodes, weights = np.polynomial.hermite_e.hermegauss(NODES)
    expected = sum(
        weight * normals.log_density(mean, np.sqrt(variance), function + sigma * node)
        for node, weight in zip(nodes, weights / weights.sum(), strict=True)
    )
    entropy = 0.5 * np.log(2 * np.pi * np.e * sigma**2)
    return np.asarray(-entropy - expected)


def parts(arrays: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """Estimated and true variances, each `[3, 2, W, N]`."""
    mean = arrays["mean"].astype(np.float64)
    variance = np.broadcast_to(arrays["variance"].astype(np.float64), mean.shape)
    base = np.stack([mean.var(1), variance.mean(1)])
    found = np.concatenate([base[None], arrays["moved_parts"].astype(np.float64)])
    noise = arrays["noise"].astype(np.float64) ** 2
    truth = np.empty_like(found)
    truth[:, disentangling.EPISTEMIC] = arrays["epistemic"][:, None]
    truth[:, disentangling.ALEATORIC] = noise
    truth[oracle.CONDITIONS.index("noisier"), disentangling.ALEATORIC] *= oracle.NOISE_FACTOR**2
    return found, truth
