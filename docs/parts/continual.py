"""Continual learning: accuracies step by step, what coresets add, strengths of `ewc`, terms of the loss."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from typing import Any

import numpy as np
from parts.evidence import (
    EWC,
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
    table,
)
from parts.methods import steps_measured

from bench.contract import FinishedRun
from bench.intervals import differences, student
from bench.leaderboard.evidence.store import run_curves
from bench.studies import continual

SPLIT_MNIST = ROOT / "docs" / "tasks" / "split_mnist.md"


SEQUENCES = (
    *("split_mnist", "split_fashion_mnist", "split_mnist_multi_head", "split_mnist_task_known_at_test"),
    *("split_fashion_mnist_multi_head", "split_fashion_mnist_task_known_at_test", "permuted_mnist"),
)
CONTRAST = [task for task in SEQUENCES if task != "split_fashion_mnist"]
"""Tasks of the table of what other evaluations see."""


CORESET = "coreset=k_center"

PUBLISHED = (
    "epochs=120,batch_size=null",
    "mfvi+learning_rate=0.001,train_samples=10,initial_rho=-2.974,pretrain_epochs=120",
)
"""What the preset paper adds to the identities of `split_mnist` and of `mfvi`."""


def accuracy_matrices(group: Group) -> np.ndarray:
    """A[t, s] of every run, `[R, T, S]`."""
    runs = [finished(path) for path, _ in group]
    return np.array([run.task.accuracy_matrix(run.arrays) for run in runs])


def matrices(task: str) -> str:
    """The accuracy matrix of every choice of settings with three seeds and no coreset, averaged over them."""
    parts = []
    for task_identity, method_identity, group in groups(task):
        if "coreset" in task_identity or len(group) < 3 or is_of_a_search(task, method_identity):
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


def accuracies(task_identity: str, method_identity: str = "mfvi") -> dict[int, float]:
    """Average accuracy after the last step, by seed; 0 of a run that diverged."""
    runs = by_seed(task_identity, method_identity)
    return {seed: record.metrics["average_accuracy"] or 0.0 for seed, (_, record) in runs.items()}


def transfers(task_identity: str) -> list[float]:
    """Forward transfer of mfvi in every run of a task that measures it."""
    records = [record for _, record in by_seed(task_identity, "mfvi").values()]
    values = [record.metrics.get("forward_transfer") for record in records]
    return [value for value in values if value is not None]


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
        if "order=joint" in task_identity or len(group) < 3 or is_of_a_search("split_mnist", method_identity):
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
        ahead = transfers(task)
        rows.append([*cells, interval(ahead) if ahead else "-"])
    header = ["task", "seeds", "`mfvi`", "gain by a coreset", "gain by a coreset alone"]
    return table([*header, "forward transfer of `mfvi`"], rows)


def continual_permuted() -> str:
    """The same methods and coresets on the single head and on permuted pixels, three seeds each."""
    copy = f"+{CORESET},coreset_prior=initial"
    rows = []
    for name, variant, single, permuted in (
        ("`mfvi`", "", "mfvi", "mfvi"),
        ("`ewc`, strength by validation", "", EWC, "ewc+strength=100.0"),
        ("`vgr`", "", "vgr", "vgr"),
        ("`mfvi` and coreset", copy, "mfvi", "mfvi"),
        ("coreset alone", f"{copy},coreset_only=true", "mfvi", "mfvi"),
    ):
        found = [
            list(accuracies(f"{task}{variant}", method).values())
            for task, method in (("split_mnist", single), ("permuted_mnist", permuted))
        ]
        rows.append([name, *(interval(values) for values in found)])
    return table(["method", "`split_mnist`", "`permuted_mnist`"], rows)


def continual_coresets() -> str:
    """Whether a coreset alone does what mfvi with a coreset does, under both priors of the copy."""
    initial, alone = "coreset_prior=initial", "coreset_only=true"
    rows = []
    for base, preset, (task, method), prior in (
        ("split_mnist", "paper", PUBLISHED, "N(0, 1)"),
        ("split_mnist", "paper", PUBLISHED, "posterior"),
        ("split_fashion_mnist", "paper", PUBLISHED, "N(0, 1)"),
        ("split_mnist", "standard", ("", "mfvi"), "N(0, 1)"),
        ("split_mnist", "standard", ("", "mfvi"), "posterior"),
    ):
        copy = [initial] if prior == "N(0, 1)" else []
        given = [task] if task else []
        plain, both, only = (
            accuracies("+".join(filter(None, (base, ",".join(parts)))), method)
            for parts in (given, [*given, CORESET, *copy], [*given, CORESET, *copy, alone])
        )
        cells = [interval(list(found.values())) if found else "-" for found in (plain, both, only)]
        agree = "-"
        gap = differences(both, only)
        if gap:
            _, low, high, _ = student(gap)
            agree = "no" if low > 0.08 or high < -0.08 else "not decided"
            agree = "yes" if low >= -0.08 and high <= 0.08 else agree
        rows.append([f"`{base}`", preset, prior, *cells, interval(gap) if gap else "-", agree])
    header = ["task", "preset", "prior of the copy", "`mfvi`", "`mfvi` and coreset", "coreset alone"]
    return table([*header, "difference", "within 0.08?"], rows)


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
    """The search for the strength of ewc: validation accuracy on the pairs seen, by Fisher and strength."""
    rows = []
    names = ("average_accuracy", "minimum_learning_accuracy", "forgetting")
    for task_identity, _, group in groups("split_mnist"):
        own = group[0][1].method
        if own.name == "ewc" and task_identity == "split_mnist":
            seen = [record.validation["average_accuracy"] for _, record in group]
            rows.append((str(own.settings["fisher"]), float(own.settings["strength"]), seen, group))
    best = max(np.mean(seen) for _, _, seen, _ in rows if len(seen) > 2)
    cells = [
        [fisher, f"{strength:g}", str(len(seen)), interval(seen)]
        + [metric(group, name) for name in names]
        + ["highest of three seeds" if np.mean(seen) == best else ""]
        for fisher, strength, seen, group in sorted(rows, key=lambda row: (row[0] != "empirical", *row[:2]))
    ]
    header = ["Fisher", "strength", "seeds", "validation accuracy", "average accuracy", "least A[t, t]"]
    return table([*header, "forgetting", ""], cells)


def continual_entropy() -> str:
    """Predictive entropy on the training inputs of step 2 before it, and its ratio, permuted over split."""
    rows, logs = [], {}
    paper = f"split_mnist+{PUBLISHED[0]}"
    for task, method in (("split_mnist", "mfvi"), (paper, PUBLISHED[1]), ("permuted_mnist", "mfvi")):
        runs = by_seed(task, method)
        values = {seed: record.validation["next_task_entropy"] for seed, (_, record) in runs.items()}
        logs[task] = {seed: float(np.log(value)) for seed, value in values.items()}
        name = f"`{task}`" if method == "mfvi" else "`split_mnist`, preset paper"
        rows.append([name, str(len(values)), interval(list(values.values()))])
    gap = differences(logs["permuted_mnist"], logs["split_mnist"])
    middle, low, high = np.exp(student(gap)[:3])
    rows.append(["ratio", str(len(gap)), f"{middle:.1f} ({low:.1f} to {high:.1f})"])
    published = ("0.003", "0.003", "0.45", "150")
    return table(
        ["", "seeds", "nats", "published"], [[*row, p] for row, p in zip(rows, published, strict=True)]
    )


def continual_floor() -> str:
    """Time of a training step against the plain network's (benchmarks/peers.py), and in the runs."""
    measured, rows = steps_measured(), []
    for task, network in (("split_mnist", "MLP 784-256-256-10"), ("permuted_mnist", "MLP 784-100-100-10")):
        case = measured[network, 1]
        runs = list(by_seed(task, "mfvi").values())
        rows.append(
            [
                *(f"`{task}`", network, str(case["batch"]), f"{case['floor']:.1f}", f"{case['mfvi']:.1f}"),
                *(f"{case['mfvi'] / case['floor']:.2f}", milliseconds_per_step(runs)),
            ]
        )
    header = ["task", "network", "batch", "floor, ms", "`mfvi`, ms", "/ floor", "ms per step within the runs"]
    return table(header, rows)


def terms(task: str) -> str:
    """Likelihood and prior term of the loss in the first and last epoch of step 2, per example."""
    rows = []
    for task_identity, method_identity, group in groups(task):
        if task_identity != task or group[0][1].method.name not in ("mfvi", "radial"):
            continue
        files = [run_curves(path) for path, _ in group]
        curves = [list(csv.DictReader(file.open())) for file in files if file is not None]
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


def spread_of_draws() -> str:
    """How far draws of the methods spread before any training: what a posterior of that width may move."""
    rows = []
    for name, rho in (("mfvi", -3.0), ("radial", -4.0)):
        scale = float(np.log1p(np.exp(rho)))
        widths = [scale / (np.sqrt(d) if name == "radial" else 1) for d in (200_704, 65_536, 2_560, 256, 10)]
        rows.append([f"`{name}`", f"{rho:g}", f"{scale:.4f}", *(f"{w:.1e}" for w in widths)])
    header = ["method", "initial rho", "softplus(rho)"]
    return table([*header, *(f"D = {d:,}" for d in (200_704, 65_536, 2_560, 256, 10))], rows)


def continual_charts() -> dict[str, tuple[Any, list[FinishedRun]]]:
    """Accuracy of every variant with three seeds or none, and the gradients of step 2; with their runs."""
    shown, curves = [], []
    for path, record in committed():
        task, method = record.task, record.method
        if task.name not in SEQUENCES or "test_samples" in task.identity or "coreset_epochs" in task.identity:
            continue
        if method.identity.startswith(("mfvi+", "radial", "map", "laplace", "mixture_vi")):
            continue
        if is_of_a_search(task.name, method.identity):
            continue
        shown.append(finished(path))
        if task.identity in ("split_mnist", "permuted_mnist") and method.identity == "mfvi":
            curves.append(finished(path))
    return {
        "accuracy": (continual.accuracies(shown), shown),
        "gradients": (continual.gradients(curves), curves),
    }


def drawn() -> Iterator[Drawing]:
    """Accuracies and gradients, and the accuracy matrices that a page shows."""
    for name, (chart, runs) in continual_charts().items():
        yield {f"continual-{name}": chart}, footer(runs)
    for run in finished_runs("split_mnist"):
        name = f"{run.task_identity}-{run.method_identity}-accuracy_matrix"
        if run.seed == 0 and name in SPLIT_MNIST.read_text():
            yield {name: run.task.figures(run.arrays)["accuracy_matrix"]}, footer([run])


PARTS: dict[str, Part] = {
    "continual runs": continual_runs,
    "continual pattern": continual_pattern,
    "continual contrast": continual_contrast,
    "continual permuted": continual_permuted,
    "continual coresets": continual_coresets,
    "continual trace": continual_trace,
    "continual strengths": continual_strengths,
    "continual entropy": continual_entropy,
    "continual floor": continual_floor,
    "matrices split_mnist": lambda: matrices("split_mnist"),
    "terms split_mnist": lambda: terms("split_mnist"),
    "spread": spread_of_draws,
}
