"""The study of robustness: its configurations, shares, pairs; and a rate that decays."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from conformance import problems
from scipy import stats
from test_engine import make

from bench.comparison import FinishedRun
from bench.contract import Budget
from bench.errors import UsageError
from bench.methods.mfvi import MFVI
from bench.methods.radial import Radial
from bench.settings import build
from bench.studies import robustness
from bench.studies.robustness import compare, configurations, grid
from bench.tasks.retinopathy_robustness import Settings

GRID = Path(__file__).resolve().parent.parent / "docs" / "tasks" / "retinopathy_robustness.yaml"


def test_configurations_are_those_of_the_source():
    found = configurations()
    assert len(found) == 86
    assert configurations() == found
    assert configurations(200)[:86] == found
    for c in found:
        assert c.batch_size * c.train_samples <= 256
        assert c.optimizer == "sgd" or c.rate_decay == 1
        assert c.learning_rate in ((1e-2, 1e-3, 1e-4) if c.optimizer == "sgd" else (1e-3, 1e-4, 1e-5))
        for cls in (MFVI, Radial):
            build(cls.settings_class, c.of_method, "method")


def test_configurations_are_drawn_uniformly():
    """Chi-squared on 4,000 draws; six tests, each with a false alarm in 1 of 1,000, under a fixed seed."""
    found = configurations(4000)
    kept = [(b, s) for b in (16, 32, 64, 128, 256) for s in (1, 2, 4) if b * s <= 256]
    of = {
        "optimizer": (Counter(c.optimizer for c in found), ["sgd", "amsgrad"]),
        "rho": (Counter(c.initial_rho for c in found), [-6, -4, -2, 0]),
        "width": (Counter(c.width for c in found), [1, 5 / 8, 3 / 8]),
        "size": (Counter((c.batch_size, c.train_samples) for c in found), kept),
        "decay": (Counter(c.rate_decay for c in found if c.optimizer == "sgd"), [1, 0.98, 0.96]),
        "rate": (Counter(c.learning_rate for c in found if c.optimizer == "amsgrad"), [1e-3, 1e-4, 1e-5]),
    }
    for counts, values in of.values():
        assert set(counts) == set(values)
        assert stats.chisquare([counts[v] for v in values]).pvalue > 1e-3


def test_the_committed_grid_is_that_of_the_study():
    assert yaml.safe_load(GRID.read_text()) == grid("retinopathy_robustness")


@pytest.mark.parametrize(
    ("count", "of", "low", "high"), [(0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (71, 86, 0.7318, 0.8908)]
)
def test_shares_have_wilson_intervals(count, of, low, high):
    """The bounds solve (p - k/n)^2 = z^2 p (1 - p) / n."""
    z = stats.norm.ppf(0.975)
    for p in (low, high):
        assert (p - count / of) ** 2 == pytest.approx(z**2 * p * (1 - p) / of, abs=2e-4)
    assert robustness.share(count, of) == f"{count} of {of}, {count / of:.2f} ({low:.2f} to {high:.2f})"


def test_pairs_are_tested_by_the_discordant_ones():
    a, b, p = robustness.paired({0, 1, 2, 3, 4, 5, 6}, {0, 7})
    assert (a, b) == (6, 1)
    assert p == pytest.approx(2 * (1 + 7) / 2**7)  # two-sided, of Binomial(7, 1/2)
    assert robustness.paired({1, 2}, {1, 2}) == (0, 0, 1.0)


def test_a_diverged_fit_learned_nothing_and_is_not_good():
    found = (None, 0.5499, 0.55, 0.8799, 0.88, 0.9)
    outcomes = {(number, 0): auc for number, auc in enumerate(found)}
    assert robustness.learned(outcomes) == {(2, 0), (3, 0), (4, 0), (5, 0)}
    assert robustness.good(outcomes, 0.9) == {(4, 0), (5, 0)}


def run(method, number, auc, preset="standard", epochs=5):
    """A finished run of the study."""
    settings = build(Settings, {"configuration": number, "epochs": epochs}, "task")
    task = SimpleNamespace(settings=settings)
    name = "retinopathy_robustness"
    return FinishedRun(task, name, name, method, method, preset, 0, metrics={"auc": auc})


def test_comparison_counts_every_run_and_names_the_more_robust():
    runs = [run("radial", n, 0.9) for n in range(8)] + [
        run("mfvi", n, None if n < 7 else 0.89) for n in range(8)
    ]
    found = compare(runs)
    by_method = {row[0]: row for row in found.rows}
    assert by_method["mfvi"][1:5] == ["8", robustness.share(7, 8), robustness.share(1, 8), "7"]
    assert by_method["radial"][1:5] == ["8", robustness.share(0, 8), robustness.share(8, 8), "0"]
    assert by_method["radial"][5] == "0.39, 0.44"
    assert all("0 learned" in s or "0 are good" in s for s in found.sentences)
    assert all(s.endswith("p = 0.016): radial is more robust") for s in found.sentences)
    assert set(found.charts) == {"robustness"}


def test_few_pairs_decide_nothing():
    runs = [run("radial", n, 0.9) for n in range(5)] + [run("mfvi", n, 0.5) for n in range(5)]
    assert all(s.endswith("undecided") for s in compare(runs).sentences)


def test_comparison_refuses_what_cannot_stand_together():
    with pytest.raises(UsageError, match="configuration 3, seed 0, is given twice"):
        compare([run("mfvi", 3, 0.7), run("mfvi", 3, 0.8)])
    with pytest.raises(UsageError, match="same preset"):
        compare([run("mfvi", 3, 0.7), run("radial", 3, 0.8, epochs=6)])


@pytest.mark.parametrize("cls", [MFVI, Radial])
def test_rate_decays_after_every_epoch(cls):
    rates = []

    class Sees(cls):
        def on_train_epoch_start(self):
            super().on_train_epoch_start()
            rates.append(self.optimizers().param_groups[0]["lr"])

    values = {"rate_decay": 0.5, "learning_rate": 0.01, "optimizer": "sgd"}
    make(Sees, values=values).fit(problems.mlp(), Budget(3, 6))
    assert rates == pytest.approx([0.01, 0.005, 0.0025])
