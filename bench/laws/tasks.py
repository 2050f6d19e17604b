"""Laws that every task obeys, as plain functions; each raises AssertionError if it does not hold.

The law of the held-out truth has a file of its own (`bench/laws/truth.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from bench import cifar, data, metrics, tables
from bench.contract import CAPABILITIES, Arrays, Row, Task, Undefined
from bench.laws.truth import Replaced
from bench.photographs import photographs
from bench.runs.records import Record
from bench.runs.registry import misleads
from bench.spec import Layout, misfit
from bench.studies import references, topics

MOST_BYTES = 4 * 2**20
"""Of a run's arrays."""

# ------------------------------------------------------------------------------------------- what a task says


def spec_is_complete(task: Task) -> None:
    """A leaderboard can be made of it; it needs no data."""
    spec = task.spec
    assert spec.main_metric in spec.metrics, f"main_metric {spec.main_metric} is none of its metrics"
    assert not spec.metrics[spec.main_metric].may_be_undefined, "the main metric may be undefined"
    validation = spec.validation_metric
    assert validation is None or validation in spec.metrics, f"validation_metric {validation} is no metric"
    assert spec.version >= 1, "version must be 1 or more"
    assert spec.min_seeds >= 1, "min_seeds must be 1 or more"
    assert spec.question.endswith("?"), f"question '{spec.question}' is none: it must end with ?"
    assert len(spec.source) > 5, "source must name a document"
    assert spec.requires <= CAPABILITIES.keys(), f"requires {sorted(spec.requires - CAPABILITIES.keys())}"
    assert spec.self_reported <= spec.metrics.keys(), "self_reported names what is no metric"
    for name, metric in spec.metrics.items():
        is_named = name.replace("_", "").isalnum() and name == name.lower()
        assert is_named, f"the metric {name}: lower case letters, digits and _"
        assert metric.best != metric.worst, f"{name}: best and worst are equal"
        assert not math.isnan(metric.best), f"{name}: best is no number"
        assert not math.isnan(metric.worst), f"{name}: worst is no number"
        assert metric.higher_is_better == (metric.best > metric.worst), name
        assert metric.description, f"{name} has no description"
        assert metric.unit, f"{name} has no unit"
        if metric.unit == "fraction":
            assert {metric.best, metric.worst} <= {-1, 0, 1}, f"{name}: a fraction lies between 0 and 1"


def file_says_what_would_mislead(task: Task) -> None:
    """The docstring has a paragraph `What would mislead:`, which pages show beside the numbers."""
    said = misleads(type(task))
    assert len(said.split()) >= 10, "the docstring has no paragraph 'What would mislead: ..'"
    assert said.endswith("."), "the paragraph 'What would mislead:' must end with a full stop"


# ---------------------------------------------------------------------------------- what a finished run left


def scores_are_those_of_the_spec(task: Task, arrays: Arrays) -> None:
    """`score` gives the metrics of the spec, each a float within its range, or undefined where it may be."""
    scores = task.score(arrays)
    assert scores.keys() == task.spec.metrics.keys(), (
        f"score gives {', '.join(sorted(scores))}; the spec names {', '.join(sorted(task.spec.metrics))}"
    )
    for name, value in scores.items():
        metric = task.spec.metrics[name]
        if isinstance(value, Undefined):
            assert metric.may_be_undefined, f"{name} is undefined, and the spec does not say that it may be"
            assert value.reason, f"{name} is undefined without a reason"
            continue
        assert type(value) is float, f"{name} is {type(value).__name__}, not float"
        low, high = sorted((metric.best, metric.worst))
        assert low <= value <= high, f"{name} {value:.6g} lies outside {low} to {high}"


def collapsed_predictions_are_scored(task: Task, arrays: Arrays) -> None:
    """A posterior that collapsed is a result, and has scores; an undefined one only where the spec says it.

    The collapses: every draw is the first one; none tells one class from another; all are sure of the first
    class; each is sure of another one. A sure draw gives other classes the least probability that is stored.
    """
    layouts = {k: layout for k, layout in (task.layouts() or {}).items() if k not in task.targets()}
    for name, arrays_of in _collapses(arrays, layouts):
        try:
            scores_are_those_of_the_spec(task, arrays_of)
        except Exception as error:
            raise AssertionError(f"predictions that collapsed ({name}): {error}") from error


def _collapses(arrays: Arrays, layouts: dict[str, Layout]) -> Iterator[tuple[str, Arrays]]:
    """Arrays of predictions that collapsed, with the collapse in words; none of what predicts nothing."""
    draws = {key: layout.shape.index("S") for key, layout in layouts.items() if "S" in layout.shape}
    if draws:
        first = {key: arrays[key].take([0], axis) for key, axis in draws.items()}
        yield (
            "one draw",
            arrays | {k: np.repeat(first[k], arrays[k].shape[axis], axis) for k, axis in draws.items()},
        )
    classes = {key: arrays[key].copy() for key, layout in layouts.items() if layout.is_log_probs}
    if not classes:
        return
    # Draws that agree share no information about a label.
    agreeing = arrays | {key: np.zeros_like(arrays[key]) for key in layouts if "information" in key}
    for array in classes.values():
        array[...] = -np.log(array.shape[-1])
    yield "no class told from another", agreeing | classes
    for array in classes.values():
        array[...] = metrics.LOWEST
        array[..., 0] = 0
    yield "sure of one class", agreeing | classes
    for key in classes.keys() & draws.keys():
        of_draws = np.moveaxis(classes[key], draws[key], 0)
        of_draws[...] = metrics.LOWEST
        for draw, array in enumerate(of_draws):
            array[..., draw % array.shape[-1]] = 0
    if classes.keys() & draws.keys():
        yield "each draw sure of another class", arrays | classes


def score_is_pure(task: Task, arrays: Arrays) -> None:
    """`score` is of the arrays alone, reads no data, changes nothing, and says the same again."""

    def refuse(*_: Any) -> None:
        raise AssertionError("score read data or a reference")

    task = type(task)(task.settings)  # whatever the other has read
    with Replaced() as replaced:
        readers = ((data, "load"), (cifar, "load"), (tables, "load"), (photographs, "prepared"))
        for module, reader in (*readers, (topics, "load"), (references, "read")):
            replaced(module, reader, refuse)
        for array in arrays.values():
            array.flags.writeable = False
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(1)
            first = task.score(arrays)
            torch.default_generator.manual_seed(2)
            assert task.score(arrays) == first, "a second call gives other scores"
        assert task.score(dict(reversed(arrays.items()))) == first, "the order of the arrays decides"


def score_depends_on_the_targets(task: Task, arrays: Arrays) -> None:
    """A score that ignores the truth, or one array of it, would pass every other law."""
    score = task.score(arrays)
    for key in task.targets():
        moved = np.roll(arrays[key], arrays[key].shape[-1] // 2, axis=-1)
        assert (moved != arrays[key]).any(), f"{key} is the same in another order"
        assert task.score(arrays | {key: moved}) != score, f"{key} in another order changes no score"


def losses_are_of_the_main_metric(task: Task, arrays: Arrays) -> None:
    """Their mean is the main metric, and two test targets that change places move no loss but their own."""
    losses, main = task.losses(arrays), task.spec.main_metric
    if losses is None:
        return
    (key,) = set(arrays) & {"labels", "targets"}
    assert losses.shape == arrays[key].shape[:1], f"losses {losses.shape}, {key} {arrays[key].shape}"
    assert _close(losses.mean(), task.score(arrays)[main]), f"the mean of the losses is not {main}"
    first, *others = np.random.default_rng(0).permutation(arrays[key].shape[-1])
    for second in others:
        swapped = arrays[key].copy()
        part = swapped if swapped.ndim == 1 else swapped[0]  # of splits, within the first
        part[[first, second]] = part[[second, first]]
        moved = np.asarray(task.losses(arrays | {key: swapped}))
        if (moved != losses).any():
            break
    assert (moved != losses).any(), f"other {key} change no loss"
    own = {first, second} if part is swapped else {0}
    assert set(np.flatnonzero(moved != losses)) <= own, f"{key} of some examples move losses of others"
    assert _close(moved.mean(), task.score(arrays | {key: swapped})[main]), f"the losses are not of {main}"


def _close(one: Any, two: Any) -> bool:
    return math.isclose(float(one), float(two), rel_tol=1e-12, abs_tol=1e-12)


def arrays_are_small_and_of_plain_kinds(task: Task, arrays: Arrays) -> None:
    """Integers and finite floats, 4 MiB at most, the targets among them."""
    for name, array in arrays.items():
        assert array.dtype.kind in "uif", f"{name} is of {array.dtype}"
        assert np.isfinite(array).all(), f"{name} holds what is not finite"
    size = sum(array.nbytes for array in arrays.values())
    assert size <= MOST_BYTES, f"the arrays take {size / 2**20:.1f} MiB, more than {MOST_BYTES // 2**20}"
    assert task.targets().keys() <= arrays.keys(), "targets are missing"


def arrays_are_those_that_the_task_names(task: Task, arrays: Arrays) -> None:
    """Names, types, axes and sizes of a ranked task are those of `layouts`; probabilities sum to 1."""
    layouts = task.layouts()
    if layouts is None:
        assert not task.spec.ranked, "a ranked task must have layouts"
        return
    wrong = misfit(layouts, {key: (array.dtype.name, array.shape) for key, array in arrays.items()})
    assert wrong is None, wrong
    for key, layout in layouts.items():
        if layout.is_log_probs:
            away = np.abs(np.exp(arrays[key].astype(float)).sum(-1) - 1).max()
            assert away <= 2e-3, f"the probabilities of {key} sum to 1 but for {away:.2g}"


def curves_are_finite(task: Task, arrays: Arrays) -> None:
    """Rows of `curves` are `Row`s with finite numbers, one for each place."""
    rows = task.curves(arrays)
    for row in rows:
        assert isinstance(row, Row), f"{row!r} is no Row"
        assert math.isfinite(row.x), f"{row}: x is not finite"
        assert math.isfinite(row.value), f"{row}: its value is not finite"
    assert len({row[:3] for row in rows}) == len(rows), "two rows of curves are of one place"


def draws_are_those_of_the_settings(task: Task, record: Record) -> None:
    """The run asked the engine for as many draws as the settings say: `test_samples`, `acquisition_samples`.

    Every other number that it asked for is a setting too, whose name ends in `_samples`. A task that has no
    setting `test_samples` asks for what it likes.
    """
    said = {name: value for name, value in vars(task.settings).items() if name.endswith("_samples")}
    if "test_samples" not in said:
        return
    assert record.draws, "the record does not say how many draws were asked for"
    asked = {counted.asked for counted in record.draws}
    for name in said.keys() & {"test_samples", "acquisition_samples"}:
        assert said[name] in asked, f"{name} is {said[name]}, asked for were {sorted(asked)}"
    others = sorted(asked - set(said.values()))
    assert not others, f"asked for {others} draws, and the settings say {said}"


def validation_metric_is_logged(task: Task, record: Record) -> None:
    """The run logged the metric by which a search chooses, where its settings set aside what that needs."""
    metric = task.spec.validation_metric
    own = vars(task.settings)
    if metric is None or any(own[name] != value for name, value in type(task).tuned_with.items()):
        return
    assert metric in record.validation, f"the run logged no {metric}, which the spec names for validation"


OF_WORDS = (spec_is_complete, file_says_what_would_mislead)
"""Laws of what a task says."""
OF_RUNS = (
    scores_are_those_of_the_spec,
    collapsed_predictions_are_scored,
    score_is_pure,
    score_depends_on_the_targets,
    losses_are_of_the_main_metric,
    arrays_are_small_and_of_plain_kinds,
    arrays_are_those_that_the_task_names,
    curves_are_finite,
)
"""Laws of what a run of the task left."""
OF_RECORDS = (draws_are_those_of_the_settings, validation_metric_is_logged)
"""Laws of what the record says of the run."""
