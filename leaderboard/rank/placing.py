"""Where the points of a front and their names lie in a drawing, in pixels from the left and from the top."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np

from bench.leaderboard.rank.fronts import Panel, Point

Rectangle = tuple[float, float, float, float]
"""Left, top, right, bottom."""

_ROOM = 2.5
"""What lies so many times farther from the best than three quarters of all do is not in the frame."""


class Canvas(NamedTuple):
    """What is drawn on, in pixels: its size, a label's letter and line, and half the width of a point."""

    width: float
    height: float
    letter: float = 5.8
    line: float = 11.0
    dot: float = 5.0

    def labels(
        self, points: Sequence[tuple[str, float, float]], taken: Sequence[Rectangle] = ()
    ) -> list[Label]:
        """Places of the labels of points (name, from the left, from the top), on nothing that is drawn.

        A label lies beside its point, or some lines above or below, within the canvas, on no point, on no
        rectangle that is taken and on no other label; one that has no such place is left out. The first have
        the first choice.
        """
        covered = [*taken, *(self.around(x, y) for _, x, y in points)]
        placed = []
        for name, x, y in points:
            wide = self.letter * len(name)
            sides = (self.dot + 3, -wide - self.dot - 3, -wide / 2)
            rows = sorted(range(-7, 8), key=lambda row: (abs(row), row))
            for row, side in product(rows, sides):
                label = Label(name, x + side, y + row * self.line, wide, self.line, (x, y))
                left, top, right, bottom = own = label.rectangle
                inside = left >= 0 and top >= 0 and right <= self.width and bottom <= self.height
                if inside and not any(_overlap(own, other) for other in covered):
                    covered.append(own)
                    placed.append(label)
                    break
        return placed

    def around(self, x: float, y: float) -> Rectangle:
        """What a point covers."""
        return x - self.dot, y - self.dot, x + self.dot, y + self.dot


class Label(NamedTuple):
    """A label: where it begins, its middle height, its width and height, and its point."""

    name: str
    left: float
    middle: float
    width: float
    height: float
    of: tuple[float, float]

    @property
    def rectangle(self) -> Rectangle:
        """What it covers."""
        half = self.height / 2
        return self.left, self.middle - half, self.left + self.width, self.middle + half

    @property
    def is_away(self) -> bool:
        """Whether it stands more than a line above or below its point."""
        return abs(self.middle - self.of[1]) > 1.5 * self.height

    @property
    def end(self) -> tuple[float, float]:
        """The point of its edge above or below that is next to its point."""
        left, top, right, bottom = self.rectangle
        return min(max(self.of[0], left), right), top if self.middle > self.of[1] else bottom


class Frame(NamedTuple):
    """What a drawing shows: a range of costs, logarithmic, and one of values."""

    canvas: Canvas
    left: float
    right: float
    low: float
    high: float

    @classmethod
    def of(cls, panel: Panel, canvas: Canvas) -> Frame:
        """Has all points but those far from the best, which is the most expensive one on the front."""
        best = panel.front[-1].quality.centre
        most = _ROOM * np.quantile([abs(p.quality.centre - best) for p in panel.points], 0.75)
        shown = [p for p in panel.points if abs(p.quality.centre - best) <= most]
        low, high = (end(p.quality.centre for p in shown) for end in (min, max))
        span = high - low or abs(high) or 1.0
        ends = [end for p in shown for end in p.quality[1:3] if np.isfinite(end)]
        bottom = max(min([low - span / 12, *ends]), low - span / 4)
        top = min(max([high + span / 12, *ends]), high + span / 4)
        # The margins hold points too, which may be dearer than all others.
        seconds = [p.cost.seconds for p in panel.points if bottom <= p.quality.centre <= top]
        return cls(canvas, min(seconds) / 1.3, max(seconds) * 1.8, bottom, top)

    def has(self, point: Point) -> bool:
        """Whether a point lies in it."""
        return self.low <= point.quality.centre <= self.high

    def across(self, cost: float) -> float:
        """Where a cost lies, from the left."""
        share = np.log(cost / self.left) / np.log(self.right / self.left)
        return float(self.canvas.width * share)

    def down(self, value: float) -> float:
        """Where a value lies, from the top."""
        return self.canvas.height * (self.high - value) / (self.high - self.low)

    def pixel(self, point: Point) -> tuple[float, float]:
        """Where a point lies."""
        return self.across(point.cost.seconds), self.down(point.quality.centre)

    def bar(self, point: Point) -> tuple[float, float] | None:
        """The limits of a point's interval as far as they lie inside; None if it has none."""
        if not np.isfinite(point.quality.low):
            return None
        return max(point.quality.low, self.low), min(point.quality.high, self.high)

    def value(self, across: float, down: float) -> tuple[float, float]:
        """The cost and the value that lie at a pixel."""
        cost = self.left * (self.right / self.left) ** (across / self.canvas.width)
        return cost, self.high - down / self.canvas.height * (self.high - self.low)


def stairs(corners: Sequence[tuple[float, float]]) -> list[Rectangle]:
    """What the steps through corners cover, from the left."""
    found = []
    for (x, y), (right, below) in pairwise(sorted(corners)):
        found += [(x, y - 1, right, y + 1), (right - 1, min(y, below), right + 1, max(y, below))]
    return found


def _overlap(one: Rectangle, other: Rectangle) -> bool:
    """Whether two rectangles share more than an edge."""
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
