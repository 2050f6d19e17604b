"""Singular models: rows and claims of Tables 2 to 4, slopes of Psi, Figs 1 and 2."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

from parts.evidence import Drawing, Part, committed, finished, or_none, table

from bench import figures
from bench.studies import singular
from bench.studies.singular import charts, claims
from bench.studies.singular import table as singular_table
from bench.tasks import singular_evidence

FIGURES = {
    (singular.Triplet("tanh", 576, *triplet), singular_table.parsed(method))
    for triplet, methods in {
        (0.0, 5.0, 100.0): ("nf_gaussian_0.1_0.001", "nf_gamma_10_1_100_True"),
        (5.0, 0.0, 100.0): ("nf_gaussian_5_5e-2", "nf_gamma_500_5_100_True"),
    }.items()
    for method in methods
}
"""Rows of Figs 1 and 2 of the task's source (docs/sources.md)."""


@cache
def singular_runs() -> list[singular.EvidenceRun]:
    """Committed runs of singular_evidence, on data sets that agree."""
    own = [path for path, record in committed() if record.task.name == "singular_evidence"]
    runs = [singular_evidence.row(finished(path)) for path in own]
    singular_table.check(runs)
    return runs


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
    """Slopes of Psi in log n, of the log evidence and -lambda; what Psi lacks at the largest n."""
    rows = []
    for s in claims.slopes(singular_runs()):
        cells = [str(s.triplet), s.preset, f"`{s.method}`", ", ".join(map(str, s.sizes))]
        cells += [f"{s.slope:.2f} ± {s.standard_error:.2f}", str(s.repetitions)]
        cells.append("-" if s.expected is None else f"{s.expected:.2f}")
        rows.append([*cells, *("-" if math.isnan(v) else f"{v:.2f}" for v in (s.evidence, s.lacking))])
    header = ["model, truth, prior", "preset", "method", "n", "slope ± standard error", "repetitions"]
    header += ["-lambda", "slope of the log evidence", "what Psi lacks of it at the largest n, nats"]
    return or_none(header, rows)


def singular_charts() -> dict[str, Any]:
    """Predictive bands of the rows of Figs 1 and 2, of their first seed, and Psi against n."""
    rows = [run for run in singular_runs() if (run.triplet, singular_table.parsed(run.method)) in FIGURES]
    shown = [run for run in rows if run.seed == 1]
    return charts.predictive_charts(shown) | charts.psi_charts(singular_runs())


def singular_labels(name: str) -> Iterator[figures.Label]:
    """Of the runs in a figure."""
    for run in singular_runs():
        line = run.triplet, run.preset, run.method
        alike = [r for r in singular_runs() if (r.triplet, r.preset, r.method) == line]
        if name in charts.predictive_charts([run]) or name in charts.psi_charts(alike):
            yield run.method, "singular_evidence", run.preset, run.seed


def singular_figures() -> str:
    """Links to the figures."""
    links = [f"![{name}](../figures/{name}.svg)" for name in singular_charts()]
    return "\n\n".join(links) or "No such run is committed yet."


def drawn() -> Iterator[Drawing]:
    """Figs 1 and 2, and Psi against n."""
    for name, chart in singular_charts().items():
        yield {name: chart}, figures.footer(singular_labels(name))


PARTS: dict[str, Part] = {
    "singular rows": singular_rows,
    "singular claims": singular_claims,
    "singular published": singular_published,
    "singular rises": singular_rises,
    "singular slopes": singular_slopes,
    "singular figures": singular_figures,
}
