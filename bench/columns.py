"""Columns of a user's table, each judged by all its cells: numbers, dates or categories, or what is wrong.

A column is of numbers if every cell is one, else of categories. Dates are taken for dates where the user says
so, and so are numbers that are codes for categories. All columns that cannot be taken are named at once, each
with its first bad cells and the lines of the file in which they stand.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from bench import cells
from bench.cells import text
from bench.errors import UsageError
from bench.text import one_line

MOST_CATEGORIES = 50
"""Different texts from which on a column is free text, unless the user says that it is of categories."""
FEWEST_GOOD = 0.95
"""Share of numbers in a column from which on its other cells are mistakes."""

_INFINITY = re.compile(r"[+-]?inf(inity)?", re.IGNORECASE)
_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}([.,])\d{3}(\1\d{3})*")
_DATE = re.compile(r"\d{1,4}([-/.])\d{1,2}\1\d{1,4}([ T].*)?")

Values = Sequence[float | None] | Sequence[str | None] | Sequence[datetime | None]
"""Of a column, row after row; None is missing."""
Decimal = Literal[".", ","]
"""The mark in numbers that are written as text."""
Wish = Literal["category", "date", "name", "text", "time"]
"""What a user says that a column is of; names may all be different, and times are numbers or dates."""


class Column(NamedTuple):
    """A column by its name: numbers, dates or categories.

    Attributes:
        name: Of the column.
        is_number: Whether it is of numbers.
        values: Numbers, dates, or categories.
        texts: As they are written, row after row; None is missing.
        form: How dates are written (`bench.cells.DATES`); None of any other column.
        decimal: The mark in its numbers.
        is_text: Whether it is of texts that an encoder reads (`bench.bert`).
    """

    name: str
    is_number: bool
    values: Values
    texts: Sequence[str | None]
    form: str | None = None
    decimal: Decimal = "."
    is_text: bool = False


class _Faulty(ValueError):
    """What is wrong with a column: a sentence in which `{cells}` stands for its first bad cells."""

    def __init__(self, said: str, rows: Sequence[int] = ()) -> None:
        super().__init__(said)
        self.said, self.rows = said, rows


def judged(
    path: Path | str,
    table: Mapping[str, Sequence[Any]],
    kept: Sequence[int],
    wishes: Mapping[str, Wish],
    decimal: Decimal = ".",
) -> dict[str, Column]:
    """The columns of a file, or of rows in memory.

    Args:
        path: Of the file, as `bench.cells.read` has read it, or what rows in memory are called.
        table: Its cells by column.
        kept: Numbers of the rows that are used, from 0.
        wishes: What the user says that columns are of, by name.
        decimal: The mark in numbers.

    Raises:
        UsageError: If a column is empty, or holds infinities, dates that nobody announced, lists or free
            text; one line that names every such column, its first three bad cells and their lines.
    """
    found, faults = {}, {}
    for name, given in table.items():
        try:
            found[name] = column(name, [given[row] for row in kept], wishes.get(name), decimal)
        except _Faulty as fault:
            faults[name] = fault
    if not faults:
        return found
    first = sorted({row for fault in faults.values() for row in fault.rows[:3]})
    places = dict(zip(first, cells.places(path, [kept[row] for row in first], decimal), strict=True))
    said = "; ".join(_told(name, table[name], kept, fault, places) for name, fault in faults.items())
    raise UsageError(f"{path}: {said}")


def _told(
    name: str, given: Sequence[Any], kept: Sequence[int], fault: _Faulty, places: Mapping[int, str]
) -> str:
    shown = [f"'{one_line(given[kept[row]])[:40]}' in {places[row]}" for row in fault.rows[:3]]
    bad = ", ".join(shown) + (f" and {len(fault.rows) - 3} more" if len(fault.rows) > 3 else "")
    named = one_line(name)
    return f"column '{named}' " + fault.said.replace("{name}", named).replace("{cells}", bad)


def column(name: str, given: Iterable[Any], wish: Wish | None = None, decimal: Decimal = ".") -> Column:
    """A column, judged by all its cells.

    Args:
        name: Of the column.
        given: Its cells, as read.
        wish: What the user says that it is of.
        decimal: The mark in its numbers.

    Raises:
        ValueError: If it cannot be taken; says why.
    """
    values = []
    for row, cell in enumerate(given):
        try:
            values.append(text(cell))
        except ValueError as error:
            raise _Faulty(f"{error}: {{cells}}", [row]) from None
    rows = [row for row, value in enumerate(values) if value is not None]
    if not rows:
        raise _Faulty("is empty: --task.drop {name} leaves it out")
    if wish in ("name", "text"):
        return Column(name, False, values, values, is_text=wish == "text")
    if wish == "date":
        return _dates(name, values, rows)
    if wish == "category":
        integers = [None if value is None else cells.whole(value) for value in values]
        are_whole = all(integers[row] is not None for row in rows)
        return Column(name, False, integers if are_whole else values, values)
    is_number = cells.NUMBERS[decimal].fullmatch
    others = [row for row in rows if not is_number(values[row] or "")]
    if wish == "time" and others:
        return _dates(name, values, rows)
    if not [row for row in others if not _INFINITY.fullmatch(values[row] or "")]:
        return _numbers(name, values, decimal)
    _must_be_categories(values, rows, others, decimal)
    if all(
        (values[row] or "").lower() in ("true", "false") for row in rows
    ):  # one spelling: others read alike
        return Column(name, False, [None if v is None else cells.boolean(v) for v in values], values)
    return Column(name, False, values, values)


def _numbers(name: str, values: Sequence[str | None], decimal: Decimal) -> Column:
    mark = (lambda value: value.replace(",", ".")) if decimal == "," else str
    numbers = [None if value is None else float(mark(value)) for value in values]
    if infinite := [row for row, value in enumerate(numbers) if value is not None and math.isinf(value)]:
        raise _Faulty("holds {cells}: give a finite number, or leave it empty", infinite)
    return Column(name, True, numbers, values, decimal=decimal)


def _must_be_categories(
    values: Sequence[str | None], rows: Sequence[int], others: Sequence[int], decimal: str
) -> None:
    """Raises _Faulty if a column that is not of numbers alone is of something else than categories.

    Args:
        values: Of the column.
        rows: Where there is one.
        others: Where there is one that is no number.
        decimal: The mark in numbers.
    """
    present = [values[row] or "" for row in rows]
    other_mark = "," if decimal == "." else "."
    marked = [row for row in others if cells.NUMBERS[other_mark].fullmatch(values[row] or "")]
    if all(_THOUSANDS.fullmatch(values[row] or "") for row in others):
        raise _Faulty(
            "holds {cells}, which may be thousands or decimals: write thousands without a mark; "
            "--task.categorical {name} takes them as texts"
            + ("; --task.decimal , reads decimal commas" if decimal == "." else ""),
            others,
        )
    if len(marked) == len(others):
        told = (
            "a decimal comma, as in {cells}: --task.decimal , reads them"
            if decimal == "."
            else "a point, as in {cells}, where --task.decimal , wants a comma: write them without"
        )
        raise _Faulty(f"holds numbers with {told}; --task.categorical {{name}} takes them as texts", marked)
    if len(others) <= (1 - FEWEST_GOOD) * len(rows):
        raise _Faulty(
            "is of numbers, but for {cells}: mend these cells or leave them empty; --task.categorical {name} "
            "takes all as texts",
            others,
        )
    if all(map(_DATE.fullmatch, present)):
        raise _Faulty(
            "holds dates such as {cells}: --task.dates {name} gives their parts, --task.drop {name} leaves "
            "them out",
            rows,
        )
    different = len(set(present))
    if different > MOST_CATEGORIES or 2 * different > len(present):
        raise _Faulty(
            f"holds {different} different texts in {len(present)} rows, such as {{cells}}: free text cannot "
            "be encoded; --task.drop {name} leaves it out, --task.categorical {name} takes it as categories, "
            "--task.text {name} has it read by an encoder",
            rows,
        )


def _dates(name: str, values: Sequence[str | None], rows: Sequence[int]) -> Column:
    """A column of dates, all of them written in one form."""
    readings = {form: _read_as(form, values) for form in cells.DATES}
    wrong = {form: [row for row in rows if found[row] is None] for form, found in readings.items()}
    form = min(wrong, key=lambda form: len(wrong[form]))
    if wrong[form]:
        raise _Faulty(
            f"holds {{cells}}, no dates, which are written {form}: mend these cells, or leave them empty",
            wrong[form],
        )
    found = readings[form]
    for other in cells.DATES:
        if not wrong[other] and readings[other] != found:
            differing = [row for row in rows if readings[other][row] != found[row]]
            raise _Faulty(f"holds {{cells}}, which may be {form} or {other}: write year-month-day", differing)
    return Column(name, False, found, values, form=form)


def _read_as(form: str, values: Sequence[str | None]) -> list[datetime | None]:
    known: dict[str | None, datetime | None] = {None: None}
    for value in values:
        if value not in known:
            try:
                known[value] = cells.moment(value, form)
            except ValueError:
                known[value] = None
    return [known[value] for value in values]


# ------------------------------------------------------------------------------------------- names, remarks


def named(given: Mapping[str, str | None], known: Collection[str], path: Path | str) -> dict[str, list[str]]:
    """The columns that flags name: one, or several with commas between them.

    Args:
        given: What each flag was given.
        known: The file's columns.
        path: Of the file, or what rows in memory are called.

    Raises:
        UsageError: If the file has no such column, or two flags name one, other than dates that are the time
            too; one line.
    """
    found: dict[str, list[str]] = {}
    flag_of: dict[str, str] = {}
    for flag, value in given.items():
        if value is None:
            found[flag] = []
        else:
            found[flag] = [value] if value in known else [name.strip() for name in value.split(",")]
        for name in dict.fromkeys(found[flag]):
            if name not in known:
                some = ", ".join(one_line(each) for each in list(known)[:20])
                raise UsageError(f"--task.{flag} {one_line(name)}: {path} has no such column; it has {some}")
            if {flag, other := flag_of.get(name, flag)} not in ({flag}, {"time", "dates"}):
                raise UsageError(
                    f"--task.{other} and --task.{flag} name one column, {one_line(name)}: give one of them"
                )
            flag_of[name] = flag
    return found


def remarks(columns: Sequence[Column], target: Column, labels: Sequence[str] | None) -> list[str]:
    """Sentences on columns that tell the target itself, number the rows, or have texts that look alike.

    Args:
        columns: The inputs.
        target: Without missing values.
        labels: Names of the classes, row after row; None of a target of numbers.
    """
    equal, numbering = [], []
    for each in columns:
        if None in each.values:
            continue
        if _tells(each, target, labels):
            equal.append(one_line(each.name))
        elif each.is_number and set(np.diff(np.array(each.values, np.float64))) in ({1.0}, {-1.0}):
            numbering.append(one_line(each.name))
    said = [
        ("the target in other words, so that nothing else is learned", equal),
        ("a number of the row, which new rows continue", numbering),
    ]
    found = [f"{what}: {', '.join(found)} (--task.drop leaves out)" for what, found in said if found]
    texts = [each for each in columns if not each.is_number and each.form is None and not each.is_text]
    alike = {each.name: _alike(value for value in each.values if value is not None) for each in texts}
    alike |= {} if labels is None else {target.name: _alike(labels)}
    pairs = [f"{one_line(name)} ({' and '.join(two)})" for name, two in alike.items() if two]
    if pairs:
        what = "texts that differ in capitals, blanks or hidden characters alone, and are taken for two"
        found.append(f"{what}: {', '.join(pairs)}")
    numbers = [each for each in (*columns, *([target] if labels is None else [])) if each.is_number]
    return found + [said for each in numbers for said in _placeholders(each)]


_PLACEHOLDERS = frozenset(sign * float("9" * digits) for sign in (1, -1) for digits in range(2, 7))


def _placeholders(column: Column) -> list[str]:
    """A sentence on a number of nines, far off all others, as it stands for a missing one."""
    values = np.array([value for value in column.values if value is not None], np.float64)
    for value in sorted(_PLACEHOLDERS & set(values)):
        others = values[values != value]
        times = len(values) - len(others)
        if times < 2 or not len(others):
            continue
        low, high = others.min(), others.max()
        if max(low - value, value - high) > high - low:
            return [
                f"warning: {one_line(column.name)} is {value:.0f} in {times} rows, and {low:.4g} to "
                f"{high:.4g} in all others: where that says that it is missing, leave the cell empty"
            ]
    return []


def _alike(texts: Iterable[Any]) -> list[str]:
    """The first two different texts that a reader may take for one; empty where there are none."""
    first: dict[str, str] = {}
    for value in dict.fromkeys(map(str, texts)):
        seen = "".join(c for c in unicodedata.normalize("NFKC", value) if unicodedata.category(c) != "Cf")
        other = first.setdefault(" ".join(seen.casefold().split()), value)
        if other != value:
            return [ascii(other)[:42], ascii(value)[:42]]
    return []


def _tells(column: Column, target: Column, labels: Sequence[str] | None) -> bool:
    """Whether a column without missing values is the target but for names, or for unit and zero."""
    if labels is not None:
        pairs = set(zip(column.values, labels, strict=True))
        return len(pairs) == len(set(column.values)) == len(set(labels))
    if not column.is_number:
        return False
    both = np.array([column.values, target.values], np.float64)
    with np.errstate(all="ignore"):
        standard = (both - both.mean(1, keepdims=True)) / both.std(1, keepdims=True)
        return bool(min(np.abs(standard[0] - standard[1]).max(), np.abs(standard.sum(0)).max()) < 1e-9)
