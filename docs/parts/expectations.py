"""What was expected of runs before they were made, beside what came out."""

from __future__ import annotations

from collections import Counter
from typing import Any

import yaml
from parts.evidence import ROOT, Part, table

VERDICTS = {
    "holds": "came out",
    "fails": "did not",
    "undecided": "are undecided",
    "answered": "were questions without a direction, now answered",
    "open": "have no run yet",
}


def named() -> list[dict[str, Any]]:
    """The entries of docs/expectations.yaml, the newest last."""
    return yaml.safe_load((ROOT / "docs" / "expectations.yaml").read_text())


def counts() -> str:
    """How many expectations came out."""
    words = [expected["verdict"] for entry in named() for expected in entry["expected"]]
    count = Counter(words)
    said = ", ".join(f"{count[word]} {what}" for word, what in VERDICTS.items())
    return f"Of {len(words)} expectations in {len(named())} entries {said}."


def one(entry: dict[str, Any]) -> str:
    """One occasion: what was to be run, what was expected of it, and what came out."""
    rows = [
        [expected["what"], expected.get("found", "No run was made."), expected["verdict"]]
        for expected in entry["expected"]
    ]
    page = entry["page"]
    where = [f"Named in commit `{entry['named']}`. Told on the page [{page}]({page})."]
    where += [f"Findings: {', '.join(f'`{name}`' for name in entry['claims'])}."] if "claims" in entry else []
    where += [entry["remark"]] if "remark" in entry else []
    return "\n\n".join(
        [
            f"### {entry['about']}",
            f"`{entry['task']}`; runs: {entry['runs']}.".replace(", ", "`, `", entry["task"].count(", ")),
            table(["expected", "found", "verdict"], rows),
            " ".join(where),
        ]
    )


PARTS: dict[str, Part] = {
    "expectations counts": counts,
    "expectations": lambda: "\n\n".join(one(entry) for entry in named()),
}
