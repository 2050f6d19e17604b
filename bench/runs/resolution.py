"""What a plan asks for: its classes, all their settings, and the identities under which the run is known.

`resolve` puts together, from the weakest to the strongest, a class's defaults, the preset's values and what
the plan says.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from bench.errors import UsageError
from bench.runs import registry
from bench.runs.plan import PRESETS, Plan, known_preset
from bench.runs.registry import Entry, nearest
from bench.settings import build, code_in

if TYPE_CHECKING:
    from bench.engine.trainer import TrainerOptions

PRESET_FILES = Path(__file__).parent / "presets"
"""Folder of what files of tasks say of methods: `<file>.toml`."""
TUNED = PRESET_FILES / "tuned"
"""Folder of what `bench tune` found: `<task>/<method>.json`."""
FULL_PRECISION = "32-true"
"""What identities take for granted: Lightning's name for training in float32 throughout."""
_LONGEST_IDENTITY = 120
Tuning = Literal["published", "tuned", "by_hand", "untuned"]
"""Where the settings of a method come from; by_hand: set without a search, as on the command line."""
_tuned = ContextVar("tuned", default=True)


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


@cache
def _tables(path: Path) -> dict[str, Any]:
    """A task's file of presets; read once, since a board resolves thousands of runs."""
    return tomllib.loads(path.read_text()) if path.is_file() else {}


def _pair_presets(method: Entry, task: Entry, tuned: bool) -> dict[str, dict[str, Any]]:
    """Preset -> settings of the method for the task, with the key `provenance`.

    With `tuned`, what tuning chose on the task of this name takes the place of the table of `standard`. An
    ensemble has the settings of its member.
    """
    table = _tables(PRESET_FILES / f"{task.file}.toml")
    known, name = registry.methods(), method.member.name
    if method.fixed and name not in known and method.file in known:  # a name that spells out settings
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
    known_preset(preset)
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
    known = registry.methods().get(entry.name)
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
    """What is run: a method and a task with all their settings, and how the method is trained."""

    method: Entry
    method_settings: Any
    method_identity: str
    task: Entry
    task_settings: Any
    task_identity: str
    preset: str
    tuning: Tuning
    trainer: TrainerOptions

    def directory(self, seed: int) -> Path:
        """The run's directory below the folder for runs."""
        return Path(self.task_identity, self.method_identity, f"{self.preset}-seed{seed}")


def resolve(plan: Plan, is_typed: bool = True) -> Choice:
    """What a plan asks for, under the name that fixes most of it: one posterior has one name.

    `laplace` with the settings that `laplace_last_layer` fixes is `laplace_last_layer`. Settings other than
    the preset's are set `by_hand`. The precision of training is part of the method's identity, no setting.

    Args:
        plan: What was typed, or what a record holds.
        is_typed: False for a record's plan. The code that names of the form `package.module:name` stand for
            is run where a user typed them, and never because a record holds them; and a record keeps the name
            that it was made under, be there a narrower one by now.

    Raises:
        UsageError: If a name, a preset or a value is wrong, the method lacks what the task needs, or a study
            in closed form is to have a method, or any other task none.
    """
    from bench.engine.trainer import TrainerOptions  # here, since it needs torch

    if is_typed:
        registry.import_own(plan.method, plan.task)
    method = registry.with_members(registry.method(plan.method), plan.members)
    task = registry.task(plan.task)
    for entry, values, flag in ((method, plan.method_settings, "method"), (task, plan.task_settings, "task")):
        if unknown := [name for name in values if name not in entry.flags()]:
            near = nearest(unknown[0], entry.flags())
            raise UsageError(f"--{flag}.{unknown[0]}: {entry.name} has no such setting; {near}")
    preset, standard = (_preset_settings(method, task, name) for name in (plan.preset, "standard"))
    settings = build(method.cls.settings_class, {**preset.method_values, **plan.method_settings}, "method")
    task_settings = build(task.cls.settings_class, {**preset.task_values, **plan.task_settings}, "task")
    trainer, own_code = build(TrainerOptions, dict(plan.trainer), "trainer"), code_in(task_settings)
    if is_typed:
        registry.import_own(*own_code)
    named = registry.narrowest(method, asdict(settings)) if is_typed else method
    _refuse_unfit(method, task, task_settings)
    if named is not method:
        preset, standard = (_preset_settings(named, task, name) for name in (plan.preset, "standard"))
    return Choice(
        named,
        settings,
        identity(named, settings, standard.method, trainer.precision),
        task,
        task_settings,
        identity(task, task_settings, standard.task),
        plan.preset,
        preset.tuning if settings == preset.method else "by_hand",
        trainer,
    )


class _Preset(NamedTuple):
    """What a preset says of a method on a task, and the settings that follow where nothing else is said."""

    method_values: dict[str, Any]
    task_values: dict[str, Any]
    method: Any
    task: Any
    tuning: Tuning


def _preset_settings(method: Entry, task: Entry, preset: str) -> _Preset:
    of_method, of_task, tuning = preset_values(method, task, preset)
    settings = build(method.cls.settings_class, of_method, "method")
    return _Preset(of_method, of_task, settings, build(task.cls.settings_class, of_task, "task"), tuning)


def _refuse_unfit(method: Entry, task: Entry, settings: Any) -> None:
    """Refuses a method that lacks what a task with these settings needs."""
    with registry.defects(f"the spec of {task.name}"):
        spec = task.cls(settings).spec
        requires, closed_form = spec.requires, spec.closed_form
    if closed_form and (method.name != registry.NONE or method.members > 1):
        raise UsageError(
            f"{task.name} is a study in closed form, which fits nothing: give METHOD none, without --members"
        )
    if method.name == registry.NONE and not closed_form:
        raise UsageError(
            f"{task.name} needs a method, none is for studies in closed form: bench list methods"
        )
    if lacking := sorted(requires - method.provides):
        able = [name for name, entry in registry.methods().items() if not requires - entry.provides]
        raise UsageError(
            f"{method.name} cannot run {task.name}: it lacks the capability {', '.join(lacking)}; "
            f"methods that have it: {', '.join(able)}"
        )
