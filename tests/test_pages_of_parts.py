"""Pages whose sentences are computed, from hand-made records: cold posteriors, joint predictions, folds."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from bench.intervals import student
from bench.studies import published_splits
from bench.sweep import sweep

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def parts():
    """The parts of the pages."""
    sys.path.insert(0, str(ROOT / "docs"))
    yield SimpleNamespace(**{name: importlib.import_module(f"parts.{name}") for name in ("cold", "joint")})
    sys.path.remove(str(ROOT / "docs"))


def record(method, task, identity, seed, metrics, **settings):
    """A completed record, as far as the pages read it."""
    return SimpleNamespace(
        method=SimpleNamespace(name=method, identity=method, settings=settings),
        task=SimpleNamespace(name=task, identity=identity),
        status="completed",
        seed=seed,
        metrics=metrics,
        diagnostics={},
        fits=[],
    )


def hmc(temperature, values, **settings):
    """Runs at a temperature, one for each value of the NLL; None leaves the temperature unsaid."""
    given = settings if temperature is None else {"temperature": temperature, **settings}
    return [
        (
            Path(),
            record(
                "hmc", "fidelity_digits", "fidelity_digits", seed, {"nll": value, "wasserstein": 0}, **given
            ),
        )
        for seed, value in enumerate(values)
    ]


def shown(parts, monkeypatch, runs):
    """The page's sentences of these committed runs."""
    monkeypatch.setattr(parts.cold, "committed", lambda: runs)
    parts.cold.by_temperature.cache_clear()
    said = parts.cold.standing()
    parts.cold.by_temperature.cache_clear()
    return said


def test_the_optimum_is_judged_seed_by_seed(parts, monkeypatch):
    """0.1 less in each seed, whose own levels lie far apart; unpaired nothing would be shown."""
    runs = hmc(1.0, [1.0, 2.0, 3.0]) + hmc(0.3, [0.9, 1.9, 2.9]) + hmc(0.1, [1.4, 2.4, 3.4])
    said = shown(parts, monkeypatch, runs)
    assert "least at T = 0.3, 1.9000 nats, against 2.0000 at T = 1" in said
    assert said.endswith("better, so there is a cold posterior effect here.")
    assert np.ptp(student([0.9, 1.9, 2.9])[:2]) > 1


def test_a_gain_over_a_chain_that_stands_still_is_not_called_an_effect_of_temperature(parts, monkeypatch):
    runs = hmc(1.0, [1.0, 2.0, 3.0]) + hmc(0.3, [0.9, 1.9, 2.9])
    for seed, worth in enumerate([2, 40, 2]):  # of 50 draws
        runs[seed][1].diagnostics["prediction_autocorrelation"] = 50 / worth
        runs[seed][1].fits.append(SimpleNamespace(diagnostics={"draws": 50.0}))
    said = shown(parts, monkeypatch, runs)
    assert "cold posterior effect" not in said
    assert said.endswith(
        "but predictions did not move in 2 of 3 seeds at T = 1: the sampler may gain, not T."
    )


def test_without_an_improvement_the_page_says_so(parts, monkeypatch):
    runs = hmc(1.0, [0.5, 0.5, 0.5]) + hmc(0.5, [0.6, 0.7, 0.8])
    said = shown(parts, monkeypatch, runs)
    assert said.endswith(
        "least at T = 1, 0.5000 nats. No temperature below 1 improves on the posterior itself."
    )


def test_runs_with_other_settings_are_no_reference(parts, monkeypatch):
    """The standard run, which is from before there was a temperature, has other trajectories."""
    runs = hmc(None, [9.0] * 3, kept=500) + hmc(1.0, [2.0] * 3, kept=200) + hmc(0.5, [1.0] * 3, kept=200)
    said = shown(parts, monkeypatch, runs)
    assert "least at T = 0.5, 1.0000 nats, the lowest that was tried, against 2.0000 at T = 1" in said


def test_joint_losses_are_set_beside_one_network(parts, monkeypatch):
    task = "shift_digits+joint=true"

    def group(method, together, alone):
        names = ("joint_nll", "joint_nll_clean")
        found = []
        for seed, level in enumerate((0.0, 5.0, 10.0)):
            metrics = dict.fromkeys(names, together + level)
            metrics |= dict.fromkeys((f"{name}_independent" for name in names), alone + level)
            found.append((Path(), record(method, "shift_digits", task, seed, metrics)))
        return task, method, found

    groups = [group("map", 4.0, 4.0), group("mfvi", 3.0, 3.5), ("shift_digits", "swag", [])]
    monkeypatch.setattr(parts.joint, "groups", lambda name: groups)
    first, second = parts.joint.standing().splitlines()
    assert "least joint loss has `mfvi`, 8.00 nats a batch: -1 (-1 to -1" in first
    assert first.endswith("less that of `map`: lower.")
    assert second.endswith("beyond the interval: `mfvi`.")
    rows = parts.joint.table().splitlines()[2:]
    assert [row.split("|")[1].strip() for row in rows] == ["`mfvi`", "`map`"]


def test_standardised_scores_are_those_of_standardised_targets():
    """A normal's log density and error, standardised by hand."""
    arrays = {"centre_and_scale": np.array([[3.0, 2.0], [0.0, 0.5]])}
    mean, sd, target = np.array([4.0, 0.1]), np.array([0.7, 0.3]), np.array([5.0, 0.4])

    def density(mean, sd, target):
        return -np.log(sd * np.sqrt(2 * np.pi)) - 0.5 * ((target - mean) / sd) ** 2

    centre, scale = arrays["centre_and_scale"].T
    found = published_splits.standardised(arrays, density(mean, sd, target), np.abs(target - mean))
    by_hand = (mean - centre) / scale, sd / scale, (target - centre) / scale
    np.testing.assert_allclose(found[0], -density(*by_hand), rtol=1e-12)
    np.testing.assert_allclose(found[1], np.abs(by_hand[2] - by_hand[0]), rtol=1e-12)


def test_the_printed_benchmark_has_both_tables():
    found = published_splits.bde()
    assert {table: len(rows) for table, rows in found.items()} == {"airfoil": 4, "bike": 4}
    assert found["airfoil"]["BDE"] == ((-0.9126, 0.0131), (0.1215, 0.0042))


@pytest.mark.parametrize(
    ("grid", "runs"), [("uci-folds", 14), ("cold-posteriors", 55), ("tasks/shift-joint", 18)]
)
def test_grids_of_the_pages_are_whole(grid, runs):
    cells = sweep.read(ROOT / "docs" / f"{grid}.yaml")
    assert len({repr(cell) for cell in cells}) == runs
