"""Any subset of the published data sets may be on a machine: each is made up here, of small stand-ins.

A task says what it lacks before anything is trained, and what the tests require is what a task reads.
"""

import itertools
from dataclasses import replace
from functools import partial

import pytest
from conformance import truth
from published import need, of_task
from toys import Reader

from bench import data
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
