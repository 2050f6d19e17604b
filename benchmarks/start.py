"""How long `bench` takes before it does what was asked, against the import of torch and of Lightning.

    python benchmarks/start.py [--rounds 7] [--json FILE] [--check]

Every command is a process of its own, on one thread. In every round each is called once, in changing order.
Ratios are of processor time, which other load on the machine moves least: medians over the rounds of two
commands' times in the same round. The user's cache folder is a fresh one, and `bench list` is measured
without its index and with it. Of `bench run` the time ends when the log tells of the first epoch, three
training steps; the process is then ended.

`--check` demands at most 0.5 of `import torch` of every command that computes nothing, and at most 1.3 of
`import torch, pytorch_lightning` until a run has trained its first epoch.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from timing import median, print_table, ratio, write

LARGEST_OF_TORCH, LARGEST_OF_LIGHTNING = 0.5, 1.3
TORCH, LIGHTNING = "import torch", "import torch, pytorch_lightning"
FIRST_LIST, RUN = "bench list, first call", "bench run map split_digits, first epoch"
RUNS = str(Path(__file__).parents[1] / "leaderboard" / "submissions" / "reference" / "split_digits" / "map")
QUICK = {
    "bench runs": ["runs", RUNS],
    "bench show": ["show", f"{RUNS}/seed0"],
    "bench --version": ["--version"],
    "bench --help": ["--help"],
    "bench run --help": ["run", "--help"],
    "bench tune --help": ["tune", "--help"],
    "bench rnu": ["rnu"],
    "bench run mpa split_digits": ["run", "mpa", "split_digits"],
    "bench run map split_digit": ["run", "map", "split_digit"],
    "bench run map split_digits --sed 1": ["run", "map", "split_digits", "--sed", "1"],
    "bench list --josn": ["list", "--josn"],
    "bench list, further calls": ["list"],
    "bench run ma, completed by the shell": [],
}


class Times(NamedTuple):
    """Seconds of one process: by the clock, and of the processor."""

    clock: float
    processor: float


def called(
    command: list[str], home: Path, more: dict[str, str] | None = None, log: Path | None = None
) -> Times:
    """Times of a process whose user's home is `home`; with `log`, until a log.txt below tells of an epoch."""
    environment = os.environ | {"HOME": str(home), "OMP_NUM_THREADS": "1"} | (more or {})
    quiet = subprocess.DEVNULL
    began = time.perf_counter()
    process = subprocess.Popen(command, env=environment, cwd=home, stdout=quiet, stderr=quiet)
    while log is not None and not any(" epoch " in path.read_text() for path in log.rglob("log.txt")):
        if process.poll() is not None:
            raise SystemExit("the run ended before it trained")
        time.sleep(0.005)
    clock = time.perf_counter() - began
    if log is not None:
        process.kill()
    _, process.returncode, usage = os.wait4(process.pid, 0)
    if log is None:
        clock = time.perf_counter() - began
    return Times(clock, usage.ru_utime + usage.ru_stime)


def measure(rounds: int) -> dict[str, list[Times]]:
    """Times of every command in every round."""
    bench = [sys.executable, "-m", "bench"]
    names = [TORCH, LIGHTNING, FIRST_LIST, *QUICK, RUN]
    measured: dict[str, list[Times]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        answer = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_STDOUT_FILENAME": str(home / "answer")}
        typed = {"COMP_LINE": "bench run ma", "COMP_POINT": "12", **answer}
        called([*bench, "list"], home)
        for i in range(rounds):
            for name in names[i % len(names) :] + names[: i % len(names)]:
                if name in (TORCH, LIGHTNING):
                    # Python takes a second to take Lightning down again, and a run's time ends before that.
                    end = "; import os; os._exit(0)" if name == LIGHTNING else ""
                    times = called([sys.executable, "-c", name + end], home)
                elif name in QUICK:
                    times = called([*bench, *QUICK[name]], home, None if QUICK[name] else typed)
                else:
                    with tempfile.TemporaryDirectory(dir=home) as fresh:
                        given = ["run", "map", "split_digits", "--preset", "smoke", "--out", fresh]
                        if name == RUN:
                            times = called([*bench, *given], home, log=Path(fresh))
                        else:
                            times = called([*bench, "list"], Path(fresh))
                measured[name].append(times)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the numbers here")
    parser.add_argument("--check", action="store_true", help="fail where a command takes too long")
    chosen = parser.parse_args()
    times = measure(chosen.rounds)
    measured = {name: [t.processor for t in rounds] for name, rounds in times.items()}
    rows = [
        {
            "command": name,
            "seconds by the clock": median(t.clock for t in times[name]),
            "processor seconds": median(measured[name]),
            "of import torch": ratio(measured, name, TORCH),
            "of import torch, pytorch_lightning": ratio(measured, name, LIGHTNING),
        }
        for name in measured
    ]
    print_table(rows)
    if chosen.json:
        numbers = {
            "pytorch_lightning": importlib.metadata.version("pytorch_lightning"),
            "threads": 1,
            "rounds": chosen.rounds,
            "commands": rows,
        }
        write(chosen.json, numbers)
    if chosen.check:
        slow = [name for name in QUICK if ratio(measured, name, TORCH) > LARGEST_OF_TORCH]
        slow += [RUN] if ratio(measured, RUN, LIGHTNING) > LARGEST_OF_LIGHTNING else []
        if slow:
            raise SystemExit(f"too slow: {', '.join(slow)}")


if __name__ == "__main__":
    main()
