"""What the commands share: their parser, which says in one line what is wrong, and both consoles."""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import jsonargparse
from rich.console import Console, ConsoleOptions
from rich.segment import Segment

from bench.errors import UsageError
from bench.runs import registry
from bench.runs.plan import options
from bench.runs.registry import import_own, nearest
from bench.settings import misfit, named
from bench.text import escaped

jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)


class SafeConsole(Console):
    """Shows hidden characters (`bench.text`) escaped, wherever a text that is printed comes from."""

    def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """The segments of anything that is printed, tables and bars too; lines stay lines."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=escaped(segment.text, keep="\n"))

    def on_broken_pipe(self) -> None:
        """Leaves a reader that is gone to `bench.cli.main`, which knows the exit code."""
        raise

    def forget(self) -> None:
        """Drops what could not be written; rich would write it before the next text."""
        del self._buffer[:]


errors = SafeConsole(stderr=True, highlight=False, markup=False, emoji=False)
output = SafeConsole(highlight=False, markup=False, emoji=False)


class Parser(jsonargparse.ArgumentParser):
    """Says what is wrong in one line: jsonargparse refuses, the types of our own fields say why."""

    def __init__(self, prog: str, **options: Any) -> None:
        self._given: list[str] = []
        self.files: dict[str, Any] = {}
        """What files of settings say, by name."""
        super().__init__(prog=prog, allow_abbrev=False, **options)

    def add_argument(self, *names: Any, **options: Any) -> Any:
        """Adds an argument of whose values the shell completes those that a Literal names."""
        kind = options.get("type")
        if kind is folder:  # checked below: help shows a function by its place in memory
            options["type"] = str
        action = super().add_argument(*names, **options)
        vars(action).update(kind=kind, is_required=options.get("required", False))
        values = get_args(kind) if get_origin(kind) is Literal else ()
        vars(action)["completer"] = lambda **_: values  # jsonargparse's own knows no Literal
        return action

    def add_settings(self, cls: type, prefix: str, skip: Iterable[str] = ()) -> None:
        """Adds a flag for every field of a settings class, but for some."""
        self.add_class_arguments(cls, prefix, skip=set(skip))
        kinds = get_type_hints(cls, include_extras=True)
        for name, kind in kinds.items():
            if name not in skip:
                vars(self._option_string_actions[f"--{prefix}.{name}"])["kind"] = kind

    def parse_args(self, args: Any = None, *more: Any, **options: Any) -> Any:
        """What was typed.

        Raises:
            UsageError: If it cannot be.
        """
        self._given = list(sys.argv[1:] if args is None else args)
        chosen = super().parse_args(args, *more, **options)
        for action in (action for action in self._actions if vars(action).get("kind") is folder):
            given = chosen[action.dest]
            for value in given if isinstance(given, list) else [given]:
                folder(action.option_strings[0] if action.option_strings else action.dest, value)
        return chosen

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Ends --help and its like, after what they print is out."""
        sys.stdout.flush()
        super().exit(status, message)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raises a UsageError in place of printing the usage and ending the process."""
        raise UsageError(next(self._mistakes(), " ".join(message.split())))

    def flags(self) -> list[str]:
        """Every flag that help shows."""
        shown = (action for action in self._actions if action.help != argparse.SUPPRESS)
        return [flag for action in shown for flag in action.option_strings]

    def unknown(self, flag: str) -> str:
        """That there is no such flag, and the nearest."""
        return f"unknown flag {flag}: {nearest(flag, [f for f in self.flags() if f.startswith('--')])}"

    def _mistakes(self) -> Iterator[str]:
        """What is wrong with what was typed, and with files of settings, as far as names and types say it."""
        words, seen, rest = list[str](), set[str](), deque(self._given)
        while rest:
            word = rest.popleft()
            if not word.startswith("-"):
                words.append(word)
                continue
            flag, has_value, value = word.partition("=")
            action = self._option_string_actions.get(flag)
            if action is None:
                yield self.unknown(flag)
                continue
            seen.add(action.dest)
            if action.nargs == 0:
                continue
            if not has_value and not rest:
                return  # a flag without its value: argparse says it well
            yield from _misfit(action, value if has_value else rest.popleft())
            while action.nargs == "+" and rest and not rest[0].startswith("-"):
                rest.popleft()
        places = [action for action in self._actions if not action.option_strings]
        for action, word in zip(places, words, strict=False):
            seen.add(action.dest)
            yield from _misfit(action, word)
        known = {action.dest: action for action in self._actions}
        for name, value in _flat(self.files):
            if name in known:
                yield from _misfit(known[name], value)
            else:
                yield self.unknown(f"--{name}")
        if len(words) < sum(action.nargs is None for action in places):
            return  # argparse names what is not there
        for action in self._actions:
            if vars(action).get("is_required") and action.dest not in seen:
                yield f"{action.option_strings[0]} is required"


def _misfit(action: argparse.Action, value: Any) -> Iterator[str]:
    """Why a value is none of an argument, if so."""
    kind = vars(action).get("kind")
    if kind not in (None, folder) and (why := misfit(kind, value)):
        yield f"{f'{action.option_strings[0]} ' if action.option_strings else ''}{value}: {why}"


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested tables, each with its names and dots between them."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


class _Import(argparse.Action):
    """Imports at once, so that every command finds what `--import` names without a word of its own."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if ":" not in values:
            raise UsageError(f"--import {values}: must be package.module:Class")
        import_own(values)


def add_imports(parser: Parser) -> None:
    """Adds `--import`, which every command that reads records has: a record's name is never imported."""
    parser.add_argument(
        "--import",
        action=_Import,
        metavar="package.module:Class",
        help="run the code of an own method or task that records name; may be given several times",
    )


def add_method_and_task(parser: Parser) -> None:
    """Adds METHOD and TASK, whose names the shell completes."""
    for kind, known in (("method", registry.methods), ("task", registry.tasks)):
        help = f"name of a {kind} (bench list {kind}s) or package.module:Class"
        if kind == "method":
            help += f"; {registry.NONE} for a study in closed form"
        action = parser.add_argument(kind.upper(), help=help)
        vars(action)["completer"] = lambda known=known, **_: list(known())


def folder(name: str, value: str | None) -> None:
    """The type of an argument that names a folder, or nothing; refuses what cannot."""
    try:
        if value is not None:
            named(value)
    except ValueError as error:
        raise UsageError(f"{name}: {error}") from None


def add_option(parser: Parser, name: str, **changes: Any) -> None:
    """Adds the flag of a field of `bench.runs.plan.Plan`: its type, default and help, but for the changes."""
    kind, default, help = options()[name]
    flag = f"--{name.replace('_', '-')}"
    if kind is bool:
        parser.add_argument(flag, action="store_true", **{"help": help, **changes})
        return
    if isinstance(default, Path):
        kind, default = str, str(default)
    parser.add_argument(flag, **{"type": _shown(kind), "default": default, "help": help, **changes})


def _shown(kind: Any) -> Any:
    """A type as help shows it best: int | None in place of Optional[int]."""
    return reduce(or_, get_args(kind)) if get_origin(kind) is Union else kind


def add_run_arguments(parser: Parser) -> None:
    """Adds the flags that every command that runs methods has."""
    for name in ("threads", "out", "data_dir"):
        add_option(parser, name)
