"""The planted faults of the science: how many, of what, and which the tests had let pass."""

from __future__ import annotations

import tomllib
from typing import Any

from parts.evidence import ROOT, Part, table


def planted() -> dict[str, dict[str, dict[str, Any]]]:
    """Subject -> name -> fault, from the tables of tests/mutants."""
    found = {}
    for path in sorted((ROOT / "tests" / "mutants").glob("*.toml")):
        given = tomllib.loads(path.read_text())
        found[given.pop("subject")] = given
    return found


def counts() -> str:
    """How many faults there are, and how many the tests had let pass."""
    faults = [fault for of in planted().values() for fault in of.values()]
    unseen = sum("mended" in fault for fault in faults)
    return (
        f"Of {len(faults)} planted faults the tests saw {len(faults) - unseen} at once. The other {unseen} "
        "passed the tests that should have seen them; each has a test that does now, and all die."
    )


def by_subject() -> str:
    """Faults by subject."""
    rows = []
    for subject, of in sorted(planted().items(), key=lambda item: -len(item[1])):
        files = len({fault["file"] for fault in of.values()})
        unseen = sum("mended" in fault for fault in of.values())
        rows.append([subject, str(len(of)), str(files), str(unseen)])
    return table(["subject", "faults", "files", "let pass at first"], rows)


def mended() -> str:
    """The faults that the tests of their subject had let pass, each with the test that was written."""
    rows = []
    for of in planted().values():
        for fault in of.values():
            if "mended" in fault:
                path, _, test = fault["mended"].partition("::")
                rows.append([fault["means"], f"`{fault['file']}`", f"`{path}`: `{test}`"])
    return table(["fault", "planted in", "test"], rows)


PARTS: dict[str, Part] = {
    "mutants counts": counts,
    "mutants by subject": by_subject,
    "mutants mended": mended,
}
