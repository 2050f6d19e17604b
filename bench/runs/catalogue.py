"""The catalogue: what every name of a method or task stands for.

Methods and tasks are found by listing the files of `bench.methods` and `bench.tasks`. Names are read from the
source (`bench.system.names`); a file is imported, and torch with it, when an entry of it is asked for.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from bench.errors import UsageError
from bench.settings import build
from bench.system.names import declared
from bench.text import one_line


@dataclass(frozen=True)
class Entry:
    """A public name.

    Attributes:
        name: As typed on the command line.
        cls: The class behind it.
        fixed: Settings that the name fixes.
        file: Stem of the file that declares it.
        presets: Preset -> settings other than the defaults; of a method, on every task.
        members: Of a method: how many independent copies the name stands for.
        search: Of a method: setting -> range in `bench tune`.
    """

    name: str
    cls: Any
    fixed: Mapping[str, Any]
    file: str
    presets: Mapping[str, Mapping[str, Any]]
    members: int = 1
    search: Mapping[str, Any] = field(default_factory=dict)

    @property
    def provides(self) -> frozenset[str]:
        """Capabilities of a method."""
        from bench.engine.ensemble import capabilities

        return capabilities(self.cls.provides, self.members)

    @property
    def summary(self) -> str:
        """First line of the file's documentation."""
        line = (inspect.getmodule(self.cls).__doc__ or self.cls.__doc__ or "").strip().splitlines()[0]
        return line if self.members == 1 else f"{self.members} independent fits, pooled. {line}"

    def flags(self) -> list[str]:
        """Settings that a user may choose."""
        return [f.name for f in fields(self.cls.settings_class) if f.name not in self.fixed]


def misleads(task: type) -> str:
    """What its file says would mislead a reader of a task's numbers, on one line; empty if it says nothing.

    This is the paragraph of the file's documentation that begins with "What would mislead:", without these
    words.
    """
    module = inspect.getmodule(task)
    paragraphs = inspect.cleandoc(getattr(module, "__doc__", None) or "").split("\n\n")
    found = (re.fullmatch(r"What would mislead:\s+(.+)", text, re.DOTALL) for text in paragraphs)
    return next((" ".join(match[1].split()) for match in found if match), "")


def _classes(module: Any, base: type) -> list[type]:
    own = [c for c in vars(module).values() if inspect.isclass(c) and issubclass(c, base)]
    return [c for c in own if c.__module__ == module.__name__]


def entry_of(name: str, cls: type, fixed: Mapping[str, Any], file: str, module: Any) -> Entry:
    """The entry of a class under a name that fixes settings; presets and search are those of its module."""
    settings = {k: v for k, v in fixed.items() if k != "members"}
    presets, search = getattr(module, "PRESETS", {}), getattr(module, "SEARCH", {})
    return Entry(name, cls, settings, file, presets, fixed.get("members", 1), search)


class Entries(Mapping[str, Entry]):
    """The entries of a package by name; the file of a name is imported when its entry is asked for.

    Args:
        package: `bench.methods` or `bench.tasks`.
        kind: `method` or `task`.
    """

    def __init__(self, package: Any, kind: str) -> None:
        self._package, self._kind = package, kind
        self._declared = declared(package.__path__)
        self._made: dict[str, Entry] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._declared)

    def __len__(self) -> int:
        return len(self._declared)

    def __contains__(self, name: object) -> bool:
        return name in self._declared

    def __getitem__(self, name: str) -> Entry:
        if name not in self._made:
            declaration = self._declared[name]
            module = self._module(declaration.file)
            base = base_of(self._kind)
            classes = _classes(module, base)
            if len(classes) != 1:
                raise UsageError(f"{module.__file__} must declare one {base.__name__}, not {len(classes)}")
            self._made[name] = entry_of(name, classes[0], declaration.fixed, declaration.file, module)
        return self._made[name]

    def may_hold(self, name: str) -> bool:
        """Whether a name is declared, or may be one that spells out settings; imports nothing.

        A name that spells out settings begins with the stem of its file.
        """
        return name in self or any(
            known.has_pattern and name.startswith(f"{known.file}_") for known in self._declared.values()
        )

    def of_file(self, file: str) -> list[Entry]:
        """The entries of one file, by its stem; none if there is no such file."""
        return [self[name] for name, declaration in self._declared.items() if declaration.file == file]

    def of_pattern(self, name: str) -> Entry | None:
        """The entry of a name that spells out settings, as a file's `PATTERN` has it, under that name."""
        for known, declaration in self._declared.items():
            if not (declaration.has_pattern and name.startswith(f"{declaration.file}_")):
                continue
            match = self._module(declaration.file).PATTERN.fullmatch(name)
            if match:
                try:
                    values = {setting: ast.literal_eval(text) for setting, text in match.groupdict().items()}
                except (ValueError, SyntaxError):
                    reason = "holds a number that cannot be read"
                    raise UsageError(f"the name '{one_line(name)}' {reason}") from None
                build(self[known].cls.settings_class, values, self._kind)  # says which value is out of range
                return replace(self[known], name=name, fixed=values)
        return None

    def _module(self, file: str) -> Any:
        try:
            return importlib.import_module(f"{self._package.__name__}.{file}")
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise UsageError(f"cannot import {self._package.__name__}.{file}: {reason}") from error


def base_of(kind: str) -> type:
    """The class of the contract that every method, or every task, inherits."""
    from bench.contract import Method, Task

    return {"method": Method, "task": Task}[kind]


def nearest(name: str, among: list[str]) -> str:
    """' Did you mean ...?' with the nearest names, or what there is to choose from."""
    close = difflib.get_close_matches(name, among, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else f"choose from {', '.join(among)}"
