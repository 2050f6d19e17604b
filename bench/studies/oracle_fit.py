"""Where the laws of the oracle tasks come from: the marginal likelihood of real targets at the same inputs.

    python -m bench.studies.oracle_fit

prints what it finds: scale, length scale and noise of diabetes, whose targets have mean 0 and sd 1, and the
length scale of digits, by regression on the ten classes one-hot. The log of the sd of the noise of diabetes
is linear in the body mass index. `bench/studies/oracle.py` has the numbers, to four digits.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.linalg import cho_factor, cho_solve
from scipy.optimize import minimize

from bench.studies import oracle

SUBSET = 400
"""Digits that the length scale is fitted to, the first of the fixed order."""


def negative_log_evidence(covariance: np.ndarray, targets: np.ndarray) -> float:
    """Minus the log density of K draws `[R, K]` of a normal with this covariance and mean 0, in nats."""
    factor = cho_factor(covariance, lower=True)
    rows, outputs = targets.shape
    log_det = 2 * np.log(np.diag(factor[0])).sum()
    squares = (targets * cho_solve(factor, targets)).sum()
    return float(0.5 * squares + 0.5 * outputs * (log_det + rows * np.log(2 * np.pi)))


def diabetes_evidence(logs: np.ndarray) -> float:
    """Negative log evidence of diabetes, of log s, log l, log sd of the noise, and its slope."""
    from sklearn import datasets

    table = datasets.load_diabetes(scaled=False)
    inputs = (table.data - table.data.mean(0)) / table.data.std(0)
    targets = (table.target - table.target.mean()) / table.target.std()
    sigma = np.exp(logs[2] + logs[3] * inputs[:, oracle.NOISE_COLUMN])
    kernel = oracle.Kernel(*np.exp(logs[:2]))
    return negative_log_evidence(kernel.within(inputs) + np.diag(sigma**2), targets[:, None])


def digits_evidence(logs: np.ndarray) -> float:
    """Negative log evidence of the classes of some digits, one-hot, of log s, log l, log sd of the noise."""
    from sklearn import datasets

    order = np.random.default_rng(oracle.randomness.derive(0, "oracle_classification", "rows"))
    rows = order.permutation(len(datasets.load_digits().data))[:SUBSET]
    labels = datasets.load_digits().target[rows]
    kernel = oracle.Kernel(*np.exp(logs[:2]))
    covariance = kernel.within(oracle.digits()[:SUBSET]) + np.exp(2 * logs[2]) * np.eye(SUBSET)
    return negative_log_evidence(covariance, np.eye(10)[labels] - 0.1)


def most_likely(evidence: Callable[[np.ndarray], float], start: list[float]) -> np.ndarray:
    """The logs of least negative evidence, from a start, to about five digits."""
    return np.asarray(minimize(evidence, start, method="L-BFGS-B").x)


def main() -> None:
    """Prints both laws."""
    found = most_likely(diabetes_evidence, [0.0, 1.5, -0.5, 0.0])
    print("diabetes: s, l, noise {:.4g} {:.4g} {:.4g}".format(*np.exp(found[:3])), f"slope {found[3]:.4g}")
    found = most_likely(digits_evidence, [-1.0, 0.0, -1.5])
    print("digits: s, l, noise {:.4g} {:.4g} {:.4g}".format(*np.exp(found)))


if __name__ == "__main__":
    main()
