"""Generative replay without Bayes: the mode, trained on new data and on generated earlier data.

Approximates the posterior given the data of all fits so far by a point mass at its mode, where the likelihood
of the earlier data is estimated on generated inputs with the labels of the last mode: `vgr` without its
variances. The first fit is `map`.

Source: Shin et al. 2017 (deep generative replay); Farquhar 2022, thesis "Understanding Approximation"
(docs/sources.md), section 5.1.
Deviations: the prior of the weights stays in the loss, as in `map`. The scale of the replayed likelihood is
its number of examples, where the published losses weigh tasks. Generator and labels as in
bench/families/generator.py.
Cost: as maximum a posteriori with twice the batch, one more forward pass over its half, and after every fit
the generator's training (2000 steps of a network of a million weights); one number per weight beside it.
Valid for: classes, and inputs in [0, 1] that make sense as pixels; every differentiable network.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from bench import optimizers
from bench.contract import Batch, Method, Noise, Prediction, Prior, Problem
from bench.divergence import log_prob
from bench.families.generator import Replay
from bench.settings import Count, Positive, settings
from bench.weights import forward

NAMES: dict[str, dict[str, object]] = {"replay": {}}
PRESETS = {"smoke": {"generator_steps": 20, "generator_hidden": 32}}
SEARCH = {"learning_rate": (1e-4, 1e-1, "log")}


@settings
class Settings:
    """Settings of generative replay without Bayes."""

    learning_rate: Positive = 1e-3
    """Step size of the optimiser, above 0."""
    optimizer: optimizers.Name = "adam"
    """adam, amsgrad, or sgd with Nesterov momentum 0.9."""
    generator_steps: Count = 2000
    """Training steps of the generator after every fit, at least 1."""
    generator_hidden: Count = 400
    """Units in each of two hidden layers of the generator's encoder and decoder, at least 1."""
    generator_latent: Count = 100
    """Latent variables of the generator, at least 1."""


class GenerativeReplay(Method):
    """A point mass at the mode, and a generator of the data that it was fitted to."""

    settings_class = Settings
    approximates = "the posterior given all fits' data by its mode, with earlier data generated"
    declares = "mode exact", {"learning_rate": 0.05}
    provides = frozenset({"sequential", "loss_terms"})
    settings: Settings
    replay: Replay

    def __init__(self, problem: Problem, settings: Settings, start: GenerativeReplay | None = None) -> None:
        num_past = 0 if start is None else int(start.replay.num_learned)
        super().__init__(replace(problem, num_train=problem.num_train + num_past), settings, start)
        self.network = problem.network()
        self.replay = Replay(problem, settings.generator_hidden, settings.generator_latent, "replay")
        if start is not None:
            self.load_state_dict(start.state_dict())
            self.replay.follow(start.replay, start._weights())

    def finish_fit(self, loader: Iterable[Batch]) -> None:
        """Teaches the generator this fit's examples."""
        self.replay.learn(loader, self.settings.generator_steps, self.generator)

    def _weights(self) -> dict[str, Tensor]:
        return {name: p[None] for name, p in self.network.named_parameters()}

    def draw_noise(self, num_samples: int, generator: torch.Generator) -> Noise:
        """After the first fit a seed of the replay, `[S]`."""
        return self.replay.seeds(num_samples, generator)

    def loss_terms(self, batch: Batch, noise: Noise) -> tuple[Tensor, Tensor]:
        """Negative log likelihood of all data, earlier ones replayed, and negative log prior, in nats."""
        weights = self._weights()
        model = (self.network, self.likelihood)
        nll = self.replay.likelihood_term(*model, weights, batch, noise.get("replay"))
        return nll, -log_prob(self.prior, weights).sum()

    def predict(self, inputs: Tensor, num_samples: int, generator: torch.Generator) -> Prediction:
        """One prediction: S = 1 whatever `num_samples` says."""
        with torch.no_grad():
            return self.likelihood.predict(forward(self.network, self._weights(), inputs))

    def as_prior(self) -> Prior:
        """The prior that this fit was given: earlier data come back as replay, not as prior."""
        return self.problem.prior
