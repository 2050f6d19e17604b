"""Monte Carlo dropout: random masks on the units, in training and in prediction.

Approximates the posterior by the weights of one network times Bernoulli masks over its units.

Source: Gal and Ghahramani 2016; Farquhar 2022, thesis "Understanding Approximation" (docs/sources.md),
chapters 2, 4 and 5, in the consistent form: in prediction one mask per sample is shared by all inputs, so
that a sample is one function and information between inputs (BALD) means something.
`masks = "per_input"` is plain dropout: in prediction, too, every input has its own masks. The prediction at
an input has the same distribution, but a sample is then no function, and BALD, which compares inputs, means
nothing.
Deviations: none. In training every example has its own masks. As a sequential method it keeps the prior it
was given and goes on from its weights, which is plain fine-tuning: its draws have no density to hand on.
Cost: as maximum a posteriori, times the samples; one number per weight.
Valid for: networks that hold `bench.networks.Dropout`; in sequence as a baseline only.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from bench import optimizers
from bench.contract import Batch, Method, Noise, Prediction, Prior, Problem
from bench.divergence import log_prob
from bench.energy import likelihood_term
from bench.errors import UsageError
from bench.networks import Dropout, dropout_masks
from bench.settings import Count, Positive, Share, settings
from bench.weights import blocks, channels_last

NAMES: dict[str, dict[str, object]] = {"mc_dropout": {}}
SEARCH = {"learning_rate": (1e-4, 1e-1, "log"), "rate": (0.01, 0.9, "linear")}


@settings
class Settings:
    """Settings of Monte Carlo dropout."""

    learning_rate: Positive = 1e-3
    """Step size of the optimiser, above 0."""
    optimizer: optimizers.Name = "adam"
    """adam, amsgrad, or sgd with Nesterov momentum 0.9."""
    train_samples: Count = 1
    """Masks per example and training step, at least 1."""
    rate: Share = 0.5
    """Probability that a unit is dropped, a fraction from 0 to below 1."""
    masks: Literal["shared", "per_input"] = "shared"
    """In prediction: shared, one per sample for all inputs (consistent dropout), or per_input (plain)."""


class MCDropout(Method):
    """One network whose units are dropped at random."""

    settings_class = Settings
    approximates = "the posterior by one network times Bernoulli masks over its units"
    declares = "none"
    provides = frozenset({"sequential", "weighted", "loss_terms"})
    settings: Settings

    def __init__(self, problem: Problem, settings: Settings, start: MCDropout | None = None) -> None:
        super().__init__(problem, settings, start)
        self.network = problem.network(dropout=settings.rate)
        if settings.rate > 0 and not any(isinstance(m, Dropout) for m in self.network.modules()):
            raise UsageError("mc_dropout needs a network with bench.networks.Dropout; this task's has none")
        if start is not None:
            self.load_state_dict(start.state_dict())

    def draw_noise(self, num_samples: int, generator: torch.Generator) -> Noise:
        """One seed per sample, `[S]`, from which its masks are drawn."""
        seeds = torch.randint(2**62, (num_samples,), generator=generator, device=generator.device)
        return {"seeds": seeds}

    def _outputs(self, inputs: Tensor, seeds: Tensor, shared: bool) -> Tensor:
        if inputs.ndim == 4:
            inputs = channels_last(inputs)
        outputs = []
        for seed in seeds.tolist():
            generator = torch.Generator(inputs.device).manual_seed(seed)
            with dropout_masks(self.network, generator, shared):
                outputs.append(self.network(inputs))
        return torch.stack(outputs)

    def loss_terms(self, batch: Batch, noise: Noise) -> tuple[Tensor, Tensor]:
        """Negative log likelihood under fresh masks per example, and negative log prior, in nats."""
        outputs = self._outputs(batch.inputs, noise["seeds"], shared=False)
        weights = {name: p[None] for name, p in self.network.named_parameters()}
        prior_term = -log_prob(self.prior, weights).sum()
        return likelihood_term(self.likelihood, outputs, batch, self.problem.num_train), prior_term

    def predict(self, inputs: Tensor, num_samples: int, generator: torch.Generator) -> Prediction:
        """Predictions under `num_samples` masks, shared by all inputs unless `masks` is per_input."""
        seeds = self.draw_noise(num_samples, generator)["seeds"]
        shared = self.settings.masks == "shared"
        outputs = []
        with torch.no_grad():
            for number, block in enumerate(blocks(inputs)):
                outputs.append(self._outputs(block, seeds if shared else seeds + number, shared))
        return self.likelihood.predict(torch.cat(outputs, 1))

    def as_prior(self) -> Prior:
        """The prior that this fit was given: the next fit goes on from these weights."""
        return self.problem.prior
