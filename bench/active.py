"""What active learning and active testing share: the data, labels one by one, objectives, scores.

Shapes: N points of a pool, M acquired points in order of acquisition, C classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import altair as alt
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from bench import acquisition, bands, data, networks, randomness, risk
from bench.contract import Arrays, NetworkFactory
from bench.errors import UsageError

NUM_CLASSES = 10
FLOOR = 0.1
"""Of the proposal `proportional`: no score counts less than this share of the mean score."""

# -------------------------------------------------------------------------------------------------- data


@dataclass(frozen=True)
class Sizes:
    """How a data set is used.

    Attributes:
        train_share: Factor on the shares of the classes that are kept of the training set.
        num_val: Points set aside for validation.
        mean: Of all published training pixels, in [0, 1].
        sd: Their standard deviation.
    """

    train_share: float
    num_val: int
    mean: float
    sd: float


SIZES = {
    "mnist": Sizes(0.25, 1000, 0.1307, 0.3081),
    "fashion_mnist": Sizes(0.25, 1000, 0.2860, 0.3530),
    "digits": Sizes(1.0, 100, 0.3053, 0.3755),
}


@dataclass(frozen=True, eq=False)
class Data:
    """A pool, points for validation, and a test set; inputs standardised, the same in every run.

    Attributes:
        pool: Inputs `[N, 1, H, W]`.
        pool_labels: Their labels `[N]`, for an `Oracle` to hand out.
        val: Inputs and labels set aside for early stopping.
        test: Inputs `[T, 1, H, W]`.
        test_labels: True labels `[T]`.
        digest: Of all images and labels.
    """

    pool: Tensor
    pool_labels: Tensor
    val: TensorDataset
    test: Tensor
    test_labels: Tensor
    digest: str


def load(name: str, balanced: bool = False, data_dir: str | None = None) -> Data:
    """The unbalanced data of active learning with noisy labels in pool and validation set.

    Args:
        name: One of SIZES.
        balanced: The variant with as many examples, the classes in their usual proportions.
        data_dir: As in `bench.data.load`.
    """
    sizes = SIZES[name]
    images = data.unbalanced(name, data_dir, sizes.train_share, balanced)
    inputs, labels, cut = standardise(name, images.train_inputs), images.train_labels, sizes.num_val
    return Data(
        pool=inputs[cut:],
        pool_labels=labels[cut:],
        val=TensorDataset(inputs[:cut], labels[:cut]),
        test=standardise(name, images.test_inputs),
        test_labels=images.test_labels,
        digest=images.digest,
    )


def standardise(name: str, inputs: Tensor) -> Tensor:
    """Pixels in [0, 1], minus the mean and over the standard deviation of the data set `name`."""
    return (inputs - SIZES[name].mean) / SIZES[name].sd


class Oracle:
    """Hands out the labels of a pool, one point at a time, and knows which were asked for.

    Args:
        labels: `[N]`.
    """

    def __init__(self, labels: Tensor) -> None:
        self._labels = labels
        self.asked: list[int] = []

    def label(self, index: int) -> int:
        """The label of one point."""
        self.asked.append(index)
        return int(self._labels[index])


def network(kind: Literal["conv", "mlp"], pixels: int) -> NetworkFactory:
    """The networks of thesis 004, appendix C.1: the convolutional one, or one hidden layer of 50 units.

    Args:
        kind: Which.
        pixels: Inputs of the latter.
    """
    if kind == "conv":
        return networks.lenet
    return partial(networks.mlp, pixels, NUM_CLASSES, (50,))


# ------------------------------------------------------------------------------- objectives and proposals

Objective = Literal["plain", "pure", "lure"]
OBJECTIVES: dict[Objective, str] = {"plain": "R~", "pure": "PURE", "lure": "LURE"}
"""What is minimised in training, and estimates a risk: its name in metrics, and in figures."""


def estimate(objective: Objective, losses: np.ndarray, proposal: np.ndarray, pool_size: int) -> np.ndarray:
    """The risk of a pool of N points, `[...]`, from losses and proposal probabilities `[..., M]`."""
    if objective == "plain":
        return risk.plain(losses)
    return (risk.pure if objective == "pure" else risk.lure)(losses, proposal, pool_size)


@dataclass(frozen=True, eq=False)
class Points:
    """What was acquired of a pool so far, in order.

    Attributes:
        index: Where the points lie in the pool, `[M]`.
        labels: What the oracle said, `[M]`.
        proposal: Probability with which each was drawn from those left, `[M]`, float64.
    """

    index: Tensor
    labels: Tensor
    proposal: Tensor

    def __len__(self) -> int:
        return len(self.index)

    def weights(self, objective: Objective, pool_size: int) -> Tensor:
        """v_m `[M]`, float64, of the objective (1/M) sum_m v_m L_m; of the plain one 1."""
        if objective == "plain":
            return torch.ones_like(self.proposal)
        return (risk.pure_weights if objective == "pure" else risk.lure_weights)(self.proposal, pool_size)

    def and_then(self, index: int, label: int, probability: float) -> Points:
        """With one more."""
        return Points(
            torch.cat([self.index, torch.tensor([index])]),
            torch.cat([self.labels, torch.tensor([label])]),
            torch.cat([self.proposal, torch.tensor([probability], dtype=torch.float64)]),
        )


def at_random(count: int, oracle: Oracle, pool_size: int, generator: torch.Generator) -> Points:
    """Points drawn one by one, uniformly and without replacement."""
    index = torch.randperm(pool_size, generator=generator)[:count]
    labels = torch.tensor([oracle.label(i) for i in index.tolist()])
    left = pool_size - torch.arange(count, dtype=torch.float64)
    return Points(index, labels, 1 / left)


Score = Literal["bald", "predictive_entropy", "variation_ratio"]
SCORES = {
    "bald": acquisition.bald,
    "predictive_entropy": acquisition.predictive_entropy,
    "variation_ratio": acquisition.variation_ratio,
}
Proposal = Literal["softmax", "proportional", "uniform"]


def propose(proposal: Proposal, scores: Tensor, temperature: float) -> Tensor:
    """Probabilities `[N]` of the next draw from scores `[N]` of the candidates, 0 or more.

    Args:
        proposal: Its name; all have full support, which PURE and LURE need.
        scores: Larger is sooner.
        temperature: Of softmax, on scores divided by their sum.
    """
    function = acquisition.full_support(proposal)
    parameter = {"softmax": (temperature,), "proportional": (FLOOR,), "uniform": ()}[proposal]
    return function(scores, *parameter)


# ----------------------------------------------------------------------------------------- what is measured


@dataclass(frozen=True, eq=False)
class Learning:
    """One trajectory of active learning, tested E times under each of the three OBJECTIVES.

    Attributes:
        points: M at each test, `[E]`.
        nll: Test NLL, `[E, 3]`, in nats.
        accuracy: Of the test set, `[E, 3]`.
        risks: What each estimator (last axis) says on the M training points of the fit under each objective
            (axis before it), `[E, 3, 3]`, in nats.
    """

    points: np.ndarray
    nll: np.ndarray
    accuracy: np.ndarray
    risks: np.ndarray

    @property
    def overfitting_bias(self) -> np.ndarray:
        """Test NLL minus LURE on the training points, `[E, 3]`: thesis 004, equation 5.10."""
        return self.nll - self.risks[..., list(OBJECTIVES).index("lure")]

    def measures(self) -> dict[str, np.ndarray]:
        """Everything by name, each `[E, 3]`."""
        estimates = {
            f"{name} on the training points": self.risks[..., i] for i, name in enumerate(OBJECTIVES.values())
        }
        own = {
            "test NLL": self.nll,
            "test accuracy": self.accuracy,
            "overfitting bias": self.overfitting_bias,
        }
        return own | estimates


GUIDES: tuple[Proposal, ...] = ("softmax", "proportional")
"""Proposals of active testing; uniform sampling is what they are compared with."""
_CHUNK = 4_000_000
"""Numbers drawn at once."""
_ROUNDING = 1e-12
"""Relative size of an error that is none."""


def log_weights(proposal: Proposal, scores: np.ndarray, temperature: float) -> np.ndarray:
    """Logarithm of `propose`, up to a constant, `[N]`: finite where a probability is 0 in float64."""
    if proposal == "softmax":
        return temperature * scores / (scores.sum() or 1.0)
    return np.log(propose(proposal, torch.from_numpy(scores), temperature).numpy())


def races(
    weights: Mapping[str, np.ndarray], trajectories: int, draws: int
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Draws without replacement in proportion to fixed weights, in R paired trajectories; always the same.

    In a race in which point n finishes after an exponential time of mean 1/w_n, the order of arrival has the
    distribution of such draws (Efraimidis and Spirakis 2006). The same standard times serve all weights, so
    that trajectories are paired.

    Args:
        weights: Name -> log w `[N]`.
        trajectories: R.
        draws: M, below N.

    Returns:
        Name -> indices `[R, M]` in order, and the probability of each among those left `[R, M]`.
    """
    generator = np.random.default_rng(randomness.derive(0, "races"))
    size = len(next(iter(weights.values())))
    found: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {name: [] for name in weights}
    step = max(1, _CHUNK // size)
    for first in range(0, trajectories, step):
        log_times = np.log(generator.standard_exponential((min(step, trajectories - first), size)))
        for name, log_w in weights.items():
            found[name].append(_winners(log_times, log_w, draws))
    return {
        name: (np.concatenate([i for i, _ in parts]), np.concatenate([q for _, q in parts]))
        for name, parts in found.items()
    }


def _winners(log_times: np.ndarray, log_w: np.ndarray, draws: int) -> tuple[np.ndarray, np.ndarray]:
    """The first of races with standard times `[R, N]`, and their probabilities among those left."""
    finish = log_times - log_w
    index = np.argpartition(finish, draws - 1, axis=1)[:, :draws]
    index = np.take_along_axis(index, np.take_along_axis(finish, index, 1).argsort(1), 1)
    # What is left is summed up, not subtracted from 1: the drawn may hold nearly all probability.
    rest = np.tile(log_w, (len(log_times), 1))
    np.put_along_axis(rest, index, -np.inf, 1)
    largest = rest.max(1, keepdims=True)
    rest = largest + np.log(np.exp(rest - largest).sum(1, keepdims=True))
    own = log_w[index]
    left = np.logaddexp.accumulate(np.concatenate([rest, own[:, ::-1]], 1), 1)[:, :0:-1]
    return index, np.exp(own - left)


@dataclass(frozen=True, eq=False)
class Trajectories:
    """Estimates of one fixed model's risk on its test pool, over R paired trajectories.

    Attributes:
        points: Numbers of labels M at which is estimated, `[K]`.
        risk: The mean loss over the whole pool, in nats.
        estimates: Proposal, uniform among them -> estimator out of OBJECTIVES -> `[R, K]`, in nats.
        first_draw: Guide -> exact mean squared error of PURE and LURE, equal then, after one draw, over that
            of one uniform draw; infinite if it overflows.
    """

    points: np.ndarray
    risk: float
    estimates: dict[str, dict[str, np.ndarray]]
    first_draw: dict[str, float]

    def bias(self, proposal: str, estimator: str) -> np.ndarray:
        """Risk minus estimate, `[R, K]`: below 0 where the risk is overestimated (thesis 004, Fig. 5.8)."""
        return self.risk - self.estimates[proposal][estimator]

    def squared_error(self, proposal: str, estimator: str) -> np.ndarray:
        """`[R, K]`, in nats squared."""
        return self.bias(proposal, estimator) ** 2

    def ratio(self, guide: str) -> bands.Band:
        """Mean squared error of LURE over that of the mean of as many uniform draws, `[K]`, 95% over R.

        Where all losses are equal no draw can help, and it is 1.
        """
        uniform = self.squared_error("uniform", "plain")
        if uniform.mean(0).min() <= (_ROUNDING * self.risk) ** 2:
            return bands.Band(*np.ones((3, len(self.points))))
        return bands.paired_ratio(self.squared_error(guide, "lure"), uniform)


def simulate(
    losses: np.ndarray, scores: np.ndarray, temperature: float, trajectories: int, acquired: int
) -> Trajectories:
    """Active testing of a fixed model whose losses on the test pool are known, `[N]`.

    Args:
        losses: In nats.
        scores: Of the same points, `[N]`, 0 or more; proposals are made of them once, over the whole pool.
        temperature: Of the softmax.
        trajectories: R.
        acquired: M, of a small pool all but one at most.
    """
    size, risk_of_all = len(losses), float(losses.mean())
    acquired = min(acquired, size - 1)
    points = np.array(sorted({1, acquired, *range(5, acquired, 5)}))
    names: tuple[Proposal, ...] = (*GUIDES, "uniform")
    weights = {name: log_weights(name, scores, temperature) for name in names}
    estimates = {
        name: {
            e: np.stack([estimate(e, losses[index[:, :m]], q[:, :m], size) for m in points], 1)
            for e in OBJECTIVES
        }
        for name, (index, q) in races(weights, trajectories, acquired).items()
    }
    with np.errstate(over="ignore"):
        inverse = {name: np.exp(np.logaddexp.reduce(w) - w) for name, w in weights.items()}  # 1/q
        squares = {
            name: float((losses**2 * q).sum()) / size**2 - risk_of_all**2 for name, q in inverse.items()
        }
    is_flat = np.ptp(losses) <= _ROUNDING * risk_of_all
    first_draw = {name: 1.0 if is_flat else squares[name] / squares["uniform"] for name in GUIDES}
    return Trajectories(points, risk_of_all, estimates, first_draw)


# ------------------------------------------------------------------------------------ figures and sentences

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

    @property
    def line(self) -> str:
        """Method and variant: what runs of other seeds share."""
        return ", ".join(filter(None, (self.method, self.variant)))


def learning_charts(
    lines: Mapping[str, Sequence[Learning]], notes: Sequence[str] = (), kind: bands.Kind = "standard_error"
) -> dict[str, Any]:
    """Test NLL, accuracy and overfitting bias against M: thesis 004, Figs 5.5, 5.6, 5.9 and C.3 to C.7.

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
        )
    return charts


def error_charts(lines: Mapping[str, Sequence[Models]], notes: Sequence[str] = ()) -> dict[str, Any]:
    """Errors of risk estimates against M: thesis 004, Fig. 5.7 (full), Figs 5.8b, 5.8c and C.1b (small).

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
    return {name: alt.concat(*panels, columns=2) for name, panels in charts.items()}


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
    """Whether scores guide better than chance, run by run, and which line's do so better, over seeds."""
    sentences = []
    logs: dict[tuple[str, str], dict[int, float]] = {}
    for line, of_line in lines.items():
        for seed, tested in of_line.items():
            full = tested["full"]
            for guide in GUIDES:
                ratio = Interval(
                    *(float(v[-1]) for v in full.ratio(guide)), len(full.estimates["uniform"]["plain"]), 1.0
                )
                logs.setdefault((guide, line), {})[seed] = float(np.log(ratio.centre))
                sentences.append(
                    f"{task}, {line}, seed {seed}: at M = {full.points[-1]} the mean squared error of "
                    f"{guide} sampling with LURE over that of uniform sampling {ratio}"
                    + ratio.said("it guides worse", "it guides better")
                )
    for guide in GUIDES:
        for first, second, seeds in _pairs(lines, of):
            difference = _interval([logs[guide, first][s] - logs[guide, second][s] for s in seeds])
            sentences.append(
                f"{task}: {first} minus {second} in the logarithm of that ratio, {guide}, {difference}"
                + difference.said(f"{second} guides better", f"{first} guides better")
            )
    return sentences


class Interval(NamedTuple):
    """A mean with its 95% interval over `count` repetitions, to be compared with `null`; NaN if too few."""

    centre: float
    low: float
    high: float
    count: int
    null: float = 0.0

    def __str__(self) -> str:
        if np.isnan(self.low):
            return f"is {self.centre:.4g} ({self.count} runs: no interval below {FEWEST})"
        return f"is {self.centre:.4g} ({self.low:.4g} to {self.high:.4g}, 95%, n = {self.count})"

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
    found = bands.simultaneous_band(np.array(values)[:, None])
    return Interval(*(float(v[0]) for v in found), len(values))


def _band(values: np.ndarray, kind: bands.Kind) -> bands.Band:
    """Of one repetition the curve itself."""
    return bands.band(values, kind) if len(values) > 1 else bands.Band(values[0], values[0], values[0])
