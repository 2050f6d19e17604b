"""Several heads against one softmax per head."""

import math

import pytest
import torch

from bench.likelihoods import Categorical, MultiHead


@pytest.fixture
def outputs():
    """Outputs `[3, 7, 6]`: two heads of three classes."""
    return torch.randn(3, 7, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3


TARGETS = torch.tensor([0, 1, 2, 3, 4, 5, 3])


def test_example_is_explained_by_the_head_of_its_target_alone(outputs):
    found = MultiHead(2).log_prob(outputs, TARGETS)
    for b, target in enumerate(TARGETS.tolist()):
        head = slice(0, 3) if target < 3 else slice(3, 6)
        expected = Categorical().log_prob(outputs[:, [b], head], torch.tensor([target % 3]))
        torch.testing.assert_close(found[:, [b]], expected)


def test_no_gradient_reaches_another_head(outputs):
    outputs.requires_grad_()
    MultiHead(2).log_prob(outputs, TARGETS).sum().backward()
    for b, target in enumerate(TARGETS.tolist()):
        other = slice(3, 6) if target < 3 else slice(0, 3)
        assert (outputs.grad[:, b, other] == 0).all()
        assert (outputs.grad[:, b] != 0).sum() == 9


def test_prediction_conditioned_on_a_head_is_that_heads_own(outputs):
    """In the average over samples too: every sample gives every head the same share."""
    prediction = MultiHead(2).predict(outputs)
    by_head = prediction.average().unflatten(-1, (2, 3)).log_softmax(-1)
    for h in range(2):
        own = Categorical().predict(outputs[..., 3 * h : 3 * h + 3]).average()
        torch.testing.assert_close(by_head[:, h], own)
    shares = prediction.log_probs.exp().unflatten(-1, (2, 3)).sum(-1)
    torch.testing.assert_close(shares, torch.full_like(shares, 0.5))


def test_log_score_is_that_of_the_head_divided_by_the_number_of_heads(outputs):
    scores = MultiHead(2).predict(outputs[:1]).log_score(TARGETS)
    torch.testing.assert_close(scores, MultiHead(2).log_prob(outputs[:1], TARGETS)[0] - math.log(2))


def test_one_head_is_the_softmax(outputs):
    torch.testing.assert_close(
        MultiHead(1).log_prob(outputs, TARGETS), Categorical().log_prob(outputs, TARGETS)
    )
    torch.testing.assert_close(
        MultiHead(1).predict(outputs).log_probs, Categorical().predict(outputs).log_probs
    )


def test_vmap_over_copies(outputs):
    """Stacked fits and per-example gradients call it so."""
    likelihood = MultiHead(2)
    found = torch.func.vmap(likelihood.log_prob, in_dims=(0, None))(outputs[:, None], TARGETS)
    torch.testing.assert_close(found[:, 0], likelihood.log_prob(outputs, TARGETS))
