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
from typing import Any, Literal

from rich import box
from rich.table import Table
from rich.text import Text

from bench.commands.parser import Parser
from bench.intervals import Interval

Cell = str | int | float | Interval | Sequence[Any] | Mapping[str, Any] | None
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
    return re.sub(r"[\x00-\x1f\x7f-\x9f]", lambda c: f"\\x{ord(c[0]):02x}", " ".join(text.split()))


def shown(cell: Cell) -> str:
    """A cell as eyes read it; empty where there is nothing."""
    match cell:
        case None:
            return ""
        case bool():
            return "yes" if cell else "no"
        case Interval():
            return interval(cell)
        case int() | float():
            return number(cell)
        case str():
            return plain(cell)
        case Mapping():
            return plain(", ".join(f"{name}={value}" for name, value in cell.items()))
    return plain(", ".join(map(str, cell)))


def _is_number(cell: Cell) -> bool:
    return isinstance(cell, int | float | Interval) and not isinstance(cell, bool)


@dataclass(frozen=True)
class _Column:
    """A column as eyes read it: what stands above it, every cell, whether all that it holds are numbers."""

    heading: str
    cells: list[str]
    is_number: bool


def _columns(rows: Sequence[Row]) -> dict[str, _Column]:
    """Every column that a row has, in order."""
    columns = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        cells = [row.get(name) for row in rows]
        heading = f"{name} (95% interval)" if any(isinstance(cell, Interval) for cell in cells) else name
        is_number = all(_is_number(cell) for cell in cells if cell is not None)
        columns[name] = _Column(heading, [shown(cell) for cell in cells], is_number)
    return columns


# ------------------------------------------------------------------------------------------------ for eyes


_GAP = 2
_NARROW = 16
"""Width to which a column of text may shrink before others do."""


def drawn(rows: Sequence[Row], width: int, title: str = "", without: Sequence[str] = ()) -> Table:
    """A table for a terminal: what is too long is folded, nothing is cut, a number is split last.

    Args:
        rows: Columns that are empty in all of them are left out.
        width: Of the terminal.
        title: Above the table.
        without: Columns to leave out.
    """
    table = Table(
        title=Text(plain(title)) if title else None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, _GAP, 0, 0),
    )
    columns = [c for name, c in _columns(rows).items() if name not in without and any(c.cells)]
    for column, size in zip(columns, _widths(columns, width), strict=True):
        justify: Literal["left", "right"] = "right" if column.is_number else "left"
        table.add_column(Text(column.heading), justify=justify, width=size, overflow="fold")
    for cells in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*(Text(cell or "-") for cell in cells))
    return table


def _widths(columns: Sequence[_Column], width: int) -> list[int]:
    """Widths of columns that fit beside each other: the widest give way, to words first."""
    texts = [[column.heading, *column.cells] for column in columns]
    widths = [max(map(len, of_column)) for of_column in texts]
    words = [max(len(word) for text in of_column for word in text.split()) for of_column in texts]
    least = [w if c.is_number else min(w, _NARROW) for w, c in zip(words, columns, strict=True)]
    while sum(widths) + (_GAP + 1) * len(widths) > width and max(widths, default=1) > 1:
        yielding = [i for i, w in enumerate(widths) if w > least[i]] or range(len(widths))
        widths[max(yielding, key=lambda i: widths[i])] -= 1
    return widths


# -------------------------------------------------------------------------------- to take away, to compute


def write(rows: Sequence[Row], form: Format) -> None:
    """Writes rows to standard output in a form other than `table`."""
    {"csv": _csv, "json": _json, "latex": _latex, "markdown": _markdown}[form](rows)


def _in_full(row: Row) -> dict[str, Any]:
    """A row with all digits: an interval as three numbers, None in place of what is not finite."""
    full: dict[str, Any] = {}
    for name, cell in row.items():
        limits = (
            {name: cell.centre, f"{name}_low": cell.low, f"{name}_high": cell.high}
            if isinstance(cell, Interval)
            else {name: cell}
        )
        for column, value in limits.items():
            full[column] = None if isinstance(value, float) and not math.isfinite(value) else value
    return full


def _json(rows: Sequence[Row]) -> None:
    print(json.dumps([_in_full(row) for row in rows], indent=2))


def _csv(rows: Sequence[Row]) -> None:
    full = [_in_full(row) for row in rows]
    columns = list(dict.fromkeys(name for row in full for name in row))
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerows([columns] if columns else [])
    for row in full:
        cells = (row.get(name) for name in columns)
        writer.writerow([repr(c) if isinstance(c, float) else shown(c) for c in cells])


def _latex(rows: Sequence[Row]) -> None:
    columns = _columns(rows)
    print(f"\\begin{{tabular}}{{{''.join('r' if column.is_number else 'l' for column in columns.values())}}}")
    print(r"\toprule")
    print(" & ".join(_escaped_for_latex(column.heading) for column in columns.values()) + r" \\")
    print(r"\midrule")
    for row in rows:
        print(" & ".join(_cell_of_latex(row.get(name)) for name in columns) + r" \\")
    print(r"\bottomrule")
    print(r"\end{tabular}")


def _cell_of_latex(cell: Cell) -> str:
    if not _is_number(cell):
        return _escaped_for_latex(shown(cell))
    return re.sub(r"(-?\d[\d.]*)(?:e([+-]\d+))?", _number_of_latex, shown(cell))


def _number_of_latex(found: re.Match[str]) -> str:
    power = "" if found[2] is None else rf" \times 10^{{{int(found[2])}}}"
    return f"${found[1]}{power}$"


def _escaped_for_latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)


def _markdown(rows: Sequence[Row]) -> None:
    columns = _columns(rows).values()
    heading = [_escaped_for_markdown(column.heading) for column in columns]
    rule = ["---:" if column.is_number else "---" for column in columns]
    cells = [map(_escaped_for_markdown, column.cells) for column in columns]
    for line in [heading, rule, *zip(*cells, strict=True)] if rows else []:
        print(f"| {' | '.join(line)} |")


def _escaped_for_markdown(text: str) -> str:
    """Without what Markdown reads as its own; an underscore inside a word is no emphasis and stays."""
    return re.sub(r"[\\|`*<>\[\]]|(?<!\w)_|_(?!\w)", lambda found: "\\" + found[0], text)
