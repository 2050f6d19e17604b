"""Methods built on coupling flows, off their starts and in float64, and their mass on the plane."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from conformance import problems
from torch import nn

from bench.contract import Problem
from bench.families.flow import FlowVI
from bench.methods.nf_gamma import NFGamma
from bench.methods.nf_gaussian import NFGaussian

METHODS = pytest.mark.parametrize("cls", [NFGamma, NFGaussian])
SOURCES: dict[type[FlowVI], dict[str, Any]] = {
    NFGamma: {"shape": 3.0, "k": 1.5, "rate": 2.0},
    NFGaussian: {"mean": 0.4, "variance": 0.3},
}
"""Sources of no published row, so that no two of their numbers are alike."""


def single_weight() -> Problem:
    """A slope alone."""
    return replace(problems.straight_line(), network=lambda **_: nn.Linear(1, 1, bias=False))


def perturb(module: nn.Module, amount: float, seed: int = 0) -> None:
    """Adds normal noise of this standard deviation to every parameter."""
    g = torch.Generator().manual_seed(seed + 100)
    with torch.no_grad():
        for p in module.parameters():
            p += amount * torch.randn(p.shape, generator=g, dtype=p.dtype)


def method_of(
    cls: type[FlowVI],
    problem: Problem | None = None,
    start: FlowVI | None = None,
    amount: float = 0.3,
    **values: Any,
) -> Any:
    """A method in float64 whose flow is off the identity; on the straight line unless told otherwise."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        settings = cls.settings_class(**(SOURCES[cls] | values))
        method = cls(problem or problems.straight_line(), settings, start).double()
        perturb(method.flow, amount)
        return method


def mass(method: FlowVI, points: int = 801) -> float:
    """The integral of the density of two weights, by the trapezoid rule over a box around 20,000 draws."""
    names = [name for name, _ in method.network.named_parameters()]
    draws = method.sample_weights(20_000, torch.Generator().manual_seed(9))
    flat = torch.cat([draws[name].flatten(1) for name in names], 1)
    low, high = flat.min(0).values, flat.max(0).values
    margin = 0.4 * (high - low)
    axes = [
        torch.linspace(a, b, points, dtype=torch.float64)
        for a, b in zip(low - margin, high + margin, strict=True)
    ]
    grid = torch.cartesian_prod(*axes)
    parameters = dict(method.network.named_parameters())
    weights = {name: grid[:, i].reshape(-1, *parameters[name].shape) for i, name in enumerate(names)}
    with torch.no_grad():
        density = method.log_prob(weights).exp()
    cell = (axes[0][1] - axes[0][0]) * (axes[1][1] - axes[1][0])
    return (density.sum() * cell).item()
