"""kill -9 at every write of commands that keep evidence, and two of each at once: nothing lost, nothing half.

A process of its own ends without another word in the n-th call of the system that writes, for every n there
is. Then what stands is looked at, and the same command goes on. `bench board add` is in test_submitting.py.
"""

import itertools
import json
import os
import random
import shutil
import signal
import time

import pytest
import test_submission
from test_submitting import ended, forked, killed_at

import bench
from bench.errors import UsageError
from bench.leaderboard.evidence import entries, moving, store
from bench.leaderboard.site import pages
from bench.runs.records import read_record
from bench.system import places

CALLS = ["fsync", "replace", "rename", "unlink", "rmdir"]
"""Calls of `os` by which files are written, take their names, and go."""


def told(function, *given, **named):
    """Ends with 0 or, where the command refuses, with 3."""
    try:
        function(*given, **named)
    except UsageError:
        os._exit(3)


def at_every_write(call, function, *given, before=lambda: None, **named):
    """Kills a command in each of its calls of one name in turn; gives what it ended with, then."""
    for number in itertools.count(1):
        before()
        status = ended(forked(killed_at, number, call, function, *given, **named))
        yield status
        if status == 0:
            return
        assert status == 9


def hidden(folder):
    """What is left beside files and folders that took their names."""
    return [path.name for path in folder.rglob(".*")]


# ------------------------------------------------------------------------------------------ bench store push

CONTENT = {f"t/m/seed{seed}": bytes([seed]) * 100_000 for seed in range(3)}


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A leaderboard with a submission of three runs, whose arrays are in the store."""
    monkeypatch.setattr(places, "CACHE_ROOT", tmp_path / "cache")
    slug = tmp_path / "root" / "submissions" / "my-method"
    slug.mkdir(parents=True)
    files = {f"{run}/arrays.safetensors": store.sha256(content) for run, content in CONTENT.items()}
    test_submission.write(slug, files=files)
    for content in CONTENT.values():
        store.keep(content, tmp_path / "root" / "store")
    return tmp_path / "root"


def pushed(place):
    """How many objects stand in a place; each is whole."""
    found = [path for path in place.rglob("*.safetensors") if not path.name.startswith(".")]
    for path in found:
        assert store.sha256(path.read_bytes()) == path.stem
    return len(found)


@pytest.mark.parametrize("call", CALLS)
def test_push_that_is_killed_at_any_write_leaves_whole_objects_and_goes_on(root, tmp_path, call):
    place, url = tmp_path / "place", f"file://{tmp_path / 'place'}"
    seen = set()
    for status in at_every_write(
        call, moving.push, url, root, before=lambda: shutil.rmtree(place, ignore_errors=True)
    ):
        seen.add(pushed(place))
        assert status == 9 or seen == {*seen, 3}
        moving.push(url, root)
        assert pushed(place) == 3
        assert hidden(place) == []
    if call == "replace":
        assert seen == {0, 1, 2, 3}


def test_push_that_is_killed_at_any_time_leaves_whole_objects(root, tmp_path):
    """By the signal itself, at times that are drawn: a write may be anywhere."""
    place, url = tmp_path / "place", f"file://{tmp_path / 'place'}"

    def again():
        while True:
            moving.push(url, root, force=True)

    times = random.Random(0)
    for _ in range(10):
        child = forked(again)
        time.sleep(times.uniform(0, 0.05))
        os.kill(child, signal.SIGKILL)
        assert ended(child) == -signal.SIGKILL
        pushed(place)
    moving.push(url, root)
    assert pushed(place) == 3
    assert hidden(place) == []


def test_two_pushes_at_once_are_one_after_the_other(root, tmp_path):
    place, url = tmp_path / "place", f"file://{tmp_path / 'place'}"

    def again():
        for _ in range(20):
            moving.push(url, root, force=True)

    children = [forked(again) for _ in range(2)]
    assert [ended(child) for child in children] == [0, 0]
    assert pushed(place) == 3
    assert hidden(place) == []


# ------------------------------------------------------------------------------------------ bench record add


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    """Two runs of one name, told apart by each of their files."""
    folder = tmp_path_factory.mktemp("runs")
    old = bench.run("map", "split_digits", preset="smoke", out=folder / "old").directory
    new = folder / "new" / old.name
    shutil.copytree(old, new)
    record = json.loads((old / "record.json").read_text())
    (new / "record.json").write_text(json.dumps(record | {"seconds": record["seconds"] + 1}))
    curves = (old / "curves.csv").read_text().splitlines()
    (new / "curves.csv").write_text("\n".join(curves[:-1]) + "\n")
    (new / "arrays.safetensors").write_bytes((old / "arrays.safetensors").read_bytes() + b"new")
    return old, new


@pytest.fixture
def evidence(two_runs, monkeypatch):
    """Runs that count as evidence, whatever source they are from."""
    monkeypatch.setattr(entries, "refuse", lambda *_: None)
    return two_runs


def added(to, runs):
    """Which of the runs stands among the records, whole; None if none does."""
    (record,) = [*to.glob("*/*/seed0/record.json")] or [None]
    if record is None:
        return None
    arrays = record.with_name("arrays.safetensors").read_bytes()
    which = [(run / "arrays.safetensors").read_bytes() for run in runs].index(arrays)
    assert read_record(record.parent).seconds == read_record(runs[which]).seconds
    curves = len((runs[which] / "curves.csv").read_text().splitlines())
    assert len(record.with_name("curves.csv").read_text().splitlines()) == curves
    return which


@pytest.mark.parametrize("call", CALLS)
def test_record_that_is_killed_at_any_write_is_the_old_or_the_new(evidence, tmp_path, call):
    old, new = evidence
    to = tmp_path / "records"
    found = []

    def before():
        shutil.rmtree(to, ignore_errors=True)
        entries.add(old, to)

    for _ in at_every_write(call, entries.add, new, to, True, before=before):
        found.append(added(to, evidence))
        if found[-1] is None:  # between two renames: it stands aside, and the next command brings it back
            with pytest.raises(UsageError, match="is there already"):
                entries.add(new, to)
            assert added(to, evidence) == 0
        entries.add(new, to, force=True)
        assert added(to, evidence) == 1
        assert hidden(to) == []
    assert found[-1] == 1
    if call == "rename":
        assert found == [0, None, 1]


def test_of_two_records_at_once_one_is_kept_and_the_other_refused(evidence, tmp_path):
    """Without --force nothing that was added is replaced, however close the second is."""
    for number in range(10):
        to = tmp_path / str(number)
        children = [forked(told, entries.add, run, to) for run in evidence]
        statuses = [ended(child) for child in children]
        assert sorted(statuses) == [0, 3]
        assert added(to, evidence) == statuses.index(0)
        assert hidden(to) == []


def test_two_records_with_force_are_one_after_the_other(evidence, tmp_path):
    def again(run):
        for _ in range(10):
            entries.add(run, tmp_path, force=True)

    children = [forked(again, run) for run in evidence]
    assert [ended(child) for child in children] == [0, 0]
    assert added(tmp_path, evidence) in (0, 1)
    assert hidden(tmp_path) == []


# ------------------------------------------------------------------------------------------ bench board build


class Pages:
    """The pages of a board that is nothing but a word."""

    def __init__(self, board):
        self.word = board

    def contents(self):
        """Their names and texts."""
        yield from ((f"{folder}/{n}.html", self.word) for folder in ("tasks", "methods") for n in range(3))
        yield "index.html", self.word
        yield pages.MARK, self.word


@pytest.fixture
def boards(monkeypatch):
    """Two boards, a word each."""
    monkeypatch.setattr(pages, "Site", Pages)
    return "old", "new"


def built(out):
    """The word of the pages that stand, all of them and of one board; None if none do."""
    if not out.exists():
        return None
    texts = [path.read_text() for path in out.rglob("*") if path.is_file()]
    assert len(texts) == 8
    (word,) = set(texts)
    return word


@pytest.mark.parametrize("call", CALLS)
def test_board_that_is_killed_at_any_write_is_the_old_or_the_new(boards, tmp_path, call):
    old, new = boards
    out = tmp_path / "site"
    found = []
    for _ in at_every_write(call, pages.write, new, out, before=lambda: pages.write(old, out)):
        found.append(built(out))
        pages.write(new, out)
        assert built(out) == "new"
        assert [path.name for path in tmp_path.iterdir()] == ["site"]
    assert found[-1] == "new"
    if call == "rename":
        assert found == ["old", None, "new"]


def test_two_boards_at_once_are_one_after_the_other(boards, tmp_path):
    out = tmp_path / "site"

    def again(board):
        for _ in range(20):
            pages.write(board, out)

    children = [forked(again, board) for board in boards]
    assert [ended(child) for child in children] == [0, 0]
    assert built(out) in ("old", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["site"]


def test_pages_that_are_removed_before_the_new_ones_stand_are_caught(boards, tmp_path, monkeypatch):
    """The negative control: as it was once, a kill while the older pages go leaves half of them."""
    old, new = boards
    out = tmp_path / "site"

    def careless(directory, fill, force):
        shutil.rmtree(directory, ignore_errors=True)
        fill(directory)

    pages.write(old, out)
    monkeypatch.setattr(pages, "replace_folder", careless)
    assert ended(forked(killed_at, 3, "unlink", pages.write, new, out)) == 9
    with pytest.raises(AssertionError):
        built(out)
