"""Several runs together: figures, and sentences that are said only where an interval shows them."""

import json

import numpy as np
import pytest

import bench
from bench import figures, intervals
from bench.cli import main
from bench.contract import FinishedRun
from bench.errors import UsageError
from bench.studies import active, active_comparison, testing

POINTS = np.array([10, 13, 16])


def learning(plain, pure=None, lure=None):
    """A trajectory with these mean test NLLs."""
    values = [plain, plain if pure is None else pure, plain if lure is None else lure]
    nll = np.array(values)[None] + np.array([[0.1], [0.0], [-0.1]])
    risks = np.repeat(nll[..., None] - 0.2, 3, 2)
    return active.Learning(POINTS, nll, np.full((3, 3), 0.5), risks)


class Measured:
    """A task that says of any arrays that they measured `found`."""

    def __init__(self, found):
        self.found = found

    def measured(self, arrays):
        """The same of any arrays."""
        return self.found


def finished(task, method, seed, found, variant=""):
    """A run that measured `found`."""
    identity = f"{task}+{variant}" if variant else task
    return FinishedRun(Measured(found), task, identity, method, method, "standard", seed)


def runs(variant="", **lines):
    """Runs of a task, a line's trajectories in the order of their seeds."""
    return [
        finished("active_mnist", line, seed, found, variant)
        for line, trajectories in lines.items()
        for seed, found in enumerate(trajectories)
    ]


NOISE = np.array([0.01, -0.01, 0.02, -0.02])


def said(*given):
    """The sentences of a comparison."""
    return active_comparison.compare_learning([run for part in given for run in part]).sentences


def flips(sentences):
    return [s for s in sentences if "flips" in s]


def test_flip_is_said_where_both_intervals_exclude_no_difference():
    a = [learning(1.0 + e, lure=1.5 - e, pure=1.0 + e) for e in NOISE]
    b = [learning(1.2, lure=1.2) for _ in NOISE]
    sentences = said(runs(radial=a, mc_dropout=b))
    assert flips(sentences) == [
        "active_mnist: removing the bias flips the order of mc_dropout and radial (LURE against R~)"
    ]
    assert any("both with R~, is 0.2" in s and s.endswith(": radial is better") for s in sentences)
    assert any("both with LURE, is -0.3" in s and s.endswith(": mc_dropout is better") for s in sentences)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ([learning(1.0 + 30 * e, lure=1.5) for e in NOISE], [learning(1.2, lure=1.2)] * 4),  # R~ too noisy
        ([learning(1.0, lure=1.5 + 30 * e) for e in NOISE], [learning(1.2, lure=1.2)] * 4),  # LURE too noisy
        ([learning(1.0 + e, lure=1.1) for e in NOISE], [learning(1.2, lure=1.2)] * 4),  # no other order
        ([learning(1.0, lure=1.5)] * 2, [learning(1.2, lure=1.2)] * 2),  # too few
    ],
)
def test_flip_is_not_said_otherwise(a, b):
    assert not flips(said(runs(radial=a, mc_dropout=b)))


def test_differences_are_paired_by_seed():
    """Seeds differ by much more than the two methods, by less than nothing when paired."""
    base = 1 + 100 * NOISE
    a = [learning(x) for x in base]
    b = [learning(x + 0.05 + e / 10) for x, e in zip(base, NOISE, strict=True)]
    (sentence,) = [s for s in said(runs(a=a, b=b)) if "both with R~" in s]
    assert sentence.endswith("a is better")
    shuffled = [finished("active_mnist", "b", seed, b[(seed + 1) % 4]) for seed in range(4)]
    (sentence,) = [s for s in said(runs(a=a), shuffled) if "both with R~" in s]
    assert sentence.endswith("no difference shown")


def test_interval_of_a_cost_is_students():
    costs = np.array([0.1, 0.3, 0.2, 0.25])
    (sentence,) = [s for s in said(runs(a=[learning(1, lure=1 + c) for c in costs])) if "LURE minus" in s]
    low, high = 0.2125 - 3.1824 * costs.std(ddof=1) / 2, 0.2125 + 3.1824 * costs.std(ddof=1) / 2
    assert sentence.startswith("active_mnist, a: LURE minus R~ in mean test NLL is 0.2125 (")
    shown = sentence.split("(")[1].split(",")[0].split(" to ")
    assert [float(x) for x in shown] == pytest.approx([low, high], abs=1e-4)
    assert sentence.endswith("n = 4): it costs")


def test_two_runs_have_no_interval():
    (sentence,) = [s for s in said(runs(a=[learning(1, lure=2)] * 2)) if "LURE minus" in s]
    assert "n = 2: no interval below 3" in sentence
    assert sentence.endswith("no difference shown")


def test_runs_of_other_tasks_are_compared_apart_and_doubles_are_refused():
    found = runs(a=[learning(1.0)] * 3)
    other = [finished("active_fashion_mnist", "b", run.seed, run.task.found) for run in found]
    compared = active_comparison.compare_learning(found + other)
    sentences = compared.sentences
    assert {name.rpartition("-")[0] for name in compared.charts} == {"active_mnist", "active_fashion_mnist"}
    assert not any("minus b" in s or "a minus" in s for s in sentences)
    with pytest.raises(UsageError, match="active_mnist, a: seed 0 is given twice"):
        active_comparison.compare_learning(found + found[:1])
    long = learning(1.0)
    short = active.Learning(POINTS[:2], long.nll[:2], long.accuracy[:2], long.risks[:2])
    with pytest.raises(UsageError, match="different numbers of points"):
        active_comparison.compare_learning([*found, finished("active_mnist", "c", 0, short)])


def test_variants_are_compared_one_change_at_a_time_and_never_flip():
    a = [learning(1.0 + e, lure=1.5 - e) for e in NOISE]
    b = [learning(1.2, lure=1.2) for _ in NOISE]
    sentences = said(runs(radial=a), runs("balanced=true", radial=b, mc_dropout=b))
    pairs = {s.split(" in mean")[0] for s in sentences if "both with R~" in s}
    assert pairs == {
        "active_mnist: radial minus radial, balanced=true",
        "active_mnist: mc_dropout, balanced=true minus radial, balanced=true",
    }
    assert not flips(sentences)


def test_bands_are_standard_errors_and_figures_say_so(tmp_path):
    trajectories = [learning(1.0 + e, lure=1.1) for e in NOISE]
    charts = active_comparison.compare_learning(runs(radial=trajectories, mc_dropout=trajectories)).charts
    assert charts.keys() == {"active_mnist-nll", "active_mnist-accuracy", "active_mnist-overfitting_bias"}
    chart = charts["active_mnist-nll"].to_dict()
    assert "band: 1 standard error" in json.dumps(chart)
    own = intervals.band(np.stack([t.nll[:, 0] for t in trajectories]), "standard_error")
    values = [row for data in walk(chart) for row in data if row.get("series") == "R~"]
    assert {round(v["low"], 9) for v in values} == {round(float(x), 9) for x in own.low}
    assert len(figures.save(charts, tmp_path, "footer")) == 6


def walk(chart):
    """All lists of values in a chart."""
    if isinstance(chart, dict):
        for key, value in chart.items():
            if key == "values" and isinstance(value, list):
                yield value
            else:
                yield from walk(value)
    elif isinstance(chart, list):
        for value in chart:
            yield from walk(value)


# ---- active testing

SIZE = 60


def models(follow, seed=0, trajectories=400):
    """Two models whose scores follow their losses by as much."""
    rng = np.random.default_rng(seed)
    losses = rng.gamma(0.5, 1, SIZE)
    scores = follow * losses + (1 - follow) * rng.permutation(losses)
    found = testing.simulate(losses, scores, 20.0, trajectories, 20)
    return {"full": found, "small": found}


def trials(**lines):
    """Runs of active testing."""
    return [
        finished("active_testing_mnist", line, seed, found)
        for line, models in lines.items()
        for seed, found in enumerate(models)
    ]


def said_of_testing(given):
    """The sentences of a comparison."""
    return active_comparison.compare_testing(given).sentences


def test_guidance_is_said_where_the_interval_excludes_one():
    sentences = said_of_testing(trials(good=[models(1.0)], blind=[models(0.0)]))
    good = [s for s in sentences if ", good, seed 0" in s and "proportional" in s]
    blind = [s for s in sentences if ", blind, seed 0" in s and "proportional" in s]
    assert len(good) == len(blind) == 1
    assert good[0].endswith("it guides better")
    assert not blind[0].endswith("it guides better")
    same = said_of_testing(
        trials(
            none=[{m: testing.simulate(np.arange(9.0), np.zeros(9), 1.0, 50, 4) for m in ("full", "small")}]
        )
    )
    assert all(s.endswith("no difference shown") for s in same)


@pytest.mark.parametrize("rounding", [0, 1e-15])
def test_method_without_spread_is_not_said_to_guide(rounding):
    """Its scores are 0: it draws as uniform sampling does, and the ratio is 1 but for rounding."""
    losses = np.random.default_rng(0).gamma(0.5, 1, SIZE)
    found = testing.simulate(losses, np.zeros(SIZE), 20.0, 400, 20)
    for name in testing.GUIDES:
        found.estimates[name]["lure"] = found.risk + (found.estimates[name]["lure"] - found.risk) * (
            1 - rounding
        )
    sentences = said_of_testing(trials(a=[{"full": found, "small": found}]))
    assert len(sentences) == 2
    assert all(s.endswith("is 1 (1 to 1, 95%, n = 400): no difference shown") for s in sentences), sentences


def test_draws_that_miss_the_rare_ones_are_not_said_to_guide():
    """A large loss that is never drawn: little is seen of an error that is enormous."""
    losses = np.r_[np.full(59, 0.01), 10.0]
    scores = np.r_[np.linspace(1, 2, 59), 0.0]
    found = testing.simulate(losses, scores, 4000.0, 400, 20)
    assert found.ratios["softmax"].high[-1] < 1 < found.ratio_at_least("softmax")[-1]
    runs = [{"full": found, "small": found}] * 3
    sentences = [s for s in said_of_testing(trials(a=runs, b=runs)) if "softmax" in s]
    assert len(sentences) == 6
    assert all(s.endswith("it guides worse") and "at least" in s for s in sentences)


def test_methods_are_compared_over_seeds():
    good, blind = ([models(follow, seed) for seed in range(4)] for follow in (1.0, 0.0))
    sentences = said_of_testing(trials(a=good, b=blind))
    (sentence,) = [s for s in sentences if "a minus b" in s and "proportional" in s]
    assert sentence.endswith("a guides better")
    (sentence,) = [
        s for s in said_of_testing(trials(a=good[:2], b=blind[:2])) if "a minus b" in s and "prop" in s
    ]
    assert sentence.endswith("no difference shown")


def test_figures_of_testing_are_drawn(tmp_path):
    given = trials(a=[models(1.0), models(1.0, 1)], b=[models(0.5)])
    charts = active_comparison.compare_testing(given).charts
    assert {name.rpartition("-")[2] for name in charts} == {"squared_error", "bias", "variance"}
    for path in figures.save(charts, tmp_path, "footer"):
        assert 0 < path.stat().st_size < 2**20


# ---- the command

TINY = {"acquired": 1, "epochs": 1, "acquisition_samples": 2, "test_samples": 2}


@pytest.mark.slow
def test_command_draws_and_says(tmp_path, capsys):
    learned = [
        bench.run(method, "active_digits", seed=seed, task_settings=TINY, out=tmp_path / "runs").directory
        for method, seed in (("map", 0), ("map", 1), ("mfvi", 0))
    ]
    few = {"epochs": 1, "test_samples": 2, "trajectories": 20}
    learned.append(
        bench.run("mfvi", "active_testing_digits", task_settings=few, out=tmp_path / "runs").directory
    )
    assert main(["figures", *map(str, learned), "--to", str(tmp_path / "f")]) == 0
    shown = capsys.readouterr().out
    assert len(list((tmp_path / "f").glob("active_digits-*.svg"))) == 3
    assert len(list((tmp_path / "f").glob("active_testing_digits-*.svg"))) == 3
    assert "LURE minus R~ in mean test NLL is" in shown
    assert "flips" not in shown
    assert "of uniform sampling is" in shown.replace("\n", " ")
