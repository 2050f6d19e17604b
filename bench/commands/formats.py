"""The one writer of tables: on a terminal, or as csv, json, latex or markdown on standard output.

A row maps the names of its columns to cells. A cell is text, a number, a truth value, None where there is
nothing, an `Interval`, or a few words by position or by name. csv and json hold numbers in full, an interval
as three columns (`mean`, `mean_low`, `mean_high`). The other forms show as many digits as tell something.
"""

from __future__ import annotations

import csv
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, TypeGuard, Union

from rich import box
from rich.table import Table
from rich.text import Text

from bench.commands.parser import Parser
from bench.text import escaped

if TYPE_CHECKING:
    from bench.intervals import Interval

Cell = Union[str, int, float, "Interval", Sequence[Any], Mapping[str, Any], None]
Row = Mapping[str, Cell]
Format = Literal["table", "csv", "json", "latex", "markdown"]

_LATEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
    **{"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", '"': r"\textquotedbl{}"},
}


def add_format(parser: Parser) -> None:
    """Adds `--format`, which every command that prints a table has."""
    parser.add_argument(
        "--format",
        type=Format,
        default="table",
        help="for eyes; csv, json: for programs, all digits; latex (needs booktabs), markdown: to paste",
    )


# ------------------------------------------------------------------------------------------------- of a cell


def number(value: float) -> str:
    """A number with four significant digits; a whole one in full.

    >>> [number(x) for x in (0.9, 0.00001234, 98.256, 123456.7, 7)]
    ['0.9000', '1.234e-05', '98.26', '123457', '7']
    """
    if isinstance(value, int) or not value or not math.isfinite(value):
        return f"{value:g}" if isinstance(value, float) else str(value)
    return f"{value:.0f}" if 1e3 <= abs(value) < 1e7 else f"{value:#.4g}".rstrip(".")


def interval(value: Interval) -> str:
    """A mean and its interval, to the second significant digit of the half-width.

    >>> interval(Interval(0.94312, 0.94018, 0.94606, "n = 3"))
    '0.9431 (0.9402 to 0.9461)'
    """
    if not math.isfinite(value.half):
        return f"{number(value.centre)} ({value.basis}: no interval)"
    largest = max(map(abs, value[:3]))
    if value.half <= 1e-12 * largest:  # rounding errors of equal values, or none
        return f"{number(value.centre)} ({number(value.low)} to {number(value.high)})"
    place = 1 - int(f"{value.half:.1e}".partition("e")[2])  # digits after the point
    if not 1e-4 <= largest < 1e7:
        size = int(f"{largest:e}".partition("e")[2])
        form = f".{max(size + place, 0)}e"
        centre, low, high = (format(limit, form) for limit in value[:3])
    else:
        centre, low, high = (f"{round(limit, place):.{max(place, 0)}f}" for limit in value[:3])
    return f"{centre} ({low} to {high})"


def plain(text: str) -> str:
    """Text on one line and without control characters, which could rewrite what a terminal shows."""
    return escaped(" ".join(text.split()))


def shown(cell: Cell) -> str:
    """A cell as eyes read it; empty where there is nothing."""
    if _is_interval(cell):
        return interval(cell)
    match cell:
        case None:
            return ""
        case bool():
            return "yes" if cell else "no"
        case int() | float():
            return number(cell)
        case str():
            return plain(cell)
        case Mapping():
            return plain(", ".join(f"{name}={value}" for name, value in cell.items()))
    return plain(", ".join(map(str, cell)))


def _is_interval(cell: object) -> TypeGuard[Interval]:
    return hasattr(cell, "basis")  # its class lies beside numerics that take a second to import


def _is_number(cell: Cell) -> bool:
    return (isinstance(cell, int | float) and not isinstance(cell, bool)) or _is_interval(cell)


@dataclass(frozen=True)
class _Column:
    """A column as eyes read it: what stands above it, and every cell.

    `is_number` says that all it holds are numbers; `is_empty` that all it holds are empty texts.
    """

    heading: str
    cells: list[str]
    is_number: bool
    is_empty: bool


def _columns(rows: Sequence[Row]) -> dict[str, _Column]:
    """Every column that a row has, in order."""
    columns = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        cells = [row.get(name) for row in rows]
        heading = f"{name} (95% interval)" if any(map(_is_interval, cells)) else name
        is_number = all(_is_number(cell) for cell in cells if cell is not None)
        is_empty = all(cell == "" for cell in cells)
        columns[name] = _Column(heading, [shown(cell) for cell in cells], is_number, is_empty)
    return columns


# ------------------------------------------------------------------------------------------------ for eyes


_GAP = 2
"""Blanks between columns."""
_RULE = "─"
_NARROW = 16
"""Width that a column of text keeps while there is a number to split or a longer word to fold."""


def drawn(
    rows: Sequence[Row],
    width: int,
    title: str = "",
    without: Sequence[str] = (),
    line: tuple[int, str] | None = None,
) -> Table:
    """A table for a terminal: what is too long is folded, nothing is cut, a number is split last.

    Args:
        rows: A column that holds empty texts alone is left out; "-" stands where there is nothing (None).
        width: Of the terminal.
        title: Above the table.
        without: Columns to leave out.
        line: Before the row of this number a rule through all columns, which begins with these words.
    """
    table = Table(
        title=Text(plain(title)) if title else None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, _GAP - 1, 0, 0),
    )
    columns = [c for name, c in _columns(rows).items() if name not in without and not c.is_empty]
    widths = _widths(columns, width)
    if line is not None:
        widths[0] = max(widths[0], len(line[1]))
    for column, size in zip(columns, widths, strict=True):
        justify: Literal["left", "right"] = "right" if column.is_number else "left"
        table.add_column(Text(column.heading), justify=justify, width=size, overflow="fold")
    for place, cells in enumerate(zip(*(column.cells for column in columns), strict=True)):
        if line is not None and place == line[0]:
            words = f"{line[1]} ".ljust(widths[0], _RULE)
            table.add_row(Text(words), *(Text(_RULE * size) for size in widths[1:]))
        table.add_row(*(Text(cell or "-") for cell in cells))
    return table


def that_fit(
    rows: Sequence[Row], width: int, choice: Sequence[str], without: Sequence[str] = ()
) -> list[str]:
    """The first of some columns that have room beside all others with no number split; one at least.

    Args:
        rows: As of `drawn`.
        width: Of the terminal.
        choice: Names of columns, the most important first.
        without: Columns that are not drawn.
    """
    columns = {name: c for name, c in _columns(rows).items() if name not in without and not c.is_empty}
    least = {name: size + _GAP for name, size in zip(columns, _whole([*columns.values()]), strict=True)}
    room = width - sum(size for name, size in least.items() if name not in choice)
    ends = accumulate(least[name] for name in choice)
    return [name for k, (name, end) in enumerate(zip(choice, ends, strict=True)) if k == 0 or end <= room]


def _whole(columns: Sequence[_Column]) -> list[int]:
    """Widths at which no number is split: names and headings are folded, the latter between words."""
    found = []
    for column in columns:
        words = column.heading.split()
        size = max(map(len, [*column.cells, *(words if column.is_number else [column.heading])]))
        found.append(size if column.is_number else min(size, _NARROW))
    return found


def _widths(columns: Sequence[_Column], width: int) -> list[int]:
    """Widths of columns that fit beside each other: prose gives way first, then names, then intervals."""
    full, word = [], []
    for column in columns:
        texts = [column.heading, *column.cells]
        full.append(max(map(len, texts)))
        word.append(max(len(part) for text in texts for part in text.split()))
    narrow = [min(size, _NARROW) for size in full]
    limits = [
        [f if c.is_number else max(w, n) for c, f, w, n in zip(columns, full, word, narrow, strict=True)],
        [f if c.is_number else n for c, f, n in zip(columns, full, narrow, strict=True)],
        _whole(columns),
        [w if c.is_number else n for c, w, n in zip(columns, word, narrow, strict=True)],
        [1 for _ in columns],
    ]
    widths = list(full)
    for least in limits:
        while sum(widths) + _GAP * len(widths) > width:
            yielding = [i for i in range(len(widths)) if widths[i] > least[i]]
            if not yielding:
                break
            widths[max(yielding, key=lambda i: widths[i])] -= 1
    return widths


# -------------------------------------------------------------------------------- to take away, to compute


def write(rows: Sequence[Row], form: Format, aside: Sequence[str] = ()) -> None:
    """Writes rows to standard output in a form other than `table`.

    Args:
        rows: All with the same columns, or some without some of them.
        form: csv and json have every column; latex and markdown leave out those of empty texts.
        aside: Columns that latex and markdown leave out too: for programs, not for eyes.
    """
    match form:
        case "json":
            print(json.dumps([_in_full(row) for row in rows], indent=2))
        case "csv":
            _csv([_in_full(row) for row in rows])
        case "latex":
            _latex([c for name, c in _columns(rows).items() if name not in aside and not c.is_empty])
        case "markdown":
            _markdown([c for name, c in _columns(rows).items() if name not in aside and not c.is_empty])


def _in_full(row: Row) -> dict[str, Any]:
    """A row with all digits: an interval as three numbers, None in place of what is not finite."""
    full: dict[str, Any] = {}
    for name, cell in row.items():
        limits = (
            {name: cell.centre, f"{name}_low": cell.low, f"{name}_high": cell.high}
            if _is_interval(cell)
            else {name: cell}
        )
        for column, value in limits.items():
            if isinstance(value, float):  # a number of NumPy would be written as np.float64(0.5)
                value = float(value) if math.isfinite(value) else None
            full[column] = value
    return full


def _csv(rows: Sequence[dict[str, Any]]) -> None:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerows([columns] if columns else [])
    for row in rows:
        cells = (row.get(name) for name in columns)
        writer.writerow([repr(c) if isinstance(c, float) else shown(c) for c in cells])


def _latex(columns: Sequence[_Column]) -> None:
    print(f"\\begin{{tabular}}{{{''.join('r' if column.is_number else 'l' for column in columns)}}}")
    print(r"\toprule")
    print(" & ".join(_escaped_for_latex(column.heading) for column in columns) + r" \\")
    print(r"\midrule")
    for line in zip(*map(_cells_of_latex, columns), strict=True):
        print(" & ".join(line) + r" \\")
    print(r"\bottomrule")
    print(r"\end{tabular}")


def _cells_of_latex(column: _Column) -> list[str]:
    if not column.is_number:
        return [_escaped_for_latex(cell) for cell in column.cells]
    return [re.sub(r"(-?\d[\d.]*)(?:e([+-]\d+))?", _number_of_latex, cell) for cell in column.cells]


def _number_of_latex(found: re.Match[str]) -> str:
    power = "" if found[2] is None else rf" \times 10^{{{int(found[2])}}}"
    return f"${found[1]}{power}$"


def _escaped_for_latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)


def _markdown(columns: Sequence[_Column]) -> None:
    heading = [_escaped_for_markdown(column.heading) for column in columns]
    rule = ["---:" if column.is_number else "---" for column in columns]
    cells = [map(_escaped_for_markdown, column.cells) for column in columns]
    for line in [heading, rule, *zip(*cells, strict=True)]:
        print(f"| {' | '.join(line)} |")


def _escaped_for_markdown(text: str) -> str:
    """Without what Markdown reads as its own; an underscore inside a word is no emphasis and stays."""
    return re.sub(r"[\\|`*<>\[\]]|(?<!\w)_|_(?!\w)", lambda found: "\\" + found[0], text)
