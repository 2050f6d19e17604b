"""Held-out classes: who is trained on, who is scored, and what a perfect and a blind uncertainty get."""

import numpy as np
import pytest
from toys import Reader

from bench import metrics
from bench.spec import misfit
from bench.tasks.ood import NEW, OutOfDistribution, Settings


@pytest.fixture(scope="module")
def done():
    """A task on 60 test digits, its arrays with targets, and what its engine was asked."""
    task, reader = OutOfDistribution(Settings(dataset="digits", test_images=60, test_samples=3)), Reader(8)
    return task, task.run(reader) | task.given() | task.targets(), reader


def test_new_classes_are_neither_trained_nor_validated_on(done):
    """All test images are predicted, since which of them are new only the labels tell."""
    task, arrays, reader = done
    (problem,) = reader.problems
    for part in (problem.train, problem.val):
        assert set(part.tensors[1].tolist()) == set(range(8))
    assert set(arrays["labels"].tolist()) >= {8, 9}
    assert len(reader.inputs[0]) == 3 * 60 + len(problem.val)
    assert misfit(task.layouts(), {k: (a.dtype.name, a.shape) for k, a in arrays.items()}) is None


def test_scores_are_of_known_and_of_new_test_images(done):
    """The NLL leaves the new classes out; an uncertainty that is the truth has area 1, its inverse 0."""
    task, arrays, _ = done
    labels = arrays["labels"]
    is_new = labels >= 8
    log_probs = metrics.restore(arrays["log_probs"][0])
    scores = task.score(arrays)
    assert scores["nll"] == pytest.approx(
        metrics.negative_log_likelihood(log_probs[~is_new], labels[~is_new])
    )
    assert scores["auroc"] == scores[f"auroc_{NEW}_entropy"]
    flat, sharp = np.zeros(8), np.r_[5.0, np.zeros(7)]
    for sure, area in ((True, 1.0), (False, 0.0)):
        made = np.where((is_new == sure)[:, None], flat, sharp).astype(np.float16)
        told = arrays | {"log_probs": np.stack([made, *arrays["log_probs"][1:]])}
        found = task.score(told)
        for name in ("entropy", "confidence"):
            assert found[f"auroc_{NEW}_{name}"] == area
        assert found[f"fpr95_{NEW}_entropy"] == 1 - area
        assert found[f"auroc_{NEW}_information"] == scores[f"auroc_{NEW}_information"]


def test_foreign_data_sets_stand_beside_the_new_classes(done):
    task, arrays, _ = done
    assert task.uncertainties(arrays).keys() == {"known images", NEW, "noise", "shuffled"}
    assert task.score(arrays).keys() == task.spec.metrics.keys()
