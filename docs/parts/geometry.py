"""Studies of the geometry of posteriors: closed forms, product matrices, the cost of independent weights."""

from __future__ import annotations

from collections.abc import Iterator

from parts.evidence import (
    Drawing,
    Part,
    compared,
    compared_table,
    finished_runs,
    footer,
    or_none,
    said_if_any,
)

TRAINED = ("off_diagonal", "sharing_nothing", "distance", "multimodal", "units_on", "units_on_sd", "accuracy")
"""Metrics shown of trained product matrices."""


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


def drawn() -> Iterator[Drawing]:
    """Of closed forms and of trained networks."""
    for run in finished_runs("invariance_gap", "product_matrix"):
        charts = run.task.figures(run.arrays)
        yield {f"{run.task_name}-{name}": chart for name, chart in charts.items()}, footer([run])
    for task, start in (("trained_product_matrix", ""), ("mean_field_cost", "mean_field_cost-")):
        if runs := finished_runs(task):
            charts = compared(task).charts
            yield {f"{start}{name}": chart for name, chart in charts.items()}, footer(runs)


PARTS: dict[str, Part] = {
    "invariance gap": lambda: closed_form("invariance_gap"),
    "product matrix": lambda: closed_form("product_matrix"),
    "trained product matrix": trained_products,
    "mean field cost": lambda: compared_table("mean_field_cost"),
    "mean field cost said": lambda: said_if_any("mean_field_cost"),
}
