"""Energy of a run: counters that start again, packages and their parts, starts that add up."""

import json
import math
import sys
import types
from pathlib import Path

import pytest
from pydantic import ValidationError

import bench
from bench.errors import UsageError
from bench.runs import records
from bench.runs.claim import Claim
from bench.system import joules
from bench.system.joules import Counter, Meter, NoMeter

RANGE = 262_143_328_850
"""Microjoules after which a counter starts again, as processors have it."""


def zone(root, name, kind, microjoules, wraps=RANGE):
    """A zone as the kernel shows it."""
    folder = root / name
    folder.mkdir(parents=True)
    for file, content in (("name", kind), ("energy_uj", microjoules), ("max_energy_range_uj", wraps)):
        (folder / file).write_text(f"{content}\n")
    return folder / "energy_uj"


@pytest.fixture
def powercap(tmp_path):
    """Two packages with parts, the whole platform, and the second door to the first package."""
    root = tmp_path / "powercap"
    files = [zone(root, f"intel-rapl:{k}", f"package-{k}", 5_000_000) for k in (0, 1)]
    for name, kind in (("intel-rapl:0:0", "core"), ("intel-rapl:0:1", "dram"), ("intel-rapl:1:0", "core")):
        zone(root, name, kind, 7_000_000)
    zone(root, "intel-rapl:2", "psys", 90_000_000)
    zone(root, "intel-rapl-mmio:0", "package-0", 5_000_000)
    (root / "intel-rapl").mkdir()
    return root, files


def test_two_packages_are_summed_and_their_parts_are_not_counted_twice(powercap):
    """The cheat that it must see: parts, platform or a second door in the sum, all of which grow here too."""
    root, (first, second) = powercap
    meter = joules.meter(powercap=root)
    assert meter.source == "RAPL, 2 packages"
    assert meter.joules == 0
    for file in root.glob("*/energy_uj"):
        file.write_text("1005000000")
    first.write_text(str(5_000_000 + 40_000_000))
    second.write_text(str(5_000_000 + 2_500_000))
    assert meter.joules == pytest.approx(42.5)
    meter.close()


def test_a_counter_that_starts_again_goes_on(powercap):
    """Twice, seen each time: joules are the way round, not the difference."""
    root, (first, _) = powercap
    first.write_text(str(RANGE - 1_000_000))
    meter = joules.meter(powercap=root)
    first.write_text("3000000")
    assert meter.joules == pytest.approx(4.0)
    first.write_text(str(RANGE - 1_000_000))
    assert meter.joules == pytest.approx(4.0 + RANGE / 1e6 - 4.0)
    first.write_text("0")
    assert meter.joules == pytest.approx(RANGE / 1e6 + 1.0)
    meter.close()


def test_readings_come_often_enough_that_no_round_is_missed():
    """A counter of 10 J that goes round between two questions: the thread of the meter has seen it."""
    import time

    at = iter([0.0, *(7.0, 4.0, 1.0, 8.0)])
    last = [0.0]

    def read():
        last[0] = next(at, last[0])
        return last[0]

    meter = Meter([Counter(read, 10.0)], "made up", every=0.01)
    deadline = time.monotonic() + 30
    while meter.joules != 28.0 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert meter.joules == 28.0
    meter.close()


@pytest.mark.parametrize("values", [[0.0, math.nan], [5.0, 4.0], [0.0, OSError("gone")]])
def test_what_cannot_be_read_any_more_or_goes_backwards_is_unknown_from_then_on(values):
    given = iter(values)

    def read():
        value = next(given, 9.0)
        if isinstance(value, OSError):
            raise value
        return value

    meter = Meter([Counter(read)], "made up")
    assert meter.joules is None
    assert meter.joules is None
    meter.close()


def test_no_counters_and_no_permission_are_said_in_a_line(powercap, tmp_path, monkeypatch):
    root, (first, _) = powercap
    with pytest.raises(NoMeter, match=r"nothing-here has no counter of a processor's package$"):
        joules.meter(powercap=tmp_path / "nothing-here")
    read_text = Path.read_text

    def refused(path, *given, **more):
        if path == first:
            raise PermissionError(13, "Permission denied", str(path))
        return read_text(path, *given, **more)

    monkeypatch.setattr(Path, "read_text", refused)
    with pytest.raises(NoMeter, match=r"intel-rapl:0/energy_uj may not be read by this user$"):
        joules.meter(powercap=root)
    monkeypatch.undo()
    first.write_text("many")
    with pytest.raises(NoMeter, match=r"cannot be read"):
        joules.meter(powercap=root)


class FakeNVML(types.ModuleType):
    """What is asked of pynvml."""

    class NVMLError(Exception):
        """As theirs."""

    millijoules = 1000

    def nvmlInit(self):
        """Nothing."""

    def nvmlDeviceGetHandleByUUID(self, uuid):
        """Knows one."""
        if uuid != "GPU-1":
            raise self.NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        """Since the driver was loaded."""
        return self.millijoules


def test_an_accelerator_is_counted_beside_the_packages(powercap, monkeypatch):
    fake = FakeNVML("pynvml")
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    root, (first, _) = powercap
    meter = joules.meter("GPU-1", root)
    assert meter.source == "NVML and RAPL, 2 packages"
    fake.millijoules += 2500
    first.write_text(str(5_000_000 + 1_000_000))
    assert meter.joules == pytest.approx(3.5)
    meter.close()
    alone = joules.meter("GPU-1", root / "none")
    assert alone.source == "NVML"
    alone.close()
    with pytest.raises(NoMeter, match=r"^NVML counts no energy of GPU-2: Not Found$"):
        joules.meter("GPU-2", root)


def test_without_its_package_an_accelerator_is_not_measured_by_the_processor_alone(powercap, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(NoMeter, match=r"pip install 'posterior-bench\[energy\]'"):
        joules.meter("GPU-1", powercap[0])


# ---- the run


class Fixed:
    """A meter that has counted so many joules."""

    def __init__(self, counted, source="RAPL, 1 package"):
        self.joules, self.source = counted, source

    def close(self):
        """Nothing."""


def start(folder, meter):
    """A start of a run, which ends before the run does."""
    claim = Claim(folder, {"seed": 0}, meter)
    claim.keep()
    return claim.energy


def test_starts_of_a_run_add_up(tmp_path):
    """As its seconds do; a start that was not measured, or by other counters, makes the sum unknown."""
    assert start(tmp_path, Fixed(20.0)) == records.RecordedEnergy(joules=20.0, source="RAPL, 1 package")
    assert start(tmp_path, Fixed(5.5)).joules == 25.5
    assert json.loads((tmp_path / "unfinished.json").read_text())["energy"]["joules"] == 25.5
    assert start(tmp_path, Fixed(1.0, "NVML")) is None
    assert start(tmp_path, Fixed(1.0)) is None  # the start before has none
    (tmp_path / "unfinished.json").unlink()
    assert start(tmp_path, Fixed(1.0)).joules == 1.0
    assert start(tmp_path, None) is None
    assert start(tmp_path, Fixed(1.0)) is None
    (tmp_path / "unfinished.json").unlink()
    assert start(tmp_path, Fixed(None)) is None


@pytest.mark.parametrize("energy", [{"joules": -1, "source": "x"}, {"joules": "many"}, 3])
def test_a_damaged_count_is_told(tmp_path, energy):
    (tmp_path / "unfinished.json").write_text(json.dumps({"seed": 0, "seconds": 1.0, "energy": energy}))
    with pytest.raises(UsageError, match="damaged"):
        Claim(tmp_path, {"seed": 0}, Fixed(1.0))


@pytest.mark.parametrize("counted", [-1.0, math.nan, math.inf])
def test_no_record_has_energy_that_is_none(counted):
    with pytest.raises(ValidationError):
        records.RecordedEnergy(joules=counted, source="RAPL, 1 package")


def test_a_run_records_what_was_counted_and_says_why_not_only_to_those_who_ask(tmp_path, monkeypatch, capsys):
    from rich.console import Console

    from bench.commands.results import print_record

    given = {"preset": "smoke", "out": tmp_path}
    monkeypatch.setattr(joules, "meter", lambda accelerator: Fixed(1234.5))
    done = bench.run("map", "split_digits", **given)
    assert done.record.energy == records.RecordedEnergy(joules=1234.5, source="RAPL, 1 package")
    print_record(done.directory, Console(width=200))
    assert "J (RAPL, 1 package" in capsys.readouterr().out

    def none(accelerator):
        raise NoMeter("nothing counts")

    monkeypatch.setattr(joules, "meter", none)
    silent = bench.run("map", "split_digits", seed=1, **given)
    asked = bench.run("map", "split_digits", seed=2, energy=True, **given)
    assert silent.record.energy is asked.record.energy is None
    assert silent.notices == ()
    assert asked.notices == ("no energy is recorded: nothing counts",)
    print_record(silent.directory, Console(width=200))
    assert " J (" not in capsys.readouterr().out
    old = json.loads((silent.directory / "record.json").read_text())
    del old["energy"]  # as records were before it was counted
    (silent.directory / "record.json").write_text(json.dumps(old))
    assert records.read_record(silent.directory).energy is None
