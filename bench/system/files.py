"""Files that are there whole or not at all, and folders in which one process at a time writes.

A process that is killed leaves no half-written file under its final name, and no lock.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import filelock

from bench.errors import Busy, OutputError, UsageError

_WRITING = ".writing"
LOCK = ".lock"
"""Name of the file in a folder that one process has to itself, while it has it."""


class NotPlain(OSError):
    """A link or a pipe where a file should be; `filename` is its path, and `strerror` says what it is."""


def read(path: Path) -> bytes:
    """What a plain file holds: a link is not followed, and no FIFO is waited for.

    Raises:
        OSError: If it cannot be read; NotPlain, if it is no plain file.
    """
    with open(path, "rb", opener=_opened) as file:
        return file.read()


def refuse_links(folder: Path, *inside: str) -> None:
    """Refuses a folder in which something is neither a plain file nor a folder.

    Args:
        folder: To look through.
        inside: Names of folders in it that are looked through as well, where they are; others may hold links.

    Raises:
        NotPlain: If something is.
        OSError: If the folder cannot be looked through.
    """
    for place in (folder, *filter(Path.is_dir, (folder / name for name in inside))):
        with os.scandir(place) as entries:
            for entry in entries:
                if not entry.is_dir(follow_symlinks=False):
                    _refuse_other(entry.stat(follow_symlinks=False).st_mode, Path(entry.path))


_PLAIN = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
"""Of opening a file: no link is followed, no FIFO is waited for."""


def _refuse_other(mode: int, path: Path) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        what = "a link" if stat.S_ISLNK(mode) else "a pipe" if stat.S_ISFIFO(mode) else "no plain file"
        raise NotPlain(errno.EINVAL, f"is {what}, and is neither read nor written", str(path))


def _opened(path: str, flags: int) -> int:
    """A descriptor of a plain file; of anything else the error says what it is."""
    try:
        descriptor = os.open(path, flags | _PLAIN)
    except OSError:
        with suppress(FileNotFoundError):
            _refuse_other(os.lstat(path).st_mode, Path(path))
        raise
    try:
        _refuse_other(os.fstat(descriptor).st_mode, Path(path))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns what the system says of a failed write into one line that names the file.

    Raises:
        OutputError: In place of an OSError inside the block (a full disk, no permission).
    """
    try:
        yield
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from None


def temporary(path: Path) -> Path:
    """A new name beside a file, in which its content grows while it is written.

    No two writers have the same, be they processes or threads: one would put the half of another in place.
    """
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}{_WRITING}")


def left_behind(path: Path) -> list[Path]:
    """What writers of a file that were killed have left beside it."""
    pattern = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{16}}{re.escape(_WRITING)}")
    try:
        return [other for other in path.parent.iterdir() if pattern.fullmatch(other.name)]
    except OSError:
        return []


def sweep(folder: Path) -> None:
    """Removes what killed writers have left anywhere below a folder that no other process writes to now.

    Raises:
        OutputError: If something cannot be removed.
    """
    for path in folder.rglob(f".*{_WRITING}"):
        with writing(path):
            path.unlink()


def write(path: Path, content: bytes) -> None:
    """Writes a file in one step: a temporary file beside it, then a rename; makes the folders above it.

    Raises:
        OutputError: If it cannot be written; an older file of that name is then as it was.
    """
    write_all({path: content})


def write_all(contents: Mapping[Path, bytes]) -> None:
    """Writes files that belong together: none takes its name before all of them are on the disk.

    Raises:
        OutputError: If one cannot be written; older files of these names are then as they were.
    """
    partial = {path: temporary(path) for path in contents}
    try:
        for path, content in contents.items():
            with writing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                with partial[path].open("xb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
        for path in contents:
            with writing(path):
                os.replace(partial[path], path)
    except OutputError:
        for path in partial.values():
            with suppress(OSError):
                path.unlink()
        raise


@contextmanager
def locked(folder: Path, wait: bool = False) -> Iterator[None]:
    """Keeps every other process out of a folder, which is made if it is not there.

    The system gives the lock back when the process ends, however it ends.

    Args:
        folder: To keep others out of.
        wait: Until another process that has it is done.

    Raises:
        OutputError: If nothing can be written there.
        Busy: If another process has the folder, unless `wait`.
    """
    lock = filelock.FileLock(folder / LOCK, timeout=-1 if wait else 0)
    try:
        _refuse_other_lock(folder)
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except filelock.Timeout:
        raise Busy(f"{folder} is being written by another process") from None
    except OSError as error:
        raise OutputError(f"cannot write {folder}: {error.strerror}; choose another --out") from None
    try:
        yield
    finally:
        with suppress(OSError):  # Windows removes no open file; there the lock's own release does
            (folder / LOCK).unlink()
        lock.release()


def write_folder(directory: Path, contents: Mapping[str, bytes], force: bool = False) -> None:
    """Writes a folder of these files in one step; see `replace_folder`.

    Args:
        directory: To write.
        contents: Path below it -> bytes.
        force: Whether an older one is replaced.
    """
    replace_folder(directory, lambda new: write_all({new / name: of for name, of in contents.items()}), force)


def replace_folder(directory: Path, fill: Callable[[Path], None], force: bool = False) -> None:
    """Makes a folder in one step, in place of an older one; one process at a time.

    A process that is killed between the two renames leaves the older one aside, and the next brings it back.

    Args:
        directory: To make; the folder above it is locked meanwhile.
        fill: Makes the folder that it is given, under another name, and writes all that is to be in it.
        force: Whether an older one is replaced.

    Raises:
        UsageError: If an older one is there, unless `force`.
        OutputError: If it cannot be written; an older one is then as it was.
    """
    new, old = temporary(directory), directory.with_name(f".{directory.name}.old")
    with locked(directory.parent, wait=True):
        for left in left_behind(directory):
            shutil.rmtree(left, ignore_errors=True)
        if old.exists() and not directory.exists():
            with writing(directory):
                os.rename(old, directory)
        if directory.exists() and not force:
            raise UsageError(f"{directory} is there already: it is kept; --force replaces it")
        try:
            with writing(directory):
                fill(new)
                if directory.exists():
                    shutil.rmtree(old, ignore_errors=True)
                    os.rename(directory, old)
                try:
                    os.rename(new, directory)
                except OSError:
                    with suppress(OSError):
                        os.rename(old, directory)
                    raise
            shutil.rmtree(old, ignore_errors=True)
        finally:
            shutil.rmtree(new, ignore_errors=True)


def is_locked(folder: Path) -> bool:
    """Whether a process has the folder to itself at this moment."""
    if not (folder / LOCK).exists():
        return False
    lock = filelock.FileLock(folder / LOCK, timeout=0)
    try:
        _refuse_other_lock(folder)
        lock.acquire()
    except filelock.Timeout:
        return True
    except OSError:  # another user's folder: whether its lock is held cannot be asked
        return False
    lock.release()
    return False


def _refuse_other_lock(folder: Path) -> None:
    """A lock that is a link would empty what it leads to."""
    with suppress(FileNotFoundError):
        _refuse_other((folder / LOCK).lstat().st_mode, folder / LOCK)
