"""The manifest of all evidence: which files stand behind the records, and where the history has them.

A committed record's arrays and curves are in the history of the repository and not in its tree. For each of
them `manifests/<task>.txt` has a line, in order of their paths:

    <SHA-256> <bytes> <git blob> <path inside leaderboard/>

Equal files have lines of their own and one object.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from bench.errors import UsageError
from bench.system.files import write_all, writing

ROOT = Path(__file__).parent.parent
"""The folder of this project's records, submissions and manifests."""
FOLDER = "manifests"
_LINE = re.compile(r"([0-9a-f]{64}) (\d{1,15}) ([0-9a-f]{40}) ((?!/)[A-Za-z0-9_+=,./~-]+)")


class Line(NamedTuple):
    """A file of evidence.

    Attributes:
        digest: SHA-256 of its bytes.
        length: Their number.
        blob: The name that git has for them.
        path: Where the file would lie, inside the folder of records and submissions.
    """

    digest: str
    length: int
    blob: str
    path: str

    @property
    def task(self) -> str:
        """Identity of the task of its run."""
        return self.path.split("/")[-4]


def read(root: Path = ROOT) -> Mapping[str, Line]:
    """All lines of the manifests below a folder, by path; none where there are no manifests.

    Raises:
        UsageError: If a file is no manifest; names the line.
    """
    try:
        return _read(root, (root / FOLDER).stat().st_mtime_ns)
    except FileNotFoundError:
        return {}


@cache
def _read(root: Path, changed: int) -> dict[str, Line]:
    found = {}
    for path in sorted((root / FOLDER).glob("*.txt")):
        for number, text in enumerate(path.read_text().splitlines(), 1):
            match = _LINE.fullmatch(text)
            if match is None or ".." in match[4] or match[4].count("/") < 4:
                raise UsageError(f"{path}, line {number}: no line of a manifest: git checkout -- {path}")
            found[match[4]] = Line(match[1], int(match[2]), match[3], match[4])
    return found


def write(lines: Iterable[Line], root: Path = ROOT) -> list[Path]:
    """Writes the manifests, of each task a file; returns them all. What has no line any more goes.

    Raises:
        OutputError: If one cannot be written.
    """
    texts: dict[str, list[str]] = defaultdict(list)
    for line in sorted(lines, key=lambda line: line.path):
        texts[line.task.split("+")[0]].append(f"{line.digest} {line.length} {line.blob} {line.path}\n")
    contents = {root / FOLDER / f"{task}.txt": "".join(text).encode() for task, text in texts.items()}
    write_all(contents)
    for path in (root / FOLDER).glob("*.txt"):
        if path not in contents:
            with writing(path):
                path.unlink()
    _read.cache_clear()  # a folder's time may be as coarse as a second
    return sorted(contents)
