"""What a finished run holds, file by file with lengths, so that a damaged run does not pass for a whole one.

The list is `files.json`, beside the record and written before it. It has what the run cannot be used without:
arrays, curves, checkpoints and what the task leaves; not the log and not the figures, which are drawn anew.
Runs from before the list have none, and are taken as they are.
"""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath

from bench.errors import UsageError
from bench.system import files
from bench.text import one_line

LIST = "files.json"
_NOT_LISTED = {LIST, "record.json", "unfinished.json", "log.txt"}
FOLDERS = ("checkpoints", "figures")
"""Folders of a run whose files it writes and reads: no link or pipe is in the place of one."""
_AGAIN = "bench run --force makes the run anew"


def keep(directory: Path) -> None:
    """Writes the list of what lies in a run's directory.

    Raises:
        OutputError: If it cannot be written.
    """
    own = [path for path in directory.iterdir() if path.name[0] != "." and path.name not in _NOT_LISTED]
    paths = [path for path in (*own, *(directory / "checkpoints").glob("*.ckpt")) if path.is_file()]
    lengths = {path.relative_to(directory).as_posix(): path.stat().st_size for path in sorted(paths)}
    files.write(directory / LIST, (json.dumps(lengths, indent=1) + "\n").encode())


def keep_again(directory: Path) -> None:
    """Writes the list of a run whose curves were made anew, if it has one."""
    if (directory / LIST).exists():
        keep(directory)


def check(directory: Path) -> None:
    """Refuses a run of which something is missing, cut off, or no plain file.

    Raises:
        UsageError: If so; one line that names the first three files, and how to make the run anew.
    """
    try:
        files.refuse_links(directory, *FOLDERS)
        lengths = json.loads(files.read(directory / LIST))
        names = [PurePosixPath(name) for name in lengths]
        if not all(type(length) is int and length >= 0 for length in lengths.values()) or any(
            name.is_absolute() or ".." in name.parts for name in names
        ):
            raise ValueError("it is no list of files and their lengths")
    except FileNotFoundError:
        return
    except OSError as error:
        path = error.filename or directory / LIST
        raise UsageError(f"{directory} is damaged: {path} {error.strerror or error}; {_AGAIN}") from None
    except (ValueError, AttributeError, TypeError) as error:
        raise UsageError(f"{directory} is damaged: {LIST}: {one_line(error)}; {_AGAIN}") from None
    wrong = []
    for name, length in lengths.items():
        path = directory / name
        if not path.is_file():
            wrong.append(f"{one_line(name)} is missing")
        elif (found := path.stat().st_size) < length:
            wrong.append(f"{one_line(name)} has {found} bytes of {length}")
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise UsageError(f"{directory} is damaged: {', '.join(wrong[:3])}{more}; {_AGAIN}")
