"""Interleaved timing, shared by the benchmarks: contenders take turns, so that other load falls on all."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

__all__ = ["heading", "interleaved", "median", "print_table", "processor", "ratio", "seconds", "write"]

Step = Callable[[], object]

WARM_UP_STEPS = 3
SECONDS_PER_TURN = 0.03


def seconds(run: Step, times: int, clock: Callable[[], float] = time.process_time) -> float:
    began = clock()
    for _ in range(times):
        run()
    return (clock() - began) / times


def interleaved(
    runs: dict[str, Step],
    rounds: int,
    turn: float = SECONDS_PER_TURN,
    clock: Callable[[], float] = time.process_time,
) -> dict[str, list[float]]:
    """Seconds per call in every round, by the clock; each round begins with another contender."""
    names = list(runs)
    for run in runs.values():
        seconds(run, WARM_UP_STEPS)
    times = {name: max(1, round(turn / seconds(run, 1, clock))) for name, run in runs.items()}
    measured: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            measured[name].append(seconds(runs[name], times[name], clock))
    return measured


def ratio(measured: dict[str, list[float]], name: str, to: str) -> float:
    """Median over the rounds of one contender's time over another's in the same round."""
    return median(a / b for a, b in zip(measured[name], measured[to], strict=True))


def quartiles(measured: dict[str, list[float]], name: str, to: str) -> tuple[float, float]:
    """Lower and upper quartile of the same ratios."""
    ratios = sorted(a / b for a, b in zip(measured[name], measured[to], strict=True))
    return ratios[(len(ratios) - 1) // 4], ratios[-1 - (len(ratios) - 1) // 4]


def processor() -> str:
    """Model of the processor."""
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def heading(device: str = "cpu") -> dict[str, str]:
    """The day, the device, and the versions of Python and torch.

    Args:
        device: Where was measured, as torch names it.
    """
    if device == "cpu":
        model = processor()
    else:
        import torch  # slow, and not wanted by every benchmark

        model = torch.cuda.get_device_name(device)
    about = {"date": datetime.date.today().isoformat(), "device": model}
    return about | {"python": platform.python_version(), "torch": importlib.metadata.version("torch")}


def write(path: Path, found: dict, device: str = "cpu") -> None:
    """Writes what was found as JSON, under the `heading`.

    Args:
        path: The file.
        found: By name; what stands there under a name of the heading replaces it.
        device: Where it was measured, as torch names it.
    """
    path.write_text(json.dumps(heading(device) | found, indent=2) + "\n")


def print_table(rows: list[dict]) -> None:
    """Prints rows as Markdown, with the keys as header."""
    print("| " + " | ".join(rows[0]) + " |\n" + "|---" * len(rows[0]) + "|")
    for row in rows:
        cells = (f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values())
        print("| " + " | ".join(cells) + " |")
