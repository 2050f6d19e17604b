"""The divergence to normal priors, whose gradient is written out."""

import math

import pytest
import torch
from torch.distributions import (
    Independent,
    Laplace,
    MultivariateNormal,
    Normal,
    kl_divergence,
    register_kl,
)
from torch.testing import assert_close

from bench.contract import JOINT
from bench.divergence import cross_entropy, divergence, location_scale_divergence, log_prob, with_log_prob
from bench.methods.full_cov_vi import FullNormal
from bench.methods.matrix_normal_vi import MatrixNormal
from bench.methods.radial import RadialNormal
from bench.priors import normal_tensor

SHAPES = [(), (5,), (3, 4)]


def case(shape, one_scale, **kind):
    torch.manual_seed(0)
    mean, scale = torch.randn(shape, **kind), 0.1 + torch.rand(shape, **kind)
    if one_scale:
        loc, std = (torch.tensor(x, **kind).expand(shape) for x in (0.3, 1.7))
    else:
        loc, std = torch.randn(shape, **kind), 0.1 + torch.rand(shape, **kind)
    return mean.requires_grad_(), scale.requires_grad_(), Normal(loc, std)


@pytest.mark.parametrize("one_scale", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_between_normals_it_is_torchs_own_in_value_and_gradient(shape, one_scale):
    mean, scale, p = case(shape, one_scale, dtype=torch.float64)
    ours = divergence(normal_tensor(mean, scale), normal_tensor(p.loc, p.scale), mean[None])
    theirs = kl_divergence(Normal(mean, scale), p).sum()
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    gradients = (torch.autograd.grad(3 * kl, (mean, scale)) for kl in (ours, theirs))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("one_scale", [True, False])
def test_gradients_pass_gradcheck_twice(one_scale):
    mean, scale, p = case((3, 2), one_scale, dtype=torch.float64)

    def value(m, s):
        return location_scale_divergence(m, s, 0.4, 1.1, p)

    assert torch.autograd.gradcheck(value, (mean, scale))
    assert torch.autograd.gradgradcheck(value, (mean, scale))


def test_a_prior_that_is_learned_gets_its_gradient():
    mean, scale, _ = case((4,), True, dtype=torch.float64)
    loc, std = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (0.3, 1.7))
    p = normal_tensor(loc.expand(4), std.expand(4))
    ours = divergence(normal_tensor(mean, scale), p, mean[None])
    theirs = kl_divergence(Normal(mean, scale), Normal(loc, std)).sum()
    gradients = (torch.autograd.grad(kl, (loc, std, mean, scale)) for kl in (ours, theirs))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("one_scale", [True, False])
def test_a_million_weights_in_single_precision(one_scale):
    mean, scale, p = case((1000, 1000), one_scale)
    q = normal_tensor(mean, scale)
    exact = kl_divergence(
        Normal(mean.double(), scale.double()), Normal(p.loc.double(), p.scale.double())
    ).sum()
    ours = divergence(q, normal_tensor(p.loc, p.scale), mean[None])
    torch.testing.assert_close(ours.double(), exact, rtol=2e-6, atol=0)


@pytest.mark.parametrize("one_scale", [True, False])
def test_of_a_distribution_to_itself_it_vanishes(one_scale):
    _, _, p = case((200, 300), one_scale)
    q = normal_tensor(p.loc.clone(), p.scale.clone())
    assert abs(divergence(q, normal_tensor(p.loc, p.scale), p.loc[None]).item()) < 1e-6 * math.prod(
        (200, 300)
    )


class Declines(Normal):
    """A distribution whose registered divergence has no closed form, or meets what its device lacks."""

    reason = ""


@register_kl(Declines, Normal)
def _declined(q, p):
    raise NotImplementedError(*[q.reason] * bool(q.reason))


def test_without_closed_form_the_draws_decide_and_a_device_that_lacks_an_operation_is_told():
    q, p, draws = Declines(torch.zeros(()), torch.ones(())), Normal(1.0, 2.0), torch.tensor([0.5, -1.0])
    expected = (q.log_prob(draws) - p.log_prob(draws)).mean()
    torch.testing.assert_close(divergence(q, p, draws), expected)
    laplace = torch.distributions.Laplace(0.0, 1.0)  # torch has no form of its own to a Student
    student = torch.distributions.StudentT(3.0)
    estimate = (laplace.log_prob(draws) - student.log_prob(draws)).mean()
    torch.testing.assert_close(divergence(laplace, student, draws), estimate)
    q.reason = "The operator 'aten::erfinv' is not currently implemented for the XYZ device"
    with pytest.raises(NotImplementedError, match="XYZ device"):
        divergence(q, p, draws)


@pytest.mark.parametrize("kind", [FullNormal, MatrixNormal, RadialNormal])
def test_closed_form_of_a_family_declines_a_prior_that_is_not_normal(kind):
    """The draws decide then; a closed form that took the prior for a normal would give another number."""
    loc = torch.full((2, 2), 0.3)
    q = {
        FullNormal: lambda: FullNormal(loc, 0.5 * torch.eye(4)),
        MatrixNormal: lambda: MatrixNormal(loc, torch.eye(2), 0.5 * torch.eye(2)),
        RadialNormal: lambda: RadialNormal(loc, torch.full((2, 2), 0.5)),
    }[kind]()
    torch.manual_seed(0)
    draws = loc + torch.randn(3, 2, 2)
    p, normal = (Independent(prior(torch.zeros(2, 2), 1.0), 2) for prior in (Laplace, Normal))
    estimate = (q.log_prob(draws) - p.log_prob(draws)).mean()
    torch.testing.assert_close(divergence(q, p, draws), estimate)
    assert not torch.isclose(divergence(q, normal, draws), estimate, rtol=1e-2)


def test_cross_entropy_is_that_of_torch_and_declines_another_shape():
    """To itself a normal has its entropy; a prior that broadcasts would be another number."""
    loc, scale = torch.tensor([[0.3, -1.0]]), torch.tensor([[0.5, 2.0]])
    p = normal_tensor(loc, scale)
    torch.testing.assert_close(cross_entropy(p, p), p.entropy())
    with pytest.raises(NotImplementedError):
        cross_entropy(p, normal_tensor(torch.zeros(1, 1), torch.ones(1, 1)))


@pytest.mark.parametrize(
    ("q", "p"),
    [
        (FullNormal(torch.zeros(2), torch.eye(2)), MultivariateNormal(torch.zeros(1), torch.eye(1))),
        (
            MatrixNormal(torch.zeros(2, 2), torch.eye(2), torch.eye(2)),
            MatrixNormal(torch.zeros(1, 1), torch.eye(1), torch.eye(1)),
        ),
        (RadialNormal(torch.zeros(2), torch.ones(2)), normal_tensor(torch.zeros(1), torch.ones(1))),
    ],
    ids=["full", "matrix", "radial"],
)
def test_closed_form_of_a_family_declines_a_prior_of_another_shape(q, p):
    """Each prior would broadcast to the posterior's shape, and the number would be that of another prior."""
    with pytest.raises(NotImplementedError) as info:
        kl_divergence(q, p)
    assert not str(info.value).startswith("No KL("), "declined by the form, and not for lack of one"


@pytest.mark.parametrize("shape", [(), (1,), (4,), (3, 2)])
@pytest.mark.parametrize("kind", ["one scale", "a scale each", "a scale that is trained"])
def test_log_density_of_normals_is_torchs(kind, shape):
    """The value, its gradient and the gradient of that, also where one standard deviation is stored once."""
    torch.manual_seed(0)
    loc, draws = torch.randn(shape, dtype=torch.double), torch.randn(3, *shape, dtype=torch.double)
    scale = (
        torch.tensor(0.7, dtype=torch.double).expand(shape)
        if kind == "one scale"
        else 0.5 + torch.rand(shape, dtype=torch.double)
    )
    if kind == "a scale that is trained":
        scale = scale.requires_grad_()
    p = normal_tensor(loc, scale)
    draws.requires_grad_()
    for ours, theirs in zip(
        derivatives(log_prob({"w": p}, {"w": draws}), draws),
        derivatives(p.log_prob(draws), draws),
        strict=True,
    ):
        assert_close(ours, theirs)
    if scale.requires_grad:
        (slope,) = torch.autograd.grad(log_prob({"w": p}, {"w": draws}).sum(), scale)
        assert slope.abs().min() > 0


PRIORS = {
    "one deviation": {n: (0.0, 0.7) for n in "abc"},
    "several": {"a": (0.0, 0.7), "b": (0.0, 1.3), "c": (0.0, 0.2)},
    "off centre": {"a": (0.4, 0.7), "b": (0.0, 1.3), "c": (-1.0, 0.7)},
}


def weights_of_three(prior):
    """The prior, tensors that all of three networks share, and one that is each network's own."""
    torch.manual_seed(0)
    shapes = {"a": (2, 3), "b": (4,), "c": (2,)}
    numbers = {
        n: [torch.tensor(x, dtype=torch.double).expand(shapes[n]) for x in v] for n, v in prior.items()
    }
    made = {n: torch.randn(s, dtype=torch.double).requires_grad_() for n, s in shapes.items()}
    made["c"] = torch.randn(3, 2, dtype=torch.double).requires_grad_()
    shared = {n: made[n] for n in "ab"}
    return {n: normal_tensor(*v) for n, v in numbers.items()}, shared, {"c": made["c"]}


def outputs_of(weights):
    """A function of all weights, whose gradients are in memory of their own."""
    return (weights["a"] @ weights["b"][:3]).square().sum() + (weights["c"] @ weights["c"].mT).sum()


def mean_log_prob(prior, weights):
    return sum(prior[n].log_prob(w).mean() for n, w in weights.items())


@pytest.mark.parametrize("owns", [False, True])
@pytest.mark.parametrize("prior", PRIORS.values(), ids=PRIORS)
def test_log_density_beside_the_weights_is_torchs_mean(prior, owns):
    """The value, and the gradient of it and of a function of the weights, together and each alone."""
    prior, shared, own = weights_of_three(prior)
    plain = {**shared, **own}
    for of_outputs, of_density in ((1.0, 1.0), (1.0, 0.0), (0.0, 2.0)):
        weights, density = with_log_prob(prior, shared, own, owns)
        assert_close(density, mean_log_prob(prior, plain))
        found = torch.autograd.grad(
            (of_outputs * outputs_of(weights) if of_outputs else 0) + of_density * density, plain.values()
        )
        value = of_outputs * outputs_of(plain) + of_density * mean_log_prob(prior, plain)
        for ours, theirs in zip(found, torch.autograd.grad(value, plain.values()), strict=True):
            assert_close(ours, theirs)


def test_log_density_beside_the_weights_has_a_second_derivative():
    prior, shared, own = weights_of_three(PRIORS["several"])
    plain = list({**shared, **own}.values())
    weights, density = with_log_prob(prior, shared, own, True)
    ours = bend(outputs_of(weights) * density, plain)
    theirs = bend(outputs_of({**shared, **own}) * mean_log_prob(prior, {**shared, **own}), plain)
    for one, other in zip(ours, theirs, strict=True):
        assert_close(one, other)


def bend(value, at):
    slopes = torch.autograd.grad(value, at, create_graph=True)
    return torch.autograd.grad(sum(slope.square().sum() for slope in slopes), at)


@pytest.mark.parametrize("owns", [False, True])
def test_only_gradients_that_are_owned_are_written_over(owns):
    """A sum hands one gradient to both its terms; whoever says that it is owned gets another number."""
    prior, shared, _ = weights_of_three({"b": (0.0, 0.7), "a": (0.0, 0.7), "c": (0.0, 0.7)})
    beside = torch.zeros(2, 3, dtype=torch.double, requires_grad=True)
    weights, density = with_log_prob({"a": prior["a"]}, {"a": shared["a"]}, {}, owns)
    total = (weights["a"] + beside).square().sum() + density
    found, _ = torch.autograd.grad(total, [beside, shared["a"]])
    assert torch.allclose(found, 2 * shared["a"]) is not owns


def test_log_density_beside_the_weights_of_fits_side_by_side():
    """Under vmap, and under a density of all tensors together, the number is the same."""
    prior, shared, own = weights_of_three(PRIORS["several"])
    several = {n: torch.stack([w.detach(), 2 * w.detach()]) for n, w in {**shared, **own}.items()}
    found = torch.func.vmap(lambda w: with_log_prob(prior, {n: w[n] for n in "ab"}, {"c": w["c"]})[1])(
        several
    )
    for i, value in enumerate(found):
        assert_close(value, mean_log_prob(prior, {n: w[i] for n, w in several.items()}))
    joint = {JOINT: normal_tensor(torch.zeros(12, dtype=torch.double), torch.ones(12, dtype=torch.double))}
    unit = weights_of_three({n: (0.0, 1.0) for n in "abc"})[0]
    assert_close(with_log_prob(joint, shared, own)[1], mean_log_prob(unit, {**shared, **own}))


def derivatives(value, at):
    """The value and two derivatives along ones."""
    (slope,) = torch.autograd.grad(value.sum(), at, create_graph=True)
    (bend,) = torch.autograd.grad(slope.square().sum(), at)
    return value, slope, bend


def test_a_prior_that_is_written_over_is_read_again():
    loc, std, weights = torch.zeros(()), torch.ones(()), {"w": torch.randn(2, 5)}
    prior = {"w": Independent(Normal(loc.expand(5), std.expand(5)), 1)}
    log_prob(prior, weights)
    loc.fill_(0.5)
    std.fill_(2.0)
    assert_close(log_prob(prior, weights), Normal(0.5, 2.0).log_prob(weights["w"]).sum(1))
