"""The UCI tables on the published splits: runs beside the published MC dropout of the very same split."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

import numpy as np
from parts.evidence import ROOT, Group, Part, groups, or_none

from bench import tables
from bench.intervals import Interval, standard_error, student
from bench.leaderboard.evidence.entries import finished_run
from bench.studies.published_splits import Printed, bde, mc_dropout, pairings, standardised, table_4_2
from bench.tasks.uci_regression import Settings, UCIRegression

TASKS = {f"uci_{table}": table for table in mc_dropout()}
"""Task -> its table."""
SCORES = ("crps", "interval_score_90", "width_90", "coverage_error", "pit_distance")
OURS = {"MFVI": "mfvi", "Radial": "radial", "Dropout": "mc_dropout"}
"""Row of the thesis' Table 4.2 -> the method here."""
REFERENCES = ROOT / "benchmarks" / "uci_references.csv"
MARKS = {1: " ▲", 0: "", -1: " ▼"}


class Line(NamedTuple):
    """A method, or a predictor that is no network, on all published splits of a table.

    Attributes:
        name: Of the method, with its settings.
        task: Name of the task.
        rest: Settings of the task but `published_splits`; empty if none.
        seeds: How many.
        gain: Log likelihood less the published MC dropout's; None where no density is predicted.
        rmse_gain: RMSE less the published MC dropout's.
        splits: Log likelihood and RMSE of every split, `[2, K]`.
        scores: Means of `SCORES` over the seeds, as far as they are known.
    """

    name: str
    task: str
    rest: str
    seeds: int
    gain: Interval | None
    rmse_gain: Interval
    splits: np.ndarray
    scores: dict[str, float]


def is_completed(group: Group) -> bool:
    """Whether all its runs came to their end."""
    return all(record.status == "completed" for _, record in group)


def on_published_splits(tasks: Iterable[str] = TASKS) -> list[tuple[str, str, str, Group]]:
    """Method, task, further settings of the task, and the committed runs."""
    found = []
    for task in tasks:
        for identity, method, group in groups(task):
            settings = identity.partition("+")[2].split(",")
            if "published_splits=true" in settings:
                settings.remove("published_splits=true")
                found.append((method, task, ",".join(settings), group))
    return found


@cache
def lines() -> list[Line]:
    """Methods on the tables where all their runs were completed."""
    found = []
    for method, task, rest, group in on_published_splits():
        if not is_completed(group):
            continue
        for pair in pairings([finished_run(path) for path, _ in group]):
            scores = {name: float(np.mean([run.metrics[name] for run in pair.runs])) for name in SCORES}
            gains = pair.log_likelihood, pair.rmse
            found.append(Line(method, task, rest, len(pair.runs), *gains, pair.splits, scores))
    return found


@cache
def references() -> list[Line]:
    """What `benchmarks/uci_references.py` found."""
    kept: dict[tuple[str, str], list[dict[str, str]]] = {}
    for row in csv.DictReader(REFERENCES.read_text().splitlines()):
        kept.setdefault((row["table"], row["reference"]), []).append(row)
    ratio = UCIRegression(Settings(dataset="yacht")).spec.split_ratio or 0.0
    found = []
    for (table, name), rows in kept.items():
        names = [column for column in rows[0] if column not in ("table", "reference", "split")]
        values = {column: np.array([float(row[column] or "nan") for row in rows]) for column in names}
        splits = np.stack([values["log_likelihood"], values["rmse"]])
        gain, rmse = (student(of, test_to_train=ratio) for of in splits - mc_dropout()[table].T)
        scores = {column: float(of.mean()) for column, of in values.items() if not np.isnan(of).any()}
        scores["coverage_error"] = abs(scores["covered_90"] - 0.9)
        is_density = "log_likelihood" in scores
        found.append(Line(name, f"uci_{table}", "", 0, gain if is_density else None, rmse, splits, scores))
    return found


# ------------------------------------------------------------------------------------------- the short table


def by_name(found: list[Line]) -> dict[str, dict[str, Line]]:
    """Name -> task -> its line, if it has a density and changes nothing but how many samples predict."""
    named: dict[str, dict[str, Line]] = {}
    for line in sorted(found, key=lambda line: (line.name, line.rest)):
        if line.gain and (not line.rest or line.rest.startswith("test_samples=")):
            named.setdefault(line.name, {}).setdefault(line.task, line)
    return named


def gains(row: dict[str, Line]) -> list[Interval]:
    """Gains of a method over its tables."""
    return [line.gain for line in row.values() if line.gain]


def counts(row: dict[str, Line]) -> tuple[int, int, int]:
    """On how many tables the interval is above 0, holds it, and is below."""
    signs = [gain.sign() for gain in gains(row)]
    return signs.count(1), signs.count(0), signs.count(-1)


def ordered(named: dict[str, dict[str, Line]]) -> dict[str, dict[str, Line]]:
    """Those first that are better on more tables than worse; the median gain parts the others."""

    def key(row: tuple[str, dict[str, Line]]) -> tuple[float, float]:
        better, _, worse = counts(row[1])
        return worse - better, -float(np.median([gain.centre for gain in gains(row[1])]))

    return dict(sorted(named.items(), key=key))


def short() -> str:
    """Methods by tables: the gain over the published MC dropout; in bold the largest of the methods."""
    own, others = ordered(by_name(lines())), ordered(by_name(references()))
    diverged = {
        (method, task)
        for method, task, _, group in on_published_splits()
        if any(record.status == "diverged" for _, record in group)
    }
    best = {
        task: max((row[task].gain.centre for row in own.values() if task in row), default=np.nan)
        for task in TASKS
    }

    def cell(name: str, row: dict[str, Line], task: str) -> str:
        if task not in row or row[task].gain is None:
            return "diverged" if (name, task) in diverged else "-"
        gain = row[task].gain
        number = f"{gain.centre:+.2f}"
        is_best = name in own and gain.centre == best[task]
        return (f"**{number}**" if is_best else number) + MARKS[gain.sign()]

    rows = [
        [f"`{name}`" if name in own else f"{name} (no network)", " / ".join(map(str, counts(row)))]
        + [cell(name, row, task) for task in TASKS]
        for name, row in [*own.items(), *others.items()]
    ]
    return or_none(["method", "▲ / level / ▼", *(table.replace("_", " ") for table in TASKS.values())], rows)


def standing() -> str:
    """What the short table says, a sentence each."""
    own = ordered(by_name(lines()))
    if not own:
        return "No such run is committed yet."
    better, level, worse = np.sum([counts(row) for row in own.values()], 0)
    pairs = better + level + worse
    said = [
        f"{len(own)} methods have {pairs} pairs of a method and a table. {better} are better than the "
        f"published MC dropout, {level} show no difference, {worse} are worse. Of {pairs} intervals of 95% "
        f"at most {0.05 * pairs:.1f} are expected to miss."
    ]
    ahead = []
    for name, row in own.items():
        ups, _, downs = counts(row)
        ahead += [f"`{name}` ({ups} to {downs})"] if ups > downs else []
    of_ahead = f"Better on more tables than worse: {', '.join(ahead)}."
    said.append(of_ahead if ahead else "No method is better on more tables than it is worse on.")
    leaders = [(a, b) for a, b in (first(task) for task in TASKS) if a and b]
    behind = sum(b.gain.centre > a.gain.centre for a, b in leaders)
    said.append(
        f"On {behind} of {len(leaders)} tables the best predictor without a network has a higher log "
        "likelihood than the best method."
    )
    return "\n".join(f"- {sentence}" for sentence in said)


def first(task: str) -> list[Line | None]:
    """On a table the method and the predictor without a network that gain most."""
    named = [by_name(found) for found in (lines(), references())]
    of_task = [[row[task] for row in rows.values() if task in row] for rows in named]
    return [max(found, key=lambda line: line.gain.centre, default=None) for found in of_task]


def best() -> str:
    """The `first` of every table."""
    rows = []
    for task in TASKS:
        cells = [f"`{task}`"]
        for line, form in zip(first(task), ("`{}`", "{}"), strict=True):
            cells += [form.format(line.name), f"{line.gain:.2g}"] if line else ["-", "-"]
        rows.append(cells)
    header = ["task", "best method", "less the published", "best without a network", "less the published"]
    return or_none(header, rows)


# -------------------------------------------------------------------------------------------- the thesis


def with_error(number: Printed | None) -> str:
    """As it is printed."""
    return "-" if number is None else f"{number.value:.2f} ± {number.error:.2f}"


def thesis() -> str:
    """The rows of Table 4.2 that have a method here, each beside ours; and dropout's beside its own files."""
    own, rows = by_name(lines()), []
    for task, table in TASKS.items():
        theirs = table_4_2()[table]
        found = [(row, f"`{method}`", own.get(method, {}).get(task)) for row, method in OURS.items()]
        cases = [(row, name, line.splits) for row, name, line in found if line]
        cases.append(("Dropout", "the published files", mc_dropout()[table].T))
        for row, name, splits in cases:
            cells = []
            for printed, values in zip(theirs[row], splits, strict=True):
                ours = Printed(float(values.mean()), standard_error(values))
                cells += [with_error(printed), with_error(ours), f"{ours.value - printed.value:+.2f}"]
            rows.append([f"`{task}`", row, name, *cells])
    header = ["task", "row of Table 4.2", "beside it"]
    for score in ("log likelihood", "RMSE"):
        header += [f"{score}, printed", "beside it", "difference"]
    return or_none(header, rows)


def printed(score: int) -> str:
    """Table 4.2: its log likelihoods (0) or RMSE (1)."""
    names = list(next(iter(table_4_2().values())))
    rows = [
        [table.replace("_", " "), *(with_error(row[name][score] if name in row else None) for name in names)]
        for table, row in table_4_2().items()
    ]
    kept = [i for i in range(len(names) + 1) if any(row[i] != "-" for row in rows)]
    header = ["table", *names]
    return or_none([header[i] for i in kept], [[row[i] for i in kept] for row in rows])


# ------------------------------------------------------------------------------------------- the long tables


def long(found: list[Line], is_method: bool) -> str:
    """A row for every line, table by table, the largest gain first."""
    rows = []
    for task in TASKS:
        of_task = [line for line in found if line.task == task]
        for line in sorted(of_task, key=lambda line: -(line.gain.centre if line.gain else -np.inf)):
            name = ", ".join(filter(None, (line.name, line.rest)))
            cells = [f"`{task}`", *([f"`{name}`", str(line.seeds)] if is_method else [name])]
            cells += [f"{line.splits[0].mean():.3f}", f"{line.gain:.2g}"] if line.gain else ["-", "-"]
            cells += [f"{line.splits[1].mean():.3g}", f"{line.rmse_gain:.2g}"]
            shown = SCORES if is_method else SCORES[:-1]
            rows.append(cells + [f"{line.scores[s]:.3g}" if s in line.scores else "-" for s in shown])
    names = ["task", "method", "seeds"] if is_method else ["task", "predictor"]
    header = [*names, "log likelihood", "less the published", "RMSE", "less the published"]
    return or_none([*header, *(f"`{name}`" for name in (SCORES if is_method else SCORES[:-1]))], rows)


def published() -> str:
    """What the published MC dropout has on every table."""
    rows = []
    for task, table in TASKS.items():
        (log_likelihood, rmse), unit = mc_dropout()[table].T, tables.SOURCES[table].unit
        span = f"{log_likelihood.min():.2f} to {log_likelihood.max():.2f}"
        means = [f"{log_likelihood.mean():.3f}", span, f"{rmse.mean():.3g}"]
        rows.append([f"`{task}`", unit, str(len(rmse)), *means])
    return or_none(["task", "unit", "splits", "log likelihood", "of single splits", "RMSE"], rows)


# ------------------------------------------------------------------------------------------------- the folds


def folds() -> str:
    """Airfoil and bike: what is printed, and committed runs on the folds, of standardised targets."""
    rows = []
    for table, of_table in bde().items():
        task = f"uci_{table}"
        for name, scores in of_table.items():
            cells = [f"{score.value:.3f} ± {score.error:.3f}" for score in scores]
            rows.append([f"`{task}`", f"{name}, printed", *cells])
        ours = [found for found in on_published_splits([task]) if is_completed(found[-1])]
        for method, _, rest, group in ours:
            runs = [finished_run(path) for path, _ in group]
            told = [standardised(run.arrays, *run.task.per_split(run.arrays)[:2]) for run in runs]
            cells = [f"{of.mean():.3f} ± {standard_error(of):.3f}" for of in np.mean(told, 0)]
            rows.append([f"`{task}`", f"`{', '.join(filter(None, (method, rest)))}`", *cells])
        if not ours:
            rows.append([f"`{task}`", *"---"])
    return or_none(["task", "method", "NLL", "RMSE"], rows)


PARTS: dict[str, Part] = {
    "uci standing": standing,
    "uci short": short,
    "uci best": best,
    "uci thesis": thesis,
    "uci paired": lambda: long(lines(), True),
    "uci references": lambda: long(references(), False),
    "uci published": published,
    "uci folds": folds,
    "uci table 4.2 log likelihood": lambda: printed(0),
    "uci table 4.2 rmse": lambda: printed(1),
}
