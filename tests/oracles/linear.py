"""Bayesian linear regression in closed form, and variational optimisation with exact expectations."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bench.contract import Batch, Method
from bench.laws.linear import MEAN, ROWS, SIGMA, STD, Truth, network

__all__ = ["MEAN", "ROWS", "SIGMA", "STD", "Truth", "exact_noise", "flat", "network", "optimise"]


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
