"""What the documentation says of the committed records, checked on their arrays."""

import numpy as np
import pytest

from bench.leaderboard.entries import RECORDS
from bench.runner import load_scores


def matrices(task, method):
    """Accuracy matrices of the seeds 0, 1 and 2."""
    found = []
    for seed in range(3):
        protocol, arrays = load_scores(RECORDS / task / method / f"seed{seed}")
        found.append(protocol.accuracy_matrix(arrays))
    return found


def forgets(matrix):
    """The published pattern: every pair is learned, and every earlier one wiped out."""
    return bool((np.diag(matrix) >= 0.95).all() and (np.tril(matrix, -1) <= 0.05).all())


def test_mfvi_forgets_as_published():
    assert all(forgets(matrix) for matrix in matrices("split_mnist", "mfvi"))


def test_a_posterior_that_learns_nothing_new_does_not_pass_for_forgetting():
    for matrix in matrices("split_mnist", "radial+sequential_prior=normal"):
        assert matrix[-1].mean() == pytest.approx(0.2, abs=0.01)
        assert np.diag(matrix)[1:].max() < 0.05
        assert not forgets(matrix)


def test_joint_training_is_the_upper_bound():
    assert all(matrix[-1].mean() >= 0.96 for matrix in matrices("split_mnist+order=joint", "mfvi"))
