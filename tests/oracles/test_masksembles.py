"""Masksembles against enumerated masks, members written out, and the layers of torch-uncertainty."""

import collections
import itertools
from dataclasses import replace

import pytest
import scipy.stats
import torch
from conformance import problems
from torch import nn
from torch.func import functional_call
from torch.nn import functional
from torch.testing import assert_close

from bench.contract import Batch
from bench.divergence import log_prob
from bench.errors import UsageError
from bench.methods.map import MAP
from bench.methods.map import Settings as MAPSettings
from bench.methods.masksembles import Masksembles, Settings, draw_masks, sizes


def method_of(problem, **values):
    """The method in float64, from a fixed start."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return Masksembles(problem, Settings(**values)).double()


def batch_of(problem, rows=None):
    inputs, targets = (t[:rows] for t in problem.train.tensors)
    return Batch(inputs.double(), targets.double() if targets.is_floating_point() else targets)


# ---- masks


def covers(width, ones, count, distinct):
    """All sequences of so many sets of units that together have every unit, by enumeration."""
    sets = [frozenset(s) for s in itertools.combinations(range(width), ones)]
    every = itertools.product(sets, repeat=count)
    return [s for s in every if len(frozenset().union(*s)) == width and (len({*s}) == count or not distinct)]


@pytest.mark.parametrize(("width", "count", "scale"), [(4, 3, 1.5), (5, 2, 1.5), (3, 4, 3.0)])
def test_masks_are_uniform_over_all_that_have_every_unit(width, count, scale):
    """A test of fit over the enumerated sets of masks, 1,500 draws. False alarm: 3 x 1e-5."""
    ones, _ = sizes(width, count, scale)
    possible = covers(width, ones, count, distinct=width != 3)  # four masks of three single units are alike
    generator = torch.Generator().manual_seed(0)
    found = collections.Counter(
        tuple(frozenset(mask.nonzero()[:, 0].tolist()) for mask in draw_masks(width, count, scale, generator))
        for _ in range(1500)
    )
    assert found.keys() <= {*possible}
    assert scipy.stats.chisquare([found[s] for s in possible]).pvalue > 1e-5


@pytest.mark.parametrize(
    ("width", "count", "scale", "ones"),
    [
        (64, 4, 2.0, 34),
        (512, 4, 2.0, 273),
        (100, 8, 3.0, 34),
        (16, 4, 1.0, 16),
        (1, 4, 2.0, 1),
        (2, 5, 6.0, 1),
    ],
)
def test_a_mask_has_as_many_ones_as_published(width, count, scale, ones):
    """Of c units c / (S (1 - (1 - 1/S)^N)); and every unit is in a mask."""
    masks = draw_masks(width, count, scale, torch.Generator().manual_seed(1))
    assert masks.shape == (count, width)
    assert masks.sum(1).tolist() == [ones] * count
    assert masks.any(0).all()
    assert ((masks == 0) | (masks == 1)).all()


@pytest.mark.parametrize("scale", [1.5, 2.0, 3.0])
def test_two_masks_share_the_scales_part(scale):
    """About K / S units, to 3%: of random sets of K of K S positions it is the mean. Others are seen."""
    generator = torch.Generator().manual_seed(2)
    masks = torch.stack([draw_masks(256, 4, scale, generator) for _ in range(40)])  # [40, 4, 256]
    ones = masks[0, 0].sum()
    shared = masks @ masks.mT / ones  # [40, 4, 4]
    mean = shared[:, *torch.triu_indices(4, 4, 1)].mean().item()
    assert mean == pytest.approx(1 / scale, rel=0.03)
    assert mean != pytest.approx(1 / (scale + 0.2), rel=0.03)


@pytest.mark.parametrize(
    ("width", "count", "scale"), [(10, 4, 2.0), (64, 4, 2.0), (100, 8, 3.0), (33, 3, 1.4)]
)
def test_masks_are_of_the_size_of_torch_uncertaintys(width, count, scale):
    """As many ones, masks and units as the authors' code gives, which that package holds."""
    theirs = pytest.importorskip("torch_uncertainty.layers.masksembles")
    masks = theirs.generation_wrapper(width, count, scale)
    own = draw_masks(width, count, scale, torch.Generator().manual_seed(3))
    assert masks.shape == tuple(own.shape)
    assert masks.sum(1).tolist() == own.sum(1).tolist()


# ---- the members


def explicit(method, n):
    """The weights of member n, column by column where they are masked."""
    weights = {}
    for name, p in method.network.named_parameters():
        masks = method.masks.get(name)
        columns = range(p.shape[1]) if masks is not None else ()
        kept = [p[:, i] * masks[n, i] for i in columns]
        weights[name] = torch.stack(kept, 1) if kept else p
    return weights


def test_which_weights_are_masked():
    """All that see hidden units: not the first, nor those of a grouped convolution."""
    assert list(method_of(problems.cnn()).masks) == ["5.weight", "8.weight"]
    assert list(method_of(problems.residual()).masks) == ["hidden.weight", "leave.weight"]
    grouped = lambda dropout=0.0: nn.Sequential(  # noqa: E731
        *(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 6, 3, groups=2), nn.Flatten(), nn.Linear(24, 3))
    )
    assert list(method_of(replace(problems.cnn(), network=grouped)).masks) == ["3.weight"]


@pytest.mark.parametrize("problem", [problems.mlp, problems.cnn, problems.regression, problems.residual])
def test_draws_are_the_masked_networks(problem):
    """Each member once among N draws, entry by entry; mean and variance are over them."""
    method = method_of(problem(), masks=3)
    drawn = method.sample_weights(3, torch.Generator().manual_seed(1))
    means, variances = method.moments()
    for name, w in drawn.items():
        written = torch.stack([explicit(method, n)[name] for n in range(3)])
        assert sorted(w.view(3, -1).tolist()) == sorted(written.view(3, -1).tolist())
        assert_close(means[name], written.mean(0))
        assert_close(variances[name], written.var(0, correction=0))


@pytest.mark.parametrize("problem", [problems.mlp, problems.cnn, problems.regression, problems.residual])
def test_loss_and_gradients_are_means_over_the_members(problem):
    """Over the splits of two examples between two members: the mean energy, written out; its gradients."""
    method = method_of(replace(problem(), num_train=2), masks=2)
    batch = batch_of(method.problem, 2)
    splits = {tuple(method._split(2, seed, torch.device("cpu")).tolist()): seed for seed in range(40)}
    assert splits.keys() == {(0, 1), (1, 0)}
    terms = [method.loss_terms(batch, {"seeds": torch.tensor([seed])}) for seed in splits.values()]
    loss = torch.stack([sum(pair) for pair in terms]).mean()
    nlls = [
        -method.likelihood.log_prob(
            functional_call(method.network, explicit(method, n), (batch.inputs,))[None], batch.targets
        ).sum()
        for n in range(2)
    ]
    weights = {name: p[None] for name, p in method.network.named_parameters()}
    expected = torch.stack(nlls).mean() - log_prob(method.prior, weights).sum()
    assert_close(loss, expected, rtol=1e-9, atol=1e-9)
    parameters = list(method.parameters())
    for a, b in zip(
        torch.autograd.grad(loss, parameters), torch.autograd.grad(expected, parameters), strict=True
    ):
        assert_close(a, b, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize(("rows", "count"), [(8, 4), (7, 3), (1, 4)])
def test_a_batch_is_split_evenly_and_every_example_goes_everywhere(rows, count):
    """Shares differ by one example at most; each of 600 seeds a split, each member as likely.

    False alarm: 57 shares of examples at 4.5 standard errors, 4e-4.
    """
    method = method_of(problems.mlp(), masks=count)
    splits = torch.stack([method._split(rows, seed, torch.device("cpu")) for seed in range(600)])
    shares = functional.one_hot(splits, count).sum(1)
    assert (shares.amax(1) - shares.amin(1)).max() <= 1
    often = functional.one_hot(splits, count).double().mean(0)
    assert (often - 1 / count).abs().max() < 4.5 * (1 / count * (1 - 1 / count) / 600) ** 0.5


def test_at_scale_1_it_is_map():
    """The same loss at the same weights; at scale 2 another."""
    problem = problems.mlp()
    for scale, is_map in ((1.0, True), (2.0, False)):
        method = method_of(problem, scale=scale)
        mode = MAP(problem, MAPSettings()).double()
        mode.network.load_state_dict(method.network.state_dict())
        batch = batch_of(problem)
        own = method.loss_terms(batch, method.draw_noise(1, torch.Generator()))
        assert torch.allclose(own[0], mode.loss_terms(batch, {})[0]) == is_map
        assert torch.allclose(own[1], mode.loss_terms(batch, {})[1])


def test_a_layer_is_torch_uncertaintys():
    """Its masked linear layer, given our masks and weights, for a batch in the order of the members."""
    layers = pytest.importorskip("torch_uncertainty.layers.masksembles")
    network = lambda dropout=0.0: nn.Sequential(nn.Linear(4, 12), nn.Linear(12, 3))  # noqa: E731
    method = method_of(replace(problems.mlp(), network=network))
    theirs = layers.MaskedLinear(12, 3, 4, 2.0).double()
    theirs.linear.load_state_dict(method.network[1].state_dict())
    theirs.mask.masks = nn.Parameter(method.masks["1.weight"], requires_grad=False)
    inputs = batch_of(problems.mlp(), 8).inputs
    members = torch.arange(4).repeat_interleave(2)
    assert_close(method._pass(None, method._weights(), inputs, members), theirs(method.network[0](inputs)))


class Tokens(nn.Module):
    """Linear layers whose rows are the numbers of every example, one after another."""

    def __init__(self):
        super().__init__()
        self.enter, self.middle, self.leave = nn.Linear(1, 5), nn.Linear(5, 5), nn.Linear(20, 3)

    def forward(self, inputs):
        """Class scores `[B, 3]`."""
        rows = self.middle(self.enter(inputs.reshape(-1, 1)).tanh())
        return self.leave(rows.view(len(inputs), -1))


def test_what_cannot_be_masked_is_refused():
    """A network of one layer, and one whose layers get several rows per example."""
    with pytest.raises(UsageError, match="masksembles needs a linear or convolutional layer above the first"):
        method_of(problems.linear())
    with pytest.raises(UsageError, match="masksembles needs layers that get one row per example"):
        method_of(replace(problems.mlp(), network=lambda dropout=0.0: Tokens()))
