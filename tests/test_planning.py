"""Further seeds: what they would separate, by hand-made pairs and by t intervals; and the command."""

import itertools
import json
import math

import numpy as np
import pytest
from scipy import stats

from bench import cli
from bench.leaderboard.evidence import entries
from bench.leaderboard.rank import ranking
from bench.leaderboard.rank.planning import STEPS, Outlook
from bench.runs.records import read_record, write_record

BY_HAND = Outlook(
    ("a", "b", "c"),
    {("a", "b"): 0, ("a", "c"): 3, ("b", "c"): math.inf},
    {"a": 10.0, "b": 20.0, "c": 40.0},
)


def test_pairs_and_costs_by_hand():
    assert [BY_HAND.separated(more) for more in (0, 2, 3, 100)] == [1, 1, 2, 2]
    assert (BY_HAND.gaining(2), BY_HAND.gaining(3)) == ((), ("a", "c"))
    assert (BY_HAND.cost(2), BY_HAND.cost(3)) == (0, 3 * (10 + 40))
    assert BY_HAND.best_first(3) == [("a", 1, 30.0), ("c", 1, 120.0)]


def entry(name, *values):
    """One of seeds alone."""
    return ranking.Entry(name, [ranking.Replicate(value) for value in values])


def test_two_entries_need_as_many_seeds_as_welch_s_interval_says():
    """Spread s, S seeds each: separated at the first m with t(2 (S + m - 1)) s sqrt(2 / (S + m)) < d."""
    first, second = [1.0, 2.0, 3.0], [2.5, 3.5, 4.5]
    standing = ranking.rank([entry("a", *first), entry("b", *second)], True)
    outlook = Outlook.of(standing, {"a": 1.0, "b": 1.0})
    (needed,) = outlook.needed.values()
    by_hand = next(
        m for m in itertools.count() if stats.t.ppf(0.975, 2 * (3 + m - 1)) * math.sqrt(2 / (3 + m)) < 1.5
    )
    assert needed == pytest.approx(by_hand, abs=1)  # the level of the joint limits is simulated
    assert by_hand > 0


def test_more_seeds_never_separate_fewer():
    generator = np.random.default_rng(0)
    entries_ = [entry(f"m{i}", *generator.normal(0.3 * i, 1, 4)) for i in range(8)]
    outlook = Outlook.of(ranking.rank(entries_, True), {f"m{i}": 1.0 for i in range(8)})
    counts = [outlook.separated(more) for more in (0, *STEPS)]
    assert counts == sorted(counts)
    assert counts[-1] > counts[0]
    assert len(outlook.needed) == 28


@pytest.fixture
def folder(tmp_path):
    """Runs of two methods on split_digits, three seeds each, one second a run."""
    record = read_record(entries.directory_of("split_digits", "map", 0))
    for method, values in (("map", (0.4, 0.5, 0.6)), ("mfvi", (0.6, 0.7, 0.8))):
        for seed, value in enumerate(values):
            named = record.method.model_copy(update={"name": method, "identity": method})
            given = record.provenance.model_copy(update={"arrays_digest": f"{method}{seed}"})
            changed = {"seed": seed, "seconds": 3600.0, "method": named, "provenance": given}
            changed["metrics"] = record.metrics | {record.task.main_metric: value}
            target = tmp_path / "split_digits" / method / f"standard-seed{seed}"
            target.mkdir(parents=True)
            write_record(target, record.model_copy(update=changed))
    return tmp_path


def test_command_tells_pairs_hours_and_the_sweep(folder, capsys):
    assert cli.main(["plan", "split_digits", "--against", str(folder), "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["of"] for row in rows] == [1] * (len(STEPS) + 1)
    assert rows[0]["pairs separated"] == 0
    first = next(row for row in rows if row["pairs separated"])
    assert first["core-hours"] == 2 * first["more seeds"]
    assert cli.main(["plan", "split_digits", "--against", str(folder), "--seeds", "5"]) == 0
    said = capsys.readouterr().out
    assert "bench sweep --methods" in said
    assert said.strip().endswith("--tasks split_digits --seeds 3 4 5 6 7")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["split_digitz"], "no entry of split_digitz"),
        (["split_digits", "--seeds", "0"], "--seeds 0: must be 1 or more"),
    ],
)
def test_what_cannot_be_planned_is_one_line(folder, capsys, arguments, said):
    assert cli.main(["plan", *arguments, "--against", str(folder)]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
