"""The optimisers are those that they are called, by hand on given gradients."""

import pytest
import torch

from bench import optimizers

RATE = 0.1


def positions(name, gradients):
    """Where a number that starts at 1 is after each step along given gradients."""
    weight = torch.nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
    optimizer, found = optimizers.make([weight], name, RATE), []
    for gradient in gradients:
        weight.grad = torch.tensor(gradient, dtype=torch.float64)
        optimizer.step()
        found.append(weight.item())
    return found


def test_sgd_is_nesterovs_by_hand():
    """Sutskever et al. 2013: v <- 0.9 v + g, and the step is along g + 0.9 v; plain momentum goes along v."""
    gradients, w, v, expected = [2.0, -1.0, 0.5], 1.0, 0.0, []
    for g in gradients:
        v = 0.9 * v + g
        w -= RATE * (g + 0.9 * v)
        expected.append(w)
    assert positions("sgd", gradients) == pytest.approx(expected)


@pytest.mark.parametrize(("name", "keeps_the_largest"), [("adam", False), ("amsgrad", True)])
def test_amsgrad_keeps_the_largest_second_moment(name, keeps_the_largest):
    """Kingma and Ba 2015, algorithm 1; Reddi et al. 2018, algorithm 2, with the bias corrections of torch.

    After a large gradient the small ones divide by what is left of its square, or by its largest.
    """
    gradients, w, m, v, largest, expected = [10.0, 0.1, 0.1, 0.1], 1.0, 0.0, 0.0, 0.0, []
    for t, g in enumerate(gradients, 1):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        largest = max(largest, v)
        second = (largest if keeps_the_largest else v) / (1 - 0.999**t)
        w -= RATE * m / (1 - 0.9**t) / (second**0.5 + 1e-8)
        expected.append(w)
    assert positions(name, gradients) == pytest.approx(expected)
