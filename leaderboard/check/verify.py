"""`bench verify`: the one check of a submission, for its author, for CI and for the board.

    files      lstat of every name: links, names, sizes, numbers; nothing is opened      `structure.tree`
    structure  a child without torch: JSON, headers, digests, seeds, duplicates          `structure.check`
    scores     a second child: every metric computed again, targets compared             `scoring.score`
               without torch; in a third one with it, unless the second one accepts
    screens    in the same child: what no honest entry has, which holds one back         `screens.Gallery`

Nothing of a submission is executed, and no name of a method is resolved: it is a label. Every reason has a
code that stays (`codes.py`).
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

from bench.errors import UsageError
from bench.leaderboard.check.children import Answer, Question, ask
from bench.leaderboard.check.codes import ACCEPTED, Rejected
from bench.leaderboard.check.structure import tree
from bench.leaderboard.evidence.store import STORE, bring
from bench.leaderboard.evidence.submission import SUBMISSIONS

MEMORY: Final = {"structure": 768 * 2**20, "scores": 4 * 2**30}
"""Bytes that each child may take beside what its imports take."""


@dataclass(frozen=True)
class Verdict:
    """What `bench verify` says of a submission.

    Attributes:
        status: accepted or rejected.
        code: A code of `bench.leaderboard.check.codes.CODES`.
        message: One line: what is wrong, where, what to do; of an accepted one, what was checked.
        tier: Of an accepted one: `recomputed`, if every metric follows from the predictions and the task's
            own targets; `self-reported`, if one is the method's own word; `targets unseen`, if nobody here
            can know the targets.
        flags: What the screens (`screens.py`) saw of an accepted one: task and method, name of the screen,
            reason. An entry with a flag is held for a maintainer's word.
    """

    status: Literal["accepted", "rejected"]
    code: str
    message: str
    tier: str | None
    flags: Sequence[tuple[str, str, str]] = ()

    def as_dict(self) -> dict[str, Any]:
        """The verdict as JSON has it."""
        return asdict(self)


def verify(
    directory: str | Path,
    data_dir: str | Path | None = None,
    against: Path | None = SUBMISSIONS,
    store: Path = STORE,
) -> Verdict:
    """Checks a submission; a bad one, however bad, is a verdict and never an exception.

    Args:
        directory: The submission. Its name is the slug.
        data_dir: Folder of data files, searched before the usual places. Targets and data are compared where
            the task's data are found; nothing is downloaded.
        against: Folder of submissions whose arrays this one must not have, nor with noise; its own slug is
            passed over.
        store: Folder of arrays by their SHA-256, for arrays that are not beside their record.

    Raises:
        UsageError: On a system that cannot limit what a process takes.
    """
    if importlib.util.find_spec("resource") is None:
        raise UsageError("bench verify needs the limits of Linux or macOS: run it there")
    root = Path(directory)
    try:
        files = tree(root).files
    except Rejected as reason:
        return Verdict("rejected", reason.code, str(reason), None)
    runs = [root / name.removesuffix("/record.json") for name in files if name.endswith("/record.json")]
    bring(runs + _of_same_tasks(runs, against))
    size = sum(found.st_size for found in files.values())
    data = data_dir or os.environ.get("BENCH_DATA")
    # Records without arrays beside them are small and many: a thousand take five seconds of a slow machine.
    structure = 5 + size // (20 * 2**20) + len(files) // 100
    seconds = {"structure": structure, "scores": 120 + 30 * len(files)}

    def asked(kind: str) -> Answer:
        step = kind.partition("-")[0]
        return ask(
            Question(
                kind=kind,
                directory=os.path.abspath(root),
                against=None if against is None else os.path.abspath(against),
                store=os.path.abspath(store),
                data_dir=None if data is None else os.path.abspath(os.path.expanduser(data)),
                processor_seconds=seconds[step],
                memory=MEMORY[step],
            )
        )

    answer = asked("structure")
    if answer.code == ACCEPTED:
        answer = asked("scores-by-numpy")
        if answer.code != ACCEPTED:  # a task that scores with torch, or a reason, which torch may tell better
            answer = asked("scores")
    status: Literal["accepted", "rejected"] = "accepted" if answer.code == ACCEPTED else "rejected"
    return Verdict(status, *answer)


def _of_same_tasks(runs: Sequence[Path], against: Path | None) -> list[Path]:
    """Runs of other submissions on the tasks of these."""
    if against is None or not against.is_dir():
        return []
    tasks = sorted({run.parts[-3] for run in runs if len(run.parts) > 2})
    return [path.parent for task in tasks for path in sorted(against.glob(f"*/{task}/*/seed*/record.json"))]
