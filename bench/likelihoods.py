"""How the outputs of a network explain targets: classes, or numbers with known, learned or varying noise."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench import predictions
from bench.contract import Likelihood


class Categorical(Likelihood):
    """Softmax over the last axis of the outputs `[S, B, C]`; targets `[B]` are class indices."""

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Log probability of the target class, `[S, B]`, in nats."""
        num_samples, batch, classes = outputs.shape
        same = targets.expand(num_samples, batch).reshape(-1)
        flat = functional.cross_entropy(outputs.reshape(-1, classes), same, reduction="none")
        return -flat.view(num_samples, batch)

    def predict(self, outputs: Tensor) -> predictions.Categorical:
        """Class log-probabilities per sample."""
        return predictions.Categorical(outputs.log_softmax(-1))


class MultiHead(Likelihood):
    """Heads of as many classes each: outputs `[S, B, C]`, C classes counted head after head; targets `[B]`.

    An example is explained by the head of its target alone, so that the log likelihood is that of a softmax
    over this head's outputs. A prediction takes all heads for equally probable: the probability of a class is
    its head's own divided by the number of heads, and conditioning on a head gives the head's own back.

    Args:
        heads: Number of heads.
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def _log_softmax(self, outputs: Tensor) -> Tensor:
        return outputs.unflatten(-1, (self.heads, -1)).log_softmax(-1).flatten(-2)

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Log probability of the target class under its own head, `[S, B]`, in nats."""
        index = targets.expand(outputs.shape[:-1])[..., None]
        return self._log_softmax(outputs).gather(-1, index).squeeze(-1)

    def predict(self, outputs: Tensor) -> predictions.Categorical:
        """Class log-probabilities per sample, every head with the same share."""
        return predictions.Categorical(self._log_softmax(outputs) - math.log(self.heads))


class Bernoulli(Likelihood):
    """One logit per example: outputs `[S, B, 1]`, targets `[B]` in {0, 1}."""

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Log probability of the target, `[S, B]`, in nats."""
        log_odds = outputs.squeeze(-1)
        return -functional.softplus(torch.where(targets.bool(), -log_odds, log_odds))

    def predict(self, outputs: Tensor) -> predictions.Bernoulli:
        """Log-odds per sample."""
        return predictions.Bernoulli(outputs.squeeze(-1))


class Gaussian(Likelihood):
    """Outputs `[S, B, K]` are means of normals, independent over K.

    Args:
        sigma: Standard deviation of the observations: a known number; "learned", one per output, a point
            estimate trained along with the weights; or "per_example", where every example brings its own
            and targets are `[B, K, 2]`, value and standard deviation. With "per_example" a prediction is
            that of the noiseless function, of variance 0.
        outputs: K, needed for "learned".
    """

    def __init__(self, sigma: float | Literal["learned", "per_example"], outputs: int = 1) -> None:
        super().__init__()
        self.per_example = sigma == "per_example"
        if sigma == "learned":
            self.log_sigma = nn.Parameter(torch.zeros(outputs))
        else:
            self.register_buffer(
                "log_sigma", torch.tensor(0.0 if sigma == "per_example" else math.log(sigma))
            )

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Log density of the target, summed over K, `[S, B]`, in nats."""
        if self.per_example:
            targets, sigma = targets.unbind(-1)
            log_sigma = sigma.log()
        else:
            log_sigma = self.log_sigma
        outcomes = outputs.shape[-1]
        squares = ((targets - outputs) * (-log_sigma).exp()).square().sum(-1)
        scales = log_sigma.expand(*log_sigma.shape[:-1], outcomes).sum(-1)
        return -0.5 * squares - scales - 0.5 * outcomes * math.log(2 * math.pi)

    def predict(self, outputs: Tensor) -> predictions.Gaussian:
        """Mean and variance per sample."""
        variance = torch.zeros(()) if self.per_example else (2 * self.log_sigma.detach()).exp()
        return predictions.Gaussian(outputs, variance.to(outputs).expand_as(outputs))


class Heteroscedastic(Likelihood):
    """A normal whose noise depends on the input: outputs `[S, B, 2]`, a mean and a raw scale.

    The standard deviation is `LEAST + softplus(raw scale)`, targets are `[B, 1]`. There is nothing to learn
    beside the weights, so that samplers take it too.

    Source: Nix and Weigend 1994, "Estimating the Mean and Variance of the Target Probability Distribution";
    Lakshminarayanan et al. 2017, "Simple and Scalable Predictive Uncertainty Estimation using Deep
    Ensembles" (softplus and a least scale).
    """

    LEAST = 1e-3
    """Smallest standard deviation, in the unit of the targets that are trained on."""

    def _parts(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Means and standard deviations, each `[..., 1]`."""
        mean, raw = outputs.split(1, -1)
        return mean, self.LEAST + functional.softplus(raw)

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Log density of the target, `[S, B]`, in nats."""
        mean, sigma = self._parts(outputs)
        logs = -0.5 * ((targets - mean) / sigma).square() - sigma.log() - 0.5 * math.log(2 * math.pi)
        return logs.squeeze(-1)

    def predict(self, outputs: Tensor) -> predictions.Gaussian:
        """Mean and variance per sample, each `[S, B, 1]`."""
        mean, sigma = self._parts(outputs)
        return predictions.Gaussian(mean, sigma.square())

    def fisher(self, outputs: Tensor) -> Tensor:
        """1 / sigma^2 of the mean and 2 (d sigma / d raw)^2 / sigma^2 of the raw scale, `[B, 2, 2]`."""
        _, sigma = self._parts(outputs)
        slopes = torch.cat([torch.ones_like(sigma), math.sqrt(2) * outputs[..., 1:].sigmoid()], -1)
        return torch.diag_embed((slopes / sigma).square())
