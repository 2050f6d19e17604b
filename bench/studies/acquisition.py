"""Which point to label next: scores of candidates, proposals made of scores, and draws from them.

A score is one number per candidate, larger = sooner. A proposal turns the scores of the candidates left into
the probabilities of a draw; those that give every candidate a positive one have full support, without which
PURE and LURE (`bench.studies.risk`) are biased. Random acquisition is the proposal `uniform`.

Source: Farquhar 2022, thesis "Understanding Approximation" (docs/sources.md), section 5.2, appendix C.1 and
Table C.1; Houlsby et al. 2011 (BALD); Gal, Islam and Ghahramani 2017 (variation ratio); Kossen et al. 2021
(expected loss).

Shapes: N candidates on the last axis of scores and probabilities; proposals and `inverse_cdf` take batches
(trajectories) on the axes before it. All in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from bench import metrics
from bench.errors import UsageError
from bench.predictions import Bernoulli, Categorical, Prediction

# ------------------------------------------------------------------------------------------------- scores


def bald(prediction: Prediction) -> Tensor:
    """Mutual information of label and weights, H[mean p] - mean H[p], `[N]`, in nats, never negative."""
    return metrics.mutual_information(_log_probs(prediction))


def predictive_entropy(prediction: Prediction) -> Tensor:
    """Entropy of the averaged prediction, `[N]`, in nats."""
    return metrics.predictive_entropy(_log_probs(prediction))


def variation_ratio(prediction: Prediction) -> Tensor:
    """One minus the largest averaged probability, `[N]`, a fraction."""
    return 1 - _log_probs(prediction).exp().mean(0).amax(-1)


def expected_loss(prediction: Prediction, log_probs: Tensor) -> Tensor:
    """Expected NLL of a fixed model's predictions if labels follow `prediction`, `[N]`, in nats.

    Args:
        prediction: What is believed of the labels; its average counts.
        log_probs: The model's averaged log-probabilities `[N, C]`; below `metrics.LOWEST` they count as that,
            above 0, by rounding, as 0.

    Raises:
        UsageError: If the two have other shapes.
    """
    belief = _log_probs(prediction).exp().mean(0)
    if belief.shape != log_probs.shape:
        shapes = f"{list(belief.shape)} and {list(log_probs.shape)}"
        raise UsageError(f"acquisition: prediction and log_probs have shapes {shapes}: both must be [N, C]")
    return -(belief * log_probs.double().clamp(metrics.LOWEST, 0)).sum(-1).clamp(max=0)


def distance(candidates: Tensor, acquired: Tensor, power: float = 2) -> Tensor:
    """Sum over the acquired points of the distance (L2) to the power `power`, `[N]`; 0 without such points.

    Args:
        candidates: Inputs `[N, ...]`.
        acquired: Inputs `[M, ...]` of the same kind.
        power: 2 is the quadratic distance of Farquhar 2022, C.1; equation C.3 has 1.
    """
    points, others = (x.double().reshape(len(x), candidates[0].numel()) for x in (candidates, acquired))
    apart = torch.cdist(points, others, compute_mode="donot_use_mm_for_euclid_dist")
    return apart.pow(power).sum(1)


def _log_probs(prediction: Prediction) -> Tensor:
    """Log-probabilities of the samples, `[S, N, C]`."""
    if isinstance(prediction, Categorical):
        return prediction.log_probs.double()
    if isinstance(prediction, Bernoulli):
        log_odds = prediction.log_odds.double()
        return torch.nn.functional.logsigmoid(torch.stack([-log_odds, log_odds], -1))
    raise UsageError("acquisition: this score is of class predictions, and here they are normals")


# ---------------------------------------------------------------------------------------------- proposals


def softmax(scores: Tensor, temperature: float) -> Tensor:
    """Probabilities in the ratio of exp(T s), s the scores divided by their sum; uniform if all are 0.

    The temperature acts on NORMALISED scores (Farquhar 2022, Table C.1: T = 10,000); on raw nats it would be
    an argmax. Differences of T s above 745 give probabilities that are 0 in float64.
    """
    scores = _checked(scores, non_negative=True)
    _positive("temperature", temperature)
    return (temperature * scores / _or_one(scores.sum(-1, keepdim=True))).softmax(-1)


def boltzmann(
    scores: Tensor, beta: float, scale: Literal["standardised", "by_mean"] = "standardised"
) -> Tensor:
    """Probabilities in the ratio of exp(beta s) of scaled scores s; uniform if all scores are equal.

    Args:
        scores: `[..., N]`.
        beta: Inverse temperature, above 0.
        scale: standardised, minus their mean and over their standard deviation (correction 0) over the
            candidates left; by_mean, over their mean.

    Farquhar 2022, C.1, says "normalised" and not how. Divided by their sum, scores of so many candidates
    hardly differ, and the proposal is uniform.
    """
    scores = _checked(scores, non_negative=scale == "by_mean")
    _positive("beta", beta)
    mean = scores.mean(-1, keepdim=True)
    if scale == "by_mean":
        return (beta * scores / _or_one(mean)).softmax(-1)
    deviation = scores.std(-1, correction=0, keepdim=True)
    # Equal scores leave a deviation of rounding errors, which must not become a scale.
    rounding = 1e-12 * scores.abs().amax(-1, keepdim=True)
    return (beta * (scores - mean) / torch.where(deviation > rounding, deviation, torch.inf)).softmax(-1)


def proportional(scores: Tensor, floor: float) -> Tensor:
    """Probabilities in the ratio of the scores, none counted below `floor` times their mean, 0 < floor <= 1.

    Without the floor a score of 0 (BALD, clipped) would never be drawn. Uniform if all are 0.
    """
    scores = _checked(scores, non_negative=True)
    _share("floor", floor)
    floored = scores.maximum(floor * _or_one(scores.mean(-1, keepdim=True)))
    return floored / floored.sum(-1, keepdim=True)


def epsilon_greedy(scores: Tensor, epsilon: float) -> Tensor:
    """The largest score (of equals the first) with 1 - epsilon, and uniform with epsilon, 0 < epsilon <= 1.

    Farquhar 2022, equation C.3; the uniform part is over the candidates left.
    """
    _share("epsilon", epsilon)
    return (1 - epsilon) * argmax(scores) + epsilon * uniform(scores)


def argmax(scores: Tensor) -> Tensor:
    """The largest score (of equals the first) with probability 1; no full support."""
    scores = _checked(scores)
    return torch.zeros_like(scores).scatter_(-1, scores.argmax(-1, keepdim=True), 1.0)


def uniform(scores: Tensor) -> Tensor:
    """The same probability for every candidate, whatever the scores."""
    scores = _checked(scores)
    return torch.full_like(scores, 1 / scores.shape[-1])


class Proposal(NamedTuple):
    """A function of scores `[..., N]` and perhaps one parameter, and whether every candidate can be drawn."""

    function: Callable[..., Tensor]
    full_support: bool


PROPOSALS = {
    "softmax": Proposal(softmax, True),
    "boltzmann": Proposal(boltzmann, True),
    "proportional": Proposal(proportional, True),
    "epsilon_greedy": Proposal(epsilon_greedy, True),
    "argmax": Proposal(argmax, False),
    "uniform": Proposal(uniform, True),
}


def full_support(name: str) -> Callable[..., Tensor]:
    """The proposal of this name.

    Raises:
        UsageError: If there is none, or it lacks the full support that PURE and LURE need.
    """
    able = ", ".join(n for n, proposal in PROPOSALS.items() if proposal.full_support)
    if name not in PROPOSALS:
        raise UsageError(f"unknown proposal {name!r}: take one of {able}")
    if not PROPOSALS[name].full_support:
        raise UsageError(f"proposal {name} never draws some points: PURE and LURE need one of {able}")
    return PROPOSALS[name].function


# -------------------------------------------------------------------------------------------------- draws


def draw(probabilities: Tensor, generator: torch.Generator) -> tuple[int, float]:
    """Draws one candidate from probabilities `[N]`: its index, and the probability that it had.

    Raises:
        UsageError: As `inverse_cdf`.
    """
    uniform = torch.rand((), generator=generator, dtype=torch.float64, device=generator.device)
    index = int(inverse_cdf(probabilities, uniform.to(probabilities.device)))
    return index, float(probabilities[index])


def inverse_cdf(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """The index at which the cumulated probabilities pass each uniform number: `[...]` from `[..., N]`.

    Uniform numbers `[...]` in [0, 1) become draws; a candidate of probability 0 is never the answer.

    Raises:
        UsageError: If a row of `probabilities` is not one of probabilities that sum to 1 within 1e-9.
    """
    p = probabilities.double()
    if p.ndim == 0 or p.shape[-1] == 0:
        raise UsageError("acquisition: no candidate is left to draw")
    if not ((p >= 0) & (p <= 1)).all() or not ((p.sum(-1) - 1).abs() <= 1e-9).all():
        raise UsageError("acquisition: probabilities must be in [0, 1] and sum to 1 over the candidates")
    cumulated = p.cumsum(-1)
    # The total is 1 but for rounding; were it below, the largest uniforms would find no candidate.
    passed = cumulated <= uniforms.double()[..., None] * cumulated[..., -1:]
    last = (p > 0).cumsum(-1).argmax(-1)  # the first place of the largest count: the last positive entry
    return torch.minimum(passed.sum(-1), last)


# ------------------------------------------------------------------------------------------------- checks


def _checked(scores: Tensor, non_negative: bool = False) -> Tensor:
    scores = torch.as_tensor(scores).detach().double()
    if scores.ndim == 0 or scores.shape[-1] == 0:
        raise UsageError("acquisition: no candidate is left to score")
    if not scores.isfinite().all():
        raise UsageError("acquisition: a score is not finite")
    if non_negative and (scores < 0).any():
        raise UsageError("acquisition: a score is negative, and this proposal divides by their sum or mean")
    return scores


def _or_one(scale: Tensor) -> Tensor:
    """The scale, or 1 where it is 0 and all that is divided by it is 0 too."""
    return torch.where(scale > 0, scale, 1.0)


def _positive(name: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise UsageError(f"acquisition: {name} {value}: must be a number above 0")


def _share(name: str, value: float) -> None:
    if not 0 < value <= 1:
        raise UsageError(f"acquisition: {name} {value}: must be above 0 and at most 1")
