"""Distance to the exact posterior: of every method, of other libraries, by the width of the network."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from parts.evidence import (
    Drawing,
    Part,
    by_seed,
    compared,
    compared_table,
    finished_runs,
    footer,
    groups,
    interval,
    metric,
    or_none,
    table,
)

from bench import figures
from bench.contract import FinishedRun
from bench.diagnostics import mixed
from bench.intervals import differences, student
from bench.runs import registry, resolution
from bench.runs.plan import Plan
from bench.runs.registry import methods
from bench.settings import build
from bench.studies import fidelity_rows
from bench.sweep import tune

CONTESTANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bench.peers.LaplaceTorch+learning_rate=0.01,optimizer=amsgrad": (
        "laplace",
        {"learning_rate": 0.01, "curvature": "full", "prior_precision": "task"},
    ),
    "bench.peers.PosteriorsLaplace+learning_rate=0.01,optimizer=amsgrad": (
        "laplace",
        {"learning_rate": 0.01, "curvature": "full", "prior_precision": "task"},
    ),
    "bench.peers.PosteriorsVI": ("mfvi", {"learning_rate": 0.01, "initial_rho": -3.0, "train_samples": 1}),
    "bench.peers.PosteriorsSGLD": ("sgld", {"learning_rate": 0.01, "burn_in": 0.5}),
}
"""Posterior of another library -> ours, and the settings under which the two are one."""


WIDTHS = {
    "mfvi": "`mfvi`",
    "radial": "`radial`",
    "invariant_vi": "`invariant_vi`",
    "invariant_vi+points=16": "`invariant_vi`, 16 points",
}
"""Method identity -> its name in the study of networks by width."""


EXACT = "second run of the reference"


def preset(name: str, task: str) -> tuple[registry.Entry, Any]:
    """A method, and its settings on the task in the preset `standard`."""
    resolved = resolution.resolve(build(Plan, {"method": name, "task": task}))
    return registry.method(name), resolved.method_settings


def of_ours(theirs: str, task: str) -> str:
    """How records name ours of the settings of theirs."""
    name, settings = CONTESTANTS[theirs]
    method, standard = preset(name, task)
    return resolution.identity(method, replace(standard, **settings), standard)


def fidelity() -> str:
    """Distance of every method to the exact posterior, by task; last the floor."""
    tasks = [name for name, entry in registry.tasks().items() if entry.file == "fidelity"]
    cells: dict[str, dict[str, str]] = {}
    floors = {}
    for task in tasks:
        for task_identity, method_identity, group in groups(task):
            if method_identity not in methods():  # settings that no name fixes
                continue
            if task_identity == task and all(record.status == "completed" for _, record in group):
                disagree = any(mixed(record.diagnostics) is False for _, record in group)
                value = metric(group, "wasserstein") + (" (chains disagree)" if disagree else "")
                cells.setdefault(method_identity, {})[task] = value
                floors[task] = f"{group[0][1].metrics['wasserstein_floor']:.4f}"
    rows = [[f"`{method}`", *(cells[method].get(task, "-") for task in tasks)] for method in sorted(cells)]
    if rows:
        rows.append(["floor: a second run of the reference", *(floors.get(task, "-") for task in tasks)])
    return or_none(["method", *(f"`{task}`" for task in tasks)], rows)


def tuned() -> str:
    """What a search on the distance itself and one on validation data chose, and how far each choice is."""
    rows = []
    for path in sorted(tune.OTHERWISE.glob("fidelity_*/*.json")):
        told = tune.read(path)
        by_distance = tune.read(resolution.tuned_path(told.method, told.task, resolution.TUNED))
        method, standard = preset(told.method, told.task)
        settings = registry.build(method.cls.settings_class, {**method.fixed, **told.chosen}, "method")
        identity = resolution.identity(method, settings, standard)
        cells = [list(by_seed(told.task, name).values()) for name in (told.method, identity)]
        distances = [metric(group, "wasserstein") if group else "-" for group in cells]
        rows.append(
            [
                f"`{told.task}`",
                f"`{told.method}`",
                chosen(by_distance),
                distances[0],
                chosen(told),
                distances[1],
            ]
        )
    header = ["task", "method", "chosen by the distance", "distance", "chosen by validation NLL", "distance"]
    return or_none(header, rows)


def chosen(result: tune.Tuning) -> str:
    """The settings that a search chose."""
    settings = result.configurations[result.chosen_number].settings
    return ", ".join(f"`{name}={value}`" for name, value in settings.items())


def contestants() -> str:
    """Distance to the exact posterior of theirs and of ours, and the difference, paired by seed."""
    rows = []
    for task in ("fidelity_toy", "fidelity_iris"):
        for theirs in CONTESTANTS:
            ours = of_ours(theirs, task)
            pair = [
                {
                    seed: float(record.metrics["wasserstein"])
                    for seed, (_, record) in by_seed(task, name).items()
                }
                for name in (theirs, ours)
            ]
            found = student(differences(*pair))
            cells = [interval(list(values.values())) for values in pair]
            verdict = "differ" if found.sign() else "agree"
            rows.append([f"`{task}`", f"`{theirs}`", f"`{ours}`", *cells, f"{found:.2g}", verdict])
    header = ["task", "theirs", "ours", "distance of theirs", "distance of ours", "difference", "within it"]
    return table(header, rows)


@cache
def by_width() -> dict[tuple[int, str], dict[int, dict[str, float]]]:
    """(Units, method) -> seed -> how far and how wide it is on fidelity_toy; of the reference one run."""
    found: dict[tuple[int, str], dict[int, dict[str, float]]] = {}
    for run in finished_runs("fidelity_toy"):
        is_of_study = re.fullmatch(r"(units=\d+)?", run.variant) and run.method_identity in WIDTHS
        if is_of_study:
            (units,) = run.task.posed.network[2]
            found.setdefault((units, WIDTHS[run.method_identity]), {})[run.seed] = width_row(run, "draws")
            found[units, EXACT] = {0: width_row(run, "second")}
    return dict(sorted(found.items()))


def width_row(run: FinishedRun, draws: str) -> dict[str, float]:
    """Distance, standard deviations over those of the reference, and NLL of draws on fidelity_toy."""
    arrays = run.arrays | {"draws": run.arrays[draws]}
    wide, exact = (arrays[name].astype(np.float64).std(0) for name in ("draws", "reference"))
    between = len(run.task.own_data("test")[0])  # where the test inputs between the clusters begin
    return {
        "distance": run.task.score(arrays)["wasserstein"],
        "spread at the data": float((wide / exact)[:between].mean()),
        "spread between": float((wide / exact)[between:].mean()),
        "NLL": run.task.nll(arrays),
    }


def widths() -> str:
    """Distance, spread and NLL of the methods of `WIDTHS`, by width."""
    rows = [
        [str(units), name, str(len(of)), *(interval([row[key] for row in of.values()]) for key in of[0])]
        for (units, name), of in by_width().items()
    ]
    return or_none(
        ["units", "method", "seeds", "distance", "spread at the data", "spread between", "NLL"], rows
    )


def widths_said() -> str:
    """What leaving out the cost of translations changes, paired by seed, at every width."""
    said = []
    for units in dict.fromkeys(units for units, _ in by_width()):
        one, other = (by_width().get((units, WIDTHS[m]), {}) for m in ("invariant_vi", "mfvi"))
        for key in ("distance", "spread between", "NLL"):
            rows = ({seed: row[key] for seed, row in of.items()} for of in (one, other))
            if len(change := differences(*rows)) >= 3:
                of = student(change)
                what = f"{units} units: {key} of `invariant_vi` minus that of `mfvi` is {of:.3g}"
                said.append(f"- {what}{of.said('it is larger', 'it is smaller')}")
    return "\n".join(said) or "No run is committed yet."


def widths_chart() -> Any:
    """The table of widths as curves."""
    curves: dict[tuple[str, str, int], list[tuple[float, float]]] = {}
    for (units, name), of in by_width().items():
        for seed, row in of.items():
            for key in ("distance", "spread at the data", "spread between"):
                curves.setdefault((key, name.replace("`", ""), seed), []).append((units, row[key]))
    found = [figures.Curve(panel, series, points) for (panel, series, _), points in curves.items()]
    return figures.panels(found, "units of the hidden layer", "over the posterior's sd")


def cifar10() -> str:
    """Distance to the chains on CIFAR-10 of all committed runs, and of what is no run."""
    names = fidelity_rows.COLUMNS
    rows = [
        [f"`{method}`", f"`{task}`", *(metric(group, name) for name in names), f"{len(group)} seeds"]
        for task, method, group in groups("fidelity_cifar10")
    ]
    for other in fidelity_rows.published():
        values = (other.metrics[name] for name in names)
        rows.append([other.row, "-", *("-" if v is None else f"{v:.4f}" for v in values), other.source])
    return table(["row", "settings", *names, "source"], rows)


def drawn() -> Iterator[Drawing]:
    """Distances and spreads by width; ranks of simulation-based calibration."""
    if runs := [r for r in finished_runs("fidelity_toy") if r.method_identity in WIDTHS]:
        yield {"fidelity_toy-widths": widths_chart()}, footer(runs)
    if runs := finished_runs("sbc"):
        yield compared("sbc").charts, footer(runs)


PARTS: dict[str, Part] = {
    "fidelity": fidelity,
    "fidelity tuned": tuned,
    "sbc": lambda: compared_table("sbc"),
    "sbc linear": lambda: compared_table("sbc_linear"),
    "fidelity_cifar10": cifar10,
    "contestants": contestants,
    "widths": widths,
    "widths said": widths_said,
}
