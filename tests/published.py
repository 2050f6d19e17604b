"""Published data sets, any of which may be missing on a machine: a test says which it needs."""

import os

import pytest

from bench import cifar, data


def need(*names):
    """Skips the test where one of the data sets is missing; fails where BENCH_REQUIRE_DATA is 1, as in CI."""
    for name in names:
        if (cifar if name in cifar.SOURCES else data).find(name) is None:
            reason = f"{name} is in no folder of this machine: set BENCH_DATA"
            (pytest.fail if os.environ.get("BENCH_REQUIRE_DATA") == "1" else pytest.skip)(reason)


def of_task(task):
    """The published sets that a task reads, foreign images too."""
    names = [getattr(task.settings, "dataset", None), *getattr(task, "foreign", ())]
    return [name for name in names if name in {**data.SOURCES, **cifar.SOURCES}]
