"""From runs to the leaderboard: `bench submit`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from bench.commands.parser import Parser, add_imports, errors, folder, output
from bench.commands.results import say_twice
from bench.errors import UsageError


def submit(arguments: list[str]) -> None:
    """Makes a submission of runs."""
    parser = Parser(
        "bench submit",
        description="Make a submission to the leaderboard: finished runs of ranked tasks, all seeds of a "
        "method from 0. What only you know is read from --meta, or asked for at a terminal.",
    )
    parser.add_argument("RUN", nargs="+", type=str, help="directory of a run, or a folder with runs below it")
    parser.add_argument(
        "--to", type=folder, required=True, help="the directory; its name is the slug, as in my-method"
    )
    parser.add_argument(
        "--meta",
        type=str | None,
        default=None,
        help="a TOML file with authors, licence, tuning_budget, trained_on; if there are any, paper and code",
    )
    older = parser.add_mutually_exclusive_group()
    older.add_argument("--force", action="store_true", help="replace an older submission in that directory")
    older.add_argument(
        "--add",
        action="store_true",
        help="add seeds, methods or tasks to the submission in that directory; a method that ran again on a "
        "task is replaced there, and all else stays",
    )
    add_imports(parser)
    chosen = parser.parse_args(arguments)

    from bench.leaderboard.evidence import submitting
    from bench.runs.folders import gather
    from bench.runs.means import lines

    words = {} if chosen.meta is None else submitting.read_words(Path(chosen.meta))
    found, again = gather([Path(name) for name in chosen.RUN])
    say_twice(again)
    if sys.stdin.isatty() and not chosen.add:
        for key in submitting.QUESTIONS:
            if key not in words:
                words[key] = _asked(key, submitting.QUESTIONS[key])
    directory = Path(chosen.to)
    if chosen.add:
        for change in submitting.add(found, directory, words):
            errors.print(f"bench: {change}", soft_wrap=True)
    else:
        submitting.submit(found, directory, words, chosen.force)
    for sentence in lines(gather([directory])[0])[1]:
        errors.print(f"bench: {sentence}", soft_wrap=True)
    output.print(str(directory), soft_wrap=True)
    errors.print(f"bench: next, bench verify {directory}", soft_wrap=True)


def _asked(key: str, question: str) -> Any:
    """What the user types, asked until it can be read."""
    from bench.leaderboard.evidence.submitting import answer

    while True:
        errors.print(f"{key} ({question}): ", end="", soft_wrap=True)
        try:
            return answer(key, input())
        except EOFError:
            errors.print()
            raise UsageError(f"what is missing: {key}; write it into the file of --meta") from None
        except UsageError as error:
            errors.print(f"bench: {error}", soft_wrap=True)
