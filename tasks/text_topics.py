"""Topics of short texts: a last network on vectors of a frozen encoder, from the news to a dictionary.

Question: does a posterior over the layers behind a frozen text encoder stay right, or say that it does not
know, on texts from another source and on topics that it was never shown?

Protocol: every text is a vector of 384 numbers and of length 1 by all-MiniLM-L6-v2, which is never trained
(`bench/bert.py`). One fit to a third of the news of four topics; a sixth validates, one half is the clean
test. Shifted texts are dictionary definitions of the same topics (`bench/studies/topics.py`). New topics are
the news on technology, and definitions of biology, chemistry, computing, law, medicine and religion: each is
told from the known topics of its own source, so that the form of a text does not tell. The split is the same
in every run; the seed is that of the fit. The network has one hidden layer of `hidden` units, ReLU: with none
the posteriors of the last layer would be those of the whole network. Prior N(0, 1) on every weight, under
which a hidden unit has variance 2 for every text, since vectors have length 1; they are not standardised.

Source: Ovadia et al. 2019, "Can You Trust Your Model's Uncertainty? Evaluating Predictive Uncertainty Under
Dataset Shift" (a source of texts that training never had); Hendrycks and Gimpel 2017, "A Baseline for
Detecting Misclassified and Out-of-Distribution Examples in Neural Networks". Deviations: their texts are
posts of newsgroups and reviews, read by a network that is trained; these texts lie in packages with a stated
licence, and the encoder is frozen.

What would mislead: the encoder is the same for all methods, so nothing here is said of posteriors over it;
clean news are told apart almost always, and differences there are of a few texts; many definitions name no
topic that a reader could know ("hook: secure with the foot"), so that no method can be right on all of them;
topics of definitions are WordNet's, and politics has half as many as the others; the two sources differ in
length, so an area says something of topics within a source alone, and the number of words stands beside it
as the control.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from torch import Tensor

from bench import networks, priors
from bench.contract import NetworkFactory, Prior, Spec
from bench.settings import Count, settings
from bench.studies import texts

NAMES: dict[str, dict[str, object]] = {"text_topics": {"dataset": "news_and_wordnet"}}

PRESETS: dict[str, dict[str, object]] = {"smoke": {"hidden": 8, "epochs": 2, "test_samples": 2}}


@settings
class Settings:
    """Settings of topics of texts."""

    dataset: Literal["news_and_wordnet"]
    """Texts: fixed by the task's name."""
    hidden: Count = 64
    """Units of the hidden layer, at least 1."""
    epochs: Count = 100
    """Epochs, at least 1."""
    batch_size: Count = 64
    """Texts per training step, at least 1."""
    test_samples: Count = 32
    """Weight samples S per prediction, at least 1."""


class TextTopics(texts.TextTask):
    """Topics of news and of definitions, from vectors of a frozen encoder."""

    settings_class = Settings
    settings: Settings

    @property
    def spec(self) -> Spec:
        """What is measured."""
        return texts.spec(
            "Does a posterior behind a frozen text encoder know what it does not know?",
            "Ovadia et al. 2019; Hendrycks and Gimpel 2017",
        )

    def network(self) -> NetworkFactory:
        """One hidden layer."""
        return partial(networks.mlp, self.topics.width, texts.CLASSES, (self.settings.hidden,))

    def prior(self) -> Prior:
        """N(0, 1) on every weight."""
        return priors.normal(0, 1)

    def inputs(self, of: list[str]) -> Tensor:
        """Their vectors `[N, H]`."""
        return torch.from_numpy(self.topics.vectors(of))
