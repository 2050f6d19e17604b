"""The methods: what they approximate, what they cost, how they were tuned."""

from __future__ import annotations

import inspect
import json
import re
from itertools import groupby
from statistics import fmean
from typing import Any

import numpy as np
from parts.evidence import ROOT, Part, committed, table

from bench.contract import CAPABILITIES
from bench.laws.statements import LAWS, declaration
from bench.leaderboard.check import codes
from bench.leaderboard.evidence.submission import SUBMISSIONS
from bench.runs import resolution
from bench.runs.measures import written
from bench.runs.registry import methods
from bench.runs.searches import searches
from bench.sweep import tune
from bench.sweep.edges import edges

SPEED = ROOT / "benchmarks" / "peers.json"


SMALL_FITS = ROOT / "benchmarks" / "small_fits.json"


COSTS = ROOT / "benchmarks" / "methods.json"


RUNS = 26
"""Of a search with a budget of twenty: two seeds more of the best three."""


ACCELERATOR = ROOT / "benchmarks" / "gpu.json"


def paragraph(module: Any, name: str) -> str:
    """A paragraph of a file's documentation, by its first word."""
    found = re.search(rf"^{name}: (.+?)(?=^\w[\w ]*: |\Z)", module.__doc__, re.MULTILINE | re.DOTALL)
    return " ".join(found[1].split()) if found else ""


def method_sources() -> str:
    """What each method approximates and where it is described."""
    rows = []
    for name, entry in methods().items():
        module = inspect.getmodule(entry.cls)
        if entry.members > 1:
            approximates = f"`{entry.file}`: {entry.members} independent fits, draws pooled"
            source = "Farquhar 2022, section 4.3"
        else:
            approximates = entry.cls.approximates
            source = paragraph(module, "Source").replace(" (docs/sources.md)", "")
        able = ", ".join(c for c in CAPABILITIES if c in entry.provides)
        rows.append([f"`{name}`", approximates, able, source])
    return table(["method", "approximates", "capabilities", "source"], rows)


def method_statements() -> str:
    """What each method declares of its posterior, and what the law of that compares."""
    rows = []
    for name, entry in methods().items():
        declared = entry.declares if entry.members == 1 else f"each member: {entry.declares}"
        law = LAWS.get(entry.declares)
        checks = (law.__doc__ or "").split("\n\n")[0].replace("\n    ", " ").rstrip(".") if law else "nothing"
        values = "" if law is None else ", ".join(f"{n} {v}" for n, v in declaration(entry.cls)[1].items())
        rows.append([f"`{name}`", declared, checks, values])
    return table(["method", "declares", "what the law of that checks", "under"], rows)


def method_costs() -> str:
    """The committed measurement of benchmarks/methods.py."""
    measured = json.loads(COSTS.read_text())
    parts, refused = [], {}
    for network, group in groupby(measured["rows"], key=lambda row: row["network"]):
        rows = []
        for row in group:
            if "refused" in row:
                refused.setdefault(row["method"], row["refused"])
            cells = [
                f"{row[key]:.2f}" if key in row else "-"
                for key in ("numbers", "step", "memory", "milliseconds")
            ]
            after = f"{row['after']:.1f}" if "after" in row else "-"
            rows.append([f"`{row['method']}`", *cells, after])
        header = ["method", "numbers per weight", "step", "memory", "ms per step", "after training"]
        parts.append(f"### {network}\n\n{table(header, rows)}")
    where = f"{measured['date']}, {measured['device']}, one thread, torch {measured['torch']}."
    reasons = "\n".join(f"- {reason}" for reason in refused.values())
    return "\n\n".join([*parts, where, f"A row of dashes is a refusal:\n\n{reasons}"])


def steps_measured() -> dict[tuple[str, int], dict[str, Any]]:
    """By network and S what benchmarks/peers.py found of a training step: milliseconds, and the batch."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for row in json.loads(SPEED.read_text())["steps"]:
        case = found.setdefault((row["network"], row["samples"]), {"batch": row["batch"]})
        name = "floor" if row["contender"].startswith("floor") else row["contender"]
        case[name] = min(row["milliseconds"], case.get(name, np.inf))
    return found


def speed() -> str:
    """Goals of benchmarks/peers.py and what came out, and where it was measured."""
    measured = json.loads(SPEED.read_text())
    rows = [
        [
            row["what"],
            f"`{row['method']}`",
            row["against"],
            f"{row['ratio']:.2f} ({row['lower']:.2f} to {row['upper']:.2f})",
            "none" if row["goal"] is None else f"{row['goal']:.2f}",
            row["verdict"],
        ]
        for row in measured["goals"]
    ]
    header = ["what", "method", "against", "ratio (quartiles)", "goal: at most", "verdict"]
    others = ", ".join(f"{name} {v}" for name, v in measured["versions"].items() if name != "posterior-bench")
    return f"{table(header, rows)}\n\n{measured['date']}, {measured['device']}, one thread; {others}."


def small_fits() -> str:
    """The committed measurement of benchmarks/small_fits.py."""
    measured = json.loads(SMALL_FITS.read_text())
    rows = [
        [row["case"], *(f"{row[f'{way}_seconds']:.2f}" for way in ("single", "fit_many", "stacked"))]
        for row in measured["many"]
    ]
    header = ["fits", "one by one, s", "fit_many, s", "side by side, s"]
    extra = measured["overhead"][0]["extra_milliseconds"]
    return (
        f"A fit of 10 steps costs {extra:.1f} ms beyond its steps, each further step "
        f"{measured['extra_milliseconds_per_step']:.2f} ms.\n\n{table(header, rows)}\n\n"
        f"{measured['date']}, {measured['device']}, one thread, torch {measured['torch']}."
    )


def accelerator() -> str:
    """The committed measurements of benchmarks/gpu.py, part by part."""
    parts = json.loads(ACCELERATOR.read_text())
    found = {name: rows for part in parts.values() for name, rows in part.items() if isinstance(rows, list)}
    steps = [
        [
            *(str(row[name]) for name in ("network", "batch", "samples")),
            f"`{row['contender']}`",
            f"{row['milliseconds']:.2f}",
            f"{row['to_plain']:.2f}",
            f"{row['peak_mib']:.0f}",
        ]
        for row in found.get("steps", [])
    ]
    methods = [
        [
            *(str(row[name]) for name in ("network", "batch", "precision")),
            f"`{row['method']}`",
            f"{row['milliseconds']:.1f}",
            f"{row['images_per_second']:,.0f}",
            *(f"{row[name]:.2f}" if row[name] else "-" for name in ("to_plain", "to_mc_dropout")),
            f"{row['peak_mib']:.0f}",
        ]
        for row in found.get("networks", [])
    ]
    passes: dict[tuple[str, int], dict[str, str]] = {}
    for row in found.get("walks", []):
        ways = passes.setdefault((f"{row['network']}, batch {row['batch']}", row["samples"]), {})
        ways[row["walk"]] = f"{row['milliseconds']:.1f}"
    draws = [
        [network, str(samples), *(ways.get(way, "-") for way in ("loop", "stacked", "vmap"))]
        for (network, samples), ways in passes.items()
    ]
    fits = [
        [row["case"], *(f"{row[f'{way}_seconds']:.2f}" for way in ("single", "fit_many", "stacked"))]
        for row in found.get("fits", [])
    ]
    whole = [
        [
            f"`{row['method']}`",
            f"`{row['task']}`",
            row["preset"],
            f"{row['stages']} of {row['of']}",
            *(f"{value:.1f}" for value in (row["seconds"] / 60, 60 * row["hours_of_the_whole"])),
        ]
        for row in found.get("runs", [])
    ]
    memory, cost = "most memory, MiB", ["ms per step", "images a second", "to the plain network"]
    tables = {
        "steps": (["network", "batch", "S", "a step of", "ms", "to the plain network", memory], steps),
        "networks": (["network", "batch", "precision", "method", *cost, "to `mc_dropout`", memory], methods),
        "walks": (["a forward and backward pass", "S", "loop, ms", "batched product, ms", "vmap, ms"], draws),
        "fits": (["fits of `mfvi`", "one by one, s", "`fit_many`, s", "side by side, s"], fits),
        "runs": (["method", "task", "preset", "stages", "minutes", "the whole, minutes"], whole),
    }
    written = []
    for part in parts.values():
        written += [table(*tables[name]) for name in tables if part.get(name)]
        written.append(f"{part['date']}, {part['device']}, torch {part['torch']}, CUDA {part['cuda']}.")
    return "\n\n".join(written)


def tuning() -> str:
    """The committed searches; of different budgets none is comparable."""
    results = [tune.read(path) for path in sorted(resolution.TUNED.glob("*/*.json"))]
    if not results:
        return "No search is committed yet: all settings are published or untuned."
    rows = []
    for result in results:
        budgets = {other.budget for other in results if other.task == result.task}
        values = {c.number: "-" if c.value is None else f"{c.value:.4f}" for c in result.configurations}
        chosen = result.configurations[result.chosen_number]
        settings, others = chosen.settings, [value for value in chosen.others if value is not None]
        listed = ", ".join(f"`{name}={value}`" for name, value in settings.items())
        lost = sum(c.status != "completed" for c in result.configurations) / result.budget
        rows.append(
            [
                f"`{result.task}`",
                f"`{result.method}`",
                str(result.budget) if len(budgets) == 1 else f"{result.budget} (not comparable)",
                f"{result.criterion.metric}, {'higher' if result.criterion.higher_is_better else 'lower'}",
                values[0],
                values[result.chosen_number],
                f"{fmean(others):.4f}" if others else "-",
                str(result.chosen_number),
                listed if result.chosen_number else "untuned ones",
                ", ".join(f"`{name}` {edge}" for name, edge in edges(result).items()) or "-",
                f"{lost:.0%}",
            ]
        )
    header = ["task", "method", "budget", "criterion, better if", "untuned", "chosen", "further seeds"]
    return table([*header, "number", "settings", "at an edge", "diverged"], rows)


def searched() -> str:
    """What searches took on every ranked task of the board, and what those left would take, in core-hours.

    The fastest of a method's committed runs says what one takes: other work on a machine only adds to it.
    """
    results = [tune.read(path) for path in sorted(resolution.TUNED.glob("*/*.json"))]
    records = [record for path, record in committed() if SUBMISSIONS in path.parents]
    known = methods()
    rows, took, left = [], 0.0, 0.0
    for task in sorted({record.task.name for record in records} & written().keys()):
        if not written()[task].ranked:
            continue
        seconds: dict[str, list[float]] = {}
        for record in records:
            if record.task.name == task and known[record.method.name].members == 1:
                seconds.setdefault(record.method.name, []).append(record.seconds)
        budgets = searches(task).budgets
        own = [result for result in results if result.task == task and result.method in budgets]
        rest = {m: RUNS * min(s) for m, s in seconds.items() if m not in {r.method for r in own}}
        spent = sum(c.seconds for result in own for c in result.configurations) / 3600
        open_ = sum(rest.values()) / 3600
        names = ", ".join(f"`{m}`" for m in sorted(rest)) if len(rest) < 4 else f"{len(rest)} methods"
        rows.append(
            [f"`{task}`", str(len(seconds) - len(rest)), f"{spent:.1f}", names or "-", f"{open_:.1f}"]
        )
        took, left = took + spent, left + open_
    rows.append(["together", "", f"{took:.1f}", "", f"{left:.1f}"])
    return table(["task", "searched", "took, core-hours", "left", "would take, core-hours"], rows)


PARTS: dict[str, Part] = {
    "method sources": method_sources,
    "method statements": method_statements,
    "method costs": method_costs,
    "speed": speed,
    "small fits": small_fits,
    "accelerator": accelerator,
    "tuning": tuning,
    "searched": searched,
    "codes": codes.table,
}
