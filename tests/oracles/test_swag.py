"""SWAG's moments by hand, its draws against its covariance, its schedule, and both names from one run."""

import numpy as np
import pytest
import torch
from conformance import laws, problems
from oracles import linear
from torch.testing import assert_close

from bench.contract import Budget
from bench.engine.engine import Engine, TrainerOptions
from bench.errors import UsageError
from bench.methods.swag import NAMES, SWAG, Moments, Settings
from bench.settings import build

TRAJECTORY = torch.tensor([[0, 0], [2, 1], [4, -1], [2, 4], [7, 1]], dtype=torch.float64)
"""Running means (0, 0), (1, 0.5), (2, 0), (2, 1), (3, 1)."""


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def moments_of(trajectory, rank):
    moments = Moments(rank=rank)
    for vector in trajectory:
        moments.update(vector)
    return moments


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def fit(problem=None, epochs=10, cls=SWAG, batch_size=None, **values):
    engine = Engine(cls, Settings(**values), 0, trainer=TrainerOptions(accelerator="cpu"))
    return engine.fit(problem or linear.Truth().problem, Budget(epochs, batch_size))


class Recorder(SWAG):
    """Keeps the rate of every epoch and the weights at its end."""

    def on_train_epoch_end(self):
        """Copies the weights."""
        seen = self.__dict__.setdefault("seen", [])
        seen.append(torch.cat([p.detach().flatten().clone() for p in self.network.parameters()]))

    def on_train_batch_start(self, batch, batch_idx):
        """Reads the optimiser's rate."""
        rates = self.__dict__.setdefault("rates", {})
        rates[self.epoch] = self.optimizers().param_groups[0]["lr"]


# ---- moments


def test_moments_by_hand():
    """Five vectors, rank 3: deviations (2, -1), (0, 3), (4, 0) from the means that count them."""
    moments = moments_of(TRAJECTORY, 3)
    assert_close(moments.mean, double([3, 1]))
    assert_close(moments.variance, double([5.6, 2.8]))
    assert_close(moments.deviations, double([[2, -1], [0, 3], [4, 0]]))


@pytest.mark.parametrize(
    ("scale", "low_rank", "expected"),
    [
        (0.5, True, [[7.8, -0.5], [-0.5, 3.9]]),  # [diag(5.6, 2.8) + [[20, -2], [-2, 10]] / 2] / 2
        (1.0, False, [[5.6, 0], [0, 2.8]]),
        (0.3, True, [[4.68, -0.3], [-0.3, 2.34]]),
        (0.3, False, [[1.68, 0], [0, 0.84]]),
    ],
)
def test_covariance_by_hand(scale, low_rank, expected):
    moments = moments_of(TRAJECTORY, 3)
    assert_close(moments.covariance(scale, low_rank), double(expected))
    assert_close(moments.marginal_variance(scale, low_rank), double(expected).diagonal())


def test_fewer_vectors_than_rank():
    """Two vectors, rank 5: two deviations (0, 0), (1, 0.5), still divided by rank - 1 = 4."""
    moments = moments_of(TRAJECTORY[:2], 5)
    assert_close(moments.deviations, double([[0, 0], [1, 0.5]]))
    expected = double([[1 + 1 / 4, 0.5 / 4], [0.5 / 4, 0.25 + 0.25 / 4]])
    assert_close(moments.covariance(1.0, True), expected)


def test_variance_is_clamped():
    """Equal vectors have the variance 1e-30."""
    moments = moments_of(torch.full((4, 2), 0.1), 2)
    assert_close(moments.variance, torch.full((2,), 1e-30), rtol=1e-6, atol=0)


def test_variance_survives_a_large_mean():
    """In float32 around 100 with a standard deviation of 1e-3: 1e4 less 1e4 would leave nothing of 1e-6."""
    vectors = 100 + 1e-3 * torch.randn(200, 3, generator=generator())
    expected = vectors.double().numpy().var(0)
    assert_close(moments_of(vectors, 2).variance.double(), torch.from_numpy(expected), rtol=0.02, atol=0)


@pytest.mark.parametrize(("scale", "low_rank"), [(0.5, True), (0.7, True), (1.0, False)])
def test_draws_have_the_covariance(scale, low_rank):
    """Mean and covariance of draws within 5 standard errors. False alarm: 3 x 14 x 6e-7."""
    moments = moments_of(torch.randn(9, 4, generator=generator(1)).double().cumsum(0), 3)
    draws = moments.draw(20000, generator(2), scale, low_rank) - moments.mean
    laws.assert_mean_is(draws, 0.0, errors=5)
    products = draws[:, :, None] * draws[:, None]
    laws.assert_mean_is(products.flatten(1), moments.covariance(scale, low_rank).flatten(), errors=5)


def test_draws_do_not_depend_on_their_number():
    moments = moments_of(TRAJECTORY, 3)
    assert torch.equal(moments.draw(2, generator(), 0.5, True), moments.draw(5, generator(), 0.5, True)[:2])


def test_rank_of_one_is_refused():
    """It would divide by zero."""
    with pytest.raises(ValueError, match="at least 2"):
        Moments(1)
    with pytest.raises(UsageError, match=r"--method\.rank 1"):
        build(Settings, {"rank": 1}, "method")


# ---- schedule


def test_schedule_as_published():
    """300 epochs: rate 0.1 through epoch 80, half-way down at 0.7 of 161, 0.05 from 0.9 of 161 on."""
    method = SWAG(linear.Truth().problem, Settings(learning_rate=0.1, swa_learning_rate=0.05))
    method.spends(Budget(300))
    assert (method.first_collection, method.warmup_epochs) == (161, 162)
    for epoch, expected in {0: 0.1, 80: 0.1, 81: 0.0996118, 100: 0.0848602, 144: 0.0506988}.items():
        assert method.rate(epoch) == pytest.approx(expected, rel=1e-5)
    assert {method.rate(epoch) for epoch in (145, 160, 161, 299)} == {0.05}


def test_schedule_reaches_the_optimiser():
    """Ten epochs, start 0.8: 0.04 through epoch 4, 0.02 from epoch 7.2, collections in the last two."""
    method = fit(cls=Recorder, start=0.8, learning_rate=0.04, swa_learning_rate=0.02)
    assert method.first_collection == 8
    rates = [0.04] * 5 + [0.04 - 0.02 * share for share in (0.3125, 0.625, 0.9375)] + [0.02] * 2
    assert [method.rates[epoch] for epoch in range(10)] == pytest.approx(rates)


@pytest.mark.parametrize(("epochs", "first", "collections"), [(1, 0, 1), (2, 0, 2), (3, 1, 2), (10, 5, 5)])
def test_one_collection_per_epoch_from_the_start(epochs, first, collections):
    """From round(0.5367 epochs) on, earlier where fewer than two would be left."""
    method = fit(problems.mlp(), epochs, batch_size=8)
    assert method.first_collection == first
    assert method.diagnostics() == {"collections": collections}


def test_moments_are_those_of_the_iterates():
    """Mean, variance and deviations of the weights seen at the ends of the epochs from the fifth on."""
    method = fit(problems.mlp(), 10, Recorder, batch_size=8, rank=3, learning_rate=0.05)
    iterates = torch.stack(method.seen[5:]).double().numpy()
    means = iterates.cumsum(0) / np.arange(1, 6)[:, None]
    assert_close(method.iterates.mean.double(), torch.from_numpy(means[-1]), rtol=1e-5, atol=1e-6)
    expected = torch.from_numpy(iterates.var(0))
    assert_close(method.iterates.variance.double(), expected, rtol=1e-3, atol=1e-9)
    expected = torch.from_numpy((iterates - means)[-3:])
    assert_close(method.iterates.deviations.double(), expected, rtol=1e-3, atol=1e-6)
    assert (expected.abs() > 1e-4).any()


def test_mean_reaches_the_mode():
    """On linear regression with full batches the iterates come to rest at the exact posterior mean."""
    truth = linear.Truth()
    method = fit(truth.problem, 300, learning_rate=0.1, swa_learning_rate=0.05)
    mean, variance = linear.flat(method.moments())
    assert_close(mean, truth.mean, rtol=1e-3, atol=1e-3)
    assert (variance < 1e-4).all(), "without gradient noise there is next to no spread"


# ---- the method


def test_both_names_come_from_the_same_run():
    """Bit-identical training and state; only the draws differ, and each has its own covariance."""
    fits = [fit(problems.mlp(), 6, batch_size=8, **NAMES[name]) for name in ("swag", "swag_diagonal")]
    states = [method.state_dict() for method in fits]
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name])
    assert fits[0].history == fits[1].history
    draws = [method.sample_weights(2, generator()) for method in fits]
    assert not torch.equal(draws[0]["1.weight"], draws[1]["1.weight"])
    moments = fits[0].iterates
    variances = [linear.flat(method.moments())[1] for method in fits]
    assert_close(variances[0], moments.covariance(0.5, True).diagonal().double())
    assert_close(variances[1], moments.variance.double())


def test_scale_is_the_factor_of_the_covariance():
    variances = [linear.flat(fit(problems.mlp(), 4, scale=s).moments())[1] for s in (0.5, 0.2, None)]
    assert_close(variances[1], 0.4 * variances[0])
    assert_close(variances[2], variances[0])


def test_before_any_collection_it_is_the_present_network():
    """Predictions and moments at the current weights."""
    problem = problems.mlp()
    method = SWAG(problem, Settings())
    inputs = problem.val.tensors[0]
    expected = method.network(inputs).log_softmax(-1).expand(3, -1, -1)
    assert_close(method.predict(inputs, 3, generator()).log_probs, expected)
    mean, variance = linear.flat(method.moments())
    assert_close(mean, torch.cat([p.flatten() for p in method.network.parameters()]).double())
    assert not variance.any()


def test_next_fit_goes_on_from_the_weights_with_new_moments():
    first = fit(problems.regression(), 4)
    second = SWAG(problems.regression(), Settings(), start=first)
    for name, value in second.network.state_dict().items():
        assert torch.equal(value, first.network.state_dict()[name])
    assert torch.equal(second.likelihood.log_sigma, first.likelihood.log_sigma)
    assert second.iterates.count == 0


def test_stopped_while_collecting(tmp_path):
    """Stopped after two of four collections and gone on with: bit-identical."""
    case = laws.Case(SWAG, {"start": 0.2, "learning_rate": 0.02}, problems.mlp())
    laws.stopped_fit_goes_on(case, tmp_path, None)
