"""What the commands share: their parser, which says in one line what is wrong, and both consoles."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from typing import Any, Literal, NoReturn, get_args, get_origin

import jsonargparse
from rich.console import Console, ConsoleOptions
from rich.segment import Segment

from bench.errors import UsageError
from bench.runs import registry
from bench.runs.registry import import_own, nearest
from bench.settings import named
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
    """Says what is wrong in one line, with the nearest flags."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog=prog, allow_abbrev=False, **options)

    def add_argument(self, *names: Any, **options: Any) -> Any:
        """Adds an argument of whose values the shell completes those that a Literal names."""
        action, kind = super().add_argument(*names, **options), options.get("type")
        values = get_args(kind) if get_origin(kind) is Literal else ()
        vars(action)["completer"] = lambda **_: values  # jsonargparse's own knows no Literal
        return action

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Ends --help and its like, after what they print is out."""
        sys.stdout.flush()
        super().exit(status, message)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raises a UsageError in place of printing the usage and ending the process."""
        raise UsageError(_one_line(message, self.flags()))

    def flags(self) -> list[str]:
        """Every flag that help shows."""
        shown = (action for action in self._actions if action.help != argparse.SUPPRESS)
        return [flag for action in shown for flag in action.option_strings]


def _one_line(message: str, flags: list[str]) -> str:
    unknown = re.search(r"[Uu]nrecognized arguments: (\S+)", message)
    if unknown and unknown[1].startswith("-"):
        flag = unknown[1].split("=")[0]
        return f"unknown flag {flag}: {nearest(flag, [f for f in flags if f.startswith('--')])}"
    key = re.search(r'[Kk]ey "([^"]+)"', message)
    given = re.search(r"(?:Given|Got) value: (.*)", message)
    expected = re.findall(r"Expected a (?:typing\.)?(.*?)(?:\. Got|$)", message, re.MULTILINE)
    if key and given and expected:
        kinds = [re.sub(r"<class '(\w+)'>", r"\1", kind).replace("NoneType", "null") for kind in expected]
        kinds = [re.sub(r"Literal\[(.*)\]", r"one of \1", kind).replace("'", "") for kind in kinds]
        flag = f"--{key[1]} " if f"--{key[1]}" in flags else ""
        return f"{flag}{given[1]}: must be {' or '.join(dict.fromkeys(kinds))}"
    required = re.search(r"arguments are required: (\w+)$", message)
    if required and f"--{required[1]}" in flags:
        return f"--{required[1]} is required"
    return " ".join(message.split())


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


def folder(name: str) -> str:
    """The type of a flag that names a folder."""
    try:
        return str(named(name))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_run_arguments(parser: Parser) -> None:
    """Adds the flags that every command that runs methods has."""
    parser.add_argument(
        "--threads", type=int | None, default=None, help="CPU threads; default is torch's choice"
    )
    parser.add_argument("--out", type=str, default="runs", help="folder for runs")
    parser.add_argument(
        "--data-dir", type=str | None, default=None, help="folder of data files; also $BENCH_DATA"
    )
