"""What the suite's tasks measure, and which methods heed the seed, written down: read without torch.

`measures.json` holds the `Spec` of every name of a task under its own settings, once for all names that share
it. `python docs/generate.py` writes it, and a test holds it to the code. Other settings may change which
metrics there are, never what one of them is; a record with metrics that are not written down, and one of a
user's own task, is asked of the task itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from bench.errors import BenchError
from bench.runs import registry
from bench.runs.records import Record
from bench.spec import Metric, Spec

PATH = Path(__file__).parent / "measures.json"
_NUMBERS = {"inf": float("inf"), "-inf": -float("inf")}


def spec_of(record: Record) -> Spec:
    """What the task of a record measures.

    Raises:
        BenchError: If the task is not known here, or is a user's own and has a defect.
    """
    spec = written().get(record.task.name)
    if spec is not None and record.metrics.keys() == spec.metrics.keys():
        return spec
    from bench.runs.runner import task_of

    with registry.defects(f"the spec of {record.task.name}"):
        found: Spec = task_of(record).spec
    return found


def is_standard(record: Record) -> bool:
    """Whether every word of `spec_of` is of the record's own settings."""
    return record.task.identity == record.task.name in written()


def seed_matters(record: Record) -> bool:
    """Whether another seed can change the method's answer; old records leave it to the method."""
    if (stated := record.method.seed_matters) is not None:
        return stated
    if (name := record.method.name) in registry.methods():
        return name not in _content()["seedless"]
    try:
        return bool(registry.method(name).cls.seed_matters)
    except BenchError:
        return True


@cache
def written() -> dict[str, Spec]:
    """Name of a task -> its spec, for all that `measures.json` has."""
    return {name: _spec(part["spec"]) for part in _content()["tasks"] for name in part["names"]}


@cache
def _content() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(PATH.read_bytes())
    return content


def _spec(values: Mapping[str, Any]) -> Spec:
    metrics = {
        name: Metric(description, unit, _NUMBERS.get(best, best), _NUMBERS.get(worst, worst), undefined)
        for name, (description, unit, best, worst, undefined) in values["metrics"].items()
    }
    sets = {name: frozenset(values[name]) for name in ("requires", "self_reported")}
    return Spec(**{**values, "metrics": metrics, **sets})


def made() -> str:
    """The text of `measures.json` by the code; imports every method and task."""
    names: dict[str, list[str]] = {}
    for name, entry in registry.tasks().items():
        spec = entry.cls(registry.build(entry.cls.settings_class, dict(entry.fixed), "task")).spec
        values = asdict(spec) | {
            "metrics": {
                metric: [m.description, m.unit, _number(m.best), _number(m.worst), m.may_be_undefined]
                for metric, m in spec.metrics.items()
            },
            "requires": sorted(spec.requires),
            "self_reported": sorted(spec.self_reported),
        }
        names.setdefault(json.dumps(values), []).append(name)
    tasks = [{"names": of, "spec": json.loads(text)} for text, of in names.items()]
    seedless = [name for name, entry in registry.methods().items() if not entry.cls.seed_matters]
    return json.dumps({"seedless": seedless, "tasks": tasks}, indent=1) + "\n"


def _number(value: float) -> float | str:
    return str(float(value)) if value in _NUMBERS.values() else value
