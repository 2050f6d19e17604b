"""Several runs of active learning or active testing together: figures, and what can be said of them.

A sentence names a difference only where its interval shows it. Runs of one line differ in their seeds; lines
are compared if they differ in either method or variant, paired by seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple, Protocol, runtime_checkable

import altair as alt
import numpy as np

from bench.contract import Arrays
from bench.errors import UsageError
from bench.records import Record
from bench.studies import bands
from bench.studies.active import GUIDES, OBJECTIVES, Learning, Trajectories

POINTS, LABELS = "acquired points M", "test labels M"
FEWEST = 3
"""Runs from which on an interval over runs is given."""
_TINY = 1e-300

Models = Mapping[str, Trajectories]
"""What a run of active testing measured: of the `full` model, and of the `small` one."""


@runtime_checkable
class Measured(Protocol):
    """A task whose runs `comparison` can take."""

    def measured(self, arrays: Arrays) -> Learning | Models:
        """What a run measured, from its arrays."""


class Run(NamedTuple):
    """A run of active learning or active testing: name of its task, identity of its method, seed.

    `variant` names the settings of the task that are not those of the preset standard.
    """

    task: str
    method: str
    variant: str
    seed: int
    found: Learning | Models

    @classmethod
    def of(cls, record: Record, found: Learning | Models) -> Run:
        """What a committed or just finished run measured."""
        variant = record.task.identity.removeprefix(record.task.name).removeprefix("+")
        return cls(record.task.name, record.method.identity, variant, record.seed, found)

    @property
    def line(self) -> str:
        """Method and variant: what runs of other seeds share."""
        return ", ".join(filter(None, (self.method, self.variant)))


def learning_charts(
    lines: Mapping[str, Sequence[Learning]], notes: Sequence[str] = (), kind: bands.Kind = "standard_error"
) -> dict[str, Any]:
    """Test NLL, accuracy and overfitting bias against M.

    After Farquhar 2022 (docs/sources.md), Figs 5.5, 5.6, 5.9 and C.3 to C.7.

    The first panel compares the lines under R~ and LURE; then each has its own with all objectives. A single
    trajectory has no band.

    Args:
        lines: Line -> its trajectories.
        notes: Further lines of the titles.
        kind: Of the bands.
    """
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
                name: _band(np.stack([getattr(t, measure)[:, i] for t in trajectories]), kind)
                for i, name in enumerate(OBJECTIVES.values())
            }
            for line, trajectories in lines.items()
        }
        if len(lines) > 1:
            both = (OBJECTIVES["plain"], OBJECTIVES["lure"])
            mixed = {f"{line}, {name}": own[name] for line, own in panels.items() for name in both}
            panels = {"R~ against LURE": mixed} | panels
        charts[measure] = alt.concat(
            *(bands.chart(own, x, [line, *notes], POINTS, y_title) for line, own in panels.items()), columns=2
        ).resolve_scale(color="independent")
    return charts


def error_charts(lines: Mapping[str, Sequence[Models]], notes: Sequence[str] = ()) -> dict[str, Any]:
    """Errors of risk estimates against M: Farquhar 2022, Fig. 5.7 (full), Figs 5.8b, 5.8c and C.1b (small).

    Args:
        lines: Line -> its runs, whose trajectories are pooled.
        notes: Further lines of the titles.
    """
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
        around = {name: bands.band(values, "standard_error") for name, values in errors.items()}
        positive = {n: bands.Band(*(v.clip(min=_TINY) for v in own)) for n, own in around.items()}
        title = [line, *notes, f"fully trained; {bands.CAPTIONS['standard_error']}"]
        y_title = "mean squared error, nats squared"
        charts["squared_error"].append(bands.chart(positive, x, title, LABELS, y_title, logarithmic=True))
        own = {name: bands.band(values, "sd") for name, values in biases.items()}
        title = [line, *notes, f"trained on few points, softmax; {bands.CAPTIONS['sd']}"]
        y_title = "risk minus estimate, nats"
        charts["bias"].append(bands.chart(own, x, title, LABELS, y_title, levels={"unbiased": 0.0}))
        spread = {name: values.var(0, ddof=1).clip(min=_TINY) for name, values in biases.items()}
        own = {name: bands.Band(v, v, v) for name, v in spread.items()}
        title = [line, *notes, "trained on few points, softmax"]
        y_title = "variance, nats squared"
        charts["variance"].append(bands.chart(own, x, title, LABELS, y_title, logarithmic=True))
    return {
        name: alt.concat(*panels, columns=2).resolve_scale(color="independent")
        for name, panels in charts.items()
    }


def comparison(runs: Sequence[Run], kind: bands.Kind = "standard_error") -> tuple[dict[str, Any], list[str]]:
    """Figures of several runs, and what can be said of them; only what an interval shows is said.

    Args:
        runs: In any order; runs of one task and line are told apart by their seeds.
        kind: Of the bands over trajectories of active learning.

    Returns:
        Charts by name, and sentences.

    Raises:
        UsageError: If a run is given twice, or runs of a line were tested at other M.
    """
    charts: dict[str, Any] = {}
    sentences: list[str] = []
    for task in sorted({run.task for run in runs}):
        lines: dict[str, dict[int, Any]] = {}
        of: dict[str, Run] = {}
        for run in sorted((r for r in runs if r.task == task), key=lambda r: (r.line, r.seed)):
            of_line, of[run.line] = lines.setdefault(run.line, {}), run
            if run.seed in of_line:
                raise UsageError(f"{task}, {run.line}: seed {run.seed} is given twice")
            of_line[run.seed] = run.found
        every = [found for of_line in lines.values() for found in of_line.values()]
        grids = {tuple((f if isinstance(f, Learning) else f["full"]).points.tolist()) for f in every}
        if len(grids) > 1:
            raise UsageError(f"{task}: the runs measured at different numbers of points; draw them apart")
        seeds = {line: list(of_line.values()) for line, of_line in lines.items()}
        if isinstance(every[0], Learning):
            found = learning_charts(seeds, [task, bands.CAPTIONS[kind]], kind)
            sentences += _of_learning(task, lines, of)
        else:
            found = error_charts(seeds, [task])
            sentences += _of_testing(task, lines, of)
        charts |= {f"{task}-{name}": chart for name, chart in found.items()}
    return charts, sentences


def _pairs(
    lines: Mapping[str, Mapping[int, Any]], of: Mapping[str, Run]
) -> Iterator[tuple[str, str, list[int]]]:
    """Pairs of lines that differ in either method or variant, with the seeds that both have."""
    for first, second in combinations(lines, 2):
        seeds = sorted(lines[first].keys() & lines[second].keys())
        is_one_change = (of[first].method == of[second].method) != (of[first].variant == of[second].variant)
        if seeds and is_one_change:
            yield first, second, seeds


def _of_learning(task: str, lines: Mapping[str, Mapping[int, Learning]], of: Mapping[str, Run]) -> list[str]:
    """Costs of removing the bias, and differences of lines, in mean test NLL; paired by seed."""
    order = list(OBJECTIVES)
    nll = {
        line: {seed: dict(zip(order, found.nll.mean(0), strict=True)) for seed, found in of_line.items()}
        for line, of_line in lines.items()
    }
    sentences = []
    for line, of_line in nll.items():
        for o in order[1:]:
            cost = _interval([found[o] - found["plain"] for found in of_line.values()])
            what = f"{task}, {line}: {OBJECTIVES[o]} minus R~ in mean test NLL {cost}"
            sentences.append(what + cost.said("it costs", "it helps"))
    for first, second, seeds in _pairs(lines, of):
        by = {o: _interval([nll[first][s][o] - nll[second][s][o] for s in seeds]) for o in order}
        sentences += [
            f"{task}: {first} minus {second} in mean test NLL, both with {OBJECTIVES[o]}, {difference}"
            + difference.said(f"{second} is better", f"{first} is better")
            for o, difference in by.items()
        ]
        sentences += [
            f"{task}: removing the bias flips the order of {first} and {second} ({OBJECTIVES[o]} against R~)"
            for o in order[1:]
            if of[first].variant == of[second].variant and by["plain"].sign * by[o].sign < 0
        ]
    return sentences


def _of_testing(task: str, lines: Mapping[str, Mapping[int, Models]], of: Mapping[str, Run]) -> list[str]:
    """Whether scores guide better than chance, run by run, and which line's do so better, over seeds.

    A ratio that its exact lower bound excludes is not compared.
    """
    sentences = []
    logs: dict[tuple[str, str], dict[int, float]] = {}
    for line, of_line in lines.items():
        for seed, tested in of_line.items():
            full = tested["full"]
            for guide in GUIDES:
                centre, low, high = (float(v[-1]) for v in full.ratio(guide))
                ratio = Interval(centre, low, high, len(full.estimates["uniform"]["plain"]), 1.0)
                least = float(full.ratio_at_least(guide)[-1])
                if least > 1:
                    said = (
                        f"; its draws miss the rare ones that make it at least {least:.2g}: it guides worse"
                    )
                else:
                    said = ratio.said("it guides worse", "it guides better")
                    logs.setdefault((guide, line), {})[seed] = float(np.log(ratio.centre))
                sentences.append(
                    f"{task}, {line}, seed {seed}: at M = {full.points[-1]} the mean squared error of "
                    f"{guide} sampling with LURE over that of uniform sampling {ratio}{said}"
                )
    for guide in GUIDES:
        seen = {line: logs[guide, line] for line in lines if (guide, line) in logs}
        for first, second, seeds in _pairs(seen, of):
            difference = _interval([logs[guide, first][s] - logs[guide, second][s] for s in seeds])
            sentences.append(
                f"{task}: {first} minus {second} in the logarithm of that ratio, {guide}, {difference}"
                + difference.said(f"{second} guides better", f"{first} guides better")
            )
    return sentences


class Interval(NamedTuple):
    """A mean with its 95% interval over so many repetitions, to be compared with `null`; NaN if too few."""

    centre: float
    low: float
    high: float
    repetitions: int
    null: float = 0.0

    def __str__(self) -> str:
        if np.isnan(self.low):
            return f"is {self.centre:.4g} ({self.repetitions} runs: no interval below {FEWEST})"
        return f"is {self.centre:.4g} ({self.low:.4g} to {self.high:.4g}, 95%, n = {self.repetitions})"

    @property
    def sign(self) -> int:
        """Of mean minus null where the interval excludes null, else 0."""
        return int(self.low > self.null) - int(self.high < self.null)

    def said(self, above: str, below: str) -> str:
        """What the interval shows; nothing is shown where it holds null."""
        return {1: f": {above}", -1: f": {below}", 0: ": no difference shown"}[self.sign]


def _interval(values: Sequence[float]) -> Interval:
    """Student's interval of the mean over runs."""
    if len(values) < FEWEST:
        return Interval(float(np.mean(values)), np.nan, np.nan, len(values))
    centre, low, high = (float(v[0]) for v in bands.simultaneous_band(np.array(values)[:, None]))
    return Interval(centre, low, high, len(values))


def _band(values: np.ndarray, kind: bands.Kind) -> bands.Band:
    """Of one repetition the curve itself."""
    return bands.band(values, kind) if len(values) > 1 else bands.Band(values[0], values[0], values[0])
