"""MIMO against layers written out, networks that do not meet, MAP, and enumerated shuffles."""

import collections
import itertools
import math
from dataclasses import replace
from functools import partial

import pytest
import scipy.stats
import torch
from conformance import problems
from oracles.doubles import batch_of, off_start
from torch import nn
from torch.nn import functional
from torch.testing import assert_close
from torch.utils.data import TensorDataset

from bench import likelihoods, networks, priors
from bench.contract import Batch
from bench.divergence import log_prob
from bench.errors import UsageError
from bench.methods.map import MAP
from bench.methods.map import Settings as MAPSettings
from bench.methods.mimo import MIMO, Settings, shuffles


def method_of(problem, **values):
    """The method in float64, off its start."""
    return off_start(MIMO, problem, Settings(**values))


# ---- the network


def test_inputs_meet_in_the_first_layer_and_part_in_the_last():
    """Sums of one product per input, written out, of vectors; heads one after another."""
    method, (inputs, _, _) = method_of(problems.mlp()), batch_of(problems.mlp())
    w1, b1, w2, b2, w3, b3 = method.network.parameters()
    apart = [inputs, inputs.roll(1, 0), inputs.flip(0)]
    hidden = sum(x @ w1[:, 4 * m : 4 * m + 4].T for m, x in enumerate(apart)) + b1
    hidden = (hidden.relu() @ w2.T + b2).relu()
    heads = [hidden @ w3[3 * m : 3 * m + 3].T + b3[3 * m : 3 * m + 3] for m in range(3)]
    assert_close(method._heads(torch.cat(apart)), torch.stack(heads))


def test_images_meet_as_maps():
    """A convolution of every image by its own filters, written out, and their sum."""
    method, (inputs, _, _) = method_of(problems.cnn()), batch_of(problems.cnn())
    w1, b1, w2, b2, w3, b3 = method.network.parameters()
    apart = [inputs, inputs.roll(1, 0), inputs.flip(0)]
    hidden = sum(functional.conv2d(x, w1[:, m : m + 1]) for m, x in enumerate(apart)) + b1.view(1, -1, 1, 1)
    hidden = functional.max_pool2d(hidden.tanh(), 2).flatten(1)
    heads = functional.linear(functional.linear(hidden, w2, b2).relu(), w3, b3)
    assert_close(method._heads(torch.cat(apart)), torch.stack(heads.split(3, 1)))


def test_subnetworks_that_do_not_meet_are_networks_of_their_own():
    """With blocks of weights on a diagonal the likelihood term is the sum of those of three networks."""
    problem = replace(problems.mlp(), network=partial(networks.mlp, 4, 3, (6,)))
    method, batch = method_of(problem, batch_repetitions=1), batch_of(problem)
    w1, b1, w2, b2 = (p.detach() for p in method.network.parameters())
    w1 *= torch.block_diag(*[torch.ones(2, 4)] * 3)
    w2 *= torch.block_diag(*[torch.ones(3, 2)] * 3)
    terms = []
    for m in range(3):
        units, own, head = slice(2 * m, 2 * m + 2), slice(4 * m, 4 * m + 4), slice(3 * m, 3 * m + 3)
        hidden = functional.linear(batch.inputs, w1[units, own], b1[units]).relu()
        outputs = functional.linear(hidden, w2[head, units], b2[head])
        terms.append(functional.cross_entropy(outputs, batch.targets, reduction="sum"))
    nll, _ = method.energies(batch, shuffles(20, method.settings, torch.Generator()))
    assert_close(nll, sum(terms), rtol=1e-9, atol=1e-9)
    with torch.no_grad():
        w1 += 0.1  # now they meet
    assert not torch.allclose(
        method.energies(batch, shuffles(20, method.settings, torch.Generator()))[0], sum(terms), rtol=1e-3
    )


@pytest.mark.parametrize("problem", [problems.mlp, problems.cnn, problems.regression, problems.residual])
def test_one_member_is_map(problem):
    """The same weights from the same start, and the same loss; of two members it is another."""
    problem = problem()
    batch, made = Batch(*problem.train.tensors), []
    for cls, chosen in (
        (MAP, MAPSettings()),
        (MIMO, Settings(ensemble_size=1)),
        (MIMO, Settings(ensemble_size=2)),
    ):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            made.append(cls(problem, chosen))
    mode, one, two = made
    assert_close([*one.network.parameters()], [*mode.network.parameters()], rtol=0, atol=0)
    expected = mode.loss_terms(batch, {})
    for method, is_map in ((one, True), (two, False)):
        rows = shuffles(20, method.settings, torch.Generator())
        found = method.energies(batch, rows)
        assert torch.allclose(torch.stack(found), torch.stack(expected), rtol=1e-5) == is_map


@pytest.mark.parametrize("members", [1, 3])
def test_first_weights_start_with_hes_variance(members):
    """2 / inputs, of all members together. False alarm: 4.5 standard errors twice, 1.4e-5."""
    problem = replace(
        problems.mlp(),
        network=partial(networks.mlp, 64, 3, (256,)),
        train=TensorDataset(torch.randn(2, 64), torch.zeros(2).long()),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        weight = next(MIMO(problem, Settings(ensemble_size=members)).network.parameters())
    assert weight.shape == (256, 64 * members)
    assert abs(weight.square().mean() * 64 * members / 2 - 1) < 4.5 * math.sqrt(2 / weight.numel())


# ---- the loss


def test_the_loss_sums_over_members_and_counts_weights():
    """Every column and member by hand, each with the weight of its own example; the prior counts once."""
    method, batch = method_of(problems.regression()), batch_of(problems.regression())
    batch = batch._replace(weights=torch.linspace(0, 2, 20).double())
    rows = shuffles(20, method.settings, torch.Generator().manual_seed(1))
    total = 0.0
    for column in rows.T:
        outputs = method.network(batch.inputs[column]).view(3, 1, 1, 2)
        for m, row in enumerate(column.tolist()):
            term = method.likelihood.log_prob(outputs[m], batch.targets[row][None])
            total = total - batch.weights[row] * term.squeeze() / method.settings.batch_repetitions
    nll, prior_term = method.energies(batch, rows)
    assert_close(nll, total, rtol=1e-9, atol=1e-9)
    weights = {name: p[None] for name, p in method.network.named_parameters()}
    assert_close(prior_term, -log_prob(method.prior, weights).sum())


@pytest.mark.parametrize("shift", [0.0, 0.7])
def test_the_optimum_of_a_linear_network_over_all_shuffles(shift):
    """Least squares in the moments of shuffled inputs: those of two members have those of their means alone.

    The expectation is over all 36 pairs of orders of three examples. Where the inputs have mean 0 a head
    sees its own input alone, and is the posterior's mean of one linear regression.
    """
    sigma, mean, std = 0.4, 0.2, 0.9
    x = torch.tensor([[1.0, 0.5], [-1.5, 1.0], [0.5, -1.5]]).double() + shift
    y = torch.tensor([[0.3], [-1.1], [1.4]]).double()
    problem = replace(
        problems.linear(),
        network=lambda dropout=0.0: nn.Linear(2, 1, bias=False),
        likelihood=likelihoods.Gaussian(sigma),
        prior=priors.normal(mean, std),
        train=TensorDataset(x.float(), y.float()),
        num_train=3,
    )
    method = method_of(problem, ensemble_size=2, batch_repetitions=1)
    orders = [torch.tensor(order) for order in itertools.permutations(range(3))]

    def loss(weight):
        method.network.weight.data = weight
        terms = [
            sum(method.energies(Batch(x, y), torch.stack(pair))) for pair in itertools.product(orders, orders)
        ]
        return torch.stack(terms).mean()

    weight = torch.zeros(2, 4).double()
    start = loss(weight)
    slope = torch.autograd.grad(start, method.network.weight, create_graph=True)[0]
    rows = [
        torch.autograd.grad(s, method.network.weight, retain_graph=True)[0].flatten() for s in slope.flatten()
    ]
    found = weight - torch.linalg.solve(torch.stack(rows), slope.flatten()).view(2, 4).detach()

    own, across, centre = x.T @ x, 3 * torch.outer(x.mean(0), x.mean(0)), 3 * x.mean(0) * y.mean()
    moments = torch.cat([torch.cat([own, across], 1), torch.cat([across, own], 1)])
    precision = moments / sigma**2 + torch.eye(4) / std**2
    right = torch.stack([torch.cat([x.T @ y[:, 0], centre]), torch.cat([centre, x.T @ y[:, 0]])], 1)
    expected = torch.linalg.solve(precision, right / sigma**2 + mean / std**2).T
    assert_close(found, expected, rtol=1e-6, atol=1e-9)
    alone = torch.linalg.solve(
        own / sigma**2 + torch.eye(2) / std**2, x.T @ y[:, 0] / sigma**2 + mean / std**2
    )
    assert torch.allclose(found[0, :2], alone, rtol=1e-6) == (shift == 0)


def test_orders_are_independent_and_uniform():
    """Over the 36 pairs of orders of three examples, 1,500 draws, and not of one. False alarm: 1e-5."""
    own, generator = Settings(ensemble_size=2, batch_repetitions=1), torch.Generator().manual_seed(0)
    drawn = [shuffles(3, own, generator) for _ in range(1500)]
    possible = list(itertools.product(itertools.permutations(range(3)), repeat=2))

    def p_value(pairs):
        found = collections.Counter((tuple(a.tolist()), tuple(b.tolist())) for a, b in pairs)
        return scipy.stats.chisquare([found[pair] for pair in possible]).pvalue

    assert p_value(drawn) > 1e-5
    assert p_value([(a, a) for a, _ in drawn]) < 1e-5


@pytest.mark.parametrize(("share", "alike"), [(0.0, 0), (0.5, 4), (0.3, 3), (1.0, 8)])
def test_a_share_of_inputs_is_the_same_for_all(share, alike):
    """Every example is in a member's row twice. The other columns are alike as often as by chance.

    False alarm: means over 2,000 draws at 4.5 standard errors, 7e-6 each.
    """
    own = Settings(ensemble_size=2, batch_repetitions=2, input_repetition=share)
    generator = torch.Generator().manual_seed(3)
    drawn = torch.stack([shuffles(4, own, generator) for _ in range(2000)])
    assert (drawn.sort(-1).values == torch.arange(4).repeat_interleave(2)).all()
    same = (drawn[:, 0] == drawn[:, 1]).double()
    assert (same[:, 8 - alike :] == 1).all()
    apart = same[:, : 8 - alike].mean(1)
    if free := 8 - alike:
        # Of the repeated batch both have the same place, or else the two places of one example.
        expected = 1 / free + (1 - 1 / free) / 7
        assert abs(apart.mean() - expected) < 4.5 * apart.std() / math.sqrt(len(apart))


def test_members_are_the_heads_of_one_input():
    """Each once before any is taken again, for one input repeated."""
    method, (inputs, _, _) = method_of(problems.mlp()), batch_of(problems.mlp())
    said = method.predict(inputs, 3, torch.Generator().manual_seed(1))
    with torch.no_grad():
        heads = method.network(torch.cat([inputs] * 3)).split(3, 1)
    scores = [head.log_softmax(1) for head in heads]
    order = [next(m for m in range(3) if torch.allclose(scores[m], s)) for s in said.log_probs]
    assert sorted(order) == [0, 1, 2]


# ---- refusals


class Skip(nn.Module):
    """Data that reach the end past the first layer."""

    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, inputs):
        """Class scores `[B, 3]`."""
        return self.leave(self.enter(inputs).tanh() + inputs)


class Tied(nn.Module):
    """Two layers of one weight."""

    def __init__(self):
        super().__init__()
        self.enter, self.again, self.leave = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.again.weight = self.enter.weight

    def forward(self, inputs):
        """Class scores `[B, 3]`."""
        return self.leave(self.again(self.enter(inputs)))


class Company(nn.Module):
    """Inputs that are sorted before they enter, so that none stays in its row."""

    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, inputs):
        """Class scores `[B, 3]`."""
        return self.leave(self.enter(inputs[inputs[:, 0].argsort()]).tanh())


@pytest.mark.parametrize(
    ("network", "says"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh()), "mimo needs a network whose outputs are those"),
        (Tied, "mimo needs a linear or convolutional layer that is called once"),
        (Skip, "mimo needs a network in which inputs meet in one layer"),
        (Company, "mimo needs a network in which inputs meet in one layer"),
    ],
    ids=["no last layer", "tied", "skip", "company"],
)
def test_what_cannot_take_several_inputs_is_refused(network, says):
    """In one line."""
    problem = replace(problems.mlp(), network=lambda dropout=0.0: network())
    with pytest.raises(UsageError, match=says):
        method_of(problem)
