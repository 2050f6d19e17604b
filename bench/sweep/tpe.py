"""The tree-structured Parzen estimator as a search of settings, by optuna.

Source: Bergstra, Bardenet, Bengio, Kegl 2011, "Algorithms for Hyper-Parameter Optimization", section 4. The
first configurations are those of the random search; each later one is drawn where the estimator expects most
of the criterion, given the configurations of earlier rounds. Those of one round are asked for one after
another, the unfinished ones as if they had turned out badly, and run side by side. So a configuration depends
on the seed, its number and what came before its round, and on no timing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import optuna
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from bench import randomness

STARTUP = 10
"""Configurations before the first that is not of the random search."""

Tried = tuple[dict[str, Any], float | None]
"""Settings, and the criterion; None of a configuration that gave none."""


def suggested(
    space: Mapping[str, Any], tried: Sequence[Tried], number: int, seed: int, higher_is_better: bool
) -> list[dict[str, Any]]:
    """The configurations of a round, as optuna suggests them.

    Args:
        space: Setting -> range, as `SEARCH` has them.
        tried: Those of earlier rounds, in order.
        number: How many.
        seed: Of the search.
        higher_is_better: Of the criterion.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    distributions = {name: _distribution(range_) for name, range_ in space.items()}
    trials = [trial for each in tried if (trial := _trial(*each, distributions)) is not None]
    found: list[dict[str, Any]] = []
    for place in range(number):
        study = optuna.create_study(
            direction="maximize" if higher_is_better else "minimize",
            sampler=optuna.samplers.TPESampler(
                seed=randomness.derive(seed, "tpe", len(tried) + place) % 2**32, constant_liar=True
            ),
        )
        study.add_trials(trials)
        asked = study.ask(distributions)
        found.append({name: asked.params[name] for name in space})
        trials.append(
            create_trial(state=TrialState.RUNNING, params=asked.params, distributions=distributions)
        )
    return found


def _distribution(range_: Any) -> Any:
    if isinstance(range_, list):
        return CategoricalDistribution(range_)
    low, high, scale = range_
    kind = IntDistribution if isinstance(low, int) and isinstance(high, int) else FloatDistribution
    return kind(low, high, log=scale == "log")


def _trial(
    values: dict[str, Any], value: float | None, distributions: Mapping[str, Any]
) -> FrozenTrial | None:
    """A configuration as optuna has it; None if it lies outside the ranges, as the untuned one may."""
    state = TrialState.FAIL if value is None else TrialState.COMPLETE
    try:
        return create_trial(state=state, params=values, distributions=dict(distributions), value=value)
    except ValueError:
        return None
