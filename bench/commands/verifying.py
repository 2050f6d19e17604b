"""`bench verify`: whether a submission stands."""

from __future__ import annotations

import json

from bench.commands.parser import Parser, folder, output


def verify(arguments: list[str]) -> int:
    """Checks a submission; returns 0 if it is accepted, else 1."""
    parser = Parser(
        "bench verify",
        description="Check a submission: its files, and every metric computed again from its predictions. "
        "docs/leaderboard.md lists the codes.",
    )
    parser.add_argument("DIR", type=folder, help="directory of the submission, named by its slug")
    parser.add_argument("--json", action="store_true", help="print status, code, message and tier as JSON")
    parser.add_argument(
        "--data-dir",
        type=folder,
        default=None,
        help="folder of data files; targets are compared with the task's own where the data are found",
    )
    chosen = parser.parse_args(arguments)

    from bench.leaderboard.check.verify import verify

    verdict = verify(chosen.DIR, chosen.data_dir)
    if chosen.json:
        output.print(json.dumps(verdict.as_dict()), soft_wrap=True)
    else:
        named = f" ({verdict.tier})" if verdict.tier else f" ({verdict.code})"
        output.print(f"{verdict.status}{named}: {verdict.message}", soft_wrap=True)
    return 0 if verdict.status == "accepted" else 1
