"""Tuning: equal budgets, validation data alone, and settings that say where they come from."""

import ast
import csv
import importlib.util
import inspect
import itertools
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import tunables
from plans import resolved
from tunables import BEGUN

import bench
from bench import cli
from bench.commands import formats
from bench.errors import DataError, UsageError
from bench.runs import records, registry, resolution
from bench.runs.plan import Plan
from bench.settings import build
from bench.sweep import tune
from bench.system import files

METHOD, TASK = "tunables:Obedient", "tunables:Distance"
registry.import_own(METHOD)
FINALS = tune.FINALISTS * (tune.SEEDS - 1)
"""Runs of the finalists beside those of the search's own seed."""
CLOSEST = {"learning_rate": (1e-4, 1.0, "log"), "size": (1, 9, "linear")}


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """An empty folder, and one for results, which is also where presets look for them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(resolution, "TUNED", tmp_path / "tuned")
    monkeypatch.setattr(records, "source_hash", lambda: "one")  # whoever edits a file meanwhile
    BEGUN.clear()


def unwatched(title):
    """Nobody looks at a run."""
    return tune.nullcontext(lambda *_: None)


def search(budget=4, method=METHOD, task=TASK, watch=unwatched, **options):
    """A search."""
    plan = build(Plan, {"method": method, "task": task, **options})
    return tune.tune(plan, budget, resolution.TUNED, watch)


@pytest.fixture
def call(capsys, monkeypatch):
    """Calls `bench ARGUMENTS`; returns exit code, standard output and standard error."""
    for console in (cli.errors, cli.output):
        monkeypatch.setattr(console, "_width", 250)

    def call(*arguments):
        BEGUN.clear()
        capsys.readouterr()
        code = cli.main([str(a) for a in arguments])
        return code, *capsys.readouterr()

    return call


# ---- draws


def test_draws_lie_in_their_ranges_with_the_right_distribution():
    """2000 draws; the deviations allowed are five standard errors, so false alarms are below 1e-5."""
    space = {
        "log": (1e-4, 1.0, "log"),
        "linear": (-6.0, 2.0, "linear"),
        "whole": (1, 4, "linear"),
        "whole_log": (1, 100, "log"),
        "choice": ["a", None, True],
    }
    drawn = [tune.draw(space, 7, n) for n in range(1, 2001)]
    log, linear = (np.array([d[name] for d in drawn]) for name in ("log", "linear"))
    for low, high, values in ((-4, 0, np.log10(log)), (-6, 2, linear)):
        assert (values.min() >= low) & (values.max() <= high)
        tolerance = 5 * (high - low) / math.sqrt(12 * 2000)
        assert values.mean() == pytest.approx((low + high) / 2, abs=tolerance)
    assert np.corrcoef(np.log(log), linear)[0, 1] == pytest.approx(0, abs=5 / math.sqrt(2000))
    for name, options in (("whole", [1, 2, 3, 4]), ("choice", space["choice"])):
        shares = [np.mean([d[name] is o or d[name] == o for d in drawn]) for o in options]
        assert sum(shares) == pytest.approx(1)
        assert shares == pytest.approx([1 / len(options)] * len(options), abs=5 * 0.5 / math.sqrt(2000))
    whole = [d["whole_log"] for d in drawn]
    assert {type(d["whole"]) for d in drawn} == {type(w) for w in whole} == {int}
    assert (min(whole), max(whole)) == (1, 100)
    share_of_ones = math.log(2) / math.log(101)
    assert whole.count(1) / 2000 == pytest.approx(share_of_ones, abs=5 * 0.5 / math.sqrt(2000))


def test_a_draw_is_its_own_whatever_else_is_drawn():
    """Neither the budget nor another setting of the search moves a value; seed and number do."""
    one = tune.draw({"learning_rate": (1e-4, 1.0, "log")}, 0, 3)
    torch.manual_seed(5)
    both = tune.draw(CLOSEST, 0, 3)
    assert both["learning_rate"] == one["learning_rate"]
    assert len({tune.draw(CLOSEST, s, n)["learning_rate"] for s in (0, 1) for n in (1, 2, 3)}) == 6


@pytest.mark.parametrize("end", [0, 1])
@pytest.mark.parametrize("range_", [(0.12345, 0.12346, "linear"), (0.12345, 0.12346, "log")])
def test_rounding_does_not_leave_the_range(range_, end):
    values = {tune.draw({"x": range_}, 0, n)["x"] for n in range(20)}
    assert all(range_[0] <= value <= range_[1] for value in values)


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({}, "cannot be tuned: its file declares no SEARCH"),
        ({"size": (1, 2)}, "SEARCH of tunables:Obedient: size: (1, 2): must be (low, high, 'log'), "),
        ({"size": (1, 2, "cubic")}, "must be (low"),
        ({"size": (2, 1, "linear")}, "must be (low"),
        ({"size": (0, 2, "log")}, "must be (low"),
        ({"size": (1, "2", "log")}, "must be (low"),
        ({"size": (1, math.inf, "log")}, "must be (low"),
        ({"size": (False, True, "linear")}, "must be (low"),
        ({"size": []}, "must be (low"),
        ({"size": 3}, "must be (low"),
        ({"size": [1, 0]}, "SEARCH of tunables:Obedient: --method.size 0: must be 1 or more"),
        ({"learning_rate": (0.0, 1.0, "linear")}, "--method.learning_rate 0.0: should be greater than 0"),
        ({"speed": [1]}, "SEARCH of tunables:Obedient: --method.speed 1: "),
    ],
)
def test_search_space_that_is_none_is_one_line(monkeypatch, space, message):
    monkeypatch.setattr(tunables, "SEARCH", space)
    with pytest.raises(UsageError) as caught:
        search()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert BEGUN == []


@pytest.mark.parametrize("name", [n for n, entry in registry.methods().items() if entry.search])
def test_search_space_of_every_method_is_valid(name):
    entry = registry.method(name)
    space = tune.search_space(entry)
    for number in range(1, 30):
        registry.build(entry.cls.settings_class, {**entry.fixed, **tune.draw(space, 0, number)}, "method")


def test_settings_that_a_name_fixes_are_not_searched():
    entry = replace(registry.method(METHOD), search=CLOSEST, fixed={"size": 2})
    assert tune.search_space(entry) == {"learning_rate": (1e-4, 1.0, "log")}


@pytest.mark.parametrize("name", registry.tasks())
def test_validation_metric_of_every_task_is_one_of_its_metrics(name):
    task = registry.task(name)
    spec = task.cls(registry.build(task.cls.settings_class, dict(task.fixed), "task")).spec
    assert spec.validation_metric is None or spec.validation_metric in spec.metrics


def test_every_ranked_task_can_be_searched_but_for_the_one_that_the_docs_name():
    """By validation data or by a metric that the task names itself."""
    refused = set()
    for name, task in registry.tasks().items():
        spec = task.cls(registry.build(task.cls.settings_class, dict(task.fixed), "task")).spec
        by = spec.validation_metric if task.cls.tuned_by == "validation" else task.cls.tuned_by
        if spec.ranked and by not in spec.metrics:
            refused.add(name)
    assert refused == {"iris_depth"}


# ---- what is chosen


@pytest.mark.parametrize("task", ["Distance", "Closeness"])
def test_the_best_on_validation_data_is_chosen_in_either_direction(task):
    """The test metric of these tasks is the reverse of the criterion."""
    result = search(8, task=f"tunables:{task}")
    distances = [abs(math.log10(c.settings["learning_rate"]) + 2) for c in result.configurations]
    assert result.chosen_number == int(np.argmin(distances)) != 0
    assert (
        result.chosen["learning_rate"]
        == result.configurations[result.chosen_number].settings["learning_rate"]
    )
    assert result.criterion.higher_is_better == (task == "Closeness")
    sign = -1 if task == "Closeness" else 1
    assert [c.value for c in result.configurations] == pytest.approx([sign * d for d in distances])


def test_of_equal_configurations_the_untuned_one_is_chosen(monkeypatch):
    monkeypatch.setattr(tunables.Distance, "value", lambda *_: 1.0)
    assert search().chosen_number == 0


def test_the_source_never_reads_a_test_metric():
    """`metrics` is read of the task's declaration alone, neither of a record nor of its arrays.

    The one exception is a criterion that was asked for on test data.
    """
    tree = ast.parse(inspect.getsource(tune).replace(inspect.getsource(tune.Criterion), ""))
    read = [
        ast.unparse(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "metrics"
    ]
    assert set(read) == {"spec"}
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert not names & {
        "read_arrays",
        "load_scores",
        "score",
        "targets",
        "main_metric",
        "getattr",
        "model_dump",
    }


def test_test_metrics_change_nothing(monkeypatch):
    """A search on a task whose scores are others finds the same, to the letter."""
    first = search(5)
    monkeypatch.setattr(tunables.Distance, "score", lambda self, arrays: {"closeness": 3.0})
    again = search(5, out="others")
    assert_same_but_for_time(first, again)


def test_a_search_on_test_data_must_be_asked_for_and_no_preset_reads_it(call, tmp_path, monkeypatch):
    """The test metric is the reverse of the criterion, so that another configuration is chosen."""
    monkeypatch.setattr(tune, "OTHERWISE", tmp_path / "other")
    asked = call("tune", METHOD, TASK, "--budget", 5, "--criterion", "closeness")
    assert (asked[0], asked[1]) == (0, f"{tmp_path}/other/tunables.Distance/tunables.Obedient.json\n")
    assert "closeness on test data" in asked[2]
    found = tune.read(Path(asked[1].strip()))
    distances = [abs(math.log10(c.settings["learning_rate"]) + 2) for c in found.configurations]
    assert [c.value for c in found.configurations] == pytest.approx([10 - d for d in distances])
    assert (found.chosen_number, found.criterion.on) == (int(np.argmax(distances)), "test")
    assert not resolution.TUNED.exists()
    assert resolved(METHOD, TASK).method_settings.learning_rate == 0.5
    wrong = call("tune", METHOD, TASK, "--budget", 5, "--criterion", "nearness")
    assert (wrong[0], BEGUN) == (2, [])
    assert "tunables:Distance has no metric nearness: it has closeness" in wrong[2]


def test_a_task_may_say_that_its_searches_choose_by_a_metric(call, tmp_path, monkeypatch):
    """Then presets read that result, and the search on validation data is the other one."""
    monkeypatch.setattr(tunables.Distance, "tuned_by", "closeness")
    monkeypatch.setattr(tune, "OTHERWISE", tmp_path / "other")
    usual = call("tune", METHOD, TASK, "--budget", 5, "--to", resolution.TUNED)
    found = tune.read(Path(usual[1].strip()))
    assert found.criterion.on == "test"
    assert resolved(METHOD, TASK).method_settings.learning_rate == found.chosen["learning_rate"]
    other = call("tune", METHOD, TASK, "--budget", 5, "--criterion", "validation")
    assert Path(other[1].strip()).is_relative_to(tmp_path / "other")
    assert tune.read(Path(other[1].strip())).criterion.on == "validation"
    assert resolved(METHOD, TASK).method_settings.learning_rate == found.chosen["learning_rate"]


def assert_same_but_for_time(a, b):
    a, b = (x.model_dump(exclude={"created", "environments", "provenance"}) for x in (a, b))
    for x in (a, b):
        for configuration in x["configurations"]:
            del configuration["seconds"]
    assert a == b


def of_the_search():
    """Runs of the search's own seed: each configuration once; the finalists' others are not among them."""
    return len(list(Path("runs/tuning").rglob("standard-seed0/record.json")))


@pytest.mark.parametrize(("seeds", "size"), [(3, 1), (1, 9)])
def test_the_best_three_are_run_with_two_more_seeds_so_that_luck_does_not_choose(monkeypatch, seeds, size):
    """Size 9 looks five decades better under seed 0, and is five worse under any other.

    The negative control, a search of one seed, falls for it.
    """
    monkeypatch.setattr(tune, "SEEDS", seeds)
    monkeypatch.setattr(tunables, "SEARCH", {"learning_rate": (1e-2, 1.0, "log"), "size": [1, 1, 1, 1, 1, 9]})
    result = search(8, task="tunables:Lucky")
    sizes = [c.settings["size"] for c in result.configurations]
    assert 1 <= sizes.count(9) < tune.FINALISTS  # so that a finalist is honest
    finalists = [c for c in result.configurations if len(c.others) == seeds - 1 and c.others]
    assert len(finalists) == (tune.FINALISTS if seeds > 1 else 0)
    assert result.chosen["size"] == size
    for c in finalists:
        distance = abs(math.log10(c.settings["learning_rate"]) + 2) + 5 * (c.settings["size"] == 9)
        assert c.others == pytest.approx([distance, distance])
    honest = [c for c in finalists if c.settings["size"] == 1]
    if seeds > 1:
        assert result.chosen_number == min(honest, key=lambda c: c.value).number


def test_a_finalist_that_another_seed_loses_comes_after_those_that_none_does():
    def tried(number, value, *others):
        return tune.Configuration(
            number=number, settings={}, status="completed", reason=None, value=value, others=list(others),
            seconds=0, steps=0,
        )  # fmt: skip

    lost, whole = tried(0, 0.0, 0.0, None), tried(1, 5.0, 5.0, 5.0)
    assert tune._best([lost, whole, tried(2, 6.0, 6.0, 6.0), tried(3, 9.0)], higher_is_better=False) == whole
    assert tune._best([tried(0, None), tried(1, 9.0)], higher_is_better=True).number == 1


def test_a_choice_at_the_edge_of_its_range_is_told(call, monkeypatch):
    """The best of five rates is the smallest of them, and then not."""
    monkeypatch.setattr(tunables, "SEARCH", {"learning_rate": [0.01, 0.1, 0.3, 0.6, 0.9]})
    err = call("tune", METHOD, TASK, "--budget", 12)[2]
    assert "note: learning_rate 0.01 is at the low end of its range" in err
    monkeypatch.setattr(tunables, "SEARCH", {"learning_rate": [0.001, 0.01, 0.3, 0.6, 0.9]})
    assert "of its range" not in call("tune", METHOD, TASK, "--budget", 12, "--force")[2]


def test_a_choice_that_is_not_better_than_the_untuned_settings_is_told(call, monkeypatch):
    """Every other size is lucky under seed 0 alone, so that the untuned one is not among the best three."""
    monkeypatch.setattr(tunables, "SEARCH", {"size": [9], "learning_rate": (1e-2, 1.0, "log")})
    err = call("tune", METHOD, "tunables:Lucky", "--budget", 8)[2]
    (told,) = [line for line in err.splitlines() if "no gain" in line]
    assert "by 3 seeds in the chosen settings" in told
    assert "by 1 seed in the untuned ones" in told
    assert "no gain" not in call("tune", METHOD, TASK, "--budget", 8)[2]


@pytest.mark.parametrize(
    ("values", "others", "higher", "gained"),
    [
        ((0.5, 0.3), ([], [0.4, 0.5]), False, True),
        ((0.5, 0.3), ([], [0.7, 0.6]), False, False),
        ((0.5, 0.3), ([0.6, 0.8], [0.7, 0.7]), False, True),
        ((0.5, 0.5), ([], [0.5, 0.5]), False, False),
        ((0.5, 0.9), ([], [0.5, 0.5]), True, True),
        ((0.5, 0.9), ([], [0.2, 0.3]), True, False),
        ((None, 0.9), ([], [0.2, 0.3]), True, True),
        ((0.5, 0.3), ([], [0.2, None]), False, True),
    ],
)
def test_a_gain_is_one_of_means_over_seeds(values, others, higher, gained):
    result = search(2)
    tried = [
        c.model_copy(update={"value": value, "others": list(more)})
        for c, value, more in zip(result.configurations, values, others, strict=True)
    ]
    criterion = result.criterion.model_copy(update={"higher_is_better": higher})
    told = tune.no_gain(
        result.model_copy(update={"configurations": tried, "chosen_number": 1, "criterion": criterion})
    )
    assert (told is None) == gained
    assert tune.no_gain(result.model_copy(update={"chosen_number": 0})) is None


def test_trouble_counts_as_tried_and_is_never_chosen(monkeypatch):
    monkeypatch.setattr(
        tunables, "SEARCH", {"trouble": ["none", "diverges", "fails", "refuses"], "size": (1, 9, "linear")}
    )
    result = search(16)
    by_trouble = {c.settings["trouble"]: c for c in result.configurations}
    assert by_trouble.keys() == {"none", "diverges", "fails", "refuses"}
    assert len(result.configurations) == result.budget == 16
    for trouble, status, reason in (
        ("diverges", "diverged", "diverged at stage 'fit'"),
        ("fails", "failed", "failed: RuntimeError: told to"),
        ("refuses", "refused", "obedient refuses this problem"),
    ):
        c = by_trouble[trouble]
        assert (c.status, c.value) == (status, None)
        assert c.reason.startswith(reason)
    assert result.chosen["trouble"] == "none"
    assert by_trouble["none"].value is not None
    assert by_trouble["none"].steps == 1


def test_rows_for_programs_stand_alone_on_standard_output(call):
    given = "tune", METHOD, TASK, "--budget", 3, "--to", "results"
    _, path, _ = call(*given)
    code, out, err = call(*given, "--format", "csv")
    assert (code, err.splitlines()[-1]) == (0, path.strip())
    header, *lines = out.splitlines()
    assert header == "number,settings,status,closeness,further seeds,s,training steps"
    assert len(lines) == 3
    tried = json.loads(Path(path.strip()).read_text())["configurations"]
    rows = list(csv.DictReader(out.splitlines()))
    assert [float(row["closeness"]) for row in rows] == [one["value"] for one in tried]
    assert [json.loads(f"[{row['further seeds']}]") for row in rows] == [one["others"] for one in tried]


def test_search_without_any_value_is_one_line_and_leaves_no_result(call):
    code, out, err = call("tune", METHOD, "tunables:LogsNothing", "--budget", 2)
    assert (code, out) == (1, "")
    assert err.splitlines()[-1].startswith(
        "bench: none of 2 configurations of tunables:Obedient gave closeness"
    )
    assert not resolution.TUNED.exists()


def test_trouble_that_concerns_every_configuration_ends_the_search(monkeypatch):
    def missing(self):
        raise DataError("the data are not here")

    monkeypatch.setattr(tunables.Distance, "data_digest", missing)
    with pytest.raises(DataError, match="the data are not here"):
        search()


# ---- budgets


def test_first_configuration_is_the_untuned_one_and_a_larger_budget_extends_a_smaller():
    small = search(3)
    assert [of_the_search(), small.configurations[0].settings] == [3, {"learning_rate": 0.5, "size": 5}]
    large = search(6)
    assert of_the_search() == 6  # three more
    assert [c.value for c in large.configurations[:3]] == [c.value for c in small.configurations]
    assert large.budget == 6
    fresh = search(6, out="others", force=True)
    assert_same_but_for_time(large, fresh)


def test_the_same_search_trains_nothing_and_finds_the_same():
    """Also where its own result is the preset `standard` by now."""
    first = search(5)
    assert first.chosen_number != 0
    assert (resolution.TUNED / "tunables.Distance" / "tunables.Obedient.json").exists()
    assert resolved(METHOD, TASK).method_settings.learning_rate == first.chosen["learning_rate"]
    again = search(5)
    assert len(BEGUN) == 5 + FINALS
    assert_same_but_for_time(first, again)
    assert again.configurations == first.configurations


def test_stopped_search_goes_on(monkeypatch):
    def stop(title):
        if "configuration 2 of 0 to 4" in title:
            raise KeyboardInterrupt
        return tune.nullcontext(lambda *_: None)

    with pytest.raises(KeyboardInterrupt):
        search(5, watch=stop)
    assert len(BEGUN) == 2
    assert not resolution.TUNED.exists()
    assert resolution._tuned.get()  # presets are tuned again outside of the search
    search(5)
    assert len(BEGUN) == 5 + FINALS


@pytest.mark.parametrize(("budget", "options"), [(3, {}), (4, {"seed": 1}), (9, {"seed": 1})])
def test_result_is_not_lost_to_one_that_does_not_extend_it(budget, options):
    search(4)
    before = (resolution.TUNED / "tunables.Distance" / "tunables.Obedient.json").read_bytes()
    with pytest.raises(UsageError, match="holds a search of 4 configurations with seed 0, and this one does"):
        search(budget, **options)
    assert (resolution.TUNED / "tunables.Distance" / "tunables.Obedient.json").read_bytes() == before
    assert len(BEGUN) == 4 + FINALS
    assert search(budget, **options, force=True).budget == budget


def test_another_search_space_is_another_search(monkeypatch):
    search(3)
    monkeypatch.setattr(tunables, "SEARCH", {"size": (1, 9, "linear")})
    with pytest.raises(UsageError, match="does not extend it"):
        search(3)


def test_runs_of_another_source_are_refused_and_replaced_by_force(monkeypatch):
    search(2)
    monkeypatch.setattr(records, "source_hash", lambda: "another")
    with pytest.raises(UsageError, match="standard-seed0 holds a run of another source; --force replaces"):
        search(3)
    assert len(BEGUN) == 2 * tune.SEEDS
    result = search(3, force=True)
    assert (len(BEGUN), result.provenance.source_hash) == (5 * tune.SEEDS, "another")
    search(3, force=True)  # those of this source stay, also under --force
    assert len(BEGUN) == 5 * tune.SEEDS


def test_source_that_changes_meanwhile_ends_the_search(monkeypatch):
    hashes = itertools.count()
    monkeypatch.setattr(records, "source_hash", lambda: str(next(hashes)))
    with pytest.raises(UsageError, match="the source changed during the search"):
        search(2)
    assert not resolution.TUNED.exists()


def test_unequal_budgets_on_a_task_are_told_in_one_line(call):
    search(3)
    code, _, err = call("tune", "toys:OnlyFirstStep", TASK, "--budget", 4)
    assert code == 2  # it has no SEARCH
    warning = (
        f"bench: warning: unequal budgets on {TASK} cannot be compared: toys:OnlyFirstStep 4, {METHOD} 3"
    )
    assert err.splitlines()[0] == warning
    assert "warning" not in call("tune", "toys:OnlyFirstStep", TASK, "--budget", 3)[2]
    assert "warning" not in call("tune", METHOD, TASK, "--budget", 4)[2]


@pytest.mark.parametrize(
    "options", [{"members": 2}, {"method_settings": {"size": 3}}, {"task_settings": {"epochs": 3}}]
)
def test_search_of_given_settings_or_members_is_refused(options):
    with pytest.raises(UsageError, match="a search chooses the settings itself"):
        search(**options)
    assert BEGUN == []


# ---- the command


def test_command_prints_a_table_and_the_path(call, tmp_path):
    code, out, err = call("tune", METHOD, TASK, "--budget", 4, "--to", "results", "--seed", 2)
    assert code == 0
    assert out == "results/tunables.Distance/tunables.Obedient.json\n"
    result = tune.read(tmp_path / out.strip())
    assert f"{METHOD} on {TASK}: closeness on validation data, lower is better" in err
    assert re.findall(r"^(\d+)(?: \(chosen\))? +learning_rate=", err, re.MULTILINE) == ["0", "1", "2", "3"]
    assert re.findall(r"^(\d+) \(chosen\)", err, re.MULTILINE) == [str(result.chosen_number)]
    for c in result.configurations:
        assert f"learning_rate={c.settings['learning_rate']}, size={c.settings['size']}" in err
        assert formats.number(c.value) in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["results", "runs"]
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["tuning"]


def test_configurations_have_one_number_everywhere():
    """In the progress as in the result, where 0 is the untuned one."""
    titles = []

    def watch(title):
        titles.append(title)
        return tune.nullcontext(lambda *_: None)

    result = search(3, watch=watch)
    numbers = [int(re.search(r"configuration (\d+) of 0 to 2$", title)[1]) for title in titles[:3]]
    assert numbers == [c.number for c in result.configurations] == [0, 1, 2]
    assert titles[3].endswith(", run 1 of 6 of the best, seed 1")
    assert len(titles) == 3 + FINALS


def test_result_holds_all_that_was_tried_and_where():
    result = search(4, seed=3)
    content = json.loads((resolution.TUNED / "tunables.Distance" / "tunables.Obedient.json").read_text())
    assert content == result.model_dump(mode="json")
    assert [content[k] for k in ("method", "task", "budget", "seed", "preset")] == [
        METHOD,
        TASK,
        4,
        3,
        "standard",
    ]
    assert content["search"] == {
        "learning_rate": {"low": 1e-4, "high": 1.0, "scale": "log"},
        "size": {"low": 1, "high": 9, "scale": "linear"},
    }
    assert content["criterion"] == {
        "metric": "closeness",
        "higher_is_better": False,
        "on": "validation",
    }
    assert [c["number"] for c in content["configurations"]] == [0, 1, 2, 3]
    assert content["chosen"].keys() == {"learning_rate", "size", "optimizer", "trouble"}
    assert content["provenance"]["source_hash"] == "one"
    assert content["provenance"]["commit"] is not None
    (environment,) = content["environments"]
    assert environment["torch"] == torch.__version__


def test_smoke_search_writes_no_result(call):
    code, out, err = call("tune", METHOD, TASK, "--budget", 2, "--preset", "smoke")
    assert (code, out) == (0, "")
    assert "no result is written" in err
    assert not resolution.TUNED.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([METHOD], "arguments are required: TASK"),
        ([METHOD, TASK], "--budget is required"),
        ([METHOD, TASK, "--budget", "1"], "--budget 1: must be 2 or more"),
        ([METHOD, TASK, "--budget", "few"], "--budget few: must be int"),
        ([METHOD, TASK, "--budget", "2", "--seed", "-1"], "--seed -1: must be 0 or more"),
        ([METHOD, TASK, "--budget", "2", "--threads", "0"], "--threads 0: must be 1 or more"),
        ([METHOD, TASK, "--budget", "2", "--preset", "paper"], "--preset paper: must be one of smoke, "),
        (["mfvy", TASK, "--budget", "2"], "unknown method 'mfvy': did you mean mfvi"),
        ([METHOD, "split_digit", "--budget", "2"], "unknown task 'split_digit': did you mean"),
        ([METHOD, "tunables:NoValidation", "--budget", "2"], "it declares no validation_metric"),
        (["toys:OnlyFirstStep", TASK, "--budget", "2"], "cannot be tuned: its file declares no SEARCH"),
        (["mfvi_ensemble", TASK, "--budget", "2"], "mfvi_ensemble has the settings of mfvi: tune that"),
        (["toys:CannotGoOn", "split_digits", "--budget", "2"], "lacks the capability sequential"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_before_any_run(call, tmp_path, arguments, message):
    code, out, err = call("tune", *arguments)
    assert (code, out, len(err.splitlines())) == (2, "", 1), err
    assert message in err
    assert BEGUN == []
    assert list(tmp_path.iterdir()) == []


# ---- tuned settings


@pytest.fixture
def tuned():
    """Tuned settings of mfvi on split_digits."""
    path = resolution.tuned_path("mfvi", "split_digits", resolution.TUNED)
    chosen = {**vars(registry.method("mfvi").cls.settings_class()), "learning_rate": 0.02, "train_samples": 2}
    files.write(path, json.dumps({"chosen": chosen}).encode())
    return path


def test_standard_is_what_tuning_chose_and_identity_is_relative_to_it(tuned):
    choice = resolved("mfvi", "split_digits")
    assert (choice.method_identity, choice.tuning) == ("mfvi", "tuned")
    assert (choice.method_settings.learning_rate, choice.method_settings.train_samples) == (0.02, 2)
    back = resolved("mfvi", "split_digits", method_settings={"learning_rate": 0.001})
    assert (back.method_identity, back.tuning) == ("mfvi+learning_rate=0.001", "by_hand")
    smoke = resolved("mfvi", "split_digits", "smoke")
    assert (smoke.method_identity, smoke.tuning) == ("mfvi", "tuned")


def test_only_that_method_on_the_task_of_that_name_is_tuned(tuned):
    assert resolved("mfvi", "split_mnist").tuning == "by_hand"
    for method in ("radial", "map"):
        assert resolved(method, "split_digits").tuning == "untuned"
    ensemble = resolved("mfvi_ensemble", "split_digits")
    assert (ensemble.tuning, ensemble.method_identity) == ("tuned", "mfvi_ensemble")
    assert ensemble.method_settings.learning_rate == 0.02
    five = resolved("mfvi", "split_digits", members=5)
    assert (five.tuning, five.method_settings.learning_rate) == ("tuned", 0.02)


def test_paper_knows_no_tuned_settings(tuned):
    paper = resolved("mfvi", "split_digits", "paper")
    assert paper.tuning == "published"
    tuned.unlink()
    assert resolved("mfvi", "split_digits", "paper").method_settings == paper.method_settings


def test_cheap_settings_of_smoke_beat_tuned_ones(tuned, monkeypatch):
    entry = replace(registry.method("mfvi"), presets={"smoke": {"train_samples": 1}})
    values, _, _ = resolution.preset_values(entry, registry.task("split_digits"), "smoke")
    assert (values["train_samples"], values["learning_rate"]) == (1, 0.02)


def test_untuned_presets_inside_a_search(tuned):
    with resolution.untuned():
        choice = resolved("mfvi", "split_digits")
        assert (choice.tuning, choice.method_settings.learning_rate) == ("by_hand", 0.0003)
    assert resolved("mfvi", "split_digits").tuning == "tuned"


def test_record_of_a_tuned_run_says_so(tuned, call, tmp_path):
    code, out, err = call("run", "mfvi", "split_digits", "--preset", "smoke")
    assert code == 0
    assert out == "runs/split_digits+epochs=1,test_samples=4/mfvi/smoke-seed0\n"
    assert "settings tuned" in err
    record = records.read_record(tmp_path / out.strip())
    assert record.method.tuning == "tuned"
    assert record.method.settings["learning_rate"] == 0.02


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"chosen": 3}'])
def test_damaged_result_is_one_line(tuned, content):
    tuned.write_text(content)
    with pytest.raises(UsageError, match=r"mfvi\.json is no result of bench tune: remove it or tune again"):
        resolved("mfvi", "split_digits")
    with pytest.raises(UsageError, match=r"mfvi\.json is no result of bench tune"):
        tune.read(tuned)


def test_a_method_of_the_suite_is_tuned_on_a_task_of_the_suite(monkeypatch):
    """The whole way: digits, one epoch, validation accuracy, and the run that uses the result."""
    module = importlib.import_module("bench.methods.mfvi")
    monkeypatch.setattr(module, "SEARCH", {"learning_rate": (1e-3, 1e-1, "log")}, raising=False)
    discovered = registry.Entries(bench.methods, "method")
    monkeypatch.setattr(registry, "methods", lambda: discovered)
    task = registry.task("split_digits")
    monkeypatch.setitem(task.presets, "standard", {"epochs": 1, "test_samples": 4})
    result = search(3, "mfvi", "split_digits")
    assert result.criterion.metric == "average_accuracy"
    values = [c.value for c in result.configurations]
    assert result.chosen_number == int(np.argmax(values))
    done = bench.run("mfvi", "split_digits")
    assert done.record.method.tuning == "tuned"
    assert done.record.method.identity == "mfvi"
    assert done.record.validation["average_accuracy"] == max(values)


def test_table_of_the_documentation(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "docs")
    parts = importlib.import_module("parts.methods")
    assert parts.tuning().startswith("No search is committed yet")
    monkeypatch.setattr(tunables, "SEARCH", {"trouble": ["diverges", "none"], "learning_rate": [0.1, 0.01]})
    first = search(8)
    same = search(8, task="tunables:Closeness")
    lost = sum(c.status == "diverged" for c in first.configurations)
    assert 0 < lost < 8
    lines = [line for line in parts.tuning().splitlines() if line.startswith("|")]
    best = min(c.value for c in first.configurations if c.value is not None)
    chosen = ", ".join(f"`{k}={v}`" for k, v in first.configurations[first.chosen_number].settings.items())
    cells = [f"`{TASK}`", f"`{METHOD}`", "8", "closeness, lower", "1.6990", f"{best:.4f}"]
    cells += ["0.0000", str(first.chosen_number), chosen, "`learning_rate` low", f"{lost / 8:.0%}"]
    assert lines[-1] == f"| {' | '.join(cells)} |"
    assert "closeness, higher" in lines[-2]
    other = same.model_copy(update={"method": "other", "task": TASK, "budget": 9})
    files.write(resolution.tuned_path("other", TASK, resolution.TUNED), other.model_dump_json().encode())
    lines = [line for line in parts.tuning().splitlines() if line.startswith("|")]
    assert ["(not comparable)" in line for line in lines[2:]] == [False, True, True]


ADDED_SINCE = {"mc_dropout": {"masks"}, "sghmc": {"temperature"}}
"""Method -> settings that came after its searches, which ran under what are their defaults now."""


def test_committed_results_are_valid_and_can_be_run():
    for path in sorted((Path(bench.__path__[0]) / "runs" / "presets" / "tuned").rglob("*.json")):
        result = tune.read(path)
        assert path == resolution.tuned_path(result.method, result.task, path.parent.parent)
        by = tune.criterion_of(result.task)
        assert (result.criterion.on == "validation") == (by == "validation")
        entry = registry.method(result.method)
        registry.build(entry.cls.settings_class, {**entry.fixed, **result.chosen}, "method")
        assert result.chosen.keys() | ADDED_SINCE.get(result.method, set()) == set(entry.flags())
        assert result.preset == "standard"
        assert len(result.configurations) == result.budget
        assert result.provenance.dirty is False
