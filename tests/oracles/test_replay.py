"""Generative replay without Bayes against MAP: the first fit, and later ones on the union of data."""

from dataclasses import replace

import pytest
import torch
from conformance import laws, problems
from oracles import replayed
from oracles.replayed import FEW, Remembers, generator
from torch.testing import assert_close
from torch.utils.data import TensorDataset

from bench.contract import Batch, Budget
from bench.errors import UsageError
from bench.methods.map import MAP
from bench.methods.replay import GenerativeReplay, Settings


def test_first_fit_is_map_bit_by_bit():
    values = {"optimizer": "sgd", "learning_rate": 0.01}
    ours = replayed.engine(GenerativeReplay, 3, **values, **FEW).fit(problems.pixels(), Budget(4, 8))
    theirs = replayed.engine(MAP, 3, **values).fit(problems.pixels(), Budget(4, 8))
    assert ours.history == theirs.history
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value)


def test_loss_with_replayed_past_is_unbiased():
    """Three new rows and three drawn past ones: the mean over draws is MAP on the union. False alarm 7e-6."""
    method = replayed.second(GenerativeReplay)
    past = replayed.doubled(problems.pixels())
    inputs = past.train.tensors[0]
    labels = method.network(inputs).argmax(1)  # untrained as yet, it is still the last mode
    method.replay.vae = Remembers(inputs, in_order=False)
    with torch.no_grad():
        for p in method.network.parameters():
            p += 0.3 * torch.randn(p.shape, generator=generator(2))
    past = replace(past, train=TensorDataset(inputs, labels))
    new = replayed.doubled(replayed.later())
    other = MAP(replayed.union(past, new), MAP.settings_class()).double()
    other.network.load_state_dict(method.network.state_dict())
    expected = other.loss_terms(Batch(*other.problem.train.tensors), {})
    g, terms = generator(1), []
    with torch.no_grad():
        for _ in range(800):
            rows = torch.randint(8, (3,), generator=g)
            batch = Batch(*(t[rows] for t in new.train.tensors))
            likelihood_term, prior_term = method.loss_terms(batch, method.draw_noise(1, g))
            terms.append(likelihood_term)
            assert_close(prior_term, expected[1], rtol=1e-12, atol=0)
    laws.assert_mean_is(torch.stack(terms), expected[0].item())


def test_prior_stays_the_first_one():
    problem = problems.pixels()
    assert replayed.engine(GenerativeReplay, **FEW).fit(problem, Budget(1)).as_prior() is problem.prior


def test_earlier_classes_are_remembered():
    """Where going on from the mode forgets them."""
    fast = {"learning_rate": 0.03}
    generous = {"generator_steps": 200, "generator_hidden": 32, "generator_latent": 4}
    assert min(replayed.accuracies_on_bars(GenerativeReplay, **fast, **generous)) > 0.95
    forgotten, last = replayed.accuracies_on_bars(MAP, **fast)
    assert forgotten < 0.6 < 0.95 < last


def test_inputs_outside_the_unit_interval_are_refused():
    with pytest.raises(UsageError, match=r"^replay generates inputs in \[0, 1\]"):
        GenerativeReplay(problems.cnn(), Settings())
