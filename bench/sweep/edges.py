"""Whether what a search chose lies at an edge of its space: then better values may lie outside it.

A number is at an edge within a twentieth of its range, measured on the scale on which it was drawn. A draw
that is spread evenly over the range lies there one time in ten: one edge is a hint, many are a finding.
"""

from __future__ import annotations

import math
from typing import Any

from bench.sweep.tune import Tuning

SHARE = 0.05
"""Part of a range, on either side, that counts as its edge."""


def edges(result: Tuning) -> dict[str, str]:
    """Setting -> `low` or `high`, of every setting of the chosen configuration that lies at or past an edge.

    Whole numbers are at an edge only where they are an end of the range. Choices that are numbers have the
    least and the largest of them as edges, other choices have none, and neither has a single choice.
    """
    chosen = result.configurations[result.chosen_number].settings
    found = {name: _edge(range_, chosen[name]) for name, range_ in result.search.items()}
    return {name: edge for name, edge in found.items() if edge}


def _edge(range_: dict[str, Any], value: Any) -> str:
    """`low`, `high`, or empty."""
    if type(value) not in (int, float):
        return ""
    if "choices" in range_:
        choices = range_["choices"]
        if len(choices) < 2 or any(type(choice) not in (int, float) for choice in choices):
            return ""
        return "low" if value <= min(choices) else "high" if value >= max(choices) else ""
    low, high = range_["low"], range_["high"]
    if isinstance(low, int) and isinstance(high, int):
        return "low" if value <= low else "high" if value >= high else ""
    if value <= low or value >= high:
        return "low" if value <= low else "high"
    at = math.log(value / low) / math.log(high / low) if range_["scale"] == "log" else None
    share = (value - low) / (high - low) if at is None else at
    return "low" if share < SHARE else "high" if share > 1 - SHARE else ""
