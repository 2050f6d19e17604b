"""Bayesian linear regression in closed form."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import scipy.stats
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from bench import likelihoods, priors
from bench.contract import Prior, Problem

SIGMA, MEAN, STD, ROWS = 0.6, 0.3, 0.9, 15


def network(dropout: float = 0.0) -> nn.Linear:
    """Three inputs, one output: a weight tensor of 3 and a bias of 1."""
    return nn.Linear(3, 1)


class Truth:
    """A linear problem with correlated inputs, its exact posterior and evidence.

    Args:
        prior: In place of N(MEAN, STD^2) per weight; the exact posterior is still under the latter.
        rows: Examples.
        sigma: Standard deviation of the noise.
        mean: Of the prior, in place of MEAN.

    Attributes:
        problem: The problem.
        precision: Of the exact posterior over three weights and the bias, `[4, 4]`.
        mean: Of the exact posterior, `[4]`.
    """

    def __init__(
        self, prior: Prior | None = None, rows: int = ROWS, sigma: float = SIGMA, mean: float = MEAN
    ) -> None:
        g = torch.Generator().manual_seed(0)
        inputs = torch.randn(rows, 3, generator=g) @ torch.tensor([[1.0, 0.6, 0], [0, 0.7, 0.3], [0, 0, 1.5]])
        inputs = inputs + 0.5
        targets = (
            inputs @ torch.tensor([[0.8], [-0.5], [1.2]]) + 0.4 + sigma * torch.randn(rows, 1, generator=g)
        )
        factory: Any = network  # of one width
        self.problem = Problem(
            factory,
            likelihoods.Gaussian(sigma),
            prior or priors.normal(mean, STD),
            TensorDataset(inputs, targets),
            None,
            rows,
        )
        self.design = torch.cat([inputs, torch.ones(rows, 1)], 1).double()  # [n, 4]
        self.targets = targets[:, 0].double()
        self.precision = self.design.T @ self.design / sigma**2 + torch.eye(4, dtype=torch.float64) / STD**2
        self.mean = torch.linalg.solve(
            self.precision, self.design.T @ self.targets / sigma**2 + mean / STD**2
        )

    def expected_nll(self, variance: np.ndarray) -> float:
        """E[-log p(y | w)] for uncorrelated weights around the posterior mean, in nats."""
        x = self.design.numpy()
        residuals = self.targets.numpy() - x @ self.mean.numpy()
        squares = (residuals**2).sum() + (x**2 * variance).sum()
        return squares / (2 * SIGMA**2) + ROWS * 0.5 * math.log(2 * math.pi * SIGMA**2)

    def prior_cross_entropy(self, variance: np.ndarray) -> float:
        """E[-log prior(w)] for weights around the posterior mean, in nats."""
        squares = (self.mean.numpy() - MEAN) ** 2 + variance
        return (squares / (2 * STD**2) + 0.5 * math.log(2 * math.pi * STD**2)).sum()

    def log_evidence(self) -> float:
        """Log density of the targets with the weights integrated out, in nats."""
        x = self.design.numpy()
        covariance = SIGMA**2 * np.eye(ROWS) + STD**2 * x @ x.T
        return scipy.stats.multivariate_normal.logpdf(self.targets.numpy(), MEAN * x.sum(1), covariance)


def _pairs(rows: int, number: int, correlated: bool = True) -> tuple[Tensor, Tensor, torch.Generator]:
    """Inputs `[rows, 2]` in [0, 1], true weights `[number, 2]`, and the generator that goes on from there."""
    g = torch.Generator().manual_seed(1)
    inputs = torch.rand(rows, 2, generator=g)
    if not correlated:  # one of the two is 0 in every example
        inputs = inputs * nn.functional.one_hot(torch.arange(rows) % 2)
    return inputs, torch.randn(number, 2, generator=g), g


class Replicas:
    """Independent regressions of two weights, side by side as the outputs of one linear layer.

    All have the same sixteen inputs and noise N(0, 1), so that the precision of every replica's posterior is
    the same; targets and means are its own. Without a bias the posterior of the weights `[number, 2]` is a
    matrix normal. The prior N(1.5, 1) is half of what is known of the direction that the data show least, and
    disagrees with them.

    Args:
        number: R, how many.
        correlated: Whether a replica's two weights are, by 0.68; else all weights are independent.

    Attributes:
        problem: The problem.
        inputs: `[16, 2]`, in float64.
        mean: Of every replica's posterior, `[R, 2]`.
        precision: Of all of them, `[2, 2]`.
    """

    MEAN, STD, ROWS = 1.5, 1.0, 16

    def __init__(self, number: int = 32, correlated: bool = True) -> None:
        inputs, weights, g = _pairs(self.ROWS, number, correlated)
        targets = inputs @ weights.T + torch.randn(self.ROWS, number, generator=g)
        self.problem = Problem(
            lambda dropout=0.0, width=1.0: nn.Linear(2, number, bias=False),
            likelihoods.Gaussian(1.0, number),
            priors.normal(self.MEAN, self.STD),
            TensorDataset(inputs, targets),
            None,
            self.ROWS,
        )
        self.inputs = x = inputs.double()
        self.precision = x.T @ x + torch.eye(2).double() / self.STD**2
        self.mean = torch.linalg.solve(self.precision, x.T @ targets.double() + self.MEAN / self.STD**2).T


class LogisticReplicas:
    """Independent logistic regressions of two weights, side by side as the inputs of one logit.

    An example is of one replica: its inputs are 0 but for that replica's two, so that the likelihood is a
    product over replicas. Each has sixteen examples, and the prior is N(0, 4).

    Args:
        number: R, how many.

    Attributes:
        problem: The problem, of `16 R` examples.
        inputs: `[16 R, 2 R]`, in float64.
    """

    STD, ROWS = 2.0, 16

    def __init__(self, number: int = 32) -> None:
        self.pairs, weights, g = _pairs(self.ROWS, number)
        self.pairs = self.pairs.double()
        odds = torch.einsum("nd,rd->rn", self.pairs, 2 * weights.double())
        self.signs = torch.where(torch.rand(odds.shape, generator=g) < odds.sigmoid(), 1.0, -1.0).double()
        self.inputs = torch.block_diag(*[self.pairs] * number)
        self.problem = Problem(
            lambda dropout=0.0, width=1.0: nn.Linear(2 * number, 1, bias=False),
            likelihoods.Bernoulli(),
            priors.normal(0.0, self.STD),
            TensorDataset(self.inputs.float(), (self.signs.flatten() > 0).float()),
            None,
            number * self.ROWS,
        )

    def mode(self) -> tuple[Tensor, Tensor]:
        """Every replica's mode `[R, 2]`, by Newton's method, and its energy's Hessian there, `[R, 2, 2]`."""
        mode = torch.zeros(len(self.signs), 2).double()
        for _ in range(20):
            p = (mode @ self.pairs.T * self.signs).sigmoid()  # [R, N]
            slope = mode / self.STD**2 - ((1 - p) * self.signs) @ self.pairs
            hessian = torch.einsum("rn,na,nb->rab", p * (1 - p), self.pairs, self.pairs)
            hessian = hessian + torch.eye(2).double() / self.STD**2
            mode = mode - torch.linalg.solve(hessian, slope)
        return mode, hessian

    def mean_field(self) -> tuple[Tensor, Tensor]:
        """Means and standard deviations, each `[R, 2]`, of the independent normals of least KL.

        An expected log likelihood is an integral over one logit, which is normal: by Gauss and Hermite.
        """
        points, shares = (torch.from_numpy(a) for a in np.polynomial.hermite_e.hermegauss(40))
        mean, log_std = (torch.zeros(len(self.signs), 2).double().requires_grad_() for _ in range(2))
        kind: Any = {"max_iter": 500, "line_search_fn": "strong_wolfe"}
        optimizer = torch.optim.LBFGS([mean, log_std], tolerance_grad=1e-9, tolerance_change=1e-13, **kind)

        def closure() -> Tensor:
            optimizer.zero_grad()
            spread = ((2 * log_std).exp() @ self.pairs.square().T).sqrt()
            logits = (mean @ self.pairs.T * self.signs)[..., None] + spread[..., None] * points
            nll = (nn.functional.softplus(-logits) @ shares).sum() / shares.sum()
            loss = nll + ((mean.square() + (2 * log_std).exp()) / (2 * self.STD**2) - log_std).sum()
            loss.backward()
            return loss

        optimizer.step(closure)  # type: ignore[no-untyped-call]
        return mean.detach(), log_std.detach().exp()
