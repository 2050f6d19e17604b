"""Methods on problems, as the laws pose them, and what the laws compare.

Short fits are made once and shared by all laws that leave them as they are.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.testing import assert_close

from bench import likelihoods, predictions
from bench.contract import Batch, Budget, Method, Prediction, Problem
from bench.engine.engine import Engine, TrainerOptions
from bench.errors import UsageError
from bench.laws import problems
from bench.laws.problems import tensors
from bench.runs.registry import Entry
from bench.settings import build

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
