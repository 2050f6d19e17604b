"""Names that a user may type, their presets, and the identity of a choice of settings.

The suite's own names are those of the catalogue (`bench.runs.catalogue`). A user's own class is named
`package.module:Class`, and is known once `import_own` has imported it.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import os
import re
import sys
import tomllib
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from pydantic.dataclasses import is_pydantic_dataclass

import bench.methods
import bench.tasks
from bench.errors import BenchError, UsageError
from bench.runs.catalogue import Entries, Entry, base_of, entry_of, nearest
from bench.settings import CODE, build
from bench.text import one_line

PRESETS = ("smoke", "standard", "paper")
TUNED = Path(__file__).parent / "presets" / "tuned"
"""Folder of what `bench tune` found: `<task>/<method>.json`."""
FULL_PRECISION = "32-true"
"""What identities take for granted: Lightning's name for training in float32 throughout."""
NONE = "none"
"""What a study in closed form has in place of a method; `methods()` does not list it."""
CONTESTANTS = "bench.peers:"
"""How names begin that have the form of one's own, but are the suite's code: they need no trust."""
_LONGEST_IDENTITY = 120
Tuning = Literal["published", "tuned", "by_hand", "untuned"]
"""Where the settings of a method come from; by_hand: set without a search, as on the command line."""
_tuned = ContextVar("tuned", default=True)


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
        raise UsageError(
            f"the {kind} '{name}' is not part of this suite: --import {name} runs its code, if you trust it"
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


# ------------------------------------------------------------------------------------ presets, identity


def with_members(entry: Entry, members: int | None) -> Entry:
    """The method as an ensemble of so many members: under the name that stands for it, if there is one."""
    if members is None or members == entry.members:
        return entry
    siblings = [e for e in methods().of_file(entry.file) if e.cls is entry.cls and e.fixed == entry.fixed]
    named = [e for e in siblings if e.members == members]
    named += [e for e in siblings if members > 1 and e.members > 1]
    return replace(named[0] if named else entry, members=members)


def member(method: Entry) -> Entry:
    """The method whose settings an ensemble has: its single member, if that has a name."""
    siblings = methods().of_file(method.file)
    same = [e for e in siblings if (e.cls, e.fixed, e.members) == (method.cls, method.fixed, 1)]
    return same[0] if same else method


def tuned_path(method: str, task: str, root: Path) -> Path:
    """Where the result of tuning a method on a task lies below `root`."""
    return root / _file_safe(task) / f"{_file_safe(method)}.json"


@contextmanager
def untuned() -> Iterator[None]:
    """Inside the block no tuned settings are read: presets and identities are as before any tuning."""
    token = _tuned.set(False)
    try:
        yield
    finally:
        _tuned.reset(token)


def is_untuned() -> bool:
    """Whether no tuned settings are read."""
    return not _tuned.get()


def _pair_presets(method: Entry, task: Entry, tuned: bool) -> dict[str, dict[str, Any]]:
    """Preset -> settings of the method for the task, with the key `provenance`.

    With `tuned`, what tuning chose on the task of this name takes the place of the table of `standard`. An
    ensemble has the settings of its member.
    """
    path = files("bench.runs") / "presets" / f"{task.file}.toml"
    table = tomllib.loads(path.read_text()) if path.is_file() else {}
    name = member(method).name
    if method.fixed and name not in methods() and method.file in methods():  # a name that spells out settings
        name = method.file
    pairs = {preset: table.get(preset, {}).get(name, {}) for preset in PRESETS}
    result = tuned_path(name, task.name, TUNED)
    if tuned and result.is_file():
        try:
            chosen = dict(json.loads(result.read_text())["chosen"])
        except (ValueError, KeyError, TypeError):
            raise UsageError(f"{result} is no result of bench tune: remove it or tune again") from None
        pairs["standard"] = chosen | {"provenance": "tuned"}
    return pairs


def preset_values(method: Entry, task: Entry, preset: str) -> tuple[dict[str, Any], dict[str, Any], Tuning]:
    """What a preset sets: values for the method, values for the task, and where the method's come from.

    Smoke and paper are standard and, on top, what the method says of them on every task and the task's table
    for the method. Paper knows no tuned settings: it has the published ones.

    Returns:
        Method values, task values, and where the method's come from.

    Raises:
        UsageError: If there is no such preset.
    """
    if preset not in PRESETS:
        raise UsageError(f"unknown preset '{preset}': {nearest(preset, list(PRESETS))}")
    pairs = _pair_presets(method, task, _tuned.get() and preset != "paper")
    chosen = {**method.presets.get("standard", {}), **pairs["standard"]}
    if preset != "standard":
        chosen |= {**method.presets.get(preset, {}), **pairs[preset]}
    provenance = chosen.pop("provenance", "untuned")
    return {**chosen, **method.fixed}, {**task.fixed, **task.presets.get(preset, {})}, provenance


def identity(entry: Entry, settings: Any, standard: Any, precision: str = FULL_PRECISION) -> str:
    """The name and every setting that differs from the preset `standard`, as one file-safe string.

    Of a method the floating-point precision of its training stands last, where it is not full.

    Equal strings mean equal settings. One over 120 characters ends in a hash in place of the rest.
    """
    standard_values = asdict(standard)
    differing = {k: v for k, v in asdict(settings).items() if v != standard_values[k]}
    known = methods().get(entry.name)
    if entry.members != (known.members if known else 1):
        differing = {"members": entry.members, **differing}
    if precision != FULL_PRECISION:
        differing = {**differing, "precision": precision}
    text = _file_safe(entry.name)
    if differing:
        text += "+" + ",".join(f"{name}={_safe(value)}" for name, value in differing.items())
    if len(text) > _LONGEST_IDENTITY:
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        text = f"{text[: _LONGEST_IDENTITY - 13]}-{digest}"
    return text


def _safe(value: Any) -> str:
    if isinstance(value, float):
        value += 0.0  # -0.0 equals 0.0, and so has its name
    text = json.dumps(value) if isinstance(value, bool | None) else str(value)
    return re.sub(r"[^A-Za-z0-9._+-]", lambda match: f"~{ord(match[0]):x}~", text)


def _file_safe(name: str) -> str:
    return _safe(name.replace(":", "."))


@dataclass(frozen=True)
class Choice:
    """A method and a task with settings, as a command line or a record names them."""

    method: Entry
    method_settings: Any
    method_identity: str
    task: Entry
    task_settings: Any
    task_identity: str
    preset: str
    tuning: Tuning

    def directory(self, seed: int) -> Path:
        """The run's directory below the folder for runs."""
        return Path(self.task_identity, self.method_identity, f"{self.preset}-seed{seed}")


def choose(
    method_name: str,
    task_name: str,
    preset: str = "standard",
    method_values: Mapping[str, Any] | None = None,
    task_values: Mapping[str, Any] | None = None,
    members: int | None = None,
    precision: str = FULL_PRECISION,
) -> Choice:
    """Resolves names, preset and overrides; settings other than the preset's are set `by_hand`.

    The precision of training is part of the method's identity, and no setting of the method.

    Raises:
        UsageError: If a name, a preset or a value is wrong, the method lacks what the task needs, or a study
            in closed form is to have a method, or any other task none.
    """
    m, t = with_members(method(method_name), members), task(task_name)
    preset_m, preset_t, tuning = preset_values(m, t, preset)
    standard_m, standard_t, _ = preset_values(m, t, "standard")
    for entry, values, flag in ((m, method_values, "method"), (t, task_values, "task")):
        for name in values or {}:
            if name not in entry.flags():
                raise UsageError(
                    f"--{flag}.{name}: {entry.name} has no such setting; {nearest(name, entry.flags())}"
                )
    chosen_m = build(m.cls.settings_class, {**preset_m, **(method_values or {})}, "method")
    chosen_t = build(t.cls.settings_class, {**preset_t, **(task_values or {})}, "task")
    if chosen_m != build(m.cls.settings_class, preset_m, "method"):
        tuning = "by_hand"
    with defects(f"the spec of {t.name}"):
        spec = t.cls(chosen_t).spec
        requires, closed_form = spec.requires, spec.closed_form
    if closed_form and (m.name != NONE or m.members > 1):
        raise UsageError(
            f"{t.name} is a study in closed form, which fits nothing: give METHOD none, without --members"
        )
    if m.name == NONE and not closed_form:
        raise UsageError(f"{t.name} needs a method, none is for studies in closed form: bench list methods")
    lacking = sorted(requires - m.provides)
    if lacking:
        able = [name for name, entry in methods().items() if not requires - entry.provides]
        raise UsageError(
            f"{m.name} cannot run {t.name}: it lacks the capability {', '.join(lacking)}; "
            f"methods that have it: {', '.join(able)}"
        )
    return Choice(
        m,
        chosen_m,
        identity(m, chosen_m, build(m.cls.settings_class, standard_m, "method"), precision),
        t,
        chosen_t,
        identity(t, chosen_t, build(t.cls.settings_class, standard_t, "task")),
        preset,
        tuning,
    )


def under_its_name(choice: Choice, task_values: Mapping[str, Any], precision: str = FULL_PRECISION) -> Choice:
    """The choice under the name that fixes most of what it chose: one posterior has one name.

    `laplace` with the settings that `laplace_last_layer` fixes is `laplace_last_layer`. Settings stay as they
    are. Names that spell out settings (`PATTERN`) are not looked for.

    Args:
        choice: Of a method by the name that was typed.
        task_values: What the choice was given of the task's settings.
        precision: What the choice was given of the precision of training.
    """
    typed, chosen = choice.method, asdict(choice.method_settings)
    narrower = [
        entry
        for entry in methods().of_file(typed.file)
        if entry.cls is typed.cls
        and len(entry.fixed) > len(typed.fixed)
        and all(chosen[name] == value for name, value in entry.fixed.items())
    ]
    if not narrower:
        return choice
    entry = max(narrower, key=lambda entry: len(entry.fixed))
    values = {name: value for name, value in chosen.items() if name in entry.flags()}
    members = typed.members
    return choose(entry.name, choice.task.name, choice.preset, values, task_values, members, precision)
