"""Product matrices: the distribution of a product of weight matrices whose entries are independent.

A deep linear network is one matrix, the product of its layers. Independent weights in every layer give this
product entries that depend on each other. Where the activations are (leaky) ReLU the network is linear around
an input, under each draw of the weights by another local product matrix.

Source: Farquhar 2022, thesis "Understanding Approximation" (docs/sources.md), section 3.3 and appendix A.2
(its sigma is a variance in eqs A.2 to A.12, and so is ours).

Shapes: L layers of matrices `[out, in]` from the input on, the product `[O, I]`, S draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from bench.contract import Arrays, Method
from bench.errors import UsageError
from bench.networks import Dropout, he_initialise

SLOPES = {"linear": 1.0, "leaky_relu": 0.1, "relu": 0.0}
"""Slope of an activation below 0, that of the leaky ReLU as in the source's Table A.2."""
_MOST_COMPONENTS = 4
_FEWEST = 20
"""Values per component, at least."""


# ------------------------------------------------------------------------------------------- closed form


def moments(means: Sequence[np.ndarray], variances: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance of a product of matrices with independent entries, whatever their distributions.

    Layer by layer (appendix A.2): for M' = W M with W of mean mu and variances s,
    Cov(M'_ab, M'_cd) = sum_ij mu_ai mu_cj Cov(M_ib, M_jd) + [a = c] sum_i s_ai (Cov(M_ib, M_id) + m_ib m_id).

    Args:
        means: Of every layer `[out, in]`, from the input layer on.
        variances: As means.

    Returns:
        Mean `[O, I]`, and covariance `[O * I, O * I]` over the entries in row-major order.

    Raises:
        UsageError: If the shapes do not fit, or a variance is negative.
    """
    pairs = zip(means, variances, strict=True)
    layers = [(np.asarray(m, np.float64), np.asarray(v, np.float64)) for m, v in pairs]
    fits = all(m.ndim == 2 and m.shape == v.shape for m, v in layers)
    if not layers or not fits or any(a.shape[0] != b.shape[1] for (a, _), (b, _) in pairwise(layers)):
        raise UsageError("a product needs layers of means and variances [out, in] that fit each other")
    if any((v < 0).any() for _, v in layers):
        raise UsageError("variances of weights must be 0 or more")
    mean, first = layers[0]
    covariance = np.diag(first.reshape(-1)).reshape(*first.shape, *first.shape)  # [i, b, j, d]
    for mu, s in layers[1:]:
        through = np.einsum("ai,ibjd->abjd", mu, covariance, optimize=True)
        through = np.einsum("cj,abjd->abcd", mu, through, optimize=True)
        second = np.einsum("ibid->ibd", covariance) + mean[:, :, None] * mean[:, None, :]
        own = np.einsum("ai,ibd->abd", s, second, optimize=True)
        row = np.arange(len(mu))
        through[row, :, row, :] += own
        mean, covariance = mu @ mean, through
    size = mean.size
    return mean, covariance.reshape(size, size)


def correlation(covariance: np.ndarray) -> np.ndarray:
    """The correlations of a covariance `[E, E]`; 0 with an entry that does not vary."""
    scale = np.sqrt(np.diag(covariance))
    with np.errstate(divide="ignore", invalid="ignore"):
        found = covariance / np.outer(scale, scale)
    found[~np.isfinite(found)] = 0.0
    return found


def off_diagonal(covariance: np.ndarray) -> float:
    """Root mean square of the correlations between different entries."""
    found = correlation(covariance)
    return float(np.sqrt(np.mean(np.square(found[~np.eye(len(found), dtype=bool)]))))


def sharing_nothing(covariance: np.ndarray, columns: int) -> float:
    """Root mean square of the correlations between entries that share neither row nor column."""
    row, column = np.divmod(np.arange(len(covariance)), columns)
    apart = (row[:, None] != row) & (column[:, None] != column)
    found = correlation(covariance)[apart]
    return float(np.sqrt(np.mean(np.square(found)))) if len(found) else 0.0


# ----------------------------------------------------------------------------------------------- by draws


class Agreement(NamedTuple):
    """How draws agree with a closed form: relative distance (Frobenius) and share within four errors."""

    distance: float
    within: float


def agreement(draws: np.ndarray, mean: np.ndarray, covariance: np.ndarray) -> Agreement:
    """Compares the covariance of draws `[S, E]` around the known mean `[E]` with the closed form `[E, E]`.

    Around the known mean each product of two deviations is an unbiased estimate, with a standard error of its
    own.
    """
    away = draws - mean
    count = len(away)
    found = away.T @ away / count
    squares = np.square(away)
    error = np.sqrt(np.maximum(squares.T @ squares / count - found**2, 0) / count)
    return Agreement(
        float(np.linalg.norm(found - covariance) / np.linalg.norm(covariance)),
        float(np.mean(np.abs(found - covariance) <= 4 * error)),
    )


def product(weights: Sequence[Tensor]) -> Tensor:
    """Products `[S, O, I]` of drawn layers, each `[S, out, in]`, from the input layer on."""
    found = weights[0]
    for layer in weights[1:]:
        found = layer @ found
    return found


def local_product(
    weights: Sequence[Tensor], inputs: Tensor, slope: float, columns: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Local product matrices at an input, and the share of units that are on (eq. A.25).

    Args:
        weights: Drawn layers, each `[S, out, in]`, of a network without biases.
        inputs: `[I]`, one input.
        slope: Of the activation below 0: 0 of ReLU, 1 where it is linear.
        columns: The C inputs whose columns are wanted.

    Returns:
        Products `[S, O, C]`, and shares `[S]`; NaN where there is no hidden unit.
    """
    hidden, found = weights[0] @ inputs, weights[0][:, :, list(columns)]
    on = []
    for layer in weights[1:]:
        on.append((hidden > 0).to(hidden.dtype))
        active = torch.where(hidden > 0, 1.0, slope)
        hidden, found = active * hidden, active[..., None] * found
        hidden, found = (layer @ hidden[..., None])[..., 0], layer @ found
    return found, torch.cat(on, -1).mean(-1) if on else hidden.new_full((len(hidden),), torch.nan)


def is_multimodal(values: np.ndarray) -> bool:
    """Whether values `[S]` have a density with several modes, which the values themselves confirm.

    The normal mixture that fits best, by BIC among 1 to 4 components, proposes valleys: heavy tails take two
    components and have none. A valley counts where fewer values lie around its bottom than around the top on
    either side, in windows of one width, by four standard errors of the difference: a mixture that fits sharp
    edges has valleys which the values do not have.
    """
    from sklearn.mixture import GaussianMixture  # here, for its import takes a second

    spread = values.std()
    if len(values) < _FEWEST or not spread > 0:
        return False
    standard = (values - values.mean()) / spread
    counts = range(1, min(_MOST_COMPONENTS, len(values) // _FEWEST) + 1)
    fits = [GaussianMixture(count, random_state=0).fit(standard[:, None]) for count in counts]
    best = min(fits, key=lambda fit: fit.bic(standard[:, None]))
    grid = np.linspace(standard.min(), standard.max(), 2000)
    density = best.score_samples(grid[:, None])
    inner = np.arange(1, len(grid) - 1)
    valleys = inner[(density[inner] < density[inner - 1]) & (density[inner] <= density[inner + 1])]
    return any(_is_confirmed(standard, grid, density, valley) for valley in valleys)


def _is_confirmed(values: np.ndarray, grid: np.ndarray, density: np.ndarray, valley: int) -> bool:
    tops = [density[:valley].argmax(), valley + density[valley:].argmax()]
    bottom, half = grid[valley], min(abs(grid[top] - grid[valley]) for top in tops) / 3
    few = np.sum(np.abs(values - bottom) < half)
    many = np.array([np.sum(np.abs(values - grid[top]) < half) for top in tops])
    return bool((many - few > 4 * np.sqrt(many + few)).all())


def multimodal_share(draws: np.ndarray, entries: int) -> float:
    """Share of multimodal entries among `entries` of the `[S, E]`, spread evenly over them."""
    chosen = np.unique(np.linspace(0, draws.shape[1] - 1, entries).round().astype(int))
    return float(np.mean([is_multimodal(draws[:, entry]) for entry in chosen]))


# --------------------------------------------------------------------------------- networks and their draws


def deep(
    inputs: int, outputs: int, hidden: Sequence[int], activation: str, dropout: float = 0.0
) -> nn.Sequential:
    """A fully connected network without biases: its product is all of it. Weights as He starts them."""
    widths, slope = [*hidden, outputs], SLOPES[activation]
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in zip([inputs, *hidden], widths, strict=True):
        layers += [nn.Linear(before, after, bias=False), nn.LeakyReLU(slope), Dropout(dropout)]
    return he_initialise(nn.Sequential(*layers[:-2]), slope)


def layers_of(weights: Mapping[str, Tensor]) -> list[Tensor]:
    """The matrices of the dictionary of weights of `deep`, from the input layer on."""
    return list(weights.values())


def draw(
    method: Method,
    inputs: Tensor,
    slope: float,
    columns: Sequence[int],
    count: int,
    generator: torch.Generator,
    pieces: int = 500,
) -> Arrays:
    """Local product matrices at an input under draws of a fitted method, in pieces of bounded memory.

    Returns:
        `products` `[S, O * C]`, and `on` `[S]`, shares of units that are on (0 without hidden units).
    """
    found, on = [], []
    for first in range(0, count, pieces):
        weights = layers_of(method.sample_weights(min(pieces, count - first), generator))
        products, shares = local_product(weights, inputs.flatten(), slope, columns)
        found.append(products.flatten(1))
        on.append(shares.nan_to_num())
    return {"products": torch.cat(found).double().numpy(), "on": torch.cat(on).double().numpy()}


# ------------------------------------------------------------------------------------------------- charts


def heat_maps(panels: Mapping[str, np.ndarray], title: str | list[str], limit: float = 1.0) -> Any:
    """Correlations of the entries of a product `[E, E]`, a square per pair, red above 0 and blue below.

    From `limit` on colours are full.
    """
    import altair as alt

    from bench import figures

    def panel(name: str, matrix: np.ndarray) -> Any:
        values = [
            {"row": r, "column": c, "value": round(float(v), 3)}
            for r, line in enumerate(matrix, 1)
            for c, v in enumerate(line, 1)
        ]
        axis = alt.Axis(labels=False, ticks=False)
        marks = alt.Chart(alt.Data(values=values)).mark_rect(aria=False)
        drawn = marks.encode(
            x=alt.X("column:O", title="entry", axis=axis),
            y=alt.Y("row:O", title="entry", axis=axis),
            color=alt.Color(
                "value:Q",
                title="correlation",
                scale=alt.Scale(scheme="redblue", domain=[-limit, limit], clamp=True, reverse=True),
            ),
        )
        return drawn.properties(title=figures.titled(name), width=240, height=240)

    drawn = [panel(name, matrix) for name, matrix in panels.items()]
    return alt.concat(*drawn, columns=3).properties(title=figures.titled(title))
