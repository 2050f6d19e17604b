"""How fits go: the noise of their gradients, truncated noise, where they end."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from parts.evidence import Drawing, Part, compared, finished_runs, footer, groups, metric, said, table

from bench.tasks import gradient_variance


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


def drawn() -> Iterator[Drawing]:
    """Variances against sigma, and fits by epoch."""
    for task in ("gradient_variance", "training_dynamics_digits"):
        yield compared(task).charts, footer(finished_runs(task))


PARTS: dict[str, Part] = {
    "gradient variance": gradient_variances,
    "gradient variance said": lambda: said("gradient_variance"),
    "training dynamics": training_dynamics,
    "truncation": truncation,
}
