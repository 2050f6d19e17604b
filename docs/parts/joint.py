"""Joint predictions under shift: batches of two images, of every method that was run with them."""

from __future__ import annotations

from parts.evidence import Group, Part, groups, metric, or_none

from bench.intervals import Interval, student

SHOWN = ("joint_nll", "joint_nll_independent", "joint_nll_clean", "joint_nll_clean_independent")
BESIDE = "map"
"""The method that the others are set beside: one network, whose draws know nothing together."""


def found() -> dict[str, Group]:
    """Completed runs with joint predictions by method, the least joint loss first."""
    of = {
        method: group
        for task, method, group in groups("shift_digits")
        if "joint=true" in task.partition("+")[2].split(",")
        and all(record.status == "completed" for _, record in group)
    }
    return dict(sorted(of.items(), key=lambda item: mean(item[1], "joint_nll")))


def mean(group: Group, name: str) -> float:
    """Of a metric over the seeds."""
    return sum(float(record.metrics[name]) for _, record in group) / len(group)


def difference(group: Group, name: str, other: Group, other_name: str) -> Interval:
    """A metric less another one of other runs, seed by seed."""
    by_seed = {record.seed: record.metrics[other_name] for _, record in other}
    pairs = [(record.metrics[name], by_seed.get(record.seed)) for _, record in group]
    return student([float(a) - float(b) for a, b in pairs if a is not None and b is not None])


def table() -> str:
    """Means over the seeds."""
    rows = [
        [f"`{method}`", str(len(group)), *(metric(group, name) for name in SHOWN)]
        for method, group in found().items()
    ]
    return or_none(["method", "seeds", *(f"`{name}`" for name in SHOWN)], rows)


def standing() -> str:
    """The least joint loss beside that of one network, and who knows more together than alone."""
    methods = found()
    plain = next((group for name, group in methods.items() if name.split("+")[0] == BESIDE), None)
    if plain is None:
        return "No such run is committed yet."
    best, group = next(iter(methods.items()))
    said = [f"The least joint loss has `{best}`, {mean(group, 'joint_nll'):.2f} nats a batch"]
    if group is not plain:
        less = difference(group, "joint_nll", plain, "joint_nll")
        said = [f"{said[0]}: {less:.2g} less that of `{BESIDE}`{less.said('higher', 'lower')}"]
    together = [
        name
        for name, of in methods.items()
        if difference(of, "joint_nll", of, "joint_nll_independent").sign() < 0
    ]
    named = ", ".join(f"`{name}`" for name in together) or "none"
    said.append(f"Draws say more of a batch together than image by image, beyond the interval: {named}")
    return "\n".join(f"- {sentence}." for sentence in said)


PARTS: dict[str, Part] = {"shift joint": table, "shift joint standing": standing}
