"""A user's own table, encoded by what its training rows teach.

Numbers become standardised; a missing one is the median of the training rows, and a second input says that it
was missing. Every category that the training rows have becomes an input that is 0 or 1, "missing" among them
if it occurs there. Of more than `MOST_CATEGORIES` each becomes the mean target of its training rows, shrunk
to that of all. Dates become year, time of the year, of the week and of the day. Texts become the vectors of
an encoder that lies in a folder (`bench.bert`). `bench.learning` finds what training rows teach. It is kept
as JSON, and `Encoder` applies it without scikit-learn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Literal

import numpy as np
import pydantic
from pydantic import Field

from bench import cells
from bench.columns import Column, Values
from bench.errors import UsageError
from bench.text import one_line

FARTHEST = 1e12  # a 32-bit network still has finite outputs there

Kind = Literal["regression", "classification"]


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
        decimal: The mark in numbers that are written as text.
    """

    name: str
    kind: Literal["number"] = "number"
    constant: bool = False
    decimal: Literal[".", ","] = "."
    median: float
    mean: list[float] = Field(min_length=1, max_length=2)
    scale: list[Annotated[float, Field(gt=0)]] = Field(min_length=1, max_length=2)

    @property
    def width(self) -> int:
        """Inputs."""
        return len(self.mean)

    def encode(self, values: Values) -> np.ndarray:
        """Inputs `[N, 1]` or `[N, 2]`.

        Raises:
            UsageError: If one is too far from those of the training rows for a network; one line.
        """
        numbers = np.array(values, np.float64)
        is_missing = np.isnan(numbers)
        inputs = np.stack([np.where(is_missing, self.median, numbers), is_missing], 1)[:, : self.width]
        with np.errstate(over="ignore"):
            encoded = (inputs - self.mean) / self.scale
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
        return [cells.number(cell, self.decimal) for cell in given]


class Categories(_Model):
    """A column of categories: an input of 0 or 1 for each that training rows have; all 0 of any other.

    Where training rows have one category alone, nothing was taught of others: the input is 1 for them too.

    Attributes:
        name: Of the column.
        kind: category.
        categories: In the order of the inputs; null is "missing".
    """

    name: str
    kind: Literal["category"] = "category"
    categories: list[str | None] = Field(min_length=1)

    @property
    def width(self) -> int:
        """Inputs."""
        return len(self.categories)

    def encode(self, values: Values) -> np.ndarray:
        """Inputs `[N, categories]`."""
        if self.width == 1:
            return np.ones((len(values), 1))
        return np.eye(self.width + 1)[places_of(self.categories, values), :-1]

    def parsed(self, given: Iterable[Any]) -> list[str | None]:
        """Cells as categories.

        Raises:
            ValueError: If one may mean several; says which.
        """
        return list(map(cells.among(self.categories), given))


class ManyCategories(_Model):
    """A column of more categories than inputs are wanted: of each the mean target of its training rows.

    Means are shrunk to that of all training rows, the more the fewer rows there are. Targets are standardised
    numbers, the second of two classes, or each class.

    Attributes:
        name: Of the column.
        kind: categories.
        categories: Those of the training rows; null is "missing".
        means: Of each category the mean target, an input each.
        otherwise: The inputs of any other category: the mean target of all training rows.
    """

    name: str
    kind: Literal["categories"] = "categories"
    categories: list[str | None] = Field(min_length=1)
    means: list[list[float]]
    otherwise: list[float] = Field(min_length=1)

    @property
    def width(self) -> int:
        """Inputs."""
        return len(self.otherwise)

    def encode(self, values: Values) -> np.ndarray:
        """Inputs `[N, width]` of rows that are not trained on."""
        return np.array([*self.means, self.otherwise])[places_of(self.categories, values)]

    def parsed(self, given: Iterable[Any]) -> list[str | None]:
        """Cells as categories.

        Raises:
            ValueError: If one may mean several; says which.
        """
        return list(map(cells.among(self.categories), given))


class Dates(_Model):
    """A column of dates: the year, standardised, and times of year, week and day, each as sine and cosine.

    A time is an angle, so that December is near January. A missing date has the mean year and 0 elsewhere.

    Attributes:
        name: Of the column.
        kind: date.
        form: How dates are written as text (`bench.cells.DATES`).
        has_time: Whether training rows have a time of day.
        has_missing: Whether they lack a date, which a last input then says.
        constant: Whether they have one date alone: all inputs but the last are 0 then, whatever a row says.
        mean: Of the year over the training rows.
        scale: Its standard deviation, 1 where it never changes.
    """

    name: str
    kind: Literal["date"] = "date"
    form: Literal["year-month-day", "yearmonthday", "day/month/year", "month/day/year"]
    has_time: bool
    has_missing: bool
    constant: bool = False
    mean: float
    scale: Annotated[float, Field(gt=0)]

    @property
    def width(self) -> int:
        """Inputs."""
        return 5 + 2 * self.has_time + self.has_missing

    def encode(self, values: Values) -> np.ndarray:
        """Inputs `[N, width]`: year, sine and cosine of each time, whether it is missing."""
        dates = np.array(values, "datetime64[us]")
        is_missing = np.isnat(dates)
        years, days = dates.astype("datetime64[Y]"), dates.astype("datetime64[D]")
        day = np.timedelta64(1, "D")
        starts, ends = years.astype("datetime64[D]"), (years + 1).astype("datetime64[D]")
        weekday = (days - np.datetime64("1970-01-05", "D")) / day % 7  # that was a Monday
        shares = [(days - starts) / (ends - starts), weekday / 7, (dates - days) / np.timedelta64(1, "D")]
        parts = [(years_of(dates) - self.mean) / self.scale]
        for share in shares if self.has_time else shares[:2]:
            parts += [np.sin(2 * np.pi * share), np.cos(2 * np.pi * share)]
        inputs = np.where(is_missing[:, None] | self.constant, 0, np.stack(parts, 1))
        return np.column_stack([inputs, is_missing])[:, : self.width]

    def parsed(self, given: Iterable[Any]) -> list[datetime | None]:
        """Cells as dates.

        Raises:
            ValueError: If one is none; says which.
        """
        return [cells.moment(cell, self.form) for cell in given]


class Texts(_Model):
    """A column of texts: the vector that an encoder gives each (`bench.bert`), every number standardised.

    A missing text is the mean of those of the training rows, zeros.

    Attributes:
        name: Of the column.
        kind: text.
        folder: Where the encoder lies.
        digest: Of the encoder.
        mean: Of each number of the vectors over the training rows.
        scale: Their standard deviations, 1 of one that never changes.
    """

    name: str
    kind: Literal["text"] = "text"
    folder: str
    digest: str
    mean: list[float] = Field(min_length=1)
    scale: list[Annotated[float, Field(gt=0)]] = Field(min_length=1)

    @property
    def width(self) -> int:
        """Inputs."""
        return len(self.mean)

    def encode(self, values: Values) -> np.ndarray:
        """Inputs `[N, width]`.

        Raises:
            UsageError: If the folder holds no encoder, or another one; one line.
        """
        from bench import bert  # here, since it imports torch

        reader = bert.opened(self.folder)
        if reader.digest != self.digest:
            raise UsageError(
                f"encoder of texts: {self.folder} holds another than the one with which the column "
                f"'{one_line(self.name)}' was trained on"
            )
        rows = [row for row, value in enumerate(values) if value is not None]
        encoded = np.zeros((len(values), self.width))
        if rows:
            vectors = reader.vectors([str(values[row]) for row in rows])
            encoded[rows] = (vectors - np.array(self.mean)) / self.scale
        return encoded

    def parsed(self, given: Iterable[Any]) -> list[str | None]:
        """Cells as texts.

        Raises:
            ValueError: If one holds several values; says of what type it is.
        """
        return [cells.text(cell) for cell in given]


def years_of(dates: np.ndarray) -> np.ndarray:
    """The years of dates, NaN where one is missing."""
    years = dates.astype("datetime64[Y]").astype(np.int64) + 1970.0
    return np.where(np.isnat(dates), np.nan, years)


def places_of(categories: Sequence[str | None], values: Values) -> list[int]:
    """The place of each value among the categories; one beyond the last of any other value."""
    place = {category: number for number, category in enumerate(categories)}
    return [place.get(value, len(categories)) for value in values]  # type: ignore[arg-type]


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


Learned = Annotated[Numbers | Categories | ManyCategories | Dates | Texts, Field(discriminator="kind")]
"""What training rows teach of a column."""


class Encoder(_Model):
    """What was learned from the training rows, and how rows become the inputs of a network."""

    rows: Annotated[int, Field(ge=1)]
    """Training rows."""
    columns: list[Learned] = Field(min_length=1)
    target: Target
    decimal: Literal[".", ","] = "."
    """The mark in the numbers of a file."""

    @property
    def width(self) -> int:
        """Inputs of the network, D."""
        return sum(c.width for c in self.columns)

    @property
    def names(self) -> list[str]:
        """The column of each input, `[D]`."""
        return [c.name for c in self.columns for _ in range(c.width)]

    @property
    def of_texts(self) -> np.ndarray:
        """Which inputs come from texts, `[D]`."""
        return np.repeat([isinstance(c, Texts) for c in self.columns], [c.width for c in self.columns])

    @property
    def content(self) -> str:
        """What training rows teach, as JSON, the same on every machine.

        Of texts it is which encoder reads them: not where it lies, nor its numbers, whose last bits differ.
        """
        of_texts = [i for i, c in enumerate(self.columns) if isinstance(c, Texts)]
        left_out: Any = {"columns": {i: {"folder", "mean", "scale"} for i in of_texts}}
        return self.model_dump_json(exclude=left_out if of_texts else None)

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
        where, given, number = cells.table(rows, self.decimal)
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


def sentences(encoder: Encoder, columns: Sequence[Column], rows: np.ndarray) -> list[str]:
    """How each column was encoded, alike ones in one line; `rows` are those of training."""
    said: dict[str, list[str]] = {
        "numbers, standardised": (plain := []),
        "numbers with missing values, standardised, the median of the training rows in their place": (
            filled := []
        ),
        "categories, an input each": (categories := []),
        "categories, by the mean target of their training rows, without the row's own": (many := []),
        "dates: the year, standardised; day of the year and of the week as sine and cosine": (dates := []),
        "texts, as vectors of an encoder": (texts := []),
        "the same in every training row, which teaches nothing, and not looked at": (constant := []),
    }
    for c, column in zip(encoder.columns, columns, strict=True):
        lacking = sum(value is None for value in column.values)
        name = one_line(c.name)
        if len({column.values[row] for row in rows}) == 1:
            constant.append(name)
        elif isinstance(c, Texts):
            texts.append(f"{name} ({c.width} inputs{f', {lacking} missing' if lacking else ''})")
        elif isinstance(c, Categories):
            some = ", ".join("missing" if k is None else one_line(k) for k in c.categories[:6])
            more = f" and {len(c.categories) - 6} more" if len(c.categories) > 6 else ""
            categories.append(f"{name} ({some}{more})")
        elif isinstance(c, ManyCategories):
            many.append(f"{name} ({len(c.categories)})")
        elif isinstance(c, Dates):
            time_of_day = ", time of the day likewise" if c.has_time else ""
            dates.append(f"{name} ({c.form}{time_of_day}{f', {lacking} missing' if lacking else ''})")
        elif lacking:
            filled.append(f"{name} ({lacking} missing, {c.median:g})")
        else:
            plain.append(name)
    return [f"{what}: {', '.join(names)}" for what, names in said.items() if names] + merged(
        encoder, columns, rows
    )
