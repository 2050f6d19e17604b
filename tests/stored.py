"""Arrays of committed runs, which the history of the repository holds: brought once, for all tests."""

import os
from functools import cache

import pytest

from bench.leaderboard.evidence import entries, store
from bench.runs import records


@cache
def brought():
    """Has what stands behind all committed runs in the user's cache; returns why some is not, in one line.

    In a full clone this takes no network. The first time it takes half a minute, and tells how far it is.
    """
    told = 0

    def tell(done, of):
        nonlocal told
        if done == of or done >= told + 200:
            told = done
            print(f"arrays and curves at hand: {done} of {of}", flush=True)

    return store.bring((directory for directory, _ in entries.committed()), tell)


def has_none(directory):
    """Whether a run ended without arrays, as one that diverged may."""
    return records.read_record(directory).provenance.arrays_digest is None


def at_hand(directories, every=False):
    """Those runs whose arrays are here; the entries that cannot be computed again are told.

    Where BENCH_REQUIRE_DATA is 1, as in CI, all have to be here.

    Args:
        directories: Of committed runs.
        every: Whether the test needs all of them, and is skipped without.
    """
    directories = list(directories)
    assert directories, "no committed run was found"
    why = brought()
    here = [directory for directory in directories if store.run_arrays(directory) or has_none(directory)]
    absent = [directory for directory in directories if directory not in set(here)]
    if absent:
        names = sorted({"/".join(directory.parts[-3:-1]) for directory in absent})
        said = f"not computed again, their arrays are not at hand ({why}): {', '.join(names)}"
        if os.environ.get("BENCH_REQUIRE_DATA") == "1":
            pytest.fail(f"{said}; bench store pull fetches them")
        if every or not here:
            pytest.skip(said)
        print(said)
    return here
