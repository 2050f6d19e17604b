"""Tuning: as many configurations for one method as for another, chosen on validation data alone.

A method's file says what may be tuned, `SEARCH`: setting -> range. A range is

    (low, high, "log") or (low, high, "linear")    a number between them, a whole one if both ends are
    [first, second, ...]                           one of these

Configuration 0 is what the method is without tuning; each other one is drawn from the seed and its number
alone, so that a larger budget extends a smaller one. The criterion is the metric that the task names as
`Spec.validation_metric`, as the run logged it; a configuration that diverges or fails counts as tried and is
never chosen. What was found lies in `bench/presets/tuned/<task>/<method>.json`, where the preset `standard`
finds it.
"""

from __future__ import annotations

import inspect
import math
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import pydantic
import torch

from bench import randomness, records, registry
from bench.errors import BenchError, UsageError
from bench.files import write, writing
from bench.registry import Entry
from bench.runner import Observer
from bench.settings import build
from bench.sweep import Cell, Outcome, run_cell


class _Part(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class Configuration(_Part):
    """One configuration: the settings that are searched, and the criterion, null unless it completed."""

    number: int
    settings: dict[str, Any]
    status: Literal["completed", "diverged", "failed", "refused"]
    reason: str | None
    value: float | None
    seconds: float
    steps: int


class Criterion(_Part):
    """What was looked at: a metric on validation data."""

    metric: str
    higher_is_better: bool


class Tuning(_Part):
    """What a search tried and chose; `chosen` holds every setting that the method's name leaves open."""

    schema_version: Literal[1]
    method: str
    task: str
    task_version: int
    data_digest: str
    budget: int
    seed: int
    preset: str
    search: dict[str, dict[str, Any]]
    criterion: Criterion
    configurations: list[Configuration]
    chosen_number: int
    chosen: dict[str, Any]
    created: str
    provenance: records.Provenance
    environments: list[records.Environment]


def read(path: Path) -> Tuning:
    """Reads the result of a search.

    Raises:
        UsageError: If there is none.
    """
    try:
        return Tuning.model_validate_json(path.read_bytes())
    except (OSError, pydantic.ValidationError):
        raise UsageError(f"{path} is no result of bench tune: remove it or tune again") from None


# -------------------------------------------------------------------------------------------- search space


def search_space(method: Entry) -> dict[str, Any]:
    """The method's `SEARCH`, without the settings that its name fixes.

    Raises:
        UsageError: If there is none, or a range is none.
    """
    search = {name: range_ for name, range_ in method.search.items() if name not in method.fixed}
    if not search:
        raise UsageError(f"{method.name} cannot be tuned: its file declares no SEARCH")
    for name, range_ in search.items():
        if not _is_range(range_):
            kinds = "(low, high, 'log'), (low, high, 'linear') or a list"
            raise UsageError(f"SEARCH of {method.name}: {name}: {range_}: must be {kinds}")
        for value in range_ if isinstance(range_, list) else range_[:2]:
            try:
                build(method.cls.settings_class, {**method.fixed, name: value}, "method")
            except UsageError as error:
                raise UsageError(f"SEARCH of {method.name}: {error}") from None
    return search


def _is_range(range_: Any) -> bool:
    if isinstance(range_, list):
        return bool(range_)
    if not (isinstance(range_, tuple) and len(range_) == 3 and range_[2] in ("log", "linear")):
        return False
    low, high, scale = range_
    numbers = all(type(end) in (int, float) and math.isfinite(end) for end in (low, high))
    return numbers and low < high and (low > 0 or scale == "linear")


def draw(search: Mapping[str, Any], seed: int, number: int) -> dict[str, Any]:
    """The values of a configuration; numbers that are not whole have three digits."""
    return {name: _drawn(range_, seed, number, name) for name, range_ in search.items()}


def _drawn(range_: Any, seed: int, number: int, name: str) -> Any:
    generator = randomness.generator(seed, "tune", number, name)
    share = torch.rand((), dtype=torch.float64, generator=generator).item()
    if isinstance(range_, list):
        return range_[int(share * len(range_))]
    low, high, scale = range_
    whole = isinstance(low, int) and isinstance(high, int)
    top = high + 1 if whole else high
    value = low * (top / low) ** share if scale == "log" else low + (top - low) * share
    return min(max(int(value) if whole else float(f"{value:.3g}"), low), high)


def _described(range_: Any) -> dict[str, Any]:
    if isinstance(range_, list):
        return {"choices": range_}
    return dict(zip(("low", "high", "scale"), range_, strict=True))


# ------------------------------------------------------------------------------------------------- search


def tune(
    method: str,
    task: str,
    budget: int,
    *,
    seed: int = 0,
    preset: str = "standard",
    out: str | Path = "runs",
    to: str | Path = registry.TUNED,
    data_dir: str | None = None,
    threads: int | None = None,
    force: bool = False,
    watch: Callable[[str], AbstractContextManager[Observer]] = lambda title: nullcontext(lambda *_: None),
) -> Tuning:
    """Runs the configurations of a budget and writes what was found; what `bench tune` does.

    Args:
        method: Name of the method, or `package.module:Class`.
        task: Name of the task, or `package.module:Class`.
        budget: Configurations, the untuned one among them; at least 2.
        seed: Seed of the draws, and of every run.
        preset: standard, or smoke, of which nothing is written.
        out: Folder for runs; those of searches lie in its folder `tuning`, and finished ones are used again.
        to: Folder of results.
        data_dir: Folder with data files.
        threads: CPU threads; None leaves torch's choice.
        force: Run failed configurations and those of another source again; replace any earlier result.
        watch: Given the title of a run, a context whose value observes it.

    Raises:
        UsageError: If this pair cannot be tuned, or an earlier search stands in the way.
        DataError: If the task's data cannot be had.
        BenchError: If no configuration completed.
        OutputError: If the results cannot be written.
    """
    if budget < 2:
        raise UsageError(f"--budget {budget}: must be 2 or more; the first configuration is the untuned one")
    if seed < 0:
        raise UsageError(f"--seed {seed}: must be 0 or more")
    entry = registry.method(method)
    if (member := registry.member(entry)) != entry:
        raise UsageError(f"{method} has the settings of {member.name}: tune that")
    path = registry.tuned_path(method, task, Path(to))
    with registry.untuned():
        start = registry.choose(method, task, preset)
        spec = start.task.cls(start.task_settings).spec
        if spec.validation_metric is None:
            raise UsageError(f"{task} cannot be tuned on: it declares no validation_metric")
        search = search_space(entry)
        described = {name: _described(range_) for name, range_ in search.items()}
        if preset != "smoke" and path.exists() and not force:
            _must_extend(path, budget, seed, described)
        untuned = {k: v for k, v in asdict(start.method_settings).items() if k in entry.flags()}
        drawn = [{k: untuned[k] for k in search}, *(draw(search, seed, n) for n in range(1, budget))]
        cells = [Cell(method, task, seed, preset, None, {**untuned, **values}, {}) for values in drawn]
        now = records.provenance(Path(inspect.getfile(entry.cls)), None)
        folder = Path(out) / "tuning"
        _make_room([folder / cell.choice().directory(seed) for cell in cells], now, force)
        outcomes = []
        for number, cell in enumerate(cells):
            with watch(f"{method} {task}, configuration {number + 1} of {budget}") as observer:
                outcome = run_cell(
                    cell, out=folder, data_dir=data_dir, threads=threads, force=force, observers=(observer,)
                )
            # A method may refuse a problem under some settings; all else concerns every configuration.
            if outcome.refusal and not (outcome.began and isinstance(outcome.refusal, UsageError)):
                raise outcome.refusal
            outcomes.append(outcome)
    done = [outcome.record for outcome in outcomes if outcome.record]
    if any(_is_of_another_source(record, now) for record in done):
        raise UsageError("the source changed during the search; --force runs what is of another source again")
    metric = spec.validation_metric
    tried = [_configuration(n, v, o, metric) for n, (v, o) in enumerate(zip(drawn, outcomes, strict=True))]
    higher = spec.metrics[metric].higher_is_better
    best = _best(tried, higher)
    if best is None:
        raise BenchError(f"none of {budget} configurations of {method} gave {metric} on {task}: see {folder}")
    result = Tuning(
        schema_version=1,
        method=method,
        task=task,
        task_version=spec.version,
        data_digest=done[0].task.data_digest,
        budget=budget,
        seed=seed,
        preset=preset,
        search=described,
        criterion=Criterion(metric=metric, higher_is_better=higher),
        configurations=tried,
        chosen_number=best.number,
        chosen={**untuned, **best.settings},
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        provenance=now,
        environments=list({str(record.environment): record.environment for record in done}.values()),
    )
    if preset != "smoke":
        write(path, (result.model_dump_json(indent=2) + "\n").encode())
    return result


def unequal_budgets(method: str, task: str, budget: int, to: Path) -> str | None:
    """One line if another method has another budget on the task; None if all are equal."""
    own = registry.tuned_path(method, task, to)
    others = [read(path) for path in sorted(own.parent.glob("*.json")) if path != own]
    different = [f"{other.method} {other.budget}" for other in others if other.budget != budget]
    if not different:
        return None
    return f"unequal budgets on {task} cannot be compared: {method} {budget}, {', '.join(different)}"


# -------------------------------------------------------------------------------------------------- parts


def _must_extend(path: Path, budget: int, seed: int, search: dict[str, Any]) -> None:
    """Refuses to lose an earlier result: a new one must try all that it tried."""
    old = read(path)
    if (old.seed, old.search) != (seed, search) or old.budget > budget:
        raise UsageError(
            f"{path} holds a search of {old.budget} configurations with seed {old.seed}, "
            "and this one does not extend it; --force replaces it"
        )


def _is_of_another_source(record: records.Record, now: records.Provenance) -> bool:
    then = record.provenance
    return (then.source_hash, then.method_file_hash) != (now.source_hash, now.method_file_hash)


def _make_room(directories: list[Path], now: records.Provenance, force: bool) -> None:
    """Removes finished runs of another source, or refuses them: one search has one source."""
    for directory in directories:
        if (directory / "record.json").exists() and _is_of_another_source(
            records.read_record(directory), now
        ):
            if not force:
                raise UsageError(f"{directory} holds a run of another source; --force replaces such runs")
            with writing(directory):
                shutil.rmtree(directory)


def _configuration(number: int, values: dict[str, Any], outcome: Outcome, metric: str) -> Configuration:
    record = outcome.record
    return Configuration(
        number=number,
        settings=values,
        status=outcome.status,  # type: ignore[arg-type]
        reason=str(outcome.refusal) if record is None else record.reason,
        value=record.validation.get(metric) if record and record.status == "completed" else None,
        seconds=record.seconds if record else 0.0,
        steps=sum(fit.steps for fit in record.fits) if record else 0,
    )


def _best(tried: list[Configuration], higher_is_better: bool) -> Configuration | None:
    """The configuration with the best criterion, of equal ones the first; None if none has one."""
    completed = [(c.value if higher_is_better else -c.value, c) for c in tried if c.value is not None]
    return max(completed, key=lambda pair: pair[0])[1] if completed else None
