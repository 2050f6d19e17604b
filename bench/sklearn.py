"""Posteriors as estimators of scikit-learn: network, prior and training of `own_table`, on data in memory.

    from bench.sklearn import PosteriorRegressor

    model = PosteriorRegressor("deep_ensemble").fit(X, y)
    model.predict(X), model.predict_interval(X, 0.9), model.predict_dist(X).epistemic

`fit` poses the problem that the task `own_table` poses, with no row to test on, and hands it to the same
engine: an estimator that is fitted to the rows of a run that are not held out predicts what the run predicts,
to the last bit. `bench.load(run).estimator()` is the estimator of a run. Nothing is printed, and no file is
written.

From 10,000 rows on a tenth of them, and at most 10,000, is kept aside at random (of classes the same share
each), and the fit stops when it predicts these no better: where rows come in groups or by time, `own_table`
keeps whole groups or the latest aside.

Example weights multiply the log likelihood and are not normalised: a weight of 2 is the row twice, a weight
of 0 is no row. They count the same way in the means and scales by which columns are standardised. Of rows
that are kept aside each counts as one.

Shapes: S weight samples, B rows, C classes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state, compute_sample_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import (
    check_array,
    check_consistent_length,
    check_is_fitted,
    column_or_1d,
    validate_data,
)

from bench import cells, encoding, learning
from bench.columns import Column, Wish, judged
from bench.errors import UsageError
from bench.text import one_line

_IN_MEMORY = {
    "--task.drop ": "X without ",
    "--task.categorical ": "the dtype category for ",
    "--task.dates ": "a dtype of dates for ",
    "--task.decimal , reads": "numbers with a point mend",
    "--task.": "",
    "--method.": "method_settings: ",
}
"""What stands in messages in place of words of the command line."""


class Refused(UsageError, ValueError):
    """What scikit-learn expects of an estimator that is given what it cannot take; one line."""


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        said = str(error)
        for flag, words in _IN_MEMORY.items():
            said = said.replace(flag, words)
        raise Refused(said) from None


class _Frame:
    """Columns by name, `[N]` each, as `bench.cells.table` takes them, and what their dtypes say of them."""

    def __init__(self, columns: Mapping[str, list[Any]], wishes: Mapping[str, Wish]) -> None:
        self.columns, self._values, self.wishes = list(columns), columns, wishes

    def __getitem__(self, name: str) -> list[Any]:
        return self._values[name]


def _wish(dtype: Any) -> Wish | None:
    """What a dtype of pandas or polars says that its column is of; None says nothing."""
    name = str(dtype).lower()
    if name.startswith(("categor", "enum")):
        return "category"
    return "date" if name.startswith(("date", "timestamp")) else None


class Posterior:
    """A fitted posterior and all that builds it again: what an estimator keeps, and what is pickled of it.

    Args:
        method: The fitted method, or several members pooled.
        encoder: What was learned from the training rows.
        name: Of the method, as `bench.runs.registry.method` knows it.
        task_settings: Of `own_table`, by name.
    """

    def __init__(
        self, method: Any, encoder: encoding.Encoder, name: str, task_settings: dict[str, Any]
    ) -> None:
        self.method, self.encoder = method, encoder
        self.name, self.task_settings = name, task_settings

    def predicted(self, rows: _Frame, num_samples: int) -> Any:
        """The `bench.studies.predictive.Predictive` of rows."""
        import torch

        from bench.studies.predictive import predicted

        inputs = torch.from_numpy(self.encoder.encode_rows(rows)).float()
        return predicted(self.method, inputs, num_samples, 0, self.encoder.target)

    def __getstate__(self) -> dict[str, Any]:
        from bench.engine import checkpoints
        from bench.engine.ensemble import Ensemble

        members = self.method.members if isinstance(self.method, Ensemble) else [self.method]
        return {
            "name": self.name,
            "task_settings": self.task_settings,
            "encoder": self.encoder.model_dump_json(),
            "method_settings": asdict(members[0].settings),
            "members": [checkpoints.content(member, {}) for member in members],
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        import torch

        from bench.engine import checkpoints
        from bench.engine.ensemble import Ensemble
        from bench.runs import registry

        self.name, self.task_settings = state["name"], state["task_settings"]
        self.encoder = encoding.Encoder.model_validate_json(state["encoder"])
        registry.import_own(self.name, *filter(None, [self.task_settings["network"]]))
        problem = _task(self.task_settings).posed_again(self.encoder)
        cls = registry.method(self.name).cls
        members = []
        for content in state["members"]:
            with torch.random.fork_rng(devices=[]):
                member = cls.made_for(problem, cls.settings_class(**state["method_settings"]))
            checkpoints.give(member, content)
            members.append(member)
        self.method = members[0] if len(members) == 1 else Ensemble(members)


def _must_not_be_masked(values: Any, name: str) -> None:
    """Refuses a masked array, whose mask numpy drops on the way to a plain one; one line."""
    if isinstance(values, np.ma.MaskedArray):
        raise Refused(
            f"{name} is a masked array, of which scikit-learn drops the mask: "
            f"{name}.astype(float).filled(np.nan) has missing values in its place"
        )


def _must_have_labels(y: np.ndarray) -> None:
    """Refuses classes `[N]` of which one is missing, or is written as a missing cell is; one line."""
    if y.dtype.kind in "biufc":
        return  # scikit-learn tells these apart; of the others it says that they have no order
    for row, label in enumerate(y.tolist()):
        if cells.text(label) is None:
            raise Refused(
                f"y: the label {one_line(repr(label))} of row {row} stands for a missing one: "
                "leave such rows out, or name their class"
            )


_NOT_HERE = {
    "file": "the rows are X",
    "target": "the target is y",
    "kind": "the class of the estimator says it",
    "split_column": "fit takes the rows to train on",
    "test_samples": "num_samples says it",
}
"""Settings of `own_table` that an estimator does not take, and why."""


def _further(given: Mapping[str, Any] | None, parameters: Collection[str]) -> dict[str, Any]:
    """The settings of `own_table` beside the estimator's own parameters.

    Raises:
        UsageError: If one cannot be among them; one line.
    """
    for name in given or {}:
        if name in parameters:
            raise UsageError(f"task_settings: {name} is a parameter of the estimator itself: {name}=...")
        if name in _NOT_HERE:
            raise UsageError(f"task_settings: {name} has no meaning here: {_NOT_HERE[name]}")
    return dict(given or {})


def _task(settings: Mapping[str, Any]) -> Any:
    """The task `own_table` with these settings."""
    from bench.runs import registry
    from bench.settings import build

    cls = registry.task("own_table").cls
    return cls(build(cls.settings_class, dict(settings), "task"))


class _Estimator(BaseEstimator):
    """What regressors and classifiers share."""

    _kind: encoding.Kind
    _of_task: tuple[str, ...] = ("hidden", "network", "freeze", "epochs", "batch_size")
    """Parameters that are settings of `own_table` of the same name."""
    _columns: list[str]
    """Names of the columns that training rows have, in their order."""

    # ---- what scikit-learn asks

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = tags.input_tags.categorical = tags.input_tags.string = True
        return tags

    # ---- fitting

    def _fit(self, frame: _Frame, y: Column, weights: np.ndarray | None) -> Self:
        """Fits to rows whose targets are numbers or names of classes; a row of weight 0 is left out."""
        with _refusing():
            self.posterior_ = self._trained(frame, y, weights)
        return self

    def _trained(self, frame: _Frame, y: Column, weights: np.ndarray | None) -> Posterior:
        from bench.engine.engine import Engine
        from bench.runs.plan import Plan
        from bench.runs.resolution import resolve
        from bench.settings import build

        random = self.random_state
        if random is None or not isinstance(random, int | np.integer):
            random = check_random_state(random).randint(2**31)
        known = frame.columns
        target = next(name for i in range(len(known) + 1) if (name := "y" + i * "_") not in known)
        further = _further(self.task_settings, self._of_task)
        plan = {
            "method": self.method,
            "task": "own_table",
            "seed": int(random),
            "method_settings": dict(self.method_settings or {}),
            "task_settings": further | {"target": target} | {n: getattr(self, n) for n in self._of_task},
            "members": self.members,
            "trainer": {"devices": 1},
        }
        choice = resolve(build(Plan, plan))
        task, number = choice.task.cls(choice.task_settings), len(y.values)
        rows = np.arange(number) if weights is None else np.flatnonzero(weights)
        # What the task reads from a file and parts is here already.
        wishes, dropped = task.asked("X", [*known, target])
        used = {name: frame[name] for name in known if name not in dropped}
        found = judged("X", used, range(number), {**frame.wishes, **wishes}, task.settings.decimal)
        vars(task).update(columns={**found, target: y._replace(name=target)}, kind=self._kind)
        aside = task.kept_aside(rows)
        task.rows = {"train": rows[~aside], "val": rows[aside], "test": rows[:0]}
        if weights is not None and (weights != 1).any():
            if "weighted" not in choice.method.provides:
                raise UsageError(f"{choice.method.name} cannot weight its training rows: no sample_weight")
            task.weights = weights[rows[~aside]]
        if self.network is not None:
            task.data_digest()  # tries the network out
        engine = Engine(
            choice.method.cls,
            choice.method_settings,
            int(random),
            trainer=choice.trainer,
            members=choice.method.members,
        )
        return Posterior(task.fitted(engine), task.encoder, choice.method.name, asdict(choice.task_settings))

    def _checked(self, X: Any, y: Any, sample_weight: Any) -> tuple[_Frame, np.ndarray, np.ndarray | None]:
        """Inputs, targets `[N]`, and weights `[N]`."""
        if y is None:
            raise Refused("fit requires y to be passed, but the target y is None")
        frame = self._frame(X, reset=True)
        _must_not_be_masked(y, "y")
        y = column_or_1d(y, warn=True)
        check_consistent_length(X, y)
        if sample_weight is None:
            return frame, y, None
        weights = check_array(sample_weight, ensure_2d=False, dtype=np.float64, input_name="sample_weight")
        if weights.shape != y.shape:
            raise Refused(f"sample_weight has the shape {weights.shape}: one weight per row is {y.shape}")
        if (weights < 0).any() or not weights.any():
            which = "one is negative" if weights.any() else "all are zero"
            raise Refused(f"sample_weight: {which}, and weights must be 0 or more, one at least above 0")
        return frame, y, weights

    def _frame(self, X: Any, reset: bool) -> _Frame:
        """Inputs as columns, under the names that they had in training; with `reset` these are kept.

        Args:
            X: A data frame, or what numpy takes for an array `[B, D]`.
            reset: Whether these are the training rows.
        """
        wishes: dict[str, Wish] = {}
        _must_not_be_masked(X, "X")
        if hasattr(X, "columns"):
            validate_data(self, X, skip_check_array=True, reset=reset)
            with _refusing():
                found = cells.table(X)[1]
            wishes = {name: w for name, c in zip(found, X.columns, strict=True) if (w := _wish(X[c].dtype))}
        else:
            checks: dict[str, Any] = {"dtype": None, "ensure_all_finite": "allow-nan"}
            array = validate_data(self, X, reset=reset, ensure_min_samples=2 if reset else 1, **checks)
            found = {f"x{i}": values for i, values in enumerate(array.T.tolist())}
        if reset:
            self._columns = list(found)
            return _Frame(found, wishes)
        return _Frame(dict(zip(self._columns, found.values(), strict=True)), {})

    # ---- predicting

    def predict_dist(self, X: Any) -> Any:
        """Predictive distributions of rows `[B, D]`: a `Numbers` or `Classes` of `bench.studies.predictive`.

        Either has `epistemic` and `aleatoric`, `sample` and `abstain`.

        Raises:
            Refused: If rows cannot be used; one line.
        """
        check_is_fitted(self)
        frame = self._frame(X, reset=False)
        with _refusing():
            return self.posterior_.predicted(frame, self.num_samples)


class PosteriorRegressor(RegressorMixin, _Estimator):
    """Numbers with a posterior over a network's weights; inputs and target are standardised inside.

    Data frames of pandas and polars are taken as they are, with missing values. Columns of categories and of
    dates are what their dtypes say (`own_table` says what becomes of them); arrays are of numbers, or of
    objects.

    Args:
        method: Name of a method of the suite, or package.module:Class.
        hidden: Units of the hidden layer.
        network: package.module:factory of a network of one's own, in place of that layer.
        freeze: Of a network of one's own: train only its last layer with weights.
        noise: "learned" is one standard deviation for all rows, "heteroscedastic" one per row, which the
            network gives as a second output.
        epochs: None is 200 for fewer than 2,000 rows, 40 below 10,000, then at most 100.
        batch_size: Rows per training step; None is all of them, "auto" 32 and more from 10,000 rows on.
        num_samples: Weight samples S behind a prediction, of each member.
        members: Independent fits whose draws are pooled; None is what the method's name says.
        method_settings: Settings of the method, by name.
        task_settings: Further settings of `own_table`, by name, such as drop, categorical, dates, group,
            time, decimal, validation and patience.
        random_state: Seed of the fit, a generator that draws it, or None to draw it from numpy's own.

    Attributes:
        posterior_: The fitted method with its encoder.
        n_features_in_: Columns of the training rows, D.
        feature_names_in_: Their names, where they have names.
    """

    _kind = "regression"
    _of_task = (*_Estimator._of_task, "noise")

    def __init__(
        self,
        method: str = "deep_ensemble",
        *,
        hidden: int = 50,
        network: str | None = None,
        freeze: bool = False,
        noise: Literal["learned", "heteroscedastic"] = "learned",
        epochs: int | None = None,
        batch_size: int | Literal["auto"] | None = "auto",
        num_samples: int = 200,
        members: int | None = None,
        method_settings: Mapping[str, Any] | None = None,
        task_settings: Mapping[str, Any] | None = None,
        random_state: Any = 0,
    ) -> None:
        self.method, self.method_settings, self.members = method, method_settings, members
        self.hidden, self.network, self.freeze, self.noise = hidden, network, freeze, noise
        self.epochs, self.batch_size = epochs, batch_size
        self.num_samples, self.random_state = num_samples, random_state
        self.task_settings = task_settings

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Fits to rows `[N, D]`, targets `[N]`, and weights `[N]` of the log likelihood.

        Raises:
            Refused: If rows, targets, weights or parameters cannot be used; one line.
            Diverged: If the loss is not finite.
        """
        frame, y, weights = self._checked(X, y, sample_weight)
        if y.dtype.kind in "mM":
            raise Refused("y holds dates or times: give numbers, such as days since the first")
        numbers = check_array(y, ensure_2d=False, dtype=np.float64, input_name="y", estimator=self).tolist()
        exact = y.tolist() if y.dtype.kind in "iu" else numbers  # of whole numbers more digits may count
        return self._fit(frame, Column("y", True, numbers, list(map(str, exact))), weights)

    def predict(self, X: Any) -> np.ndarray:
        """Mean of the predictive distribution, `[B]`, in the target's unit."""
        return np.asarray(self.predict_dist(X).mean)

    def predict_interval(self, X: Any, level: float = 0.9) -> np.ndarray:
        """Ends of the central interval that holds the target with a probability of `level`, `[B, 2]`."""
        found = self.predict_dist(X)
        with _refusing():
            return np.stack(found.interval(level), 1)


class PosteriorClassifier(ClassifierMixin, _Estimator):
    """Classes with a posterior over a network's weights; inputs are standardised inside.

    Args:
        method: As of `PosteriorRegressor`, and so all that follow.
        hidden: See there.
        network: See there.
        freeze: See there.
        epochs: See there.
        batch_size: See there.
        num_samples: See there.
        members: See there.
        method_settings: See there.
        task_settings: See there.
        class_weight: Weights by class, which multiply those of the rows; "balanced" gives every class the
            same share; None is 1 each.
        random_state: See there.

    Attributes:
        classes_: As `numpy.unique` has them, `[C]`.
        posterior_: The fitted method with its encoder.
        n_features_in_: Columns of the training rows, D.
        feature_names_in_: Their names, where they have names.
    """

    _kind = "classification"

    def __init__(
        self,
        method: str = "deep_ensemble",
        *,
        hidden: int = 50,
        network: str | None = None,
        freeze: bool = False,
        epochs: int | None = None,
        batch_size: int | Literal["auto"] | None = "auto",
        num_samples: int = 200,
        members: int | None = None,
        method_settings: Mapping[str, Any] | None = None,
        task_settings: Mapping[str, Any] | None = None,
        class_weight: Mapping[Any, float] | Literal["balanced"] | None = None,
        random_state: Any = 0,
    ) -> None:
        self.method, self.method_settings, self.members = method, method_settings, members
        self.hidden, self.network, self.freeze = hidden, network, freeze
        self.epochs, self.batch_size = epochs, batch_size
        self.num_samples, self.random_state = num_samples, random_state
        self.task_settings = task_settings
        self.class_weight = class_weight

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Fits to rows `[N, D]`, classes `[N]`, and weights `[N]` of the log likelihood.

        Raises:
            Refused: If rows, classes, weights or parameters cannot be used; one line.
            Diverged: If the loss is not finite.
        """
        frame, y, weights = self._checked(X, y, sample_weight)
        _must_have_labels(y)
        check_classification_targets(y)
        if self.class_weight is not None:
            by_class = compute_sample_weight(self.class_weight, y)
            weights = by_class if weights is None else weights * by_class
        every, codes = np.unique(y, return_inverse=True)
        kept = np.unique(codes if weights is None else codes[weights > 0])
        if len(kept) < 2:
            raise Refused(f"y has one class, {one_line(every[kept[0]])}: there is nothing to learn")
        names = self._names(every)
        labels = [names[code] for code in codes]
        self._fit(frame, Column("y", False, labels, labels), weights)
        self._keep(every[kept], [names[code] for code in kept])
        return self

    @staticmethod
    def _names(every: np.ndarray) -> list[str]:
        """The names of different classes `[C]`, for the encoder."""
        texts = [str(cells.text(value)) for value in every.tolist()]
        names = learning.identities(Column("y", False, texts, texts))
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise Refused(f"y: several labels are written '{one_line(twice)}': rename one")
        return names

    def _keep(self, classes: np.ndarray, names: list[str]) -> None:
        """Keeps the classes, and in which order the outputs of the network have those of these names."""
        self.classes_ = classes
        self._order = [self.posterior_.encoder.target.classes.index(name) for name in names]

    def predict_dist(self, X: Any) -> Any:
        """Predictive distributions of rows `[B, D]`, a `bench.studies.predictive.Classes`."""
        found = super().predict_dist(X)
        return replace(found, by_sample=found.by_sample[..., self._order], names=self.classes_)

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities of the classes, averaged over the posterior, `[B, C]`, in the order of `classes_`."""
        return np.asarray(self.predict_dist(X).probabilities)

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class, `[B]`."""
        places = self.predict_proba(X).argmax(1)
        return np.asarray(self.classes_[places])


def of_run(run: Path, method: Any, encoder: encoding.Encoder) -> PosteriorRegressor | PosteriorClassifier:
    """The estimator that a finished run of `own_table` has fitted.

    Classes are whole numbers where all of them are, else texts.

    Args:
        run: Its directory.
        method: As it is restored.
        encoder: What was learned from the training rows.

    Raises:
        UsageError: If the run's record cannot be read.
    """
    from bench.runs.records import read_record

    record = read_record(run)
    made, task = record.method, record.task.settings
    classes = encoder.target.classes
    cls = PosteriorClassifier if classes else PosteriorRegressor
    parameters = {name: task[name] for name in cls._of_task}
    usual = asdict(_task({}).settings)
    further = {n: v for n, v in task.items() if v != usual[n] and n not in {*_NOT_HERE, *parameters, "noise"}}
    if task.get("split_column") is not None:  # no input of the run
        further["drop"] = ",".join(filter(None, [task["drop"], task["split_column"]]))
    parameters |= {"members": made.members, "method_settings": made.settings, "random_state": record.seed}
    parameters["task_settings"] = further or None
    estimator = cls(made.name, **parameters)
    estimator.posterior_ = Posterior(method, encoder, made.name, task)
    estimator.n_features_in_ = len(encoder.columns)
    estimator._columns = [column.name for column in encoder.columns]
    estimator.feature_names_in_ = np.array(estimator._columns, object)
    if isinstance(estimator, PosteriorClassifier):
        whole = all(cells.whole(name) == name for name in classes)
        labels, order = np.unique([int(name) for name in classes] if whole else classes, return_index=True)
        estimator._keep(labels, [classes[place] for place in order])
    return estimator
