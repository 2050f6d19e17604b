"""The permuted tasks: permutations, the triangular matrix by hand, the protocol."""

import numpy as np
import pytest
import torch
import toys

import bench
from bench import data, figures, metrics
from bench.runs import registry
from bench.studies.coreset import k_center
from bench.tasks.permuted_mnist import PermutedMNIST


def make(**values):
    """The task on digits with its standard settings, but for `values`."""
    entry = registry.task("permuted_digits")
    return PermutedMNIST(registry.build(entry.cls.settings_class, {**entry.fixed, **values}, "task"))


# ---- data


def test_first_step_is_plain_and_the_others_are_permutations_of_their_own():
    task = make()
    permutations = [task.permutation(step) for step in range(10)]
    assert torch.equal(permutations[0], torch.arange(64))
    assert all(torch.equal(p.sort().values, torch.arange(64)) for p in permutations)
    assert len({tuple(p.tolist()) for p in permutations}) == 10
    inputs = task.images.test_inputs[:5]
    assert torch.equal(task.permuted(inputs, 0), inputs)
    moved = task.permuted(inputs, 3).flatten(1)
    for new, old in enumerate(permutations[3].tolist()):
        assert torch.equal(moved[:, new], inputs.flatten(1)[:, old])


def test_permutations_do_not_depend_on_global_randomness_and_are_part_of_the_identity(monkeypatch):
    torch.manual_seed(1)
    first, digest = make().permutation(4), make().data_digest()
    torch.manual_seed(2)
    assert torch.equal(make().permutation(4), first)
    assert make().data_digest() == digest != make().images.digest
    monkeypatch.setattr(PermutedMNIST, "permutation", lambda self, step: torch.arange(64).roll(step))
    assert make().data_digest() != digest


def test_training_validation_and_test_are_permuted_alike():
    task = make()
    plain, moved = task.problem(0), task.problem(5)
    for a, b in ((plain.train, moved.train), (plain.val, moved.val)):
        assert torch.equal(task.permuted(a.tensors[0], 5), b.tensors[0])
        assert torch.equal(a.tensors[1], b.tensors[1])


def test_farthest_points_are_the_same_under_every_permutation():
    """Why they are searched once: sixteenths of whole numbers, whose squared distances are exact."""
    task = make(coreset="k_center", coreset_size=30)
    train = make().rows(0).train
    for step in (0, 4):
        points = task.permuted(task.images.train_inputs[train], step).flatten(1)
        assert torch.equal(task.rows(step).coreset, train[k_center(points, 30)])


def test_random_coresets_differ_by_step():
    task = make(coreset="random", coreset_size=30)
    assert len({tuple(task.rows(step).coreset.tolist()) for step in range(10)}) == 10


# ---- metrics by hand


def test_matrix_by_hand():
    """After step t the first of three examples is right on step t, the other two on the steps before."""
    labels = np.array([1, 2, 3], np.uint8)
    right = {True: [1, 0, 0], False: [0, 2, 3]}
    steps = [[right[s == t] for s in range(t + 1)] for t in range(10)]
    p = torch.full((10, 3, 10), 0.05, dtype=torch.float64)
    for s, classes in enumerate(steps[-1]):
        p[s, torch.arange(3), torch.tensor(classes)] = 0.55
    arrays = {
        "predicted": np.array([x for step in steps[:-1] for x in step], np.uint8),
        "log_probs": metrics.store(p.log()),
        "labels": labels,
    }
    matrix = make().accuracy_matrix(arrays)
    assert np.isnan(matrix[np.triu_indices(10, 1)]).all()
    np.testing.assert_allclose(np.diag(matrix), np.full(10, 1 / 3))
    np.testing.assert_allclose(matrix[np.tril_indices(10, -1)], np.full(45, 2 / 3))
    scores = make().score(arrays)
    assert scores["average_accuracy"] == pytest.approx((9 * 2 / 3 + 1 / 3) / 10)
    assert scores["learning_accuracy"] == pytest.approx(1 / 3)
    assert scores["minimum_learning_accuracy"] == pytest.approx(1 / 3)
    assert scores["forgetting"] == pytest.approx((0 * 8 + (1 / 3 - 2 / 3)) / 9)
    assert scores["backward_transfer"] == pytest.approx(1 / 3)
    good, bad = -np.log(0.55), -np.log(0.05)
    expected = (9 * (2 * good + bad) + good + 2 * bad) / 30
    assert scores["average_nll"] == pytest.approx(expected, abs=2e-3)


def test_arrays_of_mnist_fit_into_a_committed_record():
    assert 45 * 10_000 + 10 * 10_000 * 10 * 2 + 10_000 < 3 * 2**20
    assert data.SOURCES["mnist"].test == 10_000


def test_not_ranked_and_every_figure_says_why():
    arrays = {
        "predicted": np.zeros((45, 3), np.uint8),
        "log_probs": metrics.store(torch.full((10, 3, 10), 0.1).log()),
        "labels": np.array([0, 1, 2], np.uint8),
    }
    task = make(coreset="random")
    assert not task.spec.ranked
    for chart in task.figures(arrays).values():
        written = chart.to_json()
        assert all(line in written for line in figures.wrapped(PermutedMNIST.warning, 66))
        assert "Coreset random, 200 a step, posterior prior" in chart.to_json()


# ---- the protocol


def test_every_step_has_the_last_posterior_as_prior_and_tests_what_was_seen():
    engine = toys.Recorder()
    task = make()
    arrays = task.run(engine)
    assert [p.prior for p in engine.problems[1:]] == [f"posterior {t}" for t in range(1, 10)]
    assert [None if s is None else s.number for s in engine.starts] == [None, *range(1, 10)]
    assert {(b.epochs, b.batch_size) for b in engine.budgets} == {(10, 256)}
    assert engine.predictors == [t for t in range(1, 11) for _ in range(t)] + [1]
    assert torch.equal(engine.inputs[-1], engine.problems[1].train.tensors[0])
    test, seen = task.images.test_inputs, iter(engine.inputs)
    for t in range(10):
        for s in range(t + 1):
            inputs = next(seen)
            assert torch.equal(inputs[: len(test)], task.permuted(test, s))
            assert torch.equal(inputs[len(test) :], engine.problems[s].val.tensors[0])
    assert arrays["predicted"].shape == (45, 355)
    assert arrays["log_probs"].shape == (10, 355, 10)
    assert [n for n, *_ in engine.logged] == ["average_accuracy"] * 10 + ["next_task_entropy"]


def test_copies_are_trained_on_all_coresets_so_far_under_their_own_permutations():
    engine = toys.Recorder()
    task = make(coreset="k_center", coreset_size=6, coreset_epochs=3)
    task.run(engine)
    assert [p.num_train for p in engine.problems[1::2]] == [6 * t for t in range(1, 11)]
    assert {(b.epochs, b.batch_size) for b in engine.budgets[1::2]} == {(3, None)}
    assert engine.predictors == [2 * t for t in range(1, 11) for _ in range(t)] + [1]
    last = engine.problems[-1].train.tensors[0]
    plain = task.images.train_inputs[task.rows(0).coreset]
    for step, own in enumerate(last.split(6)):
        assert torch.equal(own, task.permuted(plain, step))


def test_run_with_coresets_completes(tmp_path):
    values = {"hidden": 4, "epochs": 1, "test_samples": 2, "coreset": "random", "coreset_size": 5}
    values |= {"coreset_epochs": 1, "coreset_only": True, "coreset_prior": "initial"}
    record = bench.run("mfvi", "permuted_digits", task_settings=values, out=tmp_path).record
    assert len(record.fits) == 20
    assert record.validation.keys() == {"average_accuracy", "next_task_entropy"}
    assert 0 < record.validation["next_task_entropy"] <= np.log(10) + 1e-6
