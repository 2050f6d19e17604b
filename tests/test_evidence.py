"""What the documentation says of the committed records, checked on their arrays."""

import json
from pathlib import Path

import numpy as np
import pytest

from bench import references, registry
from bench.diagnostics import RHAT_LIMIT, mixed
from bench.leaderboard.entries import RECORDS
from bench.records import read_record
from bench.runner import load_scores

TUNED = ["mfvi", "radial", "mc_dropout"]


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


# ---- toy_regression

METHODS = [
    "map",
    "mfvi",
    "radial",
    "mc_dropout",
    "deep_ensemble",
    "swag",
    "laplace",
    "full_cov_vi",
    "mixture_vi",
    "hmc",
]


def toy(method, task="toy_regression"):
    """Records of the seeds 0, 1 and 2."""
    return [read_record(RECORDS / task / method / f"seed{seed}") for seed in range(3)]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_shown_on_the_toy_problem(method):
    records = toy(method)
    assert [record.status for record in records] == ["completed"] * 3
    assert len({record.task.data_digest for record in records}) == 1


def test_all_are_compared_with_one_reference():
    assert len({record.task.data_digest for method in METHODS for record in toy(method)}) == 1


def test_three_layers_of_mean_field_are_less_sure_in_the_gap_than_one():
    one = [record.metrics for record in toy("mfvi")]
    three = [record.metrics for record in toy("mfvi", "toy_regression+layers=3")]
    for name in ("gap_ratio", "gap_sd"):
        assert min(m[name] for m in three) > max(m[name] for m in one)


def test_a_sampler_that_did_not_mix_is_called_so():
    page = (Path(__file__).parent.parent / "docs" / "tasks" / "toy_regression.md").read_text()
    for record in toy("hmc"):
        rhat = record.diagnostics["prediction_rhat"]
        (line,) = [row for row in page.splitlines() if f"| {rhat:.3f} |" in row]
        assert ("no reference" in line) == (rhat > RHAT_LIMIT)


def test_references_come_from_chains_that_agree():
    found = list(references.FOLDER.glob("*.json"))
    assert found
    for path in found:
        reference = references.Reference.model_validate_json(path.read_bytes())
        assert mixed(reference.diagnostics)
        assert references.read(reference.target)


# ---- tuning


def test_equal_budgets_on_split_digits():
    results = [json.loads((registry.TUNED / "split_digits" / f"{m}.json").read_text()) for m in TUNED]
    assert len({len(result["configurations"]) for result in results}) == 1
    for result in results:
        assert result["provenance"]["dirty"] is False
        assert registry.choose(result["method"], "split_digits").tuning == "tuned"
