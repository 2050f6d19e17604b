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


WRITER = """
import sys
from pathlib import Path
from bench.system import files
path, own = Path(sys.argv[1]), sys.argv[2].encode()
for number in range(500):
    files.write(path, own * (1000 + number))
"""


def test_two_writers_of_one_file_never_fail_and_are_never_read_by_halves(tmp_path):
    """1,000 writes by two processes, read all the while: what stands there is whole and by one of them."""
    path = tmp_path / "file"
    files.write(path, b"a" * 1000)
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), own]) for own in "ab"]
    reads = 0
    while any(writer.poll() is None for writer in writers):
        content = path.read_bytes()
        assert 1000 <= len(content) < 1500
        assert content == content[:1] * len(content)
        reads += 1
    assert [writer.returncode for writer in writers] == [0, 0]
    assert reads > 100
    assert [other.name for other in tmp_path.iterdir()] == ["file"]


def test_two_writers_under_one_name_are_caught(tmp_path, monkeypatch):
    """The negative control: with one temporary name for all, the second writer is refused at once."""
    monkeypatch.setattr(files, "temporary", lambda path: path.with_name(f".{path.name}.writing"))
    (tmp_path / ".file.writing").write_bytes(b"half of another's")
    with pytest.raises(OutputError, match="File exists"):
        files.write(tmp_path / "file", b"whole")
    assert not (tmp_path / "file").exists()


def test_what_a_killed_writer_left_is_known_by_its_name(tmp_path):
    left = files.temporary(tmp_path / "file")
    left.write_bytes(b"half")
    for other in (".file.writing", ".file2.0123456789abcdef.writing", "file"):
        (tmp_path / other).write_bytes(b"")
    assert files.left_behind(tmp_path / "file") == [left]
    assert files.left_behind(tmp_path / "no" / "file") == []


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
