"""Where data files lie on a machine, and how those that are missing are fetched: images and tables alike.

Data are searched in `--data-dir`, then in $BENCH_DATA, then where the system's packages put them, then in the
cache of this project. What is nowhere is fetched into the first of these folders that is the user's own.
"""

from __future__ import annotations

import difflib
import http.client
import os
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from bench.errors import DataError, UsageError

SYSTEM_ROOT = Path("/usr/share/datasets")  # where Debian's dataset-* packages put their files
CACHE_ROOT = Path(os.path.expanduser("~/.cache/posterior-bench"))
ANSWER_SECONDS = 5.0  # how long a server may be silent before a download is given up

Found = TypeVar("Found")
Known = TypeVar("Known")


class NotFound(DataError):
    """No folder of the search holds the data; the message tells the search and the ways out."""


def known(name: str, sources: Mapping[str, Known], kind: str) -> Known:
    """The source of this name.

    Raises:
        UsageError: There is none; names the nearest.
    """
    if name not in sources:
        near = difflib.get_close_matches(name.lower(), sources, cutoff=0.4) or list(sources)
        raise UsageError(f"unknown {kind} {name!r}; the nearest names are {', '.join(near)}")
    return sources[name]


def roots(data_dir: Path | str | None, packaged: bool = False) -> list[Path]:
    """Folders of the search, in order; `packaged` adds that of the system's packages before the cache."""
    given = [Path(os.path.expanduser(root)) for root in (data_dir, os.environ.get("BENCH_DATA")) if root]
    return list(dict.fromkeys([*given, *([SYSTEM_ROOT] if packaged else []), CACHE_ROOT]))


def found(locate: Callable[[], tuple[Path, object]]) -> Path | None:
    """The place that `locate` finds, None if there is none."""
    try:
        return locate()[0]
    except NotFound:
        return None


def obtained(
    locate: Callable[[], Found], fetch: Callable[[Path], None], data_dir: Path | str | None
) -> Found:
    """What `locate` finds, after a download if it finds nothing.

    Args:
        locate: Searches, or raises NotFound.
        fetch: Downloads into a folder; does nothing where there is no way to get the data.
        data_dir: The folder of the search that the user named.

    Raises:
        DataError: The data are not found and cannot be fetched; one line on search, ways out and failure.
    """
    try:
        return locate()
    except NotFound as not_found:
        try:
            fetch(next(root for root in roots(data_dir) if root != SYSTEM_ROOT))  # that one is dpkg's
        except (OSError, RuntimeError, DataError, http.client.HTTPException) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise DataError(f"{not_found}; the download failed: {reason}") from None
    return locate()


def await_answer(urls: list[str]) -> None:
    """Raise OSError unless one of `urls` answers within ANSWER_SECONDS.

    A socket's timeout bounds neither the look-up of a name nor the attempts at its many addresses: only a
    thread that may be left behind keeps a machine without internet from waiting for minutes.
    """
    problems = [f"no answer from {urls[0]} within {ANSWER_SECONDS:g} s"]

    def ask() -> None:
        failures = []
        for url in urls:
            request = urllib.request.Request(url, method="HEAD", headers={"User-Agent": "posterior-bench"})
            try:
                urllib.request.urlopen(request, timeout=ANSWER_SECONDS).close()
            except (OSError, http.client.HTTPException) as error:
                failures.append(f"{url}: {error}")
            else:
                failures.clear()
                break
        problems[:] = failures

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(ANSWER_SECONDS)
    if problems:
        raise OSError("; ".join(problems))


@contextmanager
def impatient() -> Iterator[None]:
    """Inside the block a silent server is given up: some libraries set no limit and would wait for ever."""
    timeout = socket.getdefaulttimeout()
    socket.setdefaulttimeout(ANSWER_SECONDS)
    try:
        yield
    finally:
        socket.setdefaulttimeout(timeout)
