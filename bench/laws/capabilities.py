"""Laws of what a method says that it provides: weights, densities, moments, the next prior.

Statistical laws compare a mean with its own standard error under fixed seeds. The bound of 4.5 standard
errors is passed by chance once in 150,000 comparisons (normal approximation), that of 5 once in 1.7 million.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.testing import assert_close

from bench import contract
from bench.contract import CAPABILITIES, OF_WEIGHTS
from bench.divergence import log_prob
from bench.laws import problems
from bench.laws.cases import (
    BUDGET,
    Case,
    assert_mean_is,
    first,
    generator,
    optimised,
    predict,
    state,
)
from bench.laws.law import (
    lacking,
    law,
    many,
)
from bench.weights import forward


@law("mlp", unfit=(many,))
def undeclared_capabilities_raise(case: Case) -> None:
    """What a method does not declare raises AttributeError, and it declares only what exists."""
    unknown = sorted(case.cls.provides - CAPABILITIES.keys())
    assert not unknown, f"`provides` names {', '.join(unknown)}; capabilities are {', '.join(CAPABILITIES)}"
    method = case.untrained()
    calls = {
        "weight_samples": lambda: method.sample_weights(1, generator()),
        "density": lambda: method.log_prob({name: p[None] for name, p in method.network.named_parameters()}),
        "moments": method.moments,
        "sequential": method.as_prior,
        "loss_terms": lambda: method.loss_terms(case.batch, {}),
        "scale_settable": lambda: method.set_scale(0.1),
    }
    assert calls.keys() | {"weighted", "reweighted", "exact_when_linear", "invariant"} == CAPABILITIES.keys()
    for name in calls.keys() - case.cls.provides:
        try:
            calls[name]()
        except AttributeError as error:
            said = str(error)
        else:
            raise AssertionError(f"has {name}, and `provides` does not say so")
        assert case.cls.__name__ in said, f"the refusal of {name} does not name the method: {said}"


@law("cnn", unfit=(many,))
def weights_are_those_posed(case: Case) -> None:
    """Who provides anything over weights has those of the problem's network: equal names, equal shapes."""
    posed, own = (
        {name: p.shape for name, p in network.named_parameters()}
        for network in (case.problem.network(), case.untrained().network)
    )
    assert own == posed or not case.cls.provides & OF_WEIGHTS, "these are not the weights that were posed"


@law(unfit=(lacking("weight_samples"),))
def weight_samples_have_shape(case: Case) -> None:
    """Draws are stacked over the parameters, finite, free of gradients, and follow the generator.

    Not all tensors may be point masses. Those are whose variances, as `moments` gives them, are all 0, and
    no others.
    """
    method = case.fitted()
    shapes = {name: p.shape for name, p in dict(method.network.named_parameters()).items()}
    variances = method.moments()[1] if "moments" in method.provides else {}
    points = {name for name, variance in variances.items() if not variance.any()}
    assert len(points) < len(shapes), "every tensor is a point mass"
    draws = method.sample_weights(4, generator())
    assert {name: w.shape for name, w in draws.items()} == {name: (4, *s) for name, s in shapes.items()}
    again, other = method.sample_weights(4, generator()), method.sample_weights(4, generator(1))
    for name, w in draws.items():
        assert w.isfinite().all(), f"draws of {name} are not finite"
        assert not w.requires_grad, f"draws of {name} have gradients"
        assert torch.equal(w, again[name]), f"equal generators give other draws of {name}"
        for one, two in ((w, other[name]), (w[0], w[1])):
            assert torch.equal(one, two) == (name in points), (
                f"{name} is drawn, and its variance is 0"
                if name in points
                else f"all draws of {name} are equal"
            )


@law(unfit=(lacking("weight_samples"),))
def predictions_are_of_the_weight_samples(case: Case, samples: int = 600) -> None:
    """Predicting is running the network under drawn weights: first and second moments of what it says agree.

    `Method.outputs` is the network, or its first-order expansion, and nothing else. False alarm: two
    comparisons of two samples per output, about 36 x 2 x 7e-6 = 5e-4.
    """
    method = case.posterior()
    one = first(predict(method, case.inputs, samples, seed=1)).double()
    draws = method.sample_weights(samples, generator(2))
    with torch.no_grad():
        said = method.outputs(draws, case.inputs)
        known = [run(method.network, draws, case.inputs) for run in (forward, expanded)]
        nearest = min(known, key=lambda outputs: (outputs - said).abs().max())
        assert_close(said, nearest, rtol=1e-3, atol=1e-3)
        two = first(method.likelihood.predict(nearest)).double()
    centre = two.mean(0)
    for power in (1, 2):
        a, b = (one - centre) ** power, (two - centre) ** power
        error = ((a.var(0) + b.var(0)) / samples).sqrt()
        assert ((a.mean(0) - b.mean(0)).abs() <= 4.5 * error + 1e-6).all(), (
            f"{'means' if power == 1 else 'variances'} of the predictions are not those under drawn weights"
        )


def expanded(network: torch.nn.Module, weights: dict[str, Tensor], inputs: Tensor) -> Tensor:
    """The network's first-order expansion at its parameters, by central differences in float64."""
    network, inputs = copy.deepcopy(network).double(), inputs.double()
    centre = dict(network.named_parameters())
    value = network(inputs)
    steps = {name: 1e-6 * (w - centre[name]) for name, w in weights.items()}
    ahead, behind = (
        forward(network, {n: centre[n] + sign * step for n, step in steps.items()}, inputs)
        for sign in (1, -1)
    )
    return (value + (ahead - behind) / 2e-6).to(next(iter(weights.values())))


@law("mlp", unfit=(lacking("density", "weight_samples"),))
def density_integrates_to_one(case: Case) -> None:
    """The density of two weights, summed over a fine grid, is 1 and has the samples' moments.

    False alarm of the moments: 4 x 7e-6.
    """
    lines = (case.on(problem()) for problem in (problems.straight_line, problems.pixel_line))
    method = next(line for line in lines if line.refusal() is None).posterior()
    draws = torch.cat([w.flatten(1) for w in method.sample_weights(20000, generator()).values()], 1).double()
    mean, std = draws.mean(0), draws.std(0)
    steps = torch.linspace(-8, 8, 401, dtype=torch.float64)
    grid = mean + std * torch.cartesian_prod(steps, steps)
    names = [(name, p.shape) for name, p in dict(method.network.named_parameters()).items()]
    weights = {n: grid[:, i].reshape(-1, *shape).float() for i, (n, shape) in enumerate(names)}
    with torch.no_grad():
        density = method.log_prob(weights).double().exp()
    cell = (std * (steps[1] - steps[0])).prod()
    total = (density.sum() * cell).item()
    assert abs(total - 1) <= 1e-3, f"the density sums to {total:.4f}"
    share = density / density.sum()
    for power in (1, 2):
        assert_mean_is((draws - mean) ** power, (share[:, None] * (grid - mean) ** power).sum(0), slack=1e-3)


@law("mlp", "cnn", unfit=(lacking("density", "weight_samples"),))
def density_fits_the_samples(case: Case, samples: int = 2000) -> None:
    """Stein: E_q[(w - c) . grad log q(w)] = -d for any c. False alarm: 7e-6."""
    method = case.posterior()
    draws = method.sample_weights(samples, generator(3))
    leaves = {name: w.detach().requires_grad_() for name, w in draws.items()}
    values = method.log_prob(leaves)
    assert values.shape == (samples,)
    assert values.isfinite().all()
    scores = torch.autograd.grad(values.sum(), list(leaves.values()))
    centre = [p.detach() for p in dict(method.network.named_parameters()).values()]
    parts = [
        ((w.detach() - c) * s).flatten(1).double().sum(1)
        for w, c, s in zip(leaves.values(), centre, scores, strict=True)
    ]
    weights = sum(c.numel() for c in centre)
    assert_mean_is(torch.stack(parts).sum(0), -weights, slack=1e-4 * weights)


@law("mlp", "cnn", unfit=(lacking("moments", "weight_samples"),))
def moments_are_those_of_the_samples(case: Case, samples: int = 4000) -> None:
    """Mean and variance of every weight within 5 standard errors. False alarm: 2 x 95 x 6e-7 = 1e-4."""
    method = case.posterior()
    means, variances = method.moments()
    draws = method.sample_weights(samples, generator(4))
    assert means.keys() == variances.keys() == draws.keys()
    for name, w in draws.items():
        assert not means[name].requires_grad
        assert not variances[name].requires_grad
        assert_mean_is(w, means[name].double(), errors=5)
        assert_mean_is((w - means[name]).square(), variances[name].double(), errors=5, slack=1e-7)


@law(*problems.ALL, unfit=(lacking("sequential"),))
def posterior_becomes_the_prior(case: Case) -> None:
    """`as_prior` is over the same weights and frozen, and a second fit under it goes on and is its own."""
    engine = case.engine()
    method = engine.fit(case.problem, BUDGET)
    parameters = dict(method.network.named_parameters())
    prior = method.as_prior()
    before = {name: p[None].detach() + 0.01 for name, p in parameters.items()}
    densities = log_prob(prior(parameters), before)
    assert densities.shape == (1,)
    assert densities.isfinite().all()
    kept = state(method)
    second = engine.fit(replace(case.problem, prior=prior), BUDGET, start=method)
    for name, value in method.state_dict().items():
        assert_close(value, kept[name], rtol=0, atol=0, msg=f"the second fit changed the first's {name}")
    assert any(not torch.equal(v, kept[name]) for name, v in second.state_dict().items())
    assert all(np.isfinite(row["loss"]) for row in second.history)
    predict(second, case.inputs)
    with torch.no_grad():
        for p in method.parameters():
            p.add_(1)
    assert_close(log_prob(prior(parameters), before), densities, msg="the prior moved with the method")
    assert prior(parameters).keys() in (parameters.keys(), {contract.JOINT})


@law("mlp", unfit=(lacking("scale_settable"),))
def scale_is_set_from_outside(case: Case) -> None:
    """After `set_scale` the variances of a tensor are equal and proportional to sigma^2; draws have them.

    In a tensor of one weight they are sigma^2. The means stay, and so does what is trained. False alarm: 95
    weights at two scales, each at 5 standard errors: 2 x 95 x 6e-7 = 1e-4.
    """
    method = case.untrained()
    trained, kept = [id(p) for p in optimised(method)], state(method.network)
    variances = {}
    for sigma in (0.02, 1.5):
        method.set_scale(sigma)
        means, variances[sigma] = method.moments()
        draws = method.sample_weights(2000, generator(9))
        for name, value in variances[sigma].items():
            assert_close(value, value.flatten()[0].expand_as(value), rtol=1e-5, atol=0)
            assert_close(means[name], kept[name], rtol=0, atol=0, msg=f"set_scale moved the means of {name}")
            assert_mean_is((draws[name] - means[name]).square() / value, 1.0, errors=5)
    for name, value in variances[1.5].items():
        assert_close(value, (1.5 / 0.02) ** 2 * variances[0.02][name], rtol=1e-4, atol=0)
    assert [id(p) for p in optimised(method)] == trained, "set_scale replaced what is trained"
    lines = (case.on(problem()) for problem in (problems.straight_line, problems.pixel_line))
    line = next(line for line in lines if line.refusal() is None).untrained()
    line.set_scale(0.3)
    for value in line.moments()[1].values():
        assert_close(value, torch.full_like(value, 0.09), rtol=1e-5, atol=0)
