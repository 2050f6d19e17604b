"""Curvature of weights that act outside their layer's own call, against differences of the outputs.

The truth calls the network as it is, with its parameters moved in place: neither autograd nor hooks.
"""

import copy
from dataclasses import replace

import pytest
import torch
from conformance import problems
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.data import TensorDataset

from bench import likelihoods, priors
from bench.contract import Batch, Problem
from bench.errors import UsageError
from bench.methods.fsp_laplace import FSPLaplace
from bench.methods.fsp_laplace import Settings as FSPSettings
from bench.methods.laplace import Laplace, Settings
from bench.methods.sngp import SNGP
from bench.methods.sngp import Settings as SNGPSettings
from bench.methods.subnetwork_laplace import Settings as SubnetworkSettings
from bench.methods.subnetwork_laplace import SubnetworkLaplace
from bench.methods.vbll import VBLL
from bench.methods.vbll import Settings as VBLLSettings

ROWS = 9


class Uses(nn.Module):
    """Two layers and a head; `change(self)` prepares, `then(self, hidden)` is what else happens to hidden."""

    def __init__(self, change=lambda self: None, then=lambda self, hidden: hidden):
        super().__init__()
        self.enter, self.hidden, self.leave = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)
        self.then = then
        change(self)

    def forward(self, inputs):
        """Outputs `[B, 2]`."""
        return self.leave(self.then(self, self.hidden(self.enter(inputs).tanh()).tanh()))


def tie(self):
    self.hidden.weight = self.enter.weight


def tie_whole(self):
    self.hidden.weight, self.hidden.bias = self.enter.weight, self.enter.bias


class Halves(nn.Module):
    """A parametrization."""

    def forward(self, weight):
        """Half of it."""
        return weight.tanh() / 2


class Standardised(nn.Linear):
    """Its weight is standardised in every call."""

    def forward(self, inputs):
        """Outputs of the standardised weight."""
        centred = self.weight - self.weight.mean(1, keepdim=True)
        return functional.linear(inputs, centred / centred.norm(dim=1, keepdim=True), self.bias)


def standardised(self):
    self.hidden = Standardised(3, 3)


def adds_a_use(self):
    self.enter.register_forward_hook(lambda layer, given, output: output + given[0] @ layer.weight)


class Convolutions(nn.Module):
    """Two convolutions that share a kernel, of inputs seen as one channel."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 1, (1, 3), padding=(0, 1))
        self.second = nn.Conv2d(1, 1, (1, 3), padding=(0, 1), bias=False)
        self.second.weight = self.first.weight
        self.leave = nn.Linear(3, 2)

    def forward(self, inputs):
        """Outputs `[B, 2]`."""
        return self.leave(self.second(self.first(inputs[:, None, None]).tanh()).tanh()[:, 0, 0])


class Merged(nn.Module):
    """Its first layer sees the positions of all examples as one axis."""

    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(1, 2), nn.Linear(6, 2)

    def forward(self, inputs):
        """Outputs `[B, 2]`."""
        return self.leave(self.enter(inputs.reshape(-1, 1)).tanh().reshape(len(inputs), -1))


class Attends(nn.Module):
    """Attention over the three inputs."""

    def __init__(self):
        super().__init__()
        self.enter, self.mix = nn.Linear(1, 2), nn.MultiheadAttention(2, 1, batch_first=True)
        self.leave = nn.Linear(2, 2)

    def forward(self, inputs):
        """Outputs `[B, 2]`."""
        hidden = self.enter(inputs[..., None])
        return self.leave(self.mix(hidden, hidden, hidden)[0].mean(1).tanh())


def freeze_bias(self):
    bias = self.hidden.bias.detach()
    del self.hidden.bias
    self.hidden.register_buffer("bias", bias)


def freeze_weight(self):
    weight = self.hidden.weight.detach()
    del self.hidden.weight
    self.hidden.register_buffer("weight", weight)


def prunes(self):
    prune.l1_unstructured(self.hidden, "weight", 0.4)


ODD = {
    "shared": lambda: Uses(tie),
    "shared with the bias": lambda: Uses(tie_whole),
    "tied in a Sequential": lambda: tied_sequential(),
    "transposed": lambda: Uses(then=lambda s, h: (h @ s.enter.weight).tanh()),
    "functional": lambda: Uses(then=lambda s, h: h + 0.3 * functional.linear(h, s.hidden.weight).tanh()),
    "penalised by its own size": lambda: Uses(then=lambda s, h: h * s.enter.weight.square().sum()),
    "pruned": lambda: Uses(prunes),
    "standardised": lambda: Uses(standardised),
    "weight norm": lambda: Uses(lambda s: parametrizations.weight_norm(s.hidden)),
    "weight norm by hooks": lambda: Uses(lambda s: nn.utils.weight_norm(s.hidden)),
    "parametrized": lambda: Uses(
        lambda s: parametrize.register_parametrization(s.hidden, "weight", Halves())
    ),
    "hook": lambda: Uses(adds_a_use),
    "tied convolutions": Convolutions,
    "examples and positions merged": Merged,
    "PReLU": lambda: Uses(lambda s: setattr(s, "act", nn.PReLU()), lambda s, h: s.act(h)),
    "attention": Attends,
    "frozen bias": lambda: Uses(freeze_bias),
    "frozen weight": lambda: Uses(freeze_weight),
}
PLAIN = {
    "plain": Uses,
    "unused layer": lambda: Uses(lambda s: setattr(s, "extra", nn.Linear(4, 5))),
    "called and left": lambda: Uses(then=lambda s, h: (s.hidden(h), h)[1]),
    "called twice": lambda: Uses(then=lambda s, h: s.hidden(h).tanh()),
    "called with a keyword": lambda: Uses(then=lambda s, h: s.hidden(input=h).tanh()),
    "bias of none": lambda: Uses(lambda s: setattr(s, "hidden", nn.Linear(3, 3, bias=False))),
}


def tied_sequential():
    made = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3, bias=False), nn.Tanh(), nn.Linear(3, 2))
    made[2].weight = made[0].weight
    return made


def problem_of(make):
    g = torch.Generator().manual_seed(3)
    inputs, targets = torch.randn(ROWS, 3, generator=g), torch.randn(ROWS, 2, generator=g)
    train = TensorDataset(inputs, targets)
    likelihood = likelihoods.Gaussian(0.5, 2)
    return Problem(lambda dropout=0.0: make(), likelihood, priors.normal(0, 0.8), train, None, ROWS)


def fitted(make, **values):
    """At its start, moved, in float64, with the curvature there."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        problem = problem_of(make)
        method = Laplace(problem, Settings(**values)).double()
        with torch.no_grad():
            for p in method.network.parameters():
                p += 0.2 * torch.randn_like(p)
    method.finish_fit([Batch(*(t.double() for t in problem.train.tensors))])
    return method


def true_covariance(method):
    """Of the linearised posterior, from central differences of the outputs: under sigma = 0.5 and 0.8."""
    inputs = method.problem.train.tensors[0].double()
    columns = []
    with torch.no_grad():
        for weight in method.network.parameters():
            flat = weight.view(-1)
            for i in range(len(flat)):
                before, ends = flat[i].item(), []
                for step in (1e-5, -1e-5):
                    flat[i] = before + step
                    ends.append(method.network(inputs))
                flat[i] = before
                columns.append((ends[0] - ends[1]).flatten() / 2e-5)
    jacobian = torch.stack(columns, 1)
    return jacobian.T @ jacobian / 0.25 + torch.eye(len(columns)) / 0.64


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("curvature", ["diagonal", "full"])
@pytest.mark.parametrize("name", ODD | PLAIN)
def test_curvature_counts_every_use(name, curvature):
    """Diagonal and full, whatever the layers: variances are those of the precision by differences."""
    method = fitted((ODD | PLAIN)[name], curvature=curvature)
    precision = true_covariance(method)
    variance = torch.cat([v.flatten() for v in method.moments()[1].values()])
    expected = precision.inverse().diagonal() if curvature == "full" else precision.diagonal().reciprocal()
    torch.testing.assert_close(variance, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("name", ODD)
def test_kronecker_refuses_weights_that_act_elsewhere(name):
    with pytest.raises(UsageError, match=r"^laplace: .*which .* is not; take full or diagonal$") as caught:
        Laplace(problem_of(ODD[name]), Settings(curvature="kronecker"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", PLAIN)
def test_kronecker_takes_plain_layers(name):
    """The trace over each layer's block is exact for one example and one call; here: finite, and accepted."""
    method = fitted(PLAIN[name], curvature="kronecker")
    variances = method.moments()[1]
    assert all(v.isfinite().all() for v in variances.values())
    if name == "unused layer":
        torch.testing.assert_close(variances["extra.weight"], torch.full((5, 4), 0.64).double())


class OnlyOnce(torch.autograd.Function):
    """A square without a second derivative."""

    @staticmethod
    def forward(ctx, inputs):
        """Squares."""
        ctx.save_for_backward(inputs)
        return inputs.square()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        """Twice the inputs."""
        return 2 * ctx.saved_tensors[0] * gradient


def test_a_network_that_cannot_be_linearised_is_refused_before_training():
    """Autograd leaves such an operation out of second derivatives, without an error."""
    problem = problem_of(lambda: Uses(then=lambda s, h: OnlyOnce.apply(h)))
    with pytest.raises(UsageError, match=r"^laplace: the network lacks a derivative.*predictive network$"):
        Laplace(problem, Settings())
    Laplace(problem, Settings(predictive="network"))


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("fsp_laplace", lambda problem: FSPLaplace(problem, FSPSettings())),
        ("subnetwork_laplace", lambda problem: SubnetworkLaplace(problem, SubnetworkSettings())),
    ],
)
def test_methods_that_only_linearise_refuse_it_too(name, made):
    """The control is the same network with torch's own square."""
    with pytest.raises(UsageError, match=f"^{name}: the network lacks a derivative.*no second one") as caught:
        made(problem_of(lambda: Uses(then=lambda s, h: OnlyOnce.apply(h))))
    assert "\n" not in str(caught.value)
    made(problem_of(lambda: Uses(then=lambda s, h: h.square())))


# ---- the last layer


def tied_head(self):
    self.leave = nn.Linear(3, 3)
    self.leave.weight = self.enter.weight


def frozen_head(key):
    def change(self):
        value = getattr(self.leave, key).detach()
        delattr(self.leave, key)
        self.leave.register_buffer(key, value)

    return change


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize(
    "change",
    [
        tied_head,
        frozen_head("weight"),
        frozen_head("bias"),
        lambda s: nn.utils.weight_norm(s.leave),
        lambda s: parametrizations.weight_norm(s.leave),
        lambda s: prune.l1_unstructured(s.leave, "weight", 0.4),
    ],
)
def test_vbll_refuses_a_last_layer_whose_weights_are_not_its_own(change):
    with pytest.raises(
        UsageError, match=r"^vbll: needs a network whose outputs are those of one linear"
    ) as e:
        VBLL(problem_of(lambda: Uses(change)), VBLLSettings())
    assert "\n" not in str(e.value)


# ---- the norm bound of sngp

UNBOUNDED = {
    name: ODD[name]
    for name in (
        "shared",
        "transposed",
        "functional",
        "pruned",
        "standardised",
        "weight norm",
        "weight norm by hooks",
        "parametrized",
        "hook",
        "attention",
    )
}


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("name", UNBOUNDED)
def test_sngp_refuses_a_norm_that_it_cannot_bound(name):
    with pytest.raises(UsageError, match=r"^sngp: .*cannot be bounded") as caught:
        SNGP(problem_of(UNBOUNDED[name]), SNGPSettings(features=8))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", sorted([*PLAIN.keys() - {"unused layer"}, "frozen bias", "frozen weight"]))
def test_sngp_bounds_every_weight_that_it_trains(name):
    """By the largest singular value of the matrices; a frozen weight stays as it is."""
    make = lambda: (ODD | PLAIN)[name]()  # noqa: E731
    torch.manual_seed(0)
    method = SNGP(problem_of(make), SNGPSettings(features=8, norm_bound=0.3))
    trained = dict(method.network.named_parameters())
    bounded = [n for n in ("enter.weight", "hidden.weight") if n in trained]
    assert bounded
    for n in bounded:
        assert torch.linalg.matrix_norm(trained[n], 2) <= 0.3 + 1e-4
    if name == "frozen weight":
        assert torch.linalg.matrix_norm(method.network.hidden.weight, 2) > 0.35


def test_problems_of_the_laws_are_as_plain_as_they_were():
    """Their layers are still taken by the fast way."""
    for name in ("mlp", "cnn", "regression"):
        made = Laplace(replace(problems.PROBLEMS[name]()), Settings())
        assert made.layers is not None
        copy.deepcopy(made.network)
