"""Names that a user may type, and the classes that they stand for.

The suite's own methods and tasks are found by listing the files of `bench.methods` and `bench.tasks`. Their
names are read from the source (`bench.system.names`); a file is imported, and torch with it, when an entry of
it is asked for. A user's own class is named `package.module:Class`, and is known once `import_own` has
imported it.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from pydantic.dataclasses import is_pydantic_dataclass

import bench.methods
import bench.tasks
from bench.errors import BenchError, NotImported, UsageError
from bench.settings import CODE, build
from bench.system.names import declared
from bench.text import one_line

NONE = "none"
"""What a study in closed form has in place of a method; `methods()` does not list it."""
CONTESTANTS = ("bench.peers:", "bench.trees:")
"""How names begin that have the form of one's own, but are the suite's code: they need no trust."""


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
    def declares(self) -> str:
        """What a method declares of its posterior, out of `bench.contract.STATEMENTS`; empty if nothing."""
        said = getattr(self.cls, "declares", "")
        return said if isinstance(said, str) else str(said[0])

    @property
    def summary(self) -> str:
        """First line of the file's documentation."""
        line = (inspect.getmodule(self.cls).__doc__ or self.cls.__doc__ or "").strip().splitlines()[0]
        return line if self.members == 1 else f"{self.members} independent fits, pooled. {line}"

    @property
    def member(self) -> Entry:
        """The method whose settings an ensemble has, its single member, if that has a name; else itself."""
        siblings = methods().of_file(self.file)
        same = [e for e in siblings if (e.cls, e.fixed, e.members) == (self.cls, self.fixed, 1)]
        return same[0] if same else self

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

    def member_of(self, name: str) -> str:
        """The name of `Entry.member`, as far as names are declared; imports nothing."""
        if name not in self._declared:
            return name
        own = self._declared[name]
        fixed = {setting: value for setting, value in own.fixed.items() if setting != "members"}
        single = [fixed, fixed | {"members": 1}]
        same = [n for n, other in self._declared.items() if other.file == own.file and other.fixed in single]
        return same[0] if same else name

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
    known = {each.casefold(): each for each in among}
    if (same := known.get(name.casefold())) is not None:  # written in other letters
        return f"did you mean {same}?"
    close = [known[each] for each in difflib.get_close_matches(name.casefold(), known, n=3, cutoff=0.5)]
    return f"did you mean {' or '.join(close)}?" if close else f"choose from {', '.join(among)}"


@cache
def methods() -> Entries:
    """All methods by name."""
    return Entries(bench.methods, "method")


@cache
def tasks() -> Entries:
    """All tasks by name."""
    return Entries(bench.tasks, "task")


def refuse_unknown(method: str, task: str) -> None:
    """Refuses names that no file declares, before torch is imported for those that are declared.

    Raises:
        UsageError: If a name is neither declared nor that of a user's own class; names the nearest.
    """
    if tasks().may_hold(method) and methods().may_hold(task):
        raise UsageError(f"METHOD stands before TASK, and {method} is a task: {task} {method}")
    for kind, name, known in (("method", method, methods()), ("task", task, tasks())):
        is_none = (kind, name) == ("method", NONE)
        if ":" not in name and not is_none and not known.may_hold(name):
            raise _unknown(name, kind, known)


_own: dict[str, tuple[type, Any]] = {}
"""Classes that `import_own` has imported, by their names, each with its module."""


@contextmanager
def defects(what: str) -> Iterator[None]:
    """Tells a defect of a user's own class in one line.

    Raises:
        UsageError: In place of any other exception of the block: what failed, why, and in which line.
    """
    try:
        yield
    except BenchError:
        raise
    except (Exception, SystemExit) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        is_told = isinstance(error, SyntaxError) or last.filename == __file__  # a class that is not there
        where = "" if is_told else f" ({Path(last.filename).name}, line {last.lineno})"
        raise UsageError(f"{what}: {type(error).__name__}: {one_line(error)}{where}") from None


def import_own(*names: str) -> None:
    """Imports users' own methods, tasks and factories of networks and makes them known to this process.

    This is the one door by which code from outside the suite comes in: names that the user typed pass
    through it, and those that a record holds never do. Names without a colon are installed ones, and need
    no import.

    Args:
        names: `package.module:Class`, or `package.module:factory`.

    Raises:
        UsageError: If a module cannot be imported, holds no such class, or its class is no method and no
            task that could run; one line.
    """
    for name in names:
        module_name, _, class_name = name.partition(":")
        if ":" not in name or name in _own:
            continue
        from bench import own_network  # here, since it needs torch

        if name in own_network.imported:
            continue
        if not CODE.fullmatch(name):
            raise UsageError(f"cannot import '{name}': must be package.module:Class")
        if os.getcwd() not in sys.path:  # a script's own folder is there in place of the user's
            sys.path.append(os.getcwd())
        with defects(f"cannot import '{name}'"):
            module = importlib.import_module(module_name)
            cls = getattr(module, class_name)
        bases = tuple(map(base_of, ("method", "task")))
        if not (inspect.isclass(cls) and issubclass(cls, bases)):
            if not own_network.is_factory(cls):
                raise UsageError(f"'{name}' is no Method and no Task of bench.contract, and makes no network")
            own_network.imported[name] = cls
            continue
        _must_be_whole(entry_of(name, cls, {}, module_name, module))
        _own[name] = cls, module


def _must_be_whole(entry: Entry) -> None:
    """Refuses a user's own entry unless all that the suite reads before a run stands in it."""
    if not is_pydantic_dataclass(entry.cls.settings_class):
        raise UsageError(f"'{entry.name}': its settings_class must be a class under @bench.settings.settings")
    if issubclass(entry.cls, base_of("method")) and not isinstance(entry.cls.provides, frozenset):
        raise UsageError(f"'{entry.name}': provides must be a frozenset of capabilities")
    tables = [entry.search, entry.presets]
    tables += entry.presets.values() if isinstance(entry.presets, Mapping) else ()
    if not all(isinstance(table, Mapping) for table in tables):
        raise UsageError(f"'{entry.name}': PRESETS must hold settings by preset, SEARCH ranges by setting")
    for preset, values in entry.presets.items():
        if unknown := [name for name in values if name not in entry.flags()]:
            raise UsageError(
                f"'{entry.name}': PRESETS: {preset}: no such setting as {unknown[0]}; "
                f"{nearest(str(unknown[0]), entry.flags())}"
            )


def _unknown(name: str, kind: str, known: Entries) -> UsageError:
    return UsageError(f"unknown {kind} '{name}': {nearest(name, list(known))}")


def _find(name: str, kind: str, known: Entries) -> Entry:
    if name in known:
        return known[name]
    spelled = known.of_pattern(name)
    if spelled is not None:
        return spelled
    if ":" not in name:
        raise _unknown(name, kind, known)
    if name.startswith(CONTESTANTS):
        import_own(name)
    if name not in _own:
        from bench.own_network import imported

        if name in imported:
            raise UsageError(f"'{name}' is no {base_of(kind).__name__} of bench.contract")
        raise NotImported(
            f"the {kind} '{name}' is not part of this suite: --import {name} runs its code, if you trust it",
            name,
        )
    cls, module = _own[name]
    base = base_of(kind)
    if not issubclass(cls, base):
        raise UsageError(f"'{name}' is no {base.__name__} of bench.contract")
    return entry_of(name, cls, {}, name.partition(":")[0], module)


def method(name: str) -> Entry:
    """The method of this name, or of this `package.module:Class` that `import_own` has imported.

    `NONE` gives an entry too, so that runs of studies in closed form are read like all others.

    Raises:
        UsageError: If there is none; names the nearest.
    """
    if name == NONE:
        from bench.runs import closed_form  # here, since it needs torch

        return entry_of(NONE, closed_form.Nothing, {}, NONE, closed_form)
    return _find(name, "method", methods())


def task(name: str) -> Entry:
    """The task of this name, or of this `package.module:Class` that `import_own` has imported.

    Raises:
        UsageError: If there is none; names the nearest.
    """
    return _find(name, "task", tasks())


def with_members(entry: Entry, members: int | None) -> Entry:
    """The method as an ensemble of so many members: under the name that stands for it, if there is one."""
    if members is None or members == entry.members:
        return entry
    siblings = [e for e in methods().of_file(entry.file) if e.cls is entry.cls and e.fixed == entry.fixed]
    named = [e for e in siblings if e.members == members]
    named += [e for e in siblings if members > 1 and e.members > 1]
    return replace(named[0] if named else entry, members=members)


def narrowest(method: Entry, settings: Mapping[str, Any]) -> Entry:
    """The method under the name of its file that fixes most of these settings, as so many members.

    Names that spell out settings (`PATTERN`) are not looked for.
    """
    names = [
        entry
        for entry in methods().of_file(method.file)
        if entry.cls is method.cls
        and len(entry.fixed) > len(method.fixed)
        and all(settings[name] == value for name, value in entry.fixed.items())
    ]
    return with_members(max(names, key=lambda entry: len(entry.fixed)), method.members) if names else method
