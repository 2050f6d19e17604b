"""Files are whole or not there, and a folder belongs to one process at a time."""

import os
import signal
import subprocess
import sys

import pytest

from bench.errors import OutputError, UsageError
from bench.system import files

# ---- writing in one step


@pytest.mark.parametrize("fails", ["replace", "fsync"])
def test_failed_write_leaves_the_old_file(tmp_path, monkeypatch, fails):
    path = tmp_path / "file"
    files.write(path, b"old")

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, fails, full)
        with pytest.raises(OutputError, match=r"^cannot write .*file: No space left on device$"):
            files.write(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    files.write(path, b"new")
    assert path.read_bytes() == b"new"


def test_writing_below_a_file_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot write"):
        files.write(tmp_path / "file" / "record.json", b"")


# ---- the lock

HOLDER = """
import sys, time
from pathlib import Path
from bench.system import files
with files.locked(Path(sys.argv[1])):
    print("has it", flush=True)
    time.sleep(60)
"""


def test_folder_is_made_locked_and_left_empty(tmp_path):
    folder = tmp_path / "a" / "b"
    for _ in range(2):
        with files.locked(folder):
            assert [path.name for path in folder.iterdir()] == [files.LOCK]
            with (
                pytest.raises(UsageError, match="b is being written by another process"),
                files.locked(folder),
            ):
                pass
            assert (folder / files.LOCK).exists()
        assert list(folder.iterdir()) == []


def test_error_inside_gives_the_lock_back(tmp_path):
    with pytest.raises(KeyError), files.locked(tmp_path):
        raise KeyError
    with files.locked(tmp_path):
        pass


def test_killed_process_leaves_no_lock(tmp_path):
    """While it lives the folder is its own; after `kill -9` the next one has it, lock file or not."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout.readline() == "has it\n"
        with pytest.raises(UsageError, match="is being written by another process"), files.locked(tmp_path):
            pass
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert (tmp_path / files.LOCK).exists()
    with files.locked(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(OutputError, match=r"cannot write .*/runs: Not a directory; choose another --out"),
        files.locked(tmp_path / "file" / "runs"),
    ):
        pass
