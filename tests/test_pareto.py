"""The page of quality against cost: panels that compare like with like, and what its sentences find."""

import importlib
from pathlib import Path

import pytest

from bench.leaderboard.rank import fronts

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def pareto():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs")
        yield importlib.import_module("parts.pareto")


def test_a_panel_has_one_kind_of_machine_and_its_best_and_cheapest_are_on_its_front(pareto):
    assert len(pareto.panels()) >= 10
    for panel in pareto.panels():
        assert {point.cost.machine for point in panel.points} == {panel.machine}
        assert min(panel.points, key=lambda p: p.cost.seconds) in panel.front
        best = max if panel.better == "higher" else min
        values = [point.quality.centre for point in panel.points]
        assert best(values) in [point.quality.centre for point in panel.front]


def test_seeds_on_several_machines_make_no_point(pareto, monkeypatch):
    """A method whose one seed ran elsewhere: its seconds are not those of either machine."""
    group = pareto._cells()["shift_digits"]["map"]
    assert pareto._point("map", group, "nll").cost.machine != fronts.SEVERAL
    path, record = group[0]
    environment = record.environment.model_copy(update={"device": "another"})
    moved = [(path, record.model_copy(update={"environment": environment})), *group[1:]]
    assert pareto._point("map", moved, "nll").cost.machine == fronts.SEVERAL
    lost = [(path, record.model_copy(update={"metrics": {"nll": None}})), *group[1:]]
    assert pareto._point("map", lost, "nll") is None


def test_what_the_page_finds(pareto):
    """The sentences at its head; a front is from the cheapest to the best."""
    fronts = {(panel.task, panel.machine): panel.front for panel in pareto.panels()}
    times = {}
    for panel in pareto.panels():
        seconds = {point.name: point.cost.seconds for point in panel.points}
        if panel.task.startswith("fidelity_") and "hmc" in seconds:
            assert panel.front[-1].name == "hmc"
            if "psgld" in {point.name for point in panel.front}:
                times[panel.task] = round(seconds["hmc"] / seconds["psgld"])
    assert times == dict(fidelity_toy=17, fidelity_iris=26, fidelity_diabetes=23, fidelity_digits=24)
    ends = sorted(task for (task, _), front in fronts.items() if front[-1].name == "deep_ensemble")
    images = ["retinopathy_synthetic", "shift_cifar10"]
    assert ends == [*images, "text_topics"]
    assert all(len(front) > 1 for front in fronts.values() if front[-1].name == "deep_ensemble")
    (panel,) = (panel for panel in pareto.panels() if panel.task == "oracle_classification")
    (mode,) = (point for point in panel.points if point.name == "map")
    assert panel.front[-1].name == "laplace_last_layer"
    assert panel.front[-1].cost.seconds < mode.cost.seconds
    tuned = [point.is_tuned for panel in pareto.panels() for point in panel.points]
    assert 1 - sum(tuned) / len(tuned) == pytest.approx(1 / 4, abs=0.015)
    assert not set.intersection(*({point.name for point in front} for front in fronts.values()))
