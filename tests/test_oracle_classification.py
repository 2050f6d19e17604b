"""oracle_classification: losses of known classes, and the problem that is posed."""

import numpy as np
import pytest
from ideal import classes, of_run

from bench import likelihoods


def test_losses_of_known_classes():
    task = classes()
    targets = task.targets()
    true = targets["true_log_probs"].astype(np.float64)
    arrays = {"log_probs": true[:, None], "moved_parts": np.zeros((2, 2, 1, 100))}
    scores = task.score(of_run(task, arrays))
    assert scores["excess_risk"] == pytest.approx(0, abs=1e-9)
    assert scores["excess_log_loss"] == pytest.approx(0, abs=1e-9)
    uniform = task.score(of_run(task, arrays | {"log_probs": np.full_like(true[:, None], -np.log(4))}))
    entropy = -(np.exp(true) * true).sum(-1).mean()
    assert uniform["excess_log_loss"] == pytest.approx(np.log(4) - entropy, abs=1e-6)
    assert uniform["joint_log_loss"] == pytest.approx(10 * np.log(4))
    assert uniform["log_likelihood"] == pytest.approx(-np.log(4))


def test_problem_is_as_the_docstring_says():
    problem = classes().problem()
    assert isinstance(problem.likelihood, likelihoods.Categorical)
    assert problem.network()(problem.train.tensors[0]).shape == (24, 4)
