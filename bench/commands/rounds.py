"""Rounds with hidden labels: `bench round open`, `predict`, `enter`, `close` and `check`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from bench.commands.formats import drawn
from bench.commands.parser import Parser, add_imports, errors, folder, output
from bench.errors import UsageError
from bench.runs.plan import Preset
from bench.runs.registry import nearest

if TYPE_CHECKING:
    from bench.leaderboard.rank.rounds import Closed


def round_(arguments: list[str]) -> int:
    """Does what the first argument says."""
    actions: dict[str, tuple[Callable[[list[str]], None], str]] = {
        "open": (_open, "draw a test set by a secret seed, and commit to it"),
        "predict": (_predict, "predict for a round by the methods of finished runs"),
        "enter": (_enter, "hand predictions in"),
        "close": (_close, "show the truth, and rank what was handed in"),
        "check": (_check, "hold a round to what it committed to"),
    }
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: bench round ACTION ...\n\nRounds with hidden labels.\n\nactions (each with --help):")
        print("\n".join(f"  {name:8} {text}" for name, (_, text) in actions.items()))
        return 0 if arguments else UsageError.exit_code
    if arguments[0] not in actions:
        raise UsageError(f"unknown action '{arguments[0]}': {nearest(arguments[0], list(actions))}")
    actions[arguments[0]][0](arguments[1:])
    return 0


def _parser(action: str, description: str) -> Parser:
    """A parser with the round's directory and where data lie."""
    parser = Parser(f"bench round {action}", description=description)
    parser.add_argument("ROUND", type=folder, help="directory of the round")
    parser.add_argument(
        "--data-dir", type=folder, default=None, help="folder of data files; also $BENCH_DATA"
    )
    return parser


def _open(arguments: list[str]) -> None:
    parser = _parser(
        "open",
        "Open a round: a secret seed draws a fresh test set of a task. The round's directory has the inputs, "
        "in shuffled order, and a commitment to seed and truth; it is published. The secret is not.",
    )
    parser.add_argument("TASK", type=str, help="a task that draws its test inputs")
    parser.add_argument(
        "--secret", type=folder, required=True, help="new file for seed and nonce, for you alone"
    )
    parser.add_argument("--preset", type=Preset, default="standard", help="of the task's settings")
    chosen = parser.parse_args(arguments)

    from bench.leaderboard.rank import rounds

    rounds.open_round(chosen.TASK, Path(chosen.ROUND), Path(chosen.secret), chosen.preset, chosen.data_dir)
    output.print(str(chosen.ROUND), soft_wrap=True)
    errors.print(f"bench: publish {chosen.ROUND}, and keep {chosen.secret} until it closes", soft_wrap=True)


def _predict(arguments: list[str]) -> None:
    parser = _parser("predict", "Predict for a round's inputs by the fitted methods of finished runs.")
    parser.add_argument(
        "RUN", nargs="+", type=str, help="run of the round's task, or folder with runs below it"
    )
    parser.add_argument("--to", type=folder, required=True, help="the new directory; its name is the slug")
    add_imports(parser)
    chosen = parser.parse_args(arguments)

    from bench.leaderboard.rank import rounds
    from bench.runs.folders import gather

    found, _ = gather([Path(name) for name in chosen.RUN])
    opened = rounds.opened(Path(chosen.ROUND), chosen.data_dir)
    rounds.predict(opened, [run.directory for run in found], Path(chosen.to), chosen.data_dir)
    output.print(str(chosen.to), soft_wrap=True)


def _enter(arguments: list[str]) -> None:
    parser = _parser("enter", "Hand in what bench round predict wrote, while the round is open.")
    parser.add_argument("ENTRY", type=folder, help="directory of the predictions, named by its slug")
    chosen = parser.parse_args(arguments)

    from bench.leaderboard.rank import rounds

    opened = rounds.opened(Path(chosen.ROUND), chosen.data_dir)
    output.print(str(rounds.enter(opened, Path(chosen.ENTRY))), soft_wrap=True)


def _close(arguments: list[str]) -> None:
    parser = _parser("close", "Close a round: show seed and truth, score and rank what was handed in.")
    parser.add_argument("--secret", type=folder, required=True, help="the file that opening wrote")
    chosen = parser.parse_args(arguments)

    from bench.leaderboard.rank import rounds

    _show(rounds.close(rounds.opened(Path(chosen.ROUND), chosen.data_dir), Path(chosen.secret)))


def _check(arguments: list[str]) -> None:
    parser = _parser(
        "check",
        "Check a round without trust: the commitment, the draw of the seed, the entries, and the ranks.",
    )
    chosen = parser.parse_args(arguments)

    from bench.leaderboard.rank import rounds

    closed = rounds.check(rounds.opened(Path(chosen.ROUND), chosen.data_dir))
    if closed is None:
        output.print(f"{chosen.ROUND} is open, and stands so far", soft_wrap=True)
    else:
        _show(closed)


def _show(closed: Closed) -> None:
    """The places of a closed round, best first."""
    from bench.intervals import Interval

    rows = [
        {
            "ranks": "-" if place.ranks is None else f"{place.ranks[0]} to {place.ranks[1]}",
            "tie group": place.group,
            "entry": place.name,
            "mean -log p, nats": Interval(
                place.mean,
                float("nan") if place.low is None else place.low,
                float("nan") if place.high is None else place.high,
                f"n = {place.seeds}",
            ),
            "seeds": place.seeds,
            "why not ranked": place.why,
        }
        for place in closed.places
    ]
    if rows:
        output.print(drawn(rows, output.width))
    else:
        output.print("nobody has handed in")
