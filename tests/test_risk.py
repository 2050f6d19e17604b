"""PURE and LURE by exact enumeration of every sequence of acquisitions, and what their weights must be."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.errors import UsageError
from bench.studies import acquisition, risk

LOSSES = {4: [0.3, 2.0, -1.1, 7.5], 5: [0.0, 2.0, 11.0, 0.7, -3.3]}


# ---- proposals that depend on all that went before: (history of indices, their losses, candidates left)


def of_history(history, losses, left):
    """Any number that another order of the same points would change."""
    return [1 + (7 * i + sum((k + 1) * (h + 2) for k, h in enumerate(history))) % 5 for i in left]


def of_observed_losses(history, losses, left):
    """Follows what the labels acquired so far have shown."""
    seen = sum(losses[i] for i in history)
    return [math.exp(math.sin((i + 1) * (1 + seen))) for i in left]


def far_from_history(history, losses, left):
    return [1e-3 + sum((i - h) ** 2 for h in history) for i in left]


def nearly_greedy(history, losses, left):
    """Almost all on the point of the largest loss: an oracle."""
    best = max(left, key=lambda i: losses[i])
    return [1.0 if i == best else 1e-4 for i in left]


def uniform(history, losses, left):
    return [1.0 for _ in left]


def first_then_random(history, losses, left):
    """A uniform initial set of two, and then an active one."""
    return (uniform if len(history) < 2 else of_observed_losses)(history, losses, left)


DEPENDENT = (of_history, of_observed_losses, far_from_history, nearly_greedy, first_then_random)


def enumerate_all(proposal, losses, acquired):
    """Every sequence: its probability `[R]`, losses `[R, M]` and proposal `[R, M]`."""
    size, rows = len(losses), []
    for sequence in itertools.permutations(range(size), acquired):
        q = []
        for m, index in enumerate(sequence):
            left = [i for i in range(size) if i not in sequence[:m]]
            scores = proposal(sequence[:m], losses, left)
            q.append(scores[left.index(index)] / sum(scores))
        rows.append((math.prod(q), [losses[i] for i in sequence], q))
    return (np.array(part) for part in zip(*rows, strict=True))


CASES = [(size, m) for size in LOSSES for m in range(1, size + 1)]


@pytest.mark.parametrize(("size", "acquired"), CASES)
@pytest.mark.parametrize("proposal", [*DEPENDENT, uniform])
@pytest.mark.parametrize("estimator", [risk.pure, risk.lure])
def test_mean_over_all_sequences_is_the_full_risk(estimator, proposal, size, acquired):
    probability, losses, q = enumerate_all(proposal, LOSSES[size], acquired)
    assert probability.sum() == pytest.approx(1, abs=1e-12)
    truth = np.mean(LOSSES[size])
    assert probability @ estimator(losses, q, size) == pytest.approx(truth, abs=1e-12)


@pytest.mark.parametrize("proposal", DEPENDENT)
def test_plain_is_biased(proposal):
    """Negative control of the law above: what it would not let pass."""
    probability, losses, _ = enumerate_all(proposal, LOSSES[5], 3)
    assert abs(probability @ risk.plain(losses) - np.mean(LOSSES[5])) > 1e-3


@pytest.mark.parametrize("size", LOSSES)
@pytest.mark.parametrize("proposal", DEPENDENT)
def test_lure_of_the_whole_pool_is_the_risk_itself(proposal, size):
    """M = N: variance zero, all weights 1; PURE keeps a variance."""
    _, losses, q = enumerate_all(proposal, LOSSES[size], size)
    assert (risk.lure_weights(q, size) == 1).all()
    np.testing.assert_allclose(risk.lure(losses, q, size), np.mean(LOSSES[size]), rtol=0, atol=1e-14)
    assert np.ptp(risk.pure(losses, q, size)) > 0.1


# ---- weights


@given(st.integers(1, 400), st.data())
@settings(max_examples=60, deadline=None)
def test_uniform_draws_weigh_exactly_one_in_lure_and_not_in_pure(size, data):
    acquired = data.draw(st.integers(1, size))
    q = 1 / np.arange(size, size - acquired, -1.0)
    assert (risk.lure_weights(q, size) == 1).all()
    pure = risk.pure_weights(q, size)
    by_hand = [(size - m + 1) / size + (acquired - m) / size for m in range(1, acquired + 1)]
    np.testing.assert_allclose(pure, by_hand, rtol=1e-12)
    if acquired > 1:
        assert pure[0] > 1
        assert pure[-1] < 1


def test_initial_random_points_weigh_exactly_one_before_active_ones():
    size, q = 30, [1 / 30, 1 / 29, 1 / 28, 0.9, 0.001]
    weights = risk.lure_weights(np.array(q), size)
    assert (weights[:3] == 1).all()
    by_hand = [1 + 25 / (30 - m) * (1 / ((31 - m) * q[m - 1]) - 1) for m in (4, 5)]
    np.testing.assert_allclose(weights[3:], by_hand, rtol=1e-13)


def random_draws(size, seed, data):
    """Losses and proposals `[3, M]` of some points of a pool."""
    shape = 3, data.draw(st.integers(1, size))
    rng = np.random.default_rng(seed)
    q = rng.uniform(1e-6, 1, shape)
    return rng.normal(size=shape), q


@given(st.integers(1, 60), st.integers(0, 2**32 - 1), st.data())
@settings(max_examples=60, deadline=None)
def test_weights_of_random_pools(size, seed, data):
    """Positive; as the formulas in exact fractions say; of every batch as of each row alone."""
    losses, q = random_draws(size, seed, data)
    for weights, estimate in ((risk.pure_weights, risk.pure), (risk.lure_weights, risk.lure)):
        values = weights(q, size)
        assert (values > 0).all()
        assert values.shape == q.shape
        np.testing.assert_allclose(estimate(losses, q, size), (values * losses).mean(1), rtol=1e-12)
        for row in range(3):
            np.testing.assert_array_equal(weights(q[row], size), values[row])
    np.testing.assert_allclose(risk.plain(losses), losses.mean(1), rtol=1e-12)


@given(st.integers(1, 60), st.integers(0, 2**32 - 1), st.data())
@settings(max_examples=60, deadline=None)
def test_running_sums_say_what_every_size_does(size, seed, data):
    losses, q = random_draws(size, seed, data)
    for values, estimate in zip(
        risk.running(losses, q, size), (lambda x, *_: risk.plain(x), risk.pure, risk.lure), strict=True
    ):
        alone = [estimate(losses[:, :m], q[:, :m], size) for m in range(1, q.shape[1] + 1)]
        np.testing.assert_allclose(values, np.stack(alone, 1), rtol=1e-9, atol=1e-9 * np.abs(alone).max())


@given(st.integers(2, 9), st.integers(0, 2**32 - 1), st.data())
@settings(max_examples=40, deadline=None)
def test_last_draw_of_a_random_pool_by_importance_sampling(size, seed, data):
    """Over it, given all before, v_M L_M averages to the sum of losses left over N (PURE) or their number."""
    m = data.draw(st.integers(1, size - 1))
    rng = np.random.default_rng(seed)
    left = rng.normal(size=size - m + 1)
    q = rng.dirichlet(np.ones(len(left))) + 1e-3
    q /= q.sum()
    before = np.full(m - 1, 0.5)
    for weights, divisor in ((risk.pure_weights, size), (risk.lure_weights, len(left))):
        last = [weights(np.append(before, p), size)[-1] for p in q]
        assert q @ (last * left) == pytest.approx(left.sum() / divisor, abs=1e-12)


# ---- kinds


def test_arrays_give_arrays_and_tensors_give_tensors_in_float64():
    q, losses = [0.5, 0.25], [1.0, 3.0]
    for array in (np.array(q), np.array(q, np.float32)):
        assert isinstance(risk.lure_weights(array, 4), np.ndarray)
        assert risk.lure_weights(array, 4).dtype == np.float64
    tensor = torch.tensor(q, dtype=torch.float32)
    assert risk.pure_weights(tensor, 4).dtype == torch.float64
    expected = risk.lure(np.array(losses), np.array(q), 4)
    assert isinstance(expected, np.floating)
    found = risk.lure(torch.tensor(losses), tensor, 4)
    assert found.shape == ()
    assert found.item() == pytest.approx(expected, rel=1e-15)
    assert risk.plain(losses) == 2  # lists count as arrays


def test_losses_keep_their_gradients():
    """The gradient of an estimate with respect to a loss is its weight over M."""
    losses = torch.tensor([1.0, 2.0], requires_grad=True)
    q = torch.tensor([0.5, 0.1])
    risk.lure(losses, q, 7).backward()
    torch.testing.assert_close(losses.grad.double(), risk.lure_weights(q, 7) / 2)


def test_losses_of_several_models_share_one_proposal():
    rng = np.random.default_rng(0)
    losses, q = rng.normal(size=(3, 5, 4)), rng.uniform(0.1, 1, (5, 4))
    together = risk.pure(losses, q, 9)
    assert together.shape == (3, 5)
    np.testing.assert_array_equal(together[2], risk.pure(losses[2], q, 9))


def test_read_only_arrays_are_taken():
    q = np.array([0.5, 0.5])
    q.flags.writeable = False
    assert risk.lure(q, q, 2) == 0.5


# ---- what is refused

GOOD = np.array([0.2, 0.5])


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda: risk.pure(GOOD, np.array([1, 0.0]), 4), "entry 1 of the proposal is 0.0: must be in (0, 1]"),
        (lambda: risk.lure(GOOD, np.array([1.5, 1]), 4), "entry 0 of the proposal is 1.5: must be in (0, 1]"),
        (lambda: risk.lure_weights(np.array([[0.1], [-1]]), 4), "entry [1, 0] of the proposal is -1.0: "),
        (lambda: risk.pure_weights(np.array([np.nan]), 4), "entry 0 of the proposal is nan: "),
        (lambda: risk.lure_weights(GOOD, 1), "2 points acquired from a pool of 1: cannot be more"),
        (lambda: risk.pure_weights(GOOD, 2.5), "pool_size 2.5: must be a whole number"),
        (lambda: risk.plain(np.array([1.0, np.nan])), "entry 1 of the losses is NaN"),
        (lambda: risk.lure(np.array([np.nan, 1.0]), GOOD, 4), "entry 0 of the losses is NaN"),
        (lambda: risk.lure(np.ones(3), GOOD, 4), "losses and proposal have shapes [3] and [2]"),
        (lambda: risk.pure(np.ones((3, 1)), GOOD, 4), "losses and proposal have shapes [3, 1] and [2]"),
        (lambda: risk.pure(np.ones((3, 2)), np.full((4, 2), 0.5), 4), "have shapes [3, 2] and [4, 2]"),
        (lambda: risk.plain(np.zeros((2, 0))), "losses must be real numbers [..., M] with M at least 1"),
        (lambda: risk.plain(np.float64(1)), "with M at least 1, not of shape []"),
        (lambda: risk.plain(["a"]), "losses must be real numbers [..., M]"),
        (lambda: risk.lure_weights(torch.ones(2, dtype=torch.complex64), 3), "not complex"),
    ],
)  # fmt: skip
def test_bad_input_is_one_clear_line(call, line):
    with pytest.raises(UsageError) as info:
        call()
    message = str(info.value)
    assert message.startswith("risk: ")
    assert line in message
    assert "\n" not in message


def test_an_infinite_loss_is_an_infinite_risk():
    assert risk.lure(np.array([np.inf, 0.0]), GOOD, 5) == np.inf


def test_estimators_on_draws_of_the_suites_own_proposals():
    """4,000 trajectories of softmax draws: LURE and PURE within 4.5 standard errors. False alarm: 1.4e-5."""
    generator = torch.Generator().manual_seed(0)
    losses = torch.rand(12, generator=generator, dtype=torch.float64)
    rows, acquired = 4000, 6
    left = torch.arange(12).repeat(rows, 1)
    drawn, q = [], []
    for _ in range(acquired):
        p = acquisition.softmax(losses[left], 20.0)
        index = acquisition.inverse_cdf(p, torch.rand(rows, generator=generator, dtype=torch.float64))
        q.append(p.gather(1, index[:, None])[:, 0])
        drawn.append(losses[left.gather(1, index[:, None])[:, 0]])
        left = left[torch.arange(left.shape[1]) != index[:, None]].view(rows, -1)
    drawn, q = torch.stack(drawn, 1), torch.stack(q, 1)
    for estimator in (risk.pure, risk.lure):
        estimates = estimator(drawn, q, 12)
        error = estimates.std().item() / rows**0.5
        assert abs(estimates.mean().item() - losses.mean().item()) < 4.5 * error
    assert risk.plain(drawn).mean().item() > losses.mean().item() + 10 * error
