"""Monte Carlo dropout against the network without dropout and against its own definition."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from conformance import problems
from torch import nn
from torch.testing import assert_close

from bench import networks
from bench.contract import Batch, Budget
from bench.engine.engine import Engine, TrainerOptions
from bench.methods import map as map_module
from bench.methods import mc_dropout
from bench.networks import Dropout, dropout_masks


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("problem", problems.PROBLEMS)
def test_rate_zero_is_maximum_a_posteriori(problem):
    """The same seed gives the same losses and predictions as MAP, up to the order of sums."""
    problem = problems.PROBLEMS[problem]()
    fits = []
    for cls, settings in (
        (mc_dropout.MCDropout, mc_dropout.Settings(rate=0.0, learning_rate=0.01)),
        (map_module.MAP, map_module.Settings(learning_rate=0.01)),
    ):
        engine = Engine(cls, settings, 5, trainer=TrainerOptions(accelerator="cpu"))
        fits.append(engine.fit(problem, Budget(4, 8)))
    dropout, plain = fits
    for row, expected in zip(dropout.history, plain.history, strict=True):
        assert row == pytest.approx(expected, rel=1e-6)
    inputs = problem.val.tensors[0]
    a, b = (vars(f.predict(inputs, 1, generator())) for f in fits)
    for name, value in b.items():
        assert_close(a[name], value, rtol=1e-6, atol=1e-6)


def method_of(rate=0.4):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return mc_dropout.MCDropout(problems.mlp(), mc_dropout.Settings(rate=rate))


def test_prediction_shares_its_masks_and_training_does_not():
    """Equal rows get equal outputs in prediction, different ones in training. False alarm: below 1e-9."""
    method = method_of()
    rows = problems.mlp().val.tensors[0][:1].repeat(50, 1)
    predicted = method.predict(rows, 6, generator()).log_probs
    assert_close(predicted, predicted[:, :1].expand_as(predicted), rtol=0, atol=0)
    assert len(predicted[:, 0].unique(dim=0)) > 1
    trained = method._outputs(rows, torch.tensor([3, 4]), shared=False)
    assert len(trained[0].unique(dim=0)) > 1


@pytest.mark.parametrize("masks", ["shared", "per_input"])
def test_plain_dropout_has_the_same_marginals_and_no_function(masks, monkeypatch):
    """A linear layer of dropped units: mean and variance by hand, covariance of two inputs the variance or 0.

    4,000 draws, limits at five standard errors: false alarm 1e-5. The inputs lie in blocks of their own.
    """
    rate, draws = 0.4, 4000

    def network(dropout=0.0, width=1.0):
        return nn.Sequential(Dropout(dropout), nn.Linear(3, 1, bias=False))

    posed = replace(problems.straight_line(), network=network)
    method = mc_dropout.MCDropout(posed, mc_dropout.Settings(rate=rate, masks=masks))
    monkeypatch.setattr(mc_dropout, "blocks", lambda inputs: inputs.split(1))
    values = method.predict(torch.ones(2, 3), draws, generator()).mean[..., 0].double()
    w = method.network[1].weight.detach()[0].double()
    mean, variance = w.sum(), rate / (1 - rate) * w.square().sum()
    assert_close(values.mean(0), mean.expand(2), rtol=0, atol=5 * float((variance / draws).sqrt()))
    assert_close(values.var(0), variance.expand(2), rtol=0.2, atol=0)
    correlation = float(torch.corrcoef(values.T)[0, 1])
    assert correlation == pytest.approx(1.0 if masks == "shared" else 0.0, abs=5 / draws**0.5)


def test_training_and_prediction_drop_the_share_that_the_rate_names():
    """A mask is 0 with probability p and 1/(1 - p) otherwise. False alarm: 7e-6."""
    layer = Dropout(0.3)
    network = nn.Sequential(layer)
    with dropout_masks(network, generator(), shared=False):
        masks = network(torch.ones(200, 500))
    assert_close(masks.unique(), torch.tensor([0.0, 1 / 0.7]))
    share = (masks == 0).double().mean().item()
    assert abs(share - 0.3) < 4.5 * (0.3 * 0.7 / 100_000) ** 0.5
    assert layer.source is None


def test_mean_of_masked_outputs_is_the_unmasked_output():
    """On a linear layer E[W (m x)] = W x, in both modes. False alarm: 2 x 20 x 7e-6."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = nn.Sequential(Dropout(0.4), nn.Linear(6, 4))
        inputs = torch.randn(5, 6)
    expected = network(inputs)
    for shared in (True, False):
        with dropout_masks(network, generator(1), shared), torch.no_grad():
            outputs = torch.stack([network(inputs) for _ in range(4000)])
        error = outputs.std(0) / 4000**0.5
        assert ((outputs.mean(0) - expected).abs() <= 4.5 * error).all(), f"shared={shared}"


def test_channels_are_dropped_whole():
    """With `channels` a feature map is kept or dropped as one. False alarm: below 1e-9."""
    network = nn.Sequential(Dropout(0.5, channels=True))
    with dropout_masks(network, generator(), shared=False):
        maps = network(torch.ones(20, 8, 3, 3)).flatten(2)
    assert_close(maps, maps[..., :1].expand_as(maps))
    assert {v.item() for v in maps.unique()} == {0.0, 2.0}


def test_loss_is_the_masked_likelihood_and_the_prior_of_the_weights():
    """Terms by hand: outputs under the very masks, and -log prior of the undropped weights."""
    problem, method = problems.mlp(), method_of()
    batch = Batch(*problem.train.tensors)
    seeds = torch.tensor([11, 12])
    likelihood_term, prior_term = method.loss_terms(batch, {"seeds": seeds})
    log_probs = []
    for seed in seeds.tolist():
        with dropout_masks(method.network, generator(seed), shared=False):
            log_probs.append(method.network(batch.inputs).log_softmax(-1)[range(20), batch.targets])
    assert_close(likelihood_term, -torch.stack(log_probs).mean(0).sum())
    prior = torch.distributions.Normal(0.1, 0.8)
    assert_close(prior_term, -sum(prior.log_prob(p).sum() for p in method.network.parameters()))


def test_mlp_drops_after_every_hidden_layer():
    """The rate of the settings reaches each dropout layer of the task's network."""
    network = partial(networks.mlp, 4, 3, (6, 5))(dropout=0.25)
    assert [m.p for m in network if isinstance(m, Dropout)] == [0.25, 0.25]
