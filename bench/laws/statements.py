"""What methods declare of their posterior (`Method.declares`), and the law of every statement.

A law fits the method, through the engine, to problems of two weights each whose posterior is known. Many
replicas lie side by side in one network (`linear.Replicas`, `linear.LogisticReplicas`). Their fits and chains
do not know of each other, so that the spread over them tells how far their mean may be off by chance,
whatever the method: by its draws, by the noise of its gradients, by chains that move slowly. What is compared
are five means over draws and replicas, in coordinates in which the statement says N(0, I) of every replica:
two first moments and three second ones.

False alarm: a mean is compared by Student's t with the replicas less one as degrees of freedom, at 1e-5; five
means of one or two problems make at most 1e-4 a method. `TOLERANCE` is on top of that, and a comparison that
could not see a difference of `SEEN` fails too: a variance off by 1.4 and a mean off by 0.4 standard
deviations are found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import scipy.stats
import torch
from torch import Tensor

from bench.contract import STATEMENTS, Budget, Method, Problem
from bench.divergence import log_prob
from bench.laws.linear import LogisticReplicas, Replicas
from bench.weights import ravel

if TYPE_CHECKING:
    from bench.laws.cases import Case

FALSE_ALARM = 1e-5
"""Of one comparison."""
TOLERANCE = 0.05
"""What a mean may be off beside chance: a step size and a rate of learning are not 0, steps have an end."""
SEEN = 0.4
"""Differences that a comparison must be able to see."""
FIT, CHAIN, PARTICLES = Budget(epochs=600), Budget(epochs=2000), Budget(epochs=300)
ITERATES = Budget(epochs=200, batch_size=4)
"""What the laws pose: full batches, but for iterates, which full batches would bring to rest. A sampler
spends what its settings say instead."""
DRAWS = 4000
"""Asked of a method whose draws have no end."""
CLAIMS = {"exact_when_linear": "exact", "invariant": "exact in the limit of steps"}
"""Capabilities that are claims of exactness, and the statement that goes with each."""


def declaration(cls: type[Method]) -> tuple[str, Mapping[str, Any]]:
    """The statement that a method declares, and the settings under which it is held to it.

    Raises:
        AssertionError: If it declares none of `STATEMENTS`; one line that lists them.
    """
    said = getattr(cls, "declares", None)
    statement, values = said if isinstance(said, tuple) else (said, {})
    choices = ", ".join(f'"{each}"' for each in STATEMENTS)
    words = "declares nothing" if said is None else f"declares {statement!r}"
    if statement not in STATEMENTS:
        raise AssertionError(f"{cls.__name__} {words}: set `declares` to one of {choices}")
    return str(statement), values


def hold(case: Case) -> str:
    """Holds a method to what it declares; gives the reason if there is no law of that.

    Raises:
        AssertionError: If it declares nothing, or what does not hold.
    """
    statement, values = declaration(case.cls)
    for capability, claim in CLAIMS.items():
        claims = capability in case.cls.provides
        assert not claims or statement == claim, f"provides {capability} and does not declare {claim!r}"
    if statement == "none":
        return "declares none"
    try:
        LAWS[statement](replace(case, values={**case.values, **values}))
    except AssertionError as error:
        raise AssertionError(f"declares {statement!r}: {error}") from error
    return ""


# ------------------------------------------------------------------------------------------------- fits


def _posed(case: Case, problem: Problem) -> Case:
    """The case on a problem.

    Raises:
        AssertionError: If the method refuses it.
    """
    case = case.on(problem)
    assert case.refusal() is None, f"refuses the problem on which that is seen: {case.refusal()}"
    return case


def _draws(method: Method) -> Tensor:
    """Draws of a fitted method, `[S, R, 2]`: all that there are, or `DRAWS`."""
    draws = method.sample_weights(method.num_draws or DRAWS, torch.Generator().manual_seed(0))
    return ravel(draws).double().unflatten(1, (-1, 2))


def assert_moments(draws: Tensor, mean: Tensor, factor: Tensor) -> None:
    """The draws of every replica have this mean, and a covariance whose inverse is L L^T.

    Args:
        draws: `[S, R, 2]`; of one replica they count as independent.
        mean: `[R, 2]`.
        factor: L, `[2, 2]` or one for each replica, `[R, 2, 2]`.
    """
    z = ((draws - mean)[..., None, :] @ factor)[..., 0, :]
    seen = torch.stack([*z.unbind(-1), *z.square().unbind(-1), z.prod(-1)], -1)  # [S, R, 5]
    samples, replicas = seen.shape[:2]
    variance = seen.mean(1).var(0) / samples
    if replicas > 1:  # what replicas share is in the first term, what parts them in the second
        variance = variance + seen.mean(0).var(0) / replicas
    bound = scipy.stats.t.isf(FALSE_ALARM / 2, (replicas if replicas > 1 else samples) - 1)
    found, errors = seen.mean((0, 1)).tolist(), variance.sqrt().tolist()
    compared = list(zip(("z0", "z1", "z0 z0", "z1 z1", "z0 z1"), found, (0, 0, 1, 1, 0), errors, strict=True))
    for name, mean_found, of, error in compared:
        assert abs(mean_found - of) <= TOLERANCE + bound * error, (
            f"the mean of {name} is {mean_found:.3f} with standard error {error:.3f}, not {of}"
        )
    for name, _, _, error in compared:
        assert TOLERANCE + bound * error <= SEEN, (
            f"the mean of {name} has standard error {error:.3f}: more draws or a longer fit would tell"
        )


# -------------------------------------------------------------------------------------------- the laws


def _exact(case: Case, budget: Budget = FIT, truth: Replicas | None = None) -> None:
    """Draws are of the posterior of a linear problem with normal noise and prior."""
    truth = truth or Replicas()
    method = _posed(case, truth.problem).fit(budget=budget)
    assert_moments(_draws(method), truth.mean, torch.linalg.cholesky(truth.precision))


def _in_steps(case: Case) -> None:
    """Draws of a long chain are of the posterior of a linear problem, but for the size of its steps."""
    _exact(case, CHAIN)


def _in_particles(case: Case) -> None:
    """Particles pass for as many independent draws from the posterior of two weights."""
    _exact(case, PARTICLES, Replicas(1))


def _mode(case: Case) -> None:
    """The network that predicts is that at the mode, to a tenth of a standard deviation of the posterior."""
    linear, logistic = Replicas(), LogisticReplicas()
    if case.on(linear.problem).refusal() is None:
        inputs, mean, precision = linear.inputs, linear.mean, linear.precision
        problem: Problem = linear.problem
    else:
        inputs, problem = logistic.inputs, logistic.problem
        mean, precision = logistic.mode()
    case = _posed(case, problem)
    prediction = case.engine().predict(case.fit(budget=FIT), inputs.float(), 1)
    said = next(iter(vars(prediction).values()))[0].double()  # means [N, R], or log odds [N]
    found = torch.linalg.lstsq(inputs, said.view(len(inputs), -1)).solution
    away = (found.T.reshape(-1, 2) - mean)[:, None] @ torch.linalg.cholesky(precision)
    far = away.abs().max().item()
    assert far <= 0.1, f"predicts at {far:.2f} standard deviations of the posterior from its mode"


def _curvature(case: Case) -> None:
    """Mode and curvature are those of the negative log joint, of a linear problem and of a logistic one.

    Read off draws, of which the covariance is the inverse of the curvature; of a method without draws, off
    the diagonal of the curvature that it hands on as the next prior.
    """
    linear, logistic = Replicas(), LogisticReplicas()
    for problem, mode, curvature in (
        (linear.problem, linear.mean, linear.precision),
        (logistic.problem, *logistic.mode()),
    ):
        method = _posed(case, problem).fit(budget=FIT)
        if "weight_samples" in method.provides:
            assert_moments(_draws(method), mode, torch.linalg.cholesky(curvature))
        else:
            _assert_next_prior(method, mode, curvature.diagonal(dim1=-2, dim2=-1).expand_as(mode))


def _assert_next_prior(method: Method, mode: Tensor, diagonal: Tensor) -> None:
    """The next prior is a quadratic: its slope at the mode is 0, its curvature along every weight is given.

    Args:
        method: Fitted.
        mode: `[R, 2]`.
        diagonal: `[R, 2]`.
    """
    parameters = dict(method.network.named_parameters())
    ((name, weight),) = parameters.items()
    prior, spread = method.as_prior()(parameters), diagonal.rsqrt().flatten()
    steps = torch.cat([torch.zeros(1, len(spread)), spread.diag(), -spread.diag()])
    at = (mode.flatten() + steps).to(weight).view(-1, *weight.shape)
    here, ahead, behind = log_prob(prior, {name: at}).double().split([1, len(spread), len(spread)])
    for what, found, of in (("slope", (ahead - behind) / 2, 0), ("curvature", 2 * here - ahead - behind, 1)):
        far = (found - of).abs().max().item()
        assert far <= 0.1, f"the {what} of the next prior at the mode is off by {far:.2f}, in units of 1"


def _mean_field(case: Case) -> None:
    """Draws have the moments of the independent normals of least KL: by the precision's diagonal alone.

    Of the linear problem, where the KL of any independent weights depends on their two moments and their
    entropy alone; of the logistic one, if the method takes nothing but classes.
    """
    linear, logistic = Replicas(), LogisticReplicas()
    if case.on(linear.problem).refusal() is None:
        method, mean = case.on(linear.problem).fit(budget=FIT), linear.mean
        factor = linear.precision.diagonal().sqrt().diag()
    else:
        method = _posed(case, logistic.problem).fit(budget=FIT)
        mean, std = logistic.mean_field()
        factor = std.reciprocal().diag_embed()
    assert_moments(_draws(method), mean, factor)


def _within_family(case: Case) -> None:
    """Draws are of the posterior of a linear problem of independent weights, which the family must hold."""
    _exact(case, truth=Replicas(correlated=False))


def _iterates(case: Case) -> None:
    """The means are those of a number of last epochs' weights, and the variances are those of as many."""
    iterates = []

    class Watched(case.cls):  # type: ignore[name-defined]
        def on_last_step(self) -> None:
            super().on_last_step()
            iterates.append(ravel({n: p.detach()[None] for n, p in self.network.named_parameters()})[0])

    case = _posed(replace(case, cls=Watched), Replicas().problem)
    found = case.fit(budget=ITERATES).moments()
    means, variances = (ravel({n: m[None] for n, m in part.items()})[0] for part in found)
    path = torch.stack(iterates).double()
    last = [path[-n:] for n in range(2, len(path) + 1)]
    spread = path.var(0, correction=0).sqrt()
    nearest = min(last, key=lambda some: ((some.mean(0) - means).abs() / spread).max())
    far = ((nearest.mean(0) - means).abs() / spread).max().item()
    assert far <= 1e-3, f"the means are those of no number of last iterates, by {far:.2g} of their spread"
    ratios = (variances / nearest.var(0, correction=0)).view(-1, 2).mean(1)  # of every replica
    mean, error = ratios.mean().item(), (ratios.std() / len(ratios) ** 0.5).item()
    bound = TOLERANCE + scipy.stats.t.isf(FALSE_ALARM / 2, len(ratios) - 1) * error
    assert abs(mean - 1) <= bound, f"variances are {mean:.2f} of those of the last {len(nearest)} iterates"
    assert bound <= SEEN, f"ratio of variances: standard error {error:.3f}, too large to tell"


LAWS: dict[str, Callable[[Case], None]] = {
    "exact": _exact,
    "exact in the limit of steps": _in_steps,
    "exact in the limit of particles": _in_particles,
    "mode and curvature exact": _curvature,
    "mode exact": _mode,
    "mean-field optimum of KL": _mean_field,
    "optimum of KL among normals": _exact,
    "optimum of KL within its family": _within_family,
    "moments of iterates": _iterates,
}
"""Statement -> its law; of none there is none."""
