"""The command line: `bench COMMAND ...`.

Exit codes: 0 done, 1 the run failed, 2 usage, 3 data, 4 the run diverged, 5 the output cannot be written,
130 stopped by the user, 141 nobody reads the output any more (`bench list | head -1`). Standard output
carries results only; of `bench run` its last line is the directory.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress

import bench
from bench.commands.comparing import compare, list_runs
from bench.commands.datasets import show_data
from bench.commands.listing import show_names
from bench.commands.parser import errors, output
from bench.commands.results import draw, record, reference, show
from bench.commands.running import run
from bench.commands.searching import sweep, tune
from bench.errors import BenchError, UsageError
from bench.registry import nearest

__all__ = ["COMMANDS", "errors", "main", "output"]

COMMANDS: dict[str, tuple[Callable[[list[str]], int | None], str]] = {
    "run": (run, "fit a method on a task, score it, write the record"),
    "list": (show_names, "show the methods and tasks there are"),
    "runs": (list_runs, "list the runs below a folder"),
    "show": (show, "show the records of runs"),
    "compare": (compare, "compare methods by their means over seeds"),
    "figures": (draw, "draw the figures of runs anew, or runs together"),
    "data": (show_data, "show, fetch or check data sets"),
    "record": (record, "keep runs as evidence"),
    "reference": (reference, "make runs of a sampler the reference of their task"),
    "sweep": (sweep, "run every cell of a grid"),
    "tune": (tune, "choose settings by validation data, within a budget"),
}


def main(arguments: list[str] | None = None) -> int:
    """Runs a command; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        if not arguments or arguments[0] in ("-h", "--help"):
            print(f"usage: bench COMMAND ...\n\n{bench.__doc__}\n\ncommands (each with --help):")
            print("\n".join(f"  {name:9} {text}" for name, (_, text) in COMMANDS.items()), flush=True)
            return 0 if arguments else UsageError.exit_code
        if arguments[0] == "--version":
            print(f"posterior-bench {bench.__version__}")
            return 0
        if arguments[0] not in COMMANDS:
            raise UsageError(f"unknown command '{arguments[0]}': {nearest(arguments[0], list(COMMANDS))}")
        code = COMMANDS[arguments[0]][0](arguments[1:])
        sys.stdout.flush()  # a reader that is gone shows here, not when the interpreter ends
    except BenchError as error:
        errors.print(f"bench: {error}", soft_wrap=True)
        return error.exit_code
    except KeyboardInterrupt:
        errors.print("bench: stopped; the same command goes on from here")
        return 130
    except BrokenPipeError:
        with suppress(OSError):  # what is still buffered goes nowhere, without a word; no file in a test
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return code or 0
