"""Packed-Ensembles against grouped convolutions, energies written out, MAP, and torch-uncertainty."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from conformance import problems
from oracles.doubles import batch_of, off_start
from torch import nn
from torch.func import functional_call
from torch.nn import functional
from torch.testing import assert_close

from bench import networks, resnet
from bench.contract import Batch
from bench.divergence import log_prob
from bench.errors import UsageError
from bench.methods.map import MAP
from bench.methods.map import Settings as MAPSettings
from bench.methods.packed import Packed, Settings, narrowed


def method_of(problem, **values):
    """The method in float64, off its start."""
    return off_start(Packed, problem, Settings(**values))


def wide(dropout=0.0):
    """Two hidden layers of 8 and 16 units."""
    return networks.mlp(4, 3, (8, 16))


def outputs_of(method, inputs):
    """Of every member, `[M, B, K]`."""
    members = [{n: w[m] for n, w in method._weights().items()} for m in range(method.settings.ensemble_size)]
    return torch.stack([functional_call(method.network, member, (inputs,)) for member in members])


def test_members_are_grouped_convolutions_side_by_side():
    """A layer of all members is a 1x1 convolution of M groups, the first of one; the last has M K outputs."""
    method = method_of(replace(problems.mlp(), network=wide))
    inputs = batch_of(problems.mlp()).inputs
    w1, b1, w2, b2, w3, b3 = (w.flatten(0, 1) for w in method.stacked)
    hidden = functional.conv1d(inputs[..., None], w1[..., None], b1).relu()  # [B, 16, 1]
    assert hidden.shape[1] == 2 * 8
    hidden = functional.conv1d(hidden, w2[..., None], b2, groups=4).relu()
    said = functional.conv1d(hidden, w3[..., None], b3, groups=4)
    assert_close(said[..., 0].unflatten(1, (4, 3)).transpose(0, 1), outputs_of(method, inputs))


def test_members_are_torch_uncertaintys_layers():
    """Its packed linear layers of alpha 2, given our weights; and as many parameters."""
    layers = pytest.importorskip("torch_uncertainty.layers.packed")
    method = method_of(replace(problems.mlp(), network=wide))
    kind = {"alpha": 2, "num_estimators": 4}
    theirs = nn.Sequential(
        *(layers.PackedLinear(4, 8, first=True, **kind), nn.ReLU(), layers.PackedLinear(8, 16, **kind)),
        *(nn.ReLU(), layers.PackedLinear(16, 3, last=True, **kind)),
    ).double()
    assert sum(p.numel() for p in theirs.parameters()) == sum(w.numel() for w in method.stacked)
    for given, own in zip(theirs.parameters(), method.stacked, strict=True):
        given.data = own.detach().reshape(given.shape)
    inputs = batch_of(problems.mlp()).inputs
    assert_close(theirs(inputs).unflatten(0, (4, -1)), outputs_of(method, inputs))


@pytest.mark.parametrize("problem", [problems.mlp, problems.cnn, problems.regression, problems.residual])
def test_loss_is_the_mean_of_the_members(problem):
    """Energies on the whole batch, each under the task's prior on its own weights."""
    problem = problem()
    method, batch = method_of(problem, ensemble_size=3), batch_of(problem)
    nll, prior_term = method.loss_terms(batch, {})
    outputs = outputs_of(method, batch.inputs)
    nlls = [-method.likelihood.log_prob(o[None], batch.targets).sum() for o in outputs]
    assert_close(nll, torch.stack(nlls).mean(), rtol=1e-9, atol=1e-9)
    log_priors = [
        log_prob(method.prior, {n: w[m : m + 1] for n, w in method._weights().items()}) for m in range(3)
    ]
    assert_close(prior_term, -torch.stack(log_priors).mean(), rtol=1e-9, atol=1e-9)
    said = method.predict(batch.inputs, 3, torch.Generator()).average()
    order = method.predict(batch.inputs, 6, torch.Generator()).average()
    assert_close(said, order, rtol=1e-6, atol=1e-9)  # each member twice


def test_one_member_of_the_whole_width_is_map():
    """The same weights from the same start, and the same loss; half as wide it is another."""
    problem = problems.cnn()
    batch = Batch(*problem.train.tensors)
    losses = []
    for cls, chosen in (
        (MAP, MAPSettings()),
        *((Packed, Settings(ensemble_size=1, alpha=alpha)) for alpha in (1.0, 0.5)),
    ):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            losses.append(sum(cls(problem, chosen).loss_terms(batch, {})).item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert losses[2] != pytest.approx(losses[0], rel=1e-2)


@pytest.mark.parametrize(
    ("network", "shape"),
    [
        (partial(networks.mlp, 64, 10, (256, 256)), (64,)),
        (networks.lenet, (1, 28, 28)),
        (partial(networks.small_cnn, channels=32), (1, 8, 8)),
    ],
    ids=["mlp", "lenet", "cnn"],
)
def test_narrow_weights_start_with_hes_variance(network, shape):
    """2 / inputs of every hidden matrix, as of the whole network; its inputs are those of fewer units.

    False alarm: variances of at most five matrices at 4.5 standard errors, 4e-5.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        narrow = narrowed(network(), 0.5, torch.rand(1, *shape))
        whole = network()
    assert narrow(torch.rand(2, *shape)).shape == (2, 10)
    matrices = [m for m in narrow.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    before = [m for m in whole.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    for place, (layer, old) in enumerate(zip(matrices, before, strict=True)):
        size = layer.weight.numel()
        variance = layer.weight.square().mean() * layer.weight[0].numel() / 2
        assert abs(variance - 1) < 4.5 * math.sqrt(2 / size)
        assert layer.weight.shape[0] == old.weight.shape[0] // (1 if layer is matrices[-1] else 2)
        assert layer.weight.shape[1] == old.weight.shape[1] // (2 if place else 1)


def test_a_residual_network_with_a_norm_of_filters_is_narrowed():
    """Its gains, biases and thresholds have a number per map, and shortcuts lose the same maps."""
    network = partial(resnet.preresnet_frn, 8, 3, 8, inputs=1)
    narrow = narrowed(network(), 0.5, torch.rand(1, 1, 6, 6))
    smaller = resnet.preresnet_frn(8, 3, 4, inputs=1)
    assert [p.shape for p in narrow.parameters()] == [p.shape for p in smaller.parameters()]


class Tied(nn.Module):
    """Two layers of one weight."""

    def __init__(self):
        super().__init__()
        self.enter, self.again, self.leave = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.again.weight = self.enter.weight

    def forward(self, inputs):
        """Class scores `[B, 3]`."""
        return self.leave(self.again(self.enter(inputs)))


@pytest.mark.parametrize(
    ("network", "says"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh()), "packed needs a network whose outputs are those"),
        (Tied, "packed needs a network in which no two layers share a weight"),
        (
            lambda: nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)),
            "packed needs layers that also run with fewer units",
        ),
    ],
    ids=["no last layer", "tied", "layer norm"],
)
def test_what_cannot_be_narrowed_is_refused(network, says):
    """In one line; so are members wider than the network."""
    problem = replace(problems.mlp(), network=lambda dropout=0.0: network())
    with pytest.raises(UsageError, match=says):
        method_of(problem)
    with pytest.raises(UsageError, match=r"lower --method.alpha"):
        method_of(problems.mlp(), ensemble_size=2, alpha=3.0)
