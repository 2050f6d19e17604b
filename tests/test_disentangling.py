"""Parts against the truth, and leaks: by hand, of the ideal posterior, and of cheats that must fail."""

import numpy as np
import pytest

from bench.contract import Undefined
from bench.studies import disentangling
from bench.studies.disentangling import leaks, scores


def truth():
    """True parts `[3, 2, 2, 5]`: noise makes both grow, fewer rows the first alone."""
    g = np.random.default_rng(0)
    epistemic, aleatoric = g.uniform(0.1, 0.3, (2, 2, 5))
    base, fewer = (epistemic, aleatoric), (3 * epistemic, aleatoric)
    noisier = (1.5 * epistemic, 4 * aleatoric)
    return np.stack([np.stack(condition) for condition in (base, noisier, fewer)])


@pytest.mark.parametrize("are_variances", [True, False])
def test_the_ideal_posterior_scores_zero(are_variances):
    found = scores(truth(), truth(), are_variances)
    assert found.keys() == disentangling.measures("nats").keys()
    for name, value in found.items():
        assert value == pytest.approx(1 if "correlation" in name else 0), name


def test_swapped_parts_fail():
    """A method that calls noise ignorance: both leaks are near 1, and errors are those of the other part."""
    true = truth()
    found = scores(true[:, ::-1], true, False)
    assert found["data_leak"] == pytest.approx(1)
    assert 0.7 < found["noise_leak"] < 1
    apart = np.abs(true[0, 0] - true[0, 1]).mean()
    assert found["epistemic_error"] == found["aleatoric_error"] == pytest.approx(apart)


def test_leaks_by_hand():
    """Noise adds 3, and 1.1 of ignorance where 0.1 is due; rows add 0.4, and noise falls by 0.2."""
    true = np.array([[0.2, 1.0], [0.3, 4.0], [0.6, 1.0]])[:, :, None, None]
    found = np.array([[0.1, 1.5], [1.2, 4.5], [0.5, 1.3]])[:, :, None, None]
    assert leaks(found, true) == pytest.approx(np.array([[(1.1 - 0.1) / 3, 0.2 / 0.4]]))
    assert scores(found, true, False)["disentanglement_error"] == pytest.approx((1 / 3 + 0.5) / 2)


def test_leaks_are_averaged_over_worlds_and_signs_do_not_cancel():
    true, found = truth(), truth()
    found[2, 1, 0] += 0.05
    found[2, 1, 1] -= 0.05
    change = (true[2, 0] - true[0, 0]).mean(-1)
    assert scores(found, true, False)["data_leak"] == pytest.approx((0.05 / change).mean())


def test_a_method_without_epistemic_part_leaks_little_and_errs():
    """Leaks are not the whole score: who always says 0 hides it from them, and the error tells."""
    true, found = truth(), truth()
    found[:, disentangling.EPISTEMIC] = 0
    result = scores(found, true, True)
    assert result["noise_leak"] < 0.2
    assert result["epistemic_error"] == pytest.approx(np.sqrt(true[0, 0]).mean())
    assert isinstance(result["epistemic_correlation"], Undefined)


def test_correlation_is_of_ranks_within_each_world():
    true, found = truth(), truth()
    found[0, 0] = np.exp(5 * found[0, 0])
    found[0, 0, 1] *= 100
    assert scores(found, true, False)["epistemic_correlation"] == pytest.approx(1)
    found[0, 0] *= -1
    assert scores(found, true, False)["epistemic_correlation"] == pytest.approx(-1)


def test_errors_of_variances_are_between_standard_deviations():
    true, found = truth(), 4 * truth()
    assert scores(found, true, True)["aleatoric_error"] == pytest.approx(np.sqrt(true[0, 1]).mean())
    assert scores(found, true, False)["aleatoric_error"] == pytest.approx(3 * true[0, 1].mean())


def test_curves_have_every_part_of_every_condition():
    rows = disentangling.curves(truth(), truth())
    assert len(rows) == 12
    assert {row.x for row in rows} == {0.0, 1.0, 2.0}
