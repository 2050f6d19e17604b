"""What training rows teach of a table's columns: the encoder that `bench.encoding` applies to any rows.

All is what scikit-learn's transformers learn from the training rows alone. The means of many categories are
shrunk to that of all rows (Micci-Barreca 2001, "A preprocessing scheme for high-cardinality categorical
attributes").
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from bench import cells
from bench.columns import MOST_CATEGORIES, Column
from bench.encoding import (
    Categories,
    Dates,
    Encoder,
    Kind,
    Learned,
    ManyCategories,
    Numbers,
    Target,
    Texts,
    places_of,
    years_of,
)
from bench.errors import UsageError
from bench.text import one_line

FEW_NUMBERS = 10
"""Different whole numbers up to which a target is taken for classes."""


def fit(
    columns: Sequence[Column],
    target: Column,
    kind: Kind,
    rows: np.ndarray,
    weights: np.ndarray | None = None,
    text_encoder: str = "",
) -> Encoder:
    """What scikit-learn's transformers learn from these rows, and from no others.

    Args:
        columns: Of the inputs.
        target: What is predicted.
        kind: Of the target.
        rows: Numbers of the training rows `[N]`.
        weights: Of these rows, above 0, `[N]`: of a weight of 2 the row counts twice, in medians, means and
            scales. None is 1 each.
        text_encoder: Folder of what reads columns of texts, if there are some.

    Raises:
        UsageError: If the rows have no value of a column, one value of the target, or numbers of more digits
            than are computed with; one line.
    """
    for each in (*columns, *([target] if kind == "regression" else [])):
        refuse_rounded(each, rows)
    aim = _target(target, kind, rows, weights)
    learned: list[Learned] = []
    for c in columns:
        values = [c.values[row] for row in rows]
        if c.is_text:
            learned.append(_learned_texts(c, values, weights, text_encoder))
        elif c.is_number:
            learned.append(_learned_numbers(c, values, weights))
        elif c.form is not None:
            learned.append(_learned_dates(c, values, weights))
        elif len(set(values)) > MOST_CATEGORIES:
            learned.append(_learned_means(c, values, _aims(aim, target, rows), weights))
        else:
            learned.append(Categories(name=c.name, categories=_sorted(values)))
    return Encoder(rows=len(rows), columns=learned, target=aim, decimal=target.decimal)


def of_training(
    encoder: Encoder,
    columns: Sequence[Column],
    target: Column,
    rows: np.ndarray,
    weights: np.ndarray | None = None,
) -> np.ndarray:
    """Inputs `[N, D]` of the rows that the encoder was fitted on.

    They are `Encoder.encode`'s but for `ManyCategories`: a row's own target must not be in its input, since
    a network would read it off there and find nothing of it in new rows. So the means of each of five parts
    are those of the other four. Arguments are those of `fit`.
    """
    values = {c.name: [c.values[row] for row in rows] for c in columns}
    parts = []
    for learned in encoder.columns:
        of_column = values[learned.name]
        if isinstance(learned, ManyCategories):
            parts.append(_means_of_others(of_column, _aims(encoder.target, target, rows), weights))
        else:
            parts.append(learned.encode(of_column))
    return np.concatenate(parts, 1)


def _sorted(values: Iterable[Any]) -> list[str | None]:
    """Each value once, in order, None last, as scikit-learn's OneHotEncoder has them."""
    return sorted(set(values), key=lambda value: (value is None, value))


def _aims(target: Target, column: Column, rows: np.ndarray) -> np.ndarray:
    """What categories are given the mean of, `[N, K]`: standardised numbers, or a column of 0 or 1 a class.

    Of two classes the second alone.
    """
    if not target.classes:
        numbers = np.array([column.values[row] for row in rows], np.float64)
        return ((numbers - target.mean) / target.scale)[:, None]
    names, classes = identities(column), target.classes[1:] if len(target.classes) == 2 else target.classes
    return np.array([[float(names[row] == name) for name in classes] for row in rows])


def _shrunk(
    places: np.ndarray, number: int, aims: np.ndarray, weights: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Mean aims of each category, `[number, K]`, shrunk to those of all rows, `[K]`.

    The share of its own mean is b / (b + w), with w the variance within the category and b that of all rows,
    times the category's rows (Micci-Barreca 2001, eq. 5 and 6, as in scikit-learn's TargetEncoder).

    Args:
        places: Of each row its category, `[N]`.
        number: Of categories; one without rows has the mean of all.
        aims: `[N, K]`.
        weights: `[N]`.
    """
    count = np.bincount(places, weights, number)[:, None]
    overall = np.average(aims, 0, weights)

    def mean(values: np.ndarray) -> np.ndarray:
        return np.stack([np.bincount(places, weights * each, number) for each in values.T], 1) / count

    with np.errstate(divide="ignore", invalid="ignore"):
        means = mean(aims)
        between = count * np.average((aims - overall) ** 2, 0, weights)
        share = between / (between + mean((aims - means[places]) ** 2))
        return np.where(np.isnan(share), overall, share * means + (1 - share) * overall), overall


def _means_of_others(values: list[Any], aims: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
    """Inputs `[N, K]`: of each of five parts of the rows the means of their categories in the others."""
    from sklearn.model_selection import KFold

    categories = _sorted(values)
    places, found = np.array(places_of(categories, values)), np.empty(aims.shape)
    weights = np.ones(len(values)) if weights is None else weights
    for others, part in KFold(5, shuffle=True, random_state=0).split(places):
        means, _ = _shrunk(places[others], len(categories), aims[others], weights[others])
        found[part] = means[places[part]]
    return found


def _learned_means(
    column: Column, values: list[Any], aims: np.ndarray, weights: np.ndarray | None
) -> ManyCategories:
    categories = _sorted(values)
    places = np.array(places_of(categories, values))
    weights = np.ones(len(values)) if weights is None else weights
    means, overall = _shrunk(places, len(categories), aims, weights)
    return ManyCategories(
        name=column.name, categories=categories, means=means.tolist(), otherwise=overall.tolist()
    )


def _learned_dates(column: Column, values: list[Any], weights: np.ndarray | None) -> Dates:
    dates = np.array(values, "datetime64[us]")
    present = ~np.isnat(dates)
    years = years_of(dates[present])
    if not len(years):
        raise UsageError(f"column '{one_line(column.name)}' is empty in all training rows: take it out")
    mean, scale = _moments(years, None if weights is None else weights[present])
    return Dates(
        name=column.name,
        form=column.form,  # type: ignore[arg-type]
        has_time=any(value is not None and value.time() != time() for value in values),
        has_missing=len(years) < len(dates),
        constant=len(np.unique(dates[present])) == 1,
        mean=mean,
        scale=scale or 1.0,
    )


def _moments(numbers: np.ndarray, weights: np.ndarray | None) -> tuple[float, float]:
    """Mean and standard deviation of values `[N]`, each as often as its weight says."""
    mean = np.average(numbers, weights=weights)
    return float(mean), float(np.sqrt(np.average((numbers - mean) ** 2, weights=weights)))


def _median(numbers: np.ndarray, weights: np.ndarray) -> float:
    """The middle of the values `[N]`, each as often as its weight says; mean of the two, where there are."""
    order = np.argsort(numbers)
    below = weights[order].cumsum() / weights.sum()
    low, high = (np.searchsorted(below, 0.5 + sign * 1e-12) for sign in (-1, 1))
    return float((numbers[order[low]] + numbers[order[high]]) / 2)


def _learned_numbers(column: Column, values: list[Any], weights: np.ndarray | None) -> Numbers:
    from sklearn.impute import SimpleImputer  # here, for their imports take a second
    from sklearn.preprocessing import StandardScaler

    numbers = np.array(values, np.float64)[:, None]
    if np.isnan(numbers).all():
        raise UsageError(f"column '{one_line(column.name)}' is empty in all training rows: take it out")
    imputer = SimpleImputer(strategy="median", add_indicator=bool(np.isnan(numbers).any()))
    filled = imputer.fit_transform(numbers)
    median = float(imputer.statistics_[0])
    if weights is not None:
        present = ~np.isnan(numbers[:, 0])
        median = _median(numbers[present, 0], weights[present])
        filled[~present, 0] = median
    with np.errstate(over="ignore", invalid="ignore"):
        scaler = StandardScaler().fit(filled, sample_weight=weights)
    if not np.isfinite(scaler.scale_).all():
        raise UsageError(f"column '{one_line(column.name)}' holds numbers too large to be standardised")
    learned = Numbers(
        name=column.name,
        decimal=column.decimal,
        median=median,
        mean=scaler.mean_.tolist(),
        scale=scaler.scale_.tolist(),
        constant=len({value for value in values if value is not None}) == 1,
    )
    # scikit-learn takes what it cannot tell from rounding for constant, and divides it by 1.
    if not learned.constant and not 0.5 < _moments(learned.encode(values)[:, 0], weights)[1] < 2:
        raise UsageError(
            f"column '{one_line(column.name)}' differs too little from row to row beside the size of its "
            "numbers to be standardised: give it in a smaller unit, or less a constant"
        )
    return learned


def _learned_texts(column: Column, values: list[Any], weights: np.ndarray | None, folder: str) -> Texts:
    from bench import bert  # here, since it imports torch

    reader = bert.opened(folder)
    present = np.array([value is not None for value in values])
    if not present.any():
        raise UsageError(f"column '{one_line(column.name)}' is empty in all training rows: take it out")
    vectors = reader.vectors([value for value in values if value is not None]).astype(np.float64)
    of_rows = None if weights is None else weights[present]
    mean = np.average(vectors, 0, of_rows)
    scale = np.sqrt(np.average((vectors - mean) ** 2, 0, of_rows))
    return Texts(
        name=column.name,
        folder=str(Path(folder).resolve()),
        digest=reader.digest,
        mean=mean.tolist(),
        scale=np.where(scale > 1e-6, scale, 1.0).tolist(),
    )


def _target(target: Column, kind: Kind, rows: np.ndarray, weights: np.ndarray | None) -> Target:
    if kind == "classification":
        names = identities(target)
        return Target(name=target.name, classes=classes(names[row] for row in rows))
    numbers = np.array([target.values[row] for row in rows], np.float64)
    where = f"the target '{one_line(target.name)}'"
    if len(set(numbers)) < 2:
        raise UsageError(
            f"{where} is {numbers[0]:g} in all {len(rows)} training rows: there is nothing to learn"
        )
    with np.errstate(over="ignore", under="ignore"):
        mean, scale = _moments(numbers, weights)
    if not math.isfinite(scale):
        raise UsageError(f"{where} holds numbers too large to be standardised: give it in a larger unit")
    if scale * scale < np.finfo(np.float64).tiny:
        raise UsageError(
            f"{where} differs too little from row to row to be standardised: give it in a smaller unit"
        )
    return Target(name=target.name, mean=mean, scale=scale)


_ROUNDED = 1e-2
"""Share of a column's standard deviation by which reading may round its numbers."""


def refuse_rounded(column: Column, rows: np.ndarray) -> None:
    """Refuses a column whose differences a float of 64 bits does not have, as those of 2^60 and 2^60 + 1.

    Args:
        column: Of any kind.
        rows: Of training.

    Raises:
        UsageError: One line.
    """
    if not column.is_number:
        return
    present = [row for row in rows if column.values[row] is not None]
    numbers = np.array([column.values[row] for row in present], np.float64)
    with np.errstate(all="ignore"):
        allowed = _ROUNDED * float(numbers.std()) if len(present) else math.inf
    if not math.isfinite(allowed) or np.spacing(np.abs(numbers)).max() <= allowed:
        return  # most columns: no text needs to be read again
    exact = [Decimal((column.texts[row] or "").replace(",", ".")) for row in present]
    if (numbers == numbers[0]).all():
        is_rounded = [value != exact[0] for value in exact]
    else:
        pairs = zip(exact, numbers.tolist(), strict=True)
        is_rounded = [  # the shortest text of a float is that float: it was one before
            value != Decimal(repr(number)) and abs(value - Decimal(number)) > Decimal(allowed) > 0
            for value, number in pairs
        ]
    if True in is_rounded:
        written = one_line(column.texts[present[is_rounded.index(True)]] or "")
        raise UsageError(
            f"column '{one_line(column.name)}' holds {written}, of more digits than are computed with (about "
            "16): what differs from row to row would be rounded off; give it less a constant"
        )


def identities(target: Column) -> list[str]:
    """The name of the class of each row, `[N]`, of a target without missing values.

    Of a column of whole numbers a class is its integer, whatever its size (1 and 1.0 are one class); of one
    that says true and false in several spellings it is true or false; of any other it is its exact text, so
    that 7 and 007 are two.
    """
    texts = [value for value in target.texts if value is not None]
    integers = [integer for value in texts if (integer := cells.whole(value)) is not None]
    if len(integers) == len(texts):
        return integers
    small = {value.lower() for value in texts}
    is_boolean = small <= {"true", "false"} and len(set(texts)) > len(small)
    return [value.lower() for value in texts] if is_boolean else texts


def classes(names: Iterable[str]) -> list[str]:
    """The classes among the names, each once, in the order of their numbers if all are numbers."""
    found = sorted(set(names))
    if all(map(cells.NUMBER.fullmatch, found)):
        return sorted(found, key=Decimal)
    return found


def guessed(target: Column) -> tuple[Kind, str]:
    """What a target is taken for, and why."""
    names = identities(target)
    different = len(set(names))
    if not target.is_number:
        return "classification", f"{different} different texts"
    if different <= FEW_NUMBERS and all(float(v).is_integer() for v in target.values if isinstance(v, float)):
        return "classification", f"{different} different whole numbers"
    return "regression", f"{different} different numbers"
