"""Variational generative replay: mean-field VI whose earlier data, not whose prior, are carried forward.

Approximates the posterior given the data of all fits so far by the product of normals that maximises
E_q[log p(D_t | w) + log p(D_1 .. D_t-1 | w)] - KL(q || first prior), where the likelihood of the earlier data
is estimated on generated inputs with the labels of the last posterior. The first fit is `mfvi`.

Source: Farquhar and Gal 2018 (variational generative replay); Farquhar 2022, thesis "Understanding
Approximation" (docs/sources.md), section 5.1, where it is the baseline that does not need sequential Bayesian
updating.
Deviations: the choice of the generator is ours, bench/families/generator.py says where its settings are
from. Labels are hard: the argmax of the prediction averaged over `label_samples` draws from the last
posterior, drawn once per fit. Means and variances go on from the last posterior although the prior does not.
Cost: as mean-field VI with twice the batch, `label_samples` forward passes over its half, and after every fit
the generator's training (2000 steps of a network of a million weights); two numbers per weight beside it.
Valid for: classes, and inputs in [0, 1] that make sense as pixels; every differentiable network.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from bench import optimizers
from bench.contract import Batch, Noise, Prior, Problem
from bench.families.generator import Replay
from bench.families.variational import MeanField
from bench.settings import Count, Positive, settings

NAMES: dict[str, dict[str, object]] = {"vgr": {}}
PRESETS = {"smoke": {"generator_steps": 20, "generator_hidden": 32}}
SEARCH = {
    "learning_rate": (1e-4, 1e-1, "log"),
    "initial_rho": (-7.0, -1.0, "linear"),
    "train_samples": [1, 2, 4, 8],
}


@settings
class Settings:
    """Settings of variational generative replay."""

    learning_rate: Positive = 1e-3
    """Step size of the optimiser, above 0."""
    optimizer: optimizers.Name = "adam"
    """adam, amsgrad, or sgd with Nesterov momentum 0.9."""
    train_samples: Count = 1
    """Weight samples per training step, at least 1."""
    initial_rho: float = -3.0
    """Start of rho for every weight; sigma = softplus(rho), so -3 is a standard deviation of 0.049."""
    label_samples: Count = 10
    """Draws from the last posterior whose averaged prediction labels what is replayed, at least 1."""
    generator_steps: Count = 2000
    """Training steps of the generator after every fit, at least 1."""
    generator_hidden: Count = 400
    """Units in each of two hidden layers of the generator's encoder and decoder, at least 1."""
    generator_latent: Count = 100
    """Latent variables of the generator, at least 1."""


class VGR(MeanField):
    """Independent normals over all weights, and a generator of the data that they were fitted to."""

    settings_class = Settings
    approximates = "the posterior given all fits' data by independent normals, with earlier data generated"
    declares = "mean-field optimum of KL", {"learning_rate": 0.01, "train_samples": 16}
    provides = frozenset(
        {"weight_samples", "density", "moments", "sequential", "loss_terms", "scale_settable"}
    )
    settings: Settings
    replay: Replay

    def __init__(self, problem: Problem, settings: Settings, start: VGR | None = None) -> None:
        num_past = 0 if start is None else int(start.replay.num_learned)
        super().__init__(replace(problem, num_train=problem.num_train + num_past), settings, start)
        self.replay = Replay(problem, settings.generator_hidden, settings.generator_latent, "vgr")
        if start is not None:
            self.load_state_dict(start.state_dict())
            draws = start.sample_weights(settings.label_samples, self.generator)
            self.replay.follow(start.replay, draws)

    def finish_fit(self, loader: Iterable[Batch]) -> None:
        """Teaches the generator this fit's examples."""
        self.replay.learn(loader, self.settings.generator_steps, self.generator)

    # ---- the distribution

    def draw_noise(self, num_samples: int, generator: torch.Generator) -> Noise:
        """Standard normal noise `[S, *shape]` per tensor; after the first fit a seed of the replay, `[S]`."""
        return super().draw_noise(num_samples, generator) | self.replay.seeds(num_samples, generator)

    def as_prior(self) -> Prior:
        """The prior that this fit was given: earlier data come back as replay, not as prior."""
        return self.problem.prior

    # ---- loss

    def loss_terms(self, batch: Batch, noise: Noise) -> tuple[Tensor, Tensor]:
        """Expected negative log likelihood of all data, earlier ones replayed; KL(q || prior); in nats."""
        weights, divergence = self.draw(self.posterior(), noise, self.prior)
        model = (self.network, self.likelihood)
        nll = self.replay.likelihood_term(*model, weights, batch, noise.get("replay"))
        return nll, divergence
