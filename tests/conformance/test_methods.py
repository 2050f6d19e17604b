"""Every discovered method obeys the laws; `pytest tests/conformance -k NAME` checks one method."""

import importlib
from functools import cache

import pytest
from conformance import laws, problems
from conformance.laws import Case

from bench.contract import Method
from bench.runs import registry

ALL = problems.PROBLEMS | problems.UNUSUAL


@cache
def case_of(method, problem):
    """The method under its preset smoke, on a problem; or None if it refuses the problem."""
    entry = registry.method(method)
    values = {**entry.fixed, **entry.presets.get("smoke", {})}
    case = Case(entry.cls, values, ALL[problem](), entry.members)
    return None if case.refusal() else case


def accepted(entry, names):
    """The problems to take: those named, and in place of a refused one what the method can infer."""
    found = {}
    for name in names:
        for instead in (name, *problems.INSTEAD.get(name, ())):
            if instead not in found and (case := case_of(entry.name, instead)) is not None:
                found[instead] = case
                break
    return found


def cases(*names, where=lambda entry: True):
    """A case for every method that `where` holds for and every named problem.

    The quick tests try every method file once, on the first problem; all others are slow.
    """
    found, tried = [], set()
    for entry in filter(where, registry.methods().values()):
        for problem, case in accepted(entry, names or problems.PROBLEMS).items():
            marks = [pytest.mark.slow] if entry.file in tried else []
            tried.add(entry.file)
            found.append(pytest.param(case, id=f"{entry.name}-{problem}", marks=marks))
    return pytest.mark.parametrize("case", found)


def providing(*capabilities):
    """Whether a method declares all of these."""
    return lambda entry: entry.provides.issuperset(capabilities)


def trains(entry):
    """Whether a method takes training steps; of an ensemble the members do."""
    return entry.cls.trains and entry.members == 1


def trains_by_terms(entry):
    """Whether a method takes optimiser steps on declared loss terms."""
    return trains(entry) and "loss_terms" in entry.provides


def draws(entry):
    """Whether a method's loss terms are evaluated under noise of its own."""
    return "loss_terms" in entry.provides and entry.cls.draw_noise is not Method.draw_noise


def is_variational(entry):
    """Whether the loss is an expectation over a density that the method can draw from."""
    return draws(entry) and entry.provides.issuperset({"weight_samples", "density"})


def loss_is_over_its_predictions(entry):
    """Whether the loss is over the very weights that predict: noise in both, or in neither."""
    return "loss_terms" in entry.provides and (draws(entry) or "weight_samples" not in entry.provides)


def test_methods_are_discovered():
    """The registry knows the first methods, so the suite below is not empty."""
    assert registry.methods().keys() >= {"map", "mfvi", "radial", "mc_dropout"}


@pytest.mark.parametrize("name", registry.methods())
def test_every_method_is_tried(name):
    """What a method refuses it refuses in one line, and it infers something of each kind that it can."""
    entry = registry.method(name)
    values = {**entry.fixed, **entry.presets.get("smoke", {})}
    for problem in ALL.values():
        refusal = Case(entry.cls, values, problem()).refusal()
        assert refusal is None or ("\n" not in refusal and name.split("_")[0] in refusal)
    assert accepted(entry, problems.PROBLEMS)


# ---- predictions


@cases(*ALL)
def test_predictions_are_valid(case):
    """Right kind and shape, finite, normalised, and not one sample repeated."""
    laws.predictions_are_valid(case)


@cases(*ALL)
def test_prediction_ignores_its_company(case):
    """Neither batch split nor row order matters; one row is enough."""
    laws.prediction_ignores_its_company(case)


@cases()
def test_double_precision_is_kept(case):
    """Float64 stays float64."""
    laws.double_precision_is_kept(case)


@cases()
def test_prediction_ignores_the_mode(case):
    """Train and eval mode predict the same."""
    laws.prediction_ignores_the_mode(case)


@cases()
def test_prediction_follows_its_generator(case):
    """The generator decides the draws, and nothing else does."""
    laws.prediction_follows_its_generator(case)


@cases()
def test_prediction_changes_nothing(case):
    """No weight and no global random state changes."""
    laws.prediction_changes_nothing(case)


# ---- loss


@cases(*ALL, where=trains_by_terms)
def test_gradients_reach_every_parameter(case):
    """Every parameter that the optimiser gets is trained by one step."""
    laws.gradients_reach_every_parameter(case)


@cases(*ALL, where=draws)
def test_sample_gradients_average(case):
    """S samples at once give the mean gradient of S samples one by one, in float64."""
    laws.sample_gradients_average(case)


@cases(where=providing("loss_terms"))
def test_batch_size_does_not_matter(case):
    """The loss is on the scale of the full training set at every batch size; false alarm 7e-6."""
    laws.batch_size_does_not_matter(case)


@cases(where=providing("loss_terms"))
def test_one_row_is_a_batch(case):
    """One row has a loss and a prediction."""
    laws.one_row_is_a_batch(case)


@cases("mlp", "regression", where=providing("weighted", "loss_terms"))
@pytest.mark.parametrize("weight", [2, 0])
def test_weights_count_examples(case, weight):
    """Weight 2 is the example twice, weight 0 is the example absent; false alarm 7e-6."""
    laws.weights_count_examples(case, weight)


@cases("mlp", where=lambda entry: trains_by_terms(entry) and "weighted" in entry.provides)
def test_weights_reach_training(case):
    """The weights of the data set reach the training loss through the engine."""
    laws.weights_reach_training(case)


@cases("mlp", where=providing("weighted"))
def test_reweighted_fits_are_those_made_one_by_one(case):
    """Several weightings at once are several fits."""
    laws.reweighted_fits_are_those_made_one_by_one(case)


@cases(where=loss_is_over_its_predictions)
def test_likelihood_term_is_of_the_predictions(case):
    """Training and prediction speak of the same network; false alarm 7e-6."""
    laws.likelihood_term_is_of_the_predictions(case)


@cases(*ALL, where=is_variational)
def test_prior_term_is_the_divergence(case):
    """The prior term is KL(q || prior) by Monte Carlo; false alarm 7e-6."""
    laws.prior_term_is_the_divergence(case)


# ---- training


@pytest.mark.slow
@cases("mlp", "regression", where=trains_by_terms)
def test_training_fits_the_data(case):
    """Training goes downhill."""
    laws.training_fits_the_data(case)


@cases(where=trains_by_terms)
def test_history_tells_the_terms(case):
    """History rows hold loss = likelihood term + prior weight * prior term."""
    laws.history_tells_the_terms(case)


@cases()
def test_seed_decides(case):
    """Same seed, same numbers; other seed, other numbers where the method says so."""
    laws.seed_decides(case)


@cases()
def test_fit_leaves_global_state(case):
    """Global random states survive a fit."""
    laws.fit_leaves_global_state(case)


@cases()
def test_fit_leaves_the_problem(case):
    """Data and likelihood of the task survive a fit."""
    laws.fit_leaves_the_problem(case)


@cases("mlp")
def test_frozen_weights_stay(case):
    """What a task froze, in layers that share it too, is the same to the last bit after a fit."""
    laws.frozen_weights_stay(case)


@cases()
def test_finished_fit_is_found_again(case, tmp_path):
    """A finished fit is read from its checkpoint, not trained again."""
    laws.finished_fit_is_found_again(case, tmp_path)


@cases(where=trains)
def test_stopped_fit_goes_on(case, tmp_path):
    """A stopped fit ends with the numbers of one that was not stopped."""
    laws.stopped_fit_goes_on(case, tmp_path, None)


@cases("mlp", where=trains)
def test_stopped_epoch_goes_on(case, tmp_path):
    """Examples from disk: an epoch goes on where it was stopped."""
    laws.stopped_epoch_goes_on(case, tmp_path)


@cases(where=trains)
def test_stopped_fit_goes_on_where_patience_is_counted(case, tmp_path):
    """A fit that was stopped between its best epoch and its end ends with the same numbers."""
    laws.stopped_fit_goes_on(case, tmp_path, 3)


@cases("mlp", "regression", where=trains_by_terms)
def test_patience_keeps_the_best_epoch(case):
    """Early stopping stops, and the best epoch is what remains."""
    laws.patience_keeps_the_best_epoch(case)


@cases()
def test_parameters_are_counted(case):
    """A method says how many numbers it trains per weight."""
    laws.parameters_are_counted(case)


# ---- settings


@cases("mlp")
def test_settings_survive_json(case):
    """Settings pass through JSON unchanged."""
    laws.settings_survive_json(case)


@cases("mlp")
def test_bad_settings_are_refused(case):
    """Wrong settings end in one line."""
    laws.bad_settings_are_refused(case)


# ---- capabilities


@cases("mlp", where=lambda entry: entry.members == 1)
def test_undeclared_capabilities_raise(case):
    """What is not declared is not there."""
    laws.undeclared_capabilities_raise(case)


@cases("cnn", where=lambda entry: entry.members == 1)
def test_weights_are_those_posed(case):
    """Capabilities over weights are over the posed network's."""
    laws.weights_are_those_posed(case)


@cases(where=providing("weight_samples"))
def test_weight_samples_have_shape(case):
    """Draws are stacked weights."""
    laws.weight_samples_have_shape(case)


@cases(where=providing("weight_samples"))
def test_predictions_are_of_the_weight_samples(case):
    """Predictions are those of drawn weights; false alarm 5e-4."""
    laws.predictions_are_of_the_weight_samples(case)


@cases("mlp", where=providing("density", "weight_samples"))
def test_density_integrates_to_one(case):
    """The density has its normaliser; false alarm 3e-5."""
    laws.density_integrates_to_one(case)


@cases("mlp", "cnn", where=providing("density", "weight_samples"))
def test_density_fits_the_samples(case):
    """The density's slope is that of the draws; false alarm 7e-6."""
    laws.density_fits_the_samples(case)


@cases("mlp", "cnn", where=providing("moments", "weight_samples"))
def test_moments_are_those_of_the_samples(case):
    """Moments are those of the draws; false alarm 1e-4."""
    laws.moments_are_those_of_the_samples(case)


@cases(*ALL, where=providing("sequential"))
def test_posterior_becomes_the_prior(case):
    """A posterior serves as the next prior, and stays what it was."""
    laws.posterior_becomes_the_prior(case)


@cases("mlp", where=providing("scale_settable"))
def test_scale_is_set_from_outside(case):
    """One sigma for all weights; false alarm 1e-4."""
    laws.scale_is_set_from_outside(case)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [n for n, e in registry.methods().items() if {"exact_when_linear", "invariant"} & e.provides]
)
def test_draws_are_of_the_exact_posterior(name):
    """Mean and covariance are the exact posterior's where it is known; false alarm 1e-4."""
    entry = registry.method(name)
    oracle = importlib.import_module(f"oracles.test_{entry.file}")
    values = {**entry.fixed, **entry.presets.get("smoke", {}), **getattr(oracle, "EXACT", {})}
    case = Case(entry.cls, values, problems.linear(), entry.members)
    laws.draws_are_of_the_exact_posterior(case)
