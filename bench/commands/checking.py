"""`bench check`: a method or a task held to the laws, one line a law."""

from __future__ import annotations

import warnings
from contextlib import nullcontext

from bench.commands.parser import Parser, errors, output
from bench.errors import UsageError
from bench.runs import registry
from bench.runs.registry import Entry


def check(arguments: list[str]) -> int:
    """Holds a method or a task to the laws; returns 0 if none is broken, else 1."""
    parser = Parser(
        "bench check",
        description="Hold a method or a task, your own too, to the laws that the suite obeys: one line "
        "a law, on small problems, in a minute or two. Exit code 1 if one is broken.",
    )
    action = parser.add_argument("NAME", help="package.module:Class of your own, or a name of bench list")
    vars(action)["completer"] = lambda **_: [*registry.methods(), *registry.tasks()]
    chosen = parser.parse_args(arguments)
    entry = _entry(chosen.NAME)

    from rich.status import Status

    from bench.laws import checking

    names, outcomes = checking.names_of(entry), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        answers = checking.check(entry)
        for number, name in enumerate(names, 1):
            now = f"{number} of {len(names)}: {_words(name)}"
            with Status(now, console=errors) if errors.is_terminal else nullcontext():
                answer = next(answers)
            outcomes.append(answer.outcome)
            why = f": {answer.why}" if answer.why else ""
            output.print(f"{answer.outcome:14}  {_words(answer.law)}{why}", soft_wrap=True)
    output.print(", ".join(f"{outcomes.count(each)} {each}" for each in ("ok", "failed", "not applicable")))
    return 1 if "failed" in outcomes else 0


def _words(law: str) -> str:
    return law.replace("_", " ")


def _entry(name: str) -> Entry:
    """The method or task of this name."""
    if ":" in name:
        registry.import_own(name)
        try:
            return registry.method(name)
        except UsageError:
            return registry.task(name)
    for find, known in ((registry.method, registry.methods()), (registry.task, registry.tasks())):
        if known.may_hold(name):
            return find(name)
    every = [*registry.methods(), *registry.tasks()]
    raise UsageError(f"unknown method or task '{name}': {registry.nearest(name, every)}")
