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
from typing import Generic, TypeVar

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


class Door(Generic[Known, Found]):
    """The one way to the data sets of a kind: found where they lie, fetched where they are not, checked.

    Its functions take a name and the folder that the user gave, which is searched first and fetched into.

    Args:
        kind: What one of them is called.
        sources: Name -> where it comes from.
        locate: Searches for a name: its place and its content, verified; or NotFound.
        fetch: Downloads from a source into a folder; does nothing where there is no way to get the data.
        told: What `check` says of a source and its content.

    Raises:
        UsageError: In every function, if no data set of the kind has the name.
        DataError: In every function, if what is found is not what it should be; and in all but `find`, if
            nothing is found, nor can be fetched: one line on search, ways out and failure.
    """

    def __init__(
        self,
        kind: str,
        sources: Mapping[str, Known],
        locate: Callable[[str, Path | str | None], tuple[Path, Found]],
        fetch: Callable[[Known, Path], None],
        told: Callable[[Known, Found], str],
    ) -> None:
        self.kind, self.sources = kind, sources
        self._locate, self._fetch, self._told = locate, fetch, told

    def find(self, name: str, data_dir: Path | str | None = None) -> Path | None:
        """Where the data set is, None if it is nowhere; fetches nothing."""
        try:
            return self._located(name, data_dir)[0]
        except NotFound:
            return None

    def check(self, name: str, data_dir: Path | str | None = None) -> str:
        """Reports in one line what was found where; fetches nothing."""
        path, content = self._located(name, data_dir)
        return f"{name}: {self._told(self.sources[name], content)}, in {path}"

    def get(self, name: str, data_dir: Path | str | None = None) -> Path:
        """Where the data set is, after fetching it if it is nowhere on this machine."""
        return self._obtained(name, data_dir)[0]

    def load(self, name: str, data_dir: Path | str | None = None) -> Found:
        """The content of the data set, after fetching it if it is nowhere on this machine."""
        return self._obtained(name, data_dir)[1]

    def _located(self, name: str, data_dir: Path | str | None) -> tuple[Path, Found]:
        known(name, self.sources, self.kind)
        return self._locate(name, data_dir)

    def _obtained(self, name: str, data_dir: Path | str | None) -> tuple[Path, Found]:
        try:
            return self._located(name, data_dir)
        except NotFound as not_found:
            try:  # the system's own folder is dpkg's
                root = next(root for root in roots(data_dir) if root != SYSTEM_ROOT)
                self._fetch(self.sources[name], root)
            except (OSError, RuntimeError, DataError, http.client.HTTPException) as error:
                reason = " ".join(str(error).split()) or type(error).__name__
                raise DataError(f"{not_found}; the download failed: {reason}") from None
        return self._locate(name, data_dir)


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
