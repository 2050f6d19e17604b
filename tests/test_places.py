"""The search for data files, and what is told of one that ends without them; `test_data` tries it whole."""

from pathlib import Path

import pytest

from bench.errors import DataError, UsageError
from bench.system import places


@pytest.fixture(autouse=True)
def roots(monkeypatch):
    """Places of this test."""
    monkeypatch.setattr(places, "SYSTEM_ROOT", Path("/system"))
    monkeypatch.setattr(places, "CACHE_ROOT", Path("/cache"))
    monkeypatch.setenv("BENCH_DATA", "/environment")


def missing():
    """Finds nothing."""
    raise places.NotFound("x not found in a, b")


def test_order_of_the_search():
    assert places.roots("/given") == [Path("/given"), Path("/environment"), Path("/cache")]
    packaged = places.roots(None, packaged=True)
    assert packaged == [Path("/environment"), Path("/system"), Path("/cache")]
    assert places.roots("/cache") == [Path("/cache"), Path("/environment")]  # nowhere twice
    assert places.roots("~")[0] == Path.home()


@pytest.mark.parametrize(
    ("given", "target"), [("/given", "/given"), (None, "/environment"), ("/system", "/environment")]
)
def test_what_is_missing_is_fetched_into_the_first_folder_of_the_user(given, target):
    fetched = []
    assert places.obtained(lambda: fetched or missing(), fetched.append, given) == [Path(target)]


def test_what_is_there_is_not_fetched():
    assert places.obtained(lambda: 3, lambda root: pytest.fail("fetched"), None) == 3


def test_fetch_that_has_no_way_leaves_the_word_of_the_search():
    with pytest.raises(places.NotFound, match=r"^x not found in a, b$"):
        places.obtained(missing, lambda root: None, None)


@pytest.mark.parametrize(
    ("failure", "told"),
    [(OSError("no\nanswer"), "no answer"), (RuntimeError(), "RuntimeError"), (DataError("other"), "other")],
)
def test_failed_fetch_is_told_after_the_word_of_the_search_in_one_line(failure, told):
    def fail(root):
        raise failure

    with pytest.raises(DataError, match=f"^x not found in a, b; the download failed: {told}$"):
        places.obtained(missing, fail, None)


def test_found_is_a_place_or_none_and_damage_is_told():
    assert places.found(lambda: (Path("/p"), 1)) == Path("/p")
    assert places.found(missing) is None

    def damaged():
        raise DataError("damaged")

    with pytest.raises(DataError, match="damaged"):
        places.found(damaged)


def test_unknown_name_is_answered_with_the_nearest():
    assert places.known("a", {"a": 1}, "table") == 1
    with pytest.raises(UsageError, match="unknown table 'yatch'; the nearest names are yacht"):
        places.known("yatch", {"yacht": 1, "wine": 2}, "table")
