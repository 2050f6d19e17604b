"""The place `git:`: files that were committed once are kept in the history, and read from there by name.

In a clone that has all objects this takes no network. A clone of `git clone --filter=blob:none`, and one that
is shallow, fetches what it lacks from its remote: many objects in one request.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from bench.text import one_line

_QUIET = {"GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}


def git(folder: Path, *arguments: str, given: bytes = b"", check: bool = True) -> str:
    """What git prints; raises subprocess.CalledProcessError or OSError if it fails, unless told not to.

    Args:
        folder: Inside the repository.
        arguments: Of git.
        given: Its standard input.
        check: Whether a failure raises.
    """
    done = subprocess.run(
        ["git", *arguments],
        cwd=folder,
        input=given,
        capture_output=True,
        check=check,
        env=os.environ | _QUIET,
    )
    return done.stdout.decode()


def blob_of(content: bytes) -> str:
    """The name that git has for the bytes of a file."""
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content, usedforsecurity=False).hexdigest()


def is_here(folder: Path) -> bool:
    """Whether a folder lies in a git repository."""
    try:
        return git(folder, "rev-parse", "--is-inside-work-tree", check=False).strip() == "true"
    except OSError:
        return False


def contents(folder: Path, blobs: Sequence[str]) -> Iterator[tuple[str, bytes | None]]:
    """Objects with their bytes, in order; None for one that is neither here nor at the remote.

    Args:
        folder: Inside the repository, which may be bare.
        blobs: Their names in git.
    """
    with tempfile.TemporaryFile() as asked:
        asked.write("".join(f"{blob}\n" for blob in blobs).encode())
        asked.seek(0)
        try:
            process = subprocess.Popen(
                ["git", "cat-file", "--batch"],
                cwd=folder,
                stdin=asked,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | _QUIET,
            )
        except OSError:
            yield from ((blob, None) for blob in blobs)
            return
        with process, process.stdout as answers:  # type: ignore[union-attr]
            try:
                for blob in blobs:
                    # <name> blob <bytes>, the bytes, a line break; <name> missing; nothing, if git has ended.
                    kind = answers.readline().split()[1:]
                    found = answers.read(int(kind[1])) if len(kind) == 2 else None
                    if found is not None:
                        answers.read(1)
                    yield blob, found
            finally:
                process.kill()


def fetch(folder: Path, blobs: Iterable[str]) -> str:
    """Brings objects from the remote to a clone that may lack them, in one request.

    Returns:
        Why they cannot be had, in one line; empty if they came, or if the clone has all there is.
    """
    remote = lacking(folder)
    if remote is None:
        return ""
    if not remote:
        return "this clone is shallow and has no remote"
    try:
        git(
            folder,
            *(
                "-c",
                "fetch.negotiationAlgorithm=noop",
                "fetch",
                "--quiet",
                "--no-tags",
                "--no-write-fetch-head",
            ),
            *("--recurse-submodules=no", "--stdin", remote),
            given="".join(f"{blob}\n" for blob in blobs).encode(),
        )
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip().splitlines()
        return f"git cannot fetch from {remote}: {one_line(said[0] if said else 'no answer')}"
    return ""


def lacking(folder: Path) -> str | None:
    """The remote of a clone that may lack objects, empty if it has none; None if the clone has all."""
    try:
        promised = git(folder, "config", "--get-regexp", r"^remote\..*\.promisor$", check=False).split()
        if promised:
            return promised[0].removeprefix("remote.").removesuffix(".promisor")
        if is_shallow(folder):
            return (git(folder, "remote", check=False).split() or [""])[0]
    except OSError:
        pass
    return None


def is_shallow(folder: Path) -> bool:
    """Whether a clone has only the newest commits."""
    return git(folder, "rev-parse", "--is-shallow-repository", check=False).strip() == "true"


def reachable(folder: Path) -> frozenset[str]:
    """Names of all objects of the history of HEAD, those that a partial clone has yet to fetch included.

    Of a shallow clone these are the objects of its newest commits.
    """
    try:
        lines = git(folder, "rev-list", "--objects", "--missing=print", "HEAD").splitlines()
    except (OSError, subprocess.CalledProcessError):
        return frozenset()
    return frozenset(line.split(" ", 1)[0].removeprefix("?") for line in lines)
