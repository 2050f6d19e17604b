"""Cold posteriors: what samplers predict by the temperature of the posterior that they draw from."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from parts.evidence import Drawing, Part, committed, interval, or_none

from bench import figures
from bench.intervals import student
from bench.runs.marks import marks
from bench.runs.records import Record

SHOWN = {
    ("hmc", "fidelity_digits"): {"nll": "NLL", "wasserstein": "distance to the posterior at T = 1"},
    ("sghmc", "shift_digits"): {
        "nll_clean": "NLL of clean images",
        "nll": "NLL of corrupted images",
        "accuracy_clean": "accuracy on clean images",
        "accuracy": "accuracy on corrupted images",
    },
}
"""Method and task -> the metrics that are shown, and in words. Each NLL judges, the first two are drawn."""

STILL = "predictions did not move"
"""A mark: the chain's average is then hardly that of the posterior at its temperature."""

ByTemperature = dict[float, dict[int, Record]]
"""Temperature, the highest first -> seed -> record."""


@cache
def by_temperature(method: str, task: str) -> ByTemperature:
    """Committed runs at each temperature, with the other settings of those below 1."""
    found: dict[str, ByTemperature] = {}
    for _, record in committed():
        if (record.method.name, record.task.name, record.status) == (method, task, "completed"):
            others = {k: v for k, v in record.method.settings.items() if k != "temperature"}
            temperature = float(record.method.settings.get("temperature", 1.0))
            line = found.setdefault(repr((record.task.identity, sorted(others.items()))), {})
            line.setdefault(temperature, {})[record.seed] = record
    cold = (line for line in found.values() if min(line) < 1)
    return dict(sorted(next(cold, {}).items(), reverse=True))


def table() -> str:
    """Means over the seeds at each temperature, and the first metric less that at 1, seed by seed."""
    rows = []
    for (method, task), names in SHOWN.items():
        found = by_temperature(method, task)
        for temperature, runs in found.items():
            for name, words in names.items():
                values = [float(record.metrics[name]) for record in runs.values()]
                cells = [f"`{method}`, `{task}`", f"{temperature:g}", words, str(len(runs))]
                rows.append([*cells, interval(values), less_the_bayes(found, temperature, name)])
    return or_none(["sampler, task", "T", "metric", "seeds", "mean", "less that at T = 1"], rows)


def differences(found: ByTemperature, temperature: float, name: str) -> list[float]:
    """A metric at a temperature less that at 1, of the seeds that both have."""
    here, bayes = found[temperature], found.get(1.0, {})
    both = sorted(here.keys() & bayes.keys())
    return [float(here[seed].metrics[name]) - float(bayes[seed].metrics[name]) for seed in both]


def less_the_bayes(found: ByTemperature, temperature: float, name: str) -> str:
    """The `differences` with their interval."""
    if temperature == 1:
        return "0"
    gains = differences(found, temperature, name)
    return f"{student(gains):.2g}" if gains else "-"


def standing() -> str:
    """Where the optimum is and whether it is better than T = 1, a sentence for each sampler and NLL."""
    said = [
        f"- `{method}` on `{task}`: {judged(found, name, words)}"
        for (method, task), names in SHOWN.items()
        if 1.0 in (found := by_temperature(method, task))
        for name, words in names.items()
        if name.startswith("nll")
    ]
    return "\n".join(said) or "No such run is committed yet."


def judged(found: ByTemperature, name: str, words: str) -> str:
    """At which temperature an NLL is least, and by how much less than at 1."""
    means = {t: student([float(r.metrics[name]) for r in of.values()]).centre for t, of in found.items()}
    best = min(means, key=lambda t: means[t])
    head = f"the {words} is least at T = {best:g}, {means[best]:.4f} nats"
    if best == 1:
        return f"{head}. No temperature below 1 improves on the posterior itself."
    gain = student(differences(found, best, name))
    better = "better, so there is a cold posterior effect here"
    still = sum(STILL in [mark.name for mark in marks(record)] for record in found[1.0].values())
    if still:
        better = (
            f"better, but {STILL} in {still} of {len(found[1.0])} seeds at T = 1: the sampler may gain, not T"
        )
    verdict = gain.said("worse", better)
    edge = ", the lowest that was tried" if best == min(means) else ""
    return f"{head}{edge}, against {means[1.0]:.4f} at T = 1: {gain:.2g}{verdict}."


def drawn() -> Iterator[Drawing]:
    """The metrics against the temperature, a panel for each."""
    curves, labels = [], []
    for (method, task), names in SHOWN.items():
        found = by_temperature(method, task)
        seeds = {seed for runs in found.values() for seed in runs}
        for name in list(names)[:2]:
            for seed in sorted(seeds):
                points = [(t, float(runs[seed].metrics[name])) for t, runs in found.items() if seed in runs]
                curves.append(figures.Curve(f"{names[name]}, {task}", method, points[::-1]))
        labels += [record.label for runs in found.values() for record in runs.values()]
    if curves:
        yield {"cold-posteriors": figures.panels(curves, "temperature T", "score")}, figures.footer(labels)


PARTS: dict[str, Part] = {"cold standing": standing, "cold": table}
