"""R-hat and effective sample size against arviz-stats, known processes, and chains that never move."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from arviz_stats.base import array_stats
from conformance import problems

from bench import diagnostics, predictions
from bench.contract import Batch
from bench.diagnostics import (
    FROZEN,
    RHAT_LIMIT,
    distinct_draws,
    effective_sample_size,
    gradient_norms,
    mixed,
    prediction_autocorrelation,
    prediction_rhat,
    split_rhat,
)
from bench.methods.map import MAP
from bench.runs import registry


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def autoregressive(chains, count, variables, slope, seed=0):
    """Draws `[C, N, V]` of a stationary process of variance 1, whose effective size is N (1 - a)/(1 + a)."""
    noise = normal(count, chains, variables, seed=seed)
    draws = [noise[0]]
    for e in noise[1:]:
        draws.append(slope * draws[-1] + np.sqrt(1 - slope**2) * e)
    return np.stack(draws, 1)


DRAWS = {
    "independent": normal(4, 100, 30),
    "odd": normal(3, 101, 30),
    "short": normal(2, 20, 300),
    "very short": normal(4, 5, 30),
    "four": normal(2, 4, 30),
    "sticky": autoregressive(4, 200, 30, 0.95),
    "alternating": autoregressive(4, 200, 30, -0.6),
    "ties": normal(4, 100, 30).round(),
    "two values": np.sign(normal(4, 100, 30)),
    "apart": normal(4, 100, 30) + np.arange(4)[:, None, None],
    "heavy tails": 1 / normal(4, 100, 30),
}


@pytest.mark.parametrize("kind", DRAWS)
def test_equal_to_arviz(kind):
    """Per variable, whatever the chains do."""
    draws = DRAWS[kind]
    with np.errstate(all="ignore"):
        rhat = array_stats.rhat(draws, chain_axis=0, draw_axis=1)
        size = array_stats.ess(draws, chain_axis=0, draw_axis=1)
    assert np.isfinite(size).all()
    if kind != "two values":  # folded they are one value, whose R-hat is our own decision
        np.testing.assert_allclose(split_rhat(draws), rhat, rtol=1e-12)
    np.testing.assert_allclose(effective_sample_size(draws), size, rtol=1e-9)


def test_two_values_have_the_rhat_of_the_bulk():
    """Folded, draws of plus and minus one are all equal, which is no disagreement."""
    draws = DRAWS["two values"]
    np.testing.assert_allclose(
        split_rhat(draws), array_stats.rhat(draws, chain_axis=0, draw_axis=1, method="z_scale")
    )


def test_independent_chains_agree():
    """R-hat about 1 and effective size about the number of draws; 2000 variables, seen 0.998 to 1.010."""
    draws = normal(4, 500, 2000)
    rhat, size = split_rhat(draws), effective_sample_size(draws)
    assert rhat.min() > 0.995
    assert rhat.max() < 1.02
    assert size.mean() == pytest.approx(2000, rel=0.03)


@pytest.mark.parametrize("slope", [0.5, 0.9])
def test_effective_size_of_an_autoregressive_process(slope):
    """N (1 - a)/(1 + a), in the mean over 200 processes."""
    size = effective_sample_size(autoregressive(4, 1000, 200, slope))
    assert size.mean() == pytest.approx(4000 * (1 - slope) / (1 + slope), rel=0.05)


def test_chains_at_two_modes_are_flagged():
    draws = 0.1 * normal(4, 200, 1)
    draws[:2] += 1
    assert split_rhat(draws) > 1.5, "ranks bound it: 1.73 for modes however far"
    assert effective_sample_size(draws) < 10


def test_chains_of_other_scale_are_flagged():
    """Equal means, so that the bulk agrees and only the tails tell."""
    draws = normal(4, 500, 20)
    draws[0] *= 3
    assert (array_stats.rhat(draws, chain_axis=0, draw_axis=1, method="z_scale") < RHAT_LIMIT).all()
    assert (split_rhat(draws) > RHAT_LIMIT).all()


def test_chains_that_drift_are_flagged():
    """The halves of one chain disagree."""
    draws = normal(1, 400, 5) + np.linspace(0, 3, 400)[:, None]
    assert (split_rhat(draws) > 1.2).all()


def test_chains_that_never_moved_are_flagged():
    """Constant chains at different places, one constant chain among moving ones: finite, and never mixed."""
    apart = np.ones((3, 50, 1)) * np.array([0.1, 0.2, 0.2])[:, None, None]
    assert split_rhat(apart).item() == FROZEN
    assert effective_sample_size(apart).item() == 3
    one = normal(4, 500)
    one[2] = np.median(one)
    assert split_rhat(one).item() == FROZEN
    assert np.isfinite(effective_sample_size(one))
    halves = np.repeat(normal(2, 2), 10, axis=1)  # moved once, in the middle
    assert split_rhat(halves).item() == FROZEN
    assert np.isfinite(effective_sample_size(halves))


def test_one_and_the_same_number_is_no_disagreement():
    draws = np.full((4, 50, 2), 0.1)
    np.testing.assert_array_equal(split_rhat(draws), [1.0, 1.0])
    np.testing.assert_array_equal(effective_sample_size(draws), [4, 4])


@pytest.mark.parametrize("function", [split_rhat, effective_sample_size])
def test_shapes(function, monkeypatch):
    """Trailing axes are variables, none is one variable; pieces change nothing; tensors will do."""
    draws = normal(3, 30, 4, 5)
    values = function(draws)
    assert values.shape == (4, 5)
    assert function(draws[:, :, 1, 2]).shape == ()
    assert function(draws[:, :, 1, 2]) == values[1, 2]
    np.testing.assert_array_equal(function(torch.from_numpy(draws)), values)
    monkeypatch.setattr(diagnostics, "_PIECE", 200)
    np.testing.assert_array_equal(function(draws), values)
    with pytest.raises(ValueError, match="3 draws"):
        function(draws[:, :3])


def test_mixed():
    """None for methods without chains."""
    assert mixed({"acceptance": 0.8}) is None
    assert mixed({"prediction_rhat": 1.05}) is True
    assert mixed({"prediction_rhat": 1.051}) is False
    assert mixed({"prediction_rhat": FROZEN, "acceptance": 0.8}) is False


def predictions_of(outputs):
    return predictions.Categorical(torch.as_tensor(outputs).float().log_softmax(-1))


@pytest.mark.parametrize("inputs", [1, 7, 250])
def test_distinct_draws_are_counted_by_content(inputs):
    """Copies in any order are one draw, and so are numbers that differ by rounding, but no others."""
    outputs = np.random.default_rng(0).normal(size=(30, inputs, 3))
    assert distinct_draws(predictions_of(outputs)) == 30
    copied = outputs[np.random.default_rng(1).integers(0, 30, 500)]
    assert distinct_draws(predictions_of(copied)) == len(np.unique(copied, axis=0)) == 30
    assert distinct_draws(predictions_of(outputs[:1])) == 1
    assert distinct_draws(predictions_of(np.repeat(outputs[:1], 9, 0))) == 1
    for change, expected in ((1e-7, 30), (1e-4, 60)):
        both = np.concatenate([outputs, outputs * (1 + change)])
        prediction = predictions.Gaussian(torch.from_numpy(both).float(), torch.ones(60, inputs, 3))
        assert distinct_draws(prediction) == expected


def test_distinct_draws_of_every_kind_of_prediction():
    """One array that differs is enough; probabilities of zero are no reason to fail; scales do not matter."""
    values = torch.randn(8, 5, 2, generator=torch.Generator().manual_seed(0))
    for scale in (1e-20, 1.0, 1e20):
        one = predictions.Gaussian(torch.ones(8, 5, 2), scale * values.abs())
        other = predictions.Gaussian(scale * values, torch.ones(1, 5, 2).expand(8, -1, -1))
        assert distinct_draws(one) == distinct_draws(other) == 8
    assert distinct_draws(predictions.Bernoulli(values[..., 0])) == 8
    assert distinct_draws(predictions.Bernoulli(torch.zeros(8, 5))) == 1
    certain = torch.tensor([[[0.0, -torch.inf]], [[-torch.inf, 0.0]], [[0.0, -torch.inf]]])
    assert distinct_draws(predictions.Categorical(certain)) == 2


def test_rhat_of_predictions():
    """The worst over inputs and outputs of probabilities or means, samples read chain after chain."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 100, 5, 4, generator=g).double()
    logits[0, :, 3, 2] += 2  # one chain, one input
    log_probs = logits.log_softmax(-1)
    worst = split_rhat(log_probs.exp()).max()
    assert worst > 1.2
    prediction = predictions.Categorical(log_probs.flatten(0, 1))
    assert prediction_rhat(prediction, 3) == pytest.approx(worst, rel=1e-12)
    interleaved = predictions.Categorical(log_probs.transpose(0, 1).flatten(0, 1))
    assert prediction_rhat(interleaved, 3) < RHAT_LIMIT, "which chain is which must not be guessed"
    odds, means = logits[..., 0].flatten(0, 1), logits.flatten(0, 1)
    expected = split_rhat(logits[..., 0].sigmoid()).max()
    assert prediction_rhat(predictions.Bernoulli(odds), 3) == pytest.approx(expected)
    expected = split_rhat(logits).max()
    assert prediction_rhat(predictions.Gaussian(means, means.square()), 3) == pytest.approx(expected)


def draws_of(slope, count=4000):
    """Draws `[N, 5, 4]` of one chain, each number a process of its own."""
    return torch.from_numpy(autoregressive(1, count, 20, slope)[0]).unflatten(1, (5, 4))


@pytest.mark.parametrize("slope", [0.0, 0.5, 0.8, 0.95])
def test_autocorrelation_of_predictions_is_that_of_the_process(slope):
    """(1 + a)/(1 - a) draws are worth one. Over 40 seeds the median of 20 numbers lay within 15% of it."""
    means = draws_of(slope)
    found = prediction_autocorrelation(predictions.Gaussian(means, torch.ones_like(means)))
    assert found == pytest.approx((1 + slope) / (1 - slope), rel=0.2)
    shuffled = means[torch.randperm(len(means), generator=torch.Generator().manual_seed(0))]
    assert prediction_autocorrelation(
        predictions.Gaussian(shuffled, torch.ones_like(means))
    ) == pytest.approx(1, abs=0.2)


def test_autocorrelation_is_of_half_of_what_is_predicted():
    """Of probabilities or means, by the median: a minority that drifts decides nothing."""
    logits = draws_of(0.5, count=50)
    expected = 50 / np.median(effective_sample_size(logits.softmax(-1)[None]))
    log_probs = logits.log_softmax(-1)
    assert prediction_autocorrelation(predictions.Categorical(log_probs)) == pytest.approx(expected, rel=1e-9)
    odds = logits[..., 0]
    expected = 50 / np.median(effective_sample_size(odds.sigmoid()[None]))
    assert prediction_autocorrelation(predictions.Bernoulli(odds)) == pytest.approx(expected, rel=1e-9)

    drift = torch.arange(50.0, dtype=torch.float64)[:, None].expand(50, 4)
    for inputs, longest in ((2, 8), (3, 50 / 1.4)):
        means = logits.clone()
        means[:, :inputs] = drift[:, None]
        found = prediction_autocorrelation(predictions.Gaussian(means, torch.ones_like(means)))
        assert longest - 7 < found < longest
    still = torch.ones(50, 5, 4)
    assert prediction_autocorrelation(predictions.Gaussian(still, still)) == 50


# ---- gradient norms


def test_gradient_norms_by_hand():
    """Of softmax on the last layer: (p - onehot) h^T and p - onehot, summed; of the prior N(0.1, 0.8^2)."""
    problem = replace(problems.mlp(), num_train=60)  # thrice the 20 examples of the batch
    method = MAP(problem, MAP.settings_class())
    batch = Batch(*problem.train.tensors)
    found = gradient_norms(method, batch, torch.Generator())
    hidden = method.network[:-1](batch.inputs)
    last = method.network[-1]
    gap = last(hidden).softmax(1) - torch.nn.functional.one_hot(batch.targets, 3)
    likelihood = torch.cat([(gap.T @ hidden).flatten(), gap.sum(0)]).norm() * 3 / 60
    weights = torch.cat([last.weight.flatten(), last.bias])
    prior = ((weights - 0.1) / 0.8**2).norm() / 60
    assert found == {
        "likelihood_gradient": pytest.approx(likelihood.item(), rel=1e-5),
        "prior_gradient": pytest.approx(prior.item(), rel=1e-5),
    }
    assert all(p.grad is None for p in method.parameters())


@pytest.mark.parametrize(
    "name", [n for n, e in registry.methods().items() if "loss_terms" in e.provides and e.cls.trains]
)
def test_gradient_norms_of_every_trained_method(name):
    """Both finite, or none where other parameters than the network's are trained; no state changes."""
    entry = registry.method(name)
    problem = problems.pixels()
    method = entry.cls(problem, registry.build(entry.cls.settings_class, dict(entry.fixed), "method"))
    state = method.generator.get_state()
    batch = Batch(*problem.train.tensors)
    first, again = (gradient_norms(method, batch, torch.Generator().manual_seed(0)) for _ in range(2))
    assert first == again
    assert torch.equal(method.generator.get_state(), state)
    assert first.keys() in ({"likelihood_gradient", "prior_gradient"}, set())
    assert bool(first) == any(p.requires_grad for p in method.network.parameters())
    assert all(np.isfinite(value) and value >= 0 for value in first.values())
