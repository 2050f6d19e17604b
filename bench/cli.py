"""The command line: `bench COMMAND ...`.

Exit codes: 0 done, 1 the run failed, 2 usage, 3 data, 4 the run diverged, 5 the output cannot be written;
130, 143 and 129 stopped by Ctrl-C, SIGTERM and SIGHUP; 141 nobody reads the output any more (`bench list |
head -1`). Standard output carries results only; of `bench run` its last line is the directory.
"""

from __future__ import annotations

import io
import os
import shlex
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

import bench
from bench.commands.boards import board
from bench.commands.checking import check
from bench.commands.comparing import compare, list_runs
from bench.commands.completion import show_script, typed
from bench.commands.dashboard import wandb
from bench.commands.datasets import show_data
from bench.commands.exporting import export
from bench.commands.listing import show_names
from bench.commands.parser import errors, output
from bench.commands.planning import show_plan
from bench.commands.reporting import report
from bench.commands.results import draw, record, reference, show
from bench.commands.rounds import round_
from bench.commands.running import run
from bench.commands.searching import sweep, tune
from bench.commands.storing import store
from bench.commands.submitting import submit
from bench.commands.verifying import verify
from bench.errors import BenchError, NotImported, OutputError, UsageError
from bench.runs.registry import nearest
from bench.system.signals import stoppable
from bench.text import escaped

__all__ = ["COMMANDS", "errors", "main", "output"]

COMMANDS: dict[str, tuple[Callable[[list[str]], int | None], str]] = {
    "run": (run, "fit a method on a task, score it, write the record"),
    "list": (show_names, "show the methods and tasks there are"),
    "runs": (list_runs, "list the runs below a folder"),
    "show": (show, "show the records of runs"),
    "compare": (compare, "show how runs stand beside the leaderboard, or their means over seeds"),
    "report": (report, "write one HTML file of a run or of several"),
    "figures": (draw, "draw the figures of runs anew, or runs together"),
    "export": (export, "write the predictor of a run on own data as ONNX"),
    "data": (show_data, "show, fetch, check, make or prepare data sets"),
    "record": (record, "keep runs as evidence"),
    "reference": (reference, "make runs of a sampler the reference of their task"),
    "sweep": (sweep, "run every cell of a grid"),
    "plan": (show_plan, "show how many more seeds would separate how many entries of a task"),
    "tune": (tune, "choose settings by validation data, within a budget"),
    "check": (check, "hold a method or a task, your own too, to the laws"),
    "submit": (submit, "make a submission to the leaderboard of runs"),
    "store": (store, "bring, check or commit the arrays behind records"),
    "verify": (verify, "check a submission: its files, and its metrics computed again"),
    "board": (board, "build the leaderboard's pages, serve them, add to them"),
    "round": (round_, "predict test sets whose labels are hidden until the round closes"),
    "wandb": (wandb, "build a Weights & Biases workspace that compares methods"),
    "completion": (show_script, "print the script by which a shell completes commands"),
}


def main(arguments: list[str] | None = None) -> int:
    """Runs a command; returns the exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # where a terminal knows ASCII alone
    try:
        with stoppable(last=arguments is None) as stop:
            try:
                return _called(words)
            finally:
                sys.stdout.flush()
    except BenchError as error:
        line = shlex.join(["bench", *words, "--import", getattr(error, "name", "")])
        _tell(f"{error}; the whole line: {line}" if isinstance(error, NotImported) else error)
        return error.exit_code
    except BrokenPipeError:
        _discard(sys.stdout)
        return 141
    except OSError as error:  # a file that cannot be read or written is told where it is named
        _tell(f"cannot write {error.filename or 'the output'}: {error.strerror or error}")
        _discard(sys.stdout)
        return OutputError.exit_code
    return stop.exit_code or 0


def _called(arguments: list[str]) -> int:
    """What a command returns as its exit code."""
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
    return COMMANDS[arguments[0]][0](arguments[1:]) or 0


def _tell(message: object) -> None:
    """One line on standard error, if anything can be written there."""
    try:
        errors.print(f"bench: {escaped(str(message))}", soft_wrap=True)
    except OSError:
        _discard(sys.stderr)


def _discard(stream: TextIO) -> None:
    """Lets the end of the process drop what a stream did not take, in place of a traceback."""
    for console in (output, errors):
        console.forget()
    with suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())
