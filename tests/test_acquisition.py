"""Scores by hand, proposals as their formulas say, and draws that follow their probabilities."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from bench.errors import UsageError
from bench.predictions import Bernoulli, Categorical, Gaussian
from bench.studies import acquisition


def prediction(rows):
    """Probabilities `[S, N, C]` as a prediction."""
    return Categorical(torch.tensor(rows, dtype=torch.float64).log())


OPPOSITE, AGREED = [[1.0, 0.0], [0.5, 0.5]], [[0.0, 1.0], [0.5, 0.5]]  # two samples of two candidates


# ---- scores


def test_scores_of_class_predictions_by_hand():
    """Candidate 0: samples certain and opposite; candidate 1: both unsure."""
    p = prediction([OPPOSITE, AGREED])
    assert_close(acquisition.bald(p), torch.tensor([math.log(2), 0.0], dtype=torch.float64))
    both = torch.full((2,), math.log(2), dtype=torch.float64)
    assert_close(acquisition.predictive_entropy(p), both)
    assert_close(acquisition.variation_ratio(p), torch.full((2,), 0.5, dtype=torch.float64))
    sharp = prediction([[[0.7, 0.2, 0.1]], [[0.1, 0.6, 0.3]]])
    assert acquisition.variation_ratio(sharp).item() == pytest.approx(0.6)


def test_scores_of_two_classes_are_those_of_the_categorical():
    log_odds = torch.tensor([[0.3, -2.0, 5.0], [1.0, 0.0, -5.0]])
    two = Bernoulli(log_odds)
    one = torch.stack([(-log_odds).sigmoid(), log_odds.sigmoid()], -1)
    for score in (acquisition.bald, acquisition.predictive_entropy, acquisition.variation_ratio):
        assert_close(score(two), score(Categorical(one.double().log())), rtol=1e-5, atol=1e-7)


def test_expected_loss_by_hand():
    """Belief 0.5/0.5 and 0.25/0.75; the model says 0.9/0.1 and has a certain row."""
    belief = prediction([[[1.0, 0.0], [0.25, 0.75]], [[0.0, 1.0], [0.25, 0.75]]])
    log_probs = torch.tensor([[0.9, 0.1], [0.9, 0.1]], dtype=torch.float64).log()
    by_hand = [-(p * math.log(0.9) + (1 - p) * math.log(0.1)) for p in (0.5, 0.25)]
    assert_close(acquisition.expected_loss(belief, log_probs).tolist(), by_hand)
    certain = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64).log()
    sure = prediction([[[1.0, 0.0], [0.5, 0.5]]])
    assert acquisition.expected_loss(sure, certain).tolist() == [0.0, 5000.0]  # a log-probability of -1e4


def test_expected_loss_under_the_own_belief_is_the_predictive_entropy():
    """Which is why it is a score only where another fit believes; rounding above 0 stays a loss of 0."""
    p = prediction([OPPOSITE, AGREED])
    assert_close(acquisition.expected_loss(p, p.average()), acquisition.predictive_entropy(p))
    sure = prediction([[[1.0, 0.0]]])
    assert acquisition.expected_loss(sure, torch.tensor([[1e-9, -50.0]])).tolist() == [0.0]


def test_distances_by_hand():
    candidates, acquired = torch.tensor([[0.0], [3.0]]), torch.tensor([[1.0], [-1.0]])
    assert acquisition.distance(candidates, acquired).tolist() == [2.0, 20.0]
    assert acquisition.distance(candidates, acquired, power=1).tolist() == [2.0, 6.0]
    assert acquisition.distance(candidates, acquired[:0]).tolist() == [0.0, 0.0]
    images = torch.zeros(2, 1, 2, 2)
    images[1] = 1.0
    assert_close(acquisition.distance(images, images[:1]).tolist(), [0.0, 4.0])
    flat = torch.tensor([0.0, 3.0])
    assert acquisition.distance(flat, torch.tensor([1.0])).tolist() == [1.0, 4.0]


def test_scores_of_normals_are_refused():
    normal = Gaussian(torch.zeros(1, 2, 1), torch.ones(1, 2, 1))
    with pytest.raises(UsageError, match="this score is of class predictions"):
        acquisition.bald(normal)
    with pytest.raises(UsageError, match=r"shapes \[2, 2\] and \[3, 2\]"):
        acquisition.expected_loss(prediction([OPPOSITE]), torch.zeros(3, 2))


# ---- proposals

SCORES = torch.tensor([0.0, 1.0, 3.0, 4.0])  # sum 8, mean 2, variance 2.5
PARAMETERS = {"softmax": 10.0, "boltzmann": 1.0, "proportional": 0.25, "epsilon_greedy": 0.2}


def parameters(name):
    return (PARAMETERS[name],) if name in PARAMETERS else ()


def normalised(values):
    return [v / sum(values) for v in values]


@pytest.mark.parametrize(
    ("found", "ratios"),
    [
        (acquisition.softmax(SCORES, 8.0), [math.exp(s) for s in (0, 1, 3, 4)]),
        (acquisition.boltzmann(SCORES, 1.5), [math.exp(1.5 * (s - 2) / 2.5**0.5) for s in (0, 1, 3, 4)]),
        (acquisition.boltzmann(SCORES, 1.5, "by_mean"), [math.exp(1.5 * s / 2) for s in (0, 1, 3, 4)]),
        (acquisition.proportional(SCORES, 0.25), [0.5, 1, 3, 4]),
        (acquisition.epsilon_greedy(SCORES, 0.2), [0.05, 0.05, 0.05, 0.85]),
        (acquisition.argmax(SCORES), [0, 0, 0, 1]),
        (acquisition.uniform(SCORES), [1, 1, 1, 1]),
    ],
)
def test_proposals_by_hand(found, ratios):
    assert found.dtype == torch.float64
    assert_close(found.tolist(), normalised(ratios), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", acquisition.PROPOSALS)
@given(
    st.lists(st.one_of(st.just(0.0), st.floats(1e-9, 1e3)), min_size=1, max_size=40),
    st.integers(1, 3),
)
@settings(max_examples=50, deadline=None)
def test_every_proposal_is_a_distribution_and_says_its_support(name, scores, rows):
    """Batches as each row alone; a larger score is never less likely."""
    scores = torch.tensor(scores, dtype=torch.float64)
    proposal = acquisition.PROPOSALS[name]
    p = proposal.function(scores, *parameters(name))
    assert p.shape == scores.shape
    assert (p >= 0).all()
    assert (p <= 1).all()
    assert p.sum().item() == pytest.approx(1, abs=1e-12)
    if proposal.full_support:
        assert (p > 0).all()
    order = scores.argsort(stable=True)
    assert (p[order].diff() >= -1e-15).all() or name in ("epsilon_greedy", "argmax")
    assert p[scores.argmax()] == p.max()
    batch = torch.stack([scores, *[scores.flip(0)] * (rows - 1)])
    assert_close(proposal.function(batch, *parameters(name))[0], p, rtol=1e-14, atol=0)


@pytest.mark.parametrize("name", ["softmax", "boltzmann", "proportional", "uniform"])
@pytest.mark.parametrize("scores", [torch.zeros(7), torch.full((7,), 0.1), torch.full((1,), 0.3)])
def test_equal_scores_are_drawn_uniformly(name, scores):
    p = acquisition.PROPOSALS[name].function(scores, *parameters(name))
    assert_close(p, torch.full_like(p, 1 / len(scores)), rtol=1e-12, atol=0)


def test_softmax_is_one_of_normalised_scores_and_not_an_argmax():
    """BALD of 1e-5 to 1e-4 nats over 1000 points at T = 10,000: the scale of the scores does not matter."""
    scores = torch.linspace(1e-5, 1e-4, 1000, dtype=torch.float64)
    p = acquisition.softmax(scores, 10_000)
    assert_close(p, acquisition.softmax(scores * 1e4, 10_000), rtol=1e-9, atol=0)
    assert p.max().item() < 0.02


def test_argmax_is_refused_where_support_must_be_full():
    assert acquisition.full_support("softmax") is acquisition.softmax
    with pytest.raises(UsageError, match="proposal argmax never draws some points: PURE and LURE need"):
        acquisition.full_support("argmax")
    with pytest.raises(UsageError, match="unknown proposal 'argmin': take one of softmax"):
        acquisition.full_support("argmin")


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda: acquisition.softmax(torch.tensor([1.0, -1.0]), 1), "a score is negative"),
        (lambda: acquisition.uniform(torch.tensor([1.0, math.nan])), "a score is not finite"),
        (lambda: acquisition.uniform(torch.zeros(0)), "no candidate is left to score"),
        (lambda: acquisition.softmax(SCORES, 0.0), "temperature 0.0: must be a number above 0"),
        (lambda: acquisition.boltzmann(SCORES, math.nan), "beta nan: must be a number above 0"),
        (lambda: acquisition.proportional(SCORES, 0.0), "floor 0.0: must be above 0 and at most 1"),
        (lambda: acquisition.epsilon_greedy(SCORES, 1.5), "epsilon 1.5: must be above 0 and at most 1"),
        (lambda: acquisition.draw(SCORES, torch.Generator()), "must be in [0, 1] and sum to 1"),
        (lambda: acquisition.draw(torch.zeros(0), torch.Generator()), "no candidate is left to draw"),
        (lambda: acquisition.draw(torch.tensor([math.nan, 1.0]), torch.Generator()), "must be in [0, 1]"),
    ],
)
def test_bad_input_is_one_clear_line(call, line):
    with pytest.raises(UsageError) as info:
        call()
    assert line in str(info.value)
    assert "\n" not in str(info.value)


# ---- draws


def test_inverse_cdf_by_hand():
    """Thirds and a zero: the edges belong to the next candidate, and zeros are never drawn."""
    p = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0], dtype=torch.float64)
    uniforms = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2**-53], dtype=torch.float64)
    found = acquisition.inverse_cdf(p.expand(6, 6), uniforms)
    assert found.tolist() == [1, 1, 3, 3, 4, 4]


def test_total_off_by_rounding_draws_no_impossible_candidate():
    """Sums of 1e-10 too little or too much, and the largest uniform numbers: still a positive candidate."""
    for total in (1 - 1e-10, 1 + 1e-10):
        p = torch.tensor([total / 3] * 3 + [0.0], dtype=torch.float64)
        uniforms = torch.tensor([1 - 2**-53, 1.0], dtype=torch.float64)
        assert acquisition.inverse_cdf(p.expand(2, 4), uniforms).tolist() == [2, 2]


def test_draws_follow_their_probabilities_and_the_generator():
    """Chi-squared of 20,000 draws of five candidates, 4 degrees of freedom, limit 30. False alarm: 5e-6."""
    p = acquisition.softmax(torch.tensor([0.1, 0.2, 0.3, 0.0, 0.4]), 3.0)
    generator = torch.Generator().manual_seed(1)
    drawn = [acquisition.draw(p, generator) for _ in range(20_000)]
    counts = torch.tensor([i for i, _ in drawn]).bincount(minlength=5)
    assert ((counts - 20_000 * p) ** 2 / (20_000 * p)).sum() < 30
    assert all(q == p[i].item() for i, q in drawn[:20])
    again = [acquisition.draw(p, torch.Generator().manual_seed(1))[0]]
    assert again == [drawn[0][0]]
