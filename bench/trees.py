"""Trees of scikit-learn as methods, which say when no network is wanted: `bench.trees:GradientBoosting`.

    bench run bench.trees:GradientBoosting own_table --task.file my.csv --task.target price

Neither poses a network nor has a posterior. They see the encoded training rows that a network sees and are
scored by the same task, so that `bench compare` and `bench report` show them beside networks. Spreads and
shares of doubt come from predictions of training rows by trees that did not see them: out of bag of a forest,
by five parts of boosting.

A fitted method keeps its trees as tensors and not as a pickle; they predict what scikit-learn does
(`tests/test_trees.py`).

Source: Breiman 2001, "Random Forests"; Friedman 2001, "Greedy function approximation: a gradient boosting
machine"; for `conformal` Vovk et al. 2019, "Nonparametric predictive distributions based on conformal
prediction", in its split form; for `quantile` Koenker and Bassett 1978, "Regression Quantiles".

Shapes: B rows, D inputs, T trees, M nodes of all trees, K outputs, S normals of a mixture.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from bench.contract import Batch, Method, Prediction, Problem
from bench.errors import UsageError
from bench.likelihoods import Categorical, Gaussian
from bench.predictions import Categorical as Classes
from bench.predictions import Gaussian as Normals
from bench.settings import Count, settings

LEVELS = (np.arange(10) + 0.5) / 10
"""Of the quantiles that stand for a distribution: the middles of ten equal shares."""
PARTS = 5
DOUBTS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1)
"""Shares of a uniform distribution over classes among which one is chosen: no class has probability 0."""
_AT_A_TIME = 2**22  # rows times trees

Fit = Callable[[np.ndarray, np.ndarray], Any]
"""Fits a model of scikit-learn to inputs `[B, D]` and targets `[B]`."""


@settings
class ForestSettings:
    """Settings of a random forest."""

    trees: Count = 100
    """Trees, at least 1."""
    noise: Literal["normal", "conformal"] = "normal"
    """Of numbers, about the mean: normal, or as the residuals of rows that the trees did not see."""


@settings
class BoostingSettings:
    """Settings of gradient boosting."""

    trees: Count = 100
    """Rounds of boosting at most, at least 1; from 10,000 rows on they stop early, as scikit-learn does."""
    noise: Literal["normal", "conformal", "quantile"] = "normal"
    """Of numbers: normal, as the residuals of rows not seen, or ten quantiles that are fitted each."""


class _Trees(Method):
    """What both share: trees as tensors, and what is told of a number or a class."""

    provides = frozenset()
    trains = False
    feature: Tensor  # [M]
    threshold: Tensor  # [M]
    below: Tensor  # [M], where a row goes on whose input is at most the threshold; a leaf leads to itself
    above: Tensor  # [M]
    value: Tensor  # [M, K], of leaves
    roots: Tensor  # [T]
    base: Tensor  # [K]
    offsets: Tensor  # [S], of the normals about the outputs
    spread: Tensor  # [], their standard deviation; of classes the share of doubt

    def __init__(self, problem: Problem, settings: Any, start: Method | None = None) -> None:
        super().__init__(problem, settings, start)
        if not isinstance(self.likelihood, Categorical | Gaussian) or getattr(
            self.likelihood, "per_example", False
        ):
            raise UsageError("trees predict one number of unknown noise, or classes")
        if problem.train[0][0].ndim != 1 or len(problem.train[0]) > 2:
            raise UsageError("trees take the rows of a table: one vector of inputs each, without weights")
        self.network = nn.Identity()
        for name in ("feature", "threshold", "below", "above", "value", "roots", "base", "offsets", "spread"):
            self.register_buffer(name, torch.zeros(0))

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As of any module; there may be any number of trees."""
        for name, kept in state.items():
            if name in self._buffers:
                self.register_buffer(name, torch.empty_like(kept))
        return super().load_state_dict(state, strict, assign)

    # ---- fitting

    @abstractmethod
    def model(self, seed: int, **changed: Any) -> Any:
        """An unfitted model of scikit-learn."""

    @abstractmethod
    def unseen(self, inputs: np.ndarray, targets: np.ndarray, fitted: Any, fit: Fit) -> np.ndarray:
        """Predictions of training rows by trees that did not see them: numbers `[B]` or shares `[B, C]`."""

    @property
    def of_classes(self) -> bool:
        """Whether the target is a class."""
        return isinstance(self.likelihood, Categorical)

    def finish_fit(self, loader: Iterable[Batch]) -> None:
        """All of the fit."""
        parts = list(loader)
        inputs = torch.cat([batch.inputs for batch in parts]).double().cpu().numpy()
        targets = torch.cat([batch.targets for batch in parts]).double().cpu().numpy()
        targets = targets.reshape(len(targets), -1)[:, 0]
        seed = int(torch.randint(2**31, (), generator=self.generator))
        if getattr(self.settings, "noise", "") == "quantile" and not self.of_classes:
            self._fit_quantiles(inputs, targets, seed)
            return

        def fit(x: np.ndarray, y: np.ndarray) -> Any:
            return self.model(seed).fit(x, y)

        fitted = fit(inputs, targets)
        self._keep([fitted])
        unseen = self.unseen(inputs, targets, fitted, fit)
        if self.of_classes:
            share = unseen[np.arange(len(targets)), targets.astype(int)]
            uniform = 1 / unseen.shape[1]
            losses = [-np.log((1 - doubt) * share + doubt * uniform).mean() for doubt in DOUBTS]
            self._set(np.zeros(1), DOUBTS[int(np.argmin(losses))])
        elif self.settings.noise == "conformal":
            offsets = np.quantile(targets - unseen, (np.arange(50) + 0.5) / 50)
            self._set(offsets, _width(unseen[:, None] + offsets, targets))
        else:
            self._set(np.zeros(1), float(np.sqrt(((targets - unseen) ** 2).mean())))

    def _fit_quantiles(self, inputs: np.ndarray, targets: np.ndarray, seed: int) -> None:
        """A model for each level; the width of the normals at them is chosen on a fifth of the rows."""
        order = np.random.default_rng(seed).permutation(len(targets))
        held_out, others = np.split(order, [len(order) // PARTS])

        def fit(rows: np.ndarray) -> list[Any]:
            made = (self.model(seed, loss="quantile", quantile=level) for level in LEVELS)
            return [model.fit(inputs[rows], targets[rows]) for model in made]

        width = _width(np.stack([m.predict(inputs[held_out]) for m in fit(others)], 1), targets[held_out])
        self._keep(fit(order))
        self._set(np.zeros(1), width)

    def _set(self, offsets: np.ndarray, spread: float) -> None:
        self.offsets, self.spread = torch.from_numpy(offsets), torch.tensor(spread, dtype=torch.float64)

    def _keep(self, models: list[Any]) -> None:
        """The trees of models, whose outputs stand beside each other, as tensors."""
        trees: list[tuple[np.ndarray, ...]] = []
        bases: list[np.ndarray] = []
        for model in models:
            nodes, base = _taken(model)
            outputs = len(base) * len(models)
            at = len(base) * len(bases)
            trees += [(*rest, np.pad(v, ((0, 0), (at, outputs - at - v.shape[1])))) for *rest, v in nodes]
            bases.append(base)
        starts = np.cumsum([0, *(len(tree[0]) for tree in trees)])
        for k, name in enumerate(("feature", "threshold", "below", "above", "value")):
            shift = starts if name in ("below", "above") else np.zeros_like(starts)
            joined = np.concatenate([tree[k] + shift[i] for i, tree in enumerate(trees)])
            kind = torch.float64 if name in ("threshold", "value") else torch.int64
            self.register_buffer(name, torch.from_numpy(joined).to(kind))
        self.roots, self.base = torch.from_numpy(starts[:-1]), torch.from_numpy(np.concatenate(bases))

    # ---- prediction

    def raw(self, inputs: Tensor) -> Tensor:
        """Outputs `[B, K]`: the sum of the trees' leaves and the base."""
        x, found = inputs.double(), []
        for piece in x.split(max(1, _AT_A_TIME // max(1, len(self.roots)))):
            rows = torch.arange(len(piece))[:, None]
            node, before = self.roots.expand(len(piece), -1), None
            while before is None or not torch.equal(node, before):
                before = node
                is_below = piece[rows, self.feature[node]] <= self.threshold[node]
                node = torch.where(is_below, self.below[node], self.above[node])
            found.append(torch.stack([column[node].sum(1) for column in self.value.T], 1))
        return torch.cat(found) + self.base

    def probabilities(self, raw: Tensor) -> Tensor:
        """Probabilities of the classes, `[B, C]`."""
        return raw

    def predict(self, inputs: Tensor, num_samples: int, generator: torch.Generator) -> Prediction:
        """One prediction of classes; of a number the S normals of its mixture, whatever is asked for."""
        raw = self.raw(inputs)
        if self.of_classes:
            shares = self.probabilities(raw)
            shares = (1 - self.spread) * shares / shares.sum(1, keepdim=True) + self.spread / shares.shape[1]
            return Classes(shares.log()[None].to(inputs.dtype))
        mean = (raw.T[:, None, :] + self.offsets[None, :, None]).flatten(0, 1)[..., None].to(inputs.dtype)
        return Normals(mean, self.spread.square().to(mean).expand_as(mean))


class RandomForest(_Trees):
    """A random forest of scikit-learn: no posterior, and no network."""

    approximates = "no posterior: the mean of trees, each of a resample of the rows"
    declares = "none"
    settings_class = ForestSettings

    def model(self, seed: int, **changed: Any) -> Any:
        """A forest: for numbers leaves of 5 rows and a third of the inputs at a node; for classes as is."""
        from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor

        kind: dict[str, Any] = {"n_estimators": self.settings.trees, "oob_score": True, "random_state": seed}
        kind |= {"n_jobs": torch.get_num_threads()}
        if self.of_classes:
            return RandomForestClassifier(**kind)
        return RandomForestRegressor(**kind, min_samples_leaf=5, max_features=1 / 3)

    def unseen(self, inputs: np.ndarray, targets: np.ndarray, fitted: Any, fit: Fit) -> np.ndarray:
        """Out of bag; where no tree left a row out, the mean over all."""
        name = "oob_decision_function_" if self.of_classes else "oob_prediction_"
        found = np.asarray(getattr(fitted, name))
        return np.where(np.isnan(found), np.nanmean(found, 0), found)


class GradientBoosting(_Trees):
    """Histogram-based gradient boosting of scikit-learn: no posterior, and no network."""

    approximates = "no posterior: a sum of trees, each fitted to what the others left"
    declares = "none"
    settings_class = BoostingSettings

    def model(self, seed: int, **changed: Any) -> Any:
        """Boosting with scikit-learn's defaults."""
        from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

        kind = HistGradientBoostingClassifier if self.of_classes else HistGradientBoostingRegressor
        return kind(max_iter=self.settings.trees, random_state=seed, **changed)

    def unseen(self, inputs: np.ndarray, targets: np.ndarray, fitted: Any, fit: Fit) -> np.ndarray:
        """Predictions of each of five parts by boosting on the other four."""
        from sklearn.model_selection import KFold

        shape = (len(targets), int(targets.max()) + 1) if self.of_classes else (len(targets),)
        found = np.zeros(shape)
        for others, part in KFold(PARTS, shuffle=True, random_state=0).split(inputs):
            model = fit(inputs[others], targets[others])
            if self.of_classes:
                found[np.ix_(part, model.classes_.astype(int))] = model.predict_proba(inputs[part])
            else:
                found[part] = model.predict(inputs[part])
        return found

    def probabilities(self, raw: Tensor) -> Tensor:
        """Softmax of the outputs, of two classes the sigmoid of one."""
        if raw.shape[1] == 1:
            return torch.cat([-raw, raw], 1).sigmoid()
        return raw.softmax(1)


def _taken(model: Any) -> tuple[list[tuple[np.ndarray, ...]], np.ndarray]:
    """Trees `(feature, threshold, below, above, value [M, K])` of a fitted model, and its base `[K]`."""
    trees: list[tuple[np.ndarray, ...]] = []
    if hasattr(model, "estimators_"):
        for estimator in model.estimators_:
            t = estimator.tree_
            is_leaf, here = t.children_left < 0, np.arange(t.node_count)
            value = np.where(is_leaf[:, None], t.value[:, 0, :], 0) / len(model.estimators_)
            feature = np.where(is_leaf, 0, t.feature)
            sides = (np.where(is_leaf, here, side) for side in (t.children_left, t.children_right))
            trees.append((feature, t.threshold, *sides, value))
        return trees, np.zeros(trees[0][-1].shape[1])
    base = np.ravel(model._baseline_prediction).astype(np.float64)
    for of_round in model._predictors:
        for k, predictor in enumerate(of_round):
            n = predictor.nodes
            is_leaf, here = n["is_leaf"].astype(bool), np.arange(len(n))
            value = np.zeros((len(n), len(base)))
            value[:, k] = np.where(is_leaf, n["value"], 0)
            feature = np.where(is_leaf, 0, n["feature_idx"])
            sides = (np.where(is_leaf, here, n[side].astype(int)) for side in ("left", "right"))
            trees.append((feature, n["num_threshold"].astype(np.float64), *sides, value))
    return trees, base


def _width(means: np.ndarray, targets: np.ndarray) -> float:
    """The standard deviation of normals at `[B, S]` under which targets `[B]` are likeliest."""
    scale = float(targets.std()) or 1.0
    widths = scale * np.geomspace(1e-3, 1, 31)
    squares = (targets[:, None] - means) ** 2
    losses = []
    for width in widths:
        logs = -0.5 * squares / width**2 - np.log(width)
        losses.append(-np.logaddexp.reduce(logs, 1).mean())
    return float(widths[int(np.argmin(losses))])
