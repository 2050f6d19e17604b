"""The files that pages under docs/ hold: examples that a newcomer types in, for tests to follow and use.

A page holds a file as a fenced block of Python that names it, `file=methods/langevin.py`.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

DOCS = Path(__file__).parent.parent / "docs"
_FENCE = re.compile(r"^```(\w+)(?: file=(\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FOLDER = tempfile.TemporaryDirectory(prefix="pages-")  # removed when the process ends


class Block(NamedTuple):
    """A fenced block: its language, the file that it is (empty if none), its text."""

    language: str
    file: str
    text: str


def blocks(page: str) -> list[Block]:
    """All fenced blocks of a page that name their language."""
    return [Block(*found) for found in _FENCE.findall((DOCS / page).read_text())]


@cache
def module(page: str, file: str) -> ModuleType:
    """The named file of a page, imported."""
    (text,) = [block.text for block in blocks(page) if block.file == file]
    path = Path(_FOLDER.name) / Path(file).name
    path.write_text(text)
    specification = importlib.util.spec_from_file_location(f"page_{path.stem}", path)
    found = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = found
    specification.loader.exec_module(found)
    return found
