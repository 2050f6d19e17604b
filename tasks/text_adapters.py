"""Topics of short texts by a transformer with low-rank adapters, from the news to a dictionary.

Question: does a posterior over low-rank adapters of a pretrained transformer, as it is made for large
language models, stay right, or say that it does not know, on texts from another source and on topics that it
was never shown?

Protocol: texts, split, shifted texts, new topics and scores are those of text_topics
(`bench/studies/texts.py`). The network is all-MiniLM-L6-v2 (`bench/bert.py`). Its pretrained weights are
frozen. The query and value projections of its last `layers` layers have adapters of rank `rank`, and a linear
head reads the mean over tokens: adapters and head are the weights of which a posterior is inferred
(`bench/studies/adapters.py`). What the layers below say of a text depends on none of them, so it is computed
once and kept. One fit. Prior N(0, 0.1^2) on every weight. Under it the entries of (alpha / r) B A have
standard deviation 0.057, and those of the pretrained projections 0.06 to 0.08: an adapter changes a
projection by about its own size. The logits have variance 3.85 for every text, since the head reads a vector
of length sqrt(384).

Source: Yang et al. 2024, "Bayesian Low-rank Adaptation for Large Language Models" (Laplace's approximation
over adapters: `laplace` with Kronecker factors); Wang et al. 2024, "BLoB: Bayesian Low-Rank Adaptation by
Backpropagation for Large Language Models" (variational inference over them: `mfvi`, which draws A, B and the
head, where BLoB draws A alone and has a point for B); Hu et al. 2022, "LoRA: Low-Rank Adaptation of Large
Language Models". Deviations: a transformer of 22 million weights in place of one of billions, so that a fit
takes minutes of a processor; topics in place of questions with answers to choose from.

What would mislead: a prior of normals over A and B is none over their product, whose tails are heavier than a
normal's, and neither prior nor likelihood changes where A and B are turned against each other, so that the
posterior has many modes that are one function; the scale of that prior was set by hand; texts are cut after
`tokens` tokens, and text_topics, whose vectors are of whole texts, reads some words more; clean news are told
apart almost always, many definitions name no topic, and the two sources differ in length, as in text_topics.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from bench import priors
from bench.contract import NetworkFactory, Prior, Spec
from bench.settings import Count, Positive, settings
from bench.studies import texts
from bench.studies.adapters import Reader

NAMES: dict[str, dict[str, object]] = {"text_adapters": {"dataset": "news_and_wordnet"}}

PRESETS: dict[str, dict[str, object]] = {
    "smoke": {"layers": 1, "tokens": 8, "rank": 2, "epochs": 1, "batch_size": 64, "test_samples": 2}
}


@settings
class Settings:
    """Settings of topics of texts by adapters."""

    dataset: Literal["news_and_wordnet"]
    """Texts: fixed by the task's name."""
    layers: Annotated[int, Field(ge=1, le=6)] = 2
    """Layers with adapters, the last ones, 1 to 6."""
    rank: Count = 8
    """Rank r of an adapter, at least 1."""
    alpha: Positive = 16
    """Scale of what an adapter adds, times r; above 0."""
    tokens: Annotated[int, Field(ge=2)] = 48
    """Tokens of a text that are read, at least 2."""
    epochs: Count = 8
    """Epochs, at least 1."""
    batch_size: Count = 16
    """Texts per training step, at least 1."""
    test_samples: Count = 8
    """Weight samples S per prediction, at least 1."""


PRIOR_STD = 0.1
"""Of every weight."""


class TextAdapters(texts.TextTask):
    """Topics of news and of definitions, by a transformer with low-rank adapters."""

    settings_class = Settings
    settings: Settings

    @property
    def spec(self) -> Spec:
        """What is measured."""
        return texts.spec(
            "Does a posterior over low-rank adapters of a transformer know what it does not know?",
            "Yang et al. 2024; Wang et al. 2024; Hu et al. 2022",
        )

    def network(self) -> NetworkFactory:
        """The last layers with adapters, and a head."""
        own = self.settings
        return partial(Reader, self.topics.upper(own.layers), texts.CLASSES, own.rank, own.alpha)

    def prior(self) -> Prior:
        """The same normal for adapters and head."""
        return priors.normal(0, PRIOR_STD)

    def inputs(self, of: list[str]) -> Tensor:
        """What the layers below say of their tokens, `[N, L, H]`."""
        return torch.from_numpy(self.topics.states(of, self.settings.layers, self.settings.tokens))
