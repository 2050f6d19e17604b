"""Tasks on short texts by topic: their parts, one fit, and what is scored of it.

One fit to a third of the news of four topics; a sixth validates, one half is the clean test. Shifted texts
are dictionary definitions of the same topics (`bench/studies/topics.py`). New topics are the news on
technology, and definitions of biology, chemistry, computing, law, medicine and religion: each is told from
the known topics of its own source, so that the form of a text does not tell. The split is the same in every
run; the seed is that of the fit.

A task on texts has the settings `dataset`, `epochs`, `batch_size` and `test_samples`, and says what its
network is, and what of a text that network gets.

Shapes: N texts of a part, C known topics.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from bench import figures, likelihoods, metrics, randomness
from bench.contract import (
    Arrays,
    Budget,
    Engine,
    Layout,
    Metric,
    Metrics,
    NetworkFactory,
    Prior,
    Problem,
    Row,
    Spec,
    Task,
    Undefined,
)
from bench.data import array_digest
from bench.spec import PREDICTED
from bench.studies import calibration, detection, topics
from bench.studies.acquisition import bald

CLASSES = len(topics.KNOWN)
GROUPS = {"shifted": "dictionary", "clean": "news", "new": "dictionary", "new_clean": "news"}
"""Held-out texts -> their source: of known topics, and of new ones."""
NEW_OF = {"shifted": "new", "clean": "new_clean"}
"""Known -> the new ones that are told from them."""


class TextTask(Task):
    """A task whose examples are texts with their topics."""

    settings: Any

    @abstractmethod
    def network(self) -> NetworkFactory:
        """Makes the network whose posterior is inferred; its outputs are `[B, C]`."""

    @abstractmethod
    def prior(self) -> Prior:
        """Over its weights."""

    @abstractmethod
    def inputs(self, of: list[str]) -> Tensor:
        """What the network gets of texts, `[N, ...]`."""

    # ---- data

    @cached_property
    def topics(self) -> topics.Topics:
        """All texts, read once."""
        return topics.load(self.settings.dataset, self.data_dir)

    def own_data(self, part: str, form: Literal["inputs", "words"] = "inputs") -> tuple[Tensor, Tensor]:
        """Texts and labels `[N]` of train, val or one of GROUPS; labels of new topics are 4.

        A text is the network's input, or the number of its words alone, for which nothing is encoded.
        """
        texts, labels = self.texts(part)
        if form == "words":
            return torch.tensor([len(text.split()) for text in texts]), torch.from_numpy(labels)
        return self.inputs(texts), torch.from_numpy(labels)

    def texts(self, part: str) -> tuple[list[str], np.ndarray]:
        """Texts and labels `[N]` of the same parts."""
        source = GROUPS.get(part, "news")
        if part in NEW_OF.values():
            texts = self.topics.new(source)
            return texts, np.full(len(texts), CLASSES)
        texts, labels = self.topics.known(source), self.topics.labels(source)
        rows = self.rows(len(labels))[part] if source == "news" else np.arange(len(labels))
        return [texts[row] for row in rows], labels[rows]

    @staticmethod
    def rows(number: int) -> dict[str, np.ndarray]:
        """Places of the training, validation and clean test part of the news on known topics."""
        order = np.random.default_rng(randomness.derive(0, "text_topics")).permutation(number)
        test, val, train = np.split(order, [number // 2, number // 2 + number // 6])
        return {"clean": test, "val": val, "train": train}

    def data_digest(self) -> str:
        """Digest of all texts, the encoder and the split; what is encoded follows, up to rounding."""
        rows = self.rows(len(self.topics.known("news")))
        digest = np.frombuffer(bytes.fromhex(self.topics.digest), np.uint8)
        return array_digest({"texts": digest, **rows})

    # ---- protocol

    def problem(self) -> Problem:
        """The training texts of the news."""
        train, val = (TensorDataset(*self.own_data(part)) for part in ("train", "val"))
        return Problem(self.network(), likelihoods.Categorical(), self.prior(), train, val, len(train))

    def run(self, engine: Engine) -> Arrays:
        """Mean log-probabilities and mutual information of all held-out texts, which share their draws."""
        engine.stage("fit")
        problem = self.problem()
        method = engine.fit(problem, Budget(self.settings.epochs, self.settings.batch_size))
        val_inputs, val_labels = problem.val.tensors  # type: ignore[union-attr]
        parts = [val_inputs, *(self.own_data(group)[0] for group in GROUPS)]
        prediction = engine.predict(method, torch.cat(parts), self.settings.test_samples)
        ends = np.cumsum([len(part) for part in parts])[:-1]
        seen, *log_probs = np.split(metrics.store(prediction.average()), ends)
        _, *information = np.split(bald(prediction).float().numpy(), ends)
        validated = metrics.negative_log_likelihood(metrics.restore(seen), val_labels.numpy())
        engine.log("nll_clean", validated)
        found: Arrays = {}
        for group, each, spread in zip(GROUPS, log_probs, information, strict=True):
            found |= {_array(group, "log_probs"): each, _array(group, "information"): spread}
        return found

    def targets(self) -> Arrays:
        """Labels of the texts of known topics, uint8 `[N]`."""
        return {_array(of, "labels"): self.own_data(of, "words")[1].byte().numpy() for of in NEW_OF}

    def given(self) -> Arrays:
        """Number of words of every held-out text, uint8 `[N]`: the control of detection."""
        return {_array(of, "words"): self.own_data(of, "words")[0].byte().numpy() for of in GROUPS}

    def layouts(self) -> dict[str, Layout]:
        """Predictions, mutual information and words of the texts of each group; labels of known topics."""
        found: dict[str, Layout] = {}
        for group, size in zip(GROUPS, "NVMW", strict=True):
            found[_array(group, "log_probs")] = Layout("float16", (size, CLASSES), is_log_probs=True)
            found[_array(group, "information")] = Layout(PREDICTED, (size,))
            found[_array(group, "words")] = Layout("uint8", (size,))
            if group in NEW_OF:
                found[_array(group, "labels")] = Layout("uint8", (size,))
        return found

    # ---- scoring

    def score(self, arrays: Arrays) -> Metrics:
        """Scores of clean and of shifted texts, and detection of new topics within each source."""
        found: Metrics = {}
        for group, new in NEW_OF.items():
            measured = calibration.measured(*_predicted(arrays, group))
            found |= {_metric(name, group): value for name, value in measured.items()}
            one, two = uncertainties(arrays, group), uncertainties(arrays, new)
            for name in detection.UNCERTAINTIES:
                nothing = detection.says_nothing(name, one[name], two[name])
                area = detection.auroc(one[name], two[name])
                found[f"auroc_{new}_{name}"] = Undefined(detection.NO_SPREAD) if nothing else area
            words = (arrays[_array(each, "words")].astype(float) for each in (group, new))
            found[f"auroc_{new}_words"] = detection.auroc(*words)
        return found

    def losses(self, arrays: Arrays) -> np.ndarray:
        """-log p(topic) of each definition of a known topic, in nats, `[N]`."""
        log_probs, labels = _predicted(arrays, "shifted")
        return -log_probs[np.arange(len(labels)), labels]

    def curves(self, arrays: Arrays) -> list[Row]:
        """Share of right topics by the largest probability, in bins, of clean and of shifted texts."""
        rows = []
        for group in NEW_OF:
            log_probs, labels = _predicted(arrays, group)
            right = log_probs.argmax(1) == labels
            bins = calibration.reliability(np.exp(log_probs.max(1)), right, adaptive=False)
            points = zip(*bins[1:], strict=True)
            rows += [Row("reliability", group, float(p), float(share)) for p, share in points]
        return rows

    def figures(self, arrays: Arrays) -> dict[str, Any]:
        """Reliability of clean and of shifted texts."""
        series: dict[str, list[tuple[float, float]]] = {}
        for row in self.curves(arrays):
            series.setdefault(row.series, []).append((row.x, row.value))
        axes = "largest probability", "share of right topics"
        return {"reliability": figures.unit_square(series, "Reliability", *axes, "calibrated")}


def spec(question: str, source: str) -> Spec:
    """What a task on texts measures."""
    return Spec(
        question=question,
        source=source,
        version=1,
        metrics=_measures(),
        main_metric="nll",
        validation_metric="nll_clean",
        baseline="map",
        reference="deep_ensemble",
    )


def _measures() -> dict[str, Metric]:
    """The metrics by name."""
    found: dict[str, Metric] = {}
    for group, new in NEW_OF.items():
        where = "definitions, a shifted source" if group == "shifted" else "news, as in training"
        for name, metric in calibration.MEASURES.items():
            said = f"{metric.description}; {where}"
            found[_metric(name, group)] = Metric(said, metric.unit, metric.best, metric.worst)
        of = f"area under the ROC curve of detecting new topics of the {GROUPS[new]}"
        for name, what in detection.UNCERTAINTIES.items():
            found[f"auroc_{new}_{name}"] = Metric(f"{of} by {what}", "fraction", 1, 0, name == "information")
        control = f"{of} by the number of words alone: a control"
        found[f"auroc_{new}_words"] = Metric(control, "fraction", 1, 0)
    return found


def uncertainties(arrays: Arrays, group: str) -> dict[str, np.ndarray]:
    """Every uncertainty about the texts of one of GROUPS, `[N]`."""
    log_probs = metrics.restore(arrays[_array(group, "log_probs")])
    return detection.uncertainties(log_probs, arrays[_array(group, "information")])


def _predicted(arrays: Arrays, group: str) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities `[N, C]` and labels `[N]` of texts of known topics."""
    log_probs, labels = (arrays[_array(group, what)] for what in ("log_probs", "labels"))
    return metrics.restore(log_probs), labels.astype(np.int64)


def _array(group: str, what: str) -> str:
    """Those of the main metric have plain names."""
    return what if group == "shifted" else f"{group}_{what}"


def _metric(name: str, group: str) -> str:
    return name if group == "shifted" else f"{name}_{group}"
