"""From runs to the leaderboard: `bench submit`, and `bench store`, which moves the arrays of submissions."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from bench.commands.parser import Parser, add_imports, errors, folder, output
from bench.commands.results import say_twice
from bench.errors import BenchError, UsageError


def submit(arguments: list[str]) -> None:
    """Makes a submission of runs."""
    parser = Parser(
        "bench submit",
        description="Make a submission to the leaderboard: finished runs of ranked tasks, all seeds of a "
        "method from 0. What only you know is read from --meta, or asked for at a terminal.",
    )
    parser.add_argument("RUN", nargs="+", type=str, help="directory of a run, or a folder with runs below it")
    parser.add_argument(
        "--to", type=folder, required=True, help="the new directory; its name is the slug, as in my-method"
    )
    parser.add_argument(
        "--meta",
        type=str | None,
        default=None,
        help="a TOML file with authors, licence, tuning_budget, trained_on; if there are any, paper and code",
    )
    parser.add_argument("--force", action="store_true", help="replace an older submission in that directory")
    add_imports(parser)
    chosen = parser.parse_args(arguments)

    from bench.leaderboard.evidence import submitting
    from bench.runs.folders import gather
    from bench.runs.means import lines

    words = {} if chosen.meta is None else submitting.read_words(Path(chosen.meta))
    found, again = gather([Path(name) for name in chosen.RUN])
    say_twice(again)
    if sys.stdin.isatty():
        for key in submitting.QUESTIONS:
            if key not in words:
                words[key] = _asked(key, submitting.QUESTIONS[key])
    directory = submitting.submit(found, Path(chosen.to), words, chosen.force)
    for sentence in lines(found)[1]:
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


def store(arguments: list[str]) -> int:
    """Moves arrays of submissions between the store and further places, or checks them."""
    parser = Parser(
        "bench store",
        description="Move the arrays of submissions: push copies those at hand to a place, pull fetches "
        "those that are not at hand, check reads all and says where each is.",
    )
    parser.add_argument("action", type=Literal["push", "pull", "check"], help="what to do")
    parser.add_argument(
        "PLACE",
        nargs="*",
        type=str,
        help="a URL such as file:///folder or s3://bucket/folder; default is every place of store.toml",
    )
    parser.add_argument(
        "--root",
        type=folder,
        default=None,
        help="folder with submissions/, store/ and store.toml; default is leaderboard/ of this project",
    )
    parser.add_argument("--force", action="store_true", help="push again what a place has already")
    chosen = parser.parse_args(arguments)

    from bench.leaderboard.evidence import store as arrays

    root = arrays.STORE.parent if chosen.root is None else Path(chosen.root)
    submissions, folder_of_store = root / "submissions", root / "store"
    if unknown := [place for place in chosen.PLACE if "://" not in place]:
        raise UsageError(f"{unknown[0]} is no URL: a folder is written file://{Path(unknown[0]).absolute()}")
    places = chosen.PLACE or arrays.places(root / "store.toml")
    if chosen.action == "check":
        return _checked(list(arrays.check(submissions, folder_of_store, places)))
    if not places:
        raise UsageError(f"no place to {chosen.action}: name one, or write it into {root / 'store.toml'}")
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
        bar = progress.add_task(chosen.action, total=None)

        def tell(done: int, of: int) -> None:
            progress.update(bar, completed=done, total=of)

        if chosen.action == "push":
            for place in places:
                sent = arrays.push(place, submissions, folder_of_store, chosen.force, tell)
                output.print(f"{place}: {sent} arrays sent", soft_wrap=True)
            return 0
        fetched, missing = arrays.pull(submissions, folder_of_store, places, tell)
    output.print(f"{fetched} arrays fetched")
    for line in missing:
        errors.print(f"bench: {line}", soft_wrap=True)
    return BenchError.exit_code if missing else 0


def _checked(objects: list[Any]) -> int:
    """Prints where arrays are; 1 if one is nowhere, or damaged somewhere."""
    for found in objects:
        where = ", ".join(found.where) or "nowhere"
        wrong = "".join(f"; damaged: {place}" for place in found.damaged)
        output.print(f"{found.digest} {where}{wrong}", soft_wrap=True)
    missing = sum(not found.where for found in objects)
    damaged = sum(bool(found.damaged) for found in objects)
    errors.print(f"bench: {len(objects)} arrays, {missing} nowhere, {damaged} damaged")
    return BenchError.exit_code if missing or damaged else 0
