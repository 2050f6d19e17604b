"""Digests of smoke runs: what a numbers-neutral change must leave as they are, bit by bit.

    python benchmarks/digests.py --to before.json      on the commit before the change
    python benchmarks/digests.py --to after.json       on the commit after it, on the same machine
    python benchmarks/digests.py --compare before.json after.json

Every method is run on one task and every task with one method: seed 0, one thread. A digest is over the
arrays of a run, over its curves (so over every loss of every epoch) and over its metrics.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from pathlib import Path

import bench
from bench.errors import BenchError
from bench.runs import registry

ON = ("toy_regression", "split_digits", "singular_evidence")
"""Where methods are tried, each on the first that it accepts."""
FIRST = ("radial", "map", "mfvi", "none")
"""With what tasks are tried, each with the first that it accepts."""
LINEAR = {"task_settings": {"model": "linear", "hidden": 4}}
"""Settings of the last of ON for methods that need a linear network."""


def digest(method: str, task: str, **options: object) -> dict[str, object]:
    """What one smoke run left."""
    with tempfile.TemporaryDirectory() as folder:
        done = bench.run(method, task, preset="smoke", seed=0, threads=1, out=folder, **options)
        curves = (done.directory / "curves.csv").read_bytes()
        metrics = json.dumps(done.record.metrics, sort_keys=True).encode()
        return {
            "task": task,
            "method": method,
            "arrays": done.record.provenance.arrays_digest,
            "curves": hashlib.sha256(curves).hexdigest(),
            "metrics": hashlib.sha256(metrics).hexdigest(),
        }


def first(tries: list[tuple[str, str, dict[str, object]]]) -> dict[str, object]:
    """The digest of the first try that is not refused."""
    refusals = []
    for method, task, options in tries:
        try:
            return digest(method, task, **options)
        except BenchError as error:
            refusals.append(f"{method} on {task}: {type(error).__name__}")
    return {"refused": refusals}


def compare(before: Path, after: Path) -> int:
    """Prints what differs; 1 if anything does."""
    old, new = (json.loads(path.read_text()) for path in (before, after))
    differing = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    for key in differing:
        parts = [k for k in (old.get(key) or {}) if (new.get(key) or {}).get(k) != old[key][k]]
        print(f"{key}: {', '.join(parts) or 'only in one of the two'}")
    print(f"{len(old.keys() & new.keys())} runs compared, {len(differing)} differ")
    return int(bool(differing))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--to", type=Path)
    parser.add_argument("--compare", nargs=2, type=Path)
    chosen = parser.parse_args()
    if chosen.compare:
        return compare(*chosen.compare)
    found: dict[str, dict[str, object]] = {}
    for method in registry.methods():
        tries = [(method, task, {}) for task in ON] + [(method, ON[-1], LINEAR)]
        found[f"method {method}"] = first(tries)
    for task in registry.tasks():
        found[f"task {task}"] = first([(method, task, {}) for method in FIRST])
    for key, value in found.items():
        print(key, value, file=sys.stderr)
    chosen.to.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
