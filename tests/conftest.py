"""What all tests share: one thread, an ear for Ctrl-C, helper modules importable as `conformance.moons`."""

import gc
import os
import signal
import sys
import threading
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch

from bench.system import shells

shells.install()  # as the command does: half of what a process of tests imports

from bench.leaderboard.evidence.store import NotAtHand  # noqa: E402

sys.path.append(str(Path(__file__).parent))
pytest.register_assert_rewrite("bench.laws")


# A shell that starts the tests in the background has them, and all that they start, ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_sessionstart():
    """Collecting makes a million objects, which are looked through again and again, and stay."""
    gc.disable()


def pytest_collection_finish():
    """What is there now stays to the end, and is not looked through by any test."""
    gc.freeze()
    gc.enable()


def pytest_sessionfinish():
    """At the interpreter's end some libraries count what is left."""
    gc.unfreeze()


def pytest_collection_modifyitems(items):
    """Coverage counts what the quick tests reach: tracing makes training take half as long again."""
    for item in items:
        if item.get_closest_marker("slow") or {"conformance", "oracles"} & {*item.path.parts}:
            item.add_marker("no_cover")


@contextmanager
def skipped_without_evidence():
    """A test that needs arrays which neither this clone nor its remote holds is skipped; in CI it fails."""
    try:
        yield
    except NotAtHand as error:
        if os.environ.get("BENCH_REQUIRE_DATA") == "1":
            raise
        pytest.skip(str(error))


def leave_threads_untraced():
    """Coverage has threads traced, each from its start, whenever it starts or goes on.

    Python 3.11 ends a thread that starts while another one sets its trace, and a pool then waits for ever: an
    audit hook, as `bench.system.opening` has one, lets other threads run in the middle of setting a trace.
    """
    threading.settrace(None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup():
    """Fixtures read arrays too."""
    leave_threads_untraced()
    with skipped_without_evidence():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    """What a test reads itself."""
    with skipped_without_evidence():
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown():
    """Coverage goes on after a test that is not traced, and fixtures end their threads by threads."""
    leave_threads_untraced()


@pytest.fixture
def undrawn(monkeypatch):
    """Runs leave no pictures, a third of what a small one takes: for tests that make many and see none."""
    monkeypatch.setattr("bench.figures.save", lambda *_: [])


@pytest.fixture(autouse=True, scope="session")
def project_is_asked_for_once():
    """Every run asks git thrice whence its source is; that of the project does not change under its tests."""
    from bench.runs import records

    real, root = records._git, Path(__file__).parent.parent
    once = cache(real)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "_git", lambda at, *of: (once if at.is_relative_to(root) else real)(at, *of))
        yield


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Small tests are fastest on one thread, and sums then have one order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
