"""Draws of the function behind predictions of numbers, without the noise of their observation."""

from __future__ import annotations

import numpy as np
import torch
from scipy.special import ndtri
from torch import Tensor

from bench.predictions import Gaussian

LEVELS = (np.arange(80) + 0.5) / 80
"""Probabilities at which a normal is kept."""


def drawn(prediction: Gaussian, noise: float, number: int) -> Tensor:
    """Values of the function at N inputs, `[S, N]`, in the unit of the outputs.

    A normal wider than the noise stands for a normal function, as methods predict that integrate in closed
    form: of each input then the quantiles of the mixture, at `number` levels. They do not tell how the
    functions hang together over inputs.

    Args:
        prediction: Means and variances `[S, N, 1]`.
        noise: Standard deviation of an observation, known.
        number: Quantiles where there are no draws, at least 1.
    """
    values, excess = prediction.mean[..., 0], prediction.variance[..., 0] - noise**2
    if (excess <= 1e-4 * noise**2).all():
        return values
    levels = torch.from_numpy(ndtri(LEVELS) / ndtri(LEVELS).std()).to(values)
    every = (values + excess.clamp(min=0).sqrt() * levels[:, None, None]).flatten(0, 1)
    asked = (torch.arange(number) + 0.5) / number
    return torch.quantile(every, asked.to(every), dim=0)
