"""What a pull request may touch: a stranger's hands in one submission, and nothing beside it.

`python -m bench.leaderboard.check.request BASE HEAD ACCOUNT [--maintainer]` compares two checkouts, the base
branch and the request merged into it. It prints the slugs to verify, one a line; or it ends with exit code 1
and says why the request is refused. The trees of git are compared, so no file of the request is opened.

A slug belongs to the account of the forge that `leaderboard/owners.toml` names. Maintainers may touch all.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path, PurePosixPath
from typing import Final

from bench.errors import BenchError
from bench.leaderboard.evidence.submission import OURS, OWNERS, SLUG, owners
from bench.text import one_line

_HOME: Final = "leaderboard/submissions/"
EVIDENCE: Final = (
    *(_HOME, "leaderboard/store/", "leaderboard/manifests/", "leaderboard/records/"),
    *("leaderboard/status.toml", "leaderboard/owners.toml", "leaderboard/check/targets.txt"),
)
"""What decides on the board's numbers. A request that touches none of it is one on code, of other reviews."""


class Refused(BenchError):
    """A request touches what it may not."""


def slugs(base: Path, head: Path, account: str, is_maintainer: bool = False) -> list[str]:
    """The submissions that a request adds or changes.

    Args:
        base: Checkout of the branch that it is for.
        head: Checkout of the request merged into that.
        account: Who made it, as the forge calls the account.
        is_maintainer: Whether the account may write to the repository.

    Raises:
        Refused: In one line.
    """
    before, after = _tree(base), _tree(head)
    changed = sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
    if not any(path.startswith(EVIDENCE) for path in changed):
        return []
    found = {PurePosixPath(path).parts[2] for path in changed if path.startswith(_HOME)}
    there = {slug for slug in found if any(path.startswith(f"{_HOME}{slug}/") for path in after)}
    if wrong := next((slug for slug in sorted(there) if not SLUG.fullmatch(slug)), None):
        raise Refused(f"{one_line(ascii(wrong), 80)} is no slug: 1 to 64 of a-z, 0-9 and hyphens")
    if is_maintainer:
        return sorted(there)
    if beside := next((path for path in changed if not path.startswith(_HOME)), None):
        raise Refused(
            f"{one_line(beside, 120)} is touched: a request hands in one submission and nothing else"
        )
    if len(found) > 1:
        raise Refused(f"{len(found)} submissions are touched: make a request for each")
    if not there:
        raise Refused("a submission is deleted: ask the maintainers to withdraw it, it stays visible")
    (slug,) = there
    if any(path.startswith(f"{_HOME}{slug}/") for path in before):
        owner = None if slug == OURS else owners(base / "leaderboard" / OWNERS.name).get(slug)
        if owner is None or owner.casefold() != account.casefold():
            raise Refused(
                f"{slug} is on the board already and does not belong to the account of this request"
            )
    return [slug]


def _tree(checkout: Path) -> dict[str, str]:
    """Path -> mode and object of every file of the commit that is checked out."""
    listed = subprocess.run(
        ["git", "ls-tree", "-r", "-z", "--full-tree", "HEAD"], cwd=checkout, capture_output=True, check=True
    ).stdout.decode(errors="surrogateescape")
    lines = (line.split("\t", 1) for line in listed.split("\0")[:-1])
    return {path: what for what, path in lines}


def main(words: list[str]) -> int:
    """Prints the slugs to verify; or says why the request is refused, exit code 1."""
    base, head, account, *flags = words
    try:
        for slug in slugs(Path(base), Path(head), account, flags == ["--maintainer"]):
            print(slug)
    except Refused as reason:
        print(f"refused: {reason}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
