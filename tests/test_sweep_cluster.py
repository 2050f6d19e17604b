"""Sweeps on clusters: node and driver are killed, and every record has the digest of the sequential sweep.

Ray's own cluster utility gives two nodes on this machine, submitit's local executor the jobs of a Slurm.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench import cli
from bench.runs.plan import Plan
from bench.runs.records import read_record
from bench.settings import build
from bench.sweep import cells, worker
from bench.sweep.sweep import cells as cells_of
from bench.sweep.sweep import directory_of, run_cell
from bench.system.files import is_locked

METHODS = ["map", "mfvi", "radial"]
TASKS = ["toys:Held", "toys:EqualParameters", "tunables:Distance"]
GRID = {"methods": METHODS, "tasks": TASKS, "seeds": [0, 1, 2]}
FLAGS = ["sweep", "--methods", *METHODS, "--tasks", *TASKS, "--seeds", "0-2"]

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning:ray")]


def needs(package):
    """Skips where a package is not installed, unless BENCH_REQUIRE_DATA asks for all tests."""
    if os.environ.get("BENCH_REQUIRE_DATA") == "1":
        return
    pytest.importorskip(
        package, reason=f"{package} is not installed: pip install 'posterior-bench[ray,slurm]'"
    )


@pytest.fixture(scope="module")
def sequential(tmp_path_factory):
    """Digests of the 27 runs by directory, one after another in this process."""
    out = tmp_path_factory.mktemp("sequential")
    return digests(out, [run_cell(cell).directory for cell in cells_of(GRID, out=out, threads=1)])


def digests(out, directories):
    """Digests of runs by their directories below a folder."""
    return {str(d.relative_to(out)): read_record(d).provenance.arrays_digest for d in directories}


def states(out=Path("runs")):
    """How the cells of the last sweep stand."""
    with contextlib.suppress(cells.UsageError):
        return [each.state for each in cells.standings(out)]
    return []


def until(condition, seconds=300):
    """Waits for a condition."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder, and processes that find the toys."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    return tmp_path


@contextlib.contextmanager
def driver(*flags):
    """A sweep in a process of its own, which is killed at the end of the block."""
    with Path("driver.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "bench", *FLAGS, *flags], stdout=log, stderr=log
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def finish(capsys, *flags):
    """The same command in this process; the directories that it prints."""
    code = cli.main([*FLAGS, *flags])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    return [Path(line).absolute() for line in printed.out.splitlines()]


def test_sweep_on_ray_survives_the_death_of_a_node_and_of_the_driver(here, monkeypatch, capsys, sequential):
    needs("ray")
    held = here / "held"
    held.touch()
    for name, value in {
        "RAY_AUTH_MODE": "disabled",  # writes no token into the home of who runs the tests
        "RAY_worker_niceness": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "HELD": str(held),  # a node that died between two cells would have none to try again
    }.items():
        monkeypatch.setenv(name, value)
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        second = cluster.add_node(num_cpus=1)
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        with driver("--workers", "ray"):
            until(lambda: states().count("running") == 2)  # one on each node
            cluster.remove_node(second, allow_graceful=False)
            until(lambda: "tried again" in Path("driver.log").read_text())
            held.unlink()
            done = states().count("completed")
            until(lambda: done < states().count("completed") < 27)
        assert 0 < states().count("completed") < 27
        found = finish(capsys, "--workers", "ray")
    finally:
        cluster.shutdown()
    assert digests(here / "runs", found) == sequential
    assert len(sequential) == 27


def test_sweep_by_submitit_survives_the_death_of_the_driver(here, capsys, sequential):
    """The jobs outlive the driver; the next one waits for the cells that they are at."""
    needs("submitit")
    flags = ("--workers", "slurm", "--cluster.manager", "local", "--cluster.cells", "14")
    with driver(*flags):
        until(lambda: "running" in states())
    assert states().count("completed") < 27
    found = finish(capsys, *flags)
    assert digests(here / "runs", found) == sequential


PREEMPTION = """
import json, os, signal, sys, time
from pathlib import Path
while json.loads(Path(sys.argv[1]).read_text()).get("share") != 0.2 if Path(sys.argv[1]).exists() else True:
    time.sleep(0.1)
os.kill(int(sys.argv[2]), signal.SIGUSR2)
"""


def test_preempted_job_stops_its_cell_and_is_put_back(here, monkeypatch):
    needs("submitit")
    from bench.sweep.workers_slurm import Pack

    monkeypatch.setenv("WAITS_IN_FIT", "2")
    plan = build(Plan, {"method": "toys:Waits", "task": "toys:OwnTask", "out": here / "runs", "threads": 1})
    note = cells.Note.of(plan)
    job = Pack([worker.message(plan, note.log)], {}, str(here))

    def preempt(number, frame):
        raised.append(job.checkpoint())
        raise SystemExit

    raised = []
    before = signal.signal(signal.SIGUSR2, preempt)
    preemption = [sys.executable, "-c", PREEMPTION, note.path, str(os.getpid())]
    with subprocess.Popen(preemption), pytest.raises(SystemExit):
        job()
    signal.signal(signal.SIGUSR2, before)
    assert not is_locked(directory_of(plan))
    assert cells.standing("", "", note).state == "unfinished"
    (delayed,) = raised
    assert json.loads(delayed.function.lines[0])["cell"]["method"] == "toys:Waits"
    assert delayed.function is not job
