"""How numbers, places and links are written on the pages, in CSV and in the feed."""

from __future__ import annotations

import csv
import hashlib
import io
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

from bench.text import escaped

MISSING = "\N{EN DASH}"
_BAR = 160
"""Width of an interval's drawing."""


class Said(NamedTuple):
    """A mean and the limits of its interval, as text; the limits are empty where there is no interval."""

    mean: str
    low: str
    high: str

    @property
    def interval(self) -> str:
        """`0.91 to 0.95`, or a dash."""
        return f"{self.low} to {self.high}" if self.low else MISSING


def number(value: float | None, digits: int = 4) -> str:
    """A number with so many significant digits; a dash for None.

    >>> [number(x) for x in (0.9, 98.256, 123456.7, 7)]
    ['0.9000', '98.26', '123457', '7']
    """
    if value is None or not math.isfinite(value):
        return MISSING
    if isinstance(value, int) or not value:
        return f"{value:g}"
    return f"{value:.0f}" if 10**digits <= abs(value) < 1e7 else f"{value:#.{digits}g}".rstrip(".")


def said(mean: float | None, low: float | None, high: float | None) -> Said:
    """A mean and its interval, to the second significant digit of the half-width.

    >>> said(0.94312, 0.94018, 0.94606)
    Said(mean='0.9431', low='0.9402', high='0.9461')
    """
    if mean is None or low is None or high is None:
        return Said(number(mean), "", "")
    half, largest = (high - low) / 2, max(map(abs, (mean, low, high)))
    if half <= 1e-12 * largest or not 1e-4 <= largest < 1e7:
        return Said(number(mean), number(low), number(high))
    place = 1 - int(f"{half:.1e}".partition("e")[2])  # digits after the point
    return Said(*(f"{round(x, place):.{max(place, 0)}f}" for x in (mean, low, high)))


def duration(seconds: float | None) -> str:
    """Seconds, minutes or hours, whichever is read most easily.

    >>> [duration(x) for x in (3.21, 95, 5000, 90000)]
    ['3.2 s', '95 s', '83 min', '25 h']
    """
    if seconds is None or not math.isfinite(seconds):
        return MISSING
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def ranks(between: Sequence[int] | None) -> str:
    """The one rank, both with a dash between them, or a dash."""
    if not between:
        return MISSING
    first, last = between
    return str(first) if first == last else f"{first}{MISSING}{last}"


def plural(count: int, word: str) -> str:
    """`1 entry`, `2 entries`.

    >>> plural(1, "entry"), plural(2, "entry"), plural(0, "seed"), plural(3, "class")
    ('1 entry', '2 entries', '0 seeds', '3 classes')
    """
    if count == 1:
        return f"1 {word}"
    if word.endswith("y"):
        return f"{count} {word[:-1]}ies"
    return f"{count} {word}{'es' if word.endswith('s') else 's'}"


def url(path: str) -> str:
    """A path of the site as a link's target."""
    return quote(path, safe="/-_.~")


def pair_page(task: str, first: str, second: str) -> str:
    """The compare page of two entries, whichever is better."""
    digest = hashlib.sha256("\0".join(sorted((first, second))).encode()).hexdigest()
    return f"compare/{task}/{digest[:16]}.html"


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """CSV whose text no spreadsheet takes for a formula; numbers stand with all digits."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(_guarded, header))
    writer.writerows([_guarded(cell) for cell in row] for row in rows)
    return text.getvalue()


def _guarded(cell: Any) -> str:
    if isinstance(cell, bool) or not isinstance(cell, int | float):
        text = "" if cell is None else str(cell)
        return escaped(f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text)
    return repr(cell)


class Scale(NamedTuple):
    """Where values lie in a drawing of intervals."""

    low: float
    high: float

    @classmethod
    def of(cls, rows: Iterable[tuple[float | None, float | None, float | None]]) -> Scale:
        """A scale that holds all limits."""
        values = [x for row in rows for x in row if x is not None]
        if not values:
            return cls(0.0, 1.0)
        return cls(min(values), max(values))

    def at(self, value: float) -> str:
        """Abscissa of a value."""
        width = self.high - self.low
        share = (value - self.low) / width if width > 0 else 0.5
        return f"{6 + share * (_BAR - 12):.1f}"
