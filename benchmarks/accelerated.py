"""Whether runs on an accelerator are draws of the law that a processor's are drawn from.

    bench run map shift_digits --seed 0 --trainer.accelerator gpu     # and other methods
    python benchmarks/accelerated.py runs/shift_digits/*/standard-seed0 [--json benchmarks/accelerated.json]

An accelerator draws other noise from the same seed, so that its runs cannot be compared number by number.
Each is compared with the committed runs of its method, which a processor made: were it one more of them, t
would have Student's distribution, with one degree of freedom less than there are runs. Both stand in the
file, since settings that are searched later bring other runs to the board.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import mean, stdev

from timing import print_table, write

from bench.leaderboard.evidence.entries import committed
from bench.runs.records import read_record

TASK = "shift_digits"
METRICS = ("nll", "nll_clean")


def known() -> dict[str, list[dict[str, float]]]:
    """Metrics of the committed runs of every method, seed by seed."""
    found: dict[str, list[dict[str, float]]] = {}
    for _, record in committed():
        if record.task.identity == TASK:
            found.setdefault(record.method.identity, []).append(record.metrics)
    return found


def distance(value: float, drawn: list[float]) -> float:
    """T of a value, were it one more draw of those given, at least two."""
    return (value - mean(drawn)) / (stdev(drawn) * (1 + 1 / len(drawn)) ** 0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+", help=f"folders of runs of {TASK} on an accelerator")
    parser.add_argument("--json", type=Path, help="file to write them to (benchmarks/accelerated.json)")
    options = parser.parse_args()
    records = {record.method.identity: record for record in map(read_record, options.runs)}
    processor, rows = known(), []
    for method, record in sorted(records.items()):
        row: dict[str, str | float] = {"method": method}
        for name in METRICS:
            row |= {name: record.metrics[name]}
            row |= {f"t of {name}": distance(record.metrics[name], [m[name] for m in processor[method]])}
        rows.append(row)
    print_table(rows)
    if options.json:
        own = {m: {name: r.metrics[name] for name in METRICS} for m, r in sorted(records.items())}
        place = next(iter(records.values())).environment
        heading = {"device": place.device, "python": place.python, "torch": place.torch}
        beside = {m: [{name: of[name] for name in METRICS} for of in processor[m]] for m in own}
        write(options.json, heading | {"runs": own, "processor": beside})


if __name__ == "__main__":
    main()
