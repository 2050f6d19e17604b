"""Writes the generated parts of README.md and docs/: every number comes from a committed file.

    python docs/generate.py           write them
    python docs/generate.py --check   exit 1 if one is not current

A generated part stands between `<!-- generated: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import csv
import inspect
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from bench import figures, fundus, fundus_population, metrics, registry, runner, tune
from bench.comparison import by_task
from bench.contract import CAPABILITIES, Comparison, FinishedRun
from bench.diagnostics import mixed
from bench.intervals import differences, student
from bench.leaderboard import codes, entries, findings, ranking
from bench.leaderboard.findings import Claim, Finding, Word
from bench.leaderboard.store import run_arrays
from bench.records import Record
from bench.registry import methods
from bench.studies import active, continual, referral, referral_comparison, singular
from bench.studies.singular import charts, claims
from bench.studies.singular import table as singular_table
from bench.tasks import gradient_variance, singular_evidence

ROOT = Path(__file__).parent.parent
SPEED = ROOT / "benchmarks" / "peers.json"
SMALL_FITS = ROOT / "benchmarks" / "small_fits.json"
SPLIT_MNIST = ROOT / "docs" / "tasks" / "split_mnist.md"
COSTS = ROOT / "benchmarks" / "methods.json"
PASSES = ROOT / "benchmarks" / "passes.json"
ANCHORS = ROOT / "benchmarks" / "anchors.json"
CLAIMS = ROOT / "docs" / "findings.yaml"
FIGURES = {
    (singular.Triplet("tanh", 576, *triplet), singular_table.parsed(method))
    for triplet, methods in {
        (0.0, 5.0, 100.0): ("nf_gaussian_0.1_0.001", "nf_gamma_10_1_100_True"),
        (5.0, 0.0, 100.0): ("nf_gaussian_5_5e-2", "nf_gamma_500_5_100_True"),
    }.items()
    for method in methods
}
"""Rows of Figs 1 and 2 of the task's source (docs/sources.md)."""

Group = list[tuple[Path, Record]]


@cache
def committed() -> Group:
    """Every committed run and its record, read once."""
    return list(entries.committed())


def groups(task: str) -> Iterator[tuple[str, str, Group]]:
    """Committed runs of a task by (task identity, method identity), all seeds together."""
    runs = [(path, record) for path, record in committed() if record.task.name == task]
    for key, group in groupby(runs, key=lambda run: (run[1].task.identity, run[1].method.identity)):
        yield *key, list(group)


@cache
def finished(path: Path) -> FinishedRun:
    """A committed run, read once."""
    return runner.finished(path, run_arrays(path))


def finished_runs(*tasks: str) -> list[FinishedRun]:
    """Completed committed runs of some tasks."""
    return [finished(path) for path, r in committed() if r.task.name in tasks and r.status == "completed"]


@cache
def compared(task: str) -> Comparison:
    """What a task says of its committed runs together."""
    runs = finished_runs(task)
    return type(runs[0].task).compare(runs)


def interval(values: list[float]) -> str:
    """Mean with the half width of its 95% t interval over the seeds; no interval below three seeds."""
    of = student(values)
    return f"{of.centre:.4f}" + ("" if np.isnan(of.half) else f" ± {of.half:.4f}")


def footer(runs: list[FinishedRun]) -> str:
    """What stands below a figure of runs."""
    return figures.footer(run.label for run in runs)


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def metric(group: Group, name: str) -> str:
    """A metric over the seeds of a group."""
    values = [record.metrics[name] for _, record in group]
    if any(value is None for value in values):
        return "-"
    return interval([value for value in values if value is not None])


def milliseconds_per_step(group: Group) -> str:
    """Wall clock of the fits per training step, over all seeds."""
    fits = [fit for _, record in group for fit in record.fits]
    return f"{1000 * sum(fit.seconds for fit in fits) / sum(fit.steps for fit in fits):.1f}"


SHIFTED = [
    *("nll", "nll_clean", "nll_scaled", "accuracy", "accuracy_clean"),
    *("ece", "conformal_coverage", "ood_auroc"),
]
SHIFTED_LINES = ("map", "deep_ensemble", "mc_dropout", "mfvi", "svgd", "sngp")
"""Methods whose curves against severity are drawn: more than six lines cannot be told apart."""
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
    "shift_digits": SHIFTED,
    "shift_fashion_mnist": SHIFTED,
    "shift_cifar10": SHIFTED,
}
"""Metrics shown of each task."""


@cache
def passes() -> dict[str, dict[str, dict[str, float]]]:
    """Task -> method -> its gradients per step and forward passes per image (benchmarks/passes.py)."""
    found: dict[str, dict[str, dict[str, float]]] = {}
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
        if task == "split_mnist" and ("coreset" in task_identity or len(group) < 3):
            continue  # docs/tasks/continual.md has them
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


def against(task: str, baseline: str = "map") -> str:
    """What every method gains on a baseline, paired by seed."""
    names = ["nll", "nll_clean", "accuracy", "ece", "ood_auroc"]
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


def accuracy_matrices(group: Group) -> np.ndarray:
    """A[t, s] of every run, `[R, T, S]`."""
    runs = [finished(path) for path, _ in group]
    return np.array([run.task.accuracy_matrix(run.arrays) for run in runs])


def matrices(task: str) -> str:
    """The accuracy matrix of every choice of settings with three seeds and no coreset, averaged over them."""
    parts = []
    for task_identity, method_identity, group in groups(task):
        if "coreset" in task_identity or len(group) < 3:
            continue
        of_seeds = accuracy_matrices(group)
        mean, worst = of_seeds.mean(0), np.tril(of_seeds, -1).max(initial=0)
        header = ["after step", *(f"pair {s}" for s in range(1, mean.shape[1] + 1))]
        rows = [[str(t), *(f"{a:.3f}" for a in row)] for t, row in enumerate(mean, 1)]
        text = f"### `{method_identity}` on `{task_identity}`\n\nMean over {len(group)} seeds."
        if len(mean) > 1:
            text += f" Largest A[t, s] with s < t in any seed: {worst:.3f}."
        parts.append(f"{text}\n\n{table(header, rows)}")
    return "\n\n".join(parts)


# ---- continual learning

CONTRAST = (
    "split_mnist",
    "split_mnist_multi_head",
    "split_mnist_task_known_at_test",
    "permuted_mnist",
)
SEQUENCES = ("split_mnist", "split_fashion_mnist", *CONTRAST[1:])
CORESET = "coreset=k_center"


def of(task_identity: str, method_identity: str) -> dict[int, tuple[Path, Record]]:
    """Committed runs of one choice of settings, by seed."""
    return {
        record.seed: (path, record)
        for path, record in committed()
        if (record.task.identity, record.method.identity) == (task_identity, method_identity)
    }


def accuracies(task_identity: str, method_identity: str = "mfvi") -> dict[int, float]:
    """Average accuracy after the last step, by seed."""
    runs = of(task_identity, method_identity)
    return {seed: record.metrics["average_accuracy"] or 0.0 for seed, (_, record) in runs.items()}


def continual_runs() -> str:
    """Every committed run of continual learning."""
    rows = []
    for task in SEQUENCES:
        for task_identity, method_identity, group in groups(task):
            minutes = np.mean([record.seconds for _, record in group]) / 60
            names = ("average_accuracy", "minimum_learning_accuracy", "forgetting")
            rows.append(
                [f"`{task_identity}`", f"`{method_identity}`", str(len(group))]
                + [metric(group, name) for name in names]
                + [milliseconds_per_step(group), f"{minutes:.1f}"]
            )
    header = ["task", "method", "seeds", "average accuracy", "least A[t, t]", "forgetting"]
    return table([*header, "ms per step", "minutes per run"], rows)


def continual_pattern() -> str:
    """Average accuracy on the pairs seen so far, step by step, on split_mnist."""
    rows = []
    for task_identity, method_identity, group in groups("split_mnist"):
        if "order=joint" in task_identity or len(group) < 3:
            continue
        matrices = accuracy_matrices(group)
        seen = [matrices[:, t, : t + 1].mean() for t in range(matrices.shape[1])]
        earlier = max(m[t, s] for m in matrices for t in range(len(m)) for s in range(t))
        own = min(m[t, t] for m in matrices for t in range(len(m)))
        rows.append(
            [f"`{method_identity}`", f"`{task_identity}`", *(f"{a:.3f}" for a in (*seen, own, earlier))]
        )
    header = ["method", "task", *(f"step {t}" for t in range(1, 6))]
    return table([*header, "least A[t, t]", "largest A[t, s], s < t"], rows)


def continual_contrast() -> str:
    """What a coreset adds to mfvi, scenario by scenario."""
    rows = []
    for task in CONTRAST:
        plain = accuracies(task)
        cells = [f"`{task}`", str(len(plain)), interval(list(plain.values()))]
        for variant in ("coreset_prior=initial", "coreset_prior=initial,coreset_only=true"):
            gain = differences(accuracies(f"{task}+{CORESET},{variant}"), plain)
            cells.append(interval(gain) if gain else "-")
        rows.append(cells)
    return table(["task", "seeds", "`mfvi`", "gain by a coreset", "gain by a coreset alone"], rows)


def continual_coresets() -> str:
    """Whether a coreset alone does what mfvi with a coreset does, under both priors of the copy."""
    rows = []
    for prior, with_both, alone in (
        ("initial", "coreset_prior=initial", "coreset_prior=initial,coreset_only=true"),
        ("posterior", "", "coreset_only=true"),
    ):
        both = accuracies(f"split_mnist+{CORESET}" + (f",{with_both}" if with_both else ""))
        only = accuracies(f"split_mnist+{CORESET},{alone}")
        gap = differences(both, only)
        _, low, high, _ = student(gap)
        if low >= -0.08 and high <= 0.08:
            agree = "yes"
        else:
            agree = "no" if low > 0.08 or high < -0.08 else "not decided"
        rows.append([prior, *(interval(list(v.values())) for v in (both, only)), interval(gap), agree])
    header = ["prior of the copy", "`mfvi` and coreset", "coreset alone", "difference"]
    return table([*header, "within 0.08?"], rows)


def continual_trace() -> str:
    """The same two variants with one setting changed at a time, seed 0."""
    changes = {
        "nothing": ("", ""),
        "step size 1e-3 in place of 3e-4": ("", "learning_rate=0.001"),
        "400 epochs of the copy in place of 120": ("coreset_epochs=400", ""),
        "4 weight samples in place of 1": ("", "train_samples=4"),
        "initial rho -5 in place of -3": ("", "initial_rho=-5.0"),
    }
    rows = []
    for what, (task, method) in changes.items():
        cells = [what]
        for only in ("", "coreset_only=true"):
            parts = [CORESET, task, "coreset_prior=initial", only]
            identity = "split_mnist+" + ",".join(filter(None, parts))
            found = accuracies(identity, f"mfvi+{method}" if method else "mfvi")
            cells.append(f"{found[0]:.3f}" if 0 in found else "-")
        rows.append(cells)
    return table(["changed", "`mfvi` and coreset", "coreset alone"], rows)


def continual_strengths() -> str:
    """The search for the strength of ewc: validation accuracy on the pairs seen, seed 0."""
    rows = []
    names = ("average_accuracy", "minimum_learning_accuracy", "forgetting")
    for _, _, group in groups("split_mnist"):
        record = next(record for _, record in group if record.seed == min(r.seed for _, r in group))
        if record.method.name == "ewc" and record.task.identity == "split_mnist":
            strength = float(record.method.settings["strength"])
            rows.append((strength, record.validation["average_accuracy"], group))
    best = max(validation for _, validation, _ in rows)
    cells = [
        [f"{strength:g}", str(record_group[0][1].method.settings["fisher"]), f"{validation:.4f}"]
        + [metric(record_group, name) for name in names]
        + ["chosen" if validation == best else ""]
        for strength, validation, record_group in sorted(rows, key=lambda row: row[0])
    ]
    header = ["strength", "Fisher", "validation accuracy, seed 0", "average accuracy", "least A[t, t]"]
    return table([*header, "forgetting", ""], cells)


def continual_entropy() -> str:
    """Predictive entropy on the training inputs of step 2 before it, and its ratio, permuted over split."""
    rows, logs = [], {}
    for task in ("split_mnist", "permuted_mnist"):
        runs = of(task, "mfvi")
        values = {seed: record.validation["next_task_entropy"] for seed, (_, record) in runs.items()}
        logs[task] = {seed: float(np.log(value)) for seed, value in values.items()}
        rows.append([f"`{task}`", str(len(values)), interval(list(values.values()))])
    gap = differences(logs["permuted_mnist"], logs["split_mnist"])
    middle, low, high = np.exp(student(gap)[:3])
    rows.append(["ratio", str(len(gap)), f"{middle:.1f} ({low:.1f} to {high:.1f})"])
    published = {"`split_mnist`": "0.003", "`permuted_mnist`": "0.45", "ratio": "150"}
    return table(["", "seeds", "nats", "published"], [[*row, published[row[0]]] for row in rows])


def continual_floor() -> str:
    """Time of a training step against the plain network's (benchmarks/peers.py), and in the runs."""
    measured, rows = steps_measured(), []
    for task, network in (("split_mnist", "MLP 784-256-256-10"), ("permuted_mnist", "MLP 784-100-100-10")):
        case = measured[network, 1]
        runs = list(of(task, "mfvi").values())
        rows.append(
            [
                *(f"`{task}`", network, str(case["batch"]), f"{case['floor']:.1f}", f"{case['mfvi']:.1f}"),
                *(f"{case['mfvi'] / case['floor']:.2f}", milliseconds_per_step(runs)),
            ]
        )
    header = ["task", "network", "batch", "floor, ms", "`mfvi`, ms", "/ floor", "ms per step within the runs"]
    return table(header, rows)


def continual_charts() -> dict[str, tuple[Any, list[FinishedRun]]]:
    """Accuracy of every variant with three seeds or none, and the gradients of step 2; with their runs."""
    shown, curves = [], []
    for path, record in committed():
        task, method = record.task, record.method
        if task.name not in SEQUENCES or "test_samples" in task.identity or "coreset_epochs" in task.identity:
            continue
        if method.identity.startswith(("mfvi+", "radial", "map", "laplace", "mixture_vi")):
            continue
        if (
            method.name == "ewc"
            and task.name == "split_mnist"
            and len(of(task.identity, method.identity)) < 3
        ):
            continue
        shown.append(finished(path))
        if task.identity in ("split_mnist", "permuted_mnist") and method.identity == "mfvi":
            curves.append(finished(path))
    return {
        "accuracy": (continual.accuracies(shown), shown),
        "gradients": (continual.gradients(curves), curves),
    }


# ---- active learning and testing


def active_said(task: str) -> str:
    """What `bench figures RUN.. --to DIR` says of the committed runs of a task."""
    return "\n".join(f"- {sentence}" for sentence in compared(task).sentences)


def active_regression() -> str:
    """The three objectives, for every proposal that has a committed run."""
    parts = []
    for task_identity, method_identity, group in groups("active_regression"):
        for _, record in group:
            m = record.metrics
            rows = [
                [sign]
                + [f"{m[f'{name}_{measure}']:.4f}" for measure in ("test_error", "bias", "biased")]
                + [f"{m[f'{name}_lower_error']:.0%}" if name != "plain" else "-"]
                + [f"{m[f'{name}_overfitting_bias']:.4f}"]
                for name, sign in active.OBJECTIVES.items()
            ]
            header = ["objective", "test error", "largest bias", "share of M that is biased"]
            text = (
                f"`{method_identity}` on `{task_identity}`, seed {record.seed}, {record.seconds:.0f} s. "
                f"Test error of the line fitted to the whole pool: {m['full_pool_test_error']:.4f}. "
                f"Variance of LURE below that of PURE: at {m['lure_lower_variance']:.1%} of M, largest "
                f"ratio {m['variance_ratio']:.2f}."
            )
            names = ["share of M with lower test error than R~", "largest overfitting bias"]
            parts.append(f"{text}\n\n{table([*header, *names], rows)}")
    return "\n\n".join(parts)


def active_learning(task: str) -> str:
    """Test NLL, accuracy and overfitting bias of the three objectives, and what removing the bias costs."""
    rows = []
    for task_identity, method_identity, group in groups(task):
        minutes = np.mean([record.seconds for _, record in group]) / 60
        for name, sign in active.OBJECTIVES.items():
            measures = ("mean_nll", "last_nll", "mean_accuracy", "last_accuracy", "overfitting_bias")
            rows.append(
                [f"`{method_identity}`", f"`{task_identity}`", str(len(group)), sign]
                + [metric(group, f"{measure}_{name}") for measure in measures]
                + [metric(group, f"cost_of_{name}") if name != "plain" else "-", f"{minutes:.1f}"]
            )
    header = [
        "method",
        "task",
        "seeds",
        "objective",
        "mean NLL",
        "last NLL",
        "mean accuracy",
        "last accuracy",
    ]
    return table([*header, "overfitting bias", "cost in mean NLL", "minutes per run"], rows)


def active_testing(task: str) -> str:
    """Mean squared error over that of uniform draws, of every committed run, and the biases."""
    rows, biases, causes = [], [], []
    for _, method_identity, group in groups(task):
        for path, record in group:
            m = record.metrics
            arrays = finished(path).arrays
            labels, scores = arrays["full_labels"], arrays["full_scores"].astype(float)
            losses = -metrics.restore(arrays["full_log_probs"])[np.arange(len(labels)), labels]
            ten = np.sort(losses**2)[-10:].sum() / (losses**2).sum()
            cells = [
                f"{scores.mean():.2g}",
                f"{scores.max():.2g}",
                f"{np.corrcoef(scores, losses)[0, 1]:.2f}" if np.ptp(scores) else "-",  # no spread, no order
            ]
            causes.append([f"`{method_identity}`", str(record.seed), *cells, f"{ten:.0%}"])
            cells = [f"`{method_identity}`", str(record.seed), f"{m['risk']:.4f}", f"{m['accuracy']:.4f}"]
            for guide in active.GUIDES:
                low, middle, high = (m[f"ratio_{guide}{end}"] for end in ("_low", "", "_high"))
                first = m[f"first_draw_ratio_{guide}"]
                cells += [f"{middle:.3g} ({low:.3g} to {high:.3g})", "-" if first is None else f"{first:.3g}"]
            rows.append([*cells, f"{record.seconds / 60:.1f}"])
            biases.append(
                [f"`{method_identity}`", str(record.seed)]
                + [f"{m[f'bias_{e}']:.4f} ± {m[f'bias_{e}_error']:.4f}" for e in active.OBJECTIVES]
            )
    header = ["method", "seed", "risk", "accuracy"]
    for guide in active.GUIDES:
        header += [f"{guide}: ratio at the last M (95%)", "exact after one draw"]
    ratios = table([*header, "minutes"], rows)
    signs = [f"risk minus {name}" for name in active.OBJECTIVES.values()]
    header = ["method", "seed", "mean BALD, nats", "largest", "correlation with the loss"]
    return "\n\n".join(
        [
            ratios,
            "Scores and losses of the full model, and the share of the ten largest in all squared losses:",
            table([*header, "ten largest"], causes),
            "Small model, softmax, mean over the trajectories ± its standard error:",
            table(["method", "seed", *signs], biases),
        ]
    )


# ---- singular models


@cache
# ---- noise of gradients


def gradient_variances() -> str:
    """Variances of the gradient at two sigmas, their ratio, and the angle between gradients of two draws."""
    rows = []
    for task_identity, method_identity, group in groups("gradient_variance"):
        tenth, one, rise = (
            gradient_variance.geometric(np.array([record.metrics[name] for _, record in group]))
            for name in ("variance_at_tenth", "variance_at_one", "rise")
        )
        cells = [f"{tenth.centre:.2e}", f"{one.centre:.2e}", f"{rise:.3g}"]
        cells += [metric(group, "cosine_at_tenth"), metric(group, "cosine_at_one")]
        minutes = np.mean([record.seconds for _, record in group]) / 60
        name = f"`{method_identity}`, `{task_identity}`"
        rows.append([name, str(len(group)), *cells, metric(group, "distance"), f"{minutes:.1f}"])
    header = ["method, task", "seeds", "variance at sigma 0.1", "at sigma 1", "rise", "cosine at 0.1", "at 1"]
    return table([*header, "distance, sigma", "minutes per run"], rows)


# ---- closed forms and products


def closed_form(task: str) -> str:
    """Every metric of the committed run of a study in closed form."""
    rows = [
        [f"`{name}`", f"{run.metrics[name]:.4g}", metric.unit, metric.description]
        for run in finished_runs(task)
        for name, metric in run.task.spec.metrics.items()
    ]
    return or_none(["metric", "value", "unit", "what it is"], rows)


def trained_products() -> str:
    """What trained product matrices are like, by network."""
    rows = []
    for run in finished_runs("trained_product_matrix"):
        cells = (run.metrics[name] for name in TRAINED)
        shown = ["-" if value is None else f"{value:.3g}" for value in cells]
        rows.append([run.task.title, f"`{run.method_identity}`", str(run.seed), *shown])
    return or_none(["network", "method", "seed", *(f"`{name}`" for name in TRAINED)], sorted(rows))


TRAINED = ("off_diagonal", "sharing_nothing", "distance", "multimodal", "units_on", "units_on_sd", "accuracy")
"""Metrics shown of trained product matrices."""


def truncation() -> str:
    """Training accuracy of mfvi with truncated noise, by the bound and the number of weight samples."""
    found = {}
    for task_identity, _, group in groups("training_dynamics_digits"):
        method = group[0][1].method.settings
        if task_identity == "training_dynamics_digits+epochs=50":
            found[method["truncation"], method["train_samples"]] = group
    rows = [
        ["no bound" if bound is None else f"{bound:g}"]
        + [metric(found[bound, samples], name) for name in ("best_accuracy", "nll") for samples in (1, 4)]
        for bound in (None, 1.0, 0.5, 0.25)
    ]
    columns = [f"{name}, S = {samples}" for name in ("best accuracy", "NLL trained on") for samples in (1, 4)]
    return table(["noise at most", *columns], rows)


def training_dynamics() -> str:
    """Where a fit ends, and where its training accuracy was best."""
    names = ["best_accuracy", "best_epoch", "accuracy", "nll_at_best", "nll"]
    names += ["prior_cross_entropy_at_best", "prior_cross_entropy", "gradient_sd_at_best", "gradient_sd"]
    rows = []
    for task in ("training_dynamics", "training_dynamics_digits"):
        for task_identity, method_identity, group in groups(task):
            if task_identity != task:  # those of the table of truncation
                continue
            minutes = np.mean([record.seconds for _, record in group]) / 60
            row = [f"`{method_identity}`, `{task_identity}`", str(len(group))]
            rows.append(row + [metric(group, name) for name in names] + [f"{minutes:.1f}"])
    return table(["method, task", "seeds", *names, "minutes per run"], rows)


def singular_runs() -> list[singular.Run]:
    """Committed runs of singular_evidence, on data sets that agree."""
    own = [path for path, record in committed() if record.task.name == "singular_evidence"]
    runs = [singular_evidence.row(finished(path)) for path in own]
    singular_table.check(runs)
    return runs


def or_none(header: list[str], rows: list[list[str]]) -> str:
    """A table, or a sentence in place of an empty one."""
    return table(header, rows) if rows else "No such run is committed yet."


def singular_rows() -> str:
    """Every committed run beside its published row."""
    return or_none(singular_table.HEADER, singular_table.rows(singular_runs()))


def singular_claims() -> str:
    """What section 7 claims, on our rows at the preset paper and on the published ones of the same pairs."""

    def pair(claim: claims.Claim) -> tuple[Any, ...]:
        return (
            claim.what,
            claim.triplet,
            singular_table.parsed(claim.gamma),
            singular_table.parsed(claim.gaussian),
        )

    theirs = {pair(c): f"{c.difference:.2f}" for c in claims.published_claims()}
    rows = []
    for claim in claims.claims(run for run in singular_runs() if run.preset == "paper"):
        cells = [claim.what, str(claim.triplet), f"`{claim.gamma}`", f"`{claim.gaussian}`"]
        rows.append([*cells, f"{claim.difference:.2f}", theirs.get(pair(claim), "-")])
    return or_none(["claim", "model, truth, prior", "gamma", "Gaussian", "difference", "published"], rows)


def singular_published() -> str:
    """How far the published mean, sd and count show the claims of section 7."""
    found = Counter((c.what, c.triplet.model, c.difference.sign()) for c in claims.published_claims())
    rows = [
        [what, f"`{model}`", *(str(found[what, model, sign]) for sign in (1, 0, -1))]
        for what, model in dict.fromkeys(key[:2] for key in found)
    ]
    return table(["claim", "model", "pairs that show it", "do not", "contradict it"], rows)


def singular_rises() -> str:
    """By how much Psi rises under the preset standard."""
    rows = []
    for rise in claims.rises(singular_runs()):
        moments = [
            "-" if of is None else f"{of.mean:.2f} (sd {of.sd or 0:.2f}, {of.size})"
            for of in (rise.paper, rise.standard)
        ]
        row = [str(rise.triplet), f"`{rise.method}`", rise.preset, *moments]
        rows.append([*row, "-" if rise.difference is None else f"{rise.difference:.2f}"])
    header = ["model, truth, prior", "method", "preset", "paper (sd, converged)", "that preset", "rise"]
    return or_none(header, rows)


def singular_slopes() -> str:
    """Slopes of Psi in log n against -lambda."""
    rows = []
    for s in claims.slopes(singular_runs()):
        cells = [str(s.triplet), s.preset, f"`{s.method}`", ", ".join(map(str, s.sizes))]
        cells += [f"{s.slope:.2f} ± {s.standard_error:.2f}", str(s.repetitions)]
        rows.append([*cells, "-" if s.expected is None else f"{s.expected:.2f}"])
    header = ["model, truth, prior", "preset", "method", "n", "slope ± standard error", "repetitions"]
    return or_none([*header, "-lambda"], rows)


def singular_charts() -> dict[str, Any]:
    """Predictive bands of the rows of Figs 1 and 2, and Psi against n."""
    shown = [run for run in singular_runs() if (run.triplet, singular_table.parsed(run.method)) in FIGURES]
    return charts.predictive_charts(shown) | charts.psi_charts(singular_runs())


def singular_labels(name: str) -> Iterator[figures.Label]:
    """Of the runs in a figure."""
    for run in singular_runs():
        alike = [other for other in singular_runs() if other.triplet == run.triplet]
        if name in charts.predictive_charts([run]) or name in charts.psi_charts(alike):
            yield run.method, "singular_evidence", run.preset, run.seed


def singular_figures() -> str:
    """Links to the figures."""
    links = [f"![{name}](../figures/{name}.svg)" for name in singular_charts()]
    return "\n\n".join(links) or "No such run is committed yet."


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


# ---- split_mnist


def terms(task: str) -> str:
    """Likelihood and prior term of the loss in the first and last epoch of step 2, per example."""
    rows = []
    for task_identity, method_identity, group in groups(task):
        if task_identity != task or group[0][1].method.name not in ("mfvi", "radial"):
            continue
        files = [path / "curves.csv" for path, _ in group]
        curves = [list(csv.DictReader(file.open())) for file in files if file.exists()]
        if not curves:  # of a submission, which has none of the training
            continue
        cells = []
        for epoch in (1, 10):
            for curve in ("likelihood_term", "prior_term"):
                found = [
                    float(row["value"])
                    for rows_of_seed in curves
                    for row in rows_of_seed
                    if (row["curve"], row["series"], float(row["x"])) == (curve, "step 2", epoch)
                ]
                cells.append(np.mean(found))
        rows.append([f"`{method_identity}`", *(f"{cell:.2f}" for cell in cells), f"{sum(cells[2:]):.2f}"])
    header = ["method", "likelihood, epoch 1", "prior, epoch 1", "likelihood, epoch 10", "prior, epoch 10"]
    return table([*header, "sum, epoch 10"], rows)


def spread_of_draws(task: str) -> str:
    """How far draws of the methods spread before any training: what a posterior of that width may move."""
    rows = []
    for name, rho in (("mfvi", -3.0), ("radial", -4.0)):
        scale = float(np.log1p(np.exp(rho)))
        widths = [scale / (np.sqrt(d) if name == "radial" else 1) for d in (200_704, 65_536, 2_560, 256, 10)]
        rows.append([f"`{name}`", f"{rho:g}", f"{scale:.4f}", *(f"{w:.1e}" for w in widths)])
    header = ["method", "initial rho", "softplus(rho)"]
    return table([*header, *(f"D = {d:,}" for d in (200_704, 65_536, 2_560, 256, 10))], rows)


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
            f"{row['ratio']:.2f}",
            f"{row['goal']:.2f}",
            row["verdict"],
        ]
        for row in measured["goals"]
    ]
    header = ["what", "method", "against", "ratio", "goal: at most", "verdict"]
    others = ", ".join(f"{name} {v}" for name, v in measured["versions"].items() if name != "posterior-bench")
    return f"{table(header, rows)}\n\n{measured['date']}, {measured['device']}, one thread; {others}."


def method_list() -> str:
    """All methods."""
    rows = [
        [f"`{name}`", entry.cls.approximates, ", ".join(sorted(entry.provides))]
        for name, entry in methods().items()
    ]
    return table(["method", "approximates", "capabilities"], rows)


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


def tuning() -> str:
    """The committed searches; methods of one task whose budgets differ are not comparable."""
    results = [tune.read(path) for path in sorted(registry.TUNED.glob("*/*.json"))]
    if not results:
        return "No search is committed yet: all settings are published or untuned."
    rows = []
    for result in results:
        budgets = {other.budget for other in results if other.task == result.task}
        values = {c.number: "-" if c.value is None else f"{c.value:.4f}" for c in result.configurations}
        settings = result.configurations[result.chosen_number].settings
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
                listed if result.chosen_number else "untuned ones",
                f"{lost:.0%}",
            ]
        )
    header = ["task", "method", "budget", "criterion, better if", "untuned", "best", "chosen", "diverged"]
    return table(header, rows)


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


# ---- retinopathy


def retinopathy_table(task: str) -> str:
    """AUC at the shares of Table 4.1, referred by mutual information, beside the published one."""
    shares = referral_comparison.PUBLISHED
    names = ["auc_0", *(f"auc_{share}_information" for share in shares[1:])]
    rows = []
    for _, method_identity, group in groups(task):
        run = finished(group[0][0])
        if run.variant:
            continue
        published = referral_comparison.TABLE_4_1.get(referral_comparison.row_of(run))
        said = "/".join(f"{value / 100:.3f}" for value in published) if published else "-"
        rows.append([f"`{method_identity}`", *(metric(group, name) for name in names), said])
    return table(["method", *(f"{share}% referred" for share in shares), "published"], rows)


def retinopathy_ideal() -> str:
    """What the best reader of synthetic eyes reaches."""
    auc, error = fundus_population.bayes_auc(batches=5)
    return f"The ideal reader has an AUC of {auc:.4f} (standard error of this number: {error:.4f})."


def retinopathy_controls(task: str) -> str:
    """AUC of the rest, half referred: by the uncertainty, by one shuffled and by one inverted."""
    rows = []
    for line, runs in by_task(finished_runs(task)).get(task, {}).items():
        found: dict[str, list[float]] = {}
        for run in runs.values():
            controls = {s: v for curve, s, x, v in run.curves if (curve, x) == (referral.CONTROL, 50)}
            name = next(iter(controls)).partition(",")[0]
            points = {(s, x): v for curve, s, x, v in run.curves if curve == referral.AUC}
            values = (points[name, 0], points[name, 50], *controls.values())
            for column, value in zip(("nothing", "honest", "shuffled", "inverted"), values, strict=True):
                found.setdefault(column, []).append(value)
        rows.append([f"`{line}`", name, *map(interval, found.values())])
    header = ["method", "referred by", "nothing referred", "half referred", "shuffled", "inverted"]
    return table(header, rows)


def retinopathy_mistakes(run: FinishedRun, number: int = 10, band: int = 14) -> Image.Image:
    """The photographs that a run reads wrongly, a row of the most and one of the least certain mistakes."""
    images, _ = run.task.own_data("test")
    rows = referral.mistakes(referral.Readings.of(run.arrays), number)
    side = images[0].shape[0]
    sheet = Image.new("RGB", (number * side, len(rows) * (side + band)))
    for at, (title, of_row) in enumerate(rows.items()):
        top = at * (side + band)
        ImageDraw.Draw(sheet).text((4, top + 2), title, fill=(230, 230, 230))
        for column, row in enumerate(of_row):
            sheet.paste(Image.fromarray(np.asarray(images[row])), (column * side, top + band))
    return sheet


def compared_table(task: str) -> str:
    """The table in which a task sets its committed runs side by side."""
    if not finished_runs(task):
        return "No run is committed yet."
    found = compared(task)
    return table(found.header, found.rows)


def results_if_any(task: str) -> str:
    """Main metrics of the committed runs of a task, if there are any."""
    return results(task) if finished_runs(task) else "No run is committed yet."


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


CONTESTANTS = {
    "bench.peers.LaplaceTorch+learning_rate=0.01,optimizer=amsgrad": "laplace+curvature=full",
    "bench.peers.PosteriorsLaplace+learning_rate=0.01,optimizer=amsgrad": "laplace+curvature=full",
    "bench.peers.PosteriorsVI": "mfvi",
    "bench.peers.PosteriorsSGLD": "sgld",
}
"""Posterior of another library -> ours of the same settings."""


def contestants() -> str:
    """Distance to the exact posterior of theirs and of ours, and the difference, paired by seed."""
    rows = []
    for task in ("fidelity_toy", "fidelity_iris"):
        for theirs, ours in CONTESTANTS.items():
            pair = [
                {seed: float(record.metrics["wasserstein"]) for seed, (_, record) in of(task, name).items()}
                for name in (theirs, ours)
            ]
            found = student(differences(*pair))
            cells = [interval(list(values.values())) for values in pair]
            verdict = "differ" if found.sign() else "agree"
            rows.append([f"`{task}`", f"`{theirs}`", f"`{ours}`", *cells, f"{found:.2g}", verdict])
    header = ["task", "theirs", "ours", "distance of theirs", "distance of ours", "difference", "within it"]
    return table(header, rows)


WIDTHS = {
    "mfvi": "`mfvi`",
    "radial": "`radial`",
    "invariant_vi": "`invariant_vi`",
    "invariant_vi+points=16": "`invariant_vi`, 16 points",
}
"""Method identity -> its name in the study of networks by width."""
EXACT = "second run of the reference"


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


QUESTIONS = {
    "Remembering": ("split_digits", "continual"),
    "Shift": ("shift_digits", "shift"),
    "New classes": ("ood_digits", "ood"),
    "Referral": ("retinopathy_synthetic", "retinopathy"),
    "Active testing": ("active_testing_digits", "active_testing"),
    "Fidelity": ("fidelity_digits", "fidelity"),
}
"""Question -> the task that stands for it, and its page."""


def questions() -> str:
    """Every method on one task of each question: the main metric, and the ranks that its seeds leave open."""
    cells: dict[str, dict[str, str]] = {}
    heads = []
    for question, (task, folder) in QUESTIONS.items():
        found = {m: group for t, m, group in groups(task) if t == task and m in methods()}
        if not found:
            continue
        run = finished(next(iter(found.values()))[0][0])
        main = run.task.spec.main_metric
        higher = run.task.spec.metrics[main].higher_is_better
        runs = {m: [ranking.Run(r.metrics.get(main)) for _, r in group] for m, group in found.items()}
        standing = ranking.rank([ranking.Entry(*entry) for entry in runs.items()], higher)
        for place in standing.places:
            ranks = "not ranked" if place.ranks is None else "{} to {}".format(*place.ranks)
            values = [one.value for one in runs[place.name] if one.value is not None]
            mean = interval(values) if values else "-"
            cells.setdefault(place.name, {})[question] = f"{mean} ({ranks})"
        better = "higher" if higher else "lower"
        heads.append(
            f"[{question}](docs/tasks/{folder}.md): {main.replace('_', ' ')} on `{task}`, {better} is better"
        )
    shown = [question for question in QUESTIONS if any(question in row for row in cells.values())]
    rows = [[f"`{method}`", *(cells[method].get(q, "-") for q in shown)] for method in sorted(cells)]
    return table(["method", *shown], rows) + "\n\n" + "\n".join(f"- {head}" for head in heads)


# ---- findings


@cache
def all_findings() -> list[Finding]:
    """What the committed records say of every claim."""
    return [findings.find(claim) for claim in findings.read(CLAIMS)]


def protocols() -> dict[str, str]:
    """Sentence on a smaller protocol -> its number, in the order of the claims."""
    said = [finding.claim.same or finding.claim.other for finding in all_findings()]
    return {sentence: str(number) for number, sentence in enumerate(dict.fromkeys(filter(None, said)), 1)}


def findings_counts() -> str:
    """How many headlines have which verdict, and how many of these verdicts chance may have made."""
    asked = [finding for finding in all_findings() if finding.claim.protocol != "other"]
    count = Counter(finding.verdict for finding in asked)
    exact = Counter(finding.verdict for finding in asked if finding.is_exact)
    judged = sum(finding.verdict != "no verdict" and not finding.is_exact for finding in all_findings())
    words = ", ".join(
        f"**{count[word]} {word}**"
        + (f" ({exact[word]} of them exactly, in closed form)" if exact[word] else "")
        for word in ("contradicted", "reproduced")
    )
    return (
        f"Of {len(all_findings())} headlines {len(asked)} are put to their own protocol, or to a smaller one "
        f"that answers the same question: {words}, {count['undecided']} undecided, {count['no verdict']} "
        "without the three seeds, or the mixed chains, that a verdict takes. The other "
        f"{len(all_findings()) - len(asked)} are so far put to a smaller protocol that may answer another "
        f"question, and stay open. {judged} intervals of 95% stand behind all this: at most "
        f"{0.05 * judged:.1f} of them are expected to miss their true value."
    )


def contrast(claim: Claim) -> str:
    """What is compared, and where it should lie."""
    names = [f"`{term.metric or claim.metric}`" for term in claim.terms]
    what = claim.contrast or " minus ".join(dict.fromkeys(names))
    if claim.contrast is None and len(claim.terms) == 2 and names[0] == names[1]:
        what += ", first minus second"
    return f"{what}: {claim.expected}"


def ours(finding: Finding) -> str:
    """The contrast with its interval and what it is over."""
    found = finding.interval
    if found is None:
        return "no run"
    centre, low, high = (
        "-" if np.isnan(x) else f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.3g}" for x in found[:3]
    )
    between = "" if finding.is_exact or np.isnan(found.low) else f" ({low} to {high})"
    return f"{centre}{between}, {found.basis}"


def verdict(finding: Finding) -> str:
    """The verdict; where undecided, the seeds that would decide."""
    if finding.verdict != "undecided":
        return finding.missing or finding.verdict
    unit = finding.claim.per or "seed"
    return (
        f"undecided; {finding.needed} {unit}s"
        if finding.needed
        else f"undecided; over {findings.MOST} {unit}s"
    )


def findings_table(word: Word | None) -> str:
    """The claims of a verdict; None is those whose protocol may answer another question."""
    rows = []
    for finding in all_findings():
        claim = finding.claim
        if (claim.protocol == "other") != (word is None) or word not in (None, finding.verdict):
            continue
        protocol = protocols().get(claim.same or claim.other or "")
        rows.append(
            [
                *(claim.claim, claim.source, contrast(claim), ours(finding)),
                *(verdict(finding), f"[{protocol}](#protocols)" if protocol else "paper"),
                "<br>".join(f"`{command}`" for command in finding.commands()),
            ]
        )
    return or_none(["claim", "source", "contrast", "ours", "verdict", "protocol", "commands"], rows)


def findings_protocols() -> str:
    """The sentences on smaller protocols, by their numbers."""
    return "\n".join(f"{number}. {sentence}." for sentence, number in protocols().items())


def findings_thresholds() -> str:
    """Why every number that is not 0 is what it is."""
    found: dict[tuple[str, str], list[str]] = {}
    for claim in (finding.claim for finding in all_findings()):
        if not claim.expected.endswith(" 0") or not claim.why.startswith("Only the"):
            found.setdefault((contrast(claim), claim.why), []).append(claim.source)
    return table(
        ["contrast", "source", "why this number"],
        [[contrast, "; ".join(dict.fromkeys(sources)), why] for (contrast, why), sources in found.items()],
    )


def said_if_any(task: str) -> str:
    """What `bench figures RUN.. --to DIR` says of the committed runs of a task."""
    return active_said(task) if finished_runs(task) else "No run is committed yet."


PARTS: dict[str, Callable[[], str]] = {
    "small fits": small_fits,
    "codes": codes.table,
    "methods": method_list,
    "method sources": method_sources,
    "method costs": method_costs,
    "speed": speed,
    "terms split_mnist": lambda: terms("split_mnist"),
    "spread": lambda: spread_of_draws("split_mnist"),
    "results split_mnist": lambda: results("split_mnist"),
    "results toy_regression": lambda: results("toy_regression"),
    "results iris_depth": lambda: results("iris_depth"),
    "regressions diabetes_regression": lambda: regressions("diabetes_regression"),
    "results retinopathy_synthetic": lambda: results("retinopathy_synthetic"),
    "retinopathy ideal": retinopathy_ideal,
    "retinopathy table": lambda: retinopathy_table("retinopathy_synthetic"),
    "retinopathy controls": lambda: retinopathy_controls("retinopathy_synthetic"),
    "retinopathy said": lambda: said_if_any("retinopathy_synthetic"),
    "robustness": lambda: compared_table("retinopathy_robustness"),
    "robustness said": lambda: said_if_any("retinopathy_robustness"),
    "results ood_digits": lambda: results_if_any("ood_digits"),
    "results shift_digits": lambda: results_if_any("shift_digits"),
    "against shift_digits": lambda: against("shift_digits"),
    "results shift_fashion_mnist": lambda: results_if_any("shift_fashion_mnist"),
    "results shift_cifar10": lambda: results_if_any("shift_cifar10"),
    "fidelity": fidelity,
    "contestants": contestants,
    "widths": widths,
    "widths said": widths_said,
    "mean field cost": lambda: compared_table("mean_field_cost"),
    "mean field cost said": lambda: said_if_any("mean_field_cost"),
    "questions": questions,
    "findings counts": findings_counts,
    "findings contradicted": lambda: findings_table("contradicted"),
    "findings reproduced": lambda: findings_table("reproduced"),
    "findings undecided": lambda: findings_table("undecided"),
    "findings without verdict": lambda: findings_table("no verdict"),
    "findings of another question": lambda: findings_table(None),
    "findings protocols": findings_protocols,
    "findings thresholds": findings_thresholds,
    "chains toy_regression": lambda: chains("toy_regression"),
    "chains iris_depth": lambda: chains("iris_depth"),
    "continual runs": continual_runs,
    "continual pattern": continual_pattern,
    "continual contrast": continual_contrast,
    "continual coresets": continual_coresets,
    "continual trace": continual_trace,
    "continual strengths": continual_strengths,
    "continual entropy": continual_entropy,
    "continual floor": continual_floor,
    "active regression": active_regression,
    "active learning": lambda: active_learning("active_mnist"),
    "active learning said": lambda: active_said("active_mnist"),
    "active testing": lambda: active_testing("active_testing_mnist"),
    "active testing said": lambda: active_said("active_testing_mnist"),
    "gradient variance": gradient_variances,
    "gradient variance said": lambda: active_said("gradient_variance"),
    "training dynamics": training_dynamics,
    "invariance gap": lambda: closed_form("invariance_gap"),
    "product matrix": lambda: closed_form("product_matrix"),
    "trained product matrix": trained_products,
    "truncation": truncation,
    "singular rows": singular_rows,
    "singular claims": singular_claims,
    "singular published": singular_published,
    "singular rises": singular_rises,
    "singular slopes": singular_slopes,
    "singular figures": singular_figures,
    "matrices split_mnist": lambda: matrices("split_mnist"),
    "tuning": tuning,
}


def page(text: str) -> str:
    """A page with its generated parts written anew."""

    def part(match: re.Match[str]) -> str:
        return f"<!-- generated: {match[1]} -->\n{PARTS[match[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- generated: (.+?) -->\n.*?<!-- end -->", part, text, flags=re.DOTALL)


def draw() -> None:
    """Draws the figures that a page shows, from the records of seed 0."""
    folder = ROOT / "docs" / "figures"
    identities = ("toy_regression", "toy_regression+layers=3")
    toys = [r for r in finished_runs("toy_regression") if r.task_identity in identities and not r.seed]
    figures.save(type(toys[0].task).compare(toys).charts, folder, footer(toys))
    for name, (chart, runs) in continual_charts().items():
        figures.save({f"continual-{name}": chart}, folder, footer(runs))
    for task in ("active_mnist", "active_testing_mnist", "gradient_variance", "training_dynamics_digits"):
        figures.save(compared(task).charts, folder, footer(finished_runs(task)))
    for run in finished_runs("invariance_gap", "product_matrix"):
        drawn = run.task.figures(run.arrays)
        shown = {f"{run.task_name}-{name}": chart for name, chart in drawn.items()}
        figures.save(shown, folder, footer([run]))
    if runs := finished_runs("trained_product_matrix"):
        figures.save(compared("trained_product_matrix").charts, folder, footer(runs))
    if runs := finished_runs("mean_field_cost"):
        drawn = {f"mean_field_cost-{name}": c for name, c in compared("mean_field_cost").charts.items()}
        figures.save(drawn, folder, footer(runs))
    if runs := [r for r in finished_runs("fidelity_toy") if r.method_identity in WIDTHS]:
        figures.save({"fidelity_toy-widths": widths_chart()}, folder, footer(runs))
    if runs := [r for r in finished_runs("shift_digits") if r.method_identity in SHIFTED_LINES]:
        figures.save(type(runs[0].task).compare(runs).charts, folder, footer(runs))
        shown = next(run for run in runs if run.method_identity == "map" and run.seed == 0)
        drawn = shown.task.figures(shown.arrays)
        figures.save({"shift_digits-map-reliability": drawn["reliability"]}, folder, footer([shown]))
    for name, chart in singular_charts().items():
        figures.save({name: chart}, folder, figures.footer(singular_labels(name)))
    fundus.contact_sheet().save(folder / "retinopathy" / "contact-sheet.png")
    if runs := finished_runs("retinopathy_synthetic"):
        figures.save(compared("retinopathy_synthetic").charts, folder, footer(runs))
        shown = next(run for run in runs if run.line == "radial")
        retinopathy_mistakes(shown).save(folder / "retinopathy_synthetic-mistakes.png")
    for run in (run for run in finished_runs("active_regression") if run.seed == 0):
        drawn = run.task.figures(run.arrays)
        shown = {f"{run.task_identity}-{name}": drawn[name] for name in ("bias", "variance", "test_error")}
        figures.save(shown, folder, footer([run]))
    for run in finished_runs("split_mnist"):
        name = f"{run.task_identity}-{run.method_identity}-accuracy_matrix"
        if run.seed == 0 and name in SPLIT_MNIST.read_text():
            figures.save({name: run.task.figures(run.arrays)["accuracy_matrix"]}, folder, footer([run]))
    shown = "".join(path.read_text() for path in (ROOT / "docs").rglob("*.md"))
    for path in folder.glob("*.*"):
        if f"figures/{path.name})" not in shown:
            path.unlink()


def main() -> int:
    """Writes or checks every page."""
    stale = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        old = path.read_text()
        new = page(old)
        if new != old:
            stale.append(str(path.relative_to(ROOT)))
            if "--check" not in sys.argv:
                path.write_text(new)
    if "--check" not in sys.argv:
        draw()
        print("\n".join(f"wrote {name}" for name in stale) or "everything is current")
        return 0
    if stale:
        print(f"not current: {', '.join(stale)}; run python docs/generate.py")
    return bool(stale)


if __name__ == "__main__":
    sys.exit(main())
