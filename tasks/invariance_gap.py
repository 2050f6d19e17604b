"""The invariance gap: what a symmetry of the likelihood costs a mean-field posterior.

Question: how much of the evidence does a mean-field posterior lose because weights may move, or change
places, without a change of the function?

Protocol: closed form, nothing is fitted, METHOD is `none`. Translations: y = mean of K weights + noise, ten
observations of 1, noise variance 1 / (2 pi e), prior N(0, K) of each weight, so that the prior over functions
is the same at every K. For K from 2 to 100,000 and at three choices of the parameters (the optimum of the
invariance-abiding q_mix, that of the mean-field q_0, and the latter as it is printed) the study has the gap
KL(q_0 || q_mix), expected log likelihood, KL to the prior, bound, and mean and variance of the function.
Permutations: hidden units whose posteriors are N(m, sigma^2), m drawn so that prior and average posterior are
the same N(0, 1); the gap is exact for 12 units, and has bounds and an estimate for these and for 32.

Source: Kurle et al. 2022, "On the detrimental effect of invariances in the likelihood for variational
inference" (docs/sources.md), Figs 1 and 2 and Appendix E. Deviations: the optimal mean of eq. 19 is corrected
(the printed one stands beside it), and so is the sign of eq. 10. The first curve of Fig. 1 is
KL(q_0 || q_mix) at the optimum of q_mix, which its caption prints otherwise.

What would mislead: the gap at the optimum of q_mix grows without end, but no mean-field fit is there; what
such a fit loses is the difference between the evidence and its own best bound. The gap at the optimum of q_0
first rises with K and falls again, since the fit returns to the prior: a small gap is no sign of a good
posterior. Posteriors of units are made up here, so the permutation gap is that of no trained network.
"""

from __future__ import annotations

import math
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
from bench.studies import invariance
from bench.studies.invariance import LinearModel
from bench.studies.invariance import linear_model as linear_model

NAMES: dict[str, dict[str, object]] = {"invariance_gap": {}}

PRESETS: dict[str, dict[str, object]] = {
    "smoke": {"num_weights": 1000, "units": 8, "wide_units": 16, "draws": 20}
}

OPTIMA = ("theta_mixed", "theta_mean_field", "theta_mean_field_printed")
QUANTITIES = (
    *("gap", "expected_log_likelihood", "kl_mixed", "kl_mean_field"),
    *("elbo_mixed", "elbo_mean_field"),
)
SCALES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
"""Standard deviations of a unit's weights, in those of the prior."""
HALF = SCALES.index(0.5)
KINDS = ("estimate", "lower", "upper")
UNIT_WEIGHTS = 3
"""Weights of a unit: one in, one bias, one out."""
IMPORTANCE = 20
"""Permutations drawn per draw of the weights."""


@settings
class Settings:
    """Settings of the study of the invariance gap; its defaults are those of Figs 1 and 2."""

    num_weights: Annotated[int, Field(ge=2, le=10**7)] = 100_000
    """Largest K, from 2 to ten million."""
    num_observations: Count = 10
    """Observations N, at least 1, all equal."""
    observation: float = 1.0
    """Their value."""
    noise_variance: Positive = 1 / (2 * math.pi * math.e)
    """Variance of an observation's noise, above 0."""
    function_variance: Positive = 1.0
    """Prior variance of the function, above 0: that of one weight is K times it."""
    prior_mean: float = 0.0
    """Of every weight."""
    units: Annotated[int, Field(ge=2, le=invariance.LARGEST_EXACT)] = 12
    """Hidden units of the exact permutation gap, from 2 to 14."""
    wide_units: Annotated[int, Field(ge=2)] = 32
    """Hidden units of the permutation gap by bounds and estimate, at least 2."""
    draws: Annotated[int, Field(ge=2)] = 200
    """Draws of the weights behind a permutation gap, at least 2."""


class InvarianceGap(Task):
    """Closed forms of the linear model by K, and permutation gaps by the posterior's width."""

    settings_class = Settings
    settings: Settings

    @property
    def spec(self) -> Spec:
        """What is measured."""

        def nats(text: str) -> Metric:
            return Metric(text, "nats", 0, np.inf)

        return Spec(
            question="What does a symmetry of the likelihood cost a mean-field posterior?",
            source="Kurle et al. 2022, sections 3 and 4, Figs 1 and 2",
            version=1,
            metrics={
                "evidence_lost": nats("log evidence minus the best mean-field bound, at the largest K"),
                "evidence_lost_printed": nats("the same at the printed optimum"),
                "gap_at_mixed": nats("KL(q_0 || q_mix) at the optimum of q_mix, at the largest K"),
                "gap_at_mean_field": nats("KL(q_0 || q_mix) at the optimum of q_0, at the largest K"),
                "data_bound": nats("largest KL to the prior that the data allow, at the largest K"),
                "variance_kept": Metric(
                    "variance of the function under the best mean-field posterior over the prior's",
                    *("fraction", 0, 1),
                ),
                "variance_kept_exact": Metric(
                    "variance of the function under the true posterior over the prior's", "fraction", 0, 1
                ),
                "permutation_gap": nats("exact permutation gap at half the prior's standard deviation"),
                "permutation_gap_error": nats("its Monte Carlo standard error"),
                "permutation_gap_estimated": nats("the same by drawn permutations"),
                "permutation_gap_wide": nats("the same of the wide layer, by drawn permutations"),
            },
            main_metric="evidence_lost",
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

    def model(self, num_weights: int) -> LinearModel:
        """The linear model of K weights."""
        own = self.settings
        observations = np.full(own.num_observations, own.observation)
        variance = num_weights * own.function_variance
        return linear_model(num_weights, observations, own.noise_variance, variance, own.prior_mean)

    @property
    def sizes(self) -> list[int]:
        """Values of K, eight per power of ten."""
        largest = self.settings.num_weights
        steps = 2 + math.ceil(8 * math.log10(largest / 2))
        return sorted({round(k) for k in np.geomspace(2, largest, steps)})

    def run(self, engine: Engine) -> Arrays:
        """Quantities of the linear model, then permutation gaps."""
        engine.stage("translations", 1, 2)
        arrays = self.translations()
        engine.stage("permutations", 2, 2)
        return arrays | engine.cached(partial(self.permutations, engine))

    def translations(self) -> Arrays:
        """Of every K `[M]`; `linear` is `[M, 3, 8]`: optimum, then QUANTITIES, mean and variance."""
        models = [self.model(k) for k in self.sizes]
        linear = [
            [
                [*(getattr(m, name)(theta) for name in QUANTITIES), *m.function(theta)]
                for theta in (getattr(m, name) for name in OPTIMA)
            ]
            for m in models
        ]
        return {
            "num_weights": np.array(self.sizes),
            "linear": np.array(linear),
            "log_evidence": np.array([m.log_evidence for m in models]),
            "data_bound": np.array([m.data_bound for m in models]),
        }

    def permutations(self, engine: Engine) -> Arrays:
        """`exact` `[P, 2]`, `few` and `wide` `[P, 3, 2]`: of every scale a gap and its error, by KINDS."""
        own, found = self.settings, {name: list[Any]() for name in ("exact", "few", "wide")}
        for scale in SCALES:
            for name, units in (("few", own.units), ("wide", own.wide_units)):
                generator = engine.generator(name)  # the same at every scale: curves are smooth
                centres = torch.randn(units, UNIT_WEIGHTS, generator=generator, dtype=torch.float64).numpy()
                means, variances = math.sqrt(1 - scale**2) * centres, np.full(centres.shape, scale**2)
                logs = invariance.log_densities(means, variances, own.draws, generator)
                below, above = invariance.log_permanent_bounds(logs)
                estimate = invariance.log_permanent_estimate(logs, IMPORTANCE, generator)
                found[name].append([invariance.permutation_gaps(logs, p) for p in (estimate, above, below)])
                if name == "few":
                    exact = invariance.log_permanent(logs)
                    found["exact"].append(invariance.permutation_gaps(logs, exact))
        return {name: np.array(values) for name, values in found.items()}

    # ---- scoring

    def score(self, arrays: Arrays) -> Metrics:
        """At the largest K, and at posteriors half as wide as the prior."""
        last = {
            optimum: dict(zip((*QUANTITIES, "mean", "variance"), values.tolist(), strict=True))
            for optimum, values in zip(OPTIMA, arrays["linear"][-1], strict=True)
        }
        evidence, own = float(arrays["log_evidence"][-1]), self.settings
        best, prior = last["theta_mean_field"], own.function_variance
        return {
            "evidence_lost": max(0.0, evidence - best["elbo_mean_field"]),
            "evidence_lost_printed": max(0.0, evidence - last["theta_mean_field_printed"]["elbo_mean_field"]),
            "gap_at_mixed": last["theta_mixed"]["gap"],
            "gap_at_mean_field": best["gap"],
            "data_bound": float(arrays["data_bound"][-1]),
            "variance_kept": best["variance"] / prior,
            "variance_kept_exact": last["theta_mixed"]["variance"] / prior,
            "permutation_gap": max(0.0, float(arrays["exact"][HALF, 0])),
            "permutation_gap_error": float(arrays["exact"][HALF, 1]),
            "permutation_gap_estimated": max(0.0, float(arrays["few"][HALF, 0, 0])),
            "permutation_gap_wide": max(0.0, float(arrays["wide"][HALF, 0, 0])),
        }

    def curves(self, arrays: Arrays) -> list[Row]:
        """Every quantity against K, and permutation gaps against the scale."""
        names = (*QUANTITIES, "mean of the function", "variance of the function")
        rows = [
            Row(name, optimum, float(k), float(value))
            for k, of_size in zip(arrays["num_weights"], arrays["linear"], strict=True)
            for optimum, values in zip(OPTIMA, of_size, strict=True)
            for name, value in zip(names, values, strict=True)
        ]
        for name in ("few", "wide"):
            for scale, gaps in zip(SCALES, arrays[name], strict=True):
                rows += [
                    Row(f"permutation gap, {name} units", kind, scale, float(gap))
                    for kind, (gap, _) in zip(KINDS, gaps, strict=True)
                ]
        exact = zip(SCALES, arrays["exact"], strict=True)
        return rows + [Row("permutation gap, few units", "exact", s, float(gap)) for s, (gap, _) in exact]

    def figures(self, arrays: Arrays) -> dict[str, Any]:
        """Figs 1 and 2 of the source, and the permutation gap."""
        return {
            "gap": gap_chart(arrays),
            "terms": terms_chart(arrays),
            "permutations": permutation_chart(arrays, self.settings),
        }


# ------------------------------------------------------------------------------------------------- charts


def _of(arrays: Arrays, quantity: str, optimum: str) -> Band:
    names = (*QUANTITIES, "mean", "variance")
    return Band.flat(arrays["linear"][:, OPTIMA.index(optimum), names.index(quantity)])


def gap_chart(arrays: Arrays) -> Any:
    """The gap against K at both optima, and the bound by the data (Fig. 1)."""
    series = {
        "KL(q0 || qmix) at the optimum of qmix": _of(arrays, "gap", "theta_mixed"),
        "KL(q0 || qmix) at the optimum of q0": _of(arrays, "gap", "theta_mean_field"),
        "largest KL that the data allow": Band.flat(arrays["data_bound"]),
    }
    x = arrays["num_weights"].tolist()
    return figures.bands(
        *(series, x, "Invariance gap", "weights K", "nats"), logarithmic=True, logarithmic_x=True
    )


def terms_chart(arrays: Arrays) -> Any:
    """The parts of the bounds and the function's variance against K (Fig. 2)."""
    import altair as alt

    x, optima = arrays["num_weights"].tolist(), {"qmix": "theta_mixed", "q0": "theta_mean_field"}
    kinds = {"qmix": "mixed", "q0": "mean_field"}
    evidence = arrays["log_evidence"]

    def each(quantity: str) -> dict[str, Band]:
        return {
            f"{q} at the optimum of {of}": _of(arrays, f"{quantity}_{kind}", optimum)
            for q, kind in kinds.items()
            for of, optimum in optima.items()
        }

    def both(quantity: str) -> dict[str, Band]:
        return {
            f"optimum of {of} (q0 and qmix alike)": _of(arrays, quantity, at) for of, at in optima.items()
        }

    lost = {name: Band.flat(evidence - band.centre) for name, band in each("elbo").items()}
    del lost["qmix at the optimum of qmix"]
    on_x = partial(figures.bands, logarithmic_x=True)
    on_both = partial(on_x, logarithmic=True)
    return alt.concat(
        on_both(each("kl"), x, "KL to the prior", "weights K", "nats"),
        on_x(both("expected_log_likelihood"), x, "Expected log likelihood", "weights K", "nats"),
        on_both(lost, x, ["Log evidence minus bound", "0 of qmix at its own optimum"], "weights K", "nats"),
        on_both(both("variance"), x, "Variance of the function", "weights K", "variance"),
        columns=2,
    ).resolve_scale(**figures.APART)


def permutation_chart(arrays: Arrays, own: Settings) -> Any:
    """The permutation gap against the width of the posteriors."""
    series = {f"{own.units} units, exact": Band.flat(np.maximum(arrays["exact"][:, 0], 0))}
    for name, units in (("few", own.units), ("wide", own.wide_units)):
        most = math.lgamma(units + 1)
        middle, low, high = np.clip(arrays[name][:, :, 0].T, 0, most)
        series[f"{units} units, estimate"] = Band(middle, low, high)
    levels = {
        f"log {units}!: {math.lgamma(units + 1):.3g}": math.lgamma(units + 1)
        for units in dict.fromkeys((own.units, own.wide_units))
    }
    title = ["Permutation gap", f"bands: between the bounds; means over {own.draws} draws"]
    return figures.bands(
        series, SCALES, title, "standard deviation of a weight over the prior's", "nats", levels
    )
