"""Coresets: the few examples of a data set that are kept.

Source: Nguyen et al. 2018, section 2.2; k-center by the greedy algorithm of Gonzalez 1985.
Shapes: N points of D coordinates.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.errors import UsageError

_CHUNK = 2**18
"""Coordinates that are compared at once: 2 MiB in double precision."""


def k_center(points: Tensor | np.ndarray, size: int) -> Tensor:
    """Points far from each other: the first, then always the one farthest (L2) from its nearest chosen one.

    Distances are in double precision; of points equally far the one of the lowest index is chosen, and no
    point twice. Time N D size; beside the points and N distances the memory is a constant.

    Args:
        points: `[N, D]`, finite.
        size: Number of points to choose, 1 to N.

    Returns:
        Indices `[size]` in the order of choice, int64.

    Raises:
        UsageError: If the points have another shape or are not finite, or there are not so many.
    """
    points, size = _checked(points, size)
    chosen = torch.zeros(size, dtype=torch.long)
    distances = torch.full((len(points),), torch.inf, dtype=torch.float64)
    for i in range(size):
        if i > 0:
            chosen[i] = distances.argmax()
        centre = points[chosen[i]].double()
        rows = max(1, _CHUNK // max(1, points.shape[1]))
        for piece, nearest in zip(points.split(rows), distances.split(rows), strict=True):
            torch.minimum(nearest, (piece.double() - centre).square_().sum(1), out=nearest)
        distances[chosen[: i + 1]] = -1  # a copy of a chosen point has distance 0 and may still be chosen
    return chosen


def random(points: Tensor | np.ndarray, size: int, generator: torch.Generator) -> Tensor:
    """Points drawn without replacement.

    Args:
        points: `[N, D]`.
        size: Number of points to choose, 1 to N.
        generator: Source of the draw.

    Returns:
        Indices `[size]`, int64.

    Raises:
        UsageError: As `k_center`.
    """
    points, size = _checked(points, size)
    return torch.randperm(len(points), generator=generator)[:size]


def _checked(points: Any, size: Any) -> tuple[Tensor, int]:
    points = torch.as_tensor(points).detach().cpu()
    if points.ndim != 2:
        raise UsageError(f"coreset: points must be [N, D], not of shape {list(points.shape)}")
    if points.is_complex() or not points.isfinite().all():
        raise UsageError("coreset: points must be finite real numbers")
    try:
        number = operator.index(size)
    except TypeError:
        number = 0
    if isinstance(size, bool) or not 1 <= number <= len(points):
        raise UsageError(f"coreset: size must be a whole number from 1 to {len(points)}, not {size}")
    return points, number
