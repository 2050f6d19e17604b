"""oracle_regression: losses of known normals, and the problem that is posed."""

import numpy as np
import pytest
import torch
from ideal import numbers, of_run

from bench import likelihoods
from bench.studies import oracle


def test_losses_of_known_normals():
    """Who says the true law has no excess; the divergence of two normals of one mean is known."""
    task = numbers()
    targets = task.targets()
    noise = targets["noise"].astype(np.float64)
    arrays = {
        "mean": targets["function"][:, None].astype(np.float64),
        "variance": noise[None, None] ** 2,
        "moved_parts": np.zeros((2, 2, 1, 100)),
    }
    scores = task.score(of_run(task, arrays))
    assert scores["excess_risk"] == pytest.approx(0, abs=1e-9)
    assert scores["excess_log_loss"] == pytest.approx(0, abs=1e-9)
    wide = task.score(of_run(task, arrays | {"variance": 4 * noise[None, None] ** 2}))
    assert wide["excess_log_loss"] == pytest.approx(np.log(2) + 1 / 8 - 1 / 2, abs=1e-6)
    moved = task.score(of_run(task, arrays | {"mean": arrays["mean"] + noise}))
    assert moved["excess_log_loss"] == pytest.approx(0.5, abs=1e-6)
    assert moved["excess_risk"] == pytest.approx((noise**2).mean())


def test_problem_is_as_the_docstring_says():
    problem = numbers().problem()
    assert isinstance(problem.likelihood, likelihoods.Heteroscedastic)
    assert problem.prior({"w": torch.zeros(2)})["w"].base_dist.scale == pytest.approx(0.3)
    assert problem.network()(problem.train.tensors[0]).shape == (oracle.TRAIN, 2)


def test_other_worlds_have_other_data():
    assert len({numbers(world=w).data_digest() for w in (0, 1)}) == 2
    assert numbers(world=1).data_digest() == numbers(world=1).data_digest()
