"""Completion in the shell, by argcomplete: at every TAB the shell calls `bench` with what was typed so far.

The parser of the command that was typed answers, so that a command completes what it understands. None needs
torch: names are read from the source, and settings from the index that `bench list` keeps.
"""

from __future__ import annotations

import os
from argparse import ArgumentParser
from collections.abc import Iterable
from typing import Literal

import argcomplete
from argcomplete.lexers import split_line

from bench.commands.parser import Parser


def show_script(arguments: list[str]) -> None:
    """Prints the script by which a shell completes commands, names and settings of `bench`."""
    parser = Parser(
        "bench completion",
        description="Print the script by which a shell completes bench. Bash: put "
        'eval "$(bench completion bash)" into ~/.bashrc. Zsh: put the same with zsh into ~/.zshrc, after '
        "compinit. Fish: bench completion fish > ~/.config/fish/completions/bench.fish. Settings are "
        "completed once bench list was called.",
    )
    parser.add_argument("SHELL", type=Literal["bash", "zsh", "fish"], help="the shell")
    print(argcomplete.shellcode(["bench"], shell=parser.parse_args(arguments).SHELL))


def typed(commands: Iterable[str]) -> list[str]:
    """The words on the line before the one at the cursor; the parser of their command answers the shell.

    Of the command itself the names are the answer, and the process ends here.
    """
    words = split_line(os.environ["COMP_LINE"], int(os.environ["COMP_POINT"]))[3][1:]
    if not words:
        parser = ArgumentParser("bench")
        parser.add_argument("--version", action="store_true")
        parser.add_argument("COMMAND", choices=list(commands))
        argcomplete.autocomplete(parser, always_complete_options=False)
    os.environ["_ARGCOMPLETE"] = "2"  # the word from which argcomplete reads the line: the command
    os.environ["COMP_TYPE"] = os.environ.get("COMP_TYPE") or "9"  # jsonargparse reads it, only bash sets it
    return words
