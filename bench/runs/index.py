"""What `bench list` and the shell's completion show of all names, kept in the user's cache.

It takes the import of every method and every task, and of torch. So it is written down at the first call, and
holds until a source file of the suite changes.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import bench
from bench.errors import OutputError
from bench.runs import registry
from bench.system import places
from bench.system.files import write
from bench.system.source import source_hash

Index = dict[str, Any]
"""Under `methods` and `tasks` a list of what is declared of each name; under `settings` the flags that a name
adds to `bench run`, without their dashes, and under its key `trainer` those that every run has."""


def path() -> Path:
    """The file of this installation."""
    installation = hashlib.sha256(str(bench.__path__[0]).encode()).hexdigest()[:12]
    return places.CACHE_ROOT / f"index-{installation}.json"


def index() -> Index:
    """The index of the present source: read where it is kept, made and kept where it is not.

    A cache that is damaged, or cannot be read or written, costs time and nothing else.
    """
    found = kept()
    if found is None:
        found = _made()
        content = {"seal": _seal(found), "index": found}
        with suppress(OutputError):
            write(path(), json.dumps(content).encode())
    return found


def kept() -> Index | None:
    """The index of the present source if it is kept; needs no torch."""
    try:
        content = json.loads(path().read_bytes())
        found: Index = content["index"]
        return found if content["seal"] == _seal(found) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _seal(found: Index) -> str:
    """A hash of source and content: neither an older index has it nor a damaged one."""
    return hashlib.sha256(f"{source_hash()} {json.dumps(found, sort_keys=True)}".encode()).hexdigest()


def _made() -> Index:
    from bench.contract import CAPABILITIES
    from bench.engine.engine import TrainerOptions

    methods = [
        {
            "name": name,
            "summary": entry.summary,
            "fixed": dict(entry.fixed) | ({"members": entry.members} if entry.members > 1 else {}),
            "declares": entry.declares,
            "capabilities": [capability for capability in CAPABILITIES if capability in entry.provides],
        }
        for name, entry in registry.methods().items()
    ]
    tasks = []
    for name, entry in registry.tasks().items():
        spec = entry.cls(registry.build(entry.cls.settings_class, dict(entry.fixed), "task")).spec
        tasks.append(
            {
                "name": name,
                "question": spec.question,
                "fixed": dict(entry.fixed),
                "main_metric": spec.main_metric,
                "needs": sorted(spec.requires),
                "ranked": spec.ranked,
                "closed_form": spec.closed_form,
            }
        )
    settings = {"trainer": ["trainer", *(f"trainer.{field.name}" for field in fields(TrainerOptions))]}
    settings[registry.NONE] = []
    for kind, known in (("method", registry.methods()), ("task", registry.tasks())):
        for name, entry in known.items():
            flags = [f"{kind}.{flag}" for flag in entry.flags()]
            settings[name] = [kind, *flags] if flags else []
    return {"methods": methods, "tasks": tasks, "settings": settings}
