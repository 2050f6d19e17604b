"""What invariances of the likelihood cost a mean-field posterior: translations and permutations of weights.

A likelihood that does not change under a transformation of the weights has a posterior that does not either.
A mean-field approximation q_0 cannot follow it; the invariance-abiding q_mix averages its likelihood factor
over the transformations. Both predict alike, and the evidence lower bound of q_0 is lower by the gap
KL(q_0 || q_mix).

Source: Kurle et al. 2022, "On the detrimental effect of invariances in the likelihood for variational
inference" (docs/sources.md), sections 3 to 5. Corrected: with a prior mean other than 0 the posterior mean
has a second term (eq. 13); the optimal mean of eq. 19 is not that of eq. 18 (`LinearModel.theta_mean_field`;
the printed one has a name of its own); the left side of eq. 10 is reversed. The permanent that sums over the
permutations is computed over sets of columns, whose terms are all positive, not by inclusion and exclusion.

Shapes: K weights, N observations, S draws, H hidden units, D weights of a unit. All densities in nats.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from typing import NamedTuple

import numpy as np
import torch
from scipy.special import gammaln, logsumexp

from bench.errors import UsageError

LARGEST_DENSE = 5000
"""Weights up to which the covariance of the linear model is written out (200 MB)."""
LARGEST_EXACT = 14
"""Units up to which the permutation gap sums over all permutations."""
_SINKHORN = 50
"""Scalings of rows and columns: the bounds hold after any number, and are tight near the limit."""


# --------------------------------------------------------------------- translations: the linear model, x = 1


class Theta(NamedTuple):
    """Mean and variance, the same of all weights, of the normal that stands for the likelihood."""

    mean: float
    variance: float


class Function(NamedTuple):
    """Mean and variance of the function, without the noise of an observation."""

    mean: float
    variance: float


@dataclass(frozen=True, eq=False)
class LinearModel:
    """y = mean of K weights + noise, all inputs 1: every quantity in closed form, at a cost free of K.

    Prior N(mu, s^2) of each weight, noise N(0, sigma^2). The likelihood does not change when weights move
    along their K - 1 directions of equal sum. theta = (m, lambda) parametrises q_0, prior times the product
    of N(w_k; m, lambda) (eq. 6a), and q_mix, prior times that product averaged over all translations
    (eq. 15).
    """

    num_weights: int
    observations: np.ndarray
    noise_variance: float
    prior_variance: float
    prior_mean: float = 0.0

    @property
    def _count(self) -> int:
        return len(self.observations)

    @property
    def _precision(self) -> float:
        """Prior variance of the function over the noise variance of the mean observation."""
        return self._count * self.prior_variance / (self.num_weights * self.noise_variance)

    # ---- the true posterior (eq. 13)

    @property
    def posterior_mean(self) -> np.ndarray:
        """`[K]`, all entries equal."""
        gain = self._precision / (1 + self._precision)
        return np.full(
            self.num_weights, self.prior_mean + gain * (self.observations.mean() - self.prior_mean)
        )

    @property
    def posterior_variance(self) -> float:
        """Variance of each weight under the posterior."""
        return self.prior_variance + self.posterior_covariance_of_two

    @property
    def posterior_covariance_of_two(self) -> float:
        """Covariance of any two weights, below 0."""
        return -self.prior_variance * self._precision / (1 + self._precision) / self.num_weights

    @property
    def posterior_covariance(self) -> np.ndarray:
        """Dense, `[K, K]`, made when it is asked for.

        Raises:
            UsageError: If it would take more than 200 MB.
        """
        if self.num_weights > LARGEST_DENSE:
            raise UsageError(
                f"the covariance of {self.num_weights:,} weights is written out up to {LARGEST_DENSE:,}: use "
                "posterior_variance and posterior_covariance_of_two, its two values"
            )
        diagonal = self.prior_variance * np.eye(self.num_weights)
        return diagonal + self.posterior_covariance_of_two

    @property
    def log_evidence(self) -> float:
        """Log p(y): the deviations of the observations from their mean, and the mean itself."""
        n, noise = self._count, self.noise_variance
        inner = -0.5 * (n - 1) * math.log(2 * math.pi * noise) - 0.5 * math.log(n)
        inner -= 0.5 * float(np.square(self.observations - self.observations.mean()).sum()) / noise
        spread = (noise / n) * (1 + self._precision)
        outer = (self.observations.mean() - self.prior_mean) ** 2 / spread
        return float(inner - 0.5 * math.log(2 * math.pi * spread) - 0.5 * outer)

    # ---- optima (eqs 18 and 19)

    @property
    def theta_mixed(self) -> Theta:
        """Maximises the bound of q_mix, which then is the posterior."""
        return Theta(float(self.observations.mean()), self.num_weights * self.noise_variance / self._count)

    @property
    def theta_mean_field(self) -> Theta:
        """Maximises the bound of q_0: the posterior's mean, and the diagonal of its precision."""
        variance = self.num_weights * self.theta_mixed.variance
        shift = (float(self.posterior_mean[0]) - self.prior_mean) * (1 + variance / self.prior_variance)
        return Theta(self.prior_mean + shift, variance)

    @property
    def theta_mean_field_printed(self) -> Theta:
        """As eq. 19 prints it: the right variance, with the mean of `theta_mixed`."""
        return Theta(self.theta_mixed.mean, self.theta_mean_field.variance)

    # ---- both approximations

    def _shrinkage(self, theta: tuple[float, float]) -> float:
        """Share of its prior variance that q_0 takes off each weight, and q_mix off the function."""
        return self.prior_variance / (self.prior_variance + theta[1])

    def function(self, theta: tuple[float, float]) -> Function:
        """Mean and variance of the function, the same under q_0 and q_mix (eq. 9)."""
        share = self._shrinkage(theta)
        mean = self.prior_mean + share * (theta[0] - self.prior_mean)
        return Function(mean, self.prior_variance * (1 - share) / self.num_weights)

    def expected_log_likelihood(self, theta: tuple[float, float]) -> float:
        """Under q_0 and under q_mix."""
        f = self.function(theta)
        squares = float(np.square(self.observations - f.mean).sum()) + self._count * f.variance
        return -0.5 * self._count * math.log(2 * math.pi * self.noise_variance) - squares / (
            2 * self.noise_variance
        )

    def gap(self, theta: tuple[float, float]) -> float:
        """KL(q_0 || q_mix) (eq. 16)."""
        ratio = self.prior_variance / theta[1]
        return 0.5 * (self.num_weights - 1) * (math.log1p(ratio) - ratio / (1 + ratio))

    def kl_mixed(self, theta: tuple[float, float]) -> float:
        """KL(q_mix || prior): one direction is narrower than under the prior, and the mean has moved."""
        share = self._shrinkage(theta)
        moved = self.num_weights * (share * (theta[0] - self.prior_mean)) ** 2 / self.prior_variance
        return 0.5 * (moved - share + math.log1p(self.prior_variance / theta[1]))

    def kl_mean_field(self, theta: tuple[float, float]) -> float:
        """KL(q_0 || prior): every direction is narrower."""
        share, count = self._shrinkage(theta), self.num_weights
        moved = count * (share * (theta[0] - self.prior_mean)) ** 2 / self.prior_variance
        return 0.5 * (moved - count * share + count * math.log1p(self.prior_variance / theta[1]))

    def elbo_mixed(self, theta: tuple[float, float]) -> float:
        """Evidence lower bound of q_mix; the evidence at `theta_mixed`."""
        return self.expected_log_likelihood(theta) - self.kl_mixed(theta)

    def elbo_mean_field(self, theta: tuple[float, float]) -> float:
        """Evidence lower bound of q_0, lower by the gap."""
        return self.expected_log_likelihood(theta) - self.kl_mean_field(theta)

    @property
    def data_bound(self) -> float:
        """What KL(q || prior) cannot exceed where the bound is no lower than the prior's (eq. 3)."""
        spread = self._count * self.prior_variance / self.num_weights
        return float(np.square(self.observations - self.prior_mean).sum() + spread) / (
            2 * self.noise_variance
        )


def linear_model(
    num_weights: int,
    observations: Sequence[float] | np.ndarray,
    noise_variance: float,
    prior_variance: float,
    prior_mean: float = 0.0,
) -> LinearModel:
    """The over-parametrised linear model of section 4.

    Args:
        num_weights: K, at least 1.
        observations: `[N]`, at least one.
        noise_variance: Of an observation, above 0.
        prior_variance: Of one weight, above 0; the source's s^2 = K sigma_0^2.
        prior_mean: Of every weight.

    Raises:
        UsageError: If a number is out of its range.
    """
    values = np.atleast_1d(np.asarray(observations, np.float64))
    if num_weights < 1 or values.ndim != 1 or not len(values) or not np.isfinite(values).all():
        raise UsageError("a linear model needs 1 weight or more, and finite observations [N], 1 or more")
    if not (0 < noise_variance < math.inf and 0 < prior_variance < math.inf and math.isfinite(prior_mean)):
        raise UsageError("a linear model needs finite variances above 0, and a finite prior mean")
    return LinearModel(
        int(num_weights), values, float(noise_variance), float(prior_variance), float(prior_mean)
    )


# ----------------------------------------------------------------------- translations: one node, any inputs


class Mixed(NamedTuple):
    """N(mean, diag(variances) - factor factor^T), all `[K]`."""

    mean: np.ndarray
    variances: np.ndarray
    factor: np.ndarray

    def dense(self) -> np.ndarray:
        """The covariance, `[K, K]`."""
        return np.diag(self.variances) - np.outer(self.factor, self.factor)


def translations(inputs: np.ndarray) -> np.ndarray:
    """The directions in which weights may move without a change of w^T z, `[K, K - 1]` (section 5).

    The weight that makes up for the others is that of the largest |z_k|: any other would divide by less.
    """
    z = np.asarray(inputs, np.float64)
    pivot = int(np.abs(z).argmax())
    others = np.delete(np.arange(len(z)), pivot)
    found = np.zeros((len(z), len(others)))
    found[others, np.arange(len(others))] = 1
    found[pivot] = -z[others] / z[pivot]
    return found


def mixed(
    inputs: np.ndarray,
    mean: np.ndarray,
    variances: np.ndarray,
    prior_mean: np.ndarray,
    prior_variances: np.ndarray,
) -> Mixed:
    """q_mix of the weights of one node at inputs z (eq. 23), without a K x K matrix; all arguments `[K]`.

    Raises:
        UsageError: If all inputs are 0: the likelihood then says nothing of the weights.
    """
    if not np.any(inputs):
        raise UsageError("an invariance-abiding posterior needs an input other than 0")
    towards = prior_variances * inputs
    scale = inputs @ (variances * inputs) + inputs @ towards
    moved = prior_mean + (inputs @ (mean - prior_mean)) / scale * towards
    return Mixed(moved, np.broadcast_to(prior_variances, moved.shape), towards / math.sqrt(scale))


def mean_field(
    mean: np.ndarray, variances: np.ndarray, prior_mean: np.ndarray, prior_variances: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variances of q_0, prior times N(mean, variances), each `[K]` (eq. 6a)."""
    share = prior_variances / (prior_variances + variances)
    return prior_mean + share * (mean - prior_mean), share * variances


def translation_gap(
    inputs: np.ndarray,
    mean: np.ndarray,
    variances: np.ndarray,
    prior_mean: np.ndarray,
    prior_variances: np.ndarray,
) -> float:
    """KL(q_0 || q_mix) of one node at inputs z, all arguments `[K]`.

    It is the difference of the two bounds only where `variances` are a multiple of `prior_variances`: else
    the two do not predict alike.
    """
    own_mean, own = mean_field(mean, variances, prior_mean, prior_variances)
    mix = mixed(inputs, mean, variances, prior_mean, prior_variances)
    likelihood = inputs @ (variances * inputs)
    away = mix.mean - own_mean
    trace = (own / prior_variances).sum() + inputs @ (own * inputs) / likelihood
    distance = (away**2 / prior_variances).sum() + (inputs @ away) ** 2 / likelihood
    volume = np.log(prior_variances / own).sum() - math.log1p(
        inputs @ (prior_variances * inputs) / likelihood
    )
    return float(0.5 * (trace + distance - len(own) + volume))


# ------------------------------------------------------------------------------------------ permutations


@cache
def _sets(size: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """By count: the columns of each set of columns `[C, count]`, and the numbers of the sets without each."""
    numbers, found = {0: 0}, []
    for count in range(1, size + 1):
        columns = np.array(list(combinations(range(size), count)))
        masks = (1 << columns).sum(1)
        before = [[numbers[mask - (1 << j)] for j in of] for mask, of in zip(masks, columns, strict=True)]
        found.append((columns, np.array(before)))
        numbers = {int(mask): number for number, mask in enumerate(masks)}
    return found


def log_permanent(logs: np.ndarray) -> np.ndarray:
    """Log of the permanent of H x H matrices with positive entries, given by their logs `[S, H, H]`; `[S]`.

    f(C) = sum over j in C of a[|C|, j] f(C without j), for all sets C of columns: H 2^(H - 1) terms, none of
    them negative, so that nothing cancels and all can stay in the log domain.
    """
    found = np.zeros((len(logs), 1))
    for row, (columns, before) in enumerate(_sets(logs.shape[-1])):
        found = logsumexp(found[:, before] + logs[:, row, columns], axis=-1)
    return found[:, 0]


def scaled(logs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The matrices, in logs, with rows that sum to 1 and columns that nearly do; log of what was divided out.

    Sinkhorn's iteration. perm(A) = exp(divided) perm(B), `[S, H, H]` and `[S]`.
    """
    divided = np.zeros(len(logs))
    for number in range(2 * _SINKHORN + 1):  # ends with the rows
        sums = logsumexp(logs, axis=2 - number % 2, keepdims=True)
        logs, divided = logs - sums, divided + sums.sum((1, 2))
    return logs, divided


def log_permanent_bounds(logs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper bound of `log_permanent`, each `[S]`, at a cost of H^2.

    Upper: the product of the row sums, after scaling. Lower, the better of two: the identity and all
    exchanges of two units, other permutations dropped; and van der Waerden's H! / H^H of the scaled
    matrix, whose columns, too, must sum to 1.
    """
    size = logs.shape[-1]
    matrix, upper = scaled(logs)
    excess = np.abs(logsumexp(matrix, axis=1)).sum(1)  # what is left of the columns' sums, for safety
    flat = upper + gammaln(size + 1) - size * math.log(size) - size * excess
    diagonal = np.diagonal(logs, axis1=1, axis2=2)
    i, j = np.array(list(combinations(range(size), 2))).reshape(-1, 2).T
    exchanged = logs[:, i, j] + logs[:, j, i] - diagonal[:, i] - diagonal[:, j]
    kept = np.concatenate([np.zeros((len(logs), 1)), exchanged], 1)
    return np.maximum(diagonal.sum(1) + logsumexp(kept, axis=1), flat), upper


def log_permanent_estimate(logs: np.ndarray, draws: int, generator: torch.Generator) -> np.ndarray:
    """Importance sampling of permutations, `[S]`: unbiased for the permanent, so on average low for its log.

    Row by row a column is drawn out of those left, with the probabilities of the scaled matrix.
    """
    matrix, divided = scaled(logs)
    count, size, _ = logs.shape
    left = np.ones((count, draws, size), bool)
    chances, weight = np.exp(matrix), np.zeros((count, draws))
    shares = torch.rand(size, count, draws, generator=generator, dtype=torch.float64).numpy()
    for row in range(size):
        open_ = left * chances[:, None, row]
        total = open_.sum(-1)
        with np.errstate(divide="ignore"):
            weight += np.log(total)
        cumulative = np.cumsum(open_, -1)
        drawn = (cumulative < (shares[row] * total)[..., None]).sum(-1)
        drawn = np.minimum(drawn, size - 1)
        np.put_along_axis(left, drawn[..., None], False, -1)
    return divided + logsumexp(weight, axis=1) - math.log(draws)


class Gap(NamedTuple):
    """The gap in nats and its Monte Carlo standard error over the draws of weights."""

    value: float
    error: float


def log_densities(
    means: np.ndarray, variances: np.ndarray, draws: int, generator: torch.Generator
) -> np.ndarray:
    """Log of the density of unit i's posterior at unit j's weights, `[S, H, H]`, for S draws from q_0.

    Args:
        means: `[H, D]`: all weights of a hidden unit, incoming and outgoing.
        variances: `[H, D]`.
        draws: S.
        generator: Draws the weights.
    """
    noise = torch.randn(draws, *means.shape, generator=generator, dtype=torch.float64).numpy()
    weights = means + np.sqrt(variances) * noise
    away = (weights[:, None] - means[:, None]) ** 2 / variances[:, None]
    return -0.5 * (away + np.log(2 * np.pi * variances[:, None])).sum(-1)


def permutation_gaps(logs: np.ndarray, log_permanents: np.ndarray) -> Gap:
    """E_q0[log q_0(w) - log sum_pi q_0(pi w) + log H!], by the logs of permanents, exact or bounds of them.

    The gap lies between 0 and log H!, in a prior that is the same for all units.

    Args:
        logs: `[S, H, H]`, of `log_densities`.
        log_permanents: `[S]`.
    """
    of_draws = np.trace(logs, axis1=1, axis2=2) - log_permanents + gammaln(logs.shape[-1] + 1)
    return Gap(float(of_draws.mean()), float(of_draws.std(ddof=1) / math.sqrt(len(of_draws))))
