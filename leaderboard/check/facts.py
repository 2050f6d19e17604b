"""What a record says beside its numbers, which no array proves: bounds, dates, versions, and texts.

A lie within the bounds cannot be seen. What lies beyond them is refused, so that nothing absurd is shown,
sorted by, or summed. The command on the board is not the submitter's: it is made from the settings.
"""

from __future__ import annotations

import re
import shlex
import unicodedata
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import bench
from bench.leaderboard.check.codes import Rejected
from bench.leaderboard.evidence.submission import Submission
from bench.runs.records import Record
from bench.text import hidden

_YEAR: Final = 365.25 * 24 * 3600
_FIRST: Final = datetime(2025, 1, 1, tzinfo=UTC)
"""Before this suite there were no runs of it."""
_DATE: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?(Z|[+-]\d\d:\d\d)", re.ASCII)
_VERSION: Final = re.compile(r"(\d{1,6})\.(\d{1,6})", re.ASCII)
_BLANK: Final = {"\u115f", "\u1160", "\u2800", "\u3164", "\uffa0"}
"""Letters and symbols of Unicode that show nothing."""
_MOST_MARKS: Final = 4
"""Combining marks in a row; no written language has more on one letter."""


def deceiving(text: str) -> str | None:
    """What makes a text show other than it is; None if nothing does.

    Hidden characters, blanks that are no space, a flood of combining marks, nothing to see at all, or blanks
    at an end.
    """
    if text.isascii() and text.isprintable() and text == text.strip():
        return None
    if next(hidden(text), None) is not None:
        return "characters that are never printed"
    if any(c in _BLANK or (c != " " and unicodedata.category(c) == "Zs") for c in text):
        return "blanks that are no space"
    marks = "".join("m" if unicodedata.category(c) in ("Mn", "Me") else " " for c in text)
    if marks.startswith("m") or "m" * (_MOST_MARKS + 1) in marks:
        return "a flood of combining marks"
    return "blanks at an end" if text != text.strip() else None


def refuse_facts(record: Record, where: str) -> None:
    """Refuses a record that says what no run can be.

    Raises:
        Rejected: With the first reason found.
    """
    method, fits = record.method, record.fits
    bounds: list[tuple[str, float, float, float]] = [
        ("seconds", record.seconds, 0, 10 * _YEAR),
        ("members", method.members, 1, 10_000),
        ("threads", record.environment.threads, 1, 65_536),
        *(("seconds of a fit", fit.seconds, 0, 10 * _YEAR) for fit in fits),
        *(("epochs of a fit", fit.epochs, 0, 10**9) for fit in fits),
        *(("steps of a fit", fit.steps, 0, 10**12) for fit in fits),
    ]
    for name, value, low, high in bounds:
        if not low <= value <= high:
            raise Rejected("fact-impossible", f"{where}: {name} is {value:g}, out of {low:g} to {high:g}")
    _refuse_date(record.created, where)
    said, own = (_VERSION.match(text) for text in (record.provenance.version, bench.__version__))
    if said is None or own is None or [*map(int, said.groups())] > [*map(int, own.groups())]:
        raise Rejected("fact-impossible", f"{where}: its version of the suite is not known here")


def _refuse_date(created: str, where: str) -> None:
    try:
        when = datetime.fromisoformat(created) if _DATE.fullmatch(created) else None
    except ValueError:
        when = None
    if when is None:
        raise Rejected("fact-impossible", f"{where}: created is no date and time of RFC 3339")
    if not _FIRST <= when <= datetime.now(UTC) + timedelta(days=1):
        raise Rejected("fact-impossible", f"{where}: created is {created}, not between {_FIRST:%Y} and now")


def refuse_contradictions(submission: Submission, cells: Iterable[list[Record]]) -> None:
    """Refuses what the runs of one cell, or the manifest, say against each other.

    Raises:
        Rejected: With the first reason found.
    """
    for records in cells:
        first = records[0]
        where = f"{first.method.identity} on {first.task.identity}"
        digests = {r.provenance.arrays_digest for r in records if r.status == "completed"}
        if first.method.seed_matters is False and len(digests) > 1:
            raise Rejected("fact-impossible", f"{where}: no seed matters, and seeds have other arrays")
        if first.method.tuning == "tuned" and submission.tuning_budget == 0:
            raise Rejected("fact-impossible", f"{where} is tuned, and tuning_budget is 0")


def command(record: Record) -> str:
    """The command line that makes a run again, by what its record names: method, task, settings, seed."""
    method, task = record.method, record.task
    words = ["bench", "run", method.name, task.name]
    if record.preset != "standard":
        words += ["--preset", record.preset]
    for flag, part in (("method", method), ("task", task)):
        names = [one.partition("=")[0] for one in part.identity.partition("+")[2].split(",")]
        if "members" in names:
            words += ["--members", str(method.members)]
        for name in (name for name in names if name in part.settings):
            words += [f"--{flag}.{name}", _word(part.settings[name])]
    for name, usual in (("precision", "32-true"), ("compiled", False)):
        if (value := record.trainer.get(name)) not in (None, usual):
            words += [f"--trainer.{name}", _word(value)]
    return shlex.join([*words, "--seed", str(record.seed)])


def _word(value: Any) -> str:
    return "null" if value is None else str(value)
