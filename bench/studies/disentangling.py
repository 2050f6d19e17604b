"""Epistemic and aleatoric estimates against the truth, and whether one moves when the other should.

An estimate of uncertainty has two parts at every input: what more data would take away (epistemic), and what
no data would (aleatoric). In worlds of a known law (`bench/studies/oracle.py`) both are known: they are the
parts of the ideal posterior. Of numbers a part is a variance, by the law of total variance; of classes it is
an amount of information in nats, the mutual information of label and function, and the expected entropy of
the label. In classes the aleatoric truth is the expected entropy under the ideal posterior. The entropy of
the world's own probabilities differs from it by what no training set of this size tells.

Errors are means over worlds and inputs of |estimate - truth|, of numbers between standard deviations.
Correlations are Spearman's, mean over worlds.

The disentanglement error compares worlds that differ in one thing alone. From base to noisier only the noise
grows, from base to fewer only training rows go. Write e, a for a method's parts, E, A for the true ones, and
d for the change of a mean over the test inputs:

    noise leak = |d e - d E| / d A    from base to noisier
    data leak  = |d a - d A| / d E    from base to fewer

Each is the share of the change in the part that is meant which the method books under the other one, beyond
what the ideal posterior books there: more noise makes data say less, so that even the ideal epistemic part
grows, and a method that follows it is not blamed. The error is the mean of the two leaks, over worlds. It is
0 for the ideal posterior, and about 1 for a method whose parts are swapped. Means over inputs are compared
and not single inputs, since two fits differ at every input for reasons of their own. A method whose parts do
not move at all has small leaks: the errors and correlations are there to tell.

Sources: Mucsanyi et al. 2024, "Benchmarking Uncertainty Disentanglement: Specialized Uncertainties for
Specialized Tasks" (whether estimates of the two parts are of different things at all); UDBench 2026, arXiv
2608.05995 (worlds whose parts are known). The definition of the leaks is ours.

Shapes: parts are `[3, 2, W, N]`: conditions base, noisier, fewer; epistemic and aleatoric; W worlds; N
inputs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.stats import rankdata

from bench import figures
from bench.spec import Metric, Metrics, Row, Undefined

EPISTEMIC, ALEATORIC = 0, 1
NAMES = ("epistemic", "aleatoric")


def measures(unit: str) -> dict[str, Metric]:
    """The metrics that `scores` gives; errors are in this unit."""
    found = {}
    for name in NAMES:
        found[f"{name}_error"] = Metric(
            f"|estimate - truth| of the {name} part, mean over inputs", unit, 0, np.inf
        )
        found[f"{name}_correlation"] = Metric(
            f"Spearman's, of estimate and truth of the {name} part over inputs",
            "correlation",
            1,
            -1,
            may_be_undefined=True,
        )
    return found | {
        "disentanglement_error": Metric("mean of noise_leak and data_leak", "ratio", 0, np.inf),
        "noise_leak": Metric(
            "change of the epistemic part when only noise grows, off the true one, over the noise added",
            "ratio",
            0,
            np.inf,
        ),
        "data_leak": Metric(
            "change of the aleatoric part when only rows go, off the true one, over the epistemic change",
            "ratio",
            0,
            np.inf,
        ),
    }


def scores(found: np.ndarray, truth: np.ndarray, are_variances: bool) -> Metrics:
    """Errors, correlations and leaks of parts `[3, 2, W, N]`; errors of variances are between their roots."""
    result: Metrics = {}
    for part, name in enumerate(NAMES):
        one, other = found[0, part], truth[0, part]
        if are_variances:
            one, other = np.sqrt(one), np.sqrt(other)
        result[f"{name}_error"] = float(np.abs(one - other).mean())
        result[f"{name}_correlation"] = _correlation(one, other, name)
    noise, data = (leaks(found, truth)[:, 0], leaks(found, truth)[:, 1])
    both = {"noise_leak": float(noise.mean()), "data_leak": float(data.mean())}
    return result | {"disentanglement_error": (both["noise_leak"] + both["data_leak"]) / 2} | both


def leaks(found: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Noise leak and data leak of each world, `[W, 2]`, of parts `[3, 2, W, N]`."""
    estimated, true = ((parts[1:] - parts[0]).mean(-1) for parts in (found, truth))  # [2, 2, W]
    off = np.abs(estimated - true)
    noise = off[0, EPISTEMIC] / true[0, ALEATORIC]
    data = off[1, ALEATORIC] / true[1, EPISTEMIC]
    return np.stack([noise, data], -1)


def _correlation(found: np.ndarray, truth: np.ndarray, name: str) -> float | Undefined:
    """Mean over worlds of Spearman's correlation, of `[W, N]` and `[W, N]`."""
    each = []
    for one, other in zip(found, truth, strict=True):
        ranks = rankdata(one), rankdata(other)
        if np.ptp(ranks[0]) == 0:
            return Undefined(f"the {name} estimate is the same at all inputs")
        each.append(np.corrcoef(*ranks)[0, 1])
    return float(np.mean(each).clip(-1, 1))


def curves(found: np.ndarray, truth: np.ndarray) -> list[Row]:
    """Mean of every part by condition, estimate and truth; x counts the conditions from 0."""
    return [
        Row(f"{name} part", series, x, float(parts[x, part].mean()))
        for part, name in enumerate(NAMES)
        for series, parts in (("estimate", found), ("truth", truth))
        for x in range(len(parts))
    ]


def chart(found: np.ndarray, truth: np.ndarray, unit: str, are_variances: bool) -> Any:
    """Estimate against truth at every test input of the base worlds, both parts; on the line where equal."""
    import altair as alt

    parts = [np.sqrt(p[0]) if are_variances else p[0] for p in (found, truth)]
    values = [
        {"part": name, "truth": float(t), "estimate": float(e)}
        for part, name in enumerate(NAMES)
        for e, t in zip(parts[0][part].ravel(), parts[1][part].ravel(), strict=True)
    ]
    ends = [0.0, float(max(p.max() for p in parts))]
    colours = alt.Scale(domain=list(NAMES), range=list(figures.COLOURS[:2]))
    points = (
        alt.Chart(alt.Data(values=values))
        .mark_point(size=20)
        .encode(
            x=alt.X("truth:Q", title=f"truth, {unit}"),
            y=alt.Y("estimate:Q", title=f"estimate, {unit}"),
            color=alt.Color("part:N", title=None, scale=colours),
            shape=alt.Shape("part:N", title=None, scale=alt.Scale(domain=list(NAMES))),
        )
    )
    equal = "estimate = truth"
    dashed = alt.StrokeDash("line:N", title=None, scale=alt.Scale(domain=[equal], range=[[4, 4]]))
    line = (
        alt.Chart(alt.Data(values=[{"line": equal, "truth": x, "estimate": x} for x in ends]))
        .mark_line(color=figures.LEVEL)
        .encode(x="truth:Q", y="estimate:Q", strokeDash=dashed)
    )
    return (line + points).properties(
        title=figures.titled("Estimate against truth at every test input"), width=300, height=300
    )
