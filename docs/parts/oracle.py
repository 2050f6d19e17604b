"""Worlds of a known law: scores of every method."""

from __future__ import annotations

from parts.evidence import Part, groups, metric, or_none

SHOWN = (
    *("joint_log_loss", "log_likelihood", "excess_log_loss", "epistemic_error", "epistemic_correlation"),
    *("aleatoric_error", "aleatoric_correlation", "noise_leak", "data_leak"),
)


def _scores(task: str) -> str:
    """Means over the seeds, the best joint log loss first."""
    rows = {}
    for task_identity, method, group in groups(task):
        records = [record for _, record in group]
        if task_identity != task or any(record.status != "completed" for record in records):
            continue
        cells = [metric(group, name) for name in SHOWN]
        mean = sum(float(record.metrics["joint_log_loss"]) for record in records) / len(records)
        rows[mean, method] = [f"`{method}`", str(len(group)), *cells]
    names = [name.replace("_", " ") for name in SHOWN]
    return or_none(["method", "seeds", *names], [row for _, row in sorted(rows.items())])


PARTS: dict[str, Part] = {
    "oracle regression": lambda: _scores("oracle_regression"),
    "oracle classification": lambda: _scores("oracle_classification"),
}
