"""Active testing of a fixed model: draws from its test pool, and what they say of its risk.

Shapes: N points of the pool, M labels bought, R trajectories, K numbers of labels at which is estimated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch

from bench import randomness
from bench.intervals import Band, paired_ratios
from bench.studies import risk
from bench.studies.active import OBJECTIVES, propose

GUIDES = ("softmax", "proportional")
"""Proposals of active testing; uniform sampling is what they are compared with."""
_CHUNK = 400_000
"""Numbers drawn at once: few enough for a processor's cache."""
_MOST = 0.5
"""Share of the probability that the drawn hold at most, where what is left is the difference to 1."""
_ROUNDING = 1e-12
"""Relative size of an error that is none."""


def log_weights(proposal: str, scores: np.ndarray, temperature: float) -> np.ndarray:
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
    size = len(next(iter(weights.values())))
    fair = [name for name, log_w in weights.items() if log_w.min() == log_w.max()]
    others = {name: log_w for name, log_w in weights.items() if name not in fair}
    found = _races(size, others, trajectories, draws) if others else {}
    return {name: _fair_race(size, trajectories, draws) if name in fair else found[name] for name in weights}


@lru_cache(maxsize=4)
def _fair_race(size: int, trajectories: int, draws: int) -> tuple[np.ndarray, np.ndarray]:
    """Draws by equal weights: those of every model, so made once for all runs that are scored together."""
    found = _races(size, {"fair": np.zeros(size)}, trajectories, draws)["fair"]
    for array in found:
        array.setflags(write=False)
    return found


def _races(
    size: int, weights: Mapping[str, np.ndarray], trajectories: int, draws: int
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """`races`, each of them run."""
    generator = np.random.default_rng(randomness.derive(0, "races"))
    early = {name: _early(log_w, 2 * draws) for name, log_w in weights.items()}
    total = {name: np.logaddexp.reduce(log_w) for name, log_w in weights.items()}
    found: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {name: [] for name in weights}
    step = max(1, _CHUNK // size)
    for first in range(0, trajectories, step):
        times = generator.standard_exponential((min(step, trajectories - first), size))
        for name, log_w in weights.items():
            index = _first(times, log_w, draws, early[name])
            found[name].append((index, _among_those_left(log_w, index, total[name])))
    return {
        name: (np.concatenate([i for i, _ in parts]), np.concatenate([q for _, q in parts]))
        for name, parts in found.items()
    }


def _early(log_w: np.ndarray, points: int) -> float:
    """Log of the time by which so many points finish on average; infinite if that is most of them."""
    if points > len(log_w) / 2:
        return np.inf
    low, high = -log_w.max() - 50, -log_w.min() + 50
    for _ in range(60):
        middle = (low + high) / 2
        few = -np.expm1(-np.exp(np.minimum(log_w + middle, 50))).sum() < points
        low, high = (middle, high) if few else (low, middle)
    return high


def _first(times: np.ndarray, log_w: np.ndarray, draws: int, early: float) -> np.ndarray:
    """The first of races with standard times `[R, N]` in order, indices `[R, M]`.

    Logarithms are taken of the points that finish before `early`, and these are sorted: a tenth of the work.
    All are if a race has too few.
    """
    with np.errstate(over="ignore", under="ignore"):
        near = np.flatnonzero(times < np.exp(log_w + early))
    begins = np.searchsorted(near, np.arange(len(times) + 1) * len(log_w))
    counts = np.diff(begins)
    if counts.min() < draws:
        return (np.log(times) - log_w).argsort(1)[:, :draws]
    rows = np.repeat(np.arange(len(counts)), counts)
    columns, place = near - rows * len(log_w), np.arange(len(near)) - begins[rows]
    finish = np.full((len(counts), counts.max()), np.inf)
    finish[rows, place] = np.log(times.ravel()[near]) - log_w[columns]
    points = np.zeros(finish.shape, int)
    points[rows, place] = columns
    return np.take_along_axis(points, finish.argsort(1)[:, :draws], 1)


def _among_those_left(log_w: np.ndarray, index: np.ndarray, total: float) -> np.ndarray:
    """Probabilities of points drawn in this order, `[R, M]`; `total` is the log of the sum of all weights."""
    own = log_w[index]
    drawn = np.exp(own - total).sum(1, keepdims=True)
    rest = total + np.log1p(-np.minimum(drawn, _MOST))
    if (heavy := np.flatnonzero(drawn > _MOST)).size:  # of the difference little would be right
        others = np.tile(log_w, (len(heavy), 1))
        np.put_along_axis(others, index[heavy], -np.inf, 1)
        largest = others.max(1, keepdims=True)
        rest[heavy] = largest + np.log(np.exp(others - largest).sum(1, keepdims=True))
    left = np.logaddexp.accumulate(np.concatenate([rest, own[:, ::-1]], 1), 1)[:, :0:-1]
    return np.exp(own - left)


@dataclass(frozen=True, eq=False)
class Trajectories:
    """Estimates of one fixed model's risk on its test pool, over R paired trajectories.

    Attributes:
        points: Numbers of labels M at which is estimated, `[K]`.
        pool_size: N, test points of the pool.
        risk: The mean loss over the whole pool, in nats.
        estimates: Proposal, uniform among them -> estimator out of OBJECTIVES -> `[R, K]`, in nats.
        first_draw: Guide -> exact mean squared error of PURE and LURE, equal then, after one draw, over that
            of one uniform draw; infinite if it overflows.
    """

    points: np.ndarray
    pool_size: int
    risk: float
    estimates: dict[str, dict[str, np.ndarray]]
    first_draw: dict[str, float]

    def bias(self, proposal: str, estimator: str) -> np.ndarray:
        """Risk minus estimate, `[R, K]`: below 0 if the risk is overestimated (Farquhar 2022, Fig. 5.8)."""
        return self.risk - self.estimates[proposal][estimator]

    def squared_error(self, proposal: str, estimator: str) -> np.ndarray:
        """`[R, K]`, in nats squared."""
        return self.bias(proposal, estimator) ** 2

    @cached_property
    def ratios(self) -> dict[str, Band]:
        """Mean squared error of LURE over that of the mean of as many uniform draws, `[K]`, by guide.

        With the 95% band over R. Where all losses are equal no draw can help, and it is 1; so it is where the
        guide draws as uniform sampling does, but for rounding.
        """
        uniform = self.squared_error("uniform", "plain")
        if uniform.mean(0).min() <= (_ROUNDING * self.risk) ** 2:
            return dict.fromkeys(GUIDES, Band.flat(np.ones(len(self.points))))
        by_chance = self.estimates["uniform"]["plain"]
        errors = [
            uniform
            if np.allclose(self.estimates[guide]["lure"], by_chance, rtol=1e-9)
            else self.squared_error(guide, "lure")
            for guide in GUIDES
        ]
        return dict(zip(GUIDES, paired_ratios(errors, uniform), strict=True))

    def ratio_at_least(self, guide: str) -> np.ndarray:
        """Exact lower bound of what `ratios` estimates, `[K]`: what the first draw alone adds.

        LURE is (1/M) sum_m c_m a_m with uncorrelated a_m of mean risk, a_1 the estimate of one draw and
        c_1 = (N - M)/(N - 1) (Farquhar, Gal and Rainforth 2021); M uniform draws have c_1/M times
        the variance of one. Far above 1 where the variance sits on points that are all but never drawn, and
        that no number of trajectories shows.
        """
        left = (self.pool_size - self.points) / (self.pool_size - 1)
        return self.first_draw[guide] * left / self.points


def first_draw_ratio(losses: np.ndarray, log_weights: np.ndarray) -> float:
    """Exact mean squared error of LURE after one draw over that of one uniform draw; it may be infinite.

    The former is sum_n L_n^2 / (N^2 q_n) - R^^2 (Farquhar, Gal and Rainforth 2021), q the probabilities and
    R^ the mean loss. Where all losses are equal no draw can help, and the ratio is 1.

    Args:
        losses: L, `[N]`, in nats.
        log_weights: Logarithm of q, up to a constant, `[N]`.
    """
    size, risk_of_all = len(losses), float(losses.mean())
    if np.ptp(losses) <= _ROUNDING * risk_of_all:
        return 1.0

    def mean_square(log_w: np.ndarray) -> float:
        with np.errstate(over="ignore"):
            inverse = np.exp(np.logaddexp.reduce(log_w) - log_w)  # 1/q
            return float((losses**2 * inverse).sum()) / size**2 - risk_of_all**2

    return mean_square(log_weights) / mean_square(np.zeros(size))


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
    names = (*GUIDES, "uniform")
    weights = {name: log_weights(name, scores, temperature) for name in names}
    drawn = {name: (losses[index], q) for name, (index, q) in races(weights, trajectories, acquired).items()}
    estimates = {
        name: {e: v[:, points - 1] for e, v in zip(OBJECTIVES, risk.running(own, q, size), strict=True)}
        for name, (own, q) in drawn.items()
    }
    first_draw = {name: first_draw_ratio(losses, weights[name]) for name in GUIDES}
    return Trajectories(points, size, risk_of_all, estimates, first_draw)
