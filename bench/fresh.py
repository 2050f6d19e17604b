"""Test sets that nobody has seen: how a task that draws its own data draws another one.

A round with hidden labels (`leaderboard/rank/rounds.py`) publishes the inputs of such a set, takes
predictions, and shows the truth when it closes. Only tasks whose test inputs are drawn anew can have one:
where inputs are public data in another order or under other noise, their labels are found by looking.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from bench.spec import Arrays, Layout

if TYPE_CHECKING:
    from bench.contract import Engine, Method


class Fresh(ABC):
    """Fresh test sets of a task, of N examples; `bench.contract.Task.fresh` gives it."""

    @property
    @abstractmethod
    def layouts(self) -> Mapping[str, Layout]:
        """What the arrays of `predict` look like; the letter N stands for the number of examples."""

    @abstractmethod
    def draw(self, seed: int) -> tuple[Arrays, Arrays]:
        """Draws a test set as the task's own was drawn; needs no data but those that the task draws.

        No random number that an input shows may come from a generator that the truth comes from.

        Args:
            seed: From 0 on, and of any length: all that is random follows from it alone.

        Returns:
            Inputs, which are published, and the truth: what scoring needs beside predictions. Every array of
            both is `[N, ...]`, in any order of the examples, which is changed before anybody sees it.
        """

    @abstractmethod
    def predict(self, engine: Engine, method: Method, inputs: Arrays) -> Arrays:
        """What a run of the task would leave of its predictions, for these inputs in their order."""

    @abstractmethod
    def losses(self, arrays: Arrays) -> np.ndarray:
        """-log p(truth) of every example, in nats, `[N]`; of predictions and truth together."""
