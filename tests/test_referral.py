"""Referral against scikit-learn, torchmetrics, closed forms and cases by hand; broken uncertainties are seen.

"False alarm" is the probability that a correct program fails a statistical test; seeds are fixed. An AUC's
variance is at most AUC (1 - AUC) / (examples of the rarer class), Birnbaum and Klose 1957.
"""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ndtr
from sklearn.metrics import brier_score_loss, roc_auc_score, roc_curve
from torchmetrics.functional.classification import binary_calibration_error

from bench import metrics
from bench.contract import Undefined
from bench.errors import UsageError
from bench.metrics import referral_auc
from bench.predictions import Bernoulli
from bench.studies import referral, referral_comparison
from bench.studies.referral import GRID, Readings

SIZES = [0, 0.1, 0.2, 0.3, 0.5]


def read(probabilities, labels, information=None, deviation=None, patients=None):
    """Readings of images with these probabilities of sick."""
    p, size = np.asarray(probabilities, float), len(labels)
    return Readings.of(
        {
            "log_probs": np.log(np.stack([1 - p, p], 1)),
            "information": np.zeros(size) if information is None else np.asarray(information),
            "deviation": np.zeros(size) if deviation is None else np.asarray(deviation),
            "patients": np.arange(size) if patients is None else np.asarray(patients),
            "labels": np.asarray(labels, np.uint8),
        }
    )


def drawn(size, seed=0):
    """Labels, calibrated probabilities with ties, and a random uncertainty."""
    g = np.random.default_rng(seed)
    p = g.integers(1, 40, size) / 40
    return (g.random(size) < p).astype(int), p, g.random(size)


# ------------------------------------------------------------------------------------------- referral_auc


@pytest.mark.parametrize("size", [10, 37, 500])
@pytest.mark.parametrize("coarse", [False, True])
def test_referral_auc_is_scikit_learns_on_what_is_kept(size, coarse):
    """With ties in the scores; also with ties in the uncertainty."""
    labels, scores, uncertainty = drawn(size)
    uncertainty = uncertainty.round(1) if coarse else uncertainty
    found = referral_auc(labels, scores, uncertainty, SIZES)
    for fraction, area in zip(SIZES, found, strict=True):
        rows = sorted(range(size), key=lambda i: uncertainty[i])[: round(size * (1 - fraction))]
        assert area == pytest.approx(roc_auc_score(labels[rows], scores[rows]), abs=1e-12)
    assert all(type(area) is float for area in found)


def test_perfect_uncertainty_leaves_no_mistake():
    """Two of ten are on the wrong side, and are the most uncertain."""
    labels = [0, 0, 0, 0, 1, 1, 1, 1, 1, 0]
    scores = [0.1, 0.2, 0.3, 0.4, 0.6, 0.7, 0.8, 0.9, 0.0, 1.0]
    uncertainty = [0.0] * 8 + [1.0, 2.0]
    found = referral_auc(labels, scores, uncertainty, [0, 0.1, 0.2])
    assert found == pytest.approx([16 / 25, 20 / 25, 1.0])


def test_equally_uncertain_examples_are_kept_from_the_first_on():
    labels, scores = [1, 0, 1, 0], [0.9, 0.1, 0.1, 0.9]
    assert referral_auc(labels, scores, [7.0] * 4, [0, 0.5]) == [0.5, 1.0]
    assert referral_auc(labels[::-1], scores[::-1], [7.0] * 4, [0, 0.5]) == [0.5, 0.0]


def test_constant_uncertainty_is_flat_over_random_file_orders():
    """Given its class counts, an AUC on a random subset has the AUC of all as mean. False alarm: 6e-7."""
    labels, scores, _ = drawn(60)
    g, found = np.random.default_rng(1), []
    for _ in range(500):
        rows = g.permutation(60)
        found.append(referral_auc(labels[rows], scores[rows], np.zeros(60), [0.5])[0])
    whole = roc_auc_score(labels, scores)
    assert abs(np.mean(found) - whole) < 5 * np.std(found) / math.sqrt(500)


@pytest.mark.parametrize(
    ("size", "fraction", "kept"),
    [(5, 0.1, 4), (5, 0.3, 4), (5, 0.5, 2), (7, 0.5, 4), (3, 0.5, 2), (10, 0.3, 7), (4, 0, 4), (4, 0.9, 0)],
)
def test_as_many_are_kept_as_python_rounds(size, fraction, kept):
    """A half goes to the even number: 4.5, 3.5 (in floating point), 2.5, 3.5, 1.5, 7, 4 and 0.4."""
    labels = np.arange(size) % 2
    # The uncertainty says how many are left: the last one kept is alone in being ranked wrongly.
    scores = labels + 2.0 * (np.arange(size) == kept) * (1 - 2 * labels)
    right = referral_auc(labels, scores, np.arange(size), [fraction])[0]
    assert math.isnan(right) if kept < 2 else right == 1.0
    if 2 <= kept < size:
        more = np.flatnonzero(np.arange(size) <= kept)
        assert roc_auc_score(labels[more], scores[more]) < 1


def test_one_class_left_has_no_auc():
    found = referral_auc([0, 0, 1], [0.1, 0.2, 0.9], [0, 1, 2], [0, 0.3, 0.6, 1])
    assert found[0] == 1.0
    assert all(math.isnan(area) for area in found[1:])
    assert math.isnan(referral_auc([], [], [], [0])[0])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (([0, 1], [0.5], [1, 2], [0]), "of one length"),
        (([[0, 1]], [[0.5, 1]], [[1, 2]], [0]), "of one length"),
        (([0, 2], [0.5, 0.1], [1, 2], [0]), "labels 0 or 1"),
        (([0, 1], [0.5, math.nan], [1, 2], [0]), "not NaN"),
        (([0, 1], [0.5, 0.1], [math.nan, 2], [0]), "not NaN"),
        (([0, 1], [0.5, 0.1], [1, 2], [0, 10]), r"fractions in \[0, 1\]"),
    ],
)
def test_bad_input_is_told_in_one_line(arguments, said):
    with pytest.raises(UsageError, match=said) as info:
        referral_auc(*arguments)
    assert "\n" not in str(info.value)


# --------------------------------------------------------------------- a world whose referral curve is known


def clear_and_hidden(size, distance=2.0):
    """Half of the photographs are clear, scores N(+-distance/2, 1); the others hide all, scores N(0, 1).

    Returns:
        Labels, scores, and whether a photograph hides all.
    """
    g = np.random.default_rng(2)
    labels, hidden = g.integers(2, size=size), np.arange(size) % 2
    return labels, g.normal((labels - 0.5) * distance * (1 - hidden)), hidden


def near(found, expected, size):
    """Within 5 standard errors of an AUC over half of as many images: false alarm below 6e-7."""
    return abs(found - expected) < 5 * math.sqrt(expected * (1 - expected) / (size / 5))


def test_referral_curve_has_its_closed_form_and_broken_uncertainties_do_not():
    """Honest: Phi(d / sqrt 2) once half are referred. Negative controls: shuffled flat, inverted 1/2."""
    size = 20_000
    labels, scores, hidden = clear_and_hidden(size)
    clear, mixed = ndtr(2 / math.sqrt(2)), ndtr(1 / math.sqrt(2))
    whole = clear / 4 + mixed / 2 + 1 / 8
    shuffled = np.random.default_rng(3).permutation(size)
    for uncertainty, expected in ((hidden, clear), (shuffled, whole), (-hidden, 0.5)):
        at_none, at_half = referral_auc(labels, scores, uncertainty, [0, 0.5])
        assert near(at_none, whole, size)
        assert near(at_half, expected, size)
    assert not near(clear, whole, size)
    assert not near(0.5, whole, size)


def test_runs_tell_their_negative_controls():
    """The same world through what a run stores."""
    size = 4000
    labels, scores, hidden = clear_and_hidden(size)
    readings = read(1 / (1 + np.exp(-scores)), labels, information=hidden + 1e-3, deviation=hidden + 1.0)
    honest = [readings.values[f"auc_{p}_information"] for p in GRID]
    controls = referral.controls(readings)
    assert list(controls) == ["mutual information, shuffled", "mutual information, inverted"]
    shuffled, inverted = controls.values()
    assert honest[-1] > honest[0] + 0.1
    assert inverted[-1] < inverted[0] - 0.1
    assert near(shuffled[-1], shuffled[0], size)


# ------------------------------------------------------------------------------------------ numbers by hand


def test_four_images_by_hand():
    """Probabilities 0.05, 0.45, 0.6, 0.95 of a healthy, a sick, a healthy and a sick eye."""
    found = read([0.05, 0.45, 0.6, 0.95], [0, 1, 0, 1]).values
    assert found["nll"] == pytest.approx(-np.log([0.95, 0.45, 0.4, 0.95]).mean())
    assert found["accuracy"] == 0.5
    assert found["brier"] == pytest.approx((0.05**2 + 0.55**2 + 0.6**2 + 0.05**2) / 4)
    assert found["ece"] == pytest.approx((0.05 + 0.55 + 0.6 + 0.05) / 4)
    assert found["adaptive_ece"] == pytest.approx((0.05 + 0.55 + 0.6 + 0.05) / 4)
    assert found["auc_0"] == 0.75
    assert found["expected_cost"] == 1 / 4  # all but the first are sent to a doctor, one of them healthy
    assert read([0.05, 0.05, 0.6, 0.95], [0, 1, 0, 1]).values["expected_cost"] == (10 + 1) / 4
    assert found["sensitivity_80"] == 0.5  # only the last is above every healthy one


def test_threshold_is_that_of_the_price():
    """At p = 1/11 sending a healthy eye costs as much as missing a sick one; there doubt is largest."""
    readings = read([1 / 11 + 1e-9, 1 / 11 - 1e-9, 0.5, 0.001], [0, 0, 0, 0])
    assert readings.values["expected_cost"] == 2 / 4
    assert np.argsort(readings.uncertainty["threshold"]).tolist()[:2] == [3, 2]
    assert np.argsort(readings.uncertainty["entropy"]).tolist() == [3, 1, 0, 2]


def test_entropy_refers_in_the_order_of_closeness_to_one_half():
    _, p, _ = drawn(200)
    entropy = read(p, np.zeros(200)).uncertainty["entropy"]
    closeness = -np.abs(p - 0.5)
    larger = np.sign(np.subtract.outer(closeness, closeness).round(12))
    assert (larger == np.sign(np.subtract.outer(entropy, entropy).round(12))).all()


def test_statistics_are_those_of_kept_libraries():
    """scikit-learn's Brier score and ROC curve; torchmetrics' calibration error, in float32."""
    labels, p, _ = drawn(501, seed=5)
    p = np.clip(p + np.random.default_rng(6).normal(0, 0.001, 501), 0.001, 0.999)  # off the bins' edges
    found = read(p, labels).values
    assert found["brier"] == pytest.approx(brier_score_loss(labels, p))
    assert found["auc_0"] == pytest.approx(roc_auc_score(labels, p))
    ece = binary_calibration_error(torch.tensor(p), torch.tensor(labels), n_bins=10)
    assert found["ece"] == pytest.approx(float(ece), abs=1e-6)
    alarms, sensitivity, _ = roc_curve(labels, p, drop_intermediate=False)
    for percent in referral.SPECIFICITIES:
        best = sensitivity[1 - alarms >= percent / 100].max()
        assert found[f"sensitivity_{percent}"] == pytest.approx(best)


def test_adaptive_bins_hold_as_many_images():
    """Of 25 different predictions ten bins hold 2 or 3; equal predictions share one bin."""
    labels, p = np.arange(25) % 2, np.linspace(0.01, 0.99, 25)
    share, predicted, sick = read(p, labels).calibration(np.ones(25), adaptive=True)
    assert sorted((25 * share).round().astype(int).tolist()) == [2] * 5 + [3] * 5
    assert share @ predicted == pytest.approx(p.mean())
    assert share @ sick == pytest.approx(labels.mean())
    tied = read([0.3] * 10, [1] * 3 + [0] * 7)
    assert tied.values["adaptive_ece"] == pytest.approx(0, abs=1e-12)


def test_area_is_the_mean_over_the_grid():
    labels, p, uncertainty = drawn(300)
    readings = read(p, labels, uncertainty, uncertainty**2)
    expected = np.mean(referral_auc(labels, p, uncertainty, [i / 20 for i in range(11)]))
    for name in referral.SPREADS:
        assert readings.values[f"referral_area_{name}"] == pytest.approx(expected)
    gain = expected - readings.values["referral_area_threshold"]
    assert readings.values["information_over_threshold"] == pytest.approx(gain)


# ------------------------------------------------------------------------------------------------ bootstrap


@settings(max_examples=40)
@given(st.lists(st.integers(0, 3), min_size=12, max_size=12), st.integers(0, 5))
def test_counts_mean_repeated_images(counts, seed):
    """A resample scores as the test set would in which its images stand as often, in file order."""
    labels, p, uncertainty = drawn(12, seed)
    rows = np.repeat(np.arange(12), counts)
    if len(rows) == 0:
        return
    whole = read(p, labels, uncertainty, uncertainty + 1).statistics(np.array(counts, float))
    repeated = read(p[rows], labels[rows], uncertainty[rows], uncertainty[rows] + 1).values
    assert whole == pytest.approx(repeated, nan_ok=True)
    curve = referral_auc(labels[rows], p[rows], uncertainty[rows], [p / 100 for p in GRID])
    assert [whole[f"auc_{p}_information"] for p in GRID] == pytest.approx(curve, nan_ok=True)


def two_eyes(patients):
    """Losses of patients whose two eyes have the same one."""
    p = np.repeat(np.random.default_rng(0).uniform(0.05, 0.95, patients), 2)
    return read(p, np.ones(2 * patients), patients=np.repeat(np.arange(patients), 2))


def test_standard_errors_are_those_of_patients():
    """Of a mean over P patients: sd / sqrt(P). 2,000 resamples know it to 1.6%; false alarm: 6e-7.

    Negative control: eyes drawn one by one would have it smaller by sqrt(2).
    """
    readings = two_eyes(150)
    found = np.std([c @ readings.losses / c.sum() for c in readings.resamples(2000)])
    expected = readings.losses[::2].std() / math.sqrt(150)
    assert found == pytest.approx(expected, rel=5 / math.sqrt(2 * 2000))
    alone = read(readings.probabilities, readings.labels)
    too_small = np.std([c @ alone.losses / c.sum() for c in alone.resamples(2000)])
    assert too_small == pytest.approx(expected / math.sqrt(2), rel=5 / math.sqrt(2 * 2000))


def test_resamples_are_the_same_every_time_and_keep_eyes_together():
    readings = two_eyes(40)
    first, again = ([*two_eyes(40).resamples()] for _ in range(2))
    assert len(first) == 100
    for counts, other in zip(first, again, strict=True):
        assert (counts == other).all()
        assert (counts[::2] == counts[1::2]).all()
        assert counts.sum() == 80
    assert 0 < readings.errors["nll"] == two_eyes(40).errors["nll"]


# --------------------------------------------------------------------------------------- what a run stores


def prediction(samples, size, seed=0):
    return Bernoulli(torch.randn(samples, size, generator=torch.Generator().manual_seed(seed)))


def test_stored_arrays_hold_the_mean_and_both_spreads():
    given = prediction(5, 30)
    arrays = referral.stored(given)
    p = given.log_odds.double().sigmoid()
    np.testing.assert_allclose(np.exp(arrays["log_probs"][:, 1]), p.mean(0), rtol=1e-6)
    np.testing.assert_allclose(arrays["deviation"], p.std(0, correction=0), rtol=1e-6)
    h = torch.special.entr(p) + torch.special.entr(1 - p)
    mean = torch.special.entr(p.mean(0)) + torch.special.entr(1 - p.mean(0))
    np.testing.assert_allclose(arrays["information"], mean - h.mean(0), rtol=1e-5)
    readings = Readings.of(arrays | {"labels": np.zeros(30, np.uint8), "patients": np.arange(30)})
    np.testing.assert_allclose(readings.uncertainty["entropy"], mean, rtol=1e-6)


def test_a_run_on_all_of_kaggles_test_eyes_is_small():
    arrays = referral.stored(prediction(2, 1000))
    assert (
        42_670 * (sum(a.nbytes for a in arrays.values()) + 5000) / 1000 < 4 * 2**20
    )  # labels and patients too


def test_one_sample_has_no_spread_and_says_so():
    """A stable order of equal values would refer by file order."""
    given = prediction(1, 60)
    arrays = referral.stored(given)
    arrays |= {"labels": (np.arange(60) % 3 == 0).astype(np.uint8), "patients": np.arange(60, dtype=np.int32)}
    found = referral.scores(Readings.of(arrays))
    undefined = {name for name, value in found.items() if value == Undefined(referral.NO_SPREAD)}
    assert undefined == {n for n in referral.measures() if "information" in n or "deviation" in n}
    assert "file order" in referral.NO_SPREAD
    assert isinstance(found["referral_area_entropy"], float)


def test_one_class_left_is_undefined_and_errors_say_where():
    """Two sick eyes among 40: some resample has none."""
    labels = np.zeros(40, int)
    labels[:2] = 1
    found = referral.scores(read(np.linspace(0.6, 0.4, 40), labels))
    assert found["auc_0"] == 1.0
    assert found["auc_0_error"] == Undefined("one class is left in a resample")
    assert found["auc_50_entropy"] == Undefined("one class is left") or found["auc_50_entropy"] <= 1
    alone = referral.scores(read([0.3] * 4, [0] * 4))
    assert alone["auc_0"] == alone["sensitivity_95"] == Undefined("one class is left")


def test_mistakes_are_ordered_by_certainty():
    readings = read([0.9, 0.9, 0.1, 0.6, 0.4], [0, 1, 1, 0, 0], information=[3, 0, 1, 2, 9])
    found = referral.mistakes(readings, 2)
    assert {name: rows.tolist() for name, rows in found.items()} == {
        "most certain": [2, 3],
        "least certain": [0, 3],
    }


def test_figures_are_drawn_from_readings():
    labels, p, uncertainty = drawn(200)
    found = referral.charts(read(p, labels, uncertainty, uncertainty))
    assert list(found) == ["referral", "calibration", "roc"]
    assert all(chart.to_dict()["height"] == 260 for chart in found.values())
    assert list(referral.charts(read([0.3] * 4, [0] * 4))) == ["calibration"]


# ------------------------------------------------------------------------------------------- several runs


def run_of(method, seed, none, most, task="retinopathy_synthetic"):
    """A finished run with these AUCs at 0 and 30% referred."""
    curve = [("AUC", "mutual information", p, none + (most - none) * p / 30) for p in GRID]
    return referral_comparison.FinishedRun(
        task=SimpleNamespace(
            spec=SimpleNamespace(metrics=referral.measures(), main_metric="nll"),
            settings=SimpleNamespace(dataset="retinopathy", shift="none"),
        ),
        task_name=task,
        task_identity=task,
        method_name=method.partition("+")[0],
        method_identity=method,
        preset="standard",
        seed=seed,
        metrics={"nll": 0.4, "auc_0": none, "auc_30_information": most},
        read_curves=curve.copy,
    )


def test_claims_of_the_table_have_verdicts():
    """Radial above dropout without referral, below it with; tweaked mean field beside the plain one."""
    noise = [0.0, 0.001, -0.001]
    runs = [run_of("radial", s, 0.9 + e, 0.91 - e) for s, e in enumerate(noise)]
    runs += [run_of("mc_dropout", s, 0.85 - e, 0.95 + e) for s, e in enumerate(noise)]
    runs += [run_of("mfvi", s, 0.6 + e, 0.6 - e) for s, e in enumerate(noise)]
    runs += [run_of("mfvi+kl_weight=0.1", s, 0.9 + e, 0.92) for s, e in enumerate(noise)]
    wide = run_of("mfvi+initial_rho=-2.0", 0, 0.5, 0.5)
    assert referral_comparison.row_of(wide) == "mfvi"  # another start is no tweak
    found = referral_comparison.compare(runs)
    assert any("here radial minus mc_dropout in AUC is 0.05 (" in said for said in found.sentences)
    verdicts = {
        "0% referred: radial 94.3 above mc_dropout 93.0": "the claim holds",
        "30% referred: radial 96.8 above mc_dropout 95.1": "the claim is contradicted",
        "30% referred: mfvi with tweaks 96.4 above mfvi 62.6": "the claim holds",
        "0% referred: radial 94.3 above mfvi with tweaks 93.9": "no difference shown",
        "mc_dropout: referring 30% by mutual information": "published +0.021: it rises",
        "mfvi: referring 30% by mutual information": "published -0.010: no difference shown",
    }
    for begins, ends in verdicts.items():
        (line,) = [s for s in found.sentences if f": {begins}" in s or f", {begins}" in s]
        assert line.endswith(ends), line
    assert list(found.charts) == ["retinopathy_synthetic-referral_information"]


def test_metrics_are_readable_in_number():
    """Each has a description of its own."""
    found = referral.measures()
    assert len(found) <= 45
    assert len({metric.description for metric in found.values()}) == len(found)
    assert metrics.referral_auc is referral_auc
