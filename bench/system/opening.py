"""Which files a piece of code opens, told by Python's own audit, whichever library opens them."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

_CODE = {".py", ".pyc", ".pyi", ".so", ".pyd", ".dll", ".dylib"}
"""Files of an import, which a process opens once or, where it has imported them already, not at all."""
_NO_DATA = (("dev",), ("proc",), ("sys",))
_listening = threading.local()


@contextmanager
def noted(files: set[Path]) -> Iterator[None]:
    """Adds the files that this thread opens for reading inside the block, but for code and devices.

    A library that opens files in machine code of its own, as safetensors does, is not heard.
    """
    _install()
    before = getattr(_listening, "files", None)
    _listening.files = files
    try:
        yield
    finally:
        _listening.files = before


@cache
def _install() -> None:
    """Hears every opening in this process, once for all: Python keeps an audit hook to its end."""

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        files = getattr(_listening, "files", None)
        if event != "open" or files is None or not isinstance(arguments[0], str | bytes | os.PathLike):
            return
        path = Path(os.path.abspath(os.fsdecode(arguments[0])))
        only_writes = (arguments[2] or 0) & (os.O_WRONLY | os.O_TRUNC)
        if not only_writes and path.suffix not in _CODE and path.parts[1:2] not in _NO_DATA:
            files.add(path)

    sys.addaudithook(hear)
