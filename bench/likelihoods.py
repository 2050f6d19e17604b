"""How the outputs of a network explain targets: categorical, by several heads, Bernoulli, Gaussian."""

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
        flat = functional.cross_entropy(
            outputs.reshape(-1, classes), targets.repeat(num_samples), reduction="none"
        )
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
