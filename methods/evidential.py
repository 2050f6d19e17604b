"""Evidential deep learning: one network whose outputs are the parameters of a distribution over predictions.

Approximates no posterior: the weights are a point, and the spread of a prediction is an output of the network
as its mean is. It stands here beside methods that do approximate one. For classes the network says a
Dirichlet over their probabilities, for numbers a normal-inverse-gamma over the mean and variance of each.

Source: for classes Sensoy, Kaplan and Kandemir 2018, "Evidential Deep Learning to Quantify Classification
Uncertainty", NeurIPS, sections 3 and 4 (the sum of squares, its equation 5, and the KL that is let in over
ten epochs); for numbers Amini, Schwarting, Soleimany and Rus 2020, "Deep Evidential Regression", NeurIPS,
section 3 (equations 8 to 10).
Target: the smallest published loss of all examples less the log prior of the weights. The loss of a class is
no log likelihood; that of a number is -log of Student's t, and a penalty on evidence for wrong means.
Deviations: evidence is softplus of an output for classes too, where the source mostly takes ReLU, which has
no slope where there is no evidence. Smallest evidence of a mean and smallest beta are 1e-6. The regulariser
is the task's prior. A noise that the task gives or lets learn is not used: the network says its own.
Predictions: draws of the distribution, in which a number is a normal of drawn mean and variance. Their
mixture tends to the Dirichlet's mean and to Student's t. Equal noise serves all inputs.
Cost: as maximum a posteriori; up to four times the outputs.
Valid for: classes, and numbers whose noise is not each example's own. For numbers, and for two classes by one
output, networks must end in a linear layer; capabilities over weights are missing, since that has more
outputs than posed (`bench.contract.OF_WEIGHTS`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributions import Dirichlet, StudentT, kl_divergence
from torch.nn import functional

from bench import likelihoods, optimizers, predictions
from bench.contract import Batch, Method, Prediction, Problem
from bench.divergence import log_prob
from bench.energy import full_nll
from bench.errors import UsageError
from bench.families.heads import with_heads
from bench.settings import NonNegative, Positive, Whole, settings
from bench.weights import blocks, forward

NAMES: dict[str, dict[str, object]] = {"evidential": {}}
SEARCH = {"learning_rate": (1e-4, 1e-2, "log"), "evidence_weight": (1e-3, 1.0, "log")}

_HEADS: dict[type, int] = {
    likelihoods.Categorical: 1,
    likelihoods.Bernoulli: 2,
    likelihoods.Gaussian: 4,
    likelihoods.Heteroscedastic: 2,
}
"""Last layers that give as many outputs as there are parameters: a class has one, a number four."""
_PROPOSALS = 16
"""Of which a gamma draw takes the first that is accepted; none is with probability 1e-20."""
_LEAST = 1e-6


@settings
class Settings:
    """Settings of evidential deep learning."""

    kl_annealing_epochs: Whole = 10
    """Classes: epochs, 0 or more, over which the factor of the KL grows linearly from 0 to 1."""
    evidence_weight: NonNegative = 0.01
    """Numbers: lambda, the factor of the penalty on evidence, 0 or more."""
    learning_rate: Positive = 1e-3
    """Step size of the optimiser, above 0."""
    optimizer: optimizers.Name = "adam"
    """adam, amsgrad, or sgd with Nesterov momentum 0.9."""


class Evidential(Method):
    """A network with an output for every parameter of what it predicts."""

    settings_class = Settings
    approximates = "no posterior: a distribution over predictions whose parameters a network says"
    declares = "none"
    provides = frozenset({"weighted"})
    settings: Settings

    def __init__(self, problem: Problem, settings: Settings, start: Evidential | None = None) -> None:
        super().__init__(problem, settings, start)
        heads = _HEADS.get(type(self.likelihood))
        if heads is None or getattr(self.likelihood, "per_example", False):
            raise UsageError(
                "evidential needs classes of one head, or numbers without a noise of each example"
            )
        self.is_of_classes = isinstance(self.likelihood, likelihoods.Categorical | likelihoods.Bernoulli)
        example = problem.train[0][0]
        make = problem.network
        self.network = make() if heads == 1 else with_heads(make, heads, example, "evidential")
        self.likelihood.requires_grad_(False)
        if start is not None:
            self.load_state_dict(start.state_dict())

    # ---- training

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """The loss per example of a batch."""
        loss_term, prior_term = self.energies(batch)
        scale = 1 / self.problem.num_train
        return {
            "loss": (loss_term + prior_term) * scale,
            "likelihood_term": loss_term.detach() * scale,
            "prior_term": prior_term.detach() * scale,
        }

    @property
    def kl_factor(self) -> float:
        """Factor of the KL in this epoch, from 0 to 1."""
        epochs = self.settings.kl_annealing_epochs
        return min(1.0, self.epoch / epochs) if epochs else 1.0

    def energies(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The published loss of the full training set in place of its NLL, and negative log prior."""
        weights = {name: p[None] for name, p in self.network.named_parameters()}
        outputs = forward(self.network, weights, batch.inputs)[0]
        if self.is_of_classes:
            losses = class_losses(concentrations(outputs), batch.targets.long(), self.kl_factor)
        else:
            losses = number_losses(
                *normal_inverse_gamma(outputs), batch.targets, self.settings.evidence_weight
            )
        return full_nll(-losses, batch, self.problem.num_train), -log_prob(self.prior, weights).sum()

    # ---- prediction

    def predict(self, inputs: Tensor, num_samples: int, generator: torch.Generator) -> Prediction:
        """Predictions under `num_samples` draws of the distribution at every input."""
        weights = {name: p[None] for name, p in self.network.named_parameters()}
        with torch.no_grad():
            outputs = torch.cat([forward(self.network, weights, block)[0] for block in blocks(inputs)])
            kind: dict[str, Any] = {"device": outputs.device, "dtype": outputs.dtype, "generator": generator}
            if self.is_of_classes:
                alpha = concentrations(outputs)
                shares = gamma_draws(alpha, *proposals(num_samples, alpha.shape[1], kind)).log()
                if isinstance(self.likelihood, likelihoods.Bernoulli):
                    shares = shares[..., 1:] - shares[..., :1]  # log odds
                return self.likelihood.predict(shares)
            gamma, nu, alpha, beta = normal_inverse_gamma(outputs)
            variance = beta / gamma_draws(alpha, *proposals(num_samples, alpha.shape[1], kind))
            noise = torch.randn(num_samples, 1, alpha.shape[1], **kind)
            return predictions.Gaussian(gamma + (variance / nu).sqrt() * noise, variance)


# ----------------------------------------------------------------------------------------- what is said


def concentrations(outputs: Tensor) -> Tensor:
    """Parameters of a Dirichlet, 1 + evidence, `[B, C]`, from outputs `[B, C]`."""
    return 1 + functional.softplus(outputs)


def normal_inverse_gamma(outputs: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The published gamma, nu, alpha and beta, each `[B, K]`, from outputs `[B, 4 K]`.

    The variance is inverse gamma of shape alpha, above 1, and scale beta; the mean is normal about gamma with
    the variance over nu.
    """
    gamma, *raw = outputs.unflatten(1, (4, -1)).unbind(1)
    nu, alpha, beta = (functional.softplus(r) for r in raw)
    return gamma, nu + _LEAST, alpha + 1, beta + _LEAST


# ---------------------------------------------------------------------------------------------- losses


def class_losses(alpha: Tensor, targets: Tensor, factor: float) -> Tensor:
    """Expected squared error of the drawn probabilities, and a KL of the wrong evidence to none, `[B]`.

    Args:
        alpha: Parameters of the Dirichlet, `[B, C]`.
        targets: Classes, `[B]`.
        factor: Of the KL.
    """
    truth = functional.one_hot(targets, alpha.shape[1]).to(alpha)
    total = alpha.sum(1, keepdim=True)
    mean = alpha / total
    squares = (truth - mean).square() + mean * (1 - mean) / (total + 1)
    wrong = Dirichlet(truth + (1 - truth) * alpha, validate_args=False)
    none = Dirichlet(torch.ones_like(alpha), validate_args=False)
    return squares.sum(1) + factor * kl_divergence(wrong, none)


def number_losses(
    gamma: Tensor, nu: Tensor, alpha: Tensor, beta: Tensor, targets: Tensor, factor: float
) -> Tensor:
    """-log density of Student's t, and the evidence times the error of the mean, summed over K, `[B]`.

    Args:
        gamma: Mean, `[B, K]`.
        nu: Evidence of the mean.
        alpha: Shape of the variance.
        beta: Scale of the variance.
        targets: Numbers, `[B, K]`.
        factor: Of the second part.
    """
    scale = (beta * (1 + nu) / (nu * alpha)).sqrt()
    density = StudentT(2 * alpha, gamma, scale, validate_args=False).log_prob(targets)
    return (factor * (targets - gamma).abs() * (2 * nu + alpha) - density).sum(1)


# ----------------------------------------------------------------------------------------------- draws


def proposals(num_samples: int, count: int, kind: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Standard normal and uniform numbers, each `[S, P, count]`, that serve every input."""
    shape = num_samples, _PROPOSALS, count
    return torch.randn(shape, **kind), torch.rand(shape, **kind)


def gamma_draws(shape: Tensor, normals: Tensor, uniforms: Tensor) -> Tensor:
    """Draws `[S, B, n]` of gamma variables of scale 1: of every one the first proposal that is accepted.

    Source: Marsaglia and Tsang 2000, "A Simple Method for Generating Gamma Variables".

    Args:
        shape: At least 1, `[B, n]`.
        normals: Standard normal, `[S, P, n]`.
        uniforms: On [0, 1), `[S, P, n]`.
    """
    d = shape - 1 / 3
    c = (9 * d).rsqrt()
    found = d.expand(len(normals), *d.shape)
    is_done = torch.zeros_like(found, dtype=torch.bool)
    for normal, uniform in zip(normals.unbind(1), uniforms.unbind(1), strict=True):
        z = normal[:, None]
        v = (1 + c * z) ** 3
        log_v = v.clamp(min=torch.finfo(v.dtype).tiny).log()
        accepted = (v > 0) & (uniform[:, None].log() < 0.5 * z.square() + d * (1 - v + log_v))
        found = torch.where(accepted & ~is_done, d * v, found)
        is_done = is_done | accepted
    return found
