"""All laws of inference methods, which the tests and `bench check` hold."""

from bench.laws import capabilities, losses, predicting, training  # noqa: F401  each of them makes its laws
from bench.laws.law import LAWS

__all__ = ["LAWS"]
