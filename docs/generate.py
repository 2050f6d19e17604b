"""Writes the generated parts of README.md and docs/, and what tasks measure (`bench/runs/measures.py`).

Every number comes from a committed file.

    python docs/generate.py           write them
    python docs/generate.py --check   exit 1 if one is not current

A generated part stands between `<!-- generated: NAME -->` and `<!-- end -->`. The file of docs/parts/ whose
`PARTS` has its name writes it, and draws the figures that belong to it (`drawn`).
"""

from __future__ import annotations

import argparse
import re
import sys

from parts import (
    active,
    cold,
    continual,
    expectations,
    fidelity,
    findings,
    geometry,
    joint,
    methods,
    mixtures,
    mutants,
    oracle,
    pareto,
    results,
    retinopathy,
    singular,
    training,
    uci,
)
from parts.evidence import ROOT

from bench import figures
from bench.runs import measures

DRAWING = (
    *(active, cold, continual, fidelity, geometry, mixtures, pareto, results, retinopathy, singular),
    training,
)
PARTS = {
    name: part
    for module in (*DRAWING, expectations, findings, joint, methods, mutants, oracle, uci)
    for name, part in module.PARTS.items()
}


def page(text: str) -> str:
    """A page with its generated parts written anew."""

    def part(match: re.Match[str]) -> str:
        return f"<!-- generated: {match[1]} -->\n{PARTS[match[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- generated: (.+?) -->\n.*?<!-- end -->", part, text, flags=re.DOTALL)


def draw() -> None:
    """Draws the figures that a page shows, and removes those that none shows."""
    folder = ROOT / "docs" / "figures"
    for module in DRAWING:
        for charts, footer in module.drawn():
            figures.save(charts, folder, footer)
    for name, photograph in retinopathy.photographs():
        photograph.save(folder / name)
    shown = "".join(path.read_text() for path in (ROOT / "docs").rglob("*.md"))
    for path in folder.glob("*.*"):
        if f"figures/{path.name})" not in shown:
            path.unlink()


def main() -> int:
    """Writes or checks every page."""
    parser = argparse.ArgumentParser(description="Write the generated parts of README.md and docs/.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a part is not current")
    is_check = parser.parse_args().check
    stale = []
    if measures.PATH.read_text() != (made := measures.made()):
        stale.append(str(measures.PATH.name))
        if not is_check:
            measures.PATH.write_text(made)
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        old = path.read_text()
        new = page(old)
        if new != old:
            stale.append(str(path.relative_to(ROOT)))
            if not is_check:
                path.write_text(new)
    if not is_check:
        draw()
        print("\n".join(f"wrote {name}" for name in stale) or "everything is current")
        return 0
    if stale:
        print(f"not current: {', '.join(stale)}; run python docs/generate.py")
    return bool(stale)


if __name__ == "__main__":
    sys.exit(main())
