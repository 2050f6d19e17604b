"""A user's own table: read, judged column by column, and encoded by what its training rows teach.

A column is of numbers if every value is one, else of categories. Numbers become standardised; a missing one
is the median of the training rows, and a second input says that it was missing. Every category that the
training rows have becomes an input that is 0 or 1, "missing" among them if it occurs there. Medians, means,
scales and categories are learned by scikit-learn's transformers from the training rows alone, and kept as
JSON: `Encoder` applies them without scikit-learn. What cannot be encoded so (free text, a date) is refused by
name.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import pydantic
from pydantic import Field

from bench.errors import UsageError
from bench.text import one_line

MISSING = frozenset({"", "na", "n/a", "nan", "<na>", "null", "?"})
"""What stands for a missing value, in small letters."""
MOST_CATEGORIES = 50
"""Different texts from which on a column is free text, whatever the number of rows."""
FEW_NUMBERS = 10
"""Different whole numbers up to which a target is taken for classes."""

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_INFINITY = re.compile(r"[+-]?inf(inity)?", re.IGNORECASE)
_DATE = re.compile(r"\d{1,4}([-/.])\d{1,2}\1\d{1,4}([ T].*)?")

Kind = Literal["regression", "classification"]
Values = Sequence[float | None] | Sequence[str | None]
"""Of a column, row after row; None is missing."""


class Column(NamedTuple):
    """A column by its name: numbers, or categories."""

    name: str
    is_number: bool
    values: Values


# -------------------------------------------------------------------------------------------------- reading


def read(path: Path) -> dict[str, list[Any]]:
    """The cells of a file by column: CSV (with commas, semicolons or tabs, names first, UTF-8), or Parquet.

    Raises:
        UsageError: If it cannot be read, or its columns cannot be told apart; one line.
    """
    cells = _read_parquet(path) if path.suffix == ".parquet" else _read_csv(path)
    names = [name for name, _ in cells]
    for number, name in enumerate(names, 1):
        if not name:
            raise UsageError(f"{path}: column {number} has no name: the first line must name every column")
        if names.count(name) > 1:
            raise UsageError(f"{path}: two columns are named '{one_line(name)}': rename one")
    return dict(cells)


def _read_csv(path: Path) -> list[tuple[str, list[Any]]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            header = file.readline()
            file.seek(0)
            lines = csv.reader(file, delimiter=max(",;\t", key=header.count), strict=True)
            names = [name.strip() for name in next(lines, [])]
            rows = []
            for row in lines:
                if len(row) == len(names):
                    rows.append(row)
                elif any(map(str.strip, row)):
                    raise UsageError(
                        f"{path}: line {lines.line_num} has {len(row)} cells, and the first line names "
                        f"{len(names)} columns"
                    )
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path}: is no text in UTF-8: save it as CSV in UTF-8") from None
    except csv.Error as error:
        raise UsageError(f"{path}: line {lines.line_num}: {error}") from None
    if not rows:
        raise UsageError(f"{path}: holds no rows below a line of names")
    return list(zip(names, map(list, zip(*rows, strict=True)), strict=True))


def _read_parquet(path: Path) -> list[tuple[str, list[Any]]]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise UsageError(
            f"{path}: Parquet needs pip install 'posterior-bench[parquet]'; or save the table as CSV"
        ) from None
    try:
        table = parquet.read_table(path)
    except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
        raise UsageError(f"{path}: cannot be read: {one_line(error)}") from None
    return list(zip(table.column_names, (column.to_pylist() for column in table.columns), strict=True))


def text(value: Any) -> str | None:
    """A cell as text, None where it is missing; of CSV, of Parquet or of a row made in Python."""
    found = "" if value is None else str(value).strip()
    return None if found.lower() in MISSING else found


def column(path: Path, name: str, cells: Iterable[Any], may_be_text: bool = False) -> Column:
    """A column, judged by all its cells.

    Args:
        path: What to call the file.
        name: Of the column.
        cells: As read.
        may_be_text: Whether texts may all be different, as the names of groups may.

    Raises:
        UsageError: If it is empty, or holds an infinity, dates or free text; one line.
    """
    values = [text(cell) for cell in cells]
    present = [value for value in values if value is not None]
    where = f"{path}: column '{one_line(name)}'"
    if not present:
        raise UsageError(f"{where} is empty: take it out")
    if may_be_text:
        return Column(name, False, values)
    if all(_NUMBER.fullmatch(value) or _INFINITY.fullmatch(value) for value in present):
        numbers = [None if value is None else float(value) for value in values]
        if (infinite := next((v for v in numbers if v is not None and math.isinf(v)), None)) is not None:
            row = numbers.index(infinite) + 1
            raise UsageError(
                f"{where} holds {infinite} in row {row}: give a finite number, or leave it empty"
            )
        return Column(name, True, numbers)
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
    return Column(name, False, values)


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
    """

    name: str
    kind: Literal["number"] = "number"
    median: float
    mean: list[float] = Field(min_length=1, max_length=2)
    scale: list[Annotated[float, Field(gt=0)]] = Field(min_length=1, max_length=2)

    def encode(self, values: Values) -> np.ndarray:
        """Inputs `[N, 1]` or `[N, 2]`."""
        inputs = [[self.median if v is None else v, v is None][: len(self.mean)] for v in values]
        return (np.array(inputs, np.float64) - self.mean) / self.scale

    def parsed(self, values: Iterable[str | None]) -> list[float | None]:
        """Reads texts as numbers.

        Raises:
            ValueError: If one is none; says which.
        """
        found: list[float | None] = []
        for value in values:
            if value is not None and not (_NUMBER.fullmatch(value) and math.isfinite(float(value))):
                raise ValueError(f"must be a number, not '{one_line(value)[:40]}'")
            found.append(None if value is None else float(value))
        return found


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

    def parsed(self, values: Iterable[str | None]) -> list[str | None]:
        """The texts as they are."""
        return list(values)


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


class Encoder(_Model):
    """What was learned from the training rows, and how rows become the inputs of a network."""

    rows: Annotated[int, Field(ge=1)]
    """Training rows."""
    columns: list[Annotated[Numbers | Categories, Field(discriminator="kind")]] = Field(min_length=1)
    target: Target

    @property
    def width(self) -> int:
        """Inputs of the network, D."""
        return sum(len(c.mean) if isinstance(c, Numbers) else len(c.categories) for c in self.columns)

    def encode(self, values: Mapping[str, Values]) -> np.ndarray:
        """Inputs `[N, D]`, column after column, in float64."""
        return np.concatenate([c.encode(values[c.name]) for c in self.columns], 1)

    def encode_rows(self, rows: str | Path | Iterable[Mapping[str, Any]]) -> np.ndarray:
        """Inputs `[N, D]` of new rows: a CSV or Parquet file, or dictionaries from column to value.

        Columns that the encoder does not know are not looked at. A missing value is encoded as one of the
        training rows; a category that they do not have is none of theirs.

        Raises:
            UsageError: If a column is missing in a row, or a number is none; one line that names it.
        """
        if isinstance(rows, str | Path):
            where, cells = str(rows), read(Path(rows))
            number = len(next(iter(cells.values())))
        else:
            given = list(rows)
            where, number = "rows", len(given)
            if not all(isinstance(row, Mapping) for row in given):
                raise UsageError("rows must be dictionaries from column to value: frame.to_dict('records')")
            cells = {
                c.name: [row[c.name] for row in given]
                for c in self.columns
                if all(c.name in r for r in given)
            }
        if not number:
            raise UsageError(f"{where}: there are no rows")
        values: dict[str, Values] = {}
        for c in self.columns:
            if c.name not in cells:
                raise UsageError(
                    f"{where}: the column '{one_line(c.name)}' is missing: the posterior needs it"
                )
            try:
                values[c.name] = c.parsed(map(text, cells[c.name]))
            except ValueError as error:
                raise UsageError(f"{where}: the column '{one_line(c.name)}' {error}") from None
        return self.encode(values)


def fit(columns: Sequence[Column], target: Column, kind: Kind, rows: np.ndarray) -> Encoder:
    """What scikit-learn's transformers learn from these rows, and from no others.

    Raises:
        UsageError: If the rows have no value of a column, or one value of the target; one line.
    """
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
    return Numbers(
        name=column.name,
        median=float(imputer.statistics_[0]),
        mean=scaler.mean_.tolist(),
        scale=scaler.scale_.tolist(),
    )


def _target(target: Column, kind: Kind, rows: np.ndarray) -> Target:
    values = [target.values[row] for row in rows]
    if len(set(values)) < 2:
        raise UsageError(
            f"the target '{one_line(target.name)}' is {values[0]} in all {len(rows)} training rows: there is "
            "nothing to learn"
        )
    if kind == "classification":
        return Target(name=target.name, classes=classes(values))
    numbers = np.array(values, np.float64)
    with np.errstate(over="ignore"):
        scale = float(numbers.std())
    if not math.isfinite(scale):
        raise UsageError(f"the target '{one_line(target.name)}' holds numbers too large to be standardised")
    return Target(name=target.name, mean=float(numbers.mean()), scale=scale)


def classes(values: Iterable[float | str | None]) -> list[str]:
    """The classes among the values, numbers in their order."""
    return [label(value) for value in sorted({value for value in values if value is not None})]  # type: ignore[type-var]


def label(value: float | str) -> str:
    """A class by its name: of a whole number without a point."""
    return value if isinstance(value, str) else f"{value:g}" if value == int(value) else repr(value)


def guessed(target: Column) -> tuple[Kind, str]:
    """What a target is taken for, and why."""
    different = len(set(target.values))
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
        ("the same in every training row, which tells nothing", constant),
    ]
    return [f"{what}: {', '.join(names)}" for what, names in said if names]
