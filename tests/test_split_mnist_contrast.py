"""The contrast tasks: who is told the pair, metrics by hand, copies per head, and that they cannot tell."""

import numpy as np
import pytest
import torch
import toys

import bench
from bench import likelihoods, metrics
from bench.runs import registry, resolution
from bench.runs.runner import load_scores
from bench.tasks.split_mnist_contrast import SPLIT, SplitMNISTContrast

SCENARIOS = ("multi_head", "task_known_at_test")
LABELS = np.repeat(np.arange(10, dtype=np.uint8), 2)  # two test examples of each class


def make(scenario, **values):
    """A task on digits with its standard settings, but for `values`."""
    entry = registry.task(f"split_digits_{scenario}")
    return SplitMNISTContrast(registry.build(entry.cls.settings_class, {**entry.fixed, **values}, "task"))


def certain(within):
    """Stored log-probabilities `[N, 5, 2]` of one class in every pair, given as `[N, 5]` of 0 and 1."""
    return metrics.store(torch.nn.functional.one_hot(torch.as_tensor(within).long(), 2).double().log())


# ---- metrics by hand


def test_only_the_own_pair_counts():
    """Right within the own pair and wrong within all others is right."""
    within = 1 - np.repeat((LABELS % 2)[:, None], 5, 1)
    within[np.arange(20), LABELS // 2] = LABELS % 2
    arrays = {"predicted": np.stack([within] * 4), "log_probs": certain(within), "labels": LABELS}
    task = make("multi_head")
    np.testing.assert_array_equal(task.accuracy_matrix(arrays), np.ones((5, 5)))
    assert task.score(arrays)["average_nll"] == pytest.approx(0, abs=1e-9)


def test_matrix_and_nll_by_hand():
    """Class 2s is always said of pair s, but of pair 3 the right one from step 2 on, with probability 3/4."""
    low = np.zeros((20, 5), int)
    knows = low.copy()
    knows[:, 2] = LABELS % 2
    p = torch.full((20, 5, 2), 0.5, dtype=torch.float64)
    p[np.arange(20), 2, (LABELS % 2).astype(int)] = 0.75
    p[np.arange(20), 2, (1 - LABELS % 2).astype(int)] = 0.25
    p[:, [0, 1, 3, 4], 0] += 1e-3
    arrays = {
        "predicted": np.stack([low, knows, knows, knows]),
        "log_probs": metrics.store(p.log()),
        "labels": LABELS,
    }
    task = make("task_known_at_test")
    expected = np.full((5, 5), 0.5)
    expected[1:, 2] = 1
    np.testing.assert_array_equal(task.accuracy_matrix(arrays), expected)
    scores = task.score(arrays)
    assert scores["average_accuracy"] == pytest.approx(0.6)
    assert scores["average_nll"] == pytest.approx((4 * np.log(2) - np.log(0.75)) / 5, abs=1e-3)
    assert scores["learning_accuracy"] == pytest.approx(0.6)
    assert scores["minimum_learning_accuracy"] == 0.5
    # Pair 3 is known before it is learnt, and the other three later ones are guessed.
    assert scores["forward_transfer"] == pytest.approx((0.5 + 1 + 0.5 + 0.5) / 4 - 0.5)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_never_ranked_and_every_figure_says_what_it_is_not(scenario):
    low = np.zeros((20, 5), int)
    arrays = {"predicted": np.stack([low] * 4), "log_probs": certain(low), "labels": LABELS}
    for values in ({}, {"coreset": "random"}):
        task = make(scenario, **values)
        assert not task.spec.ranked
        for chart in task.figures(arrays).values():
            assert "No measure of sequential inference" in chart.to_json()
    names = [n for n, e in registry.tasks().items() if e.file == "split_mnist_contrast"]
    assert {f"split_{d}_{scenario}" for d in ("mnist", "fashion_mnist", "digits")} <= set(names)
    for name in names:
        assert "Not a measure of sequential inference" in registry.task(name).summary


# ---- the protocol


@pytest.mark.parametrize(
    ("scenario", "likelihood"),
    [("multi_head", likelihoods.MultiHead), ("task_known_at_test", likelihoods.Categorical)],
)
def test_steps_priors_and_likelihood(scenario, likelihood):
    engine = toys.Recorder()
    arrays = make(scenario).run(engine)
    assert [type(p.likelihood) for p in engine.problems] == [likelihood] * 5
    assert [p.prior for p in engine.problems[1:]] == [f"posterior {t}" for t in range(1, 5)]
    for problem, pair in zip(engine.problems, SPLIT, strict=True):
        assert set(problem.train.tensors[1].tolist()) == set(pair)
    assert engine.predictors == [1, 2, 3, 4, 5, 1]
    assert engine.logged[-1] == ("next_task_entropy", pytest.approx(np.log(2), rel=1e-6), 1)
    assert arrays["log_probs"].shape == (355, 5, 2)
    assert arrays["predicted"].shape == (4, 355, 5)
    assert set(np.unique(arrays["predicted"])) <= {0, 1}


def test_single_head_has_one_copy_on_all_coresets():
    engine = toys.Recorder()
    make("task_known_at_test", coreset="random", coreset_size=4).run(engine)
    assert [p.num_train for p in engine.problems[1::2]] == [4, 8, 12, 16, 20]
    assert engine.predictors == [2, 4, 6, 8, 10, 1]


def test_every_head_has_its_own_copy_on_its_own_coreset():
    """After step t the fits are the step's and one per head; a head that was not trained has no copy."""
    engine = toys.Recorder()
    arrays = make("multi_head", coreset="random", coreset_size=4).run(engine)
    kinds = [p.num_train == 4 for p in engine.problems]
    assert kinds == [t > 0 for step in range(1, 6) for t in range(step + 1)]
    number = 0
    for step in range(1, 6):
        number += 1
        fitted = number
        for s in range(step):
            copy = engine.problems[number]
            assert set(copy.train.tensors[1].tolist()) <= set(SPLIT[s])
            assert engine.starts[number].number == fitted
            assert copy.prior == f"posterior {fitted}"
            number += 1
    # After the last step 15 is the step's fit and 16 to 20 are the copies. The recorder's method k favours
    # class (k - 1) % 10: the fit 4, of the third pair, and the copies 5, 6, 7, 8 and 9. Of these 9 alone lies
    # in the pair of its own copy, the fifth.
    assert engine.predictors[-7:] == [15, 16, 17, 18, 19, 20, 1]
    p = np.exp(metrics.restore(arrays["log_probs"]))[0]
    np.testing.assert_allclose(p[:4], np.full((4, 2), 0.5), atol=1e-3)
    np.testing.assert_allclose(p[4], [1 / (np.e + 1), np.e / (np.e + 1)], atol=1e-3)


# ---- what it cannot tell


def test_same_posterior_as_the_single_headed_task_and_another_question(tmp_path):
    """Trained alike, fit for fit; the single head's predictions, conditioned on the pair, are these."""
    values = {"epochs": 2, "test_samples": 4}
    with resolution.untuned():  # tuned settings are those of one task
        single = bench.run("mfvi", "split_digits", task_settings=values, out=tmp_path)
        known = bench.run("mfvi", "split_digits_task_known_at_test", task_settings=values, out=tmp_path)
    _, one = load_scores(single.directory)
    _, other = load_scores(known.directory)
    conditioned = metrics.restore(metrics.restore(one["log_probs"]).reshape(-1, 5, 2))
    np.testing.assert_allclose(conditioned, metrics.restore(other["log_probs"]), atol=0.02)
    assert known.record.metrics["average_accuracy"] > 0.5
    assert single.record.metrics["average_accuracy"] < 0.3


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_fine_tuning_that_forgets_all_but_the_last_pair_looks_well(scenario, tmp_path):
    """Negative control: `map` has 0.2 single-headed."""
    done = bench.run("map", f"split_digits_{scenario}", out=tmp_path)
    assert done.record.metrics["average_accuracy"] > 0.7
    assert done.record.metrics["learning_accuracy"] > 0.9


@pytest.mark.parametrize(
    "method", ["mfvi", *(pytest.param(m, marks=pytest.mark.slow) for m in ("ewc", "laplace", "radial"))]
)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_methods_run_with_coresets(method, scenario, tmp_path):
    values = {"hidden": 4, "epochs": 1, "test_samples": 2, "coreset": "k_center", "coreset_size": 5}
    values |= {"coreset_epochs": 2, "coreset_prior": "initial"}
    name = f"split_digits_{scenario}"
    record = bench.run(method, name, preset="smoke", task_settings=values, out=tmp_path).record
    assert record.status == "completed"
    assert len(record.fits) == {"multi_head": 20, "task_known_at_test": 10}[scenario]
