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


def missing(*_):
    """Finds nothing."""
    raise places.NotFound("x not found in a, b")


def test_order_of_the_search():
    assert places.roots("/given") == [Path("/given"), Path("/environment"), Path("/cache")]
    packaged = places.roots(None, packaged=True)
    assert packaged == [Path("/environment"), Path("/system"), Path("/cache")]
    assert places.roots("/cache") == [Path("/cache"), Path("/environment")]  # nowhere twice
    assert places.roots("~")[0] == Path.home()


def door(locate, fetch=lambda source, root: None):
    """Of one data set, x, which comes from its archive."""
    return places.Door(
        "table", {"x": "archive"}, locate, fetch, lambda source, content: f"{content} of {source}"
    )


@pytest.mark.parametrize(
    ("given", "target"), [("/given", "/given"), (None, "/environment"), ("/system", "/environment")]
)
def test_what_is_missing_is_fetched_into_the_first_folder_of_the_user(given, target):
    fetched = []
    tables = door(lambda *_: tuple(fetched) or missing(), lambda *way: fetched.extend(way))
    assert tables.load("x", given) == Path(target)
    assert fetched == ["archive", Path(target)]


def test_what_is_there_is_not_fetched_and_is_checked():
    tables = door(lambda *_: (Path("/p"), 3), lambda *_: pytest.fail("fetched"))
    assert (tables.find("x"), tables.get("x"), tables.load("x")) == (Path("/p"), Path("/p"), 3)
    assert tables.check("x") == "x: 3 of archive, in /p"


def test_fetch_that_has_no_way_leaves_the_word_of_the_search():
    tables = door(missing)
    for use in (tables.load, tables.get, tables.check):
        with pytest.raises(places.NotFound, match=r"^x not found in a, b$"):
            use("x")


@pytest.mark.parametrize(
    ("failure", "told"),
    [(OSError("no\nanswer"), "no answer"), (RuntimeError(), "RuntimeError"), (DataError("other"), "other")],
)
def test_failed_fetch_is_told_after_the_word_of_the_search_in_one_line(failure, told):
    def fail(*_):
        raise failure

    with pytest.raises(DataError, match=f"^x not found in a, b; the download failed: {told}$"):
        door(missing, fail).get("x")


def test_found_is_a_place_or_none_and_damage_is_told():
    def fetch(*_):
        pytest.fail("fetched")

    assert door(missing, fetch).find("x") is None

    def damaged(*_):
        raise DataError("damaged")

    tables = door(damaged, fetch)
    for use in (tables.find, tables.check, tables.get, tables.load):
        with pytest.raises(DataError, match=r"^damaged$"):
            use("x")


def test_every_use_of_an_unknown_name_is_answered_with_the_nearest():
    tables = door(missing)
    for use in (tables.find, tables.check, tables.get, tables.load):
        with pytest.raises(UsageError, match="unknown table 'y'; the nearest names are x"):
            use("y")


def test_unknown_name_is_answered_with_the_nearest():
    assert places.known("a", {"a": 1}, "table") == 1
    with pytest.raises(UsageError, match="unknown table 'yatch'; the nearest names are yacht"):
        places.known("yatch", {"yacht": 1, "wine": 2}, "table")
