"""METHOD `none`: the name under which a study in closed form is run, which fits nothing.

A study in closed form computes all its numbers itself (`closed_form` in its `bench.spec.Spec`). A run names a
method in its folder and its record, and here this name stands. It is in no list of methods, no law of methods
holds for it, and no other task takes it.
"""

from __future__ import annotations

from typing import Any

from bench.contract import Method, Problem
from bench.errors import UsageError
from bench.settings import settings


@settings
class Settings:
    """There is nothing to set."""


class Nothing(Method):
    """Stands for the method where nothing is fitted."""

    settings_class = Settings
    approximates = "nothing: the study computes its numbers in closed form"
    declares = "none"

    def __init__(self, problem: Problem, settings: Any, start: Method | None = None) -> None:
        raise UsageError("METHOD none fits nothing: a task that fits takes a method, see bench list methods")
