"""The command line: `bench COMMAND ...`.

Exit codes: 0 done, 1 the run failed, 2 usage, 3 data, 4 the run diverged, 5 the output cannot be written,
130 stopped by the user. Standard output carries results only; of `bench run` its last line is the directory.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import bench
from bench.commands.completion import show_script, typed
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
    "show": (show, "show the record of a run"),
    "figures": (draw, "draw the figures of runs anew, or runs together"),
    "data": (show_data, "show, fetch or check data sets"),
    "record": (record, "keep runs as evidence"),
    "reference": (reference, "make runs of a sampler the reference of their task"),
    "sweep": (sweep, "run every cell of a grid"),
    "tune": (tune, "choose settings by validation data, within a budget"),
    "completion": (show_script, "print what makes a shell complete all this"),
}


def main(arguments: list[str] | None = None) -> int:
    """Runs a command; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        if "_ARGCOMPLETE" in os.environ:  # the shell asks what may follow
            arguments = typed(COMMANDS)
        if not arguments or arguments[0] in ("-h", "--help"):
            print(f"usage: bench COMMAND ...\n\n{bench.__doc__}\n\ncommands (each with --help):")
            print("\n".join(f"  {name:10} {text}" for name, (_, text) in COMMANDS.items()))
            return 0 if arguments else UsageError.exit_code
        if arguments[0] == "--version":
            print(f"posterior-bench {bench.__version__}")
            return 0
        if arguments[0] not in COMMANDS:
            raise UsageError(f"unknown command '{arguments[0]}': {nearest(arguments[0], list(COMMANDS))}")
        code = COMMANDS[arguments[0]][0](arguments[1:])
    except BenchError as error:
        errors.print(f"bench: {error}", soft_wrap=True)
        return error.exit_code
    except KeyboardInterrupt:
        errors.print("bench: stopped; the same command goes on from here")
        return 130
    except BrokenPipeError:
        return 1
    return code or 0
