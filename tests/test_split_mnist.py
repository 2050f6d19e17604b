"""The split tasks: metrics by hand, the protocol, adversarial predictions, and the published pattern."""

import math

import numpy as np
import pytest
import torch
import toys
from plans import resolved
from published import need

import bench
from bench import metrics
from bench.contract import Undefined
from bench.errors import UsageError
from bench.leaderboard.evidence import entries
from bench.runs import registry
from bench.runs.runner import load_scores
from bench.studies.coreset import k_center
from bench.tasks.split_mnist import SPLIT, SplitMNIST

LABELS = np.repeat(np.arange(10, dtype=np.uint8), 2)  # two test examples of each class


def make(name="split_digits", **values):
    """A split task with its standard settings, but for `values`."""
    entry = registry.task(name)
    return SplitMNIST(registry.build(entry.cls.settings_class, {**entry.fixed, **values}, "task"))


def one_hot(classes, probability=1.0):
    """Stored log-probabilities that give each example's class this probability, the rest evenly."""
    rest = (1 - probability) / 9
    p = torch.full((len(classes), 10), rest, dtype=torch.float64)
    p[torch.arange(len(classes)), torch.as_tensor(classes).long()] = probability
    return metrics.store(p.log())


def arrays_of(*steps, last=None, labels=LABELS):
    """Arrays of a run whose class predictions are `steps`; of the last step as certain log-probabilities."""
    last = one_hot(steps[-1]) if last is None else last
    return {"predicted": np.array(steps[:-1], np.uint8), "log_probs": last, "labels": labels}


def forgets(t):
    """Predictions of a network that knows pair t alone: right on it, class 2t on all else."""
    pair = SPLIT[t]
    return np.where(np.isin(LABELS, pair), LABELS, pair[0])


# ---- metrics by hand


def test_matrix_and_metrics_of_total_forgetting():
    arrays = arrays_of(*(forgets(t) for t in range(5)))
    np.testing.assert_array_equal(SplitMNIST.accuracy_matrix(arrays), np.eye(5))
    scores = make().score(arrays)
    assert scores["average_accuracy"] == pytest.approx(0.2, abs=1e-15)
    assert scores["learning_accuracy"] == scores["minimum_learning_accuracy"] == 1
    assert scores["forgetting"] == 1
    assert scores["backward_transfer"] == -1
    assert scores["average_nll"] == pytest.approx(0.8 * 1e4, rel=1e-6)  # zero is stored as exp(-1e4)


def test_metrics_of_perfect_memory():
    seen = [np.where(2 * (t + 1) > LABELS, LABELS, 0) for t in range(5)]
    scores = make().score(arrays_of(*seen))
    assert scores == {
        "average_accuracy": 1.0,
        "average_nll": 0.0,
        "learning_accuracy": 1.0,
        "minimum_learning_accuracy": 1.0,
        "forgetting": 0.0,
        "backward_transfer": 0.0,
    }


def test_metrics_of_learning_nothing_after_the_first_step():
    """The other way to 20%: only the learning accuracies tell it from total forgetting."""
    scores = make().score(arrays_of(*[forgets(0)] * 5))
    assert scores["average_accuracy"] == pytest.approx(0.2)
    assert scores["learning_accuracy"] == pytest.approx(0.2)
    assert scores["minimum_learning_accuracy"] == 0
    assert scores["forgetting"] == scores["backward_transfer"] == 0


def test_metrics_of_an_uneven_matrix():
    """A by hand; best past and diagonal differ, the last pair counts neither as forgotten nor transferred."""
    matrix = np.array(
        [
            [0.50, 0.00, 0.25, 0.00, 0.00],
            [0.75, 1.00, 0.00, 0.00, 0.00],
            [0.25, 0.50, 0.75, 0.00, 1.00],
            [0.00, 0.25, 1.00, 1.00, 0.00],
            [0.50, 0.00, 0.25, 1.00, 0.75],
        ]
    )
    labels = np.repeat(np.arange(10, dtype=np.uint8), 2)  # four examples a pair
    steps = []
    for row in matrix:
        predicted = (labels + 5) % 10
        for s, share in enumerate(row):
            rows = np.flatnonzero(labels // 2 == s)[: round(4 * share)]
            predicted[rows] = labels[rows]
        steps.append(predicted)
    arrays = arrays_of(*steps)
    np.testing.assert_array_equal(SplitMNIST.accuracy_matrix(arrays), matrix)
    scores = make().score(arrays)
    assert scores["average_accuracy"] == pytest.approx((0.5 + 0 + 0.25 + 1 + 0.75) / 5)
    assert scores["learning_accuracy"] == pytest.approx((0.5 + 1 + 0.75 + 1 + 0.75) / 5)
    assert scores["minimum_learning_accuracy"] == 0.5
    assert scores["forgetting"] == pytest.approx((0.25 + 1 + 0.75 + 0) / 4)
    assert scores["backward_transfer"] == pytest.approx((0 - 1 - 0.5 + 0) / 4)


def test_average_is_over_pairs_and_not_over_examples():
    """Three examples of class 0 and one of each other class: pairs of four and of two examples."""
    labels = np.array([0, 0, 0, *range(1, 10)], np.uint8)
    scores = make().score(arrays_of(*[np.where(labels == 0, 0, 9)] * 5, labels=labels))
    assert scores["average_accuracy"] == pytest.approx((3 / 4 + 0 + 0 + 0 + 1 / 2) / 5)


def test_nll_by_hand():
    arrays = arrays_of(*[LABELS] * 5, last=one_hot(LABELS, 0.5))
    assert make().score(arrays)["average_nll"] == pytest.approx(math.log(2), abs=1e-3)  # float16
    arrays["log_probs"] = one_hot((LABELS + 1) % 10, 0.5)
    assert make().score(arrays)["average_nll"] == pytest.approx(math.log(18), abs=1e-3)


def test_joint_training_has_no_forgetting_and_says_why():
    arrays = {"log_probs": one_hot(LABELS), "labels": LABELS}
    task = make(order="joint")
    scores = task.score(arrays)
    assert (scores.pop("average_accuracy"), scores.pop("average_nll")) == (1, 0)
    assert set(scores.values()) == {Undefined("joint training has one step")}
    assert all(task.spec.metrics[name].may_be_undefined for name in scores)
    assert not any(metric.may_be_undefined for metric in make().spec.metrics.values())
    assert [row.x for row in task.curves(arrays)] == [1] * 6
    assert not task.spec.ranked
    assert not task.spec.requires


def test_curve_of_seen_pairs():
    rows = make().curves(arrays_of(*(forgets(t) for t in range(5))))
    seen = [row.value for row in rows if row.series == "seen pairs"]
    assert seen == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4, 1 / 5])  # the published 100/50/33/25/20 %


# ---- adversarial predictions


@pytest.mark.parametrize("constant", range(10))
def test_constant_prediction_scores_a_tenth(constant):
    scores = make().score(arrays_of(*[np.full_like(LABELS, constant)] * 5))
    assert scores["average_accuracy"] == pytest.approx(0.1)
    assert scores["minimum_learning_accuracy"] == 0
    assert scores["forgetting"] == 0


def test_uniform_prediction_gains_nothing_from_ties():
    uniform = metrics.store(torch.full((len(LABELS), 10), -math.log(10)))
    scores = make().score(arrays_of(*[np.zeros_like(LABELS)] * 5, last=uniform))
    assert scores["average_accuracy"] == pytest.approx(0.1)
    assert scores["average_nll"] == pytest.approx(math.log(10), rel=1e-12)


def test_shuffled_labels_score_chance():
    labels = np.repeat(np.arange(10, dtype=np.uint8), 1000)
    shuffled = np.random.default_rng(0).permutation(labels)
    scores = make().score(arrays_of(*[shuffled] * 5, labels=labels))
    # Standard error of an accuracy of 0.1 over 10,000 examples: 0.003; four of them.
    assert scores["average_accuracy"] == pytest.approx(0.1, abs=0.012)
    assert scores["learning_accuracy"] == pytest.approx(0.1, abs=0.012)


# ---- the protocol


@pytest.fixture(scope="module")
def recorded():
    """What the sequential task on digits asks of an engine, and its arrays."""
    engine = toys.Recorder()
    return engine, make().run(engine)


def test_steps_see_their_own_classes_only(recorded):
    engine, _ = recorded
    assert len(engine.problems) == 5
    for problem, pair in zip(engine.problems, SPLIT, strict=True):
        for part in (problem.train, problem.val):
            assert set(part.tensors[1].tolist()) == set(pair)
        assert problem.num_train == len(problem.train)
        assert problem.network()[-1].out_features == 10  # one head over all classes


def test_prior_of_a_step_is_the_posterior_of_the_step_before(recorded):
    engine, _ = recorded
    assert [p.prior for p in engine.problems[1:]] == [f"posterior {t}" for t in range(1, 5)]
    parameters = dict(engine.problems[0].network().named_parameters())
    for first in engine.problems[0].prior(parameters).values():
        assert (first.mean == 0).all()
        assert (first.variance == 1).all()
    assert [None if s is None else s.number for s in engine.starts] == [None, 1, 2, 3, 4]


def test_budget_and_stages(recorded):
    engine, arrays = recorded
    assert {(b.epochs, b.batch_size, b.patience) for b in engine.budgets} == {(10, 128, None)}
    assert engine.stages == [*((f"step {t}", t, 5) for t in range(1, 6)), ("after step 1", 5, 5)]
    assert [(name, step) for name, _, step in engine.logged] == [
        *(("average_accuracy", t) for t in range(1, 6)),
        ("next_task_entropy", 1),
    ]
    assert arrays.keys() == {"log_probs", "predicted"}
    assert arrays["log_probs"].shape == (355, 10)
    assert arrays["predicted"].shape == (4, 355)
    assert arrays["predicted"].dtype == np.uint8


def test_predictions_are_on_the_whole_test_set_and_the_validation_sets_seen_so_far(recorded):
    engine, _ = recorded
    test = make().images.test_inputs
    assert engine.predictors == [1, 2, 3, 4, 5, 1]
    for step, inputs in enumerate(engine.inputs[:5], 1):
        assert torch.equal(inputs[: len(test)], test)
        assert len(inputs) == len(test) + sum(len(p.val) for p in engine.problems[:step])


def test_entropy_is_that_of_the_first_posterior_on_the_training_inputs_of_step_2(recorded):
    """Of even predictions it is log 10; it comes last, where it shifts the draws of no other prediction."""
    engine, _ = recorded
    assert torch.equal(engine.inputs[5], engine.problems[1].train.tensors[0])
    assert engine.logged[-1] == ("next_task_entropy", pytest.approx(math.log(10), rel=1e-6), 1)


@pytest.mark.parametrize("order", ["sequential", "joint"])
def test_validation_is_the_last_tenth_of_each_class_and_disjoint(order):
    task = make(order=order)
    images = task.images
    pixels = images.train_inputs.flatten(1)
    for step, classes in enumerate(task.steps()):
        problem = task.problem(step)
        for c in classes:
            rows = pixels[images.train_labels == c]
            cut = len(rows) - len(rows) // 10
            for part, expected in ((problem.train, rows[:cut]), (problem.val, rows[cut:])):
                inputs, labels = part.tensors
                assert torch.equal(inputs.flatten(1)[labels == c], expected)
    sizes = [len(task.problem(s).train) + len(task.problem(s).val) for s in range(len(task.steps()))]
    assert sum(sizes) == len(images.train_labels)


def test_joint_is_one_step_over_all_classes():
    engine = toys.Recorder()
    arrays = make(order="joint").run(engine)
    (problem,) = engine.problems
    assert set(problem.train.tensors[1].tolist()) == set(range(10))
    assert arrays.keys() == {"log_probs"}
    assert engine.predictors == [1]


def test_targets_are_the_published_test_labels():
    targets = make().targets()
    assert targets.keys() == {"labels"}
    assert targets["labels"].dtype == np.uint8
    np.testing.assert_array_equal(targets["labels"], make().images.test_labels)


# ---- coresets


@pytest.fixture(scope="module", params=["posterior", "initial"])
def rehearsed(request):
    """What the task with coresets asks of an engine, and the prior of the copies."""
    engine = toys.Recorder()
    values = {"coreset": "k_center", "coreset_size": 7, "coreset_epochs": 3, "coreset_prior": request.param}
    make(**values).run(engine)
    return engine, request.param


def is_initial(prior, network):
    """Whether a prior is N(0, 1)."""
    parts = prior(dict(network.named_parameters())).values()
    return all((p.mean == 0).all() and (p.variance == 1).all() for p in parts)


def test_copies_are_trained_on_all_coresets_so_far(rehearsed):
    """Fits 1, 3, 5, ... are the steps, 2, 4, 6, ... the copies: full batch, n the examples kept."""
    engine, prior = rehearsed
    assert len(engine.problems) == 10
    assert {(b.epochs, b.batch_size) for b in engine.budgets[::2]} == {(10, 128)}
    assert {(b.epochs, b.batch_size) for b in engine.budgets[1::2]} == {(3, None)}
    for step, copy in enumerate(engine.problems[1::2], 1):
        inputs, labels = copy.train.tensors
        assert copy.num_train == len(inputs) == 7 * step
        assert set(labels.tolist()) <= {c for pair in SPLIT[:step] for c in pair}
        assert copy.val is None
        if step > 1:
            assert torch.equal(inputs[: 7 * (step - 1)], engine.problems[2 * step - 3].train.tensors[0])
        if prior == "posterior":
            assert copy.prior == f"posterior {2 * step - 1}"
        else:
            assert is_initial(copy.prior, copy.network())


def test_copies_predict_and_are_thrown_away(rehearsed):
    engine, _ = rehearsed
    assert engine.predictors == [2, 4, 6, 8, 10, 1]
    starts = [None if s is None else s.number for s in engine.starts]
    assert starts == [None, 1, 1, 3, 3, 5, 5, 7, 7, 9]
    assert [p.prior for p in engine.problems[2::2]] == [f"posterior {t}" for t in (1, 3, 5, 7)]


@pytest.mark.parametrize("coreset", ["k_center", "random"])
def test_coresets_are_taken_out_of_the_training_data(coreset):
    plain, task = make(), make(coreset=coreset)
    for step in range(5):
        rows = task.rows(step)
        assert len(rows.coreset) == len(set(rows.coreset.tolist())) == 40
        assert torch.equal(torch.cat([rows.train, rows.coreset]).sort().values, plain.rows(step).train)
        assert torch.equal(rows.val, plain.rows(step).val)
        assert task.problem(step).num_train == len(rows.train) == len(task.problem(step).train)


def test_farthest_points_are_those_of_the_training_inputs():
    task, plain = make(coreset="k_center"), make()
    train = plain.rows(3).train
    chosen = k_center(plain.images.train_inputs[train].flatten(1), 40)
    assert torch.equal(task.rows(3).coreset, train[chosen])
    assert task.rows(3).coreset[0] == train[0]


def test_random_coresets_are_the_same_in_every_run_and_differ_by_step():
    task = make(coreset="random")
    positions = [torch.searchsorted(make().rows(s).train, task.rows(s).coreset) for s in range(5)]
    assert all(torch.equal(task.rows(s).coreset, make(coreset="random").rows(s).coreset) for s in range(5))
    assert len({tuple(p.tolist()) for p in positions}) == 5


def test_coreset_only_gives_every_step_the_first_prior():
    """And still starts where the last step ended; the prior of the copies is the other setting's matter."""
    engine = toys.Recorder()
    make(coreset="random", coreset_size=3, coreset_only=True).run(engine)
    network = engine.problems[0].network()
    assert all(is_initial(p.prior, network) for p in engine.problems[::2])
    assert [p.prior for p in engine.problems[1::2]] == [f"posterior {t}" for t in (1, 3, 5, 7, 9)]
    assert [None if s is None else s.number for s in engine.starts[::2]] == [None, 1, 3, 5, 7]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"coreset_only": True}, "--task.coreset_only true: there is no coreset"),
        ({"order": "joint", "coreset": "random"}, "--task.coreset random: joint training has all data"),
        ({"coreset": "random", "coreset_size": 300}, "--task.coreset_size 300: step 1 has 26. training"),
    ],
)
def test_coresets_that_make_no_sense_are_refused_in_one_line(values, message, tmp_path):
    with pytest.raises(UsageError, match=message) as caught:
        bench.run("mfvi", "split_digits", task_settings=values, out=tmp_path)
    assert "\n" not in str(caught.value)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_figures_and_identity_name_the_variant():
    values = {"coreset": "k_center", "coreset_prior": "initial", "coreset_only": True}
    choice = resolved("mfvi", "split_digits", task_settings=values)
    expected = "split_digits+coreset=k_center,coreset_prior=initial,coreset_only=true"
    assert choice.task_identity == expected
    arrays = arrays_of(*(forgets(t) for t in range(5)))
    for chart in make(**values).figures(arrays).values():
        assert "Coreset k_center, 40 a step, initial prior, coreset only" in chart.to_json()
    for chart in make().figures(arrays).values():
        assert "Coreset" not in chart.to_json()


TINY = {"hidden": 4, "epochs": 1, "test_samples": 2, "coreset": "k_center", "coreset_size": 5}
TINY |= {"coreset_epochs": 2}
SEQUENTIAL = [n for n, e in registry.methods().items() if "sequential" in e.provides and n != "linear"]
"""All but the conjugate one, which refuses classes."""


@pytest.mark.parametrize(
    "method", [pytest.param(m, marks=[] if m in ("mfvi", "ewc") else pytest.mark.slow) for m in SEQUENTIAL]
)
@pytest.mark.parametrize("prior", ["posterior", "initial"])
@pytest.mark.usefixtures("undrawn")
def test_every_sequential_method_runs_with_coresets(method, prior, tmp_path):
    values = {**TINY, "coreset_prior": prior}
    record = bench.run(method, "split_digits", preset="smoke", task_settings=values, out=tmp_path).record
    assert record.status == "completed"
    copies = [fit for fit in record.fits if fit.stage.endswith(", coresets")]
    assert len(copies) == len(record.fits) / 2 == 5 * record.method.members


def test_stopped_run_with_coresets_goes_on_with_the_same_numbers(tmp_path):
    def run(folder, *observers):
        return bench.run(
            "mfvi", "split_digits", task_settings=TINY, out=tmp_path / folder, observers=observers
        )

    def stop(event, values):
        if event == "stage" and values["name"] == "step 3, coresets":
            raise KeyboardInterrupt

    whole = run("whole").record
    with pytest.raises(KeyboardInterrupt):
        run("stopped", stop)
    fits = []
    again = run("stopped", lambda event, values: fits.append(event) if event == "epoch" else None).record
    assert again.provenance.arrays_digest == whole.provenance.arrays_digest
    assert again.validation == whole.validation
    assert len(fits) == 2 + 1 + 2 + 1 + 2  # the copy of step 3, then steps 4 and 5 with theirs


# ---- the published pattern


def follows_the_pattern(matrix):
    """Every pair is learned in its step and forgotten in the next: 100/50/33/25/20 %."""
    return bool((np.diag(matrix) >= 0.95).all() and (matrix[np.tril_indices(5, -1)] <= 0.05).all())


def matrix_of(method, task, folder, **options):
    """A[t, s] of a run, and its average accuracy."""
    done = bench.run(method, task, out=folder, **options)
    return SplitMNIST.accuracy_matrix(load_scores(done.directory)[1]), done.record.metrics["average_accuracy"]


def test_method_that_ignores_later_steps_averages_the_same_and_fails_the_check(tmp_path):
    """Negative control on digits: 20% in the end, as total forgetting has, and yet no pattern."""
    matrix, average = matrix_of("toys:OnlyFirstStep", "split_digits", tmp_path)
    assert average == pytest.approx(0.2, abs=0.02)
    assert matrix[0, 0] >= 0.95
    assert not follows_the_pattern(matrix)
    assert (np.diag(matrix)[1:] <= 0.05).all()


def test_check_knows_the_pattern():
    assert follows_the_pattern(np.eye(5) * 0.96)
    assert follows_the_pattern(np.eye(5) + np.triu(np.full((5, 5), 0.3), 1))
    assert not follows_the_pattern(np.eye(5) * 0.94)
    assert not follows_the_pattern(np.eye(5) + np.tril(np.full((5, 5), 0.06), -1))


@pytest.fixture
def mnist():
    """Real MNIST must be there."""
    need("mnist")


def test_committed_records_show_the_published_pattern_on_mnist():
    """Of the whole protocol, every seed."""
    for seed in range(3):
        _, arrays = entries.scores_of(entries.directory_of("split_mnist", "mfvi", seed))
        assert follows_the_pattern(SplitMNIST.accuracy_matrix(arrays)), seed


@pytest.mark.slow
@pytest.mark.usefixtures("mnist")
def test_mfvi_shows_the_published_pattern_on_mnist(tmp_path):
    """In 2 epochs of 10 and from 10 samples of 100; the committed records have all."""
    short = {"epochs": 2, "test_samples": 10}
    matrix, average = matrix_of("mfvi", "split_mnist", tmp_path, task_settings=short)
    assert follows_the_pattern(matrix), matrix.round(3)
    assert average == pytest.approx(0.2, abs=0.02)


@pytest.mark.slow
@pytest.mark.usefixtures("mnist")
def test_negative_control_fails_the_check_on_mnist(tmp_path):
    short = {"epochs": 1, "test_samples": 2}
    matrix, average = matrix_of("toys:OnlyFirstStep", "split_mnist", tmp_path, task_settings=short)
    assert average == pytest.approx(0.2, abs=0.02)
    assert not follows_the_pattern(matrix)
