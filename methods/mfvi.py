"""Mean-field variational inference: an independent normal for every weight.

Approximates the posterior by the product of normals that maximises the evidence lower bound
E_q[log p(D | w)] - KL(q || prior), with sigma = softplus(rho).

Source: Farquhar 2022, thesis "Understanding Approximation" (docs/sources.md), chapters 3 and 4 (eqs 4.3 to
4.9); Blundell et al. 2015; as sequential method Variational Continual Learning, Nguyen et al. 2018.
Estimators: Kingma et al. 2015 (local), Wen et al. 2018 (flipout).
Deviations: the KL is the exact one (eq. 4.9 lacks a constant). The tweaks that the thesis mentions are
settings, all off by default; with any of them the loss is no longer a bound on the evidence. Truncation is of
the noise in the likelihood term alone (the bias is intended), by a monotone map in place of rejection.
Cost: S forward and backward passes a step and a normal draw per weight and sample; two numbers per weight.
Local draws per unit in place of weight and has two products per linear layer; so has flipout.
Valid for: every differentiable network and likelihood; local and flipout under normal priors, for networks of
linear layers, flipout also of convolutions, each used once. Prediction draws weights whatever the estimator.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from bench import optimizers, priors
from bench.contract import Batch, Noise, Prior, Problem, WeightDistribution
from bench.divergence import weight_divergence
from bench.energy import likelihood_term
from bench.errors import UsageError
from bench.families import estimators
from bench.families.variational import MeanField
from bench.priors import is_normal, normal_tensor
from bench.settings import Count, Factor, NonNegative, Positive, Whole, settings
from bench.weights import forward, reparametrise

NAMES: dict[str, dict[str, object]] = {"mfvi": {}, "mfvi_ensemble": {"members": 3}}
SEARCH = {
    "learning_rate": (1e-4, 1e-1, "log"),
    "initial_rho": (-9.0, -1.0, "linear"),
    "train_samples": [1, 2, 4, 8],
}


@settings
class Settings:
    """Settings of mean-field variational inference."""

    learning_rate: Positive = 1e-3
    """Step size of the optimiser, above 0."""
    optimizer: optimizers.Name = "adam"
    """adam, amsgrad, or sgd with Nesterov momentum 0.9."""
    rate_decay: Factor = 1.0
    """Factor of the step size after every epoch, above 0, at most 1."""
    train_samples: Count = 1
    """Weight samples per training step, at least 1."""
    initial_rho: float = -3.0
    """Start of rho for every weight; sigma = softplus(rho), so -3 is a standard deviation of 0.049."""
    pretrain_epochs: Whole = 0
    """Tweak: epochs of the means by NLL alone, before a run's first fit, on top of its budget; 0 or more."""
    kl_weight: NonNegative = 1.0
    """Tweak: constant factor of the KL, 0 or more; 0 trains the likelihood only."""
    kl_annealing_epochs: Whole = 0
    """Tweak: epochs, 0 or more, over which the factor of the KL grows linearly from 0 to kl_weight."""
    prior: Literal["task", "tight", "scale_mixture"] = "task"
    """Tweak: the first prior: the task's, N(0, 1/D) per tensor, or a scale mixture of two normals."""
    prior_mean_follows: bool = False
    """Tweak: the prior's mean is the current posterior mean, so that the KL acts on the variances alone."""
    truncation: Positive | None = None
    """Tweak: largest absolute value, above 0, of the noise in the likelihood term; none if not given."""
    estimator: estimators.Name = "pathwise"
    """Noise in training: pathwise draws weights for the whole batch; local and flipout draw per example."""


class MFVI(MeanField):
    """Independent normals over all weights."""

    settings_class = Settings
    approximates = "the posterior by independent normals, one per weight"
    declares = "mean-field optimum of KL", {"learning_rate": 0.05, "rate_decay": 0.995}
    provides = frozenset(
        {
            *("weight_samples", "density", "moments", "sequential", "weighted", "loss_terms"),
            "scale_settable",
        }
    )
    stacks = True
    settings: Settings

    def __init__(self, problem: Problem, settings: Settings, start: MFVI | None = None) -> None:
        super().__init__(problem, settings, start)
        self.is_first = start is None
        self.extra_epochs = settings.pretrain_epochs if self.is_first else 0
        self.stacks = settings.estimator == "pathwise"  # the seeds of the others do not stack
        if not self.stacks:
            self._check_estimator(settings)
        if start is not None:
            self.load_state_dict(start.state_dict())

    def _check_estimator(self, settings: Settings) -> None:
        inputs = self.problem.train[0][0][None]
        reason = estimators.unsuited(self.network, inputs, settings.estimator)
        prior = self.make_prior(dict(self.network.named_parameters()))
        if not all(is_normal(p) for p in prior.values()):
            reason = "needs a prior of independent normals, whose KL takes no drawn weights"
        if settings.truncation is not None:
            reason = "draws no weights that could be truncated; leave out --method.truncation"
        if reason is not None:
            raise UsageError(f"mfvi: estimator {settings.estimator} {reason}")

    @property
    def pretraining(self) -> bool:
        """Whether the present epoch trains the means by NLL alone."""
        return self.epoch < self.extra_epochs

    @property
    def prior_weight(self) -> float:
        """Factor of the KL in the present epoch."""
        if self.pretraining:
            return 0.0
        epoch, ramp = self.epoch - self.extra_epochs, self.settings.kl_annealing_epochs
        return self.settings.kl_weight * (epoch / ramp if epoch < ramp else 1.0)

    def make_prior(self, parameters: Mapping[str, Tensor]) -> WeightDistribution:
        """The task's prior, unless this is the run's first fit and the settings name another."""
        if self.is_first and self.settings.prior == "tight":
            return priors.tight_normal()(parameters)
        if self.is_first and self.settings.prior == "scale_mixture":
            return priors.scale_mixture()(parameters)
        return super().make_prior(parameters)

    # ---- the distribution

    def draw_noise(self, num_samples: int, generator: torch.Generator) -> Noise:
        """Standard normal noise `[S, *shape]` per tensor, or of other estimators one seed per sample, `[S]`.

        None while the means are pretrained.
        """
        if self.pretraining:
            return {}
        if self.settings.estimator == "pathwise":
            return super().draw_noise(num_samples, generator)
        seeds = torch.randint(2**62, (num_samples,), generator=generator, device=generator.device)
        return {"seeds": seeds}

    def as_prior(self) -> Prior:
        """The normals as they are now."""
        return priors.frozen(
            {name: (q.mean, q.stddev) for name, q in self.posterior().items()}, normal_tensor
        )

    # ---- loss

    def loss_terms(self, batch: Batch, noise: Noise) -> tuple[Tensor, Tensor]:
        """Expected negative log likelihood and KL(q || prior), in nats (eq. 4.4)."""
        posterior, prior = self.posterior(), self.prior
        if self.settings.prior_mean_follows:
            prior = {
                name: normal_tensor(posterior[name].mean.detach(), p.stddev) for name, p in prior.items()
            }
        if noise and self.settings.estimator == "pathwise" and self.settings.truncation is None:
            weights, divergence = self.draw(posterior, noise, prior)
            outputs = forward(self.network, weights, batch.inputs)
            return likelihood_term(self.likelihood, outputs, batch, self.problem.num_train), divergence
        outputs, weights = self._outputs(posterior, batch.inputs, noise)
        nll = likelihood_term(self.likelihood, outputs, batch, self.problem.num_train)
        if not noise:  # while the means are pretrained
            return nll, nll.new_zeros(())
        return nll, weight_divergence(posterior, prior, weights)

    def _outputs(
        self, posterior: Mapping[str, Any], inputs: Tensor, noise: Noise
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Outputs `[S, B, ...]`, and the weights drawn; in their place the means where none are."""
        drawn = bool(noise) and self.settings.estimator == "pathwise"
        weights = {
            name: reparametrise(q.mean, q.base_dist.scale, noise[name]) if drawn else q.mean[None]
            for name, q in posterior.items()
        }
        if noise and not drawn:
            scales = {name: q.base_dist.scale for name, q in posterior.items()}
            args = (self.network, scales, inputs, noise["seeds"], self.settings.estimator)
            return estimators.outputs(*args), weights
        bound = self.settings.truncation
        if not noise or bound is None:
            return forward(self.network, weights, inputs), weights
        bounded = {
            name: reparametrise(q.mean, q.base_dist.scale, estimators.truncated(noise[name], bound))
            for name, q in posterior.items()
        }
        return forward(self.network, bounded, inputs), weights
