"""Classes with known uncertainty: estimates of both of its parts against the truth, in worlds of a known law.

Question: does a posterior over classes know what it does not know, and tell it from noise?

Protocol: inputs are the first three principal components of digits, each of sd 1. A world has four classes,
whose probabilities are the softmax of four draws of a Gaussian process of sd 3; its length scale is that of
greatest marginal likelihood of the real labels (`python -m bench.studies.oracle_fit`). The sd is a choice:
who knows the probabilities errs in a quarter of the cases. 300 rows are trained on, 100 validated on, 100
tested on. Every world is posed three times: as it is, with three of ten labels drawn anew, and with 75
training rows. One full-batch fit each, of a network with one hidden layer of 50 tanh units, from the prior
N(0, 1). A run has two worlds; `--task.world` takes others. The seed is that of the fits.

The truth: mutual information of label and function (epistemic) and expected entropy of the label (aleatoric)
under the Gaussian process posterior, which Hamiltonian Monte Carlo draws (`bench/studies/oracle_classes.py`).
Its standard error is at most 0.005 nats at any input. The estimates are the same two, under the method's
draws. `bench/studies/disentangling.py` defines errors, correlations and leaks, `bench/studies/joint.py` the
joint log loss, by which posteriors are ranked. `excess_log_loss` is the mean of KL(truth || prediction) of a
label, `excess_risk` that of the error rate: what each is above the loss of who knows the probabilities.

Source: the laws are ours; Osband et al. 2022, "The Neural Testbed: Evaluating Joint Predictions" for the
joint log loss; UDBench 2026, arXiv 2608.05995, for worlds of a known law.

What would mislead: the truth is that of an observer who knows the law, and a network's prior is another law,
so that its exact posterior has errors too; an epistemic part may be right on average and wrong everywhere,
for which the correlation stands beside the error; two worlds are few, and differences between methods that
are as large as those between worlds say little.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from bench import likelihoods, metrics, networks, predictions, priors, randomness
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
from bench.studies import disentangling, joint, oracle, oracle_classes
from bench.studies.oracle_classes import CLASSES

NAMES: dict[str, dict[str, object]] = {"oracle_classification": {}}

PRESETS: dict[str, dict[str, object]] = {
    "smoke": {"worlds": 1, "num_train": 50, "hidden": 5, "epochs": 20, "test_samples": 8},
}


@settings
class Settings:
    """Settings of oracle classification."""

    world: Whole = 0
    """Number of the first world; other numbers are fresh worlds of the same law, of which 0 and 1 have their
    truth in a file, and every other one takes minutes."""
    worlds: Count = 2
    """Worlds of a run, at least 1; each takes three fits."""
    num_train: Count = oracle_classes.TRAIN
    """Training rows of a world, at least 1, at most 1597; with another number the truth is sampled anew."""
    hidden: Count = 50
    """Units of the hidden layer, at least 1."""
    prior_std: Positive = 1.0
    """Standard deviation of the prior of each weight, above 0."""
    epochs: Count = 300
    """Full-batch epochs of each fit, at least 1."""
    test_samples: Count = 64
    """Weight samples S per prediction, at least 1; all are stored."""


class OracleClassification(Task):
    """Worlds of Gaussian processes at components of digits."""

    settings_class = Settings
    settings: Settings

    @property
    def spec(self) -> Spec:
        """What is measured."""
        return Spec(
            question="Does a posterior over classes know what it does not know, and tell it from noise?",
            source="Osband et al. 2022, The Neural Testbed; worlds of bench/studies/oracle_classes.py",
            version=1,
            metrics={
                "joint_log_loss": Metric(
                    "-log p(10 labels at two inputs), mean over batches", "nats", 0, np.inf
                ),
                "log_likelihood": Metric("mean of log p(label)", "nats", 0, -np.inf),
                "excess_log_loss": Metric(
                    "KL of the true law to the prediction of a label, mean over inputs", "nats", 0, np.inf
                ),
                "excess_risk": Metric(
                    "error rate of the likeliest class above the least possible", "fraction", 0, 1
                ),
                **disentangling.measures("nats"),
            },
            main_metric="joint_log_loss",
            validation_metric="log_likelihood",
            baseline="map",
            reference="mfvi",
        )

    # ---- data

    @property
    def truth(self) -> oracle_classes.Classes:
        """The worlds of this run."""
        return oracle_classes.worlds(self.settings.world, self.settings.worlds, self.settings.num_train)

    def own_data(self, part: str) -> tuple[Tensor, Tensor]:
        """Inputs `[N, 3]`, and what is known of them in all W worlds.

        Of the parts train and val labels `[N, 2 W]`, world by world as they are and then with some drawn
        anew. Of test the truth `[N, W, C + 6]`: latent values, and parts by condition, epistemic first.
        """
        w, size = self.truth, self.settings.num_train
        last = size + oracle_classes.VAL
        rows = {"train": slice(0, size), "val": slice(size, last), "test": slice(last, None)}[part]
        inputs = torch.from_numpy(w.inputs[rows]).float()
        if part != "test":
            return inputs, torch.from_numpy(w.labels[:, :, rows].reshape(-1, len(inputs)).T.copy())
        parts = w.parts.reshape(6, self.settings.worlds, -1).transpose(2, 1, 0)
        return inputs, torch.from_numpy(np.concatenate([w.functions[:, rows].swapaxes(0, 1), parts], -1))

    def data_digest(self) -> str:
        """Of all inputs and drawn numbers."""
        w = self.truth
        return array_digest({"inputs": w.inputs, "functions": w.functions, "labels": w.labels})

    # ---- protocol

    def problem(self, k: int = 0) -> Problem:
        """The k-th fit: all worlds in the condition base, then in noisier, then in fewer."""
        condition, world = divmod(k, self.settings.worlds)
        name = oracle.CONDITIONS[condition]
        inputs, labels = self.own_data("train")
        rows = oracle.fewer(len(inputs)) if name == "fewer" else len(inputs)
        column = world + self.settings.worlds * (name == "noisier")
        val_inputs, val_labels = self.own_data("val")
        return Problem(
            network=partial(networks.mlp, inputs.shape[1], CLASSES, (self.settings.hidden,), "tanh"),
            likelihood=likelihoods.Categorical(),
            prior=priors.normal(0, self.settings.prior_std),
            train=TensorDataset(inputs[:rows], labels[:rows, column]),
            val=TensorDataset(val_inputs, val_labels[:, column]),
            num_train=rows,
        )

    def run(self, engine: Engine) -> Arrays:
        """Log-probabilities of the base worlds under every draw, and the parts of both others."""
        worlds, size = self.settings.worlds, self.settings.test_samples
        inputs, (held_out, labels) = self.own_data("test")[0], self.own_data("val")
        kept, parts, validation = [], [], []
        stages = [f"{name}, world {w + 1}" for name in oracle.CONDITIONS for w in range(worlds)]
        budget = Budget(self.settings.epochs)
        for k, method in enumerate(engine.fit_stages(stages, self.problem, budget)):
            is_base = k < worlds
            found = engine.predict(method, torch.cat([inputs, held_out]) if is_base else inputs, size)
            assert isinstance(found, predictions.Categorical)
            # An ensemble has more draws than asked for, member after member: every member keeps its share.
            rows = torch.linspace(0, len(found.log_probs) - 1, min(size, len(found.log_probs)))
            log_probs = found.log_probs[rows.round().long()]
            if is_base:
                seen = predictions.Categorical(log_probs[:, len(inputs) :])
                validation.append(float(seen.log_score(labels[:, k]).mean()))
                engine.log("log_likelihood", float(np.mean(validation)), k + 1)
                kept.append(metrics.store(log_probs[:, : len(inputs)]))
            else:
                parts.append(parts_of(log_probs.double().numpy()))
        moved = np.stack(parts).reshape(2, worlds, 2, -1).swapaxes(1, 2)
        return {"log_probs": np.stack(kept), "moved_parts": moved.astype(np.float32)}

    def targets(self) -> Arrays:
        """Labels of the batches, and probabilities and parts of the ideal posterior at the test inputs."""
        known = self.own_data("test")[1].numpy()
        log_probs = oracle_classes.log_probs(known[..., :CLASSES], 0).swapaxes(0, 1)  # [W, N, C]
        parts = known[..., CLASSES:].transpose(2, 1, 0).reshape(3, 2, self.settings.worlds, -1)
        rows = joint.rows(self._anchors())
        uniforms = np.concatenate([self._uniforms(world) for world in range(self.settings.worlds)])
        labels = oracle_classes.labels_of(np.exp(log_probs).reshape(-1, CLASSES)[rows], uniforms)
        return {
            "labels": labels.astype(np.uint8),
            "true_log_probs": log_probs.astype(np.float32),
            "parts": parts.astype(np.float32),
        }

    def _uniforms(self, world: int) -> np.ndarray:
        """Uniform numbers behind the labels of a world's batches, `[P, T]`."""
        seed = randomness.derive(self.settings.world + world, "oracle_classification", "batches")
        shape = (oracle_classes.TEST // 2, joint.REPEATS * joint.BATCH)
        return np.random.default_rng(seed).random(shape)

    def _anchors(self) -> np.ndarray:
        return joint.anchors(
            self.settings.worlds * oracle_classes.TEST // 2, "oracle_classification", "anchors"
        )

    def given(self) -> Arrays:
        """Which of its two inputs each label of a batch is of, 0 or 1."""
        return {"anchors": self._anchors()}

    def layouts(self) -> dict[str, Layout]:
        """Predictions of N test inputs in W worlds, P pairs of inputs with T labels each."""
        w, n = self.settings.worlds, oracle_classes.TEST
        p, t = w * n // 2, joint.REPEATS * joint.BATCH
        return {
            "log_probs": Layout("float16", (w, "S", n, CLASSES), is_log_probs=True),
            "moved_parts": Layout("float32", (2, 2, w, n)),
            "labels": Layout("uint8", (p, t)),
            "true_log_probs": Layout("float32", (w, n, CLASSES), is_log_probs=True),
            "parts": Layout("float32", (3, 2, w, n)),
            "anchors": Layout("uint8", (p, t)),
        }

    # ---- scoring

    def score(self, arrays: Arrays) -> Metrics:
        """Joint and marginal losses, and both parts against the truth."""
        of_labels = probabilities(arrays)
        true = arrays["true_log_probs"].astype(np.float64).reshape(-1, CLASSES)
        averaged = predictions.average_log_probs(torch.from_numpy(every(arrays))).numpy()
        best, taken = true.max(-1), true[np.arange(len(true)), averaged.argmax(-1)]
        return {
            "joint_log_loss": float(joint.log_losses(of_labels).mean()),
            "log_likelihood": float(joint.marginal(of_labels).mean()),
            "excess_log_loss": float((np.exp(true) * (true - averaged)).sum(-1).mean().clip(min=0)),
            "excess_risk": float((np.exp(best) - np.exp(taken)).mean()),
            **disentangling.scores(*parts(arrays), are_variances=False),
        }

    def losses(self, arrays: Arrays) -> np.ndarray:
        """Joint log loss of each pair of test inputs, in nats, `[P]`."""
        return joint.log_losses(probabilities(arrays))

    def curves(self, arrays: Arrays) -> list[Row]:
        """Both parts by condition."""
        return disentangling.curves(*parts(arrays))

    def figures(self, arrays: Arrays) -> dict[str, Any]:
        """Estimates against the truth."""
        return {"parts": disentangling.chart(*parts(arrays), "nats", are_variances=False)}


def parts_of(log_probs: np.ndarray) -> np.ndarray:
    """Mutual information and expected entropy, `[2, N]`, of log-probabilities `[S, N, C]`, in nats."""
    both = (metrics.mutual_information, metrics.expected_entropy)
    return np.stack([part(torch.from_numpy(log_probs)).numpy() for part in both])


def every(arrays: Arrays) -> np.ndarray:
    """Log-probabilities of every draw at every test input, world after world, `[S, W N, C]`."""
    log_probs = metrics.restore(arrays["log_probs"]).swapaxes(0, 1)
    return log_probs.reshape(len(log_probs), -1, CLASSES)


def probabilities(arrays: Arrays) -> np.ndarray:
    """Log-probability of each label of the batches under each draw, `[S, P, T]`, in nats."""
    return every(arrays)[:, joint.rows(arrays["anchors"]), arrays["labels"].astype(int)]


def parts(arrays: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """Estimated and true parts in nats, each `[3, 2, W, N]`."""
    base = np.stack([parts_of(metrics.restore(world)) for world in arrays["log_probs"]], 1)
    found = np.concatenate([base[None], arrays["moved_parts"].astype(np.float64)])
    return found, arrays["parts"].astype(np.float64)
