"""Estimators of a pool's risk from actively acquired points: plain R~, and the unbiased PURE and LURE.

A pool of N points is labelled one point at a time without replacement; the m-th acquired index was drawn with
probability q_m out of the N - m + 1 that were left. The risk is the mean loss over the whole pool. Points of
an initial random set are acquired points too, with q_m = 1/(N - m + 1). PURE and LURE have the pool's risk as
their mean, for losses of a predictor that was chosen without these points and every proposal, dependent on
all earlier draws or not, that gives each point left a probability above 0.

Source: Farquhar, Gal and Rainforth 2021, On statistical bias in active learning, equations 5 and 7; Farquhar
2022, thesis "Understanding Approximation" (docs/sources.md), section 5.2.

Shapes: M acquired points, in order of acquisition, on the last axis; axes before it are batches
(trajectories), and broadcast. Arrays give arrays and tensors give tensors, in float64; losses keep their
gradients. All weights change when M grows: they are computed anew, or summed up (`running`).
"""

from __future__ import annotations

import operator
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from bench.errors import UsageError

Values = TypeVar("Values", np.ndarray, Tensor)

_ROUNDING = 8 * torch.finfo(torch.float64).eps
"""Relative distance within which two probabilities are equal but for the rounding of their computation."""


def plain(losses: Values) -> Values:
    """R~, the mean loss of the acquired points, `[...]` from `[..., M]`: biased unless q is uniform.

    Raises:
        UsageError: If there is no loss, or one is NaN.
    """
    return _like(losses, _losses(losses).mean(-1))


def pure(losses: Values, proposal: Values, pool_size: int) -> Values:
    """R_PURE = (1/M) sum_m v_m L_m with the weights of `pure_weights`, `[...]` from `[..., M]`.

    Args:
        losses: Of the acquired points, `[..., M]`.
        proposal: q_m, the probability with which each was drawn, `[..., M]`.
        pool_size: N, all points that could be acquired, the initial set among them.

    Raises:
        UsageError: If a loss is NaN, or as `pure_weights`.
    """
    return _like(losses, _weighted(losses, pure_weights(_tensor(proposal, "proposal"), pool_size)))


def lure(losses: Values, proposal: Values, pool_size: int) -> Values:
    """R_LURE = (1/M) sum_m v_m L_m with the weights of `lure_weights`; arguments and errors as `pure`."""
    return _like(losses, _weighted(losses, lure_weights(_tensor(proposal, "proposal"), pool_size)))


def pure_weights(proposal: Values, pool_size: int) -> Values:
    """v_m = 1/(N q_m) + (M - m)/N, `[..., M]` from proposals `[..., M]`; above 0.

    Raises:
        UsageError: If a probability is outside (0, 1], or more points are acquired than the pool has.
    """
    q, order, size = _proposal(proposal, pool_size)
    return _like(proposal, 1 / (size * q) + (len(order) - order) / size)


def lure_weights(proposal: Values, pool_size: int) -> Values:
    """v_m = 1 + (N - M)/(N - m) (1/((N - m + 1) q_m) - 1), `[..., M]` from proposals `[..., M]`; above 0.

    Exactly 1 where the draw was uniform, and everywhere once the whole pool is acquired.

    Raises:
        UsageError: As `pure_weights`.
    """
    q, order, size = _proposal(proposal, pool_size)
    return _like(proposal, 1 + (size - len(order)) * _beyond_uniform(q, order, size))


def running(losses: Values, proposal: Values, pool_size: int) -> tuple[Values, Values, Values]:
    """R~, PURE and LURE of the first 1, 2, ..., M points, each `[..., M]`: one pass in place of M.

    Both weights are sums of a part without M and one in proportion to M or to N - M. Arguments, of which
    losses must be finite, and errors are those of `pure`.
    """
    q, order, size = _proposal(proposal, pool_size)
    values = _fitting(losses, q)
    total = values.cumsum(-1)
    pure = ((values * (1 / q - order)).cumsum(-1) + order * total) / size
    lure = total + (size - order) * (values * _beyond_uniform(q, order, size)).cumsum(-1)
    return tuple(_like(losses, estimate / order) for estimate in (total, pure, lure))


# ------------------------------------------------------------------------------------------------- checks


def _beyond_uniform(q: Tensor, order: Tensor, size: int) -> Tensor:
    """(1/((N - m + 1) q_m) - 1) / (N - m) of every m: 0 where the draw was uniform."""
    against_uniform = q * (size - order + 1)
    against_uniform = torch.where((against_uniform - 1).abs() <= _ROUNDING, 1.0, against_uniform)
    # At m = N the quotient is 0/0: nothing is left to choose, and the weight is 1.
    return (1 / against_uniform - 1) / (size - order).clamp(min=1)


def _weighted(losses: Any, weights: Tensor) -> Tensor:
    return (_fitting(losses, weights) * weights.to(weights.device)).mean(-1)


def _fitting(losses: Any, weights: Tensor) -> Tensor:
    values = _losses(losses)
    try:
        torch.broadcast_shapes(values.shape, weights.shape)
        fits = values.shape[-1] == weights.shape[-1]
    except RuntimeError:
        fits = False
    if not fits:
        shapes = f"{list(values.shape)} and {list(weights.shape)}"
        raise UsageError(f"risk: losses and proposal have shapes {shapes}: they must fit, [..., M] both")
    return values


def _losses(losses: Any) -> Tensor:
    values = _tensor(losses, "losses")
    if values.isnan().any():
        raise UsageError(f"risk: {_entry(values, values.isnan())} of the losses is NaN")
    return values


def _proposal(proposal: Any, pool_size: Any) -> tuple[Tensor, Tensor, int]:
    """Probabilities `[..., M]`, the order 1..M `[M]`, and N."""
    q = _tensor(proposal, "proposal")
    wrong = ~((q > 0) & (q <= 1))  # so that a NaN is wrong too
    if wrong.any():
        value = q.detach()[wrong][0].item()
        raise UsageError(f"risk: {_entry(q, wrong)} of the proposal is {value}: must be in (0, 1]")
    try:
        size = operator.index(pool_size)
    except TypeError:
        raise UsageError(f"risk: pool_size {pool_size}: must be a whole number") from None
    if size < q.shape[-1]:
        raise UsageError(f"risk: {q.shape[-1]} points acquired from a pool of {size}: cannot be more")
    return q, torch.arange(1, q.shape[-1] + 1, dtype=torch.float64, device=q.device), size


def _entry(values: Tensor, where: Tensor) -> str:
    """The place of the first one, counted from 0."""
    place = where.nonzero()[0].tolist()
    return f"entry {place[0] if len(place) == 1 else place}"


def _tensor(values: Any, name: str) -> Tensor:
    if not isinstance(values, Tensor):
        try:
            values = torch.tensor(np.asarray(values, np.float64))
        except (TypeError, ValueError):
            raise UsageError(f"risk: {name} must be real numbers [..., M]") from None
    if values.is_complex() or values.ndim == 0 or values.shape[-1] == 0:
        shape = "complex" if values.is_complex() else f"of shape {list(values.shape)}"
        raise UsageError(f"risk: {name} must be real numbers [..., M] with M at least 1, not {shape}")
    return values.double()


def _like(given: Any, result: Tensor) -> Any:
    return result if isinstance(given, Tensor) else result.detach().cpu().numpy()[()]
