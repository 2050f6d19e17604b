"""Packages that Lightning, torch and scipy import whole, and of which a run needs a few names or none.

`torchmetrics` imports torchvision and scipy, where Lightning wants two classes of it. `torch._dynamo` imports
sympy and half of torch, where Lightning wants a class to compare with and every optimiser a decorator.
Together they are half of the processor time of importing Lightning. `torch.utils.flop_counter` imports the
compiler of kernels for GPUs, where Lightning's summary of a network wants a class of it. `numpy.f2py`, which
wraps Fortran, comes with all names of numpy where scipy takes them. So each is imported as a shell, which
holds what is wanted, and its own code runs when it is asked for any other name or for a module inside.
Whoever compiles a network, or computes a metric of torchmetrics, finds the same package as without this
module.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import version
from types import FunctionType, ModuleType
from typing import Any

_lock = threading.RLock()


class Shell(ModuleType):
    """A package whose own code waits until it is asked for a name that the shell does not hold."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__all__":  # of tools that look at every module
            raise AttributeError(f"module '{self.__name__}' has no attribute '{name}'")
        if self.__name__ == "torchmetrics" and name in _TORCHMETRICS:
            return _TORCHMETRICS[name]()
        fill(self)
        return getattr(self, name)


def fill(package: Any) -> None:
    """Runs the code of a package that is a shell so far."""
    with _lock:
        if type(package) is Shell:
            package.__class__ = ModuleType  # type: ignore[assignment]
            specification = package.__spec__
            if specification is not None and isinstance(specification.loader, _Waiting):
                specification.loader.whole.exec_module(package)


# ------------------------------------------------------------------------------------------------- the names


def _metric() -> Any:
    import torchmetrics.utilities  # noqa: F401  # first, since the two import each other
    from torchmetrics.metric import Metric

    return Metric


def _collection() -> Any:
    import torchmetrics.utilities  # noqa: F401  # as above
    from torchmetrics.collections import MetricCollection

    return MetricCollection


_TORCHMETRICS = {"Metric": _metric, "MetricCollection": _collection}
_FREE = ("torchmetrics.metric", "torchmetrics.collections", "torchmetrics.utilities")
"""Modules that the two classes need, by how their names begin."""


def _of_torchmetrics(shell: Shell) -> dict[str, Any]:
    return {"__version__": version("torchmetrics"), "_logger": logging.getLogger("torchmetrics")}


def _of_dynamo(shell: Shell) -> dict[str, Any]:
    class Compared(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return type(shell) is not Shell and isinstance(instance, shell.OptimizedModule)

    class OptimizedModule(metaclass=Compared):
        """What a compiled network is; until something is compiled, no network is one."""

    def disable(fn: Any = None, *options: Any, **named: Any) -> Any:
        if not isinstance(fn, FunctionType):
            fill(shell)
            return shell.disable(fn, *options, **named)
        disabled: list[Callable[..., Any]] = []

        def called(*args: Any, **kwargs: Any) -> Any:
            if type(shell) is Shell:  # nothing is being compiled
                return fn(*args, **kwargs)
            if not disabled:
                disabled.append(shell.disable(fn, *options, **named))
            return disabled[0](*args, **kwargs)

        return called

    def graph_break(msg: str = "") -> None:
        """Tells a compiler something; there is none."""

    return {"OptimizedModule": OptimizedModule, "disable": disable, "graph_break": graph_break}


def _of_flop_counter(shell: Shell) -> dict[str, Any]:
    def counter(*args: Any, **kwargs: Any) -> Any:
        """A counter of operations."""
        fill(shell)
        return shell.FlopCounterMode(*args, **kwargs)

    return {"FlopCounterMode": counter}


_NAMES: dict[str, Callable[[Shell], dict[str, Any]]] = {
    "torchmetrics": _of_torchmetrics,
    "torch._dynamo": _of_dynamo,
    "torch.utils.flop_counter": _of_flop_counter,
    "numpy.f2py": lambda shell: {},
}

# ------------------------------------------------------------------------------------------------ the import


class _Waiting(Loader):
    """Makes a shell; `whole` is the package's own loader."""

    def __init__(self, whole: Loader) -> None:
        self.whole = whole

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Shell(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        assert isinstance(module, Shell)
        vars(module).update(_NAMES[module.__name__](module))

    def __getattr__(self, name: str) -> Any:  # resources and sources of the package
        return getattr(self.whole, name)


class _There(Loader):
    """Gives a module that is imported already, since the `__init__` of its package needed it."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


class _Finder(MetaPathFinder):
    """Finds the packages of `_NAMES` as Python does, and has them made as shells.

    A module inside of one needs its `__init__` first, as always, unless it is among `_FREE`.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in _NAMES:
            found = PathFinder.find_spec(fullname, path, target)
            if found is not None and found.loader is not None:
                found.loader = _Waiting(found.loader)
            return found
        for name in _NAMES:
            if fullname.startswith(f"{name}.") and not fullname.startswith(_FREE):
                package = sys.modules.get(name)
                if type(package) is Shell:
                    fill(package)
                    if fullname in sys.modules:
                        return ModuleSpec(fullname, _There(sys.modules[fullname]))
        return None


def install() -> None:
    """Has them imported as shells from here on: for a process of our own, not for whoever imports `bench`."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
