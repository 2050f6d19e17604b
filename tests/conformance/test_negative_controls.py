"""Deliberately broken methods: each must fail the law that it breaks, or the law sees nothing."""

# ruff: noqa: D102

import random
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from bench import randomness
from bench.batches import StoredBatches
from bench.contract import Budget
from bench.engine import checkpoints, predicting
from bench.engine import engine as engine_file
from bench.laws.cases import Case
from bench.methods.map import MAP
from bench.methods.mc_dropout import MCDropout
from bench.methods.mfvi import MFVI
from bench.methods.sgld import SGLD
from bench.priors import normal_tensor
from bench.weights import forward
from conformance import laws, problems


def likelihood_of(method, batch, noise):
    """The likelihood term of mean-field VI, by the loop walk, one sample after another."""
    posterior = method.posterior()
    terms = []
    for s in range(len(next(iter(noise.values())))):
        weights = {name: (q.mean + q.stddev * noise[name][s])[None] for name, q in posterior.items()}
        log_probs = method.likelihood.log_prob(forward(method.network, weights, batch.inputs), batch.targets)
        terms.append(-log_probs.sum() * method.problem.num_train / len(batch.inputs))
    return torch.stack(terms).mean()


class NoNoise(MFVI):
    """Trains at the mean."""

    def draw_noise(self, num_samples, generator):
        return {n: torch.zeros_like(e) for n, e in super().draw_noise(num_samples, generator).items()}


class DividedDivergence(MFVI):
    """Averages the KL over the tensors."""

    def loss_terms(self, batch, noise):
        likelihood_term, prior_term = super().loss_terms(batch, noise)
        return likelihood_term, prior_term / len(self.rho)


class UnscaledEnergy(MFVI):
    """Sums the batch and does not rescale it to the full training set."""

    def loss_terms(self, batch, noise):
        likelihood_term, prior_term = super().loss_terms(batch, noise)
        return likelihood_term * len(batch.inputs) / self.problem.num_train, prior_term


class SharedBuffer(MFVI):
    """Writes the noise of every sample into one buffer, so that the last one serves all rho gradients."""

    def loss_terms(self, batch, noise):
        prior_term = super().loss_terms(batch, noise)[1]
        buffer = {name: torch.zeros_like(e[:1]) for name, e in noise.items()}
        terms = []
        for s in range(len(next(iter(noise.values())))):
            for name, e in noise.items():
                buffer[name].data.copy_(e[s : s + 1])
            terms.append(likelihood_of(self, batch, buffer))
        return torch.stack(terms).mean(), prior_term


class SummedSamples(MFVI):
    """Multiplies the likelihood by the number of samples."""

    def loss_terms(self, batch, noise):
        likelihood_term, prior_term = super().loss_terms(batch, noise)
        return likelihood_term * len(next(iter(noise.values()))), prior_term


class DeafToWeights(MFVI):
    """Ignores example weights."""

    def loss_terms(self, batch, noise):
        return super().loss_terms(batch._replace(weights=None), noise)


class FreshWeightsPerRow(MFVI):
    """Draws new weights for every row of a prediction."""

    def predict(self, inputs, num_samples, generator):
        rows = [MFVI.predict(self, row, num_samples, generator) for row in inputs.split(1)]
        kind = type(rows[0])
        return kind(**{n: torch.cat([vars(r)[n] for r in rows], 1) for n in vars(rows[0])})


class FreshWeightsPerBatch(MFVI):
    """Draws weights that depend on how many rows are asked for."""

    def predict(self, inputs, num_samples, generator):
        torch.rand(len(inputs), generator=generator)
        return super().predict(inputs, num_samples, generator)


class DropsSingleRows(MFVI):
    """Skips batches of one row."""

    def loss_terms(self, batch, noise):
        likelihood_term, prior_term = super().loss_terms(batch, noise)
        return likelihood_term * (len(batch.inputs) > 1), prior_term


class DrawsGlobally(MFVI):
    """Predicts with torch's global generator."""

    def predict(self, inputs, num_samples, generator):
        return super().predict(inputs, num_samples, torch.random.default_generator)


class DrawsFromNumpy(MFVI):
    """Predicts with the help of numpy's global generator."""

    def predict(self, inputs, num_samples, generator):
        np.random.rand()
        return super().predict(inputs, num_samples, generator)


class DrawsFromPython(MFVI):
    """Predicts with the help of Python's global generator."""

    def predict(self, inputs, num_samples, generator):
        random.random()
        return super().predict(inputs, num_samples, generator)


class MasksPerRow(MCDropout):
    """Dropout masks not shared by the inputs of a prediction."""

    def predict(self, inputs, num_samples, generator):
        seeds = self.draw_noise(num_samples, generator)["seeds"]
        with torch.no_grad():
            return self.likelihood.predict(self._outputs(inputs, seeds, shared=False))


class SilentInEval(MCDropout):
    """Stops dropping in eval mode, as torch's own dropout does."""

    def predict(self, inputs, num_samples, generator):
        if self.training:
            return super().predict(inputs, num_samples, generator)
        with torch.no_grad():
            return self.likelihood.predict(self.network(inputs)[None].repeat(num_samples, 1, 1))


class RepeatsOneSample(MFVI):
    """Gives one draw S times."""

    def sample_weights(self, num_samples, generator):
        return {
            n: w.repeat(num_samples, *[1] * (w.ndim - 1))
            for n, w in super().sample_weights(1, generator).items()
        }


def each_twice(draw, num_samples, *arguments):
    """Half as many draws, each of them twice; one, if one is asked for."""
    draws = draw(-(-num_samples // 2), *arguments)
    return {name: w.repeat_interleave(2, 0)[:num_samples] for name, w in draws.items()}


class EachDrawTwice(MFVI):
    """Gives every draw twice."""

    def sample_weights(self, num_samples, generator):
        return each_twice(super().sample_weights, num_samples, generator)


class EachDrawNearlyTwice(MFVI):
    """Gives every draw twice, the second time beside itself by a hundredth: other numbers, no other draw."""

    def sample_weights(self, num_samples, generator):
        draws = each_twice(super().sample_weights, num_samples, generator)
        return {
            n: w * (1 + 0.01 * (torch.arange(num_samples) % 2)).view(-1, *[1] * (w.ndim - 1))
            for n, w in draws.items()
        }


class EachMaskTwice(MCDropout):
    """Predicts under every mask twice."""

    def draw_noise(self, num_samples, generator):
        return each_twice(super().draw_noise, num_samples, generator)


class EachStateTwice(SGLD):
    """Gives every state of a chain twice, before others are given once."""

    def sample_weights(self, num_samples, generator):
        return each_twice(super().sample_weights, num_samples, generator)


class PointLayer(MFVI):
    """Draws the last layer alone, and says that all weights vary."""

    def sample_weights(self, num_samples, generator):
        draws = super().sample_weights(num_samples, generator)
        means = self.moments()[0]
        points = {n: m.expand(num_samples, *m.shape).clone() for n, m in list(means.items())[:-2]}
        return draws | points


class ChangesItself(MFVI):
    """Moves its weights when it predicts."""

    def predict(self, inputs, num_samples, generator):
        prediction = super().predict(inputs, num_samples, generator)
        with torch.no_grad():
            next(self.network.parameters()).add_(1e-6)
        return prediction


class MovesFrozen(MFVI):
    """Scales every matrix below the last layer after training, frozen ones too."""

    def finish_fit(self, loader):
        super().finish_fit(loader)
        for value in self.network.buffers():
            if value.ndim == 2:
                value *= 0.999


class TakesSigmaForRho(MFVI):
    """Sets rho to the number that sigma should have."""

    def set_scale(self, sigma):
        for rho in self.rho:
            torch.nn.init.constant_(rho, sigma)


class CentresTheMeans(MFVI):
    """Moves the means to 0 with the scale."""

    def set_scale(self, sigma):
        super().set_scale(sigma)
        for mean in self.network.parameters():
            torch.nn.init.zeros_(mean)


class ReplacesItsScales(MFVI):
    """Sets the scale of tensors that the optimiser does not know."""

    def set_scale(self, sigma):
        self.rho = torch.nn.ParameterList(rho.detach().clone() for rho in self.rho)
        super().set_scale(sigma)


class FrozenBias(MFVI):
    """Leaves one tensor out of the optimiser."""

    def configure_optimizers(self):
        return torch.optim.Adam(list(self.parameters())[1:])


class DetachedScale(MFVI):
    """Gives rho a zero gradient in the whole loss."""

    def posterior(self):
        return {
            n: normal_tensor(q.mean, q.stddev.detach() + 0 * q.stddev) for n, q in super().posterior().items()
        }

    def draw_noise(self, num_samples, generator):
        return {n: e.zero_() for n, e in super().draw_noise(num_samples, generator).items()}


class Uphill(MAP):
    """The likelihood with the wrong sign."""

    def loss_terms(self, batch, noise):
        likelihood_term, prior_term = super().loss_terms(batch, noise)
        return -likelihood_term, prior_term


class OutsideState(MFVI):
    """Keeps a number of its own that no checkpoint holds."""

    steps = 0

    def training_step(self, batch, batch_idx):
        self.steps += 1
        out = super().training_step(batch, batch_idx)
        return out | {"loss": out["loss"] * (1 + self.steps)}


class SeedsItself(MFVI):
    """Ignores the seed that it is given."""

    def __init__(self, problem, settings, start=None):
        torch.manual_seed(0)
        super().__init__(problem, settings, start)

    def draw_noise(self, num_samples, generator):
        return super().draw_noise(num_samples, torch.Generator().manual_seed(0))


class DeniesItsSeed(MFVI):
    """Says that the seed does not matter."""

    seed_matters = False


class AliasedPrior(MFVI):
    """Hands out a prior that keeps moving with the method."""

    def as_prior(self):
        return lambda parameters: {
            n: normal_tensor(q.mean.detach(), q.stddev.detach()) for n, q in self.posterior().items()
        }


class SharedStart(MFVI):
    """Trains on in the network of its start."""

    def __init__(self, problem, settings, start=None):
        super().__init__(problem, settings, start)
        if start is not None:
            self.network, self.rho = start.network, start.rho


class UnnormalisedDensity(MFVI):
    """Lacks the normaliser of its density."""

    def log_prob(self, weights):
        return super().log_prob(weights) + 0.1


class WideDensity(MFVI):
    """The density of a posterior wider than its draws."""

    def log_prob(self, weights):
        q = self.posterior()
        wide = {n: normal_tensor(p.mean, 1.1 * p.stddev) for n, p in q.items()}
        return torch.stack([p.log_prob(weights[n]) for n, p in wide.items()]).sum(0)


class WrongVariance(MFVI):
    """Reports standard deviations for variances."""

    def moments(self):
        means, variances = super().moments()
        return means, {n: v.sqrt() for n, v in variances.items()}


class NarrowPredictions(MFVI):
    """Predicts from draws with half the spread."""

    def predict(self, inputs, num_samples, generator):
        narrow = {
            n: q.mean.detach() + 0.5 * (w - q.mean.detach())
            for (n, w), q in zip(
                self.sample_weights(num_samples, generator).items(), self.posterior().values(), strict=True
            )
        }
        with torch.no_grad():
            return self.likelihood.predict(forward(self.network, narrow, inputs))


class OtherFunction(MFVI):
    """Predicts by another function of its draws than the network."""

    def outputs(self, weights, inputs):
        return 0.9 * super().outputs(weights, inputs)


class UndeclaredDensity(MFVI):
    """Offers what it does not declare."""

    provides = MFVI.provides - {"density"}


class HidesItsScales(MFVI):
    """Counts its means alone."""

    @classmethod
    def parameters_per_weight(cls, settings):
        return 1.0


class HasNoCount(MAP):
    """Has as many parameters as its network, and says that they cannot be counted."""

    @classmethod
    def parameters_per_weight(cls, settings):
        return None


class OneLayerMore(MAP):
    """Gives the posed network another layer, and a prior over the weights of both."""

    def __init__(self, problem, settings, start=None):
        super().__init__(problem, settings, start)
        self.network = torch.nn.Sequential(self.network, torch.nn.Linear(2, 2))


class SilentHistory(MFVI):
    """Trains on something else than it logs."""

    def training_step(self, batch, batch_idx):
        out = super().training_step(batch, batch_idx)
        return out | {"loss": out["loss"] + out["prior_term"]}


BROKEN = [
    (NoNoise, laws.likelihood_term_is_of_the_predictions),
    (DividedDivergence, laws.prior_term_is_the_divergence),
    (UnscaledEnergy, laws.batch_size_does_not_matter),
    (SharedBuffer, laws.sample_gradients_average),
    (SummedSamples, laws.sample_gradients_average),
    (FreshWeightsPerRow, laws.prediction_ignores_its_company),
    (FreshWeightsPerBatch, laws.prediction_ignores_its_company),
    (DropsSingleRows, laws.one_row_is_a_batch),
    (DropsSingleRows, laws.batch_size_does_not_matter),
    (DrawsGlobally, laws.prediction_changes_nothing),
    (DrawsGlobally, laws.prediction_follows_its_generator),
    (DrawsFromNumpy, laws.prediction_changes_nothing),
    (DrawsFromPython, laws.fit_leaves_global_state),
    (MasksPerRow, laws.prediction_ignores_its_company),
    (SilentInEval, laws.prediction_ignores_the_mode),
    (RepeatsOneSample, laws.predictions_are_valid),
    (RepeatsOneSample, laws.weight_samples_have_shape),
    (EachDrawTwice, laws.draws_are_distinct),
    (EachDrawTwice, laws.averages_of_draws_tighten),
    (EachDrawNearlyTwice, laws.averages_of_draws_tighten),
    (EachMaskTwice, laws.draws_are_distinct),
    (EachMaskTwice, laws.averages_of_draws_tighten),
    (PointLayer, laws.weight_samples_have_shape),
    (ChangesItself, laws.prediction_changes_nothing),
    (MovesFrozen, laws.frozen_weights_stay),
    (FrozenBias, laws.gradients_reach_every_parameter),
    (DetachedScale, laws.gradients_reach_every_parameter),
    (Uphill, laws.training_fits_the_data),
    (SeedsItself, laws.seed_decides),
    (DeniesItsSeed, laws.seed_decides),
    (AliasedPrior, laws.posterior_becomes_the_prior),
    (SharedStart, laws.posterior_becomes_the_prior),
    (UnnormalisedDensity, laws.density_integrates_to_one),
    (WideDensity, laws.density_integrates_to_one),
    (WideDensity, laws.density_fits_the_samples),
    (WrongVariance, laws.moments_are_those_of_the_samples),
    (NarrowPredictions, laws.predictions_are_of_the_weight_samples),
    (OtherFunction, laws.predictions_are_of_the_weight_samples),
    (UndeclaredDensity, laws.undeclared_capabilities_raise),
    (SilentHistory, laws.history_tells_the_terms),
    (HidesItsScales, laws.parameters_are_counted),
    (HasNoCount, laws.parameters_are_counted),
    (OneLayerMore, laws.weights_are_those_posed),
    (TakesSigmaForRho, laws.scale_is_set_from_outside),
    (CentresTheMeans, laws.scale_is_set_from_outside),
    (ReplacesItsScales, laws.scale_is_set_from_outside),
]

FAILURES = (AssertionError, pytest.fail.Exception)


def broken(cls, problem=problems.regression):
    """A broken method on a problem; wide posteriors where it has them, so that noise matters."""
    return Case(cls, {"initial_rho": -1.0} if issubclass(cls, MFVI) else {}, problem())


@pytest.mark.parametrize(("cls", "law"), BROKEN, ids=lambda value: value.__name__)
def test_law_catches(cls, law):
    """The broken method fails its law, and the method it was made of does not."""
    with torch.random.fork_rng(devices=[]):
        with pytest.raises(FAILURES):
            law(broken(cls))
        sound = next(c for c in (MFVI, MCDropout, MAP) if issubclass(cls, c))
        law(broken(sound))


def half(predict, method, inputs, num_samples, *rest):
    """A prediction under half of the draws."""
    return predict(method, inputs, num_samples // 2, *rest)


def half_twice(predict, *arguments):
    """The same, each of its samples twice."""
    prediction, diagnostics = half(predict, *arguments)
    doubled = {name: v.repeat_interleave(2, 0) for name, v in vars(prediction).items()}
    return type(prediction)(**doubled), diagnostics


@pytest.mark.parametrize(
    ("cheat", "said"), [(half, "16 samples asked for, 8 made"), (half_twice, "8 of them are distinct")]
)
def test_law_catches_an_engine_that_predicts_with_half_of_the_draws(cheat, said, monkeypatch):
    """Whether the other half is missing, or a copy of the first."""
    monkeypatch.setattr(predicting, "predict", partial(cheat, predicting.predict))
    with pytest.raises(AssertionError, match=said):
        laws.draws_are_distinct(broken(MFVI))
    if cheat is half_twice:
        with pytest.raises(AssertionError, match="times the variance"):
            laws.averages_of_draws_tighten(broken(MFVI))


def test_law_catches_a_chain_whose_states_come_twice(monkeypatch):
    """Of N states asked for N / 2 come; and an engine that tells the record of 2 N is caught too."""
    with pytest.raises(AssertionError, match="come when all are asked for, of which more"):
        laws.draws_are_distinct(Case(EachStateTwice, {}, problems.mlp()))
    sound = Case(SGLD, {}, problems.mlp())
    laws.draws_are_distinct(sound)
    monkeypatch.setattr(engine_file, "distinct_draws", lambda prediction: len(laws.first(prediction)))
    with pytest.raises(AssertionError, match="the engine tells"):
        laws.draws_are_distinct(sound)


ONE_STREAM = {
    "of all predictions": ("predict", lambda seed, purpose, *key: (seed, purpose)),
    "of a stage": ("predict", lambda seed, purpose, stage, number: (seed, purpose, stage)),
    "of first predictions": ("predict", lambda seed, purpose, stage, number: (seed, purpose, number % 2)),
    "of all fits' noise": ("noise", lambda seed, purpose, *key: (seed, purpose)),
    "of two stages' noise": ("noise", lambda seed, purpose, rank, stage, count: (seed, purpose, count)),
}
"""Purposes that the engine takes for one, and what it makes of their seed."""


@pytest.mark.parametrize("name", ONE_STREAM)
def test_law_catches_a_stream_that_serves_twice(name, monkeypatch):
    """Two predictions, or two fits, under the same random numbers."""
    shared, confused = ONE_STREAM[name]
    derive = randomness.derive

    def cheat(seed, *purpose):
        return derive(*confused(seed, *purpose)) if purpose[0] == shared else derive(seed, *purpose)

    laws.no_stream_serves_twice(broken(MFVI))
    monkeypatch.setattr(randomness, "derive", cheat)
    with pytest.raises(AssertionError, match=r"are distinct|under the same noise"):
        laws.no_stream_serves_twice(broken(MFVI))


@pytest.mark.parametrize("weight", [2, 0])
def test_law_catches_deafness_to_weights(weight):
    """Ignored example weights fail the law, whether they double or remove an example."""
    with pytest.raises(AssertionError):
        laws.weights_count_examples(broken(DeafToWeights), weight)
    with pytest.raises(AssertionError):
        laws.weights_reach_training(broken(DeafToWeights))


def test_law_catches_state_outside_the_checkpoint(tmp_path):
    """A number that no checkpoint holds makes a resumed fit differ."""
    with pytest.raises(AssertionError):
        laws.stopped_fit_goes_on(broken(OutsideState), tmp_path / "broken", None)
    laws.stopped_fit_goes_on(broken(MFVI), tmp_path / "sound", None)


def test_law_catches_a_loader_that_forgets_where_it_was(tmp_path, monkeypatch):
    """An epoch that begins anew after a stop makes a resumed fit differ."""
    monkeypatch.setattr(StoredBatches, "load_state_dict", lambda self, state: None)
    with pytest.raises(AssertionError):
        laws.stopped_epoch_goes_on(broken(MFVI), tmp_path)


def test_law_catches_training_again(tmp_path, monkeypatch):
    """An engine that never looks for finished fits is caught."""
    name = checkpoints.name
    with monkeypatch.context() as patch:
        count = iter(range(10))
        patch.setattr(checkpoints, "name", lambda n, stage: name(n + next(count), stage))
        with pytest.raises(AssertionError, match="trained again"):
            laws.finished_fit_is_found_again(broken(MFVI), tmp_path / "broken")
    laws.finished_fit_is_found_again(broken(MFVI), tmp_path / "sound")


def test_law_catches_keeping_the_last_epoch(monkeypatch):
    """An engine that keeps the last epoch in place of the best is caught."""
    load = MFVI.load_state_dict
    with monkeypatch.context() as patch:
        patch.setattr(MFVI, "load_state_dict", lambda self, state, **kwargs: None)
        with pytest.raises(AssertionError):
            laws.patience_keeps_the_best_epoch(broken(MFVI))
    assert MFVI.load_state_dict is load
    laws.patience_keeps_the_best_epoch(broken(MFVI))


def test_law_catches_a_likelihood_that_the_fit_changes():
    """A fit that trains the task's own likelihood is caught."""

    class TrainsTheTask(MAP):
        def __init__(self, problem, settings, start=None):
            super().__init__(problem, settings, start)
            self.likelihood = problem.likelihood

    with pytest.raises(AssertionError):
        laws.fit_leaves_the_problem(broken(TrainsTheTask))


def test_law_catches_settings_without_types():
    """Settings that take anything are caught."""

    class Loose(MAP):
        class Settings:
            pass

    from bench.settings import settings

    @settings
    class Anything:
        learning_rate: object = 1e-3

    Loose.settings_class = Anything
    with pytest.raises(FAILURES):
        laws.bad_settings_are_refused(broken(Loose))


def test_controls_differ_from_the_sound_methods_in_one_law_only():
    """A control that breaks the energy alone obeys unrelated laws: controls fail for their own reason."""
    for cls in (UnscaledEnergy, DividedDivergence, SharedBuffer):
        laws.predictions_are_valid(broken(cls))
        laws.prediction_ignores_its_company(broken(cls))
    assert replace(broken(MFVI), values={}).fit(budget=Budget(1)).history
