"""Whether the chains of a sampler agree, how many independent draws theirs are worth, and what drives a fit.

Source: Vehtari, Gelman, Simpson, Carpenter, Buerkner 2021, "Rank-normalization, folding, and localization:
an improved R-hat for assessing convergence of MCMC": split R-hat and bulk effective sample size. Written out
for all variables at once, because arviz-stats, which the tests take as truth, goes over them one by one (5
seconds for 40 draws of each of 10,000 weights) and has no number for chains that never move.

Shapes: C chains, N draws of each, V variables.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from bench.contract import Batch, Method
from bench.predictions import Bernoulli, Categorical, Gaussian, Prediction
from bench.spec import RHAT_LIMIT as RHAT_LIMIT
from bench.spec import mixed as mixed

FROZEN = 1e6
"""Stands for an infinite R-hat: a chain never moved, and not all draws of all chains are the same number."""
_ROUNDING = 1e-6
"""Relative difference of two numbers from one draw: kernels round by where in a batch it stands."""
_PIECE = 2_000_000
"""Draws of all variables treated at once; bounds memory."""


def split_rhat(draws: ArrayLike) -> np.ndarray:
    """Rank-normalised split R-hat of draws `[C, N, ...]`, per variable `[...]`: the larger of bulk and tail.

    1 where all draws of all chains are one number; `FROZEN` at most, and wherever else a chain is constant.

    Raises:
        ValueError: If there are fewer than four draws.
    """
    return _in_pieces(_split_rhat, draws)


def effective_sample_size(draws: ArrayLike) -> np.ndarray:
    """Bulk effective sample size of draws `[C, N, ...]`, per variable `[...]`.

    C where no chain ever moved: each is worth one draw.

    Raises:
        ValueError: If there are fewer than four draws.
    """
    return _in_pieces(_effective_sample_size, draws)


def prediction_rhat(prediction: Prediction, num_chains: int) -> float:
    """Largest split R-hat of what is predicted: probabilities of classes, or mean functions.

    Args:
        prediction: Its samples are draws, chain after chain, equally many of each.
        num_chains: C.
    """
    return float(split_rhat(_predicted(prediction).unflatten(0, (num_chains, -1)).cpu()).max())


def prediction_autocorrelation(prediction: Prediction) -> float:
    """Draws of one chain that are worth one independent draw, for half of all numbers that are predicted.

    The median over inputs and outputs of N by the bulk effective sample size, the integrated autocorrelation
    time in draws: near 1 where draws are independent, above N / 2 where what is predicted drifts one way. The
    numbers are probabilities of classes, or mean functions.

    Args:
        prediction: Its N samples are the draws of one chain, in their order.

    Raises:
        ValueError: If there are fewer than four draws.
    """
    values = _predicted(prediction)
    return len(values) / float(np.median(effective_sample_size(values[None].cpu())))


def distinct_draws(prediction: Prediction, most_inputs: int = 100) -> int:
    """How many of the S samples of a prediction differ from all others by more than rounding.

    Two samples are the same where every number that they predict agrees to `_ROUNDING`, relative to itself or
    to the mean number, whichever is larger; log-probabilities below -100 count as -100.

    Args:
        prediction: S samples of any number of inputs.
        most_inputs: As many inputs are looked at, evenly over all of them.
    """
    parts = []
    for value in vars(prediction).values():
        few = value[:, :: -(-value.shape[1] // most_inputs)].flatten(1).double()  # [S, V]
        few = few.clamp(min=-100) if isinstance(prediction, Categorical) else few
        parts.append(few / few.abs().mean().clamp(min=1e-300))
    values = torch.cat(parts, 1)
    # Equal samples are neighbours in the order of any one number of theirs: here a sum with random weights.
    weights = torch.randn(values.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values = values[(values @ weights.to(values.device)).argsort()]
    before, after = values[:-1], values[1:]
    bound = _ROUNDING * after.abs().clamp(min=1)
    return 1 + int(((after - before).abs() > bound).any(1).sum())


def gradient_norms(method: Method, batch: Batch, generator: torch.Generator) -> dict[str, float]:
    """Norms of the gradients of likelihood and prior term at the last layer, in nats per training example.

    With respect to the parameters of the method's network, the means of most variational methods. Source:
    Farquhar 2022 (docs/sources.md), Fig. 5.1.

    Args:
        method: Empty for one without `loss_terms`, or that trains other parameters than its network's.
        batch: Examples for the likelihood term.
        generator: Source of the method's noise.
    """
    if "loss_terms" not in method.provides:
        return {}
    layers = [m for m in method.network.modules() if any(True for _ in m.parameters(recurse=False))]
    last = [p for p in layers[-1].parameters(recurse=False) if p.requires_grad]
    if not last:
        return {}
    with torch.enable_grad():
        terms = method.loss_terms(batch, method.draw_noise(method.num_train_samples, generator))
        norms = {}
        for name, term in zip(("likelihood_gradient", "prior_gradient"), terms, strict=True):
            found = torch.autograd.grad(term, last, retain_graph=True, allow_unused=True)
            parts = [g.flatten() for g in found if g is not None]
            norms[name] = torch.cat(parts).norm().item() / method.problem.num_train if parts else 0.0
    return norms


def _predicted(prediction: Prediction) -> Tensor:
    """Probabilities of classes `[S, B, ...]`, or mean functions."""
    match prediction:
        case Categorical():
            values = prediction.log_probs.exp()
        case Bernoulli():
            values = prediction.log_odds.sigmoid()
        case Gaussian():
            values = prediction.mean
    return values


def _in_pieces(function: Callable[[np.ndarray], np.ndarray], draws: ArrayLike) -> np.ndarray:
    draws = np.asarray(draws)
    chains, count, *shape = draws.shape
    if count < 4:
        raise ValueError(f"{count} draws of each chain are too few to compare chains: it takes 4")
    variables = draws.reshape(chains, count, -1).transpose(2, 0, 1)
    step = max(1, _PIECE // (chains * count))
    pieces = (variables[i : i + step].astype(np.float64) for i in range(0, len(variables), step))
    return np.concatenate([function(piece) for piece in pieces]).reshape(shape)


def _split_rhat(draws: np.ndarray) -> np.ndarray:
    """Of draws `[V, C, N]`."""
    halves = _halves(draws)
    folded = np.abs(halves - np.median(halves, (1, 2), keepdims=True))
    rhat = np.maximum(_rhat(_normal_scores(halves)), _rhat(_normal_scores(folded)))
    stuck = _constant(draws, 2).any(1) & ~_constant(draws, (1, 2))
    return np.where(stuck, FROZEN, rhat)


def _effective_sample_size(draws: np.ndarray) -> np.ndarray:
    """Of draws `[V, C, N]`."""
    scores = _normal_scores(_halves(draws))
    count, total = scores.shape[2], scores[0].size
    means = scores.mean(2, keepdims=True)
    spectrum = np.fft.rfft(scores - means, 2 ** math.ceil(math.log2(2 * count)))
    covariance = np.fft.irfft(np.abs(spectrum) ** 2)[..., :count].mean(1) / count  # [V, lag]
    within = covariance[:, :1] * count / (count - 1)
    pooled = np.maximum(covariance[:, :1] + means[..., 0].var(1, ddof=1, keepdims=True), 1e-300)
    correlation = 1 - (within - covariance) / pooled
    correlation[:, 0] = 1
    # Geyer's sequence: sums of two neighbours, taken while positive, and made monotone.
    pairs = max(1, (count - 1) // 2)
    sums = correlation[:, 0 : 2 * pairs : 2] + correlation[:, 1 : 2 * pairs : 2]
    taken = np.logical_and.accumulate(sums > 0, 1)
    lowest = np.where(taken[:, -1], -1, 0)  # of what follows what is taken, an even lag
    taken[:, -1] = False
    following = np.take_along_axis(correlation, 2 * taken.sum(1, keepdims=True), 1)[:, 0]
    time = 2 * (np.minimum.accumulate(sums, 1) * taken).sum(1) + np.maximum(following, lowest) - 1
    size = total / np.maximum(time, 1 / math.log10(total))
    return np.where(_constant(draws, 2).all(1), draws.shape[1], size)


def _halves(draws: np.ndarray) -> np.ndarray:
    """First and last half of every chain, `[V, 2C, N/2]` from `[V, C, N]`; an odd N loses its middle."""
    half = draws.shape[2] // 2
    return np.concatenate([draws[..., :half], draws[..., -half:]], 1)


def _normal_scores(values: np.ndarray) -> np.ndarray:
    """Normal quantiles of the ranks among all of a variable's values `[V, ...]`; ties get their mean rank."""
    flat = values.reshape(len(values), -1)
    count = flat.shape[1]
    order = flat.argsort(1)
    ordered = np.take_along_axis(flat, order, 1)
    ends = np.ones((len(flat), count + 1), bool)  # of a run of equal values
    ends[:, 1:-1] = ordered[:, 1:] != ordered[:, :-1]
    place = np.arange(count)
    first = np.maximum.accumulate(np.where(ends[:, :-1], place, 0), 1)
    last = np.minimum.accumulate(np.where(ends[:, 1:], place, count)[:, ::-1], 1)[:, ::-1]
    ranks = torch.arange(2 * count - 1, dtype=torch.float64) / 2 + 1  # all that there can be
    quantiles = torch.special.ndtri((ranks - 3 / 8) / (count + 1 / 4)).numpy()
    scores = np.empty_like(flat)
    np.put_along_axis(scores, order, quantiles[first + last], 1)
    return scores.reshape(values.shape)


def _rhat(scores: np.ndarray) -> np.ndarray:
    """Root of pooled over within variance of scores `[V, 2C, N/2]`; 1 where all are equal."""
    count = scores.shape[2]
    within, between = scores.var(2, ddof=1).mean(1), scores.mean(2).var(1, ddof=1)
    rhat = np.sqrt(between / np.maximum(within, 1e-300) + (count - 1) / count)
    return np.where(_constant(scores, (1, 2)), 1.0, np.minimum(rhat, FROZEN))


def _constant(values: np.ndarray, axis: int | tuple[int, ...]) -> np.ndarray:
    return values.max(axis) == values.min(axis)
