"""Laws of the oracle tasks: closed forms against Monte Carlo and enumeration, constants against their origin.

False alarms: where Monte Carlo is compared, five standard errors are allowed at each of at most 20 inputs,
which fails by chance in less than one of 10,000 seeds.
"""

import numpy as np
import pytest
import torch
from scipy.special import log_softmax

from bench import metrics
from bench.studies import oracle, oracle_classes, oracle_fit

KERNEL = oracle.Kernel(1.3, 0.8)


def places(number, columns=2, seed=0):
    """Inputs of a small world, `[number, columns]`."""
    return np.random.default_rng(seed).normal(size=(number, columns))


def test_covariance_by_hand():
    rows = places(4)
    found = KERNEL.within(rows)
    for i, j in ((0, 1), (2, 3)):
        assert found[i, j] == pytest.approx(1.69 * np.exp(-((rows[i] - rows[j]) ** 2).sum() / (2 * 0.64)))
    assert np.diag(found) == pytest.approx(1.69 * (1 + oracle.NUGGET))
    assert KERNEL.between(rows[:1], rows[2:]) == pytest.approx(found[:1, 2:])


def test_draws_have_the_covariance_of_the_law():
    """Of 4,000 draws at 3 inputs: five standard errors, 9 numbers; 1 of 190,000 seeds."""
    rows = places(3)
    drawn, expected = oracle.functions(KERNEL, rows, list(range(4000))), KERNEL.within(rows)
    found = drawn.T @ drawn / len(drawn)
    variance = expected**2 + np.outer(np.diag(expected), np.diag(expected))
    assert (np.abs(found - expected) < 5 * np.sqrt(variance / len(drawn))).all()
    assert (drawn == oracle.rounded(drawn)).all()


def test_the_posterior_of_numbers_by_weighted_prior_draws():
    """Mean and covariance against prior draws that are weighted with the likelihood: no linear algebra."""
    rows, inputs, sigma = places(3), places(2, seed=1), np.array([0.6, 0.9, 1.2])
    targets = np.array([0.5, -0.4, 1.0])
    drawn = oracle.functions(KERNEL, np.concatenate([rows, inputs]), list(range(20_000)))
    logs = -0.5 * (((targets - drawn[:, :3]) / sigma) ** 2).sum(1)
    weights = np.exp(logs - logs.max())
    weights /= weights.sum()
    mean = weights @ drawn[:, 3:]
    centred = drawn[:, 3:] - mean
    covariance = (weights[:, None] * centred).T @ centred
    error = 5 / np.sqrt(1 / (weights**2).sum())  # five standard errors per unit of the prior's sd, squared
    found = oracle.regression(KERNEL, rows, sigma, targets, inputs)
    assert found.mean == pytest.approx(mean, abs=1.3 * error)
    assert found.covariance == pytest.approx(covariance, abs=1.69 * np.sqrt(2) * error)


def test_the_ideal_observer_is_right_on_average():
    """Over 300 small worlds the squared error of the ideal mean is its variance, to five standard errors."""
    rows, inputs, sigma = places(6), places(1, seed=1), np.full(6, 0.5)
    g = np.random.default_rng(3)
    ratios = []
    for drawn in oracle.functions(KERNEL, np.concatenate([rows, inputs]), list(range(300))):
        found = oracle.regression(KERNEL, rows, sigma, drawn[:6] + sigma * g.normal(size=6), inputs)
        ratios.append((drawn[6:] - found.mean) ** 2 / np.diag(found.covariance))
    assert np.mean(ratios) == pytest.approx(1, abs=5 * np.sqrt(2 / 300))


def test_more_noise_and_fewer_rows_make_the_ideal_observer_less_sure():
    world = oracle.regression_worlds(0, 1)
    base, noisier, fewer = world.variance.mean(-1)
    assert base < noisier < fewer
    assert fewer < oracle.DIABETES.scale**2
    np.testing.assert_allclose(
        world.targets[1] - world.functions, 2 * (world.targets[0] - world.functions), atol=2 * oracle.GRID
    )


def test_worlds_are_fresh_by_number_and_the_same_by_number():
    one, other, both = (oracle.regression_worlds(*which) for which in ((0, 1), (1, 1), (0, 2)))
    assert np.abs(np.corrcoef(one.functions[0], other.functions[0])[0, 1]) < 0.99
    np.testing.assert_array_equal(both.functions, np.concatenate([one.functions, other.functions]))
    np.testing.assert_array_equal(both.targets, np.concatenate([one.targets, other.targets], 1))


def test_the_law_of_numbers_is_that_of_greatest_marginal_likelihood():
    found = oracle_fit.most_likely(oracle_fit.diabetes_evidence, [0.0, 1.8, -0.4, 0.1])
    assert np.exp(found[:2]) == pytest.approx(oracle.DIABETES, rel=2e-3)
    assert (np.exp(found[2]), found[3]) == pytest.approx((oracle.NOISE, oracle.NOISE_SLOPE), rel=5e-3)


def test_the_length_scale_of_classes_is_that_of_greatest_marginal_likelihood():
    """At the scale and noise that `oracle_fit` prints no neighbouring length scale is better."""
    at = [oracle_fit.digits_evidence(np.log([0.216, length, 0.1718])) for length in (0.72, 0.746, 0.77)]
    assert at[1] == min(at)


def test_evidence_is_that_of_the_joint_normal():
    from scipy import stats

    covariance, targets = KERNEL.within(places(4)) + np.eye(4), np.random.default_rng(1).normal(size=(4, 2))
    expected = -stats.multivariate_normal.logpdf(targets.T, cov=covariance).sum()
    assert oracle_fit.negative_log_evidence(covariance, targets) == pytest.approx(expected)


# ---- classes


def test_probabilities_with_labels_drawn_anew():
    latent = np.random.default_rng(0).normal(size=(5, 4))
    own = np.exp(log_softmax(latent, -1))
    assert np.exp(oracle_classes.log_probs(latent, 0.0)) == pytest.approx(own)
    assert np.exp(oracle_classes.log_probs(latent, 0.3)) == pytest.approx(0.7 * own + 0.3 / 4)


def test_labels_have_their_probabilities():
    """Shares of 20,000 labels of one input: five standard errors, 4 numbers; 1 of 400,000 seeds."""
    probabilities = np.array([0.1, 0.2, 0.3, 0.4])
    uniforms = np.random.default_rng(0).random(20_000)
    labels = oracle_classes.labels_of(np.broadcast_to(probabilities, (20_000, 4)), uniforms)
    shares = np.bincount(labels, minlength=4) / 20_000
    assert (np.abs(shares - probabilities) < 5 * np.sqrt(probabilities * (1 - probabilities) / 20_000)).all()


@pytest.mark.parametrize("flipped", [0.0, 0.3])
def test_slope_of_the_log_likelihood(flipped):
    g = np.random.default_rng(0)
    latent, labels = g.normal(size=(3, 4, 2)), np.array([0, 3, 1])
    _, slope = oracle_classes._log_likelihood(latent, labels, flipped)
    for place in ((0, 0, 0), (1, 3, 1), (2, 2, 0)):
        ends = []
        for sign in (1, -1):
            moved = latent.copy()
            moved[place] += sign * 1e-6
            ends.append(oracle_classes._log_likelihood(moved, labels, flipped)[0][place[2]])
        assert slope[place] == pytest.approx((ends[0] - ends[1]) / 2e-6, abs=1e-7)


@pytest.mark.parametrize("flipped", [0.0, 0.3])
def test_sampled_posterior_of_classes_by_weighted_prior_draws(flipped):
    """Predictive probabilities and both parts against prior draws that are weighted with the likelihood."""
    rows, inputs, labels = places(3, seed=2), places(2, seed=3), np.array([0, 0, 2])
    kernel, size = oracle.Kernel(1.5, 1.0), 40_000
    prior = np.random.default_rng(0).multivariate_normal(
        np.zeros(5), kernel.within(np.concatenate([rows, inputs])), size=(size, oracle_classes.CLASSES)
    )
    log_probs = oracle_classes.log_probs(prior.transpose(0, 2, 1), flipped)
    weights = np.exp(log_probs[:, np.arange(3), labels].sum(1))
    weights /= weights.sum()
    at = log_probs[:, 3:]
    averaged = (weights[:, None, None] * np.exp(at)).sum(0)
    aleatoric = -(weights[:, None] * (np.exp(at) * at).sum(-1)).sum(0)
    epistemic = -(averaged * np.log(averaged)).sum(-1) - aleatoric
    found = oracle_classes.sample(kernel, rows, labels, inputs, flipped, 6400, 1)
    own = torch.from_numpy(oracle_classes.log_probs(found.latent, flipped))
    assert found.accepted > 0.8
    # 6,400 draws, of which at least 1,600 are worth an independent one; a probability has an sd below 0.3.
    error = 5 * 0.3 / np.sqrt(1600)
    assert own.exp().mean(0).numpy() == pytest.approx(averaged, abs=error)
    assert metrics.expected_entropy(own).numpy() == pytest.approx(aleatoric, abs=1.5 * error)
    assert metrics.mutual_information(own).numpy() == pytest.approx(epistemic, abs=1.5 * error)


def test_the_file_has_the_worlds_of_the_standard_settings():
    """Its parts are possible ones, its noisier worlds have more noise, fewer rows leave more unknown."""
    worlds = oracle_classes.worlds(0, oracle_classes.WORLDS_OF_FILE, oracle_classes.TRAIN)
    assert worlds.parts.shape == (3, 2, oracle_classes.WORLDS_OF_FILE, oracle_classes.TEST)
    assert (worlds.parts >= 0).all()
    assert (worlds.parts.sum(1) <= np.log(oracle_classes.CLASSES) + 1e-6).all()
    epistemic, aleatoric = worlds.parts.mean(-1).swapaxes(0, 1)
    assert (aleatoric[1] > aleatoric[0] + 0.2).all()
    assert (epistemic[2] > epistemic[0] + 0.05).all()
    changed = worlds.labels[1] != worlds.labels[0]
    share = oracle_classes.FLIPPED * (1 - 1 / oracle_classes.CLASSES)
    assert abs(changed.mean() - share) < 5 * np.sqrt(share / changed.size)
