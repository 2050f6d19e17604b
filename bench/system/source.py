"""The files that the suite is made of, and a hash of them: by it a record says what made it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path


def _hash(paths: Iterable[tuple[str, Path]]) -> str:
    digest = hashlib.sha256()
    for name, path in sorted(paths):
        digest.update(f"{name}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


_FOLDERS = ("methods", "tasks", "leaderboard")
"""Packages of `bench` that have folders of their own in the sources; installed they lie inside it."""


def source_files() -> dict[str, Path]:
    """Every Python and preset file of engine, methods and tasks, by its path in the sources."""
    found = {}
    for name in ("bench", "methods", "tasks"):
        # Found by name, not imported: methods and tasks stand above this file.
        spec = find_spec("bench" if name == "bench" else f"bench.{name}")
        for root in map(Path, (spec and spec.submodule_search_locations) or []):
            for path in (*root.rglob("*.py"), *root.rglob("*.toml")):
                inside = path.relative_to(root)
                if name != "bench" or inside.parts[0] not in _FOLDERS:
                    found[f"{name}/{inside.as_posix()}"] = path
    return found


def source_hash() -> str:
    """Hash over the source of the suite, subfolders included."""
    return _hash(source_files().items())


_DECLARED = re.compile(rb'^    declares = "[^"\n]*"(, \{[^()\n]*\})?\n', re.MULTILINE)
"""What a method declares of its posterior: one line of literals, which no run reads."""


def file_hash(path: Path) -> str:
    """Hash of one source file, without the line of what a method declares of its posterior.

    A method that declares something else is the same program: runs made before it and after it go together.
    """
    return hashlib.sha256(
        f"{path.name}\0".encode() + _DECLARED.sub(b"", path.read_bytes()) + b"\0"
    ).hexdigest()
