"""What independence costs: a Gaussian against the best Gaussian with independent weights.

A full Gaussian N(m, Sigma) stands for one mode of a posterior; the normal with independent weights that is
nearest to it in KL(diagonal || full), the divergence that variational inference minimises, has the same mean
and the variances 1 / diag(Sigma^-1). Two numbers say what it loses: the divergence the other way round,
KL(full || diagonal), and the excess of the Wasserstein distance from draws of the posterior.

Source: Farquhar 2022, thesis "Understanding Approximation" (docs/sources.md), section 3.1 (eqs 3.2 and 3.3)
and appendix A.1.

Shapes: N draws, d weights.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from scipy import linalg
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture
from torch import Tensor
from torch.nn.functional import softplus
from torch.utils.data import TensorDataset

from bench.contract import Problem
from bench.divergence import weight_divergence
from bench.priors import normal_tensor
from bench.weights import forward

COMPONENTS = 4
"""Largest number of components that a mixture may have."""
MATCHED = 1000
"""Draws, at most, between which a Wasserstein distance is taken: its time grows with their cube."""
_RATE = 1e-2
_INITIAL_RHO = -3.0


# --------------------------------------------------------------------------------------- a Gaussian's error


def diagonal_variances(covariance: np.ndarray) -> np.ndarray:
    """Variances `[d]` of the independent normals nearest to N(0, covariance): 1 / diag(covariance^-1)."""
    lower = np.linalg.cholesky(covariance)
    inverse = linalg.solve_triangular(lower, np.eye(len(lower)), lower=True)
    variances: np.ndarray = 1 / np.square(inverse).sum(0)
    return variances


def kl_error(covariance: np.ndarray) -> float:
    """KL(N(0, Sigma) || N(0, D)) with D = diag(1 / diag(Sigma^-1)), in nats; 0 where Sigma is diagonal.

    Source: Farquhar 2022, eq. 3.3: (tr(D^-1 Sigma) - d + log det D - log det Sigma) / 2.

    Args:
        covariance: Sigma, symmetric and positive definite, `[d, d]`.

    Raises:
        ValueError: If it is not.
    """
    covariance = np.asarray(covariance, np.float64)
    shape = covariance.shape
    if len(shape) != 2 or shape[0] != shape[1] or not np.allclose(covariance, covariance.T, rtol=1e-6):
        raise ValueError(f"a covariance is a symmetric matrix [d, d], and this one is of shape {shape}")
    try:
        log_det = 2 * np.log(np.diag(np.linalg.cholesky(covariance))).sum()
    except np.linalg.LinAlgError:
        raise ValueError("this covariance is not positive definite: add a ridge to its diagonal") from None
    variances = diagonal_variances(covariance)
    trace = (np.diag(covariance) / variances).sum()
    return max(0.0, float(trace - len(covariance) + np.log(variances).sum() - log_det) / 2)


def wasserstein(first: np.ndarray, second: np.ndarray) -> float:
    """2-Wasserstein distance between the empirical distributions of as many draws, `[N, d]` each.

    The root of the least mean squared Euclidean distance over all pairings: equal weights make optimal
    transport an assignment, which is solved exactly.
    """
    squares = cdist(first, second, "sqeuclidean")
    return float(np.sqrt(squares[linear_sum_assignment(squares)].mean()))


class Errors(NamedTuple):
    """Errors of the fits to one mode, and the diagonal fit.

    Attributes:
        kl: KL(full || diagonal), in nats.
        to_full: Wasserstein distance from the draws to as many of the full Gaussian, in weight units.
        to_diagonal: The same to the diagonal one.
        variances: Of the diagonal fit, `[d]`.
    """

    kl: float
    to_full: float
    to_diagonal: float
    variances: np.ndarray


def errors(draws: np.ndarray, mean: np.ndarray, covariance: np.ndarray, generator: torch.Generator) -> Errors:
    """How far draws `[N, d]` are from a full Gaussian and from its diagonal fit.

    Distances are between MATCHED evenly spaced draws, all where there are fewer, and as many new ones.
    """
    variances = diagonal_variances(covariance)
    kept = draws[np.linspace(0, len(draws) - 1, min(MATCHED, len(draws))).round().astype(int)]
    lower = np.linalg.cholesky(covariance)
    full = mean + _normal(kept.shape, generator) @ lower.T
    diagonal = mean + _normal(kept.shape, generator) * np.sqrt(variances)
    distances = wasserstein(kept, full), wasserstein(kept, diagonal)
    return Errors(kl_error(covariance), *distances, variances)


def floor(
    count: int, mean: np.ndarray, variances: np.ndarray, ridge: float, generator: torch.Generator
) -> Errors:
    """What `errors` are of `count` draws of independent normals, which lose nothing: those of estimation."""
    draws = mean + _normal((count, len(mean)), generator) * np.sqrt(variances)
    return errors(draws, draws.mean(0), estimate(draws, ridge), generator)


def estimate(draws: np.ndarray, ridge: float) -> np.ndarray:
    """Maximum-likelihood covariance `[d, d]` of draws `[N, d]`, with a ridge added to its diagonal."""
    centred = draws - draws.mean(0)
    covariance: np.ndarray = centred.T @ centred / len(draws) + ridge * np.eye(draws.shape[1])
    return covariance


def of_parts(draws: np.ndarray, members: np.ndarray, ridge: float) -> np.ndarray:
    """E_KL of all draws, in the mean of their two halves, and in that of their four quarters, in nats.

    Args:
        draws: Chain after chain, `[C, N, d]`; a part is the same stretch of every chain.
        members: Which of them belong to the mode, `[C, N]`.
        ridge: Added to the diagonal of every covariance.

    Returns:
        `[3]`, or fewer: parts of fewer than two draws per weight, whose covariance tells nothing, have none.
    """
    found: list[float] = []
    for count in (1, 2, 4):
        stretches = (np.array_split(of, count, axis=1) for of in (draws, members))
        parts = [part[own] for part, own in zip(*stretches, strict=True)]
        if min(map(len, parts)) < 2 * draws.shape[2]:
            break
        found.append(float(np.mean([kl_error(estimate(part, ridge)) for part in parts])))
    return np.array(found)


def limits(parts: np.ndarray) -> tuple[float, float]:
    """E_KL of infinitely many draws, from those `of_parts`, from below and above; NaN without quarters.

    E_KL of N draws is too large by a series in 1 / N whose coefficients grow with the correlation of
    neighbours in a chain. Its first two terms alone, (8 all - 6 halves + quarters) / 3, leave the others,
    which are positive: the upper limit. a / (N - b), which takes all terms for those of a pole, takes away
    too much: the lower one. Both may be below 0, by chance.
    """
    if len(parts) < 3:
        return np.nan, np.nan
    whole, halves, quarters = parts
    with np.errstate(divide="ignore", invalid="ignore"):  # of chains that never moved
        ratio = (quarters - halves) / (halves - whole)
    pole = (ratio - 2) / (4 * ratio - 2)
    return float(whole - (halves - whole) * (1 - 2 * pole)), float(parts @ (8, -6, 1) / 3)


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> np.ndarray:
    numbers: np.ndarray = torch.randn(shape, generator=generator, dtype=torch.float64).numpy()
    return numbers


# ------------------------------------------------------------------------------------------------- one mode


class Mode(NamedTuple):
    """The heaviest component of a mixture of Gaussians.

    Attributes:
        members: Which draws belong to it, `[N]`.
        mean: `[d]`.
        covariance: With the ridge, `[d, d]`.
        bic: Bayesian information criterion of mixtures of 1, 2, ... components.
    """

    members: np.ndarray
    mean: np.ndarray
    covariance: np.ndarray
    bic: np.ndarray

    @property
    def components(self) -> int:
        """Number of components of the mixture with the least criterion."""
        return int(self.bic.argmin()) + 1


def heaviest(draws: np.ndarray, ridge: float, generator: torch.Generator) -> Mode:
    """The heaviest component of the best mixture of 1 to COMPONENTS Gaussians, by BIC, of draws `[N, d]`.

    Args:
        draws: At least COMPONENTS.
        ridge: Added to the diagonal of every covariance.
        generator: Source of the seed of each fit.
    """
    fits = []
    for components in range(1, COMPONENTS + 1):
        seed = int(torch.randint(2**31, (), generator=generator))
        mixture = GaussianMixture(components, reg_covar=ridge, random_state=seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # BIC judges where it stopped
            fits.append(mixture.fit(draws))
    bic = np.array([fit.bic(draws) for fit in fits])
    best = fits[int(bic.argmin())]
    number = int(best.weights_.argmax())
    return Mode(best.predict(draws) == number, best.means_[number], best.covariances_[number], bic)


# ---------------------------------------------------------------------------------------- where chains start


def optimum(problem: Problem, steps: int, generator: torch.Generator) -> Mapping[str, Tensor]:
    """Means of the independent normals that maximise the evidence lower bound: where chains may start.

    Adam at 1e-2 on all data, one draw of the weights a step, from the network's own initial weights.

    Args:
        problem: Its training data lie in memory and have no weights.
        steps: Of the optimiser.
        generator: Source of the initial weights and of the draws.
    """
    assert isinstance(problem.train, TensorDataset)
    inputs, targets = problem.train.tensors
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.random.default_generator.manual_seed(int(torch.randint(2**62, (), generator=generator)))
        network = problem.network()
        means = dict(network.named_parameters())
        rhos = {name: torch.full_like(m, _INITIAL_RHO).requires_grad_() for name, m in means.items()}
        prior = problem.prior(means)
        optimizer = torch.optim.Adam([*means.values(), *rhos.values()], _RATE)
        for _ in range(steps):
            posterior = {name: normal_tensor(m, softplus(rhos[name])) for name, m in means.items()}
            draws = {
                name: q.mean + q.stddev * torch.randn(1, *q.mean.shape, generator=generator)
                for name, q in posterior.items()
            }
            log_likelihood = problem.likelihood.log_prob(forward(network, draws, inputs), targets).sum()
            optimizer.zero_grad()
            (weight_divergence(posterior, prior, draws) - log_likelihood).backward()
            optimizer.step()
    return {name: m.detach() for name, m in means.items()}
