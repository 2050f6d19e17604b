"""What the commands share: their parser, which says in one line what is wrong, and both consoles."""

from __future__ import annotations

import re
import sys
from typing import Any, NoReturn

import jsonargparse
from rich.console import Console

from bench.errors import UsageError
from bench.registry import nearest

jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)


class _Console(Console):
    """Leaves a reader that is gone to `bench.cli.main`, which knows the exit code."""

    def on_broken_pipe(self) -> None:
        """Raises the BrokenPipeError again that is being handled."""
        raise


errors = _Console(stderr=True, highlight=False, markup=False)
output = _Console(highlight=False, markup=False)


class Parser(jsonargparse.ArgumentParser):
    """Says what is wrong in one line, with the nearest flags."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog=prog, allow_abbrev=False, **options)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Ends --help and its like, after what they print is out."""
        sys.stdout.flush()
        super().exit(status, message)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raises a UsageError in place of printing the usage and ending the process."""
        raise UsageError(_one_line(message, [o for a in self._actions for o in a.option_strings]))


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


def add_run_arguments(parser: Parser) -> None:
    """Adds the flags that every command that runs methods has."""
    parser.add_argument(
        "--threads", type=int | None, default=None, help="CPU threads; default is torch's choice"
    )
    parser.add_argument("--out", type=str, default="runs", help="folder for runs")
    parser.add_argument(
        "--data-dir", type=str | None, default=None, help="folder of data files; also $BENCH_DATA"
    )
