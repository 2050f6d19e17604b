"""A user's own table: read, judged column by column, and encoded by what its training rows teach.

A column is of numbers if every value is one, else of categories. Numbers become standardised; a missing one
is the median of the training rows, and a second input says that it was missing. Every category that the
training rows have becomes an input that is 0 or 1, "missing" among them if it occurs there. Medians, means,
scales and categories are learned by scikit-learn's transformers from the training rows alone, and kept as
JSON: `Encoder` applies them without scikit-learn. What cannot be encoded so (free text, a date) is refused by
name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import pydantic
from pydantic import Field

from bench import cells
from bench.cells import read as read
from bench.cells import text
from bench.errors import UsageError
from bench.text import one_line

MOST_CATEGORIES = 50
"""Different texts from which on a column is free text, whatever the number of rows."""
FEW_NUMBERS = 10
"""Different whole numbers up to which a target is taken for classes."""

_INFINITY = re.compile(r"[+-]?inf(inity)?", re.IGNORECASE)
_DATE = re.compile(r"\d{1,4}([-/.])\d{1,2}\1\d{1,4}([ T].*)?")

FARTHEST = 1e12  # a 32-bit network still has finite outputs there

Kind = Literal["regression", "classification"]
Values = Sequence[float | None] | Sequence[str | None]
"""Of a column, row after row; None is missing."""


class Column(NamedTuple):
    """A column by its name: numbers, or categories.

    Attributes:
        name: Of the column.
        is_number: Whether it is of numbers.
        values: Numbers, or categories.
        texts: As they are written, row after row; None is missing.
    """

    name: str
    is_number: bool
    values: Values
    texts: Sequence[str | None]


# ------------------------------------------------------------------------------------------------ judging


def column(path: Path, name: str, given: Iterable[Any], may_be_text: bool = False) -> Column:
    """A column, judged by all its cells.

    Args:
        path: What to call the file.
        name: Of the column.
        given: Its cells, as read.
        may_be_text: Whether texts may all be different, as the names of groups may.

    Raises:
        UsageError: If it is empty, or holds an infinity, dates, lists or free text; one line.
    """
    where = f"{path}: column '{one_line(name)}'"
    try:
        values = [text(cell) for cell in given]
    except ValueError as error:
        raise UsageError(f"{where} {error}") from None
    present = [value for value in values if value is not None]
    if not present:
        raise UsageError(f"{where} is empty: take it out")
    if may_be_text:
        return Column(name, False, values, values)
    if all(cells.NUMBER.fullmatch(value) or _INFINITY.fullmatch(value) for value in present):
        numbers = [None if value is None else float(value) for value in values]
        if (infinite := next((v for v in numbers if v is not None and math.isinf(v)), None)) is not None:
            row = numbers.index(infinite) + 1
            raise UsageError(
                f"{where} holds {infinite} in row {row}: give a finite number, or leave it empty"
            )
        return Column(name, True, numbers, values)
    different, example = len(set(present)), one_line(present[0])[:40]
    if all(map(_DATE.fullmatch, present)):
        raise UsageError(
            f"{where} holds dates such as {example}, which cannot be encoded: give numbers, such as days "
            "since a first date, or take it out"
        )
    if different > MOST_CATEGORIES or 2 * different > len(present):
        raise UsageError(
            f"{where} holds {different} different texts in {len(present)} rows, such as '{example}': free "
            f"text cannot be encoded; take it out, or write few categories (at most {MOST_CATEGORIES})"
        )
    if all(value.lower() in ("true", "false") for value in present):  # one spelling, since others read alike
        return Column(name, False, [None if v is None else cells.boolean(v) for v in values], values)
    return Column(name, False, values, values)


# ------------------------------------------------------------------------------------------------- encoding


class _Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class Numbers(_Model):
    """A column of numbers: one input, and a second that says what is missing, if training rows lack any.

    Attributes:
        name: Of the column.
        kind: number.
        median: Of the training rows; stands for a missing value.
        mean: Of each input over the training rows.
        scale: By which it is divided: its standard deviation, 1 where it never changes.
        constant: Whether training rows have one value alone: what another would mean nothing taught, so that
            the first input is 0 whatever a row says.
    """

    name: str
    kind: Literal["number"] = "number"
    constant: bool = False
    median: float
    mean: list[float] = Field(min_length=1, max_length=2)
    scale: list[Annotated[float, Field(gt=0)]] = Field(min_length=1, max_length=2)

    def encode(self, values: Values) -> np.ndarray:
        """Inputs `[N, 1]` or `[N, 2]`.

        Raises:
            UsageError: If one is too far from those of the training rows for a network; one line.
        """
        inputs = [[self.median if v is None else v, v is None][: len(self.mean)] for v in values]
        with np.errstate(over="ignore"):
            encoded = (np.array(inputs, np.float64) - self.mean) / self.scale
        if self.constant:
            encoded[:, 0] = 0
        if (far := np.abs(encoded[:, 0]) > FARTHEST).any():
            found = values[int(far.argmax())]
            raise UsageError(
                f"column '{one_line(self.name)}' holds {found}, more than {FARTHEST:g} standard deviations "
                f"from the training rows' mean {self.mean[0]:g}: no network says anything there"
            )
        return encoded

    def parsed(self, given: Iterable[Any]) -> list[float | None]:
        """Cells as numbers.

        Raises:
            ValueError: If one is none; says which.
        """
        return [cells.number(cell) for cell in given]


class Categories(_Model):
    """A column of categories: an input of 0 or 1 for each that training rows have; all 0 of any other.

    Attributes:
        name: Of the column.
        kind: category.
        categories: In the order of the inputs; null is "missing".
    """

    name: str
    kind: Literal["category"] = "category"
    categories: list[str | None] = Field(min_length=1)

    def encode(self, values: Values) -> np.ndarray:
        """Inputs `[N, categories]`."""
        return np.array([[float(v == c) for c in self.categories] for v in values])

    def parsed(self, given: Iterable[Any]) -> list[str | None]:
        """Cells as categories.

        Raises:
            ValueError: If one may mean several; says which.
        """
        return list(map(cells.among(self.categories), given))


class Target(_Model):
    """The target: a number, standardised, or classes.

    Attributes:
        name: Of its column.
        mean: Of the training rows; 0 of classes.
        scale: Their standard deviation; 1 of classes.
        classes: In the order of the outputs; none of a number.
    """

    name: str
    mean: float = 0.0
    scale: Annotated[float, Field(gt=0)] = 1.0
    classes: list[str] = []

    def refuse_far(self, numbers: np.ndarray) -> None:
        """Refuses held-out targets too far from those of the training rows for a score; one line.

        Raises:
            UsageError: If there is one.
        """
        if (far := np.abs(numbers - self.mean) > FARTHEST * self.scale).any():
            raise UsageError(
                f"the target '{one_line(self.name)}' is {numbers[far][0]:g} in a held-out row, more than "
                f"{FARTHEST:g} standard deviations from the training rows' mean {self.mean:g}: this row "
                "alone would decide every score"
            )


class Encoder(_Model):
    """What was learned from the training rows, and how rows become the inputs of a network."""

    rows: Annotated[int, Field(ge=1)]
    """Training rows."""
    columns: list[Annotated[Numbers | Categories, Field(discriminator="kind")]] = Field(min_length=1)
    target: Target

    @property
    def width(self) -> int:
        """Inputs of the network, D."""
        return len(self.names)

    @property
    def names(self) -> list[str]:
        """The column of each input, `[D]`."""
        widths = (len(c.mean) if isinstance(c, Numbers) else len(c.categories) for c in self.columns)
        return [c.name for c, width in zip(self.columns, widths, strict=True) for _ in range(width)]

    def encode(self, values: Mapping[str, Values]) -> np.ndarray:
        """Inputs `[N, D]`, column after column, in float64."""
        return np.concatenate([c.encode(values[c.name]) for c in self.columns], 1)

    def encode_rows(self, rows: Any) -> np.ndarray:
        """Inputs `[N, D]` of new rows, in float64: any that `bench.cells.table` takes.

        Columns that the encoder does not know are not looked at. A missing value is encoded as one of the
        training rows; a category that they do not have is none of theirs.

        Raises:
            UsageError: If a column is missing in a row, a number is none, or a category may be several; one
                line that names it.
        """
        where, given, number = cells.table(rows)
        if not number:
            raise UsageError(f"{where}: there are no rows")
        values: dict[str, Values] = {}
        for c in self.columns:
            if c.name not in given:
                raise UsageError(
                    f"{where}: the column '{one_line(c.name)}' is missing: the posterior needs it"
                )
            try:
                values[c.name] = c.parsed(given[c.name])
            except ValueError as error:
                raise UsageError(f"{where}: the column '{one_line(c.name)}' {error}") from None
        return self.encode(values)


def fit(columns: Sequence[Column], target: Column, kind: Kind, rows: np.ndarray) -> Encoder:
    """What scikit-learn's transformers learn from these rows, and from no others.

    Raises:
        UsageError: If the rows have no value of a column, one value of the target, or numbers of more digits
            than are computed with; one line.
    """
    for each in (*columns, *([target] if kind == "regression" else [])):
        refuse_rounded(each, rows)
    return Encoder(
        rows=len(rows), columns=[_learned(c, rows) for c in columns], target=_target(target, kind, rows)
    )


def _learned(column: Column, rows: np.ndarray) -> Numbers | Categories:
    from sklearn.impute import SimpleImputer  # here, for their imports take a second
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    values = [column.values[row] for row in rows]
    if not column.is_number:
        encoder = OneHotEncoder(handle_unknown="ignore").fit(np.array(values, object)[:, None])
        return Categories(name=column.name, categories=encoder.categories_[0].tolist())
    numbers = np.array([np.nan if v is None else v for v in values], np.float64)[:, None]
    if np.isnan(numbers).all():
        raise UsageError(f"column '{one_line(column.name)}' is empty in all training rows: take it out")
    imputer = SimpleImputer(strategy="median", add_indicator=bool(np.isnan(numbers).any()))
    with np.errstate(over="ignore", invalid="ignore"):
        scaler = StandardScaler().fit(imputer.fit_transform(numbers))
    if not np.isfinite(scaler.scale_).all():
        raise UsageError(f"column '{one_line(column.name)}' holds numbers too large to be standardised")
    learned = Numbers(
        name=column.name,
        median=float(imputer.statistics_[0]),
        mean=scaler.mean_.tolist(),
        scale=scaler.scale_.tolist(),
        constant=len({value for value in values if value is not None}) == 1,
    )
    # scikit-learn takes what it cannot tell from rounding for constant, and divides it by 1.
    if not learned.constant and not 0.5 < learned.encode(values)[:, 0].std() < 2:
        raise UsageError(
            f"column '{one_line(column.name)}' differs too little from row to row beside the size of its "
            "numbers to be standardised: give it in a smaller unit, or less a constant"
        )
    return learned


def _target(target: Column, kind: Kind, rows: np.ndarray) -> Target:
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
        variance = float(numbers.var())
    if not math.isfinite(variance):
        raise UsageError(f"{where} holds numbers too large to be standardised: give it in a larger unit")
    if variance < np.finfo(np.float64).tiny:
        raise UsageError(
            f"{where} differs too little from row to row to be standardised: give it in a smaller unit"
        )
    return Target(name=target.name, mean=float(numbers.mean()), scale=float(numbers.std()))


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
        pairs = zip(exact, numbers, strict=True)
        is_rounded = [abs(value - Decimal(number)) > Decimal(allowed) > 0 for value, number in pairs]
    if True in is_rounded:
        written = one_line(column.texts[present[is_rounded.index(True)]] or "")
        raise UsageError(
            f"column '{one_line(column.name)}' holds {written}, of more digits than are computed with (about "
            "16): what differs from row to row would be rounded off; give it less a constant"
        )


def merged(encoder: Encoder, columns: Sequence[Column], rows: np.ndarray) -> list[str]:
    """A sentence for every column of numbers whose values a network of 32 bits cannot all tell apart."""
    said = []
    for learned, column in zip(encoder.columns, columns, strict=True):
        if not isinstance(learned, Numbers) or learned.constant:
            continue
        values = [column.values[row] for row in rows]
        different = len({value for value in values if value is not None})
        inputs = learned.encode(values)[[value is not None for value in values], 0].astype(np.float32)
        if (told := len(np.unique(inputs))) < different:
            said.append(
                f"{one_line(column.name)}: {different} different numbers are {told} different inputs in 32 "
                "bits, so that near ones are predicted alike; if they differ in kind, make them categories"
            )
    return said


def identities(target: Column) -> list[str]:
    """The name of the class of each row, `[N]`, of a target without missing values.

    Of a column of whole numbers a class is its integer, whatever its size (1 and 1.0 are one class); of any
    other it is its exact text, so that 7 and 007 are two.
    """
    texts = [value for value in target.texts if value is not None]
    integers = [integer for value in texts if (integer := cells.whole(value)) is not None]
    return integers if len(integers) == len(texts) else texts


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
    if different <= FEW_NUMBERS and all(float(v).is_integer() for v in target.values if v is not None):
        return "classification", f"{different} different whole numbers"
    return "regression", f"{different} different numbers"


def sentences(encoder: Encoder, columns: Sequence[Column], rows: np.ndarray) -> list[str]:
    """How each column was encoded, alike ones in one line; `rows` are those of training."""
    plain: list[str] = []
    filled: list[str] = []
    constant: list[str] = []
    categories: list[str] = []
    for c, column in zip(encoder.columns, columns, strict=True):
        lacking = sum(value is None for value in column.values)
        name = one_line(c.name)
        if len({column.values[row] for row in rows}) == 1:
            constant.append(name)
        elif isinstance(c, Categories):
            some = ", ".join("missing" if k is None else one_line(k) for k in c.categories[:6])
            more = f" and {len(c.categories) - 6} more" if len(c.categories) > 6 else ""
            categories.append(f"{name} ({some}{more})")
        elif lacking:
            filled.append(f"{name} ({lacking} missing, {c.median:g})")
        else:
            plain.append(name)
    said = [
        ("numbers, standardised", plain),
        ("numbers with missing values, standardised, the median of the training rows in their place", filled),
        ("categories, an input each", categories),
        ("the same in every training row, which teaches nothing, and not looked at", constant),
    ]
    return [f"{what}: {', '.join(names)}" for what, names in said if names] + merged(encoder, columns, rows)
