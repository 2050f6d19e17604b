"""fidelity: distances by hand and by scipy, floors, the cheats that they must tell, the problems posed."""

import math
import re

import numpy as np
import pytest
import torch
from scipy import stats
from toys import Recorder

from bench import metrics
from bench.contract import Undefined
from bench.diagnostics import RHAT_LIMIT
from bench.predictions import Bernoulli, Categorical, Gaussian
from bench.runs import registry
from bench.spec import misfit
from bench.studies import references
from bench.studies.references import Reference
from bench.studies.small import flowers, points
from bench.tasks.fidelity import LEVELS, POSED, Fidelity, Settings

KINDS = sorted(POSED)
NORMAL = stats.norm.ppf(LEVELS)
"""80 quantiles of N(0, 1)."""


def make(posterior, **values):
    """The task with its standard settings, but for `values`."""
    return Fidelity(Settings(posterior=posterior, **values))


@pytest.fixture
def no_reference(monkeypatch, tmp_path):
    """Whatever references there are: none."""
    monkeypatch.setattr(references, "FOLDER", tmp_path)


def functions(means, sds, levels=NORMAL):
    """Draws `[S, N]` that are normal at every input, in quantiles."""
    return np.asarray(means) + np.asarray(sds) * levels[:, None]


def log_odds(*columns):
    """Draws `[S, N]` of log-odds from the probabilities at every input."""
    p = np.stack(columns, -1)
    return np.log(p / (1 - p))


def wasserstein(posterior, draws, reference):
    """The main metric."""
    return make(posterior).distances(draws, reference)["wasserstein"]


# ---- distances


@pytest.mark.parametrize(("s", "r"), [(1, 80), (80, 80), (7, 80), (80, 60)])
def test_wasserstein_is_that_of_scipy(s, r):
    g = np.random.default_rng(0)
    one, other = g.normal(size=(s, 5)), 1 + 2 * g.gumbel(size=(r, 5))
    expected = [stats.wasserstein_distance(one[:, n], other[:, n]) for n in range(5)]
    np.testing.assert_allclose(metrics.wasserstein(one, other, order=1), expected, rtol=1e-12)
    assert (metrics.wasserstein(one, other) >= expected).all()  # of order 2: Jensen


def test_numbers_are_in_standard_deviations_of_the_reference():
    """At one input the run is 3 sd away; at the other it is there with half of the spread."""
    reference = functions([0, 10], [1, 100])
    unit = reference.std(0)
    distance = wasserstein("toy", functions([3 * unit[0], 10], [1, 50]), reference)
    half = np.abs(NORMAL).mean() / 2 / NORMAL.std()
    assert distance == pytest.approx((3 + half) / 2)
    assert half == pytest.approx(math.sqrt(2 / math.pi) / 2, abs=0.01)


def test_point_at_the_mean_is_the_mean_absolute_deviation_away():
    """What the best point prediction scores under a normal posterior: sqrt(2 / pi), but for the tails."""
    reference = functions([5, -1], [2, 0.1])
    assert wasserstein("diabetes", np.array([[5.0, -1.0]]), reference) == pytest.approx(0.798, abs=0.008)


def test_probabilities_by_hand():
    """Sure of either class with even odds, against 1/2: half of the mass moves, and no average does."""
    near = 1e-9
    reference = log_odds(np.array([near, 1 - near]))
    found = make("digits").distances(np.zeros((1, 1)), reference)
    assert found["wasserstein"] == pytest.approx(0.5)
    assert found["total_variation"] == pytest.approx(0, abs=1e-8)
    other = make("digits").distances(log_odds(np.array([0.9])), log_odds(np.array([0.3])))
    assert other == pytest.approx({"wasserstein": 0.6, "total_variation": 0.6, "agreement": 0.0})


def test_three_classes_by_hand():
    """Half the sum over the classes: of two points the total variation distance."""
    one, other = np.log([[[0.7, 0.2, 0.1]]]), np.log([[[0.3, 0.3, 0.4]]])
    found = make("iris").distances(one, other)
    assert found == pytest.approx({"wasserstein": 0.4, "total_variation": 0.4, "agreement": 0.0})


@pytest.mark.parametrize("posterior", ["iris", "digits"])
def test_wasserstein_is_at_least_the_total_variation(posterior):
    """Averaging loses: by Jensen, for any two sets of draws."""
    g = torch.Generator().manual_seed(0)
    shape = (6, 3) if posterior == "iris" else (6,)
    for scale in (0.1, 1, 5):
        one, other = (scale * torch.randn(s, *shape, generator=g) for s in (4, 9))
        if posterior == "iris":
            one, other = one.log_softmax(-1), other.log_softmax(-1)
        found = make(posterior).distances(one.numpy(), other.numpy())
        assert found["wasserstein"] >= found["total_variation"] - 1e-12


# ---- floors


def arrays_of(posterior, draws, reference, second):
    """Arrays of a run, with made-up targets."""
    n = draws.shape[1]
    truth = {"targets": np.zeros(n)} if POSED[posterior].likelihood is None else {"labels": np.zeros(n, int)}
    return {"draws": draws, "reference": reference, "second": second} | truth


def examples(posterior, size, seed):
    """Draws `[80, size, ...]` of something, as they are stored."""
    g = torch.Generator().manual_seed(seed)
    shape = (80, size, 3) if posterior == "iris" else (80, size)
    draws = torch.randn(shape, generator=g)
    return (draws.log_softmax(-1) if posterior == "iris" else draws).half().numpy()


@pytest.mark.parametrize("posterior", KINDS)
def test_equal_draws_are_at_no_distance(posterior):
    same = examples(posterior, 5, 0)
    scores = make(posterior).score(arrays_of(posterior, same, same[::-1], same))
    for name in ("wasserstein", "total_variation"):
        for metric in (name, f"{name}_floor"):
            assert scores.get(metric, 0.0) == pytest.approx(0, abs=1e-12)
    assert scores.get("agreement", 1.0) == scores.get("agreement_floor", 1.0) == 1.0
    assert scores.keys() == make(posterior).spec.metrics.keys()


@pytest.mark.parametrize("posterior", KINDS)
def test_floor_is_the_score_of_the_second_run(posterior):
    """Whatever the run predicts."""
    run, reference, second = (examples(posterior, 5, seed) for seed in range(3))
    task = make(posterior)
    scores = task.score(arrays_of(posterior, run, reference, second))
    others = task.score(arrays_of(posterior, second, reference, run))
    for name in task.spec.metrics.keys() - {"nll"}:
        pair = name.removesuffix("_floor") if name.endswith("_floor") else f"{name}_floor"
        assert scores[name] == others[pair]
    assert scores["wasserstein"] != scores["wasserstein_floor"]


def test_halves_of_a_sampler_become_reference_and_second_run():
    """Two chains far apart: each array is of one of them alone."""
    draws = np.concatenate([functions([0.0], [1.0]).repeat(5, 0), functions([100.0], [1.0]).repeat(5, 0)])
    found = make("toy").reference({"draws": draws.astype(np.float16)})
    assert {key: (a.shape, a.dtype) for key, a in found.items()} == {
        key: ((80, 1), np.float32) for key in ("reference", "second")
    }
    assert np.abs(found["reference"]).max() < 4
    assert np.abs(found["second"] - 100.0).max() < 4
    np.testing.assert_allclose(found["reference"][:, 0], NORMAL, atol=0.05)


# ---- cheats


def test_right_mean_with_wrong_spread_is_worse_than_the_right_spread():
    reference = functions([0, 3], [1, 2])
    exact = functions([0, 3], [1, 2], stats.norm.ppf((np.arange(40) + 0.5) / 40))
    distances = [wasserstein("toy", draws, reference) for draws in (exact, exact[20:21])]
    for factor in (0.0, 0.5, 2.0):
        assert wasserstein("toy", functions([0, 3], [factor, 2 * factor]), reference) > 10 * distances[0]


def test_averaged_prediction_alone_is_told_from_a_posterior():
    """Cheat: every draw is the reference's own average. Agreement and total variation are perfect."""
    reference = log_odds(*np.random.default_rng(0).beta(0.5, 0.5, (5, 80)))
    average = 1 / (1 + np.exp(-reference))
    cheat = log_odds(*average.mean(0)[:, None].repeat(80, 1))
    found = make("digits").distances(cheat, reference)
    assert found["agreement"] == 1
    assert found["total_variation"] == pytest.approx(0, abs=1e-12)
    assert found["wasserstein"] > 0.2


def test_permuted_classes_and_inputs_are_told():
    reference = examples("iris", 20, 0).astype(float) * 3
    reference -= np.log(np.exp(reference).sum(-1, keepdims=True))
    task = make("iris")
    for cheat in (reference[..., [1, 2, 0]], reference[:, ::-1]):
        found = task.distances(cheat, reference)
        assert found["wasserstein"] > 0.02
        assert found["agreement"] < 0.7
    flipped = task.distances(reference[::-1], reference)  # the order of draws is none of a posterior's
    assert flipped["wasserstein"] == pytest.approx(0, abs=1e-12)


# ---- likelihoods


def test_nll_by_hand():
    """Two draws of a function, one right and one far off; two draws of a probability."""
    noise = POSED["toy"].noise
    arrays = {"draws": np.array([[1.0], [1e3]]), "targets": np.array([1.0])}
    expected = math.log(2) + 0.5 * math.log(2 * math.pi * noise**2)
    assert make("toy").nll(arrays) == pytest.approx(expected)
    draws = log_odds(np.array([0.2, 0.6]), np.array([0.9, 0.9]), np.array([0.5, 0.5]))
    arrays = {"draws": draws, "labels": np.array([0, 1, 7])}  # seven is neither class
    assert make("digits").nll(arrays) == pytest.approx(-(math.log(0.6) + math.log(0.9)) / 2)
    draws = np.log([[[0.2, 0.7, 0.1]], [[0.4, 0.5, 0.1]]])
    assert make("iris").nll({"draws": draws, "labels": np.array([0])}) == pytest.approx(-math.log(0.3))


# ---- what is kept of predictions


def test_draws_are_those_of_the_prediction():
    scores = torch.randn(3, 4, 3, generator=torch.Generator().manual_seed(0))
    log_probs = scores.log_softmax(-1)
    assert torch.equal(make("iris").draws(Categorical(log_probs)), log_probs)
    assert torch.equal(make("digits").draws(Bernoulli(scores[..., 0])), scores[..., 0])
    noise = torch.full((3, 4, 1), POSED["toy"].noise ** 2)
    assert torch.equal(make("toy").draws(Gaussian(scores[..., :1], noise)), scores[..., 0])


@pytest.mark.parametrize("samples", [1, 2])
def test_normal_wider_than_the_noise_is_spread_of_the_function(samples):
    """A method that predicts in closed form is no point mass; two samples are a mixture."""
    centres = torch.tensor([0.0, 100.0])[:samples]
    mean = centres[:, None, None].expand(samples, 3, 1)
    prediction = Gaussian(mean, torch.full_like(mean, 4.0) + POSED["toy"].noise ** 2)
    draws = make("toy").draws(prediction).numpy()
    assert draws.shape == (80, 3)
    exact = np.concatenate([c + 2 * NORMAL for c in centres.numpy()])[:, None].repeat(3, 1)
    assert metrics.wasserstein(draws, exact, order=1).max() < 0.1


# ---- the protocol


@pytest.mark.parametrize("posterior", KINDS)
def test_problem_is_small_and_of_known_noise(posterior):
    problem, part = make(posterior).problem(), make(posterior).examples
    assert sum(p.numel() for p in problem.network().parameters()) <= 1400
    assert next(problem.likelihood.parameters(), None) is None
    assert problem.val is None
    assert problem.num_train == len(problem.train) == len(part.inputs)
    prior = problem.prior(dict(problem.network().named_parameters()))
    assert all((p.mean == 0).all() and (p.variance == 1).all() for p in prior.values())
    outputs = problem.network()(part.test_inputs)
    assert outputs.shape == (POSED[posterior].test, POSED[posterior].network[1])


def test_other_units_are_another_posterior():
    """The layers keep their number, the data their order; a reference of other units counts for nothing."""
    for posterior, units, layers in (("toy", 5, 1), ("iris", 7, 2), ("toy", POSED["toy"].network[2][0], 1)):
        task = make(posterior, units=units)
        shapes = [tuple(p.shape) for p in task.problem().network().parameters() if p.ndim == 2]
        assert [rows for rows, _ in shapes[:-1]] == [units] * layers
        assert task.target == f"fidelity-{posterior}-units={units}" != make(posterior).target
        assert torch.equal(task.examples.inputs, make(posterior).examples.inputs)
    assert make("toy", units=9).targets().keys() == {"targets"}  # there is none of 9


def test_data_are_those_of_the_named_tasks():
    toy, iris, diabetes, digits = (make(p).examples for p in ("toy", "iris", "diabetes", "digits"))
    assert torch.equal(toy.inputs, points("train")[0][::10])
    assert (len(toy.inputs), int((toy.inputs < 0).sum())) == (150, 75)
    assert torch.equal(iris.inputs, flowers("train")[0])
    uci = registry.task("diabetes_regression").cls
    split = uci(registry.build(uci.settings_class, {"dataset": "diabetes"}, "task"))
    assert len(diabetes.inputs) == 398
    np.testing.assert_allclose(diabetes.inputs.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(diabetes.inputs.std(0, correction=0), 1, atol=1e-5)
    np.testing.assert_array_equal(make("diabetes").held_out(), split.targets()["targets"][0])
    train = split.rows(0)[0]
    np.testing.assert_allclose(
        diabetes.centre + diabetes.scale * diabetes.targets[:, 0].numpy(),
        split.table.targets[train],
        rtol=1e-5,
    )
    assert sorted(digits.targets.unique().tolist()) == [0, 1]
    assert len(digits.test_inputs) == 355


def test_noise_of_diabetes_is_the_residual_of_least_squares():
    part = make("diabetes").examples
    inputs = np.column_stack([part.inputs.double(), np.ones(len(part.inputs))])
    targets = part.targets.double().numpy()[:, 0]
    residual = targets - inputs @ np.linalg.lstsq(inputs, targets, rcond=None)[0]
    assert POSED["diabetes"].noise == pytest.approx(residual.std() * part.scale, rel=0.02)
    # What is posed is in the unit of standardised targets.
    assert make("diabetes").problem().likelihood.log_sigma.exp() == pytest.approx(residual.std(), rel=0.02)


def test_one_fit_and_predictions_at_the_test_inputs():
    recorder = Recorder()
    recorder.predict = lambda method, inputs, num_samples: Gaussian(
        torch.zeros(3 * num_samples, len(inputs), 1), torch.full((3 * num_samples, len(inputs), 1), 0.16)
    )  # an ensemble of three
    arrays = make("toy", epochs=7).run(recorder)
    (problem,), (budget,) = recorder.problems, recorder.budgets
    assert (problem.num_train, budget.epochs, budget.batch_size) == (150, 7, 50)
    assert arrays["draws"].shape == (80, 300)
    assert arrays["draws"].dtype == np.float32


@pytest.mark.parametrize("posterior", KINDS)
def test_a_fifth_is_set_aside_to_tune_by(posterior):
    """Every fifth example, which no fit sees; the logged NLL is that of a prediction of 0, by hand."""
    whole, part = make(posterior).problem(), make(posterior, validation=0.2)
    aside = part.set_aside.numpy()
    assert aside.sum() == pytest.approx(len(aside) / 5, abs=1)
    assert np.diff(np.flatnonzero(aside)).max() <= 6  # evenly
    problem = part.problem()
    assert problem.num_train == len(problem.train) == (~aside).sum()
    for kept, given in zip(problem.train.tensors, whole.train.tensors, strict=True):
        assert torch.equal(kept, given[~aside])

    def zeros(method, inputs, num_samples):
        """Outputs of 0."""
        nothing = torch.zeros(num_samples, len(inputs), {"iris": 3}.get(posterior, 1))
        match posterior:
            case "iris":
                return Categorical(nothing.log_softmax(-1))
            case "digits":
                return Bernoulli(nothing[..., 0])
        return Gaussian(nothing, torch.full_like(nothing, noise**2))

    targets = whole.train.tensors[1][aside].double().numpy().ravel()
    noise = part.posed.noise / part.examples.scale  # in the unit of the outputs, which is `scale` targets
    recorder, other = Recorder(), Recorder()
    recorder.predict = other.predict = zeros
    part.run(recorder)
    expected = {"iris": math.log(3), "digits": math.log(2)}.get(posterior)
    if expected is None:  # log(scale): a density per target
        expected = -stats.norm(0, noise).logpdf(targets).mean() + math.log(part.examples.scale)
    assert recorder.logged == [("nll", pytest.approx(expected, rel=1e-6))]
    make(posterior).run(other)
    assert other.logged == []


def test_every_member_of_an_ensemble_keeps_its_share():
    """Of three times 80 draws, which tell their member, 80 are kept: a third of each member's, to one."""
    recorder = Recorder()
    recorder.predict = lambda method, inputs, num_samples: Gaussian(
        torch.arange(3).repeat_interleave(num_samples)[:, None, None].expand(-1, len(inputs), 1).float(),
        torch.full((3 * num_samples, len(inputs), 1), 0.16),
    )
    draws = make("toy", epochs=7).run(recorder)["draws"]
    assert draws.shape == (80, 300)
    assert np.unique(draws[:, 0], return_counts=True)[1] == pytest.approx([27, 26, 27], abs=1)


def test_without_reference_the_distances_say_why(no_reference):
    for posterior in KINDS:
        task = make(posterior)
        run = examples(posterior, 5, 0)
        arrays = arrays_of(posterior, run, run, run)
        del arrays["reference"], arrays["second"]
        scores = task.score(arrays)
        assert isinstance(scores.pop("nll"), float)
        for name, value in scores.items():
            assert isinstance(value, Undefined)
            assert f"no reference for fidelity-{posterior}" in value.reason
            assert task.spec.metrics[name].may_be_undefined


# ---- the references of the project


REFERENCES = sorted(path.stem for path in references.FOLDER.glob("fidelity-*.json"))


def test_every_problem_has_a_reference():
    assert {f"fidelity-{posterior}" for posterior in KINDS} <= set(REFERENCES)


@pytest.mark.parametrize("target", REFERENCES)
def test_reference_is_of_two_mixed_halves_and_small(target):
    """An even number of chains, so that no chain is in both; 80 exact draws are near 80 quantiles."""
    posterior, units = re.fullmatch(r"fidelity-(\w+?)(?:-units=(\d+))?", target).groups()
    task = make(posterior, units=None if units is None else int(units))
    assert task.target == target
    path = references.FOLDER / f"{target}.json"
    found = Reference.model_validate_json(path.read_bytes())
    assert int(re.search(r"--method\.chains (\d+)", found.command)[1]) in (8, 10, 12, 16)
    assert found.diagnostics["prediction_rhat"] <= RHAT_LIMIT
    assert path.with_suffix(".safetensors").stat().st_size < 200_000
    arrays = references.read(target)
    layouts = {name: layout for name, layout in task.layouts().items() if name in arrays}
    assert misfit(layouts, {name: (a.dtype.name, a.shape) for name, a in arrays.items()}) is None
    floor = task.distances(arrays["second"], arrays["reference"])["wasserstein"]
    # n independent draws of a normal are 0.9 / sqrt(n) sd away on average, and 80 of a chain are fewer.
    assert 0 < floor < (0.3 if POSED[posterior].likelihood is None else 0.1)
