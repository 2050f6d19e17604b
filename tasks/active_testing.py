"""Active testing: how few test labels does it take to know a model's risk, if its posterior says which?

Question: do a posterior's uncertainties guide the choice of test points to those that tell most of the risk?

Protocol: two models are fitted and then fixed: the full one to the training images but the last tenth, which
stops the fit early; its test pool is the whole published test set. The small one is fitted to 1000 points of
the data of active learning (`bench.studies.active`), its test pool is that unbalanced test set. The risk is
the mean over the test pool of -log p(label). In 5,000 trajectories test labels are bought one by one without
replacement, and R~, PURE and LURE estimate the risk from M of them. Proposals are made of the model's BALD
scores over its test pool: softmax at T = 10,000 of the scores divided by their sum, and in proportion to the
scores, none counted below a tenth of their mean; after a draw the others keep their ratios. No proposal knows
a label. Each is compared with uniform draws from the same random numbers. Losses of a fixed model are fixed:
`run` keeps predictions and scores, and `score` plays the trajectories, the same in every run. The score
`expected_loss` (Kossen et al. 2021) asks a second fit of the same method, made for nothing else, what it
believes of the labels; under the model's own belief it would be the predictive entropy. A search chooses by
the risk of the full model on the tenth that stopped its fit.

Source: Farquhar 2022, thesis "Understanding Approximation" (docs/sources.md), section 5.2 (Figs 5.7, 5.8b,
5.8c, C.1b); Kossen et al. 2021. Deviations: the source does not say what its fully trained model was trained
on, nor whether scores are normalised anew after every draw; here they are not, since those of a fixed model
do not change.

What would mislead: squared errors of two models, whose risks differ; compare the ratio to uniform sampling of
the same model. Under the softmax points with a low score may weigh as much as all others and hardly ever be
drawn: 5,000 trajectories then see none of them, and show an error that is far too small. `first_draw_ratio`
is exact, and shows it. A method without spread has BALD 0, draws uniformly, and has the ratio 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field
from torch import Tensor
from torch.utils.data import TensorDataset

from bench import data, likelihoods, metrics, priors
from bench.contract import (
    Arrays,
    Budget,
    Comparison,
    Engine,
    FinishedRun,
    Layout,
    Metric,
    Metrics,
    Problem,
    Row,
    Spec,
    Task,
    Undefined,
)
from bench.intervals import standard_error
from bench.settings import Count, Positive, settings
from bench.spec import Axis
from bench.studies import acquisition, active, active_comparison, testing

NAMES: dict[str, dict[str, object]] = {
    "active_testing_mnist": {"dataset": "mnist"},
    "active_testing_fashion_mnist": {"dataset": "fashion_mnist"},
    "active_testing_digits": {"dataset": "digits", "network": "mlp"},
}

PRESETS: dict[str, dict[str, object]] = {
    "smoke": {"train_images": 5000, "epochs": 1, "test_samples": 2, "trajectories": 200, "acquired": 50},
    "paper": {"epochs": 100, "patience": 20},
}

MODELS = ("full", "small")
SMALL = 1000
"""Training points of the small model, or as many as there are."""
BATCH_SIZE = 64


@settings
class Settings:
    """Settings of active testing."""

    dataset: Literal["mnist", "fashion_mnist", "digits"]
    """Images: fixed by the task's name."""
    network: Literal["conv", "mlp"] = "conv"
    """conv has two convolutional and two linear layers, mlp one hidden layer of 50 units."""
    train_images: Annotated[int, Field(ge=10)] = 60_000
    """Images of the full model, at least 10, or as many as there are; the last tenth stops the fit early."""
    acquired: Count = 70
    """Test labels bought in a trajectory, at least 1."""
    trajectories: Annotated[int, Field(ge=2)] = 5000
    """Trajectories R, at least 2."""
    score: Literal["bald", "predictive_entropy", "variation_ratio", "expected_loss"] = "bald"
    """What makes a test point worth its label: bald, predictive_entropy, variation_ratio or expected_loss."""
    temperature: Positive = 10_000.0
    """T of the softmax, on scores divided by their sum, above 0."""
    epochs: Count = 10
    """Epochs of a fit at most, at least 1."""
    patience: Count = 5
    """Epochs without a better validation NLL after which a fit stops, at least 1."""
    test_samples: Count = 100
    """Weight samples S of the predictions and of the scores, at least 1."""


class ActiveTesting(Task):
    """Two fixed models, and trajectories of test labels."""

    settings_class = Settings
    settings: Settings

    @property
    def spec(self) -> Spec:
        """What is measured."""
        last = "after the last label"
        found = {
            "risk": Metric("mean of -log p(label) over the test pool, full model", "nats", 0, np.inf),
            "accuracy": Metric("share of right classes, full model", "fraction", 1, 0),
            "error_uniform": Metric(f"mean squared error, uniform draws, {last}", "nats squared", 0, np.inf),
        }
        for guide in testing.GUIDES:
            ratio = f"mean squared error of LURE, {guide}, over that of uniform draws, {last}"
            found |= {
                f"ratio_{guide}": Metric(ratio, "ratio", 0, np.inf),
                f"ratio_{guide}_low": Metric("its 95% interval, lower end", "ratio", 0, np.inf),
                f"ratio_{guide}_high": Metric("its 95% interval, upper end", "ratio", 0, np.inf),
                f"first_draw_ratio_{guide}": Metric(
                    f"the same after one draw, {guide}, exact", "ratio", 0, np.inf, may_be_undefined=True
                ),
            }
            for e, name in active.OBJECTIVES.items():
                error = f"mean squared error of {name}, {guide}, {last}"
                found[f"error_{guide}_{e}"] = Metric(error, "nats squared", 0, np.inf)
        for e, name in active.OBJECTIVES.items():
            bias = f"mean of risk minus {name}, small model, softmax, {last}"
            found[f"bias_{e}"] = Metric(bias, "nats", -np.inf, np.inf)
            error = "its standard error over the trajectories"
            found[f"bias_{e}_error"] = Metric(error, "nats", 0, np.inf)
        return Spec(
            question="Does the posterior's uncertainty tell which test labels are worth buying?",
            source="Farquhar 2022, section 5.2; Kossen et al. 2021",
            version=1,
            metrics=found,
            main_metric="ratio_proportional",
            validation_metric="risk",
            baseline="map",  # draws uniformly
            reference="mfvi_ensemble",
        )

    # ---- data

    @cached_property
    def images(self) -> data.Images:
        """The published data set, read once."""
        return data.load(self.settings.dataset, self.data_dir)

    @cached_property
    def unbalanced(self) -> active.Data:
        """The data of active learning, read once."""
        return active.load(self.settings.dataset, data_dir=self.data_dir)

    def data_digest(self) -> str:
        """Digest of the digests of both.

        Raises:
            UsageError: If more test labels are to be bought than there are.
        """
        pool = max(
            len(self.images.test_labels), len(self.unbalanced.test_labels)
        )  # of the smaller all but one
        active.check_acquired(self.settings.acquired, pool, "test labels are there")
        digests = {"full": self.images.digest, "small": self.unbalanced.digest}
        return data.array_digest({k: np.frombuffer(bytes.fromhex(d), np.uint8) for k, d in digests.items()})

    def examples(self, model: str) -> tuple[TensorDataset, TensorDataset]:
        """Training and validation examples."""
        if model == "small":
            pool, labels = self.unbalanced.pool[:SMALL], self.unbalanced.pool_labels[:SMALL]
            return TensorDataset(pool, labels), self.unbalanced.val
        images, count = self.images, self.settings.train_images
        inputs = active.standardise(self.settings.dataset, images.train_inputs[:count])
        labels, cut = images.train_labels[:count], len(inputs) - len(inputs) // 10
        return TensorDataset(inputs[:cut], labels[:cut]), TensorDataset(inputs[cut:], labels[cut:])

    def pool(self, model: str) -> Tensor:
        """Inputs of the test pool `[N, 1, H, W]`."""
        if model == "small":
            return self.unbalanced.test
        return active.standardise(self.settings.dataset, self.images.test_inputs)

    # ---- protocol

    def problem(self, model: str = "full") -> Problem:
        """What is fitted before any testing."""
        train, val = self.examples(model)
        return Problem(
            network=active.network(self.settings.network, train.tensors[0][0].numel()),
            likelihood=likelihoods.Categorical(),
            prior=priors.normal(0, 0.25),
            train=train,
            val=val,
            num_train=len(train),
        )

    def run(self, engine: Engine) -> Arrays:
        """Class predictions and scores of both models on their test pools.

        The validation images come last, and so move no draw behind what is scored.
        """
        own = self.settings
        stages = [f"{model} model" for model in MODELS]
        if own.score == "expected_loss":
            stages += [f"second {stage}" for stage in stages]
        budget = Budget(own.epochs, BATCH_SIZE, own.patience)
        fits = engine.fit_stages(stages, lambda k: self.problem(MODELS[k % len(MODELS)]), budget)
        log_probs: dict[str, Tensor] = {}
        scores: dict[str, Tensor] = {}
        for k, method in enumerate(fits):
            model = MODELS[k % len(MODELS)]
            prediction = engine.predict(method, self.pool(model), own.test_samples)
            if own.score != "expected_loss":
                scores[model] = active.SCORES[own.score](prediction)
            elif model in log_probs:
                scores[model] = acquisition.expected_loss(prediction, log_probs[model])
            log_probs.setdefault(model, prediction.average())
            if k == 0:
                full = method
        engine.stage(stages[0], len(stages), len(stages))
        inputs, labels = self.examples("full")[1].tensors
        held_out = metrics.store(engine.predict(full, inputs, own.test_samples).average())
        engine.log("risk", metrics.negative_log_likelihood(metrics.restore(held_out), labels.numpy()))
        return {
            **{f"{model}_log_probs": metrics.store(found) for model, found in log_probs.items()},
            **{f"{model}_scores": found.float().numpy() for model, found in scores.items()},
        }

    def targets(self) -> Arrays:
        """Labels of both test pools."""
        return {
            "full_labels": self.images.test_labels.byte().numpy(),
            "small_labels": self.unbalanced.test_labels.byte().numpy(),
        }

    def layouts(self) -> dict[str, Layout]:
        """Predictions, scores and labels of both test pools; how large the small one is the data tell."""
        pools: dict[str, Axis] = {"full": data.SOURCES[self.settings.dataset].test, "small": "N"}
        found: dict[str, Layout] = {}
        for model, n in pools.items():
            found |= {
                f"{model}_log_probs": Layout("float16", (n, data.CLASSES), is_log_probs=True),
                f"{model}_scores": Layout("float32", (n,)),
                f"{model}_labels": Layout("uint8", (n,)),
            }
        return found

    # ---- scoring

    def measured(self, arrays: Arrays) -> dict[str, testing.Trajectories]:
        """The trajectories of both models; kept, since figures and curves ask for them too."""
        key = data.array_digest(arrays)
        if getattr(self, "_played", (None,))[0] != key:
            own = self.settings
            found = {}
            for model in MODELS:
                losses, scores = losses_and_scores(arrays, model)
                found[model] = testing.simulate(
                    losses, scores, own.temperature, own.trajectories, own.acquired
                )
            self._played = key, found
        return self._played[1]

    def score(self, arrays: Arrays) -> Metrics:
        """Errors after the last label, of the full model; biases, of the small one."""
        tested = self.measured(arrays)
        full, small = tested["full"], tested["small"]
        predicted = metrics.restore(arrays["full_log_probs"]).argmax(1)
        scores: Metrics = {
            "risk": full.risk,
            "accuracy": metrics.accuracy(predicted, arrays["full_labels"]),
            "error_uniform": float(full.squared_error("uniform", "plain")[:, -1].mean()),
        }
        for guide in testing.GUIDES:
            ratio, first = full.ratios[guide], full.first_draw[guide]
            scores |= {
                f"ratio_{guide}": float(ratio.centre[-1]),
                f"ratio_{guide}_low": float(ratio.low[-1]),
                f"ratio_{guide}_high": float(ratio.high[-1]),
                f"first_draw_ratio_{guide}": first if np.isfinite(first) else Undefined("it overflows"),
            }
            for e in active.OBJECTIVES:
                scores[f"error_{guide}_{e}"] = float(full.squared_error(guide, e)[:, -1].mean())
        for e in active.OBJECTIVES:
            bias = small.bias("softmax", e)[:, -1]
            scores[f"bias_{e}"] = float(bias.mean())
            scores[f"bias_{e}_error"] = standard_error(bias)
        return scores

    def curves(self, arrays: Arrays) -> list[Row]:
        """Mean squared error and mean bias of every estimator under every proposal, against M."""
        rows = []
        for model, found in self.measured(arrays).items():
            for proposal, estimates in found.estimates.items():
                for e in estimates:
                    series = f"{proposal}, {active.OBJECTIVES[e]}"
                    for what in ("squared_error", "bias"):
                        values = getattr(found, what)(proposal, e).mean(0)
                        name = f"{what.replace('_', ' ')} ({model} model)"
                        pairs = zip(found.points, values, strict=True)
                        rows += [Row(name, series, float(m), float(value)) for m, value in pairs]
        return rows

    def figures(self, arrays: Arrays) -> dict[str, Any]:
        """Mean squared error, bias and variance against M."""
        return active_comparison.error_charts({"One model": [self.measured(arrays)]})

    @classmethod
    def compare(cls, runs: Sequence[FinishedRun]) -> Comparison:
        """Errors and biases, a line per method and variant; which scores guide better."""
        return active_comparison.compare_testing(runs)


def losses_and_scores(arrays: Arrays, model: str = "full") -> tuple[np.ndarray, np.ndarray]:
    """Losses -log p(label) of a model over its test pool, and its scores, each `[N]`, in nats."""
    labels, log_probs = arrays[f"{model}_labels"], metrics.restore(arrays[f"{model}_log_probs"])
    return -log_probs[np.arange(len(labels)), labels], arrays[f"{model}_scores"].astype(np.float64)
