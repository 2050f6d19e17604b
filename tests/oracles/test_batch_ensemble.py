"""BatchEnsemble against MAP, against the members as networks of their own, and against (x o s) W o r."""

import itertools
from dataclasses import replace

import pytest
import torch
from conformance import problems
from oracles.doubles import batch_of, off_start
from torch import nn
from torch.func import functional_call
from torch.nn import functional
from torch.testing import assert_close

from bench import priors, resnet
from bench.contract import JOINT, Batch, Budget
from bench.divergence import log_prob
from bench.engine.engine import Engine, TrainerOptions
from bench.methods.batch_ensemble import BatchEnsemble, Settings
from bench.methods.map import MAP
from bench.methods.map import Settings as MAPSettings
from bench.weights import forward


def method_of(problem, **values):
    """The method in float64, off its start."""
    return off_start(BatchEnsemble, problem, Settings(**values))


def factors(method):
    """Name of every shared weight -> its W, and r and s of each member as plain vectors."""
    of = dict(method.network.named_parameters())
    names = [name for name in of if name in method.names]
    return {
        name: (of[name], r.flatten(1), s.flatten(1))
        for name, r, s in zip(names, method.r, method.s, strict=True)
    }


def explicit(method, m):
    """The weights of member m, written out entry by entry where they are shared."""
    shared, own = factors(method), iter(method.own)
    weights = {}
    for name, p in method.network.named_parameters():
        if name in shared:
            w, r, s = shared[name]
            weights[name] = torch.stack(
                [torch.stack([w[o, i] * r[m, o] * s[m, i] for i in range(w.shape[1])]) for o in range(len(w))]
            )
        else:
            weights[name] = next(own)[m]
        assert weights[name].shape == p.shape
    return weights


def negative_log_joint(method, m, batch, shared):
    """Energy of member m on all examples; the prior is at W, not at the member's product."""
    weights = explicit(method, m)
    outputs = functional_call(method.network, weights, (batch.inputs,))[None]
    at = {name: shared.get(name, w)[None] for name, w in weights.items()}
    return -method.likelihood.log_prob(outputs, batch.targets).sum() - log_prob(method.prior, at).sum()


# ---- one member


class FixedAtOne(BatchEnsemble):
    """Its r and s are 1 and stay there."""

    def __init__(self, problem, settings, start=None):
        super().__init__(problem, settings, start)
        for fast in (*self.r, *self.s):
            nn.init.ones_(fast.requires_grad_(False))


class FixedAtTwo(FixedAtOne):
    """Its r are 2: another network."""

    def __init__(self, problem, settings, start=None):
        super().__init__(problem, settings, start)
        for fast in self.r:
            nn.init.constant_(fast, 2.0)


def fit(cls, settings, problem):
    engine = Engine(cls, settings, 0, trainer=TrainerOptions(accelerator="cpu"))
    return engine.fit(problem, Budget(epochs=5, batch_size=8))


@pytest.mark.parametrize("problem", [problems.mlp, problems.cnn, problems.regression])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_one_member_without_fast_weights_is_map(problem, optimizer):
    """The same trajectory from the same start: losses of every epoch, weights, learned noise, to 1e-6."""
    kind = {"learning_rate": 0.01, "optimizer": optimizer}
    one = fit(FixedAtOne, Settings(ensemble_size=1, **kind), problem := problem())
    mode = fit(MAP, MAPSettings(**kind), problem)
    assert [row["loss"] for row in one.history] == pytest.approx([r["loss"] for r in mode.history], rel=1e-6)
    weights = one.sample_weights(1, torch.Generator())
    for name, w in mode.network.named_parameters():
        assert_close(weights[name][0], w.detach(), rtol=1e-6, atol=1e-6)
    for a, b in zip(one.likelihood.parameters(), mode.likelihood.parameters(), strict=True):
        assert_close(a, b, rtol=1e-6, atol=1e-6)
    two = fit(FixedAtTwo, Settings(ensemble_size=1, **kind), problem)
    assert two.history[0]["loss"] != pytest.approx(mode.history[0]["loss"], rel=1e-2)  # negative control


# ---- the loss


def members_of(method, rows, seed):
    """To which member every one of so many examples goes: read off outputs that are the member's number."""
    numbers = torch.arange(method.settings.ensemble_size)
    return method._split_outputs(
        lambda given: numbers[:, None].expand(given.shape[:2]), torch.zeros(rows, 1), seed
    )


@pytest.mark.parametrize(("rows", "size"), [(8, 4), (7, 3), (1, 4), (2, 3)])
def test_a_batch_is_split_evenly_and_every_example_goes_everywhere(rows, size):
    """Shares differ by one example at most; each of 600 seeds a split, each member as likely.

    False alarm: 24 shares of examples at 4.5 standard errors, 24 x 7e-6 = 2e-4.
    """
    method = method_of(problems.mlp(), ensemble_size=size)
    splits = torch.stack([members_of(method, rows, seed) for seed in range(600)])
    shares = functional.one_hot(splits, size).sum(1)
    assert (shares.amax(1) - shares.amin(1)).max() <= 1
    often = functional.one_hot(splits, size).double().mean(0)  # [rows, size]
    error = (1 / size * (1 - 1 / size) / 600) ** 0.5
    assert (often - 1 / size).abs().max() < 4.5 * error


@pytest.mark.parametrize(("rows", "size"), [(8, 4), (7, 3), (1, 4)])
def test_every_output_stands_with_its_example(rows, size):
    """Members that hand on what they get give the batch back, whatever the split."""
    method = method_of(problems.mlp(), ensemble_size=size)
    inputs = torch.arange(rows)[:, None]
    for seed in range(10):
        assert_close(method._split_outputs(lambda given: given, inputs, seed), inputs)


@pytest.mark.parametrize("problem", [problems.mlp, problems.cnn, problems.regression, problems.residual])
def test_loss_and_gradients_are_means_over_the_members(problem):
    """Over the splits of two examples between two members: the mean energy, written out, and its gradients.

    The gradient of W is the mean of r s^T times the gradients of the members' own weights.
    """
    problem = problem()
    batch = Batch(*(t[:2] for t in batch_of(problem)[:2]))
    method = method_of(problem, ensemble_size=2)
    method.problem = replace(problem, num_train=2)
    splits = {}
    for seed in range(40):
        splits.setdefault(tuple(members_of(method, 2, seed).tolist()), seed)
    assert splits.keys() == {(0, 1), (1, 0)}
    terms = [method.loss_terms(batch, {"seeds": torch.tensor([seed])}) for seed in splits.values()]
    loss = torch.stack([sum(pair) for pair in terms]).mean()
    shared = {name: w for name, (w, _, _) in factors(method).items()}
    expected = torch.stack([negative_log_joint(method, m, batch, shared) for m in range(2)]).mean()
    assert_close(loss, expected, rtol=1e-9, atol=1e-9)
    trained = [p for p in method.parameters() if p.requires_grad]
    kind = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    for a, b in zip(
        torch.autograd.grad(loss, trained, **kind),
        torch.autograd.grad(expected, trained, **kind),
        strict=True,
    ):
        assert_close(a, b, rtol=1e-8, atol=1e-9)
    slopes = []
    for m in range(2):
        weights = {name: w.detach().requires_grad_() for name, w in explicit(method, m).items()}
        outputs = functional_call(method.network, weights, (batch.inputs,))[None]
        nll = -method.likelihood.log_prob(outputs, batch.targets).sum()
        slopes.append(dict(zip(weights, torch.autograd.grad(nll, list(weights.values())), strict=True)))
    nll = torch.stack([pair[0] for pair in terms]).mean()
    for name, (w, r, s) in factors(method).items():
        (found,) = torch.autograd.grad(nll, w, retain_graph=True)
        ones = [1] * (w.ndim - 2)
        by_member = [torch.outer(r[m], s[m]).view(*w.shape[:2], *ones) * slopes[m][name] for m in range(2)]
        assert_close(found, torch.stack(by_member).mean(0), rtol=1e-8, atol=1e-9)


def test_the_prior_is_on_w_and_on_the_members_own():
    """Not on r and s, nor on their products; a prior over all weights at once is the mean over members."""
    problem = problems.cnn()
    method = method_of(problem, ensemble_size=3)
    batch, noise = batch_of(problem), {"seeds": torch.tensor([0])}
    before = method.loss_terms(batch, noise)[1]
    with torch.no_grad():
        for fast in (*method.r, *method.s):
            fast *= 3
    assert_close(method.loss_terms(batch, noise)[1], before, rtol=0, atol=0)
    squares = sum(((w - 0.1) / 0.8).square().sum() for w, _, _ in factors(method).values())
    squares = squares + sum(((w - 0.1) / 0.8).square().sum() for w in method.own) / 3
    size = sum(p.numel() for p in method.network.parameters())
    constant = size * (torch.tensor(0.8).log() + 0.5 * torch.tensor(2 * torch.pi).log())
    assert_close(before.item(), (0.5 * squares + constant).item(), rtol=1e-6, atol=0)


# ---- the members


@pytest.mark.parametrize(("groups", "is_shared"), [(1, True), (2, False)])
def test_which_weights_are_shared(groups, is_shared):
    """Those of a grouped convolution are not: its inputs meet some outputs alone."""
    network = lambda dropout=0.0: nn.Sequential(nn.Conv2d(4, 6, 3, groups=groups), nn.Flatten())  # noqa: E731
    problem = replace(problems.cnn(), network=network)
    method = method_of(problem, ensemble_size=3)
    assert method.names == (["0.weight"] if is_shared else [])
    assert [p.shape[0] for p in method.own] == [3] * (1 if is_shared else 2)


def test_layer_identities():
    """(x o s) W o r is the layer under W o r s^T: linear, and convolutions with stride, padding, dilation."""
    g = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    x, w, r, s = draw(5, 4), draw(3, 4), draw(3), draw(4)
    assert_close(functional.linear(x * s, w) * r, functional.linear(x, w * torch.outer(r, s)))
    x, w = draw(5, 4, 9, 8), draw(3, 4, 3, 2)
    for stride, padding, dilation in itertools.product((1, 2), (0, 1), (1, 2)):
        how = {"stride": stride, "padding": padding, "dilation": dilation}
        fast = functional.conv2d(x * s[:, None, None], w, **how) * r[:, None, None]
        slow = functional.conv2d(x, w * torch.outer(r, s)[..., None, None], **how)
        assert_close(fast, slow)
        swapped = functional.conv2d(x, w * torch.outer(r.roll(1), s)[..., None, None], **how)
        assert (fast - swapped).abs().max() > 0.1  # negative control


def passed_once(network, method, m):
    """The network under W, each input of a shared layer times s and its output times r, and its own bias."""
    shared, own = factors(method), iter(method.own)
    weights, handles = {}, []
    for name, p in network.named_parameters():
        weights[name] = p if name in shared else next(own)[m]
    for name, (_, r, s) in shared.items():
        layer = network.get_submodule(name.removesuffix(".weight"))
        ones = [1] * (shared[name][0].ndim - 2)
        bias = weights.get(name.removesuffix("weight") + "bias", torch.zeros(()))
        r, s, b = r[m].view(-1, *ones), s[m].view(-1, *ones), bias.view(*bias.shape, *ones)
        handles.append(layer.register_forward_pre_hook(lambda _, given, s=s: (given[0] * s,)))
        handles.append(layer.register_forward_hook(lambda _, given, out, r=r, b=b: (out - b) * r + b))
    return weights, handles


@pytest.mark.parametrize(
    "network",
    [problems.small_cnn, lambda dropout=0.0: resnet.preresnet_frn(8, 3, 2, dropout, inputs=1)],
    ids=["cnn", "preresnet"],
)
def test_members_are_the_published_pass(network):
    """A member's network gives what one pass with scaled inputs and outputs gives, layer by layer."""
    problem = replace(problems.cnn(), network=network)
    method = method_of(problem, ensemble_size=3)
    inputs = batch_of(problem).inputs
    members = method._members()
    for m in range(3):
        weights, handles = passed_once(method.network, method, m)
        once = functional_call(method.network, weights, (inputs,))
        for handle in handles:
            handle.remove()
        plain = forward(method.network, {name: w[m : m + 1] for name, w in members.items()}, inputs)[0]
        assert_close(plain, once, rtol=1e-9, atol=1e-9)


def test_predictions_average_the_members():
    """The mean predictive of M draws is the explicit average; each member once, and again in draw M + 1."""
    problem = problems.cnn()
    method = method_of(problem, ensemble_size=3)
    inputs = problem.val.tensors[0].double()
    by_hand = torch.stack(
        [functional_call(method.network, explicit(method, m), (inputs,)).softmax(-1) for m in range(3)]
    )
    found = method.predict(inputs, 3, torch.Generator().manual_seed(1)).average().exp()
    assert_close(found, by_hand.mean(0), rtol=1e-6, atol=1e-9, check_dtype=False)
    drawn = method.sample_weights(4, torch.Generator().manual_seed(1))["0.weight"].flatten(1)
    assert len(drawn[:3].unique(dim=0)) == len(drawn.unique(dim=0)) == 3
    mean, variance = method.moments()
    each = torch.stack([explicit(method, m)["0.weight"] for m in range(3)])
    assert_close(mean["0.weight"], each.mean(0))
    assert_close(variance["0.weight"], each.var(0, correction=0))


def test_a_prior_over_all_weights_at_once():
    """Couples tensors: the mean over members of its log density at W and each member's own."""
    problem = problems.mlp()

    def joint(parameters):
        ones = torch.ones(sum(p.numel() for p in parameters.values())).double()
        return {JOINT: priors.normal_tensor(0.1 * ones, 0.8 * ones)}

    coupled = replace(problem, prior=joint)
    a, b = method_of(problem, ensemble_size=3), method_of(coupled, ensemble_size=3)
    noise = {"seeds": torch.tensor([0])}
    assert_close(a.loss_terms(batch_of(problem), noise)[1], b.loss_terms(batch_of(problem), noise)[1])
