"""Active learning and active testing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from parts.evidence import (
    Drawing,
    Part,
    by_seed,
    compared,
    finished,
    finished_runs,
    footer,
    groups,
    interval,
    metric,
    said,
    standard_runs,
    table,
)

from bench import metrics
from bench.contract import FinishedRun
from bench.intervals import differences
from bench.predictions import Categorical
from bench.runs.records import Record
from bench.studies import acquisition, active, testing
from bench.tasks.active_learning import START
from bench.tasks.active_testing import losses_and_scores


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


FACTORS = {
    "acquired=20": "none",
    "balanced=true,acquired=20": "classes in their usual proportions (Fig. C.3l)",
    "acquired=20,acquisition_objective=lure": "fits that choose points have LURE too (Fig. C.4)",
    "acquired=20,temperature=1000.0": "temperature 1,000 (Fig. C.6)",
    "acquired=20,temperature=20000.0": "temperature 20,000 (Fig. C.6)",
    "acquired=20,proposal=proportional": "draws in proportion to the scores",
}
"""What the ablations of active learning change: settings of `active_digits`, and in words."""


def sharpness(runs: Iterable[Path]) -> float:
    """How many times as likely as under uniform draws acquired points were, geometric mean over runs."""
    arrays = [finished(path).arrays for path in runs]
    acquired = [(a["proposal"], a["pool_size"] - np.arange(len(a["proposal"]))) for a in arrays]
    return float(np.exp(np.mean([np.log((q * left)[START:]).mean() for q, left in acquired])))


def ablations() -> str:
    """What removing the bias costs with one factor changed, and how far the two methods are apart."""
    methods, rows = ("mc_dropout", "radial"), []
    for settings, what in FACTORS.items():
        runs = [by_seed(f"active_digits+{settings}", method) for method in methods]
        sharp = [f"{sharpness(path for path, _ in by.values()):.3g}" for by in runs]
        costs = [interval([r.metrics["cost_of_lure"] for _, r in by.values()]) for by in runs]
        gaps = []
        for o in ("plain", "lure"):
            nll = [{seed: r.metrics[f"mean_nll_{o}"] for seed, (_, r) in by.items()} for by in runs]
            gaps.append(interval(differences(*nll)))
        rows.append([what, str(len(runs[0])), *sharp, *costs, *gaps])
    header = ["changed", "seeds", *(f"draws, `{method}`" for method in methods)]
    header += [f"LURE minus R~, `{method}`" for method in methods]
    return table([*header, *(f"`mc_dropout` minus `radial`, {name}" for name in ("R~", "LURE"))], rows)


def active_testing(task: str) -> str:
    """Mean squared error over that of uniform draws, of every committed run, and the biases."""
    rows, biases, causes = [], [], []
    for task_identity, method_identity, group in groups(task):
        for path, record in group:
            if (task_identity, method_identity, record.preset) != (task, record.method.name, "standard"):
                continue
            m = record.metrics
            losses, scores = losses_and_scores(finished(path).arrays)
            ten = np.sort(losses**2)[-10:].sum() / (losses**2).sum()
            cells = [
                f"{scores.mean():.2g}",
                f"{scores.max():.2g}",
                f"{np.corrcoef(scores, losses)[0, 1]:.2f}" if np.ptp(scores) else "-",  # no spread, no order
            ]
            causes.append([f"`{method_identity}`", str(record.seed), *cells, f"{ten:.0%}"])
            cells = [f"`{method_identity}`", str(record.seed), f"{m['risk']:.4f}", f"{m['accuracy']:.4f}"]
            for guide in testing.GUIDES:
                low, middle, high = (m[f"ratio_{guide}{end}"] for end in ("_low", "", "_high"))
                first = m[f"first_draw_ratio_{guide}"]
                cells += [f"{middle:.3g} ({low:.3g} to {high:.3g})", "-" if first is None else f"{first:.3g}"]
            rows.append([*cells, f"{record.seconds / 60:.1f}"])
            biases.append(
                [f"`{method_identity}`", str(record.seed)]
                + [f"{m[f'bias_{e}']:.4f} ± {m[f'bias_{e}_error']:.4f}" for e in active.OBJECTIVES]
            )
    header = ["method", "seed", "risk", "accuracy"]
    for guide in testing.GUIDES:
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


def scores(task: str) -> str:
    """What each score is worth to draws in proportion to it: exact ratio to uniform draws after one draw.

    All from the stored predictions. The expected loss takes its belief of the labels from the fit of the next
    seed, or of the same seed by another method.
    """
    runs = {(run.method_name, run.seed): run for run in standard_runs(task)}
    beliefs = {
        key: torch.from_numpy(metrics.restore(run.arrays["full_log_probs"])) for key, run in runs.items()
    }
    rows = []
    for (method, seed), run in runs.items():
        losses, bald = losses_and_scores(run.arrays)
        own = beliefs[method, seed]
        other = "radial" if method == "mc_dropout" else "mc_dropout"
        following = (method, seed + 1) if (method, seed + 1) in runs else (method, 0)
        believers = [(method, seed), following, (other, seed)]
        found = [bald] + [
            acquisition.expected_loss(Categorical(beliefs[each][None]), own).numpy() for each in believers
        ]
        ratios = [testing.first_draw_ratio(losses, testing.log_weights("proportional", s, 1)) for s in found]
        rows.append([f"`{method}`", str(seed), *(f"{ratio:.3g}" for ratio in ratios), f"`{other}`"])
    header = ["method", "seed", "BALD", "predictive entropy", "expected loss, belief of the next seed"]
    return table([*header, "expected loss, belief of another method", "which"], rows)


def widths(chosen: Callable[[Record], bool]) -> str:
    """What scores tell of losses on MNIST, by the width at which a posterior starts, seed by seed."""
    rows = []
    for _, _, group in groups("active_testing_mnist"):
        kept = [(finished(path), record) for path, record in group if chosen(record)]
        if kept:
            of_method = kept[0][1].method
            rows.append(
                [of_method.name, of_method.settings.get("initial_rho"), *zip(*map(told, kept), strict=True)]
            )
    rows = [
        [f"`{method}`", "-" if rho is None else f"{rho:g}", *(" / ".join(cells) for cells in columns)]
        for method, rho, *columns in sorted(rows, key=lambda row: row[:2])
    ]
    header = ["method", "initial rho", "epochs", "least validation NLL", "accuracy", "mean BALD, nats"]
    header += ["correlation with the loss", "proportional: ratio at the last M", "exact after one draw"]
    return table(header, rows)


def told(run: tuple[FinishedRun, Record]) -> list[str]:
    """Cells of one run in `widths`."""
    found, record = run
    losses, scores = losses_and_scores(found.arrays)
    validation = [v for curve, series, _, v in found.curves if (curve, series) == ("val_nll", "full model")]
    return [
        str(record.fits[0].epochs),
        f"{min(validation):.4f}",
        f"{record.metrics['accuracy']:.4f}",
        f"{scores.mean():.2g}",
        f"{np.corrcoef(scores, losses)[0, 1]:.2f}",
        f"{record.metrics['ratio_proportional']:.3g}",
        f"{record.metrics['first_draw_ratio_proportional']:.3g}",
    ]


def drawn() -> Iterator[Drawing]:
    """Risks and errors against the number of labels."""
    for task in ("active_mnist", "active_testing_mnist"):
        yield compared(task, standard=True).charts, footer(standard_runs(task))
    for run in (run for run in finished_runs("active_regression") if run.seed == 0):
        charts = run.task.figures(run.arrays)
        shown = ("bias", "variance", "test_error")
        yield {f"{run.task_identity}-{name}": charts[name] for name in shown}, footer([run])


PARTS: dict[str, Part] = {
    "active regression": active_regression,
    "active learning ablations": ablations,
    "active learning": lambda: active_learning("active_mnist"),
    "active learning said": lambda: said("active_mnist", standard=True),
    "active testing": lambda: active_testing("active_testing_mnist"),
    "active testing said": lambda: said("active_testing_mnist", standard=True),
    "active testing scores": lambda: scores("active_testing_mnist"),
    "active testing fashion scores": lambda: scores("active_testing_fashion_mnist"),
    "active testing widths": lambda: widths(lambda r: r.method.settings.get("train_samples") == 1),
    "active testing to the end": lambda: widths(lambda r: r.task.settings["epochs"] == 100),
    "active testing fashion": lambda: active_testing("active_testing_fashion_mnist"),
    "active testing fashion said": lambda: said("active_testing_fashion_mnist", standard=True),
}
