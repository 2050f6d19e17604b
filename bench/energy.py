"""The one place where a mini-batch is rescaled to the full training set."""

from __future__ import annotations

from torch import Tensor

from bench.contract import Batch, Likelihood


def likelihood_term(likelihood: Likelihood, outputs: Tensor, batch: Batch, num_train: int) -> Tensor:
    """Negative log likelihood of the full training set, estimated from a batch, in nats.

    -(num_train / B) * sum_b weight_b * mean_s log p(y_b | f_s(x_b)), outputs `[S, B, ...]`. Example weights
    multiply and are not normalised: a weight of 2 is the example twice.
    """
    log_probs = likelihood.log_prob(outputs, batch.targets)
    return full_nll(log_probs.squeeze(0) if len(log_probs) == 1 else log_probs.mean(0), batch, num_train)


def full_nll(log_probs: Tensor, batch: Batch, num_train: int) -> Tensor:
    """The same of log likelihoods `[B]` that are expectations already, or bounds on them."""
    if batch.weights is not None:
        log_probs = log_probs * batch.weights
    return log_probs.sum() * (-num_train / len(log_probs))
