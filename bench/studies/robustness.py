"""Robustness to hyperparameters: shared random configurations, and how many of them learn something.

Source: Farquhar 2022, thesis "Understanding Approximation" (docs/sources.md), section 4.3 (Fig. 4.5a) and
appendix B.3: 86 configurations, each tried with mean-field VI and with radial posteriors; 82% of the former
and 39% of the latter learned almost nothing, 11% and 44% were good. The source says neither what "nothing"
and "good" are, nor which configurations were drawn: LEARNED, GOOD and the seed of the draw are ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy import stats

from bench import figures, randomness
from bench.comparison import Comparison, FinishedRun
from bench.errors import UsageError
from bench.intervals import Band

COUNT = 86
LEARNED = 0.55
"""AUC from which on a run has learned something."""
GOOD = 0.02
"""A run is good whose AUC is at most so far below the best of all runs of the study."""
LARGEST = 256
"""Examples times samples of a training step, at most: larger ones did not fit the source's memory."""
PUBLISHED = {"mfvi": (0.82, 0.11), "radial": (0.39, 0.44)}
"""Shares that learned nothing, and that were good."""


@dataclass(frozen=True)
class Configuration:
    """What both methods are trained with.

    Attributes:
        optimizer: sgd (Nesterov momentum 0.9) or amsgrad.
        learning_rate: Its step size.
        rate_decay: Factor of the step size after every epoch.
        batch_size: Examples per step.
        train_samples: Weight samples per step.
        initial_rho: Start of rho for every weight.
        width: Share of the channels.
    """

    optimizer: str
    learning_rate: float
    rate_decay: float
    batch_size: int
    train_samples: int
    initial_rho: float
    width: float

    @property
    def of_method(self) -> dict[str, str | float | int]:
        """What is the method's to set; the first epoch trains the means alone, by NLL, as in the source."""
        own = {name: value for name, value in asdict(self).items() if name not in ("batch_size", "width")}
        return own | {"pretrain_epochs": 1}


def configurations(count: int = COUNT) -> list[Configuration]:
    """The configurations of the study, always the same: uniform draws from the source's lists."""
    draws = np.random.default_rng(randomness.derive(0, "retinopathy_robustness"))
    found: list[Configuration] = []
    while len(found) < count:
        optimizer = str(draws.choice(["sgd", "amsgrad"]))
        rates, decays = (
            ([1e-2, 1e-3, 1e-4], [1.0, 0.98, 0.96]) if optimizer == "sgd" else ([1e-3, 1e-4, 1e-5], [1.0])
        )
        drawn = Configuration(
            optimizer,
            float(draws.choice(rates)),
            float(draws.choice(decays)),
            int(draws.choice([16, 32, 64, 128, 256])),
            int(draws.choice([1, 2, 4])),
            float(draws.choice([-6.0, -4.0, -2.0, 0.0])),
            float(draws.choice([1.0, 5 / 8, 3 / 8])),
        )
        if drawn.batch_size * drawn.train_samples <= LARGEST:
            found.append(drawn)
    return found


CONFIGURATIONS = configurations()


def grid(task: str, methods: Sequence[str] = ("mfvi", "radial")) -> list[dict[str, Any]]:
    """Blocks of `bench sweep --grid`, one per configuration."""
    return [
        {"methods": list(methods), "tasks": task, "method": of.of_method, "task": {"configuration": number}}
        for number, of in enumerate(CONFIGURATIONS)
    ]


# ---------------------------------------------------------------------------------------------- outcomes

Trial = tuple[int, int]
"""Configuration and seed."""
Outcomes = Mapping[Trial, float | None]
"""Trial -> AUC, None where the fit diverged or has none."""


def share(count: int, of: int) -> str:
    """A share with its Wilson interval."""
    low, high = stats.binomtest(count, of).proportion_ci(0.95, "wilson")
    return f"{count} of {of}, {count / of:.2f} ({low:.2f} to {high:.2f})"


def learned(outcomes: Outcomes) -> set[Trial]:
    """Trials that learned something; a fit that diverged learned nothing."""
    return {trial for trial, auc in outcomes.items() if auc is not None and auc >= LEARNED}


def good(outcomes: Outcomes, best: float) -> set[Trial]:
    """Trials that are near the best AUC of the study."""
    return {trial for trial, auc in outcomes.items() if auc is not None and auc >= best - GOOD}


def paired(first: set[Trial], second: set[Trial]) -> tuple[int, int, float]:
    """How many are in the first set alone, how many in the second alone, and McNemar's exact p-value."""
    only = len(first - second), len(second - first)
    p = stats.binomtest(only[0], sum(only)).pvalue if sum(only) else 1.0
    return *only, float(p)


def compare(runs: Sequence[FinishedRun]) -> Comparison:
    """Shares that learned nothing and that are good, by method; pairs of methods by configuration and seed.

    Raises:
        UsageError: If a trial of a method is given twice, or runs differ in more than configuration and seed.
    """
    found: dict[str, dict[Trial, float | None]] = {}
    settings = set()
    for run in runs:
        trial = run.task.settings.configuration, run.seed
        of_method = found.setdefault(run.method_name, {})
        if trial in of_method:
            raise UsageError(f"{run.method_name}: configuration {trial[0]}, seed {trial[1]}, is given twice")
        of_method[trial] = run.metrics.get("auc")
        settings.add(
            (
                run.task_name,
                run.preset,
                *(v for k, v in sorted(asdict(run.task.settings).items()) if k != "configuration"),
            )
        )
    if len(settings) > 1:
        raise UsageError("runs of the robustness study must have the same preset and settings of the task")
    values = [auc for outcomes in found.values() for auc in outcomes.values() if auc is not None]
    best = max(values, default=float("nan"))
    rows, sentences = [], []
    for method, outcomes in sorted(found.items()):
        size = len(outcomes)
        nothing, near = size - len(learned(outcomes)), len(good(outcomes, best))
        diverged = sum(auc is None for auc in outcomes.values())
        rows.append(
            [method, str(size), share(nothing, size), share(near, size), str(diverged), _published(method)]
        )
    names = sorted(found)
    for i, first in enumerate(names):
        for second in names[i + 1 :]:
            both = found[first].keys() & found[second].keys()
            one, other = ({t: found[name][t] for t in both} for name in (first, second))
            for what, sets in (
                ("learned something", (learned(one), learned(other))),
                ("are good", (good(one, best), good(other, best))),
            ):
                a, b, p = paired(*sets)
                said = f"of {len(both)} shared trials {a} {what} with {first} alone, {b} with {second} alone"
                verdict = "undecided" if p >= 0.05 else f"{first if a > b else second} is more robust"
                sentences.append(f"{said} (McNemar's exact test, p = {p:.2g}): {verdict}")
    header = [
        "method",
        "trials",
        f"learned nothing (AUC < {LEARNED})",
        f"good (within {GOOD} of the best)",
    ]
    header += ["of them diverged", "published: nothing, good"]
    charts = {"robustness": chart(found)} if values else {}
    return Comparison(charts, header, rows, sentences)


def _published(method: str) -> str:
    return ", ".join(f"{value:.2f}" for value in PUBLISHED[method]) if method in PUBLISHED else ""


def chart(found: Mapping[str, Outcomes]) -> Any:
    """AUC of every method's configurations, the best first; one that diverged is shown at 0.5."""
    shortest = min(map(len, found.values()))
    series = {}
    for method, outcomes in sorted(found.items()):
        values = sorted((0.5 if auc is None else auc for auc in outcomes.values()), reverse=True)
        series[method] = Band.flat(np.array(values[:shortest]))
    title = "AUC of the same random configurations, the best first"
    return figures.bands(series, range(1, shortest + 1), title, "configurations by rank", "AUC")
