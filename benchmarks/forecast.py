"""Whether `--dry-run` tells the truth: six runs of different kinds, forecast and then made.

    python benchmarks/forecast.py [--only laplace] [--json FILE] [--check]

Each forecast and each run is a process of its own with one thread. A ratio is what was told over what was
measured, of the seconds that the record has and of the largest memory of the process. The goal is a factor of
1.5 either way; where a fit may stop early, what was told is the most that there can be, and may be too much.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from timing import print_table, write

FACTOR = 1.5
RUNS = {
    "continual learning, small steps": "radial split_digits --task.epochs 60",
    "what follows training counts": "laplace permuted_digits --task.epochs 30",
    "a sampler": "hmc toy_regression --method.burn 100 --method.kept 100",
    "many fits side by side": "mfvi iris_depth --task.repetitions 6 --task.epochs 60",
    "a convolutional network on photographs": "mfvi retinopathy_synthetic --task.epochs 2",
    "active learning, fits that may stop early": "mc_dropout active_digits --task.acquired 6",
}
"""Kinds, and command lines after `bench run`."""


def call(arguments: Sequence[str]) -> tuple[str, int]:
    """Standard output of `bench run`, and the largest memory of its process in bytes.

    Raises:
        SystemExit: If it fails, with what it says.
    """
    command = [sys.executable, "-m", "bench", "run", *arguments, "--threads", "1"]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = subprocess.Popen(
            command, stdout=out, stderr=err, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        for file in (out, err):
            file.seek(0)
        if child.returncode:
            raise SystemExit(f"{' '.join(command)}: exit code {child.returncode}\n{err.read()}")
        return out.read(), usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def is_hit(told: float, measured: float, may_stop: bool = False) -> bool:
    """Whether a forecast is within the factor; one that is the most that there can be may be more."""
    return measured <= FACTOR * told and (may_stop or told <= FACTOR * measured)


def compare(kind: str, run: str) -> dict:
    """Forecasts a run, makes it, and compares."""
    words = run.split()
    output, _ = call([*words, "--dry-run", "--format", "json"])
    told = {row["what"]: row["value"] for row in json.loads(output)}
    may_stop = told["may stop earlier"] == "yes"
    with tempfile.TemporaryDirectory() as folder:
        output, memory = call([*words, "--out", folder])
        record = json.loads((Path(output.strip().splitlines()[-1]) / "record.json").read_bytes())
    seconds, mib = record["seconds"], memory / 2**20
    steps = sum(fit["steps"] for fit in record["fits"])
    hit = is_hit(told["seconds"], seconds, may_stop) and is_hit(told["MiB of memory"], mib)
    return {
        "kind": kind,
        "run": run,
        "seconds_told": told["seconds"],
        "seconds": seconds,
        "seconds_ratio": told["seconds"] / seconds,
        "mib_told": told["MiB of memory"],
        "mib": round(mib),
        "mib_ratio": told["MiB of memory"] / mib,
        "steps_told": told["training steps"],
        "steps": steps,
        "may_stop": may_stop,
        "verdict": "hit" if hit else "missed",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="runs whose command line contains this")
    parser.add_argument("--json", type=Path, help="file for the rows (benchmarks/forecast.json)")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a forecast is off by more")
    arguments = parser.parse_args()
    chosen = {kind: run for kind, run in RUNS.items() if arguments.only in run}
    if not chosen:
        parser.error(f"--only {arguments.only}: none of {'; '.join(RUNS.values())}")
    rows = []
    for kind, run in chosen.items():
        print(f"bench run {run}", file=sys.stderr, flush=True)
        rows.append(compare(kind, run))
    print_table(rows)
    if arguments.json:
        write(arguments.json, {"factor": FACTOR, "runs": rows})
    return int(arguments.check and any(row["verdict"] == "missed" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
