"""What the events of a run say as numbers, each with its place in the run.

A run tells its observers `stage`, `steps` (means over some training steps), `epoch`, `fit` (one is finished),
`log` (a number that the task keeps), `notice` and `record` (all is written). Every event says how many
training `steps` the run has made, those of an earlier start included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from logging import Logger
from typing import Any, Literal, NamedTuple

Observer = Callable[[str, dict[str, Any]], None]
"""Called with (event, values) on every event of a run."""

_PLACE = ("epoch", "of", "together", "fit", "fits", "steps")


class Number(NamedTuple):
    """A number of an event: fits are counted within their stage, from 1; one on validation data has none."""

    stage: str
    fit: int | Literal[""]
    step: float
    name: str
    value: float

    @property
    def tag(self) -> str:
        """The name of its curve."""
        if not self.fit:  # one curve over all stages
            return f"validation/{self.name}"
        return f"{self.stage if self.fit == 1 else f'{self.stage}, fit {self.fit}'}/{self.name}"


def terms(values: dict[str, Any]) -> dict[str, float]:
    """What an event `steps` or `epoch` measured: the loss, its terms, what a probe saw."""
    return {name: value for name, value in values.items() if name not in _PLACE}


def written(log: Logger) -> Observer:
    """Writes every event into a log, but for those of single steps."""

    def observe(event: str, values: dict[str, Any]) -> None:
        if event != "steps":
            log.info(" ".join([event, *(f"{name}={value}" for name, value in values.items())]))

    return observe


def noticing(notices: list[str]) -> Observer:
    """Collects what is told to the user."""

    def observe(event: str, values: dict[str, Any]) -> None:
        if event == "notice":
            notices.append(values["text"])

    return observe


class Reader:
    """Turns events into numbers."""

    def __init__(self) -> None:
        self.stage, self.logged = "fit", 0
        self._finished: Counter[str] = Counter()

    @property
    def fit(self) -> int:
        """Which fit of the stage is under way; a stage that comes again goes on counting."""
        return self._finished[self.stage] + 1

    @property
    def place(self) -> str:
        """The fit under way, by a name that no other fit of the run has."""
        return self.stage if self.fit == 1 else f"{self.stage}, fit {self.fit}"

    def read(self, event: str, values: dict[str, Any]) -> list[Number]:
        """The numbers of an event."""
        if event == "stage":
            self.stage = values["name"]
            if values["of"] > 1:  # two stages may have one name
                self.stage += f" ({values['number']} of {values['of']})"
        elif event == "fit":
            self._finished[self.stage] += 1
        elif event == "epoch":
            return [Number(self.stage, self.fit, values["epoch"], n, v) for n, v in terms(values).items()]
        elif event == "log":
            self.logged += 1
            step = self.logged if values["step"] is None else values["step"]
            return [Number(self.stage, "", step, values["name"], values["value"])]
        return []
