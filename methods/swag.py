"""SWAG: a normal with the mean and covariance of the last iterates of stochastic gradient descent.

Approximates the posterior by N(mean, c (diag(variance) + D^T D / (K - 1))) over all weights, moments taken
over one iterate per epoch from the start of averaging on; D holds the deviations of the last K of them.
`swag_diagonal` leaves D out. Both names train alike: with the same seed their moments are the same.

Source: Farquhar 2022, thesis "Understanding Approximation" (docs/sources.md), section 3.3; Maddox et al.
2019, algorithm 1 and its public code.
Deviations: the prior takes the place of the published weight decay of 3e-4, so that the iterates circle a
mode of the posterior. The published rates, 0.1 and then 0.05, are for networks with batch normalisation on
CIFAR; the defaults here are lower. The divisor stays K - 1 while fewer than K iterates are there, as
published, which shrinks that part. A budget too short for two iterates after the start begins earlier, since
one iterate has no variance. The sum of squared deviations is updated in place of a mean of squares: the same
variance without its cancellation. No network here has batch-norm statistics to recompute.
Cost: as maximum a posteriori; K + 2 stored numbers per weight on top of it (K = 20: 88 bytes), also under
`swag_diagonal`, whose draws read two of them.
Valid for: every differentiable network and likelihood. Parameters of a likelihood keep their last value.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from bench.contract import Batch, Budget, Method, Noise, Problem
from bench.divergence import log_prob
from bench.energy import likelihood_term
from bench.settings import Positive, Share, settings
from bench.weights import forward, ravel, unravel

NAMES: dict[str, dict[str, object]] = {
    "swag": {"covariance": "low_rank"},
    "swag_diagonal": {"covariance": "diagonal"},
}
SEARCH = {
    "learning_rate": (1e-4, 1e-1, "log"),
    "swa_learning_rate": (1e-4, 1.0, "log"),
    "scale": (1e-2, 1e3, "log"),
}

_SMALLEST_VARIANCE = 1e-30


@settings
class Settings:
    """Settings of SWAG."""

    learning_rate: Positive = 0.01
    """Step size of SGD with momentum 0.9 at first, above 0; published 0.1."""
    swa_learning_rate: Positive = 0.005
    """Step size while iterates are collected, above 0; published 0.05."""
    start: Share = 161 / 300
    """Share of the epochs before the first one that is collected, from 0 to below 1."""
    rank: Annotated[int, Field(ge=2)] = 20
    """Iterates whose deviations are kept, at least 2."""
    covariance: Literal["low_rank", "diagonal"] = "low_rank"
    """Diagonal plus low rank, or the diagonal alone."""
    scale: Positive | None = None
    """Factor of the covariance, above 0; None is the published one: 0.5, or 1 for the diagonal alone."""


class Moments(nn.Module):
    """Running moments of a trajectory, in buffers: rank + 2 numbers per weight.

    Args:
        rank: How many of the last deviations are kept, at least 2.
        size: Length of the vectors; None takes it, and their precision, from the first one.
    """

    count: Tensor
    mean: Tensor
    squares: Tensor
    rows: Tensor

    def __init__(self, rank: int, size: int | None = None) -> None:
        super().__init__()
        if rank < 2:
            raise ValueError(f"the rank must be at least 2, got {rank}")
        self.rank = rank
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self._allocate(torch.zeros(size or 0))

    def _allocate(self, like: Tensor) -> None:
        self.register_buffer("mean", torch.zeros_like(like))
        self.register_buffer("squares", torch.zeros_like(like))
        self.register_buffer("rows", like.new_zeros(self.rank, len(like)))

    @torch.no_grad()
    def update(self, vector: Tensor) -> None:
        """Adds a vector `[d]`; its deviation is from the mean that already counts it."""
        if not len(self.mean):
            self._allocate(vector)
        self.count += 1
        before = vector - self.mean
        self.mean += before / self.count
        deviation = vector - self.mean
        self.squares += before * deviation
        self.rows.copy_(torch.cat([self.rows[1:], deviation[None]]))

    @property
    def variance(self) -> Tensor:
        """Variance of every entry `[d]`: mean of squares less square of the mean, at least 1e-30."""
        return (self.squares / self.count).clamp(min=_SMALLEST_VARIANCE)

    @property
    def deviations(self) -> Tensor:
        """The last deviations, oldest first, `[<=rank, d]`."""
        return self.rows[self.rank - min(int(self.count), self.rank) :]

    def covariance(self, scale: float, low_rank: bool) -> Tensor:
        """Covariance of the draws, `[d, d]`."""
        covariance = self.variance.diag()
        if low_rank:
            covariance = covariance + self.deviations.T @ self.deviations / (self.rank - 1)
        return scale * covariance

    def marginal_variance(self, scale: float, low_rank: bool) -> Tensor:
        """The diagonal of `covariance`, `[d]`."""
        variance = self.variance
        if low_rank:
            variance = variance + self.deviations.square().sum(0) / (self.rank - 1)
        return scale * variance

    def draw(self, num_samples: int, generator: torch.Generator, scale: float, low_rank: bool) -> Tensor:
        """Vectors from the normal, `[S, d]`; the s-th does not depend on how many follow it."""
        rows = self.deviations if low_rank else self.rows[:0]
        size = len(self.mean)
        # One call per sample: a single call for all would fill them in an order that depends on their number.
        empty = self.mean.new_empty(size + len(rows))
        noise = torch.stack([empty.normal_(generator=generator).clone() for _ in range(num_samples)])
        deviation = self.variance.sqrt() * noise[:, :size]
        deviation = deviation + noise[:, size:] @ rows / math.sqrt(self.rank - 1)
        return self.mean + math.sqrt(scale) * deviation


class SWAG(Method):
    """A normal with the moments of the last iterates; before there are any, a point mass at the weights."""

    settings_class = Settings
    approximates = "the posterior by a normal with the moments of the last iterates of SGD"
    declares = "moments of iterates", {"learning_rate": 0.02, "swa_learning_rate": 0.05, "rank": 50}
    provides = frozenset({"weight_samples", "moments", "weighted", "loss_terms"})
    settings: Settings

    def __init__(self, problem: Problem, settings: Settings, start: SWAG | None = None) -> None:
        super().__init__(problem, settings, start)
        self.network = problem.network()  # its parameters are the iterate
        self.iterates = Moments(settings.rank, sum(p.numel() for p in self.network.parameters()))
        self.low_rank = settings.covariance == "low_rank"
        self.scale = settings.scale or (0.5 if self.low_rank else 1.0)
        self.epochs = 1
        if start is not None:  # its moments are of another posterior
            self.network.load_state_dict(start.network.state_dict())
            self.likelihood.load_state_dict(start.likelihood.state_dict())

    # ---- schedule

    def spends(self, budget: Budget) -> Budget:
        """The budget as it is; the schedule goes by its epochs."""
        self.epochs = budget.epochs
        return budget

    @property
    def first_collection(self) -> int:
        """The epoch, from 0, at whose end the first iterate is collected."""
        return max(0, min(round(self.settings.start * self.epochs), self.epochs - 2))

    @property
    def warmup_epochs(self) -> int:
        """Epochs up to the first iterate, which has no variance yet."""
        return self.first_collection + 1

    def rate(self, epoch: int) -> float:
        """Step size in an epoch, from 0: constant to half of the start, linear to 0.9 of it, constant."""
        first, last = self.settings.learning_rate, self.settings.swa_learning_rate
        progress = epoch / self.first_collection if self.first_collection else 1.0
        return first + (last - first) * min(max((progress - 0.5) / 0.4, 0.0), 1.0)

    def configure_optimizers(self) -> Any:
        """SGD with momentum, and its schedule by epochs."""
        optimizer = torch.optim.SGD(self.parameters(), self.settings.learning_rate, momentum=0.9)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda epoch: self.rate(epoch) / self.settings.learning_rate
        )
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def on_last_step(self) -> None:
        """Collects the iterate after an epoch's last step, before its validation and its checkpoint."""
        if self.epoch >= self.first_collection:
            self.iterates.update(ravel(self._weights())[0])

    def diagnostics(self, inputs: Tensor | None = None) -> dict[str, float]:
        """How many iterates the moments are of."""
        return {"collections": float(self.iterates.count)} if inputs is None else {}

    # ---- the distribution

    def _weights(self) -> dict[str, Tensor]:
        return {name: p[None] for name, p in self.network.named_parameters()}

    def sample_weights(self, num_samples: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Draws from the normal, stacked `[S, *shape]`."""
        with torch.no_grad():
            if not self.iterates.count:
                return {name: w.repeat_interleave(num_samples, 0) for name, w in self._weights().items()}
            draws = self.iterates.draw(num_samples, generator, self.scale, self.low_rank)
            return unravel(draws, dict(self.network.named_parameters()))

    def moments(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Mean and variance of every weight."""
        like = dict(self.network.named_parameters())
        if not self.iterates.count:
            return {n: p.detach() for n, p in like.items()}, {n: torch.zeros_like(p) for n, p in like.items()}
        variance = self.iterates.marginal_variance(self.scale, self.low_rank)
        pair = torch.stack([self.iterates.mean, variance])  # [2, d]
        parts = unravel(pair, like)
        return {n: part[0] for n, part in parts.items()}, {n: part[1] for n, part in parts.items()}

    # ---- loss

    def loss_terms(self, batch: Batch, noise: Noise) -> tuple[Tensor, Tensor]:
        """Negative log likelihood and negative log prior of the weights, in nats."""
        weights = self._weights()
        outputs = forward(self.network, weights, batch.inputs)
        prior_term = -log_prob(self.prior, weights).sum()
        return likelihood_term(self.likelihood, outputs, batch, self.problem.num_train), prior_term
