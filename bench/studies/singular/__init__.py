"""Singular models whose learning coefficient is known: theory, published tables, claims and figures.

`table` sets runs beside the published rows, `claims` says what intervals show, `charts` draws; `models` are
what the task `singular_evidence` poses, with their `theory` and log `evidence`.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.contract import Comparison
from bench.studies.singular import charts, claims, table
from bench.studies.singular.table import EvidenceRun, Triplet

__all__ = ["Run", "Triplet", "compare"]


def compare(runs: Sequence[EvidenceRun]) -> Comparison:
    """Predictive bands and Psi against n; a row per run beside the published one; claims, rises and slopes.

    Raises:
        UsageError: If a run is given twice, or runs that must share data sets have others.
    """
    table.check(runs)
    found = [*claims.claims(runs), *claims.rises(runs), *claims.slopes(runs)]
    drawn = charts.predictive_charts(runs) | charts.psi_charts(runs)
    return Comparison(drawn, table.HEADER, table.rows(runs), [str(each) for each in found])
