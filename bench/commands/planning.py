"""`bench plan`: how many more seeds would separate how many pairs of the committed entries of a task."""

from __future__ import annotations

import shlex
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from bench.commands.formats import Row, add_format, drawn, plain, write
from bench.commands.parser import Parser, add_imports, output
from bench.errors import UsageError

if TYPE_CHECKING:
    from bench.leaderboard.rank.planning import Outlook


def show_plan(arguments: list[str]) -> None:
    """Prints what further seeds would separate, and which entries should have them first."""
    parser = Parser(
        "bench plan",
        description="How many more seeds would separate how many pairs of the committed entries of TASK, "
        "and what they cost, if means and spreads stayed as they are. Then the entries that gain by --seeds "
        "more, the most pairs an hour first, and the sweeps that make their runs.",
    )
    parser.add_argument("TASK", type=str, help="a task as runs name it: shift_digits, fidelity_toy+units=5")
    parser.add_argument("--seeds", type=int, default=5, help="further seeds of each entry; 5 unless given")
    parser.add_argument(
        "--against",
        type=str | None,
        default=None,
        help="in place of the committed entries: folder of runs or submissions",
    )
    add_imports(parser)
    add_format(parser)
    chosen = parser.parse_args(arguments)
    if chosen.seeds < 1:
        raise UsageError(f"--seeds {chosen.seeds}: must be 1 or more")
    entries, outlook = _outlook(chosen.TASK, Path(chosen.against) if chosen.against else None)
    rows = _rows(outlook)
    if chosen.format != "table":
        write(rows, chosen.format)
        return
    output.print(drawn(rows, output.width, f"{chosen.TASK}: {len(outlook.entries)} entries"))
    gains = outlook.best_first(chosen.seeds)
    if not gains:
        output.print(plain(f"{chosen.seeds} more seeds of each entry would separate no further pair"))
        return
    shown: list[Row] = [
        {"entry": entries[key].name, "pairs gained": pairs, "core-hours": round(seconds / 3600, 2)}
        for key, pairs, seconds in gains
    ]
    output.print(drawn(shown, output.width, f"by {chosen.seeds} more seeds of each"))
    for line in _sweeps(chosen.TASK, [entries[key] for key, _, _ in gains], chosen.seeds):
        output.print(plain(line), soft_wrap=True)


def _sweeps(task: str, entries: list[Planned], more: int) -> list[str]:
    """The commands that make further seeds; none of entries or tasks with settings of their own."""
    if "+" in task:
        return []
    lines = []
    for last in sorted({entry.last for entry in entries}):
        methods = [entry.method for entry in entries if entry.last == last and "+" not in entry.method]
        seeds = map(str, range(last + 1, last + 1 + more))
        words = ["bench", "sweep", "--methods", *methods, "--tasks", task, "--seeds", *seeds]
        lines += [shlex.join(words)] if methods else []
    return lines


def _rows(outlook: Outlook) -> list[Row]:
    from bench.leaderboard.rank.planning import STEPS

    pairs = len(outlook.needed)
    return [
        {
            "more seeds": more,
            "pairs separated": outlook.separated(more),
            "of": pairs,
            "entries that gain": len(outlook.gaining(more)),
            "core-hours": round(outlook.cost(more) / 3600, 2),
        }
        for more in (0, *STEPS)
    ]


class Planned(NamedTuple):
    """An entry: its name, its method, the largest seed that it has, and its mean seconds a run."""

    name: str
    method: str
    last: int
    seconds: float


def _outlook(task: str, against: Path | None) -> tuple[dict[str, Planned], Outlook]:
    """The entries of a task, and what further seeds of them would do.

    Raises:
        UsageError: If there are fewer than two entries, or the task does not rank.
    """
    from bench.leaderboard.rank.against import Measured, Protocol, rivals, shelf, stand
    from bench.leaderboard.rank.planning import Outlook

    place = shelf(against, (), (task,))
    records = [run.record for _, run in place.runs if run.record and run.record.preset != "smoke"]
    records = [record for record in records if record.task.identity == task]
    if not records:
        raise UsageError(f"there is no entry of {task} in {place.source}: `bench list tasks` shows the tasks")
    protocol, _ = Counter(map(Protocol.of, records)).most_common(1)[0]
    records = [record for record in records if Protocol.of(record) == protocol]
    measured = Measured(records[0])
    if not (measured.spec.ranked or measured.spec.own_data):
        raise UsageError(f"{task} does not rank methods")
    found, _ = rivals(place, protocol, measured)
    if len(found) < 2:
        raise UsageError(f"{task} has one entry in {place.source}: nothing can be separated")
    entries = {}
    for rival in found:
        runs = [record for record in records if record.method.identity == rival.method]
        seconds = sum(record.seconds for record in runs) / len(runs)
        entries[rival.key] = Planned(rival.name, rival.method, max(r.seed for r in runs), seconds)
    standing = stand(found, measured).standing
    return entries, Outlook.of(standing, {key: entry.seconds for key, entry in entries.items()})
