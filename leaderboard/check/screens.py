"""Screens: what no honest entry has. Each raises a flag, which holds an entry back for a maintainer's word.

    copy         predictions are those of another entry, or a mixture of two, but for noise
    seeds        predictions of two seeds are one run but for noise
    floor        a score below what exact draws of the posterior have, or above the best that is published
    foresight    uncertainties know which predictions are wrong
    information  information about the weights below zero or above the entropy
    likelihood   a log likelihood or errors that the entry's own means and variances cannot have

A flag is no verdict: an entry that is held stays visible with the reason, and maintainers clear it in
`status.toml`. Thresholds stand here, each with what honest entries have at most. No entry of the project has
a flag when it is looked at as a stranger's, and the cheats have theirs (`tests/hostile/test_screens.py`).
What a screen cannot see, docs/leaderboard.md lists.

Noise tells itself. Two networks that differ, differ alike on inputs that are alike: how one prediction leaves
another is correlated between neighbours. Noise that was added is not.

Shapes: N test examples, C classes, S draws, K splits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from scipy.special import logsumexp, pdtr

from bench.spec import Arrays

if TYPE_CHECKING:
    from bench.contract import Task

SCREENS: Final = ("copy", "seeds", "floor", "foresight", "information", "likelihood")


class Flag(NamedTuple):
    """The name of a screen, and in one line what it saw."""

    screen: str
    reason: str


class Seen(NamedTuple):
    """What the screens keep of a run.

    Attributes:
        seed: Its seed.
        views: Its predictions on at most 400 examples, `[n, D]` float32: class probabilities, and centred
            log-probabilities; or means and standard deviations. Empty where the arrays are of neither kind.
        log_probs: Of classes, as the first view has them, `[n, T, C]`; else None.
        units: Of each view what its differences are measured in: what a small change of all logits makes of
            probabilities, p (1 - p), so that sure predictions are not taken for equal ones; else 1.
        flags: What the run has by itself.
    """

    seed: int
    views: tuple[np.ndarray, ...]
    units: tuple[float, ...]
    log_probs: np.ndarray | None = None
    flags: tuple[Flag, ...] = ()


def examine(seed: int, arrays: Arrays, metrics: Mapping[str, float | None], task: Task) -> Seen:
    """Looks at a run by itself too.

    Args:
        seed: Of the run.
        arrays: What it stored: the task's in names, types and shapes.
        metrics: Its scores, computed again.
        task: The task.
    """
    found = [
        *_floor(metrics),
        *_published(arrays, getattr(task.settings, "dataset", "")),
        *_foresight(arrays),
        *_information(arrays),
        *_likelihood(arrays),
    ]
    first = {flag.screen: flag for flag in reversed(found)}
    return look(seed, arrays)._replace(flags=tuple(first.values()))


# ------------------------------------------------------------------------------------------- copies and seeds

NEAR: Final = {"copy": 0.06, "seeds": 0.05}
"""How near predictions have to be, of the distance of two seeds of a method, to be looked at.

A few honest methods are nearer by nature, such as `radial` to `map` (0.003): they start from one network.
Their differences are no noise. Where differences look like noise, honest entries have 0.096 (`map` to a
mixture of two), and honest seeds 0.088 (`map` where every seed finds the same mode).
"""
WHITE: Final = 0.2
"""Correlation of differences between neighbours below which they are noise; honest near entries have 0.28."""
ENOUGH: Final = 100
"""Examples from which on that correlation can be told; below, a difference has to be less than `TINY`."""
TINY: Final = 0.02
"""As `NEAR`, where noise cannot be told; of mixtures of two the half. Honest entries have 0.046 and 0.018."""
EQUAL: Final = 0.001
"""As `NEAR`, what only rounding leaves, which is no noise; honest entries have 0.0026."""
_MOST: Final = 400
_COARSE: Final = 48
"""Examples by which candidates are found, before all are compared."""
_REACH: Final = {"copy": 1.0, "seeds": 0.3}
"""As `NEAR`, by the coarse examples, of single runs: another temperature and a second run come on top."""
_MIXED: Final = 0.3
"""As `NEAR`, by the coarse examples, of mixtures of two."""
ADDS: Final = 0.5
"""Share of its distance from either run alone below which a run has to come by a mixture of the two.

Of fifty runs one always takes a little away. `swag` and `swag_diagonal` of one search average one trajectory,
and what parts them is smooth until another run explains it: 0.57 at least of the distance is then left, where
a mean of two entries with noise has 0.1 at most, unless the two are nearly one.
"""
_TRIED: Final = 64
"""Runs of which each is tried with the one that completes it best, the most like first.

Among a hundred runs of one problem a mixture of two is like many: of the 210 pairs of entries of
`fidelity_iris` four are unseen with 32.
"""


def look(seed: int, arrays: Arrays) -> Seen:
    """Looks at a run that others are compared with; its arrays are the task's in names, types and shapes."""
    name = next((name for name in ("log_probs", "full_log_probs") if name in arrays), None)
    if name is not None:
        stored = arrays[name] if arrays[name].ndim == 3 else arrays[name][None]
        # Of several sets of examples, or of several fits, the first, the last and one between.
        few = stored[sorted({0, len(stored) // 2, len(stored) - 1})]
        log_probs = _thinned(np.moveaxis(few, 0, 1)).astype(np.float32)
        clipped = np.maximum(log_probs, -8)
        centred = clipped - clipped.mean(-1, keepdims=True)
        p = np.exp(log_probs).reshape(len(log_probs), -1)
        return Seen(seed, (p, centred.reshape(p.shape)), (_doubt(p), 1.0), log_probs)
    if "draws" in arrays:
        draws = arrays["draws"].astype(np.float64)
        if draws.ndim == 3:
            p = _thinned(np.exp(draws).mean(0)).astype(np.float32)
            return Seen(seed, (p,), (_doubt(p),))
        return Seen(seed, (_numbers(draws.mean(0), draws.std(0)),), (1.0,))
    if "variance" in arrays:
        return Seen(seed, (_numbers(*_moments(arrays)),), (1.0,))
    return Seen(seed, (), ())


def _doubt(p: np.ndarray) -> float:
    """What a small change of all logits makes of probabilities; not 0, were all of them 0 or 1."""
    return max(_size(p * (1 - p)), 1e-6)


def _numbers(mean: np.ndarray, deviation: np.ndarray) -> np.ndarray:
    """A view of predicted numbers `[n, 2]`, whatever a stranger predicted."""
    moments = _thinned(np.stack([mean.ravel(), deviation.ravel()], 1))
    return np.clip(moments, -1e9, 1e9).astype(np.float32)


def _thinned(rows: np.ndarray, most: int = _MOST) -> np.ndarray:
    """At most so many rows, evenly spread."""
    return rows if len(rows) <= most else rows[np.linspace(0, len(rows) - 1, most).astype(int)]


class Gallery:
    """The entries of a task beside each other."""

    def __init__(self, entries: Mapping[str, Sequence[Seen]]) -> None:
        """Takes entries by name; runs without views, or of other shapes than most, are not compared."""
        shapes = Counter(_shapes(run) for runs in entries.values() for run in runs if run.views)
        usual = max(shapes, key=lambda shape: (shapes[shape], shape), default=())
        self._entries = entries
        self._runs = [(n, run) for n, runs in entries.items() for run in runs if _shapes(run) == usual != ()]
        names = np.array([name for name, _ in self._runs])
        self._of = {name: names == name for name in entries}
        self._views = range(len(usual))
        # Correlations of all runs with each other, by the coarse examples.
        self._alike: list[np.ndarray] = []
        for view in self._views:
            units = np.stack([_unit(_thinned(run.views[view], _COARSE)) for _, run in self._runs])
            self._alike.append(units @ units.T)
        self._comparable: dict[str, list[Seen]] = {name: [] for name in entries}
        for name, run in self._runs:
            self._comparable[name].append(run)
        self._apart = {
            name: [_apart(runs, view) for view in self._views] for name, runs in self._comparable.items()
        }

    def flags(self, name: str, others: Iterable[str] = ()) -> list[Flag]:
        """The flags of an entry, at most one of a screen, in order of `SCREENS`.

        Args:
            name: Of the entry.
            others: Names of entries that were there before it.
        """
        before = [other for other in others if other != name]
        found = {flag.screen: flag for run in reversed(self._entries[name]) for flag in run.flags}
        scales = [self._scale(name, before, view) for view in self._views]
        for screen, among in (("copy", before), ("seeds", [name])):
            if (reason := self._repeated(screen, name, among, scales)) is not None:
                found[screen] = Flag(screen, reason)
        return [found[screen] for screen in SCREENS if screen in found]

    def _repeated(self, screen: str, name: str, among: Sequence[str], scales: Sequence[float]) -> str | None:
        """Of which runs those of an entry are repetitions but for noise; None if they are not."""
        may = np.any([self._of[other] for other in among], 0) if among else np.zeros(len(self._runs), bool)
        every = [
            self._nearest(int(own), may, scales, screen) for own in np.flatnonzero(self._of[name] & may.any())
        ]
        near = [match for match in every if match is not None]
        if not near or np.mean([match.like_neighbours for match in near]) >= WHITE:
            return None
        first = near[0]
        return f"{first.what} but for noise, {first.distance:.3f} times as far as two seeds of a method are"

    def _nearest(self, own: int, may: np.ndarray, scales: Sequence[float], screen: str) -> _Match | None:
        """Of all that a run is near to, what it differs from most like noise; None if of nothing."""
        found = None
        for view in self._views:
            for chosen in self._candidates(own, may, view, scales[view], _REACH[screen]):
                match = self._match(own, chosen, view, scales[view], NEAR[screen])
                if match is not None and (found is None or match.like_neighbours < found.like_neighbours):
                    found = match
                if match is not None and match.distance <= EQUAL:
                    return match
        return found

    def _candidates(
        self, own: int, may: np.ndarray, view: int, scale: float, reach: float
    ) -> Iterator[list[int]]:
        """Single runs and pairs of runs whose mixtures may come near to a run, by the coarse examples."""
        alike = self._alike[view]
        size = _size(_centred(self._runs[own][1].views[view])) / scale
        # Within reach: size * sqrt(1 - alike^2) < reach.
        along = np.where(may, alike[own], 0)
        along[own] = 0
        singles = np.argsort(-np.abs(along), kind="stable")[:_TRIED]
        singles = singles[along[singles] != 0].tolist()
        yield from ([k] for k in singles[:3] if along[k] ** 2 > 1 - (reach / max(size, 1e-9)) ** 2)
        if not singles:
            return
        gram = alike[singles]
        rest = along - along[singles, None] * gram
        gain = np.where(may & (along != 0) & (gram**2 < 0.999), rest**2 / np.maximum(1 - gram**2, 1e-3), 0)
        second = gain.argmax(1)
        best = along[singles] ** 2 + gain.max(1)
        for k in np.argsort(-best, kind="stable")[:2]:
            if gain[k, second[k]] > 0 and size * np.sqrt(max(1 - best[k], 0)) < _MIXED:
                yield [singles[k], int(second[k])]

    def _match(self, own: int, chosen: Sequence[int], view: int, scale: float, limit: float) -> _Match | None:
        """How a run differs from the nearest mixture of others; None if it is not near."""
        run, atoms = self._runs[own][1], [self._runs[k] for k in chosen]
        target = run.views[view].astype(np.float64)
        others = [other.views[view] for _, other in atoms]
        mixture = _mixture(target, others)
        if view == 0 and len(atoms) == 1 and run.log_probs is not None:
            tempered = _mixture(target, [_tempered(run, atoms[0][1])])
            mixture = min(mixture, tempered, key=lambda mixed: _size(target - mixed))
        distance = _size(target - mixture) / scale
        if len(others) == 2:
            alone = min(_size(target - _mixture(target, [other])) for other in others) / scale
            if distance > max(ADDS * alone, EQUAL):
                return None
        can_tell = len(target) >= ENOUGH
        if distance >= (limit if can_tell else TINY / len(chosen)):
            return None
        names = " with ".join(f"seed {other.seed} of {entry}" for entry, other in atoms)
        is_told = can_tell and distance > EQUAL
        alike = _like_neighbours(target - mixture, mixture) if is_told else 0.0
        return _Match(distance, alike, f"seed {run.seed} is {names}")

    def _scale(self, name: str, before: Sequence[str], view: int) -> float:
        """How far two seeds of an entry would be from each other if they were as those of entries before."""
        own = self._comparable[name]
        found = [apart for other in before if (apart := self._apart[other][view]) > 0]
        if not found:  # of one seed each: how far entries are from each other
            found = [_apart([run for other in before for run in self._comparable[other][:1]], view)]
        if not any(found):
            found = [0.2 * _size(_centred(run.views[view])) / run.units[view] for run in own]
        unit = np.median([run.units[view] for run in own]) if own else 1.0
        return max(float(np.median(found) * unit), 1e-9) if found else 1.0


class _Match(NamedTuple):
    """Distance from a mixture, in those of two seeds; how alike neighbours differ from it; what it is."""

    distance: float
    like_neighbours: float
    what: str


def _shapes(run: Seen) -> tuple[tuple[int, ...], ...]:
    return tuple(view.shape for view in run.views)


def _apart(runs: Sequence[Seen], view: int) -> float:
    """Median distance of runs that follow each other, in units of the view; 0 of a single run."""
    found = [
        _size(a.views[view] - b.views[view]) / max(a.units[view], b.units[view], 1e-9)
        for a, b in pairwise(runs)
    ]
    return float(np.median(found)) if found else 0.0


def _size(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))


def _centred(view: np.ndarray) -> np.ndarray:
    return view - view.mean()


def _unit(view: np.ndarray) -> np.ndarray:
    """A view as a vector of mean 0 and length 1; of 0 if it is constant."""
    centred = _centred(view).ravel()
    return centred / max(float(np.linalg.norm(centred)), 1e-12)


def _mixture(target: np.ndarray, atoms: Sequence[np.ndarray]) -> np.ndarray:
    """What of a view is a constant and a linear combination of others, by least squares."""
    columns = np.stack([*(atom.ravel() for atom in atoms), np.ones(target.size)], 1).astype(np.float64)
    weights = np.linalg.lstsq(columns, target.ravel(), rcond=None)[0]
    return (columns @ weights).reshape(target.shape)


def _tempered(run: Seen, other: Seen) -> np.ndarray:
    """Class probabilities of another run at the temperature that comes nearest to a run."""
    assert run.log_probs is not None
    assert other.log_probs is not None
    weights = np.exp(other.log_probs)
    first, second = (
        x - (weights * x).sum(-1, keepdims=True) / weights.sum(-1, keepdims=True)
        for x in (run.log_probs, other.log_probs)
    )
    power = (weights * first * second).sum() / max((weights * second**2).sum(), 1e-9)
    logits = power * other.log_probs
    logits = logits - logits.max(-1, keepdims=True)
    p = np.exp(logits)
    return (p / p.sum(-1, keepdims=True)).reshape(len(p), -1)


def _like_neighbours(differences: np.ndarray, places: np.ndarray) -> float:
    """Correlation of differences `[n, D]` with those of the nearest example, by their places `[n, D]`."""
    squares = np.square(places).sum(1)
    away = squares[:, None] + squares - 2 * places @ places.T
    np.fill_diagonal(away, np.inf)
    others = differences[away.argmin(1)]
    size = np.linalg.norm(differences) * np.linalg.norm(others)
    return float((differences * others).sum() / size) if size > 0 else 0.0


# -------------------------------------------------------------------------------------- scores that cannot be

FLOOR: Final = 0.5
"""Of a floor, what a distance may not be below; runs of the reference's own sampler have 0.87 at least."""
PUBLISHED: Final = {"mnist": 0.0009, "fashion_mnist": 0.0309, "cifar10": 0.005}
"""Least published shares of errors: An et al. 2020 (MNIST), Tanveer et al. 2020, Dosovitskiy et al. 2021."""
_RARELY: Final = 1e-3
"""How often a predictor as good as the best published one is held for its few errors."""


def _floor(metrics: Mapping[str, float | None]) -> Iterator[Flag]:
    """A Wasserstein distance far below that of exact draws: it is of the reference itself."""
    distance, floor = metrics.get("wasserstein"), metrics.get("wasserstein_floor")
    if distance is not None and floor is not None and distance < FLOOR * floor:
        yield Flag("floor", f"wasserstein is {distance:.3g}, and that of exact draws {floor:.3g}")


def _published(arrays: Arrays, dataset: str) -> Iterator[Flag]:
    """Fewer errors than the best published classifier of these images makes, by more than luck."""
    for log_probs, labels, _ in _classified(arrays):
        if dataset in PUBLISHED and log_probs.shape[-1] == 10:
            errors = int((log_probs[0].argmax(-1) != labels).sum())
            if pdtr(errors, PUBLISHED[dataset] * len(labels)) < _RARELY:
                best = f"the best published classifier of {dataset} errs on {PUBLISHED[dataset]:.2%}"
                yield Flag("floor", f"{errors} of {len(labels)} examples are wrong, and {best}")


# --------------------------------------------------------------------------------------------- uncertainties

FORESIGHT: Final = 0.995
"""Area under the curve of errors by an uncertainty, and of held-out classes; honest ones have 0.984."""
KNOWN: Final = 0.85
"""Rank correlation of information with the loss, among errors alone; honest runs have 0.66."""
_LEAST_ERRORS: Final = 10
_LEAST_LOSSES: Final = 20
ROUNDING: Final = 0.005
"""Nats by which information may leave its bounds: float16 near log 10, in the predictions and in it."""


def _classified(arrays: Arrays) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray | None]]:
    """Log-probabilities `[T, N, C]` of T sets, classes `[N]`, and information `[T, N]` or None.

    Foreign sets and classes that were held out of training are left out.
    """
    for model in ("", "full_", "small_"):
        if f"{model}log_probs" not in arrays or f"{model}labels" not in arrays:
            continue
        labels = arrays[f"{model}labels"].astype(int)
        if labels.ndim > 1:  # several labels of an input, drawn from a known law: no prediction is right
            continue
        log_probs = arrays[f"{model}log_probs"].astype(np.float32)
        information = arrays.get("information" if not model else f"{model}scores")
        if log_probs.ndim == 2:
            log_probs = log_probs[None]
        if information is not None:
            information = information.astype(np.float64).reshape(log_probs.shape[:2])
        known = labels < log_probs.shape[-1]
        sets = slice(None) if known.all() else slice(1)  # where classes are held out, other sets are foreign
        own = None if information is None else information[sets, known]
        yield log_probs[sets, known], labels[known], own


def _foresight(arrays: Arrays) -> Iterator[Flag]:
    """Uncertainties that know the errors, the losses or the classes that were held out."""
    for log_probs, labels, information in _classified(arrays):
        losses = -log_probs[:, np.arange(len(labels)), labels].ravel()
        wrong = (log_probs.argmax(-1) != labels).ravel()
        entropy = _entropy(log_probs).ravel()
        given = {"entropy": entropy} | ({} if information is None else {"information": information.ravel()})
        for name, values in given.items():
            if min(wrong.sum(), (~wrong).sum()) >= _LEAST_ERRORS and (a := _auroc(values, wrong)) > FORESIGHT:
                yield Flag("foresight", f"{name} tells {wrong.sum()} errors with an AUROC of {a:.4f}")
        if information is not None and wrong.sum() >= _LEAST_LOSSES:
            agree = _rank_correlation(information.ravel()[wrong], losses[wrong])
            if agree > KNOWN:
                yield Flag("foresight", f"information has a rank correlation of {agree:.3f} with the loss")
    if "log_probs" in arrays and "labels" in arrays and arrays["log_probs"].ndim == 3:
        foreign = arrays["labels"] >= arrays["log_probs"].shape[-1]
        first = {"entropy": _entropy(arrays["log_probs"][0].astype(np.float32))}
        if "information" in arrays:
            first["information"] = arrays["information"][0].astype(np.float64)
        for name, values in first.items() if 0 < foreign.sum() < len(foreign) else ():
            if (a := _auroc(values, foreign)) > FORESIGHT:
                yield Flag("foresight", f"{name} tells held-out classes with an AUROC of {a:.4f}")


def _information(arrays: Arrays) -> Iterator[Flag]:
    """Information and entropy are of one predictive distribution: 0 <= information <= entropy.

    The deviation of the probability of one of two classes is at most sqrt(p (1 - p)).
    """
    pairs = [(model, f"{model}scores") for model in ("full_", "small_")]
    pairs += [(of, f"{of}information") for of in ("", "foreign_", "clean_", "new_", "new_clean_")]
    for model, name in pairs:
        if f"{model}log_probs" in arrays and name in arrays:
            values = arrays[name].astype(np.float64)
            above = values - _entropy(arrays[f"{model}log_probs"].astype(np.float32)).reshape(values.shape)
            if above.max() > ROUNDING:
                yield Flag("information", f"{name} is {above.max():.3g} nats above the entropy")
            if values.min() < -ROUNDING:
                yield Flag("information", f"{name} is {values.min():.3g} nats")
    if "deviation" in arrays and "log_probs" in arrays:
        p = np.exp(arrays["log_probs"][..., -1].astype(np.float64))
        if (above := (arrays["deviation"] - np.sqrt(p * (1 - p))).max()) > ROUNDING:
            yield Flag("information", f"deviation is {above:.3g} above what a probability can have")


def _entropy(log_probs: np.ndarray) -> np.ndarray:
    return np.asarray(-(np.exp(log_probs) * log_probs).sum(-1))


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 1; equal values share their mean."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(counts) - (counts - 1) / 2)[place.ravel()])


def _auroc(values: np.ndarray, positive: np.ndarray) -> float:
    """Share of pairs of a positive and another in which the positive has the larger value."""
    some, rest = int(positive.sum()), int((~positive).sum())
    return float((_ranks(values)[positive].sum() - some * (some + 1) / 2) / (some * rest))


def _rank_correlation(first: np.ndarray, second: np.ndarray) -> float:
    a, b = (_ranks(values) - (len(values) + 1) / 2 for values in (first, second))
    size = np.linalg.norm(a) * np.linalg.norm(b)
    return float(a @ b / size) if size > 0 else 0.0


# ------------------------------------------------------------------------------------------ predicted numbers

SPREAD: Final = 0.5
"""Least variance of log|z|, z the standardised errors; honest entries have 1.26 at least.

If noise has one mode, z has a density of one mode at 0 given all that a predictor may know. It is then a
mixture of uniforms that begin at 0 (Khinchin 1938), so log|z| is the log of a uniform, of variance 1, plus
something independent of it. Of mixtures whose means differ by more than their deviations nothing is asked.
"""
GAIN: Final = 1.0
"""Nats that the shape of a prediction may gain over a normal of its mean and rescaled variance.

Two normals of one variance gain as much where they are 10.7 standard deviations apart; honest entries gain
0.02.
"""


def _moments(arrays: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation `[K, N]` of mixtures of S normals, of standardised targets."""
    means = arrays["mean"].astype(np.float64)
    within = np.broadcast_to(arrays["variance"].astype(np.float64), means.shape).mean(1)
    return means.mean(1), np.sqrt(within + means.var(1))


def _likelihood(arrays: Arrays) -> Iterator[Flag]:
    """Deviations that know the errors, and a density that means and deviations cannot have."""
    if not {"mean", "variance", "centre_and_scale", "targets"} <= arrays.keys():
        return
    mean, deviation = _moments(arrays)
    centre, scale = np.moveaxis(arrays["centre_and_scale"][..., None], 1, 0)
    targets = (arrays["targets"] - centre) / scale
    z = (targets - mean) / deviation
    means, variances = arrays["mean"].astype(np.float64), arrays["variance"].astype(np.float64)
    has_one_mode = means.var(1) <= deviation**2 / 2
    sizes = np.log(np.maximum(np.abs(z[has_one_mode]), 1e-12))
    if sizes.size >= ENOUGH and sizes.var() < SPREAD:
        yield Flag("likelihood", f"deviations know the errors: log|z| has the variance {sizes.var():.3g}")
    exponent = -0.5 * ((targets[:, None] - means) ** 2 / variances + np.log(2 * np.pi * variances))
    density = logsumexp(exponent, 1) - np.log(means.shape[1])
    usual = -np.log(deviation) - 0.5 * np.log(2 * np.pi * np.e * np.mean(z**2))
    if (gain := float((density - usual).mean())) > GAIN:
        yield Flag("likelihood", f"it is {gain:.3g} nats above what its errors and variances have")
