"""Mixtures of normals: what they find on the sine of nn4post, and what their components cost."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from parts.evidence import (
    Drawing,
    Part,
    compared,
    finished_runs,
    footer,
    groups,
    interval,
    metric,
    milliseconds_per_step,
    or_none,
)

SAID = ("components", "largest_weight", "elbo_1", "elbo_2")
"""What a mixture says of itself after its fit."""


def sine_mixtures() -> str:
    """Components that are left, bounds on the evidence, predictions, and the time of a step."""
    rows = []
    for _, method_identity, group in groups("sine_regression"):
        own = [record.fits[-1].diagnostics for _, record in group]
        found = [[of[name] for of in own if name in of] for name in SAID]
        minutes = np.mean([record.seconds for _, record in group]) / 60
        rows.append(
            [f"`{method_identity}`", str(len(group))]
            + [interval(values) if values else "-" for values in found]
            + [metric(group, name) for name in ("test_nll", "rmse", "sd")]
            + [milliseconds_per_step(group), f"{minutes:.1f}"]
        )
    names = ["components", "largest weight", "ELBO of one", "ELBO of two", "test NLL", "RMSE", "sd"]
    return or_none(["method", "seeds", *names, "ms per step", "minutes per run"], rows)


def drawn() -> Iterator[Drawing]:
    """Fig. 1."""
    if runs := finished_runs("sine_regression"):
        yield compared("sine_regression").charts, footer(runs)


PARTS: dict[str, Part] = {"sine mixtures": sine_mixtures}
