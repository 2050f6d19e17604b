"""Rows of a user's table: read, judged, and parted into those to train on, to stop by and to test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from bench import columns, encoding, learning
from bench.cells import read, text, zone
from bench.columns import Column, Wish
from bench.contract import Task
from bench.errors import UsageError
from bench.studies import own
from bench.text import one_line

FEWEST_TRAINED, FEWEST_TESTED = 10, 3
LARGE = 10_000
"""Rows not held out from which on batches and epochs follow their number, and some are kept aside."""
MOST_KEPT_ASIDE = 10_000
_FLAGS: dict[str, Wish | None] = {
    "target": None,
    "split_column": "name",
    "group": "name",
    "time": "time",
    "drop": None,
    "categorical": "category",
    "dates": "date",
    "text": "text",
}
"""Settings that name columns, and what these are of."""


class TableTask(Task):
    """What a task on a table reads; its settings are those of `tasks/own_table.py`."""

    settings: Any

    @cached_property
    def columns(self) -> dict[str, Column]:
        """The columns that are used, judged, without rows that have no target."""
        given = self.settings
        if given.file is None or given.target is None:
            raise UsageError("own_table needs a table: --task.file FILE.csv --task.target COLUMN")
        path = Path(given.file)
        table = read(path, given.decimal)
        wishes, dropped = self.asked(path, table)
        target = table[given.target]
        kept = [row for row, cell in enumerate(target) if text(cell) is not None]
        if len(kept) < own.FEWEST:
            raise UsageError(
                f"{path}: {len(kept)} rows with a target are too few to learn and to test: at least "
                f"{own.FEWEST} are needed"
            )
        self.left_out = len(target) - len(kept)
        used = {name: cells for name, cells in table.items() if name not in dropped}
        return columns.judged(path, used, kept, wishes, given.decimal)

    def asked(self, path: Path | str, known: Collection[str]) -> tuple[dict[str, Wish], set[str]]:
        """What the settings say that columns are of, by name, and which columns they leave out.

        Args:
            path: Of the file, or what rows in memory are called.
            known: Names of all columns.

        Raises:
            UsageError: If a setting names no column; one line.
        """
        given = self.settings
        if given.text is not None and given.text_encoder is None:
            raise UsageError(
                f"--task.text {one_line(given.text)}: needs what reads it: --task.text_encoder FOLDER"
            )
        if given.text is None and given.text_encoder is not None:
            raise UsageError("--task.text_encoder: reads columns that --task.text names, and none is named")
        named = columns.named({flag: getattr(given, flag) for flag in _FLAGS}, known, path)
        wishes = {name: wish for flag, wish in _FLAGS.items() if wish for name in named[flag]}
        return wishes, set(named["drop"])

    @cached_property
    def kind(self) -> encoding.Kind:
        """Whether the target is a number or a class."""
        target = self.target_column
        name, path = one_line(target.name), self.settings.file
        kind = self.settings.kind or learning.guessed(target)[0]
        if kind == "regression" and not target.is_number:
            raise UsageError(f"--task.kind regression: the target '{name}' holds texts, which are no numbers")
        counts = Counter(self.labels if kind == "classification" else target.values)
        if len(counts) < 2:
            raise UsageError(
                f"{path}: the target '{name}' is {one_line(self.labels[0])} in all rows: there is "
                "nothing to learn"
            )
        if kind == "classification":
            alone = [value for value in learning.classes(self.labels) if counts[value] == 1]
            otherwise = "; --task.kind regression takes the target as a number" if target.is_number else ""
            if alone:
                raise UsageError(
                    f"{path}: the class {one_line(alone[0])} of the target '{name}' is in "
                    "only one row, which cannot be both learned and tested: take the row out, or put it in "
                    f"another class{otherwise}"
                )
        return kind

    @property
    def target_column(self) -> Column:
        """The target."""
        return self.columns[self.settings.target or ""]

    @cached_property
    def labels(self) -> list[str]:
        """Name of each row's class, `[N]`, if the target is taken for classes."""
        return learning.identities(self.target_column)

    @cached_property
    def inputs(self) -> list[Column]:
        """The columns that the network sees."""
        given = self.settings
        beside = {given.target, given.split_column, given.group}
        if given.time not in columns.named({"dates": given.dates}, self.columns, Path())["dates"]:
            beside.add(given.time)
        found = [column for name, column in self.columns.items() if name not in beside]
        if not found:
            raise UsageError(f"{given.file}: holds no column but the target to learn from")
        return found

    @cached_property
    def rows(self) -> dict[str, np.ndarray]:
        """Numbers of the rows of train, val and test, ascending; val may have none."""
        given, everything = self.settings, np.arange(len(self.target_column.values))
        flags = [flag for flag in ("split_column", "group", "time") if getattr(given, flag) is not None]
        if len(flags) > 1:
            raise UsageError(f"--task.{' and --task.'.join(flags)}: a column says it all, give one of them")
        if given.split_column is not None:
            part_of = self._as_said(self.columns[given.split_column])
        else:
            part_of = np.where(self._held_out(everything, own.TEST_SHARE), "test", "train")
        train = np.flatnonzero(part_of == "train")
        if "val" not in part_of and self._validation_share(len(train)):
            part_of[train[self.kept_aside(train)]] = "val"
            if "val" not in part_of:
                raise UsageError(
                    f"{given.file}: no rows can be kept aside to stop by: --task.validation 0 trains on all"
                )
        found = {part: np.flatnonzero(part_of == part) for part in ("train", "val", "test")}
        for part, fewest in (("train", FEWEST_TRAINED), ("test", FEWEST_TESTED)):
            if len(found[part]) < fewest:
                raise UsageError(
                    f"{given.file}: {len(found[part])} rows to {part}: at least {fewest} are needed"
                )
        if self.kind == "classification":
            labels = np.array(self.labels, object)
            if new := set(labels) - set(labels[found["train"]]):
                raise UsageError(
                    f"{given.file}: the class {one_line(learning.classes(new)[0])} is in test rows "
                    "alone, or in those kept aside: nothing could have learned it; split otherwise"
                )
        return found

    @property
    def is_large(self) -> bool:
        """Whether batches, epochs and rows kept aside follow the number of rows."""
        return len(self.rows["train"]) + len(self.rows["val"]) >= LARGE

    def kept_aside(self, rows: np.ndarray) -> np.ndarray:
        """Which of these rows, none of them held out, are kept aside to stop by, `[N]`; none of few."""
        share = self._validation_share(len(rows))
        return self._held_out(rows, share) if share else np.zeros(len(rows), bool)

    def _validation_share(self, number: int) -> float:
        """Of so many rows that are not held out."""
        if self.settings.validation is not None:
            return self.settings.validation
        wanted = number >= LARGE or self.settings.patience is not None
        return min(0.1, MOST_KEPT_ASIDE / number) if wanted else 0.0

    def _held_out(self, rows: np.ndarray, share: float) -> np.ndarray:
        """Which of these rows are to be held out from the others, `[N]`."""
        given = self.settings
        if given.group is not None:
            groups = self.columns[given.group]
            if None in groups.values:
                raise UsageError(
                    f"--task.group {groups.name}: row {groups.values.index(None) + 1} has no group"
                )
            if len(set(groups.values)) < 2:
                raise UsageError(
                    f"--task.group {groups.name}: all rows are of one group, which cannot be parted"
                )
            return own.whole_groups(np.array(groups.values)[rows], given.split, share)
        if given.time is not None:
            times = self.columns[given.time]
            if None in times.values:
                raise UsageError(f"--task.time {times.name}: row {times.values.index(None) + 1} has no time")
            if len(set(times.values)) < 2:
                raise UsageError(f"--task.time {times.name}: all rows are of one time: none is later")
            if times.form and len(zones := sorted({zone(value or "") for value in times.texts})) > 1:
                some = ", ".join(value or "none" for value in zones[:3])
                raise UsageError(
                    f"--task.time {times.name}: holds times of several zones ({some}), which their clocks "
                    "do not order: write all in one"
                )
            kind = "datetime64[us]" if times.form else np.float64
            return own.latest(np.array(times.values, kind)[rows], share)
        is_class = self.kind == "classification"
        strata = np.array(self.labels, object)[rows] if is_class else np.zeros(len(rows))
        return own.at_random(strata, given.split, share)

    def _as_said(self, column: Column) -> np.ndarray:
        """Part of each row, as a column says it, `[N]`."""
        parts: dict[Any, str] = {"train": "train", "validation": "val", "test": "test"}
        if wrong := [value for value in column.values if value not in parts]:
            raise UsageError(
                f"--task.split_column {column.name}: every row must say train, validation or test, and one "
                f"says '{'' if wrong[0] is None else one_line(wrong[0])}'"
            )
        return np.array([parts[value] for value in column.values])
