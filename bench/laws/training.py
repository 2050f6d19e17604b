"""Laws of a fit: seeds, stopping and going on, frozen weights, counted parameters, settings."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.testing import assert_close
from torch.utils.data import TensorDataset

from bench.contract import Batch, Budget
from bench.errors import UsageError
from bench.laws import problems
from bench.laws.cases import (
    BUDGET,
    Case,
    StoppedError,
    assert_same_prediction,
    differ,
    generator,
    global_state,
    predict,
    stopped,
)
from bench.laws.law import (
    BY_TERMS,
    law,
    untrained,
)
from bench.laws.problems import tensors
from bench.settings import build


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
