"""SNGP: features against their kernel, the head against closed forms, the bound against singular values."""

import math
from dataclasses import replace

import pytest
import torch
from conformance import problems
from torch import nn
from torch.nn import functional
from torch.testing import assert_close
from torch.utils.data import TensorDataset

from bench import likelihoods, networks, priors, resnet
from bench.batches import batches
from bench.contract import JOINT, Batch, Budget, Problem
from bench.engine.engine import Engine, TrainerOptions
from bench.errors import UsageError
from bench.laws.cases import assert_mean_is
from bench.methods.sngp import SNGP, Head, Settings, _power_iterations


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def method_of(problem, **values):
    """The method in float64, beta off its start; its weights are from a fixed seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        method = SNGP(problem, Settings(**values)).double()
        nn.init.normal_(method.head.weight)
    return method


def in_double(problem):
    inputs, targets = problem.train.tensors
    return Batch(inputs.double(), targets.double() if targets.is_floating_point() else targets)


def finish(method, batch, rows=7):
    """The work after training, in batches of so many examples."""
    present = [part for part in batch if part is not None]
    method.finish_fit(batches(TensorDataset(*present), rows, seed=0))
    return method


# ---- the features


@pytest.mark.parametrize("length_scale", [0.8, 2.5])
def test_features_approach_the_kernel_at_the_monte_carlo_rate(length_scale):
    """Over heads of D features the error has mean 0 and variance (1 + k^4 / 2 - k^2) / D, at two D.

    With d the difference and s the sum of two inputs a feature's term is cos(w d) + cos(2 b - w s), of mean k
    and mean square (1 + k^4) / 2 + 1 / 2. False alarm: 2 D x 6 pairs x 2 moments x 7e-6 = 2e-4.
    """
    x = torch.tensor([[0.0, 0.0, 0.0], [0.5, -0.2, 0.1], [1.0, 1.0, -0.5], [-2.0, 1.5, 0.0]]).double()
    first, second = torch.triu_indices(4, 4, 1)
    k = (-(x[first] - x[second]).square().sum(1) / (2 * length_scale**2)).exp()
    heads = 1500
    for size in (20, 80):
        own = Settings(features=heads * size, length_scale=length_scale, amplitude=1.0)
        head = Head(3, 1, own, generator(size)).double()
        phi = math.sqrt(heads) * head.features(x).unflatten(1, (heads, size))  # [4, R, D]
        found = (phi[first] * phi[second]).sum(2).T  # [R, pairs]
        assert_mean_is(found, k)
        assert_mean_is((found - k).square() * size, 1 + k**4 / 2 - k**2)


# ---- the head

SIGMA = 0.4


def regression(rows=60):
    """Two outputs from vectors of 3 by a network that is its last layer: the inputs are the hidden units."""
    g = generator(1)
    inputs = torch.randn(rows, 3, generator=g)
    targets = torch.stack([inputs[:, 0].sin(), inputs[:, 1] * inputs[:, 2]], 1)
    targets = targets + SIGMA * torch.randn(rows, 2, generator=g)
    data = TensorDataset(inputs, targets)
    network = lambda dropout=0.0: nn.Linear(3, 2)  # noqa: E731
    return Problem(network, likelihoods.Gaussian(SIGMA), priors.normal(0.1, 0.8), data, None, rows)


def test_a_small_noise_leaves_the_covariance_a_covariance():
    """Of one input with a noise of 0.001, in float32: directions without data keep the variance of the prior.

    A Gram matrix in float32 has negative eigenvalues of 1e-7 of its largest, a million here.
    """
    g = generator(2)
    inputs = torch.rand(12, 1, generator=g) * 2 - 1
    data = TensorDataset(inputs, inputs.sin())
    problem = Problem(
        lambda dropout=0.0: nn.Linear(1, 1), likelihoods.Gaussian(0.001), priors.normal(0, 10), data, None, 12
    )
    method = SNGP(problem, Settings(features=64))
    finish(method, Batch(*data.tensors), rows=5)
    phi = method.head.features(inputs).double().detach()
    expected = torch.linalg.inv(torch.eye(64).double() + phi.T @ phi / 0.001**2)
    assert_close(method.covariance()[0].double(), expected, rtol=0, atol=1e-4)


def test_the_head_is_exact_bayesian_linear_regression():
    """On fixed features: mean at the loss's minimum, covariance, and moments of the predictions.

    False alarm: 2 moments x 10 x 7e-6 = 1e-4.
    """
    method, batch = method_of(regression(), features=40, length_scale=1.3), in_double(regression())
    kind = {"max_iter": 300, "line_search_fn": "strong_wolfe", "tolerance_grad": 1e-10}
    kind |= {"tolerance_change": 1e-15, "history_size": 50}
    optimizer = torch.optim.LBFGS(method.network.parameters(), **kind)

    def closure():
        optimizer.zero_grad()
        loss = sum(method.loss_terms(batch, {}))
        loss.backward()
        return loss

    optimizer.step(closure)
    finish(method, batch)
    phi = method.head.features(batch.inputs)
    precision = torch.eye(40).double() + phi.T @ phi / SIGMA**2
    expected = torch.linalg.solve(precision, phi.T @ batch.targets / SIGMA**2).T
    assert_close(method.head.weight.detach(), expected, rtol=1e-5, atol=1e-6)
    covariance = torch.linalg.inv(precision)
    assert_close(method.covariance(), torch.stack([covariance, covariance]), rtol=1e-5, atol=1e-8)
    inputs = 2 * torch.randn(5, 3, generator=generator(2)).double()
    means = method.predict(inputs, 4000, generator(3)).mean  # [S, 5, 2]
    at = method.head.features(inputs)
    assert_mean_is(means, at @ expected.T)
    variance = torch.einsum("bi,ij,bj->b", at, covariance, at)[:, None].expand(-1, 2)
    assert_mean_is((means - at @ expected.T).square(), variance)


@pytest.mark.parametrize("problem", [problems.mlp, problems.cnn, problems.regression])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_the_covariance_is_that_of_the_curvature(problem, is_weighted):
    """Of every output the inverse of its block of the Hessian of the negative log joint, by autograd."""
    problem = problem()
    method, batch = method_of(problem, features=9, length_scale=1.3), in_double(problem)
    if is_weighted:
        batch = batch._replace(weights=torch.arange(len(batch.inputs)).double() % 3)
    finish(method, batch)
    phi = method._features(batch.inputs)

    def loss(beta):
        nll = -method.likelihood.log_prob((phi @ beta.T)[None], batch.targets)
        weights = 1 if batch.weights is None else batch.weights
        return (nll * weights).sum() + 0.5 * beta.square().sum()

    hessian = torch.autograd.functional.hessian(loss, method.head.weight.detach())  # [K, D, K, D]
    for k, found in enumerate(method.covariance()):
        assert_close(found, torch.linalg.inv(hessian[k, :, k]), rtol=1e-6, atol=1e-8)


def test_the_covariance_of_classes_by_hand():
    """I + the sum of p (1 - p) phi phi^T, class by class, example by example."""
    problem = problems.mlp()
    method, batch = method_of(problem, features=5), in_double(problem)
    finish(method, batch)
    phi = method._features(batch.inputs)
    probabilities = method.network(batch.inputs).softmax(1).detach()
    for k in range(3):
        precision = torch.eye(5).double()
        for p, row in zip(probabilities[:, k], phi, strict=True):
            precision += p * (1 - p) * torch.outer(row, row)
        assert_close(method.covariance()[k], torch.linalg.inv(precision), rtol=1e-6, atol=1e-9)


def test_variance_far_from_the_data_is_the_prior_s():
    """Near the data a tenth of it and less, far away nearly all; the posed linear layer never gives it back.

    In directions of the data's span the ratio for a linear layer is the same however far the input is.
    """
    rows = 200
    inputs = 0.3 * torch.randn(rows, 3, generator=generator(4))
    problem = regression()
    problem = replace(problem, train=TensorDataset(inputs, inputs[:, :2]), num_train=rows)
    method, batch = method_of(problem, features=1024, length_scale=1.0, amplitude=1.5), in_double(problem)
    finish(method, batch)
    directions = functional.normalize(torch.randn(100, 3, generator=generator(5)).double())

    def ratio(phi, covariance):
        return torch.einsum("bi,ij,bj->b", phi, covariance, phi) / phi.square().sum(1)

    linear = torch.linalg.inv(torch.eye(3).double() + batch.inputs.T @ batch.inputs / SIGMA**2)
    near, far = 0.1 * directions, 50 * directions
    covariance = method.covariance()[0]
    assert ratio(method.head.features(near), covariance).max() < 0.1
    assert ratio(method.head.features(far), covariance).min() > 0.9
    assert ratio(far, linear).max() < 0.1  # negative control
    assert_close(ratio(far, linear), ratio(near, linear))
    spread = method.predict(far, 500, generator(6)).mean.var(0).mean()
    assert spread == pytest.approx(1.5**2, rel=0.1)  # of 200 outputs with 500 draws each


# ---- the bound


def matrix_of(layer, shape):
    """The layer without its bias as a matrix, column by column."""
    basis = torch.eye(math.prod(shape), dtype=layer.weight.dtype).view(-1, *shape)
    with torch.no_grad():
        return (layer(basis) - layer(torch.zeros_like(basis))).flatten(1).T


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(7, 4), (7,)),
        (nn.Conv2d(2, 3, 3, padding=1), (2, 6, 5)),
        (nn.Conv2d(2, 3, 3, stride=2, bias=False), (2, 7, 6)),
        (nn.Conv2d(4, 4, 3, groups=2, dilation=2, padding=2), (4, 6, 6)),
    ],
)
def test_power_iterations_find_the_largest_singular_value(layer, shape):
    """Of the layer as a map of one input, from below; a kernel's own singular value is another number."""
    layer = layer.double()
    source = generator(2)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, generator=source)
    start = functional.normalize(torch.randn(math.prod(shape), generator=generator(1)).double(), dim=0)
    expected = torch.linalg.matrix_norm(matrix_of(layer, shape), 2)
    few, direction = _power_iterations(layer, start.view(shape), 2)
    found, _ = _power_iterations(layer, direction, 3000)
    assert few < expected
    assert_close(found, expected, rtol=1e-6, atol=0)
    if isinstance(layer, nn.Conv2d):
        kernel = torch.linalg.matrix_norm(layer.weight.flatten(1), 2)
        assert (found / kernel - 1).abs() > 0.05


@pytest.mark.parametrize(
    ("problem", "shapes"),
    [(problems.mlp, [(4,), (6,)]), (problems.cnn, [(1, 6, 6), (12,)])],
)
def test_trained_layers_keep_the_bound(problem, shapes):
    """Within 1% by singular values of the whole matrices, and the record's number is the largest of them.

    With steps so large that one power iteration each falls 3% behind in the convolution.
    """

    def trained(bound):
        settings = Settings(features=32, norm_bound=bound, learning_rate=0.02, length_scale=1.0)
        engine = Engine(SNGP, settings, 0, trainer=TrainerOptions(accelerator="cpu"))
        method = engine.fit(problem(), Budget(epochs=40, batch_size=8))
        layers = [layer for layer, _ in method._directions()]
        pairs = zip(layers, shapes, strict=True)
        return method, [torch.linalg.matrix_norm(matrix_of(*pair), 2).item() for pair in pairs]

    method, norms = trained(0.7)
    assert max(norms) <= 0.7 * 1.01
    assert max(norms) == pytest.approx(method.diagnostics()["largest_norm"], rel=1e-4)
    free = trained(100.0)[1]
    assert min(free) > 0.9  # negative control: without the bound
    assert max(free) < 50  # and no layer is scaled up to one that is far


def test_a_layer_of_zeros_is_left_alone():
    layer = nn.Linear(3, 2).double()
    nn.init.zeros_(layer.weight)
    start = torch.tensor([0.6, 0.8, 0.0]).double()
    norm, direction = _power_iterations(layer, start, 3)
    assert norm == 0
    assert torch.equal(direction, start)


# ---- what stands in place of what


@pytest.mark.parametrize(
    "network",
    [
        problems.small_cnn,
        lambda dropout=0.0: problems.Residual(dropout),
        lambda dropout=0.0: resnet.preresnet_frn(8, 3, 2, dropout, inputs=1),
    ],
)
def test_the_last_layer_alone_is_replaced(network):
    """Every other parameter has its name and shape; the head has one, and fixed features beside it."""
    problem = problems.mlp() if network().__class__ is problems.Residual else problems.cnn()
    problem = replace(problem, network=network)
    posed = {name: p.shape for name, p in network().named_parameters()}
    method = method_of(problem, features=11)
    own = {name: p.shape for name, p in method.network.named_parameters()}
    gone = {n for n in posed if n not in own or own[n] != posed[n]}
    assert gone == {f"{method.head_name}.weight", f"{method.head_name}.bias"}
    assert own[f"{method.head_name}.weight"] == (3, 11)
    assert own.keys() <= posed.keys()
    kept = {name for name in method.state_dict() if name.startswith(f"network.{method.head_name}")}
    assert {name.rpartition(".")[2] for name in kept} == {"weight", "directions", "phases"}
    inputs = in_double(problem).inputs[:4]
    before = method.predict(inputs, 2, generator()).log_probs  # a point mass
    assert_close(before, method.network(inputs).log_softmax(1).detach().expand(2, -1, -1))


def test_the_prior_of_the_head_is_standard_normal():
    """And the task's own of all others."""
    method = method_of(problems.mlp(), features=6)
    prior_term = method.loss_terms(in_double(problems.mlp()), {})[1].item()
    expected = 0.0
    for name, p in method.network.named_parameters():
        mean, std = (0.0, 1.0) if name == f"{method.head_name}.weight" else (0.1, 0.8)
        squares = ((p.detach() - mean) / std).square().sum().item()
        expected += 0.5 * squares + p.numel() * (math.log(std) + 0.5 * math.log(2 * math.pi))
    assert prior_term == pytest.approx(expected, rel=1e-6)


class Doubles(nn.Sequential):
    """Outputs are not those of its last layer."""

    def forward(self, inputs):
        """Twice those."""
        return 2 * super().forward(inputs)


@pytest.mark.parametrize(
    ("values", "settings", "reason"),
    [
        ({"network": lambda dropout=0.0: nn.Sequential(nn.Linear(4, 3), nn.Tanh())}, {}, "outputs are those"),
        ({"network": lambda dropout=0.0: Doubles(nn.Linear(4, 3))}, {}, "outputs are those of a linear"),
        (
            {"network": lambda dropout=0.0: nn.Sequential(networks.Dropout(0.0), nn.PReLU())},
            {},
            "linear layer",
        ),
        ({"prior": lambda p: {JOINT: priors.normal_tensor(torch.zeros(1), torch.ones(1))}}, {}, "couples"),
        ({}, {"features": 20_000}, "lower --method.features"),
    ],
)
def test_refusals(values, settings, reason):
    with pytest.raises(UsageError, match=f"^sngp.*{reason}") as error:
        SNGP(replace(problems.mlp(), **values), Settings(**settings))
    assert "\n" not in str(error.value)
