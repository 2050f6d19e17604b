"""The laws, which lie in the package (`bench/laws`), held against the suite's methods and tasks."""

from types import SimpleNamespace

from bench.laws import capabilities, cases, losses, predicting, problems, training, truth

laws = SimpleNamespace(
    **{
        name: what
        for part in (cases, predicting, losses, training, capabilities)
        for name, what in vars(part).items()
        if not name.startswith("_")
    }
)
"""Every law of methods by name, and what it is made of."""

__all__ = ["laws", "problems", "truth"]
