"""What is made of a plan before it runs, and whether the run that it asks for is there already."""

from __future__ import annotations

import inspect
import json
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from bench.contract import Task
from bench.engine.engine import Engine, TrainerOptions
from bench.errors import UsageError
from bench.runs import holdings, records, registry
from bench.runs.plan import Plan
from bench.runs.resolution import Choice, resolve

_DECIDING = {name: value for name, value in asdict(TrainerOptions()).items() if name != "workers"}
"""The trainer's options, as they are unless given, but for that on which no number depends."""


@dataclass(frozen=True)
class Setup:
    """A plan and what was made of it.

    Attributes:
        digest: Of the task's data.
        method_file: The file that defines the method.
        task_file: The file that defines the task; None if there is none, as of a class typed into a notebook.
        fingerprint: Everything that must be equal for an unfinished run to go on, as JSON gives it back.
    """

    plan: Plan
    choice: Choice
    protocol: Task
    digest: str
    engine: Engine
    directory: Path
    method_file: Path
    task_file: Path | None
    fingerprint: dict[str, Any]

    @property
    def command(self) -> str:
        """The command line that makes the run again.

        What torch and Lightning chose themselves is part of it: the numbers of threads and of processes.
        """
        return self.plan.command(torch.get_num_threads(), self.engine.place.local_world)

    @cached_property
    def made(self) -> records.Record | None:
        """The record of this very run, if it is there and is not to be made again; looked for once.

        The number of threads may be another where nobody asked for one, and the suite's source where the
        files of method and task are the same.

        Raises:
            UsageError: If another run is there, or a damaged one.
        """
        if self.plan.force or not (self.directory / "record.json").exists():
            return None
        record = records.read_record(self.directory)
        if record.status == "failed":
            return None
        holdings.check(self.directory)
        method, task, provenance = record.method, record.task, record.provenance
        then = {
            "method": method.settings | {"members": method.members},
            "task": task.settings,
            "seed": record.seed,
            "data": task.data_digest,
            "threads": record.environment.threads,
            "trainer": {name: record.trainer.get(name, usual) for name, usual in _DECIDING.items()},
            "source": provenance.source_hash,
            "method_file": provenance.method_file_hash,
            "task_file": provenance.task_file_hash,
        }
        free = {"source"} | ({"threads"} if self.plan.threads is None else set())
        free |= {"task_file"} if then["task_file"] is None else set()  # a record from before it was kept
        now = self.fingerprint
        if differing := ", ".join(name for name in now if name not in free and now[name] != then[name]):
            raise UsageError(
                f"{self.directory} holds a {record.status} run with another {differing}: it is kept; "
                "--force replaces it"
            )
        return record


def set_up(plan: Plan) -> Setup:
    """Makes task and engine of a plan; whatever can be refused without a run is refused here."""
    choice = resolve(plan)
    directory = plan.out / choice.directory(plan.seed)
    with registry.defects(f"the task '{plan.task}'"):
        protocol: Task = choice.task.cls(choice.task_settings, plan.data_dir)
        digest = protocol.data_digest()
    if plan.threads is not None:
        torch.set_num_threads(plan.threads)
    engine = Engine(
        choice.method.cls,
        choice.method_settings,
        plan.seed,
        directory / "checkpoints",
        choice.trainer,
        choice.method.members,
    )
    method_file = _file(choice.method.cls)
    if method_file is None:
        raise UsageError(f"the method '{plan.method}' stands in no file: its source is part of the record")
    task_file = _file(choice.task.cls)
    with registry.defects(f"the settings of '{plan.method}' and '{plan.task}'"):  # JSON may not know a value
        fingerprint = json.dumps(
            {
                "method": asdict(choice.method_settings) | {"members": choice.method.members},
                "task": asdict(choice.task_settings),
                "seed": plan.seed,
                "data": digest,
                "threads": torch.get_num_threads(),
                "trainer": {name: getattr(choice.trainer, name) for name in _DECIDING},
                "source": records.source_hash(),
                "method_file": records.file_hash(method_file),
                "task_file": None if task_file is None else records.file_hash(task_file),
            }
        )
    return Setup(
        plan, choice, protocol, digest, engine, directory, method_file, task_file, json.loads(fingerprint)
    )


def _file(cls: type) -> Path | None:
    try:
        return Path(inspect.getfile(cls))
    except (OSError, TypeError):
        return None
