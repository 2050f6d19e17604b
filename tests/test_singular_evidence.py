"""Evidence of singular models: bounds against evidences in closed form, scores by hand, networks by autograd.

"False alarm" is the probability that a correct program fails a statistical test; seeds are fixed.
"""

import json
import math
import statistics
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats
import torch
from conformance import laws
from plans import resolved
from torch.testing import assert_close

import bench
from bench.contract import Undefined
from bench.engine.engine import Engine, TrainerOptions
from bench.errors import Diverged, UsageError
from bench.methods.linear import Linear
from bench.methods.nf_gaussian import NFGaussian
from bench.runs import records
from bench.runs.records import split_metrics
from bench.runs.runner import load_scores
from bench.studies.singular import evidence, tanh_network
from bench.studies.singular.tanh_network import TanhNetwork
from bench.tasks import singular_evidence as task
from bench.tasks.singular_evidence import Settings, SingularEvidence
from bench.weights import forward

FEW = {"hidden": 3, "num_train": 20, "repetitions": 2, "epochs": 2, "draws": 5, "prior_mean": 0.4}
MODELS = pytest.mark.parametrize("model", ["tanh", "reduced_rank", "linear"])


def made(model="linear", **values):
    return SingularEvidence(Settings(model=model, true_weight=0.7, **FEW | values))


def engine(cls=Linear, seed=0, **values):
    settings = cls.settings_class(**values)
    return Engine(cls, settings, seed, trainer=TrainerOptions(accelerator="cpu"))


def posed_and_fitted(engine):
    """Lists that fill with the problems that the engine is given and the methods that it returns."""
    posed, fitted, fit_many = [], [], engine.fit_many

    def spy(problems, budget, **keywords):
        posed.extend(problems)
        fitted.extend(fit_many(problems, budget, **keywords))
        return fitted

    engine.fit_many = spy
    return posed, fitted


class Understates(Linear):
    """The exact posterior, of whose log density 2 nats are missing."""

    def log_prob(self, weights):
        """Log density, less 2."""
        return super().log_prob(weights) - 2


def diverging_on(cls, target):
    """The method, which diverges on the data set whose first target this is."""

    class Diverges(cls):
        def finish_fit(self, loader):
            if self.problem.train.tensors[1].flatten()[0] == target:
                raise Diverged("told to")
            super().finish_fit(loader)

    return Diverges


# --------------------------------------------------------------------------------------------- data


@MODELS
def test_data_are_those_of_seed_and_repetition_alone(model):
    """The same for every method, budget and number of draws; another repetition or seed has others."""
    first = made(model).run(engine(NFGaussian))["data_digests"]
    other = made(model, epochs=1, draws=3, repetitions=1).run(engine(NFGaussian, variance=0.1))
    assert np.array_equal(first[:1], other["data_digests"])
    if model == "linear":
        assert np.array_equal(first, made(model).run(engine(Linear))["data_digests"])
    reseeded = made(model, repetitions=1).run(engine(NFGaussian, seed=1))["data_digests"]
    assert len({row.tobytes() for row in (*first, *reseeded)}) == 3


@MODELS
def test_draws_have_the_law_of_the_model(model):
    """Moments of inputs and noise over 20,000 observations. False alarm: at most 12 x 7e-6."""
    own = made(model, num_train=20_000)
    inputs, targets = own.draw(laws.generator(1))
    noise = targets - own.model.truth(inputs)
    assert inputs.shape == (20_000, {"tanh": 1, "reduced_rank": 6, "linear": 3}[model])
    assert targets.shape == (20_000, 3 if model == "reduced_rank" else 1)
    laws.assert_mean_is(inputs, 0.0)
    laws.assert_mean_is(inputs.square(), 1 / 3 if model == "tanh" else 1.0)
    laws.assert_mean_is(noise, 0.0)
    laws.assert_mean_is(noise.square(), 1.0)
    assert model != "tanh" or inputs.abs().max() <= 1


def test_truths_are_the_sums():
    """5 H tanh(5 x); B0 A0 x with A0 = [I, ones], B0 = I; w0 . x."""
    g = laws.generator(2)
    x = 2 * torch.rand(50, 1, generator=g) - 1
    own = SingularEvidence(Settings(hidden=4, true_weight=5))
    assert_close(own.model.truth(x), sum(5 * torch.tanh(5 * x) for _ in range(4)))
    assert_close(SingularEvidence(Settings(hidden=4)).model.truth(x), torch.zeros(50, 1))
    wide = torch.randn(50, 7, generator=g)
    a0, b0 = torch.cat([torch.eye(4), torch.ones(4, 3)], 1), torch.eye(4)
    own = SingularEvidence(Settings(model="reduced_rank", hidden=4, true_weight=9))
    assert_close(own.model.truth(wide), wide @ (b0 @ a0).T)
    narrow = torch.randn(50, 4, generator=g)
    own = SingularEvidence(Settings(model="linear", hidden=4, true_weight=-2))
    assert_close(own.model.truth(narrow), (narrow @ torch.full((4,), -2.0))[:, None])


@pytest.mark.parametrize("model", ["tanh", "reduced_rank"])
def test_network_at_the_true_weights_is_the_truth(model):
    """The model holds its truth: with a = b = w0, or A = A0 and B = B0."""
    own = made(model)
    network, x = own.problem().network(), own.draw(laws.generator(3))[0]
    first, second = network.parameters()
    with torch.no_grad():
        if model == "tanh":
            first.fill_(0.7)
            second.fill_(0.7)
        else:
            first.copy_(torch.cat([torch.eye(3), torch.ones(3, 3)], 1))
            second.copy_(torch.eye(3))
        assert_close(network(x), own.model.truth(x))


@MODELS
def test_priors_variance_is_a_variance(model):
    """Every weight is N(mean, variance) a priori."""
    own = made(model, prior_mean=-1.5, prior_variance=4.0)
    problem = own.problem()
    weights = dict(problem.network().named_parameters())
    log_prior = sum(q.log_prob(weights[name]) for name, q in problem.prior(weights).items())
    flat = torch.cat([w.detach().flatten() for w in weights.values()]).double().numpy()
    assert log_prior.item() == pytest.approx(scipy.stats.norm(-1.5, 2).logpdf(flat).sum(), rel=1e-6)


def test_truth_reaches_no_fit(monkeypatch):
    """Another truth behind the same observations changes neither the weights drawn nor what is said of them.

    That fresh observations reach no fit is a law of all tasks.
    """
    own, given = made("tanh"), engine(NFGaussian)
    posed, _ = posed_and_fitted(given)
    arrays = own.run(given)
    data = [own.draw(given.generator("data", r)) for r in range(2)]
    for problem, tensors in zip(posed, data, strict=True):
        assert problem.val is None
        assert problem.num_train == 20
        for held, drawn in zip(problem.train.tensors, tensors, strict=True):
            assert torch.equal(held, drawn)
    elsewhere = made("tanh")
    monkeypatch.setattr(elsewhere, "draw", own.draw)
    monkeypatch.setattr(elsewhere.model, "truth", lambda inputs: 2 * own.model.truth(inputs))
    others = elsewhere.run(engine(NFGaussian))
    moved = {name for name, array in arrays.items() if not np.array_equal(others[name], array)}
    assert moved == {"log_ratios", "entropies"}


# --------------------------------------------------------------------------------- what a run keeps


def by_hand(model, weights, x):
    """Outputs `[S, n, K]` of the model, in numpy."""
    w = [v.double().numpy() for v in weights.values()]
    x = x.double().numpy()
    if model == "tanh":
        a, b = w
        return (b[:, None] * np.tanh(x[None] * a[:, None])).sum(-1, keepdims=True)
    outputs = np.broadcast_to(x, (len(w[0]), *x.shape))
    for matrix in w:
        outputs = outputs @ matrix.transpose(0, 2, 1)
    return outputs


@MODELS
def test_arrays_of_a_run_by_hand(model):
    """Log likelihoods, log priors, log q, n S_n, log ratios and functions, of the same draws, by scipy."""
    own, given = made(model), engine(NFGaussian)
    posed, fitted = posed_and_fitted(given)
    arrays = own.run(given)
    prior = scipy.stats.norm(0.4, 10)
    for r, (problem, method) in enumerate(zip(posed, fitted, strict=True)):
        x, y = problem.train.tensors
        wide = y.double().numpy()
        log_p0 = scipy.stats.norm.logpdf(wide - own.model.truth(x).double().numpy())
        assert arrays["entropies"][r] == pytest.approx(-log_p0.sum(), rel=1e-6)
        weights, log_q = method.sample_and_log_prob(5, given.generator("draws", r))
        log_likelihood = scipy.stats.norm.logpdf(wide - by_hand(model, weights, x)).sum((1, 2))
        np.testing.assert_allclose(arrays["log_likelihoods"][r], log_likelihood, rtol=1e-5)
        log_prior = sum(prior.logpdf(w.double().numpy()).reshape(5, -1).sum(1) for w in weights.values())
        np.testing.assert_allclose(arrays["log_priors"][r], log_prior, rtol=1e-6)
        np.testing.assert_allclose(arrays["log_qs"][r], log_q.numpy())
        # Eq. 19: log p0(y | x) - log of the mean over draws of p(y | x, w), y on both sides of the truth.
        fresh = own.model.inputs(5000, given.generator("fresh", r))
        truth = own.model.truth(fresh).double().numpy()
        errors = torch.randn(truth.shape, generator=given.generator("fresh noise", r)).double().numpy()
        for half, sign in zip(arrays["log_ratios"][r].reshape(2, -1), (1, -1), strict=True):
            observed = truth + sign * errors
            density = scipy.stats.norm.pdf(observed - by_hand(model, weights, fresh)).prod(-1).mean(0)
            ratio = scipy.stats.norm.logpdf(errors).sum(-1) - np.log(density)
            np.testing.assert_allclose(half, ratio, rtol=1e-4, atol=1e-5)
    if model == "tanh":
        functions = fitted[0].sample_weights(500, given.generator("functions", 0))
        values = by_hand(model, functions, torch.from_numpy(task.GRID[:, None]))[..., 0]
        np.testing.assert_allclose(arrays["functions"], values, rtol=1e-4, atol=1e-4)
    else:
        assert "functions" not in arrays


def test_run_kept_by_an_earlier_start_gives_the_same_arrays(tmp_path):
    """A second start reads what the first has kept and fits nothing."""
    settings, options = NFGaussian.settings_class(), TrainerOptions(accelerator="cpu")
    own = made("tanh")
    first = own.run(Engine(NFGaussian, settings, 0, tmp_path, options))
    again = Engine(NFGaussian, settings, 0, tmp_path, options)
    posed, _ = posed_and_fitted(again)
    second = own.run(again)
    assert posed == []
    assert first.keys() == second.keys()
    assert all(np.array_equal(first[name], second[name]) for name in first)


# ------------------------------------------------------------------------------------- exact evidence


def test_log_evidence_is_scipys():
    """N(mean X 1, I + variance X X^T) at the targets, n 15, d 3."""
    own = made(num_train=15, prior_mean=0.9, prior_variance=2.3)
    x, y = own.draw(laws.generator(4))
    wide = x.double().numpy()
    exact = scipy.stats.multivariate_normal(0.9 * wide.sum(1), np.eye(15) + 2.3 * wide @ wide.T)
    value, error = evidence.of_linear(x, y[:, 0], 0.9, 2.3)
    assert value == pytest.approx(exact.logpdf(y.double().numpy()[:, 0]), rel=1e-10)
    assert error == 0


@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
def test_evidence_of_tanh_given_inner_weights_is_scipys(scale):
    """N(mean X 1, I + variance X X^T) on the features X = tanh(a x), from nearly linear to steps."""
    g = laws.generator(5)
    x = 2 * torch.rand(40, generator=g, dtype=torch.float64) - 1
    y = torch.randn(40, generator=g, dtype=torch.float64)
    inner = scale * torch.randn(6, 3, generator=g, dtype=torch.float64)
    found = evidence.given_inner(inner, x, y, 0.9, 2.3)
    for a, value in zip(inner, found, strict=True):
        features = torch.tanh(x[:, None] * a).numpy()
        exact = scipy.stats.multivariate_normal(
            0.9 * features.sum(1), np.eye(40) + 2.3 * features @ features.T
        )
        assert value.item() == pytest.approx(exact.logpdf(y.numpy()), rel=1e-9)


def test_log_evidence_of_one_tanh_unit_is_that_of_quadrature():
    """The mean over a as an integral: within 5 Monte Carlo errors, which are real. False alarm: 6e-7."""
    own = made("tanh", hidden=1, num_train=200, prior_mean=0.3, prior_variance=1.4)
    x, y = (t[:, 0].double() for t in own.draw(laws.generator(6)))
    grid = np.linspace(-9, 9, 4001)
    logs = evidence.given_inner(torch.from_numpy(grid[:, None]), x, y, 0.3, 1.4).numpy()
    joint = logs + scipy.stats.norm(0.3, 1.4**0.5).logpdf(grid)
    exact = np.log(np.trapezoid(np.exp(joint - joint.max()), grid)) + joint.max()
    value, error = evidence.of_tanh(x, y, 1, 0.3, 1.4, generator=laws.generator(7), draws=20_000)
    assert 1e-4 < error < 0.05
    assert abs(value - exact) < 5 * error


@pytest.mark.parametrize("num_train", [100, 1000, 5000, 50_000])
def test_a_posterior_within_half_a_nat_can_be_written_down(num_train):
    """Inner weights from their prior, outer ones exactly normal given them: its bound is E log p(D given a).

    The page says so of the data sets of seed 1, H = 16, N(0, 1), on which no committed method comes near.
    """
    own = SingularEvidence(Settings(hidden=16, prior_mean=0.0, prior_variance=1.0, num_train=num_train))
    for r in range(3):
        x, y = (t[:, 0].double() for t in own.draw(Engine(NFGaussian, None, 1).generator("data", r)))
        inner = torch.randn(4000, 16, generator=laws.generator(r), dtype=torch.float64)
        logs = evidence.given_inner(inner, x, y, 0.0, 1.0)
        log_evidence = logs.logsumexp(0) - math.log(len(logs))
        assert 0 < log_evidence - logs.mean() < 0.5


def test_that_posterior_has_its_bound_in_the_task_too():
    """As a method: its Psi lies below the log evidence by less than half a nat."""

    class Conditional(NFGaussian):
        def sample_and_log_prob(self, num_samples, generator):
            x, y = (t[:, 0].double() for t in self.problem.train.tensors[:2])
            inner = torch.randn(num_samples, 16, generator=generator, dtype=torch.float64)
            features = torch.tanh(x[:, None] * inner[:, None])
            precision = features.mT @ features + torch.eye(16, dtype=torch.float64)
            mean = torch.linalg.solve(precision, features.mT @ y)
            given = torch.distributions.MultivariateNormal(mean, precision_matrix=precision)
            noise = torch.randn(num_samples, 16, 1, generator=generator, dtype=torch.float64)
            outer = (
                mean
                + torch.linalg.solve_triangular(torch.linalg.cholesky(precision).mT, noise, upper=True)[
                    ..., 0
                ]
            )
            log_q = scipy.stats.norm.logpdf(inner.numpy()).sum(1) + given.log_prob(outer).numpy()
            names = dict(self.network.named_parameters())
            weights = zip(names, (inner, outer), strict=True)
            return {n: w.view(-1, *names[n].shape).float() for n, w in weights}, torch.from_numpy(log_q)

    few = {"num_train": 1000, "repetitions": 2, "epochs": 1, "draws": 200}
    own = SingularEvidence(Settings(hidden=16, prior_mean=0.0, prior_variance=1.0, **few))
    scores = own.score(own.run(engine(Conditional)))
    assert scores["psi_standard_error"] < 0.1
    assert -0.3 < scores["log_evidence"] - scores["psi"] < 0.5


def test_monte_carlo_error_of_a_log_evidence_is_its_spread():
    """Of 200 estimates from 500 draws each, within 4 standard errors of an sd (5%). False alarm: 6e-5."""
    x, y = (t[:, 0] for t in made("tanh", hidden=4, num_train=500).draw(laws.generator(8)))
    estimates = [
        evidence.of_tanh(x, y, 4, 0.0, 1.0, generator=laws.generator(100 + k), draws=500) for k in range(200)
    ]
    values, errors = np.transpose(estimates)
    assert values.std(ddof=1) == pytest.approx(np.sqrt((errors**2).mean()), rel=0.2)


def test_evidence_that_draws_miss_is_not_known():
    """Weights of 5 are far out under N(0, 1), and one draw carries all; the record says so."""
    own = SingularEvidence(Settings(hidden=16, true_weight=5.0, prior_mean=0.0, prior_variance=1.0))
    x, y = own.draw(laws.generator(9))
    assert own.model.log_evidence(x, y[:, 0], 0.0, 1.0, laws.generator(10)).standard_error > 0.9
    arrays = arrays_of([[-1.0, -2.0]], [0.0], log_evidences=np.array([1.0]))
    names = {"log_evidence", "gap_per_weight"}
    for error, unknown in ((0.09, set()), (0.11, names)):
        scores = own.score(arrays | {"log_evidence_errors": np.array([error])})
        numbers, undefined = split_metrics(scores, own.spec)
        assert names & undefined.keys() == unknown == {n for n in names if numbers[n] is None}


@pytest.mark.parametrize(("hidden", "mean", "looks"), [(32, 0.0, True), (33, 0.0, False), (4, 5.0, False)])
def test_evidence_of_tanh_is_looked_for_where_draws_can_find_it(hidden, mean, looks):
    own = made("tanh", hidden=hidden, prior_mean=mean)
    assert ("log_evidence" in own.spec.metrics) == looks == own.finds_evidence


@pytest.mark.parametrize("mean", [0.0, 5.0])
def test_no_evidence_of_reduced_rank_is_claimed(mean):
    """None is known: neither a metric nor a number, and who asks for one all the same gets no other's."""
    own = made("reduced_rank", prior_mean=mean)
    assert not own.finds_evidence
    assert "log_evidence" not in own.spec.metrics
    inputs, observed = own.draw(laws.generator(11))
    with pytest.raises(NotImplementedError):
        own.model.log_evidence(inputs, observed[:, 0], mean, 1.0, laws.generator(12))


def test_exact_posterior_reaches_the_evidence():
    """Log p(D, w) - log q(w) is the log evidence at every w; float32 outputs leave 1e-3 nats."""
    own = made(num_train=200)
    arrays = own.run(engine(Linear))
    evidences = arrays["log_evidences"] - arrays["entropies"]
    terms = arrays["log_likelihoods"] + arrays["log_priors"] - arrays["log_qs"]
    np.testing.assert_allclose(terms, np.repeat(evidences[:, None], 5, 1), atol=1e-3)
    scores = own.score(arrays)
    assert scores["psi"] == pytest.approx(scores["log_evidence"], abs=1e-3)
    assert scores["gap_per_weight"] == pytest.approx(0, abs=1e-3)
    assert scores["psi_standard_error"] < 1e-3


def test_density_that_is_understated_exceeds_the_evidence():
    """By what is missing: log q is the method's own word, and where the evidence is known this shows."""
    own = made(num_train=200)
    scores = own.score(own.run(engine(Understates)))
    assert scores["psi"] == pytest.approx(scores["log_evidence"] + 2, abs=1e-3)
    assert scores["gap_per_weight"] == pytest.approx(-2 / 3, abs=1e-3)


def test_density_that_is_understated_shows_on_a_singular_model():
    """A flow's Psi lies below the log evidence of a tanh network; with log q less 40 above it."""

    class Cheats(NFGaussian):
        def sample_and_log_prob(self, num_samples, generator):
            weights, log_q = super().sample_and_log_prob(num_samples, generator)
            return weights, log_q - 40

    own = made("tanh", hidden=2, num_train=200, prior_mean=0.0, prior_variance=1.0, epochs=60, draws=50)
    honest, cheat = (own.score(own.run(engine(cls, trainable=True))) for cls in (NFGaussian, Cheats))
    assert honest["gap_per_weight"] > 0 > cheat["gap_per_weight"]
    assert cheat["gap_per_weight"] == pytest.approx(honest["gap_per_weight"] - 40 / 4)


def test_bound_of_a_normal_by_its_divergence():
    """Psi = log evidence - KL(q || posterior): q of the exact mean with twice the standard deviations.

    1,000 draws for each of two data sets, within 5 Monte Carlo errors. False alarm: 6e-7.
    """

    class Doubled(Linear):
        def finish_fit(self, loader):
            super().finish_fit(loader)
            self.scale_tril.mul_(2)

    own = made(num_train=200, draws=1000)
    scores = own.score(own.run(engine(Doubled)))
    divergence = 3 * (0.5 * (4 - 1) - math.log(2))  # of N(0, 4 I) from N(0, I) in three dimensions
    assert 0 < scores["psi_standard_error"] < 0.2
    gap = scores["log_evidence"] - scores["psi"]
    assert abs(gap - divergence) < 5 * scores["psi_standard_error"] + 1e-3


# ---------------------------------------------------------------------------------------- the scores


def arrays_of(log_likelihoods, entropies, **others):
    """Arrays with these log likelihoods `[R, S]`; other terms are 0, log ratios small numbers."""
    log_likelihoods = np.array(log_likelihoods)
    zeros = np.zeros_like(log_likelihoods)
    ratios = np.arange(4.0 * len(entropies)).reshape(-1, 4) / 8
    found = {"log_likelihoods": log_likelihoods, "log_priors": zeros, "log_qs": zeros}
    return found | {"entropies": np.array(entropies), "log_ratios": ratios} | others


def test_scores_by_hand():
    """Of two repetitions of three draws."""
    arrays = arrays_of(
        [[-10.0, -12.0, -11.0], [-20.0, -26.0, -20.0]],
        [5.0, 9.0],
        log_priors=np.array([[-1.0, -2.0, -3.0], [-4.0, -4.0, -4.0]]),
        log_qs=np.array([[3.0, 2.0, 1.0], [-6.0, -6.0, 0.0]]),
        log_evidences=np.array([-8.0, -12.0]),
        log_evidence_errors=np.zeros(2),
    )
    terms = [[-14.0, -16.0, -15.0], [-18.0, -24.0, -24.0]]
    own = made(num_train=100)
    scores = own.score(arrays)
    assert task.psis(arrays).tolist() == [-10.0, -13.0]
    spread = sum(statistics.variance(row) / 3 for row in terms)
    expected = {
        "psi": -11.5,
        "psi_sd": statistics.stdev([-10, -13]),
        "psi_standard_error": math.sqrt(spread) / 2,
        "converged": 2,
        "elbo": -18.5,
        "entropy": 7,
        "leading_term": -1.5 * math.log(100),
        "psi_minus_leading_term": -11.5 + 1.5 * math.log(100),
        "generalisation_error": 3.5 / 8,
        # Pairs of an observation and its mirror image: (0, 2), (1, 3); (4, 6), (5, 7).
        "generalisation_standard_error": math.sqrt(2 * 0.5 / 2) / 2 / 8,
        "log_evidence": -10,
        "gap_per_weight": 0.5,
    }
    assert scores == pytest.approx(expected)
    assert scores.keys() == own.spec.metrics.keys()
    assert [tuple(row)[2:] for row in own.curves(arrays)] == [(0.0, -10.0), (1.0, -13.0)]


def test_standard_error_is_that_of_the_mean():
    """E of its square is the variance of the mean of rows of unlike spread. False alarm: 7e-6."""
    stds = torch.tensor([1.0, 3.0, 0.2]).double()[:, None]
    g = laws.generator(5)
    squares = [
        task._standard_error((stds * torch.randn(3, 8, generator=g, dtype=torch.float64)).numpy()) ** 2
        for _ in range(4000)
    ]
    laws.assert_mean_is(torch.tensor(squares), (stds.square().sum() / 8 / 9).item())


def test_what_has_not_converged_is_counted_and_left_out():
    """Psi of exactly -1e6 has; below, not a number, or diverged has not."""
    rows = [[-1e6, -1e6], [-1e6 - 1, -1e6], [-1e300, -1e300], [-10.0, -1e300], [-20.0, -30.0]]
    arrays = arrays_of(rows, 5 * [0.0])
    assert task.converged(arrays).tolist() == [True, False, False, False, True]
    scores = made("tanh").score(arrays)
    assert scores["converged"] == 2
    assert scores["psi"] == pytest.approx((-1e6 - 25) / 2)
    ratios = arrays["log_ratios"]
    assert scores["generalisation_error"] == pytest.approx((ratios[0].mean() + ratios[4].mean()) / 2)
    one = made("tanh").score(arrays_of(rows[-1:], [0.0]))
    assert one["psi"] == -25
    assert isinstance(one["psi_sd"], Undefined)
    assert "two" in one["psi_sd"].reason
    with pytest.raises(Diverged, match="none of the 4 repetitions converged"):
        made("tanh").score(arrays_of(rows[1:4] + rows[1:2], 4 * [0.0]))


@pytest.mark.parametrize("name", ["log_priors", "log_qs"])
def test_a_term_that_is_not_finite_has_not_converged(name):
    """Also where its sign would make Psi large: log q of -inf."""
    arrays = arrays_of([[-1.0, -2.0], [-1.0, -2.0]], [0.0, 0.0])
    arrays[name] = np.array([[0.0, 0.0], [0.0, -1e300]])
    assert task.converged(arrays).tolist() == [True, False]


@MODELS
def test_diverged_repetition_is_kept_and_left_out(model):
    """Its log likelihoods are -1e300; the other is what it is without, and the functions are its."""
    own, cls = made(model), Linear if model == "linear" else NFGaussian
    target = own.draw(engine().generator("data", 0))[1].flatten()[0]
    whole = own.run(engine(cls))
    given = engine(diverging_on(cls, target))
    _, fitted = posed_and_fitted(given)
    arrays = own.run(given)
    assert [fit["diagnostics"].get("diverged") for fit in given.fits] == [1.0, None]
    assert (arrays["log_likelihoods"][0] == -1e300).all()
    assert all(np.isfinite(a).all() for a in arrays.values())
    assert task.converged(arrays).tolist() == [False, True]
    for name in {"entropies", "log_evidences", "log_evidence_errors", "data_digests"} & arrays.keys():
        assert np.array_equal(arrays[name], whole[name])
    for name in ("log_likelihoods", "log_priors", "log_qs", "log_ratios"):
        assert np.array_equal(arrays[name][1], whole[name][1])
    if model == "tanh":
        draws = fitted[1].sample_weights(500, given.generator("functions", 1))
        values = by_hand(model, draws, torch.from_numpy(task.GRID[:, None]))[..., 0]
        np.testing.assert_allclose(arrays["functions"], values, rtol=1e-4, atol=1e-4)
    scores = own.score(arrays)
    assert scores["converged"] == 1
    if "log_evidences" in arrays:
        assert scores["log_evidence"] == whole["log_evidences"][1]


@pytest.mark.parametrize("stacked", [True, False])
def test_run_of_which_nothing_converged_is_kept(tmp_path, stacked):
    """Its record says diverged, and its arrays are there, with the functions of the first."""
    with pytest.raises(Diverged, match="none of the 2 repetitions converged") as info:
        bench.run(
            "toys:NeverConverges",
            "singular_evidence",
            task_settings=FEW,
            trainer={"accelerator": "cpu", "stacked": stacked},
            out=tmp_path,
        )
    assert "\n" not in str(info.value)
    directory = next(tmp_path.rglob("record.json")).parent
    assert records.read_record(directory).status == "diverged"
    own, arrays = load_scores(directory)
    assert (arrays["log_likelihoods"] == -1e300).all()
    assert arrays["functions"].shape == (500, 51)
    assert own.curves(arrays) == []


# ------------------------------------------------------------------------------ generalisation error


def given_weights(own, slopes):
    """An engine whose fits all draw these weights `[S]` of a single one, and its generator."""
    weights = {"0.weight": torch.as_tensor(slopes).float()[:, None, None]}
    method = SimpleNamespace(
        diverged=False,
        problem=own.problem(),
        network=own.problem().network(),
        sample_and_log_prob=lambda draws, generator: (weights, torch.zeros(draws)),
    )
    return SimpleNamespace(
        generator=engine().generator,
        stage=lambda name: None,
        cached=lambda compute: compute(),
        fit_many=lambda problems, budget: len(problems) * [method],
    )


def test_generalisation_error_of_a_normal_posterior():
    """Of q = N(m, v) over one weight: KL(N(w0 x, 1) || N(m x, 1 + v x^2)), averaged over x ~ N(0, 1).

    The draws are 200 quantiles of q, whose mixture is the predictive but for 1e-4; 20 repetitions of 5,000
    mirrored pairs, within 5 Monte Carlo errors. False alarm: 6e-7.
    """
    true, mean, std, points = 0.7, 0.9, 0.3, 200
    quantiles = mean + std * scipy.stats.norm.ppf((np.arange(points) + 0.5) / points)
    own = made(hidden=1, draws=points, repetitions=20)
    scores = own.score(own.run(given_weights(own, quantiles)))
    nodes, shares = np.polynomial.hermite_e.hermegauss(200)
    variance = 1 + (std * nodes) ** 2
    divergences = 0.5 * (np.log(variance) + (1 + ((true - mean) * nodes) ** 2) / variance - 1)
    exact = (shares * divergences).sum() / shares.sum()
    error = scores["generalisation_standard_error"]
    assert 20 * error < exact
    assert abs(scores["generalisation_error"] - exact) < 5 * error + 1e-4


def test_generalisation_error_of_a_point_mass():
    """Half the mean square of what it misses: mirrored pairs leave no noise of the observations."""
    own = made(hidden=1, repetitions=4)
    given = given_weights(own, torch.full((5,), 1.2))
    scores = own.score(own.run(given))
    fresh = [own.model.inputs(5000, given.generator("fresh", r)) for r in range(4)]
    missed = torch.stack(fresh).double()[..., 0] * (1.2 - 0.7)
    assert scores["generalisation_error"] == pytest.approx(0.5 * missed.square().mean().item(), rel=1e-5)


# ------------------------------------------------------------------------------------- leading terms


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"hidden": 576}, -12 * math.log(5000) + math.log(math.log(5000))),
        ({"hidden": 2}, -2 / 3 * math.log(5000)),
        ({"hidden": 4, "num_train": 100}, -math.log(100) + math.log(math.log(100))),
        ({"model": "reduced_rank", "hidden": 24}, -(24 * 27 / 2) * math.log(5000)),
        ({"model": "linear", "hidden": 10, "num_train": 50}, -5 * math.log(50)),
        ({"model": "linear", "hidden": 10, "true_weight": 3}, -5 * math.log(5000)),
    ],
    ids=str,
)
def test_leading_terms(values, expected):
    """24 units: (576 + 24^2 + 24) / 98 = 12, twice; 2: (2 + 1 + 1) / 6; full rank: r (M + N - r) / 2."""
    assert SingularEvidence(Settings(**values)).leading_term == pytest.approx(expected, rel=1e-12)


def test_no_leading_term_where_no_coefficient_is_known():
    """The tanh network at another truth than 0."""
    own = SingularEvidence(Settings(true_weight=5))
    assert own.leading_term is None
    scores = own.score(arrays_of([[-1.0, -2.0]], [0.0]))
    for name in ("leading_term", "psi_minus_leading_term"):
        assert isinstance(scores[name], Undefined)


# ------------------------------------------------------------------------------------ the tanh network


def plain(a, b, x):
    """The network in autograd's own operations, `[B, 1]`."""
    return (b * torch.tanh(x * a)).sum(1, keepdim=True)


def weights_of(copies, hidden=7, scale=2.0):
    """Weights `[M, H]` with gradients, and inputs `[M, 6, 1]`, one of them 0."""
    g = torch.Generator().manual_seed(6)
    a, b = (scale * torch.randn(2, copies, hidden, generator=g, dtype=torch.float64)).unbind(0)
    x = torch.randn(copies, 6, 1, generator=g, dtype=torch.float64)
    x[:, 0] = 0
    return a.requires_grad_(), b.requires_grad_(), x


def network_of(hidden=7):
    return TanhNetwork(hidden).double()


def assert_same(found, expected, weights):
    """Outputs, and gradients of a sum with unlike factors."""
    assert_close(found, expected)
    factors = torch.arange(1.0, 1 + found.numel()).view_as(found).double()
    for mine, autograds in zip(
        torch.autograd.grad((factors * found).sum(), weights, retain_graph=True),
        torch.autograd.grad((factors * expected).sum(), weights),
        strict=True,
    ):
        assert_close(mine, autograds)


@pytest.mark.parametrize("scale", [0.01, 2.0, 500.0])
def test_tanh_network_by_autograd(scale):
    """Outputs and gradients, from nearly linear to saturated units."""
    a, b, x = weights_of(1, scale=scale)
    found = torch.func.functional_call(network_of(), {"a": a[0], "b": b[0]}, (x[0],))
    assert found.shape == (6, 1)
    assert_same(found, plain(a[0], b[0], x[0]), (a, b))


def test_tanh_network_under_stacked_weights():
    """By bench.weights.forward, inputs shared by the samples."""
    a, b, x = weights_of(4)
    found = forward(network_of(), {"a": a, "b": b}, x[0])
    assert_same(found, torch.stack([plain(*w, x[0]) for w in zip(a, b, strict=True)]), (a, b))


@pytest.mark.parametrize("scale", [0.01, 2.0, 500.0])
def test_tanh_network_as_the_compiler_sees_it(scale):
    """Whose powers of 2 overflow in units that are saturated."""
    a, b, x = weights_of(4, scale=scale)
    found = tanh_network._FusedTanhSums.apply(x[0, :, 0], a, b)[..., None]
    assert_same(found, torch.stack([plain(*w, x[0]) for w in zip(a, b, strict=True)]), (a, b))


@pytest.mark.parametrize("shared", [False, True])
def test_tanh_network_under_vmap_over_copies(shared):
    """Side by side, each on inputs of its own or all on the same."""
    a, b, x = weights_of(3)
    x, dims = (x[0], (0, 0, None)) if shared else (x, (0, 0, 0))

    def one(a, b, x):
        return torch.func.functional_call(network_of(), {"a": a, "b": b}, (x,))

    found = torch.func.vmap(one, in_dims=dims)(a, b, x)
    each = 3 * [x] if shared else x
    assert_same(found, torch.stack([plain(*w) for w in zip(a, b, each, strict=True)]), (a, b))


def test_tanh_network_under_vmap_over_copies_of_stacked_weights():
    """Copies of several samples each, as in training side by side."""
    a, b, x = weights_of(6)
    a, b, x = (t.unflatten(0, (2, 3)) for t in (a, b, x))
    x = x[:, 0]
    network = network_of()
    found = torch.func.vmap(lambda a, b, x: forward(network, {"a": a, "b": b}, x))(a, b, x)
    expected = [[plain(a[m, s], b[m, s], x[m]) for s in range(3)] for m in range(2)]
    assert_same(found, torch.stack([torch.stack(row) for row in expected]), (a, b))


# ------------------------------------------------------------------------------------ names and values


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", "sine"),
        ("hidden", 0),
        ("hidden", 2.5),
        ("true_weight", "five"),
        ("true_weight", math.nan),
        ("prior_mean", math.inf),
        ("prior_variance", 0),
        ("prior_variance", -1),
        ("num_train", 9),
        ("repetitions", 0),
        ("epochs", 0),
        ("draws", 1),
        ("units", 3),
    ],
)
def test_bad_settings_are_one_line(name, value):
    with pytest.raises(UsageError, match=rf"--task\.{name}") as info:
        resolved("mfvi", "singular_evidence", task_settings={name: value})
    assert "\n" not in str(info.value)


def test_method_without_density_is_one_line():
    with pytest.raises(UsageError, match=r"lacks the capability density.*nf_gamma") as info:
        resolved("mc_dropout", "singular_evidence")
    assert "\n" not in str(info.value)


def test_a_published_row_with_one_command(tmp_path):
    """The paper's name and preset, of a small row; record, metrics and curves are there."""
    values = FEW | {"true_weight": 5.0}
    done = bench.run(
        "nf_gamma_10_1_100_True", "singular_evidence", preset="paper", task_settings=values, out=tmp_path
    )
    assert done.record.method.name == "nf_gamma_10_1_100_True"
    assert done.record.metrics["converged"] == 2
    settings = json.loads((done.directory / "record.json").read_text())["method"]["settings"]
    assert (settings["shape"], settings["k"], settings["rate"]) == (10, 1, 100)
    assert settings["gradient"] == "gaussian"
    own, arrays = load_scores(done.directory)
    assert own.score(arrays)["psi"] == done.record.metrics["psi"]
    fitted = bench.load(done.directory)
    assert fitted.distribution().beta[0] == 20
