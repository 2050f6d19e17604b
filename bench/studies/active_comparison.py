"""Several runs of active learning or active testing together: figures, and what can be said of them.

A sentence names a difference only where its interval shows one. A task says by `measured(arrays)` what each
of its runs measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bench import figures, intervals
from bench.comparison import Comparison, FinishedRun, Lines, by_task, pairs
from bench.errors import UsageError
from bench.intervals import Band, Interval, student
from bench.studies.active import OBJECTIVES, Learning
from bench.studies.testing import GUIDES, Trajectories

POINTS, LABELS = "acquired points M", "test labels M"
_TINY = 1e-300

Models = Mapping[str, Trajectories]
"""What a run of active testing measured: of the `full` model, and of the `small` one."""


def compare_learning(runs: Sequence[FinishedRun]) -> Comparison:
    """Learning curves of active learning, a line per method and variant; costs of removing the bias.

    Raises:
        UsageError: If a run is given twice, or runs of a task were tested at other M.
    """

    def draw(task: str, lines: Mapping[str, Sequence[Learning]]) -> dict[str, Any]:
        return learning_charts(lines, [task, intervals.CAPTIONS["standard_error"]])

    return _compare(runs, lambda found: found.points, draw, _of_learning)


def compare_testing(runs: Sequence[FinishedRun]) -> Comparison:
    """Errors and biases of risk estimates, a line per method and variant; which scores guide better.

    Raises:
        UsageError: If a run is given twice, or runs of a task were tested at other M.
    """

    def draw(task: str, lines: Mapping[str, Sequence[Models]]) -> dict[str, Any]:
        return error_charts(lines, [task])

    return _compare(runs, lambda found: found["full"].points, draw, _of_testing)


def _compare(
    runs: Sequence[FinishedRun],
    points: Callable[[Any], np.ndarray],
    draw: Callable[[str, dict[str, list[Any]]], dict[str, Any]],
    say: Callable[[str, dict[str, dict[int, Any]], Lines], list[str]],
) -> Comparison:
    """Charts and sentences of every task; `points` are the M at which a run measured."""
    charts: dict[str, Any] = {}
    sentences: list[str] = []
    for task, lines in by_task(runs).items():
        found = {
            line: {seed: run.task.measured(run.arrays) for seed, run in of.items()}
            for line, of in lines.items()
        }
        measured = {line: list(of.values()) for line, of in found.items()}
        if len({tuple(points(each).tolist()) for of in measured.values() for each in of}) > 1:
            raise UsageError(f"{task}: the runs measured at different numbers of points; draw them apart")
        charts |= {f"{task}-{name}": chart for name, chart in draw(task, measured).items()}
        sentences += say(task, found, lines)
    return Comparison(charts, sentences=sentences)


def learning_charts(lines: Mapping[str, Sequence[Learning]], notes: Sequence[str] = ()) -> dict[str, Any]:
    """Test NLL, accuracy and overfitting bias against M.

    After Farquhar 2022 (docs/sources.md), Figs 5.5, 5.6, 5.9 and C.3 to C.7.

    The first panel compares the lines under R~ and LURE; then each has its own with all objectives. A single
    trajectory has no band.

    Args:
        lines: Line -> its trajectories.
        notes: Further lines of the titles.
    """
    import altair as alt

    measures = {
        "nll": "test NLL, nats",
        "accuracy": "test accuracy",
        "overfitting_bias": "overfitting bias, nats",
    }
    x = next(iter(lines.values()))[0].points.tolist()
    charts = {}
    for measure, y_title in measures.items():
        panels = {
            line: {
                name: _band(np.stack([getattr(t, measure)[:, i] for t in trajectories]))
                for i, name in enumerate(OBJECTIVES.values())
            }
            for line, trajectories in lines.items()
        }
        if len(lines) > 1:
            both = (OBJECTIVES["plain"], OBJECTIVES["lure"])
            mixed = {f"{line}, {name}": own[name] for line, own in panels.items() for name in both}
            panels = {"R~ against LURE": mixed} | panels
        charts[measure] = alt.concat(
            *(figures.bands(own, x, [line, *notes], POINTS, y_title) for line, own in panels.items()),
            columns=2,
        ).resolve_scale(**figures.APART)
    return charts


def error_charts(lines: Mapping[str, Sequence[Models]], notes: Sequence[str] = ()) -> dict[str, Any]:
    """Errors of risk estimates against M: Farquhar 2022, Fig. 5.7 (full), Figs 5.8b, 5.8c and C.1b (small).

    Args:
        lines: Line -> its runs, whose trajectories are pooled.
        notes: Further lines of the titles.
    """
    import altair as alt

    x = next(iter(lines.values()))[0]["full"].points.tolist()
    charts: dict[str, list[Any]] = {"squared_error": [], "bias": [], "variance": []}
    for line, runs in lines.items():
        errors = {
            f"{proposal}, {OBJECTIVES[e]}": np.concatenate(
                [r["full"].squared_error(proposal, e) for r in runs]
            )
            for proposal, e in (*((guide, "lure") for guide in GUIDES), ("uniform", "plain"))
        }
        biases = {
            name: np.concatenate([r["small"].bias("softmax", e) for r in runs])
            for e, name in OBJECTIVES.items()
        }
        around = {name: intervals.band(values, "standard_error") for name, values in errors.items()}
        positive = {n: Band(*(v.clip(min=_TINY) for v in own)) for n, own in around.items()}
        title = [line, *notes, f"fully trained; {intervals.CAPTIONS['standard_error']}"]
        y_title = "mean squared error, nats squared"
        charts["squared_error"].append(figures.bands(positive, x, title, LABELS, y_title, logarithmic=True))
        own = {name: intervals.band(values, "sd") for name, values in biases.items()}
        title = [line, *notes, f"trained on few points, softmax; {intervals.CAPTIONS['sd']}"]
        y_title = "risk minus estimate, nats"
        charts["bias"].append(figures.bands(own, x, title, LABELS, y_title, levels={"unbiased": 0.0}))
        spread = {name: values.var(0, ddof=1).clip(min=_TINY) for name, values in biases.items()}
        own = {name: Band.flat(v) for name, v in spread.items()}
        title = [line, *notes, "trained on few points, softmax"]
        y_title = "variance, nats squared"
        charts["variance"].append(figures.bands(own, x, title, LABELS, y_title, logarithmic=True))
    return {
        name: alt.concat(*panels, columns=2).resolve_scale(**figures.APART) for name, panels in charts.items()
    }


def _of_learning(task: str, found: Mapping[str, Mapping[int, Learning]], lines: Lines) -> list[str]:
    """Costs of removing the bias, and differences of lines, in mean test NLL; paired by seed."""
    nll = {
        line: {o: {seed: each.nll.mean(0)[i] for seed, each in of.items()} for i, o in enumerate(OBJECTIVES)}
        for line, of in found.items()
    }
    unbiased = [o for o in OBJECTIVES if o != "plain"]
    sentences = []
    for line, by in nll.items():
        for o in unbiased:
            cost = student(intervals.differences(by[o], by["plain"]))
            what = f"{task}, {line}: {OBJECTIVES[o]} minus R~ in mean test NLL is {cost:.4g}"
            sentences.append(what + cost.said("it costs", "it helps"))
    for first, second in pairs(lines):
        gap = {o: student(intervals.differences(nll[first][o], nll[second][o])) for o in OBJECTIVES}
        sentences += [
            f"{task}: {first} minus {second} in mean test NLL, both with {OBJECTIVES[o]}, is {gap[o]:.4g}"
            + gap[o].said(f"{second} is better", f"{first} is better")
            for o in OBJECTIVES
        ]
        is_same_variant = len({next(iter(lines[line].values())).variant for line in (first, second)}) == 1
        sentences += [
            f"{task}: removing the bias flips the order of {first} and {second} ({OBJECTIVES[o]} against R~)"
            for o in unbiased
            if is_same_variant and gap["plain"].sign() * gap[o].sign() < 0
        ]
    return sentences


def _of_testing(task: str, found: Mapping[str, Mapping[int, Models]], lines: Lines) -> list[str]:
    """Whether scores guide better than chance, run by run, and which line's do so better, over seeds.

    A ratio that its exact lower bound excludes is not compared.
    """
    sentences = []
    logs: dict[str, dict[str, dict[int, float]]] = {g: {line: {} for line in lines} for g in GUIDES}
    for line, of_line in found.items():
        for seed, tested in of_line.items():
            full = tested["full"]
            for guide in GUIDES:
                centre, low, high = (float(v[-1]) for v in full.ratios[guide])
                trajectories = len(full.estimates["uniform"]["plain"])
                ratio = Interval(centre, low, high, f"n = {trajectories}")
                least = float(full.ratio_at_least(guide)[-1])
                if least > 1:
                    said = (
                        f"; its draws miss the rare ones that make it at least {least:.2g}: it guides worse"
                    )
                else:
                    said = ratio.said("it guides worse", "it guides better", null=1.0)
                    logs[guide][line][seed] = float(np.log(centre))
                sentences.append(
                    f"{task}, {line}, seed {seed}: at M = {full.points[-1]} the mean squared error of "
                    f"{guide} sampling with LURE over that of uniform sampling is {ratio:.4g}{said}"
                )
    for guide, log in logs.items():
        for first, second in pairs(lines):
            if change := intervals.differences(log[first], log[second]):
                difference = student(change)
                sentences.append(
                    f"{task}: {first} minus {second} in the logarithm of that ratio, {guide}, is "
                    f"{difference:.4g}" + difference.said(f"{second} guides better", f"{first} guides better")
                )
    return sentences


def _band(values: np.ndarray) -> Band:
    """Mean and standard error `[M]` of trajectories `[R, M]`; of one the curve itself."""
    return intervals.band(values, "standard_error") if len(values) > 1 else Band.flat(values[0])
