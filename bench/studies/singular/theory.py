"""Learning coefficients (real log canonical thresholds) of singular models, and their multiplicities.

The log evidence of n observations has the leading terms -lambda log n + (m - 1) log log n, with the learning
coefficient lambda and its multiplicity m.

Source: the paper "Variational Inference via Resolution of Singularities" 2022 (docs/sources.md), Table 1;
Aoyagi and Watanabe 2012 (tanh) and 2005 (reduced rank).
"""

from __future__ import annotations

import math


def rlct_tanh(hidden: int) -> tuple[float, int]:
    """Learning coefficient and multiplicity of H tanh units on one input where the true weights are 0.

    With i = floor(sqrt(H)): (H + i^2 + i) / (4 i + 2), and 2 if i^2 = H, else 1 (Table 1 of the paper).
    """
    i = math.isqrt(hidden)
    return (hidden + i * i + i) / (4 * i + 2), 2 if i * i == hidden else 1


def rlct_reduced_rank(inputs: int, outputs: int, hidden: int, rank: int) -> tuple[float, int]:
    """Learning coefficient and multiplicity of y = B A x, A `[hidden, inputs]`, B `[outputs, hidden]`.

    The truth B0 A0 has the given rank (Table 1 of the paper; Aoyagi and Watanabe 2005).
    """
    m, n, h, r = inputs, outputs, hidden, rank
    if m + h < n + r:
        return (h * m - h * r + n * r) / 2, 1
    if n + h < m + r:
        return (h * n - h * r + m * r) / 2, 1
    if m + n < h + r:
        return m * n / 2, 1
    q = -((h + r) ** 2) - m**2 - n**2 + 2 * (h + r) * (m + n) + 2 * m * n
    return (q / 8, 1) if (m + h + n + r) % 2 == 0 else ((q + 1) / 8, 2)


def leading_term(known: tuple[float, int] | None, num_train: int) -> float | None:
    """-lambda log n + (m - 1) log log n, in nats; None where lambda is not known."""
    if known is None:
        return None
    log_n = math.log(num_train)
    return -known[0] * log_n + (known[1] - 1) * math.log(log_n)
