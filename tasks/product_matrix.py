"""Product matrices without training: what independent weights become when layers are multiplied.

Question: how far do the entries of a product of matrices with independent entries depend on each other, and
what becomes of their density with depth?

Protocol: closed form, nothing is fitted, METHOD is `none`. `layers` square matrices with entries
N(mean, sd^2): mean and covariance of their product by recursion, compared with the covariance of drawn
products; and how many entries of the product are multimodal. Beside it the density of an entry of a product
of one to seven matrices with entries N(0, 0.23^2): given the sizes of the vectors on the way an entry is
normal, so that its density is an average of normal densities over draws of chi-squared variables.

Source: Farquhar 2022, thesis "Understanding Approximation" (docs/sources.md), section 3.3, Figs 3.8f and 3.9,
Propositions 2 and 3 (the printed eq. A.22 has A^T A for A A^T). Deviations: the width behind Fig. 3.9 is not
said; ours is 16, that of the source's networks. Modes are counted by a normal mixture chosen by BIC, in place
of looking at 20 histograms.

What would mislead: a covariance says nothing of tails. The variance of an entry changes by the factor
width * 0.23^2 per layer, 0.85 at width 16, so that seven layers keep the density only at a width near 19, and
at none do they keep its kurtosis, which grows by 1 + 2 / width per layer. A covariance estimated from draws
is off everywhere by a little, which a heat map shows as structure: the closed form beside it has none.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field

from bench import figures
from bench.contract import Arrays, Engine, Metric, Metrics, Row, Spec, Task
from bench.data import array_digest
from bench.intervals import Band
from bench.settings import Count, Positive, settings
from bench.studies import product
from bench.studies.product import moments as moments

NAMES: dict[str, dict[str, object]] = {"product_matrix": {}}

PRESETS: dict[str, dict[str, object]] = {"smoke": {"width": 6, "draws": 500, "entries": 4}}

DEPTHS = (1, 2, 3, 5, 7)
"""Numbers of matrices of the density figure."""
DENSITY_SD = 0.23
"""Standard deviation of its entries."""
GRID = np.linspace(-1, 1, 201)
"""Where densities are computed."""
CHAINS = 4000
"""Draws of chi-squared variables behind a density."""
SHOWN = 48
"""Entries in a heat map, the first ones."""


@settings
class Settings:
    """Settings of the study of product matrices; the defaults are those of Fig. 3.8f."""

    layers: Count = 5
    """Matrices of the product, at least 1."""
    width: Annotated[int, Field(ge=1, le=40)] = 16
    """Rows and columns of every matrix, from 1 to 40; the covariance has width^4 numbers."""
    mean: float = 0.01
    """Of every entry."""
    sd: Positive = 0.3
    """Standard deviation of every entry, above 0."""
    draws: Annotated[int, Field(ge=2)] = 10_000
    """Products drawn, at least 2."""
    entries: Count = 20
    """Entries whose modes are counted, at least 1."""


class ProductMatrix(Task):
    """Products of random matrices."""

    settings_class = Settings
    settings: Settings

    @property
    def spec(self) -> Spec:
        """What is measured."""
        return Spec(
            question="How far do the entries of a product of independent matrices depend on each other?",
            source="Farquhar 2022, section 3.3, Figs 3.8f and 3.9",
            version=1,
            metrics={
                "off_diagonal": Metric(
                    "root mean square correlation between different entries, closed form", "correlation", 0, 1
                ),
                "sharing_nothing": Metric(
                    "the same between entries that share neither row nor column", "correlation", 0, 1
                ),
                "distance": Metric(
                    "Frobenius distance of the draws' covariance to the closed form, over its norm",
                    *("ratio", 0, np.inf),
                ),
                "within": Metric(
                    "share of its entries within four standard errors of the closed form", "fraction", 1, 0
                ),
                "multimodal": Metric("share of entries with several modes", "fraction", 0, 1),
                "sd_kept": Metric(
                    "standard deviation of an entry of seven N(0, 0.23^2) matrices over that of one",
                    *("ratio", np.inf, 0),
                ),
                "kurtosis": Metric("its kurtosis; 3 is normal", "ratio", 3, np.inf),
            },
            main_metric="off_diagonal",
            ranked=False,
            closed_form=True,
        )

    def data_digest(self) -> str:
        """Of no data."""
        return array_digest({})

    def targets(self) -> Arrays:
        """None: nothing is predicted."""
        return {}

    # ---- protocol

    def run(self, engine: Engine) -> Arrays:
        """Covariance `[E, E]`, how draws agree with it, modes, and densities `[depths, grid]`."""
        own = self.settings
        engine.stage("product", 1, 2)
        shape = own.layers, own.width, own.width
        mean, covariance = moments(list(np.full(shape, own.mean)), list(np.full(shape, own.sd**2)))
        arrays = {"covariance": covariance.astype(np.float32)}
        arrays |= engine.cached(partial(self.drawn, engine, mean, covariance))
        engine.stage("densities", 2, 2)
        chains = chi_squared(own.width, max(DEPTHS) - 1, engine.generator("densities"))
        arrays["densities"] = np.stack([density(chains[: depth - 1]) for depth in DEPTHS])
        return arrays

    def drawn(self, engine: Engine, mean: np.ndarray, covariance: np.ndarray) -> Arrays:
        """Covariance of draws `[E, E]`, how it agrees with the closed form, share of multimodal entries."""
        own, generator = self.settings, engine.generator("products")
        shape = own.draws, own.width, own.width
        weights = [own.mean + own.sd * torch.randn(shape, generator=generator) for _ in range(own.layers)]
        draws = product.product(weights).flatten(1).double().numpy()
        away = draws - mean.reshape(-1)
        return {
            "sampled": (away.T @ away / own.draws).astype(np.float32),
            "agreement": np.array(product.agreement(draws, mean.reshape(-1), covariance)),
            "multimodal": np.array(product.multimodal_share(draws, own.entries)),
        }

    # ---- scoring

    def score(self, arrays: Arrays) -> Metrics:
        """Correlations, agreement, modes, and what depth does to an entry."""
        covariance, width, deepest = arrays["covariance"].astype(float), self.settings.width, max(DEPTHS)
        distance, within = arrays["agreement"].tolist()
        return {
            "off_diagonal": product.off_diagonal(covariance) if len(covariance) > 1 else 0.0,
            "sharing_nothing": product.sharing_nothing(covariance, width),
            "distance": distance,
            "within": within,
            "multimodal": float(arrays["multimodal"]),
            "sd_kept": float((width * DENSITY_SD**2) ** ((deepest - 1) / 2)),
            "kurtosis": float(3 * (1 + 2 / width) ** (deepest - 1)),
        }

    def curves(self, arrays: Arrays) -> list[Row]:
        """Densities of an entry by depth."""
        return [
            Row("density of an entry", f"{depth} matrices", float(x), float(value))
            for depth, values in zip(DEPTHS, arrays["densities"], strict=True)
            for x, value in zip(GRID, values, strict=True)
        ]

    def figures(self, arrays: Arrays) -> dict[str, Any]:
        """The heat map of Fig. 3.8f beside the closed form, and the densities of Fig. 3.9."""
        own = self.settings
        panels = {
            name: product.correlation(arrays[key].astype(float))[:SHOWN, :SHOWN]
            for name, key in (("closed form", "covariance"), (f"{own.draws:,} draws", "sampled"))
        }
        notes = [
            f"{own.layers} layers of {own.width} x {own.width}, N({own.mean:g}, {own.sd:g}^2)",
            f"the first {min(SHOWN, own.width**2)} entries; colours are full from 0.1 on",
        ]
        series = {
            f"{d} matri{'x' if d == 1 else 'ces'}": Band.flat(values)
            for d, values in zip(DEPTHS, arrays["densities"], strict=True)
        }
        title = ["Density of an entry", f"matrices {own.width} x {own.width} of N(0, {DENSITY_SD:g}^2)"]
        return {
            "covariance": product.heat_maps(panels, ["Correlations in an untrained product", *notes], 0.1),
            "densities": figures.bands(series, GRID.tolist(), title, "value", "density"),
        }


def chi_squared(width: int, count: int, generator: torch.Generator) -> np.ndarray:
    """Draws of chi-squared variables with `width` degrees of freedom, `[count, CHAINS]`."""
    normals = torch.randn(count, CHAINS, width, generator=generator, dtype=torch.float64)
    return normals.square().sum(-1).numpy()


def density(chains: np.ndarray) -> np.ndarray:
    """Density of an entry on the grid, given the squared lengths on the way `[L - 1, CHAINS]`."""
    sd = DENSITY_SD * np.sqrt((DENSITY_SD**2 * chains).prod(0))
    return np.mean(np.exp(-0.5 * (GRID[:, None] / sd) ** 2) / sd, 1) / np.sqrt(2 * np.pi)
