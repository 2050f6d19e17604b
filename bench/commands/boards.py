"""The leaderboard's pages: `bench board build`, `serve`, `add` and `compare`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.commands.formats import plain
from bench.commands.parser import Parser, errors, folder, output
from bench.errors import UsageError
from bench.runs.registry import nearest

if TYPE_CHECKING:
    from bench.leaderboard.rank.board import Board

_MOST_LINES = 20
"""Of what could not be shown or computed again; all of it is in the board's own file."""


def board(arguments: list[str]) -> int:
    """Does what the first argument says."""
    actions: dict[str, tuple[Callable[[list[str]], int], str]] = {
        "build": (_build, "compute the board and write its pages"),
        "serve": (_serve, "show built pages in a browser on this machine"),
        "add": (_add, "verify a submission and put it on the board"),
        "compare": (_compare, "write the page of two entries beside each other"),
    }
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: bench board ACTION ...\n\nThe leaderboard.\n\nactions (each with --help):")
        print("\n".join(f"  {name:8} {text}" for name, (_, text) in actions.items()))
        return 0 if arguments else UsageError.exit_code
    if arguments[0] not in actions:
        raise UsageError(f"unknown action '{arguments[0]}': {nearest(arguments[0], list(actions))}")
    return actions[arguments[0]][0](arguments[1:])


def _parser(action: str, description: str) -> Parser:
    """A parser with what building has."""
    parser = Parser(f"bench board {action}", description=description)
    parser.add_argument("--out", type=folder, default="site", help="folder of the pages")
    parser.add_argument(
        "--submissions",
        type=folder,
        default=None,
        help="folder of the submissions; default is leaderboard/submissions/ of this project",
    )
    parser.add_argument(
        "--cache", type=folder, default=None, help="folder for what was computed; default is the user's cache"
    )
    parser.add_argument(
        "--import",
        action="append",
        default=[],
        metavar="package.module:Class",
        help="run the code of an own task that records name; may be given several times",
    )
    return parser


def _built(chosen: object) -> Board:
    """The board that the arguments ask for."""
    from bench.leaderboard.evidence.submission import SUBMISSIONS
    from bench.leaderboard.rank import board

    given = vars(chosen)
    cache = None if given["cache"] is None else Path(given["cache"])
    options: dict[str, Any] = {"cache": cache, "imports": given["import"]}
    if given["submissions"] is not None:
        return board.build(Path(given["submissions"]), **options)
    return board.build(SUBMISSIONS, records=board.RECORDS, **options)


def _build(arguments: list[str]) -> int:
    """Writes all pages; 1 if a submission could not be shown or an entry not be computed again."""
    parser = _parser(
        "build",
        "Compute the board from its submissions and write its pages. Exit code 1 says that the pages are "
        "there and that something could not be shown or computed again; what, stands on standard error.",
    )
    chosen = parser.parse_args(arguments)

    from bench.leaderboard.site import pages

    built = _built(chosen)
    path = pages.write(built, Path(chosen.out))
    lines = [*filter(None, [built.without_arrays]), *built.problems, *built.not_again]
    for line in lines[:_MOST_LINES]:
        errors.print(plain(f"bench: {line}"), soft_wrap=True)
    if more := len(lines[_MOST_LINES:]):
        errors.print(f"bench: and {more} lines more, in {path.parent / pages.MARK}", soft_wrap=True)
    entries = sum(len(table["entries"]) for table in built.tables.values())
    errors.print(f"bench: {len(built.tables)} tasks, {entries} entries")
    output.print(str(path), soft_wrap=True)
    return int(bool(built.problems or built.not_again))


def _compare(arguments: list[str]) -> int:
    """Adds a compare page to built pages."""
    parser = _parser("compare", "Write the page of two entries of a task beside each other.")
    parser.add_argument("TASK", type=str, help="identity of a task of the board")
    parser.add_argument("ENTRY", nargs=2, type=str, help="an entry, as the board names it")
    chosen = parser.parse_args(arguments)

    from bench.leaderboard.site import pages

    path = pages.add_pair(_built(chosen), Path(chosen.out), chosen.TASK, *chosen.ENTRY)
    output.print(str(path), soft_wrap=True)
    return 0


def _serve(arguments: list[str]) -> int:
    """Serves built pages to this machine alone, until it is stopped."""
    parser = Parser("bench board serve", description="Show built pages in a browser on this machine.")
    parser.add_argument("--out", type=folder, default="site", help="folder of the pages")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    chosen = parser.parse_args(arguments)

    from bench.leaderboard.site.serving import server

    with server(Path(chosen.out), chosen.port) as serving:
        output.print(f"http://127.0.0.1:{serving.server_address[1]}/index.html", soft_wrap=True)
        serving.serve_forever()
    return 0


def _add(arguments: list[str]) -> int:
    """Verifies submissions and puts those that are accepted among those of the board."""
    parser = Parser(
        "bench board add",
        description="Verify submissions and put those that are accepted among those of the board, their "
        "arrays into its store.",
    )
    parser.add_argument("DIR", nargs="+", type=folder, help="directory of a submission, named by its slug")
    parser.add_argument(
        "--submissions",
        type=folder,
        default=None,
        help="folder of the submissions; default is leaderboard/submissions/ of this project",
    )
    parser.add_argument("--force", action="store_true", help="replace an older submission of the same slug")
    chosen = parser.parse_args(arguments)

    from bench.leaderboard.check.codes import ACCEPTED, Rejected
    from bench.leaderboard.check.structure import taken
    from bench.leaderboard.check.verify import verify
    from bench.leaderboard.evidence.submission import SUBMISSIONS
    from bench.leaderboard.evidence.submitting import adopt
    from bench.leaderboard.rank.board import STORE

    to = SUBMISSIONS if chosen.submissions is None else Path(chosen.submissions)
    store = to.resolve().parent / STORE
    refused = 0
    for name in chosen.DIR:
        with tempfile.TemporaryDirectory() as private:
            try:
                copy = taken(Path(name), Path(private))
                verdict = verify(copy, against=to, store=store)
                code, message = verdict.code, verdict.message
            except Rejected as reason:
                code, message = reason.code, str(reason)
            if code == ACCEPTED:
                output.print(str(adopt(copy, to, store, chosen.force)), soft_wrap=True)
            else:
                refused += 1
                errors.print(plain(f"bench: {name}: {code}: {message}"), soft_wrap=True)
    return int(refused > 0)
