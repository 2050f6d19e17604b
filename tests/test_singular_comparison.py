"""Runs of singular_evidence beside the published tables: rows, z, intervals, slopes, bands, the command."""

import math
from collections import Counter

import numpy as np
import pytest
from scipy import optimize, stats

import bench
from bench import figures, intervals
from bench.cli import main, output
from bench.errors import UsageError
from bench.studies import singular
from bench.studies.singular import EvidenceRun, Triplet, charts, claims, table
from bench.studies.singular.charts import GRID
from bench.studies.singular.models import MODELS

FAR_PRIOR = Triplet("tanh", 576, 0.0, 5.0, 100.0)
AT_FIVE = Triplet("tanh", 576, 5.0, 0.0, 100.0)
GAMMA, GAUSSIAN = "nf_gamma_500_5_100_True", "nf_gaussian_5_5e-2"


def run(method, psis, triplet=AT_FIVE, preset="paper", seed=1, num_train=5000, **other):
    """A run whose data sets are known by seed, triplet's model and truth, n and repetition."""
    digests = np.zeros((len(psis), 32), np.uint8)
    for r in range(len(psis)):
        digests[r, :8] = np.frombuffer(np.int64(hash((seed, triplet[:3], num_train, r))).tobytes(), np.uint8)
    given = {"epochs": 2000, "leading_term": None, "generalisation": (None, None), "functions": None}
    given |= {"digests": digests, "log_evidences": np.full(len(psis), np.nan)}
    return EvidenceRun(
        method, preset, seed, triplet, num_train, psis=np.array(psis, float), **(given | other)
    )


# ---- the published tables


def test_every_published_row_is_there():
    rows = table.published()
    assert Counter(row.table for row in rows) == {2: 64, 3: 64, 4: 48}
    assert len({(row.triplet, table.parsed(row.method)) for row in rows}) == len(rows)
    blocks = Counter((row.table, *row.triplet[1:]) for row in rows)
    for prior in ((5.0, 1.0), (5.0, 100.0)):
        assert blocks[2, 576, 0.0, *prior] == blocks[2, 1024, 0.0, *prior] == 16
        assert blocks[4, 32, None, *prior] == 10
    for prior in ((0.0, 1.0), (0.0, 100.0)):
        assert blocks[3, 576, 5.0, *prior] == blocks[3, 1024, 5.0, *prior] == 16
    assert (blocks[4, 24, None, 5.0, 1.0], blocks[4, 24, None, 5.0, 100.0]) == (16, 12)
    assert all(0 < row.repetitions <= 10 and row.mean < 0 for row in rows)
    assert all((row.sd is None) == (row.repetitions == 1) for row in rows)


@pytest.mark.parametrize(
    ("triplet", "method", "moments"),
    [
        (("tanh", 576, 0, 5, 1), "nf_gaussian_0_1", (10, -12307.14, 1153.17)),
        (("tanh", 576, 0, 5, 1), "nf_gamma_100_1_100_False", (10, -12804.39, 1303.57)),
        (("tanh", 576, 0, 5, 100), "nf_gamma_10_5_100_True", (9, -5909.62, 116.19)),
        (("tanh", 1024, 0, 5, 1), "nf_gamma_10_1_100_True", (5, -19642.01, 449.75)),
        (("tanh", 1024, 0, 5, 100), "nf_gaussian_5_0.05", (10, -182386.08, 155290.52)),
        (("tanh", 576, 5, 0, 1), "nf_gaussian_0_1", (7, -481210.04, 290152.33)),
        (("tanh", 576, 5, 0, 100), "nf_gamma_500_5_100_True", (10, -14548.94, 4430.04)),
        (("tanh", 576, 5, 0, 100), "nf_gaussian_5_5e-2", (10, -87386.90, 26349.19)),
        (("tanh", 1024, 5, 0, 1), "nf_gamma_10_1_100_False", (2, -924993.41, 100733.15)),
        (("tanh", 1024, 5, 0, 100), "nf_gamma_100_1_100_True", (10, -48948.50, 35427.55)),
        (("reduced_rank", 24, None, 5, 1), "nf_gamma_500_5_100_False", (1, -21345.31, None)),
        (("reduced_rank", 24, None, 5, 100), "nf_gaussian_1e0_0.01", (10, -8164.30, 54.74)),
        (("reduced_rank", 32, None, 5, 1), "nf_gamma_100_1_100_True", (10, -35127.52, 107.32)),
        (("reduced_rank", 32, None, 5, 100), "nf_gaussian_5_5e-2", (10, -33611.96, 10019.58)),
    ],
)
def test_runs_find_their_published_row(triplet, method, moments):
    row = table.line(run(method, [-1.0, -2.0], Triplet(*triplet))).published
    assert (row.repetitions, row.mean, row.sd) == moments


@pytest.mark.parametrize(
    "other",
    [{"num_train": 500}, {"epochs": 20}, {"triplet": FAR_PRIOR._replace(prior_variance=2.0)}],
)
def test_runs_without_a_published_row_have_none(other):
    given = {"triplet": FAR_PRIOR} | other
    of = table.line(run(GAUSSIAN, [-1.0, -2.0], **given))
    assert (of.published, of.z, of.sd_ratio) == (None, None, None)
    assert table.line(run("mfvi", [-1.0, -2.0], FAR_PRIOR)).published is None


def test_names_are_read_as_numbers():
    assert table.parsed("nf_gaussian_5_5e-2") == table.parsed("nf_gaussian_5.0_0.05")
    assert table.parsed("nf_gamma_10_1_100_True") != table.parsed("nf_gamma_10_1_100_False")
    assert table.parsed("full_cov_vi") == ("full", "cov", "vi")


# ---- rows


def test_z_and_ratio_of_a_row():
    """Ours: mean -10000, sd 10 of 4; published: -14548.94, sd 4430.04 of 10."""
    values = [-10000 + 10 * math.sqrt(0.75) * sign for sign in (1, 1, -1, -1)]
    of = table.line(run(GAMMA, [*values, np.nan]))
    assert (of.repetitions, of.mean, of.sd) == (4, pytest.approx(-10000), pytest.approx(10))
    assert of.z == pytest.approx(4548.94 / math.sqrt(25 + 4430.04**2 / 10))
    assert of.sd_ratio == pytest.approx(10 / 4430.04)


@pytest.mark.parametrize(("psis", "count"), [([np.nan, np.nan], 0), ([-5.0, np.nan], 1)])
def test_too_few_repetitions_have_no_z(psis, count):
    of = table.line(run(GAMMA, psis))
    assert (of.repetitions, of.sd, of.z) == (count, None, None)
    assert of.mean == (None if count == 0 else -5.0)
    (cells,) = table.rows([of.run])
    assert cells[table.HEADER.index("count")] == f"{count} of 2"


def test_no_z_against_a_single_published_repetition():
    triplet = Triplet("reduced_rank", 24, None, 5.0, 1.0)
    assert table.line(run("nf_gamma_500_5_100_True", [-1.0, -2.0], triplet)).z is None


def test_table_has_the_order_and_the_numbers_of_the_document():
    runs = [
        run("mfvi", [-1.0, -2.0], FAR_PRIOR),
        run(GAMMA, [-14000.0, -15000.0], AT_FIVE, generalisation=(0.5, 0.01)),
        run(GAUSSIAN, [-10000.0, -11000.0], FAR_PRIOR, leading_term=-100.0),
        run("nf_gaussian_0_1", [-4700.0, -4710.0], FAR_PRIOR, leading_term=-100.0),
    ]
    rows = [dict(zip(table.HEADER, row, strict=True)) for row in table.rows(runs)]
    assert [row["method"] for row in rows] == ["nf_gaussian_0_1", GAUSSIAN, GAMMA, "mfvi"]
    assert [row["table"] for row in rows] == ["2", "2", "3", "-"]
    assert [row["published mean"] for row in rows] == ["-4694.71", "-10974.67", "-14548.94", "-"]
    first = rows[0]
    assert (first["count"], first["mean"], first["sd"]) == ("2 of 2", "-4705.00", "7.07")
    assert (first["Psi minus it"], rows[2]["Psi minus it"]) == ("-4605.00", "-")
    assert rows[2]["generalisation error"] == "0.5 ± 0.01"


# ---- differences


def test_welchs_interval_is_scipys():
    rng = np.random.default_rng(0)
    a, b = rng.normal(3, 1, 10), rng.normal(1, 7, 5)
    expected = stats.ttest_ind(a, b, equal_var=False).confidence_interval()
    found = claims.difference(dict(enumerate(a)), dict(enumerate(b, 100)))
    assert (found.low, found.high) == pytest.approx(tuple(expected))
    assert found.basis == "Welch"


def test_shared_data_sets_are_paired():
    rng = np.random.default_rng(0)
    base = rng.normal(0, 100, 8)
    a, b = base + rng.normal(1, 0.1, 8), base
    first, second = dict(enumerate(a)), dict(enumerate(b)) | {99: 1e5}
    expected = stats.ttest_rel(a, b).confidence_interval()
    found = claims.difference(first, second)
    assert (found.low, found.high) == pytest.approx(tuple(expected))
    assert (found.basis, found.sign()) == ("paired over 8 data sets", 1)
    back = claims.difference(second, first)
    assert (back.centre, back.sign()) == (pytest.approx(-found.centre), -1)


def test_too_few_data_sets_have_no_interval():
    found = claims.difference({0: 1.0, 1: 2.0}, {0: 0.0, 1: 0.0})
    assert (found.centre, found.sign()) == (1.5, 0)
    assert "no interval below 3" in f"{found:.2f}"
    assert claims.difference({}, {0: 0.0}) is None


def test_paired_interval_covers():
    """300 intervals of 95%: fewer than 270 that cover have probability 2e-4."""
    rng = np.random.default_rng(1)
    changes = rng.normal(2, 3, (300, 10))
    found = [claims.difference(dict(enumerate(c)), dict.fromkeys(range(10), 0.0)) for c in changes]
    assert sum(f.low < 2 < f.high for f in found) >= 270


# ---- claims


def test_pairs_have_sources_of_one_mean():
    psis = [-1.0, -2.0, -3.0]
    names = [GAMMA, "nf_gamma_500_5_100_False", "nf_gamma_100_1_100_True"]
    names += [GAUSSIAN, "nf_gaussian_1_1e-2", "mfvi"]
    found = claims.claims([run(name, psis) for name in names])
    assert {(c.what, c.gamma, c.gaussian) for c in found} == {
        (claims.LEARNED, GAMMA, GAUSSIAN),
        (claims.LEARNED, "nf_gamma_100_1_100_True", "nf_gaussian_1_1e-2"),
    }
    found = claims.claims([run(name, psis, FAR_PRIOR) for name in names])
    assert {(c.what, c.gamma, c.gaussian) for c in found} == {
        (claims.FAR, GAMMA, GAUSSIAN),
        (claims.FAR, "nf_gamma_500_5_100_False", GAUSSIAN),
    }
    assert not claims.claims([run(name, psis, Triplet("linear", 5, 0.0, 0.0, 1.0)) for name in names])


def test_claims_pair_within_preset_and_size():
    runs = [run(GAMMA, [-1.0, -1.5, -2.0]), run(GAUSSIAN, [-3.0, -4.0, -5.0], preset="standard")]
    assert not claims.claims(runs)
    assert not claims.claims([runs[0], runs[1]._replace(preset="paper", num_train=500)])
    (claim,) = claims.claims([runs[0], runs[1]._replace(preset="paper")])
    assert (claim.difference.basis, claim.difference.centre) == (
        "paired over 3 data sets",
        pytest.approx(2.5),
    )
    assert str(claim).endswith(": shown")


def test_seeds_are_pooled():
    runs = [run(m, [c, c + 1], seed=s) for s in (1, 2) for m, c in ((GAMMA, -10.0), (GAUSSIAN, -20.0))]
    (claim,) = claims.claims(runs)
    assert (claim.difference.basis, claim.difference.centre) == ("paired over 4 data sets", pytest.approx(10))


def test_rise_of_the_standard_preset():
    runs = [run(GAMMA, [-1.0, -2.0, -3.0], preset="standard"), run(GAMMA, [-2.0, -4.0, -6.0])]
    runs += [run(GAUSSIAN, [-2.0, -4.0, -6.0])]
    (rise,) = claims.rises(runs)
    assert (rise.method, rise.paper.mean, rise.standard.mean) == (GAMMA, -4.0, -2.0)
    assert rise.difference.centre == 2.0
    (rise,) = claims.rises([runs[0], run(GAMMA, [np.nan] * 3)])
    assert (rise.paper, rise.difference) == (None, None)


# ---- slopes


def test_slope_is_that_of_least_squares():
    """Against scipy on the means, and the spread of the repetitions' own slopes."""
    rng = np.random.default_rng(0)
    sizes, well = (100, 500, 5000), Triplet("tanh", 16, 0.0, 0.0, 1.0)
    log_n = np.log(sizes)
    psis = -7.0 + (-3 + rng.normal(0, 0.2, 6))[:, None] * log_n + rng.normal(0, 0.1, (6, 3))
    runs = [run(GAMMA, psis[:, i], well, num_train=n) for i, n in enumerate(sizes)]
    (found,) = claims.slopes(runs[::-1])
    assert found.sizes == sizes
    assert found.slope == pytest.approx(stats.linregress(log_n, psis.mean(0)).slope)
    each = [stats.linregress(log_n, p).slope for p in psis]
    assert found.standard_error == pytest.approx(stats.sem(each))
    assert found.expected == pytest.approx(-(16 + 16 + 4) / 18)
    lost = runs[1]._replace(psis=np.r_[np.nan, psis[1:, 1]])
    (found,) = claims.slopes([runs[0], lost, runs[2]])
    assert (found.repetitions, found.slope) == (5, pytest.approx(np.mean(each[1:])))


def test_slope_of_the_log_evidence_stands_beside_that_of_psi():
    """Of the repetitions that converged everywhere, the second and third; Psi lacks 3 and 5 nats there."""
    sizes = (100, 1000)
    psis, evidences = ([np.nan, -4.0, -6.0], [-9.0, -9.0, -11.0]), ([-1.0, -2.0, -3.0], [-5.0, -6.0, -6.0])
    runs = [
        run(GAMMA, p, num_train=n, log_evidences=np.array(e))
        for n, p, e in zip(sizes, psis, evidences, strict=True)
    ]
    (found,) = claims.slopes(runs)
    assert found.repetitions == 2
    assert found.slope == pytest.approx(-5 / math.log(10))
    assert found.evidence == pytest.approx(-3.5 / math.log(10))
    assert found.lacking == pytest.approx((3 + 5) / 2)
    assert str(found).endswith(f"the slope of the log evidence {-3.5 / math.log(10):.2f}")
    (unknown,) = claims.slopes([runs[0], runs[1]._replace(log_evidences=np.full(3, np.nan))])
    assert math.isnan(unknown.evidence)
    assert math.isnan(unknown.lacking)
    assert "evidence" not in str(unknown)


def test_slope_needs_several_sizes_and_a_repetition():
    assert not claims.slopes([run(GAMMA, [-1.0]), run(GAUSSIAN, [-1.0], num_train=100)])
    (found,) = claims.slopes([run(GAMMA, [np.nan]), run(GAMMA, [-1.0], num_train=100)])
    assert (math.isnan(found.slope), found.repetitions, found.expected) == (True, 0, None)


@pytest.mark.parametrize(
    ("model", "hidden", "true_weight", "coefficient"),
    [
        ("tanh", 576, 0.0, 12.0),
        ("tanh", 1024, 0.0, 16.0),
        ("tanh", 576, 5.0, None),
        ("reduced_rank", 24, None, 324.0),
        ("reduced_rank", 32, None, 560.0),
        ("linear", 7, 1.0, 3.5),
    ],
)
def test_learning_coefficients_are_those_of_table_1(model, hidden, true_weight, coefficient):
    found = MODELS[model](hidden, true_weight or 0.0).learning_coefficient()
    assert (None if found is None else found[0]) == coefficient


# ---- predictive bands


def test_mixture_quantiles_are_the_roots_of_the_mixture():
    rng = np.random.default_rng(0)
    functions = rng.normal(0, 1, (40, 6)) * np.array([0, 0.1, 1, 10, 1e3, 1e5]) + np.arange(6)
    found = intervals.mixture_quantiles(functions, (0.05, 0.5, 0.95))
    assert found.shape == (3, 6)
    for p, row in zip((0.05, 0.5, 0.95), found, strict=True):
        for f, quantile in zip(functions.T, row, strict=True):
            excess = lambda y, f=f, p=p: stats.norm.cdf(y - f).mean() - p  # noqa: E731
            root = optimize.brentq(excess, f.min() - 10, f.max() + 10, xtol=1e-12)
            assert excess(quantile) == pytest.approx(0, abs=1e-9)
            if np.ptp(f) < 100:  # far apart, the distribution function is flat between draws
                assert quantile == pytest.approx(root, abs=1e-8)


def test_one_draw_has_the_quantiles_of_a_normal():
    found = intervals.mixture_quantiles(np.array([[2.0, -3000.0]], np.float32), (0.05, 0.95))
    normal = stats.norm.ppf([0.05, 0.95])[:, None] + np.array([2.0, -3000.0])
    np.testing.assert_allclose(found, normal, atol=1e-9)


def values(chart):
    """All rows of data in a chart's specification."""
    if isinstance(chart, dict):
        for key, value in chart.items():
            if key == "values" and isinstance(value, list):
                yield from value
            else:
                yield from values(value)
    elif isinstance(chart, list):
        for value in chart:
            yield from values(value)


@pytest.mark.parametrize(("triplet", "scale"), [(AT_FIVE, 2880.0), (FAR_PRIOR, 0.0)])
def test_bands_show_the_truth_and_its_noise(triplet, scale, tmp_path):
    functions = np.full((500, len(GRID)), 3.0, np.float32)
    runs = [run(m, [-1.0, -2.0], triplet, functions=functions) for m in (GAMMA, GAUSSIAN)]
    (chart,) = (drawn := charts.predictive_charts(runs)).values()
    rows = list(values(chart.to_dict()))
    assert {row["x"] for row in rows} == set(GRID)
    for row in rows:
        centre = scale * math.tanh(5 * row["x"]) if row["series"] == "truth" else 3.0
        assert row["centre"] == pytest.approx(centre)
        assert row["high"] - row["centre"] == pytest.approx(1.6448536)
        assert row["centre"] - row["low"] == pytest.approx(1.6448536)
    assert chart.to_json().count('"subtitle": [') == 2
    assert len(figures.save(drawn, tmp_path, "footer")) == 2


def test_psi_against_n_is_drawn(tmp_path):
    well = Triplet("tanh", 16, 0.0, 0.0, 1.0)
    runs = [
        run(GAMMA, [-n / 10, -n / 10 - 2], well, num_train=n, leading_term=-float(n)) for n in (100, 1000)
    ]
    (chart,) = (drawn := charts.psi_charts(runs)).values()
    rows = {(row["series"], row["x"]): row for row in values(chart.to_dict())}
    assert len(rows) == 4
    shown = rows["Psi", 100]
    assert (shown["centre"], shown["high"] - shown["low"]) == (-11, pytest.approx(2))  # standard error 1
    assert rows["-lambda log n + (m - 1) log log n", 1000]["centre"] == -1000
    assert '"type": "log"' in chart.to_json()
    assert len(figures.save(drawn, tmp_path, "footer")) == 2
    assert not charts.psi_charts([runs[0], run(GAMMA, [np.nan], well, num_train=5)])


# ---- what is refused


def test_runs_that_do_not_share_their_data_are_refused():
    ours, theirs = run(GAMMA, [-1.0, -2.0]), run(GAUSSIAN, [-1.0, -2.0, -3.0])
    table.check([ours, theirs])
    other = theirs._replace(digests=theirs.digests[::-1])
    with pytest.raises(UsageError, match="has other data sets than"):
        singular.compare([ours, other])
    table.check([ours, other._replace(seed=2)])
    table.check([ours, other._replace(num_train=10)])
    table.check([ours, other._replace(triplet=FAR_PRIOR)])
    with pytest.raises(UsageError, match="other data sets"):  # the prior draws no data
        table.check([ours, other._replace(triplet=AT_FIVE._replace(prior_mean=9.0))])


def test_runs_given_twice_are_refused():
    with pytest.raises(UsageError, match=r"nf_gaussian_5_5e-2 \(tanh, H = 576.*seed 1\): given twice"):
        singular.compare([run(GAUSSIAN, [-1.0]), run(GAUSSIAN, [-1.0])])


# ---- the command

TINY = {"hidden": 4, "prior_mean": 0.0, "prior_variance": 1.0, "epochs": 2, "repetitions": 3, "draws": 10}


@pytest.mark.slow
def test_command_draws_tabulates_and_says(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(output, "_width", 300)
    done = [
        bench.run(
            method, "singular_evidence", seed=1, task_settings=TINY | {"num_train": n}, out=tmp_path / "runs"
        ).directory
        for method, n in ((GAMMA, 50), (GAUSSIAN, 50), ("mfvi", 50), ("mfvi", 100))
    ]
    capsys.readouterr()
    assert main(["figures", *map(str, done), "--to", str(tmp_path / "f")]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert len(list((tmp_path / "f").glob("predictive-*.svg"))) == 2
    assert len(list((tmp_path / "f").glob("psi-*.svg"))) == 1
    (header,) = [i for i, row in enumerate(shown) if row.startswith("table  model")]
    rows = shown[header + 2 : header + 6]  # below a rule
    assert [row.split()[0] for row in rows] == ["-"] * 4
    assert all("standard, epochs=2, draws=10" in row for row in rows)
    assert sum(f"{GAMMA} minus {GAUSSIAN} in Psi is" in row for row in shown) == 1
    assert sum("mfvi: Psi has slope" in row and "-lambda is -1" in row for row in shown) == 1
