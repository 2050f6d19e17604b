"""Log evidences: of linear regression in closed form, of the tanh network up to a mean over inner weights.

y = sum_h b_h tanh(a_h x) + N(0, 1) is linear in b. Given a, the evidence is that of Bayesian linear
regression on the features tanh(a_h x), so that only a is left: p(D) = E p(D given a) over the prior of a, a
plain mean.

A draw of a takes the sums of products of its features over all n inputs. Features on [-1, 1] are polynomials
up to rounding (their nearest poles lie at i pi / (2 a)), so that the sums over the inputs are taken once, for
products of the Lagrange polynomials of Chebyshev nodes, and n plays no part in the cost of a draw.

Shapes: S draws, H hidden units, M nodes, n observations.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

_ACCURACY = 1e-13
_BLOCK = 1_000
"""Draws whose features are held at once."""


class LogEvidence(NamedTuple):
    """A log evidence.

    Attributes:
        value: Of it, in nats.
        standard_error: Monte Carlo error, in nats; 0 of a closed form.
    """

    value: float
    standard_error: float


def of_linear(inputs: Tensor, targets: Tensor, mean: float, variance: float) -> LogEvidence:
    """Log p(targets given inputs) of linear regression, y ~ N(X 1 mean, I + variance X X^T).

    Args:
        inputs: X, `[n, d]`.
        targets: `[n]`, with noise N(0, 1).
        mean: Of the prior of every weight.
        variance: Of it, above 0.
    """
    x = inputs.double()
    residual = targets.double() - mean * x.sum(1)
    # By Woodbury and the determinant lemma, d x d in place of n x n.
    precision = torch.eye(x.shape[1], dtype=torch.float64) / variance + x.T @ x
    explained = x.T @ residual
    square = residual @ residual - explained @ torch.linalg.solve(precision, explained)
    log_det = torch.linalg.slogdet(precision).logabsdet + x.shape[1] * math.log(variance)
    return LogEvidence(float(-0.5 * (square + log_det + len(x) * math.log(2 * math.pi))), 0.0)


def of_tanh(
    inputs: Tensor,
    targets: Tensor,
    hidden: int,
    mean: float,
    variance: float,
    *,
    generator: torch.Generator,
    draws: int = 10_000,
) -> LogEvidence:
    """Log p(targets given inputs) of the tanh network, from draws of its inner weights from their prior.

    The error is that of the delta method. It is too low where the draws miss what carries the evidence.

    Args:
        inputs: `[n]`, between -1 and 1.
        targets: `[n]`, with noise N(0, 1).
        hidden: H, at least 1.
        mean: Of the prior of every weight.
        variance: Of it, above 0.
        generator: Of the draws.
        draws: S, at least 2.
    """
    inner = mean + variance**0.5 * torch.randn(draws, hidden, generator=generator, dtype=torch.float64)
    logs = given_inner(inner, inputs.double(), targets.double(), mean, variance)
    weights = (logs - logs.max()).exp()
    effective = weights.sum() ** 2 / weights.square().sum()  # between 1 and S
    error = (1 / effective - 1 / draws).clamp(min=0).sqrt()
    return LogEvidence(float(logs.max() + weights.mean().log()), float(error))


def given_inner(inner: Tensor, inputs: Tensor, targets: Tensor, mean: float, variance: float) -> Tensor:
    """Log p(targets given inputs and inner weights), `[S]`, in nats, in double precision.

    Args:
        inner: a, `[S, H]`.
        inputs: `[n]`, between -1 and 1.
        targets: `[n]`.
        mean: Of the prior of the outer weights.
        variance: Of it.
    """
    nodes = _nodes(float(inner.abs().max()))
    left, right = _lagrange(nodes, inputs).chunk(2, 1)
    basis, nodes = left - right.flip(1), nodes[: len(nodes) // 2]  # tanh is odd: half of the nodes are enough
    products, with_targets = basis.T @ basis, basis.T @ targets
    hidden, identity = inner.shape[1], torch.eye(inner.shape[1], dtype=torch.float64)
    constant = len(targets) * math.log(2 * math.pi) + hidden * math.log(variance)
    found = []
    for block in inner.split(_BLOCK):
        features = torch.tanh(block[..., None] * nodes)  # [S, H, M]
        gram = features @ products @ features.mT
        explained = features @ with_targets - mean * gram.sum(-1)
        square = targets @ targets - mean * (features @ with_targets + explained).sum(-1)
        factor = torch.linalg.cholesky(gram + identity / variance)
        half = torch.linalg.solve_triangular(factor, explained[..., None], upper=False)[..., 0]
        log_det = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        found.append(-0.5 * (constant + log_det + square - half.square().sum(-1)))
    return torch.cat(found)


def _nodes(steepest: float) -> Tensor:
    """Chebyshev nodes `[M]`, M even, which fix tanh(a x) as a polynomial up to rounding for |a| <= steepest.

    Interpolation converges as rho^-M, rho the sum of the half axes of the ellipse through the nearest poles.
    """
    pole = math.pi / (2 * max(steepest, 0.1))
    size = 2 * math.ceil(-math.log(_ACCURACY) / (2 * math.asinh(pole)))
    return torch.cos((torch.arange(size, dtype=torch.float64) + 0.5) * math.pi / size)


def _lagrange(nodes: Tensor, inputs: Tensor) -> Tensor:
    """Values of the Lagrange polynomials of Chebyshev nodes `[n, M]`, by sums of Chebyshev polynomials."""
    degrees = torch.arange(len(nodes), dtype=torch.float64)
    at_nodes, at_inputs = (torch.cos(torch.acos(t)[:, None] * degrees) for t in (nodes, inputs))
    at_nodes[:, 0] /= 2
    return at_inputs @ at_nodes.T * (2 / len(nodes))
