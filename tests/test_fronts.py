"""Fronts of quality against cost: against an exact enumeration; drawings whose labels cover nothing."""

import importlib
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from bench.intervals import Interval
from bench.leaderboard.rank import fronts
from bench.leaderboard.rank.fronts import Cost, Panel, Point, on_front
from bench.leaderboard.rank.placing import Canvas, Frame, Label
from bench.leaderboard.site import fronts as site

HERE = "a processor, 1 thread"


def enumerated(points):
    """By the definition, pair by pair."""
    return [
        not any(
            cost <= of_cost and loss <= of_loss and (cost, loss) != (of_cost, of_loss)
            for cost, loss in points
        )
        for of_cost, of_loss in points
    ]


@pytest.mark.parametrize("size", [0, 1, 2, 5, 30])
def test_the_front_is_that_of_an_enumeration(size):
    """On small grids, so that costs, losses and whole points tie."""
    for seed in range(100):
        grid = np.random.default_rng(seed).integers(0, 5, (size, 2))
        points = [tuple(point) for point in grid.tolist()]
        assert on_front(points) == enumerated(points), points


def test_ties_by_hand():
    """Equal points stand together; of equal costs the better loss stands, of equal losses the lower cost."""
    assert on_front([(1, 2), (1, 2), (2, 1)]) == [True, True, True]
    assert on_front([(1, 2), (1, 1)]) == [False, True]
    assert on_front([(1, 1), (2, 1)]) == [True, False]


def point(name, seconds, value, machine=HERE, is_accelerated=False, is_tuned=True):
    quality = Interval(value, value - 0.1, value + 0.1, "n = 3")
    return Point(name, Cost(float(seconds), machine, is_accelerated, None), quality, is_tuned, 3)


def panel(points, higher=False):
    return Panel("task", HERE, "loss", higher, sorted(points, key=lambda p: p.cost.seconds))


def test_what_is_better_may_be_higher():
    points = [point("cheap", 1, 0.5), point("dear", 2, 0.9), point("dearest", 3, 0.7)]
    assert [p.name for p in panel(points, higher=True).front] == ["cheap", "dear"]
    assert [p.name for p in panel(points).front] == ["cheap"]


def test_panels_keep_machines_apart():
    """Of most entries first; neither two entries nor ones of several machines make a panel."""
    points = [point(f"a{k}", 1 + k, 1.0) for k in range(3)]
    points += [point(f"b{k}", 1 + k, 1.0, "another, 1 thread") for k in range(4)]
    points += [point(f"c{k}", 1 + k, 1.0, "a third, 2 threads") for k in range(2)]
    points += [point(f"d{k}", 1 + k, 1.0, fronts.SEVERAL) for k in range(9)]
    found = fronts.panels("task", "loss", False, points)
    assert [(p.machine, len(p.points)) for p in found] == [("another, 1 thread", 4), (HERE, 3)]


@pytest.mark.parametrize(
    ("device", "threads", "said", "is_accelerated"),
    [
        ("AMD EPYC", 1, "AMD EPYC, 1 thread", False),
        ("AMD Ryzen 7 with Radeon", 8, "AMD Ryzen 7 with Radeon, 8 threads", False),
        ("Intel(R) Xeon(R) Processor", 2, "Intel(R) Xeon(R) Processor, 2 threads", False),
        ("NVIDIA H200", 1, "NVIDIA H200, 1 thread", True),
        ("Tesla V100-SXM2-16GB", 1, "Tesla V100-SXM2-16GB, 1 thread", True),
        ("AMD Instinct MI250X", 1, "AMD Instinct MI250X, 1 thread", True),
    ],
)
def test_a_machine_is_named_and_an_accelerator_known(device, threads, said, is_accelerated):
    from bench.runs.records import Environment

    versions = {"python": "3", "torch": "2", "pytorch_lightning": "2", "system": "linux"}
    made = Environment(**versions, device=device, threads=threads)
    assert (made.machine, made.is_accelerated) == (said, is_accelerated)


def ran(seconds, steps=8, energy=None):
    """What of a record tells its cost."""
    environment = SimpleNamespace(machine=HERE, is_accelerated=False)
    fits = [SimpleNamespace(seconds=seconds / 2, steps=steps)] * 2
    counted = None if energy is None else SimpleNamespace(joules=energy[0], source=energy[1])
    return SimpleNamespace(fits=fits, environment=environment, energy=counted)


def test_the_cost_of_an_entry_by_hand():
    """Of equal work the fastest seed tells it; of unequal work, as of fits that stop early, the median."""
    assert Cost.of([ran(4.0), ran(10.0), ran(5.0)]) == Cost(4.0, HERE, False, 2.5)
    assert Cost.of([ran(4.0), ran(10.0), ran(5.0, steps=9)]) == Cost(5.0, HERE, False, None)
    assert Cost.of([ran(4.0), ran(0.0)]) is None
    assert Cost.of([]) is None


def test_joules_of_an_entry_are_those_of_all_its_runs_by_the_same_counters():
    """Of some runs alone, or of counters that count other things, they would say nothing."""
    both = [ran(1.0, energy=(joules, "RAPL, 1 package")) for joules in (30.0, 10.0, 20.0)]
    assert Cost.of(both)[-2:] == (20.0, "RAPL, 1 package")
    assert Cost.of([*both, ran(1.0)])[-2:] == (None, "")
    assert Cost.of([*both, ran(1.0, energy=(1.0, "NVML"))])[-2:] == (None, "")


# -------------------------------------------------------------------------------------------------- drawings


def crowd(number, seed=0):
    """Points of long names, most of them close together."""
    rng = np.random.default_rng(seed)
    return [(f"a_method_{i}", *(300 + 60 * rng.standard_normal(2)).tolist()) for i in range(number)]


@pytest.mark.parametrize("number", [3, 24, 200])
def test_labels_cover_no_label_no_point_and_no_line(number):
    """Held to the rectangles themselves; of a crowd some labels have no room, and are left out."""
    points, line = crowd(number), (0.0, 100.0, 600.0, 102.0)
    placed = Canvas(600, 360).labels(points, [line])
    dots = [(x - 4, y - 4, x + 4, y + 4) for _, x, y in points]
    apart = [label.rectangle for label in placed]
    for k, own in enumerate(apart):
        assert 0 <= own[0] < own[2] <= 600
        assert 0 <= own[1] < own[3] <= 360
        for other in [*apart[:k], *dots, line]:
            assert own[2] <= other[0] or other[2] <= own[0] or own[3] <= other[1] or other[3] <= own[1]
    assert len(placed) == number if number < 24 else 3 < len(placed) <= number


def test_a_label_that_is_moved_is_joined_to_its_point():
    near, far = (Label("x", 10.0, y, 5.8, 11.0, (0.0, 50.0)) for y in (50.0, 90.0))
    assert (near.is_away, far.is_away) == (False, True)
    assert far.end == (10.0, 84.5)


SHOWN = [point("cheap", 1, 1.0), point("best", 9, 0.5, is_tuned=False)]
SHOWN += [point(f"middle_{k}", 2 + k, 1.2) for k in range(5)] + [point("lost", 5, 400.0)]


def test_a_frame_has_every_point_but_those_far_away_and_knows_its_pixels():
    frame = Frame.of(panel(SHOWN), Canvas(300, 200))
    assert [p.name for p in SHOWN if not frame.has(p)] == ["lost"]
    for one in SHOWN[:-1]:
        x, y = frame.pixel(one)
        assert 0 < x < 300
        assert 0 < y < 200
        assert frame.value(x, y) == pytest.approx((one.cost.seconds, one.quality.centre))
    assert frame.across(frame.left) == 0
    assert frame.across(frame.right) == 300
    assert frame.across(math.sqrt(frame.left * frame.right)) == pytest.approx(150)


def test_a_dear_point_in_the_margin_lies_inside_the_axes():
    """A little farther from the best than what the frame is made of, and inside its margin for intervals."""
    near = [point("best", 9, 0.5), *(point(f"middle_{k}", 2 + k, 1.2) for k in range(9))]
    edge, dear, lost = point("edge", 4, 2.24), point("dear", 900, 2.3), point("lost", 5000, 3.0)
    frame = Frame.of(panel([*near, edge, dear, lost]), Canvas(300, 200))
    assert [frame.has(one) for one in (edge, dear, lost)] == [True, True, False]
    x, y = frame.pixel(dear)
    assert 0 < x < 300
    assert 0 < y < 200
    assert frame.right < 5000  # what is far away moves nothing


def test_a_figure_shows_every_point_or_says_where_it_is(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "docs")
    pareto = importlib.import_module("parts.pareto")
    from bench import figures

    svg = figures.svg(pareto.chart(panel(SHOWN)), "made up")
    for name in ("cheap", "best", *(f"middle_{k}" for k in range(5))):
        assert f">{name}<" in svg
    assert ">lost<" not in svg
    assert "Outside the frame: lost (400)." in svg
    for said in ("on the front, tuned", "on the front, not tuned", "behind it, tuned"):
        assert f">{said}<" in svg


def row(one, ranks=(1, 2)):
    quality = one.quality
    return {
        "name": one.name,
        "ranks": list(ranks) if ranks else None,
        "cost": one.cost._asdict(),
        "mean": quality.centre,
        "low": quality.low,
        "high": quality.high,
        "basis": "",
        "tuned": one.is_tuned,
        "seeds": 3,
    }


def table(rows, is_ranked=True):
    return {
        "task": "task",
        "metric": "loss",
        "higher_is_better": False,
        "is_ranked": is_ranked,
        "entries": rows,
    }


def test_a_drawing_has_the_ranked_entries_of_one_processor():
    """The cheat that it must see: seconds of an accelerator, which would be the front alone."""
    fast = point("fast", 0.01, 0.1, HERE, is_accelerated=True)
    away = point("away", 0.01, 0.1, "another, 1 thread")
    rows = [row(one) for one in (*SHOWN, fast, away)] + [row(point("fifth", 0.01, 0.1), ranks=None)]
    found = site.panel_of(table(rows))
    assert {p.name for p in found.points} == {p.name for p in SHOWN}
    assert [p.name for p in found.front] == ["cheap", "best"]
    drawn = site.drawing(found, table(rows))
    assert drawn.elsewhere == ["fast", "away"]
    assert drawn.outside == [("lost", 400.0)]
    assert [dot.name for dot in drawn.dots if dot.is_on_front] == ["cheap", "best"]
    assert [label.name for label in drawn.labels] == ["cheap", "best"]
    assert "on the front: cheap at 1 seconds, best at 9 seconds" in drawn.says
    as_processor = [row(p._replace(cost=p.cost._replace(is_accelerated=False))) for p in (*SHOWN, fast)]
    assert [p.name for p in site.panel_of(table(as_processor)).front] == ["fast"]  # negative control


def test_no_drawing_of_too_few_or_of_what_is_not_ranked():
    rows = [row(one) for one in SHOWN]
    assert site.panel_of(table(rows[:2])) is None
    assert site.panel_of(table(rows, is_ranked=False)) is None
    assert site.panel_of(table([of | {"cost": None} for of in rows])) is None


@pytest.mark.parametrize(("low", "high"), [(1.0, 2.4), (3.0, 700.0), (0.2, 1e5), (44.0, 120.0)])
def test_ticks_of_costs_are_few_round_and_inside(low, high):
    found = site._decades(low, high)
    assert 1 <= len(found) <= 6
    assert all(low <= at <= high and float(f"{at:.1e}") == pytest.approx(at) for at in found)


@pytest.mark.parametrize(("low", "high"), [(0.2, 0.95), (-5.66, -5.48), (0.0011, 0.0012), (-300, 900)])
def test_ticks_of_values_say_where_they_are(low, high):
    found = site._round(low, high)
    assert 2 <= len(found) <= 7
    for at, said in found:
        assert low <= at <= high
        assert float(said) == pytest.approx(at, abs=1e-9)


def test_who_is_on_how_many_fronts_by_hand():
    one = panel([point("a", 1, 2.0), point("b", 2, 1.0), point("c", 4, 3.0)])
    other = panel([point("a", 10, 1.0), point("c", 80, 0.5), point("d", 10, 2.0)])._replace(task="other")
    found = site.standings([one, other])
    assert [(of.name, of.times, of.fronts, len(of.seconds)) for of in found] == [
        ("a", 1.0, 2, 2),
        ("d", 1.0, 0, 1),
        ("b", 2.0, 1, 1),
        ("c", 6.0, 1, 2),
    ]
    assert site.rows(found, ["task", "other"])[3] == {
        "entry": "c",
        "times the cheapest": 6.0,
        "fronts": 1,
        "panels": 2,
        "task": 4.0,
        "other": 80.0,
        "on the front of": ["other"],
    }
