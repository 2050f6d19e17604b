"""Tuning: as many configurations for one method as for another, chosen on validation data alone.

A method's file says what may be tuned, `SEARCH`: setting -> range. A range is

    (low, high, "log") or (low, high, "linear")    a number between them, a whole one if both ends are
    [first, second, ...]                           one of these

Configuration 0 is what the method is without tuning; each other one is drawn from the seed and its number
alone, so that a larger budget extends a smaller one. The criterion is the metric that the task names as
`Spec.validation_metric`, as the run logged it; a configuration that diverges or fails counts as tried and is
never chosen. The best three are run with two further seeds, so that luck does not choose. What was found lies
in `bench/runs/presets/tuned/<task>/<method>.json`, where the preset `standard` finds it.

A search may choose by a metric of the task instead (`criterion`). It looks at the test data, or at a
reference, and finds what the method can do, not what a user would choose. Only a task that says so
(`Task.tuned_by`) has that as its criterion. A search by another criterion than the task's lies in
`tuned_otherwise/`, where no preset looks.
"""

from __future__ import annotations

import inspect
import math
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any, Literal

import pydantic
import torch

from bench import randomness
from bench.contract import Spec
from bench.errors import BenchError, DataError, UsageError
from bench.runs import records, registry, resolution
from bench.runs.plan import Plan
from bench.runs.registry import Entry
from bench.runs.resolution import resolve
from bench.runs.runner import Observer
from bench.settings import Schema, build
from bench.sweep.sweep import Outcome, run_cell
from bench.system.files import write, writing

FINALISTS = 3
"""Configurations, the best by the search's seed, that are run with further seeds."""
SEEDS = 3
"""Seeds that a finalist is run with, that of the search among them."""
OTHERWISE = resolution.TUNED.parent / "tuned_otherwise"
"""Where the results of searches lie that chose by another criterion than their task's."""


class Configuration(Schema):
    """One configuration: the settings that are searched, and the criterion, null unless it completed.

    Attributes:
        value: The criterion under the search's seed.
        others: Of a finalist: the criterion under the following seeds.
    """

    number: int
    settings: dict[str, Any]
    status: Literal["completed", "diverged", "failed", "refused"]
    reason: str | None
    value: float | None
    others: list[float | None] = []
    seconds: float
    steps: int


class Criterion(Schema):
    """What was looked at: a metric on validation data, or, where a search was asked for it, on test data."""

    metric: str
    higher_is_better: bool
    on: Literal["validation", "test"] = "validation"

    def of(self, record: records.Record | None) -> float | None:
        """The value of a run; None unless it completed with one."""
        if record is None or record.status != "completed":
            return None
        value = (record.validation if self.on == "validation" else record.metrics).get(self.metric)
        return value if isinstance(value, float) else None


class Sampler(Schema):
    """Who draws the configurations.

    Attributes:
        name: random, each from the seed and its number alone, or `bench.sweep.tpe`, given those of
            earlier rounds.
        round: Of tpe, how many configurations are drawn, and may be run, at a time.
    """

    name: Literal["random", "tpe"] = "random"
    round: int = 1


class Tuning(Schema):
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
    sampler: Sampler = Sampler()
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
    return _rounded(range_, int(value) if whole else value)


def _rounded(range_: Any, value: Any) -> Any:
    """A value as configurations have it: of a number that is not whole three digits, in its range."""
    if isinstance(range_, list):
        return value
    return min(max(float(f"{value:.3g}") if isinstance(value, float) else value, range_[0]), range_[1])


def _described(range_: Any) -> dict[str, Any]:
    if isinstance(range_, list):
        return {"choices": range_}
    return dict(zip(("low", "high", "scale"), range_, strict=True))


# ------------------------------------------------------------------------------------------------- search


Watch = Callable[[str], AbstractContextManager[Observer]]
"""Given the title of a run, a context whose value observes the run."""


RunCells = Callable[[list[Plan]], list[Outcome]]
"""Runs cells anywhere, and gives their outcomes in the same order."""


def tune(
    plan: Plan,
    budget: int,
    to: Path = resolution.TUNED,
    watch: Watch = lambda title: nullcontext(lambda *_: None),
    sampler: Sampler | None = None,
    run: RunCells | None = None,
    criterion: str | None = None,
) -> Tuning:
    """Runs the configurations of a budget and writes what was found; what `bench tune` does.

    Args:
        plan: Method, task and preset (standard, or smoke, of which nothing is written), the seed of the draws
            and of every run, and how to run; no members, and no settings but those of a task on a user's own
            data. Runs lie in the folder `tuning` of its `out`, and finished ones are used again; `force` runs
            failed configurations and those of another source again, and replaces any earlier result.
        budget: Configurations, the untuned one among them; at least 2.
        to: Folder of results.
        watch: Observes the runs that this process makes.
        sampler: Who draws the configurations; the random search unless given.
        run: Runs the cells in place of this process.
        criterion: validation, or a metric of the task; None is the task's own.

    Raises:
        UsageError: If this pair cannot be tuned, or an earlier search stands in the way.
        DataError: If the task's data cannot be had.
        BenchError: If no configuration completed.
        OutputError: If the results cannot be written.
    """
    if budget < 2:
        raise UsageError(f"--budget {budget}: must be 2 or more; the first configuration is the untuned one")
    sampler = sampler or Sampler()
    first = budget if sampler.name == "random" else min(budget, _tpe().STARTUP)
    with resolution.untuned():
        search = _search(plan, first, criterion)
        path = result_path(plan, to)
        if plan.preset != "smoke" and path.exists() and not plan.force:
            _must_extend(path, budget, plan.seed, search.described, sampler)
        now = records.provenance(search.method_file, None)

        def made(cells: list[Plan], titles: list[str]) -> list[Outcome]:
            _make_room([cell.out / resolve(cell).directory(cell.seed) for cell in cells], now, plan.force)
            return _decided(run(cells)) if run else _run_all(cells, watch, titles)

        outcomes: list[Outcome] = []
        while True:
            numbers = range(len(outcomes), len(search.cells))
            titles = [f"configuration {number} of 0 to {budget - 1}" for number in numbers]
            outcomes += made(search.cells[len(outcomes) :], titles)
            if len(outcomes) == budget:
                break
            _extend(search, plan, outcomes, min(sampler.round, budget - len(outcomes)))
        finals = _finals(plan, search, outcomes)
        titles = [f"run {n} of {len(finals)} of the best, seed {c.seed}" for n, c in enumerate(finals, 1)]
        last = made(finals, titles)
    result = _chosen(plan, search, outcomes, last, now, sampler)
    if plan.preset != "smoke":
        write(path, (result.model_dump_json(indent=2) + "\n").encode())
    return result


def criterion_of(task: str) -> str:
    """What searches on a task choose by: validation, or one of its metrics."""
    return str(registry.task(task).cls.tuned_by)


def result_path(plan: Plan, to: Path) -> Path:
    """Where the result of a search lies.

    Args:
        plan: Of the search. On own data the result is of these data alone: it lies in the folder `tuned` of
            its `out`, under the settings of the task, and no preset reads it.
        to: Folder of results of all other tasks.
    """
    if not _is_own(plan):
        return resolution.tuned_path(plan.method, plan.task, to)
    return resolution.tuned_path(plan.method, resolve(plan).task_identity, plan.out / "tuned")


def _is_own(plan: Plan) -> bool:
    """Whether a search is on a user's own data."""
    found = resolve(plan)
    spec: Spec = found.task.cls(found.task_settings).spec
    return spec.own_data


def no_gain(result: Tuning) -> str | None:
    """One line if the choice is not better than the untuned settings by the means over seeds; else None.

    The untuned ones have further seeds only if they were among the best of the search's own.
    """
    untuned, chosen = result.configurations[0], result.configurations[result.chosen_number]
    if untuned.value is None or chosen is untuned:
        return None
    before, after = _given(untuned), _given(chosen)
    gain = fmean(after) - fmean(before)
    if gain > 0 if result.criterion.higher_is_better else gain < 0:
        return None
    return (
        f"no gain is seen: {result.criterion.metric} is {fmean(after):.4g} by {_seeds(after)} in the chosen "
        f"settings, and {fmean(before):.4g} by {_seeds(before)} in the untuned ones, number 0"
    )


def _seeds(values: list[float]) -> str:
    return f"{len(values)} seed{'s' if len(values) > 1 else ''}"


def unequal_budgets(plan: Plan, budget: int, to: Path) -> str | None:
    """One line if another method has another budget on the task of a search; None if all are equal."""
    own, method, task = result_path(plan, to), plan.method, plan.task
    others = [read(path) for path in sorted(own.parent.glob("*.json")) if path != own]
    different = [f"{other.method} {other.budget}" for other in others if other.budget != budget]
    if not different:
        return None
    return f"unequal budgets on {task} cannot be compared: {method} {budget}, {', '.join(different)}"


# -------------------------------------------------------------------------------------------------- parts


@dataclass(frozen=True)
class _Search:
    """What is tried: a plan for every configuration, and the values in which they differ.

    `open_settings` are all that the method's name leaves open, as they are without tuning; `described` is the
    search space as the result keeps it.
    """

    method_file: Path
    spec: Spec
    criterion: Criterion
    open_settings: dict[str, Any]
    space: dict[str, Any]
    described: dict[str, dict[str, Any]]
    drawn: list[dict[str, Any]]
    cells: list[Plan]


def _search(plan: Plan, budget: int, criterion: str | None) -> _Search:
    """The configurations of a budget.

    Raises:
        UsageError: If the method cannot be tuned, or not on the task.
    """
    registry.import_own(
        plan.method, plan.task
    )  # as `resolve` does: the plan's names are those that were typed
    criterion = criterion or criterion_of(plan.task)
    on_validation = criterion == "validation"
    tuned_with = registry.task(plan.task).cls.tuned_with if on_validation else {}
    if plan.method_settings or (plan.task_settings and not _is_own(plan)) or plan.members is not None:
        raise UsageError("a search chooses the settings itself: give it none, and no members")
    plan = replace(plan, task_settings={**tuned_with, **plan.task_settings})
    start = resolve(plan)
    entry = registry.method(plan.method)
    if (member := entry.member) != entry:
        raise UsageError(f"{plan.method} has the settings of {member.name}: tune that")
    spec = start.task.cls(start.task_settings).spec
    if not on_validation and criterion not in spec.metrics:
        raise UsageError(f"{plan.task} has no metric {criterion}: it has {', '.join(spec.metrics)}")
    if (metric := spec.validation_metric if on_validation else criterion) is None:
        raise UsageError(f"{plan.task} cannot be tuned on: it declares no validation_metric")
    space = search_space(entry)
    untuned = {k: v for k, v in asdict(start.method_settings).items() if k in entry.flags()}
    drawn = [{k: untuned[k] for k in space}, *(draw(space, plan.seed, n) for n in range(1, budget))]
    folder = plan.out / "tuning"
    return _Search(
        method_file=Path(inspect.getfile(entry.cls)),
        spec=spec,
        criterion=Criterion(
            metric=metric,
            higher_is_better=spec.metrics[metric].higher_is_better,
            on="validation" if on_validation else "test",
        ),
        open_settings=untuned,
        space=space,
        described={name: _described(range_) for name, range_ in space.items()},
        drawn=drawn,
        cells=[replace(plan, out=folder, method_settings={**untuned, **values}) for values in drawn],
    )


def _extend(search: _Search, plan: Plan, outcomes: list[Outcome], number: int) -> None:
    """Adds a round of configurations, given what became of the earlier ones."""
    higher = search.criterion.higher_is_better
    pairs = zip(search.drawn, outcomes, strict=True)
    tried = [(values, search.criterion.of(outcome.record)) for values, outcome in pairs]
    for values in _tpe().suggested(search.space, tried, number, plan.seed, higher):
        rounded = {name: _rounded(search.space[name], value) for name, value in values.items()}
        search.drawn.append(rounded)
        settings = {**search.open_settings, **rounded}
        search.cells.append(replace(search.cells[0], method_settings=settings))


def _tpe() -> ModuleType:
    try:
        from bench.sweep import tpe
    except ImportError:
        raise UsageError("--search tpe needs optuna: pip install 'posterior-bench[tune]'") from None
    return tpe


def _run_all(cells: list[Plan], watch: Watch, titles: list[str]) -> list[Outcome]:
    outcomes = []
    for cell, title in zip(cells, titles, strict=True):
        with watch(f"{cell.method} {cell.task}, {title}") as observer:
            outcome = run_cell(cell, (observer,))
            observer("end", {"status": outcome.status})
        outcomes += _decided([outcome])
    return outcomes


def _decided(outcomes: list[Outcome]) -> list[Outcome]:
    """Outcomes of which each concerns its configuration; raises a refusal that concerns every configuration.

    A method may refuse a problem under some settings, and a process may die of some.
    """
    for outcome in outcomes:
        if isinstance(outcome.refusal, DataError) or (outcome.status == "refused" and not outcome.began):
            assert outcome.refusal is not None
            raise outcome.refusal
    return outcomes


def _finals(plan: Plan, search: _Search, outcomes: list[Outcome]) -> list[Plan]:
    """The finalists' plans under further seeds: all seeds of the first, then of the second."""
    tried = _tried(search, outcomes, [])
    best = sorted(_finalists(tried, search.criterion.higher_is_better), key=lambda c: c.number)
    seeds = range(plan.seed + 1, plan.seed + SEEDS)
    return [replace(search.cells[c.number], seed=seed) for c in best for seed in seeds]


def _tried(search: _Search, outcomes: list[Outcome], last: list[Outcome]) -> list[Configuration]:
    """Every configuration, and what became of it; finalists with the outcomes of further seeds."""
    criterion = search.criterion
    pairs = zip(search.drawn, outcomes, strict=True)
    tried = [_configuration(n, values, outcome, criterion) for n, (values, outcome) in enumerate(pairs)]
    if last:
        finalists = {c.number for c in _finalists(tried, criterion.higher_is_better)}
        for place, number in enumerate(sorted(finalists)):
            of_seeds = last[place * (SEEDS - 1) : (place + 1) * (SEEDS - 1)]
            others = [_configuration(number, {}, outcome, criterion) for outcome in of_seeds]
            tried[number] = tried[number].model_copy(
                update={
                    "others": [each.value for each in others],
                    "seconds": tried[number].seconds + sum(each.seconds for each in others),
                    "steps": tried[number].steps + sum(each.steps for each in others),
                }
            )
    return tried


def _chosen(
    plan: Plan,
    search: _Search,
    outcomes: list[Outcome],
    last: list[Outcome],
    now: records.Provenance,
    sampler: Sampler,
) -> Tuning:
    """The result of a search; raises BenchError if no configuration gave the criterion, or sources differ."""
    if any(_is_of_another_source(o.record, now) for o in [*outcomes, *last] if o.record):
        raise UsageError("the source changed during the search; --force runs what is of another source again")
    criterion, budget = search.criterion, len(outcomes)
    tried = _tried(search, outcomes, last)
    best = _best(tried, criterion.higher_is_better)
    if best is None:
        raise BenchError(
            f"none of {budget} configurations of {plan.method} gave {criterion.metric} on {plan.task}: "
            f"see {plan.out / 'tuning'}"
        )
    done = [outcome.record for outcome in [*outcomes, *last] if outcome.record]
    return Tuning(
        schema_version=1,
        method=plan.method,
        task=plan.task,
        task_version=search.spec.version,
        data_digest=done[0].task.data_digest,
        budget=budget,
        seed=plan.seed,
        preset=plan.preset,
        search=search.described,
        sampler=sampler,
        criterion=criterion,
        configurations=tried,
        chosen_number=best.number,
        chosen={**search.open_settings, **best.settings},
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        provenance=now,
        environments=list({str(record.environment): record.environment for record in done}.values()),
    )


def _must_extend(path: Path, budget: int, seed: int, search: dict[str, Any], sampler: Sampler) -> None:
    """Refuses to lose an earlier result: a new one must try all that it tried."""
    old = read(path)
    if (old.seed, old.search, old.sampler) != (seed, search, sampler) or old.budget > budget:
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


def _configuration(
    number: int, values: dict[str, Any], outcome: Outcome, criterion: Criterion
) -> Configuration:
    record = outcome.record
    return Configuration(
        number=number,
        settings=values,
        status=outcome.status,
        reason=str(outcome.refusal) if record is None else record.reason,
        value=criterion.of(record),
        seconds=record.seconds if record else 0.0,
        steps=sum(fit.steps for fit in record.fits) if record else 0,
    )


def _finalists(tried: list[Configuration], higher_is_better: bool) -> list[Configuration]:
    """The best configurations by the seed of the search, best first; of equal ones the first."""
    sign = -1 if higher_is_better else 1
    completed = [(sign * c.value, c.number) for c in tried if c.value is not None]
    return [tried[number] for _, number in sorted(completed)[:FINALISTS]]


def _best(tried: list[Configuration], higher_is_better: bool) -> Configuration | None:
    """The finalist with the best mean over its seeds, of equal ones the first; None if there is none.

    One that gave nothing under a seed comes after those that gave something under every seed.
    """

    def rank(finalist: Configuration) -> tuple[int, float, int]:
        given = _given(finalist)
        lost, mean = 1 + len(finalist.others) - len(given), fmean(given)
        return lost, -mean if higher_is_better else mean, finalist.number

    return min(_finalists(tried, higher_is_better), key=rank, default=None)


def _given(configuration: Configuration) -> list[float]:
    """The criterion under every seed that gave it."""
    return [value for value in (configuration.value, *configuration.others) if value is not None]
