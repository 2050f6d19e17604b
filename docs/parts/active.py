"""Active learning and active testing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from parts.evidence import (
    Drawing,
    Part,
    compared,
    finished,
    finished_runs,
    footer,
    groups,
    metric,
    said,
    table,
)

from bench import metrics
from bench.studies import active


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


def drawn() -> Iterator[Drawing]:
    """Risks and errors against the number of labels."""
    for task in ("active_mnist", "active_testing_mnist"):
        yield compared(task).charts, footer(finished_runs(task))
    for run in (run for run in finished_runs("active_regression") if run.seed == 0):
        charts = run.task.figures(run.arrays)
        shown = ("bias", "variance", "test_error")
        yield {f"{run.task_identity}-{name}": charts[name] for name in shown}, footer([run])


PARTS: dict[str, Part] = {
    "active regression": active_regression,
    "active learning": lambda: active_learning("active_mnist"),
    "active learning said": lambda: said("active_mnist"),
    "active testing": lambda: active_testing("active_testing_mnist"),
    "active testing said": lambda: said("active_testing_mnist"),
    "active testing fashion": lambda: active_testing("active_testing_fashion_mnist"),
    "active testing fashion said": lambda: said("active_testing_fashion_mnist"),
}
