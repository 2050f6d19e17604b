"""Methods on a task: main metrics, what they cost, and what they gain on another or on no network."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from parts.evidence import (
    ROOT,
    Drawing,
    Group,
    Part,
    by_seed,
    committed,
    finished,
    finished_runs,
    footer,
    groups,
    interval,
    is_of_a_search,
    metric,
    milliseconds_per_step,
    or_none,
    table,
)

from bench.diagnostics import mixed
from bench.intervals import Moments, differences, student, welch
from bench.leaderboard.evidence.store import run_arrays
from bench.leaderboard.evidence.submission import SUBMISSIONS
from bench.leaderboard.rank import ranking
from bench.runs import measures
from bench.runs.marks import MEANINGS, Mark, independent_draws, of_run, together
from bench.runs.records import Record
from bench.runs.registry import methods
from bench.runs.searches import LINE, parted, searches

PASSES = ROOT / "benchmarks" / "passes.json"


ANCHORS = ROOT / "benchmarks" / "anchors.json"


BARE_LOOP = ROOT / "benchmarks" / "bare_loop.json"
BARE_METRICS = ("nll_clean", "accuracy_clean", "nll", "accuracy")


SHIFTED = [
    *("nll", "nll_clean", "nll_scaled", "accuracy", "accuracy_clean"),
    *("ece", "conformal_coverage", "ood_auroc"),
]


SHIFTED_LINES = ("map", "deep_ensemble", "mc_dropout", "mfvi", "svgd", "sngp")
"""Methods whose curves against severity are drawn: more than six lines cannot be told apart."""


OF_TEXTS = [
    *("nll", "accuracy", "ece", "nll_clean", "accuracy_clean"),
    *("auroc_new_entropy", "auroc_new_information", "auroc_new_words", "auroc_new_clean_entropy"),
]


COLUMNS = {
    "split_mnist": ["minimum_learning_accuracy", "forgetting", "average_accuracy", "average_nll"],
    "toy_regression": ["gap_ratio", "gap_sd", "data_sd", "test_nll", "gap_nll", "wasserstein_to_reference"],
    "iris_depth": ["cross_entropy", "best_tenth_cross_entropy", "accuracy", "agreement", "total_variation"],
    "retinopathy_synthetic": [
        "nll",
        "auc_0",
        "auc_30_information",
        "information_over_entropy",
        "expected_cost",
    ],
    "ood_digits": [
        "auroc",
        "auroc_held_out_information",
        "auroc_held_out_confidence",
        "auroc_held_out_brightness",
        "auroc_noise_entropy",
        "nll",
        "accuracy",
        "ece",
    ],
    "text_topics": OF_TEXTS,
    "text_adapters": OF_TEXTS,
    "shift_digits": SHIFTED,
    "shift_fashion_mnist": SHIFTED,
    "shift_cifar10": SHIFTED,
}
"""Metrics shown of each task."""


QUESTIONS = {
    "Remembering": ("split_digits", "continual"),
    "Shift": ("shift_digits", "shift"),
    "New classes": ("ood_digits", "ood"),
    "Referral": ("retinopathy_synthetic", "retinopathy"),
    "Active testing": ("active_testing_digits", "active_testing"),
    "Fidelity": ("fidelity_digits", "fidelity"),
}
"""Question -> the task that stands for it, and its page."""


@cache
def passes() -> dict[str, dict[str, dict[str, Any]]]:
    """Task -> method -> its gradients per step and forward passes per image (benchmarks/passes.py)."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in json.loads(PASSES.read_text())["rows"]:
        found.setdefault(row["task"], {})[row["method"]] = row
    return found


def results(task: str) -> str:
    """Main metrics of the committed choices of settings of a task, and what they cost."""
    names = COLUMNS[task]
    work = passes().get(task, {})
    costs = ["gradients per step", "forward passes per image"] if work else []
    rows = []
    for task_identity, method_identity, group in groups(task):
        if is_of_a_search(task, method_identity) or "joint=true" in task_identity:
            continue  # pages have them in tables of their own
        if task == "split_mnist" and ("coreset" in task_identity or len(group) < 3):
            continue  # likewise
        minutes = np.mean([record.seconds for _, record in group]) / 60
        disagree = any(mixed(record.diagnostics) is False for _, record in group)
        name = f"`{method_identity}`" + (" (chains disagree: no reference)" if disagree else "")
        rows.append(
            [name, f"`{task_identity}`", str(len(group))]
            + [metric(group, name) for name in names]
            + [f"{work[group[0][1].method.name][key]:.1f}" for key in ("gradients", "forward") if work]
            + [milliseconds_per_step(group), f"{minutes:.1f}"]
        )
    return table(["method", "task", "seeds", *names, *costs, "ms per step", "minutes per run"], rows)


def results_if_any(task: str) -> str:
    """Main metrics of the committed runs of a task, if there are any."""
    return results(task) if finished_runs(task) else "No run is committed yet."


AGAINST = ("nll", "nll_clean", "accuracy", "ece", "ood_auroc")
AGAINST_TEXTS = ("nll", "nll_clean", "accuracy", "ece", "auroc_new_entropy", "auroc_new_clean_entropy")


def against(task: str, names: tuple[str, ...] = AGAINST, baseline: str = "map") -> str:
    """What every method gains on a baseline, paired by seed."""
    runs = {m: group for t, m, group in groups(task) if t == task and m in methods()}
    values = {
        (method, name): {
            record.seed: value for _, record in group if (value := record.metrics[name]) is not None
        }
        for method, group in runs.items()
        for name in names
    }
    rows = [
        [f"`{method}`"]
        + [f"{student(differences(values[method, name], values[baseline, name])):.2g}" for name in names]
        for method in runs
        if method != baseline
    ]
    return or_none(["method", *(f"`{name}`" for name in names)], rows)


def beside(task: str, other: str, names: tuple[str, ...]) -> str:
    """What every method gains on the runs of another task that has the same test examples, by Welch."""
    rows = []
    for identity, method, group in groups(task):
        others = [*by_seed(other, method).values()]
        if identity == task and method in methods() and others:
            gains = (welch(_moments(group, name), _moments(others, name)) for name in names)
            rows.append([f"`{method}`", *(f"{gain:.2g}" for gain in gains)])
    return or_none(["method", *(f"`{name}`" for name in names)], rows)


def _moments(group: Group, name: str) -> Moments:
    return Moments.of([value for _, record in group if (value := record.metrics[name]) is not None])


def bare_loop() -> str:
    """`map` beside a loop in plain torch: with the same draws seed by seed, and its draws beside torch's.

    Committed runs of `map` stand beside loops at the same rate of learning alone.
    """
    rows = []
    for task, loops in json.loads(BARE_LOOP.read_text())["tasks"].items():
        runs = by_seed(task, "map")
        places = {_place(of): None for found in loops.values() for of in found}
        for (place, rate), name in product(places, BARE_METRICS):
            of_map, fused, nudged, torchs = (
                {of["seed"]: of[name] for of in loops.get(draws, []) if _place(of) == (place, rate)}
                for draws in ("map", "fused", "nudged", "torch")
            )
            ours = {
                seed: record.metrics[name]
                for seed, (_, record) in runs.items()
                if record.method.settings["learning_rate"] == rate and seed in of_map | fused
            }
            ends = [interval([*of.values()]) if of else "not run" for of in (ours, of_map, fused, torchs)]
            less_loop, less_fused, moved = (
                f"{student(differences(some, others)):.2g}" if some and others else "not run"
                for some, others in ((ours, of_map), (ours, fused), (nudged, of_map))
            )
            drawn = "not run"
            if of_map and torchs:
                drawn = f"{welch(*(Moments.of([*of.values()]) for of in (of_map, torchs))):.2g}"
            row = [f"`{task}`" + (f", {place}" if place else ""), f"{rate:g}", f"`{name}`", ends[0]]
            rows.append([*row, ends[1], less_loop, ends[2], less_fused, moved, ends[3], drawn])
    head = ["task", "rate", "", "`map`", "loop, draws of `map`", "`map` less it"]
    head += ["the same, Adam as one kernel", "`map` less it", "nudged less the loop"]
    return table([*head, "loop, draws of torch", "one less the other"], rows)


def _place(loop: dict[str, Any]) -> tuple[str | None, float]:
    """What a run of the loop compares within."""
    return loop.get("device"), loop["rate"]


def iris_depths() -> str:
    """Mean-field inference less full covariance on iris at the published settings, depth by depth."""
    rows = []
    for depth in (1, 2, 3, 4):
        own = "" if depth == 2 else f"depth={depth},"  # the default is no part of an identity
        found = [
            by_seed(f"iris_depth+{own}repetitions=100,test_samples=1", method)
            for method in ("mfvi", "full_cov_vi")
        ]
        row = [str(depth)]
        for name in ("cross_entropy", "best_tenth_cross_entropy"):
            first, second = ({seed: record.metrics[name] for seed, (_, record) in of.items()} for of in found)
            row.append(f"{student(differences(first, second)):.2g}")
        rows.append(row)
    return table(["hidden layers", "mean over 100 fits", "mean over the best ten"], rows)


def chains(task: str) -> str:
    """What the committed runs of samplers say of themselves; unmixed ones are no reference."""
    names = ["acceptance", "step_size", "divergences", "weight_rhat", "weight_ess"]
    rows = []
    for task_identity, method_identity, group in groups(task):
        for _, record in group:
            agree = mixed(record.diagnostics)
            if agree is None:
                continue
            own = record.fits[0].diagnostics
            verdict = "may be a reference" if agree else "no reference"
            rows.append(
                [f"`{method_identity}`", f"`{task_identity}`", str(record.seed)]
                + [f"{own[name]:.4g}" for name in names]
                + [f"{record.diagnostics['prediction_rhat']:.3f}", verdict]
            )
    names = ["acceptance", "step size", "divergences", "R-hat of weights", "ESS of weights"]
    return table(["method", "task", "seed", *names, "R-hat of predictions", ""], rows)


def regressions(task: str) -> str:
    """Every method beside what scikit-learn has, the differences paired by split; the best first."""
    anchors = json.loads(ANCHORS.read_text())["tasks"][task]
    rows = [(f"{name} (no network)", "-", values) for name, values in anchors.items()]
    for task_identity, method_identity, group in groups(task):
        if task_identity == task:
            runs = [finished(path) for path, _ in group]
            values = {m: np.mean([r.metrics[m] for _, r in group]) for m in ("rmse", "coverage_error")}
            splits = np.mean([run.task.losses(run.arrays) for run in runs], axis=0)
            rows.append((f"`{method_identity}`", str(len(group)), {**values, "splits": splits}))
    ratio = finished_runs(task)[0].task.spec.split_ratio
    base = np.array(anchors["Bayesian linear regression"]["splits"])
    cells = []
    for name, seeds, values in sorted(rows, key=lambda row: -np.mean(row[2]["splits"])):
        splits = np.asarray(values["splits"])
        gain = "0" if (splits == base).all() else f"{student(splits - base, test_to_train=ratio):.2g}"
        numbers = [f"{np.mean(splits):.3f}", gain, f"{values['rmse']:.2f}", f"{values['coverage_error']:.3f}"]
        cells.append([name, seeds, *numbers])
    header = ["seeds", "`log_likelihood`", "minus that of Bayesian linear regression", "`rmse`"]
    return table(["method", *header, "`coverage_error`"], cells)


class Question(NamedTuple):
    """One task of a question, and how the committed methods stand on it by its main metric.

    `tuned` are the methods with the budget of the task (`bench.runs.searches`), `marked` those with a mark.
    """

    name: str
    page: str
    on: str
    higher_is_better: bool
    values: dict[str, list[float]]
    ranks: dict[str, tuple[int, int] | None]
    tuned: set[str]
    marked: set[str]

    @property
    def placed(self) -> dict[str, tuple[int, int]]:
        """Rank intervals of the methods that are ranked."""
        return {method: span for method, span in self.ranks.items() if span is not None}

    @property
    def first(self) -> int:
        """How many methods may be first."""
        return sum(low == 1 for low, _ in self.placed.values())

    @property
    def on_page(self) -> str:
        """Its name with a link, for README."""
        return f"[{self.name}](docs/tasks/{self.page}.md)"

    def best(self, of: set[str]) -> str:
        """The best mean among some methods, with a star for a mark; a dash if none of them is ranked."""
        choose = max if self.higher_is_better else min
        able = sorted(of & self.placed.keys())
        if not able:
            return "-"
        best = choose(able, key={m: np.mean(self.values[m]) for m in able}.__getitem__)
        return f"`{best}` {interval(self.values[best])}{' *' if best in self.marked else ''}"


@cache
def asked() -> list[Question]:
    """The questions whose task has committed runs."""
    found = []
    for name, (task, page) in QUESTIONS.items():
        entries = {m: group for t, m, group in groups(task) if t == task and m in methods()}
        if not entries:
            continue
        spec = finished(next(iter(entries.values()))[0][0]).task.spec
        main = spec.main_metric
        higher = spec.metrics[main].higher_is_better
        runs = {m: [ranking.Replicate(r.metrics.get(main)) for _, r in group] for m, group in entries.items()}
        standing = ranking.rank([ranking.Entry(*entry) for entry in runs.items()], higher)
        values = {m: [run.value for run in group if run.value is not None] for m, group in runs.items()}
        ranks = {place.name: place.ranks for place in standing.places}
        known = searches(task)
        tuned = {
            m for m, group in entries.items() if all(known.is_tuned(r.method.tuning, m) for _, r in group)
        }
        marked = {m for m, group in entries.items() if marks_of(group)}
        on = f"{main.replace('_', ' ')} on `{task}`"
        found.append(Question(name, page, on, higher, values, ranks, tuned, marked))
    return found


def questions() -> str:
    """Every method on a task of each question: the main metric, the ranks left open, whether it was tuned."""
    cells: dict[str, dict[str, str]] = {}
    for question in asked():
        for method, span in question.ranks.items():
            ranks = "not ranked" if span is None else "{} to {}".format(*span)
            values = question.values[method]
            mean = interval(values) if values else "-"
            mark = ", tuned" if method in question.tuned else ""
            star = " *" if method in question.marked else ""
            cells.setdefault(method, {})[question.name] = f"{mean} ({ranks}{mark}){star}"
    heads = [question.name for question in asked()]
    above, below = parted(sorted(cells), lambda m: any(m in question.tuned for question in asked()))
    rows = {m: [f"`{m}`", *(cells[m].get(q, "-") for q in heads)] for m in cells}
    line = [[f"**{LINE}**", *[""] * len(heads)]] if above and below else []
    parts = [*(rows[m] for m in above), *line, *(rows[m] for m in below)]
    better = [
        f"- [{q.name}](tasks/{q.page}.md): {q.on}, {'higher' if q.higher_is_better else 'lower'} is better"
        for q in asked()
    ]
    return table(["method", *heads], parts) + "\n\n" + "\n".join(better)


def leaders() -> str:
    """Of each question whose methods are separated the best means, tuned and not; tuned questions first."""
    apart = [question for question in asked() if question.first < len(question.placed)]
    above, below = parted(apart, lambda question: bool(question.tuned & question.placed.keys()))
    rows = [_leading(question) for question in above]
    if above and below:
        rows.append([f"**{LINE}**", *[""] * (len(_LEADING) - 1)])
    rows += [_leading(question) for question in below]
    tied = [f"{q.on_page} ({q.on})" for q in asked() if q not in apart]
    said = f"No row: {', '.join(tied)}. There every method may be first." if tied else ""
    return "\n\n".join(filter(None, [table(_LEADING, rows), said]))


_LEADING = [
    *("question", "metric and task", "better is", "best that is tuned", "best that is not"),
    *("may be first", "tuned"),
]


def _leading(question: Question) -> list[str]:
    count = len(question.placed)
    return [
        question.on_page,
        question.on,
        "higher" if question.higher_is_better else "lower",
        question.best(question.tuned),
        question.best(question.placed.keys() - question.tuned),
        f"{question.first} of {count}",
        f"{len(question.tuned & question.placed.keys())} of {count}",
    ]


def marks_of(group: Group) -> tuple[Mark, ...]:
    """The marks of an entry."""

    def of(path: Path, record: Record) -> tuple[Mark, ...]:
        return of_run(record, lambda: run_arrays(path))

    return together([(record.seed, of(path, record)) for path, record in group])


def marked_cells() -> str:
    """Every committed cell with a mark: those of the board, and those that are kept as evidence."""
    by_cell: dict[tuple[bool, str, str], Group] = {}
    for path, record in committed():
        is_ranked = SUBMISSIONS in path.parents
        cell = not is_ranked, record.task.identity, record.method.identity
        by_cell.setdefault(cell, []).append((path, record))
    rows = [
        [f"`{task}`", f"`{method}`", "evidence" if is_evidence else "ranked", mark.name, mark.reason]
        for (is_evidence, task, method), group in sorted(by_cell.items())
        for mark in marks_of(group)
    ]
    meanings = "\n".join(f"- **{name}**: {meaning}" for name, meaning in MEANINGS.items())
    return f"{meanings}\n\n{table(['task', 'method', 'cell', 'mark', 'reason'], rows)}"


def worth_of_draws() -> str:
    """Ranked cells that say how many independent draws their predictions are worth, the best mixed first."""
    by_cell: dict[tuple[str, str], list[tuple[Record, tuple[float, float]]]] = {}
    for path, record in committed():
        if SUBMISSIONS in path.parents and (told := independent_draws(record)) is not None:
            by_cell.setdefault((record.task.identity, record.method.identity), []).append((record, told))
    rows = []
    for (task, method), found in by_cell.items():
        worth = [independent for _, (independent, _) in found]
        first, (_, draws) = found[0]
        spread = f"{np.mean(worth):.1f} ({min(worth):.1f} to {max(worth):.1f}) of {draws:g}"
        main = measures.spec_of(first).main_metric
        score = interval([record.metrics[main] for record, _ in found])
        rows.append((task, -np.mean(worth), [f"`{task}`", f"`{method}`", spread, f"{main} {score}"]))
    head = ["task", "method", "independent draws, mean (least to most) over seeds", "main metric"]
    return table(head, [row for *_, row in sorted(rows)])


def drawn() -> Iterator[Drawing]:
    """Fits of the toy, and curves against severity."""
    identities = ("toy_regression", "toy_regression+layers=3")
    toys = [r for r in finished_runs("toy_regression") if r.task_identity in identities and not r.seed]
    yield type(toys[0].task).compare(toys).charts, footer(toys)
    for task in ("shift_fashion_mnist", "shift_digits"):
        runs = [
            r for r in finished_runs(task) if r.task_identity == task and r.method_identity in SHIFTED_LINES
        ]
        yield type(runs[0].task).compare(runs).charts, footer(runs)
    shown = next(run for run in runs if run.method_identity == "map" and run.seed == 0)
    reliability = shown.task.figures(shown.arrays)["reliability"]
    yield {"shift_digits-map-reliability": reliability}, footer([shown])


PARTS: dict[str, Part] = {
    "results toy_regression": lambda: results("toy_regression"),
    "chains toy_regression": lambda: chains("toy_regression"),
    "iris depths": iris_depths,
    "results iris_depth": lambda: results("iris_depth"),
    "chains iris_depth": lambda: chains("iris_depth"),
    "results split_mnist": lambda: results("split_mnist"),
    "results retinopathy_synthetic": lambda: results("retinopathy_synthetic"),
    "results ood_digits": lambda: results_if_any("ood_digits"),
    "results text_topics": lambda: results_if_any("text_topics"),
    "against text_topics": lambda: against("text_topics", AGAINST_TEXTS),
    "results text_adapters": lambda: results_if_any("text_adapters"),
    "against text_adapters": lambda: against("text_adapters", AGAINST_TEXTS),
    "adapters beside frozen": lambda: beside("text_adapters", "text_topics", AGAINST_TEXTS),
    "results shift_digits": lambda: results_if_any("shift_digits"),
    "against shift_digits": lambda: against("shift_digits"),
    "bare loop": bare_loop,
    "results shift_fashion_mnist": lambda: results_if_any("shift_fashion_mnist"),
    "against shift_fashion_mnist": lambda: against("shift_fashion_mnist"),
    "results shift_cifar10": lambda: results_if_any("shift_cifar10"),
    "regressions diabetes_regression": lambda: regressions("diabetes_regression"),
    "questions": questions,
    "worth of draws": worth_of_draws,
    "leaders": leaders,
    "marks": marked_cells,
}
