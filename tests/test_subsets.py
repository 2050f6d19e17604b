"""Any subset of the published data sets may be on a machine: each is made up here, of small stand-ins.

A task says what it lacks before anything is trained, and what the tests require is what a task reads.
"""

import itertools
from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from conformance import truth
from published import need, of_task
from toys import Reader

from bench import cifar, data, tables
from bench.errors import DataError
from bench.runs import registry
from bench.studies.pictures import PictureTask
from bench.system import places

PUBLISHED = ("mnist", "fashion_mnist")
SUBSETS = [set(some) for size in range(3) for some in itertools.combinations(PUBLISHED, size)]
PICTURES = [
    name
    for name, entry in registry.tasks().items()
    if issubclass(entry.cls, PictureTask) and entry.fixed["dataset"] in data.SOURCES
]


@pytest.fixture(params=SUBSETS, ids=lambda some: "+".join(sorted(some)) or "none")
def there(request, monkeypatch):
    """A machine with these data sets and those of the package; made up, and small."""
    here, world = request.param, truth.World()

    def lacking(name):
        if name in PUBLISHED and name not in here:
            raise places.NotFound(f"{name} not found")

    def read(reader, name, *arguments, **named):
        lacking(name)
        return world.images(reader, name, *arguments, **named)

    def locate(name, *_):
        lacking(name)
        return name, None

    for name in PUBLISHED:
        monkeypatch.setitem(data.SOURCES, name, small(data.SOURCES[name]))
    for reader in ("load", "unbalanced"):
        monkeypatch.setattr(data, reader, partial(read, reader))
    monkeypatch.setattr(data, "_locate", locate)
    monkeypatch.delenv("BENCH_REQUIRE_DATA", raising=False)
    return here | {name for name, source in data.SOURCES.items() if not source.files}


def small(source):
    """The source with as many examples as the stand-ins have."""
    return replace(source, train=truth.SIZE, test=truth.TEST)


def make(name):
    entry = registry.task(name)
    values = {"dataset": entry.fixed["dataset"], "test_images": 20, "num_train": 50, "test_samples": 2}
    return entry.cls(entry.cls.settings_class(**values))


@pytest.mark.parametrize("name", PICTURES)
def test_what_is_missing_is_said_before_anything_is_trained(name, there):
    """Foreign images too; and where the digest can be had, so can all that the run reads."""
    task = make(name)
    needed = set(of_task(task))
    if needed <= there:
        task.data_digest()
        reader = Reader(task.num_classes)
        task.run(reader)
        assert len(reader.problems) == 1
        return
    with pytest.raises(DataError, match=f"({'|'.join(needed - there)}) not found"):
        task.data_digest()


@pytest.mark.parametrize("name", PICTURES)
def test_a_test_runs_where_its_data_are_there_and_is_skipped_elsewhere(name, there, monkeypatch):
    """Negative control: in CI it fails instead."""
    needed = of_task(make(name))
    if set(needed) <= there:
        need(*needed)
        return
    with pytest.raises(pytest.skip.Exception):
        need(*needed)
    monkeypatch.setenv("BENCH_REQUIRE_DATA", "1")
    with pytest.raises(pytest.fail.Exception):
        need(*needed)


def test_tasks_with_foreign_images_are_among_those_tried():
    """Each of the two sets is foreign to a task on the other."""
    foreign = {(make(name).settings.dataset, other) for name in PICTURES for other in make(name).foreign}
    assert {("mnist", "fashion_mnist"), ("fashion_mnist", "mnist")} <= foreign


# ---- tables and photographs

TABLES = [name for name, source in tables.SOURCES.items() if source.folder]
ALONE = {*TABLES, *cifar.SOURCES, *PUBLISHED, "retinopathy", "retinamnist", "retinopathy_aptos"}
"""Data sets that come with no package."""
ELSEWHERE = [name for name, entry in registry.tasks().items() if entry.fixed.get("dataset") in ALONE]


@pytest.fixture
def nowhere(tmp_path, monkeypatch):
    """A machine without any data, and without internet; returns the folder where they are looked for."""
    for root in ("CACHE_ROOT", "SYSTEM_ROOT"):
        monkeypatch.setattr(places, root, tmp_path / root)
    for door in (data._IMAGES, cifar._PICTURES, tables._TABLES):
        monkeypatch.setattr(door, "_fetch", lambda *_: None)
    monkeypatch.setenv("BENCH_DATA", str(tmp_path))
    monkeypatch.delenv("BENCH_REQUIRE_DATA", raising=False)
    return tmp_path


def of_name(name):
    """The task of a name as it stands."""
    entry = registry.task(name)
    return entry.cls(entry.cls.settings_class(**entry.fixed))


def lacks(name):
    """Whether the task says that its data are not found, for its digest and before it fits anything."""
    task, reader = of_name(name), Reader()
    with suppress(DataError):
        task.data_digest()
        return False
    with pytest.raises(DataError, match=f"{task.settings.dataset}( not found|, .* is not prepared)"):
        task.run(reader)
    assert reader.problems == []
    return True


@pytest.mark.parametrize("name", ELSEWHERE)
def test_without_tables_and_photographs_nothing_is_trained(name, nowhere):
    assert lacks(name)


def written(root, name, monkeypatch):
    """A table of this name with few rows, made up, in the layout of the public splits or folds."""
    monkeypatch.setitem(tables.SOURCES, name, replace(tables.SOURCES[name], rows=40, columns=2, digest=""))
    source = tables.SOURCES[name]
    folder = root / source.folder / ("" if source.masks else "data")
    folder.mkdir(parents=True)
    draw = np.random.default_rng(0).normal(size=(40, 2))
    matrix = np.column_stack([draw, np.linspace(*source.target_range, 40)])
    if source.masks:
        np.savetxt(folder / "data.csv.gz", matrix, delimiter=",")
        np.savetxt(folder / "test_mask.csv.gz", np.tile(np.eye(10), (4, 1)), fmt="%d", delimiter=",")
        return
    np.savetxt(folder / "data.txt", matrix)
    (folder / "index_features.txt").write_text("0\n1\n")
    (folder / "index_target.txt").write_text("2\n")


@pytest.mark.parametrize("some", [[], TABLES[:1], TABLES[1::2], TABLES], ids=lambda some: f"{len(some)}")
def test_of_any_subset_of_tables_each_task_finds_its_own(some, nowhere, monkeypatch):
    """That of the package is always there."""
    for name in some:
        written(nowhere, name, monkeypatch)
    of_tables = [name for name in ELSEWHERE if registry.task(name).fixed["dataset"] in TABLES]
    assert len(of_tables) == len(TABLES)
    for name in of_tables:
        assert lacks(name) == (registry.task(name).fixed["dataset"] not in some)
    assert not lacks("diabetes_regression")


@pytest.mark.parametrize("name", [n for n in ELSEWHERE if registry.task(n).fixed["dataset"] in cifar.SOURCES])
def test_a_test_on_photographs_is_skipped_where_they_are_not(name, nowhere, monkeypatch):
    """Negative control: in CI it fails instead."""
    needed = of_task(of_name(name))
    assert needed
    with pytest.raises(pytest.skip.Exception):
        need(*needed)
    monkeypatch.setenv("BENCH_REQUIRE_DATA", "1")
    with pytest.raises(pytest.fail.Exception):
        need(*needed)
