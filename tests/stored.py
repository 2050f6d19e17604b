"""Arrays of committed runs that may lie elsewhere: the store may be emptied of what no check needs."""

import os

import pytest

from bench.leaderboard.evidence.store import run_arrays


def at_hand(directories, every=False):
    """Those runs whose arrays are here; the entries that cannot be computed again are told.

    Where BENCH_REQUIRE_DATA is 1, as in CI, all have to be here.

    Args:
        directories: Of committed runs.
        every: Whether the test needs all of them, and is skipped without.
    """
    directories = list(directories)
    assert directories, "no committed run was found"
    here = [directory for directory in directories if run_arrays(directory) is not None]
    absent = [directory for directory in directories if directory not in set(here)]
    if absent:
        entries = sorted({"/".join(directory.parts[-3:-1]) for directory in absent})
        said = f"not computed again, their arrays are not in leaderboard/store: {', '.join(entries)}"
        if os.environ.get("BENCH_REQUIRE_DATA") == "1":
            pytest.fail(f"{said}; bench store pull fetches them")
        if every or not here:
            pytest.skip(said)
        print(said)
    return here
