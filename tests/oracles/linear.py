"""Bayesian linear regression in closed form, and variational optimisation with exact expectations."""

from __future__ import annotations

import math

import numpy as np
import scipy.stats
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from bench import likelihoods, priors
from bench.contract import Batch, Method, Prior, Problem

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
        self.problem = Problem(
            network,
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


def exact_noise(method: Method, radial: bool = False) -> dict[str, Tensor]:
    """Points of mean exactly 0 and covariance exactly I (radial: I/D per tensor), `[2d, *shape]`.

    Under them the mean of a quadratic function is its expectation, without error.
    """
    shapes = {name: p.shape for name, p in method.network.named_parameters()}
    d = sum(s.numel() for s in shapes.values())
    points = math.sqrt(d) * torch.cat([torch.eye(d), -torch.eye(d)]).double()
    parts = points.split([s.numel() for s in shapes.values()], 1)
    factors = [s.numel() ** -0.5 if radial else 1.0 for s in shapes.values()]
    return {
        name: f * part.reshape(-1, *shape)
        for (name, shape), part, f in zip(shapes.items(), parts, factors, strict=True)
    }


def optimise(method: Method, radial: bool = False) -> Method:
    """The method at the minimum of its exact loss, found by L-BFGS in float64 from where it starts."""
    method = method.double()
    batch = Batch(*(t.double() for t in method.problem.train.tensors))
    noise = exact_noise(method, radial)
    kind = {"max_iter": 500, "line_search_fn": "strong_wolfe"}
    optimizer = torch.optim.LBFGS(
        method.parameters(), tolerance_grad=1e-9, tolerance_change=1e-14, history_size=20, **kind
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = sum(method.loss_terms(batch, noise))
        loss.backward()
        return loss

    optimizer.step(closure)
    return method


def flat(moments: tuple[dict[str, Tensor], dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
    """Means and variances of all weights as two vectors in float64."""
    mean, variance = (torch.cat([t.flatten() for t in part.values()]).double() for part in moments)
    return mean, variance
