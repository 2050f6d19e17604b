"""The estimator's search: it learns from validation values, from nothing else, and a repeat is the same."""

import sys
from math import log10
from zlib import crc32

import pytest
import tunables

from bench.errors import UsageError
from bench.runs import resolution
from bench.runs.plan import Plan
from bench.settings import build
from bench.sweep import tpe, tune

pytest.importorskip("optuna")
SPACE = {"learning_rate": (1e-4, 1.0, "log"), "size": (1, 9, "linear"), "kind": ["a", None, 2]}
METHOD, TASK = "tunables:Obedient", "tunables:Distance"


def distance(values):
    """From the best learning rate in decades, from the best size, and 1 unless the kind is right."""
    return (
        abs(log10(values["learning_rate"]) + 2) + abs(values["size"] - 7) / 8 + (values["kind"] is not None)
    )


def searched(seed, number, round_=1, value=distance, higher=False):
    """The configurations of a search of the function."""
    tried = [(values, value(values)) for values in (tune.draw(SPACE, seed, n) for n in range(tpe.STARTUP))]
    while len(tried) < number:
        for values in tpe.suggested(SPACE, tried, min(round_, number - len(tried)), seed, higher):
            tried.append((values, value(values)))
    return tried


@pytest.mark.parametrize("higher", [False, True])
def test_it_finds_more_than_the_random_search_of_equal_budget(higher):
    """The mean over what it draws, over five seeds; the cheat is told noise and gains at most a third."""
    sign = -1 if higher else 1
    gains, cheats = [], []
    for seed in range(5):
        random = [distance(tune.draw(SPACE, seed, n)) for n in range(tpe.STARTUP, 30)]
        told = searched(seed, 30, value=lambda values: sign * distance(values), higher=higher)
        noise = searched(seed, 30, value=lambda values: crc32(str(values).encode()) % 7)
        later = [distance(values) for values, _ in told[tpe.STARTUP :]]
        gains.append(sum(random) / 20 - sum(later) / 20)
        cheats.append(sum(random) / 20 - sum(distance(values) for values, _ in noise[tpe.STARTUP :]) / 20)
    assert min(gains) > 0
    assert sum(gains) > 3 * abs(sum(cheats))


def test_a_configuration_depends_on_what_came_before_its_round():
    one = searched(3, 18)
    assert searched(3, 18) == one
    assert searched(3, 14) == one[:14]
    rounds = searched(3, 18, 4)
    assert searched(3, 16, 4) == rounds[:16]
    assert rounds != one
    assert len({str(values) for values, _ in rounds}) == 18


def test_values_lie_in_their_ranges_and_keep_their_kind():
    tried = [
        ({"learning_rate": 5.0, "size": 3, "kind": "a"}, 1.0),
        ({"learning_rate": 0.1, "size": 3, "kind": 2}, None),
    ]
    for values in tpe.suggested(SPACE, tried, 20, 0, True):
        assert 1e-4 <= values["learning_rate"] <= 1.0
        assert type(values["size"]) is int
        assert values["kind"] in SPACE["kind"]


@pytest.fixture
def search(tmp_path, monkeypatch):
    """A search of the tunable toy."""
    monkeypatch.setattr(resolution, "TUNED", tmp_path / "tuned")
    monkeypatch.setattr(tpe, "STARTUP", 3)
    tunables.BEGUN.clear()

    def search(budget, name="tpe", **options):
        plan = build(
            Plan, {"method": METHOD, "task": TASK, "out": tmp_path / "runs", "threads": 1, **options}
        )
        return tune.tune(plan, budget, resolution.TUNED, sampler=tune.Sampler(name=name, round=2))

    return search


def test_search_begins_as_the_random_one_and_goes_on_where_it_was(search, tmp_path):
    found = search(6)
    assert (found.budget, found.sampler.name, found.sampler.round) == (6, "tpe", 2)
    random = [tune.draw(tunables.SEARCH, 0, n) for n in range(1, 6)]
    settings = [c.settings for c in found.configurations[1:]]
    assert settings[:2] == random[:2]
    assert settings[2:] != random[2:]
    assert [c.settings for c in search(8).configurations[:6]] == [c.settings for c in found.configurations]
    begun = list((tmp_path / "runs" / "tuning").rglob("standard-seed0/record.json"))
    assert len(begun) == 8  # beside the further seeds of the best
    with pytest.raises(UsageError, match="does not extend it"):
        search(8, "random")


def test_package_that_is_not_installed_is_one_line(search, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    monkeypatch.delitem(sys.modules, "bench.sweep.tpe")
    monkeypatch.delattr("bench.sweep.tpe")
    with pytest.raises(UsageError, match=r"--search tpe needs optuna: pip install 'posterior-bench\[tune\]'"):
        search(12)
