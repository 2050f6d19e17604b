"""No thread is traced under coverage: `leave_threads_untraced` in tests/conftest.py says why."""

import subprocess
import sys
from pathlib import Path

TESTS = """
import sys
import threading

import pytest


@pytest.fixture
def ends():
    assert threading.gettrace() is None, "threads are traced"
    yield
    assert sys.gettrace() is not None
    assert threading.gettrace() is None, "threads are traced"


@pytest.mark.no_cover
def test_untraced(ends):
    assert sys.gettrace() is None


def test_traced(ends):
    assert sys.gettrace() is not None
    assert threading.gettrace() is None, "threads are traced"
"""


def test_coverage_traces_no_thread_of_a_test(tmp_path):
    found = told(tmp_path, Path(__file__).with_name("conftest.py").read_text())
    assert "2 passed" in found
    assert "error" not in found


def test_without_our_hooks_coverage_traces_threads(tmp_path):
    found = told(tmp_path, "")
    assert "2 errors" in found
    assert "threads are traced" in found


def told(folder, conftest):
    """What pytest prints of TESTS beside this conftest.py."""
    (folder / "conftest.py").write_text(conftest)
    (folder / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--cov=.", "test_it.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout
