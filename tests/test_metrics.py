"""Scores and uncertainties against values by hand."""

import math
from itertools import combinations, permutations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats

from bench import metrics
from bench.predictions import average_log_probs

INF = math.inf
MEASURES = (metrics.predictive_entropy, metrics.expected_entropy, metrics.mutual_information)


def logs(rows):
    """Log-probabilities `[S, B, C]` of probabilities."""
    return torch.tensor(rows, dtype=torch.float64).log()


def entropy(*p):
    """Entropy by hand, in nats."""
    return -sum(x * math.log(x) for x in p if x > 0)


BY_HAND = {
    # probabilities [S, B, C]: predictive entropy, expected entropy
    "identical": ([[[0.2, 0.8]], [[0.2, 0.8]]], entropy(0.2, 0.8), entropy(0.2, 0.8)),
    "opposite": ([[[1.0, 0.0]], [[0.0, 1.0]]], math.log(2), 0.0),
    "three_opposite": ([[[1.0, 0, 0]], [[0, 1.0, 0]], [[0, 0, 1.0]]], math.log(3), 0.0),
    "certain": ([[[1.0, 0.0, 0.0]], [[1.0, 0.0, 0.0]]], 0.0, 0.0),
    "one_sample": ([[[0.5, 0.25, 0.25]]], 1.5 * math.log(2), 1.5 * math.log(2)),
    "uniform": ([[[0.25] * 4], [[0.25] * 4]], math.log(4), math.log(4)),
    "mixed": (
        [[[0.9, 0.1]], [[0.5, 0.5]]],
        entropy(0.7, 0.3),
        (entropy(0.9, 0.1) + entropy(0.5, 0.5)) / 2,
    ),
    "zero_in_one": ([[[1.0, 0.0]], [[0.5, 0.5]]], entropy(0.75, 0.25), math.log(2) / 2),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("probabilities", "predictive", "expected"), BY_HAND.values(), ids=BY_HAND)
def test_entropies_and_information_by_hand(probabilities, predictive, expected, dtype):
    log_probs = logs(probabilities).to(dtype)
    tolerance = {"rtol": 1e-6, "atol": 1e-7}
    for measure, value in zip(MEASURES, (predictive, expected, predictive - expected), strict=True):
        got = measure(log_probs)
        assert got.shape == (1,)
        torch.testing.assert_close(got.item(), value, **tolerance)


def test_rows_do_not_mix():
    rows = torch.cat([logs(BY_HAND["opposite"][0]), logs(BY_HAND["mixed"][0])], 1)
    torch.testing.assert_close(
        metrics.mutual_information(rows).tolist(),
        [math.log(2), entropy(0.7, 0.3) - (entropy(0.9, 0.1) + math.log(2)) / 2],
    )


def test_probability_near_zero_is_no_nan():
    """Exp underflows, the logarithm is finite: a naive p log p is 0 * -1e4."""
    log_probs = torch.tensor([[[0.0, -1e4]], [[0.0, -INF]]])
    for measure in MEASURES:
        assert measure(log_probs).item() == 0


def test_small_information_survives_rounding():
    """Samples that differ by 1e-5: information of 1e-10 nats, lost in float32 arithmetic."""
    p, d = 0.3, 1e-5
    log_probs = logs([[[p + d, 1 - p - d]], [[p - d, 1 - p + d]]])
    expected = d**2 / (2 * p * (1 - p))
    torch.testing.assert_close(metrics.mutual_information(log_probs).item(), expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@given(data=st.data())
def test_information_lies_between_zero_and_the_entropies(dtype, data):
    shape = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(2, 5)))
    logits = data.draw(hnp.arrays(dtype, shape, elements=st.floats(-60, 60, width=32)))
    log_probs = torch.from_numpy(logits).log_softmax(-1)
    predictive, expected, information = (measure(log_probs) for measure in MEASURES)
    slack = 1e-5 if dtype == np.float32 else 1e-12  # a float32 softmax is normalised to 1e-6 only
    assert (information >= 0).all()
    assert (expected >= -slack).all()
    assert (information <= predictive + slack).all()
    assert (predictive <= math.log(shape[-1]) + slack).all()
    if shape[0] == 1:
        assert (information <= slack).all()


def test_average_is_of_probabilities():
    got = average_log_probs(logs([[[0.9, 0.1]], [[0.2, 0.8]]])).exp()
    torch.testing.assert_close(got, torch.tensor([[0.55, 0.45]], dtype=torch.float64))
    assert metrics.predictive_entropy(torch.zeros(1, 1, 1)).dtype == torch.float64
    assert metrics.expected_entropy(torch.zeros(1, 1, 1)).dtype == torch.float64


# ---- what is stored


def test_stored_log_probs_are_clamped_and_finite():
    stored = metrics.store(torch.tensor([[0.0, -INF], [-1e9, 0.0], [-9.0, -1e-4]]))
    assert stored.dtype == np.float16
    assert np.isfinite(stored).all()
    assert stored[0, 1] == stored[1, 0] == -1e4


@given(hnp.arrays(np.float64, (3, 5), elements=st.floats(-200, 200)))
def test_restored_log_probs_are_normalised_and_near(logits):
    log_probs = torch.from_numpy(logits).log_softmax(-1)
    restored = metrics.restore(metrics.store(log_probs))
    assert restored.dtype == np.float64
    np.testing.assert_allclose(np.exp(restored).sum(-1), 1, rtol=1e-12)
    assert (restored <= 0).all()
    np.testing.assert_allclose(np.exp(restored), log_probs.exp().numpy(), atol=2e-3)
    np.testing.assert_array_equal(metrics.restore(metrics.store(torch.from_numpy(restored))).shape, (3, 5))


def test_restoring_normalises_what_float16_rounded():
    """Eight equal classes: log(1/8) is no float16, yet each gets exactly its share."""
    restored = metrics.restore(metrics.store(torch.full((1, 8), -math.log(8))))
    np.testing.assert_allclose(restored, -math.log(8), rtol=1e-14)


def test_storing_does_not_change_its_input():
    log_probs = torch.tensor([[0.0, -INF]])
    metrics.store(log_probs)
    assert log_probs[0, 1] == -INF


# ---- scores


def test_negative_log_likelihood_by_hand():
    log_probs = np.log([[0.5, 0.5], [0.25, 0.75], [0.9, 0.1]])
    labels = np.array([0, 1, 1], dtype=np.uint8)
    expected = -(math.log(0.5) + math.log(0.75) + math.log(0.1)) / 3
    assert metrics.negative_log_likelihood(log_probs, labels) == pytest.approx(expected, rel=1e-14)


def test_accuracy_by_hand():
    assert metrics.accuracy(np.array([0, 1, 2, 2], np.uint8), np.array([0, 1, 1, 2], np.int64)) == 0.75


# ---- against a reference posterior

LEVELS = (np.arange(4000) + 0.5) / 4000
STANDARD = stats.norm.ppf(LEVELS)


@pytest.mark.parametrize(("mean", "sd"), [(0.0, 1.0), (1.5, 1.0), (0.0, 0.25), (-2.0, 3.0)])
def test_wasserstein_of_normals_has_its_closed_form(mean, sd):
    """W2(N(a, s), N(b, t))^2 = (a - b)^2 + (s - t)^2; 4000 quantiles cut off the tails, 2e-3 of the sd."""
    got = metrics.wasserstein((mean + sd * STANDARD)[::-1, None], (0.3 + 0.7 * STANDARD)[:, None])
    assert got.shape == (1,)
    assert got[0] == pytest.approx(math.hypot(mean - 0.3, sd - 0.7), abs=2e-3)


def test_wasserstein_is_the_best_of_all_assignments():
    """The definition, by enumeration: the cheapest of the 5! ways to move one set of draws to the other."""
    generator = np.random.default_rng(0)
    draws, reference = generator.normal(size=(5, 3)), generator.normal(1, 2, size=(5, 3))
    best = [
        min(np.mean((draws[list(order), n] - reference[:, n]) ** 2) for order in permutations(range(5)))
        for n in range(3)
    ]
    np.testing.assert_allclose(metrics.wasserstein(draws, reference), np.sqrt(best), rtol=1e-12)


@given(st.integers(1, 7), st.integers(1, 7), st.integers(0, 2**32 - 1))
def test_wasserstein_of_unequally_many_draws_is_that_of_their_copies(few, many, seed):
    """Each draw repeated until both sides have as many: the same distributions."""
    generator = np.random.default_rng(seed)
    draws, reference = generator.normal(size=(few, 2)), generator.normal(size=(many, 2))
    copies = metrics.wasserstein(draws.repeat(many, 0), reference.repeat(few, 0))
    np.testing.assert_allclose(metrics.wasserstein(draws, reference), copies, rtol=1e-9)
    np.testing.assert_allclose(metrics.wasserstein(reference, draws), copies, rtol=1e-9)
    assert (metrics.wasserstein(draws, draws.repeat(many, 0)) <= 1e-12).all()


def test_wasserstein_to_one_value_is_the_root_mean_square_around_it():
    draws = np.array([[1.0], [2.0], [6.0]])
    assert metrics.wasserstein(draws, np.array([[3.0]]))[0] == pytest.approx(math.sqrt((4 + 1 + 9) / 3))


def test_agreement_by_hand():
    log_probs = np.log([[0.5, 0.3, 0.2], [0.1, 0.8, 0.1], [0.3, 0.3, 0.4], [0.2, 0.5, 0.3]])
    reference = np.log([[0.9, 0.05, 0.05], [0.5, 0.4, 0.1], [0.1, 0.1, 0.8], [0.3, 0.4, 0.3]])
    assert metrics.agreement(log_probs, reference) == 0.75


def test_total_variation_is_the_largest_difference_over_events():
    """By enumeration of all 2^4 events: max |P(A) - Q(A)|; a probability of zero on one side included."""
    p = np.array([[0.4, 0.3, 0.2, 0.1], [0.7, 0.3, 0.0, 0.0]])
    q = np.array([[0.1, 0.2, 0.3, 0.4], [0.2, 0.2, 0.3, 0.3]])
    events = [list(event) for size in range(5) for event in combinations(range(4), size)]
    largest = [max(abs(a[e].sum() - b[e].sum()) for e in events) for a, b in zip(p, q, strict=True)]
    with np.errstate(divide="ignore"):
        got = metrics.total_variation(np.log(p), np.log(q))
    assert got == pytest.approx(np.mean(largest), rel=1e-12)
    assert metrics.total_variation(np.log(q), np.log(q)) == 0
