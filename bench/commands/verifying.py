"""`bench verify`: whether a submission stands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from bench.commands.parser import Parser, errors, folder, output
from bench.errors import UsageError


def verify(arguments: list[str]) -> int:
    """Checks a submission; returns 0 if it is accepted, else 1."""
    parser = Parser(
        "bench verify",
        description="Check a submission: its files, and every metric computed again from its predictions. "
        "With --rerun one a seed is made again, too. docs/leaderboard.md lists the codes.",
    )
    parser.add_argument("DIR", type=folder, help="directory of the submission, named by its slug")
    parser.add_argument("--json", action="store_true", help="print all that was found as JSON")
    parser.add_argument(
        "--data-dir",
        type=folder,
        default=None,
        help="folder of data files; targets are compared with the task's own where the data are found",
    )
    parser.add_argument(
        "--rerun",
        type=Literal["one"] | None,
        default=None,
        help="make one seed again, drawn by the submission's digest and fresh randomness, and compare",
    )
    parser.add_argument(
        "--beacon",
        type=str | None,
        default=None,
        help="of --rerun: public randomness from after the submission; default are 256 fresh bits, told",
    )
    parser.add_argument(
        "--trust", action="store_true", help="of --rerun: run a method that is none of the suite's, from here"
    )
    chosen = parser.parse_args(arguments)
    if chosen.rerun is None and (chosen.trust or chosen.beacon is not None):
        raise UsageError("--trust and --beacon are of --rerun one")

    from bench.leaderboard.check.verify import verify

    verdict = verify(chosen.DIR, chosen.data_dir)
    run = None
    if chosen.rerun is not None and verdict.status == "accepted":
        from bench.leaderboard.check.rerun import rerun

        verdict, run = rerun(Path(chosen.DIR), chosen.beacon, chosen.trust, chosen.data_dir)
    if chosen.json:
        output.print(json.dumps(verdict.as_dict()), soft_wrap=True)
    else:
        named = f" ({verdict.tier})" if verdict.tier else f" ({verdict.code})"
        output.print(f"{verdict.status}{named}: {verdict.message}", soft_wrap=True)
        for entry, screen, reason in verdict.flags:
            output.print(f"held for a maintainer's word: {entry}: {screen}: {reason}", soft_wrap=True)
    if run is not None and verdict.status == "accepted":
        slug = Path(chosen.DIR).resolve().name
        errors.print(f'bench: for status.toml:\n[{slug}]\ntier = "re-run"\ndrawn = "{run}"', soft_wrap=True)
    return 0 if verdict.status == "accepted" else 1
