"""Bayesian linear regression in closed form."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import scipy.stats
import torch
from torch import nn
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
