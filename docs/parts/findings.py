"""The verdicts on the headlines of the documents."""

from __future__ import annotations

from collections import Counter
from functools import cache

import numpy as np
from parts.evidence import ROOT, Part, or_none, table

from bench.leaderboard.evidence import findings
from bench.leaderboard.evidence.findings import Claim, Finding, Word

CLAIMS = ROOT / "docs" / "findings.yaml"


@cache
def all_findings() -> list[Finding]:
    """What the committed records say of every claim."""
    return [findings.find(claim) for claim in findings.read(CLAIMS)]


def protocols() -> dict[str, str]:
    """Sentence on a smaller protocol -> its number, in the order of the claims."""
    said = [finding.claim.same or finding.claim.other for finding in all_findings()]
    return {sentence: str(number) for number, sentence in enumerate(dict.fromkeys(filter(None, said)), 1)}


COLUMNS: tuple[Word, ...] = ("reproduced", "direction only", "contradicted", "undecided", "no verdict")
OPEN = "open: another protocol"


def column(finding: Finding) -> str:
    """The column that counts a finding: its verdict, unless its protocol may answer another question."""
    return OPEN if finding.claim.protocol == "other" else finding.verdict


def findings_counts() -> str:
    """How many headlines have which verdict, and how many of these verdicts chance may have made."""
    documents: dict[str, Counter[str]] = {}
    for finding in all_findings():
        documents.setdefault(finding.claim.source.partition(",")[0], Counter())[column(finding)] += 1
    documents["all"] = sum(documents.values(), Counter())
    rows = [
        [name, *(str(count[word]) for word in (*COLUMNS, OPEN)), str(count.total())]
        for name, count in documents.items()
    ]
    judged = sum(finding.verdict != "no verdict" and not finding.is_exact for finding in all_findings())
    verdicts = [column(finding) for finding in all_findings() if finding.claim.size is not None]
    sized = [verdict for verdict in verdicts if verdict not in (OPEN, "no verdict")]
    sentences = (
        f"Of {len(sized)} headlines that print a size and have a verdict under their own question, "
        f"{sized.count('reproduced')} come out in that size, within a factor of two.",
        f"{judged} intervals of 95% stand behind all this: at most {0.05 * judged:.1f} of them are expected "
        "to miss their true value.",
    )
    return "\n\n".join((table(["document", *COLUMNS, OPEN, "all"], rows), *sentences))


def contrast(claim: Claim) -> str:
    """What is compared, and where it should lie."""
    names = [f"`{term.metric or claim.metric}`" for term in claim.terms]
    what = claim.contrast or " minus ".join(dict.fromkeys(names))
    if claim.contrast is None and len(claim.terms) == 2 and names[0] == names[1]:
        what += ", first minus second"
    return f"{what}: {claim.expected}"


def ours(finding: Finding) -> str:
    """The contrast with its interval and what it is over."""
    found = finding.interval
    if found is None:
        return "no run"
    centre, low, high = (
        "-" if np.isnan(x) else f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.3g}" for x in found[:3]
    )
    between = "" if finding.is_exact or np.isnan(found.low) else f" ({low} to {high})"
    return f"{centre}{between}, {found.basis}"


def verdict(finding: Finding) -> str:
    """The verdict; where undecided, the seeds that would decide."""
    if finding.verdict != "undecided":
        return finding.missing or finding.verdict
    unit = finding.claim.per or "seed"
    if unit == findings.SPLIT:  # a table has as many as it has
        return "undecided"
    return (
        f"undecided; {finding.needed} {unit}s"
        if finding.needed
        else f"undecided; over {findings.MOST} {unit}s"
    )


def findings_table(word: Word | None) -> str:
    """The claims of a verdict; None is those whose protocol may answer another question."""
    rows = []
    for finding in all_findings():
        claim = finding.claim
        if (claim.protocol == "other") != (word is None) or word not in (None, finding.verdict):
            continue
        protocol = protocols().get(claim.same or claim.other or "")
        rows.append(
            [
                *(claim.claim, claim.source, contrast(claim), ours(finding)),
                *(verdict(finding), f"[{protocol}](#protocols)" if protocol else "paper"),
                "<br>".join(f"`{command}`" for command in finding.commands()),
            ]
        )
    return or_none(["claim", "source", "contrast", "ours", "verdict", "protocol", "commands"], rows)


def findings_protocols() -> str:
    """The sentences on smaller protocols, by their numbers."""
    return "\n".join(f"{number}. {sentence}." for sentence, number in protocols().items())


def findings_thresholds() -> str:
    """Why every number that is not 0, and every margin, is what it is."""
    found: dict[tuple[str, str], list[str]] = {}
    for claim in (finding.claim for finding in all_findings()):
        if claim.direction is None or claim.margin is not None or not claim.why.startswith("Only the"):
            found.setdefault((contrast(claim), claim.why), []).append(claim.source)
    return table(
        ["contrast", "source", "why this number"],
        [[contrast, "; ".join(dict.fromkeys(sources)), why] for (contrast, why), sources in found.items()],
    )


PARTS: dict[str, Part] = {
    "findings counts": findings_counts,
    "findings contradicted": lambda: findings_table("contradicted"),
    "findings reproduced": lambda: findings_table("reproduced"),
    "findings direction only": lambda: findings_table("direction only"),
    "findings undecided": lambda: findings_table("undecided"),
    "findings without verdict": lambda: findings_table("no verdict"),
    "findings of another question": lambda: findings_table(None),
    "findings protocols": findings_protocols,
    "findings thresholds": findings_thresholds,
}
