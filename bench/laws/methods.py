"""Laws that every inference method obeys, as plain functions: tests call them, negative controls break them.

Each takes a `Case` and raises AssertionError if the law does not hold. Whatever is raised under a law comes
with a note of what the law posed: how many epochs of how many batches. Statistical laws compare a mean with
its own standard error under fixed seeds; the bound of 4.5 standard errors is passed by chance once in 150,000
comparisons (normal approximation), that of 5 once in 1.7 million.
"""

from __future__ import annotations

import copy
import inspect
import json
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils.data import TensorDataset

from bench import contract, likelihoods, predictions
from bench.contract import CAPABILITIES, OF_WEIGHTS, Batch, Budget, Method, Prediction, Problem
from bench.diagnostics import distinct_draws
from bench.divergence import log_prob
from bench.engine.engine import Engine, TrainerOptions
from bench.errors import UsageError
from bench.laws import problems
from bench.laws.problems import tensors
from bench.runs.registry import Entry
from bench.settings import build
from bench.weights import forward, ravel

BUDGET = Budget(epochs=2, batch_size=8)
PREDICTIONS = {
    likelihoods.Categorical: predictions.Categorical,
    likelihoods.Bernoulli: predictions.Bernoulli,
    likelihoods.Gaussian: predictions.Gaussian,
    likelihoods.Heteroscedastic: predictions.Gaussian,
}


POSED: list[str] = []
"""What was posed to fits since the present law began."""


class Told(Engine):
    """An engine that notes what it poses."""

    def _fit_all(
        self, problems: list[Problem], budget: Budget, *arguments: Any, **named: Any
    ) -> list[Method]:
        """Notes the budget, and what the method makes of it."""
        rows, size = len(problems[0].train), budget.batch_size or len(problems[0].train)
        posed = (
            f"{budget.epochs} epochs of {-(-rows // size)} batches, each of at most {size} of {rows} examples"
        )
        if budget.patience is not None:
            posed += f", with patience {budget.patience}"
        POSED.append(posed)
        return super()._fit_all(problems, budget, *arguments, **named)


Unfit = Callable[[Entry], str]
"""Why a law is not for a method; empty if it is."""


@dataclass(frozen=True)
class Law:
    """A law and what it is for.

    Attributes:
        holds: The function: `holds(case, ...)` raises AssertionError where the law does not hold.
        problems: Names of the problems that it poses.
        unfit: Reasons why it is not for a method; the first that there is counts.
        each: Further arguments, a tuple for each time that the law is held.
        is_slow: Whether it takes seconds.
    """

    holds: Callable[..., None]
    problems: tuple[str, ...]
    unfit: tuple[Unfit, ...]
    each: tuple[tuple[Any, ...], ...]
    is_slow: bool

    def is_not_for(self, entry: Entry) -> str:
        """Why the law is not for this method; empty if it is."""
        return next((reason for why in self.unfit if (reason := why(entry))), "")

    @property
    def leaves_files(self) -> bool:
        """Whether it takes an empty folder, after its case."""
        return "folder" in inspect.signature(self.holds).parameters


LAWS: dict[str, Law] = {}
"""All laws by name, in the order of this file."""


def law(
    *names: str,
    unfit: tuple[Unfit, ...] = (),
    each: tuple[tuple[Any, ...], ...] = ((),),
    is_slow: bool = False,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a function a law, whose failures say what it posed.

    Args:
        names: Of the problems that it poses; all of `problems.PROBLEMS` if none is named.
        unfit: See `Law`, as for the others.
        each: As there.
        is_slow: As there.
    """

    def made(function: Callable[..., None]) -> Callable[..., None]:
        @wraps(function)
        def checked(case: Case, *arguments: Any, **named: Any) -> None:
            POSED.clear()
            try:
                function(case, *arguments, **named)
            except Exception as error:
                posed = "; then ".join(dict.fromkeys(POSED)) or "no fit"
                error.add_note(
                    f"{function.__name__} posed to {case.cls.__name__} under {case.settings}: {posed}. "
                    "A method that spends another budget says so in `spends`."
                )
                raise

        LAWS[function.__name__] = Law(checked, names or tuple(problems.PROBLEMS), unfit, each, is_slow)
        return checked

    return made


# ------------------------------------------------------------------------------- for which methods a law is


def lacking(*capabilities: str) -> Unfit:
    """For methods that provide all of these."""

    def why(entry: Entry) -> str:
        missing = [name for name in capabilities if name not in entry.provides]
        return f"does not provide {missing[0]}" if missing else ""

    return why


def many(entry: Entry) -> str:
    """For single methods; the members of an ensemble are held to the law themselves."""
    return "" if entry.members == 1 else "an ensemble: its members are held to it"


def untrained(entry: Entry) -> str:
    """For methods that take training steps; of an ensemble the members do."""
    return many(entry) or ("" if entry.cls.trains else "takes no training steps")


def unmoved(entry: Entry) -> str:
    """For methods whose loss terms are evaluated under noise of their own."""
    return "" if entry.cls.draw_noise is not Method.draw_noise else "its loss has no noise"


def predicts_otherwise(entry: Entry) -> str:
    """For methods whose loss is over the very weights that predict: noise in both, or in neither."""
    fixed = unmoved(entry) and "weight_samples" in entry.provides
    return "its loss is at one value of the weights, its predictions are over draws" if fixed else ""


BY_TERMS = (untrained, lacking("loss_terms"))
"""Takes optimiser steps on declared loss terms."""
NOISY = (lacking("loss_terms"), unmoved)
VARIATIONAL = (*NOISY, lacking("weight_samples", "density"))
"""The loss is an expectation over a density that the method can draw from."""


def cases(entry: Entry, names: tuple[str, ...], **values: Any) -> dict[str, Case]:
    """A case on each problem named, and in place of a refused one what the method can infer.

    Args:
        entry: The method, under its preset smoke.
        names: Of problems.
        values: Settings other than those of the preset.
    """
    found: dict[str, Case] = {}
    for name in names:
        for instead in (name, *problems.INSTEAD.get(name, ())):
            case = case_of(entry, instead, **values)
            if instead not in found and case.refusal() is None:
                found[instead] = case
                break
    return found


def case_of(entry: Entry, problem: str, **values: Any) -> Case:
    """The method under its preset smoke, but for `values`, on a problem."""
    chosen = {**entry.fixed, **entry.presets.get("smoke", {}), **values}
    key = (entry.cls, repr(chosen), problem, entry.members)
    if key not in CASES:
        CASES[key] = Case(entry.cls, chosen, problems.posed(problem), entry.members)
    return CASES[key]


CASES: dict[tuple[Any, ...], Case] = {}
"""Made once, so that a refusal is asked for once."""
FITTED: dict[tuple[Any, ...], tuple[Case, Method]] = {}
"""Short fits that laws share, each with its case, whose problem must stay the one that the key names."""


class StoppedError(Exception):
    """Stands for whatever ends a run before its time."""


@contextmanager
def stopped() -> Iterator[None]:
    """The block must end in a stop."""
    try:
        yield
    except StoppedError:
        return
    raise AssertionError("the fit was over before it was stopped")


@dataclass(frozen=True)
class Case:
    """A method with settings and a problem; an ensemble, if it has more than one member."""

    cls: type[Method]
    values: dict[str, Any]
    problem: Problem
    members: int = 1

    @cached_property
    def settings(self) -> Any:
        """The settings that the values stand for."""
        return build(self.cls.settings_class, self.values, "method")

    @property
    def inputs(self) -> Tensor:
        """Held-out inputs."""
        return tensors(self.problem.val)[0]

    @property
    def batch(self) -> Batch:
        """All training examples."""
        return Batch(*tensors(self.problem.train))

    def engine(self, seed: int = 0, observer: Callable[..., None] | None = None, **kwargs: Any) -> Engine:
        """A fresh engine on the CPU."""
        kwargs |= {"trainer": TrainerOptions(accelerator="cpu"), "members": self.members}
        engine = Told(self.cls, self.settings, seed, **kwargs)
        if observer is not None:
            engine.observe(observer)
        return engine

    def fit(self, seed: int = 0, budget: Budget = BUDGET, **kwargs: Any) -> Method:
        """The method after a short fit."""
        return self.engine(seed, **kwargs).fit(self.problem, budget)

    def fitted(self) -> Method:
        """The method after a short fit, the same for all laws that leave it as it is."""
        key = (self.cls, repr(self.settings), id(self.problem), self.members)
        if key not in FITTED:
            FITTED[key] = self, self.fit()
        POSED.append(f"a fit shared by laws: {BUDGET}")
        return FITTED[key][1]

    def refusal(self) -> str | None:
        """Why the method cannot infer this problem, or None if it can."""
        return self._refusal

    @cached_property
    def _refusal(self) -> str | None:
        try:
            self.untrained()
        except UsageError as error:
            return str(error)
        return None

    def untrained(self, seed: int = 0) -> Method:
        """The method before training, its parameters moved off their start by N(0, 0.3^2).

        Tensors of over 1,000 parameters are moved no farther than one of 1,000: units that sum over thousands
        would saturate float32.
        """
        with torch.random.fork_rng(devices=[]):
            # Not torch.manual_seed, which formats the stack: 4 ms in a deep one.
            torch.default_generator.manual_seed(seed)
            method = self.cls(self.problem, self.settings)
            with torch.no_grad():
                for p in method.parameters():
                    p.add_(0.3 * min(1, (1_000 / p.numel()) ** 0.5) * torch.randn_like(p))
        return method

    def posterior(self) -> Method:
        """A posterior off its start: moved, where parameters are all there is to it, else the shared fit."""
        is_variational = self.members == 1 and {"loss_terms", "density"} <= self.cls.provides
        return self.untrained() if is_variational and self.cls.trains else self.fitted()

    def on(self, problem: Problem) -> Case:
        """The same method on another problem."""
        return replace(self, problem=problem)


# ------------------------------------------------------------------------------------------------ helpers


def generator(seed: int = 0) -> torch.Generator:
    """A generator of torch."""
    return torch.Generator().manual_seed(seed)


def predict(method: Method, inputs: Tensor, num_samples: int = 3, seed: int = 0) -> Prediction:
    """The prediction under a generator of this seed."""
    return method.predict(inputs, num_samples, generator(seed))


def assert_same_prediction(actual: Prediction, expected: Prediction, exact: bool = False) -> None:
    """Two predictions agree to the last bit, or to 1e-5 and to rounding of float32 at the largest entry."""
    assert type(actual) is type(expected)
    for name, value in vars(expected).items():
        rounding = 1e-7 * value.abs().max().item()
        tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-5, "atol": 1e-5 + rounding}
        assert_close(vars(actual)[name], value, **tolerance)


def differ(a: Prediction, b: Prediction) -> bool:
    """Whether two predictions differ in a bit."""
    return any(not torch.equal(vars(a)[name], value) for name, value in vars(b).items())


def is_deterministic(method: Method, inputs: Tensor) -> bool:
    """Whether the number of samples is not the one asked for, as of a point."""
    return len(first(predict(method, inputs, 3))) == len(first(predict(method, inputs, 4)))


def first(prediction: Prediction) -> Tensor:
    """The first array of a prediction, `[S, B, ...]`."""
    return next(iter(vars(prediction).values()))


def log_scores(prediction: Prediction, targets: Tensor) -> Tensor:
    """Log density of the targets under each sample alone, `[S, B]`."""
    samples = len(first(prediction))
    parts = [{name: v[s : s + 1] for name, v in vars(prediction).items()} for s in range(samples)]
    return torch.stack([type(prediction)(**part).log_score(targets) for part in parts])


def assert_mean_is(
    samples: Tensor, expected: float | Tensor, errors: float = 4.5, slack: float = 1e-5
) -> None:
    """The mean over the first axis equals `expected` within `errors` standard errors of the samples."""
    samples = samples.double()
    mean, error = samples.mean(0), samples.std(0) / len(samples) ** 0.5
    away = (mean - expected).abs() - errors * error - slack
    worst = away.flatten().argmax()
    right = torch.as_tensor(expected).double().expand_as(mean).flatten()[worst]
    assert away.max() <= 0, (
        f"a mean over draws is {mean.flatten()[worst]:.6g} with standard error "
        f"{error.flatten()[worst]:.2g}, not {right:.6g}"
    )


def optimised(method: Method) -> list[Tensor]:
    """The parameters that the method's optimisers get."""
    found = method.configure_optimizers()
    if isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], list | tuple):
        found = found[0]
    if isinstance(found, dict):
        found = found["optimizer"]
    optimisers = found if isinstance(found, list | tuple) else [found]
    optimisers = [o["optimizer"] if isinstance(o, dict) else o for o in optimisers]
    return [p for o in optimisers for group in o.param_groups for p in group["params"]]


def in_double(tensors: Any) -> Any:
    """Floating point tensors of a batch or of noise in float64."""
    if isinstance(tensors, dict):
        return {name: in_double(t) for name, t in tensors.items()}
    if isinstance(tensors, Batch):
        return Batch(*map(in_double, filter(lambda t: t is not None, tensors)))
    return tensors.double() if tensors.is_floating_point() else tensors


def one_sample(noise: dict[str, Tensor], s: int) -> dict[str, Tensor]:
    """The noise of one sample."""
    return {name: t[s : s + 1] for name, t in noise.items()}


def global_state() -> tuple[Any, ...]:
    """The states of the global generators of torch, numpy and Python."""
    return torch.random.get_rng_state().tolist(), repr(np.random.get_state(legacy=False)), random.getstate()


def state(method: torch.nn.Module) -> dict[str, Tensor]:
    """A copy of all numbers that a module holds."""
    return {name: value.clone() for name, value in method.state_dict().items()}


# -------------------------------------------------------------------------------------------- predictions


@law(*problems.ALL)
def predictions_are_valid(case: Case) -> None:
    """The likelihood's kind of prediction, [S, B, ...], finite, normalised; not one sample repeated."""
    method = case.fitted()
    for num_samples in (1, 4):
        prediction = predict(method, case.inputs, num_samples)
        right = PREDICTIONS[type(case.problem.likelihood)]
        assert type(prediction) is right, f"predicts {type(prediction).__name__}, not {right.__name__}"
        samples = case.members * (1 if is_deterministic(method, case.inputs) else num_samples)
        for value in vars(prediction).values():
            shape = tuple(value.shape[:2])
            assert shape == (samples, len(case.inputs)), (
                f"asked for {num_samples} samples of {len(case.inputs)} inputs, predicts {shape}"
            )
            assert value.isfinite().all(), "predictions are not finite"
            assert not value.requires_grad, "predictions have gradients"
        if isinstance(prediction, predictions.Categorical):
            assert_close(prediction.log_probs.exp().sum(-1), torch.ones(value.shape[:2]))
        if samples > 1:
            assert len(first(prediction).unique(dim=0)) > 1, "all samples are the same"


@law(*problems.ALL)
def prediction_ignores_its_company(case: Case) -> None:
    """What is predicted for an input depends neither on the split into batches nor on the order of rows."""
    method = case.fitted()
    rows = len(case.inputs)
    whole = predict(method, case.inputs)
    for sizes in ([1, 4, rows - 5], [1] * rows):
        parts = [predict(method, part) for part in case.inputs.split(sizes)]
        joined = {name: torch.cat([vars(p)[name] for p in parts], 1) for name in vars(whole)}
        assert_same_prediction(type(whole)(**joined), whole)
    order = torch.randperm(rows, generator=generator(5))
    shuffled = predict(method, case.inputs[order])
    expected = type(whole)(**{name: v[:, order] for name, v in vars(whole).items()})
    assert_same_prediction(shuffled, expected)
    many = predict(method, case.inputs.repeat(60, *[1] * (case.inputs.ndim - 1)))
    repeated = {name: v.repeat(1, 60, *[1] * (v.ndim - 2)) for name, v in vars(whole).items()}
    assert_same_prediction(many, type(whole)(**repeated))


@law()
def double_precision_is_kept(case: Case) -> None:
    """A method in float64 on data in float64 draws, trains and predicts in float64."""
    method = copy.deepcopy(case.posterior()).double()
    batch = in_double(case.batch)
    for value in vars(predict(method, batch.inputs)).values():
        assert value.dtype == torch.float64
    if "loss_terms" in method.provides:
        for term in method.loss_terms(batch, method.draw_noise(2, generator())):
            assert term.dtype == torch.float64
    if "weight_samples" in method.provides:
        assert all(w.dtype == torch.float64 for w in method.sample_weights(2, generator()).values())


@law()
def prediction_ignores_the_mode(case: Case) -> None:
    """Train and eval mode give the same prediction, and predicting changes neither mode."""
    method = case.fitted()
    method.train()
    training = predict(method, case.inputs)
    assert method.training
    method.eval()
    assert_same_prediction(predict(method, case.inputs), training, exact=True)
    assert not method.training


@law()
def prediction_follows_its_generator(case: Case) -> None:
    """Equal generators, equal predictions; another one changes those that are not deterministic."""
    method = case.fitted()
    assert_same_prediction(predict(method, case.inputs), predict(method, case.inputs), exact=True)
    if differ(predict(method, case.inputs, seed=1), predict(method, case.inputs)):
        assert not is_deterministic(method, case.inputs), "one sample, and another generator changes it"
    else:
        assert is_deterministic(method, case.inputs), "another generator gives the same samples"


@law()
def prediction_changes_nothing(case: Case) -> None:
    """Predicting changes no weight and no global random state."""
    method = case.fitted()
    weights, before, own = state(method), global_state(), method.generator.get_state()
    predict(method, case.inputs)
    assert global_state() == before, "predict drew from a global generator"
    assert torch.equal(method.generator.get_state(), own), "predict drew from the training generator"
    for name, value in method.state_dict().items():
        assert_close(value, weights[name], rtol=0, atol=0, msg=f"predict changed {name}")


# -------------------------------------------------------------------------------------------------- draws


def assert_distinct(found: int, asked: int, method: Method) -> None:
    """So many distinct draws of a method without an end of them are right.

    A method without `weight_samples` may draw from a finite set, as masks of dropout are, and repeat some.
    """
    least = asked if "weight_samples" in method.provides else asked // 2 + 1
    hint = "" if method.num_draws else "; draws that have an end are told by `num_draws`"
    assert found >= least, f"{asked} draws asked for, {found} of them are distinct{hint}"


@law("mlp", unfit=(many,))
def draws_are_distinct(case: Case, asked: int = 16) -> None:
    """S draws asked of the engine are S samples, distinct by content in weights and in predictions.

    A point is one. Where the draws have an end, as those of a chain, no more of them are seen when twice as
    many are asked for. The engine counts for the record what is there.
    """
    method, engine = case.fitted(), case.engine()
    if is_deterministic(method, case.inputs):
        prediction = engine.predict(method, case.inputs, asked)
        assert len(first(prediction)) == 1, f"{len(first(prediction))} samples of a point"
        assert engine.draws[-1]["distinct"] == 1
        return
    end = method.num_draws
    found = []
    for samples in (asked,) if end is None else (end, 2 * end):
        prediction = engine.predict(method, case.inputs, samples)
        assert len(first(prediction)) == samples, (
            f"{samples} samples asked for, {len(first(prediction))} made"
        )
        counted = engine.draws[-1]
        distinct = distinct_draws(prediction)
        assert (counted["asked"], counted["distinct"]) == (samples, distinct), f"the engine tells {counted}"
        drawn = [distinct]
        if "weight_samples" in method.provides:
            drawn.append(len(ravel(method.sample_weights(samples, generator())).unique(dim=0)))
        found.append(drawn)
    for of_all in found[0]:
        if end is None:
            assert_distinct(of_all, asked, method)
    assert found[0] == found[-1], f"of {end} draws {found[0][-1]} come when all are asked for, of which more"


@law("mlp", unfit=(many,))
def averages_of_draws_tighten(case: Case, asked: int = 8, repeats: int = 200) -> None:
    """Over repeats an average of S draws has at most 1 / S of the variance of one, times 1.5.

    Averaged is whether a random sum of what is predicted lies above its median over all draws: of independent
    draws the average is binomial, whatever their distribution, and 1.5 is exceeded with probability 8e-7.
    False alarm: three sums, 2.5e-6. Draws that come twice have a factor of 2. Draws that have an end are left
    out: they are taken without replacement.
    """
    method, engine = case.fitted(), case.engine()
    if method.num_draws is not None or is_deterministic(method, case.inputs):
        return
    predicted = []
    for _ in range(repeats):
        prediction = engine.predict(method, case.inputs, asked)
        values = first(prediction)
        values = values.exp() if isinstance(prediction, predictions.Categorical) else values
        predicted.append(values.flatten(1).double())
    seen = torch.stack(predicted)  # [R, S, V]
    sums = seen @ torch.randn(seen.shape[-1], 3, generator=generator(), dtype=torch.float64)  # [R, S, 3]
    above = (sums > sums.flatten(0, 1).median(0).values).double()
    share = above.mean((0, 1))
    one = share * (1 - share)
    assert (one > 0).all(), "more than half of all draws predict the same"
    factor = (above.mean(1).var(0) / (one / asked)).max().item()
    assert factor <= 1.5, (
        f"an average of {asked} draws has {factor:.2f} times the variance of one draw over {asked}"
    )


@law("mlp", unfit=(many,))
def no_stream_serves_twice(case: Case, asked: int = 4) -> None:
    """Predictions of a run, in one stage and in two, are under draws of their own; so are its fits.

    Shared by design are the draws of one prediction, by all inputs; those of fits that differ in the weights
    of examples (`fit_weighted`); and those behind the validation NLL, by all epochs.
    """
    method, engine = case.fitted(), case.engine()
    made = []
    for stage in ("one", "one", "two"):
        engine.stage(stage)
        made.append(engine.predict(method, case.inputs, asked))
    if method.num_draws is None and not is_deterministic(method, case.inputs):
        joined = {name: torch.cat([vars(p)[name] for p in made]) for name in vars(made[0])}
        assert_distinct(distinct_draws(type(made[0])(**joined)), len(made) * asked, method)
    if case.cls.seed_matters:  # the shared fit is the first of its run too, under the same seed
        engine.stage("another than that of the shared fit")
        fits = [method, engine.fit(case.problem, BUDGET), engine.fit(case.problem, BUDGET)]
        said = [predict(fit, case.inputs) for fit in fits]
        for i, j in ((0, 1), (0, 2), (1, 2)):
            assert differ(said[i], said[j]), "two fits of a run are the same"
            seeds = [fits[k].generator.initial_seed() for k in (i, j)]
            assert seeds[0] != seeds[1], "two fits of a run are under the same noise"


# --------------------------------------------------------------------------------------------------- loss


@law(*problems.ALL, unfit=BY_TERMS)
def gradients_reach_every_parameter(case: Case) -> None:
    """After one step every trained parameter has a finite gradient that is not zero everywhere."""
    method = case.untrained()
    method.training_step(case.batch, 0)["loss"].backward()
    trained = {id(p) for p in optimised(method)}
    assert trained, "the optimiser gets no parameter"
    for name, p in method.named_parameters():
        assert id(p) in trained or not p.requires_grad, f"no optimiser gets {name}"
        if id(p) in trained:
            assert p.grad is not None, f"{name} has no gradient"
            assert p.grad.isfinite().all(), f"the gradient of {name} is not finite"
            assert p.grad.any(), f"the gradient of {name} is zero"


@law(*problems.ALL, unfit=NOISY)
def sample_gradients_average(case: Case, num_samples: int = 3) -> None:
    """The S-sample gradient of each loss term is the mean of the S one-sample gradients; so are the terms."""
    method = case.untrained().double()
    batch = in_double(case.batch)
    noise = in_double(method.draw_noise(num_samples, generator()))
    parameters = [p for p in method.parameters() if p.requires_grad]

    def evaluate(noise: dict[str, Tensor]) -> list[list[Tensor]]:
        terms = method.loss_terms(batch, noise)
        kind: Any = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
        return [[t, *torch.autograd.grad(t, parameters, **kind)] for t in terms]

    together = evaluate(noise)
    singles = [evaluate(one_sample(noise, s)) for s in range(num_samples)]
    for term in (0, 1):
        for i, value in enumerate(together[term]):
            mean = torch.stack([single[term][i] for single in singles]).mean(0)
            assert_close(value, mean, rtol=1e-9, atol=1e-9)


@law(unfit=(lacking("loss_terms"),))
def batch_size_does_not_matter(case: Case, repetitions: int = 60) -> None:
    """The mean of the batches' losses, weighted by their rows, is the full batch's loss in expectation.

    With equal noise: methods whose noise does not depend on the rows agree exactly. False alarm: 2e-5.
    """
    method = case.untrained()
    rows = len(case.batch.inputs)
    sizes = [1, 6, rows - 7]
    batches = [Batch(*parts) for parts in zip(*(t.split(sizes) for t in case.batch[:2]), strict=True)]
    differences, full_loss = [], 0.0
    g = generator()
    with torch.no_grad():
        for _ in range(repetitions):
            noise = method.draw_noise(1, g)
            full = torch.stack(method.loss_terms(case.batch, noise))
            parts = [torch.stack(method.loss_terms(b, noise)) * len(b.inputs) / rows for b in batches]
            differences.append(torch.stack(parts).sum(0) - full)
            full_loss = full.abs().sum().item()
    assert_mean_is(torch.stack(differences), 0.0, slack=1e-5 * (1 + full_loss))


@law(unfit=(lacking("loss_terms"),))
def one_row_is_a_batch(case: Case) -> None:
    """A batch of one row has a finite loss that trains the network, and a prediction."""
    method = case.untrained()
    batch = Batch(*(t[:1] for t in case.batch[:2]))
    likelihood_term, prior_term = method.loss_terms(batch, method.draw_noise(1, generator()))
    assert likelihood_term.isfinite()
    assert prior_term.isfinite()
    likelihood_term.backward()
    assert any(p.grad is not None and p.grad.any() for p in method.parameters()), "the row trains nothing"
    fitted = case.fitted()
    assert first(predict(fitted, case.inputs[:1])).shape[1] == 1


@law("mlp", "regression", unfit=(lacking("weighted", "loss_terms"),), each=((2,), (0,)))
def weights_count_examples(case: Case, weight: int, repetitions: int = 80) -> None:
    """An example of weight 2 is the example twice, one of weight 0 is absent, in expectation over the noise.

    Exact where the noise does not depend on the rows. False alarm: 7e-6.
    """
    rows = torch.arange(len(case.batch.inputs))
    changed = rows < 10
    weights = torch.where(changed, float(weight), 1.0)
    weighted = case.on(problems.with_rows(case.problem, rows, weights))
    counted = case.on(problems.with_rows(case.problem, rows.repeat_interleave(weights.long())))
    a, b = weighted.untrained(), counted.untrained()
    g, differences, size = generator(), [], 0.0
    with torch.no_grad():
        for _ in range(repetitions):
            noise = a.draw_noise(1, g)
            expected = torch.stack(b.loss_terms(counted.batch, noise))
            differences.append(torch.stack(a.loss_terms(weighted.batch, noise)) - expected)
            size = expected.abs().sum().item()
    assert_mean_is(torch.stack(differences), 0.0, slack=1e-5 * (1 + size))


@law("mlp", unfit=(lacking("weighted"),))
def reweighted_fits_are_those_made_one_by_one(case: Case) -> None:
    """Fits under several weightings predict what fits to the weighted examples predict, made one by one.

    An example of weight 0 is not in the data, and all fits predict under the same draws.
    """
    rows = len(case.batch.inputs)
    weights = torch.rand(3, rows, generator=generator(6)) + 0.1
    weights[0], weights[1, ::3], weights[2, 5:] = 1.0, 0.0, 0.0
    together, alone = case.engine(), case.engine()
    method = together.fit_weighted(case.problem, weights, BUDGET)
    expected = []
    for w in weights:
        kept = w.nonzero().squeeze(1)
        expected.append(alone.fit(problems.with_rows(case.problem, kept, w[kept]), BUDGET))
    prediction = predict(method, case.inputs)
    singles = [predict(m, case.inputs) for m in expected]
    joined = {name: torch.cat([vars(p)[name] for p in singles]) for name in vars(prediction)}
    assert_same_prediction(prediction, type(prediction)(**joined))
    assert differ(singles[1], singles[0])


@law("mlp", unfit=(*BY_TERMS, lacking("weighted")))
def weights_reach_training(case: Case) -> None:
    """Weights of the data set reach the loss: with all of them zero there is no likelihood left."""
    rows = torch.arange(len(case.batch.inputs))
    method = case.on(problems.with_rows(case.problem, rows, torch.zeros(len(rows)))).fit()
    assert [row["likelihood_term"] for row in method.history] == [0.0] * len(method.history)


@law(unfit=(lacking("loss_terms"), predicts_otherwise))
def likelihood_term_is_of_the_predictions(case: Case, samples: int = 150) -> None:
    """The likelihood term is -log p(targets) under the predictive samples, in the mean. False alarm: 7e-6."""
    method = case.untrained()
    g = generator(7)
    with torch.no_grad():
        terms = [method.loss_terms(case.batch, method.draw_noise(1, g))[0] for _ in range(samples)]
    scores = -log_scores(predict(method, case.batch.inputs, samples), case.batch.targets).sum(1)
    if len(scores) == 1:
        scores = scores.expand(samples)
    assert_mean_is(torch.stack(terms) - scores, 0.0, slack=1e-4 * scores.mean().abs().item())


@law(*problems.ALL, unfit=VARIATIONAL)
def prior_term_is_the_divergence(case: Case, samples: int = 150) -> None:
    """The prior term is E_q[log q(w) - log prior(w)] over draws of the weights. False alarm: 7e-6."""
    method = case.untrained()
    g = generator(8)
    draws = method.sample_weights(samples, g)
    with torch.no_grad():
        ratios = method.log_prob(draws) - log_prob(method.prior, draws)
        terms = torch.stack(
            [method.loss_terms(case.batch, method.draw_noise(1, g))[1] for _ in range(samples)]
        )
    assert_mean_is(ratios - terms, 0.0, slack=1e-4 * terms.mean().abs().item())


# ----------------------------------------------------------------------------------------------- training


@law("mlp", "regression", unfit=BY_TERMS, is_slow=True)
def training_fits_the_data(case: Case) -> None:
    """After sixty epochs the training data are predicted better than after one."""
    nlls = []
    for epochs in (1, 60):
        prediction = predict(case.fit(budget=Budget(epochs, 8)), case.batch.inputs, 50)
        nlls.append(-prediction.log_score(case.batch.targets).mean().item())
    assert nlls[1] < nlls[0], f"NLL from {nlls[0]} to {nlls[1]}"


@law(unfit=BY_TERMS)
def history_tells_the_terms(case: Case) -> None:
    """Each epoch leaves loss, likelihood term and prior term; loss = likelihood + prior weight * prior."""
    method = case.fit(budget=Budget(3, 8))
    assert [row["epoch"] for row in method.history] == list(range(1, 1 + method.spends(Budget(3)).epochs))
    for row in method.history[method.extra_epochs :]:
        expected = row["likelihood_term"] + method.prior_weight * row["prior_term"]
        assert math.isclose(row["loss"], expected, rel_tol=1e-5, abs_tol=1e-6), (
            f"loss {row['loss']:.6g}, likelihood term + prior weight * prior term {expected:.6g}"
        )
        assert row["prior_term"] != 0
        assert row["likelihood_term"] != 0


@law()
def seed_decides(case: Case) -> None:
    """Equal seeds give equal predictions bit by bit, whatever the global state.

    Another seed gives others, unless the method says that it does not matter (`seed_matters`).
    """
    budget = Budget(2)  # full batch: the order of the data must not be all that the seed decides
    once = predict(case.fit(seed=3, budget=budget), case.inputs)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(99)
        again = predict(case.fit(seed=3, budget=budget), case.inputs)
    assert_same_prediction(again, once, exact=True)
    other = predict(case.fit(seed=4, budget=budget), case.inputs)
    matters = differ(other, once)
    assert matters or not case.cls.seed_matters, "another seed gives the same predictions"
    assert case.cls.seed_matters or not matters, "another seed gives other predictions; seed_matters is False"


@law()
def fit_leaves_global_state(case: Case) -> None:
    """A whole fit and the engine's prediction leave the global random states as they were."""
    before = global_state()
    engine = case.engine()
    method = engine.fit(case.problem, BUDGET)
    engine.predict(method, case.inputs, 2)
    assert global_state() == before, "a fit or prediction changed a global random state"


@law()
def fit_leaves_the_problem(case: Case) -> None:
    """A fit changes neither the data nor the likelihood that the task posed."""
    problem = copy.deepcopy(case.problem)
    case.fit()
    for a, b in zip(tensors(problem.train), tensors(case.problem.train), strict=True):
        assert torch.equal(a, b), "the fit changed the training data"
    for name, value in problem.likelihood.state_dict().items():
        after = case.problem.likelihood.state_dict()[name]
        assert torch.equal(value, after), f"the fit changed {name} of the task's likelihood"


@law("mlp")
def frozen_weights_stay(case: Case) -> None:
    """What a task froze is the same to the last bit after a fit; a method may refuse the network."""
    case = case.on(problems.frozen())
    if case.refusal() is not None:
        return
    given = dict(problems.pretrained().named_buffers())
    fitted = case.fit()
    for member in getattr(fitted, "members", [fitted]):
        found = dict(member.network.named_buffers())
        for name, value in given.items():
            assert torch.equal(found[name], value), f"the fit changed {name}, which is frozen"


@law()
def finished_fit_is_found_again(case: Case, folder: Path) -> None:
    """A second engine on the same folder gives equal predictions without training."""
    fitted = case.fit(checkpoints=folder)
    expected = predict(fitted, case.inputs)
    files = list(folder.iterdir())
    assert [f.suffix for f in files] == [".ckpt"] * case.members
    torch.load(files[0], weights_only=True)

    class NotAgain(case.cls):  # type: ignore[name-defined]
        def training_step(self, batch: Batch, batch_idx: int) -> Any:
            raise AssertionError("trained again")

        def finish_fit(self, loader: Any) -> None:
            raise AssertionError("finished again")

    found = replace(case, cls=NotAgain).fit(checkpoints=folder)
    assert_same_prediction(predict(found, case.inputs), expected, exact=True)
    assert found.history == fitted.history
    assert found.epoch == fitted.epoch


@law(unfit=(untrained,), each=((None,), (3,)))
def stopped_fit_goes_on(case: Case, folder: Path, patience: int | None) -> None:
    """A fit that was stopped half-way and started again ends with the same numbers, bit by bit."""
    budget, stop_at = Budget(5, 8), 3
    if patience is not None:  # stop between the best epoch and the end, where patience is being counted
        case, budget = contradicted(case), Budget(60, 8, patience)
        counts = case.untrained().spends(budget).patience is not None
        budget = budget if counts else replace(budget, epochs=5)  # no use in more: it trains all of them
    expected = case.fit(budget=budget)
    if patience is not None:
        stop_at = len(expected.history) - 1
        assert not counts or len(expected.history) < budget.epochs, "patience did not stop it"

    def stop(event: str, values: dict[str, Any]) -> None:
        if event == "epoch" and values["epoch"] == stop_at:
            raise StoppedError

    with stopped():
        case.fit(budget=budget, checkpoints=folder, checkpoint_seconds=0, observer=stop)
    assert [f.suffix for f in folder.iterdir()] == [".partial"]
    torch.load(next(folder.iterdir()), weights_only=True)
    seen = []
    resumed = case.fit(
        budget=budget,
        checkpoints=folder,
        observer=lambda event, values: seen.append(values["epoch"]) if event == "epoch" else None,
    )
    assert seen == list(range(stop_at, 1 + len(expected.history))), "the epochs trained after the stop"
    assert resumed.history == expected.history, "a fit that was stopped and resumed has another history"
    assert_same_prediction(predict(resumed, case.inputs), predict(expected, case.inputs), exact=True)
    for name, value in expected.state_dict().items():
        assert_close(resumed.state_dict()[name], value, rtol=0, atol=0)
    assert torch.equal(resumed.generator.get_state(), expected.generator.get_state())
    assert [f.suffix for f in folder.iterdir()] == [".ckpt"]


@law("mlp", unfit=(untrained,))
def stopped_epoch_goes_on(case: Case, folder: Path) -> None:
    """Trained on examples from disk, a fit goes on inside the epoch in which it was stopped, bit by bit."""
    case, budget = case.on(problems.on_disk(case.problem, num_uniforms=2)), Budget(3, 6)
    engine = case.engine()
    expected = engine.fit(case.problem, budget)

    class Stops(case.cls):  # type: ignore[name-defined]
        steps_seen = 0

        def training_step(self, batch: Batch, batch_idx: int) -> Any:
            self.steps_seen += 1
            if self.steps_seen == 7:  # the third of four steps of the second epoch
                raise StoppedError
            return super().training_step(batch, batch_idx)

    with stopped():
        replace(case, cls=Stops).fit(budget=budget, checkpoints=folder, checkpoint_seconds=0)
    Stops.steps_seen = 100
    resumed = replace(case, cls=Stops).fit(budget=budget, checkpoints=folder)
    assert resumed.steps_seen == 100 + engine.fits[0]["steps"] - 6, "the steps trained after the stop"
    assert resumed.history == expected.history, "a fit that was stopped and resumed has another history"
    for name, value in expected.state_dict().items():
        assert_close(resumed.state_dict()[name], value, rtol=0, atol=0)
    assert torch.equal(resumed.generator.get_state(), expected.generator.get_state())


def contradicted(case: Case) -> Case:
    """The case with fast training and validation labels that contradict the training labels."""
    inputs, targets = tensors(case.problem.train)
    wrong = targets.roll(7, 0) if targets.is_floating_point() else (targets + 1) % 3
    values = dict(case.values)
    if "learning_rate" in {f.name for f in fields(case.cls.settings_class)}:
        values["learning_rate"] = 0.02
    return replace(case, values=values).on(replace(case.problem, val=TensorDataset(inputs, wrong)))


@law("mlp", "regression", unfit=BY_TERMS)
def patience_keeps_the_best_epoch(case: Case, patience: int = 3) -> None:
    """Where labels contradict what is learned, training stops early and keeps the best epoch."""
    case = contradicted(case)
    inputs, wrong = tensors(case.problem.val)

    class AsTrained(case.cls):  # type: ignore[name-defined]
        def finish_fit(self, loader: Any) -> None:
            """What follows training may change the predictions that the epochs were compared by."""

    method = replace(case, cls=AsTrained).fit(budget=Budget(300, None, patience))
    nlls = [row["val_nll"] for row in method.history]
    best = method.warmup_epochs + int(np.argmin(nlls[method.warmup_epochs :]))
    assert len(nlls) == best + 1 + patience, f"best of {len(nlls)} epochs is {best + 1}"
    prediction = method.predict(inputs, method.validation_samples, generator(0))
    kept = -prediction.log_score(wrong).mean().item()
    assert math.isclose(kept, nlls[best], rel_tol=1e-6), (
        f"NLL {kept:.6g} after the fit, {nlls[best]:.6g} in the best epoch"
    )
    assert kept < nlls[-1]


@law()
def parameters_are_counted(case: Case) -> None:
    """`parameters_per_weight` is what the optimiser gets per weight; a method without one says None.

    Parameters of the likelihood do not count; nor do up to 5% beside those that go by weights.
    """
    method = case.cls(case.problem, case.settings)
    noise = {id(p) for p in method.likelihood.parameters()}
    trained = sum(p.numel() for p in method.parameters() if p.requires_grad and id(p) not in noise)
    found = trained / sum(p.numel() for p in method.network.parameters())
    said = case.cls.parameters_per_weight(case.settings)
    if said is None:
        assert found > 1, f"{found:.3g} per weight are no more than the network's own"
    else:
        assert abs(said - max(found, 1)) <= 0.05 * max(found, 1), (
            f"says {said:.3g} per weight, has {found:.3g}"
        )


# ----------------------------------------------------------------------------------------------- settings


@law("mlp")
def settings_survive_json(case: Case) -> None:
    """Settings to dictionary to JSON to settings are equal, off the defaults too."""
    for values in ({}, {"learning_rate": 0.0123}):
        names = {f.name for f in fields(case.cls.settings_class)}
        chosen = build(
            case.cls.settings_class,
            {**case.values, **{k: v for k, v in values.items() if k in names}},
            "method",
        )
        again = build(case.cls.settings_class, json.loads(json.dumps(asdict(chosen))), "method")
        assert again == chosen


@law("mlp")
def bad_settings_are_refused(case: Case) -> None:
    """A wrong value and an unknown name raise UsageError, one line that names the flag."""
    for name in [f.name for f in fields(case.cls.settings_class)] + ["no_such_setting"]:
        try:
            build(case.cls.settings_class, {**case.values, name: "nonsense"}, "method")
        except UsageError as error:
            said = str(error)
        else:
            raise AssertionError(f"{name} takes the text 'nonsense'")
        for part in (f"--method.{name} ", "nonsense"):
            assert part in said, f"the refusal of a wrong {name} lacks '{part}': {said}"
        assert "\n" not in said, f"the refusal of a wrong {name} has several lines"


# ------------------------------------------------------------------------------------------- capabilities


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
