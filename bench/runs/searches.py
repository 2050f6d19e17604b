"""The committed searches of a task: whose settings are tuned with as many tries as everybody else's.

A ranked table shows these entries first and the rest below a line. The ranks stay those of one ranking.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from bench.errors import UsageError
from bench.runs import measures, registry, resolution

LINE = "not tuned"
"""What the line says below which the entries stand whose settings are not tuned."""
NONE_TUNED = "no entry is tuned with the same number of tries as all: an order may be that of the settings"
"""What a table of such entries says in place of a line."""
Row = TypeVar("Row")


@dataclass(frozen=True)
class Searches:
    """The committed searches of one task.

    Attributes:
        budgets: Method -> how many configurations were tried.
    """

    budgets: dict[str, int]

    @property
    def budget(self) -> int | None:
        """The budget that all have; None without a search, or where budgets differ."""
        different = set(self.budgets.values())
        return different.pop() if len(different) == 1 else None

    def is_tuned(self, tuning: str, method: str, tried: int | None = None) -> bool:
        """Whether the settings of an entry are tuned with the budget of the task.

        Args:
            tuning: Where the record of the entry says that its settings come from.
            method: Name or identity of the method; an ensemble has the search of its member.
            tried: How many configurations a submission from elsewhere says that it tried; None of the
                project's own entries, whose searches are committed.
        """
        if tuning != "tuned" or self.budget is None:
            return False
        if tried is not None:
            return tried == self.budget
        return registry.methods().member_of(method.partition("+")[0]) in self.budgets


def searches(task: str) -> Searches:
    """The committed searches of a task by name; one by another validation metric than the task's is none.

    Raises:
        UsageError: If a file is no result of a search.
    """
    spec, budgets = measures.written().get(task), {}
    for path in sorted(resolution.tuned_path("any", task, resolution.TUNED).parent.glob("*.json")):
        try:
            found = json.loads(path.read_text())
            by = {"on": "validation"} | found["criterion"]
            if spec and by["on"] == "validation" and by["metric"] != spec.validation_metric:
                continue
            budgets[str(found["method"])] = int(found["budget"])
        except (OSError, ValueError, KeyError, TypeError):
            raise UsageError(f"{path} is no result of bench tune: remove it or tune again") from None
    return Searches(budgets)


def parted(rows: Sequence[Row], is_tuned: Callable[[Row], bool]) -> tuple[list[Row], list[Row]]:
    """Rows above the line and rows below it, each in the order that they had."""
    return [row for row in rows if is_tuned(row)], [row for row in rows if not is_tuned(row)]
