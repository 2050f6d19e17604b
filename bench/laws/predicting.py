"""Laws of what a method predicts: shapes, independence of rows, and draws that are draws.

Statistical laws compare a mean with its own standard error under fixed seeds. The bound of 4.5 standard
errors is passed by chance once in 150,000 comparisons (normal approximation), that of 5 once in 1.7 million.
"""

from __future__ import annotations

import copy

import torch
from torch.testing import assert_close

from bench import predictions
from bench.contract import Method
from bench.diagnostics import distinct_draws
from bench.laws import problems
from bench.laws.cases import (
    BUDGET,
    PREDICTIONS,
    Case,
    assert_same_prediction,
    differ,
    first,
    generator,
    global_state,
    in_double,
    is_deterministic,
    predict,
    state,
)
from bench.laws.law import (
    law,
    many,
)
from bench.weights import ravel


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
