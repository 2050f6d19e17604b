"""docs/uci.md: its short table by hand-made lines, its sweep, and the predictors that are no networks."""

import csv
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from scipy.spatial.distance import cdist
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

from bench.intervals import Interval
from bench.leaderboard.evidence.entries import committed
from bench.runs.resolution import resolve
from bench.studies.published_splits import mc_dropout, table_4_2
from bench.sweep import sweep
from bench.tasks.uci_regression import Settings, UCIRegression

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def scripts():
    """The parts of the page, and what makes its reference rows."""
    places = [str(ROOT / name) for name in ("benchmarks", "docs")]
    sys.path[:0] = places
    modules = {"page": "parts.uci", "references": "uci_references"}
    yield SimpleNamespace(**{name: importlib.import_module(of) for name, of in modules.items()})
    for place in places:
        sys.path.remove(place)


# ------------------------------------------------------------------------------------------------- the page


def line(page, name, task, low, high, rest=""):
    """A line whose gain has these limits."""
    gain = Interval((low + high) / 2, low, high, "n = 20")
    return page.Line(name, task, rest, 1, gain, gain, np.zeros((2, 20)), dict.fromkeys(page.SCORES, 0.5))


def cells(table):
    """Cells of a Markdown table by the first one of their row."""
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()]
    return {row[0]: row[1:] for row in rows}


def test_the_short_table_marks_what_an_interval_shows(scripts, monkeypatch):
    """In bold the largest gain of a table, among the methods alone."""
    page = scripts.page
    given = [
        line(page, "map", "uci_boston", 0.1, 0.3),
        line(page, "map", "uci_wine", -0.3, -0.1),
        line(page, "mfvi", "uci_boston", -0.1, 0.2),
        line(page, "mfvi", "uci_wine", -0.2, 0.1, rest="hidden=7"),
    ]
    broken = [("mfvi", "uci_yacht", "", [(Path(), SimpleNamespace(status="diverged"))])]
    monkeypatch.setattr(page, "lines", lambda: given)
    monkeypatch.setattr(page, "references", lambda: [line(page, "ridge", "uci_boston", 0.8, 1.2)])
    monkeypatch.setattr(page, "on_published_splits", lambda: broken)
    table = cells(page.short())
    of = {name: dict(zip(table["method"], row, strict=True)) for name, row in table.items()}
    assert list(table)[2:] == ["`mfvi`", "`map`", "ridge (no network)"]
    assert (of["`map`"]["boston"], of["`map`"]["wine"]) == ("**+0.20** ▲", "**-0.20** ▼")
    assert (of["`mfvi`"]["boston"], of["`mfvi`"]["wine"], of["`mfvi`"]["yacht"]) == ("+0.05", "-", "diverged")
    assert of["ridge (no network)"]["boston"] == "+1.00 ▲"
    assert [row[0] for row in table.values()][2:] == ["0 / 1 / 0", "1 / 0 / 1", "1 / 0 / 0"]
    assert "1 are better than the published MC dropout, 1 show no difference, 1 are worse" in page.standing()
    best = cells(page.best())
    assert best["`uci_boston`"][0::2] == ["`map`", "ridge"]
    assert best["`uci_yacht`"] == ["-"] * 4


def test_the_grid_of_the_page_makes_every_committed_run_on_published_splits():
    cells = sweep.read(ROOT / "docs" / "uci.yaml")
    asked = {(cell.method, cell.task, cell.task_settings.get("test_samples", 80)) for cell in cells}
    assert len(asked) == len(cells) == 12 * 9 + 4 * 5
    assert all(cell.task_settings["published_splits"] is True for cell in cells)
    kept = {
        (record.method.identity, record.task.name, record.task.settings["test_samples"])
        for _, record in committed()
        if record.task.settings.get("published_splits") and record.task.name in {cell.task for cell in cells}
    }
    assert kept
    assert kept <= asked
    identities = [resolve(cell).task_identity for cell in (cells[0], cells[-1])]
    assert identities == ["uci_yacht+published_splits=true", "uci_wine+published_splits=true"]


def test_claims_on_table_4_2_are_what_it_prints():
    """Sides, sizes and margins, a tenth of what is printed between mean-field inference and MC dropout."""
    claims = {c["id"]: c for c in yaml.safe_load((ROOT / "docs" / "findings.yaml").read_text())}
    assert sorted(table_4_2()) == sorted(mc_dropout())
    for table, rows in table_4_2().items():
        mfvi, radial, dropout = (rows[name][0].value for name in ("MFVI", "Radial", "Dropout"))
        apart, level = claims[f"uci-{table}-dropout"], claims[f"uci-{table}-radial"]
        assert apart["size"] == pytest.approx(abs(mfvi - dropout))
        assert apart["direction"] == ("above" if mfvi > dropout else "below")
        assert apart["margin"] == pytest.approx(abs(mfvi - dropout) / 10, abs=0.005)
        assert f"({mfvi:.2f} against {dropout:.2f})" in apart["claim"]
        assert level.get("within", level.get("margin")) == apart["margin"]
        if "within" in level:
            assert abs(radial - mfvi) < 0.015
        else:
            assert (level["direction"], level["size"]) == ("above", pytest.approx(radial - mfvi))
            assert f"({radial:.2f} against {mfvi:.2f})" in level["claim"]


# -------------------------------------------------------------------------- predictors that are no networks


def rows(scripts, inputs, targets, held_out=20, test=1000):
    """Rows of one law: the last ones are tested, those before them held out."""
    parts = np.split(np.arange(len(targets)), [len(targets) - held_out - test, len(targets) - test])
    train, val, last = parts
    return scripts.references.Rows(inputs[train], targets[train], inputs[val], targets[val], inputs[last])


def test_a_gaussian_process_is_its_closed_form(scripts, monkeypatch):
    """Of fixed scales; the control leaves the noise out of the variance."""
    kernel = ConstantKernel(2.0, "fixed") * RBF(0.7, "fixed") + WhiteKernel(0.3, "fixed")
    monkeypatch.setattr(scripts.references, "process", lambda inputs: GaussianProcessRegressor(kernel))
    generator = np.random.default_rng(0)
    given = rows(scripts, generator.normal(size=(30, 2)), generator.normal(size=30), 5, 10)
    found = scripts.references.gaussian_process(given)

    def k(a, b):
        return 2 * np.exp(-cdist(a, b, "sqeuclidean") / (2 * 0.7**2))

    weights = k(given.test, given.inputs) @ np.linalg.inv(k(given.inputs, given.inputs) + 0.3 * np.eye(15))
    variance = 2 + 0.3 - (weights * k(given.test, given.inputs)).sum(1)
    np.testing.assert_allclose(found.mean, weights @ given.targets, atol=1e-8)
    np.testing.assert_allclose(found.sd**2, variance, atol=1e-8)
    assert (np.abs(found.sd**2 - (variance - 0.3)) > 0.1).all()
    np.testing.assert_allclose(found.high - found.mean, 1.6448536 * found.sd)


def test_the_natural_gradient_is_the_gradient_over_the_fisher_information(scripts):
    """By central differences; the Fisher information of N(m, s^2) by m and log s is diag(1/s^2, 2)."""
    target, at = np.array([1.3]), np.array([[0.4], [-0.6]])
    for i, fisher in enumerate((np.exp(1.2), 2.0)):
        step = 1e-6 * np.eye(2)[i][:, None]
        ahead, behind = (scripts.references.loss(target, at + of) for of in (step, -step))
        slope = (ahead - behind) / 2e-6
        found = scripts.references.natural_gradient(target, *at)[i, 0]
        assert found == pytest.approx(slope / fisher, rel=1e-6)
        assert found != pytest.approx(slope, rel=0.1)


def test_boosting_of_normals_finds_noise_that_differs(scripts):
    """Within 0.3 nats of the true law; the best single normal noise is 0.3 behind that. The seed is fixed."""
    generator = np.random.default_rng(0)
    inputs = generator.uniform(-1, 1, (2200, 2))
    sd = np.where(inputs[:, 1] > 0, 1.0, 0.1)
    targets = np.sign(inputs[:, 0]) + sd * generator.normal(size=len(inputs))
    given = rows(scripts, inputs, targets, held_out=200)
    found, last = scripts.references.boosted_normals(given), targets[-1000:]
    told = scripts.references.scored(found, last, 0, 1)["log_likelihood"]
    true = scripts.references.normal(np.sign(given.test[:, 0]), sd[-1000:])
    right = scripts.references.scored(true, last, 0, 1)["log_likelihood"]
    same = scripts.references.normal(true.mean, np.full(1000, np.sqrt((true.sd**2).mean())))
    assert right - 0.3 < told < right + 0.02
    assert scripts.references.scored(same, last, 0, 1)["log_likelihood"] < right - 0.6


def test_conformal_intervals_cover_what_they_promise_whatever_the_law(scripts):
    """Of 20 held-out rows the 19th residual: 19/21 in expectation, though the line is wrong and tails heavy.

    A world's coverage is Beta(19, 2), so the mean of 150 has a standard error of 0.0053 (with 200 rows of a
    world): bands of four leave a false-alarm rate of 6e-5. The 18th residual, the plain quantile of 90%,
    covers 18/21, which is the control.
    """
    covered, plain = [], []
    for seed in range(150):
        generator = np.random.default_rng(seed)
        inputs = generator.normal(size=(30 + 20 + 200, 1))
        targets = inputs[:, 0] ** 3 + generator.standard_t(2, len(inputs))
        given = rows(scripts, inputs, targets, test=200)
        both = given._replace(test=np.concatenate([given.held_out, given.test]))
        found, last = scripts.references.conformal_ridge(both), targets[-200:]
        away = np.abs(targets[30:] - found.mean)
        covered.append(((found.low[20:] <= last) & (last <= found.high[20:])).mean())
        plain.append((away[20:] <= np.sort(away[:20])[17]).mean())
    assert abs(np.mean(covered) - 19 / 21) < 4 * 0.0053
    assert np.mean(plain) < 19 / 21 - 4 * 0.0053


def test_references_are_scored_as_the_task_scores(scripts):
    """One normal for every row: all that it is scored by is what the task finds."""
    task = UCIRegression(Settings(dataset="diabetes", splits=2))
    told, arrays = [], {"mean": [], "variance": [], "centre_and_scale": []}
    for split, targets in enumerate(task.targets()["targets"]):
        given, centre, scale = scripts.references.rows_of(task, split)
        found = scripts.references.linear(given)
        told.append(scripts.references.scored(found, targets, centre, scale))
        arrays["mean"].append(found.mean[None])
        arrays["variance"].append(found.sd[None] ** 2)
        arrays["centre_and_scale"].append((centre, scale))
    right = task.score({name: np.array(values) for name, values in arrays.items()} | task.targets())
    for name in ("log_likelihood", "rmse", "crps", "interval_score_90", "width_90"):
        assert np.mean([of[name] for of in told]) == pytest.approx(right[name], rel=1e-6)
    coverage = np.mean([of["covered_90"] for of in told])
    assert abs(coverage - 0.9) == pytest.approx(right["coverage_error"], abs=1e-9)


def test_tables_that_are_made_again_take_the_place_of_their_rows(scripts):
    made = "table,reference,split,rmse\nwine,a,0,9\nwine,a,1,8\n"
    kept = "table,reference,split,rmse\nboston,a,0,1\nwine,a,0,2\nyacht,a,0,3\n"
    whole = "table,reference,split,rmse\nboston,a,0,1\nwine,a,0,9\nwine,a,1,8\nyacht,a,0,3\n"
    assert scripts.references.merged(kept, made) == whole
    assert scripts.references.merged("", made) == made


def test_every_reference_has_a_row_for_every_published_split(scripts):
    """But the Gaussian process where a table is large; and all that is told is a number."""
    found = {}
    for row in csv.DictReader((ROOT / "benchmarks" / "uci_references.csv").read_text().splitlines()):
        found.setdefault((row["table"], row["reference"]), []).append(row)
    large = {"kin8nm", "naval", "power_plant", "protein"}
    every = {(table, name) for table in mc_dropout() for name in scripts.references.REFERENCES}
    assert found.keys() == every - {(table, "Gaussian process") for table in large}
    for (table, name), told in found.items():
        assert [int(row["split"]) for row in told] == list(range(len(mc_dropout()[table])))
        is_density = name in ("Gaussian process", "Bayesian linear regression", "boosting of normals")
        for row in told:
            empty = {score for score in scripts.references.SCORES if not row[score]}
            assert empty == (set() if is_density else {"log_likelihood", "crps"})
            assert 0 <= float(row["covered_90"]) <= 1
            assert float(row["interval_score_90"]) >= float(row["width_90"]) * (1 - 1e-5) > 0
