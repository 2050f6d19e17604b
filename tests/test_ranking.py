"""The leaderboard's statistics: known answers, laws of every table, and how often intervals hold the truth.

Worlds, and the methods that must fail in them, are those of benchmarks/ranking.py, whose report is committed.
"""

import importlib.util
import json
import sys
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from scipy import special, stats

from bench import intervals
from bench.errors import UsageError
from bench.leaderboard.rank import contrasts
from bench.leaderboard.rank.ranking import Entry, Replicate, across, order, rank

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def worlds():
    """The module benchmarks/ranking.py."""
    sys.path.append(str(BENCHMARKS))
    specification = importlib.util.spec_from_file_location("benchmark_of_ranking", BENCHMARKS / "ranking.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    sys.path.remove(str(BENCHMARKS))
    return module


def entry(name, values, **options):
    """An entry without losses, a value per seed."""
    return Entry(name, [Replicate(value) for value in values], **options)


def with_losses(name, losses, **options):
    """An entry with losses `[S, N]`."""
    return Entry(name, [Replicate(float(row.mean()), row) for row in np.asarray(losses, float)], **options)


def around(mean, spread):
    """Five values with this mean and standard error."""
    return mean + spread * 5**0.5 * np.array([-1.0, -1.0, 0.0, 1.0, 1.0])


def made(seed=0, k=4, seeds=5, examples=40, gap=0.3):
    """Entries with losses, each a gap worse than the one before."""
    g = np.random.default_rng(seed)
    shared = 3 * g.standard_normal(examples)
    return [
        with_losses(
            f"m{e}",
            e * gap + shared + g.standard_normal((seeds, examples)) + 0.2 * g.standard_normal((seeds, 1)),
        )
        for e in range(k)
    ]


def by_name(standing):
    return {place.name: place for place in standing.places}


def limits(interval):
    return pytest.approx((interval.low, interval.high), rel=1e-9)


# ---- known answers


def test_a_cell_is_the_mean_over_seeds_with_students_interval():
    values = [1.0, 2.0, 4.0, 9.0]
    (place,) = rank([entry("a", values)], True).places
    half = stats.t.ppf(0.975, 3) * np.std(values, ddof=1) / 4**0.5
    assert tuple(place.cell) == (4.0, pytest.approx(4 - half), pytest.approx(4 + half), "n = 4")
    assert (place.ranks, place.group, place.why) == ((1, 1), 1, "")


def test_two_entries_without_losses_have_welchs_interval():
    """As scipy and bench.intervals have it."""
    a, b = [1.0, 2.0, 4.0, 9.0], [2.0, 2.5, 2.25]
    found = rank([entry("a", a), entry("b", b)], True).difference("a", "b")
    expected = stats.ttest_ind(a, b, equal_var=False).confidence_interval()
    assert (found.low, found.high) == limits(expected)
    ours = intervals.welch(intervals.Moments.of(a), intervals.Moments.of(b))
    assert (found.low, found.high) == limits(ours)


def test_two_entries_with_losses_by_hand():
    """Mean squares of two analyses of variance and the variance of paired differences, in plain loops."""
    a = np.array([[1.0, 2.0, 4.0, 2.0], [2.0, 2.0, 5.0, 4.0], [4.0, 3.0, 6.0, 5.0]])
    b = np.array([[2.0, 1.0, 9.0, 5.0], [2.0, 3.0, 8.0, 7.0], [1.0, 2.0, 7.0, 1.0]])
    parts, degrees, noise = [], [], 0.0
    for losses in (a, b):
        seeds, examples = losses.shape
        of_seed, of_example, mean = losses.mean(1), losses.mean(0), losses.mean()
        between = examples * sum((m - mean) ** 2 for m in of_seed) / (seeds - 1)
        rest = sum(
            (losses[s, i] - of_seed[s] - of_example[i] + mean) ** 2
            for s in range(seeds)
            for i in range(examples)
        ) / ((seeds - 1) * (examples - 1))
        assert between > rest
        parts.append(between / losses.size)
        degrees.append(seeds - 1)
        noise += rest / losses.size
    differences = a.mean(0) - b.mean(0)
    parts.append(differences.var(ddof=1) / 4 - noise)
    degrees.append(3)
    variance = sum(parts)
    freedom = variance**2 / sum(part**2 / degree for part, degree in zip(parts, degrees, strict=True))
    skewness = (((differences - differences.mean()) ** 3).mean() / 4**2) / variance**1.5
    half = stats.t.ppf(0.975, freedom) * variance**0.5
    found = rank([with_losses("a", a), with_losses("b", b)], False).difference("a", "b")
    assert found.centre == pytest.approx(a.mean() - b.mean())
    assert skewness < 0  # the lower losses have the longer tail: the mean may lie lower than it looks
    assert found.high == pytest.approx(found.centre + half)
    bent = 3 / skewness * (np.cbrt(1 + skewness * (1.959964 - skewness / 6)) - 1)
    assert bent > 1.96
    assert found.low == pytest.approx(found.centre - half * bent / 1.959964)


def test_methods_that_no_seed_moves_are_paired_on_examples_alone():
    """Scipy's paired t, on differences without skewness."""
    difference = np.array([-3.0, -1.0, 0.0, 1.0, 3.0]) + 0.5
    a = np.array([1.0, 5.0, 2.0, 2.0, 7.0])
    entries = [with_losses(n, [x] * 3, seed_matters=False) for n, x in (("a", a), ("b", a - difference))]
    standing = rank(entries, False)
    expected = stats.ttest_rel(a, a - difference).confidence_interval()
    found = standing.difference("a", "b")
    assert (found.low, found.high) == limits(expected)
    assert tuple(by_name(standing)["a"].cell) == (3.4, 3.4, 3.4, "the same for every seed")


def test_overlapping_splits_have_the_corrected_resampled_t():
    """Nadeau and Bengio: the variance of J splits is (1/J + test/train) times theirs."""
    g = np.random.default_rng(0)
    a, b = g.standard_normal((2, 20)) + 3 * g.standard_normal(20)
    standing = rank([entry("a", a), entry("b", b)], True, test_to_train=1 / 9)
    half = stats.t.ppf(0.975, 19) * np.sqrt(1 / 20 + 1 / 9) * (a - b).std(ddof=1)
    found = standing.difference("a", "b")
    centre = (a - b).mean()
    assert tuple(found)[:3] == pytest.approx((centre, centre - half, centre + half))
    assert by_name(standing)["a"].cell.half == pytest.approx(
        stats.t.ppf(0.975, 19) * np.sqrt(1 / 20 + 1 / 9) * a.std(ddof=1)
    )


def test_all_pairs_at_once_are_tukeys_where_variances_are_equal_and_known_well():
    """Five entries of 60 seeds with the same deviations: within the error of 1,000 worlds, 4%."""
    deviations = np.random.default_rng(0).standard_normal(60)
    groups = [deviations + mean for mean in range(5)]
    standing = rank([entry(f"{i}", values) for i, values in enumerate(groups)], True)
    expected = stats.tukey_hsd(*groups).confidence_interval()
    found = standing.difference("0", "1")
    assert found.half == pytest.approx((expected.high - expected.low)[0, 1] / 2, rel=0.04)
    alone = stats.ttest_ind(*groups[:2], equal_var=False).confidence_interval()
    assert found.half > 1.3 * (alone.high - alone.low) / 2
    assert found.basis == "5 entries at once"


@pytest.mark.parametrize("skewness", [-0.5, -1e-9, 0.0, 0.1, 0.6])
def test_halls_transformation_is_undone_by_its_inverse(skewness):
    for deviate in (-4.0, -1.96, 1.0, 3.0):
        t = float(contrasts._bent(deviate, np.array([skewness]))[0])
        back = t + skewness * t**2 / 3 + skewness**2 * t**3 / 27 + skewness / 6
        assert back == pytest.approx(deviate, rel=1e-6)


# ---- laws of a table


def test_order_and_direction():
    """The order in which entries come plays no part; turning all values turns the table."""
    entries = made()
    standing = rank(entries, False)
    assert [place.name for place in standing.places] == ["m0", "m1", "m2", "m3"]
    for changed in permutations(entries):
        again = rank(changed, False)
        assert again.places == standing.places
        np.testing.assert_array_equal(again.low, standing.low)
    turned = [Entry(e.name, [Replicate(-run.value, -run.losses) for run in e.runs]) for e in entries]
    assert [(p.name, p.ranks, p.group) for p in rank(turned, True).places] == [
        (p.name, p.ranks, p.group) for p in standing.places
    ]
    np.testing.assert_allclose(standing.low, -standing.high.T)
    assert standing.difference("m2", "m0").low == pytest.approx(-standing.difference("m0", "m2").high)


def test_separated_entries_have_a_rank_and_a_group_of_their_own():
    entries = [entry(name, around(mean, 0.01)) for name, mean in (("b", 2.0), ("c", 3.0), ("a", 1.0))]
    assert [(p.name, p.ranks, p.group) for p in rank(entries, True).places] == [
        ("c", (1, 1), 1),
        ("b", (2, 2), 2),
        ("a", (3, 3), 3),
    ]


def leaders(standing):
    """Groups that each hold what is not separated from the group's first entry: the way that parts ties."""
    groups, first = [], None
    for i in range(len(standing.low)):
        if first is None or standing.low[first, i] > 0 or standing.high[first, i] < 0:
            first = i
        groups.append(first)
    return groups


def parted_ties(standing, groups):
    """Pairs that are not separated and stand in different groups."""
    is_separated = (standing.low > 0) | (standing.high < 0)
    k = len(groups)
    return [(i, j) for i in range(k) for j in range(i) if groups[i] != groups[j] and not is_separated[i, j]]


def test_a_chain_of_ties_is_one_group_and_ranks_tell_its_ends_apart():
    """Each is tied with its neighbours: no cut is fair. Groups by leader part the second from the third."""
    standing = rank(
        [entry(name, around(mean, 1)) for name, mean in zip("abc", (0, 3, 6), strict=True)], False
    )
    assert [(p.ranks, p.group) for p in standing.places] == [((1, 2), 1), ((1, 3), 1), ((2, 3), 1)]
    assert parted_ties(standing, [p.group for p in standing.places]) == []
    assert parted_ties(standing, leaders(standing)) == [(2, 1)]


def test_ties_are_never_parted_and_ranks_agree_with_groups():
    """Forty tables of eight entries, of unequal spread; groups by leader fail in some."""
    failed = 0
    for seed in range(40):
        g = np.random.default_rng(seed)
        entries = [
            entry(f"{e}", g.normal(g.uniform(0, 6), 10 ** g.uniform(-1, 0.3), size=5)) for e in range(8)
        ]
        standing = rank(entries, True)
        groups = [place.group for place in standing.places]
        assert parted_ties(standing, groups) == []
        assert groups == sorted(groups)
        assert set(groups) == set(range(1, groups[-1] + 1))
        for place in standing.places:
            first, last = groups.index(place.group) + 1, 8 - groups[::-1].index(place.group)
            assert first <= place.ranks[0] <= place.ranks[1] <= last
        failed += bool(parted_ties(standing, leaders(standing)))
    assert failed >= 5


def test_identical_entries_tie():
    entries = made(gap=5.0)
    standing = rank([*entries, Entry("copy", entries[1].runs)], False)
    found = by_name(standing)
    assert found["copy"].ranks == found["m1"].ranks == (2, 3)
    assert found["copy"].group == found["m1"].group
    assert standing.difference("copy", "m1").centre == 0
    assert standing.difference("copy", "m1").sign() == 0


def test_duplicated_seeds_change_nothing():
    """Known by their digest. Copies that are taken for seeds of their own, the control, halve an interval."""
    entries = made(seeds=3)
    named = [
        Entry(e.name, [Replicate(run.value, run.losses, f"{e.name}{i}") for i, run in enumerate(e.runs)])
        for e in entries
    ]
    copied = [Entry(e.name, [*e.runs, *e.runs, e.runs[0]]) for e in named]
    before, after = rank(named, False), rank(copied, False)
    assert before.places == after.places
    np.testing.assert_array_equal(before.high, after.high)
    control = rank([Entry(e.name, [*e.runs] * 3) for e in entries], False)
    assert control.places[0].cell.half < before.places[0].cell.half / 2


def test_two_seeds_and_their_copies_are_two_seeds():
    runs = [
        Replicate(1.0, None, "x"),
        Replicate(2.0, None, "y"),
        Replicate(2.0, None, "y"),
        Replicate(1.0, None, "x"),
    ]
    (_, place) = rank([entry("a", [1, 2, 3]), Entry("b", runs)], True).places
    assert (place.name, place.ranks, place.why) == ("b", None, "runs that differ: 2; needed: 3")
    assert place.cell.centre == 1.5
    assert np.isnan(place.cell.low)


def test_a_method_that_no_seed_moves_is_compared_by_the_seeds_of_the_other():
    """Without losses two such methods have nothing that varies, and are never separated."""
    constant = [entry(name, [x] * 3, seed_matters=False) for name, x in (("c", 5.0), ("d", 9.0))]
    standing = rank([entry("a", [1.9, 2.0, 2.1]), *constant], True)
    two = rank([entry("a", [1.0, 2.0, 3.0]), constant[0]], True)
    found, expected = two.difference("c", "a"), stats.t.ppf(0.975, 2) / 3**0.5
    assert (found.low, found.high) == pytest.approx((3 - expected, 3 + expected))
    assert np.isnan(standing.difference("d", "c").low)
    assert by_name(standing)["d"].ranks == (1, 2)
    twice = {"t": standing, "u": standing}
    overall = across(twice, dict.fromkeys(twice, ("c", "a"))).standing
    assert np.isnan(overall.difference("d", "c").low)  # nor across tasks
    # Where the task's own chance moves it, its runs are seeds like others.
    (place,) = rank([entry("a", [1.0, 2.0, 3.0], seed_matters=False)], True).places
    assert place.cell.basis == "n = 3"


def test_a_diverged_seed_is_counted_and_never_ranked():
    """Not even where the others are the best: their mean is shown, without an interval."""
    standing = rank(
        [entry("a", [1.0, 2.0, 3.0]), entry("b", [9.0, None, 9.5, 9.1]), entry("c", [None] * 3)], True
    )
    a, b, c = standing.places
    assert (a.name, a.ranks, a.group) == ("a", (1, 1), 1)
    assert (b.name, b.ranks, b.group, b.why) == ("b", None, None, "1 of 4 runs gave no value")
    assert b.cell.centre == pytest.approx(9.2)
    assert np.isnan([b.cell.low, b.cell.high]).all()
    assert (c.name, c.cell, c.why) == ("c", None, "3 of 3 runs gave no value")


@pytest.mark.parametrize("higher_is_better", [True, False])
def test_none_is_last_in_both_directions(higher_is_better):
    found = sorted([None, 2.0, None, -1.0, 0.0], key=lambda value: order(value, higher_is_better))
    assert found == [*sorted([2.0, -1.0, 0.0], reverse=higher_is_better), None, None]
    entries = [entry("a", [None]), entry("b", [1.0]), entry("c", [2.0])]
    names = [place.name for place in rank(entries, higher_is_better).places]
    assert names == (["c", "b", "a"] if higher_is_better else ["b", "c", "a"])


def test_equal_values_of_different_runs_are_no_certainty():
    """A coarse metric may give three seeds one value. Nothing varies, so nothing is separated."""
    standing = rank([entry("a", [0.9] * 3), entry("b", [0.8] * 3)], True)
    assert [place.ranks for place in standing.places] == [(1, 2), (1, 2)]


def test_nobody_and_one():
    assert rank([], True).places == ()
    assert rank([entry("a", [None])], True, test_to_train=0.1).places[0].cell is None
    assert rank([entry("a", [1.0, 2.0])], True).places[0].ranks is None


@pytest.mark.parametrize(
    ("entries", "options", "line"),
    [
        ([entry("a", [1, 2, 3])] * 2, {}, "an entry is given twice"),
        ([entry("a", [1, 2, np.inf])], {}, "a: a value is not finite; where a run gave none it is None"),
        ([Entry("a", [Replicate(1.0, np.zeros(4))] * 3)], {}, "a: the losses of a run have another mean"),
        ([Entry("a", [Replicate(0.0, np.zeros(4)), Replicate(0.0)])], {}, "a: its runs have losses of diff"),
        ([*made(k=1), entry("b", [1, 2, 3])], {}, "losses of different examples, or some have none"),
        ([*made(k=1), with_losses("b", np.eye(3))], {}, "losses of different examples, or some have none"),
        ([entry("a", [1] * 5), entry("b", [1] * 4)], {"test_to_train": 0.1}, "different numbers of splits"),
    ],
)  # fmt: skip
def test_bad_input_is_one_clear_line(entries, options, line):
    with pytest.raises(UsageError) as info:
        rank(entries, True, **options)
    assert line in str(info.value)
    assert "\n" not in str(info.value)


# ---- across tasks


ANCHORS = {"t": ("m3", "m0"), "u": ("m3", "m0")}


def two_tasks(**options):
    return {"t": rank(made(1, gap=2.0, **options), False), "u": rank(made(2, gap=2.0, **options), False)}


def test_anchors_are_0_and_1_and_others_lie_between():
    standings = two_tasks()
    found = across(standings, ANCHORS)
    assert not found.left_out
    for of_task in found.scores.values():
        assert tuple(of_task["m3"])[:3] == (0, 0, 0)
        assert tuple(of_task["m0"])[:3] == (1, 1, 1)
        assert 0 < of_task["m2"].low < of_task["m2"].centre < of_task["m1"].centre < of_task["m1"].high < 1
    places = found.standing.places
    assert [place.name for place in places] == ["m0", "m1", "m2", "m3"]
    assert places[1].cell.centre == pytest.approx(np.mean([of["m1"].centre for of in found.scores.values()]))
    half = np.sqrt(sum(of["m1"].half ** 2 for of in found.scores.values())) / 2
    assert places[1].cell.half == pytest.approx(half, rel=0.1)  # independent tasks; degrees of freedom differ
    assert found.standing.difference("m1", "m2").centre == pytest.approx(
        places[1].cell.centre - places[2].cell.centre
    )


def fieller(x, base, top, values):
    """Fieller's limits of (x - base) / (top - base), from means and independent variances of means."""
    (mx, vx), (mb, vb), (mt, vt) = (
        (values[n].mean(), values[n].var(ddof=1) / len(values[n])) for n in (x, base, top)
    )
    z = special.ndtri(0.975)
    above, below = mx - mb, mt - mb
    a = below**2 - z**2 * (vt + vb)
    b = above * below - z**2 * vb
    c = above**2 - z**2 * (vx + vb)
    root = np.sqrt(b**2 - a * c)
    return (b - root) / a, (b + root) / a


def test_scores_have_fiellers_limits_where_anchors_are_far_apart():
    """400 seeds, so that degrees of freedom play no part: within 4% of the width."""
    g = np.random.default_rng(0)
    values = {name: g.normal(mean, 1.0, 400) for name, mean in (("base", 0), ("x", 1.6), ("top", 2))}
    standing = rank([entry(name, of) for name, of in values.items()], True)
    found = across({"t": standing}, {"t": ("base", "top")}).scores["t"]["x"]
    low, high = fieller("x", "base", "top", values)
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.04 * (high - low))


def test_no_rival_moves_a_score():
    standings = two_tasks()
    fewer = {
        task: rank(made(seed, gap=2.0)[:2] + made(seed, gap=2.0)[3:], False)
        for task, seed in (("t", 1), ("u", 2))
    }
    assert across(standings, ANCHORS).scores["t"]["m1"] == across(fewer, ANCHORS).scores["t"]["m1"]
    assert (
        standings["t"].difference("m0", "m1").half > fewer["t"].difference("m0", "m1").half
    )  # but that does


def hostile(number, honest, generator):
    """An entry as a stranger may hand it in: tiny, huge, constant, skewed, or nearly a copy of another."""
    scale = 10.0 ** generator.uniform(-12, 14)
    losses = scale * generator.standard_cauchy((3, honest.shape[1]))
    match number % 4:
        case 1:
            losses[:] = scale
        case 2:
            losses = honest[:3] * scale
        case 3:
            losses = honest[:3] + 1e-9 * generator.standard_normal(honest[:3].shape)
    return with_losses(f"stranger{number}", losses)


def test_no_other_entry_moves_what_two_entries_say_of_each_other():
    """Fifty arbitrary entries beside four honest ones.

    Of every honest pair the difference, its variance, freedom and skewness stay bit for bit. Only the joint
    level is wider, by what more pairs ask for: for a normal deviate of 6 pairs, 2.6, at most that of 1431
    pairs, by Sidak 4.1, and a tenth for simulation.
    """
    generator = np.random.default_rng(5)
    losses = generator.normal(np.arange(4)[:, None, None], 1, (4, 3, 200))
    honest = [with_losses(f"honest{number}", of) for number, of in enumerate(losses)]
    alone = rank(honest, False)
    assert [place.name for place in alone.places] == [e.name for e in honest]
    strangers = [hostile(number, losses[number % 3], generator) for number in range(50)]
    both = rank([*honest, *strangers], False)

    def said(standing, first, second):
        names = standing.evidence.names
        weights = np.eye(len(names))[[names.index(first)]] - np.eye(len(names))[[names.index(second)]]
        moments, _ = contrasts._moments(standing.evidence, weights, weights @ standing.evidence.paired)
        return [standing.difference(first, second).centre, *(float(part[0]) for part in moments)]

    for first, second in permutations((e.name for e in honest), 2):
        assert said(alone, first, second) == said(both, first, second)
        before, after = (standing.difference(first, second) for standing in (alone, both))
        assert before.half <= after.half < 1.1 * before.half * 4.1 / 2.4
    separated = lambda standing: {  # noqa: E731
        (a.name, b.name)
        for a in honest
        for b in honest
        if a is not b and standing.difference(a.name, b.name).sign()
    }
    assert separated(alone) == separated(both)


def test_one_entry_of_1e12_leaves_the_level_as_it_is():
    """Its covariances once swallowed those of the others, whose limits became infinite."""
    generator = np.random.default_rng(6)
    losses = generator.normal(np.arange(4)[:, None, None], 1, (4, 3, 200))
    losses[3] *= 1e12
    entries = [with_losses(f"method{number}", of) for number, of in enumerate(losses)]
    others = rank(entries[:3], False).difference("method0", "method2")
    beside = rank(entries, False).difference("method0", "method2")
    assert beside.half < 1.3 * others.half


def test_only_complete_rows_are_compared():
    standings = two_tasks() | {"u": rank([*made(2, gap=2.0)[::3], entry_missing("m1")], False)}
    found = across(standings, ANCHORS).standing.places
    assert [(place.name, place.ranks, place.why) for place in found] == [
        ("m0", (1, 1), ""),
        ("m3", (2, 2), ""),
        ("m1", None, "1 of 2 tasks"),
        ("m2", None, "1 of 2 tasks"),
    ]


def entry_missing(name):
    """An entry with a seed that diverged."""
    losses = np.zeros(40)
    return Entry(name, [Replicate(0.0, losses), Replicate(0.0, losses), Replicate(None)])


def test_tasks_whose_anchors_give_no_scale_are_left_out():
    standings = two_tasks() | {"close": rank(made(gap=0.05), False), "lost": rank(made(k=2), False)}
    found = across(standings, ANCHORS | {"close": ("m3", "m0"), "lost": ("m3", "m0")})
    assert list(found.scores) == ["t", "u"]
    assert found.left_out["lost"] == "baseline or reference is not compared"
    assert found.left_out["close"].startswith("reference minus baseline is -0.")
    nothing = across({"close": standings["close"]}, {"close": ("m3", "m0")})
    assert [place.why for place in nothing.standing.places] == ["0 of 0 tasks"] * 4


# ---- how often intervals hold the truth


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.1, 0.9])
@pytest.mark.parametrize("seeds", [3, 5, 10])
def test_cells_and_ranks_hold_the_truth(worlds, seeds, share):
    """Five equal entries: coverage at least 0.93 of 0.95, where seeds dominate (0.1) and where examples do.

    1,000 worlds; false alarm at a true coverage of 0.95: 0.3% a number (binomial).
    """
    found = worlds.judged(worlds.by_rank, worlds.normal_worlds(1000, seeds, share, [0.0] * 5))
    assert found["cells"] >= worlds.COVERAGE
    assert found["ranks"] >= worlds.COVERAGE
    assert found["ranks"] <= 0.98  # wider than needed is a loss of power
    percentiles = worlds.judged(worlds.by_percentiles, worlds.normal_worlds(200, seeds, share, [0.0] * 5))
    assert percentiles["cells"] < worlds.COVERAGE


@pytest.mark.slow
@pytest.mark.parametrize(("part", "share"), [("seeds", 0.9), ("examples", 0.1)])
def test_one_part_of_the_variance_and_one_pair_at_a_time_do_not_hold_it(worlds, part, share):
    """Negative controls: the part that does not dominate alone, and intervals of one pair by itself."""
    for judge in (worlds.by_t(part), worlds.by_t("seeds", pairs=1)):
        found = worlds.judged(judge, worlds.normal_worlds(200, 5, share, [0.0] * 5))
        assert found["ranks"] < 0.87


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.1, 0.9])
def test_five_standard_errors_are_seen(worlds, share):
    """Five seeds, five entries, the last one five standard errors worse: separated from the first in 80%.

    1,000 worlds; in 3,000 others 0.827 where seeds dominate: false alarm 2% (binomial). Who never separates,
    or does not pair on examples, does not see them.
    """
    means = [0.0] * 4 + [5.0]
    found = worlds.judged(worlds.by_rank, worlds.normal_worlds(1000, 5, share, means))
    assert found["power"] >= worlds.POWER
    for judge in (worlds.by_nothing, worlds.by_t("unpaired")):
        assert worlds.judged(judge, worlds.normal_worlds(100, 5, share, means))["power"] < worlds.POWER


@pytest.mark.slow
@pytest.mark.parametrize("tails", [[0.2, 0.5, 0.8, 1.0, 1.2], [0.1, 1.5]])
def test_ranks_hold_where_losses_are_skewed(worlds, tails, monkeypatch):
    """Lognormal losses, tails of unequal length: at least 0.90. Not bent, intervals hold less often.

    1,000 worlds; measured 0.93: false alarm 0.1% (binomial).
    """
    found = worlds.judged(worlds.by_rank, worlds.skewed_worlds(1000, 5, tails))
    assert found["ranks"] >= worlds.COVERAGE_OF_SKEWED
    monkeypatch.setattr(contrasts, "_bent", lambda deviate, skewness: np.full_like(skewness, deviate))
    straight = worlds.judged(worlds.by_rank, worlds.skewed_worlds(300, 5, tails))
    assert straight["ranks"] < found["ranks"] - 0.01


@pytest.mark.slow
def test_noise_is_no_win(worlds):
    """An entry's losses with noise added, eight times: none is separated as better in 93% of worlds or more.

    500 worlds; false alarm at 0.95: 2% (binomial).
    """
    wins = []
    for world in worlds.normal_worlds(500, 5, 0.5, [0.0] * 4):
        g = np.random.default_rng(len(wins))
        first = world.losses[0]
        noisy = [first + g.normal(0, 10, first.shape) + g.normal(0, 1, (5, 1)) for _ in range(8)]
        wins.append(worlds.by_rank(np.stack([first, *noisy])).below[1:, 0].any())
    assert np.mean(wins) <= 0.07


@pytest.mark.slow
def test_ranks_over_overlapping_splits_hold_the_truth():
    """Twenty splits correlated as Nadeau and Bengio assume: test / (test + train). Uncorrected, they do not.

    1,000 worlds of four equal entries; false alarm at 0.95: 0.3% (binomial).
    """
    held = {}
    for ratio in (1 / 9, 0.0):
        kept = []
        for number in range(1000 if ratio else 100):
            g = np.random.default_rng(number)
            values = np.sqrt(0.1) * g.standard_normal((4, 1)) + np.sqrt(0.9) * g.standard_normal((4, 20))
            standing = rank([entry(f"{e}", of) for e, of in enumerate(values)], True, ratio)
            kept.append(not (standing.low > 0).any())
        held[ratio] = np.mean(kept)
    assert held[1 / 9] >= 0.93
    assert held[0.0] < 0.6


@pytest.mark.slow
def test_scores_across_tasks_hold_the_truth(worlds):
    """Two tasks, anchors just far enough apart to give a scale: mean scores and ranks, at least 0.91.

    250 pairs of worlds, most of which give a scale. Measured with 651 pairs: 0.940 and 0.972. False alarm 2%,
    since the three scores of a pair share their anchors. Anchors taken for certain, the control, hold fewer.
    """
    means = np.array([0.0, 4.0, 4.0, 4.0, 25.0])
    truth = (25 - means) / 25
    drawn = worlds.normal_worlds(500, 5, 0.1, means)
    scores, ranks, control = [], [], []
    for pair in zip(drawn, drawn, strict=True):  # two at a time
        standings = {
            str(i): rank([with_losses(f"{e}", of) for e, of in enumerate(world.losses)], False)
            for i, world in enumerate(pair)
        }
        found = across(standings, dict.fromkeys(standings, ("4", "0")))
        if found.left_out:
            continue
        places = by_name(found.standing)
        for e in (1, 2, 3):
            cell = places[f"{e}"].cell
            scores.append(cell.low <= truth[e] <= cell.high)
            ranks.append(places[f"{e}"].ranks[0] <= 2 and places[f"{e}"].ranks[1] >= 4)
            halves = [by_name(standing)[f"{e}"].cell.half / 25 for standing in standings.values()]
            half = np.hypot(*halves) / 2 * stats.t.ppf(0.975, 8) / stats.t.ppf(0.975, 4)
            control.append(abs(cell.centre - truth[e]) <= half)
    assert len(ranks) > 500
    assert np.mean(scores) >= 0.91
    assert np.mean(ranks) >= 0.91
    assert np.mean(control) < 0.91


# ---- what is committed


def test_committed_report_keeps_its_targets_but_for_one_row(worlds):
    """Twenty entries of three seeds, where seeds dominate: 0.929, and 0.932 of 2,500 worlds (docs/decisions).

    Sidak's level, which was refused, misses there by far.
    """
    rows = json.loads((BENCHMARKS / "ranking.json").read_text())["rows"]
    assert len(rows) == 27
    (missed,) = [row for row in rows if not worlds.is_kept(row)]
    assert (missed["entries"], missed["seeds"], missed["share"]) == (20, 3, 0.1)
    assert missed["ranks"] > 0.92
    assert missed["ranks by Sidak"] < 0.85


def of_variance(mean, sd, count, rng):
    """So many values of exactly this mean and standard deviation (correction 1)."""
    values = rng.standard_normal(count)
    return mean + sd * (values - values.mean()) / values.std(ddof=1)


@pytest.mark.parametrize(("distance", "sds"), [(0.1, (0.2, 0.2)), (0.2, (0.3, 0.05)), (0.05, (0.1, 0.1))])
def test_so_many_more_seeds_separate_two_entries_and_one_less_does_not(distance, sds):
    """With as many seeds of the same means and variances, by the ranking and by Welch's formula."""
    rng = np.random.default_rng(0)

    def standing(counts):
        return rank(
            [
                Entry(name, [Replicate(float(v)) for v in of_variance(mean, sd, count, rng)])
                for name, mean, sd, count in zip("ab", (0, distance), sds, counts, strict=True)
            ],
            True,
        )

    more = standing((3, 5)).seeds_to_separate("a", "b")
    assert more == int(more) > 0
    for extra, is_separated in ((more, True), (more - 1, False)):
        counts = np.array([3 + extra, 5 + extra]).astype(int)
        found = standing(counts).difference("a", "b")
        assert bool(found.sign()) == is_separated
        parts = np.square(sds) / counts
        freedom = parts.sum() ** 2 / (parts**2 / (counts - 1)).sum()
        welch = stats.t.ppf(0.975, freedom) * parts.sum() ** 0.5
        assert (welch < distance) == is_separated


def test_no_number_of_seeds_separates_what_the_examples_leave_open():
    """Separated entries need none; splits that overlap are no seeds."""
    rng = np.random.default_rng(1)
    examples = rng.normal(size=20)
    losses = {"a": 0 * examples, "b": examples - examples.mean() + 0.05}
    entries = [
        Entry(name, [Replicate(float(x.mean()), x) for x in (row + 1e-4 * s for s in range(5))])
        for name, row in losses.items()
    ]
    assert rank(entries, True).seeds_to_separate("a", "b") == np.inf
    far = [Entry(n, [Replicate(m + 0.1 * s) for s in range(3)]) for n, m in (("a", 0), ("b", 9))]
    assert rank(far, True).seeds_to_separate("a", "b") == 0
    near = [Entry(n, [Replicate(v) for v in values]) for n, values in (("a", (0, 1, 2)), ("b", (1, 0, 2.5)))]
    assert rank(near, True, test_to_train=0.1).seeds_to_separate("a", "b") is None
