"""A stand-in for torch and Lightning in a process that scores stored arrays.

Most tasks score with numpy alone. Their files import torch all the same, for the training; that takes seconds
and 600 MiB. Here every name of torch is a class, which modules may inherit, decorate with and annotate by
while they are imported. Whoever calls one at another time gets `Needed`: the work is one for a process with
torch. So a number that was computed here is one in which torch had no part.

A process that stood in stays without torch: call it only in one that ends with its answer.
"""

from __future__ import annotations

import sys
from abc import ABCMeta
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PACKAGES = ("torch", "pytorch_lightning")


class Needed(BaseException):
    """Something of torch was called; no error of the caller's, so nobody who handles those handles this."""


def _must_be_importing(name: str) -> None:
    frame = sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None:
        raise Needed(name)


class _Name(ABCMeta):
    """The class of names of torch, which have names inside of their own."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _named(f"{cls.__name__}.{name}")

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        _must_be_importing(cls.__name__)
        if len(args) == 1 and callable(args[0]) and not kwargs:  # a decorator
            return args[0]
        return super().__call__()

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__


def _named(name: str) -> _Name:
    def decorated(self: object, function: Any = None) -> Any:
        _must_be_importing(name)
        return function

    return _Name(name, (), {"__call__": decorated, "__class_getitem__": classmethod(lambda cls, item: cls)})


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        found = _named(f"{self.__name__}.{name}")
        setattr(self, name, found)
        return found


class _Loader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing in it."""


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        is_one = fullname.partition(".")[0] in PACKAGES
        return ModuleSpec(fullname, _Loader(), is_package=True) if is_one else None


def stand_in() -> None:
    """Has torch and Lightning imported as names from here on; neither may have been imported."""
    if any(name in sys.modules for name in PACKAGES):
        raise RuntimeError("torch is imported already")
    sys.meta_path.insert(0, _Finder())
