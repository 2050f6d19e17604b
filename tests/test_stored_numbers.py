"""What a run keeps of its predictions scores as the predictions do, within a bound that is said."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench import metrics
from bench.studies import normals
from bench.tasks.uci_regression import UCIRegression

UNIT = {"float32": 2.0**-24, "float16": 2.0**-11}
"""Largest relative error of a rounded number."""

POSED = st.tuples(
    st.integers(0, 2**32 - 1),  # seed
    st.floats(0, 20),  # offset of the predictions, in standard deviations of the target
    st.floats(-5, 1),  # logarithm to base 10 of the errors, in the same unit
    st.floats(-5, 1),  # of the noise that is predicted
    st.floats(-30, 30),  # of the target's standard deviation
)


def predicted(seed, offset, error, noise, scale):
    """Means and variances `[S, N]`, float64, of standardised targets, and targets `[N]` in their own unit."""
    draw = np.random.default_rng(seed)
    truth = offset + draw.normal(size=40)
    mean = truth + 10**error * draw.normal(size=(3, 40))
    variance = (10**noise * draw.uniform(0.5, 2, (3, 40))) ** 2
    return mean, variance, 10**scale * (truth + 3)


def scores(mean, variance, targets, scale):
    """Log likelihoods in nats and RMSE of one split."""
    arrays = {"mean": mean[None], "variance": variance[None], "targets": targets[None]}
    arrays["centre_and_scale"] = np.array([[3 * 10**scale, 10**scale]])
    log_likelihood, rmse, _ = UCIRegression.per_split(arrays)
    return float(log_likelihood[0]), float(rmse[0])


def bounds(mean, variance, targets, scale, unit):
    """How far rounding of means and variances by this unit may move the two."""
    sigma = np.sqrt(variance)
    z, moved = np.abs(targets / 10**scale - 3 - mean) / sigma, unit * np.abs(mean) / sigma
    of_density = (((z + moved) * (1 + unit)) ** 2 - z**2) / 2 + unit
    of_rmse = unit * np.sqrt((mean**2).mean()) * 10**scale
    return of_density.max(0).mean() * 1.001 + 1e-9, of_rmse * 1.001 + 1e-9 * 10**scale


@given(POSED)
def test_stored_predictions_score_as_the_predictions_themselves(posed):
    """Of double precision, which some samplers have; what a network computes in float32 is kept exactly."""
    *given, targets = predicted(*posed)
    kept = normals.stored(*map(torch.from_numpy, given))
    assert {array.dtype.name for array in kept} == {"float32"}
    exact, stored = (scores(*pair, targets, posed[-1]) for pair in (given, kept))
    for a, b, bound in zip(exact, stored, bounds(*given, targets, posed[-1], UNIT["float32"]), strict=True):
        assert abs(a - b) <= bound
    single = [torch.from_numpy(array).float() for array in given]
    assert all(np.array_equal(a, b.numpy()) for a, b in zip(normals.stored(*single), single, strict=True))


def test_float16_does_not():
    """Negative control: errors of a ten-thousandth at an offset of three come out several times too large."""
    posed = (0, 3.0, -4.0, -4.0, 0.0)
    mean, variance, targets = predicted(*posed)
    exact = scores(mean, variance, targets, 0.0)
    rounded = scores(mean.astype(np.float16), variance, targets, 0.0)
    bound = bounds(mean, variance, targets, 0.0, UNIT["float32"])
    assert rounded[1] > 4 * exact[1]
    assert all(abs(a - b) > 100 * limit for a, b, limit in zip(exact, rounded, bound, strict=True))


@given(
    st.integers(0, 2**32 - 1), st.integers(2, 20), st.floats(-2, 2.5), st.sampled_from([np.float32, float])
)
def test_stored_log_probs_move_an_nll_by_little_of_itself(seed, classes, spread, kind):
    """By at most 2^-11 of -log p(label) and of the entropy, and 6e-8 per class where a p rounds to 1."""
    draw = np.random.default_rng(seed)
    logits = torch.from_numpy((10**spread * draw.normal(size=(30, classes))).astype(kind))
    log_probs, labels = logits.log_softmax(-1), draw.integers(0, classes, 30)
    given = log_probs.double().numpy()
    normalised = given - np.log(np.exp(given).sum(-1, keepdims=True))
    exact, kept = (-p[np.arange(30), labels] for p in (normalised, metrics.restore(metrics.store(log_probs))))
    entropy = -(np.exp(normalised) * np.maximum(normalised, metrics.LOWEST)).sum(-1)
    near = exact < -metrics.LOWEST
    bound = UNIT["float16"] * 1.01 * (exact + entropy) + 6e-8 * classes
    assert (np.abs(kept - exact)[near] <= bound[near]).all()


def test_far_predictions_are_kept_as_they_are():
    """A mean of a million standard deviations counts as that, and not as less."""
    mean, variance = torch.full((1, 4), 1e6), torch.ones(1, 4)
    _, rmse = scores(*normals.stored(mean, variance), np.full(4, 3.0), 0.0)
    assert rmse == 1e6
