"""One method or task held to all laws: an answer for each, as `bench check` prints them."""

from __future__ import annotations

import inspect
import linecache
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from bench.contract import Task
from bench.errors import DataError
from bench.laws import problems, statements, tasks, truth
from bench.laws.cases import case_of, cases
from bench.laws.law import Law, many
from bench.laws.methods import LAWS
from bench.runs import records, registry, runner
from bench.runs.plan import Plan
from bench.runs.registry import Entry
from bench.text import one_line


@dataclass(frozen=True)
class Answer:
    """What came of a law.

    Attributes:
        law: Its name.
        outcome: What came of it.
        why: Empty if it holds; else why it does not, or why it is not for this method or task.
        seconds: What it took.
    """

    law: str
    outcome: Literal["ok", "failed", "not applicable"]
    why: str
    seconds: float


def names_of(entry: Entry) -> list[str]:
    """The laws that the method or task is held to, in order."""
    if issubclass(entry.cls, registry.base_of("method")):
        return ["infers_something", "what_it_declares_holds", *LAWS]
    of_tasks = (*tasks.OF_WORDS, *tasks.OF_RUNS, *tasks.OF_RECORDS, truth.held_out_truth_is_only_scored)
    return [law.__name__ for law in of_tasks]


def check(entry: Entry) -> Iterator[Answer]:
    """The answers of all laws, one after another."""
    is_method = issubclass(entry.cls, registry.base_of("method"))
    yield from _of_method(entry) if is_method else _of_task(entry)


def _answer(name: str, entry: Entry, held: Callable[[], str]) -> Answer:
    """The answer of a law, by a function that gives a reason where the law is not for this entry."""
    began = time.monotonic()
    try:
        reason = held()
    except DataError as error:
        return Answer(name, "not applicable", one_line(error), time.monotonic() - began)
    except Exception as error:
        return Answer(name, "failed", _why(error, entry), time.monotonic() - began)
    return Answer(name, "not applicable" if reason else "ok", reason, time.monotonic() - began)


def _why(error: Exception, entry: Entry) -> str:
    """Why a law does not hold: its words, else the expression that is false; of a defect, where it lies."""
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, AssertionError):
        said = one_line(error) or linecache.getline(frames[-1].filename, frames[-1].lineno or 0).strip()
        return said.removeprefix("assert ")
    own = [frame for frame in frames if frame.filename == inspect.getfile(entry.cls)]
    last = (own or frames)[-1]
    return f"{type(error).__name__}: {one_line(error)} ({Path(last.filename).name}, line {last.lineno})"


# ----------------------------------------------------------------------------------------------- of methods


def _of_method(entry: Entry) -> Iterator[Answer]:
    yield _answer("infers_something", entry, lambda: _infers_something(entry))
    yield _answer("what_it_declares_holds", entry, lambda: _declared(entry))
    for name, law in LAWS.items():
        yield _answer(name, entry, lambda law=law: _held(law, entry))  # type: ignore[misc]


def _infers_something(entry: Entry) -> str:
    """Whether one problem at least is not refused."""
    if not cases(entry, tuple(problems.PROBLEMS)):
        raise AssertionError(f"refuses every problem: {case_of(entry, 'mlp').refusal()}")
    return ""


def _declared(entry: Entry) -> str:
    """Holds a method to its own statement; gives the reason where no law is of that."""
    return many(entry) or statements.hold(case_of(entry, "linear"))


def _held(law: Law, entry: Entry) -> str:
    """Holds a method to a law on every problem; gives the reason where it is not for this method."""
    if reason := law.is_not_for(entry):
        return reason
    found = cases(entry, law.problems)
    if not found:
        return f"refuses its problem: {case_of(entry, law.problems[0]).refusal()}"
    for problem, case in found.items():
        for more in law.each:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    law.holds(case, *[Path(folder)] * law.leaves_files, *more)
                except Exception as error:
                    raise AssertionError(f"on {problem}: {_why(error, entry)}") from error
    return ""


# ------------------------------------------------------------------------------------------------- of tasks


@dataclass
class _Run:
    """A run of a task under the preset smoke, made when it is first asked for."""

    entry: Entry
    folder: Path

    @cached_property
    def task(self) -> Task:
        """The task."""
        values = {**self.entry.fixed, **self.entry.presets.get("smoke", {})}
        return self.entry.cls(registry.build(self.entry.cls.settings_class, values, "task"))

    @cached_property
    def directory(self) -> Path:
        """Where the run is."""
        spec = self.task.spec
        able = (registry.method(name) for name in ("radial", "map", "mfvi", *registry.methods()))
        method = (
            registry.NONE
            if spec.closed_form
            else next(each.name for each in able if spec.requires <= each.provides)
        )
        plan = Plan(method=method, task=self.entry.name, preset="smoke", out=self.folder)
        return runner.execute(plan, ()).directory


def _of_task(entry: Entry) -> Iterator[Answer]:
    with tempfile.TemporaryDirectory() as folder:
        run = _Run(entry, Path(folder))

        def of_words(law: Callable[[Task], None]) -> str:
            law(run.task)
            return ""

        def of_runs(law: Callable[..., None]) -> str:
            law(*runner.load_scores(run.directory))
            return ""

        def of_records(law: Callable[..., None]) -> str:
            law(run.task, records.read_record(run.directory))
            return ""

        def of_truth(law: Callable[[Entry], None]) -> str:
            law(entry)
            return ""

        held: list[tuple[Any, Callable[..., str]]] = [(law, of_words) for law in tasks.OF_WORDS]
        held += [(law, of_runs) for law in tasks.OF_RUNS]
        held += [(law, of_records) for law in tasks.OF_RECORDS]
        for law, hold in [*held, (truth.held_out_truth_is_only_scored, of_truth)]:
            yield _answer(law.__name__, entry, lambda law=law, hold=hold: hold(law))  # type: ignore[misc]
