"""The evidence behind records: `bench store` brings, checks, copies and commits arrays and curves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from bench.commands.parser import Parser, errors, folder, output
from bench.errors import BenchError, UsageError

if TYPE_CHECKING:
    from bench.leaderboard.evidence.moving import Whereabouts
    from bench.leaderboard.evidence.store import ProgressCallback


def store(arguments: list[str]) -> int:
    """Does with the files of evidence what the first argument says."""
    parser = Parser(
        "bench store",
        description="The arrays and curves behind the committed records. They lie in the history of the "
        "repository, the place git:, and in further places. pull fetches what is not at hand, check reads "
        "all and says where each is, push copies all to a place, commit puts new ones into the history and "
        "takes them out of the tree.",
    )
    parser.add_argument("action", type=Literal["pull", "check", "push", "commit"], help="what to do")
    parser.add_argument(
        "WHICH",
        nargs="*",
        type=str,
        help="tasks, default all; and places, URLs such as file:///folder or s3://bucket/folder, default "
        "those of store.toml (the history comes first in any case)",
    )
    parser.add_argument(
        "--message", type=str, default="", help="of commit: what was run, and why; for the log of git"
    )
    parser.add_argument(
        "--root",
        type=folder,
        default=None,
        help="folder with records/, submissions/, manifests/, store/ and store.toml; default is leaderboard/ "
        "of this project",
    )
    parser.add_argument("--force", action="store_true", help="push again what a place has already")
    chosen = parser.parse_args(arguments)

    from bench.leaderboard.evidence import committing, manifest, moving

    root = manifest.ROOT if chosen.root is None else Path(chosen.root)
    tasks, urls = _which(chosen.WHICH, root)
    if chosen.action == "commit":
        if not chosen.message.strip():
            raise UsageError("a commit says what was run, and why: bench store commit --message '...'")
        with _bar("commit") as progress:
            gone = committing.commit(chosen.message, root, progress)
        output.print(f"{gone} files are in the history and out of the tree")
        return 0
    if chosen.action == "check":
        with _bar("check") as progress:
            found = list(moving.check(root, urls, tasks, progress))
        return _checked(found)
    if chosen.action == "push":
        if not urls:
            raise UsageError(f"no place to push: name one, or write it into {root / 'store.toml'}")
        for place in urls:
            with _bar("push") as progress:
                sent = moving.push(place, root, chosen.force, tasks, progress)
            output.print(f"{place}: {sent} files sent", soft_wrap=True)
        return 0
    with _bar("pull") as progress:
        fetched, missing = moving.pull(root, urls, tasks, progress)
    output.print(f"{fetched} files fetched")
    for line in missing:
        errors.print(f"bench: {line}", soft_wrap=True)
    return BenchError.exit_code if missing else 0


def _which(words: list[str], root: Path) -> tuple[list[str], list[str]]:
    """The tasks and the places among the arguments; without places those of `store.toml`."""
    from bench.leaderboard.evidence import moving

    urls = [word for word in words if "://" in word]
    tasks = [word for word in words if "://" not in word and word != moving.GIT]
    if wrong := next((word for word in tasks if "/" in word or ":" in word), None):
        raise UsageError(
            f"{wrong} is no task, and no URL: a folder is written file://{Path(wrong).absolute()}"
        )
    return tasks, urls or moving.places(root / "store.toml")


@contextmanager
def _bar(action: str) -> Iterator[ProgressCallback]:
    """A bar on standard error, where that is a terminal."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
        bar = progress.add_task(action, total=None)
        yield lambda done, of: progress.update(bar, completed=done, total=of)


def _checked(objects: list[Whereabouts]) -> int:
    """Prints where files are; 1 if one is nowhere, or damaged somewhere."""
    for found in objects:
        where = ", ".join(found.where) or "nowhere"
        wrong = "".join(f"; damaged: {place}" for place in found.damaged)
        output.print(f"{found.digest} {where}{wrong}", soft_wrap=True)
    missing = sum(not found.where for found in objects)
    damaged = sum(bool(found.damaged) for found in objects)
    errors.print(f"bench: {len(objects)} files, {missing} nowhere, {damaged} damaged")
    return BenchError.exit_code if missing or damaged else 0
