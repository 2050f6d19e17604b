"""Joint log loss: exact enumeration of a tiny model, the joint normal of a linear model, and the cheat.

False alarms: the comparison with the joint normal allows five standard errors of its 4,000 draws in 6 pairs,
and fails by chance in less than one of 100,000 seeds.
"""

import itertools

import numpy as np
import pytest
from scipy import stats

from bench.studies import joint


def enumerated(draws, truth, size):
    """Expected joint log loss of all batches of `size` of one pair, and all labels, by enumeration.

    draws: log-probabilities of two classes at two inputs `[S, 2, 2]`; truth: probabilities `[2, 2]`.
    """
    expected = 0.0
    for which in itertools.product((0, 1), repeat=size):
        for labels in itertools.product((0, 1), repeat=size):
            chance = 0.5**size * np.prod([truth[a, y] for a, y in zip(which, labels, strict=True)])
            of_draws = [np.prod([np.exp(d[a, y]) for a, y in zip(which, labels, strict=True)]) for d in draws]
            expected -= chance * np.log(np.mean(of_draws))
    return expected


def three_models():
    """Log-probabilities of a finite set of three models at two inputs, `[3, 2, 2]`."""
    ones = np.array([[0.1, 0.2], [0.5, 0.4], [0.9, 0.95]])
    return np.log(np.stack([1 - ones, ones], -1))


def test_all_batches_of_a_finite_set_of_models_by_enumeration():
    """The mean over every batch of three, weighted with its probability, is the enumerated expectation."""
    draws, truth, size = three_models(), np.array([[0.3, 0.7], [0.6, 0.4]]), 3
    batches = list(itertools.product(itertools.product((0, 1), repeat=size), repeat=2))
    which, labels = (np.array(part) for part in zip(*batches, strict=True))
    chance = 0.5**size * truth[which, labels].prod(1)
    # Every batch is a pair of its own, with one batch: its rows are those of the two inputs.
    losses = joint.log_losses(draws[:, which, labels], size)
    assert losses @ chance == pytest.approx(enumerated(draws, truth, size), rel=1e-12)
    assert chance.sum() == pytest.approx(1)


def test_batches_of_a_pair_are_averaged_and_not_multiplied():
    draws = three_models()
    which, labels = np.array([0, 1, 1, 0, 0, 1]), np.array([1, 1, 0, 0, 1, 1])
    log_probs = draws[:, which, labels][:, None]
    parts = slice(3), slice(3, 6)
    first, second = (-np.log(np.exp(log_probs[:, 0, part].sum(-1)).mean()) for part in parts)
    assert joint.log_losses(log_probs, 3) == pytest.approx([(first + second) / 2], rel=1e-12)


def test_a_batch_of_one_is_the_marginal():
    log_probs = np.log(np.random.default_rng(0).uniform(0.1, 1, (7, 4, 6)))
    expected = np.log(np.exp(log_probs).mean(0))
    assert joint.marginal(log_probs) == pytest.approx(expected, rel=1e-12)
    assert joint.log_losses(log_probs, 1) == pytest.approx(-expected.mean(1), rel=1e-12)


def test_anchors_are_two_inputs_of_each_pair_and_fair_coins():
    """The share of ones of 20,000 tosses lies within five standard errors of a half: 1 of 1.7 million."""
    anchors = joint.anchors(200, "test")
    rows = joint.rows(anchors)
    assert anchors.shape == (200, joint.BATCH * joint.REPEATS)
    assert set(np.unique(rows // 2 - np.arange(200)[:, None])) == {0}
    assert abs(anchors.mean() - 0.5) < 5 * 0.5 / np.sqrt(anchors.size)
    assert len(np.unique(rows)) == 400
    np.testing.assert_array_equal(anchors, joint.anchors(200, "test"))
    assert (anchors != joint.anchors(200, "other")).any()


def linear_draws(draws, seed=0):
    """Draws of y = w x + noise with w ~ N(0, 1), at two inputs; targets, anchors and exact losses `[P]`."""
    g = np.random.default_rng(seed)
    pairs, sigma = 6, 0.7
    x = g.normal(size=2 * pairs)
    rows = joint.rows(joint.anchors(pairs, "linear"))
    targets = g.normal() * x[rows] + sigma * g.normal(size=rows.shape)
    means = g.normal(size=(draws, 1)) * x
    log_probs = stats.norm.logpdf(targets, means[:, rows], sigma)
    exact = []
    for inputs, observed in zip(x[rows], targets, strict=True):
        parts = [slice(k, k + joint.BATCH) for k in range(0, len(inputs), joint.BATCH)]
        each = [
            stats.multivariate_normal.logpdf(
                observed[p], cov=np.outer(inputs[p], inputs[p]) + sigma**2 * np.eye(joint.BATCH)
            )
            for p in parts
        ]
        exact.append(-np.mean(each))
    return log_probs, np.array(exact)


def standard_error(log_probs):
    """Of the Monte Carlo estimate of each pair's loss, at most: the largest of its batches, `[P]`."""
    of_batch = log_probs.reshape(*log_probs.shape[:2], -1, joint.BATCH).sum(-1)
    weights = np.exp(of_batch - of_batch.max(0))
    return (weights.std(0) / weights.mean(0) / np.sqrt(len(weights))).max(-1)


def test_draws_of_a_linear_model_against_its_joint_normal():
    log_probs, exact = linear_draws(4000)
    error = np.abs(joint.log_losses(log_probs) - exact)
    assert (error < 5 * standard_error(log_probs)).all()
    assert error.max() < 0.2


def test_the_right_marginals_with_independent_draws_per_input_are_worse():
    """The cheat: draws are shuffled over S at every input, so that no dependence between inputs is left."""
    log_probs, exact = linear_draws(2000)
    g, anchors = np.random.default_rng(1), joint.anchors(len(exact), "linear")
    shuffled = log_probs.copy()
    for pair, which in enumerate(anchors):
        other = np.flatnonzero(which == 1)
        shuffled[:, pair, other] = log_probs[g.permutation(len(log_probs))][:, pair, other]
    assert joint.marginal(shuffled) == pytest.approx(joint.marginal(log_probs), rel=1e-9)
    right, cheat = joint.log_losses(log_probs), joint.log_losses(shuffled)
    assert right == pytest.approx(exact, abs=0.15)
    assert cheat.mean() > right.mean() + 0.1


def test_draws_that_are_independent_for_every_target_are_worse_still():
    """Independence within an input too is the product of the marginals: no epistemic part."""
    log_probs, exact = linear_draws(2000)
    product = -joint.marginal(log_probs).reshape(len(exact), -1, joint.BATCH).sum(-1).mean(-1)
    assert product.mean() > exact.mean() + 0.5
