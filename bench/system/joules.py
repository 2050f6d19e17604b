"""Joules that the machine itself counts: RAPL of processors, NVML of NVIDIA's accelerators, no estimates.

RAPL counts whole packages, with whatever else ran on them, and without their memory. What a package consists
of (cores, graphics) has counters of its own below it, which are part of it and are not read.

Source: Linux kernel, "Power Capping Framework" (powercap.rst), on energy_uj and max_energy_range_uj; NVIDIA,
"NVML API Reference", nvmlDeviceGetTotalEnergyConsumption.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

POWERCAP = Path("/sys/class/powercap")
_EVERY = 30.0
"""Seconds between readings: a counter of 262 kJ, as many packages have, is round after 9 minutes at 480 W."""


class NoMeter(Exception):
    """Nothing here counts joules that may be read; says why."""


class Counter(NamedTuple):
    """What counts joules.

    Attributes:
        read: Gives joules since some moment; raises OSError if it cannot any more.
        wraps: Joules at which it starts from 0 again; infinite if it does not.
    """

    read: Callable[[], float]
    wraps: float = math.inf


class Meter:
    """Joules of some counters since it was made.

    A thread of its own reads them often enough that none starts again twice unseen, until `close`.

    Args:
        counters: At least one.
        source: What they are, such as `RAPL, 2 packages`.
        every: Seconds between readings.
    """

    def __init__(self, counters: Sequence[Counter], source: str, every: float = _EVERY) -> None:
        self.source = source
        self._counters = counters
        self._lock, self._over = threading.Lock(), threading.Event()
        self._last = [counter.read() for counter in counters]
        self._joules = 0.0
        self._every = every
        threading.Thread(target=self._watch, daemon=True, name="energy").start()

    @property
    def joules(self) -> float | None:
        """Since the start; None if a counter could not be read in between, or went backwards."""
        with self._lock:
            for place, counter in enumerate(self._counters):
                try:
                    now = counter.read()
                except OSError:
                    now = math.nan
                last, self._last[place] = self._last[place], now
                self._joules += now - last + (counter.wraps if now < last else 0.0)
            return self._joules if math.isfinite(self._joules) else None

    def close(self) -> None:
        """Ends the reading."""
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(self._every):
            _ = self.joules


def meter(accelerator: str | None = None, powercap: Path = POWERCAP) -> Meter:
    """A meter of what this machine counts.

    Args:
        accelerator: UUID of the NVIDIA accelerator that computes, `GPU-..`; None if none does.
        powercap: Where Linux has the counters of the processor.

    Raises:
        NoMeter: If there is nothing to read: of an accelerator that computes, its own counter is needed.
    """
    counters: list[Counter] = []
    sources: list[str] = []
    if accelerator is not None:
        counters.append(nvml(accelerator))
        sources.append("NVML")
    try:
        packages = rapl(powercap)
    except NoMeter:
        if not counters:
            raise
    else:
        counters += packages
        sources.append(f"RAPL, {len(packages)} package" + ("s" if len(packages) > 1 else ""))
    try:
        return Meter(counters, " and ".join(sources))
    except OSError as error:
        raise NoMeter(f"a counter cannot be read: {error}") from None


def rapl(powercap: Path = POWERCAP) -> list[Counter]:
    """A counter for each package of the processor.

    Raises:
        NoMeter: If there is none, or they may not be read.
    """
    found = []
    for zone in sorted(powercap.glob("intel-rapl:*")):
        try:
            if not (zone / "name").read_text().startswith("package"):
                continue  # a part of a package, or the platform, of which packages are a part
            wraps = int((zone / "max_energy_range_uj").read_text()) / 1e6
            counter = Counter(partial(_joules, zone / "energy_uj"), wraps)
            counter.read()
        except PermissionError:
            raise NoMeter(f"{zone / 'energy_uj'} may not be read by this user") from None
        except OSError as error:
            raise NoMeter(f"{zone} cannot be read: {error.strerror or error}") from None
        found.append(counter)
    if not found:
        raise NoMeter(f"{powercap} has no counter of a processor's package")
    return found


def _joules(file: Path) -> float:
    try:
        return int(file.read_text()) / 1e6
    except ValueError as error:
        raise OSError(f"{file} holds no number") from error


def nvml(uuid: str) -> Counter:
    """The counter of an NVIDIA accelerator.

    Raises:
        NoMeter: If it has none, or the package that reads it is not installed.
    """
    try:
        import pynvml
    except ImportError:
        raise NoMeter(
            "an accelerator's energy needs nvidia-ml-py: pip install 'posterior-bench[energy]'"
        ) from None

    def read() -> float:
        try:
            return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3
        except pynvml.NVMLError as error:
            raise OSError(str(error)) from error

    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        read()
    except (pynvml.NVMLError, OSError) as error:
        raise NoMeter(f"NVML counts no energy of {uuid}: {error}") from None
    return Counter(read)
