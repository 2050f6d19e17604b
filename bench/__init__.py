"""posterior-bench: which approximation of a Bayesian neural network's posterior deserves trust?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.runs.folders import table
    from bench.runs.runner import load, run

    __version__: str

__all__ = ["load", "run", "table"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        # Of the last tag alone: records name the commit beside it, and seeds of one release stay comparable.
        return version("posterior-bench").partition("+")[0]
    # Torch and Lightning take seconds to import: only when a run or its method is asked for.
    if name == "table":
        from bench.runs.folders import table

        return table
    if name in __all__:
        from bench.runs import runner

        return getattr(runner, name)
    raise AttributeError(f"module 'bench' has no attribute '{name}'")
