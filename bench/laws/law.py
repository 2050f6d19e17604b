"""What makes a function a law of methods, and for which methods it is.

A law takes a `Case` and raises AssertionError if it does not hold. Whatever is raised under a law comes with
a note of what the law posed: how many epochs of how many batches.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

from bench.contract import Method
from bench.laws import problems
from bench.laws.cases import POSED, Case
from bench.runs.registry import Entry

Unfit = Callable[[Entry], str]
"""Why a law is not for a method; empty if it is."""


@dataclass(frozen=True)
class Law:
    """A law and what it is for.

    Attributes:
        holds: The function: `holds(case, ...)` raises AssertionError where the law does not hold.
        problems: Names of the problems that it poses.
        unfit: Reasons why it is not for a method; the first that there is counts.
        each: Further arguments, a tuple for each time that the law is held.
        is_slow: Whether it takes seconds.
    """

    holds: Callable[..., None]
    problems: tuple[str, ...]
    unfit: tuple[Unfit, ...]
    each: tuple[tuple[Any, ...], ...]
    is_slow: bool

    def is_not_for(self, entry: Entry) -> str:
        """Why the law is not for this method; empty if it is."""
        return next((reason for why in self.unfit if (reason := why(entry))), "")

    @property
    def leaves_files(self) -> bool:
        """Whether it takes an empty folder, after its case."""
        return "folder" in inspect.signature(self.holds).parameters


LAWS: dict[str, Law] = {}
"""All laws by name, in the order in which `bench.laws.methods` imports them."""


def law(
    *names: str,
    unfit: tuple[Unfit, ...] = (),
    each: tuple[tuple[Any, ...], ...] = ((),),
    is_slow: bool = False,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a function a law, whose failures say what it posed.

    Args:
        names: Of the problems that it poses; all of `problems.PROBLEMS` if none is named.
        unfit: See `Law`, as for the others.
        each: As there.
        is_slow: As there.
    """

    def made(function: Callable[..., None]) -> Callable[..., None]:
        @wraps(function)
        def checked(case: Case, *arguments: Any, **named: Any) -> None:
            POSED.clear()
            try:
                function(case, *arguments, **named)
            except Exception as error:
                posed = "; then ".join(dict.fromkeys(POSED)) or "no fit"
                error.add_note(
                    f"{function.__name__} posed to {case.cls.__name__} under {case.settings}: {posed}. "
                    "A method that spends another budget says so in `spends`."
                )
                raise

        LAWS[function.__name__] = Law(checked, names or tuple(problems.PROBLEMS), unfit, each, is_slow)
        return checked

    return made


# ------------------------------------------------------------------------------- for which methods a law is


def lacking(*capabilities: str) -> Unfit:
    """For methods that provide all of these."""

    def why(entry: Entry) -> str:
        missing = [name for name in capabilities if name not in entry.provides]
        return f"does not provide {missing[0]}" if missing else ""

    return why


def many(entry: Entry) -> str:
    """For single methods; the members of an ensemble are held to the law themselves."""
    return "" if entry.members == 1 else "an ensemble: its members are held to it"


def untrained(entry: Entry) -> str:
    """For methods that take training steps; of an ensemble the members do."""
    return many(entry) or ("" if entry.cls.trains else "takes no training steps")


def unmoved(entry: Entry) -> str:
    """For methods whose loss terms are evaluated under noise of their own."""
    return "" if entry.cls.draw_noise is not Method.draw_noise else "its loss has no noise"


def predicts_otherwise(entry: Entry) -> str:
    """For methods whose loss is over the very weights that predict: noise in both, or in neither."""
    fixed = unmoved(entry) and "weight_samples" in entry.provides
    return "its loss is at one value of the weights, its predictions are over draws" if fixed else ""


BY_TERMS = (untrained, lacking("loss_terms"))
"""Takes optimiser steps on declared loss terms."""
NOISY = (lacking("loss_terms"), unmoved)
VARIATIONAL = (*NOISY, lacking("weight_samples", "density"))
"""The loss is an expectation over a density that the method can draw from."""
