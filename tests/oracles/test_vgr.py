"""Variational generative replay against mean-field VI: the first fit, and later ones on the union of data."""

import copy
from dataclasses import replace

import pytest
import torch
from conformance import laws, problems
from oracles import replayed
from oracles.replayed import FEW, Remembers, generator
from torch.nn.functional import softplus
from torch.testing import assert_close
from torch.utils.data import TensorDataset

from bench import likelihoods
from bench.contract import Batch, Budget
from bench.errors import UsageError
from bench.laws.cases import Case
from bench.methods.mfvi import MFVI
from bench.methods.vgr import VGR, Settings
from bench.weights import forward


@pytest.fixture(scope="module")
def kept():
    return replayed.second(VGR)


@pytest.fixture
def method(kept):
    """A second fit before its training: 20 examples are past, 8 are new."""
    return copy.deepcopy(kept)


@pytest.fixture
def batch():
    return Batch(*replayed.doubled(replayed.later()).train.tensors)


# ---- against mean-field VI


def test_first_fit_is_mfvi_bit_by_bit():
    values = {"initial_rho": -2.0, "train_samples": 2, "learning_rate": 0.01}
    ours = replayed.engine(VGR, 3, **values, **FEW).fit(problems.pixels(), Budget(4, 8))
    theirs = replayed.engine(MFVI, 3, **values).fit(problems.pixels(), Budget(4, 8))
    assert ours.history == theirs.history
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value)
    inputs = problems.pixels().val.tensors[0]
    predictions = (m.predict(inputs, 5, generator(1)) for m in (ours, theirs))
    laws.assert_same_prediction(*predictions, exact=True)


def twin(method, past):
    """Mean-field VI at the same distribution, on the examples of both fits."""
    problem = replayed.union(past, replayed.doubled(replayed.later()))
    other = MFVI(problem, MFVI.settings_class()).double()
    other.load_state_dict({name: method.state_dict()[name] for name in other.state_dict()})
    return other


def remembered(method, in_order):
    """The first problem under the labels that the method gives it, which its generator replays."""
    past = replayed.doubled(problems.pixels())
    inputs = past.train.tensors[0]
    method.replay.vae = Remembers(inputs, True)
    labels = method.replay.pairs(method.network, method.likelihood, len(inputs), 0).targets
    method.replay.vae = Remembers(inputs, in_order)
    return replace(past, train=TensorDataset(inputs, labels))


@pytest.mark.parametrize("samples", [1, 3])
def test_loss_with_the_true_past_is_that_of_the_union(method, samples):
    """All past examples once beside as many new ones: value and gradient are those of MFVI on the union."""
    past = remembered(method, in_order=True)
    other = twin(method, past)
    new = replayed.doubled(replayed.later()).train.tensors
    rows = torch.arange(20) % 4  # half of the new rows, five times each: the batch is as long as the past
    batch = Batch(*(t[rows] for t in new))
    noise = laws.in_double(method.draw_noise(samples, generator()))
    terms = method.loss_terms(batch, noise)
    inputs, targets = past.train.tensors
    alone = {name: e for name, e in noise.items() if name != "replay"}
    counts = torch.cat([torch.full((4,), 2.0), torch.ones(20)]).double()  # 8 new, 20 past
    together = Batch(torch.cat([new[0][:4], inputs]), torch.cat([new[1][:4], targets]), counts)
    other.problem = replace(other.problem, num_train=24)
    expected = other.loss_terms(together, alone)
    assert_close(terms, expected, rtol=1e-12, atol=0)
    ours = torch.autograd.grad(sum(terms), [*method.network.parameters(), *method.rho])
    theirs = torch.autograd.grad(sum(expected), [*other.network.parameters(), *other.rho])
    assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_loss_with_replayed_past_is_unbiased(method):
    """Three new rows and three drawn past ones: the mean is MFVI on the union. False alarm 7e-6."""
    past = remembered(method, in_order=False)
    other = twin(method, past)
    noise = laws.in_double(method.draw_noise(1, generator()))
    alone = {name: e for name, e in noise.items() if name != "replay"}
    expected = other.loss_terms(Batch(*other.problem.train.tensors), alone)[0]
    new, g, terms = replayed.doubled(replayed.later()).train.tensors, generator(1), []
    with torch.no_grad():
        for _ in range(800):
            rows = torch.randint(8, (3,), generator=g)
            seed = torch.randint(2**62, (1,), generator=g)
            terms.append(method.loss_terms(Batch(*(t[rows] for t in new)), noise | {"replay": seed})[0])
    laws.assert_mean_is(torch.stack(terms), expected.item())
    assert (torch.stack(terms).mean() - 8 / 28 * expected).abs() > 0.3 * expected


def test_prior_stays_the_first_one(method, batch):
    """It is handed on as it came, and the divergence to it is taken once whatever is replayed."""
    problem = problems.pixels()
    assert replayed.engine(VGR, **FEW).fit(problem, Budget(1)).as_prior() is problem.prior
    past = remembered(method, in_order=False)
    noise = laws.in_double(method.draw_noise(1, generator()))
    divergence = twin(method, past).loss_terms(batch, noise)[1]
    assert_close(method.loss_terms(batch, noise)[1], divergence, rtol=1e-12, atol=0)


# ---- what is replayed


def test_labels_are_the_likeliest_class_under_the_last_posterior():
    """Of the probabilities averaged over draws, and not those of the mean weights."""
    method = replayed.second(VGR, initial_rho=1.0, label_samples=7)
    batch = method.replay.pairs(method.network, method.likelihood, 300, 5)
    draws = {name: method.replay.get_buffer(f"teacher{i}") for i, name in enumerate(method.replay._teacher)}
    means = dict(method.network.named_parameters())
    assert draws.keys() == means.keys()
    for name, w in draws.items():
        assert w.shape == (7, *means[name].shape)
        assert len(w.unique(dim=0)) == 7
    outputs = forward(method.network, draws, batch.inputs).detach()
    assert torch.equal(batch.targets, outputs.softmax(-1).mean(0).argmax(-1))
    assert not torch.equal(batch.targets, method.network(batch.inputs).argmax(-1))
    assert torch.equal(batch.inputs, method.replay.vae.sample(300, generator(5)))


def test_labels_are_draws_of_the_posterior_before():
    """Its means and variances are those of many draws. False alarm: 2 x 100 weights x 6e-7."""
    method = replayed.second(VGR, label_samples=2000)
    for i, (mean, rho) in enumerate(zip(method.network.parameters(), method.rho, strict=True)):
        draws = method.replay.get_buffer(f"teacher{i}")
        deviations, variance = draws - mean.detach(), softplus(rho).detach().square()
        laws.assert_mean_is(deviations, 0.0, errors=5)
        laws.assert_mean_is(deviations.square(), variance, errors=5)


def test_each_sample_s_noise_gives_the_same_pairs(method):
    noise = method.draw_noise(4, generator())
    assert noise["replay"].shape == (4,)
    assert len(noise["replay"].unique()) == 1
    assert noise["replay"][0] != method.draw_noise(4, generator(1))["replay"][0]


def test_two_classes_are_labelled_too():
    """Bernoulli likelihoods: the label is the sign of the averaged probability less one half."""
    method = replayed.engine(VGR, initial_rho=1.0, **FEW).fit(problems.pixel_line(), Budget(2))
    after = VGR(problems.pixel_line(), Settings(initial_rho=1.0, **FEW), method)
    batch = after.replay.pairs(after.network, after.likelihood, 100, 1)
    draws = {name: after.replay.get_buffer(f"teacher{i}") for i, name in enumerate(after.replay._teacher)}
    odds = forward(after.network, draws, batch.inputs).squeeze(-1).detach()
    assert torch.equal(batch.targets, (odds.sigmoid().mean(0) > 0.5).long())
    terms = after.loss_terms(Batch(*after.problem.train.tensors), after.draw_noise(1, generator()))
    assert all(term.isfinite() for term in terms)


def test_examples_are_counted_over_the_fits():
    """20, then 8, then 5 examples: the loss per example is over all of them."""
    run, method = replayed.engine(VGR, **FEW), None
    for rows, past in ((20, 0), (8, 20), (5, 28)):
        method = run.fit(replayed.later(rows), Budget(2, 4), start=method)
        assert method.replay.num_past == past
        assert method.replay.num_new == rows
        assert method.problem.num_train == method.replay.num_learned == past + rows


def test_generator_learns_after_the_fit_alone():
    """The optimiser of the fit does not get it: what is replayed is the generator of the fits before."""
    states = []

    class Watched(VGR):
        def finish_fit(self, loader):
            states.append(copy.deepcopy(self.replay.vae.state_dict()))
            super().finish_fit(loader)

    run = replayed.engine(Watched, **FEW)
    first = run.fit(problems.pixels(), Budget(2, 8))
    later = run.fit(replayed.later(), Budget(2, 4), start=first)
    for name, value in first.replay.vae.state_dict().items():
        assert not torch.equal(value, states[0][name])
        assert torch.equal(value, states[1][name])
        assert not torch.equal(value, later.replay.vae.state_dict()[name])
    assert not any(p.requires_grad for p in later.replay.parameters())


# ---- the laws, for a fit that has a past


@pytest.fixture(scope="module")
def case():
    """The method as second fit after one fixed first fit."""
    first = replayed.engine(VGR, **FEW).fit(problems.pixels(), Budget(3, 8))

    class Second(VGR):
        def __init__(self, problem, settings, start=None):
            super().__init__(problem, settings, start or first)

    return Case(Second, FEW, replayed.later(20))


def test_laws_hold_for_a_second_fit(case):
    """Of gradients, samples and batch sizes; false alarms as stated there."""
    laws.gradients_reach_every_parameter(case)
    laws.sample_gradients_average(case)
    laws.batch_size_does_not_matter(case)
    laws.double_precision_is_kept(case)
    laws.history_tells_the_terms(case)
    laws.seed_decides(case)
    laws.fit_leaves_global_state(case)


def test_stopped_second_fit_goes_on(case, tmp_path):
    laws.stopped_fit_goes_on(case, tmp_path, None)


def test_third_fit_is_the_same_from_a_checkpoint(tmp_path):
    """What a fit hands to the next survives its checkpoint."""

    def third(folder):
        run = laws.Case(VGR, FEW, replayed.later()).engine(checkpoints=folder)
        method = None
        for rows in (20, 8, 5):
            run.stage(f"{rows} rows")
            method = run.fit(replayed.later(rows), Budget(2, 4), start=method)
        return method

    expected = third(tmp_path).state_dict()
    (tmp_path / "002-5-rows.ckpt").unlink()
    again = third(tmp_path).state_dict()
    assert again.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(again[name], value)


# ---- what it is for, and what it cannot do


@pytest.mark.slow
def test_earlier_classes_are_remembered():
    """Where mean-field VI with its posterior as prior forgets them."""
    fast = {"learning_rate": 0.03}
    generous = {"generator_steps": 200, "generator_hidden": 32, "generator_latent": 4}
    assert min(replayed.accuracies_on_bars(VGR, **fast, **generous)) > 0.95
    forgotten, last = replayed.accuracies_on_bars(MFVI, **fast)
    assert forgotten < 0.6 < 0.95 < last


@pytest.mark.parametrize("value", [-0.01, 1.01])
def test_inputs_outside_the_unit_interval_are_refused(value):
    problem = problems.pixels()
    problem.train.tensors[0][3, 0, 1, 1] = value
    with pytest.raises(UsageError, match=r"^vgr generates inputs in \[0, 1\]") as caught:
        VGR(problem, Settings())
    assert "\n" not in str(caught.value)


def test_regression_is_refused():
    problem = replace(problems.pixels(), likelihood=likelihoods.Gaussian(1.0))
    with pytest.raises(UsageError, match=r"^vgr labels what it replays by class"):
        VGR(problem, Settings())
