"""The laws, which lie in the package (`bench/laws`), held against the suite's methods and tasks."""

from bench.laws import methods as laws
from bench.laws import problems, truth

__all__ = ["laws", "problems", "truth"]
