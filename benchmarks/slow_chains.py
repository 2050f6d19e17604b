"""What slow chains add to E_KL: of all draws of a run of `mean_field_cost`, of halves and of quarters.

    bench run hmc mean_field_cost --task.depth 8 --method.leapfrog_steps 2000 --trainer.compiled true --seed 0
    python benchmarks/slow_chains.py RUN...

The limit is what is left if errors that fall with the number of draws and with its square are taken out
(`bench.studies.mean_field.by_length`). A run keeps its draws in its checkpoint, and its record does not. All
chains must be of one component.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from timing import print_table

import bench
from bench.errors import UsageError
from bench.records import read_record
from bench.studies import mean_field


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs of hmc")
    rows = []
    for run in parser.parse_args().runs:
        record = read_record(run)
        if record.metrics["components"] != 1:
            raise UsageError(f"{run}: its draws are of several components")
        draws = bench.load(run).draws.double().numpy()
        found = mean_field.by_length(draws, record.task.settings["ridge"])
        names = ("all", "halves", "quarters", "limit")
        rows.append({"seed": record.seed, **dict(zip(names, found, strict=True))})
    print_table(rows)


if __name__ == "__main__":
    main()
