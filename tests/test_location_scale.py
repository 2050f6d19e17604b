"""Draws and divergence over flat vectors against the path that goes tensor by tensor, in float64."""

import copy
from dataclasses import replace

import pytest
import torch
from conformance import problems
from torch import nn
from torch.distributions import Independent, Laplace, kl_divergence
from torch.testing import assert_close

from bench import priors
from bench.contract import Batch
from bench.families import location_scale
from bench.methods import ivon, mfvi, radial
from bench.priors import normal_tensor
from bench.weights import give, join, lay_together, normal_noise

METHODS = {"mfvi": mfvi.MFVI, "radial": radial.Radial, "ivon": ivon.IVON}


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def varied(parameters):
    """Normals whose means and standard deviations differ from weight to weight."""
    return {
        name: normal_tensor(torch.randn(p.shape, generator=generator(1)).to(p), 0.5 + torch.rand_like(p))
        for name, p in parameters.items()
    }


def laplace(parameters):
    """Of another family."""
    return {n: Independent(Laplace(torch.zeros_like(p), 1.0), p.ndim) for n, p in parameters.items()}


NORMAL = {"standard": priors.normal(), "shifted": priors.normal(0.3, 0.7), "tight": priors.tight_normal()}
PRIORS = NORMAL | {"varied": varied}
OTHERS = {"mixture": priors.scale_mixture(), "laplace": laplace}


def method_of(name, prior, problem=None, **values):
    """A method off its start, in float64."""
    cls = METHODS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = cls(replace(problem or problems.mlp(), prior=prior), cls.settings_class(**values))
        with torch.no_grad():
            for p in made.parameters():
                p += 0.3 * torch.randn_like(p)
    return made.double()


def batch_of(method):
    inputs, targets = method.problem.train[:5]
    return Batch(inputs.double(), targets)


def terms_and_gradients(method, noise):
    terms = method.loss_terms(batch_of(method), noise)
    trained = list(method.parameters())
    kind = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    return [*terms], [torch.autograd.grad(t, trained, **kind) for t in [*terms, sum(terms)]]


def by_tensor(method):
    """The same method on the path that goes tensor by tensor: its posterior is a plain dictionary."""
    other = copy.deepcopy(method)
    other.posterior = lambda: dict(type(method).posterior(other).items())
    return other


@pytest.fixture
def taken(monkeypatch):
    """Whether each call of `draw_with_divergence` went over flat vectors."""
    seen, apply = [], location_scale.draw_with_divergence

    def spy(q, noise, prior, joined):
        seen.append(joined is not None and isinstance(q, location_scale.LocationScale))
        return apply(q, noise, prior, joined)

    monkeypatch.setattr(location_scale, "draw_with_divergence", spy)
    return seen


@pytest.mark.parametrize("num_samples", [1, 3])
@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("name", METHODS)
def test_terms_and_gradients_are_those_of_the_path_by_tensor(name, prior, num_samples, taken):
    method = method_of(name, PRIORS[prior])
    noise = {n: e.double() for n, e in method.draw_noise(num_samples, generator(2)).items()}
    terms, gradients = terms_and_gradients(method, noise)
    assert taken == [True]
    expected, by_autograd = terms_and_gradients(by_tensor(method), noise)
    assert taken == [True, False]
    assert_close(terms, expected, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(gradients, by_autograd, strict=True):
        assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
        assert any(g.any() for g in ours)


def test_the_comparison_sees_a_wrong_derivative(monkeypatch):
    """Negative control: the slope of another link."""
    method = method_of("mfvi", priors.normal())
    noise = method.draw_noise(2, generator(2))
    expected = terms_and_gradients(by_tensor(method), noise)[1]
    wrong = replace(location_scale.SOFTPLUS, slope=lambda r, s: s)
    q = method.posterior()
    monkeypatch.setattr(q, "family", replace(q.family, link=wrong))
    method.posterior = lambda: q
    found = terms_and_gradients(method, noise)[1]
    assert max((a - b).abs().max() for a, b in zip(found[2], expected[2], strict=True)) > 1e-3


@pytest.mark.parametrize("num_samples", [1, 3])
def test_a_tensor_whose_draw_is_not_used_gets_the_divergence_alone(num_samples):
    """Of one draw's square and the divergence, against the path by tensor."""
    method = method_of("mfvi", priors.normal())
    noise = method.draw_noise(num_samples, generator(2))
    found = []
    for one in (method, by_tensor(method)):
        weights, divergence = one.draw(one.posterior(), noise, one.prior)
        total = next(iter(weights.values())).square().sum() + divergence
        found.append(torch.autograd.grad(total, list(one.parameters())))
    assert_close(*found, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("spread", [1, 60])
@pytest.mark.parametrize("size", [1, 3, 4, 4001])
def test_logarithms_are_summed_by_products_of_four(size, spread):
    """In float32; with exponents to 1e-26 and 1e26 a product of four leaves its range, and no sum may."""
    values = (torch.randn(size, generator=generator()).clamp(-3, 3) * spread / 3).exp()
    exact = values.double().log()
    error = (location_scale.sum_of_logs(values).double() - exact.sum()).abs()
    assert error <= 1e-6 * exact.abs().sum()
    if (size, spread) == (4001, 60):  # the negative control
        assert not values[:4000].view(4, 1000).prod(0).log().isfinite().all()


def test_second_derivatives_are_refused():
    """They would lack what goes through the scales, which the graph does not hold."""
    method = method_of("mfvi", priors.normal())
    total = sum(method.loss_terms(batch_of(method), method.draw_noise(1, generator())))
    slopes = torch.autograd.grad(total, list(method.rho), create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slopes[0].sum().backward()


@pytest.mark.parametrize("prior", PRIORS)
def test_the_divergence_is_torchs(prior):
    method = method_of("mfvi", PRIORS[prior])
    q = method.posterior()
    expected = sum(kl_divergence(q[n].base_dist, p.base_dist).sum() for n, p in method.prior.items())
    assert_close(method.loss_terms(batch_of(method), method.draw_noise(1, generator()))[1], expected)


@pytest.mark.parametrize("prior", OTHERS)
@pytest.mark.parametrize("name", ["mfvi", "radial"])
def test_other_priors_go_tensor_by_tensor(name, prior, taken):
    method = method_of(name, OTHERS[prior])
    terms = method.loss_terms(batch_of(method), method.draw_noise(2, generator()))
    assert taken == [False]
    assert all(t.isfinite() for t in terms)


def test_a_prior_that_is_learned_goes_tensor_by_tensor():
    parameters = {"w": torch.zeros(3)}
    std = torch.ones(3, requires_grad=True)
    learned = {"w": normal_tensor(parameters["w"], std)}
    assert location_scale.Normals.of(location_scale.normals(), learned) is None
    assert location_scale.Normals.of(location_scale.normals(), priors.normal()(parameters)) is not None


def test_a_posterior_of_a_subclass_is_asked(taken):
    """Who overrides `posterior` is trained by what it returns."""

    class Wide(mfvi.MFVI):
        def posterior(self):
            return {n: normal_tensor(q.mean, 2 * q.stddev) for n, q in super().posterior().items()}

    made = Wide(problems.mlp(), mfvi.Settings())
    made.loss_terms(Batch(*made.problem.train[:5]), made.draw_noise(1, generator()))
    assert taken == [False]


class Tied(nn.Module):
    """Two layers that share a matrix, so that its parameter has one name."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, inputs):
        """Both layers."""
        return self.second(self.first(inputs).tanh())


def test_layers_that_share_a_matrix_share_its_draw(taken):
    """Against the path by tensor; the shared matrix has one mean, one draw, one divergence."""
    problem = problems.mlp()
    inputs = torch.randn(len(problem.train), 3, generator=generator())
    train = torch.utils.data.TensorDataset(inputs, problem.train.tensors[1] % 3)
    method = method_of("mfvi", priors.normal(), replace(problem, network=Tied, train=train))
    assert len(method.rho) == 3
    noise = method.draw_noise(2, generator())
    ours, theirs = (terms_and_gradients(m, noise) for m in (method, by_tensor(method)))
    assert taken == [True, False]
    assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_a_radial_prior_has_one_quadrature(monkeypatch):
    """One call for all tensors, and the value of a call for each."""
    first = method_of("radial", priors.normal())
    second = method_of("radial", first.as_prior(), initial_rho=-2.0)
    noise = second.draw_noise(3, generator())
    calls, integrate = [], radial.mean_log_radius

    def counted(a, b, c):
        calls.append(a.shape)
        return integrate(a, b, c)

    monkeypatch.setattr(radial, "mean_log_radius", counted)
    q, p = dict(second.posterior()), second.prior
    together = radial.radial_divergence(q, p, noise)
    assert calls == [(len(q), 3)]
    alone = [radial.radial_divergence({n: q[n]}, {n: p[n]}, {n: noise[n]}) for n in q]
    assert_close(together, sum(alone), rtol=1e-12, atol=1e-12)
    trained = list(second.parameters())
    found, expected = (torch.autograd.grad(t, trained, retain_graph=True) for t in (together, sum(alone)))
    assert_close(found, expected)


@pytest.mark.parametrize("exact", [True, False])
def test_radial_noise_has_the_norm_of_its_radius_in_every_tensor(exact):
    """Of one draw: the directions are `normal_noise`, over their norms; the control has one norm for all."""
    like = {"a": torch.zeros(4, 5), "b": torch.zeros(3), "c": torch.zeros(())}
    found = radial.radial_noise(6, like, generator(3), exact)
    source = generator(3)
    plain = normal_noise(6, like, source)
    radii = torch.randn(3, 6, generator=source)
    for (name, e), radius in zip(plain.items(), radii, strict=True):
        rows = e.reshape(6, -1)
        norm = rows.norm(dim=1) if exact else like[name].numel() ** 0.5
        assert_close(found[name].reshape(6, -1), rows * (radius / norm)[:, None])
    if exact:
        assert_close(found["a"].flatten(1).norm(dim=1), radii[0].abs())
        assert not torch.allclose(found["b"].norm(dim=1), radii[0].abs())


def test_noise_is_one_draw():
    """Tensor after tensor of one draw of all; tensors of samples are contiguous."""
    like = {"a": torch.zeros(40, 5), "b": torch.zeros(7)}
    found = normal_noise(3, like, generator(4))
    expected = torch.randn(3 * 207, generator=generator(4))
    assert torch.equal(torch.cat([e.flatten() for e in found.values()]), expected)
    assert all(e.is_contiguous() for e in found.values())


# ---- memory


def test_means_and_numbers_of_a_method_are_two_vectors():
    """Also after a state is loaded."""
    for name in METHODS:
        method = METHODS[name](problems.mlp(), METHODS[name].settings_class())
        other = METHODS[name](problems.mlp(), METHODS[name].settings_class())
        method.load_state_dict(other.state_dict())
        for part in (method.network, getattr(method, "rho", None) or method.log_scale):
            parameters = list(part.parameters())
            assert join(parameters).data_ptr() == parameters[0].data_ptr()


def test_joined_tensors_are_a_view_where_they_lie_end_to_end_and_else_a_copy():
    parameters = [nn.Parameter(torch.randn(s)) for s in [(2, 3), (), (4,)]]
    values = torch.cat([p.detach().flatten() for p in parameters])
    assert torch.equal(join(parameters), values)
    assert join(parameters).data_ptr() != parameters[0].data_ptr()
    lay_together(parameters)
    vector = join(parameters).detach()
    assert torch.equal(vector, values)
    vector += 1
    assert_close(torch.cat([p.detach().flatten() for p in parameters]), values + 1)
    parameters[1].data = torch.tensor(7.0)  # no longer in turn: a copy, with the new value
    assert join(parameters)[6] == 7
    give(values, parameters)
    assert torch.equal(join(parameters), values)


def test_parameters_that_share_memory_are_left_alone():
    one = nn.Parameter(torch.randn(2, 3))
    other = nn.Parameter(one.data.T)
    lay_together([one, other])
    with torch.no_grad():
        one[0, 1] = 5.0
    assert other[1, 0] == 5


@pytest.mark.parametrize("name", METHODS)
def test_a_state_is_kept_by_tensor(name):
    """The form of checkpoints from before: every tensor under its own name."""
    method = METHODS[name](problems.mlp(), METHODS[name].settings_class())
    own = {n: p.detach().clone() + 1 for n, p in method.named_parameters()}
    assert set(own) <= set(method.state_dict())
    method.load_state_dict(method.state_dict() | own)
    assert_close(dict(method.named_parameters()), own)


def test_copies_side_by_side_go_tensor_by_tensor(taken):
    """Gradients of stacked parameters through `torch.func` are those of autograd, over vectors."""
    method = method_of("mfvi", PRIORS["varied"])
    noise = method.draw_noise(2, generator())
    names = list(method.posterior())

    def loss(means, numbers):
        q = location_scale.LocationScale(
            location_scale.normals(), dict(zip(names, means, strict=True)), numbers
        )
        weights, divergence = method.draw(q, noise, method.prior)
        return sum(w.sin().sum() for w in weights.values()) + divergence

    parts = list(method.network.parameters()), list(method.rho)
    stacks = [[torch.stack([p.detach(), p.detach() + 0.1]) for p in part] for part in parts]
    method.prior  # noqa: B018  made here, outside vmap
    found = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)))(*stacks)
    assert taken == [False]
    for i in range(2):
        leaves = [[p[i].clone().requires_grad_() for p in stack] for stack in stacks]
        expected = torch.autograd.grad(loss(*leaves), [*leaves[0], *leaves[1]])
        assert_close([p[i] for part in found for p in part], list(expected))
    assert taken == [False, True, True]
