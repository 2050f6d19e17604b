"""Cells of a table: read from a file or taken from rows made in Python, and what each of them means.

A cell has a type where it comes from Parquet, JSON, numpy, pandas or polars, and is text where it comes from
CSV. One rule holds for all of them, so that a row means the same wherever it comes from: what is missing is
None, a number is its value, and anything else is its exact text without blanks around it.
"""

from __future__ import annotations

import csv
import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from bench.errors import UsageError
from bench.text import one_line

MISSING = frozenset(
    {"", "na", "n/a", "nan", "-nan", "<na>", "nat", "null", "?"}
    | {"#n/a", "#n/a n/a", "#na", "1.#ind", "-1.#ind", "1.#qnan", "-1.#qnan"}
)
"""What stands for a missing value, in small letters; and `None`, so written, as pandas reads it."""
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
NUMBERS = {".": NUMBER, ",": re.compile(r"[+-]?(\d+,?\d*|,\d+)([eE][+-]?\d+)?")}
"""What a text is that writes a number, by its decimal mark."""

_WHOLE = re.compile(r"([+-]?)(0|[1-9][0-9]*)(\.0*)?")
_MOMENT = re.compile(r"\d{4}-\d\d-\d\d([ T]\d\d:\d\d.*)?")
_WORDS = {"true": True, "false": False}

Plain = str | bool | int | float | Decimal | datetime | None


# -------------------------------------------------------------------------------------------------- tables


def read(path: Path, decimal: str = ".") -> dict[str, list[Any]]:
    """The cells of a file by column: CSV (with commas, semicolons or tabs, names first, UTF-8), or Parquet.

    Args:
        path: Of the file.
        decimal: The mark in its numbers; where it is a comma, cells are parted by semicolons or tabs if the
            first line has any.

    Raises:
        UsageError: If it cannot be read, or its columns cannot be told apart; one line.
    """
    if path.suffix == ".parquet":
        return _by_name(str(path), _read_parquet(path))
    names, rows = _read_csv(path, decimal)
    return _by_name(str(path), list(zip(names, map(list, zip(*rows.values(), strict=True)), strict=True)))


def places(path: Path | str, rows: Sequence[int], decimal: str = ".") -> list[str]:
    """Where these rows of a file stand, each as `line 7` of a CSV (its last one), else as `row 6`.

    Args:
        path: Of a file that `read` has read, or what rows in memory are called.
        rows: Numbers from 0, as `read` counts.
        decimal: As of `read`.
    """
    if isinstance(path, str) or path.suffix == ".parquet":
        return [f"row {row + 1}" for row in rows]
    lines = list(_read_csv(path, decimal)[1])
    return [f"line {lines[row]}" for row in rows]


def table(rows: Any, decimal: str = ".") -> tuple[str, dict[str, list[Any]], int]:
    """What to call rows, their cells by column, and how many rows there are.

    Args:
        rows: The path of a file; a data frame of pandas or polars, a table of pyarrow or a structured array
            of numpy; or rows, each a dictionary, a Series or a named tuple. A column that a row lacks is left
            out.
        decimal: The mark in the numbers of a file.

    Raises:
        UsageError: If it is none of these, or its columns cannot be told apart; one line.
    """
    if isinstance(rows, str | Path):
        where, cells = str(rows), read(Path(rows), decimal)
    elif hasattr(rows, "to_pydict"):  # of pyarrow
        where, cells = "rows", _by_name("rows", list(zip(rows.column_names, _lists(rows), strict=True)))
    elif hasattr(rows, "columns") and hasattr(rows, "__getitem__") and not isinstance(rows, Mapping):
        columns = list(rows.columns)
        _by_name("rows", [(str(name).strip(), []) for name in columns])  # two of a name would be a frame
        where, cells = "rows", _by_name("rows", [(str(name), list(rows[name])) for name in columns])
    elif (names := getattr(getattr(rows, "dtype", None), "names", None)) and getattr(rows, "ndim", 0):
        where, cells = "rows", _by_name("rows", [(name, list(rows[name])) for name in names])
    else:
        return _of_rows(rows)
    return where, cells, len(next(iter(cells.values()), []))


def _lists(arrow: Any) -> list[list[Any]]:
    return [column.to_pylist() for column in arrow.columns]


def _of_rows(rows: Any) -> tuple[str, dict[str, list[Any]], int]:
    wanted = (
        "rows must be dictionaries from column to value, a data frame, a structured array or a file's path"
    )
    if isinstance(rows, Mapping):
        raise UsageError(f"{wanted}: a single row stands in a list, [row]")
    if not isinstance(rows, Iterable):
        raise UsageError(wanted)
    if isinstance(rows, np.ndarray) and rows.dtype != object:
        raise UsageError(f"{wanted}: an array without names does not say which column is which")
    given = []
    for number, row in enumerate(rows, 1):
        if hasattr(row, "_asdict"):  # a named tuple
            row = row._asdict()
        if hasattr(row, "keys"):
            pairs = [(name, row[name]) for name in row.keys()]  # noqa: SIM118  (a Series is no Mapping)
        elif (names := getattr(getattr(row, "dtype", None), "names", None)) is not None:
            pairs = [(name, row[name]) for name in names]
        else:
            raise UsageError(wanted)
        if any(name is None for name, _ in pairs):  # what csv.DictReader makes of cells beyond the names
            raise UsageError(f"rows: row {number} has more cells than there are names")
        given.append(_by_name(f"rows: row {number}", pairs))
    names = [name for name in (given[0] if given else {}) if all(name in row for row in given)]
    return "rows", {name: [row[name] for row in given] for name in names}, len(given)


def _by_name(where: str, cells: Iterable[tuple[Any, Any]]) -> dict[str, Any]:
    """By names without blanks around them, each of which must be there once."""
    found: dict[str, Any] = {}
    for number, (given, values) in enumerate(cells, 1):
        name = str(given).strip()
        if not name:
            raise UsageError(f"{where}: column {number} has no name: the first line must name every column")
        if name in found:
            raise UsageError(f"{where}: two columns are named '{one_line(name)}': rename one")
        found[name] = values
    return found


def _read_csv(path: Path, decimal: str) -> tuple[list[str], dict[int, list[str]]]:
    """The names of the columns, and the rows by the number of their last line, from 1."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            header = file.readline()
            file.seek(0)
            delimiter = max(",;\t", key=header.count)
            if decimal == ",":
                delimiter = max(";\t,", key=lambda mark: (mark != "," and mark in header, header.count(mark)))
            lines = csv.reader(file, delimiter=delimiter, strict=True)
            names = next(lines, [])
            rows = {}
            for row in lines:
                if len(row) == len(names):
                    rows[lines.line_num] = row
                elif any(map(str.strip, row)):
                    commas = ": cells with decimal commas are parted by semicolons or tabs, and read by "
                    commas += "--task.decimal ,"
                    raise UsageError(
                        f"{path}: line {lines.line_num} has {len(row)} cells, and the first line names "
                        f"{len(names)} columns{commas if delimiter == ',' and len(row) > len(names) else ''}"
                    )
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path}: is no text in UTF-8: save it as CSV in UTF-8") from None
    except csv.Error as error:
        raise UsageError(f"{path}: line {lines.line_num}: {error}") from None
    if not rows:
        raise UsageError(f"{path}: holds no rows below a line of names")
    return names, rows


def _read_parquet(path: Path) -> list[tuple[str, list[Any]]]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise UsageError(
            f"{path}: Parquet needs pip install 'posterior-bench[parquet]'; or save the table as CSV"
        ) from None
    try:
        found = parquet.read_table(path)
    except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
        raise UsageError(f"{path}: cannot be read: {one_line(error)}") from None
    if not found.num_rows:
        raise UsageError(f"{path}: holds no rows")
    return list(zip(found.column_names, _lists(found), strict=True))


# --------------------------------------------------------------------------------------------------- cells


def plain(value: Any) -> Plain:
    """A cell by its meaning, whatever library it comes from; None if it is missing.

    Raises:
        ValueError: If it holds several values; says of what type it is.
    """
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    if isinstance(value, str):
        return _written_text(value)
    if isinstance(value, np.datetime64):
        value = value.astype("datetime64[us]")
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item") and value is not np.ma.masked:
        value = value.item()  # a scalar of numpy or torch
    if value is None or value is np.ma.masked or str(value) in ("<NA>", "NaT", "nan", "NaN", "-nan", "sNaN"):
        return None
    if isinstance(value, bool | int | float | Decimal):
        return value
    if isinstance(value, date):  # a datetime is one
        return value if isinstance(value, datetime) else datetime.combine(value, time())
    if isinstance(value, np.floating):  # longer than Python's
        return float(value)
    if isinstance(value, complex | Mapping) or (isinstance(value, Iterable) or hasattr(value, "shape")):
        raise ValueError(f"must be one value a row, not a {type(value).__name__}")
    return plain(str(value))


def _written_text(value: str) -> str | None:
    found = value.strip()
    # No word for what is missing begins with a digit: a table has many numbers, and this is quick.
    if found[:1].isdigit() and found[:1] != "1":
        return str(found)
    return None if found.lower() in MISSING or found == "None" else str(found)


def text(value: Any) -> str | None:
    """A cell as text, None where it is missing; a whole number of floating point ends in `.0`."""
    if type(value) is str:
        return _written_text(value)
    match found := plain(value):
        case float():
            return f"{found:.1f}" if found.is_integer() else repr(found)
        case Decimal():
            return f"{found:f}"
        case datetime():
            return str(found) if found.timetz() != time() else str(found.date())
    return None if found is None else str(found)


def number(value: Any, decimal: str = ".") -> float | None:
    """A cell of a column of numbers; None if it is missing.

    Args:
        value: The cell.
        decimal: The mark in a number that is written as text.

    Raises:
        ValueError: If it is no finite number; says what it is.
    """
    found = plain(value)
    if found is None:
        return None
    is_one = not isinstance(found, datetime)
    if isinstance(found, str):
        is_one = NUMBERS[decimal].fullmatch(found) is not None
        found = found.replace(",", ".") if is_one else found
    if is_one:
        try:
            if math.isfinite(made := float(found)):  # type: ignore[arg-type]
                return made
        except OverflowError:
            pass
    comma = " with a decimal comma" if decimal == "," and isinstance(found, str) else ""
    raise ValueError(f"must be a number{comma}, not '{one_line(text(found))[:40]}'")


_TIME = r"(?:[ T](?P<time>\d\d?:\d\d.*))?"
DATES = {
    "year-month-day": re.compile(rf"(?P<y>\d{{4}})(?P<s>[-/.])(?P<m>\d\d?)(?P=s)(?P<d>\d\d?){_TIME}"),
    "yearmonthday": re.compile(r"(?P<y>\d{4})(?P<m>\d\d)(?P<d>\d\d)(?P<time>(?!))?"),
    "day/month/year": re.compile(rf"(?P<d>\d\d?)(?P<s>[-/.])(?P<m>\d\d?)(?P=s)(?P<y>\d{{4}}){_TIME}"),
    "month/day/year": re.compile(rf"(?P<m>\d\d?)(?P<s>[-/])(?P<d>\d\d?)(?P=s)(?P<y>\d{{4}}){_TIME}"),
}
"""How dates may be written. The first is understood in every column; points put the day first."""


def moment(value: Any, form: str) -> datetime | None:
    """A cell of a column of dates, by the clock where it was written; None if it is missing.

    Args:
        value: The cell: text, or a date of Python, numpy, pandas or polars.
        form: How texts are written, of `DATES`; beside it years may stand first.

    Raises:
        ValueError: If it is no date; says what it is.
    """
    written = text(value)
    if written is None:
        return None
    if found := DATES["year-month-day"].fullmatch(written) or DATES[form].fullmatch(written):
        with suppress(ValueError):
            clock = time.fromisoformat(found["time"]) if found["time"] else time()
            return datetime(int(found["y"]), int(found["m"]), int(found["d"])).replace(
                hour=clock.hour, minute=clock.minute, second=clock.second, microsecond=clock.microsecond
            )
    raise ValueError(f"must be a date ({form}), not '{one_line(written)[:40]}'")


_ZONE = re.compile(r"\d:\d\d.*?(Z|[+-]\d\d(:?\d\d)?)$")


def zone(value: str) -> str:
    """The offset from UTC that a text with a time of day ends in, as +02:00 or Z; empty if it has none."""
    found = _ZONE.search(value)
    return found[1] if found else ""


def boolean(value: str) -> str:
    """A text that is true or false, as pandas reads them, in small letters; any other as it is."""
    return value.lower() if value.lower() in _WORDS else value


def whole(value: str) -> str | None:
    """The whole number that a text writes, without plus and point; None of any other, of 007 and 1e3 too."""
    found = _WHOLE.fullmatch(value)
    return None if found is None else ("-" if found[1] == "-" and found[2] != "0" else "") + found[2]


def among(categories: Sequence[str | None]) -> Callable[[Any], str | None]:
    """What finds the category that a cell means.

    A text is the category that is written so. Where there is none, and for a cell with a type, it is the one
    category that means the same: true, True and 1; 1, 1.0 and 01; 2024-03-01 and its midnight; an accented
    letter as one character and as two. A cell that means none is none of them.

    Args:
        categories: Texts, each once; None is missing.

    Returns:
        A function from a cell to a category, or to a text that is no category; None is missing. It raises
        ValueError where a cell means several categories.
    """
    texts = [category for category in categories if category is not None]
    known: dict[tuple[type, Plain], str | None] = {(str, category): category for category in texts}
    meant: dict[tuple[str, Any], list[str]] = {}
    for category in texts:
        for meaning in _meanings(category):
            meant.setdefault(meaning, []).append(category)

    def find(value: Any) -> str | None:
        found = plain(value)
        if found is None:
            return None
        key = type(found), found
        if key not in known:
            alike = meant.get(_meaning(found), [])
            if len(alike) > 1:
                several = " and ".join(f"'{one_line(each)[:40]}'" for each in alike[:3])
                said = one_line(text(found))[:40]
                raise ValueError(f"holds {said}, which may be {several}: write it as text, as the table does")
            known[key] = alike[0] if alike else f"{type(found).__name__} {found}"
        return known[key]

    return find


def _meanings(category: str) -> list[tuple[str, Any]]:
    """What the text of a category may mean, as `_meaning` says it of a cell."""
    found: list[tuple[str, Any]] = [("text", _written(category))]
    if (moment := _moment(category)) is not None:
        found.append(("moment", moment))
    if category.lower() in _WORDS:  # equal to 1 or 0, and of one hash with it
        found += [("exact", _WORDS[category.lower()]), ("float", _WORDS[category.lower()])]
    elif NUMBER.fullmatch(category):
        # A number of floating point is the nearest to what was written; the others are exact.
        found += [("exact", Decimal(category)), ("float", float(category))]
    return found


def _meaning(value: Plain) -> tuple[str, Any]:
    """What a cell means."""
    if isinstance(value, str):
        return "text", _written(value)
    if isinstance(value, datetime):
        return "moment", value
    return ("float" if isinstance(value, float) else "exact"), value


def _written(value: str) -> str:
    """A text as one of those that mean the same would have it."""
    moment = _moment(value)
    return whole(value) or (unicodedata.normalize("NFC", boolean(value)) if moment is None else str(moment))


def _moment(value: str) -> datetime | None:
    if not _MOMENT.fullmatch(value):
        return None
    try:
        return datetime.fromisoformat(value)
    except ValueError:
        return None
